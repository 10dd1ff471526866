//! Finds rows by the columns of an index without a statement, as they are now: committed, or written by this
//! transaction. A statement of a SERIALIZABLE transaction locks what it reads against inserts of others. At the end of
//! an index, where everyone inserts, transactions would fail that have nothing to do with each other. A scan with a
//! snapshot of its own takes no such locks. Called on the main thread, in a transaction.

use super::table::{Value, row_id};
use outbox_core::engine::RowId;
use pgrx::datum::Uuid;
use pgrx::pg_sys;
use std::ffi::CStr;

/// An open table. It has no Drop: after an ERROR the end of the (sub)transaction closes the relation.
pub struct Lookup<const N: usize> {
    table: pg_sys::Relation,
    /// 0: no index begins with the columns, so the whole table is read.
    index: u32,
    columns: [i16; N],
}

/// A value that is looked for, in a column of its type.
#[derive(Clone, Copy)]
pub struct Key {
    equal: u32,
    value: pg_sys::Datum,
}

impl Key {
    pub fn int2(value: i16) -> Self {
        Self::of(pg_sys::F_INT2EQ, Value::Int2(value))
    }

    pub fn int8(value: i64) -> Self {
        Self::of(pg_sys::F_INT8EQ, Value::Int8(value))
    }

    /// For columns with the collation "C".
    pub fn text(value: &str) -> Self {
        Self::of(pg_sys::F_TEXTEQ, Value::Text(value))
    }

    pub fn uuid(value: Uuid) -> Self {
        Self::of(pg_sys::F_UUID_EQ, Value::Uuid(value))
    }

    fn of(equal: u32, value: Value) -> Self {
        let value = value.datum();
        Self { equal, value }
    }
}

impl<const N: usize> Lookup<N> {
    /// Opens a table. None: it does not exist or lacks a column.
    pub fn open(table: u32, columns: [&CStr; N]) -> Option<Self> {
        // SAFETY: `close` or the end of the transaction closes the relation.
        unsafe {
            let columns = columns.map(|name| pg_sys::get_attnum(table.into(), name.as_ptr()));
            if columns.iter().any(|column| *column <= 0) {
                return None;
            }
            let table = pg_sys::try_relation_open(table.into(), pg_sys::AccessShareLock as i32);
            if table.is_null() {
                return None;
            }
            let index = index_on(table, &columns);
            Some(Self { table, index, columns })
        }
    }

    /// Closes the table and keeps its lock.
    pub fn close(self) {
        // SAFETY: the table is open, and the resource owner that opened it is current.
        unsafe { pg_sys::relation_close(self.table, pg_sys::NoLock as i32) }
    }

    /// Where a row with these values is.
    pub fn find(&self, keys: [Key; N]) -> Option<RowId> {
        pgrx::check_for_interrupts!();
        // SAFETY: the functions compare what is in the columns. The tuple is read while the scan holds it.
        unsafe {
            let equal = pg_sys::BTEqualStrategyNumber as u16;
            let mut scan_keys = [pg_sys::ScanKeyData::default(); N];
            for (scan_key, (column, key)) in scan_keys.iter_mut().zip(self.columns.iter().zip(keys)) {
                pg_sys::ScanKeyInit(scan_key, *column, equal, key.equal.into(), key.value);
            }
            let scan = pg_sys::systable_beginscan(
                self.table,
                self.index.into(),
                self.index != 0,
                &raw mut pg_sys::SnapshotSelfData,
                N as i32,
                scan_keys.as_mut_ptr(),
            );
            let tuple = pg_sys::systable_getnext(scan);
            let found = (!tuple.is_null()).then(|| row_id((*tuple).t_self));
            pg_sys::systable_endscan(scan);
            found
        }
    }
}

/// Finds one row; see [`Lookup`].
pub fn find<const N: usize>(table: u32, columns: [&CStr; N], keys: [Key; N]) -> Option<RowId> {
    let table = Lookup::open(table, columns)?;
    let found = table.find(keys);
    table.close();
    found
}

/// An index that begins with these columns.
///
/// # Safety
/// The relation is open.
unsafe fn index_on(table: pg_sys::Relation, columns: &[i16]) -> u32 {
    // SAFETY: promised by the caller. The lock of the table keeps the index from being dropped.
    unsafe {
        let list = pg_sys::RelationGetIndexList(table);
        let count = list.as_ref().map_or(0, |list| list.length);
        let found = (0..count).map(|nth| pg_sys::list_nth_oid(list, nth)).find(|oid| {
            let index = pg_sys::index_open(*oid, pg_sys::AccessShareLock as i32);
            let (form, tuple) = (&*(*index).rd_index, (*index).rd_indextuple);
            let is_whole = pg_sys::heap_attisnull(tuple, pg_sys::Anum_pg_index_indpred as i32, std::ptr::null_mut());
            let keys = form.indkey.values.as_slice(form.indnkeyatts as usize);
            let is_btree = (*(*index).rd_rel).relam == pg_sys::BTREE_AM_OID;
            let fits = is_btree && form.indisvalid && is_whole && keys.starts_with(columns);
            pg_sys::index_close(index, pg_sys::NoLock as i32);
            fits
        });
        pg_sys::list_free(list);
        found.map_or(0, |oid| oid.to_u32())
    }
}
