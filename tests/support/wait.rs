//! How does a test wait? For a condition, with a limit. Called by every test and module here; nothing else sleeps.

use std::time::{Duration, Instant};

/// Short beside anything a server does, long enough not to compete with it for the processor.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Waits until `condition` holds. Panics with `what` when `timeout` is over.
pub fn wait_until(what: &str, timeout: Duration, mut condition: impl FnMut() -> bool) {
    wait_for(what, timeout, || condition().then_some(()));
}

/// Waits until `probe` finds a value, and returns it. Panics with `what` when `timeout` is over.
pub fn wait_for<T>(what: &str, timeout: Duration, probe: impl FnMut() -> Option<T>) -> T {
    let started = Instant::now();
    try_wait_for(timeout, probe).unwrap_or_else(|| panic!("waited {:.1?} in vain for {what}", started.elapsed()))
}

/// Waits until `probe` finds a value, for cleanup code that must not panic. It probes once more when time is over: a
/// machine that stood still for the whole timeout is no proof that nothing happened.
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

/// Passes time that is itself the subject, as the latency of a proxy is. A test that waits for an event never calls
/// it.
pub fn pass_time_until(due: Instant) {
    std::thread::sleep(due.saturating_duration_since(Instant::now()));
}
