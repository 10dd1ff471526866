//! Arguments of a function that pgrx would have to translate at a price: JSON is handed on as it came.

use pgrx::datum::{DatumWithOid, TimestampWithTimeZone, Uuid};
use pgrx::pg_sys;
use std::ffi::{CStr, CString};

/// The arguments of the call that is running. The declaration in sql/src says of which type each is; asking for another
/// is undefined.
pub struct Args(pg_sys::FunctionCallInfo);

/// A jsonb value, not looked into.
pub struct Jsonb(pg_sys::Datum);

impl Args {
    /// # Safety
    /// `fcinfo` is the one that the server called with, and the methods are asked for the types that were declared.
    pub unsafe fn new(fcinfo: pg_sys::FunctionCallInfo) -> Self {
        Self(fcinfo)
    }

    pub fn text(&self, number: usize) -> Option<String> {
        // SAFETY: promised in `new`.
        unsafe { pgrx::fcinfo::pg_getarg(self.0, number) }
    }

    pub fn oid(&self, number: usize) -> Option<pg_sys::Oid> {
        // SAFETY: promised in `new`.
        unsafe { pgrx::fcinfo::pg_getarg(self.0, number) }
    }

    pub fn time(&self, number: usize) -> Option<TimestampWithTimeZone> {
        // SAFETY: promised in `new`.
        unsafe { pgrx::fcinfo::pg_getarg(self.0, number) }
    }

    pub fn uuid(&self, number: usize) -> Option<Uuid> {
        // SAFETY: promised in `new`.
        unsafe { pgrx::fcinfo::pg_getarg(self.0, number) }
    }

    pub fn jsonb(&self, number: usize) -> Option<Jsonb> {
        // SAFETY: promised in `new`.
        unsafe { pgrx::fcinfo::pg_getarg_datum(self.0, number).map(Jsonb) }
    }
}

impl Jsonb {
    /// Of a text that is known to be JSON; any other raises the server's own error.
    pub fn of_text(json: &str) -> Self {
        let text = CString::new(json).expect("JSON holds no NUL");
        // SAFETY: the input function of jsonb takes a C string; what it makes lives as long as the call.
        unsafe {
            let function = pg_sys::Oid::from(pg_sys::F_JSONB_IN);
            Self(pg_sys::OidInputFunctionCall(
                function,
                text.as_ptr().cast_mut(),
                pg_sys::JSONBOID,
                -1,
            ))
        }
    }

    pub fn to_text(&self) -> String {
        // SAFETY: a jsonb datum, so its output function fits; the text is copied.
        unsafe {
            let text = pg_sys::OidOutputFunctionCall(pg_sys::Oid::from(pg_sys::F_JSONB_OUT), self.0);
            CStr::from_ptr(text).to_string_lossy().into_owned()
        }
    }

    pub(super) fn datum(&self) -> pg_sys::Datum {
        self.0
    }

    /// For a parameter of a statement.
    pub fn parameter(&self) -> DatumWithOid<'_> {
        // SAFETY: a jsonb datum, alive while the call runs.
        unsafe { DatumWithOid::new(self.0, pg_sys::JSONBOID) }
    }
}
