//! The words that the views use for the states of destinations and messages, each defined once.

use outbox_core::words::Word;
use outbox_worker::State;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::marker::PhantomData;

outbox_core::words! {
    /// How good a state is: a colour on a terminal, a class on a page.
    pub enum Tone {
        Ok = "ok",
        Warn = "warn",
        Bad = "bad",
        Plain = "plain",
    }
}

/// A word for a state.
pub trait Toned: Word {
    fn tone(self) -> Tone;
}

/// The values of `outbox_destination_status.state`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DestinationState {
    /// A worker has reported this state.
    Reported(State),
    /// No worker has reported a state.
    NotServed,
    /// Messages wait for a destination that does not exist.
    Missing,
}

impl Word for DestinationState {
    const ALL: &'static [Self] = &[
        Self::Reported(State::Connected),
        Self::Reported(State::Connecting),
        Self::Reported(State::Starting),
        Self::Reported(State::Paused),
        Self::Reported(State::Pausing),
        Self::Reported(State::Blocked),
        Self::Reported(State::Down),
        Self::Reported(State::Unconfigured),
        Self::Reported(State::NotAdopted),
        Self::NotServed,
        Self::Missing,
    ];

    fn name(self) -> &'static str {
        match self {
            Self::Reported(state) => state.name(),
            Self::NotServed => "not served",
            Self::Missing => "missing",
        }
    }
}

impl Toned for DestinationState {
    fn tone(self) -> Tone {
        match self {
            Self::Reported(State::Connected) => Tone::Ok,
            Self::Reported(State::Paused | State::Pausing | State::Connecting | State::Starting) => Tone::Warn,
            Self::Reported(State::Blocked | State::Down | State::Unconfigured | State::NotAdopted)
            | Self::NotServed
            | Self::Missing => Tone::Bad,
        }
    }
}

outbox_core::words! {
    /// The values of `outbox_messages.status`.
    #[derive(clap::ValueEnum)]
    pub enum MessageStatus {
        Ready = "ready",
        #[value(alias = "in flight")]
        InFlight = "in flight",
        Retrying = "retrying",
        Blocked = "blocked",
        Scheduled = "scheduled",
        Published = "published",
        Dead = "dead",
        Discarded = "discarded",
    }
}

impl Toned for MessageStatus {
    fn tone(self) -> Tone {
        match self {
            Self::Published => Tone::Ok,
            Self::Retrying | Self::Blocked => Tone::Warn,
            Self::Dead => Tone::Bad,
            Self::Ready | Self::InFlight | Self::Scheduled | Self::Discarded => Tone::Plain,
        }
    }
}

impl MessageStatus {
    /// Whether the message has left the outbox for good.
    pub fn has_ended(self) -> bool {
        matches!(self, Self::Published | Self::Discarded)
    }

    /// What the time of its messages means.
    pub fn time_title(self) -> &'static str {
        match self {
            Self::Ready | Self::InFlight | Self::Blocked => "Enqueued",
            Self::Retrying | Self::Scheduled => "Due",
            Self::Published => "Published",
            Self::Dead => "Died",
            Self::Discarded => "Discarded",
        }
    }
}

/// A word from a view. A newer extension may have words that this program does not know. Such a word is shown
/// unchanged, and equals no known word.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(transparent)]
pub struct Parsed<T>(String, #[serde(skip)] PhantomData<T>);

impl<T: Word> Parsed<T> {
    pub fn as_str(&self) -> &str {
        &self.0
    }

    pub fn known(&self) -> Option<T> {
        T::of_name(&self.0)
    }

    pub fn is(&self, word: T) -> bool {
        self.0 == word.name()
    }
}

impl<T: Toned> Parsed<T> {
    pub fn tone(&self) -> Tone {
        self.known().map_or(Tone::Plain, T::tone)
    }
}

impl<T> fmt::Display for Parsed<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl<T> Default for Parsed<T> {
    fn default() -> Self {
        Self(String::new(), PhantomData)
    }
}

impl<T: Word> From<T> for Parsed<T> {
    fn from(word: T) -> Self {
        Self(word.name().to_owned(), PhantomData)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_state_that_a_worker_reports_is_a_state_of_a_destination() {
        for state in State::ALL {
            let reported = DestinationState::Reported(*state);
            assert_eq!(DestinationState::of_name(state.name()), Some(reported));
        }
        assert_eq!(DestinationState::ALL.len(), State::ALL.len() + 2);
    }

    #[test]
    fn an_unknown_word_is_kept_unchanged() {
        for word in ["in flight", "of next year", ""] {
            let parsed: Parsed<MessageStatus> = serde_json::from_value(word.into()).expect("a word");
            assert_eq!((parsed.as_str(), parsed.known()), (word, MessageStatus::of_name(word)));
            assert_eq!(serde_json::to_value(&parsed).expect("a word"), word);
        }
    }
}
