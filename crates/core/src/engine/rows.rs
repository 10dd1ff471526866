//! Rows of the tables as a worker holds them: lanes that it claims from, messages that it has claimed, and how each
//! ended.

use crate::message::{Event, Outcome, Pointer};
use crate::partition::Partition;
use crate::settle::Disposition;

/// A lease that is held: the partition and its epoch.
pub type Held = (Partition, i64);

/// A claimed message with its event.
#[derive(Clone, Debug)]
pub struct Claimed<P> {
    /// The id of the row, in the form of the store.
    pub row_id: P,
    pub pointer: Pointer,
    /// Or the outcome of a message whose event is missing or cannot be read: Unsendable or Failed.
    pub event: Result<Event, Outcome>,
}

impl<P> Claimed<P> {
    pub(super) fn which(&self) -> (Partition, i64) {
        (self.pointer.partition, self.pointer.seq)
    }
}

/// One message to settle.
#[derive(Clone, Debug)]
pub struct Settlement<P> {
    pub row_id: P,
    pub pointer: Pointer,
    pub disposition: Disposition,
}

/// The arguments of a claim: from each lane up to `limit` rows with a seq above `cursor`, and none above `read_limit`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lane {
    pub partition: Partition,
    pub epoch: i64,
    pub cursor: i64,
    pub read_limit: i64,
    pub limit: u32,
}

/// Whether all lanes are to be read up to the same seq.
pub fn share_read_limit(lanes: &[Lane]) -> bool {
    lanes.windows(2).all(|two| two[0].read_limit == two[1].read_limit)
}
