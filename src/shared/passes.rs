//! The last passes that did something, of each entry of a worker. The worker that has the entry writes at the end of a
//! pass; outbox_passes reads. An entry may go to another worker, even of another database, so each pass names its
//! database and worker. A restart of the server clears all.

use super::requests::{COUNTS, counts};
use crate::pg::catalog;
use crate::pg::clock::now_us;
use crate::pg::shmem::SpinLock;
use outbox_worker::PassCounts;
use std::sync::atomic::{AtomicI64, AtomicU32, Ordering::Relaxed};

const KEPT: usize = 120;

#[repr(C)]
pub struct RecentPasses {
    /// Held by a process that writes or reads passes.
    lock: SpinLock,
    written: AtomicU32,
    passes: [RecentPass; KEPT],
}

#[repr(C)]
struct RecentPass {
    /// 0 = there is none.
    database: AtomicU32,
    /// The number of the worker; `workers::id_of` gives its name.
    worker: AtomicU32,
    at_us: AtomicI64,
    counts: [AtomicI64; COUNTS],
}

impl RecentPasses {
    pub fn record(&self, worker: u32, report: &PassCounts) {
        let (database, now_us, counts) = (catalog::my_database(), now_us(), counts(report));
        self.lock.with(|| {
            let pass = &self.passes[self.written.fetch_add(1, Relaxed) as usize % KEPT];
            pass.database.store(database, Relaxed);
            pass.worker.store(worker, Relaxed);
            pass.at_us.store(now_us, Relaxed);
            for (count, value) in pass.counts.iter().zip(counts) {
                count.store(value, Relaxed);
            }
        });
    }

    /// The passes of this database, one after the other: [the number of the worker, when the pass ended in µs since
    /// 1970, then `counts`].
    pub fn here(&self) -> Vec<i64> {
        let (database, mut values) = (catalog::my_database(), Vec::with_capacity(KEPT * (2 + COUNTS)));
        self.lock.with(|| {
            for pass in self
                .passes
                .iter()
                .filter(|pass| pass.database.load(Relaxed) == database)
            {
                values.extend([i64::from(pass.worker.load(Relaxed)), pass.at_us.load(Relaxed)]);
                values.extend(pass.counts.iter().map(|count| count.load(Relaxed)));
            }
        });
        values
    }
}
