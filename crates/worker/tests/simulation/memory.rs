//! Shared memory: the content of `transactions.rs`, `lanes.rs` and `databases.rs` of `src/shared`, and what
//! `src/session/effects.rs` publishes there. Each function here is one access there; between two of them there may be
//! an interruption.

use super::config::Flaw;
use super::fast_path::Slots;
use outbox_core::open_transactions::{FILTER_WORDS, filter_bit};
use std::collections::BTreeMap;

/// An entry of the list of open transactions.
#[derive(Clone)]
pub struct Entry {
    /// A new number each time that the entry is occupied.
    pub tenant: u64,
    /// Belongs to a prepared transaction.
    pub xid: u64,
    pub low: i64,
    pub filter: Box<[u64; FILTER_WORDS]>,
}

impl Entry {
    pub fn add_key(&mut self, crc: u32) {
        let (word, mask) = filter_bit(crc);
        self.filter[word] |= mask;
    }
}

#[derive(Clone, Copy, Default)]
struct Lane {
    /// The index of the worker + 1.
    owner: usize,
    /// For the default destination, and for the others.
    rewind: [Option<i64>; 2],
    /// From where on messages may be gone that blocked others.
    unblocked: Option<i64>,
}

pub struct Memory {
    pub schedules: u32,
    /// The transactions that were prepared when the server crashed are in the list.
    pub has_adopted: bool,
    lanes: Vec<Lane>,
    /// By session.
    pub sessions: BTreeMap<usize, Entry>,
    pub prepared: Vec<Option<Entry>>,
    tenants: u64,
    pub slots: Slots,
    flaw: Option<Flaw>,
}

impl Memory {
    /// As a server initialises it at its start.
    pub fn new(partitions: u16, flaw: Option<Flaw>) -> Self {
        Self {
            schedules: 0,
            has_adopted: false,
            lanes: vec![Lane::default(); usize::from(partitions)],
            sessions: BTreeMap::new(),
            prepared: Vec::new(),
            tenants: 0,
            slots: Slots::default(),
            flaw,
        }
    }

    fn new_entry(&mut self) -> Entry {
        self.tenants += 1;
        Entry {
            tenant: self.tenants,
            xid: 0,
            low: 0,
            filter: Box::new([0; FILTER_WORDS]),
        }
    }

    pub fn register(&mut self, session: usize, low: i64, key_crc: Option<u32>) {
        if !self.sessions.contains_key(&session) {
            let entry = self.new_entry();
            self.sessions.insert(session, entry);
        }
        let Some(entry) = self.sessions.get_mut(&session) else {
            return;
        };
        entry.low = low;
        if let Some(crc) = key_crc {
            entry.add_key(crc);
        }
    }

    pub fn leave(&mut self, session: usize) {
        self.sessions.remove(&session);
    }

    /// A transaction is about to be prepared: its entry is copied.
    pub fn prepare(&mut self, session: usize, xid: u64) {
        if let Some(Entry { low, filter, .. }) = self.sessions.get(&session).cloned() {
            self.reserve_prepared(xid, low, Some(filter));
        }
    }

    /// Transactions that were prepared before the server crashed.
    pub fn adopt(&mut self, found: &[u64]) {
        for xid in found {
            if !self.prepared.iter().flatten().any(|entry| entry.xid == *xid) {
                self.reserve_prepared(*xid, 1, None);
            }
        }
    }

    fn reserve_prepared(&mut self, xid: u64, low: i64, filter: Option<Box<[u64; FILTER_WORDS]>>) {
        let mut entry = self.new_entry();
        entry.xid = xid;
        entry.low = low;
        entry.filter = filter.unwrap_or(entry.filter);
        match self.prepared.iter_mut().find(|entry| entry.is_none()) {
            Some(free) => *free = Some(entry),
            None => self.prepared.push(Some(entry)),
        }
    }

    pub fn rewind(&mut self, partition: u16, destination: usize, seq: i64) {
        let word = &mut self.lanes[usize::from(partition)].rewind[class(destination)];
        *word = Some(word.map_or(seq, |known| known.min(seq)));
    }

    pub fn lanes(&self) -> u16 {
        self.lanes.len() as u16
    }

    pub fn own_lane(&mut self, partition: u16, worker: usize) {
        self.lanes[usize::from(partition)].owner = worker + 1;
    }

    pub fn owner(&self, partition: u16) -> Option<usize> {
        self.lanes[usize::from(partition)].owner.checked_sub(1)
    }

    pub fn take_rewind(&mut self, partition: u16, destination: usize, worker: usize) -> Option<i64> {
        let lane = &mut self.lanes[usize::from(partition)];
        if lane.owner != worker + 1 && self.flaw != Some(Flaw::AnyWorkerTakesRewind) {
            return None;
        }
        let low = lane.rewind[class(destination)].take();
        low.filter(|_| self.flaw != Some(Flaw::RewindTakenUnread))
    }

    pub fn unblock(&mut self, partition: u16, seq: i64) {
        let word = &mut self.lanes[usize::from(partition)].unblocked;
        *word = Some(word.map_or(seq, |known| known.min(seq)));
    }

    pub fn take_unblocked(&mut self, partition: u16, worker: usize) -> Option<i64> {
        let lane = &mut self.lanes[usize::from(partition)];
        (lane.owner == worker + 1).then(|| lane.unblocked.take()).flatten()
    }

    pub fn peek_rewind(&self, partition: u16, destination: usize) -> Option<i64> {
        let low = self.lanes[usize::from(partition)].rewind[class(destination)];
        low.filter(|_| self.flaw != Some(Flaw::NoPeekAtRewind))
    }
}

/// The *rewind* word of a destination.
pub fn class(destination: usize) -> usize {
    usize::from(destination > 0)
}
