//! Reads events from rows of the server, by the list of columns in `outbox_core::event`: rows of a statement, rows in
//! the arguments of a function, and the SQL for both. Sessions and workers call it on the main thread.

use crate::pg::record::Record;
use crate::pg::spi::{SpiError, SpiHeapTupleData, SpiResult};
use crate::pg::text::Unreadable;
use outbox_core::event::{COLUMNS, ColumnKind, Event, EventColumn, EventRow};

/// The event in a row of a statement, which has the columns of `event_text` from id on. `first` is the ordinal of id.
pub fn read(row: &SpiHeapTupleData, first: usize, seq: i64) -> SpiResult<Event> {
    Event::read(seq, &mut Returned { row, next: first })
}

/// The ordinal of created_at, if that of id is `first`.
pub const fn created_at(first: usize) -> usize {
    first + COLUMNS.len()
}

/// The name of the first column in a [`Record`] of an event.
pub const FIRST: &str = COLUMNS[0].name;

/// The event in an argument: a row with the columns of `event_text`.
pub fn of_record(record: &Record) -> Result<Event, Unreadable> {
    Event::read(0, &mut RecordColumns { record, next: 0 })
}

/// The columns of `event_text` from id on for a row `e`, separated by commas. All are NULL unless `condition` holds: to
/// convert them takes longer than to read the row.
pub fn columns_sql(condition: &str) -> String {
    let column = |column: EventColumn| match column.kind {
        ColumnKind::Short | ColumnKind::Long => format!("e.{}", column.name),
        ColumnKind::Id | ColumnKind::Json => format!("e.{}::pg_catalog.text", column.name),
    };
    let columns = COLUMNS.into_iter().map(column).chain(created_at_sql("e.created_at"));
    let columns: Vec<String> = columns
        .map(|column| format!("case when {condition} then {column} end"))
        .collect();
    columns.join(", ")
}

/// A time in the form of the columns created_at and created_at_s.
pub fn created_at_sql(time: &str) -> [String; 2] {
    [
        format!("pg_catalog.to_char({time} at time zone 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.US\"Z\"')"),
        format!("pg_catalog.floor(extract(epoch from {time}))::pg_catalog.int8"),
    ]
}

struct Returned<'a, 'b> {
    row: &'a SpiHeapTupleData<'b>,
    next: usize,
}

impl EventRow for Returned<'_, '_> {
    type Error = SpiError;

    fn text(&mut self) -> SpiResult<Option<String>> {
        self.next += 1;
        self.row.get(self.next - 1)
    }

    fn number(&mut self) -> SpiResult<Option<i64>> {
        self.next += 1;
        self.row.get(self.next - 1)
    }
}

struct RecordColumns<'a> {
    record: &'a Record,
    next: usize,
}

impl EventRow for RecordColumns<'_> {
    type Error = Unreadable;

    fn text(&mut self) -> Result<Option<String>, Unreadable> {
        self.next += 1;
        self.record.text(self.next - 1)
    }

    fn number(&mut self) -> Result<Option<i64>, Unreadable> {
        self.next += 1;
        Ok(self.record.int8(self.next - 1))
    }
}
