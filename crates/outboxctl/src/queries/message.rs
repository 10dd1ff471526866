//! The queries for one message: its row in each table, its event, and its failed attempts. Times are texts from the
//! server's JSON.

use super::Fetch;
use super::state::{MessageStatus, Parsed};
use super::why::{self, Reason};
use crate::format::stamp;
use outbox_core::event::{COLUMNS, Column, Event, EventRow, Kind};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::convert::Infallible;
use std::sync::LazyLock;

/// A table with messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MessageTable {
    Outbox,
    Waiting,
    Dead,
    History,
}

impl MessageTable {
    pub fn name(self) -> &'static str {
        match self {
            Self::Outbox => "outbox",
            Self::Waiting => "outbox_waiting",
            Self::Dead => "outbox_dead",
            Self::History => "outbox_history",
        }
    }

    /// The expression for a column of `outbox_messages` in a row `t` of this table. Conditions use these expressions
    /// directly, not columns of a subquery. The status calls a volatile function, and the planner uses no index for
    /// conditions on the columns of a subquery that calls one.
    pub fn column(self, name: &str) -> String {
        let expression = match (name, self) {
            ("status", Self::Outbox) => {
                "(case when t.claim_token is not null and outbox_internal.claim_is_live(t.claim_token, t.partition, t.claim_until)
                         or outbox_internal.is_taken(t.destination, t.partition, t.seq) then 'in flight' else 'ready' end)"
            }
            ("status", Self::Waiting) => "(case t.state when 'b' then 'retrying' when 'g' then 'blocked' else 'scheduled' end)",
            ("status", Self::Dead) => "'dead'",
            ("status", Self::History) => "(case when t.discarded then 'discarded' else 'published' end)",
            ("available_at", Self::Outbox) => "t.enqueued_at",
            ("available_at", Self::Waiting) => "t.due_at",
            ("ended_at", Self::Dead) => "t.died_at",
            ("ended_at", Self::History) => "t.published_at",
            ("available_at" | "ended_at", _) | ("expires_at", Self::History) => "null::timestamptz",
            ("last_error", Self::Dead) => "t.reason",
            ("blocks", Self::Dead) => "coalesce(t.blocks, false)",
            ("blocks", _) => "false",
            (other, _) => return format!("t.{other}"),
        };
        expression.to_owned()
    }
}

/// The query for the rows of the message `$1` to destination `$2`, or to all destinations if `$2` is NULL. Rows that
/// have not ended come first, then dead letters, then those that have ended; in each group the latest comes first.
pub const MESSAGE: &str =
    "select m.* from outbox_internal.message_rows($1) m where $2::text is null or m.destination = $2 limit 50";

/// A row of [`MESSAGE`].
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub struct MessageRow {
    pub seq: i64,
    pub destination: String,
    pub partition_key: String,
    pub partition: i16,
    pub key: Option<String>,
    pub status: Parsed<MessageStatus>,
    pub attempts: i32,
    pub available_at: Option<String>,
    pub enqueued_at: String,
    pub ended_at: Option<String>,
    pub last_error: Option<String>,
    pub replayed: bool,
    pub expires_at: Option<String>,
    /// The other columns.
    #[serde(flatten)]
    pub more: Map<String, Value>,
}

impl MessageRow {
    pub fn has_ended(&self) -> bool {
        self.status.known().is_some_and(MessageStatus::has_ended)
    }
}

/// An event of outbox_events. The texts of its JSON are unchanged, except that long ones are cut.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(from = "StoredEventRow")]
pub struct StoredEvent {
    pub event: Event,
    /// The length in bytes of the whole payload as text, before it is cut.
    pub payload_bytes: i64,
    pub body_bytes: i64,
}

/// A row of [`EVENT`]. `texts` has the columns of the event and then created_at.
#[derive(Deserialize)]
struct StoredEventRow {
    seq: i64,
    texts: Vec<Option<String>>,
    created_at_s: i64,
    payload_bytes: i64,
    body_bytes: i64,
}

impl From<StoredEventRow> for StoredEvent {
    fn from(row: StoredEventRow) -> Self {
        let (texts, number) = (row.texts.into_iter(), row.created_at_s);
        let Ok(event) = Event::read(row.seq, &mut Texts(texts, number));
        Self {
            event,
            payload_bytes: row.payload_bytes,
            body_bytes: row.body_bytes,
        }
    }
}

struct Texts(std::vec::IntoIter<Option<String>>, i64);

impl EventRow for Texts {
    type Error = Infallible;

    fn text(&mut self) -> Result<Option<String>, Infallible> {
        Ok(self.0.next().flatten())
    }

    fn number(&mut self) -> Result<Option<i64>, Infallible> {
        Ok(Some(self.1))
    }
}

/// The query for the [`StoredEvent`] of message `$1`; its JSON texts are cut after `$2` characters. It returns no row
/// if a custom source is set, because the events are then in another table, and outbox_events has unrelated rows.
pub static EVENT: LazyLock<String> = LazyLock::new(|| {
    let texts = COLUMNS.map(|column| match column.kind {
        Kind::Json => format!("left({}::text, $2::integer)", column.name),
        _ => format!("{}::text", column.name),
    });
    format!(
        "select seq, array[{},
                  to_char(created_at at time zone 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.US\"Z\"')] as texts,
                floor(extract(epoch from created_at))::bigint as created_at_s,
                octet_length(payload::text) as payload_bytes, body_bytes
         from outbox_events where seq = $1 and not exists (select from outbox_source)",
        texts.join(", ")
    )
});

/// A row of `outbox_attempts`.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
pub struct Attempt {
    pub attempt: i32,
    pub at: String,
    pub outcome: String,
    pub error: Option<String>,
    pub worker_id: Option<String>,
}

/// The query for the [`Attempt`]s of message `$1` to `$2`: the failed ones, the latest first, at most 50. A message
/// that was published at its first attempt has none.
pub const ATTEMPTS: &str = "
    select attempt, at, outcome, error, worker_id from outbox_attempts
    where seq = $1 and destination = $2 order by outbox_attempts.at desc, attempt desc limit 50";

// ---- a message in full, for `show` and the board ----------------------------------------------------------------------

/// A name and its text, which may have several lines.
pub type Fact = (String, String);

/// A message, why it is not delivered, and its failed attempts, the first one first.
#[derive(Serialize)]
pub struct MessageDetail {
    #[serde(flatten)]
    pub row: MessageRow,
    why: Vec<Reason>,
    failed_attempts: Vec<Attempt>,
}

/// The rows of the message to one destination, or to all of them. Empty if it is gone.
pub async fn read<S: Fetch + Sync>(
    session: &S,
    seq: i64,
    destination: Option<&str>,
) -> Result<Vec<MessageDetail>, S::Error> {
    let mut rows: Vec<MessageRow> = session.fetch(MESSAGE, &[&seq, &destination]).await?;
    rows.sort_by(|a, b| a.destination.cmp(&b.destination));
    let mut messages = Vec::new();
    for row in rows {
        let mut failed_attempts: Vec<Attempt> = session.fetch(ATTEMPTS, &[&seq, &row.destination]).await?;
        failed_attempts.reverse();
        let why = why::of(session, &row).await?;
        messages.push(MessageDetail {
            row,
            why,
            failed_attempts,
        });
    }
    Ok(messages)
}

impl MessageDetail {
    pub fn facts(&self) -> Vec<Fact> {
        let row = &self.row;
        let time = |time: Option<&String>| time.map(|time| stamp(time)).unwrap_or_default();
        let status = row.status.known();
        let ended = match status {
            Some(MessageStatus::Published) => "published",
            Some(MessageStatus::Dead) => "given up",
            _ => "discarded",
        };
        let due = row.available_at.as_ref();
        let due = due.filter(|_| matches!(status, Some(MessageStatus::Retrying | MessageStatus::Scheduled)));
        let crashes = row
            .more
            .get("crashes")
            .and_then(Value::as_i64)
            .filter(|crashes| *crashes > 0);
        let mut facts = Vec::new();
        let mut fact = |name: &str, text: String| facts.push((name.to_owned(), text));
        fact("status", row.status.to_string());
        fact("key", row.key.clone().unwrap_or_default());
        fact("partition", row.partition_key.clone());
        fact("attempts", row.attempts.to_string());
        fact(
            "crashes",
            crashes.map(|crashes| crashes.to_string()).unwrap_or_default(),
        );
        fact("enqueued", stamp(&row.enqueued_at));
        fact("due", time(due));
        fact(ended, time(row.ended_at.as_ref()));
        fact("expires", time(row.expires_at.as_ref()));
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

/// The query for the columns of event `$1` as texts, each cut after `$2` characters. The server formats the JSON, so
/// numbers keep all their digits.
static EVENT_TEXTS: LazyLock<String> = LazyLock::new(|| {
    let columns = COLUMNS.map(|Column { name, kind, .. }| match kind {
        Kind::Json => format!("left(jsonb_pretty(e.{name}), $2::integer) as {name}"),
        _ => format!("left(e.{name}::text, $2::integer) as {name}"),
    });
    format!(
        "select {}, date_trunc('second', e.created_at)::text as created
         from outbox_events e where e.seq = $1 and not exists (select from outbox_source)",
        columns.join(", ")
    )
});

pub async fn event_facts<S: Fetch + Sync>(session: &S, seq: i64, most: i32) -> Result<Vec<Fact>, S::Error> {
    let mut events: Vec<Map<String, Value>> = session.fetch(&EVENT_TEXTS, &[&seq, &most]).await?;
    let Some(event) = events.pop() else {
        let gone = "is not in outbox_events: it was removed, or the source is another table";
        return Ok(vec![("event".into(), gone.into())]);
    };
    let text = |(name, text): (String, Value)| Some((name.replace('_', " "), text.as_str()?.to_owned()));
    Ok(event.into_iter().filter_map(text).collect())
}
