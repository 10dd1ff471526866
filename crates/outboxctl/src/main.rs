//! `outboxctl` monitors, controls and runs the outbox of a database from outside its server: over SQL, with the views
//! and functions of the extension and some of its internal ones, and with the rights of its role.

mod board;
mod commands;
mod connect;
mod failure;
mod format;
mod listen;
mod messages;
mod operation;
mod output;
mod pages;
mod progress;
mod queries;
mod screen;
mod serve;
mod shutdown;
mod top;
mod usage;
mod work;

use clap::{CommandFactory, Parser, Subcommand};
use commands::{CommandContext, act, check, delivery, list, show, status, version};
use connect::ConnectArgs;
use failure::Failure;
use messages::bulk::Verb;
use std::process::ExitCode;

/// Monitor, control and run the outbox of a database from outside its server
#[derive(Parser)]
#[command(name = "outboxctl", version, disable_help_flag = true, after_help = pages::EXIT_CODES)]
struct Cli {
    #[command(flatten)]
    connect: ConnectArgs,
    /// Print JSON: one document, or one for each line of a list
    #[arg(long, global = true, help_heading = "Output")]
    json: bool,
    /// Print help
    #[arg(long, action = clap::ArgAction::Help, global = true, help_heading = "Output")]
    help: Option<bool>,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Show the backlog, the workers, the destinations and what is wrong
    Status(status::StatusArgs),
    /// Check whether a destination can be used
    Check(check::CheckArgs),
    /// List messages by filter, one page at a time
    List(messages::by_seq::BySeq),
    /// Show all of one message, and why it is not delivered
    Show(show::ShowArgs),
    /// Retry dead letters, or deliver a waiting message immediately
    Retry(act::RetryArgs),
    /// Discard dead letters or waiting messages
    Discard(act::DeadArgs),
    /// Send published or discarded messages again
    Replay(act::ReplayArgs),
    /// Stop delivery to a destination; messages wait
    Pause(delivery::PauseArgs),
    /// Resume delivery to a paused destination
    Resume(delivery::PauseArgs),
    /// Have the workers deliver the backlog in stored order, and wait until they are done
    Relay(delivery::RelayArgs),
    /// Serve a live web page, and metrics for Prometheus
    Serve(serve::ServeArgs),
    /// Receive the messages of a destination by HTTP, and print them
    Listen(listen::ListenArgs),
    /// Deliver as a worker outside the server
    Work(work::WorkArgs),
    /// Show the versions of this program, the extension and the server
    Version,
    /// Show the outbox live in a terminal
    Top(top::TopArgs),
    /// Print the completions for a shell
    Completions(pages::CompletionsArgs),
    /// Print the man page, or write one for each command
    Man(pages::ManArgs),
}

fn main() -> ExitCode {
    // SAFETY: the process still has only one thread.
    unsafe { outbox_transport::prepare_process() };
    let runtime = tokio::runtime::Runtime::new().expect("threads");
    let code = runtime.block_on(run());
    runtime.shutdown_background(); // the end does not wait for the look-up of a host
    code
}

async fn run() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return refuse(&error),
    };
    let context = CommandContext {
        connect: cli.connect,
        json: cli.json,
    };
    let result = match &cli.command {
        Command::Status(args) => status::run(&context, args).await,
        Command::Check(args) => check::run(&context, args).await,
        Command::List(args) => list::run(&context, args).await,
        Command::Show(args) => show::run(&context, args).await,
        Command::Retry(args) => act::retry(&context, args).await,
        Command::Discard(args) => act::dead(&context, Verb::Discard, args).await,
        Command::Replay(args) => act::replay(&context, args).await,
        Command::Pause(args) => delivery::switch(&context, Verb::Pause, args).await,
        Command::Resume(args) => delivery::switch(&context, Verb::Resume, args).await,
        Command::Relay(args) => delivery::relay(&context, args).await,
        Command::Serve(args) => serve::run(&context, args).await,
        Command::Listen(args) => listen::run(&context, args).await,
        Command::Work(args) => work::run(&context, args).await,
        Command::Version => version::run(&context).await,
        Command::Top(args) => top::run(&context, args).await,
        Command::Completions(args) => pages::completions(args, Cli::command()),
        Command::Man(args) => pages::man(args, Cli::command()),
    };
    connect::end_sessions().await;
    result.unwrap_or_else(|failure| fail(&failure, context.json))
}

/// Prints the requested help or version, or what is wrong with the command line.
fn refuse(error: &clap::Error) -> ExitCode {
    if !error.use_stderr() || error.kind() == clap::error::ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        let _ = error.print(); // a closed pipe is no failure: its reader needs no more
        return ExitCode::from(error.exit_code() as u8);
    }
    let words: Vec<String> = std::env::args().skip(1).collect();
    let program = Cli::command();
    let command = words.iter().find(|word| program.find_subcommand(word).is_some());
    fail(
        &usage::failure(error, command.map(String::as_str)),
        words.iter().any(|word| word == "--json"),
    )
}

fn fail(failure: &Failure, json: bool) -> ExitCode {
    match json {
        true => eprintln!("{}", failure.json()),
        false => eprintln!("outboxctl: {failure}"),
    }
    ExitCode::from(failure.code as u8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_arguments_do_not_contradict_each_other() {
        Cli::command().debug_assert();
    }

    #[test]
    fn serve_takes_its_database_before_and_behind_its_name() {
        for line in ["outboxctl -d shop serve", "outboxctl serve -d shop"] {
            let cli = Cli::try_parse_from(line.split(' ')).unwrap();
            assert_eq!(cli.connect.dbname.as_deref(), Some("shop"), "{line}");
        }
    }
}
