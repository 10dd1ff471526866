//! The ports of the engine: the tables, and the shared memory that sessions write. The worker implements them for both
//! of its hosts, the server and `outboxctl work`; tests implement them for a simulation.

use super::batch::Batch;
use super::rows::{Claimed, Held, Lane, Settlement};
use crate::key_order::{Found, OrderedKey};
use crate::open_transactions::OpenTransaction;
use crate::partition::Partition;

/// The result of [`Store::bring_due`]: partition and seq of each message that was brought back to `outbox`, and the
/// time until the next message is due, in ms.
pub type Due = (Vec<(Partition, i64)>, Option<u64>);

/// The tables. Each call is a separate transaction.
pub trait Store {
    type RowId: Clone;
    type Error;
    /// Writes the dispositions of messages. Rows that are gone or no longer belong to this worker are left alone.
    fn settle(&mut self, batch: &[Settlement<Self::RowId>]) -> Result<(), Self::Error>;
    /// Claims rows of leased lanes, as [`Lane`] says.
    fn claim(&mut self, lanes: &[Lane]) -> Result<Batch<Self::RowId>, Self::Error>;
    /// Claims up to `limit` rows of any lane, with leasing off.
    fn claim_unleased(&mut self, limit: u32) -> Result<Batch<Self::RowId>, Self::Error>;
    /// Claims up to `limit` messages of a key that wait in `outbox_waiting`, in order of seq and up to `read_limit`.
    /// The flag says whether more of them wait.
    fn claim_waiting(
        &mut self,
        key: &OrderedKey,
        epoch: i64,
        read_limit: i64,
        limit: u32,
    ) -> Result<(Batch<Self::RowId>, bool), Self::Error>;
    /// Brings due messages of these leases from `outbox_waiting` back to `outbox`; None = of all partitions.
    fn bring_due(&mut self, leases: Option<&[Held]>) -> Result<Due, Self::Error>;
    /// The keys of these partitions that are blocked, or that have messages waiting in `outbox_waiting`.
    fn blocked_keys(&mut self, partitions: &[Partition]) -> Result<Vec<Found>, Self::Error>;
}

/// What sessions report to workers through shared memory.
pub trait Memory {
    /// Records the rewinds of prepared transactions that have committed by now. Their sessions cannot record them.
    fn notice_prepared(&self);
    /// Transactions that have announced keys and are not finished.
    fn open_transactions(&self) -> Vec<OpenTransaction>;
    /// The lowest seq committed in a partition since the last call, if any. The call clears it.
    fn take_rewind(&self, partition: Partition) -> Option<i64>;
    /// The lower of two seqs of a partition: the one that `take_rewind` would return, and that of the ready slots of
    /// the fast path. The call clears nothing.
    fn peek_rewind(&self, partition: Partition) -> Option<i64>;
    /// Withdraws these claimed messages from the fast path, also from slots whose transaction has yet to make them
    /// ready.
    fn revoke(&self, _claimed: &[(Partition, i64)]) {}
    /// A counter that grows when a message was scheduled: it may be due before the next read.
    fn schedules(&self) -> u32;
    /// A counter that grows when waiting messages may have been unblocked: a person changed them, or they expired.
    fn unblocks(&self) -> u32;
}

/// The number of a fast-path slot in shared memory. The engine passes it back and never interprets it.
pub type SlotId = u32;

/// The fast-path slots of the lanes of one worker, for one destination. Sessions fill them.
pub trait FastPath<P> {
    /// Takes the ready messages of the lanes that this worker owns. A slot stays taken until `let_go` or `give_up`.
    fn take(&self) -> Vec<(SlotId, Claimed<P>)>;
    /// Frees the slot: its message is settled, claimed, or lost with its lease.
    fn let_go(&self, slot: SlotId);
    /// Frees the slot, and rewinds the lane so that the message is read from the table.
    fn give_up(&self, slot: SlotId, partition: Partition, seq: i64);
}
