//! Limits repeated log lines: a problem that lasts is logged once a minute. The host in the server calls it for
//! failures.

use std::cell::RefCell;
use std::time::{Duration, Instant};

/// How long a text is not logged again.
const REPEAT_AFTER: Duration = Duration::from_secs(60);
/// The number of texts to remember. One more evicts the oldest.
const TEXTS_MAX: usize = 16;

#[derive(Default)]
pub struct Repeats(RefCell<Vec<(String, Instant)>>);

impl Repeats {
    /// Whether to log this text now. If so, it counts as logged at `now`.
    pub fn is_news(&self, text: &str, now: Instant) -> bool {
        let mut logged = self.0.borrow_mut();
        logged.retain(|(_, at)| now.saturating_duration_since(*at) < REPEAT_AFTER);
        if logged.iter().any(|(known, _)| known == text) {
            return false;
        }
        if logged.len() == TEXTS_MAX {
            logged.remove(0);
        }
        logged.push((text.to_owned(), now));
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lasting_problem_is_logged_once_a_minute_even_if_two_alternate() {
        let (repeats, began) = (Repeats::default(), Instant::now());
        let mut lines = 0;
        for second in 0..180 {
            for text in ["a lock", "no connection"] {
                lines += u32::from(repeats.is_news(text, began + Duration::from_secs(second)));
            }
        }
        assert_eq!(lines, 6);
    }

    #[test]
    fn the_number_of_remembered_texts_is_bounded() {
        let (repeats, now) = (Repeats::default(), Instant::now());
        assert!((0..1000).all(|n| repeats.is_news(&n.to_string(), now)));
        assert_eq!(repeats.0.borrow().len(), TEXTS_MAX);
    }
}
