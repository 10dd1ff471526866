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

/// Makes a database with the extension that delivers nothing, and loads only the data of the dump into it.
fn load_data(cluster: &Cluster, database: &str, file: &str, options: &[&str]) {
    cluster.exec(DB, &format!("create database {database}"));
    cluster.exec(DB, &format!("alter database {database} set outbox.enabled = off"));
    cluster.exec(database, "create extension outbox");
    let mut args = vec!["--data-only", "--exit-on-error", "-d", database];
    args.extend(options);
    args.push(file);
    tool(cluster, "pg_restore", &args);
    cluster.exec(DB, &format!("alter database {database} reset outbox.enabled"));
}

#[test]
fn data_that_is_restored_without_triggers_is_silent_until_it_is_adopted_and_keeps_its_settings() {
    let stage = Stage::new(&[]);
    stage.exec(DB, "select outbox_configure(partition_count => 64)");
    pause(&stage);
    stage.exec(DB, "select outbox_subscribe('default', types => '{T}')");
    for n in 0..40 {
        stage.publish(Event::new(format!("m{n}")).key(format!("k{n}")));
    }
    let file = stage.data_dir().with_file_name("dump");
    let file = file.to_str().expect("a path");
    tool(&stage, "pg_dump", &["-Fc", "-f", file, DB]);
    stage.set_conf("outbox.enabled", "on");
    let consumer = stage.consumer();
    consumer.recv_n(40, LONG);
    load_data(&stage, "copy", file, &["--disable-triggers"]);

    wait_silent(&stage, "copy");
    assert_eq!(untouched(&stage, "copy"), 40);
    let problem = identity_problem(&stage, "copy");
    assert!(problem.contains("restored from a dump"), "{problem}");
    let count = "select partition_count::int from outbox_settings";
    assert_eq!(stage.query_one::<i32>("copy", count), 64);
    let before = stage.query_one::<i64>("copy", "select count(*) from outbox");
    stage.exec("copy", "select outbox_publish('Other', '{}')");
    assert_eq!(
        stage.query_one::<i64>("copy", "select count(*) from outbox"),
        before,
        "the subscription is restored"
    );

    stage.exec("copy", "select outbox_adopt()");
    assert_eq!(consumer.recv_n(40, LONG).len(), 40);
}

#[test]
fn a_row_of_identity_that_came_without_the_trigger_silences_the_database_until_it_is_adopted() {
    let stage = Stage::new(&[]);
    stage.exec(
        DB,
        "alter table outbox_identity disable trigger outbox_identity_replace;
         insert into outbox_identity select * from outbox_identity;
         alter table outbox_identity enable always trigger outbox_identity_replace",
    );
    wait_silent(&stage, DB);
    stage.publish("waits");
    assert!(stage.query_one::<bool>(DB, "select outbox_adopt()"));
    assert_eq!(stage.consumer().next().label(), "waits");
    assert_eq!(stage.query_one::<i64>(DB, "select count(*) from outbox_identity"), 1);
}

#[test]
fn the_extension_is_created_and_changed_in_the_replica_role() {
    let stage = Stage::new(&[]);
    stage.exec(
        DB,
        "set session_replication_role = replica;
         drop extension outbox;
         create extension outbox;
         select outbox_configure(partition_count => 4)",
    );
    stage.publish("delivered");
    assert_eq!(stage.consumer().next().label(), "delivered");
}

#[test]
fn messages_in_partitions_that_do_not_exist_are_named_and_placed() {
    let cluster = Stage::new(&[]);
    let consumer = cluster.consumer();
    let misplace = |label: &str| {
        pause(&cluster);
        let seq = cluster.publish(Event::new(label).key("k"));
        cluster.exec(DB, &format!("update outbox set partition = 40 where seq = {seq}"));
        cluster.set_conf("outbox.enabled", "on");
        seq
    };
    let seq = misplace("by the remedy");
    wait_until("health to name them", LONG, || !health(&cluster, "partitions").0);
    let (_, problem) = health(&cluster, "partitions");
    assert!(problem.contains("partition p40, which does not exist"), "{problem}");
    let port = cluster.port().to_string();
    let show = [
        "show",
        "-h",
        "127.0.0.1",
        "-U",
        "postgres",
        "-p",
        &port,
        "-d",
        DB,
        &seq.to_string(),
    ];
    let shown = Command::new(support::program::outboxctl())
        .args(show)
        .output()
        .expect("outboxctl show");
    let shown = String::from_utf8_lossy(&shown.stdout);
    assert!(shown.contains("partition p40, which does not exist"), "{shown}");
    run_remedy(&cluster, "partitions");
    assert_eq!(consumer.next().label(), "by the remedy");

    cluster.exec(DB, "select outbox_configure(partition_count => 8)");
    misplace("by the adoption");
    cluster.exec(DB, "delete from outbox_identity; select outbox_adopt()");
    assert_eq!(consumer.next().label(), "by the adoption");
    assert_eq!(health(&cluster, "partitions"), (true, String::new()));
}

#[test]
fn a_sequence_behind_its_table_is_named_and_set() {
    let stage = Stage::new(&[]);
    let consumer = stage.consumer();
    let copy = "insert into outbox_events (seq, id, type, payload)
                select max(seq) + 3, gen_random_uuid(), 'T', '{}' from outbox_events";
    stage.publish("before");
    for (label, remedy) in [("by the remedy", true), ("by the adoption", false)] {
        stage.exec(DB, copy);
        let (_, problem) = health(&stage, "sequence");
        assert!(problem.contains("publishing fails with 23505"), "{problem}");
        match remedy {
            true => run_remedy(&stage, "sequence"),
            false => stage.exec(DB, "delete from outbox_identity; select outbox_adopt()"),
        }
        assert_eq!(health(&stage, "sequence"), (true, String::new()));
        (0..3).for_each(|_| _ = stage.publish(label));
    }
    assert_eq!(consumer.recv_n(7, LONG).len(), 7);
}

#[test]
fn a_sequence_whose_numbers_are_not_in_the_order_of_writing_is_named() {
    let cluster = quiet_cluster();
    for option in ["cache 20", "increment -1 maxvalue 1000 start 1000 restart", "cycle"] {
        cluster.exec(DB, &format!("alter sequence outbox_events_seq_seq {option}"));
        let (_, problem) = health(&cluster, "sequence");
        assert!(problem.contains("out of order"), "{option}: {problem}");
        run_remedy(&cluster, "sequence");
    }
}

#[test]
fn the_seqs_of_events_do_not_begin_again() {
    let cluster = quiet_cluster();
    cluster.publish("kept");
    let error = refused(&cluster, "truncate outbox, outbox_events restart identity");
    assert_eq!(error.code().code(), "55000", "{error:?}");
    assert!(
        error
            .hint()
            .is_some_and(|hint| hint.contains("without RESTART IDENTITY"))
    );
    cluster.exec(DB, "truncate outbox, outbox_events");
    assert_eq!(cluster.publish("next"), 2);
}

/// Runs statements without the triggers that refuse them, as a restore or a subscription does.
fn beside_triggers(cluster: &Cluster, sql: &str) {
    cluster.exec(DB, &format!("set session_replication_role = replica; {sql}"));
}

#[test]
fn tables_that_must_keep_their_rows_refuse_to_lose_them() {
    let cluster = idle_cluster(&[]);
    let tables = ["outbox_settings", "outbox_partitions", "outbox_source"];
    for sql in tables
        .iter()
        .flat_map(|table| [format!("delete from {table}"), format!("truncate {table}")])
        .chain(["truncate outbox_events, outbox, outbox_settings cascade".to_owned()])
    {
        let error = refused(&cluster, &sql);
        assert_eq!(error.code().code(), "55000", "{sql}: {error:?}");
        assert!(error.message().ends_with(" must keep its rows"), "{sql}: {error:?}");
        assert!(
            error
                .hint()
                .is_some_and(|hint| hint.contains("TRUNCATE outbox_events, outbox,"))
        );
    }
    cluster.exec(
        DB,
        "select outbox_configure(partition_count => 4, leasing => false); select outbox_configure(partition_count => 32);
         create table journal (position bigint primary key, kind text, at timestamptz); create role clerk;
         alter table journal owner to clerk;
         select outbox_source_set('journal', seq => 'position', type => 'kind', created_at => 'at');
         select outbox_source_reset()",
    );
    assert_eq!(cluster.publish("kept"), 1);
    let rows = "select (select count(*) from outbox_settings) || ' ' || (select count(*) from outbox_partitions)";
    assert_eq!(cluster.query_one::<String>(DB, rows), "1 32");
}

/// As a test suite does that empties all tables, one after the other, while a worker runs.
#[test]
fn each_table_refuses_to_be_emptied_or_delivery_goes_on_without_its_rows() {
    let stage = Stage::new(&[]);
    let consumer = stage.consumer();
    let mut client = stage.connect(DB);
    let tables: Vec<String> = client.value(
        "select array_agg(c.oid::regclass::text order by c.relname) from pg_depend d join pg_extension x on x.oid = d.refobjid
         join pg_class c on c.oid = d.objid
         where x.extname = 'outbox' and d.classid = 'pg_class'::regclass and c.relkind in ('r', 'p')",
    );
    assert!(tables.len() > 15, "{tables:?}");
    let mut kept = Vec::new();
    for table in &tables {
        if client.batch_execute(&format!("truncate {table} cascade")).is_err() {
            kept.push(table.as_str());
        }
        if table == "outbox_identity" {
            wait_for_problem(&stage, "identity");
            client.run("select outbox_adopt()");
        }
        stage.publish(Event::new(table.as_str()).key("k"));
        assert_eq!(&consumer.next().label(), table);
        wait_until(&format!("health without the rows of {table}"), LONG, || {
            client.value("select bool_and(ok) from outbox_health")
        });
    }
    assert_eq!(kept, ["outbox_partitions", "outbox_settings", "outbox_source"]);
}

#[test]
fn lost_rows_of_settings_and_partitions_are_named_and_made_again() {
    let stage = Stage::new(&[]);
    let consumer = stage.consumer();
    stage.exec(DB, "select outbox_configure(partition_count => 8)");
    beside_triggers(&stage, "delete from outbox_settings");
    let error = refused(&stage, "select outbox_publish('T', '{}')");
    assert_eq!(error.code().code(), "55000", "{error:?}");
    assert!(error.hint().is_some_and(|hint| hint.contains("outbox_configure()")));
    let (_, problem) = health(&stage, "partitions");
    assert!(problem.contains("outbox_settings has lost its row"), "{problem}");
    run_remedy(&stage, "partitions");
    stage.publish(Event::new("after the settings").key("k"));
    assert_eq!(consumer.next().label(), "after the settings");
    assert_eq!(
        stage.query_one::<i16>(DB, "select partition_count from outbox_settings"),
        8
    );

    for lost in [
        "truncate outbox_partitions",
        "delete from outbox_partitions where partition > 0",
    ] {
        pause(&stage);
        stage.publish(Event::new(lost));
        beside_triggers(&stage, lost);
        stage.set_conf("outbox.enabled", "on");
        let (_, problem) = health(&stage, "partitions");
        assert!(problem.contains("of 8 partitions have lost their row"), "{problem}");
        run_remedy(&stage, "partitions");
        assert_eq!(consumer.next().label(), lost);
    }
}

#[test]
fn a_source_whose_row_is_lost_can_be_reset() {
    let cluster = idle_cluster(&[]);
    cluster.exec(
        DB,
        "create table journal (position bigint primary key, kind text, at timestamptz); create role clerk;
         alter table journal owner to clerk;
         select outbox_source_set('journal', seq => 'position', type => 'kind', created_at => 'at')",
    );
    beside_triggers(&cluster, "truncate outbox_source");
    let error = refused(&cluster, "select outbox_enqueue(1)");
    assert_eq!(error.code().code(), "55000", "{error:?}");
    let (_, problem) = health(&cluster, "source");
    assert_eq!(problem, "outbox_source has lost its row");
    let remedy = Remedy::wait(&cluster, r#""check" = 'source'"#);
    assert!(cluster.query_one::<bool>(DB, remedy.command()));
    assert_eq!(health(&cluster, "source"), (true, String::new()));
    assert_eq!(cluster.publish("again"), 1);
    assert!(!cluster.query_one::<bool>(DB, "select outbox_source_reset()"));
}

/// However it came: the events of the seqs may be gone, and only their messages be known.
#[test]
fn seqs_that_begin_again_are_named_and_set() {
    let cluster = quiet_cluster();
    for _ in 0..3 {
        cluster.publish("before");
    }
    cluster.exec(
        DB,
        "select outbox_internal.record_drawn_seq(); truncate outbox, outbox_events", // maintenance does so
    );
    let again = [
        "select setval('outbox_events_seq_seq', 1)",
        "alter sequence outbox_events_seq_seq restart",
        "alter table outbox_events alter seq restart with 2",
    ];
    for (number, sql) in again.iter().enumerate() {
        assert_eq!(health(&cluster, "sequence"), (true, String::new()));
        cluster.exec(DB, sql);
        let (_, problem) = health(&cluster, "sequence");
        assert!(problem.contains("were drawn up to 3 before"), "{sql}: {problem}");
        match number {
            0 => cluster.exec(DB, "update outbox_identity set restored = true; select outbox_adopt()"),
            _ => run_remedy(&cluster, "sequence"),
        }
    }
    assert!(cluster.publish("after") > 3);
}
