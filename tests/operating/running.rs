//! What changes while the server runs: the role of the workers, settings of a database, the age of history.

use postgres::{Client, NoTls};
use support::{Broker, Consumer, wait_until};

use crate::common::*;
use crate::{has_worker, payload, problems, publish};

#[test]
fn the_worker_is_no_superuser_and_nobody_logs_in_as_its_role() {
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
fn a_superuser_role_runs_no_worker_and_health_says_so() {
    let cluster = unconnected_cluster("", "x", &[]);
    wait_healthy(&cluster, "workers");
    cluster.exec(DB, "alter role outbox_worker superuser");
    cluster.restart();
    let (ok, problem) = health(&cluster, "role");
    assert!(!ok && problem.contains("superuser"), "{problem}");
    wait_until("health to tell of workers", LONG, || {
        health(&cluster, "workers")
            .1
            .contains("its role is missing or a superuser")
    });
    assert!(!cluster.query_one::<bool>(DB, &has_worker(DB)));
    cluster.exec(DB, "alter role outbox_worker nosuperuser");
    wait_healthy(&cluster, "workers");
    wait_healthy(&cluster, "role");
}

#[test]
fn another_exchange_for_the_database_is_used_without_a_restart() {
    let broker = Broker::shared();
    let (exchange, queue) = exchange_and_queue(broker);
    let (other_exchange, other_queue) = exchange_and_queue(broker);
    let cluster = outbox_cluster(broker, &exchange);
    publish(&cluster, DB, 1);
    assert_eq!(payload(&Consumer::new(broker, &queue)), 1);
    let offset = cluster.log_offset();
    cluster.exec(
        DB,
        &format!("alter database {DB} set outbox.exchange = '{other_exchange}'"),
    );
    cluster.wait_for_log("settings of the database or role changed", offset);
    publish(&cluster, DB, 2);
    assert_eq!(payload(&Consumer::new(broker, &other_queue)), 2);
}

#[test]
fn delivery_is_switched_off_and_on_per_database() {
    let broker = Broker::shared();
    let (exchange, queue) = exchange_and_queue(broker);
    let cluster = outbox_cluster(broker, &exchange);
    cluster.exec(DB, &format!("alter database {DB} set outbox.enabled = off"));
    wait_true(
        &cluster,
        "a paused worker",
        "select exists (select from outbox_worker_status where state = 'paused')",
    );
    publish(&cluster, DB, 1);
    assert_eq!(problems(&cluster), ["enabled"]);
    assert_eq!(broker.queue_len(&queue), 0);
    cluster.exec(DB, &format!("alter database {DB} reset outbox.enabled"));
    assert_eq!(payload(&Consumer::new(broker, &queue)), 1);
}

#[test]
fn history_goes_when_its_retention_is_over() {
    let broker = Broker::shared();
    let (exchange, _) = exchange_and_queue(broker);
    let cluster = outbox_cluster(broker, &exchange);
    publish(&cluster, DB, 1);
    wait_published(&cluster, 1);
    cluster.exec(DB, &format!("alter database {DB} set outbox.retention = 0"));
    wait_true(
        &cluster,
        "an empty history",
        "select not exists (select from outbox_history)",
    );
}
