//! What a log was told lately, so that what lasts does not fill it.

use std::cell::RefCell;
use std::time::{Duration, Instant};

/// The same words are said again after so long.
const AGAIN_AFTER: Duration = Duration::from_secs(60);
/// So many are remembered.
const KEPT: usize = 16;

#[derive(Default)]
pub struct Repeats(RefCell<Vec<(String, Instant)>>);

impl Repeats {
    /// Whether this is to be said now; from then on it has been.
    pub fn is_news(&self, text: &str, now: Instant) -> bool {
        let mut said = self.0.borrow_mut();
        said.retain(|(_, at)| now.saturating_duration_since(*at) < AGAIN_AFTER);
        if said.iter().any(|(known, _)| known == text) {
            return false;
        }
        if said.len() == KEPT {
            said.remove(0);
        }
        said.push((text.to_owned(), now));
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_lasts_is_said_once_a_minute_also_where_two_things_take_turns() {
        let (repeats, began) = (Repeats::default(), Instant::now());
        let mut said = 0;
        for second in 0..180 {
            for text in ["a lock", "no connection"] {
                said += u32::from(repeats.is_news(text, began + Duration::from_secs(second)));
            }
        }
        assert_eq!(said, 6);
    }

    #[test]
    fn what_is_remembered_is_bounded() {
        let (repeats, now) = (Repeats::default(), Instant::now());
        assert!((0..1000).all(|n| repeats.is_news(&n.to_string(), now)));
        assert_eq!(repeats.0.borrow().len(), KEPT);
    }
}
