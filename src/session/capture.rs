//! The triggers that outbox_attach and outbox_capture put on tables, and the roles that their parts run as. Called in
//! the session that writes the rows.
//!
//! The rows are read and the user's expressions evaluated as the writing role, as in any trigger. Only events and
//! pointers are written as the owner of the extension, which a writer need not know. Inside outbox_publish that owner
//! is the writing role; there the expressions run as a role without rights.

use crate::config::Context;
use crate::error::{UserError, invalid};
use crate::limits::check_body;
use crate::pg::spi::SpiHeapTupleData;
use crate::pg::trigger::{self, Call, Fired, NamedTable, Operation, Timing, TriggerTable};
use crate::pg::when::query_memory;
use crate::pg::{catalog, security, text};
use crate::session::changes;
use crate::session::checks;
use crate::session::store::enqueue::{self as store, Enqueue, Keys};
use crate::session::store::new_event::{IfExists, NewEvent, Times};
use crate::session::store::publish::KeyedEvent;
use crate::session::store::statements::{self, Statements, statements};
use crate::session::store::written_rows::{self, ReadTable};
use crate::session::store::{current_source, publish};
use crate::store::{aggregate_key, start_sql};
use outbox_core::change::{CaptureRules, Change, ChangedRow, Operations, Update};
use outbox_core::change_log::RowChange;
use outbox_core::envelope;
use outbox_core::route::Template;
use outbox_core::trigger::{Attached, Captured};
use outbox_transport::kind::Kind;
use outbox_worker::DEFAULT_DESTINATION;
use pgrx::PgSqlErrorCode;
use pgrx::spi::quote_identifier;
use std::cell::Cell;

// ---- outbox_attach --------------------------------------------------------------------------------------------------

/// Enqueues the rows of an event table that the condition chooses. Their order is that of their seqs, not of this loop.
pub fn attached(call: Call) -> Result<(), UserError> {
    let fired = fired(call)?;
    let attached = settings(
        &fired.table.named,
        &fired.argument,
        outbox_core::trigger::parse::<Attached>,
    )?;
    let (Operation::Insert, Timing::AfterStatement, Some(rows)) = (fired.operation, &fired.timing, &fired.new_rows)
    else {
        return Err(foreign_trigger(&fired.table.named));
    };
    let destination = attached.destination.as_deref().unwrap_or(DEFAULT_DESTINATION);
    let statements = statements(call);
    let is_own_store = fired.table.named.oid == statements.event_table;
    let sql = format!(
        "select r.{seq}::pg_catalog.int8, {key} from {rows} r{condition}",
        seq = quote_identifier(&attached.seq),
        key = (attached.key.as_deref()).map_or("null::pg_catalog.text".into(), |key| start_sql(&as_text(key))),
        rows = quote_identifier(rows),
        condition = attached.when.map_or(String::new(), |when| format!(" where ({when}\n)")),
    );
    let read = |row: &SpiHeapTupleData| {
        let seq_and_key: (Option<i64>, Option<String>) = (row.get(1)?, row.get(2)?);
        Ok(seq_and_key)
    };
    written_rows::read_rows(&fired, reader(statements)?, &sql, read, |batch| {
        let (seqs, keys): (Vec<Option<i64>>, Vec<Option<String>>) = batch.into_iter().unzip();
        let Some(seqs) = seqs.into_iter().collect::<Option<Vec<i64>>>() else {
            return Err(checks::missing_seq());
        };
        for key in keys.iter().flatten() {
            envelope::check_short_start("key", key)?;
        }
        checks::check_destination(statements, &fired.table.named, destination)?;
        if let Some(seq) = seqs.iter().find(|seq| **seq <= 0) {
            return Err(checks::bad_seq(*seq));
        }
        let keys = match attached.key {
            None if is_own_store || current_source::is_set(fired.call()) => Keys::LookedUp,
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

/// The argument of the triggers of a table that is captured only through a table that it inherits from.
const INHERITED: &str = r#"{"inherited": true}"#;

/// A table whose rows make events.
struct CapturedTable {
    statements: &'static Statements,
    named: NamedTable,
    settings: Captured,
    rules: CaptureRules,
    addressing: (&'static Kind, Template),
    /// What is read of each row.
    columns: String,
}

/// The trigger of outbox_capture: a statement begins or ends, or a query is over.
pub fn captured(call: Call) -> Result<(), UserError> {
    let fired = fired(call)?;
    match (&fired.timing, fired.operation) {
        (Timing::AfterRow(first), _) => changes::first_fires(first),
        (Timing::BeforeStatement, Operation::Update | Operation::Delete) => statement_begins(&fired),
        (Timing::AfterStatement, Operation::Truncate) => Err(UserError::new(
            PgSqlErrorCode::ERRCODE_FEATURE_NOT_SUPPORTED,
            format!("TRUNCATE of table \"{}\" would make no events", fired.table.named.name),
            "Use DELETE, which makes one for each row; or call outbox_uncapture first.",
        )),
        _ => Err(foreign_trigger(&fired.table.named)),
    }
}

/// An UPDATE, DELETE or MERGE names the table. It writes rows of tables that inherit from it, too, whose triggers fire
/// for it.
fn statement_begins(fired: &Fired) -> Result<(), UserError> {
    let children = fired.table.children();
    if children.is_empty() {
        return Ok(());
    }
    for child in &children {
        if is_captured(*child) == Some(false) {
            let (child, table) = (catalog::relation_name(*child), &fired.table.named.name);
            return Err(UserError::new(
                PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
                format!("table \"{child}\" inherits from the captured table \"{table}\", and has no triggers for it"),
                format!("Call outbox_capture for \"{table}\" again, with the same arguments."),
            ));
        }
    }
    changes::statement_begins(query_memory(fired.call()), fired.table.named.oid, children);
    Ok(())
}

/// Whether a function is that of the triggers of outbox_capture.
fn is_capture(function: u32) -> bool {
    thread_local! {
        static KNOWN: Cell<u32> = const { Cell::new(0) };
    }
    let is_it = KNOWN.get() == function || catalog::is_function_of(c"outbox", c"outbox_captured", function);
    if is_it {
        KNOWN.set(function);
    }
    is_it
}

/// Whether a table has row triggers of outbox_capture, its own or those of a table that it is a partition of. None: it
/// does not exist.
pub fn is_captured(table: u32) -> Option<bool> {
    TriggerTable::with(table, |table| table.row_trigger(is_capture).is_some())
}

/// Stores the events of rows and enqueues them, in this order. Stops at a number of bytes; returns how many changes
/// have their events now.
pub fn store(changes: &[RowChange]) -> Result<usize, UserError> {
    let context = Context::snapshot();
    written_rows::with_own_memory(|| {
        let read = written_rows::read_changes::<CapturedTable>(changes)?;
        let (count, mut events) = (read.rows.len(), Vec::new());
        for (change, rows) in changes.iter().zip(read.rows) {
            let Some((table, old, new)) = rows else { continue };
            let Some(table) = &read.tables[table] else { continue };
            let row = |row: Option<written_rows::EvaluatedRow>| row.map(|row| table.row(row)).transpose();
            let (old, new) = (row(old)?, row(new)?);
            let Some(made) = table.change_of(change, old, new)? else {
                continue;
            };
            if let Some(arrival) = changes::arrives_before(change, || table.key_of(&made)) {
                let mut read = written_rows::read_changes::<CapturedTable>(std::slice::from_ref(&arrival))?;
                if let Some((table, _, Some(new))) = read.rows.pop().flatten()
                    && let Some(table) = &read.tables[table]
                {
                    let new = table.row(new)?;
                    events.push(table.event_of(table.rules.inserted(new), &context)?);
                }
            }
            events.push(table.event_of(made, &context)?);
        }
        publish(events)?;
        Ok(count)
    })
}

/// An event with its destination.
struct Addressed {
    event: KeyedEvent,
    destination: String,
    statements: &'static Statements,
}

/// Stores events and enqueues them, as outbox_publish does. Those with one destination are stored at once.
fn publish(events: Vec<Addressed>) -> Result<(), UserError> {
    let mut events = events.into_iter().peekable();
    while let Some(first) = events.next() {
        let (destination, statements) = (first.destination, first.statements);
        let mut together = vec![first.event];
        let is_same = |next: &Addressed| next.destination == destination && std::ptr::eq(next.statements, statements);
        while let Some(next) = events.next_if(is_same) {
            together.push(next.event);
        }
        publish::publish(statements, &together, &destination, Times::default(), IfExists::Error)?;
    }
    Ok(())
}

impl ReadTable for CapturedTable {
    /// None: the table is not captured, or only through a table that it inherits from.
    fn of(table: &TriggerTable) -> Result<Option<Self>, UserError> {
        let Some((function, argument)) = table.row_trigger(is_capture) else {
            return Ok(None);
        };
        if argument == INHERITED {
            return Ok(None);
        }
        let settings = settings(&table.named, &argument, outbox_core::trigger::parse::<Captured>)?;
        let Some(operations) = Operations::parse(&settings.operations) else {
            return Err(foreign_trigger(&table.named));
        };
        let statements = statements::of_function(function);
        checks::check_destination(statements, &table.named, destination_of(&settings))?;
        let rules = CaptureRules {
            prefix: settings.type_prefix.clone(),
            operations,
            marks_deleted: settings.soft_delete_column.is_some(),
            key_columns: table.primary_key(),
        };
        Ok(Some(Self {
            statements,
            named: table.named.clone(),
            columns: row_columns(table, &settings, &rules.key_columns)?,
            addressing: checks::addressing(destination_of(&settings)),
            settings,
            rules,
        }))
    }

    fn columns(&self) -> &str {
        &self.columns
    }

    fn oid(&self) -> u32 {
        self.named.oid
    }

    fn statements(&self) -> &'static Statements {
        self.statements
    }

    fn explain(&self, error: UserError) -> UserError {
        match (error.sqlstate, error.detail.as_deref()) {
            (
                PgSqlErrorCode::ERRCODE_PROGRAM_LIMIT_EXCEEDED | PgSqlErrorCode::ERRCODE_CHARACTER_NOT_IN_REPERTOIRE,
                None | Some(text::WHY_MAX_BYTES),
            ) => {
                let detail = Some(format!("The event is of table \"{}\".", self.named.name));
                UserError { detail, ..error }
            }
            _ => error,
        }
    }
}

impl CapturedTable {
    fn row(&self, row: written_rows::EvaluatedRow) -> Result<ChangedRow, UserError> {
        let (json, id, is_marked) = row;
        let Some(aggregate_id) = id else {
            return Err(UserError::new(
                PgSqlErrorCode::ERRCODE_NULL_VALUE_NOT_ALLOWED,
                format!("the aggregate_id of a row of table \"{}\" is NULL", self.named.name),
                "Give outbox_capture an expression that is never NULL, for example with coalesce.",
            ));
        };
        Ok(ChangedRow {
            aggregate_id,
            json: json.unwrap_or_default(),
            is_marked: is_marked.unwrap_or_default(),
        })
    }

    /// What a change of a row says. None: nothing.
    fn change_of(
        &self,
        change: &RowChange,
        old: Option<ChangedRow>,
        new: Option<ChangedRow>,
    ) -> Result<Option<Change>, UserError> {
        let made = match (old, new) {
            (None, None) => Ok(None),
            (None, Some(new)) => Ok(Some(self.rules.inserted(new))),
            (Some(old), None) => self.rules.deleted(old).map(Some),
            (Some(old), Some(new)) => self.rules.updated(old, new).map(|update| match update {
                Update::Nothing => None,
                Update::Changed(made) => Some(made),
                Update::Moved { deleted, inserted } => {
                    changes::arrives_later(change, self.key_of(&inserted));
                    Some(deleted)
                }
            }),
        };
        made.map_err(|error| {
            UserError::new(
                PgSqlErrorCode::ERRCODE_INTERNAL_ERROR,
                format!("table \"{}\": {error}", self.named.name),
                "This is a defect of outbox; please report it.",
            )
        })
    }

    fn key_of(&self, change: &Change) -> String {
        aggregate_key(Some(&self.settings.aggregate_type), Some(&change.aggregate_id)).unwrap_or_default()
    }

    fn event_of(&self, change: Change, context: &Context) -> Result<Addressed, UserError> {
        let kind = change.kind.clone();
        let event = NewEvent::of_change(change, &self.settings.aggregate_type, context);
        let checked = event.and_then(|event| {
            check_body(event.event.body_bytes() as i64)?;
            let key = checks::check_event(&event.event, &self.addressing)?;
            Ok((event, key))
        });
        let event = checked.map_err(|error| UserError {
            detail: Some(format!("The event is {kind} of table \"{}\".", self.named.name)),
            ..error
        })?;
        Ok(Addressed {
            event,
            destination: destination_of(&self.settings).to_owned(),
            statements: self.statements,
        })
    }
}

fn destination_of(settings: &Captured) -> &str {
    settings.destination.as_deref().unwrap_or(DEFAULT_DESTINATION)
}

/// What is read of each row: its JSON, the id of its aggregate, and whether it is marked as deleted.
fn row_columns(table: &TriggerTable, captured: &Captured, key: &[String]) -> Result<String, UserError> {
    let column = |name: &String| match table.has_column(name) {
        true => Ok(format!("r.{}", quote_identifier(name))),
        false => Err(UserError::new(
            PgSqlErrorCode::ERRCODE_UNDEFINED_COLUMN,
            format!("table \"{}\" has no column \"{name}\" for its events", table.named.name),
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
                format!("table \"{}\" no longer has a primary key", table.named.name),
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

// ---- both -----------------------------------------------------------------------------------------------------------

fn fired(call: Call) -> Result<Fired, UserError> {
    trigger::fired(call).ok_or_else(|| {
        UserError::new(
            PgSqlErrorCode::ERRCODE_E_R_I_E_TRIGGER_PROTOCOL_VIOLATED,
            "this function is for triggers of outbox",
            "outbox_attach and outbox_capture make them.",
        )
    })
}

fn settings<T>(table: &NamedTable, argument: &str, parse: fn(&str) -> Result<T, String>) -> Result<T, UserError> {
    parse(argument).map_err(|error| UserError {
        detail: Some(format!("Its argument: {error}.")),
        ..foreign_trigger(table)
    })
}

/// A user wrote this CREATE TRIGGER.
fn foreign_trigger(table: &NamedTable) -> UserError {
    invalid(
        format!(
            "a trigger of table \"{}\" differs from the triggers that outbox creates",
            table.name
        ),
        "Drop it, and call outbox_attach or outbox_capture.",
    )
}

/// An expression of the user. The line feed ends a comment in it.
fn as_text(expression: &str) -> String {
    format!("({expression}\n)::pg_catalog.text")
}

/// The role to read as, if it is not the writing role.
fn reader(statements: &Statements) -> Result<Option<u32>, UserError> {
    if security::current_user() != statements.owner {
        return Ok(None);
    }
    crate::session::store::subscription_conditions::reader().map(Some)
}
