//! The totals of a run, over all its sessions.

use outbox_core::settle::Ended;

#[derive(Default)]
pub struct Totals {
    pub claimed: u64,
    pub ended: Ended,
}

impl Totals {
    /// The number of failed attempts and expired messages.
    pub fn failed(&self) -> u64 {
        self.ended.retried + self.ended.all_dead()
    }
}
