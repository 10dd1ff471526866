//! /metrics, as OpenMetrics: the numbers of the last reading of the database. Labels are bounded: destinations,
//! workers, the words of states and checks; never a key or an error.

use super::context::{App, View};
use super::snapshot::{LatencyRow, MonitorSnapshot, MonitoredDestination};
use crate::queries::model::WorkerRow;
use crate::queries::state::DestinationState;
use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use outbox_core::words::Word;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{DescriptorEncoder, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType::{self, Counter, Gauge, Histogram};
use prometheus_client::registry::{Registry, Unit};
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// The most destinations and workers with separate metrics; more would make Prometheus keep ever more series.
const LABELLED_MAX: usize = 200;

/// The encoder adds the unit to the name.
const SECONDS: Option<&Unit> = Some(&Unit::Seconds);

/// Name, help, unit and value; no value: the metric is absent.
type Metric<T> = (&'static str, &'static str, Option<&'static Unit>, fn(&T) -> Option<f64>);

#[rustfmt::skip]
const OF_MONITOR: &[Metric<View>] = &[
    ("outbox_up", "Whether the database answers this monitor.", None, |v| Some(v.lost.is_none().into())),
    ("outbox_snapshot_age", "Time since the values were read from the database.", SECONDS, |v| Some(v.read_at.elapsed().unwrap_or_default().as_secs_f64())),
];

#[rustfmt::skip]
const OF_DATABASE: &[Metric<MonitorSnapshot>] = &[
    ("outbox_standby", "Whether the server is a standby, which delivers nothing.", None, |s| Some(s.now.is_standby.into())),
    ("outbox_pending_messages", "Messages that have not ended: ready, in flight, retrying, blocked and scheduled.", None, |s| count(s.status.pending)),
    ("outbox_in_flight_messages", "Messages that a worker holds for delivery.", None, |s| count(s.status.in_flight)),
    ("outbox_dead_messages", "Dead letters, counted to 10000.", None, |s| count(Some(s.status.dead))),
    ("outbox_live_workers", "Workers that are alive in this database.", None, |s| rows(s.workers.iter().filter(|worker| worker.is_alive))),
    ("outbox_partitions", "Partitions of this database.", None, |s| rows(s.partitions.iter())),
    ("outbox_owned_partitions", "Partitions that a worker has leased.", None, |s| rows(s.partitions.iter().filter(|p| p.owner.is_some()))),
    ("outbox_blocked_partitions", "Partitions with a key that a dead letter blocks.", None, |s| rows(s.blocked.iter())),
    ("outbox_oldest_pending_age", "Age of the oldest message that can be delivered now: its destination is neither paused, down nor missing. 0 if there is none.", SECONDS, |s| Some(s.status.oldest_s.unwrap_or(0.0))),
    ("outbox_publish_latency_p95", "95th percentile from commit to confirm, of the last minute.", SECONDS, |s| s.p95_ms().map(|ms| ms / 1000.0)),
];

#[rustfmt::skip]
const COUNTERS: &[Metric<MonitoredDestination>] = &[
    ("outbox_messages_published", "Messages that the destination confirmed.", None, |d| count(d.published_total)),
    ("outbox_attempts_failed", "Attempts that failed and were charged to a message.", None, |d| count(d.failed_total)),
    ("outbox_messages_dead", "Messages that became dead letters.", None, |d| count(d.dead_total)),
    ("outbox_messages_released", "Messages that were released without a charge, for example after a lost connection.", None, |d| count(d.released_total)),
];

#[rustfmt::skip]
const OF_DESTINATION: &[Metric<MonitoredDestination>] = &[
    ("outbox_destination_pending_messages", "Pending messages of the destination.", None, |d| count(d.pending)),
    ("outbox_destination_pending_limit_messages", "Limit of pending messages of the destination; absent if there is none.", None, |d| count(d.max_pending.filter(|n| *n > 0))),
    ("outbox_destination_in_flight_messages", "Messages in flight to the destination.", None, |d| count(d.in_flight)),
    ("outbox_destination_oldest_pending_age", "Age of the oldest message that waits for the destination, also while it is paused or down; 0 if there is none.", SECONDS, |d| Some(d.oldest_s.unwrap_or(0.0))),
];

#[rustfmt::skip]
const OF_WORKER: &[Metric<WorkerRow>] = &[
    ("outbox_worker_alive", "Whether the worker is alive.", None, |worker| Some(worker.is_alive.into())),
    ("outbox_worker_partitions", "Partitions that the worker has leased.", None, |worker| count(Some(worker.partitions))),
    ("outbox_worker_heartbeat_ttl", "Time until its last heartbeat expires.", SECONDS, |worker| Some(worker.heartbeat_s)),
];

fn count(n: Option<i64>) -> Option<f64> {
    n.map(|n| n as f64)
}

fn rows(rows: impl Iterator) -> Option<f64> {
    Some(rows.count() as f64)
}

pub async fn metrics(State(app): State<Arc<App>>) -> Response {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(LastReading(app.view())));
    let mut text = String::new();
    encode(&mut text, &registry).expect("write to a string");
    ([(header::CONTENT_TYPE, CONTENT_TYPE)], text).into_response()
}

struct LastReading(Arc<View>);

impl fmt::Debug for LastReading {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("LastReading")
    }
}

impl Collector for LastReading {
    fn encode(&self, mut encoder: DescriptorEncoder) -> fmt::Result {
        let mut out = MetricWriter(&mut encoder);
        out.each(Gauge, OF_MONITOR, [([], &*self.0)].into_iter())?;
        // Old values would look like an idle system.
        match (&self.0.snapshot, &self.0.lost) {
            (Some(snapshot), None) => out.all(snapshot),
            _ => Ok(()),
        }
    }
}

/// The counts between two bounds, as the encoder takes them, with the upper bounds in s.
fn buckets(latency: &LatencyRow) -> Vec<(f64, u64)> {
    let mut before = 0;
    let bounds = latency.below_ms.iter().zip(&latency.messages);
    bounds
        .map(|(bound_ms, below)| {
            let messages = (below - before).max(0) as u64;
            before = *below;
            (bound_ms.map_or(f64::MAX, |ms| ms / 1e3), messages)
        })
        .collect()
}

struct MetricWriter<'a, 'e>(&'a mut DescriptorEncoder<'e>);

impl MetricWriter<'_, '_> {
    fn all(&mut self, snapshot: &MonitorSnapshot) -> fmt::Result {
        let labels = [
            ("version", env!("CARGO_PKG_VERSION")),
            ("extension_version", &snapshot.server.extension_version),
            ("server_version", &snapshot.server.server_version),
        ];
        let help = "Versions of outboxctl, the extension and the server; always 1.";
        self.rows(Gauge, "outbox_build_info", help, None, [(labels, 1.0)])?;
        self.each(Gauge, OF_DATABASE, [([], snapshot)].into_iter())?;
        let mut checks: BTreeMap<&str, bool> = BTreeMap::new();
        for check in &snapshot.health {
            *checks.entry(&check.check).or_insert(true) &= check.ok;
        }
        let checks = checks.iter().map(|(check, ok)| ([("check", *check)], f64::from(*ok)));
        let help = "Whether a check of outbox_health is ok, for all destinations.";
        self.rows(Gauge, "outbox_health_ok", help, None, checks)?;
        let destinations = snapshot.destinations.iter().take(LABELLED_MAX);
        let destinations = destinations.map(|d| ([("destination", d.name.as_str())], d));
        self.each(Counter, COUNTERS, destinations.clone())?;
        self.each(Gauge, OF_DESTINATION, destinations.clone())?;
        let percentiles = destinations.clone().flat_map(|([label], d)| {
            let all = [("0.5", d.p50_ms), ("0.95", d.p95_ms), ("0.99", d.p99_ms)].into_iter();
            all.filter_map(move |(quantile, ms)| Some(([label, ("quantile", quantile)], ms? / 1000.0)))
        });
        let help = "Percentiles of the time from enqueue to confirm in the last five minutes.";
        self.rows(Gauge, "outbox_destination_latency", help, SECONDS, percentiles)?;
        let help = "Time from enqueue to confirm.";
        let mut metric = self.0.encode_descriptor("outbox_delivery", help, SECONDS, Histogram)?;
        for latency in snapshot.slow.latency.iter().take(LABELLED_MAX) {
            let count = latency.messages.last().copied().unwrap_or_default().max(0) as u64;
            metric
                .encode_family(&[("destination", latency.destination.as_str())])?
                .encode_histogram::<NoLabelSet>(latency.sum_ms / 1e3, count, &buckets(latency), None)?;
        }
        let states = destinations.flat_map(|([label], d)| {
            let states = DestinationState::ALL.iter();
            states.map(move |state| ([label, ("state", state.name())], f64::from(d.state.is(*state))))
        });
        let help = "1 for the state of the destination, 0 for the others.";
        self.rows(Gauge, "outbox_destination_state", help, None, states)?;
        let workers = snapshot.workers.iter().take(LABELLED_MAX);
        self.each(
            Gauge,
            OF_WORKER,
            workers.map(|worker| ([("worker", worker.id.as_str())], worker)),
        )
    }

    /// The metrics of each object, which has these labels.
    fn each<'l, T: 'l, const LABELS: usize>(
        &mut self,
        kind: MetricType,
        metrics: &[Metric<T>],
        all: impl Iterator<Item = ([(&'l str, &'l str); LABELS], &'l T)> + Clone,
    ) -> fmt::Result {
        for (name, help, unit, value) in metrics {
            let rows = all
                .clone()
                .filter_map(|(labels, object)| Some((labels, value(object)?)));
            self.rows(kind, name, help, *unit, rows)?;
        }
        Ok(())
    }

    fn rows<'l, const LABELS: usize>(
        &mut self,
        kind: MetricType,
        name: &str,
        help: &str,
        unit: Option<&Unit>,
        rows: impl IntoIterator<Item = ([(&'l str, &'l str); LABELS], f64)>,
    ) -> fmt::Result {
        let mut rows = rows.into_iter().peekable();
        if LABELS == 0 && rows.peek().is_none() {
            return Ok(());
        }
        let mut metric = self.0.encode_descriptor(name, help, unit, kind)?;
        for (labels, value) in rows {
            match LABELS {
                0 => number(&mut metric, kind, value)?,
                _ => number(&mut metric.encode_family(&labels)?, kind, value)?,
            }
        }
        Ok(())
    }
}

fn number(metric: &mut MetricEncoder<'_>, kind: MetricType, value: f64) -> fmt::Result {
    match kind {
        Counter => metric.encode_counter::<NoLabelSet, _, u64>(&(value as u64), None),
        _ if value.fract() == 0.0 => metric.encode_gauge(&(value as i64)),
        _ => metric.encode_gauge(&value),
    }
}
