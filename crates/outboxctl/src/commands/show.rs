//! `outboxctl show`: all of one message: its state, its event, its attempts, and why it is not delivered.

use super::{Context, list, text, time};
use crate::connect::Session;
use crate::failure::{Code, Failure};
use crate::format::{self, stamp};
use crate::messages::page::events_are_readable;
use crate::output::{self, Cell, Colour, Table, paint};
use crate::queries::message::{ATTEMPTS, Attempt, MESSAGE, MessageRow};
use crate::queries::state::MessageStatus;
use crate::queries::why::{self, Reason};
use crate::queries::{Fetch, IN_ORDER};
use clap::Args;
use outbox_core::event::{COLUMNS, Column, Kind};
use outbox_core::words::Word;
use serde::Serialize;
use serde_json::value::RawValue;
use serde_json::{Map, Value};
use std::fmt::Write as _;
use std::process::ExitCode;

#[derive(Args)]
pub struct ShowArgs {
    /// Seq of the message
    seq: i64,
    /// Only to this destination
    #[arg(long)]
    destination: Option<String>,
}

/// The JSON document: a seq, its event, and one message for each destination and replay.
#[derive(Serialize)]
struct Shown {
    seq: i64,
    /// The server's text: a number in the payload may have more digits than a float can hold.
    event: Option<Box<RawValue>>,
    messages: Vec<Message>,
}

#[derive(Serialize)]
struct Message {
    #[serde(flatten)]
    row: Map<String, Value>,
    why: Vec<Reason>,
    failed_attempts: Vec<Attempt>,
}

pub async fn run(context: &Context, args: &ShowArgs) -> Result<ExitCode, Failure> {
    let session = context.reader().await?;
    session.client.batch_execute(IN_ORDER).await?;
    let mut messages = Vec::new();
    for row in messages_of(&session, args).await? {
        let message: MessageRow = serde_json::from_value(row.clone())?;
        let mut failed_attempts = session.fetch(ATTEMPTS, &[&message.seq, &message.destination]).await?;
        failed_attempts.reverse();
        messages.push(Message {
            why: why::of(&session, &message).await?,
            failed_attempts,
            row: row.as_object().cloned().unwrap_or_default(),
        });
    }
    if messages.is_empty() {
        let destination = args
            .destination
            .as_ref()
            .map(|name| format!(" to {name}"))
            .unwrap_or_default();
        return Err(Failure::new(
            Code::SomeFailed,
            format!("there is no message {}{destination}", args.seq),
        )
        .hint(
            "Its transaction was rolled back or is not committed yet, or outbox.retention removed it from the history.",
        ));
    }
    let readable = events_are_readable(&session).await?;
    if context.json {
        let event = match readable {
            true => event(&session, args.seq).await?,
            false => None,
        };
        context.print_json(&Shown {
            seq: args.seq,
            event,
            messages,
        })?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut page = String::new();
    for message in &messages {
        page.push_str(&in_words(message));
    }
    page.push_str(&match readable {
        true => event_in_words(&session, args.seq).await?,
        false => {
            "The event is not shown: that requires SELECT on outbox_events (outbox_admin), and no custom source.\n"
                .into()
        }
    });
    output::print(&page)?;
    Ok(ExitCode::SUCCESS)
}

async fn messages_of(session: &Session, args: &ShowArgs) -> Result<Vec<Value>, Failure> {
    let sql = format!("select r.* from ({MESSAGE}) r order by r.destination, r.ended_at nulls last");
    session.rows(&sql, &[&args.seq, &args.destination]).await
}

async fn event(session: &Session, seq: i64) -> Result<Option<Box<RawValue>>, Failure> {
    let columns = COLUMNS.map(|column| format!("e.{}", column.name)).join(", ");
    let sql = format!(
        "select row_to_json(x)::text from (select {columns}, e.created_at from outbox_events e where e.seq = $1) x"
    );
    let row = session
        .until_done(session.client.query_opt(&session.qualified(&sql), &[&seq]))
        .await?;
    Ok(row.and_then(|row| RawValue::from_string(row.get(0)).ok()))
}

fn line(page: &mut String, name: &str, value: &str) {
    if !value.is_empty() {
        writeln!(page, "  {name:<14} {}", format::clean(value)).expect("write to a string");
    }
}

fn in_words(message: &Message) -> String {
    let row = Value::Object(message.row.clone());
    let row = &row;
    let status = text(row, "status");
    let coloured = list::status_colour(status).map_or(status.to_owned(), |colour| paint(status, colour));
    let mut page = format!(
        "{}\n",
        paint(
            &format::clean(&format!("Message {} to {}", row["seq"], text(row, "destination"))),
            Colour::Bold
        )
    );
    writeln!(page, "  {:<14} {coloured}", "status").expect("write to a string");
    let ended = match MessageStatus::of_name(status) {
        Some(MessageStatus::Published) => "published",
        Some(MessageStatus::Dead) => "given up",
        _ => "discarded",
    };
    line(&mut page, "key", text(row, "key"));
    line(&mut page, "partition", text(row, "partition_key"));
    line(&mut page, "attempts", &row["attempts"].to_string());
    if row["crashes"].as_i64().is_some_and(|crashes| crashes > 0) {
        line(&mut page, "crashes", &row["crashes"].to_string());
    }
    line(&mut page, "enqueued", &time(row, "enqueued_at"));
    if matches!(status, "retrying" | "scheduled") {
        line(&mut page, "due", &time(row, "available_at"));
    }
    line(&mut page, ended, &time(row, "ended_at"));
    line(&mut page, "expires", &time(row, "expires_at"));
    line(&mut page, "replayed", if row["replayed"] == true { "yes" } else { "" });
    line(&mut page, "last error", text(row, "last_error"));
    if !message.why.is_empty() {
        writeln!(page, "{}", paint("Why it is not delivered", Colour::Bold)).expect("write to a string");
        for reason in &message.why {
            writeln!(page, "  {}", format::clean(&reason.why)).expect("write to a string");
            if let Some(remedy) = &reason.remedy {
                writeln!(page, "    Fix: {}", format::clean(remedy)).expect("write to a string");
            }
        }
    }
    if !message.failed_attempts.is_empty() {
        writeln!(page, "{}", paint("Failed attempts", Colour::Bold)).expect("write to a string");
        let mut table = Table::new(&[">ATTEMPT", "AT", "OUTCOME", "WORKER", "ERROR"]);
        for attempt in &message.failed_attempts {
            table.row([
                attempt.attempt.to_string().into(),
                stamp(&attempt.at).into(),
                Cell::from(attempt.outcome.as_str()),
                attempt.worker_id.as_deref().unwrap_or_default().into(),
                attempt.error.as_deref().unwrap_or_default().into(),
            ]);
        }
        table.render().lines().for_each(|line| _ = writeln!(page, "  {line}"));
    }
    page
}

async fn event_in_words(session: &Session, seq: i64) -> Result<String, Failure> {
    // The server formats the JSON, so numbers keep all their digits.
    let columns = COLUMNS.map(|column| match column.kind {
        Kind::Json => format!("jsonb_pretty(e.{0}) as {0}", column.name),
        _ => format!("e.{}", column.name),
    });
    let columns = columns.join(", ");
    let sql = format!("select {columns}, e.created_at from outbox_events e where e.seq = $1");
    let mut page = format!("{}\n", paint("Event", Colour::Bold));
    let Some(event) = session.rows(&sql, &[&seq]).await?.into_iter().next() else {
        page.push_str("  No event has this seq: it was removed, or never stored.\n");
        return Ok(page);
    };
    let (json, texts): (Vec<Column>, Vec<Column>) = COLUMNS.iter().partition(|column| column.kind == Kind::Json);
    for column in texts {
        line(&mut page, &column.name.replace('_', " "), text(&event, column.name));
    }
    line(&mut page, "created", &time(&event, "created_at"));
    for Column { name, .. } in json {
        let pretty = format::clean_lines(text(&event, name));
        if !pretty.is_empty() {
            writeln!(page, "  {name}").expect("write to a string");
            pretty.lines().for_each(|line| _ = writeln!(page, "    {line}"));
        }
    }
    Ok(page)
}
