//! Keeps the names of table, column and constraint in the server's errors. pgrx carries an ERROR through Rust as a
//! panic and loses these names. This module records them, and restores them when the error is reported to the caller.

use pgrx::pg_sys;
use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_int};

/// The error fields as postgres_ext.h numbers them: schema, table, column, type, constraint.
const FIELDS: [u8; 5] = [b's', b't', b'c', b'd', b'n'];

struct CaughtError {
    code: c_int,
    message: CString,
    names: [Option<CString>; 5],
}

thread_local! {
    static CAUGHT: RefCell<Option<CaughtError>> = const { RefCell::new(None) };
}

/// Runs `body`. If it violates a constraint, the error that the caller gets still names the constraint.
pub fn caught<T>(body: impl FnOnce() -> T) -> T {
    // SAFETY: main thread. The struct is in the memory of the call, which outlives its error. Code that catches the
    // error restores error_context_stack; without an error the code below does.
    unsafe {
        let callback: *mut pg_sys::ErrorContextCallback =
            pg_sys::palloc(size_of::<pg_sys::ErrorContextCallback>()).cast();
        callback.write(pg_sys::ErrorContextCallback {
            previous: pg_sys::error_context_stack,
            callback: Some(raised),
            arg: std::ptr::null_mut(),
        });
        pg_sys::error_context_stack = callback;
        let value = body();
        pg_sys::error_context_stack = (*callback).previous;
        pg_sys::pfree(callback.cast());
        value
    }
}

/// Core calls this for each message that it is about to raise or report: first where an error arises, with its names,
/// and again when pgrx reports it, without them.
#[pgrx::pg_guard]
unsafe extern "C-unwind" fn raised(_argument: *mut std::ffi::c_void) {
    const CATEGORY: c_int = 0xfff; // the first two characters of a SQLSTATE, six bits each
    const INTEGRITY_CONSTRAINT_VIOLATION: c_int = 2 | 3 << 6;
    // SAFETY: core calls this only while it handles an error. The copy of the error is freed.
    unsafe {
        let code = pg_sys::geterrcode();
        if code & CATEGORY != INTEGRITY_CONSTRAINT_VIOLATION {
            return;
        }
        let before = pg_sys::MemoryContextSwitchTo(pg_sys::CurTransactionContext);
        let data = pg_sys::CopyErrorData();
        if (*data).elevel == pg_sys::PGERROR as c_int {
            let of = &*data;
            let names = [
                of.schema_name,
                of.table_name,
                of.column_name,
                of.datatype_name,
                of.constraint_name,
            ];
            record_or_restore(code, text(of.message).unwrap_or_default(), names.map(|name| text(name)));
        }
        pg_sys::FreeErrorData(data);
        pg_sys::MemoryContextSwitchTo(before);
    }
}

/// Records an error that has names. Restores the names of the recorded error if the same error comes without them.
fn record_or_restore(code: c_int, message: CString, names: [Option<CString>; 5]) {
    if names.iter().any(Option::is_some) {
        CAUGHT.set(Some(CaughtError { code, message, names }));
        return;
    }
    let Some(caught) = CAUGHT
        .take()
        .filter(|caught| caught.code == code && caught.message == message)
    else {
        return;
    };
    for (field, name) in FIELDS.iter().zip(&caught.names) {
        if let Some(name) = name {
            // SAFETY: inside the report of an error; the name is copied.
            unsafe { pg_sys::err_generic_string(c_int::from(*field), name.as_ptr()) };
        }
    }
}

/// # Safety
/// `text` is a C string, or null.
unsafe fn text(text: *const c_char) -> Option<CString> {
    // SAFETY: promised by the caller.
    unsafe { (!text.is_null()).then(|| CStr::from_ptr(text).to_owned()) }
}
