//! The launcher's area of shared memory: how to wake the launcher, and its numbers for all databases together. All
//! processes run this code.

use super::fields::EventCount;
use crate::pg::latch;
use crate::pg::shmem::{Shareable, SharedStruct};
use std::sync::LazyLock;
use std::sync::atomic::{
    AtomicI32, AtomicU32,
    Ordering::{Relaxed, SeqCst},
};

#[repr(C)]
#[derive(Default)]
pub(super) struct LauncherState {
    /// The launcher's process number + 1; 0 = no launcher runs. Written by the launcher; read by processes that wake
    /// it.
    proc_number: AtomicI32,
    /// OID of the role that workers run as. Written by the launcher before it starts a worker; read by workers.
    worker_role: AtomicU32,
    /// A database got the extension, or the databases themselves changed. Written by sessions at the end of a
    /// transaction, and by workers when they start; read by the launcher.
    news: EventCount,
    /// The number of workers, of all databases together, that find no worker slot. Written by the launcher; read by
    /// outbox_health.
    missing_slots: AtomicU32,
    /// The number of databases that wait for a worker of another database to leave. Written by the launcher; read by
    /// workers that have nothing to do.
    waiting_databases: AtomicU32,
}

// SAFETY: only atomics; zero is a valid value of each.
unsafe impl Shareable for LauncherState {}

pub(super) static AREA: SharedStruct<LauncherState> = SharedStruct::new(c"outbox launcher");

fn state() -> &'static LauncherState {
    /// Without shared memory there is no launcher.
    static NONE: LazyLock<LauncherState> = LazyLock::new(LauncherState::default);
    AREA.get().unwrap_or_else(|| &NONE)
}

pub fn is_preloaded() -> bool {
    AREA.get().is_some()
}

// ---- the launcher ---------------------------------------------------------------------------------------------------

pub(super) fn starts() {
    state().proc_number.store(latch::my_proc_number() + 1, SeqCst);
}

/// The launcher has ended, if it had this process number.
pub(super) fn ends(proc_number: i32) {
    _ = (state().proc_number).compare_exchange(proc_number + 1, 0, SeqCst, SeqCst);
}

/// The number of notifications so far. The launcher rescans the databases when it has grown.
pub fn news() -> u32 {
    state().news.read()
}

pub fn set_worker_role(oid: u32) {
    state().worker_role.store(oid, Relaxed);
}

pub fn set_missing_slots(count: u32) {
    state().missing_slots.store(count, Relaxed);
}

/// Records that `count` databases wait for a worker of another database to leave.
pub fn set_waiting_databases(count: u32) {
    state().waiting_databases.store(count, SeqCst);
}

// ---- all processes --------------------------------------------------------------------------------------------------

pub fn is_there() -> bool {
    state().proc_number.load(SeqCst) != 0
}

/// Wakes the launcher. It checks its workers and what is due, but does not rescan the databases. Also called in the
/// commit callback, so it neither allocates nor raises an error.
pub fn wake() {
    latch::set(state().proc_number.load(Relaxed) - 1);
}

/// Notifies the launcher, which then rescans the databases. Also called in the commit callback, so it neither allocates
/// nor raises an error.
pub fn notify() {
    state().news.advance();
    wake();
}

pub fn worker_role() -> u32 {
    state().worker_role.load(Relaxed)
}

pub fn missing_slots() -> u32 {
    state().missing_slots.load(Relaxed)
}

/// Whether a database waits for a worker of another database to leave.
pub fn is_slot_wanted() -> bool {
    state().waiting_databases.load(SeqCst) > 0
}
