//! Tests of manual operations on many messages: selection by filter, with a dry run first, and with an audit. They run
//! on a real Postgres. Where messages are delivered again, they run on a real RabbitMQ too.

use postgres::Client;
use postgres::error::SqlState;
use serde_json::{Value, json};
use support::{Broker, Cluster, fresh_names};
use support::{
    DB, Session, Stage, all_of, beside_maintenance, outbox_cluster, outbox_cluster_with, quiet_cluster, refused,
    wait_drained, wait_published, wait_true,
};

/// Dead letters 1 to 6: alternately of types A and B, each with a different key, the first three unroutable.
fn dead_letters(cluster: &Cluster) {
    cluster.exec(
        DB,
        "select outbox_publish(case n % 2 when 1 then 'A' else 'B' end, '{}', 'order', n::text) from generate_series(1, 6) n;
         insert into outbox_dead (seq, enqueued_at, died_at, attempts, partition, destination, key, reason)
         select seq, enqueued_at, '2030-01-01Z'::timestamptz + seq * interval '1 day', 15, partition, destination, key,
                case when seq <= 3 then 'unroutable: 312 NO_ROUTE' else 'refused' end
         from outbox;
         delete from outbox",
    );
}

/// Calls a function with these arguments; returns the number that the function returns.
fn count(cluster: &Cluster, call: &str) -> i64 {
    cluster.query_one(DB, &format!("select {call}"))
}

fn seqs(cluster: &Cluster, table: &str) -> Vec<i64> {
    let sql = format!("select coalesce(array_agg(seq order by seq), '{{}}') from {table}");
    cluster.query_one(DB, &sql)
}

/// The audit, oldest first: action, filter, count, reason.
fn audit(cluster: &Cluster) -> Vec<Value> {
    let sql = "select coalesce(jsonb_agg(jsonb_build_array(action, filter, count, reason) order by at), '[]') from outbox_audit";
    let all: Value = cluster.query_one(DB, sql);
    all.as_array().expect("an array").clone()
}

fn code(client: &mut Client, sql: &str) -> SqlState {
    let error = client.batch_execute(sql).expect_err(sql);
    error.code().unwrap_or_else(|| panic!("{sql}: {error:?}")).clone()
}

#[test]
fn each_criterion_selects_its_messages_and_a_dry_run_changes_nothing() {
    let cluster = quiet_cluster();
    dead_letters(&cluster);
    cluster.exec(
        DB,
        "update outbox_dead set attempts = case when seq in (1, 2) then 5 else 1 end",
    );
    for (criteria, wanted) in [
        ("type => 'A'", 3),
        ("aggregate_type => 'order'", 6),
        ("aggregate_type => 'order', aggregate_id => '2'", 1),
        ("key => 'order:5'", 1),
        ("error_like => 'unroutable%'", 3),
        ("error_like => 'unroutable%', type => 'B'", 1),
        ("attempts_below => 5", 4),
        ("attempts_below => 5, error_like => 'unroutable%'", 1),
        ("attempts_below => 0", 0),
        ("died_after => '2030-01-03Z'", 5),
        ("died_before => '2030-01-03Z'", 1),
        ("seq_from => 5", 2),
        ("seq_to => 4", 4),
        ("seq_from => 1", 6),
        ("destination => 'default'", 6),
        ("destination => 'elsewhere'", 0),
        ("seq_from => 1, max_rows => 4", 4),
        ("seq_from => 1, max_rows => null, dry_run => null", 6),
    ] {
        for function in ["outbox_retry_where", "outbox_discard_where"] {
            let call = format!("{function}({criteria})");
            assert_eq!(count(&cluster, &call), wanted, "{call}");
        }
    }
    assert_eq!(seqs(&cluster, "outbox_dead"), [1, 2, 3, 4, 5, 6]);
    assert!(audit(&cluster).is_empty(), "nothing was done");
}

#[test]
fn a_call_without_a_criterion_is_refused() {
    let cluster = quiet_cluster();
    dead_letters(&cluster);
    let mut client = cluster.connect(DB);
    for function in ["outbox_retry_where", "outbox_discard_where"] {
        for arguments in [
            "dry_run => false",
            "max_rows => 5, reason => 'r'",
            "seq_from => 1, max_rows => 0",
        ] {
            let call = format!("select {function}({arguments})");
            assert_eq!(code(&mut client, &call), SqlState::INVALID_PARAMETER_VALUE, "{call}");
        }
    }
    assert_eq!(seqs(&cluster, "outbox_dead").len(), 6);
}

#[test]
fn retry_and_discard_take_messages_in_order_of_seq_and_are_audited() {
    let cluster = quiet_cluster();
    dead_letters(&cluster);
    let retry = "outbox_retry_where(type => 'A', max_rows => 2, reason => 'queue is back', dry_run => false)";
    assert_eq!(count(&cluster, retry), 2);
    assert_eq!(seqs(&cluster, "outbox"), [1, 3]);
    let discard = "outbox_discard_where(seq_from => 4, dry_run => false, reason => 'withdrawn')";
    assert_eq!(count(&cluster, discard), 3);
    assert_eq!(seqs(&cluster, "outbox_dead"), [2]);
    assert_eq!(
        seqs(&cluster, "outbox_history where discarded and last_error = 'withdrawn'"),
        [4, 5, 6]
    );
    assert_eq!(count(&cluster, discard), 0, "none are left");
    assert_eq!(
        audit(&cluster),
        [
            json!(["retry", {"type": "A", "max_rows": 2}, 2, "queue is back"]),
            json!(["discard", {"seq_from": 4, "max_rows": 10000}, 3, "withdrawn"]),
        ]
    );
}

#[test]
fn an_event_enqueued_again_while_it_is_dead_is_retried_once() {
    let cluster = quiet_cluster();
    dead_letters(&cluster);
    cluster.exec(
        DB,
        "select outbox_enqueue(1), outbox_enqueue(2, 'another'), outbox_enqueue(3, available_at => '2999-01-01');
         insert into outbox_waiting (seq, enqueued_at, partition, state, destination, key) values (4, now(), 3, 'g', 'default', 'order:4')",
    );
    assert_eq!(
        count(&cluster, "outbox_retry_where(seq_from => 1, dry_run => false)"),
        6
    );
    assert_eq!(seqs(&cluster, "outbox"), [1, 2, 5, 6]);
    assert_eq!(seqs(&cluster, "outbox_waiting"), [3, 4]);
    assert_eq!(
        seqs(&cluster, "outbox_waiting where due_at <= now()"),
        [3],
        "it is due at once"
    );
}

#[test]
fn dead_letters_retried_by_filter_are_delivered_before_the_messages_behind_them() {
    let broker = Broker::shared();
    let (exchange, queue) = fresh_names();
    broker.declare_exchange(&exchange, "topic", true);
    broker.declare_queue(&queue, Value::Null);
    let cluster = outbox_cluster(broker, &exchange);
    let before: String = cluster.query_one(DB, "select max(started_at)::text from outbox_worker_status");
    cluster.exec(DB, "alter database postgres set outbox.max_attempts = 1");
    wait_true(
        &cluster,
        "a worker that has the setting",
        &format!(
            "select exists (select from outbox_worker_status
                            where alive and state = 'connected' and started_at > '{before}')"
        ),
    );
    // Two messages for each of twenty keys, in this order: the second waits behind the first.
    cluster.exec(
        DB,
        "select outbox_publish('T', n::text::jsonb, 'item', (n % 20)::text, 'made') from generate_series(1, 40) n",
    );
    wait_true(
        &cluster,
        "twenty dead letters, twenty behind",
        "select (select count(*) from outbox_dead where blocks) = 20 and (select count(*) from outbox_waiting) = 20",
    );
    broker.bind(&queue, &exchange, "item.made");
    assert_eq!(
        count(
            &cluster,
            "outbox_retry_where(error_like => 'unroutable%', dry_run => false)"
        ),
        20
    );
    wait_drained(&cluster);
    wait_published(&cluster, 40);
    let mut arrived: Vec<(i64, i64)> = all_of(broker, &queue)
        .iter()
        .map(|delivery| delivery.json()["payload"].as_i64().expect("a number"))
        .map(|n| (n % 20, n))
        .collect();
    arrived.sort_by_key(|(key, _)| *key); // a stable sort: within a key in the order of arrival
    let expected: Vec<(i64, i64)> = (0..20)
        .flat_map(|key| [if key == 0 { 20 } else { key }, if key == 0 { 40 } else { key + 20 }].map(|n| (key, n)))
        .collect();
    assert_eq!(arrived, expected);
}

#[test]
fn discarding_dead_letters_by_filter_unblocks_their_keys() {
    let stage = Stage::new(&[]);
    stage.draw_seqs(999);
    stage.exec(
        DB,
        // An event that does not exist can never be sent.
        "select outbox_enqueue(999, 'item:1'); select outbox_enqueue(998, 'item:2')",
    );
    wait_true(
        &stage,
        "two dead letters",
        "select count(*) = 2 from outbox_dead where blocks",
    );
    stage.exec(
        DB,
        "insert into outbox_events (seq, id, type, payload, aggregate_type, aggregate_id)
         select n, gen_random_uuid(), 'T', '{}', 'item', (n % 2 + 1)::text from generate_series(1000, 1003) n;
         select outbox_enqueue_many('{1000,1001,1002,1003}')",
    );
    wait_true(
        &stage,
        "all to be waiting",
        "select count(*) = 4 from outbox_waiting where state = 'g'",
    );
    assert_eq!(
        count(&stage, "outbox_discard_where(key => 'item:1', dry_run => false)"),
        1
    );
    wait_published(&stage, 2);
    assert_eq!(
        seqs(&stage, "outbox_waiting"),
        [1001, 1003],
        "the other key still waits"
    );
    assert_eq!(
        count(&stage, "outbox_discard_where(seq_from => 1, dry_run => false)"),
        1
    );
    wait_drained(&stage);
    assert_eq!(stage.all().len(), 4);
}

#[test]
fn the_audit_records_actor_action_and_client_and_drops_what_rolls_back() {
    let cluster = quiet_cluster();
    dead_letters(&cluster);
    cluster.exec(
        DB,
        "create role kim login; grant outbox_admin to kim; create role night in role outbox_admin; grant night to kim",
    );
    let login = cluster
        .conn_string(DB)
        .replace("user=postgres", "user=kim application_name=console");
    let mut kim = Client::connect(&login, postgres::NoTls).expect("connect as kim");
    for statement in [
        "select outbox_retry(1, reason => 'bound again'), outbox_retry(77)",
        "select outbox_pause(reason => 'the broker moves')",
        "select outbox_pause(reason => 'again')", // it is paused already
        "set role night",
        "select outbox_resume(reason => 'it has moved')",
        "select outbox_resume()",
        "select outbox_discard(2, reason => 'mistaken')",
        "begin; select outbox_discard_where(seq_from => 1, dry_run => false); rollback",
        "select outbox_configure(leasing => false)",
        "select outbox_configure(leasing => false)", // leasing is off already
    ] {
        kim.run(statement);
    }
    let sql = "select jsonb_agg(jsonb_build_array(actor, acted_as, action, filter, count, reason, application_name, host(client_addr)) order by at)
               from outbox_audit where at between now() - interval '1 minute' and clock_timestamp()";
    let rows: Value = cluster.query_one(DB, sql);
    let configured =
        json!({"leasing": false, "partition_count": 16, "leasing_before": true, "partition_count_before": 16});
    assert_eq!(
        rows,
        json!([
            ["kim", "kim", "retry", {"seq": 1, "destination": "default"}, 1, "bound again", "console", "127.0.0.1"],
            ["kim", "kim", "pause", {"destination": "default"}, null, "the broker moves", "console", "127.0.0.1"],
            ["kim", "night", "resume", {"destination": "default"}, null, "it has moved", "console", "127.0.0.1"],
            ["kim", "night", "discard", {"seq": 2, "destination": "default"}, 1, "mistaken", "console", "127.0.0.1"],
            ["kim", "night", "configure", configured, null, null, "console", "127.0.0.1"],
        ])
    );
    // No role writes the audit by hand, and monitors read it.
    for sql in [
        "insert into outbox_audit (actor, acted_as, action, filter) values ('x', 'x', 'retry', '{}')",
        "delete from outbox_audit",
        "update outbox_audit set actor = 'x'",
        "select outbox_internal.record_audit('retry', '{}', 1, '')",
    ] {
        assert_eq!(code(&mut kim, sql), SqlState::INSUFFICIENT_PRIVILEGE, "{sql}");
    }
    cluster.exec(
        DB,
        "create role watch in role outbox_monitor; set role watch; select * from outbox_audit",
    );
}

#[test]
fn audit_rows_are_removed_after_a_year() {
    let cluster = Stage::new(&[]).cluster;
    cluster.exec(
        DB,
        "insert into outbox_audit (at, actor, acted_as, action, filter)
         select now() - n * interval '100 days', 'kim', 'kim', 'retry', '{}' from generate_series(0, 6) n",
    );
    // With the default of a year, maintenance keeps the rows of 0 to 300 days. A new setting makes maintenance start
    // again.
    cluster.exec(DB, "alter database postgres set outbox.batch_size = 10");
    wait_true(
        &cluster,
        "the old rows to be removed",
        "select count(*) = 4 from outbox_audit",
    );
}

// ---- erasure --------------------------------------------------------------------------------------------------------

/// The result of outbox_purge, one line "table_name rows" for each table.
fn purge(cluster: &Cluster, arguments: &str) -> Vec<String> {
    let sql = format!("select table_name || ' ' || rows from outbox_purge({arguments})");
    let rows = cluster.connect(DB).query(sql.as_str(), &[]).expect("outbox_purge");
    rows.iter().map(|row| row.get(0)).collect()
}

/// For each of two customers: a published, a pending, a scheduled and a dead message, one behind the dead one, and a
/// published one whose event is gone.
fn two_customers(cluster: &Cluster) {
    for customer in ["mallory", "bob"] {
        cluster.exec(
            DB,
            &format!(
                "create temp table s as
                 select n, outbox_publish('T', '{{\"name\": \"{customer}\"}}', 'customer', '{customer}') as seq from generate_series(1, 5) n;
                 insert into outbox_history (seq, enqueued_at, published_at, attempts, partition, destination, key)
                 select seq, now(), now() - interval '10 days', 1, partition, destination, key from outbox join s using (seq) where n in (1, 5);
                 insert into outbox_dead (seq, enqueued_at, attempts, partition, destination, key, reason, blocks)
                 select seq, now(), 1, partition, destination, key, 'refused {customer}', true from outbox join s using (seq) where n = 2;
                 insert into outbox_waiting (seq, enqueued_at, partition, state, destination, key)
                 select seq, now(), partition, 'g', destination, key from outbox join s using (seq) where n = 3;
                 delete from outbox_events where seq = (select seq from s where n = 5);
                 delete from outbox where seq in (select seq from s where n <> 4);
                 select outbox_publish('T', '{{}}', 'customer', '{customer}', available_at => '2999-01-01');
                 select outbox_retry_where(aggregate_id => '{customer}', error_like => 'x%', dry_run => false),
                        outbox_discard_where(key => 'customer:{customer}', dry_run => false, max_rows => 1);
                 insert into outbox_dead (seq, enqueued_at, attempts, partition, destination, key, reason, blocks)
                 select seq, now(), 1, partition, destination, key, 'refused {customer}', true from outbox_history where seq = (select seq from s where n = 2);
                 insert into outbox_attempts_log
                 select seq, 'default', now(), 1, 'retried', 'refused {customer}', null from s where n in (2, 5);
                 drop table s"
            ),
        );
    }
}

/// Counts the rows of all tables that contain a word.
fn rows_with(cluster: &Cluster, word: &str) -> i64 {
    let tables = [
        "outbox_events",
        "outbox",
        "outbox_waiting",
        "outbox_dead",
        "outbox_history",
        "outbox_attempts_log",
        "outbox_audit",
    ];
    let counts = tables.map(|table| format!("(select count(*) from {table} t where t::text like '%{word}%')"));
    cluster.query_one(DB, &format!("select {}", counts.join(" + ")))
}

#[test]
fn a_purge_removes_one_aggregate_from_every_table_and_leaves_the_others() {
    let cluster = quiet_cluster();
    two_customers(&cluster);
    let (mallory, bob) = (rows_with(&cluster, "mallory"), rows_with(&cluster, "bob"));
    assert_eq!(mallory, bob);
    let all = [
        "outbox_events 5",
        "outbox 1",
        "outbox_waiting 2",
        "outbox_dead 1",
        "outbox_history 3",
        "outbox_attempts_log 2",
        "outbox_audit 1",
    ];
    assert_eq!(purge(&cluster, "'customer', 'mallory'"), all, "a dry run");
    assert_eq!(rows_with(&cluster, "mallory"), mallory, "a dry run");
    assert_eq!(
        purge(&cluster, "'customer', 'mallory', 'request 17', dry_run => false"),
        all
    );
    assert_eq!(rows_with(&cluster, "mallory"), 0);
    assert_eq!(rows_with(&cluster, "bob"), bob);
    let written: Value = cluster.query_one(
        DB,
        "select jsonb_agg(jsonb_build_array(action, count, reason) order by at) from outbox_audit
         where (filter->>'key_crc32')::bigint = outbox_crc32('customer:mallory')",
    );
    assert_eq!(written, json!([["discard", 1, null], ["purge", 5, "request 17"]]));
    let nothing = all.map(|line| format!("{} 0", line.split(' ').next().expect("a table")));
    assert_eq!(purge(&cluster, "'customer', 'mallory', dry_run => false"), nothing);
    assert_eq!(purge(&cluster, "null, 'bob'"), nothing, "another type");
    assert_eq!(
        code(&mut cluster.connect(DB), "select outbox_purge('customer', null)"),
        SqlState::NULL_VALUE_NOT_ALLOWED
    );
}

#[test]
fn a_purge_refuses_messages_in_flight_or_locked_and_then_removes_nothing() {
    let cluster = quiet_cluster();
    two_customers(&cluster);
    let before = rows_with(&cluster, "mallory");
    let purge = "select outbox_purge('customer', 'mallory', dry_run => false)";
    let mut other = cluster.connect(DB);
    for table in ["outbox", "outbox_waiting", "outbox_dead"] {
        other.run(&format!(
            "begin; select from {table} where key = 'customer:mallory' for update"
        ));
        assert_eq!(
            code(&mut cluster.connect(DB), purge),
            SqlState::OBJECT_IN_USE,
            "{table}"
        );
        other.run("rollback");
    }
    cluster.exec(
        DB,
        "select count(*) from outbox_internal.claim_unleased('default', -1, 3600, 100, 1000000)",
    );
    assert_eq!(
        code(&mut cluster.connect(DB), purge),
        SqlState::OBJECT_IN_USE,
        "in flight"
    );
    assert_eq!(rows_with(&cluster, "mallory"), before);
    cluster.exec(DB, "update outbox set claim_until = now() - interval '1 second'");
    cluster.exec(DB, purge);
    assert_eq!(rows_with(&cluster, "mallory"), 0);
}

#[test]
fn purging_the_dead_letter_that_blocks_a_key_unblocks_the_key() {
    let broker = Broker::shared();
    let (exchange, queue) = fresh_names();
    broker.declare_exchange(&exchange, "topic", true);
    broker.declare_queue(&queue, Value::Null);
    broker.bind(&queue, &exchange, "customer.good");
    let cluster = outbox_cluster_with(broker, &exchange, &["outbox.max_attempts = 1"]);
    for (customer, operation) in [("1", "bad"), ("2", "good"), ("1", "bad"), ("3", "good")] {
        cluster.exec(
            DB,
            &format!(
                "with e as (insert into outbox_events (id, type, payload, aggregate_type, aggregate_id, operation)
                            values (gen_random_uuid(), 'T', '{customer}', 'customer', '{customer}', '{operation}') returning seq)
                 select outbox_enqueue(seq, 'team:1') from e"
            ),
        );
        wait_true(
            &cluster,
            "a dead letter",
            "select exists (select from outbox_dead where blocks)",
        );
    }
    wait_true(&cluster, "three behind it", "select count(*) = 3 from outbox_waiting");
    purge(&cluster, "'customer', '1', dry_run => false");
    wait_drained(&cluster);
    let arrived: Vec<Value> = all_of(broker, &queue)
        .iter()
        .map(|delivery| delivery.json()["payload"].clone())
        .collect();
    assert_eq!(arrived, [json!(2), json!(3)]);
    wait_true(
        &cluster,
        "the count of pending messages",
        "select pending = 0 from outbox_status",
    );
}

// ---- other users of the tables --------------------------------------------------------------------------------------

/// Postgres refuses to update or delete rows of a published table without a replica identity.
#[test]
fn a_publication_for_all_tables_makes_no_operation_fail() {
    let cluster = Stage::new(&["wal_level = logical"]).cluster;
    cluster.exec(DB, "create publication everything for all tables");
    cluster.exec(
        DB,
        "select outbox_publish('T', '{}', 'order', n::text) from generate_series(1, 5) n",
    );
    cluster.draw_seqs(99);
    cluster.exec(DB, "select outbox_enqueue(99, 'k')");
    wait_published(&cluster, 5);
    wait_true(&cluster, "a dead letter", "select exists (select from outbox_dead)");
    for sql in [
        "select outbox_retry_where(seq_from => 1, dry_run => false)",
        "select outbox_replay(seq_from => 1, dry_run => false)",
        "select outbox_inbox_receive('c', 'm'), outbox_inbox_forget('c'), outbox_inbox_receive('c', 'm')",
        "select outbox_internal.make_partitions(86400)",
        "insert into outbox_history (seq, enqueued_at, published_at, attempts, partition, destination, key)
         select 1, now(), now() + n * interval '1 hour', 1, 0, 'default', 'order:1' from generate_series(0, 3) n",
        "select table_name, rows from outbox_purge('order', '1', dry_run => false)",
        "select outbox_internal.expire_dead(0, 10, 'tomorrow')",
        // As maintenance does it.
        "delete from outbox_history_default; delete from outbox_audit",
        "select outbox_trim_inbox(0, 100, 'tomorrow'), outbox_internal.trim_events(0, 0, 100, 'tomorrow'), outbox_internal.trim_attempts(0, 0, 100, 'tomorrow')",
        "select outbox_internal.drop_partitions(0, 100, now() + interval '10 days')",
        "select outbox_configure(partition_count => 4)",
    ] {
        beside_maintenance(|| cluster.connect(DB).batch_execute(sql));
        if sql.contains("outbox_replay") {
            // A purge is refused while a message of its key is in flight.
            wait_drained(&cluster);
            wait_published(&cluster, 10);
        }
    }
    assert_eq!(
        cluster.query_one::<i64>(DB, "select count(*) from outbox_audit"),
        1,
        "only the audit row of the last call"
    );
}

/// With the old number of partitions, a key would be in two partitions.
#[test]
fn a_snapshot_older_than_a_change_of_partitions_cannot_retry_or_replay() {
    let cluster = quiet_cluster();
    dead_letters(&cluster);
    for call in ["outbox_retry_where", "outbox_replay"] {
        let mut old = cluster.connect(DB);
        old.run("begin isolation level repeatable read; select count(*) from pg_class");
        let partitions = if call == "outbox_replay" { 8 } else { 4 };
        cluster.exec(DB, &format!("select outbox_configure(partition_count => {partitions})"));
        let call = format!("select {call}(seq_from => 1, dry_run => false)");
        assert_eq!(code(&mut old, &call), SqlState::T_R_SERIALIZATION_FAILURE, "{call}");
        old.run("rollback");
    }
    assert_eq!(seqs(&cluster, "outbox_dead").len(), 6);
}

#[test]
fn a_call_about_one_message_finds_its_destination_or_names_several() {
    let cluster = quiet_cluster();
    cluster.exec(
        DB,
        "insert into outbox_dead (seq, enqueued_at, attempts, partition, destination, reason)
         select seq, now(), 1, 0, destination, 'no'
         from (values (1, 'hook'), (2, 'audit'), (2, 'hook'), (3, 'default'), (3, 'hook')) v (seq, destination)",
    );
    let done = |call: &str| cluster.query_one::<bool>(DB, &format!("select {call}"));
    assert!(done("outbox_retry(1)"));
    let waits = "select array_agg(seq || ' ' || destination) from outbox";
    assert_eq!(cluster.query_one::<Vec<String>>(DB, waits), ["1 hook"]);
    for call in ["outbox_retry(2)", "outbox_discard(2)"] {
        let error = refused(&cluster, &format!("select {call}"));
        assert_eq!(error.code(), &SqlState::CARDINALITY_VIOLATION, "{error:?}");
        assert!(error.message().contains("audit, hook"), "{error:?}");
    }
    assert!(done("outbox_discard(2, 'audit')") && done("outbox_discard(2)"));
    let ended = "select array_agg(destination order by published_at) from outbox_history";
    assert_eq!(cluster.query_one::<Vec<String>>(DB, ended), ["audit", "hook"]);
    // The default one comes first, as it always did.
    assert!(done("outbox_retry(3)"));
    let first = "select destination from outbox_messages where seq = 3 and status = 'ready'";
    assert_eq!(cluster.query_one::<String>(DB, first), "default");
    assert!(done("outbox_retry(3)"));
    assert_eq!(cluster.query_one::<i64>(DB, "select count(*) from outbox_dead"), 0);
}
