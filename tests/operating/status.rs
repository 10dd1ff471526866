//! Tests that outbox_status counts correctly. Its cost: tests/cost.rs.

use support::{Broker, Mode, Proxy};

use support::*;

#[test]
fn status_counts_committed_messages_only() {
    let cluster = idle_cluster(&[]);
    let pending = || cluster.query_one::<i64>(DB, "select pending from outbox_status");
    // The launcher allocates an entry for the counters of each database soon after its start.
    wait_true(
        &cluster,
        "the counters",
        "select pending is not null from outbox_status",
    );
    (1..=3).for_each(|n| _ = cluster.publish(n));
    let publish = "select outbox_publish('T', '{}')";
    cluster.exec(DB, &format!("begin; {publish}; rollback"));
    assert_eq!(pending(), 3);
    cluster.exec(DB, &format!("begin; savepoint s; {publish}; rollback to s; commit"));
    assert_eq!(pending(), 3);
    cluster.exec(DB, &format!("begin; savepoint s; {publish}; release s; commit"));
    assert_eq!(pending(), 4);
    cluster.exec(DB, "select outbox_enqueue(1), outbox_enqueue(2)");
    assert_eq!(pending(), 4, "they are pending already");
    cluster.exec(
        DB,
        "do $$ begin begin perform outbox_publish('T', '{}'); raise 'no'; exception when others then null; end; end $$",
    );
    assert_eq!(pending(), 4);
    cluster.exec(DB, "select outbox_discard(3)");
    assert_eq!(pending(), 3, "a discarded message is not pending");
}

#[test]
fn status_shows_the_age_of_the_oldest_message() {
    let cluster = idle_cluster(&[]);
    let age = "select oldest_pending_age from outbox_status";
    let is_null = |sql: &str| cluster.query_one::<bool>(DB, &format!("select ({sql}) is null"));
    assert!(is_null(age), "nothing is pending");
    cluster.exec(
        DB,
        "select outbox_publish('T', '{}', available_at => now() + interval '1 day')",
    );
    assert!(is_null(age), "a scheduled message is not late");
    cluster.publish("1");
    cluster.exec(DB, "update outbox set enqueued_at = now() - interval '2 minutes'");
    let sql = format!("select ({age}) between interval '2 minutes' and interval '10 minutes'");
    assert!(cluster.query_one::<bool>(DB, &sql));
    let (ok, problem) = health(&cluster, "lag");
    assert!(!ok && problem.contains("has waited for 00:02"), "{problem}");
}

#[test]
fn status_follows_a_message_from_pending_to_published() {
    let broker = Broker::shared();
    let (exchange, _) = exchange_and_queue(broker);
    let proxy = Proxy::start(broker.port());
    let cluster = unconnected_cluster(&proxy.url(), &exchange, &[]);
    wait_connected(&cluster);
    proxy.mode(Mode::DropReplies);
    (1..=3).for_each(|n| _ = cluster.publish(n));
    let wait_status = |what: &str, condition: &str| {
        wait_true(&cluster, what, &format!("select {condition} from outbox_status"));
    };
    wait_status(
        "three in flight",
        "pending = 3 and in_flight = 3 and published_total = 0",
    );
    let in_flight = "select count(*) = 3 from outbox_messages where status = 'in flight'";
    wait_true(&cluster, "three claimed", in_flight);
    proxy.mode(Mode::Pass);
    proxy.reset_all();
    wait_status(
        "three published",
        "pending = 0 and in_flight = 0 and published_total = 3",
    );
    cluster.draw_seqs(4711);
    cluster.exec(DB, "select outbox_enqueue(4711, 'key')");
    wait_status("one dead", "dead = 1 and failed_total = 1 and pending = 0");
    wait_status("nothing old", "oldest_pending_age is null");
}

#[test]
fn the_state_becomes_paused_once_nothing_is_in_flight() {
    let broker = Broker::shared();
    let (exchange, _) = exchange_and_queue(broker);
    let proxy = Proxy::start(broker.port());
    let cluster = unconnected_cluster(&proxy.url(), &exchange, &[]);
    wait_connected(&cluster);
    proxy.mode(Mode::DropReplies);
    (1..=3).for_each(|n| _ = cluster.publish(n));
    wait_true(&cluster, "three in flight", "select in_flight = 3 from outbox_status");
    cluster.exec(DB, "select outbox_pause(reason => 'moving house')");
    let state = "select concat_ws('; ', state, detail) from outbox_destination_status";
    assert_eq!(
        cluster.query_one::<String>(DB, state),
        "pausing; 3 in flight, paused by postgres: moving house"
    );
    let (ok, problem) = health(&cluster, "paused");
    assert!(
        !ok && problem.starts_with("default: pausing, 3 in flight, paused by postgres"),
        "{problem}"
    );
    let is_pausing = "select state = 'pausing' from outbox_connections where destination = 'default'";
    wait_true(&cluster, "the worker to notice the pause", is_pausing);
    assert!(
        cluster
            .query_one::<String>(DB, state)
            .starts_with("pausing; 3 in flight")
    );
    let worker = "select state from outbox_worker_status";
    assert_eq!(cluster.query_one::<String>(DB, worker), "pausing");
    proxy.mode(Mode::Pass);
    proxy.reset_all();
    let paused = "select state = 'paused' and in_flight = 0 from outbox_destination_status";
    wait_true(&cluster, "nothing to be in flight", paused);
    assert_eq!(
        cluster.query_one::<String>(DB, state),
        "paused; paused by postgres: moving house"
    );
    let claimed = "select count(*) from outbox_messages where status = 'in flight'";
    assert_eq!(cluster.query_one::<i64>(DB, claimed), 0);
    assert!(health(&cluster, "paused").1.contains("paused by postgres since "));
}

#[test]
fn status_counts_while_the_broker_is_down() {
    let cluster = unconnected_cluster("amqp://127.0.0.1:1", "x", &[]);
    wait_for_problem(&cluster, "broker");
    (1..=3).for_each(|n| _ = cluster.publish(n));
    let condition = "select pending = 3 and in_flight = 0 and dead = 0 from outbox_status";
    wait_true(&cluster, "three pending", condition);
    // The counters are not on disk; the worker counts again.
    cluster.restart();
    wait_true(&cluster, "three pending after a restart", condition);
}
