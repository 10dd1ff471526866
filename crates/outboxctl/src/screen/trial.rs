//! Keys for a test, and what a screen draws.

use ratatui::backend::TestBackend;
use ratatui::buffer::Buffer;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use ratatui::{Frame, Terminal};

/// The keys that these characters stand for.
pub fn keys(characters: &str) -> impl Iterator<Item = KeyEvent> {
    characters.chars().map(|character| {
        let code = match character {
            '\n' => KeyCode::Enter,
            '\t' => KeyCode::Tab,
            '\u{1b}' => KeyCode::Esc,
            '\u{8}' => KeyCode::Backspace,
            character => KeyCode::Char(character),
        };
        KeyEvent::new(code, KeyModifiers::NONE)
    })
}

pub fn buffer(width: u16, height: u16, draw: impl FnOnce(&mut Frame)) -> Buffer {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).expect("a terminal");
    terminal.draw(draw).expect("a frame");
    terminal.backend().buffer().clone()
}
