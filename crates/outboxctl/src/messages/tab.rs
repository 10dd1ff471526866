//! Pages of messages of one status, in the order in which they are or were delivered. Each search has a bound on its rows
//! or its time, so a page costs the same with five million messages as with five. A search may end before the page is
//! full; it reports how far it came, and the next page continues from there.

use super::filter::Filter;
use super::page::{MessageRow, SearchBound, SearchRequest};
use crate::failure::Failure;
use crate::format::duration;
use crate::queries::Fetch;
use crate::queries::state::MessageStatus;
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
pub async fn page<S: Fetch>(
    session: &S,
    lanes: usize,
    tab: MessageStatus,
    reversed: bool,
    filter: &Filter,
    after: &[String],
) -> Result<Page, Failure> {
    let request = SearchRequest {
        statuses: &[tab],
        filter,
        span_s: None,
        by_delivery: true,
        descending: tab.is_latest_first(reversed),
        after,
        page_rows: PAGE_ROWS,
        read_max: Some(read_max(lanes, tab, filter)),
    };
    if tab.has_ended() {
        return history(session, request).await;
    }
    let found = request.run(session).await?;
    let mut page = Page {
        rows: found.rows,
        next: found.end.map(|(_, cursor)| cursor),
        extent: None,
        sql: request.to_show(),
    };
    let more = page.cut();
    if let (false, Some(_), Some(most)) = (more || filter.is_empty(), &page.next, request.read_max) {
        let scope = if is_of_lanes(tab) { " of each lane" } else { "" };
        page.extent = Some(format!("covered {most} messages{scope}"));
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

/// Reads a page of the history. The history has no index in order of time, only a BRIN index with the range of each few
/// blocks. So it is read by windows of time that grow until the page is full.
async fn history<S: Fetch>(session: &S, request: SearchRequest<'_>) -> Result<Page, Failure> {
    let started = Instant::now();
    let mut page = Page::default();
    let (mut after, mut covered_s) = (request.after.to_vec(), 0);
    loop {
        let span_s = Some((covered_s * 7).max(1)).filter(|span_s| covered_s + span_s < 10 * 365 * 86_400);
        let window = SearchRequest {
            after: &after,
            span_s,
            ..request
        };
        page.sql = window.to_show();
        let found = match window.run(session).await {
            Err(failure) if failure.is(&SqlState::QUERY_CANCELED) => {
                page.extent = Some(match covered_s {
                    0 => "took too long".to_owned(),
                    _ => format!("{}; a search of older messages takes too long", covered(covered_s)),
                });
                break;
            }
            found => found?,
        };
        page.rows.extend(found.rows);
        let Some((bound, cursor)) = found.end.filter(|_| page.rows.len() <= PAGE) else {
            break; // the page is full, or this was the oldest window
        };
        covered_s += span_s.unwrap_or_default();
        let is_over = started.elapsed() > HISTORY_BUDGET;
        if bound == SearchBound::Rows || is_over {
            page.extent = Some(match bound {
                SearchBound::Rows => format!("covered {SCAN_ROWS} messages"),
                SearchBound::Time => covered(covered_s),
            });
            page.next = Some(cursor);
            break;
        }
        after = cursor;
    }
    page.cut();
    Ok(page)
}

fn covered(seconds: i64) -> String {
    format!("covered the last {}", duration(seconds as f64))
}

#[cfg(test)]
mod tests {
    use super::*;
    use outbox_core::words::Word;

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
