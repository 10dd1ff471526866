//! What was delivered in each of the last minutes: a ring, one place a minute, that processes share and count in without a
//! lock. It lies in the shared memory of the server, one of each database; counted by workers at settle and by sessions at
//! COMMIT, read by outbox_throughput. It is no authority: a restart of the server begins anew.

use crate::latency::{self, BUCKETS};
use crate::settle::Ended;
use std::sync::atomic::{
    AtomicI64, AtomicU32, AtomicU64,
    Ordering::{AcqRel, Acquire, Relaxed, Release},
};

/// More than are shown: the one that begins is not read as the one that it takes the place of.
const KEPT: usize = 64;
/// The last 60 whole minutes and the running one.
const SHOWN: i64 = 61;
const MINUTE_US: i64 = 60_000_000;
/// Somebody makes a place ready for another minute.
const CLEARING: i64 = -1;

/// Only atomics; zero is a valid value of each.
#[derive(Debug)]
#[repr(C)]
pub struct Throughput([Minute; KEPT]);

#[derive(Debug)]
#[repr(C)]
struct Minute {
    /// Which one, counted from 1970, or `CLEARING`. Written by who is the first to count in it.
    number: AtomicI64,
    published: AtomicU64,
    retried: AtomicU64,
    /// Dead letters, expired ones too.
    failed: AtomicU64,
    /// How long those took that were confirmed.
    took: [AtomicU32; BUCKETS],
}

/// How long messages took, counted by one process until they are settled: so the shared counts are touched once a batch.
#[derive(Clone, Debug)]
pub struct Took([u32; BUCKETS]);

impl Default for Took {
    fn default() -> Self {
        Self([0; BUCKETS])
    }
}

impl Took {
    pub fn note(&mut self, took_us: i64) {
        self.0[latency::bucket(took_us)] += 1;
    }
}

impl Default for Throughput {
    fn default() -> Self {
        let minute = || Minute {
            number: AtomicI64::new(0),
            published: AtomicU64::new(0),
            retried: AtomicU64::new(0),
            failed: AtomicU64::new(0),
            took: std::array::from_fn(|_| AtomicU32::new(0)),
        };
        Self(std::array::from_fn(|_| minute()))
    }
}

impl Throughput {
    /// Nothing is known of any minute.
    pub fn forget(&self) {
        for minute in &self.0 {
            minute.number.store(0, Release);
        }
    }

    /// Neither allocates nor fails.
    pub fn count(&self, ended: &Ended, now_us: i64) {
        let minute = self.open(now_us);
        minute.published.fetch_add(ended.published, Relaxed);
        minute.retried.fetch_add(ended.retried, Relaxed);
        minute.failed.fetch_add(ended.all_dead(), Relaxed);
    }

    /// Takes over what was counted so far. Neither allocates nor fails.
    pub fn count_times(&self, took: &mut Took, now_us: i64) {
        let minute = self.open(now_us);
        for (shared, count) in minute.took.iter().zip(&mut took.0).filter(|(_, count)| **count > 0) {
            shared.fetch_add(std::mem::take(count), Relaxed);
        }
    }

    /// The place of the running minute. Whoever comes first in a minute clears what the place held an hour ago; the others
    /// wait for him, for what they added before would be lost.
    fn open(&self, now_us: i64) -> &Minute {
        let number = now_us.div_euclid(MINUTE_US);
        let minute = &self.0[number.rem_euclid(KEPT as i64) as usize];
        loop {
            let known = minute.number.load(Acquire);
            if known == number {
                return minute;
            }
            let mine = known != CLEARING
                && (minute.number)
                    .compare_exchange(known, CLEARING, AcqRel, Relaxed)
                    .is_ok();
            if mine {
                minute.clear();
                minute.number.store(number, Release);
                return minute;
            }
            std::hint::spin_loop(); // it is soon done
        }
    }

    /// Of each minute that is shown, the oldest first: [when it began in s since 1970, published, retried, failed, in how
    /// many ms 95 of 100 were through].
    pub fn shown(&self, now_us: i64) -> Vec<Option<f64>> {
        let now = now_us.div_euclid(MINUTE_US);
        let rows = (now + 1 - SHOWN..=now).map(|number| {
            let minute = &self.0[number.rem_euclid(KEPT as i64) as usize];
            let [published, retried, failed, p95] =
                minute.read(number).unwrap_or([Some(0.0), Some(0.0), Some(0.0), None]);
            [Some((number * 60) as f64), published, retried, failed, p95]
        });
        rows.flatten().collect()
    }
}

impl Minute {
    fn clear(&self) {
        for count in [&self.published, &self.retried, &self.failed] {
            count.store(0, Relaxed);
        }
        for count in &self.took {
            count.store(0, Relaxed);
        }
    }

    /// None if nothing was counted in that minute.
    fn read(&self, number: i64) -> Option<[Option<f64>; 4]> {
        if self.number.load(Acquire) != number {
            return None;
        }
        let count = |count: &AtomicU64| Some(count.load(Relaxed) as f64);
        let mut took = [0; BUCKETS];
        for (count, counted) in took.iter_mut().zip(&self.took) {
            *count = u64::from(counted.load(Relaxed));
        }
        Some([
            count(&self.published),
            count(&self.retried),
            count(&self.failed),
            latency::percentile_ms(&took, 0.95),
        ])
    }
}
