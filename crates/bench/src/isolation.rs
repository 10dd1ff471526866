//! Row isolation: the time from COMMIT until a consumer has the message of a good destination, beside a destination in
//! trouble ÷ without it. One kind of trouble at a time. A separate session publishes to that destination at a steady
//! rate, as an application would that does not know of the trouble.

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use serde_json::json;
use support::{Mode, Proxy, Receiver, Reply};

use crate::events::Maker;
use crate::latency::{self, Samples, Side};
use crate::options::{Options, Placement};
use crate::report::{Measurement, Report, log_progress};
use crate::servers::{DB, EXCHANGE, Servers};
use crate::stats;

/// The rate of transactions per second for the good destination, and of messages per second for the other one.
const RATE: u32 = 200;
const RATE_OF_BAD: u32 = 50;
/// The number of messages that wait for the destination in trouble before the measurement starts, each with a different
/// key.
const WAITING: u32 = 200;
const GOAL: f64 = 2.0;

struct Trouble {
    name: &'static str,
    /// The foreign data wrapper of its foreign server.
    wrapper: &'static str,
    options: String,
    /// The peer that answers for the destination while this value lives.
    _peer: Box<dyn Any>,
}

pub fn run(options: &Options, report: &mut Report) {
    log_progress("isolation: starting servers");
    let conf = ["outbox.http_allow = '127.0.0.1'"];
    let mut servers = Servers::start(Placement::Unpinned, options.first_queue(), &conf);
    report.about(&mut servers);
    latency::create_tables(&mut servers);
    let maker = Arc::new(Maker::new(EXCHANGE));
    let mut ids = 0;
    let mut run_once = |servers: &Servers| {
        latency::measure(
            options,
            servers,
            &maker,
            options.first_queue(),
            RATE,
            Side::Outbox,
            &mut ids,
        )
    };
    run_once(&servers); // warms up
    for (number, trouble) in troubles(&servers).iter().enumerate() {
        let name = format!("isolation, {}", trouble.name);
        let destination = format!("bad{number}");
        servers
            .sql
            .batch_execute(&trouble.create(&destination))
            .expect("create a server");
        pause(&mut servers, &destination);
        let (mut alone, mut beside) = (Vec::new(), Vec::new());
        for pair in 1..=options.pairs {
            alone.push(run_once(&servers));
            let sender = Sender::start(&mut servers, &destination);
            beside.push(run_once(&servers));
            sender.end();
            pause(&mut servers, &destination);
            let last = pair as usize - 1;
            log_progress(&format!(
                "{name}, pair {pair} of {}: p99 alone {:.2} ms, beside {:.2} ms",
                options.pairs,
                p99(&alone[last]),
                p99(&beside[last])
            ));
        }
        let each = |side: &[Samples], of: fn(&Samples) -> f64| -> Vec<f64> { side.iter().map(of).collect() };
        let middle = |side: &[Samples], of: fn(&Samples) -> f64| stats::median(&each(side, of));
        let measurement = Measurement {
            name: format!("{name}, p99"),
            sides: ("beside it", "alone"),
            unit: "ms",
            ours: each(&beside, p99),
            theirs: each(&alone, p99),
            notes: vec![format!(
                "median {:.2} and {:.2} ms; transactions done: {:.0}/s and {:.0}/s",
                middle(&beside, p50),
                middle(&alone, p50),
                middle(&beside, |samples| samples.per_s),
                middle(&alone, |samples| samples.per_s),
            )],
            details: json!({"median_ms": {"ours": each(&beside, p50), "theirs": each(&alone, p50)}}),
        };
        let ratio = measurement.ratio().0;
        report.add(measurement);
        report.goal(
            &name,
            "× the p99 alone",
            ratio,
            ratio <= GOAL,
            &format!("at most {GOAL}"),
        );
    }
}

fn p50(samples: &Samples) -> f64 {
    stats::median(&samples.to_consumer)
}

fn p99(samples: &Samples) -> f64 {
    stats::percentile(&samples.to_consumer, 99.0)
}

fn troubles(servers: &Servers) -> Vec<Trouble> {
    let http = |name, receiver: Receiver| Trouble {
        name,
        wrapper: "outbox_http",
        options: format!("url '{}'", receiver.url("/hook")),
        _peer: Box::new(receiver),
    };
    let proxied = |mode| {
        let proxy = Proxy::start(servers.broker.port());
        proxy.mode(mode);
        proxy
    };
    let posted = |name, mode| {
        let proxy = proxied(mode);
        Trouble {
            name,
            wrapper: "outbox_http",
            options: format!("url 'http://127.0.0.1:{}/hook'", proxy.port()),
            _peer: Box::new(proxy),
        }
    };
    let published = |name, mode| {
        let proxy = proxied(mode);
        Trouble {
            name,
            wrapper: "outbox_amqp",
            options: format!("url 'amqp://127.0.0.1:{}', exchange '{EXCHANGE}'", proxy.port()),
            _peer: Box::new(proxy),
        }
    };
    vec![
        http("HTTP hangs", Receiver::start(|_| Reply::Hang)),
        http("HTTP drips", Receiver::start(|_| Reply::Drip)),
        http("HTTP 500", Receiver::start(|_| Reply::status(500))),
        http("HTTP 503", Receiver::start(|_| Reply::status(503))),
        http("HTTP closes", Receiver::start(|_| Reply::Close)),
        posted("HTTP resets", Mode::Refuse),
        posted("HTTP garbage", Mode::Garbage),
        published("AMQP hangs", Mode::Blackhole),
        published("AMQP answers nothing", Mode::DropReplies),
        published("AMQP resets", Mode::Refuse),
        published("AMQP garbage", Mode::Garbage),
    ]
}

impl Trouble {
    fn create(&self, destination: &str) -> String {
        let Self { wrapper, options, .. } = self;
        format!("create server {destination} foreign data wrapper {wrapper} options ({options})")
    }
}

/// Pauses a destination, so that none of its messages is in flight.
fn pause(servers: &mut Servers, destination: &str) {
    let pause = format!("select outbox_pause('{destination}')");
    servers.sql.batch_execute(&pause).expect("pause");
    servers.wait_true(
        "the other destination to pause",
        &format!("select exists (select from outbox_destination_status where destination = '{destination}' and state = 'paused')"),
    );
}

/// A thread that publishes to the destination in trouble.
struct Sender {
    ends: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

impl Sender {
    /// Starts the thread. When this returns, the destination is in trouble.
    fn start(servers: &mut Servers, destination: &str) -> Self {
        let publish = |count: &str| {
            format!(
                "select outbox_publish('T', '{{}}', 'bad', gen_random_uuid()::text, 'x', destination => '{destination}')
                 from generate_series(1, {count})"
            )
        };
        let resume = format!("select outbox_resume('{destination}')");
        servers
            .sql
            .batch_execute(&publish(&WAITING.to_string()))
            .expect("publish");
        servers.sql.batch_execute(&resume).expect("resume");
        servers.wait_true(
            "the other destination to be tried",
            &format!("select exists (select from outbox_destination_status where destination = '{destination}' and state <> 'paused')"),
        );
        let ends = Arc::new(AtomicBool::new(false));
        let (is_over, mut sql, one) = (ends.clone(), servers.cluster.connect(DB), publish("1"));
        let thread = thread::spawn(move || {
            let mut due = Instant::now();
            while !is_over.load(Ordering::Relaxed) {
                sql.batch_execute(&one).expect("publish");
                due += Duration::from_secs(1) / RATE_OF_BAD;
                thread::sleep(due.saturating_duration_since(Instant::now()));
            }
        });
        Self { ends, thread }
    }

    fn end(self) {
        self.ends.store(true, Ordering::Relaxed);
        self.thread.join().expect("a sender that ends well");
    }
}
