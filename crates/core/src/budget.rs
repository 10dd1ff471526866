//! How many rows a claim asks for, and how they are split among the partitions. Called by the worker's main thread
//! before each claim.

/// Splits `limit` rows among partitions: the shares sum to it and differ by at most one. Who gets one more moves with
/// `rotation`, which the caller raises by one per claim: with fewer rows than partitions each has its turn within
/// `ceil(partitions / limit)` claims. No partitions, no shares.
pub fn split(limit: u32, partitions: u16, rotation: u64) -> Vec<u32> {
    let n = u32::from(partitions);
    let (Some(share), Some(remainder)) = (limit.checked_div(n), limit.checked_rem(n)) else {
        return Vec::new();
    };
    // The round continues where the last claim's extras ended, so it closes in as few claims as it can.
    let turn = (rotation % u64::from(n)) as u32; // lossless: below n, a u16; so are remainder and index below
    let first = (turn * remainder) % n;
    (0..n)
        .map(|index| share + u32::from((index + n - first) % n < remainder))
        .collect()
}

/// Shares of a claim for partitions of which some are `hungry`: they filled their share of the last claim, so more waits
/// in them. With none or all hungry it is a plain split. Otherwise the quiet ones keep half of an even share, at least
/// one row, so that what comes in there goes out at once, and the hungry ones split the rest.
pub fn shares(limit: u32, hungry: &[bool], rotation: u64) -> Vec<u32> {
    let n = u16::try_from(hungry.len()).unwrap_or(u16::MAX);
    let hungry_count = u16::try_from(hungry.iter().filter(|hungry| **hungry).count()).unwrap_or(u16::MAX);
    if hungry_count == 0 || hungry_count == n || limit < 2 * u32::from(n) {
        return split(limit, n, rotation);
    }
    let quiet_share = limit / (2 * u32::from(n));
    let rest = limit - quiet_share * u32::from(n - hungry_count);
    let mut hungry_shares = split(rest, hungry_count, rotation).into_iter();
    hungry
        .iter()
        .map(|hungry| {
            if *hungry {
                hungry_shares.next().unwrap_or_default()
            } else {
                quiet_share
            }
        })
        .collect()
}

/// Grows a claim from [`ClaimBudget::START_ROWS`] as long as the bodies seen say that it stays within
/// [`ClaimBudget::BYTES_MAX`]: bounds the memory of a worker without knowing the bodies in advance.
///
/// An estimate, not a wall: the first claim after bodies grew from small to large may exceed it.
///
/// One per worker, owned by its main thread.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClaimBudget {
    /// Rows that the next claim may have, before batch size and window.
    ramp_rows: u32,
    /// Of a body; 0 until a row was seen.
    average_bytes: u64,
}

impl ClaimBudget {
    /// Enough to fill a round trip to the broker, few enough to learn the bodies' size by.
    pub const START_ROWS: u32 = 64;

    /// A worker's bodies: one batch on the wire and one being claimed stay well below what a backend commonly uses.
    pub const BYTES_MAX: u64 = 32 * 1024 * 1024;

    pub fn new() -> Self {
        Self {
            ramp_rows: Self::START_ROWS,
            average_bytes: 0,
        }
    }

    /// Rows for the next claim: at most `batch_size` and `window_free`, and at least 1, so a claim is never asked for
    /// nothing: do not ask when the window is full.
    pub fn next_limit(&self, batch_size: u32, window_free: u32) -> u32 {
        self.ramp_rows.min(batch_size).min(window_free).max(1)
    }

    /// Learns from a claim's rows and the sum of their body bytes. The average rises at once and falls by a quarter of
    /// the difference per claim: too few rows cost a round trip, too many cost memory.
    pub fn observe(&mut self, rows: u32, bytes: u64) {
        let Some(seen_bytes) = bytes.checked_div(u64::from(rows)) else {
            return;
        };
        let fallen = self.average_bytes - self.average_bytes.saturating_sub(seen_bytes).div_ceil(4);
        self.average_bytes = seen_bytes.max(fallen).max(1);
        let rows_max = u32::try_from(Self::BYTES_MAX / self.average_bytes).unwrap_or(u32::MAX);
        self.ramp_rows = self.ramp_rows.saturating_mul(2).min(rows_max).max(1);
    }
}

impl Default for ClaimBudget {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_remainder_moves_from_claim_to_claim() {
        assert_eq!(split(8, 3, 0), [3, 3, 2]);
        assert_eq!(split(8, 3, 1), [3, 2, 3]);
        assert_eq!(split(8, 3, 2), [2, 3, 3]);
        assert_eq!(split(8, 3, 3), [3, 3, 2]);
    }

    #[test]
    fn no_partitions_means_no_shares() {
        assert!(split(8, 0, 5).is_empty());
    }

    #[test]
    fn the_limit_starts_at_64_and_doubles_while_bodies_are_small() {
        let mut budget = ClaimBudget::new();
        let mut limits = Vec::new();
        for _ in 0..5 {
            let limit = budget.next_limit(500, 10_000);
            limits.push(limit);
            budget.observe(limit, u64::from(limit) * 1_000);
        }
        assert_eq!(limits, [64, 128, 256, 500, 500]);
    }

    #[test]
    fn large_bodies_shrink_the_claim_at_once() {
        let mut budget = ClaimBudget::new();
        budget.observe(64, 64 * 8 * 1024 * 1024);
        assert_eq!(budget.next_limit(500, 500), 4);
        budget.observe(4, 4 * 64 * 1024 * 1024);
        assert_eq!(budget.next_limit(500, 500), 1, "one row always goes");
    }

    #[test]
    fn a_claim_grows_again_when_bodies_are_small_again() {
        let mut budget = ClaimBudget::new();
        budget.observe(1, 64 * 1024 * 1024);
        let mut claims = 0;
        while budget.next_limit(500, 500) < 500 {
            budget.observe(1, 100);
            claims += 1;
            assert!(claims < 60, "stuck at {}", budget.next_limit(500, 500));
        }
    }

    #[test]
    fn an_empty_claim_teaches_nothing() {
        let mut budget = ClaimBudget::new();
        budget.observe(0, 0);
        assert_eq!(budget, ClaimBudget::new());
    }

    #[test]
    fn batch_size_and_window_bound_the_limit() {
        let budget = ClaimBudget::new();
        assert_eq!(budget.next_limit(10, 500), 10);
        assert_eq!(budget.next_limit(500, 7), 7);
        assert_eq!(budget.next_limit(0, 0), 1);
    }

    proptest! {
        #[test]
        fn the_shares_sum_to_the_limit_and_differ_by_at_most_one(limit: u32, partitions in 1_u16.., rotation: u64) {
            let shares = split(limit, partitions, rotation);
            prop_assert_eq!(shares.len(), usize::from(partitions));
            prop_assert_eq!(shares.iter().map(|share| u64::from(*share)).sum::<u64>(), u64::from(limit));
            prop_assert!(shares.iter().max().unwrap() - shares.iter().min().unwrap() <= 1);
        }

        #[test]
        fn every_partition_has_its_turn(limit in 1_u32..100, partitions in 1_u16..=1024, start in 0_u64..1 << 40) {
            let claims = u64::from(partitions).div_ceil(u64::from(limit));
            let mut had = vec![0_u32; usize::from(partitions)];
            for rotation in start..start + claims {
                for (sum, share) in had.iter_mut().zip(split(limit, partitions, rotation)) {
                    *sum += share;
                }
            }
            prop_assert!(had.iter().all(|rows| *rows > 0), "{:?}", had);
        }

        #[test]
        fn a_claim_stays_within_the_bytes_it_has_learnt(
            seen in proptest::collection::vec((any::<u32>(), any::<u64>()), 0..20),
            batch: u32,
            free: u32,
        ) {
            let mut budget = ClaimBudget::new();
            for (rows, bytes) in seen {
                budget.observe(rows, bytes);
            }
            let limit = budget.next_limit(batch, free);
            prop_assert!(limit >= 1);
            prop_assert!(limit == 1 || u64::from(limit) * budget.average_bytes <= ClaimBudget::BYTES_MAX);
        }
    }

    #[test]
    fn a_lone_busy_partition_gets_more_than_half_and_the_quiet_ones_keep_a_share() {
        let mut hungry = vec![false; 16];
        hungry[5] = true;
        let shares = shares(1000, &hungry, 7);
        assert_eq!(shares.iter().sum::<u32>(), 1000);
        assert!(shares[5] > 500, "{shares:?}");
        assert!(shares.iter().all(|share| *share >= 31), "{shares:?}");
    }

    proptest! {
        #[test]
        fn shares_always_sum_to_the_limit(limit in 0u32..5000, hungry in proptest::collection::vec(any::<bool>(), 1..70), rotation: u64) {
            let shares = shares(limit, &hungry, rotation);
            prop_assert_eq!(shares.len(), hungry.len());
            prop_assert_eq!(shares.iter().sum::<u32>(), limit);
        }
    }
}
