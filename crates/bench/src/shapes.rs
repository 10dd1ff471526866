//! Rows keys, snapshot, blocked, standby: the drain of a backlog of one shape ÷ of another, both by the outbox. The queue
//! has the first requested type; no process is pinned.

use std::time::Instant;

use postgres::Client;
use serde_json::{Value, json};

use crate::backlog::{self, Drained};
use crate::cpu::Cpu;
use crate::events::Maker;
use crate::options::{Options, Placement};
use crate::report::{Measurement, Report, log_progress};
use crate::servers::{DB, EXCHANGE, Servers};
use crate::stats;

const KEYS: u32 = 1000;

/// Row keys: one key ÷ 1,000 keys. Shows the cost of order, which prevents parallel delivery.
pub fn keys(options: &Options, report: &mut Report) {
    let mut servers = start(options, report, "keys", &[]);
    servers.pause();
    let measurement = pairs(options, "keys", ("one key", "1,000 keys"), |ours| {
        let keys = if ours { 1 } else { KEYS };
        load_and_drain(options, &mut servers, options.messages, keys, None).rate
    });
    report.add(measurement);
}

/// Row snapshot: a drain while a snapshot is held, so that no dead row can be removed ÷ a drain without one.
pub fn snapshot(options: &Options, report: &mut Report) {
    let mut servers = start(options, report, "snapshot", &[]);
    servers.pause();
    let mut reader = servers.cluster.connect(DB);
    let measurement = pairs(options, "snapshot", ("held snapshot", "none"), |ours| {
        let reader = ours.then_some(&mut reader);
        load_and_drain(options, &mut servers, options.snapshot_backlog, KEYS, reader).rate
    });
    report.add(measurement);
}

/// Row standby: each message waits until a standby has its commit ÷ it waits for the disk of this server alone. A standby
/// on this machine follows during both.
pub fn standby(options: &Options, report: &mut Report) {
    let mut servers = start(options, report, "standby", &["outbox.standby_names = 's1'"]);
    let standby = servers.cluster.copy(true, &["cluster_name = 's1'"]);
    servers.pause();
    let mut cpu = [Vec::new(), Vec::new()];
    let mut measurement = pairs(options, "standby", ("after the standby", "local"), |ours| {
        let after = if ours { "standby" } else { "local" };
        servers.cluster.set_conf("outbox.publish_after", after);
        let drained = load_and_drain(options, &mut servers, options.backlog, KEYS, None);
        cpu[usize::from(ours)].push(drained.cpu_per_message);
        drained.rate
    });
    let each = |side: &[Cpu], pick: &dyn Fn(&Cpu) -> f64| side.iter().map(pick).collect::<Vec<f64>>();
    let middle = |pick: &dyn Fn(&Cpu) -> f64| {
        let [local, after] = cpu.each_ref().map(|side| stats::median(&each(side, pick)));
        format!("{after:.1} and {local:.1}")
    };
    measurement.notes = vec![format!(
        "CPU-µs a message, after the standby and local: worker {}, other Postgres of the primary {}",
        middle(&|cpu| cpu.worker),
        middle(&|cpu| cpu.postgres),
    )];
    measurement.details = json!({
        "worker_us": cpu.each_ref().map(|side| each(side, &|cpu| cpu.worker)),
        "postgres_us": cpu.each_ref().map(|side| each(side, &|cpu| cpu.postgres)),
    });
    drop(standby); // it followed until here
    report.add(measurement);
}

/// Row blocked: a dead letter blocks its key, and more messages of that key wait behind it ÷ no key is blocked. The
/// rate is that of all other messages. Each run has a new Postgres. The notes show how fast the blocked messages were
/// set aside.
pub fn blocked(options: &Options, report: &mut Report) {
    let mut servers = start(options, report, "blocked", &["outbox.max_attempts = 1"]);
    let note = Maker::new(EXCHANGE).note;
    let mut set_aside_per_s = Vec::new();
    let mut measurement = pairs(options, "blocked", ("a key is blocked", "none is"), |ours| {
        servers.renew_cluster();
        servers.renew_queue(options.first_queue());
        if ours {
            set_aside_per_s.push(block_a_key(&mut servers, &note, options.blocked_backlog));
        }
        servers.pause();
        backlog::settle_down(&mut servers);
        backlog::load(&mut servers.sql, "order", &note, options.messages, 0, KEYS);
        backlog::drain(&mut servers, options.messages).rate
    });
    let middle = stats::median(&set_aside_per_s);
    measurement.notes = vec![format!(
        "messages behind the blocked key were set aside at {middle:.0}/s"
    )];
    measurement.details = json!({ "set_aside_per_s": set_aside_per_s });
    report.add(measurement);
}

/// Blocks a key: a message that no queue takes becomes a dead letter at its first attempt, and the rest of its key
/// waits. Returns how many rows per second the worker set aside, from the command to resume until none of them is
/// pending in `outbox`.
fn block_a_key(servers: &mut Servers, note: &str, behind: u32) -> f64 {
    backlog::load(&mut servers.sql, "stuck", note, 1, 0, 1);
    servers.wait_true(
        "the dead letter",
        "select exists (select from outbox_dead where blocks)",
    );
    servers.pause();
    backlog::load(&mut servers.sql, "stuck", note, behind, 0, 1);
    let resumed = Instant::now();
    servers.resume();
    servers.wait_true(
        "the blocked messages to be set aside",
        "select not exists (select from outbox)",
    );
    f64::from(behind) / resumed.elapsed().as_secs_f64()
}

fn start(options: &Options, report: &mut Report, row: &str, conf: &[&str]) -> Servers {
    log_progress(&format!("{row}: starting servers"));
    let mut servers = Servers::start(Placement::Unpinned, options.first_queue(), conf);
    report.about(&mut servers);
    servers
}

/// Runs both sides in turn, the second side first.
fn pairs(
    options: &Options,
    name: &str,
    sides: (&'static str, &'static str),
    mut run: impl FnMut(bool) -> f64,
) -> Measurement {
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for pair in 1..=options.pairs {
        theirs.push(run(false));
        ours.push(run(true));
        let last = pair as usize - 1;
        log_progress(&format!(
            "{name}, pair {pair} of {}: {} {:.0}/s, {} {:.0}/s",
            options.pairs, sides.1, theirs[last], sides.0, ours[last]
        ));
    }
    Measurement {
        name: format!("{name}, {}", options.first_queue().name()),
        sides,
        unit: "/s",
        ours,
        theirs,
        notes: Vec::new(),
        details: Value::Null,
    }
}

fn load_and_drain(
    options: &Options,
    servers: &mut Servers,
    count: u32,
    keys: u32,
    reader: Option<&mut Client>,
) -> Drained {
    servers.renew_queue(options.first_queue());
    backlog::forget_the_past(servers);
    backlog::settle_down(servers);
    let note = Maker::new(EXCHANGE).note;
    backlog::load(&mut servers.sql, "order", &note, count, 0, keys);
    let Some(reader) = reader else {
        return backlog::drain(servers, count);
    };
    let hold = "begin isolation level repeatable read; select count(*) from (select from outbox limit 1) first";
    reader.batch_execute(hold).expect("hold a snapshot");
    let drained = backlog::drain(servers, count);
    reader.batch_execute("rollback").expect("let the snapshot go");
    drained
}
