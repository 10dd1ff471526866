//! The state of a connection, in the words that outbox_workers and outbox_health show.

use outbox_core::finding::Finding;
use outbox_core::words::Word;
use outbox_transport::kind::{Peer, Target};
use outbox_transport::{ConnectionState, DownReason};

outbox_core::words! {
    /// The state of a destination, as its worker reports it.
    #[derive(Default)]
    pub enum State {
        Connected = "connected",
        Connecting = "connecting",
        #[default]
        Starting = "starting",
        Paused = "paused",
        /// Paused, with messages still in flight.
        Pausing = "pausing",
        Blocked = "blocked",
        Down = "down",
        Unconfigured = "unconfigured",
        NotAdopted = "not adopted",
    }
}

impl State {
    /// Whether the connection is still being made.
    pub fn is_undecided(self) -> bool {
        matches!(self, Self::Starting | Self::Connecting)
    }

    /// Whether nothing can be sent because of a failure.
    pub fn is_failure(self) -> bool {
        matches!(self, Self::Down | Self::Blocked)
    }
}

/// The reason of a state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StatusReason {
    Down(DownReason),
    /// Connected, but messages have had no answer for long.
    Unconfirmed,
    /// Connected, but messages have waited long for standbys that must have their commits.
    Standby,
    /// Connected, but others have taken the memory of the worker.
    Memory,
}

impl StatusReason {
    pub fn name(self) -> &'static str {
        match self {
            Self::Down(reason) => reason.name(),
            Self::Unconfirmed => "unconfirmed",
            Self::Standby => "standby",
            Self::Memory => "memory",
        }
    }
}

/// A status as outbox_connections has it.
pub struct StoredStatus {
    pub state: &'static str,
    pub reason: Option<&'static str>,
    pub detail: Option<String>,
    pub code: Option<&'static str>,
    /// An object of JSON.
    pub args: String,
}

/// The state of a connection, why it is in this state, and what is known of the cause.
#[derive(Clone, PartialEq, Debug)]
pub struct ConnectionStatus {
    pub state: State,
    pub reason: Option<StatusReason>,
    pub finding: Option<Finding>,
}

impl ConnectionStatus {
    /// A state without a reason.
    pub fn plain(state: State, finding: Option<Finding>) -> Self {
        Self {
            state,
            reason: None,
            finding,
        }
    }

    /// Connected, and messages wait all the same.
    fn connected(reason: StatusReason, detail: String) -> Self {
        Self::because(State::Connected, reason, Finding::new(reason.name(), detail))
    }

    /// Connected, while messages wait for standbys; `awaited`: which ones.
    pub fn standby(awaited: &str) -> Self {
        Self::connected(StatusReason::Standby, awaited.to_owned())
    }

    /// Connected, while the messages of others take the memory of the worker, of this number of bytes.
    pub fn memory(bytes: usize) -> Self {
        let detail = format!("messages in flight take the {} MiB of the worker", bytes >> 20);
        Self::connected(StatusReason::Memory, detail)
    }

    pub fn down(reason: DownReason, detail: impl Into<String>) -> Self {
        let finding = Finding::new(reason.name(), detail);
        Self::because(State::Down, StatusReason::Down(reason), finding)
    }

    fn because(state: State, reason: StatusReason, finding: Finding) -> Self {
        Self {
            state,
            reason: Some(reason),
            finding: Some(finding),
        }
    }

    pub fn detail(&self) -> Option<&str> {
        self.finding.as_ref().map(|finding| finding.detail.as_str())
    }

    /// The arguments of outbox_internal.report.
    pub fn stored(&self) -> StoredStatus {
        StoredStatus {
            state: self.state.name(),
            reason: self.reason.map(StatusReason::name),
            detail: self.detail().map(|detail| detail.replace('\n', " ")),
            code: self.finding.as_ref().map(|finding| finding.code),
            args: self
                .finding
                .as_ref()
                .map_or_else(|| "{}".to_owned(), Finding::args_json),
        }
    }

    /// The state, its reason and its detail, as a log line shows them.
    pub fn in_words(&self) -> String {
        let reason = self.reason.map(StatusReason::name);
        let words = [Some(self.state.name()), reason, self.detail()];
        words.into_iter().flatten().collect::<Vec<&str>>().join(" ")
    }

    /// `peer`: of a destination that can be used; `all`: the destinations of the worker.
    pub fn of(state: ConnectionState, peer: Option<&dyn Peer>, all: &[Target]) -> Self {
        match state {
            ConnectionState::Connecting => Self::plain(State::Connecting, None),
            ConnectionState::Connected => Self::plain(State::Connected, None),
            ConnectionState::Unconfirmed {
                messages,
                seconds,
                is_alive,
            } => {
                let though = if is_alive { ", though the broker answers" } else { "" };
                let detail = format!("{messages} unconfirmed for {seconds} s{though}");
                Self::connected(StatusReason::Unconfirmed, detail)
            }
            ConnectionState::Blocked { reason } => {
                let finding = peer.map_or_else(|| reason.clone().into(), |peer| peer.blocked(reason.clone()));
                Self::plain(State::Blocked, Some(finding))
            }
            ConnectionState::Down(fault) => {
                let reason = StatusReason::Down(fault.reason);
                let finding = match peer {
                    Some(peer) => peer.explain(fault, all),
                    None => fault.finding,
                };
                Self::because(State::Down, reason, finding)
            }
        }
    }
}
