//! Statements that need a database to themselves: DROP, RENAME, SET TABLESPACE and CREATE … TEMPLATE. Core refuses them
//! while anybody is connected, and a worker is. So before one runs, in the session that runs it, the workers leave; they
//! may come back when its transaction ends, however it ends (`effects`), and the launcher then looks at the databases anew.
//! outbox_configure() and the like need the same, and leave them the time for what is on its way: the database lives on, and what
//! is not confirmed would be sent twice.

use crate::config;
use crate::error::{UserError, warning};
use crate::pg::utility::{self, DatabaseStatement, Kind, ServerStatement};
use crate::pg::{catalog, latch, signals};
use crate::session::effects;
use crate::shared::{launcher, vacancies, workers};
use outbox_core::written;
use outbox_transport::target;
use pgrx::PgSqlErrorCode;
use std::time::{Duration, Instant};

/// Workers are gone within 2 s, whatever the broker does. After this long core may say that they are in the way.
const PATIENCE: Duration = Duration::from_secs(5);
/// Workers that are asked to leave in order are gone within 10 s.
const PATIENCE_IN_ORDER: Duration = Duration::from_secs(12);
/// A worker that has left wakes us; this is for one that came to no orderly end.
const RECHECK_MS: i64 = 100;

/// From `_PG_init`, while preloading.
pub fn init() {
    utility::before_statements(before, refuse_long_name, warn_without_effect);
}

fn before(statement: &DatabaseStatement) {
    // What core will refuse anyway must not stop a worker, or any stranger could.
    if statement.is_refused || !may(statement) {
        return;
    }
    if statement.kind == Kind::Alters {
        effects::databases_change();
    } else {
        send_workers_away(statement.database, false);
    }
}

/// Lets the workers of a database end, `in_order`: not before their peers have answered what is on its way, which they have 5 s
/// for. They are let back when this transaction ends. False if some are still there after a few seconds.
pub fn send_workers_away(database: u32, in_order: bool) -> bool {
    effects::databases_change();
    if !vacancies::vacate(database, in_order) {
        return !workers::has_workers(database);
    }
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
            Kind::Takes => database != catalog::my_database() && catalog::owns_database(database),
            Kind::Copies => catalog::may_copy_database(database),
            Kind::Alters => catalog::owns_database(database),
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

/// Refuses a name for a destination that the grammar has cut: who wrote it would look for messages under another name. Another
/// server may keep what core makes of its name.
fn refuse_long_name(statement: &ServerStatement) {
    let max = catalog::NAME_BYTES_MAX;
    let Some(bytes) = written::server_name_bytes(statement.text).filter(|bytes| *bytes > max) else {
        return;
    };
    if target::Kind::of_wrapper(&statement.wrapper).is_none() {
        return;
    }
    UserError {
        sqlstate: PgSqlErrorCode::ERRCODE_NAME_TOO_LONG,
        message: format!("the name of the server has {bytes} bytes, more than {max}"),
        detail: Some(format!(
            "Postgres would cut it to \"{}\", and messages to the name as written would find no server.",
            statement.name
        )),
        hint: format!("Choose a name of at most {max} bytes."),
    }
    .raise();
}
