//! A row as a statement of this transaction has seen it, and whether it is still that row when the transaction commits. By
//! then its table may have another file, or none (TRUNCATE, CLUSTER, DROP, ALTER TABLE), and nothing may raise: it would
//! make the COMMIT fail. So no table is opened then and nothing is read from disk: what is not certain is "no".

use super::table;
use super::tid::Tid;
use pgrx::pg_sys;

#[cfg(feature = "pg15")]
type File = pg_sys::RelFileNode;
#[cfg(not(feature = "pg15"))]
type File = pg_sys::RelFileLocator;

#[derive(Clone, Copy)]
pub struct Seen {
    tid: Tid,
    seq: i64,
    file: File,
    /// Where the block was in shared buffers.
    buffer: pg_sys::Buffer,
    xmin: pg_sys::TransactionId,
    /// How often tables had changed by then.
    changes: u64,
}

impl Seen {
    /// A row of a table that this transaction has locked, whose first column is `seq`. None: it is not there, or somebody
    /// has changed or removed it.
    pub fn of(table: u32, tid: Tid, seq: i64) -> Option<Self> {
        let changes = table::changes_from_now(table);
        let (block, line) = tid.block_and_line();
        // SAFETY: inside a transaction that has locked the table; what is opened is closed.
        unsafe {
            let relation = pg_sys::table_open(table.into(), pg_sys::NoLock as i32);
            let seen = is_plain(relation).then(|| {
                #[cfg(feature = "pg15")]
                let file = (*relation).rd_node;
                #[cfg(not(feature = "pg15"))]
                let file = (*relation).rd_locator;
                let buffer = pg_sys::ReadBuffer(relation, block);
                let xmin = current(buffer, line, seq);
                let seen = xmin.map(|xmin| (file, buffer, xmin));
                pg_sys::ReleaseBuffer(buffer);
                seen
            });
            pg_sys::table_close(relation, pg_sys::NoLock as i32);
            let (file, buffer, xmin) = seen.flatten()?;
            Some(Self {
                tid,
                seq,
                file,
                buffer,
                xmin,
                changes,
            })
        }
    }

    pub fn tid(&self) -> Tid {
        self.tid
    }

    /// Whether this version of the row is still what the transaction sees, in the file that is still the table's. False
    /// also where that cannot be told at once. Reads no more than one buffer.
    pub fn is_current(&self) -> bool {
        if self.changes != table::changes() {
            return false;
        }
        let (block, line) = self.tid.block_and_line();
        // SAFETY: inside a transaction; the buffer stays pinned until it is released.
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

/// Rows of it lie in shared buffers, and the first column is what a seq is.
///
/// # Safety
/// The relation is open.
unsafe fn is_plain(relation: pg_sys::Relation) -> bool {
    // SAFETY: as promised by the caller; there are as many columns as the descriptor says.
    unsafe {
        let (class, descriptor) = (&*(*relation).rd_rel, &*(*relation).rd_att);
        let is_heap = class.relkind as u8 == pg_sys::RELKIND_RELATION && class.relam == pg_sys::HEAP_TABLE_AM_OID;
        let first = (descriptor.natts > 0).then(|| &descriptor.attrs.as_slice(1)[0]);
        let is_seq = first.is_some_and(|first| !first.attisdropped && first.atttypid == pg_sys::INT8OID);
        is_heap && class.relpersistence as u8 != pg_sys::RELPERSISTENCE_TEMP && is_seq
    }
}

/// The xmin of the row in this line, if it has this seq and is neither changed nor removed. To lock it is no change.
///
/// # Safety
/// The buffer is pinned, and of a heap whose first column is of type int8.
unsafe fn current(buffer: pg_sys::Buffer, line: u16, seq: i64) -> Option<pg_sys::TransactionId> {
    // SAFETY: as promised by the caller; while the buffer is locked what its line pointers say holds.
    unsafe {
        pg_sys::LockBuffer(buffer, pg_sys::BUFFER_LOCK_SHARE as i32);
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
            is_it.then(|| pg_sys::HeapTupleHeaderGetRawXmin(tuple))
        });
        pg_sys::LockBuffer(buffer, pg_sys::BUFFER_LOCK_UNLOCK as i32);
        found
    }
}
