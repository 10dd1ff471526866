//! How long a message waits after a failed attempt. Called by `settle` on the worker's main thread.

/// Delay before the next attempt, in ms: `base_ms`, doubled for each earlier attempt, at most `max_ms`, plus jitter of
/// up to a quarter. The limit applies before the jitter, so messages that failed together are not retried together even
/// when all have reached it. The result is never below the configured delay.
///
/// `attempts_done` includes the failed attempt, so it is 1 after the first; 0 counts as 1. The same arguments give the
/// same delay. The attempt is hashed with `seed`, so the seq of the message is a sufficient seed.
pub fn delay_ms(attempts_done: u32, base_ms: u64, max_ms: u64, seed: u64) -> u64 {
    let doublings = attempts_done.saturating_sub(1);
    let factor = 1_u64.checked_shl(doublings).unwrap_or(u64::MAX);
    let set_ms = base_ms.saturating_mul(factor).min(max_ms);
    let jitter_ms = splitmix64(seed ^ u64::from(attempts_done).rotate_right(32)) % (set_ms / 4 + 1);
    set_ms.saturating_add(jitter_ms)
}

/// Steele, Lea and Flood's mixer: neighbouring seeds give unrelated numbers.
fn splitmix64(seed: u64) -> u64 {
    let mut z = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_mixer_is_splitmix64() {
        // The first outputs of the reference implementation (Vigna, splitmix64.c) for states 0 and 1234567.
        assert_eq!(splitmix64(0), 0xe220_a839_7b1d_cdaf);
        assert_eq!(splitmix64(1_234_567), 6_457_827_717_110_365_317);
    }

    #[test]
    fn the_delay_doubles_up_to_the_cap() {
        for (attempts_done, set_ms) in [
            (0, 100),
            (1, 100),
            (2, 200),
            (3, 400),
            (4, 800),
            (5, 1_000),
            (99, 1_000),
        ] {
            let found = delay_ms(attempts_done, 100, 1_000, 7);
            assert!(
                (set_ms..=set_ms + set_ms / 4).contains(&found),
                "{found} ms after {attempts_done}"
            );
        }
    }

    #[test]
    fn messages_that_failed_together_come_back_apart() {
        let delays: std::collections::BTreeSet<u64> = (0..100).map(|seq| delay_ms(9, 1_000, 60_000, seq)).collect();
        assert!(delays.len() > 90, "{} distinct delays of 100", delays.len());
        assert!(
            delays.last().unwrap() - delays.first().unwrap() > 12_000,
            "the jitter uses its range"
        );
    }

    #[test]
    fn no_delay_is_set_by_a_base_of_zero() {
        assert_eq!(delay_ms(5, 0, 1_000, 7), 0);
    }

    proptest! {
        #[test]
        fn the_delay_stays_between_the_set_one_and_a_quarter_more(attempts: u32, base: u64, max: u64, seed: u64) {
            let exact = (u128::from(base) << attempts.saturating_sub(1).min(64)).min(u128::from(max));
            let set_ms = u64::try_from(exact).unwrap();
            let found = delay_ms(attempts, base, max, seed);
            prop_assert!(found >= set_ms);
            prop_assert!(found <= set_ms.saturating_add(set_ms / 4));
        }
    }
}
