//! How many messages of a destination a pass may take, and how many may go to the publisher now: window, rate limit,
//! and the standbys that must have a commit. `destination` calls it on the worker's thread.

use outbox_core::budget::Allowance;
use outbox_core::rate_limit::RateLimit;
use outbox_core::standbys::WalPosition;

/// The most rows of a claim in the server while other destinations wait for it: about 2 ms.
const BATCH_BESIDE_OTHERS: u32 = 100;

pub struct AdmissionControl {
    pub rate_limit: RateLimit,
    /// The messages that this pass may still take; None = no messages.
    pub allowance: Option<Allowance>,
    /// Since when the memory of the worker is taken by other messages and this destination cannot claim, in ms.
    pub lacks_memory_since_ms: Option<u64>,
    /// The position in WAL that the standbys must have before ready messages are handed over; None = unknown, because
    /// messages came since it was read. None come while others are ready, so one position is enough for all.
    pub needs_wal: Option<WalPosition>,
}

impl AdmissionControl {
    pub fn new(now_us: u64) -> Self {
        Self {
            rate_limit: RateLimit::new(0, 1, now_us),
            allowance: None,
            lacks_memory_since_ms: None,
            needs_wal: None,
        }
    }

    /// Takes whether the destination lacks memory for a claim now.
    pub fn lacks_memory(&mut self, lacks: bool, now_ms: u64) {
        self.lacks_memory_since_ms = lacks.then(|| self.lacks_memory_since_ms.unwrap_or(now_ms));
    }

    /// The most rows of one claim. No more than the rate limit lets go within a second: in the table they can still
    /// expire or be paused. And few if other destinations wait for the claim.
    pub fn batch(&self, batch_size: u32, others_wait: bool) -> u32 {
        let bearable = if others_wait { BATCH_BESIDE_OTHERS } else { u32::MAX };
        let per_second = self.rate_limit.per_second().unwrap_or(u32::MAX);
        batch_size.min(per_second.min(bearable))
    }
}
