//! `outboxctl`: see, steer and run the outbox of a database from outside its server. It uses only what SQL offers to all.

mod connect;
mod failure;
mod screen;
mod top;

use clap::{Parser, Subcommand};
use connect::ConnectArgs;
use failure::Failure;
use std::process::ExitCode;

#[derive(Parser)]
#[command(name = "outboxctl", version, about, disable_help_flag = true)]
struct Cli {
    #[command(flatten)]
    connect: ConnectArgs,
    /// Print help
    #[arg(long, action = clap::ArgAction::Help, global = true)]
    help: Option<bool>,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Versions of this program, of the extension and of the server
    Version,
    /// The outbox live, on a terminal
    Top(top::Args),
}

#[tokio::main]
async fn main() -> ExitCode {
    let cli = Cli::parse();
    let done: Result<ExitCode, Failure> = match cli.command {
        Command::Version => version(&cli.connect).await,
        Command::Top(args) => top::run(&cli.connect, &args).await,
    };
    done.unwrap_or_else(|failure| {
        eprintln!("outboxctl: {failure}");
        ExitCode::from(failure.code as u8)
    })
}

async fn version(connect: &ConnectArgs) -> Result<ExitCode, Failure> {
    println!("outboxctl {}", env!("CARGO_PKG_VERSION"));
    let client = connect::connect(connect).await?;
    let row = client
        .query_one(
            "select current_setting('server_version'), (select extversion from pg_extension where extname = 'outbox')",
            &[],
        )
        .await?;
    println!(
        "outbox {}",
        row.get::<_, Option<&str>>(1)
            .unwrap_or("is not installed in this database")
    );
    println!("PostgreSQL {}", row.get::<_, &str>(0));
    Ok(ExitCode::SUCCESS)
}
