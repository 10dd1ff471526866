//! /metrics, as OpenMetrics: the numbers of the last reading of the database. Labels are bounded: destinations,
//! workers, the words of states and checks; never a key or an error.

use super::app::{App, View};
use super::snapshot::{Latency, Snapshot};
use crate::queries::state::DestinationState;
use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use outbox_core::words::Word;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, MetricEncoder, NoLabelSet};
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
        out.gauge("outbox_up", "Whether the database answers this monitor.", up)?;
        let age = view.read_at.elapsed().unwrap_or_default().as_secs_f64();
        out.seconds(
            "outbox_snapshot_age",
            "Time since the values were read from the database.",
            age,
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
    out.each("outbox_build_info", help, MetricType::Gauge, |metric| {
        labelled(metric, &labels, &ConstGauge::new(1_i64))
    })?;
    out.gauge(
        "outbox_standby",
        "Whether the server is a standby, which delivers nothing.",
        i64::from(snapshot.now.is_standby),
    )?;
    out.maybe(
        "outbox_pending_messages",
        "Messages that have not ended: ready, in flight, retrying, blocked and scheduled.",
        status.pending,
    )?;
    out.maybe(
        "outbox_in_flight_messages",
        "Messages that a worker holds for delivery.",
        status.in_flight,
    )?;
    out.gauge("outbox_dead_messages", "Dead letters, counted to 10000.", status.dead)?;
    let oldest = status.oldest_s.unwrap_or(0.0);
    out.seconds(
        "outbox_oldest_pending_age",
        "Age of the oldest message that can be delivered now: its destination is neither paused, down nor missing. 0 if there is none.",
        oldest,
    )?;
    out.maybe_seconds(
        "outbox_publish_latency_p95",
        "95th percentile from commit to confirm, of the last minute.",
        snapshot.p95_ms(),
    )?;
    out.gauge(
        "outbox_live_workers",
        "Workers that are alive in this database.",
        snapshot.live_workers() as i64,
    )?;
    out.gauge(
        "outbox_partitions",
        "Partitions of this database.",
        snapshot.partitions.len() as i64,
    )?;
    let owned = snapshot
        .partitions
        .iter()
        .filter(|partition| partition.owner.is_some())
        .count();
    out.gauge(
        "outbox_owned_partitions",
        "Partitions that a worker has leased.",
        owned as i64,
    )?;
    let blocked = snapshot.blocked.len() as i64;
    out.gauge(
        "outbox_blocked_partitions",
        "Partitions with a key that a dead letter blocks.",
        blocked,
    )?;
    let mut checks: BTreeMap<&str, bool> = BTreeMap::new();
    for check in &snapshot.health {
        *checks.entry(&check.check).or_insert(true) &= check.ok;
    }
    out.each(
        "outbox_health_ok",
        "Whether a check of outbox_health is ok, for all destinations.",
        MetricType::Gauge,
        |metric| {
            for (check, is_ok) in &checks {
                labelled(metric, &[("check", check)], &ConstGauge::new(i64::from(*is_ok)))?;
            }
            Ok(())
        },
    )?;
    destinations(out, snapshot)?;
    workers(out, snapshot)
}

fn destinations(out: &mut Out<'_, '_>, snapshot: &Snapshot) -> fmt::Result {
    use super::snapshot::Destination;
    type Count = fn(&Destination) -> Option<i64>;
    let all = &snapshot.destinations[..snapshot.destinations.len().min(LABELLED_MAX)];
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
        out.each(name, help, MetricType::Counter, |metric| {
            for (d, n) in all.iter().filter_map(|d| Some((d, count(d)?))) {
                labelled(metric, &[("destination", &d.name)], &ConstCounter::new(n.max(0) as u64))?;
            }
            Ok(())
        })?;
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
        out.each(name, help, MetricType::Gauge, |metric| {
            for (d, n) in all.iter().filter_map(|d| Some((d, count(d)?))) {
                labelled(metric, &[("destination", &d.name)], &ConstGauge::new(n))?;
            }
            Ok(())
        })?;
    }
    let help = "Age of the oldest message that waits for the destination, also while it is paused or down; 0 if there is none.";
    out.each_seconds("outbox_destination_oldest_pending_age", help, |metric| {
        for d in all {
            labelled(
                metric,
                &[("destination", &d.name)],
                &ConstGauge::new(d.oldest_s.unwrap_or(0.0)),
            )?;
        }
        Ok(())
    })?;
    let help = "Percentiles of the time from enqueue to confirm in the last five minutes.";
    out.each_seconds("outbox_destination_latency", help, |metric| {
        for d in all {
            for (quantile, ms) in [("0.5", d.p50_ms), ("0.95", d.p95_ms), ("0.99", d.p99_ms)] {
                let Some(ms) = ms else { continue };
                let labels = [("destination", d.name.as_str()), ("quantile", quantile)];
                labelled(metric, &labels, &ConstGauge::new(ms / 1000.0))?;
            }
        }
        Ok(())
    })?;
    let (help, unit) = ("Time from enqueue to confirm.", Some(&Unit::Seconds));
    out.family("outbox_delivery", help, unit, MetricType::Histogram, |mut metric| {
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
        Ok(())
    })?;
    out.each(
        "outbox_destination_state",
        "1 for the state of the destination, 0 for the others.",
        MetricType::Gauge,
        |metric| {
            for d in all {
                for state in DestinationState::ALL {
                    let labels = [("destination", d.name.as_str()), ("state", state.name())];
                    labelled(metric, &labels, &ConstGauge::new(i64::from(d.state.is(*state))))?;
                }
            }
            Ok(())
        },
    )
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

fn workers(out: &mut Out<'_, '_>, snapshot: &Snapshot) -> fmt::Result {
    let all = &snapshot.workers[..snapshot.workers.len().min(LABELLED_MAX)];
    out.each(
        "outbox_worker_alive",
        "Whether the worker is alive.",
        MetricType::Gauge,
        |metric| {
            for worker in all {
                labelled(
                    metric,
                    &[("worker", &worker.id)],
                    &ConstGauge::new(i64::from(worker.is_alive)),
                )?;
            }
            Ok(())
        },
    )?;
    out.each(
        "outbox_worker_partitions",
        "Partitions that the worker has leased.",
        MetricType::Gauge,
        |metric| {
            for worker in all {
                labelled(metric, &[("worker", &worker.id)], &ConstGauge::new(worker.partitions))?;
            }
            Ok(())
        },
    )?;
    out.each_seconds(
        "outbox_worker_heartbeat_ttl",
        "Time until its last heartbeat expires.",
        |metric| {
            for worker in all {
                labelled(metric, &[("worker", &worker.id)], &ConstGauge::new(worker.heartbeat_s))?;
            }
            Ok(())
        },
    )
}

fn labelled(metric: &mut MetricEncoder<'_>, labels: &[(&str, &str)], value: &dyn EncodeMetric) -> fmt::Result {
    value.encode(metric.encode_family(&labels)?)
}

/// Writes metrics by name.
struct Out<'a, 'e>(&'a mut DescriptorEncoder<'e>);

impl Out<'_, '_> {
    fn family(
        &mut self,
        name: &str,
        help: &str,
        unit: Option<&Unit>,
        kind: MetricType,
        fill: impl FnOnce(MetricEncoder<'_>) -> fmt::Result,
    ) -> fmt::Result {
        fill(self.0.encode_descriptor(name, help, unit, kind)?)
    }

    fn gauge(&mut self, name: &str, help: &str, value: i64) -> fmt::Result {
        self.family(name, help, None, MetricType::Gauge, |metric| {
            ConstGauge::new(value).encode(metric)
        })
    }

    fn maybe(&mut self, name: &str, help: &str, value: Option<i64>) -> fmt::Result {
        value.map_or(Ok(()), |value| self.gauge(name, help, value))
    }

    /// The encoder adds the unit to the name.
    fn seconds(&mut self, name: &str, help: &str, value: f64) -> fmt::Result {
        let unit = Some(&Unit::Seconds);
        self.family(name, help, unit, MetricType::Gauge, |metric| {
            ConstGauge::new(value).encode(metric)
        })
    }

    fn maybe_seconds(&mut self, name: &str, help: &str, ms: Option<f64>) -> fmt::Result {
        ms.map_or(Ok(()), |ms| self.seconds(name, help, ms / 1000.0))
    }

    fn each(
        &mut self,
        name: &str,
        help: &str,
        kind: MetricType,
        fill: impl FnOnce(&mut MetricEncoder<'_>) -> fmt::Result,
    ) -> fmt::Result {
        self.family(name, help, None, kind, |mut metric| fill(&mut metric))
    }

    fn each_seconds(
        &mut self,
        name: &str,
        help: &str,
        fill: impl FnOnce(&mut MetricEncoder<'_>) -> fmt::Result,
    ) -> fmt::Result {
        self.family(name, help, Some(&Unit::Seconds), MetricType::Gauge, |mut metric| {
            fill(&mut metric)
        })
    }
}
