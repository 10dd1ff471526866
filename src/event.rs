//! Events in rows of the server, by the list of columns in `outbox_core::event`: what a statement returned, what a function was
//! called with, and the SQL for both. In whatever process runs the statement.

use crate::pg::record::Record;
use crate::pg::spi::{SpiError, SpiHeapTupleData, SpiResult};
use crate::pg::text::Unreadable;
use outbox_core::event::{COLUMNS, Column, Event, Kind, Row};

/// An event out of a row of a statement: the columns of `event_text` from id on, of which `first` is the ordinal.
pub fn read(row: &SpiHeapTupleData, first: usize, seq: i64) -> SpiResult<Event> {
    Event::read(seq, &mut Returned { row, next: first })
}

/// The ordinal of created_at, where that of id is `first`.
pub const fn created_at(first: usize) -> usize {
    first + COLUMNS.len()
}

/// The name of the column that a [`Record`] of an event begins with.
pub const FIRST: &str = COLUMNS[0].name;

/// An event out of an argument: a row that has the columns of `event_text`.
pub fn of_record(record: &Record) -> Result<Event, Unreadable> {
    Event::read(0, &mut Given { record, next: 0 })
}

/// The columns of `event_text` from id on, separated by commas: of a row `e`, where `json` says how a column of JSON becomes a
/// text.
pub fn columns_sql(json: impl Fn(&str) -> String) -> String {
    let column = |column: Column| match column.kind {
        Kind::Id => format!("e.{}::pg_catalog.text", column.name),
        Kind::Short | Kind::Long => format!("e.{}", column.name),
        Kind::Json => json(column.name),
    };
    let columns = COLUMNS.map(column).join(", ");
    let created_at = created_at_sql("e.created_at");
    format!("{columns}, {created_at}")
}

/// A time as the columns created_at and created_at_s have it.
pub fn created_at_sql(time: &str) -> String {
    format!(
        "pg_catalog.to_char({time} at time zone 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.US\"Z\"'),
         pg_catalog.floor(extract(epoch from {time}))::pg_catalog.int8"
    )
}

struct Returned<'a, 'b> {
    row: &'a SpiHeapTupleData<'b>,
    next: usize,
}

impl Row for Returned<'_, '_> {
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

struct Given<'a> {
    record: &'a Record,
    next: usize,
}

impl Row for Given<'_> {
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
