//! Pages of messages: one SQL statement for each tab, by keyset, with a bound on the rows that it looks at, so that a page
//! of five million messages costs what a page of five does. A search may then end before it has found a page full; it says
//! how far it looked, and goes on from there.

use super::search::Search;
use super::session::{Session, Trouble};
use super::sql::{Sql, containing};
use serde::Deserialize;
use std::time::{Duration, Instant};

pub const PAGE: usize = 50;
/// Rows that a search looks at before it asks whether to go on; in a tab of lanes, of each lane.
const LOOK: usize = 5000;
const LOOK_LANE: usize = 2000;
/// Of all lanes together, however many there are.
const LOOK_LANES: usize = 32_000;
/// A search of the history widens its window of time until this is over.
const HISTORY_BUDGET: Duration = Duration::from_millis(1200);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tab {
    Pending,
    InFlight,
    Retrying,
    Scheduled,
    Held,
    Published,
    Dead,
    Discarded,
}

impl Tab {
    pub const ALL: [Self; 8] = [
        Self::Pending,
        Self::InFlight,
        Self::Retrying,
        Self::Scheduled,
        Self::Held,
        Self::Published,
        Self::Dead,
        Self::Discarded,
    ];

    /// In URLs.
    pub fn word(self) -> &'static str {
        match self {
            Self::Pending => "pending",
            Self::InFlight => "in-flight",
            Self::Retrying => "retrying",
            Self::Scheduled => "scheduled",
            Self::Held => "held",
            Self::Published => "published",
            Self::Dead => "dead",
            Self::Discarded => "discarded",
        }
    }

    pub fn parse(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|tab| tab.word() == word)
    }

    pub fn title(self) -> &'static str {
        match self {
            Self::Pending => "Pending",
            Self::InFlight => "In flight",
            Self::Retrying => "Retrying",
            Self::Scheduled => "Scheduled",
            Self::Held => "Held back",
            Self::Published => "Published",
            Self::Dead => "Dead",
            Self::Discarded => "Discarded",
        }
    }

    /// What a message of the tab is, in a sentence.
    pub fn about(self) -> &'static str {
        match self {
            Self::Pending => "Ready to go, in order of seq.",
            Self::InFlight => "Held by a worker for delivery, in order of seq.",
            Self::Retrying => "Failed and waiting for the next attempt, the next due first.",
            Self::Scheduled => "Not to go before a time of their own, the next due first.",
            Self::Held => "Waiting behind an earlier message of their key that failed or is dead.",
            Self::Published => "Confirmed by the destination, the latest first.",
            Self::Dead => "Given up and kept, the latest first. A retry brings one back.",
            Self::Discarded => "Given up for good, the latest first.",
        }
    }

    /// The head of the column of times.
    pub fn time_title(self) -> &'static str {
        match self {
            Self::Pending | Self::InFlight | Self::Held => "Enqueued",
            Self::Retrying | Self::Scheduled => "Due",
            Self::Published => "Published",
            Self::Dead => "Died",
            Self::Discarded => "Discarded",
        }
    }
}

/// A line of the list.
#[derive(Clone, Debug, Deserialize)]
pub struct Row {
    pub seq: i64,
    pub destination: String,
    pub partition_key: String,
    pub key: Option<String>,
    pub attempts: i64,
    pub at: f64,
    pub error: Option<String>,
    pub replayed: bool,
    pub blocks: bool,
    pub kind: Option<String>,
    /// Where the page that follows this row begins.
    cursor: Vec<String>,
}

pub struct Page {
    pub rows: Vec<Row>,
    pub next: Option<Vec<String>>,
    /// The search ended for want of time or rows, not of messages: how far it came.
    pub looked: Option<String>,
    pub sql: String,
}

#[derive(Default, Deserialize)]
struct Found {
    rows: Option<Vec<Row>>,
    /// Where the look ended, if it ended at its bound.
    horizon: Option<Vec<String>>,
}

/// The page of `tab` behind `after`, of what meets `search`, where there are about so many `lanes`.
pub async fn page(
    session: &Session,
    lanes: usize,
    tab: Tab,
    search: &Search,
    after: &[String],
) -> Result<Page, Trouble> {
    if matches!(tab, Tab::Published | Tab::Discarded) {
        return history(session, tab, search, after).await;
    }
    let per_lane = per_lane(lanes, tab, search);
    let sql = match tab {
        Tab::Pending | Tab::InFlight => of_lanes(per_lane, tab, search, after, session.reads_events),
        Tab::Retrying | Tab::Scheduled | Tab::Held => of_waiting(tab, search, after, session.reads_events),
        _ => of_dead(search, after, session.reads_events),
    };
    let (text, values) = sql.to_run();
    let found = session.ask_once(&text, &values).await?;
    let Found { rows, horizon } = found.into_iter().next().unwrap_or_default();
    let mut rows = rows.unwrap_or_default();
    let more = rows.len() > PAGE;
    rows.truncate(PAGE);
    let next = match (more, rows.last()) {
        (true, Some(last)) => Some(last.cursor.clone()),
        _ => horizon,
    };
    let ended_early = !more && next.is_some() && !search.is_empty();
    let looked = ended_early.then(|| match tab {
        Tab::Pending | Tab::InFlight => format!("looked at {per_lane} messages of each lane"),
        _ => format!("looked at {LOOK} messages"),
    });
    Ok(Page {
        rows,
        next,
        looked,
        sql: sql.to_show(),
    })
}

/// All conditions: on `c`, the candidates, and on `e`, their events.
fn conditions(search: &Search, time: &str) -> Sql {
    let mut sql = of_message(search, time);
    sql.append(&of_event(search));
    sql
}

fn of_event(search: &Search) -> Sql {
    let mut sql = Sql::default();
    equal(&mut sql, "e.type", search.kind.as_ref());
    equal(&mut sql, "e.aggregate_type", search.aggregate_type.as_ref());
    equal(&mut sql, "e.aggregate_id", search.aggregate_id.as_ref());
    sql
}

fn of_message(search: &Search, time: &str) -> Sql {
    let mut sql = Sql::default();
    equal(&mut sql, "c.key", search.key.as_ref());
    equal(&mut sql, "c.destination", search.destination.as_ref());
    if let Some(partition) = search.partition {
        sql.push("\n  and c.partition = ").value(partition.as_i16(), "integer");
    }
    if let Some(error) = &search.error {
        sql.push("\n  and c.error like ").value(containing(error), "text");
    }
    if let Some(seq) = search.seq {
        sql.push("\n  and c.seq = ").value(seq, "bigint");
    }
    if let Some(since) = &search.since {
        sql.push(&format!("\n  and c.{time} >= ")).append(&since_sql(since));
    }
    sql
}

fn equal(sql: &mut Sql, column: &str, value: Option<&String>) {
    if let Some(value) = value {
        sql.push(&format!("\n  and {column} = ")).value(value, "text");
    }
}

pub fn since_sql(since: &super::search::Since) -> Sql {
    let mut sql = Sql::default();
    match since {
        super::search::Since::Ago(_) => sql.push("now() - ").value(since.parameter(), "interval"),
        super::search::Since::At(_) => sql.value(since.parameter(), "timestamptz"),
    };
    sql
}

/// What is shown of the candidates `c`. `order` is both the order and the cursor.
fn shown(reads_events: bool, filters: &Sql, order: &str, cursor: &str) -> Sql {
    let (kind, join) = match reads_events {
        // With a source of the user's own the events are elsewhere, and rows of outbox_events are of something else.
        true => (
            "e.type",
            // One look into the index for each row, in their order, until the page is full: a planner that may choose walks
            // all events for those of a type.
            "\n  left join lateral (select * from outbox_events x where x.seq = c.seq offset 0) e
    on not exists (select from outbox_source)",
        ),
        false => ("null::text", ""),
    };
    let mut sql = Sql::new(&format!(
        "select c.seq, c.destination, outbox_partition_label(c.partition::integer) as partition_key, c.key, c.attempts,
         extract(epoch from c.at)::float8 as at, left(c.error, 500) as error, c.replayed, c.blocks, {kind} as kind,
         array[{cursor}]::text[] as cursor
  from (select * from c order by {order}) c{join}
  where true"
    ));
    sql.append(filters);
    sql.push(&format!("\n  order by {order} limit {}", PAGE + 1));
    sql
}

fn answer(candidates: &Sql, shown: &Sql, horizon: &str) -> Sql {
    let mut sql = Sql::new("with ");
    sql.append(candidates);
    sql.push("\nselect (select jsonb_agg(r) from (\n  ")
        .append(shown)
        .push(") r) as rows,\n  ")
        .push(horizon);
    sql.push(" as horizon");
    sql
}

/// Rows to look at in each lane. A page is right however few they are: it ends where the first lane does that was not
/// read to its end.
fn per_lane(lanes: usize, tab: Tab, search: &Search) -> usize {
    let most = match tab {
        Tab::Pending if search.is_empty() => PAGE + 1,
        _ => LOOK_LANE,
    };
    (LOOK_LANES / lanes.max(1)).clamp(5, most)
}

fn of_lanes(per_lane: usize, tab: Tab, search: &Search, after: &[String], reads_events: bool) -> Sql {
    // As outbox_internal.claim_is_live() says it, without a call a row.
    let live = "(coalesce(o.claim_token < 0 and o.claim_until > now()
                  or o.claim_token = p.lease_epoch and p.lease_until > now(), false)
                  or outbox_internal.is_taken(o.destination, o.partition, o.seq))";
    let mut candidates = Sql::new(
        "looked as materialized (
  select o.* from outbox_internal.first_shown l join outbox_partitions p on p.partition = l.partition
  cross join lateral (
    select o.seq, o.destination, o.partition, o.key, o.attempts, o.enqueued_at as at, o.enqueued_at, o.last_error as error,
           o.replayed, false as blocks, ",
    );
    candidates
        .push(live)
        .push(" as live\n    from outbox o where o.destination = l.destination and o.partition = l.partition");
    if let [seq, destination, ..] = after {
        candidates.push("\n      and o.seq >= ").value(seq, "bigint");
        candidates.push(" and (o.seq > ").value(seq, "bigint");
        candidates
            .push(" or o.destination > ")
            .value(destination, "text")
            .push(")");
    }
    if tab == Tab::Pending {
        candidates.push("\n      and not ").push(live);
    }
    if let Some(seq) = search.seq {
        candidates.push("\n      and o.seq = ").value(seq, "bigint");
    }
    candidates.push(&format!("\n    order by o.seq limit {per_lane}) o\n  where true"));
    if let Some(destination) = &search.destination {
        candidates.push("\n    and l.destination = ").value(destination, "text");
    }
    if let Some(partition) = search.partition {
        candidates
            .push("\n    and l.partition = ")
            .value(partition.as_i16(), "integer");
    }
    // Behind the last row of a lane that was not read to its end there may be rows that come before those of other lanes.
    candidates.push(&format!(
        "
), horizon as (
  select min(x.last) as seq from (
    select max(k.seq) as last from looked k group by k.destination, k.partition having count(*) >= {per_lane}) x
), c as (
  select k.* from looked k, horizon h where (h.seq is null or k.seq <= h.seq){}
)",
        if tab == Tab::InFlight { " and k.live" } else { "" }
    ));
    let rows = shown(
        reads_events,
        &conditions(search, "enqueued_at"),
        "c.seq, c.destination",
        "c.seq::text, c.destination",
    );
    let horizon = match tab {
        // What is in flight is among the first of its lane.
        Tab::InFlight => "null::text[]",
        _ => "(select array[(h.seq + 1)::text, ''] from horizon h where h.seq is not null)",
    };
    answer(&candidates, &rows, horizon)
}

fn of_waiting(tab: Tab, search: &Search, after: &[String], reads_events: bool) -> Sql {
    let is_held = tab == Tab::Held;
    let (which, order, cursor) = match is_held {
        true => (
            "w.state = 'g'",
            "destination, partition, key, seq",
            "c.destination, c.partition::text, c.key, c.seq::text",
        ),
        false => (
            "w.due_at is not null",
            "at, seq, destination",
            "c.at::text, c.seq::text, c.destination",
        ),
    };
    let look = if is_held && search.is_empty() { PAGE + 1 } else { LOOK };
    let mut candidates = Sql::new(&format!(
        "c as materialized (
  select w.seq, w.destination, w.partition, w.key, w.attempts, coalesce(w.due_at, w.enqueued_at) as at, w.enqueued_at,
         w.last_error as error, w.replayed, false as blocks, w.state
  from outbox_waiting w where {which}"
    ));
    match after {
        [destination, partition, key, seq] if is_held => {
            candidates.push("\n    and (w.destination, w.partition, w.key, w.seq) > (");
            candidates
                .value(destination, "text")
                .push(", ")
                .value(partition, "smallint")
                .push(", ");
            candidates.value(key, "text").push(", ").value(seq, "bigint").push(")");
        }
        [at, seq, destination] if !is_held => {
            candidates.push("\n    and (w.due_at, w.seq, w.destination) > (");
            candidates
                .value(at, "timestamptz")
                .push(", ")
                .value(seq, "bigint")
                .push(", ");
            candidates.value(destination, "text").push(")");
        }
        _ => (),
    }
    let by = if is_held {
        "w.destination, w.partition, w.key, w.seq"
    } else {
        "w.due_at, w.seq, w.destination"
    };
    candidates.push(&format!("\n  order by {by} limit {look}\n)"));
    let mut filters = conditions(search, "enqueued_at");
    filters.push(match tab {
        Tab::Retrying => "\n  and c.state = 'b' and c.attempts > 0",
        Tab::Scheduled => "\n  and (c.state = 's' or c.state = 'b' and c.attempts = 0)",
        _ => "",
    });
    let ordered: Vec<String> = order.split(", ").map(|column| format!("c.{column}")).collect();
    let rows = shown(reads_events, &filters, &ordered.join(", "), cursor);
    let down: Vec<String> = ordered.iter().map(|column| format!("{column} desc")).collect();
    let horizon = format!(
        "(select array[{cursor}]::text[] from c where (select count(*) from c) >= {look} order by {} limit 1)",
        down.join(", ")
    );
    answer(&candidates, &rows, &horizon)
}

fn of_dead(search: &Search, after: &[String], reads_events: bool) -> Sql {
    let look = if search.is_empty() { PAGE + 1 } else { LOOK };
    let mut candidates = Sql::new(
        "c as materialized (
  select d.seq, d.destination, d.partition, d.key, d.attempts, d.died_at as at, d.enqueued_at, d.reason as error, d.replayed,
         d.blocks
  from outbox_dead d where true",
    );
    if let [at, seq, destination] = after {
        candidates
            .push("\n    and (d.died_at, d.seq, d.destination) < (")
            .value(at, "timestamptz")
            .push(", ");
        candidates
            .value(seq, "bigint")
            .push(", ")
            .value(destination, "text")
            .push(")");
    }
    if let Some(seq) = search.seq {
        candidates.push("\n    and d.seq = ").value(seq, "bigint");
    }
    candidates.push(&format!(
        "\n  order by d.died_at desc, d.seq desc, d.destination desc limit {look}\n)"
    ));
    let cursor = "c.at::text, c.seq::text, c.destination";
    let rows = shown(
        reads_events,
        &conditions(search, "at"),
        "c.at desc, c.seq desc, c.destination desc",
        cursor,
    );
    let horizon = format!(
        "(select array[{cursor}]::text[] from c where (select count(*) from c) >= {look}
   order by c.at, c.seq, c.destination limit 1)"
    );
    answer(&candidates, &rows, &horizon)
}

/// The history has no index in order of time, only the range of each few pages (BRIN). So it is read by windows of time
/// that grow until a page is full.
async fn history(session: &Session, tab: Tab, search: &Search, after: &[String]) -> Result<Page, Trouble> {
    #[derive(Deserialize)]
    struct Now {
        now: String,
    }
    let started = Instant::now();
    let now: Vec<Now> = session.ask_once("select clock_timestamp()::text as now", &[]).await?;
    let begin = match after.first() {
        Some(at) => at.clone(),
        None => now.into_iter().next().map(|row| row.now).unwrap_or_default(),
    };
    let mut rows: Vec<Row> = Vec::new();
    let mut page = Page {
        rows: Vec::new(),
        next: None,
        looked: None,
        sql: String::new(),
    };
    let (mut newer, mut reach_s) = (None, Some(1_i64));
    loop {
        let sql = of_history(tab, search, after, &begin, newer, reach_s, session.reads_events);
        let (text, values) = sql.to_run();
        page.sql = sql.to_show();
        let found: Result<Vec<Found>, _> = session.ask_once(&text, &values).await;
        match found {
            Err(trouble) if trouble.timed_out => {
                page.looked = Some(match newer {
                    Some(seconds) => format!(
                        "looked back by {}; what is older takes too long",
                        super::format::span(seconds as f64)
                    ),
                    None => "the search took too long".to_owned(),
                });
                break;
            }
            found => {
                let found = found?.into_iter().next().unwrap_or_default();
                rows.extend(found.rows.unwrap_or_default());
                if rows.len() <= PAGE && found.horizon.is_some() {
                    page.looked = Some(format!("looked at {LOOK} messages"));
                    page.next = found.horizon;
                    break;
                }
            }
        }
        let Some(seconds) = reach_s else { break }; // that was all
        if rows.len() > PAGE {
            break;
        }
        if started.elapsed() > HISTORY_BUDGET {
            page.looked = Some(format!("looked back by {}", super::format::span(seconds as f64)));
            page.next = Some(vec![
                begin_of(session, &begin, seconds).await?,
                "0".to_owned(),
                String::new(),
            ]);
            break;
        }
        newer = Some(seconds);
        reach_s = Some(seconds * 8).filter(|seconds| *seconds < 10 * 365 * 86_400);
    }
    if rows.len() > PAGE {
        rows.truncate(PAGE);
        page.next = rows.last().map(|row| row.cursor.clone());
    }
    page.rows = rows;
    Ok(page)
}

async fn begin_of(session: &Session, begin: &str, seconds: i64) -> Result<String, Trouble> {
    #[derive(Deserialize)]
    struct At {
        at: String,
    }
    let sql = "select ($1::text::timestamptz - $2::text::interval)::text as at";
    let found: Vec<At> = session
        .ask_once(sql, &[begin.to_owned(), format!("{seconds} s")])
        .await?;
    Ok(found.into_iter().next().map(|row| row.at).unwrap_or_default())
}

/// From `newer` seconds before `begin` (None: from its very end) back to `reach_s` seconds before it (None: to the oldest).
fn of_history(
    tab: Tab,
    search: &Search,
    after: &[String],
    begin: &str,
    newer: Option<i64>,
    reach_s: Option<i64>,
    reads_events: bool,
) -> Sql {
    let look = if search.asks_event() { LOOK } else { PAGE + 1 };
    let mut candidates = Sql::new(
        "c as materialized (select c.* from (
  select h.seq, h.destination, h.partition, h.key, h.attempts, h.published_at as at, h.last_error as error, h.replayed,
         false as blocks
  from outbox_history h where ",
    );
    candidates.push(if tab == Tab::Discarded {
        "h.discarded"
    } else {
        "not h.discarded"
    });
    if let Some(newer) = newer {
        candidates
            .push("\n    and h.published_at <= ")
            .value(begin, "timestamptz");
        candidates.push(" - ").value(format!("{newer} s"), "interval");
    } else if let [at, seq, destination] = after {
        candidates.push("\n    and h.published_at <= ").value(at, "timestamptz");
        candidates
            .push(" and (h.published_at, h.seq, h.destination) < (")
            .value(at, "timestamptz")
            .push(", ");
        candidates
            .value(seq, "bigint")
            .push(", ")
            .value(destination, "text")
            .push(")");
    }
    if let Some(reach_s) = reach_s {
        candidates
            .push("\n    and h.published_at > ")
            .value(begin, "timestamptz");
        candidates.push(" - ").value(format!("{reach_s} s"), "interval");
    }
    candidates.push(") c\n  where true").append(&of_message(search, "at"));
    let order = "c.at desc, c.seq desc, c.destination desc";
    candidates.push(&format!("\n  order by {order} limit {look}\n)"));
    let cursor = "c.at::text, c.seq::text, c.destination";
    let horizon = match search.asks_event() {
        true => format!(
            "(select array[{cursor}]::text[] from c where (select count(*) from c) >= {look}
   order by c.at, c.seq, c.destination limit 1)"
        ),
        false => "null::text[]".to_owned(),
    };
    answer(
        &candidates,
        &shown(reads_events, &of_event(search), order, cursor),
        &horizon,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tab_has_a_word() {
        for tab in Tab::ALL {
            assert_eq!(Tab::parse(tab.word()), Some(tab));
        }
        assert_eq!(Tab::parse("all"), None);
    }

    #[test]
    fn many_lanes_are_looked_at_less_deeply() {
        let search = Search::parse("key:x").unwrap();
        assert_eq!(per_lane(16, Tab::Pending, &Search::default()), PAGE + 1);
        assert_eq!(per_lane(16, Tab::Pending, &search), LOOK_LANE);
        assert_eq!(per_lane(3200, Tab::Pending, &search), 10);
        assert_eq!(per_lane(100_000, Tab::InFlight, &search), 5);
    }

    #[test]
    fn what_is_searched_for_goes_as_parameters() {
        let search = Search::parse(r#"key:x' destination:"d'; drop" error:50%"#).unwrap();
        for tab in Tab::ALL {
            let sql = match tab {
                Tab::Pending | Tab::InFlight => of_lanes(7, tab, &search, &[], true),
                Tab::Retrying | Tab::Scheduled | Tab::Held => of_waiting(tab, &search, &[], true),
                Tab::Dead => of_dead(&search, &[], true),
                Tab::Published | Tab::Discarded => of_history(tab, &search, &[], "now", None, Some(1), true),
            };
            let (text, values) = sql.to_run();
            assert!(!text.contains('%') && !text.contains("drop"), "{text}");
            assert!(values.iter().any(|value| value == r"%50\%%"), "{values:?}");
        }
    }
}
