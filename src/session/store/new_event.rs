//! An event on its way from the arguments of outbox_publish, or from a captured row, to the columns of outbox_events.
//! Runs in a user's backend.

use crate::config::Context;
use crate::error::{UserError, internal, invalid};
use crate::pg::args::{Args, Jsonb};
use crate::pg::spi::Spi;
use crate::pg::table::ColumnValue;
use crate::pg::text;
use outbox_core::change::Change;
use outbox_core::envelope::SHORT_STRING_MAX;
use outbox_core::event::{self, COLUMNS, ColumnKind, Event, EventColumn};
use pgrx::PgSqlErrorCode;
use pgrx::datum::TimestampWithTimeZone;
use std::convert::Infallible;

/// The arguments of outbox_publish that are the values of [`COLUMNS`], as sql/src/20_enqueue.sql declares them.
const ARGUMENTS: [usize; COLUMNS.len()] = [12, 0, 2, 3, 4, 1, 5, 6, 7, 8, 9];
pub const DESTINATION: usize = 10;
const AVAILABLE_AT: usize = 11;
const EXPIRES_AT: usize = 13;
const IF_EXISTS: usize = 14;

/// The aggregate_id of a captured row: its id, or the SHA-256 of one that makes a key too long to send. The row can
/// then be written, changed and deleted like any other, and its events have one key.
fn short_id(aggregate_type: &str, id: String) -> Result<String, UserError> {
    if aggregate_type.len() + ":".len() + id.len() <= SHORT_STRING_MAX {
        return Ok(id);
    }
    let sql = "select pg_catalog.encode(pg_catalog.sha256(pg_catalog.convert_to($1, 'UTF8')), 'hex')";
    let digest: Option<String> = Spi::get_one_with_args(sql, &[id.into()]).map_err(internal)?;
    Ok(digest.unwrap_or_default())
}

/// The time range in which it may be sent.
#[derive(Clone, Copy, Default)]
pub struct Times {
    pub available_at: Option<TimestampWithTimeZone>,
    pub expires_at: Option<TimestampWithTimeZone>,
}

impl Times {
    /// Whether the message is due now and never expires.
    pub fn are_unset(self) -> bool {
        self.available_at.is_none() && self.expires_at.is_none()
    }

    pub fn of(args: &Args) -> Self {
        Self {
            available_at: args.time(AVAILABLE_AT),
            expires_at: args.time(EXPIRES_AT),
        }
    }
}

/// What a publish does if an event has its id.
#[derive(Clone, Copy, PartialEq)]
pub enum IfExists {
    Error,
    /// Enqueues nothing and returns the seq of that event.
    Skip,
}

impl IfExists {
    pub fn of(args: &Args, has_own_id: bool) -> Result<Self, UserError> {
        match args.text(IF_EXISTS).as_deref() {
            None | Some("error") => Ok(Self::Error),
            Some("skip") if has_own_id => Ok(Self::Skip),
            Some("skip") => Err(invalid(
                "if_exists is skip, and there is no id",
                "Pass the id by which a repetition is recognised.",
            )),
            Some(other) => Err(invalid(
                format!("if_exists \"{other}\" is unknown"),
                "Use 'error', or 'skip' to publish an id once.",
            )),
        }
    }
}

pub struct NewEvent {
    /// Its texts as they are sent. It has no seq and no time yet.
    pub event: Event,
    id: pgrx::Uuid,
    /// The caller chose the id.
    pub has_own_id: bool,
    /// The JSON among the values of [`COLUMNS`].
    json: [Option<Jsonb>; COLUMNS.len()],
}

/// The value of a column.
enum GivenValue {
    Id(pgrx::Uuid),
    Text(String),
    Json(Jsonb),
    /// JSON that the server has not parsed yet.
    Unparsed(String),
}

impl NewEvent {
    /// Takes the arguments of outbox_publish; the settings of the session fill in what they leave out.
    pub fn of_arguments(args: &Args) -> Result<Self, UserError> {
        let session = Context::snapshot();
        Self::new(|index, column| {
            let number = ARGUMENTS[index];
            let given = match column.kind {
                ColumnKind::Id => args.uuid(number).map(GivenValue::Id),
                ColumnKind::Short | ColumnKind::Long => args.text(number).map(GivenValue::Text),
                ColumnKind::Json => args.jsonb(number).map(GivenValue::Json),
            };
            given.or_else(|| of_session(&session, column))
        })
    }

    /// The event of a captured row.
    pub fn of_change(mut change: Change, aggregate_type: &str, session: &Context) -> Result<Self, UserError> {
        change.aggregate_id = short_id(aggregate_type, change.aggregate_id)?;
        Self::new(|_, column| {
            let text = |text: &mut String| Some(GivenValue::Text(std::mem::take(text)));
            match column.name {
                "type" => text(&mut change.kind),
                "aggregate_type" => Some(GivenValue::Text(aggregate_type.to_owned())),
                "aggregate_id" => text(&mut change.aggregate_id),
                "operation" => Some(GivenValue::Text(change.operation.to_owned())),
                "payload" => Some(GivenValue::Unparsed(std::mem::take(&mut change.payload))),
                "previous_payload" => change.previous_payload.take().map(GivenValue::Unparsed),
                _ => of_session(session, column),
            }
        })
    }

    fn new(mut given: impl FnMut(usize, EventColumn) -> Option<GivenValue>) -> Result<Self, UserError> {
        let (mut id, mut json) = (None, [const { None }; COLUMNS.len()]);
        let mut texts = [const { None }; COLUMNS.len()];
        for (index, column) in COLUMNS.into_iter().enumerate() {
            texts[index] = match given(index, column) {
                Some(GivenValue::Id(given)) => {
                    id = Some(given);
                    None
                }
                Some(GivenValue::Text(text)) => Some(text).filter(|text| !(column.is_required && text.is_empty())),
                Some(GivenValue::Json(given)) => Some(json[index].insert(given).to_text()?),
                Some(GivenValue::Unparsed(text)) => Some(json[index].insert(Jsonb::of_text(&text)).to_text()?),
                None => None,
            };
            match (column.name, &texts[index]) {
                (name, None) if column.is_required && column.kind != ColumnKind::Id => return Err(missing(name)),
                ("headers", Some(text)) if !text.starts_with('{') => {
                    return Err(invalid(
                        "headers are not a JSON object",
                        "Pass headers as an object, such as {\"tenant\": \"acme\"}.",
                    ));
                }
                _ => {}
            }
        }
        let has_own_id = id.is_some();
        let id = id.unwrap_or_else(new_id);
        texts[0] = Some(text::of_uuid(id));
        let Ok(event) = Event::read(0, &mut Texts(texts.into_iter()));
        Ok(Self {
            event,
            id,
            has_own_id,
            json,
        })
    }

    pub fn id(&self) -> pgrx::Uuid {
        self.id
    }

    /// The values of [`COLUMNS`].
    pub fn values(&self) -> [ColumnValue<'_>; COLUMNS.len()] {
        let texts = self.event.texts();
        std::array::from_fn(|index| match COLUMNS[index].kind {
            ColumnKind::Id => ColumnValue::Uuid(self.id),
            ColumnKind::Short | ColumnKind::Long => ColumnValue::text(texts[index]),
            ColumnKind::Json => ColumnValue::jsonb(&self.json[index]),
        })
    }
}

/// What the session adds to all its events.
fn of_session(session: &Context, column: EventColumn) -> Option<GivenValue> {
    let text = |text: &Option<String>| text.clone();
    match column.name {
        "actor" => text(&session.actor).map(GivenValue::Text),
        "correlation_id" => text(&session.correlation_id).map(GivenValue::Text),
        "metadata" => text(&session.metadata).map(GivenValue::Unparsed),
        "headers" => text(&session.headers).map(GivenValue::Unparsed),
        _ => None,
    }
}

fn missing(column: &str) -> UserError {
    let hint = match column {
        "type" => "Name what happened, for example 'OrderPlaced'.",
        _ => "Pass '{}' for an event without data. An SQL NULL is not JSON null.",
    };
    let message = format!("an event needs a {column}");
    UserError::new(PgSqlErrorCode::ERRCODE_NULL_VALUE_NOT_ALLOWED, message, hint)
}

/// A new UUID of version 7, which sorts by time.
pub fn new_id() -> pgrx::Uuid {
    pgrx::Uuid::from_bytes(*uuid::Uuid::now_v7().as_bytes())
}

/// The texts of [`COLUMNS`].
struct Texts(std::array::IntoIter<Option<String>, { COLUMNS.len() }>);

impl event::EventRow for Texts {
    type Error = Infallible;

    fn text(&mut self) -> Result<Option<String>, Infallible> {
        Ok(self.0.next().flatten())
    }

    fn number(&mut self) -> Result<Option<i64>, Infallible> {
        Ok(None)
    }
}
