//! Which messages may arrive again (I4): those that were in flight at a fault. A test records when its faults began and
//! ended. The database has the times of its messages.

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::SystemTime;

use postgres::types::ToSql;

use crate::oracle::Verdict;
use crate::stops::IN_FLIGHT_MAX;
use crate::{Cluster, DB};

/// The most messages that a worker that hangs may have handed over beyond its lease.
const HANDED_OVER_MAX: usize = 64;

/// The faults of a test, in order of time. The clock is also that of the server, which runs on the same machine.
#[derive(Debug, Default)]
pub struct Faults(Vec<Fault>);

#[derive(Debug)]
struct Fault {
    began: SystemTime,
    ended: SystemTime,
    repeats_max: usize,
    late_max: usize,
}

/// A message, as the database knows it.
#[derive(Clone, Debug)]
pub struct Message {
    pub label: String,
    /// Its key, or its partition at a destination that orders whole partitions.
    pub lane: String,
    pub seq: i64,
    pub enqueued_at: SystemTime,
    pub settled_at: SystemTime,
    /// How often the broker refused it.
    pub refusals: usize,
}

impl Faults {
    /// Runs `fault`, which affects this number of workers: it causes the fault, undoes it and waits until they deliver.
    pub fn during<T>(&mut self, workers: usize, fault: impl FnOnce() -> T) -> T {
        let began = SystemTime::now();
        let value = fault();
        self.since(began, workers);
        value
    }

    /// Records a fault that ends now. Only now it may be known how many workers it affected, or that it affected none.
    pub fn since(&mut self, began: SystemTime, workers: usize) {
        self.add(began..SystemTime::now(), workers, 0);
    }

    /// Records that this number of workers hung past the end of their leases.
    pub fn hung_since(&mut self, began: SystemTime, workers: usize) {
        self.add(began..SystemTime::now(), workers, workers);
    }

    pub fn add(&mut self, lasted: Range<SystemTime>, workers: usize, hung: usize) {
        self.0.push(Fault {
            began: lasted.start,
            ended: lasted.end,
            repeats_max: workers * IN_FLIGHT_MAX,
            late_max: hung * HANDED_OVER_MAX,
        });
    }

    /// Asserts that all committed events arrived, and no other message. Each repeat was in flight at a fault, and first
    /// arrivals are in order per key. Only workers that hung may have sent messages early, so that others are late.
    #[track_caller]
    pub fn assert_explain(&self, verdict: &Verdict, messages: &[Message]) {
        self.assert_explain_repeats(verdict, messages);
        let late = self.unexplained(&verdict.reordered, messages, |fault| fault.late_max);
        assert!(late.is_empty(), "{late:?} out of order, {self:?}");
    }

    /// Asserts the same without the order, for a broker that refuses messages. What it takes behind a refused message
    /// arrives early, and again (I3).
    #[track_caller]
    pub fn assert_explain_repeats(&self, verdict: &Verdict, messages: &[Message]) {
        println!("{} repeats, {} faults", verdict.doubled.len(), self.0.len());
        verdict.assert_nothing_lost();
        let refusals = refusals_before(messages);
        let mut repeats = verdict.doubled.clone();
        repeats.sort_unstable();
        let beyond = |same: &[String]| {
            let refused = refusals.get(same[0].as_str()).map_or(0, |n| same.len().min(*n));
            same[refused..].to_vec()
        };
        let repeats: Vec<String> = repeats.chunk_by(|a, b| a == b).flat_map(beyond).collect();
        let repeats = self.unexplained(&repeats, messages, |fault| fault.repeats_max);
        assert!(repeats.is_empty(), "{repeats:?} repeated without a fault, {self:?}");
    }

    /// Gives each label to a fault at which its message was in flight, up to the most of the fault. Returns the rest,
    /// with what the database knows of them.
    fn unexplained<'a>(
        &self,
        labels: &'a [String],
        messages: &'a [Message],
        max: impl Fn(&Fault) -> usize,
    ) -> Vec<(&'a String, Option<&'a Message>)> {
        let messages: BTreeMap<&str, &Message> = messages.iter().map(|m| (m.label.as_str(), m)).collect();
        let mut room: Vec<usize> = self.0.iter().map(max).collect();
        let known = |label: &'a String| (label, messages.get(label.as_str()).copied());
        let mut rest: Vec<_> = labels.iter().map(known).collect();
        // A message that was settled early has the smaller choice.
        rest.sort_by_key(|(_, message)| message.map(|m| m.settled_at));
        rest.retain(|(_, message)| {
            let was_in_flight = |f: &Fault, m: &Message| m.enqueued_at < f.ended && f.began < m.settled_at;
            let mut faults = self.0.iter().zip(&mut room);
            let fault = faults.find(|(f, room)| **room > 0 && message.is_some_and(|m| was_in_flight(f, m)));
            fault.map(|(_, room)| *room -= 1).is_none()
        });
        rest
    }
}

/// For each message, how often the broker refused an earlier one of its lane that was not settled when this one was
/// enqueued. Each refusal may repeat what was in flight behind it.
fn refusals_before(messages: &[Message]) -> BTreeMap<&str, usize> {
    let refused: Vec<&Message> = messages.iter().filter(|m| m.refusals > 0).collect();
    let before = |m: &Message| {
        let earlier = refused.iter().filter(|r| r.lane == m.lane && r.seq < m.seq);
        earlier
            .filter(|r| m.enqueued_at < r.settled_at)
            .map(|r| r.refusals)
            .sum()
    };
    messages.iter().map(|m| (m.label.as_str(), before(m))).collect()
}

/// The messages of the default destination.
pub fn messages(cluster: &Cluster) -> Vec<Message> {
    messages_to(cluster, DB, "default")
}

/// The messages to a destination. One that is not settled yet counts as settled now.
pub fn messages_to(cluster: &Cluster, database: &str, destination: &str) -> Vec<Message> {
    let sql = "select payload->>'label', seq, enqueued_at, coalesce(published_at, clock_timestamp()),
                      case when exists (select from pg_foreign_server
                                        where srvname = destination and 'ordering=partition' = any (srvoptions))
                           then partition_key else coalesce(key, '') end,
                      (select count(*) from outbox_attempts_log l where l.seq = m.seq
                       and l.destination = m.destination and l.error ~ '^(nacked|unroutable)')
               from outbox_messages m where destination = $1 and payload->>'label' is not null";
    read_messages(cluster, database, sql, &[&destination])
}

/// The messages that a query returns: label, seq, when it was enqueued and settled, lane, and refusals.
pub fn read_messages(cluster: &Cluster, database: &str, sql: &str, params: &[&(dyn ToSql + Sync)]) -> Vec<Message> {
    let rows = cluster.connect(database).query(sql, params);
    let message = |row: &postgres::Row| Message {
        label: row.get(0),
        seq: row.get(1),
        enqueued_at: row.get(2),
        settled_at: row.get(3),
        lane: row.get(4),
        refusals: row.get::<_, i64>(5) as usize,
    };
    rows.expect("the messages").iter().map(message).collect()
}
