//! Tests that two commands find and fix a stuck message: the first shows the cause, and the second is the fix that the
//! first prints.

use super::Ctl;
use support::Cluster;
use support::obstacles::obstacles;
use support::{DB, wait_true};

/// The seq of the last message of a key.
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

/// Runs the first command of a fix, with `--yes` where outboxctl would ask.
fn run_fix(cluster: &Cluster, shown: &str) -> String {
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

/// Sets a routing key for a server, and waits until a worker has reconnected with it.
fn reroute(cluster: &Cluster, server: &str) {
    let since =
        |condition: &str| format!("select {condition} from outbox_destination_status where destination = '{server}'");
    let before: String = cluster.query_one(DB, &since("since::text"));
    cluster.exec(
        DB,
        &format!("alter server {server} options (set routing_key 'order.placed')"),
    );
    let reconnected = since(&format!("state = 'connected' and since > '{before}'"));
    wait_true(cluster, "a worker to use the new option", &reconnected);
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
fn a_stuck_message_is_found_and_fixed_with_two_commands() {
    let cluster = obstacles();

    let held = show(&cluster, "dead");
    assert!(
        held.contains("behind message 1 of its key, which is dead: unroutable"),
        "{held}"
    );
    reroute(&cluster, "shelf");
    assert!(run_fix(&cluster, &held).contains("Retried: 1 message"));
    wait_published_all(&cluster, "dead");

    let failed = show(&cluster, "slow");
    assert!(
        failed.contains("the next one is due at") && failed.contains("unroutable"),
        "{failed}"
    );
    reroute(&cluster, "slow");
    assert!(run_fix(&cluster, &failed).contains("Retried: 1 message"));
    wait_published_all(&cluster, "slow");

    let paused = show(&cluster, "paused");
    assert!(
        paused.contains("paused by postgres since ") && paused.contains(": the broker moves"),
        "{paused}"
    );
    assert!(run_fix(&cluster, &paused).contains("is resumed"));
    wait_published_all(&cluster, "paused");

    // Here the fix is a change in the server or the broker; the second command makes the workers check again at once.
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

/// A message of a destination that cannot be used names what the check of outbox_health names, once.
#[test]
fn show_has_the_remedy_of_the_check_of_a_destination() {
    let stage = support::Stage::new(&[]);
    let broken = format!(
        "create server audit foreign data wrapper outbox_amqp options (url 'amqp://127.0.0.1:{}', exchange 'x')",
        support::dead_port()
    );
    stage.exec(DB, &broken);
    stage.destination(stage.broker, "gone", "");
    stage.exec(DB, "select outbox_pause('gone')");
    support::wait_paused(&stage, "gone");
    for (check, to) in [("broker", "audit"), ("destination", "gone")] {
        let seq = stage.publish(support::Event::new(to).to(to)).to_string();
        if to == "gone" {
            stage.exec(DB, "drop server gone; select outbox_resume('gone')");
        }
        support::wait_for_problem(&stage, check);
        let remedy: String = stage.query_one(
            DB,
            &format!("select remedy from outbox_health where \"check\" = '{check}'"),
        );
        let shown = Ctl::new(&stage, &["show", &seq]).run().well();
        let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(
            words(&shown).contains(&format!("Fix: {}", words(&remedy))),
            "{remedy}: {shown}"
        );
        assert_eq!(shown.matches("Fix: ").count(), 1, "{shown}");
    }
}
