//! The cursor of each lane: the seq up to which the engine has read it. A claim raises it, a rewind lowers it. Used by
//! the engine on the worker's main thread.

use crate::partition::Partition;
use std::collections::HashMap;

/// The cursor of a lane that is to be read from its start: seqs start at 1.
pub(super) const START: i64 = 0;
/// The cursor of a lane that has been read to its end.
pub(super) const END: i64 = i64::MAX;

/// The cursors by partition. Each row of a lane up to its cursor has been claimed, or a rewind to it will come.
#[derive(Default)]
pub(super) struct Cursors(HashMap<Partition, i64>);

impl Cursors {
    /// The cursor of the lane; START if it has none.
    pub fn of(&self, partition: Partition) -> i64 {
        self.0.get(&partition).copied().unwrap_or(START)
    }

    /// Whether the lane has been read at least up to `seq`.
    pub fn cover(&self, partition: Partition, seq: i64) -> bool {
        self.0.get(&partition).is_some_and(|cursor| seq <= *cursor)
    }

    /// Rewinds the lane: it is read again from `seq` on, if the cursor is not lower already.
    pub fn lower(&mut self, partition: Partition, seq: i64) {
        let cursor = self.0.entry(partition).or_insert(START);
        *cursor = (*cursor).min(seq - 1);
    }

    /// Records that the lane has been read up to `seq`.
    pub fn raise(&mut self, partition: Partition, seq: i64) {
        let cursor = self.0.entry(partition).or_insert(START);
        *cursor = (*cursor).max(seq);
    }

    /// Lets the lane be read from its start.
    pub fn restart(&mut self, partition: Partition) {
        self.0.insert(partition, START);
    }

    pub fn retain(&mut self, stays: impl Fn(Partition) -> bool) {
        self.0.retain(|partition, _| stays(*partition));
    }
}
