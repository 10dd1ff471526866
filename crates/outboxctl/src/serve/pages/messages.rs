//! The list of messages, and one message.

use super::layout::{Live, Page, Tone, badge, form_token, layout};
use crate::format::utc;
use crate::messages::page::Row;
use crate::messages::sql::quoted;
use crate::messages::tab;
use crate::queries::message::{Attempt, MessageRow, StoredEvent};
use crate::queries::state::{MessageStatus, Parsed};
use crate::serve::access::Viewer;
use crate::serve::detail::{Message, SHOWN_MAX_BYTES};
use crate::serve::format::{count, encode};
use crate::serve::search::WORDS;
use crate::serve::tab::Tab;
use maud::{Markup, html};
use outbox_core::event::{COLUMNS, Kind};

/// Characters of an error that a list shows.
const ERROR_MAX: usize = 500;

/// The list of a tab: what was found, or why nothing could be.
pub struct List<'a> {
    pub tab: Tab,
    pub search: &'a str,
    pub found: Result<tab::Page, String>,
    pub is_first: bool,
    /// Whether a search for what events say makes sense here.
    pub reads_events: bool,
}

pub fn list(live: &Live, viewer: &Viewer, database: &str, list: &List<'_>) -> Markup {
    let to = |tab: Tab| format!("{}&q={}", tab.path(), encode(list.search));
    let body = html! {
        h1 { "Messages" }
        nav.tabs aria-label="States" { ul { @for tab in Tab::ALL {
            li { a href=(to(tab)) aria-current=[(tab == list.tab).then_some("page")] { (tab.title()) } }
        } } }
        form.search role="search" method="get" action="/messages" {
            input type="hidden" name="tab" value=(list.tab.word());
            label for="q" { "Search" }
            input #q type="search" name="q" value=(list.search) placeholder="type:OrderPlaced agg:order:42 since:2h"
                autocomplete="off" spellcheck="false" aria-describedby="q-help";
            button { "Search" }
        }
        p.note #q-help { "Words: " @for word in WORDS { code { (word) ":" } " " } "– all of them must hold." }
        p.lead { (list.tab.about()) }
        // Asked for again by the script when messages have changed, on the first page alone: others would slip away.
        div #list data-refresh=[list.is_first.then_some("")] { (rows(list, viewer)) }
    };
    layout(Page::Messages, "Messages", live, viewer, database, &body)
}

fn rows(list: &List<'_>, viewer: &Viewer) -> Markup {
    let page = match &list.found {
        Ok(page) => page,
        Err(problem) => {
            return html! { div.banner.bad role="alert" { strong { "The search could not be done" } p { (problem) } } };
        }
    };
    html! {
        @if page.rows.is_empty() {
            p.empty { @if list.search.is_empty() { "None." } @else { "None that meets the search." } }
        } @else {
            div.scroll tabindex="0" role="region" aria-label="Messages" {
                table.stack.rows {
                    thead { tr {
                        th { "Seq" } @if list.reads_events { th { "Type" } } th { "Key" } th { "Destination" } th { "Partition" }
                        th.n { "Attempts" } th { (list.tab.time_title()) " (UTC)" } th { "Error" }
                    } }
                    tbody { @for row in &page.rows { (line(row, list.reads_events, list.tab.time_title())) } }
                }
            }
        }
        p.pages {
            @if let Some(looked) = &page.looked { span.note { "The search " (looked) ". " } }
            @if let Some(next) = &page.next {
                a.button rel="next" href={ (list.tab.path()) "&q=" (encode(list.search)) "&after="
                    (encode(&serde_json::json!(next).to_string())) } {
                    @if page.looked.is_some() { "Look further" } @else { "Next page" }
                }
            }
        }
        @if viewer.may_act { (bulk(list)) }
        details.sql { summary { "As SQL" } pre tabindex="0" { (page.sql) } }
    }
}

fn line(row: &Row, reads_events: bool, list_time: &str) -> Markup {
    let (seq, destination) = (row.number("seq"), row.text("destination").unwrap_or_default());
    let text = |name: &str| row.text(name).unwrap_or("–");
    let at = ["ended_at", "available_at", "enqueued_at"]
        .iter()
        .find_map(|time| row.text(time));
    html! {
        tr {
            td data-label="Seq" { a href={ "/message/" (seq) "?destination=" (encode(destination)) } { (seq) } }
            @if reads_events { td data-label="Type" { (text("type")) } }
            td data-label="Key" { (text("key")) }
            td data-label="Destination" { (destination) }
            td data-label="Partition" { (text("partition_key")) }
            td.n data-label="Attempts" { (row.number("attempts")) @if row.message["replayed"] == true { " " span.badge.plain { "replay" } } }
            td.time data-label=(list_time) { (utc(at.unwrap_or_default())) }
            td.error data-label="Error" {
                @if row.blocks { span.badge.warn { "blocks its key" } " " }
                @for c in text("last_error").chars().take(ERROR_MAX) { (c) }
            }
        }
    }
}

/// What may be done to all that the search finds.
fn bulk(list: &List<'_>) -> Markup {
    let verbs: &[(&str, &str)] = match list.tab {
        Tab::Dead => &[("retry", "Retry all…"), ("discard", "Discard all…")],
        Tab::Published | Tab::Discarded => &[("replay", "Replay all…")],
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

pub fn detail(live: &Live, viewer: &Viewer, database: &str, message: &Message) -> Markup {
    let row = &message.row;
    let title = format!("Message {}", row.seq);
    let standing = standing_of(row);
    let (word, tone) = word_of(&standing);
    let shown = html! {
        h1 { (title) " " (badge(word, tone)) }
        @for reason in &message.reasons {
            p.obstacle.plain[reason.remedy.is_none()] {
                (reason.why) @if let Some(remedy) = &reason.remedy { br; span.remedy { "Fix: " code { (remedy) } } }
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
                    a href={ "/message/" (other.seq) "?destination=" (encode(&other.destination)) } { (word_of(&standing_of(other)).0) " to " (other.destination) }
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
    layout(Page::Messages, &title, live, viewer, database, &body)
}

/// Where it stands; None: behind another of its key, for which the database has no word.
fn standing_of(row: &MessageRow) -> Option<Parsed<MessageStatus>> {
    match (&row.waits, row.status.known()) {
        _ if row.is_behind() => None,
        (Some(_), Some(MessageStatus::Pending)) => Some(MessageStatus::Scheduled.into()), // it is due, and not fetched yet
        _ => Some(row.status.clone()),
    }
}

/// The word for it, and what it means.
fn word_of(standing: &Option<Parsed<MessageStatus>>) -> (&str, Tone) {
    match standing {
        None => ("held back", Tone::Warn),
        Some(status) => (status.as_str(), Tone::of_status(status.known())),
    }
}

/// When it is due or ended.
fn at(row: &MessageRow) -> Option<&str> {
    let due = row.available_at.as_ref().filter(|_| row.waits.is_some());
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

fn actions(row: &MessageRow, viewer: &Viewer) -> Markup {
    let of = |verb: &str| {
        format!(
            "/act/message?verb={verb}&seq={}&destination={}",
            row.seq,
            encode(&row.destination)
        )
    };
    let can_retry = matches!(
        standing_of(row).and_then(|status| status.known()),
        Some(MessageStatus::Dead | MessageStatus::Retrying | MessageStatus::Scheduled)
    );
    html! {
        div.actions {
            @if can_retry {
                form method="post" action="/act/message" {
                    (form_token(viewer))
                    input type="hidden" name="verb" value="retry";
                    input type="hidden" name="seq" value=(row.seq);
                    input type="hidden" name="destination" value=(row.destination);
                    button.primary { "Retry now" }
                }
            }
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
                    @if sent.body_by.is_none() { details { summary { "The body as it is sent" } pre tabindex="0" { (String::from_utf8_lossy(&sent.publication.body)) } } }
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
                None => { p.empty { "There is none in outbox_events: it was removed, or events are read from a table of your own." } }
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
                @if let Some(value) = value { div { dt { (title(column.name)) } dd { (value) } } }
            }
            div { dt { "Created" } dd { (event.event.created_at) } }
        }
    }
}

/// The name of a column as a heading: `Aggregate type`.
fn title(column: &str) -> String {
    let words = column.replace('_', " ");
    let (first, rest) = words.split_at(1);
    first.to_uppercase() + rest
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
            @if let Some(text) = text { h3 { (title(column.name)) } pre tabindex="0" { (text) } }
        }
    }
}

fn attempts(attempts: &[Attempt]) -> Markup {
    html! {
        section.panel {
            h2 { "Attempts" }
            @if attempts.is_empty() { p.empty { "None that is still kept." } }
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

/// How to see and to mend the same with psql.
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
