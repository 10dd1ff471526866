//! A connection that a firewall has forgotten while it was idle: nothing that is sent over it arrives, and no error
//! comes back. The publisher must give it up long before the timeout for an answer, and go on over another one.

mod support;

use ::support::network::Network;
use outbox_transport::{AmqpConfig, DownReason, HttpConfig, Outcome};
use std::io::BufReader;
use std::net::{SocketAddr, TcpStream};
use std::sync::{Barrier, mpsc};
use std::time::Duration;
use support::peer::{self, Peer};
use support::receiver::{Receiver, message, read_request};
use support::{DEADLINE, Desk};

/// Far above what the publisher waits.
const TIMEOUT: Duration = Duration::from_secs(120);

#[test]
fn an_http_request_on_a_forgotten_connection_ends_before_its_timeout_and_charges_nothing() {
    let test = "an_http_request_on_a_forgotten_connection_ends_before_its_timeout_and_charges_nothing";
    let Some(network) = Network::start(test) else { return };
    let (peers, peer) = mpsc::channel();
    let both = Barrier::new(2);
    let receiver = Receiver::play(move |stream, _, seen| {
        let _ = peers.send(stream.peer_addr()?);
        let mut reader = BufReader::new(stream.try_clone()?);
        loop {
            let request = read_request(&mut reader)?;
            let is_pair = matches!(request.id(), "id-2" | "id-3" | "id-6" | "id-7");
            seen.lock().unwrap().push(request);
            if is_pair {
                both.wait(); // so they need two connections
            }
            ok(&stream)?;
        }
    });
    let mut desk = Desk::start(HttpConfig {
        timeout: TIMEOUT,
        ..receiver.config()
    });
    desk.publish(vec![message(1)]);
    desk.until_answered(1);
    desk.publish(vec![message(2), message(3)]);
    desk.until_answered(3);
    for _ in 0..2 {
        network.forget(peer.recv_timeout(DEADLINE).unwrap());
    }
    desk.publish(vec![message(4)]);
    desk.until_answered(4);
    let (reason, detail) = desk.until_down();
    assert_eq!(reason, DownReason::TIMEOUT);
    assert!(detail.contains("acknowledge"), "{detail}");
    // The receiver never got it, so it is no failure of the message.
    assert!(matches!(desk.outcomes[&4], Outcome::Lost { .. }), "{:?}", desk.outcomes);
    desk.until_connected();
    desk.publish(vec![message(5)]);
    desk.until_answered(5);
    // Another idle connection was forgotten, too, and is not tried.
    desk.publish(vec![message(6), message(7)]);
    desk.until_answered(7);
    for handle in 5..=7 {
        assert_eq!(
            desk.outcomes[&handle],
            Outcome::Confirmed,
            "{handle}: {:?}",
            desk.states
        );
    }
    desk.stop();
}

fn ok(mut stream: &TcpStream) -> std::io::Result<()> {
    std::io::Write::write_all(&mut stream, b"HTTP/1.1 200 x\r\ncontent-length: 0\r\n\r\n")
}

fn serve(peer: &mut Peer) -> std::io::Result<()> {
    peer.connect()?;
    loop {
        let got = peer.next_message()?;
        peer.ack(got.tag, false)?;
    }
}

#[test]
fn a_forgotten_connection_to_a_broker_is_given_up_before_the_confirm_timeout() {
    let test = "a_forgotten_connection_to_a_broker_is_given_up_before_the_confirm_timeout";
    let Some(network) = Network::start(test) else { return };
    let (peers, peer) = mpsc::channel::<SocketAddr>();
    let port = peer::broker(move |peer| {
        let _ = peers.send(peer.tcp.peer_addr()?);
        let mut peer = Peer::new(peer.tcp.try_clone()?, Box::new(peer.tcp.try_clone()?));
        std::thread::spawn(move || serve(&mut peer)); // another connection is answered, too
        Ok(())
    });
    let mut desk = Desk::start(AmqpConfig {
        confirm_timeout: TIMEOUT,
        patience: Duration::from_secs(1),
        ..peer::config(port)
    });
    desk.until_connected();
    desk.publish(peer::messages(0..1));
    desk.until_answered(1);
    network.forget(peer.recv_timeout(DEADLINE).unwrap());
    desk.publish(peer::messages(1..2));
    let (reason, detail) = desk.until_down();
    assert_eq!(reason, DownReason::TIMEOUT);
    assert!(detail.contains("only on another connection"), "{detail}");
    desk.until_connected();
    desk.publish(peer::messages(2..3));
    desk.until("confirmed", |desk| desk.outcomes.get(&2) == Some(&Outcome::Confirmed));
    desk.stop();
}
