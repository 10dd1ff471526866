//! Builds the one statement that reads a page. It reads candidates along an index, keeps those that match a filter, in
//! order, until the page is full, and adds their events. Each row has a cursor; the next page begins after the cursor
//! of the last row.

use super::filter::{Events, Filter};
use super::sql::Sql;
use crate::failure::{Code, Failure};
use crate::queries::message::MessageTable;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use std::future::Future;

/// A session that runs a statement once, without preparing it for repetition.
pub trait FetchOnce {
    type Error: From<Failure>;

    fn fetch_once<T: DeserializeOwned + Send>(
        &self,
        sql: &Sql,
    ) -> impl Future<Output = Result<Vec<T>, Self::Error>> + Send;

    /// Whether the statement failed because it ran out of time.
    fn timed_out(_: &Self::Error) -> bool {
        false
    }
}

/// A message of a page.
#[derive(Clone, Debug, Deserialize)]
pub struct MessageRow {
    pub blocks: bool,
    /// The values of the order columns of this row: the next page begins after them.
    pub cursor: Vec<String>,
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

/// The result of one statement.
#[derive(Default, Deserialize)]
pub struct FoundRows {
    pub rows: Vec<MessageRow>,
    /// The cursor at which the search ended, if it ended at its bound.
    pub horizon: Option<Vec<String>>,
}

/// Runs a statement of a `Position`.
pub async fn found<S: FetchOnce>(session: &S, statement: &Sql) -> Result<FoundRows, S::Error> {
    Ok(session.fetch_once(statement).await?.pop().unwrap_or_default())
}

/// The columns of messages by which a page is sorted, each with its type. An index covers the first of them.
#[derive(Clone, Copy)]
pub struct PageOrder {
    pub keys: &'static [(&'static str, &'static str)],
    pub descending: bool,
}

impl PageOrder {
    fn columns(self, column: impl Fn(&str) -> String) -> String {
        let columns: Vec<String> = self.keys.iter().map(|(name, _)| column(name)).collect();
        columns.join(", ")
    }

    /// The list for ORDER BY; `prefix` precedes each column name.
    fn list(self, prefix: &str) -> String {
        let direction = if self.descending { " desc" } else { "" };
        self.columns(|name| format!("{prefix}{name}{direction}"))
    }

    fn cursor(self) -> String {
        format!("array[{}]::text[]", self.columns(|name| format!("c.{name}::text")))
    }
}

/// The rows `t` of a table, read as messages.
pub struct RowSource {
    pub table: MessageTable,
    pub from: String,
    /// The column of the seq, in whose order the rows are read.
    pub seq: &'static str,
}

impl RowSource {
    pub fn new(table: MessageTable) -> Self {
        Self {
            table,
            from: format!("@extschema@.{} t", table.name()),
            seq: "t.seq",
        }
    }

    pub fn name(&self, column: &str) -> String {
        match column {
            "seq" => self.seq.into(),
            other => self.table.column(other),
        }
    }
}

const COLUMNS: &str = "seq destination partition key status attempts available_at enqueued_at ended_at last_error replayed \
                       expires_at blocks";

/// Where a page begins, and the order of its rows.
#[derive(Clone, Copy)]
pub struct Position<'a> {
    pub order: PageOrder,
    pub after: &'a [String],
}

impl Position<'_> {
    /// The first `most` rows after this position that match the conditions.
    pub fn rows(&self, source: &RowSource, conditions: &Sql, most: usize) -> Sql {
        let columns = COLUMNS
            .split(' ')
            .map(|column| format!("{} as {column}", source.name(column)));
        let columns = columns.collect::<Vec<_>>().join(", ");
        let mut sql = Sql::new(&format!("select {columns}\n  from {} where true", source.from));
        sql.append(&self.behind(source)).append(conditions).push(&format!(
            "\n  order by {} fetch first {most} rows with ties",
            self.order.list("")
        ));
        sql
    }

    /// The first `most` rows of each lane `l` of `outbox`; `lanes` is the condition on the lanes.
    pub fn rows_of_lanes(&self, source: &RowSource, lanes: &Sql, conditions: &Sql, most: usize) -> Sql {
        let mut of_lane = Sql::new("\n  and t.destination = l.destination and t.partition = l.partition");
        of_lane.append(conditions);
        let mut sql = Sql::new("select x.* from outbox_internal.first_pending l cross join lateral (\n");
        sql.append(&self.rows(source, &of_lane, most))
            .push(") x where true")
            .append(lanes);
        sql
    }

    /// The condition for the rows after the cursor. The cursor may have only the first of the order columns.
    fn behind(&self, source: &RowSource) -> Sql {
        let mut sql = Sql::default();
        let side = if self.order.descending { "<" } else { ">" };
        let (mut columns, mut values) = (Vec::new(), Sql::default());
        for ((column, kind), value) in self.order.keys.iter().zip(self.after) {
            let column = source.name(column);
            if columns.is_empty() {
                // The index may cover only the first order column, or have other columns after it.
                sql.push(&format!("\n  and {column} {side}= ")).value(value, kind);
            } else {
                values.push(", ");
            }
            columns.push(column);
            values.value(value, kind);
        }
        if !columns.is_empty() {
            sql.push(&format!(" and ({}) {side} (", columns.join(", ")));
            sql.append(&values).push(")");
        }
        sql
    }

    /// The statement for a page: the first `most` of the candidates `c` that match the filter. Rows that tie with the
    /// last one in the order are added.
    pub fn statement(&self, candidates: &Candidates, filter: &Sql, most: usize, events: Events) -> Sql {
        let (order, cursor) = (self.order.list("c."), self.order.cursor());
        let (columns, join) = match events {
            Events::Unread => (
                "null::uuid as id, null as type, null as aggregate_type, null as aggregate_id, null as operation",
                String::new(),
            ),
            // One index lookup for each row: a planner that expects more rows would read all events.
            events => (
                "e.id, e.type, e.aggregate_type, e.aggregate_id, e.operation",
                format!(
                    "\n  left join lateral (select * from {} offset 0) e on true",
                    events.with_seq("x", "c.seq")
                ),
            ),
        };
        let mut sql = Sql::new("with ");
        sql.append(&candidates.sql).push(&format!(
            "
select (select coalesce(json_agg(r), '[]') from (
  select c.seq, c.destination, @extschema@.outbox_partition_label(c.partition::integer) as partition_key, c.key, c.status, c.attempts,
         c.available_at, c.enqueued_at, c.ended_at,
         extract(epoch from statement_timestamp() - coalesce(c.ended_at, c.enqueued_at))::float8 as age_s,
         c.last_error, c.replayed, c.expires_at, {columns}, c.blocks, {cursor} as cursor
  from (select c.* from (select * from c order by {order}) c
        where true"
        ));
        sql.append(filter).push(&format!(
            "\n  order by {order} fetch first {most} rows with ties) c{join}\n  order by {order}) r) as rows,\n  {} as horizon",
            candidates.horizon
        ));
        sql
    }
}

/// The messages `c` from which a page is chosen, and an expression for the cursor at which their search ended. The
/// expression is NULL if the search read all rows.
pub struct Candidates {
    pub sql: Sql,
    pub horizon: String,
}

impl Candidates {
    /// All rows after the position.
    pub fn all(rows: &Sql) -> Self {
        let mut sql = Sql::new("c as materialized (\n");
        sql.append(rows).push(")");
        Self {
            sql,
            horizon: "null::text[]".into(),
        }
    }

    /// The first `most` rows. If there are that many, more rows may follow.
    pub fn first(rows: &Sql, most: usize, order: PageOrder) -> Self {
        let last = PageOrder {
            descending: !order.descending,
            ..order
        };
        Self {
            horizon: format!(
                "(select {} from c where (select count(*) from c) >= {most} order by {} limit 1)",
                order.cursor(),
                last.list("c.")
            ),
            ..Self::all(rows)
        }
    }

    /// The first `most` rows of each lane, in order of seq. A lane that was not read to its end may have further rows
    /// with a lower seq than rows of other lanes. So the candidates end at the lowest last seq of such lanes.
    pub fn first_of_lanes(rows: &Sql, most: usize) -> Self {
        let mut sql = Sql::new("scanned as materialized (\n");
        sql.append(rows).push(&format!(
            "
), horizon as (
  select min(x.last) as seq from (
    select max(k.seq) as last from scanned k group by k.destination, k.partition having count(*) >= {most}) x
), c as (
  select k.* from scanned k, horizon h where h.seq is null or k.seq <= h.seq
)"
        ));
        Self {
            sql,
            horizon: "(select array[h.seq::text] from horizon h where h.seq is not null)".into(),
        }
    }
}

pub async fn events_of<S: FetchOnce>(session: &S) -> Result<Events, S::Error> {
    #[derive(Deserialize)]
    struct Readable {
        readable: bool,
        in_source: bool,
    }
    let sql = "select has_table_privilege('@extschema@.outbox_events', 'select') as readable,
                      exists (select from @extschema@.outbox_source) as in_source";
    let answer: Vec<Readable> = session.fetch_once(&Sql::new(sql)).await?;
    Ok(match answer.first() {
        Some(Readable {
            readable: true,
            in_source: true,
        }) => Events::InSource,
        Some(Readable { readable: true, .. }) => Events::Stored,
        _ => Events::Unread,
    })
}

/// Where events are read. It is an error if they cannot be and the filter has criteria for events.
pub async fn events_for<S: FetchOnce>(session: &S, filter: &Filter) -> Result<Events, S::Error> {
    let events = events_of(session).await?;
    if events == Events::InSource && filter.id.is_some() {
        return Err(
            Failure::new(Code::Refused, "cannot find an event of a source by its id")
                .hint("Filter by seq: SELECT the seq of the event from the source.")
                .into(),
        );
    }
    if filter.asks_for_events() && events == Events::Unread {
        return Err(Failure::new(Code::Refused, "cannot filter messages by their events")
            .hint(
                "This requires SELECT on outbox_events (outbox_admin). Filter by key, destination, error, time or seq.",
            )
            .into());
    }
    Ok(events)
}
