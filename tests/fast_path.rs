//! The fast path: a message goes from shared memory to the worker before it is claimed. The messages must be the same
//! as those read from the table. None may be lost, repeated or out of order where the two paths meet. On a real
//! Postgres and a real RabbitMQ.

use std::collections::BTreeMap;
use std::process::Command;

use postgres::Client;
use postgres::error::SqlState;
use serde_json::{Value, json};
use support::{Broker, Cluster, Consumer, Delivery, PrivateBroker, Receiver, Reply, wait_until};
use support::{
    DB, Event, LONG, Session, exchange_and_queue, outbox_cluster, unconnected_cluster, wait_drained, wait_published,
    wait_true,
};

/// A server whose worker has read all its lanes to their end, and a consumer of the queue that it delivers to.
fn stage(broker: &Broker) -> (Cluster, Consumer) {
    let (exchange, queue) = exchange_and_queue(broker);
    let cluster = outbox_cluster(broker, &exchange);
    let consumer = Consumer::new(broker, &queue);
    cluster.connect(DB).publish(Event::new("first").key("first"));
    consumer.next();
    wait_drained(&cluster);
    (cluster, consumer)
}

fn label(delivery: &Delivery) -> Value {
    delivery.json()["payload"]["label"].clone()
}

/// Asserts that nothing comes before a further message, which the worker sends behind all others on one channel.
fn assert_nothing_more(consumer: &Consumer, client: &mut Client) {
    client.publish(Event::new("fence").key("fence"));
    assert_eq!(consumer.next().label(), "fence");
}

/// Keeps workers from claiming while the returned transaction is open, since a claim reads the locked table.
fn block_claims(client: &mut Client) -> postgres::Transaction<'_> {
    let mut held = client.transaction().expect("begin");
    held.run("lock table outbox_paused in access exclusive mode");
    held
}

/// Suspends a private broker: it answers nothing until the returned function is called.
fn suspended(broker: &PrivateBroker) -> impl FnOnce() + '_ {
    broker.suspend();
    || broker.resume()
}

#[test]
fn a_committed_message_is_sent_before_it_is_claimed_however_it_was_enqueued() {
    let broker = Broker::shared();
    let (cluster, consumer) = stage(broker);
    let mut client = cluster.connect(DB);
    client.run("create table captured (id int primary key); select outbox_capture('captured', 'captured')");
    let mut other = cluster.connect(DB);
    let held = block_claims(&mut other);
    let event = |kind: &str| {
        format!(
            "insert into outbox_events (id, type, payload) values (gen_random_uuid(), '{kind}', '{{}}') returning seq"
        )
    };
    for (sql, kind) in [
        ("select outbox_publish('Published', '{}')".to_owned(), "Published"),
        (
            format!(
                "with e as ({}) select outbox_enqueue(seq, 'k') from e",
                event("Enqueued")
            ),
            "Enqueued",
        ),
        // Without a key: the event is looked up in the statement that stores it.
        (
            "with e as (insert into outbox_events (id, type, aggregate_type, aggregate_id, payload)
                        values (gen_random_uuid(), 'Pointer', 'order', '7', '{}') returning seq)
             select outbox_enqueue(seq) from e"
                .to_owned(),
            "Pointer",
        ),
        ("insert into captured values (1)".to_owned(), "CapturedCreated"),
    ] {
        client.run(&sql);
        let delivery = consumer.next();
        assert_eq!(delivery.kind.as_deref(), Some(kind));
        if kind == "Pointer" {
            assert_eq!(delivery.json()["key"], "order:7");
        }
    }
    // Settled without a claim.
    wait_published(&cluster, 5);
    held.rollback().expect("rollback");
    wait_drained(&cluster);
    assert_nothing_more(&consumer, &mut client);
}

#[test]
fn without_the_fast_path_a_message_is_claimed_before_it_is_sent() {
    let receiver = Receiver::start(|request| match request.label() == "first" {
        true => Reply::status(200),
        false => Reply::Hang,
    });
    let conf = ["outbox.fast_path = off", "outbox.http_allow = '127.0.0.1'"];
    let cluster = unconnected_cluster("", "nowhere", &conf);
    let url = receiver.url("/");
    cluster.exec(
        DB,
        &format!("create server hook foreign data wrapper outbox_http options (url '{url}')"),
    );
    // The first message of a lane is always claimed; the second one takes the fast path where it is on.
    cluster.publish(Event::new("first").to("hook").key("k"));
    wait_drained(&cluster);
    cluster.publish(Event::new("claimed").to("hook").key("k"));
    wait_until("the request", LONG, || receiver.requests().len() == 2);
    // By the epoch of the lease, which the claim has written.
    let claim = "select o.claim_token = p.lease_epoch from outbox o join outbox_partitions p using (partition)";
    assert_eq!(cluster.query_one::<Option<bool>>(DB, claim), Some(true));
    drop(receiver);
}

#[test]
fn messages_of_both_paths_look_the_same_to_a_consumer() {
    let broker = Broker::shared();
    let (cluster, consumer) = stage(broker);
    let mut client = cluster.connect(DB);
    let all = "begin; set local timezone = 'Asia/Kathmandu'; set local datestyle = 'German, DMY';
               select outbox_publish('Full', '{\"n\": 1.10, \"text\": \"Ünï \\u2028\"}', 'item', 'a b', 'changed', '{\"n\": 1}', '{\"ip\": \"::1\"}',
                 '{\"x-h\": 7, \"traceparent\": \"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01\"}', 'ann', 'corr');
               commit";
    let least = "select outbox_publish('Least', 'null')";
    let mut received = Vec::new();
    for fast_path in ["on", "off"] {
        cluster.set_conf("outbox.fast_path", fast_path);
        wait_true(
            &cluster,
            "the setting",
            &format!("select current_setting('outbox.fast_path') = '{fast_path}'"),
        );
        for sql in [all, least] {
            client.run(sql);
            let mut delivery = consumer.next();
            for own in ["id", "seq", "lease_epoch", "partition_key"] {
                delivery.headers.remove(own).unwrap_or_else(|| panic!("{own}"));
            }
            delivery.message_id.take().expect("an id");
            delivery.timestamp.take().expect("a time");
            let mut body = delivery.json();
            for own in ["id", "seq", "created_at"] {
                let value = body[own].take().to_string();
                let digit = |c: char| if c.is_ascii_hexdigit() { '0' } else { c };
                body[own] = json!(value.chars().map(digit).collect::<String>());
            }
            let properties = (
                delivery.kind,
                delivery.content_type,
                delivery.delivery_mode,
                delivery.app_id,
            );
            let routing = (delivery.routing_key, delivery.correlation_id);
            received.push((body, delivery.headers, properties, routing));
        }
    }
    assert_eq!(received[..2], received[2..]);
}

#[test]
fn a_message_changed_or_deleted_in_its_transaction_is_sent_as_committed() {
    let broker = Broker::shared();
    let (cluster, consumer) = stage(broker);
    let mut client = cluster.connect(DB);
    client.run("begin");
    let changed = client.publish("before");
    let removed = client.publish("removed");
    client.run(&format!(
        "update outbox_events set payload = '{{\"label\": \"after\"}}' where seq = {changed};
             delete from outbox where seq = {removed};
             savepoint s"
    ));
    client.publish("rolled back");
    client.run("rollback to s");
    client.publish("last");
    client.run("commit");
    assert_eq!(
        [label(&consumer.next()), label(&consumer.next())],
        [json!("after"), json!("last")]
    );
    wait_drained(&cluster);
    assert_nothing_more(&consumer, &mut client);
}

#[test]
fn messages_of_a_key_keep_their_order_where_some_are_too_large_for_the_fast_path() {
    let broker = Broker::shared();
    let (cluster, consumer) = stage(broker);
    let mut clients: Vec<Client> = (0..3).map(|_| cluster.connect(DB)).collect();
    let count = 300;
    for number in 0..count {
        let padding = if number % 3 == 0 { 6_000 } else { 10 };
        let client = &mut clients[number % 3];
        let label = json!([number, "x".repeat(padding)]);
        // Every seventh commit is asynchronous, so its message takes the table path as well.
        if number % 7 == 0 {
            client.run("set synchronous_commit = off");
        }
        client.publish(Event::new(label).key("one"));
        client.run("reset synchronous_commit");
    }
    let numbers: Vec<u64> = consumer
        .recv_n(count, LONG)
        .iter()
        .map(|delivery| label(delivery)[0].as_u64().expect("a number"))
        .collect();
    assert_eq!(numbers, (0..count as u64).collect::<Vec<_>>());
    wait_drained(&cluster);
    assert_nothing_more(&consumer, &mut clients[0]);
}

#[test]
fn a_message_without_an_answer_is_claimed_and_arrives_once() {
    let broker = Broker::start();
    let (cluster, consumer) = stage(&broker);
    let resume = suspended(&broker);
    let mut client = cluster.connect(DB);
    let seq = client.publish("late");
    let in_flight = format!("select exists (select from outbox_messages where seq = {seq} and status = 'in flight')");
    wait_true(&cluster, "the message to be claimed", &in_flight);
    resume();
    assert_eq!(consumer.next().label(), "late");
    wait_published(&cluster, 2);
    let attempts = format!("select attempts from outbox_messages where seq = {seq}");
    assert_eq!(cluster.query_one::<i32>(DB, &attempts), 1);
    assert_nothing_more(&consumer, &mut client);
}

#[test]
fn a_fast_path_in_flight_message_cannot_be_discarded() {
    let broker = Broker::start();
    let (cluster, consumer) = stage(&broker);
    let resume = suspended(&broker);
    let (mut client, mut other) = (cluster.connect(DB), cluster.connect(DB));
    let held = block_claims(&mut other);
    let seq = client.publish("in flight");
    let in_flight = "select in_flight = 1 from outbox_internal.counters";
    wait_true(&cluster, "the message to be in flight", in_flight);
    let error = client
        .query_one("select outbox_discard($1)", &[&seq])
        .expect_err("the message is in flight");
    assert_eq!(error.code(), Some(&SqlState::OBJECT_IN_USE));
    resume();
    assert_eq!(consumer.next().label(), "in flight");
    held.rollback().expect("rollback");
    wait_published(&cluster, 2);
}

#[test]
fn a_fast_path_in_flight_message_behaves_like_a_claimed_one() {
    let broker = Broker::start();
    let (cluster, consumer) = stage(&broker);
    let resume = suspended(&broker);
    let (mut client, mut other) = (cluster.connect(DB), cluster.connect(DB));
    let held = block_claims(&mut other);
    let seq = client.publish("in flight");
    let answers = |client: &mut Client| -> Vec<String> {
        let status = client
            .query_one("select status from outbox_messages where seq = $1", &[&seq])
            .expect("the message")
            .get(0);
        let counted: i64 = client.value("select in_flight from outbox_internal.counters");
        let of_it: i64 = client.value(
            "select in_flight from outbox_internal.shared_memory('statistics', 'default') f (
               in_flight bigint, published bigint, failed bigint, dead bigint, released bigint, published_60s numeric,
               since_us double precision, p50_ms numeric, p95_ms numeric, p99_ms numeric, pending bigint, max_pending bigint)",
        );
        let retried: bool = client
            .query_one("select outbox_retry($1)", &[&seq])
            .expect("retry")
            .get(0);
        let discarded = client
            .query_one("select outbox_discard($1)", &[&seq])
            .expect_err("the message is in flight");
        vec![
            status,
            counted.to_string(),
            of_it.to_string(),
            retried.to_string(),
            discarded
                .as_db_error()
                .map(|error| error.message().to_owned())
                .unwrap_or_default(),
        ]
    };
    wait_true(
        &cluster,
        "the message to be in flight",
        "select in_flight = 1 from outbox_internal.counters",
    );
    let claimed = "select claim_token is not null from outbox";
    assert!(!cluster.query_one::<bool>(DB, claimed));
    let listed = Command::new(support::program::outboxctl())
        .args([
            "list",
            "--json",
            "--status",
            "in-flight",
            "-d",
            &cluster.conn_string(DB),
        ])
        .output()
        .expect("outboxctl");
    let listed = String::from_utf8_lossy(&listed.stdout).into_owned();
    assert!(listed.contains(&format!("\"seq\":{seq},")), "{listed}");
    let fast_in_flight = answers(&mut client);
    held.rollback().expect("rollback");
    wait_true(&cluster, "the message to be claimed", claimed);
    assert_eq!(fast_in_flight, answers(&mut client));
    let message = format!("message {seq} is in flight");
    assert_eq!(fast_in_flight, ["in flight", "1", "1", "false", &message]);
    resume();
    assert_eq!(consumer.next().label(), "in flight");
    wait_published(&cluster, 2);
}

#[test]
fn more_messages_than_shared_memory_holds_arrive_once_and_in_order() {
    let broker = Broker::start();
    let (cluster, consumer) = stage(&broker);
    let resume = suspended(&broker);
    let (mut client, mut other) = (cluster.connect(DB), cluster.connect(DB));
    let held = block_claims(&mut other); // so that no fast-path in-flight message is claimed, which would make room
    let count = 700;
    for number in 0..count {
        client.publish(Event::new(number).key(format!("k{}", number % 5)));
    }
    held.rollback().expect("rollback");
    resume();
    let mut last: BTreeMap<u64, u64> = BTreeMap::new();
    for delivery in consumer.recv_n(count, LONG) {
        let number = label(&delivery).as_u64().expect("a number");
        let before = last.insert(number % 5, number);
        assert!(
            before.is_none_or(|before| before + 5 == number),
            "{number} arrived after {before:?}"
        );
    }
    wait_published(&cluster, count + 1);
    assert_nothing_more(&consumer, &mut client);
}

#[test]
fn a_worker_that_ends_with_fast_path_messages_in_flight_loses_none() {
    let broker = Broker::start();
    let (cluster, consumer) = stage(&broker);
    let mut client = cluster.connect(DB);
    for round in 0..3 {
        let resume = suspended(&broker);
        for number in 0..20 {
            client.publish(json!([round, number]));
        }
        let end = "select pg_terminate_backend(pid) from pg_stat_activity where backend_type = 'outbox worker'";
        client.run(end);
        resume();
    }
    wait_drained(&cluster);
    wait_published(&cluster, 61);
    let mut seen: Vec<Value> = Vec::new();
    for delivery in consumer.finish() {
        if !seen.contains(&label(&delivery)) {
            seen.push(label(&delivery)); // messages that the broker had may arrive again
        }
    }
    let all: Vec<Value> = (0..3)
        .flat_map(|round| (0..20).map(move |number| json!([round, number])))
        .collect();
    assert_eq!(seen, all);
}

/// Messages for a destination that is dropped before their commit.
#[test]
fn a_dropped_destination_takes_no_room_of_the_fast_path() {
    let broker = Broker::shared();
    let (cluster, consumer) = stage(broker);
    cluster.exec(
        DB,
        "create server gone foreign data wrapper outbox_amqp options (exchange 'x')",
    );
    let mut writers: Vec<Client> = (0..40).map(|_| cluster.connect(DB)).collect();
    for writer in &mut writers {
        writer.run("begin; select outbox_publish('T', '{}', destination => 'gone') from generate_series(1, 8)");
    }
    cluster.exec(DB, "drop server gone");
    wait_true(
        &cluster,
        "the worker to serve it no longer",
        "select not exists (select from outbox_connections where destination = 'gone')",
    );
    writers.iter_mut().for_each(|writer| writer.run("commit"));
    let (mut client, mut other) = (cluster.connect(DB), cluster.connect(DB));
    client.publish(Event::new("after them").key("fast"));
    assert_eq!(label(&consumer.next()), "after them");
    wait_published(&cluster, 2); // the worker has given them up, and its claim is over
    let held = block_claims(&mut other);
    client.publish(Event::new("fast").key("fast"));
    assert_eq!(label(&consumer.next()), "fast");
    held.rollback().expect("rollback");
}

#[test]
fn a_commit_that_fails_delivers_nothing() {
    let broker = Broker::shared();
    let (cluster, consumer) = stage(broker);
    cluster.exec(
        DB,
        "create table on_call (name text primary key, is_on boolean); insert into on_call values ('a', true), ('b', true)",
    );
    // Each reads what the other changes. The second COMMIT finds that, after it has filled its slot.
    let mut clients = ["a", "b"].map(|name| {
        let mut client = cluster.connect(DB);
        client.run("begin isolation level serializable; select count(*) from on_call where is_on");
        client.run(&format!("update on_call set is_on = false where name = '{name}'"));
        client.publish(Event::new(name).key(name));
        client
    });
    clients[0].run("commit");
    let error = clients[1].batch_execute("commit").expect_err("a write skew");
    assert_eq!(error.code(), Some(&SqlState::T_R_SERIALIZATION_FAILURE));
    assert_eq!(label(&consumer.next()), "a");
    assert_nothing_more(&consumer, &mut clients[0]);
}

#[test]
fn no_message_takes_the_fast_path_once_its_destination_is_paused() {
    let broker = Broker::shared();
    let (cluster, consumer) = stage(broker);
    let mut client = cluster.connect(DB);
    cluster.exec(
        DB,
        "create server elsewhere foreign data wrapper outbox_amqp options (exchange 'amq.fanout')",
    );
    let mut busy = cluster.connect(DB);
    for round in 0..60 {
        // In one transaction, also while the worker is awake.
        let together = round >= 20;
        if together {
            client.run("begin");
        }
        client.run("select outbox_pause()");
        let seq = client.publish(round);
        if together {
            let publish = "select outbox_publish('T', '{}', destination => 'elsewhere')";
            std::thread::scope(|scope| {
                let awake = scope.spawn(|| (0..20).for_each(|_| busy.run(publish)));
                client.run("commit");
                awake.join().expect("no panic");
            });
        }
        client.run("select outbox_run_pass()");
        let waits = client.query_one("select count(*) from outbox where seq = $1", &[&seq]);
        assert_eq!(waits.expect("the row").get::<_, i64>(0), 1, "round {round}");
        client.run("select outbox_resume()");
        assert_eq!(label(&consumer.next()), round);
    }
}

/// Empties the tables as a replica does, without the trigger that refuses TRUNCATE.
const TRUNCATE: &str = "set local session_replication_role = replica; truncate outbox, outbox_events; set local session_replication_role = origin";

/// Changes that a transaction makes to the tables between two publishes, and whether the first message survives the
/// change.
const CHANGES: [(&str, bool); 9] = [
    (TRUNCATE, false),
    ("delete from outbox; delete from outbox_events", false),
    ("cluster outbox using outbox_pkey", true),
    ("cluster outbox_events using outbox_events_pkey", true),
    ("alter table outbox set unlogged", true),
    ("alter table outbox_events set unlogged", true),
    ("alter table outbox_events set tablespace other", true),
    (
        "alter table outbox_events add extra float8 default random(); alter table outbox_events drop extra",
        true,
    ),
    (
        "alter table outbox add extra float8 default random(); alter table outbox drop extra",
        true,
    ),
];

/// A row written before its table got another file is gone, though another row may have the same row id.
#[test]
fn messages_of_truncated_or_rewritten_tables_are_sent_as_committed() {
    let broker = Broker::shared();
    let (exchange, queue) = exchange_and_queue(broker);
    let cluster = support::outbox_cluster_with(broker, &exchange, &["allow_in_place_tablespaces = on"]);
    let consumer = Consumer::new(broker, &queue);
    cluster.exec(DB, "create tablespace other location ''");
    let mut client = cluster.connect(DB);
    let mut expected = Vec::new();
    let next_label = || label(&consumer.next());
    for (change, outlives) in CHANGES {
        for savepoint in [false, true] {
            let fresh = format!(
                "begin; {TRUNCATE}; commit; alter table outbox set logged; alter table outbox_events set logged;
                 alter table outbox_events set tablespace pg_default"
            );
            client.run(&fresh);
            let ghost = |n: i32| json!([change, savepoint, "before", n]);
            let real = |n: i32| json!([change, savepoint, "after", n]);
            client.run("begin");
            for n in 0..3 {
                client.publish(ghost(n));
            }
            if savepoint {
                client.run("savepoint s");
            }
            client.run(change);
            for n in 0..3 {
                client.publish(real(n));
            }
            if savepoint {
                client.run("rollback to s");
                client.publish(json!([change, "last"]));
            }
            client.run("commit");
            if outlives || savepoint {
                expected.extend((0..3).map(ghost));
            }
            match savepoint {
                true => expected.push(json!([change, "last"])),
                false => expected.extend((0..3).map(real)),
            }
            let all: Vec<Value> = std::mem::take(&mut expected);
            assert_eq!(
                all.iter().map(|_| next_label()).collect::<Vec<_>>(),
                all,
                "{change}, savepoint: {savepoint}"
            );
            wait_drained(&cluster);
        }
    }
    assert_nothing_more(&consumer, &mut client);
}

#[test]
fn a_commit_succeeds_after_any_change_of_the_tables() {
    let broker = Broker::shared();
    let (cluster, consumer) = stage(broker);
    let mut client = cluster.connect(DB);
    for (what, last) in [
        (TRUNCATE, "truncate"),
        ("drop extension outbox cascade", "drop"),
        ("create extension outbox", "create"),
        ("drop extension outbox cascade; create extension outbox", "both"),
    ] {
        client.batch_execute(&format!("begin; {TRUNCATE}; commit")).ok(); // a new file, if the table exists
        client.run("rollback; begin");
        if last != "create" {
            for _ in 0..3 {
                client.publish("ghost");
            }
        }
        client.run(what);
        client.run("commit");
    }
    client.publish("real");
    assert_eq!(consumer.next().label(), "real");
    wait_drained(&cluster);
    assert_nothing_more(&consumer, &mut client);
}
