//! When has a broker been silent about messages for too long, and what is done about it? Pure: the time is an argument. Asked
//! by `session` on the publisher thread; it outlives channels and connections.
//!
//! A queue that is deleted and declared again, or has lost its quorum, can leave messages without a confirm for ever, on a
//! connection that is well. So the broker is asked for something else. If it answers, it has taken the messages, and still
//! does not confirm them. The session then publishes nothing for a moment, so that what is merely on its way is confirmed,
//! and gives up the channel. The worker sends what was open again, in order.
//!
//! A quorum queue that is deleted with messages on their way can do worse: the broker waits for it and reads no more from this
//! connection (credit flow that is never granted, seen with RabbitMQ 3.10). So an answer is asked for over another
//! connection, too. If only that one answers, the connection is given up in the place of the channel.
//!
//! The trap is a queue that is only slow: each repeat is a duplicate and adds to its load. So patience doubles with each
//! repeat, up to the confirm timeout, and begins at its first length only after a time without one.

use std::time::Duration;
use tokio::time::Instant;

/// How often the state says how long it has been.
const LOG_EVERY: Duration = Duration::from_secs(2);
/// What is on its way when the broker has answered may take this part of the patience, counted again from each confirm:
/// a broker that still confirms is slow, and a repeat would add to its load.
const GRACE_PART: u32 = 2;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// The broker was asked and has not answered.
    Asked,
    /// It has answered; nothing more is published until then.
    Answered { until: Instant },
    /// What was unconfirmed goes again, and nothing has been confirmed since.
    Resent,
}

/// Messages are unconfirmed for too long.
#[derive(Debug)]
pub(crate) struct Stall {
    /// When the oldest of them was published first.
    pub(crate) since: Instant,
    /// Since when there has been no answer, here or over another connection.
    asked_at: Instant,
    /// The broker answers over another connection only.
    is_stuck: bool,
    pub(crate) phase: Phase,
    logged_at: Option<Instant>,
}

impl Stall {
    /// Whether it is time to say how long it has been. It counts as said.
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
    /// How long a message may be unconfirmed now.
    limit: Duration,
    resent_at: Option<Instant>,
    /// Something was answered since the last look.
    has_heard: bool,
    pub(crate) stall: Option<Stall>,
}

impl Patience {
    pub(crate) fn new(first: Duration, max: Duration) -> Self {
        Self {
            first,
            max: max.max(first),
            limit: first,
            resent_at: None,
            has_heard: false,
            stall: None,
        }
    }

    /// A message was answered.
    pub(crate) fn heard(&mut self) {
        self.has_heard = true;
    }

    /// Looks whether the oldest unanswered message, published at `oldest`, waits for too long.
    pub(crate) fn look(&mut self, now: Instant, oldest: Option<Instant>) -> Option<&mut Stall> {
        if self.resent_at.is_some_and(|at| now >= at + self.max * 2) {
            (self.resent_at, self.limit) = (None, self.first);
        }
        let is_late = oldest.is_some_and(|oldest| now >= oldest + self.limit);
        let (heard, answered) = (std::mem::take(&mut self.has_heard), self.grace_from(now));
        match &mut self.stall {
            None if is_late => {
                self.stall = Some(Stall {
                    since: oldest.unwrap_or(now),
                    asked_at: now,
                    is_stuck: false,
                    phase: Phase::Asked,
                    logged_at: None,
                })
            }
            None => {}
            Some(stall) => match stall.phase {
                Phase::Resent if heard || oldest.is_none() => self.stall = None,
                Phase::Resent if is_late => (stall.phase, stall.asked_at) = (Phase::Asked, now),
                Phase::Asked | Phase::Answered { .. } if !is_late => self.stall = None,
                Phase::Answered { .. } if heard => stall.phase = answered,
                _ => {}
            },
        }
        self.stall.as_mut()
    }

    /// When to look again, if nothing is heard.
    pub(crate) fn next_check(&self, oldest: Instant) -> Instant {
        let Some(stall) = &self.stall else {
            return oldest + self.limit;
        };
        let tell = stall.logged_at.map_or(stall.since, |logged_at| logged_at + LOG_EVERY);
        match stall.phase {
            Phase::Asked => tell,
            Phase::Answered { until } => tell.min(until),
            Phase::Resent => tell.min(oldest + self.limit),
        }
    }

    /// It has answered: what is on its way has some time from now on.
    fn grace_from(&self, now: Instant) -> Phase {
        let until = now + self.first / GRACE_PART;
        Phase::Answered { until }
    }

    /// The broker has answered to what it was asked.
    pub(crate) fn answered(&mut self, now: Instant) {
        let answered = self.grace_from(now);
        if let Some(stall) = self.stall.as_mut()
            && (stall.phase == Phase::Asked || stall.is_stuck)
        {
            (stall.phase, stall.is_stuck) = (answered, false);
        }
    }

    /// Whether the broker is to be asked over another connection, since this one gives no answer.
    pub(crate) fn asks_elsewhere(&self, now: Instant) -> bool {
        let stall = self.stall.as_ref().filter(|stall| stall.phase == Phase::Asked);
        stall.is_some_and(|stall| now >= stall.asked_at + LOG_EVERY)
    }

    /// Whether the broker has answered there.
    pub(crate) fn answered_elsewhere(&mut self, now: Instant, has_answered: bool) {
        let answered = self.grace_from(now);
        if let Some(stall) = self.stall.as_mut().filter(|stall| stall.phase == Phase::Asked) {
            match has_answered {
                true => (stall.phase, stall.is_stuck) = (answered, true),
                false => stall.asked_at = now,
            }
        }
    }

    /// Whether the connection is to be given up with what is open, and not the channel alone.
    pub(crate) fn is_stuck(&self) -> bool {
        self.stall.as_ref().is_some_and(|stall| stall.is_stuck)
    }

    /// Whether nothing may be published for now.
    pub(crate) fn stands_back(&self) -> bool {
        matches!(
            &self.stall,
            Some(Stall {
                phase: Phase::Answered { .. },
                ..
            })
        )
    }

    /// Whether what is open is to be sent again.
    pub(crate) fn is_over(&self, now: Instant) -> bool {
        matches!(&self.stall, Some(Stall { phase: Phase::Answered { until }, .. }) if now >= *until)
    }

    /// It is.
    pub(crate) fn resends(&mut self, now: Instant) {
        self.resent_at = Some(now);
        self.limit = (self.limit * 2).min(self.max);
        if let Some(stall) = &mut self.stall {
            stall.phase = Phase::Resent;
        }
    }

    /// The connection is gone: what was unconfirmed is lost with it.
    pub(crate) fn disconnected(&mut self) {
        self.stall = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: Duration = Duration::from_secs(1);

    fn phase(patience: &mut Patience, now: Instant, oldest: Option<Instant>) -> Option<Phase> {
        patience.look(now, oldest).map(|stall| stall.phase)
    }

    #[test]
    fn what_is_confirmed_in_time_asks_for_nothing() {
        let (mut patience, start) = (Patience::new(5 * S, 30 * S), Instant::now());
        assert_eq!(patience.next_check(start), start + 5 * S);
        assert_eq!(phase(&mut patience, start + 4 * S, Some(start)), None);
        assert_eq!(phase(&mut patience, start + 60 * S, Some(start + 58 * S)), None);
        assert_eq!(phase(&mut patience, start + 60 * S, None), None);
    }

    #[test]
    fn the_broker_is_asked_and_only_what_it_does_not_confirm_after_its_answer_goes_again() {
        let (mut patience, start) = (Patience::new(5 * S, 30 * S), Instant::now());
        let at = |s| start + s * S;
        assert_eq!(phase(&mut patience, at(5), Some(start)), Some(Phase::Asked));
        assert!(
            !patience.stands_back() && !patience.is_over(at(20)),
            "no answer: it may be slow"
        );
        patience.answered(at(6));
        assert!(patience.stands_back() && !patience.is_over(at(8)) && patience.is_over(at(9)));
        // The oldest was confirmed meanwhile: those behind it are young.
        assert_eq!(phase(&mut patience, at(9), Some(at(6))), None);
        assert!(!patience.stands_back());
    }

    #[test]
    fn while_a_slow_broker_confirms_nothing_goes_again() {
        let (mut patience, start) = (Patience::new(5 * S, 30 * S), Instant::now());
        let at = |s| start + s * S;
        phase(&mut patience, at(5), Some(start));
        patience.answered(at(5));
        for s in 6..20 {
            patience.heard();
            phase(&mut patience, at(s), Some(start));
            assert!(!patience.is_over(at(s + 1)), "{s} s");
        }
        assert!(patience.is_over(at(22)), "three seconds without a confirm");
    }

    #[test]
    fn patience_doubles_with_each_repeat_and_begins_afresh_after_a_time_without_one() {
        let (mut patience, mut now) = (Patience::new(5 * S, 30 * S), Instant::now());
        let first = now;
        let mut limits = Vec::new();
        for _ in 0..5 {
            let sent = now;
            while phase(&mut patience, now, Some(sent)) != Some(Phase::Asked) {
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
        patience.heard();
        assert_eq!(phase(&mut patience, now, Some(now)), None);
        now += 60 * S;
        assert_eq!(phase(&mut patience, now, None), None);
        assert_eq!(patience.next_check(now), now + 5 * S);
    }

    #[test]
    fn a_connection_is_given_up_if_the_broker_answers_over_another_one_only() {
        let (mut patience, start) = (Patience::new(5 * S, 30 * S), Instant::now());
        let at = |s| start + s * S;
        phase(&mut patience, at(5), Some(start));
        assert!(!patience.asks_elsewhere(at(6)) && patience.asks_elsewhere(at(7)));
        patience.answered_elsewhere(at(7), false);
        assert!(!patience.asks_elsewhere(at(8)) && patience.asks_elsewhere(at(9)));
        patience.answered_elsewhere(at(9), true);
        assert!(!patience.asks_elsewhere(at(20)) && patience.stands_back());
        assert!(patience.is_stuck() && !patience.is_over(at(11)) && patience.is_over(at(12)));
        // It answers here after all.
        patience.answered(at(11));
        assert!(!patience.is_stuck() && !patience.is_over(at(13)) && patience.is_over(at(14)));
    }

    #[test]
    fn it_is_told_at_once_and_then_every_two_seconds() {
        let (mut patience, start) = (Patience::new(5 * S, 30 * S), Instant::now());
        let told = |patience: &mut Patience, s: u32| {
            let stall = patience.look(start + s * S, Some(start));
            stall.is_some_and(|stall| stall.is_log_due(start + s * S))
        };
        let when: Vec<u32> = (0..=12).filter(|s| told(&mut patience, *s)).collect();
        assert_eq!(when, [5, 7, 9, 11]);
        assert_eq!(patience.next_check(start), start + 13 * S);
    }

    #[test]
    fn after_a_repeat_it_is_over_with_the_first_answer_or_when_nothing_is_left() {
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
                patience.heard();
            }
            assert_eq!(phase(&mut patience, start + 7 * S, oldest), None);
        }
    }
}
