//! A message on the fast path: its bytes, and the versions of its rows. The bytes are made from the rows that the
//! statements return. The versions must still be current when the transaction commits. Run by a session, in the
//! statement that enqueues.

use super::BYTES;
use crate::event;
use crate::pg::catalog::Oid;
use crate::pg::clock::us_since_1970;
use crate::pg::seen::Seen;
use crate::pg::spi::{SpiError, SpiHeapTupleData, SpiResult};
use crate::shared::lanes::Class;
use outbox_core::engine::{RowId, SlotId};
use outbox_core::handoff;
use outbox_core::message::{Event, Pointer};
use outbox_core::partition::{Partition, crc32};
use pgrx::datum::TimestampWithTimeZone;

/// A message that may be copied into a slot when this transaction commits.
pub struct Handoff {
    pub class: Class,
    pub partition: Partition,
    pub seq: i64,
    /// CRC-32 of the destination's name.
    pub destination: u32,
    /// Its row in `outbox`, and the row of its event.
    pub row: Seen,
    pub event: Seen,
    /// Message and event, encoded by crates/core/src/handoff.rs.
    pub bytes: Vec<u8>,
    /// Its slot, once it is copied into one.
    pub slot_id: Option<SlotId>,
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

/// The columns that a statement returns of an event after seq and size. They are whether it may take the fast path, its
/// ctid, and the columns of `event_text`. `wanted`: a condition without which it may not.
pub fn event_columns(wanted: &str) -> String {
    let fits = format!("{wanted} and e.body_bytes operator(pg_catalog.<) {BYTES}");
    format!(", {fits}, e.ctid, {}", event::columns_sql(&fits))
}

/// The ordinal of the column behind these.
pub const AFTER_EVENT: usize = event::created_at(EVENT) + 2;
const EVENT: usize = 5;

/// The columns that the statement that stores a message returns after partition and seq.
pub const MESSAGE: &str = ", tableoid, ctid, enqueued_at";

/// Reads a stored event. None: it is too large for a slot, or cannot be read.
pub fn stored(row: &SpiHeapTupleData, table: u32) -> SpiResult<Option<Stored>> {
    match read(row, table) {
        Err(SpiError::Unreadable { .. }) => Ok(None), // the worker that claims it reports why
        stored => stored,
    }
}

fn read(row: &SpiHeapTupleData, table: u32) -> SpiResult<Option<Stored>> {
    let (Some(seq), Some(true), Some(tid)) = (row.get(1)?, row.get(3)?, row.get(4)?) else {
        return Ok(None);
    };
    Ok(Some(Stored {
        event: event::read(row, EVENT, seq)?,
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
    pub fn handoff(&self, stored: Stored, destination: &str, key: Option<String>) -> Option<Handoff> {
        let (table, tid, enqueued_at_us) = self.at?;
        let pointer = Pointer {
            seq: self.seq,
            destination: destination.to_owned(),
            partition: self.partition,
            key,
            attempts: 0,
            crashes: 0,
            lease_epoch: 0,
            replayed: false,
            enqueued_at_us,
            expires_at_us: None,
        };
        let bytes = handoff::pack(&pointer, &stored.event);
        if bytes.len() > BYTES {
            return None;
        }
        Some(Handoff {
            class: Class::of(destination),
            partition: self.partition,
            seq: self.seq,
            destination: crc32(destination),
            row: Seen::of(table, tid, self.seq)?,
            event: Seen::of(stored.at.0, stored.at.1, self.seq)?,
            bytes,
            slot_id: None,
        })
    }
}
