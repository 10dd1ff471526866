//! Faults of single parts: the broker, the network, the exchange, a worker, the server. Each fault lasts until a signal
//! shows its effect.

mod deleted;

use support::chaos::rounds;
use support::faults::{Faults, messages};
use support::load::{Load, Plan};
use support::oracle::judge;
use support::{Broker, Cluster, Delivery, Mode, Proxy, fresh_names, wait_until};
use support::{
    DB, LONG, Stage, all_of, arrived, exchange_and_queue, outbox_cluster, outbox_cluster_with, supply_exchange,
    unconnected_cluster, wait_connected, wait_drained, wait_for_problem, wait_healthy, wait_published, wait_true,
    wait_workers_paused,
};

/// Asserts that messages are charged attempts for their own failures only.
fn assert_nothing_was_charged(cluster: &Cluster) {
    assert_eq!(
        cluster.query_one::<i64>(DB, "select count(*) from outbox_history where attempts <> 1"),
        0,
        "charged"
    );
    assert_eq!(
        cluster.query_one::<i64>(DB, "select count(*) from outbox_dead"),
        0,
        "dead"
    );
}

#[test]
fn connections_that_break_during_a_batch_lose_nothing() {
    let broker = Broker::shared();
    let (exchange, queue) = exchange_and_queue(broker);
    let proxy = Proxy::start(broker.port());
    let cluster = unconnected_cluster(&proxy.url(), &exchange, &[]);
    wait_connected(&cluster);
    let load = Load::start(&cluster, &Plan::default());
    let mut faults = Faults::default();
    for _ in 0..rounds(5) {
        load.wait_for_more(50);
        faults.during(1, || reset(&proxy, &cluster));
    }
    load.wait_for_more(50);
    let sent = load.stop();
    wait_drained(&cluster);
    let verdict = judge(&sent, &arrived(&all_of(broker, &queue)));
    faults.assert_explain(&verdict, &messages(&cluster));
    assert_nothing_was_charged(&cluster);
}

/// Resets the connections, and waits until the worker has another one.
fn reset(proxy: &Proxy, cluster: &Cluster) {
    let accepted = proxy.accepted();
    proxy.reset_all();
    wait_until("another connection", LONG, || proxy.accepted() > accepted);
    wait_connected(cluster);
}

#[test]
fn a_broker_that_does_not_answer_is_named_and_nothing_is_lost() {
    let broker = Broker::shared();
    let (exchange, queue) = exchange_and_queue(broker);
    let proxy = Proxy::start(broker.port());
    let conf = ["outbox.confirm_timeout = '2s'"];
    let cluster = unconnected_cluster(&proxy.url(), &exchange, &conf);
    wait_connected(&cluster);
    let load = Load::start(&cluster, &Plan::default());
    load.wait_for_more(50);
    let mut faults = Faults::default();
    faults.during(1, || {
        proxy.mode(Mode::Blackhole);
        let problem = wait_for_problem(&cluster, "broker");
        assert!(problem.contains("does not answer"), "{problem}");
        proxy.mode(Mode::Pass);
        reset(&proxy, &cluster);
    });
    load.wait_for_more(50);
    let sent = load.stop();
    wait_drained(&cluster);
    let verdict = judge(&sent, &arrived(&all_of(broker, &queue)));
    faults.assert_explain(&verdict, &messages(&cluster));
    assert_nothing_was_charged(&cluster);
}

/// A queue that takes messages and confirms none, like a quorum queue that lost its quorum. The broker and its other
/// queues work.
#[test]
fn unconfirmed_messages_are_reported_and_sent_again_over_the_same_connection() {
    let broker = Broker::start();
    let (exchange, queue) = exchange_and_queue(&broker);
    let other = format!("{queue}-other");
    broker.declare_queue(&other, serde_json::Value::Null);
    let cluster = outbox_cluster_with(&broker, &exchange, &["outbox.routing_key = '{type}'"]);
    broker.unbind(&queue, &exchange, "#");
    broker.bind(&queue, &exchange, "stuck");
    broker.bind(&other, &exchange, "well");
    let connection = "select pg_catalog.count(*) from outbox_connections where state = 'down'";
    let publish = |kind: &str, key: &str, count: u32| {
        cluster.exec(DB, &format!(
            "select outbox_publish('{kind}', jsonb_build_object('label', '{key}' || g), 'a', '{key}') from generate_series(1, {count}) g"
        ));
    };
    broker.stop_confirming(&queue);
    let offset = cluster.log_offset();
    publish("stuck", "s", 5);
    publish("well", "w", 3);
    let problem = wait_for_problem(&cluster, "broker");
    assert!(
        problem.contains("connected") && problem.contains("5 unconfirmed for"),
        "{problem}"
    );
    wait_true(
        &cluster,
        "the state of the destination",
        "select concat_ws(' ', state, reason, detail) like 'connected unconfirmed 5 unconfirmed for %'
         from outbox_destination_status where destination = 'default'",
    );
    wait_true(
        &cluster,
        "the messages to be released and sent again",
        "select released_total >= 5 and in_flight = 5 from outbox_destination_status where destination = 'default'",
    );
    publish("well", "w", 3);
    wait_published(&cluster, 6);
    assert_eq!(cluster.query_one::<i64>(DB, connection), 0);
    broker.confirm_again(&queue);
    wait_published(&cluster, 11);
    wait_healthy(&cluster, "broker");
    assert_nothing_was_charged(&cluster);
    let log = cluster.log();
    assert!(!log[offset..].contains("broker down"), "{log}");
    // The queue holds both the first copies and the repeated ones by now, each in order.
    let label = |delivery: &Delivery| {
        let body: serde_json::Value = serde_json::from_slice(&delivery.body).expect("JSON");
        body["payload"]["label"].as_str().expect("a label").to_owned()
    };
    let labels: Vec<String> = all_of(&broker, &queue).iter().map(label).collect();
    assert!(labels.len().is_multiple_of(5) && labels.len() > 5, "{labels:?}");
    for (n, label) in labels.iter().enumerate() {
        assert_eq!(*label, format!("s{}", n % 5 + 1), "{labels:?}");
    }
}

#[test]
fn a_missing_exchange_charges_no_attempt_and_shows_in_health() {
    let broker = Broker::shared();
    let (exchange, queue) = fresh_names();
    let cluster = unconnected_cluster(&broker.url(), &exchange, &[]);
    cluster.exec(DB, "select outbox_publish('T', jsonb_build_object('label', g::text), 'a', g::text, 'x') from generate_series(1, 20) g");
    let problem = wait_for_problem(&cluster, "broker");
    assert!(
        problem.contains("exchange does not exist") && problem.contains(&exchange),
        "{problem}"
    );

    supply_exchange(&cluster, broker, &exchange, &queue);
    wait_published(&cluster, 20);
    assert_nothing_was_charged(&cluster);
    wait_healthy(&cluster, "broker");

    // The exchange is deleted while the worker runs. The next publish closes the channel for all outstanding messages.
    broker.delete_exchange(&exchange);
    cluster.exec(
        DB,
        "select outbox_publish('T', '{}', 'a', 'b', 'x') from generate_series(1, 20) g",
    );
    wait_for_problem(&cluster, "broker");
    supply_exchange(&cluster, broker, &exchange, &queue);
    wait_published(&cluster, 40);
    assert_nothing_was_charged(&cluster);
}

#[test]
fn a_broker_that_blocks_publishers_is_waited_for() {
    let broker = Broker::start();
    let (exchange, queue) = exchange_and_queue(&broker);
    let cluster = outbox_cluster(&broker, &exchange);
    let load = Load::start(&cluster, &Plan::default());
    load.wait_for_more(50);
    broker.set_memory_alarm(true);
    let problem = wait_for_problem(&cluster, "blocked");
    assert!(problem.contains("blocks publishers"), "{problem}");
    broker.set_memory_alarm(false);
    wait_healthy(&cluster, "blocked");
    load.wait_for_more(50);
    let sent = load.stop();
    wait_drained(&cluster);
    judge(&sent, &arrived(&all_of(&broker, &queue))).assert_perfect();
    assert_nothing_was_charged(&cluster);
}

#[test]
fn rows_that_move_between_claim_and_settle_are_settled_too() {
    let stage = Stage::new(&["outbox.batch_size = 50"]);
    let load = Load::start(&stage, &Plan::default());
    for _ in 0..rounds(5) {
        load.wait_for_more(30);
        stage.exec(DB, "vacuum full outbox");
    }
    let sent = load.stop();
    wait_drained(&stage);
    judge(&sent, &arrived(&stage.all())).assert_perfect();
}

/// Rows that were claimed at the end of a table that has fewer pages when they are settled.
#[test]
fn a_table_that_shrinks_between_claim_and_settle_fails_no_settle() {
    let broker = Broker::start();
    let (exchange, queue) = exchange_and_queue(&broker);
    let cluster = outbox_cluster(&broker, &exchange);
    let publish = "select outbox_publish('T', '{}', 'a', g::text) from generate_series(1, 500) g";
    cluster.exec(DB, publish);
    wait_published(&cluster, 500);
    broker.stop_confirming(&queue);
    let offset = cluster.log_offset();
    cluster.exec(DB, publish);
    let claimed = "select count(*) = 500 and bool_and(claim_token is not null) from outbox";
    wait_true(&cluster, "the messages to be claimed", claimed);
    let size = || cluster.query_one::<i64>(DB, "select pg_relation_size('outbox')");
    let before = size();
    cluster.exec(DB, "vacuum full outbox");
    assert!(size() < before, "the table still has {before} bytes");
    broker.confirm_again(&queue);
    wait_published(&cluster, 1000);
    let log = cluster.log();
    assert!(!log[offset..].contains("could not read block"), "{log}");
}

#[test]
fn events_deleted_by_hand_block_no_other_message() {
    let cluster = Stage::new(&[]).cluster;
    cluster.exec(DB, "select outbox_pause()");
    wait_workers_paused(&cluster);
    cluster.exec(
        DB,
        "select outbox_publish('T', '{}', 'a', g::text, 'x') from generate_series(1, 10) g",
    );
    cluster.exec(DB, "delete from outbox_events where seq % 2 = 0");
    cluster.exec(DB, "select outbox_resume()");
    wait_true(
        &cluster,
        "half of the messages dead",
        "select count(*) = 5 from outbox_dead where reason like '%no event with seq%'",
    );
    wait_published(&cluster, 5);
}
