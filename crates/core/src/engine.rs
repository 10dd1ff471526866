//! The path of a message through one worker: claim, order, hand over, take the outcome, settle. The worker's main
//! thread calls it in each pass. Tables, shared memory and broker are behind [`Tables`], [`Memory`] and the closures
//! that the caller passes in, so a simulation can replace them.
//!
//! Each step is an `impl` of [`Engine`] in a separate file: `claim` and `receive`, which share `admit`; `expiry`,
//! `aside`, `hand_over`, `wake_policy` and `settling`. `leases` and `request` take changes from outside. Their state
//! outside this struct is in `cursors`, `lanes`, `fast_in_flight`, `progress`, `answers`, `adaptive_row_limit`, `suspects` and
//! `under_way`, which do not use [`Engine`]. `due` is a step for all destinations of a worker. `rows`, `batch`, `bounds` and `ports` define the types that the engine shares with its
//! host.

mod adaptive_row_limit;
mod admit;
mod answers;
mod aside;
mod batch;
mod bounds;
mod claim;
mod cursors;
mod due;
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
mod suspects;
mod under_way;
mod wake_policy;

pub use batch::{Batch, CLAIM_BYTES_MAX};
pub use bounds::Bounds;
pub use claim::ClaimResult;
pub use due::{DueCounters, DueSchedule};
pub use ports::{DueMessages, Memory, SlotId, StatementTimeout, Tables};
pub use progress::{Request, Tally};
pub use rows::{Claimed, Held, Lane, RowId, Settlement, claimable};
pub use settling::Portion;
pub use wake_policy::WakePolicy;

use crate::key_order::{KeyOrder, MessageHandle};
use crate::message::{Outcome, Pointer};
use crate::partition::Partition;
use crate::settle::{Blocks, Disposition, Rules, decide};
use adaptive_row_limit::AdaptiveRowLimit;
use answers::Answers;
use cursors::Cursors;
use fast_in_flight::FastInFlight;
use lanes::Lanes;
use progress::RequestProgress;
use std::collections::{HashMap, HashSet, VecDeque};
use suspects::Suspects;
use under_way::{ClaimedMessage, WithPublisher};

/// A message is sent alone once this number of workers crashed while it was in flight.
pub const CRASHES_ALONE: i32 = 3;
/// A message becomes a dead letter once this number of workers crashed while it was in flight.
pub const CRASHES_MAX: i32 = 5;

/// How partitions are shared in this database.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Sharing {
    /// Each worker leases partitions and reads their lanes in order of seq.
    Leases,
    /// `leasing = off`: each worker claims single rows of any partition; there is no order.
    RowClaims,
}

/// The messages that one worker has in flight for one destination.
pub struct Engine {
    destination: String,
    sharing: Sharing,
    bounds: Bounds,
    leases: Vec<Held>,
    /// Leased partitions that another worker is to take over. The engine claims nothing from them.
    leaving: HashSet<Partition>,
    /// Partitions leased since the last claim. The next claim reads their blocked keys, then the lanes from their
    /// start.
    fresh: HashSet<Partition>,
    /// The seq up to which each lane has been read.
    cursors: Cursors,
    /// Rewinds that the next claim applies to the cursors. Until then they hold back as those that nobody has taken.
    rewinds: HashMap<Partition, i64>,
    key_order: KeyOrder,
    /// The seq up to which each lane may be read.
    lanes: Lanes,
    /// Messages whose disposition is not decided yet: parked, ready, with the publisher, or answered and waiting for an
    /// earlier message of their key.
    messages: HashMap<MessageHandle, ClaimedMessage>,
    /// Messages that may be published, in this order, and are not handed over yet.
    ready: VecDeque<MessageHandle>,
    /// Messages that may be published and failed alone before. They let others go first.
    aside: Vec<MessageHandle>,
    with_publisher: WithPublisher,
    /// The message that is with the publisher alone, because workers crashed or the destination failed while it was in
    /// flight.
    alone: Option<MessageHandle>,
    unsettled: Vec<Settlement>,
    /// When the oldest outcome in `unsettled` arrived, in ms. Without meaning while `unsettled` is empty.
    unsettled_since_ms: u64,
    /// Whether a claimed message may have an expiry time. False saves a walk over `ready` in each pass.
    may_expire: bool,
    next_handle: MessageHandle,
    /// Number of claims so far. It rotates the shares among partitions and draining keys.
    claims: u64,
    /// Partitions that filled their share of the last claim.
    saturated: HashSet<Partition>,
    /// Whether lanes may hold more rows than the last claim read.
    full: bool,
    /// Whether `outbox_waiting` may hold more rows of draining keys than the last claim fetched.
    drains: bool,
    /// When a message is due that this engine settled and that is to be retried, in ms; MAX = none.
    retry_at_ms: u64,
    /// When every message that was put off has been due for a while, in ms.
    put_off_until_ms: u64,
    /// Until then lanes are claimed one by one, in ms, because rows of some were locked.
    lane_by_lane_until_ms: u64,
    /// When all lanes are next read from their start, in ms.
    sweep_at_ms: u64,
    /// The request of a session and its result so far.
    progress: RequestProgress,
    fast_in_flight: FastInFlight,
    answers: Answers,
    row_limit: AdaptiveRowLimit,
    suspects: Suspects,
}

impl Engine {
    pub fn new(destination: &str, sharing: Sharing, bounds: Bounds) -> Self {
        Self {
            destination: destination.to_owned(),
            sharing,
            bounds,
            leases: Vec::new(),
            leaving: HashSet::new(),
            fresh: HashSet::new(),
            cursors: Cursors::default(),
            rewinds: HashMap::new(),
            key_order: KeyOrder::default(),
            lanes: Lanes::default(),
            messages: HashMap::new(),
            ready: VecDeque::new(),
            aside: Vec::new(),
            with_publisher: WithPublisher::default(),
            row_limit: AdaptiveRowLimit::default(),
            alone: None,
            unsettled: Vec::new(),
            unsettled_since_ms: 0,
            may_expire: false,
            next_handle: 1,
            claims: 0,
            saturated: HashSet::new(),
            full: false,
            drains: false,
            retry_at_ms: u64::MAX,
            put_off_until_ms: 0,
            lane_by_lane_until_ms: 0,
            sweep_at_ms: 0,
            progress: RequestProgress::default(),
            fast_in_flight: FastInFlight::default(),
            answers: Answers::default(),
            suspects: Suspects::default(),
        }
    }

    // ---- state for the worker ---------------------------------------------------------------------------------------

    pub fn sharing(&self) -> Sharing {
        self.sharing
    }

    /// Number of messages that are in flight: claimed or taken from the fast path, and not settled.
    pub fn outstanding(&self) -> usize {
        self.messages.len() + self.unsettled.len()
    }

    /// Number of messages that are in flight, without those that are kept back: they are not on their way there.
    pub fn outstanding_there(&self) -> usize {
        self.outstanding()
            .saturating_sub(self.key_order.parked() + self.aside.len())
    }

    /// The pointer of a message that has not ended; None if the engine does not have it.
    pub fn pointer(&self, handle: MessageHandle) -> Option<&Pointer> {
        self.messages.get(&handle).map(|message| &message.pointer)
    }

    /// Whether the engine has messages, and none of them is with the publisher.
    pub fn only_keeps_back(&self) -> bool {
        self.with_publisher.count == 0 && !self.messages.is_empty()
    }

    /// Whether the bodies with the publisher are below [`Bounds::bytes`], so that another claim fits.
    pub fn has_room_in_bytes(&self) -> bool {
        self.with_publisher.bytes < self.bounds.bytes
    }

    /// Whether no message waits for room with the publisher.
    pub fn is_ready_empty(&self) -> bool {
        self.ready.is_empty()
    }

    /// Whether the last claim left rows behind, so that the worker claims again immediately.
    pub fn wants_more(&self) -> bool {
        (self.full || self.drains) && !self.has_poison_candidates(1) // their outcomes wake the worker
    }

    pub fn leases(&self) -> &[Held] {
        &self.leases
    }

    /// Number of partitions that the engine may claim from; 1 with row claims.
    pub fn claimable(&self) -> usize {
        match self.sharing {
            Sharing::Leases => self.leases.len() - self.leaving.len(),
            Sharing::RowClaims => 1,
        }
    }

    /// Partitions that have messages in flight.
    pub fn in_use(&self) -> HashSet<Partition> {
        (self.messages.values().map(|message| message.pointer.partition))
            .chain(self.unsettled.iter().map(|settlement| settlement.pointer.partition))
            .collect()
    }

    /// Whether no message is claimed, parked or unsettled.
    pub fn is_idle(&self) -> bool {
        self.messages.is_empty() && self.ready.is_empty() && self.unsettled.is_empty() && self.key_order.parked() == 0
    }

    /// Whether a message that at least `crashes` workers crashed with is ready or with the publisher. The next crash
    /// would be charged to all messages that are claimed with it.
    pub fn has_poison_candidates(&self, crashes: i32) -> bool {
        let is_active =
            |(handle, m): (&MessageHandle, &ClaimedMessage)| m.publication.is_none() || self.ready.contains(handle);
        (self.messages.iter())
            .filter(|(_, message)| message.pointer.crashes >= crashes)
            .any(is_active)
    }

    /// Number of keys that take memory: keys with messages in flight, and blocked keys.
    pub fn ordered_keys(&self) -> usize {
        self.key_order.keys()
    }

    // ---- outcomes -------------------------------------------------------------------------------------------------

    /// Takes the publisher's outcome for one message. `since_ms` is when the outcome began to wait for its settle.
    pub fn on_outcome(&mut self, handle: MessageHandle, outcome: &Outcome, rules: &Rules, since_ms: u64, seed: u64) {
        if self.unsettled.is_empty() {
            self.unsettled_since_ms = since_ms;
        }
        if !self.messages.contains_key(&handle) {
            return;
        }
        self.with_publisher.less(self.messages.get(&handle));
        self.alone = self.alone.filter(|alone| *alone != handle);
        self.answers.on_end(handle);
        self.end(handle, outcome, rules, seed);
        if !self.suspects.in_doubt() {
            self.give_back_aside(rules); // the window decides how many of them go at a time
        }
    }

    fn end(&mut self, handle: MessageHandle, outcome: &Outcome, rules: &Rules, seed: u64) {
        self.end_with(
            handle,
            outcome,
            rules,
            |suspects, handle, outcome, pointer| match pointer {
                Some(pointer) => suspects.decide(outcome, pointer, &rules.retry, handle ^ seed),
                None => decide(outcome, 0, &rules.retry, handle ^ seed),
            },
        );
    }

    fn end_with(
        &mut self,
        handle: MessageHandle,
        outcome: &Outcome,
        rules: &Rules,
        mut decide: impl FnMut(&mut Suspects, MessageHandle, &Outcome, Option<&Pointer>) -> Disposition,
    ) {
        if !outcome.is_passed() {
            // Later messages of its key that the publisher does not have yet must not overtake it.
            let messages = &self.messages;
            let unsent = |handle| (messages.get(&handle)).is_some_and(|message| message.publication.is_some());
            let held_back: HashSet<MessageHandle> = self.key_order.hold_back(handle, unsent).into_iter().collect();
            if !held_back.is_empty() {
                self.ready.retain(|handle| !held_back.contains(handle));
            }
            self.answers.await_those(self.key_order.unanswered_beside(handle));
        }
        let (messages, suspects) = (&self.messages, &mut self.suspects);
        let ended = self.key_order.on_outcome(
            handle,
            outcome,
            rules.dead_blocks() != Blocks::Nothing,
            |handle, outcome| {
                let pointer = messages.get(&handle).map(|message| &message.pointer);
                decide(suspects, handle, outcome, pointer)
            },
        );
        for (handle, disposition) in ended {
            if let Some(ClaimedMessage { pointer, .. }) = self.messages.get(&handle)
                && self.sharing == Sharing::Leases
            {
                self.lanes.record(pointer.partition, pointer.seq, &disposition, rules);
            }
            self.unsettle(handle, disposition);
        }
    }

    fn unsettle(&mut self, handle: MessageHandle, disposition: Disposition) {
        let Some(message) = self.messages.remove(&handle) else {
            return;
        };
        self.progress.on_end(handle, &disposition);
        self.unsettled.push(Settlement {
            row_id: message.row_id,
            pointer: message.pointer,
            disposition,
        });
    }

    fn release(&mut self, handles: Vec<MessageHandle>, reason: &str) {
        for handle in handles {
            let reason = reason.to_owned();
            self.unsettle(handle, Disposition::Release { reason });
        }
    }

    /// Releases all claimed messages, because the connection is lost or the worker ends. Those that were with the
    /// publisher may or may not have arrived.
    pub fn release_all(&mut self, reason: &str) {
        self.ready.clear();
        self.aside.clear();
        self.key_order.forget_sent();
        self.with_publisher = WithPublisher::default();
        self.alone = None;
        self.answers.clear();
        let mut handles: Vec<MessageHandle> = self.messages.keys().copied().collect();
        handles.sort_unstable();
        self.release(handles, reason);
    }

    // ---- lanes ------------------------------------------------------------------------------------------------------

    fn cursor(&self, partition: Partition) -> i64 {
        self.cursors.of(partition)
    }

    /// The last seq of a lane that a claim may read.
    fn read_limit(&self, partition: Partition) -> i64 {
        self.lanes.read_limit(partition).min(self.progress.read_limit)
    }
}

#[cfg(test)]
mod tests;
