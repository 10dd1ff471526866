//! Which messages may take the fast path. A message that misses one of these conditions goes through the table alone.
//! Run by a session, in the statement that enqueues.
//!
//! | condition | checked in |
//! |---|---|
//! | outbox.fast_path is on, and there is shared memory | `is_on` |
//! | the message is due now, and never expires | the statement |
//! | its transaction has few other messages | `is_room` |
//! | its event is in outbox_events, is small and can be read | `may_fit`, `handoff` |
//! | COMMIT waits until the transaction is on disk | `commit` |
//! | its rows are still as they were written | `commit` |
//! | its lane has a worker in this server, and a slot is free | `slot` |

use super::{BYTES, slot};
use crate::config;

/// The most messages of one transaction on the fast path. A claim takes more of them together at less cost.
const MESSAGES_MAX: usize = 8;

/// Whether any message may take the fast path.
pub fn is_on() -> bool {
    config::fast_path() && slot::is_there()
}

/// Whether a transaction with `before` fast-path messages may add `more`.
pub fn is_room(before: usize, more: usize) -> bool {
    more > 0 && before + more <= MESSAGES_MAX
}

/// Whether an event with a body of this size may fit into a slot. The event is copied only if it may.
pub fn may_fit(body_bytes: usize) -> bool {
    body_bytes < BYTES
}
