//! What maintenance of a database knows from one run to the next, because each run is a process: when the next run is
//! due, and where it continues. Maintenance writes it, workers request runs, sessions lower a time at COMMIT, and the
//! launcher reads it.

use super::fields::{EventCount, Flag, OptionalI64};

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
}

impl MaintenanceState {
    /// When maintenance has something to do, in µs since 1970: a time in the past if it is overdue.
    pub fn next_us(&self) -> i64 {
        if self.requested.is_set() || self.expiry_block.get().is_some() {
            return 0;
        }
        let due_us = self.due_us.get().unwrap_or(0);
        self.expires_us.get().map_or(due_us, |us| us.min(due_us))
    }
}
