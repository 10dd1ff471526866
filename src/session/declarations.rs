//! The options of a destination, as CREATE SERVER and CREATE USER MAPPING declare them. Called by SQL in a user's
//! backend, on its main thread.

use crate::config;
use crate::error::{self, UserError};
use crate::pg::args::{SqlText, SqlTexts};
use crate::pg::catalog::{self, Oid, OptionsOf};
use crate::pg::text;
use crate::store;
use outbox_transport::target::{self, Kind, Level};
use outbox_worker::Mapping;
use pgrx::prelude::*;

#[pg_extern(sql = false)]
fn outbox_amqp_validator(options: SqlTexts, catalog: Oid) {
    check_options(Kind::Amqp, options, catalog);
}

#[pg_extern(sql = false)]
fn outbox_http_validator(options: SqlTexts, catalog: Oid) {
    check_options(Kind::Http, options, catalog);
}

/// Options in the form of CREATE SERVER and CREATE USER MAPPING: `name=value` each.
fn check_options(kind: Kind, options: SqlTexts, catalog: Oid) {
    let options = options_of(Some(options));
    let level = match catalog::options_of(catalog) {
        OptionsOf::Server => Level::Server,
        OptionsOf::UserMapping => Level::UserMapping,
        OptionsOf::Other if options.is_empty() => return,
        OptionsOf::Other => UserError::new(
            PgSqlErrorCode::ERRCODE_FDW_INVALID_OPTION_NAME,
            format!("{} takes options for servers and user mappings only", kind.wrapper()),
            "A destination is a server; it has no tables.",
        )
        .raise(),
    };
    if let Err(refused) = target::check(kind, level, &options) {
        let sqlstate = match refused.unknown {
            true => PgSqlErrorCode::ERRCODE_FDW_INVALID_OPTION_NAME,
            false => PgSqlErrorCode::ERRCODE_INVALID_PARAMETER_VALUE,
        };
        UserError::new(sqlstate, refused.message, refused.hint).raise();
    }
    // Not an error: a dump is restored before the setting is made.
    if let Ok(target) = target::described(kind, &config::default_target(), &options, &[])
        && let Some((host, why)) = target.refused_host()
    {
        let hint = format!("If that is meant, a superuser allows it: {}.", store::allowing(&host));
        error::warning(
            format!("no message can be sent there yet: {why}, and outbox.http_allow does not list it"),
            hint,
        );
    }
}

/// The problem of the user mapping that the workers in the server use for this server, if they may not deliver with it.
#[pg_extern(sql = false)]
fn outbox_mapping_problem(server: Oid) -> Option<SqlText> {
    let role = catalog::role_oid(&text::to_c_string(&config::ServerSettings::snapshot().worker_role));
    match store::mapping_of(server.to_u32(), role) {
        Mapping::Unusable(why) => Some(why.into()),
        Mapping::Absent | Mapping::Options(_) => None,
    }
}

/// Options in the form of the catalogs: `name=value` each.
pub fn options_of(options: Option<SqlTexts>) -> Vec<(String, String)> {
    let options = options.map_or_else(Vec::new, |texts| texts.0);
    target::split(&options.into_iter().flatten().collect::<Vec<String>>())
}
