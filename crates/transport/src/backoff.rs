//! How long to wait before a destination is tried again. Called on the publisher thread.

use std::time::Duration;

/// A wait that doubles from min to max. A connection resets it only if it lasted for at least max. A connection that
/// breaks immediately each time (the broker closes it on a certain publish) must not be retried at full speed. With
/// HTTP one success resets it.
pub(crate) struct Backoff {
    min: Duration,
    max: Duration,
    next: Duration,
}

impl Backoff {
    pub(crate) fn new(min: Duration, max: Duration) -> Self {
        Self {
            min,
            max: max.max(min),
            next: min,
        }
    }

    pub(crate) fn restart(&mut self) {
        self.next = self.min;
    }

    pub(crate) fn next(&mut self) -> Duration {
        let now = self.next;
        self.next = (now * 2).min(self.max);
        now
    }

    pub(crate) fn connection_lived(&mut self, time: Duration) {
        if time >= self.max {
            self.restart();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_backoff_doubles_to_its_maximum_and_restarts_only_after_a_connection_that_lasted() {
        let mut backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(5));
        let waits: Vec<u128> = (0..8).map(|_| backoff.next().as_millis()).collect();
        assert_eq!(waits, [100, 200, 400, 800, 1600, 3200, 5000, 5000]);
        backoff.connection_lived(Duration::from_secs(1));
        assert_eq!(backoff.next().as_millis(), 5000);
        backoff.connection_lived(Duration::from_secs(5));
        assert_eq!(backoff.next().as_millis(), 100);
    }
}
