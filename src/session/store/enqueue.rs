//! The SQL of enqueue and publish: in a user's backend, in its transaction, with the rights of the owner of the tables.

use super::direct;
use super::new_event::type_of;
use super::request::{Enqueue, Keys, Publish, check_id, new_id};
use super::source;
use super::statements::{Partitioner, Statements, statements};
use crate::error::{UserError, internal, invalid};
use crate::limits::check_body;
use crate::pg::clock::us_since_1970;
use crate::pg::lookup::{Key, Lookup};
use crate::pg::spi::{OwnedPreparedStatement, Param, Spi, SpiClient, SpiHeapTupleData, SpiResult};
use crate::pg::text;
use crate::pg::tid::Tid;
use crate::pg::trigger::Call;
use crate::pg::{catalog, guc, security, table};
use crate::session::{effects, publishing};
use crate::shared::fastpath::eligibility;
use crate::shared::fastpath::handoff::{self, Inserted, Stored};
use crate::shared::transactions;
use crate::store::{AGGREGATE_KEY, aggregate_key};
use outbox_core::envelope;
use outbox_core::event::COLUMNS;
use outbox_core::partition::{Partition, crc32};
use pgrx::datum::datetime_support::clock_timestamp;
use pgrx::spi::quote_identifier;
use pgrx::{PgBuiltInOids, PgOid, PgSqlErrorCode};
use std::collections::HashMap;

const STORE_FIRST: &str = "Store the event first, in this transaction or an earlier one. Events in another table are found once outbox_source_set() has named it.";

/// Keeps the extension from being dropped, and its partitions from being changed, before this transaction ends.
pub fn hold_extension(fcinfo: Call) {
    statements(fcinfo).hold();
}

/// Inserts the pointers; returns how many were new. The statements run as the owner of the tables with the caller's
/// search_path, so every operator and function in them is qualified.
pub fn enqueue(fcinfo: Call, request: Enqueue) -> Result<i64, UserError> {
    let statements = statements(fcinfo);
    security::run_as(statements.owner, || {
        statements.hold();
        insert_pointers(statements, request, None, false)
    })
}

/// Stores an event and enqueues it; returns its seq.
pub fn publish(fcinfo: Call, request: &Publish) -> Result<i64, UserError> {
    let statements = statements(fcinfo);
    security::run_as(statements.owner, || {
        statements.hold();
        let announced = transactions::announce([request.key.map(crc32)]); // the seq is drawn next
        let at_once = request.event.times.available_at.is_none()
            && request.event.times.expires_at.is_none()
            && effects::may_use_fast_path(1);
        let by_fast_path = at_once && eligibility::is_on();
        if let Some((seq, partition)) = direct::publish(statements, request, by_fast_path)? {
            announced.placed([(seq, partition)]);
            return Ok(seq);
        }
        publishing::begins(request.destination);
        let (seq, stored) = insert_event(statements, request, by_fast_path)?;
        publishing::ends();
        let pointer = Enqueue {
            seqs: &[seq],
            announced: Some(announced),
            keys: Keys::Given(vec![request.key.map(str::to_owned)]),
            destination: request.destination,
            times: request.event.times,
            partition: None,
        };
        insert_pointers(statements, pointer, stored, true)?;
        Ok(seq)
    })
}

/// `wanted`: return the event, if it is small.
fn insert_event(statements: &Statements, request: &Publish, wanted: bool) -> Result<(i64, Option<Stored>), UserError> {
    let id = request.event.id.unwrap_or_else(new_id);
    if !text::is_utf8() {
        check_body(request.event.bytes(id) as i64)?;
    }
    check_id(statements, request.event.id)?;
    Spi::connect_mut(|client| {
        let cached = &statements.event[usize::from(wanted)];
        let insert = match cached.get() {
            Some(insert) => insert,
            None => {
                let parameters: Vec<String> = (1..=COLUMNS.len()).map(|number| format!("${number}")).collect();
                let sql = format!(
                    "insert into {s}.outbox_events as e ({columns})
                     values ({parameters})
                     returning e.seq, e.body_bytes{event}",
                    s = statements.schema,
                    parameters = parameters.join(", "),
                    columns = COLUMNS.map(|column| column.name).join(", "),
                    event = if wanted {
                        handoff::event_columns()
                    } else {
                        String::new()
                    },
                );
                let types = COLUMNS.map(|column| PgOid::from(type_of(column).oid()));
                let prepared = client.prepare_mut(sql.as_str(), &types).map_err(internal)?.keep();
                cached.get_or_init(|| prepared)
            }
        };
        let columns = request.event.columns(id);
        let args: [Param; COLUMNS.len()] =
            std::array::from_fn(|index| Param::of_column(columns[index], type_of(COLUMNS[index])));
        let stored = client.update(insert, None, &args).map_err(internal)?;
        let row = stored.into_iter().next();
        let read = |row: &SpiHeapTupleData| -> SpiResult<_> { Ok(row.get::<i64>(1)?.zip(row.get::<i32>(2)?)) };
        let Some((seq, bytes)) = row.as_ref().map(read).transpose().map_err(internal)?.flatten() else {
            return Err(UserError::new(
                PgSqlErrorCode::ERRCODE_TRIGGERED_ACTION_EXCEPTION,
                "the event was not stored",
                "A trigger or a rule on outbox_events skips its row.",
            ));
        };
        check_body(i64::from(bytes))?;
        let stored = match row.filter(|_| wanted) {
            Some(row) => handoff::stored(&row, statements.event_table).map_err(internal)?,
            None => None,
        };
        Ok((seq, stored))
    })
}

/// `stored`: the event of a message that may take the fast path. Otherwise the event of a message that was not
/// `published` is read.
fn insert_pointers(
    statements: &Statements,
    request: Enqueue,
    mut stored: Option<Stored>,
    published: bool,
) -> Result<i64, UserError> {
    Spi::connect_mut(|client| {
        let keys = match &request.keys {
            Keys::Given(keys) => {
                if request.announced.is_none() && source::of(statements)?.is_none() {
                    let found = aggregate_keys(client, statements, request.seqs)?;
                    let missing = request.seqs.iter().filter(|seq| !found.contains_key(seq)).max();
                    check_drawn(client, statements, missing.copied())?;
                }
                keys.clone()
            }
            Keys::LookedUp => looked_up_keys(client, statements, request.seqs)?,
        };
        let (seqs, keys) = match request.announced {
            Some(_) => (request.seqs.to_vec(), keys), // an event that was just stored does not wait yet
            None => not_waiting(statements, &request, keys),
        };
        if seqs.is_empty() {
            return check_settings(client, statements, request.partition).map(|_| 0);
        }
        let mut request = Enqueue { seqs: &seqs, ..request };
        let crcs: Vec<Option<i64>> = keys
            .iter()
            .map(|key| key.as_deref().map(|key| i64::from(crc32(key))))
            .collect();
        let announced = (request.announced.take())
            .unwrap_or_else(|| transactions::announce(crcs.iter().map(|crc| crc.map(|crc| crc as u32))));
        // A time in the past has no effect.
        let due_at = request.times.available_at.filter(|at| *at > clock_timestamp());
        let one = request.seqs.len() == 1;
        let insert = insert_statement(client, statements, due_at.is_some(), one)?;
        loop {
            let partitioner = statements.partitioner.borrow().clone();
            let partitions = partitions(client, &statements.schema, &request, &keys, partitioner.as_ref())?;
            let (seqs, keys_of, crcs_of, partitions) = match (request.seqs, &keys[..], &crcs[..], &partitions[..]) {
                ([seq], [key], [crc], [partition]) => {
                    ((*seq).into(), key.as_deref().into(), (*crc).into(), (*partition).into())
                }
                _ => (
                    request.seqs.to_vec().into(),
                    keys.clone().into(),
                    crcs.clone().into(),
                    partitions.into(),
                ),
            };
            let args: [Param; 9] = [
                request.destination.into(),
                seqs,
                keys_of,
                crcs_of,
                due_at.into(),
                partitions,
                partitioner.as_ref().map(|known| known.name.clone()).into(),
                partitioner.as_ref().map(|known| known.count).into(),
                request.times.expires_at.into(),
            ];
            let inserted = guc::planned_once(|| client.update(insert, None, &args));
            let inserted = (inserted.map_err(internal)?)
                .map(|row| Inserted::read(&row, due_at.is_none()))
                .collect::<SpiResult<Vec<_>>>()
                .map_err(internal)?;
            let count = inserted.len() as i64;
            let inserted: Vec<Inserted> = inserted.into_iter().flatten().collect();
            let placed: Vec<(i64, Partition)> = inserted.iter().map(|one| (one.seq, one.partition)).collect();
            if due_at.is_none() {
                ready(client, statements, &request, &keys, inserted, stored.take(), published)?;
            }
            if due_at.is_some() {
                effects::scheduled();
            }
            if let Some(time) = request.times.expires_at {
                effects::expires_at(us_since_1970(time));
            }
            if count > 0 || !check_settings(client, statements, request.partition)? {
                announced.placed(placed);
                return Ok(count);
            }
        }
    })
}

/// These messages may be delivered as soon as this transaction is committed.
fn ready(
    client: &mut SpiClient,
    statements: &Statements,
    request: &Enqueue,
    keys: &[Option<String>],
    inserted: Vec<Inserted>,
    stored: Option<Stored>,
    published: bool,
) -> Result<(), UserError> {
    let mut stored: HashMap<i64, Stored> = stored.into_iter().map(|stored| (stored.seq(), stored)).collect();
    let may_go =
        || eligibility::is_on() && request.times.expires_at.is_none() && effects::may_use_fast_path(inserted.len());
    if !published && may_go() && source::of(statements)?.is_none() {
        let seqs = inserted.iter().map(|inserted| inserted.seq).collect();
        stored = look_up(client, statements, seqs).map_err(internal)?;
    }
    for one in inserted {
        let (partition, seq) = (one.partition, one.seq);
        let handoff = stored.remove(&one.seq).and_then(|stored| {
            let index = request.seqs.iter().position(|seq| *seq == one.seq)?;
            one.handoff(stored, request.destination, keys.get(index).cloned().flatten())
        });
        effects::ready(request.destination, partition, seq, handoff);
    }
    Ok(())
}

/// The condition of a statement that reads events, by their [`places`] and not by their seqs: that would make SERIALIZABLE
/// transactions fail, see [`crate::pg::lookup`].
const AT_PLACES: &str = "e.ctid operator(pg_catalog.=) any ($1::pg_catalog.tid[])";
const PLACES: PgBuiltInOids = PgBuiltInOids::TEXTARRAYOID;

/// Where the events with these seqs are.
fn places(statements: &Statements, seqs: &[i64]) -> Param<'static> {
    let mut places = Vec::with_capacity(seqs.len());
    if let Some(events) = Lookup::open(statements.event_table, [c"seq"]) {
        places.extend(seqs.iter().filter_map(|seq| events.find([Key::int8(*seq)])));
        events.close();
    }
    places.iter().map(Tid::to_string).collect::<Vec<String>>().into()
}

/// Events that were stored earlier, or by another statement, by their seq.
fn look_up(client: &mut SpiClient, statements: &Statements, seqs: Vec<i64>) -> SpiResult<HashMap<i64, Stored>> {
    let select = match statements.fast_path.get() {
        Some(select) => select,
        None => {
            let sql = format!(
                "select e.seq, e.body_bytes{} from {}.outbox_events e where {AT_PLACES}",
                handoff::event_columns(),
                statements.schema
            );
            let prepared = client.prepare_mut(sql.as_str(), &[PgOid::from(PLACES)])?.keep();
            statements.fast_path.get_or_init(|| prepared)
        }
    };
    let rows = guc::planned_once(|| client.update(select, None, &[places(statements, &seqs)]))?;
    let found = rows.map(|row| handoff::stored(&row, statements.event_table));
    let found: Vec<Option<Stored>> = found.collect::<SpiResult<_>>()?;
    Ok(found
        .into_iter()
        .flatten()
        .map(|stored| (stored.seq(), stored))
        .collect())
}

/// The partition of each message, if it does not follow from key or seq.
fn partitions(
    client: &mut SpiClient,
    schema: &str,
    request: &Enqueue,
    keys: &[Option<String>],
    partitioner: Option<&Partitioner>,
) -> Result<Vec<Option<i16>>, UserError> {
    if let Some(partition) = request.partition {
        return Ok(vec![Some(partition.as_i16()); keys.len()]);
    }
    let Some(partitioner) = partitioner else {
        return Ok(vec![None; keys.len()]);
    };
    keys.iter()
        .map(|key| {
            let key = key.as_deref();
            key.map(|key| query_partitioner(client, schema, partitioner, None, key))
                .transpose()
        })
        .collect()
}

/// Changes the settings of this database: as the owner of the tables, for the caller, who names a partitioner with the
/// caller's own rights.
pub fn configure(
    fcinfo: Call,
    partition_count: Option<i32>,
    leasing: Option<bool>,
    partitioner: Option<&str>,
) -> Result<(), UserError> {
    let statements = statements(fcinfo);
    let sql = "select outbox_internal.configure_for($1::pg_catalog.oid, $2, $3, $4)";
    let args = [
        i64::from(security::current_user()).into(),
        partition_count.into(),
        leasing.into(),
        partitioner.into(),
    ];
    security::run_as(statements.owner, || Spi::run_with_args(sql, &args)).map_err(internal)
}

/// The partition of a key by a partitioner, given by name and owner; None = CRC-32.
pub fn partition_by(fcinfo: Call, partitioner: Option<(&str, &str)>, key: &str, count: i16) -> Result<i16, UserError> {
    match partitioner {
        None => Ok((i64::from(crc32(key)) % i64::from(count)) as i16),
        Some((name, owner)) => {
            let name = name.to_owned();
            let statements = statements(fcinfo);
            let partitioner = Partitioner { name, count };
            Spi::connect_mut(|client| query_partitioner(client, &statements.schema, &partitioner, Some(owner), key))
        }
    }
}

/// Runs the function restricted and as its owner, whichever role enqueues: as the role that owned it when a member of
/// that role named it, and never as a superuser. A change of its owner makes it another function. `named_owner`: None =
/// read it from the settings, which may have changed since this session read them.
fn query_partitioner(
    client: &mut SpiClient,
    schema: &str,
    partitioner: &Partitioner,
    named_owner: Option<&str>,
    key: &str,
) -> Result<i16, UserError> {
    let Partitioner { name, count } = partitioner;
    let sql = format!(
        "select p.proowner::pg_catalog.int8, coalesce($2, s.partitioner_owner)
         from outbox_internal.partitioner($1) p left join {schema}.outbox_settings s on s.partitioner operator(pg_catalog.=) $1"
    );
    let found =
        (client.select(sql.as_str(), Some(1), &[name.as_str().into(), named_owner.into()])).map_err(internal)?;
    if found.is_empty() {
        return Err(UserError::new(
            PgSqlErrorCode::ERRCODE_UNDEFINED_FUNCTION,
            format!("the partitioner {name} does not exist"),
            "Create it again, or outbox_configure(partitioner => '') for the built-in one.",
        ));
    }
    let (owner, named): (Option<i64>, Option<String>) = found.first().get_two().map_err(internal)?;
    let owner = owner.unwrap_or_default() as u32;
    let owner_name = catalog::role_name(owner);
    if catalog::is_superuser(owner) || named.as_deref() != Some(&owner_name) {
        return Err(UserError::new(
            PgSqlErrorCode::ERRCODE_INSUFFICIENT_PRIVILEGE,
            format!(
                "the partitioner {name} belongs to {}, a superuser or a role that did not own it at outbox_configure()",
                quote_identifier(owner_name)
            ),
            format!(
                "It runs as its owner. Give it an owner without SUPERUSER, and call outbox_configure(partitioner => '{name}') again."
            ),
        ));
    }
    let call = format!("select {name}($1, $2)");
    let answer: Option<i32> = guc::with(&[(c"search_path", c"pg_catalog, pg_temp")], || {
        security::run_restricted_as(owner, || {
            let args = [key.into(), i32::from(*count).into()];
            client.update(call.as_str(), Some(1), &args)?.first().get_one()
        })
    })
    .map_err(internal)?;
    match answer {
        Some(partition) if (0..i32::from(*count)).contains(&partition) => Ok(partition as i16),
        answer => Err(UserError {
            detail: Some(format!(
                "It returned {}.",
                answer.map_or("NULL".to_owned(), |partition| partition.to_string())
            )),
            ..UserError::new(
                PgSqlErrorCode::ERRCODE_NUMERIC_VALUE_OUT_OF_RANGE,
                format!("the partitioner {name} did not return a partition"),
                format!("It must return 0 to {} for every key.", count - 1),
            )
        }),
    }
}

/// The seqs that do not wait for the destination, with their keys. A seq waits at most once for each destination,
/// whatever partition its key gave it then.
fn not_waiting(
    statements: &Statements,
    request: &Enqueue,
    keys: Vec<Option<String>>,
) -> (Vec<i64>, Vec<Option<String>>) {
    let all = request.seqs.iter().copied().zip(keys);
    let ready = Lookup::open(statements.outbox_table, [c"destination", c"partition", c"seq"]);
    let waiting = Lookup::open(statements.waiting_table, [c"seq", c"destination"]);
    let (Some(ready), Some(waiting)) = (ready, waiting) else {
        return all.unzip(); // the statement that inserts fails
    };
    // None: the statement that inserts finds no settings either.
    let count = table::only_row(statements.settings, |row| row.int2(2))
        .flatten()
        .unwrap_or_default();
    let destination = Key::text(request.destination);
    let is_new = |(seq, _): &(i64, Option<String>)| {
        let seq = Key::int8(*seq);
        let waits = || waiting.find([seq, destination]).is_some();
        let in_partition = |partition| ready.find([destination, Key::int2(partition), seq]).is_some();
        // Looked for twice: a worker may move it from one table to the other in between.
        !waits() && !(0..count).any(in_partition) && !waits()
    };
    let new = all.filter(is_new).unzip();
    waiting.close();
    ready.close();
    new
}

/// The statement that inserts, planned at its first use. There is one for messages without and one for those with a time.
fn insert_statement<'a>(
    client: &mut SpiClient,
    statements: &'a Statements,
    scheduled: bool,
    one: bool,
) -> Result<&'a OwnedPreparedStatement, UserError> {
    let cached = &statements.insert[usize::from(scheduled)][usize::from(one)];
    if let Some(insert) = cached.get() {
        return Ok(insert);
    }
    let s = &statements.schema;
    let (into, columns, values) = match scheduled {
        false => ("outbox", "", ""),
        true => (
            "outbox_waiting",
            ", due_at, state, enqueued_at",
            ", $5, 's'::pg_catalog.\"char\", pg_catalog.now()",
        ),
    };
    let sql = format!(
        "insert into {s}.{into} (destination, partition, seq, key, expires_at{columns})
         select $1,
                coalesce(u.partition, (coalesce(u.crc, u.seq) operator(pg_catalog.%) s.partition_count)::pg_catalog.int2),
                u.seq, u.key, $9{values}
         from {s}.outbox_settings s, {given} as u (seq, key, crc, partition)
         where (u.partition is null or u.partition operator(pg_catalog.<) s.partition_count)
           and case when $7 is null then s.partitioner is null
                    else s.partitioner operator(pg_catalog.=) $7 and s.partition_count operator(pg_catalog.=) $8 end
         on conflict do nothing returning partition, seq{location}",
        location = if scheduled { "" } else { handoff::MESSAGE },
        // Most transactions enqueue one message; unnest would double the cost of its insert.
        given = match one {
            true => "(select $2, $3, $4, $6)",
            false =>
                "rows from (pg_catalog.unnest($2), pg_catalog.unnest($3), pg_catalog.unnest($4), pg_catalog.unnest($6))",
        }
    );
    let (seqs, keys, crcs, partitions) = match one {
        true => (
            PgBuiltInOids::INT8OID,
            PgBuiltInOids::TEXTOID,
            PgBuiltInOids::INT8OID,
            PgBuiltInOids::INT2OID,
        ),
        false => (
            PgBuiltInOids::INT8ARRAYOID,
            PgBuiltInOids::TEXTARRAYOID,
            PgBuiltInOids::INT8ARRAYOID,
            PgBuiltInOids::INT2ARRAYOID,
        ),
    };
    let types = [
        PgBuiltInOids::TEXTOID,
        seqs,
        keys,
        crcs,
        PgBuiltInOids::TIMESTAMPTZOID,
        partitions,
        PgBuiltInOids::TEXTOID,
        PgBuiltInOids::INT2OID,
        PgBuiltInOids::TIMESTAMPTZOID,
    ];
    let prepared = client
        .prepare_mut(sql.as_str(), &types.map(PgOid::from))
        .map_err(internal)?
        .keep();
    Ok(cached.get_or_init(|| prepared))
}

/// The keys of events that were enqueued without one. The error names the seqs that are not in the store.
fn looked_up_keys(
    client: &mut SpiClient,
    statements: &Statements,
    seqs: &[i64],
) -> Result<Vec<Option<String>>, UserError> {
    let (found, store) = match source::of(statements)? {
        None => (aggregate_keys(client, statements, seqs)?, "outbox_events".to_owned()),
        Some(source) => (source.keys(seqs)?, source.relation),
    };
    let missing: Vec<String> = seqs
        .iter()
        .filter(|seq| !found.contains_key(seq))
        .take(5)
        .map(i64::to_string)
        .collect();
    if !missing.is_empty() {
        let hint = match store == "outbox_events" {
            true => STORE_FIRST,
            false => {
                "Store the event first, in this transaction or an earlier one; or pass a key, and it is not looked up. outbox_source_set() names the table of the events."
            }
        };
        let detail = format!("{store} has no row for {}.", missing.join(", "));
        return Err(no_event(&missing[0], detail, hint));
    }
    for key in found.values().flatten() {
        envelope::check_short(AGGREGATE_KEY, key)?;
    }
    Ok(seqs.iter().map(|seq| found[seq].clone()).collect())
}

/// Refuses seqs that no event has had yet. A message with such a seq would keep the message of a later event out.
/// `highest`: the highest of the seqs without an event.
fn check_drawn(client: &mut SpiClient, statements: &Statements, highest: Option<i64>) -> Result<(), UserError> {
    let Some(highest) = highest else { return Ok(()) };
    let sql = "select coalesce(pg_catalog.pg_sequence_last_value(s::pg_catalog.regclass), 0)
               from pg_catalog.pg_get_serial_sequence($1, 'seq') s where s is not null";
    let table = format!("{}.outbox_events", statements.schema);
    let read = client.select(sql, Some(1), &[table.into()]).map_err(internal)?;
    let drawn: Option<i64> = match read.is_empty() {
        true => None, // the column has no sequence any more
        false => read.first().get_one().map_err(internal)?,
    };
    match drawn.is_some_and(|drawn| highest > drawn) {
        false => Ok(()),
        true => Err(no_event(
            &highest.to_string(),
            "outbox_events has not given this seq to an event yet.".into(),
            STORE_FIRST,
        )),
    }
}

fn no_event(seq: &str, detail: String, hint: &'static str) -> UserError {
    UserError {
        detail: Some(detail),
        ..UserError::new(
            PgSqlErrorCode::ERRCODE_NO_DATA_FOUND,
            format!("there is no event with seq {seq}"),
            hint,
        )
    }
}

/// The keys by the aggregates in outbox_events. The events are locked against outbox_internal.trim_events, which does
/// not see the messages of this transaction.
fn aggregate_keys(
    client: &mut SpiClient,
    statements: &Statements,
    seqs: &[i64],
) -> Result<HashMap<i64, Option<String>>, UserError> {
    let select = match statements.aggregates.get() {
        Some(select) => select,
        None => {
            let sql = format!(
                "select e.seq, e.aggregate_type, e.aggregate_id from {s}.outbox_events e
                 where {AT_PLACES} for key share",
                s = statements.schema
            );
            let types = [PgOid::from(PLACES)];
            let prepared = client.prepare_mut(sql.as_str(), &types).map_err(internal)?.keep();
            statements.aggregates.get_or_init(|| prepared)
        }
    };
    let rows = guc::planned_once(|| client.update(select, None, &[places(statements, seqs)])).map_err(internal)?;
    let mut found = HashMap::with_capacity(seqs.len());
    for row in rows {
        let seq: i64 = row.get(1).map_err(internal)?.unwrap_or_default();
        let aggregate_type: Option<String> = row.get(2).map_err(internal)?;
        let aggregate_id: Option<String> = row.get(3).map_err(internal)?;
        found.insert(seq, aggregate_key(aggregate_type.as_deref(), aggregate_id.as_deref()));
    }
    Ok(found)
}

/// The reason why nothing was inserted, unless all of the messages wait already. True: the partitioner differs from the
/// known one, so the caller tries again.
fn check_settings(
    client: &mut SpiClient,
    statements: &Statements,
    partition: Option<Partition>,
) -> Result<bool, UserError> {
    let sql = format!(
        "select s.partition_count, s.partitioner from {}.outbox_settings s",
        statements.schema
    );
    let settings = client.select(sql.as_str(), Some(1), &[]).map_err(internal)?;
    if settings.is_empty() {
        let table = format!("{}.outbox_settings", statements.schema);
        let hidden = "select pg_catalog.row_security_active($1)";
        let rows = client.select(hidden, Some(1), &[table.into()]).map_err(internal)?;
        if rows.first().get_one().map_err(internal)? == Some(true) {
            return Err(UserError::new(
                PgSqlErrorCode::ERRCODE_INSUFFICIENT_PRIVILEGE,
                "row security hides the row of outbox_settings",
                format!(
                    "ALTER TABLE {}.outbox_settings NO FORCE ROW LEVEL SECURITY;",
                    statements.schema
                ),
            ));
        }
        // outbox_configure() keeps no row that an older snapshot sees: with the old count one key would be in two
        // partitions.
        return Err(UserError::new(
            PgSqlErrorCode::ERRCODE_T_R_SERIALIZATION_FAILURE,
            "outbox_configure() changed the partitions after this transaction began",
            "Run the transaction again.",
        ));
    }
    let (count, name): (Option<i16>, Option<String>) = settings.first().get_two().map_err(internal)?;
    let count = count.unwrap_or_default();
    let partition = partition.map_or(-1, |partition| partition.as_i16());
    if partition >= count {
        let last = Partition::new(i64::from(count) - 1).map_or_else(|error| error.to_string(), Partition::label);
        return Err(invalid(
            format!("partition {partition} does not exist"),
            format!("The partitions are p00 to {last}."),
        ));
    }
    let partitioner = name.map(|name| Partitioner { name, count });
    Ok(statements.partitioner.replace(partitioner.clone()) != partitioner)
}
