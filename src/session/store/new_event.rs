//! An event on its way from the arguments of outbox_publish to the columns of outbox_events. Runs in a user's backend.

use crate::config::Context;
use crate::error::{UserError, invalid};
use crate::pg::args::{Args, Jsonb};
use crate::pg::table::{Kind, Value};
use outbox_core::event::{self, COLUMNS, Column, Event};
use pgrx::PgSqlErrorCode;
use pgrx::datum::TimestampWithTimeZone;
use std::convert::Infallible;

/// The time range in which it may be sent.
#[derive(Clone, Copy, Default)]
pub struct Times {
    pub available_at: Option<TimestampWithTimeZone>,
    pub expires_at: Option<TimestampWithTimeZone>,
}

pub struct NewEvent {
    /// None: the call makes an id.
    pub id: Option<pgrx::Uuid>,
    /// Its texts. Of its JSON columns only the headers are in it.
    pub texts: Event,
    payload: Jsonb,
    previous_payload: Option<Jsonb>,
    metadata: Option<Jsonb>,
    headers: Option<Jsonb>,
    /// The name as the caller gave it.
    pub destination: Option<String>,
    pub times: Times,
}

impl NewEvent {
    /// Takes the arguments, as sql/src/20_enqueue.sql declares them; the settings of the session fill in what they
    /// leave out.
    pub fn of(args: &Args) -> Result<Self, UserError> {
        let Some(kind) = args.text(0).filter(|kind| !kind.is_empty()) else {
            return Err(missing("type", "Name what happened, for example 'OrderPlaced'."));
        };
        let Some(payload) = args.jsonb(1) else {
            let hint = "Pass '{}' for an event without data. An SQL NULL is not JSON null.";
            return Err(missing("payload", hint));
        };
        let session = Context::snapshot();
        let json = |given: Option<Jsonb>, set: &Option<String>| given.or_else(|| set.as_deref().map(Jsonb::of_text));
        let headers = json(args.jsonb(7), &session.headers);
        let headers_text = headers.as_ref().map(Jsonb::to_text);
        if headers_text.as_ref().is_some_and(|text| !text.starts_with('{')) {
            return Err(invalid(
                "headers are not a JSON object",
                "Pass headers as an object, such as {\"tenant\": \"acme\"}.",
            ));
        }
        Ok(Self {
            id: args.uuid(12),
            texts: Event {
                kind,
                aggregate_type: args.text(2),
                aggregate_id: args.text(3),
                operation: args.text(4),
                headers: headers_text,
                actor: args.text(8).or(session.actor),
                correlation_id: args.text(9).or(session.correlation_id),
                ..Event::default()
            },
            payload,
            previous_payload: args.jsonb(5),
            metadata: json(args.jsonb(6), &session.metadata),
            headers,
            destination: args.text(10),
            times: Times {
                available_at: args.time(11),
                expires_at: args.time(13),
            },
        })
    }

    /// The values of [`COLUMNS`], with this id.
    pub fn columns(&self, id: pgrx::Uuid) -> [Value<'_>; COLUMNS.len()] {
        [
            Value::Uuid(id),
            Value::Text(&self.texts.kind),
            Value::text(self.texts.aggregate_type.as_deref()),
            Value::text(self.texts.aggregate_id.as_deref()),
            Value::text(self.texts.operation.as_deref()),
            Value::Jsonb(&self.payload),
            Value::jsonb(&self.previous_payload),
            Value::jsonb(&self.metadata),
            Value::jsonb(&self.headers),
            Value::text(self.texts.actor.as_deref()),
            Value::text(self.texts.correlation_id.as_deref()),
        ]
    }

    /// The texts as they are sent, in UTF-8. The column body_bytes counts them in the encoding of the database.
    pub fn bytes(&self, id: pgrx::Uuid) -> usize {
        Texts::of(self.columns(id)).bytes()
    }
}

fn missing(what: &str, hint: &str) -> UserError {
    let message = format!("an event needs a {what}");
    UserError::new(PgSqlErrorCode::ERRCODE_NULL_VALUE_NOT_ALLOWED, message, hint)
}

/// The SQL type of a column.
pub fn type_of(column: Column) -> Kind {
    match column.kind {
        event::Kind::Id => Kind::Uuid,
        event::Kind::Short | event::Kind::Long => Kind::Text,
        event::Kind::Json => Kind::Jsonb,
    }
}

/// The values of [`COLUMNS`], JSON as text.
pub struct Texts<'a> {
    pub columns: [Value<'a>; COLUMNS.len()],
    json: [Option<String>; COLUMNS.len()],
}

impl<'a> Texts<'a> {
    pub fn of(columns: [Value<'a>; COLUMNS.len()]) -> Self {
        let json = columns.map(|value| match value {
            Value::Jsonb(json) => Some(json.to_text()),
            _ => None,
        });
        Self { columns, json }
    }

    /// The text of each column that is a text or JSON.
    pub fn each(&self) -> impl Iterator<Item = (Column, Option<&str>)> {
        (COLUMNS.into_iter().zip(&self.columns).zip(&self.json)).map(|((column, value), json)| {
            let text = match value {
                Value::Text(text) => Some(*text),
                _ => json.as_deref(),
            };
            (column, text)
        })
    }

    /// The size in bytes, counted as outbox_events.body_bytes does.
    pub fn bytes(&self) -> usize {
        let counted = self.each().filter(|(column, _)| column.kind.counts());
        counted.filter_map(|(_, text)| text).map(str::len).sum()
    }

    /// The event, with the time of its creation: as text, and in seconds since 1970.
    pub fn event(self, seq: i64, created_at: String, created_at_s: i64) -> Event {
        let columns = self.columns.into_iter().zip(self.json);
        let Ok(event) = Event::read(
            seq,
            &mut Given {
                columns,
                created_at: Some(created_at),
                created_at_s,
            },
        );
        event
    }
}

struct Given<C> {
    columns: C,
    created_at: Option<String>,
    created_at_s: i64,
}

impl<'a, C: Iterator<Item = (Value<'a>, Option<String>)>> event::EventRow for Given<C> {
    type Error = Infallible;

    fn text(&mut self) -> Result<Option<String>, Infallible> {
        Ok(match self.columns.next() {
            Some((Value::Text(text), _)) => Some(text.to_owned()),
            Some((Value::Uuid(id), _)) => Some(id.to_string()),
            Some((_, json)) => json,
            None => self.created_at.take(),
        })
    }

    fn number(&mut self) -> Result<Option<i64>, Infallible> {
        Ok(Some(self.created_at_s))
    }
}
