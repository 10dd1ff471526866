//! Runs the statements of the worker protocol in the session of a worker outside the server. Each is one transaction.
//! Used on the worker's thread, which waits for each result.

use super::error::{WorkError, no_answer, unexpected};
use crate::shutdown::Shutdown;
use outbox_core::engine::{Claimed, Events, RowId};
use outbox_core::event::COLUMNS;
use outbox_core::partition::Partition;
use outbox_worker::protocol::{Arg, Db, ResultRow, Statement, event_of_source, indexes};
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::future::Future;
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::time::{sleep, timeout};
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{self as postgres, Client};

/// The longest wait for a result, longer than statement_timeout. After it the session counts as lost.
const ANSWER: Duration = Duration::from_secs(45);
/// The longest wait for a result once the worker is to end.
const LAST_ANSWER: Duration = Duration::from_secs(5);

pub struct SessionDb {
    handle: Handle,
    client: Client,
    stop: Shutdown,
    statements: RefCell<HashMap<&'static str, postgres::Statement>>,
    /// A statement to send right after the next one, with its parameter; then its result.
    next: RefCell<Option<PipelinedStatement>>,
    /// Whether events are in a source, and whether none could be read last.
    pub has_source: Cell<bool>,
    is_source_broken: Cell<bool>,
}

enum PipelinedStatement {
    Send(postgres::Statement, Vec<i16>),
    Sent(Result<postgres::Row, postgres::Error>),
}

impl SessionDb {
    pub fn new(handle: Handle, client: Client, stop: Shutdown) -> Self {
        Self {
            handle,
            client,
            stop,
            statements: RefCell::default(),
            next: RefCell::default(),
            has_source: Cell::default(),
            is_source_broken: Cell::default(),
        }
    }

    fn wait_for<T>(&self, answer: impl Future<Output = Result<T, postgres::Error>>) -> Result<T, WorkError> {
        let is_late = async {
            _ = timeout(ANSWER - LAST_ANSWER, self.stop.requested()).await;
            sleep(LAST_ANSWER).await;
        };
        let answer = self.handle.block_on(async {
            tokio::select! {
                biased;
                answer = answer => Some(answer),
                () = is_late => None,
            }
        });
        Ok(answer.ok_or_else(no_answer)??)
    }

    /// Waits for this time, or until the worker is to end.
    pub fn pause(&self, limit: Duration) {
        _ = self
            .handle
            .block_on(async { timeout(limit, self.stop.requested()).await });
    }

    pub fn batch_execute(&self, sql: &str) -> Result<(), WorkError> {
        self.wait_for(self.client.batch_execute(sql))
    }

    /// Prepares a statement once for the session.
    fn prepared(&self, statement: Statement, args: &[Arg]) -> Result<postgres::Statement, WorkError> {
        let (Statement::Text(text) | Statement::Claim(text)) = statement;
        if let Some(known) = self.statements.borrow().get(text) {
            return Ok(known.clone());
        }
        let sql = match statement {
            Statement::Claim(function) => claim(function, args.len()),
            _ => text.to_owned(),
        };
        let types: Vec<Type> = args.iter().map(|arg| typed(arg).1).collect();
        let prepared = self.wait_for(self.client.prepare_typed(&sql, &types))?;
        self.statements.borrow_mut().insert(text, prepared.clone());
        Ok(prepared)
    }

    fn read_source(&self, worker: &str, claimed: &[Claimed], bytes: usize) -> Result<Events, WorkError> {
        let sql = Statement::Text("select e.* from outbox_internal.work_events($1, $2::tid[], $3) e");
        let args = [
            Arg::Text(Some(worker)),
            Arg::RowIds(claimed.iter().map(|row| row.row_id).collect()),
            Arg::BigInt(Some(bytes as i64)),
        ];
        let read = self.run(sql, &args, event_of_source);
        self.is_source_broken.set(read.is_err());
        Ok(read?.into_iter().collect())
    }

    /// Sends a statement together with the next one, and after it.
    pub fn query_next(&self, statement: Statement, partitions: &[Partition]) -> Result<(), WorkError> {
        let prepared = self.prepared(statement, &[indexes(partitions)])?;
        let partitions = partitions.iter().map(|partition| partition.as_i16()).collect();
        self.next.replace(Some(PipelinedStatement::Send(prepared, partitions)));
        Ok(())
    }

    /// Reads the one row of the statement that was sent with the last one.
    pub fn take_next<T>(&self, read: impl FnOnce(&SessionRow) -> Result<T, WorkError>) -> Result<T, WorkError> {
        match self.next.take() {
            Some(PipelinedStatement::Sent(answer)) => read(&SessionRow(answer?)),
            _ => Err(no_answer()),
        }
    }
}

/// The statement that calls a function of a claim. Its columns are those of outbox_internal.claimed, without the texts
/// of a message that has an unreadable one: a text that cannot be converted to UTF-8 would make the statement fail. A
/// commit with synchronous_commit off is visible before it is on disk, so the statement waits for the disk.
fn claim(function: &str, args: usize) -> String {
    let args: Vec<String> = (1..=args).map(|n| format!("${n}")).collect();
    let readable = |column: &str| format!("case when u.why is null then c.{column} end");
    format!(
        "select c.tid::text, c.seq, c.partition, {}, c.attempts, c.crashes, c.claim_token, c.replayed,
                (extract(epoch from c.enqueued_at) * 1000000)::bigint, (extract(epoch from c.expires_at) * 1000000)::bigint,
                c.wal_position, coalesce(c.remark, u.why), null, {}, c.created_at, c.created_at_s
         from outbox_internal.{function}({}) c
         cross join lateral (select outbox_internal.unreadable(c.key, c) as why offset 0) u
         where outbox_internal.is_on_disk(coalesce(c.wal_position, 0))",
        readable("key"),
        COLUMNS.map(|column| readable(column.name)).join(", "),
        args.join(", ")
    )
}

impl Db for SessionDb {
    type Error = WorkError;
    type ResultRow<'a> = SessionRow;
    const CLAIM_UNLEASED: &'static str = "work_claim_unleased";
    const COMMITS_EACH: bool = true;
    const SETTLE: &'static str = "select outbox_internal.work_settle($1, $2::tid[], $3, $4, $5, $6, $7::\"char\"[], $8,
        array(select outbox_internal.of_utf8(r) from unnest($9) with ordinality u (r, i) order by i), $10, $11)";

    fn check_source(&self, worker: &str) -> Result<(), WorkError> {
        match self.is_source_broken.get() {
            true => self.read_source(worker, &[], 0).map(drop),
            false => Ok(()),
        }
    }

    fn source_events(&self, worker: &str, claimed: &[Claimed], bytes: usize) -> Result<Option<Events>, WorkError> {
        let read = || self.read_source(worker, claimed, bytes);
        self.has_source.get().then(read).transpose()
    }

    fn run<T>(
        &self,
        statement: Statement,
        args: &[Arg],
        mut read: impl FnMut(&SessionRow) -> Result<T, WorkError>,
    ) -> Result<Vec<T>, WorkError> {
        let prepared = self.prepared(statement, args)?;
        let params: Vec<_> = args.iter().map(typed).collect();
        let params: Vec<&(dyn ToSql + Sync)> = params.iter().map(|(param, _)| &**param as _).collect();
        let query = self.client.query(&prepared, &params);
        let next = (self.next.borrow_mut()).take_if(|next| matches!(next, PipelinedStatement::Send(..)));
        let rows = match &next {
            Some(PipelinedStatement::Send(then, partitions)) => {
                let partitions: [&(dyn ToSql + Sync); 1] = [partitions];
                self.wait_for(async {
                    // Both are sent before either result is here, in this order: the one that is polled first is sent
                    // first.
                    let (rows, then) = tokio::join!(biased; query, self.client.query_one(then, &partitions));
                    self.next.replace(Some(PipelinedStatement::Sent(then)));
                    rows
                })?
            }
            _ => self.wait_for(query)?,
        };
        rows.into_iter().map(|row| read(&SessionRow(row))).collect()
    }
}

/// An argument as a parameter, and its type.
fn typed<'a>(arg: &'a Arg) -> (Box<dyn ToSql + Sync + 'a>, Type) {
    match arg {
        Arg::Text(text) => (Box::new(text), Type::TEXT),
        Arg::Bytes(bytes) => (Box::new(bytes), Type::BYTEA),
        Arg::SmallInt(number) => (Box::new(number), Type::INT2),
        Arg::Int(number) => (Box::new(number), Type::INT4),
        Arg::BigInt(number) => (Box::new(number), Type::INT8),
        Arg::Texts(texts) => (Box::new(texts), Type::TEXT_ARRAY),
        Arg::Reasons(texts) => {
            let texts: Vec<_> = texts.iter().map(|text| text.map(str::as_bytes)).collect();
            (Box::new(texts), Type::BYTEA_ARRAY)
        }
        Arg::SmallInts(numbers) => (Box::new(numbers), Type::INT2_ARRAY),
        Arg::Ints(numbers) => (Box::new(numbers), Type::INT4_ARRAY),
        Arg::BigInts(numbers) => (Box::new(numbers), Type::INT8_ARRAY),
        Arg::RowIds(row_ids) => {
            let tids: Vec<String> = row_ids.iter().map(RowId::to_string).collect();
            (Box::new(tids), Type::TEXT_ARRAY)
        }
    }
}

pub struct SessionRow(postgres::Row);

impl SessionRow {
    pub fn bigints(&self, column: usize) -> Result<Vec<i64>, WorkError> {
        Ok(self.0.try_get(column)?)
    }
}

impl ResultRow for SessionRow {
    type Error = WorkError;

    fn text(&self, column: usize) -> Result<Option<String>, WorkError> {
        Ok(self.0.try_get(column)?)
    }

    fn texts(&self, column: usize) -> Result<Vec<String>, WorkError> {
        Ok(self.0.try_get::<_, Option<_>>(column)?.unwrap_or_default())
    }

    fn boolean(&self, column: usize) -> Result<bool, WorkError> {
        Ok(self.0.try_get::<_, Option<_>>(column)?.unwrap_or_default())
    }

    fn number(&self, column: usize) -> Result<Option<i64>, WorkError> {
        Ok(match *self.0.columns()[column].type_() {
            Type::INT2 => self.0.try_get::<_, Option<i16>>(column)?.map(i64::from),
            Type::INT4 => self.0.try_get::<_, Option<i32>>(column)?.map(i64::from),
            _ => self.0.try_get(column)?,
        })
    }

    fn time_us(&self, column: usize) -> Result<Option<i64>, WorkError> {
        self.number(column)
    }

    /// Reads `(block,line)`.
    fn row_id(&self, column: usize) -> Result<RowId, WorkError> {
        let tid = self.name(column)?;
        tid.parse().map_err(|()| unexpected(&format!("the ctid {tid}")))
    }

    fn unreadable(error: WorkError) -> Result<String, WorkError> {
        Err(error)
    }

    fn unexpected(what: &str) -> WorkError {
        unexpected(what)
    }
}
