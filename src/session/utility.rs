//! Statements that need a database without sessions: DROP, RENAME, SET TABLESPACE and CREATE … TEMPLATE. Core refuses
//! them while any session is connected, and a worker is. So the workers leave before such a statement runs, at the
//! request of its session. They may come back when its transaction ends, however it ends (`effects`). The launcher then
//! reads the databases again. outbox_configure() and similar calls also need the workers to leave, but give them time
//! for the messages in flight. The database stays, so unconfirmed messages would be sent twice.

use crate::config;
use crate::error::{UserError, warning, warning_with_detail};
use crate::pg::utility::{
    self, DatabaseChange, DatabaseStatement, PartitionChange, PartitionStatement, ServerStatement, UtilityStatement,
};
use crate::pg::{catalog, latch, signals};
use crate::session::{capture, effects};
use crate::shared::{launcher, sessions, workers};
use outbox_core::truncated_name;
use outbox_transport::kind::Kind;
use pgrx::PgSqlErrorCode;
use std::time::{Duration, Instant};

/// Workers leave within 2 s, whatever the broker does. After this time core may report that they are in the way.
const PATIENCE: Duration = Duration::from_secs(5);
/// Workers that are asked to leave in order leave within 10 s.
const PATIENCE_IN_ORDER: Duration = Duration::from_secs(12);
/// A worker that has left wakes this session. The poll is for a worker that was killed.
const RECHECK_MS: i64 = 100;
const INTERNAL_SCHEMA: &str = "outbox_internal";

/// Called by `_PG_init`, while preloading.
pub fn init() {
    utility::before_statements(before);
}

/// Refuses a statement, or returns whether it is to run.
fn before(statement: UtilityStatement) -> bool {
    match statement {
        UtilityStatement::Database(statement) => before_database(&statement),
        UtilityStatement::Server(statement) => refuse_long_name(&statement),
        UtilityStatement::Set(setting) => warn_without_effect(&setting),
        UtilityStatement::RenameSchema(name) => refuse_new_name_of_schema(&name),
        UtilityStatement::AddMember(role) => refuse_member(&role),
        UtilityStatement::TriggerCreated { table, function } => refuse_trigger_of_another(table, function),
        UtilityStatement::SwitchTriggers(table) => return !keeps_triggers(table),
        UtilityStatement::Restart(table) => refuse_restart(table),
        UtilityStatement::Partition(statement) => warn_of_rows_without_events(&statement),
    }
    true
}

fn before_database(statement: &DatabaseStatement) {
    // A statement that core will refuse anyway must not stop a worker, or any role could stop it.
    if statement.is_refused || !may(statement) {
        return;
    }
    if statement.kind == DatabaseChange::Alters {
        effects::databases_change();
    } else {
        send_workers_away(statement.database, false);
    }
}

/// Makes the workers of a database leave. `in_order`: not before the destinations have answered the messages in flight,
/// for which they have 5 s. The workers may come back when this transaction ends. Returns false if some are still there
/// after a few seconds.
pub fn send_workers_away(database: u32, in_order: bool) -> bool {
    effects::databases_change();
    sessions::vacate(database, in_order);
    launcher::notify();
    let deadline = Instant::now() + if in_order { PATIENCE_IN_ORDER } else { PATIENCE };
    while workers::has_workers(database) && Instant::now() < deadline {
        if !launcher::is_there() {
            workers::terminate(database, |_| true);
        }
        latch::wait(RECHECK_MS);
        signals::check_for_interrupts();
    }
    !workers::has_workers(database)
}

fn may(statement: &DatabaseStatement) -> bool {
    let database = statement.database;
    database != 0
        && match statement.kind {
            DatabaseChange::Takes => database != catalog::my_database() && catalog::owns_database(database),
            DatabaseChange::Copies => catalog::may_copy_database(database),
            DatabaseChange::Alters => catalog::owns_database(database),
        }
}

/// Warns of a SET that has no effect, because only workers read the setting.
fn warn_without_effect(setting: &str) {
    if config::is_read_by_workers_only(setting) {
        warning(
            format!("{setting} has no effect in a session: only the workers read it"),
            format!(
                "ALTER DATABASE ... SET {setting} = ..., or ALTER SYSTEM SET {setting} = ... and SELECT pg_reload_conf()."
            ),
        );
    }
}

/// Refuses to rename a schema of the extension. Its functions name the schema, and most would fail afterwards.
fn refuse_new_name_of_schema(name: &str) {
    let extension = catalog::extension(c"outbox");
    let is_ours = extension.oid != 0 && (name == INTERNAL_SCHEMA || name == catalog::schema_name(extension.schema));
    if is_ours {
        UserError {
            sqlstate: PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
            message: format!("schema {name} belongs to the extension outbox and cannot be renamed"),
            detail: Some("The functions of the extension name it.".into()),
            hint:
                "Choose the schema in CREATE EXTENSION: pg_dump, then CREATE EXTENSION outbox SCHEMA ..., then restore."
                    .into(),
        }
        .raise();
    }
}

/// Refuses a member of the role of the workers: it could alter functions that run with more rights than their callers.
fn refuse_member(role: &str) {
    if role == config::ServerSettings::snapshot().worker_role {
        UserError {
            sqlstate: PgSqlErrorCode::ERRCODE_INSUFFICIENT_PRIVILEGE,
            message: format!("role {role} takes no members"),
            detail: Some("Workers run as this role. A member of it could become a superuser.".into()),
            hint: "GRANT outbox_admin, or another group that docs/operate/install.md describes.".into(),
        }
        .raise();
    }
}

/// Refuses a trigger of the extension on the table of another role. Postgres asks for the privilege TRIGGER only, and
/// the trigger sends to any destination that the owner of the table may use.
fn refuse_trigger_of_another(table: u32, function: u32) {
    let extension = catalog::extension(c"outbox");
    let is_ours = extension.oid != 0 && catalog::is_member_function(function, extension.oid);
    if is_ours && !catalog::may_act_as(catalog::owner_of_table(table)) {
        UserError::new(
            PgSqlErrorCode::ERRCODE_INSUFFICIENT_PRIVILEGE,
            format!("must be owner of table {}", catalog::relation_name(table)),
            "Let its owner call outbox_capture() or outbox_attach().",
        )
        .raise();
    }
}

/// A restore with --disable-triggers: the triggers of the extension's tables stay as they are, because they keep one
/// row of settings and show that the database is a copy. Those on outbox_events are the user's.
fn keeps_triggers(table: u32) -> bool {
    let extension = catalog::extension(c"outbox");
    let is_kept = extension.oid != 0
        && catalog::is_member(table, extension.oid)
        && table != catalog::table_in(extension.schema, c"outbox_events");
    if is_kept {
        warning(
            format!("the triggers of {} stay enabled", catalog::relation_name(table)),
            "They keep the tables of outbox consistent, also in a restore.",
        );
    }
    is_kept
}

/// Refuses to begin the seqs again: new events would get the history, the attempts and the dead letters of old ones.
fn refuse_restart(table: u32) {
    let extension = catalog::extension(c"outbox");
    if extension.oid != 0 && table == catalog::table_in(extension.schema, c"outbox_events") {
        UserError::new(
            PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
            "the seqs of outbox_events cannot begin again: the history names its events by them",
            "TRUNCATE without RESTART IDENTITY.",
        )
        .raise();
    }
}

/// Warns of rows that come to a captured table or leave it with their partition: consumers will not learn of them. A
/// partition that is older than the last outbox_capture has a trigger that refuses TRUNCATE.
fn warn_of_rows_without_events(statement: &PartitionStatement) {
    let PartitionStatement {
        change,
        partition,
        parent,
    } = *statement;
    let is_refused =
        || change == PartitionChange::Truncate && catalog::has_trigger(partition, c"outbox_capture_truncate");
    if capture::is_captured(parent) != Some(true) || is_refused() || !catalog::may_have_rows(partition) {
        return;
    }
    let (name, table) = (catalog::relation_name(partition), catalog::relation_name(parent));
    let leave = format!("the rows of partition \"{name}\" leave the captured table \"{table}\" without events");
    let delete = "Where consumers must know, DELETE the rows before.";
    match change {
        PartitionChange::Attach => warning_with_detail(
            format!("the rows of \"{name}\" join the captured table \"{table}\" without events"),
            "ATTACH PARTITION fires no trigger for them.",
            "Where consumers must know, attach an empty table and INSERT the rows.",
        ),
        PartitionChange::Detach => warning_with_detail(
            leave,
            format!("DETACH PARTITION fires no trigger for them, and later writes to \"{name}\" make no events."),
            delete,
        ),
        PartitionChange::Drop => warning_with_detail(leave, "DROP TABLE fires no trigger for them.", delete),
        PartitionChange::Truncate => warning_with_detail(
            leave,
            format!("The partition is newer than the triggers of \"{table}\" that refuse TRUNCATE."),
            format!("DELETE the rows instead, and call outbox_capture for \"{table}\" again."),
        ),
    }
}

/// Refuses a name of a destination that the parser has truncated: its user would look for messages under another name.
/// Any other server may keep the truncated name.
fn refuse_long_name(statement: &ServerStatement) {
    let max = catalog::NAME_BYTES_MAX;
    let Some(bytes) = truncated_name::bytes_of_truncated(statement.name_bytes, statement.text) else {
        return;
    };
    if Kind::of_wrapper(&statement.wrapper).is_none() {
        return;
    }
    UserError {
        sqlstate: PgSqlErrorCode::ERRCODE_NAME_TOO_LONG,
        message: format!("the name of the server has {bytes} bytes; the limit is {max}"),
        detail: Some(format!(
            "Postgres would truncate it to \"{}\", and messages to the name as written would find no server.",
            statement.name
        )),
        hint: format!("Choose a name of at most {max} bytes."),
    }
    .raise();
}
