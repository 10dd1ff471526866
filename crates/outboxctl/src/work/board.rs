//! The board between the worker and its screen. The worker's thread writes its state, the task that counts pending
//! messages adds its counts, and the thread that draws reads both. Each holds the lock only while it copies, never
//! while it draws or waits for the server. So a terminal that does not read its output cannot delay the worker.

use super::pass::Passes;
use super::snapshot::{Depth, DestinationSnapshot, LogLine, Phase, Sharing, Snapshot, Waiting, Who};
use crate::format::clock;
use crate::queries::model::ErrorGroup;
use outbox_core::engine::Held;
use outbox_core::error_group;
use outbox_core::settle::Ended;
use outbox_worker::{Reason, State};
use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};
use tokio::sync::Notify;

/// The shortest time between two updates of the board by the worker.
pub const SHOW_EVERY: Duration = Duration::from_millis(50);
const LOG_MAX: usize = 500;
const ERRORS_MAX: usize = 50;

/// The state of the worker, as the worker itself writes it.
#[derive(Clone)]
pub struct Facts {
    pub who: Who,
    pub sharing: Sharing,
    /// The number of live workers of the database.
    pub workers: u32,
    pub leases: Vec<Held>,
    pub desired: usize,
    pub obstacle: Option<String>,
    pub destinations: Vec<DestinationFacts>,
    pub claimed: u64,
    pub ended: Ended,
}

#[derive(Clone)]
pub struct DestinationFacts {
    pub name: String,
    pub state: State,
    pub since: Instant,
    pub reason: Option<Reason>,
    pub detail: Option<String>,
    pub in_flight: usize,
    pub window: usize,
    pub ended: Ended,
}

/// Shared by the worker's thread, the counting task and the screen's threads.
pub struct Board {
    began: Instant,
    inner: Mutex<Inner>,
    /// Whether the worker must claim nothing. Written by the screen; read by the worker before each pass.
    holds: AtomicBool,
    /// Notified when the worker first writes its state.
    begun: Notify,
}

#[derive(Default)]
struct Inner {
    facts: Option<Facts>,
    lost: Option<(String, Instant)>,
    pending: Option<Result<BTreeMap<i16, Depth>, String>>,
    passes: Option<(Passes, Instant)>,
    heartbeat_at: Option<Instant>,
    log: VecDeque<LogLine>,
    /// The newest first.
    errors: VecDeque<Failed>,
}

struct Failed {
    destination: String,
    kind: &'static str,
    message: String,
    count: i64,
    first: Instant,
    last: Instant,
    seq: i64,
}

impl Board {
    pub fn new() -> Self {
        Self {
            began: Instant::now(),
            inner: Mutex::default(),
            holds: AtomicBool::new(false),
            begun: Notify::new(),
        }
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    // ---- written by the worker --------------------------------------------------------------------------------------

    pub fn show(&self, facts: Facts) {
        let mut inner = self.inner();
        inner.lost = None;
        if inner.facts.replace(facts).is_none() {
            self.begun.notify_one();
        }
    }

    /// Records that the session is lost, and that the worker tries again.
    pub fn lose(&self, why: &str) {
        let mut inner = self.inner();
        let since = inner.lost.as_ref().map_or_else(Instant::now, |(_, since)| *since);
        inner.lost = Some((why.to_owned(), since));
    }

    /// Records the end of a pass, with the sums of the window or of the run.
    pub fn pass(&self, passes: Passes) {
        let (mut inner, now) = (self.inner(), Instant::now());
        if passes.last.renewed_heartbeat {
            inner.heartbeat_at = Some(now);
        }
        inner.passes = Some((passes, now));
    }

    /// Adds a line that would be printed without a screen.
    pub fn log(&self, text: &str) {
        let mut inner = self.inner();
        inner.log.push_back(LogLine {
            clock: clock(epoch_s()),
            text: text.to_owned(),
        });
        if inner.log.len() > LOG_MAX {
            inner.log.pop_front();
        }
    }

    /// Records that a message failed. Failures with the same cause are one group, as in outbox_errors.
    pub fn fail(&self, destination: &str, seq: i64, error: &str, is_dead: bool) {
        let (kind, message, now) = (
            error_group::kind(error, is_dead),
            error_group::group(error),
            Instant::now(),
        );
        let mut inner = self.inner();
        let known = (inner.errors.iter())
            .position(|known| (&*known.destination, known.kind, &*known.message) == (destination, kind, &*message));
        let mut failed = known.and_then(|at| inner.errors.remove(at)).unwrap_or_else(|| Failed {
            destination: destination.to_owned(),
            kind,
            message,
            count: 0,
            first: now,
            last: now,
            seq,
        });
        (failed.count, failed.last, failed.seq) = (failed.count + 1, now, seq);
        inner.errors.push_front(failed);
        inner.errors.truncate(ERRORS_MAX);
    }

    pub fn holds(&self) -> bool {
        self.holds.load(SeqCst)
    }

    // ---- for the screen ---------------------------------------------------------------------------------------------

    /// Waits until the worker has written its state. Until then its session may ask for a password on the terminal.
    pub async fn begun(&self) {
        self.begun.notified().await;
    }

    pub fn has_begun(&self) -> bool {
        self.inner().facts.is_some()
    }

    pub fn hold(&self, holds: bool) {
        self.holds.store(holds, SeqCst);
    }

    /// The partitions of this worker.
    pub fn partitions(&self) -> Vec<i16> {
        let inner = self.inner();
        let leases = inner.facts.iter().flat_map(|facts| &facts.leases);
        leases.map(|(partition, _)| partition.as_i16()).collect()
    }

    pub fn count(&self, pending: Result<BTreeMap<i16, Depth>, String>) {
        self.inner().pending = Some(pending);
    }

    /// The current state. `None` = the worker has written no state yet.
    pub fn snapshot(&self) -> Option<Snapshot> {
        let now = Instant::now();
        let age_s = |at: Instant| now.saturating_duration_since(at).as_secs_f64();
        let now_epoch_s = epoch_s();
        let inner = self.inner();
        let facts = inner.facts.clone()?;
        let depth = |partition: i16| match &inner.pending {
            Some(Ok(pending)) => pending.get(&partition).copied(),
            _ => None,
        };
        let waiting = facts.leases.iter().map(|(partition, epoch)| Waiting {
            label: partition.label(),
            epoch: *epoch,
            depth: depth(partition.as_i16()),
        });
        let destinations = facts.destinations.iter().map(|destination| DestinationSnapshot {
            name: destination.name.clone(),
            state: destination.state,
            since_s: age_s(destination.since),
            reason: destination.reason,
            detail: destination.detail.clone(),
            in_flight: destination.in_flight,
            window: destination.window,
            ended: destination.ended,
        });
        let errors = inner.errors.iter().map(|failed| ErrorGroup {
            destination: failed.destination.clone(),
            kind: failed.kind.to_owned(),
            message: failed.message.clone(),
            count: failed.count,
            first_at: now_epoch_s - age_s(failed.first),
            last_at: now_epoch_s - age_s(failed.last),
            first_age_s: age_s(failed.first),
            last_age_s: age_s(failed.last),
            last_seq: Some(failed.seq),
        });
        Some(Snapshot {
            up_s: age_s(self.began),
            clock: clock(now_epoch_s),
            waiting: waiting.collect(),
            uncounted: match &inner.pending {
                Some(Err(why)) => Some(why.clone()),
                _ => None,
            },
            destinations: destinations.collect(),
            errors: errors.collect(),
            log: inner.log.iter().cloned().collect(),
            heartbeat_age_s: inner.heartbeat_at.map(age_s),
            passes: inner.passes.clone().map(|(passes, at)| Passes {
                refresh_s: passes.refresh_s.map(|left_s| (left_s - age_s(at)).max(0.0)),
                ..passes
            }),
            phase: match &inner.lost {
                Some((why, since)) => Phase::Lost {
                    why: why.clone(),
                    since_s: age_s(*since),
                },
                None => Phase::Works,
            },
            who: facts.who,
            sharing: facts.sharing,
            workers: facts.workers,
            desired: facts.desired,
            obstacle: facts.obstacle,
            claimed: facts.claimed,
            ended: facts.ended,
        })
    }
}

/// Seconds since 1970.
fn epoch_s() -> f64 {
    let since_1970 = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since_1970.unwrap_or_default().as_secs_f64()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_with_one_cause_are_one_group_and_the_newest_group_is_first() {
        let board = Board::new();
        for (seq, error) in [
            (1, "unroutable: 312 NO_ROUTE"),
            (2, "nacked by the broker"),
            (3, "unroutable: 312 NO_ROUTE"),
        ] {
            board.fail("default", seq, error, false);
        }
        let inner = board.inner();
        let groups = inner
            .errors
            .iter()
            .map(|failed| (failed.kind, failed.count, failed.seq));
        assert_eq!(groups.collect::<Vec<_>>(), [("unroutable", 2, 3), ("nacked", 1, 2)]);
    }

    #[test]
    fn the_log_and_the_errors_are_bounded() {
        let board = Board::new();
        for n in 0..LOG_MAX as i64 * 2 {
            board.log(&format!("line {n}"));
            board.fail(&format!("destination {n}"), n, "nacked by the broker", false);
        }
        let inner = board.inner();
        assert_eq!((inner.log.len(), inner.errors.len()), (LOG_MAX, ERRORS_MAX));
        assert_eq!(inner.log.back().map(|line| &*line.text), Some("line 999"));
        assert_eq!(inner.errors.front().map(|failed| failed.seq), Some(999));
    }
}
