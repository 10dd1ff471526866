//! The queries to the database and their results as plain data, for the commands, `top` and `serve`. `views` reads the
//! views for dashboards, `message` one message in any table, `why` what keeps a message waiting, and `state` names the
//! states. Each statement reads a bounded number of rows, whatever the backlog.

pub mod detail;
pub mod message;
pub mod model;
mod qualified;
pub mod snapshot;
pub mod state;
pub mod views;
pub mod why;

pub use qualified::qualified;

use crate::failure::Failure;
use serde::de::DeserializeOwned;
use std::future::Future;
use tokio_postgres::types::ToSql;

pub type Parameters<'a> = [&'a (dyn ToSql + Sync)];

/// A setting for sessions that read the first of many rows along an index. Without it and without statistics, as after
/// a bulk load, the planner would read and sort a whole lane for its first rows.
pub const IN_ORDER: &str = "set enable_sort = off";

/// A session that runs the queries of this module. Each implementation decides how: it prepares statements once,
/// cancels them on Ctrl-C, or skips a statement for a while if the role lacks the privilege.
pub trait Fetch: Sync {
    /// Runs a statement, and returns its rows, read by the names of their columns.
    fn fetch<T: DeserializeOwned + Send>(
        &self,
        sql: &str,
        parameters: &Parameters<'_>,
    ) -> impl Future<Output = Result<Vec<T>, Failure>> + Send;
}

/// Wraps a query so that it returns each row as one JSON object. The keys keep the order of the columns.
pub fn as_json(sql: &str) -> String {
    format!("select row_to_json(q) from ({sql}) q")
}
