//! The keys of every screen: another pane, another row, another part of a page.

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

/// The rows that PgUp and PgDn move.
const PAGE: usize = 10;

/// A key without modifiers. None = it is pressed with Ctrl or Alt: Esc followed at once by a key looks like Alt.
pub fn alone(key: KeyEvent) -> Option<KeyCode> {
    let modified = KeyModifiers::CONTROL.union(KeyModifiers::ALT);
    (!key.modifiers.intersects(modified)).then_some(key.code)
}

pub fn with_control(key: KeyEvent, characters: &[char]) -> bool {
    let is_one = matches!(key.code, KeyCode::Char(character) if characters.contains(&character));
    key.modifiers.contains(KeyModifiers::CONTROL) && is_one
}

/// The pane, of this many, that a key selects. None = it selects none.
pub fn to_pane(key: KeyCode, from: usize, panes: usize) -> Option<usize> {
    match key {
        KeyCode::Tab => Some((from + 1) % panes),
        KeyCode::BackTab => Some((from + panes - 1) % panes),
        KeyCode::Char(digit @ '1'..='9') => Some(digit as usize - '1' as usize).filter(|pane| *pane < panes),
        _ => None,
    }
}

/// The row, of this many, that a key selects. None = it selects none.
pub fn to_row(key: KeyCode, from: usize, rows: usize) -> Option<usize> {
    let last = rows.saturating_sub(1);
    match key {
        KeyCode::Char('j') | KeyCode::Down => Some((from + 1).min(last)),
        KeyCode::Char('k') | KeyCode::Up => Some(from.saturating_sub(1)),
        KeyCode::PageDown => Some((from + PAGE).min(last)),
        KeyCode::PageUp => Some(from.saturating_sub(PAGE)),
        KeyCode::Char('g') | KeyCode::Home => Some(0),
        KeyCode::Char('G') | KeyCode::End => Some(last),
        _ => None,
    }
}

/// The position that a key scrolls a page to. None = the key closes it.
pub fn scrolled(key: KeyCode, scroll: usize) -> Option<usize> {
    match key {
        KeyCode::Char(' ') => Some(scroll + PAGE),
        KeyCode::Char('G') | KeyCode::End => None,
        key => to_row(key, scroll, usize::MAX),
    }
}
