//! Do the limits of a destination hold: how much may wait for it, how fast it is sent to, until when a message is wanted?
//! On a real Postgres and a real RabbitMQ.

mod common;

#[path = "limits/expiry.rs"]
mod expiry;
#[path = "limits/pending.rs"]
mod pending;
#[path = "limits/rate.rs"]
mod rate;

use common::oracle::{Arrived, Fate, Sent};
use common::{DB, wait_true};
use serde_json::json;
use support::Cluster;

/// Publishes one event; returns what the oracle is to know of it.
fn publish(cluster: &Cluster, label: &str, key: &str, more: &str) -> Sent {
    let (sql, sent) = event(label, key, more);
    cluster.exec(DB, &sql);
    sent
}

/// The statement that does, and what the oracle is to know.
fn event(label: &str, key: &str, more: &str) -> (String, Sent) {
    let payload = json!({ "label": label });
    let sent = Sent {
        label: label.to_owned(),
        payload: payload.clone(),
        fate: Fate::Committed,
    };
    let sql = format!("select outbox_publish('T', '{payload}', aggregate_id => '{key}'{more});");
    (sql, sent)
}

fn arrived(deliveries: &[support::Delivery]) -> Vec<Arrived> {
    deliveries.iter().map(Arrived::new).collect()
}

/// Waits until the worker has heard of a change of the destination.
fn wait_stats(cluster: &Cluster, destination: &str, condition: &str) {
    wait_true(
        cluster,
        &format!("{destination}: {condition}"),
        &format!(
            "select exists (select from outbox_destination_status where destination = '{destination}' and {condition})"
        ),
    );
}
