//! A function that the WHEN clause of an AFTER ROW trigger calls. Core evaluates the clause right after it has written
//! the row (AfterTriggerSaveEvent and TriggerEnabled in trigger.c): before RETURNING, before any later row, and before
//! any trigger fires. So these calls have the order of the writes. Called in the session that writes, on its main
//! thread.

use super::scan::row_id;
use outbox_core::engine::RowId;
use pgrx::pg_sys;
use std::ffi::c_void;

/// The call of such a function: the OID of the table, then the places of row versions.
#[derive(Clone, Copy)]
pub struct WhenCall(pg_sys::FunctionCallInfo);

/// The memory of a running query. Only its address is used.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QueryMemory(usize);

impl WhenCall {
    /// The call that core passes to such a function. sql/src declares its arguments.
    pub fn of(call: pg_sys::FunctionCallInfo) -> Self {
        Self(call)
    }

    /// Whether core calls it for the clause of a trigger. All roles may call the function, because core checks EXECUTE
    /// for the writer. Only there are all arguments columns of the old or new row of a trigger, and system columns: the
    /// inputs of a join have no system columns.
    pub fn is_genuine(self) -> bool {
        // SAFETY: the expression of the call, or null; nodes are read as their tags say.
        unsafe {
            let expression = (*(*self.0).flinfo).fn_expr;
            if expression.is_null() || (*expression).type_ != pg_sys::NodeTag::T_FuncExpr {
                return false;
            }
            let arguments = (*expression.cast::<pg_sys::FuncExpr>()).args;
            let arguments = pgrx::PgList::<pg_sys::Node>::from_pg(arguments);
            let is_column = |node: *mut pg_sys::Node| {
                (*node).type_ == pg_sys::NodeTag::T_Var && {
                    let var = &*node.cast::<pg_sys::Var>();
                    matches!(var.varno, pg_sys::INNER_VAR | pg_sys::OUTER_VAR) && var.varattno < 0
                }
            };
            !arguments.is_empty() && arguments.iter_ptr().all(is_column)
        }
    }

    /// The OID of the table; 0 = it has none.
    pub fn table(self) -> u32 {
        // SAFETY: the argument is an OID, as sql/src declares it.
        unsafe { pgrx::fcinfo::pg_getarg::<pg_sys::Oid>(self.0, 0) }.map_or(0, pg_sys::Oid::to_u32)
    }

    pub fn place(self, argument: usize) -> RowId {
        // SAFETY: the argument is a tid, which is passed by reference.
        unsafe {
            let datum = pgrx::fcinfo::pg_getarg_datum(self.0, argument);
            datum.map_or_else(RowId::default, |datum| {
                row_id(datum.cast_mut_ptr::<pg_sys::ItemPointerData>().read_unaligned())
            })
        }
    }

    /// What [`keep`](Self::keep) has kept for this clause in this query.
    pub fn kept<T: Copy>(self) -> Option<T> {
        // SAFETY: `keep` set the pointer, for a function that keeps one type.
        unsafe { (*(*self.0).flinfo).fn_extra.cast::<T>().as_ref() }.copied()
    }

    pub fn keep<T: Copy>(self, value: T) {
        // SAFETY: the memory lives as long as the query.
        unsafe {
            let flinfo = (*self.0).flinfo;
            let place = pg_sys::MemoryContextAllocZero((*flinfo).fn_mcxt, size_of::<T>()).cast::<T>();
            place.write(value);
            (*flinfo).fn_extra = place.cast();
        }
    }

    pub fn query_memory(self) -> QueryMemory {
        query_memory(self.0)
    }
}

/// The memory of the query that calls this function, in a WHEN clause or as a BEFORE trigger of its statement.
pub fn query_memory(call: pg_sys::FunctionCallInfo) -> QueryMemory {
    // SAFETY: core sets it for each call of a function.
    QueryMemory(unsafe { (*(*call).flinfo).fn_mcxt } as usize)
}

/// Calls `body` with `argument` when the query is over, also by an error. It must not raise an error.
pub fn at_end_of(memory: QueryMemory, body: fn(u64), argument: u64) {
    #[repr(C)]
    struct AtEnd {
        callback: pg_sys::MemoryContextCallback,
        body: fn(u64),
        argument: u64,
    }
    unsafe extern "C-unwind" fn call(at_end: *mut c_void) {
        // SAFETY: `at_end_of` has set it, and core calls it before it frees the memory.
        let AtEnd { body, argument, .. } = unsafe { at_end.cast::<AtEnd>().read() };
        body(argument);
    }
    let context = memory.0 as pg_sys::MemoryContext;
    // SAFETY: the memory of a running query; what is registered lives in it.
    unsafe {
        let at_end = pg_sys::MemoryContextAllocZero(context, size_of::<AtEnd>()).cast::<AtEnd>();
        at_end.write(AtEnd {
            callback: pg_sys::MemoryContextCallback {
                func: Some(call),
                arg: at_end.cast(),
                next: std::ptr::null_mut(),
            },
            body,
            argument,
        });
        pg_sys::MemoryContextRegisterResetCallback(context, &raw mut (*at_end).callback);
    }
}
