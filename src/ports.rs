//! What the engine of crates/core stands on here: the tables, each call a transaction of its own, and shared memory. Called
//! by the worker, on its main thread.

use crate::api::DEFAULT_DESTINATION;
use crate::pg::txn::{self, Durability, Failure};
use crate::pg::{catalog, signals};
use crate::store::{ClaimedBatch, Settlement, Store};
use crate::{registry, shmem};
use outbox_core::engine::{self, Batch, Due, Held, Lane, Memory};
use outbox_core::gate::{Found, OrderedKey};
use outbox_core::hold::OpenTransaction;
use outbox_core::partition::Partition;
use pgrx::spi::SpiResult;
use std::ffi::CStr;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// No statement of a worker may take longer.
pub const STATEMENT_TIMEOUT_MS: i32 = 30_000;
/// Due messages that one transaction brings back, at most.
const DUE_ROWS: i32 = 1000;

/// The tables.
pub struct Tables<'a> {
    pub store: &'a Store,
    pub timeout_ms: i32,
    /// Behind a dead letter its key waits.
    pub dead_blocks: bool,
    /// With leasing off: the token of this process' claims, negative, and how long one holds.
    pub row_token: i64,
    pub claim_ttl_s: i32,
    /// Rows of some lane were locked lately: each lane is claimed alone, and a locked one left out.
    pub lane_by_lane: bool,
    /// WAL must be on disk up to here before what was claimed goes out.
    pub wal_position: u64,
    /// Messages that were no longer ours to settle.
    pub missed: usize,
}

impl Tables<'_> {
    fn claim_lanes(&mut self, lanes: &[Lane]) -> Result<Batch<String>, Failure> {
        let (store, patient) = (self.store, !self.lane_by_lane);
        let claimed = in_transaction(c"outbox: claim", Durability::Relaxed, || {
            if !patient {
                txn::set_locally(c"lock_timeout", c"20ms");
            }
            store.claim(DEFAULT_DESTINATION, lanes)
        })?;
        Ok(self.note(claimed))
    }

    fn note(&mut self, claimed: ClaimedBatch) -> Batch<String> {
        self.wal_position = self.wal_position.max(claimed.wal_position);
        claimed.batch
    }
}

impl engine::Store for Tables<'_> {
    type Place = String;
    type Error = Failure;

    fn settle(&mut self, batch: &[Settlement]) -> Result<(), Failure> {
        let (store, dead_blocks) = (self.store, self.dead_blocks);
        let changed = held_transaction(c"outbox: settle", self.timeout_ms, Durability::Full, || {
            let changed = store.settle(batch, dead_blocks)?;
            if changed == batch.len() {
                return Ok(changed);
            }
            // Rows that moved (VACUUM FULL) are found again by key. Rows that are gone or carry another token are no
            // longer ours.
            Ok(changed + store.settle_by_key(batch, dead_blocks)?)
        })?;
        self.missed += batch.len().saturating_sub(changed);
        Ok(())
    }

    fn claim(&mut self, lanes: &[Lane]) -> Result<Batch<String>, Failure> {
        if !self.lane_by_lane {
            match self.claim_lanes(lanes) {
                Err(failure) if failure.locked => self.lane_by_lane = true,
                claimed => return claimed,
            }
        }
        // Somebody holds a row of these lanes: a session by hand, or a worker that hangs. The other lanes go on.
        let mut all = Batch::default();
        for lane in lanes {
            match self.claim_lanes(std::slice::from_ref(lane)) {
                Ok(batch) => {
                    all.rows.extend(batch.rows);
                    all.cut |= batch.cut;
                    all.missed |= batch.missed;
                }
                // Those before it are claimed and committed: whatever happened, they go on.
                Err(failure) if failure.locked || !all.rows.is_empty() => all.locked.push(lane.partition),
                Err(failure) => return Err(failure),
            }
        }
        all.rows.sort_by_key(|claimed| claimed.pointer.seq);
        Ok(all)
    }

    fn claim_unleased(&mut self, limit: u32) -> Result<Batch<String>, Failure> {
        let (store, token, ttl_s) = (self.store, self.row_token, self.claim_ttl_s);
        let claimed = in_transaction(c"outbox: claim", Durability::Relaxed, || {
            store.claim_unleased(DEFAULT_DESTINATION, token, ttl_s, limit)
        })?;
        Ok(self.note(claimed))
    }

    fn claim_waiting(
        &mut self,
        key: &OrderedKey,
        epoch: i64,
        reach: i64,
        limit: u32,
    ) -> Result<(Batch<String>, bool), Failure> {
        let store = self.store;
        let (claimed, more) = in_transaction(c"outbox: claim", Durability::Relaxed, || {
            store.claim_waiting(key, epoch, reach, limit)
        })?;
        Ok((self.note(claimed), more))
    }

    fn bring_due(&mut self, leases: Option<&[Held]>) -> Result<Due, Failure> {
        let store = self.store;
        in_transaction(c"outbox: bring back what is due", Durability::Relaxed, || {
            store.bring_due(leases, DUE_ROWS)
        })
    }

    fn gates(&mut self, partitions: &[Partition]) -> Result<Vec<Found>, Failure> {
        let store = self.store;
        in_transaction(c"outbox: read the gates", Durability::Relaxed, || {
            store.gates(partitions)
        })
    }
}

/// Shared memory, as the worker in this place sees it.
pub struct Signals {
    pub database: Option<&'static shmem::Database>,
    pub slot: Option<&'static shmem::Worker>,
}

impl Signals {
    /// From now on this worker reads these partitions, and nobody else.
    pub fn own_lanes(&self, leases: &[Held]) {
        if let (Some(database), Some(slot)) = (self.database, self.slot) {
            for (partition, _) in leases {
                database.own_lane(*partition, slot);
            }
        }
    }
}

impl Memory for Signals {
    fn notice_prepared(&self) {
        registry::reap();
    }

    fn open_transactions(&self) -> Vec<OpenTransaction> {
        registry::open_transactions()
    }

    fn take_reopen(&self, partition: Partition) -> Option<i64> {
        self.database?.take_reopen(partition, self.slot?)
    }

    fn look_at_reopen(&self, partition: Partition) -> Option<i64> {
        self.database?.look_at_reopen(partition)
    }

    fn waiting_changes(&self) -> u32 {
        self.database.map_or(0, shmem::Database::waiting_changes)
    }
}

/// The extension that the worker started with, and one of its tables; 0 = not known yet.
static KNOWN: AtomicU32 = AtomicU32::new(0);
static KNOWN_TABLE: AtomicU32 = AtomicU32::new(0);

/// From now on a look at this table of the extension tells whether it is still there.
pub fn remember_table(oid: u32) {
    KNOWN_TABLE.store(oid, Relaxed);
}

fn is_the_same(extension: u32) -> bool {
    let known = KNOWN.load(Relaxed);
    if known == 0 {
        KNOWN.store(extension, Relaxed);
    }
    known == 0 || known == extension
}

/// A transaction that holds the extension; the worker ends if there is none any more.
pub fn held_transaction<T>(
    what: &CStr,
    timeout_ms: i32,
    durability: Durability,
    body: impl FnOnce() -> SpiResult<T>,
) -> Result<T, Failure> {
    let result = txn::run(what, timeout_ms, durability, || {
        let found = match (KNOWN.load(Relaxed), KNOWN_TABLE.load(Relaxed)) {
            (extension, table) if table != 0 && catalog::hold_known_extension(extension, table) => Some(extension),
            _ => catalog::hold_extension(c"outbox"),
        };
        match found {
            Some(extension) if is_the_same(extension) => body()
                .map(Some)
                .map_err(|error| format!("a statement of its own failed: {error}")),
            Some(_) => signals::exit(0), // dropped and made anew meanwhile: the launcher starts a worker that knows it
            None => Ok(None),
        }
    })?;
    result.map_or_else(
        || {
            if let Some(database) = shmem::my_database() {
                database.set_extension(false);
            }
            signals::exit(0)
        },
        Ok,
    )
}

/// The same with the usual patience.
pub fn in_transaction<T>(
    what: &CStr,
    durability: Durability,
    body: impl FnOnce() -> SpiResult<T>,
) -> Result<T, Failure> {
    held_transaction(what, STATEMENT_TIMEOUT_MS, durability, body)
}
