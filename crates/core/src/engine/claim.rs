//! What a worker claims, and the order in which it reads. Called by the worker's main thread in each pass.
//!
//! Order. A pass takes these steps, in this order:
//!
//! - (a) takes the rewind of each lane: the lowest seq committed there since the last time;
//! - (b) claims, in a new snapshot, rows past the cursor of each lane;
//! - (c) reads which transactions are open, and for which keys;
//! - (d) reads, without taking it, what was committed since (a).
//!
//! A transaction announces a key before it draws a seq for it. It records the rewind of its commit before it leaves the
//! registry of open transactions. Consider a transaction that has drawn a lower seq than a claimed row. One of these is
//! true:
//!
//! - the snapshot sees its rows;
//! - it is open at (c), and holds back the later rows of its keys;
//! - its commit appears at (d), and holds back all later rows of the lane for one pass.
//!
//! tests/model_cursor.rs models this.

use super::batch::{Batch, CLAIM_BYTES_MAX};
use super::cursors::{END, START};
use super::ports::{Memory, Store};
use super::rows::{Claimed, Held, Lane};
use super::under_way::Message;
use super::{Engine, Sharing};
use crate::budget;
use crate::key_order::{Found, Handle};
use crate::message::{Event, Pointer, Publication};
use crate::open_transactions::OpenTransactions;
use crate::partition::Partition;
use crate::settle::{Disposition, Ordering, Rules};
use std::collections::{HashMap, HashSet};

/// The interval, in ms, at which all lanes are read from their start. It finds rows that no rewind announced.
const SWEEP_EVERY_MS: u64 = 30_000;
/// The longest interval, in ms, between two reads of `outbox_waiting` for due messages.
pub(super) const DUE_EVERY_MS: u64 = 1_000;

impl<P: Clone> Engine<P> {
    /// Claims up to `limit` rows from the lanes, and further rows of draining keys from `outbox_waiting`. Makes those
    /// ready that may be sent. `make` turns a message into what is sent, or returns why it cannot. No unsettled message
    /// may have a disposition other than Publish. Returns how many new messages the lanes had.
    pub fn claim<S: Store<RowId = P>>(
        &mut self,
        store: &mut S,
        memory: &impl Memory,
        now_ms: u64,
        limit: u32,
        rules: &Rules,
        make: impl FnMut(Handle, &Pointer, &Event) -> Result<Publication, String>,
    ) -> Result<usize, S::Error> {
        let count = self.claim_rows(store, memory, now_ms, limit, rules, make)?;
        self.take_turn();
        Ok(count)
    }

    fn claim_rows<S: Store<RowId = P>>(
        &mut self,
        store: &mut S,
        memory: &impl Memory,
        now_ms: u64,
        limit: u32,
        rules: &Rules,
        mut make: impl FnMut(Handle, &Pointer, &Event) -> Result<Publication, String>,
    ) -> Result<usize, S::Error> {
        self.claims += 1;
        let leases: Vec<Held> = (self.leases.iter())
            .filter(|(partition, _)| !self.leaving.contains(partition))
            .copied()
            .collect();
        if self.has_poison_candidates(1) {
            return Ok(0);
        }
        if self.has_ended_fast() {
            self.full = true; // claim again at once, after the settle
            return Ok(0);
        }
        self.bring_due(store, memory, now_ms, &leases)?;
        let (room, limit) = (limit, self.appetite.of(limit));
        if self.sharing == Sharing::RowClaims {
            let batch = store.claim_unleased(limit)?;
            self.appetite.record(&batch);
            self.full = batch.rows.len() as u32 >= limit || batch.cut;
            let count = batch.rows.len();
            for claimed in batch.rows {
                let handle = self.take_in(claimed, rules, &mut make);
                self.go([handle], rules);
            }
            return Ok(count);
        }
        self.read_blocked_keys(store, now_ms, &leases, rules)?;
        for (partition, seq) in self.fast_in_flight.take_overdue(now_ms) {
            self.cursors.lower(partition, seq);
        }
        self.bound_lanes(rules);

        memory.notice_prepared();
        for (partition, _) in &leases {
            if let Some(low) = memory.take_rewind(*partition) {
                self.cursors.lower(*partition, low); // (a)
            }
        }
        // A lane that was read to its end has no new rows until a rewind announces them.
        let unread: Vec<Held> = (leases.iter())
            .filter(|(partition, _)| self.cursor(*partition) < self.read_limit(*partition))
            .copied()
            .collect();
        if unread.is_empty() && self.key_order.parked() == 0 && !self.key_order.may_drain() {
            self.full = false;
            return Ok(0);
        }
        let saturated: Vec<bool> = unread.iter().map(|(p, _)| self.saturated.contains(p)).collect();
        let wanted =
            (self.key_order.draining().len().min(self.bounds.drains) as u32).saturating_mul(self.bounds.drain_rows);
        let for_lanes = limit - budget::reserved_for_followers(limit, wanted, self.claims);
        let lanes: Vec<Lane> = (unread.iter().zip(budget::shares(for_lanes, &saturated, self.claims)))
            .map(|((partition, epoch), limit)| Lane {
                partition: *partition,
                epoch: *epoch,
                cursor: self.cursor(*partition),
                read_limit: self.read_limit(*partition),
                limit,
            })
            .collect();
        let mut batch = match lanes.as_slice() {
            [] => Batch::default(),
            lanes => store.claim(lanes)?, // (b)
        };
        self.appetite.record(&batch);
        self.advance_cursors(&lanes, &batch);
        batch.rows = self.recognise(batch.rows);
        let left = room.saturating_sub(batch.rows.len() as u32);
        memory.revoke(&batch.rows.iter().map(Claimed::which).collect::<Vec<_>>());
        let open_transactions = OpenTransactions {
            all: batch.missed,
            open: memory.open_transactions(), // (c)
            rewinds: (leases.iter())
                .filter_map(|(partition, _)| Some((*partition, memory.peek_rewind(*partition)?))) // (d)
                .collect(),
        };
        let count = batch.rows.len();
        let is_read = |partition: &Partition| self.cursor(*partition) >= self.read_limit(*partition);
        self.full = (unread.iter()).any(|(partition, _)| !is_read(partition) && !batch.locked.contains(partition));
        self.admit(batch, rules, &open_transactions, &mut make);
        let cursors = &self.cursors;
        let unparked = self
            .key_order
            .unpark(|key, seq| !open_transactions.hold_back(key, seq) && cursors.cover(key.partition, seq));
        self.go(unparked, rules);
        self.drain(store, &leases, &open_transactions, left, rules, &mut make)?;
        while self.key_order.parked() > self.bounds.parked || self.parks_too_much() {
            let evicted = self.key_order.evict();
            if evicted.is_empty() {
                break; // only the first one of each partition is left
            }
            match rules.ordering {
                Ordering::Partition => self.release(evicted, "it waits for an open transaction"),
                _ => (evicted.into_iter()).for_each(|handle| self.unsettle(handle, Disposition::Wait)),
            }
        }
        self.bound_lanes(rules);
        Ok(count)
    }

    /// Whether the bodies of parked messages are larger than [`Bounds::bytes`](super::Bounds::bytes) together.
    fn parks_too_much(&self) -> bool {
        if self.key_order.parked() == 0 {
            return false;
        }
        let of = |message: &Message<P>| message.body_bytes;
        let ready: usize = self.ready.iter().filter_map(|h| self.messages.get(h)).map(of).sum();
        let all: usize = self.messages.values().map(of).sum();
        all.saturating_sub(ready + self.with_publisher.bytes) > self.bounds.bytes
    }

    /// Whether a message may wait because the destination failed: it was put off, and has not been due for a while yet.
    pub fn has_put_off(&self, now_ms: u64) -> bool {
        now_ms < self.put_off_until_ms
    }

    /// Brings due messages from `outbox_waiting` back to `outbox`, and rewinds their lanes.
    fn bring_due<S: Store<RowId = P>>(
        &mut self,
        store: &mut S,
        memory: &impl Memory,
        now_ms: u64,
        leases: &[Held],
    ) -> Result<(), S::Error> {
        let (schedules, unblocks) = (memory.schedules(), memory.unblocks());
        let is_changed = (schedules, unblocks) != (self.schedules, self.unblocks);
        if !self.progress.brings_due() || (now_ms < self.due_at_ms && !is_changed) {
            return Ok(());
        }
        let leased = (self.sharing == Sharing::Leases).then_some(leases);
        let (moved, next_ms) = store.bring_due(leased)?;
        self.progress.brought = true;
        // A message that is due and was not brought back belongs to another worker.
        let next_ms = next_ms.filter(|ms| *ms > 0 || !moved.is_empty());
        for (partition, seq) in moved {
            self.cursors.lower(partition, seq);
        }
        self.due_at_ms = now_ms + next_ms.unwrap_or(DUE_EVERY_MS).clamp(1, DUE_EVERY_MS);
        if unblocks != self.unblocks {
            self.sweep_at_ms = now_ms;
        }
        (self.schedules, self.unblocks) = (schedules, unblocks);
        Ok(())
    }

    /// Reads the blocked keys of newly leased partitions, and of all partitions at each sweep. The lanes of these
    /// partitions are then read from the start.
    fn read_blocked_keys<S: Store<RowId = P>>(
        &mut self,
        store: &mut S,
        now_ms: u64,
        leases: &[Held],
        rules: &Rules,
    ) -> Result<(), S::Error> {
        let sweep = now_ms >= self.sweep_at_ms;
        let to_read: Vec<Partition> = (leases.iter().map(|(partition, _)| *partition))
            .filter(|partition| sweep || self.fresh.contains(partition))
            .collect();
        if to_read.is_empty() {
            return Ok(());
        }
        let mut found = store.blocked_keys(&to_read)?;
        let scope: HashSet<Partition> = to_read.iter().copied().collect();
        let gone = self.find_blockers(&found, &scope, rules);
        found.retain(|found| found.key.key.is_some());
        if rules.ordering != Ordering::Key {
            // No key is blocked. Messages that have waited since the ordering was by key are fetched.
            found.retain(|found| found.followers);
            found.iter_mut().for_each(|found| found.blocker = None);
        }
        let cursors = &self.cursors;
        let undecided = self.key_order.rebuild(
            |partition| scope.contains(&partition),
            found,
            |partition, seq| cursors.cover(partition, seq),
        );
        for partition in to_read {
            self.fresh.remove(&partition);
            self.cursors.restart(partition);
        }
        if sweep {
            self.sweep_at_ms = now_ms + SWEEP_EVERY_MS;
        }
        if undecided || gone {
            self.sweep_at_ms = self.sweep_at_ms.min(now_ms + DUE_EVERY_MS);
        }
        Ok(())
    }

    /// Sets the bounds of the lanes from the parked messages. Called before and after a claim.
    fn bound_lanes(&mut self, rules: &Rules) {
        self.lanes.bounds = match rules.ordering {
            Ordering::Partition => self.key_order.bounds(),
            Ordering::Key | Ordering::None => HashMap::new(),
        };
    }

    /// Takes over the blockers `found` in the tables. Returns whether a known blocker may be on its way back to
    /// `outbox` or gone, so that the tables must be read again. A blocker that is on its way still blocks its lane.
    fn find_blockers(&mut self, found: &[Found], scope: &HashSet<Partition>, rules: &Rules) -> bool {
        if rules.ordering != Ordering::Partition {
            self.lanes.free_all();
            return false;
        }
        self.key_order.forget_keys();
        let (messages, cursors) = (&self.messages, &self.cursors);
        self.lanes.find_blockers(
            found,
            |partition| scope.contains(&partition),
            |partition, seq| (messages.values()).any(|m| m.pointer.seq == seq && m.pointer.partition == partition),
            |partition, seq| cursors.of(partition) < seq,
        )
    }

    /// Raises the cursors after a claim. A lane that returned fewer rows than its limit has been read up to its read
    /// limit: a rewind announces later commits. Any other lane has been read up to its last row.
    fn advance_cursors(&mut self, lanes: &[Lane], batch: &Batch<P>) {
        let mut seen: HashMap<Partition, (u32, i64)> = HashMap::new();
        for row in &batch.rows {
            let (count, last) = seen.entry(row.pointer.partition).or_insert((0, START));
            *count += 1;
            *last = (*last).max(row.pointer.seq);
        }
        self.saturated.clear();
        for lane in lanes.iter().filter(|lane| !batch.locked.contains(&lane.partition)) {
            let (count, last) = seen.get(&lane.partition).copied().unwrap_or((0, START));
            let full = count >= lane.limit;
            if full && lane.limit > 0 {
                self.saturated.insert(lane.partition);
            }
            let read = match () {
                () if batch.missed => lane.cursor, // a missed row may be between the claimed ones
                () if full || batch.cut => last,
                () => lane.read_limit,
            };
            self.cursors.raise(lane.partition, read);
        }
    }

    /// Fetches messages of draining keys from `outbox_waiting`, up to `room` rows.
    fn drain<S: Store<RowId = P>>(
        &mut self,
        store: &mut S,
        leases: &[Held],
        open_transactions: &OpenTransactions,
        mut room: u32,
        rules: &Rules,
        make: &mut impl FnMut(Handle, &Pointer, &Event) -> Result<Publication, String>,
    ) -> Result<(), S::Error> {
        let draining = self.key_order.draining();
        self.drains = false;
        let first = (self.claims as usize).checked_rem(draining.len()).unwrap_or(0);
        let mut bytes = 0;
        for key in draining
            .iter()
            .cycle()
            .skip(first)
            .take(draining.len().min(self.bounds.drains))
        {
            if bytes >= CLAIM_BYTES_MAX {
                self.drains = true; // the next claim fetches the other keys
                break;
            }
            let Some((_, epoch)) = leases.iter().find(|(partition, _)| *partition == key.partition) else {
                continue;
            };
            let goes_back = rules.ordering == Ordering::Partition;
            if !goes_back && open_transactions.open(key, i64::MAX) {
                continue;
            }
            let read_limit = match goes_back {
                true => END,
                false => self.cursor(key.partition).min(self.progress.read_limit),
            };
            let rows = self.appetite.of(self.bounds.drain_rows.min(room));
            if rows == 0 {
                self.drains = true;
                break;
            }
            let (batch, more) = store.claim_waiting(key, *epoch, read_limit, rows)?;
            self.appetite.record(&batch);
            bytes += batch.body_bytes();
            room = room.saturating_sub(batch.rows.len() as u32);
            let full = batch.cut || batch.rows.len() as u32 >= rows;
            let missed = batch.missed;
            self.drains |= full || draining.len() > self.bounds.drains;
            if goes_back {
                self.give_back(batch.rows, "the partition is the order now");
                self.key_order.drained(key, &[], full, more, |_| false);
                continue;
            }
            let mut rows = Vec::with_capacity(batch.rows.len());
            for claimed in batch.rows {
                let seq = claimed.pointer.seq;
                rows.push((self.take_in(claimed, rules, make), seq));
            }
            let go = self.key_order.drained(key, &rows, full, more, |seq| {
                !missed && seq <= read_limit && !open_transactions.hold_back(key, seq)
            });
            self.go(go, rules);
        }
        Ok(())
    }
}
