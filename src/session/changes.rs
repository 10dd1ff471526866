//! The rows that this session writes to captured tables, from the write to the event. Runs in a user's backend.
//!
//! The WHEN clause of the triggers of outbox_capture notes each row when it is written, in a log of the session. The
//! events are stored later, in the order of the log: when the trigger of the first row of a query fires, which is after
//! all its rows; when the log has enough rows for a batch; and before outbox_publish stores its event.

use crate::error::{UserError, warning};
use crate::limits::BATCH;
use crate::pg::trigger::{Operation, row_table};
use crate::pg::when::{self, QueryMemory, WhenCall};
use crate::pg::xact::{self, End};
use crate::pg::{guc, security, text, txn, versions};
use outbox_core::change_log::{ChangeLog, Origin, RowChange, Version, Write, Writer};
use outbox_core::session_settings;
use pgrx::PgSqlErrorCode;
use std::cell::{Cell, RefCell};
use std::sync::OnceLock;

/// A query that has begun to write rows, or a statement on a table with children.
struct OpenQuery {
    memory: QueryMemory,
    id: u64,
    /// The captured tables that it names, each with the tables that inherit from it.
    parents: Vec<(u32, Vec<u32>)>,
}

/// Stores the events of changes, and returns how many have theirs then: some may be left for the next call.
type StoreFn = fn(&[RowChange]) -> Result<usize, UserError>;

static STORE: OnceLock<StoreFn> = OnceLock::new();

/// Called by `_PG_init`.
pub fn init(store: StoreFn) {
    let _ = STORE.set(store);
}

thread_local! {
    static LOG: RefCell<ChangeLog> = RefCell::default();
    static QUERIES: RefCell<Vec<OpenQuery>> = const { RefCell::new(Vec::new()) };
    static IS_STORING: Cell<bool> = const { Cell::new(false) };
}

// ---- rows -----------------------------------------------------------------------------------------------------------

/// A row was written. Returns whether its trigger is to fire: for the first row of a query, because the trigger fires
/// when the query is over.
pub fn row_written(call: WhenCall, operation: Operation) -> Result<bool, UserError> {
    let version = |argument| Version {
        table: call.table(),
        at: call.place(argument),
    };
    if operation == Operation::Update && row_moved(call, version(1)) {
        return Ok(false);
    }
    let known = call.kept::<Origin>();
    let is_first = known.is_none();
    let origin = match known {
        Some(origin) => origin,
        None => match origin(call)? {
            Some(origin) => origin,
            None => return Ok(false),
        },
    };
    let pending = match operation {
        Operation::Insert => noted(|log| log.add(origin, Write::Insert(version(1)), is_first)),
        Operation::Update => {
            let (old, new) = (version(1), version(2));
            noted(|log| log.add(origin, Write::Update { old, new }, is_first))
        }
        _ => noted(|log| log.add(origin, Write::Delete(version(1)), is_first)),
    };
    // Of a row that may have moved, core says so right after this call.
    let is_known = operation != Operation::Insert || !LOG.with_borrow(|log| log.may_be_move(origin.query));
    if pending >= BATCH && is_known {
        store_events()?;
    }
    Ok(is_first)
}

/// Right after a row has moved to another partition, core evaluates the clause of the partitioned table as well: with
/// the version that the row has left, or without a table.
fn row_moved(call: WhenCall, left: Version) -> bool {
    let may_be_move = |query: &u64| LOG.with_borrow(|log| log.may_be_move(*query)) && call.is_genuine();
    let query = known_query(call.query_memory()).filter(may_be_move);
    let left = (left.table != 0).then_some(left);
    query.is_some_and(|query| LOG.with_borrow_mut(|log| log.moved(query, left)))
}

fn noted(note: impl FnOnce(&mut ChangeLog)) -> usize {
    with_room(false, |log| {
        note(log);
        log.pending()
    })
}

/// Its length depends on a user's data. Raises without memory, where Rust would abort the process.
fn with_room<T>(arrives: bool, add: impl FnOnce(&mut ChangeLog) -> T) -> T {
    let added = LOG.with_borrow_mut(|log| log.has_room(arrives).then(|| add(log)));
    added.unwrap_or_else(|| text::out_of_memory(size_of::<RowChange>()))
}

/// Who writes the rows of this call's table, and of the later calls in its query. None: they make no events.
fn origin(call: WhenCall) -> Result<Option<Origin>, UserError> {
    if !call.is_genuine() {
        return Err(UserError::new(
            PgSqlErrorCode::ERRCODE_E_R_I_E_TRIGGER_PROTOCOL_VIOLATED,
            "this function is for the triggers of outbox_capture",
            "Call outbox_capture(), which creates them.",
        ));
    }
    let oid = call.table();
    let table = row_table(oid);
    // Core evaluates the clause of the partitioned table, too, when a row moves; its trigger never fires.
    if oid == 0 || table.is_partitioned {
        return Ok(None);
    }
    if !table.is_table {
        return Err(UserError::new(
            PgSqlErrorCode::ERRCODE_FEATURE_NOT_SUPPORTED,
            "a captured table has a foreign table for a partition",
            "Detach the foreign table, or call outbox_uncapture: Postgres does not report where its rows are.",
        ));
    }
    let (role, restrictions) = security::user_and_restrictions();
    let memory = call.query_memory();
    let query = query(memory);
    let through = QUERIES.with_borrow(|queries| {
        let parents = queries.iter().filter(|query| query.memory == memory);
        let mut parents = parents.flat_map(|query| &query.parents);
        parents
            .find(|(_, children)| children.contains(&oid))
            .map(|(parent, _)| *parent)
    });
    let origin = Origin {
        query,
        savepoint: xact::current_savepoint(),
        writer: Writer { role, restrictions },
        through,
        may_move: table.is_partition,
    };
    call.keep(origin);
    Ok(Some(origin))
}

fn known_query(memory: QueryMemory) -> Option<u64> {
    QUERIES.with_borrow(|queries| {
        let known = queries.iter().rev().find(|query| query.memory == memory);
        known.map(|query| query.id)
    })
}

/// The id of the query with this memory.
fn query(memory: QueryMemory) -> u64 {
    known_query(memory).unwrap_or_else(|| {
        let id = LOG.with_borrow_mut(|log| log.begin(xact::current_savepoint()));
        when::at_end_of(memory, over, id);
        QUERIES.with_borrow_mut(|queries| {
            queries.push(OpenQuery {
                memory,
                id,
                parents: Vec::new(),
            });
        });
        id
    })
}

/// A query is over, also by an error. Core frees its memory.
fn over(query: u64) {
    QUERIES.with_borrow_mut(|queries| queries.retain(|open| open.id != query));
    LOG.with_borrow_mut(|log| log.ended(query));
}

/// A statement names a captured table, from which these inherit. Rows that it writes to them are captured as rows of
/// the table.
pub fn statement_begins(memory: QueryMemory, parent: u32, children: Vec<u32>) {
    let id = query(memory);
    QUERIES.with_borrow_mut(|queries| {
        if let Some(query) = queries.iter_mut().find(|query| query.id == id) {
            query.parents.retain(|(known, _)| *known != parent);
            query.parents.push((parent, children));
        }
    });
}

/// The trigger of the first row that a query has written fires.
pub fn first_fires(first: &Write) -> Result<(), UserError> {
    LOG.with_borrow_mut(|log| log.first_fires(first));
    store_events()
}

// ---- events ---------------------------------------------------------------------------------------------------------

/// Stores the events of all rows that have none. Rows that are written meanwhile are stored by the outermost call.
pub fn store_events() -> Result<(), UserError> {
    if LOG.with_borrow(ChangeLog::pending) == 0 || IS_STORING.replace(true) {
        return Ok(());
    }
    let _ends = Ends;
    let Some(store) = STORE.get() else { return Ok(()) };
    LOG.with_borrow_mut(|log| log.assume_moves(versions::is_moved));
    // The same values make the same event in all sessions.
    let environment = [session_settings::NAMES, session_settings::TEXTS].concat();
    loop {
        let changes = LOG.with_borrow(|log| log.next(BATCH, versions::is_moved));
        if changes.is_empty() {
            return Ok(());
        }
        let stored = guc::with(&environment, || store(&changes))?;
        if let Some(last) = changes[..stored].last() {
            LOG.with_borrow_mut(|log| log.stored(last.number, xact::current_savepoint()));
        }
    }
}

struct Ends;

impl Drop for Ends {
    fn drop(&mut self) {
        IS_STORING.set(false);
    }
}

/// This update changes the id of the aggregate. It has the event of the old one now; that of the new one, with this
/// key, comes after the rows of its query.
pub fn arrives_later(change: &RowChange, key: String) {
    with_room(true, |log| log.split(change.number, key));
}

/// The aggregate with the key of this event, if it comes later and must come before the event: another query changes it
/// again.
pub fn arrives_before(change: &RowChange, key: impl FnOnce() -> String) -> Option<RowChange> {
    LOG.with_borrow_mut(|log| match log.has_arrivals() {
        true => log.take_arrival(&key(), change.origin.query, xact::current_savepoint()),
        false => None,
    })
}

// ---- the end of the transaction -------------------------------------------------------------------------------------

/// After Committed this neither allocates nor raises.
pub fn ended(end: End) {
    match end {
        End::Committing => store_before_commit(),
        End::Preparing => {
            LOG.with_borrow_mut(ChangeLog::all_ended);
            if LOG.with_borrow(ChangeLog::pending) > 0 {
                txn::with_snapshot(store_events).unwrap_or_else(|error| error.raise());
            }
        }
        End::SavepointReleased { id, into } => LOG.with_borrow_mut(|log| log.released(id, into)),
        End::SavepointAborted { id } => LOG.with_borrow_mut(|log| log.aborted(id)),
        End::Committed | End::Aborted | End::Prepared => {
            LOG.with_borrow_mut(ChangeLog::clear);
            QUERIES.with_borrow_mut(Vec::clear);
        }
    }
}

/// No row is left here, unless a trigger of a user has the WHEN clause of ours. The transaction commits in any case.
fn store_before_commit() {
    LOG.with_borrow_mut(ChangeLog::all_ended);
    let count = LOG.with_borrow(ChangeLog::pending);
    if count == 0 {
        return;
    }
    let store = || txn::with_snapshot(store_events).map_err(|error| error.message);
    if let Err(message) = txn::attempt(store) {
        warning(
            format!("{count} rows of captured tables have no event: {message}"),
            "Call outbox_capture() again for their tables.",
        );
    }
}
