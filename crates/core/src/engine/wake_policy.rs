//! Which answers of the publisher wake the worker, and when it comes by itself to take the others. Called by the worker's
//! main thread at the end of each pass.
//!
//! What is confirmed waits to be settled with others anyway, so a wake for each confirm is a pass that changes nothing; a
//! message a millisecond pays for it with time to its consumer. So confirms are left lying until the worker comes by, for
//! its next messages or soon after these, unless somebody waits for one. Whatever is not a confirm wakes the worker at once,
//! by the publisher's own rule.

use super::Engine;
use super::settling::SETTLE_AFTER_MS;
use crate::key_order::Handle;

/// So many confirms wake a worker that waits for none of them.
const MANY: usize = 64;
/// A worker comes by so long, in ms, after something was handed over or answered: a little later than what was confirmed at
/// once is to be settled, so that one pass does for both.
const WAKE_AFTER_MS: u64 = SETTLE_AFTER_MS + 2;

/// How a worker listens to one publisher until its next pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WakePolicy {
    /// Wakes the worker when so many confirms wait.
    pub confirms: usize,
    /// It comes by itself in so many ms; None: it is woken.
    pub within_ms: Option<u64>,
}

impl WakePolicy {
    pub const EACH: Self = Self {
        confirms: 1,
        within_ms: None,
    };
}

impl<P: Clone> Engine<P> {
    /// `has_room`: the worker may claim more before any of what it holds is settled.
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
            // Nothing has moved for long: rather than come by in vain again, it is told.
            _ if now_ms >= wake_at_ms => WakePolicy::EACH,
            _ => WakePolicy {
                confirms: MANY,
                within_ms: Some(wake_at_ms - now_ms),
            },
        }
    }

    /// Since when an answer that was noticed now counts as waiting to be settled, with others: since it came. While there is
    /// more to claim at once it counts from now, for then settles shall be large, and nobody has left it lying.
    pub fn waits_since_ms(&self, now_ms: u64, age_ms: u64) -> u64 {
        match self.full || self.drains {
            true => now_ms,
            false => now_ms.saturating_sub(age_ms),
        }
    }

    /// Whether others wait for the answer to this message, which is about to go: of its key or partition nothing else
    /// goes before it has gone through, or nothing is claimed beside it.
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
