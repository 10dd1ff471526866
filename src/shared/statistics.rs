//! Statistics of each destination in shared memory: totals, waiting messages, messages in flight, delivery times, and
//! requests to recheck the connection. The workers that serve a destination count. outbox_destination_status and
//! sessions that enqueue read. If all entries are taken, a further destination is delivered to without statistics and
//! without a limit.

use crate::pg::catalog;
use crate::pg::clock::now_us;
use crate::pg::shmem::{Shareable, SharedStruct, SpinLock};
use crate::shared::fields::{EventCount, Flag, RowCount};
use outbox_core::latency::{self, BUCKETS};
use outbox_core::settle::Ended;
use outbox_core::throughput::{DeliveryTimes, History, LastMinute, RecentTimes};
use std::cell::{Cell, RefCell};
use std::collections::HashSet;
use std::hash::{Hash, Hasher};
use std::sync::atomic::{
    AtomicI32, AtomicI64, AtomicU32, AtomicU64,
    Ordering::{Relaxed, SeqCst},
};

/// Destinations that can have an entry, of all databases together. An entry that is not taken is never touched, so it
/// takes no memory.
const MAX_DESTINATIONS: usize = 4096;

#[repr(C)]
pub(super) struct Destinations {
    /// Held by a process that takes or frees an entry.
    lock: SpinLock,
    /// The hash of the database and the name of each entry; 0 = the entry is free. Together, so that a search reads few
    /// cache lines. Written under the lock.
    keys: [AtomicU64; MAX_DESTINATIONS],
    /// A session requests a recheck of any destination. Written by the session; read by workers.
    rechecks: EventCount,
    entries: [DestinationEntry; MAX_DESTINATIONS],
}

/// The entry of one destination of one database.
#[repr(C)]
struct DestinationEntry {
    /// The OID of the database; 0 = the entry is free. Written under the lock.
    database: AtomicU32,
    /// The hash of the destination's name; see `number_of`. Written under the lock.
    name: AtomicU64,
    /// The number of workers that serve the destination. Written by them, under the lock.
    workers: AtomicI32,
    /// The destination was dropped; its entry is freed when no worker serves it. Written by workers, under the lock.
    gone: Flag,
    /// A session requests a recheck. Written by the session; read by workers.
    recheck_requests: EventCount,
    /// Messages that wait, including those in flight. Sessions add at COMMIT, workers subtract at settle. Read by
    /// sessions that enqueue, and by the status view.
    pending: RowCount,
    /// The most messages that may wait; 0 = no limit. Written by workers when the destination is described; read by
    /// sessions that enqueue.
    max_pending: AtomicI64,
    /// Messages that are claimed and not settled. Each worker adds its changes, and subtracts what is left when it
    /// ends. Read by the status view.
    in_flight: AtomicI64,
    /// Totals since `since_us`. Written by workers and maintenance, read by the status view.
    published: AtomicU64,
    failed: AtomicU64,
    dead: AtomicU64,
    released: AtomicU64,
    /// When the entry was taken, in µs since 1970.
    since_us: AtomicI64,
    /// Confirmed messages by delivery time since `since_us`; see `latency::bucket`.
    delivery_times: [AtomicU64; BUCKETS],
    /// The sum of their delivery times, in µs.
    delivery_us_sum: AtomicU64,
    /// The same of the last minutes, for the percentiles.
    recent: RecentTimes,
    history: History,
    last_minute: LastMinute,
}

// SAFETY: only atomics and arrays of them; zero is a valid value of each.
unsafe impl Shareable for DestinationEntry {}
// SAFETY: as for its entries.
unsafe impl Shareable for Destinations {}

pub(super) static AREA: SharedStruct<Destinations> = SharedStruct::new(c"outbox statistics");

thread_local! {
    /// The destinations that this worker serves, each with the number of its messages in flight.
    static SERVED: RefCell<Vec<(&'static DestinationEntry, i64)>> = const { RefCell::new(Vec::new()) };
    /// The index of the entry that this session searched for last. Most sessions search for the same destination each
    /// time.
    static LAST: Cell<usize> = const { Cell::new(0) };
}

/// The hash of a name or other text. Processes of the same build compute equal hashes for equal texts.
pub fn number_of(name: &str) -> u64 {
    // The hasher has no random seed, so that all processes agree.
    let mut hasher = std::hash::DefaultHasher::new();
    name.hash(&mut hasher);
    hasher.finish()
}

/// The key of an entry; never 0.
fn key_of(database: u32, name: u64) -> u64 {
    (name ^ u64::from(database).wrapping_mul(0x9e37_79b9_7f4a_7c15)).max(1)
}

impl Destinations {
    fn find(&self, database: u32, name: u64) -> Option<(usize, &DestinationEntry)> {
        let key = key_of(database, name);
        let places = (self.keys.iter().enumerate()).filter(|(_, known)| known.load(SeqCst) == key);
        let mut found = places.map(|(index, _)| (index, &self.entries[index]));
        found.find(|(_, entry)| entry.database.load(SeqCst) == database && entry.name.load(SeqCst) == name)
    }

    /// The entries that are taken.
    fn taken(&self) -> impl Iterator<Item = &DestinationEntry> {
        let taken = self
            .keys
            .iter()
            .zip(&self.entries)
            .filter(|(key, _)| key.load(SeqCst) != 0);
        taken.map(|(_, entry)| entry)
    }

    /// Takes a free entry. The caller holds the lock.
    fn take(&self, database: u32, name: u64) -> Option<&DestinationEntry> {
        let index = self.keys.iter().position(|key| key.load(Relaxed) == 0)?;
        let free = &self.entries[index];
        free.clear();
        free.since_us.store(now_us(), Relaxed);
        free.name.store(name, SeqCst);
        free.database.store(database, SeqCst);
        self.keys[index].store(key_of(database, name), SeqCst);
        Some(free)
    }

    /// Frees the entries that `is_over` says. The caller holds the lock.
    fn free(&self, is_over: impl Fn(&DestinationEntry) -> bool) {
        for (key, entry) in self.keys.iter().zip(&self.entries) {
            if key.load(Relaxed) != 0 && is_over(entry) {
                key.store(0, SeqCst);
                entry.database.store(0, SeqCst);
            }
        }
    }
}

impl DestinationEntry {
    fn settled(&self, ended: &Ended, now_us: i64) {
        self.count(ended, now_us);
        self.pending.add(-(ended.gone() as i64));
    }

    fn count(&self, ended: &Ended, now_us: i64) {
        self.failed.fetch_add(ended.failed(), Relaxed);
        self.released.fetch_add(ended.released, Relaxed);
        self.published.fetch_add(ended.published, Relaxed);
        self.dead.fetch_add(ended.all_dead(), Relaxed);
        self.last_minute.count(ended, now_us);
        self.history.count(ended, now_us);
    }

    /// Whether the destination was dropped and no worker serves it any more.
    fn is_over(&self) -> bool {
        self.gone.is_set() && self.workers.load(Relaxed) <= 0
    }
}

// ---- a worker -------------------------------------------------------------------------------------------------------

/// The statistics of a destination that this worker serves. The worker counts as serving it until this value is dropped
/// or the process ends.
pub struct DestinationStats {
    name: u64,
    /// None while all entries are taken.
    entry: Option<&'static DestinationEntry>,
    /// As set here.
    max_pending: u32,
    /// `DestinationEntry::recheck_requests` as of the last recheck.
    recheck_requests: u32,
}

impl DestinationStats {
    pub fn of(name: &str) -> Self {
        let mut stats = Self {
            name: number_of(name),
            entry: None,
            max_pending: 0,
            recheck_requests: 0,
        };
        stats.take_entry();
        stats
    }

    /// Takes an entry, if it has none and one is free.
    pub fn take_entry(&mut self) {
        let Some(table) = AREA.get().filter(|_| self.entry.is_none()) else {
            return;
        };
        let database = catalog::my_database();
        let taken = table.lock.with(|| {
            let known = table.find(database, self.name).map(|(_, entry)| entry);
            let entry = known.or_else(|| table.take(database, self.name))?;
            entry.workers.fetch_add(1, Relaxed);
            entry.gone.clear();
            Some(entry)
        });
        let Some(entry) = taken else { return };
        SERVED.with_borrow_mut(|served| served.push((entry, 0)));
        self.entry = Some(entry);
        // One less: a session may have requested a recheck before this worker knew the destination.
        self.recheck_requests = entry.recheck_requests.read().wrapping_sub(1);
        if self.max_pending > 0 {
            entry.max_pending.store(self.max_pending.into(), Relaxed); // not known here is not "no limit"
        }
    }

    /// Whether a session has requested a recheck since the last call.
    pub fn take_recheck_request(&mut self) -> bool {
        let recheck_requests = self.entry.map_or(0, |entry| entry.recheck_requests.read());
        std::mem::replace(&mut self.recheck_requests, recheck_requests) != recheck_requests
    }

    /// Sets how many messages may wait; 0 = no limit.
    pub fn set_max_pending(&mut self, max_pending: u32) {
        self.max_pending = max_pending;
        if let Some(entry) = self.entry {
            entry.max_pending.store(i64::from(max_pending), Relaxed);
        }
    }

    pub fn set_in_flight(&self, count: usize) {
        let Some(entry) = self.entry else { return };
        SERVED.with_borrow_mut(|served| {
            if let Some((_, before)) = served.iter_mut().find(|(known, _)| std::ptr::eq(*known, entry)) {
                let difference = count as i64 - *before;
                *before = count as i64;
                entry.in_flight.fetch_add(difference, Relaxed);
            }
        });
    }

    /// Adds the delivery times of messages that the broker has confirmed.
    pub fn confirmed(&self, times: &DeliveryTimes, now_us: i64) {
        let Some(entry) = self.entry else { return };
        for (bucket, count) in times.counts() {
            entry.delivery_times[bucket].fetch_add(u64::from(count), Relaxed);
        }
        entry.delivery_us_sum.fetch_add(times.sum_us(), Relaxed);
        entry.recent.count_times(times, now_us);
    }

    pub fn settled(&self, ended: &Ended, now_us: i64) {
        if let Some(entry) = self.entry {
            entry.settled(ended, now_us);
        }
    }

    /// Counts what ended. Does not change `pending`.
    pub fn count(&self, ended: &Ended, now_us: i64) {
        if let Some(entry) = self.entry {
            entry.count(ended, now_us);
        }
    }
}

impl Drop for DestinationStats {
    fn drop(&mut self) {
        if let Some(entry) = self.entry {
            leave(|served| std::ptr::eq(served, entry));
        }
    }
}

fn leave(which: impl Fn(&DestinationEntry) -> bool) {
    let Some(table) = AREA.get() else { return };
    // Only the code above borrows SERVED, and none of it raises an error.
    _ = SERVED.try_with(|served| {
        for (entry, in_flight) in served.borrow_mut().extract_if(.., |(entry, _)| which(entry)) {
            entry.in_flight.fetch_sub(in_flight, Relaxed);
            table.lock.with(|| {
                entry.workers.fetch_sub(1, Relaxed);
                if entry.is_over() {
                    table.free(|other| std::ptr::eq(other, entry));
                }
            });
        }
    });
}

/// Subtracts what this worker had in flight, however it ends. Called in the exit callback.
pub fn worker_ends() {
    leave(|_| true);
}

/// A count of the messages of each destination: the entries, and the value of `pending` when the count began.
pub struct PendingCount(Vec<(&'static DestinationEntry, i64)>);

impl PendingCount {
    pub fn begin() -> Self {
        let here = entries_here().map(|entry| (entry, entry.pending.uncertain()));
        Self(here.collect())
    }

    /// Takes over the counted messages of each destination that has any.
    pub fn end(self, found: &[(String, i64)]) {
        let found: Vec<(u64, i64)> = found.iter().map(|(name, count)| (number_of(name), *count)).collect();
        for (entry, before) in self.0 {
            let name = entry.name.load(SeqCst);
            let count = found
                .iter()
                .find(|(known, _)| *known == name)
                .map_or(0, |(_, count)| *count);
            entry.pending.correct(before, count);
        }
    }
}

/// Whether this database has a destination whose waiting messages are not counted yet.
pub fn is_any_uncounted() -> bool {
    entries_here().any(|entry| entry.pending.get().is_none())
}

fn entries_here() -> impl Iterator<Item = &'static DestinationEntry> {
    let database = catalog::my_database();
    let taken = AREA.get().into_iter().flat_map(Destinations::taken);
    taken.filter(move |entry| entry.database.load(SeqCst) == database)
}

/// Marks the destinations of this database that are not in `names` as dropped. An entry is freed once no worker serves
/// its destination. Called by each worker that notices.
pub fn forget_but(names: &[&str]) {
    let Some(table) = AREA.get() else { return };
    let (database, alive) = (catalog::my_database(), names.iter().map(|name| number_of(name)));
    let alive: HashSet<u64> = alive.collect();
    table.lock.with(|| {
        let is_gone = |entry: &DestinationEntry| {
            let is_gone = entry.database.load(Relaxed) == database && !alive.contains(&entry.name.load(Relaxed));
            if is_gone {
                entry.gone.set();
            }
            is_gone && entry.is_over()
        };
        table.free(is_gone);
    });
}

/// Frees the entries of databases that no longer exist. Called only by the launcher.
pub fn forget_databases_but(alive: &[u32]) {
    if let Some(table) = AREA.get() {
        table
            .lock
            .with(|| table.free(|entry| !alive.contains(&entry.database.load(Relaxed))));
    }
}

/// Counts messages of a destination of this database that ended without a worker. Called by maintenance.
pub fn settled(destination: &str, ended: &Ended, now_us: i64) {
    if let Some(entry) = entry_of(number_of(destination)) {
        entry.settled(ended, now_us);
    }
}

// ---- a session ------------------------------------------------------------------------------------------------------

/// The entry of a destination of this database, by the hash of its name. Neither allocates nor raises an error.
fn entry_of(number: u64) -> Option<&'static DestinationEntry> {
    let (table, database) = (AREA.get()?, catalog::my_database());
    let is_it =
        |entry: &&DestinationEntry| entry.database.load(SeqCst) == database && entry.name.load(SeqCst) == number;
    if let Some(entry) = table.entries.get(LAST.get()).filter(is_it) {
        return Some(entry);
    }
    let (index, entry) = table.find(database, number)?;
    LAST.set(index);
    Some(entry)
}

/// The number of messages of a destination that wait, and the most that may. None if it has no limit, or its messages
/// are not counted yet.
pub fn fill_of(number: u64) -> Option<(i64, i64)> {
    let entry = entry_of(number)?;
    let max_pending = entry.max_pending.load(Relaxed);
    let pending = entry.pending.get().filter(|_| max_pending > 0)?;
    Some((pending.max(0), max_pending))
}

/// Changes the number of waiting messages of a destination. Called in the commit callback, so it neither allocates nor
/// raises an error.
pub fn pending_changed(number: u64, by: i64) {
    if let Some(entry) = entry_of(number) {
        entry.pending.add(by);
    }
}

/// Marks the waiting messages of this database as not counted, because the extension was just installed. Called in the
/// commit callback.
pub fn installed() {
    entries_here().for_each(|entry| entry.pending.forget());
}

/// Whether the messages of a destination of this database were counted, and none of them waits.
pub fn has_none(destination: &str) -> bool {
    let entry = entry_of(number_of(destination));
    entry
        .and_then(|entry| entry.pending.get())
        .is_some_and(|pending| pending <= 0)
}

/// The statistics of a destination of this database; None if it has no entry. In this order:
/// - in flight, published, failed, dead, released, published in the last 60 s;
/// - since when, in µs since 1970; percentiles 50, 95 and 99 of the delivery times of the last five minutes, in ms;
/// - pending (None = not counted), and the most that may wait (None = no limit).
pub fn of(destination: &str) -> Option<Vec<Option<f64>>> {
    let entry = entry_of(number_of(destination))?;
    let now_us = now_us();
    let [published_60s, _] = entry.last_minute.sum(now_us);
    let times = entry.recent.recent(now_us);
    let total = |count: &AtomicU64| Some(count.load(Relaxed) as f64);
    Some(vec![
        Some(entry.in_flight.load(Relaxed) as f64),
        total(&entry.published),
        total(&entry.failed),
        total(&entry.dead),
        total(&entry.released),
        Some(published_60s as f64),
        Some(entry.since_us.load(Relaxed) as f64),
        latency::percentile_ms(&times, 0.5),
        latency::percentile_ms(&times, 0.95),
        latency::percentile_ms(&times, 0.99),
        entry.pending.get().map(|pending| pending.max(0) as f64),
        Some(entry.max_pending.load(Relaxed) as f64).filter(|max| *max > 0.0),
    ])
}

/// The delivery times of a destination of this database since its entry was taken; None if it has no entry. The sum in
/// ms, then two numbers for each bound: the bound in ms, and how many messages took less. The last bound is infinite.
pub fn latency_of(destination: &str) -> Option<Vec<f64>> {
    let entry = entry_of(number_of(destination))?;
    let mut times = [0; BUCKETS];
    for (count, counted) in times.iter_mut().zip(&entry.delivery_times) {
        *count = counted.load(Relaxed);
    }
    let bounds = latency::histogram(&times).map(|(bound_ms, below)| [bound_ms, below as f64]);
    let all = [f64::INFINITY, times.iter().sum::<u64>() as f64];
    let sum_ms = entry.delivery_us_sum.load(Relaxed) as f64 / 1e3;
    Some([&[sum_ms][..], bounds.as_flattened(), &all].concat())
}

/// What ended of a destination of this database; see `History::shown`. None if it has no entry.
pub fn history_of(destination: &str) -> Option<Vec<i64>> {
    let entry = entry_of(number_of(destination))?;
    Some(entry.history.shown(now_us()))
}

/// The number of requests to recheck a destination, of all databases.
pub fn rechecks() -> u32 {
    AREA.get().map_or(0, |table| table.rechecks.read())
}

/// Requests that the workers of a destination of this database recheck it. The caller wakes them. Returns false if the
/// destination has no entry, so that no worker can notice.
pub fn request_recheck(destination: &str) -> bool {
    let entry = entry_of(number_of(destination));
    let (Some(entry), Some(table)) = (entry, AREA.get()) else {
        return false;
    };
    entry.recheck_requests.advance();
    table.rechecks.advance();
    true
}
