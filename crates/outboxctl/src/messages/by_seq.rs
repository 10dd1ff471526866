//! Pages of messages of any status in order of seq. A page is full if enough messages match. So with a filter that few
//! messages match, the query searches all of them.

use super::filter::Filter;
use super::page::{MessageRow, SearchRequest};
use crate::failure::Failure;
use crate::queries::Fetch;
use crate::queries::state::MessageStatus;
use clap::Args;
use outbox_core::words::Word;

/// The options of `list`: the criteria and the page.
#[derive(Args, Clone, Debug)]
pub struct BySeq {
    /// Only messages of this status; repeatable [default: all that have not ended, and dead]
    #[arg(long = "status", value_name = "STATUS")]
    statuses: Vec<MessageStatus>,
    #[command(flatten)]
    filter: Filter,
    /// Only messages after this seq, the last one of the previous page
    #[arg(long, value_name = "SEQ")]
    after: Option<i64>,
    /// At most this many messages, plus any others of the last seq [default: 50; by cause 1000]
    #[arg(long, value_parser = clap::value_parser!(i32).range(1..=100_000))]
    limit: Option<i32>,
    /// Show the causes of the failures, with the number of their messages [default: of retrying and dead messages]
    #[arg(long)]
    pub by_cause: bool,
    /// Show the highest seq first; --after then continues downwards
    #[arg(long)]
    newest_first: bool,
}

impl BySeq {
    /// Reads a page in order of seq.
    pub async fn page<S: Fetch>(&self, session: &S) -> Result<Vec<MessageRow>, Failure> {
        let after: Vec<String> = self.after.iter().map(i64::to_string).collect();
        let request = SearchRequest {
            statuses: &self.wanted(),
            filter: &self.filter,
            span_s: None,
            by_delivery: false,
            descending: self.newest_first,
            after: &after,
            page_rows: self.limit(),
            read_max: None,
        };
        Ok(request.run(session).await?.rows)
    }

    /// Whether the page is full, so that more messages may follow.
    pub fn is_full(&self, rows: &[MessageRow]) -> bool {
        rows.len() >= self.limit() as usize
    }

    fn limit(&self) -> i32 {
        self.limit.unwrap_or(if self.by_cause { 1000 } else { 50 })
    }

    /// Without --status dead letters are included, because an operator must decide about each.
    fn wanted(&self) -> Vec<MessageStatus> {
        let is_wanted = |status: &MessageStatus| match self.statuses.is_empty() {
            true if self.by_cause => matches!(status, MessageStatus::Retrying | MessageStatus::Dead),
            true => self.filter.id.is_some() || !status.has_ended(),
            false => self.statuses.contains(status),
        };
        MessageStatus::ALL.iter().copied().filter(is_wanted).collect()
    }
}
