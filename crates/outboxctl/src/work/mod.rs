//! `outboxctl work`: a worker outside the server. It shares partitions, leases and claims with the workers in the
//! server. It works through SQL functions that the role outbox_relay may call.
//!
//! | module | question it answers |
//! |---|---|
//! | `worker` | when do a session and a pass begin and end, and when does the worker stop? |
//! | `runtime` | what does the worker of crates/worker run on here? |
//! | `tables` | how do its claims and settles reach the tables? |
//! | `context` | what does it know of its session and of shared memory? |
//! | `session` | which SQL functions are called, and what do their results mean? |
//! | `settings` | which settings apply, and where are the secrets? |
//! | `totals` | what has the whole run done? |
//! | `args` | which options does the command have? |
//! | `stop` | how does a signal or a key end the worker? |
//! | `pass` | what did a pass do? |
//! | `snapshot` | what is the state of the worker at one moment? |
//! | `report` | what is printed? |
//! | `board` | what do the worker and its screen exchange? |
//! | `screen` | what is shown on a terminal? |

mod args;
mod board;
mod context;
mod pass;
mod report;
mod runtime;
mod screen;
mod session;
mod settings;
mod snapshot;
mod stop;
mod tables;
mod totals;
mod worker;

pub use args::WorkArgs;

use crate::commands::Context;
use crate::failure::{Code, Failure};
use crate::screen::terminal;
use board::Board;
use report::Printer;
use std::process::ExitCode;
use std::sync::Arc;
use stop::Stop;
use tokio::runtime::Handle;
use tokio::signal::unix::SignalKind;

/// Delivers until SIGTERM or SIGINT, or for one pass with `--once`.
pub async fn run(context: &Context, args: &WorkArgs) -> Result<ExitCode, Failure> {
    if let Some(url) = &args.url {
        // Checked here and not by clap: clap would repeat the URL in its error, and the URL may contain a password.
        outbox_transport::parse_url(url).map_err(|error| {
            Failure::new(Code::Usage, format!("invalid --url (OUTBOX_URL): {error}"))
                .hint("Write amqp://user@host:5672/vhost, and put the password into a file that --password-file names.")
        })?;
    }
    let stop = Stop::on_signals()?;
    let has_screen = !(context.json || args.silent || args.once || args.no_screen) && screen::is_possible();
    let board = has_screen.then(|| Arc::new(Board::new()));
    if has_screen {
        stop.on(SignalKind::hangup(), Stop::begin)?; // a terminal that closes may send SIGHUP repeatedly
    }
    let (handle, connect, once) = (Handle::current(), context.connect.clone(), args.once);
    let args = WorkArgs {
        json: context.json, // prints one line for each pass
        ..args.clone()
    };
    let (for_worker, worker_stop) = (board.clone(), stop.clone());
    let mut worker = tokio::task::spawn_blocking(move || {
        let screen = for_worker.as_ref();
        let mut printer = Printer::new(args.silent, args.json, args.window, screen.cloned());
        let ended = worker::run(&handle, &connect, &args, &worker_stop, screen, &mut printer);
        (ended, printer)
    });
    let (mut has_begun, mut trouble) = (false, None);
    let ended = match board {
        None => worker.await,
        Some(board) => tokio::select! {
            ended = &mut worker => ended,
            // The screen begins only now: until the worker has begun, it may ask for a password on the terminal.
            () = board.begun() => {
                has_begun = true;
                let mut why_not = screen::show(&board, &context.connect, &stop);
                let ended = worker.await;
                trouble = why_not.try_recv().ok();
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
    if let Some(error) = trouble {
        return Err(Failure::new(Code::Refused, format!("the terminal: {error}")));
    }
    Ok(match once && failed > 0 {
        true => ExitCode::from(Code::SomeFailed as u8),
        false => ExitCode::SUCCESS,
    })
}
