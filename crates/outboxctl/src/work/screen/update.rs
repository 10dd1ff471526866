//! Applies an event to the state, and returns the request to the worker. Pure: the result depends only on the state and
//! the event.

use super::state::{Mode, Pane, State};
use crate::screen::keys::{self, scrolled, to_pane, to_row};
use crate::screen::terminal::Input;
use crate::work::snapshot::Snapshot;
use ratatui::crossterm::event::{KeyCode, KeyEvent};

/// The events of the screen.
#[derive(Clone, Debug)]
pub enum Event {
    Input(Input),
    Snapshot(Box<Snapshot>),
    /// The worker was asked to end, by a key or a signal.
    Ends,
}

/// A request to the worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// End in order; a second request ends at once.
    End,
    /// Claim nothing (true), or claim again (false).
    Hold(bool),
}

pub fn update(state: &mut State, event: Event) -> Option<Request> {
    match event {
        Event::Input(Input::Key(key)) => return on_key(state, key),
        Event::Input(Input::Resized) => {}
        Event::Snapshot(snapshot) => state.take(*snapshot),
        Event::Ends => state.ends = true,
    }
    None
}

fn on_key(state: &mut State, key: KeyEvent) -> Option<Request> {
    let key = keys::alone(key)?;
    match std::mem::replace(&mut state.mode, Mode::Watch) {
        Mode::Watch => return watch(state, key),
        Mode::Help { scroll } => {
            state.mode = scrolled(key, scroll).map_or(Mode::Watch, |scroll| Mode::Help { scroll });
        }
        Mode::Row { title, text, scroll } => {
            if let Some(scroll) = scrolled(key, scroll) {
                state.mode = Mode::Row { title, text, scroll };
            }
        }
    }
    None
}

fn watch(state: &mut State, key: KeyCode) -> Option<Request> {
    match key {
        KeyCode::Char('q') => return Some(Request::End),
        KeyCode::Char(' ') => {
            state.holds = !state.holds;
            return Some(Request::Hold(state.holds));
        }
        KeyCode::Char('?') => state.mode = Mode::Help { scroll: 0 },
        KeyCode::Enter => {
            if let Some((title, text)) = state.row() {
                state.mode = Mode::Row { title, text, scroll: 0 };
            }
        }
        key => {
            if let Some(pane) = to_pane(key, state.pane as usize, Pane::ALL.len()) {
                state.pane = Pane::ALL[pane];
            } else if let Some(row) = to_row(key, state.at(state.pane), state.rows(state.pane)) {
                state.select(row);
            }
        }
    }
    None
}
