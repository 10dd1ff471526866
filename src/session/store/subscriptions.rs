//! The subscriptions of destinations: to which destinations an event for the default destination goes. A session keeps
//! them until the table or a foreign server changes. Runs in a user's backend, as the owner of the tables.
//!
//! No lock orders a change and the sessions that enqueue: each event goes by the subscriptions that were committed when
//! it was enqueued, or that a transaction with a snapshot of its own sees.

use super::statements::{KeptSubscriptions, Statements, statements};
use super::subscription_conditions::{Subscribed, Subscriber};
use crate::error::{UserError, internal};
use crate::pg::spi::{Param, Spi, SpiHeapTupleData, SpiResult, SpiTupleTable};
use crate::pg::trigger::Call;
use crate::pg::{security, table, xact};
use outbox_core::event_filter::EventFilter;
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
    if destination != DEFAULT_DESTINATION {
        return Ok(None);
    }
    xact::accept_invalidations();
    let changes = table::changes_from_now(statements.subscription_table);
    let transaction = xact::local_transaction();
    if let Some(kept) = &*statements.subscribed.borrow()
        && kept.changes == changes
        && kept.transaction.is_none_or(|kept| kept == transaction)
    {
        return Ok(kept.subscribed.clone());
    }
    let (rows, are_latest) = read(statements)?;
    let subscribed = (!rows.is_empty()).then(|| Rc::new(subscribed(rows)));
    statements.subscribed.replace(Some(KeptSubscriptions {
        changes,
        transaction: (!are_latest).then_some(transaction),
        subscribed: subscribed.clone(),
    }));
    Ok(subscribed)
}

/// Destination, types, aggregate types, headers, condition.
type SubscriptionRow = (
    String,
    Option<Vec<String>>,
    Option<Vec<String>>,
    Option<String>,
    Option<String>,
);

fn subscribed(rows: Vec<SubscriptionRow>) -> Subscribed {
    let all = rows
        .into_iter()
        .map(|(destination, types, aggregate_types, headers, when)| {
            let filter = EventFilter::new(types, aggregate_types, headers.as_deref());
            (filter, Subscriber::new(destination, when))
        });
    Subscribed::new(all.collect())
}

/// The rows, and whether they are what is committed now.
fn read(statements: &Statements) -> Result<(Vec<SubscriptionRow>, bool), UserError> {
    let sql = format!(
        "select s.destination, s.types, s.aggregate_types, s.headers::pg_catalog.text, s.when_sql
         from {}.outbox_subscriptions s order by s.destination",
        statements.schema
    );
    Spi::connect_mut(|client| {
        // `update`, as `select` may take the snapshot of the calling statement.
        let seen = client.update(sql.as_str(), None, &[]).and_then(rows)?;
        let are_latest = !xact::keeps_snapshot() || client.select_latest(&sql).and_then(rows)? == seen;
        Ok((seen, are_latest))
    })
    .map_err(internal)
}

fn rows(table: SpiTupleTable) -> SpiResult<Vec<SubscriptionRow>> {
    let row = |row: SpiHeapTupleData| {
        let destination: Option<String> = row.get(1)?;
        Ok((
            destination.unwrap_or_default(),
            row.get(2)?,
            row.get(3)?,
            row.get(4)?,
            row.get(5)?,
        ))
    };
    table.map(row).collect()
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
