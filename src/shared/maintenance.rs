//! What maintenance of a database knows from one run to the next, because each run is a process: when the next run is
//! due, and where it continues. Maintenance writes it, workers request runs, sessions lower a time at COMMIT, and the
//! launcher reads it.

use std::sync::atomic::{
    AtomicI64, AtomicU32,
    Ordering::{Relaxed, SeqCst},
};

/// No time or position is known.
const NONE: i64 = i64::MAX;

/// A number that one run leaves to the next; None = nothing.
#[repr(C)]
pub struct OptionalI64(AtomicI64);

impl OptionalI64 {
    pub fn get(&self) -> Option<i64> {
        Some(self.0.load(SeqCst)).filter(|value| *value < NONE)
    }

    pub fn set(&self, value: Option<i64>) {
        self.0.store(value.unwrap_or(NONE), SeqCst);
    }

    /// Stores a value if it is lower than the stored one. Returns whether it was.
    pub fn lower(&self, value: i64) -> bool {
        self.0.fetch_min(value, SeqCst) > value
    }

    pub fn take(&self) -> Option<i64> {
        Some(self.0.swap(NONE, SeqCst)).filter(|value| *value < NONE)
    }
}

#[repr(C)]
pub struct MaintenanceState {
    /// Grows when a run is requested at once. Written by workers; read by the launcher and maintenance.
    requests: AtomicU32,
    /// `requests` as of the last run. Written by maintenance; read by maintenance and the launcher.
    requests_seen: AtomicU32,
    /// The number of runs that reached their end. Written by maintenance; read by the launcher.
    runs: AtomicU32,
    /// 1 = waiting messages were counted since the shared memory was created. Written by maintenance; read by
    /// maintenance and workers.
    counted: AtomicU32,
    /// When the next run is due, in µs since 1970. Maintenance writes this field and those below; the launcher reads
    /// this one.
    pub due_us: OptionalI64,
    /// The number of calls of the workers when the last run began.
    pub calls_seen: OptionalI64,
    /// When a large backlog is counted again, in µs since 1970.
    pub large_count_due_us: OptionalI64,
    /// The number of waiting messages at the last count, as the counter had it.
    pub pending_seen: OptionalI64,
    /// When the next round begins, in µs since 1970. A round checks events and failed attempts from the start again.
    pub round_due_us: OptionalI64,
    /// The seq up to which this round has checked events.
    pub events_reached: OptionalI64,
    /// The seq up to which this round has checked failed attempts.
    pub attempts_reached: OptionalI64,
    /// When the first message expires that no search has met yet, in µs since 1970. Sessions lower it at COMMIT; the
    /// launcher reads it.
    pub expires_us: OptionalI64,
    /// The block of outbox at which the search for expired messages continues; None = no search is in progress.
    pub expiry_block: OptionalI64,
    /// When the first message expires that this search has met and left, in µs since 1970.
    pub left_expires_us: OptionalI64,
    /// The block up to which outbox was searched for messages that expire, after a start; used if the count did not
    /// reach all messages.
    pub unknown_block: OptionalI64,
}

impl MaintenanceState {
    pub fn forget(&self) {
        for count in [&self.requests, &self.requests_seen, &self.runs, &self.counted] {
            count.store(0, SeqCst);
        }
        self.due_us.set(Some(0));
        self.large_count_due_us.set(Some(0));
        self.round_due_us.set(Some(0));
        for value in [
            &self.calls_seen,
            &self.pending_seen,
            &self.events_reached,
            &self.attempts_reached,
            &self.expires_us,
            &self.expiry_block,
            &self.left_expires_us,
            &self.unknown_block,
        ] {
            value.set(None);
        }
    }

    /// When maintenance has something to do, in µs since 1970: a time in the past if it is overdue, `i64::MAX` if
    /// nothing is due.
    pub fn next_us(&self) -> i64 {
        if self.is_wanted() || self.expiry_block.get().is_some() {
            return 0;
        }
        let times = [&self.due_us, &self.expires_us];
        times.into_iter().filter_map(OptionalI64::get).min().unwrap_or(NONE)
    }

    /// Requests a run at once.
    pub fn request(&self) {
        self.requests.fetch_add(1, SeqCst);
    }

    pub fn is_wanted(&self) -> bool {
        self.requests.load(SeqCst) != self.requests_seen.load(SeqCst)
    }

    /// Marks all requests so far as seen, because this run serves them.
    pub fn acknowledge(&self) {
        self.requests_seen.store(self.requests.load(SeqCst), SeqCst);
    }

    pub fn runs(&self) -> u32 {
        self.runs.load(SeqCst)
    }

    pub fn run_ends(&self) {
        self.runs.fetch_add(1, SeqCst);
    }

    pub fn has_counted(&self) -> bool {
        self.counted.load(Relaxed) == 1
    }

    pub fn set_counted(&self) {
        self.counted.store(1, Relaxed);
    }
}
