//! The transactions that have enqueued messages and are still open, in shared memory. A worker reads them before each
//! claim. So a later message of a key never overtakes one of a transaction that commits late. A session writes its own
//! entry, and frees it when the transaction ends, or the process. A prepared transaction has no session any more, so
//! the first process that sees it finished frees its entry.
//!
//! A session announces a key before it draws a seq for it. It registers the message's partition once it has inserted
//! the message. It frees its entry after COMMIT, when its rows are visible and `rewinds` has the seq to read from.
//! crates/core/tests/model_cursor.rs models this protocol.

use crate::pg::clock::now_us;
use crate::pg::shmem::{Shareable, SharedSlice};
use crate::pg::{bgworker, catalog, latch, xact};
use crate::shared::{databases, sessions};
use outbox_core::open_transactions::{FILTER_WORDS, OpenTransaction, filter_bit, lane_crc};
use outbox_core::partition::Partition;
use std::cell::Cell;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicI64, AtomicU32, AtomicU64, Ordering::SeqCst};

#[repr(C)]
pub(super) struct TransactionEntry {
    /// The lower half is the OID of the transaction's database; 0 = the entry is free, RESERVED = a process fills or
    /// empties it. The upper half grows each time the entry is freed, so that no process mistakes the next transaction
    /// for the one it saw.
    tenant: AtomicU64,
    /// The process id of the session; 0 = the transaction is prepared. The session writes this field and those below
    /// before the entry becomes valid. The process that frees the entry clears it. Workers and
    /// outbox_open_transactions() read them.
    pid: AtomicU32,
    /// The xid of a prepared transaction; 0 for a session.
    xid: AtomicU32,
    /// When the session announced its first key, or when the transaction was prepared, in µs since 1970.
    since_us: AtomicI64,
    /// No message of the transaction has a lower seq; 0 = not known yet. Raised from 0 once the seqs are known.
    low: AtomicI64,
    /// A bit for each key and partition that the transaction enqueues for; see `filter_bit`. Bits are added while the
    /// transaction is open.
    filter: [AtomicU64; FILTER_WORDS],
}

// SAFETY: only atomics; zero is a valid value of each.
unsafe impl Shareable for TransactionEntry {}

const RESERVED: u32 = u32::MAX;

/// The entries of sessions, by process number, then one for each transaction that may be prepared.
pub(super) static AREA: SharedSlice<TransactionEntry> =
    SharedSlice::new(c"outbox transactions", || xact::max_sessions() + xact::max_prepared());

thread_local! {
    static REGISTERED: Cell<bool> = const { Cell::new(false) };
    /// The number of announcements whose messages are not all placed.
    static UNPLACED: Cell<u32> = const { Cell::new(0) };
    /// The lowest seq that this transaction has placed.
    static LOW: Cell<i64> = const { Cell::new(i64::MAX) };
}

// ---- a session ------------------------------------------------------------------------------------------------------

fn mine() -> Option<&'static TransactionEntry> {
    AREA.get().get(usize::try_from(latch::my_proc_number()).ok()?)
}

/// Messages that this transaction is about to enqueue: their keys are announced, but their seqs and partitions are not
/// all known. While such a value exists, the entry reports no lowest seq. `placed` consumes it. A value that an error
/// drops counts until the transaction ends; that only holds messages back longer.
#[must_use = "its keys are held back from the first message on until `placed` is called"]
pub struct Announced(());

/// Announces that this transaction is about to enqueue messages with these keys. Call it before drawing their seqs.
pub fn announce(key_crcs: impl IntoIterator<Item = Option<u32>>) -> Announced {
    sessions::begin_to_own();
    UNPLACED.set(UNPLACED.get() + 1);
    register(key_crcs.into_iter().flatten());
    Announced(())
}

impl Announced {
    /// Registers the seq and partition of each message that was inserted for this announcement. Partitions are
    /// registered because a destination may keep one order for each partition.
    pub fn placed(self, messages: impl IntoIterator<Item = (i64, Partition)>) {
        let (mut low, mut lanes) = (LOW.get(), BTreeSet::new());
        for (seq, partition) in messages {
            low = low.min(seq);
            lanes.insert(partition);
        }
        register(lanes.into_iter().map(lane_crc));
        LOW.set(low);
        UNPLACED.set(UNPLACED.get().saturating_sub(1));
        // Stored last: a worker reads the lowest seq first, and then also finds the lanes.
        if let Some(entry) = mine() {
            entry.low.store(lowest(), SeqCst);
        }
    }
}

/// The lowest seq that the entry reports; 0 = not known.
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

/// Frees the entry of this transaction, which is over. Called in the commit callback, so it neither allocates nor
/// raises an error.
pub fn leave() {
    UNPLACED.set(0);
    LOW.set(i64::MAX);
    if REGISTERED.replace(false)
        && let Some(entry) = mine()
    {
        entry.free();
    }
}

/// Frees the entry with this process number, whose process has ended without the end of its transaction. It neither
/// allocates nor raises an error.
pub(super) fn process_ends(number: i32) {
    let entry = usize::try_from(number).ok().and_then(|number| AREA.get().get(number));
    if let Some((entry, tenant)) = entry.map(|entry| (entry, entry.tenant.load(SeqCst)))
        && is_occupied(tenant)
    {
        entry.end(tenant);
        databases::wake_workers_of(database_of(tenant)); // messages may have waited for it
    }
}

/// Copies the entry for PREPARE TRANSACTION, because the transaction continues without this session. Returns false if
/// no entry is free. That cannot happen: there is an entry for each transaction that may be prepared.
pub fn prepare() -> bool {
    let (Some(entry), true) = (mine(), REGISTERED.get()) else {
        return true;
    };
    if xact::max_prepared() == 0 {
        return true; // the server refuses the PREPARE next, with its own error
    }
    let low = entry.low.load(SeqCst);
    reserve_prepared(low, xact::my_xid(), now_us(), |reserved| {
        for (to, from) in reserved.filter.iter().zip(&entry.filter) {
            to.store(from.load(SeqCst), SeqCst);
        }
    })
}

fn reserve_prepared(low: i64, xid: u32, since_us: i64, fill: impl FnOnce(&TransactionEntry)) -> bool {
    let free = prepared().iter().find(|entry| entry.reserve()).or_else(|| {
        prepared().iter().for_each(TransactionEntry::reap);
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

fn prepared() -> &'static [TransactionEntry] {
    AREA.get().get(xact::max_sessions()..).unwrap_or_default()
}

// ---- a worker -------------------------------------------------------------------------------------------------------

/// Frees the entries of prepared transactions that are over, and makes the workers read again from their first
/// messages.
pub fn reap() {
    prepared().iter().for_each(TransactionEntry::reap);
}

/// The transactions of this database that have enqueued and are still open.
pub fn open_transactions() -> Vec<OpenTransaction> {
    reap();
    let open = |entry: &TransactionEntry| Some(entry.read()?.1);
    AREA.get().iter().filter_map(open).collect()
}

/// Adds the prepared transactions that are older than this shared memory. What they enqueued is unknown, so all lanes
/// are read again from the start when one ends. `found`: (xid, when it was prepared in µs since 1970).
pub fn adopt(found: &[(u32, i64)]) {
    for (xid, since_us) in found {
        if !prepared().iter().any(|entry| entry.xid.load(SeqCst) == *xid) {
            reserve_prepared(1, *xid, *since_us, |_| {});
        }
    }
}

/// Four values for each open transaction, for outbox_open_transactions(): pid or 0, xid or 0, since when in µs since
/// 1970, and the lowest seq. A process that is no longer there is left out, for a remedy names its id.
pub fn flat() -> Vec<i64> {
    reap();
    (AREA.get().iter().enumerate())
        .filter_map(|(number, entry)| Some((number, entry.read()?)))
        .filter(|(number, ((pid, ..), _))| *pid == 0 || latch::is_process(*number as i32, *pid))
        .map(|(_, open)| open)
        .flat_map(|((pid, xid, since_us), open)| [i64::from(pid), i64::from(xid), since_us, open.low])
        .collect()
}

type Owner = (u32, u32, i64);

impl TransactionEntry {
    fn read(&self) -> Option<(Owner, OpenTransaction)> {
        loop {
            let tenant = self.tenant.load(SeqCst);
            if database_of(tenant) != catalog::my_database() {
                return None;
            }
            let owner = (self.pid.load(SeqCst), self.xid.load(SeqCst), self.since_us.load(SeqCst));
            let low = self.low.load(SeqCst);
            let mut filter = Box::new([0; FILTER_WORDS]);
            for (to, from) in filter.iter_mut().zip(&self.filter) {
                *to = from.load(SeqCst);
            }
            if self.tenant.load(SeqCst) == tenant {
                return Some((owner, OpenTransaction { low, filter }));
            }
        }
    }

    fn reserve(&self) -> bool {
        let tenant = self.tenant.load(SeqCst);
        database_of(tenant) == 0 && self.replace(tenant, tenant | u64::from(RESERVED))
    }

    /// Makes the filled-in entry valid for readers.
    fn occupy(&self) {
        let generation = self.tenant.load(SeqCst) & !u64::from(u32::MAX);
        self.tenant
            .store(generation | u64::from(catalog::my_database()), SeqCst);
    }

    fn replace(&self, before: u64, after: u64) -> bool {
        (self.tenant.compare_exchange(before, after, SeqCst, SeqCst)).is_ok()
    }

    /// Frees the entry of a prepared transaction that is over, of any database.
    fn reap(&self) {
        let tenant = self.tenant.load(SeqCst);
        if is_occupied(tenant) && !xact::is_in_progress(self.xid.load(SeqCst)) {
            self.end(tenant);
        }
    }

    /// Frees the entry of a transaction that is over, unless another process has done it. The session has not recorded
    /// what it enqueued, so its messages are searched for.
    fn end(&self, tenant: u64) {
        // Two processes may see the end at the same time: each rewinds before either frees the entry.
        databases::rewind_all(database_of(tenant), self.low.load(SeqCst));
        if self.replace(tenant, emptying(tenant)) {
            self.empty(tenant);
        }
    }

    /// Frees the entry of this session, which has recorded what it enqueued.
    fn free(&self) {
        let tenant = self.tenant.load(SeqCst);
        self.tenant.store(emptying(tenant), SeqCst);
        self.empty(tenant);
    }

    fn empty(&self, tenant: u64) {
        // Most words are 0. Writing all of them would cost each transaction some µs.
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

fn is_occupied(tenant: u64) -> bool {
    ![0, RESERVED].contains(&database_of(tenant))
}

/// The next generation, reserved: a reader must not mistake a half-emptied entry for a complete one.
fn emptying(tenant: u64) -> u64 {
    ((tenant >> 32).wrapping_add(1) << 32) | u64::from(RESERVED)
}
