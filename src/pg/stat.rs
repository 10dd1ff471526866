//! What pg_stat_activity and the statistics show of a worker. Without the reports autovacuum is blind to its writes.

use pgrx::pg_sys;
use std::ffi::CStr;

pub fn running(what: &CStr) {
    // SAFETY: the string is copied.
    unsafe { pg_sys::pgstat_report_activity(pg_sys::BackendState::STATE_RUNNING, what.as_ptr()) }
}

pub fn idle() {
    // SAFETY: a null text is allowed.
    unsafe { pg_sys::pgstat_report_activity(pg_sys::BackendState::STATE_IDLE, std::ptr::null()) }
}

/// Hands the counts of this process to the statistics; core itself limits how often that is done.
pub fn flush() {
    // SAFETY: called outside of a transaction.
    unsafe {
        pg_sys::pgstat_report_stat(false);
    }
}
