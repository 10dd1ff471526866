//! `outboxctl list`: messages by filter, one page at a time.

use super::{Context, age, text};
use crate::failure::Failure;
use crate::messages::by_seq::{self, BySeq};
use crate::output::{self, Cell, Colour, Table};
use crate::queries::IN_ORDER;
use crate::queries::state::MessageStatus;
use outbox_core::words::Word;
use serde_json::Value;
use std::fmt::Write as _;
use std::process::ExitCode;

pub async fn run(context: &Context, request: &BySeq) -> Result<ExitCode, Failure> {
    let session = context.reader().await?;
    if request.is_along_an_index() {
        session.client.batch_execute(IN_ORDER).await?;
    }
    let rows = by_seq::page(&session, request).await?;
    let is_full = request.is_full(&rows);
    let rows: Vec<Value> = rows.into_iter().map(|row| Value::Object(row.message)).collect();
    let mut page = String::new();
    if context.json {
        for row in &rows {
            writeln!(page, "{row}").expect("write to a string");
        }
        output::print(&page)?;
        return Ok(ExitCode::SUCCESS);
    }
    match rows.last() {
        None => eprintln!("No message matches."),
        Some(last) => {
            output::print(&table(&rows).render())?;
            if is_full {
                eprintln!("There may be more: continue with --after {}", last["seq"]);
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

pub fn status_colour(status: &str) -> Option<Colour> {
    match MessageStatus::of_name(status) {
        Some(MessageStatus::Published) => Some(Colour::Good),
        Some(MessageStatus::Retrying) => Some(Colour::Careful),
        Some(MessageStatus::Dead) => Some(Colour::Bad),
        _ => None,
    }
}

/// A table of messages. Columns that are empty in all rows are not shown.
pub fn table(rows: &[Value]) -> Table {
    let all_default = rows.iter().all(|row| text(row, "destination") == "default");
    let mut table = Table::new(&[
        ">SEQ",
        "STATUS",
        "DESTINATION",
        "TYPE",
        "KEY",
        "PARTITION",
        ">ATTEMPTS",
        ">AGE",
        "ERROR",
    ]);
    for row in rows {
        let status = text(row, "status");
        table.row([
            row["seq"].to_string().into(),
            Cell::coloured(status, status_colour(status)),
            if all_default { "" } else { text(row, "destination") }.into(),
            text(row, "type").into(),
            text(row, "key").into(),
            text(row, "partition_key").into(),
            row["attempts"].to_string().into(),
            age(row, "age_s").into(),
            text(row, "last_error").into(),
        ]);
    }
    table
}
