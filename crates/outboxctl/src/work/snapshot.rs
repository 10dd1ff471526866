//! The state of a worker at one moment, as its screen shows it.

use super::pass::Passes;
use crate::queries::model::ErrorGroup;
use outbox_core::settle::Ended;
use outbox_worker::{Reason, State};

/// The state of a worker at one moment.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Snapshot {
    /// The time as `HH:MM:SS`, UTC.
    pub clock: String,
    /// The time since the worker started, over all sessions.
    pub up_s: f64,
    pub phase: Phase,
    pub who: Who,
    pub sharing: Sharing,
    /// The number of live workers of the database.
    pub workers: u32,
    /// The partitions of this worker.
    pub waiting: Vec<Waiting>,
    /// The number of partitions that it should have.
    pub desired: usize,
    /// Why the pending messages cannot be counted.
    pub uncounted: Option<String>,
    /// Why the worker delivers nothing at all.
    pub obstacle: Option<String>,
    pub destinations: Vec<DestinationSnapshot>,
    pub claimed: u64,
    pub ended: Ended,
    /// The time since the last heartbeat.
    pub heartbeat_age_s: Option<f64>,
    pub passes: Option<Passes>,
    /// The newest first.
    pub errors: Vec<ErrorGroup>,
    /// The newest last.
    pub log: Vec<LogLine>,
}

/// The worker and its session.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Who {
    pub worker_id: String,
    pub server: String,
    pub database: String,
    pub user: String,
}

/// The state of the session with the database.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Phase {
    #[default]
    Works,
    Lost {
        why: String,
        since_s: f64,
    },
}

/// How the worker shares the work with the other workers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Sharing {
    #[default]
    Leases,
    /// With `--no-leasing`: the worker delivers all partitions.
    Alone,
    /// The setting `leasing` of the outbox is off: workers claim rows of all partitions.
    RowClaims,
}

/// A partition of this worker.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Waiting {
    pub label: String,
    pub epoch: i64,
    /// `None` = not counted.
    pub depth: Option<Depth>,
}

/// The number of pending messages in a partition.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Depth {
    pub pending: i64,
    /// False = the count stopped at its limit, and there are more.
    pub is_all: bool,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct DestinationSnapshot {
    pub name: String,
    pub state: State,
    pub since_s: f64,
    pub reason: Option<Reason>,
    pub detail: Option<String>,
    pub in_flight: usize,
    pub window: usize,
    pub ended: Ended,
}

impl DestinationSnapshot {
    /// The reason and the detail of the state.
    pub fn why(&self) -> String {
        let words = [self.reason.map(Reason::name), self.detail.as_deref()];
        words.into_iter().flatten().collect::<Vec<_>>().join(": ")
    }
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct LogLine {
    pub clock: String,
    pub text: String,
}
