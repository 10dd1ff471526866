//! `outboxctl list`: messages by filter, one page at a time.

use super::{CommandContext, text};
use crate::failure::Failure;
use crate::format::{duration, json};
use crate::messages::by_seq::BySeq;
use crate::output;
use crate::queries::state::{MessageStatus, Tone, Toned};
use crate::screen::list::{ListRow, RowField};
use crate::screen::theme;
use outbox_core::words::Word;
use serde_json::Value;
use std::process::ExitCode;

pub async fn run(context: &CommandContext, request: &BySeq) -> Result<ExitCode, Failure> {
    let session = context.reader().await?;
    let rows = request.page(&session).await?;
    let is_full = request.is_full(&rows);
    let rows: Vec<Value> = rows.into_iter().map(|row| Value::Object(row.message)).collect();
    if context.json {
        output::print(&rows.iter().map(|row| json(row) + "\n").collect::<String>())?;
        return Ok(ExitCode::SUCCESS);
    }
    match rows.last() {
        None => eprintln!("No message matches."),
        Some(last) => {
            let all_default = rows.iter().all(|row| row["destination"] == "default");
            let rows: Vec<ListRow> = rows.iter().map(|message| row(message, all_default)).collect();
            output::print_rows(&rows)?;
            if is_full {
                eprintln!("There may be more: continue with --after {}", last["seq"]);
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn row(row: &Value, all_default: bool) -> ListRow {
    let number = |name: &str| row[name].as_i64().map(|number| number as f64);
    let status = text(row, "status");
    let tone = MessageStatus::of_name(status).map_or(Tone::Plain, Toned::tone);
    let fields = vec![
        RowField::number("seq", 0, number("seq"), |seq| format!("{seq:.0}")),
        RowField::words("status", 0, status).style(theme::tone(tone)),
        RowField::prose(
            "destination",
            0,
            12,
            if all_default { "" } else { text(row, "destination") },
        ),
        RowField::prose("type", 0, 12, text(row, "type")),
        RowField::prose("key", 0, 12, text(row, "key")),
        RowField::words("partition", 0, text(row, "partition_key")),
        RowField::count("attempts", 0, row["attempts"].as_i64()),
        RowField::number("age", 0, row["age_s"].as_f64(), duration),
        RowField::prose("error", 0, 24, text(row, "last_error")),
    ];
    ListRow::new("", fields)
}
