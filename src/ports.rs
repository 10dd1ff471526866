//! What the engine of crates/core stands on here: the tables, each call a transaction of its own, and shared memory. Called
//! by the worker, on its main thread.

use crate::destination::Common;
use crate::limits::STATEMENT_TIMEOUT_MS;
use crate::pg::clock::now_us;
use crate::pg::spi::SpiResult;
use crate::pg::tid::Tid;
use crate::pg::txn::{self, Durability, Failure};
use crate::pg::{catalog, signals};
use crate::shared::databases;
use crate::shared::fastpath::slot;
use crate::shared::lanes::Class;
use crate::shared::requests::Report;
use crate::shared::{transactions, workers};
use crate::worker::store::{ClaimedBatch, Settlement, Store, Whereto};
use outbox_core::engine::{self, Batch, Claimed, Due, Errand, Express, Held, Lane, Memory, Place};
use outbox_core::gate::{Found, OrderedKey};
use outbox_core::hold::OpenTransaction;
use outbox_core::partition::Partition;
use outbox_core::settle::Rules;
use outbox_transport::BodyFunction;
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::ffi::CStr;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// Due messages that one transaction brings back, at most.
const DUE_ROWS: i32 = 1000;

/// The tables.
pub struct Tables<'a> {
    common: &'a Common,
    store: &'a Store,
    destination: &'a str,
    /// What makes the bodies, if not the format alone.
    pub body: Option<&'a BodyFunction>,
    timeout_ms: i32,
    /// How a dead letter is settled.
    dead_action: &'static str,
    /// Rows of some lane were locked lately: each lane is claimed alone, and a locked one left out.
    pub lane_by_lane: bool,
    /// WAL must be on disk up to here before what was claimed goes out.
    pub wal_position: u64,
    /// Messages that were no longer ours to settle.
    pub missed: usize,
}

impl<'a> Tables<'a> {
    pub fn new(common: &'a Common, destination: &'a str, rules: &Rules, timeout_ms: i32) -> Self {
        Self {
            common,
            store: &common.store,
            destination,
            body: None,
            timeout_ms,
            dead_action: rules.dead_action(),
            lane_by_lane: false,
            wal_position: 0,
            missed: 0,
        }
    }

    fn whereto(&self) -> Whereto<'a> {
        Whereto {
            destination: self.destination,
            body: self.body,
        }
    }

    /// All of them with the same reach.
    fn claim_lanes(&mut self, lanes: &[Lane]) -> Result<Batch<Tid>, Failure> {
        let (store, whereto, patient) = (self.store, self.whereto(), !self.lane_by_lane);
        let claimed = in_transaction(c"outbox: claim", Durability::Relaxed, || {
            if !patient {
                txn::set_locally(c"lock_timeout", c"20ms");
            }
            store.claim(whereto, lanes)
        })?;
        Ok(self.note(claimed))
    }

    fn note(&mut self, claimed: ClaimedBatch) -> Batch<Tid> {
        self.wal_position = self.wal_position.max(claimed.wal_position);
        claimed.batch
    }
}

impl engine::Store for Tables<'_> {
    type Place = Tid;
    type Error = Failure;

    fn settle(&mut self, batch: &[Settlement]) -> Result<(), Failure> {
        let (store, dead_action) = (self.store, self.dead_action);
        let changed = held_transaction(c"outbox: settle", self.timeout_ms, Durability::Full, || {
            let changed = store.settle(batch, dead_action)?;
            if changed == batch.len() {
                return Ok(changed);
            }
            // Rows that moved (VACUUM FULL) are found again by key. Rows that are gone or carry another token are no
            // longer ours.
            Ok(changed + store.settle_by_key(batch, dead_action)?)
        })?;
        self.missed += batch.len().saturating_sub(changed);
        Ok(())
    }

    fn claim(&mut self, lanes: &[Lane]) -> Result<Batch<Tid>, Failure> {
        if !self.lane_by_lane && engine::reach_the_same(lanes) {
            match self.claim_lanes(lanes) {
                Err(failure) if failure.locked => self.lane_by_lane = true,
                claimed => return claimed,
            }
        }
        // Somebody holds a row of these lanes: a session by hand, or a worker that hangs. The other lanes go on. Or some are
        // read only as far as one that failed.
        let mut all = Batch::default();
        for lane in lanes {
            if all.is_large() {
                all.cut = true; // the other lanes have their turn with the next claim
                break;
            }
            match self.claim_lanes(std::slice::from_ref(lane)) {
                Ok(batch) => all.add(batch),
                // Those before it are claimed and committed: whatever happened, they go on.
                Err(failure) if failure.locked || !all.rows.is_empty() => {
                    self.lane_by_lane |= failure.locked;
                    all.locked.push(lane.partition);
                }
                Err(failure) => return Err(failure),
            }
        }
        all.rows.sort_by_key(|claimed| claimed.pointer.seq);
        Ok(all)
    }

    fn claim_unleased(&mut self, limit: u32) -> Result<Batch<Tid>, Failure> {
        let (store, whereto) = (self.store, self.whereto());
        let (token, ttl_s) = (self.common.row_token, self.common.settings.claim_ttl_s);
        let claimed = in_transaction(c"outbox: claim", Durability::Relaxed, || {
            store.claim_unleased(whereto, token, ttl_s, limit)
        })?;
        Ok(self.note(claimed))
    }

    fn claim_waiting(
        &mut self,
        key: &OrderedKey,
        epoch: i64,
        reach: i64,
        limit: u32,
    ) -> Result<(Batch<Tid>, bool), Failure> {
        let (store, body) = (self.store, self.body);
        let (claimed, more) = in_transaction(c"outbox: claim", Durability::Relaxed, || {
            store.claim_waiting(body, key, epoch, reach, limit)
        })?;
        Ok((self.note(claimed), more))
    }

    /// For all destinations at once, by the first that asks in a pass; the others are told where theirs are.
    fn bring_due(&mut self, leases: Option<&[Held]>) -> Result<Due, Failure> {
        let (store, shared) = (self.store, &self.common.shared);
        if let Some(next_ms) = shared.brought_in_this_pass() {
            return Ok((Vec::new(), next_ms));
        }
        let (moved, next_ms) = in_transaction(c"outbox: bring back what is due", Durability::Relaxed, || {
            store.bring_due(leases, DUE_ROWS)
        })?;
        let mut own = Vec::new();
        for (destination, partition, seq) in moved {
            match destination == self.destination {
                true => own.push((partition, seq)),
                false => shared.tell(&destination, partition, seq),
            }
        }
        shared.brought(next_ms);
        Ok((own, next_ms))
    }

    fn gates(&mut self, partitions: &[Partition]) -> Result<Vec<Found>, Failure> {
        let (store, destination) = (self.store, self.destination);
        let mut found = in_transaction(c"outbox: read the gates", Durability::Relaxed, || {
            store.gates(partitions)
        })?;
        found.retain(|found| found.key.destination == destination);
        Ok(found)
    }
}

/// Shared memory as a worker in this place sees it, and what its destinations tell each other. Destinations of one class
/// share a word of *reopen*: the first that takes it tells the others.
pub struct Shared {
    database: Option<&'static databases::Database>,
    slot: &'static workers::Worker,
    /// The destinations that are served, and from where each must read a partition again.
    told: RefCell<Vec<(String, Lows)>>,
    /// Whether this pass has brought back what is due, and in how many ms the next is.
    brought: Cell<Option<Option<u64>>>,
}

type Lows = HashMap<Partition, i64>;

impl Shared {
    pub fn new(database: Option<&'static databases::Database>, slot: &'static workers::Worker) -> Self {
        Self {
            database,
            slot,
            told: RefCell::default(),
            brought: Cell::new(None),
        }
    }

    /// These destinations are served from now on.
    pub fn serve(&self, destinations: Vec<String>) {
        let mut told = self.told.take();
        let known = |name: String, told: &mut Vec<(String, Lows)>| {
            let lows = told.iter_mut().find(|(known, _)| *known == name);
            let lows = lows.map(|(_, lows)| std::mem::take(lows)).unwrap_or_default();
            (name, lows)
        };
        self.told
            .replace(destinations.into_iter().map(|name| known(name, &mut told)).collect());
    }

    /// Whether there is more than one.
    pub fn serves_several(&self) -> bool {
        self.told.borrow().len() > 1
    }

    pub fn begin_pass(&self) {
        self.brought.set(None);
    }

    /// What a session asks for, with its ticket.
    pub fn asked(&self) -> Option<(u32, Errand)> {
        self.database?.ask().now()
    }

    /// Answers it; with the last word the session is woken.
    pub fn answer(&self, ticket: u32, report: &Report, done: bool) {
        if let Some(database) = self.database {
            self.slot.answer().tell(database.ask(), ticket, report, done);
        }
    }

    /// A pass is over; one that did nothing is not told of.
    pub fn note_tick(&self, report: &Report) {
        if report.says_something() {
            self.slot.note_tick(report);
        }
    }

    pub fn set_in_flight(&self, count: usize) {
        self.slot.set_in_flight(count);
    }

    /// This worker has nothing to do, as of so many calls; None = it has.
    pub fn set_idle(&self, calls: Option<u32>) {
        self.slot.set_idle(calls);
    }

    /// The launcher wants the slot of this worker for another database.
    pub fn is_to_leave(&self) -> bool {
        self.slot.is_to_leave()
    }

    /// From now on this worker reads these partitions, and nobody else, for so long.
    pub fn own_lanes(&self, leases: &[Held], ttl_s: i32) {
        self.slot.hold_leases(ttl_s);
        if let Some(database) = self.database {
            for (partition, _) in leases {
                database.own_lanes(*partition, self.slot);
            }
        }
    }

    /// These leases are new: their lanes are read from the start.
    pub fn begin_lanes(&self, leases: &[Held]) {
        leases.iter().for_each(|(partition, _)| slot::begin_lane(*partition));
    }

    /// Whether something lies ready to be taken in hand.
    pub fn is_something_ready(&self) -> bool {
        slot::is_something_ready(self.slot.place())
    }

    /// As one destination sees it.
    pub fn of<'a>(&'a self, destination: &'a str) -> Lanes<'a> {
        Lanes {
            shared: self,
            destination,
            class: Class::of(destination),
        }
    }

    fn brought_in_this_pass(&self) -> Option<Option<u64>> {
        self.brought.get()
    }

    fn brought(&self, next_ms: Option<u64>) {
        self.brought.set(Some(next_ms));
        if let Some(database) = self.database {
            database.set_next_due_us(next_ms.map(|ms| now_us() + ms as i64 * 1000));
        }
    }

    fn tell(&self, destination: &str, partition: Partition, seq: i64) {
        self.tell_those(|name| name == destination, partition, seq);
    }

    fn tell_those(&self, whom: impl Fn(&str) -> bool, partition: Partition, seq: i64) {
        for (_, lows) in self.told.borrow_mut().iter_mut().filter(|(name, _)| whom(name)) {
            let low = lows.entry(partition).or_insert(seq);
            *low = seq.min(*low);
        }
    }
}

/// The lanes of one destination.
pub struct Lanes<'a> {
    shared: &'a Shared,
    destination: &'a str,
    class: Class,
}

impl Lanes<'_> {
    fn told<T>(&self, read: impl FnOnce(&mut Lows) -> Option<T>) -> Option<T> {
        let mut told = self.shared.told.borrow_mut();
        let (_, lows) = told.iter_mut().find(|(name, _)| name == self.destination)?;
        read(lows)
    }
}

impl Memory for Lanes<'_> {
    fn notice_prepared(&self) {
        transactions::reap();
    }

    fn open_transactions(&self) -> Vec<OpenTransaction> {
        transactions::open_transactions()
    }

    fn take_reopen(&self, partition: Partition) -> Option<i64> {
        if let Some(database) = self.shared.database
            && let Some(low) = database.take_reopen(self.class, partition, self.shared.slot)
        {
            self.shared
                .tell_those(|name| Class::of(name) == self.class, partition, low);
        }
        self.told(|lows| lows.remove(&partition))
    }

    fn look_at_reopen(&self, partition: Partition) -> Option<i64> {
        // In this order: who takes away what is ready tells of it before.
        let ready = slot::lowest_ready(self.destination, partition);
        let told = self.told(|lows| lows.get(&partition).copied());
        let new = self
            .shared
            .database
            .and_then(|database| database.look_at_reopen(self.class, partition));
        told.into_iter().chain(new).chain(ready).min()
    }

    fn revoke(&self, claimed: &[(Partition, i64)]) {
        slot::revoke(self.destination, claimed);
    }

    fn waiting_changes(&self) -> u32 {
        self.shared.database.map_or(0, databases::Database::waiting_changes)
    }
}

impl Express<Tid> for Lanes<'_> {
    fn take(&self) -> Vec<(Place, Claimed<Tid>)> {
        let worker = self.shared.slot.place();
        (slot::take(self.destination, worker).into_iter())
            .map(|(place, tid, pointer, event)| {
                let claimed = Claimed {
                    place: tid,
                    pointer,
                    event: Ok(event),
                };
                (place, claimed)
            })
            .collect()
    }

    fn let_go(&self, place: Place) {
        slot::free(place);
    }

    fn give_up(&self, place: Place, partition: Partition, seq: i64) {
        if let Some(database) = self.shared.database {
            database.reopen(self.class, partition, seq);
        }
        slot::free(place);
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
            if let Some(database) = databases::my_database() {
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
