//! What a worker claims, and the order in which it reads. Called by the worker's main thread in each pass.
//!
//! Order. A pass takes these steps, in this order:
//!
//! - (a) takes the rewind of each lane: the lowest seq committed there since the last time
//!   (crates/worker/src/worker/deliver.rs does, and tells all engines that share it);
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
use super::due::DUE_EVERY_MS;
use super::ports::{Memory, StatementTimeout, Tables};
use super::rows::{ClaimLimits, HeldLease, Lane, claimable};
use super::under_way::ClaimedMessage;
use super::{Engine, Sharing};
use crate::budget;
use crate::key_order::{BlockedKey, DrainingKey, MessageHandle, OrderedKey};
use crate::message::{Event, Pointer, Publication};
use crate::open_transactions::{OpenTransaction, OpenTransactions};
use crate::partition::Partition;
use crate::settle::{Disposition, Ordering, Rules};
use std::collections::{HashMap, HashSet};

/// How long lanes are claimed one by one, in ms, after rows of one were locked.
const LANE_BY_LANE_MS: u64 = 5_000;
/// About this number of blocked keys is read with a claim for a sweep.
pub(super) const SWEPT_KEYS: usize = 1_000;

/// The result of a claim.
#[derive(Debug)]
pub struct ClaimResult<E> {
    /// The number of new messages of the lanes.
    pub messages: usize,
    /// Whether rows of a lane were locked, so that lanes are claimed one by one for a while.
    pub found_locked: bool,
    /// A failure after some messages were claimed. They are delivered all the same.
    pub failure: Option<E>,
}

impl<E> Default for ClaimResult<E> {
    fn default() -> Self {
        Self {
            messages: 0,
            found_locked: false,
            failure: None,
        }
    }
}

impl Engine {
    /// Claims up to `limit` rows from the lanes, and further rows of draining keys from `outbox_waiting`. Makes those
    /// ready that may be sent. `make` turns a message into what is sent, or returns why it cannot. No unsettled message
    /// may have a disposition other than Publish. The worker has taken the rewinds before (a).
    pub fn claim<T: Tables>(
        &mut self,
        tables: &T,
        memory: &impl Memory<Error = T::Error>,
        now_ms: u64,
        limit: u32,
        rules: &Rules,
        make: impl FnMut(MessageHandle, &Pointer, Event) -> Result<Publication, String>,
    ) -> Result<ClaimResult<T::Error>, T::Error> {
        let result = self.claim_rows(tables, memory, now_ms, limit, rules, make)?;
        self.send_next_yielding();
        Ok(result)
    }

    fn claim_rows<T: Tables>(
        &mut self,
        tables: &T,
        memory: &impl Memory<Error = T::Error>,
        now_ms: u64,
        limit: u32,
        rules: &Rules,
        mut make: impl FnMut(MessageHandle, &Pointer, Event) -> Result<Publication, String>,
    ) -> Result<ClaimResult<T::Error>, T::Error> {
        self.claims += 1;
        self.may_have_crashed &= !self.messages.is_empty();
        if self.has_poison_candidates(1) {
            return Ok(ClaimResult::default());
        }
        if self.has_ended_fast() {
            self.full = true; // claim again immediately, after the settle
            return Ok(ClaimResult::default());
        }
        let room = ClaimLimits {
            rows: limit,
            bytes: self.room_in_memory(now_ms).clamp(1, CLAIM_BYTES_MAX),
        };
        match self.sharing {
            Sharing::Leases => self.claim_leased(tables, memory, now_ms, room, rules, &mut make),
            Sharing::RowClaims => self.claim_unleased(tables, room, rules, &mut make),
        }
    }

    /// Claims rows of any partition, one by one.
    fn claim_unleased<T: Tables>(
        &mut self,
        tables: &T,
        room: ClaimLimits,
        rules: &Rules,
        make: &mut impl FnMut(MessageHandle, &Pointer, Event) -> Result<Publication, String>,
    ) -> Result<ClaimResult<T::Error>, T::Error> {
        let rows = self.row_limit.of(room);
        let limits = ClaimLimits { rows, ..room };
        let batch = tables.claim_unleased(&self.destination, limits)?;
        self.row_limit.record(&batch, limits);
        self.full = batch.rows.len() as u32 >= rows || batch.cut;
        let messages = batch.rows.len();
        for claimed in batch.rows {
            let handle = self.take_in(claimed, rules, make);
            self.make_ready([handle], rules);
        }
        Ok(ClaimResult {
            messages,
            ..ClaimResult::default()
        })
    }

    /// Claims from the lanes of the leased partitions, in the order above.
    fn claim_leased<T: Tables>(
        &mut self,
        tables: &T,
        memory: &impl Memory<Error = T::Error>,
        now_ms: u64,
        room: ClaimLimits,
        rules: &Rules,
        make: &mut impl FnMut(MessageHandle, &Pointer, Event) -> Result<Publication, String>,
    ) -> Result<ClaimResult<T::Error>, T::Error> {
        let mut result = ClaimResult::default();
        let leases = claimable(&self.leases, &self.leaving);
        self.update_lanes(tables, now_ms, &leases, rules)?;
        // A lane that was read to its end has no new rows until a rewind announces them.
        let unread: Vec<HeldLease> = (leases.iter())
            .filter(|(partition, _)| self.cursor(*partition) < self.read_limit(*partition))
            .copied()
            .collect();
        let draining = self.key_order.draining();
        if unread.is_empty() && self.key_order.parked() == 0 && draining.is_empty() {
            (self.full, self.drains) = (false, false);
            return Ok(result);
        }
        let rows = self.row_limit.of(room);
        let limits = ClaimLimits {
            rows: rows - self.reserved_for_draining(rows, &draining),
            ..room
        };
        let lanes = self.lanes(&unread, limits.rows, rules);
        let mut batch = match lanes.as_slice() {
            [] => Batch::default(),
            lanes => self.claim_lanes(tables, lanes, limits, now_ms, &mut result)?, // (b)
        };
        self.row_limit.record(&batch, limits);
        self.advance_cursors(&lanes, &batch);
        batch.rows = self.recognise(batch.rows);
        let left = ClaimLimits {
            rows: room.rows.saturating_sub(batch.rows.len() as u32),
            bytes: room.bytes.saturating_sub(batch.body_bytes()),
        };
        let claimed: Vec<(Partition, i64)> = batch.rows.iter().map(|row| row.pointer.which()).collect();
        memory.withdraw(&self.destination, &claimed);
        let open = memory.open_transactions(); // (c)
        let open_transactions = OpenTransactions {
            all: batch.missed,
            open: open.unwrap_or_else(|failure| {
                result.failure.get_or_insert(failure);
                vec![OpenTransaction::holds_everything()]
            }),
            rewinds: self.peek_rewinds(memory, &leases), // (d)
        };
        result.messages = batch.rows.len();
        let is_read = |partition: &Partition| self.cursor(*partition) >= self.read_limit(*partition);
        self.full = (unread.iter()).any(|(partition, _)| !is_read(partition) && !batch.locked.contains(partition));
        self.admit(batch, rules, &open_transactions, make);
        self.unpark(&open_transactions, rules);
        let drained = self.drain(tables, &leases, &open_transactions, left, rules, make);
        result.failure = result.failure.or(drained.err());
        while (self.key_order.parked() > self.bounds.parked || self.parks_too_much()) && self.evict(rules) {}
        self.bound_lanes(rules);
        Ok(result)
    }

    /// Before a claim: what was committed, retried or unblocked since the last one sets from and up to where each lane
    /// is read.
    fn update_lanes<T: Tables>(
        &mut self,
        tables: &T,
        now_ms: u64,
        leases: &[HeldLease],
        rules: &Rules,
    ) -> Result<(), T::Error> {
        for (partition, seq) in std::mem::take(&mut self.rewinds) {
            self.cursors.lower(partition, seq);
        }
        self.read_blocked_keys(tables, now_ms, leases, rules)?;
        for (partition, seq) in self.fast_in_flight.take_overdue(now_ms) {
            self.cursors.lower(partition, seq);
        }
        self.bound_keys(rules);
        self.bound_lanes(rules);
        Ok(())
    }

    /// How many of these rows are left to draining keys.
    fn reserved_for_draining(&self, rows: u32, draining: &[DrainingKey]) -> u32 {
        let wanted = (draining.iter().take(self.bounds.drains))
            .map(|key| key.room.min(self.bounds.drain_rows as usize))
            .fold(0, usize::saturating_add);
        budget::reserved_for_followers(rows, u32::try_from(wanted).unwrap_or(u32::MAX), self.claims)
    }

    /// The lanes of a claim, with their shares of its rows.
    fn lanes(&self, unread: &[HeldLease], rows: u32, rules: &Rules) -> Vec<Lane> {
        let saturated: Vec<bool> = unread.iter().map(|(p, _)| self.saturated.contains(p)).collect();
        // A lane that is one order is read as far as its messages can go soon.
        let most = match rules.ordering {
            Ordering::Partition if rules.one_by_one => (self.bounds.of_a_key / 2) as u32,
            _ => u32::MAX,
        };
        // By hand messages go in stored order over all lanes, so a lane may fill the claim.
        let by_hand = self.progress.read_limit < END;
        (unread.iter().zip(budget::shares(rows, &saturated, self.claims)))
            .map(|((partition, epoch), share)| Lane {
                partition: *partition,
                epoch: *epoch,
                cursor: self.cursor(*partition),
                read_limit: self.read_limit(*partition),
                limit: if by_hand { rows } else { share }.min(most),
            })
            .collect()
    }

    /// Lets parked messages go that no open transaction holds any more.
    fn unpark(&mut self, open_transactions: &OpenTransactions, rules: &Rules) {
        let cursors = &self.cursors;
        let unparked = self
            .key_order
            .unpark(|key, seq| !open_transactions.hold_back(key, seq) && cursors.cover(key.partition, seq));
        self.make_ready(unparked, rules);
    }

    /// Whether a message of this key goes to `outbox_waiting` with the next settle.
    fn is_about_to_wait(&self, key: &OrderedKey) -> bool {
        let mut waits = (self.unsettled.iter()).filter(|ended| ended.disposition == Disposition::Wait);
        waits.any(|ended| ended.pointer.partition == key.partition && ended.pointer.key == key.key)
    }

    /// Sets how many messages of a key may be in flight.
    pub(super) fn bound_keys(&mut self, rules: &Rules) {
        let most = match self.outstanding() < self.bounds.window / 2 {
            _ if !rules.one_by_one => usize::MAX,
            true => self.bounds.of_a_key,
            false => self.bounds.of_a_key / 8,
        };
        self.key_order.set_most_of_a_key(most.max(2));
    }

    /// Gives up the parked messages of a key. Returns whether there were any: the first one of each partition stays.
    pub(super) fn evict(&mut self, rules: &Rules) -> bool {
        let evicted = self.key_order.evict();
        let has_evicted = !evicted.is_empty();
        match rules.ordering {
            Ordering::Partition => self.release(evicted, "it waits for an open transaction"),
            _ => (evicted.into_iter()).for_each(|handle| self.queue_settle(handle, Disposition::Wait)),
        }
        has_evicted
    }

    /// Claims the lanes in one statement. If rows of a lane are locked by a session or a worker that hangs, or the
    /// lanes have different read limits because messages of some have failed, it claims them one by one, and the others
    /// go on.
    fn claim_lanes<T: Tables>(
        &mut self,
        tables: &T,
        lanes: &[Lane],
        limits: ClaimLimits,
        now_ms: u64,
        result: &mut ClaimResult<T::Error>,
    ) -> Result<Batch, T::Error> {
        let share_read_limit = lanes.windows(2).all(|two| two[0].read_limit == two[1].read_limit);
        let mut all = Batch::default();
        if self.lock_timeout(now_ms) == StatementTimeout::Usual && share_read_limit {
            match tables.claim(&self.destination, lanes, limits, StatementTimeout::Usual) {
                Err(failure) if T::is_locked(&failure) => self.found_locked(now_ms, result),
                claimed => return Ok(claimed?.of(lanes)),
            }
        }
        for (index, lane) in lanes.iter().enumerate() {
            if all.body_bytes() >= limits.bytes {
                all.cut = true; // the next claim reads the other lanes
                break;
            }
            let lane_alone = std::slice::from_ref(lane);
            match tables.claim(&self.destination, lane_alone, limits, self.lock_timeout(now_ms)) {
                Ok(batch) => all.add(batch.of(lane_alone)),
                Err(failure) if T::is_locked(&failure) => {
                    self.found_locked(now_ms, result);
                    all.locked.push(lane.partition);
                }
                // The lanes before it are claimed and committed, so they go on in spite of this failure.
                Err(failure) => {
                    all.locked.extend(lanes[index..].iter().map(|lane| lane.partition));
                    result.failure = Some(failure);
                    break;
                }
            }
        }
        all.rows.sort_by_key(|claimed| claimed.pointer.seq);
        Ok(all)
    }

    fn lock_timeout(&self, now_ms: u64) -> StatementTimeout {
        match now_ms < self.lane_by_lane_until_ms {
            true => StatementTimeout::Short,
            false => StatementTimeout::Usual,
        }
    }

    fn found_locked<E>(&mut self, now_ms: u64, result: &mut ClaimResult<E>) {
        if now_ms >= self.lane_by_lane_until_ms {
            self.lane_by_lane_until_ms = now_ms + LANE_BY_LANE_MS;
            result.found_locked = true;
        }
    }

    /// Lets the next claim read a lane again from `seq` on, because a row was committed there.
    pub fn rewind(&mut self, partition: Partition, seq: i64) {
        if self.sharing == Sharing::RowClaims {
            return; // each claim reads all lanes
        }
        lower(&mut self.rewinds, partition, seq);
    }

    /// The lowest seq of each lane that was committed since this engine last read the lane.
    pub(super) fn peek_rewinds(&self, memory: &impl Memory, leases: &[HeldLease]) -> HashMap<Partition, i64> {
        let mut rewinds = self.rewinds.clone();
        for (partition, seq) in memory.peek_rewinds(&self.destination, leases) {
            lower(&mut rewinds, partition, seq);
        }
        rewinds
    }

    /// Whether parked messages take more than [`Bounds::bytes`](super::Bounds::bytes) together.
    fn parks_too_much(&self) -> bool {
        if self.key_order.parked() == 0 {
            return false;
        }
        let of = |message: &ClaimedMessage| message.memory.bytes();
        let ready: usize = self.ready.iter().filter_map(|h| self.messages.get(h)).map(of).sum();
        let all: usize = self.messages.values().map(of).sum();
        all.saturating_sub(ready + self.with_publisher.bytes) > self.bounds.bytes
    }

    /// Whether all that is known to be in the lanes has been read, so that a claim would find nothing.
    pub fn has_read_all(&self, now_ms: u64) -> bool {
        let has_news = !self.rewinds.is_empty() || !self.fresh.is_empty() || !self.unblocked.is_empty();
        !self.wants_more() && !has_news && self.swept.is_empty() && now_ms < self.reread_at_ms
    }

    /// A message from `seq` on that blocked others of its key may be gone. Returns whether that matters here: then the
    /// next claim reads the blocked keys of the partition.
    pub fn unblock(&mut self, partition: Partition, seq: i64) -> bool {
        let matters = self.key_order.has_blocker(partition, seq) || self.read_limits.has_blocker(partition, seq);
        if matters {
            self.unblocked.insert(partition);
        }
        matters
    }

    /// The tables have no message of this destination, as of a time after the rewinds were taken. Returns false if that
    /// is not all that there is to know.
    pub fn found_none(&mut self) -> bool {
        let knows_of_none = self.outstanding() == 0 && self.key_order.keys() == 0 && self.read_limits.is_empty();
        if knows_of_none {
            for (partition, _) in &self.leases {
                self.cursors.raise(*partition, END);
            }
            self.fresh.clear();
            self.unblocked.clear();
            self.swept.clear();
            self.rewinds.clear();
            (self.full, self.drains, self.reread_at_ms) = (false, false, u64::MAX);
        }
        knows_of_none
    }

    /// Whether a message may wait because the destination failed: it was put off, and has not been due for a while yet.
    pub fn has_put_off(&self, now_ms: u64) -> bool {
        now_ms < self.put_off_until_ms
    }

    /// Reads the blocked keys of newly leased partitions, of those where a blocker may be gone, of some that a sweep is to
    /// read, and of all partitions if `reread_all` was called. The lanes of these partitions are then read from the start.
    fn read_blocked_keys<T: Tables>(
        &mut self,
        tables: &T,
        now_ms: u64,
        leases: &[HeldLease],
        rules: &Rules,
    ) -> Result<(), T::Error> {
        let all = now_ms >= self.reread_at_ms;
        // What a claim reads for a sweep does not grow with the keys that are blocked, unless they are in one partition.
        let mut sweeps = (leases.len() * SWEPT_KEYS / self.key_order.keys().max(1)).max(1);
        let to_read: Vec<Partition> = (leases.iter().map(|(partition, _)| *partition))
            .filter(|partition| {
                let is_swept = self.swept.contains(partition) && sweeps > 0;
                sweeps -= usize::from(is_swept);
                all || is_swept || self.fresh.contains(partition) || self.unblocked.contains(partition)
            })
            .collect();
        if to_read.is_empty() {
            return Ok(());
        }
        let mut found = tables.blocked_keys(&self.destination, &to_read)?;
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
            self.unblocked.remove(&partition);
            self.swept.remove(&partition);
            self.cursors.restart(partition);
        }
        if all {
            self.reread_at_ms = u64::MAX;
        }
        if undecided || gone {
            self.reread_at_ms = self.reread_at_ms.min(now_ms + DUE_EVERY_MS);
        }
        Ok(())
    }

    /// Sets the bounds of the lanes from the parked messages. Called before and after a claim.
    fn bound_lanes(&mut self, rules: &Rules) {
        self.read_limits.bounds = match rules.ordering {
            Ordering::Partition => self.key_order.bounds(),
            Ordering::Key | Ordering::None => HashMap::new(),
        };
    }

    /// Takes over the blockers `found` in the tables. Returns whether a known blocker may be on its way back to
    /// `outbox` or gone, so that the tables must be read again. A blocker that is on its way still blocks its lane.
    fn find_blockers(&mut self, found: &[BlockedKey], scope: &HashSet<Partition>, rules: &Rules) -> bool {
        if rules.ordering != Ordering::Partition {
            self.read_limits.free_all();
            return false;
        }
        self.key_order.forget_keys();
        let (messages, cursors) = (&self.messages, &self.cursors);
        self.read_limits.find_blockers(
            found,
            |partition| scope.contains(&partition),
            |partition, seq| (messages.values()).any(|m| m.pointer.seq == seq && m.pointer.partition == partition),
            |partition, seq| cursors.of(partition) < seq,
        )
    }

    /// Raises the cursors after a claim. A lane that returned fewer rows than its limit has been read up to its read
    /// limit: a rewind announces later commits. Any other lane has been read up to its last row.
    fn advance_cursors(&mut self, lanes: &[Lane], batch: &Batch) {
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

    /// Fetches messages of draining keys from `outbox_waiting`, within `room`.
    fn drain<T: Tables>(
        &mut self,
        tables: &T,
        leases: &[HeldLease],
        open_transactions: &OpenTransactions,
        mut room: ClaimLimits,
        rules: &Rules,
        make: &mut impl FnMut(MessageHandle, &Pointer, Event) -> Result<Publication, String>,
    ) -> Result<(), T::Error> {
        let draining = self.key_order.draining();
        self.drains = false;
        let first = (self.claims as usize).checked_rem(draining.len()).unwrap_or(0);
        for DrainingKey {
            key,
            first: first_of_key,
            room: of_key,
        } in draining
            .iter()
            .cycle()
            .skip(first)
            .take(draining.len().min(self.bounds.drains))
        {
            if room.bytes == 0 {
                self.drains = true; // the next claim fetches the other keys
                break;
            }
            let Some((_, epoch)) = leases.iter().find(|(partition, _)| *partition == key.partition) else {
                continue;
            };
            let goes_back = rules.ordering == Ordering::Partition;
            if !goes_back && open_transactions.open(key, *first_of_key) {
                continue;
            }
            if self.is_about_to_wait(key) {
                self.drains = true; // its place is among those that would be fetched
                continue;
            }
            let read_limit = match goes_back {
                true => END,
                false => self.cursor(key.partition).min(self.progress.read_limit),
            };
            let of_key = u32::try_from(*of_key).unwrap_or(u32::MAX);
            let rows = self.bounds.drain_rows.min(room.rows).min(of_key);
            if rows == 0 {
                self.drains = true;
                break;
            }
            let limits = ClaimLimits { rows, ..room };
            let rows = self.row_limit.of(limits);
            let limits = ClaimLimits { rows, ..limits };
            let (batch, more) = tables.claim_waiting(key, *epoch, read_limit, limits)?;
            self.row_limit.record(&batch, limits);
            room.bytes = room.bytes.saturating_sub(batch.body_bytes());
            room.rows = room.rows.saturating_sub(batch.rows.len() as u32);
            let full = batch.cut || batch.rows.len() as u32 >= rows;
            let missed = batch.missed;
            self.drains |= batch.cut || (full && rows < of_key) || draining.len() > self.bounds.drains;
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
            let unparked = self.key_order.drained(key, &rows, full, more, |seq| {
                !missed && seq <= read_limit && !open_transactions.hold_back(key, seq)
            });
            self.make_ready(unparked, rules);
        }
        Ok(())
    }
}

fn lower(rewinds: &mut HashMap<Partition, i64>, partition: Partition, seq: i64) {
    let low = rewinds.entry(partition).or_insert(seq);
    *low = seq.min(*low);
}
