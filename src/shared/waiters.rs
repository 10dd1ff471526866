//! Sessions that wait for a message of a database to end, or for a worker of it to leave. Processes that end messages,
//! and workers that leave, wake them. Sessions and workers run this code.

use crate::pg::shmem::SharedSlice;
use crate::pg::{latch, xact};
use std::sync::atomic::{
    AtomicU32,
    Ordering::{Relaxed, SeqCst},
};

/// The database in which each session waits, by process number; 0 = it does not wait. Written by the session; read by
/// processes that wake it. A stale value only wakes another session needlessly.
pub(super) static AREA: SharedSlice<AtomicU32> = SharedSlice::new(c"outbox waiters", xact::max_sessions);

/// Registers this process to be woken for this database, and for no other, until `stop`.
pub fn wait_in(database: u32) {
    if let Some(waiter) = mine() {
        waiter.store(database, SeqCst);
    }
}

/// Ends the registration of this process. Called at the end of a transaction, so it neither allocates nor raises an
/// error.
pub fn stop() {
    if let Some(waiter) = mine() {
        waiter.store(0, Relaxed);
    }
}

/// Wakes the sessions that wait for this database. Called in the commit callback, so it neither allocates nor raises an
/// error.
pub fn wake(database: u32) {
    for (number, waiter) in AREA.get().iter().enumerate() {
        if waiter.load(SeqCst) == database {
            latch::set(number as i32);
        }
    }
}

fn mine() -> Option<&'static AtomicU32> {
    AREA.get().get(usize::try_from(latch::my_proc_number()).ok()?)
}
