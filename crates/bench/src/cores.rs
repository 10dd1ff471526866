//! Who runs where? A process is moved thread by thread; what its threads start later stays with them.

use std::fs;
use std::mem;

/// The cores that this process may use at its start.
pub fn available() -> Vec<usize> {
    // SAFETY: a cpu_set_t is plain bits, of which all zero are valid; the call fills it and gets its size.
    let set = unsafe {
        let mut set: libc::cpu_set_t = mem::zeroed();
        libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &mut set);
        set
    };
    // SAFETY: the index stays below the size of the set.
    let is_in = |core: usize| unsafe { libc::CPU_ISSET(core, &set) };
    (0..libc::CPU_SETSIZE as usize).filter(|core| is_in(*core)).collect()
}

/// Lets every thread of `pid` run on `cores` only. A thread that starts in between may slip through the first round.
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
    // SAFETY: as above; the cores come from `available`, so they are below the size of the set. A thread that has ended
    // is an error that leaves nothing to do.
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
