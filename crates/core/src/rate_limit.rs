//! How fast messages are sent to a destination: a token bucket. The worker calls it on its main thread before it hands
//! messages to the publisher. Time is an argument, in µs of any clock that does not go back.
//!
//! In any span of time at most `rate · span + burst` messages are sent, and a caller that waits as long as it was asked
//! to always gets one.

/// Parts of a message for each worker that shares the rate. So a rate of messages a second is one of parts a µs, and
/// nothing is ever rounded.
const PARTS: u64 = 1_000_000;

/// The rate limit of one destination in one worker.
#[derive(Clone, Debug)]
pub struct RateLimit {
    /// Messages a second, of all workers together; 0 = no limit.
    rate: u32,
    /// The number of workers that share the rate.
    workers: u32,
    /// What may be sent now, in parts; at most a burst.
    level: u64,
    /// The time up to which the level was filled.
    filled_us: u64,
}

impl RateLimit {
    pub fn new(rate: u32, workers: u32, now_us: u64) -> Self {
        let mut rate_limit = Self {
            rate,
            workers: workers.max(1),
            level: 0,
            filled_us: now_us,
        };
        rate_limit.level = rate_limit.burst();
        rate_limit
    }

    /// The rate or the number of workers changed. Saved parts stay, within the new burst.
    pub fn set(&mut self, rate: u32, workers: u32, now_us: u64) {
        let workers = workers.max(1);
        if self.rate == 0 {
            *self = Self::new(rate, workers, now_us);
        } else if (rate, workers) != (self.rate, self.workers) {
            self.fill(now_us);
            let level = self.level * u64::from(workers) / u64::from(self.workers);
            (self.rate, self.workers) = (rate, workers);
            self.level = level.min(self.burst());
        }
    }

    /// The number of messages that may be sent now; None = no limit.
    pub fn room(&mut self, now_us: u64) -> Option<usize> {
        self.fill(now_us);
        (self.rate > 0).then(|| (self.level / self.message()) as usize)
    }

    /// This number was sent.
    pub fn went(&mut self, messages: usize) {
        self.level = self
            .level
            .saturating_sub(self.message().saturating_mul(messages as u64));
    }

    /// The time in µs until the next may be sent; 0 = now.
    pub fn next_us(&mut self, now_us: u64) -> u64 {
        self.fill(now_us);
        let missing = self.message().saturating_sub(self.level);
        match self.rate {
            0 => 0,
            rate => missing.div_ceil(u64::from(rate)),
        }
    }

    /// The most messages in a second, at least one; None = no limit.
    pub fn per_second(&self) -> Option<u32> {
        (self.rate > 0).then(|| (self.rate / self.workers).max(1))
    }

    fn message(&self) -> u64 {
        PARTS * u64::from(self.workers)
    }

    /// A tenth of a second's worth, one message at least.
    fn burst(&self) -> u64 {
        (u64::from(self.rate) * PARTS / 10).max(self.message())
    }

    fn fill(&mut self, now_us: u64) {
        let refill = u64::from(self.rate).saturating_mul(now_us.saturating_sub(self.filled_us));
        self.level = self.level.saturating_add(refill).min(self.burst());
        self.filled_us = self.filled_us.max(now_us);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn without_a_rate_all_messages_may_be_sent() {
        let mut rate_limit = RateLimit::new(0, 3, 0);
        assert_eq!(
            (rate_limit.room(0), rate_limit.next_us(0), rate_limit.per_second()),
            (None, 0, None)
        );
    }

    #[test]
    fn a_slow_rate_permits_one_message_and_then_the_next_in_time() {
        let mut rate_limit = RateLimit::new(2, 1, 5);
        assert_eq!((rate_limit.room(5), rate_limit.next_us(5)), (Some(1), 0));
        rate_limit.went(1);
        assert_eq!((rate_limit.room(5), rate_limit.next_us(5)), (Some(0), 500_000));
        assert_eq!(rate_limit.room(500_004), Some(0));
        assert_eq!(rate_limit.room(500_005), Some(1));
    }

    #[test]
    fn an_idle_second_saves_up_a_tenth_of_a_second() {
        let mut rate_limit = RateLimit::new(1_000, 1, 0);
        assert_eq!(rate_limit.room(60_000_000), Some(100));
        rate_limit.went(100);
        assert_eq!(rate_limit.room(60_010_000), Some(10));
    }

    #[test]
    fn workers_share_the_rate() {
        let mut rate_limit = RateLimit::new(1_000, 4, 0);
        assert_eq!((rate_limit.room(0), rate_limit.per_second()), (Some(25), Some(250)));
        rate_limit.set(1_000, 2, 0);
        assert_eq!(rate_limit.room(0), Some(25), "what is saved up is no more for that");
        rate_limit.set(0, 2, 0);
        assert_eq!(rate_limit.room(0), None);
    }

    #[test]
    fn a_clock_that_stops_or_goes_back_gives_nothing() {
        let mut rate_limit = RateLimit::new(10, 1, 1_000_000);
        rate_limit.went(1);
        assert_eq!(rate_limit.room(0), Some(0));
        assert_eq!(rate_limit.room(1_100_000), Some(1));
    }

    proptest! {
        /// Whenever it is called and however many of the permitted messages it sends.
        #[test]
        fn no_span_of_time_exceeds_the_rate_and_a_burst(
            rate in 1u32..5_000, workers in 1u32..16,
            steps in prop::collection::vec((0u64..400_000, 0usize..1_000), 1..200),
        ) {
            let mut rate_limit = RateLimit::new(rate, workers, 0);
            let burst = (f64::from(rate) / f64::from(workers) / 10.0).max(1.0);
            let mut now_us = 0;
            let mut went: Vec<(u64, usize)> = Vec::new();
            for (wait_us, wanted) in steps {
                now_us += wait_us;
                let count = rate_limit.room(now_us).unwrap().min(wanted);
                rate_limit.went(count);
                went.push((now_us, count));
            }
            for from in 0..went.len() {
                let mut sum = 0;
                for (at_us, count) in &went[from..] {
                    sum += count;
                    let span_s = (at_us - went[from].0) as f64 / 1e6;
                    let most = f64::from(rate) / f64::from(workers) * span_s + burst;
                    prop_assert!(sum as f64 <= most + 1e-6, "{sum} went in {span_s} s, of {most}");
                }
            }
        }

        /// Calls in between, however frequent, delay nothing, and the announced wait suffices.
        #[test]
        fn a_caller_that_waits_as_asked_gets_one_and_the_whole_rate(
            rate in 1u32..5_000, workers in 1u32..16, looks in prop::collection::vec(1u64..50_000, 0..50),
        ) {
            let mut rate_limit = RateLimit::new(rate, workers, 0);
            let mut now_us = 0;
            let messages = 50u64;
            for number in 0..messages {
                for look in &looks {
                    if rate_limit.next_us(now_us) > *look {
                        now_us += look;
                        rate_limit.room(now_us);
                    }
                }
                now_us += rate_limit.next_us(now_us);
                prop_assert!(rate_limit.room(now_us).unwrap() >= 1, "message {number}");
                rate_limit.went(1);
            }
            // Each wait is rounded up to a whole µs.
            let most_us = (messages * 1_000_000 * u64::from(workers)).div_ceil(u64::from(rate)) + 2 * messages;
            prop_assert!(looks.iter().sum::<u64>() > 0 || now_us <= most_us, "{now_us} µs, of {most_us}");
        }
    }
}
