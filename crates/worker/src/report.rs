//! The report of a pass: what it did, and the state at its end. `worker` fills it in; the runtime reads it.

/// What one pass did, or all passes for one request.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PassCounts {
    pub claimed: u64,
    pub published: u64,
    pub failed: u64,
    pub duration_us: u64,
    /// How long the worker waits after the pass, in ms.
    pub backoff_ms: u32,
    pub renewed_heartbeat: bool,
    /// The number of dead workers that it removed.
    pub purged_stale: i64,
    pub active_workers: usize,
    /// The number of partitions that this worker should own.
    pub desired: usize,
    pub owned: usize,
    /// The numbers of leases that it took and released.
    pub leased: usize,
    pub released: usize,
}

impl PassCounts {
    /// Whether the pass did more than write the heartbeat.
    pub fn is_notable(&self) -> bool {
        self.claimed + self.published + self.failed > 0 || self.purged_stale > 0 || self.leased + self.released > 0
    }
}

/// The end of a pass, as the runtime gets it.
pub struct PassEnd {
    pub report: PassCounts,
    /// Whether all deliverable messages are delivered, or none may be, and no step failed.
    pub is_at_rest: bool,
    /// Messages claimed and not settled.
    pub in_flight: usize,
    /// Whether messages are with the brokers, or something is to be settled.
    pub awaits: bool,
}
