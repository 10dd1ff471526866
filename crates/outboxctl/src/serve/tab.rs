//! The tabs of the list of messages: one for each status.

use crate::format::capitalised;
use crate::messages::bulk::Verb;
use crate::queries::state::MessageStatus;
use outbox_core::words::Word;

/// The tabs: what waits, with the failures next to what works, then what ended.
pub const TABS: [MessageStatus; 8] = [
    MessageStatus::Ready,
    MessageStatus::InFlight,
    MessageStatus::Retrying,
    MessageStatus::Dead,
    MessageStatus::Blocked,
    MessageStatus::Scheduled,
    MessageStatus::Published,
    MessageStatus::Discarded,
];

impl MessageStatus {
    /// The word in URLs.
    pub fn word(self) -> String {
        self.name().replace(' ', "-")
    }

    pub fn path(self) -> String {
        format!("messages?tab={}", self.word())
    }

    pub fn parse(word: &str) -> Option<Self> {
        Self::of_name(&word.replace('-', " "))
    }

    pub fn title(self) -> String {
        capitalised(self.name())
    }

    /// What the messages of the tab are, in a sentence.
    pub fn about(self) -> &'static str {
        match self {
            Self::Ready => "To be claimed by a worker, in order of seq.",
            Self::InFlight => "With a worker for delivery, in order of seq.",
            Self::Retrying => "Failed and waiting for the next attempt.",
            Self::Scheduled => "Waiting for their time.",
            Self::Blocked => "Waiting behind an earlier message of their key that failed or is dead.",
            Self::Published => "Confirmed by the destination, the latest first.",
            Self::Dead => "Dead letters. Retry one to deliver it again.",
            Self::Discarded => "Discarded by hand or after their retention, the latest first.",
        }
    }

    /// Whether the list says why each message waits, in place of its error.
    pub fn shows_reasons(self) -> bool {
        matches!(self, Self::Ready | Self::InFlight)
    }

    /// The actions on a message.
    pub fn verbs(self) -> &'static [Verb] {
        match self {
            Self::Dead | Self::Retrying | Self::Scheduled => &[Verb::Retry, Verb::Discard],
            Self::Ready | Self::Blocked => &[Verb::Discard],
            Self::Published | Self::Discarded => &[Verb::Replay],
            Self::InFlight => &[],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_status_has_a_tab_with_a_word() {
        for tab in MessageStatus::ALL.iter().copied() {
            assert!(TABS.contains(&tab), "{tab:?}");
            assert_eq!(MessageStatus::parse(&tab.word()), Some(tab));
        }
        assert_eq!(MessageStatus::parse("all"), None);
    }
}
