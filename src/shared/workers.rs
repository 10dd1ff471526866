//! The places of workers in shared memory: who runs in which database, under which number. A place is taken once: a
//! process that finds its database and number taken does not start, and neither does one that finds no free place. Taken
//! and freed by the worker, or by the session of a worker outside the server; read by the launcher and by all sessions.

use super::requests::Answer;
use super::{MAX_WORKERS, launcher, passes};
use crate::pg::shmem::{Shareable, Shared, SpinLock};
use crate::pg::{bgworker, catalog, latch, signals};
use outbox_transport::Deadline;
use outbox_worker::Report;
use std::sync::atomic::{
    AtomicI32, AtomicU32, AtomicU64,
    Ordering::{Relaxed, SeqCst},
};

/// The most of them that workers outside the server may take: the others are for those inside.
pub const MAX_OUTSIDE: usize = MAX_WORKERS / 2;
/// Processes of the upkeep that may run at a time, in places beyond those of workers.
pub const MAX_MAINTENANCE: usize = 8;

/// One running worker. Written by the worker, but for `leave`.
#[repr(C)]
pub struct Worker {
    /// 0 = it serves none any more. Written in turn; read by who wakes workers, and by who wants to know who is there.
    database: AtomicU32,
    /// Process number + 1; 0 = the place is free. Written in turn; read by who wakes it.
    proc_number: AtomicI32,
    /// Read by who sends it a signal.
    pid: AtomicI32,
    /// Messages that it has claimed and not settled. Read by the status view.
    in_flight: AtomicU32,
    /// server-N is its name; OUTSIDE = it is the session of a worker outside the server; UPKEEP. Read as `database`.
    number: AtomicU32,
    /// What it says to the session that asks.
    answer: Answer,
    /// Of the `calls` of its database, how many there were when it last began to look and found nothing to do; BUSY = there
    /// is something. Read by the launcher.
    idle_at: AtomicU64,
    /// Until when its leases last at least, by the clock of `Deadline`, which no wall clock moves; 0 = it has had none. Read by
    /// workers that find the leases run out.
    leases_until_ns: AtomicU64,
    /// STAY, LEAVE or END. Written by the launcher, and by a session that needs the database for itself; read by the worker.
    leave: AtomicU32,
}

#[repr(C)]
struct Entries {
    /// Of who takes or frees a place.
    lock: SpinLock,
    workers: [Worker; MAX_WORKERS + MAX_MAINTENANCE],
}

// SAFETY: only atomics and arrays of them; zero is a valid value of each.
unsafe impl Shareable for Entries {}

static ENTRIES: Shared<Entries> = Shared::new();

const BUSY: u64 = u64::MAX;
/// The number of all workers outside the server: the launcher did not start them, and sessions ask nothing of them.
pub(super) const OUTSIDE: u32 = u32::MAX;
/// The number of the process that does the upkeep of a database. It delivers nothing.
pub const MAINTENANCE: u32 = u32::MAX - 1;

const STAY: u32 = 0;
/// It shall leave in order.
const LEAVE: u32 = 1;
/// SIGTERM was sent to it; one is enough.
const END: u32 = 2;

/// Why a process got no place.
pub enum NoEntry {
    /// The process with this id is that worker already.
    Taken(i32),
    /// All places are taken.
    Full,
}

/// A worker in the server, or an upkeep process, as its place tells.
pub struct Found {
    pub database: u32,
    pub number: u32,
    pub pid: i32,
    /// It was asked to leave or to end.
    pub leaves: bool,
}

/// Shared memory that is needed, in bytes.
pub fn bytes() -> usize {
    size_of::<Entries>()
}

/// In the startup hook.
pub fn attach() {
    ENTRIES.attach(c"outbox workers");
}

fn all() -> &'static [Worker] {
    ENTRIES.get().map_or(&[], |entries| &entries.workers)
}

/// The name of a worker in the server, in outbox_workers and as the owner of leases.
pub fn id_of(number: u32) -> String {
    match number {
        MAINTENANCE => "maintenance".to_owned(),
        _ => format!("server-{}", number + 1),
    }
}

// ---- the worker -----------------------------------------------------------------------------------------------------

/// Takes a place for this process.
pub(super) fn take(database: u32, number: u32) -> Result<&'static Worker, NoEntry> {
    let entries = ENTRIES.get().ok_or(NoEntry::Full)?;
    let me = latch::my_proc_number() + 1;
    entries.lock.with(|| {
        if number == OUTSIDE && outside() >= MAX_OUTSIDE {
            return Err(NoEntry::Full);
        }
        let is_the_same = |worker: &&Worker| worker.is_of(database) && worker.number.load(Relaxed) == number;
        if number != OUTSIDE
            && let Some(other) = entries.workers.iter().find(is_the_same)
        {
            return Err(NoEntry::Taken(other.pid.load(Relaxed)));
        }
        let is_free = |worker: &&Worker| worker.proc_number.load(SeqCst) == 0;
        let (of_workers, of_maintenance) = entries.workers.split_at(MAX_WORKERS);
        let these = if number == MAINTENANCE {
            of_maintenance
        } else {
            of_workers
        };
        let entry = these.iter().find(is_free).ok_or(NoEntry::Full)?;
        entry.pid.store(bgworker::my_pid(), Relaxed);
        entry.in_flight.store(0, Relaxed);
        entry.answer.forget();
        entry.idle_at.store(BUSY, SeqCst);
        entry.leave.store(STAY, SeqCst);
        entry.leases_until_ns.store(0, SeqCst);
        entry.number.store(number, Relaxed);
        entry.proc_number.store(me, SeqCst);
        entry.database.store(database, SeqCst);
        Ok(entry)
    })
}

/// The places of this process.
pub(super) fn mine() -> impl Iterator<Item = &'static Worker> {
    let me = latch::my_proc_number() + 1;
    all()
        .iter()
        .filter(move |worker| worker.proc_number.load(Relaxed) == me)
}

impl Worker {
    /// It serves its database no more; returns which that was. In turn: who sends a signal finds the process there, or no place
    /// of it.
    pub(super) fn quit(&self) -> u32 {
        let quit = || self.database.swap(0, SeqCst);
        let database = ENTRIES.get().map_or_else(quit, |entries| entries.lock.with(quit));
        self.in_flight.store(0, Relaxed);
        database
    }

    /// Its place may be taken.
    pub(super) fn free(&self) {
        self.proc_number.store(0, SeqCst);
    }

    pub fn is_of(&self, database: u32) -> bool {
        self.database.load(SeqCst) == database
    }

    fn is_outside(&self) -> bool {
        self.number.load(Relaxed) == OUTSIDE
    }

    fn is_maintenance(&self) -> bool {
        self.number.load(Relaxed) == MAINTENANCE
    }

    /// It delivers, and the launcher started it.
    pub fn is_in_server(&self) -> bool {
        !self.is_outside() && !self.is_maintenance()
    }

    /// Its place + 1.
    pub fn entry(&self) -> u32 {
        let index = all().iter().position(|worker| std::ptr::eq(worker, self));
        index.map_or(0, |index| index as u32 + 1)
    }

    /// A pass that did something is over.
    pub fn record_pass(&self, report: &Report) {
        if let Some(entry) = self.entry().checked_sub(1) {
            passes::record(entry as usize, self.number.load(Relaxed), report);
        }
    }

    pub fn answer(&self) -> &Answer {
        &self.answer
    }

    /// It has renewed or taken leases for so long from now on. While their rows are locked: whoever finds them run out by the
    /// wall clock asks here as well.
    pub fn hold_leases(&self, ttl_s: i32) {
        let until_ns = Deadline::now() + u64::try_from(ttl_s).unwrap_or(0) * 1_000_000_000;
        self.leases_until_ns.store(until_ns, SeqCst);
    }

    pub fn set_in_flight(&self, count: usize) {
        self.in_flight.store(count as u32, Relaxed);
    }

    /// It has nothing to do, as of so many calls; None = it has. Who waits for its slot hears of it.
    pub fn set_idle(&self, calls: Option<u32>) {
        self.idle_at.store(calls.map_or(BUSY, u64::from), SeqCst);
        if calls.is_some() && launcher::is_slot_wanted() {
            launcher::wake();
        }
    }

    /// Whether it has nothing to do, and has looked since its database was called so often.
    pub fn is_idle_at(&self, calls: u32) -> bool {
        self.idle_at.load(SeqCst) == u64::from(calls)
    }

    pub fn is_to_leave(&self) -> bool {
        self.leave.load(SeqCst) == LEAVE
    }
}

// ---- the launcher and sessions --------------------------------------------------------------------------------------

/// Sets the latches of the workers of a database. Called in the commit callback: no allocation, no error.
pub fn wake(database: u32) {
    for worker in all() {
        if worker.database.load(Relaxed) == database && !worker.is_maintenance() {
            latch::set(worker.proc_number.load(Relaxed) - 1);
        }
    }
}

/// The worker in this place + 1.
pub fn with_entry(entry: u32) -> Option<&'static Worker> {
    all().get((entry as usize).checked_sub(1)?)
}

/// The workers of a database in the server.
pub fn in_server_of(database: u32) -> impl Iterator<Item = &'static Worker> {
    let is_there = move |worker: &&Worker| worker.is_of(database) && worker.is_in_server();
    all().iter().filter(is_there)
}

/// What the workers of a database have claimed and not settled, in the server and outside.
pub fn in_flight(database: u32) -> u32 {
    let here = all().iter().filter(|worker| worker.database.load(Relaxed) == database);
    here.map(|worker| worker.in_flight.load(Relaxed)).sum()
}

/// The workers and upkeep processes that run in the server, of all databases.
pub fn processes_in_server() -> Vec<Found> {
    let found = all().iter().map(|worker| Found {
        database: worker.database.load(SeqCst),
        number: worker.number.load(Relaxed),
        pid: worker.pid.load(Relaxed),
        leaves: worker.leave.load(SeqCst) != STAY,
    });
    found
        .filter(|found| found.database != 0 && found.number != OUTSIDE)
        .collect()
}

/// Whether this process still has its place.
pub fn has_entry(database: u32, number: u32, pid: i32) -> bool {
    let is_it = |found: Found| (found.database, found.number, found.pid) == (database, number, pid);
    processes_in_server().into_iter().any(is_it)
}

/// How many workers in the server there may be now, of all databases together.
pub fn room_in_server() -> u32 {
    ENTRIES.get().map_or(0, |_| (MAX_WORKERS - outside()) as u32)
}

fn outside() -> usize {
    let is_there = |worker: &&Worker| !worker.is_of(0) && worker.is_outside();
    all().iter().filter(is_there).count()
}

/// Asks a worker to leave in order. False if it has not come to its place yet. Launcher only.
pub fn request_leave(database: u32, number: u32) -> bool {
    let found = all()
        .iter()
        .find(|worker| worker.is_of(database) && worker.number.load(Relaxed) == number);
    if let Some(worker) = found {
        _ = worker.leave.compare_exchange(STAY, LEAVE, SeqCst, SeqCst);
        latch::set(worker.proc_number.load(Relaxed) - 1);
    }
    found.is_some()
}

/// Sends SIGTERM, once, to the workers of a database in the server whose number fits. The launcher does so for a worker
/// that an earlier launcher started, and a session that needs the database for itself while there is no launcher.
pub fn terminate(database: u32, fits: impl Fn(u32) -> bool) {
    let Some(entries) = ENTRIES.get() else { return };
    for worker in &entries.workers {
        // In turn: the process cannot end meanwhile, and so its id is no other's.
        entries.lock.with(|| {
            let is_meant = worker.is_of(database) && !worker.is_outside() && fits(worker.number.load(Relaxed));
            if is_meant && worker.leave.swap(END, SeqCst) != END {
                signals::terminate(worker.pid.load(Relaxed));
            }
        });
    }
}

/// Whether a worker of this database runs, connected or about to connect.
pub fn has_workers(database: u32) -> bool {
    all().iter().any(|worker| worker.is_of(database))
}

/// The numbers of the workers that run in this database, in the server. Whoever is not among them has ended, however it
/// ended.
pub fn workers_here() -> Option<Vec<u32>> {
    ENTRIES.get()?;
    let here = in_server_of(catalog::my_database());
    Some(here.map(|worker| worker.number.load(Relaxed)).collect())
}

/// Whether a worker of this database has a place, and the leases that it renewed last are not over by a clock that does not
/// jump. A wall clock that is set forward ends no lease that a publisher still trusts.
pub fn leases_last(worker: &str) -> bool {
    let database = catalog::my_database();
    let is_it = |entry: &&Worker| {
        entry.is_of(database)
            && match entry.is_outside() {
                true => worker.starts_with("work-") && worker.ends_with(&format!("-{}", entry.pid.load(Relaxed))),
                false => worker == id_of(entry.number.load(Relaxed)),
            }
    };
    let now_ns = Deadline::now();
    (all().iter().find(is_it)).is_some_and(|entry| now_ns < entry.leases_until_ns.load(SeqCst))
}

/// The number of each worker of this database in the server, and where it answers.
pub fn answers_here() -> impl Iterator<Item = (u32, &'static Answer)> {
    let here = in_server_of(catalog::my_database());
    here.map(|worker| (worker.number.load(Relaxed), &worker.answer))
}
