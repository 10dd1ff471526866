//! Faults under load, on a real Postgres and a real RabbitMQ. Workers end in different ways, a server is killed, a
//! broker refuses messages, loses a binding and crashes, and sessions hold row locks. Every message must still be
//! delivered, in order. No message is charged or delayed for another message's fault.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};

use postgres::Client;
use serde_json::{Value, json};
use support::chaos::{Dice, rounds, seeds};
use support::faults::{Faults, messages};
use support::load::{Load, Plan};
use support::oracle::{Arrived, Fate, Sent, judge, last_arrivals_out_of_order};
use support::{
    Broker, Cluster, Consumer, Delivery, PrivateBroker, Receiver, Reply, fresh_names, process, wait_for, wait_until,
};
use support::{
    DB, LONG, Session, all_of, arrived, as_survived, exchange_and_queue, outbox_cluster_with, unconnected_cluster,
    wait_connected, wait_drained, wait_shared, wait_true,
};

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
    /// Orderly, by pg_terminate_backend.
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
    // After a crash the tables name the old process until the first heartbeat of the new one.
    let sql = format!(
        "select w.pid from outbox_workers w
         join pg_stat_activity a on a.pid = w.pid and a.backend_type = 'outbox worker' where w.worker_id = '{id}'"
    );
    let pid = wait_for("its first heartbeat", LONG, || {
        let row = cluster.connect(DB).query_opt(&sql, &[]).expect("the workers");
        row.map(|row| row.get(0))
    });
    Worker { id, pid }
}

/// Ends a worker and returns the line of the log that reports it.
fn end(cluster: &Cluster, worker: &Worker, how: End, offset: usize) -> String {
    let mut client = cluster.connect(DB);
    let mut call = |function: &str| {
        client
            .execute(&format!("select {function}($1)"), &[&worker.pid])
            .expect("a signal");
    };
    match how {
        End::Terminate => call("pg_terminate_backend"),
        // A cancel during a statement only fails that statement. The worker then waits before it tries again, and the
        // next cancel hits it in that wait.
        End::Error => wait_until("a worker to end by a cancel", LONG, || {
            call("pg_cancel_backend");
            is_gone(cluster, worker)
        }),
    }
    // A cancel may be logged before the one that ends the worker.
    let text = match how {
        End::Terminate => format!("[{}] outbox worker LOG:  outbox {}: ended", worker.pid, worker.id),
        End::Error => format!("(PID {}) exited with exit code 1", worker.pid),
    };
    cluster.wait_for_log(&text, offset)
}

fn is_gone(cluster: &Cluster, worker: &Worker) -> bool {
    let pid = worker.pid;
    cluster.query_one(
        DB,
        &format!("select not exists (select from pg_stat_activity where pid = {pid})"),
    )
}

#[test]
fn when_a_worker_ends_other_workers_take_its_partitions_at_once_and_nothing_is_lost() {
    let broker = Broker::shared();
    let (exchange, queue) = exchange_and_queue(broker);
    // No lease and no heartbeat can expire during the test, since that takes an hour.
    let conf = [
        "outbox.workers = 3",
        "outbox.lease_ttl = '1h'",
        "outbox.lease_renew = '30min'",
        "outbox.heartbeat_ttl = '1h'",
    ];
    let cluster = outbox_cluster_with(broker, &exchange, &conf);
    wait_shared(&cluster);
    let load = Load::start(&cluster, &Plan::default());
    let mut faults = Faults::default();
    for (number, how) in [(1, End::Terminate), (2, End::Error)].repeat(rounds(1)) {
        load.wait_for_more(40);
        let (worker, offset) = (worker(&cluster, number), cluster.log_offset());
        let owned = format!(
            "array(select partition from outbox_partitions where lease_owner = '{}')",
            worker.id
        );
        let owned: Vec<i16> = cluster.query_one(DB, &format!("select {owned}"));
        assert!(!owned.is_empty(), "{} owns nothing", worker.id);
        let others = format!(
            "select lease_owner, count(*) from outbox_partitions where lease_owner <> '{}' group by 1",
            worker.id
        );
        let counts = cluster.connect(DB).query(&others, &[]).expect("the leases");
        let counts: BTreeMap<String, i64> = counts.iter().map(|row| (row.get(0), row.get(1))).collect();
        // No new worker may start in its place: the other workers are to take its partitions.
        cluster.exec(
            DB,
            &format!("revoke connect on database {DB} from outbox_worker, public"),
        );
        let began = SystemTime::now();
        let line = end(&cluster, &worker, how, offset);
        let ended_at = line.split(" [").next().expect("a time");
        let mut client = cluster.connect(DB);
        // Not updated_at, which each later renewal changes.
        let taken_over_at = wait_for("the other workers to own its partitions", LONG, || {
            let mut counts = counts.clone();
            cluster.log()[offset..].lines().find_map(|line| {
                let (start, owns) = line.split_once("LOG:  outbox ")?;
                let (id, count) = owns.strip_suffix(" partitions")?.split_once(": owns ")?;
                *counts.get_mut(id)? = count.parse().expect("a number");
                (counts.values().sum::<i64>() == 16).then(|| start[..start.find(" [").expect("a pid")].to_owned())
            })
        });
        let takeover_s = "select extract(epoch from $1::text::timestamptz - $2::text::timestamptz)::float8";
        let takeover_s: f64 = client
            .query_one(takeover_s, &[&taken_over_at, &ended_at])
            .expect("a difference")
            .get(0);
        faults.since(began, 1);
        load.wait_for_more(40);
        let others =
            "select coalesce(extract(epoch from max(published_at - enqueued_at)), 0)::float8 from outbox_history
                      where published_at > $1::text::timestamptz and partition <> all ($2)";
        let others_s: f64 = client
            .query_one(others, &[&ended_at, &owned])
            .expect("the history")
            .get(0);
        println!("{how:?}: taken over {takeover_s} s after the end; the slowest of the others took {others_s} s");
        // Without a wake-up a worker looks once a second. What delays both is the machine.
        assert!(takeover_s < 0.2 + others_s, "{how:?}");
        cluster.exec(DB, &format!("grant connect on database {DB} to outbox_worker, public"));
        wait_shared(&cluster);
    }
    load.wait_for_more(40);
    let sent = load.stop();
    wait_drained(&cluster);
    let verdict = judge(&sent, &arrived(&all_of(broker, &queue)));
    faults.assert_explain(&verdict, &messages(&cluster));
    assert_none_is_dead_or_charged(&cluster);
    assert!(!cluster.log().contains("terminating any other active server processes"));
}

#[test]
fn a_failed_statement_ends_no_worker_and_loses_repeats_and_reorders_nothing() {
    let broker = Broker::shared();
    let (exchange, queue) = exchange_and_queue(broker);
    let cluster = outbox_cluster_with(broker, &exchange, &["outbox.workers = 3"]);
    wait_shared(&cluster);
    let pids = "select array_agg(pid order by pid) from outbox_workers";
    let before: Vec<i32> = cluster.query_one(DB, pids);
    let load = Load::start(&cluster, &Plan::default());
    cluster.exec(
        DB,
        "create function fail() returns trigger language plpgsql as $$ begin raise 'refused'; end $$",
    );
    let trigger = |event: &str, table: &str| {
        let create = format!("create trigger t before {event} on {table} for each row execute function fail()");
        (create, format!("drop trigger t on {table}"))
    };
    let renamed = |name: &str| {
        let rename = |from: &str, to: &str| format!("alter function outbox_internal.{from} rename to {to}");
        (rename(name, "hidden"), rename("hidden", name))
    };
    for (breaks, mends) in [
        trigger("update", "outbox"),         // a claim fails
        trigger("insert", "outbox_history"), // a settle
        renamed("heartbeat"),
        renamed("next_due_ms"),
    ] {
        load.wait_for_more(40);
        let offset = cluster.log_offset();
        cluster.exec(DB, &breaks);
        cluster.reload(); // the next heartbeat would be seconds away
        cluster.wait_for_log("; tries again", offset);
        load.wait_for_more(40);
        cluster.exec(DB, &mends);
    }
    load.wait_for_more(40);
    let sent = load.stop();
    wait_drained(&cluster);
    judge(&sent, &arrived(&all_of(broker, &queue))).assert_perfect();
    assert_none_is_dead_or_charged(&cluster);
    assert_eq!(cluster.query_one::<Vec<i32>>(DB, pids), before, "the same processes");
}

// ---- kill -9 --------------------------------------------------------------------------------------------------------

/// Kills a cluster under load, at a thousand transactions a second: each round kills a worker, then the postmaster.
/// Returns the record of the producers, and the messages that arrived.
fn killed_under_load(synchronous_commit: bool) -> (Cluster, Faults, Vec<Sent>, Vec<Arrived>) {
    // One test at a time, so that each reaches its thousand transactions a second.
    static ALONE: Mutex<()> = Mutex::new(());
    let _alone = ALONE.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let broker = Broker::shared();
    let (exchange, queue) = exchange_and_queue(broker);
    // Only workers and producers flush commits to disk.
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
    let mut faults = Faults::default();
    for number in 0..2 * rounds(3) {
        let (began, before) = (Instant::now(), load.committed());
        load.wait_for_more(600);
        let rate = (load.committed() - before) as f64 / began.elapsed().as_secs_f64();
        println!("{rate:.0} events a second");
        wait_in_flight(&cluster);
        faults.during(1, || {
            if number % 2 == 0 {
                let (pid, offset) = (worker(&cluster, 1).pid, cluster.log_offset());
                process::signal(pid as u32, libc::SIGKILL); // Postgres restarts all its processes then
                cluster.wait_for_log("all server processes terminated", offset);
            } else {
                cluster.kill_postmaster();
                cluster.start_again();
            }
            wait_connected(&cluster);
        });
        load.wait_for_more(100);
    }
    load.wait_for_more(100);
    let sent = load.stop();
    wait_drained(&cluster);
    let arrived = arrived(&all_of(broker, &queue));
    assert_none_is_dead_or_charged(&cluster);
    (cluster, faults, sent, arrived)
}

#[test]
fn kills_of_worker_and_postmaster_under_load_lose_and_reorder_nothing() {
    let (cluster, faults, sent, arrived) = killed_under_load(true);
    let verdict = judge(&sent, &arrived);
    println!("{} arrived, {} again", arrived.len(), verdict.doubled.len());
    faults.assert_explain(&verdict, &messages(&cluster));
}

#[test]
fn kills_that_undo_asynchronous_commits_deliver_no_message_of_those_commits() {
    // On a busy machine a worker may flush every commit before a kill, so that none is undone.
    let proved = (0..4).any(|_| undone_by_kills() > 0);
    assert!(proved, "the crashes undid no commit, so the test proved nothing");
}

/// Judges what arrived. Returns the number of commits that the kills have undone.
fn undone_by_kills() -> usize {
    let (cluster, faults, sent, arrived) = killed_under_load(false);
    let survived = as_survived(&cluster, &sent);
    // Transactions of unknown outcome are not counted; they may have survived.
    let is_undone = |(recorded, now): &(&Sent, &Sent)| recorded.fate == Fate::Committed && now.fate == Fate::RolledBack;
    let undone = sent.iter().zip(&survived).filter(is_undone).count();
    let verdict = judge(&survived, &arrived);
    println!(
        "{} arrived, {} again, {undone} undone",
        arrived.len(),
        verdict.doubled.len()
    );
    faults.assert_explain(&verdict, &messages(&cluster));
    undone
}

/// Workers crash six times, each time with messages of two destinations in flight.
#[test]
fn a_message_that_crashes_workers_becomes_the_only_dead_letter() {
    const MESSAGES: i64 = 300;
    let heals = Arc::new(AtomicBool::new(false));
    let healed = heals.clone();
    let receiver = Receiver::start(move |_| match healed.load(Ordering::Acquire) {
        true => Reply::status(200),
        false => Reply::Hang,
    });
    // A crash charges the claimed messages. Messages that are in flight on the fast path are not claimed yet, so the
    // counts would vary with the fast path.
    let conf = ["outbox.http_allow = '127.0.0.1'", "outbox.fast_path = off"];
    let cluster = unconnected_cluster("", "nowhere", &conf);
    for name in ["a", "b"] {
        let (server, url) = ("foreign data wrapper outbox_http", receiver.url("/"));
        cluster.exec(DB, &format!("create server {name} {server} options (url '{url}')"));
    }
    // One partition, so that each worker claims the same message first.
    cluster.exec(
        DB,
        &format!(
            "select outbox_publish('T', '{{}}', null, n::text, 'x', destination => to_name)
             from (select n from generate_series(1, 30 * {MESSAGES}) n where outbox_partition_of(n::text) = outbox_partition_of('1') limit {MESSAGES}) keys,
               unnest(array['a', 'b']) to_name"
        ),
    );
    assert_eq!(count(&cluster, "select count(distinct partition) from outbox"), 1);
    // For each crash: the highest number of charged crashes at one destination, that at the other, and the number of
    // dead letters. The worker tries some messages of each destination together, then fewer, then one message of either
    // destination. At the end only what was claimed with the last one may have been charged.
    for (number, (one, other, dead)) in (1..).zip([(0, 0, 0), (1, 1, 0), (2, 2, 0), (3, 2, 0), (4, 2, 0), (3, 2, 1)]) {
        let claimed = "max(crashes) filter (where claim_token is not null and destination";
        wait_true(
            &cluster,
            &format!("crash {number} to be charged, {one} and {other}"),
            &format!(
                "select coalesce(dead = {dead} and (dead > 0 or greatest(a, b) = {one} and least(a, b) = {other} and a + b >= 0), false)
                 from (select {claimed} = 'a') a, {claimed} = 'b') b, (select count(*) from outbox_dead) dead from outbox) x"
            ),
        );
        // A worker does not wait until its claim is on disk, so a crash could undo the claim.
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
        "only the message that was in flight alone at the last crashes is dead"
    );
    let reason = "select reason like '5 workers crashed while it was in flight%' from outbox_dead";
    assert!(cluster.query_one::<bool>(DB, reason));
    let uncharged = "select count(*) from outbox_history where attempts = 1";
    assert_eq!(count(&cluster, uncharged), 2 * MESSAGES - 1, "a crash is no attempt");
}

// ---- a broker with several faults -----------------------------------------------------------------------------------

#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    /// The first queue is full, or is consumed again.
    Refuse,
    /// The second queue loses its binding, or gets it back.
    Unbind,
    /// Dead letters are retried.
    Retry,
    Stop,
    Kill,
}

/// A broker with three queues: one refuses messages beyond its limit, one loses its binding, one has no fault.
struct Stage {
    broker: PrivateBroker,
    exchange: String,
    queues: [String; 3],
    /// Takes the messages of the queue that refuses beyond its limit. The other queues keep theirs to the end.
    consumer: Option<Consumer>,
    consumed: Vec<Delivery>,
    unbound: bool,
}

const REFUSES: usize = 0;
const UNROUTABLE: usize = 1;
const PLAIN: usize = 2;

/// The bindings of the queues to keys of the load: two writers to the first queue, one to each of the others.
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
            consumer: None,
            consumed: Vec::new(),
            unbound: false,
        };
        stage.consume();
        stage
    }

    fn consume(&mut self) {
        self.consumer = Some(Consumer::new(&self.broker, &self.queues[REFUSES]));
    }

    fn stop_consuming(&mut self) {
        self.consumed
            .extend(self.consumer.take().into_iter().flat_map(Consumer::finish));
    }

    /// Stops consuming, and waits until a crash of the broker undoes no acknowledgement: the broker would deliver the
    /// message again. They are on disk once a later message of the queue is.
    fn settle_consumed(&mut self, cluster: &Cluster) {
        self.stop_consuming();
        let now: String = cluster.query_one(DB, "select clock_timestamp()::text");
        let later = format!(
            "select exists (select from outbox_history where key ~ '^load:w[01]' and enqueued_at > '{now}')
                 or exists (select from outbox_attempts_log where error like 'nacked%' and at > '{now}')"
        );
        wait_true(cluster, "a later message of the queue, or a full queue", &later);
    }

    fn bind(&mut self, bound: bool) {
        let (queue, binding) = (&self.queues[UNROUTABLE], BINDINGS[UNROUTABLE][0]);
        match bound {
            true => self.broker.bind(queue, &self.exchange, binding),
            false => self.broker.unbind(queue, &self.exchange, binding),
        }
        self.unbound = !bound;
    }

    fn cause(&mut self, fault: Fault, cluster: &Cluster, load: &Load, crashes: &mut Faults) {
        match fault {
            Fault::Refuse if self.consumer.is_some() => {
                self.settle_consumed(cluster);
                wait_for_error(cluster, "nacked");
            }
            Fault::Refuse => {
                self.consume();
                retry_dead_letters(&mut cluster.connect(DB));
            }
            Fault::Unbind if !self.unbound => {
                self.bind(false);
                wait_for_error(cluster, "unroutable");
            }
            Fault::Unbind => {
                self.bind(true);
                retry_dead_letters(&mut cluster.connect(DB));
            }
            Fault::Retry => retry_dead_letters(&mut cluster.connect(DB)),
            Fault::Stop | Fault::Kill => {
                let consumes = self.consumer.is_some();
                if consumes {
                    self.settle_consumed(cluster);
                }
                crashes.during(2, || {
                    match fault {
                        Fault::Stop => self.broker.stop(),
                        _ => self.broker.kill(),
                    }
                    load.wait_for_more(20);
                    self.broker.start_again();
                    // A full queue may refuse what is sent, and nothing else is.
                    let is_back = "select bool_and(state = 'connected' or reason = 'queue_refused') from outbox_worker_status where alive";
                    wait_true(cluster, "the workers to be connected", is_back);
                });
                if consumes {
                    self.consume();
                }
            }
        }
    }

    /// The messages of each queue.
    fn finish(&mut self) -> [Vec<Arrived>; 3] {
        self.stop_consuming();
        let consumed = std::mem::take(&mut self.consumed);
        let mut arrived = self
            .queues
            .each_ref()
            .map(|queue| arrived(&all_of(&self.broker, queue)));
        arrived[REFUSES].splice(..0, consumed.iter().map(Arrived::new));
        arrived
    }
}

fn wait_for_error(cluster: &Cluster, word: &str) {
    let sql = format!("select exists (select from outbox_messages where last_error like '{word}%')");
    wait_true(cluster, &format!("a message to be {word}"), &sql);
}

fn retry_dead_letters(client: &mut Client) {
    client
        .execute("select outbox_retry(seq) from outbox_dead", &[])
        .expect("retry");
}

#[test]
fn random_nacks_returns_and_broker_crashes_lose_nothing_and_charge_only_failed_messages() {
    seeds(1).for_each(|seed| cause_faults(Dice::new(seed)));
}

/// The number of faults after the first one of each kind.
const FURTHER: usize = 4;

fn cause_faults(mut dice: Dice) {
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
    // Each of them at least once, in random order.
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
    let (began, mut faults) = (Instant::now(), Faults::default());
    for _ in 0..first.len() + FURTHER {
        let fault = match first.len() {
            0 => others[dice.below(others.len())],
            n => first.swap_remove(dice.below(n)),
        };
        println!("{:.1?}: {fault:?}", began.elapsed());
        stage.cause(fault, &cluster, &load, &mut faults);
        load.wait_for_more(10 + dice.below(80));
    }
    let sent = load.stop();
    if stage.unbound {
        stage.bind(true);
    }
    if stage.consumer.is_none() {
        stage.consume();
    }
    let mut client = cluster.connect(DB);
    wait_until("all to be published", LONG, || {
        retry_dead_letters(&mut client);
        let left = "select exists (select from outbox) or exists (select from outbox_waiting) or exists (select from outbox_dead)";
        !client.value::<bool>(left)
    });
    let arrived = stage.finish();

    let all = arrived.concat();
    let verdict = judge(&sent, &all);
    println!(
        "{} sent, {} arrived, {} of them again",
        sent.len(),
        all.len(),
        verdict.doubled.len()
    );
    faults.assert_explain_repeats(&verdict, &messages(&cluster));
    assert_eq!(last_arrivals_out_of_order(&all), Vec::<String>::new());
    let of_plain: Vec<Sent> = sent.into_iter().filter(|sent| sent.label.starts_with("w3-")).collect();
    // Its keys share workers with others' faults.
    faults.assert_explain(&judge(&of_plain, &arrived[PLAIN]), &messages(&cluster));
    for (what, sql) in [
        ("charged without an error", "attempts > 1 and last_error is null"),
        (
            "charged for the faults of other queues",
            "key like 'load:w3.%' and (attempts > 1 or error is not null)",
        ),
        (
            "nacked by another queue",
            "error like 'nacked%' and key !~ '^load:w[01]'",
        ),
        (
            "returned for another queue",
            "error like 'unroutable%' and key !~ '^load:w2'",
        ),
        ("failed for another reason", "error !~ '^(nacked|unroutable)'"),
    ] {
        let failed = "outbox_history left join
                      (select seq, error from outbox_attempts_log where outcome <> 'deferred') l using (seq)";
        let found = count(&cluster, &format!("select count(*) from {failed} where {sql}"));
        assert_eq!(found, 0, "{what}");
    }
    let culprits = "select count(distinct left(error, 6)) from outbox_attempts_log";
    assert_eq!(
        count(&cluster, culprits),
        2,
        "some messages must have been nacked, and some returned"
    );
}

// ---- a row lock of another session ----------------------------------------------------------------------------------

/// How long the lock is held.
const HELD: Duration = Duration::from_secs(3);

#[test]
fn a_locked_row_of_one_destination_delays_no_other_destination() {
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
        "three connected destinations",
        "select count(*) = 3 from outbox_connections where state = 'connected'",
    );
    let plan = Plan {
        also_to: &["audit", "billing"],
        ..Plan::default()
    };
    let load = Load::start(&cluster, &plan);
    load.wait_for_more(40);

    // Lock a message that is in flight.
    let mut holder = cluster.connect(DB);
    lock_a_message(&mut holder, "claim_token is not null");
    assert_the_others_continue(&cluster, &load);
    holder.run("rollback");
    load.wait_for_more(40);

    // Lock a message that is ready to be claimed.
    cluster.exec(DB, "select outbox_pause('audit')");
    lock_a_message(&mut holder, "claim_token is null");
    cluster.exec(DB, "select outbox_resume('audit')");
    assert_the_others_continue(&cluster, &load);
    holder.run("rollback");

    let sent = load.stop();
    wait_drained(&cluster);
    for queue in &queues {
        judge(&sent, &arrived(&all_of(broker, queue))).assert_perfect();
    }
    assert_none_is_dead_or_charged(&cluster);
}

fn lock_a_message(holder: &mut Client, which: &str) {
    let sql = format!("select seq from outbox where destination = 'audit' and {which} limit 1 for update skip locked");
    wait_until("a message to lock", LONG, || {
        holder.run("begin");
        let is_locked = !holder.query(&sql, &[]).expect("an answer").is_empty();
        if !is_locked {
            holder.run("rollback");
        }
        is_locked
    });
}

/// Asserts that the other destinations receive new messages while the lock is held.
fn assert_the_others_continue(cluster: &Cluster, load: &Load) {
    let (began, mut slowest) = (Instant::now(), Duration::ZERO);
    while began.elapsed() < HELD {
        load.wait_for_more(20);
        let (last, waited_since): (i64, _) = (count(cluster, "select max(seq) from outbox_events"), Instant::now());
        wait_true(
            cluster,
            "the other destinations to receive the committed messages",
            &format!("select not exists (select from outbox where destination <> 'audit' and seq <= {last})"),
        );
        slowest = slowest.max(waited_since.elapsed());
    }
    let held = count(cluster, "select count(*) from outbox where destination = 'audit'");
    println!("the others waited {slowest:.1?} at most; {held} of the destination wait");
    assert!(held > 0, "the lock blocked no message, so the test proved nothing");
}
