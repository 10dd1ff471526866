//! How far a lane may be read where a whole partition is one order (`ordering 'partition'`). One that failed is in
//! `outbox_waiting` or a dead letter: all behind it stay in `outbox`, and the lane is read up to the failed one until that
//! has gone through. So nothing is moved, whatever waits behind it, and what the tables say is all there is to know: a
//! change of the option, of the number of partitions or of the owner needs no more than to read them anew.

use super::{Claimed, END, Engine, Settlement, Sharing};
use crate::gate::{Found, Handle};
use crate::partition::Partition;
use crate::settle::{Disposition, Ordering, Rules};
use std::collections::{BTreeSet, HashMap, HashSet};

/// Empty unless a partition is one order.
#[derive(Debug, Default)]
pub(super) struct Lanes {
    /// Failed, and not in `outbox` or tried again alone.
    heads: HashMap<Partition, BTreeSet<i64>>,
    /// What is claimed past these would only wait in memory.
    bounds: HashMap<Partition, i64>,
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
}

impl<P: Clone> Engine<P> {
    /// The last seq of a lane that may be claimed.
    pub(super) fn reach(&self, partition: Partition) -> i64 {
        let head = (self.lanes.heads.get(&partition)).and_then(BTreeSet::first);
        let bound = self.lanes.bounds.get(&partition).copied().unwrap_or(END);
        head.copied().unwrap_or(END).min(bound).min(self.asked.reach)
    }

    /// Takes note of what is kept in memory. Around a claim.
    pub(super) fn bound_lanes(&mut self, rules: &Rules) {
        self.lanes.bounds = match rules.ordering {
            Ordering::Partition => self.gates.bounds(),
            Ordering::Key | Ordering::None => HashMap::new(),
        };
    }

    /// A message ended: the lane stops at it, or is free of it.
    pub(super) fn note_head(&mut self, handle: Handle, disposition: &Disposition, rules: &Rules) {
        if rules.ordering != Ordering::Partition || self.sharing != Sharing::Leases {
            return;
        }
        let Some(pointer) = self.pointer(handle) else { return };
        let (partition, seq) = (pointer.partition, pointer.seq);
        let heads = self.lanes.heads.entry(partition).or_default();
        match disposition {
            Disposition::Retry { .. } => _ = heads.insert(seq),
            Disposition::Dead { .. } if rules.dead_closes() => _ = heads.insert(seq),
            Disposition::Publish | Disposition::Expire | Disposition::Dead { .. } => _ = heads.remove(&seq),
            Disposition::Release { .. } | Disposition::Wait => {}
        }
        if heads.is_empty() {
            self.lanes.heads.remove(&partition);
        }
    }

    /// Takes over what the tables say. Returns whether there is a head that may be on its way, or gone: they must be asked
    /// again to know. What is on its way keeps its lane to itself.
    pub(super) fn find_heads(&mut self, found: &[Found], scope: &HashSet<Partition>, rules: &Rules) -> bool {
        if rules.ordering != Ordering::Partition {
            self.lanes.heads.clear();
            return false;
        }
        self.gates.forget_keys();
        let mut undecided = false;
        let before = std::mem::take(&mut self.lanes.heads);
        for (partition, seq) in before.iter().flat_map(|(p, heads)| heads.iter().map(|seq| (*p, *seq))) {
            let tried = (self.messages.values()).any(|m| m.pointer.seq == seq && m.pointer.partition == partition);
            let unread = self.mark(partition) < seq;
            if tried || unread || !scope.contains(&partition) {
                self.lanes.heads.entry(partition).or_default().insert(seq);
                undecided |= unread && scope.contains(&partition);
            }
        }
        for (partition, seq) in found
            .iter()
            .filter_map(|found| Some((found.key.partition, found.head?)))
        {
            self.lanes.heads.entry(partition).or_default().insert(seq);
        }
        undecided
    }

    /// What was claimed goes back to its place in the lane, as if it had not been.
    pub(super) fn give_back(&mut self, rows: impl IntoIterator<Item = Claimed<P>>, reason: &str) {
        self.unsettled.extend(rows.into_iter().map(|claimed| Settlement {
            place: claimed.place,
            pointer: claimed.pointer,
            disposition: Disposition::Release { reason: reason.into() },
        }));
    }
}

#[cfg(test)]
mod tests;
