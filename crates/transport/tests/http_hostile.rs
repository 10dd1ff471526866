//! The publisher of HTTP destinations against misbehaving peers.
//!
//! The promise: whatever the peer does, this process survives, and every message is answered in bounded time and
//! memory. `stop` returns within its limit and leaves no thread behind.

mod support;

use outbox_transport::{ConnectionState, DownReason, HttpConfig, Outcome};
use socket2::{Domain, SockRef, Socket, Type};
use std::io::{self, BufReader, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::sync::{Mutex, MutexGuard, mpsc};
use std::time::{Duration, Instant};
use support::receiver::{self, Receiver, Reply, message, of_key, read_request, status};
use support::{DEADLINE, Desk, threads, threads_named};

/// Serialises the tests: they count the threads of the process and measure its memory.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(|e| e.into_inner())
}

fn read(stream: &TcpStream) -> io::Result<()> {
    read_request(&mut BufReader::new(stream.try_clone()?)).map(drop)
}

/// Closes with a reset instead of an end of file.
fn reset(stream: TcpStream) -> io::Result<()> {
    SockRef::from(&stream).set_linger(Some(Duration::ZERO))
}

/// Timeouts so long that no wait of the publisher ends before the test.
fn patient(config: HttpConfig) -> HttpConfig {
    HttpConfig {
        timeout: 20 * DEADLINE,
        connect_timeout: 20 * DEADLINE,
        ..config
    }
}

/// Reads until the publisher closes the connection.
fn hang(mut stream: &TcpStream) -> io::Result<()> {
    while stream.read(&mut [0; 4096])? > 0 {}
    Ok(())
}

/// Sends bytes one at a time, with a few ms between them.
fn drip(mut stream: &TcpStream, bytes: impl IntoIterator<Item = u8>) -> io::Result<()> {
    // No value is ever sent on it: the timeout is the pause.
    let (_pause, paused) = mpsc::channel::<()>();
    for byte in bytes {
        stream.write_all(&[byte])?;
        let _ = paused.recv_timeout(Duration::from_millis(5));
    }
    Ok(())
}

fn forever(mut stream: &TcpStream, bytes: &[u8]) -> io::Result<()> {
    loop {
        stream.write_all(bytes)?;
    }
}

type Play = fn(TcpStream) -> io::Result<()>;

/// The effect of a peer on the destination and its message.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Ends {
    Down(DownReason),
    /// The status decides, whatever follows it.
    Confirmed,
    /// The status decides once the time for the rest is over.
    ConfirmedLate,
    Failed,
}

const OK: &[u8] = b"HTTP/1.1 200 OK\r\n";

const PEERS: &[(&str, Ends, Play)] = &[
    ("never answers", Ends::Down(DownReason::TIMEOUT), |s| hang(&s)),
    ("never reads", Ends::Down(DownReason::TIMEOUT), |s| {
        let (_never, comes) = mpsc::channel::<()>();
        let _ = comes.recv_timeout(Duration::from_secs(5));
        drop(s);
        Ok(())
    }),
    ("resets at once", Ends::Down(DownReason::CLOSED), reset),
    ("closes at once", Ends::Down(DownReason::CLOSED), |_| Ok(())),
    ("resets in the request", Ends::Down(DownReason::CLOSED), |mut s| {
        s.read_exact(&mut [0; 10])?;
        reset(s)
    }),
    ("resets behind the request", Ends::Down(DownReason::CLOSED), |s| {
        read(&s)?;
        reset(s)
    }),
    ("closes behind the request", Ends::Down(DownReason::CLOSED), |s| {
        read(&s)
    }),
    ("resets in the status line", Ends::Down(DownReason::CLOSED), |mut s| {
        read(&s)?;
        s.write_all(&OK[..10])?;
        reset(s)
    }),
    ("closes in the header", Ends::Confirmed, |mut s| {
        read(&s)?;
        s.write_all(b"HTTP/1.1 200 OK\r\ncontent-le")
    }),
    ("closes in the body", Ends::Confirmed, |mut s| {
        read(&s)?;
        s.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nabc")
    }),
    ("drips the status line", Ends::Down(DownReason::TIMEOUT), |s| {
        read(&s)?;
        drip(&s, OK[..15].iter().copied().chain(std::iter::repeat(b'K')))
    }),
    ("drips the header", Ends::ConfirmedLate, |s| {
        read(&s)?;
        drip(&s, OK.iter().copied().chain(b"x: y\r\n".iter().copied().cycle()))
    }),
    ("drips the body", Ends::Confirmed, |mut s| {
        read(&s)?;
        s.write_all(b"HTTP/1.1 200 OK\r\n\r\n")?;
        drip(&s, std::iter::repeat(b'x'))
    }),
    ("sends headers without end", Ends::Confirmed, |mut s| {
        read(&s)?;
        s.write_all(OK)?;
        forever(&s, b"x: y\r\n")
    }),
    ("sends one header without end", Ends::Confirmed, |mut s| {
        read(&s)?;
        s.write_all(b"HTTP/1.1 200 OK\r\nx: ")?;
        forever(&s, &[b'y'; 4096])
    }),
    ("sends a malformed header", Ends::Confirmed, |mut s| {
        read(&s)?;
        s.write_all(b"HTTP/1.1 200 OK\r\nno header\r\ncontent-length: 0\r\n\r\n")?;
        hang(&s)
    }),
    (
        "sends a malformed header behind an early hint",
        Ends::Confirmed,
        |mut s| {
            read(&s)?;
            s.write_all(b"HTTP/1.1 103 x\r\nx: y\r\n\r\nHTTP/1.1 202 x\r\nno header\r\n\r\n")?;
            hang(&s)
        },
    ),
    ("fails with a malformed header", Ends::Failed, |mut s| {
        read(&s)?;
        s.write_all(b"HTTP/1.1 500 x\r\nno header\r\n\r\n")?;
        hang(&s)
    }),
    (
        "is not available and sends a malformed header",
        Ends::Down(DownReason::new("unavailable", "")),
        |mut s| {
            read(&s)?;
            s.write_all(b"HTTP/1.1 503 x\r\nno header\r\n\r\n")?;
            hang(&s)
        },
    ),
    ("sends too many headers", Ends::Confirmed, |mut s| {
        read(&s)?;
        s.write_all(OK)?;
        (0..1000).try_for_each(|_| s.write_all(b"x: y\r\n"))?;
        s.write_all(b"\r\n")?;
        hang(&s)
    }),
    (
        "sends a status line without end",
        Ends::Down(DownReason::PROTOCOL),
        |mut s| {
            read(&s)?;
            s.write_all(b"HTTP/1.1 200 ")?;
            forever(&s, &[b'O'; 4096])
        },
    ),
    ("sends 1xx without end", Ends::Down(DownReason::PROTOCOL), |s| {
        read(&s)?;
        forever(&s, b"HTTP/1.1 103 Early Hints\r\nx: y\r\n\r\n")
    }),
    ("switches protocols", Ends::Down(DownReason::PROTOCOL), |mut s| {
        read(&s)?;
        s.write_all(b"HTTP/1.1 101 x\r\nupgrade: y\r\nconnection: upgrade\r\n\r\n")?;
        hang(&s)
    }),
    ("sends a body without end", Ends::Confirmed, |mut s| {
        read(&s)?;
        s.write_all(b"HTTP/1.1 200 OK\r\n\r\n")?;
        forever(&s, &[b'x'; 65536])
    }),
    ("fails with a body without end", Ends::Failed, |mut s| {
        read(&s)?;
        s.write_all(b"HTTP/1.1 500 x\r\ncontent-type: text/plain\r\n\r\n")?;
        forever(&s, &[b'x'; 65536])
    }),
    ("sends chunks without end", Ends::Confirmed, |mut s| {
        read(&s)?;
        s.write_all(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")?;
        forever(&s, b"5\r\nabcde\r\n")
    }),
    ("sends a chunk size without end", Ends::Confirmed, |mut s| {
        read(&s)?;
        s.write_all(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")?;
        forever(&s, b"0000000000000000")
    }),
    ("sends trailers without end", Ends::Failed, |mut s| {
        read(&s)?;
        s.write_all(b"HTTP/1.1 500 x\r\ntransfer-encoding: chunked\r\n\r\n0\r\n")?;
        forever(&s, b"x: y\r\n")
    }),
    ("sends bad chunks", Ends::Failed, |mut s| {
        read(&s)?;
        s.write_all(b"HTTP/1.1 500 x\r\ntransfer-encoding: chunked\r\ncontent-type: text/plain\r\n\r\nZZ\r\nabc")
    }),
    ("sends an absurd chunk", Ends::Confirmed, |mut s| {
        read(&s)?;
        s.write_all(b"HTTP/1.1 200 x\r\ntransfer-encoding: chunked\r\n\r\nffffffffffffffff\r\nabc")
    }),
    ("sends an absurd length", Ends::Confirmed, |mut s| {
        read(&s)?;
        s.write_all(b"HTTP/1.1 200 x\r\ncontent-length: 18446744073709551615\r\n\r\nabc")
    }),
    ("sends an invalid length", Ends::Confirmed, |mut s| {
        read(&s)?;
        s.write_all(b"HTTP/1.1 200 x\r\ncontent-length: -1\r\n\r\nabc")
    }),
    ("claims to send gzip", Ends::Failed, |mut s| {
        read(&s)?;
        // The start of a stream that unpacks to any size; the publisher does not unpack it.
        s.write_all(b"HTTP/1.1 500 x\r\ncontent-encoding: gzip\r\ncontent-type: text/plain\r\n\r\n")?;
        s.write_all(&[0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 2, 3])?;
        forever(&s, &[0xed, 0xc1, 1, 1, 0, 0, 0, 0x80, 0x90])
    }),
    ("does not speak HTTP", Ends::Down(DownReason::PROTOCOL), |mut s| {
        read(&s)?;
        s.write_all(b"AMQP\0\0\x09\x01 and more, so that it does not look slow\r\n\r\n")?;
        hang(&s)
    }),
    (
        "has no number in its status",
        Ends::Down(DownReason::PROTOCOL),
        |mut s| {
            read(&s)?;
            s.write_all(b"HTTP/1.1 abc x\r\n\r\n")?;
            hang(&s)
        },
    ),
    ("speaks HTTP/2", Ends::Down(DownReason::PROTOCOL), |mut s| {
        read(&s)?;
        s.write_all(b"\0\0\x06\x04\0\0\0\0\0\0\x03\0\0\0\x64\r\n\r\n")?;
        hang(&s)
    }),
];

fn resident_kb() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

fn until_no_thread_is_left() {
    let deadline = Instant::now() + DEADLINE;
    while threads_named("outbox-http") + threads_named("outbox-resolve") + threads_named("outbox-publish") > 0 {
        assert!(Instant::now() < deadline, "{:?}", threads());
        std::thread::yield_now();
    }
}

#[test]
fn every_misbehaviour_ends_in_time_with_the_right_outcome() {
    let _alone = alone();
    for (name, ends, play) in PEERS {
        let peer = Receiver::play(|stream, _, _| play(stream));
        // Only a peer that is slow gets a short timeout: a busy machine can make any other peer as slow.
        let timeout = match ends {
            Ends::Down(DownReason::TIMEOUT) | Ends::ConfirmedLate => Duration::from_millis(400),
            _ => DEADLINE,
        };
        let mut desk = Desk::start(HttpConfig {
            timeout,
            ..peer.config()
        });
        let before_kb = resident_kb();
        desk.publish(vec![of_key(1, "k"), of_key(2, "k")]);
        desk.until("answered", |desk| desk.outcomes.contains_key(&1));
        let grown_kb = resident_kb().saturating_sub(before_kb);
        match ends {
            Ends::Down(reason) => {
                let (found, detail) = desk.until_down();
                assert_eq!(found.name(), reason.name(), "a peer that {name}: {detail}");
                assert!(detail.chars().count() <= 200, "a peer that {name}: {detail}");
                assert!(
                    matches!(desk.outcomes[&1], Outcome::Lost { .. } | Outcome::Unanswered { .. }),
                    "a peer that {name}: {:?}",
                    desk.outcomes
                );
            }
            Ends::Confirmed | Ends::ConfirmedLate => {
                assert_eq!(desk.outcomes[&1], Outcome::Confirmed, "a peer that {name}")
            }
            Ends::Failed => {
                let outcome = &desk.outcomes[&1];
                assert!(
                    matches!(outcome, Outcome::Failed { reason } if reason.len() <= 200),
                    "a peer that {name}: {outcome:?}"
                );
            }
        }
        assert!(grown_kb < 16 << 10, "a peer that {name}: {grown_kb} kB more");
        desk.stop();
        until_no_thread_is_left();
    }
}

#[test]
fn stop_returns_within_its_limit_whatever_the_peer_does() {
    let _alone = alone();
    for (name, _, play) in PEERS {
        let (began, has_begun) = mpsc::channel();
        let began = Mutex::new(began);
        let peer = Receiver::play(move |stream, _, _| {
            let _ = began.lock().unwrap().send(());
            play(stream)
        });
        let mut desk = Desk::start(patient(peer.config()));
        desk.publish((1..=30).map(message).collect());
        has_begun.recv_timeout(DEADLINE).unwrap();
        println!("a peer that {name}");
        desk.stop();
        assert_eq!(desk.outcomes.len(), 30, "a peer that {name}");
        until_no_thread_is_left();
    }
}

#[test]
fn stop_interrupts_a_pending_connect() {
    let _alone = alone();
    // The backlog of a listener that never accepts is full: further connects hang until they time out.
    let listener = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    listener
        .bind(&SocketAddr::from((Ipv4Addr::LOCALHOST, 0)).into())
        .unwrap();
    listener.listen(0).unwrap();
    let port = listener.local_addr().unwrap().as_socket().unwrap().port();
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let mut filling = Vec::new();
    while let Ok(stream) = TcpStream::connect_timeout(&address, Duration::from_millis(100)) {
        filling.push(stream);
        assert!(filling.len() < 100, "the queue does not fill");
    }
    let url = format!("http://127.0.0.1:{port}/");
    let mut desk = Desk::start(patient(receiver::config(&url)));
    desk.publish(vec![message(1)]);
    let deadline = Instant::now() + DEADLINE;
    while threads_named("outbox-http") == 0 {
        assert!(Instant::now() < deadline);
        std::thread::yield_now();
    }
    desk.stop();
    assert!(
        matches!(desk.outcomes[&1], Outcome::Lost { .. } | Outcome::Unanswered { .. }),
        "{:?}",
        desk.outcomes
    );
    until_no_thread_is_left();

    let mut desk = Desk::start(HttpConfig {
        connect_timeout: Duration::from_millis(100),
        ..receiver::config(&url)
    });
    desk.publish(vec![message(1)]);
    assert_eq!(desk.until_down().0, DownReason::TIMEOUT);
    desk.stop();
}

#[test]
fn stop_waits_for_answers_on_their_way() {
    let _alone = alone();
    let (arrived, has_arrived) = mpsc::channel();
    let (go, goes) = mpsc::channel::<()>();
    let (arrived, goes) = (Mutex::new(arrived), Mutex::new(goes));
    let peer = Receiver::start(move |request| {
        if request.id() == "id-1" {
            arrived.lock().unwrap().send(()).unwrap();
            let _ = goes.lock().unwrap().recv_timeout(DEADLINE);
        }
        status(200)
    });
    let mut desk = Desk::start(peer.config());
    desk.publish(vec![of_key(1, "k"), of_key(2, "k")]);
    has_arrived.recv_timeout(DEADLINE).unwrap();
    desk.publisher.request_stop(DEADLINE);
    desk.until("given back", |desk| desk.outcomes.contains_key(&2));
    assert!(!desk.outcomes.contains_key(&1));
    go.send(()).unwrap();
    assert!(desk.publisher.stop(DEADLINE));
    desk.collect();
    assert_eq!(desk.outcomes[&1], Outcome::Confirmed);
    assert!(matches!(
        desk.outcomes[&2],
        Outcome::Lost { .. } | Outcome::Unanswered { .. }
    ));
    assert_eq!(peer.ids(), ["id-1"], "nothing more is sent");
    until_no_thread_is_left();
}

#[test]
fn a_dropped_publisher_leaves_no_thread() {
    let _alone = alone();
    let (began, has_begun) = mpsc::channel();
    let began = Mutex::new(began);
    let peer = Receiver::play(move |stream, _, _| {
        let _ = began.lock().unwrap().send(());
        hang(&stream)
    });
    let desk = Desk::start(patient(peer.config()));
    desk.publisher.try_publish(vec![message(1)]).unwrap();
    has_begun.recv_timeout(DEADLINE).unwrap();
    drop(desk);
    until_no_thread_is_left();
}

#[test]
fn a_hundred_failures_leave_no_thread_and_no_socket() {
    let _alone = alone();
    let sockets = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let peer = Receiver::start(|request| match request.id().len() % 2 {
        0 => Reply::Close(b"HTTP/1.1 503 x\r\n\r\n".to_vec()),
        _ => Reply::Close(Vec::new()),
    });
    let before = sockets();
    let mut desk = Desk::start(HttpConfig {
        backoff_min: Duration::from_millis(1),
        backoff_max: Duration::from_millis(1),
        ..peer.config()
    });
    for handle in 0..100 {
        desk.until("connected", |desk| {
            desk.states.last() == Some(&ConnectionState::Connected)
        });
        desk.publish(vec![message(handle)]);
        desk.until_answered(handle as usize + 1);
        desk.until("back", |desk| desk.states.last() == Some(&ConnectionState::Connected));
        assert!(threads_named("outbox-http") <= 8, "{:?}", threads());
    }
    desk.stop();
    until_no_thread_is_left();
    assert!(sockets() <= before + 20, "{before} before, {} after", sockets());
}
