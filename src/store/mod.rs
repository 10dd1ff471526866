//! SQL that sessions and workers run, and rules that must be the same in both. `source` reads events from a user's relation,
//! `body` calls a user's function, `rows` has the columns of tables that are written without a statement, `standbys` reads how much WAL they have, `statement` keeps prepared statements. Called on the main thread, inside a transaction.

pub mod body;
pub mod rows;
pub mod source;
pub mod standbys;
pub mod statement;

use crate::pg::catalog::{self, Server};
use outbox_worker::DEFAULT_DESTINATION;

/// The name of a key in an error for an event that was enqueued without one.
pub const AGGREGATE_KEY: &str = "key (aggregate_type:aggregate_id)";

/// The foreign server of a destination. One that is named "default" stands for the settings, so it counts only if a role
/// owns it that may change where all default messages go: outbox_internal.destinations() has the same rule.
pub fn server_of(destination: &str) -> Option<Server> {
    let counts = |server: &Server| {
        destination != DEFAULT_DESTINATION || catalog::has_rights_of(server.owner, catalog::role_oid(c"outbox_admin"))
    };
    catalog::foreign_server(destination).filter(counts)
}

/// The key for an event that was enqueued without one.
pub fn aggregate_key(aggregate_type: Option<&str>, aggregate_id: Option<&str>) -> Option<String> {
    match (aggregate_type, aggregate_id) {
        (Some(kind), Some(id)) => Some(format!("{kind}:{id}")),
        (None, Some(id)) => Some(id.to_string()),
        (_, None) => None,
    }
}
