//! What ended in each database and how long it took, in a ring of minutes. Workers write at settle and sessions at
//! COMMIT; outbox_throughput reads.

use super::MAX_DATABASES;
use crate::pg::shmem::{Shareable, Shared};
use outbox_core::throughput::Throughput;

#[repr(C)]
struct PerDatabase([Throughput; MAX_DATABASES]);

// SAFETY: only atomics and arrays of them; zero is a valid value of each.
unsafe impl Shareable for PerDatabase {}

static THROUGHPUT: Shared<PerDatabase> = Shared::new();

/// The size of this area of shared memory, in bytes.
pub fn bytes() -> usize {
    size_of::<PerDatabase>()
}

/// Attaches this area. Called from the shared memory startup hook.
pub fn attach() {
    THROUGHPUT.attach(c"outbox throughput");
}

/// The ring of the database whose entry has this index.
pub fn of(database: usize) -> Option<&'static Throughput> {
    THROUGHPUT.get()?.0.get(database)
}
