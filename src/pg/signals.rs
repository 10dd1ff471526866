//! Signals of a background worker. Until its loop begins, a worker has core's handlers. pgrx's handlers only set a
//! flag, so a worker that waits for a lock would make `pg_ctl stop -m fast` hang. From the loop on, SIGTERM cancels the
//! running statement, if any, and asks the loop to end. Core's `die` would end the process inside a claim or a settle,
//! and messages that the broker has confirmed would be sent again. `user_code` describes what a cancel does to user code.

use super::ending::{self, RegisterTimeout, SetLatch, USER_TIMEOUT, enable_timeout_after};
use super::{major, user_code};
use pgrx::pg_sys;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// Whether the process has begun its orderly end. Written by the main thread, also read by the handler.
static ENDS: AtomicBool = AtomicBool::new(false);
/// Whether a transaction is open, so that a statement may run. Written by `pg::txn`, read by the handler.
static IN_TRANSACTION: AtomicBool = AtomicBool::new(false);

// Core's handlers themselves: the bindings wrap functions in Rust ones, which a signal must not call.
unsafe extern "C-unwind" {
    fn die(signal: i32);
    #[allow(non_snake_case)] // core's name
    fn SignalHandlerForConfigReload(signal: i32);
}

/// Installs core's handlers and unblocks signals. The first call in every worker's main function.
pub fn install() {
    // SAFETY: called once, before the worker does anything; the handlers are core's.
    unsafe {
        major::on_signal(pg_sys::SIGTERM, die);
        major::on_signal(pg_sys::SIGHUP, SignalHandlerForConfigReload);
        // Until here SIGHUP is ignored (StartBackgroundWorker), so a reload since the fork is lost. Pretend that there
        // was one.
        std::ptr::write_volatile(&raw mut pg_sys::ConfigReloadPending, 1);
        pg_sys::BackgroundWorkerUnblockSignals();
    }
}

/// From now on SIGTERM requests an orderly end of the loop, which must check `is_shutdown_requested` after every wait.
pub fn end_in_order() {
    user_code::may_end_the_process();
    // SAFETY: the handler does only what a signal handler may.
    unsafe {
        major::on_signal(pg_sys::SIGTERM, on_terminate);
    }
}

/// The SIGTERM handler of the loop. Async-signal-safe: it uses only atomics, core's flags and SetLatch, and restores
/// errno as core's handlers do.
unsafe extern "C-unwind" fn on_terminate(_signal: i32) {
    // SAFETY: errno and the latch belong to this thread; every other thread has all signals blocked.
    unsafe {
        let errno = *libc::__errno_location();
        ending::REQUESTED.store(true, Relaxed);
        // The last transactions are not canceled: a fast shutdown sends SIGTERM twice, and so does DROP DATABASE
        // (FORCE).
        if IN_TRANSACTION.load(Relaxed) && !ENDS.load(Relaxed) {
            std::ptr::write_volatile(&raw mut pg_sys::QueryCancelPending, 1);
            std::ptr::write_volatile(&raw mut pg_sys::InterruptPending, 1);
        }
        SetLatch(pg_sys::MyLatch);
        *libc::__errno_location() = errno;
    }
}

/// Begins the orderly end. After `limit_ms` the process ends at any point.
pub fn end_within(limit_ms: i32) {
    ENDS.store(true, Relaxed);
    // SAFETY: the timers of this process are set up; the handler does what a signal handler may.
    unsafe {
        let timer = RegisterTimeout(USER_TIMEOUT, ending::on_overdue);
        enable_timeout_after(timer, limit_ms);
    }
}

/// Whether nothing new may begin, because a shutdown was requested and the orderly end has not begun yet.
pub fn ends_first() -> bool {
    is_shutdown_requested() && !ENDS.load(Relaxed)
}

/// Whether this process was asked to end.
pub fn is_shutdown_requested() -> bool {
    ending::is_requested()
}

/// Called by `pg::txn` around each transaction. A cancel that came too late to hit a statement must not hit the next
/// one.
pub fn in_transaction(is_inside: bool) {
    IN_TRANSACTION.store(is_inside, Relaxed);
    if !is_inside {
        // SAFETY: written by handlers of this thread only, so the access is volatile.
        unsafe { std::ptr::write_volatile(&raw mut pg_sys::QueryCancelPending, 0) }
    }
}

/// Drops a cancel that came while no statement ran.
pub fn forget_cancel() {
    in_transaction(false);
}

/// Sends SIGTERM to a process of this server, as the postmaster does to end a worker.
pub fn terminate(pid: i32) {
    // SAFETY: a plain system call; the caller knows the process to live.
    unsafe {
        libc::kill(pid, libc::SIGTERM);
    }
}

/// Reads the configuration files if a reload was requested. Returns whether it was.
pub fn reload_if_requested() -> bool {
    // SAFETY: the flag is written by the signal handler of this thread only, so the access is volatile.
    unsafe {
        if std::ptr::read_volatile(&raw const pg_sys::ConfigReloadPending) == 0 {
            return false;
        }
        std::ptr::write_volatile(&raw mut pg_sys::ConfigReloadPending, 0);
        pg_sys::ProcessConfigFile(pg_sys::GucContext::PGC_SIGHUP);
    }
    true
}

/// Ends this process and runs its exit callbacks.
pub fn exit(code: i32) -> ! {
    major::exit(code)
}

/// Handles a pending cancel, termination or barrier.
pub fn check_for_interrupts() {
    pgrx::check_for_interrupts!();
}
