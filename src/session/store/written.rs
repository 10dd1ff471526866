//! The statements of the triggers of outbox_attach and outbox_capture: they read the rows that a statement wrote, as
//! the writing role. Runs in a user's backend.

use crate::error::{UserError, internal};
use crate::pg::security;
use crate::pg::spi::{Spi, SpiClient, SpiHeapTupleData, SpiResult};
use crate::pg::trigger::Fired;
use crate::session::changes::BATCH;
use crate::store::statement::{self, SavedStatement};
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
            Ok(client.try_open_cursor_mut(&statement, &[])?.detach_into_name())
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

/// JSON, id of the aggregate, and whether it is marked as deleted.
pub type Row = (Option<String>, Option<String>, Option<bool>);

/// Runs the statement that reads the rows of a table.
pub fn run(client: &mut SpiClient, table: u32, sql: &str) -> Result<Vec<Row>, UserError> {
    let rows = prepared(client, table, sql).and_then(|statement| {
        let rows = client.update(&**statement, None, &[])?;
        rows.map(|row| Ok((row.get(1)?, row.get(2)?, row.get(3)?))).collect()
    });
    rows.map_err(internal)
}

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
    let statement = Rc::new(SavedStatement::from(client.prepare_mut(sql, &[])?.keep()));
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
