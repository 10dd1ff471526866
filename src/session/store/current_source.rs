//! The event source that is set, and how another one is set. Runs in a user's backend.

use super::statements::{Statements, statements};
use crate::error::{UserError, changed_since, internal};
use crate::pg::spi::{Spi, SpiClient};
use crate::pg::trigger::Call;
use crate::pg::{catalog, security, table, xact};
use crate::store::source::{PARTS, Source};
use pgrx::PgSqlErrorCode;
use std::rc::Rc;

/// Whether events are in another table than outbox_events: outbox_events then has a trigger that refuses rows, and the
/// server's cache knows it. Called in a function of the extension.
pub fn is_set(call: Call) -> bool {
    catalog::has_trigger(statements(call).event_table, c"outbox_source")
}

/// The source that is set, read as the owner of the tables. It stays until the transaction ends: see
/// [`Statements::lock`].
pub(super) fn of(statements: &Statements) -> Result<Option<Rc<Source>>, UserError> {
    if !catalog::has_trigger(statements.event_table, c"outbox_source") {
        return Ok(None);
    }
    // Whoever changes the source closes outbox_events again, which changes that table.
    let changes = table::changes_from_now(statements.event_table);
    if let Some((at, source)) = &*statements.source.borrow()
        && *at == changes
    {
        return Ok(Some(Rc::clone(source)));
    }
    let source = Rc::new(read(statements)?);
    // An older snapshot may show an older source.
    if !xact::keeps_snapshot() {
        statements.source.replace(Some((changes, Rc::clone(&source))));
    }
    Ok(Some(source))
}

fn read(statements: &Statements) -> Result<Source, UserError> {
    let read = Spi::connect_mut(|client| {
        let statement = statements
            .read_source
            .get_or(|| client.prepare_mut(&Source::query(&statements.schema), &[]))?;
        // `update`, as `select` may take the snapshot of the calling statement, which is older than the lock.
        let rows = client.update(statement, Some(1), &[]);
        rows.and_then(Source::of).map_err(internal)
    })?;
    if let Some(source) = read {
        return Ok(source);
    }
    let latest = Spi::connect(|client| Ok(client.select_latest(&Source::query(&statements.schema))?.is_empty()));
    if latest.map_err(internal)? {
        return Err(UserError::new(
            PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
            "outbox_source has lost its row",
            "Call outbox_source_set() for the same relation again, or outbox_source_reset().",
        ));
    }
    // outbox_source_set() keeps no row that an older snapshot sees: its seqs mean other events.
    Err(changed_since(
        "outbox_source_set() changed the source after this transaction began",
    ))
}

/// The source that is set, whichever role the session has.
pub fn get(call: Call) -> Result<Option<Rc<Source>>, UserError> {
    let statements = statements(call);
    security::run_as(statements.owner, || of(statements))
}

/// Sets it as the source. `seq_is_lost`: the source before this one cannot find its rows any more.
pub fn set(call: Call, source: &Source, oid: u32, seq_is_lost: bool) -> Result<(), UserError> {
    let statements = statements(call);
    let schema = &statements.schema;
    let parts: Vec<String> = (0..PARTS.len()).map(|part| format!("$4[{}]", part + 1)).collect();
    let sql = format!(
        "select outbox_internal.source_write(
           row(true, $1, $2::pg_catalog.oid, pg_catalog.pg_get_userbyid($5::pg_catalog.oid)::pg_catalog.text, pg_catalog.now(), {})::{schema}.outbox_source, $3)",
        parts.join(", ")
    );
    let args = [
        source.relation.as_str().into(),
        i64::from(oid).into(),
        seq_is_lost.into(),
        source.mapping.clone().into(),
        i64::from(source.owner).into(),
    ];
    security::run_as(statements.owner, || Spi::run_with_args(&sql, &args)).map_err(internal)
}

/// A relation as the catalogs describe it, for the caller that sets it as the source.
pub struct Relation {
    pub schema: String,
    pub name: String,
    pub kind: String,
    pub is_temporary: bool,
    pub owner: u32,
    pub owner_name: String,
    /// It belongs to the extension.
    pub is_ours: bool,
    pub columns: Vec<String>,
}

pub fn relation(oid: u32) -> Result<Option<Relation>, UserError> {
    // `update`: under the lock the names are those of now, and the snapshot of the calling statement has older ones.
    let sql = "select n.nspname::text, c.relname::text, c.relkind::text, c.relpersistence = 't', c.relowner::int8,
                      pg_get_userbyid(c.relowner)::text,
                      exists (select from pg_depend d join pg_extension x on x.oid = d.refobjid and x.extname = 'outbox'
                              where d.classid = 'pg_class'::regclass
                                and d.objid = coalesce(pg_partition_root(c.oid), c.oid::regclass)
                                and d.refclassid = 'pg_extension'::regclass and d.deptype = 'e'),
                      array(select a.attname::text from pg_attribute a
                            where a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped)
               from pg_class c join pg_namespace n on n.oid = c.relnamespace where c.oid = $1::oid";
    let read = |client: &mut SpiClient| {
        let rows = client.update(sql, Some(1), &[i64::from(oid).into()])?;
        if rows.is_empty() {
            return Ok(None);
        }
        let row = rows.first();
        Ok(Some(Relation {
            schema: row.get(1)?.unwrap_or_default(),
            name: row.get(2)?.unwrap_or_default(),
            kind: row.get(3)?.unwrap_or_default(),
            is_temporary: row.get(4)?.unwrap_or_default(),
            owner: row.get::<i64>(5)?.unwrap_or_default() as u32,
            owner_name: row.get(6)?.unwrap_or_default(),
            is_ours: row.get(7)?.unwrap_or_default(),
            columns: row.get(8)?.unwrap_or_default(),
        }))
    };
    Spi::connect_mut(read).map_err(internal)
}
