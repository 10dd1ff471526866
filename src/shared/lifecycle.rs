//! Creation and cleanup of the areas of shared memory: when the server starts, when a transaction or a process ends,
//! and when a database is dropped. Run by all processes.
//!
//! | an entry of | has as owner | which frees it |
//! |---|---|---|
//! | `sessions`, `requests` | a transaction of a process | at its end; else at the end of the process |
//! | `transactions`, `fast_path` before COMMIT | the same | the same |
//! | a prepared transaction | its xid | a process that sees it finished (`transactions::reap`) |
//! | `launcher`, `workers`, `fast_path` in flight | a process | at its end |
//! | `statistics` | a destination | a worker that misses it, once no worker serves it |
//! | `databases`, `floors`, `error_groups`, `statistics` | a database | the launcher, once it is dropped |
//!
//! Invariant: a process that owns anything has called `sessions::begin_to_own` first. A process ends with its exit
//! callbacks, or the server restarts and makes all areas anew.

use super::fast_path;
use super::workers::{self, NoEntry, OUTSIDE, WorkerEntry};
use super::{databases, error_groups, floors, launcher, sessions, statistics, transactions};
use crate::pg::shmem::{Area, request};
use crate::pg::{catalog, latch};

static AREAS: [&dyn Area; 9] = [
    &launcher::AREA,
    &databases::AREA,
    &workers::AREA,
    &sessions::AREA,
    &transactions::AREA,
    &fast_path::AREA,
    &statistics::AREA,
    &error_groups::AREA,
    &floors::AREA,
];

/// Requests the shared memory. Called from `_PG_init`, while the library is preloaded.
pub fn reserve() {
    request(&AREAS);
    sessions::free_with(process_ends);
}

pub fn launcher_starts() {
    sessions::begin_to_own();
    launcher::starts();
}

/// Takes an entry for a worker, so that commits in `database` wake this process. Call it before the process connects,
/// so that a session that needs the database for itself does not overlook this process.
pub fn worker_starts(database: u32, number: u32) -> Result<&'static WorkerEntry, NoEntry> {
    sessions::begin_to_own();
    workers::take(database, number)
}

/// Takes an entry for the session of a worker outside the server, until `leave_from_outside` or the end of the session.
pub fn join_from_outside() -> Option<&'static WorkerEntry> {
    worker_starts(catalog::my_database(), OUTSIDE).ok()
}

/// Frees the entry of this session, which is no longer a worker.
pub fn leave_from_outside() {
    free_workers(latch::my_proc_number());
}

// ---- the end of a transaction, and of a process ---------------------------------------------------------------------
//
// Nothing here allocates or raises an error: it runs in the callbacks of a transaction and of an exit.

/// Frees what the transaction of this process owns, except slots of the fast path, which its session knows.
pub fn transaction_ends() {
    transactions::leave();
    if sessions::take_owns() {
        free_waits(latch::my_proc_number());
    }
}

/// Ends the request of this session to the workers, and lets the workers come back that it has sent away.
pub fn savepoint_aborted() {
    free_waits(latch::my_proc_number());
}

pub fn end_request() {
    end_request_of(latch::my_proc_number());
}

fn free_waits(proc_number: i32) {
    end_request_of(proc_number);
    if sessions::stop_waiting(proc_number) {
        launcher::notify(); // the workers may come back
    }
}

fn end_request_of(proc_number: i32) {
    if let Some(database) = sessions::take_request(proc_number) {
        if let Some(entry) = databases::database(database) {
            entry.request.end(proc_number);
        }
        databases::wake_workers_of(database);
    }
}

/// Frees what a process owns. It is this one, or one that is no longer there.
fn process_ends(proc_number: i32) {
    fast_path::session_ends(proc_number);
    free_waits(proc_number);
    transactions::process_ends(proc_number);
    if proc_number == latch::my_proc_number() {
        statistics::worker_ends();
    }
    free_workers(proc_number);
    launcher::ends(proc_number);
}

fn free_workers(proc_number: i32) {
    for worker in workers::of_process(proc_number) {
        let database = worker.quit();
        sessions::wake(database);
        fast_path::worker_ends(worker.entry());
        worker.free();
        databases::workers_changed(database);
        // The server notifies a launcher only of the workers that this launcher started.
        launcher::wake();
    }
}

/// Frees the entries of processes that are no longer there, and of databases but these, which exist. Called by the
/// launcher, at least once a minute.
pub fn sweep(alive: &[u32]) {
    sessions::sweep();
    databases::forget_but(alive);
    statistics::forget_databases_but(alive);
    error_groups::forget_databases_but(alive);
    floors::forget_databases_but(alive);
}
