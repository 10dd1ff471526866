//! A ring of time slots in the server's shared memory. Processes count in it without a lock. A slot holds a period,
//! such as a minute, and is cleared when a later period takes its place. A restart of the server clears all.

use std::sync::atomic::{
    AtomicI64, AtomicU32,
    Ordering::{AcqRel, Acquire, Relaxed, Release},
};

/// A process clears the slot for another period.
const CLEARING: i64 = -1;

/// `SLOTS` periods with `COUNTS` numbers each. Keep at least one period more than are read: the slot of a new one
/// replaces the oldest.
#[derive(Debug)]
#[repr(C)]
pub struct TimeRing<const COUNTS: usize, const SLOTS: usize>([RingSlot<COUNTS>; SLOTS]);

#[derive(Debug)]
#[repr(C)]
struct RingSlot<const COUNTS: usize> {
    /// The number of the period, counted from 1970, or `CLEARING`. Written by the process that first counts in it.
    number: AtomicI64,
    counts: [AtomicU32; COUNTS],
}

impl<const COUNTS: usize, const SLOTS: usize> Default for TimeRing<COUNTS, SLOTS> {
    fn default() -> Self {
        Self(std::array::from_fn(|_| RingSlot {
            number: AtomicI64::default(),
            counts: std::array::from_fn(|_| AtomicU32::default()),
        }))
    }
}

impl<const COUNTS: usize, const SLOTS: usize> TimeRing<COUNTS, SLOTS> {
    fn slot(&self, number: i64) -> &RingSlot<COUNTS> {
        &self.0[number.rem_euclid(SLOTS as i64) as usize]
    }

    /// Adds to the counts of the period with this number, each by its index. The first process in a period clears the
    /// slot. The others wait for it, because it would clear what they add. Neither allocates nor fails.
    pub fn add(&self, number: i64, more: impl Iterator<Item = (usize, u32)>) {
        let RingSlot { number: of, counts } = self.slot(number);
        loop {
            let known = of.load(Acquire);
            if known == number {
                break;
            }
            if known != CLEARING && of.compare_exchange(known, CLEARING, AcqRel, Relaxed).is_ok() {
                counts.iter().for_each(|count| count.store(0, Relaxed));
                of.store(number, Release);
                break;
            }
            std::hint::spin_loop(); // for a few stores
        }
        for (index, count) in more {
            counts[index].fetch_add(count, Relaxed);
        }
    }

    /// The counts of the period with this number; None if nothing was counted in it.
    pub fn read(&self, number: i64) -> Option<[u32; COUNTS]> {
        let slot = self.slot(number);
        (slot.number.load(Acquire) == number).then(|| slot.counts.each_ref().map(|count| count.load(Relaxed)))
    }
}
