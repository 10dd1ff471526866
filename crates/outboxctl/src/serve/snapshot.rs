//! What the poller reads: one picture of the outbox, whose cost does not depend on how much waits. The pages and /metrics
//! show nothing else, but for the messages themselves.

use super::session::{Session, Trouble};
use crate::failure::{Code, Failure};
use serde::Deserialize;

/// Beyond this a lane is not counted further.
pub const DEPTH_CAP: i64 = 1000;
/// Rows of lanes that one look at the depths may visit.
const DEPTH_ROWS_MAX: i64 = 50_000;

#[derive(Clone, Debug)]
pub struct Snapshot {
    pub server: Server,
    pub status: Status,
    pub health: Vec<Check>,
    pub workers: Vec<Worker>,
    pub partitions: Vec<Partition>,
    pub blocked: Vec<Blocked>,
    pub destinations: Vec<Destination>,
    pub throughput: Vec<Minute>,
    pub errors: Vec<ErrorGroup>,
    /// None: the look took too long.
    pub depths: Option<Depths>,
}

#[derive(Clone, Debug, Deserialize)]
pub struct Server {
    pub database: String,
    pub extension_version: String,
    pub server_version: String,
    pub standby: bool,
    pub leasing: bool,
    pub lease_ttl_s: Option<f64>,
    pub heartbeat_ttl_s: Option<f64>,
}

const SERVER: &str = "
    select current_database() as database,
           (select x.extversion from pg_extension x where x.extname = 'outbox') as extension_version,
           current_setting('server_version') as server_version, pg_is_in_recovery() as standby,
           (select s.leasing from outbox_settings s) as leasing,
           extract(epoch from current_setting('outbox.lease_ttl', true)::interval)::float8 as lease_ttl_s,
           extract(epoch from current_setting('outbox.heartbeat_ttl', true)::interval)::float8 as heartbeat_ttl_s";

#[derive(Clone, Debug, Deserialize)]
pub struct Status {
    /// Seconds since 1970, by the clock of the server, which all other times are of.
    pub now: f64,
    pub pending: Option<i64>,
    pub in_flight: Option<i64>,
    /// Counted to 10000.
    pub dead: i64,
    pub oldest_s: Option<f64>,
    pub published_total: Option<i64>,
    pub failed_total: Option<i64>,
    pub published_per_s: Option<f64>,
    pub failed_per_s: Option<f64>,
}

pub const DEAD_CAP: i64 = 10_000;

const STATUS: &str = "
    select extract(epoch from clock_timestamp())::float8 as now, pending, in_flight, dead,
           extract(epoch from oldest_pending_age)::float8 as oldest_s, published_total, failed_total,
           published_per_s::float8, failed_per_s::float8
    from outbox_status";

/// A line of outbox_health.
#[derive(Clone, Debug, Deserialize)]
pub struct Check {
    pub check: String,
    pub ok: bool,
    pub problem: Option<String>,
    pub remedy: Option<String>,
}

const HEALTH: &str = r#"select "check", ok, problem, remedy from outbox_health"#;

#[derive(Clone, Debug, Deserialize)]
pub struct Worker {
    pub worker_id: String,
    pub pid: Option<i64>,
    pub state: String,
    pub reason: Option<String>,
    pub detail: Option<String>,
    pub alive: bool,
    pub heartbeat_age_s: f64,
    pub heartbeat_ttl_s: f64,
    pub partitions: i64,
    pub started_at: f64,
    pub tick: Option<Tick>,
}

/// The last pass of a worker that did something.
#[derive(Clone, Debug, Deserialize)]
pub struct Tick {
    pub at: f64,
    pub claimed: i64,
    pub published: i64,
    pub failed: i64,
    pub duration_ms: f64,
}

const WORKERS: &str = "
    select s.worker_id, s.pid, s.state, s.reason, s.detail, s.alive, s.partitions,
           extract(epoch from clock_timestamp() - w.heartbeat_at)::float8 as heartbeat_age_s,
           extract(epoch from s.heartbeat_ttl)::float8 as heartbeat_ttl_s,
           extract(epoch from s.started_at)::float8 as started_at,
           (select jsonb_build_object('at', extract(epoch from t.at)::float8, 'claimed', t.claimed, 'published', t.published,
                                      'failed', t.failed, 'duration_ms', t.duration_ms)
            from outbox_ticks t where t.worker_id = s.worker_id order by t.at desc limit 1) as tick
    from outbox_worker_status s join outbox_workers w on w.worker_id = s.worker_id
    order by s.worker_id limit 200";

#[derive(Clone, Debug, Deserialize)]
pub struct Partition {
    pub partition_key: String,
    pub lease_owner: Option<String>,
    pub lease_ttl_s: Option<f64>,
    pub lease_epoch: i64,
    pub first_waiting_seq: Option<i64>,
}

const PARTITIONS: &str = "
    select partition_key, lease_owner, extract(epoch from lease_ttl)::float8 as lease_ttl_s, lease_epoch, first_waiting_seq
    from outbox_partition_status order by length(partition_key), partition_key";

/// A dead letter that holds up its key; one of each partition.
#[derive(Clone, Debug, Deserialize)]
pub struct Blocked {
    pub partition_key: String,
    pub seq: i64,
    pub destination: String,
    pub key: Option<String>,
    pub reason: String,
}

const BLOCKED: &str = "
    select outbox_partition_label(p.partition::integer) as partition_key, d.seq, d.destination, d.key, d.reason
    from outbox_partitions p
    cross join lateral (select x.seq, x.destination, x.key, x.reason from outbox_dead x
                        where x.blocks and x.partition = p.partition limit 1) d
    order by p.partition";

#[derive(Clone, Debug, Deserialize)]
pub struct Destination {
    pub destination: String,
    /// settings, or the name of a foreign data wrapper; None: there is no such destination.
    pub described_by: Option<String>,
    pub url: Option<String>,
    pub state: String,
    /// By outbox_pause(): the state is paused, too, where delivery is switched off.
    pub paused: bool,
    pub since: Option<f64>,
    pub reason: Option<String>,
    pub detail: Option<String>,
    pub oldest_s: Option<f64>,
    pub in_flight: Option<i64>,
    pub published_total: Option<i64>,
    pub failed_total: Option<i64>,
    pub dead_total: Option<i64>,
    pub released_total: Option<i64>,
    pub published_per_s: Option<f64>,
    pub p50_ms: Option<f64>,
    pub p95_ms: Option<f64>,
    pub p99_ms: Option<f64>,
    pub pending: Option<i64>,
    pub max_pending: Option<i64>,
}

const DESTINATIONS: &str = "
    select s.destination, s.described_by, s.state, extract(epoch from s.since)::float8 as since, s.reason, s.detail,
           extract(epoch from s.oldest_pending_age)::float8 as oldest_s, s.in_flight, s.published_total, s.failed_total,
           s.dead_total, s.released_total, s.published_per_s::float8, s.p50_ms::float8, s.p95_ms::float8, s.p99_ms::float8,
           s.pending, s.max_pending,
           exists (select from outbox_paused z where z.destination = s.destination) as paused,
           case when s.described_by = 'settings' then nullif(current_setting('outbox.url', true), '')
                else (select o.option_value from pg_foreign_server f, pg_options_to_table(f.srvoptions) o
                      where f.srvname = s.destination and o.option_name = 'url') end as url
    from outbox_destination_status s";

#[derive(Clone, Debug, Deserialize)]
pub struct Minute {
    pub at: f64,
    pub published: i64,
    pub retried: i64,
    pub failed: i64,
    pub p95_ms: Option<f64>,
}

const THROUGHPUT: &str = "
    select extract(epoch from minute)::float8 as at, published, retried, failed, p95_ms from outbox_throughput order by minute";

#[derive(Clone, Debug, Deserialize)]
pub struct ErrorGroup {
    pub destination: String,
    pub kind: String,
    pub message: String,
    pub count: i64,
    pub first_at: f64,
    pub last_at: f64,
    pub last_seq: Option<i64>,
}

const ERRORS: &str = "
    select destination, kind, message, count, extract(epoch from first_at)::float8 as first_at,
           extract(epoch from last_at)::float8 as last_at, last_seq
    from outbox_errors order by last_at desc limit 12";

/// How much waits in each lane, counted no further than `cap`.
#[derive(Clone, Debug)]
pub struct Depths {
    pub cap: i64,
    pub lanes: Vec<Lane>,
}

#[derive(Clone, Debug, Deserialize)]
pub struct Lane {
    pub partition_key: String,
    pub depth: i64,
}

const DEPTHS: &str = "
    select outbox_partition_label(l.partition::integer) as partition_key, n.depth
    from outbox_first_pending l
    cross join lateral (select count(*) as depth from (select from outbox o where o.destination = l.destination
                          and o.partition = l.partition limit $1) x) n";

/// What is read more seldom than the rest, and kept between.
#[derive(Default)]
pub struct Slow {
    reads: u32,
    errors: Vec<ErrorGroup>,
    depths: Option<Depths>,
}

/// Of this many reads one brings the slow part anew.
const SLOW_EVERY: u32 = 5;

impl Snapshot {
    pub async fn read(session: &Session, slow: &mut Slow) -> Result<Self, Trouble> {
        let is_slow_turn = slow.reads.is_multiple_of(SLOW_EVERY);
        slow.reads = slow.reads.wrapping_add(1);
        let (server, status, health, workers, partitions, blocked, destinations, throughput) = tokio::try_join!(
            session.rows(SERVER, &[]),
            session.rows(STATUS, &[]),
            session.rows(HEALTH, &[]),
            session.rows(WORKERS, &[]),
            session.rows(PARTITIONS, &[]),
            session.rows(BLOCKED, &[]),
            session.rows(DESTINATIONS, &[]),
            session.rows(THROUGHPUT, &[]),
        )?;
        if is_slow_turn {
            slow.errors = session.rows(ERRORS, &[]).await?;
            slow.depths = match depths(session, slow.depths.as_ref()).await {
                Err(trouble) if trouble.timed_out => None,
                depths => Some(depths?),
            };
        }
        Ok(Self {
            server: one(server)?,
            status: one(status)?,
            health,
            workers,
            partitions,
            blocked,
            destinations,
            throughput,
            errors: slow.errors.clone(),
            depths: slow.depths.clone(),
        })
    }

    /// p95 from commit to confirm, of the last minute that had a confirm.
    pub fn p95_ms(&self) -> Option<f64> {
        self.throughput.iter().rev().take(5).find_map(|minute| minute.p95_ms)
    }

    pub fn live_workers(&self) -> usize {
        self.workers.iter().filter(|worker| worker.alive).count()
    }

    /// About how many lanes hold messages.
    pub fn lanes(&self) -> usize {
        self.depths
            .as_ref()
            .map_or(self.partitions.len(), |depths| depths.lanes.len())
    }

    pub fn depth_of(&self, partition_key: &str) -> Option<i64> {
        let lanes = self.depths.as_ref()?.lanes.iter();
        Some(
            lanes
                .filter(|lane| lane.partition_key == partition_key)
                .map(|lane| lane.depth)
                .sum(),
        )
    }

    /// Grows whenever a message changes its state: who shows messages asks for them again.
    pub fn change(&self) -> String {
        let Status {
            pending,
            in_flight,
            dead,
            published_total,
            failed_total,
            ..
        } = &self.status;
        format!("{pending:?} {in_flight:?} {dead} {published_total:?} {failed_total:?}")
    }
}

async fn depths(session: &Session, before: Option<&Depths>) -> Result<Depths, Trouble> {
    let lanes = before.map_or(16, |depths| depths.lanes.len().max(1) as i64);
    let cap = match DEPTH_ROWS_MAX / lanes {
        rows if rows >= DEPTH_CAP => DEPTH_CAP,
        _ => 100,
    };
    let lanes = session.rows(DEPTHS, &[&cap]).await?;
    Ok(Depths { cap, lanes })
}

fn one<T>(rows: Vec<T>) -> Result<T, Trouble> {
    let none = || Failure::new(Code::Incompatible, "a view of the extension gave no row");
    rows.into_iter().next().ok_or_else(|| none().into())
}
