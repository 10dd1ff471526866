//! The rows that are written without a statement, as long as no user has added anything to their tables: those that a
//! publish writes into outbox_events and outbox, and the one that the settle of a published message writes into a
//! partition of outbox_history. The columns are those of sql/src/10_tables.sql. For all other cases there are
//! statements; those of a publish are made of the same columns (`insert`). tests/differential.rs compares the two ways.

use crate::pg::clock::unix_seconds;
use crate::pg::table::{Column, ColumnType, ColumnValue, Filled, Layout, Row, in_utc};
use crate::pg::text::{self, Unreadable};
use outbox_core::event::{self, COLUMNS, Event};
use outbox_core::message::Pointer;
use std::sync::LazyLock;

/// The columns of outbox_events.
pub static EVENT: LazyLock<Layout> = LazyLock::new(|| {
    let bytes = |column: event::EventColumn| match (column.kind, column.is_required) {
        (event::ColumnKind::Json, true) => format!("octet_length(({})::text)", column.name),
        (event::ColumnKind::Json, false) => format!("COALESCE(octet_length(({})::text), 0)", column.name),
        _ => format!("COALESCE(octet_length({}), 0)", column.name),
    };
    let counted = COLUMNS.into_iter().filter(|column| column.kind.counts()).map(bytes);
    let body_bytes = counted
        .reduce(|sum, next| format!("({sum} + {next})"))
        .unwrap_or_default();
    let given = COLUMNS.map(|of| column(of.name, type_of(of), of.is_required, Filled::Given(None)));
    let short = COLUMNS
        .into_iter()
        .filter(|column| column.kind == event::ColumnKind::Short);
    let is_short = |event::EventColumn { name, is_required, .. }: event::EventColumn| match is_required {
        true => format!("(({name} <> ''::text) AND (octet_length({name}) <= 255))"),
        false => format!("(octet_length({name}) <= 255)"),
    };
    let own = ["(jsonb_typeof(headers) = 'object'::text)", "isfinite(created_at)"];
    Layout {
        columns: [column("seq", ColumnType::Int8, true, Filled::Identity)]
            .into_iter()
            .chain(given)
            .chain([
                column("created_at", ColumnType::Time, true, Filled::Now),
                column("body_bytes", ColumnType::Int4, true, Filled::Generated(body_bytes)),
            ])
            .collect(),
        checks: short.map(is_short).chain(own.map(str::to_owned)).collect(),
        is_partition: false,
    }
});

/// The columns of outbox. A scheduled message goes into outbox_waiting, which has those that are given, too.
pub static MESSAGE: LazyLock<Layout> = LazyLock::new(|| Layout {
    columns: vec![
        column("seq", ColumnType::Int8, true, Filled::Given(None)),
        column("enqueued_at", ColumnType::Time, true, Filled::Now),
        column("claim_token", ColumnType::Int8, false, Filled::Null),
        column("claim_until", ColumnType::Time, false, Filled::Null),
        column("attempts", ColumnType::Int4, true, Filled::Zero),
        column("partition", ColumnType::Int2, true, Filled::Given(None)),
        column("crashes", ColumnType::Int2, true, Filled::Zero),
        column("replayed", ColumnType::Bool, true, Filled::Zero),
        column(
            "destination",
            ColumnType::Text,
            true,
            Filled::Given(Some("'default'::text")),
        ),
        column("key", ColumnType::Text, false, Filled::Given(None)),
        column("last_error", ColumnType::Text, false, Filled::Null),
        column("expires_at", ColumnType::Time, false, Filled::Given(None)),
        column("error_code", ColumnType::Text, false, Filled::Null),
    ],
    checks: vec!["(octet_length(key) <= 255)".to_owned()],
    is_partition: false,
});

/// The columns of a partition of outbox_history.
pub static HISTORY: LazyLock<Layout> = LazyLock::new(|| Layout {
    columns: vec![
        column("seq", ColumnType::Int8, true, Filled::Given(None)),
        column("enqueued_at", ColumnType::Time, true, Filled::Given(None)),
        column("published_at", ColumnType::Time, true, Filled::Given(None)),
        column("attempts", ColumnType::Int4, true, Filled::Given(None)),
        column("partition", ColumnType::Int2, true, Filled::Given(None)),
        column("discarded", ColumnType::Bool, true, Filled::Zero),
        column("replayed", ColumnType::Bool, true, Filled::Given(Some("false"))),
        column("destination", ColumnType::Text, true, Filled::Given(None)),
        column("key", ColumnType::Text, false, Filled::Given(None)),
        column("last_error", ColumnType::Text, false, Filled::Given(None)),
        column("error_code", ColumnType::Text, false, Filled::Given(None)),
    ],
    checks: Vec::new(),
    is_partition: true,
});

/// Whether a row of outbox is this message. `destination` is in the encoding of the database.
pub fn is_message(row: &Row, pointer: &Pointer, destination: &[u8]) -> bool {
    (row.int8(1), row.int2(6)) == (Some(pointer.seq), Some(pointer.partition.as_i16())) && row.is_text(9, destination)
}

/// The partition of a row of outbox.
pub fn partition(row: &Row) -> i16 {
    row.int2(6).unwrap_or_default()
}

/// The claim_token of a row of outbox.
pub fn claim_token(row: &Row) -> Option<i64> {
    row.int8(3)
}

/// The column crashes of a row of outbox.
pub fn crashes(row: &Row) -> i32 {
    row.int2(7).map_or(0, i32::from)
}

/// The column seq of a row of outbox_events, or of outbox.
pub fn seq(row: &Row) -> i64 {
    row.int8(1).unwrap_or_default()
}

/// The column body_bytes of a row of outbox_events.
pub fn body_bytes(row: &Row) -> i32 {
    row.int4(COLUMNS.len() + 3).unwrap_or_default()
}

/// The event in a row of outbox_events, or why it cannot be read.
pub fn event(row: &Row, seq: i64) -> Result<Event, Unreadable> {
    Event::read(seq, &mut StoredEvent { row, next: 0 })
}

/// Reads the columns of a row of outbox_events as the view event_text has them.
struct StoredEvent<'a> {
    row: &'a Row<'a>,
    /// The index of the next column in `COLUMNS`; created_at comes after them.
    next: usize,
}

impl event::EventRow for StoredEvent<'_> {
    type Error = Unreadable;

    fn text(&mut self) -> Result<Option<String>, Unreadable> {
        let (column, number) = (COLUMNS.get(self.next), self.next + 2);
        self.next += 1;
        match column.map(|column| column.kind) {
            Some(event::ColumnKind::Id) => Ok(self.row.uuid(number).map(text::of_uuid)),
            Some(event::ColumnKind::Short | event::ColumnKind::Long) => self.row.text_or_why_not(number),
            Some(event::ColumnKind::Json) => self.row.jsonb(number).map(|json| json.to_text()).transpose(),
            None => Ok(self.row.int8(COLUMNS.len() + 2).and_then(in_utc)),
        }
    }

    fn number(&mut self) -> Result<Option<i64>, Unreadable> {
        Ok(self.row.int8(COLUMNS.len() + 2).map(unix_seconds))
    }
}

/// The history of a message that was published at this time, from its row in outbox, which has the columns of
/// [`MESSAGE`].
pub fn published<'a>(row: &Row, at: i64) -> [ColumnValue<'a>; 10] {
    let attempts = row.int4(5).unwrap_or_default().saturating_add(1);
    let [
        seq,
        enqueued_at,
        partition,
        replayed,
        destination,
        key,
        last_error,
        error_code,
    ] = [1, 2, 6, 8, 9, 10, 11, 13].map(|column| row.same(column));
    let (published_at, attempts) = (ColumnValue::Time(at), ColumnValue::Int4(attempts));
    [
        seq,
        enqueued_at,
        published_at,
        attempts,
        partition,
        replayed,
        destination,
        key,
        last_error,
        error_code,
    ]
}

fn column(name: &'static str, kind: ColumnType, not_null: bool, filled: Filled) -> Column {
    Column {
        name,
        kind,
        not_null,
        filled,
    }
}

/// The values of the columns of [`MESSAGE`] that are given.
pub fn message<'a>(
    seq: i64,
    partition: i16,
    destination: &'a str,
    key: Option<&'a str>,
    expires_at: Option<i64>,
) -> [ColumnValue<'a>; 5] {
    [
        ColumnValue::Int8(seq),
        ColumnValue::Int2(partition),
        ColumnValue::Text(destination),
        ColumnValue::text(key),
        expires_at.map_or(ColumnValue::Null, ColumnValue::Time),
    ]
}

fn type_of(column: event::EventColumn) -> ColumnType {
    match column.kind {
        event::ColumnKind::Id => ColumnType::Uuid,
        event::ColumnKind::Short | event::ColumnKind::Long => ColumnType::Text,
        event::ColumnKind::Json => ColumnType::Jsonb,
    }
}
