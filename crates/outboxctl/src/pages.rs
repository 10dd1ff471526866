//! What is installed beside the program: completions of a shell, and man pages, made from the arguments themselves.

use crate::failure::{Code, Failure};
use crate::output;
use clap::{Args, Command};
use clap_complete::Shell;
use std::path::PathBuf;
use std::process::ExitCode;

/// Below the help of the program.
pub const EXIT_CODES: &str = "\
Exit codes: 0 done; 1 some messages failed, or a check did; 2 arguments that cannot be meant; 3 cannot connect; \
4 the extension is missing or of another version; 5 refused, by the database or by you.

Where the database is, is taken from where psql takes it: options, connection strings, PGHOST and the other variables, \
service files, ~/.pgpass.";

#[derive(Args)]
pub struct CompletionsArgs {
    shell: Shell,
}

#[derive(Args)]
pub struct ManArgs {
    /// Write outboxctl.1 and a page for each command there
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
    let failed =
        |error: std::io::Error| Failure::new(Code::Refused, format!("the man page cannot be written: {error}"));
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
