//! What the kernel is asked for, for the threads on a message's way: to run soon after they are woken.
//!
//! A message crosses three threads of its worker between COMMIT and the socket, each for some tens of µs. Where all cores are busy
//! each of them waits for whoever runs to use up its slice. One that asks for shorter slices gets its turn earlier, and
//! its share of the processor stays what it was (EEVDF, Linux 6.12: `sched_runtime` of an ordinary thread). Older kernels
//! take no notice.

use std::time::Duration;

/// Well below what others have by default, 1.4 ms on two cores and 2.8 on eight; enough to get on with a full batch.
const SLICE: Duration = Duration::from_micros(500);

/// For the calling thread and those that it starts from now on. Where it cannot be had nothing changes.
pub fn request_short_slices() {
    #[cfg(target_os = "linux")]
    // Somebody who has chosen another policy has his reasons.
    if let Some(mut attr) = attributes().filter(|attr| attr.sched_policy == libc::SCHED_OTHER as u32) {
        attr.sched_runtime = SLICE.as_nanos() as u64;
        // SAFETY: plain data that says its own size, for this thread; the kernel checks what it reads.
        unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attr, 0) };
    }
}

/// How the kernel runs the calling thread.
#[cfg(target_os = "linux")]
fn attributes() -> Option<libc::sched_attr> {
    // SAFETY: plain data, of the size that is given.
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
    fn threads_inherit_it_and_keep_policy_and_nice() {
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
        // A kernel that knows slices tells of them.
        if before.sched_runtime > 0 {
            assert_eq!(mine.sched_runtime, SLICE.as_nanos() as u64);
        }
    }
}
