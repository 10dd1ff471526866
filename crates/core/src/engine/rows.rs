//! The rows that pass between the engine and the tables: lanes to claim from, claimed messages, and messages to settle.

use crate::message::{Event, Outcome, Pointer};
use crate::partition::Partition;
use crate::settle::Disposition;
use std::collections::HashSet;
use std::fmt;
use std::str::FromStr;

/// The place of a row in its table, the type `tid`: block number and line pointer, as in `(7,1)`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RowId {
    pub block: u32,
    pub line: u16,
}

impl fmt::Display for RowId {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "({},{})", self.block, self.line)
    }
}

impl FromStr for RowId {
    type Err = ();

    fn from_str(tid: &str) -> Result<Self, ()> {
        let inside = tid.strip_prefix('(').and_then(|tid| tid.strip_suffix(')'));
        let (block, line) = inside.and_then(|inside| inside.split_once(',')).ok_or(())?;
        Ok(Self {
            block: block.parse().map_err(drop)?,
            line: line.parse().map_err(drop)?,
        })
    }
}

/// A lease of this worker: the partition and its epoch.
pub type HeldLease = (Partition, i64);

/// The number of a fast-path slot in shared memory. The engine passes it back and never interprets it.
pub type SlotId = u32;

/// The leases to claim from: without those that another worker is to take over.
pub fn claimable(leases: &[HeldLease], leaving: &HashSet<Partition>) -> Vec<HeldLease> {
    (leases.iter().copied())
        .filter(|(partition, _)| !leaving.contains(partition))
        .collect()
}

/// A claimed message with its event.
#[derive(Clone, Debug)]
pub struct Claimed {
    pub row_id: RowId,
    pub pointer: Pointer,
    /// The event, or the outcome of a message whose event is missing or cannot be read: Unsendable or Failed.
    pub event: Result<Event, Outcome>,
}

/// A message of the fast path that the worker has taken from its slot.
#[derive(Clone, Debug)]
pub struct Arrived {
    pub slot: SlotId,
    pub row_id: RowId,
    pub pointer: Pointer,
    /// None: it is in a source, and the worker reads it once it takes the message.
    pub event: Option<Event>,
}

/// One message to settle, with its disposition.
#[derive(Clone, Debug)]
pub struct Settlement {
    pub row_id: RowId,
    pub pointer: Pointer,
    pub disposition: Disposition,
}

/// The limits of one claim. It returns at least one message, if there is any.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClaimLimits {
    pub rows: u32,
    /// Of the bodies.
    pub bytes: usize,
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
