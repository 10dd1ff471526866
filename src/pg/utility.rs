//! The hook for utility statements, in each session of the server. It reports statements that create, change or drop
//! databases, that name a foreign server, or that SET a setting of the extension. It lets only one session at a time run
//! CREATE EXTENSION outbox. Other statements pass unchanged.

use super::text;
use pgrx::pg_sys::NodeTag;
use pgrx::{PgList, pg_guard, pg_sys};
use std::ffi::{CStr, c_char};
use std::sync::atomic::{AtomicUsize, Ordering};

/// CREATE, ALTER or DROP DATABASE, about to run.
pub struct DatabaseStatement {
    pub kind: Kind,
    /// The OID of the database; for CREATE that of the template. 0 = there is none with that name.
    pub database: u32,
    /// Whether core will refuse it, because it is in a transaction block.
    pub is_refused: bool,
}

#[derive(Clone, Copy, PartialEq)]
pub enum Kind {
    /// DROP, RENAME and SET TABLESPACE: only for the owner, and no session may be connected.
    Takes,
    /// CREATE: no session may be connected to the template.
    Copies,
    /// Other forms of ALTER DATABASE.
    Alters,
}

/// CREATE SERVER, or ALTER SERVER … RENAME, about to run.
pub struct ServerStatement<'a> {
    /// The foreign data wrapper; for RENAME that of the server.
    pub wrapper: String,
    /// The new name, truncated by the grammar.
    pub name: String,
    /// The text of the statement.
    pub text: &'a [u8],
}

type OnDatabase = fn(&DatabaseStatement);
type OnServer = fn(&ServerStatement);
type OnSet = fn(&str);
static ON_DATABASE: AtomicUsize = AtomicUsize::new(0);
static ON_SERVER: AtomicUsize = AtomicUsize::new(0);
static ON_SET: AtomicUsize = AtomicUsize::new(0);
static mut NEXT: pg_sys::ProcessUtility_hook_type = None;

// Core's function itself. The guard of the bindings would rebuild an error without the names of table and constraint.
// So errors pass this module unchanged.
unsafe extern "C-unwind" {
    #[allow(non_snake_case)] // core's name
    fn standard_ProcessUtility(
        planned: *mut pg_sys::PlannedStmt,
        text: *const c_char,
        read_only_tree: bool,
        context: pg_sys::ProcessUtilityContext::Type,
        parameters: pg_sys::ParamListInfo,
        environment: *mut pg_sys::QueryEnvironment,
        destination: *mut pg_sys::DestReceiver,
        completion: *mut pg_sys::QueryCompletion,
    );
}

/// Sets the functions to call before each such statement of any session. They may refuse it. Called once, while
/// preloading.
pub fn before_statements(on_database: OnDatabase, on_server: OnServer, on_set: OnSet) {
    ON_DATABASE.store(on_database as usize, Ordering::Relaxed);
    ON_SERVER.store(on_server as usize, Ordering::Relaxed);
    ON_SET.store(on_set as usize, Ordering::Relaxed);
    // SAFETY: the postmaster is single-threaded here. The hooks are chained as core requires.
    unsafe {
        NEXT = pg_sys::ProcessUtility_hook;
        pg_sys::ProcessUtility_hook = Some(on_utility);
    }
}

/// Without pg_guard, so nothing in it may need dropping: an error in the statement jumps over it.
unsafe extern "C-unwind" fn on_utility(
    planned: *mut pg_sys::PlannedStmt,
    text: *const c_char,
    read_only_tree: bool,
    context: pg_sys::ProcessUtilityContext::Type,
    parameters: pg_sys::ParamListInfo,
    environment: *mut pg_sys::QueryEnvironment,
    destination: *mut pg_sys::DestReceiver,
    completion: *mut pg_sys::QueryCompletion,
) {
    // SAFETY: core's arguments, passed on unchanged.
    unsafe {
        match (*(*planned).utilityStmt).type_ {
            tag if is_about_databases(tag) => {
                report_database((*planned).utilityStmt, context);
                if tag == NodeTag::T_RenameStmt {
                    publish_server_change(planned, text);
                }
            }
            NodeTag::T_CreateExtensionStmt => wait_for_another_create((*planned).utilityStmt),
            NodeTag::T_CreateForeignServerStmt => publish_server_change(planned, text),
            NodeTag::T_VariableSetStmt => report_set((*planned).utilityStmt),
            _ => {}
        }
        let next = NEXT.unwrap_or(standard_ProcessUtility);
        next(
            planned,
            text,
            read_only_tree,
            context,
            parameters,
            environment,
            destination,
            completion,
        );
    }
}

fn is_about_databases(tag: NodeTag) -> bool {
    matches!(
        tag,
        NodeTag::T_DropdbStmt | NodeTag::T_RenameStmt | NodeTag::T_AlterDatabaseStmt | NodeTag::T_CreatedbStmt
    )
}

/// Sessions that create the extension at the same time wait for the first. Core first checks that it does not exist, and
/// later inserts its row: a unique violation, also with IF NOT EXISTS. The lock is held until the transaction ends. If
/// the extension exists, no session waits. A role that may not create it holds the lock until core refuses.
#[pg_guard]
unsafe extern "C-unwind" fn wait_for_another_create(node: *mut pg_sys::Node) {
    // SAFETY: the node is what its tag says.
    unsafe {
        let name = (*node.cast::<pg_sys::CreateExtensionStmt>()).extname.cast_const();
        let is_ours = CStr::from_ptr(name) == c"outbox" && !pg_sys::RecoveryInProgress();
        if is_ours && pg_sys::get_extension_oid(name, true) == pg_sys::InvalidOid {
            let mode = pg_sys::ShareUpdateExclusiveLock as pg_sys::LOCKMODE;
            pg_sys::LockDatabaseObject(pg_sys::ExtensionRelationId, pg_sys::InvalidOid, 0, mode);
        }
    }
}

/// Reports SET and SET LOCAL of a setting of the extension.
#[pg_guard]
unsafe extern "C-unwind" fn report_set(node: *mut pg_sys::Node) {
    // SAFETY: the node is what its tag says; its strings are the server's and outlive the call.
    unsafe {
        let set = node.cast::<pg_sys::VariableSetStmt>();
        let is_value = (*set).kind == pg_sys::VariableSetKind::VAR_SET_VALUE;
        if is_value && !(*set).name.is_null() {
            let is_ours = (CStr::from_ptr((*set).name).to_bytes().get(..7))
                .is_some_and(|prefix| prefix.eq_ignore_ascii_case(b"outbox."));
            let on_set = ON_SET.load(Ordering::Relaxed);
            if is_ours && on_set != 0 {
                let name = text::of_c((*set).name).to_ascii_lowercase();
                std::mem::transmute::<usize, OnSet>(on_set)(&name);
            }
        }
    }
}

#[pg_guard]
unsafe extern "C-unwind" fn publish_server_change(planned: *mut pg_sys::PlannedStmt, query: *const c_char) {
    // SAFETY: each node is read as its tag says, and the text is that of the query with the statement. The callback was
    // stored by before_statements, from an OnServer.
    unsafe {
        let node = (*planned).utilityStmt;
        let (wrapper, name) = match (*node).type_ {
            NodeTag::T_CreateForeignServerStmt => {
                let create = node.cast::<pg_sys::CreateForeignServerStmt>();
                (text::of_c((*create).fdwname), (*create).servername)
            }
            _ => {
                let rename = node.cast::<pg_sys::RenameStmt>();
                if (*rename).renameType != pg_sys::ObjectType::OBJECT_FOREIGN_SERVER {
                    return;
                }
                let old = text::of_c((*(*rename).object.cast::<pg_sys::String>()).sval);
                let Some(server) = super::catalog::foreign_server(&old) else {
                    return;
                };
                (server.wrapper, (*rename).newname)
            }
        };
        if query.is_null() {
            return;
        }
        let whole = CStr::from_ptr(query).to_bytes();
        let from = usize::try_from((*planned).stmt_location).unwrap_or(0).min(whole.len());
        let length = usize::try_from((*planned).stmt_len).ok().filter(|length| *length > 0);
        let statement = &whole[from..];
        let statement = ServerStatement {
            wrapper,
            name: text::of_c(name),
            text: &statement[..length.unwrap_or(statement.len()).min(statement.len())],
        };
        std::mem::transmute::<usize, OnServer>(ON_SERVER.load(Ordering::Relaxed))(&statement);
    }
}

#[pg_guard]
unsafe extern "C-unwind" fn report_database(node: *mut pg_sys::Node, context: pg_sys::ProcessUtilityContext::Type) {
    // SAFETY: a node of core; the callback was stored by before_statements, from an OnDatabase.
    unsafe {
        let Some((kind, database)) = read(node) else { return };
        let is_top_level = context == pg_sys::ProcessUtilityContext::PROCESS_UTILITY_TOPLEVEL;
        // RENAME, and statements that only change a row, may be in a block.
        let is_alone = (*node).type_ != NodeTag::T_RenameStmt && kind != Kind::Alters;
        let statement = DatabaseStatement {
            kind,
            database,
            is_refused: is_alone && pg_sys::IsInTransactionBlock(is_top_level),
        };
        std::mem::transmute::<usize, OnDatabase>(ON_DATABASE.load(Ordering::Relaxed))(&statement);
    }
}

unsafe fn read(node: *mut pg_sys::Node) -> Option<(Kind, u32)> {
    // SAFETY: each node is read as what its tag says.
    unsafe {
        let (kind, name) = match (*node).type_ {
            NodeTag::T_DropdbStmt => (Kind::Takes, (*node.cast::<pg_sys::DropdbStmt>()).dbname.cast_const()),
            NodeTag::T_RenameStmt => {
                let rename = node.cast::<pg_sys::RenameStmt>();
                if (*rename).renameType != pg_sys::ObjectType::OBJECT_DATABASE {
                    return None;
                }
                (Kind::Takes, (*rename).subname.cast_const())
            }
            NodeTag::T_AlterDatabaseStmt => {
                let alter = node.cast::<pg_sys::AlterDatabaseStmt>();
                let moves = option((*alter).options, c"tablespace").is_some();
                let kind = if moves { Kind::Takes } else { Kind::Alters };
                (kind, (*alter).dbname.cast_const())
            }
            NodeTag::T_CreatedbStmt => {
                let create = node.cast::<pg_sys::CreatedbStmt>();
                let template = option((*create).options, c"template").filter(|option| !(**option).arg.is_null());
                let name = template.map_or(c"template1".as_ptr(), |option| {
                    pg_sys::defGetString(option).cast_const()
                });
                (Kind::Copies, name)
            }
            _ => return None,
        };
        Some((kind, pg_sys::get_database_oid(name, true).to_u32()))
    }
}

unsafe fn option(options: *mut pg_sys::List, name: &CStr) -> Option<*mut pg_sys::DefElem> {
    // SAFETY: a list of DefElem, as the grammar makes it.
    unsafe {
        let options = PgList::<pg_sys::DefElem>::from_pg(options);
        options
            .iter_ptr()
            .find(|option| CStr::from_ptr((**option).defname) == name)
    }
}
