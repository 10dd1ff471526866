//! Runs user code: functions and expressions that a user named. Sessions and workers call it on the main thread.
//! PL/pgSQL can trap a cancel (`exception when query_canceled`) and go on, and a time limit or pg_cancel_backend()
//! sends only one. So a cancel in user code is final: each cancel that is raised requests the next one, until the code
//! has been left. A block traps one cancel, and its handler gets the next. So the code ends after as many cancels as
//! there are blocks around it.
//!
//! A language that traps errors in a loop, as `eval` of PL/Perl can, traps all of them. A worker then ends its process.

use super::ending::{self, RegisterTimeout, USER_TIMEOUT, enable_timeout_after};
use pgrx::{PgSqlErrorCode, pg_sys};
use std::ffi::{c_int, c_void};
use std::ptr::write_volatile;
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering::Relaxed};

/// How long user code may go on after a cancel before the worker ends its process.
const LAST_RESORT_MS: i32 = 1_000;

/// The number of nested calls of `run`. The main thread writes this and the next three statics; the timer's handler
/// reads them.
static DEPTH: AtomicU32 = AtomicU32::new(0);
/// How often user code was left.
static LEFT: AtomicU32 = AtomicU32::new(0);
/// `LEFT` as of the last cancel in user code, plus one; 0 = none yet.
static CANCELED: AtomicU32 = AtomicU32::new(0);
/// The timer that ends the process. Only workers have it.
static TIMER: AtomicI32 = AtomicI32::new(NONE);
const NONE: i32 = -1;

// From utils/elog.h: core's function itself, because it is called where no Rust panic may begin.
unsafe extern "C-unwind" {
    fn geterrcode() -> c_int;
}

/// Lets user code that goes on after a cancel end this process. A worker calls it once.
pub fn may_end_the_process() {
    // SAFETY: the timers of this process are set up; the handler does what a signal handler may.
    TIMER.store(unsafe { RegisterTimeout(USER_TIMEOUT, on_last_resort) }, Relaxed);
}

/// Runs user code.
pub fn run<T>(body: impl FnOnce() -> T) -> T {
    // SAFETY: as core's callers do it, the frame is removed from the stack before it goes out of scope. An error in
    // `body` is a panic here, and a C frame below that catches one restores the stack that it found.
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
        // SAFETY: variables of the server. No function is called, because a panic may be unwinding.
        unsafe {
            pg_sys::error_context_stack = self.0;
            if DEPTH.fetch_sub(1, Relaxed) > 1 {
                return;
            }
            if is_canceled() {
                // The next statement must not be canceled, unless this process was asked to end: that request stays.
                write_volatile(&raw mut pg_sys::QueryCancelPending, ending::is_requested().into());
            }
        }
        LEFT.fetch_add(1, Relaxed);
    }
}

/// Whether the running user code was canceled.
fn is_canceled() -> bool {
    CANCELED.load(Relaxed) == LEFT.load(Relaxed).wrapping_add(1)
}

/// Core calls this for each error and message, before it throws the error.
unsafe extern "C-unwind" fn on_report(_: *mut c_void) {
    // SAFETY: called while core reports an error. The flags are the server's, and its signal handlers write them, too.
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

/// Ends the process if canceled user code still runs. Called in a signal handler.
unsafe extern "C-unwind" fn on_last_resort() {
    if DEPTH.load(Relaxed) > 0 && is_canceled() {
        // SAFETY: `on_overdue` is made for signal handlers.
        unsafe { ending::on_overdue() }
    }
}
