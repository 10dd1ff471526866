//! Styles, and what replaces their colours where there are none. No information is in a colour alone: a letter, a word
//! or a mark carries it too.

use crate::queries::state::Tone;
use ratatui::buffer::Buffer;
use ratatui::style::{Color, Modifier, Style};

pub const GOOD: Style = Style::new().fg(Color::Green);
pub const WARNING: Style = Style::new().fg(Color::Yellow);
pub const BAD: Style = Style::new().fg(Color::Red).add_modifier(Modifier::BOLD);
pub const ACCENT: Style = Style::new().fg(Color::Cyan);
pub const DIM: Style = Style::new().add_modifier(Modifier::DIM);
pub const STRONG: Style = Style::new().add_modifier(Modifier::BOLD);
pub const SELECTED: Style = Style::new().add_modifier(Modifier::REVERSED);
/// The style of a line that must not be missed.
pub const ALARM: Style = Style::new()
    .fg(Color::White)
    .bg(Color::Red)
    .add_modifier(Modifier::BOLD);

/// By the rule of no-color.org: any value except an empty one switches colours off.
pub fn has_colour() -> bool {
    std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}

/// Takes the colours out of a frame. A warning becomes bold, and an alarm reversed.
pub fn remove_colours(frame: &mut Buffer) {
    for cell in &mut frame.content {
        if cell.bg == Color::Red {
            cell.modifier.insert(Modifier::REVERSED);
        } else if cell.fg == Color::Yellow {
            cell.modifier.insert(Modifier::BOLD);
        }
        (cell.fg, cell.bg) = (Color::Reset, Color::Reset);
    }
}

/// The style of the n-th owner of partitions; its letter identifies the owner as well.
pub fn owner(index: usize) -> Style {
    const COLOURS: [Color; 6] = [
        Color::Cyan,
        Color::Magenta,
        Color::LightYellow,
        Color::Green,
        Color::Blue,
        Color::LightRed,
    ];
    Style::new().fg(COLOURS[index % COLOURS.len()])
}

pub fn tone(tone: Tone) -> Style {
    match tone {
        Tone::Ok => GOOD,
        Tone::Warn => WARNING,
        Tone::Bad => BAD,
        Tone::Plain => Style::new(),
    }
}
