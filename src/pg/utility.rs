//! The hook for utility statements, in each session of the server. It reports statements that create, change or drop
//! databases, that name a foreign server, that rename a schema, that make a role a member of another, that SET a
//! setting of the extension, that switch all triggers of a table, that restart its sequences, or that add, remove or
//! empty a partition. It lets only one session at a time run CREATE EXTENSION outbox. Other statements pass unchanged.
//! Another hook reports triggers that were created.

use super::{catalog, text};
use pgrx::pg_sys::NodeTag;
use pgrx::{PgList, pg_guard, pg_sys};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::OnceLock;

/// A statement of any session, about to run.
pub enum UtilityStatement<'a> {
    Database(DatabaseStatement),
    Server(ServerStatement<'a>),
    /// SET of a setting of the extension: its name.
    Set(String),
    /// ALTER SCHEMA … RENAME: the name that it has.
    RenameSchema(String),
    /// The role that gets a member.
    AddMember(String),
    /// CREATE TRIGGER has created one on this table, with this function. What a statement names can change until it has
    /// the lock of the table.
    TriggerCreated {
        table: u32,
        function: u32,
    },
    /// ALTER TABLE … DISABLE or ENABLE TRIGGER ALL or USER: the table.
    SwitchTriggers(u32),
    /// TRUNCATE … RESTART IDENTITY: a table.
    Restart(u32),
    Partition(PartitionStatement),
}

/// A statement that adds, removes or empties a partition with its rows. It fires no trigger for them.
pub struct PartitionStatement {
    pub change: PartitionChange,
    pub partition: u32,
    /// The table that it is a partition of, or will be.
    pub parent: u32,
}

#[derive(Clone, Copy, PartialEq)]
pub enum PartitionChange {
    Attach,
    Detach,
    Drop,
    Truncate,
}

/// CREATE, ALTER or DROP DATABASE.
pub struct DatabaseStatement {
    pub kind: DatabaseChange,
    /// The OID of the database; for CREATE that of the template. 0 = there is none with that name.
    pub database: u32,
    /// Whether core will refuse it, because it is in a transaction block.
    pub is_refused: bool,
}

#[derive(Clone, Copy, PartialEq)]
pub enum DatabaseChange {
    /// DROP, RENAME and SET TABLESPACE: only for the owner, and no session may be connected.
    Takes,
    /// CREATE: no session may be connected to the template.
    Copies,
    /// Other forms of ALTER DATABASE.
    Alters,
}

/// CREATE SERVER, or ALTER SERVER … RENAME.
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

/// Called before such a statement. It may refuse it, or return false to leave it out.
type Callback = fn(UtilityStatement) -> bool;

static CALLBACK: OnceLock<Callback> = OnceLock::new();
static mut NEXT: pg_sys::ProcessUtility_hook_type = None;
static mut NEXT_ON_ACCESS: pg_sys::object_access_hook_type = None;

// Core's function itself, without the guard of the bindings, which would catch an error and raise it again.
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

/// Sets the callback. Called once, while preloading.
pub fn before_statements(callback: Callback) {
    let _ = CALLBACK.set(callback);
    // SAFETY: the postmaster is single-threaded here. The hooks are chained as core requires.
    unsafe {
        NEXT = pg_sys::ProcessUtility_hook;
        pg_sys::ProcessUtility_hook = Some(on_utility);
        NEXT_ON_ACCESS = pg_sys::object_access_hook;
        pg_sys::object_access_hook = Some(on_access);
    }
}

/// Core calls it for each access to an object, so it only looks for the one that is reported. Without pg_guard, as the
/// next.
unsafe extern "C-unwind" fn on_access(
    access: pg_sys::ObjectAccessType::Type,
    class: pg_sys::Oid,
    object: pg_sys::Oid,
    part: c_int,
    argument: *mut c_void,
) {
    // SAFETY: core's arguments, passed on unchanged.
    unsafe {
        if let Some(next) = NEXT_ON_ACCESS {
            next(access, class, object, part, argument);
        }
        if access == pg_sys::ObjectAccessType::OAT_POST_CREATE && class == pg_sys::TriggerRelationId {
            trigger_created(object);
        }
    }
}

#[pg_guard]
unsafe extern "C-unwind" fn trigger_created(trigger: pg_sys::Oid) {
    if let Some((table, function)) = catalog::table_and_function(trigger) {
        call(UtilityStatement::TriggerCreated { table, function });
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
        let is_reported = matches!(
            (*(*planned).utilityStmt).type_,
            NodeTag::T_DropdbStmt
                | NodeTag::T_AlterDatabaseStmt
                | NodeTag::T_CreatedbStmt
                | NodeTag::T_RenameStmt
                | NodeTag::T_CreateExtensionStmt
                | NodeTag::T_CreateForeignServerStmt
                | NodeTag::T_VariableSetStmt
                | NodeTag::T_GrantRoleStmt
                | NodeTag::T_CreateRoleStmt
                | NodeTag::T_AlterRoleStmt
                | NodeTag::T_AlterTableStmt
                | NodeTag::T_TruncateStmt
                | NodeTag::T_DropStmt
        );
        if is_reported && !report(planned, text, context) {
            return;
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

/// Returns whether the statement is to run.
#[pg_guard]
unsafe extern "C-unwind" fn report(
    planned: *mut pg_sys::PlannedStmt,
    query: *const c_char,
    context: pg_sys::ProcessUtilityContext::Type,
) -> bool {
    // SAFETY: each node is read as its tag says; the server's strings outlive the call.
    unsafe {
        let node = (*planned).utilityStmt;
        match (*node).type_ {
            NodeTag::T_DropdbStmt => {
                let name = (*node.cast::<pg_sys::DropdbStmt>()).dbname;
                database(DatabaseChange::Takes, name, context)
            }
            NodeTag::T_AlterDatabaseStmt => alter_database(node.cast(), context),
            NodeTag::T_CreatedbStmt => create_database(node.cast(), context),
            NodeTag::T_RenameStmt => rename(planned, query),
            NodeTag::T_CreateExtensionStmt => {
                wait_for_another_create((*node.cast::<pg_sys::CreateExtensionStmt>()).extname);
                true
            }
            NodeTag::T_CreateForeignServerStmt => {
                let create = node.cast::<pg_sys::CreateForeignServerStmt>();
                server(planned, query, text::of_c((*create).fdwname), (*create).servername)
            }
            NodeTag::T_VariableSetStmt => set(node.cast()),
            NodeTag::T_GrantRoleStmt => grant_role(node.cast()),
            NodeTag::T_CreateRoleStmt => create_role(node.cast()),
            NodeTag::T_AlterRoleStmt => alter_role(node.cast()),
            NodeTag::T_AlterTableStmt => alter_table(node.cast()),
            NodeTag::T_TruncateStmt => truncate(node.cast()),
            NodeTag::T_DropStmt => {
                drop_objects(node.cast());
                true
            }
            _ => true,
        }
    }
}

fn call(statement: UtilityStatement) -> bool {
    CALLBACK.get().is_none_or(|callback| callback(statement))
}

/// A statement about the database with this name. Only RENAME, and what just changes a row, may be in a block.
unsafe fn database(kind: DatabaseChange, name: *const c_char, context: pg_sys::ProcessUtilityContext::Type) -> bool {
    let is_top_level = context == pg_sys::ProcessUtilityContext::PROCESS_UTILITY_TOPLEVEL;
    // SAFETY: a name of the grammar.
    let (database, is_refused) = unsafe {
        let is_refused = kind != DatabaseChange::Alters && pg_sys::IsInTransactionBlock(is_top_level);
        (pg_sys::get_database_oid(name, true).to_u32(), is_refused)
    };
    call(UtilityStatement::Database(DatabaseStatement {
        kind,
        database,
        is_refused,
    }))
}

unsafe fn alter_database(
    alter: *const pg_sys::AlterDatabaseStmt,
    context: pg_sys::ProcessUtilityContext::Type,
) -> bool {
    // SAFETY: a node of the grammar.
    unsafe {
        let change = match option((*alter).options, c"tablespace") {
            Some(_) => DatabaseChange::Takes,
            None => DatabaseChange::Alters,
        };
        database(change, (*alter).dbname, context)
    }
}

unsafe fn create_database(create: *const pg_sys::CreatedbStmt, context: pg_sys::ProcessUtilityContext::Type) -> bool {
    // SAFETY: a node of the grammar.
    unsafe {
        let template = option((*create).options, c"template").filter(|option| !(**option).arg.is_null());
        let name = template.map_or(c"template1".as_ptr(), |option| {
            pg_sys::defGetString(option).cast_const()
        });
        database(DatabaseChange::Copies, name, context)
    }
}

unsafe fn rename(planned: *mut pg_sys::PlannedStmt, query: *const c_char) -> bool {
    use pg_sys::ObjectType::{OBJECT_DATABASE, OBJECT_FOREIGN_SERVER, OBJECT_SCHEMA};
    // SAFETY: a RenameStmt, whose object is of the kind that it says.
    unsafe {
        let rename = (*planned).utilityStmt.cast::<pg_sys::RenameStmt>();
        match (*rename).renameType {
            OBJECT_DATABASE => call(UtilityStatement::Database(DatabaseStatement {
                kind: DatabaseChange::Takes,
                database: pg_sys::get_database_oid((*rename).subname, true).to_u32(),
                is_refused: false, // it may be in a block
            })),
            OBJECT_SCHEMA => call(UtilityStatement::RenameSchema(text::of_c((*rename).subname))),
            OBJECT_FOREIGN_SERVER => {
                let old = text::of_c((*(*rename).object.cast::<pg_sys::String>()).sval);
                let known = catalog::foreign_server(&old);
                known.is_none_or(|known| server(planned, query, known.wrapper, (*rename).newname))
            }
            _ => true,
        }
    }
}

unsafe fn server(
    planned: *mut pg_sys::PlannedStmt,
    query: *const c_char,
    wrapper: String,
    name: *const c_char,
) -> bool {
    if query.is_null() {
        return true;
    }
    // SAFETY: a name of the grammar; the text is that of the query with the statement.
    unsafe {
        let whole = CStr::from_ptr(query).to_bytes();
        let from = usize::try_from((*planned).stmt_location).unwrap_or(0).min(whole.len());
        let length = usize::try_from((*planned).stmt_len).ok().filter(|length| *length > 0);
        let statement = &whole[from..];
        call(UtilityStatement::Server(ServerStatement {
            wrapper,
            name: text::of_c(name),
            name_bytes: CStr::from_ptr(name).to_bytes(),
            text: &statement[..length.unwrap_or(statement.len()).min(statement.len())],
        }))
    }
}

/// Sessions that create the extension at the same time wait for the first. Core first checks that it does not exist,
/// and later inserts its row: a unique violation, also with IF NOT EXISTS. The lock is held until the transaction ends.
/// If the extension exists, no session waits. A role that may not create it holds the lock until core refuses.
unsafe fn wait_for_another_create(name: *const c_char) {
    // SAFETY: a name of the grammar.
    unsafe {
        let is_ours = CStr::from_ptr(name) == c"outbox" && !pg_sys::RecoveryInProgress();
        if is_ours && pg_sys::get_extension_oid(name, true) == pg_sys::InvalidOid {
            let mode = pg_sys::ShareUpdateExclusiveLock as pg_sys::LOCKMODE;
            pg_sys::LockDatabaseObject(pg_sys::ExtensionRelationId, pg_sys::InvalidOid, 0, mode);
        }
    }
}

/// SET of any setting.
unsafe fn set(set: *const pg_sys::VariableSetStmt) -> bool {
    // SAFETY: a node of the grammar.
    let name = unsafe {
        let is_value = (*set).kind == pg_sys::VariableSetKind::VAR_SET_VALUE && !(*set).name.is_null();
        if is_value { CStr::from_ptr((*set).name) } else { c"" }
    };
    let is_ours = (name.to_bytes().get(..7)).is_some_and(|prefix| prefix.eq_ignore_ascii_case(b"outbox."));
    !is_ours || call(UtilityStatement::Set(text::of_c_str(name).to_ascii_lowercase()))
}

/// GRANT or REVOKE of roles.
unsafe fn grant_role(grant: *const pg_sys::GrantRoleStmt) -> bool {
    // SAFETY: a node of the grammar.
    unsafe {
        let roles = PgList::<pg_sys::AccessPriv>::from_pg((*grant).granted_roles);
        let roles = roles.iter_ptr().filter(|_| (*grant).is_grant);
        add_members(roles.map(|role| (*role).priv_name))
    }
}

unsafe fn create_role(create: *const pg_sys::CreateRoleStmt) -> bool {
    // SAFETY: a node of the grammar; IN ROLE has a list of RoleSpec.
    unsafe {
        let groups = option((*create).options, c"addroleto").map_or(std::ptr::null_mut(), |groups| (*groups).arg);
        let groups = PgList::<pg_sys::RoleSpec>::from_pg(groups.cast());
        add_members(groups.iter_ptr().map(|group| (*group).rolename))
    }
}

unsafe fn alter_role(alter: *const pg_sys::AlterRoleStmt) -> bool {
    // SAFETY: a node of the grammar.
    unsafe {
        let adds = (*alter).action > 0 && option((*alter).options, c"rolemembers").is_some();
        add_members(adds.then(|| (*(*alter).role).rolename).into_iter())
    }
}

/// Each role gets a member: by GRANT, CREATE ROLE … IN ROLE or ALTER GROUP … ADD USER.
unsafe fn add_members(roles: impl Iterator<Item = *mut c_char>) -> bool {
    let mut roles = roles.filter(|role| !role.is_null());
    // SAFETY: names of the grammar.
    roles.all(|role| call(UtilityStatement::AddMember(unsafe { text::of_c(role) })))
}

unsafe fn alter_table(alter: *const pg_sys::AlterTableStmt) -> bool {
    // SAFETY: a node of the grammar; a command about a partition has a PartitionCmd.
    unsafe {
        let commands = PgList::<pg_sys::AlterTableCmd>::from_pg((*alter).cmds);
        let switches_all = commands.iter_ptr().all(|command| is_trigger_switch((*command).subtype));
        let table = if switches_all { relation((*alter).relation) } else { 0 };
        for command in commands.iter_ptr() {
            if let Some(change) = partition_change((*command).subtype) {
                let named = (*(*command).def.cast::<pg_sys::PartitionCmd>()).name;
                partition(change, relation(named), relation((*alter).relation));
            }
        }
        table == 0 || call(UtilityStatement::SwitchTriggers(table))
    }
}

unsafe fn truncate(truncate: *const pg_sys::TruncateStmt) -> bool {
    // SAFETY: a node of the grammar.
    unsafe {
        let tables = PgList::<pg_sys::RangeVar>::from_pg((*truncate).relations);
        let tables = tables.iter_ptr().map(|name| relation(name));
        tables.filter(|table| *table != 0).all(|table| {
            partition(PartitionChange::Truncate, table, catalog::partitioned_by(table));
            !(*truncate).restart_seqs || call(UtilityStatement::Restart(table))
        })
    }
}

/// A partition that is dropped with its table is not reported.
unsafe fn drop_objects(drop: *const pg_sys::DropStmt) {
    // SAFETY: a node of the grammar; the objects of DROP TABLE are names, as lists.
    unsafe {
        if (*drop).removeType != pg_sys::ObjectType::OBJECT_TABLE {
            return;
        }
        let names = PgList::<pg_sys::List>::from_pg((*drop).objects);
        let table = |name: *mut pg_sys::List| relation(pg_sys::makeRangeVarFromNameList(name));
        let tables: Vec<u32> = names.iter_ptr().map(table).collect();
        for table in &tables {
            let parent = catalog::partitioned_by(*table);
            if !tables.contains(&parent) {
                partition(PartitionChange::Drop, *table, parent);
            }
        }
    }
}

fn partition_change(command: pg_sys::AlterTableType::Type) -> Option<PartitionChange> {
    use pg_sys::AlterTableType as Command;
    match command {
        Command::AT_AttachPartition => Some(PartitionChange::Attach),
        Command::AT_DetachPartition | Command::AT_DetachPartitionFinalize => Some(PartitionChange::Detach),
        _ => None,
    }
}

/// 0 = there is none with the name, or it is no partition.
fn partition(change: PartitionChange, partition: u32, parent: u32) {
    if partition != 0 && parent != 0 {
        call(UtilityStatement::Partition(PartitionStatement {
            change,
            partition,
            parent,
        }));
    }
}

fn is_trigger_switch(command: pg_sys::AlterTableType::Type) -> bool {
    use pg_sys::AlterTableType::{AT_DisableTrigAll, AT_DisableTrigUser, AT_EnableTrigAll, AT_EnableTrigUser};
    [
        AT_DisableTrigAll,
        AT_DisableTrigUser,
        AT_EnableTrigAll,
        AT_EnableTrigUser,
    ]
    .contains(&command)
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

unsafe fn option(options: *mut pg_sys::List, name: &CStr) -> Option<*mut pg_sys::DefElem> {
    // SAFETY: a list of DefElem, as the grammar makes it.
    unsafe {
        let options = PgList::<pg_sys::DefElem>::from_pg(options);
        options
            .iter_ptr()
            .find(|option| CStr::from_ptr((**option).defname) == name)
    }
}
