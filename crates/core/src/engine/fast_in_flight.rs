//! Messages that are fast-path in flight: their slots in shared memory, and since when they are in flight. `receive`
//! describes the fast path. Used by the engine on the worker's main thread.

use super::rows::SlotId;
use crate::partition::Partition;

/// A message that has been fast-path in flight for this time, in ms, is claimed.
pub(super) const CLAIM_AFTER_MS: u64 = 100;

/// Messages that the engine has taken from their slots and not claimed.
#[derive(Default)]
pub(super) struct FastInFlight {
    known: foldhash::HashMap<(Partition, i64), Entry>,
    /// Slots of messages that were settled, claimed or lost, and that are not freed yet.
    ended_slots: Vec<SlotId>,
}

struct Entry {
    slot: SlotId,
    since_ms: u64,
    /// The lane was rewound to this message, so that the next claim brings it.
    is_claimed_next: bool,
}

impl FastInFlight {
    pub fn is_empty(&self) -> bool {
        self.known.is_empty()
    }

    pub fn contains(&self, (partition, seq): (Partition, i64)) -> bool {
        self.known.contains_key(&(partition, seq))
    }

    pub fn take(&mut self, slot: SlotId, partition: Partition, seq: i64, now_ms: u64) {
        let entry = Entry {
            slot,
            since_ms: now_ms,
            is_claimed_next: false,
        };
        self.known.insert((partition, seq), entry);
    }

    /// Records that the message is settled or claimed. False if it was not fast-path in flight.
    pub fn end(&mut self, partition: Partition, seq: i64) -> bool {
        let ended = self.known.remove(&(partition, seq));
        self.ended_slots.extend(ended.iter().map(|entry| entry.slot));
        ended.is_some()
    }

    pub fn retain(&mut self, stays: impl Fn(Partition, i64) -> bool) {
        let gone = self.known.extract_if(|(partition, seq), _| !stays(*partition, *seq));
        self.ended_slots.extend(gone.map(|(_, entry)| entry.slot));
    }

    /// The slots of messages that have ended since the last call.
    pub fn take_ended_slots(&mut self) -> impl Iterator<Item = SlotId> {
        self.ended_slots.drain(..)
    }

    /// Messages that are to be claimed, because they have been in flight for `CLAIM_AFTER_MS`. Each is returned once.
    /// The caller rewinds their lanes.
    pub fn take_overdue(&mut self, now_ms: u64) -> Vec<(Partition, i64)> {
        let is_overdue = |entry: &Entry| !entry.is_claimed_next && entry.since_ms + CLAIM_AFTER_MS <= now_ms;
        let overdue = self.known.iter_mut().filter(|(_, entry)| is_overdue(entry));
        overdue
            .map(|(which, entry)| {
                entry.is_claimed_next = true;
                *which
            })
            .collect()
    }

    /// The time until a message is to be claimed, in ms; None if there is no such message.
    pub fn overdue_in_ms(&self, now_ms: u64) -> Option<u64> {
        let entry = self.known.values().filter(|entry| !entry.is_claimed_next);
        entry
            .map(|entry| (entry.since_ms + CLAIM_AFTER_MS).saturating_sub(now_ms))
            .min()
    }
}
