//! Finds rows of an open table by its primary key, as one snapshot sees them, without a statement. Called on the main
//! thread, in a transaction. Nothing here has a destructor: after an ERROR the end of the transaction frees all of it.

use super::table::{Layout, Row, RowCopy, Table};
use super::txn::Xid;
use super::{major, text};
use pgrx::pg_sys;

/// What the transaction saw at one moment.
pub struct RowSnapshot(pg_sys::Snapshot);

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

/// A condition for a column of the primary key.
#[derive(Clone, Copy)]
pub enum Is<'a> {
    /// This text, in the encoding of the database. The column compares bytes.
    Text(&'a [u8]),
    TextAbove(&'a [u8]),
    Int2(i16),
    Int2Above(i16),
    Above(i64),
    AtLeast(i64),
    AtMost(i64),
}

impl Is<'_> {
    /// The scan key for the column with this number.
    pub(super) fn scan_key(self, column: i16) -> pg_sys::ScanKeyData {
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
            Self::Above(value) => (greater, pg_sys::F_INT8GT, value.into()),
            Self::AtLeast(value) => (at_least, pg_sys::F_INT8GE, value.into()),
            Self::AtMost(value) => (at_most, pg_sys::F_INT8LE, value.into()),
        }
    }
}

/// Opens the primary key of an open table. None: there is none, or it does not begin with these columns.
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

pub struct KeyScan<'a> {
    table: &'a Table,
    index: pg_sys::Relation,
    scan: pg_sys::IndexScanDesc,
    slot: *mut pg_sys::TupleTableSlot,
    values: Vec<pg_sys::Datum>,
    nulls: Vec<bool>,
}

impl<'a> KeyScan<'a> {
    /// Begins a scan with this number of conditions at each [`find`](Self::find). [`Table::has`] must be true for the
    /// table. None: its primary key does not begin with these columns.
    pub fn begin<const N: usize>(
        table: &'a Table,
        layout: &Layout,
        keys: [&str; N],
        conditions: usize,
        snapshot: &RowSnapshot,
    ) -> Option<Self> {
        let relation = table.relation();
        // SAFETY: the table is open and locked, so its index cannot be dropped.
        unsafe {
            let index = open_primary_key(relation, &table.attributes(layout, keys)?)?;
            Some(Self {
                table,
                index,
                scan: major::index_beginscan(relation, index, snapshot.0, conditions as i32),
                slot: pg_sys::table_slot_create(relation, std::ptr::null_mut()),
                values: Vec::new(),
                nulls: Vec::new(),
            })
        }
    }

    /// Goes before the first row that meets these conditions, each for a column with its place in the key, from one.
    pub fn find(&mut self, conditions: &[(i16, Is)]) {
        let mut keys: Vec<_> = (conditions.iter().map(|(place, is)| is.scan_key(*place))).collect();
        // SAFETY: as many keys as the scan was begun with; they are copied.
        unsafe { pg_sys::index_rescan(self.scan, keys.as_mut_ptr(), keys.len() as i32, std::ptr::null_mut(), 0) }
    }

    /// The next row in the order of the key.
    pub fn next(&mut self) -> Option<Row<'_>> {
        pgrx::check_for_interrupts!();
        // SAFETY: the slot is one for this table, and holds the row until the next call.
        unsafe {
            let forward = pg_sys::ScanDirection::ForwardScanDirection;
            if !pg_sys::index_getnext_slot(self.scan, forward, self.slot) {
                return None;
            }
            pg_sys::slot_getallattrs(self.slot);
            let slot = &*self.slot;
            let attribute = |index: usize| (*slot.tts_values.add(index), *slot.tts_isnull.add(index));
            self.table.of_layout(attribute, &mut self.values, &mut self.nulls);
        }
        Some(self.row())
    }

    /// The row that [`next`](Self::next) returned last.
    pub fn row(&self) -> Row<'_> {
        Row::new(&self.values, &self.nulls)
    }

    /// A copy of that row, and the transaction that wrote it.
    pub fn copy(&self) -> (RowCopy, Xid) {
        // SAFETY: the slot holds the row.
        unsafe {
            let (mut is_null, xmin) = (false, pg_sys::MinTransactionIdAttributeNumber);
            let xmin = pg_sys::slot_getsysattr(self.slot, xmin, &mut is_null);
            let copy = pg_sys::ExecCopySlotHeapTuple(self.slot);
            (RowCopy(copy), (xmin.value() as u32).into())
        }
    }

    /// Ends the scan and keeps the lock of the index.
    pub fn end(self) {
        // SAFETY: all are open.
        unsafe {
            pg_sys::ExecDropSingleTupleTableSlot(self.slot);
            pg_sys::index_endscan(self.scan);
            pg_sys::index_close(self.index, pg_sys::NoLock as i32);
        }
    }
}
