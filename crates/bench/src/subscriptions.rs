//! Row subscriptions: the processor time that a further destination takes in the session that publishes, by a
//! subscription with a list of types ÷ that of a publish without subscriptions. Nothing is delivered meanwhile.

use crate::cpu;
use crate::events::EventMaker;
use crate::options::{Options, Placement};
use crate::report::{BenchReport, Sample, Side};
use crate::servers::{EXCHANGE, Servers};

const DESTINATIONS: u32 = 10;
/// The events of a sample. With more, the index of what waits would grow beyond that of an outbox that is emptied.
const EVENTS: u32 = 500;
/// The most samples of one run.
const SAMPLES: u32 = 20;

pub fn subscriptions(options: &Options, report: &mut BenchReport) {
    let mut servers = Servers::start(Placement::Unpinned, options.first_queue(), &[], report);
    servers.pause();
    let note = EventMaker::new(EXCHANGE).note;
    for n in 0..DESTINATIONS {
        servers.sql_execute(&format!(
            "create server subscriber_{n} foreign data wrapper outbox_amqp options (exchange '{EXCHANGE}');
             select outbox_pause('subscriber_{n}')"
        ));
    }
    let samples = options.backlog.div_ceil(EVENTS).min(SAMPLES);
    publish(&mut servers, &note, EVENTS); // a warm-up
    report.compare("subscriptions", ["a destination", "a publish"], |side| {
        let mut us = |is_subscribed: bool| {
            let change = match is_subscribed {
                true => "outbox_subscribe('subscriber_' || n, types => '{OrderPlaced}')",
                false => "outbox_unsubscribe('subscriber_' || n)",
            };
            servers.sql_execute(&format!(
                "select {change} from generate_series(0, {}) n; truncate outbox, outbox_events",
                DESTINATIONS - 1
            ));
            publish(&mut servers, &note, EVENTS)
        };
        let mut all = [0.0, 0.0];
        for _ in 0..samples {
            all[0] += us(false);
            all[1] += us(true);
        }
        let [without, with] = all.map(|us| us / f64::from(samples));
        let result = match side {
            Side::Ours => (with - without) / f64::from(DESTINATIONS),
            Side::Other => without,
        };
        Sample::default().result("", "µs", result)
    });
    report.goal("", "at most 5 µs a destination", |_, ours| ours <= 5.0);
}

/// Publishes events, each in a transaction. Returns the processor time of one in its session, in µs.
fn publish(servers: &mut Servers, note: &str, count: u32) -> f64 {
    let statement = "select outbox_publish('OrderPlaced', jsonb_build_object('note', $1::text), 'order', $2, 'placed')";
    let statement = servers.sql.prepare(statement).expect("prepare the publish");
    let session = servers.processes(&[]).own_session;
    let before = cpu::of_process(session);
    for n in 0..count {
        let published = servers.sql.query_one(&statement, &[&note, &(n % 100).to_string()]);
        published.expect("publish an event");
    }
    (cpu::of_process(session) - before) / f64::from(count)
}
