//! A message on its way by the fast path: its bytes, made from the rows that the statements return, and what must still hold of
//! these rows when the transaction commits. Run by a session, in the statement that enqueues.

use super::BYTES;
use crate::pg::catalog::Oid;
use crate::pg::clock::us_since_1970;
use crate::pg::seen::Seen;
use crate::pg::spi::{SpiError, SpiHeapTupleData, SpiResult};
use crate::pg::tid::Tid;
use crate::shared::lanes::Class;
use outbox_core::engine::Place;
use outbox_core::message::{Event, Pointer};
use outbox_core::parcel;
use outbox_core::partition::{Partition, crc32};
use pgrx::datum::TimestampWithTimeZone;

/// A message that may be laid down for its worker when this transaction commits.
pub struct Parcel {
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
    pub place: Option<Place>,
}

/// An event as it is stored, and where.
pub struct Stored {
    pub event: Event,
    pub place: (u32, Tid),
}

/// A message as it was inserted.
pub struct Inserted {
    pub seq: i64,
    pub partition: Partition,
    /// With when it was enqueued, in µs since 1970. None: it does not wait in `outbox`.
    pub place: Option<(u32, Tid, i64)>,
}

/// The columns that the statement which stores an event returns after seq and size, as the view outbox_internal.event_text shows them. A
/// body that cannot fit is NULL.
pub fn event_columns() -> String {
    let body =
        |column| format!("case when e.body_bytes operator(pg_catalog.<) {BYTES} then e.{column}::pg_catalog.text end");
    format!(
        ", e.ctid, e.id::pg_catalog.text, e.type, e.aggregate_type, e.aggregate_id, e.operation,
    {}, {}, {}, {}, e.actor, e.correlation_id,
    pg_catalog.to_char(e.created_at at time zone 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.US\"Z\"'),
    pg_catalog.floor(extract(epoch from e.created_at))::pg_catalog.int8",
        body("payload"),
        body("previous_payload"),
        body("metadata"),
        body("headers"),
    )
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
    let (Some(seq), Some(tid), Some(payload)) = (row.get(1)?, row.get(3)?, row.get(9)?) else {
        return Ok(None);
    };
    let event = Event {
        id: row.get(4)?.unwrap_or_default(),
        seq,
        kind: row.get(5)?.unwrap_or_default(),
        aggregate_type: row.get(6)?,
        aggregate_id: row.get(7)?,
        operation: row.get(8)?,
        payload,
        previous_payload: row.get(10)?,
        metadata: row.get(11)?,
        headers: row.get(12)?,
        actor: row.get(13)?,
        correlation_id: row.get(14)?,
        created_at: row.get(15)?.unwrap_or_default(),
        created_at_s: row.get(16)?.unwrap_or_default(),
        body: None,
    };
    let place = (table, tid);
    Ok(Some(Stored { event, place }))
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
        let place = match in_outbox {
            true => {
                let (table, tid): (Option<Oid>, Option<Tid>) = (row.get(3)?, row.get(4)?);
                let enqueued_at: Option<TimestampWithTimeZone> = row.get(5)?;
                (table.zip(tid).zip(enqueued_at)).map(|((table, tid), at)| (table.into(), tid, us_since_1970(at)))
            }
            false => None,
        };
        let seq = row.get(2)?.unwrap_or_default();
        Ok(Some(Self { seq, partition, place }))
    }

    /// None: it is too large, or its rows are not as they were written any more.
    pub fn parcel(&self, stored: Stored, destination: &str, key: Option<String>) -> Option<Parcel> {
        let (table, tid, enqueued_at_us) = self.place?;
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
        let bytes = parcel::pack(&pointer, &stored.event);
        if bytes.len() > BYTES {
            return None;
        }
        Some(Parcel {
            class: Class::of(destination),
            partition: self.partition,
            seq: self.seq,
            destination: crc32(destination),
            row: Seen::of(table, tid, self.seq)?,
            event: Seen::of(stored.place.0, stored.place.1, self.seq)?,
            bytes,
            place: None,
        })
    }
}
