//! What differs between the majors of Postgres, in one place. Only other files of `pg` call it.

use pgrx::pg_sys;

/// The type of a relation's file.
#[cfg(feature = "pg15")]
pub(super) type File = pg_sys::RelFileNode;
#[cfg(not(feature = "pg15"))]
pub(super) type File = pg_sys::RelFileLocator;

/// The file of a relation.
///
/// # Safety
/// The relation is open.
pub(super) unsafe fn file(relation: pg_sys::Relation) -> File {
    // SAFETY: promised by the caller.
    unsafe {
        #[cfg(feature = "pg15")]
        return (*relation).rd_node;
        #[cfg(not(feature = "pg15"))]
        return (*relation).rd_locator;
    }
}

/// The attributes of a tuple descriptor, in order. Since Postgres 18 they are stored behind its compact ones.
///
/// # Safety
/// The descriptor is valid for as long as the result is used.
pub(super) unsafe fn attributes<'a>(descriptor: pg_sys::TupleDesc) -> &'a [pg_sys::FormData_pg_attribute] {
    // SAFETY: promised by the caller. A descriptor has `natts` of them (TupleDescAttrAddress in tupdesc.h).
    unsafe {
        let count = (*descriptor).natts as usize;
        #[cfg(any(feature = "pg15", feature = "pg16", feature = "pg17"))]
        return (*descriptor).attrs.as_slice(count);
        #[cfg(not(any(feature = "pg15", feature = "pg16", feature = "pg17")))]
        return std::slice::from_raw_parts((*descriptor).compact_attrs.as_ptr().add(count).cast(), count);
    }
}

/// The index of the primary key; InvalidOid = there is none, or it is deferrable.
///
/// # Safety
/// The relation is open.
pub(super) unsafe fn primary_key(relation: pg_sys::Relation) -> pg_sys::Oid {
    // SAFETY: promised by the caller.
    unsafe {
        #[cfg(any(feature = "pg15", feature = "pg16", feature = "pg17"))]
        return pg_sys::RelationGetPrimaryKeyIndex(relation);
        #[cfg(not(any(feature = "pg15", feature = "pg16", feature = "pg17")))]
        return pg_sys::RelationGetPrimaryKeyIndex(relation, false);
    }
}

/// The sequence of an identity column; InvalidOid = it has none.
///
/// # Safety
/// The relation is open.
pub(super) unsafe fn identity_sequence(relation: pg_sys::Relation, column: i16) -> pg_sys::Oid {
    // SAFETY: promised by the caller.
    unsafe {
        #[cfg(any(feature = "pg15", feature = "pg16"))]
        return pg_sys::getIdentitySequence((*relation).rd_id, column, true);
        #[cfg(not(any(feature = "pg15", feature = "pg16")))]
        return pg_sys::getIdentitySequence(relation, column, true);
    }
}

/// Deletes a version of a row. Waits for a transaction that has locked it. False: another transaction has changed it.
///
/// # Safety
/// The relation is open, and has the page.
pub(super) unsafe fn heap_delete(relation: pg_sys::Relation, place: pg_sys::ItemPointer) -> bool {
    let mut failure = pg_sys::TM_FailureData::default();
    // SAFETY: promised by the caller.
    let result = unsafe {
        let (command, none) = (pg_sys::GetCurrentCommandId(true), std::ptr::null_mut());
        #[cfg(not(feature = "pg19"))]
        let result = pg_sys::heap_delete(relation, place, command, none, true, &mut failure, false);
        #[cfg(feature = "pg19")]
        let result = pg_sys::heap_delete(relation, place, command, 0, none, true, &mut failure);
        result
    };
    result == pg_sys::TM_Result::TM_Ok
}

/// Writes the index entries of a row that was inserted speculatively. False: another row has a key of it, or a
/// transaction is writing one.
///
/// # Safety
/// The indexes are open, and the slot has the row and its place.
pub(super) unsafe fn insert_new_index_tuples(
    indexes: *mut pg_sys::ResultRelInfo,
    slot: *mut pg_sys::TupleTableSlot,
) -> bool {
    let (mut conflicts, none) = (false, std::ptr::null_mut());
    // SAFETY: promised by the caller. Without an arbiter, each unique index counts.
    unsafe {
        let state = pg_sys::CreateExecutorState();
        #[cfg(feature = "pg15")]
        pg_sys::ExecInsertIndexTuples(indexes, slot, state, false, true, &mut conflicts, none);
        #[cfg(any(feature = "pg16", feature = "pg17", feature = "pg18"))]
        pg_sys::ExecInsertIndexTuples(indexes, slot, state, false, true, &mut conflicts, none, false);
        #[cfg(feature = "pg19")]
        pg_sys::ExecInsertIndexTuples(indexes, state, pg_sys::EIIT_NO_DUPE_ERROR, slot, none, &mut conflicts);
        pg_sys::FreeExecutorState(state);
    }
    !conflicts
}

/// Whether a role owns a database, or is a superuser. Inside a transaction.
pub(super) fn owns_database(database: pg_sys::Oid, role: pg_sys::Oid) -> bool {
    // SAFETY: syscache lookups on a shared catalog.
    unsafe {
        #[cfg(feature = "pg15")]
        return pg_sys::pg_database_ownercheck(database, role);
        #[cfg(not(feature = "pg15"))]
        return pg_sys::object_ownercheck(pg_sys::DatabaseRelationId, database, role);
    }
}

/// Whether a role has USAGE on a foreign server. Inside a transaction.
pub(super) fn may_use_server(server: pg_sys::Oid, role: pg_sys::Oid) -> bool {
    let usage = pg_sys::ACL_USAGE as pg_sys::AclMode;
    // SAFETY: syscache lookups.
    let result = unsafe {
        #[cfg(feature = "pg15")]
        let result = pg_sys::pg_foreign_server_aclcheck(server, role, usage);
        #[cfg(not(feature = "pg15"))]
        let result = pg_sys::object_aclcheck(pg_sys::ForeignServerRelationId, server, role, usage);
        result
    };
    result == pg_sys::AclResult::ACLCHECK_OK
}

/// Whether a role has USAGE on a schema. Inside a transaction.
pub(super) fn may_use_schema(schema: pg_sys::Oid, role: pg_sys::Oid) -> bool {
    let usage = pg_sys::ACL_USAGE as pg_sys::AclMode;
    // SAFETY: syscache lookups.
    let result = unsafe {
        #[cfg(feature = "pg15")]
        let result = pg_sys::pg_namespace_aclcheck(schema, role, usage);
        #[cfg(not(feature = "pg15"))]
        let result = pg_sys::object_aclcheck(pg_sys::NamespaceRelationId, schema, role, usage);
        result
    };
    result == pg_sys::AclResult::ACLCHECK_OK
}

/// The number of this process in the server's array of processes.
pub(super) fn my_proc_number() -> i32 {
    // SAFETY: set once, before any code of this extension runs in a connected process.
    unsafe {
        #[cfg(any(feature = "pg15", feature = "pg16"))]
        return (*pg_sys::MyProc).pgprocno;
        #[cfg(not(any(feature = "pg15", feature = "pg16")))]
        return pg_sys::MyProcNumber;
    }
}

/// An empty set of events to wait for, which lives as long as the process.
pub(super) fn wait_event_set(events: i32) -> *mut pg_sys::WaitEventSet {
    // SAFETY: allocates the set, without an owner that would free it.
    unsafe {
        #[cfg(any(feature = "pg15", feature = "pg16"))]
        return pg_sys::CreateWaitEventSet(pg_sys::TopMemoryContext, events);
        #[cfg(not(any(feature = "pg15", feature = "pg16")))]
        return pg_sys::CreateWaitEventSet(std::ptr::null_mut(), events);
    }
}

/// The flags with which a background worker connects as a role that may not log in. Up to Postgres 16 workers never
/// need LOGIN.
#[cfg(any(feature = "pg15", feature = "pg16"))]
pub(super) const CONNECT_WITHOUT_LOGIN: u32 = 0;
#[cfg(not(any(feature = "pg15", feature = "pg16")))]
pub(super) const CONNECT_WITHOUT_LOGIN: u32 = pg_sys::BGWORKER_BYPASS_ROLELOGINCHECK;

/// Installs a signal handler.
///
/// # Safety
/// The handler does only what a signal handler may.
pub(super) unsafe fn on_signal(signal: u32, handler: unsafe extern "C-unwind" fn(i32)) {
    // SAFETY: promised by the caller.
    unsafe {
        #[cfg(any(feature = "pg15", feature = "pg16", feature = "pg17"))]
        pg_sys::pqsignal(signal as i32, Some(handler));
        #[cfg(feature = "pg18")]
        pg_sys::pqsignal_be(signal as i32, Some(handler));
        // Postgres 19 also passes the sender. By the C calling convention a function may leave out last arguments.
        #[cfg(feature = "pg19")]
        let handler = std::mem::transmute::<_, pg_sys::pqsigfunc>(Some(handler));
        #[cfg(feature = "pg19")]
        pg_sys::pqsignal_be(signal as i32, handler);
    }
}

/// Ends this process and runs its exit callbacks.
pub(super) fn exit(code: i32) -> ! {
    // SAFETY: proc_exit does not return; the bindings since Postgres 18 do not say so.
    unsafe {
        pg_sys::proc_exit(code);
        #[cfg(not(any(feature = "pg15", feature = "pg16", feature = "pg17")))]
        std::hint::unreachable_unchecked()
    }
}

/// A number that no other transaction of this session has.
pub(super) fn local_transaction() -> u32 {
    // SAFETY: a session has an entry of its own.
    unsafe {
        #[cfg(any(feature = "pg15", feature = "pg16"))]
        return (*pg_sys::MyProc).lxid;
        #[cfg(not(any(feature = "pg15", feature = "pg16")))]
        return (*pg_sys::MyProc).vxid.lxid;
    }
}

/// Whether a backslash in a string constant is a character. From version 19 on it always is.
pub fn has_standard_strings() -> bool {
    #[cfg(feature = "pg19")]
    return true;
    #[cfg(not(feature = "pg19"))]
    // SAFETY: a variable of the server.
    unsafe {
        pg_sys::standard_conforming_strings
    }
}
