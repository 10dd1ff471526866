//! The arguments of `enqueue` and `publish`. Run by a user's backend.

use crate::error::UserError;
use crate::pg::args::Jsonb;
use crate::shared::transactions::Announced;
use outbox_core::partition::Partition;
use pgrx::PgSqlErrorCode;
use pgrx::datum::TimestampWithTimeZone;

pub struct Enqueue<'a> {
    pub seqs: &'a [i64],
    /// Set for events that this transaction has just stored: their keys are announced, and they cannot wait anywhere yet.
    pub announced: Option<Announced>,
    pub keys: Keys,
    pub destination: &'a str,
    pub times: Times,
    pub partition: Option<Partition>,
}

/// From when to when it may be sent.
#[derive(Clone, Copy, Default)]
pub struct Times {
    pub available_at: Option<TimestampWithTimeZone>,
    pub expires_at: Option<TimestampWithTimeZone>,
}

pub enum Keys {
    /// One for each seq.
    Given(Vec<Option<String>>),
    /// The aggregates of the events.
    LookedUp,
}

/// An event as outbox_publish takes it.
pub struct Publish<'a> {
    /// None: one is made.
    pub id: Option<pgrx::Uuid>,
    pub kind: &'a str,
    pub aggregate_type: Option<&'a str>,
    pub aggregate_id: Option<&'a str>,
    pub operation: Option<&'a str>,
    pub payload: Jsonb,
    pub previous_payload: Option<Jsonb>,
    pub metadata: Option<Jsonb>,
    pub headers: Option<Jsonb>,
    pub actor: Option<&'a str>,
    pub correlation_id: Option<&'a str>,
    pub key: Option<&'a str>,
    pub destination: &'a str,
    pub times: Times,
}

impl Publish<'_> {
    /// As they leave, in UTF-8. The column body_bytes counts them as the database has them.
    pub fn bytes(&self) -> usize {
        let others = [&self.previous_payload, &self.metadata, &self.headers];
        let others = others.into_iter().flatten().map(|json| json.to_text().len());
        self.payload.to_text().len() + others.sum::<usize>() + self.actor.map_or(0, str::len)
    }
}

pub(super) fn duplicate(id: Option<pgrx::Uuid>) -> UserError {
    let id = id.map(|id| id.to_string()).unwrap_or_default();
    UserError::new(
        PgSqlErrorCode::ERRCODE_UNIQUE_VIOLATION,
        format!("there is an event with id {id} already"),
        "Leave the id out to have one made. If this is a repeated call, its event is stored and enqueued already.",
    )
}

/// A new UUID of version 7, which sorts by time.
pub fn new_id() -> pgrx::Uuid {
    pgrx::Uuid::from_bytes(*uuid::Uuid::now_v7().as_bytes())
}
