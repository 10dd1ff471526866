//! The totals of a run, over all its sessions.

use outbox_core::settle::{Disposition, Ended};
use std::collections::HashMap;

#[derive(Default)]
pub struct Totals {
    pub claimed: u64,
    ended: HashMap<String, Ended>,
}

impl Totals {
    /// Counts a message that was settled with this disposition.
    pub fn count(&mut self, destination: &str, disposition: &Disposition) {
        match self.ended.get_mut(destination) {
            Some(ended) => ended.note(disposition),
            None => {
                let mut ended = Ended::default();
                ended.note(disposition);
                self.ended.insert(destination.to_owned(), ended);
            }
        }
    }

    pub fn of(&self, destination: &str) -> Ended {
        self.ended.get(destination).copied().unwrap_or_default()
    }

    pub fn all(&self) -> Ended {
        let mut all = Ended::default();
        self.ended.values().for_each(|ended| all.add(*ended));
        all
    }

    /// The number of failed attempts and expired messages.
    pub fn failed(&self) -> u64 {
        let all = self.all();
        all.retried + all.all_dead()
    }
}
