//! The connection options; every command has them.

use clap::Args;
use std::fmt;

/// The connection options of psql. Omitted options have the same defaults as in psql.
#[derive(Args, Clone, Default)]
#[command(next_help_heading = "Connection, as with psql")]
pub struct ConnectArgs {
    /// Database name, connection string or URI
    #[arg(short = 'd', long = "dbname", value_name = "DBNAME", global = true)]
    pub dbname: Option<String>,
    /// Host name, or directory of the socket
    #[arg(short = 'h', long = "host", value_name = "HOST", global = true)]
    pub host: Option<String>,
    /// Port
    #[arg(short = 'p', long = "port", value_name = "PORT", global = true)]
    pub port: Option<String>,
    /// User name
    #[arg(short = 'U', long = "username", value_name = "USER", global = true)]
    pub user: Option<String>,
    /// Never ask for a password
    #[arg(short = 'w', long = "no-password", global = true, conflicts_with = "ask_password")]
    pub no_password: bool,
    /// Ask for the password before connecting
    #[arg(short = 'W', long = "password", global = true)]
    pub ask_password: bool,
}

/// A connection string may contain a password, so no format string may show it.
impl fmt::Debug for ConnectArgs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConnectArgs").finish_non_exhaustive()
    }
}
