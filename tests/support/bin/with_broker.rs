//! usage: with-broker COMMAND [ARGUMENT…]
//!
//! Runs a command beside a private RabbitMQ and exits with the status of the command. The command finds the port in
//! OUTBOX_BROKER_PORT and a script like rabbitmqctl in OUTBOX_BROKER_CTL. Called by the Makefile: one broker serves all
//! test binaries, so that each binary need not start one.

use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitCode};

use support::private_broker::Size;
use support::{Broker, process};

fn main() -> ExitCode {
    let mut args = std::env::args_os().skip(1);
    let Some(program) = args.next() else {
        eprintln!("usage: with-broker COMMAND [ARGUMENT…]");
        return ExitCode::from(2);
    };
    let broker = Broker::start_sized(Size::SHARED);
    let mut command = Command::new(&program);
    command
        .args(args)
        .env("OUTBOX_BROKER_PORT", broker.port().to_string())
        .env("OUTBOX_BROKER_CTL", broker.ctl_script());
    let mut child = match command.spawn() {
        Ok(child) => child,
        Err(error) => {
            eprintln!("with-broker: {}: {error}", program.display());
            return ExitCode::from(127);
        }
    };
    // A Ctrl-C ends the command too; then this process ends the broker and removes its files.
    process::ignore_interrupts();
    let status = child.wait().expect("wait for the command");
    // The exit code that a shell would report.
    let code = status
        .code()
        .unwrap_or_else(|| 128 + status.signal().unwrap_or_default());
    ExitCode::from(u8::try_from(code).unwrap_or(1))
}
