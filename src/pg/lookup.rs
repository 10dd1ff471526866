//! Finds rows by the columns of an index without a statement, as they are now: committed, or written by this
//! transaction. A statement of a SERIALIZABLE transaction locks what it reads against inserts of others. At the end of
//! an index, where everyone inserts, transactions would fail that have nothing to do with each other. A scan with a
//! snapshot of its own takes no such locks. Called on the main thread, in a transaction.

use super::scan::{Is, Scan};
use outbox_core::engine::RowId;
use pgrx::pg_sys;
use std::ffi::CStr;

/// An open table. It has no Drop: after an ERROR the end of the (sub)transaction closes the relation.
pub struct Lookup<const N: usize> {
    table: pg_sys::Relation,
    /// None: no index begins with the columns, so the whole table is read.
    index: Option<pg_sys::Relation>,
    columns: [i16; N],
    /// By the index, once a row was looked for: to begin a scan costs as much as to find a row.
    scan: Option<Scan>,
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
            Some(Self {
                table,
                index,
                columns,
                scan: None,
            })
        }
    }

    /// Closes the table and the index, and keeps their locks.
    pub fn close(self) {
        self.scan.into_iter().for_each(Scan::end);
        // SAFETY: both are open, and the resource owner that opened them is current.
        unsafe {
            if let Some(index) = self.index {
                pg_sys::index_close(index, pg_sys::NoLock as i32);
            }
            pg_sys::relation_close(self.table, pg_sys::NoLock as i32);
        }
    }

    /// Where a row is whose columns are equal to these values.
    pub fn find(&mut self, values: [Is; N]) -> Option<RowId> {
        if let Some(scan) = &mut self.scan {
            scan.again(values.into_iter());
            return scan.next().then(|| scan.place().0);
        }
        let conditions = self.columns.into_iter().zip(values);
        // SAFETY: both are open until the scan ends; the snapshot is a static of the server.
        let mut scan = unsafe { Scan::begin(self.table, self.index, &raw mut pg_sys::SnapshotSelfData, conditions) };
        let found = scan.next().then(|| scan.place().0);
        match self.index {
            Some(_) => self.scan = Some(scan),
            None => scan.end(),
        }
        found
    }
}

/// Finds one row; see [`Lookup`].
pub fn find<const N: usize>(table: u32, columns: [&CStr; N], values: [Is; N]) -> Option<RowId> {
    let mut table = Lookup::open(table, columns)?;
    let found = table.find(values);
    table.close();
    found
}

/// An index that begins with these columns, opened.
///
/// # Safety
/// The relation is open.
unsafe fn index_on(table: pg_sys::Relation, columns: &[i16]) -> Option<pg_sys::Relation> {
    // SAFETY: promised by the caller. The lock of the table keeps the index from being dropped.
    unsafe {
        let list = pg_sys::RelationGetIndexList(table);
        let count = list.as_ref().map_or(0, |list| list.length);
        let found = (0..count).find_map(|nth| {
            let index = pg_sys::index_open(pg_sys::list_nth_oid(list, nth), pg_sys::AccessShareLock as i32);
            let (form, tuple) = (&*(*index).rd_index, (*index).rd_indextuple);
            let is_whole = pg_sys::heap_attisnull(tuple, pg_sys::Anum_pg_index_indpred as i32, std::ptr::null_mut());
            let keys = form.indkey.values.as_slice(form.indnkeyatts as usize);
            let is_btree = (*(*index).rd_rel).relam == pg_sys::BTREE_AM_OID;
            if is_btree && form.indisvalid && is_whole && keys.starts_with(columns) {
                return Some(index);
            }
            pg_sys::index_close(index, pg_sys::NoLock as i32);
            None
        });
        pg_sys::list_free(list);
        found
    }
}
