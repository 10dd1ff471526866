//! The path of a message through one worker: claim, order, hand over, conclude, settle. Called by the worker's main thread
//! in each pass; tables, shared memory and broker are behind [`Store`], [`Memory`] and the closures it is given, so that
//! a simulation can drive it with others.
//!
//! What a claim may bring. In this order a pass (a) takes how far back a lane must be read again, because something was
//! committed there; (b) claims, in a snapshot of its own, rows past the lane's mark; (c) reads which transactions are
//! open, and for what keys; and (d) looks whether something was committed since (a). A transaction announces a key before
//! it draws a seq for it, and says what it committed before it leaves. So one that has drawn a lower seq than a claimed
//! row is seen by the snapshot, or is open at (c) and holds the later rows of its keys, or shows at (d) and holds all
//! later rows for one pass. A model of this is in tests/model_mark.rs.

mod appetite;
mod batch;
mod bounds;
mod lanes;

pub use batch::Batch;
use batch::WithPublisher;
pub use bounds::Bounds;
pub use in_hand::{Express, Place};

use crate::budget;
use crate::gate::{Admission, Found, Gates, Handle, OrderedKey};
use crate::hold::{Holds, OpenTransaction};
use crate::message::{Event, Outcome, Pointer, Publication};
use crate::partition::Partition;
use crate::settle::{Disposition, Ordering, Rules, decide};
use appetite::Appetite;
use asked::Asked;
pub use asked::{Errand, Tally};
use in_hand::InHand;
use lanes::Lanes;
use listen::Answers;
pub use listen::Listen;
use std::collections::{HashMap, HashSet, VecDeque};

/// Published messages wait so long to be settled together, in ms, unless there are many: each settle waits for the disk,
/// and what is committed meanwhile waits with it.
const SETTLE_AFTER_MS: u64 = 25;
const SETTLE_AT: usize = 500;
/// How often the lanes are read from their start, in ms: finds what no hint told of.
const SWEEP_EVERY_MS: u64 = 30_000;
/// How often `outbox_waiting` is asked for what is due, at least, in ms.
const DUE_EVERY_MS: u64 = 1_000;
/// Seqs start at 1.
const START: i64 = 0;
/// The mark of a lane that has been read to its end.
const END: i64 = i64::MAX;
/// A message that so many workers crashed with is sent alone.
pub const CRASHES_ALONE: i32 = 3;
/// And so many, it is a dead letter.
pub const CRASHES_MAX: i32 = 5;
/// Bodies that one claim brings, in bytes, before it stops; one message is always taken.
pub const CLAIM_BYTES_MAX: usize = 32 << 20;

/// A lease that is held: the partition and its epoch.
pub type Held = (Partition, i64);

/// A claimed message with its event.
#[derive(Clone, Debug)]
pub struct Claimed<P> {
    /// Where the row lies, in the words of the store.
    pub place: P,
    pub pointer: Pointer,
    /// Or what becomes of a message whose event is missing or cannot be read: Unsendable or Failed.
    pub event: Result<Event, Outcome>,
}

impl<P> Claimed<P> {
    fn which(&self) -> (Partition, i64) {
        (self.pointer.partition, self.pointer.seq)
    }
}

/// One message to settle.
#[derive(Clone, Debug)]
pub struct Settlement<P> {
    pub place: P,
    pub pointer: Pointer,
    pub disposition: Disposition,
}

/// What a claim asks for: of each lane up to `limit` rows with a seq above `mark`, and none above `reach`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lane {
    pub partition: Partition,
    pub epoch: i64,
    pub mark: i64,
    pub reach: i64,
    pub limit: u32,
}

/// Whether all lanes are to be read up to the same seq.
pub fn reach_the_same(lanes: &[Lane]) -> bool {
    lanes.windows(2).all(|two| two[0].reach == two[1].reach)
}

/// Where messages are now that were brought back, and in how many ms the next is due.
pub type Due = (Vec<(Partition, i64)>, Option<u64>);

/// The tables. Each call is a transaction of its own.
pub trait Store {
    type Place: Clone;
    type Error;
    /// Ends claimed messages; rows that are gone or no longer ours are left alone.
    fn settle(&mut self, batch: &[Settlement<Self::Place>]) -> Result<(), Self::Error>;
    /// Claims rows of leased lanes.
    fn claim(&mut self, lanes: &[Lane]) -> Result<Batch<Self::Place>, Self::Error>;
    /// Claims rows of any lane, with leasing off.
    fn claim_unleased(&mut self, limit: u32) -> Result<Batch<Self::Place>, Self::Error>;
    /// Claims the first rows of a key that wait behind another, with a seq up to `reach`. The flag: more are there.
    fn claim_waiting(
        &mut self,
        key: &OrderedKey,
        epoch: i64,
        reach: i64,
        limit: u32,
    ) -> Result<(Batch<Self::Place>, bool), Self::Error>;
    /// Brings back what is due, of these leases; None = of all partitions.
    fn bring_due(&mut self, leases: Option<&[Held]>) -> Result<Due, Self::Error>;
    /// The keys that are closed or have messages waiting behind another.
    fn gates(&mut self, partitions: &[Partition]) -> Result<Vec<Found>, Self::Error>;
}

/// What the sessions tell the workers at once.
pub trait Memory {
    /// Tells of what prepared transactions committed that are over by now: nobody else does.
    fn notice_prepared(&self);
    /// Transactions that have enqueued and are not over.
    fn open_transactions(&self) -> Vec<OpenTransaction>;
    /// The lowest seq committed in a partition since the last call, if any.
    fn take_reopen(&self, partition: Partition) -> Option<i64>;
    /// The same, left there; and the lowest seq that lies ready to be taken in hand.
    fn look_at_reopen(&self, partition: Partition) -> Option<i64>;
    /// These are claimed: what of them may lie ready by now, or soon, is not to be taken in hand.
    fn revoke(&self, _claimed: &[(Partition, i64)]) {}
    /// Grows when something was scheduled, or a person changed what waits.
    fn waiting_changes(&self) -> u32;
}

/// How partitions are shared in this database.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Sharing {
    Leases,
    /// leasing = off: row claims, no order.
    RowClaims,
}

/// A message between claim and settle.
struct Message<P> {
    place: P,
    pointer: Pointer,
    /// What goes to the wire, or why nothing can; None once handed over.
    publication: Option<Result<Publication, Outcome>>,
    /// Of what goes to the wire, also once it is handed over.
    body_bytes: usize,
    /// The gates know it: others wait for it.
    ordered: bool,
}

/// The messages of one worker.
pub struct Engine<P> {
    sharing: Sharing,
    bounds: Bounds,
    leases: Vec<Held>,
    /// Held, but wanted by another worker: no more claims.
    leaving: HashSet<Partition>,
    /// Taken since the last claim: to be read from their start, their gates first.
    fresh: HashSet<Partition>,
    /// Everything in the lane up to here has been claimed, or will be told of.
    marks: HashMap<Partition, i64>,
    gates: Gates,
    /// How far they may be read.
    lanes: Lanes,
    messages: HashMap<Handle, Message<P>>,
    /// May go, in order; not handed over yet.
    ready: VecDeque<Handle>,
    with_publisher: WithPublisher,
    /// The one that is with the publisher alone, because workers crashed with it.
    alone: Option<Handle>,
    unsettled: Vec<Settlement<P>>,
    /// When the first of the unsettled ones came; meaningless if there are none.
    unsettled_since_ms: u64,
    /// Some that are claimed may have a time at which they expire.
    may_expire: bool,
    next_handle: Handle,
    claims: u64,
    /// Partitions that filled their share of the last claim.
    hungry: HashSet<Partition>,
    full: bool,
    drains: bool,
    due_at_ms: u64,
    waiting_changes: u32,
    sweep_at_ms: u64,
    /// What a session wants to know of, and how far it lets this go.
    asked: Asked,
    in_hand: InHand,
    answers: Answers,
    appetite: Appetite,
}

impl<P: Clone> Engine<P> {
    pub fn new(sharing: Sharing) -> Self {
        Self::bounded(sharing, Bounds::USUAL)
    }

    pub fn bounded(sharing: Sharing, bounds: Bounds) -> Self {
        Self {
            sharing,
            bounds,
            leases: Vec::new(),
            leaving: HashSet::new(),
            fresh: HashSet::new(),
            marks: HashMap::new(),
            gates: Gates::default(),
            lanes: Lanes::default(),
            messages: HashMap::new(),
            ready: VecDeque::new(),
            with_publisher: WithPublisher::default(),
            appetite: Appetite::default(),
            alone: None,
            unsettled: Vec::new(),
            unsettled_since_ms: 0,
            may_expire: false,
            next_handle: 1,
            claims: 0,
            hungry: HashSet::new(),
            full: false,
            drains: false,
            due_at_ms: 0,
            waiting_changes: 0,
            sweep_at_ms: 0,
            asked: Asked::default(),
            in_hand: InHand::default(),
            answers: Answers::default(),
        }
    }

    // ---- what the worker asks ---------------------------------------------------------------------------------------

    pub fn sharing(&self) -> Sharing {
        self.sharing
    }

    /// Messages claimed and not settled.
    pub fn outstanding(&self) -> usize {
        self.messages.len() + self.unsettled.len()
    }

    /// Of these, what its destination has to do with: not what waits for an open transaction.
    pub fn outstanding_there(&self) -> usize {
        self.outstanding().saturating_sub(self.gates.parked())
    }

    /// A message that is claimed and has no outcome yet.
    pub fn pointer(&self, handle: Handle) -> Option<&Pointer> {
        self.messages.get(&handle).map(|message| &message.pointer)
    }

    /// Whether messages are kept back, and none is with the publisher any more.
    pub fn only_keeps_back(&self) -> bool {
        self.with_publisher.count == 0 && !self.messages.is_empty()
    }

    /// Whether the bodies that are with the publisher leave room for those of another claim.
    pub fn has_room_in_bytes(&self) -> bool {
        self.with_publisher.bytes < self.bounds.bytes
    }

    /// Messages that may go and wait for room with the publisher.
    pub fn is_ready_empty(&self) -> bool {
        self.ready.is_empty()
    }

    /// The last claim left something behind: claim again at once.
    pub fn wants_more(&self) -> bool {
        (self.full || self.drains) && !self.has_suspects(1) // whose answers ring
    }

    /// When something in `outbox_waiting` may be due.
    pub fn due_at_ms(&self) -> u64 {
        self.due_at_ms
    }

    pub fn leases(&self) -> &[Held] {
        &self.leases
    }

    /// Partitions that may be claimed from.
    pub fn claimable(&self) -> usize {
        match self.sharing {
            Sharing::Leases => self.leases.len() - self.leaving.len(),
            Sharing::RowClaims => 1,
        }
    }

    /// Partitions of which something is claimed and not settled.
    pub fn in_use(&self) -> HashSet<Partition> {
        (self.messages.values().map(|message| message.pointer.partition))
            .chain(self.unsettled.iter().map(|settlement| settlement.pointer.partition))
            .collect()
    }

    /// Nothing is claimed, parked or unsettled.
    pub fn is_idle(&self) -> bool {
        self.messages.is_empty() && self.ready.is_empty() && self.unsettled.is_empty() && self.gates.parked() == 0
    }

    /// Keys that take memory: something of them is under way, or they are closed.
    pub fn ordered_keys(&self) -> usize {
        self.gates.keys()
    }

    // ---- outcomes and settle ----------------------------------------------------------------------------------------

    /// The publisher's answer for one message, which waits to be settled since then.
    pub fn conclude(&mut self, handle: Handle, outcome: &Outcome, rules: &Rules, since_ms: u64, seed: u64) {
        if self.unsettled.is_empty() {
            self.unsettled_since_ms = since_ms;
        }
        if !self.messages.contains_key(&handle) {
            return;
        }
        self.with_publisher.less(self.messages.get(&handle));
        self.alone = self.alone.filter(|alone| *alone != handle);
        self.answers.over(handle);
        self.end(handle, outcome, rules, seed);
    }

    fn end(&mut self, handle: Handle, outcome: &Outcome, rules: &Rules, seed: u64) {
        if !outcome.is_passed() {
            // What is behind it and has not left yet must not overtake it.
            let messages = &self.messages;
            let unsent = |handle| (messages.get(&handle)).is_some_and(|message| message.publication.is_some());
            let held_back: HashSet<Handle> = self.gates.hold_back(handle, unsent).into_iter().collect();
            if !held_back.is_empty() {
                self.ready.retain(|handle| !held_back.contains(handle));
            }
            self.answers.await_those(self.gates.unanswered_beside(handle));
        }
        let messages = &self.messages;
        let ended = self
            .gates
            .conclude(handle, outcome, rules.dead_closes(), |handle, outcome| {
                let attempts = messages.get(&handle).map_or(0, |m| m.pointer.attempts.max(0) as u32);
                decide(outcome, attempts, &rules.retry, handle ^ seed)
            });
        for (handle, disposition) in ended {
            self.note_head(handle, &disposition, rules);
            self.unsettle(handle, disposition);
        }
    }

    fn unsettle(&mut self, handle: Handle, disposition: Disposition) {
        let Some(message) = self.messages.remove(&handle) else {
            return;
        };
        self.asked.ended(handle, &disposition);
        self.unsettled.push(Settlement {
            place: message.place,
            pointer: message.pointer,
            disposition,
        });
    }

    fn release(&mut self, handles: Vec<Handle>, reason: &str) {
        for handle in handles {
            let reason = reason.to_owned();
            self.unsettle(handle, Disposition::Release { reason });
        }
    }

    /// Whatever is claimed goes back: the connection is lost, or the worker ends. It may or may not have arrived.
    pub fn release_all(&mut self, reason: &str) {
        self.ready.clear();
        self.gates.forget_sent();
        self.with_publisher = WithPublisher::default();
        self.alone = None;
        self.answers.all_over();
        let mut handles: Vec<Handle> = self.messages.keys().copied().collect();
        handles.sort_unstable();
        self.release(handles, reason);
    }

    // ---- claim and hand over ----------------------------------------------------------------------------------------

    /// Claims up to `limit` rows, from lanes and from what waits behind others, and makes ready what may go. `make` turns a message into what goes to the wire, or says
    /// why it cannot. Nothing but what is published may be unsettled.
    pub fn claim<S: Store<Place = P>>(
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
        if self.has_suspects(1) {
            return Ok(0);
        }
        if self.has_ended_in_hand() {
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
        self.read_anew(store, now_ms, &leases, rules)?;
        self.claim_what_lasts(now_ms);
        self.bound_lanes(rules);

        memory.notice_prepared();
        for (partition, _) in &leases {
            if let Some(low) = memory.take_reopen(*partition) {
                lower(&mut self.marks, *partition, low); // (a)
            }
        }
        // A lane that was read to its end holds nothing new until somebody says so.
        let unread: Vec<Held> = (leases.iter())
            .filter(|(partition, _)| self.mark(*partition) < self.reach(*partition))
            .copied()
            .collect();
        if unread.is_empty() && self.gates.parked() == 0 && !self.gates.may_drain() {
            self.full = false;
            return Ok(0);
        }
        let hungry: Vec<bool> = unread.iter().map(|(p, _)| self.hungry.contains(p)).collect();
        let wanted =
            (self.gates.draining().len().min(self.bounds.drains) as u32).saturating_mul(self.bounds.drain_rows);
        let for_lanes = limit - budget::kept_for_followers(limit, wanted, self.claims);
        let lanes: Vec<Lane> = (unread.iter().zip(budget::shares(for_lanes, &hungry, self.claims)))
            .map(|((partition, epoch), limit)| Lane {
                partition: *partition,
                epoch: *epoch,
                mark: self.mark(*partition),
                reach: self.reach(*partition),
                limit,
            })
            .collect();
        let mut batch = match lanes.as_slice() {
            [] => Batch::default(),
            lanes => store.claim(lanes)?, // (b)
        };
        self.appetite.note(&batch);
        self.advance_marks(&lanes, &batch);
        batch.rows = self.recognise(batch.rows);
        let left = room.saturating_sub(batch.rows.len() as u32);
        memory.revoke(&batch.rows.iter().map(Claimed::which).collect::<Vec<_>>());
        let holds = Holds {
            all: batch.missed,
            open: memory.open_transactions(), // (c)
            reopened: (leases.iter())
                .filter_map(|(partition, _)| Some((*partition, memory.look_at_reopen(*partition)?))) // (d)
                .collect(),
        };
        let count = batch.rows.len();
        let is_read = |partition: &Partition| self.mark(*partition) >= self.reach(*partition);
        self.full = (unread.iter()).any(|(partition, _)| !is_read(partition) && !batch.locked.contains(partition));
        self.admit(batch, rules, &holds, &mut make);
        let marks = &self.marks;
        let unparked = self
            .gates
            .unpark(|key, seq| !holds.hold(key, seq) && marks.get(&key.partition).is_some_and(|mark| seq <= *mark));
        self.go(unparked, rules);
        self.drain(store, &leases, &holds, left, rules, &mut make)?;
        while self.gates.parked() > self.bounds.parked || self.parks_too_much() {
            let shed = self.gates.shed();
            if shed.is_empty() {
                break; // the first of each partition
            }
            match rules.ordering {
                Ordering::Partition => self.release(shed, "it waits for an open transaction"),
                _ => (shed.into_iter()).for_each(|handle| self.unsettle(handle, Disposition::Wait)),
            }
        }
        self.bound_lanes(rules);
        Ok(count)
    }

    /// Whether the bodies of messages that wait in memory for an open transaction take more than they may.
    fn parks_too_much(&self) -> bool {
        if self.gates.parked() == 0 {
            return false;
        }
        let of = |message: &Message<P>| message.body_bytes;
        let ready: usize = self.ready.iter().filter_map(|h| self.messages.get(h)).map(of).sum();
        let all: usize = self.messages.values().map(of).sum();
        all.saturating_sub(ready + self.with_publisher.bytes) > self.bounds.bytes
    }

    /// Whether messages are under way with which so many workers crashed: the next crash would charge what is claimed
    /// beside them.
    pub fn has_suspects(&self, crashes: i32) -> bool {
        let is_out = |(handle, m): (&Handle, &Message<P>)| m.publication.is_none() || self.ready.contains(handle);
        (self.messages.iter())
            .filter(|(_, message)| message.pointer.crashes >= crashes)
            .any(is_out)
    }

    fn bring_due<S: Store<Place = P>>(
        &mut self,
        store: &mut S,
        memory: &impl Memory,
        now_ms: u64,
        leases: &[Held],
    ) -> Result<(), S::Error> {
        let changes = memory.waiting_changes();
        if !self.asked.brings_due() || (now_ms < self.due_at_ms && changes == self.waiting_changes) {
            return Ok(());
        }
        let leased = (self.sharing == Sharing::Leases).then_some(leases);
        let (moved, next_ms) = store.bring_due(leased)?;
        self.asked.brought = true;
        // What is due and was not brought is another worker's.
        let next_ms = next_ms.filter(|ms| *ms > 0 || !moved.is_empty());
        for (partition, seq) in moved {
            lower(&mut self.marks, partition, seq);
        }
        self.due_at_ms = now_ms + next_ms.unwrap_or(DUE_EVERY_MS).clamp(1, DUE_EVERY_MS);
        if changes != self.waiting_changes {
            self.sweep_at_ms = now_ms; // a person may have opened a gate
            self.waiting_changes = changes;
        }
        Ok(())
    }

    /// Reads the gates, and lets the lanes be read from their start: those just taken, and all from time to time.
    fn read_anew<S: Store<Place = P>>(
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
        let mut found = store.gates(&anew)?;
        let scope: HashSet<Partition> = anew.iter().copied().collect();
        let gone = self.find_heads(&found, &scope, rules);
        found.retain(|found| found.key.key.is_some());
        if rules.ordering != Ordering::Key {
            // Nothing closes a key; what waits behind another, from when keys were the order, comes back.
            found.retain(|found| found.followers);
            found.iter_mut().for_each(|found| found.head = None);
        }
        let marks = &self.marks;
        let undecided = self.gates.rebuild(
            |partition| scope.contains(&partition),
            found,
            |partition, seq| marks.get(&partition).is_some_and(|mark| seq <= *mark),
        );
        for partition in anew {
            self.fresh.remove(&partition);
            self.marks.insert(partition, START);
        }
        if sweep {
            self.sweep_at_ms = now_ms + SWEEP_EVERY_MS;
        }
        if undecided || gone {
            self.sweep_at_ms = self.sweep_at_ms.min(now_ms + DUE_EVERY_MS);
        }
        Ok(())
    }

    fn mark(&self, partition: Partition) -> i64 {
        self.marks.get(&partition).copied().unwrap_or(START)
    }

    /// A lane that gave all it had is read to its end, or as far as it may: what is committed there later is told. Any
    /// other is read up to its last row.
    fn advance_marks(&mut self, lanes: &[Lane], batch: &Batch<P>) {
        let mut seen: HashMap<Partition, (u32, i64)> = HashMap::new();
        for row in &batch.rows {
            let (count, last) = seen.entry(row.pointer.partition).or_insert((0, START));
            *count += 1;
            *last = (*last).max(row.pointer.seq);
        }
        self.hungry.clear();
        for lane in lanes.iter().filter(|lane| !batch.locked.contains(&lane.partition)) {
            let (count, last) = seen.get(&lane.partition).copied().unwrap_or((0, START));
            let full = count >= lane.limit;
            if full && lane.limit > 0 {
                self.hungry.insert(lane.partition);
            }
            let read = match () {
                () if batch.missed => lane.mark, // it may lie between those that came
                () if full || batch.cut => last,
                () => lane.reach,
            };
            let mark = self.marks.entry(lane.partition).or_insert(START);
            *mark = (*mark).max(read);
        }
    }

    fn admit(
        &mut self,
        batch: Batch<P>,
        rules: &Rules,
        holds: &Holds,
        make: &mut impl FnMut(Handle, &Pointer, &Event) -> Result<Publication, String>,
    ) {
        for claimed in batch.rows {
            let seq = claimed.pointer.seq;
            let Some(key) = OrderedKey::of(&claimed.pointer, rules.ordering) else {
                let handle = self.take_in(claimed, rules, make);
                self.go([handle], rules);
                continue;
            };
            if self.lanes.is_behind_head(key.partition, seq) {
                self.give_back([claimed], "an earlier message of its partition failed"); // in this very claim
                continue;
            }
            let held = holds.hold(&key, seq);
            match self.gates.admit(self.next_handle, key, seq, held) {
                Admission::Go => {
                    let handle = self.take_in(claimed, rules, make);
                    self.go([handle], rules);
                }
                Admission::Park => {
                    self.take_in(claimed, rules, make);
                }
                Admission::Wait => self.unsettled.push(Settlement {
                    place: claimed.place,
                    pointer: claimed.pointer,
                    disposition: Disposition::Wait,
                }),
            }
        }
    }

    /// Fetches what waits behind others whose turn it is now, up to `room` rows.
    fn drain<S: Store<Place = P>>(
        &mut self,
        store: &mut S,
        leases: &[Held],
        holds: &Holds,
        mut room: u32,
        rules: &Rules,
        make: &mut impl FnMut(Handle, &Pointer, &Event) -> Result<Publication, String>,
    ) -> Result<(), S::Error> {
        let draining = self.gates.draining();
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
                self.drains = true; // the others have their turn with the next claim
                break;
            }
            let Some((_, epoch)) = leases.iter().find(|(partition, _)| *partition == key.partition) else {
                continue;
            };
            let goes_back = rules.ordering == Ordering::Partition;
            if !goes_back && holds.open(key, i64::MAX) {
                continue;
            }
            let reach = match goes_back {
                true => END,
                false => self.mark(key.partition).min(self.asked.reach),
            };
            let rows = self.appetite.of(self.bounds.drain_rows.min(room));
            if rows == 0 {
                self.drains = true;
                break;
            }
            let (batch, more) = store.claim_waiting(key, *epoch, reach, rows)?;
            self.appetite.note(&batch);
            bytes += batch.body_bytes();
            room = room.saturating_sub(batch.rows.len() as u32);
            let full = batch.cut || batch.rows.len() as u32 >= rows;
            let missed = batch.missed;
            self.drains |= full || draining.len() > self.bounds.drains;
            if goes_back {
                self.give_back(batch.rows, "the partition is the order now");
                self.gates.drained(key, &[], full, more, |_| false);
                continue;
            }
            let mut rows = Vec::with_capacity(batch.rows.len());
            for claimed in batch.rows {
                let seq = claimed.pointer.seq;
                rows.push((self.take_in(claimed, rules, make), seq));
            }
            let go = self.gates.drained(key, &rows, full, more, |seq| {
                !missed && seq <= reach && !holds.hold(key, seq)
            });
            self.go(go, rules);
        }
        Ok(())
    }

    /// Keeps a claimed message, with what goes to the wire for it.
    fn take_in(
        &mut self,
        claimed: Claimed<P>,
        rules: &Rules,
        make: &mut impl FnMut(Handle, &Pointer, &Event) -> Result<Publication, String>,
    ) -> Handle {
        let handle = self.next_handle;
        self.next_handle += 1;
        self.asked.claimed(handle);
        let Claimed { place, pointer, event } = claimed;
        self.may_expire |= pointer.expires_at_us.is_some();
        let order = OrderedKey::of(&pointer, rules.ordering);
        let unsendable = |reason| Outcome::Unsendable { reason };
        let publication = match event {
            Ok(_) if pointer.crashes >= CRASHES_MAX => Err(unsendable(format!(
                "{} workers crashed with it, the last of them with it alone",
                pointer.crashes
            ))),
            Ok(event) => make(handle, &pointer, &event)
                .map(|publication| Publication {
                    key: order.as_ref().map(OrderedKey::name),
                    ..publication
                })
                .map_err(unsendable),
            Err(outcome) => Err(outcome),
        };
        let message = Message {
            place,
            pointer,
            body_bytes: publication.as_ref().map_or(0, |publication| publication.body.len()),
            publication: Some(publication),
            ordered: order.is_some() && self.sharing == Sharing::Leases,
        };
        self.messages.insert(handle, message);
        handle
    }

    /// Their turn has come: what can be sent is ready, what cannot ends here.
    fn go(&mut self, handles: impl IntoIterator<Item = Handle>, rules: &Rules) {
        for handle in handles {
            let Some(message) = self.messages.get(&handle) else {
                continue;
            };
            if message.ordered && !self.gates.is_sent(handle) {
                continue; // held back: one before it ended here
            }
            match &message.publication {
                Some(Ok(_)) => self.ready.push_back(handle),
                Some(Err(outcome)) => self.end(handle, &outcome.clone(), rules, 0),
                None => {}
            }
        }
    }
}

/// The lane is to be read again from `seq` on.
fn lower(marks: &mut HashMap<Partition, i64>, partition: Partition, seq: i64) {
    let mark = marks.entry(partition).or_insert(START);
    *mark = (*mark).min(seq - 1);
}

mod asked;
mod expiry;
mod hand_over;
mod in_hand;
mod leases;
mod listen;
mod settling;
#[cfg(test)]
mod tests;
