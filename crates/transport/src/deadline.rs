//! Until when a publisher may publish: shared by the worker, which holds the leases, and the thread that sends.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Until when a publisher may publish, by the clock that goes on while the machine or the process sleeps. Written by the
/// worker's main thread when it holds its leases anew, read by the publisher thread before each publish: a worker that was
/// stopped for longer than its lease lasts sends nothing more, for another may own its partitions.
#[derive(Clone, Debug)]
pub struct Deadline(Arc<AtomicU64>);

impl Default for Deadline {
    fn default() -> Self {
        Self(Arc::new(AtomicU64::new(u64::MAX)))
    }
}

impl Deadline {
    /// The time now, to count a deadline from, in ns.
    pub fn now() -> u64 {
        let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: writes one timespec. The clock is there since Linux 2.6.39.
        unsafe { libc::clock_gettime(libc::CLOCK_BOOTTIME, &mut now) };
        now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
    }

    /// Publish until `duration` after `from`.
    pub fn set(&self, from: u64, duration: Duration) {
        self.0.store(from + duration.as_nanos() as u64, Ordering::SeqCst);
    }

    /// Publish without end.
    pub fn lift(&self) {
        self.0.store(u64::MAX, Ordering::SeqCst);
    }

    /// Publish nothing from now on. Allocates nothing: an exit callback may call it.
    pub fn end(&self) {
        self.0.store(0, Ordering::SeqCst);
    }

    pub(crate) fn has_passed(&self) -> bool {
        let until = self.0.load(Ordering::SeqCst);
        until != u64::MAX && Self::now() >= until
    }
}
