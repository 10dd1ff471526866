//! The files installed with the program, generated from its arguments: shell completions and man pages.

use crate::failure::{Code, Failure};
use crate::output;
use clap::{Args, Command};
use clap_complete::Shell;
use std::path::PathBuf;
use std::process::ExitCode;

/// The text below the help of the program.
pub const EXIT_CODES: &str = "\
Exit codes: 0 done; 1 some messages failed, or a check did; 2 invalid arguments; 3 cannot connect; \
4 the extension is missing or its version is incompatible; 5 refused by the database, or not confirmed by you.

The connection is found as psql finds it: options, connection strings, PGHOST and the other variables, service files, \
~/.pgpass.";

#[derive(Args)]
pub struct CompletionsArgs {
    shell: Shell,
}

#[derive(Args)]
pub struct ManArgs {
    /// Write outboxctl.1 and one page for each command to this directory
    #[arg(long, value_name = "DIRECTORY")]
    to: Option<PathBuf>,
}

pub fn completions(args: &CompletionsArgs, mut program: Command) -> Result<ExitCode, Failure> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut program, "outboxctl", &mut script);
    output::print(&String::from_utf8_lossy(&script))?;
    Ok(ExitCode::SUCCESS)
}

pub fn man(args: &ManArgs, program: Command) -> Result<ExitCode, Failure> {
    let failed = |error: std::io::Error| Failure::new(Code::Refused, format!("could not write the man page: {error}"));
    match &args.to {
        Some(directory) => clap_mangen::generate_to(program, directory).map_err(failed)?,
        None => {
            let mut page = Vec::new();
            let man = clap_mangen::Man::new(program.disable_help_subcommand(true));
            man.render(&mut page).map_err(failed)?;
            output::print(&String::from_utf8_lossy(&page))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}
