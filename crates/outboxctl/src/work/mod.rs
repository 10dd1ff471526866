//! `outboxctl work`: a worker outside the server. It shares partitions, leases and claims with the workers in the
//! server. It works through SQL functions that the role outbox_relay may call.
//!
//! | module | question it answers |
//! |---|---|
//! | `worker` | when do a session and a pass begin and end, and when does the worker stop? |
//! | `runtime` | what does the worker of crates/worker run on here? |
//! | `tables` | how do its claims and settles reach the tables? |
//! | `context` | what does it know of its session and of shared memory? |
//! | `db` | how does a statement of the worker protocol run in the session? |
//! | `error` | why did a call fail, and does the session go on? |
//! | `worker_session` | which SQL functions are called, and what do their results mean? |
//! | `settings` | which settings apply, and where are the secrets? |
//! | `totals` | what has the whole run done? |
//! | `args` | which options does the command have? |
//! | `report` | what is printed? |

mod args;
mod context;
mod db;
mod error;
mod report;
mod runtime;
mod settings;
mod tables;
mod totals;
mod worker;
mod worker_session;

pub use args::WorkArgs;

use crate::board::{self, BoardReader, BoardState};
use crate::commands::CommandContext;
use crate::failure::{Code, Failure};
use crate::progress::WorkerProgress;
use crate::screen::terminal;
use crate::shutdown::Shutdown;
use outbox_transport::kind::Kind;
use report::Printer;
use std::io::{IsTerminal, stdin};
use std::process::ExitCode;
use std::sync::Arc;
use tokio::runtime::Handle;
use tokio::signal::unix::SignalKind;

/// Delivers until SIGTERM or SIGINT, or for one pass with `--once`.
pub async fn run(context: &CommandContext, args: &WorkArgs) -> Result<ExitCode, Failure> {
    if let Some(url) = &args.url {
        // Checked here and not by clap: clap would repeat the URL in its error, and the URL may contain a password.
        let kind = Kind::of_settings();
        let setting = kind.settings.iter().find(|setting| setting.option == "url");
        setting
            .map_or(Ok(()), |setting| setting.check(kind, url))
            .map_err(|(why, hint)| {
                Failure::new(Code::Usage, format!("invalid --url (OUTBOX_URL): {why}"))
                    .hint(format!("{hint} Here --password-file names that file."))
            })?;
    }
    let stop = Shutdown::on_signals()?;
    let has_screen =
        !(context.json || args.silent || args.once || args.no_screen) && terminal::is_there() && stdin().is_terminal();
    let progress = has_screen.then(|| Arc::new(WorkerProgress::new()));
    if has_screen {
        stop.on(SignalKind::hangup(), Shutdown::begin)?; // a terminal that closes may send SIGHUP repeatedly
    }
    let (handle, connect, once) = (Handle::current(), context.connect.clone(), args.once);
    let (args, json) = (args.clone(), context.json);
    let (for_worker, worker_stop) = (progress.clone(), stop.clone());
    let mut worker = tokio::task::spawn_blocking(move || {
        let screen = for_worker.as_ref();
        let mut printer = Printer::new(args.silent, json, args.window, screen.cloned());
        let ended = worker::run(&handle, &connect, &args, &worker_stop, screen, &mut printer);
        (ended, printer)
    });
    let (mut has_begun, mut trouble) = (false, None);
    let ended = match progress {
        None => worker.await,
        Some(progress) => tokio::select! {
            ended = &mut worker => ended,
            // The screen begins only now: until the worker has begun, it may ask for a password on the terminal.
            () = progress.begun() => {
                has_begun = true;
                let reader = BoardReader::new(&context.connect, "outboxctl work, screen", false);
                let state = BoardState::of_worker(progress.copy());
                let ended = tokio::select! {
                    ended = &mut worker => ended,
                    failure = board::show(state, reader, &stop, Some(progress)) => {
                        trouble = Some(failure);
                        worker.await
                    }
                };
                terminal::restore();
                ended
            }
        },
    };
    let (ended, mut printer) =
        ended.map_err(|error| Failure::new(Code::Refused, format!("the worker ended: {error}")))?;
    if ended.is_ok() || has_begun {
        printer.flush();
    }
    let failed = ended?;
    if let Some(failure) = trouble {
        return Err(failure);
    }
    Ok(match once && failed > 0 {
        true => ExitCode::from(Code::SomeFailed as u8),
        false => ExitCode::SUCCESS,
    })
}
