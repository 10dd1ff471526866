//! What `work` reports of its worker: its passes, and what the board shows of it. The worker's thread writes it, and
//! the thread that draws copies it. Each holds the lock only while it copies, never while it draws or waits for the
//! server. So a terminal that does not read its output cannot delay the worker.

pub mod pass;

use crate::format::clock;
use outbox_core::engine::Sharing;
use outbox_core::settle::Ended;
use outbox_worker::ConnectionStatus;
use pass::{PassReport, PassSum};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};
use tokio::sync::Notify;

/// The shortest time between two updates by the worker.
pub const SHOW_EVERY: Duration = Duration::from_millis(50);
const LOG_MAX: usize = 500;

/// The state of a worker.
#[derive(Clone, Debug)]
pub struct OwnWorker {
    /// When the worker started, over all sessions.
    pub began: Instant,
    /// `None` = it had no session yet.
    pub facts: Option<WorkerFacts>,
    /// Why the session is lost, and since when.
    pub lost: Option<(String, Instant)>,
    pub heartbeat_at: Option<Instant>,
    pub last_pass: PassReport,
    /// The passes of the window, or of the whole run.
    pub passes: PassSum,
    pub window: Option<Duration>,
    /// The newest first.
    pub log: VecDeque<LogLine>,
}

/// The part of it that the worker writes during a session.
#[derive(Clone, Debug)]
pub struct WorkerFacts {
    pub who: WorkerIdentity,
    pub sharing: Sharing,
    /// With `--no-leasing` it delivers all partitions.
    pub is_alone: bool,
    /// The number of live workers of the database.
    pub workers: u32,
    /// The number of partitions that it leases, and that it should lease.
    pub owned: usize,
    pub desired: usize,
    /// Why it delivers nothing at all.
    pub obstacle: Option<String>,
    pub destinations: Vec<DestinationFacts>,
    pub claimed: u64,
    pub ended: Ended,
}

/// The worker and its session.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct WorkerIdentity {
    pub worker_id: String,
    pub server: String,
    pub database: String,
    pub user: String,
}

#[derive(Clone, Debug)]
pub struct DestinationFacts {
    pub name: String,
    pub status: ConnectionStatus,
    /// When the state last changed.
    pub since: Instant,
    pub in_flight: usize,
}

#[derive(Clone, Debug)]
pub struct LogLine {
    /// Each line has the next number.
    pub number: u64,
    /// `HH:MM:SS`, UTC.
    pub clock: String,
    pub text: String,
}

/// Shared by the worker's thread and the screen's threads.
pub struct WorkerProgress {
    worker: Mutex<OwnWorker>,
    /// Whether the worker must claim nothing. Written by the screen; read by the worker before each pass.
    holds: AtomicBool,
    /// Notified when the worker first writes its state.
    begun: Notify,
}

impl OwnWorker {
    fn new() -> Self {
        Self {
            began: Instant::now(),
            facts: None,
            lost: None,
            heartbeat_at: None,
            last_pass: PassReport::default(),
            passes: PassSum::new(),
            window: None,
            log: VecDeque::new(),
        }
    }
}

impl WorkerProgress {
    pub fn new() -> Self {
        Self {
            worker: Mutex::new(OwnWorker::new()),
            holds: AtomicBool::new(false),
            begun: Notify::new(),
        }
    }

    fn worker(&self) -> MutexGuard<'_, OwnWorker> {
        self.worker.lock().unwrap_or_else(PoisonError::into_inner)
    }

    // ---- written by the worker --------------------------------------------------------------------------------------

    pub fn show(&self, facts: WorkerFacts) {
        let mut worker = self.worker();
        worker.lost = None;
        if worker.facts.replace(facts).is_none() {
            self.begun.notify_one();
        }
    }

    /// Records that the session is lost, and that the worker tries again.
    pub fn lose(&self, why: &str) {
        let mut worker = self.worker();
        let since = worker.lost.as_ref().map_or_else(Instant::now, |(_, since)| *since);
        worker.lost = Some((why.to_owned(), since));
    }

    /// Records the end of a pass, with the sums of the window or of the run.
    pub fn pass(&self, pass: &PassReport, passes: &PassSum, window: Option<Duration>) {
        let mut worker = self.worker();
        if pass.renewed_heartbeat {
            worker.heartbeat_at = Some(Instant::now());
        }
        (worker.last_pass, worker.passes, worker.window) = (pass.clone(), passes.clone(), window);
    }

    /// Adds a line that would be printed without a screen.
    pub fn log(&self, text: &str) {
        let since_1970 = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let mut worker = self.worker();
        let line = LogLine {
            number: worker.log.front().map_or(0, |newest| newest.number + 1),
            clock: clock(since_1970.unwrap_or_default().as_secs_f64()),
            text: text.to_owned(),
        };
        worker.log.push_front(line);
        worker.log.truncate(LOG_MAX);
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
        self.worker().facts.is_some()
    }

    pub fn hold(&self, holds: bool) {
        self.holds.store(holds, SeqCst);
    }

    pub fn copy(&self) -> OwnWorker {
        self.worker().clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_log_is_bounded() {
        let progress = WorkerProgress::new();
        for n in 0..LOG_MAX * 2 {
            progress.log(&format!("line {n}"));
        }
        let log = progress.copy().log;
        assert_eq!(log.len(), LOG_MAX);
        assert_eq!(log.front().map(|line| &*line.text), Some("line 999"));
    }
}
