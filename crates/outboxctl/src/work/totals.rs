//! All that a run did, whatever sessions it needed.

use outbox_core::settle::{Disposition, Ended};
use std::collections::HashMap;

#[derive(Default)]
pub struct Totals {
    pub claimed: u64,
    ended: HashMap<String, Ended>,
}

impl Totals {
    pub fn note(&mut self, destination: &str, disposition: &Disposition) {
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

    /// Messages that failed or expired, each as often as it did.
    pub fn failed(&self) -> u64 {
        let all = self.all();
        all.retried + all.all_dead()
    }
}
