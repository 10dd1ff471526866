//! Tests that the order of a key holds through failures, dead letters, late or prepared commits, and through workers
//! that end, hang or share. Other keys must go on meanwhile. On a real Postgres and a real RabbitMQ.

use std::collections::BTreeMap;
use std::time::SystemTime;

use postgres::Client;
use serde_json::json;
use support::faults::{Faults, messages};
use support::load::{Load, Plan};
use support::oracle::{Arrived, judge, last_arrivals_out_of_order};
use support::{Broker, Cluster, Consumer, StopMode, process};
use support::{
    DB, Event, Session, Stage, all_of, arrived, exchange_and_queue, exchange_and_queue_with, outbox_cluster,
    outbox_cluster_with, pause, quiet_cluster_with, suspend_worker, wait_connected, wait_drained, wait_for_problem,
    wait_healthy, wait_published, wait_shared, wait_true,
};

/// A stage whose queue receives messages of the operation "changed" only, and whose messages fail fast.
fn stage(conf: &[&str]) -> Stage {
    let stage = Stage::new(&[&["outbox.retry_backoff = '50ms'", "outbox.max_attempts = 2"], conf].concat());
    stage.broker.unbind(&stage.queue, &stage.exchange, "#");
    stage.broker.bind(&stage.queue, &stage.exchange, "item.changed");
    stage
}

// ---- a message that fails -------------------------------------------------------------------------------------------

#[test]
fn a_dead_letter_blocks_its_key_and_no_other_until_it_is_discarded() {
    let stage = stage(&[]);
    let mut client = stage.connect(DB);
    let dead = client.publish(Event::new("a1").operation("bad"));
    wait_true(&stage, "a dead letter", "select exists (select from outbox_dead)");
    client.publish("a2");
    client.publish("a3");
    client.publish(Event::new("b1").key("b"));
    wait_published(&stage, 1);
    wait_true(
        &stage,
        "two waiting messages",
        "select count(*) = 2 from outbox_waiting where state = 'g' and key = 'item:a'",
    );
    let problem = wait_for_problem(&stage, "keys");
    assert!(problem.contains("item:a"), "{problem}");
    assert_eq!(stage.labels(), ["b1"]);

    assert!(stage.query_one::<bool>(DB, &format!("select outbox_discard({dead})")));
    wait_drained(&stage);
    wait_published(&stage, 3);
    assert_eq!(stage.labels(), ["a2", "a3"]);
    wait_healthy(&stage, "keys");
}

#[test]
fn a_retried_dead_letter_goes_before_the_messages_that_waited_for_it() {
    let stage = stage(&[]);
    let mut client = stage.connect(DB);
    let dead = client.publish(Event::new("a1").operation("bad"));
    wait_true(&stage, "a dead letter", "select exists (select from outbox_dead)");
    for n in 2..=20 {
        client.publish(format!("a{n}"));
    }
    wait_true(
        &stage,
        "the waiting messages",
        "select count(*) = 19 from outbox_waiting",
    );
    // The block must survive a restart of the processes that hold blocked keys.
    stage.restart();
    wait_connected(&stage);
    stage.broker.bind(&stage.queue, &stage.exchange, "item.bad");
    assert!(stage.query_one::<bool>(DB, &format!("select outbox_retry({dead})")));
    wait_published(&stage, 20);
    let expected: Vec<String> = (1..=20).map(|n| format!("a{n}")).collect();
    assert_eq!(stage.labels(), expected);
}

#[test]
fn with_on_dead_skip_the_key_is_not_blocked() {
    let stage = stage(&["outbox.on_dead = skip"]);
    let mut client = stage.connect(DB);
    client.publish(Event::new("a1").operation("bad"));
    wait_true(
        &stage,
        "a dead letter",
        "select exists (select from outbox_dead where not blocks)",
    );
    client.publish("a2");
    wait_published(&stage, 1);
    assert_eq!(stage.labels(), ["a2"]);
}

#[test]
fn a_run_is_sent_again_from_its_failed_message_and_ends_in_order() {
    let stage = stage(&["outbox.max_attempts = 1000", "outbox.retry_backoff_max = '200ms'"]);
    let mut client = stage.connect(DB);
    let mut transaction = client.transaction().expect("begin");
    for n in 1..=5 {
        let operation = if n == 3 { "bad" } else { "changed" };
        transaction.publish(Event::new(format!("a{n}")).operation(operation));
    }
    transaction.commit().expect("commit");
    client.publish(Event::new("b1").key("b"));
    wait_true(
        &stage,
        "the failed message and those behind it",
        "select count(*) filter (where state = 'g') = 2 and count(*) filter (where attempts > 1) = 1 from outbox_waiting",
    );
    wait_published(&stage, 3); // a1, a2, b1: messages confirmed behind the failed one do not count
    stage.broker.bind(&stage.queue, &stage.exchange, "item.bad");
    wait_published(&stage, 6);
    let order: Vec<i64> = stage
        .connect(DB)
        .query("select seq from outbox_history where key = 'item:a' order by ctid", &[])
        .expect("the history")
        .iter()
        .map(|row| row.get(0))
        .collect();
    assert!(order.is_sorted(), "published in order: {order:?}");
    let arrived: Vec<String> = stage.labels().into_iter().filter(|l| l.starts_with('a')).collect();
    let (first, again) = arrived.split_at(arrived.len() - 3);
    assert_eq!(again, ["a3", "a4", "a5"], "{arrived:?}");
    assert!(
        first.len() >= 2 && ["a1", "a2", "a4", "a5"].map(str::to_owned).starts_with(first),
        "{arrived:?}"
    );
}

#[test]
fn a_queue_that_refuses_at_random_loses_nothing_and_keeps_every_key_in_order() {
    let broker = Broker::shared();
    let (exchange, queue) =
        exchange_and_queue_with(broker, json!({"x-max-length": 20, "x-overflow": "reject-publish"}));
    let conf = [
        "outbox.retry_backoff = '5ms'",
        "outbox.retry_backoff_max = '20ms'",
        "outbox.max_attempts = 1000",
    ];
    let cluster = outbox_cluster_with(broker, &exchange, &conf);
    let plan = Plan {
        keys: 200,
        writers: 4,
        events_per_writer: 300,
        transactions_per_s: None,
        ..Plan::default()
    };
    let load = Load::start(&cluster, &plan);
    wait_true(
        &cluster,
        "the queue to refuse",
        "select exists (select from outbox_waiting where last_error like 'nacked%')",
    );
    let consumer = Consumer::new(broker, &queue);
    let sent = load.finish();
    let done = "select not exists (select from outbox) and not exists (select from outbox_waiting)";
    wait_true(&cluster, "all to be delivered", done);
    let mut arrived = consumer.finish();
    arrived.extend(all_of(broker, &queue)); // what had not reached the consumer
    let arrived: Vec<Arrived> = arrived.iter().map(Arrived::new).collect();
    // Messages that arrived behind a refused one arrived again after it, and no others.
    Faults::default().assert_explain_repeats(&judge(&sent, &arrived), &messages(&cluster));
    assert_eq!(last_arrivals_out_of_order(&arrived), Vec::<String>::new());
    assert!(
        cluster.query_one::<bool>(DB, "select bool_or(last_error like 'nacked%') from outbox_history"),
        "the queue must have refused some"
    );
}

#[test]
fn a_key_with_a_large_backlog_behind_its_dead_letter_delays_no_other_key() {
    let stage = stage(&["outbox.batch_size = 200"]);
    let mut client = stage.connect(DB);
    let dead = client.publish(Event::new("a1").operation("bad"));
    wait_true(&stage, "a dead letter", "select exists (select from outbox_dead)");
    client.run(
        "do $$ begin for n in 1..3000 loop
               perform outbox_publish('T', jsonb_build_object('label', 'behind'), 'item', 'a', 'changed');
             end loop; end $$",
    );
    for n in 1..=50 {
        client.publish(Event::new("other").key(format!("b{n}")));
    }
    wait_published(&stage, 50);
    wait_true(
        &stage,
        "the messages behind it",
        "select count(*) = 3000 from outbox_waiting where state = 'g'",
    );
    assert_eq!(stage.all().len(), 50);
    assert!(stage.query_one::<bool>(DB, &format!("select outbox_discard({dead})")));
    wait_published(&stage, 3050);
    let seqs: Vec<i64> = stage
        .all()
        .iter()
        .map(|d| d.json()["seq"].as_i64().expect("a seq"))
        .collect();
    assert!(seqs.is_sorted() && seqs.len() == 3000, "{} of them", seqs.len());
}

#[test]
fn a_claim_abandoned_by_its_worker_counts_as_a_crash() {
    let broker = Broker::start();
    let (exchange, queue) = exchange_and_queue(&broker);
    let cluster = outbox_cluster(&broker, &exchange);
    // The broker takes the message and confirms nothing, so the message stays in flight as long as the test needs.
    broker.stop_confirming(&queue);
    cluster.exec(DB, "select outbox_publish('T', '{}', 'a', 'b', 'x')");
    for crashes in 0..2 {
        wait_true(
            &cluster,
            &format!("a claim after {crashes} crashes"),
            &format!("select count(*) = 1 from outbox where claim_token is not null and crashes = {crashes}"),
        );
        cluster.exec(DB, "checkpoint"); // a claim is not flushed: a crash may undo it, and would then not count
        cluster.kill_postmaster();
        cluster.start_again();
    }
    wait_true(&cluster, "the second crash", "select crashes = 2 from outbox");
    assert_eq!(
        cluster.query_one::<i32>(DB, "select attempts from outbox"),
        0,
        "it is charged as a crash, not as an attempt"
    );
    broker.confirm_again(&queue);
    wait_published(&cluster, 1);
    assert!(!all_of(&broker, &queue).is_empty());
    drop(cluster);
}

// ---- transactions that commit late ----------------------------------------------------------------------------------

#[test]
fn messages_held_by_a_transaction_are_delivered_when_it_rolls_back() {
    let stage = stage(&[]);
    let mut late = stage.connect(DB);
    late.run("begin");
    late.publish("a1");
    let mut client = stage.connect(DB);
    for n in 2..=700 {
        client.publish(format!("a{n}")); // more than a worker parks for a key
    }
    client.publish(Event::new("b1").key("b"));
    wait_published(&stage, 1);
    late.run("rollback");
    wait_published(&stage, 700);
    let expected: Vec<String> = std::iter::once("b1".into())
        .chain((2..=700).map(|n| format!("a{n}")))
        .collect();
    assert_eq!(stage.labels(), expected);
}

#[test]
fn a_transaction_that_stays_prepared_through_a_restart_loses_nothing() {
    let stage = stage(&["max_prepared_transactions = 4"]);
    let mut client = stage.connect(DB);
    client.run("begin");
    client.publish("a1");
    client.run("prepare transaction 'late'");
    drop(client);
    stage.stop(StopMode::Immediate);
    stage.start_again();
    wait_connected(&stage);
    let mut client = stage.connect(DB);
    client.publish(Event::new("b1").key("b"));
    wait_published(&stage, 1);
    stage.exec(DB, "commit prepared 'late'");
    wait_published(&stage, 2);
    assert_eq!(stage.labels(), ["b1", "a1"]);
}

#[test]
fn writers_that_share_keys_and_commit_in_any_order_are_delivered_in_order_of_seq() {
    let stage = stage(&[]);
    const WRITERS: usize = 8;
    const EACH: usize = 150;
    std::thread::scope(|scope| {
        for writer in 0..WRITERS {
            let stage = &stage;
            scope.spawn(move || {
                let mut client = stage.connect(DB);
                for n in 0..EACH {
                    // Two keys that other writers use as well, and a commit at any time.
                    let sql = format!(
                        "begin; select outbox_publish('T', '{{}}', 'item', '{}', 'changed'), (select count(*) from generate_series(1, (random() * 20000)::int));
                         select outbox_publish('T', '{{}}', 'item', '{}', 'changed'), (select count(*) from generate_series(1, (random() * 20000)::int)); commit",
                        (writer + n) % 5,
                        (writer * n) % 7,
                    );
                    client.run(&sql);
                }
            });
        }
    });
    wait_drained(&stage);
    let deliveries = stage.all();
    assert_eq!(deliveries.len(), WRITERS * EACH * 2, "each once");
    let mut last: BTreeMap<String, i64> = BTreeMap::new();
    for delivery in &deliveries {
        let body = delivery.json();
        let seq = body["seq"].as_i64().expect("a seq");
        let before = last.insert(body["key"].to_string(), seq).unwrap_or_default();
        assert!(before < seq, "{seq} after {before} of key {}", body["key"]);
    }
}

#[test]
fn a_seq_that_is_enqueued_long_after_it_was_drawn_is_not_lost() {
    let stage = stage(&[]);
    let mut client = stage.connect(DB);
    let old: i64 = client.value(
        "insert into outbox_events (id, type, aggregate_type, aggregate_id, operation, payload)
             values (outbox_uuid_v7(), 'T', 'item', 'a', 'changed', '{\"label\": \"old\"}') returning seq",
    );
    client.publish(Event::new("new").key("b"));
    // A seq far ahead disturbs no other message.
    stage.draw_seqs(1_000_000_000);
    client
        .execute("select outbox_enqueue(1000000000, 'c')", &[])
        .expect("enqueue");
    wait_published(&stage, 1);
    client.execute("select outbox_enqueue($1)", &[&old]).expect("enqueue");
    wait_published(&stage, 2);
    assert_eq!(stage.labels(), ["new", "old"]);
}

// ---- several workers ------------------------------------------------------------------------------------------------

fn partitions_of(cluster: &Cluster) -> Vec<(String, i64)> {
    let rows = cluster.connect(DB).query(
        "select worker_id, partitions from outbox_worker_status where alive and partitions > 0 order by 1",
        &[],
    );
    rows.expect("outbox_worker_status")
        .iter()
        .map(|row| (row.get(0), row.get(1)))
        .collect()
}

fn pid_of(cluster: &Cluster, worker: &str) -> i32 {
    cluster.query_one(
        DB,
        &format!("select pid from outbox_workers where worker_id = '{worker}'"),
    )
}

#[test]
fn a_worker_that_hangs_past_its_lease_changes_nothing_afterwards() {
    let conf = [
        "outbox.workers = 3",
        "outbox.lease_ttl = '8s'",
        "outbox.lease_renew = '1s'",
        "outbox.heartbeat_ttl = '8s'",
    ];
    let stage = Stage::new(&conf);
    wait_shared(&stage);
    let load = Load::start(&stage, &Plan::default());
    load.wait_for_more(40);
    let worker = partitions_of(&stage)[0].0.clone();
    let pid = pid_of(&stage, &worker) as u32;
    let (mut faults, began) = (Faults::default(), SystemTime::now());
    suspend_worker(&stage, pid);
    wait_true(
        &stage,
        "the other two workers to own all partitions",
        &format!(
            "select sum(partitions) = 16 and count(*) = 2 from outbox_worker_status
             where alive and partitions > 0 and worker_id <> '{worker}'"
        ),
    );
    load.wait_for_more(40);
    process::signal(pid, libc::SIGCONT);
    wait_shared(&stage);
    faults.hung_since(began, 1);
    load.wait_for_more(40);
    let sent = load.stop();
    wait_drained(&stage);
    let arrived = arrived(&stage.all());
    faults.assert_explain(&judge(&sent, &arrived), &messages(&stage));
    assert_eq!(
        pid_of(&stage, &worker) as u32,
        pid,
        "the same process goes on with new leases"
    );
}

/// The workers call each statement with the leases that they believe they hold.
#[test]
fn a_worker_with_an_old_epoch_or_another_name_changes_nothing() {
    let cluster = quiet_cluster_with(&["outbox.partition_count = 1"]);
    cluster.draw_seqs(4);
    let take = "select lease_epoch from outbox_internal.lease_take('owner', '{0}', 3600)";
    let old: i64 = cluster.query_one(DB, take);
    let settle = |worker: &str, epoch: i64, actions: &str, seqs: &str| {
        format!(
            "select outbox_internal.settle('{worker}', array_agg(ctid), array_agg(seq), array_agg('default'::text),
               array_agg(partition), '{{{epoch},{epoch}}}', '{actions}', '{{0,0}}', '{{why,why}}', '{{failed,failed}}')::bigint
             from outbox where seq in {seqs}"
        )
    };
    // 1 waits behind another message, 2 is due, 3 is claimed under the old epoch, and 4 is not claimed.
    cluster.exec(
        DB,
        &format!(
            "select outbox_enqueue(n, 'k') from generate_series(1, 3) n;
             select outbox_internal.claim('owner', 'default', '{{0}}', '{{{old}}}', '{{100}}', '{{0}}', 1000000);
             {};
             select outbox_enqueue(4, 'k')",
            settle("owner", old, "{w,r}", "(1, 2)")
        ),
    );
    let epoch: i64 = cluster.query_one(DB, take);
    let changed = |worker: &str, epoch: i64| -> Vec<i64> {
        let lease = format!("'{worker}', '{{0}}', '{{{epoch}}}'");
        let calls = [
            format!("select count(*) from outbox_internal.due({lease}, 100)"),
            format!(
                "select count(seq) from outbox_internal.claim_waiting('{worker}', 'default', 0::smallint, 'k', '{{{epoch}}}', 9, 9, 1000000)"
            ),
            settle(worker, epoch, "{f,f}", "(1, 3)"),
            settle(worker, epoch, "{w,w}", "(1, 3)"),
            format!(
                "select count(seq) from outbox_internal.claim('{worker}', 'default', '{{0}}', '{{{epoch}}}', '{{100}}', '{{0}}', 1000000)"
            ),
            format!("select count(*) from outbox_internal.lease_renew({lease}, 3600)"),
        ];
        let mut changed: Vec<i64> = calls.iter().map(|call| cluster.query_one(DB, call)).collect();
        cluster.exec(DB, &format!("select outbox_internal.lease_release({lease})"));
        changed.push(cluster.query_one(DB, "select count(*) from outbox_partitions where lease_owner is null"));
        changed
    };
    assert_eq!(changed("owner", old), [0; 7]);
    assert_eq!(changed("other", epoch), [0; 7]);
    assert_eq!(
        changed("owner", epoch),
        [1, 1, 1, 1, 3, 1, 1],
        "3 was not claimed under this epoch"
    );
}

/// The next owner reads once which messages wait and which keys are blocked. It must see what was settled or claimed
/// under the lease before.
#[test]
fn a_lease_is_not_taken_while_a_settle_or_a_claim_of_its_owner_is_open() {
    let cluster = quiet_cluster_with(&["outbox.partition_count = 1", "outbox.lease_ttl = '1h'"]);
    cluster.draw_seqs(2);
    let mut owner = cluster.connect(DB);
    owner
        .batch_execute(
            "select outbox_enqueue(n, 'k') from generate_series(1, 2) n;
             select outbox_internal.lease_take('owner', '{0}', 3600);
             create temp table claimed as select * from outbox_internal.claim('owner', 'default', '{0}',
               array(select lease_epoch from outbox_partitions), '{100}', '{0}', 1000000) where remark is null",
        )
        .expect("claimed messages");
    let taken = || {
        cluster.query_one::<i64>(
            DB,
            "select count(*) from outbox_internal.lease_take('next', '{0}', 3600)",
        )
    };
    assert_eq!(taken(), 0, "the lease is not over");
    cluster.exec(
        DB,
        "update outbox_partitions set lease_until = now();
         insert into outbox_waiting (seq, enqueued_at, due_at, partition, state, destination)
         select n, now(), now(), 0, 's', 'default' from generate_series(3, 4) n",
    );
    for moves_both in [
        "select outbox_internal.settle('owner', array_agg(tid), array_agg(seq), array_agg('default'::text), array_agg(partition),
           array_agg(claim_token), array_agg('w'::\"char\"), array_agg(0::bigint), array_agg(''::text), array_agg(''::text))::bigint from claimed",
        "select count(seq) from outbox_internal.claim_waiting('owner', 'default', 0::smallint, 'k',
           array(select lease_epoch from outbox_partitions), 100, 100, 1000000)",
        "select count(*) from outbox_internal.due('owner', '{0}', array(select lease_epoch from outbox_partitions), 100)",
    ] {
        let mut transaction = owner.transaction().expect("begin");
        let moved: i64 = transaction.query_one(moves_both, &[]).expect(moves_both).get(0);
        assert_eq!((moved, taken()), (2, 0), "{moves_both}");
        transaction.commit().expect("commit");
    }
    assert_eq!(taken(), 1);
}

#[test]
fn three_workers_deliver_one_backlog_in_order() {
    let broker = Broker::shared();
    let (exchange, queue) = exchange_and_queue(broker);
    let cluster = outbox_cluster_with(broker, &exchange, &["outbox.workers = 3"]);
    // A worker that gives a partition away sends again what the broker does not confirm in time.
    wait_shared(&cluster);
    pause(&cluster);
    cluster.exec(
        DB,
        "do $$ begin for n in 1..6000 loop
           perform outbox_publish('T', '{}', 'item', (n % 100)::text, 'x');
         end loop; end $$",
    );
    cluster.set_conf("outbox.enabled", "on");
    wait_drained(&cluster);
    let mut last: BTreeMap<String, i64> = BTreeMap::new();
    let deliveries = all_of(broker, &queue);
    assert_eq!(deliveries.len(), 6000, "each once");
    for delivery in deliveries {
        let body = delivery.json();
        let seq = body["seq"].as_i64().expect("a seq");
        assert!(last.insert(body["key"].to_string(), seq).unwrap_or_default() < seq);
    }
}

#[test]
fn changing_the_number_of_partitions_under_load_loses_duplicates_and_reorders_nothing() {
    let stage = Stage::new(&["outbox.workers = 2"]);
    let load = Load::start(&stage, &Plan::default());
    for count in [5, 64, 1, 16] {
        load.wait_for_more(40);
        stage.exec(DB, &format!("select outbox_configure(partition_count => {count})"));
        let partitions = "select count(*) from outbox_partitions";
        assert_eq!(stage.query_one::<i64>(DB, partitions), count);
    }
    load.wait_for_more(40);
    let sent = load.stop();
    wait_drained(&stage);
    let arrived = arrived(&stage.all());
    judge(&sent, &arrived).assert_perfect();
}

#[test]
fn a_transaction_older_than_a_change_of_partitions_fails_and_can_be_run_again() {
    let cluster = stage(&[]).cluster;
    let mut old = cluster.connect(DB);
    old.run("begin isolation level repeatable read; select 1 from pg_class limit 1");
    let mut client = cluster.connect(DB);
    let (waits, dead) = (
        client.publish(Event::new("dead").operation("bad")),
        "select exists (select from outbox_dead)",
    );
    wait_true(&cluster, "a dead letter", dead);
    client.publish("behind");
    wait_true(
        &cluster,
        "a waiting message",
        "select exists (select from outbox_waiting where state = 'g')",
    );
    cluster.exec(DB, "select outbox_configure(partition_count => 3)");
    let refused = old.query_one("select outbox_publish('T', '{}', 'item', 'a', 'changed')", &[]);
    let refused = refused.expect_err("an older snapshot").code().cloned();
    assert_eq!(refused, Some(postgres::error::SqlState::T_R_SERIALIZATION_FAILURE));
    old.run("rollback");
    old.publish("again");
    // Messages that waited behind a dead letter still do, in the new partition.
    wait_true(
        &cluster,
        "two waiting messages",
        "select count(*) = 2 from outbox_waiting where state = 'g'",
    );
    assert!(cluster.query_one::<bool>(DB, &format!("select outbox_discard({waits})")));
    wait_published(&cluster, 2);
}

#[test]
fn leasing_can_be_switched_off_and_on() {
    let cluster = stage(&["outbox.workers = 2"]).cluster;
    let mut client = cluster.connect(DB);
    for (leasing, published) in [(false, 1), (true, 2)] {
        cluster.exec(DB, &format!("select outbox_configure(leasing => {leasing})"));
        client.publish("one");
        wait_published(&cluster, published);
        let owned = "select exists (select from outbox_partitions where lease_owner is not null)";
        wait_true(&cluster, "leases or none", &format!("select ({owned}) = {leasing}"));
    }
}

#[test]
fn messages_behind_a_dead_letter_go_when_leasing_is_switched_off() {
    let stage = stage(&["outbox.max_attempts = 1"]);
    let mut client = stage.connect(DB);
    client.publish(Event::new("dead").operation("bad"));
    wait_true(&stage, "a dead letter", "select exists (select from outbox_dead)");
    client.publish("behind");
    let behind = "select exists (select from outbox_dead where blocks) and exists (select from outbox_waiting)";
    wait_true(&stage, "a message behind a dead letter", behind);
    stage.exec(DB, "select outbox_configure(leasing => false)");
    wait_published(&stage, 1);
    assert_eq!(stage.labels(), ["behind"]);
    // A dead letter of a worker blocks nothing now, and that of a relay neither.
    client.publish(Event::new("dead too").operation("bad"));
    wait_true(&stage, "another dead letter", "select count(*) = 2 from outbox_dead");
    stage.exec(DB, "select outbox_pause('default')");
    client.publish("relayed");
    client.run("select outbox_mark_failed(f.seq, f.claim_token, 'a fault') from outbox_fetch_unpublished(1) f");
    let blocks = "select count(*) filter (where blocks) from outbox_dead having count(*) = 3";
    assert_eq!(stage.query_one::<i64>(DB, blocks), 0);
    stage.exec(DB, "select outbox_resume('default')");
    assert_eq!(stage.query_one::<i64>(DB, "select outbox_drain('0 s')"), 0);
    // With leases again the key goes on.
    stage.exec(DB, "select outbox_configure(leasing => true)");
    client.publish("later");
    wait_published(&stage, 2);
}

// ---- what a claim reads ---------------------------------------------------------------------------------------------

/// The number of blocks that a claim past `cursor` touches.
fn blocks_of_a_claim(client: &mut Client, cursor: i64, limit: i32) -> i64 {
    client.run("begin");
    let sql = format!(
        "explain (analyze, buffers, costs off, timing off, summary off, format json)
         select * from outbox_internal.claim('tester', 'default', '{{0}}', (select array[lease_epoch] from outbox_partitions where partition = 0),
                                    '{{{limit}}}', '{{{cursor}}}', 1000000)"
    );
    let plan: serde_json::Value = client.value(&sql);
    client.run("rollback");
    // An integer before Postgres 18.
    assert_eq!(plan[0]["Plan"]["Actual Rows"].as_f64(), Some(10.0), "the same ten rows");
    plan[0]["Plan"]["Shared Hit Blocks"].as_i64().expect("blocks")
        + plan[0]["Plan"]["Shared Read Blocks"].as_i64().expect("blocks")
}

/// The number of entries of the index of outbox that were read so far.
fn entries_read(client: &mut Client) -> i64 {
    client.run("select pg_stat_force_next_flush()");
    let row = client.query_one(
        "select idx_tup_read from pg_stat_user_indexes where indexrelname = 'outbox_pkey'",
        &[],
    );
    row.expect("statistics").get(0)
}

#[test]
fn claim_and_settle_read_each_row_once_even_after_vacuum_of_an_empty_outbox() {
    let cluster = quiet_cluster_with(&["outbox.partition_count = 1"]);
    cluster.draw_seqs(1_000_000);
    let mut client = cluster.connect(DB);
    let round = |client: &mut Client, first: i64| {
        client.run(&format!(
            "select outbox_enqueue(n, 'k') from generate_series({first}, {first} + 1999) n;
                 drop table if exists claimed"
        ));
        let before = entries_read(client);
        client.run(
            "create temp table claimed as select * from outbox_internal.claim('tester', 'default', '{0}',
                   (select array[lease_epoch] from outbox_partitions where partition = 0), '{1000}', '{0}', 100000000)
                 where remark is null",
        );
        let claimed = entries_read(client);
        client.run("select outbox_internal.settle('tester', array_agg(tid), array_agg(seq), array_agg('default'::text), array_agg(partition),
                   array_agg(claim_token), array_agg('p'::\"char\"), array_agg(0::bigint), array_agg(''::text), array_agg(''::text)) from claimed");
        (claimed - before, entries_read(client) - claimed)
    };
    client.run("select outbox_internal.lease_take('tester', '{0}', 3600)");
    round(&mut client, 1);
    client.run("delete from outbox");
    client.run("vacuum analyze outbox");
    let (by_claim, by_settle) = round(&mut client, 10_001);
    assert!(
        by_claim < 2_500,
        "{by_claim} entries of the index read to claim 1000 rows"
    );
    assert_eq!(by_settle, 0, "a settle finds rows by ctid");
}

#[test]
fn a_worker_reads_each_row_of_a_backlog_once_even_when_an_index_looks_expensive() {
    const BACKLOG: usize = 20_000;
    // The statistics after vacuum has seen an empty outbox: by a small margin, a bitmap scan with a sort of everything
    // pending seemed cheaper. Maintenance would read the events as well, to remove old ones.
    let cluster = stage(&["autovacuum = off", "enable_indexscan = off", "outbox.retention = -1"]).cluster;
    let read = "select idx_tup_read from pg_stat_user_indexes where indexrelname = 'outbox_events_pkey'";
    pause(&cluster);
    cluster.exec(
        DB,
        &format!(
            "select count(outbox_publish('T', '{{}}', 'item', n::text, 'changed')) from generate_series(1, {BACKLOG}) n"
        ),
    );
    let before: i64 = cluster.query_one(DB, read);
    cluster.set_conf("outbox.enabled", "on");
    wait_published(&cluster, BACKLOG);
    // A worker reports what it has read to the statistics when it is idle or ends.
    cluster.exec(
        DB,
        "select pg_terminate_backend(pid) from outbox_worker_status where alive",
    );
    wait_true(
        &cluster,
        "statistics",
        &format!("select ({read}) - {before} >= {BACKLOG}"),
    );
    let by_claims = (cluster.query_one::<i64>(DB, read) - before).cast_unsigned() as usize;
    assert!(
        by_claims < BACKLOG * 3 / 2,
        "{by_claims} events read to deliver {BACKLOG}"
    );
}

#[test]
fn a_claim_never_reads_settled_rows_even_under_an_old_snapshot() {
    let cluster = quiet_cluster_with(&["outbox.partition_count = 1"]);
    let mut snapshot = cluster.connect(DB);
    snapshot.run("begin isolation level repeatable read; select count(*) from outbox");
    cluster.draw_seqs(5010);
    let mut client = cluster.connect(DB);
    client.run("select outbox_internal.lease_take('tester', '{0}', 3600);
             select outbox_enqueue(n, 'k') from generate_series(1, 5000) n;
             create temp table claimed as select * from outbox_internal.claim('tester', 'default', '{0}',
               (select array[lease_epoch] from outbox_partitions where partition = 0), '{10000}', '{0}', 1000000);
             select outbox_internal.settle('tester', array_agg(tid), array_agg(seq), array_agg('default'::text), array_agg(partition),
               array_agg(claim_token), array_agg('p'::\"char\"), array_agg(0::bigint), array_agg(''::text), array_agg(''::text)) from claimed;
             select outbox_enqueue(n, 'k') from generate_series(5001, 5010) n");
    let from_the_cursor = blocks_of_a_claim(&mut client, 5000, 100);
    let from_the_start = blocks_of_a_claim(&mut client, 0, 100);
    assert!(
        from_the_cursor * 5 < from_the_start,
        "{from_the_cursor} blocks from the cursor, {from_the_start} from the start"
    );
    assert!(from_the_cursor < 200, "{from_the_cursor} blocks for ten rows");
}

#[test]
fn a_claim_costs_the_same_with_ten_messages_and_with_forty_thousand() {
    let cluster = quiet_cluster_with(&["outbox.partition_count = 1"]);
    cluster.draw_seqs(40_000);
    let mut client = cluster.connect(DB);
    client.run(
        "select outbox_internal.lease_take('tester', '{0}', 3600);
             select outbox_enqueue(n, 'k') from generate_series(1, 10) n",
    );
    let before_few = blocks_of_a_claim(&mut client, 0, 10);
    client.run("select outbox_enqueue_many(array(select g from generate_series(11, 40000) g), 'k'); analyze outbox");
    let before_many = blocks_of_a_claim(&mut client, 0, 10);
    assert!(
        before_many <= before_few + 20,
        "{before_few} blocks before ten messages, {before_many} before 40,000"
    );
}

#[test]
fn a_message_is_found_by_its_seq_whatever_the_planner_estimates() {
    let cluster = quiet_cluster_with(&["autovacuum = off"]);
    cluster.draw_seqs(5000);
    for known in ["select", "truncate outbox; vacuum analyze outbox"] {
        find_one_message(&cluster, known);
    }
}

fn find_one_message(cluster: &Cluster, known: &str) {
    let mut client = cluster.connect(DB);
    for statement in known.split(';') {
        client.run(statement);
    }
    client.run("select outbox_enqueue(n, n::text) from generate_series(1, 5000) n");
    let mut client = cluster.connect(DB); // the session plans its statements now
    for (calls, what) in [
        (100, "select outbox_enqueue(n, n::text) from generate_series(1, 100) n"),
        (100, "select outbox_retry(n) from generate_series(101, 200) n"),
        (100, "select outbox_discard(n) from generate_series(201, 300) n"),
    ] {
        let before = entries_read(&mut client);
        client.run(what);
        let each = (entries_read(&mut client) - before) / calls;
        assert!(each < 100, "{known}: {each} entries of the index read each: {what}");
    }
}
