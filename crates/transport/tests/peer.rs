//! The publisher against misbehaving peers, written with plain sockets: no broker is needed.
//!
//! The promise: whatever the peer does, this process survives, reports `Down` in bounded time and leaves no thread
//! behind.

mod support;

use outbox_transport::{AmqpConfig, ConnectionState, DownReason, Endpoint, Outcome, Publisher, Waker};
use std::net::TcpListener;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Mutex, mpsc};
use std::time::{Duration, Instant};
use support::peer::*;
use support::{DEADLINE, Desk, SlowReader, publication, threads, threads_named};

#[test]
fn every_thread_has_every_signal_blocked_and_the_calling_thread_keeps_its_mask() {
    let _alone = alone();
    let own_mask = || {
        let task = std::fs::read_to_string("/proc/thread-self/status").unwrap();
        task.lines().find(|l| l.starts_with("SigBlk")).unwrap().to_owned()
    };
    let before = own_mask();
    let port = broker(|peer| {
        peer.connect()?;
        peer.until_closed()
    });
    // A name instead of an address makes tokio start a thread of its pool.
    let mut desk = Desk::start(AmqpConfig {
        endpoints: vec![Endpoint {
            host: "localhost".into(),
            port,
        }],
        ..config(port)
    });
    desk.until_connected();
    assert_eq!(own_mask(), before);
    let ours: Vec<_> = threads()
        .into_iter()
        .filter(|(n, _)| n == "outbox-publish" || n == "lapin-io-loop" || n.starts_with("tokio"))
        .collect();
    assert!(ours.len() >= 2, "{:?}", threads());
    for (name, blocked) in ours {
        // All 64 signals but SIGKILL, SIGSTOP and the two that glibc reserves.
        let unblockable = 1 << 8 | 1 << 18 | 1 << 31 | 1 << 32;
        assert_eq!(blocked | unblockable, u64::MAX, "{name} has blocked only {blocked:x}");
    }
    desk.stop();
}

#[test]
fn a_peer_that_closes_at_any_step_causes_down_and_leaves_no_thread() {
    let _alone = alone();
    for steps in 0..7 {
        let port = broker(move |peer| play_honestly(peer, steps));
        let (reason, detail) = down_reason(config(port));
        assert!(
            matches!(reason, DownReason::CLOSED | DownReason::UNREACHABLE),
            "{steps}: {reason:?} {detail}"
        );
    }
}

#[test]
fn a_peer_that_falls_silent_at_any_step_causes_down_in_time_and_leaves_no_thread() {
    let _alone = alone();
    for steps in 0..7 {
        let port = broker(move |peer| {
            peer.heartbeat_s = HEARTBEAT_S;
            play_honestly(peer, steps)?;
            peer.until_closed()
        });
        let (reason, detail) = down_reason(hasty(config(port)));
        assert_eq!(reason, DownReason::TIMEOUT, "{steps}: {detail}");
    }
}

#[test]
fn no_listener_is_unreachable() {
    let _alone = alone();
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    assert_eq!(down_reason(config(port)).0, DownReason::UNREACHABLE);
}

#[test]
fn a_hundred_failed_connects_leave_no_thread_and_no_socket() {
    let _alone = alone();
    let sockets = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let (connected, connects) = mpsc::channel();
    let port = broker(move |peer| {
        let _ = connected.send(());
        peer.header() // and silence, until the next connect
    });
    let before = sockets();
    let mut desk = Desk::start(AmqpConfig {
        connect_timeout: Duration::from_millis(20),
        backoff_min: Duration::from_millis(1),
        backoff_max: Duration::from_millis(1),
        ..config(port)
    });
    for _ in 0..100 {
        connects.recv_timeout(DEADLINE).unwrap();
        assert!(threads_named("lapin-io-loop") <= 2, "{:?}", threads());
    }
    desk.stop();
    until_no_lapin_thread_is_left();
    // The simulated broker's own sockets come and go meanwhile; a leak would leave a hundred or more.
    assert!(sockets() <= before + 20, "{before} before, {} after", sockets());
}

#[test]
fn no_frame_max_makes_lapin_allocate_huge_buffers() {
    let _alone = alone();
    for frame_max in [0, 1, u32::MAX] {
        let port = broker(move |peer| {
            peer.connect_with(frame_max)?;
            let got = peer.next_message()?;
            peer.ack(got.tag, false)?;
            peer.until_closed()
        });
        let mut desk = Desk::start(config(port));
        desk.until_connected();
        desk.publish(messages(0..1));
        desk.until_answered(1);
        assert_eq!(desk.outcomes[&0], Outcome::Confirmed, "{frame_max}");
        desk.stop();
    }
    until_no_lapin_thread_is_left();
}

#[test]
fn nested_tables_before_login_do_not_overflow_the_stack() {
    let _alone = alone();
    // 10 kB overflow a stack of 2 MiB; 4 MB fit into lapin's buffer.
    for levels in [2_000, 3_000, 20_000, 800_000] {
        let port = broker(move |peer| {
            peer.header()?;
            peer.start(&nested_table(levels))?;
            peer.until_closed()
        });
        let (reason, detail) = down_reason(config(port));
        assert_eq!(reason, DownReason::PROTOCOL, "{levels}: {detail}");
    }
}

#[test]
fn nested_headers_of_a_return_do_not_overflow_the_stack() {
    let _alone = alone();
    let port = broker(|peer| {
        peer.connect()?;
        let mut got = peer.next_message()?;
        // Class, weight, size 0, flag "headers".
        got.header = [&[0, 60, 0, 0][..], &[0; 8], &[0x20, 0], &long(&nested_table(20_000))].concat();
        got.body.clear();
        peer.give_back(&got)?;
        peer.until_closed()
    });
    let mut desk = Desk::start(config(port));
    desk.until_connected();
    desk.publish(messages(0..1));
    desk.until_answered(1);
    assert!(
        matches!(desk.outcomes[&0], Outcome::Lost { .. } | Outcome::Unanswered { .. }),
        "{:?}",
        desk.outcomes
    );
    assert_eq!(desk.until_down().0, DownReason::PROTOCOL);
    desk.stop();
    until_no_lapin_thread_is_left();
}

#[test]
fn the_error_names_a_peer_of_another_protocol() {
    let _alone = alone();
    for (greeting, word) in [
        (&b"HTTP/1.1 400 Bad Request\r\n\r\n"[..], "speaks HTTP, not AMQP"),
        (b"AMQP\0\x01\0\0", "0-9-1"),
    ] {
        let port = broker(move |peer| {
            peer.header()?;
            peer.stream.write_all(greeting)?;
            peer.until_closed()
        });
        let (reason, detail) = down_reason(config(port));
        assert_eq!(reason, DownReason::PROTOCOL, "{detail}");
        assert!(detail.contains(word), "{detail}");
    }
}

#[test]
fn garbage_in_any_state_causes_only_down() {
    let _alone = alone();
    let mut noise = 0x9e3779b97f4a7c15u64;
    for steps in 0..7 {
        let mut garbage: Vec<u8> = Vec::new();
        for _ in 0..500 {
            noise = noise
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            garbage.extend(noise.to_be_bytes());
        }
        // The second kind passes the guard: well-formed frames with random payloads.
        for framed in [false, true] {
            let garbage = garbage.clone();
            let port = broker(move |peer| {
                play_honestly(peer, steps)?;
                if framed {
                    for (n, payload) in garbage.chunks(40).enumerate() {
                        peer.frame([1, 2, 3][n % 3], (n % 2) as u16, payload)?;
                    }
                } else {
                    peer.stream.write_all(&garbage)?;
                }
                peer.until_closed()
            });
            let (reason, detail) = down_reason(config(port));
            assert!(
                matches!(reason, DownReason::PROTOCOL | DownReason::CLOSED),
                "{steps}: {reason:?} {detail}"
            );
        }
    }
}

#[test]
fn messages_arrive_unchanged_and_in_order_and_each_is_answered() {
    let _alone = alone();
    let (seen, arrived) = mpsc::channel();
    let port = broker(move |peer| {
        peer.connect()?;
        loop {
            // After a nack the channel is replaced, and the tags begin again.
            let got = peer.next_message_answering(|_, _| ())?;
            let number: u64 = String::from_utf8_lossy(&got.body[5..]).parse().unwrap();
            match (number + 1) % 10 {
                3 => peer.nack(got.tag)?,
                7 => {
                    peer.give_back(&got)?;
                    peer.ack(got.tag, false)?;
                }
                _ => peer.ack(got.tag, false)?,
            }
            seen.send(got.body).unwrap();
        }
    });
    let mut desk = Desk::start(config(port));
    desk.until_connected();
    for batch in 0..5 {
        desk.publish(messages(batch * 600..(batch + 1) * 600));
    }
    desk.until_answered(3000);
    for handle in 0..3000u64 {
        assert_eq!(arrived.recv().unwrap(), format!("body {handle}").into_bytes());
        let expected = match (handle + 1) % 10 {
            3 => Outcome::Nacked,
            7 => Outcome::Returned {
                code: 312,
                reason: "there is no queue \"k\" (312 NO_ROUTE)".into(),
            },
            _ => Outcome::Confirmed,
        };
        assert_eq!(desk.outcomes[&handle], expected, "{handle}");
    }
    desk.stop();
}

#[test]
fn no_more_than_the_window_is_outstanding() {
    let _alone = alone();
    let (seen, arrived) = mpsc::channel();
    let (order, orders) = mpsc::channel::<u64>();
    let orders = Mutex::new(orders);
    let port = broker(move |peer| {
        peer.connect()?;
        for _ in 0..10 {
            seen.send(peer.next_message()?.tag).unwrap();
        }
        peer.assert_next_is_fence()?;
        orders.lock().unwrap().recv().unwrap();
        peer.ack(10, true)?;
        for _ in 0..10 {
            seen.send(peer.next_message()?.tag).unwrap();
        }
        peer.ack(20, true)?;
        peer.until_closed()
    });
    let mut desk = Desk::start(AmqpConfig {
        window: 10,
        ..config(port)
    });
    desk.until_connected();
    desk.publish(messages(0..20));
    (1..=10).for_each(|tag| assert_eq!(arrived.recv_timeout(DEADLINE).unwrap(), tag));
    order.send(0).unwrap();
    desk.until_answered(20);
    assert!(desk.outcomes.values().all(|o| *o == Outcome::Confirmed));
    desk.stop();
}

#[test]
fn no_message_overtakes_lost_ones_that_the_worker_has_not_drained() {
    let _alone = alone();
    let (seen, arrived) = mpsc::channel();
    let connections = AtomicU32::new(0);
    let port = broker(move |peer| {
        peer.connect()?;
        let is_first = connections.fetch_add(1, Ordering::SeqCst) == 0;
        if !is_first {
            seen.send(b"connected again".to_vec()).unwrap();
        }
        loop {
            let got = peer.next_message()?;
            seen.send(got.body).unwrap();
            if is_first {
                return Ok(()); // the connection closes and leaves the message unanswered
            }
            peer.ack(got.tag, false)?;
        }
    });
    let mut desk = Desk::start(config(port));
    desk.until_connected();
    desk.publish(messages(0..1));
    assert_eq!(arrived.recv_timeout(DEADLINE).unwrap(), b"body 0");
    assert_eq!(arrived.recv_timeout(DEADLINE).unwrap(), b"connected again");
    // The worker was busy meanwhile: the loss waits in its inbox. Each message that it hands over now comes after the
    // lost one.
    let mut next = 1;
    while next < 20 {
        if desk.publisher.try_publish(messages(next..next + 1)).is_ok() {
            next += 1;
        }
        std::thread::yield_now();
    }
    desk.until_answered(next as usize);
    let lost = |outcome: &Outcome| matches!(outcome, Outcome::Lost { .. } | Outcome::Unanswered { .. });
    assert!(desk.outcomes.values().all(lost), "{:?}", desk.outcomes);
    desk.until_connected();
    desk.publish(messages(next..next + 1));
    desk.until_answered(next as usize + 1);
    assert_eq!(desk.outcomes[&next], Outcome::Confirmed);
    let sent: Vec<Vec<u8>> = arrived.try_iter().collect();
    assert_eq!(sent, [format!("body {next}").into_bytes()]);
}

#[test]
fn a_missing_confirm_times_out_and_younger_messages_are_lost() {
    let _alone = alone();
    const LIMIT: Duration = Duration::from_millis(600);
    for _ in 0..20 {
        let (seen, arrived) = mpsc::channel();
        let port = broker(move |peer| {
            peer.connect()?;
            loop {
                let _ = seen.send(peer.next_message()?.tag);
            }
        });
        let mut desk = Desk::start(AmqpConfig {
            confirm_timeout: LIMIT,
            ..config(port)
        });
        desk.until_connected();
        desk.publish(messages(0..1));
        assert_eq!(arrived.recv_timeout(DEADLINE).unwrap(), 1);
        let younger_at = Instant::now() + LIMIT / 2;
        while Instant::now() < younger_at {
            std::thread::yield_now();
        }
        let handed = Instant::now();
        desk.publish(messages(1..3));
        desk.until_answered(3);
        assert!(
            matches!(&desk.outcomes[&0], Outcome::Unanswered { .. }),
            "{:?}",
            desk.outcomes
        );
        assert_eq!(desk.until_down().0, DownReason::TIMEOUT);
        desk.stop();
        until_no_lapin_thread_is_left();
        // On a busy machine they may be overdue, too, or come after the timeout.
        let in_time = (1..3).all(|handle| desk.answered_at[&handle] - handed < LIMIT);
        if in_time && arrived.try_iter().eq([2, 3]) {
            for handle in 1..3 {
                let outcome = &desk.outcomes[&handle];
                assert!(
                    matches!(outcome, Outcome::Lost { .. } | Outcome::Unanswered { .. }),
                    "{outcome:?}"
                );
            }
            return;
        }
    }
    panic!("the younger messages were never open and young at the timeout");
}

#[test]
fn messages_that_a_responsive_broker_does_not_confirm_are_sent_again_on_the_same_connection() {
    let _alone = alone();
    let (seen, arrived) = mpsc::channel();
    let (request_tx, requests) = mpsc::channel();
    let connections = std::sync::Arc::new(AtomicU32::new(0));
    let count = connections.clone();
    // On the first channel the peer confirms only the even messages, as when one queue of several is gone.
    let port = broker(move |peer| {
        count.fetch_add(1, Ordering::SeqCst);
        peer.connect()?;
        let first = peer.publish_channel;
        loop {
            let got = peer.next_message_answering(|channel, class| request_tx.send((channel, class)).unwrap())?;
            let is_swallowed = peer.publish_channel == first && got.tag % 2 == 1;
            if !is_swallowed {
                peer.ack(got.tag, false)?;
            }
            seen.send(got.body).unwrap();
        }
    });
    let mut desk = Desk::start(AmqpConfig {
        patience: Duration::from_millis(200),
        ..config(port)
    });
    desk.until_connected();
    desk.publish(messages(0..6));
    desk.until_answered(6);
    for handle in 0..6u64 {
        match handle % 2 {
            0 => assert!(
                matches!(&desk.outcomes[&handle], Outcome::Unanswered { reason, .. } if reason.contains("did not confirm"))
            ),
            _ => assert_eq!(desk.outcomes[&handle], Outcome::Confirmed),
        }
    }
    // The number that is open at the report. On a busy machine the confirms of the other three may come after it.
    let is_reported = |d: &Desk| {
        d.states
            .iter()
            .any(|s| matches!(s, ConnectionState::Unconfirmed { messages: 3..=6, .. }))
    };
    assert!(is_reported(&desk), "{:?}", desk.states);
    // The worker hands over the lost messages again; they are confirmed on a new channel.
    desk.publish(
        [0, 2, 4]
            .map(|h| publication(h + 100, "k", format!("body {h}").into_bytes()))
            .into(),
    );
    desk.until_answered(9);
    for handle in [100, 102, 104] {
        assert_eq!(desk.outcomes[&handle], Outcome::Confirmed);
    }
    desk.until_connected();
    desk.stop();
    let bodies: Vec<_> = arrived
        .try_iter()
        .map(|body| String::from_utf8(body).unwrap())
        .collect();
    let expected = [0, 1, 2, 3, 4, 5, 0, 2, 4].map(|h| format!("body {h}"));
    assert_eq!(bodies, expected, "each once, and the unconfirmed again in order");
    assert_eq!(connections.load(Ordering::SeqCst), 1, "the connection is kept");
    assert!(
        desk.states.iter().all(|s| !matches!(s, ConnectionState::Down(_))),
        "{:?}",
        desk.states
    );
    let classes: Vec<_> = requests.try_iter().map(|(_, class)| class).collect();
    assert_eq!(
        classes[..4],
        [CONFIRM, CHANNEL, CHANNEL, CONFIRM],
        "a probe, close, open, confirms"
    );
    until_no_lapin_thread_is_left();
}

#[test]
fn a_broker_that_does_not_answer_the_probe_is_reported_and_no_message_is_sent_again() {
    let _alone = alone();
    let (order, orders) = mpsc::channel::<()>();
    let orders = Mutex::new(orders);
    let port = broker(move |peer| {
        peer.connect()?;
        let tag = peer.next_message()?.tag;
        peer.read()?; // the probe
        orders.lock().unwrap().recv().unwrap();
        peer.assert_next_is_fence()?;
        peer.ack(tag, false)?;
        peer.until_closed()
    });
    let mut desk = Desk::start(AmqpConfig {
        patience: Duration::from_millis(100),
        ..config(port)
    });
    desk.until_connected();
    desk.publish(messages(0..1));
    let silent = |s: &&ConnectionState| {
        matches!(
            s,
            ConnectionState::Unconfirmed {
                messages: 1,
                is_alive: false,
                ..
            }
        )
    };
    // Reports are 2 s apart, which is many times its patience.
    desk.until("reported twice", |d| d.states.iter().filter(silent).count() == 2);
    order.send(()).unwrap();
    desk.until_answered(1);
    assert_eq!(desk.outcomes[&0], Outcome::Confirmed);
    desk.until_connected();
    desk.stop();
}

/// Simulates RabbitMQ 3.10 when a quorum queue is deleted: it reads no more from this connection, while other
/// connections work.
#[test]
fn a_connection_that_is_stuck_is_replaced_once_the_broker_answers_over_another() {
    let _alone = alone();
    let stuck = Mutex::new(None);
    let (seen, arrived) = mpsc::channel();
    let port = broker(move |peer| {
        peer.connect()?;
        let got = peer.next_message()?;
        seen.send(got.body).unwrap();
        let mut stuck = stuck.lock().unwrap();
        if stuck.is_none() {
            *stuck = Some(peer.tcp.try_clone()?); // stays open
            return Ok(());
        }
        peer.ack(got.tag, false)?;
        peer.until_closed()
    });
    let mut desk = Desk::start(AmqpConfig {
        patience: Duration::from_millis(200),
        confirm_timeout: DEADLINE * 10,
        ..config(port)
    });
    desk.until_connected();
    desk.publish(messages(0..1));
    desk.until_answered(1);
    assert!(
        matches!(desk.outcomes[&0], Outcome::Lost { .. } | Outcome::Unanswered { .. }),
        "{:?}",
        desk.outcomes
    );
    let is_reported = |d: &Desk| {
        d.states
            .iter()
            .any(|s| matches!(s, ConnectionState::Unconfirmed { messages: 1, .. }))
    };
    assert!(is_reported(&desk), "{:?}", desk.states);
    let is_replaced = |s: &ConnectionState| matches!(s, ConnectionState::Down(fault) if fault.finding.detail.contains("only on another connection"));
    desk.until("replaced", |d| d.states.iter().any(is_replaced));
    desk.until_connected();
    desk.publish(vec![publication(100, "k", b"body 0".to_vec())]);
    desk.until_answered(2);
    assert_eq!(desk.outcomes[&100], Outcome::Confirmed);
    desk.stop();
    let bodies: Vec<_> = arrived.try_iter().collect();
    assert_eq!(bodies, [b"body 0", b"body 0"]);
}

/// The probe is behind the bytes of the large message. The broker answers over other connections at once.
#[test]
fn a_broker_that_takes_a_large_message_slowly_is_not_taken_for_silent() {
    let _alone = alone();
    let (seen, arrived) = mpsc::channel();
    let is_first = AtomicBool::new(true);
    let port = broker(move |peer| {
        peer.connect()?;
        if !is_first.swap(false, Ordering::SeqCst) {
            return peer.until_closed();
        }
        let mut slow = Peer::new(peer.tcp.try_clone()?, Box::new(SlowReader::new(peer.tcp.try_clone()?)?));
        slow.publish_channel = peer.publish_channel;
        let seen = seen.clone();
        std::thread::spawn(move || -> std::io::Result<()> {
            loop {
                let got = slow.next_message_answering(|_, _| {})?;
                seen.send(got.tag).unwrap();
                if got.tag > 1 {
                    slow.ack(got.tag, true)?; // the first one is confirmed late
                }
            }
        });
        Ok(())
    });
    let mut desk = Desk::start(AmqpConfig {
        patience: Duration::from_secs(1),
        ..config(port)
    });
    desk.until_connected();
    let mut batch = messages(0..2);
    batch[1].body.resize(10 << 20, b' ');
    desk.publish(batch);
    desk.until_answered(2);
    desk.stop();
    assert_eq!(
        [&desk.outcomes[&0], &desk.outcomes[&1]],
        [&Outcome::Confirmed; 2],
        "{:?}",
        desk.states
    );
    assert_eq!(arrived.try_iter().collect::<Vec<_>>(), [1, 2]);
}

#[test]
fn while_blocked_nothing_is_published_and_nothing_times_out() {
    let _alone = alone();
    const LIMIT: Duration = Duration::from_secs(3);
    let (order, orders) = mpsc::channel::<()>();
    let orders = Mutex::new(orders);
    let port = broker(move |peer| {
        peer.connect()?;
        let first = peer.next_message()?;
        peer.method(0, CONNECTION, 60, &short("low on memory"))?;
        orders.lock().unwrap().recv().unwrap();
        // A blocked client writes nothing, so no answer would come to a fence.
        peer.tcp.set_nonblocking(true)?;
        assert!(peer.tcp.peek(&mut [0]).is_err(), "published while blocked");
        peer.tcp.set_nonblocking(false)?;
        peer.method(0, CONNECTION, 61, &[])?;
        peer.ack(first.tag, false)?;
        loop {
            let got = peer.next_message()?;
            peer.ack(got.tag, false)?;
        }
    });
    let mut desk = Desk::start(AmqpConfig {
        confirm_timeout: LIMIT,
        ..config(port)
    });
    desk.until_connected();
    desk.publish(messages(0..1));
    desk.until("blocked", |d| {
        d.states.last()
            == Some(&ConnectionState::Blocked {
                reason: "low on memory".into(),
            })
    });
    (1..5).for_each(|h| desk.publish(messages(h..h + 1)));
    // Four batches wait in the queue; the fifth stays with the caller.
    assert!(desk.publisher.try_publish(messages(5..6)).is_err());
    until_one_times_out(LIMIT);
    desk.collect();
    assert!(desk.outcomes.is_empty() && matches!(desk.states.last(), Some(ConnectionState::Blocked { .. })));
    order.send(()).unwrap();
    desk.until_answered(5);
    assert!(
        desk.outcomes.values().all(|o| *o == Outcome::Confirmed),
        "{:?}",
        desk.outcomes
    );
    assert_eq!(desk.states.last(), Some(&ConnectionState::Connected));
    desk.stop();
}

#[test]
fn a_message_that_cannot_be_sent_is_refused_alone() {
    let _alone = alone();
    let port = broker(|peer| {
        peer.connect()?;
        loop {
            let got = peer.next_message()?;
            peer.ack(got.tag, false)?;
        }
    });
    let mut desk = Desk::start(config(port));
    desk.until_connected();
    let mut batch = messages(0..3);
    batch[1].address = "k".repeat(256).into();
    desk.publish(batch);
    desk.until_answered(3);
    assert_eq!(desk.outcomes[&0], Outcome::Confirmed);
    assert!(matches!(&desk.outcomes[&1], Outcome::Refused { reason } if reason.contains("routing key")));
    assert_eq!(desk.outcomes[&2], Outcome::Confirmed);
    desk.stop();
}

#[test]
fn a_closed_channel_loses_outstanding_messages_and_refuses_the_one_that_the_text_identifies() {
    let _alone = alone();
    let text = "PRECONDITION_FAILED - message size 5000 is larger than configured max size 4000";
    let port = broker(move |peer| {
        peer.connect()?;
        loop {
            let got = peer.next_message()?;
            match got.body.len() {
                5000 => break peer.close_channel(406, text),
                1 => {} // not confirmed before the channel closes
                _ => peer.ack(got.tag, false)?,
            }
        }?;
        peer.until_closed()
    });
    let mut desk = Desk::start(config(port));
    desk.until_connected();
    let body = |bytes| vec![b'x'; bytes];
    desk.publish(
        [(0, 10), (1, 1), (2, 5000)]
            .map(|(h, bytes)| publication(h, "k", body(bytes)))
            .into(),
    );
    desk.until_answered(3);
    assert_eq!(desk.outcomes[&0], Outcome::Confirmed);
    assert!(matches!(&desk.outcomes[&1], Outcome::Unanswered { reason, .. } if reason.contains("larger than")));
    let reason = "the body has 5000 bytes; max_message_size of the broker is 4000".into();
    assert_eq!(desk.outcomes[&2], Outcome::Refused { reason });
    assert_eq!(desk.until_down(), (DownReason::CLOSED, text.into()));
    desk.until_connected();
    desk.publish(vec![publication(3, "k", body(10))]);
    desk.until_answered(4);
    assert_eq!(desk.outcomes[&3], Outcome::Confirmed);
    desk.stop();
}

#[test]
fn stop_waits_for_confirms_on_their_way_and_loses_the_rest() {
    let _alone = alone();
    let (seen, arrived) = mpsc::channel();
    let (order, orders) = mpsc::channel::<()>();
    let orders = Mutex::new(orders);
    let port = broker(move |peer| {
        peer.connect()?;
        let first = peer.next_message()?;
        peer.next_message()?;
        seen.send(()).unwrap();
        orders.lock().unwrap().recv().unwrap();
        peer.ack(first.tag, false)?;
        peer.until_closed()
    });
    let mut desk = Desk::start(AmqpConfig {
        window: 2,
        ..config(port)
    });
    desk.until_connected();
    desk.publish(messages(0..3));
    arrived.recv_timeout(DEADLINE).unwrap();
    // The wait for confirms takes a third of the limit.
    desk.publisher.request_stop(Duration::from_secs(9));
    desk.until("the third given back", |desk| desk.outcomes.contains_key(&2));
    assert_eq!(desk.outcomes.len(), 1);
    order.send(()).unwrap();
    assert!(desk.publisher.stop(DEADLINE));
    desk.collect();
    assert_eq!(desk.died, None);
    assert_eq!(desk.outcomes[&0], Outcome::Confirmed);
    for handle in 1..3 {
        assert!(
            matches!(
                desk.outcomes[&handle],
                Outcome::Lost { .. } | Outcome::Unanswered { .. }
            ),
            "{handle}"
        );
    }
    assert!(
        desk.publisher.try_publish(messages(9..10)).is_err(),
        "a stopped publisher accepts a batch"
    );
    until_no_lapin_thread_is_left();
}

#[test]
fn stop_ends_in_time_whatever_the_peer_does() {
    let _alone = alone();
    // Silent during connect; silent with messages outstanding; blocked; never reading.
    for mode in 0..4 {
        let (ready, is_ready) = mpsc::channel();
        let port = broker(move |peer| {
            if mode > 0 {
                peer.connect()?;
            }
            if mode == 2 {
                peer.method(0, CONNECTION, 60, &short("low on disk"))?;
            }
            ready.send(()).unwrap();
            if mode == 3 {
                std::thread::park_timeout(DEADLINE);
            }
            peer.until_closed()
        });
        let mut desk = Desk::start(AmqpConfig {
            connect_timeout: Duration::from_secs(20),
            ..config(port)
        });
        is_ready.recv_timeout(DEADLINE).unwrap();
        if mode > 0 {
            desk.until("connected", |d| !d.states.is_empty());
            // 40 MB: far more than the socket's buffers hold.
            desk.publish((0..400).map(|h| publication(h, "k", vec![b'x'; 100_000])).collect());
        }
        println!("mode {mode}");
        desk.stop();
        assert_eq!(desk.outcomes.len(), if mode > 0 { 400 } else { 0 }, "{mode}");
        until_no_lapin_thread_is_left();
    }
}

#[test]
fn dropping_the_publisher_ends_its_thread() {
    let _alone = alone();
    let port = broker(|peer| {
        peer.connect()?;
        peer.until_closed()
    });
    let mut desk = Desk::start(config(port));
    desk.until_connected();
    drop(desk);
    let deadline = Instant::now() + DEADLINE;
    while threads_named("outbox-publish") > 0 {
        assert!(Instant::now() < deadline, "{:?}", threads());
        std::thread::yield_now();
    }
    until_no_lapin_thread_is_left();
}

#[test]
fn a_caller_that_never_drains_is_stopped_by_a_bound() {
    let _alone = alone();
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let config = AmqpConfig {
        window: 10,
        ..config(port)
    };
    let publisher = Publisher::start(config, Waker::new().unwrap()).unwrap();
    let mut taken = 0;
    let started = Instant::now();
    let deadline = started + DEADLINE;
    while taken < 80 {
        assert!(Instant::now() < deadline, "only {taken}");
        match publisher.try_publish(messages(0..1)) {
            Ok(()) => taken += 1,
            Err(_) => std::thread::yield_now(),
        }
    }
    // For as long as all before took.
    let until = Instant::now() + started.elapsed();
    while Instant::now() < until {
        assert!(publisher.try_publish(messages(0..1)).is_err(), "more than {taken}");
    }
}

/// Simulates RabbitMQ 3.10 after a node was killed: a channel that first used a quorum queue before it had a new leader
/// refuses every message for the queue.
#[test]
fn a_channel_that_refuses_messages_is_replaced_and_the_connection_kept() {
    let _alone = alone();
    let port = broker(|peer| {
        peer.connect()?;
        let mut channels = Vec::new();
        loop {
            let got = peer.next_message_answering(|_, _| ())?;
            if channels.last() != Some(&peer.publish_channel) {
                channels.push(peer.publish_channel);
            }
            match channels.len() {
                1 => peer.nack(got.tag)?,
                _ => peer.ack(got.tag, false)?,
            }
        }
    });
    let mut desk = Desk::start(config(port));
    desk.until_connected();
    desk.publish(messages(0..1));
    desk.until_answered(1);
    assert_eq!(desk.outcomes[&0], Outcome::Nacked);
    desk.publish(messages(1..4));
    desk.until_answered(4);
    assert!(
        (1..4).all(|handle| desk.outcomes[&handle] == Outcome::Confirmed),
        "{:?}",
        desk.outcomes
    );
    assert_eq!(desk.states, [ConnectionState::Connecting, ConnectionState::Connected]);
    desk.stop();
}
