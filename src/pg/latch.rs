//! Waits and wakes. A process waits on its own latch and at most one file descriptor. Any process may set the latch of
//! another one by its process number.

use super::major;
use pgrx::pg_sys;
use std::os::fd::RawFd;

/// The number of this process in the server's array of processes. Processes store it instead of a pointer to a latch: a
/// stale number wakes the wrong process, while a stale pointer would overwrite memory.
pub fn my_proc_number() -> i32 {
    major::my_proc_number()
}

/// Whether the process with this number is the one with this id, and alive. Before version 17 its id stays
/// after its end.
pub fn is_process(proc_number: i32, pid: u32) -> bool {
    // SAFETY: allProcs has allProcCount entries for the life of the server. Signal 0 only checks whether the process
    // exists.
    unsafe {
        let all = &*pg_sys::ProcGlobal;
        proc_number >= 0
            && (proc_number as u32) < all.allProcCount
            && std::ptr::read_volatile(&raw const (*all.allProcs.add(proc_number as usize)).pid) == pid as i32
            && libc::kill(pid as i32, 0) == 0
    }
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

/// Waits until the latch is set or `timeout_ms` have passed, and resets the latch. Ends the process if the postmaster
/// has ended. The caller must check for interrupts afterwards.
pub fn wait(timeout_ms: i64) {
    let events = pg_sys::WL_LATCH_SET | pg_sys::WL_TIMEOUT | pg_sys::WL_EXIT_ON_PM_DEATH;
    // SAFETY: MyLatch belongs to this process. If it waited on anything else, a ProcSignalBarrier could wait for it
    // forever.
    unsafe {
        pg_sys::WaitLatch(
            pg_sys::MyLatch,
            events as i32,
            timeout_ms as _,
            pg_sys::PG_WAIT_EXTENSION,
        );
        pg_sys::ResetLatch(pg_sys::MyLatch);
    }
}

/// The latch and a file descriptor to wait for, built once. The server's function for both builds an epoll set for each
/// wait and frees it again.
pub struct WaitSet(*mut pg_sys::WaitEventSet);

impl WaitSet {
    /// `fd` must stay open while the process lives.
    pub fn new(fd: RawFd) -> Self {
        // SAFETY: in a connected process, which keeps its latch in shared memory. The set lives as long as the process.
        unsafe {
            let set = major::wait_event_set(3);
            let nothing = std::ptr::null_mut();
            pg_sys::AddWaitEventToSet(
                set,
                pg_sys::WL_LATCH_SET,
                pg_sys::PGINVALID_SOCKET,
                pg_sys::MyLatch,
                nothing,
            );
            let death = pg_sys::WL_EXIT_ON_PM_DEATH;
            pg_sys::AddWaitEventToSet(set, death, pg_sys::PGINVALID_SOCKET, std::ptr::null_mut(), nothing);
            pg_sys::AddWaitEventToSet(set, pg_sys::WL_SOCKET_READABLE, fd, std::ptr::null_mut(), nothing);
            Self(set)
        }
    }

    /// Waits until the latch is set, the file descriptor is readable or `timeout_ms` have passed, and resets the latch.
    /// Ends the process if the postmaster has ended.
    pub fn wait(&self, timeout_ms: i64) {
        // SAFETY: the set is alive. One event is enough, because its kind does not matter.
        unsafe {
            let mut event: pg_sys::WaitEvent = std::mem::zeroed();
            pg_sys::WaitEventSetWait(self.0, timeout_ms as _, &mut event, 1, pg_sys::PG_WAIT_EXTENSION);
            pg_sys::ResetLatch(pg_sys::MyLatch);
        }
    }
}
