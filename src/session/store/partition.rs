//! The partition of a message: by its key or its seq, or by the partitioner of the user. Runs in a user's backend.

use super::statements::{Statements, statements};
use crate::error::{UserError, changed_since, internal, invalid, unexpected};
use crate::pg::spi::{Spi, SpiResult};
use crate::pg::table::{self, Row};
use crate::pg::trigger::Call;
use crate::pg::{catalog, guc, security};
use crate::shared::sessions;
use outbox_core::partition::{Partition, crc32};
use outbox_core::session_settings::TEXTS;
use pgrx::PgSqlErrorCode;
use pgrx::spi::quote_identifier;

/// The settings of this database that a message follows. They stay as they are until the transaction ends: see
/// [`Statements::hold`].
pub struct Partitioning<'a> {
    schema: &'a str,
    pub count: i16,
    /// The function that gives the partition of a key; None = CRC-32.
    partitioner: Option<String>,
}

impl<'a> Partitioning<'a> {
    /// Reads the settings as a new statement of this transaction sees them. Runs as the owner of the tables.
    pub fn read(statements: &'a Statements) -> Result<Self, UserError> {
        let by_scan = table::only_row(statements.settings, |row: Row| {
            row.int2(2).map(|count| (count, row.text(4)))
        });
        let (count, partitioner) = match by_scan.flatten() {
            Some(read) => read,
            None => read_by_statement(statements)?, // which reports why there is no row
        };
        let schema = &statements.schema;
        Ok(Self {
            schema,
            count,
            partitioner,
        })
    }

    /// Refuses a partition that does not exist.
    pub fn check(&self, partition: Partition) -> Result<(), UserError> {
        if partition.as_i16() < self.count {
            return Ok(());
        }
        let last = Partition::new(i64::from(self.count) - 1).map_or_else(|error| error.to_string(), Partition::label);
        Err(invalid(
            format!("partition {} does not exist", partition.as_i16()),
            format!("The partitions are p00 to {last}."),
        ))
    }

    pub fn partition_of(&self, key: Option<&str>, seq: i64) -> Result<Partition, UserError> {
        let partition = match (key, &self.partitioner) {
            (None, _) => seq % i64::from(self.count),
            (Some(key), None) => i64::from(crc32(key)) % i64::from(self.count),
            (Some(key), Some(name)) => query_partitioner(self.schema, name, self.count, None, key)?.into(),
        };
        Partition::new(partition).map_err(unexpected)
    }
}

fn read_by_statement(statements: &Statements) -> Result<(i16, Option<String>), UserError> {
    let schema = &statements.schema;
    let settings = format!("select s.partition_count, s.partitioner from {schema}.outbox_settings s");
    let read: SpiResult<Option<(Option<i16>, Option<String>)>> = Spi::connect_mut(|client| {
        let rows = client.update(settings.as_str(), Some(1), &[])?;
        (!rows.is_empty()).then(|| rows.first().get_two()).transpose()
    });
    if let Some((count, partitioner)) = read.map_err(internal)? {
        return Ok((count.unwrap_or_default(), partitioner));
    }
    let table = format!("{schema}.outbox_settings");
    let is_hidden = Spi::get_one_with_args("select pg_catalog.row_security_active($1)", &[table.into()]);
    if is_hidden.map_err(internal)? == Some(true) {
        return Err(UserError::new(
            PgSqlErrorCode::ERRCODE_INSUFFICIENT_PRIVILEGE,
            "row security hides the row of outbox_settings",
            format!("ALTER TABLE {schema}.outbox_settings NO FORCE ROW LEVEL SECURITY;"),
        ));
    }
    let latest = Spi::connect(|client| Ok(client.select_latest(&settings)?.is_empty()));
    if latest.map_err(internal)? {
        return Err(UserError::new(
            PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
            "outbox_settings has lost its row: nothing can be published",
            "An administrator calls outbox_configure(): see outbox_health.",
        ));
    }
    // No row is kept that an older snapshot sees: with the old count one key would be in two partitions, and by the old
    // source a seq would be another event.
    Err(changed_since(
        "outbox_configure() or outbox_source_set() made changes after this transaction began",
    ))
}

/// Changes the settings of this database: as the owner of the tables, for the caller, who names a partitioner with the
/// caller's own rights.
pub fn configure(
    fcinfo: Call,
    partition_count: Option<i32>,
    leasing: Option<bool>,
    partitioner: Option<&str>,
) -> Result<(), UserError> {
    sessions::begin_to_own();
    let statements = statements(fcinfo);
    let sql = "select outbox_internal.configure_for($1::pg_catalog.oid, $2, $3, $4)";
    let args = [
        i64::from(security::current_user()).into(),
        partition_count.into(),
        leasing.into(),
        partitioner.into(),
    ];
    security::run_as(statements.owner, || Spi::run_with_args(sql, &args)).map_err(internal)
}

/// The partition of a key by a partitioner, given by name and owner; None = CRC-32.
pub fn partition_by(fcinfo: Call, partitioner: Option<(&str, &str)>, key: &str, count: i16) -> Result<i16, UserError> {
    match partitioner {
        None => Ok((i64::from(crc32(key)) % i64::from(count)) as i16),
        Some((name, owner)) => query_partitioner(&statements(fcinfo).schema, name, count, Some(owner), key),
    }
}

/// Runs the function restricted and as its owner, whichever role enqueues: as the role that owned it when a member of
/// that role named it, and never as a superuser. A change of its owner makes it another function. `named_owner`: None =
/// read it from the settings.
fn query_partitioner(
    schema: &str,
    name: &str,
    count: i16,
    named_owner: Option<&str>,
    key: &str,
) -> Result<i16, UserError> {
    let sql = format!(
        "select p.proowner::pg_catalog.int8, coalesce($2, s.partitioner_owner)
         from outbox_internal.partitioner($1) p left join {schema}.outbox_settings s on s.partitioner operator(pg_catalog.=) $1"
    );
    // `update`, because `select` may take the snapshot of the calling statement, which is older than the lock of the
    // settings.
    let found: SpiResult<Option<(Option<i64>, Option<String>)>> = Spi::connect_mut(|client| {
        let rows = client.update(sql.as_str(), Some(1), &[name.into(), named_owner.into()])?;
        (!rows.is_empty()).then(|| rows.first().get_two()).transpose()
    });
    let Some((owner, named)) = found.map_err(internal)? else {
        return Err(UserError::new(
            PgSqlErrorCode::ERRCODE_UNDEFINED_FUNCTION,
            format!("the partitioner {name} does not exist"),
            "Create it again, or outbox_configure(partitioner => '') for the built-in one.",
        ));
    };
    let owner = owner.unwrap_or_default() as u32;
    let owner_name = catalog::role_name(owner);
    if catalog::is_superuser(owner) || named.as_deref() != Some(&owner_name) {
        return Err(UserError::new(
            PgSqlErrorCode::ERRCODE_INSUFFICIENT_PRIVILEGE,
            format!(
                "the partitioner {name} belongs to {}, a superuser or a role that did not own it at outbox_configure()",
                quote_identifier(owner_name)
            ),
            format!(
                "It runs as its owner. Give it an owner without SUPERUSER, and call outbox_configure(partitioner => '{name}') again."
            ),
        ));
    }
    let call = format!("select {name}($1, $2)");
    let answer: Option<i32> = guc::with(TEXTS, || {
        security::run_restricted_as(owner, || {
            Spi::get_one_with_args(&call, &[key.into(), i32::from(count).into()])
        })
    })
    .map_err(internal)?;
    match answer {
        Some(partition) if (0..i32::from(count)).contains(&partition) => Ok(partition as i16),
        answer => Err(UserError {
            detail: Some(format!(
                "It returned {}.",
                answer.map_or("NULL".to_owned(), |partition| partition.to_string())
            )),
            ..UserError::new(
                PgSqlErrorCode::ERRCODE_NUMERIC_VALUE_OUT_OF_RANGE,
                format!("the partitioner {name} did not return a partition"),
                format!("It must return 0 to {} for every key.", count - 1),
            )
        }),
    }
}
