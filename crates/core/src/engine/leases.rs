//! Which lanes an engine serves, and what becomes of its messages when that changes. Called by the worker's main thread when
//! it has looked at the leases.

use super::rows::Held;
use super::{Engine, Sharing};
use crate::partition::Partition;
use std::collections::HashSet;

impl<P: Clone> Engine<P> {
    /// What is held now, and what of it another worker shall have. A lease with a new epoch starts anew.
    pub fn set_leases(&mut self, held: Vec<Held>, leaving: HashSet<Partition>) {
        if self.sharing == Sharing::RowClaims {
            return; // there are none, and what is in flight does not depend on them
        }
        let kept: HashSet<Partition> = (held.iter())
            .filter(|lease| self.leases.contains(lease))
            .map(|(partition, _)| *partition)
            .collect();
        for answered in self.key_order.forget(|partition| !kept.contains(&partition)) {
            self.messages.remove(&answered);
        }
        self.lanes.forget(|partition| !kept.contains(&partition));
        // What is parked or ready of a lost lease goes nowhere. What is with the publisher ends as it ends, unless it is in
        // an order; then it would end out of it, for its gate is forgotten, and no fence stops it until somebody else takes
        // the lease.
        let ready = std::mem::take(&mut self.ready);
        self.ready = (ready.into_iter())
            .filter(|handle| (self.messages.get(handle)).is_some_and(|m| kept.contains(&m.pointer.partition)))
            .collect();
        self.messages.retain(|handle, message| {
            let sent = message.publication.is_none();
            let stays = kept.contains(&message.pointer.partition) || (sent && !message.ordered);
            if sent && !stays {
                self.with_publisher.less(Some(message));
                self.alone = self.alone.filter(|alone| alone != handle);
                self.answers.over(*handle);
            }
            stays
        });
        for (partition, _) in &held {
            // One that was to leave and stays was not looked at meanwhile.
            let stays = self.leaving.contains(partition) && !leaving.contains(partition);
            if !kept.contains(partition) || stays {
                self.fresh.insert(*partition);
            }
        }
        self.cursors.retain(|partition| kept.contains(&partition));
        self.fresh
            .retain(|partition| held.iter().any(|(still, _)| still == partition));
        let parked = self.key_order.give_up_parked(|partition| leaving.contains(&partition));
        self.release(parked, "another worker takes over the partition");
        // One that was to leave and could not be renewed is lost already.
        self.leaving = leaving
            .into_iter()
            .filter(|p| held.iter().any(|(h, _)| h == p))
            .collect();
        self.leases = held;
        self.forget_fast();
    }

    /// The rules changed: what stands behind another is to be judged anew.
    pub fn reread_all(&mut self) {
        self.sweep_at_ms = 0;
    }
}
