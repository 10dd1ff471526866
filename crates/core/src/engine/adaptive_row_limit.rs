//! The number of rows that the next claim asks for, from the result of the last one. Called by the worker's main thread
//! around each claim.
//!
//! A claim stops at a number of bytes, or when the function or source that makes its events has used up its time. Rows
//! that it read beyond that were read in vain, and some were even claimed and given back. With large messages that
//! would be most of the rows of each claim. So after a claim that was cut the next one asks for as many rows as that
//! one returned. The number grows again while messages are small.

use super::batch::{Batch, CLAIM_BYTES_MAX};
use super::rows::ClaimLimits;

/// The limit on rows of the next claim.
pub(super) struct AdaptiveRowLimit {
    /// For a claim of up to [`CLAIM_BYTES_MAX`].
    rows: u32,
}

impl Default for AdaptiveRowLimit {
    fn default() -> Self {
        Self { rows: u32::MAX }
    }
}

impl AdaptiveRowLimit {
    /// The number of rows to ask for: `limits.rows`, or less if a claim was cut.
    pub fn of(&self, limits: ClaimLimits) -> u32 {
        let rows = u64::from(self.rows) * limits.bytes as u64 / CLAIM_BYTES_MAX as u64;
        let rows = if self.rows == u32::MAX { u64::MAX } else { rows.max(1) };
        u32::try_from(rows).unwrap_or(u32::MAX).min(limits.rows)
    }

    /// Takes the result of a claim with these limits: shrinks to its rows if it was cut below them, and grows by half if
    /// its bodies were small.
    pub fn record(&mut self, batch: &Batch, asked: ClaimLimits) {
        let rows = batch.rows.len() as u64;
        if batch.cut && rows < u64::from(asked.rows) {
            let rows = rows.max(1) * CLAIM_BYTES_MAX as u64 / asked.bytes.max(1) as u64;
            self.rows = u32::try_from(rows).map_or(u32::MAX - 1, |rows| rows.clamp(1, u32::MAX - 1));
        } else if batch.body_bytes() < asked.bytes / 2 {
            self.rows = self.rows.saturating_add(self.rows / 2 + 1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::{Claimed, RowId};
    use crate::message::{Event, Outcome, Pointer};
    use crate::partition::Partition;

    fn batch(rows: usize, bytes_each: usize, cut: bool) -> Batch {
        let row = |seq| Claimed {
            row_id: RowId::default(),
            pointer: Pointer {
                seq,
                destination: "".into(),
                partition: Partition::new(0).unwrap(),
                key: None,
                attempts: 0,
                crashes: 0,
                lease_epoch: 1,
                replayed: false,
                enqueued_at_us: 0,
                expires_at_us: None,
            },
            event: Ok::<_, Outcome>(Event {
                payload: "x".repeat(bytes_each),
                ..Event::default()
            }),
        };
        Batch {
            rows: (0..rows as i64).map(row).collect(),
            cut,
            ..Batch::default()
        }
    }

    #[test]
    fn a_claim_asks_for_as_many_rows_as_the_last_cut_claim_and_more_while_messages_are_small() {
        const ASKED: ClaimLimits = ClaimLimits {
            rows: 1000,
            bytes: CLAIM_BYTES_MAX,
        };
        let mut limit = AdaptiveRowLimit::default();
        assert_eq!(limit.of(ASKED), 1000);
        limit.record(&batch(8, 4 << 20, true), ASKED);
        assert_eq!(limit.of(ASKED), 8);
        limit.record(&batch(8, 4 << 20, false), ASKED);
        assert_eq!(limit.of(ASKED), 8, "a ninth row would not have fitted");
        for more in [13, 20, 31] {
            limit.record(&batch(3, 10, false), ASKED);
            assert_eq!(limit.of(ASKED), more);
        }
        limit.record(&batch(0, 0, true), ASKED);
        assert_eq!(limit.of(ASKED), 1);
    }

    #[test]
    fn a_claim_that_was_cut_early_because_memory_was_short_makes_no_later_one_small() {
        let asked = |bytes| ClaimLimits { rows: 1000, bytes };
        let mut limit = AdaptiveRowLimit::default();
        limit.record(&batch(16, 4_096, true), asked(65_536));
        assert_eq!(limit.of(asked(65_536)), 16);
        assert_eq!(limit.of(asked(CLAIM_BYTES_MAX)), 1000);
    }
}
