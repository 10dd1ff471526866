//! What the upkeep of a database knows from one run to the next, for each run is a process: when it is due, and where it
//! goes on. Written by the upkeep; asked for by workers, lowered by sessions at COMMIT, read by the launcher.

use std::sync::atomic::{
    AtomicI64, AtomicU32,
    Ordering::{Relaxed, SeqCst},
};

/// No time, or no place, is known.
const NONE: i64 = i64::MAX;

/// A number that one run leaves to the next. None = nothing.
#[repr(C)]
pub struct OptionalI64(AtomicI64);

impl OptionalI64 {
    pub fn get(&self) -> Option<i64> {
        Some(self.0.load(SeqCst)).filter(|value| *value < NONE)
    }

    pub fn set(&self, value: Option<i64>) {
        self.0.store(value.unwrap_or(NONE), SeqCst);
    }

    /// Takes over a value that is lower. Returns whether it was.
    pub fn lower(&self, value: i64) -> bool {
        self.0.fetch_min(value, SeqCst) > value
    }

    pub fn take(&self) -> Option<i64> {
        Some(self.0.swap(NONE, SeqCst)).filter(|value| *value < NONE)
    }
}

#[repr(C)]
pub struct MaintenanceState {
    /// Grows when the upkeep is wanted at once. Written by workers; read by the launcher and the upkeep.
    requests: AtomicU32,
    /// As of the last run. Written by the upkeep; read by it and the launcher.
    requests_seen: AtomicU32,
    /// How many runs came to their end. Written by the upkeep; read by the launcher.
    runs: AtomicU32,
    /// 1 = what waits was counted since the memory was made. Written by the upkeep; read by it and by workers.
    counted: AtomicU32,
    /// When the next run is due, in µs since 1970. Written by the upkeep, as all that follows; read by the launcher.
    pub due_us: OptionalI64,
    /// How often the workers had been called when the last run began.
    pub calls_seen: OptionalI64,
    /// When a large backlog is counted again, and what the counter said when that was decided.
    pub large_count_due_us: OptionalI64,
    pub pending_seen: OptionalI64,
    /// When events and failed attempts are looked at from the start again, and up to which seq they have been.
    pub round_due_us: OptionalI64,
    pub events_reached: OptionalI64,
    pub attempts_reached: OptionalI64,
    /// When the first message expires that no look has met yet. Lowered at COMMIT.
    pub expires_us: OptionalI64,
    /// The block of outbox at which a look for expired messages goes on; none = no look is under way.
    pub expiry_block: OptionalI64,
    /// When the first message expires that this look met and left.
    pub left_expires_us: OptionalI64,
    /// The block up to which outbox was read for messages that expire, after a start, where a count did not reach all.
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

    /// Since when, or from when on, the upkeep has something to do, in µs since 1970.
    pub fn next_us(&self) -> i64 {
        if self.is_wanted() || self.expiry_block.get().is_some() {
            return 0;
        }
        let times = [&self.due_us, &self.expires_us];
        times.into_iter().filter_map(OptionalI64::get).min().unwrap_or(NONE)
    }

    /// It is wanted at once.
    pub fn request(&self) {
        self.requests.fetch_add(1, SeqCst);
    }

    pub fn is_wanted(&self) -> bool {
        self.requests.load(SeqCst) != self.requests_seen.load(SeqCst)
    }

    /// What was asked for until now is about to be done.
    pub fn hear(&self) {
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
