//! `outboxctl top`: the board of a database on a terminal; a frame, lines or JSON elsewhere.

pub mod lines;

use crate::board::{self, BoardEvent, BoardReader, BoardState};
use crate::commands::CommandContext;
use crate::failure::Failure;
use crate::output;
use crate::queries::model::Snapshot;
use crate::screen::terminal;
use crate::shutdown::Shutdown;
use std::process::ExitCode;
use std::time::Duration;
use tokio::signal::unix::SignalKind;
use tokio::sync::mpsc::channel;

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

pub async fn run(context: &CommandContext, args: &TopArgs) -> Result<ExitCode, Failure> {
    let interval = Duration::from_millis(args.interval_ms);
    let mut reader = BoardReader::new(&context.connect, "outboxctl top", args.allow_actions);
    let first = reader.read().await?;
    if !context.json && (args.once || terminal::is_there()) {
        let state = BoardState::new(first, interval, args.allow_actions);
        if args.once {
            let width = output::columns().unwrap_or(100);
            print_line(&board::as_frame(&state, width.clamp(20, 500)))?;
            return Ok(ExitCode::SUCCESS);
        }
        let stop = Shutdown::on_signals()?;
        stop.on(SignalKind::hangup(), Shutdown::begin)?;
        let ended = tokio::select! {
            () = stop.requested() => Ok(ExitCode::SUCCESS),
            failure = board::show(state, reader, &stop, None) => Err(failure),
        };
        terminal::restore();
        return ended;
    }
    let line: fn(&Snapshot) -> String = if context.json { lines::json } else { lines::line };
    print_line(&line(&first))?;
    if args.once {
        return Ok(ExitCode::SUCCESS);
    }
    // A line for each reading, until a signal ends it or the output is closed.
    let stop = Shutdown::on_signals()?;
    stop.on(SignalKind::hangup(), Shutdown::begin)?;
    let (_requests, none) = channel(1);
    let print = |event| match event {
        BoardEvent::Snapshot(snapshot) => print_line(&line(&snapshot)),
        BoardEvent::Lost(why, next_try) => {
            let ms = next_try.as_millis();
            output::log(&format!("connection lost: {why}; next try in {ms} ms"));
            Ok(())
        }
        _ => Ok(()),
    };
    tokio::select! {
        () = stop.requested() => Ok(ExitCode::SUCCESS),
        ended = reader.watch(interval, none, print) => ended.map(|()| ExitCode::SUCCESS),
    }
}

fn print_line(text: &str) -> Result<(), Failure> {
    output::print(&format!("{text}\n"))
}
