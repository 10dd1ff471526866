//! Rows keys, snapshot, blocked, backlog, standby, workers: the drain of a backlog under one circumstance ÷ under
//! another, both by the outbox. The queue has the first requested type; no process is pinned.

use std::time::Instant;

use support::courier::{self, Outside};
use support::wait_true;

use crate::backlog::{self, KEYS};
use crate::cpu;
use crate::events::EventMaker;
use crate::options::{Options, Placement};
use crate::report::{BenchReport, Side};
use crate::servers::{DB, EXCHANGE, Servers};
use crate::stats;

/// The most messages that the queue keeps in the row backlog: a broker with millions of messages becomes slow by
/// itself.
const QUEUE_MAX: u32 = 10_000;

fn start(options: &Options, report: &mut BenchReport, conf: &[&str]) -> (Servers, String) {
    let servers = Servers::start(Placement::Unpinned, options.first_queue(), conf, report);
    servers.pause();
    (servers, EventMaker::new(EXCHANGE).note)
}

/// Row keys: one key ÷ 1,000 keys. Shows the cost of order, which prevents parallel delivery.
pub fn keys(options: &Options, report: &mut BenchReport) {
    let (mut servers, note) = start(options, report, &[]);
    report.compare("keys", ["one key", "1,000 keys"], |side| {
        let keys = if side == Side::Ours { 1 } else { KEYS };
        backlog::replace(&mut servers, &note, options.backlog, keys);
        backlog::drain(&mut servers, options.backlog).sample()
    });
}

/// Row snapshot: a drain while a snapshot is held, so that no dead row can be removed ÷ a drain without one.
pub fn snapshot(options: &Options, report: &mut BenchReport) {
    const HOLD: &str = "begin isolation level repeatable read; select count(*) from (select from outbox limit 1) first";
    let (mut servers, note) = start(options, report, &[]);
    let mut reader = servers.cluster.connect(DB);
    report.compare("snapshot", ["held snapshot", "none"], |side| {
        backlog::replace(&mut servers, &note, options.backlog, KEYS);
        if side == Side::Ours {
            reader.batch_execute(HOLD).expect("hold a snapshot");
        }
        let drained = backlog::drain(&mut servers, options.backlog);
        reader.batch_execute("rollback").expect("let the snapshot go");
        drained.sample()
    });
}

/// Row blocked: a dead letter blocks its key, and as many messages as are drained wait behind it ÷ no key is blocked. The
/// rate is that of all other messages. Each run has a new Postgres.
pub fn blocked(options: &Options, report: &mut BenchReport) {
    let conf = ["outbox.max_attempts = 1"];
    let (mut servers, note) = start(options, report, &conf);
    report.compare("blocked", ["a key is blocked", "none is"], |side| {
        servers.renew_cluster(&conf);
        let set_aside_per_s = (side == Side::Ours).then(|| block_a_key(&mut servers, &note, options.backlog));
        servers.pause();
        backlog::settle_down(&mut servers);
        backlog::load(&mut servers, "order", &note, options.backlog, KEYS);
        let sample = backlog::drain(&mut servers, options.backlog).sample();
        match set_aside_per_s {
            Some(per_s) => sample.detail("blocked messages set aside", "/s", per_s),
            None => sample,
        }
    });
}

/// Blocks a key: a message that no queue takes becomes a dead letter at its first attempt, and the rest of its key
/// waits. Returns how many rows per second the worker set aside, from the command to resume until none of them is
/// pending in `outbox`.
fn block_a_key(servers: &mut Servers, note: &str, behind: u32) -> f64 {
    backlog::load(servers, "stuck", note, 1, 1);
    let blocks = "select exists (select from outbox_dead where blocks)";
    wait_true(&servers.cluster, "the dead letter", blocks);
    servers.pause();
    backlog::load(servers, "stuck", note, behind, 1);
    let resumed = Instant::now();
    servers.resume();
    let set_aside = "select not exists (select from outbox)";
    wait_true(&servers.cluster, "the blocked messages to be set aside", set_aside);
    f64::from(behind) / resumed.elapsed().as_secs_f64()
}

/// Row backlog: the drain of a large backlog ÷ of a small one, and the worst second of each.
pub fn large_backlog(options: &Options, report: &mut BenchReport) {
    let (mut servers, note) = start(options, report, &["shared_buffers = '128MB'"]);
    servers.queue_max = Some(QUEUE_MAX);
    report.compare("backlog", ["large", "small"], |side| {
        let count = if side == Side::Ours {
            options.large_backlog
        } else {
            options.backlog
        };
        backlog::replace(&mut servers, &note, count, KEYS);
        let drained = backlog::drain(&mut servers, count);
        let seconds = drained.rate_of_each_second();
        // A backlog that is drained within a second has none.
        match (side, seconds.as_slice()) {
            (Side::Ours, [_, ..]) => drained
                .sample()
                .detail("median second", "/s", stats::median(&seconds))
                .detail("worst second", "/s", stats::lowest(&seconds)),
            _ => drained.sample(),
        }
    });
    report.goal("", "a ratio of at least 0.95", |ratio, _| ratio >= 0.95);
}

/// Row standby: each message waits until a standby has its commit ÷ it waits for the disk of this server alone. A standby
/// on this machine follows during both.
pub fn standby(options: &Options, report: &mut BenchReport) {
    let (mut servers, note) = start(options, report, &["outbox.standby_names = 's1'"]);
    let _standby = servers.cluster.copy(true, &["cluster_name = 's1'"]);
    report.compare("standby", ["after the standby", "local"], |side| {
        let after = if side == Side::Ours { "standby" } else { "local" };
        servers.cluster.set_conf("outbox.publish_after", after);
        backlog::replace(&mut servers, &note, options.backlog, KEYS);
        backlog::drain(&mut servers, options.backlog).sample()
    });
}

/// Row workers: a drain by two workers, and by one outside the server ÷ by one in the server.
pub fn workers(options: &Options, report: &mut BenchReport) {
    let (mut servers, note) = start(options, report, &[]);
    courier::make_courier(&servers.cluster);
    let drain_by = |servers: &mut Servers, in_server: u32| {
        servers.cluster.set_conf("outbox.workers", &in_server.to_string());
        let share = format!(
            "select count(*) filter (where worker_id like 'server-%') = {in_server} and min(partitions) = 16 / count(*)
               and bool_and(state = 'paused') from outbox_worker_status where alive"
        );
        wait_true(&servers.cluster, "the workers to share the partitions", &share);
        backlog::replace(servers, &note, options.backlog, KEYS);
        backlog::drain(servers, options.backlog).sample()
    };
    report.compare("workers", ["two", "one"], |side| {
        drain_by(&mut servers, if side == Side::Ours { 2 } else { 1 })
    });
    report.compare("workers, outside the server", ["outside", "in the server"], |side| {
        if side == Side::Other {
            return drain_by(&mut servers, 1);
        }
        servers.cluster.set_conf("outbox.workers", "0");
        servers.resume(); // a worker is connected only then
        let outside = Outside::start(&servers.cluster, "bench");
        servers.pause();
        let process = outside.child.as_ref().expect("it runs").id();
        let before = cpu::of_process(process);
        let sample = drain_by(&mut servers, 0);
        let us = (cpu::of_process(process) - before) / f64::from(options.backlog);
        sample.detail("CPU of the process outside, a message", "µs", us)
    });
}
