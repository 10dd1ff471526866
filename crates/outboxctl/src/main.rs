//! `outboxctl`: see, steer and run the outbox of a database from outside its server. It uses only what SQL offers to all.

mod commands;
mod connect;
mod failure;
mod format;
mod messages;
mod output;
mod pages;
mod queries;
mod screen;
mod serve;
mod top;
mod usage;
mod work;

use clap::{CommandFactory, Parser, Subcommand};
use commands::{Context, act, check, delivery, list, show, status, version};
use connect::ConnectArgs;
use failure::Failure;
use messages::bulk::Verb;
use std::process::ExitCode;

/// See, steer and run the outbox of a database from outside its server
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
    /// What waits, who delivers, where to, and what is wrong
    Status(status::StatusArgs),
    /// Whether a destination can be used
    Check(check::CheckArgs),
    /// Messages by filter, a page at a time
    List(messages::by_seq::BySeq),
    /// All of one message, and why it does not move
    Show(show::ShowArgs),
    /// Bring dead letters back, or let a message that waits for its time go at once
    Retry(act::DeadArgs),
    /// Give dead or waiting messages up
    Discard(act::DeadArgs),
    /// Send again what was published or discarded
    Replay(act::ReplayArgs),
    /// Stop delivery to a destination; messages wait
    Pause(delivery::PauseArgs),
    /// Let a paused destination go on
    Resume(delivery::ResumeArgs),
    /// Let the workers deliver what waits, in stored order, and wait for it
    Relay(delivery::RelayArgs),
    /// Show it all as a live web page, with metrics for Prometheus
    Serve(serve::ServeArgs),
    /// Deliver as a worker outside the server
    Work(work::WorkArgs),
    /// Versions of this program, of the extension and of the server
    Version,
    /// The outbox live, on a terminal
    Top(top::TopArgs),
    /// Print the completions for a shell
    Completions(pages::CompletionsArgs),
    /// Print the man page, or write one for each command
    Man(pages::ManArgs),
}

fn main() -> ExitCode {
    // SAFETY: this process has one thread yet.
    unsafe { outbox_transport::prepare_process() };
    run()
}

#[tokio::main]
async fn run() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return misunderstood(&error),
    };
    let context = Context {
        connect: cli.connect,
        json: cli.json,
    };
    let done = match &cli.command {
        Command::Status(args) => status::run(&context, args).await,
        Command::Check(args) => check::run(&context, args).await,
        Command::List(asked) => list::run(&context, asked).await,
        Command::Show(args) => show::run(&context, args).await,
        Command::Retry(args) => act::dead(&context, Verb::Retry, args).await,
        Command::Discard(args) => act::dead(&context, Verb::Discard, args).await,
        Command::Replay(args) => act::replay(&context, args).await,
        Command::Pause(args) => delivery::pause(&context, args).await,
        Command::Resume(args) => delivery::resume(&context, args).await,
        Command::Relay(args) => delivery::relay(&context, args).await,
        Command::Serve(args) => serve::run(&context, args).await,
        Command::Work(args) => work::run(&context, args).await,
        Command::Version => version::run(&context).await,
        Command::Top(args) => top::run(&context, args).await,
        Command::Completions(args) => pages::completions(args, Cli::command()),
        Command::Man(args) => pages::man(args, Cli::command()),
    };
    done.unwrap_or_else(|failure| fail(&failure, context.json))
}

/// Prints the help or the version that was asked for, or what is wrong with the command line.
fn misunderstood(error: &clap::Error) -> ExitCode {
    if !error.use_stderr() || error.kind() == clap::error::ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        let _ = error.print(); // a reader that closed the pipe has read enough
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
}
