//! The floor of a lane (destination and partition): the seq from which views read when they show the first pending
//! message. Without it they would read from the start of the lane. That walks the index entries of all messages that
//! ended, as long as an old snapshot keeps them. Sessions call it at COMMIT and in views.
//!
//! Shared memory has one `Floor` per lane. A transaction that made a row visible records its seq. A reader takes the
//! version of the floor, then a new snapshot. It searches for the first row from that seq on, and raises the floor to
//! it. So the lower one of floor and recorded seq is never above the first visible row. The exception is a row whose
//! transaction is about to record it. crates/core/tests/model_floor.rs tries every interleaving, and shows that no step
//! can be left out.
//!
//! Only views use the floor. Delivery never reads it.

use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

const SEQ_BITS: u32 = 48;
/// As a floor: no message waits. Higher seqs are clamped to the value below.
const END: u64 = (1 << SEQ_BITS) - 1;
/// The value of `recorded` when no seq is recorded.
const NOTHING: u64 = u64::MAX;

/// The floor of one lane. All bytes zero = the floor is unknown, and the lane is read from its start.
#[repr(C)]
pub struct Floor {
    /// The lower 48 bits are the floor: no row below it was visible. The upper 16 bits are a generation, which grows
    /// each time a reader takes a recorded seq. Written by readers.
    word: AtomicU64,
    /// The lowest seq recorded since a reader last took it. Written by sessions at COMMIT, emptied by readers.
    recorded: AtomicU64,
}

/// The floor and its generation before a search, which [`Floor::raise`] compares.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FloorVersion(u64);

impl FloorVersion {
    /// The version as a number, to compare it later.
    pub fn bits(self) -> u64 {
        self.0
    }

    /// The seq from which to search; None = no message waits.
    pub fn from(self) -> Option<i64> {
        seq_of(self.0)
    }
}

impl Floor {
    /// Records that a row with this seq is visible now.
    pub fn record(&self, seq: i64) {
        self.recorded.fetch_min(clamped(seq), SeqCst);
    }

    /// The version for a search. Called before the snapshot of the search is taken.
    pub fn take(&self) -> FloorVersion {
        let recorded = self.recorded.load(SeqCst);
        if recorded != NOTHING {
            // The generation grows even if the floor stays: a reader with an older snapshot must not raise it.
            let lowered = |word: u64| {
                let generation = (word >> SEQ_BITS).wrapping_add(1);
                Some(generation << SEQ_BITS | (word & END).min(recorded))
            };
            _ = self.word.fetch_update(SeqCst, SeqCst, lowered);
            // In this order, so that there is no moment at which neither shows the row. A lower seq recorded in between
            // stays.
            _ = self.recorded.compare_exchange(recorded, NOTHING, SeqCst, SeqCst);
        }
        FloorVersion(self.word.load(SeqCst))
    }

    /// The version for a search with an older snapshot, which must not raise the floor.
    pub fn peek(&self) -> FloorVersion {
        let recorded = self.recorded.load(SeqCst).min(END);
        FloorVersion((self.word.load(SeqCst) & END).min(recorded))
    }

    /// Raises the floor after a search from `version` on. `first` is the first row that it found; None = it found none.
    /// Returns the version that the next search gets unless a seq is recorded before; None if the floor has changed and
    /// was not raised.
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
    fn a_floor_rises_to_the_first_row_found_and_falls_to_a_recorded_seq() {
        let floor = unknown();
        let version = floor.take();
        assert_eq!(version.from(), Some(0), "nothing is known yet");
        floor.raise(version, Some(7));
        assert_eq!(floor.take().from(), Some(7));
        floor.record(9);
        assert_eq!(floor.take().from(), Some(7), "a later seq changes nothing");
        floor.record(3);
        assert_eq!(floor.peek().from(), Some(3));
        assert_eq!(floor.take().from(), Some(3));
        floor.raise(floor.take(), None);
        assert_eq!(floor.take().from(), None, "no message waits");
        floor.record(i64::MAX);
        assert!(floor.take().from().is_some(), "for any seq");
    }

    #[test]
    fn a_reader_with_an_old_version_cannot_raise_the_floor() {
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
