//! `outboxctl list`: messages by filter, one page at a time.

use super::{CommandContext, age, cell, number, text};
use crate::failure::Failure;
use crate::messages::by_seq::{self, BySeq};
use crate::output::{self, Table};
use crate::queries::IN_ORDER;
use crate::queries::state::MessageStatus;
use crate::screen::theme;
use outbox_core::words::Word;
use ratatui::text::Span;
use serde_json::Value;
use std::process::ExitCode;

pub async fn run(context: &CommandContext, request: &BySeq) -> Result<ExitCode, Failure> {
    let session = context.reader().await?;
    if request.is_along_an_index() {
        session.client.batch_execute(IN_ORDER).await?;
    }
    let rows = by_seq::page(&session, request).await?;
    let is_full = request.is_full(&rows);
    let rows: Vec<Value> = rows.into_iter().map(|row| Value::Object(row.message)).collect();
    if context.json {
        output::print(&rows.iter().map(|row| format!("{row}\n")).collect::<String>())?;
        return Ok(ExitCode::SUCCESS);
    }
    match rows.last() {
        None => eprintln!("No message matches."),
        Some(last) => {
            output::print_lines(table(&rows).lines())?;
            if is_full {
                eprintln!("There may be more: continue with --after {}", last["seq"]);
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn table(rows: &[Value]) -> Table {
    let all_default = rows.iter().all(|row| row["destination"] == "default");
    let columns: &[(_, &dyn Fn(&Value) -> Span<'static>)] = &[
        (">SEQ", &cell(number, "seq")),
        ("STATUS", &|row| {
            let status = text(row, "status");
            let style = theme::status(MessageStatus::of_name(&status));
            Span::styled(status, style)
        }),
        ("DESTINATION", &|row| {
            if all_default {
                "".into()
            } else {
                text(row, "destination").into()
            }
        }),
        ("TYPE", &cell(text, "type")),
        ("KEY", &cell(text, "key")),
        ("PARTITION", &cell(text, "partition_key")),
        (">ATTEMPTS", &cell(number, "attempts")),
        (">AGE", &cell(age, "age_s")),
        ("ERROR", &cell(text, "last_error")),
    ];
    Table::of(rows, columns)
}
