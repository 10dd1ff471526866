//! Is the upkeep a process of its own, which holds up no worker, runs where no worker does, and costs nothing for what
//! nobody uses? What each process runs is read in the log, where auto_explain writes every statement with its blocks.

mod common;

use common::*;
use support::{Broker, Cluster, wait_until};

const EXPLAINED: [&str; 6] = [
    "shared_preload_libraries = 'outbox,auto_explain'",
    "auto_explain.log_min_duration = 0",
    "auto_explain.log_nested_statements = on",
    "auto_explain.log_analyze = on",
    "auto_explain.log_timing = off",
    "auto_explain.log_buffers = on",
];

/// What only the upkeep may run.
const OF_UPKEEP: [&str; 8] = [
    "outbox_internal.expire(",
    "outbox_internal.make_partitions(",
    "outbox_internal.drop_partitions(",
    "outbox_internal.summarize_history(",
    "outbox_internal.trim_history(",
    "outbox_internal.trim_events(",
    "outbox_internal.purge_workers(",
    "pg_catalog.count(*), pg_catalog.min(o.expires_at)",
];

/// A statement that a process ran: its text and plan, and the blocks that it read, from disk and from memory.
struct Ran {
    text: String,
    blocks: u64,
}

/// What processes of a kind ran since.
fn ran_by(cluster: &Cluster, kind: &str, offset: usize) -> Vec<Ran> {
    let log = cluster.log().split_off(offset);
    let mut all: Vec<Ran> = Vec::new();
    let mut inside = false;
    for line in log.lines() {
        // An entry begins with a time; what belongs to it is indented.
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

/// Of "Buffers: shared hit=3 read=4 dirtied=1".
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

/// Lets the upkeep begin, which else is due once a minute, and waits until it is over.
fn upkeep(cluster: &Cluster) {
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
        "the upkeep to remove what is old, and to end",
        "select not exists (select from outbox_history where seq = 0)
            and not exists (select from pg_stat_activity where backend_type = 'outbox maintenance')",
    );
}

#[test]
fn a_worker_runs_no_statement_of_the_upkeep_and_nothing_looks_for_what_expires_where_nothing_does() {
    let broker = Broker::shared();
    let (exchange, _) = exchange_and_queue(broker);
    let offset = 0;
    let cluster = outbox_cluster_with(broker, &exchange, &EXPLAINED);
    let publish = "select outbox_publish('T', '{}', 'a', n::text) from generate_series(1, 1000) n";
    cluster.exec(DB, publish);
    wait_published(&cluster, 1000);
    upkeep(&cluster);
    cluster.exec(DB, publish);
    wait_published(&cluster, 2000);
    let (worker, of_upkeep) = (
        ran_by(&cluster, "outbox worker", offset),
        ran_by(&cluster, "outbox maintenance", offset),
    );
    assert!(
        runs(&worker, "outbox_internal.settle("),
        "auto_explain shows nothing of the worker"
    );
    for what in OF_UPKEEP {
        assert!(!runs(&worker, what), "the worker runs {what}");
        assert_eq!(
            runs(&of_upkeep, what),
            what != "outbox_internal.expire(",
            "whether the upkeep runs {what}"
        );
    }

    // It looks at the time of the first that expires, and not before.
    cluster.exec(DB, "select outbox_pause('default')");
    cluster.exec(
        DB,
        "select outbox_publish('T', '{}', 'a', 'b', expires_at => now() + interval '1 day');
         select outbox_publish('T', '{}', 'a', 'c', expires_at => now() + interval '1 second')",
    );
    wait_true(&cluster, "one to expire", "select count(*) = 1 from outbox_dead");
    wait_true(
        &cluster,
        "the upkeep to end",
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

/// The statement by which a worker reads most, from a start with so many messages waiting until all are counted.
fn most_blocks_of_a_statement_at_start(waiting: i64) -> u64 {
    let cluster = unconnected_cluster("", "x", &EXPLAINED);
    cluster.exec(
        DB,
        &format!("select outbox_publish('T', '{{}}', 'a', n::text) from generate_series(1, {waiting}) n"),
    );
    cluster.restart();
    let offset = cluster.log_offset();
    wait_true(
        &cluster,
        "all to be counted",
        &format!(
            "select exists (select from outbox_destination_status where destination = 'default' and pending = {waiting})"
        ),
    );
    // A few passes more: a heartbeat each.
    cluster.reload();
    wait_true(
        &cluster,
        "another heartbeat",
        "select bool_and(heartbeat_at > pg_conf_load_time()) from outbox_workers",
    );
    let worker = ran_by(&cluster, "outbox worker", offset);
    assert!(
        runs(&worker, "outbox_internal.heartbeat("),
        "auto_explain shows nothing of the worker"
    );
    worker.iter().map(|ran| ran.blocks).max().unwrap_or(0)
}

#[test]
fn what_a_worker_reads_at_its_start_does_not_grow_with_what_waits() {
    let few = most_blocks_of_a_statement_at_start(500);
    let many = most_blocks_of_a_statement_at_start(20_000);
    println!("{few} blocks with 500 waiting, {many} with 20,000");
    assert!(
        many <= 2 * few.max(100),
        "{few} blocks with 500 waiting, {many} with 20,000"
    );
}

#[test]
fn where_no_worker_runs_in_the_server_the_upkeep_counts_expires_and_removes() {
    let cluster = unconnected_cluster("", "x", &["outbox.workers = 0"]);
    cluster.exec(
        DB,
        "select outbox_publish('T', '{}', 'a', n::text) from generate_series(1, 100) n;
         select outbox_publish('T', '{}', 'a', 'b', expires_at => now() + interval '1 second');
         insert into outbox_history (seq, enqueued_at, published_at, attempts, partition, destination)
         values (0, '2001-01-01Z', '2001-01-01Z', 1, 0, 'default')",
    );
    wait_true(&cluster, "one to expire", "select count(*) = 1 from outbox_dead");
    cluster.restart();
    wait_true(&cluster, "the count", "select pending = 100 from outbox_status");
    wait_true(
        &cluster,
        "old history to go",
        "select not exists (select from outbox_history where seq = 0)",
    );
    let workers = "select count(*) from pg_stat_activity where backend_type = 'outbox worker'";
    assert_eq!(cluster.query_one::<i64>(DB, workers), 0);
    // One that expires while the server is down is found by the count at its start.
    cluster.exec(
        DB,
        "select outbox_publish('T', '{}', 'a', 'c', expires_at => now() + interval '2 seconds')",
    );
    cluster.restart();
    wait_true(&cluster, "the other to expire", "select count(*) = 2 from outbox_dead");
}

#[test]
fn a_database_is_dropped_while_its_upkeep_waits_for_a_lock() {
    let cluster = unconnected_cluster("", "x", &["outbox.workers = 0"]);
    cluster.exec(DB, "create database shop");
    cluster.exec("shop", "create extension outbox");
    cluster.exec(
        "shop",
        "select outbox_publish('T', '{}', 'a', 'b', expires_at => now() + interval '1 second')",
    );
    let mut holder = cluster.connect("shop");
    holder
        .batch_execute("begin; lock table outbox_dead in access exclusive mode")
        .expect("a lock");
    wait_true(
        &cluster,
        "the upkeep to wait",
        "select exists (select from pg_stat_activity
                        where datname = 'shop' and backend_type = 'outbox maintenance' and wait_event_type = 'Lock')",
    );
    let mut client = cluster.connect(DB);
    client.batch_execute("set statement_timeout = '6s'").expect("a timeout");
    client
        .batch_execute("drop database shop with (force)")
        .expect("no upkeep in the way");
    wait_until("it to be gone", LONG, || {
        cluster.query_one(
            DB,
            "select not exists (select from pg_stat_activity where datname = 'shop')",
        )
    });
}
