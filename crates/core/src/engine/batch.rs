//! What a claim brought. Made by the tables, taken by the engine.

use super::rows::{Claimed, Lane};
use crate::message::Event;
use crate::partition::Partition;

/// Bodies that one claim brings, in bytes, before it stops; one message is always taken.
pub const CLAIM_BYTES_MAX: usize = 32 << 20;

/// What a claim brought.
#[derive(Debug)]
pub struct Batch<P> {
    /// In order of seq.
    pub rows: Vec<Claimed<P>>,
    /// It stopped at its limit of bytes: lanes may hold more rows than their limit says.
    pub cut: bool,
    /// Rows that it saw were changed by somebody else meanwhile, and are not among `rows`.
    pub missed: bool,
    /// The destination is paused: nothing was read.
    pub is_paused: bool,
    /// Partitions where nothing was read: rows of them are locked, or the destination is paused.
    pub locked: Vec<Partition>,
}

impl<P> Batch<P> {
    /// Of these lanes. What a paused destination holds there is still to be read, but the worker may not have heard of the pause.
    #[must_use]
    pub fn of(mut self, lanes: &[Lane]) -> Self {
        if self.is_paused {
            self.locked = lanes.iter().map(|lane| lane.partition).collect();
        }
        self
    }

    /// What its events take, in bytes.
    pub(super) fn body_bytes(&self) -> usize {
        let events = self.rows.iter().filter_map(|row| row.event.as_ref().ok());
        events.map(Event::body_bytes).sum()
    }

    /// It has as much as one claim may bring.
    pub fn is_large(&self) -> bool {
        self.body_bytes() >= CLAIM_BYTES_MAX
    }

    /// With what the claim of another lane brought.
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
