//! Colours, and their replacements where there are none. No information is in a colour alone: a letter, a word or a
//! mark carries it too.

use crate::queries::state::DestinationState::{self, Missing, NotServed, Reported};
use crate::queries::state::MessageStatus;
use outbox_worker::State;
use ratatui::style::{Color, Modifier, Style};

/// The styles of a screen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Theme {
    pub has_colour: bool,
}

impl Theme {
    /// By the rule of no-color.org: any value except an empty one switches colours off.
    pub fn from_env() -> Self {
        Self {
            has_colour: std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty()),
        }
    }

    fn coloured(self, colour: Color, without: Modifier) -> Style {
        match self.has_colour {
            true => Style::new().fg(colour),
            false => Style::new().add_modifier(without),
        }
    }

    pub fn good(self) -> Style {
        self.coloured(Color::Green, Modifier::empty())
    }

    pub fn warning(self) -> Style {
        self.coloured(Color::Yellow, Modifier::BOLD)
    }

    pub fn bad(self) -> Style {
        self.coloured(Color::Red, Modifier::BOLD).add_modifier(Modifier::BOLD)
    }

    pub fn accent(self) -> Style {
        self.coloured(Color::Cyan, Modifier::empty())
    }

    pub fn dim(self) -> Style {
        Style::new().add_modifier(Modifier::DIM)
    }

    pub fn strong(self) -> Style {
        Style::new().add_modifier(Modifier::BOLD)
    }

    pub fn selected(self) -> Style {
        Style::new().add_modifier(Modifier::REVERSED)
    }

    /// The style of a line that must not be missed.
    pub fn alarm(self) -> Style {
        match self.has_colour {
            true => Style::new()
                .fg(Color::White)
                .bg(Color::Red)
                .add_modifier(Modifier::BOLD),
            false => Style::new().add_modifier(Modifier::BOLD.union(Modifier::REVERSED)),
        }
    }

    /// The style of the n-th owner of partitions; its letter identifies the owner as well.
    pub fn owner(self, index: usize) -> Style {
        const COLOURS: [Color; 6] = [
            Color::Cyan,
            Color::Magenta,
            Color::Yellow,
            Color::Green,
            Color::Blue,
            Color::LightRed,
        ];
        self.coloured(COLOURS[index % COLOURS.len()], Modifier::empty())
    }

    /// The style of the state of a destination or a worker, if it is a known word.
    pub fn state(self, state: Option<DestinationState>) -> Style {
        match state {
            Some(Reported(State::Connected)) => self.good(),
            Some(Reported(State::Down | State::Blocked) | Missing | NotServed) => self.bad(),
            Some(Reported(
                State::Paused
                | State::Pausing
                | State::Unconfigured
                | State::NotAdopted
                | State::Connecting
                | State::Starting,
            )) => self.warning(),
            None => Style::new(),
        }
    }

    /// The style of the status of a message.
    pub fn status(self, status: Option<MessageStatus>) -> Style {
        match status {
            Some(MessageStatus::Published) => self.good(),
            Some(MessageStatus::Dead) => self.bad(),
            Some(MessageStatus::Retrying) => self.warning(),
            _ => Style::new(),
        }
    }
}
