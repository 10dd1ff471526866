//! The parameters of a run.

use outbox_core::settle::Ordering;

/// A built-in mistake, to see that it is found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flaw {
    /// A claim returns all rows that it finds, including those claimed under the same epoch.
    ClaimRepeats,
    /// A session leaves the list of open transactions, and lowers the rewind only then.
    LeavesBeforeRewind,
    /// After a claim the worker does not check for commits meanwhile.
    NoPeekAtRewind,
    /// A rewind is taken, and the lane is not read again.
    RewindTakenUnread,
    /// Of destinations that share a rewind, none is found that has messages.
    SharedRewindUnread,
    /// A session draws a seq, and announces its key only then.
    DrawsBeforeAnnouncing,
    /// Any worker takes the rewind, and not only the owner of the lane.
    AnyWorkerTakesRewind,
    /// A worker settles also without the lease.
    SettleIgnoresLease,
    /// A settle checks that it has the lease, and another worker may take it before the rows are changed.
    SettleHoldsNoLease,
    /// A worker that takes a partition does not learn of its blocked keys.
    BlockedKeysForgotten,
    /// A publisher continues after the lease is lost.
    NoDeadline,
    /// A publisher that was stopped continues with its messages.
    StopsNothing,
    /// A session publishes its lowest seq, and its partition only then.
    RecordsLaneLate,
    /// Claimed messages may still take the fast path.
    ClaimedNotRevoked,
    /// A worker that has taken messages from slots does not check for further ready ones.
    NoPeekReady,
    /// A worker ends, and its slots stay filled.
    EndsWithFastInFlight,
    /// The worker reads the position that the standby must have before it claims.
    ReadsWalBeforeClaim,
}

/// The destinations that may exist. The first has a separate *rewind* word, the others share one. The second is slow,
/// and the third has a rate limit.
pub const DESTINATIONS: [&str; 3] = ["default", "slow", "posted"];
/// Messages a second of the third, of all workers together.
pub const POSTED_RATE: u32 = 400;

#[derive(Clone, Debug)]
pub struct Config {
    pub name: &'static str,
    pub ordering: Ordering,
    pub partitions: u16,
    pub workers: usize,
    /// The number of `DESTINATIONS` that exist.
    pub destinations: usize,
    pub sessions: usize,
    pub keys: usize,
    pub dead_blocks: bool,
    pub discards_unroutable: bool,
    /// Of ten thousand messages, those that the broker never routes.
    pub poisoned: u32,
    /// Of ten thousand messages, those that end the connection at each attempt.
    pub ends_connection: u32,
    /// Of ten thousand messages, those that expire soon.
    pub expiring: u32,
    /// Of ten thousand publishes, those that fail once.
    pub nacked: u32,
    /// Of ten thousand steps of a broker, those after which it does nothing for a while.
    pub hangs: u32,
    /// Of ten thousand steps of a worker, faults of each kind.
    pub faults: u32,
    /// Of ten thousand chances to delay a worker until its leases have expired, those that are taken.
    pub hold_ups: u32,
    /// Of ten thousand calls of the store, those that fail.
    pub store_errors: u32,
    /// Of ten thousand reads of shared memory, those that fail.
    pub memory_errors: u32,
    /// Of ten thousand steps of an open transaction, those that end it; fewer for long ones.
    pub ends: u32,
    /// The most messages of a transaction.
    pub messages: u64,
    pub window: usize,
    /// For the messages of all destinations of a worker, in bytes.
    pub memory: usize,
    pub batch: u32,
    /// Of ten thousand steps, those in which a session requests delivery up to a seq, for a while.
    pub requests: u32,
    /// Of ten thousand steps of a worker, those in which a person pauses or resumes a destination.
    pub pauses: u32,
    /// Of ten thousand messages, those that are copied into slots, too.
    pub fast_path: u32,
    /// Events are in a source: messages come from slots without them.
    pub source: bool,
    /// Of ten thousand steps of the standby, those in which it receives WAL; None = there is no standby.
    pub standby: Option<u32>,
    pub flaw: Option<Flaw>,
}

impl Config {
    pub const CALM: Self = Self {
        name: "calm",
        ordering: Ordering::Key,
        partitions: 4,
        workers: 2,
        destinations: 1,
        sessions: 6,
        keys: 8,
        dead_blocks: true,
        discards_unroutable: false,
        poisoned: 0,
        ends_connection: 0,
        expiring: 0,
        nacked: 0,
        hangs: 0,
        faults: 0,
        hold_ups: 0,
        store_errors: 0,
        memory_errors: 0,
        ends: 2_000,
        messages: 3,
        window: 60,
        memory: 400_000,
        batch: 20,
        requests: 0,
        pauses: 0,
        fast_path: 8_000,
        source: false,
        standby: None,
        flaw: None,
    };

    pub const ROUGH: Self = Self {
        name: "rough",
        workers: 3,
        partitions: 6,
        poisoned: 100,
        nacked: 300,
        faults: 60,
        hold_ups: 300,
        store_errors: 200,
        memory_errors: 200,
        ..Self::CALM
    };

    /// So that a mistake shows.
    pub const MISTAKEN: Self = Self {
        name: "mistaken",
        faults: 200,
        hold_ups: 1_000,
        keys: 3,
        fast_path: 5_000,
        ..Self::ROUGH
    };
}
