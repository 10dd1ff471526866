//! The statements of the triggers of outbox_attach and outbox_capture: they read the rows that a statement wrote, as
//! the writing role. Runs in a user's backend.

use crate::error::{UserError, internal};
use crate::limits::BATCH;
use crate::pg::security;
use crate::pg::spi::{Spi, SpiClient, SpiHeapTupleData, SpiResult};
use crate::pg::text;
use crate::pg::trigger::{Fired, TriggerTable};
use crate::pg::versions::{Side, Versions};
use crate::session::store::statements::Statements;
use crate::session::store::subscription_conditions;
use crate::store::statement::{self, SavedStatement};
use outbox_core::change_log::{RowChange, Version, Write, Writer};
use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

/// The statement of a table or trigger, and the text that it was prepared from.
type KnownStatement = (String, Rc<SavedStatement>);

/// A session may write to more tables than it can keep plans for.
const STATEMENTS_MAX: usize = 100;

thread_local! {
    /// By the OID of the table or trigger. Planned once per backend; the server plans again when a change of the table
    /// makes a plan stale.
    static PREPARED: RefCell<HashMap<u32, KnownStatement>> = RefCell::new(HashMap::new());
}

/// Runs a statement over the transition table of a trigger, as a role if one is named, and hands over its rows in
/// batches.
pub fn read_rows<R>(
    fired: &Fired,
    reader: Option<u32>,
    sql: &str,
    read: fn(&SpiHeapTupleData) -> SpiResult<R>,
    mut each: impl FnMut(Vec<R>) -> Result<(), UserError>,
) -> Result<(), UserError> {
    // The SPI session stays open until the end: only it sees the transition table.
    Spi::connect_mut(|client| {
        fired.show_rows();
        let cursor = as_reader(reader, || {
            let statement = prepared(client, fired.trigger, sql)?;
            Ok(client.try_open_cursor(&statement, &[])?.detach_into_name())
        })
        .map_err(internal)?;
        loop {
            let rows = as_reader(reader, || fetch(&cursor, BATCH, read)).map_err(internal)?;
            if rows.is_empty() {
                break;
            }
            each(rows)?;
        }
        statement::close(client, &cursor).map_err(internal)
    })
}

fn as_reader<T>(reader: Option<u32>, body: impl FnOnce() -> T) -> T {
    match reader {
        Some(role) => security::run_restricted_as(role, body),
        None => body(),
    }
}

// ---- rows of captured tables ----------------------------------------------------------------------------------------

/// The bytes of rows, not compressed, after which a batch ends.
const BATCH_BYTES: usize = 4 << 20;
/// The name of the rows of a batch in the statement that reads them.
const ROWS: &str = "outbox_rows";

/// A table whose rows are read.
pub trait ReadTable: Sized {
    /// None: its rows are not read.
    fn of(table: &TriggerTable) -> Result<Option<Self>, UserError>;
    /// In SQL, over a row `r`: what [`EvaluatedRow`] has.
    fn columns(&self) -> &str;
    fn oid(&self) -> u32;
    fn statements(&self) -> &'static Statements;
    /// Adds what a user must know to an error.
    fn explain(&self, error: UserError) -> UserError;
}

/// JSON, id of the aggregate, and whether it is marked as deleted.
pub type EvaluatedRow = (Option<String>, Option<String>, Option<bool>);

pub struct ReadRows<T> {
    /// None: its rows are not read.
    pub tables: Vec<Option<T>>,
    /// Of each change that was read. None: it makes no event.
    pub rows: Vec<Option<ReadRow>>,
}

/// The position of the table, and the row before and after the change.
type ReadRow = (usize, Option<EvaluatedRow>, Option<EvaluatedRow>);

/// The rows of one table that one role wrote.
struct WriterGroup<T> {
    oid: u32,
    writer: Writer,
    read: Option<(Versions, T)>,
}

/// Where the rows before and after a change are among those of its group.
type Places = [Option<usize>; 2];

/// Reads the rows of changes, up to a number of bytes, as the roles that wrote them.
pub fn read_changes<T: ReadTable>(changes: &[RowChange]) -> Result<ReadRows<T>, UserError> {
    Spi::connect_mut(|client| {
        let (mut groups, mut bytes, mut placed) = (Vec::new(), 0, Vec::new());
        for change in changes {
            let group = group_of::<T>(change, &mut groups)?;
            placed.push(groups[group].read.as_mut().and_then(|(versions, _)| {
                let (places, more) = add(versions, &change.write)?;
                bytes += more;
                Some((group, places))
            }));
            if bytes > BATCH_BYTES {
                break;
            }
        }
        let (mut tables, mut rows) = (Vec::new(), Vec::new());
        for WriterGroup { writer, read, .. } in groups {
            let Some((versions, table)) = read else {
                tables.push(None);
                rows.push(Vec::new());
                continue;
            };
            rows.push(evaluate(client, &versions, writer, &table).map_err(|error| table.explain(error))?);
            versions.close();
            tables.push(Some(table));
        }
        let taken = placed.into_iter().map(|placed: Option<(usize, Places)>| {
            let (group, places) = placed?;
            let [old, new] = places.map(|place| rows[group].get_mut(place?)?.take());
            Some((group, old, new))
        });
        Ok(ReadRows {
            rows: taken.collect(),
            tables,
        })
    })
}

fn group_of<T: ReadTable>(change: &RowChange, groups: &mut Vec<WriterGroup<T>>) -> Result<usize, UserError> {
    let (oid, writer) = (change.table(), change.origin.writer);
    let is_of = |group: &WriterGroup<T>| group.oid == oid && group.writer == writer;
    if let Some(known) = groups.iter().position(is_of) {
        return Ok(known);
    }
    let mut read = None;
    if let Some(versions) = Versions::of(oid) {
        match T::of(&versions.table())? {
            Some(table) => read = Some((versions, table)),
            None => versions.close(),
        }
    }
    groups.push(WriterGroup { oid, writer, read });
    Ok(groups.len() - 1)
}

/// Adds the versions of a change to those of its group; returns their places and their size. None: the change makes no
/// event.
fn add(versions: &mut Versions, write: &Write) -> Option<(Places, usize)> {
    let mut add = |version: Version, side| {
        let at = versions.count();
        versions.add(version, side).map(|added| (at, added))
    };
    Some(match write {
        Write::Insert(new) | Write::Arrive { new, .. } => {
            let (at, added) = add(*new, Side::New)?;
            ([None, Some(at)], added.bytes)
        }
        Write::Delete(old) => {
            let (at, added) = add(*old, Side::Old)?;
            ([Some(at), None], added.bytes)
        }
        Write::Update { old, new } => {
            let (before, old_added) = add(*old, Side::Old)?;
            // When a row moves to another partition, core evaluates the clause of the partitioned table as well, with
            // the partition that the row has left.
            if old_added.is_moved && old.table == new.table {
                return None;
            }
            let (after, new_added) = add(*new, Side::New)?;
            ([Some(before), Some(after)], old_added.bytes + new_added.bytes)
        }
    })
}

/// Runs the statement that reads the rows, with the expressions of users.
fn evaluate<T: ReadTable>(
    client: &mut SpiClient,
    versions: &Versions,
    writer: Writer,
    table: &T,
) -> Result<Vec<Option<EvaluatedRow>>, UserError> {
    versions.show(ROWS);
    let sql = format!("select {} from {ROWS} r", table.columns());
    let run = || {
        let statement = prepared(client, table.oid(), &sql)?;
        let rows = client.update(&**statement, None, &[])?;
        rows.map(|row| Ok(Some((row.get(1)?, row.get(2)?, row.get(3)?))))
            .collect::<SpiResult<Vec<Option<EvaluatedRow>>>>()
    };
    let rows = match writer.role == table.statements().owner {
        true => security::run_restricted_as(subscription_conditions::reader()?, run),
        false => security::run_with(writer.role, writer.restrictions, run),
    };
    versions.hide(ROWS);
    let rows = rows.map_err(internal)?;
    let length = |text: &Option<String>| text.as_ref().map_or(0, String::len);
    let bytes: usize = rows
        .iter()
        .flatten()
        .map(|(json, id, _)| length(json) + length(id))
        .sum();
    text::check_memory(bytes * 4); // for the events made of them
    Ok(rows)
}

// ---- both -----------------------------------------------------------------------------------------------------------

fn prepared(client: &mut SpiClient, of: u32, sql: &str) -> SpiResult<Rc<SavedStatement>> {
    let known = PREPARED.with_borrow(|known| {
        known
            .get(&of)
            .filter(|(text, _)| text == sql)
            .map(|(_, s)| Rc::clone(s))
    });
    if let Some(statement) = known {
        return Ok(statement);
    }
    let statement = Rc::new(SavedStatement::from(client.prepare_mut(sql, &[])?));
    let entry = (sql.to_owned(), Rc::clone(&statement));
    PREPARED.with_borrow_mut(|known| {
        if known.len() >= STATEMENTS_MAX {
            known.clear();
        }
        known.insert(of, entry)
    });
    Ok(statement)
}

/// Runs in a separate SPI session, whose end frees the rows.
fn fetch<R>(cursor: &str, count: usize, read: fn(&SpiHeapTupleData) -> SpiResult<R>) -> SpiResult<Vec<R>> {
    Spi::connect_mut(|client| statement::fetch(client, cursor, count, |rows| rows.map(|row| read(&row)).collect()))
}

/// Frees the memory of the server that `body` allocates.
pub fn with_own_memory<T>(body: impl FnOnce() -> T) -> T {
    Spi::connect(|_| body())
}
