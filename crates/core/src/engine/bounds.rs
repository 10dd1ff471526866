//! The limits of an engine: how many messages and bytes it has in flight, and how much it does in one statement.

/// The limits of an engine.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// The most messages of a destination that are in flight: one batch is with the broker while the next is claimed.
    pub window: usize,
    /// The most rows in one settle.
    pub settle_rows: usize,
    /// The most rows in one settle that are not published, while other destinations wait. Such a row costs ten times as
    /// much as a published one.
    pub settle_failures: usize,
    /// The most parked messages, and the most that yield to others; further ones go to `outbox_waiting`. Both count as in
    /// flight, so the window must be larger than both by at least a quarter. Otherwise a worker with these numbers
    /// claims nothing.
    pub parked: usize,
    /// The most messages of a key, if they are sent one by one; an eighth of it if half of the window is full.
    pub of_a_key: usize,
    /// The most keys whose messages one claim fetches from `outbox_waiting`.
    pub drains: usize,
    /// The most rows that one claim fetches from `outbox_waiting` for each of these keys.
    pub drain_rows: u32,
    /// In bytes. The engine hands messages over, and claims, only while those with the publisher take less, and parks
    /// messages up to this size.
    pub bytes: usize,
    /// The most bytes that the messages of all destinations of a worker should take.
    pub memory: usize,
}

impl Bounds {
    pub const USUAL: Self = Self {
        window: 2000,
        settle_rows: 2000,
        settle_failures: 20,
        parked: 500,
        of_a_key: 64,
        drains: 8,
        drain_rows: 500,
        bytes: 8 << 20,
        memory: 32 << 20,
    };
}
