//! What the destinations of one worker report to each other: rewinds of a partition, and that due messages are brought
//! back. `destination` and `tables` call it on the worker's thread. One destination can take a rewind word from shared
//! memory that several destinations share; the others find it here.

use outbox_core::partition::Partition;
use std::cell::{Cell, RefCell};
use std::collections::HashMap;

/// The seq from which each partition must be read again.
type Rewinds = HashMap<Partition, i64>;

#[derive(Default)]
pub struct Notices {
    /// The served destinations, each with the rewinds that it has not taken yet.
    rewinds: RefCell<Vec<(String, Rewinds)>>,
    /// None: this pass has not brought back due messages yet. Some(ms until the next message is due): it has.
    brought: Cell<Option<Option<u64>>>,
}

impl Notices {
    /// Replaces the served destinations. Rewinds of a destination that stays are kept.
    pub fn serve(&self, destinations: impl Iterator<Item = String>) {
        let mut before = self.rewinds.take();
        let with_rewinds = |name: String| {
            let known = before.iter_mut().find(|(known, _)| *known == name);
            let rewinds = known.map(|(_, rewinds)| std::mem::take(rewinds)).unwrap_or_default();
            (name, rewinds)
        };
        self.rewinds.replace(destinations.map(with_rewinds).collect());
    }

    /// Whether the worker serves more than one destination.
    pub fn serves_several(&self) -> bool {
        self.rewinds.borrow().len() > 1
    }

    pub fn begin_pass(&self) {
        self.brought.set(None);
    }

    /// Some(ms until the next message is due) if this pass has already brought back due messages.
    pub fn brought(&self) -> Option<Option<u64>> {
        self.brought.get()
    }

    pub fn has_brought(&self, next_ms: Option<u64>) {
        self.brought.set(Some(next_ms));
    }

    /// Makes the destinations that `concerns` selects read the partition again from `seq`.
    pub fn add(&self, concerns: impl Fn(&str) -> bool, partition: Partition, seq: i64) {
        for (_, rewinds) in self.rewinds.borrow_mut().iter_mut().filter(|(name, _)| concerns(name)) {
            let low = rewinds.entry(partition).or_insert(seq);
            *low = seq.min(*low);
        }
    }

    pub fn take(&self, destination: &str, partition: Partition) -> Option<i64> {
        self.of(destination, |rewinds| rewinds.remove(&partition))
    }

    pub fn peek(&self, destination: &str, partition: Partition) -> Option<i64> {
        self.of(destination, |rewinds| rewinds.get(&partition).copied())
    }

    fn of<T>(&self, destination: &str, read: impl FnOnce(&mut Rewinds) -> Option<T>) -> Option<T> {
        let mut all = self.rewinds.borrow_mut();
        let (_, rewinds) = all.iter_mut().find(|(name, _)| name == destination)?;
        read(rewinds)
    }
}
