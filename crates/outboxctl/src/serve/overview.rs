//! The overview: the numbers, the problems, recent errors, and the destinations in brief.

use super::format::{capped, clock, count, duration, encode, known, message_path, ms, rate, time};
use super::page::{copyable_block, remedy, state_badge};
use super::search;
use super::snapshot::{BlockedKeyRow, DEAD_CAP, Lost, MonitorSnapshot, RecentError};
use crate::format::capitalised;
use crate::queries::model::{DestinationRow, Problem};
use crate::queries::state::MessageStatus;
use maud::{Markup, html};
use outbox_core::words::Word;
use outbox_transport::kind::Kind;
use std::cmp::Reverse;

/// The most objects of a kind that a line names; further ones are only counted.
const NAMED_MAX: usize = 3;

/// The checks of outbox_health whose failure stops no delivery.
const WARNINGS: [&str; 8] = [
    "standby",
    "maintenance",
    "dead letters",
    "retrying",
    "room",
    "transactions",
    "locks",
    "lag",
];

/// A line of the strip of alerts: one root cause, its details and the remedy.
pub struct Alert {
    pub is_bad: bool,
    pub title: String,
    body: Markup,
    /// The address and the label of a button.
    button: Option<(String, String)>,
}

/// The alerts, the worst first, one for each root cause.
pub fn alerts(snapshot: Option<&MonitorSnapshot>, lost: Option<&Lost>) -> Vec<Alert> {
    let mut alerts: Vec<Alert> = lost.map(alert_of_loss).into_iter().collect();
    alerts.extend(snapshot.into_iter().flat_map(alerts_of_snapshot));
    alerts.sort_by_key(|alert| !alert.is_bad);
    alerts
}

/// The strip of alerts. A viewer folds and unfolds it.
pub fn alert_strip(alerts: &[Alert], is_open: bool) -> Markup {
    let tone = |alert: &Alert| if alert.is_bad { "bad" } else { "warn" };
    let number = match alerts.len() {
        1 => "1 problem".to_owned(),
        more => format!("{more} problems"),
    };
    html! {
        @if let Some(worst) = alerts.first() {
            details class={ "alerts " (tone(worst)) } open[is_open] {
                summary { b { (number) } @for alert in alerts { " · " (alert.title) } }
                ul { @for alert in alerts {
                    li class=(tone(alert)) {
                        strong { (alert.title) }
                        div.what { (alert.body) }
                        @if let Some((to, label)) = &alert.button {
                            div.action { a.button.act[to.starts_with("act/")] href=(to) { (label) } }
                        }
                    }
                } }
            }
        }
    }
}

impl Alert {
    fn new(is_bad: bool, title: impl Into<String>, body: Markup) -> Self {
        Self {
            is_bad,
            title: title.into(),
            body,
            button: None,
        }
    }

    fn button(mut self, to: &str, label: &str) -> Self {
        self.button = Some((to.to_owned(), label.to_owned()));
        self
    }

    fn see_destinations(self) -> Self {
        self.button("destinations", "See the destinations")
    }
}

fn alert_of_loss(lost: &Lost) -> Alert {
    let body = html! {
        p { "Since " (clock(lost.since_epoch_s())) " UTC: " (lost.why()) }
        p { "The values below are from that time. The monitor tries again every second." }
    };
    Alert::new(true, "The database does not answer", body)
}

/// Those of one level in their order.
fn alerts_of_snapshot(snapshot: &MonitorSnapshot) -> Vec<Alert> {
    let mut alerts = Vec::new();
    let (extension, own) = (&snapshot.server.extension_version, env!("CARGO_PKG_VERSION"));
    if extension != own {
        let body = html! {
            p { "The extension is " (extension) ", and this outboxctl is " (own)
                ". Values may be missing or wrong: use the outboxctl of the extension's version." }
        };
        alerts.push(Alert::new(true, "Versions differ", body));
    }
    alerts.extend(paused(snapshot));
    let mut problems = Problem::of(&snapshot.health);
    // Within a check the destination that holds up the most comes first.
    let checks: Vec<String> = problems.iter().map(|problem| problem.check.clone()).collect();
    let place = |check: &str| checks.iter().position(|known| known == check);
    problems.sort_by_key(|problem| (place(&problem.check), Reverse(held_up(problem, snapshot))));
    let is_blocked = problems.iter().any(|problem| problem.check == "keys");
    let shown = problems.iter().filter(|problem| match problem.check.as_str() {
        "paused" => false,             // a line with a button for each destination
        "dead letters" => !is_blocked, // the line of the blocked keys names them
        _ => true,
    });
    alerts.extend(shown.map(|problem| match problem.check.as_str() {
        "keys" => blocked_keys(problem, &snapshot.blocked),
        _ => alert_of_problem(problem, snapshot),
    }));
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

/// How many messages wait for the destinations of a problem. `None` = they are not counted, or it is about none.
fn held_up(problem: &Problem, snapshot: &MonitorSnapshot) -> Option<i64> {
    let of_it = |d: &&DestinationRow| problem.destinations.contains(&d.name);
    let pending = snapshot.destinations.iter().filter(of_it).filter_map(|d| d.pending);
    pending.reduce(|sum, more| sum + more)
}

/// What fails: the destinations with their kind if they have one, or the name of the check.
fn subject(problem: &Problem, snapshot: &MonitorSnapshot) -> String {
    let kind_of = |name: &String| {
        let row = snapshot.destinations.iter().find(|d| d.name == *name)?;
        match row.described_by.as_deref()? {
            "settings" => Some(Kind::of_settings()),
            wrapper => Kind::of_wrapper(wrapper),
        }
    };
    let mut kinds = problem.destinations.iter().map(kind_of);
    let Some(first) = kinds.next().flatten().filter(|_| problem.check != "paused") else {
        return capitalised(&problem.title());
    };
    let plural = if problem.destinations.len() > 1 { "s" } else { "" };
    match kinds.all(|kind| kind == Some(first)) {
        true => format!("{} {}{plural} {}", first.protocol, first.peer, problem.names()),
        false => format!("Destinations {}", problem.names()),
    }
}

fn alert_of_problem(problem: &Problem, snapshot: &MonitorSnapshot) -> Alert {
    let check = problem.check.as_str();
    let is_bad = match check {
        "broker" => problem.code != "connecting",
        other => !WARNINGS.contains(&other),
    };
    let body = html! {
        p {
            (sentence(&problem.problem))
            @if let Some(since) = problem.since { " Since " (clock(since)) " UTC, " (duration(snapshot.now.epoch_s - since)) " ago." }
            @match held_up(problem, snapshot) {
                None | Some(0) => {}
                Some(1) => { " 1 message waits." }
                Some(more) => { " " (count(more)) " messages wait." }
            }
        }
        // The remedies for failed messages are SQL for psql; this page has buttons.
        @if !matches!(check, "dead letters" | "retrying") && !problem.remedy.is_empty() { (remedy(&problem.remedy, &problem.commands)) }
    };
    let alert = Alert::new(is_bad, subject(problem, snapshot), body);
    match check {
        "dead letters" => alert.button(&MessageStatus::Dead.path(), "See them"),
        "retrying" => alert.button(&MessageStatus::Retrying.path(), "See them"),
        _ if problem.destinations.is_empty() => alert,
        _ => alert.see_destinations(),
    }
}

fn paused(snapshot: &MonitorSnapshot) -> Vec<Alert> {
    let paused: Vec<&DestinationRow> = snapshot.destinations.iter().filter(|d| d.paused).collect();
    let one = |d: &&DestinationRow| {
        let body = html! { p { @if let Some(detail) = &d.detail { (sentence(detail)) " " } "Its messages wait." } };
        let resume = format!("act/resume?destination={}", encode(&d.name));
        Alert::new(false, format!("Destination {} is paused", d.name), body).button(&resume, "Resume…")
    };
    let mut alerts: Vec<Alert> = paused.iter().take(NAMED_MAX).map(one).collect();
    if paused.len() > NAMED_MAX {
        let title = format!("{} more destinations are paused", paused.len() - NAMED_MAX);
        alerts.push(Alert::new(false, title, html! {}).see_destinations());
    }
    alerts
}

fn blocked_keys(problem: &Problem, blocked: &[BlockedKeyRow]) -> Alert {
    // One line for each cause.
    let mut causes: Vec<((&str, &str), Vec<&BlockedKeyRow>)> = Vec::new();
    for key in blocked {
        let cause = (key.destination.as_str(), key.reason.as_str());
        match causes.iter_mut().find(|known| known.0 == cause) {
            Some((_, keys)) => keys.push(key),
            None => causes.push((cause, vec![key])),
        }
    }
    let body = html! {
        @if blocked.len() != 1 { p { (sentence(&problem.problem)) } }
        @for ((destination, reason), keys) in causes.iter().take(NAMED_MAX) {
            p {
                "To " (destination) ", behind "
                @for (index, key) in keys.iter().take(NAMED_MAX).enumerate() {
                    @if index > 0 { ", " }
                    a href=(message_path(key.seq, &key.destination)) { (key.seq) }
                    " (" (key.key.as_deref().unwrap_or("no key")) ")"
                }
                @if keys.len() > NAMED_MAX { " and others" }
                ": " (reason) "."
            }
        }
    };
    match blocked {
        [one] => Alert::new(
            false,
            format!("Key {} is blocked", one.key.as_deref().unwrap_or("(none)")),
            body,
        )
        .button(
            &message_path(one.seq, &one.destination),
            &format!("See message {}", one.seq),
        ),
        _ => Alert::new(false, "Keys are blocked by dead letters", body)
            .button(&MessageStatus::Dead.path(), "See the dead letters"),
    }
}

/// How to publish, while there is nothing to show.
pub fn start(snapshot: &MonitorSnapshot) -> Markup {
    const PUBLISH: &str = r#"select outbox_publish(type => 'OrderPlaced', payload => '{"order": 42, "total": 99.90}',
                      aggregate_type => 'order', aggregate_id => '42', operation => 'placed');"#;
    let status = &snapshot.status;
    let is_empty = (status.pending, status.published_total, status.dead) == (Some(0), Some(0), 0);
    html! {
        @if is_empty {
            section.panel {
                h2 { "Publish a message" }
                p { "Nothing has been published since the server started. In a transaction of your application, or in psql:" }
                (copyable_block(PUBLISH))
            }
        }
    }
}

pub fn cards(snapshot: &MonitorSnapshot) -> Markup {
    let status = &snapshot.status;
    let waiting = snapshot.slow.waiting.as_ref();
    let (is_retrying, is_dead) = (waiting.is_some_and(|waiting| waiting.retrying > 0), status.dead > 0);
    let oldest = match (status.pending, status.oldest_s) {
        (_, Some(oldest)) => format!("oldest {}", duration(oldest)),
        (Some(0), None) => "none".to_owned(),
        _ => "none deliverable now".to_owned(),
    };
    let published = format!("{} in all", known(status.published_total, count));
    let failing = format!(
        "{} failures a minute",
        known(status.failed_per_s.map(|n| n * 60.0), rate)
    );
    let card = |title: &str, tab: Option<MessageStatus>, class: &str, value: &str, note: &str| {
        html! {
            div class={ "card " (class) } {
                dt { @match tab { Some(tab) => { a href=(tab.path()) { (title) } } None => { (title) } } }
                dd.value { (value) }
                dd.note { (note) }
            }
        }
    };
    let tone = |is_so: bool, class: &'static str| if is_so { class } else { "plain" };
    let (retrying_tone, dead_tone) = (tone(is_retrying, "warn"), tone(is_dead, "bad"));
    let retrying = waiting.map_or_else(|| "–".to_owned(), |waiting| waiting.shown(waiting.retrying));
    let dead = if is_dead { "retry or discard them" } else { "none" };
    let per_minute = known(status.published_per_s.map(|n| n * 60.0), rate);
    html! {
        dl.cards {
            (card("Pending", Some(MessageStatus::Ready), "plain", &known(status.pending, count), &oldest))
            (card("In flight", Some(MessageStatus::InFlight), "plain", &known(status.in_flight, count), "with a worker"))
            (card("Retrying", Some(MessageStatus::Retrying), retrying_tone, &retrying, &failing))
            (card("Dead", Some(MessageStatus::Dead), dead_tone, &capped(status.dead, DEAD_CAP), dead))
            (card("Published a minute", Some(MessageStatus::Published), "plain", &per_minute, &published))
            (card("p95 enqueue to confirm", None, "plain", &known(status.p95_ms, ms), "in the last minute"))
        }
    }
}

/// Recent failures, in groups: those that still hold up messages, and the others.
pub fn errors(snapshot: &MonitorSnapshot) -> Markup {
    let (resolved, open): (Vec<_>, Vec<_>) = snapshot.slow.errors.iter().partition(|error| error.is_resolved());
    let lines = |errors: &[&RecentError]| html! { ul.errors { @for error in errors { (recent_error(error, snapshot.now.epoch_s)) } } };
    html! {
        @if open.is_empty() { p.empty { "None." } } @else { (lines(&open)) }
        @if !resolved.is_empty() { details { summary { (resolved.len()) " resolved" } (lines(&resolved)) } }
    }
}

fn recent_error(error: &RecentError, now_s: f64) -> Markup {
    let group = &error.group;
    let search = encode(&search::of_group(&group.destination, &group.message));
    let still = [
        (error.dead, MessageStatus::Dead),
        (error.retrying, MessageStatus::Retrying),
    ];
    html! {
        li {
            p.message { (group.message) }
            p.note {
                b { (count(group.count)) " ×" } " " (group.kind) " · " (group.destination) " · last "
                (duration(now_s - group.last_at)) " ago"
                @if group.count > 1 { ", first " (time(group.first_at)) }
                @if let Some(seq) = group.last_seq { " · " a href=(message_path(seq, &group.destination)) { "message " (seq) } }
                @for (number, status) in still { @if number != Some(0) {
                    " · " a href={ (status.path()) "&q=" (search) } { @if let Some(number) = number { (count(number)) " " } (status.name()) }
                } }
            }
        }
    }
}

pub fn destinations(snapshot: &MonitorSnapshot) -> Markup {
    html! {
        ul.brief { @for destination in &snapshot.destinations {
            li {
                span { a href="destinations" { (destination.name) } " " (state_badge(&destination.state)) }
                span.note {
                    (known(destination.pending, count)) " pending · " (known(destination.published_per_s, rate)) "/s · p95 "
                    (known(destination.p95_ms, ms)) " · oldest " (known(destination.oldest_s, duration))
                }
            }
        } }
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
