//! How fast does the outbox drain? Delivery is paused, a backlog enqueued, delivery resumed. What is measured runs from the
//! first to the last confirmed message as outbox_status.published_total shows it, which is: confirmed by the broker, and
//! its settlement committed.

use std::ops::Range;
use std::time::{Duration, Instant};

use postgres::Client;

use crate::cpu::Cpu;
use crate::servers::{DB, LONG, Servers};

/// A look costs Postgres about 0.1 ms, and its own processor time is left out.
const LOOK_EVERY: Duration = Duration::from_millis(10);
/// Events of a transaction that fills a backlog.
const LOADED_AT_ONCE: u32 = 1000;

/// What a drain took.
#[derive(Clone, Copy, Debug)]
pub struct Drained {
    /// From the first to the last confirmed message.
    pub rate: f64,
    /// All messages, through the time from the order to resume to the last confirm.
    pub rate_from_resume: f64,
    pub cpu_per_message: Cpu,
}

/// Enqueues `count` events, spread evenly over `keys` orders from `first_order` on. Delivery is paused by the caller.
pub fn load(sql: &mut Client, kind: &str, note: &str, count: u32, first_order: u32, keys: u32) {
    load_range(sql, kind, note, 0..count, first_order, keys);
}

/// The same by two sessions that do not wait for the disk, for a backlog that takes minutes.
pub fn load_large(servers: &Servers, kind: &str, note: &str, count: u32, keys: u32) {
    let half = (count / 2).next_multiple_of(LOADED_AT_ONCE);
    std::thread::scope(|threads| {
        for range in [0..half, half..count] {
            let mut sql = servers.cluster.connect(DB);
            threads.spawn(move || {
                sql.batch_execute("set synchronous_commit = off").expect("a setting");
                load_range(&mut sql, kind, note, range, 0, keys);
            });
        }
    });
}

fn load_range(sql: &mut Client, kind: &str, note: &str, range: Range<u32>, first_order: u32, keys: u32) {
    // The shape of events::PUBLISH, many at once.
    let statement = format!(
        "select count(outbox_publish('OrderPlaced',
           jsonb_build_object('note', $3::text, 'order', o, 'total', 99.90), '{kind}', o, 'placed'))
         from (select lpad(({first_order} + n % {keys})::text, 6, '0') as o from generate_series($1::int, $2::int) n) s"
    );
    let statement = sql.prepare(&statement).expect("prepare the load");
    for first in range.clone().step_by(LOADED_AT_ONCE as usize) {
        let last = (first + LOADED_AT_ONCE).min(range.end) - 1;
        sql.query_one(&statement, &[&first.cast_signed(), &last.cast_signed(), &note])
            .expect("load events");
    }
}

/// Makes all earlier work durable and its leavings reusable, so that no run pays for another.
pub fn settle_down(servers: &mut Servers) {
    for statement in ["vacuum outbox", "vacuum outbox_waiting", "checkpoint"] {
        servers.sql.batch_execute(statement).expect("tidy up");
    }
}

/// Removes what earlier runs left in the tables; the outbox itself is empty by now.
pub fn forget_the_past(servers: &mut Servers) {
    let truncated = servers.sql.batch_execute("truncate outbox_events, outbox_history");
    truncated.expect("truncate");
}

/// Resumes delivery and waits until `count` messages are published. Delivery is paused again at the end.
pub fn drain(servers: &mut Servers, count: u32) -> Drained {
    drain_watched(servers, count, &mut |_, _| {})
}

/// `watch` hears at each look how many of them are published.
pub fn drain_watched(servers: &mut Servers, count: u32, watch: &mut dyn FnMut(Instant, i64)) -> Drained {
    servers.sql.batch_execute("checkpoint").expect("checkpoint");
    let pids = servers.pids();
    let before = servers.published();
    let cpu_before = pids.read();
    let resumed = Instant::now();
    servers.resume();
    let mut watch = |at, published| watch(at, published - before);
    let (first_at, first_count) = wait_for(servers, before + 1, &mut watch);
    let (last_at, _) = wait_for(servers, before + i64::from(count), &mut watch);
    let cpu_per_message = pids.read().since(cpu_before).per_message(count);
    servers.pause();
    let rate_from_resume = f64::from(count) / last_at.duration_since(resumed).as_secs_f64();
    // A small backlog may be gone at the first look.
    let rate = match i64::from(count) - (first_count - before) {
        0 => rate_from_resume,
        later => later as f64 / last_at.duration_since(first_at).as_secs_f64(),
    };
    Drained {
        rate,
        rate_from_resume,
        cpu_per_message,
    }
}

/// When at least `published` messages were, and how many.
fn wait_for(servers: &mut Servers, published: i64, watch: &mut dyn FnMut(Instant, i64)) -> (Instant, i64) {
    let (mut deadline, mut last) = (Instant::now() + LONG, 0);
    loop {
        let (now, at) = (servers.published(), Instant::now());
        watch(at, now);
        if now >= published {
            return (at, now);
        }
        if now > last {
            (deadline, last) = (at + LONG, now); // a large backlog takes longer
        }
        assert!(
            Instant::now() < deadline,
            "{now} published messages, {published} awaited; the log of Postgres:\n{}",
            support::workdir::last_lines(&servers.cluster.log(), 20)
        );
        std::thread::sleep(LOOK_EVERY);
    }
}
