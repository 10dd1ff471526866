//! A session with the database, as psql would make it.

use crate::failure::{Code, Failure};
use clap::Args;
use tokio_postgres::{Client, NoTls};

/// Where the database is, and who asks. What is not given is taken from where psql takes it.
#[derive(Args, Clone, Debug)]
pub struct ConnectArgs {
    /// Database name, connection string or URI
    #[arg(short = 'd', long = "dbname", value_name = "DBNAME", global = true)]
    pub dbname: Option<String>,
    /// Host name, or directory of the socket
    #[arg(short = 'h', long = "host", value_name = "HOST", global = true)]
    pub host: Option<String>,
    /// Port
    #[arg(short = 'p', long = "port", value_name = "PORT", global = true)]
    pub port: Option<u16>,
    /// User name
    #[arg(short = 'U', long = "username", value_name = "USER", global = true)]
    pub user: Option<String>,
}

/// Opens a session; what the server sends beside answers is dropped.
pub async fn connect(args: &ConnectArgs) -> Result<Client, Failure> {
    let config = config(args)?;
    let (client, connection) = config.connect(NoTls).await.map_err(|error| {
        let mut failure = Failure::from(error);
        failure.code = Code::CannotConnect;
        failure
    })?;
    tokio::spawn(connection);
    Ok(client)
}

fn config(args: &ConnectArgs) -> Result<tokio_postgres::Config, Failure> {
    let mut config = match &args.dbname {
        Some(text) if text.contains('=') || text.contains("://") => {
            text.parse().map_err(|error: tokio_postgres::Error| {
                Failure::new(Code::Usage, format!("bad connection string: {error}"))
            })?
        }
        Some(name) => {
            let mut config = tokio_postgres::Config::new();
            config.dbname(name);
            config
        }
        None => tokio_postgres::Config::new(),
    };
    if let Some(host) = &args.host {
        config.host(host);
    }
    if let Some(port) = args.port {
        config.port(port);
    }
    if let Some(user) = &args.user {
        config.user(user);
    }
    config.application_name("outboxctl");
    Ok(config)
}
