//! Tests that a dump contains every message, and what happens to the messages in the restored database.

use std::io::Write as _;
use std::process::{Command, Stdio};

use support::{Broker, Cluster, Consumer, Mode, Proxy, Receiver, Reply, wait_until};

use support::*;

const RETENTION_S: i32 = 30 * 86_400;

const TABLES: [&str; 9] = [
    "outbox",
    "outbox_audit",
    "outbox_inbox",
    "outbox_inbox_owners",
    "outbox_history",
    "outbox_dead",
    "outbox_attempts_log",
    "outbox_events",
    "outbox_settings",
];

/// A database with every kind of row: published, dead, pending, scheduled, discarded. It has history of several days,
/// each day in its own partition, and four partitions of keys.
fn shop(cluster: &Cluster, schema: &str) {
    cluster.exec(DB, "create database shop");
    cluster.exec(DB, "alter database shop set outbox.partition_count = 4");
    cluster.exec(DB, &format!("alter database shop set search_path = public, {schema}"));
    cluster.exec(
        "shop",
        &format!("create schema if not exists {schema}; create extension outbox schema {schema}"),
    );
    (1..=3).for_each(|n| _ = cluster.connect("shop").publish(Event::new(n).key(n.to_string())));
    let without_event = "select outbox_enqueue(nextval(pg_get_serial_sequence('outbox_events', 'seq')), 'key')";
    cluster.exec("shop", without_event);
    wait_until("three published and one dead", LONG, || {
        let ended = "select (select count(*) from outbox_history) + (select count(*) from outbox_dead)";
        cluster.query_one::<i64>("shop", ended) == 4
    });
    cluster.exec(DB, "alter database shop set outbox.enabled = off");
    wait_until("a paused worker", LONG, || {
        cluster.query_one(
            "shop",
            "select exists (select from outbox_worker_status where state = 'paused')",
        )
    });
    (4..=8).for_each(|n| _ = cluster.connect("shop").publish(Event::new(n).key(n.to_string())));
    cluster.exec(
        "shop",
        "select outbox_publish('T', '9', available_at => '2999-01-01'); select outbox_discard(9);
         select outbox_inbox_receive('reader', 'm'), outbox_inbox_assign('reader', 'outbox_consumer')",
    );
    for days in [9, 1, 0] {
        let sql = format!(
            "select outbox_internal.make_partitions({RETENTION_S}, now() - interval '{days} days');
             insert into outbox_history (seq, enqueued_at, published_at, attempts, partition, destination)
             select 0, now(), now() - interval '{days} days' + g * interval '3 hours', g, 0, 'default' from generate_series(1, 40) g"
        );
        beside_maintenance(|| cluster.connect("shop").batch_execute(&sql));
    }
}

/// The partitions of the history, each with its time, its owner and its number of rows.
fn partitions(cluster: &Cluster, db: &str) -> String {
    let sql = "select string_agg(p::text || ' ' || c.relowner::regrole || ' ' ||
                                 (select count(*) from outbox_history h where h.tableoid = p.partition), E'\\n')
               from outbox_history_partitions() p join pg_class c on c.oid = p.partition";
    cluster.query_one(db, sql)
}

/// Creates a database to restore into, with delivery switched off.
fn silent_database(cluster: &Cluster, name: &str) {
    cluster.exec(DB, &format!("create database {name}"));
    cluster.exec(DB, &format!("alter database {name} set outbox.enabled = off"));
}

fn rows(cluster: &Cluster, db: &str, table: &str) -> String {
    let sql = format!("select coalesce(string_agg(t::text, E'\\n' order by t::text), '') from {table} t");
    cluster.query_one(db, &sql)
}

/// Runs a program of the installation against a database; returns its output.
fn tool(cluster: &Cluster, program: &str, db: &str, args: &[&str], input: &[u8]) -> Vec<u8> {
    let mut child = Command::new(cluster.installation().bin(program))
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
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap_or_else(|error| panic!("run {program}: {error}"));
    // The program reads its input to the end before it writes much, so no thread is needed; `input` is closed here.
    child
        .stdin
        .take()
        .expect("a pipe")
        .write_all(input)
        .expect("write to the program");
    let output = child.wait_with_output().expect("wait for the program");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program}: {}\n{stderr}", output.status);
    output.stdout
}

fn assert_same_rows(cluster: &Cluster, restored: &str) {
    for table in TABLES {
        let original = rows(cluster, "shop", table);
        assert!(!original.is_empty(), "{table} has rows");
        assert_eq!(rows(cluster, restored, table), original, "{table}");
    }
    let original = partitions(cluster, "shop");
    assert!(original.lines().count() > 6, "{original}");
    assert_eq!(partitions(cluster, restored), original);
    // The restored history continues with the same partitions as the original.
    for db in ["shop", restored] {
        let sql = format!("select outbox_internal.make_partitions({RETENTION_S}, now() + interval '9 days')");
        let made = beside_maintenance(|| cluster.connect(db).query_one(&sql, &[]));
        assert_eq!(made.get::<_, i32>(0), 4, "{db}");
    }
    assert_eq!(partitions(cluster, restored), partitions(cluster, "shop"));
    let last: i64 = cluster.query_one("shop", "select max(seq) from outbox_events");
    let next = cluster.connect(restored).publish(Event::new(10).key("10"));
    assert!(next > last, "the next seq is {next}, but {last} is taken");
    assert_eq!(
        cluster.query_one::<String>(restored, "select outbox_partition_of('order-42')"),
        cluster.query_one::<String>(restored, "select outbox_partition_of('order-42', 4)"),
    );
}

#[test]
fn a_dump_restores_every_row_and_the_sequence() {
    let stage = Stage::new(&[]);
    shop(&stage, "public");
    let dump = tool(&stage, "pg_dump", "shop", &[], b"");
    silent_database(&stage, "restored");
    tool(&stage, "psql", "restored", &["-q", "-v", "ON_ERROR_STOP=1"], &dump);
    assert_same_rows(&stage, "restored");

    stage.exec("restored", "select outbox_run_pass('5 min')");
    assert_eq!(
        stage.broker.queue_len(&stage.queue),
        3,
        "nothing was sent by the silent database"
    );
    let consumer = stage.consumer();
    consumer.recv_n(3, LONG);
    stage.exec(DB, "alter database restored set outbox.enabled = on");
    stage.exec("restored", "select outbox_adopt()");
    let mut again = labels(&consumer.recv_n(5, LONG));
    again.sort_unstable();
    assert_eq!(
        again,
        ["10", "4", "5", "6", "7"],
        "the restored database delivers what was pending"
    );
}

/// The dump has the extension in a schema other than public, with triggers on a user's table.
#[test]
fn a_dump_in_custom_format_restores_as_well() {
    let cluster = Stage::new(&[]).cluster;
    shop(&cluster, "relay");
    cluster.exec(
        "shop",
        "create table orders (id int primary key); select outbox_capture('orders')",
    );
    let dump = tool(&cluster, "pg_dump", "shop", &["-Fc"], b"");
    silent_database(&cluster, "restored");
    cluster.exec(DB, "alter database restored set search_path = public, relay");
    tool(&cluster, "pg_restore", "restored", &["--exit-on-error"], &dump);
    assert_same_rows(&cluster, "restored");
    cluster.exec("restored", "insert into orders values (42)");
    let captured = "select count(*) from outbox where key = 'orders:42'";
    assert_eq!(cluster.query_one::<i64>("restored", captured), 1);
}

/// Destinations of an owner, restored with and without the owner.
#[test]
fn a_restored_destination_delivers_to_its_owner_alone() {
    let receiver = Receiver::start(|_| Reply::status(200));
    let cluster = unconnected_cluster("", "nowhere", &["outbox.http_allow = '127.0.0.1'"]);
    cluster.exec(
        DB,
        &format!(
            "create role alice; create server hook foreign data wrapper outbox_http options (url '{0}');
             alter server hook owner to alice;
             create server gone foreign data wrapper outbox_http options (url '{0}'); alter server gone owner to alice;
             drop server gone",
            receiver.url("/")
        ),
    );
    pause(&cluster);
    cluster.publish(Event::new("one").to("hook"));
    let problem = |db: &str| {
        let problem = r#"select string_agg(concat_ws(' ', destination, problem, remedy), '') from outbox_health
                         where "check" = 'destination' and destination <> 'default'"#;
        cluster.query_one::<Option<String>>(db, problem)
    };
    let dumps = [
        ("with_owner", &[][..]),
        ("without", &["--no-owner"]),
        ("schema_only", &["--schema-only"]),
    ];
    for (delivered, (db, options)) in dumps.into_iter().enumerate() {
        let dump = tool(&cluster, "pg_dump", DB, options, b"");
        cluster.exec(DB, &format!("create database {db}"));
        tool(&cluster, "psql", db, &["-q", "-1", "-v", "ON_ERROR_STOP=1"], &dump);
        if options == ["--no-owner"] {
            // At once, and not ended by the adoption of the database.
            let wanted =
                "hook its server belongs to postgres, and the one before it belonged to alice: its messages wait";
            assert!(
                problem(db).is_some_and(|text| text.starts_with(wanted)),
                "{:?}",
                problem(db)
            );
        }
        cluster.exec(
            db,
            &format!("alter database {db} set outbox.enabled = on; select outbox_adopt()"),
        );
        if options == ["--no-owner"] {
            let noticed =
                "select exists (select from outbox_connections where destination = 'hook' and state = 'not adopted')";
            wait_until("a worker to notice", LONG, || cluster.query_one(db, noticed));
            assert_eq!(receiver.requests().len(), delivered);
            let remedy = Remedy::find(&cluster, db, "destination = 'hook'").expect("a problem");
            cluster.exec(db, remedy.command());
        }
        if options == ["--schema-only"] {
            cluster.connect(db).publish(Event::new("two").to("hook"));
        }
        wait_until("the message", LONG, || receiver.requests().len() > delivered);
        assert_eq!(problem(db), None, "{options:?}");
    }
    // A name whose server was dropped before the dump.
    cluster.exec(
        "with_owner",
        "create role mallory; create server gone foreign data wrapper outbox_http; alter server gone owner to mallory",
    );
    assert!(problem("with_owner").is_some_and(|text| text.contains("belongs to mallory")));
    cluster.exec("with_owner", "alter server gone owner to alice");
    assert_eq!(problem("with_owner").filter(|text| text.contains("belongs to")), None);
}

#[test]
fn a_dump_of_a_role_that_reads_no_secrets_posts_nothing_unsigned_after_its_restore() {
    let receiver = Receiver::start(|_| Reply::status(200));
    let cluster = unconnected_cluster("", "nowhere", &["outbox.http_allow = '127.0.0.1'"]);
    cluster.exec(
        DB,
        &format!(
            "create server hook foreign data wrapper outbox_http options (url '{}');
             create user mapping for outbox_worker server hook options (bearer_token 'of-the-worker');
             create role dumper login in role pg_read_all_data",
            receiver.url("/")
        ),
    );
    pause(&cluster);
    cluster.publish(Event::new("one").to("hook"));
    let dump = tool(&cluster, "pg_dump", DB, &["-U", "dumper"], b"");
    cluster.exec(DB, "create database restored");
    tool(
        &cluster,
        "psql",
        "restored",
        &["-q", "-1", "-v", "ON_ERROR_STOP=1"],
        &dump,
    );
    cluster.exec(
        "restored",
        "alter database restored set outbox.enabled = on; select outbox_adopt()",
    );
    let problem = "select problem from outbox_health where destination = 'hook' and not ok";
    let problem: String = cluster.query_one("restored", problem);
    assert_eq!(problem, "the user mapping for outbox_worker is empty");
    wait_until("the worker to refuse it", LONG, || {
        let is_so = "select exists (select from outbox_destination_status where destination = 'hook' and state = 'unconfigured')";
        cluster.query_one("restored", is_so)
    });
    assert_eq!(receiver.requests().len(), 0);
    cluster.exec(
        "restored",
        "alter user mapping for outbox_worker server hook options (add bearer_token 'of-the-worker')",
    );
    wait_until("the message", LONG, || receiver.requests().len() == 1);
    assert_eq!(receiver.requests()[0].header("authorization"), "Bearer of-the-worker");
}

/// A claim belongs to the worker that made it, which does not exist in the restored database.
#[test]
fn messages_in_flight_at_a_dump_are_delivered_after_the_restore() {
    let broker = Broker::shared();
    let (exchange, queue) = exchange_and_queue(broker);
    let proxy = Proxy::start(broker.port());
    let cluster = unconnected_cluster(&proxy.url(), &exchange, &[]);
    wait_connected(&cluster);
    proxy.mode(Mode::Blackhole);
    cluster.publish("1");
    wait_true(
        &cluster,
        "a message in flight",
        "select exists (select from outbox where claim_token is not null)",
    );
    let dump = tool(&cluster, "pg_dump", DB, &[], b"");
    cluster.exec(DB, "create database restored");
    cluster.exec(
        DB,
        &format!("alter database restored set outbox.url = '{}'", broker.url()),
    );
    // In one transaction: a worker that saw the message before its event would dead-letter it.
    tool(
        &cluster,
        "psql",
        "restored",
        &["-q", "-1", "-v", "ON_ERROR_STOP=1"],
        &dump,
    );
    cluster.exec("restored", "select outbox_adopt()");
    assert_eq!(Consumer::new(broker, &queue).next().label(), "1");
}
