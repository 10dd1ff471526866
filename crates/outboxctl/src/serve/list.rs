//! The list of messages: a tab for each status, a search, and the actions on the messages that are shown.

use super::act::act_path;
use super::context::{Fields, PageContext};
use super::format::{capped, count, encode, message_path};
use super::message::seq_of;
use super::page::{MonitorPage, as_sql, problem};
use super::search::{self, WORDS};
use super::session::MonitorSession;
use super::snapshot::{DEAD_CAP, MonitorSnapshot, WAITING_CAP};
use super::tab::TABS;
use crate::failure::{Code, Failure};
use crate::format::{capitalised, utc};
use crate::messages::bulk::Verb;
use crate::messages::page::MessageRow;
use crate::messages::{Filter, filter, tab};
use crate::queries::state::MessageStatus;
use crate::queries::why;
use axum::extract::Form;
use axum::response::{IntoResponse, Redirect, Response};
use maud::{Markup, html};
use outbox_core::words::Word;
use std::collections::HashMap;
use std::sync::Arc;
use tokio_postgres::error::SqlState;

/// The most characters of an error in a list.
const ERROR_MAX: usize = 500;

struct MessageList {
    context: PageContext,
    tab: MessageStatus,
    search: String,
    /// The cursors of the pages before this one, without the first page; the last is that of this page.
    trail: Vec<Vec<String>>,
    /// Whether the tab is shown in the reverse of its usual order.
    reversed: bool,
    /// Whether events can be read, to show them and to search in them.
    reads_events: bool,
    /// Why each message waits, by seq and destination, in the tabs that show it.
    reasons: HashMap<(i64, String), String>,
}

pub async fn list(context: PageContext, Form(fields): Form<Fields>) -> Response {
    // The fields with a name make a search like a typed one.
    let named = WORDS
        .iter()
        .filter_map(|word| Some(search::word(word, fields.given(word)?)));
    let words: Vec<String> = fields.given("q").map(str::to_owned).into_iter().chain(named).collect();
    let search = words.join(" ");
    // A number alone is a seq, and a UUID alone is an id.
    let mut seq = search.parse::<i64>().ok();
    if let Ok(id) = filter::uuid(&search) {
        let found = context.app.pool.read(async |session| seq_of(session, &id).await).await;
        seq = found.ok().flatten();
    }
    if let Some(seq) = seq {
        return Redirect::to(&format!("/message/{seq}")).into_response();
    }
    let tab = MessageStatus::parse(fields.get("tab")).unwrap_or(MessageStatus::Ready);
    let mut list = MessageList {
        tab,
        search,
        trail: serde_json::from_str(fields.get("trail")).unwrap_or_default(),
        reversed: tab.can_reverse() && fields.get("order") == "reversed",
        reads_events: false,
        reasons: HashMap::new(),
        context,
    };
    let app = Arc::clone(&list.context.app);
    let found = match search::parse(&list.search) {
        Err(problem) => Err(Failure::new(Code::Usage, problem)),
        Ok(filter) => app.pool.read(async |session| list.read(session, &filter).await).await,
    };
    let answer = match found {
        Err(failure) if failure.is(&SqlState::TOO_MANY_CONNECTIONS) => Err(failure),
        Err(failure) if failure.is(&SqlState::QUERY_CANCELED) => Ok(Err(
            "It took too long. Narrow it by destination: or partition:, or look for a seq.".to_owned(),
        )),
        found => Ok(found.map_err(|failure| failure.to_string())),
    };
    list.context.answer(answer.map(|found| list.page(&found)))
}

/// The class of the number of a tab that has failures.
fn alarm(tab: MessageStatus, number: &str) -> &'static str {
    match tab {
        MessageStatus::Retrying if number != "0" => " warn",
        MessageStatus::Dead if number != "0" => " bad",
        _ => "",
    }
}

impl MessageList {
    async fn read(&mut self, session: &MonitorSession, filter: &Filter) -> Result<tab::Page, Failure> {
        self.reads_events = session.reads_events;
        let lanes = self.snapshot().map_or(1, MonitorSnapshot::lanes);
        let after = self.trail.last().cloned().unwrap_or_default();
        let page = tab::page(session, lanes, self.tab, self.reversed, filter, &after).await?;
        if self.tab.shows_reasons() && !page.rows.is_empty() {
            let rows = page.rows.iter().map(|row| row.message.clone()).collect();
            self.reasons = why::of_list(session, rows).await?;
        }
        Ok(page)
    }

    fn snapshot(&self) -> Option<&MonitorSnapshot> {
        self.context.view.snapshot.as_ref()
    }

    /// The address of this list, in an order and at a page.
    fn path(&self, reversed: bool, trail: &[Vec<String>]) -> String {
        let order = if reversed { "&order=reversed" } else { "" };
        let page = match trail {
            [] => String::new(),
            trail => format!("&trail={}", encode(&serde_json::json!(trail).to_string())),
        };
        format!("{}{order}{page}", self.tab_path(self.tab))
    }

    fn tab_path(&self, tab: MessageStatus) -> String {
        format!("{}&q={}", tab.path(), encode(&self.search))
    }

    /// The number of messages of a tab, if it is known without a search.
    fn count(&self, tab: MessageStatus) -> Option<String> {
        let snapshot = self.snapshot().filter(|_| self.search.is_empty())?;
        let waiting = snapshot.slow.waiting.as_ref();
        match tab {
            MessageStatus::Ready => {
                let depths = snapshot.slow.depths.as_ref()?;
                let is_cut = depths.lanes.iter().any(|lane| lane.depth >= depths.cap);
                let sum: i64 = depths.lanes.iter().map(|lane| lane.depth).sum();
                let ready = (sum - snapshot.status.in_flight.unwrap_or(0)).max(0);
                Some(format!("{}{}", count(ready), if is_cut { "+" } else { "" }))
            }
            MessageStatus::InFlight => snapshot.status.in_flight.map(count),
            MessageStatus::Dead => Some(capped(snapshot.status.dead, DEAD_CAP)),
            MessageStatus::Retrying => waiting.map(|waiting| waiting.shown(waiting.retrying)),
            MessageStatus::Scheduled => waiting.map(|waiting| waiting.shown(waiting.scheduled)),
            MessageStatus::Blocked => waiting.map(|waiting| capped(waiting.blocked, WAITING_CAP)),
            MessageStatus::Published | MessageStatus::Discarded => None,
        }
    }

    /// The page, with the messages or the reason why the search failed.
    fn page(&self, found: &Result<tab::Page, String>) -> Markup {
        let body = html! {
            @if let Some(pending) = self.snapshot().and_then(|snapshot| snapshot.status.pending) {
                p.lead { (count(pending)) " pending: ready, in flight, retrying, blocked and scheduled together." }
            }
            nav.tabs aria-label="States" { ul { @for tab in TABS {
                li { a href=(self.tab_path(tab)) aria-current=[(tab == self.tab).then_some("page")] {
                    (tab.title()) @if let Some(number) = self.count(tab) { " " span class={ "count" (alarm(tab, &number)) } { (number) } }
                } }
            } } }
            form.search role="search" method="get" action="/messages" {
                input type="hidden" name="tab" value=(self.tab.word());
                label for="q" { "Search" }
                input #q type="search" name="q" value=(self.search) placeholder="an id, a key, a correlation id, or type:OrderPlaced since:2h"
                    autocomplete="off" spellcheck="false" aria-describedby="q-help";
                button { "Search" }
            }
            p.note #q-help { "A word, or: " @for word in WORDS { code { (word) ":" } " " } "– all of them must match." }
            (self.fields())
            p.lead { (self.tab.about()) }
            // The script requests it again when messages have changed, only for the first page: others would shift.
            div #list data-refresh=[self.trail.is_empty().then_some("")] {
                @match found {
                    Ok(page) => { (self.messages(page)) }
                    Err(text) => { (problem("The search failed", text)) }
                }
            }
        };
        self.context.layout(MonitorPage::Messages, "Messages", &body)
    }

    /// The criteria of a search as fields; the server makes a search of them.
    fn fields(&self) -> Markup {
        let snapshot = self.snapshot();
        let destinations = snapshot.iter().flat_map(|snapshot| &snapshot.destinations);
        let partitions = snapshot.iter().flat_map(|snapshot| &snapshot.partitions);
        let fields = [
            ("destination", "Destination", Some("f-destinations"), ""),
            ("partition", "Partition", Some("f-partitions"), "p07"),
            ("key", "Key", None, "order:42"),
            ("error", "Error contains", None, "timeout"),
            ("since", "Since", Some("f-times"), "2h"),
            ("type", "Type", None, "OrderPlaced"),
            ("agg", "Aggregate", None, "order:42"),
            ("correlation", "Correlation id", None, ""),
        ];
        let shown = if self.reads_events { 8 } else { 5 }; // the others search in events
        html! {
            details.fields {
                summary { "Search by fields" }
                form method="get" action="/messages" {
                    input type="hidden" name="tab" value=(self.tab.word());
                    @for (name, label, options, hint) in &fields[..shown] { div {
                        label for={ "f-" (name) } { (label) }
                        input id={ "f-" (name) } name=(name) list=[options] placeholder=(hint) autocomplete="off" spellcheck="false";
                    } }
                    datalist #f-destinations { @for destination in destinations { option value=(destination.name) {} } }
                    datalist #f-partitions { @for partition in partitions { option value=(partition.label) {} } }
                    datalist #f-times { @for time in ["15m", "1h", "6h", "1d", "7d"] { option value=(time) {} } }
                    button { "Search" }
                }
            }
        }
    }

    /// The actions on messages of this tab.
    fn verbs(&self) -> &'static [Verb] {
        if self.context.viewer.may_act {
            self.tab.verbs()
        } else {
            &[]
        }
    }

    fn messages(&self, page: &tab::Page) -> Markup {
        html! {
            (self.bulk())
            @if page.rows.is_empty() {
                p.empty { @if self.search.is_empty() { "None." } @else { "No message matches the search." } }
            } @else {
                @if !self.verbs().is_empty() {
                    form.bulk #selected method="get" action="/act/message" {
                        span.note { "With the selected: " }
                        @for verb in self.verbs() { button name="verb" value=(verb.name()) { (capitalised(verb.name())) "…" } }
                    }
                }
                (self.table(&page.rows))
            }
            p.pages {
                @if let Some(looked) = &page.looked { span.note { "The search " (looked) ". " } }
                @if let [before @ .., _] = &self.trail[..] { a.button rel="prev" href=(self.path(self.reversed, before)) { "Previous page" } }
                @if let Some(next) = &page.next {
                    a.button rel="next" href=(self.path(self.reversed, &[&self.trail[..], std::slice::from_ref(next)].concat())) {
                        @if page.looked.is_some() { "Search further" } @else { "Next page" }
                    }
                }
            }
            (as_sql(&page.sql))
        }
    }

    /// The actions on all messages that match the search.
    fn bulk(&self) -> Markup {
        let has_bulk = matches!(
            self.tab,
            MessageStatus::Dead | MessageStatus::Published | MessageStatus::Discarded
        );
        html! {
            @if has_bulk && !self.verbs().is_empty() {
                p.bulk {
                    span.note { @if self.search.is_empty() { "With all of them: " } @else { "With all that the search finds: " } }
                    @for verb in self.verbs() {
                        a.button href={ "/act/bulk?verb=" (verb.name()) "&q=" (encode(&self.search)) } { (capitalised(verb.name())) " all…" }
                    }
                }
            }
        }
    }

    fn table(&self, rows: &[MessageRow]) -> Markup {
        let (verbs, why) = (
            self.verbs(),
            if self.tab.shows_reasons() {
                "Waits because"
            } else {
                "Error"
            },
        );
        html! {
            div.scroll tabindex="0" role="region" aria-label="Messages" { table.stack {
                thead { tr {
                    @if !verbs.is_empty() { th { input #select-all type="checkbox" aria-label="Select all on this page"; } }
                    th { "Seq" } @if self.reads_events { th { "Type" } } th { "Key" } th { "Destination" } th { "Partition" }
                    th.n { "Attempts" } (self.time_head()) th { (why) } @if !verbs.is_empty() { th { "Actions" } }
                } }
                tbody { @for row in rows {
                    @let (seq, destination) = (row.number("seq"), row.text("destination").unwrap_or_default());
                    @let (text, key) = (|name| row.text(name).unwrap_or("–"), format!("{seq} {destination}"));
                    @let at = ["ended_at", "available_at", "enqueued_at"].iter().find_map(|time| row.text(time));
                    tr data-of=(key) {
                        @if !verbs.is_empty() {
                            td data-label="Select" { input type="checkbox" name="m" form="selected" value=(key) aria-label={ "Select message " (seq) }; }
                        }
                        td data-label="Seq" { a href=(message_path(seq, destination)) { (seq) } }
                        @if self.reads_events { td data-label="Type" { (text("type")) } }
                        td data-label="Key" { (text("key")) }
                        td data-label="Destination" { (destination) }
                        td data-label="Partition" { (text("partition_key")) }
                        td.n data-label="Attempts" { (row.number("attempts")) @if row.message["replayed"] == true { " " span.badge.plain { "replay" } } }
                        td.time data-label=(self.tab.time_title()) { (utc(at.unwrap_or_default())) }
                        td.error data-label=(why) {
                            @if self.tab.shows_reasons() {
                                (self.reasons.get(&(seq, destination.to_owned())).map_or("–", String::as_str))
                            } @else {
                                @if row.blocks { span.badge.warn { "blocks its key" } " " }
                                @for c in text("last_error").chars().take(ERROR_MAX) { (c) }
                            }
                        }
                        @if !verbs.is_empty() { td.time data-label="Actions" {
                            @for verb in verbs { a href=(act_path(*verb, seq, destination)) { (capitalised(verb.name())) } " " }
                        } }
                    }
                } }
            } }
        }
    }

    /// The head of the column of times. It turns the order of the list around where the tab has both.
    fn time_head(&self) -> Markup {
        let title = html! { (self.tab.time_title()) " (UTC)" };
        if !self.tab.can_reverse() {
            return html! { th { (title) } };
        }
        let (sort, arrow, other) = match self.tab.is_latest_first(self.reversed) {
            true => ("descending", "▼", "Show the earliest first"),
            false => ("ascending", "▲", "Show the latest first"),
        };
        html! {
            th aria-sort=(sort) { a href=(self.path(!self.reversed, &[])) title=(other) { (title) " " span aria-hidden="true" { (arrow) } } }
        }
    }
}
