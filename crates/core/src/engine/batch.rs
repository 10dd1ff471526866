//! The result of a claim. [`Tables`](super::Tables) return it to the engine.

use super::rows::{Claimed, Lane};
use crate::message::Event;
use crate::partition::Partition;

/// The most bytes of bodies in one claim. A claim stops at its limit, but always returns at least one message.
pub const CLAIM_BYTES_MAX: usize = 32 << 20;

/// The result of one or more claims.
#[derive(Debug, Default)]
pub struct Batch {
    /// The claimed messages with their events, in order of seq.
    pub rows: Vec<Claimed>,
    /// The claim stopped at its limit of bytes: a lane may hold more rows even if it returned fewer than its limit.
    pub cut: bool,
    /// Another session changed rows between the snapshot of the claim and their update. They are not among `rows`.
    pub missed: bool,
    /// The destination is paused, so the claim read nothing.
    pub is_paused: bool,
    /// Partitions where the claim read nothing: rows are locked, the destination is paused, or the claim of the lane
    /// failed.
    pub locked: Vec<Partition>,
}

impl Batch {
    /// The result of a claim of these lanes. If the destination is paused, the lanes count as not read: their messages
    /// are still to be claimed, and the worker may not know of the pause yet.
    #[must_use]
    pub fn of(mut self, lanes: &[Lane]) -> Self {
        if self.is_paused {
            self.locked = lanes.iter().map(|lane| lane.partition).collect();
        }
        self
    }

    /// The sizes of the bodies of its events together, in bytes.
    pub(super) fn body_bytes(&self) -> usize {
        let events = self.rows.iter().filter_map(|row| row.event.as_ref().ok());
        events.map(Event::body_bytes).sum()
    }

    /// Adds the result of the claim of another lane.
    pub fn add(&mut self, other: Self) {
        self.rows.extend(other.rows);
        self.cut |= other.cut;
        self.missed |= other.missed;
        self.locked.extend(other.locked);
    }
}
