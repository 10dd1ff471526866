//! Which messages may go by the fast path. A message that misses one of these conditions goes by the table alone. Run by a
//! session, in the statement that enqueues.
//!
//! | condition | checked in |
//! |---|---|
//! | outbox.fast_path is on, and there is shared memory | `is_on` |
//! | the message goes at once, and never expires | the statement |
//! | its transaction has few other messages | `is_room` |
//! | its event lies in outbox_events, is small and can be read | `may_fit`, `parcel` |
//! | COMMIT waits until it is on disk | `commit` |
//! | its rows are still as they were written | `commit` |
//! | its lane has a worker in this server, and there is a free place | `slot` |

use super::{BYTES, slot};
use crate::config;

/// Messages of one transaction. A claim takes more of them together at less cost.
const MESSAGES_MAX: usize = 8;

/// Whether any message may go this way.
pub fn is_on() -> bool {
    config::fast_path() && slot::is_there()
}

/// Whether a transaction with `before` such messages may add `more`.
pub fn is_room(before: usize, more: usize) -> bool {
    more > 0 && before + more <= MESSAGES_MAX
}

/// Whether an event with a body of this size may fit. Only then it is copied.
pub fn may_fit(body_bytes: usize) -> bool {
    body_bytes < BYTES
}
