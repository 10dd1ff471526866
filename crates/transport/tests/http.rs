//! The publisher of HTTP destinations, against a hand-written receiver: what is sent, what each answer means, when the
//! destination pauses.

mod support;

use outbox_transport::{
    AllowList, ConnectionState, Deadline, DownReason, HeaderValue, HttpAuth, HttpConfig, Outcome, Secret,
};
use std::io::{BufReader, Read, Write};
use std::net::TcpListener;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant, SystemTime};
use support::receiver::{self, Receiver, Reply, message, of_key, status, with};
use support::{DEADLINE, Desk, resolver, threads, threads_named};

const KEY_FAILED: &str = "an earlier message of its key failed";

fn is_lost(outcome: &Outcome, text: &str) -> bool {
    matches!(
        outcome,
        Outcome::Unanswered { reason, .. } | Outcome::Postponed { reason, .. } | Outcome::Lost { reason }
        if reason.contains(text)
    )
}

fn downs(desk: &Desk) -> usize {
    let states = desk.states.iter();
    states.filter(|state| matches!(state, ConnectionState::Down(_))).count()
}

/// Waits for the pause after the `count`th failure to be over.
fn until_back(desk: &mut Desk, count: usize) {
    desk.until("back", |desk| {
        downs(desk) == count && desk.states.last() == Some(&ConnectionState::Connected)
    });
}

fn readable(desk: &Desk) {
    let mut poll = libc::pollfd {
        fd: desk.publisher.waker().fd(),
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: one live pollfd.
    let ready = unsafe { libc::poll(&mut poll, 1, DEADLINE.as_millis() as i32) };
    assert_eq!(ready, 1, "no event woke the worker");
}

#[test]
fn messages_arrive_unchanged_over_one_connection() {
    let receiver = Receiver::start(|_| status(204));
    let mut desk = Desk::start(HttpConfig {
        auth: HttpAuth::Bearer(Secret::new("token-1")),
        connection_name: "outbox: server-1".into(),
        ..receiver.config()
    });
    for handle in 0..20 {
        let mut message = message(handle);
        message.body = vec![0, 255, b'\r', b'\n', handle as u8];
        message.properties.headers = vec![
            ("Seq".into(), HeaderValue::Int(handle as i64)),
            ("name".into(), HeaderValue::Text("Zoë".into())),
        ];
        desk.publish(vec![message]);
        desk.until_answered(handle as usize + 1);
    }
    assert!(
        desk.outcomes.values().all(|outcome| *outcome == Outcome::Confirmed),
        "{:?}",
        desk.outcomes
    );
    assert_eq!(desk.states, [ConnectionState::Connecting, ConnectionState::Connected]);
    desk.stop();
    assert_eq!(receiver.connections(), 1, "the connection is kept");
    for (n, request) in receiver.requests().into_iter().enumerate() {
        assert_eq!(request.line, "POST /hook?a=b HTTP/1.1\r\n");
        assert_eq!(request.body, [0, 255, b'\r', b'\n', n as u8]);
        let (id, port) = (format!("id-{n}"), receiver.port);
        let mut headers: Vec<_> = request
            .headers
            .iter()
            .map(|(name, value)| (name.as_str(), value.as_str()))
            .collect();
        headers.sort_unstable();
        let agent = concat!("outbox/", env!("CARGO_PKG_VERSION"), " (outbox: server-1)");
        let expected = [
            ("accept-encoding", "identity"),
            ("authorization", "Bearer token-1"),
            ("content-length", "5"),
            ("content-type", "application/json"),
            ("host", &format!("127.0.0.1:{port}")),
            ("idempotency-key", &id),
            ("name", "Zoë"),
            ("seq", &n.to_string()),
            ("user-agent", agent),
            ("webhook-id", &id),
        ];
        assert_eq!(headers, expected);
    }
}

#[test]
fn keys_go_in_parallel_up_to_the_concurrency() {
    let (at_once, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let (now, max) = (at_once.clone(), most.clone());
    let all_here = std::sync::Barrier::new(4);
    let receiver = Receiver::start(move |request| {
        max.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
        if request.id() != "id-0" {
            all_here.wait(); // only four at a time pass
        }
        now.fetch_sub(1, Ordering::SeqCst);
        status(200)
    });
    let mut desk = Desk::start(HttpConfig {
        concurrency: 4,
        ..receiver.config()
    });
    desk.publish(vec![message(0)]);
    desk.until_answered(1);
    desk.publish(
        (1..=20)
            .map(|handle| of_key(handle, &format!("key {}", handle % 4)))
            .collect(),
    );
    desk.until_answered(21);
    desk.stop();
    assert_eq!(most.load(Ordering::SeqCst), 4);
    assert!(receiver.connections() <= 4);
}

#[test]
fn each_status_has_its_outcome() {
    let code = Arc::new(AtomicUsize::new(0));
    let code_to_send = code.clone();
    let receiver = Receiver::start(move |_| {
        let code = code_to_send.load(Ordering::SeqCst) as u16;
        match code {
            204 | 304 => Reply::Bytes(format!("HTTP/1.1 {code} x\r\n\r\n").into_bytes()),
            _ => with(code, "content-type: application/json\r\n", "{\"error\": \"why\"}"),
        }
    });
    let mut desk = Desk::start(receiver.config());
    let mut count = 0;
    let rules: [(&[u16], &str); 4] = [
        (&[200, 201, 202, 204, 206, 299], "confirmed"),
        (&[400, 413, 414, 415, 422, 431], "refused"),
        (
            &[402, 406, 408, 409, 411, 418, 425, 428, 500, 501, 505, 507, 599],
            "failed",
        ),
        (
            &[
                300, 301, 302, 303, 304, 307, 308, 401, 403, 404, 405, 407, 410, 429, 502, 503, 504, 600, 999,
            ],
            "down",
        ),
    ];
    let mut down_count = 0;
    for (codes, meaning) in rules {
        for sent_code in codes {
            code.store(usize::from(*sent_code), Ordering::SeqCst);
            desk.publish(vec![of_key(count, "k")]);
            desk.until_answered(count as usize + 1);
            let outcome = desk.outcomes[&count].clone();
            let (text, found) = match &outcome {
                Outcome::Confirmed => ("", "confirmed"),
                Outcome::Refused { reason } => (reason.as_str(), "refused"),
                Outcome::Failed { reason } => (reason.as_str(), "failed"),
                Outcome::Unanswered { reason, .. } | Outcome::Postponed { reason, .. } => (reason.as_str(), "down"),
                other => panic!("{sent_code}: {other:?}"),
            };
            assert_eq!(found, meaning, "{sent_code}: {outcome:?}");
            if meaning != "confirmed" {
                assert!(text.contains(&format!("HTTP {sent_code}")), "{text}");
                assert!(text.contains("{\"error\": \"why\"}") || *sent_code == 304, "{text}");
            }
            if meaning == "down" {
                down_count += 1;
                until_back(&mut desk, down_count);
            }
            assert_eq!(downs(&desk), down_count, "{sent_code}: {:?}", desk.states);
            count += 1;
        }
    }
    desk.stop();
    assert_eq!(receiver.requests().len() as u64, count, "each message was sent once");
}

#[test]
fn each_failure_has_its_down_reason() {
    for (code, word) in [
        (401, "auth_refused"),
        (302, "endpoint_refused"),
        (404, "endpoint_refused"),
        (429, "throttled"),
        (503, "unavailable"),
    ] {
        let receiver = Receiver::start(move |_| status(code));
        let mut desk = Desk::start(receiver.config());
        desk.publish(vec![message(1)]);
        let (reason, detail) = desk.until_down();
        assert_eq!(reason.name(), word, "{detail}");
        desk.stop();
    }
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let nowhere = receiver::config(&format!("http://127.0.0.1:{port}/"));
    let no_name = receiver::config("http://no-such-host.invalid/");
    for config in [nowhere, no_name] {
        let mut desk = Desk::start(config);
        desk.publish(vec![message(1)]);
        let (reason, detail) = desk.until_down();
        assert_eq!(reason, DownReason::UNREACHABLE, "{detail}");
        desk.stop();
    }
}

#[test]
fn a_redirect_is_not_followed_and_the_error_names_its_location() {
    let other = Receiver::start(|_| status(200));
    let location = format!("location: http://127.0.0.1:{}/\r\n", other.port);
    let codes = [301, 302, 303, 307, 308];
    let receiver = Receiver::start(move |request| {
        let n: usize = request.id()[3..].parse().unwrap();
        with(codes[n], &location, "")
    });
    let mut desk = Desk::start(receiver.config());
    for n in 0..codes.len() {
        desk.publish(vec![message(n as u64)]);
        until_back(&mut desk, n + 1);
    }
    desk.stop();
    let to = format!(": to http://127.0.0.1:{}/", other.port);
    assert!(
        desk.outcomes
            .values()
            .all(|outcome| is_lost(outcome, "HTTP 30") && is_lost(outcome, &to)),
        "{:?}",
        desk.outcomes
    );
    assert_eq!((other.connections(), receiver.requests().len()), (0, codes.len()));
}

#[test]
fn the_pause_grows_and_one_success_resets_it() {
    let healthy = Arc::new(AtomicBool::new(false));
    let is_healthy = healthy.clone();
    let receiver = Receiver::start(move |_| status(if is_healthy.load(Ordering::SeqCst) { 200 } else { 503 }));
    let mut desk = Desk::start(HttpConfig {
        backoff_min: Duration::from_millis(50),
        backoff_max: Duration::from_millis(800),
        ..receiver.config()
    });
    let mut handle = 0;
    let mut pause = |desk: &mut Desk, count| {
        handle += 1;
        // Before the message goes: this thread may notice the failure late.
        let started = Instant::now();
        desk.publish(vec![message(handle)]);
        until_back(desk, count);
        started.elapsed().as_millis() as u64
    };
    for (count, least_ms) in [(1, 50), (2, 100), (3, 200), (4, 400), (5, 800), (6, 800)] {
        let found = pause(&mut desk, count);
        assert!(found >= least_ms, "{count}: {found} ms");
    }
    healthy.store(true, Ordering::SeqCst);
    desk.publish(vec![message(100)]);
    desk.until("arrived", |desk| desk.outcomes.get(&100) == Some(&Outcome::Confirmed));
    healthy.store(false, Ordering::SeqCst);
    // Without the reset, no pause would be shorter than the longest. A pause that a busy machine stretches is repeated.
    let is_short = (7..).map(|count| {
        if count > 7 {
            healthy.store(true, Ordering::SeqCst);
            desk.publish(vec![message(100 + count as u64)]);
            desk.until("arrived", |desk| {
                desk.outcomes.get(&(100 + count as u64)) == Some(&Outcome::Confirmed)
            });
            healthy.store(false, Ordering::SeqCst);
        }
        pause(&mut desk, count)
    });
    assert!(is_short.take(20).any(|found| (50..800).contains(&found)));
    desk.stop();
}

/// The pause that the destination asks for with this message, in seconds; `is_limit` is as expected.
fn postponed_s(desk: &Desk, handle: u64, is_limit: bool) -> u64 {
    match &desk.outcomes[&handle] {
        Outcome::Postponed {
            after_ms,
            is_limit: limit,
            ..
        } if *limit == is_limit => after_ms.div_ceil(1000),
        other => panic!("{other:?}"),
    }
}

#[test]
fn retry_after_is_honoured_in_seconds_and_as_a_date() {
    for (code, as_date) in [(503, false), (429, true)] {
        let is_limit = code == 429;
        let paused_for = |seconds: u64| {
            Receiver::start(move |_| {
                let value = match as_date {
                    true => httpdate::fmt_http_date(SystemTime::now() + Duration::from_secs(seconds)),
                    false => seconds.to_string(),
                };
                with(code, &format!("retry-after: {value}\r\n"), "")
            })
        };
        // The first message that is asked to wait does so alone. A date has whole seconds: of two, at least one is left.
        let receiver = paused_for(if as_date { 2 } else { 1 });
        let mut desk = Desk::start(receiver.config());
        desk.publish(vec![message(1)]);
        until_back(&mut desk, 1);
        assert!((1..=2).contains(&postponed_s(&desk, 1, is_limit)));
        let started = Instant::now();
        desk.publish(vec![message(2)]);
        until_back(&mut desk, 2);
        let paused = started.elapsed();
        assert!(paused >= Duration::from_millis(999), "{paused:?}");
        assert_eq!(receiver.requests().len(), 2);
        desk.stop();

        // During the pause every message comes back at once, and none is sent. The longest pause is that of the config.
        let receiver = paused_for(3600);
        let mut desk = Desk::start(receiver.config());
        for handle in [1, 2] {
            desk.publish(vec![message(handle)]);
            desk.until_answered(handle as usize);
            assert_eq!(postponed_s(&desk, handle, is_limit), 300);
            let (count, says) = [(1, "; the message waits until "), (2, "; it rests until ")][handle as usize - 1];
            desk.until("down", |desk| downs(desk) == count);
            let is_down = |state: &&ConnectionState| matches!(state, ConnectionState::Down(fault) if fault.finding.detail.contains(says));
            assert!(desk.states.iter().any(|state| is_down(&state)), "{:?}", desk.states);
            if count == 1 {
                until_back(&mut desk, count);
            }
        }
        desk.publish(vec![message(3), of_key(4, "k")]);
        desk.until_answered(4);
        assert!(
            [3, 4].iter().all(|handle| is_lost(&desk.outcomes[handle], "HTTP ")),
            "{:?}",
            desk.outcomes
        );
        assert_eq!(receiver.requests().len(), 2);
        desk.stop();
    }
}

#[test]
fn after_a_pause_one_message_goes_alone_until_it_is_answered() {
    let (go, release) = mpsc::channel::<u16>();
    let release = Mutex::new(release);
    let receiver = Receiver::start(move |_| status(release.lock().unwrap().recv().unwrap_or(200)));
    let mut desk = Desk::start(receiver.config());
    // At the start, too, the publisher does not know whether the receiver answers.
    desk.publish((0..10).map(message).collect());
    go.send(503).unwrap();
    desk.until_answered(10);
    assert_eq!(receiver.ids(), ["id-0"], "the others were not sent");
    until_back(&mut desk, 1);
    desk.publish((10..20).map(message).collect());
    go.send(503).unwrap();
    desk.until_answered(20);
    until_back(&mut desk, 2);
    assert_eq!(receiver.ids(), ["id-0", "id-10"]);
    desk.publish((20..30).map(message).collect());
    (0..10).for_each(|_| go.send(200).unwrap());
    desk.until_answered(30);
    assert!((20..30).all(|handle| desk.outcomes[&handle] == Outcome::Confirmed));
    desk.stop();
}

#[test]
fn no_message_of_a_failed_key_is_sent_until_the_failure_was_drained() {
    let receiver = Receiver::start(|request| status(if request.id() == "id-1" { 500 } else { 200 }));
    let mut desk = Desk::start(receiver.config());
    desk.publish(vec![of_key(0, "a")]);
    desk.until_answered(1);
    let mut batch: Vec<_> = (1..5).map(|handle| of_key(handle, "a")).collect();
    batch.extend([of_key(5, "b"), message(6)]);
    desk.publisher.try_publish(batch).unwrap();
    readable(&desk);
    // The failure of 1 may have been reported or not; it has not been drained.
    desk.publisher
        .try_publish(vec![of_key(7, "a"), of_key(8, "b")])
        .unwrap();
    desk.until_answered(9);
    assert!(matches!(&desk.outcomes[&1], Outcome::Failed { reason } if reason.starts_with("HTTP 500")));
    for handle in [2, 3, 4, 7] {
        assert!(
            is_lost(&desk.outcomes[&handle], KEY_FAILED),
            "{handle}: {:?}",
            desk.outcomes
        );
    }
    for handle in [5, 6, 8] {
        assert_eq!(desk.outcomes[&handle], Outcome::Confirmed, "{handle}");
    }
    desk.publish(vec![of_key(9, "a"), of_key(10, "a")]);
    desk.until_answered(11);
    assert!([9, 10].iter().all(|handle| desk.outcomes[handle] == Outcome::Confirmed));
    desk.stop();
    let mut ids = receiver.ids();
    let of_a: Vec<_> = ids
        .extract_if(.., |id| ["id-0", "id-1", "id-9", "id-10"].contains(&id.as_str()))
        .collect();
    assert_eq!(of_a, ["id-0", "id-1", "id-9", "id-10"]);
    ids.sort_unstable();
    assert_eq!(ids, ["id-5", "id-6", "id-8"]);
}

#[test]
fn an_unsendable_message_fails_alone_and_does_not_affect_the_destination() {
    let receiver = Receiver::start(|_| status(200));
    let mut desk = Desk::start(receiver.config());
    let mut bad = of_key(1, "k");
    bad.properties.headers = vec![("a b".into(), HeaderValue::Int(1))];
    let mut nameless = message(2);
    nameless.properties.message_id.clear();
    desk.publish(vec![bad, nameless, of_key(3, "k"), message(4)]);
    desk.until_answered(4);
    assert!(matches!(&desk.outcomes[&1], Outcome::Unsendable { reason } if reason.contains("\"a b\"")));
    assert!(matches!(&desk.outcomes[&2], Outcome::Unsendable { reason } if reason.contains("no id")));
    assert!(is_lost(&desk.outcomes[&3], KEY_FAILED));
    assert_eq!(desk.outcomes[&4], Outcome::Confirmed);
    assert_eq!(downs(&desk), 0);
    desk.stop();
    assert_eq!(receiver.ids(), ["id-4"]);
}

#[test]
fn nothing_is_sent_after_the_deadline() {
    let receiver = Receiver::start(|_| status(200));
    let deadline = Deadline::default();
    let mut desk = Desk::start(HttpConfig {
        deadline: deadline.clone(),
        ..receiver.config()
    });
    desk.publish(vec![message(1)]);
    desk.until_answered(1);
    deadline.end();
    desk.publish(vec![message(2), of_key(3, "k")]);
    desk.until_answered(3);
    let (reason, detail) = desk.until_down();
    assert_eq!((reason, detail.as_str()), (DownReason::CLOSED, "the lease has expired"));
    assert!(
        [2, 3]
            .iter()
            .all(|handle| is_lost(&desk.outcomes[handle], "the lease has expired"))
    );
    deadline.lift();
    desk.until("back", |desk| desk.states.last() == Some(&ConnectionState::Connected));
    desk.publish(vec![message(4)]);
    desk.until("arrived", |desk| desk.outcomes.get(&4) == Some(&Outcome::Confirmed));
    desk.stop();
    assert_eq!(receiver.ids(), ["id-1", "id-4"]);
}

#[test]
fn a_message_that_is_half_sent_at_the_deadline_is_never_completed() {
    const BODY_BYTES: usize = 16 << 20;
    let (half, is_half) = mpsc::channel();
    let (go_on, goes_on) = mpsc::channel::<()>();
    let (got, was_got) = mpsc::channel();
    let (half, goes_on, got) = (Mutex::new(half), Mutex::new(goes_on), Mutex::new(got));
    let receiver = Receiver::play(move |mut stream, _, _| {
        stream.read_exact(&mut [0; 1000])?;
        half.lock().unwrap().send(()).unwrap();
        goes_on.lock().unwrap().recv_timeout(DEADLINE).unwrap();
        let mut rest = Vec::new();
        let _ = stream.read_to_end(&mut rest);
        got.lock().unwrap().send(rest.len()).unwrap();
        Ok(())
    });
    let deadline = Deadline::default();
    let mut desk = Desk::start(HttpConfig {
        deadline: deadline.clone(),
        ..receiver.config()
    });
    let mut large = message(1);
    large.body = vec![b'x'; BODY_BYTES];
    desk.publish(vec![large]);
    is_half.recv_timeout(DEADLINE).unwrap();
    deadline.end();
    go_on.send(()).unwrap();
    desk.until_answered(1);
    assert!(
        is_lost(&desk.outcomes[&1], "the lease has expired"),
        "{:?}",
        desk.outcomes
    );
    let bytes = was_got.recv_timeout(DEADLINE).unwrap();
    assert!(bytes < BODY_BYTES, "{bytes} bytes arrived");
    desk.stop();
}

#[test]
fn a_connection_closed_while_idle_costs_no_message() {
    // A request that fails later than this is not sent twice.
    const STALE_WITHIN: Duration = Duration::from_secs(1);
    'start: for _ in 0..20 {
        // Each connection dies with its second request, as when the server closes an idle connection just then.
        let receiver = Receiver::start(|request| match request.index {
            0 => status(200),
            _ => Reply::Close(Vec::new()),
        });
        let mut desk = Desk::start(receiver.config());
        for handle in 0..5 {
            let started = Instant::now();
            desk.publish(vec![message(handle)]);
            desk.until_answered(handle as usize + 1);
            // A busy machine delayed the request.
            if is_lost(&desk.outcomes[&handle], "closed the connection") && started.elapsed() >= STALE_WITHIN {
                desk.stop();
                continue 'start;
            }
            assert_eq!(desk.outcomes[&handle], Outcome::Confirmed);
        }
        assert_eq!(downs(&desk), 0, "{:?}", desk.states);
        desk.stop();
        assert_eq!((receiver.connections(), receiver.requests().len()), (5, 9));
        return;
    }
    panic!("a request took too long each time");
}

#[test]
fn a_message_that_was_half_answered_is_not_sent_twice() {
    let receiver = Receiver::start(|request| match request.index {
        0 => status(200),
        _ => Reply::Close(b"HTTP/1.1 2".to_vec()),
    });
    let mut desk = Desk::start(receiver.config());
    for handle in 0..2 {
        desk.publish(vec![message(handle)]);
        desk.until_answered(handle as usize + 1);
    }
    assert!(
        is_lost(&desk.outcomes[&1], "closed the connection"),
        "{:?}",
        desk.outcomes
    );
    desk.stop();
    assert_eq!(receiver.ids(), ["id-0", "id-1"]);
}

#[test]
fn an_unsolicited_answer_is_not_taken_for_the_next_message() {
    // Some servers send 408 on an idle connection before they close it.
    let (go, goes) = mpsc::channel::<()>();
    let (sent, was_sent) = mpsc::channel();
    let (goes, sent) = (Mutex::new(goes), Mutex::new(sent));
    let receiver = Receiver::play(move |mut stream, _, _| {
        let mut reader = BufReader::new(stream.try_clone()?);
        receiver::read_request(&mut reader)?;
        stream.write_all(b"HTTP/1.1 200 x\r\ncontent-length: 0\r\n\r\n")?;
        goes.lock().unwrap().recv_timeout(DEADLINE).unwrap();
        stream.write_all(b"HTTP/1.1 408 x\r\ncontent-length: 0\r\n\r\n")?;
        sent.lock().unwrap().send(()).unwrap();
        reader.read(&mut [0]).map(drop)
    });
    let mut desk = Desk::start(receiver.config());
    for handle in 0..5 {
        desk.publish(vec![message(handle)]);
        desk.until_answered(handle as usize + 1);
        assert_eq!(desk.outcomes[&handle], Outcome::Confirmed);
        go.send(()).unwrap();
        was_sent.recv_timeout(DEADLINE).unwrap();
    }
    desk.stop();
    assert_eq!(receiver.connections(), 5);
}

#[test]
fn a_caller_that_never_drains_is_stopped_by_the_window() {
    let (_never, comes) = mpsc::channel::<()>();
    let comes = Mutex::new(comes);
    let receiver = Receiver::start(move |_| {
        let _ = comes.lock().unwrap().recv_timeout(DEADLINE);
        status(200)
    });
    let mut desk = Desk::start(HttpConfig {
        window: 10,
        ..receiver.config()
    });
    // It refuses more for as long as all before took.
    let started = Instant::now();
    let (mut taken, mut last_at) = (0, started);
    while taken < 15 || last_at.elapsed() < last_at - started {
        let batch = (taken..taken + 5).map(message).collect();
        match desk.publisher.try_publish(batch) {
            Ok(()) => (taken, last_at) = (taken + 5, Instant::now()),
            Err(_) => std::thread::yield_now(),
        }
        assert!(taken < 1000, "there is no bound");
    }
    // One message is on its way, 10 to 14 wait, 4 batches are in the queue.
    assert!((15..=35).contains(&taken), "{taken}");
    desk.stop();
    assert_eq!(desk.outcomes.len() as u64, taken);
}

#[test]
fn a_failure_of_a_request_sent_before_the_pause_is_no_new_failure() {
    let (one, two) = (mpsc::channel(), mpsc::channel());
    let (answers, releases) = ([one.0, two.0], [one.1, two.1].map(Mutex::new));
    let (arrived, has_arrived) = mpsc::channel();
    let arrived = Mutex::new(arrived);
    let receiver = Receiver::start(move |request| {
        let Some(release) = ["id-1", "id-2"].iter().position(|id| *id == request.id()) else {
            return status(200);
        };
        arrived.lock().unwrap().send(()).unwrap();
        let (code, headers): (u16, &str) = releases[release].lock().unwrap().recv_timeout(DEADLINE).unwrap();
        with(code, headers, "")
    });
    let mut desk = Desk::start(HttpConfig {
        backoff_min: Duration::from_millis(300),
        ..receiver.config()
    });
    desk.publish(vec![message(0)]);
    desk.until_answered(1);
    let both_sent = |desk: &mut Desk, first| {
        let mut messages = [message(1), message(2)];
        (0..2).for_each(|n| messages[n].handle = first + n as u64);
        desk.publish(messages.into());
        (0..2).for_each(|_| has_arrived.recv_timeout(DEADLINE).unwrap());
    };
    both_sent(&mut desk, 1);
    answers[0].send((503, "")).unwrap();
    until_back(&mut desk, 1);
    answers[1].send((503, "")).unwrap();
    desk.until_answered(3);
    assert!(is_lost(&desk.outcomes[&2], "HTTP 503"));
    assert_eq!(downs(&desk), 1, "{:?}", desk.states);

    // But a later answer may make the pause longer. On a busy machine it can come after the pause: then once more.
    let mut next = 3;
    loop {
        desk.publish(vec![message(next)]);
        desk.until_answered(next as usize + 1);
        both_sent(&mut desk, next + 1);
        let count = downs(&desk) + 1;
        answers[0].send((503, "retry-after: 0\r\n")).unwrap();
        desk.until("down", |desk| downs(desk) == count);
        let started = Instant::now();
        answers[1].send((429, "retry-after: 1\r\n")).unwrap();
        desk.until_answered(next as usize + 3);
        let in_pause = matches!(desk.answered_in[&(next + 2)], ConnectionState::Down(_));
        until_back(&mut desk, count + usize::from(in_pause));
        let paused = started.elapsed();
        if in_pause {
            assert!(paused > Duration::from_millis(900), "{paused:?}");
            break;
        }
        next += 3;
        assert!(next < 60, "each answer came after the pause");
    }
    desk.stop();
}

#[test]
fn an_answer_before_the_whole_body_is_sent_counts() {
    // The server closes with unread bytes, so the kernel resets the connection during the write.
    let receiver = Receiver::play(|mut stream, _, _| {
        stream.read_exact(&mut [0; 100])?;
        stream.write_all(b"HTTP/1.1 413 x\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
    });
    let mut desk = Desk::start(receiver.config());
    for handle in 0..5 {
        let mut large = message(handle);
        large.body = vec![b'x'; 8 << 20];
        desk.publish(vec![large]);
        desk.until_answered(handle as usize + 1);
        let outcome = &desk.outcomes[&handle];
        assert!(
            matches!(outcome, Outcome::Refused { reason } if reason.contains("413")),
            "{outcome:?}"
        );
    }
    assert_eq!(downs(&desk), 0, "{:?}", desk.states);
    desk.stop();
}

#[test]
fn an_address_that_is_not_public_is_refused_unless_allowed() {
    let receiver = Receiver::start(|_| status(200));
    let url = |host: &str| format!("http://{host}:{}/", receiver.port);
    let refused = |url: &str, allow: &str| {
        let config = receiver::config(url);
        let mut desk = Desk::start(HttpConfig {
            allow: AllowList::parse(allow).unwrap(),
            ..config
        });
        desk.publish(vec![message(1)]);
        desk.until_answered(1);
        let down = desk.states.iter().any(|state| {
            matches!(state, ConnectionState::Down(fault) if fault.reason == DownReason::ADDRESS_REFUSED && fault.finding.detail.contains("loopback"))
        });
        assert_eq!(
            down,
            desk.outcomes[&1] != Outcome::Confirmed,
            "{:?} {:?}",
            desk.states,
            desk.outcomes
        );
        desk.stop();
        down
    };
    // Names, and other texts that getaddrinfo takes for an address.
    for host in [
        "127.0.0.1",
        "[::ffff:127.0.0.1]",
        "localhost",
        "2130706433",
        "0x7f.1",
        "127.1",
    ] {
        assert!(refused(&url(host), "10.0.0.0/8 example.com"), "{host}");
    }
    assert_eq!(receiver.connections(), 0);
    assert!(!refused(&url("localhost"), "localhost"));
    assert!(!refused(&url("127.1"), "127.0.0.1"));
    assert_eq!(receiver.connections(), 2);
}

#[test]
fn no_text_repeats_a_secret_that_the_receiver_sends_back() {
    let receiver = Receiver::start(|request| {
        let mut echo = format!("{} {:?}", request.line.trim_end(), request.headers);
        echo.retain(|c| c != '"');
        let kind = "content-type: text/plain\r\n";
        match request.id() {
            "id-1" => with(422, kind, &echo),
            "id-2" => with(500, kind, &echo),
            "id-3" => Reply::Close(format!("HTTP/1.1 x {}\r\n\r\n", request.header("authorization")).into_bytes()),
            _ => with(401, kind, &echo),
        }
    });
    let mut desk = Desk::start(HttpConfig {
        address: outbox_transport::parse_http_url(&format!("http://127.0.0.1:{}/services/SECRET-1", receiver.port))
            .unwrap(),
        auth: HttpAuth::Bearer(Secret::new("SECRET-2")),
        ..receiver.config()
    });
    for handle in 1..=4 {
        desk.publish(vec![message(handle)]);
        desk.until_answered(handle as usize);
        desk.until("connected", |desk| {
            desk.states.last() == Some(&ConnectionState::Connected)
        });
    }
    desk.stop();
    let shown = format!("{:?} {:?}", desk.outcomes, desk.states);
    assert!(
        shown.contains("POST … HTTP/1.1") && shown.contains("HTTP 422"),
        "{shown}"
    );
    assert!(!shown.contains("SECRET"), "{shown}");
    for state in &desk.states {
        if let ConnectionState::Down(fault) = state {
            let detail = &fault.finding.detail;
            assert!(detail.chars().count() <= 200, "{detail}");
        }
    }
}

#[test]
fn every_thread_has_every_signal_blocked_and_none_outlives_the_publisher() {
    let name = "outbox-http";
    let receiver = Receiver::start(|_| status(200));
    let mut desk = Desk::start(HttpConfig {
        address: outbox_transport::parse_http_url(&format!("http://localhost:{}/", receiver.port)).unwrap(),
        ..receiver.config()
    });
    desk.publish((0..50).map(message).collect());
    desk.until_answered(50);
    assert!(desk.outcomes.values().all(|outcome| *outcome == Outcome::Confirmed));
    let ours: Vec<_> = threads()
        .into_iter()
        .filter(|(thread, _)| thread.starts_with("outbox-"))
        .collect();
    assert!(ours.iter().any(|(thread, _)| thread == name), "{ours:?}");
    for (name, blocked) in ours {
        // All 64 signals but SIGKILL, SIGSTOP and the two that glibc reserves.
        let unblockable = 1 << 8 | 1 << 18 | 1 << 31 | 1 << 32;
        assert_eq!(blocked | unblockable, u64::MAX, "{name} has blocked only {blocked:x}");
    }
    desk.stop();
    // Other tests of this file run at the same time; their threads end, too.
    let deadline = Instant::now() + DEADLINE;
    while threads_named(name) > 0 {
        assert!(Instant::now() < deadline, "{:?}", threads());
        std::thread::yield_now();
    }
}

#[test]
fn the_proxy_of_the_environment_is_not_used() {
    const INNER: &str = "OUTBOX_TEST_WITH_PROXY";
    if std::env::var_os(INNER).is_some() {
        let receiver = Receiver::start(|_| status(200));
        let mut desk = Desk::start(receiver.config());
        desk.publish(vec![message(1)]);
        desk.until_answered(1);
        assert_eq!(desk.outcomes[&1], Outcome::Confirmed, "{:?}", desk.states);
        return desk.stop();
    }
    let proxy = Receiver::start(|_| status(500));
    let mut again = std::process::Command::new(std::env::current_exe().unwrap());
    again
        .args(["--exact", "the_proxy_of_the_environment_is_not_used"])
        .env(INNER, "1");
    for name in [
        "http_proxy",
        "HTTP_PROXY",
        "https_proxy",
        "HTTPS_PROXY",
        "all_proxy",
        "ALL_PROXY",
    ] {
        again.env(name, format!("http://127.0.0.1:{}", proxy.port));
    }
    let output = again.env_remove("NO_PROXY").env_remove("no_proxy").output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    assert!(String::from_utf8_lossy(&output.stdout).contains("1 passed"));
    assert_eq!(proxy.connections(), 0);
}

#[test]
fn a_connection_to_a_name_is_not_used_after_its_life_and_one_to_an_address_is() {
    for (host, connections) in [("hook.test", 3), ("127.0.0.1", 1)] {
        let receiver = Receiver::start(|_| status(200));
        let port = receiver.port;
        let config = HttpConfig {
            connection_life: Duration::from_nanos(1),
            ..receiver::config(&format!("http://{host}:{port}/hook"))
        };
        let mut desk = Desk::resolving(config, resolver(move |_| vec![port]));
        for handle in 0..3 {
            desk.publish(vec![message(handle)]);
            desk.until_answered(handle as usize + 1);
        }
        desk.stop();
        assert!(desk.outcomes.values().all(|outcome| *outcome == Outcome::Confirmed));
        assert_eq!(receiver.connections(), connections, "{host}");
    }
}

#[test]
fn after_a_request_without_an_answer_the_next_connect_begins_with_another_address() {
    let silent = Receiver::play(|stream, _, _| std::io::copy(&mut &stream, &mut std::io::sink()).map(drop));
    let receiver = Receiver::start(|_| status(200));
    let ports = [silent.port, receiver.port];
    let config = HttpConfig {
        timeout: Duration::from_secs(2),
        ..receiver::config("http://hook.test/")
    };
    let mut desk = Desk::resolving(config, resolver(move |_| ports.to_vec()));
    desk.publish(vec![message(0)]);
    until_back(&mut desk, 1);
    assert!(
        matches!(desk.outcomes[&0], Outcome::Unanswered { .. }),
        "{:?}",
        desk.outcomes
    );
    for handle in 1..4 {
        desk.publish(vec![message(handle)]);
        desk.until_answered(handle as usize + 1);
    }
    desk.stop();
    assert!(
        (1..4).all(|handle| desk.outcomes[&handle] == Outcome::Confirmed),
        "{:?}",
        desk.outcomes
    );
    assert_eq!((silent.connections(), receiver.connections()), (1, 1));
}
