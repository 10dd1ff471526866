//! Tests of the Outbox Monitor of `outboxctl serve`, as users meet it in a browser and programs by HTTP. They cover
//! what it shows, permits and refuses, and what Prometheus reads from it. On a real Postgres and RabbitMQ, in Debian's
//! Chromium, with Debian's Prometheus.

mod access;
mod databases;
mod limits;
mod metrics;
pub mod monitor;
mod shown;
mod waits;

use serde_json::Value;
use support::{Broker, Cluster, fresh_names};
use support::{DB, idle_cluster, outbox_cluster_with, wait_published, wait_true};

/// Markup that a page must show as text, and never run.
const MARKUP: &str = "<script>window.hacked = 1</script>";

/// A server with the extension and no worker: the rows in its tables stay unchanged.
fn quiet_cluster() -> Cluster {
    idle_cluster(&[])
}

/// A server with 130 published messages, 12 dead letters of OrderLost, which no queue takes, and a message blocked
/// behind one of them. One message is scheduled, and destination audit is paused with 20 pending messages. `mark` is in
/// payloads, keys and errors.
fn stage(mark: &str) -> Cluster {
    let (exchange, queue) = fresh_names();
    stage_with(mark, &exchange, &queue)
}

fn stage_with(mark: &str, exchange: &str, queue: &str) -> Cluster {
    let broker = Broker::shared();
    broker.declare_exchange(exchange, "topic", true);
    broker.declare_queue(queue, Value::Null);
    broker.bind(queue, exchange, "order.placed");
    let conf = ["outbox.workers = 2", "outbox.max_attempts = 1"];
    let cluster = outbox_cluster_with(broker, exchange, &conf);
    cluster.exec(
        DB,
        &format!(
            "create server audit foreign data wrapper outbox_amqp options (url '{}', exchange '{exchange}');
             select outbox_pause('audit', 'maintenance of the hook');
             select outbox_publish('OrderPlaced', '{{\"total\": 99.90}}', 'order', n::text, 'placed') from generate_series(1, 130) n;
             select outbox_publish('OrderDue', '{{}}', 'order', 'due', 'placed', available_at => now() + interval '1 day')",
            broker.url()
        ),
    );
    wait_published(&cluster, 130);
    cluster.exec(
        DB,
        &format!(
            "select outbox_publish('OrderLost', jsonb_build_object('note', '{mark}'), 'order', 7000 + n || '{mark}', 'lost')
             from generate_series(1, 12) n;
             select outbox_publish('OrderAudited', '{{}}', 'order', n::text, 'placed', destination => 'audit')
             from generate_series(1, 20) n;
             select outbox_publish('OrderKept', '{{}}', 'order', '7001{mark}', 'placed')"
        ),
    );
    wait_true(
        &cluster,
        "twelve dead letters, and a message behind one of them",
        "select count(*) = 12 and exists (select from outbox_waiting where state = 'g') from outbox_dead",
    );
    cluster.exec(DB, &format!("update outbox_dead set reason = reason || '{mark}'"));
    cluster
}
