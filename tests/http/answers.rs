//! The effects of an answer on its message, its key and its destination, and how health shows it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use postgres::error::SqlState;
use support::{Receiver, Reply, wait_until};

use super::*;
use support::*;

fn answer(status: u16, headers: &str, body: &str) -> Reply {
    Reply::Answer {
        status,
        headers: headers.to_owned(),
        body: body.to_owned(),
    }
}

#[test]
fn a_refused_message_is_a_dead_letter_at_once_and_on_dead_decides_about_its_key() {
    let receiver = Receiver::start(|request| match request.label().as_str() {
        "k 1" => answer(400, "", "no such order"),
        _ => Reply::status(204),
    });
    let cluster = http_cluster(&[]);
    destination(&cluster, "strict", &receiver.url("/strict"), "");
    destination(&cluster, "skipping", &receiver.url("/skipping"), "on_dead 'skip'");
    for name in ["strict", "skipping"] {
        cluster.publish_run(name, "k", 3);
        cluster.publish_run(name, "free", 1);
    }
    wait_published(&cluster, 4);
    let mut client = cluster.connect(DB);
    let dead = client
        .query(
            "select destination, attempts, reason, blocks from outbox_dead order by destination",
            &[],
        )
        .expect("dead letters");
    let dead: Vec<(&str, i32, &str, bool)> =
        (dead.iter().map(|row| (row.get(0), row.get(1), row.get(2), row.get(3)))).collect();
    let reason = "refused: HTTP 400 Bad Request: no such order";
    assert_eq!(dead, [("skipping", 1, reason, false), ("strict", 1, reason, true)]);
    let to = |path: &str| -> Vec<String> {
        let requests = receiver.requests();
        requests
            .iter()
            .filter(|request| request.path == path)
            .map(Request::label)
            .collect()
    };
    assert_eq!(
        to("/skipping").iter().filter(|label| label.starts_with("k ")).count(),
        3
    );
    assert!(!to("/strict").contains(&"k 2".to_owned()), "{:?}", to("/strict"));
    client.run("select outbox_discard(seq, destination) from outbox_dead where blocks");
    wait_published(&cluster, 6);
    let strict: Vec<String> = to("/strict")
        .into_iter()
        .filter(|label| label.starts_with("k "))
        .collect();
    assert_eq!(strict, ["k 1", "k 2", "k 3"]);
}

#[test]
fn a_failed_message_is_charged_and_retried_while_other_keys_continue() {
    let fixed = Arc::new(AtomicBool::new(false));
    let is_fixed = Arc::clone(&fixed);
    let receiver = Receiver::start(move |request| match request.label().as_str() {
        "k 1" if !is_fixed.load(Ordering::Acquire) => answer(500, "", "out of order"),
        _ => Reply::status(200),
    });
    let cluster = http_cluster(&[]);
    let often = "retry_backoff '20ms', retry_backoff_max '50ms', max_attempts '1000'";
    destination(&cluster, "hook", &receiver.url("/"), often);
    cluster.publish_run("hook", "k", 3);
    cluster.publish_run("hook", "free", 2);
    wait_published(&cluster, 2);
    let error = "HTTP 500 Internal Server Error: out of order";
    wait_true(
        &cluster,
        "the second attempt to be charged",
        &format!("select exists (select from outbox_messages where attempts >= 2 and last_error = '{error}')"),
    );
    // A failure of a message is not a failure of the destination.
    assert!(health(&cluster, "broker").0, "{:?}", health(&cluster, "broker"));
    fixed.store(true, Ordering::Release);
    wait_published(&cluster, 5);
    let of_key: Vec<String> = receiver
        .labels()
        .into_iter()
        .filter(|label| label.starts_with("k "))
        .collect();
    let tries = of_key.iter().take_while(|label| *label == "k 1").count();
    assert!(tries >= 3, "{of_key:?}");
    assert_eq!(of_key[tries..], ["k 2", "k 3"]);
    let attempts: String = cluster.query_one(
        DB,
        "select string_agg((attempts > 1)::text, ',' order by seq) from outbox_history",
    );
    assert_eq!(
        attempts, "true,false,false,false,false",
        "only the failed message is charged attempts"
    );
}

#[test]
fn a_receiver_that_asks_for_a_pause_gets_it_and_no_other_destination_waits() {
    let (busy, other) = (Receiver::start(|_| answer(503, "retry-after: 3600\r\n", "")), willing());
    let cluster = http_cluster(&[]);
    destination(&cluster, "busy", &busy.url("/"), "");
    destination(&cluster, "other", &other.url("/"), "");
    (0..3).for_each(|n| _ = cluster.publish(Event::new(n).key(n.to_string()).to("busy")));
    // Two of them are asked to wait, so it is the destination that asks.
    let says = "select coalesce(bool_or(problem like 'the receiver reports that it is not available: HTTP 503 Service Unavailable; it rests until %GMT'), false)
                from outbox_health where \"check\" = 'broker'";
    wait_true(&cluster, "health to say until when it rests", says);
    assert!(wait_for_reason(&cluster, "busy", "unavailable").contains("; it rests until "));
    // A destination whose answers ask for no pause is tried again with growing pauses.
    let asks_nothing = Receiver::start(|_| Reply::status(503));
    destination(&cluster, "impatient", &asks_nothing.url("/"), "");
    cluster.publish_run("impatient", "k", 1);
    cluster.publish_run("other", "k", 20);
    wait_published(&cluster, 20);
    wait_for_requests(&asks_nothing, 4);
    assert_eq!(busy.requests().len(), 2, "the receiver asked for a pause of an hour");
    // None is charged, and those that it asked for wait as long as retry_after_max.
    wait_true(
        &cluster,
        "the messages of busy to wait",
        "select count(*) = 1 and bool_and(claim_token is null) from outbox where destination = 'busy'",
    );
    let asked = "select count(*) = 2 and max(attempts) = 0 and bool_and(due_at - now() between '4 min' and '5 min')
                 from outbox_waiting where destination = 'busy'";
    wait_true(&cluster, "those that were sent to wait for five minutes", asked);
    // Another address owes it no pause.
    cluster.exec(
        DB,
        &format!("alter server busy options (set url '{}')", other.url("/moved")),
    );
    wait_published(&cluster, 21);
    wait_true(
        &cluster,
        "busy to be connected",
        "select state = 'connected' from outbox_destination_status where destination = 'busy'",
    );
    assert_eq!(
        cluster.query_one::<i64>(DB, "select count(*) from outbox_history where attempts <> 1"),
        0
    );
}

/// A failing destination gets one message in each attempt, not a window of messages, because all destinations share the
/// worker's thread.
#[test]
fn each_attempt_at_a_failing_destination_claims_one_message() {
    const WAITING: usize = 600;
    let (resets, garbles) = (
        Rude::start(None),
        Rude::start(Some(b"\x16\x03 no HTTP at all \0\r\n\r\n")),
    );
    let good = willing();
    let cluster = http_cluster(&[]);
    for (name, url) in [
        ("resets", resets.url()),
        ("garbles", garbles.url()),
        ("good", good.url("/")),
    ] {
        destination(&cluster, name, &url, "");
    }
    // The first attempt may claim a window of messages, since no failure of the destination was known.
    for name in ["resets", "garbles"] {
        cluster.publish_run(name, "", WAITING);
    }
    for rude in [&resets, &garbles] {
        rude.wait_for_connections(6);
    }
    cluster.publish_run("good", "k", 20);
    wait_published(&cluster, 20);
    for (name, rude) in [("resets", &resets), ("garbles", &garbles)] {
        let released: i64 = cluster.query_one(
            DB,
            &format!("select released_total from outbox_destination_status where destination = '{name}'"),
        );
        let attempts = rude.connections();
        assert!(released > 0, "{name}: no message was released");
        assert!(
            released as usize <= WAITING + 2 * attempts,
            "{name}: {released} messages released in {attempts} attempts"
        );
        let log = cluster.log();
        let lines = log
            .lines()
            .filter(|line| line.contains(&format!("destination {name}: receiver")));
        assert!(lines.clone().count() <= 3, "{:?}", lines.collect::<Vec<_>>());
    }
}

/// A peer that accepts a connection and reads the start of a request, sends some bytes or none, and resets the
/// connection.
struct Rude {
    port: u16,
    connections: Arc<std::sync::atomic::AtomicUsize>,
}

impl Rude {
    fn start(sends: Option<&'static [u8]>) -> Self {
        use std::io::{Read, Write};
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = listener.local_addr().expect("an address").port();
        let connections = Arc::<std::sync::atomic::AtomicUsize>::default();
        let count = Arc::clone(&connections);
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = stream.expect("a connection");
                count.fetch_add(1, Ordering::AcqRel);
                let _ = stream.read(&mut [0; 1024]);
                if let Some(bytes) = sends {
                    let _ = stream.write_all(bytes);
                }
                // Unread bytes of the request turn the close into a reset.
            }
        });
        Self { port, connections }
    }

    fn url(&self) -> String {
        format!("http://127.0.0.1:{}/", self.port)
    }

    fn connections(&self) -> usize {
        self.connections.load(Ordering::Acquire)
    }

    fn wait_for_connections(&self, count: usize) {
        wait_until("repeated attempts", LONG, || self.connections() >= count);
    }
}

/// As one whose account is over its limit.
#[test]
fn a_receiver_that_asks_for_a_pause_for_one_message_gets_the_others() {
    for status in [429, 503] {
        let receiver = Receiver::start(move |request| match request.label().starts_with("blocked") {
            true => answer(status, "retry-after: 3600.0\r\n", ""),
            false => Reply::status(200),
        });
        let cluster = http_cluster(&[]);
        destination(&cluster, "hook", &receiver.url("/"), "");
        cluster.publish(Event::new("blocked").key("blocked").to("hook"));
        cluster.publish_run("hook", "k", 62);
        wait_published(&cluster, 62);
        let waits = "select attempts = 0 and due_at - now() between '4 min' and '5 min' and last_error like '%HTTP ' || $$__$$ || '%'
                     from outbox_waiting";
        wait_true(
            &cluster,
            "the other one to wait",
            &waits.replace("__", &status.to_string()),
        );
        wait_healthy(&cluster, "broker");
    }
}

#[test]
fn after_the_requested_pause_the_destination_continues_by_itself() {
    let first = AtomicBool::new(true);
    let receiver = Receiver::start(move |_| match first.swap(false, Ordering::AcqRel) {
        true => answer(429, "retry-after: 2\r\n", ""),
        false => Reply::status(200),
    });
    let cluster = http_cluster(&[]);
    destination(&cluster, "hook", &receiver.url("/"), "");
    cluster.publish_run("hook", "k", 3);
    wait_for_reason(&cluster, "hook", "throttled");
    wait_published(&cluster, 3);
    let requests = receiver.requests();
    let pause = requests[1].at - requests[0].at;
    assert!(
        pause >= Duration::from_millis(1900),
        "the next request came after {pause:?}"
    );
    assert_eq!(receiver.labels(), ["k 1", "k 1", "k 2", "k 3"]);
    wait_healthy(&cluster, "broker");
}

#[test]
fn a_failure_of_a_destination_has_a_reason_and_is_charged_to_no_message() {
    let receiver = Receiver::start(|request| match request.path.as_str() {
        "/close" => Reply::Close,
        "/hang" => Reply::Hang,
        "/302" => answer(302, "location: /200\r\n", ""),
        path => Reply::status(path[1..].parse().expect("a status")),
    });
    let cluster = http_cluster(&[]);
    let dead = format!("http://127.0.0.1:{}/", dead_port());
    let wanted = [
        ("s401", receiver.url("/401"), "auth_refused"),
        ("s403", receiver.url("/403"), "auth_refused"),
        ("s302", receiver.url("/302"), "endpoint_refused"),
        ("s404", receiver.url("/404"), "endpoint_refused"),
        ("s429", receiver.url("/429"), "throttled"),
        ("s502", receiver.url("/502"), "unavailable"),
        ("closes", receiver.url("/close"), "closed"),
        ("hangs", receiver.url("/hang"), "timeout"),
        ("dead", dead, "unreachable"),
    ];
    for (name, url, _) in &wanted {
        destination(&cluster, name, url, "timeout '300ms'");
        cluster.publish_run(name, "k", 1);
    }
    for (name, _, reason) in &wanted {
        wait_for_reason(&cluster, name, reason);
    }
    let remedy = "select remedy from outbox_health where \"check\" = 'broker' and destination = 'dead'";
    assert_eq!(
        cluster.query_one::<String>(DB, remedy),
        "start the receiver, or correct host and port: ALTER SERVER dead OPTIONS (SET url :'url')"
    );
    // The worker does not follow a redirect.
    assert!(receiver.requests().iter().all(|request| request.path != "/200"));
    let charged =
        "select count(*) from outbox_messages where attempts > 0 or status not in ('ready', 'in flight', 'retrying')";
    assert_eq!(cluster.query_one::<i64>(DB, charged), 0);
    assert_eq!(cluster.query_one::<i64>(DB, "select count(*) from outbox_messages"), 9);
}

#[test]
fn a_down_destination_without_messages_is_healthy_again() {
    let receiver = Receiver::start(|_| Reply::status(503));
    let cluster = http_cluster(&[]);
    destination(&cluster, "hook", &receiver.url("/"), "");
    cluster.publish_run("hook", "k", 1);
    wait_for_reason(&cluster, "hook", "unavailable");
    wait_until("the message to be discarded", LONG, || {
        // A message that failed may have moved.
        let discarded = "select coalesce(bool_or(outbox_discard(seq, destination)), false)
                         from (select seq, destination from outbox union select seq, destination from outbox_waiting) m";
        match cluster.connect(DB).query_one(discarded, &[]) {
            Ok(row) => row.get(0),
            // It is refused while the message is tried.
            Err(error) if error.code() == Some(&SqlState::OBJECT_IN_USE) => false,
            Err(error) => panic!("{error:?}"),
        }
    });
    wait_healthy(&cluster, "broker");
}
