//! /metrics, as OpenMetrics: the numbers of the last reading of the database. Labels are bounded: destinations,
//! workers, the words of states and checks; never a key or an error.

use super::context::{Site, View};
use super::snapshot::MonitorSnapshot;
use crate::queries::model::{DestinationRow, WorkerRow};
use crate::queries::state::DestinationState;
use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use outbox_core::words::Word;
use std::collections::BTreeMap;
use std::sync::Arc;

const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Name, help and value; no value: the metric is absent.
type Metric<T> = (&'static str, &'static str, fn(&T) -> Option<f64>);

#[rustfmt::skip]
const OF_MONITOR: &[Metric<View>] = &[
    ("outbox_up", "Whether the database answers this monitor.", |v| Some(v.lost.is_none().into())),
    ("outbox_snapshot_age_seconds", "Time since the values were read from the database.", |v| v.snapshot.as_ref().map(|_| v.read_at.elapsed().unwrap_or_default().as_secs_f64())),
];

#[rustfmt::skip]
const OF_DATABASE: &[Metric<MonitorSnapshot>] = &[
    ("outbox_standby", "Whether the server is a standby, which delivers nothing.", |s| Some(s.now.is_standby.into())),
    ("outbox_pending_messages", "Messages that have not ended: ready, in flight, retrying, blocked and scheduled.", |s| count(s.status.pending)),
    ("outbox_in_flight_messages", "Messages that a worker holds for delivery.", |s| count(s.status.in_flight)),
    ("outbox_dead_messages", "Dead letters, counted to 10000.", |s| count(Some(s.status.dead))),
    ("outbox_live_workers", "Workers that are alive in this database.", |s| rows(s.workers.iter().filter(|worker| worker.is_alive))),
    ("outbox_partitions", "Partitions of this database.", |s| rows(s.partitions.iter())),
    ("outbox_owned_partitions", "Partitions that a worker has leased.", |s| rows(s.partitions.iter().filter(|p| p.owner.is_some()))),
    ("outbox_blocked_partitions", "Partitions with a key that a dead letter blocks.", |s| rows(s.blocked.iter())),
    ("outbox_oldest_pending_age_seconds", "Age of the oldest message that can be delivered now: its destination is neither paused, down nor missing. 0 if there is none.", |s| Some(s.status.oldest_s.unwrap_or(0.0))),
    ("outbox_publish_latency_p95_seconds", "95th percentile from commit to confirm, of the last minute.", |s| s.status.p95_ms.map(|ms| ms / 1000.0)),
];

#[rustfmt::skip]
const COUNTERS: &[Metric<DestinationRow>] = &[
    ("outbox_messages_published", "Messages that the destination confirmed.", |d| count(d.published_total)),
    ("outbox_attempts_failed", "Attempts that failed and were charged to a message.", |d| count(d.failed_total)),
    ("outbox_messages_dead", "Messages that became dead letters.", |d| count(d.dead_total)),
    ("outbox_messages_released", "Messages that were released without a charge, for example after a lost connection.", |d| count(d.released_total)),
];

#[rustfmt::skip]
const OF_DESTINATION: &[Metric<DestinationRow>] = &[
    ("outbox_destination_pending_messages", "Pending messages of the destination.", |d| count(d.pending)),
    ("outbox_destination_pending_limit_messages", "Limit of pending messages of the destination; absent if there is none.", |d| count(d.max_pending.filter(|n| *n > 0))),
    ("outbox_destination_in_flight_messages", "Messages in flight to the destination.", |d| count(d.in_flight)),
    ("outbox_destination_oldest_pending_age_seconds", "Age of the oldest message that waits for the destination, also while it is paused or down; 0 if there is none.", |d| Some(d.oldest_s.unwrap_or(0.0))),
];

#[rustfmt::skip]
const OF_WORKER: &[Metric<WorkerRow>] = &[
    ("outbox_worker_alive", "Whether the worker is alive.", |worker| Some(worker.is_alive.into())),
    ("outbox_worker_partitions", "Partitions that the worker has leased.", |worker| count(Some(worker.partitions))),
    ("outbox_worker_heartbeat_ttl_seconds", "Time until its last heartbeat expires.", |worker| Some(worker.heartbeat_s)),
];

fn count(n: Option<i64>) -> Option<f64> {
    n.map(|n| n as f64)
}

fn rows(rows: impl Iterator) -> Option<f64> {
    Some(rows.count() as f64)
}

/// Of all databases. If there are several, each sample has a label with its database.
pub async fn metrics(State(site): State<Arc<Site>>) -> Response {
    let mut out = MetricText::default();
    for database in &site.databases {
        let view = database.view();
        out.database = site.has_several().then_some(&database.name);
        out.each("gauge", OF_MONITOR, [([], &*view)]);
        // Old values would look like an idle system.
        if let (Some(snapshot), None) = (&view.snapshot, &view.lost) {
            out.all(snapshot);
        }
    }
    let text: String = out
        .families
        .into_iter()
        .flat_map(|(head, samples)| [head, samples])
        .collect();
    ([(header::CONTENT_TYPE, CONTENT_TYPE)], text + "# EOF\n").into_response()
}

#[derive(Default)]
struct MetricText<'a> {
    /// The description and the samples of each metric: the format wants those of all databases together.
    families: Vec<(String, String)>,
    /// The metric that gets samples.
    current: usize,
    database: Option<&'a String>,
}

impl MetricText<'_> {
    fn all(&mut self, snapshot: &MonitorSnapshot) {
        let labels = [
            ("version", env!("CARGO_PKG_VERSION")),
            ("extension_version", &snapshot.server.extension_version),
            ("server_version", &snapshot.server.server_version),
        ];
        let help = "Versions of outboxctl, the extension and the server; always 1.";
        self.rows("gauge", "outbox_build_info", help, [(labels, 1.0)]);
        self.each("gauge", OF_DATABASE, [([], snapshot)]);
        let mut checks: BTreeMap<&str, bool> = BTreeMap::new();
        for check in &snapshot.health {
            *checks.entry(&check.check).or_insert(true) &= check.ok;
        }
        let checks = checks.iter().map(|(check, ok)| ([("check", *check)], f64::from(*ok)));
        let help = "Whether a check of outbox_health is ok, for all destinations.";
        self.rows("gauge", "outbox_health_ok", help, checks);
        let destinations = snapshot.destinations.iter();
        let destinations = destinations.map(|d| ([("destination", d.name.as_str())], d));
        self.each("counter", COUNTERS, destinations.clone());
        self.each("gauge", OF_DESTINATION, destinations.clone());
        let failing = destinations.clone().map(|(labels, d)| {
            let of_it = snapshot
                .slow
                .failing
                .iter()
                .find(|failing| failing.destination == d.name);
            (labels, of_it.map_or(0.0, |failing| failing.messages as f64))
        });
        let help = "Messages of the destination that have failed three times or more and are retried; all destinations together are counted to 10000.";
        self.rows("gauge", "outbox_destination_retrying_messages", help, failing);
        let percentiles = destinations.clone().flat_map(|([label], d)| {
            let all = [("0.5", d.p50_ms), ("0.95", d.p95_ms), ("0.99", d.p99_ms)].into_iter();
            all.filter_map(move |(quantile, ms)| Some(([label, ("quantile", quantile)], ms? / 1000.0)))
        });
        let help = "Percentiles of the time from enqueue to confirm in the last five minutes.";
        self.rows("gauge", "outbox_destination_latency_seconds", help, percentiles);
        let delivery = "outbox_delivery_seconds";
        self.describe("histogram", delivery, "Time from enqueue to confirm.");
        for latency in &snapshot.slow.latency {
            let label = ("destination", latency.destination.as_str());
            for (bound_ms, below) in latency.below_ms.iter().zip(&latency.messages) {
                let le = bound_ms.map_or_else(|| "+Inf".to_owned(), |ms| format!("{:?}", ms / 1e3));
                self.sample(&format!("{delivery}_bucket"), &[label, ("le", &le)], *below as f64);
            }
            let count = latency.messages.last().copied().unwrap_or_default();
            self.sample(&format!("{delivery}_count"), &[label], count as f64);
            self.sample(&format!("{delivery}_sum"), &[label], latency.sum_ms / 1e3);
        }
        let states = destinations.flat_map(|([label], d)| {
            let states = DestinationState::ALL.iter();
            states.map(move |state| ([label, ("state", state.name())], f64::from(d.state.is(*state))))
        });
        let help = "1 for the state of the destination, 0 for the others.";
        self.rows("gauge", "outbox_destination_state", help, states);
        let workers = snapshot.workers.iter();
        let workers = workers.map(|worker| ([("worker", worker.id.as_str())], worker));
        self.each("gauge", OF_WORKER, workers);
    }

    /// The metrics of each object, which has these labels.
    fn each<'l, T: 'l, const LABELS: usize>(
        &mut self,
        kind: &str,
        metrics: &[Metric<T>],
        all: impl IntoIterator<Item = ([(&'l str, &'l str); LABELS], &'l T), IntoIter: Clone>,
    ) {
        let all = all.into_iter();
        for (name, help, value) in metrics {
            let rows = all
                .clone()
                .filter_map(|(labels, object)| Some((labels, value(object)?)));
            self.rows(kind, name, help, rows);
        }
    }

    fn rows<'l, const LABELS: usize>(
        &mut self,
        kind: &str,
        name: &str,
        help: &str,
        rows: impl IntoIterator<Item = ([(&'l str, &'l str); LABELS], f64)>,
    ) {
        let mut rows = rows.into_iter().peekable();
        if rows.peek().is_none() {
            return;
        }
        self.describe(kind, name, help);
        let total = if kind == "counter" { "_total" } else { "" };
        for (labels, value) in rows {
            self.sample(&format!("{name}{total}"), &labels, value);
        }
    }

    fn describe(&mut self, kind: &str, name: &str, help: &str) {
        let mut head = format!("# HELP {name} {help}\n# TYPE {name} {kind}\n");
        if name.ends_with("_seconds") {
            head += &format!("# UNIT {name} seconds\n");
        }
        let known = self.families.iter().position(|(known, _)| *known == head);
        self.current = known.unwrap_or_else(|| {
            self.families.push((head, String::new()));
            self.families.len() - 1
        });
    }

    fn sample(&mut self, name: &str, labels: &[(&str, &str)], value: f64) {
        let escaped = |value: &str| value.replace('\\', r"\\").replace('"', "\\\"").replace('\n', r"\n");
        let database = self.database.map(|name| ("database", name.as_str()));
        let labels = database
            .iter()
            .chain(labels)
            .map(|(name, value)| format!("{name}=\"{}\"", escaped(value)));
        let labels = match labels.collect::<Vec<_>>().join(",") {
            none if none.is_empty() => none,
            labels => format!("{{{labels}}}"),
        };
        self.families[self.current].1 += &format!("{name}{labels} {value}\n");
    }
}
