//! How much an engine does at once.

use super::batch::CLAIM_BYTES_MAX;

/// How much at once.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// Messages of a destination that are in hand, or claimed and not settled, at most: one batch on the wire while the next is
    /// claimed.
    pub window: usize,
    /// Rows of one settle, at most.
    pub settle_rows: usize,
    /// Of these not published, at most, while other destinations wait: such a row costs ten times as much.
    pub settle_failures: usize,
    /// Messages kept in memory for an earlier one of their key, at most; more go to `outbox_waiting`. They count as
    /// outstanding, so a worker's window must be larger by a quarter at least, or nothing is claimed any more.
    pub parked: usize,
    /// Keys that are fetched from `outbox_waiting` in one pass, and rows of each, at most.
    pub drains: usize,
    pub drain_rows: u32,
    /// Bodies that are with the publisher, at most, when more is claimed, and bodies that are parked.
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
