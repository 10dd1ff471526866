//! The answers of the publisher that other messages wait for, and when the last answer of any kind arrived.

use crate::key_order::Handle;
use std::collections::HashSet;

/// The engine's view of the answers to come.
#[derive(Default)]
pub(super) struct Answers {
    /// Messages with the publisher whose answers others wait for.
    awaited: HashSet<Handle>,
    /// A message was handed over or answered since the worker last set its wake policy, and the latest time at which
    /// that was.
    moved: bool,
    moved_ms: u64,
}

impl Answers {
    pub fn await_those(&mut self, handles: impl IntoIterator<Item = Handle>) {
        self.awaited.extend(handles);
    }

    pub fn handed_over(&mut self) {
        self.moved = true;
    }

    /// It is answered, or its answer does not matter any more.
    pub fn over(&mut self, handle: Handle) {
        self.moved = true;
        self.awaited.remove(&handle);
    }

    pub fn all_over(&mut self) {
        self.awaited.clear();
    }

    pub fn are_awaited(&self) -> bool {
        !self.awaited.is_empty()
    }

    /// When a message was last handed over or answered, as far as the worker has noticed: called in each of its passes.
    pub fn moved_ms(&mut self, now_ms: u64) -> u64 {
        if std::mem::take(&mut self.moved) {
            self.moved_ms = now_ms;
        }
        self.moved_ms
    }
}
