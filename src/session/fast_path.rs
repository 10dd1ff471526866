//! The fast path as a session sees it: which messages take it, their bytes, and the end of the transaction. The module
//! `shared::fast_path` has the order of the steps. Runs in a user's backend, on its main thread.
//!
//! A message that misses one of these conditions goes through the table alone:
//!
//! | condition | checked in |
//! |---|---|
//! | outbox.fast_path is on, and there is shared memory | `is_on` |
//! | the message is due now, and never expires | `Times::are_unset` |
//! | its transaction has few others on the fast path | `is_room` |
//! | its event is small and can be read; one in a source is read by the worker after COMMIT | `may_fit`, `stored`, `Inserted::handoff` |
//! | COMMIT waits until the transaction is on disk | `copy_to_slot` |
//! | its rows are still as they were written | `copy_to_slot` |
//! | its lane has a worker in this server, and a slot is free | `shared::fast_path` |

use crate::config;
use crate::event;
use crate::pg::catalog::Oid;
use crate::pg::clock::us_since_1970;
use crate::pg::seen::Seen;
use crate::pg::spi::{SpiError, SpiHeapTupleData, SpiResult};
use crate::pg::xact;
use crate::shared::databases::DatabaseEntry;
use crate::shared::fast_path::{self, BYTES, Handoff};
use outbox_core::engine::RowId;
use outbox_core::handoff;
use outbox_core::message::{Event, Pointer};
use outbox_core::partition::{Partition, crc32};
use outbox_worker::rewinds::RewindGroup;
use pgrx::datum::TimestampWithTimeZone;

/// The most messages of one transaction on the fast path. A claim takes more of them together at less cost.
const MESSAGES_MAX: usize = 8;

/// Whether any message may take the fast path.
pub fn is_on() -> bool {
    config::fast_path() && fast_path::is_there()
}

/// Whether a transaction with `before` fast-path messages may add `more`.
pub fn is_room(before: usize, more: usize) -> bool {
    more > 0 && before + more <= MESSAGES_MAX
}

/// Whether an event with a body of this size may fit into a slot. The event is copied only if it may.
pub fn may_fit(body_bytes: usize) -> bool {
    body_bytes < BYTES
}

// ---- the statement that enqueues
// --------------------------------------------------------------------------------------

/// What goes with a message on the fast path.
#[derive(Clone, Copy)]
pub enum With<'a> {
    Event(&'a Stored),
    /// Nothing: its event is in a source. Its row may still change, and only core knows how to read it.
    Nothing,
}

/// An event as it is stored, with the OID of its table and its ctid.
pub struct Stored {
    pub event: Event,
    pub at: (u32, RowId),
}

/// A message as it was inserted.
pub struct Inserted {
    pub seq: i64,
    pub partition: Partition,
    /// The OID of its table, its ctid, and when it was enqueued, in µs since 1970. None: it does not wait in `outbox`.
    pub at: Option<(u32, RowId, i64)>,
}

/// The columns from which [`stored`] reads an event `e`: whether it is small enough, its ctid, and the columns of
/// `event_text`; empty if no event is wanted, because a statement without them takes an eighth less time.
pub fn event_columns(is_wanted: bool) -> String {
    if !is_wanted {
        return String::new();
    }
    let fits = format!("e.body_bytes operator(pg_catalog.<) {BYTES}");
    format!(", {fits}, e.ctid, {}", event::columns_sql(&fits))
}

/// The columns that the statement that stores a message returns after partition and seq.
pub const MESSAGE: &str = ", tableoid, ctid, enqueued_at";

/// Reads a stored event: its seq in the first column, and [`event_columns`] from `first` on. None: it is too large for
/// a slot, or cannot be read.
pub fn stored(row: &SpiHeapTupleData, table: u32, first: usize) -> SpiResult<Option<Stored>> {
    match read(row, table, first) {
        Err(SpiError::Unreadable { .. }) => Ok(None), // the worker that claims it reports why
        stored => stored,
    }
}

fn read(row: &SpiHeapTupleData, table: u32, first: usize) -> SpiResult<Option<Stored>> {
    let (Some(seq), Some(true), Some(tid)) = (row.get(1)?, row.get(first)?, row.get(first + 1)?) else {
        return Ok(None);
    };
    Ok(Some(Stored {
        event: event::read(row, first + 2, seq)?,
        at: (table, tid),
    }))
}

impl Inserted {
    /// Reads a row of partition, seq and, if the message waits in `outbox`, [`MESSAGE`].
    pub fn read(row: &SpiHeapTupleData, in_outbox: bool) -> SpiResult<Option<Self>> {
        let index: i16 = row.get(1)?.unwrap_or_default();
        let Ok(partition) = Partition::new(i64::from(index)) else {
            return Ok(None);
        };
        let at = match in_outbox {
            true => {
                let (table, tid): (Option<Oid>, Option<RowId>) = (row.get(3)?, row.get(4)?);
                let enqueued_at: Option<TimestampWithTimeZone> = row.get(5)?;
                (table.zip(tid).zip(enqueued_at)).map(|((table, tid), at)| (table.into(), tid, us_since_1970(at)))
            }
            false => None,
        };
        let seq = row.get(2)?.unwrap_or_default();
        Ok(Some(Self { seq, partition, at }))
    }

    /// Makes the handoff of this message. None: it is too large for a slot, or its rows have changed since they were
    /// written.
    pub fn handoff(&self, with: With, destination: &str, key: Option<String>) -> Option<Handoff> {
        let (table, tid, enqueued_at_us) = self.at?;
        let pointer = Pointer {
            seq: self.seq,
            destination: destination.into(),
            partition: self.partition,
            key,
            attempts: 0,
            crashes: 0,
            lease_epoch: 0,
            replayed: false,
            enqueued_at_us,
            expires_at_us: None,
        };
        let stored = match with {
            With::Event(stored) => Some(stored),
            With::Nothing => None,
        };
        let bytes = handoff::pack(&pointer, stored.map(|stored| &stored.event));
        if bytes.len() > BYTES {
            return None;
        }
        let event = match stored {
            Some(stored) => Some(Seen::of(stored.at.0, stored.at.1, self.seq)?),
            None => None,
        };
        Some(Handoff {
            lane: RewindGroup::of(destination).lane(self.partition),
            partition: self.partition,
            seq: self.seq,
            destination: crc32(destination),
            row: Seen::of(table, tid, self.seq)?,
            event,
            bytes,
            slot_id: None,
        })
    }
}

// ---- the end of the transaction
// ---------------------------------------------------------------------------------------

/// Before COMMIT: copies the messages into slots before any other process can see their rows.
pub fn copy_to_slot(handoffs: &mut [Handoff]) {
    if !xact::commits_durably() {
        return;
    }
    for handoff in handoffs {
        // A row that was changed since is read from the table.
        if handoff.row.is_current() && handoff.event.is_none_or(|event| event.is_current()) {
            handoff.slot_id = fast_path::copy_to_slot(handoff);
        }
    }
}

/// After COMMIT: marks the slots ready for the workers of their lanes, or rewinds the lanes so that the workers read
/// the rows.
pub fn hand_over(database: &DatabaseEntry, handoffs: &mut [Handoff]) {
    for handoff in handoffs {
        let slot_id = handoff.slot_id.take();
        if !slot_id.is_some_and(|slot_id| fast_path::ready(slot_id, handoff.lane, handoff.partition)) {
            database.rewind_to(handoff.lane, handoff.partition, handoff.seq);
        }
    }
}

/// Frees the slots that are left when the transaction is over: their messages were not committed.
pub fn take_back(handoffs: &mut [Handoff]) {
    handoffs
        .iter_mut()
        .filter_map(|handoff| handoff.slot_id.take())
        .for_each(fast_path::free);
}
