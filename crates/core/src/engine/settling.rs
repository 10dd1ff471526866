//! Settles messages that have ended: when, and how many in one transaction. Called by the worker's main thread.

use super::Engine;
use super::due::DUE_EVERY_MS;
use super::ports::{StatementTimeout, Tables};
use super::rows::Settlement;
use crate::settle::{Disposition, Rules};

/// The longest time, in ms, that published messages wait to be settled together. Each settle waits for the disk, and
/// messages that are committed in the meantime wait with it.
pub(super) const SETTLE_AFTER_MS: u64 = 25;
/// With this number of unsettled messages the worker settles immediately.
const SETTLE_AT: usize = 500;

/// How many messages one transaction settles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Portion {
    /// Up to [`Bounds::settle_rows`](super::Bounds::settle_rows) rows.
    Full,
    /// The same number of rows, of which at most [`Bounds::settle_failures`](super::Bounds::settle_failures) are not
    /// published, because other destinations wait for the worker.
    BesideOthers,
}

impl Engine {
    /// Whether the worker must settle before the next claim. Otherwise later messages of its key would overtake a
    /// message that goes back.
    pub fn must_settle(&self) -> bool {
        self.unsettled.len() >= SETTLE_AT
            || (!self.unsettled.is_empty() && !self.leaving.is_empty())
            || self.settles_more_than_published()
    }

    /// Whether an unsettled message was not published, or is a poison candidate. Such a message decides which others
    /// may go.
    pub(super) fn settles_more_than_published(&self) -> bool {
        (self.unsettled.iter())
            .any(|settlement| settlement.disposition != Disposition::Publish || settlement.pointer.crashes > 0)
    }

    /// The time until the next settle is due, in ms; None if no message is unsettled.
    pub fn settle_in_ms(&self, now_ms: u64) -> Option<u64> {
        let due_ms = self.unsettled_since_ms + SETTLE_AFTER_MS;
        (!self.unsettled.is_empty()).then(|| {
            if self.must_settle() {
                0
            } else {
                due_ms.saturating_sub(now_ms)
            }
        })
    }

    /// Settles in one transaction the messages that ended first, as many as `portion` allows, and then calls `settled`
    /// with them and with the number of rows that changed. Returns whether unsettled messages are left.
    ///
    /// Never inlined, so that a profile shows what belongs to it.
    #[inline(never)]
    pub fn settle_batch<T: Tables>(
        &mut self,
        tables: &T,
        rules: &Rules,
        now_ms: u64,
        portion: Portion,
        timeout: StatementTimeout,
        settled: impl FnOnce(&[Settlement], usize),
    ) -> Result<bool, T::Error> {
        let failures_max = match portion {
            Portion::Full => usize::MAX,
            Portion::BesideOthers => self.bounds.settle_failures,
        };
        let mut failures = 0;
        let fits = |settlement: &&Settlement| {
            failures += usize::from(settlement.disposition != Disposition::Publish);
            failures <= failures_max
        };
        let first = self.unsettled.iter().take(self.bounds.settle_rows);
        let rows = first.take_while(fits).count();
        if rows == 0 {
            return Ok(false);
        }
        let batch = &self.unsettled[..rows];
        let changed = tables.settle(&self.destination, batch, self.dead_blocks(rules), timeout)?;
        for settlement in &self.unsettled[..rows] {
            match settlement.disposition {
                Disposition::Release { .. } => self.cursors.lower(settlement.pointer.partition, settlement.pointer.seq),
                Disposition::Retry { delay_ms, .. } => self.retry_at_ms = self.retry_at_ms.min(now_ms + delay_ms),
                Disposition::Defer { delay_ms, .. } => {
                    self.retry_at_ms = self.retry_at_ms.min(now_ms + delay_ms);
                    self.put_off_until_ms = self.put_off_until_ms.max(now_ms + delay_ms + 2 * DUE_EVERY_MS);
                }
                _ => {}
            }
            self.fast_in_flight
                .end(settlement.pointer.partition, settlement.pointer.seq);
        }
        settled(&self.unsettled[..rows], changed);
        self.unsettled.drain(..rows);
        Ok(!self.unsettled.is_empty())
    }

    /// When the first of the messages is due that were settled since the last call and are to be retried, in ms; MAX =
    /// there is none.
    pub fn take_retry_at_ms(&mut self) -> u64 {
        std::mem::replace(&mut self.retry_at_ms, u64::MAX)
    }
}
