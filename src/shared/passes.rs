//! The last passes of each worker that did something, in shared memory: a ring a place of a worker. Written by that worker
//! at the end of a pass, read by outbox_passes. A place goes to another worker, of another database perhaps, so each entry
//! says whose it is. A restart of the server begins anew.

use super::MAX_WORKERS;
use super::requests::{COUNTS, counts};
use crate::pg::catalog;
use crate::pg::clock::now_us;
use crate::pg::shmem::{Shareable, Shared};
use outbox_worker::Report;
use std::sync::atomic::{
    AtomicI64, AtomicU32, AtomicU64,
    Ordering::{Acquire, Relaxed, Release},
    fence,
};

const KEPT: usize = 120;

#[repr(C)]
struct Table([Ring; MAX_WORKERS]);

/// Written by the worker that has the place, and by nobody else; read by sessions.
#[repr(C)]
struct Ring {
    written: AtomicU64,
    passes: [Pass; KEPT],
}

#[repr(C)]
struct Pass {
    /// The how manieth of the ring; 0 = there is none, or it is being written.
    number: AtomicU64,
    database: AtomicU32,
    /// server-N is its name.
    worker: AtomicU32,
    at_us: AtomicI64,
    counts: [AtomicI64; COUNTS],
}

// SAFETY: only atomics and arrays of them; zero is a valid value of each.
unsafe impl Shareable for Table {}

static TABLE: Shared<Table> = Shared::new();

/// Shared memory that is needed, in bytes.
pub fn bytes() -> usize {
    size_of::<Table>()
}

/// In the startup hook.
pub fn attach() {
    TABLE.attach(c"outbox passes");
}

/// A pass of the worker in this place is over.
pub fn record(entry: usize, worker: u32, report: &Report) {
    let Some(ring) = TABLE.get().and_then(|table| table.0.get(entry)) else {
        return;
    };
    let number = ring.written.load(Relaxed) + 1;
    let pass = &ring.passes[(number % KEPT as u64) as usize];
    pass.number.store(0, Relaxed);
    fence(Release); // who reads what follows reads the 0 as well
    pass.database.store(catalog::my_database(), Relaxed);
    pass.worker.store(worker, Relaxed);
    pass.at_us.store(now_us(), Relaxed);
    for (count, value) in pass.counts.iter().zip(counts(report)) {
        count.store(value, Relaxed);
    }
    pass.number.store(number, Release);
    ring.written.store(number, Relaxed);
}

impl Pass {
    /// Its database, and [the number of its worker, when in µs since 1970, figures]; None while it is being written.
    fn read(&self) -> Option<(u32, Vec<i64>)> {
        let number = self.number.load(Acquire);
        let database = self.database.load(Relaxed);
        let mut values = vec![i64::from(self.worker.load(Relaxed)), self.at_us.load(Relaxed)];
        values.extend(self.counts.iter().map(|count| count.load(Relaxed)));
        fence(Acquire);
        (number > 0 && self.number.load(Relaxed) == number).then_some((database, values))
    }
}

/// Of the workers of this database, one tick after the other: [the number of the worker, when in µs since 1970, figures].
/// None when not preloaded.
pub fn here() -> Option<Vec<i64>> {
    let (table, database) = (TABLE.get()?, catalog::my_database());
    let passes = table.0.iter().flat_map(|ring| &ring.passes);
    let here = passes
        .filter(|pass| pass.database.load(Relaxed) == database)
        .filter_map(Pass::read);
    // Written anew meanwhile it may be of another one.
    Some(
        here.filter(|(whose, _)| *whose == database)
            .flat_map(|(_, values)| values)
            .collect(),
    )
}
