//! The subscriptions of destinations: to which destinations an event for the default destination goes. A session keeps
//! them until the table or a foreign server changes. Runs in a user's backend, as the owner of the tables.
//!
//! No lock orders a change and the sessions that enqueue: each event goes by the subscriptions that were committed when
//! it was enqueued, or that a transaction with a snapshot of its own sees.

use super::statements::{Statements, statements};
use crate::error::{UserError, internal};
use crate::pg::spi::{Param, Spi, SpiResult};
use crate::pg::trigger::Call;
use crate::pg::{security, table, xact};
use crate::store::subscriptions::{Subscribed, Subscriber};
use outbox_core::subscriptions::EventFilter;
use outbox_worker::DEFAULT_DESTINATION;
use pgrx::PgBuiltInOids;
use std::rc::Rc;

/// A subscription as outbox_subscribe() writes it.
pub struct Subscription<'a> {
    pub destination: &'a str,
    pub types: Option<Vec<String>>,
    pub aggregate_types: Option<Vec<String>>,
    /// A JSON object.
    pub headers: Option<String>,
    pub when: Option<String>,
}

/// The subscriptions, if there are any and events for this destination go by them.
pub(super) fn of_destination(statements: &Statements, destination: &str) -> Result<Option<Rc<Subscribed>>, UserError> {
    if destination != DEFAULT_DESTINATION || statements.subscription_table == 0 {
        return Ok(None); // version 0.1.0 has no table of them
    }
    xact::accept_invalidations();
    let changes = table::changes_from_now(statements.subscription_table);
    if let Some((at, subscribed)) = &*statements.subscribed.borrow()
        && *at == changes
    {
        return Ok(subscribed.clone());
    }
    let subscribed = read(statements)?.map(Rc::new);
    if !xact::keeps_snapshot() {
        statements.subscribed.replace(Some((changes, subscribed.clone())));
    }
    Ok(subscribed)
}

fn read(statements: &Statements) -> Result<Option<Subscribed>, UserError> {
    Spi::connect_mut(|client| {
        let statement = statements.read_subscriptions.get_or(|| {
            let sql = format!(
                "select s.destination, s.types, s.aggregate_types, s.headers::pg_catalog.text, s.when_sql
                 from {}.outbox_subscriptions s",
                statements.schema
            );
            Ok(client.prepare_mut(&sql, &[])?.keep())
        })?;
        // `update`, as `select` may take the snapshot of the calling statement.
        let rows = client.update(statement, None, &[]).map_err(internal)?;
        let rows = rows.map(|row| {
            let (types, aggregate_types): (Option<Vec<String>>, Option<Vec<String>>) = (row.get(2)?, row.get(3)?);
            let headers: Option<String> = row.get(4)?;
            let filter = EventFilter::new(types, aggregate_types, headers.as_deref());
            Ok((filter, Subscriber::new(row.get(1)?.unwrap_or_default(), row.get(5)?)))
        });
        let all = rows.collect::<SpiResult<Vec<_>>>().map_err(internal)?;
        Ok((!all.is_empty()).then(|| Subscribed::new(all)))
    })
}

/// Sets the subscription of a destination.
pub fn set(call: Call, subscription: Subscription) -> Result<(), UserError> {
    let statements = statements(call);
    let sql = format!(
        "with new as (
           insert into {}.outbox_subscriptions as s (destination, types, aggregate_types, headers, when_sql)
           values ($1, $2, $3, $4::pg_catalog.jsonb, $5)
           on conflict on constraint outbox_subscriptions_pkey do update
             set types = excluded.types, aggregate_types = excluded.aggregate_types, headers = excluded.headers,
                 when_sql = excluded.when_sql, since = excluded.since, subscribed_by = excluded.subscribed_by
           returning s.destination, s.types, s.aggregate_types, s.headers, s.when_sql)
         select outbox_internal.record_audit('subscribe'::text, pg_catalog.to_jsonb(n), null::bigint, null::text) from new n",
        statements.schema
    );
    let [types, aggregate_types] = [subscription.types, subscription.aggregate_types].map(|list| match list {
        Some(list) => list.into(),
        None => Param::null(PgBuiltInOids::TEXTARRAYOID.value()),
    });
    let Subscription {
        destination,
        headers,
        when,
        ..
    } = subscription;
    let args = [destination.into(), types, aggregate_types, headers.into(), when.into()];
    security::run_as(statements.owner, || Spi::run_with_args(&sql, &args)).map_err(internal)
}

/// Removes the subscription of a destination. Returns whether it had one.
pub fn remove(call: Call, destination: &str) -> Result<bool, UserError> {
    let statements = statements(call);
    let sql = format!(
        "with old as (
           delete from {}.outbox_subscriptions s where s.destination operator(pg_catalog.=) $1 returning s.destination)
         select outbox_internal.record_audit('unsubscribe'::text, pg_catalog.to_jsonb(o), null::bigint, null::text) from old o",
        statements.schema
    );
    security::run_as(statements.owner, || {
        Spi::connect_mut(|client| Ok(!client.update(sql.as_str(), None, &[destination.into()])?.is_empty()))
            .map_err(internal)
    })
}

/// The table has changed: all sessions read it again.
pub fn changed(call: Call) {
    table::announce_change(statements(call).subscription_table);
}
