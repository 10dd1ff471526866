//! `outboxctl version`: the versions of this program, the extension and the server. It also shows where a session
//! connects to.

use super::{CommandContext, text};
use crate::connect;
use crate::failure::Failure;
use crate::output;
use ratatui::text::Line;
use serde_json::json;
use std::process::ExitCode;

const SESSION: &str = r#"
    select session_user::text as "user", host(inet_server_addr()) as server_addr, inet_server_port() as server_port,
           coalesce((select s.ssl from pg_catalog.pg_stat_ssl s where s.pid = pg_backend_pid()), false) as tls"#;

pub async fn run(context: &CommandContext) -> Result<ExitCode, Failure> {
    let program = env!("CARGO_PKG_VERSION");
    if !context.json {
        output::print(&format!("outboxctl {program}\n"))?;
    }
    let session = connect::connect_anywhere(&context.connect).await?;
    let found = session.rows(SESSION, &[]).await?.remove(0);
    let extension = session.extension.as_ref();
    if context.json {
        context.print_json(&json!({
            "outboxctl": program,
            "extension": extension.map(|extension| &extension.version),
            "schema": extension.map(|extension| &extension.schema),
            "server": session.server_version,
            "database": session.database,
            "user": found["user"],
            "server_addr": found["server_addr"],
            "server_port": found["server_port"],
            "tls": found["tls"],
        }))?;
        return Ok(ExitCode::SUCCESS);
    }
    let extension = match extension {
        Some(extension) => format!("outbox {} in schema {}", extension.version, extension.schema),
        None => "outbox is not installed in this database".into(),
    };
    let tls = if found["tls"] == true { "with" } else { "without" };
    let connection = match found["server_port"].as_i64() {
        Some(port) => format!("{}, port {port}, {tls} TLS", text(&found, "server_addr")),
        None => "a Unix socket".into(),
    };
    let (server, database, user) = (&session.server_version, &session.database, text(&found, "user"));
    let server = format!("PostgreSQL {server}");
    let place = format!("database {database} as {user}, by {connection}");
    output::print_lines([extension, server, place].map(Line::raw))?;
    Ok(ExitCode::SUCCESS)
}
