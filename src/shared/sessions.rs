//! What a process owns in shared memory until its transaction ends: the database that it waits for, or needs for
//! itself, or to whose workers it has a request. The entries in other areas name their owner by its process number,
//! which is the position here. All processes run this code.
//!
//! Before a process writes anything that must be freed again, it calls `begin_to_own`. From then on the end of the
//! process frees what it owns, however it ends: `lifecycle` has the steps.

use crate::error::UserError;
use crate::pg::shmem::{Shareable, SharedSlice, SpinLock};
use crate::pg::{bgworker, latch, xact};
use pgrx::PgSqlErrorCode;
use std::cell::Cell;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::SeqCst};

/// The entry of a process number. Its process writes all fields; a process that frees them holds the lock.
#[repr(C)]
pub(super) struct SessionEntry {
    /// Held by a process that changes `pid`.
    lock: SpinLock,
    /// The process that owns the entries with this number, in all areas; 0 = none. Read by the launcher.
    pid: AtomicU32,
    /// The database in which it waits for the end of messages; 0 = none. Read by processes that wake it. A stale value
    /// only wakes another session needlessly.
    waits: AtomicU32,
    /// The database to whose workers it has a request; 0 = none. Read by no other process.
    requests: AtomicU32,
    /// In the lower half the database that it needs for itself, 0 = none. In the upper half 1 if it does not wait until
    /// what is in flight is finished. Read by the launcher and by workers.
    vacates: AtomicU64,
}

// SAFETY: only atomics; zero is a valid value of each.
unsafe impl Shareable for SessionEntry {}

/// By process number.
pub(super) static AREA: SharedSlice<SessionEntry> = SharedSlice::new(c"outbox sessions", xact::max_sessions);

/// Frees what the process with this number owns, in all areas.
type Free = fn(i32);
static FREE: OnceLock<Free> = OnceLock::new();

thread_local! {
    /// This process frees what it owns when it ends.
    static REGISTERED: Cell<bool> = const { Cell::new(false) };
    /// Its transaction has called `begin_to_own`.
    static OWNS: Cell<bool> = const { Cell::new(false) };
}

fn mine() -> Option<&'static SessionEntry> {
    entry(latch::my_proc_number())
}

fn entry(number: i32) -> Option<&'static SessionEntry> {
    AREA.get().get(usize::try_from(number).ok()?)
}

// ---- owners ---------------------------------------------------------------------------------------------------------

/// Once, while preloading: how to free what a process owns. It neither allocates nor raises an error.
pub(super) fn free_with(free: Free) {
    _ = FREE.set(free);
}

/// This process is about to own something. Refused during a parallel operation: what a parallel worker writes is no
/// part of the transaction of its leader.
pub fn begin_to_own() {
    if xact::is_in_parallel_mode() {
        let mut refusal = UserError::new(
            PgSqlErrorCode::ERRCODE_INVALID_TRANSACTION_STATE,
            "outbox cannot enqueue, wait or change anything during a parallel operation",
            "ALTER FUNCTION ... PARALLEL UNSAFE.",
        );
        refusal.detail = Some("A function that does so is marked PARALLEL SAFE or PARALLEL RESTRICTED.".into());
        refusal.raise();
    }
    OWNS.set(true);
    if !REGISTERED.replace(true) {
        bgworker::on_exit(process_ends);
        change_owner(latch::my_proc_number(), |_| Some(bgworker::my_pid() as u32));
    }
}

/// Whether the transaction, which is over, has called `begin_to_own`.
pub(super) fn take_owns() -> bool {
    OWNS.replace(false)
}

unsafe extern "C-unwind" fn process_ends(_code: i32, _arg: pgrx::pg_sys::Datum) {
    change_owner(latch::my_proc_number(), |_| Some(0));
}

/// Frees what processes have left that are no longer there. The server ends a process without its exit callbacks only
/// in order to restart, with new shared memory, so that should be nothing.
pub(super) fn sweep() {
    for number in 0..AREA.get().len() as i32 {
        change_owner(number, |pid| (pid != 0 && !latch::is_process(number, pid)).then_some(0));
    }
}

/// Frees what the owner with this number has. `to`: the next owner, if it is to change.
fn change_owner(number: i32, to: impl FnOnce(u32) -> Option<u32>) {
    let Some(entry) = entry(number) else { return };
    entry.lock.with(|| {
        let before = entry.pid.load(SeqCst);
        if let Some(pid) = to(before) {
            if before != 0
                && let Some(free) = FREE.get()
            {
                free(number);
            }
            entry.pid.store(pid, SeqCst);
        }
    });
}

// ---- waits and requests ---------------------------------------------------------------------------------------------

/// Registers this process to be woken for this database, and for no other, until its transaction ends.
pub fn wait_in(database: u32) {
    begin_to_own();
    if let Some(session) = mine() {
        session.waits.store(database, SeqCst);
    }
}

/// Wakes the sessions that wait for this database. Called in the commit callback, so it neither allocates nor raises an
/// error.
pub fn wake(database: u32) {
    for (number, session) in AREA.get().iter().enumerate() {
        if session.waits.load(SeqCst) == database || session.needs() == database {
            latch::set(number as i32);
        }
    }
}

/// Records that this session is about to make a request to the workers of this database.
pub fn requests(database: u32) {
    begin_to_own();
    if let Some(session) = mine() {
        session.requests.store(database, SeqCst);
    }
}

/// Ends the request of a session, and returns the OID of its database.
pub(super) fn take_request(number: i32) -> Option<u32> {
    let database = entry(number)?.requests.swap(0, SeqCst);
    (database != 0).then_some(database)
}

/// Ends the wait of a session. Returns whether it needed a database for itself.
pub(super) fn stop_waiting(number: i32) -> bool {
    let Some(session) = entry(number) else { return false };
    session.waits.store(0, SeqCst);
    session.vacates.load(SeqCst) != 0 && session.vacates.swap(0, SeqCst) != 0
}

// ---- a statement that needs the database for itself -----------------------------------------------------------------
//
// A worker takes its entry and then checks whether the database is vacated. A session vacates the database and then
// checks for workers. All accesses are sequentially consistent, so at least one of the two sees the other.

/// Until its transaction ends, this session needs the database for itself: the launcher lets the workers end and starts
/// none, and each worker that ends wakes this session. With `in_order` the launcher asks them to leave, and sends no
/// signal. A session needs one database at a time: the lock of an earlier statement keeps the workers of another out.
pub fn vacate(database: u32, in_order: bool) {
    begin_to_own();
    if let Some(session) = mine() {
        let vacates = u64::from(!in_order) << 32 | u64::from(database);
        session.vacates.store(vacates, SeqCst);
    }
}

impl SessionEntry {
    fn needs(&self) -> u32 {
        self.vacates.load(SeqCst) as u32
    }

    fn needs_immediately(&self) -> bool {
        self.vacates.load(SeqCst) >> 32 != 0
    }
}

pub fn is_vacated(database: u32) -> bool {
    AREA.get().iter().any(|session| session.needs() == database)
}

/// Whether a session waits for the workers to end and does not give them the time to finish what is in flight.
pub fn is_vacated_immediately(database: u32) -> bool {
    (AREA.get().iter()).any(|session| session.needs() == database && session.needs_immediately())
}
