//! A restored database continues to capture, and publishes no event a second time.

use std::process::{Command, Stdio};
use support::Session;

use support::Cluster;

use super::{events_of, server};
use support::DB;

/// Runs a program of the installation against a database. Its files are beside the data directory.
fn tool(cluster: &Cluster, program: &str, db: &str, args: &[&str]) {
    let mut command = Command::new(cluster.installation().bin(program));
    command
        .args([
            "-h",
            "127.0.0.1",
            "-U",
            "postgres",
            "-p",
            &cluster.port().to_string(),
            "-d",
            db,
        ])
        .args(args)
        .env_remove("PGAPPNAME")
        .stdin(Stdio::null());
    let output = command
        .output()
        .unwrap_or_else(|error| panic!("run {program}: {error}"));
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program}: {}\n{errors}", output.status);
}

#[test]
fn a_restored_database_continues_to_capture_and_enqueues_no_event_again() {
    let cluster = server();
    let dir = cluster.data_dir().with_file_name("dump");
    std::fs::create_dir(&dir).expect("a directory");
    let file = |name: &str| dir.join(name).to_string_lossy().into_owned();
    cluster.connect(DB).run("create schema shop; create table shop.product (id int primary key, name text, gone date);
         create table shop.journal (seq bigint, kind text);
         select outbox_capture('shop.product', type_prefix => $$It's \\$$, soft_delete_column => 'gone', aggregate_id => $$id || '\\'$$),
                outbox_attach('shop.journal', $$kind like 'Order%' -- but nothing else$$, key => 'kind'),
                outbox_subscribe('default', when_sql => $$type <> 'Noise'$$);
         insert into shop.product select g from generate_series(1, 100) g;
         insert into outbox_events (id, type, payload) select gen_random_uuid(), 'OrderPaid', '{}' from generate_series(1, 1000);
         insert into shop.journal values (1001, 'OrderPlaced'), (1002, 'Noise');
         delete from outbox");
    tool(&cluster, "pg_dump", DB, &["-f", &file("plain.sql")]);
    tool(&cluster, "pg_dump", DB, &["-Fc", "-f", &file("custom")]);
    tool(&cluster, "pg_dump", DB, &["-Fd", "-j2", "-f", &file("directory")]);
    for (n, (program, args)) in [
        ("psql", vec!["-q", "-v", "ON_ERROR_STOP=1", "-f", &file("plain.sql")]),
        (
            "psql",
            vec!["-q", "-1", "-v", "ON_ERROR_STOP=1", "-f", &file("plain.sql")],
        ),
        ("pg_restore", vec!["--exit-on-error", &file("custom")]),
        ("pg_restore", vec!["--exit-on-error", "-j4", &file("directory")]),
    ]
    .into_iter()
    .enumerate()
    {
        let db = format!("restored_{n}");
        cluster.exec(DB, &format!("create database {db}"));
        tool(&cluster, program, &db, &args);
        let mut client = cluster.connect(&db);
        let row = client
            .query_one(
                "select (select count(*) from outbox), (select count(*) from outbox_events)",
                &[],
            )
            .expect("counts");
        assert_eq!((row.get(0), row.get(1)), (0_i64, 1100_i64), "{program} {args:?}");
        client.run(
            "insert into shop.journal values (1001, 'OrderPlaced'), (1002, 'Noise');
             select outbox_publish('OrderPaid', '{}'), outbox_publish('Noise', '{}')",
        );
        let sql = "select string_agg(coalesce(key, '-'), ' ' order by seq) from outbox";
        let keys: String = client.value(sql);
        assert_eq!(keys, "OrderPlaced -", "{program} {args:?}");
        client.run("delete from outbox; delete from outbox_events");
        assert_eq!(
            events_of(&mut client, "update shop.product set gone = '2026-01-31' where id = 7"),
            [r#"It's \Deleted 7\ {"id": 7, "gone": "2026-01-31"}"#],
            "{program} {args:?}"
        );
        client.run("select outbox_unsubscribe('default'), outbox_uncapture('shop.product')");
    }
}

#[test]
fn dropping_the_extension_drops_its_triggers_and_keeps_the_tables() {
    let cluster = server();
    let mut client = cluster.connect(DB);
    client.run("create table a (id int primary key, seq int); select outbox_capture('a'), outbox_attach('a'), outbox_subscribe('default')");
    let error = client
        .batch_execute("drop extension outbox")
        .expect_err("the extension is in use");
    assert_eq!(error.code().map(|code| code.code()), Some("2BP01"), "{error:?}");
    client.run(
        "drop extension outbox cascade; insert into a values (1); truncate a;
         create extension outbox; select outbox_capture('a')",
    );
    assert_eq!(events_of(&mut client, "insert into a values (2)").len(), 1);
    // A subscription does not keep it.
    client.run("drop table a; select outbox_subscribe('default'); drop extension outbox; create extension outbox");
}
