//! What a worker claims, and in which order it reads. The worker calls it on its main thread in each pass.
//!
//! What a claim may bring. A pass, in this order, (a) takes from where a lane must be read again, because a transaction
//! committed there; (b) claims, in a new snapshot, rows past the cursor of the lane; (c) reads which transactions are
//! open, and for which keys; and (d) checks whether a transaction committed since (a). A transaction announces a key
//! before it draws a seq for it, and publishes its lowest seq before it leaves the list of open ones. So a transaction
//! with a lower seq than a claimed row is visible in the snapshot; or is open at (c) and holds the later rows of its
//! keys; or shows at (d) and holds all later rows for one pass. tests/model_cursor.rs has a model of this.

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

/// How often the lanes are read from their start, in ms: finds rows without a notification.
const SWEEP_EVERY_MS: u64 = 30_000;
/// How often `outbox_waiting` is read for due messages, at least, in ms.
pub(super) const DUE_EVERY_MS: u64 = 1_000;

impl<P: Clone> Engine<P> {
    /// Claims up to `limit` rows, from lanes and from messages behind others, and makes ready those that may be sent.
    /// `make` turns a message into its publication, or says why it cannot be sent. Only published messages may be
    /// unsettled at this point.
    pub fn claim<S: Store<RowId = P>>(
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
            self.full = true; // again at once, when that is settled
            return Ok(0);
        }
        self.bring_due(store, memory, now_ms, &leases)?;
        let (room, limit) = (limit, self.appetite.of(limit));
        if self.sharing == Sharing::RowClaims {
            let batch = store.claim_unleased(limit)?;
            self.appetite.note(&batch);
            self.full = batch.rows.len() as u32 >= limit || batch.cut;
            let count = batch.rows.len();
            for claimed in batch.rows {
                let handle = self.take_in(claimed, rules, &mut make);
                self.go([handle], rules);
            }
            return Ok(count);
        }
        self.read_blocked_keys(store, now_ms, &leases, rules)?;
        for (partition, seq) in self.fast_in_flight.lasting(now_ms) {
            self.cursors.lower(partition, seq);
        }
        self.bound_lanes(rules);

        memory.notice_prepared();
        for (partition, _) in &leases {
            if let Some(low) = memory.take_rewind(*partition) {
                self.cursors.lower(*partition, low); // (a)
            }
        }
        // A lane that was read to its end has no new rows until a session publishes a rewind.
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
        self.appetite.note(&batch);
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
                break; // the first of each partition
            }
            match rules.ordering {
                Ordering::Partition => self.release(evicted, "it waits for an open transaction"),
                _ => (evicted.into_iter()).for_each(|handle| self.unsettle(handle, Disposition::Wait)),
            }
        }
        self.bound_lanes(rules);
        Ok(count)
    }

    /// Whether the bodies of messages parked for an open transaction exceed their limit.
    fn parks_too_much(&self) -> bool {
        if self.key_order.parked() == 0 {
            return false;
        }
        let of = |message: &Message<P>| message.body_bytes;
        let ready: usize = self.ready.iter().filter_map(|h| self.messages.get(h)).map(of).sum();
        let all: usize = self.messages.values().map(of).sum();
        all.saturating_sub(ready + self.with_publisher.bytes) > self.bounds.bytes
    }

    fn bring_due<S: Store<RowId = P>>(
        &mut self,
        store: &mut S,
        memory: &impl Memory,
        now_ms: u64,
        leases: &[Held],
    ) -> Result<(), S::Error> {
        let changes = memory.waiting_changes();
        if !self.progress.brings_due() || (now_ms < self.due_at_ms && changes == self.waiting_changes) {
            return Ok(());
        }
        let leased = (self.sharing == Sharing::Leases).then_some(leases);
        let (moved, next_ms) = store.bring_due(leased)?;
        self.progress.brought = true;
        // Due messages that it did not bring belong to another worker.
        let next_ms = next_ms.filter(|ms| *ms > 0 || !moved.is_empty());
        for (partition, seq) in moved {
            self.cursors.lower(partition, seq);
        }
        self.due_at_ms = now_ms + next_ms.unwrap_or(DUE_EVERY_MS).clamp(1, DUE_EVERY_MS);
        if changes != self.waiting_changes {
            self.sweep_at_ms = now_ms; // a person may have unblocked a key
            self.waiting_changes = changes;
        }
        Ok(())
    }

    /// Reads the blocked keys, and lets the lanes be read from their start: new ones now, all from time to time.
    fn read_blocked_keys<S: Store<RowId = P>>(
        &mut self,
        store: &mut S,
        now_ms: u64,
        leases: &[Held],
        rules: &Rules,
    ) -> Result<(), S::Error> {
        let sweep = now_ms >= self.sweep_at_ms;
        let anew: Vec<Partition> = (leases.iter().map(|(partition, _)| *partition))
            .filter(|partition| sweep || self.fresh.contains(partition))
            .collect();
        if anew.is_empty() {
            return Ok(());
        }
        let mut found = store.blocked_keys(&anew)?;
        let scope: HashSet<Partition> = anew.iter().copied().collect();
        let gone = self.find_blockers(&found, &scope, rules);
        found.retain(|found| found.key.key.is_some());
        if rules.ordering != Ordering::Key {
            // No key is blocked; messages that wait by their key, from before the partition was one order, come back.
            found.retain(|found| found.followers);
            found.iter_mut().for_each(|found| found.blocker = None);
        }
        let cursors = &self.cursors;
        let undecided = self.key_order.rebuild(
            |partition| scope.contains(&partition),
            found,
            |partition, seq| cursors.cover(partition, seq),
        );
        for partition in anew {
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

    /// Bounds the lanes by the messages kept in memory. Called around a claim.
    fn bound_lanes(&mut self, rules: &Rules) {
        self.lanes.bounds = match rules.ordering {
            Ordering::Partition => self.key_order.bounds(),
            Ordering::Key | Ordering::None => HashMap::new(),
        };
    }

    /// Takes over what the tables say of the lanes that were read. Returns whether there is a blocking message that may
    /// be in flight or gone: then the tables must be read again. A message in flight keeps its lane blocked.
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

    /// A lane that returned all its rows is read to its end, or as far as it may be; later commits there publish a
    /// rewind. Any other lane is read up to its last row.
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
                () if batch.missed => lane.cursor, // it may lie between those that came
                () if full || batch.cut => last,
                () => lane.read_limit,
            };
            self.cursors.raise(lane.partition, read);
        }
    }

    /// Fetches messages behind others that may be sent now, up to `room` rows.
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
                self.drains = true; // the others come with the next claim
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
            self.appetite.note(&batch);
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
