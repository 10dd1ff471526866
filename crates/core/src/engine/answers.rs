//! Outcomes that other messages wait for, and when a message was last handed over or answered. Used by the engine on
//! the worker's main thread.

use crate::key_order::MessageHandle;
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
}

impl Answers {
    pub fn await_those(&mut self, handles: impl IntoIterator<Item = MessageHandle>) {
        self.awaited.extend(handles);
    }

    pub fn handed_over(&mut self) {
        self.moved = true;
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
