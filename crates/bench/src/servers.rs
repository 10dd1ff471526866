//! Private Postgres and RabbitMQ servers, started for each row. They are durable as in production, with default
//! settings except those that the report lists.

use std::process::Command;
use std::time::Duration;

use postgres::Client;
use postgres::types::FromSqlOwned;
use serde_json::json;
use support::private_broker::{PrivateBroker, Size};
use support::{Broker, Cluster, outbox_cluster_with};

use crate::cores;
use crate::cpu::Processes;
use crate::options::{self, Placement, QueueType};
use crate::report::{BenchReport, log_progress};

pub const DB: &str = "postgres";
pub const EXCHANGE: &str = "bench";
pub const QUEUE: &str = "bench";
/// The binding for the events that are counted; see `events`.
const BINDING: &str = "order.*";
pub const BACKEND_PID: &str = "select pg_backend_pid()";
/// A time limit far above the length of any run: a wait that reaches it would never end.
pub const LONG: Duration = Duration::from_secs(600);

/// Quorum queues keep their messages in memory, and one queue holds half a million messages.
const BROKER_MEMORY: &str = "4GB";

pub struct Servers {
    pub broker: PrivateBroker,
    pub cluster: Cluster,
    /// The session of the bench process; its processor time counts for no side.
    pub sql: Client,
    pub queue: QueueType,
    /// The most messages that the queue keeps; then it drops the oldest.
    pub queue_max: Option<u32>,
    pub placement: Placement,
    /// The destination of a backlog.
    pub destination: &'static str,
}

impl Servers {
    /// Starts both servers and waits until the worker is connected. `conf` has additional lines of postgresql.conf.
    pub fn start(placement: Placement, queue: QueueType, conf: &[&str], report: &mut BenchReport) -> Self {
        log_progress("starting servers");
        let broker = Broker::start_sized(Size {
            schedulers: (placement == Placement::Pinned).then_some(1),
            memory_limit: BROKER_MEMORY,
        });
        broker.declare_exchange(EXCHANGE, "topic", true);
        let cluster = start_cluster(&broker, conf);
        let mut servers = Self {
            sql: cluster.connect(DB),
            broker,
            cluster,
            queue,
            queue_max: None,
            placement,
            destination: "default",
        };
        servers.renew_queue();
        servers.place();
        report.about(|| servers.about());
        servers
    }

    /// Pins every process to its core.
    fn place(&self) {
        if self.placement == Placement::Unpinned {
            return; // RabbitMQ binds its schedulers to cores itself: leave them there
        }
        let [first, second, ..] = all_cores() else {
            panic!("pinning the broker needs two cores: use --placements unpinned")
        };
        let (broker, rest) = ([*first], [*second]);
        cores::pin(self.broker.pid(), &broker);
        // Processes that the postmaster starts later inherit its core. `Drop` moves the bench process back.
        cores::pin(self.cluster.pid(), &rest);
        support::process::children_of(self.cluster.pid())
            .into_iter()
            .for_each(|pid| cores::pin(pid, &rest));
        cores::pin(std::process::id(), &rest);
    }

    /// Replaces the queue by an empty one.
    pub fn renew_queue(&self) {
        let mut arguments = json!({ "x-queue-type": options::name(&self.queue) });
        if let Some(most) = self.queue_max {
            arguments["x-max-length"] = json!(most);
            arguments["x-overflow"] = json!("drop-head");
        }
        self.broker.delete_queue(QUEUE);
        self.broker.declare_queue(QUEUE, arguments);
        self.broker.bind(QUEUE, EXCHANGE, BINDING);
    }

    pub fn pause(&self) {
        support::pause(&self.cluster);
    }

    pub fn resume(&self) {
        self.cluster.set_conf("outbox.enabled", "on");
    }

    pub fn sql_execute(&mut self, sql: &str) {
        let done = self.sql.batch_execute(sql);
        done.unwrap_or_else(|error| panic!("{sql}: {error}"));
    }

    pub fn ask<T: FromSqlOwned>(&mut self, sql: &str) -> T {
        ask(&mut self.sql, sql)
    }

    /// The number of messages that the broker has confirmed and that are settled by a committed transaction, since the
    /// server started.
    pub fn published(&mut self) -> i64 {
        self.ask("select published_total from outbox_status")
    }

    pub fn wal_bytes(&mut self) -> f64 {
        self.ask("select (pg_current_wal_insert_lsn() - '0/0')::float8")
    }

    /// The processes whose processor time is measured; `sessions` are those that enqueue.
    pub fn processes(&mut self, sessions: &[i32]) -> Processes {
        let workers = "select coalesce(array_agg(pid), '{}') from outbox_worker_status where alive";
        let pid = |pid: i32| u32::try_from(pid).expect("a pid");
        Processes {
            broker: self.broker.pid(),
            postmaster: self.cluster.pid(),
            workers: self.ask::<Vec<i32>>(workers).into_iter().map(pid).collect(),
            sessions: sessions.iter().copied().map(pid).collect(),
            own_session: pid(self.ask(BACKEND_PID)),
        }
    }

    /// The versions and settings of the servers, by name.
    fn about(&mut self) -> Vec<(&'static str, String)> {
        // Without other work on the machine, or the measurements mean nothing.
        let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
        let broker =
            format!("vm_memory_high_watermark={BROKER_MEMORY} disk_free_limit=50MB; pinned: one scheduler (+S 1:1)");
        let of_postgres = [
            ("Postgres", "show server_version"),
            ("outbox", "select extversion::text from pg_extension where extname = 'outbox'"),
            (
                "Postgres, non-default settings",
                "select string_agg(format('%s=%s', name, setting), ' ' order by name) from pg_settings
                 where source = 'configuration file' and setting is distinct from boot_val
                   and name !~ '^(lc_|listen|port|unix_|DateStyle|TimeZone|log_|default_text|outbox.url|outbox.enabled)'",
            ),
            (
                "durability",
                "select string_agg(format('%s=%s', name, setting), ' ') from pg_settings
                 where name in ('fsync', 'synchronous_commit', 'full_page_writes')",
            ),
        ];
        let mut about: Vec<_> = of_postgres.map(|(name, sql)| (name, self.ask(sql))).into();
        about.extend([
            ("commit", commit()),
            ("RabbitMQ", self.broker.ctl(&["version"]).trim().to_owned()),
            ("RabbitMQ, non-default settings", broker),
            ("cores", all_cores().len().to_string()),
            (
                "load at start",
                load.split_whitespace().take(3).collect::<Vec<_>>().join(" "),
            ),
        ]);
        about
    }
}

/// The first column of a row.
pub fn ask<T: FromSqlOwned>(sql: &mut Client, query: &str) -> T {
    let row = sql.query_one(query, &[]);
    row.unwrap_or_else(|error| panic!("{query}: {error}")).get(0)
}

fn start_cluster(broker: &Broker, conf: &[&str]) -> Cluster {
    let conf: Vec<&str> = ["fsync = on"].iter().chain(conf).copied().collect();
    outbox_cluster_with(broker, EXCHANGE, &conf)
}

impl Drop for Servers {
    fn drop(&mut self) {
        if self.placement == Placement::Pinned {
            cores::pin(std::process::id(), all_cores());
        }
    }
}

/// The cores that this process had at its start. The first call must come before any pinning.
pub fn all_cores() -> &'static [usize] {
    static ALL: std::sync::OnceLock<Vec<usize>> = std::sync::OnceLock::new();
    ALL.get_or_init(cores::available)
}

/// The commit of this tree, with a mark if files differ from it; empty outside of a clone.
fn commit() -> String {
    let described = Command::new("git")
        .args(["describe", "--always", "--dirty"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output();
    described.map_or(String::new(), |output| {
        String::from_utf8_lossy(&output.stdout).trim().to_owned()
    })
}
