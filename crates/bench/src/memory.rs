//! Row memory: the most memory of a worker whose receivers hang ÷ of one whose receivers work. All are by HTTP, and have
//! answered once.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use support::process::peak_mib;
use support::{Receiver, Reply, create_receivers, publish_to_each, unconnected_cluster, wait_drained, wait_true};

use crate::report::{BenchReport, Sample, Side};
use crate::servers::DB;

/// A name, the number of receivers, and the number and bytes of the messages for each.
const LOADS: [(&str, usize, usize, usize); 2] = [
    ("60 receivers, 1 MB", 60, 8, 1_000_000),
    ("1,000 receivers, 1 kB", 1_000, 10, 1_000),
];
/// Messages for a receiver that works beside those that hang, one after the other.
const BESIDE: usize = 20;

pub fn memory(report: &mut BenchReport) {
    for (name, receivers, each, bytes) in LOADS {
        report.compare(&format!("memory, {name}"), ["they hang", "they work"], |side| {
            run(side == Side::Ours, receivers, each, bytes)
        });
        report.goal("", "at most 256 MiB", |_, ours| ours <= 256.0);
    }
}

fn run(hang: bool, receivers: usize, each: usize, bytes: usize) -> Sample {
    // A server of its own: a worker that has had memory keeps some of it.
    let cluster = unconnected_cluster("", "nowhere", &["outbox.workers = 1", "outbox.confirm_timeout = '1h'"]);
    let hangs = Arc::new(AtomicBool::new(false));
    let is_on = Arc::clone(&hangs);
    let answer = move |_: &_| match is_on.load(Ordering::SeqCst) {
        true => Reply::Hang,
        false => Reply::status(200),
    };
    let (many, other) = (Receiver::start(answer), Receiver::start(|_| Reply::status(200)));
    create_receivers(&cluster, "d", receivers, &many);
    create_receivers(&cluster, "w", 1, &other);
    publish_to_each(&cluster, "d", receivers, 1, "'{}'");
    wait_drained(&cluster);
    hangs.store(hang, Ordering::SeqCst);
    let payload = format!("jsonb_build_object('text', repeat('x', {bytes}))");
    publish_to_each(&cluster, "d", receivers, each, &payload);
    if hang {
        for _ in 0..BESIDE {
            publish_to_each(&cluster, "w", 1, 1, &payload);
            let is_over = "select not exists (select from outbox where destination = 'w1')";
            wait_true(&cluster, "the receiver that works", is_over);
        }
    } else {
        wait_drained(&cluster);
    }
    let worker: i32 = cluster.query_one(DB, "select pid from outbox_worker_status where alive");
    Sample::default().result("", "MiB", peak_mib(worker as u32) as f64)
}
