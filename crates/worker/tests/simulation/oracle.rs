//! The true state of every message, kept apart from the tables, and the complaints when the engine breaks a promise.

use super::config::POSTED_RATE;
use outbox_core::message::Outcome;
use std::collections::{BTreeMap, BTreeSet};

/// How far messages may exceed the limit of memory, in bytes.
const MEMORY_BEYOND: usize = 20_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    Published,
    Discarded,
}

/// What the broker does with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    Routed,
    Unroutable,
    /// Each attempt ends the connection, until all is calm.
    EndsConnection,
    /// It cannot be put into a message.
    Unsendable,
    /// It must not be handed over from then on.
    Expires {
        at_ms: u64,
    },
}

#[derive(Clone, Debug)]
pub struct Message {
    pub key: Option<u32>,
    /// Its unit of order: its key, or its partition.
    pub order: Option<u32>,
    pub partition: u16,
    pub destination: usize,
    /// Its seq was drawn in the order of announcing, it is not scheduled, and no person brought it back after later
    /// ones.
    pub ordered: bool,
    pub fate: Fate,
    pub committed: bool,
    /// The position of its commit in WAL.
    pub wal: u64,
    pub end: Option<End>,
    /// The epoch of the claim that the broker confirmed last.
    confirmed: i64,
    /// When the attempt that was delivered last was handed over.
    delivered: Option<u64>,
    /// The last fault that excuses sending it again.
    touched: u64,
}

#[derive(Default)]
struct Key {
    /// Committed, ordered, and neither published nor discarded nor a dead letter that does not block.
    unfinished: BTreeSet<i64>,
    handed_over_max: i64,
    /// When one of its messages failed, or was settled after it had.
    failed: u64,
    failing: BTreeSet<i64>,
}

#[derive(Default)]
pub struct Oracle {
    pub complaint: Option<String>,
    /// Counts events.
    pub now: u64,
    pub messages: BTreeMap<i64, Message>,
    keys: BTreeMap<u32, Key>,
    /// For each worker: handed over, and neither failed nor settled as far as it knows, with the epoch of the claim.
    ahead: Vec<BTreeMap<i64, i64>>,
    pub handed_over: u64,
    pub repeated: u64,
    pub unclaimed: u64,
    pub published: u64,
    /// Attempts charged to messages that end the connection.
    pub charged: u64,
    by_partition: bool,
    /// A second, and the number of messages sent in it.
    posted: (u64, u32),
    /// The message to trace.
    trace: Option<i64>,
}

impl Oracle {
    pub fn new(workers: usize, by_partition: bool) -> Self {
        let trace = std::env::var("OUTBOX_SIM_TRACE").ok();
        Self {
            by_partition,
            ahead: vec![BTreeMap::new(); workers],
            trace: trace.and_then(|seq| seq.parse().ok()),
            ..Self::default()
        }
    }

    pub fn complain(&mut self, complaint: String) {
        self.complaint.get_or_insert(complaint);
    }

    /// Prints the log of a worker, to investigate a seed.
    pub fn say(&self, what: impl Fn() -> String) {
        if self.trace.is_some() {
            println!("{}", what());
        }
    }

    /// Prints the history of one message (OUTBOX_SIM_TRACE) and its key, to investigate a seed.
    pub fn note(&self, seq: i64, what: impl Fn() -> String) {
        let Some(traced) = self.trace else { return };
        let key = |seq| self.messages.get(&seq).and_then(|m: &Message| m.order);
        if seq == traced || (key(seq).is_some() && key(seq) == key(traced)) {
            println!("{:>8} seq {seq} key {:?}: {}", self.now, key(seq), what());
        }
    }

    // ---- producers and people ---------------------------------------------------------------------------------------

    pub fn drawn(&mut self, seq: i64, key: Option<u32>, partition: u16, destination: usize, fate: Fate) {
        let order = match self.by_partition {
            true => Some(u32::from(partition)),
            false => key,
        };
        let order = order.map(|order| order + 1_000 * destination as u32);
        let message = Message {
            key,
            order,
            partition,
            destination,
            ordered: true,
            fate,
            committed: false,
            wal: 0,
            end: None,
            confirmed: 0,
            delivered: None,
            touched: 0,
        };
        self.messages.insert(seq, message);
    }

    pub fn committed(&mut self, seq: i64, wal: u64) {
        self.note(seq, || "committed".into());
        let Some(message) = self.messages.get_mut(&seq) else {
            return;
        };
        message.committed = true;
        message.wal = wal;
        let (Some(key), true) = (message.order, message.ordered) else {
            return;
        };
        let key = self.keys.entry(key).or_default();
        key.unfinished.insert(seq);
        let highest = key.handed_over_max;
        if highest > seq {
            self.complain(format!(
                "{highest} was handed over before {seq} of its key was committed"
            ));
        }
    }

    pub fn ended(&mut self, seq: i64, end: End) {
        self.note(seq, || format!("{end:?}"));
        let Some(message) = self.messages.get_mut(&seq) else {
            return;
        };
        if let Some(before) = message.end.replace(end) {
            self.complain(format!("{seq} is {end:?} and was {before:?}"));
        }
        self.finished(seq);
    }

    fn finished(&mut self, seq: i64) {
        let Some(message) = self.messages.get_mut(&seq) else {
            return;
        };
        if let Some(key) = message.order.and_then(|key| self.keys.get_mut(&key)) {
            key.unfinished.remove(&seq);
        }
    }

    /// Later ones need not wait for it any more.
    pub fn out_of_order(&mut self, seq: i64) {
        if let Some(message) = self.messages.get_mut(&seq) {
            message.ordered = false;
        }
        self.finished(seq);
    }

    // ---- workers ----------------------------------------------------------------------------------------------------

    pub fn handed_over(&mut self, worker: usize, seq: i64, epoch: i64, claimed: bool) {
        self.note(seq, || format!("handed over by {worker} under {epoch}"));
        self.handed_over += 1;
        let Some(message) = self.messages.get(&seq) else {
            return self.complain(format!("{seq} was handed over and never drawn"));
        };
        if !message.committed || message.end.is_some() || !claimed {
            let said = format!("{seq} was handed over by {worker} under {epoch}, claimed: {claimed}, {message:?}");
            return self.complain(said);
        }
        if let Some(key) = message.order {
            let ahead = &self.ahead[worker];
            let key = self.keys.entry(key).or_default();
            let overtaken = key.unfinished.range(..seq).find(|seq| !ahead.contains_key(seq));
            if let Some(overtaken) = overtaken.copied() {
                let said = format!("{worker} handed {seq} over and {overtaken} of its key comes before it");
                self.complain(said);
            } else {
                key.handed_over_max = key.handed_over_max.max(seq);
            }
        }
        self.ahead[worker].insert(seq, epoch);
    }

    /// The worker learns the broker's answer: behind a failed message no other may be handed over.
    pub fn on_outcome(&mut self, worker: usize, seq: i64, epoch: i64, outcome: &Outcome) {
        if *outcome != Outcome::Confirmed && self.ahead[worker].get(&seq) == Some(&epoch) {
            self.ahead[worker].remove(&seq);
        }
    }

    /// The engine has settled a message, or tried to after the message no longer belonged to it.
    pub fn settled(&mut self, worker: usize, seq: i64, epoch: i64, ours: bool) {
        self.note(seq, || format!("settled by {worker} under {epoch}"));
        if self.ahead[worker].get(&seq) == Some(&epoch) {
            self.ahead[worker].remove(&seq);
        }
        let Some(key) = self.messages.get(&seq).and_then(|message| message.order) else {
            return;
        };
        if let Some(key) = self.keys.get_mut(&key)
            && ours
            && key.failing.remove(&seq)
        {
            key.failed = self.now;
        }
    }

    pub fn published(&mut self, seq: i64, epoch: i64) {
        self.published += 1;
        let Some(message) = self.messages.get(&seq) else { return };
        if message.confirmed != epoch {
            self.complain(format!(
                "{seq} is published under {epoch} and was not confirmed: {message:?}"
            ));
        }
        let unfinished = (self.messages[&seq].order).and_then(|key| self.keys.get(&key)?.unfinished.first().copied());
        if let Some(before) = unfinished.filter(|before| *before < seq) {
            self.complain(format!("{seq} is published and {before} of its key is not"));
        }
        self.ended(seq, End::Published);
    }

    /// After each pass: the messages that a worker may send again after a crash are limited by its count of outstanding
    /// ones, and that by its windows.
    pub fn outstanding(&mut self, worker: usize, outstanding: usize, room: usize) {
        if outstanding > room {
            self.complain(format!("{worker} has {outstanding} in flight, and room for {room}"));
        }
        let ahead = self.ahead[worker].len();
        if ahead > outstanding {
            self.complain(format!("{worker} has {ahead} under way and knows of {outstanding}"));
        }
    }

    /// After each pass: a claim that begins below the limit returns one message at least, and small ones come by the fast
    /// path.
    pub fn memory(&mut self, worker: usize, taken: usize, limit: usize) {
        if taken > limit + MEMORY_BEYOND {
            self.complain(format!(
                "{worker} uses {taken} bytes for messages; its limit is {limit}"
            ));
        }
    }

    /// A worker's leases changed: messages with its publisher under others are not ahead of those that it sends now.
    pub fn keep(&mut self, worker: usize, held: &[(u16, i64)]) {
        let lost = self.ahead[worker].iter();
        let lost: Vec<i64> = lost
            .filter(|(seq, epoch)| !held.contains(&(self.messages[seq].partition, **epoch)))
            .map(|(seq, _)| *seq)
            .collect();
        for seq in lost {
            self.touch(seq);
            self.ahead[worker].remove(&seq);
        }
    }

    /// One message goes to the destination with a rate.
    pub fn posted(&mut self, now_ms: u64) {
        let second = now_ms / 1_000;
        if self.posted.0 != second {
            self.posted = (second, 0);
        }
        self.posted.1 += 1;
        // A burst is a tenth of it, and workers that come and go each begin with their share.
        if self.posted.1 > POSTED_RATE * 2 {
            self.complain(format!("{} went in a second where {POSTED_RATE} may", self.posted.1));
        }
    }

    // ---- faults -----------------------------------------------------------------------------------------------------

    /// An event that excuses sending this message, and those behind it, again.
    pub fn touch(&mut self, seq: i64) {
        self.note(seq, || "touched by a fault".into());
        let Some(message) = self.messages.get_mut(&seq) else {
            return;
        };
        message.touched = self.now;
        if let Some(key) = message.order {
            let key = self.keys.entry(key).or_default();
            key.failed = self.now;
            key.failing.insert(seq);
        }
    }

    /// For all messages that this worker has handed over.
    pub fn touch_all(&mut self, worker: usize) {
        let seqs: Vec<i64> = self.ahead[worker].keys().copied().collect();
        for seq in seqs {
            self.touch(seq);
        }
    }

    /// For all messages of a partition that any worker has handed over; another worker takes the partition.
    pub fn touch_partition(&mut self, partition: u16) {
        for worker in 0..self.ahead.len() {
            let seqs: Vec<i64> = self.ahead[worker].keys().copied().collect();
            for seq in seqs {
                if self.messages[&seq].partition == partition {
                    self.touch(seq);
                }
            }
        }
    }

    // ---- the broker -------------------------------------------------------------------------------------------------

    /// A consumer can see it; the attempt was handed over at `handed_over`.
    pub fn delivered(&mut self, seq: i64, handed_over: u64) {
        self.note(seq, || "delivered".into());
        let Some(message) = self.messages.get_mut(&seq) else {
            return;
        };
        let before = message.delivered.replace(handed_over);
        let touched = message.touched;
        let Some(before) = before else { return };
        self.repeated += 1;
        let key_failed = (message.order)
            .and_then(|key| self.keys.get(&key))
            .map_or(0, |key| key.failed);
        if touched.max(key_failed) < before.min(handed_over) {
            self.complain(format!(
                "{seq} was delivered twice, handed over at {before} and {handed_over}, and nothing had happened to it since {touched}"
            ));
        }
    }

    pub fn confirmed(&mut self, seq: i64, epoch: i64) {
        if let Some(message) = self.messages.get_mut(&seq) {
            message.confirmed = epoch.max(message.confirmed); // of a lost lease an answer may come late
        }
    }
}
