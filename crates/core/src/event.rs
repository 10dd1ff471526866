//! An event, and its columns. All code that stores or reads events uses [`COLUMNS`]: a worker by SPI or by a session,
//! the insert without a statement, the fast path, a source of the user.
//!
//! CONTRIBUTING.md says where a new column goes, apart from the list here.

use crate::refusal::{Refusal, check_short};

/// The event as the source stores it. JSON columns are the stored text, so the body contains the same bytes.
///
/// Read from a row by [`Event::read`], used by `envelope` and `route`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Event {
    /// A UUID from the built-in store; any text of at most 255 bytes from a source of the user.
    pub id: String,
    /// Position in the source; equal to the pointer's.
    pub seq: i64,
    /// The event's type, at most 255 bytes.
    pub kind: String,
    pub aggregate_type: Option<String>,
    pub aggregate_id: Option<String>,
    /// For captured rows: INSERT, UPDATE or DELETE; otherwise any text of the application.
    pub operation: Option<String>,
    /// JSON text.
    pub payload: String,
    /// JSON text.
    pub previous_payload: Option<String>,
    /// JSON text.
    pub metadata: Option<String>,
    /// JSON text of an object: the headers of the user.
    pub headers: Option<String>,
    pub actor: Option<String>,
    /// At most 255 bytes.
    pub correlation_id: Option<String>,
    /// RFC 3339, UTC, with microseconds: `2026-01-31T12:00:00.000000Z`.
    pub created_at: String,
    /// The same time in whole seconds since 1970, rounded down; negative before.
    pub created_at_s: i64,
}

/// A column of outbox_events that an application fills.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EventColumn {
    pub name: &'static str,
    pub kind: ColumnKind,
    pub is_required: bool,
}

/// The limit of an event, in bytes as [`Event::body_bytes`] counts them. RabbitMQ 4 refuses a message over 16 MiB by
/// default. The difference is room for the rest of the body: the other members of an envelope, and the escapes of its
/// texts.
pub const EVENT_BYTES_MAX: usize = 15 << 20;

/// The type of a column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ColumnKind {
    /// A UUID; in a source of the user a short text.
    Id,
    /// A text of at most 255 bytes.
    Short,
    /// A text that counts in `body_bytes`.
    Long,
    /// JSON, which counts in `body_bytes`.
    Json,
}

/// In the order of the table and of the view `event_text`. seq comes before them, created_at after them.
pub const COLUMNS: [EventColumn; 11] = [
    EventColumn::new("id", ColumnKind::Id, true),
    EventColumn::new("type", ColumnKind::Short, true),
    EventColumn::new("aggregate_type", ColumnKind::Short, false),
    EventColumn::new("aggregate_id", ColumnKind::Short, false),
    EventColumn::new("operation", ColumnKind::Short, false),
    EventColumn::new("payload", ColumnKind::Json, true),
    EventColumn::new("previous_payload", ColumnKind::Json, false),
    EventColumn::new("metadata", ColumnKind::Json, false),
    EventColumn::new("headers", ColumnKind::Json, false),
    EventColumn::new("actor", ColumnKind::Long, false),
    EventColumn::new("correlation_id", ColumnKind::Short, false),
];

impl EventColumn {
    const fn new(name: &'static str, kind: ColumnKind, is_required: bool) -> Self {
        Self {
            name,
            kind,
            is_required,
        }
    }
}

impl ColumnKind {
    pub const fn counts(self) -> bool {
        matches!(self, Self::Long | Self::Json)
    }

    const fn is_short(self) -> bool {
        matches!(self, Self::Id | Self::Short)
    }
}

/// A row that is read column by column, each once, from the first to the last.
pub trait EventRow {
    type Error;

    fn text(&mut self) -> Result<Option<String>, Self::Error>;
    fn number(&mut self) -> Result<Option<i64>, Self::Error>;
}

impl Event {
    /// Reads the event from a row of [`COLUMNS`] as texts, created_at, and the same in whole seconds, as in
    /// `event_text`. A column that is NULL although it must not be is empty.
    ///
    /// # Errors The errors of the row.
    pub fn read<R: EventRow>(seq: i64, row: &mut R) -> Result<Self, R::Error> {
        Ok(Self {
            seq,
            id: row.text()?.unwrap_or_default(),
            kind: row.text()?.unwrap_or_default(),
            aggregate_type: row.text()?,
            aggregate_id: row.text()?,
            operation: row.text()?,
            payload: row.text()?.unwrap_or_default(),
            previous_payload: row.text()?,
            metadata: row.text()?,
            headers: row.text()?,
            actor: row.text()?,
            correlation_id: row.text()?,
            created_at: row.text()?.unwrap_or_default(),
            created_at_s: row.number()?.unwrap_or_default(),
        })
    }

    /// The texts of [`COLUMNS`].
    pub fn texts(&self) -> [Option<&str>; COLUMNS.len()] {
        [
            Some(&self.id),
            Some(&self.kind),
            self.aggregate_type.as_deref(),
            self.aggregate_id.as_deref(),
            self.operation.as_deref(),
            Some(&self.payload),
            self.previous_payload.as_deref(),
            self.metadata.as_deref(),
            self.headers.as_deref(),
            self.actor.as_deref(),
            self.correlation_id.as_deref(),
        ]
    }

    /// Its size as text, as `outbox_events.body_bytes` counts it.
    pub fn body_bytes(&self) -> usize {
        let columns = COLUMNS.iter().zip(self.texts());
        let counted = columns
            .filter(|(column, _)| column.kind.counts())
            .filter_map(|(_, text)| text);
        counted.map(str::len).sum()
    }

    /// Checks that each short column fits in a message.
    ///
    /// # Errors [`Refusal`] names the first that does not.
    pub fn check_short_columns(&self) -> Result<(), Refusal> {
        let columns = COLUMNS.iter().zip(self.texts());
        (columns.filter(|(column, _)| column.kind.is_short()))
            .try_for_each(|(column, text)| text.map_or(Ok(()), |text| check_short(column.name, text)))
    }
}

/// The event of a message with that key, or why the message can never be sent. Err: why the key or the event cannot be
/// read.
///
/// # Errors The reason, for the dead letter.
pub fn sendable(key: Result<(), String>, event: Result<Event, String>) -> Result<Event, String> {
    key.map_err(|why| format!("its key cannot be read: {why}"))?;
    let event = event.map_err(|why| format!("the event cannot be read: {why}"))?;
    match event.body_bytes() {
        bytes if bytes > EVENT_BYTES_MAX => Err(format!(
            "the event has {bytes} bytes, which exceeds the limit of {} MiB",
            EVENT_BYTES_MAX >> 20
        )),
        _ => Ok(event),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::convert::Infallible;

    /// Rows of texts, each the name of its column.
    struct Names(std::array::IntoIter<EventColumn, { COLUMNS.len() }>);

    impl EventRow for Names {
        type Error = Infallible;

        fn text(&mut self) -> Result<Option<String>, Infallible> {
            Ok(Some(
                self.0.next().map_or("created_at", |column| column.name).to_owned(),
            ))
        }

        fn number(&mut self) -> Result<Option<i64>, Infallible> {
            Ok(Some(7))
        }
    }

    #[test]
    fn texts_are_in_the_order_of_the_columns() {
        let Ok(event) = Event::read(5, &mut Names(COLUMNS.into_iter()));
        assert_eq!(event.texts(), COLUMNS.map(|column| Some(column.name)));
        assert_eq!(
            (event.seq, event.created_at.as_str(), event.created_at_s),
            (5, "created_at", 7)
        );
        assert_eq!((event.kind.as_str(), event.payload.as_str()), ("type", "payload"));
        assert_eq!(event.body_bytes(), "payloadprevious_payloadmetadataheadersactor".len());
    }

    #[test]
    fn a_short_column_that_is_too_long_is_named() {
        let mut event = Event::default();
        assert_eq!(event.check_short_columns(), Ok(()));
        event.actor = Some("a".repeat(300));
        event.correlation_id = Some("c".repeat(255));
        assert_eq!(event.check_short_columns(), Ok(()));
        event.correlation_id = Some("c".repeat(256));
        let refusal = event.check_short_columns().expect_err("too long");
        assert!(refusal.message.contains("correlation_id"), "{}", refusal.message);
    }
}
