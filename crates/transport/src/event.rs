//! What a publisher has to say. Made on the publisher thread, heard by the worker.

use crate::down::DownReason;
use outbox_core::message::Outcome;
use std::time::Instant;

/// What the publisher thread has to say.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    State(ConnectionState),
    /// One for each publication taken by `try_publish`, in the order of becoming certain.
    Outcomes(Vec<Answered>),
    /// The thread has ended by itself (a panic, or a connection that could not be got rid of). No more outcomes will
    /// come: treat what is unanswered as `Lost`, and start a new publisher or, better, a new process.
    Died(String),
}

/// What became of one publication.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answered {
    pub handle: u64,
    pub outcome: Outcome,
    /// When the answer was here: it may have been noticed later. Without an answer, when that was certain.
    pub at: Instant,
}

impl Answered {
    pub(crate) fn now(handle: u64, outcome: Outcome) -> Self {
        let at = Instant::now();
        Self { handle, outcome, at }
    }
}

/// After a failure the state stays `Down`, with the newest reason, until `Connected`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ConnectionState {
    Connecting,
    Connected,
    /// Connected, and these messages are without a confirm for longer than usual: said again as time goes by, until
    /// `Connected`.
    Unconfirmed {
        messages: usize,
        seconds: u64,
        /// The broker answers to other questions.
        is_alive: bool,
    },
    /// The broker is short of memory or disk: nothing more is published, and no confirm times out, until `Connected`.
    Blocked {
        reason: String,
    },
    Down {
        reason: DownReason,
        detail: String,
    },
}
