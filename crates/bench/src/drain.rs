//! Row drain: the outbox emptying a backlog ÷ a bare publisher of equal messages. It runs for each type of queue, with
//! the broker pinned to its own core and without pinning. The processor time of each part shows the best rate that its
//! core could reach.

use serde_json::json;
use support::{Consumer, Delivery};

use crate::backlog::{self, Drained};
use crate::bare::{BarePublisher, Message};
use crate::cpu::Cpu;
use crate::events::{self, Maker};
use crate::options::{Options, Placement, QueueType};
use crate::report::{Measurement, Report, log_progress};
use crate::servers::{EXCHANGE, LONG, QUEUE, Servers, all_cores};
use crate::stats;

/// The number of keys of a backlog; each is an order.
const KEYS: u32 = 1000;

/// One run of the bare publisher.
#[derive(Clone, Copy)]
pub struct Published {
    pub rate: f64,
    cpu_per_message: Cpu,
}

pub fn run(options: &Options, report: &mut Report) {
    for &placement in &options.placements {
        log_progress(&format!("drain, {}: starting servers", placement.name()));
        let mut servers = Servers::start(placement, options.queues[0], &[]);
        report.about(&mut servers);
        let maker = Maker::new(EXCHANGE);
        check_that_both_send_the_same(&mut servers, &maker);
        servers.pause();
        for &queue in &options.queues {
            let measurement = pairs(options, &mut servers, &maker, placement, queue);
            report.add(measurement);
        }
    }
}

fn pairs(
    options: &Options,
    servers: &mut Servers,
    maker: &Maker,
    placement: Placement,
    queue: QueueType,
) -> Measurement {
    let name = format!("drain, {}, {}", queue.name(), placement.name());
    log_progress(&format!("{name}: warming up"));
    let warm_up = (options.backlog / 10).next_multiple_of(1000);
    bare(options, servers, maker, queue, warm_up);
    outbox(servers, maker, queue, warm_up);
    let (mut theirs, mut ours) = (Vec::new(), Vec::new());
    for pair in 1..=options.pairs {
        let them = bare(options, servers, maker, queue, options.backlog);
        let us = outbox(servers, maker, queue, options.backlog);
        log_progress(&format!(
            "{name}, pair {pair} of {}: bare {:.0}/s, outbox {:.0}/s",
            options.pairs, them.rate, us.rate
        ));
        theirs.push(them);
        ours.push(us);
    }
    measurement(name, placement, &ours, &theirs)
}

pub fn bare(options: &Options, servers: &mut Servers, maker: &Maker, queue: QueueType, count: u32) -> Published {
    servers.renew_queue(queue);
    let messages: Vec<Message> = (0..count)
        .map(|n| {
            let (seq, id) = (i64::from(n) + 100_000, events::id(n.into()));
            maker.message(seq, &events::order(n % KEYS), &id).into()
        })
        .collect();
    let publisher = BarePublisher::connect(servers.broker.port());
    let pids = servers.pids();
    let before = pids.read();
    let took = publisher.run(messages, options.bare_batch as usize);
    let cpu_per_message = pids.read().since(before).per_message(count);
    publisher.close();
    Published {
        rate: f64::from(count) / took.as_secs_f64(),
        cpu_per_message,
    }
}

fn outbox(servers: &mut Servers, maker: &Maker, queue: QueueType, count: u32) -> Drained {
    servers.renew_queue(queue);
    backlog::forget_the_past(servers);
    backlog::settle_down(servers);
    backlog::load(&mut servers.sql, "order", &maker.note, count, 0, KEYS);
    backlog::drain(servers, count)
}

/// Compares one message of each side, to prove that both send the same.
fn check_that_both_send_the_same(servers: &mut Servers, maker: &Maker) {
    let consumer = Consumer::new(&servers.broker, QUEUE);
    let one = |what: &str| {
        consumer
            .recv(LONG)
            .unwrap_or_else(|| panic!("no message of {what} arrived"))
    };
    let sent = servers
        .sql
        .query_one(events::PUBLISH, &[&maker.note, &events::order(0)]);
    let seq: i64 = sent.expect("publish an event").get(0);
    let ours = one("the outbox");
    let publisher = BarePublisher::connect(servers.broker.port());
    publisher.publish(maker.message(seq, &events::order(0), &events::id(0)).into());
    publisher.close();
    let theirs = one("the bare publisher");
    let shape = |delivery: &Delivery| {
        let headers: Vec<(String, usize)> = delivery
            .headers
            .iter()
            // A number takes 8 bytes, whatever its value.
            .map(|(name, value)| (name.clone(), value.as_str().map_or(8, str::len)))
            .collect();
        let texts = [
            &delivery.message_id,
            &delivery.kind,
            &delivery.content_type,
            &delivery.app_id,
        ];
        let lengths = texts.map(|text| text.as_deref().map(str::len));
        (
            delivery.body.len(),
            delivery.routing_key.clone(),
            delivery.delivery_mode,
            delivery.timestamp.is_some(),
            lengths,
            headers,
        )
    };
    assert_eq!(
        shape(&ours),
        shape(&theirs),
        "the outbox and the bare publisher send the same"
    );
}

fn measurement(name: String, placement: Placement, ours: &[Drained], theirs: &[Published]) -> Measurement {
    let mid = |pick: &dyn Fn(&Cpu) -> f64, side: &[Cpu]| stats::median(&side.iter().map(pick).collect::<Vec<_>>());
    let middle = |side: &[Cpu]| Cpu {
        broker: mid(&|cpu| cpu.broker, side),
        worker: mid(&|cpu| cpu.worker, side),
        postgres: mid(&|cpu| cpu.postgres, side),
        bench: mid(&|cpu| cpu.bench, side),
    };
    let ours_cpu: Vec<Cpu> = ours.iter().map(|run| run.cpu_per_message).collect();
    let theirs_cpu: Vec<Cpu> = theirs.iter().map(|run| run.cpu_per_message).collect();
    let (us, them) = (middle(&ours_cpu), middle(&theirs_cpu));
    let cores = all_cores().len();
    // The processes that send. Ours leaves out the bench process, which only watches; theirs is the bench process.
    let our_ceiling = ceiling(placement, cores, us.broker, us.worker + us.postgres);
    let their_ceiling = ceiling(placement, cores, them.broker, them.bench);
    let cpu_json = |side: &[Cpu]| -> Vec<_> {
        side.iter()
            .map(
                |cpu| json!({"broker": cpu.broker, "worker": cpu.worker, "postgres": cpu.postgres, "bench": cpu.bench}),
            )
            .collect()
    };
    Measurement {
        name,
        sides: ("outbox", "bare lapin"),
        unit: "/s",
        ours: ours.iter().map(|run| run.rate).collect(),
        theirs: theirs.iter().map(|run| run.rate).collect(),
        notes: vec![
            format!(
                "CPU-µs a message: broker {:.1}, worker {:.1}, other Postgres {:.1}; with bare lapin: broker {:.1}, publisher {:.1}",
                us.broker, us.worker, us.postgres, them.broker, them.bench
            ),
            format!(
                "ceiling by these: outbox {our_ceiling:.0}/s, bare {their_ceiling:.0}/s, ratio {:.2}; Postgres + worker ÷ broker {:.2}",
                our_ceiling / their_ceiling,
                (us.worker + us.postgres) / us.broker
            ),
        ],
        details: json!({
            "cpu_us_per_message": {"ours": cpu_json(&ours_cpu), "theirs": cpu_json(&theirs_cpu)},
            "ceiling": {"ours": our_ceiling, "theirs": their_ceiling},
            "rate_from_resume": ours.iter().map(|run| run.rate_from_resume).collect::<Vec<_>>(),
        }),
    }
}

/// The best rate that these processor times allow: pinned, that of the busier core; unpinned, with all cores busy.
fn ceiling(placement: Placement, cores: usize, broker_us: f64, sender_us: f64) -> f64 {
    match placement {
        Placement::Pinned => 1e6 / broker_us.max(sender_us),
        Placement::Unpinned => 1e6 * cores as f64 / (broker_us + sender_us),
    }
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
