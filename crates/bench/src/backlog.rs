//! Measures how fast the outbox drains. Delivery is paused, a backlog enqueued, and delivery resumed. The measured time
//! runs from the first to the last message that outbox_status.published_total counts: confirmed by the broker, and
//! settled by a committed transaction.

use std::time::{Duration, Instant};

use crate::cpu::Cpu;
use crate::report::Sample;
use crate::servers::{LONG, Servers};

/// The number of keys of a backlog; each is an order.
pub const KEYS: u32 = 1000;
/// The interval of the polls. A poll costs Postgres about 0.1 ms; the processor time of the polling session is not
/// counted.
const POLL_EVERY: Duration = Duration::from_millis(10);
/// The number of events in a transaction that fills a backlog.
const LOADED_AT_ONCE: u32 = 1000;

/// The result of a drain.
pub struct Drained {
    /// Messages per second, from the first to the last confirmed message.
    pub rate: f64,
    pub cpu: Cpu,
    /// The number of published messages at each poll, from the first poll that saw one.
    polls: Vec<(Instant, i64)>,
}

/// Replaces the messages of earlier runs by `count` new ones over `keys` orders.
pub fn replace(servers: &mut Servers, note: &str, count: u32, keys: u32) {
    servers.renew_queue();
    servers.sql_execute("truncate outbox_events, outbox_history");
    settle_down(servers);
    load(servers, note, count, keys);
}

/// Enqueues `count` events, spread evenly over `keys` orders. The caller has paused delivery.
pub fn load(servers: &mut Servers, note: &str, count: u32, keys: u32) {
    // The shape of events::PUBLISH, many events per statement.
    let statement = format!(
        "select count(outbox_publish('OrderPlaced',
           jsonb_build_object('note', $3::text, 'order', o, 'total', 99.90), 'order', o, 'placed',
           destination => '{}'))
         from (select lpad((n % {keys})::text, 6, '0') as o from generate_series($1::int, $2::int) n) s",
        servers.destination
    );
    let statement = servers.sql.prepare(&statement).expect("prepare the load");
    for first in (0..count).step_by(LOADED_AT_ONCE as usize) {
        let last = (first + LOADED_AT_ONCE).min(count) - 1;
        let range = [first.cast_signed(), last.cast_signed()];
        let loaded = servers.sql.query_one(&statement, &[&range[0], &range[1], &note]);
        loaded.expect("load events");
    }
}

/// Makes all earlier work durable and the space of dead rows reusable, so that no run pays for another.
fn settle_down(servers: &mut Servers) {
    for statement in ["vacuum outbox", "vacuum outbox_waiting", "checkpoint"] {
        servers.sql_execute(statement);
    }
}

/// Resumes delivery, waits until `count` messages are published, and pauses delivery again.
pub fn drain(servers: &mut Servers, count: u32) -> Drained {
    let drained = watch(servers, &[], count, |servers| servers.resume(), Servers::published);
    servers.pause();
    drained
}

/// Begins the work of a relay and waits until `published` has grown by `count`. `sessions`: the processes of Postgres
/// that do the work, unless they are workers of the outbox.
pub fn watch(
    servers: &mut Servers,
    sessions: &[i32],
    count: u32,
    begin: impl FnOnce(&mut Servers),
    published: impl Fn(&mut Servers) -> i64,
) -> Drained {
    servers.sql_execute("checkpoint");
    let processes = servers.processes(sessions);
    let published_before = published(servers);
    let cpu_before = processes.read();
    let resumed = Instant::now();
    begin(servers);
    let (mut polls, mut last) = (Vec::new(), 0);
    let mut deadline = Instant::now() + LONG;
    while last < i64::from(count) {
        std::thread::sleep(POLL_EVERY);
        let (published, at) = (published(servers) - published_before, Instant::now());
        if published > last {
            (deadline, last) = (at + LONG, published); // a large backlog takes longer
        }
        if published > 0 {
            polls.push((at, published));
        }
        assert!(
            at < deadline,
            "{published} of {count} messages are published; the log of Postgres:\n{}",
            support::workdir::last_lines(&servers.cluster.log(), 20)
        );
    }
    let cpu = processes.read().per_message(cpu_before, count);
    let (first_at, first) = polls[0];
    let last_at = polls[polls.len() - 1].0;
    // A small backlog may be drained at the first poll.
    let rate = match last - first {
        0 => last as f64 / last_at.duration_since(resumed).as_secs_f64(),
        later => later as f64 / last_at.duration_since(first_at).as_secs_f64(),
    };
    Drained { rate, cpu, polls }
}

impl Drained {
    pub fn sample(&self) -> Sample {
        Sample::default()
            .result("", "/s", self.rate)
            .detail("CPU of the broker, a message", "µs", self.cpu.broker)
            .detail("CPU of the worker, a message", "µs", self.cpu.workers)
            .detail("CPU of other Postgres, a message", "µs", self.cpu.postgres)
    }

    /// The rate in each second of the drain, as far as the polls divide it.
    pub fn rate_of_each_second(&self) -> Vec<f64> {
        rates(&self.polls, Duration::from_secs(1))
    }
}

fn rates(polls: &[(Instant, i64)], each: Duration) -> Vec<f64> {
    let Some(&(mut from, mut before)) = polls.first() else {
        return Vec::new();
    };
    let mut rates = Vec::new();
    for &(at, count) in polls {
        let took = at.duration_since(from);
        if took >= each {
            rates.push((count - before) as f64 / took.as_secs_f64());
            (from, before) = (at, count);
        }
    }
    rates
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_second_has_its_rate_and_the_rest_of_one_does_not_count() {
        let began = Instant::now();
        let poll = |ms: u64, count: i64| (began + Duration::from_millis(ms), count);
        let polls = [
            poll(500, 10),
            poll(1_000, 60),
            poll(1_500, 160),
            poll(2_000, 260),
            poll(3_500, 560),
            poll(4_000, 999),
        ];
        assert_eq!(rates(&polls, Duration::from_secs(1)), [150.0, 200.0]);
        assert!(rates(&polls[..2], Duration::from_secs(1)).is_empty());
        assert!(rates(&[], Duration::from_secs(1)).is_empty());
    }
}
