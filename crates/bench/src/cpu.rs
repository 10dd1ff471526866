//! How much processor time did each part take? From /proc, in user and in kernel mode together.

use std::fs;

use support::process::children_of;

/// Processor time in µs, of each part since its start; or between two readings.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cpu {
    pub broker: f64,
    /// The worker of the outbox: its main thread and its publisher.
    pub worker: f64,
    /// Everything else of Postgres but our own session: autovacuum, checkpointer, WAL writer.
    pub postgres: f64,
    /// This process: in a bare run, the publisher.
    pub bench: f64,
}

/// Whose time is read.
#[derive(Clone, Copy, Debug)]
pub struct Pids {
    pub broker: u32,
    pub postmaster: u32,
    pub worker: u32,
    /// The backend of our own session, left out.
    pub session: u32,
}

impl Pids {
    pub fn read(self) -> Cpu {
        let worker = times(self.worker).own;
        // The postmaster's account of ended children keeps the sum from falling when one ends.
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

/// To the ns, where `times` counts in steps of 10 ms: for what takes little. Threads that have ended are left out.
pub fn of_threads_us(pid: u32) -> f64 {
    let running_ns = |text: String| text.split_whitespace().next()?.parse::<f64>().ok();
    of_threads(pid, "schedstat").filter_map(running_ns).sum::<f64>() / 1e3
}

/// How often its threads have been woken: they waited, and then ran again.
pub fn wakes(pid: u32) -> u64 {
    let count = |text: String| -> Option<u64> {
        let line = text
            .lines()
            .find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"))?;
        line.trim().parse().ok()
    };
    of_threads(pid, "status").filter_map(count).sum()
}

/// A file of /proc, of each thread.
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

/// Of a process that is gone: zero.
fn times(pid: u32) -> Times {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // SAFETY: sysconf takes a plain number.
    let ticks_per_s = unsafe { libc::sysconf(libc::_SC_CLK_TCK) } as f64;
    parse(&stat, 1e6 / ticks_per_s)
}

fn parse(stat: &str, us_per_tick: f64) -> Times {
    // "pid (name) state …", and the name may hold spaces and brackets. utime is field 14 of proc(5), state is 3.
    let fields: Vec<&str> = stat
        .rsplit_once(')')
        .map_or(Vec::new(), |(_, rest)| rest.split_whitespace().collect());
    let ticks = |field: usize| -> f64 { fields.get(field - 3).and_then(|text| text.parse().ok()).unwrap_or(0.0) };
    Times {
        own: (ticks(14) + ticks(15)) * us_per_tick,
        ended_children: (ticks(16) + ticks(17)) * us_per_tick,
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
    fn a_process_that_is_gone_took_nothing() {
        let times = parse("", 10_000.0);
        assert_eq!((times.own, times.ended_children), (0.0, 0.0));
        assert_eq!((of_threads_us(0), wakes(0)), (0.0, 0));
    }

    #[test]
    fn all_threads_of_a_process_count() {
        let us = std::process::id();
        let (time, count) = (of_threads_us(us), wakes(us));
        let (go, wait) = std::sync::mpsc::channel::<()>();
        let other = std::thread::spawn(move || {
            wait.recv().expect("a word");
            let (time, count) = (of_threads_us(us), wakes(us));
            (time, count)
        });
        while wakes(us) == count {
            std::thread::yield_now(); // until it waits
        }
        go.send(()).expect("it listens");
        let (later, later_count) = other.join().expect("it ends well");
        assert!(later > time && later_count > count);
    }
}
