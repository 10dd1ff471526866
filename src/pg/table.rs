//! Writes and reads rows without a statement, on the main thread, for tables whose columns and constraints the caller
//! knows. The executor starts and ends for each statement, parses all constraints and defaults of the table, and copies
//! rows from step to step: that costs more than the rows themselves. This module skips what the executor does besides:
//! rights, triggers, rules, policies, added constraints and defaults. [`Table::is`] says whether a table has any of
//! these. If it might, the caller uses a statement.

use crate::pg::args::Jsonb;
use crate::pg::guc;
use crate::pg::major;
use crate::pg::scan::{Scan, row_id, tid};
use crate::pg::text::{self, Unreadable};
use outbox_core::engine::RowId;
use outbox_core::session_settings;
use pgrx::datum::{FromDatum, IntoDatum, Uuid};
use pgrx::pg_sys;
use std::cell::{Cell, OnceCell, RefCell};
use std::collections::HashMap;
use std::ffi::CStr;
use std::rc::Rc;

/// A table as the extension creates it.
pub struct Layout {
    /// The columns in their order, without dropped ones.
    pub columns: Vec<Column>,
    /// The check constraints, as pg_get_expr() prints them.
    pub checks: Vec<String>,
    /// Whether it is a partition. The caller writes only rows that belong to it.
    pub is_partition: bool,
}

pub struct Column {
    pub name: &'static str,
    pub kind: ColumnType,
    pub not_null: bool,
    pub filled: Filled,
}

/// How a row gets the value of a column. Texts are as pg_get_expr() prints them.
#[derive(Clone, PartialEq)]
pub enum Filled {
    /// By the writer of the row, although the column may have a default.
    Given(Option<&'static str>),
    /// By a statement from the sequence of the column. [`Table::insert`] is given the value.
    Identity,
    /// By a statement with this expression. [`Table::insert`] is given the value.
    Generated(String),
    /// By a default that is 0 or false.
    Zero,
    /// By the default now().
    Now,
    /// By no default.
    Null,
}

impl Column {
    /// # Safety
    /// The attribute belongs to an open table.
    unsafe fn is(&self, attribute: &pg_sys::FormData_pg_attribute) -> bool {
        // SAFETY: a name ends with NUL.
        let name = unsafe { CStr::from_ptr(attribute.attname.data.as_ptr()) };
        let (generated, identity) = match self.filled {
            Filled::Generated(_) => (b's', 0),
            Filled::Identity => (0, b'd'),
            _ => (0, 0),
        };
        name.to_bytes() == self.name.as_bytes()
            && attribute.atttypid == self.kind.oid()
            && attribute.atttypmod == -1
            && attribute.attnotnull == self.not_null
            && attribute.attgenerated as u8 == generated
            && attribute.attidentity as u8 == identity
    }

    fn expression(&self) -> Option<&str> {
        match &self.filled {
            Filled::Given(default) => *default,
            Filled::Generated(text) => Some(text),
            Filled::Zero if matches!(self.kind, ColumnType::Bool) => Some("false"),
            Filled::Zero => Some("0"),
            Filled::Now => Some("now()"),
            Filled::Identity | Filled::Null => None,
        }
    }
}

impl Layout {
    /// The columns that a statement names.
    pub fn given(&self) -> impl Iterator<Item = &Column> {
        let is_given = |column: &&Column| matches!(column.filled, Filled::Given(_));
        self.columns.iter().filter(is_given)
    }
}

/// An open table, locked for writing until the transaction ends. It has no Drop: after an ERROR core may have another
/// resource owner than the one that opened it, and closing it would raise again. The end of the (sub)transaction
/// closes it.
pub struct Table {
    relation: pg_sys::Relation,
    /// Set by [`is`](Self::is). It stays when the server processes invalidations.
    known: OnceCell<Rc<KnownLayout>>,
}

struct KnownLayout {
    /// Whether a write needs nothing that the executor does besides.
    is_plain: bool,
    /// The index of each column in a row, and how it is filled. Dropped columns are in between.
    columns: Vec<(usize, Filled)>,
    /// The sequence of the identity column; 0 if there is none.
    sequence: u32,
}

/// The type of a column.
#[derive(Clone, Copy)]
pub enum ColumnType {
    Bool,
    Int2,
    Int4,
    Int8,
    Jsonb,
    Text,
    Time,
    Uuid,
}

/// A value of such a column.
#[derive(Clone, Copy)]
pub enum ColumnValue<'a> {
    Null,
    /// A value that [`Row::same`] returned for a column of this type.
    Same(pg_sys::Datum),
    Int2(i16),
    Int4(i32),
    Int8(i64),
    Jsonb(&'a Jsonb),
    Text(&'a str),
    /// timestamptz, in µs since 2000.
    Time(i64),
    Uuid(Uuid),
}

/// A row that [`Table::insert_all`] writes.
pub struct NewRow(pg_sys::HeapTuple);

/// A row that is being read, with its columns counted from one.
pub struct Row<'a> {
    values: &'a [pg_sys::Datum],
    nulls: &'a [bool],
}

/// Core writes a larger row, or one with values that are stored elsewhere, as a changed copy. When it writes many rows
/// at once, their index entries then point nowhere.
const WHOLE_BYTES_MAX: u32 = 1500;

/// The most rows that core is given at once: those of two pages or more.
const ROWS_AT_ONCE: usize = 250;

thread_local! {
    /// The tables that had their layout at the last check.
    static KNOWN: RefCell<HashMap<u32, Option<Rc<KnownLayout>>>> = RefCell::default();
    /// Whether a known table has changed since then, or an unknown one.
    static STALE: Cell<bool> = const { Cell::new(false) };
    static WATCHED: Cell<[u32; 4]> = const { Cell::new([0; 4]) };
    /// The number of such changes.
    static CHANGES: Cell<u64> = const { Cell::new(0) };
    static LISTENING: Cell<bool> = const { Cell::new(false) };
}

impl Table {
    /// Raises if the transaction may not write.
    pub fn open(oid: u32) -> Self {
        // SAFETY: inside a transaction, on the main thread.
        unsafe {
            pg_sys::PreventCommandIfReadOnly(c"INSERT".as_ptr());
            pg_sys::PreventCommandIfParallelMode(c"INSERT".as_ptr());
            let relation = pg_sys::table_open(oid.into(), pg_sys::RowExclusiveLock as i32);
            let known = OnceCell::new();
            Self { relation, known }
        }
    }

    /// Opens the table without the right to write it.
    pub fn open_to_read(oid: u32) -> Self {
        // SAFETY: inside a transaction, on the main thread.
        let relation = unsafe { pg_sys::table_open(oid.into(), pg_sys::AccessShareLock as i32) };
        let known = OnceCell::new();
        Self { relation, known }
    }

    /// Closes the table and keeps the lock.
    pub fn close(self) {
        // SAFETY: the table is open, and the resource owner that opened it is current.
        unsafe { pg_sys::table_close(self.relation, pg_sys::NoLock as i32) }
    }

    pub(super) fn relation(&self) -> pg_sys::Relation {
        self.relation
    }

    /// The numbers of the columns with these names in the layout. [`has`](Self::has) must be true for the table.
    pub fn attributes<const N: usize>(&self, layout: &Layout, names: [&str; N]) -> Option<[i16; N]> {
        let mut numbers = [0; N];
        for (number, name) in numbers.iter_mut().zip(names) {
            let place = layout.columns.iter().position(|column| column.name == name)?;
            *number = self.known(|known| known.columns.get(place).map(|(index, _)| *index as i16 + 1))?;
        }
        Some(numbers)
    }

    /// Puts the columns of a row into the order of the layout. `attribute` returns the value at an index of the row.
    pub(super) fn of_layout(
        &self,
        attribute: impl Fn(usize) -> (pg_sys::Datum, bool),
        values: &mut Vec<pg_sys::Datum>,
        nulls: &mut Vec<bool>,
    ) {
        values.clear();
        nulls.clear();
        self.known(|known| {
            for (index, _) in &known.columns {
                let (value, is_null) = attribute(*index);
                values.push(value);
                nulls.push(is_null);
            }
            Some(())
        });
    }

    fn oid(&self) -> u32 {
        // SAFETY: the relation is open.
        unsafe { (*self.relation).rd_id.to_u32() }
    }

    /// Whether a row may be written without the executor: the table has this layout, and an INSERT has no side effects.
    /// That holds until the transaction ends. DDL waits for the lock of [`open`](Self::open); CREATE INDEX CONCURRENTLY
    /// waits before its index needs entries. Checked again when the table has changed.
    pub fn is(&self, layout: &Layout) -> bool {
        self.check(layout).is_some_and(|known| known.is_plain)
    }

    /// Whether the table has the columns of this layout, so that its rows can be read.
    pub fn has(&self, layout: &Layout) -> bool {
        self.check(layout).is_some()
    }

    fn check(&self, layout: &Layout) -> Option<&KnownLayout> {
        let oid = self.oid();
        watch(oid);
        if STALE.take() {
            KNOWN.with_borrow_mut(HashMap::clear);
        }
        if let Some(known) = KNOWN.with_borrow(|known| known.get(&oid).cloned()) {
            return self.found(known);
        }
        // Expressions are printed with these.
        let known = guc::with(session_settings::NAMES, || self.read_catalog(layout)).map(Rc::new);
        KNOWN.with_borrow_mut(|all| all.insert(oid, known.clone()));
        self.found(known)
    }

    fn found(&self, known: Option<Rc<KnownLayout>>) -> Option<&KnownLayout> {
        known.map(|known| &**self.known.get_or_init(|| known))
    }

    /// Whether the current role may insert rows and read them. Checked at each call, because role changes are not
    /// announced.
    pub fn may_insert(&self) -> bool {
        self.may(pg_sys::ACL_INSERT | pg_sys::ACL_SELECT)
    }

    /// Whether the current role may read all rows.
    pub fn may_read(&self) -> bool {
        // SAFETY: the relation is open.
        let has_policies = unsafe { (*(*self.relation).rd_rel).relrowsecurity };
        !has_policies && self.may(pg_sys::ACL_SELECT)
    }

    /// Whether the current role may update and delete rows and read them, and no trigger does anything else then.
    pub fn may_change(&self) -> bool {
        // SAFETY: the relation is open.
        let has_triggers = unsafe { !(*self.relation).trigdesc.is_null() };
        !has_triggers && self.may(pg_sys::ACL_UPDATE | pg_sys::ACL_DELETE | pg_sys::ACL_SELECT)
    }

    fn may(&self, rights: u32) -> bool {
        // SAFETY: inside a transaction; the hook is a static of the server.
        unsafe {
            // An extension with this hook checks or logs each table of a statement.
            let hook = pg_sys::ExecutorCheckPerms_hook;
            hook.is_none() && may(self.relation, rights)
        }
    }

    fn is_table(&self, is_partition: bool) -> bool {
        // SAFETY: the relation is open, so what the cache holds of it stays.
        unsafe {
            let class = &*(*self.relation).rd_rel;
            class.relkind as u8 == pg_sys::RELKIND_RELATION
                && class.relam == pg_sys::HEAP_TABLE_AM_OID
                && class.relispartition == is_partition
        }
    }

    /// Whether an INSERT runs no code of a user, and any write is bound by no rule and no policy.
    pub fn is_left_alone(&self) -> bool {
        // SAFETY: the relation is open, so what the cache holds of it stays.
        unsafe {
            let (relation, class) = (&*self.relation, &*(*self.relation).rd_rel);
            let has_triggers = relation.trigdesc.as_ref().is_some_and(|triggers| {
                triggers.trig_insert_before_row
                    || triggers.trig_insert_after_row
                    || triggers.trig_insert_instead_row
                    || triggers.trig_insert_before_statement
                    || triggers.trig_insert_after_statement
                    || triggers.trig_insert_new_table
            });
            !class.relrowsecurity && relation.rd_rules.is_null() && !has_triggers
        }
    }

    /// Whether no index needs more than values of columns.
    fn has_simple_indexes(&self) -> bool {
        // SAFETY: the relation is open, and locked so that no index of it can be dropped.
        unsafe {
            let list = pg_sys::RelationGetIndexList(self.relation);
            let count = list.as_ref().map_or(0, |list| list.length);
            let all_simple = (0..count).all(|nth| {
                let oid = pg_sys::list_nth_oid(list, nth);
                let index = pg_sys::index_open(oid, pg_sys::AccessShareLock as i32);
                let (form, tuple) = (&*(*index).rd_index, (*index).rd_indextuple);
                let is_null = |column: u32| pg_sys::heap_attisnull(tuple, column as i32, std::ptr::null_mut());
                let is_simple = !form.indisexclusion
                    && form.indimmediate
                    && is_null(pg_sys::Anum_pg_index_indexprs)
                    && is_null(pg_sys::Anum_pg_index_indpred);
                pg_sys::index_close(index, pg_sys::AccessShareLock as i32);
                is_simple
            });
            pg_sys::list_free(list);
            all_simple
        }
    }

    fn is_plain(&self, layout: &Layout) -> bool {
        let is_known = self.is_table(layout.is_partition) && self.has_checks(&layout.checks);
        is_known && self.has_simple_indexes() && self.is_left_alone()
    }

    /// None: there is another column, or one differs from the layout.
    fn read_catalog(&self, layout: &Layout) -> Option<KnownLayout> {
        // SAFETY: the relation is open; the descriptor has as many columns and defaults as it says.
        unsafe {
            let descriptor = &*(*self.relation).rd_att;
            let attributes = major::attributes((*self.relation).rd_att);
            let live: Vec<_> = attributes.iter().filter(|attribute| !attribute.attisdropped).collect();
            let constraints = descriptor.constr.as_ref();
            let defaults = constraints.map_or(&[][..], |all| slice(all.defval, all.num_defval.into()));
            let expression_of = |number: i16| {
                let default = defaults.iter().find(|default| default.adnum == number);
                default.map(|default| self.in_words(default.adbin))
            };
            let mut known = KnownLayout {
                is_plain: self.is_plain(layout),
                columns: Vec::with_capacity(layout.columns.len()),
                sequence: 0,
            };
            for (column, attribute) in layout.columns.iter().zip(&live) {
                if !column.is(attribute) || expression_of(attribute.attnum).as_deref() != column.expression() {
                    return None;
                }
                if column.filled == Filled::Identity {
                    known.sequence = major::identity_sequence(self.relation, attribute.attnum).to_u32();
                    if known.sequence == 0 {
                        return None;
                    }
                }
                known
                    .columns
                    .push((attribute.attnum as usize - 1, column.filled.clone()));
            }
            (live.len() == layout.columns.len()).then_some(known)
        }
    }

    fn has_checks(&self, checks: &[String]) -> bool {
        // SAFETY: the relation is open, and the descriptor has that many columns.
        let mut found: Vec<String> = unsafe {
            let constraints = (*(*self.relation).rd_att).constr.as_ref();
            let found = constraints.map_or(&[][..], |all| slice(all.check, all.num_check.into()));
            found.iter().map(|check| self.in_words(check.ccbin)).collect()
        };
        let mut checks = checks.to_vec();
        found.sort();
        checks.sort();
        found == checks
    }

    /// An expression of this table, as pg_get_expr() prints it.
    fn in_words(&self, nodes: *const std::ffi::c_char) -> String {
        // SAFETY: an expression of this table as the server keeps it; the text is copied.
        unsafe {
            let nodes = pg_sys::Datum::from(pg_sys::cstring_to_text(nodes));
            let text = pg_sys::OidFunctionCall2Coll(
                pg_sys::F_PG_GET_EXPR_PG_NODE_TREE_OID,
                pg_sys::InvalidOid,
                nodes,
                (*self.relation).rd_id.into(),
            );
            let text = pg_sys::text_to_cstring(text.cast_mut_ptr());
            text::of_c(text)
        }
    }

    /// Writes a row with its index entries: the values of the columns that have no default, in their order.
    /// [`is`](Self::is) must be true for the table, and the row must meet its check constraints. Later commands of the
    /// transaction see the row.
    pub fn insert(&self, row: &[ColumnValue]) -> RowId {
        let NewRow(tuple) = self.form(row);
        // SAFETY: a row of this table: see `is`. Core uses the function for its catalogs. It skips only features that
        // this table does not have.
        unsafe {
            pg_sys::CatalogTupleInsert(self.relation, tuple);
            let place = row_id((*tuple).t_self);
            pg_sys::heap_freetuple(tuple);
            pg_sys::CommandCounterIncrement();
            place
        }
    }

    /// Writes a row as [`insert`](Self::insert) does, but not if a unique index has its key: None. So does INSERT … ON
    /// CONFLICT DO NOTHING (ExecInsert in nodeModifyTable.c), which first looks whether the key is there, and waits for
    /// a transaction that is writing it. Here the caller has looked, and to wait it runs that statement.
    pub fn insert_new(&self, row: &[ColumnValue]) -> Option<RowId> {
        let NewRow(tuple) = self.form(row);
        // SAFETY: a row of this table: see `is`. The slot has no other owner. After an ERROR the transaction ends, and
        // with it the lock of its speculative insertion.
        unsafe {
            let indexes = pg_sys::CatalogOpenIndexes(self.relation);
            let slot = pg_sys::MakeSingleTupleTableSlot((*self.relation).rd_att, &raw const pg_sys::TTSOpsHeapTuple);
            pg_sys::ExecStoreHeapTuple(tuple, slot, false);
            let transaction = pg_sys::GetCurrentTransactionId();
            let token = pg_sys::SpeculativeInsertionLockAcquire(transaction);
            let (command, none) = (pg_sys::GetCurrentCommandId(true), std::ptr::null_mut());
            pg_sys::table_tuple_insert_speculative(self.relation, slot, command, 0, none, token);
            let is_new = major::insert_new_index_tuples(indexes, slot);
            pg_sys::table_tuple_complete_speculative(self.relation, slot, token, is_new);
            pg_sys::SpeculativeInsertionLockRelease(transaction);
            let place = row_id((*slot).tts_tid);
            pg_sys::ExecDropSingleTupleTableSlot(slot);
            pg_sys::CatalogCloseIndexes(indexes);
            pg_sys::CommandCounterIncrement();
            is_new.then_some(place)
        }
    }

    /// Makes a row for [`insert_all`](Self::insert_all), under the conditions of [`insert`](Self::insert).
    pub fn form(&self, row: &[ColumnValue]) -> NewRow {
        // SAFETY: one value for each column, of its type: see `is`.
        unsafe {
            let columns = (*(*self.relation).rd_att).natts as usize;
            let (mut values, mut nulls) = (vec![pg_sys::Datum::null(); columns], vec![true; columns]);
            self.known(|known| {
                let mut row = row.iter();
                for (index, filled) in &known.columns {
                    let value = match filled {
                        Filled::Given(_) | Filled::Identity | Filled::Generated(_) => *row.next()?,
                        Filled::Now => ColumnValue::Time(now()),
                        Filled::Zero => ColumnValue::Int8(0),
                        Filled::Null => ColumnValue::Null,
                    };
                    nulls[*index] = matches!(value, ColumnValue::Null);
                    values[*index] = value.datum();
                }
                Some(())
            });
            let descriptor = (*self.relation).rd_att;
            NewRow(pg_sys::heap_form_tuple(
                descriptor,
                values.as_mut_ptr(),
                nulls.as_mut_ptr(),
            ))
        }
    }

    /// Writes rows with their index entries, each page with one record of WAL. Returns their places.
    pub fn insert_all(&self, rows: &[NewRow]) -> Vec<RowId> {
        let mut places = Vec::with_capacity(rows.len());
        // SAFETY: rows of this table: see `form`. Core uses the functions for its catalogs. A slot has no other owner.
        unsafe {
            let indexes = pg_sys::CatalogOpenIndexes(self.relation);
            // The resource owner counts the slots of a table's own descriptor, and each takes longer than the one
            // before.
            let descriptor = pg_sys::CreateTupleDescCopy((*self.relation).rd_att);
            let mut slots = Vec::new();
            for rows in rows.chunks(ROWS_AT_ONCE) {
                let mut count = 0;
                let before = places.len();
                for NewRow(tuple) in rows {
                    let stays_whole = (**tuple).t_len <= WHOLE_BYTES_MAX
                        && u32::from((*(**tuple).t_data).t_infomask) & pg_sys::HEAP_HASEXTERNAL == 0;
                    if !stays_whole {
                        pg_sys::CatalogTupleInsertWithInfo(self.relation, *tuple, indexes);
                        places.push(Some(row_id((**tuple).t_self)));
                        continue;
                    }
                    places.push(None);
                    if count == slots.len() {
                        let of_heap = &raw const pg_sys::TTSOpsHeapTuple;
                        slots.push(pg_sys::MakeSingleTupleTableSlot(descriptor, of_heap));
                    }
                    pg_sys::ExecStoreHeapTuple(*tuple, slots[count], false);
                    count += 1;
                }
                if count > 0 {
                    let (slots, count) = (slots.as_mut_ptr(), count as i32);
                    pg_sys::CatalogTuplesMultiInsertWithInfo(self.relation, slots, count, indexes);
                }
                let mut placed = slots.iter().map(|slot| row_id((**slot).tts_tid));
                places[before..]
                    .iter_mut()
                    .filter(|place| place.is_none())
                    .for_each(|place| *place = placed.next());
            }
            (slots.into_iter()).for_each(|slot| pg_sys::ExecDropSingleTupleTableSlot(slot));
            pg_sys::CatalogCloseIndexes(indexes);
            pg_sys::CommandCounterIncrement();
        }
        places.into_iter().flatten().collect()
    }

    /// Deletes rows, each if `read` returns something for it: `read` gets the index of its place and its columns as in
    /// the layout. [`is`](Self::is) must be true for the table. Waits for a transaction that has locked a row; leaves a
    /// row that another transaction has changed since this one looked. Returns what was read from the deleted rows.
    pub fn delete<T>(&self, places: &[RowId], mut read: impl FnMut(usize, &Row) -> Option<T>) -> Vec<T> {
        let mut deleted = Vec::with_capacity(places.len());
        // SAFETY: inside a transaction. A tuple is read while its page is pinned.
        unsafe {
            let descriptor = (*self.relation).rd_att;
            let columns = (*descriptor).natts as usize;
            let (mut all, mut are_null) = (vec![pg_sys::Datum::null(); columns], vec![true; columns]);
            let (mut values, mut nulls) = (Vec::with_capacity(columns), Vec::with_capacity(columns));
            let snapshot = pg_sys::RegisterSnapshot(pg_sys::GetTransactionSnapshot());
            // VACUUM FULL may have left fewer pages than there were when a row was found.
            let pages = pg_sys::RelationGetNumberOfBlocksInFork(self.relation, pg_sys::ForkNumber::MAIN_FORKNUM);
            for (index, place) in places.iter().enumerate().filter(|(_, place)| place.block < pages) {
                let Some((mut tuple, page)) = self.fetch(*place, snapshot) else {
                    continue;
                };
                pg_sys::heap_deform_tuple(&mut tuple, descriptor, all.as_mut_ptr(), are_null.as_mut_ptr());
                self.of_layout(|index| (all[index], are_null[index]), &mut values, &mut nulls);
                let found = read(index, &Row::new(&values, &nulls));
                pg_sys::ReleaseBuffer(page);
                let Some(found) = found else {
                    continue;
                };
                if major::heap_delete(self.relation, &mut tuple.t_self) {
                    deleted.push(found);
                }
            }
            pg_sys::UnregisterSnapshot(snapshot);
            pg_sys::CommandCounterIncrement();
        }
        deleted
    }

    /// The row at this place and its page, which the caller releases. None: the snapshot sees no row there.
    ///
    /// # Safety
    /// The table has the page.
    unsafe fn fetch(&self, at: RowId, snapshot: pg_sys::Snapshot) -> Option<(pg_sys::HeapTupleData, pg_sys::Buffer)> {
        let mut row = pg_sys::HeapTupleData {
            t_self: tid(at),
            ..Default::default()
        };
        let mut page = 0;
        // SAFETY: promised by the caller.
        let is_there = unsafe { pg_sys::heap_fetch(self.relation, snapshot, &mut row, &mut page, false) };
        is_there.then_some((row, page))
    }

    /// The next value of the identity column. [`is`](Self::is) must be true for the table. As with a statement, a role
    /// that may write the table needs no right on the sequence of its identity column.
    pub fn next_value(&self) -> i64 {
        let sequence = self.known(|known| Some(known.sequence)).unwrap_or_default();
        // SAFETY: inside a transaction; nothing here has a destructor when it raises.
        unsafe { pg_sys::ffi::pg_guard_ffi_boundary(|| nextval_internal(sequence.into(), false)) }
    }

    fn known<T>(&self, read: impl FnOnce(&KnownLayout) -> Option<T>) -> Option<T> {
        read(self.known.get()?)
    }
}

impl ColumnType {
    pub fn oid(self) -> pg_sys::Oid {
        match self {
            Self::Bool => pg_sys::BOOLOID,
            Self::Int2 => pg_sys::INT2OID,
            Self::Int4 => pg_sys::INT4OID,
            Self::Int8 => pg_sys::INT8OID,
            Self::Jsonb => pg_sys::JSONBOID,
            Self::Text => pg_sys::TEXTOID,
            Self::Time => pg_sys::TIMESTAMPTZOID,
            Self::Uuid => pg_sys::UUIDOID,
        }
    }

    pub fn array_oid(self) -> pg_sys::Oid {
        // SAFETY: a lookup in the caches, inside a transaction.
        unsafe { pg_sys::get_array_type(self.oid()) }
    }
}

impl<'a> ColumnValue<'a> {
    pub fn text(text: Option<&'a str>) -> Self {
        text.map_or(Self::Null, Self::Text)
    }

    pub fn jsonb(json: &'a Option<Jsonb>) -> Self {
        json.as_ref().map_or(Self::Null, Self::Jsonb)
    }

    /// Values other than numbers are copied into the memory of the call.
    pub(super) fn datum(self) -> pg_sys::Datum {
        match self {
            Self::Null => pg_sys::Datum::null(),
            Self::Same(datum) => datum,
            Self::Int2(value) => value.into(),
            Self::Int4(value) => value.into(),
            Self::Int8(value) | Self::Time(value) => value.into(),
            Self::Jsonb(json) => json.datum(),
            Self::Text(text) => text::to_datum(text),
            Self::Uuid(uuid) => uuid.into_datum().unwrap_or(pg_sys::Datum::null()),
        }
    }
}

impl<'a> Row<'a> {
    pub(super) fn new(values: &'a [pg_sys::Datum], nulls: &'a [bool]) -> Self {
        Self { values, nulls }
    }

    fn value(&self, column: usize) -> Option<pg_sys::Datum> {
        let is_null = self.nulls.get(column - 1).is_none_or(|null| *null);
        (!is_null).then(|| self.values[column - 1])
    }

    /// The value of a column, for a column of the same type in another row that is made before this one is left.
    pub fn same(&self, column: usize) -> ColumnValue<'static> {
        self.value(column).map_or(ColumnValue::Null, ColumnValue::Same)
    }

    /// Whether a column of that type has this text, which is in the encoding of the database.
    pub fn is_text(&self, column: usize, text: &[u8]) -> bool {
        // SAFETY: a text, as the caller says.
        let is = |datum| unsafe { text::with_bytes(datum, |bytes| Ok(bytes == text)) };
        self.value(column).is_some_and(|datum| is(datum).unwrap_or(false))
    }

    /// The value of a column of that type.
    pub fn int4(&self, column: usize) -> Option<i32> {
        self.value(column).map(|datum| datum.value() as i32)
    }

    /// The value of a column of that type, or a time in µs since 2000.
    pub fn int8(&self, column: usize) -> Option<i64> {
        self.value(column).map(|datum| datum.value() as i64)
    }

    /// The value of a column of that type.
    pub fn int2(&self, column: usize) -> Option<i16> {
        self.value(column).map(|datum| datum.value() as i16)
    }

    /// The value of a column of that type.
    pub fn uuid(&self, column: usize) -> Option<Uuid> {
        // SAFETY: a uuid, as the caller says.
        self.value(column)
            .and_then(|datum| unsafe { Uuid::from_polymorphic_datum(datum, false, pg_sys::UUIDOID) })
    }

    /// The value of a column of that type.
    pub fn jsonb(&self, column: usize) -> Option<Jsonb> {
        self.value(column).map(Jsonb::of)
    }

    /// The value of a column of that type, or why it cannot be read.
    pub fn text_or_why_not(&self, column: usize) -> Result<Option<String>, Unreadable> {
        // SAFETY: a text, as the caller says.
        self.value(column)
            .map(|datum| unsafe { text::of_datum(datum) })
            .transpose()
    }

    /// The value of a column of that type.
    pub fn text(&self, column: usize) -> Option<String> {
        self.text_or_why_not(column).unwrap_or_else(|why| why.raise())
    }
}

// From commands/sequence.h, which the bindings leave out.
unsafe extern "C-unwind" {
    fn nextval_internal(sequence: pg_sys::Oid, check_permissions: bool) -> i64;
}

/// Whether the current role has all these rights to a table and may use its schema.
///
/// # Safety
/// `relation` is open.
unsafe fn may(relation: pg_sys::Relation, rights: u32) -> bool {
    // SAFETY: promised by the caller; lookups in the server's caches.
    unsafe {
        let (role, schema) = (pg_sys::GetUserId(), (*(*relation).rd_rel).relnamespace);
        let rights = rights as pg_sys::AclMode;
        let has = pg_sys::pg_class_aclmask((*relation).rd_id, role, rights, pg_sys::AclMaskHow::ACLMASK_ALL);
        has == rights && major::may_use_schema(schema, role)
    }
}

/// Reads the only row of a table, as a new statement of this transaction would see it. None: there is no row, or
/// missing rights or a policy would hide it.
pub fn only_row<T>(table: u32, read: impl FnOnce(Row) -> T) -> Option<T> {
    // SAFETY: inside a transaction, on the main thread; the tuple is read while the scan holds it.
    unsafe {
        let relation = pg_sys::table_open(table.into(), pg_sys::AccessShareLock as i32);
        if (*(*relation).rd_rel).relrowsecurity || !may(relation, pg_sys::ACL_SELECT) {
            pg_sys::table_close(relation, pg_sys::NoLock as i32);
            return None;
        }
        let snapshot = pg_sys::RegisterSnapshot(pg_sys::GetTransactionSnapshot());
        let mut scan = Scan::begin(relation, None, snapshot, std::iter::empty());
        let row = scan.next().then(|| {
            let (values, nulls) = scan.row();
            read(Row { values, nulls })
        });
        scan.end();
        pg_sys::UnregisterSnapshot(snapshot);
        pg_sys::table_close(relation, pg_sys::NoLock as i32);
        row
    }
}

/// Watches a table for changes from now on: another file, another column, an index, new statistics.
fn watch(table: u32) {
    if !LISTENING.replace(true) {
        // SAFETY: called once in a process.
        unsafe {
            pg_sys::CacheRegisterRelcacheCallback(Some(changed), pg_sys::Datum::null());
            let servers = pg_sys::SysCacheIdentifier::FOREIGNSERVEROID as i32;
            pg_sys::CacheRegisterSyscacheCallback(servers, Some(servers_changed), pg_sys::Datum::null());
        }
    }
    let mut watched = WATCHED.get();
    if !watched.contains(&table) {
        watched.rotate_right(1);
        let left_out = std::mem::replace(&mut watched[0], table);
        WATCHED.set(watched);
        if left_out != 0 {
            KNOWN.with_borrow_mut(|known| known.remove(&left_out));
            CHANGES.set(CHANGES.get() + 1); // nothing will be heard of that one
        }
    }
}

/// A number that grows when a watched table or a foreign server changes, and from now on when this table does.
pub fn changes_from_now(table: u32) -> u64 {
    watch(table);
    changes()
}

pub fn changes() -> u64 {
    CHANGES.get()
}

/// Lets [`changes`] of all sessions grow when this transaction commits, and of this one at its next statement.
pub fn announce_change(table: u32) {
    // SAFETY: inside a transaction; the caller has written to the table, so it is locked.
    unsafe { pg_sys::CacheInvalidateRelcacheByRelid(table.into()) }
}

/// Called when the server processes invalidations of other sessions. It must not allocate or raise.
#[pgrx::pg_guard]
unsafe extern "C-unwind" fn changed(_argument: pg_sys::Datum, table: pg_sys::Oid) {
    if table == pg_sys::InvalidOid || WATCHED.get().contains(&table.to_u32()) {
        STALE.set(true);
        CHANGES.set(CHANGES.get() + 1);
    }
}

/// Called when the server processes a change of a foreign server. It must not allocate or raise.
#[pgrx::pg_guard]
unsafe extern "C-unwind" fn servers_changed(_argument: pg_sys::Datum, _cache: i32, _hash: u32) {
    CHANGES.set(CHANGES.get() + 1);
}

/// # Safety
/// `count` values are there.
unsafe fn slice<'a, T>(from: *const T, count: usize) -> &'a [T] {
    match count {
        0 => &[],
        // SAFETY: promised by the caller.
        _ => unsafe { std::slice::from_raw_parts(from, count) },
    }
}

/// What now() says in this transaction, in µs since 2000.
pub fn now() -> i64 {
    // SAFETY: reads a static of the server.
    unsafe { pg_sys::GetCurrentTransactionStartTimestamp() }
}

/// What clock_timestamp() says, in µs since 2000.
pub fn clock_timestamp() -> i64 {
    // SAFETY: reads the clock.
    unsafe { pg_sys::GetCurrentTimestamp() }
}

/// A time in µs since 2000, as ISO 8601 in UTC with µs. None: it is infinite.
pub fn in_utc(time: i64) -> Option<String> {
    if matches!(time, i64::MIN | i64::MAX) {
        return None;
    }
    let mut tm = pg_sys::pg_tm::default();
    let mut us = 0;
    let none = std::ptr::null_mut();
    // SAFETY: fills the two; without a time zone the time is taken as it is.
    let failed =
        unsafe { pg_sys::timestamp2tm(time, none, &mut tm, &mut us, std::ptr::null_mut(), std::ptr::null_mut()) };
    (failed == 0).then(|| {
        // The year before 1 is 1 BC. Its number is the text, as to_char() has it.
        let year = if tm.tm_year > 0 { tm.tm_year } else { 1 - tm.tm_year };
        let mut text = String::with_capacity("2000-01-01T00:00:00.000000Z".len());
        let parts = [
            (year, 4, '-'),
            (tm.tm_mon, 2, '-'),
            (tm.tm_mday, 2, 'T'),
            (tm.tm_hour, 2, ':'),
            (tm.tm_min, 2, ':'),
            (tm.tm_sec, 2, '.'),
            (us, 6, 'Z'),
        ];
        for (number, digits, then) in parts {
            push_digits(&mut text, number.unsigned_abs(), digits);
            text.push(then);
        }
        text
    })
}

/// A number with at least as many digits. format!() took 0.6 µs for a time.
fn push_digits(text: &mut String, number: u32, digits: u32) {
    if digits > 1 || number > 9 {
        push_digits(text, number / 10, digits.saturating_sub(1));
    }
    text.push(char::from(b'0' + (number % 10) as u8));
}
