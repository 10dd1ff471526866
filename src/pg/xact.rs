//! End of a transaction: one permanent callback. (pgrx's `register_xact_callback` survives PREPARE TRANSACTION and then
//! fires at an unrelated commit.)

use pgrx::pg_sys;
use std::ffi::c_void;
use std::sync::atomic::{AtomicUsize, Ordering};

/// What became of the transaction, or of the savepoint with this number.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum End {
    /// Committed and already visible. No allocation, log or error from here on.
    Committed,
    Aborted,
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

type Callback = fn(End);
static CALLBACK: AtomicUsize = AtomicUsize::new(0);

/// Calls `callback` at the end of every transaction and savepoint of this process. Once, from `_PG_init`.
pub fn on_end(callback: Callback) {
    CALLBACK.store(callback as usize, Ordering::Relaxed);
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

fn tell(end: End) {
    let callback = CALLBACK.load(Ordering::Relaxed);
    if callback != 0 {
        // SAFETY: only ever stored by on_end, from a Callback.
        unsafe { std::mem::transmute::<usize, Callback>(callback)(end) }
    }
}

unsafe extern "C-unwind" fn xact(event: pg_sys::XactEvent::Type, _arg: *mut c_void) {
    match event {
        pg_sys::XactEvent::XACT_EVENT_COMMIT => tell(End::Committed),
        pg_sys::XactEvent::XACT_EVENT_ABORT => tell(End::Aborted),
        pg_sys::XactEvent::XACT_EVENT_PREPARE => tell(End::Prepared),
        _ => {}
    }
}

unsafe extern "C-unwind" fn subxact(
    event: pg_sys::SubXactEvent::Type,
    id: pg_sys::SubTransactionId,
    parent: pg_sys::SubTransactionId,
    _arg: *mut c_void,
) {
    match event {
        pg_sys::SubXactEvent::SUBXACT_EVENT_COMMIT_SUB => tell(End::SavepointReleased { id, into: parent }),
        pg_sys::SubXactEvent::SUBXACT_EVENT_ABORT_SUB => tell(End::SavepointAborted { id }),
        _ => {}
    }
}
