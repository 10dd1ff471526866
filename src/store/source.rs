//! Reads events and keys from the user's event source. A worker reads events after a claim, in the same transaction. A
//! session that enqueues without a key reads keys.
//!
//! The relation and the expressions are user code: they run as the owner of the relation, who is no superuser,
//! restricted and read-only. A worker limits their time. The error of a row is a failed attempt of its message only.

pub mod by_sql;

use super::statement::{self, SavedStatement};
use super::{aggregate_key, start_sql};
use crate::error::UserError;
use crate::event::created_at_sql;
use crate::limits::{STATEMENT_TIMEOUT_MS, check_body};
use crate::pg::spi::types::{INT8ARRAYOID, INT8OID};
use crate::pg::spi::{Lossy, Spi, SpiClient, SpiError, SpiHeapTupleData, SpiResult, SpiTupleTable};
use crate::pg::{catalog, guc, security, signals, text, txn};
use outbox_core::engine::Events;
use outbox_core::event::{self, COLUMNS, Event, EventColumn};
use outbox_core::message::Outcome;
use outbox_core::session_settings::{SessionSetting, TEXTS};
use pgrx::PgSqlErrorCode;
use pgrx::spi::quote_identifier;
use std::cell::{OnceCell, RefCell};
use std::collections::HashMap;
use std::ffi::CString;
use std::rc::Rc;
use std::time::{Duration, Instant};

/// The longest time of one statement over the source in a worker.
const READ_MS: i32 = 2_000;
/// After this time a worker continues with the rows that it has, because it must renew its leases.
const PATIENCE: Duration = Duration::from_secs(2);
/// How long a worker keeps the result that the source is unreadable.
const TRY_AGAIN_AFTER: Duration = Duration::from_millis(400);

/// The settings for a statement over the source, beside [`TEXTS`]: the plan is made once and uses the index.
const SETTINGS: [SessionSetting; 9] = [
    (c"row_security", c"on"), // a worker's session has it off
    (c"enable_seqscan", c"off"),
    (c"enable_hashjoin", c"on"), // a worker's session has these off, and a view may join anything
    (c"enable_mergejoin", c"on"),
    (c"enable_bitmapscan", c"on"),
    (c"enable_sort", c"on"),
    (c"enable_memoize", c"off"), // no seq comes twice
    (c"jit", c"off"),
    (c"plan_cache_mode", c"force_generic_plan"),
];
/// Rows that one statement reads.
const PIECE: usize = 1_000;
/// How `txn::attempt` reports that the session was canceled, or its time is over.
const CANCELED: &str = "(SQLSTATE 57014)";
/// In a worker, and for the health check: a locked relation delays its readers, not the worker.
const PATIENT: SessionSetting = (c"lock_timeout", c"1s");

/// The mapped parts of an event, in the order of the arguments of outbox_source_set: required ones, other columns, the
/// key.
pub const PARTS: [(&str, PartKind); COLUMNS.len() + 3] = parts();
const SEQ: usize = 0;
const TYPE: usize = 1;
const CREATED_AT: usize = 2;
const AGGREGATE: [usize; 2] = [4, 5];
const KEY: usize = PARTS.len() - 1;

const fn parts() -> [(&'static str, PartKind); COLUMNS.len() + 3] {
    let [id, kind, ..] = &COLUMNS;
    let mut parts = [("key", PartKind::Text); COLUMNS.len() + 3];
    parts[SEQ] = ("seq", PartKind::Seq);
    parts[TYPE] = (kind.name, PartKind::Text);
    parts[CREATED_AT] = ("created_at", PartKind::Time);
    parts[CREATED_AT + 1] = (id.name, PartKind::Text);
    let mut column = 2;
    while column < COLUMNS.len() {
        let kind = match COLUMNS[column].kind {
            event::ColumnKind::Json => PartKind::Json,
            _ => PartKind::Text,
        };
        parts[column + 2] = (COLUMNS[column].name, kind);
        column += 1;
    }
    parts
}

#[derive(Clone, Copy, PartialEq)]
pub enum PartKind {
    Seq,
    Text,
    Json,
    Time,
}

/// An SQL expression over one row for each of PARTS.
pub type SourceMapping = Vec<Option<String>>;

/// A worker limits the time of each statement, and waits for no lock for long. In a session its own statement_timeout
/// limits the time, and a cancel ends the call.
#[derive(Clone, Copy, PartialEq)]
enum Reader {
    Worker,
    Session,
    /// As a session, with the rights of this role instead of the owner's.
    Caller(u32),
}

/// What was read, by seq; what failed, with the reason; and all seqs that were read successfully, with a row or
/// without.
struct Pieces<T> {
    rows: Vec<(i64, T)>,
    failed: Vec<(i64, String)>,
    seqs: Vec<i64>,
}

impl<T> Default for Pieces<T> {
    fn default() -> Self {
        let (rows, failed, seqs) = (Vec::new(), Vec::new(), Vec::new());
        Self { rows, failed, seqs }
    }
}

/// What a session reads of an event that it enqueues.
pub struct EventKey {
    pub key: Option<String>,
    /// Empty if it was not asked for.
    pub kind: String,
    pub aggregate_type: Option<String>,
}

impl From<&Event> for EventKey {
    /// With the key of an event whose key is its aggregate.
    fn from(event: &Event) -> Self {
        Self {
            key: aggregate_key(event.aggregate_type.as_deref(), event.aggregate_id.as_deref()),
            kind: event.kind.clone(),
            aggregate_type: event.aggregate_type.clone(),
        }
    }
}

impl EventKey {
    /// What subscriptions choose by first.
    pub fn types(&self) -> (&str, Option<&str>) {
        (&self.kind, self.aggregate_type.as_deref())
    }
}

/// The statements that read keys, by whether they read types, too.
struct KeyStatements {
    relation: String,
    mapping: SourceMapping,
    prepared: [OnceCell<Rc<SavedStatement>>; 2],
}

pub struct Source {
    /// The relation as SQL, with its schema.
    pub relation: String,
    /// The names of its schema and of the relation, as in the catalogs.
    name: (CString, CString),
    /// The owner when it was set; its expressions run as this role.
    pub owner: u32,
    pub mapping: SourceMapping,
    /// The statements that read events: several, and one.
    prepared: [OnceCell<SavedStatement>; 2],
    /// Why the last attempt could read no row, and when that was.
    broken: RefCell<Option<(Instant, String)>>,
}

impl Source {
    pub fn new(schema: &str, name: &str, owner: u32, mapping: SourceMapping) -> Self {
        let c = text::to_c_string;
        Self {
            relation: format!("{}.{}", quote_identifier(schema), quote_identifier(name)),
            name: (c(schema), c(name)),
            owner,
            mapping,
            prepared: Default::default(),
            broken: RefCell::default(),
        }
    }

    /// The statement that reads the row of the source, from the tables of the extension in this schema. Run as their
    /// owner.
    pub fn query(extension: &str) -> String {
        let parts: Vec<String> = PARTS.iter().map(|(part, _)| format!("s.{part}")).collect();
        format!(
            "select pg_catalog.parse_ident(s.relation), array[{}]::pg_catalog.text[], s.owner
             from {extension}.outbox_source s",
            parts.join(", ")
        )
    }

    /// The source from the result of that statement.
    pub fn of(rows: SpiTupleTable) -> SpiResult<Option<Self>> {
        if rows.is_empty() {
            return Ok(None);
        }
        let (name, mapping, owner): (Option<Vec<String>>, Option<SourceMapping>, Option<String>) =
            rows.first().get_three()?;
        let name = name.unwrap_or_default();
        let owner = catalog::role_oid(&text::to_c_string(&owner.unwrap_or_default()));
        Ok(match (name.as_slice(), mapping) {
            ([schema, name], Some(mapping)) => Some(Self::new(schema, name, owner, mapping)),
            _ => None,
        })
    }

    pub fn is_the_same(&self, other: &Self) -> bool {
        (&self.relation, self.owner, &self.mapping) == (&other.relation, other.owner, &other.mapping)
    }

    // ---- in a worker, after a claim ---------------------------------------------------------------------------------

    /// The events of these seqs, in their order. It stops after `bytes_max`, or when its time is over. Err: no row can
    /// be read.
    pub fn read(&self, seqs: &[i64], bytes_max: usize) -> Result<Events, UserError> {
        let read = self.read_events(seqs, bytes_max, Reader::Worker);
        (self.broken).replace(read.as_ref().err().map(|why| (Instant::now(), why.clone())));
        txn::limit_statements(STATEMENT_TIMEOUT_MS);
        read.map_err(|why| self.unreadable(&why))
    }

    /// Whether a transaction failed with this message because no row can be read.
    pub fn says(&self, message: &str) -> bool {
        (self.broken.borrow().as_ref()).is_some_and(|(_, why)| self.unreadable(why).message == message)
    }

    /// Refuses a claim while no row can be read. Otherwise each attempt would write the claim and roll it back. It
    /// checks once for all destinations, because it may wait for a lock.
    pub fn check_before_claim(&self) -> Result<(), UserError> {
        let broken = self.broken.borrow().clone();
        match broken {
            None => Ok(()),
            Some((at, why)) if at.elapsed() < TRY_AGAIN_AFTER => Err(self.unreadable(&why)),
            Some(_) => self.read(&[], 0).map(drop),
        }
    }

    /// Returns whether all rows were read; false = `bytes_max` was reached. `rows` also has those before an error.
    fn fetch(
        &self,
        seqs: &[i64],
        bytes_max: usize,
        rows: &mut Vec<(i64, Result<Event, Outcome>)>,
    ) -> Result<bool, String> {
        let internal = |error: SpiError| error.to_string();
        if let [seq] = seqs {
            self.fetch_one(*seq, rows).map_err(internal)?;
            return Ok(true);
        }
        let cursor = Spi::connect_mut(|client| {
            let statement = self.events_statement(client, false)?;
            let cursor = client.try_open_cursor(statement, &[seqs.to_vec().into()])?;
            Ok(cursor.detach_into_name())
        })
        .map_err(internal)?;
        let mut bytes = 0;
        let is_all = loop {
            // Row by row, as no row tells how large the next one is. In a separate SPI session, whose end frees it.
            let fetched = Spi::connect_mut(|client| {
                let event = |mut rows: SpiTupleTable| rows.next().map(|row| event_of(&row)).transpose();
                statement::fetch(client, &cursor, 1, event)
            });
            let Some((seq, event)) = fetched.map_err(internal)? else {
                break true;
            };
            bytes += event.as_ref().map_or(0, Event::body_bytes);
            rows.push((seq, event));
            if bytes >= bytes_max {
                break false;
            }
        };
        Spi::connect_mut(|client| statement::close(client, &cursor)).map_err(internal)?;
        Ok(is_all)
    }

    /// Reads one event without a cursor.
    fn fetch_one(&self, seq: i64, rows: &mut Vec<(i64, Result<Event, Outcome>)>) -> SpiResult<()> {
        Spi::connect_mut(|client| {
            let statement = self.events_statement(client, true)?;
            let found = client.update(&**statement, Some(2), &[seq.into()])?; // two rows with a seq are an error
            for row in found {
                rows.push(event_of(&row)?);
            }
            Ok(())
        })
    }

    fn events_statement(&self, client: &SpiClient, is_one: bool) -> SpiResult<&SavedStatement> {
        let known = &self.prepared[usize::from(is_one)];
        if let Some(statement) = known.get() {
            return Ok(statement);
        }
        let prepared = match is_one {
            true => client.prepare_mut(&self.event_sql("$1"), &[INT8OID]),
            false => client.prepare_mut(&self.events_sql("$1"), &[INT8ARRAYOID]),
        };
        let prepared = prepared?.into();
        Ok(known.get_or_init(|| prepared))
    }

    // ---- in a session -----------------------------------------------------------------------------------------------

    /// The keys of these events, without those that do not exist. `with_types`: their types too. Of what is too long it
    /// has the start. An error of the source is an error of the call.
    pub fn keys(&self, seqs: &[i64], with_types: bool) -> Result<HashMap<i64, EventKey>, UserError> {
        let read = || {
            Spi::connect_mut(|client| {
                let statement = self.keys_statement(client, with_types)?;
                let rows = client.update(&**statement, None, &[seqs.to_vec().into()])?;
                rows.map(|row| {
                    let (aggregate_type, id): (Option<String>, Option<String>) = (row.get(2)?, row.get(3)?);
                    let key = match self.mapping[KEY] {
                        Some(_) => row.get(4)?,
                        None => aggregate_key(aggregate_type.as_deref(), id.as_deref()),
                    };
                    let kind = row.get(5)?.unwrap_or_default();
                    let found = EventKey {
                        key,
                        kind,
                        aggregate_type,
                    };
                    Ok((row.get(1)?.unwrap_or_default(), found))
                })
                .collect::<SpiResult<_>>()
            })
            .map_err(|error| error.to_string())
        };
        self.as_owner(&[], read).map_err(|why| self.unreadable(&why))
    }

    /// Whether the key of an event is its aggregate.
    pub fn has_aggregate_keys(&self) -> bool {
        self.mapping[KEY].is_none()
    }

    /// Those of these events that exist. An error of the source is an error of the call.
    pub fn whole_events(&self, seqs: &[i64]) -> Result<HashMap<i64, Event>, UserError> {
        let read = self.read_events(seqs, usize::MAX, Reader::Session);
        let mut events = HashMap::new();
        for (seq, event) in read.map_err(|why| self.unreadable(&why))? {
            match event {
                Ok(event) => _ = events.insert(seq, event),
                Err(Outcome::Failed { reason }) => return Err(self.unreadable(&reason)),
                Err(_) => {} // there is none
            }
        }
        Ok(events)
    }

    /// Why no row can be read; None = rows can be read.
    pub fn problem(&self) -> Option<String> {
        let nothing = || self.fetch(&[], 0, &mut Vec::new());
        let tried = txn::attempt(|| {
            self.as_owner(&[PATIENT], nothing)?;
            self.keys(&[], true).map(drop).map_err(|error| error.message)
        });
        tried.err().map(|why| self.unreadable(&why).message)
    }

    /// The OID of the type of an expression over one row; an error if it is invalid. For outbox_source_set.
    pub fn type_of(&self, expression: &str) -> Result<u32, String> {
        // WHERE allows no aggregate and no set-returning function, which would change the number of rows.
        let where_it_is = format!("select from {} as r where (({expression}\n)) is null", self.relation);
        let what = format!("select ({expression}\n) from {} as r limit 0", self.relation);
        let ask = || {
            Spi::connect_mut(|client| {
                client.prepare_mut(where_it_is.as_str(), &[])?;
                let rows = client.update(what.as_str(), None, &[])?;
                Ok(rows.column_type_oid(1)?.value().to_u32())
            })
            .map_err(|error: SpiError| error.to_string())
        };
        txn::attempt(|| self.as_owner(&[PATIENT], ask))
    }

    /// Whether rows can no longer be found by their seq.
    pub fn seq_is_lost(&self) -> bool {
        self.type_of(self.mapping[SEQ].as_deref().unwrap_or_default()).is_err()
    }

    /// Whether a lookup of an event uses an index.
    pub fn is_read_by_index(&self) -> Result<bool, String> {
        let sql = self.events_sql("'{1}'::int8[]");
        let ask = || {
            let plan: SpiResult<Vec<Option<String>>> = Spi::connect_mut(|client| {
                let rows = client.update(format!("explain {sql}").as_str(), None, &[])?;
                rows.map(|row| row.get(1)).collect()
            });
            let plan = plan.map_err(|error| error.to_string())?;
            Ok(!plan.into_iter().flatten().any(|line| line.contains("Seq Scan on ")))
        };
        txn::attempt(|| self.as_owner(&[PATIENT], ask))
    }

    // ---- both -------------------------------------------------------------------------------------------------------

    /// The events of these seqs, which are in order. It stops after `bytes_max`, but not before the first: what it does
    /// not return is not read.
    fn read_events(&self, seqs: &[i64], bytes_max: usize, reader: Reader) -> Result<Events, String> {
        let begun = Instant::now();
        let size = |(_, event): &(i64, Result<Event, Outcome>)| event.as_ref().map_or(0, Event::body_bytes);
        let bytes = |rows: &[_]| rows.iter().map(size).sum::<usize>();
        let is_enough = |rows: &[_]| {
            let is_late = reader == Reader::Worker && begun.elapsed() >= PATIENCE && !rows.is_empty();
            bytes(rows) >= bytes_max.max(1) || is_late
        };
        let fetch = |piece: &[i64], before: &[_], rows: &mut Vec<_>| {
            let left = bytes_max.saturating_sub(bytes(before));
            self.fetch(piece, left, rows)
        };
        let Pieces { rows, failed, seqs } = self.read_in_pieces(seqs, reader, fetch, is_enough)?;
        let mut events = Events::new();
        for (seq, event) in rows {
            if events.insert(seq, event).is_some() {
                let reason = format!("{} has more than one row with seq {seq}", self.relation);
                events.insert(seq, Err(Outcome::Failed { reason }));
            }
        }
        let failed = failed
            .into_iter()
            .map(|(seq, reason)| (seq, Err(Outcome::Failed { reason })));
        events.extend(failed);
        for seq in seqs {
            let reason = || format!("{} has no row with seq {seq}", self.relation);
            let missing = || Err(Outcome::Unsendable { reason: reason() });
            events.entry(seq).or_insert_with(missing);
        }
        Ok(events)
    }

    /// Reads piece by piece; where a piece fails it is halved, until the row that is to blame stands alone. `read` adds
    /// rows in order of seq, and returns false if it did not come to the end; it gets the rows of earlier pieces, too.
    /// An error: nothing can be read, or the process or the session is to end.
    fn read_in_pieces<T>(
        &self,
        seqs: &[i64],
        reader: Reader,
        read: impl Fn(&[i64], &[(i64, T)], &mut Vec<(i64, T)>) -> Result<bool, String>,
        is_enough: impl Fn(&[(i64, T)]) -> bool,
    ) -> Result<Pieces<T>, String> {
        let attempt = |piece: &[i64], before: &[(i64, T)], rows: &mut Vec<(i64, T)>| {
            let settings = match reader {
                Reader::Worker => {
                    txn::limit_statements(READ_MS);
                    &[PATIENT][..]
                }
                Reader::Session | Reader::Caller(_) => &[],
            };
            let role = match reader {
                Reader::Caller(role) => Some(role),
                Reader::Worker | Reader::Session => None,
            };
            txn::attempt(|| self.as_role(role, settings, || read(piece, before, rows)))
        };
        let (mut done, mut is_readable) = (Pieces::default(), false);
        let mut pieces: Vec<&[i64]> = match seqs {
            [] => vec![seqs],
            seqs => seqs.chunks(PIECE).rev().collect(),
        };
        while let Some(piece) = pieces.pop() {
            if is_enough(&done.rows) {
                break;
            }
            let mut rows = Vec::new();
            let ended = attempt(piece, &done.rows, &mut rows);
            // Rows come in order of seq, so each seq up to the last is known to exist or to be missing.
            let known = match (&ended, rows.last()) {
                (Ok(true), _) => piece.len(),
                (_, Some((last, _))) => piece.partition_point(|seq| seq <= last),
                (_, None) => 0,
            };
            let (read, rest) = piece.split_at(known);
            done.rows.extend(rows);
            done.seqs.extend(read);
            let Err(reason) = ended else { continue };
            let must_end = match reader {
                Reader::Worker => signals::is_shutdown_requested(),
                Reader::Session | Reader::Caller(_) => reason.ends_with(CANCELED),
            };
            if piece.is_empty() || must_end {
                return Err(reason);
            }
            if !is_readable {
                attempt(&[], &[], &mut Vec::new())?;
                is_readable = true;
            }
            match rest {
                [] => {}
                [seq] if known == 0 => done.failed.push((*seq, reason)),
                rest if known > 0 => pieces.push(rest),
                rest => {
                    let (first, second) = rest.split_at(rest.len() / 2);
                    pieces.extend([second, first]);
                }
            }
        }
        Ok(done)
    }

    fn as_owner<T>(&self, settings: &[SessionSetting], body: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
        self.as_role(None, settings, body)
    }

    /// Runs user code as a role; None = the owner.
    fn as_role<T>(
        &self,
        role: Option<u32>,
        settings: &[SessionSetting],
        body: impl FnOnce() -> Result<T, String>,
    ) -> Result<T, String> {
        let settings: Vec<_> = [TEXTS, &SETTINGS, settings].concat();
        let read = || {
            // Checked each time: by now another role may own a relation with that name, without these expressions.
            match catalog::hold_relation(&self.name.0, &self.name.1) {
                Some(owner) if owner != self.owner => {
                    Err("it belongs to another role than when it was set (SQLSTATE 42501)".into())
                }
                Some(owner) if catalog::is_superuser(owner) => Err("its owner is a superuser (SQLSTATE 42501)".into()),
                Some(owner) => security::run_restricted_as(role.unwrap_or(owner), body),
                None => Err("it does not exist (SQLSTATE 42P01)".into()),
            }
        };
        txn::read_only(|| guc::with(&settings, read))
    }

    fn unreadable(&self, why: &str) -> UserError {
        UserError::new(
            PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
            format!("the source {} cannot be read: {why}", self.relation),
            "Fix it, or call outbox_source_set() again for the same relation.",
        )
    }

    /// The events of these seqs. One seq after the other, in the given order. ORDER BY would copy all events into a sort,
    /// and beyond work_mem into a file.
    fn events_sql(&self, seqs: &str) -> String {
        format!(
            "{} from pg_catalog.unnest({seqs}) as outbox_wanted (outbox_wanted_seq) cross join lateral {}",
            Self::columns_sql(),
            self.rows_sql("outbox_wanted.outbox_wanted_seq")
        )
    }

    /// The event with this seq.
    fn event_sql(&self, seq: &str) -> String {
        format!("{} from {}", Self::columns_sql(), self.rows_sql(seq))
    }

    fn columns_sql() -> String {
        let text = |column: EventColumn| match (column.kind, column.is_required) {
            (event::ColumnKind::Json, true) => format!("coalesce(x.outbox_{}, 'null')", column.name),
            _ => format!("x.outbox_{}", column.name),
        };
        let created_at = created_at_sql("x.outbox_created_at").join(", ");
        format!("select x.outbox_seq, {}, {created_at}", COLUMNS.map(text).join(", "))
    }

    /// The rows `x` with this seq. OFFSET 0 keeps the planner from another join, and from evaluating an expression twice. The
    /// names are those of no column.
    fn rows_sql(&self, seq: &str) -> String {
        let columns: Vec<String> = (PARTS[..KEY].iter().enumerate())
            .map(|(part, (name, kind))| format!("{} as outbox_{name}", self.column(part, *kind)))
            .collect();
        format!(
            "(select {} from {} as r where {} = {seq} offset 0) x",
            columns.join(", "),
            self.relation,
            self.expression(SEQ)
        )
    }

    /// Planned once per backend while the source stays the same, also if it is read again in each transaction.
    fn keys_statement(&self, client: &SpiClient, with_types: bool) -> SpiResult<Rc<SavedStatement>> {
        thread_local! {
            static KNOWN: RefCell<Option<KeyStatements>> = const { RefCell::new(None) };
        }
        KNOWN.with_borrow_mut(|known| {
            let of = (&self.relation, &self.mapping);
            if known
                .as_ref()
                .is_none_or(|known| (&known.relation, &known.mapping) != of)
            {
                *known = None;
            }
            let known = known.get_or_insert_with(|| KeyStatements {
                relation: self.relation.clone(),
                mapping: self.mapping.clone(),
                prepared: Default::default(),
            });
            let prepared = &known.prepared[usize::from(with_types)];
            if let Some(statement) = prepared.get() {
                return Ok(Rc::clone(statement));
            }
            let statement = client.prepare_mut(self.keys_sql(with_types).as_str(), &[INT8ARRAYOID])?;
            Ok(Rc::clone(prepared.get_or_init(|| Rc::new(statement.into()))))
        })
    }

    fn keys_sql(&self, with_types: bool) -> String {
        let [aggregate_type, id, key, kind] =
            [AGGREGATE[0], AGGREGATE[1], KEY, TYPE].map(|part| start_sql(&self.column(part, PartKind::Text)));
        let kind = if with_types { &kind } else { "null::text" };
        format!(
            "select {}, {aggregate_type}, {id}, {key}, {kind} from {} as r where {} = any ($1)",
            self.column(SEQ, PartKind::Seq),
            self.relation,
            self.expression(SEQ)
        )
    }

    /// The line feed ends a comment in the expression.
    fn expression(&self, part: usize) -> String {
        format!("({}\n)", self.mapping[part].as_deref().unwrap_or("null"))
    }

    fn column(&self, part: usize, kind: PartKind) -> String {
        let (name, _) = PARTS[part];
        let expression = match (&self.mapping[part], name) {
            (None, "id") => self.expression(SEQ),
            (None, "payload") => "r.*".into(),
            (None, _) => return "null::text".into(),
            _ => self.expression(part),
        };
        match kind {
            PartKind::Seq => format!("{expression}::int8"),
            PartKind::Text => format!("{expression}::text"),
            PartKind::Json => format!("to_json({expression})::text"),
            PartKind::Time => format!("{expression}::timestamptz"),
        }
    }
}

/// The result of a row, with its seq.
fn event_of(row: &SpiHeapTupleData) -> SpiResult<(i64, Result<Event, Outcome>)> {
    let seq: i64 = row.get(1)?.unwrap_or_default();
    let event = match parts_of(row, seq) {
        Ok(event) => event.and_then(|event| check(&event).map(|()| event)),
        Err(SpiError::Unreadable { column, why }) => {
            let part = match column {
                1 => "seq",
                column => COLUMNS
                    .get(column - FIRST_COLUMN)
                    .map_or("created_at", |column| column.name),
            };
            Err(format!("its {part} cannot be read: {why}"))
        }
        Err(error) => return Err(error),
    };
    Ok((seq, event.map_err(|reason| Outcome::Failed { reason })))
}

/// The ordinal of the first column after seq in `events_sql`.
const FIRST_COLUMN: usize = 2;

fn parts_of(row: &SpiHeapTupleData, seq: i64) -> SpiResult<Result<Event, String>> {
    let type_of = FIRST_COLUMN + 1;
    for (part, ordinal) in [
        ("type", type_of),
        ("created_at", crate::event::created_at(FIRST_COLUMN)),
    ] {
        if row.get::<Lossy>(ordinal)?.is_none() {
            return Ok(Err(format!("its {part} is NULL in the source")));
        }
    }
    crate::event::read(row, FIRST_COLUMN, seq).map(Ok)
}

/// The errors that outbox_publish would raise for this event.
fn check(event: &Event) -> Result<(), String> {
    event.check_short_columns().map_err(|refusal| refusal.message)?;
    check_body(event.body_bytes() as i64).map_err(|error| error.message)
}
