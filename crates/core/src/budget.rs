//! The budget of a pass and of a claim: how many messages a pass takes, and how the rows of a claim are split among
//! partitions. Called by the worker's main thread in each pass.

/// Splits `limit` rows among partitions. The shares sum to `limit` and differ by at most one. The partitions that get
/// one row more change with `rotation`, which the caller raises by one per claim. With fewer rows than partitions, each
/// gets a row within `ceil(partitions / limit)` claims. Empty if there are no partitions.
pub fn split(limit: u32, partitions: u16, rotation: u64) -> Vec<u32> {
    let n = u32::from(partitions);
    let (Some(share), Some(remainder)) = (limit.checked_div(n), limit.checked_rem(n)) else {
        return Vec::new();
    };
    // The extra rows continue where those of the last claim ended, so the round takes as few claims as possible.
    let round = (rotation % u64::from(n)) as u32; // lossless: below n, a u16; so are remainder and index below
    let first = (round * remainder) % n;
    (0..n)
        .map(|index| share + u32::from((index + n - first) % n < remainder))
        .collect()
}

/// The share of each partition in a claim. A partition is `saturated` if it filled its share of the last claim, so more
/// messages wait in it. If all or none are saturated, or if rows are few, it is an even split. Otherwise each other
/// partition keeps half of an even share, at least one row, so that its new messages are delivered immediately. The
/// saturated ones split the rest.
pub fn shares(limit: u32, saturated: &[bool], rotation: u64) -> Vec<u32> {
    let n = u16::try_from(saturated.len()).unwrap_or(u16::MAX);
    let saturated_count = u16::try_from(saturated.iter().filter(|saturated| **saturated).count()).unwrap_or(u16::MAX);
    if saturated_count == 0 || saturated_count == n || limit < 2 * u32::from(n) {
        return split(limit, n, rotation);
    }
    let quiet_share = limit / (2 * u32::from(n));
    let rest = limit - quiet_share * u32::from(n - saturated_count);
    let mut saturated_shares = split(rest, saturated_count, rotation).into_iter();
    saturated
        .iter()
        .map(|saturated| {
            if *saturated {
                saturated_shares.next().unwrap_or_default()
            } else {
                quiet_share
            }
        })
        .collect()
}

/// The number of messages that one pass of a worker may still take, by the fast path and in total. It is set at the
/// start of the pass and counts down. The fast path gets half of the room at most, so it never prevents a claim of
/// messages that only the tables have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allowance {
    receivable: u32,
    all: u32,
}

impl Allowance {
    /// The allowance of a pass with this room in the window, and this batch size, in messages.
    pub fn of_pass(room: u32, batch: u32) -> Self {
        Self {
            receivable: room.div_ceil(2).min(batch),
            all: room.min(batch.saturating_mul(2)),
        }
    }

    /// The number of messages that the fast path may still take.
    pub fn receivable(&self) -> usize {
        self.receivable.min(self.all) as usize
    }

    /// The number of rows that a claim may return.
    pub fn rows(&self, batch: u32) -> u32 {
        batch.min(self.all)
    }

    /// Counts messages taken from the fast path.
    pub fn received(&mut self, count: usize) {
        self.receivable = self.receivable.saturating_sub(count as u32);
        self.claimed(count);
    }

    /// Counts claimed messages.
    pub fn claimed(&mut self, count: usize) {
        self.all = self.all.saturating_sub(count as u32);
    }
}

/// The number of the `limit` rows of a claim that are reserved for draining keys, of which up to `wanted` may come now.
/// It is at most half, so that neither these keys nor the lanes stop the other. With a limit of one row they alternate.
pub fn reserved_for_followers(limit: u32, wanted: u32, rotation: u64) -> u32 {
    let half = limit / 2 + u32::from(limit % 2 == 1 && rotation % 2 == 1);
    half.min(wanted)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_pass_takes_no_more_than_its_room_and_always_leaves_some_for_a_claim(
            room in 2_u32..10_000, batch in 1_u32..5_000, offers in vec(0_usize..6_000, 0..5),
        ) {
            let mut allowance = Allowance::of_pass(room, batch);
            let (receivable, all) = (allowance.receivable(), allowance.all);
            prop_assert!(receivable >= 1 && receivable <= batch as usize);
            prop_assert!(all <= room && receivable < all as usize, "{} of {}", receivable, all);
            for offer in offers {
                allowance.received(offer.min(allowance.receivable()));
            }
            let rows = allowance.rows(batch);
            prop_assert!(rows > 0 && rows <= batch);
            allowance.claimed(rows as usize);
            prop_assert!(allowance.receivable() <= (all - rows) as usize);
        }

        #[test]
        fn followers_and_lanes_both_come_within_two_claims(limit in 1_u32..5_000, wanted in 1_u32..5_000, rotation in 0_u64..1 << 40) {
            let reserved = [rotation, rotation + 1].map(|rotation| reserved_for_followers(limit, wanted, rotation));
            prop_assert!(reserved.iter().all(|rows| *rows <= limit));
            prop_assert!(reserved.iter().any(|rows| *rows > 0));
            prop_assert!(reserved.iter().any(|rows| *rows < limit));
        }
    }

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

    proptest! {
        #[test]
        fn the_shares_sum_to_the_limit_and_differ_by_at_most_one(limit: u32, partitions in 1_u16.., rotation: u64) {
            let shares = split(limit, partitions, rotation);
            prop_assert_eq!(shares.len(), usize::from(partitions));
            prop_assert_eq!(shares.iter().map(|share| u64::from(*share)).sum::<u64>(), u64::from(limit));
            prop_assert!(shares.iter().max().unwrap() - shares.iter().min().unwrap() <= 1);
        }

        #[test]
        fn every_partition_gets_a_row_within_a_round(
            limit in 1_u32..100, partitions in 1_u16..=1024, start in 0_u64..1 << 40,
        ) {
            let claims = u64::from(partitions).div_ceil(u64::from(limit));
            let mut sums = vec![0_u32; usize::from(partitions)];
            for rotation in start..start + claims {
                for (sum, share) in sums.iter_mut().zip(split(limit, partitions, rotation)) {
                    *sum += share;
                }
            }
            prop_assert!(sums.iter().all(|rows| *rows > 0), "{:?}", sums);
        }
    }

    #[test]
    fn a_single_busy_partition_gets_more_than_half_and_the_others_keep_a_share() {
        let mut saturated = vec![false; 16];
        saturated[5] = true;
        let shares = shares(1000, &saturated, 7);
        assert_eq!(shares.iter().sum::<u32>(), 1000);
        assert!(shares[5] > 500, "{shares:?}");
        assert!(shares.iter().all(|share| *share >= 31), "{shares:?}");
    }

    proptest! {
        #[test]
        fn shares_always_sum_to_the_limit(limit in 0u32..5000, saturated in proptest::collection::vec(any::<bool>(), 1..70), rotation: u64) {
            let shares = shares(limit, &saturated, rotation);
            prop_assert_eq!(shares.len(), saturated.len());
            prop_assert_eq!(shares.iter().sum::<u32>(), limit);
        }
    }
}
