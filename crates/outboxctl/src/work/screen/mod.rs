//! The live screen of a worker outside the server, on the terminal where it was started. `state` holds what is shown,
//! `update` applies events to it, and `view` draws a frame from it; all three are pure. `pending` counts the pending
//! messages in a separate session. One thread reads keys, another draws what the worker has written to its board. The
//! worker waits for neither of them.

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

/// The interval between frames without keys.
const DRAW_EVERY: Duration = Duration::from_millis(250);

/// The bound of the queue of events, more than a person types between two frames. Further keys are dropped.
const EVENTS_MAX: usize = 64;

/// Whether there is a terminal for the screen and the keys.
pub fn is_possible() -> bool {
    terminal::is_there() && stdin().is_terminal()
}

/// Shows the board until `terminal::restore`. The receiver gets an error if the terminal fails.
pub fn show(board: &Arc<Board>, connect: &ConnectArgs, stop: &Stop) -> oneshot::Receiver<io::Error> {
    let (trouble, why_not) = oneshot::channel();
    let (own_board, own_stop) = (Arc::clone(board), stop.clone());
    std::thread::spawn(move || {
        let Err(error) = draw(&own_board, &own_stop);
        // The terminal is gone, so no key could end the worker.
        own_stop.begin();
        _ = trouble.send(error);
    });
    // The screen covers the terminal, so a question for a password would not be seen.
    let connect = ConnectArgs {
        no_password: true,
        ..connect.clone()
    };
    tokio::spawn(pending::watch(connect, Arc::clone(board)));
    why_not
}

/// Draws until the program ends. If the terminal does not read its output, only this thread waits.
fn draw(board: &Board, stop: &Stop) -> io::Result<Infallible> {
    let mut screen = terminal::Screen::enter()?;
    let (events, inbox) = sync_channel(EVENTS_MAX);
    let own_stop = stop.clone();
    // The thread starts only now, because it changes the terminal as well.
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
        // Handles all queued events before the next frame: one frame for each would lag behind a key that is held down.
        let mut next = match inbox.recv_timeout(DRAW_EVERY) {
            Ok(event) => Some(event),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => return Err(io::ErrorKind::UnexpectedEof.into()),
        };
        while let Some(event) = next {
            if matches!(event, Event::Input(Input::Resized)) {
                screen.redraw()?;
            }
            match update(&mut state, event) {
                Some(Request::End) => stop.request(),
                Some(Request::Hold(holds)) => board.hold(holds),
                None => {}
            }
            next = inbox.try_recv().ok();
        }
    }
}

/// Reads keys until the program ends. Each read blocks.
fn read_keys(events: &SyncSender<Event>, stop: &Stop) {
    // An error means that the terminal is gone.
    while let Ok(input) = terminal::input() {
        // Handled at once, even while a frame waits for a terminal that does not read its output.
        if matches!(input, Input::Key(key) if with_control(key, &['c'])) {
            stop.request();
            continue;
        }
        // If the queue is full, the key is dropped: the screen lags too far behind to show its effect.
        if let Err(TrySendError::Disconnected(_)) = events.try_send(Event::Input(input)) {
            return;
        }
    }
    stop.begin();
}
