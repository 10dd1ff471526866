//! Which messages may go by the fast path. A message must meet all of this, and goes by the table alone otherwise:
//!
//! | condition | asked |
//! |---|---|
//! | outbox.express is on, and there is shared memory | here, by the statement that enqueues |
//! | it is to go at once, and never expires | by the statement that enqueues |
//! | its transaction has few others | here |
//! | its event lies in outbox_events, is small and can be read | here and in `parcel` |
//! | the COMMIT waits until it is on disk | in `commit` |
//! | its rows are still as they were written | in `commit` |
//! | its lane has a worker in this server, and there is a place | in `slot` |
//!
//! In a user's backend.

use super::{BYTES, slot};
use crate::config;

/// Messages of one transaction; of more a claim takes all together.
const MESSAGES_MAX: usize = 8;

/// Whether messages may go this way at all.
pub fn is_on() -> bool {
    config::express() && slot::is_there()
}

/// Whether a transaction that has so many may add more.
pub fn is_room(before: usize, more: usize) -> bool {
    more > 0 && before + more <= MESSAGES_MAX
}

/// Whether an event with a body of so many bytes may fit: only then it is copied.
pub fn may_fit(body_bytes: usize) -> bool {
    body_bytes < BYTES
}
