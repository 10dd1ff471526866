//! A message on its way by the fast path: its bytes, made from the rows that the statements return, and what must still hold of
//! these rows when the transaction commits. Run by a session, in the statement that enqueues.

use super::BYTES;
use crate::event;
use crate::pg::catalog::Oid;
use crate::pg::clock::us_since_1970;
use crate::pg::seen::Seen;
use crate::pg::spi::{SpiError, SpiHeapTupleData, SpiResult};
use crate::pg::tid::Tid;
use crate::shared::lanes::Class;
use outbox_core::engine::SlotId;
use outbox_core::handoff;
use outbox_core::message::{Event, Pointer};
use outbox_core::partition::{Partition, crc32};
use pgrx::datum::TimestampWithTimeZone;

/// A message that may be laid down for its worker when this transaction commits.
pub struct Handoff {
    pub class: Class,
    pub partition: Partition,
    pub seq: i64,
    /// CRC-32 of its name.
    pub destination: u32,
    /// Its rows: in `outbox` and among the events.
    pub row: Seen,
    pub event: Seen,
    pub bytes: Vec<u8>,
    /// Where it lies, once it is laid down.
    pub slot_id: Option<SlotId>,
}

/// An event as it is stored, and where.
pub struct Stored {
    pub event: Event,
    pub at: (u32, Tid),
}

/// A message as it was inserted.
pub struct Inserted {
    pub seq: i64,
    pub partition: Partition,
    /// With when it was enqueued, in µs since 1970. None: it does not wait in `outbox`.
    pub at: Option<(u32, Tid, i64)>,
}

/// What the statement that stores an event returns after seq and size: where it is, then the columns of `event_text`. JSON of a
/// body that cannot fit is NULL.
pub fn event_columns() -> String {
    let columns = event::columns_sql(|column| {
        format!("case when e.body_bytes operator(pg_catalog.<) {BYTES} then e.{column}::pg_catalog.text end")
    });
    format!(", e.body_bytes operator(pg_catalog.<) {BYTES}, e.ctid, {columns}")
}

/// What the statement that stores a message returns after partition and seq.
pub const MESSAGE: &str = ", tableoid, ctid, enqueued_at";

/// None: it is too large, or cannot be read.
pub fn stored(row: &SpiHeapTupleData, table: u32) -> SpiResult<Option<Stored>> {
    match read(row, table) {
        Err(SpiError::Unreadable { .. }) => Ok(None), // the worker that claims it says why
        stored => stored,
    }
}

fn read(row: &SpiHeapTupleData, table: u32) -> SpiResult<Option<Stored>> {
    let (Some(seq), Some(true), Some(tid)) = (row.get(1)?, row.get(3)?, row.get(4)?) else {
        return Ok(None);
    };
    Ok(Some(Stored {
        event: event::read(row, 5, seq)?,
        at: (table, tid),
    }))
}

impl Stored {
    pub fn seq(&self) -> i64 {
        self.event.seq
    }
}

impl Inserted {
    /// A row of partition, seq and, if it waits in `outbox`, [`MESSAGE`].
    pub fn read(row: &SpiHeapTupleData, in_outbox: bool) -> SpiResult<Option<Self>> {
        let index: i16 = row.get(1)?.unwrap_or_default();
        let Ok(partition) = Partition::new(i64::from(index)) else {
            return Ok(None);
        };
        let at = match in_outbox {
            true => {
                let (table, tid): (Option<Oid>, Option<Tid>) = (row.get(3)?, row.get(4)?);
                let enqueued_at: Option<TimestampWithTimeZone> = row.get(5)?;
                (table.zip(tid).zip(enqueued_at)).map(|((table, tid), at)| (table.into(), tid, us_since_1970(at)))
            }
            false => None,
        };
        let seq = row.get(2)?.unwrap_or_default();
        Ok(Some(Self { seq, partition, at }))
    }

    /// None: it is too large, or its rows are not as they were written any more.
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
