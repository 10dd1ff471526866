//! Tests of servers with fewer worker slots than databases. All databases share the slots by time slices, and health
//! reports the number of slots to add. Two slots of max_worker_processes go to the launchers, that of this extension
//! and that of logical replication.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use postgres::Client;
use support::{Broker, Cluster, Consumer, wait_for, wait_until};

use support::load::{Load, Plan};
use support::oracle::judge;
use support::*;

/// Less than the minute after which a database without a worker gets one in any case.
const SOON: Duration = Duration::from_secs(30);
/// No busy database has to free its slot within a test.
const LONG_TIME_SLICE: &str = "outbox.worker_time_slice = '1h'";

fn make(cluster: &Cluster, database: &str) {
    cluster.exec(DB, &format!("create database {database}"));
    cluster.exec(database, "create extension outbox");
}

/// The database and process id of each worker that has connected to its database.
fn workers(client: &mut Client) -> Vec<(String, i32)> {
    let sql = "select datname::text, pid from pg_stat_activity
               where backend_type = 'outbox worker' and datname is not null order by 1, 2";
    let rows = client.query(sql, &[]).expect("pg_stat_activity");
    rows.iter().map(|row| (row.get(0), row.get(1))).collect()
}

/// Waits until exactly these databases have workers, one name for each worker.
#[track_caller]
fn wait_workers(cluster: &Cluster, databases: &[&str]) {
    let mut client = cluster.connect(DB);
    wait_within(&format!("workers in {databases:?} alone"), SOON, || {
        workers(&mut client).iter().map(|(database, _)| database).eq(databases)
    });
}

/// The check "workers" of outbox_health: whether it passes, the problem, the remedy.
fn health_of_workers(cluster: &Cluster, database: &str) -> (bool, String, String) {
    let sql = r#"select ok, coalesce(problem, ''), coalesce(remedy, '') from outbox_health where "check" = 'workers'"#;
    let row = cluster.connect(database).query_one(sql, &[]).expect("outbox_health");
    (row.get(0), row.get(1), row.get(2))
}

#[track_caller]
fn arrives(consumer: &Consumer, label: &str) {
    let message = within(label, SOON, || consumer.recv(LONG).expect(label));
    assert_eq!(message.label(), label);
}

// ---- under load -----------------------------------------------------------------------------------------------------

const FIVE: [&str; 5] = ["a", "b", "c", "d", DB];

/// Five databases, each with its own exchange and queue; returns the queues.
fn five_databases(broker: &'static Broker, conf: &[&str]) -> (Cluster, BTreeMap<&'static str, String>) {
    let (exchange, queue) = exchange_and_queue(broker);
    let cluster = unconnected_cluster(&broker.url(), &exchange, conf);
    let mut queues = BTreeMap::from([(DB, queue)]);
    for database in &FIVE[..4] {
        let (exchange, queue) = exchange_and_queue(broker);
        cluster.exec(DB, &format!("create database {database}"));
        cluster.exec(
            DB,
            &format!("alter database {database} set outbox.exchange = '{exchange}'"),
        );
        cluster.exec(database, "create extension outbox");
        queues.insert(database, queue);
    }
    (cluster, queues)
}

#[test]
fn five_databases_under_load_share_two_slots_and_none_loses_or_reorders_a_message() {
    let broker = Broker::shared();
    let (cluster, queues) = five_databases(broker, &["max_worker_processes = 4", "outbox.worker_time_slice = '1s'"]);
    let load = |database| {
        let plan = Plan {
            database,
            transactions_per_s: Some(20),
            mixed: true,
            ..Plan::default()
        };
        Load::start(&cluster, &plan)
    };
    let loads = FIVE.map(load);

    // The databases alternate many times, not once.
    let mut client = cluster.connect(DB);
    let mut pids_of: BTreeMap<String, BTreeSet<i32>> = BTreeMap::new();
    wait_until("four workers of each database", LONG, || {
        let workers = workers(&mut client);
        assert!(workers.len() <= 2, "{workers:?}");
        for (database, pid) in workers {
            pids_of.entry(database).or_default().insert(pid);
        }
        FIVE.iter()
            .all(|database| pids_of.get(*database).is_some_and(|pids| pids.len() >= 4))
    });
    let most = pids_of.values().map(BTreeSet::len).max();
    assert!(most <= Some(10), "not alternating: {pids_of:?}");
    for database in FIVE {
        let (ok, problem, remedy) = health_of_workers(&cluster, database);
        assert!(!ok && problem.contains("served in turn"), "{database}: {problem}");
        assert!(
            remedy.contains("raise max_worker_processes by 3 or more"),
            "{database}: {remedy}"
        );
    }

    for (database, load) in FIVE.into_iter().zip(loads) {
        let sent = load.stop();
        let mut client = cluster.connect(database);
        wait_until(&format!("{database} to be drained"), LONG, || {
            let sql = "select not exists (select from outbox union all select from outbox_waiting)";
            client.value(sql)
        });
        let arrived = arrived(&all_of(broker, &queues[database]));
        assert!(sent.len() > 20, "{database}: {} events", sent.len());
        judge(&sent, &arrived).assert_perfect();
    }
    assert!(
        !cluster.log().contains("could not release its leases"),
        "a worker did not end in an orderly way"
    );

    cluster.write_conf("max_worker_processes", "7");
    cluster.restart();
    wait_workers(&cluster, &FIVE);
    for database in FIVE {
        wait_until(&format!("{database} to be healthy"), LONG, || {
            health_of_workers(&cluster, database).0
        });
    }
}

// ---- little to do ---------------------------------------------------------------------------------------------------

#[test]
fn a_commit_starts_a_worker_in_its_database_and_an_idle_one_frees_its_slot_soon() {
    let conf = ["max_worker_processes = 4", LONG_TIME_SLICE];
    let stage = Stage::new(&conf);
    for database in ["a", "b", "c"] {
        make(&stage, database);
    }
    let consumer = stage.consumer();
    let mut client = stage.connect(DB);
    for round in 0..6 {
        let unserved = wait_for("a database without a worker", LONG, || {
            let workers = workers(&mut client);
            let served = |name: &&str| workers.iter().any(|(database, _)| database == name);
            let mut unserved = ["a", "b", "c", DB].into_iter().cycle().skip(round).take(4);
            (workers.len() == 2)
                .then(|| unserved.find(|name| !served(name)))
                .flatten()
        });
        let label = format!("{round} of {unserved}");
        stage.connect(unserved).publish(label.as_str());
        arrives(&consumer, &label);
    }
}

#[test]
fn a_scheduled_message_starts_a_worker_in_its_database_when_it_is_due() {
    let stage = Stage::new(&["max_worker_processes = 3", LONG_TIME_SLICE]);
    make(&stage, "a");
    let consumer = stage.consumer();
    stage.query_one::<i64>(
        "a",
        r#"select outbox_publish('T', '"later"', 'thing', '1', available_at => now() + interval '40 s')"#,
    );
    stage.connect("a").publish("a now");
    arrives(&consumer, "a now");
    stage.publish("elsewhere");
    arrives(&consumer, "elsewhere");
    wait_workers(&stage, &[DB]);
    // It comes 40 s after it was published, and before a minute without a worker is over.
    let later = within("the scheduled message", Duration::from_secs(55), || consumer.recv(LONG));
    let later = later.expect("the scheduled message");
    assert_eq!(later.json()["payload"], "later");
}

#[test]
fn a_second_worker_frees_its_slot_for_the_first_of_another_database() {
    let conf = ["max_worker_processes = 4", "outbox.workers = 2", LONG_TIME_SLICE];
    let cluster = unconnected_cluster("amqp://127.0.0.1:1", "x", &conf);
    cluster.publish("undeliverable"); // so both have something to do
    wait_workers(&cluster, &[DB, DB]);
    make(&cluster, "a");
    wait_workers(&cluster, &["a", DB]);
    wait_until("the number of slots", LONG, || {
        let (ok, problem, remedy) = health_of_workers(&cluster, "a");
        !ok && problem.contains("not every worker") && remedy.contains("by 2 or more")
    });
}

/// With a slot for each database, no worker moves, however much there is to do.
#[test]
fn with_enough_slots_no_worker_frees_its_slot() {
    let conf = ["max_worker_processes = 4", "outbox.worker_time_slice = '100ms'"];
    let stage = Stage::new(&conf);
    make(&stage, "a");
    let consumer = stage.consumer();
    let mut before = Vec::new();
    for round in 0..20 {
        for database in ["a", DB] {
            let label = format!("{round} of {database}");
            stage.connect(database).publish(label.as_str());
            arrives(&consumer, &label);
        }
        if round == 0 {
            before = workers(&mut stage.connect(DB)); // the processes that searched for the extension have ended
        }
    }
    assert_eq!(before.len(), 2, "{before:?}");
    assert_eq!(workers(&mut stage.connect(DB)), before);
    assert!(health_of_workers(&stage, DB).0);
}

// ---- databases that go ----------------------------------------------------------------------------------------------

#[test]
fn a_database_that_waits_for_a_slot_and_one_that_has_it_can_be_dropped_and_renamed() {
    let stage = Stage::new(&["max_worker_processes = 3", LONG_TIME_SLICE]);
    for database in ["a", "b", "c"] {
        make(&stage, database);
    }
    let consumer = stage.consumer();
    let mut client = admin(&stage);
    stage.connect("a").publish("of a");
    arrives(&consumer, "of a");
    wait_workers(&stage, &["a"]);
    for sql in [
        "alter database a rename to z",
        "drop database z",
        "alter database b rename to y",
        "drop database c",
    ] {
        client.run(sql);
    }
    for database in ["y", DB, "y"] {
        stage.connect(database).publish(database);
        arrives(&consumer, database);
    }
}
