//! A broker with several endpoints, such as a cluster, or at a name that leads elsewhere later. When is the next one
//! tried, and when is a connection replaced? Against simulated brokers, of which each is one endpoint.

mod support;

use outbox_transport::{AmqpConfig, ConnectionState, DownReason, Endpoint, Outcome, Publishers, Waker};
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use support::peer::*;
use support::{DEADLINE, Desk, NEVER, refusing, resolver, threads, threads_named};

/// A configuration that waits forever once it has tried all endpoints in vain.
fn one_turn(ports: &[u16]) -> AmqpConfig {
    let endpoints = ports.iter().map(|port| Endpoint {
        host: "127.0.0.1".to_owned(),
        port: *port,
    });
    AmqpConfig {
        endpoints: endpoints.collect(),
        backoff_min: NEVER,
        backoff_max: NEVER,
        ..config(ports[0])
    }
}

/// An endpoint that takes TCP connections, records when, and says nothing.
fn silent(connects: &Arc<Mutex<Vec<Instant>>>) -> u16 {
    let connects = Arc::clone(connects);
    broker(move |peer| {
        connects.lock().unwrap().push(Instant::now());
        peer.until_closed()
    })
}

fn confirming() -> u16 {
    broker(|peer| {
        peer.connect()?;
        loop {
            // On a busy machine the publisher also asks whether the broker answers.
            let got = peer.next_message_answering(|_, _| ())?;
            peer.ack(got.tag, false)?;
        }
    })
}

/// A configuration for a name, of which each connection lives for `life`.
fn named(life: Duration) -> AmqpConfig {
    AmqpConfig {
        endpoints: vec![Endpoint {
            host: "broker.test".to_owned(),
            port: 5672,
        }],
        connection_life: life,
        ..config(5672)
    }
}

/// A broker that confirms, and counts its connections.
fn counting(connections: &Arc<AtomicUsize>) -> u16 {
    let connections = Arc::clone(connections);
    broker_of_many(move |peer| {
        peer.connect()?;
        connections.fetch_add(1, Ordering::SeqCst);
        loop {
            let got = peer.next_message_answering(|_, _| ())?;
            peer.ack(got.tag, false)?;
        }
    })
}

/// Publishes message after message, each of which is confirmed, until `done`.
fn publish_until(desk: &mut Desk, done: impl Fn() -> bool) {
    let deadline = Instant::now() + DEADLINE;
    while !done() {
        assert!(Instant::now() < deadline, "{:?}", desk.states);
        let handle = desk.outcomes.len() as u64;
        desk.publish(messages(handle..handle + 1));
        desk.until_answered(handle as usize + 1);
        assert_eq!(desk.outcomes[&handle], Outcome::Confirmed);
    }
}

fn downs(desk: &Desk) -> Vec<(DownReason, &str)> {
    let downs = desk.states.iter().filter_map(|state| match state {
        ConnectionState::Down(fault) => Some((fault.reason, fault.finding.detail.as_str())),
        _ => None,
    });
    downs.collect()
}

#[test]
fn an_endpoint_that_refuses_or_says_nothing_is_left_for_the_next_without_a_wait() {
    let _alone = alone();
    let connects = Arc::default();
    let ports = [refusing(), silent(&connects), confirming()];
    let mut desk = Desk::start(AmqpConfig {
        connect_timeout: NEVER, // the limit of several endpoints is lower
        ..one_turn(&ports)
    });
    desk.until_connected();
    desk.publish(messages(0..3));
    desk.until_answered(3);
    assert!(desk.outcomes.values().all(|outcome| *outcome == Outcome::Confirmed));
    assert_eq!(connects.lock().unwrap().len(), 1);
    // A broker of which one endpoint answers is not down.
    assert_eq!(desk.states, [ConnectionState::Connecting, ConnectionState::Connected]);
    desk.stop();
    until_no_lapin_thread_is_left();
}

#[test]
fn a_lost_connection_is_continued_at_the_next_endpoint_which_stays() {
    let _alone = alone();
    let first = broker(|peer| {
        peer.connect()?;
        peer.next_message().map(drop)
    });
    let mut desk = Desk::start(one_turn(&[first, confirming()]));
    desk.until_connected();
    desk.publish(messages(0..1));
    desk.until_answered(1);
    assert!(
        matches!(desk.outcomes[&0], Outcome::Lost { .. } | Outcome::Unanswered { .. }),
        "{:?}",
        desk.outcomes
    );
    desk.until("the second connection", |desk| {
        desk.states.ends_with(&[ConnectionState::Connected])
    });
    desk.publish(messages(1..5));
    desk.until_answered(5);
    assert!(
        (1..5).all(|handle| desk.outcomes[&handle] == Outcome::Confirmed),
        "{:?}",
        desk.outcomes
    );
    assert_eq!(downs(&desk).len(), 1, "{:?}", desk.states);
    desk.stop();
}

#[test]
fn a_turn_over_all_endpoints_is_reported_with_all_reasons_and_ends_with_a_wait() {
    let _alone = alone();
    let connects = Arc::default();
    let wait = Duration::from_secs(2);
    let ports = [silent(&connects), refusing(), silent(&connects)];
    let mut desk = Desk::start(AmqpConfig {
        backoff_min: wait,
        backoff_max: wait,
        ..hasty(one_turn(&ports))
    });
    desk.until("two turns", |desk| downs(desk).len() == 2);
    for (_, detail) in downs(&desk) {
        let reasons: Vec<&str> = detail.split("; ").collect();
        assert_eq!(reasons.len(), 3, "{detail}");
        for (reason, port) in reasons.iter().zip(ports) {
            assert!(reason.starts_with(&format!("127.0.0.1:{port}: ")), "{detail}");
        }
    }
    desk.stop();
    let connects = connects.lock().unwrap();
    // A busy machine records the second connect late, so half of the wait has to do.
    assert!(connects[2] - connects[1] > wait / 2, "{connects:?}");
}

#[test]
fn an_endpoint_that_falls_silent_with_messages_is_left_once_another_answers() {
    let _alone = alone();
    let is_first = AtomicBool::new(true);
    let silent = broker(move |peer| {
        // It stays silent: an answer later on would count against the other endpoint if that is slow.
        if is_first.swap(false, Ordering::SeqCst) {
            peer.connect()?;
            peer.next_message()?;
        }
        peer.until_closed()
    });
    let mut desk = Desk::start(AmqpConfig {
        patience: Duration::from_millis(100),
        ..one_turn(&[silent, confirming()])
    });
    desk.until_connected();
    desk.publish(messages(0..1));
    desk.until_answered(1);
    assert!(
        matches!(desk.outcomes[&0], Outcome::Lost { .. } | Outcome::Unanswered { .. }),
        "{:?}",
        desk.outcomes
    );
    desk.until("the second connection", |desk| {
        desk.states.ends_with(&[ConnectionState::Connected])
    });
    desk.publish(messages(1..2));
    desk.until_answered(2);
    assert_eq!(desk.outcomes[&1], Outcome::Confirmed);
    let [(reason, detail)] = downs(&desk)[..] else {
        panic!("{:?}", desk.states);
    };
    assert_eq!(reason, DownReason::TIMEOUT);
    assert!(detail.starts_with(&format!("127.0.0.1:{silent}: ")), "{detail}");
    assert!(
        detail.ends_with("the broker answers only on another connection"),
        "{detail}"
    );
    desk.stop();
}

#[test]
fn a_lost_connection_is_continued_at_the_next_address_of_the_host() {
    let _alone = alone();
    let losing = broker(|peer| {
        peer.connect()?;
        peer.next_message().map(drop)
    });
    let ports = [losing, confirming()];
    let mut desk = Desk::resolving(named(NEVER), resolver(move |_| ports.to_vec()));
    desk.until_connected();
    desk.publish(messages(0..1));
    desk.until_answered(1);
    assert_ne!(desk.outcomes[&0], Outcome::Confirmed);
    desk.until("the second connection", |desk| {
        desk.states.ends_with(&[ConnectionState::Connected])
    });
    desk.publish(messages(1..5));
    desk.until_answered(5);
    desk.stop();
    assert!(
        (1..5).all(|handle| desk.outcomes[&handle] == Outcome::Confirmed),
        "{:?}",
        desk.outcomes
    );
    assert_eq!(downs(&desk).len(), 1, "{:?}", desk.states);
}

#[test]
fn connections_to_a_name_are_replaced_and_those_to_an_address_are_not() {
    let _alone = alone();
    let life = Duration::from_millis(10);
    let connections: [Arc<AtomicUsize>; 2] = Default::default();
    let ports = [&connections[0], &connections[1]].map(counting);
    let mut to_name = Desk::resolving(named(life), resolver(move |_| vec![ports[0]]));
    let mut to_address = Desk::start(AmqpConfig {
        connection_life: life,
        ..config(ports[1])
    });
    to_address.until_connected();
    to_address.publish(messages(0..1));
    to_name.until_connected();
    publish_until(&mut to_name, || connections[0].load(Ordering::SeqCst) > 10);
    to_address.until_answered(1);
    for desk in [&mut to_name, &mut to_address] {
        desk.stop();
        assert_eq!(desk.states, [ConnectionState::Connecting, ConnectionState::Connected]);
    }
    assert_eq!(connections[1].load(Ordering::SeqCst), 1);
    until_no_lapin_thread_is_left();
}

#[test]
fn an_idle_connection_is_replaced_and_a_stop_ends_both() {
    let _alone = alone();
    let connections = Arc::default();
    let port = counting(&connections);
    let mut desk = Desk::resolving(named(Duration::from_millis(10)), resolver(move |_| vec![port]));
    desk.until_connected();
    support::wait::wait_until("ten connections", DEADLINE, || connections.load(Ordering::SeqCst) > 10);
    desk.stop();
    assert_eq!(desk.states, [ConnectionState::Connecting, ConnectionState::Connected]);
    until_no_lapin_thread_is_left();
}

#[test]
fn a_connection_that_cannot_be_replaced_stays_until_it_can() {
    let _alone = alone();
    let [first_connections, next_connections, lookups]: [Arc<AtomicUsize>; 3] = Default::default();
    let (first, next) = (counting(&first_connections), counting(&next_connections));
    let (nowhere, leads_to) = (refusing(), Arc::new(AtomicU16::new(first)));
    let (count, port) = (Arc::clone(&lookups), Arc::clone(&leads_to));
    let resolver = resolver(move |_| {
        count.fetch_add(1, Ordering::SeqCst);
        vec![port.load(Ordering::SeqCst)]
    });
    let mut desk = Desk::resolving(named(Duration::from_millis(100)), resolver);
    desk.until_connected();
    leads_to.store(nowhere, Ordering::SeqCst);
    let before = first_connections.load(Ordering::SeqCst);
    let failed = lookups.load(Ordering::SeqCst) + 5;
    publish_until(&mut desk, || lookups.load(Ordering::SeqCst) > failed);
    let opened = first_connections.load(Ordering::SeqCst) - before;
    assert!(opened <= 1, "one may have been on its way");
    leads_to.store(next, Ordering::SeqCst);
    publish_until(&mut desk, || next_connections.load(Ordering::SeqCst) > 1);
    desk.stop();
    assert_eq!(desk.states, [ConnectionState::Connecting, ConnectionState::Connected]);
}

#[test]
fn a_message_that_is_not_confirmed_delays_the_replacement_for_a_limited_time() {
    let _alone = alone();
    let withholding = broker(|peer| {
        peer.connect()?;
        peer.next_message()?;
        peer.until_closed()
    });
    let connections = Arc::default();
    let (next, is_first) = (counting(&connections), AtomicBool::new(true));
    let resolver = resolver(move |_| match is_first.swap(false, Ordering::SeqCst) {
        true => vec![withholding],
        false => vec![next],
    });
    let mut desk = Desk::resolving(named(Duration::from_secs(2)), resolver);
    desk.until_connected();
    desk.publish(messages(0..1));
    support::wait::wait_until("the next connection", DEADLINE, || {
        connections.load(Ordering::SeqCst) > 0
    });
    desk.publish(messages(1..4));
    desk.until_answered(4);
    // The first may have arrived, so the others must not overtake it.
    assert!(
        (1..4).all(|handle| matches!(
            desk.outcomes[&handle],
            Outcome::Lost { .. } | Outcome::Unanswered { .. } // before the next one is complete, they go over the first
        )),
        "{:?}",
        desk.outcomes
    );
    assert!(
        matches!(desk.outcomes[&0], Outcome::Unanswered { .. }),
        "{:?}",
        desk.outcomes
    );
    desk.publish(messages(4..5));
    desk.until_answered(5);
    assert_eq!(desk.outcomes[&4], Outcome::Confirmed);
    desk.stop();
    assert_eq!(desk.states, [ConnectionState::Connecting, ConnectionState::Connected]);
}

#[test]
fn a_name_has_one_lookup_at_a_time_on_a_thread_that_takes_no_signals() {
    let _alone = alone();
    let lookups_hang = Arc::new(Mutex::new(()));
    let hang = Arc::clone(&lookups_hang);
    let hanging = lookups_hang.lock().unwrap();
    let resolver = resolver(move |_| {
        drop(hang.lock());
        vec![refusing()]
    });
    let publishers = Publishers::with_resolver(Waker::new().unwrap(), resolver);
    let start = |_| Desk::of(publishers.start(hasty(named(NEVER))).unwrap());
    let mut desks: Vec<Desk> = (0..3).map(start).collect();
    for desk in &mut desks {
        desk.until("two attempts", |desk| downs(desk).len() >= 2);
    }
    assert_eq!(threads_named("outbox-resolve"), 1);
    let all = threads();
    let blocked = |name| {
        all.iter()
            .find(|(thread, _)| thread == name)
            .map(|(_, blocked)| *blocked)
    };
    assert_eq!(blocked("outbox-resolve"), blocked("outbox-publish"));
    desks.iter().for_each(|desk| desk.publisher.request_stop(DEADLINE));
    desks.iter_mut().for_each(Desk::stop);
    drop(hanging);
}
