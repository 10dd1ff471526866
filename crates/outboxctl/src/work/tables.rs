//! The tables as crates/worker calls them, through the session. Each call is one statement, and so one transaction.
//! Runs on the worker's thread.

use super::context::WorkContext;
use super::session::{WorkError, WorkErrorKind};
use outbox_core::engine::{Batch, DueMessages, Held, Lane, Settlement, StatementTimeout, Tables};
use outbox_core::key_order::{Found, OrderedKey};
use outbox_core::partition::Partition;
use outbox_core::settle::{Blocks, Disposition};

impl WorkContext {
    /// The times from enqueue to confirm of the published messages, in µs.
    fn took_us(&self, destination: &str, batch: &[Settlement]) -> Vec<i64> {
        let confirmed_us = self.confirmed_us.borrow();
        let Some(confirmed_us) = confirmed_us.get(destination) else {
            return Vec::new();
        };
        let took = |ended: &Settlement| {
            let at_us = confirmed_us.get(&ended.pointer.seq)?;
            Some((at_us - ended.pointer.enqueued_at_us).max(0))
        };
        let published = batch.iter().filter(|ended| ended.disposition == Disposition::Publish);
        published.filter_map(took).collect()
    }
}

impl Tables for WorkContext {
    type Error = WorkError;

    fn settle(
        &self,
        destination: &str,
        batch: &[Settlement],
        dead_blocks: Blocks,
        _: StatementTimeout,
    ) -> Result<usize, WorkError> {
        self.session
            .settle(destination, batch, dead_blocks, &self.took_us(destination, batch))
    }

    /// A claim with the usual timeout also reads shared memory after the claim, in the same round trip.
    fn claim(&self, destination: &str, lanes: &[Lane], timeout: StatementTimeout) -> Result<Batch, WorkError> {
        // Shared memory that was read earlier is older than this claim.
        self.shared_state.replace(None);
        if timeout == StatementTimeout::Short {
            return self.session.claim_impatiently(destination, lanes);
        }
        let both = (self.session).claim_and_read_shared(destination, lanes, &self.partitions.borrow())?;
        let batch = both.claimed?;
        self.shared_state.replace(Some(both.shared_state));
        Ok(batch)
    }

    fn claim_unleased(&self, destination: &str, limit: u32) -> Result<Batch, WorkError> {
        self.session.claim_unleased(destination, limit)
    }

    fn claim_waiting(
        &self,
        key: &OrderedKey,
        epoch: i64,
        read_limit: i64,
        limit: u32,
    ) -> Result<(Batch, bool), WorkError> {
        self.session.claim_waiting(key, epoch, read_limit, limit)
    }

    fn bring_due(&self, leases: Option<&[Held]>) -> Result<DueMessages, WorkError> {
        let next_ms = self.session.next_due_ms()?;
        if next_ms != Some(0) {
            return Ok(DueMessages {
                moved: Vec::new(),
                next_ms,
            });
        }
        Ok(DueMessages {
            moved: self.session.bring_due(leases)?,
            next_ms: self.session.next_due_ms()?,
        })
    }

    fn blocked_keys(&self, partitions: &[Partition]) -> Result<Vec<Found>, WorkError> {
        self.session.blocked_keys(partitions)
    }

    fn is_locked(error: &WorkError) -> bool {
        error.kind == WorkErrorKind::Locked
    }
}
