//! A connection while it is in use: send within the window, take answers, time out, give up.
//!
//! Runs on the publisher thread, from `Connected` to `Down`. It is a pipeline without barriers: batches follow each
//! other on one channel in order. An outcome is reported as soon as it is certain, or, if the worker lets confirms wait,
//! with some others or a moment later.

use super::attempts::Numbered;
use super::endpoints::{Endpoints, Opened, Successor};
use super::link::{Broken, CAUSE_LIMIT, ChannelEvent, Connection, Connector, PublishChannel, Terms, Wait, Wire};
use super::unconfirmed::{ConfirmWatchdog, Phase, Stall};
use crate::down::{DownReason, Fault, NO_ANSWER};
use crate::event::{Answered, ConnectionState};
use crate::idle::OpenConnection;
use crate::intake::{Intake, STOPPED, StopBy};
use crate::transfer::{Transfer, TransferLimits, look_every};
use crate::{Outcome, Publication, Text};
use std::collections::VecDeque;
use std::future::{Future, pending};
use std::pin::{Pin, pin};
use std::time::Duration;
use tokio::time::{Instant, Sleep, sleep_until, timeout_at};

/// The limit of the bodies of outstanding messages, in bytes. A peer may send messages back whole, so the window bounds
/// memory twice.
const WINDOW_BYTES_MAX: usize = 64 << 20;
/// The time limit for outstanding answers after a stop request. Each answer spares a duplicate at the next start.
const STOP_GRACE_MAX: Duration = Duration::from_secs(5);
const ENDED: &str = "the connection has ended";

/// A connection in use, and what it is served with.
pub(crate) struct ServedConnection<'a, C: Connector> {
    pub(crate) opened: &'a mut Opened<C>,
    pub(crate) endpoints: &'a Endpoints<'a, C>,
    pub(crate) watchdog: &'a mut ConfirmWatchdog,
    pub(crate) place: &'a mut OpenConnection,
    pub(crate) successor: Successor<'a, C>,
}

/// Why the publish loop is over, other than by a stop request.
pub(crate) enum PublishLoopEnd<C: Connector> {
    Connection(ConnectionEnd<C>),
    /// The channel is replaced, and the connection kept: the peer refused a message, or it answers but does not confirm
    /// what it received. Then unconfirmed messages are lost, so the worker sends them again. `waiting` is to be sent
    /// next, after the `rest`.
    Channel {
        waiting: VecDeque<Publication>,
        rest: Option<Duration>,
    },
}

/// Why a connection is over.
pub(crate) enum ConnectionEnd<C: Connector> {
    /// It failed, which was reported to the worker.
    Failed(Fault),
    /// There was nothing to do over it, and no message is open.
    Idle,
    /// It has lived for long. No message is open, and `waiting` is to be sent over the next one.
    Replaced {
        by: Box<Opened<C>>,
        waiting: VecDeque<Publication>,
    },
}

/// Serves until a stop request, a failure of the connection, or the end of a channel that is given up. `waiting` goes
/// first. At its end every message that it took has its outcome, or is returned.
pub(crate) async fn serve<C: Connector>(
    served: &mut ServedConnection<'_, C>,
    intake: &mut Intake<'_>,
    waiting: VecDeque<Publication>,
) -> Result<PublishLoopEnd<C>, StopBy> {
    let ServedConnection {
        opened,
        endpoints,
        watchdog,
        place,
        successor,
    } = served;
    let address = opened.address;
    let mut ended = pin!(opened.wire.ended());
    let mut elsewhere: Option<Pin<Box<dyn Future<Output = bool> + '_>>> = None;
    let mut publish_loop = PublishLoop::new(opened.connection.channel(), &endpoints.terms, watchdog, waiting);
    loop {
        publish_loop.fill(intake);
        publish_loop.take(intake);
        intake.send_outcomes();
        publish_loop.check_stall(intake);
        if let Some(end) = publish_loop.ends(successor, intake) {
            return Ok(end);
        }
        if publish_loop.is_over() {
            break;
        }
        if publish_loop.watchdog.wants_probe() {
            publish_loop.channel.probe();
        }
        let is_open = publish_loop.is_open();
        if publish_loop.watchdog.wants_probe_elsewhere(Instant::now()) && elsewhere.is_none() && !publish_loop.stops() {
            elsewhere = Some(Box::pin(endpoints.answer_apart_from(address)));
        }
        publish_loop.set_alarm();
        let wait = publish_loop.wait(!publish_loop.stops() && intake.main_lets_confirms_wait());
        let is_idle = is_open && publish_loop.is_idle();
        place.set_idle(is_idle);
        let want_batch = !publish_loop.stops() && publish_loop.waiting.is_empty() && publish_loop.has_room();
        // A loop that always finds work must still let the runtime poll the socket.
        tokio::task::coop::consume_budget().await;
        tokio::select! {
            biased;
            () = &mut ended => publish_loop.break_off(0, Fault::new(DownReason::CLOSED, ENDED)),
            event = publish_loop.channel.event() => publish_loop.on_event(event, intake),
            () = publish_loop.alarm.rings() => publish_loop.look(),
            has_answered = finished(&mut elsewhere) => {
                elsewhere = None;
                publish_loop.watchdog.answered_elsewhere(Instant::now(), has_answered);
                publish_loop.alarm.unset();
            }
            next = intake.next_or_stop(want_batch), if !publish_loop.stops() => match next {
                Ok(handed) => publish_loop.waiting = intake.accept(handed).into(),
                Err(order) => publish_loop.begin_stop(order, intake),
            },
            () = place.ends(), if is_idle => return Ok(PublishLoopEnd::Connection(ConnectionEnd::Idle)),
            () = successor.opens(), if !publish_loop.stops() => {}
            () = publish_loop.channel.answers(wait) => {}
        }
    }
    let ended = publish_loop.end(endpoints, intake).await;
    ended.map(|fault| PublishLoopEnd::Connection(ConnectionEnd::Failed(fault)))
}

async fn finished(probe: &mut Option<Pin<Box<dyn Future<Output = bool> + '_>>>) -> bool {
    match probe {
        Some(probe) => probe.await,
        None => pending().await,
    }
}

/// What the publish loop is about to do.
enum Course {
    /// It sends messages.
    Open,
    /// It sends nothing more: the next connection takes over once all are answered, or at this time.
    HandsOver { until: Instant },
    /// It sends nothing more: the worker ordered it to end, and it waits for answers until this time.
    Stops { order: StopBy, until: Instant },
}

/// A timer that is set for the next look.
struct Alarm {
    sleep: Pin<Box<Sleep>>,
    is_set: bool,
}

impl Alarm {
    fn new() -> Self {
        Self {
            sleep: Box::pin(sleep_until(Instant::now())),
            is_set: false,
        }
    }

    fn set(&mut self, at: Instant) {
        self.sleep.as_mut().reset(at);
        self.is_set = true;
    }

    /// Something is due earlier, or not at all.
    fn unset(&mut self) {
        self.is_set = false;
    }

    async fn rings(&mut self) {
        match self.is_set {
            true => self.sleep.as_mut().await,
            false => pending().await,
        }
        self.is_set = false;
    }
}

/// A message without an outcome.
struct OpenMessage {
    handle: u64,
    transfer: Transfer,
    /// How many bytes the peer must have taken of the connection to have all of this message. None = not all of it is
    /// written.
    end: Option<u64>,
    body_bytes: usize,
    address: Text,
}

struct PublishLoop<'a, L> {
    channel: L,
    terms: &'a Terms,
    limits: TransferLimits,
    course: Course,
    /// The rest of the batch that was taken last.
    waiting: VecDeque<Publication>,
    /// Messages without an outcome, by number, which is the order of sending. At most `terms.window`.
    open: Numbered<OpenMessage>,
    open_bytes: usize,
    /// Empty between takes: only its memory is kept.
    answered: Vec<(u64, Outcome)>,
    /// What the peer had taken of the connection when that was last looked at, and when that was.
    taken: u64,
    looked_at: Instant,
    /// Whether the peer may not have all of the open messages.
    has_unsent: bool,
    is_blocked: bool,
    alarm: Alarm,
    watchdog: &'a mut ConfirmWatchdog,
    /// Why this connection is over. A more specific error replaces it.
    broken: Option<Broken>,
}

impl<'a, L: PublishChannel> PublishLoop<'a, L> {
    fn new(channel: L, terms: &'a Terms, watchdog: &'a mut ConfirmWatchdog, waiting: VecDeque<Publication>) -> Self {
        Self {
            terms,
            limits: TransferLimits {
                timeout: terms.answer_timeout,
                min_rate: terms.min_send_rate,
            },
            course: Course::Open,
            waiting,
            open: Numbered::default(),
            open_bytes: 0,
            answered: Vec::new(),
            taken: channel.progress().taken,
            looked_at: Instant::now(),
            has_unsent: false,
            is_blocked: channel.is_blocked(),
            alarm: Alarm::new(),
            watchdog,
            broken: None,
            channel,
        }
    }

    fn stops(&self) -> bool {
        matches!(self.course, Course::Stops { .. })
    }

    fn stop_order(&self) -> Option<StopBy> {
        match self.course {
            Course::Stops { order, .. } => Some(order),
            Course::Open | Course::HandsOver { .. } => None,
        }
    }

    /// When the publish loop ends, at the latest.
    fn ends_at(&self) -> Option<Instant> {
        match self.course {
            Course::Open => None,
            Course::HandsOver { until } | Course::Stops { until, .. } => Some(until),
        }
    }

    /// Whether neither the worker nor a failure ends it.
    fn is_open(&self) -> bool {
        !self.stops() && self.broken.is_none()
    }

    fn is_over(&self) -> bool {
        self.broken.is_some() || (self.stops() && self.open.is_empty())
    }

    fn has_room(&self) -> bool {
        !self.is_blocked
            && matches!(self.course, Course::Open)
            && !self.watchdog.pauses_publishing()
            && self.open.len() < self.terms.window
            && self.open_bytes < WINDOW_BYTES_MAX
            && self.channel.has_room()
    }

    /// Whether there is nothing to do, and nothing to wait for.
    fn is_idle(&self) -> bool {
        !self.is_blocked && self.watchdog.stall.is_none() && self.open.is_empty() && self.waiting.is_empty()
    }

    /// The end of the publish loop, if it is one of those that need no fault.
    fn ends<C: Connector>(
        &mut self,
        successor: &mut Successor<'_, C>,
        intake: &mut Intake<'_>,
    ) -> Option<PublishLoopEnd<C>> {
        if !self.is_open() {
            return None;
        }
        if successor.opened.is_some() && self.hands_over(Instant::now(), intake) {
            let by = successor.opened.take()?;
            intake.send_outcomes();
            if self.is_blocked {
                intake.report_state(ConnectionState::Connected);
            }
            let waiting = std::mem::take(&mut self.waiting);
            return Some(PublishLoopEnd::Connection(ConnectionEnd::Replaced { by, waiting }));
        }
        if self.watchdog.is_over(Instant::now()) {
            if self.watchdog.is_stuck() {
                self.give_up_connection();
                return None;
            }
            let alone = self.open.len() == 1;
            self.give_up_open("the broker answered but did not confirm the message", alone, intake);
            intake.send_outcomes();
            let (waiting, rest) = (VecDeque::new(), None);
            return Some(PublishLoopEnd::Channel { waiting, rest });
        }
        let is_renewed = self.watchdog.wants_channel() && self.open.is_empty();
        is_renewed.then(|| PublishLoopEnd::Channel {
            waiting: std::mem::take(&mut self.waiting),
            rest: self.watchdog.renews_channel(Instant::now()),
        })
    }

    // ---- messages ---------------------------------------------------------------------------------------------------

    /// Sends as many messages as the window allows.
    fn fill(&mut self, intake: &mut Intake<'_>) {
        while self.has_room() {
            let Some(publication) = self.waiting.pop_front() else {
                match intake.try_next() {
                    Some(batch) => self.waiting = batch.into(),
                    None => return,
                }
                continue;
            };
            if self.terms.deadline.has_passed() {
                self.waiting.push_front(publication);
                return self.break_off(u8::MAX, Fault::new(DownReason::CLOSED, "the lease has expired"));
            }
            self.send(publication, intake);
        }
    }

    fn send(&mut self, publication: Publication, intake: &mut Intake<'_>) {
        let (handle, body_bytes) = (publication.handle, publication.body.len());
        let address = publication.address.clone();
        if let Err(reason) = self.channel.send(self.open.next(), publication) {
            return intake.answer(Answered::now(handle, Outcome::Refused { reason }));
        }
        self.open.push(OpenMessage {
            handle,
            transfer: Transfer::begin(Instant::now().into_std()),
            end: None,
            body_bytes,
            address,
        });
        self.open_bytes += body_bytes;
        if !self.has_unsent {
            self.alarm.unset(); // the next look may be due earlier
        }
        self.has_unsent = true;
    }

    /// How long the thread may wait for answers.
    fn wait(&self, confirms_may_wait: bool) -> Wait {
        match self.has_room() && !self.waiting.is_empty() {
            true => Wait::Not, // `fill` had no room, and has some now
            false if confirms_may_wait => Wait::Some,
            false => Wait::One,
        }
    }

    /// Takes every outcome that is known so far.
    fn take(&mut self, intake: &mut Intake<'_>) {
        let taken = self.channel.take(&mut self.answered);
        if let Some(Broken { rank, fault }) = taken.broken {
            self.break_off(rank, fault);
        }
        let mut answered = std::mem::take(&mut self.answered);
        for (number, outcome) in answered.drain(..) {
            let Some(open) = self.open.take(number) else { continue };
            self.open_bytes -= open.body_bytes;
            self.watchdog.message_answered();
            match outcome {
                Outcome::Confirmed => self.watchdog.message_confirmed(),
                Outcome::Nacked => self.watchdog.message_refused(Instant::now()),
                _ => {}
            }
            let (handle, at) = (open.handle, taken.at);
            intake.answer(Answered { handle, outcome, at });
        }
        self.answered = answered; // its memory is used again
    }

    // ---- unconfirmed messages ---------------------------------------------------------------------------------------

    /// Since when the peer owes bytes or the answer of the oldest message without one.
    fn oldest(&self) -> Option<Instant> {
        Some(self.open.oldest()?.transfer.owes_since(self.limits).into())
    }

    /// Records what the peer has taken of the open messages since the last look. The messages are written in order, so
    /// those that are not yet are the last ones.
    fn look_at_progress(&mut self, now: Instant) {
        if !self.has_unsent || now < self.next_look() {
            return;
        }
        let progress = self.channel.progress();
        let taken = progress.taken.max(self.taken);
        let more = taken - std::mem::replace(&mut self.taken, taken);
        let unwritten_from = self.open.next() - progress.unwritten as u64;
        (self.looked_at, self.has_unsent) = (now, false);
        for (number, open) in self.open.iter_mut().filter(|(_, open)| !open.transfer.is_sent()) {
            open.transfer.record_taken(more, self.limits, now.into_std());
            if number < unwritten_from && *open.end.get_or_insert(progress.written) <= taken {
                open.transfer.sent(now.into_std());
            }
            self.has_unsent |= !open.transfer.is_sent();
        }
        if more > 0 {
            self.watchdog.bytes_taken(now);
        }
    }

    /// When the progress is to be looked at again. Bytes that were taken since then must count before the peer seems to
    /// be silent.
    fn next_look(&self) -> Instant {
        self.looked_at + look_every(self.terms.patience.min(self.limits.timeout))
    }

    /// Reports when messages are unconfirmed for too long, and when they no longer are.
    fn check_stall(&mut self, intake: &Intake<'_>) {
        if self.is_blocked || self.ends_at().is_some() {
            return; // the peer announced the delay, or the publish loop ends anyway
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
                if before != Some(stall.phase) {
                    self.alarm.unset(); // the new phase may be due earlier
                }
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

    /// Gives up the messages that are still open. Sending had paused, so these are the messages that the peer does not
    /// confirm.
    fn give_up_open(&mut self, reason: &str, alone: bool, intake: &mut Intake<'_>) {
        self.watchdog.resends(Instant::now());
        self.lose_waiting(reason, intake);
        for open in self.open.take_all() {
            intake.fail(Answered::none(open.handle, reason, alone));
        }
    }

    /// Gives up a connection on which the peer neither confirms nor answers, although it answers on another one.
    fn give_up_connection(&mut self) {
        let detail = format!(
            "{} messages unconfirmed; the broker answers only on another connection",
            self.open.len()
        );
        self.watchdog.resends(Instant::now());
        self.break_off(u8::MAX, Fault::new(DownReason::TIMEOUT, detail));
    }

    // ---- events and timers ------------------------------------------------------------------------------------------

    /// Whether the next connection, which is open, takes over now. From the first call on nothing is sent here:
    /// messages of a key must not overtake each other. Waits for answers for no longer than at a stop. Does not begin
    /// while the peer is slow: each message would be sent twice.
    fn hands_over(&mut self, now: Instant, intake: &mut Intake<'_>) -> bool {
        if self.open.is_empty() {
            return true;
        }
        match self.course {
            Course::Open if !self.is_blocked && self.watchdog.is_calm() => {
                self.course = Course::HandsOver {
                    until: now + STOP_GRACE_MAX,
                };
                self.alarm.unset();
            }
            Course::HandsOver { until } if until <= now => {
                self.give_up_open(
                    "the broker did not confirm the message before its connection was replaced",
                    false,
                    intake,
                );
                return true;
            }
            _ => {}
        }
        false
    }

    fn on_event(&mut self, event: ChannelEvent, intake: &Intake<'_>) {
        match event {
            ChannelEvent::Blocked(reason) => {
                self.is_blocked = true;
                intake.report_state(ConnectionState::Blocked { reason });
            }
            ChannelEvent::Unblocked => {
                self.is_blocked = false;
                let now = Instant::now().into_std();
                self.open.iter_mut().for_each(|(_, open)| open.transfer.resume(now));
                intake.report_state(ConnectionState::Connected);
            }
            ChannelEvent::Alive => {
                self.watchdog.answered(Instant::now());
                self.alarm.unset();
            }
            ChannelEvent::Broken(Broken { rank, fault }) => self.break_off(rank, fault),
        }
    }

    fn break_off(&mut self, rank: u8, fault: Fault) {
        if self.broken.as_ref().is_none_or(|known| rank > known.rank) {
            self.broken = Some(Broken { rank, fault });
        }
    }

    /// Sets the alarm unless it is set, or nothing is outstanding.
    fn set_alarm(&mut self) {
        let waits = !self.open.is_empty() || self.watchdog.stall.is_some();
        if !self.alarm.is_set && (self.ends_at().is_some() || (waits && !self.is_blocked)) {
            self.alarm.set(self.next_timeout());
        }
    }

    fn next_timeout(&self) -> Instant {
        let oldest = self.oldest().unwrap_or_else(Instant::now);
        let check = self.ends_at().unwrap_or_else(|| self.watchdog.next_check(oldest));
        let next = check.min(oldest + self.limits.timeout);
        match self.has_unsent {
            true => next.min(self.next_look()),
            false => next,
        }
    }

    /// The alarm was set for the message that was the oldest then. Checks whether a timeout is due now.
    fn look(&mut self) {
        match self.course {
            Course::Stops { until, .. } if until <= Instant::now() => {
                self.break_off(0, Fault::new(DownReason::CLOSED, STOPPED));
            }
            _ => {
                if let Some(late) = self.lateness() {
                    self.break_off(u8::MAX, Fault::coded(DownReason::TIMEOUT, NO_ANSWER, late));
                }
            }
        }
    }

    /// Why the oldest message is out of time, if it is.
    fn lateness(&mut self) -> Option<String> {
        let now = Instant::now();
        self.look_at_progress(now);
        let (now, oldest) = (now.into_std(), self.open.oldest()?.transfer);
        let is_late = !self.is_blocked && now >= oldest.ends_at(self.limits);
        is_late.then(|| oldest.lateness(self.limits, "confirm", now))
    }

    // ---- the end ----------------------------------------------------------------------------------------------------

    fn begin_stop(&mut self, order: StopBy, intake: &mut Intake<'_>) {
        let left = order.0.saturating_duration_since(std::time::Instant::now());
        let grace = match self.is_blocked {
            true => Duration::ZERO,
            false => STOP_GRACE_MAX.min(left / 3),
        };
        let until = Instant::now() + grace;
        self.course = Course::Stops { order, until };
        self.alarm.unset();
        self.lose_waiting(STOPPED, intake);
    }

    fn lose_waiting(&mut self, reason: &str, intake: &mut Intake<'_>) {
        for message in self.waiting.drain(..) {
            intake.fail(Answered::lost(message.handle, reason));
        }
    }

    /// Ends the messages of a connection that is over. Returns why, which it has reported; Err: a stop request.
    async fn end<C: Connector>(
        &mut self,
        endpoints: &Endpoints<'_, C>,
        intake: &mut Intake<'_>,
    ) -> Result<Fault, StopBy> {
        let mut fault = self.cause(intake).await;
        let stop = self.stop_order();
        match stop {
            Some(_) => fault = Fault::new(DownReason::CLOSED, STOPPED),
            None => {
                fault = endpoints.at_endpoint(fault);
                intake.report_down(&fault);
            }
        }
        self.abandon(&fault, intake);
        intake.send_outcomes();
        stop.map_or(Ok(fault), Err)
    }

    /// The most specific reason for the end of this connection. The first error often says only that the connection has
    /// ended.
    async fn cause(&mut self, intake: &mut Intake<'_>) -> Fault {
        let until = Instant::now() + CAUSE_LIMIT;
        while self.ends_at().is_none() && self.broken.as_ref().is_some_and(|broken| broken.rank == 0) {
            match timeout_at(until, self.channel.event()).await {
                Ok(ChannelEvent::Broken(Broken { rank, fault })) => self.break_off(rank, fault),
                Ok(_) => {}
                Err(_) => break,
            }
        }
        self.take(intake);
        let fault = self.broken.take().map(|broken| broken.fault);
        fault.unwrap_or_else(|| Fault::new(DownReason::CLOSED, ENDED))
    }

    /// Gives each open or waiting message its last outcome.
    fn abandon(&mut self, fault: &Fault, intake: &mut Intake<'_>) {
        let reason = fault.to_string();
        self.lose_waiting(&reason, intake);
        let is_ended_here = self.ends_at().is_some() || self.terms.deadline.has_passed();
        let alone = self.open.len() == 1 && !is_ended_here;
        for open in self.open.take_all() {
            let refused = self
                .channel
                .refusal(&fault.finding.detail, &open.address, open.body_bytes);
            match refused {
                Some(reason) => intake.answer(Answered::now(open.handle, Outcome::Refused { reason })),
                None => intake.fail(Answered::none(open.handle, &reason, alone)),
            }
        }
    }
}
