//! The interfaces of an engine: the tables, and what sessions publish in shared memory. Both hosts of a worker
//! implement them, and so does a simulation.

use super::batch::Batch;
use super::rows::{Claimed, Held, Lane, Settlement};
use crate::key_order::{Found, OrderedKey};
use crate::open_transactions::OpenTransaction;
use crate::partition::Partition;

/// Where the messages are that came due, and the time in ms until the next is due.
pub type Due = (Vec<(Partition, i64)>, Option<u64>);

/// The tables. Each call is a separate transaction.
pub trait Store {
    type RowId: Clone;
    type Error;
    /// Ends claimed messages; rows that are gone or no longer belong to this worker are skipped.
    fn settle(&mut self, batch: &[Settlement<Self::RowId>]) -> Result<(), Self::Error>;
    /// Claims rows of leased lanes.
    fn claim(&mut self, lanes: &[Lane]) -> Result<Batch<Self::RowId>, Self::Error>;
    /// Claims rows of any lane, with leasing off.
    fn claim_unleased(&mut self, limit: u32) -> Result<Batch<Self::RowId>, Self::Error>;
    /// Claims the first rows of a key that wait behind another, with a seq up to `read_limit`. The flag: there are
    /// more.
    fn claim_waiting(
        &mut self,
        key: &OrderedKey,
        epoch: i64,
        read_limit: i64,
        limit: u32,
    ) -> Result<(Batch<Self::RowId>, bool), Self::Error>;
    /// Brings back due messages, of these leases; None = of all partitions.
    fn bring_due(&mut self, leases: Option<&[Held]>) -> Result<Due, Self::Error>;
    /// The keys that are blocked or have messages waiting behind another.
    fn blocked_keys(&mut self, partitions: &[Partition]) -> Result<Vec<Found>, Self::Error>;
}

/// What sessions publish to the workers.
pub trait Memory {
    /// Publishes the commits of prepared transactions that have ended: no session does it.
    fn notice_prepared(&self);
    /// Transactions that have enqueued and are not over.
    fn open_transactions(&self) -> Vec<OpenTransaction>;
    /// Takes the lowest seq committed in a partition since the last call, if any.
    fn take_rewind(&self, partition: Partition) -> Option<i64>;
    /// Reads it without taking it; the lowest seq of a message in a slot counts too.
    fn peek_rewind(&self, partition: Partition) -> Option<i64>;
    /// These are claimed: their messages in slots, now or later, must not take the fast path.
    fn revoke(&self, _claimed: &[(Partition, i64)]) {}
    /// A counter that grows when a message was scheduled, or a person changed waiting messages.
    fn waiting_changes(&self) -> u32;
}

/// The id of a message's slot in shared memory, given by the session that filled it.
pub type SlotId = u32;

/// The messages that sessions copied into slots for the worker of their lanes, for one destination.
pub trait FastPath<P> {
    /// Takes the ready messages of lanes that this worker owns. Each keeps its slot until it is let go or given up.
    fn take(&self) -> Vec<(SlotId, Claimed<P>)>;
    /// Frees the slot.
    fn let_go(&self, slot: SlotId);
    /// The message does not take the fast path: it must be read from the table.
    fn give_up(&self, slot: SlotId, partition: Partition, seq: i64);
}
