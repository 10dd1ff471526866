//! Which answers of the publisher wake the worker, and when it comes without a wake to take the others. The worker
//! calls it on its main thread at the end of each pass.
//!
//! Confirmed messages wait to be settled together anyway, so a wake for each confirm would be a pass that changes
//! nothing; with a message each millisecond that costs latency. So confirms wait until the worker comes, for its next
//! messages or soon after these, unless another message waits for one of them. Any other answer wakes the worker at
//! once; the publisher sees to that.

use super::Engine;
use super::settling::SETTLE_AFTER_MS;
use crate::key_order::Handle;

/// This number of confirms wakes a worker that waits for none of them.
const MANY: usize = 64;
/// The time in ms after a hand-over or an answer at which the worker comes: a little later than confirms are due to be
/// settled, so that one pass does both.
const WAKE_AFTER_MS: u64 = SETTLE_AFTER_MS + 2;

/// How a worker is woken by one publisher until its next pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WakePolicy {
    /// Wakes the worker when this number of confirms wait.
    pub confirms: usize,
    /// The worker comes without a wake in this many ms; None: only a wake.
    pub within_ms: Option<u64>,
}

impl WakePolicy {
    pub const EACH: Self = Self {
        confirms: 1,
        within_ms: None,
    };
}

impl<P: Clone> Engine<P> {
    /// `has_room`: the worker may claim more before it settles any message that it holds.
    pub fn wake_policy(&mut self, now_ms: u64, has_room: bool) -> WakePolicy {
        let moved_ms = self.answers.moved_ms(now_ms);
        let has_room = has_room && self.has_room_in_bytes();
        let awaited = self.answers.are_awaited()
            || !self.ready.is_empty() // for room with the publisher, or to be sent alone
            || !self.leaving.is_empty() // the partition is given back when none of its messages is in flight
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
            // Nothing has moved for long: the worker is woken instead of coming again in vain.
            _ if now_ms >= wake_at_ms => WakePolicy::EACH,
            _ => WakePolicy {
                confirms: MANY,
                within_ms: Some(wake_at_ms - now_ms),
            },
        }
    }

    /// Since when an answer that was noticed now waits to be settled with others: since it came. While there is more to
    /// claim at once it counts from now, because settles shall then be large, and no answer had to wait.
    pub fn waits_since_ms(&self, now_ms: u64, age_ms: u64) -> u64 {
        match self.full || self.drains {
            true => now_ms,
            false => now_ms.saturating_sub(age_ms),
        }
    }

    /// Whether others wait for the answer to this message, which is about to be sent: no other message of its key or
    /// partition is sent before it is published, or no message is claimed beside it.
    pub(super) fn is_awaited(&self, handle: Handle) -> bool {
        let Some(message) = self.messages.get(&handle) else {
            return false;
        };
        let pointer = &message.pointer;
        pointer.crashes > 0 || self.key_order.is_first(handle) || self.lanes.is_blocker(pointer.partition, pointer.seq)
    }
}

#[cfg(test)]
mod tests;
