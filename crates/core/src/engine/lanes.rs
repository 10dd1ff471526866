//! How far a lane may be read if a whole partition is one order (`ordering 'partition'`). A failed message is in
//! `outbox_waiting` or a dead letter. All later ones stay in `outbox`, and the lane is read up to the failed one until
//! that is published. So no row is moved, whatever waits behind it, and the tables have the whole state: after a change
//! of the option, of the number of partitions or of the owner it is enough to read them again.

use super::cursors::END;
use crate::key_order::Found;
use crate::partition::Partition;
use crate::settle::{Blocks, Disposition, Ordering, Rules};
use std::collections::{BTreeSet, HashMap};

/// Empty unless a partition is one order.
#[derive(Debug, Default)]
pub(super) struct Lanes {
    /// The seqs that failed, and are not in `outbox` or are being tried alone.
    blockers: HashMap<Partition, BTreeSet<i64>>,
    /// Messages claimed past these would only wait in memory. Written around each claim.
    pub bounds: HashMap<Partition, i64>,
}

impl Lanes {
    pub fn forget(&mut self, scope: impl Fn(Partition) -> bool) {
        self.blockers.retain(|partition, _| !scope(*partition));
    }

    pub fn is_blocker(&self, partition: Partition, seq: i64) -> bool {
        (self.blockers.get(&partition)).is_some_and(|blockers| blockers.contains(&seq))
    }

    pub fn is_behind_blocker(&self, partition: Partition, seq: i64) -> bool {
        let blocker = self.blockers.get(&partition).and_then(BTreeSet::first);
        blocker.is_some_and(|blocker| *blocker < seq)
    }

    /// The last seq of a lane that may be claimed.
    pub fn read_limit(&self, partition: Partition) -> i64 {
        let blocker = self.blockers.get(&partition).and_then(BTreeSet::first);
        let bound = self.bounds.get(&partition).copied().unwrap_or(END);
        blocker.copied().unwrap_or(END).min(bound)
    }

    /// A message ended: the lane stops at it, or is free of it.
    pub fn note(&mut self, partition: Partition, seq: i64, disposition: &Disposition, rules: &Rules) {
        if rules.ordering != Ordering::Partition {
            return;
        }
        let blockers = self.blockers.entry(partition).or_default();
        match disposition {
            Disposition::Retry { .. } => _ = blockers.insert(seq),
            Disposition::Dead { .. } if rules.dead_blocks() != Blocks::Nothing => _ = blockers.insert(seq),
            Disposition::Publish | Disposition::Expire | Disposition::Dead { .. } => _ = blockers.remove(&seq),
            Disposition::Release { .. } | Disposition::Wait => {}
        }
        if blockers.is_empty() {
            self.blockers.remove(&partition);
        }
    }

    /// No lane stops at a message that failed.
    pub fn free_all(&mut self) {
        self.blockers.clear();
    }

    /// Takes over what the tables say of the lanes in `scope`. A blocking message that `is_tried` again, or that
    /// `is_unread` yet, stays one. Returns whether there is an unread one: it may be in flight, or gone, so the tables
    /// must be read again.
    pub fn find_blockers(
        &mut self,
        found: &[Found],
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
