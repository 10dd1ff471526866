//! Every database gets its workers, and no worker is in the way of statements on its database. Databases are created,
//! dropped, moved, renamed and copied: under load, by owners, by other roles, and by statements that fail half-way.

use std::time::Duration;

use postgres::error::SqlState;
use postgres::{Client, NoTls};
use support::{Broker, Cluster, Consumer, Mode, Proxy, wait_until};

use support::faults::{Faults, messages_to};
use support::load::{Load, Plan};
use support::oracle::{Verdict, judge};
use support::stops::{END_MAX, ends_after};
use support::wait::Pauses;
use support::*;

/// Shorter than the minute after which the launcher rescans the databases without a request. So a test that passes
/// proves that the launcher was notified.
const SOON: Duration = Duration::from_secs(30);

// ---- the databases of a test ----------------------------------------------------------------------------------------

/// A server with the extension in `postgres` and `shop`. The workers of each database deliver to a separate queue.
struct Served {
    broker: &'static Broker,
    cluster: Cluster,
    queue: String,
    shop_exchange: String,
    shop_queue: String,
}

impl Served {
    fn start() -> Self {
        let broker = Broker::shared();
        let (exchange, queue) = exchange_and_queue(broker);
        let (shop_exchange, shop_queue) = exchange_and_queue(broker);
        let cluster = outbox_cluster(broker, &exchange);
        let served = Self {
            broker,
            cluster,
            queue,
            shop_exchange,
            shop_queue,
        };
        served.make_shop();
        served
    }

    fn make_shop(&self) {
        make_shop(&self.cluster, &format!("outbox.exchange = '{}'", self.shop_exchange));
    }

    /// Asserts that the messages of `postgres`, which no worker left, arrived once and in order.
    fn assert_perfect(&self, load: Load) {
        self.verdict(DB, &self.queue, load).assert_perfect();
    }

    /// Asserts that no message of `shop` was lost or reordered. A worker that leaves waits 0.7 s for the broker, so it
    /// may repeat what was in flight.
    fn assert_kept(&self, load: Load, leaves: &Faults) {
        let verdict = self.verdict("shop", &self.shop_queue, load);
        leaves.assert_explain(&verdict, &messages_to(&self.cluster, "shop", "default"));
    }

    fn verdict(&self, database: &str, queue: &str, load: Load) -> Verdict {
        let sent = load.stop();
        wait_until(&format!("{database} to be drained"), LONG, || {
            self.cluster
                .query_one(database, "select not exists (select from outbox)")
        });
        let arrived = arrived(&all_of(self.broker, queue));
        assert!(!arrived.is_empty(), "{database} delivered nothing");
        judge(&sent, &arrived)
    }
}

fn make_shop(cluster: &Cluster, setting: &str) {
    cluster.exec(DB, "create database shop");
    cluster.exec(DB, &format!("alter database shop set {setting}"));
    cluster.exec("shop", "create extension outbox");
    wait_within("the worker of shop to own its partitions", SOON, || {
        cluster.query_one(
            "shop",
            "select exists (select from outbox_worker_status where partitions > 0)",
        )
    });
    wait_workers(cluster, &["postgres", "shop"]);
}

/// A server whose only worker is in `postgres`, beside an idle `shop`: for tests that need no messages.
fn idle() -> Cluster {
    let cluster = unconnected_cluster("", "x", &[]);
    make_shop(&cluster, "outbox.enabled = on");
    cluster
}

/// Producers in `shop`. None of their sessions lasts; otherwise no statement could have the database to itself.
fn load_in_shop(cluster: &Cluster) -> Load {
    let plan = Plan {
        database: "shop",
        reconnects: true,
        transactions_per_s: Some(20),
        ..Plan::default()
    };
    Load::start(cluster, &plan)
}

#[track_caller]
fn refused(client: &mut Client, sql: &str, code: &SqlState) {
    let error = client.batch_execute(sql).expect_err(sql);
    assert_eq!(error.code(), Some(code), "{sql}: {error:?}");
}

/// Database and process id of each worker.
fn workers(cluster: &Cluster) -> Vec<(String, i32)> {
    let sql =
        "select coalesce(datname, ''), pid from pg_stat_activity where backend_type = 'outbox worker' order by 1, 2";
    let rows = cluster.connect(DB).query(sql, &[]).expect("pg_stat_activity");
    rows.iter().map(|row| (row.get(0), row.get(1))).collect()
}

/// Waits until each of these databases has its worker, and no other.
#[track_caller]
fn wait_workers(cluster: &Cluster, databases: &[&str]) {
    wait_within(&format!("workers in {databases:?} alone"), SOON, || {
        workers(cluster).iter().map(|(database, _)| database).eq(databases)
    });
}

fn worker_of_shop(cluster: &Cluster) -> i32 {
    let workers = workers(cluster);
    let shop = workers.iter().find(|(database, _)| database == "shop");
    shop.unwrap_or_else(|| panic!("no worker in shop: {workers:?}")).1
}

/// Waits until the worker of shop is a process other than `before`.
fn wait_for_another_worker(cluster: &Cluster, before: i32) {
    wait_within("another worker in shop", SOON, || {
        let workers = workers(cluster);
        let others = |(database, pid): &&(String, i32)| database == "shop" && *pid != before;
        workers.len() == 2 && workers.iter().any(|worker| others(&worker))
    });
}

// ---- under load -----------------------------------------------------------------------------------------------------

#[test]
fn a_database_is_dropped_under_load_and_created_again() {
    let served = Served::start();
    let cluster = &served.cluster;
    let load = Load::start(cluster, &Plan::default());
    for options in ["", "with (force)"] {
        let shop = load_in_shop(cluster);
        shop.wait_for_more(20);
        load.wait_for_more(100);
        admin(cluster).run(&format!("drop database shop {options}"));
        wait_workers(cluster, &["postgres"]);
        shop.stop();
        served.make_shop();
    }
    served.assert_perfect(load);
}

fn rename_and_back(cluster: &Cluster, leaves: &mut Faults) {
    for (from, to) in [("shop", "store"), ("store", "shop")] {
        leaves.during(1, || {
            admin(cluster).run(&format!("alter database {from} rename to {to}"));
            wait_workers(cluster, &["postgres", to]);
        });
    }
}

#[test]
fn a_database_is_renamed_under_load_and_back() {
    let served = Served::start();
    let cluster = &served.cluster;
    let (load, shop) = (Load::start(cluster, &Plan::default()), load_in_shop(cluster));
    let mut leaves = Faults::default();
    for _ in 0..2 {
        shop.wait_for_more(20);
        load.wait_for_more(100);
        rename_and_back(cluster, &mut leaves);
    }
    shop.wait_for_more(20);
    served.assert_kept(shop, &leaves);
    served.assert_perfect(load);
}

#[test]
fn a_database_is_renamed_and_dropped_while_a_synchronous_standby_is_away() {
    let served = Served::start();
    let cluster = &served.cluster;
    miss_standby(cluster);
    let (load, shop) = (Load::start(cluster, &Plan::default()), load_in_shop(cluster));
    let mut leaves = Faults::default();
    for _ in 0..2 {
        shop.wait_for_more(20);
        rename_and_back(cluster, &mut leaves);
    }
    shop.wait_for_more(20);
    served.assert_kept(shop, &leaves);
    admin(cluster).run("drop database shop");
    served.assert_perfect(load);
}

#[test]
fn a_database_moves_to_another_tablespace_and_back_under_load() {
    let served = Served::start();
    let cluster = &served.cluster;
    let mut client = admin(cluster);
    client.run("set allow_in_place_tablespaces = on");
    client.run("create tablespace elsewhere location ''");
    let (load, shop) = (Load::start(cluster, &Plan::default()), load_in_shop(cluster));
    let mut leaves = Faults::default();
    for tablespace in ["elsewhere", "pg_default"] {
        shop.wait_for_more(20);
        load.wait_for_more(100);
        let before = worker_of_shop(cluster);
        leaves.during(1, || {
            client.run(&format!("alter database shop set tablespace {tablespace}"));
            wait_for_another_worker(cluster, before);
        });
    }
    shop.wait_for_more(20);
    served.assert_kept(shop, &leaves);
    served.assert_perfect(load);
}

#[test]
fn a_database_is_copied_under_load_and_the_copy_gets_its_own_worker() {
    let served = Served::start();
    let cluster = &served.cluster;
    let shop = load_in_shop(cluster);
    shop.wait_for_more(20);
    let mut leaves = Faults::default();
    leaves.during(1, || {
        admin(cluster).run("create database copy template shop");
        wait_workers(cluster, &["copy", "postgres", "shop"]);
    });
    cluster.connect("copy").run("select outbox_adopt()");
    // The copy delivers to the exchange of the server; a setting of a database is not copied.
    cluster.connect("copy").publish("of the copy");
    let consumer = Consumer::new(served.broker, &served.queue);
    wait_until("a message of the copy", LONG, || {
        consumer.next().label() == "of the copy"
    });
    shop.wait_for_more(20);
    served.assert_kept(shop, &leaves);
}

#[test]
fn two_concurrent_copies_of_databases_do_not_block_each_other() {
    let cluster = idle();
    for round in 0..3 {
        std::thread::scope(|scope| {
            for name in ["a", "b", "c"] {
                let cluster = &cluster;
                scope.spawn(move || {
                    admin(cluster).run(&format!("create database {name}{round} template shop"));
                });
            }
        });
        for name in ["a", "b", "c"] {
            admin(&cluster).run(&format!("drop database {name}{round}"));
        }
    }
    wait_workers(&cluster, &["postgres", "shop"]);
}

#[test]
fn a_setting_that_changes_while_the_first_worker_begins_takes_effect() {
    let cluster = idle_cluster(&[]);
    let mut other = cluster.connect(DB);
    other.run("begin; lock table outbox_settings in access exclusive mode");
    cluster.set_conf("outbox.workers", "1");
    wait_true(
        &cluster,
        "the worker's session to have begun",
        "select exists (select from pg_stat_activity where backend_type = 'outbox worker' and wait_event_type = 'Lock')",
    );
    cluster.exec(DB, "alter database postgres set outbox.enabled = off");
    other.run("commit");
    wait_true(&cluster, "the worker to pause", &states("paused"));
}

#[test]
fn a_new_database_accepts_every_statement_at_once() {
    let cluster = idle();
    let mut client = admin(&cluster);
    for _ in 0..10 {
        client.run("create database fresh");
        client.run("alter database fresh rename to stale");
        client.run("create database copy template stale");
        client.run("drop database stale");
        client.run("drop database copy");
    }
    wait_workers(&cluster, &["postgres", "shop"]);
    // After all these statements, no leftover blocks a further one.
    client.run("alter database shop rename to store");
    wait_workers(&cluster, &["postgres", "store"]);
}

// ---- copies ---------------------------------------------------------------------------------------------------------

#[test]
fn a_copy_is_silent_until_it_is_adopted_under_any_name() {
    let served = Served::start();
    let cluster = &served.cluster;
    cluster.exec(DB, "alter database shop set outbox.enabled = off");
    wait_until("shop to pause", LONG, || cluster.query_one("shop", &states("paused")));
    cluster.connect("shop").publish("copied");

    let mut client = admin(cluster);
    client.run("create database copy template shop");
    client.run("drop database shop");
    client.run("create database shop template copy");
    for database in ["copy", "shop"] {
        wait_until(&format!("{database} to be silent"), LONG, || {
            cluster.query_one(database, &states("not adopted"))
        });
        let waits = "select exists (select from outbox where claim_token is null)";
        cluster.exec(database, "select outbox_run_pass('5 min')");
        assert!(cluster.query_one::<bool>(database, waits), "{database}");
    }
    assert_eq!(served.broker.queue_len(&served.queue), 0);
    let consumer = Consumer::new(served.broker, &served.queue);
    for database in ["copy", "shop"] {
        assert!(cluster.query_one::<bool>(database, "select outbox_adopt()"));
        assert_eq!(consumer.next().label(), "copied", "{database}");
    }
    cluster.connect("shop").publish("fence");
    assert_eq!(consumer.next().label(), "fence");
}

/// Whether a worker exists and all its destinations have this state.
fn states(state: &str) -> String {
    format!("select coalesce(bool_and(alive and state = '{state}'), false) from outbox_worker_status")
}

#[test]
fn a_template_with_the_extension_has_no_worker_and_its_copies_have() {
    let cluster = idle();
    cluster.exec(DB, "alter database shop is_template true");
    wait_workers(&cluster, &["postgres"]);
    admin(&cluster).run("create database copy template shop");
    wait_workers(&cluster, &["copy", "postgres"]);
    cluster.exec(DB, "alter database shop is_template false");
    wait_workers(&cluster, &["copy", "postgres", "shop"]);
}

// ---- rights ---------------------------------------------------------------------------------------------------------

#[test]
fn a_stranger_and_a_refused_statement_stop_no_worker() {
    let cluster = idle();
    cluster.exec(DB, "create role stranger login createdb");
    let before = workers(&cluster);
    let logged = cluster.log_offset();
    let as_stranger = cluster.conn_string(DB).replace("user=postgres", "user=stranger");
    let mut stranger = Client::connect(&as_stranger, NoTls).expect("connect as the stranger");
    for sql in [
        "drop database shop",
        "drop database shop with (force)",
        "alter database shop rename to store",
        "alter database shop set tablespace pg_default",
        "alter database shop allow_connections false",
        "create database copy template shop",
    ] {
        refused(&mut stranger, sql, &SqlState::INSUFFICIENT_PRIVILEGE);
    }
    let mut client = admin(&cluster);
    for sql in [
        "drop database shop",
        "alter database shop set tablespace pg_default",
        "create database copy template shop",
    ] {
        refused(&mut client, &format!("begin; {sql}"), &SqlState::ACTIVE_SQL_TRANSACTION);
        client.run("rollback");
    }
    refused(&mut client, "drop database postgres", &SqlState::OBJECT_IN_USE);
    refused(&mut client, "drop database nowhere", &SqlState::INVALID_CATALOG_NAME);
    client.run("drop database if exists nowhere");
    assert_eq!(workers(&cluster), before);
    let log = cluster.log().split_off(logged);
    assert!(!log.contains("outbox server-1: ended"), "{log}");
}

/// Each DO, CALL, COPY and COMMIT of the server passes through the ProcessUtility hook.
#[test]
fn an_error_of_another_statement_passes_the_hook_unchanged() {
    let cluster = idle();
    let mut client = admin(&cluster);
    client.run("create table t (id int constraint only_once primary key)");
    let sql = "do $$ begin insert into t values (1), (1); end $$";
    let error = client.batch_execute(sql).expect_err("a duplicate");
    let error = error.as_db_error().expect("an error of the server");
    assert_eq!((error.table(), error.constraint()), (Some("t"), Some("only_once")));
}

/// The worker's role is not a role of the owner, so Postgres would not let the owner end its sessions.
#[test]
fn an_owner_that_is_not_a_superuser_drops_with_force() {
    let cluster = idle();
    cluster.exec(DB, "create role owner login; alter database shop owner to owner");
    let as_owner = cluster.conn_string(DB).replace("user=postgres", "user=owner");
    let mut owner = Client::connect(&as_owner, NoTls).expect("connect as the owner");
    owner.run("drop database shop with (force)");
    wait_workers(&cluster, &["postgres"]);
}

// ---- statements that fail or wait -----------------------------------------------------------------------------------

#[test]
fn a_drop_that_fails_brings_the_worker_back() {
    let served = Served::start();
    let cluster = &served.cluster;
    let _session = cluster.connect("shop");
    let before = worker_of_shop(cluster);
    // Core waits 5 s for the session, and then refuses.
    refused(&mut cluster.connect(DB), "drop database shop", &SqlState::OBJECT_IN_USE);
    wait_for_another_worker(cluster, before);
    cluster.connect("shop").publish("after the drop");
    assert_eq!(
        Consumer::new(served.broker, &served.shop_queue).next().label(),
        "after the drop"
    );
}

/// Drops `shop` until its worker `before` has left. Each try is cancelled after `timeout`, and a slow launcher may not
/// have noticed it by then.
fn drop_in_vain(cluster: &Cluster, timeout: &str, before: i32) {
    let mut client = cluster.connect(DB);
    client.run(&format!("set statement_timeout = '{timeout}'"));
    wait_until("the worker to leave", LONG, || {
        refused(&mut client, "drop database shop", &SqlState::QUERY_CANCELED);
        workers(cluster).iter().all(|(_, pid)| *pid != before)
    });
}

#[test]
fn a_drop_that_is_cancelled_brings_the_worker_back() {
    let cluster = idle();
    let _session = cluster.connect("shop"); // makes Postgres wait
    let before = worker_of_shop(&cluster);
    drop_in_vain(&cluster, "1s", before);
    wait_for_another_worker(&cluster, before);
}

#[test]
fn a_drop_whose_session_ends_brings_the_worker_back() {
    let cluster = idle();
    let _session = cluster.connect("shop");
    let before = worker_of_shop(&cluster);
    std::thread::scope(|scope| {
        let dropper = scope.spawn(|| admin(&cluster).batch_execute("drop database shop"));
        wait_workers(&cluster, &["postgres"]);
        let end = "select bool_or(pg_terminate_backend(pid)) from pg_stat_activity where query = 'drop database shop'";
        assert!(cluster.query_one::<bool>(DB, end));
        dropper.join().expect("no panic").expect_err("an ended session");
    });
    wait_for_another_worker(&cluster, before);
}

/// A server whose `shop` has messages in flight to a broker that no longer answers, so that its worker takes time to
/// leave.
fn with_silent_broker() -> (Cluster, Proxy) {
    let broker = Broker::shared();
    let (exchange, _) = exchange_and_queue(broker);
    let proxy = Proxy::start(broker.port());
    // The log has the statements, and the ends of workers without an error.
    let conf = ["log_statement = ddl", "log_min_messages = debug1"];
    let cluster = unconnected_cluster(&proxy.url(), &exchange, &conf);
    make_shop(&cluster, "outbox.enabled = on");
    wait_until("shop to be connected", LONG, || {
        let sql = "select exists (select from outbox_worker_status where state = 'connected' and partitions > 0)";
        cluster.query_one("shop", sql)
    });
    proxy.mode(Mode::Blackhole);
    cluster.exec(
        "shop",
        "select outbox_publish('T', '{}', 'thing', n::text) from generate_series(1, 5000) n",
    );
    wait_until("messages in flight", LONG, || {
        cluster.query_one("shop", "select in_flight > 0 from outbox_status")
    });
    (cluster, proxy)
}

#[test]
fn a_drop_that_is_cancelled_while_the_worker_leaves_brings_it_back() {
    let (cluster, _proxy) = with_silent_broker();
    let _session = cluster.connect("shop"); // no try may succeed
    let before = worker_of_shop(&cluster);
    drop_in_vain(&cluster, "200ms", before);
    wait_for_another_worker(&cluster, before);
}

#[test]
fn a_drop_does_not_wait_for_a_broker_that_does_not_answer() {
    let (cluster, _proxy) = with_silent_broker();
    let (worker, pauses) = (worker_of_shop(&cluster), Pauses::watch());
    admin(&cluster).run("drop database shop");
    let lost = pauses.end();
    // The postmaster logs the end of a process after others have seen it.
    cluster.wait_for_log(&format!("(PID {worker}) exited"), 0);
    let log = cluster.log();
    let ends = ends_after(&log, "statement: drop database shop");
    let end = ends.iter().find(|(pid, _)| *pid == worker.to_string());
    let took = end.expect("the worker ends").1;
    assert!(took <= END_MAX + lost, "{took:?} while the machine lost {lost:?}");
}

#[test]
fn a_drop_with_force_does_not_wait_for_a_worker_that_waits_for_a_lock() {
    let cluster = idle();
    let mut session = cluster.connect("shop");
    session.run("begin; lock table outbox_workers in access exclusive mode");
    wait_true(
        &cluster,
        "the worker of shop to wait for the lock",
        "select exists (select from pg_stat_activity
                        where backend_type = 'outbox worker' and datname = 'shop' and wait_event_type = 'Lock')",
    );
    admin(&cluster).run("drop database shop with (force)");
    wait_workers(&cluster, &["postgres"]);
}

#[test]
fn a_rename_in_a_transaction_ends_with_it_or_with_its_savepoint() {
    let cluster = idle();
    let mut client = admin(&cluster);
    for (undo, afterwards) in [("rollback", ""), ("rollback to s", "rollback")] {
        let before = worker_of_shop(&cluster);
        client.run("begin; savepoint s; alter database shop rename to store; alter database store rename to depot");
        wait_workers(&cluster, &["postgres"]);
        client.run(undo);
        wait_for_another_worker(&cluster, before);
        client.run(afterwards);
    }
    client.run("begin; alter database shop rename to store; commit");
    wait_workers(&cluster, &["postgres", "store"]);
}

/// Each rename takes a place for statements that need a database without workers, until the transaction ends.
#[test]
fn a_session_that_renames_many_databases_leaves_room_for_a_drop_of_another() {
    let cluster = idle();
    let mut many = admin(&cluster);
    many.run("create database d0");
    let renames: String = (0..40)
        .map(|n| format!("; alter database d{n} rename to d{}", n + 1))
        .collect();
    many.run(&format!("begin{renames}"));
    admin(&cluster).run("drop database shop");
    wait_workers(&cluster, &["postgres"]);
}

/// The number of databases that a server can serve.
const LIMIT: i64 = 128;

/// Most of these databases exist only as rows of pg_database: no process connects to them, but a row takes an entry.
#[test]
fn a_database_beyond_the_limit_keeps_its_messages_reports_why_and_is_served_later() {
    let broker = Broker::shared();
    let (exchange, queue) = exchange_and_queue(broker);
    let conf = ["outbox.databases = 'late'", "autovacuum = off"];
    let cluster = unconnected_cluster(&broker.url(), &exchange, &conf);
    let filled = format!(
        "set allow_system_table_mods = on; create temp table d as select * from pg_database where datname = 'postgres';
         create procedure pg_temp.fill() language plpgsql as $$ begin
           for n in 1..{LIMIT} - (select count(*) from pg_database where datallowconn and not datistemplate) loop
             update d set oid = 9000 + n, datname = 'd' || n; insert into pg_database select * from d;
           end loop; end $$; call pg_temp.fill()"
    );
    cluster.exec(DB, &filled);
    let offset = cluster.log_offset();
    cluster.reload(); // the launcher rescans the databases
    wait_true(
        &cluster,
        "the entries of the databases",
        "select pending is not null from outbox_status",
    );
    cluster.exec(DB, "create database late");
    cluster.exec("late", "create extension outbox");
    let line = cluster.wait_for_log("cannot be served", offset);
    assert!(
        line.contains(r#"1 database(s) cannot be served, for example "late": the limit of 128 databases is reached"#),
        "{line}"
    );

    let workers = || {
        let sql = r#"select problem, remedy from outbox_health where "check" = 'workers' and not ok"#;
        let row = cluster.connect("late").query_one(sql, &[]).expect("a problem");
        (row.get::<_, String>(0), row.get::<_, String>(1))
    };
    let (problem, remedy) = workers();
    assert_eq!(
        problem,
        "no worker is alive in this database: the server already serves the most databases, 128"
    );
    assert!(remedy.starts_with("drop a database, or close one"), "{remedy}");
    // Both kinds of message can be stored, also one that cannot take the fast path.
    cluster.exec(
        "late",
        "select outbox_publish('T', '1', 'o', 'k');
         begin; savepoint s; select outbox_publish('T', '2', 'o', 'k', expires_at => now() + '1 h'); release s; commit",
    );
    // The launcher has rescanned, but it logs the same problem only once.
    cluster.reload();
    cluster.exec(DB, "create database later");
    cluster.wait_for_log("2 database(s) cannot be served", offset);
    cluster.exec(DB, "drop database later");
    let log = cluster.log().split_off(offset);
    assert_eq!(log.matches("cannot be served").count(), 2, "once of each: {log}");

    cluster.exec(
        DB,
        "set allow_system_table_mods = on; delete from pg_database where datname = 'd7'",
    );
    cluster.reload();
    wait_until("the messages of the database", LONG, || broker.queue_len(&queue) == 2);
    assert!(cluster.query_one::<bool>("late", r#"select ok from outbox_health where "check" = 'workers'"#));
}
