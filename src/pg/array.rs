//! Arrays of one dimension, in and out of Rust: a NULL where none may be is a user's error, and no array is so long that
//! memory for it could abort the process.

use super::text::{self, Unreadable};
use pgrx::pg_sys;
use std::ffi::{c_char, c_int};

/// What an element is, for the server.
struct Element {
    oid: pg_sys::Oid,
    bytes: c_int,
    by_value: bool,
    align: c_char,
}

const TEXT: Element = Element {
    oid: pg_sys::TEXTOID,
    bytes: -1,
    by_value: false,
    align: b'i' as c_char,
};
const INT8: Element = Element {
    oid: pg_sys::INT8OID,
    bytes: 8,
    by_value: true,
    align: b'd' as c_char,
};
const INT2: Element = Element {
    oid: pg_sys::INT2OID,
    bytes: 2,
    by_value: true,
    align: b's' as c_char,
};

/// Elements as the server takes them apart, in its memory; NULL is None.
struct Elements {
    values: *mut pg_sys::Datum,
    nulls: *mut bool,
    count: usize,
}

impl Elements {
    /// # Safety
    /// An array of such elements, not null.
    unsafe fn of(array: pg_sys::Datum, element: &Element) -> Self {
        let mut elements = Self {
            values: std::ptr::null_mut(),
            nulls: std::ptr::null_mut(),
            count: 0,
        };
        let mut count = 0;
        // SAFETY: promised by the caller. What it takes is the server's memory, so it raises where there is none.
        unsafe {
            let array = pg_sys::pg_detoast_datum(array.cast_mut_ptr()).cast();
            let Element {
                oid,
                bytes,
                by_value,
                align,
            } = *element;
            let (values, nulls) = (&mut elements.values, &mut elements.nulls);
            pg_sys::deconstruct_array(array, oid, bytes, by_value, align, values, nulls, &mut count);
        }
        elements.count = count as usize;
        elements
    }

    fn iter(&self) -> impl Iterator<Item = Option<pg_sys::Datum>> {
        // SAFETY: as many as were counted, alive as long as the call.
        (0..self.count).map(|n| unsafe { (!*self.nulls.add(n)).then(|| *self.values.add(n)) })
    }
}

/// # Safety
/// An array of texts, not null.
pub unsafe fn texts(array: pg_sys::Datum) -> Result<Vec<Option<String>>, Unreadable> {
    // SAFETY: promised by the caller.
    let elements = unsafe { Elements::of(array, &TEXT) };
    let mut texts = text::list_for(elements.count);
    for element in elements.iter() {
        // SAFETY: an element of that array.
        texts.push(element.map(|text| unsafe { text::of_datum(text) }).transpose()?);
    }
    Ok(texts)
}

/// Those that are not NULL, with U+FFFD for what cannot be converted.
///
/// # Safety
/// An array of texts, not null.
pub unsafe fn lossy_texts(array: pg_sys::Datum) -> Vec<String> {
    let lossy = |bytes: &[u8]| Ok(text::from_server_lossy(bytes));
    // SAFETY: promised by the caller.
    let elements = unsafe { Elements::of(array, &TEXT) };
    let mut texts = text::list_for(elements.count);
    for element in elements.iter().flatten() {
        // SAFETY: an element of that array. Too long ones are left out.
        texts.extend(unsafe { text::with_bytes(element, lossy) });
    }
    texts
}

/// Whole numbers, as long as the array; None: one of them is NULL.
///
/// # Safety
/// An array of int8, not null.
pub unsafe fn int8s(array: pg_sys::Datum) -> Option<Vec<i64>> {
    // SAFETY: promised by the caller.
    let elements = unsafe { Elements::of(array, &INT8) };
    let mut numbers = text::list_for(elements.count);
    for element in elements.iter() {
        numbers.push(element?.value() as i64);
    }
    Some(numbers)
}

/// # Safety
/// An array of int2, not null.
pub unsafe fn int2s(array: pg_sys::Datum) -> Option<Vec<i16>> {
    // SAFETY: promised by the caller.
    let elements = unsafe { Elements::of(array, &INT2) };
    let mut numbers = text::list_for(elements.count);
    for element in elements.iter() {
        numbers.push(element?.value() as i16);
    }
    Some(numbers)
}

/// An array of texts, in the current memory context.
pub fn of_texts<'a>(texts: impl Iterator<Item = Option<&'a str>>) -> pg_sys::Datum {
    let (mut values, mut nulls) = (Vec::new(), Vec::new());
    for text in texts {
        nulls.push(text.is_none());
        values.push(text.map_or(pg_sys::Datum::null(), text::to_datum));
    }
    let (mut count, mut first) = (values.len() as c_int, 1);
    let dimensions = c_int::from(count > 0);
    // SAFETY: as many values and nulls as are said, of that type.
    unsafe {
        pg_sys::construct_md_array(
            values.as_mut_ptr(),
            nulls.as_mut_ptr(),
            dimensions,
            &mut count,
            &mut first,
            TEXT.oid,
            TEXT.bytes,
            TEXT.by_value,
            TEXT.align,
        )
        .into()
    }
}
