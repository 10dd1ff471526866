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
    /// Not now: for example a statement needs the database without workers, the server has only just started, or an
    /// operator canceled the statement.
    NotNow,
    /// The server refused the call; the session continues.
    Failed,
    /// The worker cannot deliver until rights, a version or the configuration change.
    Final,
    /// The session is lost, or there is none.
    Lost,
}

impl WorkErrorKind {
    /// What an error means for the worker. A session that the server does not open counts as lost, whatever the reason:
    /// each attempt looks up hosts and reads passwords again.
    pub fn of(code: Code, state: Option<&SqlState>) -> Self {
        let state = state.map_or("", SqlState::code);
        match (code, state, state.get(..2).unwrap_or_default()) {
            (Code::Usage | Code::Incompatible, ..) => Self::Final,
            (Code::CannotConnect, ..) => Self::Lost,
            _ if state.starts_with("57P") => Self::Lost, // the server or this session ends
            (_, "55P03", _) => Self::Locked,
            // In use, canceled or read-only; a transaction rolled back; resources or limits exhausted.
            (_, "55006" | "57014" | "25006", _) | (.., "40" | "53") => Self::NotNow,
            // Rights, objects that this version does not know, features that the server lacks, its configuration.
            (.., "28" | "42" | "3F" | "0A" | "F0") => Self::Final,
            _ => Self::Failed,
        }
    }
}

impl From<Failure> for WorkError {
    fn from(failure: Failure) -> Self {
        Self {
            kind: WorkErrorKind::of(failure.code, failure.sqlstate.as_ref()),
            failure,
        }
    }
}

impl From<tokio_postgres::Error> for WorkError {
    fn from(error: tokio_postgres::Error) -> Self {
        let is_lost = error.as_db_error().is_none();
        let denied = (error.as_db_error())
            .is_some_and(|db| *db.code() == SqlState::INSUFFICIENT_PRIVILEGE && db.hint().is_none());
        let mut failure = Failure::from(error);
        let kind = match is_lost {
            true => WorkErrorKind::Lost,
            false => WorkErrorKind::of(failure.code, failure.sqlstate.as_ref()),
        };
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
    Failure::new(Code::Incompatible, format!("unexpected result from the server: {what}"))
        .hint("This program and the extension may have different versions. Compare them with outboxctl version.")
        .into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use WorkErrorKind::{Failed, Final, Locked, Lost, NotNow};

    #[test]
    fn only_rights_versions_and_configuration_are_final() {
        for (code, state, kind) in [
            (Code::Usage, None, Final),
            (Code::Incompatible, None, Final),
            (Code::Incompatible, Some(SqlState::UNDEFINED_FUNCTION), Final),
            (Code::CannotConnect, None, Lost),
            (Code::CannotConnect, Some(SqlState::CANNOT_CONNECT_NOW), Lost),
            (Code::CannotConnect, Some(SqlState::TOO_MANY_CONNECTIONS), Lost),
            (Code::CannotConnect, Some(SqlState::INVALID_PASSWORD), Lost),
            (Code::Refused, Some(SqlState::ADMIN_SHUTDOWN), Lost),
            (Code::Refused, Some(SqlState::LOCK_NOT_AVAILABLE), Locked),
            (Code::Refused, Some(SqlState::OBJECT_IN_USE), NotNow),
            (Code::Refused, Some(SqlState::QUERY_CANCELED), NotNow),
            (Code::Refused, Some(SqlState::READ_ONLY_SQL_TRANSACTION), NotNow),
            (Code::Refused, Some(SqlState::T_R_DEADLOCK_DETECTED), NotNow),
            (Code::Refused, Some(SqlState::CONFIGURATION_LIMIT_EXCEEDED), NotNow),
            (Code::Refused, Some(SqlState::OUT_OF_MEMORY), NotNow),
            (Code::Refused, Some(SqlState::INSUFFICIENT_PRIVILEGE), Final),
            (
                Code::Refused,
                Some(SqlState::INVALID_AUTHORIZATION_SPECIFICATION),
                Final,
            ),
            (Code::Refused, Some(SqlState::UNDEFINED_OBJECT), Final),
            (Code::Refused, Some(SqlState::FEATURE_NOT_SUPPORTED), Final),
            (Code::Refused, Some(SqlState::CONFIG_FILE_ERROR), Final),
            (Code::Refused, Some(SqlState::OBJECT_NOT_IN_PREREQUISITE_STATE), Failed),
            (Code::Refused, Some(SqlState::INTERNAL_ERROR), Failed),
            (Code::Refused, None, Failed),
        ] {
            assert_eq!(WorkErrorKind::of(code, state.as_ref()), kind, "{code:?} {state:?}");
        }
    }
}
