//! Tests of changes while the server runs: the role of the workers, settings of a database, the age of history.

use std::time::Instant;

use postgres::{Client, NoTls};
use support::{Broker, Cluster, Consumer, process, wait_until};

use super::{has_worker, problems};
use support::*;

#[test]
fn the_worker_is_no_superuser_and_its_role_cannot_log_in() {
    let cluster = unconnected_cluster("", "x", &[]);
    wait_healthy(&cluster, "workers");
    let (name, is_superuser): (String, bool) = {
        let sql = "select a.usename::text, r.rolsuper or r.rolcreaterole or r.rolcreatedb or r.rolbypassrls or r.rolreplication
                   from pg_stat_activity a join pg_roles r on r.rolname = a.usename where a.backend_type = 'outbox worker'";
        let row = cluster.connect(DB).query_one(sql, &[]).expect("one worker");
        (row.get(0), row.get(1))
    };
    assert_eq!((name.as_str(), is_superuser), ("outbox_worker", false));
    let memberships = "select count(*) from pg_auth_members where member = 'outbox_worker'::regrole";
    assert_eq!(cluster.query_one::<i64>(DB, memberships), 0);
    for role in ["outbox_worker", "outbox_writer", "outbox_monitor", "outbox_admin"] {
        let config = cluster
            .conn_string(DB)
            .replace("user=postgres", &format!("user={role}"));
        let error = Client::connect(&config, NoTls)
            .err()
            .unwrap_or_else(|| panic!("{role} logged in"));
        assert!(error.code().is_some(), "{role}: {error:?}");
    }
}

#[test]
fn a_superuser_role_runs_no_worker_and_health_reports_it() {
    let cluster = unconnected_cluster("", "x", &[]);
    wait_healthy(&cluster, "workers");
    cluster.exec(DB, "alter role outbox_worker superuser");
    cluster.restart();
    let (ok, problem) = health(&cluster, "role");
    assert!(!ok && problem.contains("superuser"), "{problem}");
    wait_until("health to report on workers", LONG, || {
        health(&cluster, "workers")
            .1
            .contains("its role is missing or a superuser")
    });
    assert!(!cluster.query_one::<bool>(DB, &has_worker(DB)));
    cluster.exec(DB, "alter role outbox_worker nosuperuser");
    wait_healthy(&cluster, "workers");
    wait_healthy(&cluster, "role");
}

/// Postgres ignores SIGHUP in a process that it has just forked. Before workers asked again at their start, 37 of 60
/// reloads were lost.
#[test]
fn a_reload_during_the_start_of_a_worker_is_not_lost() {
    let cluster = unconnected_cluster("", "x", &[]);
    // What a worker itself reports: the check "destination" of health also fails while no worker lives.
    let wait_for_state = |state: &str| {
        let reported = format!(
            "select exists (select from outbox_connections c join outbox_worker_status s using (worker_id)
                            where s.alive and c.state = '{state}')"
        );
        wait_true(&cluster, &format!("a worker to report {state}"), &reported);
    };
    wait_for_state("unconfigured");
    for (state, url) in [("down", "amqp://127.0.0.1:1"), ("unconfigured", "")].repeat(5) {
        let worker: i32 = cluster.query_one(
            DB,
            "select pid from pg_stat_activity where backend_type = 'outbox worker'",
        );
        cluster.write_conf("outbox.url", url);
        cluster.exec(DB, &format!("select pg_terminate_backend({worker})"));
        wait_until("the worker to end", LONG, || !children(&cluster).contains(&worker));
        let before = children(&cluster);
        let deadline = Instant::now() + LONG;
        // Without a pause: the critical time is a few milliseconds.
        while children(&cluster).iter().all(|pid| before.contains(pid)) {
            assert!(Instant::now() < deadline, "no other worker");
            std::thread::yield_now();
        }
        process::signal(cluster.pid(), libc::SIGHUP);
        wait_for_state(state);
    }
}

fn children(cluster: &Cluster) -> Vec<i32> {
    let postmaster = cluster.pid();
    let pids = std::fs::read_to_string(format!("/proc/{postmaster}/task/{postmaster}/children")).expect("children");
    pids.split_whitespace().map(|pid| pid.parse().expect("a pid")).collect()
}

#[test]
fn a_changed_exchange_of_a_database_is_used_without_a_restart() {
    let broker = Broker::shared();
    let (exchange, queue) = exchange_and_queue(broker);
    let (other_exchange, other_queue) = exchange_and_queue(broker);
    let cluster = outbox_cluster(broker, &exchange);
    cluster.publish("1");
    assert_eq!(Consumer::new(broker, &queue).next().label(), "1");
    let offset = cluster.log_offset();
    cluster.exec(
        DB,
        &format!("alter database {DB} set outbox.exchange = '{other_exchange}'"),
    );
    cluster.wait_for_log("settings of the database or role changed", offset);
    cluster.publish("2");
    assert_eq!(Consumer::new(broker, &other_queue).next().label(), "2");
}

#[test]
fn delivery_is_switched_off_and_on_per_database() {
    let stage = Stage::new(&[]);
    stage.exec(DB, &format!("alter database {DB} set outbox.enabled = off"));
    wait_workers_paused(&stage);
    stage.publish("1");
    assert_eq!(problems(&stage), ["enabled"]);
    // A whole pass of the worker, with the answers to all that it sent.
    stage.exec(DB, "select outbox_run_pass('5 min')");
    assert_eq!(stage.broker.queue_len(&stage.queue), 0);
    stage.exec(DB, &format!("alter database {DB} reset outbox.enabled"));
    assert_eq!(stage.consumer().next().label(), "1");
}

#[test]
fn history_is_removed_when_its_retention_ends() {
    let cluster = Stage::new(&[]).cluster;
    cluster.publish("1");
    wait_published(&cluster, 1);
    cluster.exec(DB, &format!("alter database {DB} set outbox.retention = 0"));
    wait_true(
        &cluster,
        "an empty history",
        "select not exists (select from outbox_history)",
    );
}

#[test]
fn the_row_of_a_worker_that_ended_long_ago_is_removed_and_that_of_a_live_one_stays() {
    let cluster = unconnected_cluster("", "x", &[]);
    wait_healthy(&cluster, "workers");
    // The heartbeat decides about workers outside the server. In one transaction, because maintenance may start just
    // now.
    let mut client = cluster.connect(DB);
    let mut both = client.transaction().expect("a transaction");
    let rows = "insert into outbox_workers (worker_id, heartbeat_until) values
                  ('long-ago', now() - interval '61 s'), ('work-alive', now() + interval '10 s')";
    both.run(rows);
    let names = "select string_agg(worker_id, ' ' order by worker_id) from outbox_workers";
    let all: String = both.value(names);
    assert_eq!(all, "long-ago server-1 work-alive");
    both.commit().expect("commit");
    // Maintenance removes the row once a minute, and when settings have changed. The changed setting also restarts the
    // worker.
    cluster.exec(DB, &format!("alter database {DB} set outbox.batch_size = 10"));
    wait_true(
        &cluster,
        "maintenance to remove only the old row",
        &format!("select ({names}) = 'server-1 work-alive'"),
    );
}
