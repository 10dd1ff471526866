//! The launcher's area of shared memory: how to wake the launcher, and its numbers for all databases together. All
//! processes run this code.

use crate::pg::shmem::{Shareable, Shared};
use crate::pg::{bgworker, latch};
use std::sync::atomic::{
    AtomicI32, AtomicU32,
    Ordering::{Relaxed, SeqCst},
};

#[repr(C)]
struct Launcher {
    /// The launcher's process number + 1; 0 = no launcher runs. Written by the launcher; read by processes that wake
    /// it.
    proc_number: AtomicI32,
    /// OID of the role that workers run as. Written by the launcher before it starts a worker; read by workers.
    worker_role: AtomicU32,
    /// Grows when a database got the extension, or the databases themselves changed. Written by sessions at the end of
    /// a transaction, and by workers when they start; read by the launcher.
    news: AtomicU32,
    /// The number of workers, of all databases together, that find no worker slot. Written by the launcher; read by
    /// outbox_health.
    missing_slots: AtomicU32,
    /// The number of databases that wait for a worker of another database to leave. Written by the launcher; read by
    /// workers that have nothing to do.
    waiting_databases: AtomicU32,
}

// SAFETY: only atomics; zero is a valid value of each.
unsafe impl Shareable for Launcher {}

static LAUNCHER: Shared<Launcher> = Shared::new();

/// The size of this area of shared memory, in bytes.
pub fn bytes() -> usize {
    size_of::<Launcher>()
}

/// Attaches this area. Called from the shared memory startup hook.
pub fn attach() {
    LAUNCHER.attach(c"outbox launcher");
}

pub fn is_preloaded() -> bool {
    LAUNCHER.get().is_some()
}

// ---- the launcher ---------------------------------------------------------------------------------------------------

pub fn starts() {
    if let Some(launcher) = LAUNCHER.get() {
        launcher.proc_number.store(latch::my_proc_number() + 1, SeqCst);
    }
    bgworker::on_exit(ends);
}

unsafe extern "C-unwind" fn ends(_code: i32, _arg: pgrx::pg_sys::Datum) {
    if let Some(launcher) = LAUNCHER.get() {
        launcher.proc_number.store(0, SeqCst);
    }
}

/// The number of notifications so far. The launcher rescans the databases when it has grown.
pub fn news() -> u32 {
    LAUNCHER.get().map_or(0, |launcher| launcher.news.load(Relaxed))
}

pub fn set_worker_role(oid: u32) {
    if let Some(launcher) = LAUNCHER.get() {
        launcher.worker_role.store(oid, Relaxed);
    }
}

pub fn set_missing_slots(count: u32) {
    if let Some(launcher) = LAUNCHER.get() {
        launcher.missing_slots.store(count, Relaxed);
    }
}

/// Records that `count` databases wait for a worker of another database to leave.
pub fn set_waiting_databases(count: u32) {
    if let Some(launcher) = LAUNCHER.get() {
        launcher.waiting_databases.store(count, SeqCst);
    }
}

// ---- all processes --------------------------------------------------------------------------------------------------

pub fn is_there() -> bool {
    LAUNCHER
        .get()
        .is_some_and(|launcher| launcher.proc_number.load(SeqCst) != 0)
}

/// Wakes the launcher. It checks its workers and what is due, but does not rescan the databases. Also called in the
/// commit callback, so it neither allocates nor raises an error.
pub fn wake() {
    if let Some(launcher) = LAUNCHER.get() {
        latch::set(launcher.proc_number.load(Relaxed) - 1);
    }
}

/// Notifies the launcher, which then rescans the databases. Also called in the commit callback, so it neither allocates
/// nor raises an error.
pub fn notify() {
    if let Some(launcher) = LAUNCHER.get() {
        launcher.news.fetch_add(1, Relaxed);
    }
    wake();
}

pub fn worker_role() -> u32 {
    LAUNCHER.get().map_or(0, |launcher| launcher.worker_role.load(Relaxed))
}

pub fn missing_slots() -> u32 {
    LAUNCHER
        .get()
        .map_or(0, |launcher| launcher.missing_slots.load(Relaxed))
}

/// Whether a database waits for a worker of another database to leave.
pub fn is_slot_wanted() -> bool {
    LAUNCHER
        .get()
        .is_some_and(|launcher| launcher.waiting_databases.load(SeqCst) > 0)
}
