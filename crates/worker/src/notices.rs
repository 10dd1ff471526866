//! What the destinations of one worker tell each other: from where a partition must be read again, where one of them has
//! learnt it for several; and what was brought back in this pass.

use outbox_core::partition::Partition;
use std::cell::{Cell, RefCell};
use std::collections::HashMap;

/// From which seq on each partition must be read again.
type Lows = HashMap<Partition, i64>;

#[derive(Default)]
pub struct Notices {
    /// The destinations that are served, with what each has not heard yet.
    lows: RefCell<Vec<(String, Lows)>>,
    /// Whether this pass has brought back what is due, and in how many ms the next is.
    brought: Cell<Option<Option<u64>>>,
}

impl Notices {
    /// These destinations are served from now on.
    pub fn serve(&self, destinations: impl Iterator<Item = String>) {
        let mut before = self.lows.take();
        let with_lows = |name: String| {
            let known = before.iter_mut().find(|(known, _)| *known == name);
            let lows = known.map(|(_, lows)| std::mem::take(lows)).unwrap_or_default();
            (name, lows)
        };
        self.lows.replace(destinations.map(with_lows).collect());
    }

    /// Whether there is more than one.
    pub fn serves_several(&self) -> bool {
        self.lows.borrow().len() > 1
    }

    pub fn begin_pass(&self) {
        self.brought.set(None);
    }

    /// Some(in how many ms the next is due) if this pass has brought back what is due.
    pub fn brought(&self) -> Option<Option<u64>> {
        self.brought.get()
    }

    pub fn has_brought(&self, next_ms: Option<u64>) {
        self.brought.set(Some(next_ms));
    }

    /// Those destinations must read a partition again from `seq` on.
    pub fn add(&self, whom: impl Fn(&str) -> bool, partition: Partition, seq: i64) {
        for (_, lows) in self.lows.borrow_mut().iter_mut().filter(|(name, _)| whom(name)) {
            let low = lows.entry(partition).or_insert(seq);
            *low = seq.min(*low);
        }
    }

    pub fn take(&self, destination: &str, partition: Partition) -> Option<i64> {
        self.of(destination, |lows| lows.remove(&partition))
    }

    pub fn peek(&self, destination: &str, partition: Partition) -> Option<i64> {
        self.of(destination, |lows| lows.get(&partition).copied())
    }

    fn of<T>(&self, destination: &str, read: impl FnOnce(&mut Lows) -> Option<T>) -> Option<T> {
        let mut all = self.lows.borrow_mut();
        let (_, lows) = all.iter_mut().find(|(name, _)| name == destination)?;
        read(lows)
    }
}
