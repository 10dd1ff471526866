//! Reads the processor time of each part from /proc, user and kernel mode together.

use std::fs;
use std::path::Path;

use support::process::children_of;

/// Processor time in µs of each part: since its start, or of one message.
#[derive(Clone, Copy, Debug)]
pub struct Cpu {
    pub broker: f64,
    /// The workers of the outbox, with all their threads.
    pub workers: f64,
    /// The sessions that enqueue.
    pub sessions: f64,
    /// All other Postgres processes except the session of the bench: autovacuum, checkpointer, WAL writer.
    pub postgres: f64,
    /// The bench process: in a bare run, the publisher.
    pub bench: f64,
}

/// The processes whose time is read.
#[derive(Clone, Debug)]
pub struct Processes {
    pub broker: u32,
    pub postmaster: u32,
    pub workers: Vec<u32>,
    pub sessions: Vec<u32>,
    /// The backend of the bench's session, which is left out.
    pub own_session: u32,
}

impl Processes {
    pub fn read(&self) -> Cpu {
        let all = |pids: &[u32]| pids.iter().map(|pid| of_process(*pid)).sum::<f64>();
        let (workers, sessions) = (all(&self.workers), all(&self.sessions));
        Cpu {
            broker: of_process(self.broker),
            workers,
            sessions,
            postgres: of_server(self.postmaster) - workers - sessions - of_process(self.own_session),
            bench: of_process(std::process::id()),
        }
    }
}

impl Cpu {
    pub fn per_message(self, earlier: Self, messages: u32) -> Self {
        let each = |now: f64, before: f64| (now - before) / f64::from(messages);
        Self {
            broker: each(self.broker, earlier.broker),
            workers: each(self.workers, earlier.workers),
            sessions: each(self.sessions, earlier.sessions),
            postgres: each(self.postgres, earlier.postgres),
            bench: each(self.bench, earlier.bench),
        }
    }
}

/// The time of all processes of a Postgres server.
pub fn of_server(postmaster: u32) -> f64 {
    // The postmaster's sum over ended children keeps the total from falling when one ends.
    let children = children_of(postmaster).into_iter().map(of_process);
    of_process(postmaster) + of_ended_children(postmaster) + children.sum::<f64>()
}

/// The time of a process, exact to the ns. Threads that have ended are left out. Zero if it has ended.
pub fn of_process(pid: u32) -> f64 {
    threads(pid).map(|thread| thread.us).sum()
}

/// The time of the calling thread.
pub fn of_this_thread() -> f64 {
    us(Path::new("/proc/thread-self")).unwrap_or_default()
}

/// A thread of a process.
pub struct Thread {
    pub is_main: bool,
    pub name: String,
    pub us: f64,
}

pub fn threads(pid: u32) -> impl Iterator<Item = Thread> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten();
    tasks.flatten().filter_map(move |task| {
        Some(Thread {
            is_main: task.file_name().to_str() == Some(&pid.to_string()),
            name: fs::read_to_string(task.path().join("comm")).ok()?.trim_end().to_owned(),
            us: us(&task.path())?,
        })
    })
}

fn us(task: &Path) -> Option<f64> {
    let schedstat = fs::read_to_string(task.join("schedstat")).ok()?;
    Some(schedstat.split_whitespace().next()?.parse::<f64>().ok()? / 1e3)
}

fn of_ended_children(pid: u32) -> f64 {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // SAFETY: sysconf takes a plain number.
    let jiffies_per_s = unsafe { libc::sysconf(libc::_SC_CLK_TCK) } as f64;
    ended_children_jiffies(&stat) * 1e6 / jiffies_per_s
}

fn ended_children_jiffies(stat: &str) -> f64 {
    // "pid (name) state …", where the name may contain spaces and brackets. proc(5): cutime is field 16, state is 3.
    let fields = stat.rsplit_once(')').map_or("", |(_, rest)| rest).split_whitespace();
    fields
        .skip(16 - 3)
        .take(2)
        .filter_map(|field| field.parse::<f64>().ok())
        .sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_times_are_found_behind_a_name_with_brackets() {
        let stat = "7 (a) b (c) S 1 7 7 0 -1 0 1 2 3 4 100 20 3 4 20 0 1";
        assert_eq!(ended_children_jiffies(stat), 7.0);
    }

    #[test]
    fn a_process_that_has_ended_took_no_time() {
        assert_eq!((ended_children_jiffies(""), of_process(0)), (0.0, 0.0));
    }

    #[test]
    fn all_threads_of_a_process_count() {
        let us = std::process::id();
        let grows = || {
            let (before, (go, wait)) = (of_process(us), std::sync::mpsc::channel::<()>());
            let other = std::thread::spawn(move || {
                wait.recv().expect("a signal");
                of_process(us)
            });
            go.send(()).expect("the thread waits");
            other.join().expect("the thread ends") > before
        };
        // The thread of another test may end meanwhile, and its time with it.
        assert!((0..20).any(|_| grows()));
    }
}
