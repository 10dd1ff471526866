//! Messages that failed alone before and let others go first. Called by the engine when messages are admitted, after
//! each claim, and when the destination answers.
//!
//! While no message arrives, only one is tried at a time, and the destination rests in between. A message that failed
//! is due again before the next try, and has the lowest seq of its lane. If it were tried again first, messages for
//! another queue or path of the destination would never be tried: each message that failed would cost a rest. So it is
//! claimed and yields until the lanes are read. Then it goes if there is no other, and of those that yield the one
//! that failed first.
//!
//! They are given back while the destination rests, so that they can expire and be discarded.

use super::{CRASHES_ALONE, Engine};
use crate::key_order::MessageHandle;
use crate::message::Outcome;
use crate::partition::Partition;
use crate::settle::{self, Rules};

impl Engine {
    /// Whether this message, which may be sent now, is to yield. Not if a later message of its key could then
    /// overtake it, if a request or another worker waits for its end, or if another crash could make it a dead letter.
    pub(super) fn must_yield(&self, handle: MessageHandle) -> bool {
        if !self.suspects.in_doubt() {
            return false;
        }
        let Some(message) = self.messages.get(&handle) else {
            return false;
        };
        let pointer = &message.pointer;
        let blocks_its_key = !message.ordered
            || self.key_order.is_first(handle)
            || self.read_limits.is_blocker(pointer.partition, pointer.seq);
        self.suspects.failed_at(pointer).is_some()
            && blocks_its_key
            && self.progress.is_unbounded()
            && !self.leaving.contains(&pointer.partition)
            && pointer.crashes < CRASHES_ALONE
    }

    /// Keeps a message back while others go first. If too many yield, the one that failed last is put off instead.
    pub(super) fn yield_to_others(&mut self, handle: MessageHandle, rules: &Rules) {
        self.yielding.push(handle);
        let bytes: usize = (self.yielding.iter().filter_map(|handle| self.messages.get(handle)))
            .map(|message| message.memory.bytes())
            .sum();
        let fits = self.yielding.len() <= self.bounds.parked && bytes <= self.bounds.bytes;
        if fits || self.yielding.len() == 1 {
            return; // one of any size can take its turn
        }
        let last = (0..self.yielding.len()).max_by_key(|index| self.failed_at(self.yielding[*index]));
        let handle = self.yielding.swap_remove(last.unwrap_or_default());
        if let Some(message) = self.messages.get(&handle) {
            let failure = self.suspects.failure(&message.pointer);
            let reason = failure.text.clone();
            let put_off = settle::let_others_go_first(failure, handle);
            self.end_with(handle, &Outcome::Lost { reason }, rules, |_, _, _, _| put_off.clone());
        }
    }

    fn failed_at(&self, handle: MessageHandle) -> Option<u64> {
        self.suspects.failed_at(&self.messages.get(&handle)?.pointer)
    }

    /// Called after a claim: if all lanes are read and no other message is on its way or about to be, one of those that
    /// yield goes.
    pub(super) fn send_next_yielding(&mut self) {
        if self.full || self.drains || !self.ready.is_empty() || self.with_publisher.count > 0 {
            return;
        }
        if let Some(first) = (0..self.yielding.len()).min_by_key(|index| self.failed_at(self.yielding[*index])) {
            self.ready.push_back(self.yielding.swap_remove(first));
        }
    }

    /// Releases the messages that yield. Called when a message arrived, and while the destination rests.
    pub fn give_back_yielding(&mut self, rules: &Rules) {
        for handle in std::mem::take(&mut self.yielding) {
            let Some(message) = self.messages.get(&handle) else {
                continue;
            };
            let reason = self.suspects.failure(&message.pointer).text;
            self.end(handle, &Outcome::Lost { reason }, rules, 0);
        }
    }

    /// Makes the messages ready that yield and whose partition is in `scope`.
    pub(super) fn send_yielding(&mut self, scope: impl Fn(Partition) -> bool) {
        let messages = &self.messages;
        let is_in = |handle: &mut MessageHandle| messages.get(handle).is_some_and(|m| scope(m.pointer.partition));
        self.ready.extend(self.yielding.extract_if(.., is_in));
    }
}

#[cfg(test)]
mod tests;
