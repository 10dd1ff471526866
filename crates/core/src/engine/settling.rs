//! Writes what ended: when, and how much at once. Called by the worker's main thread.

use super::Engine;
use super::ports::Store;
use super::rows::Settlement;
use crate::settle::Disposition;

/// Published messages wait so long to be settled together, in ms, unless there are many: each settle waits for the disk,
/// and what is committed meanwhile waits with it.
pub(super) const SETTLE_AFTER_MS: u64 = 25;
const SETTLE_AT: usize = 500;

/// How much one transaction settles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Portion {
    /// As many rows as a transaction takes.
    Full,
    /// Of these no more failures than other destinations can wait for.
    BesideOthers,
}

impl<P: Clone> Engine<P> {
    /// Whether something must be settled before the next claim: a message that goes back would be overtaken by later
    /// ones of its key.
    pub fn must_settle(&self) -> bool {
        self.unsettled.len() >= SETTLE_AT
            || (!self.unsettled.is_empty() && !self.leaving.is_empty())
            || self.settles_more_than_published()
    }

    /// Whether something is unsettled that decides what else may go.
    pub(super) fn settles_more_than_published(&self) -> bool {
        (self.unsettled.iter())
            .any(|settled| settled.disposition != Disposition::Publish || settled.pointer.crashes > 0)
    }

    /// In how many ms something is to be settled; None if there is nothing.
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

    /// Writes in one transaction what ended first, as much as `portion` allows, and tells `settled` of it. Returns whether more
    /// is left.
    pub fn settle_batch<S: Store<RowId = P>>(
        &mut self,
        store: &mut S,
        now_ms: u64,
        portion: Portion,
        settled: impl FnOnce(&[Settlement<P>]),
    ) -> Result<bool, S::Error> {
        let failures_max = match portion {
            Portion::Full => usize::MAX,
            Portion::BesideOthers => self.bounds.settle_failures,
        };
        let mut failures = 0;
        let fits = |settlement: &&Settlement<P>| {
            failures += usize::from(settlement.disposition != Disposition::Publish);
            failures <= failures_max
        };
        let first = self.unsettled.iter().take(self.bounds.settle_rows);
        let rows = first.take_while(fits).count();
        if rows > 0 {
            self.settle_first(rows, store, now_ms, settled)?;
        }
        Ok(!self.unsettled.is_empty())
    }

    fn settle_first<S: Store<RowId = P>>(
        &mut self,
        rows: usize,
        store: &mut S,
        now_ms: u64,
        settled: impl FnOnce(&[Settlement<P>]),
    ) -> Result<(), S::Error> {
        store.settle(&self.unsettled[..rows])?;
        for settlement in &self.unsettled[..rows] {
            match settlement.disposition {
                Disposition::Release { .. } => self.cursors.lower(settlement.pointer.partition, settlement.pointer.seq),
                Disposition::Retry { delay_ms, .. } => self.due_at_ms = self.due_at_ms.min(now_ms + delay_ms),
                _ => {}
            }
            self.fast_in_flight
                .end(settlement.pointer.partition, settlement.pointer.seq);
        }
        settled(&self.unsettled[..rows]);
        self.unsettled.drain(..rows);
        Ok(())
    }
}
