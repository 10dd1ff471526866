//! Finds rows of an open table by its primary key, as one snapshot sees them, without a statement. Called on the main
//! thread, in a transaction. Nothing here has a destructor: after an ERROR the end of the transaction frees all of it.

use super::scan::{Is, RowSnapshot, Scan, open_primary_key};
use super::table::{Layout, Row, Table};
use super::txn::Xid;
use outbox_core::engine::RowId;
use pgrx::pg_sys;

pub struct KeyScan<'a> {
    table: &'a Table,
    index: pg_sys::Relation,
    snapshot: pg_sys::Snapshot,
    /// The numbers of the columns of the key.
    key: Vec<i16>,
    /// None: nothing was looked for yet.
    scan: Option<Scan>,
    values: Vec<pg_sys::Datum>,
    nulls: Vec<bool>,
}

impl<'a> KeyScan<'a> {
    /// Opens the primary key. [`Table::has`] must be true for the table. None: the key does not begin with these
    /// columns.
    pub fn begin<const N: usize>(
        table: &'a Table,
        layout: &Layout,
        key: [&str; N],
        snapshot: &RowSnapshot,
    ) -> Option<Self> {
        let key = table.attributes(layout, key)?.to_vec();
        // SAFETY: the table is open and locked, so its index cannot be dropped.
        let index = unsafe { open_primary_key(table.relation(), &key)? };
        Some(Self {
            table,
            index,
            snapshot: snapshot.0,
            key,
            scan: None,
            values: Vec::new(),
            nulls: Vec::new(),
        })
    }

    /// Goes before the first row that meets these conditions, each for a column by its place in the key, from one.
    pub fn find(&mut self, conditions: &[(usize, Is)]) {
        self.scan.take().into_iter().for_each(Scan::end);
        let conditions = conditions.iter().map(|(place, is)| (self.key[place - 1], *is));
        // SAFETY: all three are open until the end.
        let scan = unsafe { Scan::begin(self.table.relation(), Some(self.index), self.snapshot, conditions) };
        self.scan = Some(scan);
    }

    /// The next row in the order of the key.
    pub fn next(&mut self) -> Option<Row<'_>> {
        let scan = self.scan.as_mut()?;
        if !scan.next() {
            return None;
        }
        let (values, nulls) = scan.row();
        self.table
            .of_layout(|index| (values[index], nulls[index]), &mut self.values, &mut self.nulls);
        Some(self.row())
    }

    /// The row that [`next`](Self::next) returned last.
    pub fn row(&self) -> Row<'_> {
        Row::new(&self.values, &self.nulls)
    }

    /// Where that row is, and the transaction that wrote it. None: there was no row.
    pub fn place(&self) -> Option<(RowId, Xid)> {
        self.scan.as_ref().map(Scan::place)
    }

    /// Ends the scan and keeps the lock of the index.
    pub fn end(self) {
        self.scan.into_iter().for_each(Scan::end);
        // SAFETY: it is open.
        unsafe { pg_sys::index_close(self.index, pg_sys::NoLock as i32) }
    }
}
