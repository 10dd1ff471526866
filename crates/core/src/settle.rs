//! Decides the disposition of a message from the outcome that the broker or the receiver gave. The worker's main thread
//! calls it once per outcome, and then writes the dispositions of a batch in one transaction.
//!
//! A failure of the message itself costs it an attempt, and finally makes it a dead letter. A failure of the
//! destination or of the connection costs no attempt: the message is released, and sent again when the destination is
//! back. `engine::suspects` recognises a message that makes its destination fail.

use crate::backoff;
use crate::message::Outcome;

/// The longest error or reason, in bytes. Errors and reasons are stored in rows and shown in views, so they are cut.
pub const TEXT_MAX_BYTES: usize = 500;

/// The longest delay of a message that is put off without an attempt, in ms. A destination that is back gets it after
/// this time at the latest.
const DEFER_MAX_MS: u64 = 10_000;

/// The reason of a dead letter that was not sent in time. outbox_internal.dead_letter has the same text.
pub const EXPIRED: &str = "expired: it was not sent in time";

/// Retry settings of a destination.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RetryPolicy {
    /// The most attempts, including the first; 0 and 1 both mean no retry.
    pub max_attempts: u32,
    /// The delay after the first failure, in ms.
    pub base_ms: u64,
    /// The longest delay, in ms, without the jitter that is added to it.
    pub max_ms: u64,
    /// Whether a message that no queue takes is discarded, because nobody has to listen.
    pub discards_unroutable: bool,
}

/// The settings of a destination that decide the disposition of a message.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Rules {
    pub retry: RetryPolicy,
    /// Whether messages wait behind a dead letter of their key or partition.
    pub dead_blocks: bool,
    pub ordering: Ordering,
    /// Whether the messages of a key or partition are sent one by one, each after the answer to the one before it.
    pub one_by_one: bool,
}

impl Rules {
    /// What a dead letter of this destination blocks.
    pub fn dead_blocks(&self) -> Blocks {
        match self.ordering {
            Ordering::Key if self.dead_blocks => Blocks::Key,
            Ordering::Partition if self.dead_blocks => Blocks::Partition,
            _ => Blocks::Nothing,
        }
    }
}

/// What a dead letter blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Blocks {
    Nothing,
    Key,
    Partition,
}

/// The order in which a destination gets its messages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Ordering {
    /// Messages of a key arrive in the order of their seq.
    #[default]
    Key,
    /// All messages of a partition arrive in the order of their seq, also those without a key.
    Partition,
    /// No order: a failed message does not delay any other.
    None,
}

crate::words! {
    /// The kind of a failure of a message. The words are those of the column error_code and of outbox_errors.
    pub enum FailureKind {
        /// A queue refused the message.
        Nacked = "nacked",
        /// No queue takes the message.
        Unroutable = "unroutable",
        /// The destination will never take the message in this form.
        Refused = "refused",
        /// There is nothing to send, or the message was not sent.
        Unsendable = "unsendable",
        /// The message was not sent in time.
        Expired = "expired",
        /// The destination failed on the message, or its event could not be read.
        Failed = "failed",
    }
}

/// A failure of a message, for programs and for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MessageFailure {
    pub kind: FailureKind,
    /// At most [`TEXT_MAX_BYTES`] long, on one line.
    pub text: String,
}

impl MessageFailure {
    /// A failure whose text is cut if necessary.
    pub fn new(kind: FailureKind, text: &str) -> Self {
        let text = one_line(text);
        Self { kind, text }
    }

    /// The failure of a message that a queue refused.
    pub fn nacked() -> Self {
        Self::new(FailureKind::Nacked, "nacked by the broker")
    }

    fn unroutable(reason: &str) -> Self {
        Self::new(FailureKind::Unroutable, &format!("unroutable: {reason}"))
    }
}

/// What becomes of a message. Its text is at most [`TEXT_MAX_BYTES`] long, on one line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Disposition {
    /// The message is published, and goes to the history.
    Publish,
    /// The message goes to `outbox_waiting`, due after `delay_ms`. It costs an attempt.
    Retry { delay_ms: u64, failure: MessageFailure },
    /// The message goes to `outbox_waiting`, due after `delay_ms`, so that others are tried before it. It costs no
    /// attempt: the destination may be at fault.
    Defer { delay_ms: u64, failure: MessageFailure },
    /// The message becomes a dead letter. It costs an attempt.
    Dead { failure: MessageFailure },
    /// The message goes to the history as discarded: it was sent, and nobody listens. It blocks nothing.
    Discard { failure: MessageFailure },
    /// The message becomes a dead letter because its time is over. It costs no attempt and does not block its key.
    Expire,
    /// The message goes back to pending as it was. It costs no attempt.
    Release { reason: String },
    /// The message goes to `outbox_waiting`, behind an earlier message of its key that failed. It costs no attempt.
    Wait,
}

impl Disposition {
    /// The same, but a message that is sent again is not due before `after_ms`.
    pub fn not_before(mut self, after_ms: u64) -> Self {
        if let Self::Retry { delay_ms, .. } | Self::Defer { delay_ms, .. } = &mut self {
            *delay_ms = after_ms.max(*delay_ms);
        }
        self
    }
}

/// What outbox_internal.settle() does with the row of a message. It takes the letter of the action.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    Publish,
    /// Make it a dead letter without counting an attempt.
    Expire,
    /// Move it to `outbox_waiting`, behind an earlier message of its key.
    Wait,
    /// Undo the claim.
    Free,
    /// Move it to `outbox_waiting`, due after a delay.
    Retry,
    Dead(Blocks),
    /// Move it to the history, as discarded.
    Discard,
}

impl Action {
    /// The letter of the action in SQL.
    pub const fn letter(self) -> &'static str {
        match self {
            Self::Publish => "p",
            Self::Expire => "x",
            Self::Wait => "w",
            Self::Free => "f",
            Self::Retry => "r",
            Self::Dead(Blocks::Nothing) | Self::Discard => "d",
            Self::Dead(Blocks::Key) => "D",
            Self::Dead(Blocks::Partition) => "B",
        }
    }
}

/// The settle of one message, as outbox_internal.settle() takes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ending<'a> {
    pub action: Action,
    /// The delay of a retry, in ms. It is negative if the attempt is not counted: an earlier version of the SQL then counts
    /// it, and loses nothing. Negative for a discarded message, too: an earlier version makes it a dead letter. None for other actions.
    pub delay_ms: Option<i64>,
    /// Why the message was not published; None if it was, or if it waits for another one.
    pub reason: Option<&'a str>,
    /// The kind of the failure; None if the message did not fail.
    pub kind: Option<FailureKind>,
}

impl<'a> Ending<'a> {
    /// The ending for a disposition. `dead_blocks`: what a dead letter of the destination blocks.
    pub fn of(disposition: &'a Disposition, dead_blocks: Blocks) -> Self {
        let (action, delay_ms) = match disposition {
            Disposition::Publish => (Action::Publish, None),
            Disposition::Retry { delay_ms, .. } => (Action::Retry, Some(*delay_ms as i64)),
            Disposition::Defer { delay_ms, .. } => (Action::Retry, Some(-(*delay_ms as i64))),
            Disposition::Dead { .. } => (Action::Dead(dead_blocks), None),
            Disposition::Discard { .. } => (Action::Discard, Some(-1)),
            Disposition::Expire => (Action::Expire, None),
            Disposition::Release { .. } => (Action::Free, None),
            Disposition::Wait => (Action::Wait, None),
        };
        let (reason, kind) = match disposition {
            Disposition::Retry { failure, .. }
            | Disposition::Defer { failure, .. }
            | Disposition::Dead { failure }
            | Disposition::Discard { failure } => (Some(failure.text.as_str()), Some(failure.kind)),
            Disposition::Expire => (Some(EXPIRED), Some(FailureKind::Expired)),
            Disposition::Release { reason } => (Some(reason.as_str()), None),
            Disposition::Publish | Disposition::Wait => (None, None),
        };
        Self {
            action,
            delay_ms,
            reason,
            kind,
        }
    }
}

/// The number of messages that were settled, by disposition.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ended {
    pub published: u64,
    /// Messages that failed and are tried again.
    pub retried: u64,
    /// Messages that failed and became dead letters.
    pub dead: u64,
    /// Messages that became dead letters without an attempt.
    pub expired: u64,
    /// Messages that were sent and had no listener.
    pub discarded: u64,
    /// Messages that went back without an attempt.
    pub released: u64,
}

impl Ended {
    /// From the counts that SQL has for messages that ended in the same way. `failed` are failed attempts; `gone` are
    /// messages that left the outbox.
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
            discarded: 0,
            released: 0,
        }
    }

    /// The counts of these dispositions.
    pub fn of_all<'a>(dispositions: impl IntoIterator<Item = &'a Disposition>) -> Self {
        let mut ended = Self::default();
        dispositions.into_iter().for_each(|disposition| ended.note(disposition));
        ended
    }

    /// Counts one disposition.
    pub fn note(&mut self, disposition: &Disposition) {
        match disposition {
            Disposition::Publish => self.published += 1,
            Disposition::Retry { .. } => self.retried += 1,
            Disposition::Dead { .. } => self.dead += 1,
            Disposition::Expire => self.expired += 1,
            Disposition::Discard { .. } => self.discarded += 1,
            Disposition::Release { .. } | Disposition::Defer { .. } => self.released += 1,
            Disposition::Wait => {}
        }
    }

    /// Adds other counts to these.
    pub fn add(&mut self, more: Self) {
        self.published += more.published;
        self.retried += more.retried;
        self.dead += more.dead;
        self.expired += more.expired;
        self.discarded += more.discarded;
        self.released += more.released;
    }

    /// Number of attempts that failed.
    pub fn failed(&self) -> u64 {
        self.retried + self.dead
    }

    /// Number of new dead letters.
    pub fn all_dead(&self) -> u64 {
        self.dead + self.expired
    }

    /// Number of messages that left the outbox.
    pub fn gone(&self) -> u64 {
        self.published + self.all_dead() + self.discarded
    }
}

/// Decides the disposition of one message. `attempts_before` is the number of attempts counted before this one; `seed`
/// feeds the jitter of the delay.
pub fn decide(outcome: &Outcome, attempts_before: u32, policy: &RetryPolicy, seed: u64) -> Disposition {
    match outcome {
        Outcome::Confirmed => Disposition::Publish,
        Outcome::Nacked => charge(MessageFailure::nacked(), attempts_before, policy, seed),
        Outcome::Failed { reason } => {
            let failure = MessageFailure::new(FailureKind::Failed, reason);
            charge(failure, attempts_before, policy, seed)
        }
        Outcome::Returned { reason, .. } if policy.discards_unroutable => Disposition::Discard {
            failure: MessageFailure::unroutable(reason),
        },
        Outcome::Returned { reason, .. } => charge(MessageFailure::unroutable(reason), attempts_before, policy, seed),
        Outcome::Refused { reason } => Disposition::Dead {
            failure: MessageFailure::new(FailureKind::Refused, &format!("refused: {reason}")),
        },
        Outcome::Unsendable { reason } => Disposition::Dead {
            failure: MessageFailure::new(FailureKind::Unsendable, reason),
        },
        Outcome::Expired => Disposition::Expire,
        Outcome::Unanswered { reason, .. } | Outcome::Lost { reason } => Disposition::Release {
            reason: one_line(reason),
        },
        Outcome::Postponed { reason, after_ms, .. } => {
            let failure = MessageFailure::new(FailureKind::Failed, reason);
            defer(failure, 1, policy, seed).not_before(*after_ms)
        }
        Outcome::Blocked => Disposition::Release {
            reason: "the broker blocks publishers".to_owned(),
        },
    }
}

/// Puts a message off without an attempt, for the `times`th time in a row.
pub fn defer(failure: MessageFailure, times: u32, policy: &RetryPolicy, seed: u64) -> Disposition {
    Disposition::Defer {
        delay_ms: backoff::delay_ms(times, policy.base_ms, policy.max_ms.min(DEFER_MAX_MS), seed),
        failure,
    }
}

/// Puts a message off that was not tried, so that others go first. The delay is long enough to claim those.
pub fn let_others_go_first(failure: MessageFailure, seed: u64) -> Disposition {
    Disposition::Defer {
        delay_ms: backoff::delay_ms(1, DEFER_MAX_MS, DEFER_MAX_MS, seed),
        failure,
    }
}

/// Counts an attempt that failed: Retry while attempts are left, otherwise Dead.
pub fn charge(failure: MessageFailure, attempts_before: u32, policy: &RetryPolicy, seed: u64) -> Disposition {
    let attempts_done = attempts_before.saturating_add(1);
    if attempts_done < policy.max_attempts {
        let delay_ms = backoff::delay_ms(attempts_done, policy.base_ms, policy.max_ms, seed);
        return Disposition::Retry { delay_ms, failure };
    }
    Disposition::Dead { failure }
}

/// Cuts `text` to one line of at most [`TEXT_MAX_BYTES`]. The text of a broker may contain line breaks, which could
/// forge lines in a log.
fn one_line(text: &str) -> String {
    text[..text.floor_char_boundary(TEXT_MAX_BYTES)]
        .chars()
        .map(|c| if c.is_ascii_control() { ' ' } else { c }) // the length in bytes stays the same
        .collect()
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
        discards_unroutable: false,
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
            "after any number of attempts"
        );
    }

    #[test]
    fn a_nack_is_retried_after_a_growing_delay() {
        for (attempts_before, set_ms) in [(0, 100), (1, 200)] {
            let Disposition::Retry { delay_ms, failure } = decide(&Outcome::Nacked, attempts_before, &POLICY, 1) else {
                panic!("not a retry");
            };
            assert!((set_ms..=set_ms + set_ms / 4).contains(&delay_ms));
            assert_eq!(failure.text, "nacked by the broker");
        }
    }

    #[test]
    fn an_unroutable_message_is_discarded_where_nobody_has_to_listen() {
        let returned = Outcome::Returned {
            code: 312,
            reason: "NO_ROUTE".into(),
        };
        let policy = RetryPolicy {
            discards_unroutable: true,
            ..POLICY
        };
        let discarded = Disposition::Discard {
            failure: MessageFailure::new(FailureKind::Unroutable, "unroutable: NO_ROUTE"),
        };
        assert_eq!(decide(&returned, 0, &policy, 1), discarded);
        let ending = Ending::of(&discarded, Blocks::Key);
        assert_eq!((ending.action.letter(), ending.delay_ms), ("d", Some(-1)));
        assert_eq!(ending.kind, Some(FailureKind::Unroutable));
        assert!(matches!(
            decide(&Outcome::Nacked, 0, &policy, 1),
            Disposition::Retry { .. }
        ));
    }

    #[test]
    fn an_unroutable_message_out_of_attempts_is_dead_with_the_reason() {
        let failure = MessageFailure::new(FailureKind::Unroutable, "unroutable: NO_ROUTE");
        match decide(&no_route(), 1, &POLICY, 1) {
            Disposition::Retry { failure: retried, .. } => assert_eq!(retried, failure),
            other => panic!("{other:?}"),
        }
        let dead = Disposition::Dead { failure };
        assert_eq!(decide(&no_route(), 2, &POLICY, 1), dead);
    }

    #[test]
    fn a_failed_message_is_retried_with_the_error_of_the_destination_and_then_dead() {
        let outcome = Outcome::Failed {
            reason: "HTTP 500 Internal Server Error".into(),
        };
        let failure = MessageFailure::new(FailureKind::Failed, "HTTP 500 Internal Server Error");
        match decide(&outcome, 0, &POLICY, 1) {
            Disposition::Retry { failure: retried, .. } => assert_eq!(retried, failure),
            other => panic!("{other:?}"),
        }
        let dead = Disposition::Dead { failure };
        assert_eq!(decide(&outcome, 2, &POLICY, 1), dead);
    }

    #[test]
    fn without_retries_the_first_failure_is_the_last() {
        for max_attempts in [0, 1] {
            let policy = RetryPolicy { max_attempts, ..POLICY };
            let dead = Disposition::Dead {
                failure: MessageFailure::nacked(),
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
                failure: MessageFailure::new(FailureKind::Refused, "refused: body of 20 MB")
            }
        );
    }

    #[test]
    fn the_kind_is_that_of_the_outcome_retried_or_dead() {
        let reason = || "nacked by the broker".to_owned(); // the words of another kind
        for (outcome, kind) in [
            (Outcome::Nacked, FailureKind::Nacked),
            (no_route(), FailureKind::Unroutable),
            (Outcome::Failed { reason: reason() }, FailureKind::Failed),
            (Outcome::Refused { reason: reason() }, FailureKind::Refused),
            (Outcome::Unsendable { reason: reason() }, FailureKind::Unsendable),
            (Outcome::Expired, FailureKind::Expired),
        ] {
            for attempts_before in [0, 2] {
                let disposition = decide(&outcome, attempts_before, &POLICY, 1);
                assert_eq!(
                    Ending::of(&disposition, Blocks::Nothing).kind,
                    Some(kind),
                    "{outcome:?}"
                );
            }
        }
        let lost = Outcome::Lost { reason: reason() };
        for outcome in [Outcome::Confirmed, Outcome::Blocked, lost] {
            let disposition = decide(&outcome, 0, &POLICY, 1);
            assert_eq!(Ending::of(&disposition, Blocks::Nothing).kind, None, "{outcome:?}");
        }
    }

    #[test]
    fn a_failed_connection_costs_no_attempt() {
        let lost = Outcome::Lost {
            reason: "reset by peer".into(),
        };
        let unanswered = Outcome::Unanswered {
            reason: "no confirm in time".into(),
            alone: true,
        };
        for outcome in [unanswered, lost, Outcome::Blocked] {
            assert!(
                matches!(decide(&outcome, 99, &POLICY, 1), Disposition::Release { .. }),
                "{outcome:?}"
            );
        }
    }

    #[test]
    fn a_message_that_is_postponed_is_due_after_the_pause_that_the_destination_asks_for() {
        for (after_ms, due_ms) in [(0, 100..=125), (90_000, 90_000..=90_000)] {
            let postponed = Outcome::Postponed {
                reason: "HTTP 429".into(),
                after_ms,
                is_limit: true,
            };
            match decide(&postponed, 99, &POLICY, 1) {
                Disposition::Defer { delay_ms, .. } => assert!(due_ms.contains(&delay_ms), "{delay_ms}"),
                other => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn every_action_has_a_different_letter() {
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
    fn a_dead_letter_blocks_its_key_or_its_partition() {
        let rules = |ordering, dead_blocks| Rules {
            one_by_one: false,
            retry: POLICY,
            dead_blocks,
            ordering,
        };
        for (ordering, blocks) in [
            (Ordering::Key, Blocks::Key),
            (Ordering::Partition, Blocks::Partition),
            (Ordering::None, Blocks::Nothing),
        ] {
            assert_eq!(rules(ordering, true).dead_blocks(), blocks);
            assert_eq!(rules(ordering, false).dead_blocks(), Blocks::Nothing);
            let failure = MessageFailure::new(FailureKind::Failed, "why");
            let dead = Disposition::Dead { failure };
            let ending = Ending {
                action: Action::Dead(blocks),
                delay_ms: None,
                reason: Some("why"),
                kind: Some(FailureKind::Failed),
            };
            assert_eq!(Ending::of(&dead, blocks), ending);
        }
    }

    #[test]
    fn a_message_that_is_put_off_is_retried_and_not_charged() {
        let deferred = defer(MessageFailure::nacked(), 2, &POLICY, 1);
        let ending = Ending::of(&deferred, Blocks::Key);
        assert_eq!((ending.action, ending.kind), (Action::Retry, Some(FailureKind::Nacked)));
        assert!((-250..=-200).contains(&ending.delay_ms.unwrap()), "{ending:?}");
        let mut ended = Ended::default();
        ended.note(&deferred);
        assert_eq!((ended.failed(), ended.released), (0, 1));
    }

    #[test]
    fn every_disposition_is_counted_once() {
        let failure = MessageFailure::nacked();
        let mut ended = Ended::default();
        for disposition in [
            Disposition::Publish,
            Disposition::Retry {
                delay_ms: 1,
                failure: failure.clone(),
            },
            Disposition::Dead {
                failure: failure.clone(),
            },
            Disposition::Expire,
            Disposition::Discard { failure },
            Disposition::Release { reason: String::new() },
            Disposition::Wait,
        ] {
            ended.note(&disposition);
        }
        let one_each = Ended {
            published: 1,
            retried: 1,
            dead: 1,
            expired: 1,
            discarded: 1,
            released: 1,
        };
        assert_eq!(ended, one_each);
        assert_eq!((ended.failed(), ended.all_dead(), ended.gone()), (2, 2, 4));
        let mut from_sql = Ended::of(1, 0, 1);
        for more in [Ended::of(0, 1, 0), Ended::of(0, 1, 1), Ended::of(0, 0, 1)] {
            from_sql.add(more);
        }
        let none_released = Ended {
            discarded: 0,
            released: 0,
            ..one_each
        };
        assert_eq!(from_sql, none_released);
        assert_eq!(Ended::of(-1, -1, -1), Ended::default());
    }

    #[test]
    fn a_long_reason_is_cut_to_one_line() {
        let outcome = Outcome::Returned {
            code: 312,
            reason: "é\n".repeat(1_000),
        };
        let Disposition::Dead { failure } = decide(&outcome, 9, &POLICY, 1) else {
            panic!("not dead")
        };
        let bytes = failure.text.len();
        assert!((TEXT_MAX_BYTES - 3..=TEXT_MAX_BYTES).contains(&bytes), "{bytes} bytes");
        assert!(!failure.text.contains('\n'));
    }

    proptest! {
        #[test]
        fn every_failure_ends_in_a_short_text(
            which in 0..6,
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
                4 => Outcome::Unanswered { reason: text, alone: true },
                _ => Outcome::Lost { reason: text },
            };
            match decide(&outcome, before, &RetryPolicy { max_attempts, ..POLICY }, seed) {
                Disposition::Publish
                | Disposition::Expire
                | Disposition::Wait
                | Disposition::Defer { .. }
                | Disposition::Discard { .. } => {
                    prop_assert!(false, "{:?} is no failure", outcome);
                }
                Disposition::Retry { failure, .. } => {
                    prop_assert!(before < max_attempts);
                    prop_assert!(failure.text.len() <= TEXT_MAX_BYTES);
                }
                Disposition::Dead { failure: MessageFailure { text, .. } } | Disposition::Release { reason: text } => {
                    prop_assert!(text.len() <= TEXT_MAX_BYTES);
                }
            }
        }
    }
}
