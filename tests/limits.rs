//! The limits of a destination: how many messages may be pending, how fast messages are sent, until when a message may
//! be delivered. On a real Postgres and a real RabbitMQ.

mod expiry;
mod pending;
mod rate;

use support::oracle::Sent;
use support::{Cluster, Event};

/// Publishes one event. Returns its record for the oracle.
fn publish(cluster: &Cluster, event: impl Into<Event>) -> Sent {
    let event = event.into();
    cluster.publish(event.clone());
    event.sent()
}
