//! A message between its claim and its settle, and how many of them are with the publisher.

use crate::message::{Outcome, Pointer, Publication};

/// A message between claim and settle.
pub(super) struct Message<P> {
    pub row_id: P,
    pub pointer: Pointer,
    /// The publication, or why it cannot be sent; None once handed over.
    pub publication: Option<Result<Publication, Outcome>>,
    /// The size of the publication, also once it is handed over.
    pub body_bytes: usize,
    /// The key order tracks it: others wait for it.
    pub ordered: bool,
}

/// The messages with the publisher.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct WithPublisher {
    pub count: usize,
    /// The size of the bodies.
    pub bytes: usize,
}

impl WithPublisher {
    pub fn more<P>(&mut self, message: &Message<P>) {
        self.count += 1;
        self.bytes += message.body_bytes;
    }

    pub fn less<P>(&mut self, message: Option<&Message<P>>) {
        self.count = self.count.saturating_sub(1);
        self.bytes = self
            .bytes
            .saturating_sub(message.map_or(0, |message| message.body_bytes));
    }
}
