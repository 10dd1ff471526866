//! Asks the kernel when to run the threads on a message's way. Called on the worker's main thread.
//!
//! A message crosses three threads of its worker between COMMIT and the socket; each runs for some tens of µs. When all
//! cores are busy, each of them waits until the running thread has used up its slice. A thread with shorter slices runs
//! earlier, and its share of the processor stays the same. This is `sched_runtime` of an ordinary thread (EEVDF, Linux
//! 6.12); older kernels ignore it.
//!
//! While a worker works off a backlog, no message gains by that, and a broker on the same cores is interrupted for each
//! few. So then the threads are SCHED_BATCH: a thread that is woken lets the running one go on.

use std::time::Duration;

/// The slice length. Well below the defaults (1.4 ms on two cores, 2.8 ms on eight), and long enough for most of a full
/// batch.
const SLICE: Duration = Duration::from_micros(500);

/// The scheduling of all threads of this process.
pub struct Scheduling {
    /// None if an administrator has chosen another policy, which then stays.
    has_backlog: Option<bool>,
}

impl Scheduling {
    /// Requests short slices for the calling thread and the threads that it starts from now on. Nothing happens, now
    /// and later, if the kernel refuses.
    pub fn begin() -> Self {
        let is_usual = request(0, libc::SCHED_OTHER, libc::SCHED_OTHER, SLICE);
        Self {
            has_backlog: is_usual.then_some(false),
        }
    }

    /// Called after each pass.
    pub fn follow(&mut self, has_backlog: bool) {
        if self.has_backlog != Some(!has_backlog) {
            return;
        }
        self.has_backlog = Some(has_backlog);
        let (from, to, slice) = match has_backlog {
            true => (libc::SCHED_OTHER, libc::SCHED_BATCH, Duration::ZERO),
            false => (libc::SCHED_BATCH, libc::SCHED_OTHER, SLICE),
        };
        for thread in threads() {
            request(thread, from, to, slice);
        }
    }
}

fn threads() -> impl Iterator<Item = i32> {
    let tasks = std::fs::read_dir("/proc/self/task").into_iter().flatten();
    tasks.filter_map(|task| task.ok()?.file_name().to_str()?.parse().ok())
}

/// Changes the policy of a thread from this one to another, and its slice; a slice of zero is the default one. Keeps the
/// nice value. Returns false if the thread had another policy. Thread 0 is the calling one.
fn request(thread: i32, from: i32, to: i32, slice: Duration) -> bool {
    let Some(mut attr) = attributes(thread).filter(|attr| attr.sched_policy == from as u32) else {
        return false;
    };
    attr.sched_policy = to as u32;
    attr.sched_runtime = slice.as_nanos() as u64;
    // SAFETY: plain data that contains its own size; the kernel checks what it reads.
    unsafe { libc::syscall(libc::SYS_sched_setattr, thread, &raw const attr, 0) };
    true
}

fn attributes(thread: i32) -> Option<libc::sched_attr> {
    // SAFETY: plain data of the given size.
    unsafe {
        let mut attr: libc::sched_attr = std::mem::zeroed();
        let size = size_of::<libc::sched_attr>();
        (libc::syscall(libc::SYS_sched_getattr, thread, &raw mut attr, size, 0) == 0).then_some(attr)
    }
}
