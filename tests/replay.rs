//! Tests of replays: which messages are sent again, in what order and with what mark, and that a replay delays no other
//! message. On a real Postgres; where messages are delivered, on a real RabbitMQ.

use postgres::error::SqlState;
use serde_json::{Value, json};
use support::{Broker, Cluster, Delivery, fresh_names};
use support::{
    DB, Session, Stage, all_of, outbox_cluster_with, pause, quiet_cluster, wait_drained, wait_published, wait_true,
};

/// Publishes messages 1 to n without a worker: inserts them directly into the history.
fn published(cluster: &Cluster, n: i32) {
    cluster.exec(
        DB,
        &format!(
            "select outbox_publish(case i % 2 when 1 then 'A' else 'B' end, i::text::jsonb, 'order', (i % 5)::text) from generate_series(1, {n}) i;
             insert into outbox_history (seq, enqueued_at, published_at, attempts, partition, destination, key)
             select seq, enqueued_at, now() + seq * interval '1 ms', 1, partition, destination, key from outbox order by seq;
             delete from outbox"
        ),
    );
}

fn replay(cluster: &Cluster, arguments: &str) -> i64 {
    cluster.query_one(DB, &format!("select outbox_replay({arguments})"))
}

fn seqs(cluster: &Cluster, table: &str) -> Vec<i64> {
    let sql = format!("select coalesce(array_agg(seq order by seq), '{{}}') from {table}");
    cluster.query_one(DB, &sql)
}

fn code(cluster: &Cluster, sql: &str) -> SqlState {
    let error = cluster.connect(DB).batch_execute(sql).expect_err(sql);
    error.code().unwrap_or_else(|| panic!("{sql}: {error:?}")).clone()
}

fn payload(delivery: &Delivery) -> i64 {
    delivery.json()["payload"].as_i64().expect("a number")
}

fn is_replayed(delivery: &Delivery) -> bool {
    delivery.headers.get("replayed") == Some(&json!(true))
}

#[test]
fn replayed_messages_arrive_in_order_with_their_ids_and_a_mark() {
    let stage = Stage::new(&[]);
    stage.exec(
        DB,
        "select outbox_publish('T', i::text::jsonb, 'order', '1', headers => '{\"replayed\": \"forged\"}') from generate_series(1, 30) i",
    );
    wait_published(&stage, 30);
    let first = stage.all();
    assert!(first.iter().all(|delivery| !delivery.headers.contains_key("replayed")));

    assert_eq!(
        replay(
            &stage,
            "seq_from => 11, seq_to => 20, dry_run => false, reason => 'index lost'"
        ),
        10
    );
    wait_published(&stage, 40);
    let again = stage.all();
    assert_eq!(
        again.iter().map(payload).collect::<Vec<_>>(),
        (11..=20).collect::<Vec<_>>()
    );
    for (again, first) in again.iter().zip(&first[10..20]) {
        assert!(is_replayed(again), "{again:?}");
        assert_eq!((&again.message_id, &again.body), (&first.message_id, &first.body));
        assert_eq!(again.headers["seq"], first.headers["seq"]);
    }
    assert_eq!(
        seqs(&stage, "outbox_history where replayed"),
        (11..=20).collect::<Vec<_>>()
    );
    assert_eq!(
        seqs(&stage, "outbox_messages where replayed"),
        (11..=20).collect::<Vec<_>>()
    );
    let audit: Value = stage.query_one(
        DB,
        "select jsonb_build_array(action, filter, count, reason) from outbox_audit",
    );
    assert_eq!(
        audit,
        json!(["replay", {"seq_from": 11, "seq_to": 20, "max_rows": 10000}, 10, "index lost"])
    );
}

#[test]
fn each_criterion_selects_its_messages_and_a_dry_run_changes_nothing() {
    let cluster = quiet_cluster();
    published(&cluster, 10);
    cluster.exec(
        DB,
        "update outbox_events set created_at = '2030-01-01Z'::timestamptz + seq * interval '1 day';
         update outbox_history set discarded = true where seq = 10",
    );
    for (criteria, wanted) in [
        ("seq_from => 1", 10),
        ("seq_from => 4, seq_to => 6", 3),
        ("created_from => '2030-01-04Z'", 8),
        ("created_to => '2030-01-04Z'", 2),
        ("type => 'A'", 5),
        ("aggregate_type => 'order', aggregate_id => '3'", 2),
        ("aggregate_type => 'else'", 0),
        ("key => 'order:0'", 2),
        ("key => 'order:0', type => 'A'", 1),
        ("source_destination => 'default'", 9), // all but the discarded one
        ("source_destination => 'elsewhere'", 0),
        ("type => 'A', destination => 'default'", 5),
        ("seq_from => 1, max_rows => 7", 7),
        ("seq_from => 1, max_rows => null, dry_run => null", 10),
    ] {
        assert_eq!(replay(&cluster, criteria), wanted, "{criteria}");
    }
    assert!(seqs(&cluster, "outbox").is_empty());
    assert_eq!(cluster.query_one::<i64>(DB, "select count(*) from outbox_audit"), 0);
    assert_eq!(replay(&cluster, "seq_from => 2, max_rows => 3, dry_run => false"), 3);
    assert_eq!(seqs(&cluster, "outbox where replayed"), [2, 3, 4]);
    assert_eq!(
        code(
            &cluster,
            "select outbox_replay(destination => 'default', dry_run => false)"
        ),
        SqlState::INVALID_PARAMETER_VALUE,
        "where to is no criterion"
    );
    let elsewhere = "select outbox_replay(seq_from => 1, destination => 'elsewhere')";
    assert_eq!(code(&cluster, elsewhere), SqlState::UNDEFINED_OBJECT);
}

#[test]
fn a_replay_duplicates_no_pending_and_no_dead_message() {
    let cluster = quiet_cluster();
    published(&cluster, 6);
    cluster.exec(
        DB,
        "select outbox_enqueue(1), outbox_enqueue(2, 'another'), outbox_enqueue(3, available_at => '2999-01-01');
         insert into outbox_dead (seq, enqueued_at, attempts, partition, destination, reason) values (4, now(), 1, 0, 'default', 'no');
         insert into outbox_history (seq, enqueued_at, published_at, attempts, partition, destination, key)
         values (5, now(), now() + interval '1 hour', 1, 0, 'default', 'the last key')",
    );
    assert_eq!(replay(&cluster, "seq_from => 1, dry_run => false"), 2);
    assert_eq!(
        replay(&cluster, "seq_from => 1, dry_run => false"),
        0,
        "the messages are pending now"
    );
    assert_eq!(seqs(&cluster, "outbox where replayed"), [5, 6]);
    assert_eq!(
        seqs(&cluster, "outbox where key = 'the last key'"),
        [5],
        "ended twice, replayed once"
    );
    assert_eq!(seqs(&cluster, "outbox"), [1, 2, 5, 6]);
}

#[test]
fn a_message_keeps_the_key_that_it_had_at_the_destination_of_its_replay() {
    let cluster = quiet_cluster();
    published(&cluster, 1);
    cluster.exec(
        DB,
        "create server audit foreign data wrapper outbox_amqp options (exchange 'x');
         insert into outbox_history (seq, enqueued_at, published_at, attempts, partition, destination, key)
         select 1, now(), now() - n * interval '1 min', 1, 0, 'audit', n || ' min ago' from generate_series(1, 2) n",
    );
    assert_eq!(
        replay(&cluster, "seq_from => 1, destination => 'audit', dry_run => false"),
        1
    );
    assert_eq!(seqs(&cluster, "outbox where key = '1 min ago'"), [1]);
}

#[test]
fn the_replayed_mark_survives_a_failure_a_wait_a_dead_letter_and_a_retry() {
    let conf = ["outbox.retry_backoff = '50ms'", "outbox.max_attempts = 2"];
    let stage = Stage::new(&conf);
    stage.exec(
        DB,
        "select outbox_publish('T', i::text::jsonb, 'order', '1') from generate_series(1, 3) i",
    );
    wait_published(&stage, 3);
    stage.all();
    stage.broker.unbind(&stage.queue, &stage.exchange, "#");
    assert_eq!(replay(&stage, "seq_from => 1, dry_run => false"), 3);
    wait_true(
        &stage,
        "one dead, two behind",
        "select (select count(*) from outbox_dead where blocks and replayed and attempts = 2) = 1
            and (select count(*) from outbox_waiting where state = 'g' and replayed) = 2",
    );
    stage.broker.bind(&stage.queue, &stage.exchange, "#");
    stage.exec(DB, "select outbox_retry_where(seq_from => 1, dry_run => false)");
    wait_published(&stage, 6);
    let arrived = stage.all();
    assert_eq!(arrived.iter().map(payload).collect::<Vec<_>>(), [1, 2, 3]);
    assert!(arrived.iter().all(is_replayed));
    // Also with leasing off.
    stage.exec(DB, "select outbox_configure(leasing => false)");
    stage.exec(DB, "select outbox_replay(seq_from => 2, dry_run => false)");
    wait_published(&stage, 8);
    assert!(stage.all().iter().all(is_replayed));
}

#[test]
fn a_replay_of_a_blocked_key_waits_behind_its_dead_letter() {
    let broker = Broker::shared();
    let (exchange, queue) = fresh_names();
    broker.declare_exchange(&exchange, "topic", true);
    broker.declare_queue(&queue, Value::Null);
    broker.bind(&queue, &exchange, "order.good");
    let cluster = outbox_cluster_with(broker, &exchange, &["outbox.max_attempts = 1"]);
    for (n, operation) in [(1, "good"), (2, "good"), (3, "bad")] {
        cluster.exec(
            DB,
            &format!("select outbox_publish('T', '{n}', 'order', '1', '{operation}')"),
        );
    }
    wait_true(
        &cluster,
        "a dead letter",
        "select exists (select from outbox_dead where seq = 3 and blocks)",
    );
    assert_eq!(replay(&cluster, "seq_from => 1, dry_run => false"), 2);
    wait_true(
        &cluster,
        "both to wait",
        "select count(*) = 2 from outbox_waiting where state = 'g'",
    );
    cluster.exec(DB, "select outbox_discard(3)");
    wait_drained(&cluster);
    let arrived: Vec<i64> = all_of(broker, &queue).iter().map(payload).collect();
    assert_eq!(arrived, [1, 2, 1, 2]);
}

/// The replay takes more than one piece, with history from before a change of partitions. An open replay delays no
/// producer.
#[test]
fn a_large_replay_keeps_the_order_of_each_key_and_delays_no_producer() {
    const N: i64 = 25_000;
    let stage = Stage::new(&[]);
    pause(&stage);
    published(&stage, N as i32);
    stage.exec(DB, "select outbox_configure(partition_count => 7)");
    let mut replayer = stage.connect(DB);
    replayer.run("begin; select outbox_replay(seq_from => 1, max_rows => 24000, dry_run => false)");
    stage.set_conf("outbox.enabled", "on");
    stage.exec(DB, "set lock_timeout = '2s'; select outbox_publish('T', (-i)::text::jsonb, 'order', (i % 5)::text) from generate_series(1, 10) i");
    wait_true(
        &stage,
        "ten new messages to be delivered before the open replay",
        &format!("select count(*) = 10 from outbox_history where seq > {N}"),
    );
    replayer.run("commit");
    wait_drained(&stage);
    let misplaced = "select count(*) from outbox_history where replayed and outbox_partition_label(partition) <> outbox_partition_of(key)";
    assert_eq!(stage.query_one::<i64>(DB, misplaced), 0, "in the current partitions");
    let arrived = stage.all();
    assert_eq!(arrived.len(), 24_010);
    for key in 0..5 {
        let found: Vec<i64> = arrived.iter().map(payload).filter(|n| *n > 0 && n % 5 == key).collect();
        let expected: Vec<i64> = (1..=24_000).filter(|n| n % 5 == key).collect();
        assert!(found == expected, "key {key} is out of order");
    }
}

#[test]
fn an_event_that_is_being_replayed_is_not_removed() {
    let cluster = quiet_cluster();
    published(&cluster, 2);
    let mut replayer = cluster.connect(DB);
    replayer.run("begin; select outbox_replay(seq_from => 1, max_rows => 1, dry_run => false)");
    cluster.exec(
        DB,
        "set lock_timeout = '2s'; select outbox_internal.trim_events(0, 0, 100)",
    );
    assert_eq!(seqs(&cluster, "outbox_events"), [1]);
    replayer.run("commit");
    cluster.exec(DB, "select outbox_internal.trim_events(0, 0, 100)");
    assert_eq!(seqs(&cluster, "outbox_events"), [1], "its message is pending");
}

// ---- silence --------------------------------------------------------------------------------------------------------

#[test]
fn a_silent_session_publishes_nothing_and_the_others_do() {
    let cluster = quiet_cluster();
    cluster.exec(DB, "create role rebuilder in role outbox_admin");
    let mut silent = cluster.connect(DB);
    silent.run("set role rebuilder; begin; set local outbox.replaying = on");
    let results = silent
        .query_one(
            "select outbox_publish('T', '{}', 'order', '1'), outbox_publish(null, null), outbox_enqueue(1), outbox_enqueue(2, 'k', available_at => '2999-01-01'),
                    outbox_enqueue_many('{1,2,3}')",
            &[],
        )
        .expect("nothing is an error");
    assert_eq!((results.get(0), results.get(1)), (None::<i64>, None::<i64>));
    assert_eq!((results.get(2), results.get(3), results.get(4)), (false, false, 0_i64));
    let open = "select count(*) from outbox_open_transactions()";
    assert_eq!(cluster.query_one::<i64>(DB, open), 0, "the session holds no keys");
    cluster.exec(DB, "select outbox_publish('T', '{}', 'order', '1')");
    silent.run("commit; select outbox_publish('T', '{}', 'order', '1')");
    assert_eq!(cluster.query_one::<i64>(DB, "select count(*) from outbox"), 2);
    assert_eq!(cluster.query_one::<i64>(DB, "select count(*) from outbox_events"), 2);
}

#[test]
fn only_an_admin_may_silence_a_session_and_never_a_server_or_a_database() {
    let cluster = quiet_cluster();
    cluster.exec(
        DB,
        "create role app in role outbox_writer, outbox_monitor; create role boss in role outbox_admin",
    );
    let set = "set outbox.replaying = on";
    // Since version 17 such a record keeps the role from being dropped.
    let recorded = "select count(*) from pg_init_privs where classoid = 'pg_parameter_acl'::regclass";
    assert_eq!(cluster.query_one::<i64>(DB, recorded), 0, "the grant is recorded");
    assert_eq!(
        code(&cluster, &format!("set role app; {set}")),
        SqlState::INSUFFICIENT_PRIVILEGE
    );
    cluster.exec(DB, &format!("set role boss; {set}"));
    assert_eq!(
        code(&cluster, "alter system set outbox.replaying = on"),
        SqlState::INVALID_PARAMETER_VALUE
    );
    let shown = "show outbox.replaying";
    cluster.set_conf("outbox.replaying", "on");
    cluster.exec(DB, "alter database postgres set outbox.replaying = on");
    assert_eq!(cluster.query_one::<String>(DB, shown), "off", "after a reload");
    cluster.restart();
    assert_eq!(cluster.query_one::<String>(DB, shown), "off", "after a restart");
    cluster.exec(DB, "alter role postgres set outbox.replaying = on");
    assert_eq!(
        cluster.query_one::<String>(DB, shown),
        "on",
        "a role may be made for it"
    );
    cluster.exec(DB, "alter role postgres reset outbox.replaying");
    // Each CREATE EXTENSION grants the right to set outbox.replaying, and the right ends with the role.
    cluster.exec(DB, "create database other");
    cluster.exec(
        "other",
        "create extension outbox; drop extension outbox; create extension outbox",
    );
    cluster.exec(
        "other",
        "drop extension outbox; drop owned by outbox_worker, outbox_writer, outbox_monitor, outbox_admin, outbox_consumer",
    );
    cluster.exec(
        DB,
        "drop role app, boss; drop extension outbox; drop owned by outbox_worker, outbox_writer, outbox_monitor, outbox_admin, outbox_consumer;
         drop role outbox_worker, outbox_writer, outbox_monitor, outbox_admin, outbox_consumer; create extension outbox; create role boss in role outbox_admin",
    );
    cluster.exec(DB, &format!("set role boss; {set}"));
}

/// Without preload any session may set any value under the name of a setting, until the library is loaded.
#[test]
fn a_session_cannot_be_silenced_by_a_setting_made_before_the_library_was_loaded() {
    let cluster = Cluster::builder().preload(false).start();
    cluster.exec(
        DB,
        "create extension outbox; create role app in role outbox_writer; create role boss in role outbox_admin",
    );
    for (role, events) in [("app", 1), ("boss", 0)] {
        let mut client = cluster.connect(DB);
        let publish = "select outbox_publish('T', '{}')";
        client.run(&format!("set role {role}; set outbox.replaying = on"));
        client.run(publish);
        client.run(publish);
        let stored = "with gone as (delete from outbox_events returning 1) select count(*) from gone";
        assert_eq!(cluster.query_one::<i64>(DB, stored), 2 * events, "{role}");
    }
}

/// The history has no index in order of seq.
#[test]
fn a_replay_by_criteria_of_a_source_reads_the_history_a_few_times_whatever_its_length() {
    let cluster = quiet_cluster();
    let rows = 100_000;
    cluster.exec(
        DB,
        "create role clerk; create table journal (position bigint primary key, kind text, at timestamptz default now());
         alter table journal owner to clerk;
         select outbox_source_set('journal', seq => 'position', type => 'kind', created_at => 'at')",
    );
    // Seqs with gaps; the last ones are far behind the others.
    cluster.exec(
        DB,
        &format!(
            "insert into journal (position, kind) select case when i > {rows} - 10 then i + 10 ^ 12 else i * 3 end, 'A'
             from generate_series(1, {rows}) i;
             insert into outbox_history (seq, enqueued_at, published_at, attempts, partition, destination)
             select position, now(), now(), 1, position % 16, 'default' from journal order by 1;
             select outbox_internal.summarize_history(); analyze outbox_history_default"
        ),
    );
    let mut client = cluster.connect(DB);
    let mut transaction = client.transaction().expect("begin");
    let found: i64 = transaction
        .query_one("select outbox_replay(type => 'A', max_rows => null)", &[])
        .expect("a replay")
        .get(0);
    assert_eq!(found, rows);
    let read: i64 = transaction
        .query_one(
            "select sum(seq_tup_read + coalesce(idx_tup_fetch, 0))::bigint from pg_stat_xact_user_tables
             where relname like 'outbox_history%'",
            &[],
        )
        .expect("the statistics")
        .get(0);
    assert!(read < 5 * rows, "{read} rows read for {rows}");
}
