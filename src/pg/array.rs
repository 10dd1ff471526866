//! One-dimensional arrays, converted between the server and Rust. `args` and `spi` call it on the main thread. A
//! forbidden NULL is a user's error. An array that does not fit into memory raises an error instead of aborting the
//! process.

use super::text::{self, Unreadable};
use pgrx::pg_sys;
use std::ffi::{c_char, c_int};

/// The elements of an array, deconstructed by the server in its memory. `iter` returns None for NULL.
struct Elements {
    values: *mut pg_sys::Datum,
    nulls: *mut bool,
    count: usize,
}

impl Elements {
    /// # Safety
    /// `array` is an array, not null.
    unsafe fn of(array: pg_sys::Datum) -> Self {
        let (mut values, mut nulls, mut count) = (std::ptr::null_mut(), std::ptr::null_mut(), 0);
        // SAFETY: promised by the caller. The server allocates the memory, so a lack of it raises.
        unsafe {
            let array: *mut pg_sys::ArrayType = pg_sys::pg_detoast_datum(array.cast_mut_ptr()).cast();
            let (kind, (bytes, by_value, align)) = ((*array).elemtype, layout((*array).elemtype));
            pg_sys::deconstruct_array(array, kind, bytes, by_value, align, &mut values, &mut nulls, &mut count);
        }
        let count = count as usize;
        Self { values, nulls, count }
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
    let elements = unsafe { Elements::of(array) };
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
    let elements = unsafe { Elements::of(array) };
    let mut texts = text::list_for(elements.count);
    for element in elements.iter().flatten() {
        // SAFETY: an element of that array.
        texts.extend(unsafe { text::with_bytes(element, lossy) });
    }
    texts
}

/// The integers of an array, as wide as an int8; None: an element is NULL.
///
/// # Safety
/// `array` is an array of int2, int4 or int8, not null.
pub unsafe fn integers(array: pg_sys::Datum) -> Option<Vec<i64>> {
    // SAFETY: promised by the caller.
    let elements = unsafe { Elements::of(array) };
    let mut numbers = text::list_for(elements.count);
    for element in elements.iter() {
        numbers.push(element?.value() as i64);
    }
    Some(numbers)
}

/// An array of elements of a type, in the current memory context.
pub fn of_datums(elements: impl Iterator<Item = Option<pg_sys::Datum>>, kind: pg_sys::Oid) -> pg_sys::Datum {
    let (mut values, mut nulls) = (Vec::new(), Vec::new());
    for element in elements {
        nulls.push(element.is_none());
        values.push(element.unwrap_or(pg_sys::Datum::null()));
    }
    let (mut count, mut first) = (values.len() as c_int, 1);
    let dimensions = c_int::from(count > 0);
    // SAFETY: `count` values and nulls, of that type.
    unsafe {
        let (bytes, by_value, align) = layout(kind);
        pg_sys::construct_md_array(
            values.as_mut_ptr(),
            nulls.as_mut_ptr(),
            dimensions,
            &mut count,
            &mut first,
            kind,
            bytes,
            by_value,
            align,
        )
        .into()
    }
}

/// The length, kind of passing and alignment of a type.
fn layout(kind: pg_sys::Oid) -> (c_int, bool, c_char) {
    let (mut bytes, mut by_value, mut align) = (0, false, 0);
    // SAFETY: a lookup in the caches, inside a transaction.
    unsafe { pg_sys::get_typlenbyvalalign(kind, &mut bytes, &mut by_value, &mut align) };
    (c_int::from(bytes), by_value, align)
}
