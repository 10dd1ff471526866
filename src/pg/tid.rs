//! A row's place in its table, the type `tid`.

use pgrx::datum::{FromDatum, IntoDatum};
use pgrx::pg_sys;
use std::fmt;

/// Block and line, as in `(7,1)`.
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

    /// Whether this version of a row is what this transaction sees now: its own, and neither changed nor removed since.
    pub fn is_current_in(self, table: u32) -> bool {
        let mut buffer = 0;
        // SAFETY: the transaction has locked the table. A tuple that is found stays pinned until the buffer is released.
        unsafe {
            let relation = pg_sys::RelationIdGetRelation(table.into());
            if relation.is_null() {
                return false;
            }
            let mut tuple = pg_sys::HeapTupleData::default();
            tuple.t_self.ip_blkid.bi_hi = (self.block >> 16) as u16;
            tuple.t_self.ip_blkid.bi_lo = self.block as u16;
            tuple.t_self.ip_posid = self.line;
            let snapshot = &raw mut pg_sys::SnapshotSelfData;
            let found = pg_sys::heap_fetch(relation, snapshot, &mut tuple, &mut buffer, false);
            if found {
                pg_sys::ReleaseBuffer(buffer);
            }
            pg_sys::RelationClose(relation);
            found
        }
    }

    pub fn block_and_line(self) -> (u32, u16) {
        (self.block, self.line)
    }
}

impl fmt::Display for Tid {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "({},{})", self.block, self.line)
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

/// Only for its type: rows are asked whether it fits.
impl IntoDatum for Tid {
    fn into_datum(self) -> Option<pg_sys::Datum> {
        None
    }

    fn type_oid() -> pg_sys::Oid {
        pg_sys::TIDOID
    }
}
