//! Errors for users: SQLSTATE, a short message, a DETAIL with facts, a HINT with the remedy.

use crate::pg::report;
use crate::pg::spi::SpiError;
use crate::pg::text::{self, Unreadable};
use outbox_core::envelope::Refusal;
use pgrx::PgSqlErrorCode;

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
        report::raise(self.sqlstate, self.message, self.detail.as_deref(), Some(&self.hint))
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

/// The error for a transaction whose snapshot is older than a change that it must follow.
pub fn changed_since(message: &str) -> UserError {
    UserError::new(
        PgSqlErrorCode::ERRCODE_T_R_SERIALIZATION_FAILURE,
        message,
        "Run the transaction again.",
    )
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

impl From<Unreadable> for UserError {
    fn from(why: Unreadable) -> Self {
        unreadable(&why)
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

/// Raises a WARNING.
pub fn warning(message: impl AsRef<str>, hint: impl AsRef<str>) {
    report::warn(message.as_ref(), None, hint.as_ref());
}

/// Raises a WARNING with facts.
pub fn warning_with_detail(message: impl AsRef<str>, detail: impl AsRef<str>, hint: impl AsRef<str>) {
    report::warn(message.as_ref(), Some(detail.as_ref()), hint.as_ref());
}
