//! Tests of CREATE EXTENSION and DROP EXTENSION: under load, twice, by several sessions at once, in another database,
//! in another schema.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier};
use std::thread::JoinHandle;
use std::time::Duration;

use postgres::{Client, NoTls};
use support::{Broker, Cluster, Consumer};

use super::has_worker;
use support::*;

/// Writers that ignore errors: the extension may be dropped at any time.
struct Careless {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Careless {
    fn start(cluster: &Cluster) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let threads = (0..4).map(|n| {
            let (stop, conn_string) = (Arc::clone(&stop), cluster.conn_string(DB));
            std::thread::spawn(move || {
                let mut client = Client::connect(&conn_string, NoTls).expect("connect");
                let sql = format!(
                    "begin; select outbox_publish('T', '0', 'load', '{n}');
                     select outbox_publish('T', '0', 'load', 'x'); commit"
                );
                while !stop.load(Ordering::Acquire) {
                    if client.batch_execute(&sql).is_err() {
                        client.run("rollback");
                    }
                }
            })
        });
        let threads = threads.collect();
        Self { stop, threads }
    }
}

impl Drop for Careless {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        for thread in self.threads.drain(..) {
            let ended = thread.join();
            assert!(std::thread::panicking() || ended.is_ok(), "a writer panicked");
        }
    }
}

#[test]
fn drop_extension_under_load_succeeds_and_create_extension_restores_delivery() {
    let stage = Stage::new(&[]);
    stage.exec(
        DB,
        "create schema relay; alter database postgres set search_path = public, relay",
    );
    for schema in ["relay", "public", "relay"] {
        let writers = Careless::start(&stage);
        wait_true(&stage, "deliveries", "select published_total > 200 from outbox_status");
        let mut client = stage.connect(DB);
        let dropped = client.batch_execute("set statement_timeout = '1 min'; drop extension outbox");
        dropped.unwrap_or_else(|error| panic!("DROP EXTENSION: {error:#?}"));
        wait_true(
            &stage,
            "the worker to leave",
            "select not exists (select from pg_stat_activity where backend_type = 'outbox worker')",
        );
        drop(writers);
        stage.broker.delete_queue(&stage.queue);
        stage.broker.declare_queue(&stage.queue, serde_json::Value::Null);
        stage.broker.bind(&stage.queue, &stage.exchange, "#");
        let consumer = stage.consumer();
        stage.exec(DB, &format!("create extension outbox schema {schema}"));
        stage.publish("1");
        assert_eq!(consumer.next().label(), "1");
    }
    let log = stage.log();
    assert!(!log.contains("PANIC") && !log.contains("terminated by signal"), "{log}");
}

#[test]
fn the_schemas_of_the_extension_keep_their_names() {
    let cluster = idle_cluster(&[]);
    let refusal = |sql: &str| refused(&cluster, sql);
    cluster.exec(
        DB,
        r#"drop extension outbox; create schema relay; create schema mine; create schema "100%""#,
    );
    let error = refusal(r#"create extension outbox schema "100%""#);
    assert_eq!(error.code().code(), "3F000", "{error:?}");
    cluster.exec(DB, "create extension outbox schema relay");
    for schema in ["relay", "outbox_internal"] {
        let error = refusal(&format!("alter schema {schema} rename to other"));
        assert_eq!(error.code().code(), "55000", "{error:?}");
        assert!(
            error.hint().is_some_and(|hint| hint.contains("CREATE EXTENSION")),
            "{error:?}"
        );
    }
    cluster.exec(
        DB,
        "alter schema mine rename to yours; select relay.outbox_publish('T', '1')",
    );
    cluster.exec(DB, "drop extension outbox; alter schema relay rename to other");
}

#[test]
fn a_session_that_used_a_dropped_extension_can_use_the_new_one() {
    let cluster = idle_cluster(&[]);
    cluster.exec(DB, "create schema relay");
    let mut client = cluster.connect(DB);
    for schema in ["public", "relay", "public"] {
        let sql = format!(
            "drop extension outbox; create extension outbox schema {schema};
             select {schema}.outbox_publish('T', '1'); select setval('{schema}.outbox_events_seq_seq', 7);
             select {schema}.outbox_enqueue(7, 'key')"
        );
        client.run(&sql);
        let count = format!("select count(*) from {schema}.outbox");
        assert_eq!(client.value::<i64>(&count), 2, "{schema}");
    }
}

#[test]
fn a_second_database_gets_its_own_worker_without_a_restart() {
    let stage = Stage::new(&[]);
    let consumer = stage.consumer();
    stage.exec(DB, "create database shop");
    stage.exec("shop", "create extension outbox");
    stage.connect("shop").publish("1");
    assert_eq!(consumer.next().label(), "1");
    stage.publish("2");
    assert_eq!(consumer.next().label(), "2");
    for db in [DB, "shop"] {
        assert!(stage.query_one::<bool>(DB, &has_worker(db)), "{db} has no worker");
    }
}

/// The commit of CREATE EXTENSION wakes the launcher, which would otherwise rescan once a minute.
#[test]
fn the_first_worker_of_a_server_starts_at_once() {
    let cluster = Cluster::builder().start();
    // The launcher has searched for the role, which does not exist yet.
    cluster.wait_for_log("ready to accept connections", 0);
    wait_true(
        &cluster,
        "the launcher",
        "select exists (select from pg_stat_activity where backend_type = 'outbox launcher' and state = 'idle')",
    );
    within("the start of the worker", Duration::from_secs(30), || {
        cluster.exec(DB, "create extension outbox");
        wait_healthy(&cluster, "role");
        let (_, problem) = health(&cluster, "workers");
        assert!(
            !problem.contains("role"),
            "health reports a role that exists: {problem}"
        );
        wait_healthy(&cluster, "workers");
    });
}

#[test]
fn create_extension_twice_is_safe() {
    let cluster = unconnected_cluster("", "x", &[]);
    let sql = "create extension if not exists outbox";
    cluster.exec(DB, sql);
    cluster.exec(DB, sql);
    assert_eq!(cluster.query_one::<i64>(DB, "select count(*) from outbox_settings"), 1);
}

#[test]
fn create_extension_by_several_sessions_at_once_succeeds_in_each() {
    let cluster = Cluster::builder().start();
    for round in 0..3 {
        for result in at_once(&cluster, &[DB; 4], "create extension if not exists outbox") {
            result.unwrap_or_else(|error| panic!("round {round}: {error:?}"));
        }
        cluster.publish("1");
        cluster.exec(DB, "drop extension outbox");
    }
    // After a rollback the next session can create it; without IF NOT EXISTS the session gets the error of Postgres
    // itself.
    let mut first = cluster.connect(DB);
    first.run("begin; create extension outbox");
    std::thread::scope(|scope| {
        let second = scope.spawn(|| {
            cluster
                .connect(DB)
                .batch_execute("create extension if not exists outbox")
        });
        wait_true(
            &cluster,
            "the second to wait",
            "select exists (select from pg_locks where not granted and classid = 'pg_extension'::regclass)",
        );
        first.run("rollback");
        second.join().expect("no panic").expect("the second session creates it");
    });
    let error = first
        .batch_execute("create extension outbox")
        .expect_err("the extension exists");
    assert_eq!(error.code(), Some(&postgres::error::SqlState::DUPLICATE_OBJECT));
}

#[test]
fn create_extension_in_several_databases_at_once_is_safe() {
    for round in 0..3 {
        let cluster = Cluster::builder().start();
        for db in ["a", "b", "c"] {
            cluster.exec(DB, &format!("create database {db}"));
        }
        for result in at_once(&cluster, &["a", "b", "c"], "create extension outbox") {
            result.unwrap_or_else(|error| panic!("round {round}: {error:?}"));
        }
        for db in ["a", "b", "c"] {
            cluster.connect(db).publish("1");
        }
    }
}

/// Runs `sql` in each database, in sessions that start together.
fn at_once(cluster: &Cluster, databases: &[&str], sql: &str) -> Vec<Result<(), postgres::Error>> {
    let start = Barrier::new(databases.len());
    std::thread::scope(|scope| {
        let sessions: Vec<_> = databases
            .iter()
            .map(|db| {
                let (mut client, start) = (cluster.connect(db), &start);
                scope.spawn(move || {
                    start.wait();
                    client.batch_execute(sql)
                })
            })
            .collect();
        sessions
            .into_iter()
            .map(|session| session.join().expect("no panic"))
            .collect()
    })
}

#[test]
fn the_extension_lives_in_any_schema() {
    let broker = Broker::shared();
    let (exchange, queue) = exchange_and_queue(broker);
    let cluster = Cluster::builder()
        .conf(&format!("outbox.url = '{}'", broker.url()))
        .conf(&format!("outbox.exchange = '{exchange}'"))
        .start();
    cluster.exec(
        DB,
        r#"create schema "App Outbox"; create extension outbox schema "App Outbox""#,
    );
    let seq: i64 = cluster.query_one(
        DB,
        r#"select "App Outbox".outbox_publish('T', '{"label": 1}', 'thing', '1')"#,
    );
    let consumer = Consumer::new(broker, &queue);
    assert_eq!(consumer.next().label(), "1");
    wait_true(
        &cluster,
        "the confirm",
        r#"select exists (select from "App Outbox".outbox_messages where status = 'published')"#,
    );
    for sql in [
        &format!(r#"select "App Outbox".outbox_enqueue({seq})"#),
        r#"select count(*) from "App Outbox".outbox_health"#,
        r#"select count(*) from "App Outbox".outbox_status"#,
    ] {
        cluster.exec(DB, sql);
    }
    assert_eq!(consumer.next().label(), "1");
}
