//! Tests that ended messages and events are removed once their retention is over, and not before: partitions of the
//! history, dead letters, events. Also tests that maintenance removes them, and that it delays no delivery. Time passes
//! by argument: each function takes the moment to use as the current time.

use postgres::error::SqlState;
use support::*;
use support::{Broker, Cluster, wait_until};

const DAY_S: i32 = 86_400;
const MONTH_S: i32 = 30 * DAY_S;

/// Writes history rows that ended at these times.
fn history(cluster: &Cluster, times: &[&str]) {
    for time in times {
        cluster.exec(
            DB,
            &format!(
                "insert into outbox_history (seq, enqueued_at, published_at, attempts, partition, destination)
                 values (0, '{time}', '{time}', 1, 0, 'default')"
            ),
        );
    }
}

/// Creates partitions at a moment; returns their number.
fn make(cluster: &Cluster, retention_s: Option<i32>, moment: &str) -> i32 {
    let retention_s = retention_s.map_or("null".into(), |seconds| seconds.to_string());
    cluster.query_one(
        DB,
        &format!("select outbox_internal.make_partitions({retention_s}, '{moment}')"),
    )
}

/// Calls a function that removes what is older than `retention_s` at a moment; returns the number of removed rows or
/// partitions.
fn clear(cluster: &Cluster, function: &str, retention_s: i32, batch: i32, moment: &str) -> i64 {
    let sql = format!("select {function}({retention_s}, {batch}, '{moment}')::bigint");
    cluster.query_one(DB, &sql)
}

/// The partitions with their numbers of rows, in order of time, the default partition last.
fn partitions(cluster: &Cluster) -> Vec<String> {
    let sql = "select replace(c.relname, 'outbox_history_', ''), (select count(*) from outbox_history h where h.tableoid = c.oid)
               from pg_inherits i join pg_class c on c.oid = i.inhrelid left join outbox_history_partitions() p on p.partition = c.oid
               where i.inhparent = 'outbox_history'::regclass order by p.starts_at nulls last";
    let rows = cluster.connect(DB).query(sql, &[]).expect("partitions");
    rows.iter()
        .map(|row| format!("{} {}", row.get::<_, String>(0), row.get::<_, i64>(1)))
        .collect()
}

/// Applies the settings, which restarts the worker and maintenance; maintenance otherwise is due once a minute. After
/// the call no maintenance with the previous settings is running.
fn restart_maintenance(cluster: &Cluster, settings: &[(&str, i32)]) {
    let offset = cluster.log_offset();
    let set = settings
        .iter()
        .map(|(name, value)| format!("alter database {DB} set {name} = {value};"));
    cluster.exec(DB, &set.collect::<String>());
    let since: String = cluster.query_one(DB, "select clock_timestamp()::text");
    cluster.wait_for_log("outbox server-1: started", offset);
    let before = format!(
        "select not exists (select from pg_stat_activity where backend_type = 'outbox maintenance' and backend_start < '{since}')"
    );
    wait_true(cluster, "earlier maintenance to end", &before);
}

// ---- history --------------------------------------------------------------------------------------------------------

#[test]
fn partitions_are_made_ahead_and_dropped_when_all_of_their_rows_are_old() {
    let cluster = quiet_cluster();
    history(&cluster, &["2029-12-31 23:00Z"]); // otherwise there would be no partitions yet
    assert_eq!(make(&cluster, Some(MONTH_S), "2030-01-01 12:00Z"), 4);
    assert_eq!(make(&cluster, Some(MONTH_S), "2030-01-01 18:00Z"), 0);
    assert_eq!(make(&cluster, Some(MONTH_S), "2030-01-02 00:01Z"), 1);
    history(
        &cluster,
        &[
            "2030-01-01 00:00Z",
            "2030-01-01 23:59:59Z",
            "2030-01-02 00:00Z",
            "2030-01-05 12:00Z",
        ],
    );
    assert_eq!(
        partitions(&cluster),
        [
            "p20300101 2",
            "p20300102 1",
            "p20300103 0",
            "p20300104 0",
            "p20300105 1",
            "default 1"
        ]
    );
    // The second of them is not old enough as a whole, and the requested partitions are kept.
    assert_eq!(
        clear(
            &cluster,
            "outbox_internal.drop_partitions",
            MONTH_S,
            10,
            "2030-01-31 23:59:59Z"
        ),
        0
    );
    assert_eq!(
        clear(
            &cluster,
            "outbox_internal.drop_partitions",
            MONTH_S,
            10,
            "2030-02-01 12:00Z"
        ),
        1
    );
    assert_eq!(
        partitions(&cluster),
        ["p20300102 1", "p20300103 0", "p20300104 0", "p20300105 1", "default 1"]
    );
    assert_eq!(
        clear(&cluster, "outbox_internal.drop_partitions", MONTH_S, 3, "2031-01-01Z"),
        3,
        "a batch"
    );
    assert_eq!(
        clear(&cluster, "outbox_internal.drop_partitions", MONTH_S, 3, "2031-01-01Z"),
        1
    );
    assert_eq!(partitions(&cluster), ["default 1"]);
}

#[test]
fn the_partition_step_follows_the_retention_and_partitions_never_overlap() {
    let cluster = quiet_cluster();
    history(&cluster, &["2029-01-01Z"]);
    make(&cluster, Some(MONTH_S), "2030-01-01 12:00Z"); // to the end of the 4th
    make(&cluster, Some(DAY_S), "2030-01-04 21:30Z");
    make(&cluster, None, "2030-01-05 00:30Z"); // from 1 o'clock on
    make(&cluster, Some(MONTH_S), "2030-03-30 12:00Z");
    // The clock was a year ahead for a moment, and is right again.
    make(&cluster, Some(MONTH_S), "2031-03-30 12:00Z");
    make(&cluster, Some(MONTH_S), "2030-05-01 12:00Z");
    // The clock was a few hours ahead, and so were partitions of hours.
    make(&cluster, Some(DAY_S), "2032-01-01 21:30Z");
    make(&cluster, Some(MONTH_S), "2032-01-01 12:00Z");
    assert_eq!(
        partitions(&cluster),
        [
            "p20300101 0",
            "p20300102 0",
            "p20300103 0",
            "p20300104 0",
            "p2030010500 0",
            "p20300105 0",
            "p20300201 0",
            "p20300301 0",
            "p20300401 0",
            "p20300501 0",
            "p20300502 0",
            "p20300503 0",
            "p20300504 0",
            "p20310330 0",
            "p20310331 0",
            "p20310401 0",
            "p20310402 0",
            "p20320101 0",
            "p2032010121 0",
            "p2032010122 0",
            "p2032010123 0",
            "p2032010200 0",
            "p20320102 0",
            "p20320103 0",
            "p20320104 0",
            "default 1"
        ]
    );
    let gaps = "select count(*) from (select starts_at - lag(ends_at) over (order by starts_at) as gap from outbox_history_partitions()) x
                where gap <> interval '0'";
    assert_eq!(cluster.query_one::<i64>(DB, gaps), 2, "but for two years");
}

#[test]
fn rows_without_a_partition_are_kept() {
    let cluster = quiet_cluster();
    assert_eq!(
        make(&cluster, Some(MONTH_S), "2030-01-01 12:00Z"),
        0,
        "there is no history yet"
    );
    let strays = [
        "2001-01-01Z",
        "2002-01-01Z",
        "2003-01-01Z",
        "2030-01-01 11:00Z",
        "2030-01-02 23:59Z",
        "2099-01-01Z",
    ];
    history(&cluster, &strays);
    // A new partition does not take rows that are in the default one already: it begins later, or is not created.
    assert_eq!(make(&cluster, Some(MONTH_S), "2030-01-01 12:00:30Z"), 3);
    history(&cluster, &["2030-01-01 12:01Z", "2030-01-01 12:02Z"]);
    assert_eq!(
        partitions(&cluster),
        ["p20300101 1", "p20300103 0", "p20300104 0", "default 7"]
    );
    assert_eq!(cluster.query_one::<i64>(DB, "select count(*) from outbox_history"), 8);
}

#[test]
fn a_partition_that_cannot_be_dropped_is_named_and_delays_no_other() {
    let cluster = quiet_cluster();
    history(&cluster, &["2029-01-01Z"]);
    make(&cluster, Some(MONTH_S), "2030-01-01 12:00Z");
    cluster.exec(
        DB,
        "alter table outbox_history_p20300101 owner to postgres; create view v as select * from outbox_history_p20300102",
    );
    let offset = cluster.log_offset();
    cluster.exec(
        DB,
        "set role outbox_worker; select outbox_internal.drop_partitions(0, 10, '2031-01-01')",
    );
    assert_eq!(partitions(&cluster), ["p20300101 0", "p20300102 0", "default 1"]);
    for name in ["p20300101", "p20300102"] {
        cluster.wait_for_log(
            &format!("partition public.outbox_history_{name} of the history is kept"),
            offset,
        );
    }
}

#[test]
fn drop_extension_drops_the_partitions_and_create_extension_starts_over() {
    let cluster = quiet_cluster();
    for schema in ["public", "\"App Outbox\""] {
        cluster.exec(DB, &format!("create schema if not exists {schema}; set search_path = {schema}; drop extension outbox;
            create extension outbox schema {schema};
            insert into outbox_history (seq, enqueued_at, published_at, attempts, partition, destination) values (0, now(), now(), 1, 0, 'default');
            select outbox_internal.make_partitions({MONTH_S})"));
        let count = "select count(*) from pg_class where relkind = 'r' and relname like 'outbox_history_p%'";
        assert!(cluster.query_one::<i64>(DB, count) > 3, "{schema}");
        cluster.exec(DB, "drop extension outbox");
        assert_eq!(cluster.query_one::<i64>(DB, count), 0, "{schema}");
        cluster.exec(DB, "create extension outbox");
    }
    assert_eq!(partitions(&cluster), ["default 0"]);
}

// ---- events and dead letters ----------------------------------------------------------------------------------------

/// Six events of 2001, whose messages are: published, pending, scheduled, dead, pending elsewhere, discarded. And a
/// published event of today.
fn events(cluster: &Cluster) {
    cluster.exec(
        DB,
        "select outbox_publish('T', '{}', 'thing', n::text, available_at => case when n = 3 then '2999-01-01'::timestamptz end)
         from generate_series(1, 7) n;
         update outbox_events set created_at = '2001-01-01Z' where seq <= 6;
         update outbox set destination = 'elsewhere' where seq = 5;
         insert into outbox_dead (seq, enqueued_at, attempts, partition, destination, reason)
         select seq, enqueued_at, 1, partition, destination, 'no' from outbox where seq = 4;
         select outbox_discard(6);
         delete from outbox where seq in (1, 4, 7)",
    );
}

/// Removes events that are older than a day, in batches; returns the remaining seqs.
fn trim_events(cluster: &Cluster, batch: i32) -> Vec<i64> {
    let mut client = cluster.connect(DB);
    client.run("set lock_timeout = '1s'");
    let mut after: i64 = 0;
    for _ in 0..20 {
        let sql = format!("select reached, more from outbox_internal.trim_events({after}, {DAY_S}, {batch})");
        let row = client
            .query_one(sql.as_str(), &[])
            .expect("outbox_internal.trim_events");
        after = row.get(0);
        if !row.get::<_, bool>(1) {
            let seqs = "select coalesce(array_agg(seq order by seq), '{}') from outbox_events";
            return cluster.query_one(DB, seqs);
        }
    }
    panic!("no end");
}

#[test]
fn events_are_removed_once_no_message_needs_them() {
    for batch in [1, 2, 3, 100] {
        let cluster = quiet_cluster();
        events(&cluster);
        assert_eq!(trim_events(&cluster, batch), [2, 3, 4, 5, 7], "batches of {batch}");
        // An event that had to be kept is removed once its message has ended.
        cluster.exec(DB, "select outbox_discard(2), outbox_discard(4)");
        assert_eq!(trim_events(&cluster, batch), [3, 5, 7], "batches of {batch}");
    }
}

/// A session that enqueues an old event again, and maintenance, meet in either order. No message loses its event.
#[test]
fn an_old_event_that_is_enqueued_again_is_kept() {
    let cluster = quiet_cluster();
    events(&cluster);
    let (mut writer, mut keeper) = (cluster.connect(DB), cluster.connect(DB));
    let calls = [
        "outbox_enqueue(1)",
        "outbox_enqueue(1, 'a key')",
        "outbox_enqueue_many(array[1], 'a key', available_at => now() + interval '1 day')",
    ];
    for call in calls {
        writer.run(&format!("begin; select {call}"));
        assert_eq!(
            trim_events(&cluster, 100),
            [1, 2, 3, 4, 5, 7],
            "{call} is not committed"
        );
        writer.run("commit");
        assert_eq!(trim_events(&cluster, 100), [1, 2, 3, 4, 5, 7], "{call} is committed");
        cluster.exec(DB, "select outbox_discard(1)");
    }

    keeper.run(&format!("begin; select outbox_internal.trim_events(0, {DAY_S}, 100)"));
    let refused = std::thread::scope(|scope| {
        let enqueue = scope.spawn(|| writer.batch_execute("select outbox_enqueue(1)"));
        wait_true(
            &cluster,
            "the writer to wait",
            "select exists (select from pg_stat_activity where wait_event_type = 'Lock' and query like '%outbox_enqueue(1)%'
                            and pid <> pg_backend_pid())",
        );
        keeper.run("commit");
        enqueue.join().expect("no panic")
    });
    let code = refused.expect_err("the event is gone").code().cloned();
    assert_eq!(code, Some(SqlState::NO_DATA_FOUND));
}

#[test]
fn a_key_goes_on_at_once_when_its_dead_letter_expires() {
    let broker = Broker::shared();
    let (exchange, queue) = exchange_and_queue(broker);
    let cluster = outbox_cluster_with(broker, &exchange, &["outbox.max_attempts = 1"]);
    broker.unbind(&queue, &exchange, "#");
    cluster.publish_run("default", "k", 2);
    let stands = "select array_agg(status order by seq) = '{dead,blocked}' from outbox_messages";
    wait_true(&cluster, "a blocked message", stands);
    broker.bind(&queue, &exchange, "#");
    let expired = "select outbox_internal.expire_dead(0, 10)";
    assert_eq!(cluster.query_one::<i64>(DB, expired), 1);
    wait_drained(&cluster);
    // A worker looks for keys that are no longer blocked every 30 s in any case.
    let is_at_once = "select max(published_at) - min(published_at) < interval '10 s' from outbox_history";
    assert!(cluster.query_one::<bool>(DB, is_at_once));
}

#[test]
fn dead_letters_expire_into_the_history_with_a_reason() {
    let cluster = quiet_cluster();
    cluster.exec(
        DB,
        "insert into outbox_dead (seq, enqueued_at, died_at, attempts, partition, destination, key, reason)
         select n, '2001-01-01', '2001-01-01Z'::timestamptz + n * interval '1 day', 15, 3, 'default', 'k', 'unroutable ' || n
         from generate_series(1, 5) n",
    );
    assert_eq!(
        clear(&cluster, "outbox_internal.expire_dead", DAY_S, 2, "2001-01-05 12:00Z"),
        2
    );
    assert_eq!(
        clear(&cluster, "outbox_internal.expire_dead", DAY_S, 2, "2001-01-05 12:00Z"),
        1
    );
    assert_eq!(
        clear(&cluster, "outbox_internal.expire_dead", DAY_S, 2, "2001-01-05 12:00Z"),
        0
    );
    let left = "select array_agg(seq order by seq) from outbox_dead";
    assert_eq!(cluster.query_one::<Vec<i64>>(DB, left), [4, 5]);
    let shown =
        "select array_agg(seq || ' ' || attempts || ' ' || key || ' ' || status || ' ' || last_error order by seq)
                from outbox_messages where status <> 'dead'";
    let shown: Vec<String> = cluster.query_one(DB, shown);
    let expected = [1, 2, 3]
        .map(|seq| format!("{seq} 15 k discarded dead for longer than outbox.dead_retention: unroutable {seq}"));
    assert_eq!(shown, expected);
}

// ---- the worker -----------------------------------------------------------------------------------------------------

#[test]
fn maintenance_creates_the_partitions_and_delivery_fills_them() {
    let cluster = Stage::new(&["outbox.retention = -1"]).cluster;
    assert_eq!(partitions(&cluster), ["default 0"], "none while there is no history");
    history(&cluster, &["2001-01-01Z"]);
    restart_maintenance(&cluster, &[("outbox.batch_size", 10)]);
    wait_until("partitions of months", LONG, || partitions(&cluster).len() == 5);
    let others = "select count(*) from outbox_history_partitions() p join pg_class c on c.oid = p.partition
                  where c.relowner <> 'outbox_worker'::regrole";
    assert_eq!(cluster.query_one::<i64>(DB, others), 0);
    cluster.exec(DB, "select outbox_publish('T', '1')");
    wait_published(&cluster, 2);
    assert!(partitions(&cluster)[0].ends_with(" 1"), "{:?}", partitions(&cluster));
}

#[test]
fn maintenance_removes_events_and_dead_letters_by_their_settings() {
    let cluster = Stage::new(&["outbox.events_retention = -1"]).cluster;
    cluster.exec(DB, "select outbox_publish('T', '1')");
    wait_published(&cluster, 1);
    cluster.exec(
        DB,
        "update outbox_events set created_at = '2001-01-01Z';
         insert into outbox_dead (seq, enqueued_at, died_at, attempts, partition, destination, reason)
         values (7, now(), '2001-01-01Z', 1, 0, 'default', 'no')",
    );
    let counts = "select (select count(*) from outbox_events)::text || (select count(*) from outbox_dead)
                  || (select count(*) from outbox_history where seq <> 0)";
    let counts = |cluster: &Cluster| cluster.query_one::<String>(DB, counts);
    // These are kept forever. Maintenance removes old history before dead letters and events, so the end of an old
    // history row shows that it ran. When it removes a second row, the previous run is complete.
    for size in [10, 11] {
        history(&cluster, &["2001-01-01Z"]);
        restart_maintenance(&cluster, &[("outbox.batch_size", size)]);
        wait_true(
            &cluster,
            "the old history row to be removed",
            "select not exists (select from outbox_history where seq = 0)",
        );
    }
    assert_eq!(counts(&cluster), "111");
    restart_maintenance(&cluster, &[("outbox.events_retention", 0)]);
    wait_until("the event to be removed", LONG, || counts(&cluster) == "011");
    restart_maintenance(&cluster, &[("outbox.dead_retention", 0)]);
    wait_until("the dead letter to be removed", LONG, || counts(&cluster) == "002");
    cluster.exec(DB, "select outbox_publish('T', '1')");
    wait_drained(&cluster);
    restart_maintenance(&cluster, &[("outbox.events_retention", -2), ("outbox.retention", 0)]);
    wait_until("everything to be removed", LONG, || counts(&cluster) == "000");
}

#[test]
fn a_reader_of_the_history_delays_its_maintenance_and_no_delivery() {
    let broker = Broker::shared();
    let (exchange, _) = exchange_and_queue(broker);
    let cluster = unconnected_cluster(&broker.url(), &exchange, &[NOTHING_RUNS]);
    history(&cluster, &["2001-01-01Z"]);
    make(&cluster, Some(MONTH_S), "2002-01-01Z");
    let mut reader = cluster.connect(DB);
    reader.run("begin; select count(*) from outbox_messages");

    let offset = cluster.log_offset();
    cluster.set_conf("outbox.databases", "");
    for step in ["make", "drop"] {
        let given_up = format!("outbox: {step} partitions: canceling statement due to lock timeout");
        cluster.wait_for_log(&given_up, offset);
    }
    wait_connected(&cluster);
    cluster.exec(DB, "select outbox_publish('T', '1')");
    let published = "select exists (select from outbox_history where seq = 1)";
    wait_true(&cluster, "the delivery", published);

    // A session that waits for the reader blocks every settle, so it must not wait long.
    let refused = cluster
        .connect(DB)
        .batch_execute("select outbox_internal.drop_partitions(0, 10)");
    assert_eq!(
        refused.expect_err("a reader").code(),
        Some(&SqlState::LOCK_NOT_AVAILABLE)
    );

    reader.run("commit");
    restart_maintenance(&cluster, &[("outbox.batch_size", 11)]);
    wait_until("maintenance", LONG, || {
        let partitions = partitions(&cluster);
        partitions.len() == 5 && !partitions[0].starts_with("p2002")
    });
}

/// Rows of some 5,000 blocks: more ranges of a BRIN index than autovacuum keeps requests for.
const MUCH_HISTORY: i64 = 500_000;

#[test]
fn maintenance_summarizes_a_large_history_without_autovacuum() {
    let cluster = unconnected_cluster("", "x", &[]);
    wait_true(
        &cluster,
        "the worker",
        "select exists (select from outbox_worker_status where alive)",
    );
    history(&cluster, &["now"]);
    restart_maintenance(&cluster, &[("outbox.batch_size", 9)]);
    wait_until("a partition", LONG, || partitions(&cluster).len() > 1);
    // The partition as an earlier version of the extension, or a dump of one, leaves it.
    let partition = "select partition::text from outbox_history_partitions() order by starts_at desc limit 1";
    let partition: String = cluster.query_one(DB, partition);
    let index: String = cluster.query_one(
        DB,
        &format!("select indexrelid::regclass::text from pg_index where indrelid = '{partition}'::regclass"),
    );
    cluster.exec(DB, &format!("alter index {index} set (autosummarize = on)"));
    restart_maintenance(&cluster, &[("outbox.batch_size", 10)]);
    let left = "select count(*) from pg_class c join pg_index i on i.indexrelid = c.oid
                where i.indrelid in (select inhrelid from pg_inherits where inhparent = 'outbox_history'::regclass)
                  and c.reloptions::text like '%autosummarize%'";
    wait_until("no index to ask autovacuum", LONG, || {
        cluster.query_one::<i64>(DB, left) == 0
    });

    let offset = cluster.log_offset();
    cluster.exec(
        DB,
        &format!(
            "insert into outbox_history (seq, enqueued_at, published_at, attempts, partition, destination)
             select n, now(), now(), 1, 0, 'default' from generate_series(1, {MUCH_HISTORY}) n"
        ),
    );
    let log = cluster.log().split_off(offset);
    assert!(
        !log.contains("request for BRIN range summarization"),
        "the log is flooded"
    );

    // Maintenance summarizes before it removes old rows.
    history(&cluster, &["2001-01-01Z"]);
    restart_maintenance(&cluster, &[("outbox.batch_size", 11)]);
    wait_true(
        &cluster,
        "the old history row to be removed",
        "select not exists (select from outbox_history where published_at < '2002-01-01')",
    );
    let left = "select coalesce(sum(brin_summarize_new_values(i.indexrelid)), 0)::bigint
                from pg_index i join pg_class c on c.oid = i.indexrelid
                where i.indrelid in (select inhrelid from pg_inherits where inhparent = 'outbox_history'::regclass)
                  and c.relam = (select oid from pg_am where amname = 'brin')";
    assert_eq!(cluster.query_one::<i64>(DB, left), 0, "ranges without a summary");

    // More ranges than maintenance summarizes one by one.
    let mut client = cluster.connect(DB);
    let mut own = client.transaction().expect("begin");
    let more = "lock table only outbox_history in share update exclusive mode;
                do $$ declare p regclass; begin
                  for p in select inhrelid from pg_inherits where inhparent = 'outbox_history'::regclass loop
                    -- So that maintenance leaves them.
                    execute format('lock table %s in share update exclusive mode', p);
                  end loop;
                end $$;
                insert into outbox_history (seq, enqueued_at, published_at, attempts, partition, destination)
                select n, now(), now(), 1, 0, 'default' from generate_series(1, 50000) n";
    own.run(more);
    let summarised = "select outbox_internal.summarize_history(clock_timestamp(), 10)";
    let summarised: i32 = own.value(summarised);
    assert!(summarised > 10, "{summarised}");
    own.commit().expect("commit");
    assert_eq!(cluster.query_one::<i64>(DB, left), 0, "ranges after the first ten");
}
