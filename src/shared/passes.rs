//! The last passes of each worker that did something, in shared memory: one ring for each entry of a worker. That
//! worker writes at the end of a pass; outbox_passes reads. An entry may go to another worker, even of another
//! database, so each pass names its database and worker. A restart of the server clears the rings.

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

/// Written only by the worker that has the entry; read by sessions.
#[repr(C)]
struct Ring {
    written: AtomicU64,
    passes: [Pass; KEPT],
}

#[repr(C)]
struct Pass {
    /// The number of the pass in its ring, from 1 on; 0 = there is none, or it is being written.
    number: AtomicU64,
    database: AtomicU32,
    /// The number of the worker; `workers::id_of` gives its name.
    worker: AtomicU32,
    at_us: AtomicI64,
    counts: [AtomicI64; COUNTS],
}

// SAFETY: only atomics and arrays of them; zero is a valid value of each.
unsafe impl Shareable for Table {}

static TABLE: Shared<Table> = Shared::new();

/// The size of this area of shared memory, in bytes.
pub fn bytes() -> usize {
    size_of::<Table>()
}

/// Attaches this area. Called from the shared memory startup hook.
pub fn attach() {
    TABLE.attach(c"outbox passes");
}

/// Records a pass of the worker whose entry has the index `entry`.
pub fn record(entry: usize, worker: u32, report: &Report) {
    let Some(ring) = TABLE.get().and_then(|table| table.0.get(entry)) else {
        return;
    };
    let number = ring.written.load(Relaxed) + 1;
    let pass = &ring.passes[(number % KEPT as u64) as usize];
    pass.number.store(0, Relaxed);
    fence(Release); // a reader that sees what follows also sees this 0
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
    /// The OID of its database, and [the number of its worker, when it ended in µs since 1970, then `counts`]; None
    /// while it is being written.
    fn read(&self) -> Option<(u32, Vec<i64>)> {
        let number = self.number.load(Acquire);
        let database = self.database.load(Relaxed);
        let mut values = vec![i64::from(self.worker.load(Relaxed)), self.at_us.load(Relaxed)];
        values.extend(self.counts.iter().map(|count| count.load(Relaxed)));
        fence(Acquire);
        (number > 0 && self.number.load(Relaxed) == number).then_some((database, values))
    }
}

/// The passes of the workers of this database, one after the other: [the number of the worker, when the pass ended in
/// µs since 1970, then `counts`]. None if the library was not preloaded.
pub fn here() -> Option<Vec<i64>> {
    let (table, database) = (TABLE.get()?, catalog::my_database());
    let passes = table.0.iter().flat_map(|ring| &ring.passes);
    let here = passes
        .filter(|pass| pass.database.load(Relaxed) == database)
        .filter_map(Pass::read);
    // A pass that was overwritten meanwhile may belong to another database.
    Some(
        here.filter(|(owner, _)| *owner == database)
            .flat_map(|(_, values)| values)
            .collect(),
    )
}
