//! Until when a publisher may publish. Shared by the worker, which holds the leases, and the thread that sends.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Until when a publisher may publish, by a clock that also runs while the machine or the process sleeps. The worker's
/// main thread writes it when it renews its leases; the publisher thread reads it before each publish. A worker that
/// was stopped for longer than its lease sends nothing more: another worker may own its partitions.
#[derive(Clone, Debug)]
pub struct Deadline(Arc<AtomicU64>);

impl Default for Deadline {
    fn default() -> Self {
        Self(Arc::new(AtomicU64::new(u64::MAX)))
    }
}

impl Deadline {
    /// The current time in ns, from which a deadline is counted.
    pub fn now() -> u64 {
        let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: writes one timespec. The clock exists since Linux 2.6.39.
        unsafe { libc::clock_gettime(libc::CLOCK_BOOTTIME, &mut now) };
        now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
    }

    /// Allows publishing until `duration` after `from` (in ns, from `now`).
    pub fn set(&self, from: u64, duration: Duration) {
        self.0.store(from + duration.as_nanos() as u64, Ordering::SeqCst);
    }

    /// Allows publishing without a limit.
    pub fn lift(&self) {
        self.0.store(u64::MAX, Ordering::SeqCst);
    }

    /// Forbids publishing from now on. Allocates nothing: an exit callback may call it.
    pub fn end(&self) {
        self.0.store(0, Ordering::SeqCst);
    }

    pub(crate) fn has_passed(&self) -> bool {
        let until = self.0.load(Ordering::SeqCst);
        until != u64::MAX && Self::now() >= until
    }
}
