//! Switches off Rust backtraces in all processes of the server. pgrx requests one for each error. With RUST_BACKTRACE=1
//! in the environment that costs milliseconds for each error, and puts pages of addresses into its DETAIL. Taking one
//! also allocates, so an error raised inside malloc could deadlock.

use std::backtrace::Backtrace;

/// This variable takes precedence over RUST_BACKTRACE.
const VARIABLE: &str = "RUST_LIB_BACKTRACE";

/// Switches backtraces off. Called when the library is loaded, before any error can be raised. The standard library
/// reads the environment once in each process, and children of the postmaster inherit the result. So the variable can
/// be restored at once for all other programs.
pub fn never() {
    let before = std::env::var_os(VARIABLE);
    // SAFETY: the process loads the library on its only thread.
    unsafe { std::env::set_var(VARIABLE, "0") };
    drop(Backtrace::capture());
    // SAFETY: the process still has only one thread.
    unsafe {
        match before {
            Some(value) => std::env::set_var(VARIABLE, value),
            None => std::env::remove_var(VARIABLE),
        }
    }
}
