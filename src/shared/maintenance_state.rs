//! What maintenance of a database knows from one run to the next, because each run is a process: when the next run is
//! due, where it continues, and what failed. Maintenance writes it, workers request runs, sessions lower a time at COMMIT,
//! and the launcher and outbox_health read it.

use super::fields::{EventCount, Flag, OptionalI64};
use crate::pg::shmem::{ShortText, SpinLock};
use outbox_core::error_group;

/// The last answer of a task that runs now and then: it stands until the next one. A failure that comes back once a
/// minute is then as plain as one that comes back each second.
#[repr(C)]
pub struct LastAnswer {
    /// Held by a process that reads or writes the fields.
    lock: SpinLock,
    /// When it first failed since it last succeeded, in µs since 1970. None = it did not fail.
    since_us: OptionalI64,
    failure: ShortText<{ error_group::TEXT_MAX_BYTES }>,
}

impl LastAnswer {
    /// Stores that the task failed, or with None that it succeeded.
    pub fn set(&self, failure: Option<&str>, now_us: i64) {
        self.lock.with(|| {
            let since_us = failure.map(|_| self.since_us.get().unwrap_or(now_us));
            self.since_us.set(since_us);
            self.failure.set(failure.unwrap_or_default());
        });
    }

    /// Since when it fails, in µs since 1970, and why the last time.
    pub fn failure(&self) -> Option<(i64, String)> {
        self.lock.with(|| Some((self.since_us.get()?, self.failure.get())))
    }
}

#[repr(C)]
pub struct MaintenanceState {
    /// An immediate run is requested. Set by workers, cleared by maintenance before it serves the request; read by the
    /// launcher.
    pub requested: Flag,
    /// A run reached its end. Written by maintenance; read by the launcher.
    pub runs: EventCount,
    /// When the next run is due, in µs since 1970; None = there was none yet, so it is due. Maintenance writes this
    /// field and those below; the launcher reads this one.
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
    /// The next transaction id at the first count. Transactions before it may not have raised `DatabaseEntry::highest`.
    pub first_xid: OptionalI64,
    /// The block up to which outbox was searched for messages that expire, after a start; used if the count did not
    /// reach all messages.
    pub unknown_block: OptionalI64,
    /// Of all steps of a run but the search: what failed first.
    pub run: LastAnswer,
    /// Of the search for expired messages.
    pub search: LastAnswer,
}

impl MaintenanceState {
    pub fn answers(&self) -> [&LastAnswer; 2] {
        [&self.run, &self.search]
    }

    /// When maintenance has something to do, in µs since 1970: a time in the past if it is overdue.
    pub fn next_us(&self) -> i64 {
        if self.requested.is_set() || self.expiry_block.get().is_some() {
            return 0;
        }
        let due_us = self.due_us.get().unwrap_or(0);
        self.expires_us.get().map_or(due_us, |us| us.min(due_us))
    }
}
