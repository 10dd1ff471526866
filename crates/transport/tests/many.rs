//! Many connections to brokers: idle ones do not hold threads for ever, and a message opens its connection again.

mod support;

use outbox_transport::{AmqpConfig, ConnectionState, Outcome, Publishers, Waker};
use std::io::Write;
use std::net::TcpStream;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use support::peer::{self, Peer, messages};
use support::{Desk, threads_named};

const LAPIN: &str = "lapin-io-loop";

/// The connections that get heartbeats.
type Alive = Arc<Mutex<Vec<TcpStream>>>;

fn serve(peer: &mut Peer, alive: &Alive) -> std::io::Result<()> {
    peer.connect()?;
    alive.lock().unwrap().push(peer.tcp.try_clone()?);
    while let Ok(got) = peer.next_message() {
        peer.ack(got.tag, false)?;
    }
    peer.until_closed()
}

/// Sends heartbeats until the result is dropped.
fn heartbeats(alive: Alive) -> mpsc::Sender<()> {
    let (ends, ended) = mpsc::channel();
    std::thread::spawn(move || {
        while ended.recv_timeout(Duration::from_secs(3)) == Err(RecvTimeoutError::Timeout) {
            let beat = [8, 0, 0, 0, 0, 0, 0, 0xce];
            alive
                .lock()
                .unwrap()
                .retain_mut(|stream| stream.write_all(&beat).is_ok());
        }
    });
    ends
}

#[test]
fn idle_connections_to_brokers_end_and_messages_open_them_again() {
    let alive = Alive::default();
    let _beats = heartbeats(Arc::clone(&alive));
    let port = peer::broker_of_many(move |peer| serve(peer, &alive));
    let publishers = Publishers::new(Waker::new().unwrap());
    let config = || AmqpConfig {
        confirm_timeout: support::DEADLINE,
        ..peer::config(port)
    };
    let mut desks: Vec<Desk> = (0..300)
        .map(|_| Desk::of(publishers.start(config()).unwrap()))
        .collect();
    desks.iter_mut().for_each(Desk::until_connected);
    support::wait::wait_until("room", support::DEADLINE, || threads_named(LAPIN) <= 256);
    support::wait::wait_until("idle connections to end", support::DEADLINE, || {
        threads_named(LAPIN) <= 32
    });
    assert_eq!(threads_named("outbox-publish"), 1);
    for desk in &mut desks {
        desk.publish(messages(0..3));
    }
    for desk in &mut desks {
        desk.until_answered(3);
        assert!(desk.outcomes.values().all(|outcome| *outcome == Outcome::Confirmed));
        desk.collect();
        let is_down =
            |state: &ConnectionState| !matches!(state, ConnectionState::Connecting | ConnectionState::Connected);
        assert!(!desk.states.iter().any(is_down), "{:?}", desk.states);
    }
    desks
        .iter()
        .for_each(|desk| desk.publisher.request_stop(support::DEADLINE));
    desks.iter_mut().for_each(Desk::stop);
}
