//! The limits of what an engine does at once.

use super::batch::CLAIM_BYTES_MAX;

/// The limits.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// The most messages of a destination that are in flight on the fast path, or claimed and not settled: one batch
    /// with the broker while the next is claimed.
    pub window: usize,
    /// The most rows of one settle.
    pub settle_rows: usize,
    /// The most of these that are not published, while other destinations wait: such a row costs ten times as much.
    pub settle_failures: usize,
    /// The most messages kept in memory behind an earlier one of their key; further ones go to `outbox_waiting`. They
    /// count as outstanding, so a worker's window must be larger by at least a quarter, or no message can be claimed.
    pub parked: usize,
    /// The most keys that are fetched from `outbox_waiting` in one pass, and the most rows of each.
    pub drains: usize,
    pub drain_rows: u32,
    /// The most bytes of bodies with the publisher at which the next claim may start, and of parked bodies.
    pub bytes: usize,
}

impl Bounds {
    pub const USUAL: Self = Self {
        window: 2000,
        settle_rows: 2000,
        settle_failures: 20,
        parked: 500,
        drains: 8,
        drain_rows: 500,
        bytes: CLAIM_BYTES_MAX,
    };
}
