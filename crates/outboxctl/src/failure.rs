//! Why a command failed: the message for the user, and the exit code for a script.

use crate::format::{self, harmless};
use serde_json::json;
use std::fmt;
use tokio_postgres::error::{DbError, Severity, SqlState};

/// The exit codes of a failure. 0 means success; an error of clap also exits with 2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Code {
    /// Some of the messages failed, or a check did.
    SomeFailed = 1,
    /// The arguments are invalid.
    Usage = 2,
    /// There is no session with the database, or it was lost.
    CannotConnect = 3,
    /// The extension is missing, or its version is incompatible with this program.
    Incompatible = 4,
    /// The database or this program refused, or the user did not confirm.
    Refused = 5,
}

/// A failure as it is shown: the message, the DETAIL and the HINT.
#[derive(Clone, Debug)]
pub struct Failure {
    pub code: Code,
    pub message: String,
    pub detail: Option<String>,
    pub hint: Option<String>,
    /// The SQLSTATE, if the database refused.
    pub sqlstate: Option<SqlState>,
}

impl Failure {
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Self {
            code,
            message: message.into(),
            detail: None,
            hint: None,
            sqlstate: None,
        }
    }

    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    pub fn sqlstate(mut self, state: SqlState) -> Self {
        self.sqlstate = Some(state);
        self
    }

    pub fn is(&self, state: &SqlState) -> bool {
        self.sqlstate.as_ref() == Some(state)
    }

    /// The failure as one JSON object, for a program that reads standard error.
    pub fn json(&self) -> String {
        format::json(
            &json!({ "error": self.message, "detail": self.detail, "hint": self.hint, "exit_code": self.code as u8 }),
        )
    }
}

/// Takes the message, DETAIL and HINT of the server unchanged; a missing HINT comes from `meaning`.
impl From<tokio_postgres::Error> for Failure {
    fn from(error: tokio_postgres::Error) -> Self {
        let Some(db) = error.as_db_error() else {
            let lost = error.is_closed() || error.to_string().starts_with("error communicating");
            let code = if lost { Code::CannotConnect } else { Code::Refused };
            return Self::new(code, with_sources(&error));
        };
        let (code, hint) = meaning(db);
        Self {
            code,
            message: db.message().to_owned(),
            detail: db.detail().map(str::to_owned),
            hint: db.hint().or(hint).map(str::to_owned),
            sqlstate: Some(db.code().clone()),
        }
    }
}

impl From<serde_json::Error> for Failure {
    fn from(error: serde_json::Error) -> Self {
        let message = format!("the database answered in a form that this program does not know: {error}");
        Self::new(Code::Incompatible, message).hint("Use the outboxctl of the extension's version.")
    }
}

/// The exit code for an error of the server, and the hint if the server gives none.
fn meaning(error: &DbError) -> (Code, Option<&'static str>) {
    let is = |states: &[SqlState]| states.contains(error.code());
    if is(&[
        SqlState::UNDEFINED_FUNCTION,
        SqlState::UNDEFINED_TABLE,
        SqlState::UNDEFINED_COLUMN,
    ]) {
        let hint =
            "The extension in this database is older or newer than this program. Compare them with outboxctl version.";
        (Code::Incompatible, Some(hint))
    } else if is(&[SqlState::INVALID_DATETIME_FORMAT, SqlState::DATETIME_FIELD_OVERFLOW]) {
        let hint = "Give a time such as 2026-11-21 or 2026-11-21T05:00Z, or an age such as 90s, 15m, 2h or 7d.";
        (Code::Usage, Some(hint))
    } else if error.parsed_severity() == Some(Severity::Fatal) {
        (Code::CannotConnect, None) // the server ended the session
    } else if is(&[SqlState::INSUFFICIENT_PRIVILEGE]) {
        let hint =
            "GRANT outbox_monitor lets this role read the views; GRANT outbox_admin lets it also act and see payloads.";
        (Code::Refused, Some(hint))
    } else if is(&[SqlState::QUERY_CANCELED]) && error.message().contains("timeout") {
        let hint = "A query is canceled after 30 s unless PGOPTIONS sets another statement_timeout. Narrow it, for example with --after or --partition.";
        (Code::Refused, Some(hint))
    } else if is(&[SqlState::LOCK_NOT_AVAILABLE]) {
        (Code::Refused, Some("Another session holds the lock. Try again."))
    } else {
        (Code::Refused, None)
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", harmless(&self.message))?;
        if let Some(detail) = &self.detail {
            write!(f, "\nDETAIL: {}", harmless(detail))?;
        }
        if let Some(hint) = &self.hint {
            write!(f, "\nHINT: {}", harmless(hint))?;
        }
        Ok(())
    }
}

impl std::error::Error for Failure {}

/// The text of an error, followed by the texts of all its sources.
pub fn with_sources(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(next) = source {
        text.push_str(": ");
        text.push_str(&next.to_string());
        source = next.source();
    }
    text
}
