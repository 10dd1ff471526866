//! The rules: what a worker relies on with every transport, whatever its kind. Each is run against a peer that treats
//! messages as the rule demands. src/transport.rs states the promises.

use crate::support::receiver::of_key;
use crate::support::{DEADLINE, Desk, NEVER, refusing, resolver, useless};
use ::support::chaos::{Dice, seeds};
use outbox_transport::{ConnectionState, Deadline, DownReason, MIN_SEND_RATE, Outcome, Publication, Publishers, Waker};
use std::collections::{HashMap, HashSet};
use std::net::TcpListener;
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Arc, Condvar, Mutex, mpsc};
use std::time::{Duration, Instant};

/// Runs each rule for a kind of peer: `exercise!(amqp: Amqp)` makes a module of tests.
macro_rules! exercise {
    ($kind:ident: $exercised:ty) => {
        mod $kind {
            $crate::exercise::for_each_rule!($exercised);
        }
    };
}
pub(crate) use exercise;

macro_rules! rules {
    ($($rule:ident,)*) => {
        macro_rules! for_each_rule {
            ($exercised:ty) => {
                $(#[test] fn $rule() { $crate::exercise::$rule::<$exercised>(); })*
            };
        }
        pub(crate) use for_each_rule;
    };
}

rules! {
    each_message_is_confirmed_once_and_the_messages_of_a_key_go_in_order,
    no_more_than_the_window_is_on_its_way,
    after_a_stop_request_no_message_goes_and_each_is_answered,
    a_lost_connection_is_reported_before_the_outcomes_of_its_messages,
    no_message_overtakes_a_lost_one_that_the_worker_has_not_drained,
    no_message_goes_after_the_deadline_until_a_new_one_is_set,
    no_message_goes_while_the_peer_accepts_none,
    a_message_without_an_answer_holds_back_its_key_at_most,
    a_message_that_is_refused_speaks_for_no_other_key,
    an_answer_that_cannot_be_read_counts_for_its_message_and_the_next_ones_go,
    a_peer_that_never_answers_is_given_up_in_time,
    a_message_whose_bytes_take_longer_than_the_timeout_goes_once_as_do_those_behind_it,
    a_peer_that_takes_bytes_below_the_lowest_rate_is_given_up_in_time,
    a_stop_ends_in_time_with_each_message_answered_whatever_the_peer_does,
    the_messages_of_a_key_arrive_in_order_whatever_is_lost,
    an_address_that_is_not_allowed_gets_nothing,
    a_host_is_reached_although_its_first_address_is_of_no_use,
    the_error_names_each_address_that_was_tried,
    names_whose_lookup_hangs_leave_other_destinations_alone,
    a_lookup_that_takes_longer_than_a_connect_may_is_used_by_the_next,
    a_name_that_moves_under_load_is_followed_and_no_message_is_lost_or_reordered,
}

// ---- the rules ------------------------------------------------------------------------------------------------------

pub fn each_message_is_confirmed_once_and_the_messages_of_a_key_go_in_order<T: Exercised>() {
    let peer = Peer::new(|_| Act::Confirm);
    let mut desk = Desk::start(T::start(&peer).config());
    desk.until_connected();
    for batch in 0..5 {
        desk.publish(
            (batch * 60..(batch + 1) * 60)
                .map(|handle| of_key(handle, &key_of(handle)))
                .collect(),
        );
    }
    desk.until_answered(300);
    desk.stop();
    for handle in 0..300 {
        assert_eq!(desk.outcomes[&handle], Outcome::Confirmed);
        assert_eq!(desk.answered_in[&handle], ConnectionState::Connected);
    }
    let mut arrived = peer.arrived();
    for key in 0..KEYS {
        let of_key: Vec<u64> = arrived.iter().copied().filter(|handle| handle % KEYS == key).collect();
        assert!(of_key.is_sorted(), "{of_key:?}");
    }
    arrived.sort_unstable();
    assert_eq!(arrived, (0..300).collect::<Vec<_>>());
}

pub fn an_address_that_is_not_allowed_gets_nothing<T: Exercised>() {
    let peer = Peer::new(|_| Act::Confirm);
    let mut desk = Desk::start(T::start(&peer).confined());
    desk.publish(vec![of_key(1, "k")]);
    let (reason, detail) = desk.until_down();
    assert_eq!(reason, DownReason::ADDRESS_REFUSED, "{detail}");
    assert_eq!(detail, "127.0.0.1 is a loopback address");
    desk.stop();
    assert!(peer.arrived().is_empty());
}

pub fn a_host_is_reached_although_its_first_address_is_of_no_use<T: Exercised>() {
    for (what, port) in useless() {
        let peer = Peer::new(|_| Act::Confirm);
        let transport = T::start(&peer);
        let ports = vec![port, transport.port()];
        let config = transport.named("broker.test", Duration::from_secs(4), NEVER);
        let mut desk = Desk::resolving(config, resolver(move |_| ports.clone()));
        println!("a peer that {what}");
        desk.until_connected();
        desk.publish(vec![of_key(0, "k")]);
        desk.until_answered(1);
        confirmed_after(&mut desk, 0);
        desk.stop();
    }
}

pub fn the_error_names_each_address_that_was_tried<T: Exercised>() {
    let ports = [refusing(), refusing()];
    let config = T::at(1).named("broker.test", DEADLINE, NEVER);
    let mut desk = Desk::resolving(config, resolver(move |_| ports.to_vec()));
    desk.publish(vec![of_key(0, "k")]);
    let (reason, detail) = desk.until_down();
    desk.stop();
    assert_eq!(reason, DownReason::UNREACHABLE);
    for port in ports {
        assert_eq!(detail.matches(&format!("127.0.0.1:{port}: ")).count(), 1, "{detail}");
    }
}

pub fn names_whose_lookup_hangs_leave_other_destinations_alone<T: Exercised>() {
    let peer = Peer::new(|_| Act::Confirm);
    let transport = T::start(&peer);
    let port = transport.port();
    let lookups_hang = Arc::new(Mutex::new(()));
    let hang = Arc::clone(&lookups_hang);
    let hanging = lookups_hang.lock().unwrap();
    let resolver = resolver(move |host| {
        if host.starts_with("hanging") {
            drop(hang.lock());
        }
        vec![port]
    });
    let publishers = Publishers::with_resolver(Waker::new().unwrap(), resolver);
    let start = |host: &str| Desk::of(publishers.start(transport.named(host, DEADLINE, NEVER)).unwrap());
    let mut desks: Vec<Desk> = (0..40).map(|n| start(&format!("hanging-{n}.test"))).collect();
    desks.iter_mut().for_each(|desk| desk.publish(vec![of_key(1, "k")]));
    let mut desk = start("broker.test");
    desk.until_connected();
    desk.publish(vec![of_key(0, "k")]);
    desk.until_answered(1);
    assert_eq!(desk.outcomes[&0], Outcome::Confirmed);
    assert_eq!(peer.arrived(), [0]);
    desks.push(desk);
    desks.iter().for_each(|desk| desk.publisher.request_stop(DEADLINE));
    desks.iter_mut().for_each(Desk::stop);
    drop(hanging);
}

pub fn a_lookup_that_takes_longer_than_a_connect_may_is_used_by_the_next<T: Exercised>() {
    let peer = Peer::new(|_| Act::Confirm);
    let transport = T::start(&peer);
    let (port, patience) = (transport.port(), Duration::from_millis(500));
    let (_ends, ended) = mpsc::channel::<()>();
    let ended = Mutex::new(ended);
    let resolver = resolver(move |_| {
        let _ = ended.lock().unwrap().recv_timeout(patience * 3);
        vec![port]
    });
    let mut desk = Desk::resolving(transport.named("broker.test", patience, NEVER), resolver);
    desk.publish(vec![of_key(0, "k")]);
    let (reason, detail) = desk.until_down();
    assert_eq!(reason, DownReason::UNREACHABLE);
    assert_eq!(detail, "resolving the host takes too long");
    desk.until_connected();
    desk.until_answered(1);
    confirmed_after(&mut desk, 0);
    desk.stop();
}

pub fn a_name_that_moves_under_load_is_followed_and_no_message_is_lost_or_reordered<T: Exercised>() {
    let arrived: Arc<Mutex<Vec<(char, u64)>>> = Arc::default();
    let [(blue, blue_port), (green, green_port)] = ['b', 'g'].map(|name| {
        let arrived = Arc::clone(&arrived);
        let peer = Peer::new(move |handle| {
            arrived.lock().unwrap().push((name, handle));
            Act::Confirm
        });
        let transport = T::start(&peer);
        let port = transport.port();
        (transport, port)
    });
    drop(green);
    let leads_to = Arc::new(AtomicU16::new(blue_port));
    let port = Arc::clone(&leads_to);
    let resolver = resolver(move |_| vec![port.load(Ordering::SeqCst)]);
    // Shorter than the load: connections are also replaced while the name stays.
    let config = blue.named("broker.test", DEADLINE, Duration::from_millis(100));
    let mut desk = Desk::resolving(config, resolver);
    desk.until_connected();
    let mut next = 0;
    let counts = || {
        let arrived = arrived.lock().unwrap();
        let green = arrived.iter().filter(|(name, _)| *name == 'g').count();
        (arrived.len() - green, green)
    };
    let deadline = Instant::now() + DEADLINE;
    while counts().1 < 500 {
        assert!(Instant::now() < deadline, "{:?} have arrived", counts());
        if counts().0 > 500 {
            leads_to.store(green_port, Ordering::SeqCst);
        }
        let batch = next..next + 7;
        desk.publish(batch.map(|handle| of_key(handle, &key_of(handle))).collect());
        next += 7;
    }
    desk.until_answered(next as usize);
    desk.stop();
    assert!(desk.outcomes.values().all(|outcome| *outcome == Outcome::Confirmed));
    assert!(!desk.states.iter().any(is_down), "{:?}", desk.states);
    let arrived = arrived.lock().unwrap();
    for key in 0..KEYS {
        let of_key = arrived.iter().filter(|(_, handle)| handle % KEYS == key);
        let of_key: Vec<u64> = of_key.map(|(_, handle)| *handle).collect();
        let expected: Vec<u64> = (0..next).filter(|handle| handle % KEYS == key).collect();
        assert_eq!(of_key, expected, "key {key}");
    }
}

pub fn no_more_than_the_window_is_on_its_way<T: Exercised>() {
    let (peer, mut desk) = full_window::<T>();
    assert_stays_at::<T>(&peer, 1 + WINDOW);
    peer.release();
    desk.until_answered(13);
    desk.stop();
    assert!(desk.outcomes.values().all(|outcome| *outcome == Outcome::Confirmed));
}

pub fn after_a_stop_request_no_message_goes_and_each_is_answered<T: Exercised>() {
    let (peer, mut desk) = full_window::<T>();
    desk.publisher.request_stop(DEADLINE);
    desk.until_answered(13 - WINDOW); // messages that were not sent are lost at once
    peer.release();
    desk.stop();
    let confirmed = desk.outcomes.values().filter(|outcome| **outcome == Outcome::Confirmed);
    assert_eq!(
        (desk.outcomes.len(), confirmed.count()),
        (13, 1 + WINDOW),
        "{:?}",
        desk.outcomes
    );
    assert_eq!(
        desk.outcomes.values().filter(|outcome| is_lost(outcome)).count(),
        12 - WINDOW
    );
    assert_eq!(peer.arrived().len(), 1 + WINDOW);
    assert!(
        desk.publisher.try_publish(vec![of_key(99, "k")]).is_err(),
        "a stopped publisher accepts a batch"
    );
}

pub fn a_lost_connection_is_reported_before_the_outcomes_of_its_messages<T: Exercised>() {
    let peer = Peer::new(|handle| if handle == 2 { Act::HangUp } else { Act::Confirm });
    let mut desk = Desk::start(T::start(&peer).config());
    desk.until_connected();
    // An answer that was not read yet may be lost with the connection.
    desk.publish((0..2).map(|handle| of_key(handle, "k")).collect());
    desk.until_answered(2);
    desk.publish((2..6).map(|handle| of_key(handle, "k")).collect());
    desk.until_answered(6);
    for handle in 0..2 {
        assert_eq!(desk.outcomes[&handle], Outcome::Confirmed);
    }
    for handle in 2..6 {
        assert!(
            is_lost(&desk.outcomes[&handle]),
            "{handle}: {:?}",
            desk.outcomes[&handle]
        );
        assert!(is_down(&desk.answered_in[&handle]), "{handle}: {:?}", desk.states);
    }
    desk.until_connected();
    desk.publish(vec![of_key(6, "k")]);
    desk.until_answered(7);
    desk.stop();
    assert_eq!(desk.outcomes[&6], Outcome::Confirmed);
}

pub fn no_message_overtakes_a_lost_one_that_the_worker_has_not_drained<T: Exercised>() {
    let peer = Peer::new(|handle| if handle == 1 { Act::HangUp } else { Act::Confirm });
    let mut desk = Desk::start(T::start(&peer).config());
    desk.until_connected();
    desk.publish(vec![of_key(0, "k")]);
    desk.until_answered(1);
    desk.publish(vec![of_key(1, "k")]);
    peer.until_arrived(2);
    // The worker is busy: the loss waits in its inbox. Each message that it hands over now comes after the lost one.
    let until = Instant::now() + A_WHILE;
    let mut next = 2;
    while Instant::now() < until {
        if desk.publisher.try_publish(vec![of_key(next, "k")]).is_ok() {
            next += 1;
        }
        std::thread::yield_now();
    }
    desk.until_answered(next as usize);
    assert!(
        (1..next).all(|handle| is_lost(&desk.outcomes[&handle])),
        "{:?}",
        desk.outcomes
    );
    desk.until_connected();
    desk.publish(vec![of_key(next, "k")]);
    desk.until_answered(next as usize + 1);
    desk.stop();
    assert_eq!(desk.outcomes[&next], Outcome::Confirmed);
    let arrived: HashSet<u64> = peer.arrived().into_iter().collect();
    assert_eq!(arrived, HashSet::from([0, 1, next]));
}

pub fn no_message_goes_after_the_deadline_until_a_new_one_is_set<T: Exercised>() {
    let peer = Peer::new(|_| Act::Confirm);
    let transport = T::start(&peer);
    let deadline = transport.deadline();
    let mut desk = Desk::start(transport.config());
    desk.until_connected();
    desk.publish(vec![of_key(0, "k")]);
    desk.until_answered(1);
    deadline.end();
    desk.publish((1..4).map(|handle| of_key(handle, "k")).collect());
    desk.until_answered(4);
    assert!(
        (1..4).all(|handle| is_lost(&desk.outcomes[&handle])),
        "{:?}",
        desk.outcomes
    );
    deadline.lift();
    let last = confirmed_after(&mut desk, 3);
    desk.stop();
    assert_eq!(peer.arrived(), [0, last]);
}

pub fn no_message_goes_while_the_peer_accepts_none<T: Exercised>() {
    let peer = Peer::new(|handle| if handle == 1 { Act::Block } else { Act::Confirm });
    let transport = T::start(&peer);
    let deadline = transport.deadline();
    let mut desk = Desk::start(transport.config());
    desk.until_connected();
    desk.publish(vec![of_key(0, "k")]);
    desk.until_answered(1);
    desk.publish(vec![of_key(1, "k")]);
    desk.until("blocked", |desk| {
        desk.states
            .last()
            .is_some_and(|state| is_down(state) || is_blocked(state))
    });
    desk.publish((2..6).map(|handle| of_key(handle, &key_of(handle))).collect());
    assert_stays_at::<T>(&peer, 2);
    // The messages wait where they can be taken back: none goes after the deadline either.
    deadline.end();
    peer.release();
    desk.until_answered(6);
    assert!(
        (2..6).all(|handle| is_lost(&desk.outcomes[&handle])),
        "{:?}",
        desk.outcomes
    );
    deadline.lift();
    let last = confirmed_after(&mut desk, 5);
    desk.stop();
    assert_eq!(peer.arrived(), [0, 1, last]);
}

/// Publishes messages with the handles after this one until one is confirmed, and returns its handle.
fn confirmed_after(desk: &mut Desk, mut handle: u64) -> u64 {
    let deadline = Instant::now() + DEADLINE;
    while desk.outcomes[&handle] != Outcome::Confirmed {
        assert!(Instant::now() < deadline, "{:?}", desk.outcomes[&handle]);
        handle += 1;
        desk.publish(vec![of_key(handle, "k")]);
        desk.until_answered(handle as usize + 1);
    }
    handle
}

pub fn a_message_without_an_answer_holds_back_its_key_at_most<T: Exercised>() {
    let peer = Peer::new(|handle| if handle == 1 { Act::Hold } else { Act::Confirm });
    let mut desk = Desk::start(T::start(&peer).config());
    desk.until_connected();
    desk.publish(vec![of_key(0, "k")]);
    desk.until_answered(1);
    desk.publish((1..4).map(|handle| of_key(handle, "held")).collect());
    peer.until_arrived(2);
    desk.publish((4..40).map(|handle| of_key(handle, &key_of(handle))).collect());
    desk.until("the answers of other keys", |desk| {
        (4..40).all(|handle| desk.outcomes.contains_key(&handle))
    });
    assert!(!desk.outcomes.contains_key(&1), "{:?}", desk.outcomes);
    peer.release();
    desk.until_answered(40);
    desk.stop();
    for handle in 0..40 {
        assert_eq!(desk.outcomes[&handle], Outcome::Confirmed, "{handle}");
    }
}

pub fn a_message_that_is_refused_speaks_for_no_other_key<T: Exercised>() {
    let is_refused = |handle| handle % 5 == 4;
    let peer = Peer::new(move |handle| if is_refused(handle) { Act::Refuse } else { Act::Confirm });
    let mut desk = Desk::start(T::start(&peer).config());
    desk.until_connected();
    desk.publish((0..20).map(|handle| of_key(handle, &format!("key {handle}"))).collect());
    desk.until_answered(20);
    desk.stop();
    for handle in 0..20 {
        let outcome = &desk.outcomes[&handle];
        assert!(outcome.is_answer(), "{handle}: {outcome:?}");
        assert_eq!(
            *outcome != Outcome::Confirmed,
            is_refused(handle),
            "{handle}: {outcome:?}"
        );
    }
    assert!(!desk.states.iter().any(is_down), "{:?}", desk.states);
}

pub fn an_answer_that_cannot_be_read_counts_for_its_message_and_the_next_ones_go<T: Exercised>() {
    let peer = Peer::new(|handle| if handle == 1 { Act::Garble } else { Act::Confirm });
    let mut desk = Desk::start(T::start(&peer).config());
    desk.until_connected();
    for handle in 0..2 {
        desk.publish(vec![of_key(handle, "k")]);
        desk.until_answered(handle as usize + 1);
    }
    assert_eq!(desk.outcomes[&0], Outcome::Confirmed);
    let outcome = &desk.outcomes[&1];
    assert!(
        matches!(outcome, Outcome::Unanswered { alone: true, .. }),
        "{outcome:?}"
    );
    let last = confirmed_after(&mut desk, 1);
    desk.stop();
    assert_eq!(peer.arrived(), [0, 1, last]);
}

pub fn a_peer_that_never_answers_is_given_up_in_time<T: Exercised>() {
    let peer = Peer::new(|_| Act::Hold);
    let mut desk = Desk::start(T::start(&peer).of_limits(SOON, MIN_SEND_RATE));
    desk.until_connected();
    desk.publish((0..3).map(|handle| of_key(handle, "k")).collect());
    desk.until_answered(3);
    for handle in 0..3 {
        let outcome = &desk.outcomes[&handle];
        assert!(is_lost(outcome), "{handle}: {outcome:?}");
        assert!(is_down(&desk.answered_in[&handle]), "{handle}: {:?}", desk.states);
    }
    peer.release();
    desk.stop();
}

pub fn a_message_whose_bytes_take_longer_than_the_timeout_goes_once_as_do_those_behind_it<T: Exercised>() {
    let peer = Peer::slow();
    let mut desk = Desk::start(T::start(&peer).of_limits(IN_TIME, MIN_SEND_RATE));
    desk.until_connected();
    let started = Instant::now();
    desk.publish(vec![large(0), of_key(1, &key_of(1)), of_key(2, "k")]);
    desk.until_answered(3);
    let took = started.elapsed();
    desk.publish(vec![of_key(3, "k")]);
    desk.until_answered(4);
    desk.stop();
    assert!(took > IN_TIME, "the bytes took {took:?}");
    for handle in 0..4 {
        assert_eq!(desk.outcomes[&handle], Outcome::Confirmed, "{handle}");
    }
    let mut arrived = peer.arrived();
    arrived.sort_unstable();
    assert_eq!(arrived, [0, 1, 2, 3]);
    assert!(!desk.states.iter().any(is_down), "{:?}", desk.states);
}

pub fn a_peer_that_takes_bytes_below_the_lowest_rate_is_given_up_in_time<T: Exercised>() {
    let peer = Peer::slow();
    let mut desk = Desk::start(T::start(&peer).of_limits(IN_TIME, u32::MAX));
    desk.until_connected();
    desk.publish(vec![large(0)]);
    let (reason, detail) = desk.until_down();
    assert_eq!(reason, DownReason::TIMEOUT, "{detail}");
    assert!(detail.starts_with("the peer took "), "{detail}");
    desk.until_answered(1);
    assert!(is_lost(&desk.outcomes[&0]), "{:?}", desk.outcomes);
    desk.stop();
    assert!(peer.arrived().is_empty(), "{:?}", peer.arrived());
}

pub fn a_stop_ends_in_time_with_each_message_answered_whatever_the_peer_does<T: Exercised>() {
    let silent = TcpListener::bind("127.0.0.1:0").unwrap(); // connections wait to be accepted
    let port = |listener: &TcpListener| listener.local_addr().unwrap().port();
    let closed_port = TcpListener::bind("127.0.0.1:0")
        .map(|listener| port(&listener))
        .unwrap();
    let transports = [
        T::start(&Peer::new(|_| Act::Hold)),
        T::start(&Peer::new(|_| Act::HangUp)),
        T::start(&Peer::new(|_| Act::Block)),
        T::at(port(&silent)),
        T::at(closed_port),
    ];
    for (at, transport) in transports.into_iter().enumerate() {
        let mut desk = Desk::start(transport.config());
        desk.until("it begins", |desk| !desk.states.is_empty());
        let large = |handle| Publication {
            body: vec![b'x'; 100_000], // together more than a socket's buffers hold
            ..of_key(handle, &key_of(handle))
        };
        desk.publish((0..100).map(large).collect());
        println!("peer {at}");
        desk.stop();
        assert_eq!(desk.outcomes.len(), 100, "{at}");
    }
}

pub fn the_messages_of_a_key_arrive_in_order_whatever_is_lost<T: Exercised>() {
    for seed in seeds(4) {
        let dice = Mutex::new(Dice::new(seed));
        let peer = Peer::new(move |_| match dice.lock().unwrap().below(12) {
            0 => Act::HangUp,
            _ => Act::Confirm,
        });
        let mut desk = Desk::start(T::start(&peer).config());
        let mut dice = Dice::new(!seed);
        // For each key: the number of confirmed messages, and the handles of the messages handed over after them.
        let mut keys = vec![(0, Vec::new()); KEYS as usize];
        let mut numbers = HashMap::new();
        let deadline = Instant::now() + DEADLINE;
        while keys.iter().any(|(confirmed, _)| *confirmed < OF_EACH_KEY) {
            assert!(Instant::now() < deadline, "seed {seed}: {:?}", desk.states.last());
            let at = dice.below(KEYS as usize);
            let (confirmed, run) = &mut keys[at];
            let has_failed = run.iter().any(|handle| desk.outcomes.get(handle).is_some_and(is_lost));
            let room = OF_EACH_KEY - *confirmed - run.len();
            let mut batch = Vec::new();
            for _ in 0..room.min(dice.below(4)) * usize::from(!has_failed) {
                let handle = numbers.len() as u64;
                numbers.insert(handle, (at, *confirmed + run.len()));
                run.push(handle);
                batch.push(of_key(handle, &format!("key {at}")));
            }
            // Do not collect in this loop: what the worker hands over depends on what it has drained before.
            while let Err(back) = desk.publisher.try_publish(batch) {
                assert!(Instant::now() < deadline, "seed {seed}: the queue stays full");
                batch = back;
                std::thread::yield_now();
            }
            if dice.below(3) > 0 {
                desk.collect();
            }
            for (confirmed, run) in &mut keys {
                let is_confirmed = |handle: &&u64| desk.outcomes.get(handle) == Some(&Outcome::Confirmed);
                let went = run.iter().take_while(is_confirmed).count();
                *confirmed += run.drain(..went).count();
                if run.iter().all(|handle| desk.outcomes.contains_key(handle)) {
                    assert!(
                        !run.iter().any(|handle| is_confirmed(&handle)),
                        "seed {seed}: a message went after a lost one"
                    );
                    run.clear(); // the worker sends again from there
                }
            }
        }
        desk.stop();
        assert_eq!(desk.outcomes.len(), numbers.len(), "seed {seed}");
        for key in 0..keys.len() {
            let of_key = peer
                .arrived()
                .into_iter()
                .map(|handle| numbers[&handle])
                .filter(|(at, _)| *at == key);
            let mut seen = HashSet::new();
            let firsts: Vec<usize> = of_key
                .map(|(_, number)| number)
                .filter(|number| seen.insert(*number))
                .collect();
            assert_eq!(firsts, (0..OF_EACH_KEY).collect::<Vec<_>>(), "seed {seed}, key {key}");
        }
    }
}

const KEYS: u64 = 6;
const OF_EACH_KEY: usize = 20;
const WINDOW: usize = 4;
/// Much longer than a transport takes to connect again.
const A_WHILE: Duration = Duration::from_millis(300);

/// What a slow peer takes several times as long for as `IN_TIME`.
const LARGE_BYTES: usize = 10 << 20;
/// Much longer than a slow peer takes for its next bytes.
const IN_TIME: Duration = Duration::from_secs(2);

fn large(handle: u64) -> Publication {
    let mut message = of_key(handle, "k");
    message.body.resize(LARGE_BYTES, b' ');
    message
}

fn key_of(handle: u64) -> String {
    format!("key {}", handle % KEYS)
}

fn is_lost(outcome: &Outcome) -> bool {
    matches!(
        outcome,
        Outcome::Lost { .. } | Outcome::Unanswered { .. } | Outcome::Postponed { .. }
    )
}

fn is_down(state: &ConnectionState) -> bool {
    matches!(state, ConnectionState::Down(_))
}

fn is_blocked(state: &ConnectionState) -> bool {
    matches!(state, ConnectionState::Blocked { .. })
}

/// The first of 13 messages is confirmed. Then a window of messages has arrived, and the peer holds them.
fn full_window<T: Exercised>() -> (Arc<Peer>, Desk) {
    let peer = Peer::new(|handle| if handle == 0 { Act::Confirm } else { Act::Hold });
    let mut desk = Desk::start(T::start(&peer).of_window(WINDOW));
    desk.until_connected();
    desk.publish(vec![of_key(0, "k")]);
    desk.until_answered(1);
    desk.publish((1..13).map(|handle| of_key(handle, &format!("key {handle}"))).collect());
    peer.until_arrived(1 + WINDOW);
    (peer, desk)
}

/// Asserts that no more than this number of messages has arrived after another publisher has connected and has had a
/// message confirmed. A message that the first one sends takes less.
fn assert_stays_at<T: Exercised>(peer: &Peer, count: usize) {
    let mut other = Desk::start(T::start(&Peer::new(|_| Act::Confirm)).config());
    other.until_connected();
    other.publish(vec![of_key(0, "k")]);
    other.until_answered(1);
    other.stop();
    assert_eq!(other.outcomes[&0], Outcome::Confirmed);
    assert_eq!(peer.arrived().len(), count, "{:?} have arrived", peer.arrived());
}

// ---- peers ----------------------------------------------------------------------------------------------------------

/// What a peer does with a message that has arrived.
#[derive(Clone, Copy)]
pub enum Act {
    Confirm,
    /// Confirms the message when the test releases it.
    Hold,
    /// Takes no responsibility for the message.
    Refuse,
    /// Answers with what no client can read.
    Garble,
    /// Closes the connection.
    HangUp,
    /// Reports that it accepts no more messages, until it is released or for three seconds.
    Block,
}

/// The messages that have arrived, and what the peer does with each.
pub struct Peer {
    act: Box<dyn Fn(u64) -> Act + Send + Sync>,
    pub is_slow: bool,
    state: Mutex<PeerState>,
    changed: Condvar,
}

#[derive(Default)]
struct PeerState {
    arrived: Vec<u64>,
    is_released: bool,
}

impl Peer {
    fn new(act: impl Fn(u64) -> Act + Send + Sync + 'static) -> Arc<Self> {
        Arc::new(Self::acting(act, false))
    }

    /// A peer that reads slowly, and confirms.
    fn slow() -> Arc<Self> {
        Arc::new(Self::acting(|_| Act::Confirm, true))
    }

    fn acting(act: impl Fn(u64) -> Act + Send + Sync + 'static, is_slow: bool) -> Self {
        Self {
            act: Box::new(act),
            is_slow,
            state: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    /// Records a message that has arrived.
    pub fn takes(&self, body: &[u8]) -> Act {
        let word = body
            .strip_prefix(b"body ")
            .and_then(|rest| rest.split(|byte| *byte == b' ').next());
        let handle = word.and_then(|word| std::str::from_utf8(word).ok()?.parse().ok());
        let handle = handle.unwrap_or(u64::MAX); // one of the large ones
        self.state.lock().unwrap().arrived.push(handle);
        self.changed.notify_all();
        (self.act)(handle)
    }

    fn arrived(&self) -> Vec<u64> {
        self.state.lock().unwrap().arrived.clone()
    }

    fn until_arrived(&self, count: usize) {
        self.wait(|state| state.arrived.len() >= count);
        assert!(self.arrived().len() >= count, "{:?} have arrived", self.arrived());
    }

    fn release(&self) {
        self.state.lock().unwrap().is_released = true;
        self.changed.notify_all();
    }

    pub fn until_released(&self) {
        self.wait(|state| state.is_released);
    }

    fn wait(&self, done: impl Fn(&PeerState) -> bool) {
        let state = self.state.lock().unwrap();
        drop(
            self.changed
                .wait_timeout_while(state, DEADLINE, |state| !done(state))
                .unwrap(),
        );
    }
}

/// A peer of one kind, and the configuration to reach it.
pub trait Exercised: Sized {
    fn start(peer: &Arc<Peer>) -> Self;
    /// Connects to this port, whether or not a peer listens there.
    fn at(port: u16) -> Self;
    fn port(&self) -> u16;
    fn deadline(&self) -> Deadline;
    /// Reaches the peer by a name. Gives up after `patience`, and replaces a connection after `life`.
    fn named(&self, host: &str, patience: Duration, life: Duration) -> impl outbox_transport::Transport;
    fn config(&self) -> impl outbox_transport::Transport;
    fn of_window(&self, window: usize) -> impl outbox_transport::Transport;
    /// Gives up after this time on a peer that does not answer, or that takes bytes at less than this rate.
    fn of_limits(&self, timeout: Duration, min_send_rate: u32) -> impl outbox_transport::Transport;
    /// May reach public addresses only.
    fn confined(&self) -> impl outbox_transport::Transport;
}

const SOON: Duration = Duration::from_millis(300);
