//! The lanes that an engine serves, and the messages of lanes that it loses. The worker calls it on its main thread
//! after it has read the leases.

use super::rows::Held;
use super::{Engine, Sharing};
use crate::partition::Partition;
use std::collections::HashSet;

impl<P: Clone> Engine<P> {
    /// The leases that are held now, and those of them that another worker shall have. A lease with a new epoch starts
    /// from the beginning.
    pub fn set_leases(&mut self, held: Vec<Held>, leaving: HashSet<Partition>) {
        if self.sharing == Sharing::RowClaims {
            return; // there are none, and messages in flight do not depend on them
        }
        let kept: HashSet<Partition> = (held.iter())
            .filter(|lease| self.leases.contains(lease))
            .map(|(partition, _)| *partition)
            .collect();
        for answered in self.key_order.forget(|partition| !kept.contains(&partition)) {
            self.messages.remove(&answered);
        }
        self.lanes.forget(|partition| !kept.contains(&partition));
        // Parked and ready messages of a lost lease are not sent. Messages with the publisher end with their outcome,
        // unless they have an order: they would end out of it, because their key is forgotten, and no fence stops that
        // until another worker takes the lease.
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
            // A lease that was to be given up and is kept: its lane was not read meanwhile.
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
        // A lease that was to be given up and could not be renewed is already lost.
        self.leaving = leaving
            .into_iter()
            .filter(|p| held.iter().any(|(h, _)| h == p))
            .collect();
        self.leases = held;
        self.forget_fast();
    }

    /// The rules changed: messages behind another must be judged again.
    pub fn reread_all(&mut self) {
        self.sweep_at_ms = 0;
    }
}
