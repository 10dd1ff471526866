//! `outboxctl top`: the outbox of a database on a terminal, live. `state` is the data that is shown, `update` applies
//! an event to it, `view` draws a frame of it, all pure. `data` talks to the database, this file to the terminal and
//! between them.

mod data;
mod detail;
#[cfg(test)]
mod fixture;
mod lines;
mod state;
#[cfg(test)]
mod tests;
mod update;
mod view;

use crate::commands::Context;
use crate::failure::{Code, Failure};
use crate::output;
use crate::queries::model::Snapshot;
use crate::screen::frame::as_text;
use crate::screen::terminal::{self, Input, Screen};
use crate::screen::theme::Theme;
use data::Session;
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::crossterm::terminal::size;
use state::State;
use std::io;
use std::process::ExitCode;
use std::time::Duration;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc::{Receiver, Sender, channel};
use update::{Event, Request, update};

#[derive(clap::Args)]
pub struct TopArgs {
    /// Time between two readings of the database, in milliseconds
    #[arg(long, value_name = "MS", default_value_t = 1000, value_parser = clap::value_parser!(u64).range(100..=3_600_000))]
    interval_ms: u64,
    /// Let keys retry and discard messages, pause and resume destinations; each asks for confirmation
    #[arg(long)]
    allow_actions: bool,
    /// Print one frame as text, and exit
    #[arg(long)]
    once: bool,
}

pub async fn run(context: &Context, args: &TopArgs) -> Result<ExitCode, Failure> {
    let interval = Duration::from_millis(args.interval_ms);
    let mut session = Session::open(&context.connect, args.allow_actions).await?;
    let first = session.read().await?;
    let line: fn(&Snapshot) -> String = if context.json { lines::json } else { lines::line };
    if args.once && context.json {
        print_line(&line(&first))?;
        return Ok(ExitCode::SUCCESS);
    }
    if !args.once && (context.json || !terminal::is_there()) {
        return print_lines(line, &first, session, interval).await;
    }
    let mut state = State::new(first, interval, args.allow_actions, Theme::from_env());
    match args.once {
        true => print_frame(&state),
        false => show(&mut state, session).await,
    }
}

// ---- on a terminal --------------------------------------------------------------------------------------------------

/// More than a person types, or a database answers, between two frames.
const EVENTS_MAX: usize = 64;

async fn show(state: &mut State, session: Session) -> Result<ExitCode, Failure> {
    let (events, mut inbox) = channel(EVENTS_MAX);
    let (requests, wishes) = channel(EVENTS_MAX);
    let mut stop = Stop::new()?;
    let mut screen = Screen::enter().map_err(no_terminal)?;
    let mut watching = tokio::spawn(data::watch(session, state.interval, wishes, events.clone()));
    std::thread::spawn(move || read_keys(&events));
    while !state.has_ended {
        screen.0.draw(|frame| view::draw(state, frame)).map_err(no_terminal)?;
        tokio::select! {
            event = inbox.recv() => {
                // Everything that has arrived: a frame for each event would lag behind a key that is held down.
                let mut next = event;
                while let Some(event) = next {
                    if matches!(event, Event::Input(Input::Resized)) {
                        screen.redraw().map_err(no_terminal)?;
                    }
                    take(state, event, &requests);
                    next = inbox.try_recv().ok();
                }
            }
            () = stop.come() => take(state, Event::Stop, &requests),
            ended = &mut watching => {
                drop(screen);
                let why = ended.err().map_or_else(|| "it ended".into(), |error| error.to_string());
                return Err(Failure::new(Code::Refused, format!("the task that reads the database: {why}")));
            }
        }
    }
    drop(screen);
    watching.abort();
    Ok(ExitCode::SUCCESS)
}

fn take(state: &mut State, event: Event, requests: &Sender<Request>) {
    let Some(request) = update(state, event) else {
        return;
    };
    // The session hangs, and many keys were pressed meanwhile.
    if requests.try_send(request).is_err() {
        state.notice = Some(state::Notice {
            text: "The database does not answer: the key is ignored.".into(),
            is_bad: true,
        });
    }
}

/// Runs on a separate thread until the program ends: reading keys blocks.
fn read_keys(events: &Sender<Event>) {
    loop {
        // An error: the terminal is gone.
        let event = terminal::input().map_or(Event::Stop, Event::Input);
        let is_last = matches!(event, Event::Stop);
        if events.blocking_send(event).is_err() || is_last {
            return;
        }
    }
}

fn no_terminal(error: io::Error) -> Failure {
    Failure::new(Code::Refused, format!("the terminal: {error}"))
}

/// The signals that end the program in order.
struct Stop([Signal; 3]);

impl Stop {
    fn new() -> Result<Self, Failure> {
        let on = |kind| signal(kind).map_err(|error| Failure::new(Code::Refused, format!("signals: {error}")));
        Ok(Self([
            on(SignalKind::terminate())?,
            on(SignalKind::interrupt())?,
            on(SignalKind::hangup())?,
        ]))
    }

    async fn come(&mut self) {
        let [terminate, interrupt, hangup] = &mut self.0;
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
            _ = hangup.recv() => {}
        }
    }
}

// ---- as text --------------------------------------------------------------------------------------------------------

/// A line for each reading, until a signal ends it or the output is closed.
async fn print_lines(
    line: fn(&Snapshot) -> String,
    first: &Snapshot,
    session: Session,
    interval: Duration,
) -> Result<ExitCode, Failure> {
    let mut stop = Stop::new()?;
    print_line(&line(first))?;
    let (events, mut inbox): (_, Receiver<Event>) = channel(EVENTS_MAX);
    let (_requests, wishes) = channel(EVENTS_MAX);
    tokio::spawn(data::watch(session, interval, wishes, events));
    loop {
        let event = tokio::select! {
            event = inbox.recv() => event,
            () = stop.come() => None,
        };
        match event {
            Some(Event::Snapshot(snapshot)) => print_line(&line(&snapshot))?,
            Some(Event::Lost { why, next_try }) => {
                let why = crate::screen::text::harmless(&why);
                eprintln!(
                    "outboxctl: connection lost: {why}; next try in {} ms",
                    next_try.as_millis()
                );
            }
            Some(_) => {}
            None => return Ok(ExitCode::SUCCESS),
        }
    }
}

/// One frame as text, high enough for everything.
fn print_frame(state: &State) -> Result<ExitCode, Failure> {
    let from_env = || std::env::var("COLUMNS").ok()?.parse().ok();
    let of_terminal = || size().ok().map(|(width, _)| width);
    let width: u16 = from_env().or_else(of_terminal).unwrap_or(100);
    let width = width.clamp(20, 500);
    print_line(&frame_as_text(state, width, view::height_of_all(state, width)))?;
    Ok(ExitCode::SUCCESS)
}

fn frame_as_text(state: &State, width: u16, height: u16) -> String {
    let Ok(mut terminal) = Terminal::new(TestBackend::new(width, height));
    let Ok(_) = terminal.draw(|frame| view::draw(state, frame));
    as_text(terminal.backend().buffer())
}

fn print_line(text: &str) -> Result<(), Failure> {
    output::print(&format!("{text}\n"))
}
