//! The tables as crates/worker calls them, through the session. Each call is one statement, and so one transaction.
//! Runs on the worker's thread.

use super::context::WorkContext;
use super::error::{WorkError, WorkErrorKind};
use outbox_core::engine::{Batch, ClaimLimits, DueMessages, HeldLease, Lane, Settlement, StatementTimeout, Tables};
use outbox_core::key_order::{BlockedKey, OrderedKey};
use outbox_core::partition::Partition;
use outbox_core::settle::Blocks;

impl Tables for WorkContext {
    type Error = WorkError;

    fn settle(
        &self,
        destination: &str,
        batch: &[Settlement],
        dead_blocks: Blocks,
        _: StatementTimeout,
    ) -> Result<usize, WorkError> {
        let mut delivery_us = self.delivery_us.borrow_mut();
        let its = delivery_us.get(destination).map_or(&[][..], Vec::as_slice);
        let changed = self.session.protocol.settle(batch, dead_blocks, Some(its))?;
        delivery_us.remove(destination);
        Ok(changed)
    }

    /// A claim with the usual timeout also reads shared memory after the claim, in the same round trip.
    fn claim(
        &self,
        destination: &str,
        lanes: &[Lane],
        limits: ClaimLimits,
        timeout: StatementTimeout,
    ) -> Result<Batch, WorkError> {
        // Shared memory that was read earlier is older than this claim.
        self.shared_state.replace(None);
        if timeout == StatementTimeout::Short {
            return self.session.claim_impatiently(destination, lanes, limits);
        }
        let (batch, shared_state) =
            (self.session).claim_and_read_shared(destination, lanes, limits, &self.partitions.borrow())?;
        self.shared_state.replace(Some(shared_state));
        Ok(batch)
    }

    fn claim_unleased(&self, destination: &str, limits: ClaimLimits) -> Result<Batch, WorkError> {
        let (token, ttl_s) = (self.session.row_token, self.session.claim_ttl_s.get());
        let claimed = (self.session.protocol).claim_unleased(destination, token, ttl_s, limits)?;
        Ok(claimed.batch)
    }

    fn claim_waiting(
        &self,
        key: &OrderedKey,
        epoch: i64,
        read_limit: i64,
        limits: ClaimLimits,
    ) -> Result<(Batch, bool), WorkError> {
        let (claimed, more) = self.session.protocol.claim_waiting(key, epoch, read_limit, limits)?;
        Ok((claimed.batch, more))
    }

    fn bring_due(&self, leases: Option<&[HeldLease]>) -> Result<DueMessages, WorkError> {
        self.session.protocol.bring_due(leases)
    }

    fn blocked_keys(&self, destination: &str, partitions: &[Partition]) -> Result<Vec<BlockedKey>, WorkError> {
        self.session.protocol.blocked_keys(destination, partitions)
    }

    fn destinations_with_messages(&self) -> Result<Vec<String>, WorkError> {
        self.session.protocol.destinations_with_messages()
    }

    fn lanes_with_messages(&self, lanes: &[(&str, Partition, i64)]) -> Result<Vec<usize>, WorkError> {
        self.session.protocol.lanes_with_messages(lanes)
    }

    fn is_locked(error: &WorkError) -> bool {
        error.kind == WorkErrorKind::Locked
    }
}
