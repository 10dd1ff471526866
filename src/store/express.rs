//! What is enqueued, on its way to shared memory: the event and the message as statements return them, made into a parcel
//! for the end of the transaction (`crate::wake`). In a user's backend.

use super::enqueue::Statements;
use super::us_since_1970;
use crate::express::BYTES;
use crate::pg::catalog::Oid;
use crate::pg::guc;
use crate::pg::seen::Seen;
use crate::pg::spi::{SpiClient, SpiError, SpiHeapTupleData, SpiResult};
use crate::pg::tid::Tid;
use crate::shmem::Class;
use crate::wake::Parcel;
use outbox_core::message::{Event, Pointer};
use outbox_core::parcel;
use outbox_core::partition::{Partition, crc32};
use pgrx::datum::TimestampWithTimeZone;
use pgrx::{PgBuiltInOids, PgOid};
use std::collections::HashMap;

/// An event as it is stored, and where.
pub struct Stored {
    pub(super) event: Event,
    pub(super) place: (u32, Tid),
}

/// A message as it was inserted.
pub struct Inserted {
    pub seq: i64,
    pub partition: Partition,
    /// With when it was enqueued, in µs since 1970. None: it does not wait in `outbox`.
    pub(super) place: Option<(u32, Tid, i64)>,
}

/// What the statement that stores an event returns after seq and size: what the view outbox_internal.event_text shows of it.
pub const EVENT: &str = ", e.ctid, e.id::pg_catalog.text, e.type, e.aggregate_type, e.aggregate_id, e.operation,
    case when e.body_bytes operator(pg_catalog.<) 4000 then e.payload::pg_catalog.text end,
    case when e.body_bytes operator(pg_catalog.<) 4000 then e.previous_payload::pg_catalog.text end,
    case when e.body_bytes operator(pg_catalog.<) 4000 then e.metadata::pg_catalog.text end,
    case when e.body_bytes operator(pg_catalog.<) 4000 then e.headers::pg_catalog.text end, e.actor, e.correlation_id,
    pg_catalog.to_char(e.created_at at time zone 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.US\"Z\"'),
    pg_catalog.floor(extract(epoch from e.created_at))::pg_catalog.int8";

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

/// Events that were stored earlier, or by another statement, by their seq.
pub fn look_up(client: &mut SpiClient, statements: &Statements, seqs: Vec<i64>) -> SpiResult<HashMap<i64, Stored>> {
    let select = match statements.express.get() {
        Some(select) => select,
        None => {
            let sql = format!(
                "select e.seq, e.body_bytes{EVENT} from {}.outbox_events e where e.seq operator(pg_catalog.=) any ($1)",
                statements.schema
            );
            let prepared = client
                .prepare_mut(sql.as_str(), &[PgOid::from(PgBuiltInOids::INT8ARRAYOID)])?
                .keep();
            statements.express.get_or_init(|| prepared)
        }
    };
    let rows = guc::planned_once(|| client.update(select, None, &[seqs.into()]))?;
    let found = rows.map(|row| stored(&row, statements.event_table));
    let found: Vec<Option<Stored>> = found.collect::<SpiResult<_>>()?;
    Ok(found
        .into_iter()
        .flatten()
        .map(|stored| (stored.event.seq, stored))
        .collect())
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
