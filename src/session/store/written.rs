//! The statements of the triggers of outbox_attach and outbox_capture: they read the rows that a statement wrote, as
//! the writing role. Runs in a user's backend.

use crate::error::{UserError, internal};
use crate::pg::security;
use crate::pg::spi::{Spi, SpiClient, SpiHeapTupleData, SpiResult};
use crate::pg::text;
use crate::pg::trigger::Fired;
use crate::session::nesting::Inner;
use crate::store::statement::{self, SavedStatement};
use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

/// The most rows that are read and stored at once: a statement may write more than fits into memory.
pub const BATCH: usize = 500;
/// The size of the first batch, before the size of the rows is known.
const FIRST_BATCH: usize = 8;
/// The bytes that later batches aim at.
const BATCH_BYTES: usize = 4 << 20;
/// Below this size no allocation is checked.
const SMALL_BYTES: usize = 64 * 1024;

/// A statement that reads a transition table, and the text that it was prepared from.
type InsertStatement = (String, Rc<SavedStatement>);

thread_local! {
    /// By trigger, and by the position among its statements. Planned once per backend; the server plans again when a
    /// change of the table makes a plan stale.
    static PREPARED: RefCell<HashMap<(u32, usize), InsertStatement>> = RefCell::new(HashMap::new());
}

/// Runs statements over the transition tables, as a role if one is named, and hands over their rows in batches, those
/// of each statement side by side.
pub fn read_rows<R>(
    fired: &Fired,
    reader: Option<u32>,
    sqls: &[String],
    read: fn(&SpiHeapTupleData) -> SpiResult<(R, usize)>,
    mut each: impl FnMut(Vec<Vec<R>>) -> Result<(), UserError>,
) -> Result<(), UserError> {
    // The SPI session stays open until the end: only it sees the transition tables.
    Spi::connect_mut(|client| {
        fired.show_rows();
        let cursors: Vec<String> = as_reader(reader, || {
            let opened = sqls.iter().enumerate().map(|(which, sql)| {
                let statement = prepared(client, (fired.trigger, which), sql)?;
                let cursor = client.try_open_cursor_mut(&statement, &[])?;
                Ok(cursor.detach_into_name())
            });
            opened.collect::<SpiResult<_>>()
        })
        .map_err(internal)?;
        let mut count = FIRST_BATCH;
        loop {
            let fetched: Vec<Vec<(R, usize)>> = as_reader(reader, || {
                let batches = cursors.iter().map(|cursor| fetch(cursor, count, read));
                batches.collect::<SpiResult<_>>()
            })
            .map_err(internal)?;
            if fetched.iter().all(Vec::is_empty) {
                break;
            }
            let bytes: usize = fetched.iter().flatten().map(|(_, bytes)| bytes).sum();
            if bytes > SMALL_BYTES {
                text::check_memory(bytes * 4); // for the events made of it
            }
            let rows = fetched.iter().map(Vec::len).max().unwrap_or_default();
            count = (BATCH_BYTES * rows / bytes.max(1)).clamp(1, BATCH.min(count * 4));
            let rows = fetched
                .into_iter()
                .map(|rows| rows.into_iter().map(|(row, _)| row).collect());
            each(rows.collect())?;
        }
        for cursor in &cursors {
            statement::close(client, cursor).map_err(internal)?;
        }
        Ok(())
    })
}

fn as_reader<T>(reader: Option<u32>, body: impl FnOnce() -> T) -> T {
    match reader {
        Some(role) => security::run_restricted_as(role, body),
        None => body(),
    }
}

fn prepared(client: &mut SpiClient, which: (u32, usize), sql: &str) -> SpiResult<Rc<SavedStatement>> {
    let known = PREPARED.with_borrow(|known| known.get(&which).filter(|(of, _)| of == sql).map(|(_, s)| Rc::clone(s)));
    if let Some(statement) = known {
        return Ok(statement);
    }
    let statement = Rc::new(SavedStatement::from(client.prepare_mut(sql, &[])?.keep()));
    let entry = (sql.to_owned(), Rc::clone(&statement));
    PREPARED.with_borrow_mut(|known| known.insert(which, entry));
    Ok(statement)
}

/// Runs in a separate SPI session, whose end frees the rows.
fn fetch<R>(cursor: &str, count: usize, read: fn(&SpiHeapTupleData) -> SpiResult<R>) -> SpiResult<Vec<R>> {
    Spi::connect_mut(|client| statement::fetch(client, cursor, count, |rows| rows.map(|row| read(&row)).collect()))
}

/// Gives these messages and their events new seqs, in this order. Runs as the owner of the tables.
pub fn renumber(messages: &mut [Inner]) -> Result<(), UserError> {
    let sql = "select outbox_internal.renumber($1, $2, $3)";
    let seqs: Vec<i64> = messages.iter().map(|message| message.seq).collect();
    let destinations: Vec<String> = messages.iter().map(|message| message.destination.clone()).collect();
    let partitions: Vec<i16> = messages.iter().map(|message| message.partition.as_i16()).collect();
    let args = [seqs.into(), destinations.into(), partitions.into()];
    let renumbered: Option<Vec<i64>> = Spi::get_one_with_args(sql, &args).map_err(internal)?;
    for (message, seq) in messages.iter_mut().zip(renumbered.unwrap_or_default()) {
        message.seq = seq;
    }
    Ok(())
}

/// Frees the memory of the server that `body` allocates.
pub fn with_own_memory<T>(body: impl FnOnce() -> T) -> T {
    Spi::connect(|_| body())
}
