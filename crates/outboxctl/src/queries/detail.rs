//! A message in full, for `show` and the board.

use super::Fetch;
use super::message::{ATTEMPTS, Attempt, MESSAGE, StoredMessageRow};
use super::why::{self, Reason};
use crate::failure::Failure;
use crate::format::stamp;
use outbox_core::event::{COLUMNS, ColumnKind, EventColumn};
use serde::Serialize;
use serde_json::{Map, Value};
use std::sync::LazyLock;

/// A name and its text, which may have several lines.
pub type Fact = (String, String);

/// A message, why it is not delivered, and its failed attempts, the first one first.
#[derive(Serialize)]
pub struct MessageDetail {
    #[serde(flatten)]
    pub row: StoredMessageRow,
    why: Vec<Reason>,
    failed_attempts: Vec<Attempt>,
}

/// The rows of the message to one destination, or to all of them. Empty if it is gone.
pub async fn read<S: Fetch>(session: &S, seq: i64, destination: Option<&str>) -> Result<Vec<MessageDetail>, Failure> {
    let mut rows: Vec<StoredMessageRow> = session.fetch(MESSAGE, &[&seq, &destination]).await?;
    rows.sort_by(|a, b| a.destination.cmp(&b.destination));
    let mut messages = Vec::new();
    for row in rows {
        let mut failed_attempts: Vec<Attempt> = session
            .fetch(ATTEMPTS, &[&seq, &row.destination, &row.enqueued_at])
            .await?;
        failed_attempts.reverse();
        let why = why::reasons(session, &row).await?;
        messages.push(MessageDetail {
            row,
            why,
            failed_attempts,
        });
    }
    Ok(messages)
}

impl MessageDetail {
    /// The first reason that has a remedy.
    pub fn into_remedy(self) -> Option<Reason> {
        self.why.into_iter().find(|reason| reason.remedy.is_some())
    }

    pub fn facts(&self) -> Vec<Fact> {
        let row = &self.row;
        let crashes = row
            .more
            .get("crashes")
            .and_then(Value::as_i64)
            .filter(|crashes| *crashes > 0);
        let mut facts = Vec::new();
        let mut fact = |name: &str, text: String| facts.push((name.to_owned(), text));
        fact("status", row.status.as_str().to_owned());
        fact("key", row.key.clone().unwrap_or_default());
        fact("partition", row.partition_key.clone());
        fact("attempts", row.attempts.to_string());
        fact(
            "crashes",
            crashes.map(|crashes| crashes.to_string()).unwrap_or_default(),
        );
        fact("enqueued", stamp(&row.enqueued_at));
        if let Some((what, at)) = row.time() {
            fact(&what.to_lowercase(), stamp(at));
        }
        fact("expires", row.expires_at.as_deref().map(stamp).unwrap_or_default());
        fact("replayed", if row.replayed { "yes".into() } else { String::new() });
        fact("last error", row.last_error.clone().unwrap_or_default());
        for Reason { why, remedy, .. } in &self.why {
            fact("why it waits", why.clone());
            fact(
                "",
                remedy
                    .as_ref()
                    .map(|remedy| format!("Fix: {remedy}"))
                    .unwrap_or_default(),
            );
        }
        for Attempt {
            attempt,
            at,
            outcome,
            error,
            worker_id,
        } in &self.failed_attempts
        {
            let by = worker_id.as_deref().unwrap_or("an unknown worker");
            let error = error.as_ref().map(|error| format!(": {error}")).unwrap_or_default();
            fact(
                &format!("attempt {attempt}"),
                format!("{} by {by}, {outcome}{error}", stamp(at)),
            );
        }
        facts.retain(|(_, text)| !text.is_empty());
        facts
    }
}

/// The largest event whose JSON is indented, and the level from which on it is not.
const INDENTED_MAX_BYTES: u32 = 100_000;
const INDENTED_LEVELS: u32 = 20;

/// The query for the columns of event `$1` as texts, each cut after `$2` characters. The server formats the JSON, so
/// numbers keep all their digits. jsonb_pretty() indents each line by its level: 5,000 levels are 100 MB. Large or deep
/// JSON is shown as it is.
static EVENT_TEXTS: LazyLock<String> = LazyLock::new(|| {
    let columns = COLUMNS.map(|EventColumn { name, kind, .. }| match kind {
        ColumnKind::Json => format!(
            "left(case when e.body_bytes > {INDENTED_MAX_BYTES} or jsonb_path_exists(e.{name}, '$.**{{{INDENTED_LEVELS}}}')
                       then e.{name}::text else jsonb_pretty(e.{name}) end, $2::integer) as {name}"
        ),
        _ => format!("left(e.{name}::text, $2::integer) as {name}"),
    });
    format!(
        "select {}, date_trunc('second', e.created_at)::text as created, e.error as \"not shown\"
         from outbox_internal.event_shown($1) e",
        columns.join(", ")
    )
});

pub async fn event_facts<S: Fetch>(session: &S, seq: i64, most: i32) -> Result<Vec<Fact>, Failure> {
    let mut events: Vec<Map<String, Value>> = session.fetch(&EVENT_TEXTS, &[&seq, &most]).await?;
    let Some(event) = events.pop() else {
        let gone = "is not in outbox_events: it was removed";
        return Ok(vec![("event".into(), gone.into())]);
    };
    let text = |(name, text): (String, Value)| Some((name.replace('_', " "), text.as_str()?.to_owned()));
    Ok(event.into_iter().filter_map(text).collect())
}
