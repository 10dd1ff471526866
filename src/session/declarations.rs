//! The options of a destination, as CREATE SERVER and CREATE USER MAPPING declare them. Called by SQL in a user's
//! backend, on its main thread.

use crate::config;
use crate::error::{self, UserError};
use crate::pg::args::{SqlText, SqlTexts, TextRow};
use crate::pg::catalog::{self, Oid, OptionsOf};
use crate::pg::{guc, text};
use crate::store;
use outbox_transport::described::{self, described};
use outbox_transport::findings::worded;
use outbox_transport::kind::Kind;
use outbox_transport::kinds::KINDS;
use outbox_transport::options::{Level, split};
use outbox_worker::Mapping;
use pgrx::prelude::*;
use pgrx::spi::quote_identifier;
use std::borrow::Cow;

/// The validator of the wrapper that its name begins with, which it finds by that: all wrappers have this function.
/// Options have the form of CREATE SERVER and CREATE USER MAPPING: `name=value` each.
#[pg_extern(sql = false)]
fn outbox_validator(options: SqlTexts, catalog: Oid, fcinfo: pg_sys::FunctionCallInfo) {
    let name = catalog::function_name(catalog::called_function(fcinfo));
    let Some(kind) = name.strip_suffix("_validator").and_then(Kind::of_wrapper) else {
        UserError::new(
            PgSqlErrorCode::ERRCODE_FDW_ERROR,
            format!("the library that the server runs knows no wrapper of the validator \"{name}\""),
            "Install the library of the extension's version and restart the server.",
        )
        .raise()
    };
    let options = options_of(Some(options));
    let level = match catalog::options_of(catalog) {
        OptionsOf::Server => Level::Server,
        OptionsOf::UserMapping => Level::UserMapping,
        OptionsOf::Other if options.is_empty() => return,
        OptionsOf::Other => UserError::new(
            PgSqlErrorCode::ERRCODE_FDW_INVALID_OPTION_NAME,
            format!("{} takes options for servers and user mappings only", kind.wrapper),
            "A destination is a server; it has no tables.",
        )
        .raise(),
    };
    if let Err(refused) = described::check(kind, level, &options) {
        let sqlstate = match refused.why {
            None => PgSqlErrorCode::ERRCODE_FDW_INVALID_OPTION_NAME,
            Some(_) => PgSqlErrorCode::ERRCODE_INVALID_PARAMETER_VALUE,
        };
        UserError::new(sqlstate, refused.to_string(), refused.hint).raise();
    }
    // Not an error: a dump is restored before the setting is made.
    if let Ok(target) = described(kind, &config::default_target(), &options, &[])
        && let Some((host, why)) = target.refused_host()
    {
        let hint = format!("If that is meant, a superuser allows it: {}.", store::allowing(&host));
        error::warning(
            format!("no message can be sent there yet: {why}, and outbox.http_allow does not list it"),
            hint,
        );
    }
}

/// The kinds of destinations, seven texts each, which the view `outbox_internal.kinds` names.
#[pg_extern(sql = false)]
fn outbox_kind_texts() -> Vec<Option<SqlText>> {
    let texts = KINDS.iter().flat_map(|kind| {
        let connects_first = if kind.connects_first { "true" } else { "false" };
        let known = [kind.wrapper, kind.protocol, kind.about, kind.peer, connects_first].map(Some);
        known.into_iter().chain([kind.place, Some(kind.without_mapping)])
    });
    texts
        .map(|text| text.map(|text| SqlText::from(text.to_owned())))
        .collect()
}

/// The problem of the user mapping that the workers in the server use for this server, if they may not deliver with it.
#[pg_extern(sql = false)]
fn outbox_mapping_problem(server: Oid) -> Option<Vec<SqlText>> {
    let role = catalog::role_oid(&text::to_c_string(&config::ServerSettings::snapshot().worker_role));
    match store::mapping_of(server.to_u32(), role) {
        Mapping::Unusable(finding) => {
            let args = finding
                .args
                .into_iter()
                .flat_map(|(name, value)| [name.to_owned(), value]);
            let texts = [finding.code.to_owned(), "detail".to_owned(), finding.detail]
                .into_iter()
                .chain(args);
            Some(texts.map(SqlText::from).collect())
        }
        Mapping::Absent | Mapping::Options(_) => None,
    }
}

/// The words of a finding: problem, remedy, and the commands as JSON. `args`: names and values by turns; of a name that is
/// there twice the first value counts. `s_name` is the setting outbox.name, unless it is empty.
#[pg_extern(sql = false)]
fn outbox_worded(code: Option<SqlText>, args: SqlTexts) -> TextRow {
    let given = |name: &str| {
        let mut pairs = args.0.chunks_exact(2);
        let found = pairs.find(|pair| pair[0].as_deref() == Some(name) && pair[1].is_some());
        found.and_then(|pair| pair[1].as_deref().map(Cow::Borrowed))
    };
    let value = |name: &str| match name.strip_prefix("s_") {
        Some(setting) => Some(guc::value(&format!("outbox.{setting}")))
            .filter(|text| !text.is_empty())
            .map(Cow::Owned),
        None => given(name),
    };
    let [problem, remedy] = worded(code.as_deref().unwrap_or_default(), &value, &|name| {
        quote_identifier(name)
    });
    let commands = remedy.commands_json();
    let remedy_text = Some(remedy.text).filter(|text| !text.is_empty());
    TextRow(vec![Some(problem.text), remedy_text, Some(commands)])
}

/// Options in the form of the catalogs: `name=value` each.
pub fn options_of(options: Option<SqlTexts>) -> Vec<(String, String)> {
    let options = options.map_or_else(Vec::new, |texts| texts.0);
    split(&options.into_iter().flatten().collect::<Vec<String>>())
}
