//! The state of a connection, in the words that outbox_workers and outbox_health show.

use outbox_core::words::Word;
use outbox_transport::kind::Peer;
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

/// The state of a connection with reason and detail, the arguments of outbox_internal.report.
#[derive(Clone, PartialEq, Debug)]
pub struct ConnectionStatus {
    pub state: State,
    pub reason: Option<StatusReason>,
    pub detail: Option<String>,
    /// What to do at the broker.
    pub remedy: Option<String>,
}

impl ConnectionStatus {
    /// A state without a reason.
    pub fn plain(state: State, detail: Option<String>) -> Self {
        Self {
            state,
            reason: None,
            detail,
            remedy: None,
        }
    }

    /// Connected, and messages wait all the same.
    fn connected(reason: StatusReason, detail: String) -> Self {
        Self {
            state: State::Connected,
            reason: Some(reason),
            detail: Some(detail),
            remedy: None,
        }
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

    pub fn down(reason: DownReason, detail: String) -> Self {
        Self {
            state: State::Down,
            reason: Some(StatusReason::Down(reason)),
            detail: Some(detail),
            remedy: None,
        }
    }

    /// The detail as outbox_connections stores it: a line feed separates the remedy, which
    /// `outbox_internal.connections` splits off.
    pub fn detail_and_remedy(&self) -> Option<String> {
        let detail = self.detail.as_ref()?.replace('\n', " ");
        Some(match &self.remedy {
            Some(remedy) => format!("{detail}\n{remedy}"),
            None => detail,
        })
    }

    /// The state, its reason and its detail, as a log line shows them.
    pub fn in_words(&self) -> String {
        let reason = self.reason.map(StatusReason::name);
        let words = [Some(self.state.name()), reason, self.detail.as_deref()];
        words.into_iter().flatten().collect::<Vec<&str>>().join(" ")
    }

    /// `peer`: of a destination that can be used.
    pub fn of(state: ConnectionState, peer: Option<&dyn Peer>) -> Self {
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
            ConnectionState::Blocked { reason } => Self {
                remedy: peer.and_then(|peer| peer.unblock(&reason)).map(str::to_owned),
                ..Self::plain(State::Blocked, Some(reason))
            },
            ConnectionState::Down { reason, detail } => {
                let explained = peer.map(|peer| peer.explain(reason, &detail));
                let (detail, remedy) = explained.unwrap_or((detail, None));
                Self {
                    remedy,
                    ..Self::down(reason, detail)
                }
            }
        }
    }
}
