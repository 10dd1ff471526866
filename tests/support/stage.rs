//! What most tests need: a cluster whose worker delivers to a broker, and queries about its state.

use std::collections::BTreeSet;
use std::fs::Permissions;
use std::ops::Deref;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::PathBuf;
use std::process::Command;

use crate::oracle::{Fate, Sent};
use crate::{
    Broker, Cluster, ClusterBuilder, Consumer, Delivery, LONG, Receiver, fresh_names, labels, process, wait_for,
    wait_until,
};
use postgres::Client;
use postgres::error::{DbError, SqlState};
use serde_json::Value;

pub const DB: &str = "postgres";

/// A cluster that delivers to the shared broker, and a durable queue that gets all its messages.
pub struct Stage {
    pub broker: &'static Broker,
    pub exchange: String,
    pub queue: String,
    pub cluster: Cluster,
}

impl Stage {
    /// Starts the cluster with further lines of postgresql.conf, and waits until its worker is connected.
    pub fn new(conf: &[&str]) -> Self {
        let broker = Broker::shared();
        let (exchange, queue) = exchange_and_queue(broker);
        let cluster = outbox_cluster_with(broker, &exchange, conf);
        Self {
            broker,
            exchange,
            queue,
            cluster,
        }
    }

    pub fn consumer(&self) -> Consumer {
        Consumer::new(self.broker, &self.queue)
    }

    /// Takes all messages of the queue. Call it when the outbox is empty: then all of them are confirmed.
    pub fn all(&self) -> Vec<Delivery> {
        all_of(self.broker, &self.queue)
    }

    /// Takes all messages of the queue, once the outbox is empty.
    pub fn delivered(&self) -> Vec<Delivery> {
        wait_drained(self);
        self.all()
    }

    /// Takes all messages of the queue, and returns their labels.
    pub fn labels(&self) -> Vec<String> {
        labels(&self.all())
    }
}

impl Deref for Stage {
    type Target = Cluster;

    fn deref(&self) -> &Cluster {
        &self.cluster
    }
}

impl Cluster {
    /// Creates a destination with its own exchange on `broker`. Returns a queue that gets all its messages.
    pub fn destination(&self, broker: &Broker, name: &str, options: &str) -> String {
        let (exchange, queue) = exchange_and_queue(broker);
        let comma = if options.is_empty() { "" } else { ", " };
        let options = format!("exchange '{exchange}'{comma}{options}");
        self.exec(
            DB,
            &format!("create server {name} foreign data wrapper outbox_amqp options ({options})"),
        );
        queue
    }
}

/// A server with the extension, whose worker is connected to `broker` and delivers to `exchange`, which must exist.
pub fn outbox_cluster(broker: &Broker, exchange: &str) -> Cluster {
    outbox_cluster_with(broker, exchange, &[])
}

/// Starts a cluster like [`outbox_cluster`], with further lines of postgresql.conf.
pub fn outbox_cluster_with(broker: &Broker, exchange: &str, conf: &[&str]) -> Cluster {
    let cluster = unconnected_cluster(&broker.url(), exchange, conf);
    wait_connected(&cluster);
    cluster
}

/// Starts a cluster with the extension and does not wait for its workers: the broker may be unreachable.
pub fn unconnected_cluster(url: &str, exchange: &str, conf: &[&str]) -> Cluster {
    unconnected_builder(url, exchange, conf).start()
}

/// The configuration of [`unconnected_cluster`]. Destinations may be on this machine, unless `conf` has
/// `outbox.http_allow`.
pub fn unconnected_builder(url: &str, exchange: &str, conf: &[&str]) -> ClusterBuilder {
    let builder = Cluster::builder()
        .extension()
        .conf(&format!("outbox.url = '{url}'"))
        .conf(&format!("outbox.exchange = '{exchange}'"))
        .conf("outbox.http_allow = '127.0.0.1'");
    conf.iter().fold(builder, |builder, line| builder.conf(line))
}

/// Creates destinations whose names are the prefix and a number from 1; a # in the options stands for that number.
pub fn create_destinations(cluster: &Cluster, prefix: &str, count: usize, wrapper: &str, options: &str) {
    let create = format!("create server \"{prefix}#\" foreign data wrapper {wrapper} options ({options})");
    let each = format!("execute replace($sql${create}$sql$, '#', n::text)");
    cluster.exec(
        DB,
        &format!("do $do$ begin for n in 1..{count} loop {each}; end loop; end $do$"),
    );
}

/// Creates such destinations by HTTP, each with a path of its own at the receiver.
pub fn create_receivers(cluster: &Cluster, prefix: &str, count: usize, receiver: &Receiver) {
    let url = format!("url '{}#'", receiver.url("/"));
    create_destinations(cluster, prefix, count, "outbox_http", &url);
}

/// Publishes `each` events, and enqueues each of them for all these destinations. `payload` is SQL.
pub fn publish_to_each(cluster: &Cluster, prefix: &str, count: usize, each: usize, payload: &str) {
    let publish = format!("outbox_publish('T', {payload}, 'o', i::text, destination => '{prefix}1')");
    let enqueue = format!("perform outbox_enqueue_many(seqs, destination => '{prefix}' || n)");
    cluster.exec(
        DB,
        &format!(
            "do $$ declare seqs bigint[] := array(select {publish} from generate_series(1, {each}) i);
             begin for n in 2..{count} loop {enqueue}; end loop; end $$"
        ),
    );
}

/// A line of postgresql.conf: no workers and no maintenance for this database. With `outbox.workers = 0` maintenance
/// would still run and race with a test that makes old or expired rows.
pub const NOTHING_RUNS: &str = "outbox.databases = 'another'";

/// A server with the extension on which only the test changes the contents of the tables.
pub fn quiet_cluster() -> Cluster {
    quiet_cluster_with(&[])
}

/// Starts a cluster like [`quiet_cluster`], with further lines of postgresql.conf.
pub fn quiet_cluster_with(conf: &[&str]) -> Cluster {
    unconnected_cluster("", "x", &[&[NOTHING_RUNS], conf].concat())
}

/// A server with the extension and maintenance, without a worker.
pub fn idle_cluster(conf: &[&str]) -> Cluster {
    unconnected_cluster("", "x", &[&["outbox.workers = 0"], conf].concat())
}

/// Writes a file that belongs to the user of the server.
pub fn server_file(cluster: &Cluster, name: &str, text: &str, mode: u32) -> PathBuf {
    let path = cluster.data_dir().join(name);
    std::fs::write(&path, text).expect("write a file");
    std::fs::set_permissions(&path, Permissions::from_mode(mode)).expect("chmod");
    if let Some(account) = process::postgres_account() {
        chown(&path, Some(account.uid), Some(account.gid)).expect("chown");
    }
    path
}

/// Waits until every configured worker is connected to its broker, and owns a partition if leases are used.
pub fn wait_connected(cluster: &Cluster) {
    wait_true(
        cluster,
        "every worker to be connected",
        "select count(*) = current_setting('outbox.workers')::int from outbox_worker_status
         where alive and state = 'connected' and (partitions > 0 or not (select leasing from outbox_settings))",
    );
}

/// Declares a durable topic exchange and a durable queue that gets all its messages. Returns their names.
pub fn exchange_and_queue(broker: &Broker) -> (String, String) {
    exchange_and_queue_with(broker, Value::Null)
}

/// The same, with arguments of the queue, such as `json!({"x-max-length": 1})`.
pub fn exchange_and_queue_with(broker: &Broker, args: Value) -> (String, String) {
    let (exchange, queue) = fresh_names();
    broker.declare_bound(&exchange, &queue, args);
    (exchange, queue)
}

/// From here on commits wait for a standby that never connects. Sessions of the tests are exempt, and so are sessions
/// that set synchronous_commit themselves.
pub fn miss_standby(cluster: &Cluster) {
    cluster.exec(DB, "alter role postgres set synchronous_commit = local");
    cluster.set_conf("synchronous_standby_names", "away");
    let names = "select setting = 'away' from pg_settings where name = 'synchronous_standby_names'";
    wait_true(cluster, "the setting of the standby to take effect", names);
    // The checkpointer publishes to all sessions that commits must wait for a standby. Until then they do not.
    let mut waits = cluster.connect(DB);
    let pid: i32 = waits.query_one("select pg_backend_pid()", &[]).expect("a pid").get(0);
    let waiting = std::thread::spawn(move || {
        let commits = "set synchronous_commit = on; create table waits_for_standby (); drop table waits_for_standby";
        while waits.batch_execute(commits).is_ok() {}
    });
    let waits_now = format!("select wait_event = 'SyncRep' from pg_stat_activity where pid = {pid}");
    let mut client = cluster.connect(DB);
    wait_until("a commit to wait for the standby", LONG, || {
        let row = client.query_one(&waits_now, &[]).expect("pg_stat_activity");
        row.get::<_, Option<bool>>(0) == Some(true)
    });
    cluster.exec(DB, &format!("select pg_terminate_backend({pid})"));
    waiting.join().expect("no panic");
}

/// Disables delivery and waits until the workers have paused.
pub fn pause(cluster: &Cluster) {
    cluster.set_conf("outbox.enabled", "off");
    wait_workers_paused(cluster);
}

/// Waits until there are workers and all of them deliver nothing.
pub fn wait_workers_paused(cluster: &Cluster) {
    let paused = "select bool_and(state = 'paused') from outbox_worker_status where alive";
    wait_true(cluster, "the workers to pause", paused);
}

/// Waits until every worker has seen that the destination is paused.
pub fn wait_paused(cluster: &Cluster, destination: &str) {
    let paused =
        format!("select bool_and(state = 'paused') from outbox_connections where destination = '{destination}'");
    wait_true(cluster, &format!("{destination} to be paused"), &paused);
}

/// Declares a missing exchange and a queue bound to it while the worker is paused. Without the pause, a message that
/// arrives between the two declarations would be unroutable.
pub fn supply_exchange(cluster: &Cluster, broker: &Broker, exchange: &str, queue: &str) {
    pause(cluster);
    broker.declare_bound(exchange, queue, Value::Null);
    cluster.set_conf("outbox.enabled", "on");
}

/// Waits until the query `sql` returns true, and not false or null. Survives a restart of the server.
pub fn wait_true(cluster: &Cluster, what: &str, sql: &str) {
    let mut client = None;
    wait_until(what, LONG, || {
        if client.is_none() {
            client = cluster.try_connect(DB).ok();
        }
        let answer = client.as_mut().map(|client| client.query_one(sql, &[]));
        match answer {
            Some(Ok(row)) => row.get::<_, Option<bool>>(0) == Some(true),
            _ => {
                client = None;
                false
            }
        }
    });
}

/// Waits until the row of the destination in outbox_destination_status meets the condition.
pub fn wait_stats(cluster: &Cluster, destination: &str, condition: &str) {
    let row = format!("from outbox_destination_status where destination = '{destination}'");
    wait_true(
        cluster,
        &format!("{destination}: {condition}"),
        &format!("select {condition} {row}"),
    );
}

/// Runs statements that must fail, and returns their error.
pub fn refused(cluster: &Cluster, sql: &str) -> DbError {
    let error = cluster.connect(DB).batch_execute(sql).expect_err(sql);
    error
        .as_db_error()
        .unwrap_or_else(|| panic!("{sql}: {error:?}"))
        .clone()
}

/// Waits until the history shows `n` published messages, and asserts that it shows no more.
pub fn wait_published(cluster: &Cluster, n: usize) {
    let published = "select count(*) from outbox_history where not discarded";
    wait_true(
        cluster,
        &format!("{n} published messages"),
        &format!("select ({published}) >= {n}"),
    );
    assert_eq!(cluster.query_one::<i64>(DB, published), n as i64, "published messages");
}

/// Waits until no message waits for delivery, except messages behind a dead letter.
pub fn wait_drained(cluster: &Cluster) {
    wait_true(
        cluster,
        "the outbox to be empty",
        "select not exists (select from outbox)
            and not exists (select from outbox_waiting w where not exists (
                  select from outbox_dead d where d.blocks and d.partition = w.partition and d.key = w.key))",
    );
}

/// Reads a check of outbox_health: whether it is ok for all destinations, and the problems, each after its destination.
pub fn health(cluster: &Cluster, check: &str) -> (bool, String) {
    let row = cluster
        .connect(DB)
        .query_one(
            r#"select bool_and(ok), coalesce(string_agg(concat_ws(': ', destination, problem), '; ' order by destination), '')
               from outbox_health where "check" = $1 having count(*) > 0"#,
            &[&check],
        )
        .unwrap_or_else(|error| panic!("check {check:?} of outbox_health: {error:?}"));
    (row.get(0), row.get(1))
}

/// Waits until a check of outbox_health fails, and returns its problem. Ignores the problem that a worker is still
/// connecting.
pub fn wait_for_problem(cluster: &Cluster, check: &str) -> String {
    wait_for(&format!("a problem of {check:?} in outbox_health"), LONG, || {
        let (ok, problem) = health(cluster, check);
        (!ok && !problem.contains("connecting to")).then_some(problem)
    })
}

/// A remedy of outbox_health: its text, and the commands in it.
#[derive(Clone, Debug, PartialEq)]
pub struct Remedy {
    text: String,
    pub commands: Vec<String>,
    /// Who may type each of them.
    pub roles: Vec<String>,
}

impl std::ops::Deref for Remedy {
    type Target = str;

    fn deref(&self) -> &str {
        &self.text
    }
}

impl std::fmt::Display for Remedy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.text)
    }
}

impl Remedy {
    /// The first one of a problem of outbox_health for which the condition holds.
    pub fn find(cluster: &Cluster, db: &str, condition: &str) -> Option<Self> {
        let sql = format!(
            r#"select remedy, array(select c ->> 'command' from jsonb_array_elements(commands) c),
                      array(select c ->> 'role' from jsonb_array_elements(commands) c)
               from outbox_health where not ok and {condition}"#
        );
        let rows = cluster.connect(db).query(&sql, &[]).expect("outbox_health");
        let row = rows.first()?;
        let (text, commands, roles) = (row.get(0), row.get(1), row.get(2));
        Some(Self { text, commands, roles })
    }

    /// Waits for it, in the usual database.
    pub fn wait(cluster: &Cluster, condition: &str) -> Self {
        wait_for(condition, LONG, || Self::find(cluster, DB, condition))
    }

    /// Its first command.
    pub fn command(&self) -> &str {
        self.commands
            .first()
            .unwrap_or_else(|| panic!("no command: {}", self.text))
    }

    /// Its first command, with this value for the variables of psql in it.
    pub fn filled(&self, value: &str) -> String {
        filled(self.command(), value)
    }
}

/// The command with this value for the variables of psql in it, as `:'url'`.
pub fn filled(command: &str, value: &str) -> String {
    let mut parts = command.split(":'");
    let mut filled = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let (_, rest) = part.split_once('\'').expect("the end of a variable");
        filled += &format!("'{}'{rest}", value.replace('\'', "''"));
    }
    filled
}

/// Runs the remedy of a check of outbox_health, which is SQL, and waits until the check is ok.
pub fn run_remedy(cluster: &Cluster, check: &str) {
    let remedy = Remedy::wait(cluster, &format!("\"check\" = '{check}'"));
    cluster.exec(DB, remedy.command());
    wait_healthy(cluster, check);
}

/// Waits until a check of outbox_health is ok.
pub fn wait_healthy(cluster: &Cluster, check: &str) {
    wait_until(&format!("{check:?} of outbox_health to be ok"), LONG, || {
        health(cluster, check).0
    });
}

/// A session with a statement timeout far above what a worker may take to leave its database.
pub fn admin(cluster: &Cluster) -> Client {
    let mut client = cluster.connect(DB);
    client
        .batch_execute("set statement_timeout = '30s'")
        .expect("a statement_timeout");
    client
}

/// Creates or removes partitions, and retries: maintenance does so too, and a worker settles messages in them. The call
/// gives up after 200 ms if it meets one of them.
pub fn beside_maintenance<T>(mut call: impl FnMut() -> Result<T, postgres::Error>) -> T {
    wait_for("partitions to be made or removed", LONG, || match call() {
        Err(error) if error.code() == Some(&SqlState::LOCK_NOT_AVAILABLE) => None,
        done => Some(done.expect("partitions")),
    })
}

/// Waits until every worker has written a further heartbeat, which it does when it refreshes its leases.
pub fn wait_for_heartbeat(cluster: &Cluster) {
    let now: String = cluster.query_one(DB, "select clock_timestamp()::text");
    wait_true(
        cluster,
        "a heartbeat of every worker",
        &format!(
            "select min(heartbeat_at) > '{now}'
             from outbox_workers join outbox_worker_status using (worker_id) where alive"
        ),
    );
}

/// Takes all messages of a queue. Call it when the outbox is empty: then all of them are confirmed.
pub fn all_of(broker: &Broker, queue: &str) -> Vec<Delivery> {
    let count = broker.queue_len(queue) as usize;
    match count {
        0 => Vec::new(),
        _ => Consumer::new(broker, queue).recv_n(count, LONG),
    }
}

/// Waits until three workers share the 16 partitions, each with at least 5.
pub fn wait_shared(cluster: &Cluster) {
    wait_true(
        cluster,
        "three workers to share 16 partitions",
        "select count(*) = 3 and sum(partitions) = 16 and min(partitions) >= 5 from outbox_worker_status
         where alive and state = 'connected'",
    );
}

/// Suspends the process of a worker in the server while the worker is idle. In a transaction, or while it writes WAL,
/// the worker would hold locks and block other processes.
pub fn suspend_worker(cluster: &Cluster, pid: u32) {
    let waits = format!(
        "select exists (select from pg_stat_activity where pid = {pid} and state = 'idle' and wait_event_type = 'Extension')"
    );
    wait_until("a worker that is suspended while it waits", LONG, || {
        process::suspend(pid);
        let is_found = cluster.query_one::<bool>(DB, &waits);
        if !is_found {
            process::signal(pid, libc::SIGCONT);
        }
        is_found
    });
}

/// Corrects the record of producers after a crash that could undo commits: an event counts as committed if the tables
/// contain it.
pub fn as_survived(cluster: &Cluster, sent: &[Sent]) -> Vec<Sent> {
    let rows = cluster
        .connect(DB)
        .query("select payload->>'label' from outbox_events", &[]);
    let survived: BTreeSet<String> = rows.expect("the events").iter().map(|row| row.get(0)).collect();
    let fate = |label: &str| match survived.contains(label) {
        true => Fate::Committed,
        false => Fate::RolledBack,
    };
    let judged = sent.iter().map(|sent| Sent {
        fate: fate(&sent.label),
        ..sent.clone()
    });
    judged.collect()
}

/// Runs a program of Postgres against the cluster.
pub fn tool(cluster: &Cluster, program: &str, args: &[&str]) {
    let mut command = Command::new(cluster.installation().bin(program));
    command.args(["-h", "127.0.0.1", "-U", "postgres", "-p", &cluster.port().to_string()]);
    let output = command
        .args(args)
        .output()
        .unwrap_or_else(|error| panic!("run {program}: {error}"));
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program}: {}\n{errors}", output.status);
}
