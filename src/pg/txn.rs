//! One way to run a transaction in a worker. pgrx's own commits half-done work when its closure catches an error, and
//! lets an ERROR end the worker.

use super::ending::{disable_timeout, enable_timeout_after};
use super::signals;
use super::{stat, text};
use pgrx::pg_sys::panic::{CaughtError, ErrorReportWithLevel};
use pgrx::{PgSqlErrorCode, PgTryBuilder, pg_sys};
use std::cell::Cell;
use std::ffi::CStr;
use std::panic::AssertUnwindSafe;
use std::time::{Duration, Instant};

/// Why a transaction was rolled back.
#[derive(Debug)]
pub struct Failure {
    pub message: String,
    /// Somebody held a lock for too long.
    pub locked: bool,
}

/// How durable the commit must be when `run` returns. None waits for a standby: one that is away would hold up the worker,
/// also at its end, and what a standby lacks when it is promoted is only sent again.
#[derive(Clone, Copy, PartialEq)]
pub enum Durability {
    /// On the disk of this server.
    Full,
    /// Soon: a crash may undo it, which only repeats work.
    Relaxed,
}

// From utils/timeout.h, which the bindings leave out. The id is the same in PG 13 to 18.
const STATEMENT_TIMEOUT: i32 = 3;

thread_local! {
    /// Until when statements may run, as `limit_statements` said last.
    static LIMIT: Cell<Option<Instant>> = const { Cell::new(None) };
}

/// Runs `body` in a transaction of its own with a snapshot, commits, and reports to the statistics. An ERROR inside, or
/// an Err of `body`, rolls back and is returned; it is the caller who logs it. `statement_timeout` does nothing in a worker, so the timer
/// is armed by hand.
pub fn run<T>(
    what: &CStr,
    timeout_ms: i32,
    durability: Durability,
    body: impl FnOnce() -> Result<T, String>,
) -> Result<T, Failure> {
    signals::in_transaction(true);
    if signals::ends_first() {
        signals::in_transaction(false);
        let message = "the worker is asked to end".to_owned();
        return Err(Failure { message, locked: false });
    }
    stat::running(what);
    let result = PgTryBuilder::new(AssertUnwindSafe(|| {
        // SAFETY: main thread of a connected worker, no transaction open: the usual sequence of a worker.
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
        let value = body().map_err(|message| Failure { message, locked: false })?;
        // SAFETY: balances the sequence above.
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
        // SAFETY: an error left the transaction open; this closes it whatever its state.
        unsafe {
            disable_timeout(STATEMENT_TIMEOUT, false);
            pg_sys::AbortCurrentTransaction();
        }
    }
    stat::flush();
    stat::idle();
    result
}

/// Runs `body` in a subtransaction. An ERROR inside, or an Err of `body`, undoes what it did and is returned in words, with
/// its SQLSTATE; the transaction goes on.
pub fn attempt<T>(body: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    // SAFETY: inside a transaction, on the main thread: what a block of PL/pgSQL with an exception clause does
    // (exec_stmt_block in pl_exec.c).
    unsafe {
        let (context, owner) = (pg_sys::CurrentMemoryContext, pg_sys::CurrentResourceOwner);
        pg_sys::BeginInternalSubTransaction(std::ptr::null());
        pg_sys::MemoryContextSwitchTo(context);
        let result = PgTryBuilder::new(AssertUnwindSafe(body))
            .catch_others(|caught| Err(in_words(&caught)))
            .catch_rust_panic(|caught| Err(in_words(&caught)))
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

fn in_words(caught: &CaughtError) -> String {
    let report = report_of(caught);
    // MAKE_SQLSTATE in elog.h: six bits a character.
    let code = report.sql_error_code() as i32;
    let sqlstate: String = (0..5)
        .map(|n| char::from(((code >> (6 * n)) & 0x3f) as u8 + b'0'))
        .collect();
    // Code that trapped the first cancel was ended by another one, of which core says that a user sent it.
    let is_canceled = report.sql_error_code() == PgSqlErrorCode::ERRCODE_QUERY_CANCELED;
    let message = match LIMIT.get() {
        Some(limit) if is_canceled && Instant::now() >= limit => "canceling statement due to statement timeout",
        _ => report.message(),
    };
    format!("{message} (SQLSTATE {sqlstate})")
}

/// From now on the statements of this transaction of a worker may take so long, together.
pub fn limit_statements(timeout_ms: i32) {
    LIMIT.set(Some(Instant::now() + Duration::from_millis(timeout_ms as u64)));
    // SAFETY: main thread of a worker, inside `run`, which takes the timer down.
    unsafe { enable_timeout_after(STATEMENT_TIMEOUT, timeout_ms) }
}

fn report_of(caught: &CaughtError) -> &ErrorReportWithLevel {
    match caught {
        CaughtError::PostgresError(report) | CaughtError::ErrorReport(report) => report,
        CaughtError::RustPanic { ereport, .. } => ereport,
    }
}

fn failure_of(caught: &CaughtError) -> Failure {
    let report = report_of(caught);
    Failure {
        message: report.message().to_string(),
        locked: report.sql_error_code() == PgSqlErrorCode::ERRCODE_LOCK_NOT_AVAILABLE,
    }
}

/// Sets a parameter for the rest of this transaction.
pub fn set_locally(name: &CStr, value: &CStr) {
    // SAFETY: inside a transaction; the setting goes back at its end.
    unsafe {
        pg_sys::set_config_option(
            name.as_ptr(),
            value.as_ptr(),
            pg_sys::GucContext::PGC_USERSET,
            pg_sys::GucSource::PGC_S_SESSION,
            pg_sys::GucAction::GUC_ACTION_LOCAL,
            true,
            0,
            false,
        );
    }
}

/// Sets a parameter for the rest of this worker's life, if this version of the server has it.
pub fn set_for_session(name: &str, value: &str) {
    let [name, value] = [name, value].map(text::to_c_string);
    // SAFETY: plain strings, which are copied; the values are ours.
    unsafe {
        if pg_sys::GetConfigOption(name.as_ptr(), true, false).is_null() {
            return;
        }
        pg_sys::SetConfigOption(
            name.as_ptr(),
            value.as_ptr(),
            pg_sys::GucContext::PGC_SUSET,
            pg_sys::GucSource::PGC_S_OVERRIDE,
        );
    }
}

/// The number of a transaction.
pub type Xid = pg_sys::TransactionId;

/// Up to where WAL must be on disk for a committed transaction to be durable. 0 = its session waited for that itself, or it
/// is so old that its WAL was written long ago.
pub fn commit_position(xid: Xid) -> u64 {
    // SAFETY: the status of a transaction so young is still there: no setting lets it be removed earlier.
    unsafe {
        let age = (pg_sys::ReadNextFullTransactionId().value as u32).wrapping_sub(xid.into_inner());
        if age > YOUNG_XIDS {
            return 0;
        }
        pg_sys::TransactionIdGetCommitLSN(xid)
    }
}

/// autovacuum_freeze_max_age is at least 100,000.
const YOUNG_XIDS: u32 = 50_000;

/// Waits until WAL is on disk up to `position`, or to its end. Nothing to do where every producer commits synchronously.
pub fn flush_wal(position: u64) {
    // SAFETY: a position that was written; a later one would be an internal error. A standby writes none.
    unsafe {
        if !pg_sys::RecoveryInProgress() {
            pg_sys::XLogFlush(position.min(pg_sys::GetXLogInsertRecPtr()));
        }
    }
}
