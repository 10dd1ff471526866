//! The places of workers in shared memory: who runs in which database, under which number. A place is taken once: a
//! process that finds its database and number taken does not start, and neither does one that finds no free place. Taken
//! and freed by the worker, or by the session of a worker outside the server; read by the launcher and by all sessions.

use super::databases::{State, static_state, wake_workers_of};
use crate::pg::{bgworker, catalog, latch, signals};
use crate::shared::fastpath::slot;
use crate::shared::requests::{Answer, Report};
use crate::shared::{passes, statistics};
use outbox_transport::Deadline;
use std::cell::Cell;
use std::sync::atomic::{
    AtomicI32, AtomicU32, AtomicU64,
    Ordering::{Relaxed, SeqCst},
};

pub const MAX_WORKERS: usize = 128;
/// The most of them that workers outside the server may take: the others are for those inside.
pub const MAX_OUTSIDE: usize = MAX_WORKERS / 2;
/// Processes of the upkeep that may run at a time, in places beyond those of workers.
pub const MAX_UPKEEP: usize = 8;

/// One running worker. Written by the worker, but for `leave`.
#[repr(C)]
pub struct Worker {
    pub(super) database: AtomicU32,
    /// Process number + 1; 0 = the place is free. Written in turn.
    pub(super) proc_number: AtomicI32,
    pid: AtomicI32,
    pub(super) in_flight: AtomicU32,
    /// server-N is its name; OUTSIDE = it is the session of a worker outside the server; UPKEEP.
    number: AtomicU32,
    answer: Answer,
    /// Of the `calls` of its database, how many there were when it last began to look and found nothing to do; BUSY = there
    /// is something. Read by the launcher.
    pub(super) idle_at: AtomicU64,
    /// Until when its leases last at least, by the clock of `Deadline`, which no wall clock moves; 0 = it has had none.
    leases_until_ns: AtomicU64,
    /// STAY, LEAVE or END. Written by the launcher, and by a session that needs the database for itself.
    leave: AtomicU32,
}

const BUSY: u64 = u64::MAX;
/// The number of all workers outside the server: the launcher did not start them, and sessions ask nothing of them.
const OUTSIDE: u32 = u32::MAX;
/// The number of the process that does the upkeep of a database. It delivers nothing.
pub const UPKEEP: u32 = u32::MAX - 1;

const STAY: u32 = 0;
/// It shall leave in order.
const LEAVE: u32 = 1;
/// SIGTERM was sent to it; one is enough.
const END: u32 = 2;

/// Why a process got no place.
pub enum NoPlace {
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

// ---- the worker -----------------------------------------------------------------------------------------------------

/// Takes a place among the workers, so that commits in `database` wake this process. Before it connects, so that who
/// needs the database for itself does not overlook it.
pub fn worker_starts(database: u32, number: u32) -> Result<&'static Worker, NoPlace> {
    let place = take_place(database, number)?;
    bgworker::on_exit(worker_ends);
    Ok(place)
}

/// Takes a place for the session of a worker outside the server, until `leave_from_outside` or the end of the session.
pub fn join_from_outside() -> Option<&'static Worker> {
    thread_local! {
        static ASKED: Cell<bool> = const { Cell::new(false) };
    }
    let place = take_place(catalog::my_database(), OUTSIDE).ok()?;
    if !ASKED.replace(true) {
        bgworker::on_exit(worker_ends);
    }
    Some(place)
}

/// This session is no worker any more.
pub fn leave_from_outside() {
    if let Some(state) = static_state() {
        free_places(state);
    }
}

fn take_place(database: u32, number: u32) -> Result<&'static Worker, NoPlace> {
    let state = static_state().ok_or(NoPlace::Full)?;
    let me = latch::my_proc_number() + 1;
    state.places_turn.alone(|| {
        if number == OUTSIDE && outside(state) >= MAX_OUTSIDE {
            return Err(NoPlace::Full);
        }
        let is_the_same = |worker: &&Worker| worker.is_of(database) && worker.number.load(Relaxed) == number;
        if number != OUTSIDE
            && let Some(other) = state.workers.iter().find(is_the_same)
        {
            return Err(NoPlace::Taken(other.pid.load(Relaxed)));
        }
        let is_free = |worker: &&Worker| worker.proc_number.load(SeqCst) == 0;
        let (of_workers, of_upkeep) = state.workers.split_at(MAX_WORKERS);
        let places = if number == UPKEEP { of_upkeep } else { of_workers };
        let place = places.iter().find(is_free).ok_or(NoPlace::Full)?;
        place.pid.store(bgworker::my_pid(), Relaxed);
        place.in_flight.store(0, Relaxed);
        place.answer.forget();
        place.idle_at.store(BUSY, SeqCst);
        place.leave.store(STAY, SeqCst);
        place.leases_until_ns.store(0, SeqCst);
        place.number.store(number, Relaxed);
        place.proc_number.store(me, SeqCst);
        place.database.store(database, SeqCst);
        Ok(place)
    })
}

unsafe extern "C-unwind" fn worker_ends(_code: i32, _arg: pgrx::pg_sys::Datum) {
    statistics::worker_ends();
    if let Some(state) = static_state() {
        free_places(state);
    }
}

fn free_places(state: &State) {
    let me = latch::my_proc_number() + 1;
    for worker in state
        .workers
        .iter()
        .filter(|worker| worker.proc_number.load(Relaxed) == me)
    {
        // In turn: who sends a signal finds the process there, or no place of it.
        let database = state.places_turn.alone(|| worker.database.swap(0, SeqCst));
        for vacated in state.vacated.iter().filter(|v| v.database.load(SeqCst) == database) {
            latch::set(vacated.requester.load(Relaxed) - 1);
        }
        worker.in_flight.store(0, Relaxed);
        slot::worker_ends(worker.place());
        worker.proc_number.store(0, SeqCst);
        workers_changed(state, database);
        // The server tells a launcher only of the workers that this launcher started.
        latch::set(state.launcher.load(Relaxed) - 1);
    }
}

/// The workers of this database shall look at once who is there and which partitions are free.
pub fn look_again() {
    if let Some(state) = static_state() {
        workers_changed(state, catalog::my_database());
    }
}

fn workers_changed(state: &State, database: u32) {
    if let Some(place) = state.databases.iter().find(|place| place.oid.load(Relaxed) == database) {
        place.worker_changes.fetch_add(1, SeqCst);
    }
    wake_workers_of(state, database);
}

impl Worker {
    pub(super) fn is_of(&self, database: u32) -> bool {
        self.database.load(SeqCst) == database
    }

    pub(super) fn is_outside(&self) -> bool {
        self.number.load(Relaxed) == OUTSIDE
    }

    pub(super) fn is_upkeep(&self) -> bool {
        self.number.load(Relaxed) == UPKEEP
    }

    /// It delivers, and the launcher started it.
    pub(super) fn is_in_server(&self) -> bool {
        !self.is_outside() && !self.is_upkeep()
    }

    /// Its place + 1.
    pub fn place(&self) -> u32 {
        let index = static_state().and_then(|state| state.workers.iter().position(|worker| std::ptr::eq(worker, self)));
        index.map_or(0, |index| index as u32 + 1)
    }

    /// A pass that did something is over.
    pub fn note_tick(&self, report: &Report) {
        if let Some(place) = self.place().checked_sub(1) {
            passes::note(place as usize, self.number.load(Relaxed), report);
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
        if let (Some(_), Some(state)) = (calls, static_state())
            && state.waiting_databases.load(SeqCst) > 0
        {
            latch::set(state.launcher.load(Relaxed) - 1);
        }
    }

    pub fn is_to_leave(&self) -> bool {
        self.leave.load(SeqCst) == LEAVE
    }
}

// ---- the launcher and sessions --------------------------------------------------------------------------------------

/// The workers and upkeep processes that run in the server, of all databases.
pub fn processes_in_server() -> Vec<Found> {
    let workers = static_state().into_iter().flat_map(|state| &state.workers);
    let found = workers.map(|worker| Found {
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
pub fn is_in_place(database: u32, number: u32, pid: i32) -> bool {
    let is_it = |found: Found| (found.database, found.number, found.pid) == (database, number, pid);
    processes_in_server().into_iter().any(is_it)
}

/// How many workers in the server there may be now, of all databases together.
pub fn room_in_server() -> u32 {
    static_state().map_or(0, |state| (MAX_WORKERS - outside(state)) as u32)
}

fn outside(state: &State) -> usize {
    let workers = state.workers.iter();
    workers.filter(|worker| !worker.is_of(0) && worker.is_outside()).count()
}

/// Asks a worker to leave in order. False if it has not come to its place yet. Launcher only.
pub fn ask_to_leave(database: u32, number: u32) -> bool {
    let mut workers = static_state().into_iter().flat_map(|state| &state.workers);
    let found = workers.find(|worker| worker.is_of(database) && worker.number.load(Relaxed) == number);
    if let Some(worker) = found {
        _ = worker.leave.compare_exchange(STAY, LEAVE, SeqCst, SeqCst);
        latch::set(worker.proc_number.load(Relaxed) - 1);
    }
    found.is_some()
}

/// Sends SIGTERM, once, to the workers of a database in the server whose number fits. The launcher does so for a worker
/// that an earlier launcher started, and a session that needs the database for itself while there is no launcher.
pub fn terminate(database: u32, fits: impl Fn(u32) -> bool) {
    let Some(state) = static_state() else { return };
    for worker in &state.workers {
        // In turn: the process cannot end meanwhile, and so its id is no other's.
        state.places_turn.alone(|| {
            let is_meant = worker.is_of(database) && !worker.is_outside() && fits(worker.number.load(Relaxed));
            if is_meant && worker.leave.swap(END, SeqCst) != END {
                signals::terminate(worker.pid.load(Relaxed));
            }
        });
    }
}

pub fn has_launcher() -> bool {
    static_state().is_some_and(|state| state.launcher.load(SeqCst) != 0)
}

/// Whether a worker of this database runs, connected or about to connect.
pub fn has_workers(database: u32) -> bool {
    static_state().is_some_and(|state| state.workers.iter().any(|worker| worker.is_of(database)))
}

/// The numbers of the workers that run in this database, in the server. Whoever is not among them has ended, however it
/// ended.
pub fn workers_here() -> Option<Vec<u32>> {
    let database = catalog::my_database();
    let workers = static_state()?.workers.iter();
    let here = workers.filter(|worker| worker.is_of(database) && worker.is_in_server());
    Some(here.map(|worker| worker.number.load(Relaxed)).collect())
}

/// Whether a worker of this database has a place, and the leases that it renewed last are not over by a clock that does not
/// jump. A wall clock that is set forward ends no lease that a publisher still trusts.
pub fn leases_last(worker: &str) -> bool {
    let database = catalog::my_database();
    let is_it = |place: &&Worker| {
        place.is_of(database)
            && match place.is_outside() {
                true => worker.starts_with("work-") && worker.ends_with(&format!("-{}", place.pid.load(Relaxed))),
                false => worker == crate::worker_loop::id_of(place.number.load(Relaxed)),
            }
    };
    let mut workers = static_state().into_iter().flat_map(|state| &state.workers);
    let now_ns = Deadline::now();
    (workers.find(is_it)).is_some_and(|place| now_ns < place.leases_until_ns.load(SeqCst))
}

/// The number of each worker of this database in the server, and where it answers.
pub fn answers_here() -> impl Iterator<Item = (u32, &'static Answer)> {
    let (database, workers) = (
        catalog::my_database(),
        static_state().map_or(&[][..], |state| &state.workers),
    );
    let here = workers
        .iter()
        .filter(move |worker| worker.is_of(database) && worker.is_in_server());
    here.map(|worker| (worker.number.load(Relaxed), &worker.answer))
}
