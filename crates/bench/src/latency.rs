//! Row latency: the time from sending COMMIT until a consumer has the message, the outbox ÷ an application that
//! publishes after its commit. Both write the same business row and the same event in the transaction. The application
//! then publishes the message itself and waits for the confirm. Transactions begin on a fixed schedule, however long
//! earlier ones took. The outbox gets the event by outbox_publish(); then, with the application's table of events as the
//! source, its seq by outbox_enqueue().

use std::collections::HashMap;
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::{Duration, Instant};

use lapin::Channel;
use postgres::{Client, Statement};
use serde_json::json;
use support::Consumer;
use tokio::runtime::{Handle, Runtime};

use crate::bare;
use crate::events::{self, Maker};
use crate::options::{Options, Placement, QueueType};
use crate::report::{Measurement, Report, log_progress};
use crate::servers::{DB, EXCHANGE, QUEUE, Servers};
use crate::stats;

/// Transactions per second of one client. A client commits and, on the application's side, waits for a confirm: 20 ms
/// suffice for both on a slow disk.
const RATE_PER_CLIENT: u32 = 50;
/// Transactions that are rolled back before the measurement, so that each session has its plans and caches.
const WARM_UPS: u32 = 10;
/// The time limit for the last message of a run.
const LAST_MESSAGE: Duration = Duration::from_secs(30);

#[derive(Clone, Copy, PartialEq)]
pub enum Side {
    Outbox,
    /// The outbox, which reads the application's table of events.
    Source,
    Application,
}

/// One transaction, with times of this process' monotonic clock.
struct Sent {
    id: String,
    commit_sent: Instant,
    commit_answered: Instant,
}

/// The samples of one run of one side, in ms.
pub struct Samples {
    pub to_consumer: Vec<f64>,
    commit: Vec<f64>,
    pub per_s: f64,
}

pub fn run(options: &Options, report: &mut Report) {
    log_progress("latency: starting servers");
    let mut servers = Servers::start(Placement::Unpinned, options.first_queue(), &[]);
    report.about(&mut servers);
    create_tables(&mut servers);
    let maker = Arc::new(Maker::new(EXCHANGE));
    let mut ids = 0;
    compare(options, &servers, &maker, ("latency", Side::Outbox), &mut ids, report);
    // A source is set only while no message waits.
    servers
        .sql
        .batch_execute("select outbox_drain()")
        .expect("settle the last messages");
    servers.sql.batch_execute(SOURCE).expect("set the source");
    compare(
        options,
        &servers,
        &maker,
        ("latency of a source", Side::Source),
        &mut ids,
        report,
    );
}

/// Measures one side of the outbox beside the application.
fn compare(
    options: &Options,
    servers: &Servers,
    maker: &Arc<Maker>,
    (row, ours): (&str, Side),
    ids: &mut u64,
    report: &mut Report,
) {
    for &queue in &options.queues {
        for &rate in &options.rates {
            let name = format!("{row}, {}, {rate}/s", queue.name());
            let (mut our_runs, mut their_runs) = (Vec::new(), Vec::new());
            for pair in 1..=options.pairs {
                let mut side = |side| measure(options, servers, maker, queue, rate, side, ids);
                let (them, us) = (side(Side::Application), side(ours));
                let middle = |samples: &Samples| stats::median(&samples.to_consumer);
                log_progress(&format!(
                    "{name}, pair {pair} of {}: application {:.2} ms, outbox {:.2} ms",
                    options.pairs,
                    middle(&them),
                    middle(&us)
                ));
                their_runs.push(them);
                our_runs.push(us);
            }
            measurements(&name, &our_runs, &their_runs)
                .into_iter()
                .for_each(|measurement| report.add(measurement));
        }
    }
}

/// Makes the application's table of events the source. Its owner is no superuser, as expressions run as the owner.
const SOURCE: &str = "create role application; alter table app_events owner to application;
    select outbox_source_set('app_events', seq => 'seq', id => 'id', type => 'type', created_at => 'created_at',
      aggregate_type => 'aggregate_type', aggregate_id => 'aggregate_id', operation => 'operation', payload => 'payload')";

/// Creates the business table, and the application's own table of events.
pub fn create_tables(servers: &mut Servers) {
    let tables = "create table orders (id bigint generated always as identity primary key, total numeric not null);
                  create table app_events (like outbox_events including all)";
    servers.sql.batch_execute(tables).expect("create tables");
}

fn measurements(name: &str, ours: &[Samples], theirs: &[Samples]) -> [Measurement; 2] {
    let each = |side: &[Samples], of: &dyn Fn(&Samples) -> f64| -> Vec<f64> { side.iter().map(of).collect() };
    let median = |samples: &Samples| stats::median(&samples.to_consumer);
    let p99 = |samples: &Samples| stats::percentile(&samples.to_consumer, 99.0);
    let commit = |samples: &Samples| stats::median(&samples.commit);
    let commit_p99 = |samples: &Samples| stats::percentile(&samples.commit, 99.0);
    let per_s = |samples: &Samples| samples.per_s;
    let measurement = |what: &str, of: &dyn Fn(&Samples) -> f64, of_commit: &dyn Fn(&Samples) -> f64| {
        let middle = |side: &[Samples], of: &dyn Fn(&Samples) -> f64| stats::median(&each(side, of));
        Measurement {
            name: format!("{name}, {what}"),
            sides: ("outbox", "publish after commit"),
            unit: "ms",
            ours: each(ours, of),
            theirs: each(theirs, of),
            notes: vec![format!(
                "the commit itself: {:.2} and {:.2} ms; transactions done: {:.0}/s and {:.0}/s",
                middle(ours, of_commit),
                middle(theirs, of_commit),
                middle(ours, &per_s),
                middle(theirs, &per_s),
            )],
            details: json!({
                "commit_ms": {"ours": each(ours, of_commit), "theirs": each(theirs, of_commit)},
                "per_s": {"ours": each(ours, &per_s), "theirs": each(theirs, &per_s)},
            }),
        }
    };
    [
        measurement("median", &median, &commit),
        measurement("p99", &p99, &commit_p99),
    ]
}

/// Runs one side once, on a new queue.
pub fn measure(
    options: &Options,
    servers: &Servers,
    maker: &Arc<Maker>,
    queue: QueueType,
    rate: u32,
    side: Side,
    ids: &mut u64,
) -> Samples {
    servers.renew_queue(queue);
    let consumer = Consumer::new(&servers.broker, QUEUE);
    let clients = rate.div_ceil(RATE_PER_CLIENT);
    let publisher = (side == Side::Application).then(|| Publisher::connect(servers.broker.port(), clients));
    let start = Arc::new(Barrier::new(clients as usize + 1));
    let interval = Duration::from_secs(1) * clients / rate;
    let each = rate * options.seconds / clients;
    let threads: Vec<_> = (0..clients)
        .map(|number| {
            let first_id = *ids;
            *ids += u64::from(each);
            let client = ClientOfOne {
                sql: servers.cluster.connect(DB),
                side,
                channel: publisher
                    .as_ref()
                    .map(|publisher| publisher.channels[number as usize].clone()),
                runtime: publisher.as_ref().map(|publisher| publisher.runtime.handle().clone()),
                maker: maker.clone(),
                order: events::order(number),
            };
            let offset = interval * number / clients;
            let start = start.clone();
            thread::spawn(move || client.work(&start, offset, interval, first_id..first_id + u64::from(each)))
        })
        .collect();
    start.wait();
    let started = Instant::now();
    let sent: Vec<Sent> = threads
        .into_iter()
        .flat_map(|thread| thread.join().expect("a client that ends well"))
        .collect();
    let took = started.elapsed();
    let deliveries = consumer.recv_n(sent.len(), LAST_MESSAGE);
    if let Some(publisher) = publisher {
        publisher.close();
    }
    let arrived: HashMap<String, Instant> = deliveries
        .into_iter()
        .map(|delivery| (delivery.message_id.expect("an id"), delivery.received_at))
        .collect();
    let ms = |duration: Duration| duration.as_secs_f64() * 1e3;
    Samples {
        to_consumer: sent
            .iter()
            .map(|sent| ms(arrived[&sent.id].duration_since(sent.commit_sent)))
            .collect(),
        commit: sent
            .iter()
            .map(|sent| ms(sent.commit_answered.duration_since(sent.commit_sent)))
            .collect(),
        per_s: sent.len() as f64 / took.as_secs_f64(),
    }
}

/// The application's connection to the broker, with a channel for each client.
struct Publisher {
    runtime: Runtime,
    connection: lapin::Connection,
    channels: Vec<Channel>,
}

impl Publisher {
    fn connect(port: u16, clients: u32) -> Self {
        // One thread for the sockets; the clients' threads poll their own publishes.
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .expect("build a runtime");
        let (connection, channels) = runtime.block_on(async {
            let connection = bare::connect(port, clients as usize + 1).await;
            let mut channels = Vec::new();
            for _ in 0..clients {
                channels.push(bare::confirming_channel(&connection).await);
            }
            (connection, channels)
        });
        Self {
            runtime,
            connection,
            channels,
        }
    }

    fn close(self) {
        let closed = self.runtime.block_on(self.connection.close(200, "OK".into()));
        closed.expect("close the connection");
    }
}

/// A client of the business, on its own thread.
struct ClientOfOne {
    sql: Client,
    side: Side,
    /// The channel on which the application publishes; None on the sides of the outbox.
    channel: Option<Channel>,
    runtime: Option<Handle>,
    maker: Arc<Maker>,
    order: String,
}

impl ClientOfOne {
    fn work(mut self, start: &Barrier, offset: Duration, interval: Duration, ids: std::ops::Range<u64>) -> Vec<Sent> {
        let business = self
            .sql
            .prepare("insert into orders (total) values (99.90)")
            .expect("prepare");
        let event = self.prepare_event();
        for _ in 0..WARM_UPS {
            self.begin(&business, &event, &events::id(u64::MAX >> 16));
            self.sql.batch_execute("rollback").expect("rollback");
        }
        start.wait();
        let started = Instant::now();
        let mut due = started + offset;
        let mut all = Vec::with_capacity((ids.end - ids.start) as usize);
        for id in ids {
            thread::sleep(due.saturating_duration_since(Instant::now()));
            due += interval;
            let id = events::id(id);
            let seq = self.begin(&business, &event, &id);
            let commit_sent = Instant::now();
            self.sql.batch_execute("commit").expect("commit");
            let commit_answered = Instant::now();
            if let (Some(channel), Some(runtime)) = (&self.channel, &self.runtime) {
                let message = self.maker.message(seq, &self.order, &id);
                runtime.block_on(bare::publish(channel, message.into()));
            }
            all.push(Sent {
                id,
                commit_sent,
                commit_answered,
            });
        }
        all
    }

    /// All sides store the event; those of the outbox also enqueue it.
    fn prepare_event(&mut self) -> Statement {
        const PAYLOAD: &str = "jsonb_build_object('note', $1::text, 'order', $2::text, 'total', 99.90)";
        let insert = format!(
            "insert into app_events (id, type, aggregate_type, aggregate_id, operation, payload)
             values ($3::text::uuid, 'OrderPlaced', 'order', $2::text, 'placed', {PAYLOAD}) returning seq"
        );
        let sql = match self.side {
            Side::Outbox => format!(
                "select outbox_publish('OrderPlaced', {PAYLOAD}, 'order', $2::text, 'placed', id => $3::text::uuid)"
            ),
            Side::Source => format!("with stored as ({insert}) select seq, outbox_enqueue(seq) from stored"),
            Side::Application => insert,
        };
        self.sql.prepare(&sql).expect("prepare")
    }

    /// Runs the transaction up to the commit. Returns the event's seq.
    fn begin(&mut self, business: &Statement, event: &Statement, id: &str) -> i64 {
        self.sql.batch_execute("begin").expect("begin");
        self.sql.execute(business, &[]).expect("insert the business row");
        let row = self.sql.query_one(event, &[&self.maker.note, &self.order, &id]);
        row.expect("write the event").get(0)
    }
}
