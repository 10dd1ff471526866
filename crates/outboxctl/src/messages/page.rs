//! A page of messages, found by `outbox_internal.search()`. Each row has a cursor; the next page begins after the cursor
//! of the last row.

use super::filter::Filter;
use super::sql::quoted;
use crate::failure::Failure;
use crate::queries::Fetch;
use crate::queries::state::MessageStatus;
use outbox_core::words::Word;
use serde::Deserialize;
use serde_json::{Map, Value};
use std::sync::LazyLock;

/// A message of a page.
#[derive(Clone, Debug, Deserialize)]
pub struct MessageRow {
    pub blocks: Option<bool>,
    /// The values of the order columns of this row: the next page begins after them.
    pub cursor: Vec<String>,
    /// What ended the search before its last message. The row is then no message, and the search continues at its
    /// cursor.
    bound: Option<SearchBound>,
    /// The other columns, named as in outbox_messages.
    #[serde(flatten)]
    pub message: Map<String, Value>,
}

impl MessageRow {
    pub fn number(&self, name: &str) -> i64 {
        self.message[name].as_i64().unwrap_or_default()
    }

    pub fn text(&self, name: &str) -> Option<&str> {
        self.message[name].as_str()
    }
}

#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum SearchBound {
    /// It has read as many rows as it may.
    Rows,
    /// It has read its window of time.
    Time,
}

/// The arguments of a search.
pub struct SearchRequest<'a> {
    pub statuses: &'a [MessageStatus],
    pub filter: &'a Filter,
    /// Only the messages that ended within so many seconds before the cursor.
    pub span_s: Option<i64>,
    /// In order of delivery, not of seq.
    pub by_delivery: bool,
    pub descending: bool,
    pub after: &'a [String],
    pub page_rows: i32,
    /// The most rows to read; of `outbox` of each lane. Each table has its own end then.
    pub read_max: Option<i32>,
}

#[derive(Default)]
pub struct FoundRows {
    pub rows: Vec<MessageRow>,
    /// What ended the search, and the cursor there.
    pub end: Option<(SearchBound, Vec<String>)>,
}

const SEARCH: &str = "
    select * from outbox_internal.search($1::text[], $2::jsonb, $3::boolean, $4::boolean, $5::text[], $6::integer, $7::integer)";

/// Rows of several tables, each in order of seq, in one order. The messages of one seq stay together, so that the next
/// page can begin after that seq.
static IN_ORDER_OF_SEQ: LazyLock<String> = LazyLock::new(|| {
    format!(
        "select m.* from ({SEARCH} order by case when $4 then -seq else seq end fetch first ($6::integer) rows with ties) m
         order by case when $4 then -m.seq else m.seq end, m.destination"
    )
});

impl SearchRequest<'_> {
    pub async fn run<S: Fetch>(&self, session: &S) -> Result<FoundRows, Failure> {
        let sql = if self.by_delivery || self.read_max.is_some() {
            SEARCH
        } else {
            &IN_ORDER_OF_SEQ
        };
        let mut rows: Vec<MessageRow> = session
            .fetch(
                sql,
                &[
                    &self.names(),
                    &self.criteria(),
                    &self.by_delivery,
                    &self.descending,
                    &self.after,
                    &self.page_rows,
                    &self.read_max,
                ],
            )
            .await?;
        let end = rows.extract_if(.., |row| row.bound.is_some()).last();
        let end = end.and_then(|row| Some((row.bound?, row.cursor)));
        Ok(FoundRows { rows, end })
    }

    /// The search as a statement for psql.
    pub fn to_show(&self) -> String {
        let Self {
            by_delivery,
            descending,
            page_rows,
            ..
        } = self;
        let (names, criteria) = (self.names().join(","), quoted(&self.criteria().to_string()));
        let after: Vec<String> = self.after.iter().map(|value| quoted(value)).collect();
        let after = match after.is_empty() {
            true => String::new(),
            false => format!(", after => array[{}]", after.join(", ")),
        };
        let read_max = self
            .read_max
            .map_or_else(String::new, |most| format!(", read_max => {most}"));
        format!(
            "select * from outbox_internal.search('{{{names}}}', {criteria}, by_delivery => {by_delivery}, \
             descending => {descending}{after}, page_rows => {page_rows}{read_max})"
        )
    }

    fn names(&self) -> Vec<&'static str> {
        self.statuses.iter().map(|status| status.name()).collect()
    }

    /// The criteria that are given.
    fn criteria(&self) -> Value {
        let Ok(Value::Object(mut criteria)) = serde_json::to_value(self.filter) else {
            unreachable!("a struct is an object");
        };
        criteria.insert("span_s".to_owned(), self.span_s.into());
        criteria.retain(|_, value| !value.is_null());
        Value::Object(criteria)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_search_is_shown_as_a_call_with_the_given_criteria() {
        let filter = Filter {
            key: Some("it's".into()),
            since: Some("2h".parse().expect("infallible")),
            partition: super::super::partition("p07").ok(),
            ..Filter::default()
        };
        let request = SearchRequest {
            statuses: &[MessageStatus::InFlight],
            filter: &filter,
            span_s: None,
            by_delivery: true,
            descending: false,
            after: &["1".into(), "d".into()],
            page_rows: 51,
            read_max: Some(7),
        };
        assert_eq!(
            request.to_show(),
            r#"select * from outbox_internal.search('{in flight}', '{"partition":7,"key":"it''s","since":"7200s"}', by_delivery => true, descending => false, after => array['1', 'd'], page_rows => 51, read_max => 7)"#
        );
    }
}
