//! What an event makes of the state, and what it asks of the worker. Pure: the same event on the same state does the same.

use super::state::{Mode, Pane, State};
use crate::screen::panel::{PAGE, scrolled};
use crate::work::look::Look;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

/// What happens to the screen.
#[derive(Clone, Debug)]
pub enum Event {
    Key(KeyEvent),
    /// The terminal has another size; the next frame finds out which.
    Resized,
    Look(Box<Look>),
    /// The worker was asked to end, by whomever.
    Ends,
}

/// What is asked of the worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// To end in order; once more, to end at once.
    End,
    /// To claim nothing, or to go on.
    Hold(bool),
}

pub fn update(state: &mut State, event: Event) -> Option<Request> {
    match event {
        Event::Key(key) => on_key(state, key),
        Event::Resized => None,
        Event::Look(look) => {
            state.take(*look);
            None
        }
        Event::Ends => {
            state.ends = true;
            None
        }
    }
}

fn on_key(state: &mut State, key: KeyEvent) -> Option<Request> {
    if key.modifiers.intersects(KeyModifiers::CONTROL.union(KeyModifiers::ALT)) {
        return None; // Esc and a key that follow each other at once look like Alt
    }
    match std::mem::replace(&mut state.mode, Mode::Watch) {
        Mode::Watch => watch(state, key.code),
        Mode::Help { scroll } => {
            state.mode = scrolled(key.code, scroll).map_or(Mode::Watch, |scroll| Mode::Help { scroll });
            None
        }
        Mode::Row { title, text, scroll } => {
            if let Some(scroll) = scrolled(key.code, scroll) {
                state.mode = Mode::Row { title, text, scroll };
            }
            None
        }
    }
}

fn watch(state: &mut State, key: KeyCode) -> Option<Request> {
    let (at, last) = (state.at(state.pane), state.rows(state.pane).saturating_sub(1));
    match key {
        KeyCode::Char('q') => return Some(Request::End),
        KeyCode::Char(' ') => {
            state.holds = !state.holds;
            return Some(Request::Hold(state.holds));
        }
        KeyCode::Char('?') => state.mode = Mode::Help { scroll: 0 },
        KeyCode::Tab => state.pane = state.pane.next(1),
        KeyCode::BackTab => state.pane = state.pane.next(Pane::ALL.len() - 1),
        KeyCode::Char(digit @ '1'..='4') => state.pane = Pane::ALL[digit as usize - '1' as usize],
        KeyCode::Enter => {
            if let Some((title, text)) = state.row() {
                state.mode = Mode::Row { title, text, scroll: 0 };
            }
        }
        KeyCode::Char('j') | KeyCode::Down => state.select((at + 1).min(last)),
        KeyCode::Char('k') | KeyCode::Up => state.select(at.saturating_sub(1)),
        KeyCode::PageDown => state.select((at + PAGE).min(last)),
        KeyCode::PageUp => state.select(at.saturating_sub(PAGE)),
        KeyCode::Char('g') | KeyCode::Home => state.select(0),
        KeyCode::Char('G') | KeyCode::End => state.select(last),
        _ => {}
    }
    None
}
