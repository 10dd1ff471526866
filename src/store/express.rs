//! What `outbox_publish` has stored, on its way to shared memory: the event and the message as their statements return them,
//! as a parcel for the end of the transaction (`crate::wake`).

use super::us_since_1970;
use crate::express::BYTES;
use crate::pg::tid::Tid;
use crate::shmem::Class;
use crate::wake::Parcel;
use outbox_core::message::{Event, Pointer};
use outbox_core::parcel;
use outbox_core::partition::{Partition, crc32};
use pgrx::datum::TimestampWithTimeZone;
use pgrx::spi::{SpiHeapTupleData, SpiResult, SpiTupleTable};

/// An event as it was stored, the key of its message, and where it is.
pub struct Stored {
    event: Event,
    key: Option<String>,
    place: (u32, Tid),
}

/// What the statement that stores an event returns after seq and size: what the view outbox_event_text shows of it.
pub const EVENT: &str = ", e.ctid, e.id::pg_catalog.text, e.type, e.aggregate_type, e.aggregate_id, e.operation,
    case when e.body_bytes operator(pg_catalog.<) 4000 then e.payload::pg_catalog.text end,
    case when e.body_bytes operator(pg_catalog.<) 4000 then e.previous_payload::pg_catalog.text end,
    case when e.body_bytes operator(pg_catalog.<) 4000 then e.metadata::pg_catalog.text end,
    case when e.body_bytes operator(pg_catalog.<) 4000 then e.headers::pg_catalog.text end, e.actor, e.correlation_id,
    pg_catalog.to_char(e.created_at at time zone 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.US\"Z\"'),
    pg_catalog.floor(extract(epoch from e.created_at))::pg_catalog.int8";

/// What the statement that stores a message returns after partition and seq.
pub const MESSAGE: &str = ", tableoid, ctid, enqueued_at";

/// None: it is too large.
pub fn stored(row: &SpiTupleTable, seq: i64, table: u32, key: Option<&str>) -> SpiResult<Option<Stored>> {
    let (Some(tid), Some(payload)) = (row.get(3)?, row.get(9)?) else {
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
    let key = key.map(str::to_owned);
    Ok(Some(Stored {
        event,
        key,
        place: (table, tid),
    }))
}

/// None: it is too large.
pub fn parcel(
    row: &SpiHeapTupleData,
    stored: Stored,
    destination: &str,
    partition: Partition,
) -> SpiResult<Option<Parcel>> {
    let table: Option<pgrx::pg_sys::Oid> = row.get(3)?;
    let tid: Option<Tid> = row.get(4)?;
    let enqueued_at: Option<TimestampWithTimeZone> = row.get(5)?;
    let Stored { event, key, place } = stored;
    let (Some(table), Some(tid), Some(enqueued_at)) = (table, tid, enqueued_at) else {
        return Ok(None);
    };
    let pointer = Pointer {
        seq: event.seq,
        destination: destination.to_owned(),
        partition,
        key,
        attempts: 0,
        crashes: 0,
        lease_epoch: 0,
        replayed: false,
        enqueued_at_us: us_since_1970(enqueued_at),
        expires_at_us: None,
    };
    let bytes = parcel::pack(&pointer, &event);
    Ok((bytes.len() <= BYTES).then(|| Parcel {
        class: Class::of(destination),
        partition,
        seq: event.seq,
        destination: crc32(destination),
        row: (table.into(), tid),
        event: place,
        bytes,
        place: None,
    }))
}
