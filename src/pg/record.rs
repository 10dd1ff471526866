//! A row as an argument of type `record`. `args` calls it on the main thread. A caller can pass any row, so the type of
//! each column is checked.

use super::text::{self, Unreadable};
use super::{major, report};
use pgrx::{PgSqlErrorCode, pg_sys};

/// Some columns of a row, in their order. Valid while the call runs.
pub struct Record(Vec<Field>);

struct Field {
    kind: pg_sys::Oid,
    value: Option<pg_sys::Datum>,
}

impl Record {
    /// The columns from the column with this name on; empty if there is no such column.
    ///
    /// # Safety
    /// `datum` is a row in an argument of the running call, not null.
    pub(super) unsafe fn of(datum: pg_sys::Datum, first: &str) -> Self {
        // SAFETY: promised by the caller. The deformed values point into the row. No value here has a destructor that
        // calls the server, and after an ERROR the server releases the descriptor.
        unsafe {
            let header: pg_sys::HeapTupleHeader = pg_sys::pg_detoast_datum(datum.cast_mut_ptr()).cast();
            let of = (*header).t_choice.t_datum;
            let descriptor = pg_sys::lookup_rowtype_tupdesc(of.datum_typeid, of.datum_typmod);
            let count = (*descriptor).natts as usize;
            let (mut values, mut nulls) = (vec![pg_sys::Datum::null(); count], vec![true; count]);
            let mut tuple = pg_sys::HeapTupleData {
                t_len: pgrx::varlena::varsize(header.cast()) as u32,
                t_data: header,
                ..pg_sys::HeapTupleData::default()
            };
            pg_sys::heap_deform_tuple(&mut tuple, descriptor, values.as_mut_ptr(), nulls.as_mut_ptr());
            let attributes = major::attributes(descriptor);
            let is_first = |attribute: &&pg_sys::FormData_pg_attribute| {
                let name = std::ffi::CStr::from_ptr(attribute.attname.data.as_ptr());
                name.to_bytes() == first.as_bytes()
            };
            let from = attributes.iter().take_while(|attribute| !is_first(attribute)).count();
            let fields = (from..count).map(|index| Field {
                kind: attributes[index].atttypid,
                value: (!nulls[index]).then_some(values[index]),
            });
            let record = Self(fields.collect());
            if (*descriptor).tdrefcount >= 0 {
                pg_sys::DecrTupleDescRefCount(descriptor);
            }
            record
        }
    }

    /// The text in the column with this index, counted from zero. Raises if the column has another type.
    pub fn text(&self, index: usize) -> Result<Option<String>, Unreadable> {
        let value = self.value(index, pg_sys::TEXTOID);
        // SAFETY: a text, as its type says.
        value.map(|datum| unsafe { text::of_datum(datum) }).transpose()
    }

    /// The number in the column with this index, counted from zero. Raises if the column is no bigint.
    pub fn int8(&self, index: usize) -> Option<i64> {
        self.value(index, pg_sys::INT8OID).map(|datum| datum.value() as i64)
    }

    fn value(&self, index: usize, kind: pg_sys::Oid) -> Option<pg_sys::Datum> {
        match self.0.get(index) {
            Some(field) if field.kind == kind => field.value,
            _ => report::raise(
                PgSqlErrorCode::ERRCODE_DATATYPE_MISMATCH,
                "the row is not of the type that the function reads",
                None,
                Some("Pass a row of outbox_internal.event_text or outbox_internal.claimed."),
            ),
        }
    }
}
