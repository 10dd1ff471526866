//! A ring of minutes loses no count of concurrent writers, and forgets old periods.
#![expect(clippy::disallowed_methods)] // threads that count at the same time

use outbox_core::latency;
use outbox_core::settle::Ended;
use outbox_core::throughput::{DeliveryTimes, History, LastMinute, RecentTimes, Throughput};
use std::thread;

const MINUTE_US: i64 = 60_000_000;
/// Some time in 2026.
const BEGIN_US: i64 = 29_667_123 * MINUTE_US + 1;

/// [published, retried, failed] of each minute with counts, with its distance from the last one that is shown.
fn counted(minutes: &Throughput, now_us: i64) -> Vec<(usize, [u64; 3])> {
    let shown = minutes.shown(now_us);
    let rows: Vec<&[Option<f64>]> = shown.chunks(5).collect();
    assert_eq!(rows.len(), 61);
    let starts: Vec<f64> = rows.iter().map(|row| row[0].expect("a time")).collect();
    assert!(starts.windows(2).all(|pair| pair[1] - pair[0] == 60.0));
    assert_eq!(starts[60], (now_us.div_euclid(MINUTE_US) * 60) as f64);
    let counts = |row: &[Option<f64>]| [1, 2, 3].map(|column| row[column].expect("a count") as u64);
    let rows = rows.iter().enumerate().map(|(index, row)| (60 - index, counts(row)));
    rows.filter(|(_, counts)| *counts != [0; 3]).collect()
}

fn published(count: u64) -> Ended {
    Ended {
        published: count,
        ..Ended::default()
    }
}

#[test]
fn a_minute_is_shown_for_an_hour_and_its_slot_is_cleared_for_the_next() {
    let minutes = Throughput::default();
    assert_eq!(counted(&minutes, BEGIN_US), []);
    let all = Ended {
        published: 7,
        retried: 5,
        dead: 2,
        expired: 1,
        discarded: 4,
        released: 3,
    };
    minutes.count(&all, BEGIN_US);
    let mut took = DeliveryTimes::default();
    took.note(1_000);
    minutes.count_times(&took, BEGIN_US);
    for passed in 0..=60 {
        let now_us = BEGIN_US + passed * MINUTE_US;
        assert_eq!(counted(&minutes, now_us), [(passed as usize, [7, 5, 3])]);
        let p95 = minutes.shown(now_us)[60 * 5 - passed as usize * 5 + 4].expect("a p95");
        assert!((0.8..1.3).contains(&p95), "{p95}");
    }
    for passed in [61, 63, 64, 65, 1_000, -1, -64] {
        assert_eq!(
            counted(&minutes, BEGIN_US + passed * MINUTE_US),
            [],
            "{passed} minutes later"
        );
    }
    // The same slot of the ring.
    let later_us = BEGIN_US + 64 * MINUTE_US;
    minutes.count(&published(1), later_us);
    assert_eq!(counted(&minutes, later_us), [(0, [1, 0, 0])]);
    assert_eq!(minutes.shown(later_us)[60 * 5 + 4], None, "the times are gone too");
}

#[test]
fn a_percentile_covers_five_minutes() {
    let (recent, mut slow, mut fast) = (
        RecentTimes::default(),
        DeliveryTimes::default(),
        DeliveryTimes::default(),
    );
    slow.note(30_000_000);
    fast.note(2_000);
    let p99 = |now_us: i64| latency::percentile_ms(&recent.recent(now_us), 0.99);
    assert_eq!(p99(BEGIN_US), None);
    recent.count_times(&slow, BEGIN_US);
    recent.count_times(&fast, BEGIN_US + 5 * MINUTE_US);
    assert!(p99(BEGIN_US + 5 * MINUTE_US).is_some_and(|ms| ms > 20_000.0));
    assert!(p99(BEGIN_US + 6 * MINUTE_US).is_some_and(|ms| ms < 3.0));
    assert_eq!(p99(BEGIN_US + 11 * MINUTE_US), None);
}

#[test]
fn the_history_has_an_hour_by_the_minute_and_a_day_by_ten_minutes() {
    let history = History::default();
    assert!(history.shown(BEGIN_US).is_empty());
    history.count(&published(7), BEGIN_US);
    history.count(&published(2), BEGIN_US + MINUTE_US);
    let [minute_s, period_s] = [60, 600].map(|width_s| BEGIN_US.div_euclid(1_000_000).div_euclid(width_s) * width_s);
    assert_eq!(BEGIN_US.div_euclid(MINUTE_US) % 10, 3, "both minutes are of one period");
    let shown = |minutes: i64| history.shown(BEGIN_US + minutes * MINUTE_US);
    let long = [period_s, 600, 9, 0, 0];
    let short = [[minute_s, 60, 7, 0, 0], [minute_s + 60, 60, 2, 0, 0]].concat();
    assert_eq!(shown(1), [&long[..], &short].concat());
    assert_eq!(shown(61), [&long[..], &short[5..]].concat());
    assert_eq!(shown(24 * 60), long);
    assert!(shown(25 * 60).is_empty());
}

#[test]
fn the_last_minute_has_60_whole_seconds_and_counts_no_expiry() {
    let last_minute = LastMinute::default();
    let all = Ended {
        published: 7,
        retried: 5,
        dead: 2,
        expired: 1,
        discarded: 4,
        released: 3,
    };
    last_minute.count(&all, BEGIN_US);
    last_minute.count(&published(1), BEGIN_US + 1_000_000);
    let sums = [0, 1, 2, 60, 61, 62].map(|passed_s| last_minute.sum(BEGIN_US + passed_s * 1_000_000));
    assert_eq!(sums, [[0, 0], [7, 7], [8, 7], [8, 7], [1, 0], [0, 0]]);
    // The same slot of the ring.
    last_minute.count(&published(4), BEGIN_US + 64_000_000);
    assert_eq!(last_minute.sum(BEGIN_US + 65_000_000), [4, 0]);
}

#[test]
fn concurrent_writers_that_begin_a_minute_lose_no_count() {
    const COUNTERS: u64 = 8;
    let minutes = Throughput::default();
    for hour in 1..2_000 {
        // Each time the slot holds an old minute, and all writers find it so.
        let now_us = BEGIN_US + hour * 64 * MINUTE_US;
        let start = std::sync::Barrier::new(COUNTERS as usize);
        thread::scope(|scope| {
            for _ in 0..COUNTERS {
                scope.spawn(|| {
                    let mut took = DeliveryTimes::default();
                    took.note(5);
                    start.wait();
                    minutes.count_times(&took, now_us);
                    minutes.count(&published(3), now_us);
                });
            }
        });
        assert_eq!(counted(&minutes, now_us), [(0, [3 * COUNTERS, 0, 0])]);
    }
}
