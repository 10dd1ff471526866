//! Clients of an application, each on a thread: every transaction writes a business row and an event. They take the
//! time until COMMIT is answered, and until a consumer has the message. Called by the rows latency and commits.

use std::collections::HashMap;
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use lapin::Channel;
use postgres::{Client, Statement};
use support::Consumer;
use tokio::runtime::Runtime;

use crate::bare::{self, BarePublisher};
use crate::cpu::Cpu;
use crate::events::{self, EventMaker};
use crate::report::Sample;
use crate::servers::{BACKEND_PID, DB, QUEUE, Servers, ask};
use crate::stats;

/// Transactions per second of one client. A client commits and, where it publishes itself, waits for a confirm: 20 ms
/// suffice for both on a slow disk.
const RATE_PER_CLIENT: u32 = 50;
/// Transactions that are rolled back before the measurement, so that each session has its plans and caches.
const WARM_UPS: u32 = 10;
/// The time limit for the last message of a run.
const LAST_MESSAGE: Duration = Duration::from_secs(30);

fn ms(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

/// What a transaction does with its event.
#[derive(Clone, Copy, PartialEq)]
pub enum Method {
    Publish,
    /// It inserts the event into the application's table, and enqueues it from this source.
    InsertAndEnqueue,
    /// It inserts the event, and the application publishes the message after the commit.
    InsertAndPublishLater,
    Insert,
}

#[derive(Clone, Copy)]
pub enum Pace {
    /// Transactions begin on a fixed schedule, however long earlier ones took.
    PerSecond(u32),
    /// This number of sessions commit one transaction after the other.
    AsFastAsPossible(u32),
}

/// How far each message of a run must get.
#[derive(Clone, Copy, PartialEq)]
pub enum Until {
    Committed,
    /// A consumer has it.
    Received,
}

/// The clients' side of a row: servers with the tables of the application.
pub struct Application {
    pub servers: Servers,
    maker: EventMaker,
    runs: u64,
}

/// What the clients of one run measured.
pub struct Transactions {
    method: Method,
    to_consumer_ms: Vec<f64>,
    commit_ms: Vec<f64>,
    per_s: f64,
    /// The rate of published messages until the last transaction.
    published_per_s: f64,
    cpu: Cpu,
    wal_bytes: f64,
}

/// One transaction, with times of this process' monotonic clock.
struct Sent {
    id: String,
    commit_sent: Instant,
    commit_answered: Instant,
}

impl Application {
    pub fn new(mut servers: Servers) -> Self {
        let tables = "create table orders (id bigint generated always as identity primary key, total numeric not null);
                      create table app_events (like outbox_events including all)";
        servers.sql_execute(tables);
        Self {
            servers,
            maker: EventMaker::new(),
            runs: 0,
        }
    }

    /// Empties all tables that transactions fill. Delivery is paused.
    pub fn forget(&mut self) {
        let tables = "truncate outbox, outbox_events, outbox_history, app_events, orders";
        self.servers.sql_execute(tables);
        self.servers.sql_execute("checkpoint");
    }

    /// Runs transactions for some seconds, on a new queue.
    pub fn run(&mut self, method: Method, pace: Pace, seconds: u32, until: Until) -> Transactions {
        let (clients, interval) = match pace {
            Pace::AsFastAsPossible(clients) => (clients, Duration::ZERO),
            Pace::PerSecond(rate) => {
                let clients = rate.div_ceil(RATE_PER_CLIENT);
                (clients, Duration::from_secs(1) * clients / rate)
            }
        };
        self.runs += 1;
        self.servers.renew_queue();
        let consumer = (until == Until::Received).then(|| Consumer::new(&self.servers.broker, QUEUE));
        let publisher = (method == Method::InsertAndPublishLater)
            .then(|| BarePublisher::connect_clients(self.servers.broker.port(), clients));
        let mut sessions: Vec<BenchSession> = (0..clients)
            .map(|number| BenchSession {
                sql: self.servers.cluster.connect(DB),
                method,
                publish: publisher
                    .as_ref()
                    .map(|publisher| (&publisher.channels[number as usize], &publisher.runtime)),
                maker: &self.maker,
                order: events::order(number),
                first_id: self.runs << 32 | u64::from(number) << 24,
                offset: interval * number / clients,
                interval,
            })
            .collect();
        let pid = |session: &mut BenchSession| ask(&mut session.sql, BACKEND_PID);
        let pids: Vec<i32> = sessions.iter_mut().map(pid).collect();
        let processes = self.servers.processes(&pids);
        let start = Barrier::new(clients as usize + 1);
        let (before, done) = thread::scope(|threads| {
            let length = Duration::from_secs(seconds.into());
            let start = &start;
            let running: Vec<_> = (sessions.into_iter())
                .map(|session| threads.spawn(move || session.run(start, length)))
                .collect();
            start.wait(); // until all are warm
            let published = self.servers.published();
            let before = (self.servers.wal_bytes(), processes.read(), Instant::now(), published);
            start.wait();
            let join = |thread: thread::ScopedJoinHandle<_>| thread.join().expect("a client that ends well");
            (before, running.into_iter().map(join).collect::<Vec<_>>())
        });
        let took = before.2.elapsed();
        let published = (self.servers.published() - before.3) as f64;
        let sent: Vec<&Sent> = done.iter().flat_map(|done| &done.sent).collect();
        let deliveries = match consumer {
            Some(consumer) => consumer.recv_n(sent.len(), LAST_MESSAGE),
            None => Vec::new(),
        };
        // The sessions are still connected, so their processor time can be read.
        let count = u32::try_from(sent.len()).expect("a small number");
        let cpu = processes.read().per_message(before.1, count);
        let wal_bytes = (self.servers.wal_bytes() - before.0) / f64::from(count);
        if let Some(publisher) = publisher {
            publisher.close();
        }
        let arrived: HashMap<String, Instant> = deliveries
            .into_iter()
            .map(|delivery| (delivery.message_id.expect("an id"), delivery.received_at))
            .collect();
        let to_consumer = |sent: &&Sent| Some(ms(arrived.get(&sent.id)?.duration_since(sent.commit_sent)));
        Transactions {
            method,
            to_consumer_ms: sent.iter().filter_map(to_consumer).collect(),
            commit_ms: (sent.iter())
                .map(|sent| ms(sent.commit_answered.duration_since(sent.commit_sent)))
                .collect(),
            per_s: f64::from(count) / took.as_secs_f64(),
            published_per_s: published / took.as_secs_f64(),
            cpu,
            wal_bytes,
        }
    }
}

impl Transactions {
    /// The time from COMMIT until the consumer has the message, and what a message costs.
    pub fn latency(&self) -> Sample {
        let sample = Sample::default()
            .result("median", "ms", stats::median(&self.to_consumer_ms))
            .detail("the commit itself, median", "ms", stats::median(&self.commit_ms))
            .result("p99", "ms", stats::percentile(&self.to_consumer_ms, 99.0))
            .detail("the commit itself, p99", "ms", stats::percentile(&self.commit_ms, 99.0))
            .detail("transactions done", "/s", self.per_s)
            .detail("CPU of the broker, a message", "µs", self.cpu.broker);
        let sample = self.with_costs(sample);
        match self.method {
            Method::Publish | Method::InsertAndEnqueue => {
                sample.detail("CPU of the worker, a message", "µs", self.cpu.workers)
            }
            Method::InsertAndPublishLater | Method::Insert => sample,
        }
    }

    /// The rate of transactions, what one costs, and whether the worker kept up.
    pub fn rate(&self) -> Sample {
        let sample = self.with_costs(Sample::default().result("", "/s", self.per_s));
        match self.published_per_s {
            0.0 => sample,
            per_s => sample
                .detail("published until the last transaction", "/s", per_s)
                .detail("CPU of the worker, a transaction", "µs", self.cpu.workers)
                .detail("CPU of the broker, a transaction", "µs", self.cpu.broker),
        }
    }

    fn with_costs(&self, sample: Sample) -> Sample {
        sample
            .detail("CPU of the session, a transaction", "µs", self.cpu.sessions)
            .detail("CPU of other Postgres, a transaction", "µs", self.cpu.postgres)
            .detail("WAL of a transaction", "bytes", self.wal_bytes)
    }
}

/// A client after its run. Its session is still connected.
struct Done {
    _session: Client,
    sent: Vec<Sent>,
}

/// A session of a client.
struct BenchSession<'a> {
    sql: Client,
    method: Method,
    /// The channel on which the application publishes.
    publish: Option<(&'a Channel, &'a Runtime)>,
    maker: &'a EventMaker,
    order: String,
    first_id: u64,
    /// The times of its first transaction, and between two.
    offset: Duration,
    interval: Duration,
}

impl BenchSession<'_> {
    fn run(mut self, start: &Barrier, length: Duration) -> Done {
        let business = self.sql.prepare("insert into orders (total) values (99.90)");
        let business = business.expect("prepare");
        let event = self.prepare_event();
        for _ in 0..WARM_UPS {
            self.begin(&business, &event, &events::id(u64::MAX >> 16));
            self.sql.batch_execute("rollback").expect("rollback");
        }
        start.wait();
        start.wait();
        let started = Instant::now();
        let mut due = self.offset;
        let mut all = Vec::new();
        while due.max(started.elapsed()) < length {
            thread::sleep(due.saturating_sub(started.elapsed()));
            due += self.interval;
            let id = events::id(self.first_id + all.len() as u64);
            let seq = self.begin(&business, &event, &id);
            let commit_sent = Instant::now();
            self.sql.batch_execute("commit").expect("commit");
            let commit_answered = Instant::now();
            if let Some((channel, runtime)) = &self.publish {
                let message = self.maker.message(seq, &self.order, &id);
                runtime.block_on(bare::publish(channel, message.into()));
            }
            all.push(Sent {
                id,
                commit_sent,
                commit_answered,
            });
        }
        Done {
            _session: self.sql,
            sent: all,
        }
    }

    fn prepare_event(&mut self) -> Statement {
        const PAYLOAD: &str = "jsonb_build_object('note', $1::text, 'order', $2::text, 'total', 99.90)";
        let insert = format!(
            "insert into app_events (id, type, aggregate_type, aggregate_id, operation, payload)
             values ($3::text::uuid, 'OrderPlaced', 'order', $2::text, 'placed', {PAYLOAD}) returning seq"
        );
        let sql = match self.method {
            Method::Publish => format!(
                "select outbox_publish('OrderPlaced', {PAYLOAD}, 'order', $2::text, 'placed', id => $3::text::uuid)"
            ),
            Method::InsertAndEnqueue => {
                format!("with stored as ({insert}) select seq, outbox_enqueue(seq) from stored")
            }
            Method::InsertAndPublishLater | Method::Insert => insert,
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
