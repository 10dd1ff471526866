//! Catalog lookups and locks that need no SQL. Sessions, workers and the launcher call them on the main thread.

use super::{major, text};
pub use pgrx::pg_sys::Oid;
use pgrx::pg_sys::SysCacheIdentifier as CacheId;
use pgrx::{IntoDatum, PgList, direct_function_call, pg_sys};
use std::ffi::CStr;

/// A database that allows connections.
pub struct Database {
    pub oid: u32,
    pub name: String,
}

pub fn my_database() -> u32 {
    // SAFETY: a plain static of this process.
    unsafe { pg_sys::MyDatabaseId.to_u32() }
}

/// A counter that grows when a catalog of any database changes, as of the start of the transaction. Changes of table
/// rows do not count.
pub fn changes() -> u64 {
    // SAFETY: a plain static of this process.
    unsafe { pg_sys::SharedInvalidMessageCounter }
}

/// Whether the settings of databases and roles are those with which this session began. False if that is not certain:
/// some catalog has changed since, or a session is changing settings now. Inside a transaction.
pub fn settings_are_unchanged() -> bool {
    const PG_DB_ROLE_SETTING: u32 = 2964; // not in the bindings
    let (catalog, lock) = (pg_sys::Oid::from(PG_DB_ROLE_SETTING), pg_sys::ShareLock as i32);
    // SAFETY: inside a transaction, on the main thread. ALTER DATABASE … SET holds its lock on this catalog until it
    // has sent the change to all processes, and LockRelationOid receives what was sent.
    unsafe {
        let is_free = pg_sys::ConditionalLockRelationOid(catalog, lock);
        if is_free {
            pg_sys::UnlockRelationOid(catalog, lock);
        }
        is_free && changes() == 0
    }
}

/// The system identifier that initdb gave this cluster.
pub fn system_identifier() -> u64 {
    // SAFETY: reads the control file's copy in shared memory.
    unsafe { pg_sys::GetSystemIdentifier() }
}

/// The OID of pg_parameter_acl, from its header.
const PARAMETER_ACL: u32 = 6243;

/// Removes the record that the privileges of a parameter are part of an extension, as ALTER EXTENSION … DROP does for
/// other objects.
pub fn remove_initial_privileges(parameter: Oid) {
    // SAFETY: inside a transaction, on the main thread.
    unsafe { pg_sys::removeExtObjInitPriv(parameter, PARAMETER_ACL.into()) }
}

/// All databases that allow connections and are not templates. Inside a transaction. It works without a database,
/// because pg_database is shared.
pub fn databases() -> Vec<Database> {
    let mut all = Vec::new();
    // SAFETY: the sequence of the autovacuum launcher (get_database_list in autovacuum.c).
    unsafe {
        let relation = pg_sys::table_open(pg_sys::DatabaseRelationId, pg_sys::AccessShareLock as i32);
        let scan = pg_sys::table_beginscan_catalog(relation, 0, std::ptr::null_mut());
        loop {
            let tuple = pg_sys::heap_getnext(scan, pg_sys::ScanDirection::ForwardScanDirection);
            if tuple.is_null() {
                break;
            }
            let form = pg_sys::GETSTRUCT(tuple) as *mut pg_sys::FormData_pg_database;
            if (*form).datallowconn && !(*form).datistemplate {
                let name = text::of_c((*form).datname.data.as_ptr());
                all.push(Database {
                    oid: (*form).oid.to_u32(),
                    name,
                });
            }
        }
        pg_sys::table_endscan(scan);
        pg_sys::table_close(relation, pg_sys::AccessShareLock as i32);
    }
    all
}

/// Whether the current user owns this database, or is a superuser. Inside a transaction.
pub fn owns_database(oid: u32) -> bool {
    // SAFETY: a plain static of this process.
    major::owns_database(oid.into(), unsafe { pg_sys::GetUserId() })
}

/// Whether the current user may make a copy of this database. Inside a transaction.
pub fn may_copy_database(oid: u32) -> bool {
    may_create_databases() && (is_template(oid) || owns_database(oid))
}

fn may_create_databases() -> bool {
    let user = super::security::current_user();
    // SAFETY: the form of that cache.
    let may = unsafe {
        cached(CacheId::AUTHOID, user, |form: &pg_sys::FormData_pg_authid| {
            form.rolcreatedb
        })
    };
    may.is_some_and(|may| may || is_superuser(user))
}

fn is_template(oid: u32) -> bool {
    // SAFETY: the form of that cache.
    let is = unsafe {
        cached(CacheId::DATABASEOID, oid, |form: &pg_sys::FormData_pg_database| {
            form.datistemplate
        })
    };
    is.unwrap_or_default()
}

/// Reads the row with this OID from a cache of the server. Inside a transaction.
///
/// # Safety
/// The rows of the cache have this form.
pub(super) unsafe fn cached<F, T>(cache: CacheId::Type, oid: u32, read: impl FnOnce(&F) -> T) -> Option<T> {
    // SAFETY: promised by the caller; the tuple is read before it is released.
    unsafe {
        let tuple = pg_sys::SearchSysCache1(cache as i32, Oid::from(oid).into());
        let value = (!tuple.is_null()).then(|| read(&*pg_sys::GETSTRUCT(tuple).cast::<F>()))?;
        pg_sys::ReleaseSysCache(tuple);
        Some(value)
    }
}

/// Whether workers can run as a role: it must exist and must not be a superuser. `role` is called inside a transaction.
pub enum Role {
    Missing,
    Superuser,
    Usable(u32),
}

pub fn role(name: &str) -> Role {
    let name = text::to_c_string(name);
    // SAFETY: syscache lookups on a shared catalog.
    unsafe {
        // A process that a commit wakes can run a moment before its caches are invalidated.
        pg_sys::CatalogCacheFlushCatalog(pg_sys::AuthIdRelationId);
        let oid = pg_sys::get_role_oid(name.as_ptr(), true);
        if oid == pg_sys::InvalidOid {
            Role::Missing
        } else if pg_sys::superuser_arg(oid) {
            Role::Superuser
        } else {
            Role::Usable(oid.to_u32())
        }
    }
}

/// The OID of a role; 0 = there is none. Inside a transaction.
pub fn role_oid(name: &CStr) -> u32 {
    // SAFETY: a syscache lookup on a shared catalog.
    unsafe { pg_sys::get_role_oid(name.as_ptr(), true).to_u32() }
}

/// Locks the extension until the end of this transaction, so that it cannot be dropped before. Returns its OID; None =
/// there is none. DROP EXTENSION takes a lock on the same object first, so it and a worker cannot deadlock.
pub fn lock_extension(name: &CStr) -> Option<u32> {
    // SAFETY: inside a transaction, on the main thread.
    unsafe {
        let before = pg_sys::get_extension_oid(name.as_ptr(), true);
        if before == pg_sys::InvalidOid {
            return None;
        }
        lock_extension_with(before.to_u32());
        pg_sys::AcceptInvalidationMessages();
        (pg_sys::get_extension_oid(name.as_ptr(), true) == before).then(|| before.to_u32())
    }
}

/// Locks an extension with a known OID until the end of this transaction. Returns whether `table`, one of its tables,
/// still exists. This costs one cache lookup, while `lock_extension` reads a catalog twice.
pub fn lock_known_extension(extension: u32, table: u32) -> bool {
    lock_extension_with(extension);
    // SAFETY: a syscache lookup; taking the lock has brought the caches up to date.
    unsafe {
        pg_sys::SearchSysCacheExists(
            CacheId::RELOID as i32,
            pg_sys::Datum::from(table),
            pg_sys::Datum::from(0),
            pg_sys::Datum::from(0),
            pg_sys::Datum::from(0),
        )
    }
}

/// Locks an extension with a known OID until the end of this transaction, without a check that it still exists.
pub fn lock_extension_with(oid: u32) {
    // SAFETY: inside a transaction, on the main thread. A second call in the same transaction costs next to nothing.
    unsafe {
        pg_sys::LockDatabaseObject(
            pg_sys::ExtensionRelationId,
            oid.into(),
            0,
            pg_sys::AccessShareLock as i32,
        )
    }
}

/// An extension and its schema; both are 0 if there is none.
#[derive(Default)]
pub struct Extension {
    pub oid: u32,
    pub schema: u32,
}

pub fn extension(name: &CStr) -> Extension {
    // SAFETY: the lookup of get_extension_oid in extension.c, inside a transaction; the columns are copied before the
    // scan ends.
    unsafe {
        let relation = pg_sys::table_open(pg_sys::ExtensionRelationId, pg_sys::AccessShareLock as i32);
        let mut key = pg_sys::ScanKeyData::default();
        pg_sys::ScanKeyInit(
            &mut key,
            pg_sys::Anum_pg_extension_extname as i16,
            pg_sys::BTEqualStrategyNumber as u16,
            pg_sys::F_NAMEEQ.into(),
            name.as_ptr().into(),
        );
        let index = pg_sys::ExtensionNameIndexId.into();
        let scan = pg_sys::systable_beginscan(relation, index, true, std::ptr::null_mut(), 1, &mut key);
        let tuple = pg_sys::systable_getnext(scan);
        let found = match tuple.is_null() {
            true => Extension::default(),
            false => {
                let form = pg_sys::GETSTRUCT(tuple) as *mut pg_sys::FormData_pg_extension;
                Extension {
                    oid: (*form).oid.to_u32(),
                    schema: (*form).extnamespace.to_u32(),
                }
            }
        };
        pg_sys::systable_endscan(scan);
        pg_sys::table_close(relation, pg_sys::AccessShareLock as i32);
        found
    }
}

/// Locks a table with ACCESS SHARE until the end of this transaction, so that it cannot be dropped or altered.
pub fn lock_table(oid: u32) {
    // SAFETY: inside a transaction, on the main thread.
    unsafe { pg_sys::LockRelationOid(oid.into(), pg_sys::AccessShareLock as i32) }
}

/// Locks a table as a statement does that writes rows.
pub fn lock_to_write(oid: u32) {
    // SAFETY: inside a transaction, on the main thread.
    unsafe { pg_sys::LockRelationOid(oid.into(), pg_sys::RowExclusiveLock as i32) }
}

/// Locks a table against writes and other DDL until the end of this transaction. False: the current role does not have
/// the rights of its owner, or had lost them when it got the lock. No other role may keep writers waiting.
pub fn lock_own_table(oid: u32) -> bool {
    let is_own = || matches!(owner_of_table(oid), owner if owner != 0 && may_act_as(owner));
    if !is_own() {
        return false;
    }
    // SAFETY: inside a transaction, on the main thread.
    unsafe { pg_sys::LockRelationOid(oid.into(), pg_sys::ShareRowExclusiveLock as i32) };
    is_own()
}

/// The OID of a table in a schema; 0 = there is none.
pub fn table_in(schema: u32, table: &CStr) -> u32 {
    // SAFETY: inside a transaction.
    unsafe { pg_sys::get_relname_relid(table.as_ptr(), schema.into()).to_u32() }
}

/// Locks the relation with this name until the end of this transaction, so that it cannot be dropped or renamed.
/// Returns its owner; None = there is none.
pub fn hold_relation(schema: &CStr, name: &CStr) -> Option<u32> {
    // SAFETY: inside a transaction, on the main thread. The name is looked up again under the lock.
    unsafe {
        let find = || pg_sys::get_relname_relid(name.as_ptr(), pg_sys::get_namespace_oid(schema.as_ptr(), true));
        let before = find();
        if before == pg_sys::InvalidOid {
            return None;
        }
        pg_sys::LockRelationOid(before, pg_sys::AccessShareLock as i32);
        let owner = owner_of_table(before.to_u32());
        (owner != 0 && find() == before).then_some(owner)
    }
}

/// Whether a table has a trigger with this name, by the relation cache.
pub fn has_trigger(table: u32, name: &CStr) -> bool {
    // SAFETY: inside a transaction that holds the lock on the extension, and so its tables; the entry is closed again.
    unsafe {
        let relation = pg_sys::RelationIdGetRelation(table.into());
        if relation.is_null() {
            return false;
        }
        let triggers = (*relation).trigdesc;
        let found = !triggers.is_null()
            && (0..(*triggers).numtriggers as usize)
                .any(|n| CStr::from_ptr((*(*triggers).triggers.add(n)).tgname) == name);
        pg_sys::RelationClose(relation);
        found
    }
}

/// The table and the function of a trigger that this statement has created.
pub fn table_and_function(trigger: Oid) -> Option<(u32, u32)> {
    // SAFETY: inside a transaction, on the main thread. The row is read while the scan holds it.
    unsafe {
        let relation = pg_sys::table_open(pg_sys::TriggerRelationId, pg_sys::AccessShareLock as i32);
        let mut key = pg_sys::ScanKeyData::default();
        let (column, equal) = (pg_sys::Anum_pg_trigger_oid as i16, pg_sys::BTEqualStrategyNumber as u16);
        pg_sys::ScanKeyInit(&mut key, column, equal, pg_sys::F_OIDEQ.into(), trigger.into());
        let (index, snapshot) = (pg_sys::TriggerOidIndexId.into(), &raw mut pg_sys::SnapshotSelfData);
        let scan = pg_sys::systable_beginscan(relation, index, true, snapshot, 1, &mut key);
        let tuple = pg_sys::systable_getnext(scan);
        let found = (!tuple.is_null()).then(|| {
            let form = &*pg_sys::GETSTRUCT(tuple).cast::<pg_sys::FormData_pg_trigger>();
            (form.tgrelid.to_u32(), form.tgfoid.to_u32())
        });
        pg_sys::systable_endscan(scan);
        pg_sys::table_close(relation, pg_sys::AccessShareLock as i32);
        found
    }
}

/// Whether the current role has the rights of this role.
pub fn may_act_as(role: u32) -> bool {
    has_rights_of(super::security::current_user(), role)
}

/// Whether the role `member` has the rights of `role`.
pub fn has_rights_of(member: u32, role: u32) -> bool {
    // SAFETY: inside a transaction.
    unsafe { pg_sys::has_privs_of_role(member.into(), role.into()) }
}

/// Whether the role may read or write files of the server, or run programs there.
pub fn may_leave_the_database(role: u32) -> bool {
    let predefined = [
        pg_sys::ROLE_PG_READ_SERVER_FILES,
        pg_sys::ROLE_PG_WRITE_SERVER_FILES,
        pg_sys::ROLE_PG_EXECUTE_SERVER_PROGRAM,
    ];
    predefined.into_iter().any(|to| has_rights_of(role, to))
}

pub fn is_superuser(role: u32) -> bool {
    // SAFETY: inside a transaction.
    unsafe { pg_sys::superuser_arg(role.into()) }
}

/// The name of a role, or its OID if it does not exist.
pub fn role_name(role: u32) -> String {
    // SAFETY: inside a transaction; the name is copied.
    unsafe {
        let name = pg_sys::GetUserNameFromId(role.into(), true);
        match name.is_null() {
            true => role.to_string(),
            false => text::of_c(name),
        }
    }
}

/// The OID of the SQL function that is being called.
pub fn called_function(fcinfo: pg_sys::FunctionCallInfo) -> u32 {
    // SAFETY: every call through SQL has flinfo.
    unsafe { (*(*fcinfo).flinfo).fn_oid.to_u32() }
}

/// The name of a function; empty if there is none.
pub fn function_name(function: u32) -> String {
    // SAFETY: inside a transaction; the result is a C string in memory of the transaction, or null.
    unsafe {
        let name = pg_sys::get_func_name(function.into());
        match name.is_null() {
            true => String::new(),
            false => text::of_c(name),
        }
    }
}

/// Whether a relation belongs to an extension.
pub fn is_member(relation: u32, extension: u32) -> bool {
    extension_of(pg_sys::RelationRelationId, relation) == extension
}

pub fn is_member_function(function: u32, extension: u32) -> bool {
    extension_of(pg_sys::ProcedureRelationId, function) == extension
}

/// Whether a function of an extension has this name.
pub fn is_function_of(extension: &CStr, name: &CStr, function: u32) -> bool {
    // SAFETY: inside a transaction; the form of that cache.
    unsafe {
        let read = |form: &pg_sys::FormData_pg_proc| CStr::from_ptr(form.proname.data.as_ptr()) == name;
        let has_name = cached(CacheId::PROCOID, function, read);
        has_name == Some(true) && is_member_function(function, self::extension(extension).oid)
    }
}

/// The extension that an object belongs to; 0 = none.
fn extension_of(class: Oid, object: u32) -> u32 {
    // SAFETY: inside a transaction.
    unsafe { pg_sys::getExtensionOfObject(class, object.into()).to_u32() }
}

/// Empty if there is none.
pub fn relation_name(relation: u32) -> String {
    // SAFETY: inside a transaction; the name is copied.
    unsafe { text::of_c(pg_sys::get_rel_name(relation.into())) }
}

/// Empty if there is none.
pub fn schema_name(schema: u32) -> String {
    // SAFETY: inside a transaction; the name is copied.
    unsafe { text::of_c(pg_sys::get_namespace_name(schema.into())) }
}

/// The owner of a table; 0 = there is no such table.
pub fn owner_of_table(table: u32) -> u32 {
    // SAFETY: the form of that cache.
    let owner = unsafe { cached(CacheId::RELOID, table, |form: &pg_sys::FormData_pg_class| form.relowner) };
    owner.map_or(0, Oid::to_u32)
}

/// The table that this one is a partition of; 0 = it is none, or is being detached.
pub fn partitioned_by(table: u32) -> u32 {
    // SAFETY: inside a transaction; a list of OIDs, the nearest first.
    unsafe {
        if !pg_sys::get_rel_relispartition(table.into()) {
            return 0;
        }
        let ancestors = PgList::<Oid>::from_pg(pg_sys::get_partition_ancestors(table.into()));
        ancestors.get_oid(0).map_or(0, Oid::to_u32)
    }
}

/// Whether a table or a partition of it has blocks for rows, which may all be deleted. Reads none of them and keeps no
/// lock.
pub fn may_have_rows(table: u32) -> bool {
    // SAFETY: inside a transaction; a list of OIDs. pg_relation_size is NULL for a table that is gone.
    unsafe {
        let all = pg_sys::find_all_inheritors(table.into(), pg_sys::NoLock as i32, std::ptr::null_mut());
        let all = PgList::<Oid>::from_pg(all);
        all.iter_oid().any(|table| {
            let arguments = [table.into_datum(), "main".into_datum()];
            direct_function_call::<i64>(pg_sys::pg_relation_size, &arguments).is_some_and(|bytes| bytes > 0)
        })
    }
}

/// A foreign server.
pub struct Server {
    pub oid: u32,
    pub owner: u32,
    /// The name of its foreign data wrapper.
    pub wrapper: String,
    pub options: Vec<(String, String)>,
}

/// The longest name that the catalogs can hold, in bytes in the encoding of the database.
pub const NAME_BYTES_MAX: usize = pg_sys::NAMEDATALEN as usize - 1;

/// The length of a name in bytes in the encoding of the database.
pub fn name_bytes(name: &str) -> usize {
    text::to_server(name).len()
}

/// The foreign server with this name. Inside a transaction.
pub fn foreign_server(name: &str) -> Option<Server> {
    let name = text::to_c_string(name);
    // SAFETY: inside a transaction; the name is copied.
    unsafe {
        let server = pg_sys::GetForeignServerByName(name.as_ptr(), true);
        if server.is_null() {
            return None;
        }
        let wrapper = pg_sys::GetForeignDataWrapper((*server).fdwid);
        let options = pgrx::PgList::<pg_sys::DefElem>::from_pg((*server).options);
        let options = options
            .iter_ptr()
            .map(|option| (text::of_c((*option).defname), text::of_c(pg_sys::defGetString(option))));
        Some(Server {
            options: options.collect(),
            oid: (*server).serverid.to_u32(),
            owner: (*server).owner.to_u32(),
            wrapper: text::of_c((*wrapper).fdwname),
        })
    }
}

/// Whether a role has USAGE on a foreign server. Inside a transaction.
pub fn may_use_server(server: u32, role: u32) -> bool {
    major::may_use_server(server.into(), role.into())
}

/// A user mapping of a foreign server.
pub struct UserMapping {
    pub is_public: bool,
    /// Each as `name=value`.
    pub options: Vec<String>,
}

/// The mapping of a role for a foreign server, or else PUBLIC's. Not read by SQL, which shows the options only to a
/// superuser and the owner of the server.
pub fn user_mapping(server: u32, role: u32) -> Option<UserMapping> {
    const USER_MAPPING_OPTIONS: i16 = 4; // umoptions, from catalog/pg_user_mapping.h
    // SAFETY: syscache lookups inside a transaction; the options are copied before the tuple is released.
    unsafe {
        let cache = CacheId::USERMAPPINGUSERSERVER as i32;
        let find = |user: pg_sys::Oid| pg_sys::SearchSysCache2(cache, user.into(), pg_sys::Oid::from(server).into());
        let mut tuple = find(role.into());
        let is_public = tuple.is_null();
        if is_public {
            tuple = find(pg_sys::InvalidOid);
        }
        if tuple.is_null() {
            return None;
        }
        let mut is_null = false;
        let options = pg_sys::SysCacheGetAttr(cache, tuple, USER_MAPPING_OPTIONS, &mut is_null);
        let options = match is_null {
            true => Vec::new(),
            false => super::array::lossy_texts(options),
        };
        pg_sys::ReleaseSysCache(tuple);
        Some(UserMapping { is_public, options })
    }
}

/// The kind of object whose options a validator of a foreign data wrapper gets.
#[derive(Clone, Copy, PartialEq)]
pub enum OptionsOf {
    Server,
    UserMapping,
    /// The wrapper itself, a foreign table or a column.
    Other,
}

pub fn options_of(catalog: Oid) -> OptionsOf {
    match catalog {
        pg_sys::ForeignServerRelationId => OptionsOf::Server,
        pg_sys::UserMappingRelationId => OptionsOf::UserMapping,
        _ => OptionsOf::Other,
    }
}
