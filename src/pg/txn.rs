//! Runs a transaction in a worker, on its main thread. It replaces pgrx's function, which commits half-done work if its
//! closure catches an error. That one also lets an ERROR end the worker.

use super::ending::{disable_timeout, enable_timeout_after};
use super::{report, signals, stat};
use pgrx::pg_sys::panic::{CaughtError, ErrorReportWithLevel};
use pgrx::{PgSqlErrorCode, PgTryBuilder, pg_sys};
use std::cell::Cell;
use std::ffi::CStr;
use std::panic::AssertUnwindSafe;
use std::time::{Duration, Instant};

pub use super::guc::{set_for_session, set_locally};

/// The reason of a rollback.
#[derive(Debug)]
pub struct TransactionFailure {
    pub message: String,
    /// Whether a lock timeout was the cause.
    pub locked: bool,
}

/// How durable the commit must be when `run` returns. No value waits for a standby: a standby that is down would delay
/// the worker, also at its end. If a promoted standby lacks a commit, the messages are only sent again.
#[derive(Clone, Copy, PartialEq)]
pub enum Durability {
    /// On the disk of this server when `run` returns.
    Full,
    /// Later on disk. A crash may undo the commit, which only repeats work.
    Relaxed,
}

// From utils/timeout.h, which the bindings leave out. The id is the same in PG 13 to 19.
const STATEMENT_TIMEOUT: i32 = 3;

thread_local! {
    /// The deadline that `limit_statements` set last.
    static LIMIT: Cell<Option<Instant>> = const { Cell::new(None) };
}

/// Runs `body` in a transaction with a snapshot, commits, and reports to the statistics. An ERROR inside, or an Err of
/// `body`, rolls back and is returned; the caller logs it. `what` is shown in pg_stat_activity. `statement_timeout` has
/// no effect in a worker, so this code sets the timer.
pub fn run<T>(
    what: &CStr,
    timeout_ms: i32,
    durability: Durability,
    body: impl FnOnce() -> Result<T, String>,
) -> Result<T, TransactionFailure> {
    signals::in_transaction(true);
    if signals::ends_first() {
        signals::in_transaction(false);
        let message = "the worker is ending".to_owned();
        return Err(TransactionFailure { message, locked: false });
    }
    stat::running(what);
    let result = PgTryBuilder::new(AssertUnwindSafe(|| {
        // SAFETY: main thread of a connected worker, with no open transaction: the usual sequence of a worker.
        unsafe {
            pg_sys::SetCurrentStatementStartTimestamp();
            pg_sys::StartTransactionCommand();
            pg_sys::PushActiveSnapshot(pg_sys::GetTransactionSnapshot());
            limit_statements(timeout_ms);
            let wait_for = match durability {
                Durability::Full => c"local",
                Durability::Relaxed => c"off",
            };
            set_locally(c"synchronous_commit", wait_for);
        }
        let value = body().map_err(|message| TransactionFailure { message, locked: false })?;
        // SAFETY: ends what the sequence above began.
        unsafe {
            disable_timeout(STATEMENT_TIMEOUT, false);
            pg_sys::PopActiveSnapshot();
            pg_sys::CommitTransactionCommand();
        }
        Ok(value)
    }))
    .catch_others(|caught| Err(failure_of(&caught)))
    .catch_rust_panic(|caught| Err(failure_of(&caught)))
    .execute();
    signals::in_transaction(false);
    if result.is_err() {
        // SAFETY: an error left the transaction open. The call closes it in any state.
        unsafe {
            disable_timeout(STATEMENT_TIMEOUT, false);
            pg_sys::AbortCurrentTransaction();
        }
    }
    stat::flush();
    stat::idle();
    result
}

/// Runs `body` in a subtransaction. An ERROR inside, or an Err of `body`, rolls the subtransaction back and is returned
/// as text; the text of an ERROR has its SQLSTATE. The transaction goes on.
pub fn attempt<T>(body: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    // SAFETY: inside a transaction, on the main thread: what a block of PL/pgSQL with an exception clause does
    // (exec_stmt_block in pl_exec.c).
    unsafe {
        let (context, owner) = (pg_sys::CurrentMemoryContext, pg_sys::CurrentResourceOwner);
        pg_sys::BeginInternalSubTransaction(std::ptr::null());
        pg_sys::MemoryContextSwitchTo(context);
        let result = PgTryBuilder::new(AssertUnwindSafe(body))
            .catch_others(|caught| Err(text_of(&caught)))
            .catch_rust_panic(|caught| Err(text_of(&caught)))
            .execute();
        match result {
            Ok(_) => pg_sys::ReleaseCurrentSubTransaction(),
            Err(_) => pg_sys::RollbackAndReleaseCurrentSubTransaction(),
        }
        pg_sys::MemoryContextSwitchTo(context);
        pg_sys::CurrentResourceOwner = owner;
        result
    }
}

/// Runs `body` with a snapshot, at the end of a transaction.
pub fn with_snapshot<T>(body: impl FnOnce() -> T) -> T {
    // SAFETY: inside a transaction. After an error the end of the (sub)transaction removes the snapshot.
    unsafe {
        pg_sys::PushActiveSnapshot(pg_sys::GetTransactionSnapshot());
        let value = body();
        pg_sys::PopActiveSnapshot();
        value
    }
}

/// Runs user code. An ERROR in it is raised with this DETAIL instead of its own.
pub fn with_detail<T>(detail: impl Fn() -> String, body: impl FnOnce() -> T) -> T {
    let detail = AssertUnwindSafe(detail);
    PgTryBuilder::new(AssertUnwindSafe(body))
        .catch_others(move |caught| {
            let (report, detail) = (report_of(&caught), &detail);
            report::raise(
                report.sql_error_code(),
                report.message(),
                Some(&(detail.0)()),
                report.hint(),
            )
        })
        .execute()
}

/// The message of an error with its SQLSTATE.
fn text_of(caught: &CaughtError) -> String {
    let report = report_of(caught);
    // MAKE_SQLSTATE in elog.h: six bits for each character.
    let code = report.sql_error_code() as i32;
    let sqlstate: String = (0..5)
        .map(|n| char::from(((code >> (6 * n)) & 0x3f) as u8 + b'0'))
        .collect();
    // Code that trapped the first cancel was ended by another one, which core reports as a user request.
    let is_canceled = report.sql_error_code() == PgSqlErrorCode::ERRCODE_QUERY_CANCELED;
    let message = match LIMIT.get() {
        Some(limit) if is_canceled && Instant::now() >= limit => "canceling statement due to statement timeout",
        _ => report.message(),
    };
    format!("{message} (SQLSTATE {sqlstate})")
}

/// Limits the total time of the statements of this transaction from now on, in ms.
pub fn limit_statements(timeout_ms: i32) {
    LIMIT.set(Some(Instant::now() + Duration::from_millis(timeout_ms as u64)));
    // SAFETY: main thread of a worker, inside `run`, which disables the timer.
    unsafe { enable_timeout_after(STATEMENT_TIMEOUT, timeout_ms) }
}

/// Runs `body`, which limits its statements, in a statement of a session. Then the limit of the session applies again,
/// as far as it is left. After an ERROR the end of the statement does that.
pub fn with_own_limit<T>(body: impl FnOnce() -> T) -> T {
    let begun = Instant::now();
    let value = body();
    LIMIT.set(None);
    // SAFETY: main thread, in a statement, whose end disables the timer. A variable of the server.
    unsafe {
        match u64::try_from(pg_sys::StatementTimeout) {
            Ok(limit_ms) if limit_ms > 0 => {
                let left = Duration::from_millis(limit_ms).saturating_sub(begun.elapsed());
                enable_timeout_after(STATEMENT_TIMEOUT, left.as_millis().max(1) as i32);
            }
            _ => disable_timeout(STATEMENT_TIMEOUT, false),
        }
    }
    value
}

fn report_of(caught: &CaughtError) -> &ErrorReportWithLevel {
    match caught {
        CaughtError::PostgresError(report) | CaughtError::ErrorReport(report) => report,
        CaughtError::RustPanic { ereport, .. } => ereport,
    }
}

fn failure_of(caught: &CaughtError) -> TransactionFailure {
    let report = report_of(caught);
    TransactionFailure {
        message: report.message().to_string(),
        locked: report.sql_error_code() == PgSqlErrorCode::ERRCODE_LOCK_NOT_AVAILABLE,
    }
}

/// Runs `body`, which can write nothing. Since version 16 the server sets transaction_read_only only for the rest of a
/// (sub)transaction, so this sets the variable behind it.
pub fn read_only<T>(body: impl FnOnce() -> T) -> T {
    // SAFETY: a plain flag of the server. After an error it is restored by the end of the subtransaction (xact.c), and
    // set again by the next transaction.
    unsafe {
        let before = pg_sys::XactReadOnly;
        pg_sys::XactReadOnly = true;
        let value = body();
        pg_sys::XactReadOnly = before;
        value
    }
}

/// A transaction id.
pub type Xid = pg_sys::TransactionId;

/// The WAL position that must be on disk for a committed transaction to be durable. 0 = its session waited for that.
/// It is also 0 for a transaction so old that its WAL was written long ago.
pub fn commit_position(xid: Xid) -> u64 {
    // SAFETY: the status of such a young transaction still exists: no setting lets the server remove it earlier.
    unsafe {
        let age = (pg_sys::ReadNextFullTransactionId().value as u32).wrapping_sub(xid.into_inner());
        if age > YOUNG_XIDS {
            return 0;
        }
        pg_sys::TransactionIdGetCommitLSN(xid)
    }
}

/// The age up to which a transaction is young, in transactions. autovacuum_freeze_max_age is at least 100,000.
const YOUNG_XIDS: u32 = 50_000;

/// Writes WAL to disk up to the last commit of this session. Returns the position up to which WAL is on disk.
pub fn flush_own_commits() -> u64 {
    // SAFETY: the position is that of a record of this session. A standby writes no WAL.
    unsafe {
        if !pg_sys::RecoveryInProgress() {
            pg_sys::XLogFlush(pg_sys::XactLastCommitEnd);
        }
        pg_sys::GetFlushRecPtr(std::ptr::null_mut())
    }
}

/// Waits until WAL is on disk up to `position`, or to the end of WAL. It returns at once if all producers commit
/// synchronously.
pub fn flush_wal(position: u64) {
    // SAFETY: the position was written; a later one would be an internal error. A standby writes no WAL.
    unsafe {
        if !pg_sys::RecoveryInProgress() {
            pg_sys::XLogFlush(position.min(pg_sys::GetXLogInsertRecPtr()));
        }
    }
}
