//! Limits that sessions and workers share. All files may import it; it imports only `pg` and `error`.

use crate::error::{UserError, too_large};
use crate::pg::text;

/// The largest body. RabbitMQ 4 refuses more than 16 MiB by default, older ones more than 128 MiB.
pub const BODY_MAX_BYTES: i64 = text::MAX_BYTES as i64;
/// The longest time of a worker's statement.
pub const STATEMENT_TIMEOUT_MS: i32 = 30_000;

/// Refuses an event above the limit.
pub fn check_body(bytes: i64) -> Result<(), UserError> {
    match bytes > BODY_MAX_BYTES {
        false => Ok(()),
        true => Err(too_large(bytes)),
    }
}
