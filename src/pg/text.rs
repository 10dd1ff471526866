//! Converts text between the server, which has it in the encoding of the database, and Rust, which has it in UTF-8. All
//! text passes through here, with a limit on its size and without an allocation that could abort the process.

use super::xact;
use pgrx::{PgSqlErrorCode, pg_sys};
use std::borrow::Cow;
use std::cell::Cell;
use std::ffi::{CStr, CString, c_char};
use std::fmt;
use std::sync::atomic::{AtomicI32, Ordering};

/// The longest text: that of a body.
pub const MAX_BYTES: usize = outbox_core::event::EVENT_BYTES_MAX;
pub const WHY_MAX_BYTES: &str =
    "RabbitMQ 4 refuses messages over 16 MiB by default, and a message is larger than its event.";
/// The conversion functions need this many times the size of the source (MAX_CONVERSION_GROWTH in mb/pg_wchar.h).
const GROWTH: usize = 4;
/// The number of bytes that one call converts.
const PIECE: usize = 16 * 1024;
const NOT_YET_KNOWN: i32 = -1;
const UTF8: i32 = pg_sys::pg_enc::PG_UTF8 as i32;
const SQL_ASCII: i32 = pg_sys::pg_enc::PG_SQL_ASCII as i32;

/// The encoding of this process' database. A process never changes its database.
static ENCODING: AtomicI32 = AtomicI32::new(NOT_YET_KNOWN);

/// Why a text of the server cannot be read in Rust.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Unreadable {
    /// The bytes are invalid in the encoding of the database, or UTF-8 lacks a character.
    Encoding,
    /// The length in bytes.
    TooLong(usize),
}

impl fmt::Display for Unreadable {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Self::Encoding => write!(f, "it cannot be converted from {} to UTF-8", encoding_name()),
            Self::TooLong(bytes) => write!(
                f,
                "it has {bytes} bytes, which exceeds the limit of {} MiB",
                MAX_BYTES >> 20
            ),
        }
    }
}

impl Unreadable {
    pub fn sqlstate(&self) -> PgSqlErrorCode {
        match self {
            Self::Encoding => PgSqlErrorCode::ERRCODE_CHARACTER_NOT_IN_REPERTOIRE,
            Self::TooLong(_) => PgSqlErrorCode::ERRCODE_PROGRAM_LIMIT_EXCEEDED,
        }
    }

    pub fn hint(&self) -> &'static str {
        match self {
            Self::Encoding => "Messages are UTF-8: pass only text that UTF-8 has, too.",
            Self::TooLong(_) => "Store the data elsewhere and publish a reference to it.",
        }
    }
}

fn encoding() -> i32 {
    let known = ENCODING.load(Ordering::Relaxed);
    if known != NOT_YET_KNOWN {
        return known;
    }
    // SAFETY: reads statics of the server.
    let (encoding, is_connected) = unsafe {
        (
            pg_sys::GetDatabaseEncoding(),
            pg_sys::MyDatabaseId != pg_sys::InvalidOid,
        )
    };
    if is_connected {
        ENCODING.store(encoding, Ordering::Relaxed);
    }
    encoding
}

/// Whether this database is in UTF-8, so that texts need no conversion.
pub fn is_utf8() -> bool {
    encoding() == UTF8
}

fn encoding_name() -> String {
    // SAFETY: a static string of the server, ASCII.
    unsafe { CStr::from_ptr(pg_sys::GetDatabaseEncodingName()) }
        .to_string_lossy()
        .into_owned()
}

/// An empty string with room for a number of bytes. Without memory it raises, where Rust would abort the process and so
/// restart the server.
fn with_room(bytes: usize) -> String {
    let mut text = String::new();
    match text.try_reserve_exact(bytes) {
        Ok(()) => text,
        Err(_) => out_of_memory(bytes),
    }
}

/// Raises the server's error.
pub fn out_of_memory(bytes: usize) -> ! {
    let (code, detail) = (
        PgSqlErrorCode::ERRCODE_OUT_OF_MEMORY,
        format!("Failed on request of size {bytes}."),
    );
    pgrx::ereport!(ERROR, code, "out of memory", detail);
}

/// An empty list with room for a number of items. Raises without memory.
pub fn list_for<T>(count: usize) -> Vec<T> {
    let mut list = Vec::new();
    match list.try_reserve_exact(count) {
        Ok(()) => list,
        Err(_) => out_of_memory(count * size_of::<T>()),
    }
}

/// Raises unless this process can allocate a number of bytes now. Called before work on texts of a user-chosen size:
/// a later allocation in Rust must not fail, because that aborts the process.
pub fn check_memory(bytes: usize) {
    drop(with_room(bytes));
}

// ---- from the server ------------------------------------------------------------------------------------------------

pub fn from_server(bytes: &[u8]) -> Result<String, Unreadable> {
    if bytes.len() > MAX_BYTES {
        return Err(Unreadable::TooLong(bytes.len()));
    }
    let same = bytes.is_ascii() || matches!(encoding(), UTF8 | SQL_ASCII);
    if same {
        let text = std::str::from_utf8(bytes).map_err(|_| Unreadable::Encoding)?;
        let mut copy = with_room(text.len());
        copy.push_str(text);
        return Ok(copy);
    }
    let (text, is_whole) = converted(bytes, encoding(), UTF8, |rest| {
        (None, rest.len()) // the first character that fails ends it
    });
    match is_whole {
        true => String::from_utf8(text).map_err(|_| Unreadable::Encoding),
        false => Err(Unreadable::Encoding),
    }
}

/// Replaces characters that cannot be converted. For texts that people read, and for names.
pub fn from_server_lossy(bytes: &[u8]) -> String {
    let bytes = &bytes[..bytes.len().min(MAX_BYTES)];
    if bytes.is_ascii() || matches!(encoding(), UTF8 | SQL_ASCII) {
        let text = String::from_utf8_lossy(bytes);
        let mut copy = with_room(text.len());
        copy.push_str(&text);
        return copy;
    }
    let (text, _) = converted(bytes, encoding(), UTF8, |_| (Some(char::REPLACEMENT_CHARACTER), 1));
    String::from_utf8_lossy(&text).into_owned()
}

/// # Safety
/// `text` is a C string of the server, or null.
pub unsafe fn of_c(text: *const c_char) -> String {
    match text.is_null() {
        true => String::new(),
        // SAFETY: promised by the caller.
        false => unsafe { of_c_str(CStr::from_ptr(text)) },
    }
}

/// A string of the server: a name, a setting.
pub fn of_c_str(text: &CStr) -> String {
    from_server_lossy(text.to_bytes())
}

/// The bytes of a text, varchar or bytea, read in place or detoasted. Values that are too long are not detoasted.
///
/// # Safety
/// A datum of such a type, not null.
pub unsafe fn with_bytes<T>(
    datum: pg_sys::Datum,
    read: impl FnOnce(&[u8]) -> Result<T, Unreadable>,
) -> Result<T, Unreadable> {
    // SAFETY: promised by the caller; a detoasted copy is freed after it was read.
    unsafe {
        let packed: *mut pg_sys::varlena = datum.cast_mut_ptr();
        let is_plain = !pgrx::varlena::varatt_is_4b_c(packed) && !pgrx::varlena::varatt_is_1b_e(packed);
        let plain = match is_plain {
            true => packed,
            false => {
                let bytes = pg_sys::toast_raw_datum_size(datum).saturating_sub(pg_sys::VARHDRSZ);
                if bytes > MAX_BYTES {
                    return Err(Unreadable::TooLong(bytes));
                }
                pg_sys::pg_detoast_datum_packed(packed)
            }
        };
        let length = pgrx::varlena::varsize_any_exhdr(plain);
        let bytes = std::slice::from_raw_parts(pgrx::varlena::vardata_any(plain).cast::<u8>(), length);
        let value = match length > MAX_BYTES {
            true => Err(Unreadable::TooLong(length)),
            false => read(bytes),
        };
        if plain != packed {
            pg_sys::pfree(plain.cast());
        }
        value
    }
}

/// # Safety
/// A datum of text or varchar, not null.
pub unsafe fn of_datum(datum: pg_sys::Datum) -> Result<String, Unreadable> {
    // SAFETY: promised by the caller.
    unsafe { with_bytes(datum, from_server) }
}

// ---- to the server --------------------------------------------------------------------------------------------------

/// Text of this database converts back. Other text, such as that of a broker, may have characters that the database
/// encoding lacks. They become question marks, because a statement of the extension must not fail for them. A NUL,
/// which the server's texts cannot contain, becomes a space.
pub fn to_server(text: &str) -> Cow<'_, [u8]> {
    let text = match text.as_bytes().contains(&0) {
        true => Cow::Owned(text.replace('\0', " ")),
        false => Cow::Borrowed(text),
    };
    if text.is_ascii() || matches!(encoding(), UTF8 | SQL_ASCII) {
        return match text {
            Cow::Borrowed(text) => Cow::Borrowed(text.as_bytes()),
            Cow::Owned(text) => Cow::Owned(text.into_bytes()),
        };
    }
    let skip = |rest: &[u8]| {
        let continues = rest[1..].iter().take_while(|byte| **byte & 0xC0 == 0x80);
        (Some('?'), 1 + continues.count())
    };
    Cow::Owned(converted(text.as_bytes(), UTF8, encoding(), skip).0)
}

pub fn to_c_string(text: &str) -> CString {
    CString::new(to_server(text)).unwrap_or_default()
}

/// A datum of type text, in the current memory context.
pub fn to_datum(text: &str) -> pg_sys::Datum {
    raw_to_datum(&to_server(text))
}

/// A UUID as the server prints it. The `to_string` of pgrx formats each byte, which takes a twentieth of a publish.
pub fn of_uuid(id: pgrx::Uuid) -> String {
    uuid::Uuid::from_bytes(*id.as_bytes()).to_string()
}

/// A datum of type text from bytes of the server, unconverted.
pub fn raw_to_datum(bytes: &[u8]) -> pg_sys::Datum {
    // SAFETY: the bytes are copied with their length.
    unsafe { pg_sys::cstring_to_text_with_len(bytes.as_ptr().cast(), bytes.len() as i32).into() }
}

/// Text for errors, which pgrx sends to the client unconverted: in an encoding other than UTF-8 only ASCII is safe.
pub fn for_errors(text: &str) -> Cow<'_, str> {
    if text.is_ascii() || is_utf8() {
        return Cow::Borrowed(text);
    }
    let mut ascii = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '\u{2026}' => ascii.push_str("..."),
            char::REPLACEMENT_CHARACTER => ascii.push('?'),
            other if other.is_ascii() => ascii.push(other),
            other => ascii.push_str(&format!("\\u{:04x}", other as u32)),
        }
    }
    Cow::Owned(ascii)
}

// ---- both -----------------------------------------------------------------------------------------------------------

/// The text in the other encoding, and whether all of it was converted. `replace` gets the rest from a character
/// without an equivalent. It returns the replacement and the character's length in bytes; without one the text ends
/// there.
fn converted(mut rest: &[u8], from: i32, to: i32, replace: impl Fn(&[u8]) -> (Option<char>, usize)) -> (Vec<u8>, bool) {
    let mut whole = with_room(rest.len() + rest.len() / 2 + GROWTH).into_bytes();
    let conversion = conversion(from, to);
    let mut buffer = vec![0_u8; PIECE * GROWTH + 1];
    while !rest.is_empty() {
        let done = match conversion {
            None => 0,
            // SAFETY: the destination has room for the longest result (pg_do_encoding_conversion_buf in mbutils.c).
            // With noError the function stops before a character that it cannot convert.
            Some(function) => unsafe {
                let length = rest.len().min(PIECE);
                let (source, destination) = (rest.as_ptr().into(), buffer.as_mut_ptr().into());
                let (from, to, length, no_error) = (from.into(), to.into(), (length as i32).into(), true.into());
                let none = pg_sys::InvalidOid;
                pg_sys::FunctionCall6Coll(function, none, from, to, source, destination, length, no_error).value()
            },
        };
        if done > 0 {
            let length = buffer.iter().position(|byte| *byte == 0).unwrap_or(0);
            if whole.try_reserve(length).is_err() {
                out_of_memory(length);
            }
            whole.extend_from_slice(&buffer[..length]);
            rest = &rest[done.min(rest.len())..];
            continue;
        }
        let ascii = rest.iter().take_while(|byte| byte.is_ascii()).count();
        if ascii > 0 {
            whole.extend_from_slice(&rest[..ascii]); // every encoding of a database has ASCII as it is
            rest = &rest[ascii..];
            continue;
        }
        let (replacement, length) = replace(rest);
        let Some(replacement) = replacement else {
            return (whole, false);
        };
        whole.extend_from_slice(replacement.encode_utf8(&mut [0; 4]).as_bytes());
        rest = &rest[length..];
    }
    (whole, true)
}

/// The conversion function, looked up once in the catalogs, so inside a transaction.
fn conversion(from: i32, to: i32) -> Option<*mut pg_sys::FmgrInfo> {
    thread_local! {
        /// The functions from the encoding of the database, and to it.
        static KNOWN: [Cell<*mut pg_sys::FmgrInfo>; 2] = const { [const { Cell::new(std::ptr::null_mut()) }; 2] };
    }
    let direction = usize::from(from == UTF8);
    let known = KNOWN.with(|known| known[direction].get());
    if !known.is_null() {
        return Some(known);
    }
    if !xact::is_in_transaction() {
        return None;
    }
    // SAFETY: lookups inside a transaction; the results live as long as the process.
    unsafe {
        let function = pg_sys::FindDefaultConversionProc(from, to);
        if function == pg_sys::InvalidOid {
            return None;
        }
        let found = Box::leak(Box::new(pg_sys::FmgrInfo::default()));
        pg_sys::fmgr_info_cxt(function, found, pg_sys::TopMemoryContext);
        KNOWN.with(|known| known[direction].set(found));
        Some(found)
    }
}

/// Looks up the conversion functions for a process that also converts outside of transactions. Inside a transaction.
pub fn prepare() {
    if !matches!(encoding(), UTF8 | SQL_ASCII) {
        conversion(encoding(), UTF8);
        conversion(UTF8, encoding());
    }
}
