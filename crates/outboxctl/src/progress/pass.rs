//! The report of a pass, and the sums of passes. A reported pass ends when all messages that it claimed are settled;
//! under constant load it is reported once a second. So it may contain several passes of crates/worker.

use crate::format::time;
use serde::Serialize;
use std::time::Instant;

/// The report of one pass. The names and the order of its fields are those of its JSON line.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct PassReport {
    pub claimed: u64,
    pub published: u64,
    pub failed: u64,
    pub duration_ms: f64,
    pub backoff_ms: u32,
    pub renewed_heartbeat: bool,
    pub purged_stale: i64,
    pub active_workers: usize,
    pub desired_count: usize,
    pub owned_count: usize,
    pub leased_count: usize,
    pub released_count: usize,
    /// The time of the server, to the second.
    pub ts: String,
}

impl PassReport {
    pub fn is_quiet(&self) -> bool {
        self.claimed + self.published + self.failed == 0
            && self.purged_stale == 0
            && self.leased_count + self.released_count == 0
    }

    /// Adds what `next` did. The fields that describe a state are taken from `next`.
    pub fn add(&mut self, next: &PassReport) {
        *self = PassReport {
            claimed: self.claimed + next.claimed,
            published: self.published + next.published,
            failed: self.failed + next.failed,
            duration_ms: self.duration_ms + next.duration_ms,
            renewed_heartbeat: self.renewed_heartbeat || next.renewed_heartbeat,
            purged_stale: self.purged_stale + next.purged_stale,
            leased_count: self.leased_count + next.leased_count,
            released_count: self.released_count + next.released_count,
            ..next.clone()
        };
    }
}

/// Passes that are reported together.
#[derive(Clone, Debug)]
pub struct PassSum {
    pub pass: PassReport,
    pub count: u64,
    pub since: Instant,
}

impl PassSum {
    pub fn new() -> Self {
        Self {
            pass: PassReport::default(),
            count: 0,
            since: Instant::now(),
        }
    }

    pub fn add(&mut self, pass: &PassReport) {
        self.pass.add(pass);
        self.count += 1;
    }
}

/// A time in UTC for JSON, to the second.
pub fn timestamp(us_since_1970: i64) -> String {
    let seconds = us_since_1970.div_euclid(1_000_000);
    time(seconds as f64).replace(' ', "T") + "Z"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pass_report_has_thirteen_keys_in_their_order() {
        let pass = PassReport {
            claimed: 10,
            duration_ms: 3.12,
            ts: timestamp(0),
            ..PassReport::default()
        };
        let line = serde_json::to_string(&pass).unwrap();
        let value: serde_json::Value = serde_json::from_str(&line).unwrap();
        let keys: Vec<&String> = value.as_object().unwrap().keys().collect();
        assert_eq!(
            keys,
            [
                "claimed",
                "published",
                "failed",
                "duration_ms",
                "backoff_ms",
                "renewed_heartbeat",
                "purged_stale",
                "active_workers",
                "desired_count",
                "owned_count",
                "leased_count",
                "released_count",
                "ts"
            ]
        );
        assert!(line.contains("\"duration_ms\":3.12"), "{line}");
    }

    /// The expected texts are from Python's datetime.
    #[test]
    fn timestamps_match_the_calendar() {
        for (seconds, text) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_399, "2000-02-28T23:59:59Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (1_762_905_600, "2025-11-12T00:00:00Z"),
            (4_107_542_400, "2100-03-01T00:00:00Z"),
            (-1, "1969-12-31T23:59:59Z"),
        ] {
            assert_eq!(timestamp(seconds * 1_000_000 + 999_999), text);
        }
    }

    #[test]
    fn the_passes_of_a_window_are_added_up() {
        let mut sum = PassReport::default();
        for owned_count in [4, 8] {
            sum.add(&PassReport {
                claimed: 3,
                published: 2,
                failed: 1,
                leased_count: 4,
                owned_count,
                ..PassReport::default()
            });
        }
        assert_eq!((sum.claimed, sum.published, sum.failed), (6, 4, 2));
        assert_eq!(
            (sum.leased_count, sum.owned_count),
            (8, 8),
            "the state is that of the last pass"
        );
    }
}
