//! Messages in flight that came by the fast path: the slot of each, and since when. `receive` has the protocol.

use super::ports::SlotId;
use crate::partition::Partition;
use std::collections::HashMap;

/// A message that has been in flight for this long, in ms, is claimed.
pub(super) const CLAIM_AFTER_MS: u64 = 100;

/// Messages that the engine has and that are not claimed.
#[derive(Default)]
pub(super) struct FastInFlight {
    known: HashMap<(Partition, i64), Entry>,
    over: Vec<SlotId>,
}

struct Entry {
    slot: SlotId,
    since_ms: u64,
    /// The lane is to be read again because of it.
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

    /// The message is settled or claimed. Returns false if it was not in flight on the fast path.
    pub fn end(&mut self, partition: Partition, seq: i64) -> bool {
        let ended = self.known.remove(&(partition, seq));
        self.over.extend(ended.iter().map(|entry| entry.slot));
        ended.is_some()
    }

    pub fn retain(&mut self, stays: impl Fn(Partition, i64) -> bool) {
        let gone = self.known.extract_if(|(partition, seq), _| !stays(*partition, *seq));
        self.over.extend(gone.map(|(_, entry)| entry.slot));
    }

    /// Takes the slots of the messages that have ended since the last call.
    pub fn over(&mut self) -> impl Iterator<Item = SlotId> {
        self.over.drain(..)
    }

    /// Messages that have been in flight for too long, each returned once: their lanes must be read again.
    pub fn lasting(&mut self, now_ms: u64) -> Vec<(Partition, i64)> {
        let lasts = |entry: &Entry| !entry.is_claimed_next && entry.since_ms + CLAIM_AFTER_MS <= now_ms;
        let lasting = self.known.iter_mut().filter(|(_, entry)| lasts(entry));
        lasting
            .map(|(which, entry)| {
                entry.is_claimed_next = true;
                *which
            })
            .collect()
    }

    /// The time in ms until a message must be claimed; None if there is none.
    pub fn lasts_in_ms(&self, now_ms: u64) -> Option<u64> {
        let entry = self.known.values().filter(|entry| !entry.is_claimed_next);
        entry
            .map(|entry| (entry.since_ms + CLAIM_AFTER_MS).saturating_sub(now_ms))
            .min()
    }
}
