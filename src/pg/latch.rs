//! Waiting and waking. A process waits on its own latch and at most one file descriptor; anyone may set the latch of
//! another by its process number.

use pgrx::pg_sys;
use std::os::fd::RawFd;

/// The number of this process in the server's array of processes. Wakers store it instead of a pointer to a latch:
/// a number that went stale wakes a stranger for nothing, a pointer that went stale writes into memory.
pub fn my_proc_number() -> i32 {
    #[cfg(any(feature = "pg15", feature = "pg16"))]
    // SAFETY: MyProc is set once, before any code of ours runs in a connected process.
    return unsafe { (*pg_sys::MyProc).pgprocno };
    #[cfg(not(any(feature = "pg15", feature = "pg16")))]
    // SAFETY: as above, for MyProcNumber.
    return unsafe { pg_sys::MyProcNumber };
}

/// Wakes the process with this number. Allowed in a commit callback: it neither allocates nor raises.
pub fn set(proc_number: i32) {
    // SAFETY: allProcs has allProcCount entries for the life of the server, and SetLatch on any of them is harmless.
    unsafe {
        let all = &*pg_sys::ProcGlobal;
        if proc_number >= 0 && (proc_number as u32) < all.allProcCount {
            pg_sys::SetLatch(&raw mut (*all.allProcs.add(proc_number as usize)).procLatch);
        }
    }
}

/// Waits until the latch is set, `fd` is readable or `timeout_ms` have passed, whichever is first, and resets the latch.
/// Ends the process if the postmaster is gone. The caller looks for interrupts afterwards.
pub fn wait(fd: Option<RawFd>, timeout_ms: i64) {
    let mut events = pg_sys::WL_LATCH_SET | pg_sys::WL_TIMEOUT | pg_sys::WL_EXIT_ON_PM_DEATH;
    if fd.is_some() {
        events |= pg_sys::WL_SOCKET_READABLE;
    }
    // SAFETY: MyLatch is this process' own. Waiting on anything else would let a ProcSignalBarrier wait for us forever.
    unsafe {
        pg_sys::WaitLatchOrSocket(
            pg_sys::MyLatch,
            events as i32,
            fd.unwrap_or(-1),
            timeout_ms as _,
            pg_sys::PG_WAIT_EXTENSION,
        );
        pg_sys::ResetLatch(pg_sys::MyLatch);
    }
}
