//! Why a command failed: the message for a person, and the exit code for a script.

use crate::format::clean;
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

/// A failure as it is shown to a person: the message, the DETAIL and the HINT.
#[derive(Debug)]
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
        json!({ "error": self.message, "detail": self.detail, "hint": self.hint, "exit_code": self.code as u8 })
            .to_string()
    }
}

/// Takes the message, DETAIL and HINT of the server unchanged; a missing HINT comes from `hint_for`.
impl From<tokio_postgres::Error> for Failure {
    fn from(error: tokio_postgres::Error) -> Self {
        let Some(db) = error.as_db_error() else {
            let lost = error.is_closed() || error.to_string().starts_with("error communicating");
            let code = if lost { Code::CannotConnect } else { Code::Refused };
            return Self::new(code, with_sources(&error));
        };
        Self {
            code: code_of(db),
            message: db.message().to_owned(),
            detail: db.detail().map(str::to_owned),
            hint: db.hint().map(str::to_owned).or_else(|| hint_for(db).map(str::to_owned)),
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

fn code_of(error: &DbError) -> Code {
    let code = error.code();
    if *code == SqlState::UNDEFINED_FUNCTION
        || *code == SqlState::UNDEFINED_TABLE
        || *code == SqlState::UNDEFINED_COLUMN
    {
        Code::Incompatible
    } else if *code == SqlState::INVALID_DATETIME_FORMAT || *code == SqlState::DATETIME_FIELD_OVERFLOW {
        Code::Usage
    } else if error.parsed_severity() == Some(Severity::Fatal) {
        Code::CannotConnect // the server ended the session
    } else {
        Code::Refused
    }
}

/// The hint for an error to which the server gives none.
fn hint_for(error: &DbError) -> Option<&'static str> {
    let code = error.code();
    if *code == SqlState::INSUFFICIENT_PRIVILEGE {
        Some(
            "GRANT outbox_monitor lets this role read the views; GRANT outbox_admin lets it also act and see payloads.",
        )
    } else if *code == SqlState::QUERY_CANCELED && error.message().contains("timeout") {
        Some(
            "A query is canceled after 30 s unless PGOPTIONS sets another statement_timeout. Narrow it, for example with --after or --partition.",
        )
    } else if *code == SqlState::LOCK_NOT_AVAILABLE {
        Some("Another session holds the lock. Try again.")
    } else if *code == SqlState::UNDEFINED_FUNCTION
        || *code == SqlState::UNDEFINED_TABLE
        || *code == SqlState::UNDEFINED_COLUMN
    {
        Some("The extension in this database is older or newer than this program. Compare them with outboxctl version.")
    } else if *code == SqlState::INVALID_DATETIME_FORMAT || *code == SqlState::DATETIME_FIELD_OVERFLOW {
        Some("Give a time such as 2026-11-21 or 2026-11-21T05:00Z, or an age such as 90s, 15m, 2h or 7d.")
    } else {
        None
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", clean(&self.message))?;
        if let Some(detail) = &self.detail {
            write!(f, "\nDETAIL: {}", clean(detail))?;
        }
        if let Some(hint) = &self.hint {
            write!(f, "\nHINT: {}", clean(hint))?;
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
