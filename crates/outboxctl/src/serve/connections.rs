//! The connections of clients: how many there are, and how long one of them may keep the monitor waiting.

use super::proxy::PeerAddress;
use axum::Router;
use axum::http::Request;
use axum::serve::Listener;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use rustix::net::sockopt::set_tcp_user_timeout;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tower::util::MapRequest;

/// More of them are closed. If they waited in the queue of the listener, so would the next client behind them.
const CONNECTIONS_MAX: usize = 128;
/// The time for a client to send the head of its next request, or a form, and to take the next bytes of an answer.
pub const CLIENT_PATIENCE: Duration = Duration::from_secs(10);

/// Serves forever. `route` prepares the path of a request for the router.
pub async fn serve<R>(mut listener: TcpListener, router: Router, route: R) -> Infallible
where
    R: Fn(Request<Incoming>) -> Request<Incoming> + Clone + Send + 'static,
{
    let permits = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    loop {
        let (stream, peer) = Listener::accept(&mut listener).await;
        let Ok(permit) = Arc::clone(&permits).try_acquire_owned() else {
            continue;
        };
        // The kernel ends a connection whose client takes nothing.
        if set_tcp_user_timeout(&stream, CLIENT_PATIENCE.as_millis() as u32).is_err() {
            continue; // it has ended already
        }
        let (route, peer) = (route.clone(), PeerAddress(peer.ip().to_canonical()));
        let service = MapRequest::new(router.clone(), move |mut request: Request<Incoming>| {
            request.extensions_mut().insert(peer);
            route(request)
        });
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(CLIENT_PATIENCE)
            .serve_connection(TokioIo::new(stream), TowerToHyperService::new(service));
        tokio::spawn(async move {
            _ = connection.await;
            drop(permit);
        });
    }
}
