//! The overview: the numbers, the problems, recent errors, and the destinations in brief.

use super::layout::state_badge;
use crate::format::capitalised;
use crate::queries::model::Problem;
use crate::queries::state::MessageStatus;
use crate::serve::format::{capped, clock, count, encode, maybe_count, maybe_span, millis, rate, span, time};
use crate::serve::search;
use crate::serve::snapshot::{Blocked, DEAD_CAP, Destination, Lost, Snapshot};
use maud::{Markup, html};

/// The most objects of a kind that a line names; further ones are only counted.
const NAMED_MAX: usize = 3;

/// A line of the strip of alerts: one root cause, its details and the remedy.
struct Alert {
    level: &'static str,
    title: String,
    body: Markup,
    action: Option<Markup>,
}

impl Alert {
    fn new(level: &'static str, title: impl Into<String>, body: Markup) -> Self {
        Self {
            level,
            title: title.into(),
            body,
            action: None,
        }
    }

    fn action(mut self, action: Option<Markup>) -> Self {
        self.action = action;
        self
    }
}

/// The strip of alerts, the worst first, one line for each root cause. A viewer folds and unfolds it.
pub fn alerts(snapshot: Option<&Snapshot>, lost: Option<&Lost>, is_open: bool) -> Markup {
    let alerts: Vec<Alert> = of_loss(lost)
        .into_iter()
        .chain(snapshot.map(of_snapshot).unwrap_or_default())
        .collect();
    let Some(worst) = alerts.first() else {
        return html! {};
    };
    let number = match alerts.len() {
        1 => "1 problem".to_owned(),
        more => format!("{more} problems"),
    };
    html! {
        details.alerts.bad[worst.level == "bad"].warn[worst.level != "bad"] open[is_open] {
            summary { b { (number) } @for alert in &alerts { " · " (alert.title) } }
            ul {
                @for alert in &alerts {
                    li.bad[alert.level == "bad"].warn[alert.level != "bad"] {
                        strong { (alert.title) }
                        div.what { (alert.body) }
                        @if let Some(action) = &alert.action { div.action { (action) } }
                    }
                }
            }
        }
    }
}

fn of_loss(lost: Option<&Lost>) -> Option<Alert> {
    let lost = lost?;
    let body = html! {
        p { "Since " (clock(lost.since_epoch_s())) " UTC: " (lost.message) }
        p { "The values below are from that time. The monitor tries again every second." }
    };
    Some(Alert::new("bad", "The database does not answer", body))
}

/// The worst first.
fn of_snapshot(snapshot: &Snapshot) -> Vec<Alert> {
    let mut alerts = Vec::new();
    let own = env!("CARGO_PKG_VERSION");
    if snapshot.server.extension_version != own {
        let body = html! {
            p { "The extension is " (snapshot.server.extension_version) ", and this outboxctl is " (own)
                ". Values may be missing or wrong: use the outboxctl of the extension's version." }
        };
        alerts.push(Alert::new("bad", "Versions differ", body));
    }
    let problems = Problem::of(&snapshot.health);
    let is_blocked = problems.iter().any(|problem| problem.check == "keys");
    let of_level = |level: &'static str, has_level: fn(&Problem) -> bool| {
        problems
            .iter()
            .filter(move |problem| has_level(problem))
            // The line of the blocked keys names the dead letters.
            .filter(move |problem| !(is_blocked && problem.check == "dead letters"))
            .map(move |problem| of_problem(level, problem, snapshot))
    };
    alerts.extend(of_level("bad", is_bad));
    alerts.extend(paused(snapshot));
    alerts.extend(of_level("warn", is_warning));
    alerts
}

/// With a capital, unless it begins with a name: the source text is used inside other sentences too.
fn sentence(text: &str) -> String {
    let text = text.trim_end_matches('.');
    let is_word = |word: &str| word.chars().all(|c| c.is_ascii_lowercase());
    let first = text.split(' ').next().unwrap_or_default();
    match is_word(first) {
        true => format!("{}.", capitalised(text)),
        false => format!("{text}."),
    }
}

fn is_bad(problem: &Problem) -> bool {
    let bad = [
        "preload",
        "enabled",
        "identity",
        "partitions",
        "sequence",
        "role",
        "schema",
        "workers",
        "destination",
        "database",
        "source",
        "bodies",
        "broker",
        "blocked",
    ];
    bad.contains(&problem.check.as_str()) && !is_connecting(problem)
}

/// Paused destinations have lines of their own, with a button.
fn is_warning(problem: &Problem) -> bool {
    !is_bad(problem) && problem.check != "paused"
}

fn is_connecting(problem: &Problem) -> bool {
    problem.problem.starts_with("connecting to")
}

fn of_problem(level: &'static str, problem: &Problem, snapshot: &Snapshot) -> Alert {
    let link = match problem.check.as_str() {
        "dead letters" => Some((MessageStatus::Dead.path(), "See them")),
        "broker" | "blocked" | "destination" | "room" | "bodies" => {
            Some(("/destinations".to_owned(), "See the destinations"))
        }
        "keys" => return blocked_keys(level, problem, snapshot),
        _ => None,
    };
    let body = html! {
        p { (sentence(&problem.problem)) }
        // The remedy for dead letters is SQL for psql; this page has buttons.
        @if problem.check != "dead letters" && !problem.remedy.is_empty() { p.remedy { "Fix: " (problem.remedy) "." } }
    };
    Alert::new(level, title(problem), body).action(link.map(|(to, label)| html! { a.button href=(to) { (label) } }))
}

fn title(problem: &Problem) -> String {
    let destinations = match problem.destinations.as_slice() {
        [only] => format!("Destination {only}"),
        _ => format!("Destinations {}", problem.named().unwrap_or_default()),
    };
    let verb = |one: &str, many: &str| match problem.destinations.len() {
        1 => format!("{destinations} {one}"),
        _ => format!("{destinations} {many}"),
    };
    match problem.check.as_str() {
        "preload" => "The library is not preloaded".into(),
        "enabled" => "Delivery is switched off".into(),
        "standby" => "This server is a standby".into(),
        "identity" => "This database is a copy".into(),
        "partitions" => "Messages are in partitions that do not exist".into(),
        "sequence" => "The sequence of the events is behind".into(),
        "role" => "The role of the workers".into(),
        "schema" => "Rights on the schema of the extension".into(),
        "workers" => "Workers".into(),
        "destination" => verb("cannot be used", "cannot be used"),
        "database" => "A statement of the workers fails".into(),
        "source" => "The event source cannot be read".into(),
        "bodies" => verb("has an unusable body function", "have an unusable body function"),
        "broker" if is_connecting(problem) => verb("is connecting", "are connecting"),
        "broker" if problem.problem.contains("does not confirm") => verb("does not confirm", "do not confirm"),
        "broker" => verb("is down", "are down"),
        "blocked" => verb("is blocked by its broker", "are blocked by their brokers"),
        "dead letters" => "Dead letters".into(),
        "retrying" => "Messages keep failing".into(),
        "room" => verb("is nearly full", "are nearly full"),
        "transactions" => "A transaction stays open".into(),
        "locks" => "Leases are locked".into(),
        "lag" => "Messages wait long".into(),
        other => other.to_owned(),
    }
}

fn paused(snapshot: &Snapshot) -> Vec<Alert> {
    let paused: Vec<&Destination> = snapshot.destinations.iter().filter(|d| d.paused).collect();
    let one = |d: &&Destination| {
        let body = html! { p { @if let Some(detail) = &d.detail { (sentence(detail)) " " } "Its messages wait." } };
        let resume = html! { a.button.act href={ "/act/resume?destination=" (encode(&d.name)) } { "Resume…" } };
        Alert::new("warn", format!("Destination {} is paused", d.name), body).action(Some(resume))
    };
    let mut alerts: Vec<Alert> = paused.iter().take(NAMED_MAX).map(one).collect();
    if paused.len() > NAMED_MAX {
        let title = format!("{} more destinations are paused", paused.len() - NAMED_MAX);
        let see = html! { a.button href="/destinations" { "See the destinations" } };
        alerts.push(Alert::new("warn", title, html! {}).action(Some(see)));
    }
    alerts
}

fn blocked_keys(level: &'static str, problem: &Problem, snapshot: &Snapshot) -> Alert {
    let title = match &snapshot.blocked[..] {
        [one] => format!("Key {} is blocked", one.key.as_deref().unwrap_or("(none)")),
        _ => "Keys are blocked by dead letters".to_owned(),
    };
    // One line for each cause.
    let mut causes: Vec<(&str, &str, Vec<&Blocked>)> = Vec::new();
    for blocked in &snapshot.blocked {
        let (destination, reason) = (blocked.destination.as_str(), blocked.reason.as_str());
        match causes
            .iter_mut()
            .find(|cause| (cause.0, cause.1) == (destination, reason))
        {
            Some((.., keys)) => keys.push(blocked),
            None => causes.push((destination, reason, vec![blocked])),
        }
    }
    let body = html! {
        @if snapshot.blocked.len() != 1 { p { (sentence(&problem.problem)) } }
        @for (destination, reason, keys) in causes.iter().take(NAMED_MAX) {
            p {
                "To " (destination) ", behind "
                @for (index, blocked) in keys.iter().take(NAMED_MAX).enumerate() {
                    @if index > 0 { ", " }
                    a href={ "/message/" (blocked.seq) "?destination=" (encode(&blocked.destination)) } { (blocked.seq) }
                    " (" (blocked.key.as_deref().unwrap_or("no key")) ")"
                }
                @if keys.len() > NAMED_MAX { " and others" }
                ": " (reason) "."
            }
        }
    };
    let see = match &snapshot.blocked[..] {
        [one] => html! {
            a.button href={ "/message/" (one.seq) "?destination=" (encode(&one.destination)) } { "See message " (one.seq) }
        },
        _ => html! { a.button href=(MessageStatus::Dead.path()) { "See the dead letters" } },
    };
    Alert::new(level, title, body).action(Some(see))
}

/// The numbers.
pub fn cards(snapshot: &Snapshot) -> Markup {
    let status = &snapshot.status;
    let per_minute = |per_s: Option<f64>| per_s.map(|n| n * 60.0);
    let failing = per_minute(status.failed_per_s);
    html! {
        dl.cards {
            (card("Pending", &maybe_count(status.pending), Some(MessageStatus::Ready), "plain", &html! {
                @match status.oldest_s {
                    Some(oldest) => { "oldest " (span(oldest)) }
                    None => { "none can be delivered now" }
                }
            }))
            (card("In flight", &maybe_count(status.in_flight), Some(MessageStatus::InFlight), "plain", &html! { "with a worker" }))
            (card("Published a minute", &rate(per_minute(status.published_per_s)), Some(MessageStatus::Published), "plain", &html! {
                (maybe_count(status.published_total)) " in all"
            }))
            (card("Failing a minute", &rate(failing), Some(MessageStatus::Retrying),
                if failing.is_some_and(|n| n > 0.0) { "warn" } else { "plain" }, &html! { (maybe_count(status.failed_total)) " attempts in all" }))
            (card("Dead", &capped(status.dead, DEAD_CAP), Some(MessageStatus::Dead),
                if status.dead > 0 { "bad" } else { "plain" }, &html! {
                    @if status.dead > 0 { "retry or discard them" } @else { "none" }
                }))
            (card("p95 enqueue to confirm", &millis(snapshot.p95_ms()), None, "plain", &html! { "in the last minute" }))
        }
    }
}

fn card(title: &str, value: &str, link: Option<MessageStatus>, class: &str, note: &Markup) -> Markup {
    html! {
        div class={ "card " (class) } {
            dt { @match link { Some(tab) => { a href=(tab.path()) { (title) } } None => { (title) } } }
            dd.value { (value) }
            dd.note { (note) }
        }
    }
}

/// Recent failures, in groups.
pub fn errors(snapshot: &Snapshot) -> Markup {
    if snapshot.errors.is_empty() {
        return html! { p.empty { "None." } };
    }
    html! {
        ul.errors {
            @for group in &snapshot.errors {
                li {
                    p.message { (group.message) }
                    p.note {
                        b { (count(group.count)) " ×" } " " (group.kind) " · " (group.destination) " · last "
                        (span(snapshot.now.epoch_s - group.last_at)) " ago"
                        @if group.count > 1 { ", first " (time(group.first_at)) }
                        @if let Some(seq) = group.last_seq {
                            " · " a href={ "/message/" (seq) "?destination=" (encode(&group.destination)) } { "message " (seq) }
                            @let search = encode(&search::of_group(&group.destination, &group.message));
                            // A group does not record which of its messages are dead by now.
                            " · all that are " a href={ (MessageStatus::Dead.path()) "&q=" (search) } { "dead" }
                            " or " a href={ (MessageStatus::Retrying.path()) "&q=" (search) } { "retrying" }
                        }
                    }
                }
            }
        }
    }
}

pub fn destinations(snapshot: &Snapshot) -> Markup {
    html! {
        ul.brief {
            @for destination in &snapshot.destinations {
                li {
                    span { a href="/destinations" { (destination.name) } " " (state_badge(&destination.state)) }
                    span.note {
                        (maybe_count(destination.pending)) " pending · " (rate(destination.published_per_s)) "/s · p95 "
                        (millis(destination.p95_ms)) " · oldest " (maybe_span(destination.oldest_s))
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sentence_begins_with_a_capital_unless_with_a_name() {
        assert_eq!(sentence("the broker is away"), "The broker is away.");
        assert_eq!(sentence("outbox.enabled is off"), "outbox.enabled is off.");
        assert_eq!(sentence("60 dead letters."), "60 dead letters.");
        assert_eq!(sentence(""), ".");
    }
}
