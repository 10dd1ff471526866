//! Creation and cleanup of the areas of shared memory: when the server starts, when a process becomes a worker or stops
//! being one, and when a database is dropped. Run by the postmaster, by workers, by sessions of workers outside the
//! server, and by the launcher.

use super::fast_path;
use super::workers::{self, NoEntry, OUTSIDE, WorkerEntry};
use super::{databases, error_groups, floors, launcher, statistics, transactions, waiters};
use crate::pg::shmem::{Area, request};
use crate::pg::{bgworker, catalog};
use std::cell::Cell;

static AREAS: [&dyn Area; 9] = [
    &launcher::AREA,
    &databases::AREA,
    &workers::AREA,
    &waiters::AREA,
    &transactions::AREA,
    &fast_path::AREA,
    &statistics::AREA,
    &error_groups::AREA,
    &floors::AREA,
];

/// Requests the shared memory. Called from `_PG_init`, while the library is preloaded.
pub fn reserve() {
    request(&AREAS);
}

/// Takes an entry for a worker, so that commits in `database` wake this process. Call it before the process connects,
/// so that a session that needs the database for itself does not overlook this process.
pub fn worker_starts(database: u32, number: u32) -> Result<&'static WorkerEntry, NoEntry> {
    let entry = workers::take(database, number)?;
    bgworker::on_exit(worker_ends);
    Ok(entry)
}

/// Takes an entry for the session of a worker outside the server, until `leave_from_outside` or the end of the session.
pub fn join_from_outside() -> Option<&'static WorkerEntry> {
    thread_local! {
        static REQUESTED: Cell<bool> = const { Cell::new(false) };
    }
    let entry = workers::take(catalog::my_database(), OUTSIDE).ok()?;
    if !REQUESTED.replace(true) {
        bgworker::on_exit(worker_ends);
    }
    Some(entry)
}

/// Frees the entry of this session, which is no longer a worker.
pub fn leave_from_outside() {
    free_entries();
}

unsafe extern "C-unwind" fn worker_ends(_code: i32, _arg: pgrx::pg_sys::Datum) {
    statistics::worker_ends();
    free_entries();
}

fn free_entries() {
    for worker in workers::mine() {
        let database = worker.quit();
        waiters::wake(database);
        fast_path::worker_ends(worker.entry());
        worker.free();
        databases::workers_changed(database);
        // The server notifies a launcher only of the workers that this launcher started.
        launcher::wake();
    }
}

/// Frees the entries of databases that no longer exist. Called only by the launcher.
pub fn forget_databases_but(alive: &[u32]) {
    databases::forget_but(alive);
    statistics::forget_databases_but(alive);
    error_groups::forget_databases_but(alive);
    floors::forget_databases_but(alive);
}
