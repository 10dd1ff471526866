//! Asks the kernel when to run the threads on a message's way. Called on the worker's main thread.
//!
//! A message crosses three threads of its worker between COMMIT and the socket; each runs for some tens of µs. A thread
//! that is woken often interrupts the one that runs: the session that has just committed, or the broker that is to get
//! the message. As SCHED_BATCH it lets that one go on. With short slices it is the next: when all cores are busy, a
//! thread with longer ones would wait until others have used theirs up. Its share of the processor stays the same.
//! Slices are `sched_runtime` (EEVDF, Linux 6.12); older kernels ignore it.

use std::time::Duration;

/// The slice length. Well below the defaults (1.4 ms on two cores, 2.8 ms on eight), and long enough for most of a full
/// batch.
const SLICE: Duration = Duration::from_micros(500);

/// Requests this for the calling thread and the threads that it starts from now on. Does nothing if the kernel refuses.
pub fn give_way() {
    // Leave a thread alone that has another scheduling policy: an administrator chose it.
    if let Some(mut attr) = attributes().filter(|attr| attr.sched_policy == libc::SCHED_OTHER as u32) {
        attr.sched_policy = libc::SCHED_BATCH as u32;
        attr.sched_runtime = SLICE.as_nanos() as u64;
        // SAFETY: plain data that contains its own size, for this thread; the kernel checks what it reads.
        unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attr, 0) };
    }
}

/// The scheduling attributes of the calling thread.
fn attributes() -> Option<libc::sched_attr> {
    // SAFETY: plain data of the given size.
    unsafe {
        let mut attr: libc::sched_attr = std::mem::zeroed();
        let size = size_of::<libc::sched_attr>();
        (libc::syscall(libc::SYS_sched_getattr, 0, &raw mut attr, size, 0) == 0).then_some(attr)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_give_way_with_short_slices_and_keep_the_nice_value() {
        let attr = || attributes().expect("attributes");
        let (before, (mine, inherited)) = std::thread::spawn(move || {
            let before = attr();
            give_way();
            (before, (attr(), std::thread::spawn(attr).join().expect("a thread")))
        })
        .join()
        .expect("a thread");
        // A kernel that supports slices reports them.
        let slice = if before.sched_runtime > 0 {
            SLICE.as_nanos() as u64
        } else {
            0
        };
        for attr in [mine, inherited] {
            assert_eq!(
                (attr.sched_policy, attr.sched_nice, attr.sched_runtime),
                (libc::SCHED_BATCH as u32, before.sched_nice, slice)
            );
        }
    }
}
