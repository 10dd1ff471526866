//! The path of a message through one worker: claim, order, hand over, take the outcome, settle. The worker's main
//! thread calls it in each pass. Tables, shared memory and broker are behind [`Tables`], [`Memory`] and the closures
//! that the caller passes in, so a simulation can replace them.
//!
//! Each step is an `impl` of [`Engine`] in a separate file: `claim` and `receive`, which share `admit`; `expiry`,
//! `yielding`, `hand_over`, `outcome`, `wake_policy` and `settling`. `leases` and `request` take changes from outside.
//! Their state outside this struct is in `cursors`, `read_limits`, `fast_in_flight`, `progress`, `answers`,
//! `adaptive_row_limit`, `suspects` and `under_way`, which do not use [`Engine`]. `due` is a step for all destinations
//! of a worker. `rows`, `batch`, `bounds` and `ports` define the types that the engine shares with its host.

mod adaptive_row_limit;
mod admit;
mod answers;
mod batch;
mod bounds;
mod claim;
mod cursors;
mod due;
mod expiry;
mod fast_in_flight;
mod hand_over;
mod leases;
mod outcome;
mod ports;
mod progress;
mod read_limits;
mod receive;
mod request;
mod rows;
mod settling;
mod suspects;
mod under_way;
mod wake_policy;
mod yielding;

pub use batch::{Batch, CLAIM_BYTES_MAX};
pub use bounds::Bounds;
pub use claim::ClaimResult;
pub use due::DueSchedule;
pub use ports::{DueMessages, Events, Memory, StatementTimeout, Tables};
pub use progress::{Request, Tally};
pub use rows::{Arrived, ClaimLimits, Claimed, HeldLease, Lane, RowId, Settlement, SlotId, claimable};
pub use settling::Portion;
pub use wake_policy::WakePolicy;

use crate::key_order::{KeyOrder, MessageHandle};
use crate::memory_budget::{MemoryBudget, SILENT_AFTER_MS, Standing};
use crate::message::Pointer;
use crate::partition::Partition;
use crate::settle::{Blocks, Rules};
use adaptive_row_limit::AdaptiveRowLimit;
use answers::Answers;
use cursors::Cursors;
use fast_in_flight::FastInFlight;
use progress::RequestProgress;
use read_limits::ReadLimits;
use std::collections::{HashMap, HashSet, VecDeque};
use std::rc::Rc;
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
    /// The memory for the messages of this worker, which its engines share.
    memory: Rc<MemoryBudget>,
    leases: Vec<HeldLease>,
    /// Leased partitions that another worker is to take over. The engine claims nothing from them.
    leaving: HashSet<Partition>,
    /// Partitions leased since the last claim. The next claim reads their blocked keys, then the lanes from their
    /// start.
    fresh: HashSet<Partition>,
    /// Partitions where a message that blocked others may be gone. The next claim reads their blocked keys.
    unblocked: HashSet<Partition>,
    /// Partitions whose blocked keys are read again, some with each claim, to find what no rewind announced.
    swept: HashSet<Partition>,
    /// The seq up to which each lane has been read.
    cursors: Cursors,
    /// Rewinds that the next claim applies to the cursors. Until then they hold back as those that nobody has taken.
    rewinds: HashMap<Partition, i64>,
    key_order: KeyOrder,
    /// The seq up to which each lane may be read.
    read_limits: ReadLimits,
    /// Messages whose disposition is not decided yet: parked, ready, with the publisher, or answered and waiting for an
    /// earlier message of their key.
    messages: foldhash::HashMap<MessageHandle, ClaimedMessage>,
    /// Messages that may be published, in this order, and are not handed over yet.
    ready: VecDeque<MessageHandle>,
    /// Messages that may be published and failed alone before. They let others go first.
    yielding: Vec<MessageHandle>,
    with_publisher: WithPublisher,
    /// Whether a worker may have crashed with a claimed message. False saves walks over `messages` in each pass.
    may_have_crashed: bool,
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
    /// When all blocked keys, and all lanes from their start, are read again, in ms; MAX = not yet.
    reread_at_ms: u64,
    /// The request of a session and its result so far.
    progress: RequestProgress,
    fast_in_flight: FastInFlight,
    answers: Answers,
    row_limit: AdaptiveRowLimit,
    suspects: Suspects,
}

impl Engine {
    pub fn new(destination: &str, sharing: Sharing, bounds: Bounds, memory: &Rc<MemoryBudget>) -> Self {
        Self {
            destination: destination.to_owned(),
            sharing,
            bounds,
            memory: Rc::clone(memory),
            leases: Vec::new(),
            leaving: HashSet::new(),
            fresh: HashSet::new(),
            unblocked: HashSet::new(),
            swept: HashSet::new(),
            cursors: Cursors::default(),
            rewinds: HashMap::new(),
            key_order: KeyOrder::default(),
            read_limits: ReadLimits::default(),
            messages: foldhash::HashMap::default(),
            ready: VecDeque::new(),
            yielding: Vec::new(),
            with_publisher: WithPublisher::default(),
            may_have_crashed: false,
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
            reread_at_ms: u64::MAX,
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
            .saturating_sub(self.key_order.parked() + self.yielding.len())
    }

    /// The pointer of a message that has not ended; None if the engine does not have it.
    pub fn pointer(&self, handle: MessageHandle) -> Option<&Pointer> {
        self.messages.get(&handle).map(|message| &message.pointer)
    }

    /// Whether the engine has messages, and none of them is with the publisher.
    pub fn only_keeps_back(&self) -> bool {
        self.with_publisher.count == 0 && !self.messages.is_empty()
    }

    /// Whether the messages with the publisher are below [`Bounds::bytes`], so that another claim fits.
    pub fn has_room_in_bytes(&self) -> bool {
        self.with_publisher.bytes < self.bounds.bytes
    }

    /// What the destination has shown. A session that requests delivery does not wait for a first answer.
    fn standing(&self, now_ms: u64) -> Standing {
        match self.progress.is_unbounded() {
            true => {
                let silent_ms = self.answers.silent_ms(now_ms, self.with_publisher.count);
                self.memory.standing(self.answers.last(), silent_ms)
            }
            false => Standing::Answers,
        }
    }

    /// The bytes that the next claim may take of the memory of the worker.
    pub fn room_in_memory(&self, now_ms: u64) -> usize {
        self.memory.room(self.standing(now_ms), self.with_publisher.bytes)
    }

    /// Whether another claim is due as far as this destination is concerned, and others have taken the memory for it.
    pub fn lacks_memory(&self, now_ms: u64) -> bool {
        let awaits_answer = match self.standing(now_ms) {
            Standing::Answers => false,
            Standing::New | Standing::Failed => self.with_publisher.count > 0,
            Standing::Silent => true,
        };
        !awaits_answer && self.room_in_memory(now_ms) == 0
    }

    /// For how long the destination has messages and has answered none, in ms, and what they take, in bytes; None if it
    /// is not silent.
    pub fn silent(&self, now_ms: u64) -> Option<(u64, usize)> {
        let silent_ms = self.answers.silent_ms(now_ms, self.with_publisher.count);
        (silent_ms >= SILENT_AFTER_MS).then_some((silent_ms, self.with_publisher.bytes))
    }

    /// Whether no message waits for room with the publisher.
    pub fn is_ready_empty(&self) -> bool {
        self.ready.is_empty()
    }

    /// Whether the last claim left rows behind, so that the worker claims again immediately.
    pub fn wants_more(&self) -> bool {
        (self.full || self.drains) && !self.has_poison_candidates(1) // their outcomes wake the worker
    }

    pub fn leases(&self) -> &[HeldLease] {
        &self.leases
    }

    /// Number of partitions that the engine may claim from; 1 with row claims.
    pub fn claimable(&self) -> usize {
        match self.sharing {
            Sharing::Leases => self.leases.len() - self.leaving.len(),
            Sharing::RowClaims => 1,
        }
    }

    /// What a dead letter blocks: nothing with row claims, which know no order.
    fn dead_blocks(&self, rules: &Rules) -> Blocks {
        match self.sharing {
            Sharing::Leases => rules.dead_blocks(),
            Sharing::RowClaims => Blocks::Nothing,
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
        if !self.may_have_crashed {
            return false;
        }
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

    // ---- lanes ------------------------------------------------------------------------------------------------------

    fn cursor(&self, partition: Partition) -> i64 {
        self.cursors.of(partition)
    }

    /// The last seq of a lane that a claim may read.
    fn read_limit(&self, partition: Partition) -> i64 {
        self.read_limits.read_limit(partition).min(self.progress.read_limit)
    }
}

#[cfg(test)]
mod tests;
