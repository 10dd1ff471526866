//! Back-pressure: refuses what a destination has no room for, before anything of it is written. Called by everything that
//! enqueues on behalf of an application; what a person brings back (retry, replay) was let in before. In a user's backend.

use crate::error::UserError;
use crate::session::effects;
use crate::shared::statistics;
use pgrx::PgSqlErrorCode;

/// Whether `more` messages may be added to those of a destination that wait, as far as this transaction sees: transactions
/// that are open at the same time do not count each other's.
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
            "{pending} messages wait, this transaction has enqueued {own} and now {more} more; max_pending is {max_pending}."
        )),
        ..UserError::new(
            PgSqlErrorCode::ERRCODE_CONFIGURATION_LIMIT_EXCEEDED,
            format!("destination \"{destination}\" has no room for more messages"),
            hint,
        )
    })
}
