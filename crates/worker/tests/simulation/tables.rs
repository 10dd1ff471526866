//! The tables, and the effects of `sql/src/30_worker.sql` and `sql/src/40_operate.sql` on them. Each function is a
//! transaction.

use outbox_core::engine::Lane;
use outbox_core::settle::{Action, Blocks, Ending};
use std::collections::{BTreeMap, BTreeSet};

#[derive(Clone, Debug)]
pub struct Row {
    pub destination: usize,
    pub key: Option<u32>,
    pub attempts: i32,
    pub crashes: i32,
    pub token: Option<i64>,
    /// A new number with each change, like a ctid.
    version: u64,
}

impl Row {
    pub fn new(destination: usize, key: Option<u32>) -> Self {
        Self {
            destination,
            key,
            attempts: 0,
            crashes: 0,
            token: None,
            version: 0,
        }
    }

    fn of(waiting: &Waiting, token: Option<i64>) -> Self {
        Self {
            attempts: waiting.attempts,
            crashes: waiting.crashes,
            token,
            ..Self::new(waiting.destination, waiting.key)
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    Scheduled,
    BacksOff,
    /// Behind an earlier one of its key.
    Behind,
}

#[derive(Clone, Debug)]
pub struct Waiting {
    pub partition: u16,
    pub destination: usize,
    pub key: Option<u32>,
    pub due_ms: u64,
    pub why: Why,
    pub attempts: i32,
    pub crashes: i32,
    pub version: u64,
}

#[derive(Clone, Debug)]
pub struct Dead {
    pub partition: u16,
    pub destination: usize,
    pub key: Option<u32>,
    pub reason: String,
    pub blocks: bool,
}

#[derive(Clone, Debug, Default)]
pub struct Lease {
    pub owner: Option<String>,
    pub until_ms: u64,
    pub epoch: i64,
}

/// (partition, destination, key)
pub type Order = (u16, usize, u32);

/// Like [`Order`], but without a key for a whole partition; the value is (blocker, followers).
pub type KeyState = (u16, usize, Option<u32>);

/// (seq, partition, row)
pub type Claim = (i64, u16, Row);

pub struct Tables {
    pub outbox: Vec<BTreeMap<i64, Row>>,
    pub waiting: BTreeMap<i64, Waiting>,
    /// The indexes of `waiting`.
    behind: BTreeMap<Order, BTreeSet<i64>>,
    due: BTreeSet<(u64, i64)>,
    pub dead: BTreeMap<i64, Dead>,
    pub leases: Vec<Lease>,
    /// Heartbeats.
    pub workers: BTreeMap<String, u64>,
    versions: u64,
    /// Partitions whose lease a transaction holds until it is done: no worker can take it.
    pub kept: Vec<u16>,
}

impl Tables {
    pub fn new(partitions: u16) -> Self {
        let n = usize::from(partitions);
        Self {
            outbox: vec![BTreeMap::new(); n],
            waiting: BTreeMap::new(),
            behind: BTreeMap::new(),
            due: BTreeSet::new(),
            dead: BTreeMap::new(),
            leases: vec![Lease::default(); n],
            workers: BTreeMap::new(),
            versions: 0,
            kept: Vec::new(),
        }
    }

    fn held(&self, worker: &str, partition: u16, epoch: i64) -> bool {
        let lease = &self.leases[usize::from(partition)];
        lease.owner.as_deref() == Some(worker) && lease.epoch == epoch
    }

    // ---- leases -----------------------------------------------------------------------------------------------------

    pub fn heartbeat(&mut self, worker: &str, now_ms: u64, ttl_ms: u64) -> Vec<String> {
        self.workers.insert(worker.to_owned(), now_ms + ttl_ms);
        let live = self.workers.iter().filter(|(_, until_ms)| **until_ms > now_ms);
        live.map(|(name, _)| name.clone()).collect()
    }

    pub fn take(&mut self, worker: &str, partitions: &[u16], now_ms: u64, ttl_ms: u64) -> Vec<(u16, i64)> {
        let mut taken = Vec::new();
        for partition in partitions.iter().filter(|partition| !self.kept.contains(partition)) {
            let lease = &mut self.leases[usize::from(*partition)];
            if lease.owner.as_deref().is_none_or(|owner| owner == worker) || lease.until_ms <= now_ms {
                lease.owner = Some(worker.to_owned());
                lease.until_ms = now_ms + ttl_ms;
                lease.epoch += 1;
                taken.push((*partition, lease.epoch));
            }
        }
        taken
    }

    pub fn renew(&mut self, worker: &str, leases: &[(u16, i64)], now_ms: u64, ttl_ms: u64) -> Vec<(u16, i64)> {
        let mut renewed = Vec::new();
        for (partition, epoch) in leases {
            if self.held(worker, *partition, *epoch) {
                self.leases[usize::from(*partition)].until_ms = now_ms + ttl_ms;
                renewed.push((*partition, *epoch));
            }
        }
        renewed
    }

    pub fn is_live(&self, worker: &str, partition: u16, epoch: i64, now_ms: u64) -> bool {
        self.held(worker, partition, epoch) && self.leases[usize::from(partition)].until_ms > now_ms
    }

    pub fn give_back(&mut self, worker: &str, leases: &[(u16, i64)]) {
        for (partition, epoch) in leases {
            if self.held(worker, *partition, *epoch) {
                self.leases[usize::from(*partition)].owner = None;
            }
        }
    }

    pub fn leave(&mut self, worker: &str) {
        for lease in &mut self.leases {
            if lease.owner.as_deref() == Some(worker) {
                lease.owner = None;
            }
        }
        self.workers.remove(worker);
    }

    // ---- claims -----------------------------------------------------------------------------------------------------

    pub fn insert_ready(&mut self, partition: u16, seq: i64, mut row: Row) {
        self.versions += 1;
        row.version = self.versions;
        self.outbox[usize::from(partition)].insert(seq, row);
    }

    /// The rows of one lane that a claim sees.
    pub fn see(&self, worker: &str, destination: usize, lane: &Lane, again: bool) -> Vec<Claim> {
        let (partition, epoch) = (lane.partition.index(), lane.epoch);
        if !self.held(worker, partition, epoch) {
            return Vec::new();
        }
        let rows = self.outbox[usize::from(partition)].range(lane.cursor + 1..=lane.read_limit);
        rows.filter(|(_, row)| row.destination == destination)
            .filter(|(_, row)| again || row.token != Some(epoch))
            .take(lane.limit as usize)
            .map(|(seq, row)| (*seq, partition, row.clone()))
            .collect()
    }

    /// Claims rows that were seen, if the worker holds their leases now. A row that has changed since then is left, or,
    /// with `looks_again`, claimed as it is now, if it carries the token that was seen.
    pub fn mark_claimed(
        &mut self,
        worker: &str,
        seen: Vec<Claim>,
        epoch: impl Fn(u16) -> i64,
        looks_again: bool,
    ) -> Vec<Claim> {
        let mut claimed = Vec::new();
        for (seq, partition, row) in seen {
            let now = self.outbox[usize::from(partition)].get(&seq);
            let Some(now) = now.filter(|_| self.held(worker, partition, epoch(partition))) else {
                continue;
            };
            if now.version == row.version || looks_again && now.token == row.token {
                let mut marked = now.clone();
                marked.crashes += i32::from(now.token.is_some());
                marked.token = Some(epoch(partition));
                self.insert_ready(partition, seq, marked.clone());
                claimed.push((seq, partition, marked));
            }
        }
        claimed
    }

    /// The rows of a waiting key that a claim sees: (seq, version).
    pub fn see_waiting(&self, worker: &str, of: Order, epoch: i64, read_limit: i64, limit: usize) -> Vec<(i64, u64)> {
        match self.behind.get(&of) {
            Some(behind) if self.held(worker, of.0, epoch) => (behind.range(..=read_limit).take(limit))
                .map(|seq| (*seq, self.waiting[seq].version))
                .collect(),
            _ => Vec::new(),
        }
    }

    /// Claims rows that were seen and are unchanged.
    pub fn claim_waiting(&mut self, seen: &[(i64, u64)], epoch: i64) -> Vec<Claim> {
        let mut claimed = Vec::new();
        for (seq, version) in seen {
            if self.waiting.get(seq).is_none_or(|now| now.version != *version) {
                continue;
            }
            let Some(was) = self.remove_waiting(*seq) else { continue };
            let row = Row::of(&was, Some(epoch));
            self.insert_ready(was.partition, *seq, row.clone());
            claimed.push((*seq, was.partition, row));
        }
        claimed
    }

    pub fn waits_behind(&self, of: Order) -> bool {
        self.behind.contains_key(&of)
    }

    /// (destination, partition, seq)
    pub fn bring_due(
        &mut self,
        worker: &str,
        leases: &[(u16, i64)],
        now_ms: u64,
        limit: usize,
    ) -> Vec<(usize, u16, i64)> {
        let mine = |seq: &i64| {
            let partition = self.waiting[seq].partition;
            (leases.iter()).any(|(p, epoch)| *p == partition && self.held(worker, *p, *epoch))
        };
        let due: Vec<i64> = (self.due.iter())
            .take_while(|(due_ms, _)| *due_ms <= now_ms)
            .map(|(_, seq)| *seq)
            .filter(mine)
            .take(limit)
            .collect();
        let mut moved = Vec::new();
        for seq in due {
            let Some(was) = self.remove_waiting(seq) else { continue };
            if !self.outbox[usize::from(was.partition)].contains_key(&seq) {
                self.insert_ready(was.partition, seq, Row::of(&was, None));
            }
            moved.push((was.destination, was.partition, seq));
        }
        moved
    }

    pub fn next_due_ms(&self, now_ms: u64) -> Option<u64> {
        self.due.first().map(|(due_ms, _)| due_ms.saturating_sub(now_ms))
    }

    pub fn blocked_keys(&self, partitions: &[u16]) -> BTreeMap<KeyState, (Option<i64>, bool)> {
        let mut blocked_keys: BTreeMap<KeyState, (Option<i64>, bool)> = BTreeMap::new();
        for (partition, destination, key) in self.behind.keys() {
            blocked_keys
                .entry((*partition, *destination, Some(*key)))
                .or_default()
                .1 = true;
        }
        let backing_off = self.due.iter().filter_map(|(_, seq)| {
            let waiting = &self.waiting[seq];
            let of = (waiting.partition, waiting.destination, waiting.key);
            (waiting.why == Why::BacksOff).then_some((of, *seq))
        });
        let blocking = (self.dead.iter()).filter(|(_, dead)| dead.blocks);
        let blocking = blocking.map(|(seq, dead)| ((dead.partition, dead.destination, dead.key), *seq));
        for (of, seq) in backing_off.chain(blocking) {
            let (blocker, _) = blocked_keys.entry(of).or_default();
            *blocker = Some(blocker.map_or(seq, |known| known.min(seq)));
        }
        blocked_keys.retain(|(partition, _, _), _| partitions.contains(partition));
        blocked_keys
    }

    pub fn has_from(&self, partition: u16, destination: usize, seq: i64) -> bool {
        let mut rows = self.outbox[usize::from(partition)].range(seq..);
        rows.any(|(_, row)| row.destination == destination)
    }

    pub fn destinations_with_messages(&self) -> BTreeSet<usize> {
        let ready = self
            .outbox
            .iter()
            .flat_map(|lane| lane.values().map(|row| row.destination));
        let behind = self.behind.keys().map(|(_, destination, _)| *destination);
        let backing_off = self.waiting.values().filter(|waiting| waiting.why == Why::BacksOff);
        let blocking = self.dead.values().filter(|dead| dead.blocks);
        (ready.chain(behind))
            .chain(backing_off.map(|waiting| waiting.destination))
            .chain(blocking.map(|dead| dead.destination))
            .collect()
    }

    // ---- settle -----------------------------------------------------------------------------------------------------

    /// Whether this worker may settle the message; `fast_in_flight`: also before any claim.
    pub fn is_claimed(&self, worker: &str, at: (u16, i64), epoch: i64, fenced: bool, fast_in_flight: bool) -> bool {
        let row = self.outbox[usize::from(at.0)].get(&at.1);
        (!fenced || self.held(worker, at.0, epoch))
            && row.is_some_and(|row| row.token == Some(epoch) || (fast_in_flight && row.token.is_none()))
    }

    pub fn settle(&mut self, (partition, seq): (u16, i64), ending: &Ending, now_ms: u64) {
        let lane = &mut self.outbox[usize::from(partition)];
        if ending.action == Action::Free {
            if let Some(mut row) = lane.remove(&seq) {
                row.token = None;
                self.insert_ready(partition, seq, row);
            }
            return;
        }
        let Some(row) = lane.remove(&seq) else { return };
        let mut waiting = Waiting {
            partition,
            destination: row.destination,
            key: row.key,
            due_ms: 0,
            why: Why::Behind,
            attempts: row.attempts,
            crashes: row.crashes,
            version: 0,
        };
        match ending.action {
            Action::Publish | Action::Discard | Action::Free => {}
            Action::Dead(_) | Action::Expire => {
                let dead = Dead {
                    partition,
                    destination: row.destination,
                    key: row.key,
                    reason: ending.reason.unwrap_or_default().to_owned(),
                    blocks: match ending.action {
                        Action::Dead(Blocks::Partition) => true,
                        Action::Dead(Blocks::Key) => row.key.is_some(),
                        _ => false,
                    },
                };
                self.dead.insert(seq, dead);
            }
            Action::Retry => {
                let delay_ms = ending.delay_ms.unwrap_or_default();
                waiting.due_ms = now_ms + delay_ms.unsigned_abs();
                waiting.why = Why::BacksOff;
                waiting.attempts += i32::from(delay_ms >= 0);
                self.insert_waiting(seq, waiting);
            }
            Action::Wait => self.insert_waiting(seq, waiting),
        }
    }

    pub fn insert_waiting(&mut self, seq: i64, mut waiting: Waiting) {
        self.versions += 1;
        waiting.version = self.versions;
        match (waiting.why, waiting.key) {
            (Why::Behind, Some(key)) => {
                let of = (waiting.partition, waiting.destination, key);
                self.behind.entry(of).or_default().insert(seq);
            }
            _ => {
                self.due.insert((waiting.due_ms, seq));
            }
        }
        self.waiting.insert(seq, waiting);
    }

    fn remove_waiting(&mut self, seq: i64) -> Option<Waiting> {
        let was = self.waiting.remove(&seq)?;
        self.due.remove(&(was.due_ms, seq));
        if let (Why::Behind, Some(key)) = (was.why, was.key) {
            let of = (was.partition, was.destination, key);
            if let Some(behind) = self.behind.get_mut(&of) {
                behind.remove(&seq);
                if behind.is_empty() {
                    self.behind.remove(&of);
                }
            }
        }
        Some(was)
    }

    // ---- by hand ----------------------------------------------------------------------------------------------------

    fn claim_is_live(&self, partition: u16, row: &Row, now_ms: u64) -> bool {
        let lease = &self.leases[usize::from(partition)];
        row.token == Some(lease.epoch) && lease.until_ms > now_ms
    }

    fn find(&self, seq: i64) -> Option<(u16, &Row)> {
        let mut lanes = self.outbox.iter().zip(0..);
        lanes.find_map(|(lane, partition)| Some((partition, lane.get(&seq)?)))
    }

    /// None: nothing was done. Otherwise whether a lane is to be read again from there.
    pub fn retry(&mut self, seq: i64, now_ms: u64) -> Option<Option<u16>> {
        let risen = self.dead.remove(&seq);
        if self.waiting.get(&seq).is_some_and(|waiting| waiting.why != Why::Behind)
            && let Some(mut waiting) = self.remove_waiting(seq)
        {
            waiting.due_ms = now_ms;
            (waiting.attempts, waiting.crashes) = (0, 0);
            self.insert_waiting(seq, waiting);
            return Some(None);
        }
        if let Some((partition, row)) = self.find(seq)
            && !self.claim_is_live(partition, row, now_ms)
        {
            return Some(Some(partition));
        }
        let risen = risen?;
        if self.waiting.contains_key(&seq) || self.find(seq).is_some() {
            return Some(None);
        }
        self.insert_ready(risen.partition, seq, Row::new(risen.destination, risen.key));
        Some(Some(risen.partition))
    }

    /// A session updates a ready row, and changes nothing.
    pub fn touch(&mut self, lane: usize, seq: Option<i64>) {
        if let Some(seq) = seq
            && let Some(row) = self.outbox[lane].remove(&seq)
        {
            self.insert_ready(lane as u16, seq, row);
        }
    }

    /// Returns false if it is in flight, or gone.
    pub fn discard(&mut self, seq: i64, now_ms: u64) -> bool {
        let ready = match self.find(seq) {
            Some((partition, row)) if self.claim_is_live(partition, row, now_ms) => return false,
            found => found.map(|(partition, _)| partition),
        };
        if let Some(partition) = ready {
            self.outbox[usize::from(partition)].remove(&seq);
        }
        let (waited, died) = (self.remove_waiting(seq), self.dead.remove(&seq));
        ready.is_some() || waited.is_some() || died.is_some()
    }
}
