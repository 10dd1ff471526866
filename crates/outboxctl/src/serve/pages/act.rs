//! Forms that ask for confirmation, the audit, the login, and pages for errors.

use super::layout::{Page, PageFrame, form_token, head, layout};
use crate::failure::Failure;
use crate::format::capitalised;
use crate::messages::bulk::Verb;
use crate::queries::state::MessageStatus;
use crate::serve::format::{count, encode, maybe_count, time};
use maud::{DOCTYPE, Markup, html};
use outbox_core::words::Word;
use serde::Deserialize;

/// The content of a form for many messages.
pub struct Bulk<'a> {
    pub verb: Verb,
    pub search: &'a str,
    pub count: i64,
    /// The count ended there; more may match the search.
    pub cap: i64,
    pub sql: &'a str,
    pub problem: Option<&'a str>,
}

pub fn bulk(frame: &PageFrame, ask: &Bulk<'_>) -> Markup {
    let verb = ask.verb.name();
    let typed = format!("{verb} {}", ask.count);
    let what = capitalised(verb);
    let (of, back) = match ask.verb {
        Verb::Replay => ("messages that have ended", MessageStatus::Published),
        _ => ("dead letters", MessageStatus::Dead),
    };
    let title = format!("{what} {} {of}", count(ask.count));
    let body = html! {
        h1 { (title) }
        @if let Some(problem) = ask.problem { div.banner.bad role="alert" { strong { "Nothing was done" } p { (problem) } } }
        section.panel {
            p { @if ask.search.is_empty() { "All of them." } @else { "Those that match the search " code { (ask.search) } "." } }
            @if ask.count >= ask.cap { p.note { "No more than " (count(ask.cap)) " at a time, the lowest seqs first. Do it again for the rest." } }
            @if ask.count == 0 {
                p.empty { "No message matches." }
            } @else {
                form.confirm method="post" action="/act/bulk" {
                    (form_token(&frame.viewer))
                    input type="hidden" name="verb" value=(verb);
                    input type="hidden" name="q" value=(ask.search);
                    input type="hidden" name="count" value=(ask.count);
                    (reason("Reason, for the audit"))
                    label for="typed" { "Type " code { (typed) } " to confirm" }
                    input #typed name="typed" autocomplete="off" required pattern=(typed) title=(typed);
                    button.primary { (what) }
                }
            }
            p { a href={ (back.path()) "&q=" (encode(ask.search)) } { "Back to the messages" } }
        }
        details.sql { summary { "As SQL" } pre tabindex="0" { (ask.sql) } }
    };
    layout(Page::Messages, &title, frame, &body)
}

/// What an action does to a message.
fn meaning(verb: Verb) -> &'static str {
    match verb {
        Verb::Retry => "It is delivered again, with attempt 1. Later messages of its key follow.",
        Verb::Discard => "It is never delivered and moves to the history. Later messages of its key are delivered.",
        Verb::Replay => "It is sent again, with the same seq and id and the header replayed.",
    }
}

/// The field for the reason of an action.
fn reason(label: &str) -> Markup {
    html! {
        label for="reason" { (label) }
        input #reason name="reason" autocomplete="off" maxlength="500";
    }
}

/// Asks for confirmation before messages are changed.
pub fn messages(frame: &PageFrame, verb: Verb, messages: &[(i64, String)]) -> Markup {
    let what = capitalised(verb.name());
    let title = match messages {
        [(seq, destination)] => format!("{what} message {seq} to {destination}"),
        many => format!("{what} {} messages", many.len()),
    };
    let body = html! {
        h1 { (title) }
        section.panel {
            p { @if messages.len() > 1 { "Of each: " } (meaning(verb)) }
            ul { @for (seq, destination) in messages {
                li { a href={ "/message/" (seq) "?destination=" (encode(destination)) } { (seq) } " to " (destination) }
            } }
            form.confirm method="post" action="/act/message" {
                (form_token(&frame.viewer))
                input type="hidden" name="verb" value=(verb.name());
                @for (seq, destination) in messages {
                    input type="hidden" name="m" value=(format!("{seq} {destination}"));
                }
                (reason("Reason, for the audit"))
                button.primary { (what) }
            }
        }
    };
    layout(Page::Messages, &title, frame, &body)
}

/// Asks for confirmation before a destination is paused or resumed.
pub fn destination(frame: &PageFrame, verb: &str, destination: &str) -> Markup {
    let (what, meaning) = match verb {
        "pause" => (
            "Pause",
            "Delivery stops within about a second. Enqueue goes on; its messages wait.",
        ),
        _ => ("Resume", "Delivery continues with the waiting messages."),
    };
    let title = format!("{what} destination {destination}");
    let body = html! {
        h1 { (title) }
        section.panel {
            p { (meaning) }
            form.confirm method="post" action={ "/act/" (verb) } {
                (form_token(&frame.viewer))
                input type="hidden" name="destination" value=(destination);
                (reason(if verb == "pause" { "Reason, for operators and the audit" } else { "Reason, for the audit" }))
                button.primary { (what) }
            }
            p { a href="/destinations" { "Back to the destinations" } }
        }
    };
    layout(Page::Destinations, &title, frame, &body)
}

pub fn done(frame: &PageFrame, verb: Verb, n: i64) -> Markup {
    let said = match verb {
        Verb::Retry => "retried",
        Verb::Discard => "discarded",
        Verb::Replay => "sent again",
    };
    let title = format!("{} messages {said}", count(n));
    let body = html! {
        h1 { (title) }
        p { "The " a href="/audit" { "audit" } " has the record. " a href=(MessageStatus::Dead.path()) { "See the dead letters" } " or "
            a href=(MessageStatus::Ready.path()) { "what is ready" } "." }
    };
    layout(Page::Messages, &title, frame, &body)
}

/// A manual action.
#[derive(Clone, Debug, Deserialize)]
pub struct Deed {
    pub at: f64,
    pub actor: String,
    pub acted_as: String,
    pub action: String,
    pub filter: String,
    pub count: Option<i64>,
    pub reason: Option<String>,
    pub application_name: Option<String>,
    pub cursor: String,
}

pub fn audit(frame: &PageFrame, deeds: &[Deed], next: Option<&str>) -> Markup {
    let body = html! {
        h1 { "Audit" }
        p.lead { "Manual actions, the latest first." }
        @if deeds.is_empty() { p.empty { "Nothing." } }
        @else { div.scroll tabindex="0" role="region" aria-label="Audit" { table.stack {
            thead { tr { th { "At (UTC)" } th { "Who" } th { "What" } th.n { "Messages" } th { "Asked for" } th { "Reason" } } }
            tbody { @for deed in deeds { tr {
                td.time data-label="At" { (time(deed.at)) }
                td data-label="Who" { (deed.actor) @if deed.acted_as != deed.actor { " as " (deed.acted_as) }
                    @if let Some(name) = deed.application_name.as_deref().filter(|name| !name.is_empty()) { span.note { " by " (name) } } }
                td data-label="What" { (deed.action) }
                td.n data-label="Messages" { (maybe_count(deed.count)) }
                td data-label="Asked for" { code { (deed.filter) } }
                td data-label="Reason" { (deed.reason.as_deref().unwrap_or("–")) }
            } } }
        } } }
        @if let Some(next) = next { p.pages { a.button rel="next" href={ "/audit?before=" (encode(next)) } { "Older" } } }
    };
    layout(Page::Audit, "Audit", frame, &body)
}

/// An answer with the reason of a refusal.
pub fn refusal(frame: &PageFrame, title: &str, failure: &Failure) -> Markup {
    let body = html! {
        h1 { (title) }
        section.panel {
            p { (failure.message) "." }
            @if let Some(detail) = &failure.detail { p { (detail) } }
            @if let Some(hint) = &failure.hint { p.remedy { "Fix: " (hint) } }
            p { a href="/" { "To the overview" } }
        }
    };
    layout(Page::Other, title, frame, &body)
}

/// The only page without a login.
pub fn login(has_names: bool, to: &str, failed: bool) -> Markup {
    html! {
        (DOCTYPE)
        html lang="en" {
            (head("Log in"))
            body.login {
                main #main {
                    h1 { img src="/icon.svg" alt="" width="32" height="32"; " Outbox Monitor" }
                    @if failed { p.banner.bad role="alert" { "Wrong user name or password." } }
                    form.confirm method="post" action="/login" {
                        input type="hidden" name="to" value=(to);
                        @if has_names {
                            label for="name" { "Name" }
                            input #name name="name" autocomplete="username" required autofocus;
                        }
                        label for="secret" { @if has_names { "Secret" } @else { "Token" } }
                        input #secret name="secret" type="password" autocomplete="current-password" required autofocus[!has_names];
                        button.primary { "Log in" }
                    }
                }
            }
        }
    }
}
