//! What SQL calls: shims that check arguments and hand on. Declared by hand in sql/src, so `sql = false`. Main thread of
//! a user's backend, which never starts a thread and never opens a socket.

use crate::error::{self, UserError, invalid};
use crate::pg::{catalog, txn};
use crate::store::{self, Enqueue};
use crate::{config, hooks, registry, shmem, wake, worker};
use outbox_core::envelope;
use outbox_core::message::Event;
use outbox_core::partition::{Partition, crc32};
use pgrx::prelude::*;

/// The one destination there is until others are declared: what outbox.url names.
pub const DEFAULT_DESTINATION: &str = "default";

/// The largest body that is taken. RabbitMQ 4 refuses more than 16 MiB by default, older ones more than 128 MiB.
const BODY_MAX_BYTES: i64 = 16 * 1024 * 1024;

#[pg_extern(sql = false)]
fn outbox_enqueue(
    seq: Option<i64>,
    key: Option<&str>,
    destination: Option<&str>,
    available_at: Option<TimestampWithTimeZone>,
    partition_key: Option<&str>,
    fcinfo: pg_sys::FunctionCallInfo,
) -> bool {
    let Some(seq) = seq else { missing_seq().raise() };
    enqueue(fcinfo, &[seq], false, key, destination, available_at, partition_key) == 1
}

#[pg_extern(sql = false)]
fn outbox_enqueue_many(
    seqs: Option<Vec<Option<i64>>>,
    key: Option<&str>,
    destination: Option<&str>,
    available_at: Option<TimestampWithTimeZone>,
    partition_key: Option<&str>,
    fcinfo: pg_sys::FunctionCallInfo,
) -> i64 {
    let seqs: Option<Vec<i64>> = seqs.and_then(|seqs| seqs.into_iter().collect());
    let Some(seqs) = seqs else { missing_seq().raise() };
    enqueue(fcinfo, &seqs, false, key, destination, available_at, partition_key)
}

/// Enqueues an event that this statement has just stored: it waits nowhere yet, and its key is known.
#[pg_extern(sql = false)]
fn outbox_enqueue_new(
    seq: i64,
    key: Option<&str>,
    destination: Option<&str>,
    available_at: Option<TimestampWithTimeZone>,
    fcinfo: pg_sys::FunctionCallInfo,
) -> bool {
    enqueue(fcinfo, &[seq], true, key, destination, available_at, None) == 1
}

fn enqueue(
    fcinfo: pg_sys::FunctionCallInfo,
    seqs: &[i64],
    new: bool,
    key: Option<&str>,
    destination: Option<&str>,
    available_at: Option<TimestampWithTimeZone>,
    partition_key: Option<&str>,
) -> i64 {
    if config::replaying() {
        return 0;
    }
    let enqueued = check_enqueue(seqs, key, destination).and_then(|()| {
        if available_at.is_some_and(|at| at.is_infinity()) {
            return Err(invalid(
                "available_at is infinity: the message would never be due",
                "Leave it out, or give a time.",
            ));
        }
        let partition = partition_key.map(partition_of_label).transpose()?;
        store::enqueue(
            fcinfo,
            &Enqueue {
                seqs,
                new,
                key,
                destination: DEFAULT_DESTINATION,
                available_at,
                partition,
            },
        )
    });
    match enqueued {
        Ok(count) => {
            if count > 0 {
                wake::enqueued(count);
            }
            count
        }
        Err(error) => error.raise(),
    }
}

fn check_enqueue(seqs: &[i64], key: Option<&str>, destination: Option<&str>) -> Result<(), UserError> {
    if let Some(seq) = seqs.iter().find(|seq| **seq <= 0) {
        return Err(invalid(
            format!("seq {seq} is not positive"),
            "Pass the seq of an event, as outbox_publish returns it.",
        ));
    }
    if let Some(key) = key {
        envelope::check_short("key", key)?;
    }
    match destination {
        None | Some(DEFAULT_DESTINATION) => Ok(()),
        Some(unknown) => Err(UserError::new(
            PgSqlErrorCode::ERRCODE_UNDEFINED_OBJECT,
            format!("destination \"{unknown}\" does not exist"),
            "Leave the destination out: there is one, the broker of outbox.url.",
        )),
    }
}

fn missing_seq() -> UserError {
    UserError::new(
        PgSqlErrorCode::ERRCODE_NULL_VALUE_NOT_ALLOWED,
        "seq is NULL",
        "Pass the seq of an event, as outbox_publish returns it.",
    )
}

fn partition_of_label(label: &str) -> Result<Partition, UserError> {
    Partition::parse_label(label).map_err(|error| {
        invalid(
            error.to_string(),
            "Labels look like p07; outbox_partition_of(key) gives one.",
        )
    })
}

#[pg_extern(sql = false, immutable, strict, parallel_safe)]
fn outbox_crc32(key: &str) -> i64 {
    i64::from(crc32(key))
}

#[pg_extern(sql = false)]
fn outbox_uuid_v7() -> pgrx::Uuid {
    pgrx::Uuid::from_bytes(*uuid::Uuid::now_v7().as_bytes())
}

/// Refuses at the call what would otherwise be a dead letter later.
#[allow(clippy::too_many_arguments)] // as many as the SQL function has
#[pg_extern(sql = false)]
fn outbox_check_event(
    kind: &str,
    aggregate_type: Option<&str>,
    aggregate_id: Option<&str>,
    operation: Option<&str>,
    correlation_id: Option<&str>,
    headers: Option<&str>,
    body_bytes: i64,
    fcinfo: pg_sys::FunctionCallInfo,
) {
    store::hold_extension(fcinfo); // outbox_publish calls this first
    let event = Event {
        kind: kind.into(),
        aggregate_type: aggregate_type.map(Into::into),
        aggregate_id: aggregate_id.map(Into::into),
        operation: operation.map(Into::into),
        correlation_id: correlation_id.map(Into::into),
        headers: headers.map(Into::into),
        ..Event::default()
    };
    match check_event(&event, body_bytes) {
        Ok(key) => registry::announce_drawing(key.as_deref().map(crc32)), // the seq is drawn next
        Err(error) => error.raise(),
    }
}

/// Returns the key.
fn check_event(event: &Event, body_bytes: i64) -> Result<Option<String>, UserError> {
    let named = [
        ("type", Some(&event.kind)),
        ("aggregate_type", event.aggregate_type.as_ref()),
        ("aggregate_id", event.aggregate_id.as_ref()),
        ("operation", event.operation.as_ref()),
        ("correlation_id", event.correlation_id.as_ref()),
    ];
    for (name, value) in named {
        if let Some(value) = value {
            envelope::check_short(name, value)?;
        }
    }
    let key = store::aggregate_key(event.aggregate_type.as_deref(), event.aggregate_id.as_deref());
    if let Some(key) = &key {
        envelope::check_short("key (aggregate_type:aggregate_id)", key)?;
    }
    if let Some(headers) = &event.headers {
        envelope::check_headers(headers)?;
    }
    config::routing_template()
        .render(event, key.as_deref())
        .map_err(envelope::Refusal::from)?;
    if body_bytes > BODY_MAX_BYTES {
        return Err(UserError::new(
            PgSqlErrorCode::ERRCODE_PROGRAM_LIMIT_EXCEEDED,
            format!("the event has {body_bytes} bytes, more than the {BODY_MAX_BYTES} that are taken"),
            "Store the data elsewhere and publish a reference to it.",
        ));
    }
    Ok(key)
}

#[pg_extern(sql = false)]
fn outbox_is_replaying() -> bool {
    config::replaying()
}

#[pg_extern(sql = false)]
fn outbox_wake(more_waiting: i64, partitions: Vec<i16>, seqs: Vec<i64>) {
    wake::enqueued(more_waiting);
    wake::waiting_changed();
    for (partition, seq) in partitions.into_iter().zip(seqs) {
        if let Ok(partition) = Partition::new(i64::from(partition)) {
            wake::ready(partition, seq);
        }
    }
}

#[pg_extern(sql = false)]
fn outbox_send_workers_away() -> bool {
    hooks::send_workers_away(catalog::my_database())
}

#[pg_extern(sql = false)]
fn outbox_commit_position(xid: txn::Xid) -> i64 {
    txn::commit_position(xid) as i64
}

#[pg_extern(sql = false)]
fn outbox_registry() -> Vec<i64> {
    registry::flat()
}

#[pg_extern(sql = false)]
fn outbox_installed() {
    wake::installed();
    if !shmem::is_preloaded() {
        error::warning(
            "outbox is not preloaded: messages can be enqueued, but nothing delivers them yet",
            "Add outbox to shared_preload_libraries and restart the server.",
        );
    }
}

#[pg_extern(sql = false)]
fn outbox_is_preloaded() -> bool {
    shmem::is_preloaded()
}

#[pg_extern(sql = false)]
fn outbox_counters() -> Option<Vec<i64>> {
    shmem::my_database().map(|database| database.counters(store::now_us()).to_vec())
}

#[pg_extern(sql = false)]
fn outbox_server_workers() -> Option<Vec<String>> {
    let numbers = shmem::workers_here()?;
    Some(numbers.into_iter().map(worker::id_of).collect())
}

#[pg_extern(sql = false)]
fn outbox_missing_slots() -> i32 {
    shmem::missing_slots() as i32
}

#[pg_extern(sql = false)]
fn outbox_server_state() -> Option<&'static str> {
    shmem::my_database().and_then(|database| database.obstacle())
}
