//! Waiting for a condition, with a limit. Called by every test and every module here; no other code sleeps.

use std::time::{Duration, Instant};

/// Short compared with anything a server does, and long enough not to compete with the server for the processor.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Waits until `condition` holds. Panics with `what` after `timeout`.
pub fn wait_until(what: &str, timeout: Duration, mut condition: impl FnMut() -> bool) {
    wait_for(what, timeout, || condition().then_some(()));
}

/// Waits until `probe` returns a value, and returns that value. Panics with `what` after `timeout`.
pub fn wait_for<T>(what: &str, timeout: Duration, probe: impl FnMut() -> Option<T>) -> T {
    let started = Instant::now();
    try_wait_for(timeout, probe).unwrap_or_else(|| panic!("waited {:.1?} in vain for {what}", started.elapsed()))
}

/// Waits until `probe` returns a value; for cleanup code that must not panic. It probes once more after the deadline:
/// the machine may have been suspended for the whole timeout.
pub fn try_wait_for<T>(timeout: Duration, mut probe: impl FnMut() -> Option<T>) -> Option<T> {
    let deadline = Instant::now() + timeout;
    loop {
        let last = Instant::now() >= deadline;
        if let Some(value) = probe() {
            return Some(value);
        }
        if last {
            return None;
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// Sleeps until `due`, where the passing of time is itself the subject, as in the delay of a proxy. A test that waits
/// for an event never calls it.
pub fn pass_time_until(due: Instant) {
    std::thread::sleep(due.saturating_duration_since(Instant::now()));
}
