//! The rows that pass between the engine and the tables: lanes to claim from, claimed messages, and messages to settle.

use crate::message::{Event, Outcome, Pointer};
use crate::partition::Partition;
use crate::settle::Disposition;

/// A lease of this worker: the partition and its epoch.
pub type Held = (Partition, i64);

/// A claimed message with its event.
#[derive(Clone, Debug)]
pub struct Claimed<P> {
    /// Where the row is in its table. Only the store interprets it.
    pub row_id: P,
    pub pointer: Pointer,
    /// The event, or the outcome of a message whose event is missing or cannot be read: Unsendable or Failed.
    pub event: Result<Event, Outcome>,
}

impl<P> Claimed<P> {
    /// The partition and the seq, which identify a message of one destination.
    pub(super) fn which(&self) -> (Partition, i64) {
        (self.pointer.partition, self.pointer.seq)
    }
}

/// One message to settle, with its disposition.
#[derive(Clone, Debug)]
pub struct Settlement<P> {
    pub row_id: P,
    pub pointer: Pointer,
    pub disposition: Disposition,
}

/// One lane of a claim. The claim returns up to `limit` rows with a seq above `cursor` and not above `read_limit`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lane {
    pub partition: Partition,
    pub epoch: i64,
    pub cursor: i64,
    pub read_limit: i64,
    pub limit: u32,
}

/// Whether all lanes have the same read limit, so that one statement can claim from all of them.
pub fn share_read_limit(lanes: &[Lane]) -> bool {
    lanes.windows(2).all(|two| two[0].read_limit == two[1].read_limit)
}
