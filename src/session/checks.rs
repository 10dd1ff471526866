//! The checks of a call before it writes anything, with their errors. Called by `api` and `capture`, in a user's
//! backend.

use crate::config;
use crate::error::{UserError, invalid};
use crate::pg::trigger::NamedTable;
use crate::pg::{catalog, report, security};
use crate::session::store::new_event::Times;
use crate::session::store::statements::Statements;
use crate::store::{self, AGGREGATE_KEY, aggregate_key};
use outbox_core::envelope;
use outbox_core::message::Event;
use outbox_core::partition::Partition;
use outbox_core::route::Template;
use outbox_core::template::Values;
use outbox_transport::described::address_template;
use outbox_transport::kind::Kind;
use outbox_transport::kinds::{KINDS, forms};
use outbox_worker::DEFAULT_DESTINATION;
use pgrx::PgSqlErrorCode;
use pgrx::datum::datetime_support::clock_timestamp;
use pgrx::spi::quote_identifier;
use std::cell::Cell;

thread_local! {
    /// This session was told that an event without an aggregate_id has no key.
    static IS_TOLD: Cell<bool> = const { Cell::new(false) };
}

pub fn check_enqueue(seqs: &[i64], key: Option<&str>) -> Result<(), UserError> {
    if let Some(seq) = seqs.iter().find(|seq| **seq <= 0) {
        return Err(bad_seq(*seq));
    }
    if let Some(key) = key {
        envelope::check_short("key", key)?;
    }
    Ok(())
}

pub fn check_times(times: Times) -> Result<(), UserError> {
    if times.available_at.is_some_and(|at| at.is_infinity()) {
        return Err(invalid(
            "available_at is infinity: the message would never be due",
            "Leave it out, or give a time.",
        ));
    }
    let Some(expires_at) = times.expires_at else {
        return Ok(());
    };
    if expires_at.is_infinity() && expires_at > clock_timestamp() {
        return Err(invalid(
            "expires_at is infinity",
            "Leave it out for a message that never expires, or give a time.",
        ));
    }
    if expires_at <= clock_timestamp() {
        return Err(invalid(
            "expires_at is in the past: the message would never be sent",
            "Give a time in the future, or do not enqueue the message.",
        ));
    }
    match times.available_at.is_some_and(|at| at >= expires_at) {
        false => Ok(()),
        true => Err(invalid(
            "expires_at is not after available_at: the message would never be sent",
            "Give a later time, or leave one of the two out.",
        )),
    }
}

/// The destination of this name, if it exists and the caller may use it. Every role that may enqueue may use the
/// default destination.
pub fn usable(destination: Option<&str>) -> Result<&str, UserError> {
    let Some(name) = destination.filter(|name| *name != DEFAULT_DESTINATION) else {
        return Ok(DEFAULT_DESTINATION);
    };
    usable_by(security::current_user(), name).map(|()| name)
}

/// Refuses a named destination that does not exist, or that the role may not use.
fn usable_by(role: u32, name: &str) -> Result<(), UserError> {
    if catalog::may_use_server(server_of(name)?, role) {
        return Ok(());
    }
    let [server, role] = [name, &catalog::role_name(role)].map(quote_identifier);
    Err(UserError::new(
        PgSqlErrorCode::ERRCODE_INSUFFICIENT_PRIVILEGE,
        format!("permission denied for destination \"{name}\""),
        format!("GRANT USAGE ON FOREIGN SERVER {server} TO {role};"),
    ))
}

/// Refuses the destination of a trigger if it does not exist, or if the owner of the table may not use it. A user may
/// have written the trigger by hand, and the right may have been revoked since. The writing role is not checked, nor is
/// the owner of outbox_events, on which only a superuser attaches.
pub fn check_destination(statements: &Statements, table: &NamedTable, name: &str) -> Result<(), UserError> {
    match name {
        DEFAULT_DESTINATION => Ok(()),
        name if table.oid == statements.event_table => server_of(name).map(drop),
        name => usable_by(table.owner, name).map_err(|error| UserError {
            detail: Some(format!(
                "It is the destination of a trigger on table \"{}\", and its owner may not use it.",
                table.name
            )),
            ..error
        }),
    }
}

/// The kind of a destination, and the template of the address of its messages.
pub fn addressing(destination: &str) -> (&'static Kind, Template) {
    let described =
        store::server_of(destination).and_then(|server| Some((Kind::of_wrapper(&server.wrapper)?, server.options)));
    match described {
        Some((kind, options)) => {
            let template = address_template(kind, &options);
            (kind, template.unwrap_or_else(config::address_template))
        }
        None => (Kind::of_settings(), config::address_template()),
    }
}

/// The OID of the foreign server that is the destination.
pub fn server_of(name: &str) -> Result<u32, UserError> {
    let server = catalog::foreign_server(name).filter(|server| Kind::of_wrapper(&server.wrapper).is_some());
    let Some(server) = server else {
        let bytes = catalog::name_bytes(name);
        if bytes > catalog::NAME_BYTES_MAX {
            return Err(UserError::new(
                PgSqlErrorCode::ERRCODE_NAME_TOO_LONG,
                format!(
                    "the name of the destination has {bytes} bytes; the limit is {}",
                    catalog::NAME_BYTES_MAX
                ),
                "Give the name of the server as outbox_destination_status shows it.",
            ));
        }
        return Err(UserError {
            detail: Some(format!("The caller may use: {}.", store::usable_names()?)),
            ..UserError::new(
                PgSqlErrorCode::ERRCODE_UNDEFINED_OBJECT,
                format!("destination \"{name}\" does not exist"),
                format!(
                    "Leave the destination out for the default one, or create one: CREATE SERVER … FOREIGN DATA WRAPPER {}.",
                    KINDS.iter().map(|kind| kind.wrapper).collect::<Vec<_>>().join(" or ")
                ),
            )
        });
    };
    Ok(server.oid)
}

pub fn bad_seq(seq: i64) -> UserError {
    invalid(
        format!("seq {seq} is not positive"),
        "Pass the seq of an event, as outbox_publish returns it.",
    )
}

pub fn missing_seq() -> UserError {
    UserError::new(
        PgSqlErrorCode::ERRCODE_NULL_VALUE_NOT_ALLOWED,
        "seq is NULL",
        "Pass the seq of an event, as outbox_publish returns it.",
    )
}

pub fn partition_of_label(label: &str) -> Result<Partition, UserError> {
    Partition::parse_label(label).map_err(|error| {
        invalid(
            error.to_string(),
            "Labels look like p07; outbox_partition_of(key) gives one.",
        )
    })
}

/// Refuses, at the call, values that would make the message a dead letter later. Returns the key.
pub fn check_event(event: &Event, (kind, template): &(&'static Kind, Template)) -> Result<Option<String>, UserError> {
    event.check_short_columns()?;
    let key = aggregate_key(event.aggregate_type.as_deref(), event.aggregate_id.as_deref());
    if let Some(key) = &key {
        envelope::check_short(AGGREGATE_KEY, key)?;
    } else if event.aggregate_type.is_some() && !IS_TOLD.replace(true) {
        report::notice(
            "an event with an aggregate_type and no aggregate_id has no key: it is in no order with other events",
            "This session says so once.",
            "Pass the aggregate_id, too, for example '42'; or leave out the aggregate_type, unless the routing key needs it.",
        );
    }
    let values = Values {
        event,
        key: key.as_deref(),
        partition: Partition::LAST,
        destination: "default",
        headers: &[],
    };
    envelope::address_of(&kind.form, forms(), template, values)?;
    Ok(key)
}
