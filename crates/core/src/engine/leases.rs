//! The leases of an engine, and the fate of its messages when the leases change. Called by the worker's main thread
//! after it has refreshed the leases.

use super::rows::HeldLease;
use super::{Engine, Sharing};
use crate::partition::Partition;
use std::collections::HashSet;

impl Engine {
    /// Replaces the leases. `held` are the leases that the worker has now; `leaving` are those of their partitions that
    /// another worker is to take over. A partition whose lease has a new epoch is treated as newly leased.
    pub fn set_leases(&mut self, held: Vec<HeldLease>, leaving: HashSet<Partition>) {
        if self.sharing == Sharing::RowClaims {
            return; // row claims do not depend on leases
        }
        let unchanged: HashSet<Partition> = (held.iter())
            .filter(|lease| self.leases.contains(lease))
            .map(|(partition, _)| *partition)
            .collect();
        for answered in self.key_order.forget(|partition| !unchanged.contains(&partition)) {
            self.messages.remove(&answered);
        }
        self.read_limits.forget(|partition| !unchanged.contains(&partition));
        // Parked and ready messages of a lost lease are dropped. A message with the publisher may still end here,
        // unless it is ordered. An ordered one would end out of order, because its key is forgotten, and the epoch does
        // not refuse its settle before another worker takes the lease.
        let ready = std::mem::take(&mut self.ready);
        self.ready = (ready.into_iter())
            .filter(|handle| (self.messages.get(handle)).is_some_and(|m| unchanged.contains(&m.pointer.partition)))
            .collect();
        self.yielding
            .retain(|handle| (self.messages.get(handle)).is_some_and(|m| unchanged.contains(&m.pointer.partition)));
        self.messages.retain(|handle, message| {
            let sent = message.publication.is_none();
            let stays = unchanged.contains(&message.pointer.partition) || (sent && !message.ordered);
            if sent && !stays {
                self.with_publisher.less(Some(message));
                self.alone = self.alone.filter(|alone| alone != handle);
                self.answers.on_end(*handle);
            }
            stays
        });
        for (partition, _) in &held {
            // A partition that was leaving and now stays was not read in the meantime.
            let stays = self.leaving.contains(partition) && !leaving.contains(partition);
            if !unchanged.contains(partition) || stays {
                self.fresh.insert(*partition);
            }
        }
        self.cursors.retain(|partition| unchanged.contains(&partition));
        self.rewinds.retain(|partition, _| unchanged.contains(partition));
        self.suspects.retain(|partition| unchanged.contains(&partition));
        let is_held = |partition: &Partition| held.iter().any(|(still, _)| still == partition);
        self.fresh.retain(is_held);
        self.unblocked.retain(is_held);
        self.swept.retain(is_held);
        let parked = self
            .key_order
            .give_up_unsent(|partition| leaving.contains(&partition), |_| false);
        self.release(parked, "another worker takes over the partition");
        // A leaving partition whose lease could not be renewed is lost already.
        self.leaving = leaving
            .into_iter()
            .filter(|p| held.iter().any(|(h, _)| h == p))
            .collect();
        self.leases = held;
        let leaving = self.leaving.clone();
        self.send_yielding(|partition| leaving.contains(&partition)); // nothing of it may stay in flight
        self.forget_fast();
    }

    /// Lets the next claim read all lanes and blocked keys from the tables again, because the rules changed.
    pub fn reread_all(&mut self) {
        self.reread_at_ms = 0;
    }

    /// Lets the next claims read all lanes and blocked keys from the tables again, to find rows that no rewind announced.
    pub fn sweep(&mut self) {
        self.swept.extend(self.leases.iter().map(|(partition, _)| *partition));
    }
}
