//! The entries of workers in shared memory: which process runs in which database, under which number. A process does
//! not start if another one has its database and number, or if no entry is free. The worker takes and frees its entry;
//! for a worker outside the server, its session does. The launcher and all sessions read the entries.

use super::passes::RecentPasses;
use super::requests::WorkerAnswer;
use super::{MAX_WORKERS, launcher};
use crate::pg::shmem::{Shareable, SharedStruct, SpinLock};
use crate::pg::{bgworker, catalog, latch, signals};
use outbox_transport::Deadline;
use outbox_worker::PassCounts;
use std::sync::atomic::{
    AtomicI32, AtomicI64, AtomicU32, AtomicU64,
    Ordering::{Relaxed, SeqCst},
};

/// The most entries that workers outside the server may take. The others are for workers inside.
pub const MAX_OUTSIDE: usize = MAX_WORKERS / 2;
/// The most of these for one database: its relay roles keep no other database from starting workers.
pub const MAX_OUTSIDE_OF_DATABASE: usize = MAX_OUTSIDE / 2;
/// Maintenance processes that may run at a time. Their entries follow those of the workers.
pub const MAX_MAINTENANCE: usize = 8;

/// One running worker or maintenance process. It writes all fields except `leave`.
#[repr(C)]
pub struct WorkerEntry {
    /// The OID of its database; 0 = it serves none any more. Written under the lock. Read by processes that wake
    /// workers or list them.
    database: AtomicU32,
    /// Process number + 1; 0 = the entry is free. Set under the lock, and cleared as the process exits. Read by
    /// processes that wake the worker.
    proc_number: AtomicI32,
    /// The process id. Read by processes that send it a signal.
    pid: AtomicI32,
    /// Messages that it has claimed and not settled. Read by the status view.
    in_flight: AtomicU32,
    /// The number N of the worker server-(N + 1); OUTSIDE = the session of a worker outside the server; MAINTENANCE = a
    /// maintenance process. Read by the same processes as `database`.
    number: AtomicU32,
    /// Its answer to the session that makes a request.
    answer: WorkerAnswer,
    /// The `calls` of its database when its last pass began, if that pass found nothing to do; BUSY = there is
    /// something to do. Read by the launcher.
    idle_at: AtomicU64,
    /// Its leases, or its claims with leasing off, last at least until then, in ns of the clock of `Deadline`, which no
    /// change of the wall clock moves; 0 = it has had none. Read by workers that find them expired.
    leases_until_ns: AtomicU64,
    /// With leasing off: the token of its claims, a negative number. Read by the same workers.
    row_token: AtomicI64,
    /// STAY, LEAVE or END. Written by the launcher, and by a session that needs the database for itself; read by the
    /// worker.
    leave: AtomicU32,
}

#[repr(C)]
pub(super) struct Workers {
    /// Held by a process that takes or frees an entry, or sends a signal.
    lock: SpinLock,
    workers: [WorkerEntry; MAX_WORKERS + MAX_MAINTENANCE],
    /// Of each entry of a worker. Apart from the entries, because each COMMIT reads those.
    passes: [RecentPasses; MAX_WORKERS],
}

// SAFETY: only atomics and arrays of them; zero is a valid value of each.
unsafe impl Shareable for WorkerEntry {}
// SAFETY: as for its entries.
unsafe impl Shareable for Workers {}

pub(super) static AREA: SharedStruct<Workers> = SharedStruct::new(c"outbox workers");

const BUSY: u64 = u64::MAX;
/// The number of all workers outside the server. The launcher did not start them, and sessions make no requests to
/// them.
pub(super) const OUTSIDE: u32 = u32::MAX;
/// The number of the maintenance process of a database. It delivers nothing.
pub const MAINTENANCE: u32 = u32::MAX - 1;

const STAY: u32 = 0;
/// The worker was asked to finish its work and end.
const LEAVE: u32 = 1;
/// SIGTERM was sent to the worker; one signal is enough.
const END: u32 = 2;

/// Why a process got no entry.
pub enum NoEntry {
    /// The process with this id already runs as that worker.
    Taken(i32),
    /// All entries are in use.
    Full,
}

/// A worker in the server, or a maintenance process, as its entry describes it.
pub struct RunningProcess {
    pub database: u32,
    pub number: u32,
    pub pid: i32,
    /// Whether it was asked to leave, or was sent SIGTERM.
    pub leaves: bool,
}

fn all() -> &'static [WorkerEntry] {
    AREA.get().map_or(&[], |entries| &entries.workers)
}

/// The name of a worker in the server, in outbox_workers and as the owner of leases.
pub fn id_of(number: u32) -> String {
    match number {
        MAINTENANCE => "maintenance".to_owned(),
        _ => format!("server-{}", number + 1),
    }
}

// ---- the worker -----------------------------------------------------------------------------------------------------

/// Takes an entry for this process.
pub(super) fn take(database: u32, number: u32) -> Result<&'static WorkerEntry, NoEntry> {
    let entries = AREA.get().ok_or(NoEntry::Full)?;
    let me = latch::my_proc_number() + 1;
    entries.lock.with(|| {
        let of_database = outside().filter(|worker| worker.is_of(database)).count();
        if number == OUTSIDE && (outside().count() >= MAX_OUTSIDE || of_database >= MAX_OUTSIDE_OF_DATABASE) {
            return Err(NoEntry::Full);
        }
        let is_the_same = |worker: &&WorkerEntry| worker.is_of(database) && worker.number.load(Relaxed) == number;
        if number != OUTSIDE
            && let Some(other) = entries.workers.iter().find(is_the_same)
        {
            return Err(NoEntry::Taken(other.pid.load(Relaxed)));
        }
        let is_free = |worker: &&WorkerEntry| worker.proc_number.load(SeqCst) == 0;
        let (of_workers, of_maintenance) = entries.workers.split_at(MAX_WORKERS);
        let these = if number == MAINTENANCE {
            of_maintenance
        } else {
            of_workers
        };
        let entry = these.iter().find(is_free).ok_or(NoEntry::Full)?;
        entry.clear();
        entry.pid.store(bgworker::my_pid(), Relaxed);
        entry.idle_at.store(BUSY, SeqCst);
        entry.number.store(number, Relaxed);
        entry.proc_number.store(me, SeqCst);
        entry.database.store(database, SeqCst);
        Ok(entry)
    })
}

/// The entries of the process with this number.
pub(super) fn of_process(proc_number: i32) -> impl Iterator<Item = &'static WorkerEntry> {
    let is_its = move |worker: &&WorkerEntry| worker.proc_number.load(Relaxed) == proc_number + 1;
    all().iter().filter(is_its)
}

impl WorkerEntry {
    /// Ends the service of its database, and returns the OID of that database. Under the lock: a process that sends a
    /// signal finds either this process or no entry of it.
    pub(super) fn quit(&self) -> u32 {
        let quit = || self.database.swap(0, SeqCst);
        let database = AREA.get().map_or_else(quit, |entries| entries.lock.with(quit));
        self.in_flight.store(0, Relaxed);
        database
    }

    /// Makes the entry free.
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

    /// Whether the launcher started it to deliver: it is neither outside the server nor maintenance.
    pub fn is_in_server(&self) -> bool {
        !self.is_outside() && !self.is_maintenance()
    }

    /// The index of its entry + 1.
    pub fn entry(&self) -> u32 {
        let index = all().iter().position(|worker| std::ptr::eq(worker, self));
        index.map_or(0, |index| index as u32 + 1)
    }

    /// Records a pass that did something.
    pub fn record_pass(&self, report: &PassCounts) {
        let passes = AREA
            .get()
            .and_then(|entries| entries.passes.get(self.entry().checked_sub(1)? as usize));
        if let Some(passes) = passes {
            passes.record(self.number.load(Relaxed), report);
        }
    }

    pub fn answer(&self) -> &WorkerAnswer {
        &self.answer
    }

    /// Makes a token for the claims of this worker with leasing off.
    pub fn new_row_token(&self) -> i64 {
        let token = -(uuid::Uuid::new_v4().as_u64_pair().0 as i64 & i64::MAX).max(1);
        self.row_token.store(token, SeqCst);
        token
    }

    /// Records that it has taken or renewed leases for `ttl_s` seconds from now. Call it while the rows of the leases
    /// are locked: a worker that finds them expired by the wall clock also checks here. With leasing off each heartbeat
    /// renews the claims.
    pub fn hold_leases(&self, ttl_s: i32) {
        let until_ns = Deadline::now() + u64::try_from(ttl_s).unwrap_or(0) * 1_000_000_000;
        self.leases_until_ns.store(until_ns, SeqCst);
    }

    pub fn set_in_flight(&self, count: usize) {
        self.in_flight.store(count as u32, Relaxed);
    }

    /// Records that it has nothing to do, as of this number of calls; None = it has. Wakes the launcher if a database
    /// waits for a slot.
    pub fn set_idle(&self, calls: Option<u32>) {
        self.idle_at.store(calls.map_or(BUSY, u64::from), SeqCst);
        if calls.is_some() && launcher::is_slot_wanted() {
            launcher::wake();
        }
    }

    /// Whether its last pass found nothing to do, and began when its database had been called this many times.
    pub fn is_idle_at(&self, calls: u32) -> bool {
        self.idle_at.load(SeqCst) == u64::from(calls)
    }

    pub fn is_to_leave(&self) -> bool {
        self.leave.load(SeqCst) == LEAVE
    }
}

// ---- the launcher and sessions --------------------------------------------------------------------------------------

/// Sets the latches of the workers of a database. Called in the commit callback, so it neither allocates nor raises an
/// error.
pub fn wake(database: u32) {
    for worker in all() {
        if worker.database.load(Relaxed) == database && !worker.is_maintenance() {
            latch::set(worker.proc_number.load(Relaxed) - 1);
        }
    }
}

/// The worker whose entry has the index `entry` - 1.
pub fn with_entry(entry: u32) -> Option<&'static WorkerEntry> {
    all().get((entry as usize).checked_sub(1)?)
}

/// The workers of a database in the server.
pub fn in_server_of(database: u32) -> impl Iterator<Item = &'static WorkerEntry> {
    let is_there = move |worker: &&WorkerEntry| worker.is_of(database) && worker.is_in_server();
    all().iter().filter(is_there)
}

/// The number of messages that the workers of a database have claimed and not settled, in the server and outside.
pub fn in_flight(database: u32) -> u32 {
    let here = all().iter().filter(|worker| worker.database.load(Relaxed) == database);
    here.map(|worker| worker.in_flight.load(Relaxed)).sum()
}

/// The workers and maintenance processes that run in the server, of all databases.
pub fn processes_in_server() -> Vec<RunningProcess> {
    let found = all().iter().map(|worker| RunningProcess {
        database: worker.database.load(SeqCst),
        number: worker.number.load(Relaxed),
        pid: worker.pid.load(Relaxed),
        leaves: worker.leave.load(SeqCst) != STAY,
    });
    found
        .filter(|found| found.database != 0 && found.number != OUTSIDE)
        .collect()
}

/// Whether this process still has its entry.
pub fn has_entry(database: u32, number: u32, pid: i32) -> bool {
    let is_it = |found: RunningProcess| (found.database, found.number, found.pid) == (database, number, pid);
    processes_in_server().into_iter().any(is_it)
}

/// The number of workers that may run in the server now, of all databases together.
pub fn room_in_server() -> u32 {
    AREA.get().map_or(0, |_| (MAX_WORKERS - outside().count()) as u32)
}

fn outside() -> impl Iterator<Item = &'static WorkerEntry> {
    let is_there = |worker: &&WorkerEntry| !worker.is_of(0) && worker.is_outside();
    all().iter().filter(is_there)
}

/// Asks a worker to finish and end. Returns false if the worker has not taken its entry yet. Called only by the
/// launcher.
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

/// Sends SIGTERM, once, to the processes of a database in the server whose number `fits` accepts. The launcher calls it
/// for a process that an earlier launcher started. A session that needs the database for itself calls it while there is
/// no launcher.
pub fn terminate(database: u32, fits: impl Fn(u32) -> bool) {
    let Some(entries) = AREA.get() else { return };
    for worker in &entries.workers {
        // Under the lock the process cannot end, so its id is not that of another process.
        entries.lock.with(|| {
            let is_meant = worker.is_of(database) && !worker.is_outside() && fits(worker.number.load(Relaxed));
            if is_meant && worker.leave.swap(END, SeqCst) != END {
                signals::terminate(worker.pid.load(Relaxed));
            }
        });
    }
}

/// Whether a worker or maintenance process of this database runs, connected or about to connect.
pub fn has_workers(database: u32) -> bool {
    all().iter().any(|worker| worker.is_of(database))
}

/// The numbers of the workers of this database that run in the server; None if the library was not preloaded. A worker
/// that is missing here has ended, for whatever reason.
pub fn workers_here() -> Option<Vec<u32>> {
    AREA.get()?;
    let here = in_server_of(catalog::my_database());
    Some(here.map(|worker| worker.number.load(Relaxed)).collect())
}

/// Whether a worker of this database has an entry, and its leases are not over by a clock that never jumps. A wall
/// clock that is set forward ends no lease on which a publisher still relies.
pub fn leases_last(worker: &str) -> bool {
    let database = catalog::my_database();
    let is_it = |entry: &&WorkerEntry| {
        entry.is_of(database)
            && match entry.is_outside() {
                true => worker.starts_with("work-") && worker.ends_with(&format!("-{}", entry.pid.load(Relaxed))),
                false => worker == id_of(entry.number.load(Relaxed)),
            }
    };
    let now_ns = Deadline::now();
    (all().iter().find(is_it)).is_some_and(|entry| now_ns < entry.leases_until_ns.load(SeqCst))
}

/// Whether the worker with this token still holds what it has claimed, with leasing off.
pub fn claims_last(token: i64) -> bool {
    let database = catalog::my_database();
    let now_ns = Deadline::now();
    all().iter().any(|entry| {
        entry.is_of(database) && entry.row_token.load(SeqCst) == token && now_ns < entry.leases_until_ns.load(SeqCst)
    })
}

/// The last passes of the workers of this database; see `RecentPasses::here`. None if the library was not preloaded.
pub fn passes_here() -> Option<Vec<i64>> {
    Some(AREA.get()?.passes.iter().flat_map(RecentPasses::here).collect())
}

/// The number of each worker of this database in the server, and its answer.
pub fn answers_here() -> impl Iterator<Item = (u32, &'static WorkerAnswer)> {
    let here = in_server_of(catalog::my_database());
    here.map(|worker| (worker.number.load(Relaxed), &worker.answer))
}
