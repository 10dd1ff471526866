//! What SQL calls: shims that check arguments and hand on. Declared by hand in sql/src, so `sql = false`. Main thread of
//! a user's backend, which never starts a thread and never opens a socket.

use crate::config::Settings;
use crate::error::{self, UserError, invalid};
use crate::faults::{self, Fault};
use crate::pg::args::{Args, Int2s, Int8s, JsonText, Jsonb, Legible, Seqs, Text, Texts, Utf8};
use crate::pg::catalog::{self, Oid, OptionsOf};
use crate::pg::lanes::{self, Lanes};
use crate::pg::{latch, security, signals, trigger, txn};
use crate::shmem::Class;
use crate::store::source::{Criteria, Source};
use crate::store::{self, Enqueue, Keys, Publish, Times};
use crate::{
    asks, capture, config, express, figures, floors, hooks, limits, registry, shmem, source, ticks, wake, worker,
};
use outbox_core::envelope;
use outbox_core::hold::lane_crc;
use outbox_core::message::{Event, Outcome};
use outbox_core::partition::{Partition, crc32};
use outbox_core::route::Template;
use outbox_core::settle::{self, Disposition, Ended};
use outbox_transport::BodyFunction;
use outbox_transport::target::{self, Kind, Level};
use pgrx::datum::datetime_support::clock_timestamp;
use pgrx::prelude::*;

/// The destination of who names none: a server of that name, else what the settings describe.
pub const DEFAULT_DESTINATION: &str = "default";
/// Messages that one statement inserts.
const ENQUEUED_AT_ONCE: usize = 10_000;

#[pg_extern(sql = false)]
fn outbox_enqueue(
    seq: Option<i64>,
    key: Option<Text>,
    destination: Option<Text>,
    available_at: Option<TimestampWithTimeZone>,
    partition_key: Option<Text>,
    expires_at: Option<TimestampWithTimeZone>,
    fcinfo: pg_sys::FunctionCallInfo,
) -> bool {
    let Some(seq) = seq else { missing_seq().raise() };
    let times = Times {
        available_at,
        expires_at,
    };
    enqueue(
        fcinfo,
        &[seq],
        key.as_deref(),
        destination.as_deref(),
        times,
        partition_key.as_deref(),
    ) == 1
}

#[pg_extern(sql = false)]
fn outbox_enqueue_many(
    seqs: Option<Seqs>,
    key: Option<Text>,
    destination: Option<Text>,
    available_at: Option<TimestampWithTimeZone>,
    partition_key: Option<Text>,
    expires_at: Option<TimestampWithTimeZone>,
    fcinfo: pg_sys::FunctionCallInfo,
) -> i64 {
    let Some(Seqs(Some(seqs))) = seqs else {
        missing_seq().raise()
    };
    let times = Times {
        available_at,
        expires_at,
    };
    enqueue(
        fcinfo,
        &seqs,
        key.as_deref(),
        destination.as_deref(),
        times,
        partition_key.as_deref(),
    )
}

fn enqueue(
    fcinfo: pg_sys::FunctionCallInfo,
    seqs: &[i64],
    key: Option<&str>,
    destination: Option<&str>,
    times: Times,
    partition_key: Option<&str>,
) -> i64 {
    if config::replaying() {
        return 0;
    }
    let enqueued = check_enqueue(seqs, key).and_then(|()| {
        let destination = usable(destination)?;
        check_times(times)?;
        let partition = partition_key.map(partition_of_label).transpose()?;
        limits::check_room(destination, seqs.len())?;
        // In pieces: who calls chooses how many they are, and memory that is refused aborts the process.
        seqs.chunks(ENQUEUED_AT_ONCE).try_fold(0, |before, seqs| {
            let request = Enqueue {
                seqs,
                new: false,
                keys: match key {
                    Some(key) => Keys::Given(vec![Some(key.to_owned()); seqs.len()]),
                    None => Keys::LookedUp,
                },
                destination,
                times,
                partition,
            };
            let count = store::enqueue(fcinfo, request)?;
            if count > 0 {
                wake::enqueued(destination, count);
            }
            Ok(before + count)
        })
    });
    enqueued.unwrap_or_else(|error| error.raise())
}

/// For who sets up what will enqueue later.
#[pg_extern(sql = false)]
fn outbox_check_destination(destination: Option<Text>) {
    if let Err(error) = usable(destination.as_deref()) {
        error.raise();
    }
}

fn check_enqueue(seqs: &[i64], key: Option<&str>) -> Result<(), UserError> {
    if let Some(seq) = seqs.iter().find(|seq| **seq <= 0) {
        return Err(bad_seq(*seq));
    }
    if let Some(key) = key {
        envelope::check_short("key", key)?;
    }
    Ok(())
}

fn check_times(times: Times) -> Result<(), UserError> {
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
            "expires_at is over: the message would never be sent",
            "Give a time to come, or leave the message out.",
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

/// The destination that is meant, if there is one of that name and the caller may use it. Everybody who may enqueue may
/// use the default.
fn usable(destination: Option<&str>) -> Result<&str, UserError> {
    let Some(name) = destination.filter(|name| *name != DEFAULT_DESTINATION) else {
        return Ok(DEFAULT_DESTINATION);
    };
    if catalog::may_use_server(server_of(name)?) {
        return Ok(name);
    }
    Err(UserError::new(
        PgSqlErrorCode::ERRCODE_INSUFFICIENT_PRIVILEGE,
        format!("permission denied for destination \"{name}\""),
        format!("GRANT USAGE ON FOREIGN SERVER {name} TO {};", security::current_role()),
    ))
}

/// Refuses a destination that is not there. Who made a trigger was asked for the right to use it; who writes is not.
pub fn check_destination(name: &str) -> Result<(), UserError> {
    match name {
        DEFAULT_DESTINATION => Ok(()),
        name => server_of(name).map(drop),
    }
}

/// What makes the routing key of messages of a destination; empty where there is none.
pub fn routing_template(destination: &str) -> Template {
    let server = catalog::foreign_server(destination);
    let described = server.and_then(|server| Some((Kind::of_wrapper(&server.wrapper)?, server.options)));
    match described {
        Some((kind, options)) => target::routing_template(kind, &options).unwrap_or_else(config::routing_template),
        None => config::routing_template(),
    }
}

/// The OID of the server that a destination is.
fn server_of(name: &str) -> Result<u32, UserError> {
    let server = catalog::foreign_server(name).filter(|server| Kind::of_wrapper(&server.wrapper).is_some());
    let Some(server) = server else {
        let bytes = catalog::name_bytes(name);
        if bytes > catalog::NAME_BYTES_MAX {
            return Err(UserError::new(
                PgSqlErrorCode::ERRCODE_NAME_TOO_LONG,
                format!(
                    "the name of the destination has {bytes} bytes, more than {}",
                    catalog::NAME_BYTES_MAX
                ),
                "Give the name of the server as outbox_destination_status shows it.",
            ));
        }
        return Err(UserError::new(
            PgSqlErrorCode::ERRCODE_UNDEFINED_OBJECT,
            format!("destination \"{name}\" does not exist"),
            "Leave the destination out for the default one, or make one: CREATE SERVER … FOREIGN DATA WRAPPER outbox_amqp or outbox_http.",
        ));
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

fn partition_of_label(label: &str) -> Result<Partition, UserError> {
    Partition::parse_label(label).map_err(|error| {
        invalid(
            error.to_string(),
            "Labels look like p07; outbox_partition_of(key) gives one.",
        )
    })
}

#[pg_extern(sql = false, immutable, strict, parallel_safe)]
fn outbox_crc32(key: Text) -> i64 {
    i64::from(crc32(&key))
}

#[pg_extern(sql = false)]
fn outbox_partition_by(
    partitioner: Option<Text>,
    owner: Option<Text>,
    key: Option<Text>,
    partition_count: Option<i32>,
    fcinfo: pg_sys::FunctionCallInfo,
) -> Option<i32> {
    let count = i16::try_from(partition_count?).ok().filter(|count| *count > 0)?;
    let named = partitioner.as_deref().zip(owner.as_deref());
    match store::partition_by(fcinfo, named, &key?, count) {
        Ok(partition) => Some(i32::from(partition)),
        Err(error) => error.raise(),
    }
}

#[pg_extern(sql = false)]
fn outbox_configure(
    partition_count: Option<i32>,
    leasing: Option<bool>,
    partitioner: Option<Text>,
    fcinfo: pg_sys::FunctionCallInfo,
) {
    if let Err(error) = store::configure(fcinfo, partition_count, leasing, partitioner.as_deref()) {
        error.raise();
    }
}

#[pg_extern(sql = false)]
fn outbox_uuid_v7() -> pgrx::Uuid {
    store::new_id()
}

#[pg_extern(sql = false)]
fn outbox_publish(fcinfo: pg_sys::FunctionCallInfo) -> Option<i64> {
    if config::replaying() {
        return None;
    }
    // SAFETY: the call's own fcinfo; the types are as sql/src/20_enqueue.sql declares them.
    let args = unsafe { Args::new(fcinfo) };
    match publish(fcinfo, &args) {
        Ok(seq) => Some(seq),
        Err(error) => error.raise(),
    }
}

fn publish(fcinfo: pg_sys::FunctionCallInfo, args: &Args) -> Result<i64, UserError> {
    let Some(kind) = args.text(0).filter(|kind| !kind.is_empty()) else {
        return Err(missing("type", "Name what happened, for example 'OrderPlaced'."));
    };
    let Some(payload) = args.jsonb(1) else {
        let hint = "Pass '{}' for an event without data. An SQL NULL is not JSON null.";
        return Err(missing("payload", hint));
    };
    let session = config::Context::snapshot();
    let named = args.text(10);
    let times = Times {
        available_at: args.time(11),
        expires_at: args.time(13),
    };
    let actor = args.text(8).or(session.actor);
    let metadata = args
        .jsonb(6)
        .or_else(|| session.metadata.as_deref().map(Jsonb::of_text));
    let headers = args.jsonb(7).or_else(|| session.headers.as_deref().map(Jsonb::of_text));
    let event = Event {
        kind,
        aggregate_type: args.text(2),
        aggregate_id: args.text(3),
        operation: args.text(4),
        correlation_id: args.text(9).or(session.correlation_id),
        headers: headers.as_ref().map(Jsonb::to_text),
        ..Event::default()
    };
    let destination = usable(named.as_deref())?;
    check_times(times)?;
    limits::check_room(destination, 1)?;
    let key = check_event(&event, &routing_template(destination))?;
    let request = Publish {
        id: args.uuid(12),
        kind: &event.kind,
        aggregate_type: event.aggregate_type.as_deref(),
        aggregate_id: event.aggregate_id.as_deref(),
        operation: event.operation.as_deref(),
        payload,
        previous_payload: args.jsonb(5),
        metadata,
        headers,
        actor: actor.as_deref(),
        correlation_id: event.correlation_id.as_deref(),
        key: key.as_deref(),
        destination,
        times,
    };
    let seq = store::publish(fcinfo, &request)?;
    wake::enqueued(destination, 1);
    Ok(seq)
}

fn missing(what: &str, hint: &str) -> UserError {
    let message = format!("an event needs a {what}");
    UserError::new(PgSqlErrorCode::ERRCODE_NULL_VALUE_NOT_ALLOWED, message, hint)
}

/// Refuses at the call what would otherwise be a dead letter later. Returns the key.
pub fn check_event(event: &Event, template: &Template) -> Result<Option<String>, UserError> {
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
        envelope::check_short(store::AGGREGATE_KEY, key)?;
    }
    envelope::check_routing(template, event, key.as_deref())?;
    Ok(key)
}

#[pg_extern(sql = false)]
fn outbox_source_set(fcinfo: pg_sys::FunctionCallInfo) {
    // SAFETY: the call's own fcinfo; the types are as sql/src/27_source.sql declares them.
    let args = unsafe { Args::new(fcinfo) };
    let mapping = (0..store::source::PARTS.len()).map(|part| args.text(part + 1));
    if let Err(error) = source::set(fcinfo, args.oid(0).map(Oid::to_u32), mapping.collect()) {
        error.raise();
    }
}

#[pg_extern(sql = false)]
fn outbox_source_problem(fcinfo: pg_sys::FunctionCallInfo) -> Option<Text> {
    match store::source::current(fcinfo) {
        Ok(source) => source?.problem().map(Text::from),
        Err(error) => error.raise(),
    }
}

/// Of the source that is set.
fn ask_source<T>(fcinfo: pg_sys::FunctionCallInfo, ask: impl FnOnce(&Source) -> Result<Vec<T>, UserError>) -> Vec<T> {
    let asked = store::source::current(fcinfo).and_then(|source| source.map_or(Ok(Vec::new()), |source| ask(&source)));
    asked.unwrap_or_else(|error| error.raise())
}

#[pg_extern(sql = false)]
fn outbox_source_events(seqs: Int8s, bytes_max: i64, fcinfo: pg_sys::FunctionCallInfo) -> Vec<Option<Text>> {
    let bytes_max = usize::try_from(bytes_max).unwrap_or(0);
    let events = ask_source(fcinfo, |source| source.events(&seqs.0, bytes_max));
    events.into_iter().map(|text| text.map(Text::from)).collect()
}

#[pg_extern(sql = false)]
fn outbox_source_matching(
    seqs: Int8s,
    kind: Option<Text>,
    aggregate_type: Option<Text>,
    aggregate_id: Option<Text>,
    created_from: Option<TimestampWithTimeZone>,
    created_to: Option<TimestampWithTimeZone>,
    fcinfo: pg_sys::FunctionCallInfo,
) -> Vec<i64> {
    let criteria = Criteria {
        kind: kind.map(Text::into_string),
        aggregate_type: aggregate_type.map(Text::into_string),
        aggregate_id: aggregate_id.map(Text::into_string),
        created_from,
        created_to,
    };
    ask_source(fcinfo, |source| source.matching(&seqs.0, &criteria))
}

/// The trigger of outbox_attach.
#[pg_extern(sql = false)]
fn outbox_attached(fcinfo: pg_sys::FunctionCallInfo) {
    fire(fcinfo, capture::attached);
}

/// The trigger of outbox_capture.
#[pg_extern(sql = false)]
fn outbox_captured(fcinfo: pg_sys::FunctionCallInfo) {
    fire(fcinfo, capture::captured);
}

/// Every trigger of ours comes through here.
fn fire(fcinfo: pg_sys::FunctionCallInfo, trigger: fn(trigger::Call) -> Result<(), UserError>) {
    if config::replaying() {
        return;
    }
    if let Err(error) = trigger(fcinfo) {
        error.raise();
    }
}

#[pg_extern(sql = false)]
fn outbox_wake(more_waiting: i64, partitions: Int2s, seqs: Int8s) {
    wake::more_wait(more_waiting);
    wake::changed_by_hand();
    for (partition, seq) in partitions.0.into_iter().zip(seqs.0) {
        if let Ok(partition) = Partition::new(i64::from(partition)) {
            Class::all().for_each(|class| wake::read_again(class, partition, seq));
        }
    }
}

/// Always true, so that it can stand in a WHERE.
#[pg_extern(sql = false)]
fn outbox_note_shown(destination: Text, partition: i16, seq: i64) -> bool {
    if let Ok(partition) = Partition::new(i64::from(partition)) {
        wake::is_shown(&destination, partition, seq);
    }
    true
}

#[pg_extern(sql = false)]
fn outbox_note_pending(destination: Text, more: i64) {
    wake::pending_changed(&destination, more);
}

/// The arrays are as long as each other.
#[pg_extern(sql = false)]
fn outbox_held(by_partition: bool, seqs: Int8s, keys: Texts, partitions: Int2s) -> Vec<i64> {
    let open = registry::open_transactions();
    let is_held = |seq: i64, key: Option<&str>, partition: i16| match (by_partition, key) {
        (true, _) => Partition::new(i64::from(partition)).is_ok_and(|partition| {
            let crc = lane_crc(partition);
            open.iter().any(|transaction| transaction.holds_lane(crc, seq))
        }),
        (false, Some(key)) => open.iter().any(|transaction| transaction.holds(crc32(key), seq)),
        (false, None) => false,
    };
    (seqs.0.into_iter().zip(keys.0).zip(partitions.0))
        .filter(|((seq, key), partition)| is_held(*seq, key.as_deref(), *partition))
        .map(|((seq, _), _)| seq)
        .collect()
}

#[pg_extern(sql = false)]
fn outbox_judge(
    wrapper: Option<Text>,
    options: Option<Texts>,
    seq: Option<i64>,
    attempts: Option<i32>,
    error: Option<Text>,
    unsendable: Option<bool>,
) -> Vec<Text> {
    let default = Settings::snapshot().target;
    let kind = wrapper.and_then(|name| Kind::of_wrapper(&name)).unwrap_or(Kind::Amqp);
    // What cannot be understood is judged by the settings, as a worker does.
    let rules =
        target::described(kind, &default, &options_of(options), &[]).map_or(default.rules, |target| target.rules);
    let reason = error.map_or_else(|| "failed".to_owned(), Text::into_string);
    let outcome = match unsendable.unwrap_or_default() {
        false => Outcome::Failed { reason },
        true => Outcome::Unsendable { reason },
    };
    let attempts = u32::try_from(attempts.unwrap_or_default()).unwrap_or_default();
    let seed = seq.unwrap_or_default() as u64;
    let judged = match settle::decide(&outcome, attempts, &rules.retry, seed) {
        Disposition::Retry { delay_ms, error } => ["r".to_owned(), delay_ms.to_string(), error],
        Disposition::Dead { reason } => [rules.dead_action().to_owned(), "0".to_owned(), reason],
        other => unreachable!("a failure is charged, not {other:?}"),
    };
    judged.map(Text::from).into()
}

/// Options as catalogs have them, `name=value` each.
fn options_of(options: Option<Texts>) -> Vec<(String, String)> {
    let options = options.map_or_else(Vec::new, |texts| texts.0);
    target::split(&options.into_iter().flatten().collect::<Vec<String>>())
}

#[pg_extern(sql = false)]
fn outbox_note_ended(published: i64, failed: i64, gone: i64) {
    wake::note_ended(Ended::of(published, failed, gone));
}

#[pg_extern(sql = false)]
fn outbox_note_took(took_us: Int8s) {
    wake::note_took(took_us.0);
}

/// seq NULL: nobody knows which messages they were.
#[pg_extern(sql = false)]
fn outbox_note_fault(
    destination: Option<Text>,
    error: Option<Text>,
    is_dead: Option<bool>,
    seq: Option<i64>,
    count: Option<i64>,
) {
    if let (Some(destination), Some(count)) = (destination, count.and_then(|count| u64::try_from(count).ok())) {
        let (error, is_dead) = (error.as_deref().unwrap_or_default(), is_dead.unwrap_or_default());
        let fault = Fault::of_messages(&destination, error, is_dead, seq.unwrap_or_default(), count);
        wake::note_fault(fault);
    }
}

#[pg_extern(sql = false)]
fn outbox_is_in_hand(destination: Text, partition: i16, seq: i64) -> bool {
    let partition = Partition::new(i64::from(partition));
    partition.is_ok_and(|partition| express::is_in_hand(&destination, partition, seq))
}

#[pg_extern(sql = false)]
fn outbox_is_taken(destination: Text, partition: i16, seq: i64) -> bool {
    let partition = Partition::new(i64::from(partition));
    partition.is_ok_and(|partition| express::is_taken(&destination, partition, seq))
}

#[pg_extern(sql = false)]
fn outbox_has_enqueued() -> bool {
    wake::has_enqueued()
}

#[pg_extern(sql = false)]
fn outbox_await_end(seen: Option<i64>, timeout_ms: Option<i32>) -> i64 {
    wake::waiting();
    if seen == Some(i64::from(shmem::ends())) {
        latch::wait(i64::from(timeout_ms.unwrap_or(1).max(1)));
        signals::check_for_interrupts();
    }
    i64::from(shmem::ends())
}

#[pg_extern(sql = false)]
fn outbox_send_workers_away() -> bool {
    hooks::send_workers_away(catalog::my_database(), true)
}

#[pg_extern(sql = false)]
fn outbox_commit_position(xid: txn::Xid) -> i64 {
    txn::commit_position(xid) as i64
}

#[pg_extern(sql = false)]
fn outbox_system_identifier() -> i64 {
    catalog::system_identifier() as i64
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

/// Of each lane in which something waits four texts: destination, partition, seq of the first, and when that was enqueued, in µs
/// since 1970.
#[pg_extern(sql = false)]
fn outbox_first_waiting(fcinfo: pg_sys::FunctionCallInfo) -> Vec<Option<Text>> {
    let [table, _] = store::message_tables(fcinfo);
    let Some(outbox) = Lanes::open(table) else {
        return Vec::new();
    };
    let firsts = floors::look(&outbox);
    outbox.close();
    let texts = firsts.into_iter().flat_map(|first| {
        let (partition, seq) = (first.partition.to_string(), first.seq.to_string());
        let enqueued_at_us = store::since_1970(first.enqueued_at).to_string();
        [first.destination, partition, seq, enqueued_at_us]
    });
    texts.map(|text| Some(Text::from(text))).collect()
}

/// The seq of the first dead letter, or of the first that blocks others.
#[pg_extern(sql = false)]
fn outbox_first_dead(blocks: bool, fcinfo: pg_sys::FunctionCallInfo) -> Option<i64> {
    let [_, table] = store::message_tables(fcinfo);
    let first = |floor| lanes::first_dead(table, blocks, floor);
    match shmem::my_database() {
        Some(database) => database.floors().look_at_dead(blocks, first),
        None => first(0),
    }
}

#[pg_extern(sql = false)]
fn outbox_note_dead(more: i64, more_block: i64, seq: i64) {
    wake::dead_changed([more, more_block], seq);
}

#[pg_extern(sql = false)]
fn outbox_nothing_waits() -> bool {
    // One destination that was counted is as good as all: they are counted together.
    shmem::my_database().is_some_and(|database| database.pending() <= 0) && figures::has_none(DEFAULT_DESTINATION)
}

#[pg_extern(sql = false)]
fn outbox_minutes() -> Option<Vec<Option<f64>>> {
    shmem::my_database().and_then(|database| database.throughput(store::now_us()))
}

#[pg_extern(sql = false)]
fn outbox_faults() -> Option<Vec<Option<Text>>> {
    Some(faults::here()?.into_iter().map(|text| text.map(Text::from)).collect())
}

#[pg_extern(sql = false)]
fn outbox_recent_ticks() -> Option<Vec<i64>> {
    ticks::here()
}

#[pg_extern(sql = false)]
fn outbox_destination_figures(destination: Text) -> Option<Vec<Option<f64>>> {
    figures::of(&destination)
}

#[pg_extern(sql = false)]
fn outbox_ask_for_a_look(destination: Text) -> bool {
    figures::ask_for_a_look(&destination)
}

/// NULL: another session asks; 0: there is nobody to ask.
#[pg_extern(sql = false)]
fn outbox_ask(reach: i64) -> Option<i64> {
    wake::asking();
    asks::ask(reach).map(i64::from)
}

#[pg_extern(sql = false)]
fn outbox_answers(ticket: i64, timeout_ms: i32) -> Vec<i64> {
    let (answers, done) = asks::answers(ticket as u32);
    if done && !answers.is_empty() {
        return answers;
    }
    latch::wait(i64::from(timeout_ms.max(1)));
    signals::check_for_interrupts();
    asks::answers(ticket as u32).0
}

#[pg_extern(sql = false)]
fn outbox_stop_asking() {
    wake::stop_asking();
}

#[pg_extern(sql = false)]
fn outbox_server_workers() -> Option<Vec<Text>> {
    let numbers = shmem::workers_here()?;
    Some(numbers.into_iter().map(|number| worker::id_of(number).into()).collect())
}

#[pg_extern(sql = false)]
fn outbox_leases_last(worker: Text) -> bool {
    shmem::leases_last(&worker)
}

#[pg_extern(sql = false)]
fn outbox_missing_slots() -> i32 {
    shmem::missing_slots() as i32
}

#[pg_extern(sql = false)]
fn outbox_server_state() -> Option<Text> {
    match shmem::my_database() {
        Some(database) => database.obstacle().map(Text::from),
        None => shmem::lacks_place().then(|| Text::from("databases")),
    }
}

#[pg_extern(sql = false)]
fn outbox_amqp_validator(options: Texts, catalog: Oid) {
    check_options(Kind::Amqp, options, catalog);
}

#[pg_extern(sql = false)]
fn outbox_http_validator(options: Texts, catalog: Oid) {
    check_options(Kind::Http, options, catalog);
}

/// Options as CREATE SERVER and CREATE USER MAPPING give them, `name=value` each.
fn check_options(kind: Kind, options: Texts, catalog: Oid) {
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
    // No error: a dump that is restored without owners would lose the server.
    if let Some(body) = body_of(kind, &options)
        && let Err(why) = store::body::check(&body, security::current_user())
    {
        error::warning(format!("no message can go there yet: {}", why.message), why.hint);
    }
}

/// The function that makes the bodies of a destination with these options.
fn body_of(kind: Kind, options: &target::Options) -> Option<BodyFunction> {
    target::described(kind, &target::Target::plain(), options, &[])
        .ok()?
        .body
}

/// What is wrong with the function of a destination, and what to do.
#[pg_extern(sql = false)]
fn outbox_body_problem(destination: Text) -> Option<Vec<Text>> {
    let server = catalog::foreign_server(&destination)?;
    let body = body_of(Kind::of_wrapper(&server.wrapper)?, &server.options)?;
    let problem = store::body::problem(&destination, &body)?;
    Some(vec![problem.message.into(), problem.hint.into()])
}

/// Why a message with these texts can never be sent.
#[pg_extern(sql = false)]
fn outbox_unreadable(fcinfo: pg_sys::FunctionCallInfo) -> Option<Text> {
    // SAFETY: the call's own fcinfo; the types are as sql/src/30_worker.sql declares them.
    let args = unsafe { Args::new(fcinfo) };
    let text = |number| args.text_or_why_not(number);
    let key = text(0).map(drop);
    let event = || {
        Ok(Event {
            kind: text(1)?.unwrap_or_default(),
            aggregate_type: text(2)?,
            aggregate_id: text(3)?,
            operation: text(4)?,
            payload: text(5)?.unwrap_or_default(),
            previous_payload: text(6)?,
            metadata: text(7)?,
            headers: text(8)?,
            actor: text(9)?,
            correlation_id: text(10)?,
            ..Event::default()
        })
    };
    store::sendable(key, event()).err().map(Text::from)
}

#[pg_extern(sql = false)]
fn outbox_json_text(fcinfo: pg_sys::FunctionCallInfo) -> Option<JsonText> {
    // SAFETY: the call's own fcinfo; the types are as sql/src/30_worker.sql declares them.
    unsafe { Args::new(fcinfo) }.jsonb(0).map(Jsonb::into_text)
}

#[pg_extern(sql = false)]
fn outbox_legible(text: Legible) -> Text {
    text.0.into()
}

#[pg_extern(sql = false)]
fn outbox_of_utf8(text: Utf8) -> Text {
    text.0.into()
}
