//! Finds the first row of a lane (destination and partition) of `outbox`, and the first dead letter. It scans the
//! primary key without a statement. Views call this often, so it must not cost a plan. Each probe takes a new snapshot,
//! while a statement in a view would share the snapshot of the query around it.

use super::scan::{Is, Scan, open_primary_key};
use super::text;
use pgrx::pg_sys;
use std::ffi::CStr;

/// The first row of a lane.
pub struct FirstRow {
    pub destination: String,
    pub partition: u16,
    pub seq: i64,
    /// In µs since 2000.
    pub enqueued_at: i64,
    /// The bytes of the destination as they are stored; `destination` may have been converted.
    raw: Vec<u8>,
}

impl FirstRow {
    /// A row that an earlier probe found.
    pub fn known(destination: String, partition: u16, seq: i64, enqueued_at: i64) -> Self {
        Self {
            raw: text::to_server(&destination).into_owned(),
            destination,
            partition,
            seq,
            enqueued_at,
        }
    }
}

/// An open table with its primary key. It has no destructor: after an ERROR the end of the transaction closes it.
struct KeyedTable<const N: usize> {
    table: pg_sys::Relation,
    index: pg_sys::Relation,
    /// The numbers of the columns to read, those of the key first.
    columns: [i16; N],
}

impl<const N: usize> KeyedTable<N> {
    /// Opens the table. None: it does not exist, lacks a column, or its primary key does not begin with the first
    /// `keys` columns.
    fn open(table: u32, columns: [&CStr; N], keys: usize) -> Option<Self> {
        // SAFETY: inside a transaction, on the main thread. `close` or the end of the transaction closes the relations.
        unsafe {
            let relation = pg_sys::try_relation_open(table.into(), pg_sys::AccessShareLock as i32);
            if relation.is_null() {
                return None;
            }
            let columns = columns.map(|name| pg_sys::get_attnum(table.into(), name.as_ptr()));
            let index = match columns.iter().all(|column| *column > 0) {
                true => open_primary_key(relation, &columns[..keys]),
                false => None,
            };
            let Some(index) = index else {
                pg_sys::relation_close(relation, pg_sys::NoLock as i32);
                return None;
            };
            Some(Self {
                table: relation,
                index,
                columns,
            })
        }
    }

    /// Closes the table and the index, and keeps their locks.
    fn close(self) {
        // SAFETY: both are open.
        unsafe {
            pg_sys::index_close(self.index, pg_sys::NoLock as i32);
            pg_sys::relation_close(self.table, pg_sys::NoLock as i32);
        }
    }

    /// Reads rows that meet these conditions, in the order of the key. Returns the first result of `read` that is not
    /// None. Each condition is for a column by its place in `columns`.
    fn first<T>(&self, conditions: &[(usize, Is)], read: impl Fn([pg_sys::Datum; N]) -> Option<T>) -> Option<T> {
        // SAFETY: both relations are open. The columns are never NULL.
        unsafe {
            let snapshot = pg_sys::RegisterSnapshot(pg_sys::GetTransactionSnapshot());
            let conditions = conditions.iter().map(|(column, is)| (self.columns[*column], *is));
            let mut scan = Scan::begin(self.table, Some(self.index), snapshot, conditions);
            let mut first = None;
            while first.is_none() && scan.next() {
                first = read(self.columns.map(|column| scan.row().0[column as usize - 1]));
            }
            scan.end();
            pg_sys::UnregisterSnapshot(snapshot);
            first
        }
    }
}

/// The open table `outbox`.
pub struct OutboxLanes(KeyedTable<4>);

impl OutboxLanes {
    /// Opens the table. None: it does not exist, or has another primary key.
    pub fn open(table: u32) -> Option<Self> {
        let columns = [c"destination", c"partition", c"seq", c"enqueued_at"];
        KeyedTable::open(table, columns, 3).map(Self)
    }

    pub fn close(self) {
        self.0.close();
    }

    /// The first row of a lane with a seq of at least `floor`.
    pub fn first(&self, destination: &str, partition: u16, floor: i64) -> Option<FirstRow> {
        let raw = text::to_server(destination);
        self.first_row(&[
            (0, Is::Text(&raw)),
            (1, Is::Int2(partition as i16)),
            (2, Is::AtLeast(floor)),
        ])
    }

    /// The first row of the next lane after `before` that has rows; None = of the first lane.
    pub fn next(&self, before: Option<&FirstRow>) -> Option<FirstRow> {
        let Some(before) = before else {
            return self.first_row(&[]);
        };
        let partition = Is::Int2Above(before.partition as i16);
        let same = self.first_row(&[(0, Is::Text(&before.raw)), (1, partition)]);
        same.or_else(|| self.first_row(&[(0, Is::TextAbove(&before.raw))]))
    }

    fn first_row(&self, conditions: &[(usize, Is)]) -> Option<FirstRow> {
        self.0.first(conditions, |[destination, partition, seq, enqueued_at]| {
            // SAFETY: a text, not NULL.
            let raw = unsafe { text::with_bytes(destination, |bytes| Ok(bytes.to_vec())) }.unwrap_or_default();
            Some(FirstRow {
                destination: text::from_server_lossy(&raw),
                partition: partition.value() as i16 as u16,
                seq: seq.value() as i64,
                enqueued_at: enqueued_at.value() as i64,
                raw,
            })
        })
    }
}

/// The seq of the first dead letter with a seq of at least `floor`; with `blocks`, of the first that blocks others.
/// None: there is none, or the table does not have the expected columns and key.
pub fn first_dead(table: u32, blocks: bool, floor: i64) -> Option<i64> {
    let dead: KeyedTable<2> = KeyedTable::open(table, [c"seq", c"blocks"], 1)?;
    let first = dead.first(&[(0, Is::AtLeast(floor))], |[seq, does_block]| {
        (!blocks || does_block.value() & 0xff != 0).then_some(seq.value() as i64)
    });
    dead.close();
    first
}
