//! The tabs of the list of messages: the newest of all, and one for each status.

use crate::format::capitalised;
use crate::messages::bulk::Verb;
use crate::queries::state::MessageStatus;
use outbox_core::words::Word;

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Tab {
    /// The newest messages of all statuses.
    Latest,
    Of(MessageStatus),
}

/// The tabs: the newest, what waits, with the failures next to what works, then what ended.
pub const TABS: [Tab; 9] = [
    Tab::Latest,
    Tab::Of(MessageStatus::Ready),
    Tab::Of(MessageStatus::InFlight),
    Tab::Of(MessageStatus::Retrying),
    Tab::Of(MessageStatus::Dead),
    Tab::Of(MessageStatus::Blocked),
    Tab::Of(MessageStatus::Scheduled),
    Tab::Of(MessageStatus::Published),
    Tab::Of(MessageStatus::Discarded),
];

impl Tab {
    /// That of a word in a URL; another word means the newest messages.
    pub fn parse(word: &str) -> Self {
        MessageStatus::of_name(&word.replace('-', " ")).map_or(Self::Latest, Self::Of)
    }

    pub fn status(self) -> Option<MessageStatus> {
        match self {
            Self::Latest => None,
            Self::Of(status) => Some(status),
        }
    }

    pub fn word(self) -> String {
        self.status().map_or_else(|| "latest".to_owned(), MessageStatus::word)
    }

    pub fn path(self) -> String {
        format!("messages?tab={}", self.word())
    }

    pub fn title(self) -> String {
        self.status()
            .map_or_else(|| "Latest".to_owned(), |status| capitalised(status.name()))
    }

    pub fn about(self) -> &'static str {
        self.status()
            .map_or("The newest messages of all statuses.", MessageStatus::about)
    }

    pub fn time_title(self) -> &'static str {
        self.status().map_or("Enqueued", MessageStatus::time_title)
    }

    /// Whether the list says why a message that is ready or in flight waits, in place of its error.
    pub fn shows_reasons(self) -> bool {
        matches!(
            self,
            Self::Latest | Self::Of(MessageStatus::Ready | MessageStatus::InFlight)
        )
    }

    /// The actions on its messages. Those of one status have the same.
    pub fn verbs(self) -> &'static [Verb] {
        self.status().map_or(&[], MessageStatus::verbs)
    }

    pub fn can_reverse(self) -> bool {
        self.status().is_some_and(MessageStatus::can_reverse)
    }
}

impl MessageStatus {
    /// The word in URLs.
    pub fn word(self) -> String {
        self.name().replace(' ', "-")
    }

    pub fn path(self) -> String {
        format!("messages?tab={}", self.word())
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
        for tab in MessageStatus::ALL.iter().copied().map(Tab::Of) {
            assert!(TABS.contains(&tab), "{tab:?}");
            assert_eq!(Tab::parse(&tab.word()), tab);
        }
        assert_eq!(Tab::parse("all"), Tab::Latest);
    }
}
