//! Sessions that wait for a message to end. Processes that end messages wake the waiting sessions of the same database.
//! Sessions and workers run this code.

use crate::pg::shmem::SharedSlice;
use crate::pg::{latch, xact};
use std::sync::atomic::{
    AtomicU32,
    Ordering::{Relaxed, SeqCst},
};

/// The database in which each session waits, by process number; 0 = it does not wait. Written by the session; read by
/// processes that end messages. A stale value only wakes another session needlessly.
static WAITERS: SharedSlice<AtomicU32> = SharedSlice::new();

/// The size of this area of shared memory, in bytes. Valid once the server has computed its limits.
pub fn bytes() -> usize {
    xact::max_sessions() * size_of::<AtomicU32>()
}

/// Attaches this area. Called from the shared memory startup hook.
pub fn attach() {
    WAITERS.attach(c"outbox waiters", xact::max_sessions());
}

/// Registers this process to be woken when messages of this database end, until `stop`.
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

/// Wakes the sessions that wait in this database, because messages of it have ended. Called in the commit callback, so
/// it neither allocates nor raises an error.
pub fn wake(database: u32) {
    for (number, waiter) in WAITERS.get().unwrap_or_default().iter().enumerate() {
        if waiter.load(SeqCst) == database {
            latch::set(number as i32);
        }
    }
}

fn mine() -> Option<&'static AtomicU32> {
    WAITERS.get()?.get(usize::try_from(latch::my_proc_number()).ok()?)
}
