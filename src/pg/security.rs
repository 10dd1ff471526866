//! Switches the role that the extension's code runs as. Sessions and workers call it on the main thread. Functions that
//! users call are SECURITY INVOKER, so that they can check the caller's rights. Then they switch to the owner of the
//! tables, which is not the owner of the functions.

use super::user_code;
use pgrx::pg_sys;

/// Runs user code as `role`. The code may not change roles or the state of the session.
pub fn run_restricted_as<T>(role: u32, body: impl FnOnce() -> T) -> T {
    user_code::run(|| switch(role, pg_sys::SECURITY_RESTRICTED_OPERATION, body))
}

/// Runs `body` as `role`.
pub fn run_as<T>(role: u32, body: impl FnOnce() -> T) -> T {
    switch(role, 0, body)
}

/// Runs `body` as the superuser that initdb made. `body` calls core's functions only, by their full names.
pub fn run_as_superuser<T>(body: impl FnOnce() -> T) -> T {
    switch(pg_sys::BOOTSTRAP_SUPERUSERID, 0, body)
}

/// Runs `body` as `role`, with more restrictions than now: those of [`user_and_restrictions`].
pub fn run_with<T>(role: u32, restrictions: i32, body: impl FnOnce() -> T) -> T {
    switch(role, restrictions as u32, body)
}

/// The role that code runs as now, and the restrictions of the server that are in force.
pub fn user_and_restrictions() -> (u32, i32) {
    let (mut user, mut restrictions) = (pg_sys::InvalidOid, 0);
    // SAFETY: reads statics of the server.
    unsafe { pg_sys::GetUserIdAndSecContext(&mut user, &mut restrictions) };
    (user.to_u32(), restrictions)
}

/// The OID of the role that code runs as now.
pub fn current_user() -> u32 {
    // SAFETY: reads a static of the server.
    unsafe { pg_sys::GetUserId() }.to_u32()
}

/// The OID of the role of the session, which functions that run as another role do not change.
pub fn session_user() -> u32 {
    // SAFETY: reads a static of the server.
    unsafe { pg_sys::GetSessionUserId() }.to_u32()
}

/// Runs `body` as `role`, with `more` security flags. After an error the end of the (sub)transaction restores the role,
/// as with fmgr_security_definer (fmgr.c).
fn switch<T>(role: u32, more: u32, body: impl FnOnce() -> T) -> T {
    let (mut user, mut context) = (pg_sys::InvalidOid, 0);
    // SAFETY: main thread, inside a transaction. The values restored at the end were read from the server.
    unsafe {
        pg_sys::GetUserIdAndSecContext(&mut user, &mut context);
        let added = (pg_sys::SECURITY_LOCAL_USERID_CHANGE | more) as i32;
        pg_sys::SetUserIdAndSecContext(role.into(), context | added);
        let value = body();
        pg_sys::SetUserIdAndSecContext(user, context);
        value
    }
}
