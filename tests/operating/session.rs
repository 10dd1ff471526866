//! Tests of settings that ALTER DATABASE and ALTER ROLE give to the session of a worker, and that are not meant for it.

use postgres::Client;
use support::{Broker, Consumer, wait_for, wait_until};

use super::payload;
use support::*;

/// Waits for a worker with a process id other than `before`; returns that process id.
fn wait_for_worker(client: &mut Client, before: i32) -> i32 {
    let sql = "select max(pid) from pg_stat_activity where backend_type = 'outbox worker' and usename is not null";
    wait_for("another worker", LONG, || {
        let pid: Option<i32> = client.query_one(sql, &[]).expect("pg_stat_activity").get(0);
        pid.filter(|pid| *pid != before)
    })
}

/// Publishes in a session that began before anything was set: one message is due at once, the other is scheduled and
/// settled later.
fn publish(client: &mut Client, n: i32) {
    let sql = format!(
        "select public.outbox_publish('T', '{n}', 'thing', '1');
         select public.outbox_publish('T', '{n}', 'thing', '2', available_at => clock_timestamp() + interval '10 ms')"
    );
    client.batch_execute(&sql).expect("publish");
}

#[test]
fn delivery_continues_under_any_setting_of_the_database_or_the_worker_role() {
    let broker = Broker::shared();
    let (exchange, queue) = exchange_and_queue(broker);
    let cluster = outbox_cluster(broker, &exchange);
    cluster.exec(DB, "create role bystander; grant bystander to outbox_worker");
    let consumer = Consumer::new(broker, &queue);
    let mut client = cluster.connect(DB);
    let (mut worker, mut n) = (wait_for_worker(&mut client, 0), 0);
    for target in [format!("database {DB}"), "role outbox_worker".to_owned()] {
        for round in 0..extremes::ROUNDS {
            let settings = extremes::of_round(&mut client, round);
            let taken = extremes::set(&mut client, &target, &settings);
            assert!(taken > 130, "{target} took {taken} settings");
            for what in ["set", "reset"] {
                if what == "reset" {
                    client
                        .batch_execute(&format!("alter {target} reset all"))
                        .expect("reset");
                }
                worker = wait_for_worker(&mut client, worker);
                n += 1;
                publish(&mut client, n);
                for _ in 0..2 {
                    assert_eq!(payload(&consumer), n, "{target}, round {round}, {what}");
                }
                let settled = format!("select count(*) = {} from public.outbox_history", 2 * n);
                wait_until("the messages to be settled", LONG, || {
                    client.query_one(&settled, &[]).expect("the history").get(0)
                });
            }
        }
    }
}

/// A session cannot override these settings once it has started with them. A worker that can do nothing must still
/// notice that its settings have changed.
#[test]
fn a_worker_that_cannot_write_delivers_again_when_it_can() {
    let broker = Broker::shared();
    let (exchange, queue) = exchange_and_queue(broker);
    let cluster = outbox_cluster(broker, &exchange);
    let consumer = Consumer::new(broker, &queue);
    let mut client = cluster.connect(DB);
    for n in 1..=2 {
        let worker = wait_for_worker(&mut client, 0);
        client
            .batch_execute(&format!("alter database {DB} set default_transaction_read_only = on"))
            .expect("set");
        let read_only = wait_for_worker(&mut client, worker);
        publish(&mut client, n);
        assert_eq!((payload(&consumer), payload(&consumer)), (n.into(), n.into()));
        client
            .batch_execute(&format!("alter database {DB} reset default_transaction_read_only"))
            .expect("reset");
        wait_for_worker(&mut client, read_only);
    }
}

/// The new session starts with the first change, and finds the second when it first reads its settings.
#[test]
fn a_setting_that_changes_while_a_worker_starts_is_not_missed() {
    let cluster = unconnected_cluster("", "x", &[]);
    let mut client = cluster.connect(DB);
    let worker = wait_for_worker(&mut client, 0);
    wait_healthy(&cluster, "workers");
    client
        .batch_execute("begin; lock table outbox_settings in access exclusive mode")
        .expect("a lock");
    cluster.exec(DB, &format!("alter database {DB} set outbox.batch_size = 7"));
    let starting = wait_for("a worker to wait in its start", LONG, || {
        let waits = "select max(pid) from pg_locks where relation = 'outbox_settings'::regclass and not granted";
        let pid: Option<i32> = client.query_one(waits, &[]).expect("pg_locks").get(0);
        pid.filter(|pid| *pid != worker)
    });
    cluster.exec(DB, &format!("alter database {DB} reset outbox.batch_size"));
    client.batch_execute("rollback").expect("no lock");
    wait_for_worker(&mut client, starting);
}
