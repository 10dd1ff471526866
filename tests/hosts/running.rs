//! Events around a running worker: its database is not adopted, its broker restarts, its destination is paused, its
//! partitions change, it is stopped.

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::{Duration, Instant};

use support::wait::pass_time_until;
use support::{Broker, Receiver, Reply, wait_until};

use super::{Host, Stage, of_key};
use support::faults::{Faults, messages};
use support::load::{Load, Plan};
use support::oracle::{Verdict, judge};
use support::{
    DB, Event, LONG, Session, all_of, arrived, exchange_and_queue, health, labels, wait_drained, wait_for_problem,
    wait_healthy, wait_published, wait_true, wait_workers_paused,
};

pub fn parked_messages_are_released_while_the_database_is_not_adopted_and_go_in_order_afterwards(host: Host) {
    let broker = Broker::shared();
    let (exchange, queue) = exchange_and_queue(broker);
    let stage = Stage::of_broker(host, &exchange, &["outbox.lease_renew = '1s'"]);
    let cluster = &stage.cluster;
    // The worker claims the second message of the key and parks it, since the first message may still be committed.
    let mut late = cluster.connect(DB);
    late.run(&format!("begin; {}", Event::new("a 1").sql()));
    stage.cluster.publish(Event::new("a 2"));
    stage.cluster.publish(Event::new("b 1").key("b"));
    wait_published(cluster, 1);
    let claimed = "select count(*) = 1 and bool_and(claim_token is not null) from outbox";
    wait_true(cluster, "a message to be parked", claimed);

    // Simulates a database that came from another server.
    cluster.exec(
        DB,
        "update outbox_identity set system_identifier = system_identifier + 1",
    );
    wait_true(
        cluster,
        "the worker to notice",
        "select bool_and(state = 'not adopted') from outbox_worker_status where alive",
    );
    let released = "select count(*) = 1 and bool_and(claim_token is null and attempts = 0 and crashes = 0) from outbox";
    wait_true(cluster, "the message to be released", released);
    assert!(!health(cluster, "identity").0);
    late.run("commit");
    stage.cluster.publish(Event::new("a 3"));
    stage.cluster.publish(Event::new("c 1").key("c"));
    stage.wait_for_heartbeats(3);
    let untouched =
        "select count(*) = 4 and bool_and(claim_token is null and attempts = 0 and crashes = 0) from outbox";
    assert!(cluster.query_one::<bool>(DB, untouched));
    assert_eq!(labels(&all_of(broker, &queue)), ["b 1"]);

    assert!(cluster.query_one::<bool>(DB, "select outbox_adopt('moved here')"));
    wait_published(cluster, 5);
    let delivered = labels(&all_of(broker, &queue));
    assert_eq!(
        (of_key(&delivered, "a"), delivered.len()),
        (["a 1", "a 2", "a 3"].map(str::to_owned).to_vec(), 4)
    );
    stage.wait_for_state("default", "connected");
}

pub fn a_broker_that_stops_and_starts_loses_nothing_and_charges_nothing(host: Host) {
    let broker = Broker::start();
    let (exchange, queue) = exchange_and_queue(&broker);
    let stage = Stage::new(host, &broker.url(), &exchange, &[]);
    let load = Load::start(&stage.cluster, &Plan::default());
    load.wait_for_more(100);
    let mut faults = Faults::default();
    faults.during(1, || {
        broker.stop();
        wait_for_problem(&stage.cluster, "broker");
        load.wait_for_more(100);
        broker.start_again();
        stage.wait_for_state("default", "connected");
    });
    load.wait_for_more(100);
    let sent = load.stop();
    wait_drained(&stage.cluster);
    wait_healthy(&stage.cluster, "broker");
    let verdict = judge(&sent, &arrived(&all_of(&broker, &queue)));
    faults.assert_explain(&verdict, &messages(&stage.cluster));
    let charged = "select exists (select from outbox_history where attempts <> 1) or exists (select from outbox_dead)";
    assert!(!stage.cluster.query_one::<bool>(DB, charged), "a message was charged");
    drop(stage);
}

pub fn a_new_password_is_read_without_a_reload_and_ends_no_working_connection(host: Host) {
    let broker = Broker::start();
    broker.add_user("relay", "first");
    let (exchange, _queue) = exchange_and_queue(&broker);
    let stage = Stage::idle(
        host,
        &format!("amqp://relay@127.0.0.1:{}", broker.port()),
        &exchange,
        &[],
    );
    stage.write_password("wrong");
    stage.work(1);
    let why = stage.wait_for_state("default", "down");
    assert!(why.contains("auth_refused"), "{why}");
    stage.write_password("first");
    stage.wait_for_state("default", "connected");

    // RabbitMQ lists a refused connection for some seconds.
    let connections = || broker.ctl(&["list_connections", "--silent", "pid", "state"]);
    let running = || -> Vec<String> {
        let listed = connections();
        let pids = listed.lines().filter_map(|line| line.strip_suffix("\trunning"));
        pids.map(str::to_owned).collect()
    };
    let connected = running();
    assert_eq!(connected.len(), 1, "{connected:?}");
    stage.write_password("second");
    stage.cluster.reload();
    stage.wait_for_heartbeats(2);
    stage.cluster.publish(Event::new("k 1").key("k"));
    wait_published(&stage.cluster, 1);
    assert_eq!(running(), connected);
    broker.ctl(&["change_password", "relay", "second"]);
    broker.ctl(&["close_connection", &connected[0], "the test ends it"]);
    stage.cluster.publish(Event::new("k 2").key("k"));
    wait_published(&stage.cluster, 2);
    assert_ne!(running(), connected);
    drop(stage);
}

pub fn a_paused_destination_waits_and_continues_in_order(host: Host) {
    let broker = Broker::shared();
    let (exchange, queue) = exchange_and_queue(broker);
    let (other, other_queue) = exchange_and_queue(broker);
    let stage = Stage::of_broker(host, &exchange, &["outbox.lease_renew = '1s'"]);
    stage.destination("other", "amqp", &format!("exchange '{other}'"));
    stage.wait_for_state("other", "connected");
    stage.cluster.publish(Event::new("k 0").key("k"));
    wait_published(&stage.cluster, 1);
    assert!(
        stage
            .cluster
            .query_one::<bool>(DB, "select outbox_pause('default', 'moving house')")
    );
    let why = stage.wait_for_state("default", "paused");
    assert!(why.contains("moving house"), "{why}");
    stage.cluster.publish_run("default", "k", 3);
    stage.cluster.publish_run("other", "k", 3);
    wait_published(&stage.cluster, 4);
    stage.wait_for_heartbeats(2);
    assert_eq!(labels(&all_of(broker, &queue)), ["k 0"]);
    assert_eq!(labels(&all_of(broker, &other_queue)), ["k 1", "k 2", "k 3"]);
    assert!(stage.cluster.query_one::<bool>(DB, "select outbox_resume('default')"));
    wait_published(&stage.cluster, 7);
    assert_eq!(labels(&all_of(broker, &queue)), ["k 1", "k 2", "k 3"]);
    stage.wait_for_state("default", "connected");
}

/// The commit wakes the worker before it refreshes its settings, which it does within a second. So it may not know of
/// the pause yet.
pub fn a_message_committed_with_a_pause_is_not_overtaken(host: Host) {
    let broker = Broker::shared();
    let (exchange, queue) = exchange_and_queue(broker);
    let stage = Stage::of_broker(host, &exchange, &[]);
    let mut late = stage.cluster.connect(DB);
    late.run(&format!("begin; {}", Event::new("a 1").sql()));
    stage.cluster.publish(Event::new("a 2"));
    stage.cluster.publish(Event::new("b 1").key("b"));
    wait_published(&stage.cluster, 1);
    assert_eq!(labels(&all_of(broker, &queue)), ["b 1"]);
    // Others keep the worker awake: asleep, it would not look before it is woken, which is later.
    let committed = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut other = stage.cluster.connect(DB);
            while !committed.load(SeqCst) {
                other.publish(Event::new("other").key("c"));
            }
        });
        late.run("select outbox_pause(); commit");
        committed.store(true, SeqCst);
    });
    wait_workers_paused(&stage.cluster);
    let is_a = |label: &String| label.starts_with('a');
    let mut arrived = labels(&all_of(broker, &queue));
    arrived.retain(is_a);
    assert_eq!(arrived, [""; 0]);
    stage.cluster.exec(DB, "select outbox_resume()");
    wait_drained(&stage.cluster);
    let mut arrived = labels(&all_of(broker, &queue));
    arrived.retain(is_a);
    assert_eq!(arrived, ["a 1", "a 2"]);
}

/// A worker that stops waits 0.7 s for the broker. A slow machine may exceed that once; then messages are repeated.
pub fn workers_that_are_stopped_cleanly_repeat_nothing(host: Host) {
    let is_perfect = (0..3).any(|_| stopped_cleanly(host).doubled.is_empty());
    assert!(is_perfect, "messages were repeated in each of three runs");
}

const WORKERS: usize = 2;

fn stopped_cleanly(host: Host) -> Verdict {
    let broker = Broker::shared();
    let (exchange, queue) = exchange_and_queue(broker);
    let stage = Stage::idle(host, &broker.url(), &exchange, &[]);
    let load = Load::start(&stage.cluster, &Plan::default());
    let mut faults = Faults::default();
    for _ in 0..2 {
        stage.work(WORKERS);
        load.wait_for_more(100);
        faults.during(WORKERS, || stage.stop());
        load.wait_for_more(50);
    }
    stage.work(WORKERS);
    let sent = load.stop();
    wait_drained(&stage.cluster);
    let verdict = judge(&sent, &arrived(&all_of(broker, &queue)));
    faults.assert_explain(&verdict, &messages(&stage.cluster));
    verdict
}

pub fn a_message_in_flight_while_the_partitions_change_is_sent_once(host: Host) {
    // The receiver takes longer than the limit of a fast stop. A change of the partitions has no such limit.
    let slow = Receiver::start(|_| {
        pass_time_until(Instant::now() + Duration::from_millis(1_500));
        Reply::status(200)
    });
    let stage = Stage::of_nothing(host, &[]);
    stage.destination("slow", "http", &format!("url '{}'", slow.url("/")));
    for (expected, partitions) in [(1, 5), (2, 16)] {
        stage.cluster.publish(Event::new("one").key("k").to("slow"));
        wait_until("the message", LONG, || slow.requests().len() == expected);
        let change = format!("select outbox_configure(partition_count => {partitions})");
        stage.cluster.exec(DB, &change);
        wait_drained(&stage.cluster);
        assert_eq!(slow.requests().len(), expected, "each message must arrive once");
    }
}

pub fn a_message_waits_with_its_worker_for_the_standby(host: Host) {
    let broker = Broker::shared();
    let (exchange, queue) = exchange_and_queue(broker);
    let conf = ["outbox.publish_after = standby", "outbox.standby_names = 's1'"];
    let stage = Stage::of_broker(host, &exchange, &conf);
    stage.cluster.publish(Event::new("a 1"));
    let held = "select in_flight = 1 from outbox_status";
    wait_true(&stage.cluster, "the message to be in flight", held);
    stage.wait_for_heartbeats(2);
    assert!(all_of(broker, &queue).is_empty(), "it was sent without the standby");
    assert!(stage.cluster.query_one::<bool>(DB, held), "its worker keeps it");
    let shows = |text: &str| {
        let sql = format!("select concat_ws(' ', state, reason, detail) = '{text}' from outbox_destination_status");
        wait_true(&stage.cluster, text, &sql);
    };
    shows("connected standby waits for standby s1");
    let _standby = stage.cluster.copy(true, &["cluster_name = 's1'"]);
    wait_published(&stage.cluster, 1);
    assert_eq!(labels(&all_of(broker, &queue)), ["a 1"]);
    shows("connected");
}

/// A thread uses a few KiB of its stack and of its heap; in huge pages each takes 2 MiB.
pub fn no_memory_of_a_worker_is_in_transparent_huge_pages(host: Host) {
    let stage = Stage::of_nothing(host, &[]);
    for worker in stage.workers() {
        let status = std::fs::read_to_string(format!("/proc/{}/status", worker.pid)).expect("its status");
        let line = status.lines().find_map(|line| line.strip_prefix("THP_enabled:"));
        assert_eq!(line.map(str::trim), Some("0"), "{}", worker.id);
    }
}
