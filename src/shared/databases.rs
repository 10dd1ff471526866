//! The entry of one database in shared memory: why its workers are woken, and the counters that the status view shows.
//! All processes run this code.

use super::lanes::{self, Class, Rewind};
use super::maintenance::MaintenanceState;
use super::requests::RequestSlot;
use super::workers::{self, Worker};
use super::{MAX_DATABASES, floors, launcher, throughput, waiters};
use crate::pg::catalog;
use crate::pg::shmem::{Shareable, Shared};
use outbox_core::partition::Partition;
use outbox_core::settle::Ended;
use outbox_core::throughput::{Throughput, Took};
use std::sync::atomic::{
    AtomicI64, AtomicU32, AtomicU64,
    Ordering::{Relaxed, SeqCst},
};

const BUCKETS: usize = 64;

#[repr(C)]
pub struct Database {
    /// The OID of the database; 0 = the entry is free. Written by the launcher; read by all processes.
    oid: AtomicU32,
    /// Why the launcher runs no worker here; see `Obstacle`. Written by the launcher, and reset by a session that
    /// installs the extension; read by outbox_health.
    obstacle: AtomicU32,
    /// Whether the extension exists: 0 = not known, 1 = yes, 2 = no. Written by the worker that checked; read by the
    /// launcher.
    extension: AtomicU32,
    /// Grows when a message was scheduled. Written at COMMIT; read by workers.
    schedules: AtomicU32,
    /// Grows when waiting messages may have been unblocked: a person changed them, or they expired. Written at COMMIT and
    /// by maintenance; read by workers.
    unblocks: AtomicU32,
    /// Grows when a person changed something, a pause for example. Written at COMMIT; read by workers.
    changes_by_hand: AtomicU32,
    /// Grows when a worker of this database starts, ends or gives partitions back. Written by that worker; read by the
    /// others.
    worker_changes: AtomicU32,
    /// A hash of the settings with which a new session of the worker role starts, as a worker last read them; 0 = not
    /// read yet. Written and read by workers.
    session_defaults: AtomicU64,
    /// 1 = the transactions that were prepared before the shared memory was created are among the open ones. Written
    /// and read by workers.
    adopted: AtomicU32,
    /// Grows when messages ended, or may have ended. Written by workers at settle and by sessions at COMMIT; read by
    /// sessions that wait.
    ends: AtomicU32,
    /// The request of a session to the workers.
    request: RequestSlot,
    /// What one maintenance run leaves to the next.
    maintenance: MaintenanceState,
    /// Whether views search from floors.
    floors: floors::Use,
    /// Grows when messages left the outbox. Written at COMMIT by the session or worker that removed them; read by views
    /// that search from floors.
    moves: AtomicU32,
    /// Grows when the workers are woken, because there may be something to do. Written at the end of a transaction;
    /// read by workers, the launcher and maintenance.
    calls: AtomicU32,
    /// 1 = no worker can be woken, so the next call wakes the launcher. Set by the launcher, cleared by the session
    /// that calls.
    wakes_launcher: AtomicU32,
    /// When the next message that waits for a time is due, in µs since 1970; `i64::MAX` = no message waits for a time.
    /// Written by workers; read by the launcher.
    next_due_us: AtomicI64,
    /// Messages that wait. Sessions add at COMMIT, workers subtract at settle, and maintenance corrects the value when
    /// it counts. Read by the status view.
    pending: AtomicI64,
    /// Dead letters, and those of them that block others. Changed at COMMIT; maintenance corrects the values when it
    /// counts. Read by the status view.
    dead: [AtomicI64; 2],
    /// 1 = dead letters were counted since the shared memory was created. Written by maintenance.
    dead_counted: AtomicU32,
    /// Totals since `reset_at_us`. Written by workers, and by relays at COMMIT; read by the status view.
    published: AtomicU64,
    failed: AtomicU64,
    /// When the totals began, in µs since 1970. Written by the launcher.
    reset_at_us: AtomicI64,
    buckets: [Bucket; BUCKETS],
}

/// One second of the last minute. Written and read by the same processes as the totals.
#[repr(C)]
struct Bucket {
    second: AtomicI64,
    published: AtomicU64,
    failed: AtomicU64,
}

#[repr(C)]
struct Databases([Database; MAX_DATABASES]);

// SAFETY: only atomics and arrays of them; zero is a valid value of each.
unsafe impl Shareable for Databases {}

static DATABASES: Shared<Databases> = Shared::new();

/// The size of this area of shared memory, in bytes.
pub fn bytes() -> usize {
    size_of::<Databases>()
}

/// Attaches this area. Called from the shared memory startup hook.
pub fn attach() {
    DATABASES.attach(c"outbox databases");
}

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
    let oid = catalog::my_database();
    if let Some(database) = database(oid) {
        database.calls.fetch_add(1, SeqCst);
        // One wakeup is enough: the launcher then knows that this database waits.
        if database.wakes_launcher.load(SeqCst) == 1 && database.wakes_launcher.swap(0, SeqCst) == 1 {
            launcher::wake();
        }
    }
    workers::wake(oid);
}

/// Makes the workers of this database check at once which workers are alive and which partitions are free.
pub fn recheck() {
    workers_changed(catalog::my_database());
}

/// Records that a worker of that database starts, ends or gives partitions back, and wakes its workers.
pub fn workers_changed(oid: u32) {
    if let Some(entry) = database(oid) {
        entry.worker_changes.fetch_add(1, SeqCst);
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

/// Registers this process to be woken when messages of its database end, until `waiters::stop`. Returns the number of
/// such events so far. A session misses none if it calls this, then checks, and then waits only while the number is the
/// same.
pub fn ends() -> u32 {
    waiters::wait_in(catalog::my_database());
    my_database().map_or(0, |database| database.ends.load(SeqCst))
}

// ---- entries and counters -------------------------------------------------------------------------------------------

/// The entry of a database, created if it is missing. Called only by the launcher, so that no two processes create one.
pub fn add_database(oid: u32, now_us: i64) -> Option<&'static Database> {
    if let Some(known) = database(oid) {
        return Some(known);
    }
    let free = database(0)?;
    free.extension.store(0, Relaxed);
    free.schedules.store(0, Relaxed);
    free.unblocks.store(0, Relaxed);
    free.adopted.store(0, Relaxed);
    free.session_defaults.store(0, Relaxed);
    free.maintenance.forget();
    free.floors.forget();
    free.next_due_us.store(i64::MAX, Relaxed);
    free.lanes().for_each(Rewind::forget);
    if let Some(throughput) = free.throughput() {
        throughput.forget();
    }
    free.pending.store(0, Relaxed);
    free.forget_dead();
    free.published.store(0, Relaxed);
    free.failed.store(0, Relaxed);
    free.reset_at_us.store(now_us, Relaxed);
    free.oid.store(oid, Relaxed);
    Some(free)
}

/// Frees the entries of databases that no longer exist. Called only by the launcher.
pub fn forget_but(alive: &[u32]) {
    for database in all() {
        if !alive.contains(&database.oid.load(Relaxed)) {
            database.oid.store(0, Relaxed);
        }
    }
}

/// Makes all lanes of a database be read again from this seq, because messages with this seq and higher ones may be
/// visible.
pub fn rewind_all(database: u32, seq: i64) {
    if let Some(entry) = self::database(database) {
        entry.lanes().for_each(|lane| lane.lower(seq));
        entry.floors.doubt();
    }
}

/// The entry of this process's database. None if the library was not preloaded, or before the launcher has seen the
/// database.
pub fn my_database() -> Option<&'static Database> {
    database(catalog::my_database())
}

/// Whether this database has no entry because all are in use.
pub fn lacks_entry() -> bool {
    let has_entry = |oid: &u32| all().iter().any(|database| database.oid.load(Relaxed) == *oid);
    !all().is_empty() && ![catalog::my_database(), 0].iter().any(has_entry)
}

/// The entry of a database.
pub fn database(oid: u32) -> Option<&'static Database> {
    all().iter().find(|database| database.oid.load(Relaxed) == oid)
}

fn all() -> &'static [Database] {
    DATABASES.get().map_or(&[], |databases| &databases.0)
}

impl Database {
    fn index(&self) -> usize {
        let index = all().iter().position(|database| std::ptr::eq(database, self));
        index.unwrap_or(MAX_DATABASES)
    }

    fn lanes(&self) -> impl Iterator<Item = &'static Rewind> {
        lanes::all(self.index())
    }

    fn throughput(&self) -> Option<&'static Throughput> {
        throughput::of(self.index())
    }

    fn lane(&self, class: Class, partition: Partition) -> Option<&'static Rewind> {
        lanes::of(self.index(), class, partition)
    }

    /// Makes a lane be read again from this seq, because a message with it is visible in the partition. Called in the
    /// commit callback.
    pub fn rewind_to(&self, class: Class, partition: Partition, seq: i64) {
        if let Some(lane) = self.lane(class, partition) {
            lane.lower(seq);
        }
    }

    /// Makes `worker` the only reader of the partition from now on.
    pub fn own_lanes(&self, partition: Partition, worker: &Worker) {
        for lane in Class::all().filter_map(|class| self.lane(class, partition)) {
            lane.own(u64::from(worker.entry()));
        }
    }

    /// The entry of the worker that reads a lane, as its index + 1. None if that worker is not in this server, or not
    /// alive.
    pub fn reader_in_server(&self, class: Class, partition: Partition) -> Option<u32> {
        let entry = self.lane(class, partition)?.owner();
        let worker = workers::with_entry(entry)?;
        (worker.is_of(self.oid.load(Relaxed)) && worker.is_in_server()).then_some(entry)
    }

    /// Takes the seq from which the owner must read the lane again, if there is one.
    pub fn take_rewind(&self, class: Class, partition: Partition, worker: &Worker) -> Option<i64> {
        self.lane(class, partition)?.take(u64::from(worker.entry()))
    }

    /// Returns the seq from which the owner must read the lane again, if there is one, without taking it.
    pub fn peek_rewind(&self, class: Class, partition: Partition) -> Option<i64> {
        self.lane(class, partition)?.peek()
    }

    pub fn schedules(&self) -> u32 {
        self.schedules.load(SeqCst)
    }

    pub fn unblocks(&self) -> u32 {
        self.unblocks.load(SeqCst)
    }

    /// Records that messages ended, or that a person changed the waiting messages, and wakes the sessions that wait.
    /// Called in the commit callback, when the change is visible.
    pub fn ended(&self) {
        self.moves.fetch_add(1, SeqCst);
        self.ends.fetch_add(1, SeqCst);
        waiters::wake(self.oid.load(Relaxed));
    }

    pub fn floors(&self) -> &floors::Use {
        &self.floors
    }

    pub fn maintenance(&self) -> &MaintenanceState {
        &self.maintenance
    }

    /// Requests a maintenance run at once: its settings changed, or the messages of a destination are not counted yet.
    pub fn request_maintenance(&self) {
        self.maintenance.request();
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

    pub fn moves(&self) -> u32 {
        self.moves.load(SeqCst)
    }

    pub fn request_slot(&self) -> &RequestSlot {
        &self.request
    }

    pub fn worker_changes(&self) -> u32 {
        self.worker_changes.load(SeqCst)
    }

    /// The number of times that its workers were called. A process that reads it before it checks has seen everything
    /// that those calls were for.
    pub fn calls(&self) -> u32 {
        self.calls.load(SeqCst)
    }

    /// The number of calls, if all its workers have checked since and none has anything to do. Called only by the
    /// launcher.
    pub fn idle_at(&self) -> Option<u32> {
        let calls = self.calls();
        let mut here = workers::in_server_of(self.oid.load(Relaxed)).peekable();
        let some = here.peek().is_some();
        (some && here.all(|worker| worker.is_idle_at(calls))).then_some(calls)
    }

    /// Makes the next call wake the launcher, because no worker can be woken. Returns the number of calls so far.
    /// Called only by the launcher.
    pub fn wake_launcher_on_call(&self) -> u32 {
        self.wakes_launcher.store(1, SeqCst);
        self.calls()
    }

    /// When the next message that waits for a time is due, in µs since 1970; None = no message waits for a time.
    pub fn next_due_us(&self) -> Option<i64> {
        Some(self.next_due_us.load(SeqCst)).filter(|due_us| *due_us < i64::MAX)
    }

    pub fn set_next_due_us(&self, due_us: Option<i64>) {
        self.next_due_us.store(due_us.unwrap_or(i64::MAX), SeqCst);
    }

    pub fn scheduled(&self) {
        self.schedules.fetch_add(1, SeqCst);
    }

    pub fn unblocked(&self) {
        self.unblocks.fetch_add(1, SeqCst);
    }

    pub fn changes_by_hand(&self) -> u32 {
        self.changes_by_hand.load(SeqCst)
    }

    pub fn changed_by_hand(&self) {
        self.changes_by_hand.fetch_add(1, SeqCst);
    }

    /// Whether the prepared transactions that are older than the shared memory are among the open ones.
    pub fn has_adopted(&self) -> bool {
        self.adopted.load(SeqCst) == 1
    }

    pub fn set_adopted(&self) {
        self.adopted.store(1, SeqCst);
    }

    pub fn session_defaults(&self) -> u64 {
        self.session_defaults.load(SeqCst)
    }

    pub fn set_session_defaults(&self, hash: u64) {
        self.session_defaults.store(hash, SeqCst);
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

    /// Counts `count` messages that were enqueued and are committed.
    pub fn enqueued(&self, count: i64) {
        self.pending.fetch_add(count, Relaxed);
    }

    /// Resets the counters, because the extension was just installed: messages of an earlier installation are gone.
    pub fn installed(&self) {
        self.floors.doubt();
        self.pending.store(0, Relaxed);
        self.forget_dead();
    }

    /// Changes the number of dead letters, and of those that block others. Called in the commit callback.
    pub fn dead_changed(&self, by: [i64; 2]) {
        for (count, by) in self.dead.iter().zip(by) {
            count.fetch_add(by, SeqCst);
        }
    }

    /// Dead letters, and those that block others; None = not counted yet.
    pub fn dead(&self) -> Option<[i64; 2]> {
        (self.dead_counted.load(SeqCst) == 1).then(|| self.dead_seen())
    }

    /// The counters of dead letters, even if they were not counted.
    pub fn dead_seen(&self) -> [i64; 2] {
        [0, 1].map(|index| self.dead[index].load(SeqCst))
    }

    /// Takes over what maintenance counted. While dead letters come and go, the count and the counters may both include
    /// the same one. So values that are already known are corrected only if nothing changed since `before`.
    pub fn count_dead(&self, before: [i64; 2], found: [i64; 2]) {
        if self.dead().is_none() || self.dead_seen() == before {
            if before != found {
                self.floors.doubt(); // rows were changed by hand
            }
            self.dead_changed([0, 1].map(|index| found[index] - before[index]));
        }
        self.dead_counted.store(1, SeqCst);
    }

    fn forget_dead(&self) {
        self.dead_counted.store(0, SeqCst);
        self.dead.iter().for_each(|count| count.store(0, SeqCst));
    }

    pub fn pending(&self) -> i64 {
        self.pending.load(Relaxed)
    }

    /// Adds the difference that maintenance found between the waiting messages and their counter.
    pub fn correct_pending(&self, difference: i64) {
        self.pending.fetch_add(difference, Relaxed);
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
        let (published, failed) = (ended.published, ended.failed());
        self.moves.fetch_add(1, SeqCst); // a move to outbox_waiting ends no message, but leaves the outbox
        self.published.fetch_add(published, Relaxed);
        self.failed.fetch_add(failed, Relaxed);
        self.pending.fetch_sub(ended.gone() as i64, Relaxed);
        let second = now_us.div_euclid(1_000_000);
        let bucket = &self.buckets[second.rem_euclid(BUCKETS as i64) as usize];
        if bucket.second.swap(second, Relaxed) != second {
            bucket.published.store(0, Relaxed);
            bucket.failed.store(0, Relaxed);
        }
        bucket.published.fetch_add(published, Relaxed);
        bucket.failed.fetch_add(failed, Relaxed);
        if *ended != Ended::default()
            && let Some(throughput) = self.throughput()
        {
            throughput.count(ended, now_us);
        }
        if ended.gone() > 0 {
            self.ended();
        }
    }

    /// Takes over the delivery times of messages that a broker has confirmed.
    pub fn confirmed(&self, took: &Took, now_us: i64) {
        if let Some(throughput) = self.throughput() {
            throughput.count_times(took, now_us);
        }
    }

    /// The throughput of each recent minute; see `Throughput::shown`.
    pub fn recent_throughput(&self, now_us: i64) -> Option<Vec<Option<f64>>> {
        Some(self.throughput()?.shown(now_us))
    }

    /// The counters of this database, in this order:
    /// - pending, in flight, published, failed, published in the last 60 s, failed in the last 60 s;
    /// - when the totals began, in µs since 1970;
    /// - dead letters, and those that block others; -1 = not counted.
    pub fn counters(&self, now_us: i64) -> [i64; 9] {
        let now_s = now_us.div_euclid(1_000_000);
        let (mut published_60s, mut failed_60s) = (0, 0);
        for bucket in &self.buckets {
            if (now_s - 60..now_s).contains(&bucket.second.load(Relaxed)) {
                published_60s += bucket.published.load(Relaxed);
                failed_60s += bucket.failed.load(Relaxed);
            }
        }
        let [dead, blocking] = self.dead().map_or([-1; 2], |dead| dead.map(|count| count.max(0)));
        [
            self.pending.load(Relaxed),
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
