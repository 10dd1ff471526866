//! The connection of one request thread, with the means to cut it: name lookup, checked connect, reads and writes that
//! end in time. ureq speaks HTTP and TLS over it.
//!
//! Used on the threads `outbox-http`; cut from the publisher thread. ureq's own connector is not used, for three
//! reasons. It resolves the name before each request, on an unnamed thread that panics if it cannot start. Its write
//! timeout starts again with each byte that a slow peer accepts. And this module must check the address that the socket
//! connects to.

use crate::Deadline;
use crate::addresses::share_of;
use crate::down::{DownReason, Fault, lookup_fault};
use crate::ssrf::AllowList;
use socket2::{Domain, Protocol, Socket, Type};
use std::io::{self, Read};
use std::net::{IpAddr, Shutdown, SocketAddr, ToSocketAddrs};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Weak};
use std::time::{Duration, Instant};
use ureq::unversioned::resolver::{ResolvedSocketAddrs, Resolver};
use ureq::unversioned::transport::{Buffers, ConnectionDetails, Connector, LazyBuffers, NextTimeout, Transport};
use ureq::{Error, Timeout};

/// The stack size for getaddrinfo and the modules that it loads.
const LOOKUP_STACK_BYTES: usize = 2 << 20;
/// How long the peer may leave bytes unacknowledged that were sent over a connection that was idle.
pub(crate) const ACKNOWLEDGED_WITHIN: Duration = Duration::from_secs(10);
/// The longest wait; a longer one would overflow a clock.
const WAIT_MAX: Duration = Duration::from_secs(3600);

fn fault(reason: DownReason, detail: impl Into<String>) -> Error {
    failed(Fault::new(reason, detail))
}

/// The fault as an error of ureq; [`Error::Other`] gives it back.
fn failed(fault: Fault) -> Error {
    Error::Other(Box::new(fault))
}

// ---- cutting the connection -----------------------------------------------------------------------------------------

/// The connection of one request thread, as the publisher thread sees it. Cutting it ends every wait of that thread.
#[derive(Debug)]
pub(crate) struct Line {
    lookup: Arc<HostLookup>,
    state: Mutex<LineState>,
    /// Events since the last request began: a connection was started; it was completed, including TLS; a byte of an
    /// answer arrived.
    is_fresh: AtomicBool,
    is_made: AtomicBool,
    has_received: AtomicBool,
}

#[derive(Debug, Default)]
struct LineState {
    is_cut: bool,
    /// The newest socket: the thread has one connection at a time. Weak, so that the thread closes it when it drops it.
    socket: Weak<Socket>,
}

impl Line {
    pub(crate) fn new(lookup: Arc<HostLookup>) -> Self {
        Self {
            lookup,
            state: Mutex::default(),
            is_fresh: AtomicBool::new(false),
            is_made: AtomicBool::new(false),
            has_received: AtomicBool::new(false),
        }
    }

    /// Ends the current wait of the thread, and every later one.
    pub(crate) fn cut(&self) {
        let socket = {
            let mut state = self.state();
            state.is_cut = true;
            state.socket.upgrade()
        };
        if let Some(socket) = socket {
            let _ = socket.shutdown(Shutdown::Both); // also ends a pending connect
        }
        self.lookup.wake();
    }

    pub(crate) fn is_cut(&self) -> bool {
        self.state().is_cut
    }

    pub(crate) fn begin_request(&self) {
        for flag in [&self.is_fresh, &self.is_made, &self.has_received] {
            flag.store(false, Ordering::Relaxed);
        }
    }

    /// Whether a connection was started and not completed.
    pub(crate) fn is_half_made(&self) -> bool {
        self.is_fresh.load(Ordering::Relaxed) && !self.is_made.load(Ordering::Relaxed)
    }

    /// Whether the peer sent nothing over a reused connection: it may have closed that just before the request.
    pub(crate) fn may_have_been_stale(&self) -> bool {
        !self.is_fresh.load(Ordering::Relaxed) && !self.has_received.load(Ordering::Relaxed)
    }

    fn state(&self) -> MutexGuard<'_, LineState> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn hold(&self, socket: &Arc<Socket>) -> Result<(), Error> {
        let mut state = self.state();
        if state.is_cut {
            return Err(cut());
        }
        state.socket = Arc::downgrade(socket);
        Ok(())
    }
}

fn cut() -> Error {
    fault(DownReason::Closed, "the publisher was stopped")
}

// ---- lookup ---------------------------------------------------------------------------------------------------------

/// Resolves one host, with one lookup at a time for all request threads. A lookup can hang for half a minute. It then
/// leaves one thread behind, not one for each request.
#[derive(Debug)]
pub(crate) struct HostLookup {
    host: String,
    port: u16,
    state: Mutex<LookupState>,
    changed: Condvar,
}

#[derive(Debug)]
struct LookupState {
    is_running: bool,
    ended: u64,
    found: Result<Vec<SocketAddr>, Fault>,
}

impl HostLookup {
    pub(crate) fn new(host: &str, port: u16) -> Self {
        Self {
            host: host.to_owned(),
            port,
            state: Mutex::new(LookupState {
                is_running: false,
                ended: 0,
                found: Ok(Vec::new()),
            }),
            changed: Condvar::new(),
        }
    }

    fn state(&self) -> MutexGuard<'_, LookupState> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn wake(&self) {
        // Locked for a moment: a thread that has just checked whether its connection is cut now waits for the
        // condition.
        drop(self.state());
        self.changed.notify_all();
    }

    fn resolve(self: &Arc<Self>, line: &Line, until: Instant) -> Result<Vec<SocketAddr>, Error> {
        if let Ok(address) = self.host.parse::<IpAddr>() {
            return Ok(vec![SocketAddr::new(address, self.port)]);
        }
        let mut state = self.state();
        if !state.is_running {
            self.begin().map_err(|error| failed(lookup_fault(&error)))?;
            state.is_running = true;
        }
        let before = state.ended;
        while state.ended == before {
            if line.is_cut() {
                return Err(cut());
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(fault(DownReason::Timeout, "resolving the host takes too long"));
            }
            let waited = self.changed.wait_timeout(state, left);
            state = waited.map_or_else(|poisoned| poisoned.into_inner().0, |(state, _)| state);
        }
        let found = state.found.clone();
        found.map_err(failed)
    }

    /// Starts a lookup on a thread, because getaddrinfo cannot be interrupted. The thread inherits the blocked signals.
    fn begin(self: &Arc<Self>) -> io::Result<()> {
        let lookup = Arc::clone(self);
        let thread = std::thread::Builder::new()
            .name("outbox-resolve".to_owned())
            .stack_size(LOOKUP_STACK_BYTES);
        thread.spawn(move || {
            let found = (lookup.host.as_str(), lookup.port).to_socket_addrs();
            let found = found.map(Iterator::collect).map_err(|error| lookup_fault(&error));
            let mut state = lookup.state();
            state.found = found;
            state.is_running = false;
            state.ended += 1;
            drop(state);
            lookup.changed.notify_all();
        })?;
        Ok(())
    }
}

/// A resolver without results: ureq calls it before each request, but `Dialer` resolves the host when it connects.
#[derive(Debug)]
pub(crate) struct NoResolver;

impl Resolver for NoResolver {
    fn resolve(
        &self,
        _: &ureq::http::Uri,
        _: &ureq::config::Config,
        _: NextTimeout,
    ) -> Result<ResolvedSocketAddrs, Error> {
        Ok(self.empty())
    }
}

// ---- connect --------------------------------------------------------------------------------------------------------

/// Opens the connections of one request thread.
#[derive(Debug)]
pub(crate) struct Dialer {
    pub(crate) line: Arc<Line>,
    pub(crate) allow: AllowList,
    pub(crate) deadline: Deadline,
}

impl Connector<()> for Dialer {
    type Out = HttpSocket;

    fn connect(&self, details: &ConnectionDetails<'_>, _: Option<()>) -> Result<Option<HttpSocket>, Error> {
        let until = end(details.timeout);
        let line = &self.line;
        line.is_fresh.store(true, Ordering::Relaxed);
        let addresses = line.lookup.resolve(line, until)?;
        let addresses = (self.allow.permitted(&line.lookup.host, addresses)).map_err(failed)?;
        let socket = dial(line, &addresses, until)?;
        Ok(Some(HttpSocket {
            socket,
            line: Arc::clone(line),
            deadline: self.deadline.clone(),
            buffers: LazyBuffers::new(details.config.input_buffer_size(), details.config.output_buffer_size()),
            is_write_broken: false,
            is_reused: false,
        }))
    }
}

/// The last of the chained connectors. It runs once the connection is complete, including TLS.
#[derive(Debug)]
pub(crate) struct CompletionMark(pub(crate) Arc<Line>);

impl<In: Transport> Connector<In> for CompletionMark {
    type Out = Received<In>;

    fn connect(&self, _: &ConnectionDetails<'_>, chained: Option<In>) -> Result<Option<Received<In>>, Error> {
        self.0.is_made.store(true, Ordering::Relaxed);
        let line = Arc::clone(&self.0);
        Ok(chained.map(|connection| Received { connection, line }))
    }
}

/// A connection, with TLS if there is any: it notices the bytes of an answer. A message of TLS is none, such as that
/// the peer closes the connection.
#[derive(Debug)]
pub(crate) struct Received<In> {
    connection: In,
    line: Arc<Line>,
}

impl<In: Transport> Transport for Received<In> {
    fn buffers(&mut self) -> &mut dyn Buffers {
        self.connection.buffers()
    }

    fn transmit_output(&mut self, amount: usize, timeout: NextTimeout) -> Result<(), Error> {
        self.connection.transmit_output(amount, timeout)
    }

    fn await_input(&mut self, timeout: NextTimeout) -> Result<bool, Error> {
        let has_received = self.connection.await_input(timeout)?;
        self.line.has_received.fetch_or(has_received, Ordering::Relaxed);
        Ok(has_received)
    }

    fn is_open(&mut self) -> bool {
        self.connection.is_open()
    }

    fn is_tls(&self) -> bool {
        self.connection.is_tls()
    }
}

/// Connects to the first address that accepts.
fn dial(line: &Line, addresses: &[SocketAddr], until: Instant) -> Result<Arc<Socket>, Error> {
    let mut last = fault(DownReason::Unreachable, "the host has no address");
    for (index, address) in addresses.iter().enumerate() {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            if index == 0 {
                last = fault(DownReason::Timeout, "no time was left to connect");
            }
            break;
        }
        let share = share_of(left, addresses.len() - index);
        match dial_one(line, *address, share) {
            Ok(socket) => return Ok(socket),
            Err(_) if line.is_cut() => return Err(cut()),
            Err(error) if error.kind() == io::ErrorKind::TimedOut => {
                last = fault(DownReason::Timeout, format!("{address}: no connection in time"));
            }
            Err(error) => {
                let reason = match error.kind() {
                    io::ErrorKind::ConnectionReset => DownReason::Closed, // the peer accepted, and closed immediately
                    _ => DownReason::Unreachable,
                };
                last = failed(Fault::of_connect(reason, &error, *address));
            }
        }
    }
    Err(last)
}

fn dial_one(line: &Line, address: SocketAddr, limit: Duration) -> io::Result<Arc<Socket>> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    // A request is one or two writes. Nagle's algorithm would delay the second until the peer's TCP ack.
    socket.set_tcp_nodelay(true)?;
    let socket = Arc::new(socket);
    line.hold(&socket).map_err(Error::into_io)?;
    socket.connect_timeout(&address.into(), limit)?;
    socket.set_nonblocking(true)?;
    Ok(socket)
}

fn end(timeout: NextTimeout) -> Instant {
    Instant::now() + (*timeout.after).min(WAIT_MAX)
}

// ---- read and write -------------------------------------------------------------------------------------------------

/// A connection, as ureq and rustls use it.
#[derive(Debug)]
pub(crate) struct HttpSocket {
    socket: Arc<Socket>,
    line: Arc<Line>,
    deadline: Deadline,
    buffers: LazyBuffers,
    /// Whether a write failed because the peer reads no more. The peer may have sent the reason.
    is_write_broken: bool,
    /// Whether the connection has served a request.
    is_reused: bool,
}

impl HttpSocket {
    /// Waits until the socket is ready or `until` has passed.
    fn wait(&self, events: libc::c_short, until: Instant, reason: Timeout) -> Result<(), Error> {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(Error::Timeout(reason));
        }
        let mut poll = libc::pollfd {
            fd: self.socket.as_raw_fd(),
            events,
            revents: 0,
        };
        // Rounded up; otherwise the last wait would spin.
        let ms = left.as_millis() as libc::c_int + 1;
        // SAFETY: one live pollfd. The caller tries again, so a signal or an error needs no care.
        unsafe { libc::poll(&mut poll, 1, ms) };
        Ok(())
    }
}

impl Transport for HttpSocket {
    fn buffers(&mut self) -> &mut dyn Buffers {
        &mut self.buffers
    }

    fn transmit_output(&mut self, amount: usize, timeout: NextTimeout) -> Result<(), Error> {
        let until = end(timeout);
        let mut sent = 0;
        while sent < amount && !self.is_write_broken {
            // A later byte could complete a message that another worker may have sent by now.
            if self.deadline.has_passed() {
                return Err(fault(DownReason::Closed, "the lease has expired"));
            }
            let rest = &self.buffers.output()[sent..amount];
            match self.socket.send_with_flags(rest, libc::MSG_NOSIGNAL) {
                Ok(bytes) => sent += bytes,
                Err(error) => match error.kind() {
                    io::ErrorKind::WouldBlock => self.wait(libc::POLLOUT, until, timeout.reason)?,
                    io::ErrorKind::Interrupted => {}
                    // A server that refuses a body (413) answers and closes before it has read the body. The answer is
                    // then in the socket's buffer. Without it, a message that is too large would be sent again forever.
                    io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => self.is_write_broken = true,
                    _ => return Err(error.into()),
                },
            }
        }
        Ok(())
    }

    fn await_input(&mut self, timeout: NextTimeout) -> Result<bool, Error> {
        let until = end(timeout);
        loop {
            let read = (&*self.socket).read(self.buffers.input_append_buf());
            match read {
                Ok(bytes) => {
                    self.buffers.input_appended(bytes);
                    return Ok(bytes > 0);
                }
                Err(error) => match error.kind() {
                    io::ErrorKind::WouldBlock => self.wait(libc::POLLIN, until, timeout.reason)?,
                    io::ErrorKind::Interrupted => {}
                    _ => return Err(error.into()),
                },
            }
        }
    }

    /// Whether the connection may be used for another request: it is open, and no unexpected byte has arrived.
    ///
    /// A firewall may have forgotten the connection while it was idle, and drop what is sent. The kernel gives it up
    /// then, long before the timeout for an answer. Not on a new connection: TCP_USER_TIMEOUT also ends one whose peer
    /// acknowledges all and reads nothing for that long, and a large message must arrive at a slow reader.
    fn is_open(&mut self) -> bool {
        let silent =
            || matches!((&*self.socket).read(&mut [0]), Err(error) if error.kind() == io::ErrorKind::WouldBlock);
        let is_open = !self.is_write_broken && !self.line.is_cut() && silent();
        if is_open && !self.is_reused {
            self.is_reused = self.socket.set_tcp_user_timeout(Some(ACKNOWLEDGED_WITHIN)).is_ok();
        }
        is_open
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connect_without_time_is_a_timeout_and_one_without_an_address_is_not() {
        let line = Line::new(Arc::new(HostLookup::new("127.0.0.1", 1)));
        let reason = |addresses: &[SocketAddr]| match dial(&line, addresses, Instant::now()) {
            Err(Error::Other(error)) => error.downcast_ref::<Fault>().map(|fault| fault.reason),
            _ => None,
        };
        assert_eq!(reason(&[([127, 0, 0, 1], 1).into()]), Some(DownReason::Timeout));
        assert_eq!(reason(&[]), Some(DownReason::Unreachable));
    }
}
