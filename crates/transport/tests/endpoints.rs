//! A broker with several endpoints, such as a cluster, or with several addresses. When is the next one tried?
//! Against simulated brokers, of which each is one endpoint.

mod support;

use outbox_transport::{AmqpConfig, ConnectionState, DownReason, Endpoint, Outcome, Publishers, Waker};
use std::sync::atomic::{AtomicBool, Ordering};
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

/// A configuration for a name.
fn named() -> AmqpConfig {
    AmqpConfig {
        endpoints: vec![Endpoint {
            host: "broker.test".to_owned(),
            port: 5672,
        }],
        ..config(5672)
    }
}

fn downs(desk: &Desk) -> Vec<(DownReason, &str)> {
    let down = |state| match state {
        &ConnectionState::Down { reason, ref detail } => Some((reason, detail.as_str())),
        _ => None,
    };
    desk.states.iter().filter_map(down).collect()
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
    assert_eq!(reason, DownReason::Timeout);
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
    let mut desk = Desk::resolving(named(), resolver(move |_| ports.to_vec()));
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
    let start = |_| Desk::of(publishers.start(hasty(named())).unwrap());
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
