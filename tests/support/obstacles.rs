//! A server with messages that are not delivered, for tests of the page and of the commands that show why, and fix it.

use crate::{Broker, Cluster, fresh_names};
use crate::{DB, outbox_cluster_with, wait_paused, wait_true};
use serde_json::Value;

/// Messages of four keys, each with a different obstacle: a dead letter, an attempt that failed, a pause, a missing
/// exchange. A queue bound to order.placed would receive all of them.
pub fn obstacles() -> Cluster {
    let broker = Broker::shared();
    let (exchange, queue) = fresh_names();
    broker.declare_exchange(&exchange, "topic", true);
    broker.declare_queue(&queue, Value::Null);
    broker.bind(&queue, &exchange, "order.placed");
    let cluster = outbox_cluster_with(broker, &exchange, &[]);
    let server = |name: &str, exchange: &str, more: &str| {
        let url = broker.url();
        format!(
            "create server {name} foreign data wrapper outbox_amqp options (url '{url}', exchange '{exchange}', {more});"
        )
    };
    let publish = |destination: &str, key: &str| {
        format!(
            "select outbox_publish('OrderPlaced', '{{}}', 'order', '{key}', 'placed', destination => '{destination}');"
        )
    };
    cluster.exec(DB, "select outbox_pause('default', 'the broker moves')");
    wait_paused(&cluster, "default");
    cluster.exec(
        DB,
        &[
            server("shelf", &exchange, "routing_key 'no.queue', max_attempts '1'"),
            server("slow", &exchange, "routing_key 'no.queue', retry_backoff '1h'"),
            server("lost", &format!("{exchange}-missing"), "routing_key 'order.placed'"),
            publish("shelf", "dead"),
            publish("slow", "slow"),
            publish("lost", "lost"),
            publish("default", "paused"),
        ]
        .concat(),
    );
    wait_true(
        &cluster,
        "a dead letter, a failed attempt",
        "select exists (select from outbox_dead) and exists (select from outbox_waiting where attempts > 0)",
    );
    cluster.exec(DB, &publish("shelf", "dead"));
    wait_true(
        &cluster,
        "a message that waits behind the dead letter",
        "select exists (select from outbox_waiting where state = 'g')",
    );
    cluster
}
