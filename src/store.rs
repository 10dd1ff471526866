//! All SQL of the extension, and the only module that says Spi. The first half runs in a user's backend (enqueue), the
//! second in a worker; both on the main thread, inside a transaction. State transitions are the functions of sql/src;
//! here they are called.

use crate::error::{UserError, invalid};
use crate::pg::{catalog, guc};
use crate::{registry, wake};
use outbox_core::engine::{self, Batch, Claimed, Due, Held, Lane, Sharing};
use outbox_core::envelope;
use outbox_core::gate::{Found, OrderedKey};
use outbox_core::lease::Lease;
use outbox_core::message::{Event, Pointer};
use outbox_core::partition::{Partition, crc32};
use outbox_core::settle::Disposition;
use pgrx::datum::datetime_support::clock_timestamp;
use pgrx::prelude::*;
use pgrx::spi::{OwnedPreparedStatement, SpiHeapTupleData, SpiResult, quote_identifier};
use std::cell::{OnceCell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;

// ---- enqueue: a user's backend --------------------------------------------------------------------------------------

pub struct Enqueue<'a> {
    pub seqs: &'a [i64],
    /// The event was stored by this very statement: it cannot wait anywhere yet.
    pub new: bool,
    pub key: Option<&'a str>,
    pub destination: &'a str,
    pub available_at: Option<TimestampWithTimeZone>,
    pub partition: Option<Partition>,
}

/// Statements of one schema, planned once per backend.
struct Statements {
    /// Held by every transaction that enqueues, before it touches a table: so DROP EXTENSION waits for it, and the two
    /// never for each other in a circle.
    extension: u32,
    /// Held next, before any other table: outbox_configure() locks it first, too.
    settings: u32,
    schema: String,
    /// By whether the event was stored just now, and whether it is scheduled.
    insert: [[OnceCell<OwnedPreparedStatement>; 2]; 2],
    aggregates: OnceCell<OwnedPreparedStatement>,
}

thread_local! {
    /// By the function that was called: after DROP and CREATE EXTENSION its OID is another one.
    static STATEMENTS: RefCell<HashMap<u32, Rc<Statements>>> = RefCell::new(HashMap::new());
}

fn statements(fcinfo: pg_sys::FunctionCallInfo) -> Rc<Statements> {
    let function = catalog::called_function(fcinfo);
    STATEMENTS.with_borrow_mut(|known| {
        let make = || {
            let schema = quote_identifier(catalog::schema_of_function(function));
            Rc::new(Statements {
                extension: catalog::extension(c"outbox"),
                settings: catalog::table_beside(function, c"outbox_settings"),
                schema,
                insert: Default::default(),
                aggregates: OnceCell::new(),
            })
        };
        Rc::clone(known.entry(function).or_insert_with(make))
    })
}

impl Statements {
    fn hold(&self) {
        catalog::hold_extension_with(self.extension);
        catalog::hold_table(self.settings);
    }
}

/// Keeps the extension from being dropped, and its partitions from being changed, before this transaction ends.
pub fn hold_extension(fcinfo: pg_sys::FunctionCallInfo) {
    statements(fcinfo).hold();
}

/// The key of an event that was enqueued without one.
pub fn aggregate_key(aggregate_type: Option<&str>, aggregate_id: Option<&str>) -> Option<String> {
    match (aggregate_type, aggregate_id) {
        (Some(kind), Some(id)) => Some(format!("{kind}:{id}")),
        (None, Some(id)) => Some(id.to_string()),
        (_, None) => None,
    }
}

/// Inserts the pointers; returns how many were new. The statement runs as the owner of the tables whatever the caller's
/// search_path, so every operator and function in it is qualified.
pub fn enqueue(fcinfo: pg_sys::FunctionCallInfo, request: &Enqueue) -> Result<i64, UserError> {
    let statements = statements(fcinfo);
    statements.hold();
    Spi::connect_mut(|client| {
        let keys = match request.key {
            Some(key) => vec![Some(key.to_string()); request.seqs.len()],
            None if request.new => vec![None; request.seqs.len()],
            None => aggregate_keys(client, &statements, request.seqs)?,
        };
        if request.key.is_none() {
            for key in keys.iter().flatten() {
                envelope::check_short("key (aggregate_type:aggregate_id)", key)?;
            }
        }
        let crcs: Vec<Option<i64>> = keys
            .iter()
            .map(|key| key.as_deref().map(|key| i64::from(crc32(key))))
            .collect();
        for (seq, crc) in request.seqs.iter().zip(&crcs) {
            registry::announce(crc.map(|crc| crc as u32), *seq, request.new);
        }
        // A time that is over says nothing.
        let due_at = request.available_at.filter(|at| *at > clock_timestamp());
        let insert = insert_statement(client, &statements, request.new, due_at.is_some())?;
        let partition = request.partition.map(|partition| partition.as_i16());
        let args = [
            request.destination.into(),
            request.seqs.to_vec().into(),
            keys.into(),
            crcs.into(),
            due_at.into(),
            partition.into(),
        ];
        let mut run = || client.update(insert, None, &args);
        // The probe must use the index even while the table is empty: the plan outlives that.
        let inserted = if request.new {
            run()
        } else {
            guc::without_sequential_scans(run)
        };
        let mut count = 0;
        for row in inserted.map_err(internal)? {
            count += 1;
            if due_at.is_none() {
                let index: i16 = row.get(1).map_err(internal)?.unwrap_or_default();
                let seq: i64 = row.get(2).map_err(internal)?.unwrap_or_default();
                if let Ok(partition) = Partition::new(i64::from(index)) {
                    wake::ready(partition, seq);
                }
            }
        }
        if due_at.is_some() {
            wake::waiting_changed();
        }
        if count == 0 {
            check_settings(client, &statements, partition)?;
        }
        Ok(count)
    })
}

/// The statement that inserts, planned at its first use: for an event that was stored just now or any, to go at once or
/// at a time.
fn insert_statement<'a>(
    client: &mut pgrx::spi::SpiClient,
    statements: &'a Statements,
    new: bool,
    scheduled: bool,
) -> Result<&'a OwnedPreparedStatement, UserError> {
    let cached = &statements.insert[usize::from(new)][usize::from(scheduled)];
    if let Some(insert) = cached.get() {
        return Ok(insert);
    }
    let s = &statements.schema;
    // A seq waits once a destination, whatever partition its key gave it then. What was stored just now cannot wait yet.
    let probe = format!(
        "and (select true from {s}.outbox o
              where o.destination operator(pg_catalog.=) $1
                and o.partition operator(pg_catalog.=) any (s.partitions)
                and o.seq operator(pg_catalog.=) u.seq limit 1) is null
         and (select true from {s}.outbox_waiting w
              where w.destination operator(pg_catalog.=) $1 and w.seq operator(pg_catalog.=) u.seq limit 1) is null"
    );
    let (into, columns, values) = match scheduled {
        false => ("outbox", "", ""),
        true => (
            "outbox_waiting",
            ", due_at, state, enqueued_at",
            ", $5, 's'::pg_catalog.\"char\", pg_catalog.now()",
        ),
    };
    let sql = format!(
        "insert into {s}.{into} (destination, partition, seq, key{columns})
         select $1, coalesce($6, (coalesce(u.crc, u.seq) operator(pg_catalog.%) s.partition_count)::pg_catalog.int2),
                u.seq, u.key{values}
         from {s}.outbox_settings s,
              rows from (pg_catalog.unnest($2), pg_catalog.unnest($3), pg_catalog.unnest($4)) as u (seq, key, crc)
         where ($6 is null or $6 operator(pg_catalog.<) s.partition_count) {probe}
         on conflict do nothing returning partition, seq",
        probe = if new { "" } else { &probe }
    );
    let types = [
        PgBuiltInOids::TEXTOID,
        PgBuiltInOids::INT8ARRAYOID,
        PgBuiltInOids::TEXTARRAYOID,
        PgBuiltInOids::INT8ARRAYOID,
        PgBuiltInOids::TIMESTAMPTZOID,
        PgBuiltInOids::INT2OID,
    ];
    let prepared = client
        .prepare_mut(sql.as_str(), &types.map(PgOid::from))
        .map_err(internal)?
        .keep();
    Ok(cached.get_or_init(|| prepared))
}

/// The keys of events by their aggregate; an error names the seqs that the store lacks. The events are locked against
/// outbox_trim_events: it does not see the messages of this transaction.
fn aggregate_keys(
    client: &mut pgrx::spi::SpiClient,
    statements: &Statements,
    seqs: &[i64],
) -> Result<Vec<Option<String>>, UserError> {
    let select = match statements.aggregates.get() {
        Some(select) => select,
        None => {
            let sql = format!(
                "select e.seq, e.aggregate_type, e.aggregate_id from {s}.outbox_events e
                 where e.seq operator(pg_catalog.=) any ($1) for key share",
                s = statements.schema
            );
            let prepared = client
                .prepare_mut(sql.as_str(), &[PgOid::from(PgBuiltInOids::INT8ARRAYOID)])
                .map_err(internal)?
                .keep();
            statements.aggregates.get_or_init(|| prepared)
        }
    };
    let rows =
        guc::without_sequential_scans(|| client.update(select, None, &[seqs.to_vec().into()])).map_err(internal)?;
    let mut found = HashMap::with_capacity(seqs.len());
    for row in rows {
        let seq: i64 = row.get(1).map_err(internal)?.unwrap_or_default();
        let aggregate_type: Option<String> = row.get(2).map_err(internal)?;
        let aggregate_id: Option<String> = row.get(3).map_err(internal)?;
        found.insert(seq, aggregate_key(aggregate_type.as_deref(), aggregate_id.as_deref()));
    }
    let missing: Vec<String> = seqs
        .iter()
        .filter(|seq| !found.contains_key(seq))
        .take(5)
        .map(i64::to_string)
        .collect();
    if !missing.is_empty() {
        return Err(UserError {
            detail: Some(format!("outbox_events has no row for {}.", missing.join(", "))),
            ..UserError::new(
                PgSqlErrorCode::ERRCODE_NO_DATA_FOUND,
                format!("there is no event with seq {}", missing[0]),
                "Store the event first, in this transaction or an earlier one; or pass a key, and it is not looked up.",
            )
        });
    }
    Ok(seqs.iter().map(|seq| found[seq].clone()).collect())
}

/// Why nothing was inserted, unless all of it waits already.
fn check_settings(
    client: &mut pgrx::spi::SpiClient,
    statements: &Statements,
    partition: Option<i16>,
) -> Result<(), UserError> {
    let sql = format!("select s.partition_count from {}.outbox_settings s", statements.schema);
    let settings = client.select(sql.as_str(), Some(1), &[]).map_err(internal)?;
    if settings.is_empty() {
        // outbox_configure() leaves no row that an older snapshot sees: with the old count a key would be in two partitions.
        return Err(UserError::new(
            PgSqlErrorCode::ERRCODE_T_R_SERIALIZATION_FAILURE,
            "outbox_configure() changed the partitions after this transaction began",
            "Run the transaction again.",
        ));
    }
    let count: Option<i16> = settings.first().get_one().map_err(internal)?;
    match (partition, count) {
        (Some(partition), Some(count)) if partition >= count => {
            let last = Partition::new(i64::from(count) - 1).map_or_else(|error| error.to_string(), Partition::label);
            Err(invalid(
                format!("partition {partition} does not exist"),
                format!("The partitions are p00 to {last}."),
            ))
        }
        _ => Ok(()),
    }
}

fn internal(error: pgrx::spi::Error) -> UserError {
    UserError::new(
        PgSqlErrorCode::ERRCODE_INTERNAL_ERROR,
        format!("outbox could not run its own statement: {error}"),
        "This is a defect of outbox; please report it.",
    )
}

/// The time, in µs since 1970.
pub fn now_us() -> i64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map(|d| d.as_micros() as i64).unwrap_or_default()
}

// ---- the worker -----------------------------------------------------------------------------------------------------

/// The functions of one database's outbox, called as the worker role. Each call is one statement in the transaction of
/// the caller.
pub struct Store {
    schema: String,
    worker: String,
    claim: OnceCell<OwnedPreparedStatement>,
    claim_waiting: OnceCell<OwnedPreparedStatement>,
    settle: OnceCell<OwnedPreparedStatement>,
}

/// A row's place is its ctid, as Postgres writes it.
pub type Settlement = engine::Settlement<String>;

/// What a claim brought, and how far WAL must be on disk before any of it goes out.
pub struct ClaimedBatch {
    pub batch: Batch<String>,
    pub wal_position: u64,
}

/// Bodies that one claim may bring, in bytes: bounds the memory of a worker. One message is always taken.
const CLAIM_BYTES_MAX: i64 = 32 << 20;

impl Store {
    /// Finds the schema of the extension. Inside a transaction, the extension held.
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
        })
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

    /// A text that changes when ALTER DATABASE or ALTER ROLE changes what a new session would start with.
    pub fn session_defaults(&self) -> SpiResult<String> {
        let text: Option<String> = Spi::get_one(
            "select string_agg(format('%s %s %s', setdatabase, setrole, setconfig), ';' order by setdatabase, setrole)
             from pg_db_role_setting
             where setdatabase in (0, (select oid from pg_database where datname = current_database()))
               and setrole in (0, (select oid from pg_roles where rolname = current_user))",
        )?;
        Ok(text.unwrap_or_default())
    }

    /// Tells that this worker lives; returns the ids of all that do.
    pub fn heartbeat(&self, pid: i32, ttl_s: i32) -> SpiResult<Vec<String>> {
        Spi::connect_mut(|client| {
            let sql = format!("select * from {}.outbox_heartbeat($1, $2, $3)", self.schema);
            let rows = client.update(
                sql.as_str(),
                None,
                &[self.worker.as_str().into(), pid.into(), ttl_s.into()],
            )?;
            rows.map(|row| row.get(1).map(Option::unwrap_or_default)).collect()
        })
    }

    pub fn report(&self, state: &str, reason: Option<&str>, detail: Option<&str>) -> SpiResult<()> {
        let sql = format!("select {}.outbox_report($1, $2, $3, $4)", self.schema);
        Spi::run_with_args(
            &sql,
            &[self.worker.as_str().into(), state.into(), reason.into(), detail.into()],
        )
    }

    pub fn leases(&self) -> SpiResult<Vec<Lease>> {
        Spi::connect(|client| {
            let sql = format!(
                "select partition, lease_owner, live, lease_epoch from {}.outbox_leases()",
                self.schema
            );
            client
                .select(sql.as_str(), None, &[])?
                .map(|row| {
                    Ok(Lease {
                        partition: partition(&row, 1)?,
                        owner: row.get(2)?,
                        live: row.get(3)?.unwrap_or_default(),
                        epoch: row.get(4)?.unwrap_or_default(),
                    })
                })
                .collect()
        })
    }

    /// Takes leases; returns those it got, with their epochs.
    pub fn take(&self, partitions: &[Partition], ttl_s: i32) -> SpiResult<Vec<(Partition, i64)>> {
        Spi::connect_mut(|client| {
            let sql = format!(
                "select partition, lease_epoch from {}.outbox_lease_take($1, $2, $3)",
                self.schema
            );
            let args = [self.worker.as_str().into(), indexes(partitions).into(), ttl_s.into()];
            client
                .update(sql.as_str(), None, &args)?
                .map(|row| Ok((partition(&row, 1)?, row.get(2)?.unwrap_or_default())))
                .collect()
        })
    }

    /// Renews leases; returns those still held.
    pub fn renew(&self, leases: &[(Partition, i64)], ttl_s: i32) -> SpiResult<Vec<Partition>> {
        Spi::connect_mut(|client| {
            let sql = format!("select * from {}.outbox_lease_renew($1, $2, $3, $4)", self.schema);
            let (partitions, epochs) = columns(leases);
            let args = [
                self.worker.as_str().into(),
                partitions.into(),
                epochs.into(),
                ttl_s.into(),
            ];
            client
                .update(sql.as_str(), None, &args)?
                .map(|row| partition(&row, 1))
                .collect()
        })
    }

    pub fn release(&self, leases: &[(Partition, i64)]) -> SpiResult<()> {
        let (partitions, epochs) = columns(leases);
        let sql = format!("select {}.outbox_lease_release($1, $2, $3)", self.schema);
        Spi::run_with_args(&sql, &[self.worker.as_str().into(), partitions.into(), epochs.into()])
    }

    pub fn leave(&self) -> SpiResult<()> {
        Spi::run_with_args(
            &format!("select {}.outbox_leave($1)", self.schema),
            &[self.worker.as_str().into()],
        )
    }

    /// Claims messages of leased lanes.
    pub fn claim(&self, destination: &str, lanes: &[Lane]) -> SpiResult<ClaimedBatch> {
        let partitions: Vec<i16> = lanes.iter().map(|lane| lane.partition.as_i16()).collect();
        let epochs: Vec<i64> = lanes.iter().map(|lane| lane.epoch).collect();
        let limits: Vec<i32> = lanes.iter().map(|lane| lane.limit as i32).collect();
        let marks: Vec<i64> = lanes.iter().map(|lane| lane.mark).collect();
        let args = [
            self.worker.as_str().into(),
            destination.into(),
            partitions.into(),
            epochs.into(),
            limits.into(),
            marks.into(),
            CLAIM_BYTES_MAX.into(),
        ];
        let types = [
            PgBuiltInOids::TEXTOID,
            PgBuiltInOids::TEXTOID,
            PgBuiltInOids::INT2ARRAYOID,
            PgBuiltInOids::INT8ARRAYOID,
            PgBuiltInOids::INT4ARRAYOID,
            PgBuiltInOids::INT8ARRAYOID,
            PgBuiltInOids::INT8OID,
        ];
        let call = "outbox_claim($1, $2, $3, $4, $5, $6, $7)";
        self.claimed(&self.claim, call, &types, &args)
    }

    /// Claims messages of any partition, with leasing off.
    pub fn claim_unleased(&self, destination: &str, token: i64, ttl_s: i32, limit: u32) -> SpiResult<ClaimedBatch> {
        let args = [
            destination.into(),
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
        let call = "outbox_claim_unleased($1, $2, $3, $4, $5)";
        self.claimed(&self.claim, call, &types, &args)
    }

    /// Claims the first messages of a key that wait behind another; says whether more are there.
    pub fn claim_waiting(
        &self,
        key: &OrderedKey,
        epoch: i64,
        reach: i64,
        limit: u32,
    ) -> SpiResult<(ClaimedBatch, bool)> {
        let args = [
            self.worker.as_str().into(),
            key.destination.as_str().into(),
            key.partition.as_i16().into(),
            key.key.as_str().into(),
            epoch.into(),
            reach.into(),
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
        let call = "outbox_claim_waiting($1, $2, $3, $4, $5, $6, $7, $8)";
        let batch = self.claimed(&self.claim_waiting, call, &types, &args)?;
        let more: Option<bool> = Spi::get_one_with_args(
            &format!("select {}.outbox_waits($1, $2, $3)", self.schema),
            &[
                key.destination.as_str().into(),
                key.partition.as_i16().into(),
                key.key.as_str().into(),
            ],
        )?;
        Ok((batch, more.unwrap_or_default()))
    }

    fn claimed(
        &self,
        cached: &OnceCell<OwnedPreparedStatement>,
        call: &str,
        types: &[PgBuiltInOids],
        args: &[pgrx::datum::DatumWithOid],
    ) -> SpiResult<ClaimedBatch> {
        Spi::connect_mut(|client| {
            let statement = match cached.get() {
                Some(statement) => statement,
                None => {
                    let sql = format!(
                        "select tid::text, seq, destination, partition, key, attempts, crashes, claim_token, id, type,
                         aggregate_type, aggregate_id, operation, payload, previous_payload, metadata, headers, actor,
                         correlation_id, created_at, created_at_s, wal_position, replayed, remark from {}.{call}",
                        self.schema
                    );
                    let types: Vec<PgOid> = types.iter().map(|oid| PgOid::from(*oid)).collect();
                    let prepared = client.prepare_mut(sql.as_str(), &types)?.keep();
                    cached.get_or_init(|| prepared)
                }
            };
            let mut batch = Batch::default();
            let mut wal_position = 0_u64;
            for row in client.update(statement, None, args)? {
                if let Some(remark) = row.get::<String>(24)? {
                    match remark.as_str() {
                        "cut" => batch.cut = true,
                        _ => batch.missed = true,
                    }
                    continue;
                }
                wal_position = wal_position.max(row.get::<i64>(22)?.unwrap_or_default() as u64);
                batch.rows.push(claimed(&row)?);
            }
            Ok(ClaimedBatch { batch, wal_position })
        })
    }

    /// Brings back messages whose time has come. Returns where they are now, and in how many ms the next is due.
    pub fn bring_due(&self, leases: Option<&[Held]>, batch: i32) -> SpiResult<Due> {
        let (partitions, epochs) = leases.map(columns).unzip();
        let moved = Spi::connect_mut(|client| {
            let sql = format!("select partition, seq from {}.outbox_due($1, $2, $3, $4)", self.schema);
            let args = [
                self.worker.as_str().into(),
                partitions.into(),
                epochs.into(),
                batch.into(),
            ];
            client
                .update(sql.as_str(), None, &args)?
                .map(|row| Ok((partition(&row, 1)?, row.get(2)?.unwrap_or_default())))
                .collect::<SpiResult<Vec<(Partition, i64)>>>()
        })?;
        let next_ms: Option<i64> = Spi::get_one(&format!("select {}.outbox_next_due_ms()", self.schema))?;
        Ok((moved, next_ms.and_then(|ms| u64::try_from(ms).ok())))
    }

    /// The keys that are closed or have messages waiting behind another.
    pub fn gates(&self, partitions: &[Partition]) -> SpiResult<Vec<Found>> {
        Spi::connect(|client| {
            let sql = format!(
                "select partition, destination, key, head, followers from {}.outbox_gates($1)",
                self.schema
            );
            client
                .select(sql.as_str(), None, &[indexes(partitions).into()])?
                .map(|row| {
                    Ok(Found {
                        key: OrderedKey {
                            partition: partition(&row, 1)?,
                            destination: row.get(2)?.unwrap_or_default(),
                            key: row.get(3)?.unwrap_or_default(),
                        },
                        head: row.get(4)?,
                        followers: row.get(5)?.unwrap_or_default(),
                    })
                })
                .collect()
        })
    }

    /// Transactions of this database that are prepared: xid, and when it was, in µs.
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

    /// Ends claimed messages; returns how many rows changed.
    /// `dead_blocks`: behind a dead letter its key waits.
    pub fn settle(&self, settlements: &[Settlement], dead_blocks: bool) -> SpiResult<usize> {
        let tids = settlements.iter().map(|s| s.place.clone()).collect();
        self.settle_at(settlements, tids, dead_blocks)
    }

    /// The same for messages whose rows may have moved: they are looked for by key.
    pub fn settle_by_key(&self, settlements: &[Settlement], dead_blocks: bool) -> SpiResult<usize> {
        let sql = format!("select {}.outbox_locate($1, $2, $3)::text[]", self.schema);
        let (seqs, destinations, partitions) = keys(settlements);
        let tids: Option<Vec<String>> =
            Spi::get_one_with_args(&sql, &[seqs.into(), destinations.into(), partitions.into()])?;
        self.settle_at(settlements, tids.unwrap_or_default(), dead_blocks)
    }

    fn settle_at(&self, settlements: &[Settlement], tids: Vec<String>, dead_blocks: bool) -> SpiResult<usize> {
        let (seqs, destinations, partitions) = keys(settlements);
        let tokens: Vec<i64> = settlements.iter().map(|s| s.pointer.lease_epoch).collect();
        let mut actions = Vec::with_capacity(settlements.len());
        let mut delays_ms = Vec::with_capacity(settlements.len());
        let mut reasons = Vec::with_capacity(settlements.len());
        for settlement in settlements {
            let (action, delay_ms, reason) = match &settlement.disposition {
                Disposition::Publish => ("p", None, None),
                Disposition::Dead { reason } if dead_blocks => ("D", None, Some(reason.as_str())),
                Disposition::Dead { reason } => ("d", None, Some(reason.as_str())),
                Disposition::Wait => ("w", None, None),
                Disposition::Retry { delay_ms, error } => ("r", Some(*delay_ms as i64), Some(error.as_str())),
                Disposition::Release { .. } => ("f", None, None),
            };
            actions.push(action);
            delays_ms.push(delay_ms);
            reasons.push(reason);
        }
        Spi::connect_mut(|client| {
            let statement = match self.settle.get() {
                Some(statement) => statement,
                None => {
                    let sql = format!(
                        "select {}.outbox_settle($1, $2::tid[], $3, $4, $5, $6, $7::\"char\"[], $8, $9)",
                        self.schema
                    );
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
                    let prepared = client.prepare_mut(sql.as_str(), &types.map(PgOid::from))?.keep();
                    self.settle.get_or_init(|| prepared)
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
            let changed: Option<i32> = client.update(statement, None, &args)?.first().get_one()?;
            Ok(changed.unwrap_or_default() as usize)
        })
    }

    /// How many messages wait, counted up to `limit`.
    pub fn count_pending(&self, limit: i64) -> SpiResult<i64> {
        let sql = format!(
            "select count(*) from (select from {s}.outbox union all select from {s}.outbox_waiting limit $1) o",
            s = self.schema
        );
        Ok(Spi::get_one_with_args(&sql, &[limit.into()])?.unwrap_or_default())
    }

    /// How many messages wait, as the last vacuum or analyze estimated.
    pub fn estimate_pending(&self) -> SpiResult<i64> {
        let sql = format!(
            "select sum(greatest(reltuples, 0))::bigint from pg_class
             where oid in ('{s}.outbox'::regclass, '{s}.outbox_waiting'::regclass)",
            s = self.schema
        );
        Ok(Spi::get_one(&sql)?.unwrap_or_default())
    }

    pub fn make_partitions(&self, retention_s: Option<i32>) -> SpiResult<i32> {
        let sql = format!("select {}.outbox_make_partitions($1)", self.schema);
        Ok(Spi::get_one_with_args(&sql, &[retention_s.into()])?.unwrap_or_default())
    }

    /// Calls a function that removes what is older, `batch` at most, and returns how many.
    pub fn clear(&self, function: &str, retention_s: i32, batch: i32) -> SpiResult<i64> {
        let sql = format!("select {}.{function}($1, $2)::bigint", self.schema);
        Ok(Spi::get_one_with_args(&sql, &[retention_s.into(), batch.into()])?.unwrap_or_default())
    }

    /// Removes events that are older and over, looking at `batch` of them after a seq. Returns how far it got, and
    /// whether more may be old.
    pub fn trim_events(&self, after: i64, retention_s: i32, batch: i32) -> SpiResult<(i64, bool)> {
        let sql = format!(
            "select reached, more from {}.outbox_trim_events($1, $2, $3)",
            self.schema
        );
        let args = [after.into(), retention_s.into(), batch.into()];
        let (reached, more) = Spi::get_two_with_args(&sql, &args)?;
        Ok((reached.unwrap_or(after), more.unwrap_or_default()))
    }

    pub fn purge_workers(&self) -> SpiResult<()> {
        Spi::run(&format!("select {}.outbox_purge_workers()", self.schema))
    }
}

fn claimed(row: &SpiHeapTupleData) -> SpiResult<Claimed<String>> {
    let seq: i64 = row.get(2)?.unwrap_or_default();
    let pointer = Pointer {
        seq,
        destination: row.get(3)?.unwrap_or_default(),
        partition: partition(row, 4)?,
        key: row.get(5)?,
        attempts: row.get(6)?.unwrap_or_default(),
        crashes: row.get(7)?.unwrap_or_default(),
        lease_epoch: row.get(8)?.unwrap_or_default(),
        replayed: row.get(23)?.unwrap_or_default(),
    };
    let id: Option<String> = row.get(9)?;
    let event = match id {
        None => None,
        Some(id) => Some(Event {
            id,
            seq,
            kind: row.get(10)?.unwrap_or_default(),
            aggregate_type: row.get(11)?,
            aggregate_id: row.get(12)?,
            operation: row.get(13)?,
            payload: row.get(14)?.unwrap_or_default(),
            previous_payload: row.get(15)?,
            metadata: row.get(16)?,
            headers: row.get(17)?,
            actor: row.get(18)?,
            correlation_id: row.get(19)?,
            created_at: row.get(20)?.unwrap_or_default(),
            created_at_s: row.get(21)?.unwrap_or_default(),
        }),
    };
    Ok(Claimed {
        place: row.get(1)?.unwrap_or_default(),
        pointer,
        event,
    })
}

/// A partition number out of our own table, where a CHECK keeps it in range. (A panic here becomes an ERROR.)
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
