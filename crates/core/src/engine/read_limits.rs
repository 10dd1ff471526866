//! The read limits of lanes whose partition is one order (`ordering 'partition'`). Used by the engine on the worker's
//! main thread.
//!
//! A message that failed is in `outbox_waiting` or a dead letter, and blocks its lane. The messages behind it stay in
//! `outbox`, and the lane is read only up to the blocker until that has gone through. So no row is moved, even if
//! thousands wait behind it, and the tables hold the whole state. After a change of the option, of the number of
//! partitions or of the owner the worker only has to read them again.

use super::cursors::END;
use crate::key_order::BlockedKey;
use crate::partition::Partition;
use crate::settle::{Blocks, Disposition, Rules};
use std::collections::{BTreeSet, HashMap};

/// The read limits by partition. Empty unless a partition is one order.
#[derive(Debug, Default)]
pub(super) struct ReadLimits {
    /// The seqs of failed messages: they wait in `outbox_waiting`, are dead letters, or are tried again alone.
    blockers: HashMap<Partition, BTreeSet<i64>>,
    /// Seqs beyond which a claimed message would only be parked. The engine writes them before and after each claim.
    pub bounds: HashMap<Partition, i64>,
}

impl ReadLimits {
    /// Forgets the blockers of the partitions in `scope`.
    pub fn forget(&mut self, scope: impl Fn(Partition) -> bool) {
        self.blockers.retain(|partition, _| !scope(*partition));
    }

    pub fn is_blocker(&self, partition: Partition, seq: i64) -> bool {
        (self.blockers.get(&partition)).is_some_and(|blockers| blockers.contains(&seq))
    }

    pub fn is_empty(&self) -> bool {
        self.blockers.is_empty()
    }

    /// Whether the lane has a blocker from this seq on.
    pub fn has_blocker(&self, partition: Partition, seq: i64) -> bool {
        let last = self.blockers.get(&partition).and_then(BTreeSet::last);
        last.is_some_and(|last| *last >= seq)
    }

    /// Whether the lane has a blocker with a lower seq.
    pub fn is_behind_blocker(&self, partition: Partition, seq: i64) -> bool {
        let blocker = self.blockers.get(&partition).and_then(BTreeSet::first);
        blocker.is_some_and(|blocker| *blocker < seq)
    }

    /// The last seq of a lane that a claim may read: that of its first blocker, or the bound if that is lower.
    pub fn read_limit(&self, partition: Partition) -> i64 {
        let blocker = self.blockers.get(&partition).and_then(BTreeSet::first);
        let bound = self.bounds.get(&partition).copied().unwrap_or(END);
        blocker.copied().unwrap_or(END).min(bound)
    }

    /// Takes the disposition of a message of such a lane: it becomes a blocker of the lane, or is one no longer.
    pub fn record(&mut self, partition: Partition, seq: i64, disposition: &Disposition, rules: &Rules) {
        let blockers = self.blockers.entry(partition).or_default();
        match disposition {
            Disposition::Retry { .. } | Disposition::Defer { .. } => _ = blockers.insert(seq),
            Disposition::Dead { .. } if rules.dead_blocks() != Blocks::Nothing => _ = blockers.insert(seq),
            Disposition::Publish | Disposition::Expire | Disposition::Discard { .. } | Disposition::Dead { .. } => {
                _ = blockers.remove(&seq);
            }
            Disposition::Release { .. } | Disposition::Wait => {}
        }
        if blockers.is_empty() {
            self.blockers.remove(&partition);
        }
    }

    /// Forgets all blockers.
    pub fn free_all(&mut self) {
        self.blockers.clear();
    }

    /// Takes over the blockers `found` in the tables for the lanes in `scope`. A known blocker stays one if it
    /// `is_tried` again, or if the lane `is_unread` at its seq. Returns whether there is an unread blocker. It may be
    /// on its way back to `outbox` or gone, so the caller must read the tables again.
    pub fn find_blockers(
        &mut self,
        found: &[BlockedKey],
        scope: impl Fn(Partition) -> bool,
        is_tried: impl Fn(Partition, i64) -> bool,
        is_unread: impl Fn(Partition, i64) -> bool,
    ) -> bool {
        let mut undecided = false;
        let before = std::mem::take(&mut self.blockers);
        for (partition, seq) in before
            .iter()
            .flat_map(|(p, blockers)| blockers.iter().map(|seq| (*p, *seq)))
        {
            let unread = is_unread(partition, seq);
            if is_tried(partition, seq) || unread || !scope(partition) {
                self.blockers.entry(partition).or_default().insert(seq);
                undecided |= unread && scope(partition);
            }
        }
        for (partition, seq) in found
            .iter()
            .filter_map(|found| Some((found.key.partition, found.blocker?)))
        {
            self.blockers.entry(partition).or_default().insert(seq);
        }
        undecided
    }
}

#[cfg(test)]
mod tests;
