//! What an engine is given: the tables, and what sessions tell in memory. Both hosts of a worker implement these, and a
//! simulation does.

use super::batch::Batch;
use super::rows::{Claimed, Held, Lane, Settlement};
use crate::key_order::{Found, OrderedKey};
use crate::open_transactions::OpenTransaction;
use crate::partition::Partition;

/// Where messages are now that were brought back, and in how many ms the next is due.
pub type Due = (Vec<(Partition, i64)>, Option<u64>);

/// The tables. Each call is a transaction of its own.
pub trait Store {
    type RowId: Clone;
    type Error;
    /// Ends claimed messages; rows that are gone or no longer ours are left alone.
    fn settle(&mut self, batch: &[Settlement<Self::RowId>]) -> Result<(), Self::Error>;
    /// Claims rows of leased lanes.
    fn claim(&mut self, lanes: &[Lane]) -> Result<Batch<Self::RowId>, Self::Error>;
    /// Claims rows of any lane, with leasing off.
    fn claim_unleased(&mut self, limit: u32) -> Result<Batch<Self::RowId>, Self::Error>;
    /// Claims the first rows of a key that wait behind another, with a seq up to `reach`. The flag: more are there.
    fn claim_waiting(
        &mut self,
        key: &OrderedKey,
        epoch: i64,
        read_limit: i64,
        limit: u32,
    ) -> Result<(Batch<Self::RowId>, bool), Self::Error>;
    /// Brings back what is due, of these leases; None = of all partitions.
    fn bring_due(&mut self, leases: Option<&[Held]>) -> Result<Due, Self::Error>;
    /// The keys that are closed or have messages waiting behind another.
    fn blocked_keys(&mut self, partitions: &[Partition]) -> Result<Vec<Found>, Self::Error>;
}

/// What the sessions tell the workers at once.
pub trait Memory {
    /// Tells of what prepared transactions committed that are over by now: nobody else does.
    fn notice_prepared(&self);
    /// Transactions that have enqueued and are not over.
    fn open_transactions(&self) -> Vec<OpenTransaction>;
    /// The lowest seq committed in a partition since the last call, if any.
    fn take_rewind(&self, partition: Partition) -> Option<i64>;
    /// The same, left there; and the lowest seq that lies ready to be taken in hand.
    fn peek_rewind(&self, partition: Partition) -> Option<i64>;
    /// These are claimed: what of them may lie ready by now, or soon, is not to be taken in hand.
    fn revoke(&self, _claimed: &[(Partition, i64)]) {}
    /// Grows when something was scheduled, or a person changed what waits.
    fn waiting_changes(&self) -> u32;
}

/// Where a message lies in shared memory, in the words of the one who laid it there.
pub type SlotId = u32;

/// What sessions have laid down for the worker of their lanes, as one destination sees it.
pub trait FastPath<P> {
    /// Takes what is ready, of lanes that this worker owns. Each stays where it is until it is let go or given up.
    fn take(&self) -> Vec<(SlotId, Claimed<P>)>;
    /// Nobody needs it any more.
    fn let_go(&self, slot: SlotId);
    /// The message was not taken in hand: it shall be read from the table.
    fn give_up(&self, slot: SlotId, partition: Partition, seq: i64);
}
