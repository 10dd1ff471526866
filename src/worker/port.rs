//! A destination of a worker in the server, as crates/worker calls it: its tables (each call is a separate
//! transaction), its lanes in shared memory, and its statistics. Runs on the main thread of a worker.

use super::transaction::{LAST_TRANSACTION_MS, held_transaction, in_transaction};
use crate::config::Settings;
use crate::limits::STATEMENT_TIMEOUT_MS;
use crate::pg::clock::now_us;
use crate::pg::tid::Tid;
use crate::pg::txn::{self, Durability, Failure};
use crate::shared::error_groups::{self, ErrorGroup};
use crate::shared::fastpath::slot;
use crate::shared::lanes::Class;
use crate::shared::statistics::DestinationStats;
use crate::shared::{databases, transactions, workers};
use crate::worker::store::{ClaimedBatch, Settlement, Store, Whereto};
use outbox_core::engine::{Batch, Claimed, Held, Lane, SlotId};
use outbox_core::key_order::{Found, OrderedKey};
use outbox_core::message::Pointer;
use outbox_core::open_transactions::OpenTransaction;
use outbox_core::partition::Partition;
use outbox_core::settle::{Blocks, Ended};
use outbox_core::throughput::Took;
use outbox_core::words::Word;
use outbox_transport::BodyFunction;
use outbox_transport::target::{Limits, Target};
use outbox_worker::{Brought, Patience, Reason, Status};
use std::cell::{Cell, RefCell};
use std::rc::Rc;

/// The most due messages that one transaction brings back.
const DUE_ROWS: i32 = 1000;

/// What the destinations of a worker have in common.
pub struct Here {
    pub id: String,
    pub store: Store,
    pub database: Option<&'static databases::Database>,
    pub slot: &'static workers::Worker,
    pub settings: RefCell<Settings>,
    /// The token of this process's claims when leasing is off; negative.
    pub row_token: i64,
    /// The number of changes by hand as of this worker's last refresh.
    pub changes_seen: Cell<u32>,
}

impl Here {
    /// The number of times that a person changed something in this database.
    pub fn changes_by_hand(&self) -> u32 {
        self.database.map_or(0, databases::Database::changes_by_hand)
    }

    /// Whether there was one that this worker has not read.
    pub fn is_stale(&self) -> bool {
        self.changes_by_hand() != self.changes_seen.get()
    }
}

pub struct Port {
    here: Rc<Here>,
    destination: String,
    /// All destinations of a class share the *rewind* words of that class.
    class: Class,
    stats: RefCell<DestinationStats>,
    /// Delivery times of confirmed messages that are not settled yet.
    took: RefCell<Took>,
    /// The function that makes the bodies, if the destination names one.
    body: RefCell<Option<BodyFunction>>,
    /// WAL must be on disk up to this position before the claimed messages are sent.
    wal_position: Cell<u64>,
}

impl Port {
    pub fn new(here: Rc<Here>, destination: &str) -> Self {
        Self {
            here,
            destination: destination.to_owned(),
            class: Class::of(destination),
            stats: RefCell::new(DestinationStats::of(destination)),
            took: RefCell::default(),
            body: RefCell::default(),
            wal_position: Cell::new(0),
        }
    }

    /// Records the WAL position of a claim. Returns the claimed batch.
    fn record_wal_position(&self, claimed: ClaimedBatch) -> Batch<Tid> {
        self.wal_position.set(self.wal_position.get().max(claimed.wal_position));
        claimed.batch
    }
}

impl outbox_worker::Port for Port {
    type RowId = Tid;
    type Error = Failure;

    fn describe(&self, target: Result<&Target, &str>, limits: &Limits) {
        self.body.replace(target.ok().and_then(|target| target.body.clone()));
        self.stats.borrow().set_max_pending(limits.max_pending);
    }

    // ---- tables -----------------------------------------------------------------------------------------------------

    fn settle(&self, batch: &[Settlement], dead_blocks: Blocks, patience: Patience) -> Result<usize, Failure> {
        let store = &self.here.store;
        let timeout_ms = match patience {
            Patience::Usual => STATEMENT_TIMEOUT_MS,
            Patience::Little => LAST_TRANSACTION_MS,
        };
        held_transaction(c"outbox: settle", timeout_ms, Durability::Full, || {
            let changed = store.settle(batch, dead_blocks)?;
            if changed == batch.len() {
                return Ok(changed);
            }
            // Rows that moved (VACUUM FULL) are found again by key. Rows that are gone, or carry another token, are no
            // longer this worker's.
            Ok(changed + store.settle_by_key(batch, dead_blocks)?)
        })
    }

    fn claim(&self, lanes: &[Lane], is_patient: bool) -> Result<Batch<Tid>, Failure> {
        let body = self.body.borrow();
        let whereto = Whereto {
            destination: &self.destination,
            body: body.as_ref(),
        };
        let claimed = in_transaction(c"outbox: claim", Durability::Relaxed, || {
            if !is_patient {
                txn::set_locally(c"lock_timeout", c"20ms");
            }
            self.here.store.claim(whereto, lanes)
        })?;
        Ok(self.record_wal_position(claimed))
    }

    fn claim_unleased(&self, limit: u32) -> Result<Batch<Tid>, Failure> {
        let body = self.body.borrow();
        let whereto = Whereto {
            destination: &self.destination,
            body: body.as_ref(),
        };
        let (token, ttl_s) = (self.here.row_token, self.here.settings.borrow().claim_ttl_s);
        let claimed = in_transaction(c"outbox: claim", Durability::Relaxed, || {
            self.here.store.claim_unleased(whereto, token, ttl_s, limit)
        })?;
        Ok(self.record_wal_position(claimed))
    }

    fn claim_waiting(
        &self,
        key: &OrderedKey,
        epoch: i64,
        read_limit: i64,
        limit: u32,
    ) -> Result<(Batch<Tid>, bool), Failure> {
        let body = self.body.borrow();
        let (claimed, more) = in_transaction(c"outbox: claim", Durability::Relaxed, || {
            self.here
                .store
                .claim_waiting(body.as_ref(), key, epoch, read_limit, limit)
        })?;
        Ok((self.record_wal_position(claimed), more))
    }

    fn bring_due(&self, leases: Option<&[Held]>) -> Result<Brought, Failure> {
        let brought = in_transaction(c"outbox: bring back due messages", Durability::Relaxed, || {
            self.here.store.bring_due(leases, DUE_ROWS)
        })?;
        if let Some(database) = self.here.database {
            database.set_next_due_us(brought.1.map(|ms| now_us() + ms as i64 * 1000));
        }
        Ok(brought)
    }

    fn blocked_keys(&self, partitions: &[Partition]) -> Result<Vec<Found>, Failure> {
        in_transaction(c"outbox: read blocked keys", Durability::Relaxed, || {
            self.here.store.blocked_keys(partitions)
        })
    }

    fn is_locked(failure: &Failure) -> bool {
        failure.locked
    }

    /// A commit with synchronous_commit off is visible before it is on disk.
    fn make_durable(&self) {
        txn::flush_wal(self.wal_position.take());
    }

    fn body_rests_ms(&self) -> Option<u32> {
        self.here.store.bodies.rests_ms(&self.destination)
    }

    fn is_body_unusable(&self) -> bool {
        self.here.store.bodies.is_unusable(&self.destination)
    }

    // ---- shared memory ----------------------------------------------------------------------------------------------

    fn refresh(&self) -> Result<(), Failure> {
        transactions::reap();
        Ok(())
    }

    fn open_transactions(&self) -> Result<Vec<OpenTransaction>, Failure> {
        Ok(transactions::open_transactions())
    }

    fn take_rewind(&self, partition: Partition) -> Option<i64> {
        self.here.database?.take_rewind(self.class, partition, self.here.slot)
    }

    fn peek_rewind(&self, partition: Partition) -> Option<i64> {
        self.here.database?.peek_rewind(self.class, partition)
    }

    fn shares_rewind_with(&self, destination: &str) -> bool {
        Class::of(destination) == self.class
    }

    fn schedules(&self) -> u32 {
        self.here.database.map_or(0, databases::Database::schedules)
    }

    fn unblocks(&self) -> u32 {
        self.here.database.map_or(0, databases::Database::unblocks)
    }

    // ---- fast path --------------------------------------------------------------------------------------------------

    fn take_ready(&self) -> Vec<(SlotId, Claimed<Tid>)> {
        let ready = slot::take(&self.destination, self.here.slot.entry());
        // A transaction counts its change by hand before its slots are ready: such as a pause of this destination.
        if self.here.is_stale() {
            for (slot_id, _, pointer, _) in ready {
                self.give_up(slot_id, pointer.partition, pointer.seq);
            }
            return Vec::new();
        }
        let claimed = |(slot_id, tid, pointer, event)| {
            let claimed = Claimed {
                row_id: tid,
                pointer,
                event: Ok(event),
            };
            (slot_id, claimed)
        };
        ready.into_iter().map(claimed).collect()
    }

    fn lowest_ready(&self, partition: Partition) -> Option<i64> {
        slot::lowest_ready(&self.destination, partition)
    }

    fn revoke(&self, claimed: &[(Partition, i64)]) {
        slot::revoke(&self.destination, claimed);
    }

    fn let_go(&self, slot_id: SlotId) {
        slot::free(slot_id);
    }

    fn give_up(&self, slot_id: SlotId, partition: Partition, seq: i64) {
        if let Some(database) = self.here.database {
            database.rewind_to(self.class, partition, seq);
        }
        slot::free(slot_id);
    }

    // ---- statistics -------------------------------------------------------------------------------------------------

    fn confirmed(&self, pointer: &Pointer, at_us: i64) {
        self.took
            .borrow_mut()
            .note(at_us.saturating_sub(pointer.enqueued_at_us));
    }

    fn settled(&self, batch: &[Settlement]) {
        let (now_us, mut ended) = (now_us(), Ended::default());
        batch.iter().for_each(|settlement| ended.note(&settlement.disposition));
        let took = if ended.published > 0 {
            self.took.take()
        } else {
            Took::default()
        };
        let stats = self.stats.borrow();
        stats.settled(batch, now_us);
        stats.confirmed(&took, now_us);
        if let Some(database) = self.here.database {
            database.settled(&ended, now_us);
            database.confirmed(&took, now_us);
        }
    }

    fn record_in_flight(&self, count: usize) {
        self.stats.borrow().set_in_flight(count);
    }

    fn take_recheck_request(&self) -> bool {
        self.stats.borrow_mut().take_recheck_request()
    }

    fn report(&self, status: Option<&Status>, requested_at_us: Option<i64>) -> Result<(), Failure> {
        let state = status.map(|status| status.state.name());
        let reason = status.and_then(|status| status.reason).map(Reason::name);
        let detail = status.and_then(|status| status.detail.as_deref());
        in_transaction(c"outbox: report", Durability::Relaxed, || {
            let store = &self.here.store;
            store.report(&self.destination, state, reason, detail, requested_at_us)
        })
    }

    fn record_error(&self, reason: &'static str, detail: &str) {
        error_groups::record(&ErrorGroup::of_destination(&self.destination, reason, detail));
    }
}
