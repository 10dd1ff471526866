//! The end of a worker's process: whether it was requested, and a forced end at any point. `signals`, `user_code` and
//! `txn` call it, and so do handlers of signals and timers.

use pgrx::pg_sys;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// Whether this process was asked to end. Written by the SIGTERM handler in `signals`, read by the main thread.
pub(super) static REQUESTED: AtomicBool = AtomicBool::new(false);

// From utils/timeout.h, which the bindings leave out.
unsafe extern "C-unwind" {
    #[allow(non_snake_case)]
    pub(super) fn RegisterTimeout(id: i32, handler: unsafe extern "C-unwind" fn()) -> i32;
    pub(super) fn enable_timeout_after(id: i32, delay_ms: i32);
    pub(super) fn disable_timeout(id: i32, keep_indicator: bool);
}
/// Any number from core's USER_TIMEOUT on requests a free timer. USER_TIMEOUT is 12 in PG 15 and 16, and 13 since PG
/// 17.
pub(super) const USER_TIMEOUT: i32 = 13;

// Core's function itself: the bindings wrap it in a Rust function, which a signal handler must not call.
unsafe extern "C-unwind" {
    #[allow(non_snake_case)] // core's name
    pub(super) fn SetLatch(latch: *mut pg_sys::Latch);
}

pub(super) fn is_requested() -> bool {
    REQUESTED.load(Relaxed)
}

/// Forces the end of the process, like core's `die`: the next check for interrupts ends it, and no code can trap that.
/// Called in a signal handler.
pub(super) unsafe extern "C-unwind" fn on_overdue() {
    // SAFETY: flags and the latch of this process.
    unsafe {
        std::ptr::write_volatile(&raw mut pg_sys::ProcDiePending, 1);
        std::ptr::write_volatile(&raw mut pg_sys::InterruptPending, 1);
        SetLatch(pg_sys::MyLatch);
    }
}
