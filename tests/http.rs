//! HTTP destinations, on a real Postgres and receivers that answer as a test decides. Messages must be posted in order
//! and signed, and each answer must have its effect. crates/transport/tests covers hostile peers.

mod answers;
mod many;
mod posted;
mod secrets;

use support::{Cluster, Receiver, Reply, wait_until};
use support::{DB, LONG, unconnected_cluster, wait_true};

/// A server that delivers only to destinations that a test makes, and may post to loopback.
pub fn http_cluster(conf: &[&str]) -> Cluster {
    let allow = ["outbox.http_allow = '127.0.0.1'"];
    unconnected_cluster("", "nowhere", &[&allow[..], conf].concat())
}

/// A receiver that accepts every request.
pub fn willing() -> Receiver {
    Receiver::start(|_| Reply::status(200))
}

pub fn destination(cluster: &Cluster, name: &str, url: &str, options: &str) {
    let comma = if options.is_empty() { "" } else { ", " };
    cluster.exec(
        DB,
        &format!("create server {name} foreign data wrapper outbox_http options (url '{url}'{comma}{options})"),
    );
}

pub fn wait_for_requests(receiver: &Receiver, n: usize) {
    wait_until(&format!("{n} requests"), LONG, || receiver.requests().len() >= n);
}

/// Waits until `destination` is down for this reason, and returns its detail.
pub fn wait_for_reason(cluster: &Cluster, destination: &str, reason: &str) -> String {
    let is_so = format!("destination = '{destination}' and state = 'down' and reason = '{reason}'");
    wait_true(
        cluster,
        &format!("{destination} to be down: {reason}"),
        &format!("select exists (select from outbox_destination_status where {is_so})"),
    );
    cluster.query_one(
        DB,
        &format!("select detail from outbox_destination_status where destination = '{destination}'"),
    )
}

/// The remedy that a check of outbox_health shows.
pub fn remedy(cluster: &Cluster, check: &str) -> String {
    let sql = format!(r#"select coalesce(remedy, '') from outbox_health where "check" = '{check}'"#);
    cluster.query_one(DB, &sql)
}
