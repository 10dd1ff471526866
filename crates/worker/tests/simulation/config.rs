//! What a run is like.

use outbox_core::settle::Ordering;

/// A mistake built in, to see that it is found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flaw {
    /// A claim returns what it finds, also what was claimed under the same epoch.
    ClaimRepeats,
    /// A session leaves the registry, and lowers reopen only then.
    LeavesBeforeRewind,
    /// After a claim nobody looks what was committed meanwhile.
    NoPeekAtRewind,
    /// What was committed is taken note of, and the lane is not read again.
    RewindTakenUnread,
    /// A session draws a seq, and announces itself only then.
    DrawsBeforeAnnouncing,
    /// Whoever asks takes the reopened seq, and not the owner of the lane alone.
    AnybodyTakesRewind,
    /// A worker settles also without the lease.
    SettleIgnoresLease,
    /// A settle looks whether it has the lease, and somebody may take it before the rows are changed.
    SettleHoldsNoLease,
    /// A worker that takes a partition is told of no closed key.
    BlockedKeysForgotten,
    /// A publisher goes on whatever became of the lease.
    NoDeadline,
    /// A publisher that was stopped goes on with what it had.
    StopsNothing,
    /// A session tells its lowest seq, and in which partition it is only then.
    RecordsLaneLate,
    /// What is claimed may still be taken in hand.
    ClaimedNotRevoked,
    /// A worker that has taken messages in hand does not look what else is ready by then.
    NoPeekReady,
    /// A worker ends, and what lies there for it stays.
    EndsWithFastInFlight,
}

/// The destinations that there may be. The first has its own word of *reopen*, the others share one. The second is slow, and
/// the third may be sent to only so often.
pub const DESTINATIONS: [&str; 3] = ["default", "slow", "posted"];
/// Messages a second of the third, of all workers together.
pub const POSTED_RATE: u32 = 400;

#[derive(Clone, Debug)]
pub struct Config {
    pub name: &'static str,
    pub ordering: Ordering,
    pub partitions: u16,
    pub workers: usize,
    /// Of those in `DESTINATIONS`, how many there are.
    pub destinations: usize,
    pub sessions: usize,
    pub keys: usize,
    pub dead_blocks: bool,
    /// Of ten thousand messages, those that the broker never routes.
    pub poisoned: u32,
    /// Of ten thousand messages, those that expire soon.
    pub expiring: u32,
    /// Of ten thousand publishes, those that fail for once.
    pub nacked: u32,
    /// Of ten thousand steps of a worker, faults of each kind.
    pub faults: u32,
    /// Of ten thousand chances to hold up a worker until its leases have run out, those that are taken.
    pub hold_ups: u32,
    /// Of ten thousand calls of the store, those that fail.
    pub store_errors: u32,
    /// Of ten thousand looks at shared memory, those that fail.
    pub memory_errors: u32,
    /// Of ten thousand steps of an open transaction, those that end it; fewer for long ones.
    pub ends: u32,
    /// Messages of a transaction, at most.
    pub messages: u64,
    pub window: usize,
    pub batch: u32,
    /// Of ten thousand steps, those with which a session asks for delivery up to some seq, for a while.
    pub requests: u32,
    /// Of ten thousand steps of a worker, those with which a person pauses a destination, or lets it go on.
    pub pauses: u32,
    /// Of ten thousand messages, those that lie in shared memory, too.
    pub fast_path: u32,
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
        poisoned: 0,
        expiring: 0,
        nacked: 0,
        faults: 0,
        hold_ups: 0,
        store_errors: 0,
        memory_errors: 0,
        ends: 2_000,
        messages: 3,
        window: 60,
        batch: 20,
        requests: 0,
        pauses: 0,
        fast_path: 8_000,
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

    /// For a mistake to show.
    pub const MISTAKEN: Self = Self {
        name: "mistaken",
        faults: 200,
        hold_ups: 1_000,
        keys: 3,
        fast_path: 5_000,
        ..Self::ROUGH
    };
}
