//! The usual publish without a statement: one row into outbox_events and one into outbox, as long as no user has added
//! anything to the two tables. Every other case goes through `enqueue`, whose statements define these rows. Runs in a
//! user's backend, in its transaction, as the owner of the tables.

use super::new_event::{Texts, type_of};
use super::request::{Publish, check_id, new_id};
use super::statements::Statements;
use crate::error::{UserError, unexpected};
use crate::limits::check_body;
use crate::pg::clock::{since_1970, us_since_1970};
use crate::pg::table::{self, Column, Layout, Row, Table, Value};
use crate::pg::text;
use crate::session::effects;
use crate::shared::fastpath::eligibility;
use crate::shared::fastpath::handoff::{Inserted, Stored};
use outbox_core::envelope::SHORT_STRING_MAX;
use outbox_core::event::{self, COLUMNS, Kind};
use outbox_core::partition::{Partition, crc32};
use std::sync::LazyLock;

/// The tables as sql/src/10_tables.sql creates them.
static EVENTS: LazyLock<Layout> = LazyLock::new(|| {
    let columns = COLUMNS.map(|column| Column::of(column.name, type_of(column)).required(column.is_required));
    let bytes = |column: event::Column| match (column.kind, column.is_required) {
        (Kind::Json, true) => format!("octet_length(({})::text)", column.name),
        (Kind::Json, false) => format!("COALESCE(octet_length(({})::text), 0)", column.name),
        _ => format!("COALESCE(octet_length({}), 0)", column.name),
    };
    let counted = COLUMNS.into_iter().filter(|column| column.kind.counts()).map(bytes);
    let short = COLUMNS.into_iter().filter(|column| column.kind == Kind::Short);
    let is_short = |column: event::Column| match column.is_required {
        true => format!(
            "(({name} <> ''::text) AND (octet_length({name}) <= 255))",
            name = column.name
        ),
        false => format!("(octet_length({}) <= 255)", column.name),
    };
    let own = ["(jsonb_typeof(headers) = 'object'::text)", "isfinite(created_at)"];
    Layout {
        columns: [Column::of("seq", table::Kind::Int8).not_null().identity()]
            .into_iter()
            .chain(columns)
            .chain([
                Column::of("created_at", table::Kind::Time).not_null().default("now()"),
                Column::of("body_bytes", table::Kind::Int4).not_null().generated(
                    counted
                        .reduce(|sum, next| format!("({sum} + {next})"))
                        .unwrap_or_default(),
                ),
            ])
            .collect(),
        checks: short.map(is_short).chain(own.map(str::to_owned)).collect(),
    }
});
static OUTBOX: LazyLock<Layout> = LazyLock::new(|| Layout {
    columns: vec![
        Column::of("seq", table::Kind::Int8).not_null(),
        Column::of("enqueued_at", table::Kind::Time).not_null().default("now()"),
        Column::of("claim_token", table::Kind::Int8),
        Column::of("claim_until", table::Kind::Time),
        Column::of("attempts", table::Kind::Int4).not_null().default("0"),
        Column::of("partition", table::Kind::Int2).not_null(),
        Column::of("crashes", table::Kind::Int2).not_null().default("0"),
        Column::of("replayed", table::Kind::Bool).not_null().default("false"),
        Column::of("destination", table::Kind::Text)
            .not_null()
            .default("'default'::text"),
        Column::of("key", table::Kind::Text),
        Column::of("last_error", table::Kind::Text),
        Column::of("expires_at", table::Kind::Time),
    ],
    checks: vec!["(octet_length(key) <= 255)".to_owned()],
});
/// The column `id` of [`EVENTS`].
const ID: usize = 1;

/// Stores and enqueues an event whose key is announced; returns its seq and partition. None if nothing was done,
/// because this event needs the statements. `by_fast_path`: the event may take the fast path, if it is small.
pub(super) fn publish(
    statements: &Statements,
    request: &Publish,
    by_fast_path: bool,
) -> Result<Option<(i64, Partition)>, UserError> {
    if request.event.times.available_at.is_some() || !text::is_utf8() {
        return Ok(None);
    }
    let (events, outbox) = (
        Table::open(statements.event_table),
        Table::open(statements.outbox_table),
    );
    let published = publish_into(&events, &outbox, statements, request, by_fast_path);
    outbox.close();
    events.close();
    published
}

fn publish_into(
    events: &Table,
    outbox: &Table,
    statements: &Statements,
    request: &Publish,
    by_fast_path: bool,
) -> Result<Option<(i64, Partition)>, UserError> {
    if !events.is(&EVENTS) || !outbox.is(&OUTBOX) || !events.may_be_written() || !outbox.may_be_written() {
        return Ok(None);
    }
    let id = request.event.id.unwrap_or_else(new_id);
    let texts = Texts::of(request.event.columns(id));
    if !meets_the_checks(request, &texts) {
        return Ok(None);
    }
    let Some(count) = partition_count(statements) else {
        return Ok(None);
    };
    let bytes = texts.bytes();
    check_body(bytes as i64)?;
    check_id(statements, request.event.id)?;
    let now = table::now();
    let Some(seq) = events.next_value() else {
        return Ok(None);
    };
    let mut row = [Value::Null; COLUMNS.len() + 3];
    row[0] = Value::Int8(seq);
    row[ID..ID + COLUMNS.len()].copy_from_slice(&texts.columns);
    row[ID + COLUMNS.len()] = Value::Time(now);
    row[ID + COLUMNS.len() + 1] = Value::Int4(bytes as i32);
    let event_tid = events.insert(row);
    let crc = request.key.map(crc32);
    let partition = Partition::new(crc.map_or(seq, i64::from) % i64::from(count)).map_err(unexpected)?;
    let tid = outbox.insert([
        Value::Int8(seq),
        Value::Time(now),
        Value::Null,
        Value::Null,
        Value::Int4(0),
        Value::Int2(partition.as_i16()),
        Value::Int2(0),
        Value::Bool(false),
        Value::Text(request.destination),
        Value::text(request.key),
        Value::Null,
        request
            .event
            .times
            .expires_at
            .map_or(Value::Null, |at| Value::Time(at.into())),
    ]);
    let handoff = (by_fast_path && eligibility::may_fit(bytes)).then(|| {
        let event = texts.event(seq, table::in_utc(now)?, since_1970(now).div_euclid(1_000_000));
        let stored = Stored {
            event,
            at: (statements.event_table, event_tid),
        };
        let inserted = Inserted {
            seq,
            partition,
            at: Some((statements.outbox_table, tid, since_1970(now))),
        };
        inserted.handoff(stored, request.destination, request.key.map(str::to_owned))
    });
    effects::ready(request.destination, partition, seq, handoff.flatten());
    if let Some(time) = request.event.times.expires_at {
        effects::expires_at(us_since_1970(time));
    }
    Ok(Some((seq, partition)))
}

/// The statement then reports which of the conditions of [`EVENTS`] the event violates.
fn meets_the_checks(request: &Publish, texts: &Texts) -> bool {
    let is_short = |text: &str| text.len() <= SHORT_STRING_MAX;
    let is_good = |(column, text): (event::Column, Option<&str>)| match (column.kind, text) {
        (Kind::Short, Some(text)) => is_short(text) && !(column.is_required && text.is_empty()),
        (Kind::Json, Some(text)) => column.name != "headers" || text.starts_with('{'),
        _ => true,
    };
    request.key.is_none_or(is_short) && texts.each().all(is_good)
}

/// None: a partition needs more than the count, or outbox_configure() has just changed it.
fn partition_count(statements: &Statements) -> Option<i16> {
    let read = |row: Row| row.int2(2).filter(|_| row.is_null(4));
    table::only_row(statements.settings, read)?
}
