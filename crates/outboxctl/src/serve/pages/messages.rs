//! The list of messages, and one message.

use super::layout::{Page, PageFrame, Tone, badge, form_token, layout};
use crate::format::{capitalised, utc};
use crate::messages::page::Row;
use crate::messages::sql::quoted;
use crate::messages::tab;
use crate::queries::message::{Attempt, MessageRow, StoredEvent};
use crate::queries::state::MessageStatus;
use crate::serve::access::Viewer;
use crate::serve::detail::{Message, SHOWN_MAX_BYTES};
use crate::serve::format::{capped, count, encode};
use crate::serve::search::WORDS;
use crate::serve::snapshot::{DEAD_CAP, Snapshot, WAITING_CAP};
use maud::{Markup, html};
use outbox_core::event::{COLUMNS, Kind};
use outbox_core::words::Word;
use std::collections::HashMap;

/// The most characters of an error in a list.
const ERROR_MAX: usize = 500;

/// The list of a tab: the page that was found, or the reason why the search failed.
pub struct List<'a> {
    pub tab: MessageStatus,
    pub search: &'a str,
    pub found: Result<tab::Page, String>,
    /// The cursors of the pages before this one, without the first page; the last is that of this page.
    pub trail: &'a [Vec<String>],
    /// Whether the tab is shown in the reverse of its usual order.
    pub reversed: bool,
    /// Whether events can be read, to show them and to search in them.
    pub reads_events: bool,
    pub snapshot: Option<&'a Snapshot>,
    /// Why each message waits, by seq and destination, in the tabs that show it.
    pub reasons: &'a HashMap<(i64, String), String>,
}

impl List<'_> {
    /// The address of this list, in an order and at a page.
    fn path(&self, reversed: bool, trail: &[Vec<String>]) -> String {
        let order = if reversed { "&order=reversed" } else { "" };
        let page = match trail {
            [] => String::new(),
            trail => format!("&trail={}", encode(&serde_json::json!(trail).to_string())),
        };
        format!("{}&q={}{order}{page}", self.tab.path(), encode(self.search))
    }

    /// The number of messages of a tab, if it is known without a search.
    fn count(&self, tab: MessageStatus) -> Option<String> {
        let snapshot = self.snapshot.filter(|_| self.search.is_empty())?;
        let waiting = snapshot.waiting.as_ref();
        match tab {
            MessageStatus::Ready => {
                let depths = snapshot.depths.as_ref()?;
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
}

pub fn list(frame: &PageFrame, list: &List<'_>) -> Markup {
    let to = |tab: MessageStatus| format!("{}&q={}", tab.path(), encode(list.search));
    let body = html! {
        h1 { "Messages" }
        @if let Some(pending) = list.snapshot.and_then(|snapshot| snapshot.status.pending) {
            p.lead { (count(pending)) " pending: ready, in flight, retrying, blocked and scheduled together." }
        }
        nav.tabs aria-label="States" { ul { @for tab in MessageStatus::ALL.iter().copied() {
            li { a href=(to(tab)) aria-current=[(tab == list.tab).then_some("page")] {
                (tab.title()) @if let Some(number) = list.count(tab) { " " span.count { (number) } }
            } }
        } } }
        form.search role="search" method="get" action="/messages" {
            input type="hidden" name="tab" value=(list.tab.word());
            label for="q" { "Search" }
            input #q type="search" name="q" value=(list.search) placeholder="an id, a key, a correlation id, or type:OrderPlaced since:2h"
                autocomplete="off" spellcheck="false" aria-describedby="q-help";
            button { "Search" }
        }
        p.note #q-help { "A word, or: " @for word in WORDS { code { (word) ":" } " " } "– all of them must match." }
        (fields(list))
        p.lead { (list.tab.about()) }
        // The script requests it again when messages have changed, only for the first page: others would shift.
        div #list data-refresh=[list.trail.is_empty().then_some("")] { (rows(list, &frame.viewer)) }
    };
    layout(Page::Messages, "Messages", frame, &body)
}

fn rows(list: &List<'_>, viewer: &Viewer) -> Markup {
    let page = match &list.found {
        Ok(page) => page,
        Err(problem) => {
            return html! { div.banner.bad role="alert" { strong { "The search failed" } p { (problem) } } };
        }
    };
    let verbs = verbs(list.tab, viewer);
    html! {
        @if viewer.may_act { (bulk(list)) }
        @if page.rows.is_empty() {
            p.empty { @if list.search.is_empty() { "None." } @else { "No message matches the search." } }
        } @else {
            @if !verbs.is_empty() {
                form.bulk #selected method="get" action="/act/message" {
                    span.note { "With the selected: " }
                    @for (verb, label) in verbs { button name="verb" value=(verb) { (label) "…" } }
                }
            }
            div.scroll tabindex="0" role="region" aria-label="Messages" {
                table.stack.rows {
                    thead { tr {
                        @if !verbs.is_empty() { th { input #select-all type="checkbox" aria-label="Select all on this page"; } }
                        th { "Seq" } @if list.reads_events { th { "Type" } } th { "Key" } th { "Destination" } th { "Partition" }
                        th.n { "Attempts" } (time_head(list)) th { @if list.tab.shows_reasons() { "Waits because" } @else { "Error" } }
                        @if !verbs.is_empty() { th { "Actions" } }
                    } }
                    tbody { @for row in &page.rows { (line(row, list, verbs)) } }
                }
            }
        }
        p.pages {
            @if let Some(looked) = &page.looked { span.note { "The search " (looked) ". " } }
            @if let [before @ .., _] = list.trail { a.button rel="prev" href=(list.path(list.reversed, before)) { "Previous page" } }
            @if let Some(next) = &page.next {
                a.button rel="next" href=(list.path(list.reversed, &[list.trail, std::slice::from_ref(next)].concat())) {
                    @if page.looked.is_some() { "Search further" } @else { "Next page" }
                }
            }
        }
        details.sql { summary { "As SQL" } pre tabindex="0" { (page.sql) } }
    }
}

/// The head of the column of times. It turns the order of the list around where the tab has both.
fn time_head(list: &List<'_>) -> Markup {
    let title = html! { (list.tab.time_title()) " (UTC)" };
    if !list.tab.can_reverse() {
        return html! { th { (title) } };
    }
    let (sort, arrow, other) = match list.tab.is_latest_first(list.reversed) {
        true => ("descending", "▼", "Show the earliest first"),
        false => ("ascending", "▲", "Show the latest first"),
    };
    html! {
        th aria-sort=(sort) { a href=(list.path(!list.reversed, &[])) title=(other) { (title) " " span aria-hidden="true" { (arrow) } } }
    }
}

/// The actions on single messages of a tab, as in the address and on the button.
fn verbs(tab: MessageStatus, viewer: &Viewer) -> &'static [(&'static str, &'static str)] {
    match tab {
        _ if !viewer.may_act => &[],
        MessageStatus::Dead | MessageStatus::Retrying | MessageStatus::Scheduled => {
            &[("retry", "Retry"), ("discard", "Discard")]
        }
        MessageStatus::Ready | MessageStatus::Blocked => &[("discard", "Discard")],
        MessageStatus::Published | MessageStatus::Discarded => &[("replay", "Replay")],
        MessageStatus::InFlight => &[],
    }
}

/// The criteria of a search as fields; the server makes a search of them.
fn fields(list: &List<'_>) -> Markup {
    let (destinations, partitions) = match list.snapshot {
        Some(snapshot) => (&snapshot.destinations[..], &snapshot.partitions[..]),
        None => (&[][..], &[][..]),
    };
    let field = |name: &str, label: &str, options: Option<&str>, hint: &str| {
        html! {
            div {
                label for={ "f-" (name) } { (label) }
                input id={ "f-" (name) } name=(name) list=[options] placeholder=(hint) autocomplete="off" spellcheck="false";
            }
        }
    };
    html! {
        details.fields {
            summary { "Search by fields" }
            form method="get" action="/messages" {
                input type="hidden" name="tab" value=(list.tab.word());
                (field("destination", "Destination", Some("f-destinations"), ""))
                (field("partition", "Partition", Some("f-partitions"), "p07"))
                (field("key", "Key", None, "order:42"))
                @if list.reads_events {
                    (field("type", "Type", None, "OrderPlaced"))
                    (field("agg", "Aggregate", None, "order:42"))
                    (field("correlation", "Correlation id", None, ""))
                }
                (field("error", "Error contains", None, "timeout"))
                (field("since", "Since", Some("f-times"), "2h"))
                datalist #f-destinations { @for destination in destinations { option value=(destination.name) {} } }
                datalist #f-partitions { @for partition in partitions { option value=(partition.label) {} } }
                datalist #f-times { @for time in ["15m", "1h", "6h", "1d", "7d"] { option value=(time) {} } }
                button { "Search" }
            }
        }
    }
}

fn line(row: &Row, list: &List<'_>, verbs: &[(&str, &str)]) -> Markup {
    let (reads_events, list_time) = (list.reads_events, list.tab.time_title());
    let (seq, destination) = (row.number("seq"), row.text("destination").unwrap_or_default());
    let text = |name: &str| row.text(name).unwrap_or("–");
    let at = ["ended_at", "available_at", "enqueued_at"]
        .iter()
        .find_map(|time| row.text(time));
    html! {
        tr data-of=(format!("{seq} {destination}")) {
            @if !verbs.is_empty() {
                td data-label="Select" {
                    input type="checkbox" name="m" form="selected" value=(format!("{seq} {destination}")) aria-label={ "Select message " (seq) };
                }
            }
            td data-label="Seq" { a href={ "/message/" (seq) "?destination=" (encode(destination)) } { (seq) } }
            @if reads_events { td data-label="Type" { (text("type")) } }
            td data-label="Key" { (text("key")) }
            td data-label="Destination" { (destination) }
            td data-label="Partition" { (text("partition_key")) }
            td.n data-label="Attempts" { (row.number("attempts")) @if row.message["replayed"] == true { " " span.badge.plain { "replay" } } }
            td.time data-label=(list_time) { (utc(at.unwrap_or_default())) }
            @if list.tab.shows_reasons() {
                td.error data-label="Waits because" { (list.reasons.get(&(seq, destination.to_owned())).map_or("–", |why| why)) }
            } @else {
                td.error data-label="Error" {
                    @if row.blocks { span.badge.warn { "blocks its key" } " " }
                    @for c in text("last_error").chars().take(ERROR_MAX) { (c) }
                }
            }
            @if !verbs.is_empty() {
                td.time data-label="Actions" {
                    @for (verb, label) in verbs { a href=(act(verb, seq, destination)) { (label) } " " }
                }
            }
        }
    }
}

/// The actions on all messages that match the search.
fn bulk(list: &List<'_>) -> Markup {
    let verbs: &[(&str, &str)] = match list.tab {
        MessageStatus::Dead => &[("retry", "Retry all…"), ("discard", "Discard all…")],
        MessageStatus::Published | MessageStatus::Discarded => &[("replay", "Replay all…")],
        _ => &[],
    };
    html! {
        @if !verbs.is_empty() {
            p.bulk {
                span.note { @if list.search.is_empty() { "With all of them: " } @else { "With all that the search finds: " } }
                @for (verb, label) in verbs {
                    a.button href={ "/act/bulk?verb=" (verb) "&q=" (encode(list.search)) } { (label) }
                }
            }
        }
    }
}

pub fn detail(frame: &PageFrame, message: &Message) -> Markup {
    let (row, viewer) = (&message.row, &frame.viewer);
    let title = format!("Message {}", row.seq);
    let tone = Tone::of_status(row.status.known());
    let shown = html! {
        h1 { (title) " " (badge(row.status.as_str(), tone)) }
        @for reason in &message.reasons {
            p.obstacle.plain[reason.remedy.is_none()] {
                (reason.why) @if let Some(remedy) = &reason.remedy { br; span.remedy { "Fix: " code { (remedy) } } }
            }
            @if let Some(seq) = reason.behind {
                div.actions {
                    a.button href={ "/message/" (seq) "?destination=" (encode(&row.destination)) } { "See message " (seq) }
                    @if viewer.may_act {
                        (retry(viewer, seq, &row.destination, &format!("Retry {seq} now"), false))
                        a.button href=(act("discard", seq, &row.destination)) { "Discard " (seq) "…" }
                    }
                }
            }
        }
        @if viewer.may_act { (actions(row, viewer)) }
        section.panel {
            h2 { "State" }
            dl.facts {
                div { dt { "Destination" } dd { a href="/destinations" { (row.destination) } } }
                div { dt { "Key" } dd { (row.key.as_deref().unwrap_or("none: not ordered")) } }
                div { dt { "Partition" } dd { a href="/partitions" { (row.partition_key) } } }
                div { dt { "Attempts charged" } dd { (row.attempts) } }
                div { dt { "Enqueued" } dd { (utc(&row.enqueued_at)) " UTC" } }
                @if let Some(at) = at(row) { div { dt { (time_of(row)) } dd { (utc(at)) " UTC" } } }
                @if let Some(at) = &row.expires_at { div { dt { "Expires" } dd { (utc(at)) " UTC" } } }
                @if row.replayed { div { dt { "Replayed" } dd { "yes" } } }
                @if let Some(error) = &row.last_error { div.wide { dt { "Last error" } dd.error { (error) } } }
            }
            @if !message.others.is_empty() {
                p.note { "Also: " @for (index, other) in message.others.iter().enumerate() {
                    @if index > 0 { ", " }
                    a href={ "/message/" (other.seq) "?destination=" (encode(&other.destination)) } { (other.status) " to " (other.destination) }
                    @if let Some(at) = at(other) { " at " (utc(at)) }
                } }
            }
        }
        (sent(message))
        (event(message))
        (attempts(&message.attempts))
        details.sql { summary { "As SQL" } pre tabindex="0" { (as_sql(row)) } }
    };
    let body = html! { div #message data-refresh { (shown) } };
    layout(Page::Messages, &title, frame, &body)
}

/// When it is due, or ended.
fn at(row: &MessageRow) -> Option<&str> {
    let waits = matches!(
        row.status.known(),
        Some(MessageStatus::Retrying | MessageStatus::Scheduled)
    );
    let due = row.available_at.as_ref().filter(|_| waits);
    row.ended_at.as_ref().or(due).map(String::as_str)
}

fn time_of(row: &MessageRow) -> &'static str {
    match row.status.known() {
        Some(MessageStatus::Published) => "Published",
        Some(MessageStatus::Discarded) => "Discarded",
        Some(MessageStatus::Dead) => "Died",
        _ => "Due",
    }
}

/// The address of the form that acts on a message.
fn act(verb: &str, seq: i64, destination: &str) -> String {
    format!("/act/message?verb={verb}&seq={seq}&destination={}", encode(destination))
}

/// A button that retries a message at once.
fn retry(viewer: &Viewer, seq: i64, destination: &str, label: &str, is_primary: bool) -> Markup {
    html! {
        form method="post" action="/act/message" {
            (form_token(viewer))
            input type="hidden" name="verb" value="retry";
            input type="hidden" name="seq" value=(seq);
            input type="hidden" name="destination" value=(destination);
            button.primary[is_primary] { (label) }
        }
    }
}

fn actions(row: &MessageRow, viewer: &Viewer) -> Markup {
    let of = |verb: &str| act(verb, row.seq, &row.destination);
    let can_retry = matches!(
        row.status.known(),
        Some(MessageStatus::Dead | MessageStatus::Retrying | MessageStatus::Scheduled)
    );
    html! {
        div.actions {
            @if can_retry { (retry(viewer, row.seq, &row.destination, "Retry now", true)) }
            @if row.has_ended() { a.button href=(of("replay")) { "Replay…" } }
            @else if !row.status.is(MessageStatus::InFlight) { a.button href=(of("discard")) { "Discard…" } }
        }
    }
}

fn sent(message: &Message) -> Markup {
    html! {
        section.panel {
            h2 { "What is sent" }
            @match &message.sent {
                Err(why) => { p.empty { (why) } }
                Ok(sent) => {
                    dl.facts {
                        div.wide { dt { @if sent.is_http { "Posted to" } @else { "Broker" } } dd.address { (sent.url) } }
                        @if !sent.is_http {
                            div { dt { "Exchange" } dd { @if sent.publication.exchange.is_empty() { "(the default one)" } @else { (&*sent.publication.exchange) } } }
                            div { dt { "Routing key" } dd { (&*sent.publication.routing_key) } }
                        }
                        div { dt { "Message id" } dd { (sent.publication.properties.message_id) } }
                        @match &sent.body_by {
                            Some(function) => { div { dt { "Body" } dd { "made by the function " (function) } } }
                            None => {
                                div { dt { "Content type" } dd { (&*sent.publication.properties.content_type) } }
                                div { dt { "Body" } dd { (count(sent.publication.body.len() as i64)) " bytes" } }
                            }
                        }
                    }
                    h3 { "Headers" }
                    dl.pairs { @for (name, value) in &sent.publication.properties.headers {
                        div { dt { (&**name) } dd { (value.to_string()) } }
                    } }
                    @if sent.body_by.is_none() { details { summary { "Body as sent" } pre tabindex="0" { (String::from_utf8_lossy(&sent.publication.body)) } } }
                }
            }
        }
    }
}

fn event(message: &Message) -> Markup {
    html! {
        section.panel {
            h2 { "Event" }
            @match &message.event {
                None if !message.may_read_event => { p.empty { "The login of this monitor may not read events: GRANT outbox_admin to it." } }
                None => { p.empty { "outbox_events does not have it: it was removed, or events are in another table." } }
                Some(event) => { (event_facts(event)) (payload(message.row.seq, event)) }
            }
        }
    }
}

fn event_facts(event: &StoredEvent) -> Markup {
    let columns = COLUMNS.iter().zip(event.event.texts());
    let facts = columns.filter(|(column, _)| column.kind != Kind::Json);
    html! {
        dl.facts {
            @for (column, value) in facts {
                @if let Some(value) = value { div { dt { (capitalised(&column.name.replace('_', " "))) } dd { (value) } } }
            }
            div { dt { "Created" } dd { (event.event.created_at) } }
        }
    }
}

fn payload(seq: i64, event: &StoredEvent) -> Markup {
    let columns = COLUMNS.iter().zip(event.event.texts());
    let others = columns.filter(|(column, _)| column.kind == Kind::Json && column.name != "payload");
    html! {
        h3 { "Payload" }
        pre.payload tabindex="0" { (event.event.payload) }
        p.note {
            (count(event.payload_bytes)) " bytes"
            @if event.payload_bytes > SHOWN_MAX_BYTES { ", of which " (count(SHOWN_MAX_BYTES)) " are shown" }
            " · " a href={ "/message/" (seq) "/payload" } { "download" }
        }
        @for (column, text) in others {
            @if let Some(text) = text { h3 { (capitalised(&column.name.replace('_', " "))) } pre tabindex="0" { (text) } }
        }
    }
}

fn attempts(attempts: &[Attempt]) -> Markup {
    html! {
        section.panel {
            h2 { "Attempts" }
            @if attempts.is_empty() { p.empty { "No attempt is recorded." } }
            @else { div.scroll tabindex="0" role="region" aria-label="Attempts" { table.stack {
                thead { tr { th.n { "Attempt" } th { "At (UTC)" } th { "Outcome" } th { "Error" } th { "Worker" } } }
                tbody { @for attempt in attempts { tr {
                    td.n data-label="Attempt" { (attempt.attempt) } td.time data-label="At" { (utc(&attempt.at)) }
                    td data-label="Outcome" { (attempt.outcome) }
                    td.error data-label="Error" { (attempt.error.as_deref().unwrap_or("–")) }
                    td data-label="Worker" { (attempt.worker_id.as_deref().unwrap_or("–")) }
                } } }
            } } }
        }
    }
}

/// The same, for psql: to read the message and to act on it.
fn as_sql(row: &MessageRow) -> String {
    let (seq, destination) = (row.seq, quoted(&row.destination));
    let mut sql = format!("select * from outbox_messages where seq = {seq} and destination = {destination};\n");
    if row.has_ended() {
        sql += &format!(
            "select outbox_replay(seq_from => {seq}, seq_to => {seq}, source_destination => {destination}, dry_run => false);\n"
        );
    } else {
        sql += &format!("select outbox_retry({seq}, {destination});\n");
        sql += &format!("select outbox_discard({seq}, {destination}, reason => 'why');\n");
    }
    sql
}
