//! The connection of one request thread, with the means to cut it: checked connect to one address after the other, reads
//! and writes that end in time. ureq speaks HTTP and TLS over it.
//!
//! Used on the threads `outbox-http`; cut from the publisher thread. ureq's own connector is not used, for four reasons.
//! It resolves the name before each request, on an unnamed thread that panics if it cannot start. It leaves an address
//! for the next only if TCP fails, not if TLS does. Its write timeout starts again with each byte that a slow peer
//! accepts, at any rate. And this module must check the address that the socket connects to.

use super::answer;
use crate::Deadline;
use crate::down::{DownReason, Fault};
use crate::lookup::Host;
use crate::tls;
use crate::transfer::{Transfer, TransferLimits, look_every, unacknowledged};
use socket2::{Domain, Protocol, Socket, Type};
use std::io::{self, Read};
use std::net::{Shutdown, SocketAddr};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::{Duration, Instant};
use ureq::http::StatusCode;
use ureq::unversioned::resolver::{ResolvedSocketAddrs, Resolver};
use ureq::unversioned::transport::{
    Buffers, ConnectionDetails, Connector, LazyBuffers, NextTimeout, RustlsConnector, Transport,
};
use ureq::{Error, Timeout};

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
    host: Arc<Host>,
    state: Mutex<LineState>,
    /// Events since the last request began: a connection was started; it was completed, including TLS; a byte of an
    /// answer arrived.
    is_fresh: AtomicBool,
    is_made: AtomicBool,
    has_received: AtomicBool,
    /// The status of the answer; 0 = its line has not arrived.
    status: AtomicU16,
}

#[derive(Debug)]
struct LineState {
    is_cut: bool,
    /// The request that is on its way, or the last one.
    transfer: Transfer,
    /// The newest socket: the thread has one connection at a time. Weak, so that the thread closes it when it drops it.
    socket: Weak<Socket>,
    /// Where it leads.
    address: Option<SocketAddr>,
}

impl Line {
    pub(crate) fn new(host: Arc<Host>) -> Self {
        Self {
            host,
            state: Mutex::new(LineState {
                is_cut: false,
                transfer: Transfer::begin(Instant::now()),
                socket: Weak::new(),
                address: None,
            }),
            is_fresh: AtomicBool::new(false),
            is_made: AtomicBool::new(false),
            has_received: AtomicBool::new(false),
            status: AtomicU16::new(0),
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
        self.host.wake();
    }

    pub(crate) fn is_cut(&self) -> bool {
        self.state().is_cut
    }

    pub(crate) fn begin_request(&self) {
        for flag in [&self.is_fresh, &self.is_made, &self.has_received] {
            flag.store(false, Ordering::Relaxed);
        }
        self.status.store(0, Ordering::Relaxed);
        self.state().transfer = Transfer::begin(Instant::now());
    }

    /// How far the request is.
    pub(crate) fn transfer(&self) -> Transfer {
        self.state().transfer
    }

    /// Records that the peer has taken this number of bytes more, and whether it has all of the request.
    fn record_taken(&self, bytes: u64, is_sent: bool, limits: TransferLimits) -> Transfer {
        let (transfer, now) = (&mut self.state().transfer, Instant::now());
        transfer.record_taken(bytes, limits, now);
        if is_sent {
            transfer.sent(now);
        }
        *transfer
    }

    /// The status of the answer, if its line has arrived, whatever came behind it.
    pub(crate) fn status(&self) -> Option<StatusCode> {
        StatusCode::from_u16(self.status.load(Ordering::Relaxed)).ok()
    }

    /// Whether a connection was started and not completed.
    pub(crate) fn is_half_made(&self) -> bool {
        self.is_fresh.load(Ordering::Relaxed) && !self.is_made.load(Ordering::Relaxed)
    }

    /// Whether the peer sent nothing over a reused connection: it may have closed that just before the request.
    pub(crate) fn may_have_been_stale(&self) -> bool {
        !self.is_fresh.load(Ordering::Relaxed) && !self.has_received.load(Ordering::Relaxed)
    }

    /// Records whether the peer answered a request. If not, the next connect begins with another address: without TLS
    /// nothing shows earlier that a peer which accepts connections does not work.
    pub(crate) fn record_answer(&self, has_answered: bool) {
        let address = self.state().address;
        match address {
            Some(address) if has_answered => self.host.answered(address),
            Some(address) if !self.is_half_made() => self.host.failed(address),
            _ => {}
        }
    }

    fn state(&self) -> MutexGuard<'_, LineState> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn hold(&self, socket: &Arc<Socket>, address: SocketAddr) -> Result<(), Error> {
        let mut state = self.state();
        if state.is_cut {
            return Err(cut());
        }
        state.socket = Arc::downgrade(socket);
        state.address = Some(address);
        Ok(())
    }
}

fn cut() -> Error {
    fault(DownReason::CLOSED, "the publisher was stopped")
}

// ---- connect --------------------------------------------------------------------------------------------------------

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

/// Opens the connections of one request thread: the first address that accepts one, with TLS if there is any.
#[derive(Debug)]
pub(crate) struct Dialer {
    pub(crate) line: Arc<Line>,
    pub(crate) tls: RustlsConnector,
    /// After this time a connection to a host with a name is not used again.
    pub(crate) connection_life: Duration,
    pub(crate) deadline: Deadline,
    pub(crate) limits: TransferLimits,
}

impl Connector<()> for Dialer {
    type Out = <RustlsConnector as Connector<HttpSocket>>::Out;

    fn connect(&self, details: &ConnectionDetails<'_>, _: Option<()>) -> Result<Option<Self::Out>, Error> {
        let until = end(details.timeout);
        let line = &self.line;
        line.is_fresh.store(true, Ordering::Relaxed);
        let addresses = line.host.addresses_blocking(until, || line.is_cut());
        let addresses = addresses.map_err(|fault| if line.is_cut() { cut() } else { failed(fault) })?;
        let mut connect = line.host.connect(addresses, until);
        while let Some((address, limit)) = connect.next() {
            match self.connect_to(address, limit, details) {
                Ok(connection) => return Ok(connection),
                Err(_) if line.is_cut() => return Err(cut()),
                Err(fault) => connect.failed(address, fault),
            }
        }
        Err(failed(connect.fault()))
    }
}

impl Dialer {
    fn connect_to(
        &self,
        address: SocketAddr,
        limit: Duration,
        details: &ConnectionDetails<'_>,
    ) -> Result<Option<<Self as Connector>::Out>, Fault> {
        let until = Instant::now() + limit;
        let socket = dial(&self.line, address, limit).map_err(|error| match error.kind() {
            io::ErrorKind::TimedOut => Fault::new(DownReason::TIMEOUT, format!("{address}: no connection in time")),
            io::ErrorKind::ConnectionReset => Fault::of_connect(DownReason::CLOSED, &error, address), // accepted first
            _ => Fault::of_connect(DownReason::UNREACHABLE, &error, address),
        })?;
        let socket = HttpSocket {
            socket,
            line: Arc::clone(&self.line),
            deadline: self.deadline.clone(),
            ends_at: self
                .line
                .host
                .life(self.connection_life)
                .map(|life| Instant::now() + life),
            limits: self.limits,
            written: 0,
            taken: 0,
            buffers: LazyBuffers::new(details.config.input_buffer_size(), details.config.output_buffer_size()),
            is_write_broken: false,
            is_reused: false,
        };
        let left = until.saturating_duration_since(Instant::now());
        let details = ConnectionDetails {
            uri: details.uri,
            addrs: details.addrs.clone(),
            config: details.config,
            request_level: details.request_level,
            resolver: details.resolver,
            now: (details.current_time)(),
            timeout: NextTimeout {
                after: left.into(),
                ..details.timeout
            },
            current_time: Arc::clone(&details.current_time),
            run_connector: Arc::clone(&details.run_connector),
            register_shutdown: Arc::clone(&details.register_shutdown),
        };
        self.tls
            .connect(&details, Some(socket))
            .map_err(|error| tls_fault(error, limit))
    }
}

/// Why a TLS handshake failed.
fn tls_fault(error: Error, limit: Duration) -> Fault {
    let failed = |text| Fault::new(DownReason::TLS_FAILED, text);
    match error {
        Error::Other(error) => error
            .downcast()
            .map_or_else(|error| failed(error.to_string()), |fault| *fault),
        Error::Timeout(_) => Fault::new(DownReason::TIMEOUT, format!("no connection within {limit:.1?}")),
        Error::Rustls(error) => tls::fault(&error),
        Error::Io(error) => match tls::error_in(&error) {
            Some(error) => tls::fault(error),
            None if is_end(&error) => failed("the peer closed the connection during the handshake".to_owned()),
            None => Fault::new(DownReason::CLOSED, error.to_string()),
        },
        Error::Tls(text) => failed(text.to_owned()),
        _ => failed("the handshake failed".to_owned()),
    }
}

/// Whether the error means that the peer has closed the connection.
pub(crate) fn is_end(error: &io::Error) -> bool {
    use io::ErrorKind::*;
    matches!(
        error.kind(),
        UnexpectedEof | ConnectionReset | ConnectionAborted | BrokenPipe
    )
}

/// The last of the chained connectors. It runs once the connection is complete, including TLS.
#[derive(Debug)]
pub(crate) struct CompletionMark(pub(crate) Arc<Line>);

impl<In: Transport> Connector<In> for CompletionMark {
    type Out = WatchedConnection<In>;

    fn connect(&self, _: &ConnectionDetails<'_>, chained: Option<In>) -> Result<Option<WatchedConnection<In>>, Error> {
        self.0.is_made.store(true, Ordering::Relaxed);
        let line = Arc::clone(&self.0);
        Ok(chained.map(|connection| WatchedConnection { connection, line }))
    }
}

/// A connection, with TLS if there is any: it notices the bytes of an answer, and its status. A message of TLS is none,
/// such as that the peer closes the connection.
#[derive(Debug)]
pub(crate) struct WatchedConnection<In> {
    connection: In,
    line: Arc<Line>,
}

impl<In: Transport> Transport for WatchedConnection<In> {
    fn buffers(&mut self) -> &mut dyn Buffers {
        self.connection.buffers()
    }

    fn transmit_output(&mut self, amount: usize, timeout: NextTimeout) -> Result<(), Error> {
        self.connection.transmit_output(amount, timeout)
    }

    fn await_input(&mut self, timeout: NextTimeout) -> Result<bool, Error> {
        let has_received = self.connection.await_input(timeout)?;
        self.line.has_received.fetch_or(has_received, Ordering::Relaxed);
        // The answer begins the input until ureq has parsed its header. What it does with the body comes too late.
        if let Some(status) = answer::status_of(self.connection.buffers().input()) {
            self.line.status.store(status.as_u16(), Ordering::Relaxed);
        }
        Ok(has_received)
    }

    fn is_open(&mut self) -> bool {
        self.connection.is_open()
    }

    fn is_tls(&self) -> bool {
        self.connection.is_tls()
    }
}

fn dial(line: &Line, address: SocketAddr, limit: Duration) -> io::Result<Arc<Socket>> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    // A request is one or two writes. Nagle's algorithm would delay the second until the peer's TCP ack.
    socket.set_tcp_nodelay(true)?;
    let socket = Arc::new(socket);
    line.hold(&socket, address).map_err(Error::into_io)?;
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
    /// No request begins over it after this time.
    ends_at: Option<Instant>,
    limits: TransferLimits,
    /// The bytes that were written, and those of them that the peer was seen to have taken.
    written: u64,
    taken: u64,
    buffers: LazyBuffers,
    /// Whether a write failed because the peer reads no more. The peer may have sent the reason.
    is_write_broken: bool,
    /// Whether the connection has served a request.
    is_reused: bool,
}

impl HttpSocket {
    /// Waits until the socket is ready, or for as long as it takes until the progress is looked at again. `until` is a
    /// limit for a part of the request; the limits of a transfer hold for all of it.
    fn wait(&mut self, events: libc::c_short, until: Instant, reason: Timeout) -> Result<(), Error> {
        let transfer = self.look_at_progress(events == libc::POLLIN);
        let ends = transfer.ends_at(self.limits);
        let mut left = until.min(ends).saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(Error::Timeout(if until < ends { reason } else { Timeout::Global }));
        }
        if !transfer.is_sent() {
            left = left.min(look_every(self.limits.timeout));
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

    /// What the peer has taken of the request. ureq waits for input once it has written all, except in a handshake.
    fn look_at_progress(&mut self, waits_for_input: bool) -> Transfer {
        let unacknowledged = unacknowledged(&*self.socket);
        let taken = self.written.saturating_sub(unacknowledged).max(self.taken);
        let more = taken - std::mem::replace(&mut self.taken, taken);
        let is_sent = waits_for_input && unacknowledged == 0 && !self.line.is_half_made();
        self.line.record_taken(more, is_sent, self.limits)
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
                return Err(fault(DownReason::CLOSED, "the lease has expired"));
            }
            let rest = &self.buffers.output()[sent..amount];
            match self.socket.send_with_flags(rest, libc::MSG_NOSIGNAL) {
                Ok(bytes) => {
                    sent += bytes;
                    self.written += bytes as u64;
                }
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

    /// Whether the connection may be used for another request: it is open and not too old, and no unexpected byte has
    /// arrived.
    ///
    /// A firewall may have forgotten the connection while it was idle, and drop what is sent. The kernel gives it up
    /// then, long before the timeout for an answer. Not on a new connection: TCP_USER_TIMEOUT also ends one whose peer
    /// acknowledges all and reads nothing for that long, and a large message must arrive at a slow reader.
    fn is_open(&mut self) -> bool {
        let silent =
            || matches!((&*self.socket).read(&mut [0]), Err(error) if error.kind() == io::ErrorKind::WouldBlock);
        let is_old = || self.ends_at.is_some_and(|at| at <= Instant::now());
        let is_open = !self.is_write_broken && !self.line.is_cut() && !is_old() && silent();
        if is_open && !self.is_reused {
            self.is_reused = self.socket.set_tcp_user_timeout(Some(ACKNOWLEDGED_WITHIN)).is_ok();
        }
        is_open
    }
}
