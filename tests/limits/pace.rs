//! max_rate, max_in_flight: is a destination sent to no faster than it may be, in order, and no other for that?

use crate::common::oracle::judge;
use crate::common::*;
use crate::{arrived, publish, wait_figures};
use std::time::{Duration, Instant};
use support::{Broker, Cluster, Consumer, Mode, Proxy, wait_until};

fn destination(cluster: &Cluster, broker: &Broker, name: &str, options: &str) -> String {
    let (exchange, queue) = exchange_and_queue(broker);
    cluster.exec(
        DB,
        &format!("create server {name} foreign data wrapper outbox_amqp options (exchange '{exchange}', {options})"),
    );
    wait_figures(cluster, name, "state = 'connected'");
    queue
}

#[test]
fn a_destination_is_sent_to_no_faster_than_its_rate_in_order_and_no_other_waits_for_it() {
    let broker = Broker::shared();
    let (exchange, queue) = exchange_and_queue(broker);
    let cluster = outbox_cluster_with(broker, &exchange, &["outbox.workers = 2"]);
    let slow = destination(&cluster, broker, "slow", "max_rate '20'");
    let (consumer, began) = (Consumer::new(broker, &slow), Instant::now());
    // Both workers have one at once and 10 a second each, of what is in their partitions.
    let sent: Vec<_> = (0..60)
        .map(|n| {
            publish(
                &cluster,
                &format!("m{n}"),
                &format!("k{}", n % 7),
                ", destination => 'slow'",
            )
        })
        .collect();
    let other = publish(&cluster, "other", "k0", "");
    let delivery = Consumer::new(broker, &queue).recv_n(1, LONG);
    judge(&[other], &arrived(&delivery)).assert_perfect();
    wait_true(
        &cluster,
        "the other to be published",
        "select exists (select from outbox_history where destination = 'default')",
    );
    assert!(
        cluster.query_one::<bool>(DB, "select exists (select from outbox where destination = 'slow')"),
        "it did not wait for the slow ones"
    );
    let deliveries = consumer.recv_n(60, LONG);
    for (before, delivery) in deliveries.iter().enumerate() {
        let at_least_s = (before as f64 + 1.0 - 2.0) / 20.0;
        let after = delivery.received_at - began;
        assert!(
            after >= Duration::from_secs_f64(at_least_s.max(0.0)),
            "{before} came after {after:?}"
        );
    }
    wait_drained(&cluster);
    judge(&sent, &arrived(&deliveries)).assert_perfect();
}

#[test]
fn the_rate_of_the_settings_is_changed_without_a_new_connection() {
    let broker = Broker::shared();
    let (exchange, queue) = exchange_and_queue(broker);
    let cluster = outbox_cluster(broker, &exchange);
    let since = "select since::text from outbox_destination_status where destination = 'default'";
    let before: String = cluster.query_one(DB, since);
    cluster.set_conf("outbox.max_rate", "5");
    cluster.set_conf("outbox.max_pending", "1000");
    wait_figures(&cluster, "default", "max_pending = 1000"); // so the worker knows the rate, too
    let (consumer, began) = (Consumer::new(broker, &queue), Instant::now());
    let sent: Vec<_> = (0..8).map(|n| publish(&cluster, &format!("m{n}"), "k", "")).collect();
    let deliveries = consumer.recv_n(8, LONG);
    let took = deliveries[7].received_at - began;
    assert!(took >= Duration::from_millis(7_000 / 5), "{took:?}");
    judge(&sent, &arrived(&deliveries)).assert_perfect();
    assert_eq!(cluster.query_one::<String>(DB, since), before);
}

#[test]
fn what_expires_while_it_waits_for_its_turn_is_left_out() {
    let broker = Broker::shared();
    let (exchange, _) = exchange_and_queue(broker);
    let cluster = outbox_cluster(broker, &exchange);
    let slow = destination(&cluster, broker, "slow", "max_rate '10'");
    cluster.exec(
        DB,
        "select outbox_publish('T', jsonb_build_object('label', n::text), aggregate_id => 'k', destination => 'slow',
                               expires_at => clock_timestamp() + '0.5 s') from generate_series(1, 30) n",
    );
    wait_drained(&cluster);
    let seqs = |sql: &str| cluster.query_one::<Vec<i64>>(DB, sql);
    let dead =
        seqs("select coalesce(array_agg(seq order by seq), '{}') from outbox_dead where reason like 'expired: %'");
    let published = seqs("select coalesce(array_agg(seq order by seq), '{}') from outbox_history");
    assert_eq!(dead.len() + published.len(), 30);
    assert!(dead.len() >= 20, "{dead:?}"); // 1 at once and 5 in time
    let came: Vec<i64> = arrived(&all_of(broker, &slow))
        .iter()
        .map(|arrived| arrived.seq)
        .collect();
    assert_eq!(came, published);
}

#[test]
fn no_more_than_max_in_flight_goes_out_without_a_confirm() {
    let broker = Broker::shared();
    let (exchange, _) = exchange_and_queue(broker);
    let cluster = outbox_cluster(broker, &exchange);
    let proxy = Proxy::start(broker.port());
    let url = format!("url 'amqp://127.0.0.1:{}', max_in_flight '2'", proxy.port());
    let queue = destination(&cluster, broker, "narrow", &url);
    proxy.mode(Mode::DropReplies);
    let sent: Vec<_> = (0..50)
        .map(|n| {
            publish(
                &cluster,
                &format!("m{n}"),
                &format!("k{}", n % 5),
                ", destination => 'narrow'",
            )
        })
        .collect();
    wait_figures(&cluster, "narrow", "in_flight > 2");
    wait_until("two messages to arrive", LONG, || broker.queue_len(&queue) == 2);
    proxy.mode(Mode::Pass);
    proxy.reset_all();
    wait_published(&cluster, 50);
    judge(&sent, &arrived(&all_of(broker, &queue))).assert_nothing_lost(2);
}
