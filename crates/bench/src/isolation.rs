//! Row isolation: the time from COMMIT until a consumer has the message of a good destination, beside a destination in
//! trouble ÷ without it. One kind of trouble at a time. A separate session publishes to that destination at a steady
//! rate, as an application would that does not know of the trouble.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use support::{Mode, Proxy, Receiver, Reply, wait_paused, wait_stats};

use crate::clients::{Application, Method, Pace, Transactions, Until};
use crate::options::{Options, Placement};
use crate::report::{BenchReport, Side};
use crate::servers::{DB, EXCHANGE, Servers};

/// The rate of transactions per second for the good destination, and of messages per second for the other one.
const RATE: Pace = Pace::PerSecond(200);
const RATE_OF_BAD: u32 = 50;
/// The number of messages that wait for the destination in trouble before the measurement starts, each with a different
/// key.
const WAITING: u32 = 200;

type Answer = fn() -> Reply;

const RECEIVERS: [(&str, Answer); 5] = [
    ("HTTP hangs", || Reply::Hang),
    ("HTTP drips", || Reply::Drip),
    ("HTTP 500", || Reply::status(500)),
    ("HTTP 503", || Reply::status(503)),
    ("HTTP closes", || Reply::Close),
];
const PROXIES: [(&str, &str, Mode); 6] = [
    ("HTTP resets", "outbox_http", Mode::Refuse),
    ("HTTP garbage", "outbox_http", Mode::Garbage),
    ("AMQP hangs", "outbox_amqp", Mode::Blackhole),
    ("AMQP answers nothing", "outbox_amqp", Mode::DropReplies),
    ("AMQP resets", "outbox_amqp", Mode::Refuse),
    ("AMQP garbage", "outbox_amqp", Mode::Garbage),
];

pub fn isolation(options: &Options, report: &mut BenchReport) {
    let servers = Servers::start(Placement::Unpinned, options.first_queue(), &[], report);
    let broker = servers.broker.port();
    let mut application = Application::new(servers);
    application.run(Method::Publish, RATE, options.seconds, Until::Received); // warms up
    for (name, answer) in RECEIVERS {
        let receiver = Receiver::start(move |_| answer());
        let server = format!("outbox_http options (url '{}')", receiver.url("/hook"));
        beside(options, report, &mut application, name, &server);
    }
    for (name, wrapper, mode) in PROXIES {
        let proxy = Proxy::start(broker);
        proxy.mode(mode);
        let server = match wrapper {
            "outbox_http" => format!("{wrapper} options (url 'http://127.0.0.1:{}/hook')", proxy.port()),
            _ => format!(
                "{wrapper} options (url 'amqp://127.0.0.1:{}', exchange '{EXCHANGE}')",
                proxy.port()
            ),
        };
        beside(options, report, &mut application, name, &server);
    }
}

/// Measures beside a destination; `server` is the end of its CREATE SERVER.
fn beside(options: &Options, report: &mut BenchReport, application: &mut Application, name: &str, server: &str) {
    let bad = name.to_lowercase().replace(' ', "_");
    let create = format!("create server {bad} foreign data wrapper {server}");
    application.servers.sql_execute(&create);
    pause(&mut application.servers, &bad);
    report.compare(&format!("isolation, {name}"), ["beside it", "alone"], |side| {
        let run =
            |application: &mut Application| application.run(Method::Publish, RATE, options.seconds, Until::Received);
        match side {
            Side::Ours => while_publishing_to(application, &bad, run),
            Side::Other => run(application),
        }
        .latency()
    });
    report.goal("p99", "a ratio of at most 2", |ratio, _| ratio <= 2.0);
}

/// Pauses a destination, so that none of its messages is in flight.
fn pause(servers: &mut Servers, destination: &str) {
    servers.sql_execute(&format!("select outbox_pause('{destination}')"));
    wait_paused(&servers.cluster, destination);
}

/// Measures while another session publishes to the destination in trouble, and pauses the destination.
fn while_publishing_to(
    application: &mut Application,
    destination: &str,
    measure: impl FnOnce(&mut Application) -> Transactions,
) -> Transactions {
    let publish = |count: u32| {
        format!(
            "select outbox_publish('T', '{{}}', 'bad', gen_random_uuid()::text, 'x', destination => '{destination}')
             from generate_series(1, {count})"
        )
    };
    let servers = &mut application.servers;
    servers.sql_execute(&publish(WAITING));
    servers.sql_execute(&format!("select outbox_resume('{destination}')"));
    wait_stats(&servers.cluster, destination, "state <> 'paused'");
    let ends = Arc::new(AtomicBool::new(false));
    let (is_over, mut sql, one) = (ends.clone(), servers.cluster.connect(DB), publish(1));
    let sender = thread::spawn(move || {
        let mut due = Instant::now();
        while !is_over.load(Ordering::Relaxed) {
            sql.batch_execute(&one).expect("publish");
            due += Duration::from_secs(1) / RATE_OF_BAD;
            thread::sleep(due.saturating_duration_since(Instant::now()));
        }
    });
    let measured = measure(application);
    ends.store(true, Ordering::Relaxed);
    sender.join().expect("a sender that ends well");
    pause(&mut application.servers, destination);
    measured
}
