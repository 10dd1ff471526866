//! Every committed message reaches a consumer, and no other message does. On a real Postgres and a real RabbitMQ
//! without faults; faults.rs has the faults.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, SystemTime};

use postgres::Client;
use postgres::error::SqlState;
use serde_json::{Value, json};
use support::courier::{Outside, without_workers};
use support::load::{Load, Plan};
use support::oracle::{Arrived, Fate, Sent, Verdict, arrived, judge, last_arrivals_out_of_order};
use support::wait::Pauses;
use support::{Broker, Cluster, Mode, Proxy, fresh_names};
use support::{
    DB, Event, LONG, Session, Stage, all_of, exchange_and_queue, labels, outbox_cluster_with, unconnected_cluster,
    wait_connected, wait_drained, wait_published, wait_true, within,
};

/// (status, reference_status, attempts) of outbox_messages.
fn status_of(cluster: &Cluster, seq: i64) -> (String, String, i32) {
    let sql = "select status, coalesce(reference_status, 'none'), attempts from outbox_messages where seq = $1";
    let row = cluster.connect(DB).query_one(sql, &[&seq]);
    let row = row.unwrap_or_else(|error| panic!("message {seq}: {error:?}"));
    (row.get(0), row.get(1), row.get(2))
}

fn wait_for_status(cluster: &Cluster, seq: i64, status: &str) {
    let sql = format!("select exists (select from outbox_messages where seq = {seq} and status = '{status}')");
    wait_true(cluster, &format!("message {seq} to be {status}"), &sql);
}

fn status(status: &str, reference: &str, attempts: i32) -> (String, String, i32) {
    (status.into(), reference.into(), attempts)
}

// ---- commit and rollback --------------------------------------------------------------------------------------------

#[test]
fn a_commit_delivers_and_a_rollback_does_not() {
    let stage = Stage::new(&[]);
    let mut client = stage.connect(DB);
    client.run("begin");
    client.publish("rolled back");
    client.run("rollback");
    client.run("begin");
    client.publish("first");
    client.run("savepoint s");
    client.publish("in a savepoint that is rolled back");
    client.run("rollback to s; savepoint s");
    client.publish("in a savepoint that is released");
    client.run("release s");
    client.publish("last");
    client.run("commit");
    assert_eq!(
        labels(&stage.delivered()),
        ["first", "in a savepoint that is released", "last"]
    );
    wait_published(&stage, 3);
}

#[test]
fn a_prepared_transaction_delivers_at_its_commit_and_not_before() {
    let stage = Stage::new(&["max_prepared_transactions = 10"]);
    let consumer = stage.consumer();
    let next = || consumer.next().label();
    let mut client = stage.connect(DB);
    for name in [
        "committed",
        "committed elsewhere",
        "rolled back",
        "rolled back elsewhere",
    ] {
        client.run("begin");
        client.publish(Event::new(name).key(name));
        client.run(&format!("prepare transaction '{name}'"));
    }
    client.publish(Event::new("not prepared").key("fence"));
    assert_eq!(next(), "not prepared");
    client.run("commit prepared 'committed'");
    assert_eq!(next(), "committed");
    client.run("rollback prepared 'rolled back'");
    stage.connect(DB).run("commit prepared 'committed elsewhere'");
    assert_eq!(next(), "committed elsewhere");
    stage.connect(DB).run("rollback prepared 'rolled back elsewhere'");
    client.publish(Event::new("the end").key("fence"));
    assert_eq!(next(), "the end");
    wait_published(&stage, 4);
    wait_drained(&stage);
    drop(consumer);
    assert!(stage.all().is_empty());
}

#[test]
fn a_scheduled_message_waits_for_its_time() {
    let stage = Stage::new(&[]);
    let consumer = stage.consumer();
    let scheduled = stage.publish(Event::new("scheduled").with("available_at => now() + '10 s'"));
    assert_eq!(status_of(&stage, scheduled), status("scheduled", "PENDING", 0));
    stage.publish("at once");
    assert_eq!(labels(&consumer.recv_n(2, LONG)), ["at once", "scheduled"]);
    wait_published(&stage, 2);
    assert_eq!(status_of(&stage, scheduled), status("published", "PUBLISHED", 1));
    let in_time = format!("select published_at >= created_at + '10 s' from outbox_messages where seq = {scheduled}");
    assert!(stage.query_one::<bool>(DB, &in_time), "published before it was due");
    let began = "select h.enqueued_at >= e.created_at + '10 s' from outbox_history h join outbox_events e using (seq)";
    let began = format!("{began} where h.seq = {scheduled}");
    assert!(stage.query_one::<bool>(DB, &began), "its time began before it was due");
}

/// A worker looks once a second for what no commit announces. A message that wakes it is the control.
#[test]
fn a_prepared_and_a_due_message_are_found_within_a_second() {
    let stage = Stage::new(&["max_prepared_transactions = 1"]);
    let (mut client, pauses) = (stage.connect(DB), Pauses::watch());
    let mut longest = [Duration::ZERO; 3];
    for round in 0..5 {
        for (which, longest) in longest.iter_mut().enumerate() {
            client.run("begin");
            let due = "select clock_timestamp() + case $1::int when 2 then interval '0.2 s' else '0' end";
            let mut due: SystemTime = client.query_one(due, &[&(which as i32)]).expect("a time").get(0);
            let publish = "select outbox_publish('T', '{}', available_at => $1)";
            let seq: i64 = client.query_one(publish, &[&due]).expect("publish").get(0);
            if which == 1 {
                client.run("prepare transaction 'p'");
                due = client.value("select clock_timestamp()");
                client.run("commit prepared 'p'");
            } else {
                client.run("commit");
            }
            wait_published(&stage, 3 * round + which + 1);
            let published = "select published_at from outbox_history where seq = $1";
            let published: SystemTime = client.query_one(published, &[&seq]).expect("the history").get(0);
            *longest = published
                .duration_since(due)
                .expect("not before it is due")
                .max(*longest);
        }
    }
    let lost = pauses.end();
    let [control, prepared, scheduled] = longest;
    println!("{longest:.1?}, the machine lost {lost:.1?}");
    assert!(prepared.max(scheduled) <= Duration::from_secs(1) + control + lost);
}

#[test]
fn a_row_inserted_by_hand_is_delivered_within_31_s() {
    let stage = Stage::new(&[]);
    let mut client = stage.connect(DB);
    let seq = store(&mut client, &["by hand"])[0];
    client.run(&format!("insert into outbox (seq, partition) values ({seq}, 3)"));
    // All waiting messages are read every 30 s, at the next look, and each second has one.
    within("the delivery", Duration::from_secs(31), || wait_published(&stage, 1));
}

// ---- what a consumer sees -------------------------------------------------------------------------------------------

/// A payload that not every JSON parser can read: numbers beyond a double, and more levels than most parsers allow.
fn awkward_payload() -> String {
    let deep = format!("{}{}", "[".repeat(2000), "]".repeat(2000));
    format!(
        r#"{{"big": 1e400, "small": 1e-400, "exact": 12345678901234567890.123456789000, "negative": -0, "empty": "",
            "text": "Ünï \" \\ \/ \b\f\n\r\t \u0001 \u2028 \ud83d\ude00 \u00e9", "": null, "deep": {deep},
            "list": [1, 2.50, true, false, null, {{}}, []], "b": 1, "b": 2}}"#
    )
}

#[test]
fn a_consumer_reads_the_event_byte_for_byte_and_all_its_properties() {
    let stage = Stage::new(&[]);
    let consumer = stage.consumer();
    let mut client = stage.connect(DB);
    let headers = r#"{"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "whole": -7, "broken": 0.5,
        "beyond": 123456789012345678901234567890, "yes": true, "no": false, "none": null, "list": [1, "a"],
        "object": {"a": {"b": null}}, "ünï": "ü\n", "seq": "not the user's to set"}"#;
    let metadata = r#"{"ip": "::1"}"#;
    let previous = r#"{"total": 1.10}"#;
    let seq: i64 = client
        .query_one(
            "select outbox_publish('OrderPlaced', $1::text::jsonb, 'Order', 'A-42', 'PLACED', $2::text::jsonb,
               $3::text::jsonb, $4::text::jsonb, 'Änne', 'corr \"1\"')",
            &[&awkward_payload(), &previous, &metadata, &headers],
        )
        .expect("publish")
        .get(0);
    let message = consumer.next();
    wait_published(&stage, 1);

    let stored = client
        .query_one(
            r#"select e.id::text, e.payload::text, e.previous_payload::text, e.metadata::text, e.headers::text,
                 to_char(e.created_at at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"') as created_at,
                 floor(extract(epoch from e.created_at))::bigint as created_at_s, m.partition_key, p.lease_epoch,
                 outbox_partition_of('Order:A-42') as partition_of_key
               from outbox_events e join outbox_messages m using (seq)
               join outbox_partition_status p using (partition_key) where e.seq = $1"#,
            &[&seq],
        )
        .expect("the stored event");
    let text = |column: &str| stored.get::<_, String>(column);
    let body = format!(
        r#"{{"id":"{id}","seq":{seq},"type":"OrderPlaced","aggregate_type":"Order","aggregate_id":"A-42","operation":"PLACED","payload":{payload},"previous_payload":{previous},"metadata":{metadata},"actor":"Änne","correlation_id":"corr \"1\"","created_at":"{created_at}","key":"Order:A-42","headers":{headers}}}"#,
        id = text("id"),
        payload = text("payload"),
        previous = text("previous_payload"),
        metadata = text("metadata"),
        created_at = text("created_at"),
        headers = text("headers"),
    );
    assert_eq!(String::from_utf8(message.body).expect("UTF-8"), body);

    assert_eq!(message.exchange, stage.exchange);
    assert_eq!(message.routing_key, "order.placed");
    assert_eq!(message.message_id, Some(text("id")));
    assert_eq!(message.kind.as_deref(), Some("OrderPlaced"));
    assert_eq!(message.content_type.as_deref(), Some("application/json"));
    assert_eq!(message.delivery_mode, Some(2));
    assert_eq!(
        message.timestamp,
        Some(stored.get::<_, i64>("created_at_s").cast_unsigned())
    );
    assert_eq!(message.app_id.as_deref(), Some("outbox"));
    assert_eq!(message.correlation_id.as_deref(), Some("corr \"1\""));
    assert_eq!(text("partition_key"), text("partition_of_key"));
    let expected = json!({
        "id": text("id"), "aggregate_type": "Order", "aggregate_id": "A-42", "seq": seq,
        "partition_key": text("partition_key"), "lease_epoch": stored.get::<_, i64>("lease_epoch"), "attempt": 1,
        "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "whole": -7, "broken": 0.5,
        "beyond": "123456789012345678901234567890", "yes": true, "no": false, "list": "[1, \"a\"]",
        "object": "{\"a\": {\"b\": null}}", "ünï": "ü\n",
    });
    assert_eq!(Value::Object(message.headers.into_iter().collect()), expected);
}

#[test]
fn a_field_that_an_event_lacks_is_absent_from_its_message() {
    let stage = Stage::new(&[]);
    let consumer = stage.consumer();
    let mut client = stage.connect(DB);
    let id = "0190d8f0-0000-7000-8000-000000000001";
    client.run(&format!("select outbox_publish('Ping', 'null', id => '{id}')"));
    let message = consumer.next();
    let created_at: String = stage.query_one(
        DB,
        r#"select to_char(created_at at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"') from outbox_events"#,
    );
    assert_eq!(
        String::from_utf8(message.body).expect("UTF-8"),
        format!(r#"{{"id":"{id}","seq":1,"type":"Ping","payload":null,"created_at":"{created_at}"}}"#)
    );
    assert_eq!(
        (message.routing_key.as_str(), message.correlation_id, message.message_id),
        (".", None, Some(id.into()))
    );
    let names: Vec<&str> = message.headers.keys().map(String::as_str).collect();
    assert_eq!(names, ["attempt", "id", "lease_epoch", "partition_key", "seq"]);
}

#[test]
fn large_events_arrive_whole() {
    let stage = Stage::new(&[]);
    let mut client = stage.connect(DB);
    let events: Vec<Sent> = (0..40)
        .map(|n| Sent {
            label: n.to_string(),
            payload: json!({"label": n.to_string(), "pad": n.to_string().repeat(500_000)[..500_000]}),
            fate: Fate::Committed,
        })
        .collect();
    client.run("begin");
    for event in &events {
        client
            .execute("select outbox_publish('Large', $1, 'item', 'large')", &[&event.payload])
            .expect("publish");
    }
    client.run("commit");
    judge(&events, &arrived(&stage.delivered())).assert_perfect();
}

// ---- many events ----------------------------------------------------------------------------------------------------

#[test]
fn ten_thousand_events_of_many_writers_arrive_once_and_in_order_per_key() {
    let stage = Stage::new(&[]);
    let plan = Plan {
        writers: 8,
        keys: 200,
        transactions_per_s: None,
        events_per_writer: 1_250,
        mixed: true,
        ..Plan::default()
    };
    let sent = Load::start(&stage, &plan).finish();
    assert!(sent.len() >= 10_000);
    let committed = sent.iter().filter(|sent| sent.fate == Fate::Committed).count();
    let rolled_back = sent.iter().filter(|sent| sent.fate == Fate::RolledBack).count();
    assert!(
        committed > 7_000 && rolled_back > 1_000 && committed + rolled_back == sent.len(),
        "{committed} committed, {rolled_back} rolled back"
    );
    judge(&sent, &arrived(&stage.delivered())).assert_perfect();
    wait_published(&stage, committed);
    let tried_once: bool = stage
        .cluster
        .query_one(DB, "select bool_and(attempts = 1) from outbox_history");
    assert!(tried_once);
}

#[test]
fn two_workers_share_the_partitions_and_keep_order_per_key() {
    let stage = Stage::new(&["outbox.workers = 2"]);
    let owned: Vec<i64> = stage
        .connect(DB)
        .query("select partitions from outbox_worker_status where alive", &[])
        .expect("the status of the workers")
        .iter()
        .map(|row| row.get(0))
        .collect();
    assert_eq!(owned.len(), 2);
    assert!(owned.iter().all(|partitions| *partitions > 0), "{owned:?}");
    let sent = Load::start(&stage, &two_thousand()).finish();
    judge(&sent, &arrived(&stage.delivered())).assert_perfect();
}

#[test]
fn without_leases_two_workers_deliver_everything_once() {
    let stage = Stage::new(&["outbox.workers = 2", "outbox.leasing = off"]);
    let sent = Load::start(&stage, &two_thousand()).finish();
    let verdict = judge(&sent, &arrived(&stage.delivered()));
    let expected = Verdict {
        reordered: verdict.reordered.clone(), // without leases the order is not guaranteed
        ..Verdict::default()
    };
    assert_eq!(verdict, expected);
    let leases: i64 = stage.query_one(
        DB,
        "select count(*) from outbox_partitions where lease_owner is not null",
    );
    assert_eq!(leases, 0, "no lease was taken");
}

fn two_thousand() -> Plan {
    Plan {
        writers: 4,
        keys: 50,
        transactions_per_s: None,
        events_per_writer: 500,
        ..Plan::default()
    }
}

#[test]
fn the_outbox_table_holds_only_messages_that_are_due() {
    let stage = Stage::new(&[]);
    let mut client = stage.connect(DB);
    for n in 0..20 {
        client.publish(Event::new("goes").key(format!("k{n}")));
    }
    wait_published(&stage, 20);
    let one =
        "select relkind = 'r' and not relispartition and not exists (select from pg_inherits where inhparent = c.oid)
               from pg_class c where oid = 'outbox'::regclass";
    assert!(stage.query_one::<bool>(DB, one));
    assert_eq!(stage.query_one::<i64>(DB, "select count(*) from outbox"), 0);
    client
        .execute(
            "select outbox_publish('T', '{}', 'item', 'b', available_at => now() + '1 day')",
            &[],
        )
        .expect("publish");
    let scheduled = "select (select count(*) from outbox), (select count(*) from outbox_waiting)";
    let row = client.query_one(scheduled, &[]).expect("counts");
    assert_eq!(
        (row.get::<_, i64>(0), row.get::<_, i64>(1)),
        (0, 1),
        "messages that are not due are in another table"
    );
}

#[test]
fn twenty_messages_sent_one_by_one_do_not_wait_for_the_poll() {
    let stage = Stage::new(&["outbox.idle_backoff = '1s'"]);
    let consumer = stage.consumer();
    let mut client = stage.connect(DB);
    // With polling each message would take a second: the worker has nothing more to do for the previous one.
    let rests = "select bool_and(state_change < clock_timestamp() - interval '0.3 s') from pg_stat_activity
                 where backend_type = 'outbox worker'";
    within("twenty messages", Duration::from_secs(12), || {
        for n in 0..20 {
            wait_true(&stage, "the worker to rest", rests);
            client.publish(n.to_string());
            let message = consumer.next();
            assert_eq!(message.label(), n.to_string());
        }
    });
}

// ---- enqueue --------------------------------------------------------------------------------------------------------

/// Stores events without enqueuing them. Returns their seqs.
fn store(client: &mut Client, items: &[&str]) -> Vec<i64> {
    items
        .iter()
        .map(|item| {
            client
                .query_one(
                    "insert into outbox_events (id, type, aggregate_type, aggregate_id, operation, payload)
                     values (outbox_uuid_v7(), 'Stored', 'item', $1, 'stored', $2) returning seq",
                    &[item, &json!({"label": item})],
                )
                .expect("store an event")
                .get(0)
        })
        .collect()
}

#[test]
fn a_seq_that_is_enqueued_twice_stays_one_message() {
    let stage = Stage::new(&[]);
    let mut client = stage.connect(DB);
    let seqs = store(&mut client, &["a", "b", "c"]);
    let enqueue = |client: &mut Client, seq: i64, key: Option<&str>| -> bool {
        client
            .query_one("select outbox_enqueue($1, $2)", &[&seq, &key])
            .expect("enqueue")
            .get(0)
    };
    client.run("begin");
    assert!(enqueue(&mut client, seqs[0], None));
    assert!(!enqueue(&mut client, seqs[0], None));
    assert!(!enqueue(&mut client, seqs[0], Some("another key")));
    assert!(enqueue(&mut client, seqs[1], Some("a key")));
    assert!(!enqueue(&mut client, seqs[1], None));
    let many: i64 = client
        .query_one(
            "select outbox_enqueue_many($1)",
            &[&vec![seqs[2], seqs[0], seqs[2], seqs[1]]],
        )
        .expect("enqueue")
        .get(0);
    assert_eq!(many, 1, "c is the only new one");
    client.run("commit");
    let mut got = labels(&stage.delivered());
    got.sort_unstable();
    assert_eq!(got, ["a", "b", "c"]);
    wait_published(&stage, 3);

    assert!(
        enqueue(&mut client, seqs[0], None),
        "a published message is not in the outbox and may be enqueued again"
    );
    assert_eq!(labels(&stage.delivered()), ["a"]);
    wait_published(&stage, 4);
}

#[test]
fn an_explicit_key_and_partition_are_used_as_given() {
    let stage = Stage::new(&[]);
    let mut client = stage.connect(DB);
    let seqs = store(&mut client, &["a", "b"]);
    let enqueue = "select outbox_enqueue($1, key => 'my key', partition_key => $2)";
    client
        .execute(enqueue, &[&seqs[0], &Some("p03")])
        .expect("enqueue into a partition");
    client
        .execute(enqueue, &[&seqs[1], &None::<&str>])
        .expect("enqueue by key");
    let by_key: String = stage.query_one(DB, "select outbox_partition_of('my key')");
    assert_ne!(by_key, "p03", "otherwise the test proves nothing");
    let partitions: BTreeMap<String, (Value, Value)> = stage
        .delivered()
        .iter()
        .map(|delivery| {
            let body = delivery.json();
            let partition = delivery.headers["partition_key"].clone();
            (delivery.label(), (body["key"].clone(), partition))
        })
        .collect();
    let expected = |partition: &str| (json!("my key"), json!(partition));
    assert_eq!(
        partitions,
        BTreeMap::from([("a".into(), expected("p03")), ("b".into(), expected(&by_key))])
    );
}

#[test]
fn a_missing_event_is_refused_without_a_key_and_becomes_a_dead_letter_with_one() {
    let stage = Stage::new(&[]);
    let mut client = stage.connect(DB);
    let refused = client
        .execute("select outbox_enqueue(999)", &[])
        .expect_err("the event does not exist");
    let refused = refused.as_db_error().expect("an error of the server");
    assert_eq!(*refused.code(), SqlState::NO_DATA_FOUND); // P0002, the code that PL/pgSQL uses
    assert!(
        refused.message().contains("999") && refused.hint().is_some(),
        "{refused:?}"
    );

    let error = client.batch_execute("select outbox_enqueue(999, key => 'my key')");
    let error = error.expect_err("the seq was never drawn");
    assert_eq!(error.code(), Some(&SqlState::NO_DATA_FOUND), "{error}");
    stage.draw_seqs(999);
    client.run("select outbox_enqueue(999, key => 'my key')");
    client.publish("a neighbour");
    assert_eq!(labels(&stage.delivered()), ["a neighbour"]);
    let (seq, reason) = dead(&mut client).pop().expect("a dead letter");
    assert_eq!(seq, 999);
    assert!(reason.contains("no event with seq 999"), "{reason}");
    assert_eq!(status_of(&stage, 999), status("dead", "FAILED", 1));
}

/// The dead letters in order of seq, with their reasons.
fn dead(client: &mut Client) -> Vec<(i64, String)> {
    let rows = client.query("select seq, reason from outbox_dead order by seq", &[]);
    let rows = rows.expect("read the dead letters");
    rows.iter().map(|row| (row.get(0), row.get(1))).collect()
}

// ---- failures of a message ------------------------------------------------------------------------------------------

#[test]
fn a_message_that_no_queue_takes_is_discarded_where_nobody_has_to_listen() {
    let broker = Broker::shared();
    for is_outside in [false, true] {
        let (exchange, queue) = fresh_names();
        let cluster = match is_outside {
            true => without_workers(broker, "none", &[]),
            false => unconnected_cluster(&broker.url(), "none", &[]),
        };
        let options =
            format!("exchange '{exchange}', exchange_type 'fanout', on_unroutable 'discard', max_pending '1000'");
        cluster.exec(
            DB,
            &format!("create server news foreign data wrapper outbox_amqp options ({options})"),
        );
        let outside = is_outside.then(|| Outside::start(&cluster, "news"));
        let publish = |count: i64| {
            let event = "outbox_publish('T', to_jsonb(n), 'paper', '1', destination => 'news')";
            cluster.exec(DB, &format!("select {event} from generate_series(1, {count}) n"));
        };
        publish(200);
        let ended = "select count(*) = 200 and bool_and(discarded and attempts = 1 and last_error like 'unroutable: no queue is bound%')
                     from outbox_history";
        wait_true(&cluster, "all to be discarded", ended);
        broker.declare_queue(&queue, json!(null));
        broker.bind(&queue, &exchange, "");
        publish(10);
        let published = "select count(*) = 10 from outbox_history where not discarded and last_error is null";
        wait_true(&cluster, "the others to be published", published);
        let arrived: Vec<_> = (all_of(broker, &queue).iter())
            .map(|message| message.json()["payload"].as_i64())
            .collect();
        assert_eq!(arrived, (1..=10).map(Some).collect::<Vec<_>>());
        let counts = "select concat_ws(' ', published_total, dead_total, (select count(*) from outbox_dead), pending)
                      from outbox_destination_status where destination = 'news'";
        wait_true(&cluster, "the statistics", &format!("select ({counts}) = '10 0 0 0'"));
        drop(outside);
    }
}

#[test]
fn an_unroutable_message_becomes_a_dead_letter_and_affects_no_other_message() {
    let stage = Stage::new(&["outbox.retry_backoff = '50ms'", "outbox.max_attempts = 3"]);
    stage.broker.unbind(&stage.queue, &stage.exchange, "#");
    stage.broker.bind(&stage.queue, &stage.exchange, "item.routable");
    let mut client = stage.connect(DB);
    client.run(
        "do $$ begin for n in 1 .. 700 loop
           perform outbox_publish('Numbered', jsonb_build_object('label', n::text), 'item', n::text,
                                  case when n % 7 = 0 then 'lost' else 'routable' end);
         end loop; end $$",
    );
    let sent = |unroutable: bool| -> Vec<Sent> {
        (1..=700)
            .filter(|n| (n % 7 == 0) == unroutable)
            .map(|n| Sent {
                label: n.to_string(),
                payload: json!({"label": n.to_string()}),
                fate: Fate::Committed,
            })
            .collect()
    };
    judge(&sent(false), &arrived(&stage.delivered())).assert_perfect();
    wait_published(&stage, 600);
    assert!(stage.query_one::<bool>(DB, "select bool_and(attempts = 1) from outbox_history"));
    let dead = dead(&mut client);
    assert_eq!(dead.len(), 100);
    assert!(
        dead.iter().all(|(_, reason)| reason.contains("312 NO_ROUTE")),
        "{:?}",
        dead[0]
    );
    assert_eq!(status_of(&stage, dead[0].0), status("dead", "FAILED", 3));

    stage.broker.bind(&stage.queue, &stage.exchange, "item.lost");
    client.run("select outbox_retry(seq) from outbox_dead");
    judge(&sent(true), &arrived(&stage.delivered())).assert_perfect();
    wait_published(&stage, 700);
    assert_eq!(status_of(&stage, dead[0].0), status("published", "PUBLISHED", 1));
}

#[test]
fn retry_and_discard_act_on_a_message_in_every_state() {
    let stage = Stage::new(&["outbox.retry_backoff = '1h'", "outbox.retry_backoff_max = '1h'"]);
    stage.broker.unbind(&stage.queue, &stage.exchange, "#");
    let mut client = stage.connect(DB);
    let mut call = |sql: &str, seq: i64| -> bool { client.query_one(sql, &[&seq]).expect("an answer").get(0) };
    const RETRY: &str = "select outbox_retry($1)";
    const DISCARD: &str = "select outbox_discard($1, reason => 'not wanted')";
    let mut other = stage.connect(DB);

    // Unroutable, so the worker retries it after an hour; outbox_retry makes it ready at once.
    let backing_off = other.publish("backing off");
    wait_for_status(&stage, backing_off, "retrying");
    assert_eq!(status_of(&stage, backing_off), status("retrying", "PENDING", 1));
    stage.broker.bind(&stage.queue, &stage.exchange, "#");
    assert!(call(RETRY, backing_off));
    wait_for_status(&stage, backing_off, "published");
    assert_eq!(status_of(&stage, backing_off), status("published", "PUBLISHED", 1));
    assert!(!call(RETRY, backing_off), "published is final");
    assert!(!call(DISCARD, backing_off), "published is final");

    let scheduled: i64 = other.value("select outbox_publish('Due', '{}', 'item', 'b', available_at => now() + '1 h')");
    assert_eq!(status_of(&stage, scheduled), status("scheduled", "PENDING", 0));
    assert!(call(DISCARD, scheduled));
    assert_eq!(status_of(&stage, scheduled), status("discarded", "none", 0));
    assert!(!call(DISCARD, scheduled) && !call(RETRY, scheduled));

    stage.draw_seqs(999);
    other.run("select outbox_enqueue(999, key => 'c')");
    wait_for_status(&stage, 999, "dead");
    assert_eq!(status_of(&stage, 999), status("dead", "FAILED", 1));
    assert!(call(DISCARD, 999));
    assert_eq!(status_of(&stage, 999), status("discarded", "none", 1));
    assert!(!call(DISCARD, 12_345) && !call(RETRY, 12_345), "no such message exists");

    let reasons: Vec<String> = other
        .query("select last_error from outbox_history where discarded", &[])
        .expect("the history")
        .iter()
        .map(|row| row.get(0))
        .collect();
    assert_eq!(reasons, ["not wanted", "not wanted"]);
    assert_eq!(labels(&stage.delivered()), ["backing off"]);
}

// ---- the exchange ---------------------------------------------------------------------------------------------------

#[test]
fn a_worker_declares_a_fanout_exchange_of_its_type() {
    let broker = Broker::shared();
    let (exchange, queue) = fresh_names();
    let cluster = outbox_cluster_with(broker, &exchange, &["outbox.exchange_type = 'fanout'"]);
    // A declaration that differs is refused with a panic here: the exchange must be a durable fanout already.
    broker.declare_exchange(&exchange, "fanout", true);
    broker.declare_queue(&queue, Value::Null);
    broker.bind(&queue, &exchange, "");
    cluster.publish("to all");
    wait_published(&cluster, 1);
    assert_eq!(labels(&all_of(broker, &queue)), ["to all"]);
}

// ---- asynchronous commits -------------------------------------------------------------------------------------------

#[test]
fn asynchronous_commits_are_delivered() {
    let stage = Stage::new(&[]);
    let plan = Plan {
        synchronous_commit: false,
        mixed: true,
        ..two_thousand()
    };
    let sent = Load::start(&stage, &plan).finish();
    wait_drained(&stage);
    judge(&sent, &arrived(&stage.all())).assert_perfect();
}

/// The server dies as soon as the message has arrived. A heartbeat of the worker in between would write its commit to
/// disk, so a commit right before the crash must be undone by it.
fn a_crash_right_after_a_message_undoes_no_commit_of_it(path: &str) {
    let broker = Broker::shared();
    let proxy = Proxy::start(broker.port());
    let (exchange, queue) = exchange_and_queue(broker);
    // Only the worker writes asynchronous commits to disk.
    let conf = ["wal_writer_delay = '10s'", "wal_writer_flush_after = '1GB'", path];
    let cluster = unconnected_cluster(&proxy.url(), &exchange, &conf);
    cluster.connect(DB).run("create table canary ()");
    support::wait_until("a crash that undoes a commit", LONG, || {
        wait_connected(&cluster);
        wait_drained(&cluster);
        // No settle writes anything to disk either.
        proxy.mode(Mode::DropReplies);
        let before = broker.queue_len(&queue);
        let mut client = cluster.connect(DB);
        client.run("set synchronous_commit = off");
        let seq = client.publish("asynchronous");
        support::wait_until("the message to arrive", LONG, || broker.queue_len(&queue) > before);
        client.run("insert into canary default values");
        cluster.kill_postmaster();
        proxy.reset_all();
        proxy.mode(Mode::Pass);
        cluster.start_again();
        let survived = format!("select exists (select from outbox_events where seq = {seq})");
        assert!(
            cluster.query_one::<bool>(DB, &survived),
            "{path}: a message of no event arrived"
        );
        cluster.query_one(DB, "select not exists (select from canary)")
    });
}

#[test]
fn no_message_is_sent_while_a_crash_could_undo_its_commit() {
    for path in ["outbox.fast_path = on", "outbox.fast_path = off"] {
        a_crash_right_after_a_message_undoes_no_commit_of_it(path);
    }
}

// ---- the oracle itself ----------------------------------------------------------------------------------------------

/// Three committed events a, b, c of one key, one rolled back event, and the messages of the three.
fn three_events() -> (Vec<Sent>, Vec<Arrived>) {
    let sent = [
        ("a", Fate::Committed),
        ("b", Fate::Committed),
        ("c", Fate::Committed),
        ("x", Fate::RolledBack),
    ];
    let sent: Vec<Sent> = sent
        .into_iter()
        .map(|(label, fate)| Sent {
            label: label.into(),
            payload: json!({"label": label}),
            fate,
        })
        .collect();
    let arrived = (0..3).map(|n: usize| Arrived {
        label: sent[n].label.clone(),
        key: "k".into(),
        seq: n as i64,
        payload: sent[n].payload.clone(),
    });
    let arrived = arrived.collect();
    (sent, arrived)
}

#[test]
fn the_oracle_finds_a_perfect_delivery_perfect() {
    let (sent, arrived) = three_events();
    judge(&sent, &arrived).assert_perfect();
}

#[test]
fn the_oracle_sees_a_dropped_message() {
    let (sent, mut arrived) = three_events();
    arrived.remove(1);
    let expected = Verdict {
        lost: vec!["b".into()],
        ..Verdict::default()
    };
    assert_eq!(judge(&sent, &arrived), expected);
}

#[test]
fn the_oracle_judges_the_last_arrivals_of_a_key() {
    let (_, arrived) = three_events();
    let found = |order: [usize; 4]| last_arrivals_out_of_order(&order.map(|n| arrived[n].clone()));
    assert_eq!(found([1, 0, 1, 2]), Vec::<String>::new());
    assert_eq!(found([0, 1, 2, 1]), ["c"]);
}

#[test]
fn the_oracle_sees_a_doubled_message_and_does_not_call_it_reordered() {
    let (sent, mut arrived) = three_events();
    arrived.push(arrived[0].clone());
    arrived.push(arrived[0].clone());
    let expected = Verdict {
        doubled: vec!["a".into(), "a".into()],
        ..Verdict::default()
    };
    assert_eq!(judge(&sent, &arrived), expected);
}

#[test]
fn the_oracle_sees_reordered_messages_of_a_key_and_not_of_two() {
    let (sent, mut arrived) = three_events();
    arrived.swap(1, 2);
    let expected = Verdict {
        reordered: vec!["b".into()],
        ..Verdict::default()
    };
    assert_eq!(judge(&sent, &arrived), expected);
    arrived[1].key = "another".into();
    judge(&sent, &arrived).assert_perfect();
}

#[test]
fn the_oracle_sees_an_invented_and_a_rolled_back_message() {
    let (sent, mut arrived) = three_events();
    for label in ["x", "y"] {
        arrived.push(Arrived {
            label: label.into(),
            key: label.into(),
            ..arrived[0].clone()
        });
    }
    let expected = Verdict {
        invented: vec!["x".into(), "y".into()],
        ..Verdict::default()
    };
    assert_eq!(judge(&sent, &arrived), expected);
}

#[test]
fn the_oracle_sees_an_altered_message() {
    let (sent, mut arrived) = three_events();
    arrived[2].payload = json!({"label": "c", "more": 1});
    let expected = Verdict {
        altered: vec!["c".into()],
        ..Verdict::default()
    };
    assert_eq!(judge(&sent, &arrived), expected);
}

#[test]
fn the_oracle_accepts_both_outcomes_if_the_answer_to_commit_was_lost() {
    let (mut sent, mut arrived) = three_events();
    sent[1].fate = Fate::Unknown;
    judge(&sent, &arrived).assert_perfect();
    arrived.remove(1);
    judge(&sent, &arrived).assert_perfect();
}

/// The scheduling policies of a process's threads, from proc(5): 3 is SCHED_BATCH.
fn policies(pid: i32) -> BTreeSet<String> {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task"))
        .expect("threads")
        .flatten();
    let stats = threads.filter_map(|thread| std::fs::read_to_string(thread.path().join("stat")).ok());
    let policy = |stat: String| {
        let (_, after_name) = stat.rsplit_once(')').expect("a name");
        after_name.split_whitespace().nth(38).expect("field 41").to_owned()
    };
    stats.map(policy).collect()
}

#[test]
fn no_thread_of_a_worker_interrupts_others() {
    let stage = Stage::new(&[]);
    let pid = stage.query_one(DB, "select pid from outbox_workers");
    assert_eq!(policies(pid), BTreeSet::from(["3".to_owned()]));
}
