//! Checks at COMMIT whether a row is still the version that a statement of the transaction saw. Sessions call it on the
//! main thread. By then the table may have another file or none (TRUNCATE, CLUSTER, DROP, ALTER TABLE). Code must not
//! raise then, because that would make the COMMIT fail. So the check opens no table and reads nothing from disk; if it
//! is not certain, the answer is no.

use super::{major, table};
use outbox_core::engine::RowId;
use pgrx::pg_sys;

#[derive(Clone, Copy)]
pub struct Seen {
    row_id: RowId,
    seq: i64,
    file: major::File,
    /// The shared buffer that contained the block.
    buffer: pg_sys::Buffer,
    xmin: pg_sys::TransactionId,
    /// `table::changes` when the row was seen.
    changes: u64,
}

impl Seen {
    /// Records a row of a table that this transaction has locked. None: there is no row with this `seq` in its first
    /// column, or a transaction changed or deleted it.
    pub fn of(table: u32, row_id: RowId, seq: i64) -> Option<Self> {
        let changes = table::changes_from_now(table);
        let RowId { block, line } = row_id;
        // SAFETY: inside a transaction that has locked the table. The relation is closed again and the buffer released.
        unsafe {
            let relation = pg_sys::table_open(table.into(), pg_sys::NoLock as i32);
            let seen = is_plain(relation).then(|| {
                let file = major::file(relation);
                let buffer = pg_sys::ReadBuffer(relation, block);
                let xmin = current(buffer, line, seq);
                let seen = xmin.map(|xmin| (file, buffer, xmin));
                pg_sys::ReleaseBuffer(buffer);
                seen
            });
            pg_sys::table_close(relation, pg_sys::NoLock as i32);
            let (file, buffer, xmin) = seen.flatten()?;
            Some(Self {
                row_id,
                seq,
                file,
                buffer,
                xmin,
                changes,
            })
        }
    }

    pub fn row_id(&self) -> RowId {
        self.row_id
    }

    /// Whether the transaction still sees this version of the row, and the table still has the same file. False also if
    /// that is uncertain. Reads at most one buffer.
    pub fn is_current(&self) -> bool {
        if self.changes != table::changes() {
            return false;
        }
        let RowId { block, line } = self.row_id;
        // SAFETY: inside a transaction. The buffer stays pinned until it is released.
        unsafe {
            let fork = pg_sys::ForkNumber::MAIN_FORKNUM;
            if !pg_sys::ReadRecentBuffer(self.file, fork, block, self.buffer) {
                return false;
            }
            let xmin = current(self.buffer, line, self.seq);
            pg_sys::ReleaseBuffer(self.buffer);
            xmin == Some(self.xmin)
        }
    }
}

/// Whether it is a heap with its rows in shared buffers and a bigint as the first column.
///
/// # Safety
/// The relation is open.
unsafe fn is_plain(relation: pg_sys::Relation) -> bool {
    // SAFETY: promised by the caller.
    unsafe {
        let (class, columns) = (&*(*relation).rd_rel, major::attributes((*relation).rd_att));
        let is_heap = class.relkind as u8 == pg_sys::RELKIND_RELATION && class.relam == pg_sys::HEAP_TABLE_AM_OID;
        let is_seq = columns
            .first()
            .is_some_and(|first| !first.attisdropped && first.atttypid == pg_sys::INT8OID);
        is_heap && class.relpersistence as u8 != pg_sys::RELPERSISTENCE_TEMP && is_seq
    }
}

/// The xmin of the row at this line pointer, if it has this seq and is neither changed nor deleted. A lock on the row
/// is no change.
///
/// # Safety
/// The buffer is pinned and belongs to a heap with a first column of type int8.
unsafe fn current(buffer: pg_sys::Buffer, line: u16, seq: i64) -> Option<pg_sys::TransactionId> {
    // SAFETY: promised by the caller. While the buffer is locked, its line pointers are valid.
    unsafe {
        pg_sys::LockBuffer(buffer, pg_sys::BUFFER_LOCK_SHARE as _);
        let page = pg_sys::BufferGetPage(buffer);
        let is_there = (1..=pg_sys::PageGetMaxOffsetNumber(page)).contains(&line);
        let item = is_there.then(|| pg_sys::PageGetItemId(page, line));
        let item = item.filter(|item| (**item).lp_flags() == pg_sys::LP_NORMAL);
        let found = item.and_then(|item| {
            let tuple: *const pg_sys::HeapTupleHeaderData = pg_sys::PageGetItem(page, item).cast();
            let flags = u32::from((*tuple).t_infomask);
            let is_current = flags & (pg_sys::HEAP_XMAX_INVALID | pg_sys::HEAP_XMAX_LOCK_ONLY) != 0;
            let has_first = flags & pg_sys::HEAP_HASNULL == 0 || (*tuple).t_bits.as_slice(1)[0] & 1 == 1;
            let data = tuple.cast::<u8>().add(usize::from((*tuple).t_hoff)).cast::<i64>();
            let is_it = is_current && has_first && data.read_unaligned() == seq;
            is_it.then(|| (*tuple).t_choice.t_heap.t_xmin) // HeapTupleHeaderGetRawXmin
        });
        pg_sys::LockBuffer(buffer, pg_sys::BUFFER_LOCK_UNLOCK as _);
        found
    }
}
