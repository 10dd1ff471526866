//! Databases that a statement needs to itself. The session that runs the statement writes the database here, and its workers leave.
//! Run by sessions, the launcher and workers.
//!
//! A worker takes its place and then looks whether the database is vacated. A session vacates it and then looks for workers. All
//! accesses are sequentially consistent, so at least one of the two sees the other.

use crate::pg::latch;
use crate::pg::shmem::{Shareable, Shared};
use crate::shared::launcher;
use std::sync::atomic::{
    AtomicBool, AtomicI32, AtomicU32,
    Ordering::{Relaxed, SeqCst},
};

const MAX_VACATED: usize = 32;

#[repr(C)]
struct Vacancies([Vacated; MAX_VACATED]);

/// A database that a statement needs for itself. Written by the session that runs the statement; read by the launcher
/// and by workers.
#[repr(C)]
struct Vacated {
    /// Process number + 1; 0 = the slot is free.
    requester: AtomicI32,
    database: AtomicU32,
    /// Nothing presses: its workers are asked to leave, and wait for what is on its way.
    in_order: AtomicBool,
}

// SAFETY: only atomics and arrays of them; zero is a valid value of each.
unsafe impl Shareable for Vacancies {}

static VACANCIES: Shared<Vacancies> = Shared::new();

/// Shared memory that is needed, in bytes.
pub fn bytes() -> usize {
    size_of::<Vacancies>()
}

/// In the startup hook.
pub fn attach() {
    VACANCIES.attach(c"outbox vacancies");
}

fn all() -> &'static [Vacated] {
    VACANCIES.get().map_or(&[], |vacancies| &vacancies.0)
}

/// From here until `let_back` the launcher lets the workers of this database end and starts none; `in_order`: it asks them to
/// leave, and sends no signal. False when there is no shared memory, or no slot left in it.
pub fn vacate(database: u32, in_order: bool) -> bool {
    let me = latch::my_proc_number() + 1;
    let free = |vacated: &&Vacated| vacated.requester.compare_exchange(0, me, Relaxed, Relaxed).is_ok();
    let Some(slot) = all().iter().find(free) else {
        return false;
    };
    slot.in_order.store(in_order, SeqCst);
    slot.database.store(database, SeqCst);
    launcher::notify();
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
    all().iter().any(is_it)
}

/// A worker of this database has ended. Wakes the sessions that wait for it.
pub fn worker_left(database: u32) {
    for vacated in all().iter().filter(|vacated| vacated.database.load(SeqCst) == database) {
        latch::set(vacated.requester.load(Relaxed) - 1);
    }
}

/// This process needs no database to itself any more. Called at the end of a transaction: no allocation, no error.
pub fn let_back() {
    let me = latch::my_proc_number() + 1;
    for vacated in all().iter().filter(|vacated| vacated.requester.load(Relaxed) == me) {
        vacated.database.store(0, SeqCst);
        vacated.requester.store(0, SeqCst);
    }
    launcher::notify();
}
