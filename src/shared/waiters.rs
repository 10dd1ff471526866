//! Sessions that wait for the end of a message. Processes that end messages wake those of the same database. Run by sessions and
//! workers.

use crate::pg::shmem::SharedSlice;
use crate::pg::{latch, xact};
use std::sync::atomic::{
    AtomicU32,
    Ordering::{Relaxed, SeqCst},
};

/// Of each session, by process number, the database in which it waits; 0 = it does not. Written by the session; read by
/// processes that end messages. A value left behind wakes another session for nothing.
static WAITERS: SharedSlice<AtomicU32> = SharedSlice::new();

/// Shared memory that is needed, in bytes. Once the server knows its limits.
pub fn bytes() -> usize {
    xact::max_sessions() * size_of::<AtomicU32>()
}

/// In the startup hook.
pub fn attach() {
    WAITERS.attach(c"outbox waiters", xact::max_sessions());
}

/// From here until `stop` this process is woken when messages of this database end.
pub fn wait_in(database: u32) {
    if let Some(waiter) = mine() {
        waiter.store(database, SeqCst);
    }
}

/// Called at the end of a transaction: no allocation, no error.
pub fn stop() {
    if let Some(waiter) = mine() {
        waiter.store(0, Relaxed);
    }
}

/// Messages of this database have ended. Called in the commit callback: no allocation, no error.
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
