//! The fast path: messages of small transactions arrive by shared memory as well as by the table, and are sent before
//! they are claimed. The worker calls it on its main thread, before [`Engine::claim`].
//!
//! Which messages may be taken, and why none overtakes another. A transaction copies its messages into slots before it
//! commits, and marks them ready before it leaves the list of open transactions. A pass (b) takes the ready messages,
//! (c) reads which transactions are open, and (d) reads which messages are ready by then, and whether a transaction
//! committed rows that are only in the table. It takes no message of a lane that is not read to its end, or that is
//! blocked by a failed message. So a message with a lower seq than one taken at (b) was taken before, or has been
//! claimed, or its transaction is open at (c) or shows at (d): as with a claim, and held for as long. (d) reads the
//! ready messages first, and a process that revokes a ready message publishes a rewind before. tests/model_fast_path.rs
//! has a model of this.
//!
//! No message is sent twice. Its row is visible only after its slot was filled. So a claim that brings the row finds
//! the message still in its slot and revokes it (`Memory::revoke`), or finds it in flight: then it counts as claimed
//! from there on.
//!
//! No message is lost. A message that is not taken, or is given up, is published as a rewind like any other commit, and
//! read from the table. A row is settled without a claim, under the lock of the lease. A message that the peer does not
//! answer soon is claimed: so a message that crashes its worker is charged for it the next time.

use super::batch::Batch;
use super::cursors::END;
use super::ports::{FastPath, Memory};
use super::rows::Claimed;
use super::{Engine, Sharing};
use crate::key_order::Handle;
use crate::message::{Event, Pointer, Publication};
use crate::open_transactions::OpenTransactions;
use crate::partition::Partition;
use crate::settle::{Disposition, Ordering, Rules};
use std::collections::{HashMap, HashSet};

impl<P: Clone> Engine<P> {
    /// Takes messages that came by shared memory, up to `limit`, makes ready those that may be sent, and gives up the
    /// rest. Called before a claim, and before a settle, which waits for the disk, if a claim may be made. Unsettled
    /// messages that are released must not be overtaken, so until they are settled all slots stay as they are. Returns
    /// the number taken.
    pub fn receive(
        &mut self,
        fast_path: &impl FastPath<P>,
        memory: &impl Memory,
        now_ms: u64,
        limit: usize,
        rules: &Rules,
        mut make: impl FnMut(Handle, &Pointer, &Event) -> Result<Publication, String>,
    ) -> usize {
        if self.settles_more_than_published() {
            return 0;
        }
        let mut arrived = fast_path.take(); // (b)
        if arrived.is_empty() {
            return 0;
        }
        arrived.sort_unstable_by_key(|(_, claimed)| claimed.pointer.seq);
        let open_transactions = OpenTransactions {
            all: false,
            open: memory.open_transactions(), // (c)
            rewinds: (self.leases.iter())
                .filter_map(|(partition, _)| Some((*partition, memory.peek_rewind(*partition)?))) // (d)
                .collect(),
        };
        // It must be known which lanes are blocked, as it is once the tables were read under these rules.
        let knows_blockers = rules.ordering != Ordering::Partition || now_ms < self.sweep_at_ms;
        let is_usual = self.progress.is_unbounded() && !self.has_poison_candidates(1);
        let may_take = self.sharing == Sharing::Leases && is_usual && knows_blockers;
        let mut given_up = HashSet::new();
        let mut batch = Batch::default();
        for (slot, mut claimed) in arrived {
            let (partition, seq) = claimed.which();
            let lease = self.leases.iter().find(|(held, _)| *held == partition);
            let is_read =
                self.cursor(partition) == END && self.read_limit(partition) == END && !self.fresh.contains(&partition);
            let is_open = is_read && !self.leaving.contains(&partition) && !given_up.contains(&partition);
            let is_new = !self.fast_in_flight.contains((partition, seq));
            match lease {
                Some((_, epoch)) if may_take && is_open && is_new && batch.rows.len() < limit => {
                    claimed.pointer.lease_epoch = *epoch;
                    self.fast_in_flight.take(slot, partition, seq, now_ms);
                    batch.rows.push(claimed);
                }
                _ => {
                    given_up.insert(partition);
                    fast_path.give_up(slot, partition, seq);
                }
            }
        }
        let count = batch.rows.len();
        self.admit(batch, rules, &open_transactions, &mut make);
        count
    }

    /// Frees the slots of messages that are settled, claimed or lost by now.
    pub fn let_go(&mut self, fast_path: &impl FastPath<P>) {
        self.fast_in_flight.over().for_each(|slot| fast_path.let_go(slot));
    }

    /// The time in ms until a message of the fast path must be claimed; None if there is none.
    pub fn claims_fast_in_ms(&self, now_ms: u64) -> Option<u64> {
        self.fast_in_flight.lasts_in_ms(now_ms)
    }

    /// A message of the fast path has ended and is not published: until that is settled, the tables do not show it, and
    /// later messages of its key would be sent.
    pub(super) fn has_ended_fast(&self) -> bool {
        let mut ended = (self.unsettled.iter()).filter(|ended| ended.disposition != Disposition::Publish);
        ended.any(|ended| (self.fast_in_flight).contains((ended.pointer.partition, ended.pointer.seq)))
    }

    /// Of the rows of a claim, those in flight on the fast path now count as claimed, and keep their state; the rest is
    /// new.
    pub(super) fn recognise(&mut self, rows: Vec<Claimed<P>>) -> Vec<Claimed<P>> {
        if self.fast_in_flight.is_empty() {
            return rows;
        }
        let under_way: HashMap<(Partition, i64), Handle> = (self.messages.iter())
            .map(|(handle, message)| ((message.pointer.partition, message.pointer.seq), *handle))
            .collect();
        let mut new = Vec::with_capacity(rows.len());
        for row in rows {
            let which = row.which();
            if !self.fast_in_flight.end(which.0, which.1) {
                new.push(row);
            } else if let Some(message) = under_way.get(&which).and_then(|handle| self.messages.get_mut(handle)) {
                message.row_id = row.row_id;
            } else {
                let mut ended = self.unsettled.iter_mut();
                if let Some(ended) = ended.find(|ended| (ended.pointer.partition, ended.pointer.seq) == which) {
                    ended.row_id = row.row_id;
                }
            }
        }
        new
    }

    /// Leases were lost: forgets messages that are neither under way nor to be settled under a lease that is held.
    /// Messages that were sent and not answered may stay with the engine, but their settle changes nothing: under the
    /// next lease their rows are claimed like any others.
    pub(super) fn forget_fast(&mut self) {
        if self.fast_in_flight.is_empty() {
            return;
        }
        let here: HashSet<(Partition, i64)> = (self.messages.values().map(|message| &message.pointer))
            .chain(self.unsettled.iter().map(|ended| &ended.pointer))
            .filter(|pointer| self.leases.contains(&(pointer.partition, pointer.lease_epoch)))
            .map(|pointer| (pointer.partition, pointer.seq))
            .collect();
        self.fast_in_flight
            .retain(|partition, seq| here.contains(&(partition, seq)));
    }
}

#[cfg(test)]
mod tests;
