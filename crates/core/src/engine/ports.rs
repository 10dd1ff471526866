//! The ports of the engine: the tables, and the memory that sessions share with workers. The hosts of a worker
//! implement them, and so do tests for a simulation.

use super::batch::Batch;
use super::rows::{ClaimLimits, HeldLease, Lane, Settlement, SlotId};
use crate::key_order::{BlockedKey, OrderedKey};
use crate::message::{Event, Outcome};
use crate::open_transactions::OpenTransaction;
use crate::partition::Partition;
use crate::settle::Blocks;
use std::collections::BTreeMap;

/// Events of a source by their seqs, or the outcome of a message whose event is missing or cannot be read.
pub type Events = BTreeMap<i64, Result<Event, Outcome>>;

/// The result of [`Tables::bring_due`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DueMessages {
    /// Destination, partition and seq of each message that was brought back to `outbox`.
    pub moved: Vec<(String, Partition, i64)>,
    /// The time until the next message is due, in ms; None = no message waits for a time.
    pub next_ms: Option<u64>,
}

/// How long a statement waits for rows that another session has locked, and how long it may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StatementTimeout {
    /// As long as any other statement.
    Usual,
    /// Only briefly: the process ends, or other lanes and destinations wait.
    Short,
}

/// The tables, for all destinations of a worker. Each call is a separate transaction.
pub trait Tables {
    type Error;
    /// Writes the dispositions of messages of a destination. Rows that are gone or no longer belong to this worker are
    /// left alone. A dead letter blocks what `dead_blocks` says. Returns the number of changed rows.
    fn settle(
        &self,
        destination: &str,
        batch: &[Settlement],
        dead_blocks: Blocks,
        timeout: StatementTimeout,
    ) -> Result<usize, Self::Error>;
    /// Claims rows of leased lanes, which all have the same read limit. The batch says if the destination is paused: the
    /// worker may not know that yet, and would consider the lanes read.
    fn claim(
        &self,
        destination: &str,
        lanes: &[Lane],
        limits: ClaimLimits,
        timeout: StatementTimeout,
    ) -> Result<Batch, Self::Error>;
    /// Claims rows of any lane, with leasing off.
    fn claim_unleased(&self, destination: &str, limits: ClaimLimits) -> Result<Batch, Self::Error>;
    /// Claims messages of a key that wait in `outbox_waiting`, in order of seq and up to `read_limit`.
    /// The flag says whether more of them wait.
    fn claim_waiting(
        &self,
        key: &OrderedKey,
        epoch: i64,
        read_limit: i64,
        limits: ClaimLimits,
    ) -> Result<(Batch, bool), Self::Error>;
    /// The keys of a destination that are blocked or have messages waiting in `outbox_waiting`.
    fn blocked_keys(&self, destination: &str, partitions: &[Partition]) -> Result<Vec<BlockedKey>, Self::Error>;
    /// The destinations that have messages which may be delivered, back off, wait behind another or block others. Costs
    /// nothing for the others.
    fn destinations_with_messages(&self) -> Result<Vec<String>, Self::Error>;
    /// Of these lanes (destination, partition, the seq from which on it is read), the indexes of those that have messages
    /// in `outbox`. Costs the same whatever waits in them.
    fn lanes_with_messages(&self, lanes: &[(&str, Partition, i64)]) -> Result<Vec<usize>, Self::Error>;
    /// Moves due messages of these leases, of all destinations, from `outbox_waiting` back to `outbox`; None = of all
    /// partitions.
    fn bring_due(&self, leases: Option<&[HeldLease]>) -> Result<DueMessages, Self::Error>;
    /// Called after claims, even if they failed, and before a message of them is sent. A crash of the server must not
    /// undo what they were committed with.
    fn make_durable(&self) {}
    /// Whether the error says that another session has locked rows.
    fn is_locked(error: &Self::Error) -> bool;
}

/// What sessions report to workers through shared memory. A host without a fast path keeps the defaults.
pub trait Memory {
    type Error;
    /// Transactions that have announced keys and are not finished.
    fn open_transactions(&self) -> Result<Vec<OpenTransaction>, Self::Error>;
    /// The lowest seq in each of these lanes that was committed since their rewinds were taken, or is in a ready slot
    /// of the fast path. The call clears nothing, and is made after `open_transactions`.
    fn peek_rewinds(&self, destination: &str, leases: &[HeldLease]) -> Vec<(Partition, i64)>;
    /// Reads the events of committed messages that came without them, up to a number of bytes. What is missing in the
    /// result cannot be read now; a claim reports why.
    fn read_events(&self, _seqs: &[i64], _bytes: usize) -> Events {
        Events::new()
    }
    /// Withdraws these claimed messages from the fast path, also from slots whose transaction has yet to make them
    /// ready. They are in order of seq.
    fn withdraw(&self, _destination: &str, _claimed: &[(Partition, i64)]) {}
    /// Frees the slot of a message that is settled, claimed, or lost with its lease.
    fn free_slot(&self, _slot: SlotId) {}
    /// Rewinds the lane of a message that was not taken, so that it is read from the table, and frees its slot.
    fn give_up(&self, _slot: SlotId, _destination: &str, _partition: Partition, _seq: i64) {}
}
