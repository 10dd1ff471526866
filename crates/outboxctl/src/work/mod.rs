//! `outboxctl work`: a worker outside the server. It shares partitions, leases and claims with the workers in the server,
//! by SQL functions that the role outbox_relay may call.
//!
//! | module | question it answers |
//! |---|---|
//! | `worker` | when does a session begin, a pass, a tick, and the end? |
//! | `host` | what does the worker of crates/worker stand on here? |
//! | `port` | and each of its destinations? |
//! | `session` | which SQL is called, and what do the answers mean? |
//! | `settings` | what does it go by, and where are the secrets? |
//! | `totals` | what did the run do? |
//! | `args` | how is it told to run? |
//! | `stop` | how is it told to end? |
//! | `tick` | what did a tick do? |
//! | `look` | how are things with a worker at one moment? |
//! | `report` | what is printed? |
//! | `board` | what do the worker and its screen tell each other? |
//! | `screen` | what is shown on a terminal? |

mod args;
mod board;
mod host;
mod pass;
mod port;
mod report;
mod screen;
mod session;
mod settings;
mod snapshot;
mod stop;
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

/// Delivers until SIGTERM or SIGINT, or for one tick.
pub async fn run(context: &Context, args: &WorkArgs) -> Result<ExitCode, Failure> {
    if let Some(url) = &args.url {
        // Checked here and not by clap, which would repeat it: it may carry a password.
        outbox_transport::parse_url(url).map_err(|error| {
            Failure::new(Code::Usage, format!("--url (OUTBOX_URL) is refused: {error}"))
                .hint("Write amqp://user@host:5672/vhost, and put the password into a file that --password-file names.")
        })?;
    }
    let stop = Stop::on_signals()?;
    let has_screen = !(context.json || args.silent || args.once || args.no_screen) && screen::is_possible();
    let board = has_screen.then(|| Arc::new(Board::new()));
    if has_screen {
        stop.on(SignalKind::hangup(), Stop::begin)?; // a terminal that goes says it again and again
    }
    let (handle, connect, once) = (Handle::current(), context.connect.clone(), args.once);
    let args = WorkArgs {
        json: context.json, // a line for each tick
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
            // Not before: until then a password may be asked for.
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
