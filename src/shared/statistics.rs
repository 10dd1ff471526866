//! Figures of each destination in shared memory: totals, what waits and what is in flight, how long messages took; and the
//! wish of a session that the workers look at it anew. Counted by the workers that serve it; read by outbox_destination_status and
//! by sessions that enqueue. With all places taken a destination has no figures and no limit, and is delivered to as any.

use crate::pg::catalog;
use crate::pg::clock::now_us;
use crate::pg::shmem::{Shareable, Shared, SpinLock};
use outbox_core::engine::Settlement;
use outbox_core::latency::{self, BUCKETS};
use outbox_core::settle::Ended;
use std::cell::{Cell, RefCell};
use std::hash::{Hash, Hasher};
use std::sync::atomic::{
    AtomicI32, AtomicI64, AtomicU32, AtomicU64,
    Ordering::{Relaxed, SeqCst},
};

/// Of all databases together.
const MAX_DESTINATIONS: usize = 256;
const SECONDS: usize = 64;

#[repr(C)]
struct Table {
    /// Of who takes or frees a place.
    lock: SpinLock,
    entries: [Entry; MAX_DESTINATIONS],
}

/// One destination of one database.
#[repr(C)]
struct Entry {
    /// 0 = free. This and `name` are written in turn.
    database: AtomicU32,
    name: AtomicU64,
    /// How many workers serve it. Written by them, in turn.
    workers: AtomicI32,
    /// 1 = the destination was dropped: free when no worker serves it. Written by workers, in turn.
    gone: AtomicU32,
    /// Grows when a session wants a fresh look. Written by the session; read by workers.
    recheck_requests: AtomicU32,
    /// Messages that wait, in flight ones too. Producers add at COMMIT, workers subtract at settle and set it right when they
    /// count. Read by sessions that enqueue, and by the status view.
    pending: AtomicI64,
    /// 1 = `pending` was counted since the place was taken; before that it says nothing. Written by a worker.
    counted: AtomicU32,
    /// How many may wait; 0 = any number. Written by the workers, as the destination is described; read by sessions that enqueue.
    max_pending: AtomicI64,
    /// Claimed and not settled. Each worker adds what changed, and takes what is left when it ends. Read
    /// by the status view.
    in_flight: AtomicI64,
    /// Since `since_us`. Written by workers, read by the status view.
    published: AtomicU64,
    failed: AtomicU64,
    dead: AtomicU64,
    released: AtomicU64,
    since_us: AtomicI64,
    took: [AtomicU64; BUCKETS],
    seconds: [Second; SECONDS],
}

/// One second of the last minute. Written by workers.
#[repr(C)]
struct Second {
    second: AtomicI64,
    published: AtomicU64,
}

// SAFETY: only atomics and arrays of them; zero is a valid value of each.
unsafe impl Shareable for Table {}

static TABLE: Shared<Table> = Shared::new();

thread_local! {
    /// What this worker serves, and what it has in flight there.
    static SERVED: RefCell<Vec<(&'static Entry, i64)>> = const { RefCell::new(Vec::new()) };
    /// Where a session found the last place that it asked for: most ask for the same one each time.
    static LAST: Cell<usize> = const { Cell::new(0) };
}

/// Shared memory that is needed, in bytes.
pub fn bytes() -> usize {
    size_of::<Table>()
}

/// In the startup hook.
pub fn attach() {
    TABLE.attach(c"outbox figures");
}

fn table() -> Option<&'static Table> {
    TABLE.get()
}

/// The same name, or other text, under the same build is the same number.
pub fn number_of(name: &str) -> u64 {
    // Without a random seed, so that all processes agree.
    let mut hasher = std::hash::DefaultHasher::new();
    name.hash(&mut hasher);
    hasher.finish()
}

impl Table {
    fn find(&self, database: u32, name: u64) -> Option<&Entry> {
        let is_it = |entry: &&Entry| entry.database.load(SeqCst) == database && entry.name.load(SeqCst) == name;
        self.entries.iter().find(is_it)
    }
}

impl Entry {
    fn forget(&self) {
        let totals = [&self.published, &self.failed, &self.dead, &self.released];
        for count in totals.into_iter().chain(&self.took) {
            count.store(0, Relaxed);
        }
        for second in &self.seconds {
            second.published.store(0, Relaxed);
        }
        self.forget_pending();
        self.max_pending.store(0, Relaxed);
        self.in_flight.store(0, Relaxed);
        self.workers.store(0, Relaxed);
        self.gone.store(0, Relaxed);
        self.since_us.store(now_us(), Relaxed);
    }

    fn forget_pending(&self) {
        self.counted.store(0, SeqCst);
        self.pending.store(0, SeqCst);
    }

    fn free_if_over(&self) {
        if self.gone.load(Relaxed) == 1 && self.workers.load(Relaxed) <= 0 {
            self.database.store(0, SeqCst);
        }
    }
}

// ---- a worker -------------------------------------------------------------------------------------------------------

/// A destination that this worker serves, until it is dropped or the process ends.
pub struct DestinationStats {
    entry: Option<&'static Entry>,
    /// As of the last fresh look.
    recheck_requests: u32,
}

impl DestinationStats {
    pub fn of(name: &str) -> Self {
        let (database, name) = (catalog::my_database(), number_of(name));
        let entry = table().and_then(|table| {
            table.lock.with(|| {
                let entry = table.find(database, name).or_else(|| {
                    let free = table.entries.iter().find(|entry| entry.database.load(Relaxed) == 0)?;
                    free.forget();
                    free.name.store(name, SeqCst);
                    free.database.store(database, SeqCst);
                    Some(free)
                })?;
                entry.workers.fetch_add(1, Relaxed);
                entry.gone.store(0, Relaxed);
                Some(entry)
            })
        });
        if let Some(entry) = entry {
            SERVED.with_borrow_mut(|served| served.push((entry, 0)));
        }
        Self {
            entry,
            // One less: a session may have asked before this worker knew of the destination.
            recheck_requests: entry.map_or(0, |entry| entry.recheck_requests.load(SeqCst).wrapping_sub(1)),
        }
    }

    /// Whether a session has asked for a fresh look since the last call.
    pub fn take_recheck_request(&mut self) -> bool {
        let recheck_requests = self.entry.map_or(0, |entry| entry.recheck_requests.load(SeqCst));
        std::mem::replace(&mut self.recheck_requests, recheck_requests) != recheck_requests
    }

    /// How many messages may wait; 0 = any number.
    pub fn set_max_pending(&self, max_pending: u32) {
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

    /// The broker has confirmed a message that was enqueued then, in µs since 1970.
    pub fn confirmed(&self, enqueued_at_us: i64, now_us: i64) {
        if let Some(entry) = self.entry {
            let bucket = latency::bucket(now_us.saturating_sub(enqueued_at_us));
            entry.took[bucket].fetch_add(1, Relaxed);
        }
    }

    pub fn settled<P>(&self, batch: &[Settlement<P>], now_us: i64) {
        let mut ended = Ended::default();
        batch.iter().for_each(|settlement| ended.note(&settlement.disposition));
        self.count(&ended, now_us);
        if let Some(entry) = self.entry {
            entry.pending.fetch_sub(ended.gone() as i64, SeqCst);
        }
    }

    /// What ended, but for the messages that wait no more.
    pub fn count(&self, ended: &Ended, now_us: i64) {
        let Some(entry) = self.entry else { return };
        entry.failed.fetch_add(ended.failed(), Relaxed);
        entry.released.fetch_add(ended.released, Relaxed);
        entry.published.fetch_add(ended.published, Relaxed);
        entry.dead.fetch_add(ended.all_dead(), Relaxed);
        let now_s = now_us.div_euclid(1_000_000);
        let second = &entry.seconds[now_s.rem_euclid(SECONDS as i64) as usize];
        if second.second.swap(now_s, Relaxed) != now_s {
            second.published.store(0, Relaxed);
        }
        second.published.fetch_add(ended.published, Relaxed);
    }
}

impl Drop for DestinationStats {
    fn drop(&mut self) {
        if let Some(entry) = self.entry {
            leave(|served| std::ptr::eq(served, entry));
        }
    }
}

fn leave(which: impl Fn(&Entry) -> bool) {
    let Some(table) = table() else { return };
    // Not borrowed but by code above, none of which raises.
    _ = SERVED.try_with(|served| {
        for (entry, in_flight) in served.borrow_mut().extract_if(.., |(entry, _)| which(entry)) {
            entry.in_flight.fetch_sub(in_flight, Relaxed);
            table.lock.with(|| {
                entry.workers.fetch_sub(1, Relaxed);
                entry.free_if_over();
            });
        }
    });
}

/// However the worker ends, what it had in flight is so no more. In the exit callback.
pub fn worker_ends() {
    leave(|_| true);
}

/// The messages of each destination are about to be counted.
pub struct Count(Vec<(&'static Entry, i64)>);

impl Count {
    pub fn begin() -> Self {
        let here = entries_here().map(|entry| (entry, entry.pending.load(SeqCst)));
        Self(here.collect())
    }

    /// So many there are, of each destination that has any. While messages come and go a count may see one and the counter
    /// too, so what is known already is set right only if nothing changed meanwhile.
    pub fn end(self, found: &[(String, i64)]) {
        let found: Vec<(u64, i64)> = found.iter().map(|(name, count)| (number_of(name), *count)).collect();
        for (entry, before) in self.0 {
            let name = entry.name.load(SeqCst);
            let count = found
                .iter()
                .find(|(known, _)| *known == name)
                .map_or(0, |(_, count)| *count);
            if entry.counted.load(SeqCst) == 0 || entry.pending.load(SeqCst) == before {
                entry.pending.fetch_add(count - before, SeqCst);
            }
            entry.counted.store(1, SeqCst);
        }
    }
}

/// Whether there is a destination here of which nobody knows how much waits.
pub fn is_any_uncounted() -> bool {
    entries_here().any(|entry| entry.counted.load(SeqCst) == 0)
}

fn entries_here() -> impl Iterator<Item = &'static Entry> {
    let database = catalog::my_database();
    let entries = table().map_or(&[][..], |table| &table.entries);
    entries
        .iter()
        .filter(move |entry| entry.database.load(SeqCst) == database)
}

/// These destinations are there in this database and no others: places of others are free once no worker serves them. By
/// each worker that notices.
pub fn forget_but(names: &[&str]) {
    let Some(table) = table() else { return };
    let (database, alive) = (catalog::my_database(), names.iter().map(|name| number_of(name)));
    let alive: Vec<u64> = alive.collect();
    table.lock.with(|| {
        for entry in table
            .entries
            .iter()
            .filter(|entry| entry.database.load(Relaxed) == database)
        {
            if !alive.contains(&entry.name.load(Relaxed)) {
                entry.gone.store(1, Relaxed);
                entry.free_if_over();
            }
        }
    });
}

/// Frees the places of databases that are gone. Launcher only.
pub fn forget_databases_but(alive: &[u32]) {
    let Some(table) = table() else { return };
    table.lock.with(|| {
        for entry in &table.entries {
            if !alive.contains(&entry.database.load(Relaxed)) {
                entry.database.store(0, SeqCst);
            }
        }
    });
}

/// So many messages of a destination of this database have expired that no worker had claimed. By the upkeep.
pub fn expired(destination: &str, count: i64) {
    if let Some(entry) = entry_of(number_of(destination)) {
        entry.dead.fetch_add(count as u64, Relaxed);
        entry.pending.fetch_sub(count, SeqCst);
    }
}

// ---- a session ------------------------------------------------------------------------------------------------------

/// The place of a destination of this database, by its number. No allocation, no error.
fn entry_of(number: u64) -> Option<&'static Entry> {
    let (table, database) = (table()?, catalog::my_database());
    let is_it = |entry: &&Entry| entry.database.load(SeqCst) == database && entry.name.load(SeqCst) == number;
    if let Some(entry) = table.entries.get(LAST.get()).filter(is_it) {
        return Some(entry);
    }
    let index = table.entries.iter().position(|entry| is_it(&entry))?;
    LAST.set(index);
    table.entries.get(index)
}

/// How many messages of a destination wait and may wait; None if it has no limit, or nobody knows how much waits.
pub fn fill_of(number: u64) -> Option<(i64, i64)> {
    let entry = entry_of(number)?;
    let max_pending = entry.max_pending.load(Relaxed);
    let is_limited = max_pending > 0 && entry.counted.load(SeqCst) == 1;
    is_limited.then(|| (entry.pending.load(SeqCst).max(0), max_pending))
}

/// So many more (or fewer) messages of a destination wait. Called in the commit callback: no allocation, no error.
pub fn pending_changed(number: u64, by: i64) {
    if let Some(entry) = entry_of(number) {
        entry.pending.fetch_add(by, SeqCst);
    }
}

/// The extension is new here: nobody knows what waits. Called in the commit callback.
pub fn installed() {
    entries_here().for_each(Entry::forget_pending);
}

/// Whether a destination of this database was counted, and none of its messages waits.
pub fn has_none(destination: &str) -> bool {
    let entry = table().and_then(|table| table.find(catalog::my_database(), number_of(destination)));
    entry.is_some_and(|entry| entry.counted.load(SeqCst) == 1 && entry.pending.load(SeqCst) <= 0)
}

/// [in flight, published, failed, dead, released, published in the last 60 s, reset at in µs, percentiles 50, 95, 99 in ms,
/// pending, how many may be] of a destination of this database; None if nobody counts.
pub fn of(destination: &str) -> Option<Vec<Option<f64>>> {
    let entry = table()?.find(catalog::my_database(), number_of(destination))?;
    let now_s = now_us().div_euclid(1_000_000);
    let of_last_minute = |second: &&Second| (now_s - 60..now_s).contains(&second.second.load(Relaxed));
    let last_minute = entry.seconds.iter().filter(of_last_minute);
    let published_60s: u64 = last_minute.map(|second| second.published.load(Relaxed)).sum();
    let mut took = [0; BUCKETS];
    for (count, counted) in took.iter_mut().zip(&entry.took) {
        *count = counted.load(Relaxed);
    }
    let total = |count: &AtomicU64| Some(count.load(Relaxed) as f64);
    Some(vec![
        Some(entry.in_flight.load(Relaxed) as f64),
        total(&entry.published),
        total(&entry.failed),
        total(&entry.dead),
        total(&entry.released),
        Some(published_60s as f64),
        Some(entry.since_us.load(Relaxed) as f64),
        latency::percentile_ms(&took, 0.5),
        latency::percentile_ms(&took, 0.95),
        latency::percentile_ms(&took, 0.99),
        (entry.counted.load(SeqCst) == 1).then(|| entry.pending.load(SeqCst).max(0) as f64),
        Some(entry.max_pending.load(Relaxed) as f64).filter(|max| *max > 0.0),
    ])
}

/// Asks the workers that serve a destination of this database to look at it anew; who asks wakes them. False if none can hear it.
pub fn request_recheck(destination: &str) -> bool {
    let entry = table().and_then(|table| table.find(catalog::my_database(), number_of(destination)));
    let Some(entry) = entry else { return false };
    entry.recheck_requests.fetch_add(1, SeqCst);
    true
}
