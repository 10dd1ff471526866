//! `outboxctl list`: messages by filter, one page at a time.

use super::{CommandContext, text};
use crate::failure::Failure;
use crate::format::{duration, json};
use crate::messages::by_seq::BySeq;
use crate::output;
use crate::queries::state::{MessageStatus, Tone, Toned};
use crate::screen::list::{ListRow, RowField};
use crate::screen::theme;
use outbox_core::error_group;
use outbox_core::words::Word;
use serde_json::{Value, json as document};
use std::collections::BTreeMap;
use std::process::ExitCode;

pub async fn run(context: &CommandContext, request: &BySeq) -> Result<ExitCode, Failure> {
    let session = context.reader().await?;
    let rows = request.page(&session).await?;
    let is_full = request.is_full(&rows);
    let mut rows: Vec<Value> = rows.into_iter().map(|row| Value::Object(row.message)).collect();
    let last = rows.last().map(|row| row["seq"].clone());
    if request.by_cause {
        rows = causes(&rows);
    }
    if context.json {
        output::print(&rows.iter().map(|row| json(row) + "\n").collect::<String>())?;
        return Ok(ExitCode::SUCCESS);
    }
    match last {
        None => eprintln!("No message matches."),
        Some(last) => {
            let all_default = rows.iter().all(|row| row["destination"] == "default");
            let row = if request.by_cause { cause_row } else { row };
            let rows: Vec<ListRow> = rows.iter().map(|of| row(of, all_default)).collect();
            output::print_rows(&rows)?;
            if is_full {
                eprintln!("There may be more: continue with --after {last}");
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Messages with one status and destination, whose errors differ in numbers and ids only; the largest group first.
fn causes(messages: &[Value]) -> Vec<Value> {
    let mut groups: BTreeMap<_, (i64, f64)> = BTreeMap::new();
    for message in messages {
        let error = error_group::group(message["last_error"].as_str().unwrap_or("no error is recorded"));
        let cause = (text(message, "status"), text(message, "destination"), error);
        let (number, oldest) = groups.entry(cause).or_default();
        (*number, *oldest) = (*number + 1, oldest.max(message["age_s"].as_f64().unwrap_or(0.0)));
    }
    let mut groups: Vec<_> = groups.into_iter().collect();
    groups.sort_by_key(|(_, (number, _))| -number);
    let shown = groups.iter().map(|((status, destination, error), (number, oldest))| {
        document!({
            "messages": number, "status": status, "destination": destination, "error": error, "oldest_age_s": oldest,
        })
    });
    shown.collect()
}

fn cause_row(cause: &Value, all_default: bool) -> ListRow {
    let (status, destination) = (text(cause, "status"), text(cause, "destination"));
    let tone = MessageStatus::of_name(status).map_or(Tone::Plain, Toned::tone);
    let fields = vec![
        RowField::count("messages", 0, cause["messages"].as_i64()),
        RowField::words("status", 0, status).style(theme::tone(tone)),
        RowField::prose("destination", 0, 12, if all_default { "" } else { destination }),
        RowField::number("oldest", 0, cause["oldest_age_s"].as_f64(), duration),
        RowField::prose("error", 0, 24, text(cause, "error")),
    ];
    ListRow::new("", fields)
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
        RowField::words("partition", 3, text(row, "partition_key")),
        RowField::count("attempts", 2, row["attempts"].as_i64()),
        RowField::number("age", 1, row["age_s"].as_f64(), duration),
        RowField::prose("error", 0, 24, text(row, "last_error")),
    ];
    ListRow::new("", fields)
}
