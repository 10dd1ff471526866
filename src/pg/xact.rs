//! End of a transaction: one permanent callback. (pgrx's `register_xact_callback` survives PREPARE TRANSACTION and then
//! fires at an unrelated commit.)

use super::major;
use pgrx::{PgTryBuilder, pg_guard, pg_sys};
use std::ffi::c_void;
use std::sync::OnceLock;

// From access/twophase.h, which the bindings leave out.
unsafe extern "C" {
    static max_prepared_xacts: std::ffi::c_int;
}

// Core's function itself, which cannot raise: each publish calls it, and the binding would save the state for an error.
unsafe extern "C-unwind" {
    #[allow(non_snake_case)] // core's name
    fn IsInParallelMode() -> bool;
}

/// What became of the transaction, or of the savepoint with this number.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum End {
    /// About to commit. Nothing of ours may raise: the transaction would not commit.
    Committing,
    /// Committed and already visible. No allocation, log or error from here on.
    Committed,
    /// Rolled back. A parallel worker ends like this in any case: the leader's transaction is not over.
    Aborted,
    /// About to be prepared; may still fail, and raise.
    Preparing,
    /// Set aside for COMMIT PREPARED, which may happen in another session, or never.
    Prepared,
    SavepointReleased {
        id: u32,
        into: u32,
    },
    SavepointAborted {
        id: u32,
    },
}

/// Runs `body`, at the end of a transaction that shall commit whatever becomes of it. It must change nothing that an
/// error would have to undo.
pub fn ignore_errors_at_commit(body: impl FnOnce() + std::panic::UnwindSafe) {
    PgTryBuilder::new(body)
        .catch_others(|_| {})
        .catch_rust_panic(|_| {})
        .execute();
}

type Callback = fn(End);
static CALLBACK: OnceLock<Callback> = OnceLock::new();

/// Calls `callback` at the end of every transaction and savepoint of this process. Once, from `_PG_init`.
pub fn on_end(callback: Callback) {
    let _ = CALLBACK.set(callback);
    // SAFETY: the functions stay loaded for the life of the process.
    unsafe {
        pg_sys::RegisterXactCallback(Some(xact), std::ptr::null_mut());
        pg_sys::RegisterSubXactCallback(Some(subxact), std::ptr::null_mut());
    }
}

/// The number of the current (sub)transaction.
pub fn current_savepoint() -> u32 {
    // SAFETY: reads a static of the server.
    unsafe { pg_sys::GetCurrentSubTransactionId() }
}

/// Whether this transaction's COMMIT will return when it is on disk.
pub fn commits_durably() -> bool {
    // SAFETY: reads a setting of the server.
    unsafe { pg_sys::synchronous_commit > pg_sys::SyncCommitLevel::SYNCHRONOUS_COMMIT_OFF as i32 }
}

/// Whether the catalogs can be asked now.
pub fn is_in_transaction() -> bool {
    // SAFETY: reads a static of the server.
    unsafe { pg_sys::IsTransactionState() }
}

/// Whether a parallel operation is in progress, in its leader or in a parallel worker.
pub fn is_in_parallel_mode() -> bool {
    // SAFETY: reads a static of the server.
    unsafe { IsInParallelMode() }
}

/// Whether this server is a standby: no transaction of it writes.
pub fn is_in_recovery() -> bool {
    // SAFETY: reads a static of the server, and its shared memory until recovery is over.
    unsafe { pg_sys::RecoveryInProgress() }
}

/// Raises the server's own error where this transaction may not write.
pub fn refuse_if_read_only() {
    // SAFETY: inside a transaction.
    unsafe { pg_sys::PreventCommandIfReadOnly(c"INSERT".as_ptr()) }
}

/// Learns now what other transactions have committed to tables whose cache entries they invalidated.
pub fn accept_invalidations() {
    // SAFETY: inside a transaction, where core does it at each lock.
    unsafe { pg_sys::AcceptInvalidationMessages() }
}

/// The xid of this transaction; 0 if it has written nothing.
pub fn my_xid() -> u32 {
    // SAFETY: reads a static of the server.
    unsafe { pg_sys::GetTopTransactionIdIfAny().into() }
}

/// Whether all statements of this transaction have one snapshot.
pub fn keeps_snapshot() -> bool {
    // SAFETY: reads a static of the server.
    unsafe { pg_sys::XactIsoLevel >= pg_sys::XACT_REPEATABLE_READ as i32 }
}

/// A number that no other transaction of this session has.
pub fn local_transaction() -> u32 {
    major::local_transaction()
}

/// Whether the next statement of this transaction sees what other sessions see: each statement takes a new snapshot,
/// and the transaction has changed nothing.
pub fn sees_latest_commits() -> bool {
    !keeps_snapshot() && my_xid() == 0 && !is_in_recovery()
}

/// Whether a transaction, prepared ones included, is not over yet. If it is over, the next snapshot sees its end.
pub fn is_in_progress(xid: u32) -> bool {
    // SAFETY: looks into the server's array of processes, under its lock.
    unsafe { pg_sys::TransactionIdIsInProgress(xid.into()) }
}

/// Processes that can have a transaction; their numbers are below it.
pub fn max_sessions() -> usize {
    // SAFETY: set before the shared memory is made, and never again.
    unsafe { pg_sys::MaxBackends }.max(0) as usize
}

/// Transactions that can be prepared at once.
pub fn max_prepared() -> usize {
    // SAFETY: as above.
    unsafe { max_prepared_xacts }.max(0) as usize
}

fn report_end(end: End) {
    if let Some(callback) = CALLBACK.get() {
        callback(end);
    }
}

#[pg_guard]
unsafe extern "C-unwind" fn xact(event: pg_sys::XactEvent::Type, _arg: *mut c_void) {
    match event {
        pg_sys::XactEvent::XACT_EVENT_PRE_COMMIT => report_end(End::Committing),
        pg_sys::XactEvent::XACT_EVENT_COMMIT => report_end(End::Committed),
        pg_sys::XactEvent::XACT_EVENT_ABORT
        | pg_sys::XactEvent::XACT_EVENT_PARALLEL_COMMIT
        | pg_sys::XactEvent::XACT_EVENT_PARALLEL_ABORT => report_end(End::Aborted),
        pg_sys::XactEvent::XACT_EVENT_PRE_PREPARE => report_end(End::Preparing),
        pg_sys::XactEvent::XACT_EVENT_PREPARE => report_end(End::Prepared),
        _ => {} // a parallel worker is about to commit
    }
}

#[pg_guard]
unsafe extern "C-unwind" fn subxact(
    event: pg_sys::SubXactEvent::Type,
    id: pg_sys::SubTransactionId,
    parent: pg_sys::SubTransactionId,
    _arg: *mut c_void,
) {
    match event {
        pg_sys::SubXactEvent::SUBXACT_EVENT_COMMIT_SUB => report_end(End::SavepointReleased { id, into: parent }),
        pg_sys::SubXactEvent::SUBXACT_EVENT_ABORT_SUB => report_end(End::SavepointAborted { id }),
        _ => {}
    }
}
