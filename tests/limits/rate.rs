//! max_rate, max_in_flight: is a destination sent to no faster than it may be, in order, and no other for that?

use crate::common::oracle::{Sent, judge};
use crate::common::*;
use crate::{arrived, event, publish, wait_stats};
use std::time::{Duration, Instant};
use support::{Broker, Cluster, Consumer, Mode, Proxy, wait_until};

fn destination(cluster: &Cluster, broker: &Broker, name: &str, options: &str) -> String {
    let (exchange, queue) = exchange_and_queue(broker);
    cluster.exec(
        DB,
        &format!("create server {name} foreign data wrapper outbox_amqp options (exchange '{exchange}', {options})"),
    );
    wait_stats(cluster, name, "state = 'connected'");
    queue
}

#[test]
fn a_destination_is_sent_to_no_faster_than_its_rate_in_order_and_no_other_waits_for_it() {
    let broker = Broker::shared();
    let (exchange, queue) = exchange_and_queue(broker);
    let cluster = outbox_cluster_with(broker, &exchange, &["outbox.workers = 2"]);
    let slow = destination(&cluster, broker, "slow", "max_rate '10'");
    let (consumer, began) = (Consumer::new(broker, &slow), Instant::now());
    let to_slow = ", destination => 'slow'";
    let (mut sql, sent): (Vec<String>, Vec<Sent>) = (0..60)
        .map(|n| event(&format!("m{n}"), &format!("k{}", n % 7), to_slow))
        .unzip();
    let (other_sql, other) = event("other", "k0", "");
    sql.push(other_sql);
    cluster.exec(DB, &sql.concat());
    let deliveries = consumer.recv_n(60, LONG);
    // Two workers have one at once each, and 5 a second of what is in their partitions.
    for (before, delivery) in deliveries.iter().enumerate() {
        let at_least_s = (before as f64 + 1.0 - 2.0).max(0.0) / 10.0;
        let after = delivery.received_at - began;
        assert!(
            after >= Duration::from_secs_f64(at_least_s),
            "{before} came after {after:?}"
        );
    }
    wait_drained(&cluster);
    judge(&sent, &arrived(&deliveries)).assert_perfect();
    judge(&[other], &arrived(&all_of(broker, &queue))).assert_perfect();
    let sql = "select (select published_at from outbox_history where destination = 'default')
                    < (select max(published_at) from outbox_history where destination = 'slow')";
    assert!(cluster.query_one::<bool>(DB, sql), "it did not wait for the slow ones");
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
    wait_stats(&cluster, "default", "max_pending = 1000"); // so the worker knows the rate, too
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
    wait_stats(&cluster, "narrow", "in_flight > 2");
    wait_until("two messages to arrive", LONG, || broker.queue_len(&queue) == 2);
    proxy.mode(Mode::Pass);
    proxy.reset_all();
    wait_published(&cluster, 50);
    judge(&sent, &arrived(&all_of(broker, &queue))).assert_nothing_lost(2);
}
