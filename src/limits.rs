//! Limits that sessions and workers share. All files may import it; it imports only `error`.

use crate::error::{UserError, too_large};
use outbox_core::event::EVENT_BYTES_MAX;

/// The largest event, and the largest body.
pub const BODY_MAX_BYTES: i64 = EVENT_BYTES_MAX as i64;
/// The longest time of a worker's statement.
pub const STATEMENT_TIMEOUT_MS: i32 = 30_000;

/// Refuses an event above the limit.
pub fn check_body(bytes: i64) -> Result<(), UserError> {
    match bytes > BODY_MAX_BYTES {
        false => Ok(()),
        true => Err(too_large(bytes as usize)),
    }
}

/// The most rows of a table with triggers that are read and stored at once: a statement may write more than fits into
/// memory.
pub const BATCH: usize = 500;
