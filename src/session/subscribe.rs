//! outbox_subscribe() and outbox_unsubscribe(): the checks of their arguments. Runs in a user's backend.

use crate::error::{UserError, invalid};
use crate::pg::args::Args;
use crate::pg::trigger::Call;
use crate::session::checks::{server_of, usable};
use crate::session::store::subscription_conditions::problem;
use crate::session::store::subscriptions::{self, Subscription};
use outbox_core::envelope;
use outbox_worker::DEFAULT_DESTINATION;
use pgrx::PgSqlErrorCode;

const CONDITION: &str = "Write SQL over its columns: type, aggregate_type, aggregate_id, operation, payload, previous_payload, metadata, headers, actor, correlation_id, id. Name your functions and operators with their schema, and let the role outbox_policy use them and your tables.";

/// outbox_subscribe().
pub fn subscribe(call: Call, args: &Args) -> Result<(), UserError> {
    let destination = args.text(0);
    let destination = named(destination.as_deref())?;
    usable(Some(destination))?;
    let types = list("types", args.texts(1))?;
    let aggregate_types = list("aggregate_types", args.texts(2))?;
    let headers = args.jsonb(3).map(|headers| headers.to_text()).transpose()?;
    if headers
        .as_ref()
        .is_some_and(|headers| !headers.starts_with('{') || headers == "{}")
    {
        return Err(invalid(
            "headers are not a JSON object with members",
            "Pass what the headers of an event must contain, such as {\"tenant\": \"acme\"}, or leave them out for all.",
        ));
    }
    let when = args.text(4);
    if let Some(when) = &when
        && let Some(cause) = problem(when)
    {
        return Err(UserError {
            detail: Some(format!("{when}: {cause}.")),
            ..invalid("when_sql is not a condition over an event", CONDITION)
        });
    }
    let subscription = Subscription {
        destination,
        types,
        aggregate_types,
        headers,
        when,
    };
    subscriptions::set(call, subscription)
}

/// outbox_unsubscribe(). The destination may be gone.
pub fn unsubscribe(call: Call, destination: Option<&str>) -> Result<bool, UserError> {
    let destination = named(destination)?;
    if destination != DEFAULT_DESTINATION && server_of(destination).is_ok() {
        usable(Some(destination))?;
    }
    subscriptions::remove(call, destination)
}

fn named(destination: Option<&str>) -> Result<&str, UserError> {
    destination.ok_or_else(|| {
        UserError::new(
            PgSqlErrorCode::ERRCODE_NULL_VALUE_NOT_ALLOWED,
            "destination is NULL",
            "Name a destination; the default one is 'default'.",
        )
    })
}

fn list(argument: &str, given: Option<Vec<Option<String>>>) -> Result<Option<Vec<String>>, UserError> {
    let Some(given) = given else { return Ok(None) };
    let list: Option<Vec<String>> = given.into_iter().collect();
    let Some(list) = list else {
        return Err(UserError::new(
            PgSqlErrorCode::ERRCODE_NULL_VALUE_NOT_ALLOWED,
            format!("{argument} contains NULL"),
            "Leave the argument out for all.",
        ));
    };
    for name in &list {
        envelope::check_short(argument, name)?;
    }
    Ok(Some(list))
}
