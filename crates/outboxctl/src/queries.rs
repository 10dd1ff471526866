//! What is asked of the database, and what it answers as plain data: by the commands, by `top` and by `serve` alike.
//! `figures` are the views for dashboards, `message` is one message wherever it is, `why` says what keeps it, `state` has the words
//! for how things are. Whatever the backlog, each statement reads a bounded number of rows.

pub mod message;
pub mod model;
mod qualified;
pub mod state;
pub mod views;
pub mod why;

pub use qualified::qualified;

use serde::de::DeserializeOwned;
use std::future::Future;
use tokio_postgres::types::ToSql;

pub type Parameters<'a> = [&'a (dyn ToSql + Sync)];

/// For sessions that ask for the first of many: along an index, row by row. Without statistics, as after a bulk load, the
/// planner would read and sort a whole lane for its first rows.
pub const IN_ORDER: &str = "set enable_sort = off";

/// A session as the queries need it. Each has a way of its own: statements prepared once, or cancelled by Ctrl-C, or left
/// alone for a while where the right to them is missing.
pub trait Fetch {
    type Error;

    /// The rows of a statement that is asked again and again, by the names of their columns.
    fn fetch<T: DeserializeOwned + Send>(
        &self,
        sql: &'static str,
        parameters: &Parameters<'_>,
    ) -> impl Future<Output = Result<Vec<T>, Self::Error>> + Send;
}

/// Each row as one JSON value, so that fields are found by name, and are in their order.
pub fn as_json(sql: &str) -> String {
    format!("select row_to_json(q) from ({sql}) q")
}
