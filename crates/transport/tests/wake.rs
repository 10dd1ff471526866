//! The publisher while its worker lets confirms wait. With few open messages the publisher thread waits, and every
//! event other than a confirm still wakes the worker at once. Written with plain sockets: no broker is needed.

mod support;

use outbox_transport::{AmqpConfig, ConnectionState, DownReason, Outcome};
use std::sync::{Mutex, mpsc};
use std::time::{Duration, Instant};
use support::peer::*;
use support::{DEADLINE, Desk};

/// A threshold above the number of messages of any test.
const MANY: usize = 1000;

/// Confirms each message at once.
fn honest(peer: &mut Peer) -> std::io::Result<()> {
    peer.connect()?;
    loop {
        let got = peer.next_message()?;
        peer.ack(got.tag, false)?;
    }
}

fn connected(config: AmqpConfig) -> Desk {
    let mut desk = Desk::start(config);
    desk.until_connected();
    desk.publisher.wake_after(MANY);
    desk
}

/// The number of times that the publisher thread has given up the processor to wait.
fn waits() -> u64 {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let status = tasks.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("status")).ok());
    let of_publisher = status.filter(|status| status.starts_with("Name:\toutbox-publish\n"));
    let count = |status: String| {
        let line = status
            .lines()
            .find(|line| line.starts_with("voluntary_ctxt_switches:"))?;
        line.split_whitespace().nth(1)?.parse::<u64>().ok()
    };
    of_publisher.filter_map(count).sum()
}

fn pass(time: Duration) {
    let until = Instant::now() + time;
    while Instant::now() < until {
        std::thread::yield_now();
    }
}

/// Asserts that the publisher thread waits for events. If it looked for them every 2 ms, it would wait once for each
/// time.
fn assert_does_not_poll() {
    let (before, began) = (waits(), Instant::now());
    pass(Duration::from_millis(200));
    let (waited, looks) = (waits() - before, began.elapsed().as_millis() as u64 / 2);
    assert!(waited * 4 < looks, "{waited} waits");
}

#[test]
fn few_confirms_do_not_wake_the_worker() {
    let _alone = alone();
    for per_batch in [1, 3] {
        let mut desk = connected(config(broker(honest)));
        for first in (0..60).step_by(per_batch) {
            desk.publish(messages(first..first + per_batch as u64));
            desk.poll_until_answered(first as usize + per_batch);
        }
        assert!(desk.outcomes.values().all(|outcome| *outcome == Outcome::Confirmed));
        assert!(!desk.is_woken());
        desk.stop();
    }
}

#[test]
fn the_thread_waits_through_a_confirm_and_while_no_message_is_open() {
    let _alone = alone();
    let (acks, acked) = mpsc::channel();
    let mut desk = connected(config(broker(move |peer| {
        peer.connect()?;
        loop {
            let got = peer.next_message()?;
            peer.ack(got.tag, false)?;
            let _ = acks.send(());
        }
    })));
    let mut handles = 0..;
    let mut waits_for_some = |confirms| {
        desk.publisher.wake_after(confirms);
        let before = waits();
        for _ in 0..4 {
            for handle in handles.by_ref().take(5) {
                desk.publish(messages(handle..handle + 1));
                acked.recv_timeout(DEADLINE).unwrap();
                pass(Duration::from_micros(500));
            }
            desk.poll_until_answered(handles.start as usize);
        }
        waits() - before
    };
    // In turns, because other processes also need the processors. While they have them, the two numbers are equal: so a
    // busy machine gets more rounds.
    let (mut each, mut none) = (0, 0);
    let is_rare = (1..=400).any(|round| {
        each += waits_for_some(1);
        none += waits_for_some(MANY);
        round >= 20 && none * 10 < each * 9
    });
    assert!(is_rare, "{none} instead of {each}");
    assert_does_not_poll();
    desk.stop();
}

#[test]
fn an_unroutable_message_among_few_wakes_the_worker() {
    let _alone = alone();
    let mut desk = connected(config(broker(|peer| {
        peer.connect()?;
        loop {
            let got = peer.next_message()?;
            if got.tag == 2 {
                peer.give_back(&got)?;
            }
            peer.ack(got.tag, false)?;
        }
    })));
    desk.publish(messages(0..1));
    desk.poll_until_answered(1);
    assert!(!desk.is_woken());
    desk.publish(messages(1..4));
    desk.until("woken", |desk| desk.outcomes.contains_key(&1));
    assert!(matches!(desk.outcomes[&1], Outcome::Returned { code: 312, .. }));
    desk.poll_until_answered(4);
    assert!(
        [0, 2, 3]
            .iter()
            .all(|handle| desk.outcomes[handle] == Outcome::Confirmed)
    );
    desk.stop();
}

#[test]
fn with_a_small_window_each_confirm_wakes_the_worker() {
    let _alone = alone();
    for window in [1, 4, 7] {
        let mut desk = connected(AmqpConfig {
            window,
            ..config(broker(honest))
        });
        for handle in 0..10 {
            desk.publish(messages(handle..handle + 1));
            desk.until_answered(handle as usize + 1);
        }
        assert_eq!(
            desk.states.last(),
            Some(&ConnectionState::Connected),
            "a loss would wake the worker, too"
        );
        desk.stop();
    }
}

#[test]
fn a_filling_window_wakes_the_worker_before_it_is_full() {
    let _alone = alone();
    let (order, orders) = mpsc::channel();
    let orders = Mutex::new(orders);
    let port = broker(move |peer| {
        peer.connect()?;
        for count in orders.lock().unwrap().iter() {
            for _ in 0..count {
                let got = peer.next_message()?;
                peer.ack(got.tag, false)?;
            }
        }
        Ok(())
    });
    let mut desk = connected(AmqpConfig {
        window: 40,
        ..config(port)
    });
    desk.publish(messages(0..40));
    order.send(9).unwrap();
    pass(Duration::from_millis(50));
    assert!(!desk.is_woken());
    order.send(1).unwrap();
    let deadline = Instant::now() + DEADLINE;
    while !desk.is_woken() {
        assert!(Instant::now() < deadline, "the worker is not woken");
        std::thread::yield_now();
    }
    desk.collect();
    assert_eq!(desk.outcomes.len(), 10, "a loss would wake the worker, too");
    drop(order);
    desk.stop();
}

#[test]
fn a_confirm_has_the_time_when_it_arrived_not_when_it_was_noticed() {
    let _alone = alone();
    let (acks, acked) = mpsc::channel();
    let mut desk = connected(config(broker(move |peer| {
        peer.connect()?;
        loop {
            let got = peer.next_message()?;
            acks.send(Instant::now()).unwrap();
            peer.ack(got.tag, false)?;
        }
    })));
    let (mut arrived, mut noticed) = (Duration::MAX, Duration::MAX);
    for handle in 0..50 {
        desk.publish(messages(handle..handle + 1));
        desk.poll_until_answered(handle as usize + 1);
        let (sent, came, now) = (
            acked.recv_timeout(DEADLINE).unwrap(),
            desk.answered_at[&handle],
            Instant::now(),
        );
        // The time is stored in whole µs.
        assert!(sent < came + Duration::from_micros(1) && came < now);
        arrived = arrived.min(came.saturating_duration_since(sent));
        noticed = noticed.min(now - sent);
    }
    // A timer notices it 2 ms after the publish. In some rounds nothing else delays the confirm.
    assert!(
        arrived * 2 < noticed,
        "arrived after {arrived:?}, noticed after {noticed:?}"
    );
    desk.stop();
}

#[test]
fn a_slow_answer_is_not_polled_for() {
    let _alone = alone();
    let (order, orders) = mpsc::channel();
    let orders = Mutex::new(orders);
    let port = broker(move |peer| {
        peer.connect()?;
        loop {
            let got = peer.next_message()?;
            orders.lock().unwrap().recv().unwrap();
            peer.ack(got.tag, false)?;
        }
    });
    let mut desk = connected(config(port));
    for handle in 0..3 {
        desk.publish(messages(handle..handle + 1));
        assert_does_not_poll();
        assert_eq!(desk.outcomes.len(), handle as usize);
        order.send(()).unwrap();
        desk.poll_until_answered(handle as usize + 1);
    }
    assert!(!desk.is_woken());
    desk.stop();
}

#[test]
fn a_lost_connection_with_few_open_messages_wakes_the_worker_at_once() {
    let _alone = alone();
    let mut desk = connected(config(broker(|peer| {
        peer.connect()?;
        for _ in 0..2 {
            peer.next_message()?;
        }
        Ok(())
    })));
    desk.publish(messages(0..2));
    desk.until_answered(2);
    let lost = |outcome: &Outcome| matches!(outcome, Outcome::Lost { .. } | Outcome::Unanswered { .. });
    assert!(desk.outcomes.values().all(lost), "{:?}", desk.outcomes);
    assert_eq!(desk.until_down().0, DownReason::CLOSED);
    desk.stop();
    until_no_lapin_thread_is_left();
}

#[test]
fn a_closed_channel_with_few_open_messages_is_noticed() {
    let _alone = alone();
    let mut desk = connected(config(broker(|peer| {
        peer.connect()?;
        peer.next_message()?;
        peer.close_channel(404, "NOT_FOUND - no exchange 'x' in vhost '/'")?;
        peer.until_closed()
    })));
    desk.publish(messages(0..1));
    desk.until_answered(1);
    assert!(
        matches!(desk.outcomes[&0], Outcome::Lost { .. } | Outcome::Unanswered { .. }),
        "{:?}",
        desk.outcomes
    );
    assert_eq!(desk.until_down().0.name(), "exchange_missing");
    desk.stop();
    until_no_lapin_thread_is_left();
}

#[test]
fn a_missing_confirm_among_few_messages_times_out() {
    let _alone = alone();
    let (seen, arrived) = mpsc::channel();
    let port = broker(move |peer| {
        peer.connect()?;
        loop {
            seen.send(peer.next_message()?.tag).unwrap();
        }
    });
    let mut desk = connected(AmqpConfig {
        confirm_timeout: Duration::from_millis(300),
        ..config(port)
    });
    desk.publish(messages(0..1));
    arrived.recv_timeout(DEADLINE).unwrap();
    desk.until_answered(1);
    assert!(
        matches!(&desk.outcomes[&0], Outcome::Unanswered { .. }),
        "{:?}",
        desk.outcomes
    );
    desk.stop();
    until_no_lapin_thread_is_left();
}

#[test]
fn a_stop_takes_late_confirms_and_ends_with_the_last_one() {
    let _alone = alone();
    let (seen, arrived) = mpsc::channel();
    let (order, orders) = mpsc::channel::<()>();
    let orders = Mutex::new(orders);
    let port = broker(move |peer| {
        peer.connect()?;
        for _ in 0..3 {
            seen.send(peer.next_message()?.tag).unwrap();
        }
        orders.lock().unwrap().recv().unwrap();
        peer.ack(3, true)?;
        peer.next_message().map(|_| ()) // the connection.close
    });
    let mut desk = connected(config(port));
    desk.publish(messages(0..3));
    (1..=3).for_each(|tag| assert_eq!(arrived.recv_timeout(DEADLINE).unwrap(), tag));
    desk.publisher.request_stop(DEADLINE);
    order.send(()).unwrap();
    assert!(desk.publisher.stop(DEADLINE));
    desk.take();
    assert_eq!(desk.outcomes.len(), 3);
    assert!(desk.outcomes.values().all(|outcome| *outcome == Outcome::Confirmed));
    until_no_lapin_thread_is_left();
}

#[test]
fn a_stop_with_few_open_messages_keeps_its_limit() {
    let _alone = alone();
    let (seen, arrived) = mpsc::channel();
    let port = broker(move |peer| {
        peer.connect()?;
        loop {
            seen.send(peer.next_message()?.tag).unwrap();
        }
    });
    let mut desk = connected(config(port));
    desk.publish(messages(0..1));
    arrived.recv_timeout(DEADLINE).unwrap();
    desk.stop();
    assert!(
        matches!(desk.outcomes[&0], Outcome::Lost { .. } | Outcome::Unanswered { .. }),
        "{:?}",
        desk.outcomes
    );
    until_no_lapin_thread_is_left();
}

#[test]
fn a_window_that_empties_at_once_is_filled_again() {
    let _alone = alone();
    const WINDOW: u64 = 40;
    let mut desk = connected(AmqpConfig {
        window: WINDOW as usize,
        ..config(broker(|peer| {
            peer.connect()?;
            loop {
                let got = peer.next_message()?;
                if got.tag.is_multiple_of(WINDOW) {
                    peer.ack(got.tag, true)?;
                }
            }
        }))
    });
    desk.publish(messages(0..10 * WINDOW));
    desk.poll_until_answered(10 * WINDOW as usize);
    assert!(desk.outcomes.values().all(|outcome| *outcome == Outcome::Confirmed));
    desk.stop();
}
