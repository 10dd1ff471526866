//! Helpers for tests of screens: keys, frames, and the rules that every screen must follow.

use super::frame::as_text;
use ratatui::backend::TestBackend;
use ratatui::buffer::Buffer;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use ratatui::style::Color;
use ratatui::{Frame, Terminal};

/// A hostile answer of a peer: it clears the screen, beeps, reverses the text, and sets a title.
pub const HOSTILE: &str = "bad\u{1b}[2J\u{7}\u{9b}31m\u{202e}gnp\u{1b}]0;title\u{7}\r\nnext line";

/// For texts in the docs, instead of `HOSTILE`.
pub fn replace_hostile(text: &mut String, instead: &str) {
    if text == HOSTILE {
        *text = instead.to_owned();
    }
}

/// A minute and a half of samples.
pub fn samples() -> Vec<f64> {
    (0..90_i32).map(|s| f64::from((s * 37) % 101 + (s % 30) * 4)).collect()
}

/// Presses the keys that these characters stand for; returns the result of the last one.
pub fn press<R>(characters: &str, mut update: impl FnMut(KeyEvent) -> Option<R>) -> Option<R> {
    let keys = characters.chars().map(|character| match character {
        '\n' => KeyCode::Enter,
        '\t' => KeyCode::Tab,
        '\u{1b}' => KeyCode::Esc,
        '\u{8}' => KeyCode::Backspace,
        character => KeyCode::Char(character),
    });
    keys.fold(None, |_, code| update(KeyEvent::new(code, KeyModifiers::NONE)))
}

pub fn buffer(width: u16, height: u16, draw: impl FnOnce(&mut Frame)) -> Buffer {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).expect("a terminal");
    terminal.draw(draw).expect("a frame");
    terminal.backend().buffer().clone()
}

/// Part of a hostile text is shown, and none of its control characters reaches the terminal, at any width.
pub fn assert_harmless(draw: impl Fn(&mut Frame)) {
    for width in [60, 100, 150, 200] {
        let cells = buffer(width, 60, &draw).content;
        let bad = |c: char| c.is_control() || c == '\u{202e}';
        assert!(cells.iter().all(|cell| !cell.symbol().contains(bad)));
        assert!(cells.iter().any(|cell| cell.symbol() == "␛"), "it is seen");
    }
}

/// A screen without colours has the same text as one with them.
pub fn assert_same_without_colours(with: impl Fn(&mut Frame), without: impl Fn(&mut Frame)) {
    let (with, without) = (buffer(150, 40, with), buffer(150, 40, without));
    let is_plain = |cell: &ratatui::buffer::Cell| cell.fg == Color::Reset && cell.bg == Color::Reset;
    assert!(without.content.iter().all(is_plain));
    assert!(with.content.iter().any(|cell| cell.fg == Color::Red));
    assert_eq!(as_text(&without), as_text(&with));
}
