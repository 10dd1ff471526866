//! Back-pressure: refuses messages that would exceed `max_pending` of a destination, before anything is written. Every
//! function that enqueues for an application calls it. Messages that a person brings back (retry, replay) were counted
//! before. Runs in a user's backend.

use crate::error::UserError;
use crate::session::effects;
use crate::shared::statistics;
use pgrx::PgSqlErrorCode;

/// Checks whether `more` messages fit, as far as this transaction sees: concurrent transactions do not count each
/// other's messages.
pub fn check_room(destination: &str, more: usize) -> Result<(), UserError> {
    let number = statistics::number_of(destination);
    let Some((pending, max_pending)) = statistics::fill_of(number) else {
        return Ok(());
    };
    let (own, more) = (effects::own_pending(number), more as i64);
    if pending + own + more <= max_pending || more == 0 {
        return Ok(());
    }
    let hint = match own + more > max_pending {
        true => "This transaction alone is larger than the limit: commit in smaller pieces, or raise max_pending.",
        false => {
            "Try again when some of them are delivered; see outbox_destination_status and outbox_health. Or raise max_pending."
        }
    };
    Err(UserError {
        detail: Some(format!(
            "{pending} messages are pending. This transaction has enqueued {own} and would add {more}. max_pending is {max_pending}."
        )),
        ..UserError::new(
            PgSqlErrorCode::ERRCODE_CONFIGURATION_LIMIT_EXCEEDED,
            format!("destination \"{destination}\" is full"),
            hint,
        )
    })
}
