//! The launcher or a worker ends, or no worker slot is free. Signals to any process leave exactly one set of workers,
//! and no worker runs without an entry in shared memory.

use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use postgres::Client;
use support::chaos::rounds;
use support::faults::{Faults, messages};
use support::load::{Load, Plan};
use support::oracle::judge;
use support::*;
use support::{Cluster, StopMode, program, wait_for, wait_until};

const WORKERS: usize = 2;

/// The process ids of a backend type, in order.
fn pids(client: &mut Client, kind: &str) -> Vec<i32> {
    let sql = "select pid from pg_stat_activity where backend_type = $1 order by pid";
    let rows = client.query(sql, &[&kind]).expect("pg_stat_activity");
    rows.iter().map(|row| row.get(0)).collect()
}

fn launcher(client: &mut Client) -> Option<i32> {
    pids(client, "outbox launcher").first().copied()
}

fn wait_for_launcher(client: &mut Client) -> i32 {
    wait_for("a launcher", LONG, || launcher(client))
}

fn signal(client: &mut Client, function: &str, pid: i32) {
    client
        .execute(&format!("select {function}($1)"), &[&pid])
        .expect("a signal");
}

/// Waits until another launcher than `before` runs.
fn wait_for_another_launcher(client: &mut Client, before: i32) {
    wait_until("another launcher", LONG, || {
        launcher(client).is_some_and(|pid| pid != before)
    });
}

/// Runs `body` and returns the largest number of workers that ran meanwhile.
fn most_workers_while<T>(cluster: &Cluster, body: impl FnOnce() -> T) -> (usize, T) {
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let watch = scope.spawn(|| {
            let mut client = cluster.connect(DB);
            let mut most = 0;
            while !over.load(Ordering::Acquire) {
                most = most.max(pids(&mut client, "outbox worker").len());
            }
            most
        });
        // Also if the body panics; otherwise the scope would wait forever.
        let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(body));
        over.store(true, Ordering::Release);
        let most = watch.join().expect("the watcher does not panic");
        match ended {
            Ok(value) => (most, value),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })
}

#[test]
fn signals_to_launcher_and_workers_leave_one_set_of_workers_and_lose_and_reorder_nothing() {
    let conf = [format!("outbox.workers = {WORKERS}")];
    let stage = Stage::new(&conf.each_ref().map(String::as_str));
    let load = Load::start(&stage, &Plan::default());
    let mut client = stage.connect(DB);
    let mut faults = Faults::default();
    let (most, ()) = most_workers_while(&stage, || {
        for round in 0..rounds(20) {
            for function in ["pg_cancel_backend", "pg_terminate_backend"] {
                let before = wait_for_launcher(&mut client);
                signal(&mut client, function, before);
                if function == "pg_terminate_backend" {
                    wait_for_another_launcher(&mut client, before);
                }
                let workers = pids(&mut client, "outbox worker");
                let ended = workers[round % workers.len()];
                // Workers go on without a launcher. A worker may notice a cancel some messages later.
                faults.during(1, || {
                    signal(&mut client, function, ended);
                    if function == "pg_terminate_backend" {
                        wait_until("a worker to end", LONG, || {
                            !pids(&mut client, "outbox worker").contains(&ended)
                        });
                    }
                    wait_connected(&stage);
                    load.wait_for_more(10);
                });
            }
        }
    });
    assert_eq!(most, WORKERS, "a second worker of the same name ran");
    assert_eq!(pids(&mut client, "outbox launcher").len(), 1);
    let sent = load.stop();
    wait_drained(&stage);
    let arrived = arrived(&stage.all());
    let verdict = judge(&sent, &arrived);
    println!("{} arrived, {} again", arrived.len(), verdict.doubled.len());
    faults.assert_explain(&verdict, &messages(&stage));
    for (what, sql) in [
        ("dead", "select count(*) from outbox_dead"),
        ("charged", "select count(*) from outbox_history where attempts <> 1"),
    ] {
        assert_eq!(stage.query_one::<i64>(DB, sql), 0, "{what}");
    }
}

#[test]
fn a_start_of_the_server_starts_each_worker_once() {
    // The server logs the end of a process with exit code 0 at this level.
    let cluster = unconnected_cluster("", "x", &["log_min_messages = debug1", "autovacuum = off"]);
    cluster.stop(StopMode::Fast);
    let stopped = cluster.log_offset();
    cluster.start_again();
    wait_true(
        &cluster,
        "the worker to own its partitions",
        "select exists (select from outbox_worker_status where partitions > 0)",
    );
    let log = cluster.log().split_off(stopped);
    let ends: Vec<&str> = log
        .lines()
        .filter(|line| line.contains("exited with exit code"))
        .collect();
    assert!(!ends.iter().any(|line| line.contains("outbox worker")), "{ends:#?}");
}

#[test]
fn a_restarted_launcher_keeps_the_running_workers_and_repeats_nothing() {
    let stage = Stage::new(&["outbox.workers = 3"]);
    wait_shared(&stage);
    let mut client = stage.connect(DB);
    let workers = pids(&mut client, "outbox worker");
    let load = Load::start(&stage, &Plan::default());
    for _ in 0..3 {
        let before = wait_for_launcher(&mut client);
        signal(&mut client, "pg_terminate_backend", before);
        wait_for_another_launcher(&mut client, before);
        load.wait_for_more(100);
    }
    assert_eq!(pids(&mut client, "outbox worker"), workers);
    let sent = load.stop();
    wait_drained(&stage);
    let arrived = arrived(&stage.all());
    judge(&sent, &arrived).assert_perfect();

    // The launcher can still end workers that it did not start.
    stage.set_conf("outbox.workers", "1");
    wait_until("two workers to end", LONG, || {
        pids(&mut client, "outbox worker").len() == 1
    });
    let remaining = pids(&mut client, "outbox worker");
    stage.set_conf("outbox.workers", "3");
    wait_until("two further workers", LONG, || {
        pids(&mut client, "outbox worker").len() == 3
    });
    assert!(pids(&mut client, "outbox worker").contains(&remaining[0]));
}

#[test]
fn a_database_without_a_launcher_can_be_dropped_renamed_and_configured() {
    let cluster = unconnected_cluster("", "x", &["outbox.workers = 2"]);
    let mut client = cluster.connect(DB);
    client.run("set statement_timeout = '10s'");
    for statement in [
        "drop database shop",
        "drop database shop with (force)",
        "alter database shop rename to store",
        "select outbox_configure(8)",
        "select outbox_configure(16)",
    ] {
        cluster.exec(DB, "drop database if exists store");
        if cluster.query_one(DB, "select not exists (select from pg_database where datname = 'shop')") {
            cluster.exec(DB, "create database shop");
            cluster.exec("shop", "create extension outbox");
        }
        wait_until("all workers", LONG, || pids(&mut client, "outbox worker").len() == 4);
        let before = wait_for_launcher(&mut client);
        signal(&mut client, "pg_terminate_backend", before);
        wait_until("the launcher to end", LONG, || launcher(&mut client) != Some(before));
        client.run(statement);
        wait_for_another_launcher(&mut client, before);
    }
    wait_until("all workers", LONG, || pids(&mut client, "outbox worker").len() == 4);
}

// ---- the limit of workers -------------------------------------------------------------------------------------------

/// The number of workers that shared memory has entries for. Half of them are reserved for workers in the server; one
/// database has half of those outside.
const WORKERS_MAX: usize = 128;
const OUTSIDE: usize = WORKERS_MAX / 2;

#[test]
fn workers_beyond_the_limit_do_not_start_and_health_and_log_report_it() {
    let conf = [
        "max_worker_processes = 100",
        "max_connections = 120",
        "outbox.workers = 0",
    ];
    let cluster = unconnected_cluster("", "x", &conf);
    let databases = ["a", "b", "c", "d", DB];
    for database in &databases[..4] {
        cluster.exec(DB, &format!("create database {database}"));
        cluster.exec(database, "create extension outbox");
    }
    let begin = "select outbox_internal.work_begin('x')";
    let mut outside: Vec<Client> = (0..OUTSIDE)
        .map(|number| {
            let mut client = cluster.connect([DB, "a"][number % 2]);
            if let Err(error) = client.batch_execute(begin) {
                panic!("{number}: {error:?}");
            }
            client
        })
        .collect();
    let error = refused(&cluster, begin);
    assert_eq!(error.message(), "there are too many workers outside the server");
    let program = Command::new(program::outboxctl())
        .args(["work", "-h", "127.0.0.1", "-U", "postgres", "-d", DB, "-p"])
        .arg(cluster.port().to_string())
        .output()
        .expect("outboxctl work");
    let errors = String::from_utf8_lossy(&program.stderr);
    assert!(!program.status.success(), "{errors}");
    assert!(
        errors.contains("too many workers outside the server") && errors.contains("128"),
        "{errors}"
    );

    let (offset, began) = (cluster.log_offset(), Instant::now());
    let mut client = cluster.connect(DB);
    let running = |client: &mut Client| pids(client, "outbox worker").len();
    let wanted = databases.len() * 16;
    let free = WORKERS_MAX - OUTSIDE;
    let (most, ()) = most_workers_while(&cluster, || {
        cluster.set_conf("outbox.workers", "16");
        wait_until("all entries to be in use", LONG, || running(&mut client) >= free);
        let problem = wait_for("health to report the limit", LONG, || {
            let mut problems = databases.iter().map(|database| problem_of_workers(&cluster, database));
            problems.find(|problem| problem.contains("the most workers"))
        });
        assert!(problem.contains("128"), "{problem}");
    });
    assert_eq!(most, free, "{wanted} are configured");
    cluster.wait_for_log("limit of 128 workers", offset);
    let warnings = cluster.log().split_off(offset).matches("limit of 128 workers").count();
    let minutes = began.elapsed().as_secs() as usize / 60;
    assert!(warnings <= 1 + minutes, "{warnings} warnings in {minutes} minutes");

    // Each worker has a name and a row.
    let names: i64 = databases
        .iter()
        .map(|database| {
            cluster.query_one::<i64>(
                database,
                "select count(*) from outbox_worker_status where alive and worker_id like 'server-%'",
            )
        })
        .sum();
    assert!(names as usize <= free, "{names} names");

    // A worker starts when an entry becomes free.
    outside.truncate(OUTSIDE - 4);
    wait_until("four more workers", LONG, || running(&mut client) == free + 4);
    drop(outside);
    wait_until("all workers", LONG, || running(&mut client) == wanted);
    wait_until("health to be ok", LONG, || {
        databases
            .iter()
            .all(|database| problem_of_workers(&cluster, database).is_empty())
    });
}

fn problem_of_workers(cluster: &Cluster, database: &str) -> String {
    let sql = r#"select coalesce(problem, '') from outbox_health where "check" = 'workers'"#;
    cluster.query_one(database, sql)
}
