//! Reports of a worker to pg_stat_activity and the cumulative statistics. Without them autovacuum would not notice its
//! writes.

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

/// Reports this process's counts to the statistics. Core limits how often that happens.
pub fn flush() {
    // SAFETY: called outside of a transaction.
    unsafe {
        pg_sys::pgstat_report_stat(false);
    }
}
