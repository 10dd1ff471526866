//! How far each lane has been read. The engine keeps it; each claim moves it, and each notification of an earlier row.

use crate::partition::Partition;
use std::collections::HashMap;

/// Seqs start at 1.
pub(super) const START: i64 = 0;
/// The cursor of a lane that has been read to its end.
pub(super) const END: i64 = i64::MAX;

/// All rows of a lane up to its cursor have been claimed, or a rewind will be published for them.
#[derive(Default)]
pub(super) struct Cursors(HashMap<Partition, i64>);

impl Cursors {
    pub fn of(&self, partition: Partition) -> i64 {
        self.0.get(&partition).copied().unwrap_or(START)
    }

    /// Whether the lane has been read up to `seq` at least.
    pub fn cover(&self, partition: Partition, seq: i64) -> bool {
        self.0.get(&partition).is_some_and(|cursor| seq <= *cursor)
    }

    /// The lane must be read again from `seq` on.
    pub fn lower(&mut self, partition: Partition, seq: i64) {
        let cursor = self.0.entry(partition).or_insert(START);
        *cursor = (*cursor).min(seq - 1);
    }

    /// The lane has been read up to `seq`.
    pub fn raise(&mut self, partition: Partition, seq: i64) {
        let cursor = self.0.entry(partition).or_insert(START);
        *cursor = (*cursor).max(seq);
    }

    /// The lane must be read from its start.
    pub fn restart(&mut self, partition: Partition) {
        self.0.insert(partition, START);
    }

    pub fn retain(&mut self, stays: impl Fn(Partition) -> bool) {
        self.0.retain(|partition, _| stays(*partition));
    }
}
