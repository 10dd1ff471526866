//! What ended in each database and how long it took, in a ring of minutes. Workers write it at a settle and sessions at COMMIT;
//! outbox_throughput reads it.

use super::MAX_DATABASES;
use crate::pg::shmem::{Shareable, Shared};
use outbox_core::throughput::Throughput;

#[repr(C)]
struct PerDatabase([Throughput; MAX_DATABASES]);

// SAFETY: only atomics and arrays of them; zero is a valid value of each.
unsafe impl Shareable for PerDatabase {}

static THROUGHPUT: Shared<PerDatabase> = Shared::new();

/// Shared memory that is needed, in bytes.
pub fn bytes() -> usize {
    size_of::<PerDatabase>()
}

/// In the startup hook.
pub fn attach() {
    THROUGHPUT.attach(c"outbox throughput");
}

/// Of the database in this place.
pub fn of(database: usize) -> Option<&'static Throughput> {
    THROUGHPUT.get()?.0.get(database)
}
