//! The wake policy: which outcomes wake the worker, and when it wakes by itself to take the others. Called by the
//! worker's main thread at the end of each pass.
//!
//! A confirmed message waits to be settled together with others anyway, so a pass for each confirm changes nothing. At
//! one message a millisecond such passes delay the messages to their consumers. So confirms wait until the next pass,
//! which comes with the next messages or soon after these, unless another message waits for one of them. For any other
//! outcome the publisher itself wakes the worker immediately.

use super::Engine;
use super::settling::SETTLE_AFTER_MS;
use crate::key_order::MessageHandle;

/// The number of waiting confirms that wakes a worker which waits for none of them.
const MANY: usize = 64;
/// The time, in ms, from the last hand-over or outcome to the next pass of a worker that nothing wakes. It is a little
/// longer than a confirm waits for its settle, so that one pass does both.
const WAKE_AFTER_MS: u64 = SETTLE_AFTER_MS + 2;

/// Which outcomes of one publisher wake a worker before its next pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WakePolicy {
    /// The number of waiting confirms that wakes the worker.
    pub confirms: usize,
    /// The time until the worker wakes by itself, in ms; None = only confirms wake it.
    pub within_ms: Option<u64>,
}

impl WakePolicy {
    /// Each confirm wakes the worker.
    pub const EACH: Self = Self {
        confirms: 1,
        within_ms: None,
    };
}

impl Engine {
    /// The wake policy until the next pass. `has_room` says whether the worker may claim more before any message that
    /// it has in flight is settled.
    pub fn wake_policy(&mut self, now_ms: u64, has_room: bool) -> WakePolicy {
        let moved_ms = self.answers.moved_ms(now_ms);
        let has_room = has_room && self.has_room_in_bytes();
        let awaited = self.answers.are_awaited()
            || !self.ready.is_empty() // for room with the publisher, or to go alone
            || !self.leaving.is_empty() // the partition is given back when nothing of it is in flight
            || !self.progress.is_unbounded()
            || (!has_room && self.with_publisher.count <= MANY);
        if awaited {
            return WakePolicy::EACH;
        }
        let wake_at_ms = moved_ms + WAKE_AFTER_MS;
        match self.with_publisher.count {
            0 => WakePolicy {
                confirms: MANY,
                within_ms: None,
            },
            // No message moved for that time. Another timed pass would be in vain too, so each confirm wakes the
            // worker.
            _ if now_ms >= wake_at_ms => WakePolicy::EACH,
            _ => WakePolicy {
                confirms: MANY,
                within_ms: Some(wake_at_ms - now_ms),
            },
        }
    }

    /// Since when an outcome that the worker takes now counts as waiting for its settle, in ms: since it arrived
    /// `age_ms` ago. While there is more to claim immediately, it counts from now: settles should be large then, and
    /// the outcome has not been left waiting.
    pub fn waits_since_ms(&self, now_ms: u64, age_ms: u64) -> u64 {
        match self.full || self.drains {
            true => now_ms,
            false => now_ms.saturating_sub(age_ms),
        }
    }

    /// Whether other messages wait for the outcome of this message, which is about to be sent. They do if no other
    /// message of its key or partition may go before it, or if nothing is claimed with it.
    pub(super) fn is_awaited(&self, handle: MessageHandle) -> bool {
        let Some(message) = self.messages.get(&handle) else {
            return false;
        };
        let pointer = &message.pointer;
        pointer.crashes > 0
            || self.key_order.is_first(handle)
            || self.read_limits.is_blocker(pointer.partition, pointer.seq)
    }
}

#[cfg(test)]
mod tests;
