//! Measures how fast the outbox drains. Delivery is paused, a backlog enqueued, and delivery resumed. The measured time
//! runs from the first to the last message that outbox_status.published_total counts: confirmed by the broker, and
//! settled by a committed transaction.

use std::ops::Range;
use std::time::{Duration, Instant};

use postgres::Client;

use crate::cpu::Cpu;
use crate::servers::{DB, LONG, Servers};

/// The interval of the polls. A poll costs Postgres about 0.1 ms; the processor time of the polling session is not
/// counted.
const POLL_EVERY: Duration = Duration::from_millis(10);
/// The number of events in a transaction that fills a backlog.
const LOADED_AT_ONCE: u32 = 1000;

/// The result of a drain.
#[derive(Clone, Copy, Debug)]
pub struct Drained {
    /// Messages per second, from the first to the last confirmed message.
    pub rate: f64,
    /// Messages per second, from the command to resume to the last confirm.
    pub rate_from_resume: f64,
    pub cpu_per_message: Cpu,
}

/// Enqueues `count` events, spread evenly over `keys` orders from `first_order` on. The caller has paused delivery.
pub fn load(sql: &mut Client, kind: &str, note: &str, count: u32, first_order: u32, keys: u32) {
    load_range(sql, kind, note, 0..count, first_order, keys);
}

/// Enqueues a backlog that would take minutes: like `load`, by two sessions that do not wait for the disk.
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
    // The shape of events::PUBLISH, many events per statement.
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

/// Makes all earlier work durable and the space of dead rows reusable, so that no run pays for another.
pub fn settle_down(servers: &mut Servers) {
    for statement in ["vacuum outbox", "vacuum outbox_waiting", "checkpoint"] {
        servers.sql.batch_execute(statement).expect("tidy up");
    }
}

/// Removes the rows of earlier runs; the queue tables are empty at this point.
pub fn forget_the_past(servers: &mut Servers) {
    let truncated = servers.sql.batch_execute("truncate outbox_events, outbox_history");
    truncated.expect("truncate");
}

/// Resumes delivery, waits until `count` messages are published, and pauses delivery again.
pub fn drain(servers: &mut Servers, count: u32) -> Drained {
    drain_watched(servers, count, &mut |_, _| {})
}

/// Like `drain`. At each poll `watch` gets the time and the number of these messages that are published.
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
    // A small backlog may be drained at the first poll.
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

/// Polls until at least `published` messages are published. Returns the time and the exact number.
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
        std::thread::sleep(POLL_EVERY);
    }
}
