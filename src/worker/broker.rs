//! Until when this worker may publish, whichever destination: its publisher threads ask before each message.

use outbox_transport::Deadline;
use std::sync::LazyLock;

/// No longer than its leases last.
pub static DEADLINE: LazyLock<Deadline> = LazyLock::new(Deadline::default);
