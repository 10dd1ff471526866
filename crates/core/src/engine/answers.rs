//! Outcomes that other messages wait for, and when a message was last handed over or answered. Used by the engine on
//! the worker's main thread.

use crate::key_order::MessageHandle;
use crate::message::Outcome;
use foldhash::HashSet;

/// The outcomes that are expected from the publisher.
#[derive(Default)]
pub(super) struct Answers {
    /// Messages with the publisher whose outcomes other messages wait for.
    awaited: HashSet<MessageHandle>,
    /// Whether a message was handed over or answered since `moved_ms` was last called.
    moved: bool,
    /// When `moved_ms` last found that a message was handed over or answered, in ms.
    moved_ms: u64,
    /// Whether the last outcome was an answer, and when it came, in ms; None = there was none yet.
    last: Option<(bool, u64)>,
    /// Since when messages wait for an answer and none comes, in ms. Without meaning while none is with the publisher.
    silent_since_ms: u64,
}

impl Answers {
    pub fn await_those(&mut self, handles: impl IntoIterator<Item = MessageHandle>) {
        self.awaited.extend(handles);
    }

    /// `is_first`: no other message is with the publisher.
    pub fn handed_over(&mut self, is_first: bool, now_ms: u64) {
        self.moved = true;
        if is_first {
            self.silent_since_ms = now_ms;
        }
    }

    pub fn on_outcome(&mut self, outcome: &Outcome, now_ms: u64) {
        self.last = Some((outcome.is_answer(), now_ms));
        self.silent_since_ms = now_ms;
    }

    /// For how long no answer came, in ms; 0 while none of `waiting` messages waits for one.
    pub fn silent_ms(&self, now_ms: u64, waiting: usize) -> u64 {
        match waiting {
            0 => 0,
            _ => now_ms.saturating_sub(self.silent_since_ms),
        }
    }

    /// Whether the last outcome was an answer, and when it came, in ms; None = there was none yet.
    pub fn last(&self) -> Option<(bool, u64)> {
        self.last
    }

    /// The message has its outcome, or its outcome no longer matters.
    pub fn on_end(&mut self, handle: MessageHandle) {
        self.moved = true;
        self.awaited.remove(&handle);
    }

    pub fn clear(&mut self) {
        self.awaited.clear();
    }

    pub fn are_awaited(&self) -> bool {
        !self.awaited.is_empty()
    }

    /// When a message was last handed over or answered, in ms. Each pass calls it once, so the time is that of the
    /// pass.
    pub fn moved_ms(&mut self, now_ms: u64) -> u64 {
        if std::mem::take(&mut self.moved) {
            self.moved_ms = now_ms;
        }
        self.moved_ms
    }
}
