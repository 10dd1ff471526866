//! Settings of the server: checks that refuse a bad value with our message and hint, and settings changed for one call.
//! Sessions and workers call it on the main thread.

use super::{major, text};
use outbox_core::session_settings::{self, SessionSetting};
use pgrx::{GucContext, GucFlags, GucRegistry, GucSetting, pg_sys};
use std::ffi::{CStr, c_char, c_void};

/// The message and hint for a refused value.
pub struct RefusedSetting {
    pub message: String,
    pub hint: String,
}

/// The C form of `check`, for `define_string_guc_with_hooks`. Core shows a refused value in its message unless the hook
/// sets another message, so every refusal sets one.
macro_rules! check_hook {
    ($name:ident, $check:expr) => {
        #[pgrx::pg_guard]
        pub(super) unsafe extern "C-unwind" fn $name(
            value: *mut *mut std::ffi::c_char,
            _extra: *mut *mut std::ffi::c_void,
            _source: pgrx::pg_sys::GucSource::Type,
        ) -> bool {
            // SAFETY: core passes a pointer to a C string, or to null.
            unsafe { $crate::pg::guc::check(value, $check) }
        }
    };
}
pub(crate) use check_hook;

pub type CheckHook = pg_sys::GucStringCheckHook;

/// The value of a setting as SHOW has it, but numbers without a unit; empty if there is no such setting.
pub fn value(name: &str) -> String {
    let name = text::to_c_string(name);
    // SAFETY: a C string; the result is one too, and copied before anything else runs.
    unsafe {
        let value = pg_sys::GetConfigOption(name.as_ptr(), true, false);
        match value.is_null() {
            true => String::new(),
            false => text::of_c(value),
        }
    }
}

/// # Safety
/// `value` is what core passes to a string check hook.
pub unsafe fn check(value: *mut *mut c_char, check: fn(&str) -> Result<(), RefusedSetting>) -> bool {
    // SAFETY: as promised by the caller.
    let text = unsafe {
        if value.is_null() || (*value).is_null() {
            return true;
        }
        let text = text::of_c(*value);
        text::check_memory(text.len() * 32); // for the check: JSON in parts takes many times its text
        text
    };
    match check(&text) {
        Ok(()) => true,
        Err(refused) => {
            // SAFETY: called in a check hook.
            unsafe { explain(&refused.message, &refused.hint) };
            false
        }
    }
}

/// # Safety
/// Called in a check hook.
unsafe fn explain(message: &str, hint: &str) {
    // SAFETY: the strings are copied into the context core reads them from.
    unsafe {
        pg_sys::GUC_check_errmsg_string = in_error_context(message);
        pg_sys::GUC_check_errhint_string = in_error_context(hint);
    }
}

/// Defines a flag that a session, a client or a role may switch on, but not a file or a database. GUC_DISALLOW_IN_FILE
/// would not do: it blocks ALTER SYSTEM, but not postgresql.conf.
pub fn define_session_flag(
    name: &'static CStr,
    about: &'static CStr,
    setting: &'static GucSetting<bool>,
    context: GucContext,
) {
    // SAFETY: the hook is guarded and reads only its arguments.
    unsafe {
        GucRegistry::define_bool_guc_with_hooks(
            name,
            about,
            c"",
            setting,
            context,
            GucFlags::empty(),
            Some(of_a_session),
            None,
            None,
        );
    }
}

#[pgrx::pg_guard]
unsafe extern "C-unwind" fn of_a_session(
    value: *mut bool,
    _extra: *mut *mut c_void,
    source: pg_sys::GucSource::Type,
) -> bool {
    // SAFETY: core passes the value.
    let on = unsafe { *value };
    let for_all = source > pg_sys::GucSource::PGC_S_DEFAULT && source < pg_sys::GucSource::PGC_S_USER;
    if on && for_all {
        // SAFETY: called in a check hook.
        unsafe {
            explain(
                "this setting is for a session, not for a server or a database",
                "Use SET LOCAL in the transaction that needs it, or ALTER ROLE … SET for a role that does only that.",
            );
        }
        return false;
    }
    true
}

unsafe fn in_error_context(text: &str) -> *mut c_char {
    let text = text::to_c_string(text);
    // SAFETY: ErrorContext always exists.
    unsafe { pg_sys::MemoryContextStrdup(pg_sys::ErrorContext, text.as_ptr()) }
}

/// From now on the server refuses settings `PREFIX.x` that the extension has not defined.
pub fn reserve_prefix(prefix: &CStr) {
    // SAFETY: the string is copied.
    unsafe { pg_sys::MarkGUCPrefixReserved(prefix.as_ptr()) }
}

/// Runs a prepared statement with one generic plan, made at its first run. Otherwise the server would make a plan for
/// each call, because one for a short array looks cheaper. The plan uses a sequential scan only if it must. JIT is off:
/// a scan that was "switched off" has an estimated cost of 10^10, so JIT would compile each execution for a tenth of a
/// second.
pub fn planned_once<T>(body: impl FnOnce() -> T) -> T {
    let settings = [
        (c"enable_seqscan", c"off"),
        (c"plan_cache_mode", c"force_generic_plan"),
        (c"jit", c"off"),
    ];
    with(&settings, body)
}

/// Whether [`session_settings::NAMES`] are set: to set them takes a few µs, which would be a tenth of a publish by statements.
pub fn names_are_set() -> bool {
    // SAFETY: variables of the server; the text ends with NUL.
    unsafe {
        let search_path = CStr::from_ptr(pg_sys::namespace_search_path);
        search_path == session_settings::NAMES[0].1
            && major::has_standard_strings()
            && pg_sys::Array_nulls
            && !pg_sys::Transform_null_equals
            && !pg_sys::quote_all_identifiers
    }
}

/// Runs `body` with these settings. Settings that `body` changes are restored too, because it may run user code.
pub fn with<T>(settings: &[SessionSetting], body: impl FnOnce() -> T) -> T {
    // SAFETY: what core does around functions of indexes (index_build in index.c). After an error the end of the
    // (sub)transaction restores the settings.
    unsafe {
        let level = pg_sys::NewGUCNestLevel();
        for (name, value) in settings {
            // To set one takes ten times as long as to read it.
            let current = pg_sys::GetConfigOption(name.as_ptr(), true, false);
            if !current.is_null() && CStr::from_ptr(current) != *value {
                set(name, value, pg_sys::GucAction::GUC_ACTION_SAVE);
            }
        }
        let value = body();
        pg_sys::AtEOXact_GUC(false, level);
        value
    }
}

/// Sets a parameter for the rest of this transaction.
pub fn set_locally(name: &CStr, value: &CStr) {
    // SAFETY: inside a transaction, whose end restores the setting.
    unsafe { set(name, value, pg_sys::GucAction::GUC_ACTION_LOCAL) }
}

unsafe fn set(name: &CStr, value: &CStr, action: pg_sys::GucAction::Type) {
    let (context, source) = (pg_sys::GucContext::PGC_USERSET, pg_sys::GucSource::PGC_S_SESSION);
    // SAFETY: plain strings, which are copied; the caller says when the setting is restored.
    unsafe { pg_sys::set_config_option(name.as_ptr(), value.as_ptr(), context, source, action, true, 0, false) };
}

/// Sets a parameter for the rest of this process, if this version of the server has it.
pub fn set_for_session((name, value): SessionSetting) {
    // SAFETY: plain strings, which are copied. The values are constants of the extension.
    unsafe {
        if pg_sys::GetConfigOption(name.as_ptr(), true, false).is_null() {
            return;
        }
        pg_sys::SetConfigOption(
            name.as_ptr(),
            value.as_ptr(),
            pg_sys::GucContext::PGC_SUSET,
            pg_sys::GucSource::PGC_S_OVERRIDE,
        );
    }
}
