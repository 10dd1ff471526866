//! The board: the outbox of a database on a terminal, live. `state` is the data that is shown, `update` applies an
//! event to it, `view` draws a frame of it, all pure. `reader` talks to the database, this file to the terminal. `top`
//! shows it, and `work` with the worker of its process.
//!
//! | module | question it answers |
//! |---|---|
//! | `state`, `update` | what is shown, and what does a key or a reading change? |
//! | `view`, `panels`, `page` | what stands where? |
//! | `rows`, `panel` | which fields has a row, and how does a list fit into its place? |
//! | `groups` | which failed messages have the same cause? |
//! | `own` | what does `work` show in addition to the outbox? |
//! | `reader` | what is read from the database, and how often? |

#[cfg(test)]
mod fixture;
mod groups;
mod own;
mod page;
mod panel;
mod panels;
mod reader;
mod rows;
mod state;
#[cfg(test)]
mod tests;
mod update;
mod view;

pub use panels::report;
pub use reader::BoardReader;
pub use state::BoardState;
pub use update::BoardEvent;

use crate::failure::{Code, Failure};
use crate::progress::WorkerProgress;
use crate::screen::frame::as_text;
use crate::screen::terminal::RawTerminal;
use crate::shutdown::Shutdown;
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::crossterm::event::{Event, KeyCode, KeyEventKind, KeyModifiers, read};
use state::Notice;
use std::convert::Infallible;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::time::{Duration, Instant};
use tokio::sync::mpsc::{Sender, channel};
use tokio::sync::oneshot;
use update::{BoardRequest, update};

/// The bound of each queue, more than an operator types between two frames. When it is full, a key or a reading is
/// dropped: the screen lags too far behind to show it.
const QUEUE_MAX: usize = 64;

/// The longest time between two frames: what the worker of this process does changes without an event.
const DRAW_EVERY: Duration = Duration::from_millis(250);

/// Shows the board until the program ends; the caller then gives the terminal back. It returns if the terminal or the
/// reading fails. Only the thread that draws waits for a terminal that does not read its output.
pub async fn show(
    state: BoardState,
    reader: BoardReader,
    stop: &Shutdown,
    worker: Option<Arc<WorkerProgress>>,
) -> Failure {
    let (events, inbox) = sync_channel(QUEUE_MAX);
    let (requests, wishes) = channel(QUEUE_MAX);
    let (trouble, why) = oneshot::channel();
    let (interval, keys, own_stop) = (state.interval, events.clone(), stop.clone());
    std::thread::spawn(move || {
        let Err(error) = draw(state, keys, &inbox, &requests, &own_stop, worker.as_deref());
        // The terminal is gone, so no key could end the program.
        own_stop.begin();
        _ = trouble.send(error);
    });
    let emit = |event| match events.try_send(event) {
        Err(TrySendError::Disconnected(_)) => Err(Failure::new(Code::Refused, "the screen ended")),
        _ => Ok(()),
    };
    tokio::select! {
        biased;
        error = why => match error {
            Ok(error) => Failure::new(Code::Refused, format!("the terminal: {error}")),
            Err(_) => Failure::new(Code::Refused, "the screen ended"), // its thread panicked
        },
        ended = reader.watch(interval, wishes, emit) => {
            ended.err().unwrap_or_else(|| Failure::new(Code::Refused, "the screen ended"))
        }
    }
}

fn draw(
    mut state: BoardState,
    keys: SyncSender<BoardEvent>,
    inbox: &Receiver<BoardEvent>,
    requests: &Sender<BoardRequest>,
    stop: &Shutdown,
    worker: Option<&WorkerProgress>,
) -> io::Result<Infallible> {
    let mut screen = RawTerminal::enter()?;
    let own_stop = stop.clone();
    // The thread starts only now, because it changes the terminal as well.
    std::thread::spawn(move || read_keys(&keys, &own_stop));
    loop {
        if let Some(worker) = worker {
            let (own, now, ends) = (Box::new(worker.copy()), Instant::now(), stop.is_requested());
            update(&mut state, BoardEvent::Worker { own, now, ends });
        }
        screen.0.draw(|frame| view::draw(&state, frame))?;
        // Handles all queued events before the next frame: one frame for each would lag behind a key that is held down.
        let mut next = match inbox.recv_timeout(DRAW_EVERY) {
            Err(RecvTimeoutError::Disconnected) => return Err(io::ErrorKind::UnexpectedEof.into()),
            event => event.ok(),
        };
        while let Some(event) = next {
            if matches!(event, BoardEvent::Resized) {
                screen.redraw()?;
            }
            match update(&mut state, event) {
                None => {}
                Some(BoardRequest::End) => stop.request(),
                Some(BoardRequest::Copy(text)) => screen.copy(&text)?,
                Some(BoardRequest::Hold(holds)) => worker.iter().for_each(|worker| worker.hold(holds)),
                Some(request) => {
                    let sent = requests.try_send(request);
                    if sent.is_err() {
                        state.notice = Some(Notice::new("The database does not answer: the key is ignored.", true));
                    }
                }
            }
            next = inbox.try_recv().ok();
        }
    }
}

/// Reads keys until the program ends. Each read blocks.
fn read_keys(events: &SyncSender<BoardEvent>, stop: &Shutdown) {
    // An error means that the terminal is gone.
    while let Ok(input) = read() {
        let event = match input {
            // Handled immediately, even while a frame waits for a terminal that does not read its output.
            Event::Key(key) if key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL) => {
                stop.request();
                continue;
            }
            Event::Key(key) if key.kind != KeyEventKind::Release => BoardEvent::Key(key),
            Event::Resize(..) => BoardEvent::Resized,
            _ => continue,
        };
        if let Err(TrySendError::Disconnected(_)) = events.try_send(event) {
            return;
        }
    }
    stop.begin();
}

/// One frame as text, high enough for everything.
pub fn as_frame(state: &BoardState, width: u16) -> String {
    let Ok(mut terminal) = Terminal::new(TestBackend::new(width, view::height_of_all(state, width)));
    let Ok(_) = terminal.draw(|frame| view::draw(state, frame));
    as_text(terminal.backend().buffer())
}
