//! Messages that expire after their claim: they end before they are handed over to the publisher. Called by the
//! worker's main thread in each pass.

use super::Engine;
use crate::key_order::MessageHandle;
use crate::message::Outcome;
use crate::settle::Rules;

impl Engine {
    /// Ends the ready messages that have expired by `now_us`, in µs since 1970. Called before each hand-over.
    pub fn expire(&mut self, rules: &Rules, now_us: i64) {
        if !self.may_expire {
            return;
        }
        self.may_expire = !self.messages.is_empty();
        let is_over = |handle: &MessageHandle| {
            let expires_at_us = self
                .messages
                .get(handle)
                .and_then(|message| message.pointer.expires_at_us);
            expires_at_us.is_some_and(|at_us| at_us <= now_us)
        };
        let over: Vec<MessageHandle> = self.ready.iter().copied().filter(is_over).collect();
        if over.is_empty() {
            return;
        }
        self.ready.retain(|handle| !over.contains(handle));
        for handle in over {
            self.end(handle, &Outcome::Expired, rules, 0);
        }
    }
}
