//! Arguments and results of the functions that SQL calls, on the main thread of a session or worker. SqlText is
//! converted between the encoding of the database and UTF-8. A list that does not fit into memory raises an error. JSON
//! is passed on unread.

use super::record::Record;
use super::text::Unreadable;
use super::{array, json, report, text};
use pgrx::callconv::{Arg, ArgAbi, BoxRet, FcInfo};
use pgrx::datum::{Datum, FromDatum, IntoDatum, TimestampWithTimeZone, Uuid};
use pgrx::nullable::Nullable;
use pgrx::{PgSqlErrorCode, impl_sql_translatable, pg_sys};
use std::ffi::CString;
use std::ops::Deref;
use std::ptr;

/// The arguments of the running call. The declaration in sql/src says which type each has; reading one as another type
/// is undefined behaviour.
pub struct Args(pg_sys::FunctionCallInfo);

/// A text of up to this many bytes needs no check of the memory.
const SMALL_BYTES: usize = 64 * 1024;

/// A jsonb value, unread.
pub struct Jsonb(pg_sys::Datum);

/// The text of a jsonb value as a result, in the memory of the call.
pub struct JsonText(pg_sys::Datum);

impl Args {
    /// # Safety
    /// `fcinfo` is the one that the server passed, and each method is called for an argument of the declared type.
    pub unsafe fn new(fcinfo: pg_sys::FunctionCallInfo) -> Self {
        Self(fcinfo)
    }

    pub fn text(&self, number: usize) -> Option<String> {
        // SAFETY: promised in `new`.
        unsafe { pgrx::fcinfo::pg_getarg::<SqlText>(self.0, number).map(SqlText::into_string) }
    }

    pub fn text_or_why_not(&self, number: usize) -> Result<Option<String>, Unreadable> {
        // SAFETY: promised in `new`.
        let datum = unsafe { pgrx::fcinfo::pg_getarg_datum(self.0, number) };
        // SAFETY: promised in `new`.
        datum.map(|datum| unsafe { text::of_datum(datum) }).transpose()
    }

    /// The columns of a row, from the column with this name on.
    pub fn record(&self, number: usize, first: &str) -> Option<Record> {
        // SAFETY: promised in `new`.
        let datum = unsafe { pgrx::fcinfo::pg_getarg_datum(self.0, number) };
        // SAFETY: promised in `new`.
        datum.map(|datum| unsafe { Record::of(datum, first) })
    }

    pub fn int8(&self, number: usize) -> Option<i64> {
        // SAFETY: promised in `new`.
        unsafe { pgrx::fcinfo::pg_getarg(self.0, number) }
    }

    /// An array of int8; None: it or an element is NULL.
    pub fn int8s(&self, number: usize) -> Option<Vec<i64>> {
        // SAFETY: promised in `new`.
        unsafe { array::integers(pgrx::fcinfo::pg_getarg_datum(self.0, number)?) }
    }

    /// An array of text.
    pub fn texts(&self, number: usize) -> Option<Vec<Option<String>>> {
        // SAFETY: promised in `new`.
        unsafe { pgrx::fcinfo::pg_getarg::<SqlTexts>(self.0, number).map(|texts| texts.0) }
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
    /// A datum of that type, not null.
    pub(super) fn of(datum: pg_sys::Datum) -> Self {
        Self(datum)
    }

    /// Parses JSON text. SqlText that is not JSON raises the server's error.
    pub fn of_text(json: &str) -> Self {
        let text = text::to_c_string(json);
        // SAFETY: the input function of jsonb takes a C string; its result lives as long as the call.
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

    /// The JSON text.
    pub fn to_text(&self) -> Result<String, Unreadable> {
        // SAFETY: a jsonb datum. The server allocates the text first, so that a lack of memory is an error. Its copy is
        // freed at once, because it may be large.
        unsafe {
            let json = json::to_text(self.0);
            let bytes = pgrx::varlena::varsize_4b(json.cast_mut_ptr());
            if bytes > SMALL_BYTES {
                text::check_memory(bytes.min(text::MAX_BYTES) * 4); // for the copies that follow
            }
            let copy = text::of_datum(json);
            pg_sys::pfree(json.cast_mut_ptr());
            copy
        }
    }

    pub fn into_text(self) -> JsonText {
        // SAFETY: a jsonb datum.
        JsonText(unsafe { json::to_text(self.0) })
    }

    pub(super) fn datum(&self) -> pg_sys::Datum {
        self.0
    }
}

/// A text as an argument or a result.
pub struct SqlText(String);

impl SqlText {
    pub fn into_string(self) -> String {
        self.0
    }
}

impl Deref for SqlText {
    type Target = str;

    fn deref(&self) -> &str {
        &self.0
    }
}

impl From<String> for SqlText {
    fn from(text: String) -> Self {
        Self(text)
    }
}

impl From<&str> for SqlText {
    fn from(text: &str) -> Self {
        Self(text.to_owned())
    }
}

/// A text as an argument, with a replacement character for each character that cannot be converted.
pub struct Legible(pub String);

/// A bytea as an argument that contains UTF-8, with replacement characters for invalid bytes.
pub struct Utf8(pub String);

/// SqlTexts as an argument.
pub struct SqlTexts(pub Vec<Option<String>>);

/// An int2[] or int8[] as an argument, in which no element may be NULL.
pub struct Integers(pub Vec<i64>);

/// A row as a result. The call names the columns and their types, each of which reads its text; columns without one are
/// NULL.
pub struct TextRow(pub Vec<Option<String>>);

fn refuse_null(what: &str) -> ! {
    let code = PgSqlErrorCode::ERRCODE_NULL_VALUE_NOT_ALLOWED;
    report::raise(
        code,
        format!("{what} is NULL"),
        None,
        Some("Pass a value instead of NULL."),
    )
}

impl FromDatum for SqlText {
    unsafe fn from_polymorphic_datum(datum: pg_sys::Datum, is_null: bool, _: pg_sys::Oid) -> Option<Self> {
        // SAFETY: the caller says that this is a text.
        (!is_null).then(|| Self(unsafe { text::of_datum(datum) }.unwrap_or_else(|why| why.raise())))
    }
}

impl IntoDatum for SqlText {
    fn into_datum(self) -> Option<pg_sys::Datum> {
        Some(text::to_datum(&self.0))
    }

    fn type_oid() -> pg_sys::Oid {
        pg_sys::TEXTOID
    }
}

impl FromDatum for Legible {
    unsafe fn from_polymorphic_datum(datum: pg_sys::Datum, is_null: bool, _: pg_sys::Oid) -> Option<Self> {
        let read = |bytes: &[u8]| Ok(Self(text::from_server_lossy(bytes)));
        // SAFETY: the caller says that this is a text.
        (!is_null).then(|| unsafe { text::with_bytes(datum, read) }.unwrap_or_else(|why| why.raise()))
    }
}

impl FromDatum for Utf8 {
    unsafe fn from_polymorphic_datum(datum: pg_sys::Datum, is_null: bool, _: pg_sys::Oid) -> Option<Self> {
        let read = |bytes: &[u8]| {
            text::check_memory(bytes.len() * 3); // a replacement character has 3 bytes
            Ok(Self(String::from_utf8_lossy(bytes).into_owned()))
        };
        // SAFETY: the caller says that this is a bytea.
        (!is_null).then(|| unsafe { text::with_bytes(datum, read) }.unwrap_or_else(|why| why.raise()))
    }
}

impl FromDatum for SqlTexts {
    unsafe fn from_polymorphic_datum(datum: pg_sys::Datum, is_null: bool, _: pg_sys::Oid) -> Option<Self> {
        // SAFETY: the caller says that this is an array of texts.
        (!is_null).then(|| Self(unsafe { array::texts(datum) }.unwrap_or_else(|why| why.raise())))
    }
}

impl FromDatum for Integers {
    unsafe fn from_polymorphic_datum(datum: pg_sys::Datum, is_null: bool, _: pg_sys::Oid) -> Option<Self> {
        // SAFETY: the caller says that this is an array of integers.
        let numbers = (!is_null).then(|| unsafe { array::integers(datum) })?;
        Some(Self(numbers.unwrap_or_else(|| refuse_null("an element of the array"))))
    }
}

macro_rules! argument {
    ($($type:ty),*) => {
        $(
            // SAFETY: the datum of an argument of that type, as the declaration in sql/src says.
            unsafe impl<'fcx> ArgAbi<'fcx> for $type {
                unsafe fn unbox_arg_unchecked(arg: Arg<'_, 'fcx>) -> Self {
                    // SAFETY: the argument has that type.
                    unsafe { arg.unbox_arg_using_from_datum() }.unwrap_or_else(|| refuse_null("an argument"))
                }

                unsafe fn unbox_nullable_arg(arg: Arg<'_, 'fcx>) -> Nullable<Self> {
                    // SAFETY: the argument has that type.
                    unsafe { arg.unbox_arg_using_from_datum().into() }
                }
            }
        )*
    };
}

argument!(SqlText, Legible, Utf8, SqlTexts, Integers);
impl_sql_translatable!(TextRow, "record");
impl_sql_translatable!(SqlText, "text");
impl_sql_translatable!(JsonText, "text");
impl_sql_translatable!(Legible, "text");
impl_sql_translatable!(Utf8, "bytea");
impl_sql_translatable!(SqlTexts, "text[]");
impl_sql_translatable!(Integers, "int8[]");

// SAFETY: a datum of type text.
unsafe impl BoxRet for SqlText {
    unsafe fn box_into<'fcx>(self, fcinfo: &mut FcInfo<'fcx>) -> Datum<'fcx> {
        // SAFETY: a text in the memory of the call.
        unsafe { fcinfo.return_raw_datum(text::to_datum(&self.0)) }
    }
}

// SAFETY: a datum of type text.
unsafe impl BoxRet for JsonText {
    unsafe fn box_into<'fcx>(self, fcinfo: &mut FcInfo<'fcx>) -> Datum<'fcx> {
        // SAFETY: a text in the memory of the call.
        unsafe { fcinfo.return_raw_datum(self.0) }
    }
}

// SAFETY: a datum of the row type that the call expects.
unsafe impl BoxRet for TextRow {
    unsafe fn box_into<'fcx>(self, fcinfo: &mut FcInfo<'fcx>) -> Datum<'fcx> {
        let texts: Vec<Option<CString>> = (self.0.iter().map(|text| text.as_deref().map(text::to_c_string))).collect();
        let mut columns = ptr::null_mut();
        // SAFETY: the call's own fcinfo. There is a pointer for each column, and the texts live as long.
        unsafe {
            pg_sys::get_call_result_type(fcinfo.as_mut_ptr(), ptr::null_mut(), &mut columns);
            if columns.is_null() {
                let code = PgSqlErrorCode::ERRCODE_FEATURE_NOT_SUPPORTED;
                report::raise(
                    code,
                    "the call names no columns",
                    None,
                    Some("Call it in FROM, with a list of columns."),
                )
            }
            let pointers = texts
                .iter()
                .map(|text| text.as_ref().map_or(ptr::null_mut(), |text| text.as_ptr().cast_mut()));
            let mut values: Vec<_> = pointers
                .chain(std::iter::repeat(ptr::null_mut()))
                .take((*columns).natts as usize)
                .collect();
            let row = pg_sys::BuildTupleFromCStrings(pg_sys::TupleDescGetAttInMetadata(columns), values.as_mut_ptr());
            fcinfo.return_raw_datum(pg_sys::HeapTupleHeaderGetDatum((*row).t_data))
        }
    }
}
