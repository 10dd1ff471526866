//! The list of messages: the newest and a tab for each status, a search, and the actions on the messages that are shown.

use super::act::act_path;
use super::causes::Causes;
use super::context::{Fields, PageContext};
use super::format::{capped, count, distance, encode, message_path};
use super::message::seq_of;
use super::page::{MonitorPage, as_sql, badge, problem};
use super::search::{self, WORDS};
use super::session_pool::MonitorSession;
use super::snapshot::{DEAD_CAP, MonitorSnapshot, WAITING_CAP};
use super::tab::{TABS, Tab};
use crate::failure::{Code, Failure};
use crate::format::capitalised;
use crate::messages::bulk::Verb;
use crate::messages::page::MessageRow;
use crate::messages::{Filter, filter, tab};
use crate::queries::state::{MessageStatus, Toned};
use crate::queries::why;
use axum::extract::Form;
use axum::response::Response;
use maud::{Markup, html};
use outbox_core::words::Word;
use std::collections::HashMap;
use std::sync::Arc;
use tokio_postgres::error::SqlState;

/// The most characters of an error in a list.
const ERROR_MAX: usize = 500;

/// The messages before a page, and the cursor after which it begins.
type PageStart = (usize, Vec<String>);

/// What the list shows.
enum ListContent {
    Messages(tab::Page),
    Causes(Causes),
}

struct MessageList {
    context: PageContext,
    tab: Tab,
    search: String,
    /// The pages up to this one, without the first.
    trail: Vec<PageStart>,
    /// Whether messages with one cause are shown one by one.
    is_each: bool,
    /// Whether the tab is shown in the reverse of its usual order.
    reversed: bool,
    /// Whether events can be read, to show them and to search in them.
    reads_events: bool,
    /// Why each message waits, by seq and destination, in the tabs that show it.
    reasons: HashMap<(i64, String), String>,
    /// The number of messages of each tab that match the search.
    matches: HashMap<MessageStatus, String>,
}

pub async fn list(context: PageContext, Form(fields): Form<Fields>) -> Response {
    // The fields with a name make a search like a typed one.
    let named = WORDS
        .iter()
        .filter_map(|word| Some(search::word(word, fields.given(word)?)));
    let typed = fields.all("q").map(|words| words.trim().to_owned());
    let words: Vec<String> = typed.filter(|words| !words.is_empty()).chain(named).collect();
    let search = words.join(" ");
    // A number alone is a seq, and a UUID alone is an id.
    let mut seq = search.parse::<i64>().ok();
    if let Ok(id) = filter::uuid(&search) {
        let found = context
            .database
            .pool
            .read(async |session| seq_of(session, &id).await)
            .await;
        seq = found.ok().flatten();
    }
    if let Some(seq) = seq {
        return context.request.redirect(&format!("message/{seq}"));
    }
    let tab = Tab::parse(fields.get("tab"));
    let mut list = MessageList {
        tab,
        search,
        trail: serde_json::from_str(fields.get("trail")).unwrap_or_default(),
        is_each: fields.get("view") == "each",
        reversed: tab.can_reverse() && fields.get("order") == "reversed",
        reads_events: false,
        reasons: HashMap::new(),
        matches: HashMap::new(),
        context,
    };
    let database = Arc::clone(&list.context.database);
    let found = match search::parse(&list.search) {
        Err(problem) => Err(Failure::new(Code::Usage, problem)),
        Ok(filter) => {
            database
                .pool
                .read(async |session| list.read(session, &filter).await)
                .await
        }
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
fn alarm(tab: Tab, number: &str) -> &'static str {
    match tab {
        Tab::Of(MessageStatus::Retrying) if number != "0" => " warn",
        Tab::Of(MessageStatus::Dead) if number != "0" => " bad",
        _ => "",
    }
}

impl MessageList {
    async fn read(&mut self, session: &MonitorSession, filter: &Filter) -> Result<ListContent, Failure> {
        self.reads_events = session.reads_events;
        let is_plain = self.search.is_empty() && self.trail.is_empty() && !self.reversed && !self.is_each;
        if let Some(status) = self.tab.status().filter(|_| is_plain) {
            let causes = Causes::read(session, status).await?;
            if causes.are_worthwhile() {
                return Ok(ListContent::Causes(causes));
            }
        }
        let lanes = self.snapshot().map_or(1, MonitorSnapshot::lanes);
        let (_, after) = self.trail.last().cloned().unwrap_or_default();
        let page = match self.tab {
            Tab::Latest => tab::latest(session, lanes, filter).await?,
            Tab::Of(status) => tab::page(session, lanes, status, self.reversed, filter, &after).await?,
        };
        let waits = |row: &&MessageRow| matches!(row.text("status"), Some("ready" | "in flight"));
        if self.tab.shows_reasons() && page.rows.iter().any(|row| waits(&row)) {
            let rows = page.rows.iter().filter(waits).map(|row| row.message.clone()).collect();
            self.reasons = why::first_reasons(session, rows).await?;
        }
        for status in MessageStatus::ALL.iter().copied().filter(|_| !filter.is_empty()) {
            // Without a number if it takes too long.
            if let Ok((n, has_more)) = tab::matches(session, lanes, status, filter).await {
                self.matches.insert(
                    status,
                    format!("{}{}", count(n as i64), if has_more { "+" } else { "" }),
                );
            }
        }
        Ok(ListContent::Messages(page))
    }

    fn snapshot(&self) -> Option<&MonitorSnapshot> {
        self.context.view.snapshot.as_ref()
    }

    /// The address of this list, in an order and at a page.
    fn path(&self, reversed: bool, trail: &[PageStart]) -> String {
        let order = if reversed { "&order=reversed" } else { "" };
        let view = if self.is_each { "&view=each" } else { "" };
        let page = match trail {
            [] => String::new(),
            trail => format!("&trail={}", encode(&serde_json::json!(trail).to_string())),
        };
        format!("{}{view}{order}{page}", self.tab_path(self.tab))
    }

    fn tab_path(&self, tab: Tab) -> String {
        format!("{}&q={}", tab.path(), encode(&self.search))
    }

    /// The number of messages of a tab: those that match the search, or all if that is known without one.
    fn count(&self, tab: Tab) -> Option<String> {
        let status = tab.status()?;
        if !self.search.is_empty() {
            return self.matches.get(&status).cloned();
        }
        let snapshot = self.snapshot()?;
        let waiting = snapshot.slow.waiting.as_ref();
        match status {
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
    fn page(&self, found: &Result<ListContent, String>) -> Markup {
        let pending = self.snapshot().and_then(|snapshot| snapshot.status.pending);
        let criteria = search::parse(&self.search).map(|_| search::criteria(&self.search));
        let (chips, typed) = match &criteria {
            Ok(criteria) => (&criteria[..], ""),
            Err(_) => (&[][..], self.search.as_str()),
        };
        let body = html! {
            nav.tabs aria-label="States" { ul {
                @for tab in TABS {
                    // Ready, in flight, retrying, blocked and scheduled together.
                    @if tab == Tab::Of(MessageStatus::Ready) && let Some(pending) = pending { li.note { (count(pending)) " pending:" } }
                    li { a href=(self.tab_path(tab)) aria-current=[(tab == self.tab).then_some("page")] title=(tab.about()) {
                        (tab.title()) @if let Some(number) = self.count(tab) { " " span class={ "count" (alarm(tab, &number)) } { (number) } }
                    } }
                }
            } }
            div.find {
                form.search role="search" method="get" action="messages" {
                    input type="hidden" name="tab" value=(self.tab.word());
                    @for chip in chips {
                        @let others: Vec<&str> = chips.iter().filter(|other| *other != chip).map(String::as_str).collect();
                        span.chip { (chip)
                            input type="hidden" name="q" value=(chip);
                            a href={ (self.tab.path()) "&q=" (encode(&others.join(" "))) } aria-label={ "Remove " (chip) } { "×" }
                        }
                    }
                    label for="q" { "Search" }
                    input #q type="search" name="q" value=(typed) placeholder="an id, a key, or criteria, e.g. type:OrderPlaced since:2h" autocomplete="off" spellcheck="false";
                    button { "Search" }
                }
                (self.fields())
            }
            // The script requests it again when messages have changed, only for the first page: others would shift.
            div #list data-refresh=[self.trail.is_empty().then_some("")] {
                @match found {
                    Ok(ListContent::Messages(page)) => { (self.messages(page)) }
                    Ok(ListContent::Causes(causes)) => {
                        p.line {
                            span.note { (causes.about()) " · " a href={ (self.tab.path()) "&view=each" } { "one by one" } }
                            (self.bulk())
                        }
                        @if let Some(status) = self.tab.status() { (causes.table(status, self.verbs(), self.context.now_s())) }
                    }
                    Err(text) => { (problem("The search failed", text)) }
                }
            }
        };
        self.context.frame(
            MonitorPage::Messages,
            "Messages",
            &html! { h1.unseen { "Messages" } (body) },
        )
    }

    /// The criteria of a search as fields; the server makes a search of them.
    fn fields(&self) -> Markup {
        let snapshot = self.snapshot();
        let destinations = snapshot.iter().flat_map(|snapshot| &snapshot.destinations);
        let partitions = snapshot.iter().flat_map(|snapshot| &snapshot.partitions);
        let fields = [
            ("destination", "Destination", Some("f-destinations"), ""),
            ("partition", "Partition", Some("f-partitions"), "e.g. p07"),
            ("key", "Key", None, "e.g. order:42"),
            ("error", "Error contains", None, "e.g. timeout"),
            ("since", "Since", Some("f-times"), "e.g. 2h"),
            ("type", "Type", None, "e.g. OrderPlaced"),
            ("agg", "Aggregate", None, "e.g. order:42"),
            ("correlation", "Correlation id", None, ""),
        ];
        let shown = if self.reads_events { 8 } else { 5 }; // the others search in events
        html! {
            details.fields {
                summary.button { "Filter" }
                form method="get" action="messages" {
                    input type="hidden" name="tab" value=(self.tab.word());
                    input type="hidden" name="q" value=(self.search);
                    @for (name, label, options, hint) in &fields[..shown] { div {
                        label for={ "f-" (name) } { (label) }
                        input id={ "f-" (name) } name=(name) list=[options] placeholder=(hint) autocomplete="off" spellcheck="false";
                    } }
                    datalist #f-destinations { @for destination in destinations { option value=(destination.name) {} } }
                    datalist #f-partitions { @for partition in partitions { option value=(partition.label) {} } }
                    datalist #f-times { @for time in ["15m", "1h", "6h", "1d", "7d"] { option value=(time) {} } }
                    button { "Search" }
                    p.note { "Or type: " @for word in WORDS { code { (word) ":" } " " } "– all of them must match." }
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
        let unknown = search::unknown_name(&self.search);
        html! {
            p.line { (self.range(page)) @if !page.rows.is_empty() { (self.bulk()) } }
            @if page.rows.is_empty() {
                p.empty { @if self.search.is_empty() { "None." } @else { "No message matches the search." } }
                @if let Some(name) = &unknown {
                    p.empty { code { (name) ":" } " is no criterion, so it was searched for as a text. The criteria: " @for word in WORDS { code { (word) ":" } " " } }
                }
            } @else {
                (self.table(&page.rows))
                @if !self.verbs().is_empty() {
                    form.bulk #selected method="get" action="act/message" {
                        input type="hidden" name="tab" value=(self.tab.word());
                        input type="hidden" name="q" value=(self.search);
                        b role="status" { "Selected" }
                        @for verb in self.verbs() { button.danger[*verb == Verb::Discard] name="verb" value=(verb.name()) { (capitalised(verb.name())) "…" } }
                    }
                }
            }
            @if page.next.is_some() || !self.trail.is_empty() { p.line { (self.range(page)) } }
            (as_sql([&*page.sql]))
        }
    }

    /// The place of the page in the list, and the pages around it. The whole number only where it is known without a
    /// count.
    fn range(&self, page: &tab::Page) -> Markup {
        let before = self.trail.last().map_or(0, |(before, _)| *before);
        let to = before + page.rows.len();
        html! {
            span.pages {
                @if to > before { span.note {
                    (count(before as i64 + 1)) "–" (count(to as i64))
                    @match self.count(self.tab) {
                        _ if page.next.is_none() => {}
                        Some(all) => { " of " (all) }
                        None => { " and more" }
                    }
                } }
                @if let Some(extent) = &page.extent { span.note { "The search " (extent) ". " } }
                @if let [rest @ .., _] = &self.trail[..] {
                    @if !rest.is_empty() { a.button rel="first" href=(self.path(self.reversed, &[])) { "First" } }
                    a.button rel="prev" href=(self.path(self.reversed, rest)) { "Previous" }
                }
                @if let Some(next) = &page.next {
                    a.button rel="next" href=(self.path(self.reversed, &[&self.trail[..], &[(to, next.clone())]].concat())) {
                        @if page.extent.is_some() { "Search further" } @else { "Next" }
                    }
                }
                @if self.is_each && self.search.is_empty() { a href=(self.tab.path()) { "by cause" } }
            }
        }
    }

    /// The actions on all messages that match the search.
    fn bulk(&self) -> Markup {
        // No replay chooses discarded messages alone.
        let has_bulk = matches!(self.tab, Tab::Of(MessageStatus::Dead | MessageStatus::Published));
        html! {
            @if has_bulk { span.bulk { @for verb in self.verbs() {
                a.button.danger[*verb == Verb::Discard] href={ "act/bulk?verb=" (verb.name()) "&q=" (encode(&self.search)) } { (capitalised(verb.name())) " all…" }
            } } }
        }
    }

    fn table(&self, rows: &[MessageRow]) -> Markup {
        let now_s = self.context.now_s();
        let (verbs, why) = (
            self.verbs(),
            match self.tab {
                Tab::Latest => "Waits because, or error",
                tab if tab.shows_reasons() => "Waits because",
                _ => "Error",
            },
        );
        html! {
            div.scroll tabindex="0" role="region" aria-label="Messages" { table.stack.messages {
                thead { tr {
                    @if !verbs.is_empty() { th { input #select-all type="checkbox" aria-label="Select all on this page"; } }
                    th { "Seq" } @if self.tab == Tab::Latest { th { "Status" } } @if self.reads_events { th { "Type" } } th { "Key" } th { "Destination" } th { "Partition" }
                    th.n { "Attempts" } (self.time_head()) th { (why) } @if !verbs.is_empty() { th { "Actions" } }
                } }
                tbody { @for row in rows {
                    @let (seq, destination) = (row.number("seq"), row.text("destination").unwrap_or_default());
                    @let (text, key) = (|name| row.text(name).unwrap_or("–"), format!("{seq} {destination}"));
                    @let times = if self.tab == Tab::Latest { &["enqueued_at"][..] } else { &["ended_at", "available_at", "enqueued_at"] };
                    @let at = times.iter().find_map(|time| row.text(time));
                    @let reason = self.reasons.get(&(seq, destination.to_owned()));
                    @let error = reason.map(String::as_str).or_else(|| row.text("last_error").filter(|_| self.tab == Tab::Latest || !self.tab.shows_reasons()));
                    @let error: String = error.unwrap_or("–").chars().take(ERROR_MAX).collect();
                    tr data-of=(key) {
                        @if !verbs.is_empty() {
                            td data-label="Select" { input type="checkbox" name="m" form="selected" value=(key) aria-label={ "Select message " (seq) }; }
                        }
                        td data-label="Seq" { a href=(message_path(seq, destination)) { (seq) } }
                        @if self.tab == Tab::Latest { td data-label="Status" { (row.text("status").and_then(MessageStatus::of_name).map_or_else(Markup::default, |status| badge(status.name(), status.tone()))) } }
                        @if self.reads_events { td data-label="Type" { (text("type")) } }
                        td data-label="Key" { (text("key")) }
                        td data-label="Destination" { (destination) }
                        td data-label="Partition" { (text("partition_key")) }
                        td.n data-label="Attempts" { (row.number("attempts")) @if row.message["replayed"] == true { " " span.badge.plain { "replay" } } }
                        td.time data-label=(self.tab.time_title()) { (distance(at.unwrap_or_default(), now_s)) }
                        td.error title=(error) data-label=(why) {
                            @if row.blocks == Some(true) { span.badge.warn { "blocks its key" } " " }
                            (error)
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
        let title = self.tab.time_title();
        if !self.tab.can_reverse() {
            return html! { th { (title) } };
        }
        let is_latest_first = self
            .tab
            .status()
            .is_some_and(|status| status.is_latest_first(self.reversed));
        let (sort, arrow, other) = match is_latest_first {
            true => ("descending", "▼", "Show the earliest first"),
            false => ("ascending", "▲", "Show the latest first"),
        };
        html! {
            th aria-sort=(sort) { a href=(self.path(!self.reversed, &[])) title=(other) { (title) " " span aria-hidden="true" { (arrow) } } }
        }
    }
}
