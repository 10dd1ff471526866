//! Faults in the midst of much work: workers that end in every way there is, a server that is killed, a broker that
//! refuses, loses a binding and crashes, rows that somebody holds. Is everything still delivered, in order, and is nobody
//! charged or held up for another's fault? On a real Postgres and a real RabbitMQ.

mod common;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, UNIX_EPOCH};

use common::load::{Load, Plan};
use common::oracle::{Arrived, Fate, Sent, judge, last_arrivals_out_of_order};
use common::{
    DB, LONG, all_of, as_survived, exchange_and_queue, outbox_cluster_with, unconnected_cluster, wait_connected,
    wait_drained, wait_shared, wait_true,
};
use postgres::Client;
use serde_json::{Value, json};
use support::{Broker, Cluster, Consumer, PrivateBroker, Receiver, Reply, fresh_names, process, wait_for, wait_until};

/// What a worker has in flight at most: the bound of duplicates by one fault.
const WINDOW: usize = 2000;

fn arrived_at(broker: &Broker, queue: &str) -> Vec<Arrived> {
    all_of(broker, queue).iter().map(Arrived::new).collect()
}

fn count(cluster: &Cluster, sql: &str) -> i64 {
    cluster.query_one(DB, sql)
}

fn assert_none_is_dead_or_charged(cluster: &Cluster) {
    assert_eq!(count(cluster, "select count(*) from outbox_dead"), 0, "dead");
    let charged = "select count(*) from outbox_history where attempts <> 1";
    assert_eq!(count(cluster, charged), 0, "charged");
}

fn wait_in_flight(cluster: &Cluster) {
    wait_true(
        cluster,
        "messages in flight",
        "select exists (select from outbox where claim_token is not null)",
    );
}

// ---- a worker ends --------------------------------------------------------------------------------------------------

#[derive(Clone, Copy, Debug)]
enum End {
    /// In order, at somebody's wish.
    Terminate,
    /// By an ERROR between two statements.
    Error,
}

struct Worker {
    id: String,
    pid: i32,
}

fn worker(cluster: &Cluster, number: usize) -> Worker {
    let id = format!("server-{number}");
    let pid = cluster.query_one(DB, &format!("select pid from outbox_workers where worker_id = '{id}'"));
    Worker { id, pid }
}

/// Ends a worker; returns the line of the log that says so.
fn end(cluster: &Cluster, worker: &Worker, how: End, offset: usize) -> String {
    let mut client = cluster.connect(DB);
    let mut call = |function: &str| {
        client
            .execute(&format!("select {function}($1)"), &[&worker.pid])
            .expect("a signal");
    };
    match how {
        End::Terminate => call("pg_terminate_backend"),
        // One that hits a statement fails that only; the worker waits before it tries again, and the next one hits it there.
        End::Error => wait_until("a worker to end by a cancel", LONG, || {
            call("pg_cancel_backend");
            is_gone(cluster, worker)
        }),
    }
    let words = match how {
        End::Terminate => format!("LOG:  outbox {}: ended", worker.id),
        End::Error => "ERROR:  canceling statement due to user request".into(),
    };
    let prefix = format!("[{}] outbox worker {words}", worker.pid);
    cluster.wait_for_log(&prefix, offset)
}

fn is_gone(cluster: &Cluster, worker: &Worker) -> bool {
    let pid = worker.pid;
    cluster.query_one(
        DB,
        &format!("select not exists (select from pg_stat_activity where pid = {pid})"),
    )
}

#[test]
fn however_a_worker_ends_the_others_own_its_partitions_at_once_and_nothing_is_lost() {
    let broker = Broker::shared();
    let (exchange, queue) = exchange_and_queue(broker);
    // Nobody waits for a lease or a heartbeat to run out here: it would take an hour.
    let conf = [
        "outbox.workers = 3",
        "outbox.lease_ttl = '1h'",
        "outbox.lease_renew = '30min'",
        "outbox.heartbeat_ttl = '1h'",
    ];
    let cluster = outbox_cluster_with(broker, &exchange, &conf);
    wait_shared(&cluster);
    let load = Load::start(&cluster, &Plan::default());
    let rounds = [(1, End::Terminate), (2, End::Error)];
    for (number, how) in rounds {
        load.wait_for_more(40);
        let (worker, offset) = (worker(&cluster, number), cluster.log_offset());
        let owned = format!(
            "array(select partition from outbox_partitions where lease_owner = '{}')",
            worker.id
        );
        let owned: Vec<i16> = cluster.query_one(DB, &format!("select {owned}"));
        assert!(!owned.is_empty(), "{} owns nothing", worker.id);
        // Nobody may come in its place: the others are to own its partitions.
        cluster.exec(DB, "alter role outbox_worker nologin");
        let said = end(&cluster, &worker, how, offset);
        let ended_at = said.split(" [").next().expect("a time");
        let mut client = cluster.connect(DB);
        let taken_s: f64 = wait_for("the others to own its partitions", LONG, || {
            let row = client.query_one(
                "select coalesce(bool_and(coalesce(lease_owner <> $1, false)), false),
                        extract(epoch from max(updated_at) - $2::text::timestamptz)::float8
                 from outbox_partitions where partition = any ($3)",
                &[&worker.id, &ended_at, &owned],
            );
            let row = row.expect("an answer");
            row.get::<_, bool>(0).then(|| row.get(1))
        });
        println!(
            "{how:?}: {} partitions taken {:.0} ms after the end",
            owned.len(),
            taken_s * 1000.0
        );
        // A second is what it may take; the rest is for a machine that is busy otherwise.
        assert!(taken_s < 5.0, "{how:?}: taken after {taken_s} s");
        cluster.exec(DB, "alter role outbox_worker login");
        wait_shared(&cluster);
    }
    load.wait_for_more(40);
    let sent = load.stop();
    wait_drained(&cluster);
    let verdict = judge(&sent, &arrived_at(broker, &queue));
    verdict.assert_nothing_lost(rounds.len() * WINDOW);
    assert_eq!(verdict.reordered, Vec::<String>::new());
    assert_none_is_dead_or_charged(&cluster);
    assert!(!cluster.log().contains("terminating any other active server processes"));
}

#[test]
fn a_statement_that_fails_ends_no_worker_and_loses_doubles_and_reorders_nothing() {
    let broker = Broker::shared();
    let (exchange, queue) = exchange_and_queue(broker);
    let cluster = outbox_cluster_with(broker, &exchange, &["outbox.workers = 3"]);
    wait_shared(&cluster);
    let pids = "select array_agg(pid order by pid) from outbox_workers";
    let before: Vec<i32> = cluster.query_one(DB, pids);
    let load = Load::start(&cluster, &Plan::default());
    for (kind, name) in [
        ("view", "event_text"), // a claim fails
        ("function", "settle"),
        ("function", "heartbeat"),
        ("function", "next_due_ms"),
    ] {
        load.wait_for_more(40);
        let offset = cluster.log_offset();
        cluster.exec(DB, &format!("alter {kind} outbox_internal.{name} rename to hidden"));
        if name == "heartbeat" {
            cluster.reload(); // the next one would be seconds away
        }
        cluster.wait_for_log("; tries again", offset);
        load.wait_for_more(40);
        cluster.exec(DB, &format!("alter {kind} outbox_internal.hidden rename to {name}"));
    }
    load.wait_for_more(40);
    let sent = load.stop();
    wait_drained(&cluster);
    judge(&sent, &arrived_at(broker, &queue)).assert_perfect();
    assert_none_is_dead_or_charged(&cluster);
    assert_eq!(cluster.query_one::<Vec<i32>>(DB, pids), before, "the same processes");
}

// ---- kill -9 --------------------------------------------------------------------------------------------------------

/// Of a worker and of the postmaster, three times each, under a thousand transactions a second.
const KILLS: usize = 6;

/// What the producers were told, and what arrived.
fn killed_under_load(synchronous_commit: bool) -> (Cluster, Vec<Sent>, Vec<Arrived>) {
    // One at a time, or neither would get near to its thousand.
    static ALONE: Mutex<()> = Mutex::new(());
    let _alone = ALONE.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let broker = Broker::shared();
    let (exchange, queue) = exchange_and_queue(broker);
    // Nothing but workers and producers brings commits to disk.
    let conf = ["wal_writer_delay = '10s'", "wal_writer_flush_after = '1GB'"];
    let cluster = outbox_cluster_with(broker, &exchange, &conf);
    let plan = Plan {
        writers: 8,
        keys: 200,
        transactions_per_s: Some(125),
        mixed: true,
        synchronous_commit,
        ..Plan::default()
    };
    let load = Load::start(&cluster, &plan);
    for number in 0..KILLS {
        let (began, before) = (Instant::now(), load.committed());
        load.wait_for_more(600);
        let rate = (load.committed() - before) as f64 / began.elapsed().as_secs_f64();
        println!("{rate:.0} events a second");
        wait_in_flight(&cluster);
        if number % 2 == 0 {
            let (pid, offset) = (worker(&cluster, 1).pid, cluster.log_offset());
            process::signal(pid as u32, libc::SIGKILL); // restarts the server: Postgres' rule
            cluster.wait_for_log("all server processes terminated", offset);
        } else {
            cluster.kill_postmaster();
            cluster.start_again();
        }
        wait_connected(&cluster);
        load.wait_for_more(100);
    }
    load.wait_for_more(100);
    let sent = load.stop();
    wait_drained(&cluster);
    let arrived = arrived_at(broker, &queue);
    assert_none_is_dead_or_charged(&cluster);
    (cluster, sent, arrived)
}

#[test]
fn kills_of_worker_and_postmaster_under_load_lose_and_reorder_nothing() {
    let (_cluster, sent, arrived) = killed_under_load(true);
    let verdict = judge(&sent, &arrived);
    println!("{} arrived, {} again", arrived.len(), verdict.doubled.len());
    verdict.assert_nothing_lost(KILLS * WINDOW);
    assert_eq!(verdict.reordered, Vec::<String>::new());
}

#[test]
fn kills_that_undo_asynchronous_commits_leave_no_message_of_them_at_the_consumer() {
    let (cluster, sent, arrived) = killed_under_load(false);
    let survived = as_survived(&cluster, &sent);
    // Others were in doubt, and may have survived.
    let is_undone = |(told, now): &(&Sent, &Sent)| told.fate == Fate::Committed && now.fate == Fate::RolledBack;
    let undone = sent.iter().zip(&survived).filter(is_undone).count();
    let verdict = judge(&survived, &arrived);
    println!(
        "{} arrived, {} again, {undone} undone",
        arrived.len(),
        verdict.doubled.len()
    );
    verdict.assert_nothing_lost(KILLS * WINDOW);
    assert_eq!(verdict.reordered, Vec::<String>::new());
    assert!(undone > 0, "the crashes undid nothing, so the test showed nothing");
}

/// Of two destinations, six times, each time with messages of both in flight.
#[test]
fn a_message_that_workers_crash_with_takes_few_others_with_it() {
    const MESSAGES: i64 = 300;
    let heals = Arc::new(AtomicBool::new(false));
    let healed = heals.clone();
    let receiver = Receiver::start(move |_| match healed.load(Ordering::Acquire) {
        true => Reply::status(200),
        false => Reply::Hang,
    });
    // A crash charges what is claimed; what came by express a moment before is not, and would make the figures another each time.
    let conf = ["outbox.http_allow = '127.0.0.1'", "outbox.fast_path = off"];
    let cluster = unconnected_cluster("", "nowhere", &conf);
    for name in ["a", "b"] {
        let (server, url) = ("foreign data wrapper outbox_http", receiver.url("/"));
        cluster.exec(DB, &format!("create server {name} {server} options (url '{url}')"));
    }
    cluster.exec(
        DB,
        &format!(
            "select outbox_publish('T', '{{}}', 'a', n::text, 'x', destination => to_name)
             from generate_series(1, {MESSAGES}) n, unnest(array['a', 'b']) to_name"
        ),
    );
    // How often the most suspect of one destination and of the other was charged, and dead letters: a hundred of each are
    // tried together, then ten, then one of either.
    for (number, (one, other, dead)) in (1..).zip([(0, 0, 0), (1, 1, 0), (2, 2, 0), (3, 2, 0), (4, 2, 0), (3, 2, 1)]) {
        let claimed = "max(crashes) filter (where claim_token is not null and destination";
        wait_true(
            &cluster,
            &format!("crash {number} to be charged, {one} and {other}"),
            &format!(
                "select coalesce(greatest(a, b) = {one} and least(a, b) = {other} and dead = {dead} and a + b >= 0, false)
                 from (select {claimed} = 'a') a, {claimed} = 'b') b, (select count(*) from outbox_dead) dead from outbox) x"
            ),
        );
        // Claims are not waited for on disk, and a crash may undo them.
        cluster.exec(DB, "select pg_logical_emit_message(true, '', '')");
        heals.store(dead > 0, Ordering::Release);
        let (pid, offset) = (
            cluster.query_one::<i32>(DB, "select pid from outbox_workers"),
            cluster.log_offset(),
        );
        process::signal(pid as u32, libc::SIGKILL);
        cluster.wait_for_log("all server processes terminated", offset);
        cluster.wait_for_log("database system is ready to accept connections", offset);
    }
    wait_drained(&cluster);
    let dead = "select count(*) from outbox_dead";
    assert_eq!(
        count(&cluster, dead),
        1,
        "alone at the last crashes, as it must be supposed"
    );
    let reason = "select reason like '5 workers crashed with it%' from outbox_dead";
    assert!(cluster.query_one::<bool>(DB, reason));
    assert_eq!(count(&cluster, "select count(*) from outbox_history"), 2 * MESSAGES - 1);
}

// ---- a broker that does everything wrong ----------------------------------------------------------------------------

/// How long faults go on.
const CHAOS: Duration = Duration::from_secs(30);

#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    /// The first queue is full, or is read again.
    Refuse,
    /// The second loses its binding, or gets it back.
    Unbind,
    /// What is dead by then is brought back.
    Retry,
    Stop,
    Kill,
}

struct Random(u64);

impl Random {
    /// From a seed that is printed; OUTBOX_CRASH_SEED plays it again.
    fn new() -> Self {
        let given = std::env::var("OUTBOX_CRASH_SEED").ok();
        let seed = match given {
            Some(seed) => seed.parse().expect("OUTBOX_CRASH_SEED is a number"),
            None => UNIX_EPOCH.elapsed().expect("a time").as_micros() as u64,
        };
        println!("OUTBOX_CRASH_SEED={seed}");
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// xorshift64.
    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as usize % n
    }
}

/// A broker with three queues: one refuses what is too much, one loses its binding, one has no fault of its own.
struct Stage {
    broker: PrivateBroker,
    exchange: String,
    queues: [String; 3],
    consumers: [Option<Consumer>; 3],
    arrived: [Vec<Arrived>; 3],
    unbound: bool,
}

const REFUSES: usize = 0;
const UNROUTABLE: usize = 1;
const PLAIN: usize = 2;

/// Which of the load's keys goes where: two writers to the first, one to each of the others.
const BINDINGS: [&[&str]; 3] = [&["w0.*", "w1.*"], &["w2.*"], &["w3.*"]];

impl Stage {
    fn new() -> Self {
        let broker = Broker::start();
        let (exchange, queue) = fresh_names();
        broker.declare_exchange(&exchange, "topic", true);
        let queues = ["refuses", "unroutable", "plain"].map(|name| format!("{queue}.{name}"));
        for (number, queue) in queues.iter().enumerate() {
            let limit = json!({"x-max-length": 20, "x-overflow": "reject-publish"});
            broker.declare_queue(queue, if number == REFUSES { limit } else { Value::Null });
            (BINDINGS[number].iter()).for_each(|binding| broker.bind(queue, &exchange, binding));
        }
        let mut stage = Self {
            broker,
            exchange,
            queues,
            consumers: [None, None, None],
            arrived: [Vec::new(), Vec::new(), Vec::new()],
            unbound: false,
        };
        (0..3).for_each(|number| stage.consume(number));
        stage
    }

    fn consume(&mut self, number: usize) {
        self.consumers[number] = Some(Consumer::new(&self.broker, &self.queues[number]));
    }

    fn consume_no_more(&mut self, number: usize) {
        if let Some(consumer) = self.consumers[number].take() {
            self.arrived[number].extend(consumer.finish().iter().map(Arrived::new));
        }
    }

    fn bind(&mut self, bound: bool) {
        let (queue, binding) = (&self.queues[UNROUTABLE], BINDINGS[UNROUTABLE][0]);
        match bound {
            true => self.broker.bind(queue, &self.exchange, binding),
            false => self.broker.unbind(queue, &self.exchange, binding),
        }
        self.unbound = !bound;
    }

    fn suffer(&mut self, fault: Fault, cluster: &Cluster, load: &Load) {
        match fault {
            Fault::Refuse if self.consumers[REFUSES].is_some() => {
                self.consume_no_more(REFUSES);
                wait_for_error(cluster, "nacked");
            }
            Fault::Refuse => {
                self.consume(REFUSES);
                retry_the_dead(&mut cluster.connect(DB));
            }
            Fault::Unbind if !self.unbound => {
                self.bind(false);
                wait_for_error(cluster, "unroutable");
            }
            Fault::Unbind => {
                self.bind(true);
                retry_the_dead(&mut cluster.connect(DB));
            }
            Fault::Retry => retry_the_dead(&mut cluster.connect(DB)),
            Fault::Stop | Fault::Kill => {
                let reads = self.consumers.each_ref().map(Option::is_some);
                match fault {
                    Fault::Stop => self.broker.stop(),
                    _ => self.broker.kill(),
                }
                (0..3).for_each(|number| self.consume_no_more(number));
                load.wait_for_more(20);
                self.broker.start_again();
                (0..3)
                    .filter(|number| reads[*number])
                    .for_each(|number| self.consume(number));
                wait_connected(cluster);
            }
        }
    }

    /// The rest of each queue: all up to a message that comes behind it.
    fn finish(&mut self) {
        for number in 0..3 {
            let (queue, mut consumer) = (&self.queues[number], self.consumers[number].take());
            let consumer = consumer.get_or_insert_with(|| Consumer::new(&self.broker, queue));
            wait_until("an empty queue", LONG, || self.broker.queue_len(queue) == 0);
            self.broker.publish("", queue, b"end");
            loop {
                let delivery = consumer.recv(LONG).expect("the end of a queue");
                match delivery.body.as_slice() {
                    b"end" => break,
                    _ => self.arrived[number].push(Arrived::new(&delivery)),
                }
            }
        }
    }
}

fn wait_for_error(cluster: &Cluster, word: &str) {
    let sql = format!("select exists (select from outbox_messages where last_error like '{word}%')");
    wait_true(cluster, &format!("a message to be {word}"), &sql);
}

fn retry_the_dead(client: &mut Client) {
    client
        .execute("select outbox_retry(seq) from outbox_dead", &[])
        .expect("retry");
}

#[test]
fn nacks_returns_and_crashes_of_the_broker_by_chance_lose_nothing_and_charge_the_culprits_only() {
    let mut random = Random::new();
    let mut stage = Stage::new();
    let conf = [
        "outbox.workers = 2",
        "outbox.routing_key = '{aggregate_id}'",
        "outbox.retry_backoff = '5ms'",
        "outbox.retry_backoff_max = '20ms'",
        "outbox.max_attempts = 4",
    ];
    let cluster = outbox_cluster_with(&stage.broker, &stage.exchange, &conf);
    let plan = Plan {
        writers: 4,
        keys: 200,
        transactions_per_s: Some(60),
        ..Plan::default()
    };
    let load = Load::start(&cluster, &plan);
    // Each at least once, in any order.
    let mut first = vec![Fault::Refuse, Fault::Unbind, Fault::Stop, Fault::Kill];
    let others = [
        Fault::Refuse,
        Fault::Refuse,
        Fault::Unbind,
        Fault::Unbind,
        Fault::Retry,
        Fault::Retry,
        Fault::Kill,
    ];
    let (began, mut crashes) = (Instant::now(), 0);
    while !first.is_empty() || began.elapsed() < CHAOS {
        let fault = match first.len() {
            0 => others[random.below(others.len())],
            n => first.swap_remove(random.below(n)),
        };
        println!("{:.1?}: {fault:?}", began.elapsed());
        stage.suffer(fault, &cluster, &load);
        crashes += usize::from(matches!(fault, Fault::Stop | Fault::Kill));
        load.wait_for_more(10 + random.below(80));
    }
    let sent = load.stop();
    if stage.unbound {
        stage.bind(true);
    }
    if stage.consumers[REFUSES].is_none() {
        stage.consume(REFUSES);
    }
    let mut client = cluster.connect(DB);
    wait_until("all to be published", LONG, || {
        retry_the_dead(&mut client);
        let left = "select exists (select from outbox) or exists (select from outbox_waiting) or exists (select from outbox_dead)";
        !client.query_one(left, &[]).expect("an answer").get::<_, bool>(0)
    });
    stage.finish();

    let all = stage.arrived.concat();
    println!("{} sent, {} arrived, {crashes} crashes", sent.len(), all.len());
    judge(&sent, &all).assert_nothing_lost(usize::MAX);
    assert_eq!(last_arrivals_out_of_order(&all), Vec::<String>::new());
    let of_plain: Vec<Sent> = sent.into_iter().filter(|sent| sent.label.starts_with("w3-")).collect();
    let verdict = judge(&of_plain, &stage.arrived[PLAIN]);
    verdict.assert_nothing_lost(crashes * WINDOW);
    assert_eq!(
        verdict.reordered,
        Vec::<String>::new(),
        "keys that share workers with others' faults"
    );
    for (what, sql) in [
        ("charged without a fault", "attempts > 1 and last_error is null"),
        (
            "charged for others",
            "key like 'load:w3.%' and (attempts > 1 or last_error is not null)",
        ),
        ("nacked elsewhere", "last_error like 'nacked%' and key !~ '^load:w[01]'"),
        (
            "returned elsewhere",
            "last_error like 'unroutable%' and key !~ '^load:w2'",
        ),
        ("failed for another reason", "last_error !~ '^(nacked|unroutable)'"),
    ] {
        let found = count(&cluster, &format!("select count(*) from outbox_history where {sql}"));
        assert_eq!(found, 0, "{what}");
    }
    let culprits = "select count(distinct left(last_error, 6)) from outbox_history";
    assert_eq!(
        count(&cluster, culprits),
        2,
        "some must have been nacked, and some returned"
    );
}

// ---- a lock that somebody holds -------------------------------------------------------------------------------------

/// How long it is held.
const HELD: Duration = Duration::from_secs(3);

#[test]
fn rows_of_a_destination_that_somebody_holds_hold_up_no_other_destination() {
    let broker = Broker::shared();
    let (exchange, queue) = exchange_and_queue(broker);
    let cluster = outbox_cluster_with(broker, &exchange, &[]);
    let mut queues = vec![queue];
    for name in ["audit", "billing"] {
        let (exchange, queue) = exchange_and_queue(broker);
        let options = format!("options (exchange '{exchange}')");
        cluster.exec(
            DB,
            &format!("create server {name} foreign data wrapper outbox_amqp {options}"),
        );
        queues.push(queue);
    }
    wait_true(
        &cluster,
        "three destinations to be served",
        "select count(*) = 3 from outbox_connections where state = 'connected'",
    );
    let plan = Plan {
        also_to: &["audit", "billing"],
        ..Plan::default()
    };
    let load = Load::start(&cluster, &plan);
    load.wait_for_more(40);

    // One that is on its way to the broker.
    let mut holder = cluster.connect(DB);
    hold_a_message(&mut holder, "claim_token is not null");
    the_others_go_on(&cluster, &load);
    holder.batch_execute("rollback").expect("rollback");
    load.wait_for_more(40);

    // One that could go.
    cluster.exec(DB, "select outbox_pause('audit')");
    hold_a_message(&mut holder, "claim_token is null");
    cluster.exec(DB, "select outbox_resume('audit')");
    the_others_go_on(&cluster, &load);
    holder.batch_execute("rollback").expect("rollback");

    let sent = load.stop();
    wait_drained(&cluster);
    for queue in &queues {
        judge(&sent, &arrived_at(broker, queue)).assert_perfect();
    }
    assert_none_is_dead_or_charged(&cluster);
}

fn hold_a_message(holder: &mut Client, which: &str) {
    let sql = format!("select seq from outbox where destination = 'audit' and {which} limit 1 for update skip locked");
    wait_until("a message to hold", LONG, || {
        holder.batch_execute("begin").expect("begin");
        let found = !holder.query(&sql, &[]).expect("an answer").is_empty();
        if !found {
            holder.batch_execute("rollback").expect("rollback");
        }
        found
    });
}

/// While the lock is held, what is committed for the other destinations is published, again and again.
fn the_others_go_on(cluster: &Cluster, load: &Load) {
    let (began, mut slowest) = (Instant::now(), Duration::ZERO);
    while began.elapsed() < HELD {
        load.wait_for_more(20);
        let (last, asked): (i64, _) = (count(cluster, "select max(seq) from outbox_events"), Instant::now());
        wait_true(
            cluster,
            "the other destinations to get what was committed",
            &format!("select not exists (select from outbox where destination <> 'audit' and seq <= {last})"),
        );
        slowest = slowest.max(asked.elapsed());
    }
    let held = count(cluster, "select count(*) from outbox where destination = 'audit'");
    println!("the others waited {slowest:.1?} at most; {held} of the destination wait");
    assert!(held > 0, "the lock held up nothing, so the test showed nothing");
}
