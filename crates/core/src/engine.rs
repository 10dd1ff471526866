//! The path of a message through one worker: claim, order, hand over, outcome, settle. The worker calls it on its main
//! thread in each pass. Tables, shared memory and broker are behind [`Store`], [`Memory`] and closures, so that a
//! simulation can replace them.
//!
//! Each step is an `impl` of [`Engine`] in a separate file: `claim` and `receive`, which share `admit`; `expiry`,
//! `hand_over`, `wake_policy`, `settling`; `leases` and `request` for changes from outside. Their state beside this
//! struct is in `cursors`, `lanes`, `fast_in_flight`, `progress`, `answers`, `appetite` and `under_way`, which do not
//! know the engine. `rows`, `batch`, `bounds` and `ports` are the types that the engine shares with its host.

mod admit;
mod answers;
mod appetite;
mod batch;
mod bounds;
mod claim;
mod cursors;
mod expiry;
mod fast_in_flight;
mod hand_over;
mod lanes;
mod leases;
mod ports;
mod progress;
mod receive;
mod request;
mod rows;
mod settling;
mod under_way;
mod wake_policy;

pub use batch::{Batch, CLAIM_BYTES_MAX};
pub use bounds::Bounds;
pub use ports::{Due, FastPath, Memory, SlotId, Store};
pub use progress::{Request, Tally};
pub use rows::{Claimed, Held, Lane, Settlement, share_read_limit};
pub use settling::Portion;
pub use wake_policy::WakePolicy;

use crate::key_order::{Handle, KeyOrder};
use crate::message::{Outcome, Pointer};
use crate::partition::Partition;
use crate::settle::{Blocks, Disposition, Rules, decide};
use answers::Answers;
use appetite::Appetite;
use cursors::Cursors;
use fast_in_flight::FastInFlight;
use lanes::Lanes;
use progress::Progress;
use std::collections::{HashMap, HashSet, VecDeque};
use under_way::{Message, WithPublisher};

/// A message that this number of workers crashed with is sent alone.
pub const CRASHES_ALONE: i32 = 3;
/// A message that this number of workers crashed with becomes a dead letter.
pub const CRASHES_MAX: i32 = 5;

/// How workers share the partitions of this database.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Sharing {
    Leases,
    /// leasing = off: row claims, no order.
    RowClaims,
}

/// The messages of one worker.
pub struct Engine<P> {
    sharing: Sharing,
    bounds: Bounds,
    leases: Vec<Held>,
    /// Held, but another worker shall have them: no more claims.
    leaving: HashSet<Partition>,
    /// Taken since the last claim: their lanes are read from the start, after their blocked keys.
    fresh: HashSet<Partition>,
    /// How far the lanes have been read.
    cursors: Cursors,
    key_order: KeyOrder,
    /// How far the lanes may be read.
    lanes: Lanes,
    messages: HashMap<Handle, Message<P>>,
    /// May be sent, in this order; not handed over yet.
    ready: VecDeque<Handle>,
    with_publisher: WithPublisher,
    /// The message that is with the publisher alone, because workers crashed with it.
    alone: Option<Handle>,
    unsettled: Vec<Settlement<P>>,
    /// When the first of the unsettled ones was added; without meaning if there are none.
    unsettled_since_ms: u64,
    /// Some of the claimed messages may have a time at which they expire.
    may_expire: bool,
    next_handle: Handle,
    claims: u64,
    /// Partitions that filled their share of the last claim.
    saturated: HashSet<Partition>,
    full: bool,
    drains: bool,
    due_at_ms: u64,
    waiting_changes: u32,
    sweep_at_ms: u64,
    /// The request of a session, and how far it lets this worker read.
    progress: Progress,
    fast_in_flight: FastInFlight,
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
            cursors: Cursors::default(),
            key_order: KeyOrder::default(),
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
            saturated: HashSet::new(),
            full: false,
            drains: false,
            due_at_ms: 0,
            waiting_changes: 0,
            sweep_at_ms: 0,
            progress: Progress::default(),
            fast_in_flight: FastInFlight::default(),
            answers: Answers::default(),
        }
    }

    // ---- the state of the messages
    // -------------------------------------------------------------------------------------

    pub fn sharing(&self) -> Sharing {
        self.sharing
    }

    /// Messages claimed and not settled.
    pub fn outstanding(&self) -> usize {
        self.messages.len() + self.unsettled.len()
    }

    /// Those of them that depend on the destination: without messages that wait for an open transaction.
    pub fn outstanding_there(&self) -> usize {
        self.outstanding().saturating_sub(self.key_order.parked())
    }

    /// A message that is claimed and has no outcome yet.
    pub fn pointer(&self, handle: Handle) -> Option<&Pointer> {
        self.messages.get(&handle).map(|message| &message.pointer)
    }

    /// Whether messages are kept back, and none is with the publisher.
    pub fn only_keeps_back(&self) -> bool {
        self.with_publisher.count == 0 && !self.messages.is_empty()
    }

    /// Whether the bodies with the publisher leave room for those of another claim.
    pub fn has_room_in_bytes(&self) -> bool {
        self.with_publisher.bytes < self.bounds.bytes
    }

    /// Messages that may be sent and wait for room with the publisher.
    pub fn is_ready_empty(&self) -> bool {
        self.ready.is_empty()
    }

    /// The last claim left messages behind: claim again at once.
    pub fn wants_more(&self) -> bool {
        (self.full || self.drains) && !self.has_poison_candidates(1) // whose answers wake the worker
    }

    /// The time until a message in `outbox_waiting` may be due.
    pub fn due_at_ms(&self) -> u64 {
        self.due_at_ms
    }

    pub fn leases(&self) -> &[Held] {
        &self.leases
    }

    /// Partitions that this worker may claim from.
    pub fn claimable(&self) -> usize {
        match self.sharing {
            Sharing::Leases => self.leases.len() - self.leaving.len(),
            Sharing::RowClaims => 1,
        }
    }

    /// Partitions with messages that are claimed and not settled.
    pub fn in_use(&self) -> HashSet<Partition> {
        (self.messages.values().map(|message| message.pointer.partition))
            .chain(self.unsettled.iter().map(|settlement| settlement.pointer.partition))
            .collect()
    }

    /// No message is claimed, parked or unsettled.
    pub fn is_idle(&self) -> bool {
        self.messages.is_empty() && self.ready.is_empty() && self.unsettled.is_empty() && self.key_order.parked() == 0
    }

    /// Whether messages under way are poison candidates: the next crash would charge the messages claimed beside them.
    pub fn has_poison_candidates(&self, crashes: i32) -> bool {
        let is_out = |(handle, m): (&Handle, &Message<P>)| m.publication.is_none() || self.ready.contains(handle);
        (self.messages.iter())
            .filter(|(_, message)| message.pointer.crashes >= crashes)
            .any(is_out)
    }

    /// Keys that take memory: messages of them are under way, or they are blocked.
    pub fn ordered_keys(&self) -> usize {
        self.key_order.keys()
    }

    // ---- outcomes -------------------------------------------------------------------------------------------------

    /// The publisher's answer for one message, which waits since this time to be settled.
    pub fn on_outcome(&mut self, handle: Handle, outcome: &Outcome, rules: &Rules, since_ms: u64, seed: u64) {
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
            // Later messages of its key that were not handed over yet must not overtake it.
            let messages = &self.messages;
            let unsent = |handle| (messages.get(&handle)).is_some_and(|message| message.publication.is_some());
            let held_back: HashSet<Handle> = self.key_order.hold_back(handle, unsent).into_iter().collect();
            if !held_back.is_empty() {
                self.ready.retain(|handle| !held_back.contains(handle));
            }
            self.answers.await_those(self.key_order.unanswered_beside(handle));
        }
        let messages = &self.messages;
        let ended = self.key_order.on_outcome(
            handle,
            outcome,
            rules.dead_blocks() != Blocks::Nothing,
            |handle, outcome| {
                let attempts = messages.get(&handle).map_or(0, |m| m.pointer.attempts.max(0) as u32);
                decide(outcome, attempts, &rules.retry, handle ^ seed)
            },
        );
        for (handle, disposition) in ended {
            if let Some(Message { pointer, .. }) = self.messages.get(&handle)
                && self.sharing == Sharing::Leases
            {
                self.lanes.note(pointer.partition, pointer.seq, &disposition, rules);
            }
            self.unsettle(handle, disposition);
        }
    }

    fn unsettle(&mut self, handle: Handle, disposition: Disposition) {
        let Some(message) = self.messages.remove(&handle) else {
            return;
        };
        self.progress.ended(handle, &disposition);
        self.unsettled.push(Settlement {
            row_id: message.row_id,
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

    /// Releases all claimed messages: the connection is lost, or the worker ends. They may or may not have arrived.
    pub fn release_all(&mut self, reason: &str) {
        self.ready.clear();
        self.key_order.forget_sent();
        self.with_publisher = WithPublisher::default();
        self.alone = None;
        self.answers.all_over();
        let mut handles: Vec<Handle> = self.messages.keys().copied().collect();
        handles.sort_unstable();
        self.release(handles, reason);
    }

    // ---- lanes ------------------------------------------------------------------------------------------------------

    fn cursor(&self, partition: Partition) -> i64 {
        self.cursors.of(partition)
    }

    /// The last seq of a lane that may be claimed.
    fn read_limit(&self, partition: Partition) -> i64 {
        self.lanes.read_limit(partition).min(self.progress.read_limit)
    }
}

#[cfg(test)]
mod tests;
