//! The hook for utility statements, in each session of the server. It reports statements that create, change or drop
//! databases, that name a foreign server, that rename a schema, that make a role a member of another, that SET a setting of
//! the extension, that switch all triggers of a table, or that restart its sequences. It lets only one session at a time run
//! CREATE EXTENSION outbox. Other statements pass unchanged.

use super::text;
use pgrx::pg_sys::NodeTag;
use pgrx::{PgList, pg_guard, pg_sys};
use std::ffi::{CStr, c_char};
use std::sync::OnceLock;

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
    /// The new name in the encoding of the database, as `text` is.
    pub name_bytes: &'a [u8],
    /// The text of the statement.
    pub text: &'a [u8],
}

/// What is called before such a statement of any session. Each may refuse it.
pub struct Callbacks {
    pub database: fn(&DatabaseStatement),
    pub server: fn(&ServerStatement),
    /// SET of a setting of the extension: its name.
    pub set: fn(&str),
    /// ALTER SCHEMA … RENAME: the name that it has.
    pub schema: fn(&str),
    /// The role that gets a member.
    pub member: fn(&str),
    /// ALTER TABLE … DISABLE or ENABLE TRIGGER ALL or USER: the table. Returns whether the statement is left out.
    pub triggers: fn(u32) -> bool,
    /// TRUNCATE … RESTART IDENTITY: a table.
    pub restart: fn(u32),
}

static CALLBACKS: OnceLock<Callbacks> = OnceLock::new();
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

/// Sets the callbacks. Called once, while preloading.
pub fn before_statements(callbacks: Callbacks) {
    let _ = CALLBACKS.set(callbacks);
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
                    report_schema((*planned).utilityStmt);
                    publish_server_change(planned, text);
                }
            }
            NodeTag::T_CreateExtensionStmt => wait_for_another_create((*planned).utilityStmt),
            NodeTag::T_CreateForeignServerStmt => publish_server_change(planned, text),
            NodeTag::T_VariableSetStmt => report_set((*planned).utilityStmt),
            NodeTag::T_GrantRoleStmt | NodeTag::T_CreateRoleStmt | NodeTag::T_AlterRoleStmt => {
                report_member((*planned).utilityStmt)
            }
            NodeTag::T_AlterTableStmt if report_triggers((*planned).utilityStmt) => return,
            NodeTag::T_TruncateStmt => report_restart((*planned).utilityStmt),
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

fn report(to: impl FnOnce(&Callbacks)) {
    if let Some(callbacks) = CALLBACKS.get() {
        to(callbacks);
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
            if is_ours {
                let name = text::of_c((*set).name).to_ascii_lowercase();
                report(|callbacks| (callbacks.set)(&name));
            }
        }
    }
}

/// Reports ALTER SCHEMA … RENAME.
#[pg_guard]
unsafe extern "C-unwind" fn report_schema(node: *mut pg_sys::Node) {
    // SAFETY: the node is what its tag says.
    unsafe {
        let rename = node.cast::<pg_sys::RenameStmt>();
        if (*rename).renameType == pg_sys::ObjectType::OBJECT_SCHEMA {
            let name = text::of_c((*rename).subname);
            report(|callbacks| (callbacks.schema)(&name));
        }
    }
}

/// Reports each role that gets a member: by GRANT, CREATE ROLE … IN ROLE or ALTER GROUP … ADD USER.
#[pg_guard]
unsafe extern "C-unwind" fn report_member(node: *mut pg_sys::Node) {
    // SAFETY: each node is read as its tag says.
    unsafe {
        let gets_member = |name: *const c_char| {
            if !name.is_null() {
                let name = text::of_c(name);
                report(|callbacks| (callbacks.member)(&name));
            }
        };
        match (*node).type_ {
            NodeTag::T_GrantRoleStmt => {
                let grant = node.cast::<pg_sys::GrantRoleStmt>();
                let roles = PgList::<pg_sys::AccessPriv>::from_pg((*grant).granted_roles);
                (roles.iter_ptr().filter(|_| (*grant).is_grant)).for_each(|role| gets_member((*role).priv_name));
            }
            NodeTag::T_CreateRoleStmt => {
                let create = node.cast::<pg_sys::CreateRoleStmt>();
                if let Some(option) = option((*create).options, c"addroleto") {
                    let roles = PgList::<pg_sys::RoleSpec>::from_pg((*option).arg.cast());
                    roles.iter_ptr().for_each(|role| gets_member((*role).rolename));
                }
            }
            _ => {
                let alter = node.cast::<pg_sys::AlterRoleStmt>();
                if (*alter).action > 0 && option((*alter).options, c"rolemembers").is_some() {
                    gets_member((*(*alter).role).rolename);
                }
            }
        }
    }
}

/// Reports ALTER TABLE … DISABLE or ENABLE TRIGGER ALL or USER. Returns whether it is left out.
#[pg_guard]
unsafe extern "C-unwind" fn report_triggers(node: *mut pg_sys::Node) -> bool {
    use pg_sys::AlterTableType::{AT_DisableTrigAll, AT_DisableTrigUser, AT_EnableTrigAll, AT_EnableTrigUser};
    // SAFETY: the node is what its tag says.
    unsafe {
        let alter = node.cast::<pg_sys::AlterTableStmt>();
        let commands = PgList::<pg_sys::AlterTableCmd>::from_pg((*alter).cmds);
        let switches = |command: *mut pg_sys::AlterTableCmd| {
            let all = [
                AT_DisableTrigAll,
                AT_DisableTrigUser,
                AT_EnableTrigAll,
                AT_EnableTrigUser,
            ];
            all.contains(&(*command).subtype)
        };
        let table = commands.iter_ptr().all(switches).then(|| relation((*alter).relation));
        match (table, CALLBACKS.get()) {
            (Some(table), Some(callbacks)) if table != 0 => (callbacks.triggers)(table),
            _ => false,
        }
    }
}

/// Reports the tables of TRUNCATE … RESTART IDENTITY.
#[pg_guard]
unsafe extern "C-unwind" fn report_restart(node: *mut pg_sys::Node) {
    // SAFETY: the node is what its tag says.
    unsafe {
        let truncate = node.cast::<pg_sys::TruncateStmt>();
        if (*truncate).restart_seqs {
            let tables = PgList::<pg_sys::RangeVar>::from_pg((*truncate).relations);
            for table in tables.iter_ptr().map(|name| relation(name)).filter(|table| *table != 0) {
                report(|callbacks| (callbacks.restart)(table));
            }
        }
    }
}

/// The relation with this name; 0 = there is none.
///
/// # Safety
/// A node of the grammar.
unsafe fn relation(name: *const pg_sys::RangeVar) -> u32 {
    let (flags, none) = (pg_sys::RVROption::RVR_MISSING_OK, std::ptr::null_mut());
    // SAFETY: promised by the caller; a lookup without a lock.
    unsafe { pg_sys::RangeVarGetRelidExtended(name, pg_sys::NoLock as i32, flags, None, none).to_u32() }
}

#[pg_guard]
unsafe extern "C-unwind" fn publish_server_change(planned: *mut pg_sys::PlannedStmt, query: *const c_char) {
    // SAFETY: each node is read as its tag says, and the text is that of the query with the statement.
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
            name_bytes: CStr::from_ptr(name).to_bytes(),
            text: &statement[..length.unwrap_or(statement.len()).min(statement.len())],
        };
        report(|callbacks| (callbacks.server)(&statement));
    }
}

#[pg_guard]
unsafe extern "C-unwind" fn report_database(node: *mut pg_sys::Node, context: pg_sys::ProcessUtilityContext::Type) {
    // SAFETY: a node of core.
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
        report(|callbacks| (callbacks.database)(&statement));
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
