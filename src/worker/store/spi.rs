//! Runs the statements of the worker protocol through SPI. Each is planned once.

use super::claimed::ClaimedRows;
use super::published::PublishedRows;
use crate::pg::clock::us_since_1970;
use crate::pg::spi::types;
use crate::pg::spi::{Number, Param, Spi, SpiError, SpiHeapTupleData, SpiResult, SpiTupleTable};
use crate::store::source::Source;
use crate::store::statement::SavedStatement;
use outbox_core::engine::{ClaimLimits, Claimed, Events, Lane, RowId, Settlement};
use outbox_worker::protocol::{Arg, ClaimedBatch, Db, ResultRow, Statement};
use pgrx::datum::TimestampWithTimeZone;
use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

#[derive(Default)]
pub struct SpiDb {
    /// The prepared statements, by their text, or the name of the function of a claim.
    prepared: RefCell<HashMap<String, Rc<SavedStatement>>>,
    /// None: not used yet.
    published: RefCell<Option<Rc<PublishedRows>>>,
    claimed: RefCell<Option<Rc<ClaimedRows>>>,
    /// Where events are read from, if not from outbox_events.
    pub source: RefCell<Option<Rc<Source>>>,
}

impl SpiDb {
    fn prepared(
        &self,
        sql: &str,
        plan: impl FnOnce(&str) -> SpiResult<SavedStatement>,
    ) -> SpiResult<Rc<SavedStatement>> {
        let mut prepared = self.prepared.borrow_mut();
        if let Some(known) = prepared.get(sql) {
            return Ok(Rc::clone(known));
        }
        let statement = Rc::new(plan(sql)?);
        prepared.insert(sql.to_owned(), Rc::clone(&statement));
        Ok(statement)
    }

    /// Prepares all statements again. Called after a failure: an update of the extension may have replaced what the
    /// body of a claim calls.
    pub fn forget(&self) {
        self.prepared.borrow_mut().clear();
        self.published.take();
        self.claimed.take();
    }

    /// Events of the source, which are in the order of their seqs; an error is raised if none can be read. None: no
    /// source is set.
    pub fn events(&self, seqs: &[i64], bytes: usize) -> Option<Events> {
        let source = self.source.borrow().clone()?;
        Some(source.read(seqs, bytes).unwrap_or_else(|error| error.raise()))
    }

    /// Runs a query.
    pub fn read<T>(&self, sql: &str, read: impl FnOnce(SpiTupleTable) -> SpiResult<T>) -> SpiResult<T> {
        Spi::connect_mut(|client| {
            let statement = self.prepared(sql, |sql| Ok(client.prepare_mut(sql, &[])?.into()))?;
            read(client.update(&**statement, None, &[])?)
        })
    }
}

impl Db for SpiDb {
    type Error = SpiError;
    type ResultRow<'a> = SpiHeapTupleData<'a>;
    const CLAIM_UNLEASED: &'static str = "claim_unleased";
    const COMMITS_EACH: bool = false;
    const SETTLE: &'static str = "select outbox_internal.settle($1, $2::tid[], $3, $4, $5, $6, $7::\"char\"[], $8, $9,
        $10)";

    fn settle_published(&self, worker: &str, batch: &[Settlement]) -> SpiResult<Option<usize>> {
        Spi::connect_mut(|client| {
            let published = opened(&self.published, || PublishedRows::open(client))?;
            published.settle(client, worker, batch)
        })
    }

    fn claim(
        &self,
        worker: &str,
        destination: &str,
        lanes: &[Lane],
        limits: ClaimLimits,
    ) -> SpiResult<Option<ClaimedBatch>> {
        Spi::connect_mut(|client| {
            let claimed = opened(&self.claimed, || ClaimedRows::open(client))?;
            claimed.claim(client, worker, destination, lanes, limits)
        })
    }

    fn check_source(&self, _: &str) -> SpiResult<()> {
        if let Some(source) = &*self.source.borrow() {
            source.check_before_claim().unwrap_or_else(|error| error.raise());
        }
        Ok(())
    }

    fn source_events(&self, _: &str, claimed: &[Claimed], bytes: usize) -> SpiResult<Option<Events>> {
        let seqs: Vec<i64> = claimed.iter().map(|row| row.pointer.seq).collect();
        Ok(self.events(&seqs, bytes))
    }

    fn run<T>(
        &self,
        statement: Statement,
        args: &[Arg],
        mut read: impl FnMut(&SpiHeapTupleData) -> SpiResult<T>,
    ) -> SpiResult<Vec<T>> {
        let types = || args.iter().map(type_of).collect::<Vec<_>>();
        let params: Vec<Param> = args.iter().map(param).collect();
        Spi::connect_mut(|client| {
            let prepare = |sql: &str| Ok(client.prepare_mut(sql, &types())?.into());
            let prepared = match statement {
                Statement::Text(sql) => self.prepared(sql, prepare)?,
                Statement::Claim(function) => {
                    self.prepared(function, |function| prepare(&call(function, args.len())))?
                }
            };
            let rows = client.update(&**prepared, None, &params)?;
            rows.map(|row| read(&row)).collect()
        })
    }
}

/// What is known, or what `open` returns, which is then known.
fn opened<T>(known: &RefCell<Option<Rc<T>>>, open: impl FnOnce() -> SpiResult<T>) -> SpiResult<Rc<T>> {
    if let Some(known) = &*known.borrow() {
        return Ok(Rc::clone(known));
    }
    let opened = Rc::new(open()?);
    known.replace(Some(Rc::clone(&opened)));
    Ok(opened)
}

/// The statement that calls a function of a claim.
fn call(function: &str, args: usize) -> String {
    let args: Vec<String> = (1..=args).map(|n| format!("${n}")).collect();
    format!("select * from outbox_internal.{function}({})", args.join(", "))
}

fn type_of(arg: &Arg) -> types::Oid {
    match arg {
        Arg::Text(_) => types::TEXTOID,
        Arg::Bytes(_) => types::BYTEAOID,
        Arg::SmallInt(_) => types::INT2OID,
        Arg::Int(_) => types::INT4OID,
        Arg::BigInt(_) => types::INT8OID,
        Arg::Texts(_) | Arg::Reasons(_) => types::TEXTARRAYOID,
        Arg::SmallInts(_) => types::INT2ARRAYOID,
        Arg::Ints(_) => types::INT4ARRAYOID,
        Arg::BigInts(_) => types::INT8ARRAYOID,
        Arg::RowIds(_) => types::TIDARRAYOID,
    }
}

fn param<'a>(arg: &Arg<'a>) -> Param<'a> {
    match arg {
        Arg::Text(text) => (*text).into(),
        Arg::Bytes(bytes) => Param::bytes(*bytes),
        Arg::SmallInt(number) => (*number).into(),
        Arg::Int(number) => (*number).into(),
        Arg::BigInt(number) => (*number).into(),
        Arg::Texts(texts) | Arg::Reasons(texts) => Param::texts(texts.iter().copied()),
        Arg::SmallInts(numbers) => numbers.clone().into(),
        Arg::Ints(numbers) => numbers.clone().into(),
        Arg::BigInts(numbers) => numbers.clone().into(),
        Arg::RowIds(row_ids) => Param::row_ids(row_ids),
    }
}

impl ResultRow for SpiHeapTupleData<'_> {
    type Error = SpiError;

    fn text(&self, column: usize) -> SpiResult<Option<String>> {
        self.get(column + 1)
    }

    fn texts(&self, column: usize) -> SpiResult<Vec<String>> {
        Ok(self.get(column + 1)?.unwrap_or_default())
    }

    fn boolean(&self, column: usize) -> SpiResult<bool> {
        Ok(self.get(column + 1)?.unwrap_or_default())
    }

    fn number(&self, column: usize) -> SpiResult<Option<i64>> {
        Ok(self.get::<Number>(column + 1)?.map(|Number(number)| number))
    }

    fn time_us(&self, column: usize) -> SpiResult<Option<i64>> {
        Ok(self.get::<TimestampWithTimeZone>(column + 1)?.map(us_since_1970))
    }

    fn row_id(&self, column: usize) -> SpiResult<RowId> {
        Ok(self.get(column + 1)?.unwrap_or_default())
    }

    fn unreadable(error: SpiError) -> SpiResult<String> {
        match error {
            SpiError::Unreadable { why, .. } => Ok(why.to_string()),
            error => Err(error),
        }
    }

    /// A panic here becomes an ERROR.
    fn unexpected(what: &str) -> SpiError {
        panic!("unexpected result of a function of the extension: {what}")
    }
}
