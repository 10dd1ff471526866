//! max_rate and max_in_flight: messages to a destination are sent in order and within the limits, and other
//! destinations do not wait.

use super::publish;
use std::time::{Duration, Instant};
use support::oracle::{Sent, Verdict, judge};
use support::*;
use support::{Consumer, Mode, Proxy, wait_until};

fn connected_destination(stage: &Stage, name: &str, options: &str) -> String {
    let queue = stage.destination(stage.broker, name, options);
    wait_stats(stage, name, "state = 'connected'");
    queue
}

#[test]
fn a_destination_gets_messages_in_order_within_its_rate_and_no_other_waits() {
    let stage = Stage::new(&["outbox.workers = 2"]);
    let slow = connected_destination(&stage, "slow", "max_rate '10'");
    let (consumer, began) = (Consumer::new(stage.broker, &slow), Instant::now());
    let event = |n| Event::new(format!("m{n}")).key(format!("k{}", n % 7)).to("slow");
    let mut events: Vec<Event> = (0..60).map(event).collect();
    events.push(Event::new("other").key("k0"));
    let sql: Vec<String> = events.iter().map(Event::sql).collect();
    stage.exec(DB, &sql.join(";"));
    let sent: Vec<Sent> = events.iter().map(Event::sent).collect();
    let deliveries = consumer.recv_n(60, LONG);
    // Each of the two workers may send one message at once, and then 5 messages a second from its partitions.
    for (before, delivery) in deliveries.iter().enumerate() {
        let at_least_s = (before as f64 + 1.0 - 2.0).max(0.0) / 10.0;
        let after = delivery.received_at - began;
        assert!(
            after >= Duration::from_secs_f64(at_least_s),
            "message {before} arrived after {after:?}"
        );
    }
    wait_drained(&stage);
    judge(&sent[..60], &arrived(&deliveries)).assert_perfect();
    judge(&sent[60..], &arrived(&stage.all())).assert_perfect();
    let sql = "select (select published_at from outbox_history where destination = 'default')
                    < (select max(published_at) from outbox_history where destination = 'slow')";
    assert!(
        stage.query_one::<bool>(DB, sql),
        "the message must not wait for the slow destination"
    );
}

#[test]
fn the_rate_of_the_settings_is_changed_without_a_new_connection() {
    let stage = Stage::new(&[]);
    let since = "select since::text from outbox_destination_status where destination = 'default'";
    let before: String = stage.query_one(DB, since);
    stage.set_conf("outbox.max_rate", "5");
    stage.set_conf("outbox.max_pending", "1000");
    wait_stats(&stage, "default", "max_pending = 1000"); // so the worker knows the new rate as well
    let (consumer, began) = (stage.consumer(), Instant::now());
    let sent: Vec<_> = (0..8).map(|n| publish(&stage, format!("m{n}"))).collect();
    let deliveries = consumer.recv_n(8, LONG);
    let took = deliveries[7].received_at - began;
    assert!(took >= Duration::from_millis(7_000 / 5), "{took:?}");
    judge(&sent, &arrived(&deliveries)).assert_perfect();
    assert_eq!(stage.query_one::<String>(DB, since), before);
}

#[test]
fn a_message_that_expires_behind_the_rate_limit_is_not_sent() {
    let stage = Stage::new(&[]);
    let slow = connected_destination(&stage, "slow", "max_rate '10'");
    stage.exec(
        DB,
        "select outbox_publish('T', jsonb_build_object('label', n::text), aggregate_id => 'k', destination => 'slow',
                               expires_at => clock_timestamp() + '0.5 s') from generate_series(1, 30) n",
    );
    wait_drained(&stage);
    let seqs = |sql: &str| stage.query_one::<Vec<i64>>(DB, sql);
    let dead =
        seqs("select coalesce(array_agg(seq order by seq), '{}') from outbox_dead where reason like 'expired: %'");
    let published = seqs("select coalesce(array_agg(seq order by seq), '{}') from outbox_history");
    assert_eq!(dead.len() + published.len(), 30);
    assert!(published.len() <= 6, "{published:?}"); // 1 message at once and 5 in time
    let delivered: Vec<i64> = arrived(&all_of(stage.broker, &slow))
        .iter()
        .map(|arrived| arrived.seq)
        .collect();
    assert_eq!(delivered, published);
}

#[test]
fn at_most_max_in_flight_messages_are_sent_without_a_confirm() {
    let stage = Stage::new(&[]);
    let proxy = Proxy::start(stage.broker.port());
    let url = format!("url 'amqp://127.0.0.1:{}', max_in_flight '2'", proxy.port());
    let queue = connected_destination(&stage, "narrow", &url);
    proxy.mode(Mode::DropReplies);
    let sent: Vec<_> = (0..50)
        .map(|n| {
            publish(
                &stage,
                Event::new(format!("m{n}")).key(format!("k{}", n % 5)).to("narrow"),
            )
        })
        .collect();
    wait_stats(&stage, "narrow", "in_flight > 2");
    wait_until("two messages to arrive", LONG, || stage.broker.queue_len(&queue) == 2);
    proxy.mode(Mode::Pass);
    proxy.reset_all();
    wait_published(&stage, 50);
    let arrived = arrived(&all_of(stage.broker, &queue));
    let doubled = arrived[..2].iter().map(|first| first.label.clone()).collect();
    let mut verdict = judge(&sent, &arrived);
    verdict.doubled.sort();
    assert_eq!(
        verdict,
        Verdict {
            doubled,
            ..Verdict::default()
        }
    );
}
