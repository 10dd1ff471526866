//! Reads the processor time of each part from /proc, user and kernel mode together.

use std::collections::BTreeMap;
use std::fs;

use support::process::children_of;

/// Processor time in µs of each part: since its start, or between two readings.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cpu {
    pub broker: f64,
    /// The worker of the outbox, with all its threads.
    pub worker: f64,
    /// All other Postgres processes except the session of the bench: autovacuum, checkpointer, WAL writer.
    pub postgres: f64,
    /// The bench process: in a bare run, the publisher.
    pub bench: f64,
}

/// The processes whose time is read.
#[derive(Clone, Copy, Debug)]
pub struct Pids {
    pub broker: u32,
    pub postmaster: u32,
    pub worker: u32,
    /// The backend of the bench's session, which is left out.
    pub session: u32,
}

impl Pids {
    pub fn read(self) -> Cpu {
        let worker = times(self.worker).own;
        // The postmaster's sum over ended children keeps the total from falling when one ends.
        let postmaster = times(self.postmaster);
        let children = children_of(self.postmaster).into_iter().map(|pid| times(pid).own);
        let all = postmaster.own + postmaster.ended_children + children.sum::<f64>();
        Cpu {
            broker: times(self.broker).own,
            worker,
            postgres: all - worker - times(self.session).own,
            bench: times(std::process::id()).own,
        }
    }
}

impl Cpu {
    pub fn since(self, earlier: Self) -> Self {
        Self {
            broker: self.broker - earlier.broker,
            worker: self.worker - earlier.worker,
            postgres: self.postgres - earlier.postgres,
            bench: self.bench - earlier.bench,
        }
    }

    pub fn per_message(self, messages: u32) -> Self {
        let each = |us: f64| us / f64::from(messages);
        Self {
            broker: each(self.broker),
            worker: each(self.worker),
            postgres: each(self.postgres),
            bench: each(self.bench),
        }
    }
}

/// The time of a process in µs, exact to the ns, for processes that use little; `times` counts in steps of 10 ms.
/// Threads that have ended are left out.
pub fn of_threads_us(pid: u32) -> f64 {
    let running_ns = |text: String| text.split_whitespace().next()?.parse::<f64>().ok();
    of_threads(pid, "schedstat").filter_map(running_ns).sum::<f64>() / 1e3
}

/// Like [`of_threads_us`], by the name of the thread; threads of one name are added.
pub fn by_thread_us(pid: u32) -> BTreeMap<String, f64> {
    let mut times = BTreeMap::new();
    for task in fs::read_dir(format!("/proc/{pid}/task"))
        .into_iter()
        .flatten()
        .flatten()
    {
        let read = |file: &str| fs::read_to_string(task.path().join(file)).ok();
        let running_ns = |text: String| text.split_whitespace().next()?.parse::<f64>().ok();
        if let (Some(name), Some(ns)) = (read("comm"), read("schedstat").and_then(running_ns)) {
            *times.entry(name.trim().to_owned()).or_default() += ns / 1e3;
        }
    }
    times
}

/// The number of times that threads of the process waited and were woken.
pub fn wakes(pid: u32) -> u64 {
    let count = |text: String| -> Option<u64> {
        let line = text
            .lines()
            .find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"))?;
        line.trim().parse().ok()
    };
    of_threads(pid, "status").filter_map(count).sum()
}

/// The content of this file of /proc for each thread.
fn of_threads(pid: u32, file: &str) -> impl Iterator<Item = String> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten();
    let file = file.to_owned();
    tasks.filter_map(move |task| fs::read_to_string(task.ok()?.path().join(&file)).ok())
}

pub fn of_ended_children_us(pid: u32) -> f64 {
    times(pid).ended_children
}

struct Times {
    own: f64,
    ended_children: f64,
}

/// The times of a process; zero if it has ended.
fn times(pid: u32) -> Times {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // SAFETY: sysconf takes a plain number.
    let jiffies_per_s = unsafe { libc::sysconf(libc::_SC_CLK_TCK) } as f64;
    parse(&stat, 1e6 / jiffies_per_s)
}

fn parse(stat: &str, us_per_jiffy: f64) -> Times {
    // "pid (name) state …", where the name may contain spaces and brackets. proc(5): utime is field 14, state is 3.
    let fields: Vec<&str> = stat
        .rsplit_once(')')
        .map_or(Vec::new(), |(_, rest)| rest.split_whitespace().collect());
    let jiffies = |field: usize| -> f64 { fields.get(field - 3).and_then(|text| text.parse().ok()).unwrap_or(0.0) };
    Times {
        own: (jiffies(14) + jiffies(15)) * us_per_jiffy,
        ended_children: (jiffies(16) + jiffies(17)) * us_per_jiffy,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_times_are_found_behind_a_name_with_brackets() {
        let stat = "7 (a) b (c) S 1 7 7 0 -1 0 1 2 3 4 100 20 3 4 20 0 1";
        let times = parse(stat, 10_000.0);
        assert_eq!((times.own, times.ended_children), (1_200_000.0, 70_000.0));
    }

    #[test]
    fn a_process_that_has_ended_took_no_time() {
        let times = parse("", 10_000.0);
        assert_eq!((times.own, times.ended_children), (0.0, 0.0));
        assert_eq!((of_threads_us(0), wakes(0)), (0.0, 0));
    }

    #[test]
    fn all_threads_of_a_process_count() {
        let us = std::process::id();
        let both_grow = || {
            let (time, count) = (of_threads_us(us), wakes(us));
            let (go, wait) = std::sync::mpsc::channel::<()>();
            let other = std::thread::spawn(move || {
                wait.recv().expect("a signal");
                let (time, count) = (of_threads_us(us), wakes(us));
                (time, count)
            });
            while wakes(us) == count {
                std::thread::yield_now(); // until it waits
            }
            go.send(()).expect("the thread waits");
            let (later, later_count) = other.join().expect("the thread ends");
            later > time && later_count > count
        };
        // The thread of another test may end meanwhile, and its time with it.
        assert!((0..20).any(|_| both_grow()));
    }
}
