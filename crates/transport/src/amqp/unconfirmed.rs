//! Decides when a broker has left messages unconfirmed for too long, and what to do then. Pure: the time is an
//! argument. Called by `session` on the publisher thread. The state outlives channels and connections.
//!
//! A queue that is deleted and declared again, or that has lost its quorum, can leave messages without a confirm
//! forever on a healthy connection. So the session sends the broker another request, a probe. If the broker answers it,
//! it has received the messages and still does not confirm them. The session then stops publishing for a moment, so
//! that confirms on their way can arrive, and gives up the channel. The worker sends the open messages again, in order.
//!
//! A quorum queue that is deleted with messages on their way can do worse. The broker waits for it and reads no more
//! from this connection (credit flow that is never granted, seen with RabbitMQ 3.10). So the session also requests an
//! answer over another connection. If only that one answers, the whole connection is given up instead of the channel.
//!
//! The trap is a queue that is only slow: each repeat is a duplicate and adds to its load. So the patience doubles with
//! each repeat, up to the confirm timeout. It returns to its first length only after a time without a repeat.

use std::time::Duration;
use tokio::time::Instant;

/// How often the state is reported again.
const LOG_EVERY: Duration = Duration::from_secs(2);
/// The share of the first patience that confirms on their way get after the broker has answered. It starts again with
/// each confirm: a broker that still confirms is slow, and a repeat would add to its load.
const GRACE_PART: u32 = 2;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// The probe was sent, and the broker has not answered it.
    Probing,
    /// The broker has answered the probe. Nothing more is published until this time.
    Answered { until: Instant },
    /// The unconfirmed messages are sent again, and none has been confirmed since.
    Resent,
}

/// The state while messages are unconfirmed for too long.
#[derive(Debug)]
pub(crate) struct Stall {
    /// When the oldest of them was first published.
    pub(crate) since: Instant,
    /// Since when there has been no answer, here or over another connection.
    silent_since: Instant,
    /// Whether the broker answers only over another connection.
    is_stuck: bool,
    pub(crate) phase: Phase,
    logged_at: Option<Instant>,
}

impl Stall {
    /// Whether a report is due. If it is, the time of the report is recorded.
    pub(crate) fn is_log_due(&mut self, now: Instant) -> bool {
        let is_due = self.logged_at.is_none_or(|logged_at| now >= logged_at + LOG_EVERY);
        if is_due {
            self.logged_at = Some(now);
        }
        is_due
    }
}

pub(crate) struct Patience {
    first: Duration,
    max: Duration,
    /// The time that a message may be unconfirmed now.
    limit: Duration,
    resent_at: Option<Instant>,
    /// Whether a message was answered since the last check.
    has_answers: bool,
    pub(crate) stall: Option<Stall>,
}

impl Patience {
    pub(crate) fn new(first: Duration, max: Duration) -> Self {
        Self {
            first,
            max: max.max(first),
            limit: first,
            resent_at: None,
            has_answers: false,
            stall: None,
        }
    }

    /// Records that a message was answered.
    pub(crate) fn message_answered(&mut self) {
        self.has_answers = true;
    }

    /// Checks whether the oldest unanswered message, published at `oldest`, has waited for too long.
    pub(crate) fn check(&mut self, now: Instant, oldest: Option<Instant>) -> Option<&mut Stall> {
        if self.resent_at.is_some_and(|at| now >= at + self.max * 2) {
            (self.resent_at, self.limit) = (None, self.first);
        }
        let is_late = oldest.is_some_and(|oldest| now >= oldest + self.limit);
        let (has_answers, answered) = (std::mem::take(&mut self.has_answers), self.grace_from(now));
        match &mut self.stall {
            None if is_late => {
                self.stall = Some(Stall {
                    since: oldest.unwrap_or(now),
                    silent_since: now,
                    is_stuck: false,
                    phase: Phase::Probing,
                    logged_at: None,
                })
            }
            None => {}
            Some(stall) => match stall.phase {
                Phase::Resent if has_answers || oldest.is_none() => self.stall = None,
                Phase::Resent if is_late => (stall.phase, stall.silent_since) = (Phase::Probing, now),
                Phase::Probing | Phase::Answered { .. } if !is_late => self.stall = None,
                Phase::Answered { .. } if has_answers => stall.phase = answered,
                _ => {}
            },
        }
        self.stall.as_mut()
    }

    /// When the next check is due if no message is answered before.
    pub(crate) fn next_check(&self, oldest: Instant) -> Instant {
        let Some(stall) = &self.stall else {
            return oldest + self.limit;
        };
        let report_at = stall.logged_at.map_or(stall.since, |logged_at| logged_at + LOG_EVERY);
        match stall.phase {
            Phase::Probing => report_at,
            Phase::Answered { until } => report_at.min(until),
            Phase::Resent => report_at.min(oldest + self.limit),
        }
    }

    /// The phase after an answer: confirms on their way get some time from now on.
    fn grace_from(&self, now: Instant) -> Phase {
        let until = now + self.first / GRACE_PART;
        Phase::Answered { until }
    }

    /// Records that the broker has answered the probe.
    pub(crate) fn answered(&mut self, now: Instant) {
        let answered = self.grace_from(now);
        if let Some(stall) = self.stall.as_mut()
            && (stall.phase == Phase::Probing || stall.is_stuck)
        {
            (stall.phase, stall.is_stuck) = (answered, false);
        }
    }

    /// Whether a probe over another connection is due, because this one gives no answer.
    pub(crate) fn wants_probe_elsewhere(&self, now: Instant) -> bool {
        let stall = self.stall.as_ref().filter(|stall| stall.phase == Phase::Probing);
        stall.is_some_and(|stall| now >= stall.silent_since + LOG_EVERY)
    }

    /// Records the result of the probe over another connection.
    pub(crate) fn answered_elsewhere(&mut self, now: Instant, has_answered: bool) {
        let answered = self.grace_from(now);
        if let Some(stall) = self.stall.as_mut().filter(|stall| stall.phase == Phase::Probing) {
            match has_answered {
                true => (stall.phase, stall.is_stuck) = (answered, true),
                false => stall.silent_since = now,
            }
        }
    }

    /// Whether the whole connection must be given up, and not only the channel.
    pub(crate) fn is_stuck(&self) -> bool {
        self.stall.as_ref().is_some_and(|stall| stall.is_stuck)
    }

    /// Whether no message may be published at the moment.
    pub(crate) fn pauses_publishing(&self) -> bool {
        matches!(
            &self.stall,
            Some(Stall {
                phase: Phase::Answered { .. },
                ..
            })
        )
    }

    /// Whether the open messages must be sent again.
    pub(crate) fn is_over(&self, now: Instant) -> bool {
        matches!(&self.stall, Some(Stall { phase: Phase::Answered { until }, .. }) if now >= *until)
    }

    /// Records that the open messages are sent again.
    pub(crate) fn resends(&mut self, now: Instant) {
        self.resent_at = Some(now);
        self.limit = (self.limit * 2).min(self.max);
        if let Some(stall) = &mut self.stall {
            stall.phase = Phase::Resent;
        }
    }

    /// Records that the connection is gone: unconfirmed messages are lost with it.
    pub(crate) fn disconnected(&mut self) {
        self.stall = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: Duration = Duration::from_secs(1);

    fn phase(patience: &mut Patience, now: Instant, oldest: Option<Instant>) -> Option<Phase> {
        patience.check(now, oldest).map(|stall| stall.phase)
    }

    #[test]
    fn messages_confirmed_in_time_cause_no_probe() {
        let (mut patience, start) = (Patience::new(5 * S, 30 * S), Instant::now());
        assert_eq!(patience.next_check(start), start + 5 * S);
        assert_eq!(phase(&mut patience, start + 4 * S, Some(start)), None);
        assert_eq!(phase(&mut patience, start + 60 * S, Some(start + 58 * S)), None);
        assert_eq!(phase(&mut patience, start + 60 * S, None), None);
    }

    #[test]
    fn only_messages_that_stay_unconfirmed_after_the_brokers_answer_are_sent_again() {
        let (mut patience, start) = (Patience::new(5 * S, 30 * S), Instant::now());
        let at = |s| start + s * S;
        assert_eq!(phase(&mut patience, at(5), Some(start)), Some(Phase::Probing));
        assert!(
            !patience.pauses_publishing() && !patience.is_over(at(20)),
            "no answer: it may be slow"
        );
        patience.answered(at(6));
        assert!(patience.pauses_publishing() && !patience.is_over(at(8)) && patience.is_over(at(9)));
        // The oldest message was confirmed meanwhile; the others are young.
        assert_eq!(phase(&mut patience, at(9), Some(at(6))), None);
        assert!(!patience.pauses_publishing());
    }

    #[test]
    fn no_message_is_sent_again_while_a_slow_broker_confirms() {
        let (mut patience, start) = (Patience::new(5 * S, 30 * S), Instant::now());
        let at = |s| start + s * S;
        phase(&mut patience, at(5), Some(start));
        patience.answered(at(5));
        for s in 6..20 {
            patience.message_answered();
            phase(&mut patience, at(s), Some(start));
            assert!(!patience.is_over(at(s + 1)), "{s} s");
        }
        assert!(patience.is_over(at(22)), "three seconds without a confirm");
    }

    #[test]
    fn patience_doubles_with_each_repeat_and_resets_after_a_time_without_one() {
        let (mut patience, mut now) = (Patience::new(5 * S, 30 * S), Instant::now());
        let first = now;
        let mut limits = Vec::new();
        for _ in 0..5 {
            let sent = now;
            while phase(&mut patience, now, Some(sent)) != Some(Phase::Probing) {
                now += S;
            }
            limits.push((now - sent).as_secs());
            assert_eq!(
                patience.stall.as_ref().unwrap().since,
                first,
                "it counts from the first time"
            );
            patience.answered(now);
            patience.resends(now);
        }
        assert_eq!(limits, [5, 10, 20, 30, 30]);
        patience.message_answered();
        assert_eq!(phase(&mut patience, now, Some(now)), None);
        now += 60 * S;
        assert_eq!(phase(&mut patience, now, None), None);
        assert_eq!(patience.next_check(now), now + 5 * S);
    }

    #[test]
    fn a_connection_is_given_up_if_the_broker_answers_only_over_another_one() {
        let (mut patience, start) = (Patience::new(5 * S, 30 * S), Instant::now());
        let at = |s| start + s * S;
        phase(&mut patience, at(5), Some(start));
        assert!(!patience.wants_probe_elsewhere(at(6)) && patience.wants_probe_elsewhere(at(7)));
        patience.answered_elsewhere(at(7), false);
        assert!(!patience.wants_probe_elsewhere(at(8)) && patience.wants_probe_elsewhere(at(9)));
        patience.answered_elsewhere(at(9), true);
        assert!(!patience.wants_probe_elsewhere(at(20)) && patience.pauses_publishing());
        assert!(patience.is_stuck() && !patience.is_over(at(11)) && patience.is_over(at(12)));
        // The broker answers on this connection after all.
        patience.answered(at(11));
        assert!(!patience.is_stuck() && !patience.is_over(at(13)) && patience.is_over(at(14)));
    }

    #[test]
    fn a_stall_is_reported_at_once_and_then_every_two_seconds() {
        let (mut patience, start) = (Patience::new(5 * S, 30 * S), Instant::now());
        let is_reported = |patience: &mut Patience, s: u32| {
            let stall = patience.check(start + s * S, Some(start));
            stall.is_some_and(|stall| stall.is_log_due(start + s * S))
        };
        let when: Vec<u32> = (0..=12).filter(|s| is_reported(&mut patience, *s)).collect();
        assert_eq!(when, [5, 7, 9, 11]);
        assert_eq!(patience.next_check(start), start + 13 * S);
    }

    #[test]
    fn after_a_repeat_a_stall_ends_with_the_first_answer_or_without_open_messages() {
        let start = Instant::now();
        for has_answer in [true, false] {
            let mut patience = Patience::new(5 * S, 30 * S);
            phase(&mut patience, start + 5 * S, Some(start));
            patience.answered(start + 5 * S);
            patience.resends(start + 6 * S);
            assert_eq!(
                phase(&mut patience, start + 7 * S, Some(start + 6 * S)),
                Some(Phase::Resent)
            );
            let oldest = has_answer.then_some(start + 6 * S);
            if has_answer {
                patience.message_answered();
            }
            assert_eq!(phase(&mut patience, start + 7 * S, oldest), None);
        }
    }
}
