//! Why a call of a worker outside the server failed, and whether its session goes on.

use crate::failure::{Code, Failure};
use tokio_postgres::error::SqlState;

/// Why a call failed.
#[derive(Debug)]
pub struct WorkError {
    pub kind: WorkErrorKind,
    pub failure: Failure,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkErrorKind {
    /// Another session holds locks on rows.
    Locked,
    /// Not now: a statement needs the database without workers, or the server has only just started.
    NotNow,
    /// The server refused the call; the session continues.
    Failed,
    /// The session is lost.
    Lost,
}

impl From<tokio_postgres::Error> for WorkError {
    fn from(error: tokio_postgres::Error) -> Self {
        let kind = match error.code() {
            _ if error.is_closed() => WorkErrorKind::Lost,
            None => WorkErrorKind::Lost,
            Some(code) if *code == SqlState::LOCK_NOT_AVAILABLE => WorkErrorKind::Locked,
            Some(code) if *code == SqlState::OBJECT_IN_USE => WorkErrorKind::NotNow,
            Some(code) if code.code().starts_with("57P") => WorkErrorKind::Lost, // the server or this session ends
            Some(_) => WorkErrorKind::Failed,
        };
        let denied = (error.as_db_error())
            .is_some_and(|db| *db.code() == SqlState::INSUFFICIENT_PRIVILEGE && db.hint().is_none());
        let mut failure = Failure::from(error);
        if denied {
            failure.hint = Some("A worker needs the role outbox_relay: GRANT outbox_relay TO …;".to_owned());
        }
        if kind == WorkErrorKind::Lost {
            failure.code = Code::CannotConnect;
        }
        Self { kind, failure }
    }
}

pub fn no_answer() -> WorkError {
    WorkError {
        kind: WorkErrorKind::Lost,
        failure: Failure::new(Code::CannotConnect, "the server does not answer"),
    }
}

pub fn unexpected(what: &str) -> WorkError {
    WorkError {
        kind: WorkErrorKind::Failed,
        failure: Failure::new(Code::Incompatible, format!("unexpected result from the server: {what}"))
            .hint("This program and the extension may have different versions. Compare them with outboxctl version."),
    }
}
