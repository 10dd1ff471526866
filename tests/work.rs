//! Tests of a worker outside the server, `outboxctl work`: it delivers as background workers do, alone and beside
//! others, and it can change only its own messages. On a real Postgres and a real RabbitMQ, with the built program.

mod command;
mod encodings;
mod fences;
mod live;
mod outside;
mod trouble;

use std::path::Path;

use support::courier::{Outside, make_courier, run, without_workers, work, work_as};
use support::{Cluster, wait_until};
use support::{DB, LONG, wait_true};

/// Waits until `count` workers share all partitions evenly.
fn wait_for_shares(cluster: &Cluster, count: usize) {
    wait_true(
        cluster,
        &format!("{count} workers to share 16 partitions"),
        &format!(
            "select count(*) = {count} and sum(partitions) = 16 and min(partitions) >= 16 / {count}
             from outbox_worker_status where alive and state = 'connected'"
        ),
    );
}

/// Waits until a worker outside the server has reported all messages that it has ended: it settles just after the
/// broker's confirm.
fn wait_for_total(cluster: &Cluster, published: i64) {
    wait_true(
        cluster,
        &format!("{published} messages to be counted"),
        &format!("select published_total = {published} from outbox_status"),
    );
}

/// Waits until the output of a running command satisfies `is_enough`; returns the output.
fn wait_for_file(path: &Path, what: &str, mut is_enough: impl FnMut(&str) -> bool) -> String {
    let mut text = String::new();
    wait_until(what, LONG, || {
        text = std::fs::read_to_string(path).unwrap_or_default();
        is_enough(&text)
    });
    text
}
