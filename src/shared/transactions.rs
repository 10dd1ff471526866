//! Which transactions have enqueued and are not over, in shared memory: a worker reads it before each claim, so that later
//! messages of a key never overtake those of a transaction that commits late. A session writes its own entry; the entry
//! of a prepared transaction has no session any more and is freed by whoever sees that the transaction is over.
//!
//! A session announces a key before it draws a seq for it, and says where the message is once it has inserted it. It leaves after
//! COMMIT, when its rows are visible and `lanes` knows how far back to read for them. crates/core/tests/model_cursor.rs models it.

use crate::pg::clock::now_us;
use crate::pg::shmem::{Shareable, SharedSlice};
use crate::pg::{bgworker, catalog, latch, xact};
use crate::shared::databases;
use outbox_core::open_transactions::{FILTER_WORDS, OpenTransaction, filter_bit, lane_crc};
use outbox_core::partition::Partition;
use std::cell::Cell;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicI64, AtomicU32, AtomicU64, Ordering::SeqCst};

#[repr(C)]
struct Entry {
    /// Where the transaction runs, in the lower half; 0 = the entry is free, RESERVED = it is being filled or emptied. The
    /// upper half grows each time the entry is freed, so that nobody takes the next transaction for the one he saw.
    tenant: AtomicU64,
    /// 0 = prepared. This and what follows is written by its session, before the entry counts, and by the process that frees
    /// it; read by workers and by outbox_open_transactions().
    pid: AtomicU32,
    /// Of a prepared one.
    xid: AtomicU32,
    since_us: AtomicI64,
    /// No message that it enqueued has a lower seq; 0 = that is not known yet. Raised once that is known.
    low: AtomicI64,
    /// The keys and partitions that it enqueues for; grows while the transaction is open.
    filter: [AtomicU64; FILTER_WORDS],
}

// SAFETY: only atomics; zero is a valid value of each.
unsafe impl Shareable for Entry {}

const RESERVED: u32 = u32::MAX;

/// First the sessions, by process number, then as many for prepared transactions as there can be.
static ENTRIES: SharedSlice<Entry> = SharedSlice::new();

thread_local! {
    static REGISTERED: Cell<bool> = const { Cell::new(false) };
    /// How often something was announced that is not placed.
    static UNPLACED: Cell<u32> = const { Cell::new(0) };
    /// The lowest seq that is placed.
    static LOW: Cell<i64> = const { Cell::new(i64::MAX) };
}

/// How many entries there are. Once the server knows its limits.
fn count() -> usize {
    xact::max_sessions() + xact::max_prepared()
}

/// Shared memory that is needed, in bytes.
pub fn bytes() -> usize {
    count() * size_of::<Entry>()
}

/// In the startup hook.
pub fn attach() {
    ENTRIES.attach(c"outbox registry", count());
}

// ---- a session ------------------------------------------------------------------------------------------------------

fn mine() -> Option<&'static Entry> {
    ENTRIES.get()?.get(usize::try_from(latch::my_proc_number()).ok()?)
}

/// Messages that this transaction is about to enqueue: their keys are announced, and their seqs and partitions are not all known.
/// While there is one, nothing is told of the lowest seq. `placed` consumes it. One that an error drops counts until the
/// transaction ends, which only holds longer.
#[must_use = "its keys are held from the first message on until it is placed"]
pub struct Announced(());

/// This transaction is about to enqueue messages with these keys. Before it draws their seqs.
pub fn announce(key_crcs: impl IntoIterator<Item = Option<u32>>) -> Announced {
    UNPLACED.set(UNPLACED.get() + 1);
    register(key_crcs.into_iter().flatten());
    Announced(())
}

impl Announced {
    /// All of them that there are were inserted: with this seq, in this partition, which may be one order at some destination.
    pub fn placed(self, messages: impl IntoIterator<Item = (i64, Partition)>) {
        let (mut low, mut lanes) = (LOW.get(), BTreeSet::new());
        for (seq, partition) in messages {
            low = low.min(seq);
            lanes.insert(partition);
        }
        register(lanes.into_iter().map(lane_crc));
        LOW.set(low);
        UNPLACED.set(UNPLACED.get().saturating_sub(1));
        // Only now: a worker reads the lowest seq first, and then finds the lanes.
        if let Some(entry) = mine() {
            entry.low.store(lowest(), SeqCst);
        }
    }
}

/// What is told of the lowest seq.
fn lowest() -> i64 {
    if UNPLACED.get() > 0 { 0 } else { LOW.get() }
}

fn register(crcs: impl Iterator<Item = u32>) {
    let Some(entry) = mine() else { return };
    let first = !REGISTERED.replace(true);
    if first {
        entry.pid.store(bgworker::my_pid() as u32, SeqCst);
        entry.xid.store(0, SeqCst);
        entry.since_us.store(now_us(), SeqCst);
    }
    entry.low.store(lowest(), SeqCst);
    for crc in crcs {
        let (word, mask) = filter_bit(crc);
        entry.filter[word].fetch_or(mask, SeqCst);
    }
    if first {
        entry.occupy();
    }
}

/// This transaction is over. Called in the commit callback: no allocation, no error.
pub fn leave() {
    UNPLACED.set(0);
    LOW.set(i64::MAX);
    if REGISTERED.replace(false)
        && let Some(entry) = mine()
    {
        entry.free();
    }
}

/// This transaction is about to be prepared: it goes on without this session. False if there is no room, which cannot
/// be, for there is an entry for each transaction that may be prepared.
pub fn prepare() -> bool {
    let (Some(entry), true) = (mine(), REGISTERED.get()) else {
        return true;
    };
    if xact::max_prepared() == 0 {
        return true; // the server refuses it next, in its own words
    }
    let low = entry.low.load(SeqCst);
    reserve_prepared(low, xact::my_xid(), now_us(), |reserved| {
        for (to, from) in reserved.filter.iter().zip(&entry.filter) {
            to.store(from.load(SeqCst), SeqCst);
        }
    })
}

fn reserve_prepared(low: i64, xid: u32, since_us: i64, fill: impl FnOnce(&Entry)) -> bool {
    let free = prepared().iter().find(|entry| entry.reserve()).or_else(|| {
        prepared().iter().for_each(Entry::reap);
        prepared().iter().find(|entry| entry.reserve())
    });
    let Some(entry) = free else { return false };
    entry.pid.store(0, SeqCst);
    entry.xid.store(xid, SeqCst);
    entry.since_us.store(since_us, SeqCst);
    entry.low.store(low, SeqCst);
    fill(entry);
    entry.occupy();
    true
}

fn prepared() -> &'static [Entry] {
    ENTRIES
        .get()
        .and_then(|entries| entries.get(xact::max_sessions()..))
        .unwrap_or_default()
}

// ---- a worker -------------------------------------------------------------------------------------------------------

/// Forgets prepared transactions that are over, and lets the workers read again from their first messages on.
pub fn reap() {
    prepared().iter().for_each(Entry::reap);
}

/// Transactions of this database that have enqueued and are not over.
pub fn open_transactions() -> Vec<OpenTransaction> {
    reap();
    entries()
        .filter_map(|entry| entry.read().map(|(_, open)| open))
        .collect()
}

/// Prepared transactions that outlived shared memory: what they have enqueued nobody knows, so all is read again when
/// one ends. `found`: (xid, when it was prepared in µs).
pub fn adopt(found: &[(u32, i64)]) {
    for (xid, since_us) in found {
        if !prepared().iter().any(|entry| entry.xid.load(SeqCst) == *xid) {
            reserve_prepared(1, *xid, *since_us, |_| {});
        }
    }
}

/// [pid or 0, xid or 0, since in µs, low] one after the other, for outbox_open_transactions().
pub fn flat() -> Vec<i64> {
    entries()
        .filter_map(Entry::read)
        .flat_map(|((pid, xid, since_us), open)| [i64::from(pid), i64::from(xid), since_us, open.low])
        .collect()
}

fn entries() -> impl Iterator<Item = &'static Entry> {
    ENTRIES.get().unwrap_or_default().iter()
}

type Who = (u32, u32, i64);

impl Entry {
    fn read(&self) -> Option<(Who, OpenTransaction)> {
        loop {
            let tenant = self.tenant.load(SeqCst);
            if database_of(tenant) != catalog::my_database() {
                return None;
            }
            let who = (self.pid.load(SeqCst), self.xid.load(SeqCst), self.since_us.load(SeqCst));
            let low = self.low.load(SeqCst);
            let mut filter = Box::new([0; FILTER_WORDS]);
            for (to, from) in filter.iter_mut().zip(&self.filter) {
                *to = from.load(SeqCst);
            }
            if self.tenant.load(SeqCst) == tenant {
                return Some((who, OpenTransaction { low, filter }));
            }
        }
    }

    fn reserve(&self) -> bool {
        let tenant = self.tenant.load(SeqCst);
        database_of(tenant) == 0 && self.replace(tenant, tenant | u64::from(RESERVED))
    }

    /// What was filled in counts from here on.
    fn occupy(&self) {
        let generation = self.tenant.load(SeqCst) & !u64::from(u32::MAX);
        self.tenant
            .store(generation | u64::from(catalog::my_database()), SeqCst);
    }

    fn replace(&self, before: u64, after: u64) -> bool {
        (self.tenant.compare_exchange(before, after, SeqCst, SeqCst)).is_ok()
    }

    /// Frees the entry of a prepared transaction that is over, of whatever database.
    fn reap(&self) {
        let tenant = self.tenant.load(SeqCst);
        let database = database_of(tenant);
        if database == 0 || database == RESERVED || xact::is_in_progress(self.xid.load(SeqCst)) {
            return;
        }
        // Two may see it at once: each tells before either frees.
        databases::rewind_all(database, self.low.load(SeqCst));
        if self.replace(tenant, emptying(tenant)) {
            self.empty(tenant);
        }
    }

    /// Frees the entry of this session.
    fn free(&self) {
        let tenant = self.tenant.load(SeqCst);
        self.tenant.store(emptying(tenant), SeqCst);
        self.empty(tenant);
    }

    fn empty(&self, tenant: u64) {
        // Most are empty, and to write them all would cost each transaction some µs.
        for word in self.filter.iter().filter(|word| word.load(SeqCst) != 0) {
            word.store(0, SeqCst);
        }
        self.xid.store(0, SeqCst);
        self.tenant.store(emptying(tenant) & !u64::from(u32::MAX), SeqCst);
    }
}

fn database_of(tenant: u64) -> u32 {
    tenant as u32
}

/// The next generation, reserved: a reader must not take a half-emptied entry for whole.
fn emptying(tenant: u64) -> u64 {
    ((tenant >> 32).wrapping_add(1) << 32) | u64::from(RESERVED)
}
