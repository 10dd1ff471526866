//! The tables as crates/worker calls them: each call is a separate transaction. Runs on the main thread of a worker.

use super::context::WorkerContext;
use super::transaction::{LAST_TRANSACTION_MS, held_transaction, in_transaction};
use crate::limits::STATEMENT_TIMEOUT_MS;
use crate::pg::clock::now_us;
use crate::pg::txn::{self, Durability, Failure};
use crate::worker::store::{ClaimTarget, ClaimedBatch};
use outbox_core::engine::{Batch, DueMessages, Held, Lane, Settlement, StatementTimeout, Tables};
use outbox_core::key_order::{Found, OrderedKey};
use outbox_core::partition::Partition;
use outbox_core::settle::Blocks;

/// The most due messages that one transaction brings back.
const DUE_ROWS: i32 = 1000;

impl WorkerContext {
    /// Runs a claim of a destination, in a transaction. Records the WAL position of what it read.
    fn run_claim<T>(
        &self,
        destination: &str,
        timeout: StatementTimeout,
        claim: impl FnOnce(ClaimTarget) -> crate::pg::spi::SpiResult<(ClaimedBatch, T)>,
    ) -> Result<(Batch, T), Failure> {
        let body = self.with_destination(destination, |served| served.body.clone());
        let target = ClaimTarget {
            destination,
            body: body.as_ref(),
        };
        let (claimed, more) = in_transaction(c"outbox: claim", Durability::Relaxed, || {
            if timeout == StatementTimeout::Short {
                txn::set_locally(c"lock_timeout", c"20ms");
            }
            claim(target)
        })?;
        self.wal_position.set(self.wal_position.get().max(claimed.wal_position));
        Ok((claimed.batch, more))
    }
}

impl Tables for WorkerContext {
    type Error = Failure;

    fn settle(
        &self,
        _: &str,
        batch: &[Settlement],
        dead_blocks: Blocks,
        timeout: StatementTimeout,
    ) -> Result<usize, Failure> {
        let timeout_ms = match timeout {
            StatementTimeout::Usual => STATEMENT_TIMEOUT_MS,
            StatementTimeout::Short => LAST_TRANSACTION_MS,
        };
        held_transaction(c"outbox: settle", timeout_ms, Durability::Full, || {
            let changed = self.store.settle(batch, dead_blocks)?;
            if changed == batch.len() {
                return Ok(changed);
            }
            // Rows that moved (VACUUM FULL) are found again by key. Rows that are gone, or carry another token, are no
            // longer this worker's.
            Ok(changed + self.store.settle_by_key(batch, dead_blocks)?)
        })
    }

    fn claim(&self, destination: &str, lanes: &[Lane], timeout: StatementTimeout) -> Result<Batch, Failure> {
        let claim = |target: ClaimTarget| Ok((self.store.claim(target, lanes)?, ()));
        self.run_claim(destination, timeout, claim).map(|(batch, ())| batch)
    }

    fn claim_unleased(&self, destination: &str, limit: u32) -> Result<Batch, Failure> {
        let (token, ttl_s) = (self.row_token, self.settings.borrow().claim_ttl_s);
        let claim = |target: ClaimTarget| Ok((self.store.claim_unleased(target, token, ttl_s, limit)?, ()));
        (self.run_claim(destination, StatementTimeout::Usual, claim)).map(|(batch, ())| batch)
    }

    fn claim_waiting(
        &self,
        key: &OrderedKey,
        epoch: i64,
        read_limit: i64,
        limit: u32,
    ) -> Result<(Batch, bool), Failure> {
        self.run_claim(&key.destination, StatementTimeout::Usual, |target| {
            self.store.claim_waiting(target.body, key, epoch, read_limit, limit)
        })
    }

    fn bring_due(&self, leases: Option<&[Held]>) -> Result<DueMessages, Failure> {
        let due = in_transaction(c"outbox: bring back due messages", Durability::Relaxed, || {
            self.store.bring_due(leases, DUE_ROWS)
        })?;
        if let Some(database) = self.database {
            database.set_next_due_us(due.next_ms.map(|ms| now_us() + ms as i64 * 1000));
        }
        Ok(due)
    }

    fn blocked_keys(&self, partitions: &[Partition]) -> Result<Vec<Found>, Failure> {
        in_transaction(c"outbox: read blocked keys", Durability::Relaxed, || {
            self.store.blocked_keys(partitions)
        })
    }

    /// A commit with synchronous_commit off is visible before it is on disk.
    fn make_durable(&self) {
        txn::flush_wal(self.wal_position.take());
    }

    fn is_locked(failure: &Failure) -> bool {
        failure.locked
    }
}
