//! Scans of an open table, without a statement: the only place that begins one. Called on the main thread, in a
//! transaction. Nothing here has a destructor: after an ERROR the end of the transaction frees all of it.

use super::txn::Xid;
use super::{major, text};
use outbox_core::engine::RowId;
use pgrx::datum::{IntoDatum, Uuid};
use pgrx::pg_sys;

/// What the transaction saw at one moment.
pub struct RowSnapshot(pub(super) pg_sys::Snapshot);

/// Runs `body` with a new snapshot, which its statements that only read see, too.
pub fn with_snapshot<T>(body: impl FnOnce(&RowSnapshot) -> T) -> T {
    // SAFETY: inside a transaction. Both are undone in the reverse order, or by the end of the transaction.
    unsafe {
        let snapshot = pg_sys::RegisterSnapshot(pg_sys::GetTransactionSnapshot());
        pg_sys::PushActiveSnapshot(snapshot);
        let value = body(&RowSnapshot(snapshot));
        pg_sys::PopActiveSnapshot();
        pg_sys::UnregisterSnapshot(snapshot);
        value
    }
}

/// A condition for a column.
#[derive(Clone, Copy)]
pub enum Is<'a> {
    /// This text, in the encoding of the database. The column compares bytes.
    Text(&'a [u8]),
    TextAbove(&'a [u8]),
    Int2(i16),
    Int2Above(i16),
    Int8(i64),
    Above(i64),
    AtLeast(i64),
    AtMost(i64),
    Uuid(Uuid),
}

impl Is<'_> {
    /// The scan key for the column with this number.
    fn scan_key(self, column: i16) -> pg_sys::ScanKeyData {
        let (strategy, function, value) = self.parts();
        let mut key = pg_sys::ScanKeyData::default();
        // SAFETY: fills the key. The function compares values of the column's type, by the collation "C".
        unsafe { pg_sys::ScanKeyInit(&mut key, column, strategy as u16, function.into(), value) };
        key
    }

    /// The strategy, the function and the value of the scan key.
    fn parts(self) -> (u32, u32, pg_sys::Datum) {
        let (equal, greater, at_least, at_most) = (
            pg_sys::BTEqualStrategyNumber,
            pg_sys::BTGreaterStrategyNumber,
            pg_sys::BTGreaterEqualStrategyNumber,
            pg_sys::BTLessEqualStrategyNumber,
        );
        match self {
            Self::Text(bytes) => (equal, pg_sys::F_TEXTEQ, text::raw_to_datum(bytes)),
            Self::TextAbove(bytes) => (greater, pg_sys::F_TEXT_GT, text::raw_to_datum(bytes)),
            Self::Int2(value) => (equal, pg_sys::F_INT2EQ, value.into()),
            Self::Int2Above(value) => (greater, pg_sys::F_INT2GT, value.into()),
            Self::Int8(value) => (equal, pg_sys::F_INT8EQ, value.into()),
            Self::Above(value) => (greater, pg_sys::F_INT8GT, value.into()),
            Self::AtLeast(value) => (at_least, pg_sys::F_INT8GE, value.into()),
            Self::AtMost(value) => (at_most, pg_sys::F_INT8LE, value.into()),
            Self::Uuid(value) => (
                equal,
                pg_sys::F_UUID_EQ,
                value.into_datum().unwrap_or(pg_sys::Datum::null()),
            ),
        }
    }
}

/// The primary key of an open table, opened. None: there is none, or it does not begin with these columns.
///
/// # Safety
/// The table is locked.
pub(super) unsafe fn open_primary_key(table: pg_sys::Relation, columns: &[i16]) -> Option<pg_sys::Relation> {
    // SAFETY: promised by the caller: the index cannot be dropped.
    unsafe {
        let key = major::primary_key(table);
        if key == pg_sys::InvalidOid {
            return None;
        }
        let index = pg_sys::index_open(key, pg_sys::AccessShareLock as i32);
        let described = &*(*index).rd_index;
        let of_key = described.indkey.values.as_slice(described.indnkeyatts as usize);
        if of_key.starts_with(columns) {
            return Some(index);
        }
        pg_sys::index_close(index, pg_sys::NoLock as i32);
        None
    }
}

/// A scan that has begun.
pub(super) struct Scan {
    scan: pg_sys::SysScanDesc,
    /// Whether the rows come in the order of an index.
    is_ordered: bool,
    descriptor: pg_sys::TupleDesc,
    /// The current row. The scan holds it until the next one is read.
    row: pg_sys::HeapTuple,
    values: Vec<pg_sys::Datum>,
    nulls: Vec<bool>,
}

impl Scan {
    /// Begins a scan of the rows that meet these conditions, each for a column by its number in the table. By an index
    /// the rows come in its order.
    ///
    /// # Safety
    /// The relations are open until the end of the scan, and so is the snapshot.
    pub unsafe fn begin<'a>(
        table: pg_sys::Relation,
        index: Option<pg_sys::Relation>,
        snapshot: pg_sys::Snapshot,
        conditions: impl Iterator<Item = (i16, Is<'a>)>,
    ) -> Self {
        let mut keys: Vec<_> = conditions.map(|(column, is)| is.scan_key(column)).collect();
        let (count, keys) = (keys.len() as i32, keys.as_mut_ptr());
        // SAFETY: promised by the caller; the keys are copied, with the columns of the index in the place of those of
        // the table.
        unsafe {
            let scan = match index {
                Some(index) => pg_sys::systable_beginscan_ordered(table, index, snapshot, count, keys),
                None => pg_sys::systable_beginscan(table, pg_sys::InvalidOid, false, snapshot, count, keys),
            };
            let columns = (*(*table).rd_att).natts as usize;
            Self {
                scan,
                is_ordered: index.is_some(),
                descriptor: (*table).rd_att,
                row: std::ptr::null_mut(),
                values: vec![pg_sys::Datum::null(); columns],
                nulls: vec![true; columns],
            }
        }
    }

    /// Begins again, with other values in the conditions, which are for the first columns of the index in their order.
    pub fn again<'a>(&mut self, values: impl Iterator<Item = Is<'a>>) {
        let mut keys: Vec<_> = (1..).zip(values).map(|(column, is)| is.scan_key(column)).collect();
        // SAFETY: the scan is by an index; the keys are copied.
        unsafe {
            let (count, keys) = (keys.len() as i32, keys.as_mut_ptr());
            pg_sys::index_rescan((*self.scan).iscan, keys, count, std::ptr::null_mut(), 0);
        }
    }

    /// Goes to the next row. False: there is none.
    pub fn next(&mut self) -> bool {
        pgrx::check_for_interrupts!();
        // SAFETY: the scan is open; a value and a flag for each column.
        unsafe {
            self.row = match self.is_ordered {
                true => pg_sys::systable_getnext_ordered(self.scan, pg_sys::ScanDirection::ForwardScanDirection),
                false => pg_sys::systable_getnext(self.scan),
            };
            if self.row.is_null() {
                return false;
            }
            let (values, nulls) = (self.values.as_mut_ptr(), self.nulls.as_mut_ptr());
            pg_sys::heap_deform_tuple(self.row, self.descriptor, values, nulls);
            true
        }
    }

    /// The values of the current row, and whether each is NULL, in the order of the table's columns.
    pub fn row(&self) -> (&[pg_sys::Datum], &[bool]) {
        (&self.values, &self.nulls)
    }

    /// Where the current row is, and the transaction that wrote it.
    pub fn place(&self) -> (RowId, Xid) {
        let (mut is_null, xmin) = (false, pg_sys::MinTransactionIdAttributeNumber);
        // SAFETY: the scan holds the row.
        unsafe {
            let xmin = pg_sys::heap_getsysattr(self.row, xmin, self.descriptor, &mut is_null);
            (row_id((*self.row).t_self), (xmin.value() as u32).into())
        }
    }

    pub fn end(self) {
        // SAFETY: the scan is open.
        unsafe {
            match self.is_ordered {
                true => pg_sys::systable_endscan_ordered(self.scan),
                false => pg_sys::systable_endscan(self.scan),
            }
        }
    }
}

pub(super) fn row_id(pointer: pg_sys::ItemPointerData) -> RowId {
    RowId {
        block: u32::from(pointer.ip_blkid.bi_hi) << 16 | u32::from(pointer.ip_blkid.bi_lo),
        line: pointer.ip_posid,
    }
}

pub(super) fn tid(row_id: RowId) -> pg_sys::ItemPointerData {
    let (bi_hi, bi_lo) = ((row_id.block >> 16) as u16, row_id.block as u16);
    pg_sys::ItemPointerData {
        ip_blkid: pg_sys::BlockIdData { bi_hi, bi_lo },
        ip_posid: row_id.line,
    }
}
