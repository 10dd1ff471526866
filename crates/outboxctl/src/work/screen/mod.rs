//! The screen of a worker outside the server: live, on the terminal of whoever started it. `state` is what is shown, `update`
//! what an event makes of it, `view` a frame of it, all pure; `pending` counts what waits, in a session of its own. Two
//! threads: one reads keys, one draws what the worker has written on its board. Nobody waits for either of them.

#[cfg(test)]
mod fixture;
mod pending;
mod state;
#[cfg(test)]
mod tests;
mod update;
mod view;

use super::board::Board;
use super::snapshot::Snapshot;
use super::stop::Stop;
use crate::connect::ConnectArgs;
use crate::screen::keys::with_control;
use crate::screen::terminal::{self, Input};
use crate::screen::theme::Theme;
use state::State;
use std::convert::Infallible;
use std::io::{self, IsTerminal, stdin};
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::time::Duration;
use tokio::sync::oneshot;
use update::{Event, Request, update};

/// How often it draws, but for keys.
const DRAW_EVERY: Duration = Duration::from_millis(250);

/// More than a person types between two frames.
const EVENTS_MAX: usize = 64;

/// Whether there is a person, and a terminal for the screen.
pub fn is_possible() -> bool {
    terminal::is_there() && stdin().is_terminal()
}

/// Shows the board from now on, until `terminal::restore`. What comes back: why it cannot, if it cannot.
pub fn show(board: &Arc<Board>, connect: &ConnectArgs, stop: &Stop) -> oneshot::Receiver<io::Error> {
    let (trouble, why_not) = oneshot::channel();
    let (own_board, own_stop) = (Arc::clone(board), stop.clone());
    std::thread::spawn(move || {
        let Err(error) = draw(&own_board, &own_stop);
        // A terminal that is gone: nobody is there who could end the worker.
        own_stop.begin();
        _ = trouble.send(error);
    });
    // Whoever could answer sees the screen, and no question.
    let connect = ConnectArgs {
        no_password: true,
        ..connect.clone()
    };
    tokio::spawn(pending::watch(connect, Arc::clone(board)));
    why_not
}

/// Draws until the program ends. Where nobody reads the terminal, it waits here, and nowhere else.
fn draw(board: &Board, stop: &Stop) -> io::Result<Infallible> {
    let mut screen = terminal::Screen::enter()?;
    let (events, inbox) = sync_channel(EVENTS_MAX);
    let own_stop = stop.clone();
    // Not before: it changes the terminal as well.
    std::thread::spawn(move || read_keys(&events, &own_stop));
    let mut state = State::new(Snapshot::default(), Theme::from_env());
    loop {
        if stop.is_requested() {
            update(&mut state, Event::Ends);
        }
        if let Some(snapshot) = board.snapshot() {
            update(&mut state, Event::Snapshot(Box::new(snapshot)));
        }
        screen.0.draw(|frame| view::draw(&state, frame))?;
        // All that has come: a frame each would lag behind a key that is held down.
        let mut next = match inbox.recv_timeout(DRAW_EVERY) {
            Ok(event) => Some(event),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => return Err(io::ErrorKind::UnexpectedEof.into()),
        };
        while let Some(event) = next {
            if matches!(event, Event::Input(Input::Resized)) {
                screen.draw_anew()?;
            }
            match update(&mut state, event) {
                Some(Request::End) => stop.ask(),
                Some(Request::Hold(holds)) => board.hold(holds),
                None => {}
            }
            next = inbox.try_recv().ok();
        }
    }
}

/// Reading keys blocks, until the program ends.
fn read_keys(events: &SyncSender<Event>, stop: &Stop) {
    // An error: the terminal is gone.
    while let Ok(input) = terminal::input() {
        // At once, also while a frame waits for a terminal that nobody reads.
        if matches!(input, Input::Key(key) if with_control(key, &['c'])) {
            stop.ask();
            continue;
        }
        // Without room it is dropped: whoever types cannot see what it would do.
        if let Err(TrySendError::Disconnected(_)) = events.try_send(Event::Input(input)) {
            return;
        }
    }
    stop.begin();
}
