//! A connection while it is in use: publish within the window, collect confirms and returns, time out, give up.
//!
//! Runs on the publisher thread, from `Connected` to `Down`. It is a pipeline without barriers: batches follow each
//! other on one channel in order. An outcome is reported as soon as it is certain, or, if the worker lets confirms
//! wait, with some others or at the next timed check.

use super::attempts::{Attempts, Numbered};
use super::config::AmqpConfig;
use super::connect::{self, Link};
use super::endpoints::{Endpoints, Opened, Successor};
use super::guard::{LastBytes, SentBytes};
use super::returns::{ConfirmAnswer, ReturnedMessage, Returns};
use super::sendable::Sendable;
use super::unconfirmed::{ConfirmWatchdog, Phase, Stall};
use crate::brokers::OpenConnection;
use crate::down::{DownReason, Fault};
use crate::event::{Answered, ConnectionState};
use crate::intake::{Intake, StopBy};
use crate::transfer::{Transfer, TransferLimits, look_every};
use crate::{Outcome, Publication, Text};
use futures_util::{Stream, StreamExt};
use lapin::message::BasicReturnMessage;
use lapin::options::{BasicPublishOptions, ConfirmSelectOptions};
use lapin::{Channel, Confirmation, Event as LapinEvent, PublisherConfirm};
use std::collections::VecDeque;
use std::future::Future;
use std::pin::{Pin, pin};
use std::time::Duration;
use tokio::time::{Instant, sleep_until, timeout};

/// The reply code of `basic.return` for a message that was routed to no queue.
const NO_ROUTE: u16 = 312;
/// The most messages that may be in lapin's buffer and not yet in the socket's. After a stop request or a lost lease,
/// no more than these still go out. This keeps the socket busy: 1,000 is not measurably faster.
const UNWRITTEN_MAX: usize = 64;
/// The limit of the bodies of outstanding messages, in bytes. Unroutable messages come back whole, so the window bounds
/// memory twice.
const WINDOW_BYTES_MAX: usize = 64 << 20;
/// The time limit for outstanding confirms after a stop request. Each confirm spares a duplicate at the next start.
const STOP_GRACE_MAX: Duration = Duration::from_secs(5);

/// If the worker lets confirms wait, this number of writes and confirms wakes the thread. It is below UNWRITTEN_MAX, so
/// that the socket stays busy.
const WAKES: usize = 32;
/// The time after which the thread looks for fewer.
const CHECK_AFTER: Duration = Duration::from_millis(2);

/// Why a session is over, other than by a stop request.
pub(crate) enum SessionEnd {
    Connection(ConnectionEnd),
    /// The channel is replaced, and the connection kept: the broker refused a message, or it answers but does not
    /// confirm what it received. Then unconfirmed messages are lost, so the worker sends them again. `waiting` is to be
    /// sent next, after the `rest`.
    Channel {
        waiting: VecDeque<Publication>,
        rest: Option<Duration>,
    },
}

/// Why a connection is over.
pub(crate) enum ConnectionEnd {
    /// It failed, which was reported to the worker.
    Failed(Fault),
    /// There was nothing to do over it, and no message is open.
    Idle,
    /// It has lived for long. No message is open, and `waiting` is to be sent over the next one.
    Replaced {
        by: Box<Opened>,
        waiting: VecDeque<Publication>,
    },
}

/// Serves until a stop request, a failure of the connection, or the end of a channel that is given up. `waiting` goes
/// first. At its end every message that it took has its outcome, or is returned.
pub(crate) async fn serve(
    opened: &mut Opened,
    endpoints: &Endpoints<'_>,
    watchdog: &mut ConfirmWatchdog,
    intake: &mut Intake<'_>,
    place: &mut OpenConnection,
    successor: &mut Successor<'_>,
    waiting: VecDeque<Publication>,
) -> Result<SessionEnd, StopBy> {
    let (link, config) = (&opened.link, &endpoints.config);
    let mut events = pin!(link.connection.events_listener());
    let sent_bytes = opened.wire.sent_bytes();
    let mut thread_ended = pin!(opened.wire.thread_ended());
    let mut timer = pin!(sleep_until(Instant::now()));
    let mut check_timer = pin!(sleep_until(Instant::now()));
    let mut session = ChannelSession::new(link, sent_bytes, config, watchdog, write);
    session.waiting = waiting;
    let mut probe: Option<Probe> = None;
    let mut elsewhere: Option<Pin<Box<dyn Future<Output = bool> + '_>>> = None;
    let mut stop = None;
    loop {
        session.fill(intake);
        session.drain();
        intake.send_outcomes(&mut session.outcomes);
        session.check_stall(intake);
        let may_hand_over = stop.is_none() && session.broken.is_none();
        if let Some(by) = (successor.opened).take_if(|_| may_hand_over && session.hands_over(Instant::now())) {
            intake.send_last_outcomes(&mut session.outcomes);
            if session.blocked {
                intake.report_state(ConnectionState::Connected);
            }
            let waiting = std::mem::take(&mut session.waiting);
            return Ok(SessionEnd::Connection(ConnectionEnd::Replaced { by, waiting }));
        }
        if session.watchdog.is_over(Instant::now()) && session.broken.is_none() && stop.is_none() {
            if session.watchdog.is_stuck() {
                session.give_up_connection();
                break;
            }
            let alone = session.open.len() == 1;
            session.give_up_open("the broker answered but did not confirm the message", alone);
            intake.send_last_outcomes(&mut session.outcomes);
            return Ok(SessionEnd::Channel {
                waiting: VecDeque::new(),
                rest: None,
            });
        }
        if session.watchdog.wants_channel() && session.open.is_empty() && session.broken.is_none() && stop.is_none() {
            return Ok(SessionEnd::Channel {
                waiting: std::mem::take(&mut session.waiting),
                rest: session.watchdog.renews_channel(Instant::now()),
            });
        }
        if session.watchdog.wants_probe() && probe.is_none() {
            probe = Some(Box::pin(link.channel.confirm_select(ConfirmSelectOptions::default())));
        }
        if session.watchdog.wants_probe_elsewhere(Instant::now()) && elsewhere.is_none() && stop.is_none() {
            elsewhere = Some(Box::pin(endpoints.answer_apart_from(link.address)));
        }
        if session.broken.is_some() || (stop.is_some() && session.open.is_empty()) {
            break;
        }
        if session.arm_timer() {
            timer.as_mut().reset(session.next_timeout());
        }
        let wakes = session.wakes(stop.is_none() && intake.main_lets_confirms_wait());
        if wakes > 1 && session.arm_check() {
            check_timer.as_mut().reset(Instant::now() + CHECK_AFTER);
        }
        let is_idle = stop.is_none() && session.is_idle();
        place.set_idle(is_idle);
        let want_batch = stop.is_none() && session.waiting.is_empty() && session.has_room();
        // A loop that always finds work must still let the runtime poll the socket for lapin.
        tokio::task::coop::consume_budget().await;
        tokio::select! {
            biased;
            () = &mut thread_ended => session.break_off(0, Fault::new(DownReason::Closed, "the connection has ended")),
            Some(event) = events.next() => session.on_event(event, intake),
            () = timer.as_mut(), if session.timer_armed => session.timer_fired(stop.is_some()),
            answered = async { probe.as_mut().expect("polled only if there is one").await }, if probe.is_some() => {
                probe = None;
                if answered.is_ok() {
                    session.watchdog.answered(Instant::now());
                    session.timer_armed = false;
                }
            }
            has_answered = async { elsewhere.as_mut().expect("polled only if there is one").await }, if elsewhere.is_some() => {
                elsewhere = None;
                session.watchdog.answered_elsewhere(Instant::now(), has_answered);
                session.timer_armed = false;
            }
            () = check_timer.as_mut(), if session.check_armed => session.check_fired(),
            next = intake.next_or_stop(want_batch), if stop.is_none() => match next {
                Ok(handed) => session.waiting = intake.accept(handed).unwrap_or_default().into(),
                Err(order) => {
                    stop = Some(order);
                    session.begin_stop(order);
                }
            },
            () = place.ends(), if is_idle => return Ok(SessionEnd::Connection(ConnectionEnd::Idle)),
            () = successor.opens(), if stop.is_none() => {}
            () = session.attempts.woken(wakes) => {}
        }
    }
    let mut fault = session.find_cause(events).await;
    match stop {
        Some(_) => fault = Fault::new(DownReason::Closed, "the publisher was stopped"),
        None => {
            fault = config.at_endpoint(fault);
            intake.report_down(&fault);
        }
    }
    session.abandon(&fault);
    intake.send_last_outcomes(&mut session.outcomes);
    stop.map_or(Ok(SessionEnd::Connection(ConnectionEnd::Failed(fault))), Err)
}

/// A request on the channel of the messages, to check that the broker answers. Turning on confirms a second time
/// changes nothing. A channel handles its frames in order, so an answer means that the broker has received all earlier
/// messages.
type Probe<'a> = Pin<Box<dyn Future<Output = lapin::Result<()>> + 'a>>;

/// The result that lapin has for the message with this seq.
type LapinAnswer = (u64, lapin::Result<Confirmation>);

/// A published message without an outcome.
struct OpenMessage {
    handle: u64,
    transfer: Transfer,
    /// How many bytes the broker must have taken of the connection to have all of this message. None = not all of it is
    /// written.
    end: Option<u64>,
    body_bytes: usize,
    routing_key: Text,
}

struct ChannelSession<'a, W> {
    channel: &'a Channel,
    /// Writes a message: [`write`], whose future has no name.
    write: fn(&'a Channel, Sendable) -> W,
    config: &'a AmqpConfig,
    frame_bytes_max: usize,
    /// The rest of the batch that was taken last.
    waiting: VecDeque<Publication>,
    /// Messages without an outcome, by seq, which is the order of publishing. At most `config.window`.
    open: Numbered<OpenMessage>,
    open_bytes: usize,
    /// Messages without an answer.
    attempts: Attempts<W, PublisherConfirm>,
    answers: Vec<LapinAnswer>,
    returns: Returns,
    /// Empty between drains, as `verdicts` is: only their memory is kept.
    confirms: Vec<ConfirmAnswer>,
    verdicts: Vec<(u64, Outcome)>,
    /// When bytes last arrived. A confirm is noticed later than it arrived, but it arrived no later than this.
    last_bytes: LastBytes,
    sent_bytes: SentBytes,
    limits: TransferLimits,
    /// What the broker had taken of the connection when that was last looked at, and when that was.
    taken: u64,
    looked_at: Instant,
    /// Whether the broker may not have all of the open messages.
    has_unsent: bool,
    outcomes: Vec<Answered>,
    blocked: bool,
    timer_armed: bool,
    check_armed: bool,
    /// Whether the last timed check found nothing. The next answer then wakes the thread: more checks would be in vain.
    is_silent: bool,
    /// When the session ends, at the latest: because of a stop request, or because the next connection takes over.
    stop_at: Option<Instant>,
    watchdog: &'a mut ConfirmWatchdog,
    /// Why this connection is over, with the rank of the error. A more specific error replaces it.
    broken: Option<(u8, Fault)>,
}

impl<'a, W: Future<Output = lapin::Result<PublisherConfirm>>> ChannelSession<'a, W> {
    fn new(
        link: &'a Link,
        sent_bytes: SentBytes,
        config: &'a AmqpConfig,
        watchdog: &'a mut ConfirmWatchdog,
        write: fn(&'a Channel, Sendable) -> W,
    ) -> Self {
        Self {
            channel: &link.channel,
            write,
            config,
            frame_bytes_max: link.frame_bytes_max,
            waiting: VecDeque::new(),
            open: Numbered::default(),
            open_bytes: 0,
            attempts: Attempts::default(),
            answers: Vec::new(),
            returns: Returns::default(),
            confirms: Vec::new(),
            verdicts: Vec::new(),
            last_bytes: link.last_bytes.clone(),
            taken: sent_bytes.taken(),
            sent_bytes,
            limits: config.transfer_limits(),
            looked_at: Instant::now(),
            has_unsent: false,
            outcomes: Vec::new(),
            blocked: link.connection.status().blocked(),
            timer_armed: false,
            check_armed: false,
            is_silent: false,
            stop_at: None,
            watchdog,
            broken: None,
        }
    }

    fn has_room(&self) -> bool {
        !self.blocked
            && self.stop_at.is_none()
            && !self.watchdog.pauses_publishing()
            && self.open.len() < self.config.window
            && self.open_bytes < WINDOW_BYTES_MAX
            && self.attempts.unwritten() < UNWRITTEN_MAX
    }

    /// Whether there is nothing to do, and nothing to wait for.
    fn is_idle(&self) -> bool {
        let is_well = !self.blocked && self.watchdog.stall.is_none() && self.broken.is_none();
        is_well && self.open.is_empty() && self.waiting.is_empty() && self.answers.is_empty()
    }

    /// Publishes as many messages as the window allows.
    fn fill(&mut self, intake: &mut Intake<'_>) {
        while self.has_room() && self.answers.is_empty() {
            let Some(publication) = self.waiting.pop_front() else {
                match intake.try_next() {
                    Some(batch) => self.waiting = batch.into(),
                    None => return,
                }
                continue;
            };
            if self.config.deadline.has_passed() {
                self.waiting.push_front(publication);
                return self.break_off(u8::MAX, Fault::new(DownReason::Closed, "the lease has expired"));
            }
            self.publish(publication);
        }
    }

    /// Starts one attempt. Its first poll, right here, puts the frames into lapin's buffer, which keeps the order.
    /// Awaiting each write instead would take four times the CPU, because each message would need a thread round trip
    /// (lapin's `send_method_frame_with_body`).
    fn publish(&mut self, publication: Publication) {
        let handle = publication.handle;
        let body_bytes = publication.body.len();
        let message_id = publication.properties.message_id.clone();
        let routing_key = publication.address.clone();
        let sendable = match Sendable::build(publication, self.config, self.frame_bytes_max) {
            Ok(sendable) => sendable,
            Err(reason) => return self.outcomes.push(Answered::now(handle, Outcome::Refused { reason })),
        };
        let seq = self.open.push(OpenMessage {
            handle,
            transfer: Transfer::begin(Instant::now().into_std()),
            end: None,
            body_bytes,
            routing_key,
        });
        self.open_bytes += body_bytes;
        self.timer_armed &= self.has_unsent; // the next look may be due earlier
        self.has_unsent = true;
        self.returns.sent(seq, message_id);
        let result = self.attempts.add(seq, (self.write)(self.channel, sendable));
        self.answers.extend(result.map(|result| (seq, result)));
    }

    /// The number of writes and confirms for which this thread is woken.
    fn wakes(&self, confirms_may_wait: bool) -> usize {
        match self.has_room() && !self.waiting.is_empty() {
            true => 0, // `fill` had no room, and has some now
            false if confirms_may_wait && !self.is_silent => WAKES.min(self.config.window / 8).max(1),
            false => 1,
        }
    }

    /// Returns true if a check must be scheduled. With no open message there is none, and the thread sleeps.
    fn arm_check(&mut self) -> bool {
        let arm = !self.check_armed && !self.open.is_empty();
        self.check_armed |= arm;
        arm
    }

    fn check_fired(&mut self) {
        self.check_armed = false;
        self.is_silent = !self.attempts.are_woken();
    }

    /// Takes every answer that lapin has resolved so far: the complete drain that `returns` requires.
    fn drain(&mut self) {
        self.is_silent &= !self.attempts.take_ready(&mut self.answers);
        let mut answers = std::mem::take(&mut self.answers);
        for (seq, result) in answers.drain(..) {
            match result {
                Ok(Confirmation::Ack(carried)) => self.confirms.push(answer(seq, true, carried)),
                Ok(Confirmation::Nack(carried)) => self.confirms.push(answer(seq, false, carried)),
                Ok(Confirmation::NotRequested) => self.break_off(0, Fault::new(DownReason::Protocol, "no confirms")),
                Err(error) => self.break_off(connect::specificity(&error), connect::fault(&error)),
            }
        }
        self.answers = answers; // its memory is used again
        if self.confirms.is_empty() {
            return;
        }
        let at = self.last_bytes.at();
        self.returns.drained(&mut self.confirms, &mut self.verdicts);
        let mut verdicts = std::mem::take(&mut self.verdicts);
        for (seq, outcome) in verdicts.drain(..) {
            let Some(open) = self.open.take(seq) else { continue };
            self.open_bytes -= open.body_bytes;
            self.watchdog.message_answered();
            match outcome {
                Outcome::Confirmed => self.watchdog.message_confirmed(),
                Outcome::Nacked => self.watchdog.message_refused(Instant::now()),
                _ => {}
            }
            let handle = open.handle;
            self.outcomes.push(Answered { handle, outcome, at });
        }
        self.verdicts = verdicts;
    }

    // ---- unconfirmed messages ---------------------------------------------------------------------------------------

    /// Since when the broker owes bytes or the answer of the oldest message without one.
    fn oldest(&self) -> Option<Instant> {
        Some(self.open.oldest()?.transfer.owes_since(self.limits).into())
    }

    /// Records what the broker has taken of the open messages since the last look. The messages are written in order, so
    /// those that are not yet are the last ones.
    fn look_at_progress(&mut self, now: Instant) {
        if !self.has_unsent || now < self.next_look() {
            return;
        }
        let (written, taken) = (self.sent_bytes.written(), self.sent_bytes.taken().max(self.taken));
        let more = taken - std::mem::replace(&mut self.taken, taken);
        let unwritten_from = self.open.next() - self.attempts.unwritten() as u64;
        (self.looked_at, self.has_unsent) = (now, false);
        for (seq, open) in self.open.iter_mut().filter(|(_, open)| !open.transfer.is_sent()) {
            open.transfer.took(more, self.limits, now.into_std());
            if seq < unwritten_from && *open.end.get_or_insert(written) <= taken {
                open.transfer.sent(now.into_std());
            }
            self.has_unsent |= !open.transfer.is_sent();
        }
        if more > 0 {
            self.watchdog.bytes_taken(now);
        }
    }

    /// When the progress is to be looked at again. Bytes that were taken since then must count before the broker seems
    /// to be silent.
    fn next_look(&self) -> Instant {
        self.looked_at + look_every(self.config.patience.min(self.limits.timeout))
    }

    /// Reports when messages are unconfirmed for too long, and when they no longer are.
    fn check_stall(&mut self, intake: &Intake<'_>) {
        if self.blocked || self.stop_at.is_some() {
            return; // the broker announced the delay, or the session ends anyway
        }
        let now = Instant::now();
        self.look_at_progress(now);
        let oldest = self.oldest();
        let before = self.watchdog.phase();
        let is_reported = self.watchdog.stall.as_ref().is_some_and(Stall::is_reported);
        match self.watchdog.check(now, oldest) {
            None if is_reported => intake.report_state(ConnectionState::Connected),
            None => {}
            Some(stall) => {
                self.timer_armed &= before == Some(stall.phase); // the timer of the new phase may be due earlier
                if stall.is_log_due(now) {
                    intake.report_state(ConnectionState::Unconfirmed {
                        messages: self.open.len(),
                        seconds: (now - stall.since).as_secs(),
                        is_alive: stall.phase != Phase::Probing,
                    });
                }
            }
        }
    }

    /// Gives up the messages that are still open. Publishing had paused, so these are the messages that the broker does
    /// not confirm.
    fn give_up_open(&mut self, reason: &str, alone: bool) {
        self.watchdog.resends(Instant::now());
        self.lose_waiting(reason);
        for open in self.open.take_all() {
            self.outcomes.push(Answered::none(open.handle, reason, alone));
        }
    }

    /// Gives up a connection on which the broker neither confirms nor answers, although it answers on another one.
    fn give_up_connection(&mut self) {
        let detail = format!(
            "{} messages unconfirmed; the broker answers only on another connection",
            self.open.len()
        );
        self.watchdog.resends(Instant::now());
        self.break_off(u8::MAX, Fault::new(DownReason::Timeout, detail));
    }

    // ---- the next connection ----------------------------------------------------------------------------------------

    /// Whether the next connection, which is open, takes over now. From the first call on nothing is published here:
    /// messages of a key must not overtake each other. Waits for confirms for no longer than at a stop. Does not begin
    /// while the broker is slow: each message would be sent twice.
    fn hands_over(&mut self, now: Instant) -> bool {
        if self.open.is_empty() {
            return true;
        }
        match self.stop_at {
            None if !self.blocked && self.watchdog.is_calm() => {
                self.stop_at = Some(now + STOP_GRACE_MAX);
                self.timer_armed = false;
            }
            Some(at) if at <= now => {
                self.give_up_open(
                    "the broker did not confirm the message before its connection was replaced",
                    false,
                );
                return true;
            }
            _ => {}
        }
        false
    }

    fn on_event(&mut self, event: LapinEvent, intake: &Intake<'_>) {
        match event {
            LapinEvent::ConnectionBlocked(reason) => {
                self.blocked = true;
                intake.report_state(ConnectionState::Blocked { reason });
            }
            LapinEvent::ConnectionUnblocked => {
                self.blocked = false;
                let now = Instant::now().into_std();
                self.open.iter_mut().for_each(|(_, open)| open.transfer.resume(now));
                intake.report_state(ConnectionState::Connected);
            }
            LapinEvent::Error(error) => self.break_off(connect::specificity(&error), connect::fault(&error)),
            _ => {}
        }
    }

    fn break_off(&mut self, specificity: u8, fault: Fault) {
        if self.broken.as_ref().is_none_or(|(known, _)| specificity > *known) {
            self.broken = Some((specificity, fault));
        }
    }

    /// Returns true if the timer must be set: a message is outstanding, and the timer is not running yet.
    fn arm_timer(&mut self) -> bool {
        let waits = !self.open.is_empty() || self.watchdog.stall.is_some();
        let arm = !self.timer_armed && (self.stop_at.is_some() || (waits && !self.blocked));
        self.timer_armed |= arm;
        arm
    }

    fn next_timeout(&self) -> Instant {
        let oldest = self.oldest().unwrap_or_else(Instant::now);
        let check = self.stop_at.unwrap_or_else(|| self.watchdog.next_check(oldest));
        let next = check.min(oldest + self.limits.timeout);
        match self.has_unsent {
            true => next.min(self.next_look()),
            false => next,
        }
    }

    /// The timer was set for the message that was the oldest then. Checks whether a timeout is due now.
    fn timer_fired(&mut self, stopping: bool) {
        self.timer_armed = false;
        if stopping && self.stop_at.is_some_and(|at| at <= Instant::now()) {
            self.break_off(0, Fault::new(DownReason::Closed, "the publisher was stopped"));
        } else if let Some(late) = self.lateness() {
            self.break_off(u8::MAX, Fault::new(DownReason::Timeout, late));
        }
    }

    /// Why the oldest message is out of time, if it is.
    fn lateness(&mut self) -> Option<String> {
        let now = Instant::now();
        self.look_at_progress(now);
        let (now, oldest) = (now.into_std(), self.open.oldest()?.transfer);
        let is_late = !self.blocked && now >= oldest.ends_at(self.limits);
        is_late.then(|| oldest.lateness(self.limits, "confirm", now))
    }

    fn begin_stop(&mut self, StopBy(deadline): StopBy) {
        let left = deadline.saturating_duration_since(std::time::Instant::now());
        let grace = if self.blocked {
            Duration::ZERO
        } else {
            STOP_GRACE_MAX.min(left / 3)
        };
        self.stop_at = Some(Instant::now() + grace);
        self.timer_armed = false;
        self.lose_waiting("the publisher was stopped");
    }

    fn lose_waiting(&mut self, reason: &str) {
        let lost = self
            .waiting
            .drain(..)
            .map(|message| Answered::lost(message.handle, reason));
        self.outcomes.extend(lost);
    }

    /// The most specific reason for the end of this connection. The first error often says only that the connection has
    /// ended.
    async fn find_cause(&mut self, mut events: Pin<&mut impl Stream<Item = LapinEvent>>) -> Fault {
        let until = Instant::now() + connect::CAUSE_LIMIT;
        while self.stop_at.is_none() && matches!(self.broken, Some((0, _))) {
            match timeout(until - Instant::now(), events.next()).await {
                Ok(Some(LapinEvent::Error(error))) => {
                    self.break_off(connect::specificity(&error), connect::fault(&error))
                }
                Ok(Some(_)) => {}
                Ok(None) | Err(_) => break,
            }
        }
        self.drain();
        let fault = self.broken.take().map(|(_, fault)| fault);
        let mut fault = fault.unwrap_or_else(|| Fault::new(DownReason::Closed, "the connection has ended"));
        if fault.reason == DownReason::ExchangeMismatch {
            fault.reason = DownReason::Closed; // after a publish, 406 concerns the message and not the exchange
        }
        fault
    }

    /// Gives each open or waiting message its last outcome.
    fn abandon(&mut self, fault: &Fault) {
        let reason = fault.to_string();
        self.lose_waiting(&reason);
        let alone = self.open.len() == 1 && !self.is_ended_here();
        for open in self.open.take_all() {
            let refused = refusal(&open, &self.config.exchange, &fault.detail);
            self.outcomes.push(match refused {
                Some(reason) => Answered::now(open.handle, Outcome::Refused { reason }),
                None => Answered::none(open.handle, &reason, alone),
            });
        }
    }

    /// Whether the worker ends the connection, by a stop or because its lease is over.
    fn is_ended_here(&self) -> bool {
        self.stop_at.is_some() || self.config.deadline.has_passed()
    }
}

/// Publishes one message. The first poll puts it into lapin's buffer; the future completes when it is written.
async fn write(channel: &Channel, message: Sendable) -> lapin::Result<PublisherConfirm> {
    // Mandatory: an unroutable message is returned instead of vanishing behind an ack.
    let options = BasicPublishOptions {
        mandatory: true,
        immediate: false,
    };
    let Sendable {
        exchange,
        routing_key,
        properties,
        body,
    } = message;
    channel
        .basic_publish(exchange, routing_key, options, &body, properties)
        .await
}

fn answer(seq: u64, acked: bool, carried: Option<BasicReturnMessage>) -> ConfirmAnswer {
    let carried = carried.map(|message| {
        let message_id = message.properties.message_id().as_ref();
        Box::new(ReturnedMessage {
            message_id: message_id.map(ToString::to_string).unwrap_or_default(),
            code: message.reply_code,
            reason: return_reason(&message),
        })
    });
    ConfirmAnswer { seq, acked, carried }
}

/// Why RabbitMQ returned a message, for the user: which exchange had no queue for which routing key.
fn return_reason(message: &BasicReturnMessage) -> String {
    let delivery = &message.delivery;
    let cause = match (message.reply_code, delivery.exchange.as_str()) {
        (NO_ROUTE, "") => format!("there is no queue \"{}\"", delivery.routing_key),
        (NO_ROUTE, exchange) => format!(
            "no queue is bound to exchange \"{exchange}\" for routing key \"{}\"",
            delivery.routing_key
        ),
        _ => "the broker returned it".to_owned(),
    };
    format!("{cause} ({} {})", message.reply_code, message.reply_text)
}

/// Why this message can never be sent, if the broker closed the channel because of it, which fails everything
/// outstanding. Some error texts identify the message. It is then refused, so that it cannot close the next channel as
/// well.
fn refusal(open: &OpenMessage, exchange: &str, detail: &str) -> Option<String> {
    // rabbit_channel:check_msg_size/3: "message size 134217729 is larger than configured max size 134217728". The size
    // is that of the body.
    let too_large = bytes_after(detail, "message size ").zip(bytes_after(detail, "max size "));
    if let Some((size, limit)) = too_large
        && size > limit
        && open.body_bytes > limit
    {
        let bytes = open.body_bytes;
        return Some(format!(
            "the body has {bytes} bytes; max_message_size of the broker is {limit}"
        ));
    }
    // rabbit_channel:check_topic_authorisation: "access to topic 'k' in exchange 'x' in vhost '/' refused for user
    // 'u'".
    let topic = format!(
        "access to topic '{}' in exchange '{exchange}' in vhost",
        open.routing_key
    );
    detail.contains(&topic).then(|| detail.to_owned())
}

fn bytes_after(text: &str, label: &str) -> Option<usize> {
    let rest = &text[text.find(label)? + label.len()..];
    let digits = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
    rest[..digits].parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open(body_bytes: usize) -> OpenMessage {
        OpenMessage {
            handle: 0,
            transfer: Transfer::begin(Instant::now().into_std()),
            end: None,
            body_bytes,
            routing_key: "k".to_owned().into(),
        }
    }

    fn refusal(open: &OpenMessage, detail: &str) -> Option<String> {
        super::refusal(open, "x", detail)
    }

    #[test]
    fn the_brokers_text_identifies_the_message_that_was_too_large() {
        for text in [
            "PRECONDITION_FAILED - message size 2000 is larger than configured max size 1000",
            "PRECONDITION_FAILED - message size 2000 is larger than max size 1000",
        ] {
            let refused = |bytes| {
                Some(format!(
                    "the body has {bytes} bytes; max_message_size of the broker is 1000"
                ))
            };
            assert_eq!(refusal(&open(2000), text), refused(2000));
            assert_eq!(refusal(&open(1001), text), refused(1001));
            assert_eq!(refusal(&open(1000), text), None);
        }
        for other in [
            "PRECONDITION_FAILED - something else",
            "message size x is larger than max size ",
            // The next connect checks the exchange.
            "NOT_FOUND - no exchange 'x' in vhost '/'",
            "ACCESS_REFUSED - cannot publish to internal exchange 'x' in vhost '/'",
        ] {
            assert_eq!(refusal(&open(2000), other), None);
        }
    }

    #[test]
    fn a_forbidden_topic_is_the_fault_of_the_messages_with_it() {
        for (topic, is_refused) in [("k", true), ("another", false)] {
            let text = format!("access to topic '{topic}' in exchange 'x' in vhost '/' refused for user 'u'");
            assert_eq!(refusal(&open(1), &text).is_some(), is_refused, "{text}");
        }
    }
}
