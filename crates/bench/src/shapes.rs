//! Rows keys, snapshot, blocked: the drain of a backlog of one shape ÷ of another, both by the outbox. The queue is of the
//! first type asked for; nothing is pinned.

use std::time::Instant;

use postgres::Client;
use serde_json::{Value, json};

use crate::backlog::{self, Drained};
use crate::events::Maker;
use crate::options::{Options, Placement};
use crate::report::{Figure, Report, say};
use crate::servers::{DB, EXCHANGE, Servers};
use crate::stats;

const KEYS: u32 = 1000;

/// One key ÷ 1,000 keys: what is lost when order forbids to go in parallel.
pub fn keys(options: &Options, report: &mut Report) {
    let mut servers = start(options, report, "keys", &[]);
    servers.pause();
    let figure = pairs(options, "keys", ("one key", "1,000 keys"), |ours| {
        let keys = if ours { 1 } else { KEYS };
        load_and_drain(options, &mut servers, options.messages, keys, None).rate
    });
    report.add(figure);
}

/// Under a snapshot that is held throughout, so that no dead row can be removed ÷ without.
pub fn snapshot(options: &Options, report: &mut Report) {
    let mut servers = start(options, report, "snapshot", &[]);
    servers.pause();
    let mut reader = servers.cluster.connect(DB);
    let figure = pairs(options, "snapshot", ("held snapshot", "none"), |ours| {
        let reader = ours.then_some(&mut reader);
        load_and_drain(options, &mut servers, options.snapshot_backlog, KEYS, reader).rate
    });
    report.add(figure);
}

/// A dead letter blocks its key and more of that key waits behind it ÷ no key is blocked: the rate of all others. Each run
/// has a Postgres of its own. How fast the rows behind were set aside stands beside.
pub fn blocked(options: &Options, report: &mut Report) {
    let mut servers = start(options, report, "blocked", &["outbox.max_attempts = 1"]);
    let note = Maker::new(EXCHANGE).note;
    let mut set_aside_per_s = Vec::new();
    let mut figure = pairs(options, "blocked", ("a key is blocked", "none is"), |ours| {
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
    figure.notes = vec![format!("what is behind the blocked key was set aside at {middle:.0}/s")];
    figure.details = json!({ "set_aside_per_s": set_aside_per_s });
    report.add(figure);
}

/// What no queue takes is a dead letter at its first attempt, and the rest of its key waits for it. Returns how many rows a
/// second the worker set aside, from the order to resume until none of them is among those that may go.
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
    servers.wait_true("the blocked to be set aside", "select not exists (select from outbox)");
    f64::from(behind) / resumed.elapsed().as_secs_f64()
}

fn start(options: &Options, report: &mut Report, row: &str, conf: &[&str]) -> Servers {
    say(&format!("{row}: starting servers"));
    let mut servers = Servers::start(Placement::Unpinned, options.first_queue(), conf);
    report.about(&mut servers);
    servers
}

/// Runs both sides in turn, the other one first.
fn pairs(
    options: &Options,
    name: &str,
    sides: (&'static str, &'static str),
    mut run: impl FnMut(bool) -> f64,
) -> Figure {
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for pair in 1..=options.pairs {
        theirs.push(run(false));
        ours.push(run(true));
        let last = pair as usize - 1;
        say(&format!(
            "{name}, pair {pair} of {}: {} {:.0}/s, {} {:.0}/s",
            options.pairs, sides.1, theirs[last], sides.0, ours[last]
        ));
    }
    Figure {
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
