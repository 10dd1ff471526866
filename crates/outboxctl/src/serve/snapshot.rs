//! What the poller reads: one snapshot of the outbox, whose cost does not depend on the number of messages. The pages
//! and /metrics show nothing else, except the messages themselves.

use super::causes::Causes;
use super::session_pool::MonitorSession;
use crate::failure::{Code, Failure};
use crate::queries::model::{
    DestinationRow, ErrorGroup, HealthCheck, Minute, Now, PartitionRow, Passes, Status, WorkerRow,
};
use crate::queries::state::MessageStatus;
use crate::queries::{Fetch, views};
use serde::Deserialize;
use std::time::{SystemTime, UNIX_EPOCH};
use tokio_postgres::error::SqlState;

/// A lane is not counted beyond this.
pub const DEPTH_CAP: i64 = 1000;
/// The most rows of lanes that one count may visit.
const DEPTH_ROWS_MAX: i64 = 50_000;

#[derive(Clone, Debug)]
pub struct MonitorSnapshot {
    /// All other times are by this clock.
    pub now: Now,
    pub server: ServerFacts,
    pub status: Status,
    pub health: Vec<HealthCheck>,
    pub workers: Vec<WorkerRow>,
    /// Of the last minute.
    pub passes: Vec<Passes>,
    pub partitions: Vec<PartitionRow>,
    pub blocked: Vec<BlockedKeyRow>,
    pub destinations: Vec<DestinationRow>,
    pub throughput: Vec<Minute>,
    pub slow: SlowParts,
}

/// What is read less often than the rest, and kept between.
#[derive(Clone, Debug, Default)]
pub struct SlowParts {
    reads: u32,
    pub errors: Vec<RecentError>,
    /// None: the count took too long.
    pub depths: Option<Depths>,
    pub history: Vec<Period>,
    pub latency: Vec<LatencyRow>,
    pub waiting: Option<WaitingCounts>,
    pub failing: Vec<FailingCount>,
}

/// Recent failures with one cause, and how many messages it still holds up. None = not known.
#[derive(Clone, Debug)]
pub struct RecentError {
    pub group: ErrorGroup,
    pub retrying: Option<i64>,
    pub dead: Option<i64>,
}

/// An error that is about no message is resolved after this time.
const RESOLVED_AFTER_S: f64 = 300.0;

impl RecentError {
    /// Whether none of its messages is still retrying or dead.
    pub fn is_resolved(&self) -> bool {
        let is_past = self.group.last_seq.is_some() || self.group.last_age_s > RESOLVED_AFTER_S;
        self.retrying == Some(0) && self.dead == Some(0) && is_past
    }
}

/// The session broke, or the database refuses to answer.
#[derive(Clone, Debug)]
pub struct Lost {
    pub since: SystemTime,
    pub failure: Failure,
}

impl Lost {
    /// Seconds since 1970.
    pub fn since_epoch_s(&self) -> f64 {
        self.since.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
    }

    /// In one line.
    pub fn why(&self) -> String {
        self.failure.to_string().replace('\n', " ")
    }
}

#[derive(Clone, Debug, Deserialize)]
pub struct ServerFacts {
    pub extension_version: String,
    pub server_version: String,
    pub leasing: bool,
    pub lease_ttl_s: Option<f64>,
    pub heartbeat_ttl_s: Option<f64>,
}

const SERVER: &str = "
    select (select x.extversion from pg_extension x where x.extname = 'outbox') as extension_version,
           current_setting('server_version') as server_version,
           (select s.leasing from @extschema@.outbox_settings s) as leasing,
           extract(epoch from current_setting('outbox.lease_ttl', true)::interval)::float8 as lease_ttl_s,
           extract(epoch from current_setting('outbox.heartbeat_ttl', true)::interval)::float8 as heartbeat_ttl_s";

/// The views count dead letters up to this number.
pub const DEAD_CAP: i64 = 10_000;

/// A dead letter that blocks its key; one of each partition.
#[derive(Clone, Debug, Deserialize)]
pub struct BlockedKeyRow {
    pub partition_key: String,
    pub seq: i64,
    pub destination: String,
    pub key: Option<String>,
    pub reason: String,
    /// Whether it blocks the whole partition.
    pub whole: bool,
}

const BLOCKED: &str = "
    select @extschema@.outbox_partition_label(p.partition::integer) as partition_key, d.seq, d.destination, d.key, d.reason,
           exists (select from outbox_internal.destinations() x
                   where x.destination = d.destination and 'ordering=partition' = any (x.options)) as whole
    from @extschema@.outbox_partitions p
    cross join lateral (select x.seq, x.destination, x.key, x.reason from @extschema@.outbox_dead x
                        where x.blocks and x.partition = p.partition limit 1) d
    order by p.partition";

/// The number of messages in each lane, counted up to `cap`.
#[derive(Clone, Debug)]
pub struct Depths {
    pub cap: i64,
    pub lanes: Vec<LaneDepth>,
}

#[derive(Clone, Debug, Deserialize)]
pub struct LaneDepth {
    pub partition_key: String,
    pub depth: i64,
}

const DEPTHS: &str = "
    select @extschema@.outbox_partition_label(l.partition::integer) as partition_key, n.depth
    from outbox_internal.first_shown l
    cross join lateral (select count(*) as depth from (select from @extschema@.outbox o where o.destination = l.destination
                          and o.partition = l.partition limit $1) x) n";

/// Messages of a destination that ended in one period.
#[derive(Clone, Debug, Deserialize)]
pub struct Period {
    pub destination: String,
    /// Seconds since 1970.
    pub start: f64,
    pub length_s: f64,
    pub published: i64,
    pub retried: i64,
    pub failed: i64,
}

const HISTORY: &str = "
    select destination, extract(epoch from start)::float8 as start, extract(epoch from length)::float8 as length_s,
           published, retried, failed
    from @extschema@.outbox_destination_throughput";

/// The delivery times of a destination: how many messages took less than a bound.
#[derive(Clone, Debug, Deserialize)]
pub struct LatencyRow {
    pub destination: String,
    /// In ms, ascending; None = infinite.
    pub below_ms: Vec<Option<f64>>,
    pub messages: Vec<i64>,
    pub sum_ms: f64,
}

const LATENCY: &str = "
    select destination, array_agg(nullif(below_ms, 'Infinity') order by below_ms) as below_ms,
           array_agg(messages order by below_ms) as messages, min(sum_ms) as sum_ms
    from @extschema@.outbox_latency group by destination";

/// The numbers of messages in `outbox_waiting`.
#[derive(Clone, Debug, Deserialize)]
pub struct WaitingCounts {
    pub retrying: i64,
    pub scheduled: i64,
    /// Behind a message that failed, counted to `WAITING_CAP`.
    pub blocked: i64,
    /// Only the first `WAITING_CAP` by time were counted for `retrying` and `scheduled`.
    is_cut: bool,
}

pub const WAITING_CAP: i64 = 1000;

impl WaitingCounts {
    /// A number of messages with a time, with a plus if there may be more. Others may have filled the count.
    pub fn shown(&self, n: i64) -> String {
        match (n, self.is_cut) {
            (0, true) => "–".to_owned(),
            (n, true) => format!("{n}+"),
            (n, false) => n.to_string(),
        }
    }
}

const COUNTS: &str = "
    with due as materialized (
      select w.state = 'b' as retries from @extschema@.outbox_waiting w
      where w.due_at is not null order by w.due_at limit $1)
    select count(*) filter (where retries) as retrying, count(*) filter (where not retries) as scheduled,
           count(*) >= $1 as is_cut, (select count(*) from (select from @extschema@.outbox_waiting where state = 'g' limit $1) g) as blocked
    from due";

/// How many messages of a destination have failed three times or more, and are retried. None of a destination has no
/// row.
#[derive(Clone, Debug, Deserialize)]
pub struct FailingCount {
    pub destination: String,
    pub messages: i64,
}

/// As the check `retrying` of outbox_health counts them, by the same index.
const FAILING: &str = "
    select destination, count(*) as messages
    from (select w.destination from @extschema@.outbox_waiting w where w.state = 'b' and w.attempts >= 3 limit 10000) w group by 1";

/// The most error groups on the overview.
const ERRORS_MAX: usize = 12;

/// One of this many reads includes the slow part.
const SLOW_EVERY: u32 = 5;

impl MonitorSnapshot {
    pub async fn read(session: &MonitorSession, slow: &mut SlowParts) -> Result<Self, Failure> {
        let (now, server, status, health, workers, passes, partitions, blocked, destinations, throughput) = tokio::try_join!(
            session.fetch(views::NOW, &[]),
            session.fetch(SERVER, &[]),
            session.fetch(views::STATUS, &[]),
            session.fetch(views::HEALTH, &[]),
            session.fetch(views::WORKERS, &[]),
            session.fetch(views::PASSES, &[]),
            session.fetch(views::PARTITIONS, &[]),
            session.fetch(BLOCKED, &[]),
            session.fetch(views::DESTINATIONS, &[]),
            session.fetch(views::THROUGHPUT, &[]),
        )?;
        if slow.reads.is_multiple_of(SLOW_EVERY) {
            slow.read(session).await?;
        }
        slow.reads = slow.reads.wrapping_add(1);
        Ok(Self {
            now: one(now)?,
            server: one(server)?,
            status: one(status)?,
            health,
            workers,
            passes,
            partitions,
            blocked,
            destinations,
            throughput,
            slow: slow.clone(),
        })
    }

    /// About how many lanes hold messages.
    pub fn lanes(&self) -> usize {
        let depths = self.slow.depths.as_ref();
        depths.map_or(self.partitions.len(), |depths| depths.lanes.len())
    }

    pub fn depth_of(&self, partition_key: &str) -> Option<i64> {
        let lanes = self.slow.depths.as_ref()?.lanes.iter();
        let of_partition = lanes.filter(|lane| lane.partition_key == partition_key);
        Some(of_partition.map(|lane| lane.depth).sum())
    }

    /// Changes whenever a message changes its state: a page with messages then requests them again.
    pub fn change(&self) -> String {
        let s = &self.status;
        let counts = (s.pending, s.in_flight, s.dead, s.published_total, s.failed_total);
        format!("{counts:?}")
    }
}

impl SlowParts {
    async fn read(&mut self, session: &MonitorSession) -> Result<(), Failure> {
        let retrying = Causes::read(session, MessageStatus::Retrying).await?;
        let dead = Causes::read(session, MessageStatus::Dead).await?;
        let groups: Vec<ErrorGroup> = session.fetch(views::ERRORS, &[]).await?;
        let recent = groups.into_iter().take(ERRORS_MAX).map(|group| RecentError {
            retrying: retrying.number(&group.destination, &group.message),
            dead: dead.number(&group.destination, &group.message),
            group,
        });
        self.errors = recent.collect();
        self.history = session.fetch(HISTORY, &[]).await?;
        self.latency = session.fetch(LATENCY, &[]).await?;
        self.waiting = session.fetch(COUNTS, &[&WAITING_CAP]).await?.into_iter().next();
        self.failing = session.fetch(FAILING, &[]).await?;
        let lanes = self
            .depths
            .as_ref()
            .map_or(16, |depths| depths.lanes.len().max(1) as i64);
        let cap = match DEPTH_ROWS_MAX / lanes {
            rows if rows >= DEPTH_CAP => DEPTH_CAP,
            _ => 100,
        };
        self.depths = match session.fetch(DEPTHS, &[&cap]).await {
            Err(failure) if failure.is(&SqlState::QUERY_CANCELED) => None,
            lanes => Some(Depths { cap, lanes: lanes? }),
        };
        Ok(())
    }
}

fn one<T>(rows: Vec<T>) -> Result<T, Failure> {
    let none = || Failure::new(Code::Incompatible, "a view of the extension gave no row");
    rows.into_iter().next().ok_or_else(none)
}
