//! A copy delivers nothing until it is adopted, and a standby delivers as soon as it is promoted. databases.rs tests
//! copies of a database within one server.

use std::process::Command;
use std::time::Instant;

use support::{Broker, Cluster, Consumer, StopMode, wait_until};

use support::*;

const SILENT: &str = "select coalesce(bool_and(alive and state = 'not adopted'), false) from outbox_worker_status";

fn publish(cluster: &Cluster, database: &str, label: &str) {
    let sql = format!("select outbox_publish('T', '\"{label}\"', 'thing', '1')");
    cluster.query_one::<i64>(database, &sql);
}

fn payload(consumer: &Consumer) -> serde_json::Value {
    consumer.recv(LONG).expect("a message").json()["payload"].clone()
}

fn wait_silent(cluster: &Cluster, database: &str) {
    wait_until("a worker that delivers nothing", LONG, || {
        cluster.query_one(database, SILENT)
    });
}

fn identity_problem(cluster: &Cluster, database: &str) -> String {
    let sql = r#"select coalesce(problem, '') from outbox_health where "check" = 'identity'"#;
    cluster.query_one(database, sql)
}

fn untouched(cluster: &Cluster, database: &str) -> i64 {
    cluster.query_one(database, "select count(*) from outbox where claim_token is null")
}

fn tool(cluster: &Cluster, program: &str, args: &[&str]) {
    let mut command = Command::new(cluster.installation().bin(program));
    command.args(["-h", "127.0.0.1", "-U", "postgres", "-p", &cluster.port().to_string()]);
    let output = command
        .args(args)
        .output()
        .unwrap_or_else(|error| panic!("run {program}: {error}"));
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program}: {}\n{errors}", output.status);
}

#[test]
fn a_restored_dump_is_silent_from_its_first_statement_until_it_is_adopted() {
    let broker = Broker::shared();
    let (exchange, queue) = exchange_and_queue(broker);
    let cluster = outbox_cluster(broker, &exchange);
    pause(&cluster);
    (0..3).for_each(|_| publish(&cluster, DB, "restored"));
    let file = cluster.data_dir().with_file_name("dump");
    let file = file.to_str().expect("a path");
    tool(&cluster, "pg_dump", &["-Fc", "-f", file, DB]);
    cluster.set_conf("outbox.enabled", "on");
    let consumer = Consumer::new(broker, &queue);
    consumer.recv_n(3, LONG);

    cluster.exec(DB, "create database copy");
    // The worker exists before the rows do, and before the row that records the identity.
    tool(
        &cluster,
        "pg_restore",
        &["--exit-on-error", "--section=pre-data", "-d", "copy", file],
    );
    wait_silent(&cluster, "copy");
    let rest = [
        "--exit-on-error",
        "--section=data",
        "--section=post-data",
        "-d",
        "copy",
        file,
    ];
    tool(&cluster, "pg_restore", &rest);
    publish(&cluster, "copy", "of the copy");
    wait_silent(&cluster, "copy");
    assert_eq!(untouched(&cluster, "copy"), 4);
    let problem = identity_problem(&cluster, "copy");
    assert!(problem.contains("restored from a dump"), "{problem}");
    let detail = "select state || ' ' || detail from outbox_destination_status";
    assert_eq!(
        cluster.query_one::<String>("copy", detail),
        "not adopted it was restored from a dump"
    );
    publish(&cluster, DB, "of the original");
    assert_eq!(payload(&consumer), "of the original");

    let adopt = "select outbox_adopt('moved to this server')";
    assert!(cluster.query_one::<bool>("copy", adopt));
    let payloads: Vec<_> = (0..4).map(|_| payload(&consumer)).collect();
    assert_eq!(payloads, ["restored", "restored", "restored", "of the copy"]);
    assert_eq!(identity_problem(&cluster, "copy"), "");
    assert!(
        !cluster.query_one::<bool>("copy", adopt),
        "the database is adopted already"
    );
    let audit = "select string_agg(format('%s %s %s', action, filter->>'why', reason), '; ') from outbox_audit";
    assert_eq!(
        cluster.query_one::<String>("copy", audit),
        "adopt it was restored from a dump moved to this server"
    );
}

#[test]
fn an_old_state_restored_into_its_own_database_is_silent_and_a_new_extension_is_not() {
    let broker = Broker::shared();
    let (exchange, queue) = exchange_and_queue(broker);
    let cluster = outbox_cluster(broker, &exchange);
    publish(&cluster, DB, "before");
    wait_published(&cluster, 1);
    let file = cluster.data_dir().with_file_name("dump");
    let file = file.to_str().expect("a path");
    tool(&cluster, "pg_dump", &["-Fc", "-f", file, DB]);
    tool(&cluster, "pg_restore", &["--exit-on-error", "--clean", "-d", DB, file]);
    wait_silent(&cluster, DB);
    cluster.exec(DB, "drop extension outbox; create extension outbox");
    publish(&cluster, DB, "again");
    let consumer = Consumer::new(broker, &queue);
    assert_eq!(payload(&consumer), "before");
    assert_eq!(payload(&consumer), "again");
}

#[test]
fn a_promoted_standby_delivers_waiting_messages() {
    let broker = Broker::shared();
    let (exchange, queue) = exchange_and_queue(broker);
    let primary = outbox_cluster(broker, &exchange);
    let standby = primary.copy(true, &[]);
    pause(&primary);
    publish(&primary, DB, "waits");
    wait_until("the standby to follow", LONG, || {
        standby.query_one(DB, "select exists (select from outbox)")
    });
    let workers = "select count(*) from pg_stat_activity where backend_type like 'outbox%'";
    assert_eq!(standby.query_one::<i64>(DB, workers), 0);
    assert_eq!(identity_problem(&standby, DB), "");
    let failing = r#"select string_agg("check", ' ' order by "check") from outbox_health
                     where not ok and "check" in ('standby', 'workers', 'preload')"#;
    assert_eq!(standby.query_one::<String>(DB, failing), "standby");
    primary.stop(StopMode::Immediate);
    let began = Instant::now();
    assert!(standby.query_one::<bool>(DB, "select pg_promote()"));
    wait_healthy(&standby, "standby");
    assert_eq!(payload(&Consumer::new(broker, &queue)), "waits");
    println!(
        "the standby delivered {:.1?} after the call of pg_promote",
        began.elapsed()
    );
    assert_eq!(identity_problem(&standby, DB), "");
}

#[test]
fn a_physical_copy_with_another_identity_is_silent_until_it_is_adopted() {
    let broker = Broker::shared();
    let (exchange, queue) = exchange_and_queue(broker);
    let original = outbox_cluster(broker, &exchange);
    pause(&original);
    publish(&original, DB, "copied");
    let copy = original.copy(false, &["outbox.identity = 'staging'", "outbox.enabled = on"]);
    wait_silent(&copy, DB);
    assert_eq!(untouched(&copy, DB), 1);
    let problem = identity_problem(&copy, DB);
    assert!(
        problem.contains("outbox.identity is 'staging', but it was adopted as ''"),
        "{problem}"
    );
    assert!(copy.query_one::<bool>(DB, "select outbox_adopt()"));
    let consumer = Consumer::new(broker, &queue);
    assert_eq!(payload(&consumer), "copied");
    // A running server whose identity changes stops delivering at once, and continues when the old identity is back.
    copy.set_conf("outbox.identity", "");
    wait_silent(&copy, DB);
    publish(&copy, DB, "renamed");
    assert_eq!(untouched(&copy, DB), 1);
    copy.set_conf("outbox.identity", "staging");
    assert_eq!(payload(&consumer), "renamed");
}

/// Simulates pg_upgrade, which keeps the OID of a database and moves its tables to a server of another initdb.
#[test]
fn a_database_of_another_server_is_silent_until_it_is_adopted() {
    let broker = Broker::shared();
    let (exchange, queue) = exchange_and_queue(broker);
    let cluster = outbox_cluster(broker, &exchange);
    cluster.exec(
        DB,
        "update outbox_identity set system_identifier = system_identifier + 1",
    );
    wait_silent(&cluster, DB);
    publish(&cluster, DB, "upgraded");
    assert_eq!(untouched(&cluster, DB), 1);
    let problem = identity_problem(&cluster, DB);
    assert!(problem.contains("pg_upgrade"), "{problem}");
    cluster.restart();
    wait_silent(&cluster, DB);
    assert_eq!(untouched(&cluster, DB), 1);
    cluster.exec(DB, "select outbox_adopt()");
    assert_eq!(payload(&Consumer::new(broker, &queue)), "upgraded");
    // A database without the row is silent too.
    cluster.exec(DB, "delete from outbox_identity");
    wait_silent(&cluster, DB);
    assert!(cluster.query_one::<bool>(DB, "select outbox_adopt()"));
    wait_connected(&cluster);
}
