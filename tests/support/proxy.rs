//! A TCP proxy that simulates network failures. Tests put it in front of a broker.
//!
//! Each direction of a connection has a reader and a writer with a bounded queue between them. So a slow receiver makes
//! the sender wait, as without a proxy, and a delay adds latency without limiting the rate.

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::wait::pass_time_until;

/// What the proxy does with the bytes of every connection, old and new. A connection that lost bytes is broken: end it
/// with [`Proxy::reset_all`] before switching back to [`Mode::Pass`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// All bytes pass.
    Pass,
    /// Connections are accepted; their bytes are dropped in both directions.
    Blackhole,
    /// New connections are reset at once; old connections pass bytes.
    Refuse,
    /// Requests pass; the answers of the target are dropped.
    DropReplies,
    /// All bytes pass with this delay, in milliseconds, in each direction.
    Delay(u64),
}

/// A proxy on a separate port. Dropping it resets all connections.
pub struct Proxy {
    port: u16,
    state: Arc<State>,
    acceptor: Option<JoinHandle<()>>,
}

impl Proxy {
    /// Starts a proxy that listens on loopback and forwards to `target_port` of loopback.
    pub fn start(target_port: u16) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("listen on loopback");
        let port = listener.local_addr().expect("the address of a listener").port();
        let state = Arc::new(State {
            target_port,
            mode: Mutex::new(Mode::Pass),
            connections: Mutex::default(),
            accepted: AtomicUsize::new(0),
            closing: AtomicBool::new(false),
        });
        let shared = Arc::clone(&state);
        let acceptor = spawn(move || accept(&listener, &shared));
        Self {
            port,
            state,
            acceptor: Some(acceptor),
        }
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    pub fn url(&self) -> String {
        format!("amqp://127.0.0.1:{}", self.port)
    }

    pub fn mode(&self, mode: Mode) {
        *self.state.mode.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = mode;
    }

    /// The number of connections that clients have made so far, including refused ones.
    pub fn accepted(&self) -> usize {
        self.state.accepted.load(Ordering::Acquire)
    }

    /// Ends every connection with a reset, as a firewall or a crashed host does.
    pub fn reset_all(&self) {
        let connections = std::mem::take(&mut *self.state.connections());
        connections
            .iter()
            .filter_map(Weak::upgrade)
            .for_each(|connection| connection.abort());
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.state.closing.store(true, Ordering::Release);
        // The acceptor blocks in accept; a connection wakes it to read the flag.
        let _ = TcpStream::connect((Ipv4Addr::LOCALHOST, self.port));
        if let Some(acceptor) = self.acceptor.take() {
            let _ = acceptor.join();
        }
        self.reset_all();
    }
}

/// The state that the test and the proxy's threads share.
struct State {
    target_port: u16,
    /// Written by the test, read by the threads for every new connection and every chunk.
    mode: Mutex<Mode>,
    /// Written by the acceptor. Weak: a connection ends when its last thread ends.
    connections: Mutex<Vec<Weak<Connection>>>,
    accepted: AtomicUsize,
    closing: AtomicBool,
}

impl State {
    fn mode(&self) -> Mode {
        *self.mode.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn connections(&self) -> MutexGuard<'_, Vec<Weak<Connection>>> {
        self.connections.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// One connection, shared by its threads. The sockets are closed when the last thread drops it.
struct Connection {
    client: TcpStream,
    target: TcpStream,
    /// Set once, before the threads are woken: the end of a stream after that is not an orderly end.
    aborted: AtomicBool,
}

impl Connection {
    /// Makes both sides see a reset. The kernel sends the reset when all threads have dropped the sockets, so this
    /// function wakes the threads. At the client it shuts down only the reading half, since shutting down the writing
    /// half would announce an orderly end. At the target it shuts down both halves, for the writer may be blocked by a
    /// target that does not read.
    fn abort(&self) {
        self.aborted.store(true, Ordering::Release);
        reset_on_close(&self.client);
        reset_on_close(&self.target);
        // Errors mean that the connection has ended already.
        let _ = self.client.shutdown(Shutdown::Read);
        let _ = self.target.shutdown(Shutdown::Both);
    }
}

// From here on: the threads of the proxy.

fn accept(listener: &TcpListener, state: &Arc<State>) {
    for client in listener.incoming() {
        if state.closing.load(Ordering::Acquire) {
            return;
        }
        // The error belongs to that connection (the client reset it before the accept), not to the listener.
        let Ok(client) = client else { continue };
        state.accepted.fetch_add(1, Ordering::AcqRel);
        match state.mode() {
            Mode::Refuse => reset_on_close(&client),
            _ => open(client, state),
        }
    }
}

fn open(client: TcpStream, state: &Arc<State>) {
    // In mode Blackhole too: the kernel accepts connections for a target that hangs.
    let Ok(target) = TcpStream::connect((Ipv4Addr::LOCALHOST, state.target_port)) else {
        // The closest to "refused" that an accepted connection can come.
        return reset_on_close(&client);
    };
    for stream in [&client, &target] {
        stream.set_nodelay(true).expect("set an option of an open socket");
    }
    let connection = Arc::new(Connection {
        client,
        target,
        aborted: AtomicBool::new(false),
    });
    state.connections().push(Arc::downgrade(&connection));
    forward(&connection, state, Direction::Request);
    forward(&connection, state, Direction::Reply);
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Direction {
    Request,
    Reply,
}

enum Item {
    Bytes { due: Instant, bytes: Vec<u8> },
    End,
}

/// The number of chunks that may wait in one direction; when it is reached, the reader stops reading.
const QUEUED_CHUNKS: usize = 64;
const CHUNK_BYTES: usize = 65_536;

fn forward(connection: &Arc<Connection>, state: &Arc<State>, direction: Direction) {
    let (queue, items) = sync_channel(QUEUED_CHUNKS);
    let (reading, writing, state) = (Arc::clone(connection), Arc::clone(connection), Arc::clone(state));
    spawn(move || read(&reading, &state, direction, &queue));
    spawn(move || write(&writing, direction, &items));
}

fn read(connection: &Connection, state: &State, direction: Direction, queue: &SyncSender<Item>) {
    let mut from = match direction {
        Direction::Request => &connection.client,
        Direction::Reply => &connection.target,
    };
    let mut buffer = vec![0; CHUNK_BYTES];
    loop {
        let length = match from.read(&mut buffer) {
            Ok(length) => length,
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            Err(_) => return connection.abort(),
        };
        if connection.aborted.load(Ordering::Acquire) {
            return;
        }
        // The mode is read after the bytes have arrived, so a switch applies to all later bytes.
        let mode = state.mode();
        let swallowed = mode == Mode::Blackhole || (mode == Mode::DropReplies && direction == Direction::Reply);
        let due = match mode {
            Mode::Delay(ms) => Instant::now() + Duration::from_millis(ms),
            _ => Instant::now(),
        };
        let item = match length {
            0 => Item::End,
            _ if swallowed => continue,
            _ => Item::Bytes {
                due,
                bytes: buffer[..length].to_vec(),
            },
        };
        if queue.send(item).is_err() || length == 0 {
            return;
        }
    }
}

fn write(connection: &Connection, direction: Direction, items: &Receiver<Item>) {
    let mut to = match direction {
        Direction::Request => &connection.target,
        Direction::Reply => &connection.client,
    };
    for item in items {
        match item {
            Item::Bytes { due, bytes } => {
                pass_time_until(due);
                if to.write_all(&bytes).is_err() {
                    return connection.abort();
                }
            }
            Item::End => {
                // An error means that the other side has ended too.
                let _ = to.shutdown(Shutdown::Write);
            }
        }
    }
}

fn spawn(body: impl FnOnce() + Send + 'static) -> JoinHandle<()> {
    std::thread::Builder::new()
        .name("proxy".into())
        .spawn(body)
        .expect("start a thread of the proxy")
}

/// Makes closing the socket send a reset instead of an orderly end.
fn reset_on_close(stream: &TcpStream) {
    let linger = libc::linger {
        l_onoff: 1,
        l_linger: 0,
    };
    // SAFETY: the descriptor is open, and the pointer and length describe a whole linger structure.
    unsafe {
        libc::setsockopt(
            stream.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_LINGER,
            (&raw const linger).cast(),
            size_of::<libc::linger>() as libc::socklen_t,
        )
    };
}
