//! How much memory does a worker take, in the server and outside, for receivers that hang or are slow, with small and
//! large messages? Each test measures the peak of a process that began with it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde_json::json;
use support::courier::{Outside, make_courier};
use support::process::peak_mib;
use support::wait::pass_time_until;
use support::{Broker, Cluster, Receiver, Reply};
use support::{
    DB, create_destinations, create_receivers, exchange_and_queue_with, publish_to_each, unconnected_cluster,
    wait_drained, wait_true,
};

/// The limit that docs/operate/sizes.md states.
const MIB_MAX: u64 = 256;
const LARGE: &str = "jsonb_build_object('text', repeat('x', 1000000))";
const SMALL: &str = "jsonb_build_object('text', repeat('x', 1000))";

/// A server and the worker that is measured.
struct Site {
    cluster: Cluster,
    outside: Option<Outside>,
}

impl Site {
    fn start(is_outside: bool, conf: &[&str]) -> Self {
        let workers = if is_outside {
            "outbox.workers = 0"
        } else {
            "outbox.workers = 1"
        };
        let usual = [
            "outbox.http_allow = '127.0.0.1'",
            "outbox.confirm_timeout = '1h'",
            "shared_buffers = '16MB'",
            workers,
        ];
        let cluster = unconnected_cluster("", "nowhere", &[&usual[..], conf].concat());
        let outside = is_outside.then(|| {
            make_courier(&cluster);
            cluster.exec(
                DB,
                "create server first foreign data wrapper outbox_http options (url 'http://127.0.0.1:1/')",
            );
            Outside::start(&cluster, "measured")
        });
        Self { cluster, outside }
    }

    fn wait_in_flight(&self, at_least: usize) {
        let in_flight = format!("select sum(in_flight) >= {at_least} from outbox_destination_status");
        wait_true(&self.cluster, &format!("{at_least} messages in flight"), &in_flight);
    }

    fn assert_peak(&self, what: &str) {
        let pid = match &self.outside {
            Some(outside) => outside.child.as_ref().expect("it runs").id(),
            None => self
                .cluster
                .query_one::<i32>(DB, "select pid from outbox_worker_status where alive") as u32,
        };
        let peak = peak_mib(pid);
        println!("{what}: {peak} MiB");
        assert!(peak <= MIB_MAX, "{what}: {peak} MiB");
    }
}

/// Receivers that hang after their first answer, while one works. `in_flight`: so many messages are in memory then.
fn receivers_that_hang(is_outside: bool, (count, payload, each, in_flight): (usize, &str, usize, usize)) {
    let hangs = Arc::new(AtomicBool::new(false));
    let is_on = Arc::clone(&hangs);
    let hanging = Receiver::start(move |_| match is_on.load(Ordering::SeqCst) {
        true => Reply::Hang,
        false => Reply::status(200),
    });
    let works = Receiver::start(|_| Reply::status(200));
    let site = Site::start(is_outside, &[]);
    create_receivers(&site.cluster, "d", count, &hanging);
    create_receivers(&site.cluster, "w", 1, &works);
    publish_to_each(&site.cluster, "d", count, 1, "'{}'");
    wait_drained(&site.cluster);
    hangs.store(true, Ordering::SeqCst);
    publish_to_each(&site.cluster, "d", count, each, payload);
    site.wait_in_flight(in_flight);
    for _ in 0..20 {
        let seq: i64 = (site.cluster).query_one(
            DB,
            &format!("select outbox_publish('T', {payload}, destination => 'w1')"),
        );
        let is_over = format!("select not exists (select from outbox where seq = {seq} and destination = 'w1')");
        wait_true(&site.cluster, "the receiver that works", &is_over);
    }
    site.assert_peak(&format!("{count} that hang, outside: {is_outside}"));
}

const HANGING: [(usize, &str, usize, usize); 4] = [
    (1, LARGE, 100, 7),
    (60, LARGE, 64, 24),
    (1_000, LARGE, 2, 20),
    (1_000, SMALL, 100, 2_000),
];

#[test]
fn a_worker_takes_bounded_memory_for_receivers_that_hang() {
    HANGING.iter().for_each(|load| receivers_that_hang(false, *load));
}

#[test]
fn a_worker_outside_takes_bounded_memory_for_receivers_that_hang() {
    HANGING.iter().for_each(|load| receivers_that_hang(true, *load));
}

#[test]
fn a_worker_takes_bounded_memory_for_receivers_that_are_slow() {
    for is_outside in [false, true] {
        let slow = Receiver::start(|_| {
            pass_time_until(Instant::now() + Duration::from_millis(100));
            Reply::status(200)
        });
        let site = Site::start(is_outside, &[]);
        create_receivers(&site.cluster, "d", 60, &slow);
        publish_to_each(&site.cluster, "d", 60, 8, LARGE);
        let none = "select not exists (select from outbox) and not exists (select from outbox_waiting)";
        support::wait_until("all messages", support::LONG, || {
            slow.take_requests(); // their bodies
            site.cluster.query_one(DB, none)
        });
        site.assert_peak(&format!("60 that are slow, outside: {is_outside}"));
    }
}

/// Large messages fill the buffers of each connection.
#[test]
fn a_worker_takes_bounded_memory_for_exchanges_that_are_blocked() {
    const EXCHANGES: usize = 30;
    for is_outside in [false, true] {
        let broker = Broker::start();
        let (exchange, _) = exchange_and_queue_with(&broker, json!({"x-max-length": 1}));
        let works = Receiver::start(|_| Reply::status(200));
        let site = Site::start(is_outside, &[]);
        let options = format!("url '{}', exchange '{exchange}'", broker.url());
        create_destinations(&site.cluster, "d", EXCHANGES, "outbox_amqp", &options);
        create_receivers(&site.cluster, "w", 1, &works);
        publish_to_each(&site.cluster, "d", EXCHANGES, 16, LARGE);
        wait_drained(&site.cluster);
        broker.set_memory_alarm(true);
        publish_to_each(&site.cluster, "d", EXCHANGES, 16, LARGE);
        // A broker blocks a connection that publishes.
        let blocked = "select count(*) >= 10 from outbox_destination_status where state = 'blocked'";
        wait_true(&site.cluster, "exchanges to be blocked", blocked);
        for _ in 0..20 {
            publish_to_each(&site.cluster, "w", 1, 1, LARGE);
            let is_over = "select not exists (select from outbox where destination = 'w1')";
            wait_true(&site.cluster, "the receiver that works", is_over);
        }
        site.assert_peak(&format!("{EXCHANGES} that are blocked, outside: {is_outside}"));
    }
}
