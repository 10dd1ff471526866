//! Versions of rows that this transaction has written, read by their places, as core does for AFTER ROW triggers. They
//! become a named table for a statement. Called in the session that wrote them, on its main thread, inside an SPI
//! session, whose end frees the memory.

use super::scan::tid;
use super::trigger::TriggerTable;
use super::{major, text};
use outbox_core::change_log::Version;
use pgrx::pg_sys;

/// Rows with the columns of a table.
pub struct Versions {
    table: pg_sys::Relation,
    rows: *mut pg_sys::Tuplestorestate,
    count: usize,
    /// Where they come from: the table itself, or tables that inherit from it.
    tables: Vec<WrittenTable>,
}

struct WrittenTable {
    oid: u32,
    table: pg_sys::Relation,
    slot: *mut pg_sys::TupleTableSlot,
    /// To the columns of the other table; null: they are the same.
    map: *mut pg_sys::TupleConversionMap,
    mapped: *mut pg_sys::TupleTableSlot,
}

/// What the trigger has reported of a version.
#[derive(Clone, Copy, PartialEq)]
pub enum Side {
    /// It was deleted, or replaced by another one.
    Old,
    New,
}

pub struct Added {
    /// Its size, not compressed.
    pub bytes: usize,
    /// An UPDATE or a MERGE has moved it to another partition.
    pub is_moved: bool,
}

impl Versions {
    /// None: the table does not exist any more.
    pub fn of(table: u32) -> Option<Self> {
        // SAFETY: inside an SPI session. After an error the end of the (sub)transaction closes what is open.
        unsafe {
            let table = pg_sys::try_table_open(table.into(), pg_sys::AccessShareLock as i32);
            (!table.is_null()).then(|| Self {
                table,
                rows: pg_sys::tuplestore_begin_heap(false, false, pg_sys::work_mem),
                count: 0,
                tables: Vec::new(),
            })
        }
    }

    /// The table itself.
    pub fn table(&self) -> TriggerTable {
        // SAFETY: it is open.
        unsafe { TriggerTable::of(self.table) }
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Adds a version. None: this transaction has not written it, whatever a trigger says.
    pub fn add(&mut self, version: Version, side: Side) -> Option<Added> {
        let position = self.table_of(version.table)?;
        let written = &self.tables[position];
        // SAFETY: the table and the slot are open.
        unsafe {
            if !fetch(written.table, written.slot, version) {
                return None;
            }
            let header = header(written.slot);
            if !is_written(header, side) {
                return None;
            }
            let (bytes, is_moved) = (size(written.slot), is_moved_to_partition(header));
            let row = match written.map.is_null() {
                true => written.slot,
                false => pg_sys::execute_attr_map_slot((*written.map).attrMap, written.slot, written.mapped),
            };
            pg_sys::tuplestore_puttupleslot(self.rows, row);
            self.count += 1;
            Some(Added { bytes, is_moved })
        }
    }

    fn table_of(&mut self, oid: u32) -> Option<usize> {
        if let Some(known) = self.tables.iter().position(|written| written.oid == oid) {
            return Some(known);
        }
        // SAFETY: inside an SPI session.
        unsafe {
            let table = pg_sys::try_table_open(oid.into(), pg_sys::AccessShareLock as i32);
            if table.is_null() {
                return None;
            }
            let columns = (*self.table).rd_att;
            let map = pg_sys::convert_tuples_by_name((*table).rd_att, columns);
            let mapped = match map.is_null() {
                true => std::ptr::null_mut(),
                false => pg_sys::MakeSingleTupleTableSlot(columns, &raw const pg_sys::TTSOpsVirtual),
            };
            let slot = pg_sys::table_slot_create(table, std::ptr::null_mut());
            self.tables.push(WrittenTable {
                oid,
                table,
                slot,
                map,
                mapped,
            });
        }
        Some(self.tables.len() - 1)
    }

    /// Makes the rows a table with this name for the statements of the innermost SPI session.
    pub fn show(&self, name: &str) {
        let name = text::to_c_string(name);
        // SAFETY: inside an SPI session, which ends before the memory is freed.
        unsafe {
            let named = pg_sys::palloc0(size_of::<pg_sys::EphemeralNamedRelationData>());
            let named = named.cast::<pg_sys::EphemeralNamedRelationData>();
            (*named).md = pg_sys::EphemeralNamedRelationMetadataData {
                name: pg_sys::pstrdup(name.as_ptr()),
                reliddesc: (*self.table).rd_id,
                tupdesc: std::ptr::null_mut(),
                enrtype: pg_sys::EphemeralNameRelationType::ENR_NAMED_TUPLESTORE,
                enrtuples: self.count as f64,
            };
            (*named).reldata = self.rows.cast();
            let code = pg_sys::SPI_register_relation(named);
            assert!(code >= 0, "SPI_register_relation: {code}");
        }
    }

    pub fn hide(&self, name: &str) {
        let name = text::to_c_string(name);
        // SAFETY: inside the SPI session of `show`.
        unsafe { pg_sys::SPI_unregister_relation(name.as_ptr()) };
    }

    pub fn close(self) {
        // SAFETY: they are open.
        unsafe {
            pg_sys::tuplestore_end(self.rows);
            for written in self.tables {
                if !written.mapped.is_null() {
                    pg_sys::ExecDropSingleTupleTableSlot(written.mapped);
                }
                pg_sys::ExecDropSingleTupleTableSlot(written.slot);
                pg_sys::table_close(written.table, pg_sys::NoLock as i32);
            }
            pg_sys::table_close(self.table, pg_sys::NoLock as i32);
        }
    }
}

/// Whether an UPDATE or a MERGE has moved this version to another partition.
pub fn is_moved(version: Version) -> bool {
    // SAFETY: inside a transaction; what is opened is closed.
    unsafe {
        let table = pg_sys::try_table_open(version.table.into(), pg_sys::AccessShareLock as i32);
        if table.is_null() {
            return false;
        }
        let slot = pg_sys::table_slot_create(table, std::ptr::null_mut());
        let is_moved = fetch(table, slot, version) && is_moved_to_partition(header(slot));
        pg_sys::ExecDropSingleTupleTableSlot(slot);
        pg_sys::table_close(table, pg_sys::NoLock as i32);
        is_moved
    }
}

/// # Safety
/// The table and the slot are open.
unsafe fn fetch(table: pg_sys::Relation, slot: *mut pg_sys::TupleTableSlot, version: Version) -> bool {
    // SAFETY: promised by the caller. The function of the access method may raise an error.
    unsafe {
        let mut place = tid(version.at);
        let Some(read) = (*(*table).rd_tableam).tuple_fetch_row_version else {
            return false;
        };
        pg_sys::ffi::pg_guard_ffi_boundary(|| read(table, &mut place, &raw mut pg_sys::SnapshotAnyData, slot))
    }
}

/// # Safety
/// The slot has a row of a table.
unsafe fn header(slot: *mut pg_sys::TupleTableSlot) -> pg_sys::HeapTupleHeader {
    let mut is_copy = false;
    // SAFETY: promised by the caller.
    unsafe { (*pg_sys::ExecFetchSlotHeapTuple(slot, false, &mut is_copy)).t_data }
}

/// # Safety
/// The header of a row of a table.
unsafe fn is_moved_to_partition(header: pg_sys::HeapTupleHeader) -> bool {
    // SAFETY: promised by the caller. ItemPointerIndicatesMovedPartitions in itemptr.h.
    let place = unsafe { (*header).t_ctid };
    place.ip_posid == pg_sys::MovedPartitionsOffsetNumber as u16
        && (place.ip_blkid.bi_hi, place.ip_blkid.bi_lo) == (u16::MAX, u16::MAX)
}

/// Whether this transaction has written the version, or deleted or replaced it. The clause of a trigger that a user has
/// written may report a row before that.
///
/// # Safety
/// The header of a row of a table.
unsafe fn is_written(header: pg_sys::HeapTupleHeader, side: Side) -> bool {
    // SAFETY: promised by the caller.
    unsafe {
        let (flags, ends) = (u32::from((*header).t_infomask), (*header).t_choice.t_heap);
        let xid = match side {
            Side::New => ends.t_xmin,
            Side::Old => {
                let is_multi = flags & pg_sys::HEAP_XMAX_IS_MULTI != 0;
                let only_locks = flags & pg_sys::HEAP_XMAX_LOCK_ONLY != 0;
                match (flags & pg_sys::HEAP_XMAX_INVALID != 0 || only_locks, is_multi) {
                    (true, _) => return false,
                    (false, true) => pg_sys::HeapTupleGetUpdateXid(header),
                    (false, false) => ends.t_xmax,
                }
            }
        };
        pg_sys::TransactionIdIsCurrentTransactionId(xid)
    }
}

/// The size of a row as it is when its values are read: in bytes, not compressed.
///
/// # Safety
/// The slot has a row of a table.
unsafe fn size(slot: *mut pg_sys::TupleTableSlot) -> usize {
    // SAFETY: promised by the caller; a value and a flag for each column. A value of variable length is no null
    // pointer.
    unsafe {
        let columns = (*slot).tts_tupleDescriptor;
        let count = (*columns).natts;
        if i32::from((*slot).tts_nvalid) < count {
            pg_sys::slot_getsomeattrs_int(slot, count);
        }
        let attributes = major::attributes(columns).iter().enumerate();
        let sizes = attributes.map(|(n, attribute)| {
            let (value, is_null) = (*(*slot).tts_values.add(n), *(*slot).tts_isnull.add(n));
            match (is_null, attribute.attlen) {
                (true, _) => 0,
                (false, -1) => {
                    let value: *const pg_sys::varlena = value.cast_mut_ptr();
                    match pgrx::varlena::varatt_is_4b_c(value) || pgrx::varlena::varatt_is_1b_e(value) {
                        true => pg_sys::toast_raw_datum_size((value as usize).into()),
                        false => pgrx::varlena::varsize_any(value),
                    }
                }
                (false, length) => length.max(0) as usize,
            }
        });
        sizes.sum()
    }
}
