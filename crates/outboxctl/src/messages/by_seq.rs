//! Pages of messages of any status in order of seq. A page is full if enough messages match. So with a filter that few
//! messages match, the query searches all of them.

use super::filter::{Events, Filter};
use super::page::{self, Candidates, FetchOnce, MessageRow, PageOrder, Position, RowSource, events_for};
use super::sql::Sql;
use crate::queries::message::MessageTable;
use crate::queries::state::MessageStatus;
use clap::Args;
use outbox_core::words::Word;
use serde::Deserialize;

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
    /// At most this many messages, plus any others of the last seq
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(i64).range(1..=100_000))]
    limit: i64,
    /// Show the highest seq first; --after then continues downwards
    #[arg(long)]
    newest_first: bool,
}

/// Reads a page in order of seq.
pub async fn page<S: FetchOnce>(session: &S, request: &BySeq) -> Result<Vec<MessageRow>, S::Error> {
    let events = events_for(session, &request.filter).await?;
    let mut rows = Vec::new();
    let current = request.current(events);
    if !current.is_empty() {
        rows = request.found(session, &current, events).await?;
    }
    if request.wants(MessageTable::History) {
        rows.extend(request.history(session, events).await?);
    }
    request.sort_and_cut(&mut rows);
    Ok(rows)
}

impl BySeq {
    /// Whether the page is full, so that more messages may follow.
    pub fn is_full(&self, rows: &[MessageRow]) -> bool {
        rows.len() >= self.limit()
    }

    /// Whether an index of `outbox` or of the events returns the messages in order. If not, one statement searches all
    /// of `outbox` and sorts the matches: to read it page by page would search as much, in a worse order.
    pub fn is_along_an_index(&self) -> bool {
        let filter = &self.filter;
        let is_selective =
            filter.key.is_some() || filter.error_like.is_some() || filter.since.is_some() || filter.word.is_some();
        !is_selective && self.wanted(MessageTable::Outbox).contains(&MessageStatus::Ready)
    }

    fn limit(&self) -> usize {
        usize::try_from(self.limit).unwrap_or(usize::MAX)
    }

    fn wants(&self, table: MessageTable) -> bool {
        !self.wanted(table).is_empty()
    }

    /// The wanted statuses of the messages in a table. Without --status dead letters are included, because an operator
    /// must decide about each.
    fn wanted(&self, table: MessageTable) -> Vec<MessageStatus> {
        let is_wanted = |status: &MessageStatus| match self.statuses.is_empty() {
            true => self.filter.id.is_some() || !status.has_ended(),
            false => self.statuses.contains(status),
        };
        table.statuses().filter(is_wanted).collect()
    }

    async fn found<S: FetchOnce>(&self, session: &S, rows: &Sql, events: Events) -> Result<Vec<MessageRow>, S::Error> {
        let candidates = Candidates::all(rows);
        let statement = self
            .position(&[])
            .statement(&candidates, &Sql::default(), self.limit(), events);
        Ok(page::found(session, &statement).await?.rows)
    }

    fn position<'a>(&self, after: &'a [String]) -> Position<'a> {
        let order = PageOrder {
            keys: &[("seq", "bigint")],
            descending: self.newest_first,
        };
        Position { order, after }
    }

    /// The messages that have not ended, and the dead letters.
    fn current(&self, events: Events) -> Sql {
        let after: Vec<String> = self.after.iter().map(i64::to_string).collect();
        let position = self.position(&after);
        let limit = self.limit();
        let plain = |table: MessageTable| {
            let source = RowSource::new(table);
            position.rows(&source, &self.conditions(&source, events), limit)
        };
        let mut parts = Vec::new();
        if self.wants(MessageTable::Outbox) {
            let mut source = RowSource::new(MessageTable::Outbox);
            let lanes = self.filter.of_lane(|column| format!("l.{column}"));
            parts.push(match (self.is_along_an_index(), self.filter.asks_for_events()) {
                (true, true) if events == Events::InSource => plain(MessageTable::Outbox),
                (true, false) => {
                    position.rows_of_lanes(&source, &lanes, &self.conditions(&source, events), limit)
                }
                (true, true) => {
                    // Read the events in order of seq, and look up their messages in `outbox`, whose index begins with
                    // the lane.
                    source.from = "@extschema@.outbox_events e cross join outbox_internal.first_pending l cross join lateral (
    select * from @extschema@.outbox x where x.destination = l.destination and x.partition = l.partition and x.seq = e.seq offset 0) t"
                        .into();
                    source.seq = "e.seq";
                    let mut conditions = Sql::new("\n  and e.seq >= (select min(f.seq) from outbox_internal.first_pending f)");
                    conditions
                        .append(&self.filter.on_events())
                        .append(&lanes)
                        .append(&self.conditions_on_messages(&source));
                    position.rows(&source, &conditions, limit)
                }
                (false, _) => plain(MessageTable::Outbox),
            });
        }
        let others = [MessageTable::Waiting, MessageTable::Dead].into_iter();
        parts.extend(others.filter(|table| self.wants(*table)).map(plain));
        let mut rows = Sql::default();
        for part in &parts {
            let before = if rows.is_empty() { "(" } else { "\nunion all (" };
            rows.push(before).append(part).push(")");
        }
        rows
    }

    fn conditions(&self, source: &RowSource, events: Events) -> Sql {
        let mut sql = self.conditions_on_messages(source);
        sql.append(&self.filter.of_event(|column| source.name(column), events));
        sql
    }

    fn conditions_on_messages(&self, source: &RowSource) -> Sql {
        let since = match source.table {
            MessageTable::Outbox | MessageTable::Waiting => "enqueued_at",
            MessageTable::Dead | MessageTable::History => "ended_at",
        };
        let mut sql = self.filter.of_message(|column| source.name(column), since);
        let wanted = self.wanted(source.table);
        if wanted.len() < source.table.statuses().count() {
            let words: Vec<String> = wanted.iter().map(|status| format!("'{}'", status.name())).collect();
            sql.push(&format!("\n  and {} in ({})", source.name("status"), words.join(", ")));
        }
        sql
    }

    /// The messages that have ended. They are read by ranges of seq from the start of the page until it is full.
    async fn history<S: FetchOnce>(&self, session: &S, events: Events) -> Result<Vec<MessageRow>, S::Error> {
        #[derive(Deserialize)]
        struct SeqRange {
            lowest: i64,
            highest: i64,
        }
        let mut seqs = SeqRange { lowest: 1, highest: 0 };
        // Else the range of the seqs is unknown, so all of the history is read as one range.
        if events == Events::Stored {
            let sql = "select coalesce(min(seq), 1) as lowest, coalesce(max(seq), 0) as highest from @extschema@.outbox_events";
            seqs = session.fetch_once(&Sql::new(sql)).await?.pop().unwrap_or(seqs);
        }
        let ended = RowSource::new(MessageTable::History);
        let mut rows = Vec::new();
        for (from, to) in self.ranges(seqs.lowest, seqs.highest) {
            let mut conditions = self.conditions(&ended, events);
            conditions.push("\n  and t.seq between ").value(from, "bigint");
            conditions.push(" and ").value(to, "bigint");
            let part = self.position(&[]).rows(&ended, &conditions, self.limit());
            rows.extend(self.found(session, &part, events).await?);
            if self.is_full(&rows) {
                break;
            }
        }
        Ok(rows)
    }

    /// Ranges of seq in the order of the page, each eight times as wide as the previous one. The last range has no end,
    /// because an event may be removed before its message.
    fn ranges(&self, lowest: i64, highest: i64) -> Vec<(i64, i64)> {
        const FIRST: i64 = 20_000;
        let (first, last) = match (self.newest_first, self.after) {
            (false, after) => (after.map_or(i64::MIN, |after| after.saturating_add(1)), i64::MAX),
            (true, after) => (after.map_or(i64::MAX, |after| after.saturating_sub(1)), i64::MIN),
        };
        let (begin, end, step) = match self.newest_first {
            false => (lowest.max(first), highest, 1),
            true => (highest.min(first), lowest, -1),
        };
        let is_before_end = |seq: i64| if self.newest_first { seq > end } else { seq < end };
        let mut ranges = Vec::new();
        let (mut from, mut width) = (first, FIRST);
        let mut to = begin.saturating_add(step * width);
        while is_before_end(to) {
            ranges.push((from.min(to), from.max(to)));
            width = width.saturating_mul(8);
            from = to + step;
            to = from.saturating_add(step * width);
        }
        ranges.push((from.min(last), from.max(last)));
        ranges
    }

    /// Sorts by seq, and cuts at the limit. The messages of one seq stay together, so that the next page can begin
    /// after that seq.
    fn sort_and_cut(&self, rows: &mut Vec<MessageRow>) {
        let seq = |row: &MessageRow| row.number("seq");
        rows.sort_by(|a, b| {
            let by_seq = match self.newest_first {
                true => seq(b).cmp(&seq(a)),
                false => seq(a).cmp(&seq(b)),
            };
            by_seq.then_with(|| a.text("destination").cmp(&b.text("destination")))
        });
        let limit = self.limit();
        if let Some(last) = rows.get(limit.saturating_sub(1)).map(seq) {
            let end = rows.iter().skip(limit).position(|row| seq(row) != last);
            rows.truncate(end.map_or(rows.len(), |more| limit + more));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use serde_json::{from_value, json};

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        request: BySeq,
    }

    fn request(args: &[&str]) -> BySeq {
        Cli::parse_from(["test"].iter().chain(args)).request
    }

    #[test]
    fn a_page_ends_at_its_limit_but_not_within_a_seq() {
        let row = |seq: &i64| from_value(json!({ "seq": seq, "destination": "d", "blocks": false, "cursor": [] }));
        let page = |seqs: &[i64], args: &[&str]| -> Vec<i64> {
            let mut rows: Vec<MessageRow> = seqs.iter().map(|seq| row(seq).expect("a row")).collect();
            request(args).sort_and_cut(&mut rows);
            rows.iter().map(|row| row.number("seq")).collect()
        };
        assert_eq!(page(&[4, 2, 2, 1, 2, 3], &["--limit", "2"]), [1, 2, 2, 2]);
        assert_eq!(page(&[4, 2, 3], &["--limit", "2", "--newest-first"]), [4, 3]);
        assert_eq!(page(&[1, 1, 1], &["--limit", "1"]), [1, 1, 1]);
        assert_eq!(page(&[1], &["--limit", "3"]), [1]);
        assert_eq!(page(&[], &[]), [0; 0]);
    }

    /// Every seq is in exactly one range, and the ranges are in the order of the page.
    #[test]
    fn the_ranges_of_the_history_leave_no_gap() {
        for (args, lowest, highest) in [
            (&[][..], 1, 0),
            (&[], 1, 5),
            (&[], 7_000_000, 90_000_000),
            (&["--after", "8000000"], 7_000_000, 90_000_000),
            (&["--after", "9223372036854775807"], 1, 5),
        ] {
            let up = request(args).ranges(lowest, highest);
            let first = request(args).after.map_or(i64::MIN, |after| after.saturating_add(1));
            assert_eq!((up[0].0, up[up.len() - 1].1), (first, i64::MAX), "{args:?}");
            assert!(up.windows(2).all(|pair| pair[0].1 + 1 == pair[1].0), "{up:?}");
            let args: Vec<&str> = args.iter().copied().chain(["--newest-first"]).collect();
            let down = request(&args).ranges(lowest, highest);
            let first = request(&args).after.map_or(i64::MAX, |after| after - 1);
            assert_eq!((down[0].1, down[down.len() - 1].0), (first, i64::MIN), "{args:?}");
            assert!(down.windows(2).all(|pair| pair[0].0 - 1 == pair[1].1), "{down:?}");
        }
        assert!(request(&[]).ranges(1, 1_000_000_000).len() < 10, "there are few ranges");
        let newest = request(&["--newest-first"]).ranges(1, 1_000_000);
        assert_eq!(newest[0], (980_000, i64::MAX), "the first range is narrow");
    }

    #[test]
    fn a_selective_filter_is_not_read_lane_by_lane() {
        let by_lane = |args: &[&str]| {
            request(args)
                .current(Events::Stored)
                .to_run()
                .0
                .contains("cross join lateral")
        };
        assert!(by_lane(&[]) && by_lane(&["--status", "ready", "--destination", "d", "--partition", "p01"]));
        for few in [["--status", "in-flight"], ["--key", "k"], ["--since", "1m"]] {
            assert!(!by_lane(&few), "{few:?}");
        }
    }
}
