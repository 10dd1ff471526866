//! The functions that SQL calls: they check their arguments and pass them on. sql/src declares them by hand, so they
//! have `sql = false`. They run on the main thread of a user's backend, which never starts a thread and never opens a
//! socket.

use crate::config;
use crate::error::{self, UserError};
use crate::event;
use crate::pg::args::{Args, Integers, JsonText, Jsonb, Legible, SqlText, SqlTexts, TextRow, Utf8};
use crate::pg::catalog::{self, Oid};
use crate::pg::clock::{now_us, since_1970, unix_seconds};
use crate::pg::lane_scan::{self, OutboxLanes};
use crate::pg::trigger::Operation;
use crate::pg::when::WhenCall;
use crate::pg::{latch, security, signals, table, trigger, txn};
use crate::session::checks::{
    addressing, check_enqueue, check_event, check_times, missing_seq, partition_of_label, usable,
};
use crate::session::declarations::options_of;
use crate::session::store::enqueue::{self as store, Enqueue, Keys};
use crate::session::store::new_event::{self, IfExists, NewEvent, Times, new_id};
use crate::session::store::statements::statements;
use crate::session::store::{current_source, partition, publish, subscriptions};
use crate::session::{capture, changes, effects, source_checks, subscribe, utility};
use crate::shared::databases;
use crate::shared::error_groups::{self, FailureGroup};
use crate::shared::fast_path;
use crate::shared::maintenance_state::LastAnswer;
use crate::shared::{floors, launcher, lifecycle, sessions, statistics, transactions, workers};
use crate::store::source::by_sql::Criteria;
use crate::store::source::{PARTS, Source};
use crate::store::standbys;
use outbox_core::engine::Request;
use outbox_core::event::sendable;
use outbox_core::message::Outcome;
use outbox_core::open_transactions::lane_crc;
use outbox_core::partition::{Partition, crc32};
use outbox_core::settle::{self, Action, Ended, Ending, FailureKind};
use outbox_core::words::Word;
use outbox_transport::described::described;
use outbox_transport::kind::Kind;
use outbox_worker::DEFAULT_DESTINATION;
use outbox_worker::rewinds::{RewindGroup, RewindLane};
use pgrx::prelude::*;

/// The most messages that one statement inserts.
const ENQUEUED_AT_ONCE: usize = 10_000;

#[pg_extern(sql = false)]
fn outbox_enqueue(fcinfo: pg_sys::FunctionCallInfo) -> bool {
    // SAFETY: the call's own fcinfo; the types are as sql/src/20_enqueue.sql declares them.
    let args = unsafe { Args::new(fcinfo) };
    let Some(seq) = args.int8(0) else { missing_seq().raise() };
    enqueue(fcinfo, &args, &[seq]) == 1
}

#[pg_extern(sql = false)]
fn outbox_enqueue_many(fcinfo: pg_sys::FunctionCallInfo) -> i64 {
    // SAFETY: the call's own fcinfo; the types are as sql/src/20_enqueue.sql declares them.
    let args = unsafe { Args::new(fcinfo) };
    let Some(seqs) = args.int8s(0) else {
        missing_seq().raise()
    };
    enqueue(fcinfo, &args, &seqs)
}

/// Both functions have the same arguments after the first.
fn enqueue(fcinfo: pg_sys::FunctionCallInfo, args: &Args, seqs: &[i64]) -> i64 {
    if config::replaying() {
        return 0;
    }
    let (key, destination) = (args.text(1), args.text(2));
    let times = Times {
        available_at: args.time(3),
        expires_at: args.time(5),
    };
    let enqueued = check_enqueue(seqs, key.as_deref()).and_then(|()| {
        let destination = usable(destination.as_deref())?;
        check_times(times)?;
        let partition = args.text(4).map(|label| partition_of_label(&label)).transpose()?;
        // In batches: the caller chooses how many elements there are, and an allocation that fails aborts the process.
        seqs.chunks(ENQUEUED_AT_ONCE).try_fold(0, |before, seqs| {
            let keys = match &key {
                Some(key) => Keys::Given(vec![Some(key.clone()); seqs.len()]),
                None => Keys::LookedUp,
            };
            let request = Enqueue {
                seqs,
                keys,
                destination,
                times,
                partition,
            };
            Ok(before + store::enqueue(fcinfo, request)?)
        })
    });
    enqueued.unwrap_or_else(|error| error.raise())
}

/// For a session that sets up something that will enqueue later.
#[pg_extern(sql = false)]
fn outbox_check_destination(destination: Option<SqlText>) {
    usable(destination.as_deref()).unwrap_or_else(|error| error.raise());
}

#[pg_extern(sql = false, immutable, strict, parallel_safe)]
fn outbox_crc32(key: SqlText) -> i64 {
    i64::from(crc32(&key))
}

#[pg_extern(sql = false)]
fn outbox_partition_by(
    partitioner: Option<SqlText>,
    owner: Option<SqlText>,
    key: Option<SqlText>,
    partition_count: Option<i32>,
    fcinfo: pg_sys::FunctionCallInfo,
) -> Option<i32> {
    let count = i16::try_from(partition_count?).ok().filter(|count| *count > 0)?;
    let named = partitioner.as_deref().zip(owner.as_deref());
    let partition = partition::partition_by(fcinfo, named, &key?, count);
    Some(partition.unwrap_or_else(|error| error.raise()).into())
}

#[pg_extern(sql = false)]
fn outbox_configure(
    partition_count: Option<i32>,
    leasing: Option<bool>,
    partitioner: Option<SqlText>,
    fcinfo: pg_sys::FunctionCallInfo,
) {
    partition::configure(fcinfo, partition_count, leasing, partitioner.as_deref())
        .unwrap_or_else(|error| error.raise());
}

#[pg_extern(sql = false)]
fn outbox_uuid_v7() -> pgrx::Uuid {
    new_id()
}

#[pg_extern(sql = false)]
fn outbox_publish(fcinfo: pg_sys::FunctionCallInfo) -> Option<i64> {
    if config::replaying() {
        return None;
    }
    // SAFETY: the call's own fcinfo; the types are as sql/src/20_enqueue.sql declares them.
    let args = unsafe { Args::new(fcinfo) };
    publish(fcinfo, &args).unwrap_or_else(|error| error.raise())
}

fn publish(fcinfo: pg_sys::FunctionCallInfo, args: &Args) -> Result<Option<i64>, UserError> {
    let (event, times) = (NewEvent::of_arguments(args)?, Times::of(args));
    let if_exists = IfExists::of(args, event.has_own_id)?;
    let given = args.text(new_event::DESTINATION);
    let destination = usable(given.as_deref())?;
    check_times(times)?;
    let key = check_event(&event.event, &addressing(destination))?;
    changes::store_events()?; // of rows that this transaction has written before
    let seqs = publish::publish(statements(fcinfo), &[(event, key)], destination, times, if_exists)?;
    Ok(seqs.first().copied())
}

#[pg_extern(sql = false)]
fn outbox_source_set(fcinfo: pg_sys::FunctionCallInfo) {
    // SAFETY: the call's own fcinfo; the types are as sql/src/27_source.sql declares them.
    let args = unsafe { Args::new(fcinfo) };
    let mapping = (0..PARTS.len()).map(|part| args.text(part + 1));
    source_checks::set(fcinfo, args.oid(0).map(Oid::to_u32), mapping.collect()).unwrap_or_else(|error| error.raise());
}

#[pg_extern(sql = false)]
fn outbox_source_problem(fcinfo: pg_sys::FunctionCallInfo) -> Option<SqlText> {
    // Not an error: outbox_health would show nothing else.
    let problem = match current_source::get(fcinfo) {
        Ok(source) => source?.problem(),
        Err(error) => Some(error.message),
    };
    problem.map(SqlText::from)
}

/// Reads from the source that is set.
fn query_source<T>(fcinfo: pg_sys::FunctionCallInfo, ask: impl FnOnce(&Source) -> Result<Vec<T>, UserError>) -> Vec<T> {
    let asked = current_source::get(fcinfo).and_then(|source| source.map_or(Ok(Vec::new()), |source| ask(&source)));
    asked.unwrap_or_else(|error| error.raise())
}

#[pg_extern(sql = false)]
fn outbox_source_events(
    seqs: Integers,
    bytes_max: i64,
    limited: bool,
    fcinfo: pg_sys::FunctionCallInfo,
) -> Vec<Option<SqlText>> {
    let bytes_max = usize::try_from(bytes_max).unwrap_or(0);
    let events = query_source(fcinfo, |source| source.events(&seqs.0, bytes_max, limited));
    events.into_iter().map(|text| text.map(SqlText::from)).collect()
}

#[pg_extern(sql = false)]
fn outbox_source_event(seq: i64, fcinfo: pg_sys::FunctionCallInfo) -> Vec<Option<SqlText>> {
    let caller = security::current_user();
    let event = query_source(fcinfo, |source| Ok(source.event_for(seq, caller)));
    event.into_iter().map(|text| text.map(SqlText::from)).collect()
}

#[pg_extern(sql = false)]
fn outbox_source_matching(
    seqs: Integers,
    kind: Option<SqlText>,
    aggregate_type: Option<SqlText>,
    aggregate_id: Option<SqlText>,
    created_from: Option<TimestampWithTimeZone>,
    created_to: Option<TimestampWithTimeZone>,
    fcinfo: pg_sys::FunctionCallInfo,
) -> Vec<i64> {
    let criteria = Criteria {
        kind: kind.map(SqlText::into_string),
        aggregate_type: aggregate_type.map(SqlText::into_string),
        aggregate_id: aggregate_id.map(SqlText::into_string),
        created_from,
        created_to,
    };
    query_source(fcinfo, |source| source.matching(&seqs.0, &criteria))
}

#[pg_extern(sql = false)]
fn outbox_subscribe(fcinfo: pg_sys::FunctionCallInfo) {
    // SAFETY: the call's own fcinfo; the types are as sql/src/29_subscriptions.sql declares them.
    let args = unsafe { Args::new(fcinfo) };
    subscribe::subscribe(fcinfo, &args).unwrap_or_else(|error| error.raise());
}

#[pg_extern(sql = false)]
fn outbox_unsubscribe(destination: Option<SqlText>, fcinfo: pg_sys::FunctionCallInfo) -> bool {
    subscribe::unsubscribe(fcinfo, destination.as_deref()).unwrap_or_else(|error| error.raise())
}

/// The trigger function of outbox_subscriptions.
#[pg_extern(sql = false)]
fn outbox_subscriptions_changed(fcinfo: pg_sys::FunctionCallInfo) {
    subscriptions::changed(fcinfo);
}

/// For DDL on a table by its name, which then stays the same.
#[pg_extern(sql = false)]
fn outbox_lock_own_table(table: Oid) -> bool {
    catalog::lock_own_table(table.to_u32())
}

/// The trigger function of outbox_attach.
#[pg_extern(sql = false)]
fn outbox_attached(fcinfo: pg_sys::FunctionCallInfo) {
    fire(fcinfo, capture::attached);
}

/// The trigger function of outbox_capture.
#[pg_extern(sql = false)]
fn outbox_captured(fcinfo: pg_sys::FunctionCallInfo) {
    fire(fcinfo, capture::captured);
}

#[pg_extern(sql = false)]
fn outbox_row_inserted(fcinfo: pg_sys::FunctionCallInfo) -> bool {
    row_written(fcinfo, Operation::Insert)
}

#[pg_extern(sql = false)]
fn outbox_row_updated(fcinfo: pg_sys::FunctionCallInfo) -> bool {
    row_written(fcinfo, Operation::Update)
}

#[pg_extern(sql = false)]
fn outbox_row_deleted(fcinfo: pg_sys::FunctionCallInfo) -> bool {
    row_written(fcinfo, Operation::Delete)
}

/// The WHEN clauses of the triggers of outbox_capture call it for each row.
fn row_written(fcinfo: pg_sys::FunctionCallInfo, operation: Operation) -> bool {
    !config::replaying() && changes::row_written(WhenCall::of(fcinfo), operation).unwrap_or_else(|error| error.raise())
}

/// Runs every trigger function of the extension.
fn fire(fcinfo: pg_sys::FunctionCallInfo, trigger: fn(trigger::Call) -> Result<(), UserError>) {
    if config::replaying() {
        return;
    }
    trigger(fcinfo).unwrap_or_else(|error| error.raise());
}

#[pg_extern(sql = false)]
fn outbox_wake(more_waiting: i64) {
    effects::more_wait(more_waiting);
    effects::changed_by_hand();
}

#[pg_extern(sql = false)]
fn outbox_record_back(destination: SqlText, partition: i16, seq: i64) {
    if let Ok(partition) = Partition::new(partition.into()) {
        effects::read_again(RewindGroup::of(&destination).lane(partition), partition, seq);
    }
}

#[pg_extern(sql = false)]
fn outbox_record_gone(partition: i16, seq: i64) {
    if let Ok(partition) = Partition::new(partition.into()) {
        effects::read_again(RewindLane::UNBLOCKED, partition, seq);
        effects::more_wait(0); // wakes the workers
    }
}

/// Always returns true: a WHERE clause of claim_waiting calls it.
#[pg_extern(sql = false)]
fn outbox_record_shown(destination: SqlText, partition: i16, seq: i64) -> bool {
    if let Ok(partition) = Partition::new(i64::from(partition)) {
        effects::record_shown(&destination, partition, seq);
    }
    true
}

/// Always true, so that rows with it can be counted.
#[pg_extern(sql = false)]
fn outbox_record_enqueued(destination: SqlText, partition: i16, seq: i64) -> bool {
    outbox_record_highest(seq);
    if let Ok(partition) = Partition::new(i64::from(partition)) {
        effects::enqueued(&destination, 1);
        effects::ready(&destination, partition, seq, None);
    }
    true
}

#[pg_extern(sql = false)]
fn outbox_record_highest(seq: i64) {
    store::raise_highest(std::iter::once(seq));
}

#[pg_extern(sql = false)]
fn outbox_record_pending(destination: SqlText, more: i64) {
    effects::pending_changed(&destination, more);
}

/// All arrays have the same length.
#[pg_extern(sql = false)]
fn outbox_behind_open_transactions(
    by_partition: bool,
    seqs: Integers,
    keys: SqlTexts,
    partitions: Integers,
) -> Vec<i64> {
    let open = transactions::open_transactions();
    let is_held = |seq: i64, key: Option<&str>, partition: i64| match (by_partition, key) {
        (true, _) => Partition::new(partition).is_ok_and(|partition| {
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
fn outbox_decide_failure(
    wrapper: Option<SqlText>,
    options: Option<SqlTexts>,
    seq: Option<i64>,
    attempts: Option<i32>,
    error: Option<SqlText>,
    unsendable: Option<bool>,
) -> TextRow {
    let default = config::default_target();
    let kind = wrapper.map_or(Some(Kind::of_settings()), |name| Kind::of_wrapper(&name));
    // A destination whose options cannot be read goes by the settings, as a worker does it.
    let described = kind.and_then(|kind| described(kind, &default, &options_of(options), &[]).ok());
    let rules = described.map_or(default.rules, |target| target.rules);
    let reason = error.map_or_else(|| "failed".to_owned(), SqlText::into_string);
    let outcome = match unsendable.unwrap_or_default() {
        false => Outcome::Failed { reason },
        true => Outcome::Unsendable { reason },
    };
    let attempts = u32::try_from(attempts.unwrap_or_default()).unwrap_or_default();
    let seed = seq.unwrap_or_default() as u64;
    let disposition = settle::decide(&outcome, attempts, &rules.retry, seed);
    let ending = Ending::of(&disposition, rules.dead_blocks());
    assert!(
        matches!(ending.action, Action::Retry | Action::Dead(_)),
        "a failure is charged, not {ending:?}"
    );
    let decided = [
        ending.action.letter().to_owned(),
        ending.delay_ms.unwrap_or_default().to_string(),
        ending.reason.unwrap_or_default().to_owned(),
        ending.kind.map_or("", Word::name).to_owned(),
    ];
    TextRow(decided.map(Some).into())
}

#[pg_extern(sql = false)]
fn outbox_record_ended(published: i64, failed: i64, gone: i64) {
    effects::record_ended(Ended::of(published, failed, gone));
}

#[pg_extern(sql = false)]
fn outbox_record_delivery_times(delivery_us: Integers) {
    effects::record_delivery_times(delivery_us.0);
}

/// seq is NULL if the messages are not known.
#[pg_extern(sql = false)]
fn outbox_record_error(
    destination: Option<SqlText>,
    error: Option<SqlText>,
    code: Option<SqlText>,
    seq: Option<i64>,
    count: Option<i64>,
) {
    if let (Some(destination), Some(count)) = (destination, count.and_then(|count| u64::try_from(count).ok())) {
        let (error, seq) = (error.as_deref().unwrap_or_default(), seq.unwrap_or_default());
        let kind = code
            .and_then(|code| FailureKind::of_name(&code))
            .unwrap_or(FailureKind::Failed);
        let error_group = FailureGroup::of_messages(&destination, kind, error, seq, count);
        effects::record_error(error_group);
    }
}

#[pg_extern(sql = false)]
fn outbox_withdraw_unless_taken(destination: SqlText, partition: i16, seq: i64) -> bool {
    let partition = Partition::new(i64::from(partition));
    partition.map_or(true, |partition| {
        fast_path::withdraw_unless_taken(&destination, partition, seq)
    })
}

#[pg_extern(sql = false)]
fn outbox_is_taken(destination: SqlText, partition: i16, seq: i64) -> bool {
    let partition = Partition::new(i64::from(partition));
    partition.is_ok_and(|partition| fast_path::is_taken(&destination, partition, seq))
}

#[pg_extern(sql = false)]
fn outbox_has_enqueued() -> bool {
    effects::has_enqueued()
}

#[pg_extern(sql = false)]
fn outbox_await_end(seen: Option<i64>, timeout_ms: Option<i32>) -> i64 {
    if seen == Some(i64::from(databases::ends())) {
        latch::wait(i64::from(timeout_ms.unwrap_or(1).max(1)));
        signals::check_for_interrupts();
    }
    i64::from(databases::ends())
}

#[pg_extern(sql = false)]
fn outbox_send_workers_away() -> bool {
    utility::send_workers_away(catalog::my_database(), true)
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
fn outbox_installed() {
    effects::installed();
    if !launcher::is_preloaded() {
        error::warning(
            "outbox is not preloaded: messages can be enqueued, but nothing delivers them yet",
            "Add outbox to shared_preload_libraries and restart the server.",
        );
    }
}

#[pg_extern(sql = false)]
fn outbox_remove_initial_privileges(parameter: Oid) {
    catalog::remove_initial_privileges(parameter);
}

#[pg_extern(sql = false)]
fn outbox_is_preloaded() -> bool {
    launcher::is_preloaded()
}

/// The rows of an area of shared memory. The views in sql/src/50_views.sql and 51_monitoring.sql name their columns.
#[pg_extern(sql = false)]
fn outbox_shared_memory(
    area: Option<SqlText>,
    destination: Option<SqlText>,
    fcinfo: pg_sys::FunctionCallInfo,
) -> SetOfIterator<'static, TextRow> {
    let destination = destination.as_deref().unwrap_or_default();
    let database = databases::my_database();
    let (values, width) = match area.as_deref().unwrap_or_default() {
        // -1: dead letters are not counted.
        "counters" => {
            let counters = database.map(|database| database.counters(now_us()));
            let counters = counters.into_iter().flatten();
            (texts(counters.map(|count| Some(count).filter(|count| *count != -1))), 9)
        }
        "server" => {
            let preloaded = Some(launcher::is_preloaded().to_string());
            let obstacle = match database {
                Some(database) => database.obstacle().map(str::to_owned),
                None => databases::lacks_entry().then(|| "databases".to_owned()),
            };
            let missing_slots = Some(launcher::missing_slots().to_string());
            let [missing, connected] = standbys_shown();
            (vec![preloaded, obstacle, missing_slots, missing, connected], 5)
        }
        "databases" => (texts(databases::others().map(Some)), 1),
        "transactions" => (texts(transactions::flat().into_iter().map(Some)), 4),
        "first messages" if nothing_waits() => (Vec::new(), 4),
        "first messages" => (first_messages(fcinfo), 4),
        "first dead letters" => (texts([false, true].map(|blocks| first_dead(blocks, fcinfo))), 2),
        "errors" => (error_groups::here().unwrap_or_default(), 8),
        "failed tasks" => {
            let answers = database.map(|database| database.maintenance.answers());
            let failures = answers.into_iter().flatten().filter_map(LastAnswer::failure);
            let row = |(since_us, failure): (i64, String)| [Some(since_us.to_string()), Some(failure)];
            (failures.flat_map(row).collect(), 2)
        }
        "throughput" => {
            let throughput = database.map(|database| database.throughput.shown(now_us()));
            (texts(throughput.into_iter().flatten()), 5)
        }
        "passes" => (
            texts(workers::passes_here().unwrap_or_default().into_iter().map(Some)),
            14,
        ),
        "statistics" => (texts(statistics::of(destination).unwrap_or_default()), 12),
        "history" => {
            let history = statistics::history_of(destination).unwrap_or_default();
            (texts(history.into_iter().map(Some)), 5)
        }
        "latency" => {
            let latency = statistics::latency_of(destination).unwrap_or_default();
            let (sum_ms, buckets) = latency
                .split_first()
                .map_or((0.0, &[][..]), |(sum_ms, rest)| (*sum_ms, rest));
            let rows = buckets
                .chunks(2)
                .flat_map(|bucket| bucket.iter().copied().chain([sum_ms]));
            (texts(rows.map(Some)), 3)
        }
        _ => (Vec::new(), 1),
    };
    let rows: Vec<TextRow> = values.chunks(width).map(|row| TextRow(row.to_vec())).collect();
    SetOfIterator::new(rows)
}

/// What is missing of outbox.standby_names, if messages wait for it, separated by commas; empty = the list or its quorum
/// is incomplete. None: enough are connected, or need not be. Then the names of all connected standbys.
fn standbys_shown() -> [Option<String>; 2] {
    let Some(standbys) = config::standbys() else {
        return [None, None];
    };
    let connected = standbys::connected().unwrap_or_else(|error| error::internal(error).raise());
    let mut names: Vec<&str> = connected.iter().map(|standby| &*standby.name).collect();
    names.sort_unstable();
    names.dedup();
    let missing = standbys.missing(&connected);
    let shown = standbys.are_incomplete() || !missing.is_empty();
    [shown.then(|| missing.join(", ")), Some(names.join(", "))]
}

fn nothing_waits() -> bool {
    // All destinations are counted together, so if one was counted, all were.
    databases::my_database().is_some_and(|database| database.pending.uncertain() <= 0)
        && statistics::has_none(DEFAULT_DESTINATION)
}

/// For each lane in which a message waits: destination, partition, seq of the first message, and when it was enqueued,
/// in µs since 1970.
fn first_messages(call: trigger::Call) -> Vec<Option<String>> {
    let Some(outbox) = OutboxLanes::open(statements(call).outbox_table) else {
        return Vec::new();
    };
    transactions::reap();
    let floors = databases::my_database().map(|database| (&database.floors, database.moves.read()));
    let first_rows = floors::read(&outbox, floors);
    outbox.close();
    let texts = first_rows.into_iter().flat_map(|first| {
        let (partition, seq) = (first.partition.to_string(), first.seq.to_string());
        let enqueued_at_us = since_1970(first.enqueued_at).to_string();
        [first.destination, partition, seq, enqueued_at_us]
    });
    texts.map(Some).collect()
}

/// The seq of the first dead letter, or of the first dead letter that blocks other messages.
fn first_dead(blocks: bool, call: trigger::Call) -> Option<i64> {
    let table = statements(call).dead_table;
    let first = |floor| lane_scan::first_dead(table, blocks, floor);
    match databases::my_database() {
        Some(database) => database.floors.read_dead(blocks, first),
        None => first(0),
    }
}

fn texts<T: ToString>(values: impl IntoIterator<Item = Option<T>>) -> Vec<Option<String>> {
    values
        .into_iter()
        .map(|value| value.map(|value| value.to_string()))
        .collect()
}

#[pg_extern(sql = false)]
fn outbox_record_dead(more: i64, more_block: i64, seq: i64) {
    effects::dead_changed([more, more_block], seq);
}

#[pg_extern(sql = false)]
fn outbox_request_recheck(destination: SqlText) -> bool {
    let heard = statistics::request_recheck(&destination);
    if heard {
        databases::wake_workers();
    }
    heard
}

/// Requests delivery up to a seq; 0 = a pass. Returns the id of the request: NULL if another session has one, 0 if no
/// worker can answer.
#[pg_extern(sql = false)]
fn outbox_begin_request(read_limit: i64, goes_on: bool) -> Option<i64> {
    let Some(database) = databases::my_database() else {
        return Some(0);
    };
    sessions::requests(catalog::my_database());
    let request_id = database.request.begin(match (read_limit, goes_on) {
        (0, _) => Request::Pass,
        (seq, false) => Request::UpTo(seq),
        (seq, true) => Request::OnTo(seq),
    })?;
    databases::wake_workers();
    Some(i64::from(request_id))
}

/// For each worker of this database its number and its answer.
#[pg_extern(sql = false)]
fn outbox_answers(request_id: i64, timeout_ms: i32) -> SetOfIterator<'static, TextRow> {
    let read = || {
        let (mut rows, mut done) = (Vec::new(), true);
        for (number, answer) in workers::answers_here() {
            let answer = answer.read(request_id as u32);
            done &= answer[0] == 2;
            let values = std::iter::once(i64::from(number)).chain(answer);
            rows.push(TextRow(texts(values.map(Some))));
        }
        (rows, done)
    };
    let (mut rows, done) = read();
    if !done || rows.is_empty() {
        latch::wait(i64::from(timeout_ms.max(1)));
        signals::check_for_interrupts();
        rows = read().0;
    }
    SetOfIterator::new(rows)
}

#[pg_extern(sql = false)]
fn outbox_end_request() {
    lifecycle::end_request();
}

#[pg_extern(sql = false)]
fn outbox_server_workers() -> Option<Vec<SqlText>> {
    let numbers = workers::workers_here()?;
    Some(
        numbers
            .into_iter()
            .map(|number| workers::id_of(number).into())
            .collect(),
    )
}

#[pg_extern(sql = false)]
fn outbox_leases_last(worker: SqlText) -> bool {
    workers::leases_last(&worker)
}

#[pg_extern(sql = false)]
fn outbox_claims_last(token: i64) -> bool {
    workers::claims_last(token)
}

/// Returns the reason if a message with these texts can never be sent.
#[pg_extern(sql = false)]
fn outbox_unreadable(fcinfo: pg_sys::FunctionCallInfo) -> Option<SqlText> {
    // SAFETY: the call's own fcinfo; the types are as sql/src/30_worker.sql declares them.
    let args = unsafe { Args::new(fcinfo) };
    let key = args.text_or_why_not(0).map(drop).map_err(|why| why.to_string());
    let event = args.record(1, event::FIRST)?;
    let event = event::of_record(&event).map_err(|why| why.to_string());
    sendable(key, event).err().map(SqlText::from)
}

#[pg_extern(sql = false)]
fn outbox_json_text(fcinfo: pg_sys::FunctionCallInfo) -> Option<JsonText> {
    // SAFETY: the call's own fcinfo; the types are as sql/src/30_worker.sql declares them.
    unsafe { Args::new(fcinfo) }.jsonb(0).map(Jsonb::into_text)
}

#[pg_extern(sql = false)]
fn outbox_utc_text(time: TimestampWithTimeZone) -> Option<SqlText> {
    table::in_utc(time.into()).map(SqlText::from)
}

#[pg_extern(sql = false)]
fn outbox_unix_seconds(time: TimestampWithTimeZone) -> i64 {
    unix_seconds(time.into())
}

#[pg_extern(sql = false)]
fn outbox_legible(text: Legible) -> SqlText {
    text.0.into()
}

#[pg_extern(sql = false)]
fn outbox_of_utf8(text: Utf8) -> SqlText {
    text.0.into()
}
