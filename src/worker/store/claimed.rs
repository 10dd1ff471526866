//! Claims messages of leased lanes without a statement: reads pointers by the primary key of outbox and events by that of
//! outbox_events, and marks the rows. outbox_internal.claim() does the same, for workers outside and for tables to which a
//! user has added anything; tests/differential.rs compares the two ways. No plan can be wrong here, whatever vacuum and
//! analyze have seen.

use crate::pg::catalog;
use crate::pg::key_scan::{Is, KeyScan, RowSnapshot, with_snapshot};
use crate::pg::spi::{SpiClient, SpiResult};
use crate::pg::table::{Row, RowCopy, Table, Value};
use crate::pg::text;
use crate::pg::txn::{Xid, commit_position};
use crate::store::rows::{self, EVENT, MESSAGE};
use crate::store::statement::SavedStatement;
use outbox_core::engine::{CLAIM_BYTES_MAX, Lane};
use outbox_core::message::{Event, Pointer};
use outbox_worker::protocol::{self, ClaimedBatch};
use pgrx::spi::quote_identifier;
use pgrx::{PgBuiltInOids, PgOid};
use std::collections::HashSet;
use std::sync::Arc;

pub struct ClaimedRows {
    outbox: u32,
    events: u32,
    read_leases: SavedStatement,
}

/// A row of outbox that may be claimed.
struct Found {
    row: RowCopy,
    written_by: Xid,
    pointer: Pointer,
    /// Its key, or why that cannot be read.
    key: Result<Option<String>, String>,
}

impl ClaimedRows {
    pub fn open(client: &SpiClient) -> SpiResult<Self> {
        let schema = catalog::extension(c"outbox").schema;
        let table = |name| catalog::table_in(schema, name);
        let name = quote_identifier(catalog::schema_name(schema));
        // A worker notices a pause later than a relay of another session, which may hold messages by then.
        let read_leases = format!(
            "select p.partition, p.lease_epoch, exists (select from {name}.outbox_paused z where z.destination = $2)
             from {name}.outbox_partitions p where p.lease_owner = $1 and p.partition = any ($3)"
        );
        let types = [
            PgBuiltInOids::TEXTOID,
            PgBuiltInOids::TEXTOID,
            PgBuiltInOids::INT2ARRAYOID,
        ];
        let types = types.map(PgOid::from);
        Ok(Self {
            outbox: table(c"outbox"),
            events: table(c"outbox_events"),
            read_leases: client.prepare(&read_leases, &types)?.keep().into(),
        })
    }

    /// None if nothing was done, because these tables need a statement.
    pub fn claim(
        &self,
        client: &SpiClient,
        worker: &str,
        destination: &str,
        lanes: &[Lane],
    ) -> SpiResult<Option<ClaimedBatch>> {
        let (outbox, events) = (Table::open(self.outbox), Table::open_to_read(self.events));
        let is_usual = outbox.is(&MESSAGE) && outbox.may_change() && events.has(&EVENT) && events.may_read();
        let claimed = is_usual.then(|| {
            with_snapshot(|snapshot| {
                // By the snapshot of the rows: a row that a later owner of the lease has claimed must not look like one of
                // an earlier owner.
                let leases = self.leases(client, worker, destination, lanes)?;
                claim(snapshot, (&outbox, &events), &leases, destination, lanes)
            })
        });
        events.close();
        outbox.close();
        Ok(claimed.transpose()?.flatten())
    }

    fn leases(&self, client: &SpiClient, worker: &str, destination: &str, lanes: &[Lane]) -> SpiResult<Leases> {
        let partitions: Vec<i16> = lanes.iter().map(|lane| lane.partition.as_i16()).collect();
        let args = [worker.into(), destination.into(), partitions.into()];
        let rows = client.select(&*self.read_leases, None, &args)?;
        let mut leases = Leases::default();
        for row in rows {
            leases.held.insert((row.get(1)?, row.get(2)?));
            leases.is_paused = row.get(3)? == Some(true);
        }
        Ok(leases)
    }
}

/// What this worker may claim.
#[derive(Default)]
struct Leases {
    held: HashSet<(Option<i16>, Option<i64>)>,
    is_paused: bool,
}

fn claim(
    snapshot: &RowSnapshot,
    (outbox, events): (&Table, &Table),
    leases: &Leases,
    destination: &str,
    lanes: &[Lane],
) -> SpiResult<Option<ClaimedBatch>> {
    let Some(marks) = outbox.attributes(&MESSAGE, ["claim_token", "crashes"]) else {
        return Ok(None);
    };
    let Some(mut by_lane) = KeyScan::begin(outbox, &MESSAGE, ["destination", "partition", "seq"], 4, snapshot) else {
        return Ok(None);
    };
    let Some(by_seq) = KeyScan::begin(events, &EVENT, ["seq"], 2, snapshot) else {
        by_lane.end();
        return Ok(None);
    };
    let mut events = Events {
        by_seq,
        run_end: i64::MIN,
        at: None,
    };
    let mut claimed = ClaimedBatch::default();
    claimed.batch.is_paused = leases.is_paused;
    if !leases.is_paused {
        let mine = |lane: &&Lane| leases.held.contains(&(Some(lane.partition.as_i16()), Some(lane.epoch)));
        let (destination, mut found) = (destination.into(), Vec::new());
        for lane in lanes.iter().filter(mine) {
            find(&mut by_lane, &destination, lane, &mut found);
        }
        found.sort_unstable_by_key(|found| found.pointer.seq);
        take(outbox, marks, &mut events, found, &mut claimed);
    }
    events.by_seq.end();
    by_lane.end();
    Ok(Some(claimed))
}

/// Finds the next messages of a lane. A row that an earlier epoch claimed counts as unclaimed: the new owner of a lease
/// takes over all unsettled rows.
fn find(by_lane: &mut KeyScan, destination: &Arc<str>, lane: &Lane, found: &mut Vec<Found>) {
    let (raw, end) = (text::to_server(destination), found.len() + lane.limit as usize);
    by_lane.find(&[
        (1, Is::Text(&raw)),
        (2, Is::Int2(lane.partition.as_i16())),
        (3, Is::Above(lane.cursor)),
        (3, Is::AtMost(lane.read_limit)),
    ]);
    while found.len() < end
        && let Some(row) = by_lane.next()
    {
        let token = rows::claim_token(&row);
        if token == Some(lane.epoch) {
            continue;
        }
        let key = rows::key(&row).map_err(|why| why.to_string());
        let pointer = Pointer {
            crashes: rows::crashes(&row) + i32::from(token.is_some()),
            lease_epoch: lane.epoch,
            ..rows::pointer(&row, destination, lane.partition)
        };
        let (row, written_by) = by_lane.copy();
        found.push(Found {
            row,
            written_by,
            pointer,
            key,
        });
    }
}

/// Marks messages in the order of their seqs and reads their events, up to the limit of bytes. `marks`: the columns
/// claim_token and crashes.
fn take(outbox: &Table, marks: [i16; 2], events: &mut Events, found: Vec<Found>, claimed: &mut ClaimedBatch) {
    let mut bytes_before = 0;
    let seq = |found: &Found| found.pointer.seq;
    let runs = found.chunk_by(|one, next| seq(one) + 1 == seq(next));
    let run_ends: Vec<_> = runs
        .flat_map(|run| run.iter().map(|_| seq(&run[run.len() - 1])))
        .collect();
    for (found, run_end) in found.into_iter().zip(run_ends) {
        let Found {
            row,
            written_by,
            pointer,
            key,
        } = found;
        if bytes_before >= CLAIM_BYTES_MAX as i64 {
            claimed.batch.cut = true;
            return;
        }
        let stored = events.find(pointer.seq, run_end);
        let body_bytes = stored.as_ref().map_or(0, rows::body_bytes);
        bytes_before += i64::from(body_bytes) + crash_weight(pointer.crashes);
        let crashes = i16::try_from(pointer.crashes).unwrap_or(i16::MAX);
        let values = [Value::Int8(pointer.lease_epoch), Value::Int2(crashes)];
        let Some(row_id) = outbox.update(row, marks, values) else {
            claimed.batch.missed = true;
            continue;
        };
        claimed.wal_position = claimed.wal_position.max(commit_position(written_by));
        let event = stored.map_or(Ok(Event::default()), |row| rows::event(&row, pointer.seq));
        let event = event.map_err(|why| why.to_string());
        claimed
            .batch
            .rows
            .push(protocol::with_event(row_id, pointer, key, event));
    }
}

/// Events by ascending seq. One scan reads a run of seqs without a gap: to find each costs more than to go on.
struct Events<'a> {
    by_seq: KeyScan<'a>,
    /// The last seq of the run.
    run_end: i64,
    /// The seq of the row that was read last; None: the run has no more.
    at: Option<i64>,
}

impl Events<'_> {
    /// The event with this seq, which is in the run up to `run_end`.
    fn find(&mut self, seq: i64, run_end: i64) -> Option<Row<'_>> {
        if seq > self.run_end {
            self.by_seq.find(&[(1, Is::AtLeast(seq)), (1, Is::AtMost(run_end))]);
            self.run_end = run_end;
            self.at = self.by_seq.next().map(|row| rows::seq(&row));
        }
        while self.at.is_some_and(|at| at < seq) {
            self.at = self.by_seq.next().map(|row| rows::seq(&row));
        }
        (self.at == Some(seq)).then(|| self.by_seq.row())
    }
}

/// The same as outbox_internal.crash_weight().
fn crash_weight(crashes: i32) -> i64 {
    let whole = CLAIM_BYTES_MAX as i64;
    match crashes {
        0 => 0,
        1 => whole / 100,
        2 => whole / 10,
        _ => whole,
    }
}
