//! Converts jsonb to the same text, byte for byte, as the server's cast. The cast checks and appends each byte of a
//! string; this code copies runs of bytes that need no escape. For a message of 10 kB the cast took a fifth of the
//! worker's CPU time. Called on the main thread, in a transaction.

use pgrx::pg_sys;
use pgrx::pg_sys::{JsonbIteratorToken as token, jbvType as kind};
use std::ffi::CStr;

/// The number of bytes that are checked together.
const CHUNK: usize = 32;

/// Returns a datum of type text, in the current memory context.
///
/// # Safety
/// `jsonb` is a datum of type jsonb, not null.
pub unsafe fn to_text(jsonb: pg_sys::Datum) -> pg_sys::Datum {
    // SAFETY: the iterator and its values point into the detoasted jsonb, which lives as long as the memory context.
    // After an error of the server there is nothing that Rust must free. The layouts are those of jsonb.h.
    unsafe {
        let stored = jsonb.cast_mut_ptr();
        let jsonb: *mut pg_sys::Jsonb = pg_sys::pg_detoast_datum(stored).cast();
        let size = pgrx::varlena::varsize_4b(jsonb.cast());
        let mut text = Buffer::with_room(pg_sys::VARHDRSZ + size);
        text.put(&[0; pg_sys::VARHDRSZ]);
        let mut iterator = pg_sys::JsonbIteratorInit(&raw mut (*jsonb).root);
        let mut value = pg_sys::JsonbValue::default();
        let mut numeric_out: Option<pg_sys::FmgrInfo> = None;
        let (mut is_first, mut is_scalar) = (true, false);
        loop {
            let token = pg_sys::JsonbIteratorNext(&raw mut iterator, &raw mut value, false);
            if !is_first && !matches!(token, token::WJB_END_ARRAY | token::WJB_END_OBJECT | token::WJB_DONE) {
                text.put(b", ");
            }
            is_first = false;
            match token {
                token::WJB_DONE => break,
                token::WJB_BEGIN_ARRAY => {
                    is_scalar = value.val.array.rawScalar; // a scalar is stored as an array of one element
                    text.put(if is_scalar { b"" } else { b"[" });
                    is_first = true;
                }
                token::WJB_BEGIN_OBJECT => {
                    text.put(b"{");
                    is_first = true;
                }
                token::WJB_KEY => {
                    text.put_string(string(&value));
                    text.put(b": ");
                    is_first = true;
                }
                token::WJB_END_ARRAY => text.put(if is_scalar { b"" } else { b"]" }),
                token::WJB_END_OBJECT => text.put(b"}"),
                _ => match value.type_ {
                    kind::jbvNull => text.put(b"null"),
                    kind::jbvBool => text.put(if value.val.boolean { b"true" } else { b"false" }),
                    kind::jbvString => text.put_string(string(&value)),
                    kind::jbvNumeric => {
                        let function = numeric_out.get_or_insert_with(|| {
                            let mut function = pg_sys::FmgrInfo::default();
                            pg_sys::fmgr_info(pg_sys::F_NUMERIC_OUT.into(), &raw mut function);
                            function
                        });
                        let number = pg_sys::OutputFunctionCall(function, value.val.numeric.into());
                        text.put(CStr::from_ptr(number).to_bytes());
                        pg_sys::pfree(number.cast());
                    }
                    other => pgrx::error!("unknown type of jsonb value: {other}"),
                },
            }
        }
        if jsonb.cast() != stored {
            pg_sys::pfree(jsonb.cast()); // it may be large
        }
        text.into_varlena()
    }
}

/// # Safety
/// `value` is a string, and the jsonb that it points into is alive.
unsafe fn string(value: &pg_sys::JsonbValue) -> &[u8] {
    // SAFETY: promised by the caller.
    unsafe {
        let string = value.val.string;
        std::slice::from_raw_parts(string.val.cast(), string.len as usize)
    }
}

/// Bytes in the server's memory, without a final NUL. They are freed with the memory context.
struct Buffer(pg_sys::StringInfoData);

impl Buffer {
    fn with_room(bytes: usize) -> Self {
        let mut buffer = pg_sys::StringInfoData::default();
        // SAFETY: the buffer is initialized before it is enlarged.
        unsafe {
            pg_sys::initStringInfo(&raw mut buffer);
            pg_sys::enlargeStringInfo(&raw mut buffer, bytes as i32);
        }
        Self(buffer)
    }

    fn put(&mut self, bytes: &[u8]) {
        let Self(buffer) = self;
        // SAFETY: the buffer has room for the bytes, because it was enlarged if needed.
        unsafe {
            if bytes.len() >= (buffer.maxlen - buffer.len) as usize {
                pg_sys::enlargeStringInfo(buffer, bytes.len() as i32);
            }
            let end = buffer.data.add(buffer.len as usize);
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), end.cast(), bytes.len());
        }
        buffer.len += bytes.len() as i32;
    }

    /// Appends a string with quotes and escapes, as escape_json writes it.
    fn put_string(&mut self, mut string: &[u8]) {
        self.put(b"\"");
        loop {
            let (plain, rest) = string.split_at(plain(string));
            self.put(plain);
            let [byte, rest @ ..] = rest else { break };
            match byte {
                0x08 => self.put(b"\\b"),
                0x0c => self.put(b"\\f"),
                b'\n' => self.put(b"\\n"),
                b'\r' => self.put(b"\\r"),
                b'\t' => self.put(b"\\t"),
                b'"' | b'\\' => self.put(&[b'\\', *byte]),
                _ => {
                    let digit = |of: u8| b"0123456789abcdef"[usize::from(of)];
                    self.put(&[b'\\', b'u', b'0', b'0', digit(byte >> 4), digit(byte & 15)]);
                }
            }
            string = rest;
        }
        self.put(b"\"");
    }

    fn into_varlena(self) -> pg_sys::Datum {
        let Self(buffer) = self;
        // SAFETY: the first bytes of the buffer were reserved for the header.
        unsafe { pgrx::varlena::set_varsize_4b(buffer.data.cast(), buffer.len) };
        buffer.data.into()
    }
}

/// The number of bytes at the start of a string that JSON needs no escape for.
fn plain(string: &[u8]) -> usize {
    let is_escaped = |byte: &u8| *byte < b' ' || *byte == b'"' || *byte == b'\\';
    let (head, rest) = string.split_at(string.len().min(CHUNK));
    if let Some(at) = head.iter().position(is_escaped) {
        return at; // the fast case for strings with many escapes
    }
    // No early exit within a chunk: so the compiler checks all its bytes at once.
    let is_plain = |chunk: &&[u8]| !chunk.iter().fold(false, |found, byte| found | is_escaped(byte));
    let chunks = rest.chunks_exact(CHUNK).take_while(is_plain).count() * CHUNK;
    let rest = &rest[chunks..];
    head.len() + chunks + rest.iter().position(is_escaped).unwrap_or(rest.len())
}
