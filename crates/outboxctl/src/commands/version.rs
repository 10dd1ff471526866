//! `outboxctl version`: the versions of this program, the extension and the server. It also shows where a session
//! connects to.

use super::Context;
use crate::connect;
use crate::failure::Failure;
use crate::format;
use crate::output;
use serde_json::json;
use std::process::ExitCode;

pub async fn run(context: &Context) -> Result<ExitCode, Failure> {
    let program = env!("CARGO_PKG_VERSION");
    if !context.json {
        output::print(&format!("outboxctl {program}\n"))?;
    }
    let session = connect::connect_anywhere(&context.connect).await?;
    let row = session
        .client
        .query_one(
            "select session_user::text, host(inet_server_addr()), inet_server_port(),
                    coalesce((select s.ssl from pg_catalog.pg_stat_ssl s where s.pid = pg_backend_pid()), false)",
            &[],
        )
        .await?;
    let (user, address, port, tls): (String, Option<String>, Option<i32>, bool) =
        (row.get(0), row.get(1), row.get(2), row.get(3));
    let extension = session.extension.as_ref();
    if context.json {
        context.print_json(&json!({
            "outboxctl": program,
            "extension": extension.map(|extension| &extension.version),
            "schema": extension.map(|extension| &extension.schema),
            "server": session.server_version,
            "database": session.database,
            "user": user,
            "server_addr": address,
            "server_port": port,
            "tls": tls,
        }))?;
        return Ok(ExitCode::SUCCESS);
    }
    let extension = match extension {
        Some(extension) => format!("outbox {} in schema {}", extension.version, extension.schema),
        None => "outbox is not installed in this database".into(),
    };
    let connection = match (address, port) {
        (Some(address), Some(port)) => format!("{address}, port {port}, {} TLS", if tls { "with" } else { "without" }),
        _ => "a Unix socket".into(),
    };
    output::print(&format::clean_lines(&format!(
        "{extension}\nPostgreSQL {}\ndatabase {} as {user}, by {connection}\n",
        session.server_version, session.database
    )))?;
    Ok(ExitCode::SUCCESS)
}
