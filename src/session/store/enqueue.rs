//! Enqueues events that are stored: in a user's backend, in its transaction, with the rights of the owner of the tables.

use super::insert;
use super::new_event::Times;
use super::partition::Partitioning;
use super::source;
use super::statements::{Statements, statements};
use crate::error::{UserError, internal};
use crate::pg::clock::us_since_1970;
use crate::pg::lookup::{Key, Lookup};
use crate::pg::spi::{Param, Spi, SpiClient, SpiResult};
use crate::pg::trigger::Call;
use crate::pg::{guc, security};
use crate::session::effects;
use crate::session::fast_path::{self, Inserted, Stored};
use crate::shared::transactions;
use crate::store::rows::{self, MESSAGE};
use crate::store::{AGGREGATE_KEY, aggregate_key};
use outbox_core::engine::RowId;
use outbox_core::envelope;
use outbox_core::partition::{Partition, crc32};
use pgrx::datum::datetime_support::clock_timestamp;
use pgrx::{PgBuiltInOids, PgOid, PgSqlErrorCode};
use std::collections::HashMap;

const STORE_FIRST: &str = "Store the event first, in this transaction or an earlier one. Events in another table are found once outbox_source_set() has named it.";

pub struct Enqueue<'a> {
    pub seqs: &'a [i64],
    pub keys: Keys,
    pub destination: &'a str,
    pub times: Times,
    pub partition: Option<Partition>,
}

pub enum Keys {
    /// One for each seq.
    Given(Vec<Option<String>>),
    /// The aggregates of the events.
    LookedUp,
}

/// Where messages were placed: seq and partition.
pub(super) type Placed = Vec<(i64, Partition)>;

/// A message to be inserted.
pub(super) struct NewMessage {
    pub seq: i64,
    pub key: Option<String>,
    pub partition: Partition,
    /// Its event, if it may take the fast path.
    pub stored: Option<Stored>,
}

/// An event that was looked up.
struct Found {
    aggregate_key: Option<String>,
    stored: Option<Stored>,
}

/// Inserts the messages; returns how many were new.
pub fn enqueue(fcinfo: Call, request: Enqueue) -> Result<i64, UserError> {
    let (statements, destination) = (statements(fcinfo), request.destination);
    let count = security::run_as(statements.owner, || {
        statements.lock();
        enqueue_as_owner(statements, request)
    })?;
    if count > 0 {
        effects::enqueued(destination, count);
    }
    Ok(count)
}

/// Runs as the owner of the tables with the caller's search_path, so every operator and function in a statement is
/// qualified.
fn enqueue_as_owner(statements: &Statements, request: Enqueue) -> Result<i64, UserError> {
    let Enqueue {
        seqs,
        keys,
        destination,
        times,
        partition,
    } = request;
    let partitioning = Partitioning::read(statements)?;
    partition.map_or(Ok(()), |partition| partitioning.check(partition))?;
    let (keys, mut found) = match source::of(statements)? {
        None => {
            let by_fast_path = times.are_unset() && effects::may_use_fast_path(seqs.len());
            let found = read_events(statements, seqs, by_fast_path)?;
            let mut missing = seqs.iter().filter(|seq| !found.contains_key(seq)).peekable();
            let keys = match keys {
                Keys::Given(keys) => {
                    check_drawn(statements, missing.max().copied())?;
                    keys
                }
                Keys::LookedUp if missing.peek().is_some() => {
                    return Err(not_stored("outbox_events", missing, STORE_FIRST));
                }
                Keys::LookedUp => seqs.iter().map(|seq| found[seq].aggregate_key.clone()).collect(),
            };
            (keys, found)
        }
        Some(source) => {
            let keys = match keys {
                Keys::Given(keys) => keys,
                Keys::LookedUp => {
                    let found = source.keys(seqs)?;
                    let mut missing = seqs.iter().filter(|seq| !found.contains_key(seq)).peekable();
                    if missing.peek().is_some() {
                        let hint = "Store the event first, in this transaction or an earlier one; or pass a key, and it is not looked up. outbox_source_set() names the table of the events.";
                        return Err(not_stored(&source.relation, missing, hint));
                    }
                    seqs.iter().map(|seq| found[seq].clone()).collect()
                }
            };
            (keys, HashMap::new())
        }
    };
    for key in keys.iter().flatten() {
        envelope::check_short(AGGREGATE_KEY, key)?; // a given one is short
    }
    let new = not_waiting(statements, destination, partitioning.count, seqs, keys);
    if new.is_empty() {
        return Ok(0);
    }
    let announced = transactions::announce(new.iter().map(|(_, key)| key.as_deref().map(crc32)));
    let messages = new.into_iter().map(|(seq, key)| {
        let partition = partition.map_or_else(|| partitioning.partition_of(key.as_deref(), seq), Ok)?;
        let stored = found.remove(&seq).and_then(|found| found.stored);
        Ok(NewMessage {
            seq,
            key,
            partition,
            stored,
        })
    });
    let messages = messages.collect::<Result<Vec<NewMessage>, UserError>>()?;
    let placed = insert_messages(statements, messages, destination, times)?;
    let count = placed.len() as i64;
    announced.placed(placed);
    Ok(count)
}

/// Inserts messages by a statement; returns where the new ones are.
pub(super) fn insert_messages(
    statements: &Statements,
    messages: Vec<NewMessage>,
    destination: &str,
    times: Times,
) -> Result<Placed, UserError> {
    // A time in the past has no effect.
    let due_at = times.available_at.filter(|at| *at > clock_timestamp());
    let inserted = Spi::connect_mut(|client| {
        let is_one = messages.len() == 1;
        let prepared = &statements.insert_messages[usize::from(due_at.is_some())][usize::from(is_one)];
        let insert = prepared.get_or(|| {
            let time = [PgOid::from(PgBuiltInOids::TIMESTAMPTZOID)];
            let scheduled = [
                ("due_at", "$6"),
                ("state", "'s'::pg_catalog.\"char\""),
                ("enqueued_at", "pg_catalog.now()"),
            ];
            let (table, more, types, location) = match due_at {
                None => ("outbox", &[][..], &[][..], fast_path::MESSAGE),
                Some(_) => ("outbox_waiting", &scheduled[..], &time[..], ""),
            };
            let table = format!("{}.{table}", statements.schema);
            let end = format!("on conflict do nothing returning partition, seq{location}");
            insert::prepare(client, &MESSAGE, &table, is_one, more, types, &end)
        })?;
        let expires_at = times.expires_at.map(i64::from);
        let rows = messages.iter().map(|message| {
            let key = message.key.as_deref();
            rows::message(message.seq, message.partition.as_i16(), destination, key, expires_at)
        });
        let rows: Vec<_> = rows.collect();
        let mut args = insert::parameters(&MESSAGE, &rows);
        args.extend(due_at.map(Param::from));
        let inserted = guc::planned_once(|| client.update(insert, None, &args)).map_err(internal)?;
        let inserted = inserted.map(|row| Inserted::read(&row, due_at.is_none()));
        inserted.collect::<SpiResult<Vec<_>>>().map_err(internal)
    })?;
    let mut messages: HashMap<i64, NewMessage> = messages.into_iter().map(|message| (message.seq, message)).collect();
    let mut placed = Vec::with_capacity(inserted.len());
    for one in inserted.into_iter().flatten() {
        let (seq, partition) = (one.seq, one.partition);
        placed.push((seq, partition));
        if due_at.is_some() {
            continue;
        }
        let handoff =
            (messages.remove(&seq)).and_then(|NewMessage { stored, key, .. }| one.handoff(stored?, destination, key));
        effects::ready(destination, partition, seq, handoff);
    }
    if due_at.is_some() {
        effects::scheduled();
    }
    if let Some(time) = times.expires_at {
        effects::expires_at(us_since_1970(time));
    }
    Ok(placed)
}

/// The seqs that do not wait for the destination, with their keys. A seq waits at most once for each destination,
/// whatever partition its key gave it then.
fn not_waiting(
    statements: &Statements,
    destination: &str,
    partition_count: i16,
    seqs: &[i64],
    keys: Vec<Option<String>>,
) -> Vec<(i64, Option<String>)> {
    let all = seqs.iter().copied().zip(keys);
    let ready = Lookup::open(statements.outbox_table, [c"destination", c"partition", c"seq"]);
    let waiting = Lookup::open(statements.waiting_table, [c"seq", c"destination"]);
    let (Some(ready), Some(waiting)) = (ready, waiting) else {
        return all.collect(); // the statement that inserts fails
    };
    let destination = Key::text(destination);
    let is_new = |(seq, _): &(i64, Option<String>)| {
        let seq = Key::int8(*seq);
        let waits = || waiting.find([seq, destination]).is_some();
        let in_partition = |partition| ready.find([destination, Key::int2(partition), seq]).is_some();
        // Looked for twice: a worker may move it from one table to the other in between.
        !waits() && !(0..partition_count).any(in_partition) && !waits()
    };
    let new = all.filter(is_new).collect();
    waiting.close();
    ready.close();
    new
}

/// The events with these seqs in outbox_events. They are locked against outbox_internal.trim_events, which does not see
/// the messages of this transaction. `by_fast_path`: their messages may take the fast path.
fn read_events(statements: &Statements, seqs: &[i64], by_fast_path: bool) -> Result<HashMap<i64, Found>, UserError> {
    Spi::connect_mut(|client| {
        let select = statements.read_events[usize::from(by_fast_path)].get_or(|| {
            let sql = format!(
                "select e.seq, e.aggregate_type, e.aggregate_id{} from {}.outbox_events e
                 where e.ctid operator(pg_catalog.=) any ($1::pg_catalog.tid[]) for key share",
                fast_path::event_columns(by_fast_path),
                statements.schema
            );
            let types = [PgOid::from(PgBuiltInOids::TEXTARRAYOID)];
            Ok(client.prepare_mut(&sql, &types)?.keep())
        })?;
        let rows = guc::planned_once(|| client.update(select, None, &[places(statements, seqs)])).map_err(internal)?;
        let found = rows.map(|row| {
            let (kind, id): (Option<String>, Option<String>) = (row.get(2)?, row.get(3)?);
            let found = Found {
                aggregate_key: aggregate_key(kind.as_deref(), id.as_deref()),
                stored: match by_fast_path {
                    true => fast_path::stored(&row, statements.event_table, 4)?,
                    false => None,
                },
            };
            Ok((row.get(1)?.unwrap_or_default(), found))
        });
        found.collect::<SpiResult<_>>().map_err(internal)
    })
}

/// Where the events with these seqs are. A statement finds them by these places and not by their seqs: that would make
/// SERIALIZABLE transactions fail, see [`crate::pg::lookup`].
fn places(statements: &Statements, seqs: &[i64]) -> Param<'static> {
    let mut places = Vec::with_capacity(seqs.len());
    if let Some(events) = Lookup::open(statements.event_table, [c"seq"]) {
        places.extend(seqs.iter().filter_map(|seq| events.find([Key::int8(*seq)])));
        events.close();
    }
    places.iter().map(RowId::to_string).collect::<Vec<String>>().into()
}

/// Refuses seqs that no event has had yet. A message with such a seq would keep the message of a later event out.
/// `highest`: the highest of the seqs without an event.
fn check_drawn(statements: &Statements, highest: Option<i64>) -> Result<(), UserError> {
    let Some(highest) = highest else { return Ok(()) };
    let sql = "select coalesce(pg_catalog.pg_sequence_last_value(s::pg_catalog.regclass), 0)
               from pg_catalog.pg_get_serial_sequence($1, 'seq') s where s is not null";
    let table = format!("{}.outbox_events", statements.schema);
    let drawn: SpiResult<Option<i64>> = Spi::connect(|client: &SpiClient| {
        let rows = client.select(sql, Some(1), &[table.into()])?;
        // None: the column has no sequence any more.
        (!rows.is_empty())
            .then(|| rows.first().get_one())
            .transpose()
            .map(Option::flatten)
    });
    match drawn.map_err(internal)?.is_some_and(|drawn| highest > drawn) {
        false => Ok(()),
        true => Err(no_event(
            highest,
            "outbox_events has not given this seq to an event yet.".into(),
            STORE_FIRST,
        )),
    }
}

/// The error for seqs that have no event in the store.
fn not_stored<'a>(store: &str, missing: impl Iterator<Item = &'a i64>, hint: &'static str) -> UserError {
    let missing: Vec<i64> = missing.take(5).copied().collect();
    let listed: Vec<String> = missing.iter().map(i64::to_string).collect();
    let detail = format!("{store} has no row for {}.", listed.join(", "));
    no_event(missing.first().copied().unwrap_or_default(), detail, hint)
}

fn no_event(seq: i64, detail: String, hint: &'static str) -> UserError {
    UserError {
        detail: Some(detail),
        ..UserError::new(
            PgSqlErrorCode::ERRCODE_NO_DATA_FOUND,
            format!("there is no event with seq {seq}"),
            hint,
        )
    }
}
