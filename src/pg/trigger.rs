//! A trigger that fires: its arguments, its table, and the rows that its statement wrote. The capture trigger in a
//! session calls it on the main thread.

use super::scan::row_id;
use super::{catalog, text};
use outbox_core::change_log::{Version, Write};
use pgrx::pg_sys::SysCacheIdentifier::INDEXRELID;
use pgrx::trigger_support::{PgTrigger, PgTriggerLevel, PgTriggerOperation, PgTriggerWhen};
use pgrx::{PgList, pg_sys};
use std::ffi::c_char;

/// The call that core passes to a trigger function.
pub type Call = pg_sys::FunctionCallInfo;

/// A trigger while it runs. Valid only during this call, because it points into core's data.
pub struct Fired {
    call: Call,
    data: *mut pg_sys::TriggerData,
    /// The OID of the trigger.
    pub trigger: u32,
    pub operation: Operation,
    pub timing: Timing,
    pub table: TriggerTable,
    pub argument: String,
    /// The name of the transition table with the new rows in the trigger's definition; None = it has none.
    pub new_rows: Option<String>,
}

/// A table with triggers, while it is open.
pub struct TriggerTable {
    relation: pg_sys::Relation,
    pub named: NamedTable,
}

#[derive(Clone)]
pub struct NamedTable {
    pub oid: u32,
    pub name: String,
    /// The OID of its owner.
    pub owner: u32,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Operation {
    Insert,
    Update,
    Delete,
    Truncate,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Timing {
    BeforeStatement,
    AfterStatement,
    /// For a row that was written, if the trigger has a WHEN clause.
    AfterRow(Write),
    Other,
}

/// The trigger of this call. None: it is no trigger with one argument.
pub fn fired(call: Call) -> Option<Fired> {
    // SAFETY: core passes valid trigger data, and the relation is locked while the trigger runs.
    unsafe {
        let trigger = PgTrigger::from_fcinfo(call.as_ref()?).ok()?;
        let data: *mut pg_sys::TriggerData = (*call).context.cast();
        let of = &*(*data).tg_trigger;
        if of.tgnargs != 1 {
            return None;
        }
        let operation = match trigger.op().ok()? {
            PgTriggerOperation::Insert => Operation::Insert,
            PgTriggerOperation::Update => Operation::Update,
            PgTriggerOperation::Delete => Operation::Delete,
            PgTriggerOperation::Truncate => Operation::Truncate,
        };
        let timing = match (trigger.level(), trigger.when().ok()?) {
            (PgTriggerLevel::Statement, PgTriggerWhen::Before) => Timing::BeforeStatement,
            (PgTriggerLevel::Statement, PgTriggerWhen::After) => Timing::AfterStatement,
            (PgTriggerLevel::Row, PgTriggerWhen::After) if !of.tgqual.is_null() => {
                let version = |row: pg_sys::HeapTuple| Version {
                    table: (*(*data).tg_relation).rd_id.to_u32(),
                    at: row_id((*row).t_self),
                };
                let row = version((*data).tg_trigtuple);
                match operation {
                    Operation::Insert => Timing::AfterRow(Write::Insert(row)),
                    Operation::Update => Timing::AfterRow(Write::Update {
                        old: row,
                        new: version((*data).tg_newtuple),
                    }),
                    _ => Timing::AfterRow(Write::Delete(row)),
                }
            }
            _ => Timing::Other,
        };
        let name = |name: *const c_char| (!name.is_null()).then(|| text::of_c(name));
        Some(Fired {
            call,
            data,
            trigger: of.tgoid.to_u32(),
            operation,
            timing,
            table: TriggerTable::of((*data).tg_relation),
            argument: text::of_c(*of.tgargs),
            new_rows: name(of.tgnewtable),
        })
    }
}

impl Fired {
    /// The call itself, for example to find its function.
    pub fn call(&self) -> Call {
        self.call
    }

    /// Makes the transition tables visible to statements of the innermost SPI session.
    pub fn show_rows(&self) {
        // SAFETY: inside an SPI session. The data outlives the session, because it lives as long as this call of the
        // trigger.
        let code = unsafe { pg_sys::SPI_register_trigger_data(self.data) };
        assert!(code >= 0, "SPI_register_trigger_data: {code}");
    }
}

impl TriggerTable {
    /// # Safety
    /// The relation is open as long as this is used.
    pub(super) unsafe fn of(relation: pg_sys::Relation) -> Self {
        // SAFETY: promised by the caller.
        unsafe {
            let class = (*relation).rd_rel;
            let named = NamedTable {
                oid: (*relation).rd_id.to_u32(),
                name: text::of_c((*class).relname.data.as_ptr()),
                owner: (*class).relowner.to_u32(),
            };
            Self { relation, named }
        }
    }

    pub fn has_column(&self, name: &str) -> bool {
        let name = text::to_c_string(name);
        // SAFETY: the relation is open; system columns have negative numbers.
        unsafe { pg_sys::get_attnum((*self.relation).rd_id, name.as_ptr()) > 0 }
    }

    /// The columns of the primary key, in its order; empty if there is none. Looked up for each call, so a renamed
    /// column has its new name.
    pub fn primary_key(&self) -> Vec<String> {
        // SAFETY: the relation is open and locked. Only the catalog row of each index is read.
        unsafe {
            let relation = self.relation;
            let indexes = PgList::<pg_sys::Oid>::from_pg(pg_sys::RelationGetIndexList(relation));
            let mut columns = Vec::new();
            for index in indexes.iter_oid() {
                let read = |form: &pg_sys::FormData_pg_index| {
                    let numbers = form.indkey.values.as_slice(form.indnkeyatts as usize);
                    form.indisprimary
                        .then(|| numbers.iter().map(|number| column(relation, *number)).collect())
                };
                let names: Option<Vec<String>> = catalog::cached(INDEXRELID, index.to_u32(), read).flatten();
                columns.extend(names.into_iter().flatten());
            }
            columns
        }
    }

    /// The OIDs of the tables that inherit from this one, at any distance; empty for most.
    pub fn children(&self) -> Vec<u32> {
        // SAFETY: the relation is open; a list of OIDs, which begins with that of the table.
        unsafe {
            if !(*(*self.relation).rd_rel).relhassubclass {
                return Vec::new();
            }
            let none = std::ptr::null_mut();
            let all = pg_sys::find_all_inheritors((*self.relation).rd_id, pg_sys::NoLock as i32, none);
            let all = PgList::<pg_sys::Oid>::from_pg(all);
            let children = all.iter_oid().map(|oid| oid.to_u32());
            children.filter(|child| *child != self.named.oid).collect()
        }
    }

    /// Runs `body` with a table as the relation cache has it, without a lock: two sessions that both lock it, and then
    /// want to alter it, would be a deadlock. None: it does not exist.
    pub fn with<T>(oid: u32, body: impl FnOnce(&Self) -> T) -> Option<T> {
        // SAFETY: inside a transaction. After an error its end closes the entry.
        unsafe {
            let relation = pg_sys::RelationIdGetRelation(oid.into());
            if relation.is_null() {
                return None;
            }
            let value = body(&Self::of(relation));
            pg_sys::RelationClose(relation);
            Some(value)
        }
    }

    /// The function and the argument of a row trigger with a WHEN clause, if `is_ours` is true for its function.
    pub fn row_trigger(&self, is_ours: impl Fn(u32) -> bool) -> Option<(u32, String)> {
        // SAFETY: the relation is open. What `is_ours` looks up may renew its triggers, so they are copied before.
        unsafe {
            let triggers = (*self.relation).trigdesc;
            if triggers.is_null() {
                return None;
            }
            let triggers = (0..(*triggers).numtriggers as usize).map(|n| &*(*triggers).triggers.add(n));
            let triggers = triggers.filter(|trigger| {
                let is_row = u32::from(trigger.tgtype as u16) & pg_sys::TRIGGER_TYPE_ROW != 0;
                is_row && !trigger.tgqual.is_null() && trigger.tgnargs == 1
            });
            let triggers = triggers.map(|trigger| (trigger.tgfoid.to_u32(), text::of_c(*trigger.tgargs)));
            let triggers: Vec<(u32, String)> = triggers.collect();
            triggers.into_iter().find(|(function, _)| is_ours(*function))
        }
    }
}

/// What a function in a WHEN clause must know of the table of a row.
pub struct RowTable {
    pub is_table: bool,
    pub is_partitioned: bool,
    pub is_partition: bool,
}

/// Inside a transaction; the table exists.
pub fn row_table(oid: u32) -> RowTable {
    // SAFETY: lookups in the caches.
    let (kind, is_partition) = unsafe {
        (
            pg_sys::get_rel_relkind(oid.into()) as u8,
            pg_sys::get_rel_relispartition(oid.into()),
        )
    };
    RowTable {
        is_table: kind == pg_sys::RELKIND_RELATION,
        is_partitioned: kind == pg_sys::RELKIND_PARTITIONED_TABLE,
        is_partition,
    }
}

/// # Safety
/// The relation is open, and an index of it has a column with this number.
unsafe fn column(relation: pg_sys::Relation, number: i16) -> String {
    // SAFETY: promised by the caller; the name is copied.
    unsafe {
        let name = pg_sys::get_attname((*relation).rd_id, number, false);
        text::of_c(name)
    }
}
