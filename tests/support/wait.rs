//! Waiting for a condition, with a limit. Called by every test and every module here; no other code sleeps.
#![allow(
    clippy::disallowed_methods,
    reason = "the tests of the transport include this file, and refuse nothing"
)]

use std::sync::LazyLock;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};

/// A timeout far above what anything here takes on a slow machine. Only a test that fails waits this long.
pub const LONG: Duration = Duration::from_secs(300);

/// Multiplies a timeout by OUTBOX_PATIENCE, for a machine that is slower still.
pub fn patient(timeout: Duration) -> Duration {
    static FACTOR: LazyLock<f64> = LazyLock::new(|| {
        let factor = std::env::var("OUTBOX_PATIENCE").unwrap_or("1".into());
        factor.parse().expect("OUTBOX_PATIENCE is a number")
    });
    timeout.mul_f64(*FACTOR)
}

/// The pause after the first probe. Each pause is longer than the one before it, up to the maximum: a long wait does
/// not compete with the servers for the processor.
const FIRST_PAUSE: Duration = Duration::from_millis(5);
const PAUSE_MAX: Duration = Duration::from_millis(50);

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
    let deadline = Instant::now() + patient(timeout);
    let mut pause = FIRST_PAUSE;
    loop {
        let last = Instant::now() >= deadline;
        if let Some(value) = probe() {
            return Some(value);
        }
        if last {
            return None;
        }
        std::thread::sleep(pause);
        pause = PAUSE_MAX.min(pause * 5 / 4);
    }
}

/// Sleeps until `due`, where the passing of time is itself the subject, as in the delay of a proxy. A test that waits
/// for an event never calls it.
pub fn pass_time_until(due: Instant) {
    std::thread::sleep(due.saturating_duration_since(Instant::now()));
}

/// Waits until `condition` holds. Asserts that this takes no longer than `limit`, apart from what the machine loses.
pub fn wait_within(what: &str, limit: Duration, condition: impl FnMut() -> bool) {
    within(what, limit, || wait_until(what, LONG, condition));
}

/// Runs `body`, and asserts that it takes no longer than `limit`, apart from what the machine loses meanwhile.
pub fn within<T>(what: &str, limit: Duration, body: impl FnOnce() -> T) -> T {
    let (began, pauses) = (Instant::now(), Pauses::watch());
    let value = body();
    let (took, lost) = (began.elapsed(), pauses.end());
    println!("{what} took {took:.1?}, and the machine lost {lost:.1?}");
    assert!(took <= limit + lost, "{what} took more than {limit:?}");
    value
}

/// Measures how long the machine does not run what is ready: a thread that wakes every few ms adds up how late it is. A
/// time limit that is a promise is extended by that.
pub struct Pauses {
    stop: Sender<()>,
    late: JoinHandle<Duration>,
}

impl Pauses {
    pub fn watch() -> Self {
        const TICK: Duration = Duration::from_millis(10);
        let (stop, stopped) = mpsc::channel();
        let late = std::thread::spawn(move || {
            let mut late = Duration::ZERO;
            loop {
                let slept_at = SystemTime::now(); // the log of a server has this clock, too
                let is_over = stopped.recv_timeout(TICK) != Err(RecvTimeoutError::Timeout);
                late += slept_at.elapsed().unwrap_or_default().saturating_sub(TICK);
                if is_over {
                    return late;
                }
            }
        });
        Self { stop, late }
    }

    /// How late it was altogether.
    pub fn end(self) -> Duration {
        drop(self.stop);
        self.late.join().expect("no panic")
    }
}
