//! Tests that a fast stop ends within its time limit, in an orderly way and without harm, in any state of the broker.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use support::{Broker, Cluster, Consumer, Mode, PrivateBroker, Proxy, Receiver, Reply, StopMode, wait_until};

use crate::common::load::{Load, Plan};
use crate::common::oracle::{Arrived, judge};
use crate::common::stops::{IN_FLIGHT_MAX, stops_in_time};
use crate::common::*;
use crate::{payload, problems, publish};

fn busy() -> Plan {
    Plan {
        writers: 4,
        transactions_per_s: None,
        ..Plan::default()
    }
}

#[test]
fn a_fast_stop_under_load_loses_and_duplicates_nothing() {
    let broker = Broker::shared();
    let (exchange, queue) = exchange_and_queue(broker);
    let cluster = outbox_cluster(broker, &exchange);
    let load = Load::start(&cluster, &busy());
    let mut slow = 0;
    for _ in 0..3 {
        load.wait_for_more(500);
        slow += stops_in_time(&cluster, || serve_again(&cluster, &load, 500));
        cluster.start_again();
    }
    load.wait_for_more(100);
    assert_delivered(&cluster, load, broker, &queue, slow);
}

/// Starts the server again, with its worker busy as before.
fn serve_again(cluster: &Cluster, load: &Load, events: usize) {
    cluster.start_again();
    wait_connected(cluster);
    load.wait_for_more(events);
}

/// Asserts that nothing was lost, altered or reordered. Nothing was repeated either if the broker answered in time at
/// each stop; each of the `slow` stops may repeat what was in flight (I4).
fn assert_delivered(cluster: &Cluster, load: Load, broker: &Broker, queue: &str, slow: usize) {
    let sent = load.stop();
    wait_drained(cluster);
    let arrived: Vec<Arrived> = all_of(broker, queue).iter().map(Arrived::new).collect();
    let verdict = judge(&sent, &arrived);
    verdict.assert_nothing_lost(slow * IN_FLIGHT_MAX);
    assert_eq!(verdict.reordered, Vec::<String>::new());
}

#[test]
fn a_busy_worker_stops_in_an_orderly_way() {
    let broker = Broker::shared();
    let (exchange, _) = exchange_and_queue(broker);
    let cluster = outbox_cluster(broker, &exchange);
    let load = Load::start(&cluster, &busy());
    for _ in 0..5 {
        load.wait_for_more(200);
        stops_in_time(&cluster, || serve_again(&cluster, &load, 200));
        cluster.start_again();
        wait_connected(&cluster);
    }
}

/// The prepared transaction keeps its lock without a session that the stop could end.
#[test]
fn a_fast_stop_keeps_its_time_limit_while_the_outbox_is_locked() {
    let broker = Broker::shared();
    let (exchange, _) = exchange_and_queue(broker);
    let cluster = outbox_cluster_with(broker, &exchange, &["max_prepared_transactions = 1"]);
    cluster.exec(
        DB,
        "begin; lock table outbox in access exclusive mode; prepare transaction 'lock'",
    );
    let is_waiting = "select exists (select from pg_stat_activity where backend_type = 'outbox worker' and wait_event_type = 'Lock')";
    wait_true(&cluster, "the worker to wait for the lock", is_waiting);
    stops_in_time(&cluster, || {
        cluster.start_again();
        wait_true(&cluster, "the worker to wait for the lock", is_waiting);
    });
}

/// Commits of sessions wait for the standby, and a worker that waits for a commit cannot be stopped.
#[test]
fn no_commit_of_a_worker_waits_for_a_missing_standby_and_a_fast_stop_keeps_its_time_limit() {
    let broker = Broker::shared();
    let (exchange, queue) = exchange_and_queue(broker);
    let cluster = outbox_cluster(broker, &exchange);
    miss_standby(&cluster);
    let load = Load::start(&cluster, &busy());
    let mut slow = 0;
    for _ in 0..5 {
        load.wait_for_more(200);
        slow += stops_in_time(&cluster, || serve_again(&cluster, &load, 200));
        cluster.start_again();
        wait_connected(&cluster);
    }
    assert_delivered(&cluster, load, broker, &queue, slow);
}

/// The message is visible once the wait is canceled, whether or not the standby ever gets it.
#[test]
fn a_message_whose_commit_waits_for_a_standby_is_sent_only_once_the_wait_is_canceled() {
    let broker = Broker::shared();
    let (exchange, queue) = exchange_and_queue(broker);
    let cluster = outbox_cluster(broker, &exchange);
    let consumer = Consumer::new(broker, &queue);
    miss_standby(&cluster);
    let mut waits = cluster.connect(DB);
    let pid: i32 = waits.query_one("select pg_backend_pid()", &[]).expect("a pid").get(0);
    let waiting = std::thread::spawn(move || {
        waits.batch_execute("set synchronous_commit = on; select outbox_publish('T', '1', 'thing', '1')")
    });
    wait_true(
        &cluster,
        "the commit to wait",
        &format!("select coalesce((select wait_event = 'SyncRep' from pg_stat_activity where pid = {pid}), false)"),
    );
    publish(&cluster, DB, 2);
    assert_eq!(payload(&consumer), 2);
    assert!(!waiting.is_finished());
    cluster.exec(DB, &format!("select pg_cancel_backend({pid})"));
    waiting.join().expect("no panic").expect("a commit, with a warning");
    assert_eq!(payload(&consumer), 1);
}

#[test]
fn a_fast_stop_keeps_its_time_limit_with_the_broker_down() {
    let (broker, cluster, load) = busy_with_private_broker();
    broker.stop();
    let notice = || {
        wait_for_problem(&cluster, "broker");
        load.wait_for_more(100);
    };
    notice();
    stops_in_time(&cluster, || {
        cluster.start_again();
        notice();
    });
}

#[test]
fn a_fast_stop_keeps_its_time_limit_with_the_broker_suspended() {
    let (broker, cluster, load) = busy_with_private_broker();
    let suspend = || {
        broker.suspend();
        load.wait_for_more(3000);
    };
    suspend();
    stops_in_time(&cluster, || {
        broker.resume();
        serve_again(&cluster, &load, 100);
        suspend();
    });
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
    stops_in_time(&cluster, || {
        cluster.start_again();
        wait_for_problem(&cluster, "blocked");
        load.wait_for_more(100);
    });
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
    let cluster = unconnected_cluster(&format!("amqp://127.0.0.1:{}", proxy.port()), "x", &[]);
    publish(&cluster, DB, 1);
    // A worker that has just started has nothing to end.
    let wait_for_attempt = |accepted: usize, offset: usize| {
        wait_until("an attempt to connect", LONG, || proxy.accepted() > accepted);
        cluster.wait_for_log("outbox server-1: owns", offset);
    };
    wait_for_attempt(0, 0);
    stops_in_time(&cluster, || {
        let (accepted, offset) = (proxy.accepted(), cluster.log_offset());
        cluster.start_again();
        wait_for_attempt(accepted, offset);
    });
}

#[test]
fn a_fast_stop_keeps_its_time_limit_while_http_receivers_hang() {
    let first = Arc::new(AtomicBool::new(true));
    let is_first = Arc::clone(&first);
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
    let mut expected = 9;
    let wait_for_requests = |expected: usize| {
        wait_until("eight requests without an answer", LONG, || {
            receiver.requests().len() == expected
        });
    };
    wait_for_requests(expected);
    stops_in_time(&cluster, || {
        expected = receiver.requests().len() + 9;
        first.store(true, Ordering::Release);
        cluster.start_again();
        wait_for_requests(expected);
    });
    assert_eq!(receiver.requests().len(), expected);
}

#[test]
fn a_fast_stop_keeps_its_time_limit_when_the_network_drops_everything_mid_run() {
    let broker = Broker::shared();
    let (exchange, _) = exchange_and_queue(broker);
    let proxy = Proxy::start(broker.port());
    let cluster = unconnected_cluster(&format!("amqp://127.0.0.1:{}", proxy.port()), &exchange, &[]);
    let drop_everything = || {
        wait_connected(&cluster);
        wait_drained(&cluster);
        proxy.mode(Mode::Blackhole);
        cluster.exec(
            DB,
            "select outbox_publish('T', '{}', 'thing', n::text) from generate_series(1, 5000) n",
        );
        wait_true(
            &cluster,
            "messages in flight",
            "select in_flight > 0 from outbox_status",
        );
    };
    drop_everything();
    stops_in_time(&cluster, || {
        proxy.mode(Mode::Pass);
        cluster.start_again();
        drop_everything();
    });
}

#[test]
fn after_a_restart_the_worker_delivers_again() {
    let broker = Broker::shared();
    let (exchange, queue) = exchange_and_queue(broker);
    let cluster = outbox_cluster(broker, &exchange);
    let consumer = Consumer::new(broker, &queue);
    cluster.restart();
    publish(&cluster, DB, 1);
    assert_eq!(payload(&consumer), 1);
    wait_published(&cluster, 1); // otherwise the stop could precede the settle and cause a duplicate
    cluster.stop(StopMode::Immediate);
    cluster.start_again();
    publish(&cluster, DB, 2);
    assert_eq!(payload(&consumer), 2);
}
