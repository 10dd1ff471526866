//! Pages of messages of one status, in the order in which they are or were delivered. Each search has a bound on its rows
//! or its time, so a page costs the same with five million messages as with five. A search may end before the page is
//! full; it reports how far it came, and the next page continues from there. The list of the newest messages of all
//! statuses, and the numbers of matches, have no next page.

use super::filter::Filter;
use super::page::{MessageRow, SearchBound, SearchRequest};
use crate::failure::Failure;
use crate::format::duration;
use crate::queries::Fetch;
use crate::queries::state::MessageStatus;
use outbox_core::words::Word;
use std::cmp::Reverse;
use std::time::{Duration, Instant};
use tokio_postgres::error::SqlState;

pub const PAGE: usize = 50;
/// With one that shows whether there are more.
const PAGE_ROWS: i32 = PAGE as i32 + 1;
/// The most rows that one search reads. The user then decides whether to search further.
const SCAN_ROWS: i32 = 5000;
/// The most rows of each lane, in a tab that is read lane by lane.
const SCAN_LANE: i32 = 2000;
/// The most rows of all lanes together.
const SCAN_LANES: i32 = 32_000;
/// A search of the history widens its window of time until this time is over.
const HISTORY_BUDGET: Duration = Duration::from_millis(1200);
/// The matches of each tab are counted to this number.
const MATCHES_MAX: usize = 1000;
/// The most rows whose events one that counts reads.
const COUNT_EVENTS: i32 = 1000;
/// A count widens its window for less time, because all tabs are counted.
const COUNT_BUDGET: Duration = Duration::from_millis(300);
/// The last window, which has no end, begins before this.
const OLDEST_S: i64 = 10 * 365 * 86_400;

/// The tab of a status.
impl MessageStatus {
    /// Whether its messages can be read in reverse order as well. An index or a small table has to make that cheap: the
    /// queue and the history are read in one direction only.
    pub fn can_reverse(self) -> bool {
        matches!(self, Self::Retrying | Self::Scheduled | Self::Dead)
    }

    /// Whether the first message of a list has the latest time.
    pub fn is_latest_first(self, reversed: bool) -> bool {
        matches!(self, Self::Published | Self::Dead | Self::Discarded) != (reversed && self.can_reverse())
    }
}

#[derive(Default)]
pub struct Page {
    pub rows: Vec<MessageRow>,
    pub next: Option<Vec<String>>,
    /// How far the search came, if it ended at its bound of time or rows and not at the last message. It completes the
    /// sentence "The search ...".
    pub extent: Option<String>,
    pub sql: String,
}

/// The page of `tab` after the cursor `after`, of the messages that match the filter. `lanes` is about the number of
/// lanes of the database. `reversed` has no effect unless the tab `can_reverse`.
///
/// The history has no index in order of time, only a BRIN index with the range of each few blocks. So it is read by
/// windows of time that grow until the page is full.
pub async fn page<S: Fetch>(
    session: &S,
    lanes: usize,
    tab: MessageStatus,
    reversed: bool,
    filter: &Filter,
    after: &[String],
) -> Result<Page, Failure> {
    let bounds = SearchBounds {
        rows: PAGE,
        read_max: read_max(lanes, tab, filter),
        by_delivery: true,
        budget: HISTORY_BUDGET,
    };
    search(session, &[tab], reversed, filter, after, bounds).await
}

/// The newest messages of all statuses that match the filter, the highest seq first; of those that ended, the ones that
/// ended last. It has no next page.
pub async fn latest<S: Fetch>(session: &S, lanes: usize, filter: &Filter) -> Result<Page, Failure> {
    const ENDED: &[MessageStatus] = &[MessageStatus::Published, MessageStatus::Discarded];
    let bounds = SearchBounds {
        rows: PAGE,
        read_max: read_max(lanes, MessageStatus::Ready, filter),
        by_delivery: true,
        budget: HISTORY_BUDGET,
    };
    let others: Vec<MessageStatus> = MessageStatus::ALL
        .iter()
        .copied()
        .filter(|status| !status.has_ended())
        .collect();
    let request = SearchRequest {
        statuses: &others,
        filter,
        span_s: None,
        by_delivery: false,
        descending: true,
        after: &[],
        page_rows: PAGE_ROWS,
        read_max: Some(bounds.read_max),
    };
    let found = request.run(session).await?;
    let mut page = search(session, ENDED, false, filter, &[], bounds).await?;
    page.sql = format!("{};\n{}", request.to_show(), page.sql);
    page.next = None;
    if found.end.is_some() && !filter.is_empty() {
        page.extent = Some(format!("covered the newest {} messages of each lane", bounds.read_max));
    }
    page.rows.extend(found.rows);
    page.rows
        .sort_by_key(|row| (Reverse(row.number("seq")), row.text("destination").map(str::to_owned)));
    page.rows.truncate(PAGE);
    Ok(page)
}

/// How many messages of `tab` match the filter, as far as a search with less work than that of a page finds them, and
/// whether there may be more.
pub async fn matches<S: Fetch>(
    session: &S,
    lanes: usize,
    tab: MessageStatus,
    filter: &Filter,
) -> Result<(usize, bool), Failure> {
    let rows = if filter.asks_for_events() {
        COUNT_EVENTS
    } else {
        SCAN_ROWS
    };
    let lanes = i32::try_from(lanes.max(1)).unwrap_or(i32::MAX);
    let bounds = SearchBounds {
        rows: MATCHES_MAX,
        read_max: if is_of_lanes(tab) { (rows / lanes).max(5) } else { rows },
        // No index has dead letters in order of their end.
        by_delivery: tab != MessageStatus::Dead,
        budget: COUNT_BUDGET,
    };
    let found = search(session, &[tab], false, filter, &[], bounds).await?;
    Ok((found.rows.len(), found.next.is_some() || found.extent.is_some()))
}

#[derive(Clone, Copy)]
struct SearchBounds {
    /// Of the page.
    rows: usize,
    /// The most rows to read; in a tab that is read lane by lane, of each lane.
    read_max: i32,
    /// In order of delivery, not of seq.
    by_delivery: bool,
    /// For the history.
    budget: Duration,
}

/// The messages of these statuses, which have one order, in that order.
async fn search<S: Fetch>(
    session: &S,
    statuses: &[MessageStatus],
    reversed: bool,
    filter: &Filter,
    after: &[String],
    bounds: SearchBounds,
) -> Result<Page, Failure> {
    let (started, tab, read_max) = (Instant::now(), statuses[0], bounds.read_max);
    let (mut page, mut after, mut covered_s) = (Page::default(), after.to_vec(), 0);
    loop {
        let window_s = Some((covered_s * 7).max(1)).filter(|window_s| covered_s + window_s < OLDEST_S);
        let request = SearchRequest {
            statuses,
            filter,
            span_s: window_s.filter(|_| tab.has_ended()),
            by_delivery: bounds.by_delivery,
            descending: tab.is_latest_first(reversed),
            after: &after,
            page_rows: bounds.rows as i32 + 1,
            read_max: Some(read_max),
        };
        page.sql = request.to_show();
        let found = match request.run(session).await {
            Err(failure) if tab.has_ended() && failure.is(&SqlState::QUERY_CANCELED) => {
                page.extent = Some(match covered_s {
                    0 => "took too long".to_owned(),
                    _ => format!("{}; a search of older messages takes too long", covered(covered_s)),
                });
                break;
            }
            found => found?,
        };
        page.rows.extend(found.rows);
        let Some((bound, cursor)) = found.end.filter(|_| page.rows.len() <= bounds.rows) else {
            break; // the page is full, or there are no more
        };
        covered_s += request.span_s.unwrap_or_default();
        after = cursor;
        if bound == SearchBound::Rows || started.elapsed() > bounds.budget {
            let scope = if is_of_lanes(tab) { " of each lane" } else { "" };
            page.extent = match bound {
                SearchBound::Rows if filter.is_empty() => None,
                SearchBound::Rows => Some(format!("covered {read_max} messages{scope}")),
                SearchBound::Time => Some(covered(covered_s)),
            };
            page.next = Some(after);
            break;
        }
    }
    if page.rows.len() > bounds.rows {
        page.rows.truncate(bounds.rows);
        page.next = page.rows.last().map(|row| row.cursor.clone());
    }
    Ok(page)
}

fn covered(seconds: i64) -> String {
    format!("covered the last {}", duration(seconds as f64))
}

fn is_of_lanes(tab: MessageStatus) -> bool {
    matches!(tab, MessageStatus::Ready | MessageStatus::InFlight)
}

/// The most rows to read; in a tab that is read lane by lane, of each lane. A page is correct with any number: it ends
/// at the first lane that was not read to its end.
fn read_max(lanes: usize, tab: MessageStatus, filter: &Filter) -> i32 {
    let is_plain =
        filter.is_empty() && matches!(tab, MessageStatus::Ready | MessageStatus::Blocked | MessageStatus::Dead);
    let lanes = i32::try_from(lanes.max(1)).unwrap_or(i32::MAX);
    let (all, each) = match is_of_lanes(tab) {
        true => (SCAN_LANES / lanes, SCAN_LANE),
        false => (SCAN_ROWS, SCAN_ROWS),
    };
    all.clamp(5, if is_plain { PAGE_ROWS } else { each })
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
        assert_eq!(read_max(16, MessageStatus::Ready, &Filter::default()), PAGE_ROWS);
        assert_eq!(read_max(16, MessageStatus::Ready, &of_key()), SCAN_LANE);
        assert_eq!(read_max(3200, MessageStatus::Ready, &of_key()), 10);
        assert_eq!(read_max(100_000, MessageStatus::InFlight, &of_key()), 5);
    }

    #[test]
    fn only_a_tab_that_is_cheap_in_both_directions_is_reversed() {
        for tab in MessageStatus::ALL.iter().copied() {
            let turned = tab.is_latest_first(true) != tab.is_latest_first(false);
            assert_eq!(turned, tab.can_reverse(), "{tab:?}");
        }
    }
}
