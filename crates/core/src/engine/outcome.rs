//! Takes the publisher's outcomes, and releases messages that get none. Called on the worker's main thread.

use super::rows::Settlement;
use super::suspects::Suspects;
use super::under_way::{ClaimedMessage, WithPublisher};
use super::{Engine, Sharing};
use crate::key_order::MessageHandle;
use crate::message::{Outcome, Pointer};
use crate::settle::{Blocks, Disposition, Ordering, Rules, decide};
use std::collections::HashSet;

impl Engine {
    /// Takes the publisher's outcome for one message. `since_ms` is when the outcome began to wait for its settle.
    pub fn on_outcome(&mut self, handle: MessageHandle, outcome: &Outcome, rules: &Rules, since_ms: u64, seed: u64) {
        if self.unsettled.is_empty() {
            self.unsettled_since_ms = since_ms;
        }
        let Some(message) = self.messages.get(&handle) else {
            return;
        };
        self.with_publisher.less(Some(message));
        self.alone = self.alone.filter(|alone| *alone != handle);
        self.answers.on_end(handle);
        self.answers.on_outcome(outcome, since_ms);
        self.end(handle, outcome, rules, seed);
        if !self.suspects.in_doubt() {
            self.give_back_yielding(rules); // the window decides how many of them go at a time
        }
    }

    pub(super) fn end(&mut self, handle: MessageHandle, outcome: &Outcome, rules: &Rules, seed: u64) {
        self.end_with(
            handle,
            outcome,
            rules,
            |suspects, handle, outcome, pointer| match pointer {
                Some(pointer) => suspects.decide(outcome, pointer, &rules.retry, handle ^ seed),
                None => decide(outcome, 0, &rules.retry, handle ^ seed),
            },
        );
    }

    pub(super) fn end_with(
        &mut self,
        handle: MessageHandle,
        outcome: &Outcome,
        rules: &Rules,
        mut decide: impl FnMut(&mut Suspects, MessageHandle, &Outcome, Option<&Pointer>) -> Disposition,
    ) {
        if !outcome.is_passed() {
            // Later messages of its key that the publisher does not have yet must not overtake it.
            let messages = &self.messages;
            let unsent = |handle| (messages.get(&handle)).is_some_and(|message| message.publication.is_some());
            let held_back: HashSet<MessageHandle> = self.key_order.hold_back(handle, unsent).into_iter().collect();
            if !held_back.is_empty() {
                self.ready.retain(|handle| !held_back.contains(handle));
            }
            self.answers.await_those(self.key_order.unanswered_beside(handle));
        }
        let dead_blocks = self.dead_blocks(rules) != Blocks::Nothing;
        let (messages, suspects) = (&self.messages, &mut self.suspects);
        let ended = self
            .key_order
            .on_outcome(handle, outcome, dead_blocks, |handle, outcome| {
                let pointer = messages.get(&handle).map(|message| &message.pointer);
                decide(suspects, handle, outcome, pointer)
            });
        let lane_is_one_order = self.sharing == Sharing::Leases && rules.ordering == Ordering::Partition;
        for (handle, disposition) in ended {
            if lane_is_one_order && let Some(ClaimedMessage { pointer, .. }) = self.messages.get(&handle) {
                self.read_limits
                    .record(pointer.partition, pointer.seq, &disposition, rules);
            }
            self.queue_settle(handle, disposition);
        }
    }

    pub(super) fn queue_settle(&mut self, handle: MessageHandle, disposition: Disposition) {
        let Some(message) = self.messages.remove(&handle) else {
            return;
        };
        self.progress.on_end(handle, &disposition);
        self.unsettled.push(Settlement {
            row_id: message.row_id,
            pointer: message.pointer,
            disposition,
        });
    }

    /// Releases the messages that the publisher does not have, because their memory is needed for others. Returns whether
    /// there were any. Of each key these are the last ones, so none of them is overtaken.
    pub fn release_unsent(&mut self, rules: &Rules, reason: &str) -> bool {
        let before = self.unsettled.len();
        self.give_back_yielding(rules);
        let messages = &self.messages;
        let is_unsent = |handle| (messages.get(&handle)).is_some_and(|message| message.publication.is_some());
        let mut unsent = self.key_order.give_up_unsent(|_| true, is_unsent);
        unsent.extend(std::mem::take(&mut self.ready));
        unsent.sort_unstable();
        unsent.dedup();
        self.release(unsent, reason);
        self.unsettled.len() > before
    }

    /// Gives up the messages that are kept back, because their memory is needed for others. Returns whether there were
    /// any.
    pub fn give_up_kept_back(&mut self, rules: &Rules) -> bool {
        let before = self.unsettled.len();
        self.give_back_yielding(rules);
        while self.evict(rules) {}
        self.unsettled.len() > before
    }

    pub(super) fn release(&mut self, handles: Vec<MessageHandle>, reason: &str) {
        for handle in handles {
            let reason = reason.to_owned();
            self.queue_settle(handle, Disposition::Release { reason });
        }
    }

    /// Releases all claimed messages, because the connection is lost or the worker ends. Those that were with the
    /// publisher may or may not have arrived.
    pub fn release_all(&mut self, reason: &str) {
        self.ready.clear();
        self.yielding.clear();
        self.key_order.forget_sent();
        self.with_publisher = WithPublisher::default();
        self.alone = None;
        self.answers.clear();
        let mut handles: Vec<MessageHandle> = self.messages.keys().copied().collect();
        handles.sort_unstable();
        self.release(handles, reason);
    }
}
