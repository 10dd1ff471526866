//! What a pass did, and how things stood at its end.

/// What a pass did, or all passes since a session asked for something.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Report {
    pub claimed: u64,
    pub published: u64,
    pub failed: u64,
    pub duration_us: u64,
    pub backoff_ms: u32,
    pub renewed_heartbeat: bool,
    pub purged_stale: i64,
    pub active_workers: usize,
    /// Partitions that this worker should have.
    pub desired: usize,
    pub owned: usize,
    pub leased: usize,
    pub released: usize,
}

impl Report {
    /// Whether there is more to tell than that the worker lives.
    pub fn is_notable(&self) -> bool {
        self.claimed + self.published + self.failed > 0 || self.purged_stale > 0 || self.leased + self.released > 0
    }
}

/// A pass is over.
pub struct PassEnd {
    pub report: Report,
    /// All that may go now has gone, or nothing may; and nothing failed.
    pub is_at_rest: bool,
    /// Messages claimed and not settled.
    pub in_flight: usize,
    /// Answers of the brokers are to come, or something is to be settled.
    pub awaits: bool,
}
