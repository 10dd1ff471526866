//! Databases that a statement needs for itself. The session that runs the statement writes the database here, and the
//! workers of the database leave. Sessions, the launcher and workers run this code.
//!
//! A worker takes its entry and then checks whether the database is vacated. A session vacates the database and then
//! checks for workers. All accesses are sequentially consistent, so at least one of the two sees the other.

use crate::pg::latch;
use crate::pg::shmem::{Shareable, Shared};
use crate::shared::launcher;
use std::sync::atomic::{
    AtomicBool, AtomicI32, AtomicU32,
    Ordering::{Relaxed, SeqCst},
};

const MAX_VACATED: usize = 32;
/// The most of these for one session.
const MAX_OF_SESSION: usize = 8;

#[repr(C)]
struct Vacancies([Vacated; MAX_VACATED]);

/// A database that a statement needs for itself. Written by the session that runs the statement; read by the launcher
/// and by workers.
#[repr(C)]
struct Vacated {
    /// Process number + 1 of that session; 0 = the entry is free.
    requester: AtomicI32,
    database: AtomicU32,
    /// The session can wait: the workers are asked to leave, and first finish what is in flight.
    in_order: AtomicBool,
}

// SAFETY: only atomics and arrays of them; zero is a valid value of each.
unsafe impl Shareable for Vacancies {}

static VACANCIES: Shared<Vacancies> = Shared::new();

/// The size of this area of shared memory, in bytes.
pub fn bytes() -> usize {
    size_of::<Vacancies>()
}

/// Attaches this area. Called from the shared memory startup hook.
pub fn attach() {
    VACANCIES.attach(c"outbox vacancies");
}

fn all() -> &'static [Vacated] {
    VACANCIES.get().map_or(&[], |vacancies| &vacancies.0)
}

/// From here until `let_back`, the launcher lets the workers of this database end and starts none. With `in_order` it
/// asks them to leave, and sends no signal. Returns false if there is no shared memory, or no free entry in it for this
/// session.
pub fn vacate(database: u32, in_order: bool) -> bool {
    let me = latch::my_proc_number() + 1;
    if of_session(me).count() >= MAX_OF_SESSION {
        return false;
    }
    let free = |vacated: &&Vacated| vacated.requester.compare_exchange(0, me, Relaxed, Relaxed).is_ok();
    let Some(entry) = all().iter().find(free) else {
        return false;
    };
    entry.in_order.store(in_order, SeqCst);
    entry.database.store(database, SeqCst);
    launcher::notify();
    true
}

pub fn is_vacated(database: u32) -> bool {
    is_vacated_by(database, |_| true)
}

/// Whether a session waits for the workers to end and does not give them the time to finish what is in flight.
pub fn is_pressed(database: u32) -> bool {
    is_vacated_by(database, |vacated| !vacated.in_order.load(SeqCst))
}

fn is_vacated_by(database: u32, fits: impl Fn(&Vacated) -> bool) -> bool {
    let is_it = |vacated: &Vacated| vacated.database.load(SeqCst) == database && fits(vacated);
    all().iter().any(is_it)
}

/// Wakes the sessions that wait for workers of this database to end. Called when a worker has ended.
pub fn worker_left(database: u32) {
    for vacated in all().iter().filter(|vacated| vacated.database.load(SeqCst) == database) {
        latch::set(vacated.requester.load(Relaxed) - 1);
    }
}

fn of_session(me: i32) -> impl Iterator<Item = &'static Vacated> {
    (all().iter()).filter(move |vacated| vacated.requester.load(Relaxed) == me)
}

/// Ends all requests of this process to have a database for itself. Called at the end of a transaction, so it neither
/// allocates nor raises an error.
pub fn let_back() {
    let me = latch::my_proc_number() + 1;
    for vacated in of_session(me) {
        vacated.database.store(0, SeqCst);
        vacated.requester.store(0, SeqCst);
    }
    launcher::notify();
}
