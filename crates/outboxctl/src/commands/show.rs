//! `outboxctl show`: all of one message: its state, its event, its attempts, and why it is not delivered.

use super::CommandContext;
use crate::connect::Session;
use crate::failure::{Code, Failure};
use crate::output;
use crate::queries::IN_ORDER;
use crate::queries::detail::{self, Fact, MessageDetail};
use crate::screen::theme;
use clap::Args;
use outbox_core::event::COLUMNS;
use ratatui::text::Line;
use serde_json::value::RawValue;
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
#[derive(serde::Serialize)]
struct MessageDocument {
    seq: i64,
    /// The server's text: a number in the payload may have more digits than a float can hold.
    event: Option<Box<RawValue>>,
    messages: Vec<MessageDetail>,
}

pub async fn run(context: &CommandContext, args: &ShowArgs) -> Result<ExitCode, Failure> {
    let session = context.reader().await?;
    session.client.batch_execute(IN_ORDER).await?;
    let seq = args.seq;
    let messages = detail::read(&session, seq, args.destination.as_deref()).await?;
    if messages.is_empty() {
        let to = args
            .destination
            .as_ref()
            .map_or(String::new(), |name| format!(" to {name}"));
        return Err(Failure::new(Code::SomeFailed, format!("there is no message {seq}{to}")).hint(
            "Its transaction was rolled back or is not committed yet, or outbox.retention removed it from the history.",
        ));
    }
    let is_readable = session.reads_events().await?;
    if context.json {
        let event = if is_readable { event(&session, seq).await? } else { None };
        context.print_json(&MessageDocument { seq, event, messages })?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut lines = Vec::new();
    for message in &messages {
        let title = format!("Message {seq} to {}", message.row.destination);
        lines.push(Line::styled(title, theme::STRONG));
        lines.extend(message.facts().iter().flat_map(in_lines));
    }
    let event = match is_readable {
        true => detail::event_facts(&session, seq, i32::MAX).await?,
        false => {
            let why = "The event is not shown: that requires SELECT on outbox_events (outbox_admin).";
            vec![(String::new(), why.into())]
        }
    };
    lines.push(Line::styled("Event", theme::STRONG));
    lines.extend(event.iter().flat_map(in_lines));
    output::print_lines(lines)?;
    Ok(ExitCode::SUCCESS)
}

async fn event(session: &Session, seq: i64) -> Result<Option<Box<RawValue>>, Failure> {
    let columns = COLUMNS.map(|column| format!("e.{}", column.name)).join(", ");
    let sql = format!(
        "select row_to_json(x)::text from (select {columns}, e.created_at, e.error from outbox_internal.event_shown($1) e) x"
    );
    let row = session
        .until_done(session.client.query_opt(&session.qualified(&sql), &[&seq]))
        .await?;
    Ok(row.and_then(|row| RawValue::from_string(row.get(0)).ok()))
}

fn in_lines((name, text): &Fact) -> impl Iterator<Item = Line<'static>> {
    let names = std::iter::once(name.as_str()).chain(std::iter::repeat(""));
    names
        .zip(text.lines())
        .map(|(name, line)| Line::raw(format!("  {name:<16} {line}")))
}
