//! The queries for one message: its row in each table, its event, and its failed attempts. Times are texts from the
//! server's JSON.

use super::state::{MessageStatus, Parsed};
use outbox_core::event::{COLUMNS, ColumnKind, Event, EventRow};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::convert::Infallible;
use std::sync::LazyLock;

/// The query for the rows of the message `$1` to destination `$2`, or to all destinations if `$2` is NULL. Rows that
/// have not ended come first, then dead letters, then those that have ended; in each group the latest comes first.
pub const MESSAGE: &str =
    "select m.* from outbox_internal.message_rows($1) m where $2::text is null or m.destination = $2 limit 50";

/// A row of [`MESSAGE`].
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub struct StoredMessageRow {
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

impl StoredMessageRow {
    pub fn has_ended(&self) -> bool {
        self.status.known().is_some_and(MessageStatus::has_ended)
    }

    /// When it is due, or ended.
    pub fn time(&self) -> Option<(&'static str, &str)> {
        let status = self.status.known()?;
        let at = match status {
            MessageStatus::Retrying | MessageStatus::Scheduled => &self.available_at,
            MessageStatus::Published | MessageStatus::Discarded | MessageStatus::Dead => &self.ended_at,
            MessageStatus::Ready | MessageStatus::InFlight | MessageStatus::Blocked => return None,
        };
        Some((status.time_title(), at.as_deref()?))
    }
}

/// An event as it is stored, here or in the source. The texts of its JSON are unchanged, except that long ones are cut.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(from = "StoredEventRow")]
pub struct EventShown {
    pub event: Event,
    /// The length in bytes of the whole payload as text, before it is cut.
    pub payload_bytes: i64,
    pub body_bytes: i64,
    /// Why the event is not shown.
    pub error: Option<String>,
}

/// A row of [`EVENT`]. `texts` has the columns of the event and then created_at.
#[derive(Deserialize)]
struct StoredEventRow {
    seq: i64,
    texts: Vec<Option<String>>,
    created_at_s: i64,
    payload_bytes: i64,
    body_bytes: i64,
    error: Option<String>,
}

impl From<StoredEventRow> for EventShown {
    fn from(row: StoredEventRow) -> Self {
        let (texts, number) = (row.texts.into_iter(), row.created_at_s);
        let Ok(event) = Event::read(row.seq, &mut EventColumns(texts, number));
        Self {
            event,
            payload_bytes: row.payload_bytes,
            body_bytes: row.body_bytes,
            error: row.error,
        }
    }
}

struct EventColumns(std::vec::IntoIter<Option<String>>, i64);

impl EventRow for EventColumns {
    type Error = Infallible;

    fn text(&mut self) -> Result<Option<String>, Infallible> {
        Ok(self.0.next().flatten())
    }

    fn number(&mut self) -> Result<Option<i64>, Infallible> {
        Ok(Some(self.1))
    }
}

/// The query for the [`EventShown`] of message `$1`; its JSON texts are cut after `$2` characters.
pub static EVENT: LazyLock<String> = LazyLock::new(|| {
    let texts = COLUMNS.map(|column| match column.kind {
        ColumnKind::Json => format!("left({}::text, $2::integer)", column.name),
        _ => format!("{}::text", column.name),
    });
    format!(
        "select seq, array[{},
                  to_char(created_at at time zone 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.US\"Z\"')] as texts,
                coalesce(floor(extract(epoch from created_at)), 0)::bigint as created_at_s,
                coalesce(octet_length(payload::text), 0) as payload_bytes, body_bytes, error
         from outbox_internal.event_shown($1)",
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

/// The query for the [`Attempt`]s of message `$1` to `$2` that was enqueued at `$3`: the failed ones, the latest first,
/// at most 50. Earlier ones were of another message with this seq. A message that was published at its first attempt
/// has none.
pub const ATTEMPTS: &str = "
    select attempt, at, outcome, error, worker_id from @extschema@.outbox_attempts
    where seq = $1 and destination = $2 and outbox_attempts.at >= ($3::text)::timestamptz
    order by outbox_attempts.at desc, attempt desc limit 50";
