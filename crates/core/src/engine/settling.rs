//! Writes outcomes: when, and how many at once. The worker calls it on its main thread.

use super::Engine;
use super::ports::Store;
use super::rows::Settlement;
use crate::settle::Disposition;

/// Published messages wait this long to be settled together, in ms, unless there are many: each settle waits for the
/// disk, and messages committed meanwhile wait with it.
pub(super) const SETTLE_AFTER_MS: u64 = 25;
const SETTLE_AT: usize = 500;

/// How many outcomes one transaction settles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Portion {
    /// As many rows as a transaction takes.
    Full,
    /// At most as many failures as other destinations can wait for.
    BesideOthers,
}

impl<P: Clone> Engine<P> {
    /// Whether an outcome must be settled before the next claim: a released message would be overtaken by later ones of
    /// its key.
    pub fn must_settle(&self) -> bool {
        self.unsettled.len() >= SETTLE_AT
            || (!self.unsettled.is_empty() && !self.leaving.is_empty())
            || self.settles_more_than_published()
    }

    /// Whether an unsettled outcome decides which other messages may be sent.
    pub(super) fn settles_more_than_published(&self) -> bool {
        (self.unsettled.iter())
            .any(|settled| settled.disposition != Disposition::Publish || settled.pointer.crashes > 0)
    }

    /// The time in ms until an outcome must be settled; None if there is none.
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

    /// Writes in one transaction the outcomes that came first, as many as `portion` allows, and passes them to
    /// `settled`. Returns whether more are left.
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
