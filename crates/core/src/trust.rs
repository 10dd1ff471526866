//! How many messages a destination is trusted with: all of the window, but after it went down one, until it has answered.
//! Called by the worker's main thread.
//!
//! A destination that fails at each attempt would else make the worker claim a whole window each time, hand it over, hear that
//! all is lost and give it back: two large transactions and thousands of messages made for nothing, on the thread that all
//! other destinations wait for. With one message an attempt costs what one message costs. A peer that is back is trusted with
//! four more for each that it answers, so a window of 2,000 is open again after six round trips.

/// While nothing has been answered since the destination went down.
const FIRST: usize = 1;
/// For each message that is answered.
const GROWTH: usize = 4;

/// What one destination is trusted with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Trust {
    window: usize,
    max: usize,
}

impl Trust {
    /// Of a destination that nothing is known against.
    pub fn full(max: usize) -> Self {
        Self { window: max, max }
    }

    /// How many messages may be claimed and without an answer.
    pub fn window(&self) -> usize {
        self.window
    }

    /// The connection broke, or could not be made, or the destination as a whole refused.
    pub fn went_down(&mut self) {
        self.window = FIRST.min(self.max);
    }

    /// So many messages were answered, whatever the answer was.
    pub fn answered(&mut self, messages: usize) {
        let more = messages.saturating_mul(GROWTH);
        self.window = self.window.saturating_add(more).min(self.max);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_went_down_gets_one_message_until_it_answers_and_then_all_of_the_window_within_six_rounds() {
        let mut trust = Trust::full(2000);
        assert_eq!(trust.window(), 2000);
        trust.went_down();
        trust.went_down();
        let mut windows = Vec::new();
        for _ in 0..7 {
            windows.push(trust.window());
            trust.answered(trust.window());
        }
        assert_eq!(windows, [1, 5, 25, 125, 625, 2000, 2000]);
        trust.answered(usize::MAX);
        assert_eq!(trust, Trust::full(2000));
    }
}
