//! Messages in hand: what small transactions have published comes by shared memory as well as by the table, and goes out
//! before anything is claimed. Called by the worker's main thread, before [`Engine::claim`].
//!
//! What may be taken, and why nothing overtakes. A transaction lays down its messages before it commits, and says that they
//! are ready before it leaves the registry. A pass (b) takes what is ready, (c) reads which transactions are open, and (d)
//! looks at what is ready by then, and whether something was committed that lies in the table only. It takes nothing of a
//! lane that is not read to its end, or that stands still behind one that failed. So whoever drew a lower seq than a message
//! taken at (b) was taken before, or has been claimed, or is open at (c), or shows at (d): as with a claim, and held for as
//! long. (d) looks at what is ready first, and who takes away what is ready tells of it before. A model of this is in
//! tests/model_fast_path.rs.
//!
//! No message goes twice. Its row is visible only after it was laid down, so a claim that brings the row finds the message
//! still there and takes it away (`Memory::revoke`), or finds it in hand: then it is claimed from there on.
//!
//! Nothing is lost with it. What is not taken, or given up, is told of as any other commit, and read from the table. The row
//! is settled without a claim, under the lock of the lease. What the peer does not answer soon is claimed: so a message
//! that kills its worker is charged for it the next time.

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
    /// Takes in hand what has come by shared memory, up to `limit`, and makes ready what may go; the rest is given up.
    /// Before a claim, and before a settle, which waits for the disk; when a claim may be made. What is unsettled and goes
    /// back must not be overtaken, so until that is settled all is left where it lies. Returns how many it took.
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
        // Which lanes stand still must be known, as it is once the tables were read under these rules.
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

    /// Lets go of what is settled, claimed or lost by now.
    pub fn let_go(&mut self, fast_path: &impl FastPath<P>) {
        self.fast_in_flight.over().for_each(|slot| fast_path.let_go(slot));
    }

    /// In how many ms something in hand is to be claimed; None if there is nothing.
    pub fn claims_fast_in_ms(&self, now_ms: u64) -> Option<u64> {
        self.fast_in_flight.lasts_in_ms(now_ms)
    }

    /// Something in hand has ended and is not published: until that is settled, the tables do not tell of it, and what is
    /// behind it in its key would be let go.
    pub(super) fn has_ended_fast(&self) -> bool {
        let mut ended = (self.unsettled.iter()).filter(|ended| ended.disposition != Disposition::Publish);
        ended.any(|ended| (self.fast_in_flight).contains((ended.pointer.partition, ended.pointer.seq)))
    }

    /// Of what a claim has brought, what was in hand is claimed now, and stays what it is; the rest is new.
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

    /// Forgets what is neither under way nor to be settled under a lease that is held: leases were lost. What is sent and
    /// not answered yet may stay with the engine, but its settle changes nothing any more: under the next lease its row is
    /// to be claimed as any other.
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
