//! The TCP connect to an address. Runs on the publisher thread.

use super::link::Limit;
use crate::down::{DownReason, Fault};
use std::net::SocketAddr;
use tokio::net::TcpStream;
use tokio::time::timeout_at;

pub(crate) async fn dial(address: SocketAddr, limit: Limit) -> Result<TcpStream, Fault> {
    let failed = |error| Fault::of_connect(DownReason::UNREACHABLE, &error, address);
    match timeout_at(limit.until, TcpStream::connect(address)).await {
        Ok(connected) => {
            let stream = connected.map_err(failed)?;
            // A publish is one write. Nagle's algorithm would delay the next small one until the broker's TCP ack.
            stream.set_nodelay(true).map_err(failed)?;
            Ok(stream)
        }
        Err(_) => {
            let text = format!("{address}: no answer to the TCP connect within {:.1?}", limit.whole);
            Err(Fault::new(DownReason::UNREACHABLE, text))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use socket2::{Domain, Socket, Type};
    use std::net::TcpListener;
    use std::time::Duration;

    /// An address that answers no connect: its queue of connections is full.
    fn silent() -> (SocketAddr, Vec<Socket>) {
        let any: SocketAddr = ([127, 0, 0, 1], 0).into();
        let new = || Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        let listener = new();
        listener.bind(&any.into()).unwrap();
        listener.listen(0).unwrap();
        let address = listener.local_addr().unwrap().as_socket().unwrap();
        let mut sockets = vec![listener];
        for _ in 0..4 {
            let client = new();
            client.set_nonblocking(true).unwrap();
            let _ = client.connect(&address.into());
            sockets.push(client);
        }
        (address, sockets)
    }

    #[test]
    fn an_address_that_does_not_answer_or_refuses_is_named() {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        let ((silent, _sockets), listener) = (silent(), TcpListener::bind("127.0.0.1:0").unwrap());
        let refusing = listener.local_addr().unwrap();
        drop(listener);
        let why = |address: SocketAddr, ms| {
            let dialed = runtime.block_on(async { dial(address, Limit::new(Duration::from_millis(ms))).await });
            dialed.unwrap_err().finding.detail
        };
        let text = why(silent, 100);
        assert_eq!(text, format!("{silent}: no answer to the TCP connect within 100.0ms"));
        let text = why(refusing, 20_000);
        assert!(text.starts_with(&format!("{refusing}: Connection refused")), "{text}");
    }
}
