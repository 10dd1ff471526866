//! The launcher in shared memory: where to wake it, and what it tells of all databases together. Run by all processes.

use crate::pg::shmem::{Shareable, Shared};
use crate::pg::{bgworker, latch};
use std::sync::atomic::{
    AtomicI32, AtomicU32,
    Ordering::{Relaxed, SeqCst},
};

#[repr(C)]
struct Launcher {
    /// Process number + 1; 0 = there is none. Written by the launcher; read by all that wake it.
    proc_number: AtomicI32,
    /// OID of the role that workers run as. Written by the launcher before it starts one; read by workers.
    worker_role: AtomicU32,
    /// Grows when a database got the extension, or the databases themselves change. Written at the end of a transaction; read by
    /// the launcher.
    news: AtomicU32,
    /// How many workers of all databases together find no slot. Written by the launcher; read by health.
    missing_slots: AtomicU32,
    /// How many databases wait for a worker of another one to leave. Written by the launcher; read by workers that have nothing
    /// to do.
    waiting_databases: AtomicU32,
}

// SAFETY: only atomics; zero is a valid value of each.
unsafe impl Shareable for Launcher {}

static LAUNCHER: Shared<Launcher> = Shared::new();

/// Shared memory that is needed, in bytes.
pub fn bytes() -> usize {
    size_of::<Launcher>()
}

/// In the startup hook.
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

/// How much news there was so far.
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

/// `count` databases wait for the worker of another one to leave.
pub fn set_waiting_databases(count: u32) {
    if let Some(launcher) = LAUNCHER.get() {
        launcher.waiting_databases.store(count, SeqCst);
    }
}

// ---- all processes ------------------------------------------------------------------------------------------------------

pub fn is_there() -> bool {
    LAUNCHER
        .get()
        .is_some_and(|launcher| launcher.proc_number.load(SeqCst) != 0)
}

/// Wakes the launcher, which looks at its workers and at what is due, and not at the databases. Called in the commit callback
/// too: no allocation, no error.
pub fn wake() {
    if let Some(launcher) = LAUNCHER.get() {
        latch::set(launcher.proc_number.load(Relaxed) - 1);
    }
}

/// Tells the launcher to look at the databases. Called in the commit callback too: no allocation, no error.
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

/// Whether a database waits for a worker of another one to leave.
pub fn is_slot_wanted() -> bool {
    LAUNCHER
        .get()
        .is_some_and(|launcher| launcher.waiting_databases.load(SeqCst) > 0)
}
