//! Failed messages by the cause of their failure: in the tabs Retrying and Dead in place of a page of equal lines, in
//! the confirmation of an action, and for the recent errors. It reads a bounded number of messages, also if there are
//! millions.

use super::format::{capped, distance, encode, message_path};
use super::search;
use super::session_pool::MonitorSession;
use crate::failure::Failure;
use crate::format::{capitalised, counted};
use crate::messages::bulk::Verb;
use crate::messages::page::MessageRow;
use crate::queries::Fetch;
use crate::queries::state::MessageStatus;
use maud::{Markup, html};
use outbox_core::error_group;
use outbox_core::words::Word;
use serde::Deserialize;

/// The most messages that are read.
const READ_MAX: i64 = 1000;
/// A cause of fewer messages is no reason to leave the list of single messages.
const WORTHWHILE: i64 = 5;

/// Messages to one destination with equal errors.
#[derive(Deserialize)]
struct EqualErrors {
    destination: String,
    error: String,
    n: i64,
    last_seq: i64,
    last_at: String,
}

/// Those with the highest seqs.
const DEAD: &str = "
    select destination, left(reason, 2000) as error, count(*) as n, max(seq) as last_seq, max(died_at) as last_at
    from (select * from @extschema@.outbox_dead order by seq desc limit $1) d group by 1, 2";
/// Those that are due first.
const RETRYING: &str = "
    select destination, left(coalesce(last_error, 'no error is recorded'), 2000) as error, count(*) as n, max(seq) as last_seq, min(due_at) as last_at
    from (select * from @extschema@.outbox_waiting where due_at is not null order by due_at limit $1) w
    where state = 'b' group by 1, 2";

/// The groups of a tab, the largest first.
pub struct Causes(Vec<EqualErrors>);

impl Causes {
    /// Of a tab; only Retrying and Dead have causes.
    pub async fn read(session: &MonitorSession, tab: MessageStatus) -> Result<Self, Failure> {
        let sql = match tab {
            MessageStatus::Dead => DEAD,
            MessageStatus::Retrying => RETRYING,
            _ => return Ok(Self(Vec::new())),
        };
        Ok(Self::of(session.fetch(sql, &[&READ_MAX]).await?))
    }

    /// Of the messages of a page. The type of an event stands for the cause of a message that has none.
    pub fn of_page(rows: &[MessageRow]) -> Self {
        let one = |row: &MessageRow| EqualErrors {
            destination: row.text("destination").unwrap_or_default().to_owned(),
            error: row
                .text("last_error")
                .or(row.text("type"))
                .unwrap_or("no error")
                .to_owned(),
            n: 1,
            last_seq: row.number("seq"),
            last_at: row.text("ended_at").unwrap_or_default().to_owned(),
        };
        Self::of(rows.iter().map(one).collect())
    }

    /// Whether so many messages have one cause that single lines would hide the others.
    pub fn are_worthwhile(&self) -> bool {
        self.0.first().is_some_and(|first| first.n >= WORTHWHILE)
    }

    /// Messages of a group of `outbox_errors`. None: not known, because further messages were not read.
    pub fn number(&self, destination: &str, error: &str) -> Option<i64> {
        let found = self
            .0
            .iter()
            .find(|cause| cause.destination == destination && cause.error == error);
        found.map(|cause| cause.n).or((self.total() < READ_MAX).then_some(0))
    }

    fn total(&self) -> i64 {
        self.0.iter().map(|cause| cause.n).sum()
    }

    /// Joins errors that differ in numbers and ids only.
    fn of(errors: Vec<EqualErrors>) -> Self {
        let mut causes: Vec<EqualErrors> = Vec::new();
        for mut error in errors {
            error.error = error_group::group(&error.error);
            let same = |known: &&mut EqualErrors| known.destination == error.destination && known.error == error.error;
            match causes.iter_mut().find(same) {
                Some(known) => {
                    known.n += error.n;
                    known.last_seq = known.last_seq.max(error.last_seq);
                    known.last_at = std::mem::take(&mut known.last_at).max(error.last_at);
                }
                None => causes.push(error),
            }
        }
        causes.sort_by_key(|cause| -cause.n);
        Self(causes)
    }

    /// How many messages of how many causes.
    pub fn about(&self) -> String {
        let n = self.total();
        let causes = counted(self.0.len() as i64, "cause", "causes");
        match n >= READ_MAX {
            true => format!("{causes} of {} messages", capped(n, READ_MAX)),
            false => format!("{causes} of {}", counted(n, "message", "messages")),
        }
    }

    pub fn list(&self) -> Markup {
        html! { ul.sample { @for cause in &self.0 { li { b { (capped(cause.n, READ_MAX)) " ×" } " " (cause.error) " to " (cause.destination) } } } }
    }

    pub fn table(&self, tab: MessageStatus, verbs: &[Verb], now_s: f64) -> Markup {
        // Only dead letters are chosen by a search; the others are retried one by one.
        let verbs = if tab == MessageStatus::Dead { verbs } else { &[] };
        html! {
            div.scroll tabindex="0" role="region" aria-label="Causes" { table.stack.causes {
                thead { tr { th.n { "Messages" } th { "Cause" } th { "Destination" } th { (tab.time_title()) } @if !verbs.is_empty() { th { "Actions" } } } }
                tbody { @for cause in &self.0 {
                    @let search = encode(&search::of_group(&cause.destination, &cause.error));
                    tr data-of={ (cause.destination) " " (cause.error) } {
                        td.n data-label="Messages" { b { (capped(cause.n, READ_MAX)) " ×" } }
                        td data-label="Cause" {
                            @if cause.n == 1 { a href=(message_path(cause.last_seq, &cause.destination)) { (cause.error) } }
                            @else { a href={ (tab.path()) "&q=" (search) } { (cause.error) } }
                        }
                        td data-label="Destination" { (cause.destination) }
                        td.time data-label=(tab.time_title()) { (distance(&cause.last_at, now_s)) }
                        @if !verbs.is_empty() { td.time data-label="Actions" { @for verb in verbs {
                            a.button.danger[*verb == Verb::Discard] href={ "act/bulk?verb=" (verb.name()) "&q=" (search) } { (capitalised(verb.name())) " group…" } " "
                        } } }
                    }
                } }
            } }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_that_differ_in_numbers_have_one_cause() {
        let error = |destination: &str, error: &str, n, last_seq| EqualErrors {
            destination: destination.into(),
            error: error.into(),
            n,
            last_seq,
            last_at: format!("2026-01-01T00:00:{last_seq:02}+00:00"),
        };
        let causes = Causes::of(vec![
            error("a", "order-17 is lost", 2, 7),
            error("b", "order-17 is lost", 1, 8),
            error("a", "order-1829 is lost", 3, 9),
        ]);
        let of = |cause: &EqualErrors| (cause.destination.clone(), cause.n, cause.last_seq);
        assert_eq!(
            causes.0.iter().map(of).collect::<Vec<_>>(),
            [("a".into(), 5, 9), ("b".into(), 1, 8)]
        );
        assert!(causes.0[0].last_at.contains(":09") && causes.0[0].error == "order-# is lost");
        assert_eq!(causes.about(), "2 causes of 6 messages");
        assert_eq!(causes.number("a", "order-# is lost"), Some(5));
        assert_eq!(causes.number("a", "another"), Some(0));
        let cut = Causes::of(vec![error("a", "lost", READ_MAX, 1)]);
        assert_eq!(cut.number("a", "another"), None);
    }
}
