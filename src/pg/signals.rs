//! Signals of a background worker. Core's own handlers are used: with pgrx's, which only set a flag, a worker that waits
//! for a lock would make `pg_ctl stop -m fast` hang.

use pgrx::pg_sys;

// The handlers themselves; the bindings wrap them in Rust functions, which a signal cannot call.
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
        pg_sys::BackgroundWorkerUnblockSignals();
    }
}

/// Takes notice of a reload, if there was one: reads the configuration files and says true.
pub fn reload_if_asked() -> bool {
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

/// True if somebody asked this process to end. The request is put aside, so that the worker may still settle what the
/// broker has confirmed; `die_now` must follow within the time a fast shutdown may take.
pub fn take_die_request() -> bool {
    // SAFETY: as above.
    unsafe {
        if std::ptr::read_volatile(&raw const pg_sys::ProcDiePending) == 0 {
            return false;
        }
        std::ptr::write_volatile(&raw mut pg_sys::ProcDiePending, 0);
    }
    true
}

/// Ends the process as core's `die` would have: FATAL, exit code 1.
pub fn die_now() -> ! {
    // SAFETY: sets what the signal handler sets, then lets core act on it.
    unsafe {
        std::ptr::write_volatile(&raw mut pg_sys::ProcDiePending, 1);
        std::ptr::write_volatile(&raw mut pg_sys::InterruptPending, 1);
        pgrx::check_for_interrupts!();
        pg_sys::proc_exit(1)
    }
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
