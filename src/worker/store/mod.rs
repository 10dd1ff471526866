//! The database of a worker or of maintenance in the server, through SPI. Each call is one statement in the transaction
//! of the caller, as the worker role. Runs on the main thread of the process.

mod claimed;
pub mod maintenance_sql;
mod published;
mod spi;

use crate::pg::security;
use crate::pg::spi::{Lossy, Spi, SpiResult};
use crate::store::mapping_of;
use crate::store::source::Source;
use outbox_core::engine::{HeldLease, Sharing};
use outbox_core::partition::Partition;
use outbox_worker::Described;
use outbox_worker::protocol::{Arg, Db, ResultRow, Statement, WorkerProtocol, columns, indexes};
use pgrx::spi::quote_identifier;
pub use spi::SpiDb;
use std::rc::Rc;

pub struct Store {
    schema: String,
    /// The calls that workers outside the server make, too.
    pub protocol: WorkerProtocol<SpiDb>,
}

impl Store {
    /// Finds the schema of the extension. Call it in a transaction that holds a lock on the extension.
    pub fn open(worker: &str) -> SpiResult<Self> {
        let schema: Option<String> = Spi::get_one(
            "select n.nspname::text from pg_extension e join pg_namespace n on n.oid = e.extnamespace where e.extname = 'outbox'",
        )?;
        Ok(Self {
            schema: quote_identifier(schema.unwrap_or_default()),
            protocol: WorkerProtocol {
                db: SpiDb::default(),
                worker: worker.to_string(),
            },
        })
    }

    /// The destinations of this database, with the user mappings of the worker's role.
    pub fn destinations(&self) -> SpiResult<Vec<Described>> {
        let role = security::current_user();
        self.protocol.destinations(|_, server| mapping_of(server, role))
    }

    /// Takes over the event source that is set now. outbox_source_set() first makes the workers leave, so no worker
    /// claims with an older source. The restore of a dump does not make them leave.
    pub fn refresh_source(&self) -> SpiResult<()> {
        let now = self.protocol.db.read(&Source::query(&self.schema), Source::of)?;
        let mut known = self.protocol.db.source.borrow_mut();
        match (&now, &*known) {
            (None, None) => {}
            (Some(now), Some(known)) if now.is_the_same(known) => {}
            _ => *known = now.map(Rc::new),
        }
        Ok(())
    }

    /// The OID of a table of the extension.
    pub fn settings_table_oid(&self) -> SpiResult<u32> {
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
        let text = self.protocol.db.read(sql, |rows| rows.first().get_one::<Lossy>())?;
        Ok(text.unwrap_or_default().0)
    }

    /// Why nothing may be delivered from this database; None = the database is adopted.
    pub fn not_adopted(&self) -> SpiResult<Option<String>> {
        let sql = "select outbox_internal.not_adopted()";
        let why = self.protocol.db.read(sql, |rows| rows.first().get_one::<Lossy>())?;
        Ok(why.map(|why| why.0))
    }

    // ---- leases, in the transaction of the heartbeat
    // ------------------------------------------------------------------

    /// Takes leases. Returns those that it got, with their epochs.
    pub fn take(&self, partitions: &[Partition], ttl_s: i32) -> SpiResult<Vec<HeldLease>> {
        if partitions.is_empty() {
            return Ok(Vec::new());
        }
        let sql = "select partition, lease_epoch from outbox_internal.lease_take($1, $2, $3)";
        let args = [
            Arg::Text(Some(&self.protocol.worker)),
            indexes(partitions),
            Arg::Int(ttl_s),
        ];
        let db = &self.protocol.db;
        db.run(Statement::Text(sql), &args, |row| {
            Ok((row.partition(0)?, row.count(1)?))
        })
    }

    /// Renews leases. Returns those that this worker still holds.
    pub fn renew(&self, leases: &[HeldLease], ttl_s: i32) -> SpiResult<Vec<Partition>> {
        let sql = "select * from outbox_internal.lease_renew($1, $2, $3, $4)";
        let [worker, partitions, epochs] = self.held(leases);
        let args = [worker, partitions, epochs, Arg::Int(ttl_s)];
        self.protocol
            .db
            .run(Statement::Text(sql), &args, |row| row.partition(0))
    }

    pub fn release(&self, leases: &[HeldLease]) -> SpiResult<()> {
        if leases.is_empty() {
            return Ok(());
        }
        let sql = "select outbox_internal.lease_release($1, $2, $3)";
        (self.protocol.db)
            .run(Statement::Text(sql), &self.held(leases), |_| Ok(()))
            .map(drop)
    }

    fn held(&self, leases: &[HeldLease]) -> [Arg<'_>; 3] {
        let (partitions, epochs) = columns(leases);
        let worker = Arg::Text(Some(&self.protocol.worker));
        [worker, Arg::SmallInts(Some(partitions)), Arg::BigInts(Some(epochs))]
    }

    /// The prepared transactions of this database: xid, and when each was prepared, in µs since 1970.
    pub fn prepared_transactions(&self) -> SpiResult<Vec<(u32, i64)>> {
        let sql = "select transaction::text::bigint, (extract(epoch from prepared) * 1000000)::bigint
                   from pg_prepared_xacts where database = current_database()";
        let read = |row: &<SpiDb as Db>::ResultRow<'_>| Ok((row.count(0)? as u32, row.count(1)?));
        self.protocol.db.run(Statement::Text(sql), &[], read)
    }
}
