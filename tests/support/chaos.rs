//! How much the tests of chance do, and their random numbers. Called by all tests that kill, fail over or roll dice.
//!
//! - OUTBOX_CHAOS: how many times the rounds and seeds of `make test`. `make chaos` sets it.
//! - OUTBOX_SEED: the first seed. Without it the clock chooses one.

use std::time::UNIX_EPOCH;

/// The number of rounds of a test that makes `few` in `make test`.
pub fn rounds(few: usize) -> usize {
    few * number("OUTBOX_CHAOS").unwrap_or(1) as usize
}

/// As many seeds as [`rounds`]. Each is printed when it begins: the last one of a failed test repeats the failure.
pub fn seeds(few: usize) -> impl Iterator<Item = u64> {
    let of_clock = || UNIX_EPOCH.elapsed().expect("a time after 1970").as_millis() as u64;
    let first = number("OUTBOX_SEED").unwrap_or_else(of_clock);
    (first..)
        .take(rounds(few))
        .inspect(|seed| println!("OUTBOX_SEED={seed}"))
}

fn number(variable: &str) -> Option<u64> {
    let given = std::env::var(variable).ok()?;
    Some(given.parse().unwrap_or_else(|_| panic!("{variable} is a number")))
}

/// Random numbers that are the same for the same seed. Inlined, because the simulation takes millions of them.
pub struct Dice(u64);

impl Dice {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Steele, Lea and Flood's splitmix64.
    #[inline]
    pub fn roll(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// 0 to `n` - 1; 0 if `n` is 0.
    #[inline]
    pub fn below(&mut self, n: usize) -> usize {
        (self.roll() % (n.max(1) as u64)) as usize
    }

    /// `low` to `high`, both included.
    #[inline]
    pub fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.roll() % (high - low + 1)
    }

    /// True `n` times in ten thousand.
    #[inline]
    pub fn chance(&mut self, n: u32) -> bool {
        self.roll() % 10_000 < u64::from(n)
    }
}
