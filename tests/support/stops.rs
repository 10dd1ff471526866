//! Fast stops, and what they promise (I9): each worker ends within 2 s, in an orderly way. The log has the times.

use std::time::Duration;

use crate::wait::Pauses;
use crate::{Cluster, StopMode};

/// The most messages in flight of a worker for a destination. A worker that leaves without their answers may repeat
/// them (I4).
pub const IN_FLIGHT_MAX: usize = 2_000;
/// The time limit of a worker that is to end.
pub const END_MAX: Duration = Duration::from_secs(2);
/// An orderly end takes that much less. A machine that loses more may make a worker end without its last steps.
const SPARE: Duration = Duration::from_millis(300);
/// A worker that ends waits this long for outstanding answers.
const ANSWERS: Duration = Duration::from_millis(700);

/// Stops the server, and asserts that each process of the extension ends in time and each worker in an orderly way.
/// Returns how many may have left before all answers were there. Then messages in flight are sent again.
pub fn stop_in_time(cluster: &Cluster) -> usize {
    let (offset, pauses) = (cluster.log_offset(), Pauses::watch());
    cluster.stop(StopMode::Fast);
    let (log, lost) = (cluster.log(), pauses.end());
    let ends = ends_after(&log[offset..], "received fast shutdown request");
    let says = |pid: &str, what: &str| log.lines().any(|line| line.contains(pid) && line.contains(what));
    for (pid, took) in &ends {
        println!("process {pid} ended after {took:?}, the machine lost {lost:.0?}");
        let prefix = format!(" [{pid}] outbox worker LOG:");
        let is_orderly = !says(&prefix, ": started") || says(&prefix, ": ended");
        assert!(
            *took <= END_MAX + lost && (is_orderly || lost >= SPARE),
            "process {pid} took {took:?}, orderly: {is_orderly}; the machine lost {lost:?}:\n{}",
            &log[offset..]
        );
    }
    assert!(
        ends.iter().any(|(pid, _)| says(&format!(" [{pid}] "), ": started")),
        "no worker ended:\n{log}"
    );
    ends.iter().filter(|(_, took)| *took >= ANSWERS).count()
}

/// The processes of the extension that ended after this line of the log, and how long after it.
pub fn ends_after<'a>(log: &'a str, line: &str) -> Vec<(&'a str, Duration)> {
    let (before, after) = log
        .split_once(line)
        .unwrap_or_else(|| panic!("no {line:?} in the log:\n{log}"));
    let begun = ms_of_day(before.lines().last().unwrap_or_default());
    let ended = after.lines().filter_map(|line| {
        let (_, process) = line.split_once("background worker \"outbox ")?;
        let (pid, _) = process.split_once("(PID ")?.1.split_once(") exited")?;
        Some((pid, Duration::from_millis((ms_of_day(line) + DAY_MS - begun) % DAY_MS)))
    });
    ended.collect()
}

const DAY_MS: u64 = 24 * 60 * 60 * 1000;

/// The time of a line of the log: "2026-01-31 12:30:15.123 UTC [42] …".
fn ms_of_day(line: &str) -> u64 {
    let fields = line
        .split([' ', ':', '.'])
        .skip(1)
        .map_while(|field| field.parse().ok());
    match fields.collect::<Vec<u64>>()[..] {
        [hours, minutes, seconds, ms] => ((hours * 60 + minutes) * 60 + seconds) * 1000 + ms,
        _ => panic!("no time in {line:?}"),
    }
}
