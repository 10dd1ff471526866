//! A message between its claim and its outcome, and the number and size of the messages with the publisher.

use super::rows::RowId;
use crate::memory_budget::TakenMemory;
use crate::message::{Outcome, Pointer, Publication};

/// A message of the engine, from its claim until its disposition is decided.
pub(super) struct ClaimedMessage {
    pub row_id: RowId,
    pub pointer: Pointer,
    /// What is sent, or the outcome of a message that cannot be sent; None once it is handed over.
    pub publication: Option<Result<Publication, Outcome>>,
    /// What it takes until it has ended, also once it is handed over.
    pub memory: TakenMemory,
    /// Whether [`KeyOrder`](crate::key_order::KeyOrder) tracks it, so that other messages wait for it.
    pub ordered: bool,
}

/// The messages that the publisher has and that have no outcome yet.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct WithPublisher {
    pub count: usize,
    /// What they take together.
    pub bytes: usize,
}

impl WithPublisher {
    pub fn more(&mut self, message: &ClaimedMessage) {
        self.count += 1;
        self.bytes += message.memory.bytes();
    }

    pub fn less(&mut self, message: Option<&ClaimedMessage>) {
        self.count = self.count.saturating_sub(1);
        self.bytes = self
            .bytes
            .saturating_sub(message.map_or(0, |message| message.memory.bytes()));
    }
}
