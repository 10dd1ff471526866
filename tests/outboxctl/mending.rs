//! Do two commands find and mend what stands? The first says why, and the second is the remedy that it prints.

use crate::Ctl;
use crate::common::{DB, wait_true};
use crate::obstacles::obstacles;
use support::Cluster;

/// The last message of a key, to where it goes.
fn last_of(cluster: &Cluster, key: &str) -> String {
    let seq: i64 = cluster.query_one(
        DB,
        &format!("select max(seq) from outbox_events where aggregate_id = '{key}'"),
    );
    seq.to_string()
}

fn show(cluster: &Cluster, key: &str) -> String {
    Ctl::new(cluster, &["show", &last_of(cluster, key)]).run().well()
}

/// Runs the first command of a remedy; a script agrees beforehand.
fn remedy(cluster: &Cluster, shown: &str) -> String {
    let remedy = shown
        .lines()
        .find_map(|line| line.trim().strip_prefix("Fix: outboxctl "))
        .unwrap_or_else(|| panic!("no command: {shown}"));
    let command = remedy.split(", or ").next().unwrap_or_default();
    let mut words: Vec<&str> = command.split(' ').collect();
    if words[0] == "retry" {
        words.push("--yes");
    }
    Ctl::new(cluster, &words).run().well()
}

/// The workers see the new option, and connect anew.
fn reroute(cluster: &Cluster, server: &str) {
    let since =
        |condition: &str| format!("select {condition} from outbox_destination_status where destination = '{server}'");
    let before: String = cluster.query_one(DB, &since("since::text"));
    cluster.exec(
        DB,
        &format!("alter server {server} options (set routing_key 'order.placed')"),
    );
    let anew = since(&format!("state = 'connected' and since > '{before}'"));
    wait_true(cluster, "a worker to use the new option", &anew);
}

fn wait_published_all(cluster: &Cluster, key: &str) {
    wait_true(
        cluster,
        &format!("all messages of {key}, in their order"),
        &format!(
            "select (select array_agg(seq order by published_at, seq) from outbox_history where key = 'order:{key}')
                  is not distinct from (select array_agg(seq order by seq) from outbox_events where aggregate_id = '{key}')"
        ),
    );
}

#[test]
fn what_does_not_move_is_found_and_mended_with_two_commands() {
    let cluster = obstacles();

    let held = show(&cluster, "dead");
    assert!(
        held.contains("behind message 1 of its key, which is dead: unroutable"),
        "{held}"
    );
    reroute(&cluster, "shelf");
    assert!(remedy(&cluster, &held).contains("Retried: 1 message"));
    wait_published_all(&cluster, "dead");

    let failed = show(&cluster, "slow");
    assert!(
        failed.contains("the next one is due at") && failed.contains("unroutable"),
        "{failed}"
    );
    reroute(&cluster, "slow");
    assert!(remedy(&cluster, &failed).contains("Retried: 1 message"));
    wait_published_all(&cluster, "slow");

    let paused = show(&cluster, "paused");
    assert!(paused.contains("paused by postgres: the broker moves"), "{paused}");
    assert!(remedy(&cluster, &paused).contains("goes on"));
    wait_published_all(&cluster, "paused");

    // Here the remedy is one for the server or the broker; the second command has the workers look at once.
    let lost = show(&cluster, "lost");
    assert!(
        lost.contains("the exchange does not exist") && lost.contains("Fix: declare the exchange"),
        "{lost}"
    );
    let exchange: String = cluster.query_one(DB, "show outbox.exchange");
    cluster.exec(DB, &format!("alter server lost options (set exchange '{exchange}')"));
    wait_true(
        &cluster,
        "the workers to see the option",
        "select state = 'connected' from outbox_destination_status where destination = 'lost'",
    );
    let checked = Ctl::new(&cluster, &["check", "lost"]).run().well();
    assert!(checked.contains("the exchange exists"), "{checked}");
    wait_published_all(&cluster, "lost");
}
