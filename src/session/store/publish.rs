//! Stores events and enqueues them: in a user's backend, in its transaction, with the rights of the owner of the
//! tables. outbox_publish() and the triggers of outbox_capture call it. The usual publish runs no statement; `rows` has
//! the columns.

use super::current_source;
use super::enqueue::{NewMessage, Placed, check_max_pending, insert_messages, raise_highest};
use super::insert;
use super::new_event::{IfExists, NewEvent, Times};
use super::partition::Partitioning;
use super::statements::Statements;
use super::subscriptions;
use crate::error::{UserError, changed_since, internal};
use crate::limits::check_body;
use crate::pg::clock::{since_1970, unix_seconds, us_since_1970};
use crate::pg::lookup;
use crate::pg::scan::Is;
use crate::pg::spi::types::TEXTOID;
use crate::pg::spi::{Spi, SpiHeapTupleData, SpiResult};
use crate::pg::table::{self, ColumnValue, Table};
use crate::pg::{guc, security, text};
use crate::session::effects;
use crate::session::fast_path::{self, Inserted, Stored, With};
use crate::session::store::subscription_conditions::Subscribed;
use crate::shared::transactions;
use crate::store::rows::{self, EVENT, MESSAGE};
use outbox_core::engine::RowId;
use outbox_core::event::{COLUMNS, Event};
use outbox_core::partition::{Partition, crc32};
use pgrx::PgSqlErrorCode;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::rc::Rc;

/// An event with the key of its message. Its values are checked: see `checks::check_event`.
pub type KeyedEvent = (NewEvent, Option<String>);

/// Stores events in this order and enqueues them; returns their seqs.
pub fn publish(
    statements: &'static Statements,
    events: &[KeyedEvent],
    destination: &str,
    times: Times,
    if_exists: IfExists,
) -> Result<Vec<i64>, UserError> {
    security::run_as(statements.owner, || {
        statements.lock(times.available_at.is_some());
        for (event, _) in events {
            check_body(event.event.body_bytes() as i64)?;
            match find_id(statements, event) {
                Some(_) if if_exists == IfExists::Error => return Err(id_exists(event.id())),
                Some(found) => return seq_at(statements, found).map(|seq| vec![seq]),
                None => {}
            }
        }
        let subscribed = subscriptions::of_destination(statements, destination)?;
        let receivers = Receivers::of(events, destination, subscribed.as_deref())?;
        receivers.check_max_pending(events.len())?;
        let announced = transactions::announce(events.iter().map(|(_, key)| key.as_deref().map(crc32)));
        let partitioning = Partitioning::read(statements)?;
        let publish = Publish {
            statements,
            events,
            times,
            if_exists,
            by_fast_path: times.are_unset() && receivers.may_use_fast_path(events.len()),
        };
        let Some(stored) = publish.store()? else {
            // Another transaction has published the id meanwhile.
            let found = events.first().and_then(|(event, _)| find_id(statements, event));
            let seq = found.map_or_else(|| Err(not_stored()), |found| seq_at(statements, found))?;
            return Ok(vec![seq]);
        };
        let placed = (stored.iter().zip(events))
            .map(|((seq, _), (_, key))| Ok((*seq, partitioning.partition_of(key.as_deref(), *seq)?)));
        let placed = placed.collect::<Result<Placed, UserError>>()?;
        // It may have waited: for a transaction with the same id, which has rolled back, or in a trigger.
        let latest = subscriptions::of_destination(statements, destination)?;
        if subscribed.as_ref().map(Rc::as_ptr) == latest.as_ref().map(Rc::as_ptr) {
            publish.enqueue(&stored, &placed, &receivers)?;
        } else {
            let receivers = Receivers::of(events, destination, latest.as_deref())?;
            receivers.check_max_pending(events.len())?;
            publish.enqueue(&stored, &placed, &receivers)?;
        }
        let seqs = placed.iter().map(|(seq, _)| *seq).collect();
        announced.placed(placed);
        Ok(seqs)
    })
}

/// The destinations of each event.
enum Receivers<'a> {
    One(&'a str),
    ByEvent(Vec<Vec<&'a str>>),
}

impl<'a> Receivers<'a> {
    fn of(events: &[KeyedEvent], destination: &'a str, subscribed: Option<&'a Subscribed>) -> Result<Self, UserError> {
        let Some(subscribed) = subscribed else {
            return Ok(Self::One(destination));
        };
        let receivers = events.iter().map(|(NewEvent { event, .. }, _)| {
            let types = (event.kind.as_str(), event.aggregate_type.as_deref());
            subscribed.destinations(types, || Ok(Cow::Borrowed(event)))
        });
        receivers.collect::<Result<_, _>>().map(Self::ByEvent)
    }

    /// Those of the event at this position.
    fn at(&self, event: usize) -> &[&'a str] {
        match self {
            Self::One(destination) => std::slice::from_ref(destination),
            Self::ByEvent(receivers) => &receivers[event],
        }
    }

    /// How many of the events each destination gets.
    fn counts(&self, events: usize) -> BTreeMap<&'a str, usize> {
        let mut counts = BTreeMap::new();
        for destination in (0..events).flat_map(|event| self.at(event)) {
            *counts.entry(*destination).or_default() += 1;
        }
        counts
    }

    fn check_max_pending(&self, events: usize) -> Result<(), UserError> {
        (self.counts(events).into_iter()).try_for_each(|(destination, count)| check_max_pending(destination, count))
    }

    fn may_use_fast_path(&self, events: usize) -> bool {
        effects::may_use_fast_path(self.counts(events).values().sum())
    }
}

/// Where the event is that has this id already.
fn find_id(statements: &Statements, event: &NewEvent) -> Option<RowId> {
    let find = || lookup::find(statements.event_table, [c"id"], [Is::Uuid(event.id())]);
    event.has_own_id.then(find).flatten()
}

fn id_exists(id: pgrx::Uuid) -> UserError {
    UserError::new(
        PgSqlErrorCode::ERRCODE_UNIQUE_VIOLATION,
        format!("an event with id {id} already exists"),
        "Leave the id out to get a new one. If this call may be a repetition, pass if_exists => 'skip'.",
    )
}

/// The seq of the event at this place.
fn seq_at(statements: &Statements, place: RowId) -> Result<i64, UserError> {
    let seq: Option<i64> = Spi::connect_mut(|client| {
        let select = statements.read_seq.get_or(|| {
            let sql = format!(
                "select e.seq from {}.outbox_events e where e.ctid operator(pg_catalog.=) $1::pg_catalog.tid",
                statements.schema
            );
            client.prepare_mut(&sql, &[TEXTOID])
        })?;
        let mut rows = client
            .update(select, Some(1), &[place.to_string().into()])
            .map_err(internal)?;
        rows.next()
            .map(|row| row.get(1))
            .transpose()
            .map(Option::flatten)
            .map_err(internal)
    })?;
    seq.ok_or_else(|| changed_since("the event with this id was published after this transaction began"))
}

/// The seq of each event, and the event if it may take the fast path.
type StoredEvents = Vec<(i64, Option<Stored>)>;

struct Publish<'a> {
    statements: &'a Statements,
    events: &'a [KeyedEvent],
    times: Times,
    if_exists: IfExists,
    /// They may take the fast path, if they are small.
    by_fast_path: bool,
}

impl Publish<'_> {
    /// Stores the events. None: the id of the event exists, and it is skipped.
    fn store(&self) -> Result<Option<StoredEvents>, UserError> {
        if self.if_exists == IfExists::Skip || !text::is_utf8() {
            return self.insert_events();
        }
        let table = Table::open(self.statements.event_table);
        let is_usual = table.is(&EVENT) && table.may_insert();
        let stored = is_usual.then(|| {
            self.events
                .iter()
                .map(|(new, _)| self.write_event(&table, new))
                .collect()
        });
        table.close();
        match stored {
            Some(stored) => Ok(Some(stored)),
            None => self.insert_events(),
        }
    }

    /// Writes the row without a statement.
    fn write_event(&self, table: &Table, new: &NewEvent) -> (i64, Option<Stored>) {
        let (seq, bytes) = (table.next_value(), new.event.body_bytes());
        let mut row = [ColumnValue::Null; COLUMNS.len() + 2];
        row[0] = ColumnValue::Int8(seq);
        row[1..=COLUMNS.len()].copy_from_slice(&new.values());
        row[COLUMNS.len() + 1] = ColumnValue::Int4(bytes as i32);
        let tid = table.insert(&row);
        let stored = (self.by_fast_path && fast_path::may_fit(bytes)).then(|| {
            let now = table::now();
            let event = Event {
                seq,
                created_at: table::in_utc(now)?,
                created_at_s: unix_seconds(now),
                ..new.event.clone()
            };
            let at = (self.statements.event_table, tid);
            Some(Stored { event, at })
        });
        (seq, stored.flatten())
    }

    /// Writes the messages of stored events.
    fn enqueue(&self, stored: &StoredEvents, placed: &Placed, receivers: &Receivers) -> Result<(), UserError> {
        if self.times.available_at.is_some() || !text::is_utf8() {
            return self.insert_messages(stored, placed, receivers);
        }
        let table = Table::open(self.statements.outbox_table);
        let is_usual = table.is(&MESSAGE) && table.may_insert();
        if is_usual {
            raise_highest(placed.iter().map(|(seq, _)| *seq));
            for (position, (seq, partition)) in placed.iter().enumerate() {
                let ((_, key), (_, stored)) = (&self.events[position], &stored[position]);
                self.write_messages(
                    &table,
                    (*seq, *partition),
                    key.as_deref(),
                    stored.as_ref(),
                    receivers.at(position),
                );
            }
            for (destination, count) in receivers.counts(placed.len()) {
                effects::enqueued(destination, count as i64);
            }
            if let Some(time) = self.times.expires_at {
                effects::expires_at(us_since_1970(time));
            }
        }
        table.close();
        match is_usual {
            true => Ok(()),
            false => self.insert_messages(stored, placed, receivers),
        }
    }

    /// Writes the rows of an event without a statement.
    fn write_messages(
        &self,
        table: &Table,
        (seq, partition): (i64, Partition),
        key: Option<&str>,
        stored: Option<&Stored>,
        receivers: &[&str],
    ) {
        let expires_at = self.times.expires_at.map(i64::from);
        let message = |destination| rows::message(seq, partition.as_i16(), destination, key, expires_at);
        let places = match receivers {
            [] => Vec::new(),
            [destination] => vec![table.insert(&message(destination))],
            receivers => {
                let formed: Vec<_> = receivers
                    .iter()
                    .map(|destination| table.form(&message(destination)))
                    .collect();
                table.insert_all(&formed)
            }
        };
        for (destination, tid) in receivers.iter().zip(places) {
            let inserted = Inserted {
                seq,
                partition,
                at: Some((self.statements.outbox_table, tid, since_1970(table::now()))),
            };
            let handoff =
                stored.and_then(|stored| inserted.handoff(With::Event(stored), destination, key.map(str::to_owned)));
            effects::ready(destination, partition, seq, handoff);
        }
    }

    /// Writes the messages by statements, for what [`enqueue`](Self::enqueue) cannot write.
    fn insert_messages(&self, stored: &StoredEvents, placed: &Placed, receivers: &Receivers) -> Result<(), UserError> {
        let mut received: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
        for position in 0..placed.len() {
            for destination in receivers.at(position) {
                received.entry(destination).or_default().push(position);
            }
        }
        for (destination, positions) in received {
            let messages = positions.into_iter().map(|position| {
                let (seq, partition) = placed[position];
                NewMessage {
                    seq,
                    key: self.events[position].1.clone(),
                    partition,
                    by_fast_path: stored[position].1.as_ref().map(With::Event),
                }
            });
            insert_messages(self.statements, messages.collect(), destination, self.times)?;
        }
        Ok(())
    }

    /// Stores the events by a statement. None: the id of the event exists, and it is skipped.
    fn insert_events(&self) -> Result<Option<StoredEvents>, UserError> {
        // The trigger would say so too, with the statement and its own line as CONTEXT.
        if let Some(source) = current_source::of(self.statements)? {
            return Err(events_closed(&source.relation));
        }
        Spi::connect_mut(|client| {
            let is_one = self.events.len() == 1;
            let by_fast_path = usize::from(self.by_fast_path);
            let (prepared, conflict) = match self.if_exists {
                IfExists::Error => (&self.statements.insert_events[by_fast_path][usize::from(is_one)], ""),
                // It waits for the end of a transaction that has inserted the id.
                IfExists::Skip => (
                    &self.statements.insert_event_once[by_fast_path],
                    "on conflict (id) do nothing",
                ),
            };
            let insert = prepared.get_or(|| {
                let table = format!("{}.outbox_events", self.statements.schema);
                let event = fast_path::event_columns(self.by_fast_path);
                let end = format!("{conflict} returning e.seq, e.body_bytes{event}");
                insert::prepare(client, &EVENT, &table, is_one, &[], &[], &end)
            })?;
            let values: Vec<_> = self.events.iter().map(|(event, _)| event.values()).collect();
            let args = insert::parameters(&EVENT, &values);
            // To set how one row is planned takes longer than to plan it a few times.
            let stored = match is_one {
                true => client.update(insert, None, &args),
                false => guc::planned_once(|| client.update(insert, None, &args)),
            };
            let read = |row: SpiHeapTupleData| -> SpiResult<_> {
                let (seq, bytes): (Option<i64>, Option<i32>) = (row.get(1)?, row.get(2)?);
                let stored = match self.by_fast_path {
                    true => fast_path::stored(&row, self.statements.event_table, 3)?,
                    false => None,
                };
                Ok((seq.unwrap_or_default(), bytes.unwrap_or_default(), stored))
            };
            let stored = stored.map_err(internal)?.map(read);
            let stored = stored.collect::<SpiResult<Vec<_>>>().map_err(internal)?;
            match stored.len() {
                0 if self.if_exists == IfExists::Skip => return Ok(None),
                count if count != self.events.len() => return Err(not_stored()),
                _ => {}
            }
            let checked = stored.into_iter().map(|(seq, bytes, stored)| {
                check_body(i64::from(bytes))?;
                Ok((seq, stored))
            });
            checked.collect::<Result<_, _>>().map(Some)
        })
    }
}

/// As the trigger of sql/src/27_source.sql says it.
fn events_closed(relation: &str) -> UserError {
    UserError::new(
        PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
        format!("outbox_events takes no events: they are read from {relation}"),
        "Write the event there and call outbox_enqueue(seq), or attach the table by outbox_attach(). select \
         outbox_source_reset() goes back to outbox_events.",
    )
}

fn not_stored() -> UserError {
    UserError::new(
        PgSqlErrorCode::ERRCODE_TRIGGERED_ACTION_EXCEPTION,
        "the event was not stored",
        "A trigger or a rule on outbox_events skips its row.",
    )
}
