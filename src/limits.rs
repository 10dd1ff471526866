//! Limits that sessions and workers share. All files may name this one; it names `pg` and `error` alone.

use crate::error::{UserError, too_large};
use crate::pg::text;

/// The largest body that is taken. RabbitMQ 4 refuses more than 16 MiB by default, older ones more than 128 MiB.
pub const BODY_MAX_BYTES: i64 = text::MAX_BYTES as i64;
/// No statement of a worker may take longer.
pub const STATEMENT_TIMEOUT_MS: i32 = 30_000;

/// Refuses an event that is larger than is taken.
pub fn check_body(bytes: i64) -> Result<(), UserError> {
    match bytes > BODY_MAX_BYTES {
        false => Ok(()),
        true => Err(too_large(bytes)),
    }
}
