//! /metrics, as OpenMetrics: the numbers of the last reading of the database. Labels are bounded: destinations,
//! workers, the words of states and checks; never a key or an error.

use super::app::{App, View};
use super::snapshot::{Destination, Latency, Snapshot};
use crate::queries::model::Worker;
use crate::queries::state::DestinationState;
use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use outbox_core::words::Word;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::{Registry, Unit};
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// The most destinations and workers with separate metrics; more would make Prometheus keep ever more series.
const LABELLED_MAX: usize = 200;

pub async fn metrics(State(app): State<Arc<App>>) -> Response {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(Metrics(app.view())));
    let mut text = String::new();
    encode(&mut text, &registry).expect("write to a string");
    ([(header::CONTENT_TYPE, CONTENT_TYPE)], text).into_response()
}

struct Metrics(Arc<View>);

impl fmt::Debug for Metrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Metrics")
    }
}

impl Collector for Metrics {
    fn encode(&self, mut encoder: DescriptorEncoder) -> fmt::Result {
        let view = &self.0;
        let mut out = Out(&mut encoder);
        let up = i64::from(view.lost.is_none());
        out.gauge(
            "outbox_up",
            "Whether the database answers this monitor.",
            None,
            Some(up),
        )?;
        out.gauge(
            "outbox_snapshot_age",
            "Time since the values were read from the database.",
            SECONDS,
            Some(view.read_at.elapsed().unwrap_or_default().as_secs_f64()),
        )?;
        // Old values would look like an idle system.
        match (&view.snapshot, &view.lost) {
            (Some(snapshot), None) => whole(&mut out, snapshot),
            _ => Ok(()),
        }
    }
}

fn whole(out: &mut Out<'_, '_>, snapshot: &Snapshot) -> fmt::Result {
    let (status, server) = (&snapshot.status, &snapshot.server);
    let labels = [
        ("version", env!("CARGO_PKG_VERSION")),
        ("extension_version", server.extension_version.as_str()),
        ("server_version", server.server_version.as_str()),
    ];
    let help = "Versions of outboxctl, the extension and the server; always 1.";
    out.gauges("outbox_build_info", help, None, [(labels, 1_i64)])?;
    let partitions = &snapshot.partitions;
    for (name, help, value) in [
        (
            "outbox_standby",
            "Whether the server is a standby, which delivers nothing.",
            Some(i64::from(snapshot.now.is_standby)),
        ),
        (
            "outbox_pending_messages",
            "Messages that have not ended: ready, in flight, retrying, blocked and scheduled.",
            status.pending,
        ),
        (
            "outbox_in_flight_messages",
            "Messages that a worker holds for delivery.",
            status.in_flight,
        ),
        (
            "outbox_dead_messages",
            "Dead letters, counted to 10000.",
            Some(status.dead),
        ),
        (
            "outbox_live_workers",
            "Workers that are alive in this database.",
            Some(snapshot.live_workers() as i64),
        ),
        (
            "outbox_partitions",
            "Partitions of this database.",
            Some(partitions.len() as i64),
        ),
        (
            "outbox_owned_partitions",
            "Partitions that a worker has leased.",
            Some(partitions.iter().filter(|partition| partition.owner.is_some()).count() as i64),
        ),
        (
            "outbox_blocked_partitions",
            "Partitions with a key that a dead letter blocks.",
            Some(snapshot.blocked.len() as i64),
        ),
    ] {
        out.gauge(name, help, None, value)?;
    }
    out.gauge(
        "outbox_oldest_pending_age",
        "Age of the oldest message that can be delivered now: its destination is neither paused, down nor missing. 0 if there is none.",
        SECONDS,
        Some(status.oldest_s.unwrap_or(0.0)),
    )?;
    out.gauge(
        "outbox_publish_latency_p95",
        "95th percentile from commit to confirm, of the last minute.",
        SECONDS,
        snapshot.p95_ms().map(|ms| ms / 1000.0),
    )?;
    let mut checks: BTreeMap<&str, bool> = BTreeMap::new();
    for check in &snapshot.health {
        *checks.entry(&check.check).or_insert(true) &= check.ok;
    }
    let checks = checks
        .iter()
        .map(|(check, is_ok)| ([("check", *check)], i64::from(*is_ok)));
    let help = "Whether a check of outbox_health is ok, for all destinations.";
    out.gauges("outbox_health_ok", help, None, checks)?;
    destinations(out, snapshot)?;
    workers(out, &snapshot.workers)
}

fn destinations(out: &mut Out<'_, '_>, snapshot: &Snapshot) -> fmt::Result {
    type Count = fn(&Destination) -> Option<i64>;
    let all = &snapshot.destinations[..snapshot.destinations.len().min(LABELLED_MAX)];
    let counts = |count: Count| {
        let known = all.iter().filter_map(move |d| Some((d, count(d)?)));
        known.map(|(d, n)| ([("destination", d.name.as_str())], n))
    };
    let counters: [(&str, &str, Count); 4] = [
        (
            "outbox_messages_published",
            "Messages that the destination confirmed.",
            |d| d.published_total,
        ),
        (
            "outbox_attempts_failed",
            "Attempts that failed and were charged to a message.",
            |d| d.failed_total,
        ),
        ("outbox_messages_dead", "Messages that became dead letters.", |d| {
            d.dead_total
        }),
        (
            "outbox_messages_released",
            "Messages that were released without a charge, for example after a lost connection.",
            |d| d.released_total,
        ),
    ];
    for (name, help, count) in counters {
        let rows = counts(count).map(|(labels, n)| (labels, ConstCounter::new(n.max(0) as u64)));
        out.each(name, help, None, MetricType::Counter, rows)?;
    }
    let gauges: [(&str, &str, Count); 3] = [
        (
            "outbox_destination_pending_messages",
            "Pending messages of the destination.",
            |d| d.pending,
        ),
        (
            "outbox_destination_pending_limit_messages",
            "Limit of pending messages of the destination; absent if there is none.",
            |d| d.max_pending.filter(|n| *n > 0),
        ),
        (
            "outbox_destination_in_flight_messages",
            "Messages in flight to the destination.",
            |d| d.in_flight,
        ),
    ];
    for (name, help, count) in gauges {
        out.gauges(name, help, None, counts(count))?;
    }
    out.gauges(
        "outbox_destination_oldest_pending_age",
        "Age of the oldest message that waits for the destination, also while it is paused or down; 0 if there is none.",
        SECONDS,
        all.iter().map(|d| ([("destination", d.name.as_str())], d.oldest_s.unwrap_or(0.0))),
    )?;
    let percentiles = all.iter().flat_map(|d| {
        let all = [("0.5", d.p50_ms), ("0.95", d.p95_ms), ("0.99", d.p99_ms)].into_iter();
        all.filter_map(|(quantile, ms)| {
            let labels = [("destination", d.name.as_str()), ("quantile", quantile)];
            Some((labels, ms? / 1000.0))
        })
    });
    let help = "Percentiles of the time from enqueue to confirm in the last five minutes.";
    out.gauges("outbox_destination_latency", help, SECONDS, percentiles)?;
    let help = "Time from enqueue to confirm.";
    let mut metric = out
        .0
        .encode_descriptor("outbox_delivery", help, SECONDS, MetricType::Histogram)?;
    for latency in snapshot.latency.iter().take(LABELLED_MAX) {
        metric
            .encode_family(&[("destination", latency.destination.as_str())])?
            .encode_histogram::<NoLabelSet>(
                latency.sum_ms / 1e3,
                latency.messages.last().copied().unwrap_or_default().max(0) as u64,
                &buckets(latency),
                None,
            )?;
    }
    let states = all.iter().flat_map(|d| {
        DestinationState::ALL.iter().map(|state| {
            let labels = [("destination", d.name.as_str()), ("state", state.name())];
            (labels, i64::from(d.state.is(*state)))
        })
    });
    let help = "1 for the state of the destination, 0 for the others.";
    out.gauges("outbox_destination_state", help, None, states)
}

/// The counts between two bounds, as the encoder takes them, with the upper bounds in s.
fn buckets(latency: &Latency) -> Vec<(f64, u64)> {
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

fn workers(out: &mut Out<'_, '_>, workers: &[Worker]) -> fmt::Result {
    let all = || {
        workers
            .iter()
            .take(LABELLED_MAX)
            .map(|worker| ([("worker", worker.id.as_str())], worker))
    };
    let alive = all().map(|(label, worker)| (label, i64::from(worker.is_alive)));
    out.gauges("outbox_worker_alive", "Whether the worker is alive.", None, alive)?;
    let partitions = all().map(|(label, worker)| (label, worker.partitions));
    let help = "Partitions that the worker has leased.";
    out.gauges("outbox_worker_partitions", help, None, partitions)?;
    let left = all().map(|(label, worker)| (label, worker.heartbeat_s));
    let help = "Time until its last heartbeat expires.";
    out.gauges("outbox_worker_heartbeat_ttl", help, SECONDS, left)
}

/// The encoder adds the unit to the name.
const SECONDS: Option<&Unit> = Some(&Unit::Seconds);

/// Writes metrics by name.
struct Out<'a, 'e>(&'a mut DescriptorEncoder<'e>);

impl Out<'_, '_> {
    /// A gauge, unless its value is unknown.
    fn gauge<N>(&mut self, name: &str, help: &str, unit: Option<&Unit>, value: Option<N>) -> fmt::Result
    where
        ConstGauge<N>: EncodeMetric,
    {
        let Some(value) = value else { return Ok(()) };
        let metric = self.0.encode_descriptor(name, help, unit, MetricType::Gauge)?;
        ConstGauge::new(value).encode(metric)
    }

    /// Gauges with labels.
    fn gauges<'l, const L: usize, N>(
        &mut self,
        name: &str,
        help: &str,
        unit: Option<&Unit>,
        rows: impl IntoIterator<Item = ([(&'l str, &'l str); L], N)>,
    ) -> fmt::Result
    where
        ConstGauge<N>: EncodeMetric,
    {
        let rows = rows.into_iter().map(|(labels, value)| (labels, ConstGauge::new(value)));
        self.each(name, help, unit, MetricType::Gauge, rows)
    }

    fn each<'l, const L: usize>(
        &mut self,
        name: &str,
        help: &str,
        unit: Option<&Unit>,
        kind: MetricType,
        rows: impl Iterator<Item = ([(&'l str, &'l str); L], impl EncodeMetric)>,
    ) -> fmt::Result {
        let mut metric = self.0.encode_descriptor(name, help, unit, kind)?;
        for (labels, value) in rows {
            value.encode(metric.encode_family(&labels)?)?;
        }
        Ok(())
    }
}
