//! The tables as crates/worker calls them: each call is a separate transaction. Runs on the main thread of a worker.

use super::context::WorkerContext;
use super::transaction::{LAST_TRANSACTION_MS, in_transaction, in_transaction_within};
use crate::limits::STATEMENT_TIMEOUT_MS;
use crate::pg::clock::now_us;
use crate::pg::spi::SpiResult;
use crate::pg::txn::{self, Durability, TransactionFailure};
use crate::worker::store::SpiDb;
use outbox_core::engine::{Batch, ClaimLimits, DueMessages, HeldLease, Lane, Settlement, StatementTimeout, Tables};
use outbox_core::key_order::{BlockedKey, OrderedKey};
use outbox_core::partition::Partition;
use outbox_core::settle::Blocks;
use outbox_worker::protocol::{ClaimedBatch, WorkerProtocol};

impl WorkerContext {
    /// Runs a claim in a transaction. Records the WAL position of what it read.
    fn run_claim<T>(
        &self,
        timeout: StatementTimeout,
        claim: impl FnOnce(&WorkerProtocol<SpiDb>) -> SpiResult<(ClaimedBatch, T)>,
    ) -> Result<(Batch, T), TransactionFailure> {
        let (claimed, more) = in_transaction(c"outbox: claim", Durability::Relaxed, || {
            if timeout == StatementTimeout::Short {
                txn::set_locally(c"lock_timeout", c"20ms");
            }
            claim(&self.store.protocol)
        })?;
        self.wal_position.set(self.wal_position.get().max(claimed.wal_position));
        Ok((claimed.batch, more))
    }
}

impl Tables for WorkerContext {
    type Error = TransactionFailure;

    fn settle(
        &self,
        _: &str,
        batch: &[Settlement],
        dead_blocks: Blocks,
        timeout: StatementTimeout,
    ) -> Result<usize, TransactionFailure> {
        let timeout_ms = match timeout {
            StatementTimeout::Usual => STATEMENT_TIMEOUT_MS,
            StatementTimeout::Short => LAST_TRANSACTION_MS,
        };
        in_transaction_within(c"outbox: settle", timeout_ms, Durability::Full, || {
            self.store.protocol.settle(batch, dead_blocks, None)
        })
    }

    fn claim(
        &self,
        destination: &str,
        lanes: &[Lane],
        limits: ClaimLimits,
        timeout: StatementTimeout,
    ) -> Result<Batch, TransactionFailure> {
        self.run_claim(timeout, |protocol| {
            Ok((protocol.claim(destination, lanes, limits)?, ()))
        })
        .map(|(batch, ())| batch)
    }

    fn claim_unleased(&self, destination: &str, limits: ClaimLimits) -> Result<Batch, TransactionFailure> {
        let (token, ttl_s) = (self.row_token, self.settings.borrow().claim_ttl_s);
        self.run_claim(StatementTimeout::Usual, |protocol| {
            Ok((protocol.claim_unleased(destination, token, ttl_s, limits)?, ()))
        })
        .map(|(batch, ())| batch)
    }

    fn claim_waiting(
        &self,
        key: &OrderedKey,
        epoch: i64,
        read_limit: i64,
        limits: ClaimLimits,
    ) -> Result<(Batch, bool), TransactionFailure> {
        let claim = |protocol: &WorkerProtocol<SpiDb>| protocol.claim_waiting(key, epoch, read_limit, limits);
        self.run_claim(StatementTimeout::Usual, claim)
    }

    fn bring_due(&self, leases: Option<&[HeldLease]>) -> Result<DueMessages, TransactionFailure> {
        let due = in_transaction(c"outbox: bring back due messages", Durability::Relaxed, || {
            self.store.protocol.bring_due(leases)
        })?;
        if let Some(database) = self.database {
            database.set_next_due_us(due.next_ms.map(|ms| now_us() + ms as i64 * 1000));
        }
        Ok(due)
    }

    fn blocked_keys(&self, destination: &str, partitions: &[Partition]) -> Result<Vec<BlockedKey>, TransactionFailure> {
        in_transaction(c"outbox: read blocked keys", Durability::Relaxed, || {
            self.store.protocol.blocked_keys(destination, partitions)
        })
    }

    fn destinations_with_messages(&self) -> Result<Vec<String>, TransactionFailure> {
        in_transaction(c"outbox: read destinations", Durability::Relaxed, || {
            self.store.protocol.destinations_with_messages()
        })
    }

    fn lanes_with_messages(&self, lanes: &[(&str, Partition, i64)]) -> Result<Vec<usize>, TransactionFailure> {
        in_transaction(c"outbox: look for messages", Durability::Relaxed, || {
            self.store.protocol.lanes_with_messages(lanes)
        })
    }

    /// A commit with synchronous_commit off is visible before it is on disk.
    fn make_durable(&self) {
        txn::flush_wal(self.wal_position.take());
    }

    fn is_locked(failure: &TransactionFailure) -> bool {
        failure.locked
    }
}
