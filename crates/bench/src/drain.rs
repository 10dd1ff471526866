//! Rows drain and sizes: the outbox emptying a backlog ÷ a bare publisher of equal messages. Drain runs for each type
//! of queue, with the broker pinned to its own core and without pinning. The processor time of each part shows the best
//! rate that its core could reach. Sizes has large bodies.

use serde_json::Value;
use support::{Consumer, Delivery};

use crate::backlog::{self, KEYS};
use crate::bare::{BareMessage, BarePublisher};
use crate::events::{self, EventMaker};
use crate::options::{Options, Placement, name};
use crate::report::{BenchReport, Sample, Side};
use crate::servers::{QUEUE, Servers, all_cores};

pub fn drain(options: &Options, report: &mut BenchReport) {
    let maker = EventMaker::new();
    for &placement in &options.placements {
        let mut servers = Servers::start(placement, options.queues[0], &[], report);
        check_that_both_send_the_same(&mut servers, &maker);
        servers.pause();
        for &queue in &options.queues {
            servers.queue = queue;
            let row = format!("drain, {}, {}", name(&queue), name(&placement));
            compare(options, report, &mut servers, &maker, &row, options.backlog);
        }
    }
}

pub fn sizes(options: &Options, report: &mut BenchReport) {
    let mut servers = Servers::start(Placement::Unpinned, options.first_queue(), &[], report);
    servers.pause();
    for (name, bytes, count, goal) in [
        ("sizes, 10 kB", 10_000, options.backlog / 5, 0.75),
        ("sizes, 1 MB", 1_000_000, options.backlog / 300, 0.5),
    ] {
        let maker = EventMaker::sized(bytes);
        compare(options, report, &mut servers, &maker, name, count);
        report.goal("", &format!("a ratio of at least {goal}"), |ratio, _| ratio >= goal);
    }
}

fn compare(
    options: &Options,
    report: &mut BenchReport,
    servers: &mut Servers,
    maker: &EventMaker,
    name: &str,
    count: u32,
) {
    let mut run = |side, count| match side {
        Side::Ours => outbox(servers, maker, count),
        Side::Other => bare(options, servers, maker, count),
    };
    // Warm-ups.
    run(Side::Other, count.div_ceil(10));
    run(Side::Ours, count.div_ceil(10));
    report.compare(name, ["outbox", "bare lapin"], |side| run(side, count));
}

fn bare(options: &Options, servers: &mut Servers, maker: &EventMaker, count: u32) -> Sample {
    servers.renew_queue();
    let messages: Vec<BareMessage> = (0..count)
        .map(|n| {
            let (seq, id) = (i64::from(n) + 100_000, events::id(n.into()));
            maker.message(seq, &events::order(n % KEYS), &id).into()
        })
        .collect();
    let publisher = BarePublisher::connect(servers.broker.port());
    let processes = servers.processes(&[]);
    let before = processes.read();
    let took = publisher.run(messages, options.bare_batch as usize);
    let cpu = processes.read().per_message(before, count);
    publisher.close();
    Sample::default()
        .result("", "/s", f64::from(count) / took.as_secs_f64())
        .detail("CPU of the broker, a message", "µs", cpu.broker)
        .detail("CPU of the publisher, a message", "µs", cpu.bench)
        .detail(
            CEILING,
            "/s",
            ceiling(servers.placement, all_cores().len(), cpu.broker, cpu.bench),
        )
}

fn outbox(servers: &mut Servers, maker: &EventMaker, count: u32) -> Sample {
    backlog::replace(servers, &maker.note, count, KEYS);
    let drained = backlog::drain(servers, count);
    // Without the bench process, which only watches.
    let (broker_us, sender_us) = (drained.cpu.broker, drained.cpu.workers + drained.cpu.postgres);
    let ceiling = ceiling(servers.placement, all_cores().len(), broker_us, sender_us);
    drained.sample().detail(CEILING, "/s", ceiling)
}

const CEILING: &str = "ceiling by the processor times";

/// The best rate that these processor times allow: pinned, that of the busier core; unpinned, with all cores busy.
fn ceiling(placement: Placement, cores: usize, broker_us: f64, sender_us: f64) -> f64 {
    match placement {
        Placement::Pinned => 1e6 / broker_us.max(sender_us),
        Placement::Unpinned => 1e6 * cores as f64 / (broker_us + sender_us),
    }
}

/// Compares one message of each side, to prove that both send the same.
fn check_that_both_send_the_same(servers: &mut Servers, maker: &EventMaker) {
    let consumer = Consumer::new(&servers.broker, QUEUE);
    let sent = servers
        .sql
        .query_one(events::PUBLISH, &[&maker.note, &events::order(0)]);
    let seq: i64 = sent.expect("publish an event").get(0);
    let ours = consumer.next();
    let publisher = BarePublisher::connect(servers.broker.port());
    publisher.run(vec![maker.message(seq, &events::order(0), &events::id(0)).into()], 1);
    publisher.close();
    let theirs = consumer.next();
    let shape = |delivery: &Delivery| {
        // A number takes 8 bytes, whatever its value.
        let length = |value: &Value| value.as_str().map_or(8, str::len);
        let headers = delivery
            .headers
            .iter()
            .map(|(name, value)| (name.clone(), length(value)));
        (
            (delivery.body.len(), delivery.routing_key.clone(), delivery.kind.clone()),
            (
                delivery.content_type.clone(),
                delivery.app_id.clone(),
                delivery.delivery_mode,
            ),
            (
                delivery.message_id.as_ref().map(String::len),
                delivery.timestamp.is_some(),
            ),
            headers.collect::<Vec<_>>(),
        )
    };
    let (ours, theirs) = (shape(&ours), shape(&theirs));
    assert_eq!(ours, theirs, "the outbox and the bare publisher send the same");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ceiling_is_that_of_the_busier_core_or_of_all_cores() {
        assert_eq!(ceiling(Placement::Pinned, 2, 50.0, 20.0), 20_000.0);
        assert_eq!(ceiling(Placement::Pinned, 2, 20.0, 50.0), 20_000.0);
        assert_eq!(ceiling(Placement::Unpinned, 2, 60.0, 20.0), 25_000.0);
    }
}
