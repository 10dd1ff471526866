//! Statements that need a database to themselves: DROP, RENAME, SET TABLESPACE and CREATE … TEMPLATE. Core refuses them
//! while anybody is connected, and a worker is. So before one runs, in the session that runs it, the workers leave; they
//! may come back when its transaction ends, however it ends (`wake`), and the launcher then looks at the databases anew.

use crate::pg::utility::{self, DatabaseStatement, Kind};
use crate::pg::{catalog, latch, signals};
use crate::{shmem, wake};
use std::time::{Duration, Instant};

/// Workers are gone within 2 s, whatever the broker does. After this long core may say that they are in the way.
const PATIENCE: Duration = Duration::from_secs(5);
/// A worker that has left wakes us; this is for one that came to no orderly end.
const LOOK_AGAIN_MS: i64 = 100;

/// From `_PG_init`, while preloading.
pub fn init() {
    utility::before_database_statement(before);
}

fn before(statement: &DatabaseStatement) {
    // What core will refuse anyway must not stop a worker, or any stranger could.
    if statement.is_refused || !may(statement) {
        return;
    }
    wake::databases_change();
    if statement.kind == Kind::Alters || !shmem::vacate(statement.database) {
        return;
    }
    let deadline = Instant::now() + PATIENCE;
    while shmem::has_workers(statement.database) && Instant::now() < deadline {
        latch::wait(None, LOOK_AGAIN_MS);
        signals::check_for_interrupts();
    }
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
