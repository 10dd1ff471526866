//! Deliveries over time: rings of counters in the server's shared memory. Workers count at settle and sessions at
//! COMMIT; the views read. `Throughput` is for a database, `History` and `RecentTimes` are for a destination.

use crate::latency::{self, BUCKETS};
use crate::ring::TimeRing;
use crate::settle::Ended;

const SECOND_US: i64 = 1_000_000;
const MINUTE_US: i64 = 60 * SECOND_US;
/// The last 60 whole minutes and the current one.
const MINUTES_SHOWN: i64 = 61;
/// The last 24 hours in periods of ten minutes, and the current period.
const LONG_SHOWN: i64 = 145;
const LONG_MINUTES: i64 = 10;
/// Percentiles are of the last five whole minutes and the current one.
const RECENT_MINUTES: i64 = 6;

/// The numbers of messages that ended in a period: published, retried, and failed, which are dead letters, including
/// expired messages.
const ENDED: usize = 3;

fn ended_counts(ended: &Ended) -> impl Iterator<Item = (usize, u32)> {
    let counts = [ended.published, ended.retried, ended.all_dead()];
    counts
        .map(|count| u32::try_from(count).unwrap_or(u32::MAX))
        .into_iter()
        .enumerate()
}

/// The throughput of a database, by the minute: what ended, and the confirmed messages by delivery time (see
/// `latency::bucket`).
pub type Throughput = TimeRing<{ ENDED + BUCKETS }, 64>;

/// Delivery times that one process collects until it settles. So it writes to the shared counters once per batch.
#[derive(Clone, Debug)]
pub struct DeliveryTimes {
    counts: [u32; BUCKETS],
    sum_us: u64,
}

impl Default for DeliveryTimes {
    fn default() -> Self {
        Self {
            counts: [0; BUCKETS],
            sum_us: 0,
        }
    }
}

impl DeliveryTimes {
    /// Adds one message. A negative time, after the clock was set back, counts as 0.
    pub fn note(&mut self, delivery_us: i64) {
        self.counts[latency::bucket(delivery_us)] += 1;
        self.sum_us = self.sum_us.saturating_add(u64::try_from(delivery_us).unwrap_or(0));
    }

    /// The buckets with messages, each with their number.
    pub fn counts(&self) -> impl Iterator<Item = (usize, u32)> {
        self.counts.iter().copied().enumerate().filter(|(_, count)| *count > 0)
    }

    /// The sum of the times, in µs.
    pub fn sum_us(&self) -> u64 {
        self.sum_us
    }
}

impl Throughput {
    /// Neither allocates nor fails.
    pub fn count(&self, ended: &Ended, now_us: i64) {
        self.add(now_us.div_euclid(MINUTE_US), ended_counts(ended));
    }

    /// Adds the collected times. Neither allocates nor fails.
    pub fn count_times(&self, times: &DeliveryTimes, now_us: i64) {
        let counts = times.counts().map(|(bucket, count)| (ENDED + bucket, count));
        self.add(now_us.div_euclid(MINUTE_US), counts);
    }

    /// Five numbers for each minute that is shown, the oldest first: its start in s since 1970, published, retried,
    /// failed, and the 95th percentile of the delivery times in ms. That is None if no message was confirmed.
    pub fn shown(&self, now_us: i64) -> Vec<Option<f64>> {
        let now = now_us.div_euclid(MINUTE_US);
        let rows = (now + 1 - MINUTES_SHOWN..=now).map(|number| {
            let start = Some((number * 60) as f64);
            let Some(minute) = self.read(number) else {
                return [start, Some(0.0), Some(0.0), Some(0.0), None];
            };
            let [published, retried, failed] = [0, 1, 2].map(|index| Some(f64::from(minute[index])));
            let times = std::array::from_fn(|bucket| u64::from(minute[ENDED + bucket]));
            [start, published, retried, failed, latency::percentile_ms(&times, 0.95)]
        });
        rows.flatten().collect()
    }
}

/// Delivery times of the last minutes of a destination.
pub type RecentTimes = TimeRing<BUCKETS, 8>;

impl RecentTimes {
    /// Adds the collected times. Neither allocates nor fails.
    pub fn count_times(&self, times: &DeliveryTimes, now_us: i64) {
        self.add(now_us.div_euclid(MINUTE_US), times.counts());
    }

    /// The numbers of confirmed messages by delivery time, in the last five whole minutes and the current one.
    pub fn recent(&self, now_us: i64) -> [u64; BUCKETS] {
        let now = now_us.div_euclid(MINUTE_US);
        let minutes = (now + 1 - RECENT_MINUTES..=now).filter_map(|number| self.read(number));
        minutes.fold([0; BUCKETS], |mut sums, times| {
            sums.iter_mut()
                .zip(times)
                .for_each(|(sum, count)| *sum += u64::from(count));
            sums
        })
    }
}

/// What ended of a destination in the last hour, by the minute, and in the last 24 hours, in periods of ten minutes.
#[derive(Debug, Default)]
#[repr(C)]
pub struct History {
    minutes: TimeRing<ENDED, 64>,
    long: TimeRing<ENDED, 160>,
}

/// What a database or a destination published, and the attempts that failed, by the second.
#[derive(Debug, Default)]
#[repr(C)]
pub struct LastMinute(TimeRing<ENDED, 64>);

impl LastMinute {
    /// Neither allocates nor fails.
    pub fn count(&self, ended: &Ended, now_us: i64) {
        let attempts = Ended { expired: 0, ..*ended };
        self.0.add(now_us.div_euclid(SECOND_US), ended_counts(&attempts));
    }

    /// What was published, and the attempts that failed, in the last 60 whole seconds.
    pub fn sum(&self, now_us: i64) -> [u64; 2] {
        let now = now_us.div_euclid(SECOND_US);
        let seconds = (now - 60..now).filter_map(|number| self.0.read(number));
        seconds.fold([0; 2], |[published, failed], second| {
            let [more, retried, dead] = second.map(u64::from);
            [published + more, failed + retried + dead]
        })
    }
}

impl History {
    /// Neither allocates nor fails.
    pub fn count(&self, ended: &Ended, now_us: i64) {
        let minute = now_us.div_euclid(MINUTE_US);
        self.minutes.add(minute, ended_counts(ended));
        self.long.add(minute.div_euclid(LONG_MINUTES), ended_counts(ended));
    }

    /// Five numbers for each period in which a message ended, the oldest first: its start in s since 1970, its length
    /// in s, published, retried, failed. First the periods of ten minutes, then the minutes.
    pub fn shown(&self, now_us: i64) -> Vec<i64> {
        let minute = now_us.div_euclid(MINUTE_US);
        let period = minute.div_euclid(LONG_MINUTES);
        let row = |ended: Option<[u32; ENDED]>, start_s, width_s| {
            let counts = ended?.map(i64::from);
            let [published, retried, failed] = counts;
            (counts != [0; ENDED]).then_some([start_s, width_s, published, retried, failed])
        };
        let long_s = LONG_MINUTES * 60;
        let long = (period + 1 - LONG_SHOWN..=period).filter_map(|n| row(self.long.read(n), n * long_s, long_s));
        let short = (minute + 1 - MINUTES_SHOWN..=minute).filter_map(|n| row(self.minutes.read(n), n * 60, 60));
        long.chain(short).flatten().collect()
    }
}
