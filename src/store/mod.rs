//! SQL that sessions and workers run, and rules that must be the same in both. `source` reads events from a user's
//! relation, `rows` has the columns of tables that are written without a statement, `standbys` reads how much WAL they
//! have, `statement` keeps prepared statements. Called on the main thread, inside a transaction.

pub mod rows;
pub mod source;
pub mod standbys;
pub mod statement;

use crate::error::{UserError, internal};
use crate::pg::catalog::{self, Server};
use crate::pg::spi::{Spi, SpiResult};
use outbox_core::envelope::SHORT_STRING_MAX;
use outbox_transport::kinds::KINDS;
use outbox_transport::options::split;
use outbox_worker::{DEFAULT_DESTINATION, Mapping};
use pgrx::spi::quote_identifier;

/// The name of a key in an error for an event that was enqueued without one.
pub const AGGREGATE_KEY: &str = "key (aggregate_type:aggregate_id)";

/// The foreign server of a destination. One that is named "default" stands for the settings, so it counts only if a
/// role owns it that may change where all default messages go: outbox_internal.destinations() has the same rule.
pub fn server_of(destination: &str) -> Option<Server> {
    let counts = |server: &Server| {
        destination != DEFAULT_DESTINATION || catalog::has_rights_of(server.owner, catalog::role_oid(c"outbox_admin"))
    };
    catalog::foreign_server(destination).filter(counts)
}

/// The default destination, and of the others that the current user may use the first by name.
pub fn usable_names() -> Result<String, UserError> {
    const SHOWN: usize = 9;
    let sql = "select array(
           select s.srvname::text from pg_catalog.pg_foreign_server s
           join pg_catalog.pg_foreign_data_wrapper w on w.oid = s.srvfdw
           where w.fdwname = any ($1::text[]) and s.srvname <> $2
             and pg_catalog.has_server_privilege(s.oid, 'usage')
           order by s.srvname limit $3)";
    let wrappers: Vec<String> = KINDS.iter().map(|kind| kind.wrapper.to_owned()).collect();
    let args = [wrappers.into(), DEFAULT_DESTINATION.into(), (SHOWN as i64 + 1).into()];
    let names: Option<Vec<String>> = Spi::get_one_with_args(sql, &args).map_err(internal)?;
    let names = names.unwrap_or_default();
    let more = if names.len() > SHOWN { ", …" } else { "" };
    let names = names.into_iter().take(SHOWN);
    let names: Vec<String> = std::iter::once(DEFAULT_DESTINATION.to_owned())
        .chain(names)
        .map(|name| format!("\"{name}\""))
        .collect();
    Ok(names.join(", ") + more)
}

/// The user mapping of a foreign server that a role uses. An empty one is what a dump leaves of a mapping whose options
/// its role could not read: without them a message would be sent unsigned, or with other credentials.
pub fn mapping_of(server: u32, role: u32) -> Mapping {
    match catalog::user_mapping(server, role) {
        None => Mapping::Absent,
        Some(found) if found.options.is_empty() => {
            Mapping::Unusable(outbox_worker::empty_mapping(&match found.is_public {
                true => "PUBLIC".to_owned(),
                false => quote_identifier(catalog::role_name(role)),
            }))
        }
        Some(found) => Mapping::Options(split(&found.options)),
    }
}

/// The key for an event that was enqueued without one.
pub fn aggregate_key(aggregate_type: Option<&str>, aggregate_id: Option<&str>) -> Option<String> {
    match (aggregate_type, aggregate_id) {
        (Some(kind), Some(id)) => Some(format!("{kind}:{id}")),
        (None, Some(id)) => Some(id.to_string()),
        (_, None) => None,
    }
}

/// The start of a text in SQL, by which it is seen to be too long for a key. Many rows are read at once, and texts of
/// users have any size.
pub fn start_sql(text: &str) -> String {
    format!("pg_catalog.left({text}, {})", SHORT_STRING_MAX + 1)
}

/// The command that adds a host to outbox.http_allow, where that is set.
pub fn allowing(host: &str) -> String {
    let sql = "select pg_catalog.format(case when s.source operator(pg_catalog.=) 'database'
                 then 'ALTER DATABASE %1$I SET outbox.http_allow = %2$L'
                 else 'ALTER SYSTEM SET outbox.http_allow = %2$L; SELECT pg_reload_conf()' end,
                 pg_catalog.current_database(),
                 case when s.setting operator(pg_catalog.=) '' then $1 else pg_catalog.concat(s.setting, ', ', $1) end)
               from pg_catalog.pg_settings s where s.name operator(pg_catalog.=) 'outbox.http_allow'";
    let command: SpiResult<Option<String>> = Spi::get_one_with_args(sql, &[host.into()]);
    command
        .map_err(internal)
        .unwrap_or_else(|error| error.raise())
        .unwrap_or_default()
}
