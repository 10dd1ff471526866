//! From where a lane (destination and partition) is read by views that show what waits first. A look from the start of the lane
//! would walk the index entries of all messages that ended, as long as an old snapshot keeps them.
//!
//! One `Floor` a lane, in shared memory. A transaction that made a row visible tells its seq. A reader takes a ticket, then a
//! new snapshot, looks for the first row that is not below the ticket, and raises the floor to it. So the lower one of
//! floor and told is never above the first visible row, but for a row whose transaction is just about to tell.
//! crates/core/tests/model_floor.rs tries every interleaving, and shows that no step can be left out.
//!
//! It serves what is displayed. Delivery never asks for it.

use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

const SEQ_BITS: u32 = 48;
/// As a floor: nothing waits. Seqs beyond are taken for the one below.
const END: u64 = (1 << SEQ_BITS) - 1;
const NOTHING: u64 = u64::MAX;

/// All bytes zero = nothing is known: the lane is read from its start.
#[repr(C)]
pub struct Floor {
    /// No row below the lower 48 bits was visible. The upper 16 bits grow when it is lowered. Written by readers.
    word: AtomicU64,
    /// The lowest seq told since a reader took it last. Written at COMMIT, emptied by readers.
    recorded: AtomicU64,
}

/// The floor as it was before a look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FloorVersion(u64);

impl FloorVersion {
    /// To know it again.
    pub fn bits(self) -> u64 {
        self.0
    }

    /// From where to look; None = nothing waits.
    pub fn from(self) -> Option<i64> {
        seq_of(self.0)
    }
}

impl Floor {
    /// A row with this seq is visible now.
    pub fn record(&self, seq: i64) {
        self.recorded.fetch_min(clamped(seq), SeqCst);
    }

    /// Before the snapshot of a look.
    pub fn take(&self) -> FloorVersion {
        let recorded = self.recorded.load(SeqCst);
        if recorded != NOTHING {
            // The generation grows even where the floor stays: who looks with an older snapshot shall not raise it.
            let lowered = |word: u64| {
                let generation = (word >> SEQ_BITS).wrapping_add(1);
                Some(generation << SEQ_BITS | (word & END).min(recorded))
            };
            _ = self.word.fetch_update(SeqCst, SeqCst, lowered);
            // In this order: for no moment do both say that nothing is there. A lower seq that came meanwhile stays.
            _ = self.recorded.compare_exchange(recorded, NOTHING, SeqCst, SeqCst);
        }
        FloorVersion(self.word.load(SeqCst))
    }

    /// For a look with an older snapshot, which may not raise the floor.
    pub fn peek(&self) -> FloorVersion {
        let recorded = self.recorded.load(SeqCst).min(END);
        FloorVersion((self.word.load(SeqCst) & END).min(recorded))
    }

    /// After a look from this ticket on: the first row that it found, None = there is none. Returns the ticket that the next
    /// look gets, unless something was told meanwhile.
    pub fn raise(&self, version: FloorVersion, first: Option<i64>) -> Option<FloorVersion> {
        let raised = version.0 & !END | first.map_or(END, clamped);
        let done = self.word.compare_exchange(version.0, raised, SeqCst, SeqCst);
        done.is_ok().then_some(FloorVersion(raised))
    }
}

fn clamped(seq: i64) -> u64 {
    u64::try_from(seq).unwrap_or(0).min(END - 1)
}

fn seq_of(word: u64) -> Option<i64> {
    let seq = word & END;
    (seq != END).then_some(seq as i64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unknown() -> Floor {
        Floor {
            word: AtomicU64::new(0),
            recorded: AtomicU64::new(0),
        }
    }

    #[test]
    fn a_floor_rises_to_what_was_found_and_falls_to_what_is_told() {
        let floor = unknown();
        let version = floor.take();
        assert_eq!(version.from(), Some(0), "nothing is known yet");
        floor.raise(version, Some(7));
        assert_eq!(floor.take().from(), Some(7));
        floor.record(9);
        assert_eq!(floor.take().from(), Some(7), "a later one changes nothing");
        floor.record(3);
        assert_eq!(floor.peek().from(), Some(3));
        assert_eq!(floor.take().from(), Some(3));
        floor.raise(floor.take(), None);
        assert_eq!(floor.take().from(), None, "nothing waits");
        floor.record(i64::MAX);
        assert!(floor.take().from().is_some(), "whatever its seq");
    }

    #[test]
    fn who_looked_before_another_took_what_was_told_raises_nothing() {
        let floor = unknown();
        let early = floor.take();
        floor.record(5);
        let late = floor.take();
        floor.raise(early, Some(10));
        assert_eq!(floor.take().from(), Some(0));
        floor.raise(late, Some(5));
        assert_eq!(floor.take().from(), Some(5));
    }
}
