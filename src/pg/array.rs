//! One-dimensional arrays, converted between the server and Rust. `args` and `spi` call it on the main thread. A
//! forbidden NULL is a user's error. An array that does not fit into memory raises an error instead of aborting the
//! process.

use super::text::{self, Unreadable};
use pgrx::pg_sys;
use std::ffi::{c_char, c_int};

/// The type of the elements, as the server describes it.
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

/// The elements of an array, deconstructed by the server in its memory. `iter` returns None for NULL.
struct Elements {
    values: *mut pg_sys::Datum,
    nulls: *mut bool,
    count: usize,
}

impl Elements {
    /// # Safety
    /// `array` is an array of such elements, not null.
    unsafe fn of(array: pg_sys::Datum, element: &Element) -> Self {
        let mut elements = Self {
            values: std::ptr::null_mut(),
            nulls: std::ptr::null_mut(),
            count: 0,
        };
        let mut count = 0;
        // SAFETY: promised by the caller. The server allocates the memory, so a lack of it raises.
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
        // SAFETY: `count` elements, alive as long as the call.
        (0..self.count).map(|n| unsafe { (!*self.nulls.add(n)).then(|| *self.values.add(n)) })
    }
}

/// The texts of an array, with None for NULL. Err: a text that is too long or cannot be converted.
///
/// # Safety
/// `array` is an array of texts, not null.
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

/// The texts of an array without the NULLs, with U+FFFD for each character that cannot be converted. Leaves out texts
/// that are too long.
///
/// # Safety
/// `array` is an array of texts, not null.
pub unsafe fn lossy_texts(array: pg_sys::Datum) -> Vec<String> {
    let lossy = |bytes: &[u8]| Ok(text::from_server_lossy(bytes));
    // SAFETY: promised by the caller.
    let elements = unsafe { Elements::of(array, &TEXT) };
    let mut texts = text::list_for(elements.count);
    for element in elements.iter().flatten() {
        // SAFETY: an element of that array.
        texts.extend(unsafe { text::with_bytes(element, lossy) });
    }
    texts
}

/// The numbers of an array; None: an element is NULL.
///
/// # Safety
/// `array` is an array of int8, not null.
pub unsafe fn int8s(array: pg_sys::Datum) -> Option<Vec<i64>> {
    // SAFETY: promised by the caller.
    let elements = unsafe { Elements::of(array, &INT8) };
    let mut numbers = text::list_for(elements.count);
    for element in elements.iter() {
        numbers.push(element?.value() as i64);
    }
    Some(numbers)
}

/// The numbers of an array; None: an element is NULL.
///
/// # Safety
/// `array` is an array of int2, not null.
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
    // SAFETY: `count` values and nulls, of that type.
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
