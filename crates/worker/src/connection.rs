//! The connection of a destination: a publisher while there can be one, what is known of it, and how much it is trusted with.

use crate::host::{Host, Publisher};
use crate::settings::DEFAULT_DESTINATION;
use crate::status::{Reason, State, Status};
use outbox_core::message::{Outcome, Publication};
use outbox_core::trust::Trust;
use outbox_transport::target::Target;
use outbox_transport::{Answered, ConnectionState, DownReason, Event};
use std::time::{Duration, Instant};

/// How often a publisher that could not start (no url, no password file) is tried again.
const RETRY_START: Duration = Duration::from_secs(1);
/// How long a connection that is given up for another may take to close.
const CLOSE: Duration = Duration::from_millis(500);
/// The same for one whose thread has ended.
const DEAD_LETTER: Duration = Duration::from_millis(100);

/// What the peer said.
pub type Outcomes = Vec<Answered>;

pub struct Connection<P> {
    /// Or why there is none.
    target: Result<Target, String>,
    name: String,
    publisher: Option<P>,
    next_start: Instant,
    window: usize,
    trust: Trust,
    pub status: Status,
}

impl<P: Publisher> Connection<P> {
    pub fn new(host: &impl Host, destination: &str, target: Result<Target, String>) -> Self {
        let name = match destination {
            DEFAULT_DESTINATION => format!("outbox: {}", host.id()),
            name => format!("outbox: {} {name}", host.id()),
        };
        let window = host.bounds().window;
        Self {
            target,
            name,
            publisher: None,
            next_start: host.now(),
            window,
            trust: Trust::full(window),
            status: Status::plain(State::Starting, None),
        }
    }

    /// Takes over new settings: if any differs, or what it was started with is not what it would be started with now, the
    /// connection is given up and made anew. Returns the last outcomes of the old one, or None if it goes on.
    pub fn reconfigure(&mut self, target: Result<Target, String>, now: Instant) -> Option<Outcomes> {
        // Refused for its password: the file may say another one now.
        let is_refused = self.status.reason == Some(Reason::Down(DownReason::AuthRefused));
        let anew = target != self.target || is_refused || self.is_outdated();
        if !anew {
            return None;
        }
        self.target = target;
        self.next_start = now;
        self.trust = Trust::full(self.window);
        Some(self.stop(CLOSE))
    }

    /// Does not wait for the next attempt to connect: `ensure` makes one now. Returns the last outcomes.
    pub fn try_at_once(&mut self, limit: Duration, now: Instant) -> Outcomes {
        self.next_start = now;
        self.stop(limit)
    }

    /// Starts the publisher if there is none and there can be one.
    pub fn ensure<H: Host<Publisher = P>>(&mut self, host: &H) {
        if self.publisher.is_some() || host.now() < self.next_start {
            return;
        }
        let target = self.target.as_ref().map_err(String::clone);
        match target.and_then(|target| host.start(target, &self.name)) {
            Ok(publisher) => {
                self.publisher = Some(publisher);
                self.status = Status::plain(State::Connecting, None);
            }
            Err(detail) => {
                self.next_start = host.now() + RETRY_START;
                self.status = Status::plain(State::Unconfigured, Some(detail));
            }
        }
    }

    fn is_outdated(&self) -> bool {
        self.publisher.as_ref().is_some_and(P::is_outdated)
    }

    pub fn is_connected(&self) -> bool {
        self.status.state == State::Connected
    }

    /// How many of its messages may be claimed and not settled, if that is few: while it has answered none since it went down.
    pub fn small_window(&self) -> Option<usize> {
        Some(self.trust.window()).filter(|window| *window < self.window)
    }

    /// Hands a batch over; gives it back when there is no room or no connection.
    pub fn publish(&self, batch: Vec<Publication>) -> Result<(), Vec<Publication>> {
        match &self.publisher {
            Some(publisher) => publisher.publish(batch),
            None => Err(batch),
        }
    }

    /// Before each wait: so many confirms wake this worker, at most.
    pub fn wake_after(&self, confirms: usize) {
        if let Some(publisher) = &self.publisher {
            publisher.wake_after(confirms);
        }
    }

    /// Takes what the publisher has to say: outcomes are returned, states remembered. The flag is true when the thread is
    /// gone and whatever it held with it; also when it is given up because another is to take its place.
    pub fn take(&mut self, now: Instant) -> (Outcomes, bool) {
        let Some(publisher) = &mut self.publisher else {
            return (Vec::new(), false);
        };
        let mut outcomes = Outcomes::new();
        let mut died = None;
        let mut is_down = false;
        for event in publisher.drain() {
            match event {
                Event::Outcomes(more) => outcomes.extend(more),
                Event::State(state) => {
                    is_down |= matches!(state, ConnectionState::Down { .. });
                    self.status = Status::of(state);
                }
                Event::Died(why) => died = Some(why),
            }
        }
        let is_answered = |answered: &&Answered| !matches!(answered.outcome, Outcome::Lost { .. } | Outcome::TimedOut);
        self.trust.answered(outcomes.iter().filter(is_answered).count());
        if is_down || died.is_some() {
            self.trust.went_down();
        }
        if let Some(why) = died {
            self.stop(DEAD_LETTER);
            self.next_start = now + RETRY_START;
            self.status = Status::down(DownReason::Protocol, format!("the publisher thread ended: {why}"));
            return (outcomes, true);
        }
        if is_down && self.is_outdated() {
            outcomes.extend(self.stop(CLOSE));
            self.next_start = now;
            return (outcomes, true);
        }
        (outcomes, false)
    }

    /// `stop` will be called, and shall not have to wait then.
    pub fn request_stop(&self, limit: Duration) {
        if let Some(publisher) = &self.publisher {
            publisher.request_stop(limit);
        }
    }

    /// Gives the connection up within `limit`; returns the last outcomes. Messages without one may have arrived or not.
    pub fn stop(&mut self, limit: Duration) -> Outcomes {
        let Some(mut publisher) = self.publisher.take() else {
            return Vec::new();
        };
        publisher.stop(limit);
        let outcomes = |event| match event {
            Event::Outcomes(outcomes) => outcomes,
            _ => Vec::new(),
        };
        publisher.drain().into_iter().flat_map(outcomes).collect()
    }
}
