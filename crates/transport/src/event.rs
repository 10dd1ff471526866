//! The events that a publisher reports. Made on the publisher thread, read by the worker.

use crate::down::Fault;
use outbox_core::message::Outcome;
use std::time::Instant;

/// An event from the publisher thread.
#[derive(Clone, Debug, PartialEq)]
pub enum PublisherEvent {
    State(ConnectionState),
    /// The outcomes: exactly one for each publication that `try_publish` accepted, in the order in which they became
    /// certain.
    Outcomes(Vec<Answered>),
    /// The last event: the publisher has ended, and sends nothing more. Some: why it ended although nobody requested
    /// it: a panic, or connections that could not be closed.
    Ended(Option<String>),
}

/// The outcome of one publication.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answered {
    pub handle: u64,
    pub outcome: Outcome,
    /// When the answer arrived, which may be before the thread noticed it. Without an answer: when the outcome became
    /// certain.
    pub at: Instant,
}

impl Answered {
    pub(crate) fn now(handle: u64, outcome: Outcome) -> Self {
        let at = Instant::now();
        Self { handle, outcome, at }
    }

    /// The message was not sent.
    pub(crate) fn lost(handle: u64, reason: &str) -> Self {
        let reason = reason.to_owned();
        Self::now(handle, Outcome::Lost { reason })
    }

    /// The message was sent, and no answer will come.
    pub(crate) fn none(handle: u64, reason: &str, alone: bool) -> Self {
        let reason = reason.to_owned();
        Self::now(handle, Outcome::Unanswered { reason, alone })
    }
}

/// The state of a connection. After a failure the state stays `Down`, with the newest reason, until `Connected`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ConnectionState {
    Connecting,
    Connected,
    /// Connected, but these messages have waited for a confirm for longer than usual. Repeated from time to time until
    /// `Connected`.
    Unconfirmed {
        messages: usize,
        seconds: u64,
        /// Whether the broker answers other requests.
        is_alive: bool,
    },
    /// The broker is short of memory or disk. The thread publishes nothing more, and no confirm times out, until
    /// `Connected`.
    Blocked {
        reason: String,
    },
    Down(Fault),
}
