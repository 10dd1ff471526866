//! The usual publish without a statement: one row into outbox_events and one into outbox, where nobody has added anything
//! to the two tables. What is not usual goes by `enqueue`, whose statements say what these rows must be. In a user's
//! backend, in its transaction, as the owner of the tables.

use super::request::{Publish, duplicate, new_id};
use super::statements::Statements;
use crate::error::{UserError, unexpected};
use crate::limits::check_body;
use crate::pg::args::Jsonb;
use crate::pg::clock::{since_1970, us_since_1970};
use crate::pg::table::{self, Column, Kind, Layout, Row, Table, Value};
use crate::pg::text;
use crate::session::effects;
use crate::shared::fastpath::eligibility;
use crate::shared::fastpath::parcel::{Inserted, Stored};
use outbox_core::envelope::SHORT_STRING_MAX;
use outbox_core::message::Event;
use outbox_core::partition::{Partition, crc32};

/// As sql/src/10_tables.sql makes them.
const EVENTS: Layout = Layout {
    columns: &[
        Column::of(c"seq", Kind::Int8).not_null().identity(),
        Column::of(c"id", Kind::Uuid).not_null(),
        Column::of(c"type", Kind::Text).not_null(),
        Column::of(c"aggregate_type", Kind::Text),
        Column::of(c"aggregate_id", Kind::Text),
        Column::of(c"operation", Kind::Text),
        Column::of(c"payload", Kind::Jsonb).not_null(),
        Column::of(c"previous_payload", Kind::Jsonb),
        Column::of(c"metadata", Kind::Jsonb),
        Column::of(c"headers", Kind::Jsonb),
        Column::of(c"actor", Kind::Text),
        Column::of(c"correlation_id", Kind::Text),
        Column::of(c"created_at", Kind::Time).not_null().default("now()"),
        Column::of(c"body_bytes", Kind::Int4).not_null().generated(
            "((((octet_length((payload)::text) + COALESCE(octet_length((previous_payload)::text), 0)) + \
             COALESCE(octet_length((metadata)::text), 0)) + COALESCE(octet_length((headers)::text), 0)) + \
             COALESCE(octet_length(actor), 0))",
        ),
    ],
    checks: &[
        "((type <> ''::text) AND (octet_length(type) <= 255))",
        "(jsonb_typeof(headers) = 'object'::text)",
        "(octet_length(aggregate_id) <= 255)",
        "(octet_length(aggregate_type) <= 255)",
        "(octet_length(correlation_id) <= 255)",
        "(octet_length(operation) <= 255)",
        "isfinite(created_at)",
    ],
};
const OUTBOX: Layout = Layout {
    columns: &[
        Column::of(c"seq", Kind::Int8).not_null(),
        Column::of(c"enqueued_at", Kind::Time).not_null().default("now()"),
        Column::of(c"claim_token", Kind::Int8),
        Column::of(c"claim_until", Kind::Time),
        Column::of(c"attempts", Kind::Int4).not_null().default("0"),
        Column::of(c"partition", Kind::Int2).not_null(),
        Column::of(c"crashes", Kind::Int2).not_null().default("0"),
        Column::of(c"replayed", Kind::Bool).not_null().default("false"),
        Column::of(c"destination", Kind::Text)
            .not_null()
            .default("'default'::text"),
        Column::of(c"key", Kind::Text),
        Column::of(c"last_error", Kind::Text),
        Column::of(c"expires_at", Kind::Time),
    ],
    checks: &["(octet_length(key) <= 255)"],
};
/// The column `id` of [`EVENTS`].
const ID: usize = 1;

/// Stores and enqueues an event whose key is announced; returns its seq and partition. None, and nothing is done: this one needs
/// the statements. `by_express`: the event may go by express, if it is small.
pub(super) fn publish(
    statements: &Statements,
    request: &Publish,
    by_express: bool,
) -> Result<Option<(i64, Partition)>, UserError> {
    if request.times.available_at.is_some() || !text::is_utf8() {
        return Ok(None);
    }
    let (events, outbox) = (
        Table::open(statements.event_table),
        Table::open(statements.outbox_table),
    );
    let published = publish_into(&events, &outbox, statements, request, by_express);
    outbox.close();
    events.close();
    published
}

fn publish_into(
    events: &Table,
    outbox: &Table,
    statements: &Statements,
    request: &Publish,
    by_express: bool,
) -> Result<Option<(i64, Partition)>, UserError> {
    if !events.is(&EVENTS) || !outbox.is(&OUTBOX) || !events.may_be_written() || !outbox.may_be_written() {
        return Ok(None);
    }
    let texts = Texts {
        payload: request.payload.to_text(),
        previous_payload: request.previous_payload.as_ref().map(Jsonb::to_text),
        metadata: request.metadata.as_ref().map(Jsonb::to_text),
        headers: request.headers.as_ref().map(Jsonb::to_text),
        actor_bytes: request.actor.map_or(0, str::len),
    };
    if !meets_the_checks(request, &texts) {
        return Ok(None);
    }
    let Some(count) = partition_count(statements) else {
        return Ok(None);
    };
    check_body(texts.bytes() as i64)?;
    let id = request.id.unwrap_or_else(new_id);
    if request.id.is_some() && events.has(ID, id) {
        return Err(duplicate(request.id));
    }
    let now = table::now();
    let Some(seq) = events.next_value() else {
        return Ok(None);
    };
    let event_place = events.insert([
        Value::Int8(seq),
        Value::Uuid(id),
        Value::Text(request.kind),
        Value::text(request.aggregate_type),
        Value::text(request.aggregate_id),
        Value::text(request.operation),
        Value::Jsonb(&request.payload),
        Value::jsonb(&request.previous_payload),
        Value::jsonb(&request.metadata),
        Value::jsonb(&request.headers),
        Value::text(request.actor),
        Value::text(request.correlation_id),
        Value::Time(now),
        Value::Int4(texts.bytes() as i32),
    ]);
    let crc = request.key.map(crc32);
    let partition = Partition::new(crc.map_or(seq, i64::from) % i64::from(count)).map_err(unexpected)?;
    let place = outbox.insert([
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
            .times
            .expires_at
            .map_or(Value::Null, |at| Value::Time(at.into())),
    ]);
    let parcel = (by_express && eligibility::may_fit(texts.bytes())).then(|| {
        let event = texts.event(request, seq, id, now)?;
        let stored = Stored {
            event,
            place: (statements.event_table, event_place),
        };
        let inserted = Inserted {
            seq,
            partition,
            place: Some((statements.outbox_table, place, since_1970(now))),
        };
        inserted.parcel(stored, request.destination, request.key.map(str::to_owned))
    });
    effects::ready(request.destination, partition, seq, parcel.flatten());
    if let Some(time) = request.times.expires_at {
        effects::expires_at(us_since_1970(time));
    }
    Ok(Some((seq, partition)))
}

/// The JSON of an event as text, and how long its actor is.
struct Texts {
    payload: String,
    previous_payload: Option<String>,
    metadata: Option<String>,
    headers: Option<String>,
    actor_bytes: usize,
}

impl Texts {
    /// As outbox_events.body_bytes counts them.
    fn bytes(&self) -> usize {
        let others = [&self.previous_payload, &self.metadata, &self.headers];
        self.payload.len() + others.into_iter().flatten().map(String::len).sum::<usize>() + self.actor_bytes
    }

    fn event(self, request: &Publish, seq: i64, id: pgrx::Uuid, now: i64) -> Option<Event> {
        let owned = |text: Option<&str>| text.map(str::to_owned);
        Some(Event {
            id: id.to_string(),
            seq,
            kind: request.kind.to_owned(),
            aggregate_type: owned(request.aggregate_type),
            aggregate_id: owned(request.aggregate_id),
            operation: owned(request.operation),
            payload: self.payload,
            previous_payload: self.previous_payload,
            metadata: self.metadata,
            headers: self.headers,
            actor: owned(request.actor),
            correlation_id: owned(request.correlation_id),
            created_at: table::in_utc(now)?,
            created_at_s: since_1970(now).div_euclid(1_000_000),
            body: None,
        })
    }
}

/// Else the statement says which of the conditions of [`EVENTS`] it does not meet.
fn meets_the_checks(request: &Publish, texts: &Texts) -> bool {
    let named = [
        request.aggregate_type,
        request.aggregate_id,
        request.operation,
        request.correlation_id,
        request.key,
    ];
    let is_short = |text: &str| text.len() <= SHORT_STRING_MAX;
    !request.kind.is_empty()
        && is_short(request.kind)
        && named.into_iter().flatten().all(is_short)
        && texts.headers.as_ref().is_none_or(|headers| headers.starts_with('{'))
}

/// None: it takes more than the count to know a partition, or outbox_configure() has just changed it.
fn partition_count(statements: &Statements) -> Option<i16> {
    let read = |row: Row| row.int2(2).filter(|_| row.is_null(4));
    table::only_row(statements.settings, read)?
}
