//! Which answers of the publisher others wait for, and when the last of any kind came.

use crate::key_order::Handle;
use std::collections::HashSet;

/// What the engine knows of the answers that are to come.
#[derive(Default)]
pub(super) struct Answers {
    /// With the publisher, and others wait for their answers.
    awaited: HashSet<Handle>,
    /// Something was handed over or answered since the worker listened last, and when it was, at the latest.
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

    /// When something was handed over or answered last, as far as the worker has noticed: asked at each of its passes.
    pub fn moved_ms(&mut self, now_ms: u64) -> u64 {
        if std::mem::take(&mut self.moved) {
            self.moved_ms = now_ms;
        }
        self.moved_ms
    }
}
