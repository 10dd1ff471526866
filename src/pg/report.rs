//! Raises errors of the extension and sends messages. All processes call it on the main thread.

use super::text;
use pgrx::pg_sys::panic::ErrorReport;
use pgrx::{PgLogLevel, PgSqlErrorCode, function_name};

pub fn raise(code: PgSqlErrorCode, message: impl Into<String>, detail: Option<&str>, hint: Option<&str>) -> ! {
    report(PgLogLevel::ERROR, code, &message.into(), detail, hint);
    unreachable!("ERROR does not return")
}

pub fn notice(message: &str, detail: &str, hint: &str) {
    report(
        PgLogLevel::NOTICE,
        PgSqlErrorCode::ERRCODE_SUCCESSFUL_COMPLETION,
        message,
        Some(detail),
        Some(hint),
    );
}

/// Core sends no lower level to the client while the script of an extension runs.
pub fn warn(message: &str, detail: Option<&str>, hint: &str) {
    report(
        PgLogLevel::WARNING,
        PgSqlErrorCode::ERRCODE_WARNING,
        message,
        detail,
        Some(hint),
    );
}

fn report(level: PgLogLevel, code: PgSqlErrorCode, message: &str, detail: Option<&str>, hint: Option<&str>) {
    let words = |text: &str| text::for_errors(text).into_owned();
    let mut report = ErrorReport::new(code, words(message), function_name!());
    if let Some(detail) = detail {
        report = report.set_detail(words(detail));
    }
    if let Some(hint) = hint {
        report = report.set_hint(words(hint));
    }
    report.report(level);
}
