//! Private Postgres and RabbitMQ servers, started for each row. They are durable as in production, with default
//! settings except those that the report lists.

use std::time::Duration;

use postgres::Client;
use serde_json::json;
use support::private_broker::{PrivateBroker, Size};
use support::{Broker, Cluster, wait_until};

use crate::cores;
use crate::cpu::Pids;
use crate::options::{Placement, QueueType};

pub const DB: &str = "postgres";
pub const EXCHANGE: &str = "bench";
pub const QUEUE: &str = "bench";
/// The binding for the events that are counted; see `events`.
pub const BINDING: &str = "order.*";
/// A time limit far above the length of any run: a wait that reaches it would never end.
pub const LONG: Duration = Duration::from_secs(600);

/// Quorum queues keep their messages in memory, and one queue holds half a million messages.
const BROKER_MEMORY: &str = "4GB";

pub struct Servers {
    pub broker: PrivateBroker,
    pub cluster: Cluster,
    /// The session of the bench process; its processor time counts for no side.
    pub sql: Client,
    placement: Placement,
    conf: Vec<String>,
}

impl Servers {
    /// Starts both servers and waits until the worker is connected. `conf` has additional lines of postgresql.conf.
    pub fn start(placement: Placement, queue: QueueType, conf: &[&str]) -> Self {
        let broker = Broker::start_sized(Size {
            schedulers: (placement == Placement::Pinned).then_some(1),
            memory_limit: BROKER_MEMORY,
        });
        broker.declare_exchange(EXCHANGE, "topic", true);
        let conf: Vec<String> = conf.iter().map(|line| (*line).to_owned()).collect();
        let (cluster, sql) = start_cluster(&broker, &conf);
        let servers = Self {
            broker,
            cluster,
            sql,
            placement,
            conf,
        };
        servers.declare_queue(queue);
        servers.place();
        servers
    }

    /// Replaces Postgres by an empty one.
    pub fn renew_cluster(&mut self) {
        (self.cluster, self.sql) = start_cluster(&self.broker, &self.conf);
        self.place();
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

    // ---- queue ------------------------------------------------------------------------------------------------------

    fn declare_queue(&self, queue: QueueType) {
        self.broker
            .declare_queue(QUEUE, json!({ "x-queue-type": queue.name() }));
        self.broker.bind(QUEUE, EXCHANGE, BINDING);
    }

    /// Replaces the queue by an empty one.
    pub fn renew_queue(&self, queue: QueueType) {
        self.broker.delete_queue(QUEUE);
        self.declare_queue(queue);
    }

    /// Replaces the queue by an empty one that keeps only the newest messages, so that the broker's memory does not
    /// grow.
    pub fn renew_bounded_queue(&self, queue: QueueType, messages: u32) {
        self.broker.delete_queue(QUEUE);
        let arguments = json!({ "x-queue-type": queue.name(), "x-max-length": messages, "x-overflow": "drop-head" });
        self.broker.declare_queue(QUEUE, arguments);
        self.broker.bind(QUEUE, EXCHANGE, BINDING);
    }

    // ---- outbox -----------------------------------------------------------------------------------------------------

    pub fn pause(&mut self) {
        self.cluster.set_conf("outbox.enabled", "off");
        self.wait_true(
            "the worker to pause",
            "select exists (select from outbox_worker_status where alive and state = 'paused')",
        );
    }

    pub fn resume(&self) {
        self.cluster.set_conf("outbox.enabled", "on");
    }

    /// The number of messages that the broker has confirmed and that are settled by a committed transaction, since the
    /// server started.
    pub fn published(&mut self) -> i64 {
        let row = self.sql.query_one("select published_total from outbox_status", &[]);
        row.expect("ask outbox_status").get(0)
    }

    pub fn wait_true(&mut self, what: &str, sql: &str) {
        wait_until(what, LONG, || {
            self.sql.query_one(sql, &[]).is_ok_and(|row| row.get::<_, bool>(0))
        });
    }

    /// The processes whose processor time is measured.
    pub fn pids(&mut self) -> Pids {
        let sql =
            "select pg_backend_pid(), (select pid from outbox_worker_status where alive order by worker_id limit 1)";
        let row = self.sql.query_one(sql, &[]).expect("ask for process ids");
        let pid = |index| u32::try_from(row.get::<_, i32>(index)).expect("a pid");
        Pids {
            broker: self.broker.pid(),
            postmaster: self.cluster.pid(),
            worker: pid(1),
            session: pid(0),
        }
    }

    // ---- for the report ---------------------------------------------------------------------------------------------

    /// The versions and settings of the servers, by name.
    pub fn about(&mut self) -> Vec<(String, String)> {
        let mut about: Vec<(String, String)> = Vec::new();
        let text = |client: &mut Client, sql: &str| -> String {
            client.query_one(sql, &[]).expect("ask Postgres about itself").get(0)
        };
        about.push(("Postgres".into(), text(&mut self.sql, "show server_version")));
        let version = text(
            &mut self.sql,
            "select extversion::text from pg_extension where extname = 'outbox'",
        );
        about.push(("outbox".into(), format!("{version} {}", commit())));
        let broker_version = self.broker.ctl(&["version"]);
        about.push(("RabbitMQ".into(), broker_version.trim().to_owned()));
        about.push((
            "RabbitMQ, non-default settings".into(),
            format!("vm_memory_high_watermark={BROKER_MEMORY} disk_free_limit=50MB; pinned: one scheduler (+S 1:1)"),
        ));
        about.push((
            "Postgres, non-default settings".into(),
            text(
                &mut self.sql,
                "select string_agg(format('%s=%s', name, setting), ' ' order by name) from pg_settings
                 where source = 'configuration file' and setting is distinct from boot_val
                   and name !~ '^(lc_|listen|port|unix_|DateStyle|TimeZone|log_|default_text|outbox.url|outbox.enabled)'",
            ),
        ));
        about.push((
            "durability".into(),
            text(
                &mut self.sql,
                "select format('fsync=%s synchronous_commit=%s full_page_writes=%s', current_setting('fsync'),
                   current_setting('synchronous_commit'), current_setting('full_page_writes'))",
            ),
        ));
        about
    }
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
    let described = std::process::Command::new("git")
        .args(["describe", "--always", "--dirty"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output();
    described.map_or(String::new(), |output| {
        String::from_utf8_lossy(&output.stdout).trim().to_owned()
    })
}

fn start_cluster(broker: &Broker, conf: &[String]) -> (Cluster, Client) {
    let builder = Cluster::builder()
        .conf("fsync = on")
        .conf(&format!("outbox.url = '{}'", broker.url()))
        .conf(&format!("outbox.exchange = '{EXCHANGE}'"));
    let cluster = conf.iter().fold(builder, |builder, line| builder.conf(line)).start();
    cluster.exec(DB, "create extension outbox");
    let mut sql = cluster.connect(DB);
    wait_until("the worker to be connected", LONG, || {
        let connected = "select exists (select from outbox_worker_status
                                        where alive and state = 'connected' and partitions > 0)";
        sql.query_one(connected, &[]).is_ok_and(|row| row.get::<_, bool>(0))
    });
    (cluster, sql)
}
