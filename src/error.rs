//! Errors for users: SQLSTATE, a short message, a DETAIL with facts, a HINT with the remedy.

use crate::pg::spi::SpiError;
use crate::pg::text::{self, Unreadable};
use outbox_core::envelope::Refusal;
use pgrx::pg_sys::panic::ErrorReport;
use pgrx::{PgLogLevel, PgSqlErrorCode, function_name};

pub struct UserError {
    pub sqlstate: PgSqlErrorCode,
    pub message: String,
    pub detail: Option<String>,
    pub hint: String,
}

impl UserError {
    pub fn new(sqlstate: PgSqlErrorCode, message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self {
            sqlstate,
            message: message.into(),
            detail: None,
            hint: hint.into(),
        }
    }

    pub fn raise(self) -> ! {
        let words = |text: String| text::for_errors(&text).into_owned();
        let mut report =
            ErrorReport::new(self.sqlstate, words(self.message), function_name!()).set_hint(words(self.hint));
        if let Some(detail) = self.detail {
            report = report.set_detail(words(detail));
        }
        report.report(PgLogLevel::ERROR);
        unreachable!("ERROR does not return")
    }
}

impl From<Refusal> for UserError {
    fn from(refusal: Refusal) -> Self {
        Self::new(
            PgSqlErrorCode::ERRCODE_PROGRAM_LIMIT_EXCEEDED,
            refusal.message,
            refusal.hint,
        )
    }
}

/// The error for a bad value of an argument.
pub fn invalid(message: impl Into<String>, hint: impl Into<String>) -> UserError {
    UserError::new(PgSqlErrorCode::ERRCODE_INVALID_PARAMETER_VALUE, message, hint)
}

/// The error for a failed statement of the extension.
pub fn internal(error: SpiError) -> UserError {
    match error {
        SpiError::Unreadable { why, .. } => unreadable(&why),
        error => unexpected(format!("outbox could not run its own statement: {error}")),
    }
}

fn unreadable(why: &Unreadable) -> UserError {
    match why {
        Unreadable::TooLong(bytes) => UserError {
            detail: Some(text::WHY_MAX_BYTES.to_owned()),
            ..UserError::new(
                why.sqlstate(),
                format!(
                    "the event has {bytes} bytes, which exceeds the limit of {} MiB",
                    text::MAX_BYTES >> 20
                ),
                why.hint(),
            )
        },
        Unreadable::Encoding => UserError::new(why.sqlstate(), format!("a text cannot be sent: {why}"), why.hint()),
    }
}

impl Unreadable {
    pub fn raise(&self) -> ! {
        unreadable(self).raise()
    }
}

pub fn unexpected(what: impl ToString) -> UserError {
    UserError::new(
        PgSqlErrorCode::ERRCODE_INTERNAL_ERROR,
        what.to_string(),
        "This is a defect of outbox; please report it.",
    )
}

/// The error for an event with this number of bytes.
pub fn too_large(bytes: usize) -> UserError {
    unreadable(&Unreadable::TooLong(bytes))
}

/// Raises a WARNING. Core sends no lower level to the client while the script of an extension runs.
pub fn warning(message: impl Into<String>, hint: impl Into<String>) {
    let words = |text: String| text::for_errors(&text).into_owned();
    ErrorReport::new(PgSqlErrorCode::ERRCODE_WARNING, words(message.into()), function_name!())
        .set_hint(words(hint.into()))
        .report(PgLogLevel::WARNING);
}
