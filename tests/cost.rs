//! Costs that must not grow: they are measured in blocks that are read and steps, never in time, on a real Postgres.

use postgres::Client;
use serde_json::Value;
use support::{Broker, Cluster, Mode, Proxy};
use support::{
    DB, Event, Session, Stage, exchange_and_queue, idle_cluster, quiet_cluster_with, unconnected_cluster,
    wait_connected, wait_drained, wait_published, wait_true,
};

/// A server that delivers nothing and on which only the test collects statistics.
fn quiet_cluster() -> Cluster {
    quiet_cluster_with(&["autovacuum = off"])
}

/// Runs a statement and returns the number of blocks that it and its functions read.
fn blocks(client: &mut Client, sql: &str) -> i64 {
    let explain = format!("explain (analyze, buffers, format json, timing off) {sql}");
    let row = client
        .query_one(&explain, &[])
        .unwrap_or_else(|error| panic!("{sql}: {error:?}"));
    let plan: Value = row.get(0);
    let count = |name: &str| {
        plan[0]["Plan"][name]
            .as_i64()
            .unwrap_or_else(|| panic!("{name}: {plan}"))
    };
    count("Shared Hit Blocks") + count("Shared Read Blocks")
}

// ---- enqueue --------------------------------------------------------------------------------------------------------

/// The number of messages in each quarter whose blocks are counted.
const QUARTER: u32 = 2000;

/// States of the planner's statistics: it takes the tables for empty, or as they were some time ago.
const STATISTICS: [(&str, &str); 2] = [
    ("never analyzed", ""),
    (
        "analyzed while it was empty",
        "vacuum analyze outbox; vacuum analyze outbox_waiting; vacuum analyze outbox_events",
    ),
];

/// Runs `sql` for the messages from $from to $to, a quarter of all messages each time. No quarter may cost over 20 %
/// more than the first.
fn assert_linear(client: &mut Client, what: &str, sql: &str) {
    let mut run = |from: u32, to: u32| {
        let sql = sql.replace("$from", &from.to_string()).replace("$to", &to.to_string());
        blocks(client, &sql)
    };
    run(4 * QUARTER + 1, 4 * QUARTER + 100); // what is read once in a session
    let quarters: Vec<i64> = (0..4).map(|n| run(n * QUARTER + 1, (n + 1) * QUARTER)).collect();
    assert!(
        quarters[3] * 10 <= quarters[0] * 12,
        "{what}: blocks of each {QUARTER}: {quarters:?}"
    );
}

fn with_statistics(made: &str) -> (Cluster, Client) {
    let cluster = quiet_cluster();
    let mut client = cluster.connect(DB);
    for statement in made.split(';').filter(|statement| !statement.is_empty()) {
        client.run(statement);
    }
    (cluster, client)
}

#[test]
fn the_last_of_many_enqueues_costs_what_the_first_did_with_any_statistics() {
    let enqueues = [
        (
            "with a key",
            "select outbox_enqueue(n, n::text) from generate_series($from, $to) n",
        ),
        (
            "without one",
            "select outbox_enqueue(n) from generate_series($from, $to) n",
        ),
        (
            "at a time",
            "select outbox_enqueue(n, n::text, available_at => now() + interval '1 day') from generate_series($from, $to) n",
        ),
        (
            "two at once",
            "select outbox_enqueue_many(array[n, n + 1000000], n::text) from generate_series($from, $to) n",
        ),
    ];
    for (which, made) in STATISTICS {
        for (what, sql) in enqueues {
            let (cluster, mut client) = with_statistics(made);
            let events = format!(
                "insert into outbox_events (seq, id, type, payload)
                 select n, gen_random_uuid(), 'T', '{{}}' from generate_series(1, {}) n",
                4 * QUARTER + 100
            );
            client.run(&events);
            cluster.draw_seqs(2_000_000);
            assert_linear(&mut client, &format!("{what}, {which}"), sql);
        }
    }
}

#[test]
fn a_receive_costs_the_same_with_one_and_with_many_names_of_consumers() {
    for (which, made) in STATISTICS {
        let (_cluster, mut client) = with_statistics(made);
        client.run("create role reader in role outbox_consumer; set role reader");
        let mut receive = |id: &str| blocks(&mut client, &format!("select outbox_inbox_receive('c', '{id}')"));
        let costs = ["m1", "m2", "m3"].map(&mut receive);
        client.run(
            "reset role; insert into outbox_inbox_owners select 'c' || n, 'reader' from generate_series(1, 20000) n",
        );
        client.run("set role reader");
        let many = blocks(&mut client, "select outbox_inbox_receive('c', 'm4')");
        // The index has one level more, which is read for the name.
        assert!(many <= costs[2] + 2, "{which}: {costs:?}, then {many} blocks");
    }
}

#[test]
fn an_action_on_one_message_costs_the_same_with_few_and_many_waiting() {
    for (which, made) in STATISTICS {
        let (cluster, mut client) = with_statistics(made);
        cluster.draw_seqs(20_000);
        let mut costs = Vec::new();
        for waits in [100, 20_000] {
            let more =
                format!("select outbox_enqueue_many(array(select g from generate_series(1, {waits}) g), 'one key')");
            client.run(&more);
            let mut all = Vec::new();
            for sql in [
                "select outbox_retry($seq)",
                "select outbox_wait($seq, '0')",
                "select outbox_discard($seq)",
            ] {
                let mut cost = |seq: i64| blocks(&mut client, &sql.replace("$seq", &seq.to_string()));
                cost(waits - 1); // what is read once in a session
                all.push((sql, cost(waits - 2)));
            }
            costs.push(all);
        }
        for (few, many) in costs[0].iter().zip(&costs[1]) {
            // One more level of the index for each partition that is searched.
            assert!(
                many.1 <= few.1 * 2 + 20,
                "{which}: {few:?} with 100, {many:?} with 20,000"
            );
        }
    }
}

#[test]
fn the_search_for_the_destination_of_a_rewind_costs_the_same_whatever_waits_or_is_kept_by_a_held_snapshot() {
    for (which, made) in STATISTICS {
        let (cluster, mut client) = with_statistics(made);
        let mut holder = cluster.connect(DB);
        hold_snapshot(&mut holder);
        // Of the destinations a to e, c alone has a message from the seq on.
        let mut costs_after = |from: i64, count: i64| {
            let until = from + count;
            client.run(&format!(
                "insert into outbox (seq, partition, destination)
                 select n, 1, d from generate_series({from}, {until}) n, unnest('{{a,b,c,d,e,waits}}'::text[]) d;
                 delete from outbox where destination <> 'waits' and (seq, destination) <> ({until}, 'c')"
            ));
            let search = format!(
                "select outbox_internal.lanes_with_messages('{{a,b,c,d,e}}', '{{1,1,1,1,1}}', array_fill({until}::bigint, '{{5}}'))"
            );
            let found = client.query(&search, &[]).expect("lanes");
            let found: Vec<i64> = found.iter().map(|row| row.get(0)).collect();
            assert_eq!(found, [2]);
            blocks(&mut client, &search)
        };
        let few = costs_after(1, 50);
        let many = costs_after(1_000, 20_000);
        // The index has one level more.
        assert!(many <= few + 10, "{which}: {few} blocks, then {many}");
    }
}

#[test]
fn the_blocked_keys_of_a_partition_cost_the_same_whatever_is_blocked_in_others() {
    for (which, made) in STATISTICS {
        let (_cluster, mut client) = with_statistics(made);
        let read = "select * from outbox_internal.blocked_keys('d', '{2}')";
        let mut costs_after = |partition: i64, keys: i64| {
            client.run(&format!(
                "insert into outbox_waiting (seq, enqueued_at, partition, state, destination, key)
                 select {partition} * 100000 + n, now(), {partition}, 'g', 'd', n::text from generate_series(1, {keys}) n"
            ));
            blocks(&mut client, read)
        };
        let costs = [(2, 20), (1, 10_000), (3, 10_000)].map(|(partition, keys)| costs_after(partition, keys));
        // The index has one or two levels more, which are read for each key.
        assert!(costs[2] < costs[0] * 3, "{which}: {costs:?} blocks");
    }
}

#[test]
fn a_notice_costs_the_same_with_few_and_many_dead_letters() {
    for (which, made) in STATISTICS {
        let (_cluster, mut client) = with_statistics(made);
        client.run("create server shop foreign data wrapper outbox_amqp options (dead_letters_to 'default')");
        let mut costs = Vec::new();
        for (from, to) in [(1, 100), (101, 20_000)] {
            client.run(&format!(
                "insert into outbox_events (seq, id, type, payload)
                   select n, gen_random_uuid(), 'T', '{{}}' from generate_series({from}, {to}) n;
                 insert into outbox_dead (seq, enqueued_at, attempts, partition, destination, reason)
                   select n, now(), 1, 0, 'shop', 'unroutable: NO_ROUTE' from generate_series({from}, {to}) n;
                 select setval('outbox_events_seq_seq', 20000 + {to})"
            ));
            let mut cost = |seq: i32| {
                blocks(
                    &mut client,
                    &format!("select outbox_internal.notify_dead('{{{seq}}}', '{{shop}}')"),
                )
            };
            cost(to - 1); // what is read once in a session
            costs.push(cost(to - 2));
        }
        assert!(costs[1] <= costs[0] + 20, "{which}: {costs:?}");
    }
}

// ---- in flight ------------------------------------------------------------------------------------------------------

#[test]
fn a_worker_has_at_most_2000_messages_of_a_destination_in_flight() {
    let broker = Broker::shared();
    let (exchange, _) = exchange_and_queue(broker);
    let proxy = Proxy::start(broker.port());
    let url = format!("amqp://127.0.0.1:{}", proxy.port());
    let cluster = unconnected_cluster(&url, &exchange, &["outbox.workers = 0"]);
    // Messages that wait behind dead letters. The worker reads which keys are blocked when it starts.
    cluster.exec(
        DB,
        "begin;
         insert into outbox_events (seq, id, type, payload) select n, gen_random_uuid(), 'T', '{}' from generate_series(1, 8000) n;
         insert into outbox_dead (seq, enqueued_at, partition, attempts, destination, key, reason, blocks)
         select n, now(), outbox_crc32('k' || n % 8) % 16, 1, 'default', 'k' || n % 8, 'a reason', true from generate_series(1, 8) n;
         insert into outbox_waiting (seq, enqueued_at, partition, state, destination, key)
         select n, now(), outbox_crc32('k' || n % 8) % 16, 'g', 'default', 'k' || n % 8 from generate_series(9, 4800) n;
         commit",
    );
    cluster.set_conf("outbox.workers", "1");
    wait_connected(&cluster);
    // A destination that has answered may have a full window.
    cluster.exec(DB, "select outbox_enqueue(8000)");
    wait_published(&cluster, 1);
    proxy.mode(Mode::DropReplies);
    // At the same time these may go, and others are ready.
    cluster.exec(
        DB,
        "begin;
         select outbox_enqueue_many(array(select g from generate_series(4801, 7999) g));
         select count(outbox_discard(seq)) from outbox_dead;
         commit",
    );
    let claimed = "select count(*) from outbox where claim_token is not null";
    // The worker claims no more messages when less than 1/8 of its window is free.
    wait_true(&cluster, "its window to be full", &format!("select ({claimed}) > 1750"));
    let max_in_flight = cluster.query_one::<i64>(
        DB,
        &format!("select greatest(({claimed}), (select in_flight from outbox_status))"),
    );
    assert!(max_in_flight <= 2000, "{max_in_flight} in flight");
    let both = "select count(*) filter (where seq <= 4800) > 0 and count(*) filter (where seq > 4800) > 0 from outbox where claim_token is not null";
    assert!(cluster.query_one::<bool>(DB, both), "neither kind waits for the other");
    proxy.mode(Mode::Pass);
    proxy.reset_all();
    let seen = format!("select ({claimed}) <= 2000 and count(*) = 8000 from outbox_history");
    wait_true(&cluster, "all to be published", &seen);
}

// ---- views ----------------------------------------------------------------------------------------------------------

/// The views that `outboxctl top`, its page and a dashboard poll.
const POLLED: [&str; 5] = [
    "select * from outbox_status",
    "select * from outbox_destination_status",
    "select * from outbox_partition_status",
    "select * from outbox_worker_status",
    "select * from outbox_health",
];

#[test]
fn the_views_cost_the_same_after_messages_that_a_held_snapshot_keeps() {
    let broker = Broker::shared();
    let (exchange, _) = exchange_and_queue(broker);
    let cluster = unconnected_cluster(&broker.url(), &exchange, &["outbox.workers = 1", "autovacuum = off"]);
    wait_connected(&cluster);
    let wait_counted = || {
        wait_true(
            &cluster,
            "the workers to count the messages",
            "select not exists (select from outbox_internal.shared_memory('first messages') f (destination text))",
        )
    };
    wait_counted();
    let mut client = cluster.connect(DB);
    let mut costs = || {
        POLLED.map(|sql| {
            blocks(&mut client, sql); // what is read once in a session
            blocks(&mut client, sql)
        })
    };
    let before = costs();
    let mut holder = cluster.connect(DB);
    let mut held = holder
        .build_transaction()
        .isolation_level(postgres::IsolationLevel::RepeatableRead)
        .start()
        .expect("begin");
    held.query_one("select count(*) from outbox", &[]).expect("a snapshot");
    cluster.exec(
        DB,
        "select outbox_publish('T', '{}', 'o', n::text) from generate_series(1, 6000) n",
    );
    wait_drained(&cluster);
    wait_counted();
    let after = costs();
    let walk = blocks(&mut cluster.connect(DB), "select * from outbox_internal.first_pending");
    assert!(
        walk > 1000,
        "the snapshot keeps the rows of delivered messages: {walk} blocks"
    );
    held.rollback().expect("rollback");
    for ((sql, before), after) in POLLED.iter().zip(before).zip(after) {
        // The catalogs and the rows of workers are updated meanwhile.
        assert!(
            after <= before * 3 / 2 + 40,
            "{sql}: {before} blocks before, {after} after"
        );
    }
}

// ---- views while something waits ------------------------------------------------------------------------------------

/// The number of blocks that each view reads: the minimum of three runs. So blocks that are read once in a session do
/// not count, nor those of a result that the first run stores for later runs.
fn costs_of(client: &mut Client, views: &[&str]) -> Vec<i64> {
    let mut cost = |sql: &&str| (0..3).map(|_| blocks(client, sql)).min().unwrap_or_default();
    views.iter().map(&mut cost).collect()
}

/// Takes a snapshot that keeps rows deleted from now on.
fn hold_snapshot(holder: &mut Client) {
    holder.run("begin isolation level repeatable read; select count(*) from outbox");
}

/// Asserts that the costs have not grown, apart from concurrent updates of the catalogs and the rows of workers.
fn assert_flat(what: &str, before: &[i64], after: &[i64]) {
    for ((sql, before), after) in POLLED.iter().zip(before).zip(after) {
        assert!(
            *after <= before * 5 / 4 + 40,
            "{what}: {sql}: {before} blocks before, {after} after"
        );
    }
}

#[test]
fn the_views_cost_the_same_while_a_message_waits_behind_rows_that_a_held_snapshot_keeps() {
    let broker = Broker::shared();
    let (exchange, _) = exchange_and_queue(broker);
    let cluster = unconnected_cluster(&broker.url(), &exchange, &["outbox.workers = 1", "autovacuum = off"]);
    wait_connected(&cluster);
    let mut client = cluster.connect(DB);
    client.run(
        "create server away foreign data wrapper outbox_amqp options (url 'amqp://localhost');
             select outbox_pause('away');
             select outbox_publish('T', '{}', destination => 'away')",
    );
    let mut holder = cluster.connect(DB);
    hold_snapshot(&mut holder);
    let mut costs_after = |count: i32| {
        let publish = format!("select outbox_publish('T', '{{}}', 'o', n::text) from generate_series(1, {count}) n");
        cluster.exec(DB, &publish);
        wait_true(&cluster, "all but one to end", "select count(*) = 1 from outbox");
        costs_of(&mut client, &POLLED)
    };
    let few = costs_after(300);
    let many = costs_after(3000);
    let walk = blocks(&mut cluster.connect(DB), "select * from outbox_internal.first_pending");
    assert!(
        walk > 1000,
        "the snapshot keeps the rows of delivered messages: {walk} blocks"
    );
    assert_flat("delivered", &few, &many);
}

#[test]
fn the_views_cost_the_same_wherever_a_held_snapshot_keeps_rows_in_a_lane() {
    let cluster = quiet_cluster();
    let mut client = cluster.connect(DB);
    let mut holder = cluster.connect(DB);
    hold_snapshot(&mut holder);
    let publish = |count: i32| {
        let sql = format!("select outbox_publish('T', '{{}}', 'o', n::text) from generate_series(1, {count}) n");
        cluster.exec(DB, &sql);
    };
    publish(20); // before them
    let mut costs_after = |count: i32| {
        publish(count);
        cluster.exec(
            DB,
            "select outbox_discard(seq) from outbox where seq > 20 and key <> 'o:1'",
        );
        publish(1); // behind them
        let waits = "select seq from outbox_internal.first_shown order by 1 limit 1";
        assert_eq!(cluster.query_one::<i64>(DB, waits), 1);
        costs_of(&mut client, &POLLED)
    };
    let few = costs_after(300);
    let many = costs_after(3000);
    assert_flat("discarded", &few, &many);
    let differs = "with seen as (select destination, partition, seq, enqueued_at from outbox_internal.first_shown), there as (table outbox_internal.first_pending)
                   select coalesce(string_agg(x::text, ' '), '') from ((table seen except table there) union all (table there except table seen)) x";
    assert_eq!(
        cluster.query_one::<String>(DB, differs),
        "",
        "first_shown differs from first_pending"
    );
}

#[test]
fn the_views_cost_the_same_after_dead_letters_that_a_held_snapshot_keeps() {
    let cluster = idle_cluster(&["autovacuum = off"]); // maintenance runs
    let counted = "select dead is not null from outbox_internal.counters";
    wait_true(&cluster, "maintenance to count the dead letters", counted);
    let mut client = cluster.connect(DB);
    let mut holder = cluster.connect(DB);
    hold_snapshot(&mut holder);
    let dead_letter = |from: i32, to: i32| {
        let sql = format!(
            "insert into outbox_dead (seq, enqueued_at, attempts, partition, destination, key, reason, blocks)
             select n, now(), 1, n % 16, 'default', 'k' || n, 'reason ' || n, true from generate_series({from}, {to}) n"
        );
        cluster.exec(DB, &sql);
    };
    dead_letter(1, 1); // before them
    let mut costs_after = |from: i32, to: i32| {
        dead_letter(from, to + 1);
        let discard = format!("select outbox_discard_where(seq_from => {from}, seq_to => {to}, dry_run => false)");
        cluster.exec(DB, &discard);
        costs_of(&mut client, &POLLED)
    };
    let few = costs_after(2, 300);
    let many = costs_after(302, 3300);
    for ((sql, few), many) in POLLED.iter().zip(&few).zip(&many) {
        assert!(*many <= few + 10, "{sql}: {few} blocks, then {many}");
    }
    // Three are left: one before and two after.
    let assert_left = |left: i32, first: i32| {
        assert_eq!(
            cluster.query_one::<i64>(DB, "select dead from outbox_status"),
            i64::from(left)
        );
        let (_, dead) = support::health(&cluster, "dead letters");
        assert_eq!(dead, format!("{left} dead letter(s), for example: reason {first}"));
        let (_, keys) = support::health(&cluster, "keys");
        let (_, keys) = keys.split_once("for example: ").expect("an example");
        assert_eq!(keys, format!("k{first} (seq {first})"));
    };
    assert_left(3, 1);
    // Deletes by any statement count, and a rolled back delete does not.
    cluster.exec(DB, "begin; delete from outbox_dead where seq = 301; rollback");
    cluster.exec(DB, "begin; savepoint s; delete from outbox_dead; rollback to s; commit");
    assert_left(3, 1);
    cluster.exec(DB, "delete from outbox_dead where seq = 1");
    assert_left(2, 301);
    dead_letter(200, 200);
    assert_left(3, 200);
    cluster.exec(
        DB,
        "select outbox_discard(200), outbox_retry(301), outbox_discard(3301)",
    );
    assert_eq!(cluster.query_one::<i64>(DB, "select dead from outbox_status"), 0);
    assert!(support::health(&cluster, "dead letters").0 && support::health(&cluster, "keys").0);
    cluster.restart();
    wait_true(&cluster, "maintenance to count the dead letters", counted);
    assert_eq!(cluster.query_one::<i64>(DB, "select dead from outbox_status"), 0);
}

#[test]
fn the_status_costs_no_more_while_messages_wait_in_every_lane_than_while_none_does() {
    let cluster = quiet_cluster();
    let mut client = cluster.connect(DB);
    let status = ["select * from outbox_status"];
    let empty = costs_of(&mut client, &status)[0];
    let mut costs = Vec::new();
    for count in [1, 1000] {
        let publish = format!("select outbox_publish('T', '{{}}', 'o', n::text) from generate_series(1, {count}) n");
        cluster.exec(DB, &publish);
        costs.push(costs_of(&mut client, &status)[0]);
    }
    // Five more blocks are allowed: the view then reads which destinations there are, whose, and which are paused or
    // down.
    assert!(
        costs.iter().all(|cost| *cost <= empty + 5),
        "{empty} blocks while nothing waits, then {costs:?}"
    );
}

#[test]
fn no_view_that_is_polled_looks_so_expensive_that_it_is_compiled() {
    let cluster = quiet_cluster();
    let mut client = cluster.connect(DB);
    client.run("create server hook foreign data wrapper outbox_http options (url 'http://localhost')");
    let limit: f64 = client.value("select current_setting('jit_above_cost')::float8");
    for sql in POLLED {
        let row = client
            .query_one(&format!("explain (format json) {sql}"), &[])
            .expect(sql);
        let plan: Value = row.get(0);
        let cost = plan[0]["Plan"]["Total Cost"].as_f64().expect("a cost");
        assert!(cost < limit, "{sql}: {cost} of {limit}");
    }
}

#[test]
fn the_views_cost_the_same_beside_thousands_of_functions_and_views_of_users() {
    const BLOCKS_MAX: i64 = 10_000; // of catalogs, mostly: the health asks for the owner of each object of the extension
    let cluster = quiet_cluster();
    let mut client = cluster.connect(DB);
    let before = costs_of(&mut client, &POLLED);
    assert!(before.iter().all(|cost| *cost < BLOCKS_MAX), "{before:?}");
    client.run(
        "do $$ begin
           for n in 1 .. 4000 loop
             execute format('create function f%s() returns integer language sql begin atomic select %1$s; end', n);
           end loop;
           for n in 1 .. 500 loop
             execute format('create view v%s as select oid from pg_class', n);
           end loop;
         end $$",
    );
    assert_flat(
        "4,000 functions and 500 views",
        &before,
        &costs_of(&mut client, &POLLED),
    );
}

#[test]
fn the_health_scans_each_lane_once() {
    let cluster = quiet_cluster();
    cluster.draw_seqs(1000);
    let mut client = cluster.connect(DB);
    client.run("select outbox_enqueue(n, n::text) from generate_series(1, 1000) n");
    let mut scans = |sql: &str| -> i64 {
        let of_outbox = "select pg_stat_force_next_flush(), coalesce(idx_scan, 0) from pg_stat_user_tables where relname = 'outbox'";
        let count = |client: &mut Client| -> i64 {
            client.query_one(of_outbox, &[]).expect("the statistics"); // the next one sees what was flushed
            client.query_one(of_outbox, &[]).expect("the statistics").get(1)
        };
        let before = count(&mut client);
        client.query(sql, &[]).expect(sql);
        count(&mut client) - before
    };
    let one = scans("select * from outbox_internal.first_pending");
    assert_eq!(one, 17, "16 lanes and the end");
    let first = scans("select * from outbox_health");
    assert!(first <= 2 * one, "{first} scans to find the lanes");
    scans("select * from outbox_health"); // stores where each lane begins
    assert_eq!(
        scans("select * from outbox_health"),
        0,
        "the stored positions are not used"
    );
}

// ---- a worker with nothing to do ------------------------------------------------------------------------------------

/// Statements that only the worker runs, each second or with each heartbeat.
const OF_IDLE_WORKER: [&str; 5] = [
    "outbox_internal.not_adopted()",
    "pg_catalog.parse_ident(s.relation)",
    "outbox_internal.heartbeat(",
    "outbox_internal.leases()",
    "outbox_internal.lease_renew(",
];
/// Statements that it runs when a catalog has changed, and every 10 s.
const OF_CATALOGS: [&str; 2] = ["from pg_db_role_setting", "outbox_internal.destinations()"];

const BEATS: i64 = 20;

#[test]
fn an_idle_worker_plans_no_statement_and_releases_no_lease() {
    let cluster = Stage::new(&[
        "shared_preload_libraries = 'outbox,pg_stat_statements'",
        "pg_stat_statements.track = all",
        "pg_stat_statements.track_planning = on",
    ])
    .cluster;
    let mut client = cluster.connect(DB);
    let beats = |n| {
        for _ in 0..n {
            cluster.reload(); // a heartbeat is due at once
            let beat = "select bool_and(heartbeat_at > pg_conf_load_time()) from outbox_workers";
            wait_true(&cluster, "a heartbeat", beat);
        }
    };
    beats(3);
    let statistics = "create extension pg_stat_statements; select pg_stat_statements_reset()";
    client.run(statistics);
    beats(BEATS);
    let sql = "select query, calls, plans from pg_stat_statements
               where userid = 'outbox_worker'::regrole and query like '%' || $1 || '%'";
    let mut calls_of = |what: &str| {
        let statements = client.query(sql, &[&what]).expect("the statistics");
        let mut calls = Vec::new();
        for statement in &statements {
            let (query, count, plans): (String, i64, i64) = (statement.get(0), statement.get(1), statement.get(2));
            assert_eq!(plans, 0, "plans for {count} calls: {query}");
            calls.push(count);
        }
        calls
    };
    for what in OF_IDLE_WORKER {
        let calls = calls_of(what);
        assert!(
            !calls.is_empty() && calls.iter().all(|calls| *calls >= BEATS),
            "{what}: {calls:?}"
        );
    }
    for what in OF_CATALOGS {
        let calls = calls_of(what).into_iter().max().unwrap_or_default();
        assert!(
            (1..BEATS / 2).contains(&calls),
            "{what} ran {calls} times in {BEATS} heartbeats, with one change of a catalog"
        );
    }
    for what in ["outbox_internal.lease_release(", "outbox_internal.lease_take("] {
        assert!(calls_of(what).is_empty(), "{what} for no partition");
    }
}

/// A scheduled message changes when something is due, not what is ready: a commit of it must not make a worker read
/// every lane, with all rows that a held snapshot keeps there.
#[test]
fn a_commit_of_a_scheduled_message_makes_no_worker_read_lanes_or_blocked_keys() {
    let stage = Stage::new(&[
        "shared_preload_libraries = 'outbox,pg_stat_statements'",
        "pg_stat_statements.track = all",
    ]);
    stage.exec(DB, "create extension pg_stat_statements");
    let mut holder = stage.connect(DB);
    hold_snapshot(&mut holder);
    stage.publish_run("default", "k", 2000);
    wait_published(&stage, 2000);
    let mut published = 2000;
    let mut blocks_of_commits = |scheduled: bool| {
        stage.exec(DB, "select pg_stat_statements_reset()");
        for _ in 0..BEATS {
            if scheduled {
                stage.publish(Event::new("later").with("available_at => now() + '1 h'"));
            }
            stage.publish("now"); // the worker has seen the commit before it when this one is published
            published += 1;
            wait_published(&stage, published);
        }
        let sql = "select coalesce(sum(shared_blks_hit + shared_blks_read), 0)::bigint from pg_stat_statements
                   where userid = 'outbox_worker'::regrole and query not like 'insert into%'";
        stage.query_one::<i64>(DB, sql)
    };
    let (alone, beside) = (blocks_of_commits(false), blocks_of_commits(true));
    // A read of all lanes and blocked keys costs over 400 blocks.
    assert!(
        beside - alone < 20 * BEATS,
        "{BEATS} commits read {alone} blocks, and {beside} with a scheduled message before each"
    );
}
