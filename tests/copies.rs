//! A copy delivers nothing until it is adopted, and a standby delivers as soon as it is promoted. databases.rs tests
//! copies of a database within one server.

use std::process::Command;
use std::time::Instant;

use support::{Broker, Cluster, Consumer, StopMode, wait_until};

use support::*;

const SILENT: &str = "select coalesce(bool_and(alive and state = 'not adopted'), false) from outbox_worker_status";

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
    let stage = Stage::new(&[]);
    pause(&stage);
    (0..3).for_each(|_| _ = stage.publish("restored"));
    let file = stage.data_dir().with_file_name("dump");
    let file = file.to_str().expect("a path");
    tool(&stage, "pg_dump", &["-Fc", "-f", file, DB]);
    stage.set_conf("outbox.enabled", "on");
    let consumer = stage.consumer();
    consumer.recv_n(3, LONG);

    stage.exec(DB, "create database copy");
    // The worker exists before the rows do, and before the row that records the identity.
    tool(
        &stage,
        "pg_restore",
        &["--exit-on-error", "--section=pre-data", "-d", "copy", file],
    );
    wait_silent(&stage, "copy");
    let rest = [
        "--exit-on-error",
        "--section=data",
        "--section=post-data",
        "-d",
        "copy",
        file,
    ];
    tool(&stage, "pg_restore", &rest);
    stage.connect("copy").publish("of the copy");
    wait_silent(&stage, "copy");
    assert_eq!(untouched(&stage, "copy"), 4);
    let problem = identity_problem(&stage, "copy");
    assert!(problem.contains("restored from a dump"), "{problem}");
    let detail = "select state || ' ' || detail from outbox_destination_status";
    assert_eq!(
        stage.query_one::<String>("copy", detail),
        "not adopted it was restored from a dump"
    );
    stage.publish("of the original");
    assert_eq!(consumer.next().label(), "of the original");

    let adopt = "select outbox_adopt('moved to this server')";
    assert!(stage.query_one::<bool>("copy", adopt));
    let payloads: Vec<_> = (0..4).map(|_| consumer.next().label()).collect();
    assert_eq!(payloads, ["restored", "restored", "restored", "of the copy"]);
    assert_eq!(identity_problem(&stage, "copy"), "");
    assert!(
        !stage.query_one::<bool>("copy", adopt),
        "the database is adopted already"
    );
    let audit = "select string_agg(format('%s %s %s', action, filter->>'why', reason), '; ') from outbox_audit";
    assert_eq!(
        stage.query_one::<String>("copy", audit),
        "adopt it was restored from a dump moved to this server"
    );
}

#[test]
fn an_old_state_restored_into_its_own_database_is_silent_and_a_new_extension_is_not() {
    let stage = Stage::new(&[]);
    stage.publish("before");
    wait_published(&stage, 1);
    let file = stage.data_dir().with_file_name("dump");
    let file = file.to_str().expect("a path");
    tool(&stage, "pg_dump", &["-Fc", "-f", file, DB]);
    tool(&stage, "pg_restore", &["--exit-on-error", "--clean", "-d", DB, file]);
    wait_silent(&stage, DB);
    stage.exec(DB, "drop extension outbox; create extension outbox");
    stage.publish("again");
    let consumer = stage.consumer();
    assert_eq!(consumer.next().label(), "before");
    assert_eq!(consumer.next().label(), "again");
}

#[test]
fn a_promoted_standby_delivers_waiting_messages() {
    let broker = Broker::shared();
    let (exchange, queue) = exchange_and_queue(broker);
    let primary = outbox_cluster(broker, &exchange);
    let standby = primary.copy(true, &[]);
    pause(&primary);
    primary.publish("waits");
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
    assert_eq!(Consumer::new(broker, &queue).next().label(), "waits");
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
    original.publish("copied");
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
    assert_eq!(consumer.next().label(), "copied");
    // A running server whose identity changes stops delivering at once, and continues when the old identity is back.
    copy.set_conf("outbox.identity", "");
    wait_silent(&copy, DB);
    copy.publish("renamed");
    assert_eq!(untouched(&copy, DB), 1);
    copy.set_conf("outbox.identity", "staging");
    assert_eq!(consumer.next().label(), "renamed");
}

/// Simulates pg_upgrade, which keeps the OID of a database and moves its tables to a server of another initdb.
#[test]
fn a_database_of_another_server_is_silent_until_it_is_adopted() {
    let stage = Stage::new(&[]);
    stage.exec(
        DB,
        "update outbox_identity set system_identifier = system_identifier + 1",
    );
    wait_silent(&stage, DB);
    stage.publish("upgraded");
    assert_eq!(untouched(&stage, DB), 1);
    let problem = identity_problem(&stage, DB);
    assert!(problem.contains("pg_upgrade"), "{problem}");
    stage.restart();
    wait_silent(&stage, DB);
    assert_eq!(untouched(&stage, DB), 1);
    stage.exec(DB, "select outbox_adopt()");
    assert_eq!(stage.consumer().next().label(), "upgraded");
    // A database without the row is silent too.
    stage.exec(DB, "delete from outbox_identity");
    wait_silent(&stage, DB);
    assert!(stage.query_one::<bool>(DB, "select outbox_adopt()"));
    wait_connected(&stage);
}
