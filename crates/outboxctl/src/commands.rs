//! The commands that do one thing and exit. Each opens a session, runs statements, and prints the result as text or as
//! JSON.

pub mod act;
pub mod check;
pub mod delivery;
pub mod list;
pub mod show;
pub mod status;
pub mod version;

use crate::connect::{self, ConnectArgs, Session};
use crate::failure::{Code, Failure};
use crate::format;
use crate::output;
use crate::queries::{self, Fetch, Parameters, as_json};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::future::Future;
use std::process::ExitCode;

/// The options that all commands share.
pub struct CommandContext {
    pub connect: ConnectArgs,
    pub json: bool,
}

impl CommandContext {
    /// A session for queries. A statement ends after 30 s: a longer one is a mistake, or needs a narrower filter.
    pub async fn reader(&self) -> Result<Session, Failure> {
        self.open(&[("statement_timeout", "30s"), ("lock_timeout", "10s")])
            .await
    }

    /// A session for changes. A statement has no time limit, but waits at most 10 s for a lock.
    pub async fn actor(&self) -> Result<Session, Failure> {
        self.open(&[("lock_timeout", "10s")]).await
    }

    /// A session with the limits that neither PGOPTIONS nor the role sets. With JSON all times are in UTC.
    async fn open(&self, limits: &[(&str, &str)]) -> Result<Session, Failure> {
        let session = connect::connect_session(&self.connect).await?;
        for (name, limit) in limits {
            let sql = "select set_config($1, $2, false) where current_setting($1) = '0'";
            session.client.execute(sql, &[name, limit]).await?;
        }
        if self.json {
            session.client.batch_execute("set timezone = 'UTC'").await?;
        }
        Ok(session)
    }

    /// Prints one JSON document.
    pub fn print_json(&self, document: &impl Serialize) -> Result<(), Failure> {
        output::print(&(format::json(document) + "\n"))
    }
}

impl Session {
    /// The statement with the extension's objects qualified by its schema.
    pub fn qualified(&self, sql: &str) -> String {
        let schema = self.extension.as_ref().map(|extension| &*extension.schema);
        queries::qualified(sql, schema.unwrap_or_default())
    }

    /// Waits for a statement. The first Ctrl-C cancels the statement in the server; the second one ends the program.
    pub async fn until_done<F: Future>(&self, statement: F) -> F::Output {
        tokio::pin!(statement);
        tokio::select! {
            done = &mut statement => return done,
            _ = tokio::signal::ctrl_c() => {}
        }
        self.stop().now().await;
        tokio::select! {
            done = &mut statement => done,
            _ = tokio::signal::ctrl_c() => std::process::exit(130),
        }
    }

    /// Runs a statement and returns its rows, read by the names of their columns.
    pub async fn query<T: DeserializeOwned>(&self, sql: &str, parameters: &Parameters<'_>) -> Result<Vec<T>, Failure> {
        let sql = self.qualified(&as_json(sql));
        // Without parameters it need not be prepared, which would take a round trip.
        let rows = match parameters {
            [] => self.client.query_typed(&sql, &[]).await?,
            parameters => self.client.query(&sql, parameters).await?,
        };
        rows.iter()
            .map(|row| Ok(serde_json::from_value(row.try_get(0)?)?))
            .collect()
    }

    /// Whether the role of this session may read events, and so payloads.
    pub async fn reads_events(&self) -> Result<bool, Failure> {
        let sql = self.qualified("select has_table_privilege('@extschema@.outbox_events', 'select')");
        Ok(self.client.query_one(&sql, &[]).await?.get(0))
    }

    /// Runs a statement that Ctrl-C cancels, and returns each row as a JSON object, its columns in their order.
    pub async fn rows(&self, sql: &str, parameters: &Parameters<'_>) -> Result<Vec<Value>, Failure> {
        self.fetch(sql, parameters).await
    }
}

impl Fetch for Session {
    async fn fetch<T: DeserializeOwned + Send>(
        &self,
        sql: &str,
        parameters: &Parameters<'_>,
    ) -> Result<Vec<T>, Failure> {
        self.until_done(self.query(sql, parameters)).await
    }
}

/// The text in a column of a row; empty if it is NULL.
pub fn text<'a>(row: &'a Value, name: &str) -> &'a str {
    row[name].as_str().unwrap_or_default()
}

/// The exit code of a command that found something wrong, or did not.
pub fn exit_code(is_well: bool) -> ExitCode {
    match is_well {
        true => ExitCode::SUCCESS,
        false => ExitCode::from(Code::SomeFailed as u8),
    }
}
