//! Posted requests: formats, headers, order, and the verification of TLS peers.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use support::wait::pass_time_until;
use support::{Authority, Receiver, Reply, wait_until};

use super::*;
use support::load::{Load, Plan};
use support::oracle::{Arrived, Verdict, judge};
use support::*;

#[test]
fn an_event_is_posted_in_the_format_of_its_destination() {
    let receiver = willing();
    let cluster = http_cluster(&[]);
    let url = |path| receiver.url(path);
    let tenant = r#"headers '{"tenant": "{header:tenant|none}-{aggregate_id}"}'"#;
    destination(&cluster, "whole", &url("/whole?a=b"), tenant);
    destination(
        &cluster,
        "bare",
        &url("/bare"),
        "format 'payload', content_type 'text/plain'",
    );
    destination(
        &cluster,
        "events",
        &url("/events"),
        "format 'cloudevents', source '/shop'",
    );
    destination(
        &cluster,
        "headed",
        &url("/headed"),
        "format 'cloudevents_binary', source '/shop'",
    );
    cluster.exec(
        DB,
        r#"select outbox_enqueue(seq, 'Order:A-42', destination)
           from outbox_publish('OrderPlaced', '{"order":  "A-42"}', 'Order', 'A-42', 'Placed', actor => 'Änne',
                               headers => '{"x-request": "r1"}', destination => 'whole') seq,
                unnest('{bare,events,headed}'::text[]) destination"#,
    );
    wait_published(&cluster, 4);
    let id: String = cluster.query_one(DB, "select id::text from outbox_events");
    let requests = receiver.requests();
    let posted = |path: &str| {
        let matching = requests.iter().find(|request| request.path == path);
        matching.unwrap_or_else(|| panic!("no request to {path}"))
    };
    for request in &requests {
        assert_eq!(request.header("idempotency-key"), id, "{request:?}");
        assert_eq!(request.header("webhook-id"), id);
        assert_eq!(request.header("outbox-id"), id);
        assert_eq!(request.header("outbox-type"), "OrderPlaced");
        assert_eq!(request.header("outbox-key"), "Order:A-42");
        assert_eq!(request.header("x-request"), "r1");
        assert!(request.header("user-agent").starts_with("outbox/"), "{request:?}");
        // No credentials and no signature unless configured.
        assert_eq!(request.header("authorization"), "");
        assert_eq!(request.header("webhook-signature"), "");
    }
    let whole = posted("/whole?a=b");
    assert_eq!(whole.header("content-type"), "application/json");
    assert_eq!(whole.header("tenant"), "none-A-42");
    assert_eq!(
        (&whole.json()["id"], &whole.json()["key"]),
        (&id.clone().into(), &"Order:A-42".into())
    );
    assert_eq!(whole.json()["payload"]["order"], "A-42");
    let bare = posted("/bare");
    assert_eq!(bare.header("content-type"), "text/plain");
    assert_eq!(bare.body, br#"{"order": "A-42"}"#);
    assert_eq!(bare.header("outbox-operation"), "Placed");
    assert_eq!(bare.header("outbox-actor"), "%C3%84nne");
    let event = posted("/events");
    assert_eq!(event.header("content-type"), "application/cloudevents+json");
    assert_eq!(event.json()["source"], "/shop");
    assert_eq!(event.json()["data"]["order"], "A-42");
    let headed = posted("/headed");
    assert_eq!(headed.header("content-type"), "application/json");
    assert_eq!(
        (headed.header("ce-id"), headed.header("ce-source")),
        (id.as_str(), "/shop")
    );
    assert_eq!(headed.body, br#"{"order": "A-42"}"#);
}

#[test]
fn the_example_of_the_docs_makes_a_destination_that_works() {
    let docs = include_str!("../../docs/destinations.md");
    let (_, section) = docs.split_once("## By HTTP").expect("the section");
    let mut blocks = section
        .split("```sql\n")
        .skip(1)
        .map(|rest| rest.split("```").next().unwrap_or_default());
    let (make, publish) = (blocks.next().expect("a destination"), blocks.next().expect("a message"));
    let receiver = willing();
    let cluster = http_cluster(&[]);
    assert!(make.contains("'https://hooks.example/orders'"), "{make}");
    cluster.exec(DB, "create role shop");
    cluster.exec(
        DB,
        &make.replace("https://hooks.example/orders", &receiver.url("/orders")),
    );
    cluster.exec(DB, publish);
    wait_published(&cluster, 1);
    let requests = receiver.requests();
    assert_eq!((requests.len(), requests[0].path.as_str()), (1, "/orders"));
    assert_eq!(requests[0].json()["payload"]["order"], 42);
    assert_eq!(requests[0].header("authorization"), "Bearer the-token");
    assert!(requests[0].header("webhook-signature").starts_with("v1,"));
}

#[test]
fn keys_stay_in_order_and_nothing_is_lost_with_any_answers_of_the_receiver() {
    /// The state of the receiver.
    #[derive(Default)]
    struct Desk {
        taken: Mutex<Vec<Arrived>>,
        /// The keys of requests that are not answered yet, and the largest number of them at one time.
        open: Mutex<BTreeSet<String>>,
        open_max: AtomicUsize,
        overlaps: AtomicUsize,
        failures: AtomicUsize,
        /// The messages that it took, and whose answers were lost.
        unanswered: Mutex<Vec<String>>,
        dice: AtomicU64,
    }
    let desk = Arc::new(Desk::default());
    let receivers = Arc::clone(&desk);
    let receiver = Receiver::start(move |request| {
        let desk = &*receivers;
        let message = Arrived::of(&request.json());
        let mut open = desk.open.lock().expect("no panic");
        if !open.insert(message.key.clone()) {
            desk.overlaps.fetch_add(1, Ordering::Relaxed);
        }
        desk.open_max.fetch_max(open.len(), Ordering::Relaxed);
        drop(open);
        // Weyl's sequence: all remainders modulo 100 occur equally often.
        let roll = desk.dice.fetch_add(0x9e37_79b9_7f4a_7c15, Ordering::Relaxed) >> 32;
        let roll = roll.wrapping_mul(2_654_435_761) >> 7;
        let accept = |desk: &Desk| desk.taken.lock().expect("no panic").push(message.clone());
        let reply = match roll % 100 {
            0..8 => Reply::status(500),
            8..10 => Reply::status(503),
            10..13 => Reply::Close,
            13..15 => {
                accept(desk);
                desk.unanswered.lock().expect("no panic").push(message.label.clone());
                Reply::Close
            }
            15..30 => {
                pass_time_until(Instant::now() + Duration::from_millis(30));
                accept(desk);
                Reply::status(202)
            }
            _ => {
                accept(desk);
                Reply::status(200)
            }
        };
        if !matches!(reply, Reply::Answer { status: 200..=299, .. }) {
            desk.failures.fetch_add(1, Ordering::Relaxed);
        }
        desk.open.lock().expect("no panic").remove(&message.key);
        reply
    });
    let conf = [
        "outbox.retry_backoff = '20ms'",
        "outbox.retry_backoff_max = '200ms'",
        "outbox.max_attempts = 1000",
    ];
    let cluster = http_cluster(&conf);
    destination(&cluster, "\"default\"", &receiver.url("/"), "concurrency '8'");
    let plan = Plan {
        keys: 50,
        mixed: true,
        ..Plan::default()
    };
    let load = Load::start(&cluster, &plan);
    load.wait_for_more(1500);
    let sent = load.stop();
    wait_drained(&cluster);
    let taken = desk.taken.lock().expect("no panic");
    let mut verdict = judge(&sent, &taken);
    // Each lost answer repeats its message, and nothing else does.
    let mut doubled = std::mem::take(&mut *desk.unanswered.lock().expect("no panic"));
    doubled.sort();
    verdict.doubled.sort();
    assert!(!doubled.is_empty(), "no answer was lost");
    assert_eq!(
        verdict,
        Verdict {
            doubled,
            ..Verdict::default()
        }
    );
    let failures = desk.failures.load(Ordering::Relaxed);
    assert!(failures > 50, "only {failures} failures");
    assert_eq!(
        desk.overlaps.load(Ordering::Relaxed),
        0,
        "two requests of a key at a time"
    );
    let open_max = desk.open_max.load(Ordering::Relaxed);
    assert!((2..=8).contains(&open_max), "{open_max} requests at a time");
}

#[test]
fn without_ordering_messages_of_a_key_do_not_wait_for_each_other() {
    // The first message is never answered; the second always fails.
    let receiver = Receiver::start(|request| match request.label().as_str() {
        "k 1" => Reply::Hang,
        "k 2" => Reply::status(500),
        _ => Reply::status(200),
    });
    let cluster = http_cluster(&[]);
    // Before the first answer the worker sends one message alone. It must not be the message that hangs.
    destination(
        &cluster,
        "loose",
        &receiver.url("/"),
        "ordering 'none', max_attempts '1'",
    );
    cluster.publish_run("loose", "other", 1);
    wait_published(&cluster, 1);
    cluster.publish_run("loose", "k", 5);
    wait_published(&cluster, 4);
    wait_true(
        &cluster,
        "one dead letter that blocks nothing",
        "select count(*) = 1 and not bool_or(blocks) from outbox_dead",
    );
    assert_eq!(
        cluster.query_one::<i64>(DB, "select count(*) from outbox"),
        1,
        "the message that hangs"
    );
}

#[test]
fn over_tls_only_a_verified_receiver_gets_messages() {
    let (authority, stranger, clients) = (Authority::new("CA"), Authority::new("other"), Authority::new("clients"));
    let receiver = Receiver::start_tls(&authority.issue("127.0.0.1"), Some(&clients), |_| Reply::status(200));
    let cluster = http_cluster(&[]);
    destination(
        &cluster,
        "hook",
        &receiver.url("/"),
        &format!("tls_ca '{}'", stranger.cert_pem),
    );
    cluster.publish_run("hook", "k", 2);
    let detail = wait_for_reason(&cluster, "hook", "tls_failed");
    let problem = wait_for_problem(&cluster, "broker");
    assert!(
        problem.contains("hook: TLS with the receiver failed: "),
        "{problem}, {detail}"
    );
    // The certificate is trusted now, but the receiver requires a client certificate.
    cluster.exec(
        DB,
        &format!("alter server hook options (set tls_ca '{}')", authority.cert_pem),
    );
    wait_until("an answer to a client without a certificate", LONG, || {
        health(&cluster, "broker").1 != problem
    });
    assert!(
        receiver.requests().is_empty(),
        "a message was sent to an untrusted peer"
    );
    let client = clients.issue("relay");
    let (cert, key) = (client.cert_pem, client.key_pem);
    cluster.exec(
        DB,
        &format!("create user mapping for outbox_worker server hook options (tls_cert '{cert}', tls_key '{key}')"),
    );
    wait_published(&cluster, 2);
    wait_healthy(&cluster, "broker");
    assert_eq!(receiver.labels(), ["k 1", "k 2"]);
    assert_eq!(
        cluster.query_one::<i64>(DB, "select count(*) from outbox_history where attempts <> 1"),
        0
    );
}

#[test]
fn an_address_that_is_not_public_is_reported_and_a_setting_allows_it() {
    let receiver = willing();
    let cluster = unconnected_cluster("", "nowhere", &["outbox.http_allow = ''"]);
    destination(&cluster, "hook", &receiver.url("/"), "");
    cluster.publish_run("hook", "k", 1);
    let detail = wait_for_reason(&cluster, "hook", "address_refused");
    assert!(detail.contains("127.0.0.1"), "{detail}");
    let (ok, problem) = health(&cluster, "broker");
    assert!(!ok && problem.contains("hook: the address is not public"), "{problem}");
    assert!(remedy(&cluster, "broker").contains("outbox.http_allow"));
    assert!(receiver.requests().is_empty());
    cluster.set_conf("outbox.http_allow", "hooks.internal, 127.0.0.0/8");
    wait_published(&cluster, 1);
    wait_healthy(&cluster, "broker");
    let error = refused(&cluster, "alter system set outbox.http_allow = '10.0.0.0/99'");
    assert_eq!(error.code(), &postgres::error::SqlState::INVALID_PARAMETER_VALUE);
    assert!(
        error.hint().is_some_and(|hint| hint.contains("10.1.0.0/16")),
        "{error:?}"
    );
}

#[test]
fn the_call_that_makes_a_local_destination_says_how_to_allow_it() {
    let receiver = willing();
    let cluster = unconnected_cluster("amqp://127.0.0.1:1", "x", &["outbox.http_allow = '10.0.0.0/8'"]);
    let http = |host: &str| {
        let url = receiver.url("/").replace("127.0.0.1", host);
        format!("create server hook foreign data wrapper outbox_http options (url '{url}')")
    };
    let amqp = |url: &str| format!("create server hook foreign data wrapper outbox_amqp options (url '{url}')");
    for (sql, host, is_delivered) in [
        (http("127.0.0.1"), "127.0.0.1", true),
        (http("localhost"), "localhost", true),
        (amqp("amqp://127.0.0.1:2"), "127.0.0.1", false), // nothing listens there
    ] {
        let (message, hint) = warning(&cluster, &sql).expect("a WARNING");
        assert!(message.contains(&format!("{host} is a loopback address")), "{message}");
        let command = format!("ALTER SYSTEM SET outbox.http_allow = '10.0.0.0/8, {host}'; SELECT pg_reload_conf()");
        assert!(hint.ends_with(&format!(": {command}.")), "{hint}");
        if is_delivered {
            cluster.publish_run("hook", host, 1);
            wait_for_reason(&cluster, "hook", "address_refused");
            type_sql(&cluster, &command);
            wait_drained(&cluster);
            type_sql(
                &cluster,
                "alter system reset outbox.http_allow; select pg_reload_conf()",
            );
            let is_reset = "select current_setting('outbox.http_allow') = '10.0.0.0/8'";
            wait_true(&cluster, "the setting of before", is_reset);
        }
        cluster.exec(DB, "drop server hook");
    }
    assert_eq!(receiver.requests().len(), 2);
    for sql in [
        http("hooks.example"),
        http("10.1.2.3"),
        amqp("amqp://127.0.0.1:1/vhost"),
        amqp("amqp://192.168.1.1"),
        amqp("amqp://127.0.0.1:2,broker.example"),
    ] {
        assert_eq!(warning(&cluster, &sql), None, "{sql}");
        cluster.exec(DB, "drop server hook");
    }
    cluster.exec(DB, "alter database postgres set outbox.http_allow = ''");
    let (_, hint) = warning(&cluster, &http("127.0.0.1")).expect("a WARNING");
    let command = "ALTER DATABASE postgres SET outbox.http_allow = '127.0.0.1'";
    assert!(hint.ends_with(&format!(": {command}.")), "{hint}");
    cluster.exec(DB, command);
    cluster.publish_run("hook", "k", 1);
    wait_published(&cluster, 3);
}

/// The first warning of a statement in a new session: its message and its HINT.
fn warning(cluster: &Cluster, sql: &str) -> Option<(String, String)> {
    let (sender, notices) = std::sync::mpsc::channel();
    let mut config: postgres::Config = cluster.conn_string(DB).parse().expect("a connection string");
    config.notice_callback(move |notice| {
        let _ = sender.send((
            notice.message().to_owned(),
            notice.hint().unwrap_or_default().to_owned(),
        ));
    });
    config.connect(postgres::NoTls).expect("connect").run(sql);
    notices.try_iter().next()
}

/// One key may have more messages than a worker has in flight.
#[test]
fn thousands_of_messages_of_one_key_delay_no_other_key() {
    let is_released = Arc::new(Mutex::new(false));
    let released = Arc::clone(&is_released);
    let receiver = Receiver::start(move |request| {
        let is_hot = request.header("outbox-key") == "o:hot";
        wait_until("the test to allow the answer", LONG, || {
            !is_hot || *released.lock().expect("no panic")
        });
        Reply::status(200)
    });
    for options in ["", "ordering 'partition'"] {
        *is_released.lock().expect("no panic") = false;
        let cluster = http_cluster(&["outbox.partition_count = 4"]);
        destination(&cluster, "d", &receiver.url("/"), options);
        let publish = |key: &str, count: usize| {
            cluster.exec(
                DB,
                &format!("select outbox_publish('T', to_jsonb(i), 'o', {key}, destination => 'd') from generate_series(1, {count}) i"),
            );
        };
        publish("'first'", 1); // until its answer no other one goes
        wait_drained(&cluster);
        publish("'hot'", 3_000);
        wait_for_requests(&receiver, 1);
        publish("i::text", 40);
        let others = || -> Vec<String> {
            let requests = receiver.requests();
            let keys = requests.iter().map(|request| request.header("outbox-key").to_owned());
            keys.filter(|key| !["o:hot", "o:first"].contains(&&**key)).collect()
        };
        // With order by partition some of them are in that of the key.
        let expected: i64 = match options {
            "" => 40,
            _ => cluster.query_one(
                DB,
                "select count(*) from generate_series(1, 40) i
                 where outbox_partition_of('o:' || i) <> outbox_partition_of('o:hot')",
            ),
        };
        wait_until("the messages of the other keys", LONG, || {
            others().len() as i64 >= expected
        });
        *is_released.lock().expect("no panic") = true;
        wait_drained(&cluster);
        let requests = receiver.take_requests();
        let hot = requests
            .iter()
            .filter(|request| request.header("outbox-key") == "o:hot");
        let arrived: Vec<i64> = hot
            .map(|request| request.json()["payload"].as_i64().expect("a number"))
            .collect();
        assert!(arrived.iter().copied().eq(1..=3_000), "{options}: {arrived:?}");
    }
}
