//! The memory of all Rust code of a process that delivers. Postgres' own is not touched. Messages are made on one thread
//! and freed on others: docs/decisions/workers.md has the figures.

use libmimalloc_sys::{mi_option_set, mi_option_t};
use mimalloc::MiMalloc;

#[global_allocator]
static ALLOCATOR: MiMalloc = MiMalloc;

/// `mi_option_arena_reserve` of mimalloc.h, which the crate does not name.
const ARENA_RESERVE: mi_option_t = 23;
/// The virtual memory that a process reserves at a time, in KiB: the least. The default is 1 GiB.
const RESERVED_KIB: std::ffi::c_long = 32 << 10;

/// Reserves little virtual memory. Call it before anything is allocated.
pub fn reserve_little() {
    // SAFETY: sets a number.
    unsafe { mi_option_set(ARENA_RESERVE, RESERVED_KIB) };
}
