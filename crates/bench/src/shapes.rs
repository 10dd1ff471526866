//! Rows keys, snapshot, backlog: the drain of a backlog under one circumstance ÷ under another, both by the outbox. The
//! queue has the first requested type; no process is pinned.

use crate::backlog::{self, KEYS};
use crate::events::EventMaker;
use crate::options::{Options, Placement};
use crate::report::{BenchReport, Side};
use crate::servers::{DB, Servers};
use crate::stats;

/// The most messages that the queue keeps in the row backlog: a broker with millions of messages becomes slow by
/// itself.
const QUEUE_MAX: u32 = 10_000;

fn start(options: &Options, report: &mut BenchReport, conf: &[&str]) -> (Servers, String) {
    let servers = Servers::start(Placement::Unpinned, options.first_queue(), conf, report);
    servers.pause();
    (servers, EventMaker::new().note)
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
