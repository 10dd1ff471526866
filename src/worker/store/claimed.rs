//! Claims messages of leased lanes. Chooses pointers by the primary key of outbox and reads events by that of
//! outbox_events, both without a statement, then marks the rows by one: the body of outbox_internal.mark(). Chosen
//! without a plan, rows cannot be chosen by a wrong one, whatever vacuum and analyze have seen. outbox_internal.claim()
//! does the same, for workers outside and for tables whose columns a user has changed; tests/differential.rs compares
//! the two ways.

use crate::pg::catalog;
use crate::pg::key_scan::KeyScan;
use crate::pg::scan::{Is, RowSnapshot, with_snapshot};
use crate::pg::spi::types::{INT2ARRAYOID, INT8ARRAYOID, INT8OID, TEXTOID, TIDARRAYOID, TIMESTAMPTZOID};
use crate::pg::spi::{Param, SpiClient, SpiResult};
use crate::pg::table::{Row, Table};
use crate::pg::text;
use crate::pg::txn::{Xid, commit_position};
use crate::store::rows::{self, EVENT, MESSAGE};
use crate::store::statement::SavedStatement;
use outbox_core::engine::{CLAIM_BYTES_MAX, ClaimLimits, Lane, RowId};
use outbox_core::message::Event;
use outbox_worker::protocol::{self, ClaimedBatch, Marked};
use pgrx::datum::TimestampWithTimeZone;
use pgrx::spi::quote_identifier;
use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;

pub struct ClaimedRows {
    outbox: u32,
    events: u32,
    read_leases: SavedStatement,
    mark: SavedStatement,
}

/// A row of outbox that may be claimed.
struct Chosen {
    row_id: RowId,
    written_by: Xid,
    partition: i16,
    seq: i64,
    /// Of an earlier claim, which ended without a settle.
    token: Option<i64>,
    crashes: i32,
}

/// The event of a chosen row, or why it cannot be read.
type Read = Result<Event, String>;

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
        // Its call would be planned each time, and cost more than the statement.
        let body =
            "select prosrc from pg_proc where proname = 'mark' and pronamespace = 'outbox_internal'::regnamespace";
        let mark: Option<String> = client.select(body, Some(1), &[])?.first().get_one()?;
        let marks = [
            TIDARRAYOID,
            INT8ARRAYOID,
            TEXTOID,
            INT2ARRAYOID,
            INT8ARRAYOID,
            INT8OID,
            TIMESTAMPTZOID,
        ];
        Ok(Self {
            outbox: table(c"outbox"),
            events: table(c"outbox_events"),
            read_leases: client.prepare(&read_leases, &[TEXTOID, TEXTOID, INT2ARRAYOID])?.into(),
            mark: client.prepare_mut(&mark.unwrap_or_default(), &marks)?.into(),
        })
    }

    /// None if nothing was done, because the rows of these tables must be chosen by a statement.
    pub fn claim(
        &self,
        client: &mut SpiClient,
        worker: &str,
        destination: &str,
        lanes: &[Lane],
        limits: ClaimLimits,
    ) -> SpiResult<Option<ClaimedBatch>> {
        let (outbox, events) = (Table::open(self.outbox), Table::open_to_read(self.events));
        let is_known = outbox.has(&MESSAGE) && outbox.may_read() && events.has(&EVENT) && events.may_read();
        // One snapshot for leases, pointers and events: a row that a later owner of the lease has claimed must not look
        // like one of an earlier owner. It lasts until the rows are marked, so no other row takes their places.
        let tables = (&outbox, &events);
        let claim =
            |snapshot: &RowSnapshot| self.claim_by(snapshot, client, worker, destination, (lanes, limits), tables);
        let claimed = is_known.then(|| with_snapshot(claim)).transpose()?;
        events.close();
        outbox.close();
        Ok(claimed.flatten())
    }

    fn claim_by(
        &self,
        snapshot: &RowSnapshot,
        client: &mut SpiClient,
        worker: &str,
        destination: &str,
        (lanes, limits): (&[Lane], ClaimLimits),
        tables: (&Table, &Table),
    ) -> SpiResult<Option<ClaimedBatch>> {
        let mut claimed = ClaimedBatch::default();
        let leases = self.leases(client, worker, destination, lanes)?;
        claimed.batch.is_paused = leases.is_paused;
        if leases.is_paused {
            return Ok(Some(claimed));
        }
        let mine = |lane: &&Lane| leases.held.contains(&(Some(lane.partition.as_i16()), Some(lane.epoch)));
        let mine = lanes.iter().filter(mine);
        let Some(chosen) = choose(snapshot, tables, destination, mine, limits, &mut claimed.batch.cut) else {
            return Ok(None);
        };
        self.mark(client, worker, destination, lanes, chosen, &mut claimed)?;
        Ok(Some(claimed))
    }

    fn leases(&self, client: &SpiClient, worker: &str, destination: &str, lanes: &[Lane]) -> SpiResult<ClaimRights> {
        let args = [worker.into(), destination.into(), partitions(lanes).into()];
        let rows = client.select(&*self.read_leases, None, &args)?;
        let mut leases = ClaimRights::default();
        for row in rows {
            leases.held.insert((row.get(1)?, row.get(2)?));
            leases.is_paused = row.get(3)? == Some(true);
        }
        Ok(leases)
    }

    /// Marks the chosen rows. Those that the statement returns are claimed.
    fn mark(
        &self,
        client: &mut SpiClient,
        worker: &str,
        destination: &str,
        lanes: &[Lane],
        chosen: Vec<(Chosen, Read)>,
        claimed: &mut ClaimedBatch,
    ) -> SpiResult<()> {
        if chosen.is_empty() {
            return Ok(());
        }
        let row_ids: Vec<RowId> = chosen.iter().map(|(row, _)| row.row_id).collect();
        let tokens: BTreeSet<i64> = chosen.iter().filter_map(|(row, _)| row.token).collect();
        let args = [
            Param::row_ids(&row_ids),
            tokens.into_iter().collect::<Vec<_>>().into(),
            worker.into(),
            partitions(lanes).into(),
            protocol::epochs(lanes.iter().map(|lane| (lane.partition, lane.epoch))).into(),
            None::<i64>.into(),
            None::<TimestampWithTimeZone>.into(),
        ];
        let destination: Arc<str> = destination.into();
        let mut marked: Vec<Marked> = (client.update(&*self.mark, None, &args)?)
            .map(|row| protocol::marked(&row, &destination))
            .collect::<SpiResult<_>>()?;
        marked.sort_unstable_by_key(|(_, pointer, _)| (pointer.seq, pointer.partition.as_i16()));
        claimed.batch.missed = marked.len() < chosen.len();
        // Both are in order of seq.
        let mut chosen = chosen.into_iter();
        for marked in marked {
            let is_it =
                |(row, _): &(Chosen, Read)| (row.seq, row.partition) == (marked.1.seq, marked.1.partition.as_i16());
            let Some((row, event)) = chosen.find(is_it) else {
                break;
            };
            claimed.wal_position = claimed.wal_position.max(commit_position(row.written_by));
            claimed.batch.rows.push(protocol::with_event(marked, event));
        }
        Ok(())
    }
}

fn partitions(lanes: &[Lane]) -> Vec<i16> {
    lanes.iter().map(|lane| lane.partition.as_i16()).collect()
}

/// What this worker may claim.
#[derive(Default)]
struct ClaimRights {
    held: HashSet<(Option<i16>, Option<i64>)>,
    is_paused: bool,
}

/// The next messages of the lanes with their events, in order of seq, up to the limits of rows and bytes. None: a table
/// has no primary key to scan.
fn choose<'a>(
    snapshot: &RowSnapshot,
    (outbox, events): (&Table, &Table),
    destination: &str,
    lanes: impl Iterator<Item = &'a Lane>,
    limits: ClaimLimits,
    is_cut: &mut bool,
) -> Option<Vec<(Chosen, Read)>> {
    let mut by_lane = KeyScan::begin(outbox, &MESSAGE, ["destination", "partition", "seq"], snapshot)?;
    let Some(by_seq) = KeyScan::begin(events, &EVENT, ["seq"], snapshot) else {
        by_lane.end();
        return None;
    };
    let mut events = EventScan {
        by_seq,
        run_end: i64::MIN,
        at: None,
    };
    let (destination, mut rows) = (text::to_server(destination), Vec::new());
    lanes.for_each(|lane| find(&mut by_lane, &destination, lane, &mut rows));
    rows.sort_unstable_by_key(|row| (row.seq, row.partition));
    *is_cut = rows.len() > limits.rows as usize;
    rows.truncate(limits.rows as usize);
    let chosen = read(&mut events, rows, limits.bytes, is_cut);
    events.by_seq.end();
    by_lane.end();
    Some(chosen)
}

/// Finds the next messages of a lane. A row that an earlier epoch claimed counts as unclaimed: the new owner of a lease
/// takes over all unsettled rows.
fn find(by_lane: &mut KeyScan, destination: &[u8], lane: &Lane, found: &mut Vec<Chosen>) {
    let end = found.len() + lane.limit as usize;
    by_lane.find(&[
        (1, Is::Text(destination)),
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
        let (seq, partition, crashes) = (rows::seq(&row), rows::partition(&row), rows::crashes(&row));
        let Some((row_id, written_by)) = by_lane.place() else {
            break;
        };
        found.push(Chosen {
            row_id,
            written_by,
            partition,
            seq,
            token,
            crashes: crashes + i32::from(token.is_some()),
        });
    }
}

/// Reads the events of rows that are in order of seq, until their bodies reach the limit of bytes.
fn read(events: &mut EventScan, rows: Vec<Chosen>, bytes_max: usize, is_cut: &mut bool) -> Vec<(Chosen, Read)> {
    let runs = rows.chunk_by(|one, next| one.seq + 1 == next.seq);
    let run_ends: Vec<_> = runs
        .flat_map(|run| run.iter().map(|_| run[run.len() - 1].seq))
        .collect();
    let (mut bytes_before, mut chosen) = (0, Vec::with_capacity(rows.len()));
    for (row, run_end) in rows.into_iter().zip(run_ends) {
        if bytes_before >= bytes_max as i64 {
            *is_cut = true;
            break;
        }
        let stored = events.find(row.seq, run_end);
        let body_bytes = stored.as_ref().map_or(0, rows::body_bytes);
        bytes_before += i64::from(body_bytes) + crash_weight(row.crashes);
        let event = stored.map_or(Ok(Event::default()), |stored| rows::event(&stored, row.seq));
        chosen.push((row, event.map_err(|why| why.to_string())));
    }
    chosen
}

/// Events by ascending seq. One scan reads a run of seqs without a gap: to find each costs more than to go on.
struct EventScan<'a> {
    by_seq: KeyScan<'a>,
    /// The last seq of the run.
    run_end: i64,
    /// The seq of the row that was read last; None: the run has no more.
    at: Option<i64>,
}

impl EventScan<'_> {
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
