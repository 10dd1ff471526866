//! How many messages a destination may have at once: the whole window, but after a failure only one, until it has
//! answered. The worker calls it on its main thread.
//!
//! Otherwise, for a destination that fails at each attempt, the worker would claim a whole window each time, hand it
//! over, learn that all is lost and release it. That is two large transactions and thousands of messages in vain, on
//! the thread that all other destinations wait for. With one message an attempt costs what one message costs. A peer
//! that is back gets four more for each message that it answers, so a window of 2,000 is open again after six round
//! trips.

/// Until the first answer after a failure.
const FIRST: usize = 1;
/// The number added for each answered message.
const GROWTH: usize = 4;

/// The number for one destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlowStart {
    window: usize,
    max: usize,
}

impl SlowStart {
    /// The initial state.
    pub fn full(max: usize) -> Self {
        Self { window: max, max }
    }

    /// The most messages that may be claimed and without an answer.
    pub fn window(&self) -> usize {
        self.window
    }

    /// The connection was lost, or could not be made, or the destination refused as a whole.
    pub fn went_down(&mut self) {
        self.window = FIRST.min(self.max);
    }

    /// This number of messages were answered, with any answer.
    pub fn answered(&mut self, messages: usize) {
        let more = messages.saturating_mul(GROWTH);
        self.window = self.window.saturating_add(more).min(self.max);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_destination_gets_one_message_until_it_answers_and_the_whole_window_within_six_rounds() {
        let mut slow_start = SlowStart::full(2000);
        assert_eq!(slow_start.window(), 2000);
        slow_start.went_down();
        slow_start.went_down();
        let mut windows = Vec::new();
        for _ in 0..7 {
            windows.push(slow_start.window());
            slow_start.answered(slow_start.window());
        }
        assert_eq!(windows, [1, 5, 25, 125, 625, 2000, 2000]);
        slow_start.answered(usize::MAX);
        assert_eq!(slow_start, SlowStart::full(2000));
    }
}
