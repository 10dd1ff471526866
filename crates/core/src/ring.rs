//! A ring of time slots in the server's shared memory. Processes count in it without a lock. A slot holds a period, such as
//! a minute, and is cleared when a later period takes its place. A restart of the server clears all.

use std::sync::atomic::{
    AtomicI64,
    Ordering::{AcqRel, Acquire, Relaxed, Release},
};

/// A process clears the slot for another period.
const CLEARING: i64 = -1;

/// The counts of one period: only atomics, and zero is a valid value of each.
pub trait Counts: Default {
    fn clear(&self);
}

/// `SLOTS` periods. Keep at least one more than are read: the slot of a new period replaces the oldest one.
#[derive(Debug)]
#[repr(C)]
pub struct TimeRing<C, const SLOTS: usize>([RingSlot<C>; SLOTS]);

#[derive(Debug, Default)]
#[repr(C)]
struct RingSlot<C> {
    /// The number of the period, counted from 1970, or `CLEARING`. Written by the process that first counts in it.
    number: AtomicI64,
    counts: C,
}

impl<C: Counts, const SLOTS: usize> Default for TimeRing<C, SLOTS> {
    fn default() -> Self {
        Self(std::array::from_fn(|_| RingSlot::default()))
    }
}

impl<C: Counts, const SLOTS: usize> TimeRing<C, SLOTS> {
    fn slot(&self, number: i64) -> &RingSlot<C> {
        &self.0[number.rem_euclid(SLOTS as i64) as usize]
    }

    /// The counts of the period with this number, to add to. The first process in a period clears the slot. The others
    /// wait for it, because it would clear what they add. Neither allocates nor fails.
    pub fn open(&self, number: i64) -> &C {
        let slot = self.slot(number);
        loop {
            let known = slot.number.load(Acquire);
            if known == number {
                return &slot.counts;
            }
            let is_mine = known != CLEARING && (slot.number).compare_exchange(known, CLEARING, AcqRel, Relaxed).is_ok();
            if is_mine {
                slot.counts.clear();
                slot.number.store(number, Release);
                return &slot.counts;
            }
            std::hint::spin_loop(); // for a few stores
        }
    }

    /// The counts of the period with this number; None if nothing was counted in it.
    pub fn read(&self, number: i64) -> Option<&C> {
        let slot = self.slot(number);
        (slot.number.load(Acquire) == number).then_some(&slot.counts)
    }
}
