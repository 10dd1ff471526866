//! Row backlog: the drain of a large backlog, second by second, ÷ that of a small one in the same run. Meanwhile a
//! probe writes to the same disk. Seconds in which its fsync was slow are not counted, because the disk was the limit.

use std::fs::File;
use std::io::{Seek, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use serde_json::json;

use crate::backlog;
use crate::events::Maker;
use crate::options::{Options, Placement};
use crate::report::{Measurement, Report, log_progress};
use crate::servers::{EXCHANGE, Servers};
use crate::stats;

const KEYS: u32 = 1000;
/// The most messages that the queue keeps, on both sides: a broker with millions of messages becomes slow by itself.
const QUEUE_MAX: u32 = 10_000;
const PROBE_EVERY: Duration = Duration::from_millis(100);
const SLOW_FSYNC: Duration = Duration::from_millis(300);
const GOAL_WORST: f64 = 0.7;
const GOAL_ALL: f64 = 0.95;

/// One drain of the large backlog.
struct Drain {
    rate: f64,
    seconds: Seconds,
    slowest_fsync_ms: f64,
}

/// The number of messages in each second of a drain.
struct Seconds {
    counted: Vec<f64>,
    /// Seconds in which the disk was slow.
    left_out: Vec<f64>,
}

pub fn run(options: &Options, report: &mut Report) {
    log_progress("backlog: starting servers");
    let queue = options.first_queue();
    let mut servers = Servers::start(Placement::Unpinned, queue, &["shared_buffers = '128MB'"]);
    report.about(&mut servers);
    servers.pause();
    let note = Maker::new(EXCHANGE).note;
    let name = format!("backlog of {}, {}", options.large_backlog, queue.name());
    let (mut longs, mut shorts) = (Vec::new(), Vec::new());
    log_progress(&format!("{name}: warming up"));
    short(options, &mut servers, &note);
    for pair in 1..=options.pairs {
        let before = short(options, &mut servers, &note);
        let long = long(options, &mut servers, &note);
        let after = short(options, &mut servers, &note);
        log_progress(&format!(
            "{name}, pair {pair} of {}: {:.0}/s, median second {:.0}, worst {:.0}, seconds left out {}; {} alone {before:.0}/s before, {after:.0}/s after",
            options.pairs,
            long.rate,
            long.seconds.median(),
            long.seconds.worst(),
            long.seconds.left_out.len(),
            options.backlog
        ));
        longs.push(long);
        shorts.push(f64::midpoint(before, after));
    }
    let each = |of: &dyn Fn(&Drain) -> f64| -> Vec<f64> { longs.iter().map(of).collect() };
    let below = each(&|long| long.seconds.below(GOAL_WORST) as f64);
    let worst = Measurement {
        name: format!("{name}, worst second"),
        sides: ("worst second", "median second"),
        unit: "/s",
        ours: each(&|long| long.seconds.worst()),
        theirs: each(&|long| long.seconds.median()),
        notes: vec![format!(
            "medians: {:.0} seconds counted, {:.0} of them below {GOAL_WORST} of the median; {:.0} left out, the slowest fsync of the probe took {:.0} ms",
            stats::median(&each(&|long| long.seconds.counted.len() as f64)),
            stats::median(&below),
            stats::median(&each(&|long| long.seconds.left_out.len() as f64)),
            stats::median(&each(&|long| long.slowest_fsync_ms)),
        )],
        details: json!({
            "seconds": longs.iter().map(|long| &long.seconds.counted).collect::<Vec<_>>(),
            "left_out": longs.iter().map(|long| &long.seconds.left_out).collect::<Vec<_>>(),
            "slowest_fsync_ms": each(&|long| long.slowest_fsync_ms),
        }),
    };
    let all = Measurement {
        name: format!("{name}, over all"),
        sides: ("large", "small"),
        unit: "/s",
        ours: each(&|long| long.rate),
        theirs: shorts,
        notes: Vec::new(),
        details: serde_json::Value::Null,
    };
    let (worst_ratio, all_ratio) = (worst.ratio().0, all.ratio().0);
    report.add(worst);
    report.add(all);
    report.goal(
        &name,
        "of the median second in the worst",
        worst_ratio,
        worst_ratio >= GOAL_WORST,
        &format!("at least {GOAL_WORST}"),
    );
    report.goal(
        &name,
        "of the rate of a small one",
        all_ratio,
        all_ratio >= GOAL_ALL,
        &format!("at least {GOAL_ALL}"),
    );
}

fn short(options: &Options, servers: &mut Servers, note: &str) -> f64 {
    servers.renew_bounded_queue(options.first_queue(), QUEUE_MAX);
    backlog::forget_the_past(servers);
    backlog::settle_down(servers);
    backlog::load(&mut servers.sql, "order", note, options.backlog, 0, KEYS);
    backlog::drain(servers, options.backlog).rate
}

fn long(options: &Options, servers: &mut Servers, note: &str) -> Drain {
    servers.renew_bounded_queue(options.first_queue(), QUEUE_MAX);
    backlog::forget_the_past(servers);
    backlog::settle_down(servers);
    let began = Instant::now();
    backlog::load_large(servers, "order", note, options.large_backlog, KEYS);
    log_progress(&format!(
        "{} messages enqueued in {:.0} s",
        options.large_backlog,
        began.elapsed().as_secs_f64()
    ));
    let probe = Probe::start(servers.cluster.data_dir().with_extension("probe"));
    let mut polls = Vec::new();
    let drained = backlog::drain_watched(servers, options.large_backlog, &mut |at, count| polls.push((at, count)));
    let fsyncs = probe.end();
    let slow: Vec<(Instant, Instant)> = (fsyncs.iter())
        .filter(|(from, to)| to.duration_since(*from) > SLOW_FSYNC)
        .copied()
        .collect();
    let slowest = fsyncs.iter().map(|(from, to)| to.duration_since(*from)).max();
    Drain {
        rate: drained.rate,
        seconds: Seconds::of(&polls, &slow),
        slowest_fsync_ms: slowest.unwrap_or_default().as_secs_f64() * 1e3,
    }
}

impl Seconds {
    /// Takes the whole seconds from the first counted message to the last poll. `slow` has the start and end of each
    /// slow fsync.
    fn of(polls: &[(Instant, i64)], slow: &[(Instant, Instant)]) -> Self {
        let (mut counted, mut left_out) = (Vec::new(), Vec::new());
        let first = polls.iter().position(|(_, count)| *count > 0).unwrap_or(polls.len());
        let polls = &polls[first..];
        // The number of messages at a time, interpolated linearly between two polls.
        let until = |at: Instant| -> Option<f64> {
            let next = polls.partition_point(|(seen, _)| *seen < at);
            let (after, count) = polls.get(next)?;
            let Some((before, count_before)) = next.checked_sub(1).map(|last| polls[last]) else {
                return Some(*count as f64);
            };
            let share = at.duration_since(before).as_secs_f64() / after.duration_since(before).as_secs_f64();
            Some(count_before as f64 + share * (count - count_before) as f64)
        };
        let Some(&(mut from, _)) = polls.first() else {
            return Self { counted, left_out };
        };
        while let (Some(before), Some(after)) = (until(from), until(from + Duration::from_secs(1))) {
            let to = from + Duration::from_secs(1);
            let was_slow = slow.iter().any(|(began, ended)| *began < to && *ended > from);
            if was_slow { &mut left_out } else { &mut counted }.push(after - before);
            from = to;
        }
        Self { counted, left_out }
    }

    /// The median second. 0 if no second counts: the backlog was then too small for this row.
    fn median(&self) -> f64 {
        if self.counted.is_empty() {
            0.0
        } else {
            stats::median(&self.counted)
        }
    }

    fn worst(&self) -> f64 {
        if self.counted.is_empty() {
            0.0
        } else {
            stats::lowest(&self.counted)
        }
    }

    fn below(&self, share: f64) -> usize {
        let limit = self.median() * share;
        self.counted.iter().filter(|count| **count < limit).count()
    }
}

/// A thread that writes a block to a file every 100 ms, at least once, and records the start and end of each fsync.
struct Probe {
    ends: Arc<AtomicBool>,
    thread: JoinHandle<Vec<(Instant, Instant)>>,
}

impl Probe {
    fn start(file: PathBuf) -> Self {
        let ends = Arc::new(AtomicBool::new(false));
        let is_over = ends.clone();
        let thread = thread::spawn(move || {
            let mut probe = File::create(&file).expect("create a file beside the server's");
            let mut all = Vec::new();
            loop {
                let due = Instant::now() + PROBE_EVERY;
                probe
                    .rewind()
                    .and_then(|()| probe.write_all(&[0; 8192]))
                    .expect("write a block");
                let from = Instant::now();
                probe.sync_all().expect("fsync");
                all.push((from, Instant::now()));
                if is_over.load(Ordering::Relaxed) {
                    break;
                }
                thread::sleep(due.saturating_duration_since(Instant::now()));
            }
            std::fs::remove_file(&file).expect("remove a file of ours");
            all
        });
        Self { ends, thread }
    }

    fn end(self) -> Vec<(Instant, Instant)> {
        self.ends.store(true, Ordering::Relaxed);
        self.thread.join().expect("a probe that ends well")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_second_has_its_messages_and_seconds_of_a_slow_disk_are_left_out() {
        let began = Instant::now();
        let at = |ms: u64| began + Duration::from_millis(ms);
        // No messages at first; then 100 in the first second, 300 in the next, 50, and half a second that does not
        // count.
        let polls = [
            (at(0), 0),
            (at(500), 10),
            (at(1_000), 60),
            (at(2_000), 260),
            (at(2_500), 410),
            (at(3_500), 460),
            (at(4_000), 999),
        ];
        let seconds = Seconds::of(&polls, &[]);
        assert_eq!(seconds.counted, [150.0, 250.0, 50.0]);
        assert_eq!(
            (seconds.median(), seconds.worst(), seconds.below(0.7)),
            (150.0, 50.0, 1)
        );
        let slow = [(at(2_400), at(2_600))];
        let seconds = Seconds::of(&polls, &slow);
        assert_eq!((seconds.counted, seconds.left_out), (vec![150.0], vec![250.0, 50.0]));
    }

    #[test]
    fn a_drain_shorter_than_a_second_has_no_seconds() {
        let now = Instant::now();
        let seconds = Seconds::of(&[(now, 5), (now + Duration::from_millis(900), 10)], &[]);
        assert_eq!((seconds.median(), seconds.worst()), (0.0, 0.0));
        assert!(Seconds::of(&[(now, 0)], &[]).counted.is_empty());
    }

    #[test]
    fn a_probe_records_its_fsyncs_and_leaves_no_file() {
        let file = std::env::temp_dir().join(format!("outbox-bench-{}.probe", std::process::id()));
        let probe = Probe::start(file.clone());
        while !file.exists() {
            thread::yield_now();
        }
        let fsyncs = probe.end();
        assert!(!fsyncs.is_empty() && fsyncs.iter().all(|(from, to)| to >= from));
        assert!(!file.exists());
    }
}
