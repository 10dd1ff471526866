//! How far a lane may be read where a whole partition is one order (`ordering 'partition'`). One that failed is in
//! `outbox_waiting` or a dead letter: all behind it stay in `outbox`, and the lane is read up to the failed one until that
//! has gone through. So nothing is moved, whatever waits behind it, and what the tables say is all there is to know: a
//! change of the option, of the number of partitions or of the owner needs no more than to read them anew.

use super::marks::END;
use crate::gate::Found;
use crate::partition::Partition;
use crate::settle::{Closes, Disposition, Ordering, Rules};
use std::collections::{BTreeSet, HashMap};

/// Empty unless a partition is one order.
#[derive(Debug, Default)]
pub(super) struct Lanes {
    /// Failed, and not in `outbox` or tried again alone.
    heads: HashMap<Partition, BTreeSet<i64>>,
    /// What is claimed past these would only wait in memory. Written around each claim.
    pub bounds: HashMap<Partition, i64>,
}

impl Lanes {
    pub fn forget(&mut self, scope: impl Fn(Partition) -> bool) {
        self.heads.retain(|partition, _| !scope(*partition));
    }

    pub fn is_head(&self, partition: Partition, seq: i64) -> bool {
        (self.heads.get(&partition)).is_some_and(|heads| heads.contains(&seq))
    }

    pub fn is_behind_head(&self, partition: Partition, seq: i64) -> bool {
        let head = self.heads.get(&partition).and_then(BTreeSet::first);
        head.is_some_and(|head| *head < seq)
    }

    /// The last seq of a lane that may be claimed.
    pub fn reach(&self, partition: Partition) -> i64 {
        let head = self.heads.get(&partition).and_then(BTreeSet::first);
        let bound = self.bounds.get(&partition).copied().unwrap_or(END);
        head.copied().unwrap_or(END).min(bound)
    }

    /// A message ended: the lane stops at it, or is free of it.
    pub fn note(&mut self, partition: Partition, seq: i64, disposition: &Disposition, rules: &Rules) {
        if rules.ordering != Ordering::Partition {
            return;
        }
        let heads = self.heads.entry(partition).or_default();
        match disposition {
            Disposition::Retry { .. } => _ = heads.insert(seq),
            Disposition::Dead { .. } if rules.dead_closes() != Closes::Nothing => _ = heads.insert(seq),
            Disposition::Publish | Disposition::Expire | Disposition::Dead { .. } => _ = heads.remove(&seq),
            Disposition::Release { .. } | Disposition::Wait => {}
        }
        if heads.is_empty() {
            self.heads.remove(&partition);
        }
    }

    /// No lane stops at a message that failed.
    pub fn free_all(&mut self) {
        self.heads.clear();
    }

    /// Takes over what the tables say of the lanes in `scope`. A head that `is_tried` again, or that `is_unread` as yet, stays
    /// one. Returns whether there is an unread one: it may be on its way, or gone, so the tables must be asked again.
    pub fn find_heads(
        &mut self,
        found: &[Found],
        scope: impl Fn(Partition) -> bool,
        is_tried: impl Fn(Partition, i64) -> bool,
        is_unread: impl Fn(Partition, i64) -> bool,
    ) -> bool {
        let mut undecided = false;
        let before = std::mem::take(&mut self.heads);
        for (partition, seq) in before.iter().flat_map(|(p, heads)| heads.iter().map(|seq| (*p, *seq))) {
            let unread = is_unread(partition, seq);
            if is_tried(partition, seq) || unread || !scope(partition) {
                self.heads.entry(partition).or_default().insert(seq);
                undecided |= unread && scope(partition);
            }
        }
        for (partition, seq) in found
            .iter()
            .filter_map(|found| Some((found.key.partition, found.head?)))
        {
            self.heads.entry(partition).or_default().insert(seq);
        }
        undecided
    }
}

#[cfg(test)]
mod tests;
