//! The entry of one database in shared memory: why its workers are woken, from where its lanes are read again, and the
//! counters that views show. All processes run this code.

use super::fields::{EventCount, Flag, Highest, OptionalI64, RowCount};
use super::floors::ViewFloors;
use super::maintenance_state::MaintenanceState;
use super::requests::RequestSlot;
use super::rewinds::{LaneRewinds, Rewind};
use super::workers::{self, WorkerEntry};
use super::{MAX_DATABASES, free_but, launcher, sessions};
use crate::pg::catalog;
use crate::pg::shmem::{Shareable, SharedStruct, SpinLock};
use outbox_core::partition::Partition;
use outbox_core::settle::Ended;
use outbox_core::throughput::{LastMinute, Throughput};
use outbox_worker::rewinds::RewindLane;
use std::sync::atomic::{
    AtomicI64, AtomicU32, AtomicU64,
    Ordering::{Relaxed, SeqCst},
};

#[repr(C)]
pub struct DatabaseEntry {
    /// The OID of the database; 0 = the entry is free. Written by the launcher, under the lock; read by all processes.
    oid: AtomicU32,
    /// Why the launcher runs no worker here; see `Obstacle`. Written by the launcher, and reset by a session that
    /// installs the extension; read by outbox_health.
    obstacle: AtomicU32,
    /// Whether the extension exists: 0 = not known, 1 = yes, 2 = no. Written by the worker that checked; read by the
    /// launcher.
    extension: AtomicU32,
    /// A message was scheduled, or an operator changed something. Written at COMMIT; read by workers.
    pub schedules: EventCount,
    /// An operator changed something, a pause for example. Written at COMMIT; read by workers.
    pub changes_by_hand: EventCount,
    /// A worker of this database starts, ends or gives partitions back. Written by that worker; read by the others.
    pub worker_changes: EventCount,
    /// A hash of the settings with which a new session of the worker role starts, as a worker last read them; 0 = not
    /// read yet. Written and read by workers.
    pub session_defaults: AtomicU64,
    /// The transactions that were prepared before the shared memory was created are among the open ones. Written and
    /// read by workers.
    pub adopted: Flag,
    /// Messages ended, or may have ended. Written by workers at settle and by sessions at COMMIT; read by sessions that
    /// wait.
    ends: EventCount,
    /// The request of a session to the workers.
    pub request: RequestSlot,
    /// What one maintenance run leaves to the next.
    pub maintenance: MaintenanceState,
    /// From where views search.
    pub floors: ViewFloors,
    /// Messages left the outbox. Written at COMMIT by the session or worker that removed them; read by views that
    /// search from floors.
    pub moves: EventCount,
    /// The workers are woken, because there may be something to do. Written at the end of a transaction; read by
    /// workers, the launcher and maintenance. A process that reads it before it checks has seen everything that those
    /// calls were for.
    pub calls: EventCount,
    /// No worker can be woken, so the next call wakes the launcher. Set by the launcher, cleared by the session that
    /// calls.
    wakes_launcher: Flag,
    /// When the next message that waits for a time is due, in µs since 1970. Written by workers; read by the launcher.
    pub next_due_us: OptionalI64,
    /// Messages that wait. Sessions add at COMMIT, workers subtract at settle. Read by workers and the status view.
    pub pending: RowCount,
    /// No message with a higher seq waits. Sessions raise it when they insert one, and maintenance when it has counted all.
    /// Read by sessions that enqueue: a seq above it need not be looked for.
    pub highest: Highest,
    /// Dead letters, and those of them that block others. Changed at COMMIT. Read by the status view.
    pub dead: [RowCount; 2],
    /// Totals since `reset_at_us`. Written by workers, and by relays at COMMIT; read by the status view.
    published: AtomicU64,
    failed: AtomicU64,
    /// When the totals began, in µs since 1970. Written by the process that took the entry.
    reset_at_us: AtomicI64,
    /// Written by the same processes as the totals; read by the status view.
    last_minute: LastMinute,
    /// Written by the same processes as the totals; read by outbox_throughput.
    pub throughput: Throughput,
    /// From where each lane is read again, and from where on blocking messages may be gone.
    lanes: LaneRewinds,
}

#[repr(C)]
pub(super) struct Databases {
    /// Held by a process that takes or frees an entry.
    lock: SpinLock,
    entries: [DatabaseEntry; MAX_DATABASES],
}

// SAFETY: only atomics and arrays of them; zero is a valid value of each.
unsafe impl Shareable for DatabaseEntry {}
// SAFETY: as for its entries.
unsafe impl Shareable for Databases {}

pub(super) static AREA: SharedStruct<Databases> = SharedStruct::new(c"outbox databases");

/// Why a database has no worker.
#[derive(Clone, Copy, PartialEq)]
pub enum Obstacle {
    None = 0,
    /// All worker slots are in use (max_worker_processes).
    Slots = 1,
    /// outbox.databases does not name the database.
    Excluded = 2,
    /// The worker role does not exist, or is a superuser.
    Role = 3,
    /// There are more databases than worker slots, so the databases are served in turn.
    TimeSlices = 4,
    /// All entries for workers in shared memory are in use.
    Entries = 5,
}

// ---- waking ---------------------------------------------------------------------------------------------------------

/// Wakes the workers of this database, or the launcher if there are none. Called in the commit callback, so it neither
/// allocates nor raises an error.
pub fn wake_workers() {
    wake_workers_of(catalog::my_database());
}

pub(super) fn wake_workers_of(oid: u32) {
    if let Some(database) = database(oid) {
        database.calls.advance();
        // One wakeup is enough: the launcher then knows that this database waits.
        if database.wakes_launcher.take() {
            launcher::wake();
        }
    }
    workers::wake(oid);
}

/// Makes the workers of this database check immediately which workers are alive and which partitions are free.
pub fn recheck() {
    workers_changed(catalog::my_database());
}

/// Records that a worker of that database starts, ends or gives partitions back, and wakes its workers.
pub fn workers_changed(oid: u32) {
    if let Some(entry) = database(oid) {
        entry.worker_changes.advance();
    }
    workers::wake(oid);
}

/// Records that the database of this session got the extension, perhaps with the worker role. What was known of the
/// database is void. Called in the commit callback.
pub fn extension_came() {
    if let Some(database) = my_database() {
        database.forget_extension();
        database.set_obstacle(Obstacle::None);
    }
    launcher::notify();
}

/// Registers this process to be woken when messages of its database end, until its transaction ends. Returns the number
/// of such events so far. A session misses none if it calls this, then checks, and then waits only while the number is
/// the same.
pub fn ends() -> u32 {
    sessions::wait_in(catalog::my_database());
    my_database().map_or(0, |database| database.ends.read())
}

// ---- entries and counters -------------------------------------------------------------------------------------------

/// The entry of a database, created if it is missing.
pub fn add_database(oid: u32, now_us: i64) -> Option<&'static DatabaseEntry> {
    let databases = AREA.get()?;
    database(oid).or_else(|| databases.lock.with(|| databases.entry(oid, now_us)))
}

impl Databases {
    /// The entry of a database, created if it is missing. The caller holds the lock.
    fn entry(&self, oid: u32, now_us: i64) -> Option<&DatabaseEntry> {
        let find = |oid: u32| self.entries.iter().find(|entry| entry.oid.load(SeqCst) == oid);
        find(oid).or_else(|| {
            let free = find(0)?;
            free.clear();
            free.lanes.iter().for_each(Rewind::forget);
            free.reset_at_us.store(now_us, Relaxed);
            free.oid.store(oid, SeqCst);
            Some(free)
        })
    }
}

/// Frees the entries of databases that no longer exist. Called only by the launcher.
pub fn forget_but(alive: &[u32]) {
    if let Some(databases) = AREA.get() {
        let oids = databases.entries.iter().map(|entry| &entry.oid);
        free_but(&databases.lock, oids, alive);
    }
}

/// Makes all lanes of a database be read again from this seq, because messages with this seq and higher ones may be
/// visible.
pub fn rewind_all(database: u32, seq: i64) {
    if let Some(entry) = self::database(database) {
        entry.lanes.iter().for_each(|lane| lane.lower(seq));
        entry.floors.doubt();
    }
}

/// The entry of this process's database. None if the library was not preloaded, or before the launcher has seen the
/// database.
pub fn my_database() -> Option<&'static DatabaseEntry> {
    database(catalog::my_database())
}

/// The OIDs of the other databases of which a worker knows that they have the extension.
pub fn others() -> impl Iterator<Item = u32> {
    let with_extension = all().iter().filter(|database| database.has_extension());
    let oids = with_extension.map(|database| database.oid.load(SeqCst));
    oids.filter(|oid| ![catalog::my_database(), 0].contains(oid))
}

/// Whether this database has no entry because all are in use.
pub fn lacks_entry() -> bool {
    let has_entry = |oid: &u32| all().iter().any(|database| database.oid.load(Relaxed) == *oid);
    !all().is_empty() && ![catalog::my_database(), 0].iter().any(has_entry)
}

/// The entry of a database.
pub fn database(oid: u32) -> Option<&'static DatabaseEntry> {
    all().iter().find(|database| database.oid.load(SeqCst) == oid)
}

fn all() -> &'static [DatabaseEntry] {
    AREA.get().map_or(&[], |databases| &databases.entries)
}

impl DatabaseEntry {
    /// Makes a lane be read again from this seq, because a message with it is visible in the partition. Called in the
    /// commit callback.
    pub fn rewind_to(&self, lane: RewindLane, partition: Partition, seq: i64) {
        self.lanes.of(lane, partition).lower(seq);
    }

    /// Makes `worker` the only reader of the partition from now on.
    pub fn own_lanes(&self, partition: Partition, worker: &WorkerEntry) {
        for lane in RewindLane::all(partition).chain([RewindLane::UNBLOCKED]) {
            self.lanes.of(lane, partition).own(u64::from(worker.entry()));
        }
    }

    /// The entry of the worker that reads a lane, as its index + 1. None if that worker is not in this server, or not
    /// alive.
    pub fn reader_in_server(&self, lane: RewindLane, partition: Partition) -> Option<u32> {
        let entry = self.lanes.of(lane, partition).owner();
        let worker = workers::with_entry(entry)?;
        (worker.is_of(self.oid.load(Relaxed)) && worker.is_in_server()).then_some(entry)
    }

    /// Takes the seq from which the owner must read the lane again, if there is one.
    pub fn take_rewind(&self, lane: RewindLane, partition: Partition, worker: &WorkerEntry) -> Option<i64> {
        self.lanes.of(lane, partition).take(u64::from(worker.entry()))
    }

    /// Returns the seq from which the owner must read the lane again, if there is one, without taking it.
    pub fn peek_rewind(&self, lane: RewindLane, partition: Partition) -> Option<i64> {
        self.lanes.of(lane, partition).peek()
    }

    /// Records that messages ended, or that an operator changed the waiting messages, and wakes the sessions that wait.
    /// Called in the commit callback, when the change is visible.
    pub fn ended(&self) {
        self.moves.advance();
        self.ends.advance();
        sessions::wake(self.oid.load(Relaxed));
    }

    /// Requests an immediate maintenance run: its settings changed, or the messages of a destination are not counted
    /// yet.
    pub fn request_maintenance(&self) {
        self.maintenance.requested.set();
        launcher::wake();
    }

    /// Records when a message that was just enqueued expires, in µs since 1970. Called in the commit callback, so it
    /// neither allocates nor raises an error.
    pub fn expires_at(&self, us: i64) {
        // The search for the earlier expiry also meets the later one.
        if self.maintenance.expires_us.lower(us) {
            launcher::wake();
        }
    }

    /// The number of calls, if all its workers have checked since and none has anything to do. Called only by the
    /// launcher.
    pub fn idle_at(&self) -> Option<u32> {
        let calls = self.calls.read();
        let mut here = workers::in_server_of(self.oid.load(Relaxed)).peekable();
        let some = here.peek().is_some();
        (some && here.all(|worker| worker.is_idle_at(calls))).then_some(calls)
    }

    /// Makes the next call wake the launcher, because no worker can be woken. Returns the number of calls so far.
    /// Called only by the launcher.
    pub fn wake_launcher_on_call(&self) -> u32 {
        self.wakes_launcher.set();
        self.calls.read()
    }

    pub fn set_next_due_us(&self, due_us: Option<i64>) {
        self.next_due_us.set(due_us);
    }

    pub fn set_obstacle(&self, obstacle: Obstacle) {
        self.obstacle.store(obstacle as u32, Relaxed);
    }

    pub fn obstacle(&self) -> Option<&'static str> {
        match self.obstacle.load(Relaxed) {
            1 => Some("slots"),
            2 => Some("excluded"),
            3 => Some("role"),
            4 => Some("time slices"),
            5 => Some("entries"),
            _ => None,
        }
    }

    /// Resets the counters, because the extension was just installed: messages of an earlier installation are gone.
    pub fn installed(&self) {
        self.floors.doubt();
        self.pending.forget();
        self.highest.forget();
        self.dead.iter().for_each(RowCount::forget);
        self.maintenance.answers().iter().for_each(|answer| answer.set(None, 0));
    }

    pub fn set_extension(&self, present: bool) {
        self.extension.store(if present { 1 } else { 2 }, Relaxed);
    }

    /// Marks the extension as not known, so that a worker checks for it again.
    pub fn forget_extension(&self) {
        self.extension.store(0, Relaxed);
    }

    pub fn has_extension(&self) -> bool {
        self.extension.load(Relaxed) == 1
    }

    pub fn lacks_extension(&self) -> bool {
        self.extension.load(Relaxed) == 2
    }

    /// Counts what a worker, a relay or maintenance settled. Called in the commit callback of a relay.
    pub fn settled(&self, ended: &Ended, now_us: i64) {
        self.moves.advance(); // a move to outbox_waiting ends no message, but leaves the outbox
        self.published.fetch_add(ended.published, Relaxed);
        self.failed.fetch_add(ended.failed(), Relaxed);
        self.pending.add(-(ended.gone() as i64));
        if *ended != Ended::default() {
            self.last_minute.count(ended, now_us);
            self.throughput.count(ended, now_us);
        }
        if ended.gone() > 0 {
            self.ended();
        }
    }

    /// The counters of this database, in this order:
    /// - pending, in flight, published, failed, published in the last 60 s, failed in the last 60 s;
    /// - when the totals began, in µs since 1970;
    /// - dead letters, and those that block others; -1 = not counted.
    pub fn counters(&self, now_us: i64) -> [i64; 9] {
        let [published_60s, failed_60s] = self.last_minute.sum(now_us);
        let [dead, blocking] = self
            .dead
            .each_ref()
            .map(|dead| dead.get().map_or(-1, |count| count.max(0)));
        [
            self.pending.uncertain(),
            i64::from(workers::in_flight(self.oid.load(Relaxed))),
            self.published.load(Relaxed) as i64,
            self.failed.load(Relaxed) as i64,
            published_60s as i64,
            failed_60s as i64,
            self.reset_at_us.load(Relaxed),
            dead,
            blocking,
        ]
    }
}
