//! The connection of a destination: its publisher if one can start, its state, and the number of messages that it may
//! have in flight. `destination` calls it on the worker's thread.

use crate::runtime::{DestinationPublisher, Runtime};
use crate::settings::DEFAULT_DESTINATION;
use crate::status::{ConnectionStatus, State};
use outbox_core::finding::Finding;
use outbox_core::message::{Outcome, Publication};
use outbox_core::slow_start::SlowStart;
use outbox_transport::kind::Target;
use outbox_transport::{Answered, DownReason, NotStarted, PublisherEvent};
use std::time::{Duration, Instant};

/// How long to wait before another start of a publisher that could not start (no URL, no password file) or whose thread
/// ended.
const RETRY_START: Duration = Duration::from_secs(1);
/// How long a connection that is replaced may take to close. No pass waits for it; a third of it is for the answers to
/// messages on their way.
const CLOSE: Duration = Duration::from_secs(3);
/// The same for one whose messages have had no answer for long.
const GIVE_UP: Duration = Duration::from_millis(600);

/// The answers to messages that the publisher brought.
pub type Outcomes = Vec<Answered>;

pub struct DestinationConnection<P> {
    /// Err: why the destination cannot be used.
    target: Result<Target, Finding>,
    name: String,
    publisher: Option<P>,
    /// Why the connection is being closed; None = it is not.
    closing: Option<&'static str>,
    next_start: Instant,
    window: usize,
    slow_start: SlowStart,
    pub status: ConnectionStatus,
    /// How sending failed; None = since then a message was answered, or there was none to send. That a connection is there
    /// again says nothing of it.
    failure: Option<ConnectionStatus>,
}

impl<P: DestinationPublisher> DestinationConnection<P> {
    pub fn new(runtime: &impl Runtime, destination: &str, target: Result<Target, Finding>) -> Self {
        let name = match destination {
            DEFAULT_DESTINATION => format!("outbox: {}", runtime.id()),
            name => format!("outbox: {} {name}", runtime.id()),
        };
        let window = runtime.bounds().window;
        Self {
            target,
            name,
            publisher: None,
            closing: None,
            next_start: runtime.now(),
            window,
            slow_start: SlowStart::full(window),
            status: ConnectionStatus::plain(State::Starting, None),
            failure: None,
        }
    }

    /// The status, or while there is a connection the failure that no message has disproved.
    pub fn known_status(&self) -> &ConnectionStatus {
        let is_trying = matches!(self.status.state, State::Connected | State::Connecting);
        self.failure.as_ref().filter(|_| is_trying).unwrap_or(&self.status)
    }

    /// Records that there is no message to send.
    pub fn prove(&mut self) {
        self.failure = None;
    }

    /// Takes over new settings. Closes the connection if the target or a file that it reads has changed.
    pub fn reconfigure(&mut self, target: Result<Target, Finding>, now: Instant) {
        if target != self.target || self.is_outdated() {
            self.target = target;
            self.failure = None;
            self.slow_start = SlowStart::full(self.window);
            self.close("the settings of the broker changed", now);
        }
    }

    /// Begins to close the connection. Once `take` says that it is closed, `ensure` starts another, without a wait after a
    /// failed start.
    pub fn close(&mut self, reason: &'static str, now: Instant) {
        self.close_within(CLOSE, reason, now);
    }

    fn close_within(&mut self, limit: Duration, reason: &'static str, now: Instant) {
        self.next_start = now;
        if let Some(publisher) = &self.publisher {
            publisher.request_stop(limit);
            self.closing = Some(reason);
            self.status = ConnectionStatus::plain(State::Connecting, None);
        }
    }

    /// The same for a connection whose messages got no answer: the next one begins with one message.
    pub fn give_up(&mut self, reason: &'static str, now: Instant) {
        self.slow_start.went_down();
        self.close_within(GIVE_UP, reason, now);
    }

    pub fn is_closed(&self) -> bool {
        self.publisher.is_none()
    }

    pub fn is_closing(&self) -> bool {
        self.closing.is_some()
    }

    /// Whether `take` has something to take.
    pub fn has_events(&self) -> bool {
        self.publisher.as_ref().is_some_and(P::has_events)
    }

    /// When there is something to do although the publisher reports nothing; None = at no time.
    pub fn next_step(&self) -> Option<Instant> {
        self.is_closed().then_some(self.next_start)
    }

    /// Starts the publisher if there is none and the wait after a failed start is over.
    pub fn ensure<R: Runtime<Publisher = P>>(&mut self, runtime: &R) {
        if self.publisher.is_some() || runtime.now() < self.next_start {
            return;
        }
        let target = self.target.as_ref().map_err(|finding| finding.clone().into());
        match target.and_then(|target| runtime.start(target, &self.name)) {
            Ok(publisher) => {
                self.publisher = Some(publisher);
                self.status = ConnectionStatus::plain(State::Connecting, None);
            }
            Err(error) => {
                self.next_start = runtime.now() + RETRY_START;
                self.status = match error {
                    NotStarted::Unusable(finding) => ConnectionStatus::plain(State::Unconfigured, Some(finding)),
                    NotStarted::ProcessLimit(detail) => ConnectionStatus::down(DownReason::PROCESS_LIMIT, detail),
                };
            }
        }
    }

    /// Whether the publisher would read other files now. A new password does not end a working connection: the broker
    /// may not know it yet.
    fn is_outdated(&self) -> bool {
        let needs_another =
            |publisher: &P| publisher.has_new_certificates() || !self.is_connected() && publisher.has_new_password();
        self.publisher.as_ref().is_some_and(needs_another)
    }

    pub fn is_connected(&self) -> bool {
        self.status.state == State::Connected
    }

    /// The number of messages that may be claimed and not settled, if it is below the full window. It is after a
    /// failure of the connection, and grows with each answered message.
    pub fn small_window(&self) -> Option<usize> {
        Some(self.slow_start.window()).filter(|window| *window < self.window)
    }

    /// Hands a batch over to the publisher. Err: no room or no publisher; the batch comes back.
    pub fn publish(&self, batch: Vec<Publication>) -> Result<(), Vec<Publication>> {
        match &self.publisher {
            Some(publisher) if self.closing.is_none() => publisher.publish(batch),
            _ => Err(batch),
        }
    }

    /// Called before each wait: sets how many undrained confirms wake this worker.
    pub fn wake_after(&self, confirms: usize) {
        if let Some(publisher) = &self.publisher {
            publisher.wake_after(confirms);
        }
    }

    /// Takes the events of the publisher: returns the outcomes and keeps the last state. The text says why the connection is
    /// closed, if it is from now on: no more outcomes come then. `all`: the destinations of the worker.
    pub fn take(&mut self, all: &[Target], now: Instant) -> (Outcomes, Option<&'static str>) {
        let Some(publisher) = &mut self.publisher else {
            return (Vec::new(), None);
        };
        let mut outcomes = Outcomes::new();
        let mut ended = None;
        let mut is_down = false;
        let peer = self.target.as_ref().ok().map(Target::peer);
        for event in publisher.drain() {
            match event {
                PublisherEvent::Outcomes(more) => {
                    if more.iter().any(|answered| proves(&answered.outcome)) {
                        self.failure = None;
                    }
                    outcomes.extend(more);
                }
                PublisherEvent::State(_) if self.closing.is_some() => {}
                PublisherEvent::State(state) => {
                    let before = std::mem::replace(&mut self.status, ConnectionStatus::of(state, peer, all));
                    if self.status.state == State::Down {
                        is_down = true;
                        if matches!(before.state, State::Connected | State::Blocked) {
                            self.failure = Some(self.status.clone());
                        }
                    }
                }
                PublisherEvent::Ended(why) => ended = Some(why),
            }
        }
        let is_answered = |answered: &&Answered| answered.outcome.is_answer();
        self.slow_start.answered(outcomes.iter().filter(is_answered).count());
        let has = |kind: Outcome| outcomes.iter().any(|answered| answered.outcome == kind);
        let died = ended.as_ref().and_then(Option::as_ref);
        if is_down || died.is_some() || (has(Outcome::Nacked) && !has(Outcome::Confirmed)) {
            self.slow_start.went_down();
        }
        if let Some(why) = died {
            self.next_start = now + RETRY_START;
            self.status = ConnectionStatus::down(DownReason::PROTOCOL, format!("the publisher thread ended: {why}"));
        }
        if ended.is_some() {
            self.publisher = None;
            return (outcomes, Some(self.closing.take().unwrap_or("the publisher ended")));
        }
        if is_down && self.is_outdated() {
            self.close("the password or a certificate changed", now);
        }
        (outcomes, None)
    }

    /// Makes the publisher begin to end, so that a later `stop` waits less.
    pub fn request_stop(&self, limit: Duration) {
        if let Some(publisher) = &self.publisher {
            publisher.request_stop(limit);
        }
    }

    /// Closes the connection within `limit` and returns the last outcomes. A message without an outcome may have
    /// arrived or not.
    pub fn stop(&mut self, limit: Duration) -> Outcomes {
        let Some(mut publisher) = self.publisher.take() else {
            return Vec::new();
        };
        self.closing = None;
        publisher.stop(limit);
        let outcomes = |event| match event {
            PublisherEvent::Outcomes(outcomes) => outcomes,
            _ => Vec::new(),
        };
        publisher.drain().into_iter().flat_map(outcomes).collect()
    }
}

/// Whether the outcome shows that messages reach the peer, and that it takes some.
fn proves(outcome: &Outcome) -> bool {
    matches!(
        outcome,
        Outcome::Confirmed | Outcome::Failed { .. } | Outcome::Refused { .. } | Outcome::Returned { .. }
    )
}
