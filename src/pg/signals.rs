//! Signals of a background worker. Until its loop begins a worker has core's own handlers: with pgrx's, which only set a
//! flag, one that waits for a lock would make `pg_ctl stop -m fast` hang. From then on SIGTERM cancels the statement that
//! runs, if any, and asks the loop to end: core's `die` would end the process inside a claim or a settle, and what the
//! broker has confirmed by then would be sent again. What users' code makes of a cancel is in `foreign`.

use super::ending::{self, RegisterTimeout, SetLatch, USER_TIMEOUT, enable_timeout_after};
use super::foreign;
use pgrx::pg_sys;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// The process has begun its orderly end. Written by the main thread, also read by the handler.
static ENDS: AtomicBool = AtomicBool::new(false);
/// A statement may run. Written by `pg::txn`, read by the handler.
static IN_TRANSACTION: AtomicBool = AtomicBool::new(false);

// The handlers themselves; the bindings wrap functions in Rust ones, which a signal must not call.
unsafe extern "C-unwind" {
    fn die(signal: i32);
    #[allow(non_snake_case)] // core's name
    fn SignalHandlerForConfigReload(signal: i32);
}

/// Installs core's handlers and lets signals in. First call of every worker's main function.
pub fn install() {
    // SAFETY: called once, before the worker does anything; the handlers are core's.
    unsafe {
        pg_sys::pqsignal(pg_sys::SIGTERM as i32, Some(die));
        pg_sys::pqsignal(pg_sys::SIGHUP as i32, Some(SignalHandlerForConfigReload));
        // A reload since the fork is lost, for until here SIGHUP is ignored (StartBackgroundWorker): as if there were one.
        std::ptr::write_volatile(&raw mut pg_sys::ConfigReloadPending, 1);
        pg_sys::BackgroundWorkerUnblockSignals();
    }
}

/// From here on SIGTERM lets the loop come to an orderly end: `asked_to_end` must be looked at after every wait.
pub fn end_in_order() {
    foreign::may_end_the_process();
    // SAFETY: the handler does only what a signal handler may.
    unsafe {
        pg_sys::pqsignal(pg_sys::SIGTERM as i32, Some(on_terminate));
    }
}

/// Async-signal-safe: atomics, core's flags and SetLatch; errno is kept, as core's handlers do.
unsafe extern "C-unwind" fn on_terminate(_signal: i32) {
    // SAFETY: errno and the latch are this thread's own; every other thread has all signals blocked.
    unsafe {
        let errno = *libc::__errno_location();
        ending::REQUESTED.store(true, Relaxed);
        // The last transactions are not canceled: a fast stop asks twice, and so does DROP DATABASE (FORCE).
        if IN_TRANSACTION.load(Relaxed) && !ENDS.load(Relaxed) {
            std::ptr::write_volatile(&raw mut pg_sys::QueryCancelPending, 1);
            std::ptr::write_volatile(&raw mut pg_sys::InterruptPending, 1);
        }
        SetLatch(pg_sys::MyLatch);
        *libc::__errno_location() = errno;
    }
}

/// The orderly end begins, and may take so long: then the process ends wherever it is.
pub fn end_within(limit_ms: i32) {
    ENDS.store(true, Relaxed);
    // SAFETY: the timers of this process are set up; the handler does what a signal handler may.
    unsafe {
        let timer = RegisterTimeout(USER_TIMEOUT, ending::on_overdue);
        enable_timeout_after(timer, limit_ms);
    }
}

/// Whether nothing new is to begin, for the orderly end comes first.
pub fn ends_first() -> bool {
    is_shutdown_requested() && !ENDS.load(Relaxed)
}

/// Whether somebody asked this process to end.
pub fn is_shutdown_requested() -> bool {
    ending::is_requested()
}

/// Called by `pg::txn` around each transaction. A cancel that came too late to hit a statement must not hit the next one.
pub fn in_transaction(is_inside: bool) {
    IN_TRANSACTION.store(is_inside, Relaxed);
    if !is_inside {
        // SAFETY: written by handlers of this thread only, hence the volatile access.
        unsafe { std::ptr::write_volatile(&raw mut pg_sys::QueryCancelPending, 0) }
    }
}

/// A cancel that came while no statement ran is over.
pub fn forget_cancel() {
    in_transaction(false);
}

/// Sends SIGTERM to a process of this server, as the postmaster does to a worker that shall end.
pub fn terminate(pid: i32) {
    // SAFETY: a plain system call; the caller knows the process to live.
    unsafe {
        libc::kill(pid, libc::SIGTERM);
    }
}

/// Takes notice of a reload, if there was one: reads the configuration files and says true.
pub fn reload_if_requested() -> bool {
    // SAFETY: the flag is written by the signal handler of this thread only, hence the volatile access.
    unsafe {
        if std::ptr::read_volatile(&raw const pg_sys::ConfigReloadPending) == 0 {
            return false;
        }
        std::ptr::write_volatile(&raw mut pg_sys::ConfigReloadPending, 0);
        pg_sys::ProcessConfigFile(pg_sys::GucContext::PGC_SIGHUP);
    }
    true
}

/// Ends the process in order, at its own wish.
pub fn exit(code: i32) -> ! {
    // SAFETY: proc_exit runs the exit callbacks and does not return.
    unsafe { pg_sys::proc_exit(code) }
}

/// Acts on a cancel, a termination or a barrier that is due.
pub fn check_for_interrupts() {
    pgrx::check_for_interrupts!();
}
