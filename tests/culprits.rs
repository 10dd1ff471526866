//! A message that makes its destination fail each time it is sent: is it found, charged and ended, while the others
//! arrive? And is nobody charged while the destination fails for all? On a real Postgres, a real RabbitMQ and receivers
//! that answer as a test decides.

use serde_json::{Value, json};
use support::*;

const RETRY: [&str; 4] = [
    "outbox.max_attempts = 2",
    "outbox.retry_backoff = '50ms'",
    "outbox.retry_backoff_max = '100ms'",
    "outbox.http_allow = '127.0.0.1'",
];
/// Only this message makes the destination fail.
const CULPRIT: &str = "culprit";

/// The number of dead letters, of messages that are no culprits and were charged, and the reason of the dead letter.
fn judged(cluster: &Cluster) -> (i64, i64, String) {
    let dead = "select count(*) from outbox_dead";
    let charged = "select count(*) from outbox_history where attempts <> 1 or discarded";
    let reason = "select coalesce(min(format('%s, %s attempts', reason, attempts)), '') from outbox_dead";
    (
        cluster.query_one(DB, dead),
        cluster.query_one(DB, charged),
        cluster.query_one(DB, reason),
    )
}

fn a_receiver_fails_on_one_message(what: &str, fails: impl Fn() -> Reply + Send + Sync + 'static, reason: &str) {
    let receiver = Receiver::start(move |request| match request.label() == CULPRIT {
        true => fails(),
        false => Reply::status(200),
    });
    let cluster = unconnected_cluster("", "nowhere", &RETRY);
    cluster.exec(
        DB,
        &format!(
            "create server hook foreign data wrapper outbox_http options (url '{}', timeout '1s')",
            receiver.url("/")
        ),
    );
    cluster.publish(Event::new(CULPRIT).key("a").to("hook"));
    (0..20).for_each(|n| _ = cluster.publish(Event::new(n).key(n.to_string()).to("hook")));
    // Others come all the time.
    wait_until(&format!("{what}: a dead letter"), LONG, || {
        cluster.publish(Event::new("later").key("later").to("hook"));
        cluster.query_one(DB, "select exists (select from outbox_dead)")
    });
    wait_drained(&cluster);
    let (dead, charged, why) = judged(&cluster);
    assert_eq!((dead, charged), (1, 0), "{what}: {why}");
    assert!(why.contains(reason) && why.ends_with(", 2 attempts"), "{what}: {why}");
}

#[test]
fn a_message_that_a_receiver_fails_on_ends_as_the_only_dead_letter() {
    std::thread::scope(|scope| {
        for status in [503, 502, 504, 404, 403] {
            scope.spawn(move || {
                let what = format!("HTTP {status}");
                a_receiver_fails_on_one_message(&what, move || Reply::status(status), &what)
            });
        }
        let asks_for_a_pause = || Reply::Answer {
            status: 503,
            headers: "retry-after: 1\r\n".to_owned(),
            body: String::new(),
        };
        scope.spawn(move || a_receiver_fails_on_one_message("a pause", asks_for_a_pause, "HTTP 503"));
        scope.spawn(|| a_receiver_fails_on_one_message("a reset", || Reply::Close, "closed the connection"));
        scope.spawn(|| a_receiver_fails_on_one_message("silence", || Reply::Hang, "no answer"));
    });
}

#[test]
fn a_receiver_that_fails_on_every_message_charges_none_and_each_keeps_the_reason() {
    let (is_well, receiver_is_well) = {
        let is_well = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
        (std::sync::Arc::clone(&is_well), is_well)
    };
    let receiver = Receiver::start(
        move |_| match receiver_is_well.load(std::sync::atomic::Ordering::Acquire) {
            true => Reply::status(200),
            false => Reply::status(503),
        },
    );
    let cluster = unconnected_cluster("", "nowhere", &RETRY);
    let url = receiver.url("/");
    cluster.exec(
        DB,
        &format!("create server hook foreign data wrapper outbox_http options (url '{url}')"),
    );
    (0..3).for_each(|n| _ = cluster.publish(Event::new(n).key(n.to_string()).to("hook")));
    wait_until("each message to be tried four times", LONG, || {
        let requests = receiver.requests();
        (0..3).all(|n| {
            requests
                .iter()
                .filter(|request| request.label() == n.to_string())
                .count()
                >= 4
        })
    });
    let shown = "select count(*) from outbox_messages where attempts = 0 and last_error like '%HTTP 503%'";
    wait_true(&cluster, "each message to show why", &format!("select ({shown}) = 3"));
    is_well.store(true, std::sync::atomic::Ordering::Release);
    wait_drained(&cluster);
    assert_eq!(judged(&cluster), (0, 0, String::new()));
}

#[test]
fn a_message_with_a_forbidden_topic_becomes_a_dead_letter_at_once_and_the_others_arrive() {
    let broker = Broker::start();
    let (exchange, queue) = exchange_and_queue(&broker);
    let user = broker.user().to_owned();
    broker.ctl(&["set_topic_permissions", &user, &exchange, "^allowed$", ".*"]);
    let cluster = outbox_cluster_with(
        &broker,
        &exchange,
        &[&RETRY[..], &["outbox.routing_key = '{operation}'"]].concat(),
    );
    for n in 0..100 {
        let operation = if n == 50 { "forbidden" } else { "allowed" };
        cluster.publish(Event::new(n).key(n.to_string()).operation(operation));
    }
    wait_drained(&cluster);
    let (dead, charged, why) = judged(&cluster);
    assert_eq!((dead, charged), (1, 0), "{why}");
    assert!(why.contains("access to topic 'forbidden'"), "{why}");
    let mut arrived = labels(&all_of(&broker, &queue));
    arrived.sort();
    arrived.dedup();
    assert_eq!(arrived.len(), 99);
}

#[test]
fn a_full_queue_charges_no_message_and_each_arrives_when_there_is_room() {
    let broker = Broker::shared();
    let (exchange, queue) = exchange_and_queue(broker);
    let full = format!("{queue}-full");
    broker.declare_queue(&full, json!({"x-max-length": 1, "x-overflow": "reject-publish"}));
    broker.bind(&full, &exchange, "#");
    broker.publish(&exchange, "fills", b"{}");
    let cluster = outbox_cluster_with(broker, &exchange, &RETRY);
    cluster.publish_run("default", "k", 100);
    let refused = "select state = 'down' and reason = 'queue_refused' from outbox_destination_status where destination = 'default'";
    wait_true(&cluster, "the destination to be down", refused);
    wait_until("the first message to be refused five times", LONG, || {
        broker.queue_len(&queue) > 5
    });
    assert!(
        health(&cluster, "broker").1.contains("queue"),
        "{:?}",
        health(&cluster, "broker")
    );
    broker.delete_queue(&full);
    wait_drained(&cluster);
    assert_eq!(judged(&cluster), (0, 0, String::new()));
}

/// Forty keys of a queue that is full, and one of a queue with room, for the same exchange.
fn a_full_queue_delays_no_other(workers: usize) {
    let broker = Broker::shared();
    let (exchange, name) = fresh_names();
    let [full, tried, room] = ["full", "tried", "room"].map(|word| format!("{name}-{word}"));
    broker.declare_exchange(&exchange, "topic", true);
    for (queue, key, args) in [
        (
            &full,
            "full",
            json!({"x-max-length": 1, "x-overflow": "reject-publish"}),
        ),
        (&tried, "full", Value::Null), // a copy of each try
        (&room, "room", Value::Null),
    ] {
        broker.declare_queue(queue, args);
        broker.bind(queue, &exchange, key);
    }
    broker.publish(&exchange, "full", b"{}");
    let conf = [
        "outbox.routing_key = '{operation}'",
        "outbox.retry_backoff = '5ms'",
        "outbox.retry_backoff_max = '20ms'",
        "outbox.max_attempts = 2",
        &format!("outbox.workers = {workers}"),
        &format!("outbox.partition_count = {workers}"), // each lane has refused messages
    ];
    let cluster = outbox_cluster_with(broker, &exchange, &conf);
    wait_true(
        &cluster,
        "each worker to own a partition, and to be connected",
        &format!(
            "select (select count(distinct lease_owner) from outbox_partitions) = {workers}
                and (select count(*) from outbox_connections where state = 'connected') = {workers}"
        ),
    );
    cluster.exec(
        DB,
        "select outbox_publish('T', '{}', 'item', n::text, 'full') from generate_series(1, 40) n",
    );
    let refused = "select count(*) = 40 from outbox_messages where last_error like 'nacked%'";
    wait_true(&cluster, "each message to be refused", refused);
    for n in 0..3 {
        let tries = || broker.queue_len(&tried);
        let before = tries();
        cluster.publish(Event::new(n).key(format!("other {n}")).operation("room"));
        let has_arrived = || broker.queue_len(&room) > n;
        wait_until("the message to arrive, or five tries of others", LONG, || {
            has_arrived() || tries() > before + 5
        });
        println!("{} tries of others", tries() - before);
        assert!(has_arrived(), "{workers} workers: refused messages are tried before it");
    }
    broker.delete_queue(&full);
    wait_drained(&cluster);
    assert_eq!(judged(&cluster).0, 0);
}

#[test]
fn messages_that_a_full_queue_refused_are_tried_behind_those_that_were_not_tried_yet() {
    [1, 2].into_iter().for_each(a_full_queue_delays_no_other);
}

#[test]
fn messages_that_a_receiver_fails_on_are_tried_behind_those_that_were_not_tried_yet() {
    let receiver = Receiver::start(|request| match request.label().starts_with("bad") {
        true => Reply::status(503),
        false => Reply::status(200),
    });
    let conf = [
        "outbox.http_allow = '127.0.0.1'",
        "outbox.retry_backoff = '5ms'",
        "outbox.retry_backoff_max = '20ms'",
        "outbox.partition_count = 1", // they share a lane
    ];
    let cluster = unconnected_cluster("", "nowhere", &conf);
    let url = receiver.url("/");
    cluster.exec(
        DB,
        &format!("create server hook foreign data wrapper outbox_http options (url '{url}')"),
    );
    (0..3).for_each(|n| _ = cluster.publish(Event::new(format!("bad {n}")).key(n.to_string()).to("hook")));
    let tries = |label: &str| {
        receiver
            .labels()
            .iter()
            .filter(|tried| tried.starts_with(label))
            .count()
    };
    wait_until("each message to be tried twice", LONG, || {
        (0..3).all(|n| tries(&format!("bad {n}")) >= 2)
    });
    let before = tries("bad");
    cluster.publish(Event::new("good").key("other").to("hook"));
    wait_until("the message to arrive, or five tries of others", LONG, || {
        tries("good") > 0 || tries("bad") > before + 5
    });
    assert_eq!(tries("good"), 1, "failed messages are tried before it");
}
