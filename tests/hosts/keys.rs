//! The order of a key: under load, behind a failed message, behind an open transaction, and in a whole partition.

use serde_json::{Value, json};
use support::{Broker, Cluster, fresh_names};

use super::{Host, Stage};
use support::load::{Load, Plan};
use support::oracle::judge;
use support::{
    DB, Event, Session, all_of, arrived, exchange_and_queue, labels, wait_drained, wait_published, wait_true,
};

/// Makes an exchange, and a queue that gets the messages with this routing key.
fn routed(broker: &Broker, routing_key: &str) -> (String, String) {
    let (exchange, queue) = fresh_names();
    broker.declare_exchange(&exchange, "topic", true);
    broker.declare_queue(&queue, Value::Null);
    broker.bind(&queue, &exchange, routing_key);
    (exchange, queue)
}

fn seqs(broker: &Broker, queue: &str) -> Vec<i64> {
    let seq = |delivery: &support::Delivery| delivery.json()["seq"].as_i64().expect("a seq");
    all_of(broker, queue).iter().map(seq).collect()
}

fn is_true(cluster: &Cluster, sql: &str) -> bool {
    cluster.query_one(DB, sql)
}

pub fn two_workers_deliver_every_message_once_and_in_order(host: Host) {
    let broker = Broker::shared();
    let (exchange, queue) = exchange_and_queue(broker);
    let stage = Stage::idle(host, &broker.url(), &exchange, &[]);
    let plan = Plan {
        keys: 200,
        mixed: true,
        ..Plan::default()
    };
    let load = Load::start(&stage.cluster, &plan);
    load.wait_for_more(200); // a backlog
    stage.work(2);
    load.wait_for_more(400);
    let sent = load.stop();
    wait_drained(&stage.cluster);
    let arrived = arrived(&all_of(broker, &queue));
    judge(&sent, &arrived).assert_perfect();
    let counted = format!(
        "select published_total = {} and pending = 0 and in_flight = 0 from outbox_status",
        arrived.len()
    );
    wait_true(&stage.cluster, "all messages to be counted", &counted);
}

pub fn a_failed_message_is_retried_and_messages_behind_it_wait(host: Host) {
    let broker = Broker::shared();
    let (exchange, queue) = routed(broker, "item.good");
    let conf = ["outbox.retry_backoff = '50ms'", "outbox.max_attempts = 2"];
    let stage = Stage::of_broker(host, &exchange, &conf);
    let mut client = stage.cluster.connect(DB);
    for (key, route, label) in [("a", "bad", "a1"), ("a", "good", "a2"), ("b", "good", "b1")] {
        client
            .execute(
                "select outbox_publish('T', $1::jsonb, 'item', $2::text, $3::text)",
                &[&json!({ "label": label }), &key, &route],
            )
            .expect("publish");
    }
    wait_true(
        &stage.cluster,
        "a dead letter",
        "select exists (select from outbox_dead where attempts = 2)",
    );
    wait_true(
        &stage.cluster,
        "a message that waits behind it",
        "select count(*) = 1 from outbox_waiting where state = 'g'",
    );
    wait_published(&stage.cluster, 1);
    broker.bind(&queue, &exchange, "item.bad");
    assert!(is_true(&stage.cluster, "select outbox_retry(seq) from outbox_dead"));
    wait_published(&stage.cluster, 3);
    let seqs = seqs(broker, &queue);
    // The second message had been sent together with the first, and is sent again behind it.
    assert!(seqs.ends_with(&[1, 2]), "{seqs:?}");
    let reported = format!(
        "select count(*) = 2 and bool_and(worker_id = '{}') from outbox_attempts where outcome in ('retried', 'dead')",
        stage.workers()[0].id
    );
    assert!(
        is_true(&stage.cluster, &reported),
        "the failures of the message are reported"
    );
    let counted = "select failed_total = 2 and pending = 0 from outbox_status";
    wait_true(&stage.cluster, "two failures to be counted", counted);
}

pub fn an_open_or_prepared_transaction_holds_its_keys_and_no_other(host: Host) {
    let broker = Broker::shared();
    let (exchange, queue) = exchange_and_queue(broker);
    let stage = Stage::of_broker(host, &exchange, &["max_prepared_transactions = 4"]);
    let open = "select array_agg(prepared) from outbox_open_transactions()";
    for (round, (begin, end)) in [
        ("", "commit"),
        ("prepare transaction 'late';", "commit prepared 'late'"),
    ]
    .into_iter()
    .enumerate()
    {
        let mut late = stage.cluster.connect(DB);
        late.run(&format!("begin; {}; {begin}", Event::new("a1").sql()));
        stage.cluster.publish(Event::new("a2"));
        stage.cluster.publish(Event::new("b1").key("b"));
        wait_published(&stage.cluster, 3 * round + 1);
        assert_eq!(labels(&all_of(broker, &queue)), ["b1"]);
        assert_eq!(
            stage.cluster.query_one::<Option<Vec<bool>>>(DB, open),
            Some(vec![!begin.is_empty()])
        );
        late.run(end);
        wait_published(&stage.cluster, 3 * round + 3);
        assert_eq!(labels(&all_of(broker, &queue)), ["a1", "a2"]);
        wait_true(
            &stage.cluster,
            "no open transaction",
            &format!("select ({open}) is null"),
        );
    }
}

pub fn a_worker_keeps_the_order_of_a_whole_partition(host: Host) {
    let broker = Broker::shared();
    let (exchange, queue) = routed(broker, "Good");
    let conf = ["outbox.retry_backoff = '50ms'", "outbox.max_attempts = 2"];
    let stage = Stage::idle(host, &broker.url(), &exchange, &conf);
    let options = format!("exchange '{exchange}', routing_key '{{type}}', ordering 'partition'");
    stage.destination("lanes", "amqp", &options);
    stage.cluster.exec(
        DB,
        "insert into outbox_events (id, type, payload)
           select gen_random_uuid(), case n when 1 then 'Bad' else 'Good' end, '{}' from generate_series(1, 4) n;
         select outbox_enqueue(1, 'a', 'lanes', partition_key => 'p03'),
                outbox_enqueue(2, 'b', 'lanes', partition_key => 'p03'),
                outbox_enqueue(3, destination => 'lanes', partition_key => 'p03'),
                outbox_enqueue(4, 'b', 'lanes', partition_key => 'p04')",
    );
    stage.work(1);
    let dead = "select count(*) = 1 and bool_and(blocks and attempts = 2) from outbox_dead";
    wait_true(&stage.cluster, "a dead letter that blocks", dead);
    wait_published(&stage.cluster, 1);
    assert!(is_true(
        &stage.cluster,
        "select array_agg(seq order by seq) = '{2,3}' from outbox"
    ));
    broker.bind(&queue, &exchange, "Bad");
    assert!(is_true(&stage.cluster, "select outbox_retry(1, 'lanes')"));
    wait_published(&stage.cluster, 4);
    let seqs = seqs(broker, &queue);
    assert!(seqs.ends_with(&[1, 2, 3]), "{seqs:?}");
}
