//! Tests `ordering 'partition'`: at such a destination each partition is one order, whatever the keys, through a broker
//! and through HTTP. Nothing else may change. On real servers; tests/order.rs tests the order of keys.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use serde_json::{Value, json};
use support::chaos::rounds;
use support::faults::{Faults, messages_to};
use support::load::{Load, Plan};
use support::oracle::{Arrived, Sent, judge, last_arrivals_out_of_order};
use support::{Broker, Cluster, Consumer, Receiver, Reply, fresh_names};
use support::{
    DB, Session, Stage, all_of, exchange_and_queue_with, health, outbox_cluster_with, refused, wait_connected,
    wait_drained, wait_paused, wait_published, wait_true,
};

/// A destination `lanes`, which routes by the type of the event: Good ones to the queue that is returned, others to no
/// queue.
fn stage(conf: &[&str], options: &str) -> (Cluster, &'static Broker, String) {
    let stage = Stage::new(&[&["outbox.max_attempts = 1"], conf].concat());
    let (exchange, queue) = fresh_names();
    stage.broker.declare_exchange(&exchange, "topic", true);
    stage.broker.declare_queue(&queue, Value::Null);
    stage.broker.bind(&queue, &exchange, "Good.*");
    stage.exec(
        DB,
        &format!(
            "create server lanes foreign data wrapper outbox_amqp
             options (exchange '{exchange}', routing_key '{{type}}.{{key|none}}', {options})"
        ),
    );
    wait_true(
        &stage,
        "the destination to be connected",
        "select state = 'connected' from outbox_destination_status where destination = 'lanes'",
    );
    (stage.cluster, stage.broker, queue)
}

/// Publishes (type, key, partition) in one transaction; an empty key means no key.
fn publish(cluster: &Cluster, messages: &[(&str, &str, &str)]) {
    let mut client = cluster.connect(DB);
    let mut transaction = client.transaction().expect("begin");
    for (kind, key, partition) in messages {
        let stored = "insert into outbox_events (id, type, payload) values (gen_random_uuid(), $1, '{}') returning seq";
        let seq: i64 = transaction.query_one(stored, &[kind]).expect("stored").get(0);
        let key = Some(*key).filter(|key| !key.is_empty());
        let enqueue = "select outbox_enqueue($1, $2, 'lanes', partition_key => $3)";
        transaction
            .execute(enqueue, &[&seq, &key, partition])
            .expect("enqueued");
    }
    transaction.commit().expect("commit");
}

/// Seqs and keys of all deliveries, each at its last arrival, in that order.
fn arrived(broker: &Broker, queue: &str) -> Vec<(i64, String)> {
    let mut all = Vec::new();
    for delivery in all_of(broker, queue) {
        let (body, key) = (delivery.json(), delivery.routing_key.clone());
        let seq = body["seq"].as_i64().expect("a seq");
        all.retain(|(known, _)| *known != seq);
        all.push((seq, key));
    }
    all
}

fn seqs(arrived: &[(i64, String)]) -> Vec<i64> {
    arrived.iter().map(|(seq, _)| *seq).collect()
}

#[test]
fn a_dead_letter_blocks_its_partition_with_and_without_keys_and_no_other() {
    let (cluster, broker, queue) = stage(&[], "ordering 'partition'");
    publish(
        &cluster,
        &[
            ("Good", "a", "p03"),
            ("Bad", "b", "p03"),
            ("Good", "c", "p03"),
            ("Good", "", "p03"),
            ("Good", "b", "p04"),
            ("Good", "", "p04"),
        ],
    );
    wait_published(&cluster, 3);
    let (first, rest) = (
        "select seq = 2 and blocks from outbox_dead",
        "select array_agg(seq order by seq) = '{3,4}' from outbox",
    );
    wait_true(&cluster, "the second to be dead", first);
    assert!(
        cluster.query_one::<bool>(DB, rest),
        "the others of its partition stay where they are"
    );
    let (ok, problem) = health(&cluster, "keys");
    assert!(!ok && problem.contains("partition p03 (seq 2)"), "{problem}");
    assert_eq!(
        cluster.query_one::<i64>(DB, "select outbox_drain('10 s')"),
        0,
        "no deliverable message is left"
    );
    let oldest = "select oldest_pending_age is null from outbox_destination_status where destination = 'lanes'";
    assert!(cluster.query_one::<bool>(DB, oldest));
    cluster.exec(DB, "select outbox_discard(2, 'lanes')");
    wait_drained(&cluster);
    let arrived = arrived(broker, &queue);
    let of_p03 = arrived.iter().filter(|(seq, _)| *seq <= 4);
    // Consumers and templates see the key that the application set.
    let of_p03: Vec<(i64, &str)> = of_p03.map(|(seq, key)| (*seq, key.as_str())).collect();
    assert_eq!(of_p03, [(1, "Good.a"), (3, "Good.c"), (4, "Good.none")]);
}

#[test]
fn a_message_that_cannot_be_sent_blocks_those_that_are_claimed_with_it() {
    let (cluster, broker, queue) = stage(&[], "ordering 'partition'");
    let too_long = "x".repeat(255); // with the key it is no routing key
    publish(&cluster, &[(&too_long, "a", "p05"), ("Good", "b", "p05")]);
    wait_true(
        &cluster,
        "the first to be dead",
        "select seq = 1 and blocks from outbox_dead",
    );
    assert_eq!(cluster.query_one::<i64>(DB, "select outbox_drain('10 s')"), 0);
    assert_eq!(broker.queue_len(&queue), 0);
    cluster.exec(DB, "select outbox_discard(1, 'lanes')");
    wait_drained(&cluster);
    assert_eq!(seqs(&arrived(broker, &queue)), [2]);
}

#[test]
fn a_message_without_a_key_blocks_its_partition_and_goes_first_when_retried() {
    let (cluster, broker, queue) = stage(&[], "ordering 'partition'");
    publish(
        &cluster,
        &[("Bad", "", "p05"), ("Good", "a", "p05"), ("Good", "", "p05")],
    );
    wait_true(
        &cluster,
        "a dead letter",
        "select count(*) = 1 and bool_and(blocks) from outbox_dead",
    );
    cluster.exec(
        DB,
        "update outbox_events set type = 'Good' where seq = 1; select outbox_retry(1, 'lanes')",
    );
    wait_drained(&cluster);
    assert_eq!(seqs(&arrived(broker, &queue)), [1, 2, 3]);
}

#[test]
fn with_on_dead_skip_the_partition_is_not_blocked() {
    let (cluster, broker, queue) = stage(&[], "ordering 'partition', on_dead 'skip'");
    publish(
        &cluster,
        &[("Bad", "a", "p05"), ("Good", "b", "p05"), ("Good", "", "p05")],
    );
    wait_published(&cluster, 2);
    assert!(cluster.query_one::<bool>(DB, "select count(*) = 1 and not bool_or(blocks) from outbox_dead"));
    assert_eq!(seqs(&arrived(broker, &queue)), [2, 3]);
}

#[test]
fn the_option_may_change_while_messages_wait_and_the_order_is_kept() {
    let (cluster, broker, queue) = stage(&[], "ordering 'key'");
    let all = [
        ("Bad", "a", "p01"),
        ("Good", "a", "p01"),
        ("Bad", "b", "p01"),
        ("Good", "b", "p01"),
        ("Good", "a", "p01"),
    ];
    publish(&cluster, &all);
    let behind = "select count(*) = 3 from outbox_waiting where state = 'g'";
    wait_true(&cluster, "three behind two dead letters", behind);
    all_of(broker, &queue); // messages that the broker took behind a refused one arrive again
    cluster.exec(DB, "alter server lanes options (set ordering 'partition')");
    wait_true(
        &cluster,
        "them to be back in their lane",
        "select count(*) = 3 from outbox",
    );
    publish(&cluster, &[("Good", "c", "p01"), ("Good", "c", "p02")]);
    wait_published(&cluster, 1); // the message of p02
    cluster.exec(
        DB,
        "update outbox_events set type = 'Good'; select outbox_retry(1, 'lanes')",
    );
    wait_published(&cluster, 3);
    assert_eq!(
        seqs(&arrived(broker, &queue)),
        [7, 1, 2],
        "the second dead letter blocks the messages after it"
    );
    cluster.exec(DB, "alter server lanes options (set ordering 'key')");
    wait_published(&cluster, 5);
    let others = seqs(&arrived(broker, &queue));
    assert!(others.contains(&5) && others.contains(&6), "{others:?}");
    assert!(cluster.query_one::<bool>(DB, "select seq = 3 and blocks from outbox_dead"));
    cluster.exec(DB, "alter server lanes options (set ordering 'none')");
    wait_published(&cluster, 6);
    assert_eq!(seqs(&arrived(broker, &queue)), [4]);
}

#[test]
fn merged_partitions_are_delivered_in_one_order() {
    let (cluster, broker, queue) = stage(&["outbox.partition_count = 4"], "ordering 'partition'");
    publish(
        &cluster,
        &[
            ("Bad", "a", "p01"),
            ("Good", "a", "p01"),
            ("Bad", "b", "p03"),
            ("Good", "b", "p03"),
            ("Good", "c", "p01"),
        ],
    );
    wait_true(
        &cluster,
        "two dead letters",
        "select count(*) = 2 from outbox_dead where blocks",
    );
    all_of(broker, &queue); // messages that the broker took behind a refused one arrive again
    cluster.exec(DB, "select outbox_configure(partition_count => 1)");
    publish(&cluster, &[("Good", "d", "p00")]);
    cluster.exec(
        DB,
        "update outbox_events set type = 'Good'; select outbox_retry(1, 'lanes')",
    );
    wait_published(&cluster, 2);
    assert_eq!(seqs(&arrived(broker, &queue)), [1, 2]);
    cluster.exec(DB, "select outbox_retry(3, 'lanes')");
    wait_drained(&cluster);
    assert_eq!(seqs(&arrived(broker, &queue)), [3, 4, 5, 6]);
}

#[test]
fn an_open_transaction_holds_its_partitions_and_no_others() {
    let (cluster, broker, queue) = stage(&[], "ordering 'partition'");
    // Three keys: two of one partition, and one of another.
    let keys: String = cluster.query_one(
        DB,
        "select string_agg(k, ' ' order by p, n) from (
           select n, k, p, row_number() over (partition by p order by n) as place
           from generate_series(1, 999) n, concat('k:', n) k, outbox_partition_of(k) p where p in ('p01', 'p02')) x
         where place <= case p when 'p01' then 2 else 1 end",
    );
    let keys: Vec<&str> = keys.split(' ').collect();
    let publish = |client: &mut postgres::Client, key: &str| {
        let (kind, id) = key.split_once(':').expect("two parts");
        let sql = "select outbox_publish('Good', '{}', $1::text, $2::text, destination => 'lanes')";
        client.execute(sql, &[&kind, &id]).expect("published");
    };
    let mut late = cluster.connect(DB);
    late.run("begin");
    publish(&mut late, keys[0]);
    let mut others = cluster.connect(DB);
    publish(&mut others, keys[1]);
    publish(&mut others, keys[2]);
    wait_published(&cluster, 1);
    assert_eq!(seqs(&arrived(broker, &queue)), [3]);
    late.run("commit");
    wait_drained(&cluster);
    assert_eq!(seqs(&arrived(broker, &queue)), [1, 2]);
}

#[test]
fn a_relay_gets_the_first_message_of_each_partition() {
    let (cluster, _, _) = stage(&[], "ordering 'partition'");
    cluster.exec(DB, "select outbox_pause('lanes')");
    let fetch = "select coalesce(array_agg(seq order by seq), '{}') from outbox_fetch_unpublished(10, 'lanes')";
    let fetched = || -> Vec<i64> { cluster.query_one(DB, fetch) };
    wait_paused(&cluster, "lanes");
    publish(
        &cluster,
        &[
            ("Good", "a", "p03"),
            ("Good", "b", "p03"),
            ("Good", "", "p03"),
            ("Good", "", "p04"),
            ("Good", "", "p04"),
        ],
    );
    assert_eq!(fetched(), [1, 4]);
    assert_eq!(fetched(), Vec::<i64>::new(), "they are claimed");
    let mark = |function: &str, seq: i64, more: &str| {
        let sql = format!(
            "select bool_and({function}(seq, claim_token{more}, destination => 'lanes')) from outbox
             where destination = 'lanes' and seq = {seq}"
        );
        assert!(cluster.query_one::<bool>(DB, &sql), "{function} {seq}");
    };
    mark("outbox_mark_published", 1, "");
    mark("outbox_mark_failed", 4, ", 'refused'");
    assert_eq!(fetched(), [2]);
    assert!(
        cluster.query_one::<bool>(DB, "select seq = 4 and blocks from outbox_dead"),
        "without a key"
    );
    mark("outbox_mark_published", 2, "");
    assert_eq!(fetched(), [3], "p04 is blocked");
    cluster.exec(DB, "select outbox_discard(4, 'lanes')");
    assert_eq!(fetched(), [5]);
}

#[test]
fn an_unknown_order_is_refused() {
    let cluster = Stage::new(&[]).cluster;
    let error = refused(
        &cluster,
        "create server s foreign data wrapper outbox_http options (ordering 'lane')",
    );
    assert_eq!(error.hint(), Some("Use key or partition or none."));
}

/// The arrivals with the partition in place of the key.
fn by_partition(cluster: &Cluster, arrived: &[Arrived]) -> Vec<Arrived> {
    let partitions: Value = cluster.query_one(
        DB,
        "select jsonb_object_agg(k, outbox_partition_of(k)) from (select distinct key as k from outbox_history) h",
    );
    let of_key = |key: &str| partitions[key].as_str().expect("a partition").to_owned();
    let moved = arrived.iter().cloned();
    moved
        .map(|message| Arrived {
            key: of_key(&message.key),
            ..message
        })
        .collect()
}

#[test]
fn partitions_of_brokers_and_urls_stay_in_order_through_refusals_failures_and_restarts() {
    let broker = Broker::shared();
    let refusing = || exchange_and_queue_with(broker, json!({"x-max-length": 20, "x-overflow": "reject-publish"}));
    let ((exchange, queue), (lanes_exchange, lanes_queue)) = (refusing(), refusing());
    let conf = [
        "outbox.workers = 2",
        "outbox.retry_backoff = '5ms'",
        "outbox.retry_backoff_max = '50ms'",
        "outbox.max_attempts = 1000",
        "outbox.http_allow = '127.0.0.1'",
    ];
    let cluster = outbox_cluster_with(broker, &exchange, &conf);
    let (taken, unanswered) = (Arc::new(Mutex::new(Vec::new())), Arc::new(Mutex::new(Vec::new())));
    let (desk, lost, dice) = (Arc::clone(&taken), Arc::clone(&unanswered), AtomicU64::new(0));
    let receiver = Receiver::start(move |request| {
        // Weyl's sequence: each value of a hundred occurs as often as it should.
        let roll = dice.fetch_add(0x9e37_79b9_7f4a_7c15, Ordering::Relaxed) >> 32;
        let takes = || desk.lock().expect("no panic").push(Arrived::of(&request.json()));
        match (roll.wrapping_mul(2_654_435_761) >> 7) % 100 {
            0..8 => Reply::status(500),
            8..10 => Reply::Close,
            10..12 => {
                takes();
                let message = Arrived::of(&request.json());
                lost.lock().expect("no panic").push(message.label);
                Reply::Close
            }
            _ => {
                takes();
                Reply::status(200)
            }
        }
    });
    cluster.exec(
        DB,
        &format!(
            "create server lanes foreign data wrapper outbox_amqp
               options (exchange '{lanes_exchange}', ordering 'partition');
             create server hook foreign data wrapper outbox_http
               options (url '{}', ordering 'partition', concurrency '8')",
            receiver.url("/")
        ),
    );
    let plan = Plan {
        writers: 4,
        keys: 200,
        mixed: true,
        transactions_per_s: Some(60),
        // Published messages go from memory, messages enqueued a second time go from the table.
        statement: "select outbox_publish('Loaded', $1::jsonb, 'load', $2::text, 'written', destination => 'lanes')",
        also_to: &["default", "hook"],
        ..Plan::default()
    };
    let load = Load::start(&cluster, &plan);
    wait_true(
        &cluster,
        "both queues to refuse",
        "select count(distinct destination) = 2 from outbox_attempts_log where error like 'nacked%'",
    );
    let consumers = [&queue, &lanes_queue].map(|queue| (queue, Consumer::new(broker, queue)));
    let (mut failed, mut faults) = (0, Faults::default());
    for restarts in [false, false, true].repeat(rounds(2)) {
        load.wait_for_more(120);
        failed += cluster.query_one::<i64>(
            DB,
            "select count(*) from outbox_attempts_log where error like 'HTTP 500%'",
        );
        faults.during(2, || {
            if restarts {
                return cluster.restart();
            }
            let pid: i32 = cluster.query_one(DB, "select pid from outbox_workers order by random() limit 1");
            cluster.exec(DB, &format!("select pg_terminate_backend({pid})"));
            let is_gone = format!("select not exists (select from pg_stat_activity where pid = {pid})");
            wait_true(&cluster, "the worker to end", &is_gone);
        });
    }
    load.wait_for_more(120);
    let sent: Vec<Sent> = load.stop();
    wait_connected(&cluster);
    wait_drained(&cluster);
    assert!(failed > 10, "only {failed} failures");

    let arrived = consumers.map(|(queue, consumer)| {
        let mut deliveries = consumer.finish();
        deliveries.extend(all_of(broker, queue)); // what had not reached the consumer
        deliveries.iter().map(Arrived::new).collect::<Vec<Arrived>>()
    });
    let taken = taken.lock().expect("no panic");
    for (name, arrived) in [("default", &arrived[0]), ("lanes", &arrived[1]), ("hook", &*taken)] {
        println!("{name}: {} sent, {} arrived", sent.len(), arrived.len());
        let mut verdict = judge(&sent, arrived);
        if name == "hook" {
            // Each lost answer repeats its message.
            for label in unanswered.lock().expect("no panic").iter() {
                let repeat = verdict.doubled.iter().position(|doubled| doubled == label);
                verdict
                    .doubled
                    .remove(repeat.expect("a message without an answer goes again"));
            }
        }
        faults.assert_explain_repeats(&verdict, &messages_to(&cluster, DB, name));
    }
    assert_eq!(last_arrivals_out_of_order(&arrived[0]), Vec::<String>::new(), "by key");
    let of_lanes = by_partition(&cluster, &arrived[1]);
    assert_eq!(
        last_arrivals_out_of_order(&of_lanes),
        Vec::<String>::new(),
        "by partition"
    );
    // With HTTP the worker posts a message after the answer to the one before, so first arrivals are in order.
    let of_hook = by_partition(&cluster, &taken);
    assert_eq!(
        judge(&sent, &of_hook).reordered,
        Vec::<String>::new(),
        "by partition, HTTP"
    );
    let partitions: BTreeMap<&str, usize> = of_hook.iter().fold(BTreeMap::new(), |mut counts, message| {
        *counts.entry(message.key.as_str()).or_default() += 1;
        counts
    });
    assert!(partitions.len() > 8, "{partitions:?}");
}
