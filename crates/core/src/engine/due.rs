//! When due messages are brought back from `outbox_waiting` to `outbox`: once in a pass, for all destinations of a
//! worker, before it claims. Called by the worker's main thread.

use super::ports::Tables;
use super::rows::HeldLease;
use crate::partition::Partition;

/// The longest interval, in ms, between two reads of `outbox_waiting` for due messages.
pub(super) const DUE_EVERY_MS: u64 = 1_000;

/// When a row of `outbox_waiting` may be due.
#[derive(Debug, Default)]
pub struct DueSchedule {
    at_ms: u64,
    /// The counter of shared memory as of the last read. It grows when a message is scheduled, or changed by hand: it may
    /// be due before the next read.
    schedules: u32,
    /// Whether a read was made since the last request of a session began.
    read_for_request: bool,
}

impl DueSchedule {
    /// Messages that are due by now belong to the request of a session that begins.
    pub fn begin_request(&mut self) {
        self.at_ms = 0;
        self.read_for_request = false;
    }

    /// A message may be due at this time, in ms.
    pub fn note(&mut self, at_ms: u64) {
        self.at_ms = self.at_ms.min(at_ms);
    }

    /// The time until the next read, in ms, at least 1.
    pub fn in_ms(&self, now_ms: u64) -> u64 {
        self.at_ms.saturating_sub(now_ms).max(1)
    }

    /// Moves due messages of `leases` back to `outbox`, if some may be due, and calls `rewind` with the destination,
    /// partition and seq of each; None = of all partitions.
    ///
    /// With a read limit (`has_read_limit`) it does so once for each request: a message that fails during the request
    /// must not be tried again under the same request.
    pub fn bring_due<T: Tables>(
        &mut self,
        tables: &T,
        leases: Option<&[HeldLease]>,
        schedules: u32,
        now_ms: u64,
        has_read_limit: bool,
        mut rewind: impl FnMut(&str, Partition, i64),
    ) -> Result<(), T::Error> {
        let is_due = now_ms >= self.at_ms || schedules != self.schedules;
        if !is_due || (has_read_limit && self.read_for_request) {
            return Ok(());
        }
        let due = tables.bring_due(leases)?;
        self.read_for_request = true;
        // A message that is due and was not brought back belongs to another worker.
        let next_ms = due.next_ms.filter(|ms| *ms > 0 || !due.moved.is_empty());
        for (destination, partition, seq) in due.moved {
            rewind(&destination, partition, seq);
        }
        self.at_ms = now_ms + next_ms.unwrap_or(DUE_EVERY_MS).clamp(1, DUE_EVERY_MS);
        self.schedules = schedules;
        Ok(())
    }
}
