//! Enqueues events that are stored: in a user's backend, in its transaction, with the rights of the owner of the
//! tables.

use super::current_source;
use super::insert;
use super::new_event::Times;
use super::partition::Partitioning;
use super::statements::{Statements, statements};
use super::subscriptions;
use crate::error::{UserError, internal};
use crate::event;
use crate::pg::clock::{since_1970, us_since_1970};
use crate::pg::lookup::Lookup;
use crate::pg::scan::Is;
use crate::pg::spi::types::{TEXTARRAYOID, TIMESTAMPTZOID};
use crate::pg::spi::{Lossy, Param, Spi, SpiClient, SpiResult};
use crate::pg::table::{self, ColumnValue, Table};
use crate::pg::trigger::Call;
use crate::pg::{guc, security, text};
use crate::session::effects;
use crate::session::fast_path::{self, Inserted, Stored, With};
use crate::session::store::subscription_conditions::Subscribed;
use crate::shared::{databases, statistics, transactions};
use crate::store::rows::{self, MESSAGE};
use crate::store::source::{EventKey, Source};
use crate::store::{AGGREGATE_KEY, aggregate_key};
use outbox_core::engine::RowId;
use outbox_core::envelope;
use outbox_core::event::Event;
use outbox_core::partition::{Partition, crc32};
use outbox_core::session_settings;
use pgrx::PgSqlErrorCode;
use pgrx::datum::TimestampWithTimeZone;
use pgrx::datum::datetime_support::clock_timestamp;
use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::rc::Rc;

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
pub(super) struct NewMessage<'a> {
    pub seq: i64,
    pub key: Option<String>,
    pub partition: Partition,
    /// If it may take the fast path: what goes with it.
    pub by_fast_path: Option<With<'a>>,
}

/// An event that was looked up.
struct FoundEvent {
    event: EventKey,
    stored: Option<Stored>,
}

/// Messages of one destination, with their keys.
type KeyedSeqs = Vec<(i64, Option<String>)>;

/// Inserts the messages; returns how many events were newly enqueued.
pub fn enqueue(fcinfo: Call, request: Enqueue) -> Result<i64, UserError> {
    let statements = statements(fcinfo);
    security::run_as(statements.owner, || {
        statements.lock(true);
        guc::with(session_settings::NAMES, || enqueue_as_owner(statements, request)) // once for all statements
    })
}

/// Runs as the owner of the tables.
fn enqueue_as_owner(statements: &Statements, request: Enqueue) -> Result<i64, UserError> {
    let partitioning = Partitioning::read(statements)?;
    (request.partition).map_or(Ok(()), |partition| partitioning.check(partition))?;
    let events = EventsRead::read(statements, &request)?;
    let Enqueue {
        seqs,
        keys,
        destination,
        times,
        partition,
    } = request;
    events.check_stored(statements, seqs)?;
    let keys = events.keys(seqs, keys)?;
    let receivers = events.receivers(statements, destination, seqs.iter().copied().zip(keys))?;
    for (destination, messages) in &receivers {
        check_max_pending(destination, messages.len())?;
    }
    // Read before anything is inserted here.
    let highest = databases::my_database().and_then(|database| database.highest.get());
    let count = receivers.values().map(Vec::len).sum();
    let without_event = events.source.is_some() && times.are_unset() && effects::may_use_fast_path(count);
    let mut enqueued = HashSet::new();
    for (destination, messages) in receivers {
        let new = not_waiting(statements, destination, partitioning.count, highest, messages);
        if new.is_empty() {
            continue;
        }
        let announced = transactions::announce(new.iter().map(|(_, key)| key.as_deref().map(crc32)));
        let messages = new.into_iter().map(|(seq, key)| {
            let partition = partition.map_or_else(|| partitioning.partition_of(key.as_deref(), seq), Ok)?;
            let by_fast_path = match without_event {
                true => Some(With::Nothing),
                false => (events.found.get(&seq)).and_then(|found| found.stored.as_ref().map(With::Event)),
            };
            Ok(NewMessage {
                seq,
                key,
                partition,
                by_fast_path,
            })
        });
        let messages = messages.collect::<Result<Vec<NewMessage>, UserError>>()?;
        let placed = insert_messages(statements, messages, destination, times)?;
        enqueued.extend(placed.iter().map(|(seq, _)| *seq));
        announced.placed(placed);
    }
    Ok(enqueued.len() as i64)
}

/// What a call has read of its events.
struct EventsRead {
    source: Option<Rc<Source>>,
    subscribed: Option<Rc<Subscribed>>,
    /// Whether keys or destinations are those of the events, so that each must be stored.
    are_looked_up: bool,
    found: HashMap<i64, FoundEvent>,
    /// The events of a source, if the subscriptions read each.
    whole: HashMap<i64, Event>,
}

impl EventsRead {
    /// Rows of events may be locked, and a source may be: the subscriptions are those after that.
    fn read(statements: &Statements, request: &Enqueue) -> Result<Self, UserError> {
        let (seqs, times) = (request.seqs, request.times);
        let source = current_source::of(statements)?;
        loop {
            let subscribed = subscriptions::of_destination(statements, request.destination)?;
            let are_looked_up = subscribed.is_some() || matches!(request.keys, Keys::LookedUp);
            let mut whole = HashMap::new();
            let found = match &source {
                None => {
                    let by_fast_path = times.are_unset() && effects::may_use_fast_path(seqs.len());
                    read_events(statements, seqs, by_fast_path)?
                }
                // Each row is read once.
                Some(source)
                    if source.has_aggregate_keys() && subscribed.as_ref().is_some_and(|all| all.reads_each_event()) =>
                {
                    whole = source.whole_events(seqs)?;
                    let keys = whole.iter().map(|(seq, event)| (*seq, EventKey::from(event)));
                    keys.map(|(seq, event)| (seq, FoundEvent { event, stored: None }))
                        .collect()
                }
                Some(source) if are_looked_up => {
                    let keys = source.keys(seqs, subscribed.is_some())?.into_iter();
                    keys.map(|(seq, event)| (seq, FoundEvent { event, stored: None }))
                        .collect()
                }
                Some(_) => HashMap::new(),
            };
            let latest = subscriptions::of_destination(statements, request.destination)?;
            if latest.as_ref().map(Rc::as_ptr) == subscribed.as_ref().map(Rc::as_ptr) {
                return Ok(Self {
                    source,
                    subscribed,
                    are_looked_up,
                    found,
                    whole,
                });
            }
        }
    }

    fn check_stored(&self, statements: &Statements, seqs: &[i64]) -> Result<(), UserError> {
        let mut missing = seqs.iter().filter(|seq| !self.found.contains_key(seq)).peekable();
        match &self.source {
            _ if missing.peek().is_none() => Ok(()),
            None if self.are_looked_up => Err(not_stored("outbox_events", missing, STORE_FIRST)),
            None => check_drawn(statements, missing.max().copied()),
            Some(source) if self.subscribed.is_some() => Err(not_stored(&source.relation, missing, STORE_FIRST)),
            Some(source) if self.are_looked_up => {
                let hint = "Store the event first, in this transaction or an earlier one; or pass a key, and it is not looked up. outbox_source_set() names the table of the events.";
                Err(not_stored(&source.relation, missing, hint))
            }
            Some(_) => Ok(()),
        }
    }

    /// One for each seq.
    fn keys(&self, seqs: &[i64], keys: Keys) -> Result<Vec<Option<String>>, UserError> {
        let keys = match keys {
            Keys::Given(keys) => keys,
            Keys::LookedUp => seqs.iter().map(|seq| self.found[seq].event.key.clone()).collect(),
        };
        for key in keys.iter().flatten() {
            // A given one is short.
            match &self.source {
                None => envelope::check_short(AGGREGATE_KEY, key)?,
                Some(_) => envelope::check_short_start(AGGREGATE_KEY, key)?,
            }
        }
        Ok(keys)
    }

    /// The messages of each destination: of this one, or of those that have subscribed to the events.
    fn receivers<'a>(
        &'a self,
        statements: &Statements,
        destination: &'a str,
        all: impl Iterator<Item = (i64, Option<String>)>,
    ) -> Result<BTreeMap<&'a str, KeyedSeqs>, UserError> {
        let Some(subscribed) = &self.subscribed else {
            return Ok(BTreeMap::from([(destination, all.collect())]));
        };
        let mut receivers: BTreeMap<&str, KeyedSeqs> = BTreeMap::new();
        for (seq, key) in all {
            let types = self.found[&seq].event.types();
            for receiver in subscribed.destinations(types, || self.whole_event(statements, seq))? {
                receivers.entry(receiver).or_default().push((seq, key.clone()));
            }
        }
        Ok(receivers)
    }

    /// For the conditions of subscriptions.
    fn whole_event(&self, statements: &Statements, seq: i64) -> Result<Cow<'_, Event>, UserError> {
        match (&self.source, self.whole.get(&seq)) {
            (Some(_), Some(event)) => Ok(Cow::Borrowed(event)),
            (Some(source), None) => {
                let read = source.whole_events(&[seq])?.remove(&seq);
                let missing = || not_stored(&source.relation, [&seq].into_iter(), STORE_FIRST);
                read.map(Cow::Owned).ok_or_else(missing)
            }
            (None, _) => read_whole_event(statements, seq).map(Cow::Owned),
        }
    }
}

/// Refuses messages that would exceed `max_pending` of a destination, before anything is written. Concurrent
/// transactions do not count each other's messages. Messages that an operator brings back (retry, replay) were counted
/// before.
pub(super) fn check_max_pending(destination: &str, more: usize) -> Result<(), UserError> {
    let number = statistics::number_of(destination);
    let Some((pending, max_pending)) = statistics::fill_of(number) else {
        return Ok(());
    };
    let (own, more) = (effects::own_pending(number), more as i64);
    if pending + own + more <= max_pending || more == 0 {
        return Ok(());
    }
    let hint = match own + more > max_pending {
        true => "This transaction alone is larger than the limit: commit in smaller pieces, or raise max_pending.",
        false => {
            "Try again when some of them are delivered; see outbox_destination_status and outbox_health. Or raise max_pending."
        }
    };
    Err(UserError {
        detail: Some(format!(
            "{pending} messages are pending. This transaction has enqueued {own} and would add {more}. max_pending is {max_pending}."
        )),
        ..UserError::new(
            PgSqlErrorCode::ERRCODE_CONFIGURATION_LIMIT_EXCEEDED,
            format!("destination \"{destination}\" is full"),
            hint,
        )
    })
}

/// Inserts messages; returns where the new ones are.
pub(super) fn insert_messages(
    statements: &Statements,
    messages: Vec<NewMessage>,
    destination: &str,
    times: Times,
) -> Result<Placed, UserError> {
    // A time in the past has no effect.
    let due_at = times.available_at.filter(|at| *at > clock_timestamp());
    raise_highest(messages.iter().map(|message| message.seq));
    let rows = messages.iter().map(|message| {
        let (key, expires_at) = (message.key.as_deref(), times.expires_at.map(i64::from));
        rows::message(message.seq, message.partition.as_i16(), destination, key, expires_at)
    });
    let rows: Vec<_> = rows.collect();
    let written = match &rows[..] {
        [row] if due_at.is_none() => write_message(statements, &messages[0], row),
        _ => None,
    };
    let inserted = match written {
        Some(written) => vec![Some(written)],
        None => insert_rows(statements, &rows, due_at)?,
    };
    let mut messages: HashMap<i64, NewMessage> = messages.into_iter().map(|message| (message.seq, message)).collect();
    let mut placed = Vec::with_capacity(inserted.len());
    for one in inserted.into_iter().flatten() {
        let (seq, partition) = (one.seq, one.partition);
        placed.push((seq, partition));
        if due_at.is_some() {
            continue;
        }
        let handoff =
            (messages.remove(&seq)).and_then(|message| one.handoff(message.by_fast_path?, destination, message.key));
        effects::ready(destination, partition, seq, handoff);
    }
    if !placed.is_empty() {
        effects::enqueued(destination, placed.len() as i64);
    }
    if due_at.is_some() {
        effects::scheduled();
    }
    if let Some(time) = times.expires_at {
        effects::expires_at(us_since_1970(time));
    }
    Ok(placed)
}

/// Called before messages with these seqs are inserted.
pub fn raise_highest(seqs: impl Iterator<Item = i64>) {
    if let (Some(database), Some(highest)) = (databases::my_database(), seqs.max()) {
        database.highest.raise(highest);
    }
}

/// Inserts a message without a statement. None: the table is not as usual, or the message may be there.
fn write_message(statements: &Statements, message: &NewMessage, row: &[ColumnValue]) -> Option<Inserted> {
    if !text::is_utf8() {
        return None;
    }
    let table = Table::open(statements.outbox_table);
    let is_usual = table.is(&MESSAGE) && table.may_insert();
    let place = is_usual.then(|| table.insert_new(row)).flatten();
    table.close();
    Some(Inserted {
        seq: message.seq,
        partition: message.partition,
        at: Some((statements.outbox_table, place?, since_1970(table::now()))),
    })
}

/// Inserts messages by a statement, unless they are there.
fn insert_rows(
    statements: &Statements,
    rows: &[[ColumnValue; 5]],
    due_at: Option<TimestampWithTimeZone>,
) -> Result<Vec<Option<Inserted>>, UserError> {
    Spi::connect_mut(|client| {
        let is_one = rows.len() == 1;
        let prepared = &statements.insert_messages[usize::from(due_at.is_some())][usize::from(is_one)];
        let insert = prepared.get_or(|| {
            let scheduled = [
                ("due_at", "$6"),
                ("state", "'s'::pg_catalog.\"char\""),
                ("enqueued_at", "pg_catalog.now()"),
            ];
            let (table, more, types, location) = match due_at {
                None => ("outbox", &[][..], &[][..], fast_path::MESSAGE),
                Some(_) => ("outbox_waiting", &scheduled[..], &[TIMESTAMPTZOID][..], ""),
            };
            let table = format!("{}.{table}", statements.schema);
            let end = format!("on conflict do nothing returning partition, seq{location}");
            insert::prepare(client, &MESSAGE, &table, is_one, more, types, &end)
        })?;
        let mut args = insert::parameters(&MESSAGE, rows);
        args.extend(due_at.map(Param::from));
        let inserted = guc::planned_once(|| client.update(insert, None, &args)).map_err(internal)?;
        let inserted = inserted.map(|row| Inserted::read(&row, due_at.is_none()));
        inserted.collect::<SpiResult<Vec<_>>>().map_err(internal)
    })
}

/// The messages that do not wait for the destination. A seq waits at most once for each destination, whatever partition
/// its key gave it then. No message with a seq above `highest` waits.
fn not_waiting(
    statements: &Statements,
    destination: &str,
    partition_count: i16,
    highest: Option<i64>,
    messages: KeyedSeqs,
) -> KeyedSeqs {
    let is_above = |(seq, _): &(i64, Option<String>)| highest.is_some_and(|highest| *seq > highest);
    if messages.iter().all(is_above) {
        return messages;
    }
    let ready = Lookup::open(statements.outbox_table, [c"destination", c"partition", c"seq"]);
    let waiting = Lookup::open(statements.waiting_table, [c"seq", c"destination"]);
    let (Some(mut ready), Some(mut waiting)) = (ready, waiting) else {
        return messages; // the statement that inserts fails
    };
    let raw = text::to_server(destination);
    let destination = Is::Text(&raw);
    let is_new = |message: &(i64, Option<String>)| {
        if is_above(message) {
            return true;
        }
        let seq = Is::Int8(message.0);
        let mut waits = || waiting.find([seq, destination]).is_some();
        let in_partition = |partition| ready.find([destination, Is::Int2(partition), seq]).is_some();
        // Looked for twice: a worker may move it from one table to the other in between.
        !waits() && !(0..partition_count).any(in_partition) && !waits()
    };
    let new = messages.into_iter().filter(is_new).collect();
    waiting.close();
    ready.close();
    new
}

/// The events with these seqs in outbox_events. They are locked against outbox_internal.trim_events, which does not see
/// the messages of this transaction. `by_fast_path`: their messages may take the fast path.
fn read_events(
    statements: &Statements,
    seqs: &[i64],
    by_fast_path: bool,
) -> Result<HashMap<i64, FoundEvent>, UserError> {
    Spi::connect_mut(|client| {
        let select = statements.read_events[usize::from(by_fast_path)].get_or(|| {
            let sql = format!(
                "select e.seq, e.type, e.aggregate_type, e.aggregate_id{} from {}.outbox_events e
                 where e.ctid operator(pg_catalog.=) any ($1::pg_catalog.tid[]) for key share",
                fast_path::event_columns(by_fast_path),
                statements.schema
            );
            client.prepare_mut(&sql, &[TEXTARRAYOID])
        })?;
        let rows = guc::planned_once(|| client.update(select, None, &[places(statements, seqs)])).map_err(internal)?;
        let found = rows.map(|row| {
            let (aggregate_type, id): (Option<String>, Option<String>) = (row.get(3)?, row.get(4)?);
            let found = FoundEvent {
                event: EventKey {
                    key: aggregate_key(aggregate_type.as_deref(), id.as_deref()),
                    // The worker reports a type that cannot be read.
                    kind: row.get::<Lossy>(2)?.map_or_else(String::new, |kind| kind.0),
                    aggregate_type,
                },
                stored: match by_fast_path {
                    true => fast_path::stored(&row, statements.event_table, 5)?,
                    false => None,
                },
            };
            Ok((row.get(1)?.unwrap_or_default(), found))
        });
        found.collect::<SpiResult<_>>().map_err(internal)
    })
}

/// The event with this seq, for the conditions of subscriptions.
fn read_whole_event(statements: &Statements, seq: i64) -> Result<Event, UserError> {
    Spi::connect_mut(|client| {
        let select = statements.read_whole_events.get_or(|| {
            let sql = format!(
                "select {} from {}.outbox_events e where e.ctid operator(pg_catalog.=) any ($1::pg_catalog.tid[])",
                event::columns_sql("true"),
                statements.schema
            );
            client.prepare_mut(&sql, &[TEXTARRAYOID])
        })?;
        let rows =
            guc::planned_once(|| client.update(select, None, &[places(statements, &[seq])])).map_err(internal)?;
        let read = rows.map(|row| event::read(&row, 1, seq)).next();
        read.transpose()
            .map_err(internal)?
            .ok_or_else(|| not_stored("outbox_events", [&seq].into_iter(), STORE_FIRST))
    })
}

/// Where the events with these seqs are. A statement finds them by these places and not by their seqs: that would make
/// SERIALIZABLE transactions fail, see [`crate::pg::lookup`].
fn places(statements: &Statements, seqs: &[i64]) -> Param<'static> {
    let mut places = Vec::with_capacity(seqs.len());
    if let Some(mut events) = Lookup::open(statements.event_table, [c"seq"]) {
        places.extend(seqs.iter().filter_map(|seq| events.find([Is::Int8(*seq)])));
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
