//! Tests of settings that ALTER DATABASE and ALTER ROLE give to the session of a worker, and that are not meant for it.

use postgres::Client;
use support::{wait_for, wait_until};

use support::*;

/// Waits for a worker with a process id other than `before`; returns that process id.
fn wait_for_worker(client: &mut Client, before: i32) -> i32 {
    let sql = "select max(pid) from pg_stat_activity where backend_type = 'outbox worker' and usename is not null";
    wait_for("another worker", LONG, || {
        let pid: Option<i32> = client.value(sql);
        pid.filter(|pid| *pid != before)
    })
}

/// Publishes in a session that began before anything was set: one message is due at once, the other is scheduled and
/// settled later.
fn publish(client: &mut Client, n: i32) {
    let sql = format!(
        "select public.outbox_publish('T', jsonb_build_object('label', {n}), 'thing', '1');
         select public.outbox_publish('T', jsonb_build_object('label', {n}), 'thing', '2', available_at => clock_timestamp() + interval '10 ms')"
    );
    client.run(&sql);
}

#[test]
fn delivery_continues_under_any_setting_of_the_database_or_the_worker_role() {
    let stage = Stage::new(&[]);
    stage.exec(DB, "create role bystander; grant bystander to outbox_worker");
    let consumer = stage.consumer();
    let mut client = stage.connect(DB);
    let (mut worker, mut n) = (wait_for_worker(&mut client, 0), 0);
    for target in [format!("database {DB}"), "role outbox_worker".to_owned()] {
        for round in 0..extremes::ROUNDS {
            let settings = extremes::of_round(&mut client, round);
            let taken = extremes::set(&mut client, &target, &settings);
            assert!(taken > 130, "{target} took {taken} settings");
            for what in ["set", "reset"] {
                if what == "reset" {
                    client.run(&format!("alter {target} reset all"));
                }
                worker = wait_for_worker(&mut client, worker);
                n += 1;
                publish(&mut client, n);
                for _ in 0..2 {
                    assert_eq!(
                        consumer.next().label(),
                        n.to_string(),
                        "{target}, round {round}, {what}"
                    );
                }
                let settled = format!("select count(*) = {} from public.outbox_history", 2 * n);
                wait_until("the messages to be settled", LONG, || client.value(&settled));
            }
        }
    }
}

/// A session cannot override these settings once it has started with them. A worker that can do nothing must still
/// notice that its settings have changed.
#[test]
fn a_worker_that_cannot_write_delivers_again_when_it_can() {
    let stage = Stage::new(&[]);
    let consumer = stage.consumer();
    let mut client = stage.connect(DB);
    for n in 1..=2 {
        let worker = wait_for_worker(&mut client, 0);
        client.run(&format!("alter database {DB} set default_transaction_read_only = on"));
        let read_only = wait_for_worker(&mut client, worker);
        publish(&mut client, n);
        assert_eq!(labels(&consumer.recv_n(2, LONG)), [n.to_string(), n.to_string()]);
        client.run(&format!("alter database {DB} reset default_transaction_read_only"));
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
    client.run("begin; lock table outbox_settings in access exclusive mode");
    cluster.exec(DB, &format!("alter database {DB} set outbox.batch_size = 7"));
    let starting = wait_for("a worker to wait in its start", LONG, || {
        let waits = "select max(pid) from pg_locks where relation = 'outbox_settings'::regclass and not granted";
        let pid: Option<i32> = client.value(waits);
        pid.filter(|pid| *pid != worker)
    });
    cluster.exec(DB, &format!("alter database {DB} reset outbox.batch_size"));
    client.run("rollback");
    wait_for_worker(&mut client, starting);
}
