//! The triggers that outbox_attach and outbox_capture put on tables, and the roles that their parts run as. Called at
//! the end of the statement that wrote the rows, in its session.
//!
//! The rows are read and the user's expressions evaluated as the writing role, as in any trigger. Only events and
//! pointers are written as the owner of the extension, which a writer need not know. Inside outbox_publish that owner
//! is the writing role; there the expressions run as a role without rights.

use crate::config::Context;
use crate::error::{UserError, invalid};
use crate::limits::check_body;
use crate::pg::spi::SpiHeapTupleData;
use crate::pg::trigger::{self, Call, Fired, Operation};
use crate::pg::{security, text};
use crate::session::checks;
use crate::session::nesting;
use crate::session::store::enqueue::{self as store, Enqueue, Keys};
use crate::session::store::new_event::{IfExists, NewEvent, Times};
use crate::session::store::statements::statements;
use crate::session::store::{publish, source, written};
use outbox_core::change::{CaptureRules, Change, ChangedRow, Operations, Update};
use outbox_core::envelope;
use outbox_core::trigger::{Attached, Captured};
use outbox_worker::DEFAULT_DESTINATION;
use pgrx::PgSqlErrorCode;
use pgrx::spi::quote_identifier;

// ---- outbox_attach --------------------------------------------------------------------------------------------------

/// Enqueues the rows of an event table that the condition chooses. Their order is that of their seqs, not of this loop.
pub fn attached(call: Call) -> Result<(), UserError> {
    let fired = fired(call)?;
    let attached = settings(&fired, outbox_core::trigger::parse::<Attached>)?;
    let (Operation::Insert, false, Some(rows)) = (fired.operation, fired.is_before, &fired.new_rows) else {
        return Err(foreign_trigger(&fired));
    };
    let destination = attached.destination.as_deref().unwrap_or(DEFAULT_DESTINATION);
    let is_own_store = fired.oid == statements(call).event_table;
    let sql = format!(
        "select r.{seq}::pg_catalog.int8, {key} from {rows} r{condition}",
        seq = quote_identifier(&attached.seq),
        key = attached.key.as_deref().map_or("null::pg_catalog.text".into(), as_text),
        rows = quote_identifier(rows),
        condition = attached.when.map_or(String::new(), |when| format!(" where ({when}\n)")),
    );
    let read = |row: &SpiHeapTupleData| {
        let (seq, key): (Option<i64>, Option<String>) = (row.get(1)?, row.get(2)?);
        Ok(((seq, key), 0)) // a key is short, or it was refused
    };
    written::read_rows(&fired, reader(&fired)?, &[sql], read, |batch| {
        let (seqs, keys): (Vec<Option<i64>>, Vec<Option<String>>) = batch.into_iter().flatten().unzip();
        let Some(seqs) = seqs.into_iter().collect::<Option<Vec<i64>>>() else {
            return Err(checks::missing_seq());
        };
        for key in keys.iter().flatten() {
            envelope::check_short("key", key)?;
        }
        checks::check_destination(&fired, destination)?;
        if let Some(seq) = seqs.iter().find(|seq| **seq <= 0) {
            return Err(checks::bad_seq(*seq));
        }
        let keys = match attached.key {
            None if is_own_store || source::is_set(fired.call()) => Keys::LookedUp,
            _ => Keys::Given(keys),
        };
        let request = Enqueue {
            seqs: &seqs,
            keys,
            destination,
            times: Times::default(),
            partition: None,
        };
        store::enqueue(fired.call(), request).map(drop)
    })
}

// ---- outbox_capture -------------------------------------------------------------------------------------------------

/// Makes an event of each row that was written, in the order of the writes, and enqueues it.
pub fn captured(call: Call) -> Result<(), UserError> {
    let (fired, depth) = (fired(call)?, trigger::depth());
    if fired.is_before {
        nesting::begins(fired.root, depth);
        return Ok(());
    }
    let captured = settings(&fired, outbox_core::trigger::parse::<Captured>)?;
    let Some(operations) = Operations::parse(&captured.operations) else {
        return Err(foreign_trigger(&fired));
    };
    if fired.operation == Operation::Truncate {
        return Err(UserError::new(
            PgSqlErrorCode::ERRCODE_FEATURE_NOT_SUPPORTED,
            format!("TRUNCATE of table \"{}\" would make no events", fired.table),
            "Use DELETE, which makes one for each row; or call outbox_uncapture first.",
        ));
    }
    let rules = CaptureRules {
        prefix: captured.type_prefix.clone(),
        operations,
        marks_deleted: captured.soft_delete_column.is_some(),
        key_columns: fired.primary_key(),
    };
    let columns = row_columns(&fired, &captured, &rules.key_columns)?;
    let tables = match fired.operation {
        Operation::Insert => vec![&fired.new_rows],
        Operation::Delete => vec![&fired.old_rows],
        _ => vec![&fired.old_rows, &fired.new_rows],
    };
    let tables: Option<Vec<&String>> = tables.into_iter().map(Option::as_ref).collect();
    let Some(tables) = tables else {
        return Err(foreign_trigger(&fired));
    };
    let sqls: Vec<String> = tables
        .into_iter()
        .map(|table| format!("select {columns} from {} r", quote_identifier(table)))
        .collect();
    let read = |row: &SpiHeapTupleData| {
        let (json, id): (Option<String>, Option<String>) = (row.get(1)?, row.get(2)?);
        let bytes = [&json, &id].into_iter().flatten().map(String::len).sum();
        Ok(((json, id, row.get(3)?), bytes))
    };
    let context = Context::snapshot();
    let write = |changes: Vec<Change>| match changes.is_empty() {
        true => Ok(()),
        false => nesting::write(fired.root, depth, || write(&fired, &captured, &context, changes)),
    };
    let mut come = Vec::new();
    written::read_rows(&fired, reader(&fired)?, &sqls, read, |batch| {
        let rows = batch.into_iter().map(|rows| {
            let rows = rows.into_iter().map(|row| row_of(&fired, row));
            rows.collect::<Result<Vec<ChangedRow>, UserError>>()
        });
        let rows: Vec<Vec<ChangedRow>> = rows.collect::<Result<_, _>>()?;
        let changes = changes_of(&fired, &rules, rows, &mut come)?;
        write(changes)
    })
    .map_err(|error| match (error.sqlstate, error.detail.as_deref()) {
        (
            PgSqlErrorCode::ERRCODE_PROGRAM_LIMIT_EXCEEDED | PgSqlErrorCode::ERRCODE_CHARACTER_NOT_IN_REPERTOIRE,
            None | Some(text::WHY_MAX_BYTES),
        ) => {
            let detail = Some(format!("The event is of table \"{}\".", fired.table));
            UserError { detail, ..error }
        }
        _ => error,
    })?;
    let mut come = come.into_iter();
    loop {
        let changes: Vec<Change> = come.by_ref().take(written::BATCH).collect();
        if changes.is_empty() {
            break;
        }
        write(changes)?;
    }
    let mut inside = nesting::inside(fired.root, depth);
    if !inside.is_empty() {
        security::run_as(statements(call).owner, || written::renumber(&mut inside))?;
        nesting::renumbered(fired.root, inside);
    }
    Ok(())
}

/// What is read of each row: its JSON, the id of its aggregate, and whether it is marked as deleted.
fn row_columns(fired: &Fired, captured: &Captured, key: &[String]) -> Result<String, UserError> {
    let column = |name: &String| match fired.has_column(name) {
        true => Ok(format!("r.{}", quote_identifier(name))),
        false => Err(UserError::new(
            PgSqlErrorCode::ERRCODE_UNDEFINED_COLUMN,
            format!("table \"{}\" has no column \"{name}\" for its events", fired.table),
            "Call outbox_capture again, with the names that the columns have now.",
        )),
    };
    let columns = |names: &[String]| names.iter().map(column).collect::<Result<Vec<_>, _>>();
    let json = match &captured.columns {
        None => "pg_catalog.to_jsonb(r.*)".into(),
        Some(names) => format!(
            "(select pg_catalog.to_jsonb(c.*) from (select {}) c)",
            columns(names)?.join(", ")
        ),
    };
    let id = match &captured.aggregate_id {
        Some(expression) => as_text(expression),
        None if key.is_empty() => {
            return Err(UserError::new(
                PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
                format!("table \"{}\" no longer has a primary key", fired.table),
                "Add one, or call outbox_capture again with aggregate_id.",
            ));
        }
        None => aggregate_id(&columns(key)?),
    };
    let marked = match &captured.soft_delete_column {
        Some(name) => format!("pg_catalog.num_nonnulls({}) = 1", column(name)?),
        None => "false".into(),
    };
    Ok(format!("{json}::pg_catalog.text, {id}, {marked}"))
}

/// The values of the primary key as SQL, separated by colons. With several columns, a colon or a backslash in a value
/// is escaped by a backslash: two rows never have the same id.
fn aggregate_id(columns: &[String]) -> String {
    let escaped = |column: &String| {
        let value = format!("pg_catalog.concat({column})");
        format!(r"pg_catalog.replace(pg_catalog.replace({value}, E'\\', E'\\\\'), ':', E'\\:')")
    };
    match columns {
        [column] => format!("pg_catalog.concat({column})"),
        several => format!(
            "pg_catalog.concat_ws(':', {})",
            several.iter().map(escaped).collect::<Vec<_>>().join(", ")
        ),
    }
}

fn row_of(fired: &Fired, row: (Option<String>, Option<String>, Option<bool>)) -> Result<ChangedRow, UserError> {
    let (json, id, is_marked) = row;
    let Some(aggregate_id) = id else {
        return Err(UserError::new(
            PgSqlErrorCode::ERRCODE_NULL_VALUE_NOT_ALLOWED,
            format!("the aggregate_id of a row of table \"{}\" is NULL", fired.table),
            "Give outbox_capture an expression that is never NULL, for example with coalesce.",
        ));
    };
    Ok(ChangedRow {
        aggregate_id,
        json: json.unwrap_or_default(),
        is_marked: is_marked.unwrap_or_default(),
    })
}

/// The changes that the rows of the old table, of the new table or of both make. If there are both, the n-th row of one
/// belongs to the n-th of the other, because core adds to both at once. Changes whose events come last go to `come`.
fn changes_of(
    fired: &Fired,
    rules: &CaptureRules,
    mut rows: Vec<Vec<ChangedRow>>,
    come: &mut Vec<Change>,
) -> Result<Vec<Change>, UserError> {
    let (last, first) = (rows.pop().unwrap_or_default(), rows.pop());
    let changes: Result<Vec<Change>, String> = match (fired.operation, first) {
        (Operation::Insert, _) => Ok(last.into_iter().map(|new| rules.inserted(new)).collect()),
        (Operation::Update, Some(old)) => {
            if old.len() != last.len() {
                // Core adds a row to only one of the tables if it moves the row to a partition whose trigger then
                // refuses it.
                return Err(UserError::new(
                    PgSqlErrorCode::ERRCODE_FEATURE_NOT_SUPPORTED,
                    format!(
                        "an UPDATE of table \"{}\" lost rows on their way to another partition",
                        fired.table
                    ),
                    "A BEFORE INSERT trigger of that partition returned NULL. Delete such rows instead.",
                ));
            }
            let updates = old.into_iter().zip(last).map(|(old, new)| rules.updated(old, new));
            let changes = updates.filter_map(|update| match update {
                Ok(Update::Nothing) => None,
                Ok(Update::Changed(change)) => Some(Ok(change)),
                Ok(Update::Moved { gone, come: new }) => {
                    text::push(come, new);
                    Some(Ok(gone))
                }
                Err(error) => Some(Err(error)),
            });
            changes.collect()
        }
        _ => last.into_iter().map(|old| rules.deleted(old)).collect(),
    };
    changes.map_err(|error| {
        UserError::new(
            PgSqlErrorCode::ERRCODE_INTERNAL_ERROR,
            format!("table \"{}\": {error}", fired.table),
            "This is a defect of outbox; please report it.",
        )
    })
}

/// Stores and enqueues the events, as outbox_publish does.
fn write(fired: &Fired, captured: &Captured, context: &Context, changes: Vec<Change>) -> Result<(), UserError> {
    let destination = captured.destination.as_deref().unwrap_or(DEFAULT_DESTINATION);
    checks::check_destination(fired, destination)?;
    let template = checks::routing_template(destination);
    let keyed = |change: Change| {
        let kind = change.kind.clone();
        let event = NewEvent::of_change(change, &captured.aggregate_type, context);
        let checked = event.and_then(|event| {
            check_body(event.event.body_bytes() as i64)?;
            let key = checks::check_event(&event.event, &template)?;
            Ok((event, key))
        });
        checked.map_err(|error| UserError {
            detail: Some(format!("The event is {kind} of table \"{}\".", fired.table)),
            ..error
        })
    };
    written::with_own_memory(|| {
        let events = changes.into_iter().map(keyed).collect::<Result<Vec<_>, UserError>>()?;
        publish::publish(fired.call(), &events, destination, Times::default(), IfExists::Error).map(drop)
    })
}

// ---- both -----------------------------------------------------------------------------------------------------------

fn fired(call: Call) -> Result<Fired, UserError> {
    trigger::fired(call).ok_or_else(|| {
        UserError::new(
            PgSqlErrorCode::ERRCODE_E_R_I_E_TRIGGER_PROTOCOL_VIOLATED,
            "this function is for triggers of statements",
            "outbox_attach and outbox_capture make them.",
        )
    })
}

fn settings<T>(fired: &Fired, parse: fn(&str) -> Result<T, String>) -> Result<T, UserError> {
    parse(&fired.argument).map_err(|error| UserError {
        detail: Some(format!("Its argument: {error}.")),
        ..foreign_trigger(fired)
    })
}

/// A user wrote this CREATE TRIGGER.
fn foreign_trigger(fired: &Fired) -> UserError {
    invalid(
        format!(
            "a trigger of table \"{}\" differs from the triggers that outbox creates",
            fired.table
        ),
        "Drop it, and call outbox_attach or outbox_capture.",
    )
}

/// An expression of the user. The line feed ends a comment in it.
fn as_text(expression: &str) -> String {
    format!("({expression}\n)::pg_catalog.text")
}

/// The role to read as, if it is not the writing role.
fn reader(fired: &Fired) -> Result<Option<u32>, UserError> {
    if security::current_user() != statements(fired.call()).owner {
        return Ok(None);
    }
    crate::store::subscriptions::reader().map(Some)
}
