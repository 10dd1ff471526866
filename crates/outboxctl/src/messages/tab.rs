//! Pages of messages of one kind, in the order in which they are or were delivered. Each search has a bound on its rows
//! or its time, so a page costs the same with five million messages as with five. A search may end before the page is
//! full; it reports how far it came, and the next page continues from there.

use super::filter::{Events, Filter};
use super::page::{self, Candidates, FetchOnce, MessageRow, PageOrder, Position, RowSource, events_for};
use super::sql::Sql;
use crate::format::duration;
use crate::queries::message::MessageTable;
use crate::queries::state::MessageStatus;
use outbox_core::words::Word;
use serde::Deserialize;
use std::time::{Duration, Instant};

pub const PAGE: usize = 50;
/// The most rows that one search reads. The user then decides whether to search further.
const SCAN_ROWS: usize = 5000;
/// The most rows of each lane, in a tab that is read lane by lane.
const SCAN_LANE: usize = 2000;
/// The most rows of all lanes together.
const SCAN_LANES: usize = 32_000;
/// A search of the history widens its window of time until this time is over.
const HISTORY_BUDGET: Duration = Duration::from_millis(1200);

/// The tab of a status.
impl MessageStatus {
    /// Whether its messages can be read in reverse order as well. An index or a small table has to make that cheap: the
    /// queue and the history are read in one direction only.
    pub fn can_reverse(self) -> bool {
        matches!(self, Self::Retrying | Self::Scheduled | Self::Dead)
    }

    /// Whether the first message of a list has the latest time.
    pub fn is_latest_first(self, reversed: bool) -> bool {
        self.order(reversed).descending
    }

    fn order(self, reversed: bool) -> PageOrder {
        const SEQ: (&str, &str) = ("seq", "bigint");
        const DESTINATION: (&str, &str) = ("destination", "text");
        let (keys, descending): (&[_], _) = match self {
            Self::Ready | Self::InFlight => (&[SEQ, DESTINATION], false),
            Self::Retrying | Self::Scheduled => (&[("available_at", "timestamptz"), SEQ, DESTINATION], false),
            Self::Blocked => (&[DESTINATION, ("partition", "smallint"), ("key", "text"), SEQ], false),
            Self::Published | Self::Dead | Self::Discarded => (&[("ended_at", "timestamptz"), SEQ, DESTINATION], true),
        };
        PageOrder {
            keys,
            descending: descending != (reversed && self.can_reverse()),
        }
    }
}

pub struct Page {
    pub rows: Vec<MessageRow>,
    pub next: Option<Vec<String>>,
    /// How far the search came, if it ended at its bound of time or rows and not at the last message. It completes the
    /// sentence "The search ...".
    pub looked: Option<String>,
    pub sql: String,
}

/// The page of `tab` after the cursor `after`, of the messages that match the filter. `lanes` is about the number of
/// lanes of the database. `reversed` has no effect unless the tab `can_reverse`.
pub async fn page<S: FetchOnce>(
    session: &S,
    lanes: usize,
    tab: MessageStatus,
    reversed: bool,
    filter: &Filter,
    after: &[String],
) -> Result<Page, S::Error> {
    let events = events_for(session, filter).await?;
    let order = tab.order(reversed);
    if matches!(tab, MessageStatus::Published | MessageStatus::Discarded) {
        return history(session, tab, filter, after, events).await;
    }
    let most = most(lanes, tab, filter);
    let position = Position { order, after };
    let (candidates, filters) = candidates(most, tab, filter, position, events);
    let statement = position.statement(&candidates, &filters, PAGE + 1, events);
    let found = page::found(session, &statement).await?;
    let mut page = Page {
        rows: found.rows,
        next: found.horizon,
        looked: None,
        sql: statement.to_show(),
    };
    let more = page.cut();
    if !more && page.next.is_some() && !filter.is_empty() {
        let scope = if is_of_lanes(tab) { " of each lane" } else { "" };
        page.looked = Some(format!("covered {most} messages{scope}"));
    }
    Ok(page)
}

impl Page {
    /// Cuts the rows to one page. Returns whether there were more.
    fn cut(&mut self) -> bool {
        let more = self.rows.len() > PAGE;
        self.rows.truncate(PAGE);
        if more {
            self.next = self.rows.last().map(|row| row.cursor.clone());
        }
        more
    }
}

fn is_of_lanes(tab: MessageStatus) -> bool {
    matches!(tab, MessageStatus::Ready | MessageStatus::InFlight)
}

/// The most rows to read; in a tab that is read lane by lane, of each lane. A page is correct with any number: it ends
/// at the first lane that was not read to its end.
fn most(lanes: usize, tab: MessageStatus, filter: &Filter) -> usize {
    let is_plain =
        filter.is_empty() && matches!(tab, MessageStatus::Ready | MessageStatus::Blocked | MessageStatus::Dead);
    let (all, each) = match is_of_lanes(tab) {
        true => (SCAN_LANES / lanes.max(1), SCAN_LANE),
        false => (SCAN_ROWS, SCAN_ROWS),
    };
    all.clamp(5, if is_plain { PAGE + 1 } else { each })
}

/// The first `most` messages after a position, and the filter to apply to them.
fn candidates(
    most: usize,
    tab: MessageStatus,
    filter: &Filter,
    position: Position<'_>,
    events: Events,
) -> (Candidates, Sql) {
    let since = if tab == MessageStatus::Dead {
        "ended_at"
    } else {
        "enqueued_at"
    };
    let mut filters = filter.of_message(|column| format!("c.{column}"), since);
    // These criteria have an index. All others are checked on the rows that were read.
    let only = Filter {
        seq: filter.seq,
        id: filter.id.clone(),
        ..Filter::default()
    };
    let mut conditions = only.of_message(|column| format!("t.{column}"), since);
    let (table, condition) = match tab {
        MessageStatus::Ready => {
            let status = MessageTable::Outbox.column("status");
            (MessageTable::Outbox, Some(format!("{status} <> 'in flight'")))
        }
        MessageStatus::InFlight => (MessageTable::Outbox, None),
        MessageStatus::Dead => (MessageTable::Dead, None),
        MessageStatus::Blocked => (MessageTable::Waiting, Some("t.state = 'g'".into())),
        _ => (MessageTable::Waiting, Some("t.due_at is not null".into())),
    };
    if let Some(condition) = condition {
        conditions.push(&format!("\n  and {condition}"));
    }
    if !matches!(tab, MessageStatus::Ready | MessageStatus::Dead) {
        filters.push(&format!("\n  and c.status = '{}'", tab.name()));
    }
    let source = RowSource::new(table);
    let mut candidates = match is_of_lanes(tab) {
        true => {
            let lanes = filter.of_lane(|column| format!("l.{column}"));
            Candidates::first_of_lanes(&position.rows_of_lanes(&source, &lanes, &conditions, most), most)
        }
        false => Candidates::first(&position.rows(&source, &conditions, most), most, position.order),
    };
    if tab == MessageStatus::InFlight {
        candidates.horizon = "null::text[]".into(); // they are among the first of their lane
    }
    filters.append(&filter.of_event(|column| format!("c.{column}"), events));
    (candidates, filters)
}

/// Reads a page of the history. The history has no index in order of time, only a BRIN index with the range of each few
/// blocks. So it is read by windows of time that grow until the page is full.
async fn history<S: FetchOnce>(
    session: &S,
    tab: MessageStatus,
    filter: &Filter,
    after: &[String],
    events: Events,
) -> Result<Page, S::Error> {
    let started = Instant::now();
    let begin = match after.first() {
        Some(at) => at.clone(),
        None => moment(session, &Sql::new("clock_timestamp()")).await?,
    };
    let mut page = Page {
        rows: Vec::new(),
        next: None,
        looked: None,
        sql: String::new(),
    };
    let order = tab.order(false);
    let (mut newer, mut span_s) = (None, Some(1_i64));
    loop {
        let after = if newer.is_none() { after } else { &[] };
        let position = Position { order, after };
        let candidates = ended(tab, filter, position, &window(&begin, newer, span_s));
        let later = filter.of_event(|column| format!("c.{column}"), events);
        let statement = position.statement(&candidates, &later, PAGE + 1, events);
        page.sql = statement.to_show();
        match page::found(session, &statement).await {
            Err(error) if S::timed_out(&error) => {
                page.looked = Some(match newer {
                    Some(seconds) => format!(
                        "covered the last {}; a search of older messages takes too long",
                        duration(seconds as f64)
                    ),
                    None => "took too long".to_owned(),
                });
                break;
            }
            found => {
                let found = found?;
                page.rows.extend(found.rows);
                if page.rows.len() <= PAGE && found.horizon.is_some() {
                    page.looked = Some(format!("covered {SCAN_ROWS} messages"));
                    page.next = found.horizon;
                    break;
                }
            }
        }
        let Some(seconds) = span_s else { break }; // the last window had no end
        if page.rows.len() > PAGE {
            break;
        }
        if started.elapsed() > HISTORY_BUDGET {
            page.looked = Some(format!("covered the last {}", duration(seconds as f64)));
            let end = moment(session, &before(&begin, seconds)).await?;
            page.next = Some(vec![end, "0".to_owned(), String::new()]);
            break;
        }
        newer = Some(seconds);
        span_s = Some(seconds * 8).filter(|seconds| *seconds < 10 * 365 * 86_400);
    }
    page.cut();
    Ok(page)
}

/// The value of an expression for a time, as text with all its digits.
async fn moment<S: FetchOnce>(session: &S, expression: &Sql) -> Result<String, S::Error> {
    #[derive(Deserialize)]
    struct Moment {
        at: String,
    }
    let mut sql = Sql::new("select (");
    sql.append(expression).push(")::text as at");
    let found: Vec<Moment> = session.fetch_once(&sql).await?;
    Ok(found.into_iter().next().map(|row| row.at).unwrap_or_default())
}

fn before(begin: &str, seconds: i64) -> Sql {
    let mut sql = Sql::of(begin, "timestamptz");
    sql.push(" - ").value(format!("{seconds} s"), "interval");
    sql
}

/// The condition for the window from `newer` seconds before `begin` (`None`: from the newest) back to `span_s` seconds
/// before it (`None`: to the oldest).
fn window(begin: &str, newer: Option<i64>, span_s: Option<i64>) -> Sql {
    let mut sql = Sql::default();
    if let Some(newer) = newer {
        sql.push("\n  and t.published_at <= ").append(&before(begin, newer));
    }
    if let Some(span_s) = span_s {
        sql.push("\n  and t.published_at > ").append(&before(begin, span_s));
    }
    sql
}

/// The messages that ended within a window and match the criteria for messages.
fn ended(tab: MessageStatus, filter: &Filter, position: Position<'_>, window: &Sql) -> Candidates {
    let source = RowSource::new(MessageTable::History);
    let mut conditions = filter.of_message(|column| source.name(column), "ended_at");
    conditions.append(window).push(match tab {
        MessageStatus::Discarded => "\n  and t.discarded",
        _ => "\n  and not t.discarded",
    });
    match filter.is_checked_later() {
        true => Candidates::first(
            &position.rows(&source, &conditions, SCAN_ROWS),
            SCAN_ROWS,
            position.order,
        ),
        false => Candidates::all(&position.rows(&source, &conditions, PAGE + 1)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_key() -> Filter {
        Filter {
            key: Some("x".into()),
            ..Filter::default()
        }
    }

    #[test]
    fn fewer_rows_of_each_lane_are_read_with_many_lanes() {
        assert_eq!(most(16, MessageStatus::Ready, &Filter::default()), PAGE + 1);
        assert_eq!(most(16, MessageStatus::Ready, &of_key()), SCAN_LANE);
        assert_eq!(most(3200, MessageStatus::Ready, &of_key()), 10);
        assert_eq!(most(100_000, MessageStatus::InFlight, &of_key()), 5);
    }

    #[test]
    fn only_a_tab_that_is_cheap_in_both_directions_is_reversed() {
        for tab in MessageStatus::ALL.iter().copied() {
            let turned = tab.is_latest_first(true) != tab.is_latest_first(false);
            assert_eq!(turned, tab.can_reverse(), "{tab:?}");
        }
    }

    #[test]
    fn the_values_of_a_search_are_parameters() {
        let filter = Filter {
            key: Some("x'".into()),
            destination: Some("d'; drop".into()),
            error_like: Some(r"%50\%%".into()),
            ..Filter::default()
        };
        for tab in MessageStatus::ALL.iter().copied() {
            let order = tab.order(false);
            let position = Position { order, after: &[] };
            let (candidates, filters) = match tab {
                MessageStatus::Published | MessageStatus::Discarded => (
                    ended(tab, &filter, position, &window("now", None, Some(1))),
                    Sql::default(),
                ),
                _ => candidates(7, tab, &filter, position, Events::Stored),
            };
            let (text, values) = position.statement(&candidates, &filters, 1, Events::Stored).to_run();
            assert!(!text.contains('%') && !text.contains("drop"), "{text}");
            assert!(values.iter().any(|value| value == r"%50\%%"), "{values:?}");
        }
    }
}
