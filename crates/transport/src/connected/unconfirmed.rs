//! Decides when a broker has left messages unconfirmed for too long or refuses them, and what to do then. Pure: the
//! time is an argument. Called by `publish_loop` on the publisher thread. The state outlives channels and connections.
//!
//! A queue that is deleted and declared again, or that has lost its quorum, can leave messages without a confirm
//! forever on a healthy connection. So the publish loop sends the broker another request, a probe. If the broker
//! answers it, it has received the messages and still does not confirm them. The publish loop then stops publishing for
//! a moment, so that confirms on their way can arrive, and gives up the channel. The worker sends the open messages
//! again, in order.
//!
//! A quorum queue that is deleted with messages on their way can do worse. The broker waits for it and reads no more
//! from this connection (credit flow that is never granted, seen with RabbitMQ 3.10). So the publish loop also requests
//! an answer over another connection. If only that one answers, the whole connection is given up instead of the
//! channel.
//!
//! A node of a cluster can go silent, for example without power. If there are other endpoints, the publish loop asks
//! for an answer after a fraction of its watchdog. A node that answers has the whole watchdog. A silent one is given up
//! once another one answers.
//!
//! A channel of RabbitMQ can refuse every message for a quorum queue that is well. RabbitMQ 3.10 asks the node that led
//! the queue when the channel first used it, and refuses while that node is down (rabbit_fifo_client). So a channel is
//! replaced after a refusal. A full queue refuses, too. If the next channel confirms nothing either, publishing rests,
//! for longer each time: each try makes another copy in the other queues. While other messages are confirmed, nothing
//! rests, and the replacements become rare.
//!
//! The trap is a queue that is only slow: each repeat is a duplicate and adds to its load. So the patience doubles with
//! each repeat, up to the confirm timeout. It returns to its first length only after a time without a repeat.

use std::time::Duration;
use tokio::time::Instant;

/// How often the state is reported again.
const LOG_EVERY: Duration = Duration::from_secs(2);
/// The shortest time between two channels that are given up because the broker refuses messages. It doubles.
const RENEWALS_MIN: Duration = Duration::from_secs(1);
/// The first rest after channels on which the broker refused messages and confirmed none. It doubles.
const REST_MIN: Duration = Duration::from_millis(250);
const REST_MAX: Duration = Duration::from_secs(10);
/// The share of the first patience that confirms on their way get after the broker has answered. It starts again with
/// each confirm: a broker that still confirms is slow, and a repeat would add to its load.
const GRACE_PART: u32 = 2;
/// How long the broker may be silent before another connection is tried.
const SILENT: Duration = Duration::from_secs(2);
/// With other endpoints, the share of the first patience for each step before a silent node is given up. It is probed,
/// then another one is tried, then confirms on their way get time.
const STEP_PART: u32 = 4;

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
    /// Since when there has been no answer, here or over another connection, or when that was last asked for.
    silent_since: Instant,
    /// Whether a message is unconfirmed for the whole watchdog. Until then only silence counts, and nothing is
    /// reported.
    is_late: bool,
    /// Whether the broker answers only over another connection.
    is_stuck: bool,
    pub(crate) phase: Phase,
    logged_at: Option<Instant>,
}

impl Stall {
    pub(crate) fn is_reported(&self) -> bool {
        self.logged_at.is_some()
    }

    /// Whether a report is due. If it is, the time of the report is recorded.
    pub(crate) fn is_log_due(&mut self, now: Instant) -> bool {
        let is_due = self.is_late && self.logged_at.is_none_or(|logged_at| now >= logged_at + LOG_EVERY);
        if is_due {
            self.logged_at = Some(now);
        }
        is_due
    }
}

pub(crate) struct ConfirmWatchdog {
    first: Duration,
    max: Duration,
    has_other_endpoints: bool,
    /// The time that a message may be unconfirmed now.
    limit: Duration,
    /// When the broker last answered a probe, or a message that was not late.
    alive_at: Option<Instant>,
    resent_at: Option<Instant>,
    /// Whether a message was answered since the last check.
    has_answers: bool,
    pub(crate) stall: Option<Stall>,
    /// Whether the channel must be replaced, because the broker refuses messages on it.
    is_refused: bool,
    renewed_at: Option<Instant>,
    renewals: Duration,
    /// Whether a message was confirmed on this channel.
    has_confirmed: bool,
    /// The number of channels in a row on which the broker refused messages and confirmed none.
    refused_channels: u32,
}

impl ConfirmWatchdog {
    pub(crate) fn new(first: Duration, max: Duration, has_other_endpoints: bool) -> Self {
        Self {
            first,
            max: max.max(first),
            has_other_endpoints,
            limit: first,
            alive_at: None,
            resent_at: None,
            has_answers: false,
            stall: None,
            is_refused: false,
            renewed_at: None,
            renewals: RENEWALS_MIN,
            has_confirmed: false,
            refused_channels: 0,
        }
    }

    /// Whether the broker confirms in time, and did so lately.
    pub(crate) fn is_calm(&self) -> bool {
        self.stall.is_none() && self.limit <= self.first
    }

    /// Records that the broker has confirmed a message.
    pub(crate) fn message_confirmed(&mut self) {
        (self.has_confirmed, self.refused_channels) = (true, 0);
    }

    /// Records that the broker has refused a message.
    pub(crate) fn message_refused(&mut self, now: Instant) {
        if self.renewed_at.is_some_and(|at| now >= at + self.max * 2) {
            (self.renewed_at, self.renewals) = (None, RENEWALS_MIN);
        }
        let is_due = self.renewed_at.is_none_or(|at| now >= at + self.renewals);
        self.is_refused |= is_due || !self.has_confirmed;
    }

    /// Whether the channel must be replaced once no message is open.
    pub(crate) fn wants_channel(&self) -> bool {
        self.is_refused
    }

    /// Records that the channel is replaced because of a refusal. Returns how long publishing rests, if it does.
    pub(crate) fn renews_channel(&mut self, now: Instant) -> Option<Duration> {
        if self.renewed_at.is_some() {
            self.renewals = (self.renewals * 2).min(self.max);
        }
        (self.is_refused, self.renewed_at) = (false, Some(now));
        self.refused_channels += u32::from(!std::mem::take(&mut self.has_confirmed));
        let doublings = self.refused_channels.checked_sub(2)?;
        let factor = 1_u32.checked_shl(doublings).unwrap_or(u32::MAX);
        Some(REST_MIN.saturating_mul(factor).min(REST_MAX))
    }

    /// Records that a message was answered.
    pub(crate) fn message_answered(&mut self) {
        self.has_answers = true;
    }

    /// Checks whether the oldest unanswered message has waited for too long. `oldest` is when it was published, or when
    /// the broker last took bytes of it.
    pub(crate) fn check(&mut self, now: Instant, oldest: Option<Instant>) -> Option<&mut Stall> {
        if self.resent_at.is_some_and(|at| now >= at + self.max * 2) {
            (self.resent_at, self.limit) = (None, self.first);
        }
        let is_late = oldest.is_some_and(|oldest| now >= oldest + self.limit);
        let is_probe_due = oldest.is_some_and(|oldest| now >= self.probe_at(oldest));
        let (has_answers, answered) = (std::mem::take(&mut self.has_answers), self.grace(now, GRACE_PART));
        match &mut self.stall {
            None if is_probe_due => {
                self.stall = Some(Stall {
                    since: oldest.unwrap_or(now),
                    silent_since: now,
                    is_late,
                    is_stuck: false,
                    phase: Phase::Probing,
                    logged_at: None,
                })
            }
            None => {}
            Some(stall) => {
                stall.is_late |= is_late;
                match stall.phase {
                    Phase::Resent if has_answers || oldest.is_none() => self.stall = None,
                    Phase::Resent if is_late => (stall.phase, stall.silent_since) = (Phase::Probing, now),
                    Phase::Resent => {}
                    _ if !is_probe_due => self.stall = None,
                    _ if has_answers && !is_late => (self.stall, self.alive_at) = (None, Some(now)),
                    Phase::Answered { .. } if has_answers => stall.phase = answered,
                    _ => {}
                }
            }
        }
        self.stall.as_mut()
    }

    /// When the next check is due if no message is answered before.
    pub(crate) fn next_check(&self, oldest: Instant) -> Instant {
        let Some(stall) = &self.stall else {
            return self.probe_at(oldest);
        };
        let report_at = stall
            .logged_at
            .map_or(oldest + self.limit, |logged_at| logged_at + LOG_EVERY);
        match stall.phase {
            Phase::Probing => report_at.min(stall.silent_since + self.silent()),
            Phase::Answered { until } => report_at.min(until),
            Phase::Resent => report_at.min(oldest + self.limit),
        }
    }

    /// When the broker must show that it is alive, if the message published at `oldest` is not answered before.
    fn probe_at(&self, oldest: Instant) -> Instant {
        let late_at = oldest + self.limit;
        match self.has_other_endpoints {
            true => late_at.min(self.alive_at.map_or(oldest, |at| at.max(oldest)) + self.limit / STEP_PART),
            false => late_at,
        }
    }

    /// How long the broker may be silent before another connection is tried.
    fn silent(&self) -> Duration {
        match self.has_other_endpoints {
            true => self.first / STEP_PART,
            false => SILENT,
        }
    }

    /// The phase after an answer: confirms on their way get a part of the first patience from now on.
    fn grace(&self, now: Instant, part: u32) -> Phase {
        let until = now + self.first / part;
        Phase::Answered { until }
    }

    /// Records that the broker has answered the probe.
    pub(crate) fn answered(&mut self, now: Instant) {
        let answered = self.grace(now, GRACE_PART);
        self.alive_at = Some(now);
        if let Some(stall) = self.stall.as_mut()
            && (stall.phase == Phase::Probing || stall.is_stuck)
        {
            match stall.is_late {
                true => (stall.phase, stall.is_stuck) = (answered, false),
                false => self.stall = None, // it is alive, and has the whole patience
            }
        }
    }

    /// Records that the broker has taken bytes. It cannot answer the probe before it has what was sent earlier.
    pub(crate) fn bytes_taken(&mut self, now: Instant) {
        if let Some(stall) = self.stall.as_mut().filter(|stall| stall.phase == Phase::Probing) {
            stall.silent_since = now;
        }
    }

    /// Whether the broker is to be asked something else.
    pub(crate) fn wants_probe(&self) -> bool {
        self.phase() == Some(Phase::Probing)
    }

    pub(crate) fn phase(&self) -> Option<Phase> {
        self.stall.as_ref().map(|stall| stall.phase)
    }

    /// Whether a probe over another connection is due, because this one gives no answer. If so, the next one is due
    /// after the same time again.
    pub(crate) fn wants_probe_elsewhere(&mut self, now: Instant) -> bool {
        let silent = self.silent();
        let stall = self.stall.as_mut().filter(|stall| stall.phase == Phase::Probing);
        let silent_too_long = stall.filter(|stall| now >= stall.silent_since + silent);
        silent_too_long.is_some_and(|stall| {
            stall.silent_since = now;
            true
        })
    }

    /// Records the result of the probe over another connection.
    pub(crate) fn answered_elsewhere(&mut self, now: Instant, has_answered: bool) {
        let part = match self.has_other_endpoints {
            true => STEP_PART,
            false => GRACE_PART,
        };
        let answered = self.grace(now, part);
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
        self.is_refused || matches!(self.phase(), Some(Phase::Answered { .. }))
    }

    /// Whether the open messages must be sent again.
    pub(crate) fn is_over(&self, now: Instant) -> bool {
        matches!(self.phase(), Some(Phase::Answered { until }) if now >= until)
    }

    /// Records that the open messages are sent again.
    pub(crate) fn resends(&mut self, now: Instant) {
        self.is_refused = false; // the channel is replaced now
        self.resent_at = Some(now);
        self.limit = (self.limit * 2).min(self.max);
        if let Some(stall) = &mut self.stall {
            stall.phase = Phase::Resent;
        }
    }

    /// Records that the connection is gone: unconfirmed messages are lost with it.
    pub(crate) fn disconnected(&mut self) {
        (self.stall, self.is_refused, self.alive_at) = (None, false, None);
        self.has_confirmed = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: Duration = Duration::from_secs(1);

    fn phase(watchdog: &mut ConfirmWatchdog, now: Instant, oldest: Option<Instant>) -> Option<Phase> {
        watchdog.check(now, oldest).map(|stall| stall.phase)
    }

    #[test]
    fn a_channel_is_replaced_after_a_refusal_and_rarely_if_that_does_not_help() {
        let (mut watchdog, start) = (ConfirmWatchdog::new(5 * S, 8 * S, false), Instant::now());
        let mut renewed = Vec::new();
        for tenth in 0..300 {
            let now = start + S * tenth / 10;
            watchdog.message_confirmed(); // another one
            watchdog.message_refused(now);
            assert_eq!(watchdog.wants_channel(), watchdog.pauses_publishing());
            if watchdog.wants_channel() {
                assert_eq!(watchdog.renews_channel(now), None);
                renewed.push(tenth);
            }
        }
        assert_eq!(renewed, [0, 10, 30, 70, 150, 230]);
        // After a time without refusals the first one counts again.
        let later = start + 60 * S;
        watchdog.message_refused(later);
        watchdog.renews_channel(later);
        watchdog.message_refused(later + S);
        assert!(watchdog.wants_channel());
        watchdog.disconnected();
        assert!(!watchdog.pauses_publishing());
    }

    #[test]
    fn publishing_rests_for_longer_each_time_until_a_message_is_confirmed() {
        let (mut watchdog, now) = (ConfirmWatchdog::new(5 * S, 8 * S, false), Instant::now());
        let mut rest = || {
            watchdog.message_refused(now);
            assert!(watchdog.wants_channel());
            watchdog.renews_channel(now).map(|rest| rest.as_millis())
        };
        let rests: Vec<_> = (0..10).map(|_| rest()).collect();
        let expected = [0, 250, 500, 1_000, 2_000, 4_000, 8_000, 10_000, 10_000, 10_000];
        assert_eq!(rests.iter().map(|rest| rest.unwrap_or(0)).collect::<Vec<_>>(), expected);
        watchdog.message_confirmed();
        watchdog.message_refused(now);
        assert!(!watchdog.wants_channel(), "one of several");
    }

    #[test]
    fn messages_confirmed_in_time_cause_no_probe() {
        let (mut watchdog, start) = (ConfirmWatchdog::new(5 * S, 30 * S, false), Instant::now());
        assert_eq!(watchdog.next_check(start), start + 5 * S);
        assert_eq!(phase(&mut watchdog, start + 4 * S, Some(start)), None);
        assert_eq!(phase(&mut watchdog, start + 60 * S, Some(start + 58 * S)), None);
        assert_eq!(phase(&mut watchdog, start + 60 * S, None), None);
    }

    #[test]
    fn only_messages_that_stay_unconfirmed_after_the_brokers_answer_are_sent_again() {
        let (mut watchdog, start) = (ConfirmWatchdog::new(5 * S, 30 * S, false), Instant::now());
        let at = |s| start + s * S;
        assert_eq!(phase(&mut watchdog, at(5), Some(start)), Some(Phase::Probing));
        assert!(
            !watchdog.pauses_publishing() && !watchdog.is_over(at(20)),
            "no answer: it may be slow"
        );
        watchdog.answered(at(6));
        assert!(watchdog.pauses_publishing() && !watchdog.is_over(at(8)) && watchdog.is_over(at(9)));
        // The oldest message was confirmed meanwhile; the others are young.
        assert_eq!(phase(&mut watchdog, at(9), Some(at(6))), None);
        assert!(!watchdog.pauses_publishing());
    }

    #[test]
    fn no_message_is_sent_again_while_a_slow_broker_confirms() {
        let (mut watchdog, start) = (ConfirmWatchdog::new(5 * S, 30 * S, false), Instant::now());
        let at = |s| start + s * S;
        phase(&mut watchdog, at(5), Some(start));
        watchdog.answered(at(5));
        for s in 6..20 {
            watchdog.message_answered();
            phase(&mut watchdog, at(s), Some(start));
            assert!(!watchdog.is_over(at(s + 1)), "{s} s");
        }
        assert!(watchdog.is_over(at(22)), "three seconds without a confirm");
    }

    #[test]
    fn patience_doubles_with_each_repeat_and_resets_after_a_time_without_one() {
        let (mut watchdog, mut now) = (ConfirmWatchdog::new(5 * S, 30 * S, false), Instant::now());
        let first = now;
        let mut limits = Vec::new();
        for _ in 0..5 {
            let sent = now;
            while phase(&mut watchdog, now, Some(sent)) != Some(Phase::Probing) {
                now += S;
            }
            limits.push((now - sent).as_secs());
            assert_eq!(
                watchdog.stall.as_ref().unwrap().since,
                first,
                "it counts from the first time"
            );
            watchdog.answered(now);
            watchdog.resends(now);
        }
        assert_eq!(limits, [5, 10, 20, 30, 30]);
        watchdog.message_answered();
        assert_eq!(phase(&mut watchdog, now, Some(now)), None);
        now += 60 * S;
        assert_eq!(phase(&mut watchdog, now, None), None);
        assert_eq!(watchdog.next_check(now), now + 5 * S);
    }

    #[test]
    fn a_connection_is_given_up_if_the_broker_answers_only_over_another_one() {
        let (mut watchdog, start) = (ConfirmWatchdog::new(5 * S, 30 * S, false), Instant::now());
        let at = |s| start + s * S;
        phase(&mut watchdog, at(5), Some(start));
        assert!(!watchdog.wants_probe_elsewhere(at(6)) && watchdog.wants_probe_elsewhere(at(7)));
        watchdog.answered_elsewhere(at(7), false);
        assert!(!watchdog.wants_probe_elsewhere(at(8)) && watchdog.wants_probe_elsewhere(at(9)));
        watchdog.answered_elsewhere(at(9), true);
        assert!(!watchdog.wants_probe_elsewhere(at(20)) && watchdog.pauses_publishing());
        assert!(watchdog.is_stuck() && !watchdog.is_over(at(11)) && watchdog.is_over(at(12)));
        // The broker answers on this connection after all.
        watchdog.answered(at(11));
        assert!(!watchdog.is_stuck() && !watchdog.is_over(at(13)) && watchdog.is_over(at(14)));
    }

    #[test]
    fn a_silent_node_is_given_up_early_if_another_endpoint_answers() {
        let (mut watchdog, start) = (ConfirmWatchdog::new(4 * S, 30 * S, true), Instant::now());
        let at = |s| start + s * S;
        assert_eq!(watchdog.next_check(start), at(1));
        assert_eq!(phase(&mut watchdog, at(1), Some(start)), Some(Phase::Probing));
        assert_eq!(watchdog.next_check(start), at(2));
        assert!(!watchdog.wants_probe_elsewhere(start + S * 19 / 10) && watchdog.wants_probe_elsewhere(at(2)));
        assert_eq!(
            watchdog.next_check(start),
            at(3),
            "no busy loop while the other one is asked"
        );
        watchdog.answered_elsewhere(at(2), true);
        assert_eq!(
            phase(&mut watchdog, at(2), Some(start)),
            Some(Phase::Answered { until: at(3) })
        );
        assert!(watchdog.is_stuck() && watchdog.is_over(at(3)));
        watchdog.resends(at(3));
        watchdog.disconnected();
        // The next node goes silent, too: the patience has doubled.
        assert_eq!(watchdog.next_check(at(3)), at(5));
    }

    #[test]
    fn a_node_that_answers_has_the_whole_patience_beside_other_endpoints() {
        for confirms in [false, true] {
            let (mut watchdog, start) = (ConfirmWatchdog::new(4 * S, 30 * S, true), Instant::now());
            let at = |s| start + s * S;
            for s in [1, 2, 3] {
                assert_eq!(phase(&mut watchdog, at(s), Some(start)), Some(Phase::Probing), "{s} s");
                let stall = watchdog.stall.as_mut().expect("a stall");
                assert!(!stall.is_log_due(at(s)), "nothing is reported");
                match confirms {
                    true => watchdog.message_answered(),
                    false => watchdog.answered(at(s)),
                }
                assert_eq!(phase(&mut watchdog, at(s), Some(start)), None);
                assert_eq!(watchdog.next_check(start), at(s + 1));
            }
            assert_eq!(phase(&mut watchdog, at(4), Some(start)), Some(Phase::Probing));
            assert!(watchdog.stall.as_mut().expect("a stall").is_log_due(at(4)));
            watchdog.answered(at(4));
            assert!(!watchdog.is_stuck() && !watchdog.is_over(at(5)) && watchdog.is_over(at(6)));
            // After a repeat it has the doubled watchdog.
            watchdog.resends(at(6));
            assert_eq!(phase(&mut watchdog, at(13), Some(at(6))), Some(Phase::Resent));
            assert_eq!(phase(&mut watchdog, at(14), Some(at(6))), Some(Phase::Probing));
        }
    }

    #[test]
    fn a_confirm_from_a_node_that_was_silent_gives_it_the_whole_patience() {
        let (mut watchdog, start) = (ConfirmWatchdog::new(4 * S, 30 * S, true), Instant::now());
        let at = |s| start + s * S;
        phase(&mut watchdog, at(1), Some(start));
        watchdog.answered_elsewhere(at(2), true);
        assert!(watchdog.is_stuck() && watchdog.pauses_publishing());
        watchdog.message_answered();
        assert_eq!(phase(&mut watchdog, at(2), Some(start)), None);
        assert!(!watchdog.is_stuck() && !watchdog.pauses_publishing());
        assert_eq!(watchdog.next_check(start), at(3));
    }

    #[test]
    fn a_stall_is_reported_at_once_and_then_every_two_seconds() {
        let (mut watchdog, start) = (ConfirmWatchdog::new(5 * S, 30 * S, false), Instant::now());
        let is_reported = |watchdog: &mut ConfirmWatchdog, s: u32| {
            let stall = watchdog.check(start + s * S, Some(start));
            let is_due = stall.is_some_and(|stall| stall.is_log_due(start + s * S));
            watchdog.wants_probe_elsewhere(start + s * S);
            is_due
        };
        let when: Vec<u32> = (0..=12).filter(|s| is_reported(&mut watchdog, *s)).collect();
        assert_eq!(when, [5, 7, 9, 11]);
        assert_eq!(watchdog.next_check(start), start + 13 * S);
    }

    #[test]
    fn after_a_repeat_a_stall_ends_with_the_first_answer_or_without_open_messages() {
        let start = Instant::now();
        for has_answer in [true, false] {
            let mut watchdog = ConfirmWatchdog::new(5 * S, 30 * S, false);
            phase(&mut watchdog, start + 5 * S, Some(start));
            watchdog.answered(start + 5 * S);
            watchdog.resends(start + 6 * S);
            assert_eq!(
                phase(&mut watchdog, start + 7 * S, Some(start + 6 * S)),
                Some(Phase::Resent)
            );
            let oldest = has_answer.then_some(start + 6 * S);
            if has_answer {
                watchdog.message_answered();
            }
            assert_eq!(phase(&mut watchdog, start + 7 * S, oldest), None);
        }
    }
}
