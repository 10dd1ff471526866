//! The result of a claim. The tables produce it, the engine takes it.

use super::rows::{Claimed, Lane};
use crate::message::Event;
use crate::partition::Partition;

/// The bytes of bodies at which one claim stops; one message is always taken.
pub const CLAIM_BYTES_MAX: usize = 32 << 20;

/// The result of a claim.
#[derive(Debug)]
pub struct Batch<P> {
    /// In order of seq.
    pub rows: Vec<Claimed<P>>,
    /// It stopped at its limit of bytes: lanes may have more rows than their limits say.
    pub cut: bool,
    /// Other sessions changed rows that it saw, and these are not among `rows`.
    pub missed: bool,
    /// The destination is paused: nothing was read.
    pub is_paused: bool,
    /// Partitions that were not read: rows of them are locked, or the destination is paused.
    pub locked: Vec<Partition>,
}

impl<P> Batch<P> {
    /// The result for these lanes of a paused destination. Their messages are still to be read, but the worker may not
    /// have noticed the pause.
    #[must_use]
    pub fn of(mut self, lanes: &[Lane]) -> Self {
        if self.is_paused {
            self.locked = lanes.iter().map(|lane| lane.partition).collect();
        }
        self
    }

    /// The size of its events in bytes.
    pub(super) fn body_bytes(&self) -> usize {
        let events = self.rows.iter().filter_map(|row| row.event.as_ref().ok());
        events.map(Event::body_bytes).sum()
    }

    /// It has as much as one claim may bring.
    pub fn is_large(&self) -> bool {
        self.body_bytes() >= CLAIM_BYTES_MAX
    }

    /// Adds the result of a claim of another lane.
    pub fn add(&mut self, other: Self) {
        self.rows.extend(other.rows);
        self.cut |= other.cut;
        self.missed |= other.missed;
        self.locked.extend(other.locked);
    }
}

impl<P> Default for Batch<P> {
    fn default() -> Self {
        Self {
            rows: Vec::new(),
            cut: false,
            missed: false,
            is_paused: false,
            locked: Vec::new(),
        }
    }
}
