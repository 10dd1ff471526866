//! Applies an event to the state, and says what to request from the database. Pure: the same event on the same state
//! has the same result.

use super::state::{Action, Letter, Link, Mode, Notice, Pane, State, orders};
use crate::queries::model::Snapshot;
use crate::queries::state::DestinationState;
use crate::screen::keys::{self, scrolled, to_pane, to_row};
use crate::screen::terminal::Input;
use ratatui::crossterm::event::{KeyCode, KeyEvent};
use std::time::Duration;

/// An event of the program.
#[derive(Clone, Debug)]
pub enum Event {
    Input(Input),
    Snapshot(Box<Snapshot>),
    Lost {
        why: String,
        next_try: Duration,
    },
    Letter(Box<Letter>),
    Done(Notice),
    /// A signal, or a terminal that is gone.
    Stop,
}

/// A request to the task with the session.
#[derive(Clone, Debug, PartialEq)]
pub enum Request {
    Interval(Duration),
    Letter { seq: i64, destination: String },
    Act(Action),
}

/// Intervals that + and - go through.
const INTERVALS_MS: [u64; 9] = [200, 500, 1_000, 2_000, 5_000, 10_000, 30_000, 60_000, 300_000];

pub fn update(state: &mut State, event: Event) -> Option<Request> {
    match event {
        Event::Input(Input::Key(key)) => return on_key(state, key),
        Event::Input(Input::Resized) => {}
        Event::Snapshot(snapshot) => {
            state.link = Link::Up;
            state.sample(&snapshot);
            match &mut state.held {
                Some(held) => *held = snapshot,
                None => state.shown = *snapshot,
            }
        }
        Event::Lost { why, next_try } => state.link = Link::Lost { why, next_try },
        Event::Letter(letter) => state.letter = Some(*letter),
        Event::Done(notice) => state.notice = Some(notice),
        Event::Stop => state.has_ended = true,
    }
    None
}

fn on_key(state: &mut State, key: KeyEvent) -> Option<Request> {
    if keys::with_control(key, &['c', 'd']) {
        state.has_ended = true;
    }
    let key = keys::alone(key)?;
    state.notice = None;
    match std::mem::replace(&mut state.mode, Mode::Watch) {
        Mode::Watch => watch(state, key),
        Mode::Help { scroll } => {
            state.mode = scrolled(key, scroll).map_or(Mode::Watch, |scroll| Mode::Help { scroll });
            None
        }
        Mode::Health { scroll } => {
            state.mode = scrolled(key, scroll).map_or(Mode::Watch, |scroll| Mode::Health { scroll });
            None
        }
        Mode::Filter { before } => {
            filter(state, key, before);
            None
        }
        Mode::Detail { id, scroll } => {
            if let Some(scroll) = scrolled(key, scroll) {
                state.mode = Mode::Detail { id, scroll };
                return None;
            }
            if matches!(key, KeyCode::Char('r' | 'd' | 'p')) {
                fetch(state, key, Some(id));
            }
            None
        }
        Mode::Confirm(action) => match key {
            KeyCode::Char('y') => Some(Request::Act(action)),
            _ => {
                show_notice(state, "Nothing was done.");
                None
            }
        },
    }
}

fn watch(state: &mut State, key: KeyCode) -> Option<Request> {
    match key {
        KeyCode::Char('q') => state.has_ended = true,
        KeyCode::Char('?') => state.mode = Mode::Help { scroll: 0 },
        KeyCode::Char('h') => state.mode = Mode::Health { scroll: 0 },
        KeyCode::Char(' ') => match state.held.take() {
            Some(newest) => state.shown = *newest,
            None => state.held = Some(Box::new(state.shown.clone())),
        },
        KeyCode::Char('+' | '=') => return interval(state, true),
        KeyCode::Char('-') => return interval(state, false),
        KeyCode::Char('/') => {
            let before = state.pane_state().filter.clone();
            state.mode = Mode::Filter { before };
        }
        KeyCode::Esc => state.pane_mut().filter.clear(),
        KeyCode::Char('s') => {
            let count = orders(state.pane).len() + 1;
            let pane_state = state.pane_mut();
            pane_state.sort = (pane_state.sort + 1) % count;
        }
        KeyCode::Enter => return open(state),
        KeyCode::Char('r' | 'd' | 'p') => {
            let id = state.selected_id(state.pane);
            fetch(state, key, id);
        }
        key => {
            let at = state.selected(state.pane).unwrap_or(0);
            if let Some(pane) = to_pane(key, state.pane as usize, Pane::ALL.len()) {
                state.pane = Pane::ALL[pane];
            } else if let Some(row) = to_row(key, at, state.ids(state.pane).len()) {
                select(state, row);
            }
        }
    }
    None
}

fn select(state: &mut State, index: usize) {
    let id = state.ids(state.pane).into_iter().nth(index);
    let pane_state = state.pane_mut();
    pane_state.index = index;
    pane_state.selected = id;
}

fn filter(state: &mut State, key: KeyCode, before: String) {
    const LENGTH_MAX: usize = 100;
    match key {
        KeyCode::Enter => return,
        KeyCode::Esc => {
            state.pane_mut().filter = before;
            return;
        }
        KeyCode::Backspace => _ = state.pane_mut().filter.pop(),
        KeyCode::Char(c) if state.pane_state().filter.chars().count() < LENGTH_MAX => state.pane_mut().filter.push(c),
        _ => {}
    }
    state.mode = Mode::Filter { before };
}

fn interval(state: &mut State, longer: bool) -> Option<Request> {
    let now = state.interval.as_millis() as u64;
    let next = match longer {
        true => INTERVALS_MS.iter().find(|ms| **ms > now),
        false => INTERVALS_MS.iter().rev().find(|ms| **ms < now),
    };
    let next = Duration::from_millis(*next?);
    state.interval = next;
    Some(Request::Interval(next))
}

fn open(state: &mut State) -> Option<Request> {
    let id = state.selected_id(state.pane)?;
    state.mode = Mode::Detail {
        id: id.clone(),
        scroll: 0,
    };
    if state.pane != Pane::Messages {
        return None;
    }
    state.letter = None;
    let (seq, destination) = id.split_once(' ')?;
    Some(Request::Letter {
        seq: seq.parse().ok()?,
        destination: destination.to_owned(),
    })
}

/// Asks for confirmation of the action of a key, on the row of that name.
fn fetch(state: &mut State, key: KeyCode, id: Option<String>) {
    match action(state, key, id) {
        _ if !state.may_act => complain(state, "Actions are off: start with --allow-actions."),
        Ok(action) => state.mode = Mode::Confirm(action),
        Err(why) => complain(state, why),
    }
}

fn action(state: &State, key: KeyCode, id: Option<String>) -> Result<Action, &'static str> {
    match key {
        KeyCode::Char('p') => {
            let wrong_pane = "Select a destination to pause or resume: press 3.";
            let name = id.filter(|_| state.pane == Pane::Destinations).ok_or(wrong_pane)?;
            let rows = state.shown.destinations.as_deref().unwrap_or_default();
            let is_paused = rows
                .iter()
                .any(|row| row.name == name && row.state.known().is_some_and(DestinationState::is_paused));
            Ok(match is_paused {
                true => Action::Resume { destination: name },
                false => Action::Pause { destination: name },
            })
        }
        key => {
            let wrong_pane = "Select a message to retry or discard: press 5.";
            let id = id.filter(|_| state.pane == Pane::Messages).ok_or(wrong_pane)?;
            let (seq, destination) = id.split_once(' ').ok_or(wrong_pane)?;
            let (seq, destination) = (seq.parse().map_err(|_| wrong_pane)?, destination.to_owned());
            Ok(match key {
                KeyCode::Char('d') => Action::Discard { seq, destination },
                _ => Action::Retry { seq, destination },
            })
        }
    }
}

fn show_notice(state: &mut State, text: &str) {
    state.notice = Some(Notice {
        text: text.into(),
        is_bad: false,
    });
}

fn complain(state: &mut State, text: &str) {
    state.notice = Some(Notice {
        text: text.into(),
        is_bad: true,
    });
}
