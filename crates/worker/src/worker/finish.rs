//! The end of a worker. A part of [`Worker`].

use super::Worker;
use crate::destination::Destination;
use crate::runtime::Runtime;
use outbox_core::engine::StatementTimeout;
use std::time::Duration;

/// How long [`Worker::finish`] may take.
pub struct FinishTimeouts {
    /// The longest wait for answers to messages in flight.
    pub outcomes: Duration,
    /// The longest wait for the connections to close.
    pub close: Duration,
    /// How long after the connections are closed a settle may still begin.
    pub settles: Duration,
    /// Whether answers are settled as they come, not only at the end.
    pub settles_before_close: bool,
}

impl<R: Runtime> Worker<R> {
    /// Ends the worker in order: waits briefly for answers, closes the connections, settles, and releases the remaining
    /// messages and the leases. `wait` waits for answers, no longer than the given time.
    pub fn finish(&mut self, timeouts: &FinishTimeouts, wait: &mut dyn FnMut(&Self, Duration)) -> Result<(), R::Error> {
        self.common.rests = true;
        self.wake_all();
        self.gather();
        let began = self.common.runtime.now();
        let deadline = began + timeouts.outcomes;
        self.destinations.iter().for_each(Destination::wake_on_each);
        while self.destinations.iter().any(Destination::awaits_answers) {
            let left = deadline.saturating_duration_since(self.common.runtime.now());
            if left.is_zero() {
                break;
            }
            wait(self, left);
            let (now, mut ended) = (self.common.runtime.now(), Ok(()));
            for destination in &mut self.destinations {
                destination.take_outcomes(&self.common, now);
                if timeouts.settles_before_close && destination.is_settle_due(&self.common) {
                    ended = ended.and(destination.settle(&self.common, StatementTimeout::Short));
                }
            }
            if let Err(error) = ended {
                self.common.runtime.failed(error)?;
            }
        }
        self.destinations
            .iter()
            .for_each(|destination| destination.request_stop(timeouts.close));
        self.stop(timeouts.close, "the worker ended");
        let deadline = self.common.runtime.now() + timeouts.settles;
        let mut ended = Ok(());
        for destination in &mut self.destinations {
            // A message that is not settled in time is sent again.
            if self.common.runtime.now() < deadline {
                ended = ended.and(destination.settle(&self.common, StatementTimeout::Short));
            }
        }
        self.end_pass(began, 0, 0, false);
        let left = self.common.runtime.leave();
        ended.and(left)
    }

    /// Closes the connections and settles nothing, because the session is lost. Messages in flight may arrive, and are
    /// sent again.
    pub fn abandon(&mut self, limit: Duration) {
        self.stop(limit, "the session is lost");
    }

    fn stop(&mut self, limit: Duration, reason: &str) {
        let deadline = self.common.runtime.now() + limit;
        for destination in &mut self.destinations {
            let left = deadline.saturating_duration_since(self.common.runtime.now());
            destination.stop(&self.common, left, reason);
        }
    }
}
