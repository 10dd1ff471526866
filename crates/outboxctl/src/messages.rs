//! Messages by filter, a page at a time, as quick with millions that wait as with five.
//!
//! The view outbox_messages is for one seq; in order of seq it would be read to its end and sorted. So each table is asked by
//! the index that it has: `outbox` lane by lane (destination, partition), `outbox_waiting` and `outbox_dead` by their keys,
//! `outbox_history` by ranges of seq, which its BRIN index finds. No query counts, and none reads more than a page where the
//! filter finds one there.

use crate::connect::Session;
use crate::failure::{Code, Failure};
use crate::queries::IN_ORDER;
use crate::queries::message::{DEAD, HISTORY, OUTBOX, Table, WAITING};
use clap::{Args, ValueEnum};
use serde_json::Value;
use tokio_postgres::types::ToSql;

/// Where a message stands; the words of outbox_messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Status {
    Pending,
    Scheduled,
    #[value(alias = "in flight")]
    InFlight,
    Retrying,
    Published,
    Dead,
    Discarded,
}

/// What is asked for where nothing is said. The dead are among them: somebody must decide about each.
const NOT_ENDED: [Status; 5] = [
    Status::Pending,
    Status::Scheduled,
    Status::InFlight,
    Status::Retrying,
    Status::Dead,
];

impl Status {
    fn word(self) -> &'static str {
        match self {
            Self::Pending => "pending",
            Self::Scheduled => "scheduled",
            Self::InFlight => "in flight",
            Self::Retrying => "retrying",
            Self::Published => "published",
            Self::Dead => "dead",
            Self::Discarded => "discarded",
        }
    }
}

/// What a message must meet, and which page of those that do.
#[derive(Args, Clone, Debug)]
pub struct Filter {
    /// Only of this status; may be given several times [default: all that have not ended]
    #[arg(long = "status", value_name = "STATUS")]
    pub statuses: Vec<Status>,
    /// Only to this destination
    #[arg(long)]
    pub destination: Option<String>,
    /// Only of this partition, such as p07
    #[arg(long, value_parser = partition)]
    pub partition: Option<i16>,
    /// Only of this ordering key
    #[arg(long)]
    pub key: Option<String>,
    /// Only events of this type
    #[arg(long = "type", value_name = "TYPE")]
    pub event_type: Option<String>,
    /// Only events of this type of aggregate
    #[arg(long, value_name = "TYPE")]
    pub aggregate_type: Option<String>,
    /// Only events of this aggregate
    #[arg(long, value_name = "ID")]
    pub aggregate_id: Option<String>,
    /// Only with an error LIKE this
    #[arg(long, value_name = "PATTERN")]
    pub error_like: Option<String>,
    /// Only enqueued since then, or ended since then if they have: a time, or how long ago (90s, 15m, 2h, 7d)
    #[arg(long, value_name = "WHEN")]
    pub since: Option<When>,
    /// Only after this seq: the last of the page before
    #[arg(long, value_name = "SEQ")]
    pub after: Option<i64>,
    /// At most so many; those of one seq stay together
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(i64).range(1..=100_000))]
    pub limit: i64,
    /// The highest seq first; --after then goes down
    #[arg(long)]
    pub newest_first: bool,
}

/// `p07`, or `7`.
pub fn partition(text: &str) -> Result<i16, String> {
    let number = text.strip_prefix('p').unwrap_or(text).parse();
    match number {
        Ok(number @ 0..=1023) => Ok(number),
        _ => Err("a partition is p00 to p1023".into()),
    }
}

/// A time as Postgres reads it, or how long ago.
#[derive(Clone, Debug, PartialEq)]
pub enum When {
    SecondsAgo(f64),
    At(String),
}

impl std::str::FromStr for When {
    type Err = std::convert::Infallible;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let unit = match text.chars().last() {
            Some('s') => 1.0,
            Some('m') => 60.0,
            Some('h') => 3600.0,
            Some('d') => 86_400.0,
            _ => 0.0,
        };
        let number = text.get(..text.len().saturating_sub(1)).unwrap_or_default();
        let number = Some(number).filter(|number| number.bytes().all(|byte| byte.is_ascii_digit()));
        Ok(match number.and_then(|number| number.parse::<u32>().ok()) {
            Some(number) if unit > 0.0 => Self::SecondsAgo(f64::from(number) * unit),
            _ => Self::At(text.to_owned()),
        })
    }
}

/// A statement with its parameters.
#[derive(Default)]
pub struct Statement {
    parameters: Vec<Box<dyn ToSql + Sync + Send>>,
}

impl Statement {
    /// A parameter; returns what stands for it.
    pub fn bind(&mut self, value: impl ToSql + Sync + Send + 'static) -> String {
        self.parameters.push(Box::new(value));
        format!("${}", self.parameters.len())
    }

    pub fn bind_text(&mut self, text: &str) -> String {
        let place = self.bind(text.to_owned());
        format!("{place}::text")
    }

    pub fn bind_time(&mut self, when: &When) -> String {
        match when {
            When::SecondsAgo(seconds) => {
                let place = self.bind(*seconds);
                format!("(statement_timestamp() - make_interval(secs => {place}::float8))")
            }
            When::At(text) => format!("({})::timestamptz", self.bind_text(text)),
        }
    }

    pub async fn rows(&self, session: &Session, sql: &str) -> Result<Vec<Value>, Failure> {
        let parameters: Vec<_> = self.parameters.iter().map(|parameter| &**parameter as _).collect();
        session.rows(sql, &parameters).await
    }
}

/// Whether this role may read events, and they are where they are by default.
pub async fn events_are_readable(session: &Session) -> Result<bool, Failure> {
    let sql =
        "select has_table_privilege('outbox_events', 'select') and not exists (select from outbox_source) as readable";
    Ok(session.rows(sql, &[]).await?[0]["readable"] == true)
}

/// A page in order of seq.
pub async fn page(session: &Session, filter: &Filter) -> Result<Vec<Value>, Failure> {
    let events = events_are_readable(session).await?;
    if filter.asks_for_events() && !events {
        return Err(Failure::new(Code::Refused, "messages cannot be chosen by their events here")
            .hint("It takes SELECT on outbox_events (outbox_admin), and events that are not read from a source of your own. Choose by key, destination, error, time or seq."));
    }
    let mut rows = Vec::new();
    if filter.wants(&NOT_ENDED) {
        let mut statement = Statement::default();
        let sql = current(filter, events, &mut statement);
        // Else all is looked through, and what is found is sorted.
        let in_order = filter.is_met_by_most() || filter.is_met_by_many_events();
        if in_order {
            session.client.batch_execute(IN_ORDER).await?;
        }
        rows = statement.rows(session, &sql).await?;
        if in_order {
            session.client.batch_execute("reset enable_sort").await?;
        }
    }
    if filter.wants(&[Status::Published, Status::Discarded]) {
        rows.extend(history(session, filter, events).await?);
    }
    sort_and_cut(&mut rows, filter);
    Ok(rows)
}

impl Filter {
    fn wants(&self, statuses: &[Status]) -> bool {
        let wanted = match self.statuses.is_empty() {
            true => &NOT_ENDED,
            false => self.statuses.as_slice(),
        };
        wanted.iter().any(|status| statuses.contains(status))
    }

    fn asks_for_events(&self) -> bool {
        self.event_type.is_some() || self.aggregate_type.is_some() || self.aggregate_id.is_some()
    }

    /// Whether most of what waits meets it, so that a page is found at the start of each lane. Otherwise all of it is looked
    /// through at once: page by page it would be as well, and in a worse order.
    fn is_met_by_most(&self) -> bool {
        !self.asks_for_events() && self.is_met_by_most_messages()
    }

    /// Whether most messages of the events that it asks for meet it: then a page is found along the events.
    fn is_met_by_many_events(&self) -> bool {
        self.asks_for_events() && self.is_met_by_most_messages()
    }

    fn is_met_by_most_messages(&self) -> bool {
        let picky = self.key.is_some() || self.error_like.is_some() || self.since.is_some();
        !picky && self.wants(&[Status::Pending])
    }

    fn words(&self, of: &[Status]) -> Vec<String> {
        let wanted = of.iter().filter(|status| self.wants(&[**status]));
        wanted.map(|status| status.word().to_owned()).collect()
    }
}

/// Highest or lowest seq first; those of one seq are not torn apart, so that the next page can begin after it.
fn sort_and_cut(rows: &mut Vec<Value>, filter: &Filter) {
    let seq = |row: &Value| row["seq"].as_i64().unwrap_or_default();
    rows.sort_by(|a, b| {
        let by_seq = match filter.newest_first {
            true => seq(b).cmp(&seq(a)),
            false => seq(a).cmp(&seq(b)),
        };
        by_seq.then_with(|| a["destination"].as_str().cmp(&b["destination"].as_str()))
    });
    let limit = usize::try_from(filter.limit).unwrap_or(usize::MAX);
    if let Some(last) = rows.get(limit.saturating_sub(1)).map(seq) {
        let end = rows.iter().skip(limit).position(|row| seq(row) != last);
        rows.truncate(end.map_or(rows.len(), |more| limit + more));
    }
}

/// What has not ended, and the dead.
fn current(filter: &Filter, events: bool, statement: &mut Statement) -> String {
    let mut parts = Vec::new();
    let outbox = [Status::Pending, Status::InFlight, Status::Retrying];
    if filter.wants(&outbox) {
        let mut part = match filter.is_met_by_many_events() {
            true => Part::of_events(filter, statement),
            false => Part::new(&OUTBOX, filter, statement),
        };
        part.only(&filter.words(&outbox), outbox.len(), statement);
        if !filter.wants(&[Status::Pending, Status::Retrying]) {
            part.conditions.push("t.claim_token is not null".into());
        }
        if !filter.wants(&[Status::Pending, Status::InFlight]) {
            part.conditions.push("t.attempts > 0".into());
        }
        parts.push(match filter.is_met_by_most() {
            true => part.of_each_lane(filter, statement),
            false => part.sql(),
        });
    }
    let waiting = [Status::Pending, Status::Scheduled, Status::Retrying];
    if filter.wants(&waiting) {
        let mut part = Part::new(&WAITING, filter, statement);
        part.only(&filter.words(&waiting), waiting.len(), statement);
        parts.push(part.sql());
    }
    if filter.wants(&[Status::Dead]) {
        parts.push(Part::new(&DEAD, filter, statement).sql());
    }
    let order = if filter.newest_first { "desc" } else { "asc" };
    let limit = statement.bind(filter.limit);
    // Cut before events are looked up.
    let cut = format!(
        "select * from ({}) u order by u.seq {order} fetch first ({limit}::bigint) rows with ties",
        parts.join("\nunion all\n")
    );
    with_events(&cut, events)
}

/// What has ended: by ranges of seq, from where the page begins, until it is full.
async fn history(session: &Session, filter: &Filter, events: bool) -> Result<Vec<Value>, Failure> {
    let (lowest, highest) = match events {
        true => {
            let sql = "select coalesce(min(seq), 1) as lowest, coalesce(max(seq), 0) as highest from outbox_events";
            let row = session.rows(sql, &[]).await?.remove(0);
            (
                row["lowest"].as_i64().unwrap_or(1),
                row["highest"].as_i64().unwrap_or(0),
            )
        }
        // Nobody says where the seqs are: all of it in one range.
        false => (1, 0),
    };
    let mut rows = Vec::new();
    for (from, to) in ranges(filter, lowest, highest) {
        let mut statement = Statement::default();
        let mut part = Part::new(&HISTORY, filter, &mut statement);
        let ended = [Status::Published, Status::Discarded];
        part.only(&filter.words(&ended), ended.len(), &mut statement);
        let (from, to) = (statement.bind(from), statement.bind(to));
        part.conditions
            .push(format!("t.seq between {from}::bigint and {to}::bigint"));
        rows.extend(statement.rows(session, &with_events(&part.sql(), events)).await?);
        if rows.len() as i64 >= filter.limit {
            break;
        }
    }
    Ok(rows)
}

/// Ranges of seq, each eight times as wide as the one before, in the order of the page. The last one has no end: an event may be
/// gone before its message.
fn ranges(filter: &Filter, lowest: i64, highest: i64) -> Vec<(i64, i64)> {
    const FIRST: i64 = 20_000;
    let mut ranges = Vec::new();
    let mut width = FIRST;
    if filter.newest_first {
        let mut top = filter.after.map_or(i64::MAX, |after| after.saturating_sub(1));
        let mut bottom = highest.min(top).saturating_sub(width);
        while bottom > lowest {
            ranges.push((bottom, top));
            top = bottom - 1;
            width = width.saturating_mul(8);
            bottom = top.saturating_sub(width);
        }
        ranges.push((i64::MIN, top));
    } else {
        let mut bottom = filter.after.map_or(i64::MIN, |after| after.saturating_add(1));
        let mut top = lowest.max(bottom).saturating_add(width);
        while top < highest {
            ranges.push((bottom, top));
            bottom = top + 1;
            width = width.saturating_mul(8);
            top = bottom.saturating_add(width);
        }
        ranges.push((bottom, i64::MAX));
    }
    ranges
}

/// What one table gives to a page.
struct Part {
    table: &'static Table,
    from: String,
    /// By which it is read.
    seq: &'static str,
    conditions: Vec<String>,
    order: &'static str,
    limit: String,
}

impl Part {
    fn new(table: &'static Table, filter: &Filter, statement: &mut Statement) -> Self {
        let join = match filter.asks_for_events() {
            true => " join outbox_events e on e.seq = t.seq",
            false => "",
        };
        Self::read_by("t.seq", format!("{} t{join}", table.name), table, filter, statement)
    }

    /// From the events, in their order, to the messages of `outbox`, whose index begins with the lane.
    fn of_events(filter: &Filter, statement: &mut Statement) -> Self {
        let from = "outbox_events e cross join outbox_internal.first_pending l cross join lateral (
                      select * from outbox x where x.destination = l.destination and x.partition = l.partition and x.seq = e.seq offset 0) t";
        let mut part = Self::read_by("e.seq", from.into(), &OUTBOX, filter, statement);
        part.conditions
            .push("e.seq >= (select min(f.seq) from outbox_internal.first_pending f)".into());
        part.conditions.extend(lanes(filter, statement));
        part
    }

    fn read_by(
        seq: &'static str,
        from: String,
        table: &'static Table,
        filter: &Filter,
        statement: &mut Statement,
    ) -> Self {
        let mut conditions = Vec::new();
        let mut equal = |column: &str, value: &Option<String>| {
            if let Some(value) = value {
                conditions.push(format!("{column} = {}", statement.bind_text(value)));
            }
        };
        equal("t.destination", &filter.destination);
        equal("t.key", &filter.key);
        equal("e.type", &filter.event_type);
        equal("e.aggregate_type", &filter.aggregate_type);
        equal("e.aggregate_id", &filter.aggregate_id);
        if let Some(pattern) = &filter.error_like {
            conditions.push(format!("{} like {}", table.last_error, statement.bind_text(pattern)));
        }
        if let Some(partition) = filter.partition {
            conditions.push(format!("t.partition = {}::smallint", statement.bind(partition)));
        }
        if let Some(since) = &filter.since {
            conditions.push(format!("{} >= {}", table.since, statement.bind_time(since)));
        }
        if let Some(after) = filter.after {
            let side = if filter.newest_first { "<" } else { ">" };
            conditions.push(format!("{seq} {side} {}::bigint", statement.bind(after)));
        }
        Self {
            table,
            from,
            seq,
            conditions,
            order: if filter.newest_first { "desc" } else { "asc" },
            limit: statement.bind(filter.limit),
        }
    }

    /// Of the statuses that the table has only those that are asked for.
    fn only(&mut self, words: &[String], of: usize, statement: &mut Statement) {
        if words.len() < of {
            let words = statement.bind(words.to_vec());
            self.conditions
                .push(format!("({}) = any ({words}::text[])", self.table.status));
        }
    }

    fn sql(&self) -> String {
        let conditions = match self.conditions.is_empty() {
            true => "true".into(),
            false => self.conditions.join(" and "),
        };
        format!(
            "(select t.seq, t.destination, t.partition, t.key, {} as status, t.attempts, {} as available_at, t.enqueued_at,
                     {} as ended_at, {} as expires_at, {} as last_error, t.replayed
              from {} where {conditions} order by {} {} fetch first ({}::bigint) rows with ties)",
            self.table.status,
            self.table.available_at,
            self.table.ended_at,
            self.table.expires_at,
            self.table.last_error,
            self.from,
            self.seq,
            self.order,
            self.limit
        )
    }

    /// The first of each lane, by the index of `outbox`.
    fn of_each_lane(mut self, filter: &Filter, statement: &mut Statement) -> String {
        let lanes = lanes(filter, statement);
        self.conditions
            .push("t.destination = l.destination and t.partition = l.partition".into());
        format!(
            "(select x.* from outbox_internal.first_pending l cross join lateral {} x where {})",
            self.sql(),
            lanes.join(" and ")
        )
    }
}

/// Which of the lanes `l`.
fn lanes(filter: &Filter, statement: &mut Statement) -> Vec<String> {
    let mut lanes = vec!["true".to_owned()];
    if let Some(destination) = &filter.destination {
        lanes.push(format!("l.destination = {}", statement.bind_text(destination)));
    }
    if let Some(partition) = filter.partition {
        lanes.push(format!("l.partition = {}::smallint", statement.bind(partition)));
    }
    lanes
}

/// The columns of a page, with those of the event where they can be read.
fn with_events(parts: &str, events: bool) -> String {
    let (columns, join) = match events {
        true => (
            "e.id, e.type, e.aggregate_type, e.aggregate_id, e.operation",
            // One look into the index for each row; a planner that expects more of them reads all events.
            "left join lateral (select * from outbox_events x where x.seq = m.seq offset 0) e on true",
        ),
        false => (
            "null::uuid as id, null as type, null as aggregate_type, null as aggregate_id, null as operation",
            "",
        ),
    };
    format!(
        "select m.seq, m.destination, outbox_partition_label(m.partition::integer) as partition_key, m.key, m.status, m.attempts,
                m.available_at, m.enqueued_at, m.ended_at,
                extract(epoch from statement_timestamp() - coalesce(m.ended_at, m.enqueued_at))::float8 as age_s,
                m.last_error, m.replayed, m.expires_at, {columns}
         from ({parts}) m {join}"
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use serde_json::json;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        filter: Filter,
    }

    fn filter(args: &[&str]) -> Filter {
        Cli::parse_from(["test"].iter().chain(args)).filter
    }

    #[test]
    fn how_long_ago_is_told_from_a_time() {
        let when = |text: &str| text.parse::<When>().expect("infallible");
        assert_eq!(when("90s"), When::SecondsAgo(90.0));
        assert_eq!(when("15m"), When::SecondsAgo(900.0));
        assert_eq!(when("2h"), When::SecondsAgo(7200.0));
        assert_eq!(when("7d"), When::SecondsAgo(604_800.0));
        for text in ["today", "2026-11-21", "d", "", "-5m", "1.5h", "5 m", "µ"] {
            assert_eq!(when(text), When::At(text.into()), "{text:?}");
        }
    }

    #[test]
    fn a_partition_is_named_by_its_label_or_number() {
        assert_eq!(["p07", "7", "p1023"].map(partition), [Ok(7), Ok(7), Ok(1023)]);
        assert!(
            ["p", "", "p1024", "-1", "q1"]
                .iter()
                .all(|text| partition(text).is_err())
        );
    }

    #[test]
    fn a_page_ends_at_its_limit_but_not_within_a_seq() {
        let rows = |seqs: &[i64]| -> Vec<Value> { seqs.iter().map(|seq| json!({ "seq": seq })).collect() };
        let page = |seqs: &[i64], args: &[&str]| -> Vec<i64> {
            let mut rows = rows(seqs);
            sort_and_cut(&mut rows, &filter(args));
            rows.iter().map(|row| row["seq"].as_i64().expect("a seq")).collect()
        };
        assert_eq!(page(&[4, 2, 2, 1, 2, 3], &["--limit", "2"]), [1, 2, 2, 2]);
        assert_eq!(page(&[4, 2, 3], &["--limit", "2", "--newest-first"]), [4, 3]);
        assert_eq!(page(&[1, 1, 1], &["--limit", "1"]), [1, 1, 1]);
        assert_eq!(page(&[1], &["--limit", "3"]), [1]);
        assert_eq!(page(&[], &[]), [0; 0]);
    }

    /// Every seq lies in one range, in the order of the page.
    #[test]
    fn the_ranges_of_the_history_leave_no_gap() {
        for (args, lowest, highest) in [
            (&[][..], 1, 0),
            (&[], 1, 5),
            (&[], 7_000_000, 90_000_000),
            (&["--after", "8000000"], 7_000_000, 90_000_000),
            (&["--after", "9223372036854775807"], 1, 5),
        ] {
            let up = ranges(&filter(args), lowest, highest);
            let first = filter(args).after.map_or(i64::MIN, |after| after.saturating_add(1));
            assert_eq!((up[0].0, up[up.len() - 1].1), (first, i64::MAX), "{args:?}");
            assert!(up.windows(2).all(|pair| pair[0].1 + 1 == pair[1].0), "{up:?}");
            let args: Vec<&str> = args.iter().copied().chain(["--newest-first"]).collect();
            let down = ranges(&filter(&args), lowest, highest);
            let first = filter(&args).after.map_or(i64::MAX, |after| after - 1);
            assert_eq!((down[0].1, down[down.len() - 1].0), (first, i64::MIN), "{args:?}");
            assert!(down.windows(2).all(|pair| pair[0].0 - 1 == pair[1].1), "{down:?}");
        }
        assert!(ranges(&filter(&[]), 1, 1_000_000_000).len() < 10, "few of them");
        let newest = ranges(&filter(&["--newest-first"]), 1, 1_000_000);
        assert_eq!(newest[0], (980_000, i64::MAX), "the newest are found in a narrow one");
    }

    #[test]
    fn a_filter_that_few_meet_does_not_go_lane_by_lane() {
        let by_lane =
            |args: &[&str]| current(&filter(args), true, &mut Statement::default()).contains("cross join lateral");
        assert!(by_lane(&[]) && by_lane(&["--status", "pending", "--destination", "d", "--partition", "p01"]));
        for few in [["--status", "in-flight"], ["--key", "k"], ["--since", "1m"]] {
            assert!(!by_lane(&few), "{few:?}");
        }
    }
}
