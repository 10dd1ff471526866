//! The row id of a table, the type `tid`.

use outbox_core::engine::RowId;
use pgrx::datum::{FromDatum, IntoDatum};
use pgrx::pg_sys;
use std::fmt;

/// Block number and line pointer, as in `(7,1)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tid {
    block: u32,
    line: u16,
}

impl Tid {
    pub fn new(block: u32, line: u16) -> Self {
        Self { block, line }
    }

    pub(super) fn of(pointer: pg_sys::ItemPointerData) -> Self {
        Self {
            block: u32::from(pointer.ip_blkid.bi_hi) << 16 | u32::from(pointer.ip_blkid.bi_lo),
            line: pointer.ip_posid,
        }
    }

    pub fn block_and_line(self) -> (u32, u16) {
        (self.block, self.line)
    }
}

impl fmt::Display for Tid {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        RowId::from(*self).fmt(f)
    }
}

impl From<Tid> for RowId {
    fn from(Tid { block, line }: Tid) -> Self {
        Self { block, line }
    }
}

impl FromDatum for Tid {
    unsafe fn from_polymorphic_datum(datum: pg_sys::Datum, is_null: bool, _: pg_sys::Oid) -> Option<Self> {
        if is_null {
            return None;
        }
        // SAFETY: the caller says that this is a tid, which is passed by reference; it is copied.
        let pointer = unsafe { datum.cast_mut_ptr::<pg_sys::ItemPointerData>().read_unaligned() };
        Some(Self::of(pointer))
    }
}

/// Only for `type_oid`, by which pgrx checks the type of a column.
impl IntoDatum for Tid {
    fn into_datum(self) -> Option<pg_sys::Datum> {
        None
    }

    fn type_oid() -> pg_sys::Oid {
        pg_sys::TIDOID
    }
}
