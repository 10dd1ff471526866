//! How things are with a worker at one moment, as its screen shows it.

use super::pass::Passes;
use crate::queries::model::ErrorGroup;
use outbox_core::settle::Ended;
use outbox_worker::{Reason, State};

/// How things are with a worker at one moment.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Snapshot {
    /// Hour, minute and second, UTC.
    pub clock: String,
    pub up_s: f64,
    pub phase: Phase,
    pub who: Who,
    pub sharing: Sharing,
    /// Workers of the database that live.
    pub workers: u32,
    /// Its partitions, and how many it should have.
    pub waiting: Vec<Waiting>,
    pub desired: usize,
    /// Why nobody can tell what waits.
    pub uncounted: Option<String>,
    /// Why it delivers nothing at all.
    pub obstacle: Option<String>,
    pub destinations: Vec<DestinationSnapshot>,
    pub claimed: u64,
    pub ended: Ended,
    /// Since it last told that it lives.
    pub heartbeat_age_s: Option<f64>,
    pub passes: Option<Passes>,
    /// The newest first.
    pub errors: Vec<ErrorGroup>,
    /// The newest last.
    pub log: Vec<LogLine>,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Who {
    pub worker_id: String,
    pub server: String,
    pub database: String,
    pub user: String,
}

/// The session with the database.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Phase {
    #[default]
    Works,
    Lost {
        why: String,
        since_s: f64,
    },
}

/// How it shares the work with others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Sharing {
    #[default]
    Leases,
    /// `--no-leasing`
    Alone,
    /// `leasing` of the outbox is off.
    RowClaims,
}

/// A partition of this worker.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Waiting {
    pub label: String,
    pub epoch: i64,
    /// None = nobody has counted.
    pub depth: Option<Depth>,
}

/// How many messages wait.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Depth {
    pub pending: i64,
    /// Else there are more.
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
    /// Why it is as it is.
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
