//! A trigger that fires: its arguments, its table, and the rows that its statement wrote. The capture trigger in a
//! session calls it on the main thread.

use super::{catalog, text};
use pgrx::pg_sys::SysCacheIdentifier::INDEXRELID;
use pgrx::trigger_support::{PgTrigger, PgTriggerLevel, PgTriggerOperation, PgTriggerWhen};
use pgrx::{PgList, pg_sys};
use std::ffi::c_char;

/// The call that core passes to a trigger function.
pub type Call = pg_sys::FunctionCallInfo;

/// A statement trigger while it runs. Valid only during this call, because it points into core's data.
pub struct Fired {
    call: Call,
    data: *mut pg_sys::TriggerData,
    /// The OID of the trigger.
    pub trigger: u32,
    pub operation: Operation,
    /// A BEFORE trigger: the statement begins.
    pub is_before: bool,
    pub table: String,
    /// The OID of the table.
    pub oid: u32,
    /// The OID of the table; of the whole table, if this is a partition.
    pub root: u32,
    /// The owner of the table.
    pub owner: u32,
    pub argument: String,
    /// The names of the transition tables in the trigger's definition; None = it has none.
    pub old_rows: Option<String>,
    pub new_rows: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Operation {
    Insert,
    Update,
    Delete,
    Truncate,
}

/// The trigger of this call. None: it is no statement trigger with one argument.
pub fn fired(call: Call) -> Option<Fired> {
    // SAFETY: core passes valid trigger data, and the relation is locked while the trigger runs.
    unsafe {
        let trigger = PgTrigger::from_fcinfo(call.as_ref()?).ok()?;
        let data: *mut pg_sys::TriggerData = (*call).context.cast();
        let of = &*(*data).tg_trigger;
        let is_statement = matches!(trigger.level(), PgTriggerLevel::Statement);
        if of.tgnargs != 1 {
            return None;
        }
        let name = |name: *const c_char| (!name.is_null()).then(|| text::of_c(name));
        let fired = Fired {
            call,
            data,
            trigger: of.tgoid.to_u32(),
            operation: match trigger.op().ok()? {
                PgTriggerOperation::Insert => Operation::Insert,
                PgTriggerOperation::Update => Operation::Update,
                PgTriggerOperation::Delete => Operation::Delete,
                PgTriggerOperation::Truncate => Operation::Truncate,
            },
            is_before: matches!(trigger.when(), Ok(PgTriggerWhen::Before)),
            oid: (*(*data).tg_relation).rd_id.to_u32(),
            root: root((*data).tg_relation),
            table: text::of_c((*(*(*data).tg_relation).rd_rel).relname.data.as_ptr()),
            owner: (*(*(*data).tg_relation).rd_rel).relowner.to_u32(),
            argument: text::of_c(*of.tgargs),
            old_rows: name(of.tgoldtable),
            new_rows: name(of.tgnewtable),
        };
        is_statement.then_some(fired)
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

    pub fn has_column(&self, name: &str) -> bool {
        let name = text::to_c_string(name);
        // SAFETY: the relation is open; system columns have negative numbers.
        unsafe { pg_sys::get_attnum((*(*self.data).tg_relation).rd_id, name.as_ptr()) > 0 }
    }

    /// The columns of the primary key, in its order; empty if there is none. Looked up for each call, so a renamed
    /// column has its new name.
    pub fn primary_key(&self) -> Vec<String> {
        // SAFETY: the relation is open and locked. Only the catalog row of each index is read.
        unsafe {
            let relation = (*self.data).tg_relation;
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
}

/// # Safety
/// The relation is open.
unsafe fn root(relation: pg_sys::Relation) -> u32 {
    // SAFETY: promised by the caller; the list holds OIDs, the topmost table last.
    unsafe {
        let table = (*relation).rd_id;
        let above = match (*(*relation).rd_rel).relispartition {
            true => pg_sys::ffi::pg_guard_ffi_boundary(|| get_partition_ancestors(table)),
            false => std::ptr::null_mut(),
        };
        PgList::<pg_sys::Oid>::from_pg(above)
            .iter_oid()
            .last()
            .unwrap_or(table)
            .to_u32()
    }
}

// From catalog/partition.h, which the bindings leave out.
unsafe extern "C-unwind" {
    fn get_partition_ancestors(table: pg_sys::Oid) -> *mut pg_sys::List;
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

/// The number of nested triggers that are running.
pub fn depth() -> i32 {
    // SAFETY: the function reads a static of the server, and no argument.
    unsafe { pg_sys::pg_trigger_depth(std::ptr::null_mut()) }.value() as i32
}
