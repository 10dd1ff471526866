//! The SQL of a worker: it calls the functions of sql/src that make up the worker protocol. Each call is one statement
//! in the caller's transaction, as the worker role. Runs on the main thread of a worker.

pub mod maintenance;

use crate::event;
use crate::pg::catalog;
use crate::pg::clock::us_since_1970;
use crate::pg::spi::{Column, Lossy, Param, Spi, SpiClient, SpiError, SpiHeapTupleData, SpiResult};
use crate::pg::text::Unreadable;
use crate::pg::tid::Tid;
use crate::store::body::Bodies;
use crate::store::sendable;
use crate::store::source::Source;
use crate::store::statement::SavedStatement;
use outbox_core::engine::{self, Batch, Claimed, DueMessages, Held, Lane, Settlement, Sharing};
use outbox_core::key_order::{Found, OrderedKey};
use outbox_core::lease::Lease;
use outbox_core::message::{Outcome, Pointer};
use outbox_core::partition::Partition;
use outbox_core::settle::{Blocks, Disposition, Ending};
use outbox_transport::BodyFunction;
use outbox_transport::target::{Kind, split};
use outbox_worker::Described;
use pgrx::datum::TimestampWithTimeZone;
use pgrx::spi::quote_identifier;
use pgrx::{PgBuiltInOids, PgOid};
use std::cell::{OnceCell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;

/// Calls the functions of one database's outbox, as the worker role. Each call is one statement in the transaction of
/// the caller.
pub struct Store {
    pub(super) schema: String,
    worker: String,
    claim: OnceCell<SavedStatement>,
    claim_waiting: OnceCell<SavedStatement>,
    settle: OnceCell<SavedStatement>,
    /// Statements that an idle worker runs repeatedly, by their text.
    cache: RefCell<HashMap<String, Rc<SavedStatement>>>,
    /// Where events are read from, if not from outbox_events.
    source: RefCell<Option<Rc<Source>>>,
    /// The functions that make the bodies of destinations that name one.
    pub bodies: Bodies,
}

/// The destination of a claim, and the function that makes its bodies, if there is one.
#[derive(Clone, Copy)]
pub struct ClaimTarget<'a> {
    pub destination: &'a str,
    pub body: Option<&'a BodyFunction>,
}

/// The result of a claim, and the position up to which WAL must be on disk before any of it is sent.
pub struct ClaimedBatch {
    pub batch: Batch,
    pub wal_position: u64,
}

/// The most bytes of bodies that one claim may return. It bounds the memory of a worker. One message is always taken.
pub const CLAIM_BYTES_MAX: i64 = engine::CLAIM_BYTES_MAX as i64;

impl Store {
    /// Finds the schema of the extension. Call it in a transaction that holds a lock on the extension.
    pub fn open(worker: &str) -> SpiResult<Self> {
        let schema: Option<String> = Spi::get_one(
            "select n.nspname::text from pg_extension e join pg_namespace n on n.oid = e.extnamespace where e.extname = 'outbox'",
        )?;
        Ok(Self {
            schema: quote_identifier(schema.unwrap_or_default()),
            worker: worker.to_string(),
            claim: OnceCell::new(),
            claim_waiting: OnceCell::new(),
            settle: OnceCell::new(),
            cache: RefCell::default(),
            source: RefCell::default(),
            bodies: Bodies::default(),
        })
    }

    /// A query that only reads, planned once. Run it with `select`: everything else in pgrx assigns a transaction id,
    /// even `Spi::get_one`, and the commit then writes WAL.
    fn reading(&self, client: &SpiClient, sql: &str) -> SpiResult<Rc<SavedStatement>> {
        self.cached(sql, |sql| Ok(client.prepare(sql, &[])?.keep().into()))
    }

    /// A statement that writes, planned once.
    fn writing(&self, client: &SpiClient, sql: &str, types: &[PgBuiltInOids]) -> SpiResult<Rc<SavedStatement>> {
        let types: Vec<PgOid> = types.iter().map(|oid| PgOid::from(*oid)).collect();
        self.cached(sql, |sql| Ok(client.prepare_mut(sql, &types)?.keep().into()))
    }

    fn cached(&self, sql: &str, plan: impl FnOnce(&str) -> SpiResult<SavedStatement>) -> SpiResult<Rc<SavedStatement>> {
        let mut cache = self.cache.borrow_mut();
        if let Some(known) = cache.get(sql) {
            return Ok(Rc::clone(known));
        }
        let statement = Rc::new(plan(sql)?);
        cache.insert(sql.to_owned(), Rc::clone(&statement));
        Ok(statement)
    }

    /// Runs a query that only reads, planned once, and returns its one value.
    fn read_one<T: Column>(&self, sql: &str) -> SpiResult<Option<T>> {
        Spi::connect(|client| {
            let statement = self.reading(client, sql)?;
            client.select(&**statement, Some(1), &[])?.first().get_one()
        })
    }

    /// Takes over the event source that is set now. outbox_source_set() first makes the workers leave, so no worker
    /// claims with an older source. The restore of a dump does not make them leave.
    pub fn refresh_source(&self) -> SpiResult<()> {
        let now = Spi::connect(|client| {
            let statement = self.reading(client, &Source::query(&self.schema))?;
            Source::of(client.select(&**statement, Some(1), &[])?)
        })?;
        let mut known = self.source.borrow_mut();
        match (&now, &*known) {
            (None, None) => {}
            (Some(now), Some(known)) if now.is_the_same(known) => {}
            _ => *known = now.map(Rc::new),
        }
        Ok(())
    }

    /// The OID of a table of the extension.
    pub fn a_table(&self) -> SpiResult<u32> {
        let sql = format!("select $${}.outbox_settings$$::regclass::oid::bigint", self.schema);
        Ok(Spi::get_one::<i64>(&sql)?.unwrap_or_default() as u32)
    }

    pub fn sharing(&self) -> SpiResult<Sharing> {
        let leasing: Option<bool> = Spi::get_one(&format!("select leasing from {}.outbox_settings", self.schema))?;
        Ok(if leasing == Some(false) {
            Sharing::RowClaims
        } else {
            Sharing::Leases
        })
    }

    /// A text that changes when ALTER DATABASE or ALTER ROLE changes the settings of a new session.
    pub fn session_defaults(&self) -> SpiResult<String> {
        let sql =
            "select string_agg(format('%s %s %s', setdatabase, setrole, setconfig), ';' order by setdatabase, setrole)
             from pg_db_role_setting
             where setdatabase in (0, (select oid from pg_database where datname = current_database()))
               and setrole in (0, (select oid from pg_roles where rolname = current_user))";
        Ok(self.read_one::<Lossy>(sql)?.unwrap_or_default().0)
    }

    /// Why nothing may be delivered from this database; None = the database is adopted.
    pub fn not_adopted(&self) -> SpiResult<Option<String>> {
        let why = self.read_one::<Lossy>("select outbox_internal.not_adopted()")?;
        Ok(why.map(|why| why.0))
    }

    /// Records that this worker is alive. Returns the ids of all workers that are.
    pub fn heartbeat(&self, pid: i32, ttl_s: i32) -> SpiResult<Vec<String>> {
        Spi::connect_mut(|client| {
            let sql = "select * from outbox_internal.heartbeat($1, $2, $3)";
            let types = [PgBuiltInOids::TEXTOID, PgBuiltInOids::INT4OID, PgBuiltInOids::INT4OID];
            let statement = self.writing(client, sql, &types)?;
            let args = [self.worker.as_str().into(), pid.into(), ttl_s.into()];
            let rows = client.update(&**statement, None, &args)?;
            rows.map(|row| Ok(row.get::<Lossy>(1)?.unwrap_or_default().0)).collect()
        })
    }

    /// Reports the state of a destination as this worker sees it. Without a state, this worker no longer serves the
    /// destination. `rechecked_at_us`: when a session had requested the recheck, in µs since 1970.
    pub fn report(
        &self,
        destination: &str,
        state: Option<&str>,
        reason: Option<&str>,
        detail: Option<&str>,
        rechecked_at_us: Option<i64>,
    ) -> SpiResult<()> {
        let sql = "select outbox_internal.report($1, $2, $3, $4, $5, to_timestamp(0) + $6 * interval '1 microsecond')";
        let args = [
            self.worker.as_str().into(),
            destination.into(),
            state.into(),
            reason.into(),
            detail.into(),
            rechecked_at_us.into(),
        ];
        Spi::run_with_args(sql, &args)
    }

    /// The destinations of this database, with the credentials of this worker's role.
    pub fn destinations(&self) -> SpiResult<Vec<Described>> {
        Spi::connect(|client| {
            let sql =
                "select destination, server::bigint, options, paused, wrapper from outbox_internal.destinations()";
            let statement = self.reading(client, sql)?;
            client
                .select(&**statement, None, &[])?
                .map(|row| {
                    let server: Option<i64> = row.get(2)?;
                    let options: Vec<Lossy> = row.get(3)?.unwrap_or_default();
                    let options: Vec<String> = options.into_iter().map(|option| option.0).collect();
                    let wrapper: Option<Lossy> = row.get(5)?;
                    Ok(Described {
                        name: row.get::<Lossy>(1)?.unwrap_or_default().0,
                        kind: wrapper.and_then(|name| Kind::of_wrapper(&name.0)).unwrap_or(Kind::Amqp),
                        options: split(&options),
                        mapping: split(&server.map(|oid| catalog::user_mapping(oid as u32)).unwrap_or_default()),
                        paused: row.get(4)?.unwrap_or_default(),
                    })
                })
                .collect()
        })
    }

    pub fn leases(&self) -> SpiResult<Vec<Lease>> {
        Spi::connect(|client| {
            let sql = "select partition, lease_owner, live, lease_epoch from outbox_internal.leases()";
            let statement = self.reading(client, sql)?;
            client
                .select(&**statement, None, &[])?
                .map(|row| {
                    Ok(Lease {
                        partition: partition(&row, 1)?,
                        owner: row.get::<Lossy>(2)?.map(|owner| owner.0),
                        live: row.get(3)?.unwrap_or_default(),
                        epoch: row.get(4)?.unwrap_or_default(),
                    })
                })
                .collect()
        })
    }

    /// Takes leases. Returns those that it got, with their epochs.
    pub fn take(&self, partitions: &[Partition], ttl_s: i32) -> SpiResult<Vec<(Partition, i64)>> {
        if partitions.is_empty() {
            return Ok(Vec::new());
        }
        Spi::connect_mut(|client| {
            let sql = "select partition, lease_epoch from outbox_internal.lease_take($1, $2, $3)";
            let args = [self.worker.as_str().into(), indexes(partitions).into(), ttl_s.into()];
            client
                .update(sql, None, &args)?
                .map(|row| Ok((partition(&row, 1)?, row.get(2)?.unwrap_or_default())))
                .collect()
        })
    }

    /// Renews leases. Returns those that this worker still holds.
    pub fn renew(&self, leases: &[(Partition, i64)], ttl_s: i32) -> SpiResult<Vec<Partition>> {
        Spi::connect_mut(|client| {
            let sql = "select * from outbox_internal.lease_renew($1, $2, $3, $4)";
            let (partitions, epochs) = columns(leases);
            let args = [
                self.worker.as_str().into(),
                partitions.into(),
                epochs.into(),
                ttl_s.into(),
            ];
            let types = [
                PgBuiltInOids::TEXTOID,
                PgBuiltInOids::INT2ARRAYOID,
                PgBuiltInOids::INT8ARRAYOID,
                PgBuiltInOids::INT4OID,
            ];
            let statement = self.writing(client, sql, &types)?;
            client
                .update(&**statement, None, &args)?
                .map(|row| partition(&row, 1))
                .collect()
        })
    }

    pub fn release(&self, leases: &[(Partition, i64)]) -> SpiResult<()> {
        if leases.is_empty() {
            return Ok(());
        }
        let (partitions, epochs) = columns(leases);
        let sql = "select outbox_internal.lease_release($1, $2, $3)";
        Spi::run_with_args(sql, &[self.worker.as_str().into(), partitions.into(), epochs.into()])
    }

    pub fn leave(&self) -> SpiResult<()> {
        Spi::run_with_args("select outbox_internal.leave($1)", &[self.worker.as_str().into()])
    }

    /// Claims messages of leased lanes, all of them with the same read limit.
    pub fn claim(&self, target: ClaimTarget, lanes: &[Lane]) -> SpiResult<ClaimedBatch> {
        let partitions: Vec<i16> = lanes.iter().map(|lane| lane.partition.as_i16()).collect();
        let epochs: Vec<i64> = lanes.iter().map(|lane| lane.epoch).collect();
        let limits: Vec<i32> = lanes.iter().map(|lane| lane.limit as i32).collect();
        let cursors: Vec<i64> = lanes.iter().map(|lane| lane.cursor).collect();
        let args = [
            self.worker.as_str().into(),
            target.destination.into(),
            partitions.into(),
            epochs.into(),
            limits.into(),
            cursors.into(),
            CLAIM_BYTES_MAX.into(),
            lanes.iter().map(|lane| lane.read_limit).max().into(),
        ];
        let types = [
            PgBuiltInOids::TEXTOID,
            PgBuiltInOids::TEXTOID,
            PgBuiltInOids::INT2ARRAYOID,
            PgBuiltInOids::INT8ARRAYOID,
            PgBuiltInOids::INT4ARRAYOID,
            PgBuiltInOids::INT8ARRAYOID,
            PgBuiltInOids::INT8OID,
            PgBuiltInOids::INT8OID,
        ];
        let body = || self.body("claim(text,text,smallint[],bigint[],integer[],bigint[],bigint,bigint)");
        self.claimed(target, &self.claim, &body, &types, &args, &release())
    }

    /// Claims messages of any partition, with leasing off.
    pub fn claim_unleased(&self, target: ClaimTarget, token: i64, ttl_s: i32, limit: u32) -> SpiResult<ClaimedBatch> {
        let args = [
            target.destination.into(),
            token.into(),
            ttl_s.into(),
            (limit as i32).into(),
            CLAIM_BYTES_MAX.into(),
        ];
        let types = [
            PgBuiltInOids::TEXTOID,
            PgBuiltInOids::INT8OID,
            PgBuiltInOids::INT4OID,
            PgBuiltInOids::INT4OID,
            PgBuiltInOids::INT8OID,
        ];
        let body = || self.body("claim_unleased(text,bigint,integer,integer,bigint)");
        self.claimed(target, &self.claim, &body, &types, &args, &release())
    }

    /// Claims the first messages of a key that wait behind another message. The flag says whether more of them wait.
    pub fn claim_waiting(
        &self,
        body: Option<&BodyFunction>,
        key: &OrderedKey,
        epoch: i64,
        read_limit: i64,
        limit: u32,
    ) -> SpiResult<(ClaimedBatch, bool)> {
        let args = [
            self.worker.as_str().into(),
            key.destination.as_str().into(),
            key.partition.as_i16().into(),
            key.key.as_deref().into(),
            epoch.into(),
            read_limit.into(),
            (limit as i32).into(),
            CLAIM_BYTES_MAX.into(),
        ];
        let types = [
            PgBuiltInOids::TEXTOID,
            PgBuiltInOids::TEXTOID,
            PgBuiltInOids::INT2OID,
            PgBuiltInOids::TEXTOID,
            PgBuiltInOids::INT8OID,
            PgBuiltInOids::INT8OID,
            PgBuiltInOids::INT4OID,
            PgBuiltInOids::INT8OID,
        ];
        let target = ClaimTarget {
            destination: &key.destination,
            body,
        };
        let body = || self.body("claim_waiting(text, text, smallint, text, bigint, bigint, integer, bigint)");
        let batch = self.claimed(target, &self.claim_waiting, &body, &types, &args, &Disposition::Wait)?;
        let more: Option<bool> = Spi::get_one_with_args(
            "select outbox_internal.waits($1, $2, $3)",
            &[
                key.destination.as_str().into(),
                key.partition.as_i16().into(),
                key.key.as_deref().into(),
            ],
        )?;
        Ok((batch, more.unwrap_or_default()))
    }

    /// The statement in the body of an SQL function of the extension. Run directly, the statement is planned once and
    /// avoids the cost of a call, which is half of the time of a claim of one message. The worker's session has the
    /// settings that the function's SET clauses name.
    fn body(&self, function: &str) -> SpiResult<String> {
        let sql = format!("select prosrc from pg_proc where oid = 'outbox_internal.{function}'::regprocedure");
        Ok(Spi::get_one(&sql)?.unwrap_or_default())
    }

    /// Runs a claim. `sql` has the columns of outbox_internal.claimed.
    fn claimed(
        &self,
        target: ClaimTarget,
        cached: &OnceCell<SavedStatement>,
        sql: &dyn Fn() -> SpiResult<String>,
        types: &[PgBuiltInOids],
        args: &[Param],
        unclaim: &Disposition,
    ) -> SpiResult<ClaimedBatch> {
        let source = self.source.borrow().clone();
        if let Some(source) = &source {
            source.check_before_claim().unwrap_or_else(|error| error.raise());
        }
        if let Some(body) = target.body {
            let checked = self.bodies.check_before_claim(target.destination, body);
            checked.unwrap_or_else(|error| error.raise());
        }
        let mut claimed = self.claimed_with_built_in_events(cached, sql, types, args)?;
        if let Some(source) = &source {
            self.take_events(source, &mut claimed.batch, unclaim)?;
        }
        if let Some(body) = target.body {
            let given = self.bodies.give(
                target.destination,
                body,
                &mut claimed.batch.rows,
                CLAIM_BYTES_MAX as usize,
            );
            let rest = given.unwrap_or_else(|error| error.raise());
            self.unclaim(rest, &mut claimed.batch, unclaim)?;
        }
        Ok(claimed)
    }

    /// Takes the events from the source. Events of outbox_events that the claim found under the same seqs are others.
    /// (So each claim searches an index that is usually empty. Without that, the claim functions would exist twice.)
    /// Messages whose events were not read in time, or do not fit into memory, are unclaimed.
    fn take_events(&self, source: &Source, batch: &mut Batch, unclaim: &Disposition) -> SpiResult<()> {
        if batch.rows.is_empty() {
            return Ok(());
        }
        let seqs: Vec<i64> = batch.rows.iter().map(|row| row.pointer.seq).collect();
        let mut events = (source.read(&seqs, CLAIM_BYTES_MAX as usize)).unwrap_or_else(|error| error.raise());
        let mut unread = Vec::new();
        for mut row in std::mem::take(&mut batch.rows) {
            match events.remove(&row.pointer.seq) {
                Some(event) => {
                    row.event = event;
                    batch.rows.push(row);
                }
                None => unread.push(row),
            }
        }
        self.unclaim(unread, batch, unclaim)
    }

    /// Unclaims the messages of a batch that are not delivered now.
    fn unclaim(&self, rest: Vec<Claimed>, batch: &mut Batch, unclaim: &Disposition) -> SpiResult<()> {
        if rest.is_empty() {
            return Ok(());
        }
        let settlements: Vec<Settlement> = (rest.into_iter())
            .map(|row| Settlement {
                row_id: row.row_id,
                pointer: row.pointer,
                disposition: unclaim.clone(),
            })
            .collect();
        batch.cut = true;
        self.settle(&settlements, Blocks::Nothing).map(drop)
    }

    fn claimed_with_built_in_events(
        &self,
        cached: &OnceCell<SavedStatement>,
        sql: &dyn Fn() -> SpiResult<String>,
        types: &[PgBuiltInOids],
        args: &[Param],
    ) -> SpiResult<ClaimedBatch> {
        Spi::connect_mut(|client| {
            let statement = match cached.get() {
                Some(statement) => statement,
                None => {
                    let types: Vec<PgOid> = types.iter().map(|oid| PgOid::from(*oid)).collect();
                    let prepared = client.prepare_mut(sql()?.as_str(), &types)?.keep();
                    cached.get_or_init(|| prepared.into())
                }
            };
            let mut batch = Batch::default();
            let mut wal_position = 0_u64;
            for row in client.update(&**statement, None, args)? {
                if let Some(remark) = row.get::<String>(column::REMARK)? {
                    match remark.as_str() {
                        "cut" => batch.cut = true,
                        "paused" => batch.is_paused = true,
                        _ => batch.missed = true,
                    }
                    continue;
                }
                wal_position = wal_position.max(row.get::<i64>(column::WAL_POSITION)?.unwrap_or_default() as u64);
                batch.rows.push(claimed(&row)?);
            }
            Ok(ClaimedBatch { batch, wal_position })
        })
    }

    /// Brings back messages that are due. Returns the destination, partition and seq of each, and in how many ms the
    /// next is due.
    pub fn bring_due(&self, leases: Option<&[Held]>, batch: i32) -> SpiResult<DueMessages> {
        let next_due_ms = || {
            let next_ms: Option<i64> = self.read_one("select outbox_internal.next_due_ms()")?;
            Ok::<_, SpiError>(next_ms.and_then(|ms| u64::try_from(ms).ok()))
        };
        let next_ms = next_due_ms()?;
        if next_ms != Some(0) {
            return Ok(DueMessages {
                moved: Vec::new(),
                next_ms,
            });
        }
        let (partitions, epochs) = leases.map(columns).unzip();
        let moved = Spi::connect_mut(|client| {
            let sql = "select partition, destination, seq from outbox_internal.due($1, $2, $3, $4, null::text)";
            let args = [
                self.worker.as_str().into(),
                partitions.into(),
                epochs.into(),
                batch.into(),
            ];
            client
                .update(sql, None, &args)?
                .map(|row| {
                    let destination: Lossy = row.get(2)?.unwrap_or_default();
                    let seq: Option<i64> = row.get(3)?;
                    Ok((destination.0, partition(&row, 1)?, seq.unwrap_or_default()))
                })
                .collect::<SpiResult<Vec<_>>>()
        })?;
        Ok(DueMessages {
            moved,
            next_ms: next_due_ms()?,
        })
    }

    /// The keys that are blocked, or have messages that wait behind another.
    pub fn blocked_keys(&self, partitions: &[Partition]) -> SpiResult<Vec<Found>> {
        Spi::connect(|client| {
            let sql = "select partition, destination, key, blocker, followers from outbox_internal.blocked_keys($1)";
            client
                .select(sql, None, &[indexes(partitions).into()])?
                .map(|row| {
                    Ok(Found {
                        key: OrderedKey {
                            partition: partition(&row, 1)?,
                            destination: row.get::<Lossy>(2)?.unwrap_or_default().0,
                            key: row.get::<Lossy>(3)?.map(|key| key.0),
                        },
                        blocker: row.get(4)?,
                        followers: row.get(5)?.unwrap_or_default(),
                    })
                })
                .collect()
        })
    }

    /// The prepared transactions of this database: xid, and when each was prepared, in µs since 1970.
    pub fn prepared_transactions(&self) -> SpiResult<Vec<(u32, i64)>> {
        Spi::connect(|client| {
            let sql = "select transaction::text::bigint, (extract(epoch from prepared) * 1000000)::bigint
                       from pg_prepared_xacts where database = current_database()";
            client
                .select(sql, None, &[])?
                .map(|row| {
                    let xid: i64 = row.get(1)?.unwrap_or_default();
                    Ok((xid as u32, row.get(2)?.unwrap_or_default()))
                })
                .collect()
        })
    }

    /// Writes the dispositions of claimed messages. Returns the number of rows that changed. `dead_blocks`: which
    /// messages wait behind a dead letter.
    pub fn settle(&self, settlements: &[Settlement], dead_blocks: Blocks) -> SpiResult<usize> {
        let tids = settlements.iter().map(|s| s.row_id.to_string()).collect();
        self.settle_at(settlements, tids, dead_blocks)
    }

    /// Settles messages whose rows may have moved: it finds the rows by key.
    pub fn settle_by_key(&self, settlements: &[Settlement], dead_blocks: Blocks) -> SpiResult<usize> {
        let sql = "select outbox_internal.locate($1, $2, $3)::text[]";
        let (seqs, destinations, partitions) = keys(settlements);
        let tids: Option<Vec<String>> =
            Spi::get_one_with_args(sql, &[seqs.into(), destinations.into(), partitions.into()])?;
        self.settle_at(settlements, tids.unwrap_or_default(), dead_blocks)
    }

    fn settle_at(&self, settlements: &[Settlement], tids: Vec<String>, dead_blocks: Blocks) -> SpiResult<usize> {
        let (seqs, destinations, partitions) = keys(settlements);
        let tokens: Vec<i64> = settlements.iter().map(|s| s.pointer.lease_epoch).collect();
        let mut actions = Vec::with_capacity(settlements.len());
        let mut delays_ms = Vec::with_capacity(settlements.len());
        let mut reasons = Vec::with_capacity(settlements.len());
        for settlement in settlements {
            let ending = Ending::of(&settlement.disposition, dead_blocks);
            actions.push(ending.action.letter());
            delays_ms.push(ending.delay_ms);
            reasons.push(ending.reason);
        }
        Spi::connect_mut(|client| {
            let statement = match self.settle.get() {
                Some(statement) => statement,
                None => {
                    let sql = "select outbox_internal.settle($1, $2::tid[], $3, $4, $5, $6, $7::\"char\"[], $8, $9)";
                    let types = [
                        PgBuiltInOids::TEXTOID,
                        PgBuiltInOids::TEXTARRAYOID,
                        PgBuiltInOids::INT8ARRAYOID,
                        PgBuiltInOids::TEXTARRAYOID,
                        PgBuiltInOids::INT2ARRAYOID,
                        PgBuiltInOids::INT8ARRAYOID,
                        PgBuiltInOids::TEXTARRAYOID,
                        PgBuiltInOids::INT8ARRAYOID,
                        PgBuiltInOids::TEXTARRAYOID,
                    ];
                    let prepared = client.prepare_mut(sql, &types.map(PgOid::from))?.keep();
                    self.settle.get_or_init(|| prepared.into())
                }
            };
            let args = [
                self.worker.as_str().into(),
                tids.into(),
                seqs.into(),
                destinations.into(),
                partitions.into(),
                tokens.into(),
                actions.into(),
                delays_ms.into(),
                reasons.into(),
            ];
            let changed: Option<i32> = client.update(&**statement, None, &args)?.first().get_one()?;
            Ok(changed.unwrap_or_default() as usize)
        })
    }
}

/// Releases a message as if it had not been claimed.
fn release() -> Disposition {
    Disposition::Release {
        reason: "not read yet".into(),
    }
}

/// The columns of outbox_internal.claimed.
mod column {
    pub const TID: usize = 1;
    pub const SEQ: usize = 2;
    pub const DESTINATION: usize = 3;
    pub const PARTITION: usize = 4;
    pub const KEY: usize = 5;
    pub const ATTEMPTS: usize = 6;
    pub const CRASHES: usize = 7;
    pub const CLAIM_TOKEN: usize = 8;
    pub const WAL_POSITION: usize = 9;
    pub const REPLAYED: usize = 10;
    pub const ENQUEUED_AT: usize = 11;
    pub const REMARK: usize = 12;
    pub const EXPIRES_AT: usize = 13;
    /// The first column of the event.
    pub const ID: usize = 15;
}

/// A message whose texts cannot be read is given up alone: the others of its claim continue.
fn claimed(row: &SpiHeapTupleData) -> SpiResult<Claimed> {
    let seq: i64 = row.get(column::SEQ)?.unwrap_or_default();
    let (key, destination) = (readable(row.get(column::KEY))?, row.get::<Lossy>(column::DESTINATION)?);
    let pointer = Pointer {
        seq,
        destination: destination.unwrap_or_default().0,
        partition: partition(row, column::PARTITION)?,
        // Without a key, no message waits for this one, and this one waits for none.
        key: key.clone().ok().flatten(),
        attempts: row.get(column::ATTEMPTS)?.unwrap_or_default(),
        crashes: row.get(column::CRASHES)?.unwrap_or_default(),
        lease_epoch: row.get(column::CLAIM_TOKEN)?.unwrap_or_default(),
        replayed: row.get(column::REPLAYED)?.unwrap_or_default(),
        enqueued_at_us: row
            .get::<TimestampWithTimeZone>(column::ENQUEUED_AT)?
            .map_or(0, us_since_1970),
        expires_at_us: row.get::<TimestampWithTimeZone>(column::EXPIRES_AT)?.map(us_since_1970),
    };
    let event = match (key, readable(event::read(row, column::ID, seq))?) {
        (Ok(_), Ok(event)) if event.id.is_empty() => Err(format!("the event store has no event with seq {seq}")),
        (key, event) => sendable(key.map(drop), event),
    };
    Ok(Claimed {
        row_id: row.get::<Tid>(column::TID)?.expect("a claimed row has a ctid").into(),
        pointer,
        event: event.map_err(|reason| Outcome::Unsendable { reason }),
    })
}

/// The value that was read, or why it is unreadable. Any other error is an error of the statement.
fn readable<T>(read: SpiResult<T>) -> SpiResult<Result<T, Unreadable>> {
    match read {
        Ok(value) => Ok(Ok(value)),
        Err(SpiError::Unreadable { why, .. }) => Ok(Err(why)),
        Err(error) => Err(error),
    }
}

/// A partition number from a table of the extension, where a CHECK keeps it in range. (A panic here becomes an ERROR.)
fn partition(row: &SpiHeapTupleData, ordinal: usize) -> SpiResult<Partition> {
    let index: i16 = row.get(ordinal)?.unwrap_or_default();
    Ok(Partition::new(i64::from(index)).expect("a CHECK keeps partition numbers in range"))
}

fn indexes(partitions: &[Partition]) -> Vec<i16> {
    partitions.iter().map(|partition| partition.as_i16()).collect()
}

fn columns(leases: &[(Partition, i64)]) -> (Vec<i16>, Vec<i64>) {
    leases
        .iter()
        .map(|(partition, epoch)| (partition.as_i16(), *epoch))
        .unzip()
}

fn keys(settlements: &[Settlement]) -> (Vec<i64>, Vec<String>, Vec<i16>) {
    let seqs = settlements.iter().map(|s| s.pointer.seq).collect();
    let destinations = settlements.iter().map(|s| s.pointer.destination.clone()).collect();
    let partitions = settlements.iter().map(|s| s.pointer.partition.as_i16()).collect();
    (seqs, destinations, partitions)
}
