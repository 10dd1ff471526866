//! The position in a lane (destination and partition) from which views look for the first waiting message. A scan from
//! the start of the lane would read the index entries of all messages that ended, as long as an old snapshot keeps
//! them.
//!
//! One `Floor` for each lane, in shared memory. A transaction that made a row visible records its seq. A reader takes a
//! version, then a new snapshot, reads the first row that is not below the version, and raises the floor to it. So the
//! lower one of the floor and the recorded seq is never above the first visible row, except for a row whose transaction
//! is just about to record it. crates/core/tests/model_floor.rs tries every interleaving, and shows that no step can be
//! left out.
//!
//! It serves views. Delivery never reads it.

use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

const SEQ_BITS: u32 = 48;
/// As a floor: no message waits. Higher seqs count as the one below.
const END: u64 = (1 << SEQ_BITS) - 1;
const NOTHING: u64 = u64::MAX;

/// All bytes zero = unknown: the lane is read from its start.
#[repr(C)]
pub struct Floor {
    /// No row below the lower 48 bits was visible. The upper 16 bits are a generation, which grows when the floor is
    /// lowered. Written by readers.
    word: AtomicU64,
    /// The lowest seq recorded since a reader last took it. Written at COMMIT, emptied by readers.
    recorded: AtomicU64,
}

/// The floor as it was when a reader took it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FloorVersion(u64);

impl FloorVersion {
    /// Identifies the version.
    pub fn bits(self) -> u64 {
        self.0
    }

    /// The seq to read from; None = no message waits.
    pub fn from(self) -> Option<i64> {
        seq_of(self.0)
    }
}

impl Floor {
    /// A row with this seq is visible now.
    pub fn record(&self, seq: i64) {
        self.recorded.fetch_min(clamped(seq), SeqCst);
    }

    /// Called before the snapshot of a reader.
    pub fn take(&self) -> FloorVersion {
        let recorded = self.recorded.load(SeqCst);
        if recorded != NOTHING {
            // The generation grows even if the floor stays: a reader with an older snapshot must not raise it.
            let lowered = |word: u64| {
                let generation = (word >> SEQ_BITS).wrapping_add(1);
                Some(generation << SEQ_BITS | (word & END).min(recorded))
            };
            _ = self.word.fetch_update(SeqCst, SeqCst, lowered);
            // The order matters: at no moment do both say that no message waits. A lower seq recorded meanwhile stays.
            _ = self.recorded.compare_exchange(recorded, NOTHING, SeqCst, SeqCst);
        }
        FloorVersion(self.word.load(SeqCst))
    }

    /// For a reader with an older snapshot, which may not raise the floor.
    pub fn peek(&self) -> FloorVersion {
        let recorded = self.recorded.load(SeqCst).min(END);
        FloorVersion((self.word.load(SeqCst) & END).min(recorded))
    }

    /// Called after the rows from this version on were read: `first` is the first row, None = there is none. Returns
    /// the version of the next reader, unless a seq was recorded meanwhile.
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
    fn a_floor_rises_to_the_first_row_and_falls_to_a_recorded_seq() {
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
    fn a_reader_with_an_older_version_raises_nothing() {
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
