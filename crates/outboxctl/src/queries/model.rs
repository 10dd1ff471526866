//! The state of an outbox as plain data: the rows of `views`, for `top`, `serve` and `status`. Ages and remaining times
//! (`…_s`) are in seconds, by the clock of the database.

use super::state::{DestinationState, MessageStatus, Parsed};
use serde::{Deserialize, Serialize};

/// The rows that were read, or the error. If one part fails, the other parts are still shown.
pub type Part<T> = Result<T, String>;

/// All that a page or a screen shows, read at one time.
#[derive(Clone, Debug, PartialEq)]
pub struct Snapshot {
    pub now: Now,
    pub status: Part<Status>,
    pub throughput: Part<Vec<Minute>>,
    pub partitions: Part<Vec<PartitionRow>>,
    pub workers: Part<Vec<WorkerRow>>,
    pub passes: Part<Vec<Passes>>,
    pub destinations: Part<Vec<DestinationRow>>,
    pub errors: Part<Vec<ErrorGroup>>,
    pub messages: Part<Vec<Message>>,
    /// The failed health checks.
    pub problems: Part<Vec<Problem>>,
}

/// The database and the time of a snapshot.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
pub struct Now {
    /// Seconds since 1970.
    pub epoch_s: f64,
    /// The time of the snapshot as `HH:MM:SS`, in the time zone of the session.
    pub clock: String,
    pub database: String,
    pub user: String,
    pub is_standby: bool,
}

/// The row of `outbox_status`. `None` = not counted, because the library is not preloaded.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
pub struct Status {
    pub pending: Option<i64>,
    pub in_flight: Option<i64>,
    pub dead: i64,
    pub oldest_s: Option<f64>,
    pub published_total: Option<i64>,
    pub failed_total: Option<i64>,
    pub published_per_s: Option<f64>,
    pub failed_per_s: Option<f64>,
    /// From enqueue to confirm. `None` = nothing was published in this minute and the last one.
    pub p95_ms: Option<f64>,
}

/// A row of `outbox_throughput`: one minute. The last minute is not over yet.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
pub struct Minute {
    /// The start of the minute, in seconds since 1970.
    pub at: f64,
    /// The start of the minute as `HH:MM`.
    pub clock: String,
    pub published: i64,
    pub retried: i64,
    pub failed: i64,
    pub p95_ms: Option<f64>,
}

/// A row of `outbox_partition_status`.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
pub struct PartitionRow {
    pub label: String,
    pub owner: Option<String>,
    pub ttl_s: Option<f64>,
    pub epoch: i64,
    pub first_waiting_seq: Option<i64>,
    /// Whether a dead letter blocks a key of this partition.
    pub is_blocked: bool,
}

/// A row of `outbox_worker_status`.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
pub struct WorkerRow {
    pub id: String,
    pub pid: Option<i32>,
    pub state: Parsed<DestinationState>,
    pub reason: Option<String>,
    pub detail: Option<String>,
    pub is_alive: bool,
    /// Its process exists and writes no heartbeat.
    pub hangs: bool,
    /// The time since the last heartbeat.
    pub heartbeat_age_s: f64,
    /// The time until the heartbeat expires.
    pub heartbeat_s: f64,
    pub partitions: i64,
    pub age_s: f64,
}

impl WorkerRow {
    /// What became of a worker that is not alive.
    pub fn end(&self) -> &'static str {
        if self.hangs { "hangs" } else { "ended" }
    }
}

/// The passes of a worker that did something, from `outbox_passes`, added up. They are those of the last minute, or
/// fewer if the view does not reach back a minute.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
pub struct Passes {
    pub worker_id: String,
    pub count: i64,
    /// The time that these passes cover.
    pub span_s: f64,
    pub mean_ms: f64,
    pub claimed: i64,
    pub published: i64,
    pub failed: i64,
    /// The backoff after the latest pass.
    pub backoff_ms: f64,
    /// The number of partitions that the worker wanted in the latest pass.
    pub desired: i64,
    pub leased: i64,
    pub released: i64,
}

impl Passes {
    pub fn per_s(&self, of: fn(&Self) -> i64) -> f64 {
        of(self) as f64 / self.span_s.max(0.001)
    }
}

/// A row of `outbox_destination_status`. A count is `None` if no worker counts.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
pub struct DestinationRow {
    pub name: String,
    /// `settings`, or the name of a foreign data wrapper. `None` = the destination does not exist.
    pub described_by: Option<String>,
    pub state: Parsed<DestinationState>,
    /// When the destination entered this state, in seconds since 1970.
    pub since: Option<f64>,
    /// The time since then.
    pub since_s: Option<f64>,
    pub reason: Option<String>,
    pub detail: Option<String>,
    pub oldest_s: Option<f64>,
    pub pending: Option<i64>,
    pub max_pending: Option<i64>,
    pub in_flight: Option<i64>,
    pub published_total: Option<i64>,
    pub failed_total: Option<i64>,
    pub dead_total: Option<i64>,
    pub released_total: Option<i64>,
    pub published_per_s: Option<f64>,
    pub p50_ms: Option<f64>,
    pub p95_ms: Option<f64>,
    pub p99_ms: Option<f64>,
    pub url: Option<String>,
    /// By outbox_pause(): the state is also paused if delivery is switched off.
    pub paused: bool,
}

/// A row of `outbox_errors`: failures of one destination with the same cause.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
pub struct ErrorGroup {
    pub destination: String,
    pub kind: String,
    pub message: String,
    pub count: i64,
    /// Seconds since 1970.
    pub first_at: f64,
    pub last_at: f64,
    pub first_age_s: f64,
    pub last_age_s: f64,
    pub last_seq: Option<i64>,
    /// The last error as it was, with its numbers.
    pub last_error: String,
}

/// A message that is not published: dead, waiting, or the first of its lane.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
pub struct Message {
    pub status: Parsed<MessageStatus>,
    pub seq: i64,
    pub destination: String,
    pub partition: String,
    pub key: Option<String>,
    pub attempts: i32,
    pub age_s: f64,
    /// The time until its next attempt.
    pub due_s: Option<f64>,
    pub note: Option<String>,
}

/// A row of `outbox_health`.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
pub struct HealthCheck {
    pub check: String,
    /// The destination that fails. `None` = the check is not about one destination, or all destinations are ok.
    pub destination: Option<String>,
    pub ok: bool,
    /// The cause in a word. Empty = the check is ok.
    pub code: String,
    pub problem: String,
    pub remedy: String,
    pub commands: Vec<CommandShown>,
    /// Since when, in seconds since 1970, if that is known.
    pub since: Option<f64>,
}

/// A command of a remedy. They are in the order in which they should be tried.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
pub struct CommandShown {
    pub command: String,
    /// `psql`, `shell`, or the shell of a host: `shell of the broker`.
    #[serde(rename = "where")]
    pub place: String,
    /// Who may run it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub role: Option<String>,
}

/// A failed check. Destinations with the same problem share one `Problem`.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
pub struct Problem {
    pub check: String,
    /// Sorted as `outbox_health` returns them. Empty = the check is not about a destination.
    pub destinations: Vec<String>,
    pub code: String,
    pub problem: String,
    /// The remedy for the first of the destinations.
    pub remedy: String,
    /// Its commands.
    pub commands: Vec<CommandShown>,
    /// Since when the first of them fails, in seconds since 1970, if that is known.
    pub since: Option<f64>,
}

impl Problem {
    /// The failed checks, each problem once.
    pub fn of(checks: &[HealthCheck]) -> Vec<Self> {
        let mut problems: Vec<Self> = Vec::new();
        for check in checks.iter().filter(|check| !check.ok) {
            let destination = check.destination.clone();
            let known = problems
                .iter_mut()
                .find(|known| known.check == check.check && known.problem == check.problem);
            match known {
                Some(known) => {
                    known.destinations.extend(destination);
                    known.since = known.since.into_iter().chain(check.since).reduce(f64::min);
                }
                None => problems.push(Self {
                    check: check.check.clone(),
                    destinations: destination.into_iter().collect(),
                    code: check.code.clone(),
                    problem: check.problem.clone(),
                    remedy: check.remedy.clone(),
                    commands: check.commands.clone(),
                    since: check.since,
                }),
            }
        }
        problems
    }

    /// The destinations as text. `None` if the check is about no destination, or only about the default destination.
    pub fn named(&self) -> Option<String> {
        match self.destinations.as_slice() {
            [] => None,
            [only] if only == "default" => None,
            _ => Some(self.names()),
        }
    }

    /// The first destinations, and how many more there are.
    pub fn names(&self) -> String {
        const NAMED_MAX: usize = 3;
        let shown = &self.destinations[..self.destinations.len().min(NAMED_MAX)];
        match self.destinations.len() - shown.len() {
            0 => shown.join(", "),
            more => format!("{} and {more} more", shown.join(", ")),
        }
    }

    /// The name of the check, with the destinations if it is not only about the default one.
    pub fn title(&self) -> String {
        match self.named() {
            Some(destinations) => format!("{} ({destinations})", self.check),
            None => self.check.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn destinations_with_the_same_problem_share_a_line() {
        let check = |check: &str, destination: Option<&str>, problem: &str| HealthCheck {
            check: check.into(),
            destination: destination.map(Into::into),
            ok: problem.is_empty(),
            code: String::new(),
            problem: problem.into(),
            remedy: destination
                .map(|name| format!("alter server {name}"))
                .unwrap_or_default(),
            commands: Vec::new(),
            since: None,
        };
        let mut checks: Vec<HealthCheck> = ["audit", "billing", "crm", "default", "erp"]
            .map(|name| check("broker", Some(name), "refused"))
            .into();
        checks.push(check("broker", Some("fax"), "no answer"));
        checks.push(check("lag", None, ""));
        checks.push(check("dead letters", None, "3 dead letter(s)"));
        let problems = Problem::of(&checks);
        let titles: Vec<String> = problems.iter().map(Problem::title).collect();
        assert_eq!(
            titles,
            [
                "broker (audit, billing, crm and 2 more)",
                "broker (fax)",
                "dead letters"
            ]
        );
        assert_eq!(problems[0].remedy, "alter server audit");
        let only_default = Problem::of(&[check("broker", Some("default"), "refused")]);
        assert_eq!(only_default[0].title(), "broker");
    }
}
