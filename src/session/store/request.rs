//! The arguments of `enqueue` and `publish`. Runs in a user's backend.

use super::new_event::{NewEvent, Times};
use super::statements::Statements;
use crate::error::UserError;
use crate::pg::lookup::{self, Key};
use crate::shared::transactions::Announced;
use outbox_core::partition::Partition;
use pgrx::PgSqlErrorCode;

pub struct Enqueue<'a> {
    pub seqs: &'a [i64],
    /// Set for events that this transaction has just stored: their keys are announced, and no message of them can wait
    /// yet.
    pub announced: Option<Announced>,
    pub keys: Keys,
    pub destination: &'a str,
    pub times: Times,
    pub partition: Option<Partition>,
}

pub enum Keys {
    /// One for each seq.
    Given(Vec<Option<String>>),
    /// The aggregates of the events.
    LookedUp,
}

/// An event that outbox_publish was given, and its destination.
pub struct Publish<'a> {
    pub event: &'a NewEvent,
    pub key: Option<&'a str>,
    pub destination: &'a str,
}

/// Refuses an id of the caller that an event has.
pub(super) fn check_id(statements: &Statements, id: Option<pgrx::Uuid>) -> Result<(), UserError> {
    let Some(id) = id else { return Ok(()) };
    match lookup::find(statements.event_table, [c"id"], [Key::uuid(id)]) {
        None => Ok(()),
        Some(_) => Err(UserError::new(
            PgSqlErrorCode::ERRCODE_UNIQUE_VIOLATION,
            format!("an event with id {id} already exists"),
            "Leave the id out to get a new one. If this call is a repetition, its event is already stored and enqueued.",
        )),
    }
}

/// A new UUID of version 7, which sorts by time.
pub fn new_id() -> pgrx::Uuid {
    pgrx::Uuid::from_bytes(*uuid::Uuid::now_v7().as_bytes())
}
