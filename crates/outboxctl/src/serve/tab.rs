//! The names of the tabs of the list of messages.

pub use crate::messages::tab::Tab;

impl Tab {
    /// The word in URLs.
    pub fn word(self) -> &'static str {
        match self {
            Self::Ready => "ready",
            Self::InFlight => "in-flight",
            Self::Retrying => "retrying",
            Self::Scheduled => "scheduled",
            Self::Blocked => "blocked",
            Self::Published => "published",
            Self::Dead => "dead",
            Self::Discarded => "discarded",
        }
    }

    pub fn path(self) -> String {
        format!("/messages?tab={}", self.word())
    }

    pub fn parse(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|tab| tab.word() == word)
    }

    pub fn title(self) -> &'static str {
        match self {
            Self::Ready => "Ready",
            Self::InFlight => "In flight",
            Self::Retrying => "Retrying",
            Self::Scheduled => "Scheduled",
            Self::Blocked => "Blocked",
            Self::Published => "Published",
            Self::Dead => "Dead",
            Self::Discarded => "Discarded",
        }
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

    /// The head of the column of times.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tab_has_a_word() {
        for tab in Tab::ALL {
            assert_eq!(Tab::parse(tab.word()), Some(tab));
        }
        assert_eq!(Tab::parse("all"), None);
    }
}
