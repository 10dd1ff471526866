//! Code of other people that the extension runs: functions and expressions that a user named. PL/pgSQL can trap a cancel
//! (`exception when query_canceled`) and go on, and one cancel is all that a time limit or pg_cancel_backend() sends. So a
//! cancel in such code is final: when it is raised, the next one is due at once, until the code has been left. A block
//! traps one cancel, and its handler meets the next; so the code ends after as many cancels as it has blocks around it.
//!
//! A language that traps errors in a loop of its own, as `eval` of PL/Perl can, traps that too. Then a worker ends itself.

use super::ending::{self, RegisterTimeout, USER_TIMEOUT, enable_timeout_after};
use pgrx::{PgSqlErrorCode, pg_sys};
use std::ffi::{c_int, c_void};
use std::ptr::write_volatile;
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering::Relaxed};

/// How long such code may go on after a cancel before it takes a worker's process with it.
const LAST_RESORT_MS: i32 = 1_000;

/// Calls of `run` under way. All of these are of the main thread; the handler of the timer reads them.
static DEPTH: AtomicU32 = AtomicU32::new(0);
/// How often such code was left. And as of the last cancel in it, plus one; 0 = none yet.
static LEFT: AtomicU32 = AtomicU32::new(0);
static CANCELED: AtomicU32 = AtomicU32::new(0);
/// The timer of the last resort, which only workers have.
static TIMER: AtomicI32 = AtomicI32::new(NONE);
const NONE: i32 = -1;

// From utils/elog.h: core's function itself, for it is called where no Rust panic may begin.
unsafe extern "C-unwind" {
    fn geterrcode() -> c_int;
}

/// From here on such code may end this process, if nothing else ends it. Once, by a worker.
pub fn may_end_the_process() {
    // SAFETY: the timers of this process are set up; the handler does what a signal handler may.
    TIMER.store(unsafe { RegisterTimeout(USER_TIMEOUT, on_last_resort) }, Relaxed);
}

/// Runs code of other people.
pub fn run<T>(body: impl FnOnce() -> T) -> T {
    // SAFETY: as core's callers do it: a frame on the stack that is taken off before it goes. An error on the way is a
    // panic here, and a C frame below that catches one puts back what it had found.
    unsafe {
        let mut frame = pg_sys::ErrorContextCallback {
            previous: pg_sys::error_context_stack,
            callback: Some(on_report),
            arg: std::ptr::null_mut(),
        };
        DEPTH.fetch_add(1, Relaxed);
        let _left = Left(frame.previous);
        pg_sys::error_context_stack = &raw mut frame;
        body()
    }
}

struct Left(*mut pg_sys::ErrorContextCallback);

impl Drop for Left {
    fn drop(&mut self) {
        // SAFETY: variables of the server; nothing is called, for a panic may be under way.
        unsafe {
            pg_sys::error_context_stack = self.0;
            if DEPTH.fetch_sub(1, Relaxed) > 1 {
                return;
            }
            if is_canceled() {
                // The next statement is not to blame. But who asked for the end of this process asked for good.
                write_volatile(&raw mut pg_sys::QueryCancelPending, ending::is_requested().into());
            }
        }
        LEFT.fetch_add(1, Relaxed);
    }
}

/// Whether the code that runs was canceled.
fn is_canceled() -> bool {
    CANCELED.load(Relaxed) == LEFT.load(Relaxed).wrapping_add(1)
}

/// Core calls it for each error and message, before the error is thrown.
unsafe extern "C-unwind" fn on_report(_: *mut c_void) {
    // SAFETY: there is an error under way; flags of the server, which its handlers of signals write as well.
    unsafe {
        if geterrcode() != PgSqlErrorCode::ERRCODE_QUERY_CANCELED as c_int {
            return;
        }
        write_volatile(&raw mut pg_sys::QueryCancelPending, 1);
        write_volatile(&raw mut pg_sys::InterruptPending, 1);
        let timer = TIMER.load(Relaxed);
        if timer != NONE && !is_canceled() {
            enable_timeout_after(timer, LAST_RESORT_MS);
        }
    }
    CANCELED.store(LEFT.load(Relaxed).wrapping_add(1), Relaxed);
}

/// In a signal handler.
unsafe extern "C-unwind" fn on_last_resort() {
    if DEPTH.load(Relaxed) > 0 && is_canceled() {
        // SAFETY: a handler of another timer.
        unsafe { ending::on_overdue() }
    }
}
