//! Tests that a fast stop ends within its time limit, in an orderly way and without harm, in any state of the broker.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::SystemTime;

use support::{Broker, Cluster, Mode, PrivateBroker, Proxy, Receiver, Reply, StopMode, wait_until};

use super::problems;
use support::chaos::rounds;
use support::faults::{Faults, messages};
use support::load::{Load, Plan};
use support::oracle::judge;
use support::stops::stop_in_time;
use support::*;

fn busy() -> Plan {
    Plan {
        writers: 4,
        transactions_per_s: None,
        ..Plan::default()
    }
}

#[test]
fn a_fast_stop_under_load_loses_and_duplicates_nothing() {
    let stage = Stage::new(&[]);
    let load = Load::start(&stage, &busy());
    let mut faults = Faults::default();
    for _ in 0..rounds(3) {
        load.wait_for_more(500);
        stop_and_start(&stage, &mut faults);
    }
    load.wait_for_more(100);
    assert_delivered(&stage, load, stage.broker, &stage.queue, &faults);
}

/// A stop is a fault only if the worker may have left before it had all answers (I4).
fn stop_and_start(cluster: &Cluster, faults: &mut Faults) {
    let began = SystemTime::now();
    let slow = stop_in_time(cluster);
    cluster.start_again();
    wait_connected(cluster);
    faults.since(began, slow);
}

/// Asserts that nothing was lost, altered or reordered, and nothing repeated without a fault.
fn assert_delivered(cluster: &Cluster, load: Load, broker: &Broker, queue: &str, faults: &Faults) {
    let sent = load.stop();
    wait_drained(cluster);
    let arrived = arrived(&all_of(broker, queue));
    faults.assert_explain(&judge(&sent, &arrived), &messages(cluster));
}

/// The prepared transaction keeps its lock without a session that the stop could end.
#[test]
fn a_fast_stop_keeps_its_time_limit_while_the_outbox_is_locked() {
    let cluster = Stage::new(&["max_prepared_transactions = 1"]).cluster;
    cluster.exec(
        DB,
        "begin; lock table outbox in access exclusive mode; prepare transaction 'lock'",
    );
    cluster.restart(); // a worker reads the outbox at its start
    let is_waiting = "select exists (select from pg_stat_activity where backend_type = 'outbox worker' and wait_event_type = 'Lock')";
    wait_true(&cluster, "the worker to wait for the lock", is_waiting);
    stop_in_time(&cluster);
}

/// Commits of sessions wait for the standby, and a worker that waits for a commit cannot be stopped.
#[test]
fn no_commit_of_a_worker_waits_for_a_missing_standby_and_a_fast_stop_keeps_its_time_limit() {
    let stage = Stage::new(&[]);
    miss_standby(&stage);
    let load = Load::start(&stage, &busy());
    let mut faults = Faults::default();
    for _ in 0..rounds(5) {
        load.wait_for_more(200);
        stop_and_start(&stage, &mut faults);
    }
    assert_delivered(&stage, load, stage.broker, &stage.queue, &faults);
}

/// The message is visible once the wait is canceled, whether or not the standby ever gets it.
#[test]
fn a_message_whose_commit_waits_for_a_standby_is_sent_only_once_the_wait_is_canceled() {
    let stage = Stage::new(&[]);
    let consumer = stage.consumer();
    miss_standby(&stage);
    let mut waits = stage.connect(DB);
    let pid: i32 = waits.value("select pg_backend_pid()");
    let waiting = std::thread::spawn(move || {
        waits.batch_execute("set synchronous_commit = on; select outbox_publish('T', '{\"label\": 1}', 'thing', '1')")
    });
    wait_true(
        &stage,
        "the commit to wait",
        &format!("select coalesce((select wait_event = 'SyncRep' from pg_stat_activity where pid = {pid}), false)"),
    );
    stage.publish("2");
    assert_eq!(consumer.next().label(), "2");
    assert!(!waiting.is_finished());
    stage.exec(DB, &format!("select pg_cancel_backend({pid})"));
    waiting.join().expect("no panic").expect("a commit, with a warning");
    assert_eq!(consumer.next().label(), "1");
}

#[test]
fn a_fast_stop_keeps_its_time_limit_with_the_broker_down() {
    let (broker, cluster, load) = busy_with_private_broker();
    broker.stop();
    wait_for_problem(&cluster, "broker");
    load.wait_for_more(100);
    stop_in_time(&cluster);
}

#[test]
fn a_fast_stop_keeps_its_time_limit_with_the_broker_suspended() {
    let (broker, cluster, load) = busy_with_private_broker();
    broker.suspend();
    load.wait_for_more(3000);
    stop_in_time(&cluster);
    broker.resume();
}

#[test]
fn a_fast_stop_keeps_its_time_limit_with_the_broker_blocked() {
    let (broker, cluster, load) = busy_with_private_broker();
    broker.set_memory_alarm(true);
    let problem = wait_for_problem(&cluster, "blocked");
    assert!(problem.contains("blocks publishers"), "{problem}");
    assert_eq!(problems(&cluster), ["blocked"]);
    load.wait_for_more(100);
    stop_in_time(&cluster);
}

fn busy_with_private_broker() -> (PrivateBroker, Cluster, Load) {
    let broker = Broker::start();
    let (exchange, _) = exchange_and_queue(&broker);
    let cluster = outbox_cluster(&broker, &exchange);
    let load = Load::start(&cluster, &busy());
    load.wait_for_more(100);
    (broker, cluster, load)
}

#[test]
fn a_fast_stop_keeps_its_time_limit_when_the_broker_never_answers() {
    let broker = Broker::shared();
    let proxy = Proxy::start(broker.port());
    proxy.mode(Mode::Blackhole);
    let cluster = unconnected_cluster(&proxy.url(), "x", &[]);
    cluster.publish("1");
    wait_until("an attempt to connect", LONG, || proxy.accepted() > 0);
    cluster.wait_for_log("outbox server-1: owns", 0); // one that has just started has nothing to end
    stop_in_time(&cluster);
}

#[test]
fn a_fast_stop_keeps_its_time_limit_while_http_receivers_hang() {
    let is_first = AtomicBool::new(true);
    let receiver = Receiver::start(move |_| match is_first.swap(false, Ordering::AcqRel) {
        true => Reply::status(200), // the worker sends one message alone until it gets an answer
        false => Reply::Hang,
    });
    let cluster = unconnected_cluster("", "x", &["outbox.http_allow = '127.0.0.1'"]);
    let url = receiver.url("/");
    cluster.exec(
        DB,
        &format!(
            "create server hook foreign data wrapper outbox_http options (url '{url}', concurrency '8');
             select outbox_publish('T', '{{}}', 'thing', n::text, destination => 'hook') from generate_series(1, 1000) n"
        ),
    );
    wait_until("eight requests without an answer", LONG, || {
        receiver.requests().len() == 9
    });
    stop_in_time(&cluster);
    assert_eq!(receiver.requests().len(), 9);
}

#[test]
fn after_a_restart_the_worker_delivers_again() {
    let stage = Stage::new(&[]);
    let consumer = stage.consumer();
    stage.restart();
    stage.publish("1");
    assert_eq!(consumer.next().label(), "1");
    wait_published(&stage, 1); // otherwise the stop could precede the settle and cause a duplicate
    stage.stop(StopMode::Immediate);
    stage.start_again();
    stage.publish("2");
    assert_eq!(consumer.next().label(), "2");
}
