//! Buckets of delivery times: four for each octave, so a percentile is off by less than a quarter. A worker counts in
//! them in shared memory, a session reads percentiles from them.

/// The upper bound of the first bucket, in µs.
const FIRST_US: u64 = 100;
const PER_OCTAVE: usize = 4;
/// From 0.1 ms to 1.8 h; longer times count as that.
const OCTAVES: usize = 26;
pub const BUCKETS: usize = 1 + OCTAVES * PER_OCTAVE;

/// The bucket of a time. A negative one, after the clock was set back, belongs to the first.
pub fn bucket(delivery_us: i64) -> usize {
    let delivery_us = u64::try_from(delivery_us).unwrap_or(0);
    let Some(octave) = (delivery_us / FIRST_US).checked_ilog2() else {
        return 0;
    };
    let quarter = (delivery_us >> octave) * PER_OCTAVE as u64 / FIRST_US; // from 4 to 7
    (1 + octave as usize * PER_OCTAVE + quarter as usize - PER_OCTAVE).min(BUCKETS - 1)
}

/// The lower bound of a bucket, in µs.
fn begins_us(bucket: usize) -> u64 {
    match bucket.checked_sub(1) {
        None => 0,
        Some(above) => {
            let (octave, quarter) = (above / PER_OCTAVE, above % PER_OCTAVE);
            (FIRST_US << octave) * (PER_OCTAVE + quarter) as u64 / PER_OCTAVE as u64
        }
    }
}

/// The first and the last octave whose ends are bounds of the histogram for monitoring: 0.8 ms and 105 s.
const FIRST_BOUND: usize = 3;
const LAST_BOUND: usize = 20;
/// The bounds of the histogram for monitoring.
pub const BOUNDS: usize = LAST_BOUND - FIRST_BOUND + 1;

/// The histogram for monitoring: for each bound, in ms, the number of messages that took less time. The bounds double.
pub fn histogram(counts: &[u64; BUCKETS]) -> [(f64, u64); BOUNDS] {
    std::array::from_fn(|index| {
        let octave = FIRST_BOUND + index;
        let below = counts[..=octave * PER_OCTAVE].iter().sum();
        ((FIRST_US << octave) as f64 / 1e3, below)
    })
}

/// The time in ms below which this part of the messages was delivered, 0.5 for the median. None if none was counted.
pub fn percentile_ms(counts: &[u64; BUCKETS], part: f64) -> Option<f64> {
    let total: u64 = counts.iter().sum();
    let wanted = part * total as f64;
    let mut before = 0;
    for (bucket, count) in counts.iter().enumerate() {
        if *count > 0 && (before + count) as f64 >= wanted {
            // As if the messages of a bucket were spread evenly over it.
            let inside = ((wanted - before as f64) / *count as f64).clamp(0.0, 1.0);
            let (from, to) = (begins_us(bucket) as f64, begins_us(bucket + 1) as f64);
            return Some((from + inside * (to - from)) / 1000.0);
        }
        before += count;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn counted(times_us: &[i64]) -> [u64; BUCKETS] {
        let mut counts = [0; BUCKETS];
        times_us
            .iter()
            .for_each(|delivery_us| counts[bucket(*delivery_us)] += 1);
        counts
    }

    #[test]
    fn buckets_follow_each_other_without_a_gap() {
        for above in 1..BUCKETS {
            let begins = begins_us(above) as i64;
            assert!(begins_us(above) > begins_us(above - 1));
            assert_eq!((bucket(begins - 1), bucket(begins)), (above - 1, above));
        }
        assert_eq!((bucket(i64::MIN), bucket(0), bucket(99)), (0, 0, 0));
        assert_eq!(bucket(i64::MAX), BUCKETS - 1);
        assert!(begins_us(BUCKETS - 1) > 3_600_000_000, "an hour has a separate bucket");
    }

    #[test]
    fn nothing_counted_has_no_percentile() {
        assert_eq!(percentile_ms(&[0; BUCKETS], 0.5), None);
    }

    #[test]
    fn a_few_slow_ones_show_in_the_high_percentiles_alone() {
        let mut times = vec![1_000; 95];
        times.extend([2_000_000; 5]);
        let counts = counted(&times);
        let at = |part| percentile_ms(&counts, part).unwrap();
        assert!((1.0..1.25).contains(&at(0.5)), "{}", at(0.5));
        assert!((1.0..=1.25).contains(&at(0.95)), "{}", at(0.95));
        assert!((1_600.0..2_500.0).contains(&at(0.99)), "{}", at(0.99));
    }

    #[test]
    fn the_histogram_counts_what_is_below_each_bound() {
        let counts = counted(&[0, 799, 800, 1_599, 1_600, 104_857_599, 104_857_600, i64::MAX]);
        let histogram = histogram(&counts);
        assert_eq!(histogram[..3], [(0.8, 2), (1.6, 4), (3.2, 5)]);
        assert_eq!(histogram[BOUNDS - 1], (104_857.6, 6));
        assert!(histogram.windows(2).all(|pair| pair[0].0 * 2.0 == pair[1].0));
    }

    proptest! {
        #[test]
        fn a_percentile_is_off_by_less_than_a_quarter(
            mut times in prop::collection::vec(FIRST_US as i64..3_600_000_000, 1..200), part in 0.01..1.0_f64
        ) {
            times.sort_unstable();
            let rank = ((part * times.len() as f64).ceil() as usize).max(1);
            let exact = times[rank - 1] as f64 / 1000.0;
            let found = percentile_ms(&counted(&times), part).unwrap();
            prop_assert!(found >= exact / 1.2501 && found <= exact * 1.2501, "{found} for {exact}");
        }
    }
}
