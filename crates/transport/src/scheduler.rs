//! Asks the kernel to run the threads on a message's way soon after they are woken. Called on the worker's main thread.
//!
//! A message crosses three threads of its worker between COMMIT and the socket; each runs for some tens of µs. When all
//! cores are busy, each of them waits until the running thread has used up its slice. A thread with shorter slices runs
//! earlier, and its share of the processor stays the same. This is `sched_runtime` of an ordinary thread (EEVDF, Linux
//! 6.12); older kernels ignore it.

use std::time::Duration;

/// The slice length. Well below the defaults (1.4 ms on two cores, 2.8 ms on eight), and long enough for most of a full
/// batch.
const SLICE: Duration = Duration::from_micros(500);

/// Requests short slices for the calling thread and the threads that it starts from now on. Does nothing if the kernel
/// refuses.
pub fn request_short_slices() {
    #[cfg(target_os = "linux")]
    // Leave a thread alone that has another scheduling policy: an administrator chose it.
    if let Some(mut attr) = attributes().filter(|attr| attr.sched_policy == libc::SCHED_OTHER as u32) {
        attr.sched_runtime = SLICE.as_nanos() as u64;
        // SAFETY: plain data that contains its own size, for this thread; the kernel checks what it reads.
        unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attr, 0) };
    }
}

/// The scheduling attributes of the calling thread.
#[cfg(target_os = "linux")]
fn attributes() -> Option<libc::sched_attr> {
    // SAFETY: plain data of the given size.
    unsafe {
        let mut attr: libc::sched_attr = std::mem::zeroed();
        let size = size_of::<libc::sched_attr>();
        (libc::syscall(libc::SYS_sched_getattr, 0, &raw mut attr, size, 0) == 0).then_some(attr)
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn threads_inherit_short_slices_and_keep_policy_and_nice() {
        let attr = || attributes().expect("attributes");
        let (before, (mine, inherited)) = std::thread::spawn(move || {
            let before = attr();
            request_short_slices();
            (before, (attr(), std::thread::spawn(attr).join().expect("a thread")))
        })
        .join()
        .expect("a thread");
        assert_eq!(
            (mine.sched_policy, mine.sched_nice),
            (before.sched_policy, before.sched_nice)
        );
        assert_eq!(mine.sched_runtime, inherited.sched_runtime);
        // A kernel that supports slices reports them.
        if before.sched_runtime > 0 {
            assert_eq!(mine.sched_runtime, SLICE.as_nanos() as u64);
        }
    }
}
