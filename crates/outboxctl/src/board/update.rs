//! Applies an event to the state, and returns what it requests. Pure: the same event on the same state has the same
//! result.

use super::state::{BoardMode, BoardPage, BoardState, Notice, OpenedMessage, Pane};
use super::{groups, rows};
use crate::format::harmless;
use crate::messages::bulk::Verb;
use crate::operation::OperatorAction;
use crate::progress::OwnWorker;
use crate::queries::model::{CommandShown, Part, Snapshot};
use crate::queries::why::Reason;
use crate::screen::list::orders;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use std::time::{Duration, Instant};

#[derive(Clone, Debug)]
pub enum BoardEvent {
    Key(KeyEvent),
    Resized,
    Snapshot(Box<Snapshot>),
    /// The connection is lost, and tried again after this time.
    Lost(String, Duration),
    Opened(Box<OpenedMessage>),
    /// Why a message waits, with the remedy, if there is one.
    Remedy(Part<Option<Reason>>),
    Done(Notice),
    /// What the worker of this process does now, and whether it was asked to end.
    Worker {
        own: Box<OwnWorker>,
        now: Instant,
        ends: bool,
    },
}

#[derive(Clone, Debug, PartialEq)]
pub enum BoardRequest {
    /// End the program, or the worker in order; a second request ends it immediately.
    End,
    /// The worker claims nothing (true), or claims again (false).
    Hold(bool),
    /// Give a text to the clipboard of the terminal.
    Copy(String),
    // Of the task with the session:
    Interval(Duration),
    Open {
        seq: i64,
        destination: String,
    },
    /// Read the remedy for a message.
    Remedy {
        seq: i64,
        destination: String,
    },
    Act(OperatorAction),
}

/// Intervals that + and - go through.
const INTERVALS_MS: [u64; 9] = [200, 500, 1_000, 2_000, 5_000, 10_000, 30_000, 60_000, 300_000];

/// The rows that PgUp and PgDn move.
const PAGE_ROWS: usize = 10;

pub fn update(state: &mut BoardState, event: BoardEvent) -> Option<BoardRequest> {
    match event {
        BoardEvent::Key(key) => return on_key(state, key),
        BoardEvent::Resized => {}
        BoardEvent::Snapshot(snapshot) => state.take(snapshot),
        BoardEvent::Lost(why, next_try) => state.lost = Some((why, next_try)),
        BoardEvent::Opened(opened) => state.opened = Some(*opened),
        BoardEvent::Remedy(Ok(None)) => return copy_command(state, None, None),
        BoardEvent::Remedy(Ok(Some(Reason { commands, remedy, .. }))) => {
            return copy_command(state, first(&commands), remedy.as_deref());
        }
        BoardEvent::Remedy(Err(why)) => state.notice = Some(Notice::new(why, true)),
        BoardEvent::Done(notice) => state.notice = Some(notice),
        BoardEvent::Worker { own, now, ends } => {
            state.take_own(*own, now);
            state.ends = ends;
        }
    }
    None
}

fn on_key(state: &mut BoardState, key: KeyEvent) -> Option<BoardRequest> {
    // Esc followed immediately by a key looks like Alt.
    if key.modifiers.intersects(KeyModifiers::CONTROL | KeyModifiers::ALT) {
        return None;
    }
    let key = key.code;
    state.notice = None;
    match std::mem::replace(&mut state.mode, BoardMode::Watch) {
        BoardMode::Watch => watch(state, key),
        BoardMode::Filter(before) => {
            filter(state, key, before);
            None
        }
        BoardMode::Page(page, scroll) => {
            let scrolled = match (key, &page) {
                (key, BoardPage::Health) => to_row(key, scroll, state.shown.problems.iter().flatten().count()),
                (KeyCode::Char(' '), _) => Some(scroll + PAGE_ROWS),
                (KeyCode::Char('G') | KeyCode::End, _) => None, // where it ends is not known here
                (key, _) => to_row(key, scroll, usize::MAX),
            };
            match (scrolled, page) {
                (None, page) if key == KeyCode::Char('y') => {
                    let asked = match &page {
                        BoardPage::Health => copy_of_problem(state, scroll),
                        BoardPage::Row(id) => copy_of_row(state, Some(id)),
                        BoardPage::Help => None,
                    };
                    state.mode = BoardMode::Page(page, scroll);
                    return asked;
                }
                (Some(scroll), page) => state.mode = BoardMode::Page(page, scroll),
                (None, BoardPage::Row(id)) if is_action(key) => ask(state, key, Some(id)),
                (None, _) => {}
            }
            None
        }
        BoardMode::Confirm(action) if key == KeyCode::Char('y') => Some(BoardRequest::Act(action)),
        BoardMode::Confirm(_) => {
            state.notice = Some(Notice::new("Nothing was done.", false));
            None
        }
    }
}

/// The row, of this many, that a key selects. `None` = it selects none.
fn to_row(key: KeyCode, from: usize, rows: usize) -> Option<usize> {
    let last = rows.saturating_sub(1);
    match key {
        KeyCode::Char('j') | KeyCode::Down => Some((from + 1).min(last)),
        KeyCode::Char('k') | KeyCode::Up => Some(from.saturating_sub(1)),
        KeyCode::PageDown => Some((from + PAGE_ROWS).min(last)),
        KeyCode::PageUp => Some(from.saturating_sub(PAGE_ROWS)),
        KeyCode::Char('g') | KeyCode::Home => Some(0),
        KeyCode::Char('G') | KeyCode::End => Some(last),
        _ => None,
    }
}

fn watch(state: &mut BoardState, key: KeyCode) -> Option<BoardRequest> {
    let (panes, pane) = (state.panes(), state.pane as usize);
    match key {
        KeyCode::Char('q') => return Some(BoardRequest::End),
        KeyCode::Char('?') => state.mode = BoardMode::Page(BoardPage::Help, 0),
        KeyCode::Char('h') => state.mode = BoardMode::Page(BoardPage::Health, 0),
        KeyCode::Char(' ') if state.own.is_some() => {
            state.holds = !state.holds;
            return Some(BoardRequest::Hold(state.holds));
        }
        KeyCode::Char(' ') => match state.held.take() {
            Some(newest) => state.shown = *newest,
            None => state.held = Some(Box::new(state.shown.clone())),
        },
        KeyCode::Char('+' | '=') => return interval(state, true),
        KeyCode::Char('-') => return interval(state, false),
        KeyCode::Char('/') => state.mode = BoardMode::Filter(state.pane_state().filter.clone()),
        KeyCode::Esc => state.pane_mut().filter.clear(),
        KeyCode::Char('s') => {
            let orders = rows::of(state.pane, state).map_or(0, |rows| orders(&rows).len());
            let pane = state.pane_mut();
            pane.order = (pane.order + 1) % (orders + 1);
        }
        KeyCode::Enter => return open(state),
        KeyCode::Char('y') => {
            let id = state.selected_id();
            return copy_of_row(state, id.as_deref());
        }
        KeyCode::Tab => state.pane = panes[(pane + 1) % panes.len()],
        KeyCode::BackTab => state.pane = panes[(pane + panes.len() - 1) % panes.len()],
        KeyCode::Char(digit @ '1'..='9') => {
            state.pane = *panes.get(digit as usize - '1' as usize).unwrap_or(&state.pane);
        }
        key if is_action(key) => {
            let id = state.selected_id();
            ask(state, key, id);
        }
        key => {
            let (rows, _) = state.rows(state.pane).unwrap_or_default();
            let row = to_row(key, state.selected(state.pane, &rows), rows.len())?;
            state.pane_mut().index = row;
            // At its newest line the log follows new ones.
            let is_fixed = row > 0 || state.pane != Pane::Log;
            let id = rows.into_iter().nth(row).filter(|_| is_fixed).map(|row| row.id);
            state.pane_mut().selected = id;
        }
    }
    None
}

fn filter(state: &mut BoardState, key: KeyCode, before: String) {
    const LENGTH_MAX: usize = 100;
    let filter = &mut state.pane_mut().filter;
    match key {
        KeyCode::Enter => return,
        KeyCode::Esc => {
            *filter = before;
            return;
        }
        KeyCode::Backspace => _ = filter.pop(),
        KeyCode::Char(c) if filter.chars().count() < LENGTH_MAX => filter.push(c),
        _ => {}
    }
    state.mode = BoardMode::Filter(before);
}

fn interval(state: &mut BoardState, longer: bool) -> Option<BoardRequest> {
    let now = state.interval.as_millis() as u64;
    let next = match longer {
        true => INTERVALS_MS.iter().find(|ms| **ms > now),
        false => INTERVALS_MS.iter().rev().find(|ms| **ms < now),
    };
    state.interval = Duration::from_millis(*next?);
    Some(BoardRequest::Interval(state.interval))
}

fn open(state: &mut BoardState) -> Option<BoardRequest> {
    let id = state.selected_id()?;
    let message = message(state, &id);
    if state.pane == Pane::Messages && message.is_none() {
        state.opened_group = Some(id).filter(|id| state.opened_group.as_ref() != Some(id));
        return None;
    }
    state.mode = BoardMode::Page(BoardPage::Row(id), 0);
    state.opened = None;
    let (seq, destination) = message?;
    Some(BoardRequest::Open { seq, destination })
}

/// Copies the command that ends the n-th problem.
fn copy_of_problem(state: &mut BoardState, n: usize) -> Option<BoardRequest> {
    let problem = state.shown.problems.iter().flatten().take(n + 1).last().cloned();
    match problem {
        Some(problem) => copy_command(state, first(&problem.commands), Some(&problem.remedy)),
        None => copy_command(state, None, None),
    }
}

/// Copies the command that helps the message of a row, which must be read first, or the messages of a group. In other
/// panes it is that of the first problem.
fn copy_of_row(state: &mut BoardState, id: Option<&str>) -> Option<BoardRequest> {
    let Some(id) = id.filter(|_| state.pane == Pane::Messages) else {
        return copy_of_problem(state, 0);
    };
    match message(state, id) {
        Some((seq, destination)) => Some(BoardRequest::Remedy { seq, destination }),
        None => {
            let command = groups::retry_command(state, id);
            copy_command(state, command.as_deref(), None)
        }
    }
}

/// The command to try first.
fn first(commands: &[CommandShown]) -> Option<&str> {
    commands.first().map(|first| first.command.as_str())
}

/// Copies a command, and shows it, because a terminal may refuse the copy; or says that there is none, with the remedy. A
/// control character in a text that is pasted could run it.
fn copy_command(state: &mut BoardState, command: Option<&str>, remedy: Option<&str>) -> Option<BoardRequest> {
    let command = command.map(harmless);
    state.notice = Some(match (&command, remedy) {
        (Some(command), _) => Notice::new(format!("Copied: {command}"), false),
        (None, None) => Notice::new("There is no command to copy.", true),
        (None, Some(remedy)) => Notice::new(format!("There is no command to copy: {remedy}"), true),
    });
    command.map(BoardRequest::Copy)
}

/// The seq and the destination of a row of messages.
fn message(state: &BoardState, id: &str) -> Option<(i64, String)> {
    let (seq, destination) = id.split_once(' ').filter(|_| state.pane == Pane::Messages)?;
    Some((seq.parse().ok()?, destination.to_owned()))
}

fn is_action(key: KeyCode) -> bool {
    matches!(key, KeyCode::Char('r' | 'd' | 'p'))
}

/// Asks for confirmation of the action of a key, on the row of that name.
fn ask(state: &mut BoardState, key: KeyCode, id: Option<String>) {
    let id = id.unwrap_or_default();
    let action = match (key, state.pane) {
        _ if state.own.is_some() => Err("Actions need outboxctl top --allow-actions."),
        _ if !state.may_act => Err("Actions are off: start with --allow-actions."),
        (KeyCode::Char('p'), Pane::Destinations) if !id.is_empty() => Ok(pause_or_resume(state, id)),
        (KeyCode::Char('p'), _) => Err("Select a destination to pause or resume: press 3."),
        (key, _) => match message(state, &id) {
            None if state.pane == Pane::Messages && !id.is_empty() => {
                Err("Open the group with Enter, and select a message. y copies the command for all.")
            }
            None => Err("Select a message to retry or discard: press 5."),
            Some((seq, destination)) => {
                let verb = if key == KeyCode::Char('d') {
                    Verb::Discard
                } else {
                    Verb::Retry
                };
                let seq = Some(seq);
                Ok(OperatorAction { verb, seq, destination })
            }
        },
    };
    match action {
        Ok(action) => state.mode = BoardMode::Confirm(action),
        Err(why) => state.notice = Some(Notice::new(why, true)),
    }
}

fn pause_or_resume(state: &BoardState, destination: String) -> OperatorAction {
    let mut rows = state.shown.destinations.iter().flatten();
    let verb = match rows.any(|row| row.name == destination && row.paused) {
        true => Verb::Resume,
        false => Verb::Pause,
    };
    let seq = None;
    OperatorAction { verb, seq, destination }
}
