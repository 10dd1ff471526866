//! Why a command ended without doing what it was asked: the sentence for a person, and the exit code for a script.

use std::fmt;

/// Exit codes. 0 is done; clap itself ends with 2 for arguments that it does not understand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Code {
    /// Some of the messages failed.
    SomeFailed = 1,
    /// Arguments that cannot be meant.
    Usage = 2,
    /// No session with the database.
    CannotConnect = 3,
    /// No extension there, or one of a version that this program does not know.
    Incompatible = 4,
    /// The database, or this program, refused.
    Refused = 5,
}

/// A failure as a person meets it: what, why, and what to do.
#[derive(Debug)]
pub struct Failure {
    pub code: Code,
    pub message: String,
    pub detail: Option<String>,
    pub hint: Option<String>,
}

impl Failure {
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Self {
            code,
            message: message.into(),
            detail: None,
            hint: None,
        }
    }

    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }
}

/// The server's own words: message, DETAIL and HINT.
impl From<tokio_postgres::Error> for Failure {
    fn from(error: tokio_postgres::Error) -> Self {
        let Some(db) = error.as_db_error() else {
            let code = if error.is_closed() {
                Code::CannotConnect
            } else {
                Code::Refused
            };
            return Self::new(code, with_sources(&error));
        };
        Self {
            code: Code::Refused,
            message: db.message().to_owned(),
            detail: db.detail().map(str::to_owned),
            hint: db.hint().map(str::to_owned),
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.message)?;
        if let Some(detail) = &self.detail {
            write!(f, "\nDETAIL: {detail}")?;
        }
        if let Some(hint) = &self.hint {
            write!(f, "\nHINT: {hint}")?;
        }
        Ok(())
    }
}

impl std::error::Error for Failure {}

fn with_sources(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(next) = source {
        text.push_str(": ");
        text.push_str(&next.to_string());
        source = next.source();
    }
    text
}
