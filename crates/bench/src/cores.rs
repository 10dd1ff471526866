//! Pins processes to cores. A process is moved thread by thread; threads and processes that it starts later inherit the
//! cores.

use std::fs;
use std::mem;

/// The cores that this process may use at its start.
pub fn available() -> Vec<usize> {
    // SAFETY: a cpu_set_t is plain bits, and all zeros are valid; the call gets its size and fills it.
    let set = unsafe {
        let mut set: libc::cpu_set_t = mem::zeroed();
        libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &mut set);
        set
    };
    // SAFETY: the index stays below the size of the set.
    let is_in = |core: usize| unsafe { libc::CPU_ISSET(core, &set) };
    (0..libc::CPU_SETSIZE as usize).filter(|core| is_in(*core)).collect()
}

/// Restricts every thread of `pid` to `cores`. Runs twice, because a thread that starts during the first round may
/// escape it.
pub fn pin(pid: u32, cores: &[usize]) {
    for _ in 0..2 {
        let Ok(tasks) = fs::read_dir(format!("/proc/{pid}/task")) else {
            return; // it has ended
        };
        let tasks = tasks.filter_map(|task| task.ok()?.file_name().to_str()?.parse().ok());
        tasks.for_each(|task| pin_thread(task, cores));
    }
}

fn pin_thread(task: libc::pid_t, cores: &[usize]) {
    // SAFETY: a cpu_set_t is plain bits, and all zeros are valid. The cores come from `available`, so they are below
    // the size of the set. For a thread that has ended the call fails, which needs no handling.
    unsafe {
        let mut set: libc::cpu_set_t = mem::zeroed();
        cores.iter().for_each(|core| libc::CPU_SET(*core, &mut set));
        libc::sched_setaffinity(task, size_of::<libc::cpu_set_t>(), &set);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_is_moved_and_moved_back() {
        let all = available();
        // SAFETY: gettid cannot fail.
        let us = unsafe { libc::gettid() };
        pin_thread(us, &all[..1]);
        assert_eq!(available(), all[..1]);
        pin_thread(us, &all);
        assert_eq!(available(), all);
    }
}
