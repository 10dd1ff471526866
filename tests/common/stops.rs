//! Fast stops, and what they promise (I9): each ends within 2 s, and the workers end in an orderly way. A pause of the
//! machine hits one stop of three; a worker that takes too long hits each.

use std::time::Duration;

use super::DB;
use support::{Cluster, StopMode};

/// The time limit of a fast stop.
pub const STOP_MAX: Duration = Duration::from_secs(2);

/// The most messages in flight of a worker for a destination. A worker that leaves without their answers may repeat
/// them (I4).
pub const IN_FLIGHT_MAX: usize = 2_000;

/// A worker that ends waits this long for outstanding answers.
const ANSWERS_MS: u64 = 700;

/// A fast stop of a server with one worker.
#[derive(Debug)]
pub struct Stop {
    pub took: Duration,
    /// When the worker logged that it had ended. None if it was ended at its time limit, which leaves no line.
    ended_after_ms: Option<u64>,
}

impl Stop {
    /// Whether the worker may have left before all answers were there. Then messages in flight are sent again.
    fn may_repeat(&self) -> bool {
        self.ended_after_ms.is_none_or(|after| after >= ANSWERS_MS)
    }
}

/// Stops the server. The checkpoint comes first: what the stop itself has to write takes as long as the disk does.
fn stop_fast(cluster: &Cluster) -> Stop {
    cluster.exec(DB, "checkpoint");
    let offset = cluster.log_offset();
    let took = cluster.stop(StopMode::Fast);
    let log = cluster.log().split_off(offset);
    let at = |text: &str| log.lines().find(|line| line.contains(text)).map(ms_of_day);
    let requested = at("received fast shutdown request").unwrap_or_else(|| panic!("no stop in the log:\n{log}"));
    let since = |ended: u64| (ended + DAY_MS - requested) % DAY_MS;
    Stop {
        took,
        ended_after_ms: at("outbox server-1: ended").map(since),
    }
}

const DAY_MS: u64 = 24 * 60 * 60 * 1000;

/// The time of a line of the log: "2026-01-31 12:30:15.123 UTC [42] …".
fn ms_of_day(line: &str) -> u64 {
    let time = line.split(' ').nth(1).unwrap_or_default();
    let fields: Vec<u64> = time.split([':', '.']).filter_map(|field| field.parse().ok()).collect();
    let [hours, minutes, seconds, ms] = fields[..] else {
        panic!("no time in {line:?}");
    };
    ((hours * 60 + minutes) * 60 + seconds) * 1000 + ms
}

/// Stops the server, up to three times, until a stop is within its limit and its worker has ended in an orderly way.
/// `again` starts the server again and restores the state that the stop finds. Returns how many of the stops may have
/// left messages in flight without their answers.
pub fn stops_in_time(cluster: &Cluster, mut again: impl FnMut()) -> usize {
    let mut stops = Vec::new();
    loop {
        let stop = stop_fast(cluster);
        let is_good = stop.took <= STOP_MAX && stop.ended_after_ms.is_some();
        stops.push(stop);
        if is_good {
            return stops.iter().filter(|stop| stop.may_repeat()).count();
        }
        assert!(stops.len() < 3, "no stop was orderly and in time: {stops:?}");
        again();
    }
}
