//! The end of this process: whether somebody asked for it, and what ends it wherever it is. Called by handlers of signals and
//! timers, too.

use pgrx::pg_sys;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// Somebody asked this process to end. Written by the handler of `signals`.
pub(super) static REQUESTED: AtomicBool = AtomicBool::new(false);

// From utils/timeout.h, which the bindings leave out.
unsafe extern "C-unwind" {
    #[allow(non_snake_case)]
    pub(super) fn RegisterTimeout(id: i32, handler: unsafe extern "C-unwind" fn()) -> i32;
    pub(super) fn enable_timeout_after(id: i32, delay_ms: i32);
    pub(super) fn disable_timeout(id: i32, keep_indicator: bool);
}
/// Any number from core's USER_TIMEOUT on asks for a free one. It is 12 in PG 15 and 16, 13 since.
pub(super) const USER_TIMEOUT: i32 = 13;

// The function itself; the bindings wrap it in a Rust one, which a signal must not call.
unsafe extern "C-unwind" {
    #[allow(non_snake_case)] // core's name
    pub(super) fn SetLatch(latch: *mut pg_sys::Latch);
}

pub(super) fn is_requested() -> bool {
    REQUESTED.load(Relaxed)
}

/// In a signal handler. As core's `die`: the next check for interrupts ends the process, and nothing can trap that.
pub(super) unsafe extern "C-unwind" fn on_overdue() {
    // SAFETY: flags and the latch of this process.
    unsafe {
        std::ptr::write_volatile(&raw mut pg_sys::ProcDiePending, 1);
        std::ptr::write_volatile(&raw mut pg_sys::InterruptPending, 1);
        SetLatch(pg_sys::MyLatch);
    }
}
