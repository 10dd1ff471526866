//! No backtrace is ever taken in a process of the server. pgrx asks for one at each error; where the environment says
//! RUST_BACKTRACE=1 that costs each error milliseconds and puts pages of addresses into its DETAIL. Taking one allocates,
//! so an error that is raised inside of malloc could wait for itself.

use std::backtrace::Backtrace;

/// Wins over RUST_BACKTRACE.
const VARIABLE: &str = "RUST_LIB_BACKTRACE";

/// When the library is loaded, before any error can be raised. The standard library reads the environment once in the life of
/// a process, and children of the postmaster inherit what it found; so the variable is back at once for all other programs.
pub fn never() {
    let before = std::env::var_os(VARIABLE);
    // SAFETY: the process loads the library on its only thread.
    unsafe { std::env::set_var(VARIABLE, "0") };
    drop(Backtrace::capture());
    // SAFETY: as above.
    unsafe {
        match before {
            Some(value) => std::env::set_var(VARIABLE, value),
            None => std::env::remove_var(VARIABLE),
        }
    }
}
