//! The connections of clients: how many there are, and how long one of them may keep the monitor waiting.

use super::proxy::PeerAddress;
use axum::Router;
use axum::http::Request;
use axum::serve::Listener;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use rustix::net::sockopt::set_tcp_user_timeout;
use std::convert::Infallible;
use std::io;
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, Semaphore};
use tokio::time::{Instant, Sleep, sleep};
use tower::ServiceExt;

/// More of them are closed, and with them those that are idle. If they waited in the queue of the listener, so would the
/// next client behind them.
const CONNECTIONS_MAX: usize = 128;
/// The time for a client to send the head of its next request, or a form, and to take the next bytes of an answer.
pub const CLIENT_PATIENCE: Duration = Duration::from_secs(10);
/// How long a connection may be idle after an answer: longer than proxies keep theirs, usually a minute. A proxy that
/// sends a request on a connection that is being closed answers 502.
const IDLE_MAX: Duration = Duration::from_secs(75);

/// Serves forever. `route` prepares the path of a request for the router.
pub async fn serve<R>(mut listener: TcpListener, router: Router, route: R) -> Infallible
where
    R: Fn(Request<Incoming>) -> Request<Incoming> + Clone + Send + 'static,
{
    let permits = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let crowded = Arc::new(Notify::new());
    loop {
        let (stream, peer) = Listener::accept(&mut listener).await;
        let Ok(permit) = Arc::clone(&permits).try_acquire_owned() else {
            crowded.notify_waiters();
            continue;
        };
        // The kernel ends a connection whose client takes nothing.
        if set_tcp_user_timeout(&stream, CLIENT_PATIENCE.as_millis() as u32).is_err() {
            continue; // it has ended already
        }
        let stream = BoundedStream {
            stream,
            turn: Arc::default(),
            patience: Box::pin(sleep(CLIENT_PATIENCE)),
        };
        let (router, route) = (router.clone(), route.clone());
        let (turn, of_task) = (Arc::clone(&stream.turn), Arc::clone(&stream.turn));
        let peer = PeerAddress(peer.ip().to_canonical());
        let service = service_fn(move |mut request: Request<Incoming>| {
            request.extensions_mut().insert(peer);
            set(&turn, Turn::Ours);
            let (answer, turn) = (router.clone().oneshot(route(request)), Arc::clone(&turn));
            async move {
                let answer = answer.await;
                set(&turn, Turn::Nobody);
                answer
            }
        });
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(IDLE_MAX)
            .serve_connection(TokioIo::new(stream), service);
        let crowded = Arc::clone(&crowded);
        tokio::spawn(async move {
            let mut connection = pin!(connection);
            loop {
                tokio::select! {
                    _ = connection.as_mut() => break,
                    // Closes it now if it is idle, else after its answer.
                    () = crowded.notified() => if get(&of_task) == Turn::Nobody { connection.as_mut().graceful_shutdown() },
                }
            }
            drop(permit);
        });
    }
}

/// Who is to send.
#[derive(Clone, Copy, Default, PartialEq)]
enum Turn {
    /// The client, the head of a request.
    #[default]
    Client,
    Ours,
    /// The connection is idle once the answer is sent. The next byte begins a request.
    Nobody,
}

fn get(turn: &Mutex<Turn>) -> Turn {
    *turn.lock().unwrap_or_else(PoisonError::into_inner)
}

fn set(turn: &Mutex<Turn>, to: Turn) {
    *turn.lock().unwrap_or_else(PoisonError::into_inner) = to;
}

/// A connection that breaks if its client takes too long for the head of a request. hyper has one limit for that and for
/// the time between two requests.
struct BoundedStream {
    stream: TcpStream,
    turn: Arc<Mutex<Turn>>,
    patience: Pin<Box<Sleep>>,
}

impl AsyncRead for BoundedStream {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let filled = buf.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(cx, buf);
        let turn = get(&self.turn);
        if turn == Turn::Nobody && buf.filled().len() > filled {
            set(&self.turn, Turn::Client);
            self.patience.as_mut().reset(Instant::now() + CLIENT_PATIENCE);
        }
        if turn == Turn::Client && read.is_pending() && self.patience.as_mut().poll(cx).is_ready() {
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        read
    }
}

impl AsyncWrite for BoundedStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
