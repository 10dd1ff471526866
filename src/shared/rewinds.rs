//! Lanes in shared memory; here a lane is a partition of a group of destinations. Its word holds the seq from which the
//! lane is read again (*rewind*), and the worker that reads it. Sessions lower the seq at COMMIT, and the worker takes
//! it. crates/core/tests/model_cursor.rs models this.

use outbox_core::partition::Partition;
use outbox_worker::rewinds::{LANES, RewindLane};
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

/// The lanes of one database.
#[repr(C)]
pub struct LaneRewinds([Rewind; LANES]);

impl LaneRewinds {
    pub fn iter(&self) -> impl Iterator<Item = &Rewind> {
        self.0.iter()
    }

    pub fn of(&self, lane: RewindLane, partition: Partition) -> &Rewind {
        &self.0[lane.index(partition)]
    }
}

/// The lower 48 bits are the lowest seq that was committed in a partition since its owner last took it. The upper 16
/// bits are the owner: the index + 1 of its worker entry. A worker that lost the partition and has not noticed yet
/// takes nothing. Sessions lower the seq at COMMIT. Processes that withdraw a message from the fast path lower it too.
/// The owner takes it.
#[repr(C)]
pub struct Rewind(AtomicU64);

const SEQ_BITS: u32 = 48;
const NO_SEQ: u64 = (1 << SEQ_BITS) - 1;

impl Rewind {
    /// Resets the lane for a new database in this entry.
    pub fn forget(&self) {
        self.0.store(NO_SEQ, SeqCst);
    }

    /// Lowers the seq, because a message with this seq is visible now.
    pub fn lower(&self, seq: i64) {
        let seq = u64::try_from(seq).unwrap_or(0).min(NO_SEQ - 1); // a seq that is too low only costs a read
        self.change(|owner, known| Some((owner, known.min(seq))));
    }

    /// Makes this worker the only reader of the lane from now on.
    pub fn own(&self, worker: u64) {
        self.change(|_, known| Some((worker, known)));
    }

    /// Takes the seq from which the lane must be read again, if there is one. None if `worker` does not own the lane.
    pub fn take(&self, worker: u64) -> Option<i64> {
        let before = self.change(|owner, _| (owner == worker).then_some((owner, NO_SEQ)))?;
        let seq = before & NO_SEQ;
        (seq != NO_SEQ).then_some(seq as i64)
    }

    /// Returns the seq from which the lane must be read again, if there is one, without taking it.
    pub fn peek(&self) -> Option<i64> {
        let seq = self.0.load(SeqCst) & NO_SEQ;
        (seq != NO_SEQ).then_some(seq as i64)
    }

    /// The worker that reads the lane, as the index + 1 of its entry when it took the lane over.
    pub fn owner(&self) -> u32 {
        (self.0.load(SeqCst) >> SEQ_BITS) as u32
    }

    fn change(&self, to: impl Fn(u64, u64) -> Option<(u64, u64)>) -> Option<u64> {
        let changed = self.0.fetch_update(SeqCst, SeqCst, |word| {
            to(word >> SEQ_BITS, word & NO_SEQ).map(|(owner, seq)| owner << SEQ_BITS | seq)
        });
        changed.ok()
    }
}
