//! What lies in shared memory: who to wake for which database, and the counters that the status view shows. Every field
//! says who writes it. Nothing here is an authority: the tables are; a lost value costs a poll or a wrong digit.

use crate::pg::shmem::{Shareable, Shared, SharedSlice, Turn, request};
use crate::pg::{bgworker, catalog, latch, xact};
use crate::shared::fastpath::slot;
use crate::shared::maintenance::Kept;
use crate::shared::requests::Ask;
use crate::shared::workers::{MAX_UPKEEP, MAX_WORKERS, Worker};
use crate::shared::{error_groups, floors, passes, statistics, transactions};
use outbox_core::minutes::{Minutes, Took};
use outbox_core::partition::{Partition, crc32};
use outbox_core::settle::Ended;
use std::sync::atomic::{
    AtomicBool, AtomicI32, AtomicI64, AtomicU32, AtomicU64,
    Ordering::{Relaxed, SeqCst},
};

pub const MAX_DATABASES: usize = 128;
const MAX_PARTITIONS: usize = 1024;
const BUCKETS: usize = 64;
const MAX_VACATED: usize = 32;
const CLASSES: usize = 4;

/// Destinations by which word of *reopen* they use: the default one has its own, the others share three.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Class(u8);

impl Class {
    pub fn of(destination: &str) -> Self {
        match destination {
            crate::config::DEFAULT_DESTINATION => Self(0),
            name => Self(1 + (crc32(name) % (CLASSES as u32 - 1)) as u8),
        }
    }

    pub fn all() -> impl Iterator<Item = Self> {
        (0..CLASSES as u8).map(Self)
    }
}

#[repr(C)]
pub struct State {
    /// Process number of the launcher + 1; 0 = none. Written by the launcher.
    pub(super) launcher: AtomicI32,
    /// OID of the role that workers run as. Written by the launcher before it starts one.
    worker_role: AtomicU32,
    /// Grows when a database got the extension, or the databases themselves change. Read by the launcher.
    news: AtomicU32,
    /// How many workers of all databases together find no slot. Written by the launcher.
    missing_slots: AtomicU32,
    /// How many databases wait for a worker of another one to leave. Written by the launcher.
    pub(super) waiting_databases: AtomicU32,
    pub(super) databases: [Database; MAX_DATABASES],
    /// Of who takes or frees a place among the workers.
    pub(super) places_turn: Turn,
    pub(super) workers: [Worker; MAX_WORKERS + MAX_UPKEEP],
    /// Of each database, for each class of destinations, its partitions.
    lanes: [[[Reopen; MAX_PARTITIONS]; CLASSES]; MAX_DATABASES],
    /// Of each database. Written by workers, and by sessions at COMMIT.
    minutes: [Minutes; MAX_DATABASES],
    pub(super) vacated: [Vacated; MAX_VACATED],
}

/// The lowest seq that was committed in a partition since its owner last asked, and who the owner is: its place among the
/// workers + 1 in the upper 16 bits. A worker that lost the partition and does not know it yet takes nothing away.
#[repr(C)]
struct Reopen(AtomicU64);

const SEQ_BITS: u32 = 48;
const NO_SEQ: u64 = (1 << SEQ_BITS) - 1;

#[repr(C)]
pub struct Database {
    /// 0 = free. Written by the launcher.
    pub(super) oid: AtomicU32,
    /// Why the launcher runs no worker here: see `Obstacle`. Written by the launcher.
    obstacle: AtomicU32,
    /// Whether the extension is there: 0 = nobody knows, 1 = yes, 2 = no. Written by the worker that looked.
    extension: AtomicU32,
    /// Grows when a message was scheduled, or a person changed what waits. Written at COMMIT.
    waiting_changes: AtomicU32,
    /// Grows when a person changed something, a pause for example. Written at COMMIT.
    changes_by_hand: AtomicU32,
    /// Grows when a worker of this database starts, ends or gives partitions back. Written by it.
    pub(super) worker_changes: AtomicU32,
    /// Of the settings that a new session of the workers' role starts with, as a worker read them last: a hash, 0 = none did.
    session_defaults: AtomicU64,
    /// 1 = the transactions that were prepared when the memory was made are in the registry. Written by a worker.
    adopted: AtomicU32,
    /// Grows when messages ended, or may have. Written by workers at settle and by sessions at COMMIT.
    ends: AtomicU32,
    /// What a session wants of the workers.
    ask: Ask,
    pub(super) kept: Kept,
    /// Whether views look from floors.
    floors: floors::Use,
    /// Grows when messages left the outbox. Written at COMMIT, by who took them away.
    moves: AtomicU32,
    /// Grows when the workers are woken: there may be something to do. Written at the end of a transaction.
    calls: AtomicU32,
    /// 1 = no worker is there to be woken; the next call wakes the launcher. Written by it, taken away by who calls.
    wakes_launcher: AtomicU32,
    /// When the next message that waits for a time is due, in µs since 1970; `i64::MAX` = none does. Written by workers.
    next_due_us: AtomicI64,
    /// Messages that wait. Producers add at commit, workers subtract at settle, and the upkeep sets it right when it counts.
    pending: AtomicI64,
    /// Dead letters, and those of them that block others. Changed at COMMIT; the upkeep sets them right when it counts.
    dead: [AtomicI64; 2],
    /// 1 = they were counted since the memory was made.
    dead_counted: AtomicU32,
    /// Totals since `reset_at_us`. Written by workers.
    published: AtomicU64,
    failed: AtomicU64,
    reset_at_us: AtomicI64,
    buckets: [Bucket; BUCKETS],
}

/// One second of the last minute. Written by workers.
#[repr(C)]
struct Bucket {
    second: AtomicI64,
    published: AtomicU64,
    failed: AtomicU64,
}

/// A database that a statement needs for itself. Written by the session that runs the statement.
#[repr(C)]
pub struct Vacated {
    /// Process number + 1; 0 = the slot is free.
    pub(super) requester: AtomicI32,
    pub(super) database: AtomicU32,
    /// Nothing presses: its workers are asked to leave, and wait for what is on its way.
    in_order: AtomicBool,
}

// SAFETY: only atomics and arrays of them; zero is a valid value of each.
unsafe impl Shareable for State {}

static STATE: Shared<State> = Shared::new();

/// Of each session, by process number, the database in which it waits for the end of a message; 0 = it does not. Written by
/// the session. One left behind wakes a stranger for nothing.
static WAITERS: SharedSlice<AtomicU32> = SharedSlice::new();

/// Why a database has no worker.
#[derive(Clone, Copy, PartialEq)]
pub enum Obstacle {
    None = 0,
    /// max_worker_processes is used up.
    Slots = 1,
    /// outbox.databases does not name it.
    Excluded = 2,
    /// The worker role is missing or a superuser.
    Role = 3,
    /// There are more databases than slots of max_worker_processes: it is served in turn with others.
    Turns = 4,
    /// The places for workers in shared memory are used up.
    Places = 5,
}

/// Reserves the memory. From `_PG_init`, while preloading.
pub fn init() {
    fn attach() {
        STATE.attach(c"outbox");
        transactions::attach();
        statistics::attach();
        floors::attach();
        error_groups::attach();
        passes::attach();
        slot::attach();
        WAITERS.attach(c"outbox waiters", xact::max_sessions());
    }
    let bytes = || {
        let others = transactions::bytes()
            + statistics::bytes()
            + floors::bytes()
            + error_groups::bytes()
            + passes::bytes()
            + slot::bytes();
        size_of::<State>() + others + xact::max_sessions() * size_of::<AtomicU32>()
    };
    request(bytes, attach);
}

pub fn is_preloaded() -> bool {
    STATE.get().is_some()
}

// ---- waking ---------------------------------------------------------------------------------------------------------

/// Wakes the workers of this database, or the launcher if there is none. Called in the commit callback: no allocation, no
/// error.
pub fn wake_workers() {
    let Some(state) = static_state() else { return };
    let oid = catalog::my_database();
    if let Some(database) = find(state, oid) {
        database.calls.fetch_add(1, SeqCst);
        // Once is enough: it knows then that this database waits.
        if database.wakes_launcher.load(SeqCst) == 1 && database.wakes_launcher.swap(0, SeqCst) == 1 {
            latch::set(state.launcher.load(Relaxed) - 1);
        }
    }
    wake_workers_of(state, oid);
}

pub(super) fn wake_workers_of(state: &State, database: u32) {
    for worker in &state.workers {
        if worker.database.load(Relaxed) == database && !worker.is_upkeep() {
            latch::set(worker.proc_number.load(Relaxed) - 1);
        }
    }
}

/// Tells the launcher to look at the databases. Called in the commit callback.
pub fn wake_launcher() {
    let Some(state) = STATE.get() else { return };
    state.news.fetch_add(1, Relaxed);
    latch::set(state.launcher.load(Relaxed) - 1);
}

/// This process' database got the extension, perhaps with the role: what is known of it holds no more. Called in the
/// commit callback.
pub fn extension_came() {
    if let Some(database) = my_database() {
        database.forget_extension();
        database.set_obstacle(Obstacle::None);
    }
    wake_launcher();
}

/// How much news there was so far.
pub fn news() -> u32 {
    STATE.get().map_or(0, |state| state.news.load(Relaxed))
}

pub fn worker_role() -> u32 {
    STATE.get().map_or(0, |state| state.worker_role.load(Relaxed))
}

pub fn set_worker_role(oid: u32) {
    if let Some(state) = STATE.get() {
        state.worker_role.store(oid, Relaxed);
    }
}

pub fn missing_slots() -> u32 {
    STATE.get().map_or(0, |state| state.missing_slots.load(Relaxed))
}

pub fn set_missing_slots(count: u32) {
    if let Some(state) = STATE.get() {
        state.missing_slots.store(count, Relaxed);
    }
}

/// So many databases wait for the worker of another one to leave.
pub fn set_waiting_databases(count: u32) {
    if let Some(state) = STATE.get() {
        state.waiting_databases.store(count, SeqCst);
    }
}

pub fn launcher_starts() {
    if let Some(state) = STATE.get() {
        state.launcher.store(latch::my_proc_number() + 1, SeqCst);
    }
    bgworker::on_exit(launcher_ends);
}

unsafe extern "C-unwind" fn launcher_ends(_code: i32, _arg: pgrx::pg_sys::Datum) {
    if let Some(state) = STATE.get() {
        state.launcher.store(0, SeqCst);
    }
}

pub(super) fn static_state() -> Option<&'static State> {
    static HOLD: &Shared<State> = &STATE;
    HOLD.get()
}

// ---- a database for itself ------------------------------------------------------------------------------------------

// A worker takes its place and then looks whether the database is vacated; a session vacates it and then looks for
// workers. Sequentially consistent, so at least one of them sees the other.

/// From here until `let_back` the launcher lets the workers of this database end and starts none; `in_order`: it asks them to
/// leave, and sends no signal. False when there is no shared memory, or no slot left in it.
pub fn vacate(database: u32, in_order: bool) -> bool {
    let Some(state) = STATE.get() else { return false };
    let me = latch::my_proc_number() + 1;
    let free = |vacated: &&Vacated| vacated.requester.compare_exchange(0, me, Relaxed, Relaxed).is_ok();
    let Some(slot) = state.vacated.iter().find(free) else {
        return false;
    };
    slot.in_order.store(in_order, SeqCst);
    slot.database.store(database, SeqCst);
    wake_launcher();
    true
}

pub fn is_vacated(database: u32) -> bool {
    is_vacated_by(database, |_| true)
}

/// Whether a session waits for the end of the workers that does not leave them the time for what is on its way.
pub fn is_pressed(database: u32) -> bool {
    is_vacated_by(database, |vacated| !vacated.in_order.load(SeqCst))
}

fn is_vacated_by(database: u32, fits: impl Fn(&Vacated) -> bool) -> bool {
    let is_it = |vacated: &Vacated| vacated.database.load(SeqCst) == database && fits(vacated);
    STATE.get().is_some_and(|state| state.vacated.iter().any(is_it))
}

/// This process needs no database for itself any more. Called at the end of a transaction: no allocation, no error.
pub fn let_back() {
    let Some(state) = STATE.get() else { return };
    let me = latch::my_proc_number() + 1;
    for vacated in state.vacated.iter().filter(|v| v.requester.load(Relaxed) == me) {
        vacated.database.store(0, SeqCst);
        vacated.requester.store(0, SeqCst);
    }
    wake_launcher();
}

// ---- waiting for the end of a message -------------------------------------------------------------------------------

/// From here until `stop_waiting` this process is woken when messages of its database end. Returns how often that was so
/// far: who asks, then looks, then waits only if the number is the same, misses none.
pub fn ends() -> u32 {
    if let Some(waiter) = my_waiter() {
        waiter.store(catalog::my_database(), SeqCst);
    }
    my_database().map_or(0, |database| database.ends.load(SeqCst))
}

/// Called at the end of a transaction: no allocation, no error.
pub fn stop_waiting() {
    if let Some(waiter) = my_waiter() {
        waiter.store(0, Relaxed);
    }
}

fn my_waiter() -> Option<&'static AtomicU32> {
    static HOLD: &SharedSlice<AtomicU32> = &WAITERS;
    HOLD.get()?.get(usize::try_from(latch::my_proc_number()).ok()?)
}

// ---- databases and counters -----------------------------------------------------------------------------------------

/// The place of a database, made if missing. Launcher only (so that no two processes make one).
pub fn add_database(oid: u32, now_us: i64) -> Option<&'static Database> {
    let state = static_state()?;
    if let Some(known) = find(state, oid) {
        return Some(known);
    }
    let free = find(state, 0)?;
    free.extension.store(0, Relaxed);
    free.waiting_changes.store(0, Relaxed);
    free.adopted.store(0, Relaxed);
    free.session_defaults.store(0, Relaxed);
    free.kept.forget();
    free.floors.forget();
    free.next_due_us.store(i64::MAX, Relaxed);
    free.lanes(state).iter().flatten().for_each(Reopen::forget);
    if let Some(minutes) = free.minutes(state) {
        minutes.forget();
    }
    free.pending.store(0, Relaxed);
    free.forget_dead();
    free.published.store(0, Relaxed);
    free.failed.store(0, Relaxed);
    free.reset_at_us.store(now_us, Relaxed);
    free.oid.store(oid, Relaxed);
    Some(free)
}

/// Frees the places of databases that are gone. Launcher only.
pub fn forget_databases_but(alive: &[u32]) {
    let Some(state) = STATE.get() else { return };
    for database in &state.databases {
        if !alive.contains(&database.oid.load(Relaxed)) {
            database.oid.store(0, Relaxed);
        }
    }
}

/// Messages with this seq and higher ones may be visible in a database: read all its partitions again from there.
pub fn reopen_all(database: u32, seq: i64) {
    if let Some(state) = static_state()
        && let Some(place) = find(state, database)
    {
        place.lanes(state).iter().flatten().for_each(|lane| lane.lower(seq));
        place.floors.doubt();
    }
}

/// The place of this process' database; None when not preloaded, or before the launcher has seen it.
pub fn my_database() -> Option<&'static Database> {
    find(static_state()?, catalog::my_database())
}

/// Whether this database has no place because all are taken.
pub fn lacks_place() -> bool {
    static_state().is_some_and(|state| {
        [catalog::my_database(), 0]
            .iter()
            .all(|oid| find(state, *oid).is_none())
    })
}

/// The place of a database.
pub fn database(oid: u32) -> Option<&'static Database> {
    find(static_state()?, oid)
}

fn find(state: &'static State, oid: u32) -> Option<&'static Database> {
    state
        .databases
        .iter()
        .find(|database| database.oid.load(Relaxed) == oid)
}

impl Reopen {
    fn forget(&self) {
        self.0.store(NO_SEQ, SeqCst);
    }

    /// A message with this seq is visible now.
    fn lower(&self, seq: i64) {
        let seq = u64::try_from(seq).unwrap_or(0).min(NO_SEQ - 1); // a lower one than meant only costs a look
        self.change(|owner, known| Some((owner, known.min(seq))));
    }

    fn own(&self, worker: u64) {
        self.change(|_, known| Some((worker, known)));
    }

    fn take(&self, worker: u64) -> Option<i64> {
        let before = self.change(|owner, _| (owner == worker).then_some((owner, NO_SEQ)))?;
        let seq = before & NO_SEQ;
        (seq != NO_SEQ).then_some(seq as i64)
    }

    fn change(&self, to: impl Fn(u64, u64) -> Option<(u64, u64)>) -> Option<u64> {
        let changed = self.0.fetch_update(SeqCst, SeqCst, |word| {
            to(word >> SEQ_BITS, word & NO_SEQ).map(|(owner, seq)| owner << SEQ_BITS | seq)
        });
        changed.ok()
    }
}

impl Database {
    fn index(&self, state: &'static State) -> Option<usize> {
        (state.databases.iter()).position(|database| std::ptr::eq(database, self))
    }

    fn lanes(&self, state: &'static State) -> &'static [[Reopen; MAX_PARTITIONS]] {
        (self.index(state))
            .and_then(|index| state.lanes.get(index))
            .map_or(&[], |lanes| lanes.as_slice())
    }

    fn minutes(&self, state: &'static State) -> Option<&'static Minutes> {
        state.minutes.get(self.index(state)?)
    }

    fn lane(&self, class: Class, partition: Partition) -> Option<&'static Reopen> {
        let lanes = self.lanes(static_state()?).get(usize::from(class.0))?;
        lanes.get(usize::from(partition.index()))
    }

    /// A message with this seq is visible in the partition: read again from there. Called in the commit callback.
    pub fn reopen(&self, class: Class, partition: Partition, seq: i64) {
        if let Some(lane) = self.lane(class, partition) {
            lane.lower(seq);
        }
    }

    /// From now on `worker` reads the partition, and nobody else.
    pub fn own_lanes(&self, partition: Partition, worker: &Worker) {
        for lane in Class::all().filter_map(|class| self.lane(class, partition)) {
            lane.own(u64::from(worker.place()));
        }
    }

    /// The place + 1 of the worker that reads a lane, if it is in this server and alive.
    pub fn reader_in_server(&self, class: Class, partition: Partition) -> Option<u32> {
        let place = (self.lane(class, partition)?.0.load(SeqCst) >> SEQ_BITS) as u32;
        let worker = static_state()?.workers.get((place as usize).checked_sub(1)?)?;
        let is_here = worker.database.load(SeqCst) == self.oid.load(Relaxed) && worker.is_in_server();
        is_here.then_some(place)
    }

    /// From which seq on its owner must read the partition again, if so.
    pub fn take_reopen(&self, class: Class, partition: Partition, worker: &Worker) -> Option<i64> {
        self.lane(class, partition)?.take(u64::from(worker.place()))
    }

    /// The same, left there.
    pub fn look_at_reopen(&self, class: Class, partition: Partition) -> Option<i64> {
        let seq = self.lane(class, partition)?.0.load(SeqCst) & NO_SEQ;
        (seq != NO_SEQ).then_some(seq as i64)
    }

    pub fn waiting_changes(&self) -> u32 {
        self.waiting_changes.load(SeqCst)
    }

    /// Messages ended, or a person changed what waits, and it is visible. Called in the commit callback.
    pub fn ended(&self) {
        self.moves.fetch_add(1, SeqCst);
        self.ends.fetch_add(1, SeqCst);
        let oid = self.oid.load(Relaxed);
        for (number, waiter) in WAITERS.get().unwrap_or_default().iter().enumerate() {
            if waiter.load(SeqCst) == oid {
                latch::set(number as i32);
            }
        }
    }

    pub fn floors(&self) -> &floors::Use {
        &self.floors
    }

    pub fn moves(&self) -> u32 {
        self.moves.load(SeqCst)
    }

    pub fn ask(&self) -> &Ask {
        &self.ask
    }

    pub fn worker_changes(&self) -> u32 {
        self.worker_changes.load(SeqCst)
    }

    /// How often its workers were called. Who reads it before it looks has seen all that those calls were for.
    pub fn calls(&self) -> u32 {
        self.calls.load(SeqCst)
    }

    /// How often its workers were called, if they all have looked since and none has anything to do. Launcher only.
    pub fn idle_at(&self) -> Option<u32> {
        let (calls, oid) = (self.calls(), self.oid.load(Relaxed));
        let workers = static_state()?.workers.iter();
        let in_server = |worker: &&Worker| worker.database.load(SeqCst) == oid && worker.is_in_server();
        let mut here = workers.filter(in_server).peekable();
        let some = here.peek().is_some();
        (some && here.all(|worker| worker.idle_at.load(SeqCst) == u64::from(calls))).then_some(calls)
    }

    /// No worker is there: whoever calls next wakes the launcher. Returns how often they were called before. Launcher only.
    pub fn listen(&self) -> u32 {
        self.wakes_launcher.store(1, SeqCst);
        self.calls()
    }

    /// When the next message that waits for a time is due; None = none does.
    pub fn next_due_us(&self) -> Option<i64> {
        Some(self.next_due_us.load(SeqCst)).filter(|due_us| *due_us < i64::MAX)
    }

    pub fn set_next_due_us(&self, due_us: Option<i64>) {
        self.next_due_us.store(due_us.unwrap_or(i64::MAX), SeqCst);
    }

    pub fn waiting_changed(&self) {
        self.waiting_changes.fetch_add(1, SeqCst);
    }

    pub fn changes_by_hand(&self) -> u32 {
        self.changes_by_hand.load(SeqCst)
    }

    pub fn changed_by_hand(&self) {
        self.changes_by_hand.fetch_add(1, SeqCst);
    }

    /// Whether the prepared transactions that are older than the memory are in the registry.
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
            4 => Some("turns"),
            5 => Some("places"),
            _ => None,
        }
    }

    /// `count` messages were enqueued and are committed.
    pub fn enqueued(&self, count: i64) {
        self.pending.fetch_add(count, Relaxed);
    }

    /// The extension is new here: whatever waited for an earlier one is gone.
    pub fn installed(&self) {
        self.floors.doubt();
        self.pending.store(0, Relaxed);
        self.forget_dead();
    }

    /// So many more dead letters, or fewer, and so many of them that block others. Called in the commit callback.
    pub fn dead_changed(&self, by: [i64; 2]) {
        for (count, by) in self.dead.iter().zip(by) {
            count.fetch_add(by, SeqCst);
        }
    }

    /// Dead letters, and those that block others; None = nobody has counted them.
    pub fn dead(&self) -> Option<[i64; 2]> {
        (self.dead_counted.load(SeqCst) == 1).then(|| self.dead_seen())
    }

    pub fn dead_seen(&self) -> [i64; 2] {
        [0, 1].map(|index| self.dead[index].load(SeqCst))
    }

    /// The upkeep counted so many. While they come and go a count may see one and the counter too, so what is known already
    /// is set right only if nothing changed since `before`.
    pub fn count_dead(&self, before: [i64; 2], found: [i64; 2]) {
        if self.dead().is_none() || self.dead_seen() == before {
            if before != found {
                self.floors.doubt(); // somebody wrote by hand
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

    /// The upkeep counted the messages that wait and found the counter off by so many.
    pub fn correct_pending(&self, difference: i64) {
        self.pending.fetch_add(difference, Relaxed);
    }

    pub fn set_extension(&self, present: bool) {
        self.extension.store(if present { 1 } else { 2 }, Relaxed);
    }

    /// Nobody knows any more.
    pub fn forget_extension(&self) {
        self.extension.store(0, Relaxed);
    }

    pub fn has_extension(&self) -> bool {
        self.extension.load(Relaxed) == 1
    }

    pub fn lacks_extension(&self) -> bool {
        self.extension.load(Relaxed) == 2
    }

    /// A worker or a relay settled. Called in the commit callback.
    pub fn settled(&self, ended: &Ended, now_us: i64) {
        let (published, failed) = (ended.published, ended.failed());
        self.moves.fetch_add(1, SeqCst); // what goes aside ends nothing, and leaves the outbox all the same
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
            && let Some(minutes) = static_state().and_then(|state| self.minutes(state))
        {
            minutes.count(ended, now_us);
        }
        if ended.gone() > 0 {
            self.ended();
        }
    }

    /// Takes over how long messages took that a broker has confirmed.
    pub fn confirmed(&self, took: &mut Took, now_us: i64) {
        if let Some(minutes) = static_state().and_then(|state| self.minutes(state)) {
            minutes.count_times(took, now_us);
        }
    }

    /// See `Minutes::shown`.
    pub fn throughput(&self, now_us: i64) -> Option<Vec<Option<f64>>> {
        Some(self.minutes(static_state()?)?.shown(now_us))
    }

    /// [pending, in flight, published, failed, published in the last 60 s, failed in the last 60 s, reset at in µs, dead letters,
    /// those of them that block others; -1 = not counted].
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
        let oid = self.oid.load(Relaxed);
        let in_flight: u32 = static_state()
            .map(|s| {
                s.workers
                    .iter()
                    .filter(|w| w.database.load(Relaxed) == oid)
                    .map(|w| w.in_flight.load(Relaxed))
                    .sum()
            })
            .unwrap_or(0);
        [
            self.pending.load(Relaxed),
            i64::from(in_flight),
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
