//! Messages that may make their destination fail: each time one of them is sent the connection ends, the receiver
//! answers 503 or asks for a pause, or a queue refuses it. Called by the engine when messages end, on the worker's main
//! thread.
//!
//! A failure of the destination costs no message an attempt, so such a message would be sent for ever, and take its
//! neighbours along. A message is at fault if it fails alone while others arrive. So a suspect goes alone, and lets
//! others go first. If it fails again although more of them have arrived than failed since, that is an attempt. While
//! the destination fails for all, nobody is charged. `yielding` keeps suspects back while none arrives.
//!
//! In memory only: another worker finds out again.

use crate::message::{Outcome, Pointer};
use crate::partition::Partition;
use crate::settle::{self, Disposition, FailureKind, MessageFailure, RetryPolicy};
use std::mem::{Discriminant, discriminant};

/// A message goes alone after this number of failures of the connection while it was on its way. After the first one
/// its neighbours are more likely to be innocent: most failures are restarts.
const FAILURES_ALONE: u32 = 2;
/// The most suspects. Beyond that the destination is at fault, and they are forgotten.
const SUSPECTS_MAX: usize = 10_000;

#[derive(Default)]
struct Suspect {
    /// Failures of the connection in a row while it was on its way with others.
    among_others: u32,
    /// Failures alone in a row that were not charged, all of one kind.
    alone: u32,
    /// The kind of these failures.
    kind: Option<Discriminant<Outcome>>,
    /// Whether the failure took others along, so that it must go alone.
    is_contagious: bool,
    /// The counts of others when it last failed alone.
    arrived_before: u64,
    failed_before: u64,
    /// Its last failure alone.
    failure: Option<MessageFailure>,
}

#[derive(Default)]
pub(super) struct Suspects {
    known: foldhash::HashMap<(Partition, i64), Suspect>,
    /// Messages that arrived.
    arrived: u64,
    /// Failures alone, of any message.
    failed: u64,
    /// Whether a message has failed alone since the last one arrived. The destination may fail for all.
    in_doubt: bool,
}

impl Suspects {
    /// Whether no other message may be on its way with it.
    pub fn goes_alone(&self, pointer: &Pointer) -> bool {
        let suspect = self.known.get(&pointer.which());
        suspect.is_some_and(|suspect| suspect.is_contagious)
    }

    pub fn in_doubt(&self) -> bool {
        self.in_doubt
    }

    /// When the message last failed alone, as a number that grows with each such failure; None if it did not.
    pub fn failed_at(&self, pointer: &Pointer) -> Option<u64> {
        let suspect = self.known.get(&pointer.which());
        suspect
            .filter(|suspect| suspect.alone > 0)
            .map(|suspect| suspect.failed_before)
    }

    /// The last failure of the message alone.
    pub fn failure(&self, pointer: &Pointer) -> MessageFailure {
        let suspect = self.known.get(&pointer.which());
        let failure = suspect.and_then(|suspect| suspect.failure.clone());
        failure.unwrap_or_else(|| MessageFailure::new(FailureKind::Failed, "others go first"))
    }

    /// Forgets the messages of partitions that the worker no longer has.
    pub fn retain(&mut self, keep: impl Fn(Partition) -> bool) {
        self.known.retain(|(partition, _), _| keep(*partition));
    }

    /// Decides the disposition of a message, as `settle::decide` does, with what is known of it and of others.
    pub fn decide(&mut self, outcome: &Outcome, pointer: &Pointer, policy: &RetryPolicy, seed: u64) -> Disposition {
        let id = pointer.which();
        let attempts = pointer.attempts.max(0) as u32;
        let decide = |outcome: &Outcome| settle::decide(outcome, attempts, policy, seed);
        let (failure, is_contagious) = match outcome {
            Outcome::Unanswered { alone: false, .. } => {
                self.make_room();
                let suspect = self.known.entry(id).or_default();
                suspect.among_others += 1;
                suspect.is_contagious |= suspect.among_others >= FAILURES_ALONE;
                return decide(outcome);
            }
            Outcome::Unanswered { reason, alone: true } | Outcome::Postponed { reason, .. } => {
                (MessageFailure::new(FailureKind::Failed, reason), true)
            }
            Outcome::Nacked => (MessageFailure::nacked(), false),
            Outcome::Lost { .. } | Outcome::Blocked => return decide(outcome),
            _ => {
                if *outcome == Outcome::Confirmed {
                    self.arrived += 1;
                    self.in_doubt = false;
                }
                self.known.remove(&id);
                return decide(outcome);
            }
        };
        self.make_room();
        let suspect = self.known.entry(id).or_default();
        if suspect.kind.replace(discriminant(outcome)) != Some(discriminant(outcome)) {
            suspect.alone = 0;
        }
        let (after_ms, may_be_guilty) = match outcome {
            Outcome::Postponed { after_ms, is_limit, .. } => (*after_ms, !is_limit),
            _ => (0, true),
        };
        let arrived = self.arrived - suspect.arrived_before;
        let failed = self.failed - suspect.failed_before;
        let is_guilty = may_be_guilty && suspect.alone > 0 && arrived > failed;
        suspect.alone = if is_guilty { 1 } else { suspect.alone + 1 };
        suspect.is_contagious |= is_contagious;
        suspect.failure = Some(failure.clone());
        self.failed += 1;
        self.in_doubt = true;
        (suspect.arrived_before, suspect.failed_before) = (self.arrived, self.failed);
        let disposition = match (outcome, suspect.alone) {
            _ if is_guilty => settle::charge(failure, attempts, policy, seed),
            // A connection that ends once is not suspicious.
            (Outcome::Unanswered { .. }, 1) => decide(outcome),
            (_, times) => settle::defer(failure, times, policy, seed),
        };
        disposition.not_before(after_ms)
    }

    fn make_room(&mut self) {
        if self.known.len() >= SUSPECTS_MAX {
            self.known.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const POLICY: RetryPolicy = RetryPolicy {
        max_attempts: 3,
        base_ms: 100,
        max_ms: 60_000,
        discards_unroutable: false,
    };

    fn message(seq: i64, attempts: i32) -> Pointer {
        Pointer {
            seq,
            destination: "default".into(),
            partition: Partition::new(0).unwrap(),
            key: None,
            attempts,
            crashes: 0,
            lease_epoch: 1,
            replayed: false,
            enqueued_at_us: 0,
            expires_at_us: None,
        }
    }

    fn alone() -> Outcome {
        Outcome::Unanswered {
            reason: "HTTP 503".into(),
            alone: true,
        }
    }

    /// What becomes of the message.
    fn fate(suspects: &mut Suspects, seq: i64, attempts: i32, outcome: &Outcome) -> &'static str {
        match suspects.decide(outcome, &message(seq, attempts), &POLICY, 1) {
            Disposition::Publish => "published",
            Disposition::Retry { .. } => "charged",
            Disposition::Defer { .. } => "put off",
            Disposition::Dead { .. } => "dead",
            Disposition::Release { .. } => "released",
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_message_that_fails_alone_while_others_arrive_is_charged_and_ends() {
        for (outcome, first) in [(alone(), "released"), (Outcome::Nacked, "put off")] {
            let mut suspects = Suspects::default();
            assert_eq!(fate(&mut suspects, 1, 0, &outcome), first);
            assert_eq!(fate(&mut suspects, 1, 0, &outcome), "put off");
            for (attempts, expected) in [(0, "charged"), (1, "charged"), (2, "dead")] {
                assert_eq!(fate(&mut suspects, 9, 0, &Outcome::Confirmed), "published");
                assert_eq!(fate(&mut suspects, 1, attempts, &outcome), expected);
            }
        }
    }

    #[test]
    fn a_message_that_the_destination_asks_to_send_later_is_charged_only_if_it_may_be_at_fault() {
        for (is_limit, later) in [(true, "put off"), (false, "charged")] {
            let outcome = Outcome::Postponed {
                reason: "HTTP 503".into(),
                after_ms: 90_000,
                is_limit,
            };
            let mut suspects = Suspects::default();
            assert_eq!(fate(&mut suspects, 1, 0, &outcome), "put off");
            for _ in 0..5 {
                assert_eq!(fate(&mut suspects, 9, 0, &Outcome::Confirmed), "published");
                assert_eq!(fate(&mut suspects, 1, 0, &outcome), later);
                match suspects.decide(&outcome, &message(1, 0), &POLICY, 1) {
                    Disposition::Retry { delay_ms, .. } | Disposition::Defer { delay_ms, .. } => {
                        assert!(delay_ms >= 90_000);
                    }
                    other => panic!("{other:?}"),
                }
            }
        }
    }

    #[test]
    fn a_failure_of_another_kind_is_a_first_one() {
        let mut suspects = Suspects::default();
        assert_eq!(fate(&mut suspects, 1, 0, &Outcome::Nacked), "put off");
        assert_eq!(fate(&mut suspects, 9, 0, &Outcome::Confirmed), "published");
        assert_eq!(fate(&mut suspects, 1, 0, &alone()), "released");
        assert_eq!(fate(&mut suspects, 9, 0, &Outcome::Confirmed), "published");
        assert_eq!(fate(&mut suspects, 1, 0, &Outcome::Nacked), "put off");
    }

    #[test]
    fn while_all_fail_none_is_charged_however_often_it_is_tried() {
        let mut suspects = Suspects::default();
        for round in 0..100 {
            for seq in 1..=3 {
                let expected = if round == 0 { "released" } else { "put off" };
                assert_eq!(fate(&mut suspects, seq, 0, &alone()), expected, "{round}");
            }
        }
        // One that arrives between many failures proves nothing.
        assert_eq!(fate(&mut suspects, 4, 0, &Outcome::Confirmed), "published");
        assert_eq!(fate(&mut suspects, 1, 0, &alone()), "put off");
    }

    #[test]
    fn two_messages_that_fail_are_both_found_among_others_that_arrive() {
        let mut suspects = Suspects::default();
        let mut charged = [0, 0];
        for _ in 0..10 {
            for seq in [1, 2] {
                charged[seq - 1] += u32::from(fate(&mut suspects, seq as i64, 0, &alone()) == "charged");
            }
            (10..13).for_each(|seq| _ = fate(&mut suspects, seq, 0, &Outcome::Confirmed));
        }
        assert_eq!(charged, [9, 9]);
    }

    #[test]
    fn a_message_goes_alone_after_two_failures_among_others_or_one_alone_until_it_is_answered() {
        let mut suspects = Suspects::default();
        let among = Outcome::Unanswered {
            reason: "reset".into(),
            alone: false,
        };
        for expected in [false, true] {
            assert_eq!(fate(&mut suspects, 1, 0, &among), "released");
            assert_eq!(suspects.goes_alone(&message(1, 0)), expected);
        }
        fate(&mut suspects, 2, 0, &alone());
        assert!(suspects.goes_alone(&message(2, 0)));
        fate(&mut suspects, 3, 0, &Outcome::Nacked); // harms no other
        assert!(!suspects.goes_alone(&message(3, 0)));
        (1..=2).for_each(|seq| _ = fate(&mut suspects, seq, 0, &Outcome::Confirmed));
        assert!((1..=2).all(|seq| !suspects.goes_alone(&message(seq, 0))));
    }

    #[test]
    fn the_delay_of_a_message_that_is_put_off_grows_up_to_ten_seconds() {
        let mut suspects = Suspects::default();
        let mut delays = Vec::new();
        for _ in 0..12 {
            match suspects.decide(&Outcome::Nacked, &message(1, 0), &POLICY, 1) {
                Disposition::Defer { delay_ms, failure } if failure == MessageFailure::nacked() => {
                    delays.push(delay_ms)
                }
                other => panic!("{other:?}"),
            }
        }
        assert!(
            (100..=125).contains(&delays[0]) && (200..=250).contains(&delays[1]),
            "{delays:?}"
        );
        assert!((10_000..=12_500).contains(&delays[11]), "{delays:?}");
    }
}
