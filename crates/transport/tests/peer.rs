//! The publisher against peers that misbehave, written with plain sockets: no broker is needed.
//!
//! The promise: whatever the peer does, this process survives, says `Down` in bounded time and leaves no thread behind.

mod support;

use outbox_transport::{AmqpConfig, Bell, ConnectionState, DownReason, Outcome, Publisher};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Mutex, MutexGuard, mpsc};
use std::time::{Duration, Instant};
use support::{DEADLINE, Desk, publication, threads, threads_named};

const CONNECTION: u16 = 10;
const CHANNEL: u16 = 20;
const EXCHANGE: u16 = 40;
const BASIC: u16 = 60;
const CONFIRM: u16 = 85;

/// Short, so that silence is found soon; the publisher takes the lower of both sides' wishes.
const HEARTBEAT_S: u16 = 1;

/// One test at a time: they count the threads of the process.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(|e| e.into_inner())
}

fn config(port: u16) -> AmqpConfig {
    AmqpConfig {
        connect_timeout: Duration::from_millis(300),
        ..support::config(port)
    }
}

/// Plays the broker on every connection, one after the other, until the test ends.
fn broker(play: impl Fn(&mut Peer) -> std::io::Result<()> + Send + 'static) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::Builder::new()
        .name("fake-broker".into())
        .spawn(move || {
            while let Ok((stream, _)) = listener.accept() {
                stream.set_read_timeout(Some(DEADLINE)).unwrap();
                let mut peer = Peer {
                    stream,
                    publish_channel: 0,
                    next_tag: 1,
                };
                let _ = play(&mut peer);
            }
        })
        .unwrap();
    port
}

struct Peer {
    stream: TcpStream,
    publish_channel: u16,
    next_tag: u64,
}

/// A message that the publisher sent.
struct Got {
    tag: u64,
    exchange: String,
    routing_key: String,
    /// The payload of the content header, to be sent back in a return.
    header: Vec<u8>,
    body: Vec<u8>,
}

fn short(text: &str) -> Vec<u8> {
    [&[text.len() as u8][..], text.as_bytes()].concat()
}

fn long(bytes: &[u8]) -> Vec<u8> {
    [&(bytes.len() as u32).to_be_bytes()[..], bytes].concat()
}

impl Peer {
    fn frame(&mut self, kind: u8, channel: u16, payload: &[u8]) -> std::io::Result<()> {
        let head = [
            &[kind][..],
            &channel.to_be_bytes(),
            &(payload.len() as u32).to_be_bytes(),
        ]
        .concat();
        self.stream.write_all(&[&head, payload, &[0xce]].concat())
    }

    fn method(&mut self, channel: u16, class: u16, method: u16, arguments: &[u8]) -> std::io::Result<()> {
        self.frame(
            1,
            channel,
            &[&class.to_be_bytes()[..], &method.to_be_bytes(), arguments].concat(),
        )
    }

    /// Type, channel, payload; heartbeats are skipped.
    fn read(&mut self) -> std::io::Result<(u8, u16, Vec<u8>)> {
        loop {
            let mut head = [0; 7];
            self.stream.read_exact(&mut head)?;
            let mut payload = vec![0; u32::from_be_bytes(head[3..].try_into().unwrap()) as usize + 1];
            self.stream.read_exact(&mut payload)?;
            payload.pop();
            if head[0] != 8 {
                return Ok((head[0], u16::from_be_bytes([head[1], head[2]]), payload));
            }
        }
    }

    fn header(&mut self) -> std::io::Result<()> {
        self.stream.read_exact(&mut [0; 8])
    }

    fn start(&mut self, properties: &[u8]) -> std::io::Result<()> {
        let arguments = [
            &[0, 9][..],
            &long(properties),
            &long(b"PLAIN AMQPLAIN"),
            &long(b"en_US"),
        ]
        .concat();
        self.method(0, CONNECTION, 10, &arguments)
    }

    fn tune(&mut self, frame_max: u32, heartbeat: u16) -> std::io::Result<()> {
        let arguments = [
            &2047u16.to_be_bytes()[..],
            &frame_max.to_be_bytes(),
            &heartbeat.to_be_bytes(),
        ]
        .concat();
        self.method(0, CONNECTION, 30, &arguments)
    }

    /// Answers one request. Some(channel) if it turned on confirms, the last step of connecting.
    fn answer_one(&mut self, frame_max: u32) -> std::io::Result<Option<u16>> {
        let (_, channel, payload) = self.read()?;
        let class = u16::from_be_bytes([payload[0], payload[1]]);
        let method = u16::from_be_bytes([payload[2], payload[3]]);
        match (class, method) {
            (CONNECTION, 11) => self.tune(frame_max, HEARTBEAT_S)?,
            (CONNECTION, 40) => self.method(0, CONNECTION, 41, &short(""))?,
            (CONNECTION, 50) => self.method(0, CONNECTION, 51, &[])?,
            (CHANNEL, 10) => self.method(channel, CHANNEL, 11, &long(b""))?,
            (CHANNEL, 40) => self.method(channel, CHANNEL, 41, &[])?,
            (EXCHANGE, 10) => self.method(channel, EXCHANGE, 11, &[])?,
            (CONFIRM, 10) => {
                self.method(channel, CONFIRM, 11, &[])?;
                return Ok(Some(channel));
            }
            _ => {}
        }
        Ok(None)
    }

    /// Everything up to confirm mode, honestly.
    fn connect(&mut self) -> std::io::Result<()> {
        self.connect_with(131_072)
    }

    fn connect_with(&mut self, frame_max: u32) -> std::io::Result<()> {
        self.header()?;
        self.start(&[])?;
        loop {
            if let Some(channel) = self.answer_one(frame_max)? {
                self.publish_channel = channel;
                return Ok(());
            }
        }
    }

    fn next_message(&mut self) -> std::io::Result<Got> {
        let (_, channel, publish) = self.read()?;
        if publish[..4] != [0, BASIC as u8, 0, 40] {
            // A goodbye, most likely.
            self.method(channel, CONNECTION, 51, &[])?;
            return Err(std::io::ErrorKind::ConnectionAborted.into());
        }
        let text = |at: usize| {
            let end = at + 1 + publish[at] as usize;
            (String::from_utf8(publish[at + 1..end].to_vec()).unwrap(), end)
        };
        let (exchange, at) = text(6);
        let (routing_key, _) = text(at);
        let (_, _, header) = self.read()?;
        let size = u64::from_be_bytes(header[4..12].try_into().unwrap()) as usize;
        let mut body = Vec::new();
        while body.len() < size {
            body.extend(self.read()?.2);
        }
        self.next_tag += 1;
        Ok(Got {
            tag: self.next_tag - 1,
            exchange,
            routing_key,
            header,
            body,
        })
    }

    fn ack(&mut self, tag: u64, multiple: bool) -> std::io::Result<()> {
        self.method(
            self.publish_channel,
            BASIC,
            80,
            &[&tag.to_be_bytes()[..], &[multiple as u8]].concat(),
        )
    }

    fn nack(&mut self, tag: u64) -> std::io::Result<()> {
        self.method(
            self.publish_channel,
            BASIC,
            120,
            &[&tag.to_be_bytes()[..], &[0]].concat(),
        )
    }

    fn give_back(&mut self, got: &Got) -> std::io::Result<()> {
        let names = [short("NO_ROUTE"), short(&got.exchange), short(&got.routing_key)].concat();
        let channel = self.publish_channel;
        self.method(channel, BASIC, 50, &[&312u16.to_be_bytes()[..], &names].concat())?;
        self.frame(2, channel, &got.header)?;
        if got.body.is_empty() {
            Ok(())
        } else {
            self.frame(3, channel, &got.body)
        }
    }

    fn close_channel(&mut self, code: u16, text: &str) -> std::io::Result<()> {
        let arguments = [&code.to_be_bytes()[..], &short(text), &[0; 4]].concat();
        self.method(self.publish_channel, CHANNEL, 40, &arguments)
    }

    /// Reads until the publisher has had enough.
    fn until_closed(&mut self) -> std::io::Result<()> {
        while self.stream.read(&mut [0; 4096])? > 0 {}
        Ok(())
    }
}

fn messages(handles: std::ops::Range<u64>) -> Vec<outbox_transport::Publication> {
    handles
        .map(|h| publication(h, "", "k", format!("body {h}").into_bytes()))
        .collect()
}

fn until_no_lapin_thread_is_left() {
    let deadline = Instant::now() + DEADLINE;
    while threads_named("lapin-io-loop") > 0 {
        assert!(Instant::now() < deadline, "{:?}", threads());
        std::thread::yield_now();
    }
}

/// Starts, waits for the first `Down`, stops; every thread must be gone then.
fn down_reason(config: AmqpConfig) -> (DownReason, String) {
    let mut desk = Desk::start(config);
    let down = desk.until_down();
    desk.publish(messages(0..3));
    desk.until_answered(3);
    assert!(
        desk.outcomes.values().all(|o| matches!(o, Outcome::Lost { .. })),
        "{:?}",
        desk.outcomes
    );
    desk.stop();
    until_no_lapin_thread_is_left();
    down
}

#[test]
fn every_thread_has_every_signal_blocked_and_the_starter_keeps_its_mask() {
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
    // A name instead of an address also starts a thread of tokio's pool.
    let mut desk = Desk::start(AmqpConfig {
        host: "localhost".into(),
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
        // All 64 but SIGKILL, SIGSTOP and the two that glibc keeps for itself.
        let unblockable = 1 << 8 | 1 << 18 | 1 << 31 | 1 << 32;
        assert_eq!(blocked | unblockable, u64::MAX, "{name} has blocked only {blocked:x}");
    }
    desk.stop();
}

#[test]
fn a_peer_that_hangs_up_at_any_step_makes_down_and_leaves_no_thread() {
    let _alone = alone();
    for steps in 0..7 {
        let port = broker(move |peer| play_honestly(peer, steps));
        let (reason, detail) = down_reason(config(port));
        assert!(
            matches!(reason, DownReason::Closed | DownReason::Unreachable),
            "{steps}: {reason:?} {detail}"
        );
    }
}

#[test]
fn a_peer_that_falls_silent_at_any_step_makes_down_in_time_and_leaves_no_thread() {
    let _alone = alone();
    for steps in 0..7 {
        let port = broker(move |peer| {
            play_honestly(peer, steps)?;
            peer.until_closed()
        });
        let started = Instant::now();
        let (reason, detail) = down_reason(config(port));
        assert_eq!(reason, DownReason::Timeout, "{steps}: {detail}");
        assert!(
            started.elapsed() < Duration::from_secs(5),
            "{steps}: {:?}",
            started.elapsed()
        );
    }
}

/// The first steps of connecting, then no more. Six lead to `Connected`.
fn play_honestly(peer: &mut Peer, steps: usize) -> std::io::Result<()> {
    if steps > 0 {
        peer.header()?;
        peer.start(&[])?;
    }
    for _ in 1..steps {
        peer.answer_one(131_072)?;
    }
    Ok(())
}

#[test]
fn no_listener_is_unreachable() {
    let _alone = alone();
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    assert_eq!(down_reason(config(port)).0, DownReason::Unreachable);
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
    // The fake brokers' own sockets come and go meanwhile; a leak would leave a hundred or more.
    assert!(sockets() <= before + 20, "{before} before, {} after", sockets());
}

#[test]
fn a_frame_max_of_nothing_or_everything_does_not_make_lapin_allocate() {
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

/// A table with arrays in arrays.
fn nested_table(levels: usize) -> Vec<u8> {
    // From the outside in, for quadratic copying of 800,000 levels takes minutes.
    let mut table = short("x");
    for level in (0..levels).rev() {
        table.push(b'A');
        table.extend((level as u32 * 5 + 1).to_be_bytes());
    }
    table.push(b'V');
    table
}

#[test]
fn nested_tables_before_login_do_not_overflow_the_stack() {
    let _alone = alone();
    // 10 kB is what overflows 2 MiB; 4 MB is what fits into lapin's buffer.
    for levels in [2_000, 3_000, 20_000, 800_000] {
        let port = broker(move |peer| {
            peer.header()?;
            peer.start(&nested_table(levels))?;
            peer.until_closed()
        });
        let (reason, detail) = down_reason(config(port));
        assert_eq!(reason, DownReason::Protocol, "{levels}: {detail}");
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
    assert!(matches!(desk.outcomes[&0], Outcome::Lost { .. }), "{:?}", desk.outcomes);
    assert_eq!(desk.until_down().0, DownReason::Protocol);
    desk.stop();
    until_no_lapin_thread_is_left();
}

#[test]
fn a_peer_of_another_protocol_is_named_as_such() {
    let _alone = alone();
    for (greeting, word) in [
        (&b"HTTP/1.1 400 Bad Request\r\n\r\n"[..], "does not speak AMQP"),
        (b"AMQP\0\x01\0\0", "0-9-1"),
    ] {
        let port = broker(move |peer| {
            peer.header()?;
            peer.stream.write_all(greeting)?;
            peer.until_closed()
        });
        let (reason, detail) = down_reason(config(port));
        assert_eq!(reason, DownReason::Protocol, "{detail}");
        assert!(detail.contains(word), "{detail}");
    }
}

#[test]
fn garbage_in_any_state_makes_down_and_no_more() {
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
        // The second kind passes the guard: well-formed frames with senseless payloads.
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
                matches!(reason, DownReason::Protocol | DownReason::Closed),
                "{steps}: {reason:?} {detail}"
            );
        }
    }
}

#[test]
fn messages_arrive_in_order_as_given_and_each_is_answered() {
    let _alone = alone();
    let (seen, arrived) = mpsc::channel();
    let port = broker(move |peer| {
        peer.connect()?;
        loop {
            let got = peer.next_message()?;
            match got.tag % 10 {
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
                reason: "NO_ROUTE".into(),
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
        peer.stream.set_read_timeout(Some(Duration::from_millis(200)))?;
        let eleventh = peer.next_message();
        assert!(eleventh.is_err(), "an eleventh message");
        peer.stream.set_read_timeout(Some(DEADLINE))?;
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
fn a_confirm_that_does_not_come_times_out_and_the_younger_are_lost() {
    let _alone = alone();
    let (seen, arrived) = mpsc::channel();
    let port = broker(move |peer| {
        peer.connect()?;
        loop {
            seen.send(peer.next_message()?.tag).unwrap();
        }
    });
    let mut desk = Desk::start(AmqpConfig {
        confirm_timeout: Duration::from_millis(600),
        ..config(port)
    });
    desk.until_connected();
    desk.publish(messages(0..2));
    (1..=2).for_each(|tag| assert_eq!(arrived.recv_timeout(DEADLINE).unwrap(), tag));
    let second_at = Instant::now() + Duration::from_millis(300);
    while Instant::now() < second_at {
        std::thread::yield_now();
    }
    desk.publish(messages(2..4));
    desk.until_answered(4);
    for handle in 0..2 {
        assert_eq!(desk.outcomes[&handle], Outcome::TimedOut);
    }
    for handle in 2..4 {
        assert!(
            matches!(desk.outcomes[&handle], Outcome::Lost { .. }),
            "{:?}",
            desk.outcomes[&handle]
        );
    }
    assert_eq!(desk.until_down().0, DownReason::Timeout);
    desk.stop();
    until_no_lapin_thread_is_left();
}

#[test]
fn while_blocked_nothing_is_published_and_nothing_times_out() {
    let _alone = alone();
    let (order, orders) = mpsc::channel::<()>();
    let orders = Mutex::new(orders);
    let port = broker(move |peer| {
        peer.connect()?;
        let first = peer.next_message()?;
        peer.method(0, CONNECTION, 60, &short("low on memory"))?;
        orders.lock().unwrap().recv().unwrap();
        peer.stream.set_read_timeout(Some(Duration::from_millis(100)))?;
        assert!(peer.next_message().is_err(), "published while blocked");
        peer.stream.set_read_timeout(Some(DEADLINE))?;
        peer.method(0, CONNECTION, 61, &[])?;
        peer.ack(first.tag, false)?;
        loop {
            let got = peer.next_message()?;
            peer.ack(got.tag, false)?;
        }
    });
    let mut desk = Desk::start(AmqpConfig {
        confirm_timeout: Duration::from_millis(300),
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
    // Four batches wait; the fifth is the caller's to keep.
    assert!(desk.publisher.try_publish(messages(5..6)).is_err());
    let twice_the_timeout = Instant::now() + Duration::from_millis(600);
    while Instant::now() < twice_the_timeout {
        desk.collect();
        assert!(desk.outcomes.is_empty() && matches!(desk.states.last(), Some(ConnectionState::Blocked { .. })));
        std::thread::yield_now();
    }
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
    batch[1].routing_key = "k".repeat(256).into();
    desk.publish(batch);
    desk.until_answered(3);
    assert_eq!(desk.outcomes[&0], Outcome::Confirmed);
    assert!(matches!(&desk.outcomes[&1], Outcome::Refused { reason } if reason.contains("routing key")));
    assert_eq!(desk.outcomes[&2], Outcome::Confirmed);
    desk.stop();
}

#[test]
fn a_closed_channel_loses_what_is_outstanding_and_charges_the_culprit_where_the_text_names_it() {
    let _alone = alone();
    let text = "PRECONDITION_FAILED - message size 5000 is larger than configured max size 4000";
    let port = broker(move |peer| {
        peer.connect()?;
        loop {
            let got = peer.next_message()?;
            match got.body.len() {
                5000 => break peer.close_channel(406, text),
                1 => {} // not confirmed yet when the channel goes
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
            .map(|(h, bytes)| publication(h, "", "k", body(bytes)))
            .into(),
    );
    desk.until_answered(3);
    assert_eq!(desk.outcomes[&0], Outcome::Confirmed);
    assert!(matches!(&desk.outcomes[&1], Outcome::Lost { reason } if reason.contains("larger than")));
    assert_eq!(desk.outcomes[&2], Outcome::Refused { reason: text.into() });
    assert_eq!(desk.until_down(), (DownReason::Closed, text.into()));
    desk.until_connected();
    desk.publish(vec![publication(3, "", "k", body(10))]);
    desk.until_answered(4);
    assert_eq!(desk.outcomes[&3], Outcome::Confirmed);
    desk.stop();
}

#[test]
fn stop_waits_for_confirms_on_their_way_and_loses_the_rest() {
    let _alone = alone();
    let (seen, arrived) = mpsc::channel();
    let port = broker(move |peer| {
        peer.connect()?;
        let first = peer.next_message()?;
        let second = peer.next_message()?;
        seen.send(()).unwrap();
        // Acked only once the publisher says goodbye or a while later, whichever is first.
        peer.stream.set_read_timeout(Some(Duration::from_millis(100)))?;
        let _ = peer.next_message();
        peer.ack(first.tag, false)?;
        let _ = second;
        peer.stream.set_read_timeout(Some(DEADLINE))?;
        peer.until_closed()
    });
    let mut desk = Desk::start(config(port));
    desk.until_connected();
    desk.publish(messages(0..2));
    arrived.recv_timeout(DEADLINE).unwrap();
    let started = Instant::now();
    desk.stop();
    assert!(started.elapsed() < Duration::from_secs(3), "{:?}", started.elapsed());
    assert_eq!(desk.outcomes[&0], Outcome::Confirmed);
    assert!(matches!(desk.outcomes[&1], Outcome::Lost { .. }));
    assert!(
        desk.publisher.try_publish(messages(9..10)).is_err(),
        "stopped, yet it takes a batch"
    );
    until_no_lapin_thread_is_left();
}

#[test]
fn stop_ends_in_time_whatever_the_peer_does() {
    let _alone = alone();
    // Silent during connect, silent with messages outstanding, blocked, and never reading at all.
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
            // 40 MB: far more than the socket's buffers take.
            desk.publish((0..400).map(|h| publication(h, "", "k", vec![b'x'; 100_000])).collect());
        }
        let started = Instant::now();
        assert!(
            desk.publisher.stop(Duration::from_secs(1)),
            "{mode}: the thread did not end"
        );
        assert!(
            started.elapsed() < Duration::from_secs(1),
            "{mode}: {:?}",
            started.elapsed()
        );
        desk.collect();
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
    let publisher = Publisher::start(config, Bell::new().unwrap()).unwrap();
    let mut taken = 0;
    let deadline = Instant::now() + Duration::from_millis(300);
    while Instant::now() < deadline {
        if publisher.try_publish(messages(0..1)).is_ok() {
            taken += 1;
        }
    }
    assert_eq!(taken, 80);
}
