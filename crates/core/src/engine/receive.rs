//! The fast path in the engine. Messages of small transactions come through shared memory as well as through the table,
//! and are sent before they are claimed. Called by the worker's main thread, before [`Engine::claim`].
//!
//! Order. A transaction copies its messages into slots before it commits, and marks the slots ready before it leaves
//! the registry of open transactions. A pass
//!
//! - (b) takes the ready messages (crates/worker/src/worker/deliver.rs does, for all destinations),
//! - (c) reads which transactions are open,
//! - (d) reads which messages are ready by then, and whether a commit reached the table only.
//!
//! It takes no message of a lane that is not read to its end, or that is blocked by a failed message. Consider a
//! message with a lower seq than one taken at (b). It was taken before, or has been claimed, or its transaction is open
//! at (c), or it appears at (d). The last two hold back the later messages, for as long as in a claim. (d) reads the
//! ready slots before the rewinds, and a process that withdraws a ready message records its rewind before.
//! tests/model_fast_path.rs models this.
//!
//! A message whose event is in a source comes without it. Its row is committed, and may be changed by its transaction
//! until then, so the worker reads it: only once it takes the message, and by the plan of a claim. If that fails, the
//! message is given up, and with it the later ones of its lane.
//!
//! No message is sent twice. Its row is visible only after its slot was filled. So a claim that returns the row either
//! finds the message still in its slot and withdraws it (`Memory::withdraw`), or finds it in flight. In the second case
//! the message counts as claimed from then on.
//!
//! No message is lost. For a message that is not taken, or is given up, the lane is rewound as for any other commit,
//! and the message is read from the table. The row of a fast-path message is settled without a claim, under the lock of
//! the lease. A message that the destination does not answer soon is claimed. So a message that crashes its worker is
//! charged with the next crash.

use super::batch::{Batch, CLAIM_BYTES_MAX};
use super::cursors::END;
use super::ports::{Events, Memory};
use super::rows::{Arrived, Claimed};
use super::{Engine, Sharing};
use crate::key_order::MessageHandle;
use crate::message::{Event, Pointer, Publication};
use crate::open_transactions::{OpenTransaction, OpenTransactions};
use crate::partition::Partition;
use crate::settle::{Disposition, Ordering, Rules};
use std::collections::{HashMap, HashSet};

impl Engine {
    /// Takes up to `limit` of the messages that the worker took from ready slots (b), and makes those ready that may be
    /// sent. Gives up the rest. Returns the number of messages that it took.
    ///
    /// A message that goes back must not be overtaken, so until its settle is written all messages are given up.
    pub fn receive<M: Memory>(
        &mut self,
        memory: &M,
        mut arrived: Vec<Arrived>,
        now_ms: u64,
        limit: usize,
        rules: &Rules,
        mut make: impl FnMut(MessageHandle, &Pointer, Event) -> Result<Publication, String>,
    ) -> usize {
        arrived.sort_unstable_by_key(|arrived| arrived.pointer.seq);
        let open_transactions = OpenTransactions {
            all: false,
            open: (memory.open_transactions()).unwrap_or_else(|_| vec![OpenTransaction::holds_everything()]), // (c)
            rewinds: self.peek_rewinds(memory, &self.leases),                                                 // (d)
        };
        // The engine must know which lanes are blocked. It does once it has read the tables under these rules.
        let knows_blockers = rules.ordering != Ordering::Partition || now_ms < self.reread_at_ms;
        let is_usual = self.progress.is_unbounded() && !self.has_poison_candidates(1);
        let may_take =
            self.sharing == Sharing::Leases && is_usual && knows_blockers && !self.settles_more_than_published();
        let give_up = |arrived: &Arrived| {
            let (partition, seq) = arrived.pointer.which();
            memory.give_up(arrived.slot, &self.destination, partition, seq);
        };
        let (mut taken, mut given_up) = (Vec::new(), HashSet::new());
        for mut arrived in arrived {
            let (partition, _) = arrived.pointer.which();
            let lease = self.leases.iter().find(|(held, _)| *held == partition);
            let is_read =
                self.cursor(partition) == END && self.read_limit(partition) == END && !self.fresh.contains(&partition);
            let is_open = is_read && !self.leaving.contains(&partition) && !given_up.contains(&partition);
            match lease {
                Some((_, epoch)) if may_take && is_open && taken.len() < limit => {
                    arrived.pointer.lease_epoch = *epoch;
                    taken.push(arrived);
                }
                _ => {
                    given_up.insert(partition);
                    give_up(&arrived);
                }
            }
        }
        let without: Vec<i64> = (taken.iter())
            .filter(|arrived| arrived.event.is_none())
            .map(|arrived| arrived.pointer.seq)
            .collect();
        let mut events = match without.is_empty() {
            true => Events::new(),
            false => memory.read_events(&without, self.room_in_memory(now_ms).clamp(1, CLAIM_BYTES_MAX)),
        };
        let (mut batch, mut unread) = (Batch::default(), HashSet::new());
        for mut arrived in taken {
            let (partition, seq) = arrived.pointer.which();
            let event = arrived.event.take().map(Ok).or_else(|| events.remove(&seq));
            let is_new = !self.fast_in_flight.contains((partition, seq));
            match event {
                Some(event) if is_new && !unread.contains(&partition) => {
                    let Arrived {
                        slot, row_id, pointer, ..
                    } = arrived;
                    self.fast_in_flight.take(slot, partition, seq, now_ms);
                    batch.rows.push(Claimed { row_id, pointer, event });
                }
                _ => {
                    unread.insert(partition);
                    give_up(&arrived);
                }
            }
        }
        let count = batch.rows.len();
        self.admit(batch, rules, &open_transactions, &mut make);
        count
    }

    /// Frees the slots of messages that are settled, claimed or lost by now.
    pub fn free_slots(&mut self, memory: &impl Memory) {
        (self.fast_in_flight.take_ended_slots()).for_each(|slot| memory.free_slot(slot));
    }

    /// The time until a message that is fast-path in flight is to be claimed, in ms; None if there is no such message.
    pub fn claims_fast_in_ms(&self, now_ms: u64) -> Option<u64> {
        self.fast_in_flight.overdue_in_ms(now_ms)
    }

    /// Whether a message that was fast-path in flight has ended without being published and is not settled. Until then
    /// the tables do not show that, so a claim would let later messages of its key go.
    pub(super) fn has_ended_fast(&self) -> bool {
        let mut ended = (self.unsettled.iter()).filter(|ended| ended.disposition != Disposition::Publish);
        ended.any(|ended| (self.fast_in_flight).contains(ended.pointer.which()))
    }

    /// Returns those of the claimed rows that are new to the engine. The others were fast-path in flight: each keeps
    /// its state, and counts as claimed from now on.
    pub(super) fn recognise(&mut self, rows: Vec<Claimed>) -> Vec<Claimed> {
        if self.fast_in_flight.is_empty() {
            return rows;
        }
        let under_way: HashMap<(Partition, i64), MessageHandle> = (self.messages.iter())
            .map(|(handle, message)| (message.pointer.which(), *handle))
            .collect();
        let mut new = Vec::with_capacity(rows.len());
        for row in rows {
            let which = row.pointer.which();
            if !self.fast_in_flight.end(which.0, which.1) {
                new.push(row);
            } else if let Some(message) = under_way.get(&which).and_then(|handle| self.messages.get_mut(handle)) {
                message.row_id = row.row_id;
            } else {
                let mut ended = self.unsettled.iter_mut();
                if let Some(ended) = ended.find(|ended| ended.pointer.which() == which) {
                    ended.row_id = row.row_id;
                }
            }
        }
        new
    }

    /// Called after leases were lost. Forgets the messages that the engine neither has in flight nor settles under a
    /// lease that it still has. A message that was sent and has no outcome yet may stay with the engine, but its settle
    /// changes nothing any more. Under the next lease its row is claimed like any other.
    pub(super) fn forget_fast(&mut self) {
        if self.fast_in_flight.is_empty() {
            return;
        }
        let here: HashSet<(Partition, i64)> = (self.messages.values().map(|message| &message.pointer))
            .chain(self.unsettled.iter().map(|ended| &ended.pointer))
            .filter(|pointer| self.leases.contains(&(pointer.partition, pointer.lease_epoch)))
            .map(Pointer::which)
            .collect();
        self.fast_in_flight
            .retain(|partition, seq| here.contains(&(partition, seq)));
    }
}

#[cfg(test)]
mod tests;
