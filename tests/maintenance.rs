//! Tests that maintenance runs in its own process. It delays no worker, runs also where no worker runs, and costs
//! nothing for features that are not used. The tests read what each process ran from the server log, where auto_explain
//! writes every statement with its buffer counts.

use std::collections::BTreeMap;

use support::*;
use support::{Cluster, StopMode, wait_until};

const EXPLAINED: [&str; 6] = [
    "shared_preload_libraries = 'outbox,auto_explain'",
    "auto_explain.log_min_duration = 0",
    "auto_explain.log_nested_statements = on",
    "auto_explain.log_analyze = on",
    "auto_explain.log_timing = off",
    "auto_explain.log_buffers = on",
];

/// Calls that only maintenance may run.
const MAINTENANCE_ONLY: [&str; 9] = [
    "outbox_internal.expire(",
    "outbox_internal.make_partitions(",
    "outbox_internal.drop_partitions(",
    "outbox_internal.summarize_history(",
    ".outbox_history_default t where t.ctid",
    "outbox_internal.trim_events(",
    "outbox_internal.purge_workers(",
    "outbox_internal.record_drawn_seq(",
    "pg_catalog.count(*), pg_catalog.min(o.expires_at)",
];

/// A statement that a process ran: its text and plan, and the blocks that it read, from disk and from memory.
struct Ran {
    text: String,
    blocks: u64,
}

/// The statements that processes of one backend type ran, from this offset of the log.
fn ran_by(cluster: &Cluster, kind: &str, offset: usize) -> Vec<Ran> {
    let log = cluster.log().split_off(offset);
    let mut all: Vec<Ran> = Vec::new();
    let mut inside = false;
    for line in log.lines() {
        // A log entry begins with a timestamp; its continuation lines are indented.
        if line.starts_with("20") {
            inside = line.contains(&format!("] {kind} LOG:  duration: "));
            if inside {
                all.push(Ran {
                    text: String::new(),
                    blocks: 0,
                });
            }
        }
        if let (true, Some(ran)) = (inside, all.last_mut()) {
            ran.text.push_str(line);
            ran.text.push('\n');
            if ran.blocks == 0 && line.trim_start().starts_with("Buffers: shared") {
                ran.blocks = blocks(line);
            }
        }
    }
    all
}

/// The blocks in a line such as "Buffers: shared hit=3 read=4 dirtied=1".
fn blocks(line: &str) -> u64 {
    let of = |word: &str| {
        line.split(word)
            .nth(1)
            .and_then(|rest| rest.split([' ', ',']).next()?.parse().ok())
    };
    of("hit=").unwrap_or(0) + of("read=").unwrap_or(0_u64)
}

fn runs(all: &[Ran], what: &str) -> bool {
    all.iter().any(|ran| ran.text.contains(what))
}

/// Starts maintenance, which otherwise is due once a minute, and waits until it has ended.
fn run_maintenance(cluster: &Cluster) {
    cluster.exec(
        DB,
        "insert into outbox_history (seq, enqueued_at, published_at, attempts, partition, destination)
         values (0, '2001-01-01Z', '2001-01-01Z', 1, 0, 'default')",
    );
    let size = "select 10 + coalesce(current_setting('outbox.batch_size')::int, 0)";
    let size: i32 = cluster.query_one(DB, size);
    cluster.exec(DB, &format!("alter database {DB} set outbox.batch_size = {size}"));
    wait_true(
        cluster,
        "maintenance to remove the old row and to end",
        "select not exists (select from outbox_history where seq = 0)
            and not exists (select from pg_stat_activity where backend_type = 'outbox maintenance')",
    );
}

/// It runs once a minute, so its failures are too rare to count.
#[test]
fn health_shows_what_maintenance_could_not_do_until_a_run_can() {
    let cluster = Stage::new(&[]).cluster;
    run_maintenance(&cluster);
    assert!(health(&cluster, "maintenance").0, "before any fault");
    let refuse = "create function refuse() returns event_trigger language plpgsql as $$ begin raise exception 'none today'; end $$;
                  create event trigger refuse on ddl_command_end when tag in ('CREATE TABLE') execute function refuse()";
    let grant = "GRANT CREATE ON SCHEMA public TO outbox_worker";
    for (fault, why, undo, command) in [
        (
            "revoke create on schema public from outbox_worker",
            "permission denied for schema public",
            grant,
            grant,
        ),
        (
            refuse,
            "none today",
            "drop event trigger refuse; drop function refuse()",
            "undo what the error names",
        ),
    ] {
        cluster.exec(
            DB,
            "do $$ declare p regclass; begin
               for p in select partition from outbox_history_partitions() loop execute format('drop table %s', p); end loop;
             end $$",
        );
        cluster.exec(DB, fault);
        run_maintenance(&cluster);
        let (is_ok, problem) = health(&cluster, "maintenance");
        assert!(
            !is_ok
                && problem.starts_with("it has failed since 20")
                && problem.ends_with(&format!(": make partitions: {why}")),
            "{problem}"
        );
        let sql = r#"select remedy from outbox_health where "check" = 'maintenance'"#;
        let remedy: String = cluster.query_one(DB, sql);
        assert!(remedy.contains(command), "{remedy}");
        cluster.exec(DB, undo);
        run_maintenance(&cluster);
        assert_eq!(health(&cluster, "maintenance"), (true, String::new()), "after {undo}");
    }
}

#[test]
fn workers_run_no_maintenance_and_expiry_runs_only_when_a_message_is_due_to_expire() {
    let offset = 0;
    let cluster = Stage::new(&EXPLAINED).cluster;
    let publish = "select outbox_publish('T', '{}', 'a', n::text) from generate_series(1, 1000) n";
    cluster.exec(DB, publish);
    wait_published(&cluster, 1000);
    run_maintenance(&cluster);
    cluster.exec(DB, publish);
    wait_published(&cluster, 2000);
    let (worker, of_maintenance) = (
        ran_by(&cluster, "outbox worker", offset),
        ran_by(&cluster, "outbox maintenance", offset),
    );
    assert!(
        runs(&worker, "outbox_history"),
        "auto_explain logged no statement of the worker"
    );
    for what in MAINTENANCE_ONLY {
        assert!(!runs(&worker, what), "the worker runs {what}");
        assert_eq!(
            runs(&of_maintenance, what),
            what != "outbox_internal.expire(",
            "whether maintenance runs {what}"
        );
    }

    // Maintenance runs `expire` once the first message is due to expire, and not before.
    cluster.exec(DB, "select outbox_pause('default')");
    cluster.exec(
        DB,
        "select outbox_publish('T', '{}', 'a', 'b', expires_at => now() + interval '1 day');
         select outbox_publish('T', '{}', 'a', 'c', expires_at => clock_timestamp() + interval '1 second')",
    );
    wait_true(&cluster, "a message to expire", "select count(*) = 1 from outbox_dead");
    wait_true(
        &cluster,
        "maintenance to end",
        "select not exists (select from pg_stat_activity where backend_type = 'outbox maintenance')",
    );
    assert!(runs(
        &ran_by(&cluster, "outbox maintenance", offset),
        "outbox_internal.expire("
    ));
    assert!(!runs(
        &ran_by(&cluster, "outbox worker", offset),
        "outbox_internal.expire("
    ));
}

/// The most blocks that each statement of a worker reads, by its text, between its start with `waiting` messages
/// pending and the end of the count of all of them.
fn blocks_at_start(waiting: i64) -> BTreeMap<String, u64> {
    let cluster = unconnected_cluster("", "x", &EXPLAINED);
    cluster.exec(
        DB,
        &format!("select outbox_publish('T', '{{}}', 'a', n::text) from generate_series(1, {waiting}) n"),
    );
    cluster.stop(StopMode::Fast);
    let offset = cluster.log_offset();
    cluster.start_again();
    wait_true(
        &cluster,
        "all messages to be counted",
        &format!(
            "select exists (select from outbox_destination_status where destination = 'default' and pending = {waiting})"
        ),
    );
    // Some more passes: each reload causes a heartbeat.
    cluster.reload();
    wait_true(
        &cluster,
        "another heartbeat",
        "select bool_and(heartbeat_at > pg_conf_load_time()) from outbox_workers",
    );
    let worker = ran_by(&cluster, "outbox worker", offset);
    assert!(
        runs(&worker, "outbox_internal.heartbeat("),
        "auto_explain logged no statement of the worker"
    );
    let mut most = BTreeMap::new();
    for ran in worker {
        let (_, query) = ran.text.split_once("Query Text: ").expect("its text");
        let blocks: &mut u64 = most.entry(query.lines().next().unwrap_or("").to_owned()).or_default();
        *blocks = ran.blocks.max(*blocks);
    }
    most
}

#[test]
fn the_start_of_a_worker_reads_no_more_with_a_larger_backlog() {
    let (few, many) = (blocks_at_start(500), blocks_at_start(20_000));
    let most = few.values().max().copied().expect("a statement");
    for (query, blocks) in many {
        // The first call of a function also reads catalogs. The index of 20,000 messages alone has 170 blocks.
        let known = few.get(&query).copied().unwrap_or(most);
        assert!(
            blocks <= known + 100,
            "{known} blocks with 500 waiting, {blocks} with 20,000: {query}"
        );
    }
}

#[test]
fn maintenance_counts_expires_and_removes_without_workers_in_the_server() {
    let cluster = idle_cluster(&[]);
    cluster.exec(
        DB,
        "select outbox_publish('T', '{}', 'a', n::text) from generate_series(1, 100) n;
         select outbox_publish('T', '{}', 'a', 'b', expires_at => clock_timestamp() + interval '1 second');
         insert into outbox_history (seq, enqueued_at, published_at, attempts, partition, destination)
         values (0, '2001-01-01Z', '2001-01-01Z', 1, 0, 'default')",
    );
    wait_true(&cluster, "a message to expire", "select count(*) = 1 from outbox_dead");
    cluster.restart();
    wait_true(&cluster, "the count", "select pending = 100 from outbox_status");
    wait_true(
        &cluster,
        "old history to be removed",
        "select not exists (select from outbox_history where seq = 0)",
    );
    let workers = "select count(*) from pg_stat_activity where backend_type = 'outbox worker'";
    assert_eq!(cluster.query_one::<i64>(DB, workers), 0);
    // A message that expires while the server is down is found by the count at the start.
    cluster.exec(
        DB,
        "select outbox_publish('T', '{}', 'a', 'c', expires_at => now() + interval '2 seconds')",
    );
    cluster.restart();
    wait_true(
        &cluster,
        "the other message to expire",
        "select count(*) = 2 from outbox_dead",
    );
}

#[test]
fn a_database_is_dropped_while_its_maintenance_waits_for_a_lock() {
    let cluster = idle_cluster(&[]);
    cluster.exec(DB, "create database shop");
    cluster.exec("shop", "create extension outbox");
    cluster.exec(
        "shop",
        "select outbox_publish('T', '{}', 'a', 'b', expires_at => clock_timestamp() + interval '1 second')",
    );
    let mut holder = cluster.connect("shop");
    holder.run("begin; lock table outbox_dead in access exclusive mode");
    wait_true(
        &cluster,
        "maintenance to wait",
        "select exists (select from pg_stat_activity
                        where datname = 'shop' and backend_type = 'outbox maintenance' and wait_event_type = 'Lock')",
    );
    let mut client = admin(&cluster);
    client.run("drop database shop with (force)");
    wait_until("the sessions of the dropped database to end", LONG, || {
        cluster.query_one(
            DB,
            "select not exists (select from pg_stat_activity where datname = 'shop')",
        )
    });
}
