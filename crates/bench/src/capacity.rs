//! Row capacity: what one message costs, for docs/scaling/capacity.md. It measures processor time at steady rates, and
//! bytes of WAL, of tables and to the broker. It drains by one worker, by two, and by one outside the server. Processor
//! time and bytes depend less on other work on the machine than rates, which are shown as ratios only.

use std::collections::BTreeMap;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::{Duration, Instant};

use postgres::Client;
use support::process::{self, children_of};
use support::{Consumer, Receiver, Reply};

use crate::backlog;
use crate::cpu;
use crate::events::{self, Maker};
use crate::options::{Options, Placement};
use crate::report::{Report, log_progress};
use crate::servers::{DB, EXCHANGE, QUEUE, Servers};
use crate::sizes::memory_mb;

/// Transactions a second of one session, so that none has to hurry on a busy machine.
const RATE_PER_SESSION: u32 = 125;
/// Transactions that are rolled back first, so that each session has its plans and caches.
const WARM_UPS: u32 = 10;
const KEYS: u32 = 1000;
/// The numbers of sessions that commit as fast as they can.
const SESSIONS: [u32; 3] = [1, 4, 16];
/// Sessions and workers send their statistics when they have been idle for a second.
const STATISTICS: Duration = Duration::from_millis(1_500);
const HTTP_MESSAGES: u32 = 10_000;
const CONCURRENCY: [u32; 2] = [8, 64];

pub fn run(options: &Options, report: &mut Report) {
    log_progress("capacity: starting servers");
    let conf = ["outbox.http_allow = '127.0.0.1'", "max_connections = 200"];
    let mut servers = Servers::start(Placement::Unpinned, options.first_queue(), &conf);
    report.about(&mut servers);
    let maker = Arc::new(Maker::new(EXCHANGE));
    storage(options, &mut servers, &maker, report);
    for &rate in &options.steady_rates {
        steady(options, &mut servers, &maker, rate, false, report);
    }
    let last = *options.steady_rates.last().expect("a rate");
    steady(options, &mut servers, &maker, last, true, report);
    commits(options, &mut servers, &maker, report);
    drains(options, &mut servers, &maker, report);
    outside(options, &mut servers, &maker, report);
    removal(options, &mut servers, &maker, report);
    http(options, &mut servers, &maker, report);
}

// ---- readings -------------------------------------------------------------------------------------------------------

/// Processor time in µs since the start of each process, by what the process does.
struct Reading {
    broker: f64,
    /// Each thread of all workers, by its name.
    workers: BTreeMap<String, f64>,
    sessions: f64,
    rest: f64,
}

/// The processor time of one message in µs.
struct Each {
    broker: f64,
    worker: f64,
    /// The thread of a worker that took most, and its time.
    busiest: (String, f64),
    sessions: f64,
    rest: f64,
}

impl Reading {
    /// `sessions` are the backends that enqueue. The session of the bench itself is left out.
    fn now(servers: &mut Servers, sessions: &[u32]) -> Self {
        let own = servers.pids().session;
        let workers = workers(servers);
        let postmaster = servers.cluster.pid();
        let mut reading = Self {
            broker: cpu::of_threads_us(servers.broker.pid()),
            workers: BTreeMap::new(),
            sessions: 0.0,
            rest: cpu::of_threads_us(postmaster) + cpu::of_ended_children_us(postmaster),
        };
        for pid in children_of(postmaster) {
            if workers.contains(&pid) {
                for (thread, us) in cpu::by_thread_us(pid) {
                    *reading.workers.entry(thread).or_default() += us;
                }
            } else if sessions.contains(&pid) {
                reading.sessions += cpu::of_threads_us(pid);
            } else if pid != own {
                reading.rest += cpu::of_threads_us(pid);
            }
        }
        reading
    }

    fn per_message(self, earlier: &Self, messages: u32) -> Each {
        let each = |now: f64, before: f64| (now - before) / f64::from(messages);
        let threads = self.workers.iter().map(|(name, us)| {
            let before = earlier.workers.get(name).copied().unwrap_or_default();
            (name.clone(), each(*us, before))
        });
        let threads: Vec<(String, f64)> = threads.collect();
        Each {
            broker: each(self.broker, earlier.broker),
            worker: threads.iter().map(|(_, us)| us).sum(),
            busiest: threads
                .into_iter()
                .max_by(|a, b| a.1.total_cmp(&b.1))
                .unwrap_or_default(),
            sessions: each(self.sessions, earlier.sessions),
            rest: each(self.rest, earlier.rest),
        }
    }
}

/// The processes of all workers.
fn workers(servers: &mut Servers) -> Vec<u32> {
    let rows = servers
        .sql
        .query("select pid from outbox_worker_status where alive", &[]);
    let pid = |row: &postgres::Row| row.get::<_, i32>(0).cast_unsigned();
    rows.expect("the workers").iter().map(pid).collect()
}

/// Bytes of WAL, full pages in it and syncs of it; transactions; bytes that the broker received and sent.
#[derive(Clone, Copy)]
struct Counters {
    wal_bytes: f64,
    full_pages: f64,
    syncs: f64,
    received: f64,
    sent: f64,
}

impl Counters {
    fn now(servers: &mut Servers) -> Self {
        thread::sleep(STATISTICS);
        let sql =
            "select (pg_current_wal_insert_lsn() - '0/0')::float8, wal_fpi::float8, wal_sync::float8 from pg_stat_wal";
        let row = servers.sql.query_one(sql, &[]).expect("statistics of the WAL");
        let octets = servers.broker.ctl(&["list_connections", "recv_oct", "send_oct"]);
        let (received, sent) = octets
            .lines()
            .filter_map(two_numbers)
            .fold((0.0, 0.0), |sum, line| (sum.0 + line.0, sum.1 + line.1));
        Self {
            wal_bytes: row.get(0),
            full_pages: row.get(1),
            syncs: row.get(2),
            received,
            sent,
        }
    }

    fn per_message(self, earlier: Self, messages: u32) -> Self {
        let each = |now: f64, before: f64| (now - before) / f64::from(messages);
        Self {
            wal_bytes: each(self.wal_bytes, earlier.wal_bytes),
            full_pages: each(self.full_pages, earlier.full_pages),
            syncs: each(self.syncs, earlier.syncs),
            received: each(self.received, earlier.received),
            sent: each(self.sent, earlier.sent),
        }
    }
}

/// A line of two numbers; None for a heading.
fn two_numbers(line: &str) -> Option<(f64, f64)> {
    let mut words = line.split_whitespace().map(str::parse::<f64>);
    Some((words.next()?.ok()?, words.next()?.ok()?))
}

// ---- steady rates ---------------------------------------------------------------------------------------------------

fn steady(
    options: &Options,
    servers: &mut Servers,
    maker: &Arc<Maker>,
    rate: u32,
    consumed: bool,
    report: &mut Report,
) {
    let name = match consumed {
        false => format!("capacity, {rate}/s"),
        true => format!("capacity, {rate}/s, with a consumer"),
    };
    let mut numbers = Numbers::new(&name);
    for _ in 0..options.pairs {
        servers.renew_queue(options.first_queue());
        backlog::forget_the_past(servers);
        backlog::settle_down(servers);
        let _consumer = consumed.then(|| Consumer::new(&servers.broker, QUEUE));
        let count = rate * options.steady_seconds;
        let clients = Clients::connect(servers, maker, rate.div_ceil(RATE_PER_SESSION));
        let counters = Counters::now(servers);
        let before = Reading::now(servers, &clients.pids);
        let (started, target) = (Instant::now(), servers.published() + i64::from(count));
        let pids = clients.pids.clone();
        let clients = clients.on_schedule(rate, count);
        let took = started.elapsed();
        wait_for_published(servers, target);
        let each = Reading::now(servers, &pids).per_message(&before, count);
        let memory = |pid: &u32| memory_mb(*pid, "RssAnon:");
        let of_session = pids.iter().map(memory).fold(0.0, f64::max);
        let of_worker = workers(servers).iter().map(memory).fold(0.0, f64::max);
        drop(clients);
        let counters = Counters::now(servers).per_message(counters, count);
        numbers.add("reached, a second", f64::from(count) / took.as_secs_f64());
        numbers.parts(&each);
        numbers.add("WAL bytes", counters.wal_bytes);
        numbers.add("full pages in the WAL", counters.full_pages);
        numbers.add("syncs of the WAL", counters.syncs);
        if !consumed {
            numbers.add("bytes to the broker", counters.received);
            numbers.add("bytes from the broker", counters.sent);
        }
        numbers.add("private MB of a session", of_session);
        numbers.add("private MB of the worker", of_worker);
    }
    numbers.report(report);
}

fn wait_for_published(servers: &mut Servers, target: i64) {
    support::wait_until("all messages to be published", crate::servers::LONG, || {
        servers.published() >= target
    });
}

/// Sessions that publish one event in each transaction.
struct Clients {
    sessions: Vec<Client>,
    pids: Vec<u32>,
    maker: Arc<Maker>,
}

impl Clients {
    fn connect(servers: &Servers, maker: &Arc<Maker>, count: u32) -> Self {
        let mut sessions: Vec<Client> = (0..count).map(|_| servers.cluster.connect(DB)).collect();
        let pid = |sql: &mut Client| {
            let row = sql.query_one("select pg_backend_pid()", &[]).expect("a pid");
            row.get::<_, i32>(0).cast_unsigned()
        };
        let pids = sessions.iter_mut().map(pid).collect();
        for sql in &mut sessions {
            for _ in 0..WARM_UPS {
                sql.batch_execute("begin").expect("begin");
                let publish = sql.query_one(events::PUBLISH, &[&maker.note, &events::order(0)]);
                publish.expect("publish an event");
                sql.batch_execute("rollback").expect("rollback");
            }
        }
        Self {
            sessions,
            pids,
            maker: maker.clone(),
        }
    }

    /// Runs `count` transactions, `rate` a second, from all sessions together.
    fn on_schedule(self, rate: u32, count: u32) -> Self {
        let sessions = u32::try_from(self.sessions.len()).expect("a small number");
        let interval = Duration::from_secs(1) * sessions / rate;
        self.each(|number, publish| {
            let mut due = Instant::now() + interval * number / sessions;
            for n in (number..count).step_by(sessions as usize) {
                thread::sleep(due.saturating_duration_since(Instant::now()));
                due += interval;
                publish(n);
            }
        })
        .0
    }

    /// Runs transactions as fast as possible. Returns their number.
    fn for_seconds(self, seconds: u32) -> (Self, u32) {
        let stop = Arc::new(AtomicBool::new(false));
        let stopper = stop.clone();
        let timer = thread::spawn(move || {
            thread::sleep(Duration::from_secs(seconds.into()));
            stopper.store(true, Ordering::Release);
        });
        let done = self.each(|number, publish| {
            for n in (number..).step_by(17) {
                if stop.load(Ordering::Acquire) {
                    return;
                }
                publish(n);
            }
        });
        timer.join().expect("a timer");
        done
    }

    /// Runs `work` for each session on a thread. It gets the session's number and a function that publishes an event.
    fn each(self, work: impl Fn(u32, &mut dyn FnMut(u32)) + Sync) -> (Self, u32) {
        let start = Barrier::new(self.sessions.len());
        let (note, work, start) = (&self.maker.note, &work, &start);
        let done = thread::scope(|threads| {
            let threads: Vec<_> = (0..)
                .zip(self.sessions)
                .map(|(number, mut sql)| {
                    threads.spawn(move || {
                        let publish = sql.prepare(events::PUBLISH).expect("prepare");
                        let mut count = 0;
                        start.wait();
                        work(number, &mut |n| {
                            let order = events::order(n % KEYS);
                            sql.query_one(&publish, &[note, &order]).expect("publish an event");
                            count += 1;
                        });
                        (sql, count)
                    })
                })
                .collect();
            let join = |thread: thread::ScopedJoinHandle<'_, (Client, u32)>| thread.join().expect("a session");
            threads.into_iter().map(join).collect::<Vec<_>>()
        });
        let count = done.iter().map(|(_, count)| count).sum();
        let clients = Self {
            sessions: done.into_iter().map(|(sql, _)| sql).collect(),
            pids: self.pids,
            maker: self.maker.clone(),
        };
        (clients, count)
    }
}

// ---- commits --------------------------------------------------------------------------------------------------------

/// Transactions as fast as sessions can, while delivery is paused.
fn commits(options: &Options, servers: &mut Servers, maker: &Arc<Maker>, report: &mut Report) {
    servers.pause();
    for sessions in SESSIONS {
        let mut numbers = Numbers::new(&format!("capacity, commits of {sessions} sessions"));
        for _ in 0..options.pairs {
            let clients = Clients::connect(servers, maker, sessions);
            let pids = clients.pids.clone();
            let counters = Counters::now(servers);
            let before = Reading::now(servers, &pids);
            let (clients, count) = clients.for_seconds(options.seconds);
            let each = Reading::now(servers, &pids).per_message(&before, count);
            drop(clients);
            let counters = Counters::now(servers).per_message(counters, count);
            numbers.add("CPU-µs of the session", each.sessions);
            numbers.add("CPU-µs of other Postgres", each.rest);
            numbers.add("WAL bytes", counters.wal_bytes);
            numbers.add("syncs of the WAL", counters.syncs);
        }
        numbers.report(report);
    }
    let cleared = "truncate outbox, outbox_events, outbox_history";
    servers.sql.batch_execute(cleared).expect("remove the backlog");
    servers.resume();
}

// ---- drains, tables, HTTP -------------------------------------------------------------------------------------------

/// A drain by one worker, and one by two.
fn drains(options: &Options, servers: &mut Servers, maker: &Maker, report: &mut Report) {
    servers.pause();
    let (mut rates, mut of) = (
        [Vec::new(), Vec::new()],
        [
            Numbers::new("capacity, drain by 1 worker"),
            Numbers::new("capacity, drain by 2 workers"),
        ],
    );
    for pair in 0..=options.pairs {
        for workers in [1, 2] {
            servers.cluster.set_conf("outbox.workers", &workers.to_string());
            let all = format!(
                "select count(*) = {workers} and bool_and(state = 'paused') and sum(partitions) = 16
                   and min(partitions) = 16 / {workers} from outbox_worker_status where alive"
            );
            servers.wait_true("the workers to share the partitions", &all);
            servers.renew_queue(options.first_queue());
            backlog::forget_the_past(servers);
            backlog::settle_down(servers);
            backlog::load(&mut servers.sql, "order", &maker.note, options.backlog, 0, KEYS);
            let before = Reading::now(servers, &[]);
            let rate = backlog::drain(servers, options.backlog).rate;
            let each = Reading::now(servers, &[]).per_message(&before, options.backlog);
            if pair == 0 {
                continue; // warms up
            }
            rates[workers - 1].push(rate);
            of[workers - 1].parts(&each);
        }
    }
    for (two, one) in rates[1].iter().zip(&rates[0]) {
        of[1].add("× the rate of one worker", two / one);
    }
    of.into_iter().for_each(|numbers| numbers.report(report));
    servers.cluster.set_conf("outbox.workers", "1");
    servers.resume();
}

/// A drain by a worker outside the server, `outboxctl work`, on this machine.
fn outside(options: &Options, servers: &mut Servers, maker: &Maker, report: &mut Report) {
    let program = std::env::current_exe()
        .expect("this program")
        .with_file_name("outboxctl");
    servers.cluster.set_conf("outbox.workers", "0");
    let role = "create role courier login in role outbox_relay";
    servers.sql.batch_execute(role).expect("a role");
    servers.wait_true(
        "the worker to end",
        "select not exists (select from outbox_worker_status where alive)",
    );
    let mut command = Command::new(&program);
    let port = servers.cluster.port().to_string();
    command.args([
        "work",
        "-h",
        "127.0.0.1",
        "-p",
        &port,
        "-U",
        "courier",
        "-d",
        DB,
        "--silent",
    ]);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let started = process::spawn_bound(command, libc::SIGKILL);
    let mut worker = started.unwrap_or_else(|error| panic!("start {}: {error}", program.display()));
    let connected =
        "select exists (select from outbox_worker_status where alive and state = 'connected' and partitions = 16)";
    servers.wait_true("the worker outside to be connected", connected);
    let mut numbers = Numbers::new("capacity, drain by a worker outside the server");
    for pair in 0..=options.pairs {
        servers.pause();
        servers.renew_queue(options.first_queue());
        backlog::forget_the_past(servers);
        backlog::settle_down(servers);
        backlog::load(&mut servers.sql, "order", &maker.note, options.backlog, 0, KEYS);
        let (before, own_before) = (Reading::now(servers, &[]), cpu::of_threads_us(worker.id()));
        backlog::drain(servers, options.backlog);
        let own = (cpu::of_threads_us(worker.id()) - own_before) / f64::from(options.backlog);
        let each = Reading::now(servers, &[]).per_message(&before, options.backlog);
        if pair == 0 {
            continue; // warms up
        }
        numbers.add("CPU-µs of the worker", own);
        numbers.add("CPU-µs of its session", each.worker);
        numbers.add("CPU-µs of other Postgres", each.rest);
        numbers.add("CPU-µs of the broker", each.broker);
        servers.resume();
    }
    numbers.report(report);
    process::kill(&mut worker);
    servers.cluster.set_conf("outbox.workers", "1");
    servers.resume();
    let alive = "select exists (select from outbox_worker_status where alive and worker_id like 'server-%')";
    servers.wait_true("the worker to start", alive);
}

/// The bytes of a message in the tables: while it waits, and when it is in the history.
fn storage(options: &Options, servers: &mut Servers, maker: &Maker, report: &mut Report) {
    const SIZES: &str = "select pg_table_size('outbox')::float8, pg_indexes_size('outbox')::float8,
        pg_table_size('outbox_events')::float8, pg_indexes_size('outbox_events')::float8,
        (select sum(pg_table_size(relid))::float8 from pg_partition_tree('outbox_history')),
        (select sum(pg_indexes_size(relid))::float8 from pg_partition_tree('outbox_history') where isleaf)";
    const NAMES: [&str; 6] = [
        "outbox",
        "index of outbox",
        "events",
        "indexes of events",
        "history",
        "indexes of history",
    ];
    let read = |servers: &mut Servers| -> Vec<f64> {
        let row = servers.sql.query_one(SIZES, &[]).expect("sizes");
        (0..NAMES.len()).map(|column| row.get(column)).collect()
    };
    servers.pause();
    let empty = read(servers);
    let wal = Counters::now(servers);
    backlog::load(&mut servers.sql, "order", &maker.note, options.backlog, 0, KEYS);
    let (waiting, loaded) = (read(servers), Counters::now(servers));
    backlog::drain(servers, options.backlog);
    let (ended, drained) = (read(servers), Counters::now(servers));
    for (title, sizes) in [("waiting", &waiting), ("in the history", &ended)] {
        let mut numbers = Numbers::new(&format!("capacity, bytes {title}"));
        for ((name, size), empty) in NAMES.iter().zip(sizes).zip(&empty) {
            numbers.add(name, (size - empty) / f64::from(options.backlog));
        }
        numbers.report(report);
    }
    let mut numbers = Numbers::new("capacity, WAL of a backlog");
    let enqueue = loaded.per_message(wal, options.backlog);
    let deliver = drained.per_message(loaded, options.backlog);
    numbers.add("WAL bytes of enqueue, 1000 a transaction", enqueue.wal_bytes);
    numbers.add("WAL bytes of delivery", deliver.wal_bytes);
    numbers.add("full pages in it", deliver.full_pages);
    numbers.add("bytes to the broker", deliver.received);
    numbers.add("bytes from the broker", deliver.sent);
    numbers.report(report);
    servers.resume();
}

/// What maintenance takes to remove the events of published messages.
fn removal(options: &Options, servers: &mut Servers, maker: &Maker, report: &mut Report) {
    let mut numbers = Numbers::new("capacity, removal of events");
    for _ in 0..options.pairs {
        servers.pause();
        backlog::forget_the_past(servers);
        backlog::load(&mut servers.sql, "order", &maker.note, options.backlog, 0, KEYS);
        backlog::drain(servers, options.backlog);
        let counters = Counters::now(servers);
        let before = Reading::now(servers, &[]);
        servers.cluster.set_conf("outbox.events_retention", "0");
        servers.wait_true(
            "the events to be removed",
            "select not exists (select from outbox_events)",
        );
        let each = Reading::now(servers, &[]).per_message(&before, options.backlog);
        let counters = Counters::now(servers).per_message(counters, options.backlog);
        numbers.add("CPU-µs of other Postgres", each.rest);
        numbers.add("WAL bytes", counters.wal_bytes);
        servers.cluster.set_conf("outbox.events_retention", "-2");
        servers.resume();
    }
    numbers.report(report);
}

fn http(options: &Options, servers: &mut Servers, maker: &Maker, report: &mut Report) {
    let receiver = Receiver::start(|_| Reply::status(204));
    for concurrency in CONCURRENCY {
        let mut numbers = Numbers::new(&format!("capacity, HTTP, {concurrency} at a time"));
        let create = format!(
            "create server hook foreign data wrapper outbox_http options (url '{}', concurrency '{concurrency}')",
            receiver.url("/")
        );
        servers.sql.batch_execute(&create).expect("a destination");
        for _ in 0..options.pairs {
            servers.pause();
            let load = format!(
                "select count(outbox_publish('OrderPlaced', jsonb_build_object('note', $1::text, 'order', o, 'total', 99.90),
                   'order', o, 'placed', destination => 'hook'))
                 from (select lpad((n % {KEYS})::text, 6, '0') as o from generate_series(1, {HTTP_MESSAGES}) n) s"
            );
            servers.sql.execute(&load, &[&maker.note]).expect("load events");
            let before = Reading::now(servers, &[]);
            backlog::drain(servers, HTTP_MESSAGES);
            let each = Reading::now(servers, &[]).per_message(&before, HTTP_MESSAGES);
            numbers.add("CPU-µs of the worker", each.worker);
            numbers.add("CPU-µs of other Postgres", each.rest);
            servers.resume();
        }
        servers.sql.batch_execute("drop server hook").expect("drop");
        numbers.report(report);
    }
}

// ---- report ---------------------------------------------------------------------------------------------------------

/// Named numbers of one part of the row, with a sample of each run.
struct Numbers {
    title: String,
    samples: Vec<(String, Vec<f64>)>,
}

impl Numbers {
    fn new(title: &str) -> Self {
        Self {
            title: title.to_owned(),
            samples: Vec::new(),
        }
    }

    fn add(&mut self, name: &str, value: f64) {
        match self.samples.iter_mut().find(|(known, _)| known == name) {
            Some((_, samples)) => samples.push(value),
            None => self.samples.push((name.to_owned(), vec![value])),
        }
    }

    fn parts(&mut self, each: &Each) {
        self.add("CPU-µs of the session", each.sessions);
        self.add("CPU-µs of the worker", each.worker);
        self.add(&format!("CPU-µs of its thread {}", each.busiest.0), each.busiest.1);
        self.add("CPU-µs of other Postgres", each.rest);
        self.add("CPU-µs of the broker", each.broker);
    }

    fn report(self, report: &mut Report) {
        report.numbers(&self.title, self.samples);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_two_numbers_are_read_and_headings_are_not() {
        assert_eq!(two_numbers("1200\t34"), Some((1200.0, 34.0)));
        assert_eq!(two_numbers("recv_oct\tsend_oct"), None);
        assert_eq!(two_numbers(""), None);
    }

    #[test]
    fn the_time_of_a_message_is_the_difference_and_names_the_busiest_thread() {
        let reading = |main: f64, io: f64, sessions: f64| Reading {
            broker: 10.0,
            workers: [("main".to_owned(), main), ("io".to_owned(), io)].into(),
            sessions,
            rest: 0.0,
        };
        let each = reading(300.0, 900.0, 50.0).per_message(&reading(100.0, 100.0, 10.0), 10);
        assert_eq!((each.worker, each.sessions, each.broker), (100.0, 4.0, 0.0));
        assert_eq!(each.busiest, ("io".to_owned(), 80.0));
    }
}
