//! The limits of a destination: how many messages may be pending, how fast messages are sent, until when a message may
//! be delivered. On a real Postgres and a real RabbitMQ.

mod expiry;
mod pending;
mod rate;

use serde_json::json;
use support::Cluster;
use support::oracle::{Arrived, Fate, Sent};
use support::{DB, wait_true};

/// Publishes one event. Returns its record for the oracle.
fn publish(cluster: &Cluster, label: &str, key: &str, more: &str) -> Sent {
    let (sql, sent) = event(label, key, more);
    cluster.exec(DB, &sql);
    sent
}

/// The statement that publishes one event, and the record for the oracle.
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

/// Waits until the statistics of the destination meet the condition.
fn wait_stats(cluster: &Cluster, destination: &str, condition: &str) {
    wait_true(
        cluster,
        &format!("{destination}: {condition}"),
        &format!(
            "select exists (select from outbox_destination_status where destination = '{destination}' and {condition})"
        ),
    );
}
