//! What subscriptions enqueue for further destinations arrives there like anything else, and what is published once
//! arrives once.

use super::{Host, Stage};
use support::load::{Load, Plan};
use support::oracle::{judge, last_arrivals_out_of_order};
use support::{Broker, DB, Event, Session, all_of, arrived, exchange_and_queue, labels, wait_drained};

pub fn subscriptions_that_change_under_load_lose_and_double_nothing(host: Host) {
    let broker = Broker::shared();
    let (exchange, queue) = exchange_and_queue(broker);
    let stage = Stage::idle(host, &broker.url(), &exchange, &[]);
    let all = stage.cluster.destination(broker, "audit", "");
    let some = stage.cluster.destination(broker, "search", "");
    let mut client = stage.cluster.connect(DB);
    client.run("select outbox_subscribe('audit')");
    let load = Load::start(
        &stage.cluster,
        &Plan {
            keys: 50,
            mixed: true,
            ..Plan::default()
        },
    );
    stage.work(2);
    let mut expected = Vec::new();
    for round in 0..10 {
        load.wait_for_more(20);
        let [inside, outside] = ["inside", "outside"].map(|place| format!("{place} {round}"));
        client.run("select outbox_subscribe('search', types => '{T}')");
        client.publish(Event::new(inside.as_str()));
        client.run("select outbox_unsubscribe('search')");
        client.publish(Event::new(outside.as_str()));
        expected.push(inside);
    }
    let mut sent = load.stop();
    let own = (0..10).flat_map(|round| ["inside", "outside"].map(|place| format!("{place} {round}")));
    sent.extend(own.map(|label| Event::new(label.as_str()).sent()));
    wait_drained(&stage.cluster);
    for queue in [queue, all] {
        judge(&sent, &arrived(&all_of(broker, &queue))).assert_perfect();
    }
    let some = all_of(broker, &some);
    let enqueued: i64 = client.value("select count(*) from outbox_history where destination = 'search'");
    assert_eq!(some.len() as i64, enqueued);
    assert_eq!(last_arrivals_out_of_order(&arrived(&some)), Vec::<String>::new());
    let marks = labels(&some).into_iter().filter(|label| label.contains("side "));
    assert_eq!(marks.collect::<Vec<_>>(), expected);
    let mut distinct = labels(&some);
    distinct.sort();
    distinct.dedup();
    assert_eq!(distinct.len(), some.len(), "each once");
}

pub fn an_id_that_sessions_publish_at_once_arrives_once(host: Host) {
    let broker = Broker::shared();
    let (exchange, queue) = exchange_and_queue(broker);
    let stage = Stage::of_broker(host, &exchange, &[]);
    let publishers: Vec<_> = (0..4)
        .map(|_| {
            let mut client = stage.cluster.connect(DB);
            std::thread::spawn(move || {
                for n in 0..50 {
                    let event = Event::new(n).with("if_exists => 'skip'");
                    client.publish(event.with(&format!("id => '01a1fc85-047b-72cc-b926-{n:012}'")));
                }
            })
        })
        .collect();
    publishers
        .into_iter()
        .for_each(|publisher| publisher.join().expect("a publisher"));
    wait_drained(&stage.cluster);
    let mut received = labels(&all_of(broker, &queue));
    received.sort_by_key(|label| label.parse::<u32>().expect("a number"));
    assert_eq!(received, (0..50).map(|n| n.to_string()).collect::<Vec<_>>());
}
