//! The disposition of a message, given the broker's answer. The worker calls it once for each outcome on its main
//! thread, and then executes the dispositions of a batch in one transaction.
//!
//! A fault of the message is charged to it (an attempt, and in the end the dead letters). A fault of the destination or
//! the connection is not: the message is released and sent again when the destination is back.

use crate::backoff;
use crate::message::Outcome;

/// Errors and reasons are stored in rows and shown in views: truncated to this many bytes.
pub const TEXT_MAX_BYTES: usize = 500;

/// The reason of a dead letter that was not sent in time; outbox_internal.dead_letter has the same text.
pub const EXPIRED: &str = "expired: it was not sent in time";

/// Retry settings of a destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RetryPolicy {
    /// All attempts, including the first; 0 and 1 both mean no retry.
    pub max_attempts: u32,
    /// Delay after the first failure, in ms.
    pub base_ms: u64,
    /// The longest delay without jitter, in ms.
    pub max_ms: u64,
}

/// The settings that decide the disposition of a message.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rules {
    pub retry: RetryPolicy,
    /// After a dead letter its key waits.
    pub dead_blocks: bool,
    pub ordering: Ordering,
}

impl Rules {
    /// What a dead letter blocks.
    pub fn dead_blocks(&self) -> Blocks {
        match self.ordering {
            Ordering::Key if self.dead_blocks => Blocks::Key,
            Ordering::Partition if self.dead_blocks => Blocks::Partition,
            _ => Blocks::Nothing,
        }
    }
}

/// The messages that wait behind a dead letter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Blocks {
    Nothing,
    Key,
    Partition,
}

/// The order that a destination gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ordering {
    /// Messages of a key one after the other.
    Key,
    /// All messages of a partition one after the other, also those without a key.
    Partition,
    /// None: a failed message blocks no other.
    None,
}

/// What happens to a message. Texts are at most [`TEXT_MAX_BYTES`] long, on one line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Disposition {
    /// To the history, for good.
    Publish,
    /// To the waiting messages, an attempt charged, due after `delay_ms`.
    Retry { delay_ms: u64, error: String },
    /// To the dead letters.
    Dead { reason: String },
    /// To the dead letters, no attempt charged, and its key continues: it expired.
    Expire,
    /// Back to pending as it was: no attempt charged.
    Release { reason: String },
    /// To the waiting messages, behind an earlier one of its key that failed: no attempt charged.
    Wait,
}

/// What outbox_internal.settle() does with the row of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    Publish,
    /// A dead letter without an attempt.
    Expire,
    /// Behind an earlier one of its key.
    Wait,
    /// As if it had not been claimed.
    Free,
    Retry,
    Dead(Blocks),
}

impl Action {
    /// Its letter in SQL.
    pub const fn letter(self) -> &'static str {
        match self {
            Self::Publish => "p",
            Self::Expire => "x",
            Self::Wait => "w",
            Self::Free => "f",
            Self::Retry => "r",
            Self::Dead(Blocks::Nothing) => "d",
            Self::Dead(Blocks::Key) => "D",
            Self::Dead(Blocks::Partition) => "B",
        }
    }
}

/// A disposition in the form of outbox_internal.settle().
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ending<'a> {
    pub action: Action,
    /// The delay of a retry.
    pub delay_ms: Option<i64>,
    /// The error of a retry, the reason of a dead letter.
    pub reason: Option<&'a str>,
}

impl<'a> Ending<'a> {
    /// `dead_closes`: what a dead letter of the destination blocks.
    pub fn of(disposition: &'a Disposition, dead_blocks: Blocks) -> Self {
        let (action, delay_ms, reason) = match disposition {
            Disposition::Publish => (Action::Publish, None, None),
            Disposition::Retry { delay_ms, error } => (Action::Retry, Some(*delay_ms as i64), Some(error.as_str())),
            Disposition::Dead { reason } => (Action::Dead(dead_blocks), None, Some(reason.as_str())),
            Disposition::Expire => (Action::Expire, None, Some(EXPIRED)),
            Disposition::Release { .. } => (Action::Free, None, None),
            Disposition::Wait => (Action::Wait, None, None),
        };
        Self {
            action,
            delay_ms,
            reason,
        }
    }
}

/// The numbers of messages that ended, or failed, in one transaction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ended {
    pub published: u64,
    /// Failed, and to be tried again.
    pub retried: u64,
    /// Failed, and a dead letter.
    pub dead: u64,
    /// A dead letter without an attempt.
    pub expired: u64,
    /// Released without a charge.
    pub released: u64,
}

impl Ended {
    /// From the numbers that SQL returns for messages with one outcome: failed attempts, and messages that left outbox.
    pub fn of(published: i64, failed: i64, gone: i64) -> Self {
        let count = |count: i64| u64::try_from(count).unwrap_or(0);
        let (published, failed) = (count(published), count(failed));
        let ended_dead = count(gone).saturating_sub(published);
        let dead = failed.min(ended_dead);
        Self {
            published,
            retried: failed - dead,
            dead,
            expired: ended_dead - dead,
            released: 0,
        }
    }

    pub fn note(&mut self, disposition: &Disposition) {
        match disposition {
            Disposition::Publish => self.published += 1,
            Disposition::Retry { .. } => self.retried += 1,
            Disposition::Dead { .. } => self.dead += 1,
            Disposition::Expire => self.expired += 1,
            Disposition::Release { .. } => self.released += 1,
            Disposition::Wait => {}
        }
    }

    pub fn add(&mut self, more: Self) {
        self.published += more.published;
        self.retried += more.retried;
        self.dead += more.dead;
        self.expired += more.expired;
        self.released += more.released;
    }

    /// The number of failed attempts.
    pub fn failed(&self) -> u64 {
        self.retried + self.dead
    }

    /// The number of new dead letters.
    pub fn all_dead(&self) -> u64 {
        self.dead + self.expired
    }

    /// The number of messages that left outbox.
    pub fn gone(&self) -> u64 {
        self.published + self.all_dead()
    }
}

/// Decides for one message. `attempts_before` counts the charged attempts before this one; `seed` feeds the jitter.
pub fn decide(outcome: &Outcome, attempts_before: u32, policy: &RetryPolicy, seed: u64) -> Disposition {
    match outcome {
        Outcome::Confirmed => Disposition::Publish,
        Outcome::Nacked => charge("nacked by the broker".to_owned(), attempts_before, policy, seed),
        Outcome::Failed { reason } => charge(reason.clone(), attempts_before, policy, seed),
        Outcome::Returned { reason, .. } => charge(format!("unroutable: {reason}"), attempts_before, policy, seed),
        Outcome::Refused { reason } => Disposition::Dead {
            reason: one_line(&format!("refused: {reason}"), ""),
        },
        Outcome::Unsendable { reason } => Disposition::Dead {
            reason: one_line(reason, ""),
        },
        Outcome::Expired => Disposition::Expire,
        Outcome::TimedOut => Disposition::Release {
            reason: "no confirm in time".to_owned(),
        },
        Outcome::Lost { reason } => Disposition::Release {
            reason: one_line(&format!("connection lost: {reason}"), ""),
        },
        Outcome::Blocked => Disposition::Release {
            reason: "the broker blocks publishers".to_owned(),
        },
    }
}

/// Retry while attempts are left, otherwise dead.
fn charge(error: String, attempts_before: u32, policy: &RetryPolicy, seed: u64) -> Disposition {
    let attempts_done = attempts_before.saturating_add(1);
    if attempts_done < policy.max_attempts {
        let delay_ms = backoff::delay_ms(attempts_done, policy.base_ms, policy.max_ms, seed);
        return Disposition::Retry {
            delay_ms,
            error: one_line(&error, ""),
        };
    }
    let plural = if attempts_done == 1 { "" } else { "s" };
    Disposition::Dead {
        reason: one_line(&error, &format!(" (after {attempts_done} attempt{plural})")),
    }
}

/// `text` and `suffix` within the limit; only the text is truncated. A broker's text may contain line breaks, which
/// would forge lines in a log.
fn one_line(text: &str, suffix: &str) -> String {
    let room_bytes = TEXT_MAX_BYTES.saturating_sub(suffix.len());
    let mut line: String = text[..text.floor_char_boundary(room_bytes)]
        .chars()
        .map(|c| if c.is_ascii_control() { ' ' } else { c }) // same length, so still within the limit
        .collect();
    line.push_str(suffix);
    line
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashSet;

    const POLICY: RetryPolicy = RetryPolicy {
        max_attempts: 3,
        base_ms: 100,
        max_ms: 1_000,
    };

    fn no_route() -> Outcome {
        Outcome::Returned {
            code: 312,
            reason: "NO_ROUTE".into(),
        }
    }

    #[test]
    fn only_a_confirm_publishes() {
        assert_eq!(decide(&Outcome::Confirmed, 0, &POLICY, 1), Disposition::Publish);
        assert_eq!(
            decide(&Outcome::Confirmed, 99, &POLICY, 1),
            Disposition::Publish,
            "however many attempts it took"
        );
    }

    #[test]
    fn a_nack_is_retried_after_a_growing_delay() {
        for (attempts_before, set_ms) in [(0, 100), (1, 200)] {
            let Disposition::Retry { delay_ms, error } = decide(&Outcome::Nacked, attempts_before, &POLICY, 1) else {
                panic!("not a retry");
            };
            assert!((set_ms..=set_ms + set_ms / 4).contains(&delay_ms));
            assert_eq!(error, "nacked by the broker");
        }
    }

    #[test]
    fn an_unroutable_message_out_of_attempts_is_dead_and_says_why() {
        let Disposition::Retry { error, .. } = decide(&no_route(), 1, &POLICY, 1) else {
            panic!("not a retry")
        };
        assert_eq!(error, "unroutable: NO_ROUTE");
        let dead = Disposition::Dead {
            reason: "unroutable: NO_ROUTE (after 3 attempts)".into(),
        };
        assert_eq!(decide(&no_route(), 2, &POLICY, 1), dead);
    }

    #[test]
    fn a_message_that_the_destination_failed_on_is_retried_with_its_error_and_then_dead() {
        let outcome = Outcome::Failed {
            reason: "HTTP 500 Internal Server Error".into(),
        };
        let Disposition::Retry { error, .. } = decide(&outcome, 0, &POLICY, 1) else {
            panic!("not a retry")
        };
        assert_eq!(error, "HTTP 500 Internal Server Error");
        let dead = Disposition::Dead {
            reason: "HTTP 500 Internal Server Error (after 3 attempts)".into(),
        };
        assert_eq!(decide(&outcome, 2, &POLICY, 1), dead);
    }

    #[test]
    fn without_retries_the_first_failure_is_the_last() {
        for max_attempts in [0, 1] {
            let policy = RetryPolicy { max_attempts, ..POLICY };
            let dead = Disposition::Dead {
                reason: "nacked by the broker (after 1 attempt)".into(),
            };
            assert_eq!(decide(&Outcome::Nacked, 0, &policy, 1), dead);
        }
    }

    #[test]
    fn a_refused_message_is_dead_at_once() {
        let outcome = Outcome::Refused {
            reason: "body of 20 MB".into(),
        };
        assert_eq!(
            decide(&outcome, 0, &POLICY, 1),
            Disposition::Dead {
                reason: "refused: body of 20 MB".into()
            }
        );
    }

    #[test]
    fn a_fault_of_the_connection_charges_no_attempt() {
        let lost = Outcome::Lost {
            reason: "reset by peer".into(),
        };
        for outcome in [Outcome::TimedOut, lost, Outcome::Blocked] {
            assert!(
                matches!(decide(&outcome, 99, &POLICY, 1), Disposition::Release { .. }),
                "{outcome:?}"
            );
        }
    }

    #[test]
    fn every_action_has_a_unique_letter() {
        let dead = [Blocks::Nothing, Blocks::Key, Blocks::Partition].map(Action::Dead);
        let others = [
            Action::Publish,
            Action::Expire,
            Action::Wait,
            Action::Free,
            Action::Retry,
        ];
        let letters: HashSet<&str> = others.into_iter().chain(dead).map(Action::letter).collect();
        assert_eq!(letters.len(), 8);
        assert!(letters.iter().all(|letter| letter.len() == 1), "{letters:?}");
    }

    #[test]
    fn a_dead_letter_blocks_its_unit_of_order() {
        let rules = |ordering, dead_blocks| Rules {
            retry: POLICY,
            dead_blocks,
            ordering,
        };
        for (ordering, closes) in [
            (Ordering::Key, Blocks::Key),
            (Ordering::Partition, Blocks::Partition),
            (Ordering::None, Blocks::Nothing),
        ] {
            assert_eq!(rules(ordering, true).dead_blocks(), closes);
            assert_eq!(rules(ordering, false).dead_blocks(), Blocks::Nothing);
            let dead = Disposition::Dead { reason: "why".into() };
            let ending = Ending {
                action: Action::Dead(closes),
                delay_ms: None,
                reason: Some("why"),
            };
            assert_eq!(Ending::of(&dead, closes), ending);
        }
    }

    #[test]
    fn every_outcome_is_counted_once() {
        let text = String::new();
        let mut ended = Ended::default();
        for disposition in [
            Disposition::Publish,
            Disposition::Retry {
                delay_ms: 1,
                error: text.clone(),
            },
            Disposition::Dead { reason: text.clone() },
            Disposition::Expire,
            Disposition::Release { reason: text },
            Disposition::Wait,
        ] {
            ended.note(&disposition);
        }
        let one_each = Ended {
            published: 1,
            retried: 1,
            dead: 1,
            expired: 1,
            released: 1,
        };
        assert_eq!(ended, one_each);
        assert_eq!((ended.failed(), ended.all_dead(), ended.gone()), (2, 2, 3));
        let mut of_relays = Ended::of(1, 0, 1);
        for more in [Ended::of(0, 1, 0), Ended::of(0, 1, 1), Ended::of(0, 0, 1)] {
            of_relays.add(more);
        }
        let none_released = Ended {
            released: 0,
            ..one_each
        };
        assert_eq!(of_relays, none_released);
        assert_eq!(Ended::of(-1, -1, -1), Ended::default());
    }

    #[test]
    fn a_long_reason_is_truncated_and_keeps_the_count() {
        let outcome = Outcome::Returned {
            code: 312,
            reason: "é\n".repeat(1_000),
        };
        let Disposition::Dead { reason } = decide(&outcome, 9, &POLICY, 1) else {
            panic!("not dead")
        };
        assert!(
            reason.len() <= TEXT_MAX_BYTES && reason.len() > TEXT_MAX_BYTES - 4,
            "{} bytes",
            reason.len()
        );
        assert!(reason.ends_with(" (after 10 attempts)"));
        assert!(!reason.contains('\n'));
    }

    proptest! {
        #[test]
        fn every_failure_ends_in_a_short_text(
            which in 0..5,
            text in "[\\s\\S]{0,600}",
            code: u16,
            before: u32,
            max_attempts: u32,
            seed: u64,
        ) {
            let outcome = match which {
                0 => Outcome::Nacked,
                1 => Outcome::Returned { code, reason: text },
                2 => Outcome::Refused { reason: text },
                3 => Outcome::Failed { reason: text },
                _ => Outcome::Lost { reason: text },
            };
            match decide(&outcome, before, &RetryPolicy { max_attempts, ..POLICY }, seed) {
                Disposition::Publish | Disposition::Expire | Disposition::Wait => prop_assert!(false, "{:?} is no failure", outcome),
                Disposition::Retry { error: text, .. } => {
                    prop_assert!(before < max_attempts);
                    prop_assert!(text.len() <= TEXT_MAX_BYTES);
                }
                Disposition::Dead { reason: text } | Disposition::Release { reason: text } => {
                    prop_assert!(text.len() <= TEXT_MAX_BYTES);
                }
            }
        }
    }
}
