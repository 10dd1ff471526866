//! The overview: what is wrong, the figures, recent errors, and the destinations in brief.

use super::layout::state_badge;
use crate::queries::model::Check;
use crate::serve::format::{capped, clock, count, encode, maybe_count, maybe_span, millis, rate, span, time};
use crate::serve::snapshot::{DEAD_CAP, Destination, Lost, Snapshot};
use crate::serve::tab::Tab;
use maud::{Markup, html};

/// More of a kind than this are only counted.
const NAMED_MAX: usize = 3;

/// Something that needs somebody: what, why, and what can be done.
struct Banner {
    level: &'static str,
    title: String,
    body: Markup,
    action: Option<Markup>,
}

impl Banner {
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

/// In full, for the overview.
pub fn banners(snapshot: Option<&Snapshot>, lost: Option<&Lost>) -> Markup {
    html! {
        @for banner in of_loss(lost).into_iter().chain(snapshot.map(of_snapshot).unwrap_or_default()) { (whole(&banner)) }
    }
}

/// For the other pages: a lost database in full, of the rest the titles.
pub fn brief_banners(snapshot: Option<&Snapshot>, lost: Option<&Lost>) -> Markup {
    let rest = snapshot.map(of_snapshot).unwrap_or_default();
    html! {
        @if let Some(banner) = of_loss(lost) { (whole(&banner)) }
        @if !rest.is_empty() {
            ul.alerts { @for banner in rest { li { a class={ "alert " (banner.level) } href="/" { (banner.title) } } } }
        }
    }
}

fn whole(banner: &Banner) -> Markup {
    html! {
        div class={ "banner " (banner.level) } role="alert" {
            div { strong { (banner.title) } (banner.body) }
            @if let Some(action) = &banner.action { div.action { (action) } }
        }
    }
}

fn of_loss(lost: Option<&Lost>) -> Option<Banner> {
    let lost = lost?;
    let body = html! {
        p { "Since " (clock(lost.since_epoch_s())) " UTC: " (lost.message) }
        p { "What is below is as it was then. The monitor tries again every second." }
    };
    Some(Banner::new("bad", "The database does not answer", body))
}

/// The worst first.
fn of_snapshot(snapshot: &Snapshot) -> Vec<Banner> {
    let mut banners = Vec::new();
    let own = env!("CARGO_PKG_VERSION");
    if snapshot.server.extension_version != own {
        let body = html! {
            p { "The extension is " (snapshot.server.extension_version) ", and this outboxctl is " (own)
                ". Figures may be missing or wrong: use the outboxctl of the extension's version." }
        };
        banners.push(Banner::new("bad", "Versions differ", body));
    }
    if snapshot.now.is_standby {
        let body = html! { p { "It delivers nothing until it is promoted. What is shown comes from its primary." } };
        banners.push(Banner::new("warn", "This server is a standby", body));
    }
    let failing = |level: &'static str, is: fn(&Check) -> bool| {
        let checks = snapshot.health.iter().filter(move |check| !check.ok && is(check));
        // No worker of a standby is alive, and none is to be.
        let checks = checks.filter(|check| !(snapshot.now.is_standby && check.check == "workers"));
        checks.map(move |check| of_check(level, check))
    };
    banners.extend(failing("bad", is_bad));
    banners.extend(paused(snapshot));
    banners.extend(blocked(snapshot));
    banners.extend(failing("warn", is_warning));
    banners
}

/// With a capital, unless it begins with a name: what it is made from stands in the middle of other sentences too.
fn sentence(text: &str) -> String {
    let text = text.trim_end_matches('.');
    let is_word = |word: &str| word.chars().all(|c| c.is_ascii_lowercase());
    let first = text.split(' ').next().unwrap_or_default();
    match text.chars().next() {
        Some(letter) if is_word(first) => format!("{}{}.", letter.to_ascii_uppercase(), &text[letter.len_utf8()..]),
        _ => format!("{text}."),
    }
}

fn is_bad(check: &Check) -> bool {
    let bad = [
        "preload",
        "enabled",
        "identity",
        "role",
        "schema",
        "workers",
        "destination",
        "source",
        "bodies",
        "broker",
        "blocked",
    ];
    bad.contains(&check.check.as_str())
}

/// Paused destinations and blocked keys have banners of their own.
fn is_warning(check: &Check) -> bool {
    !is_bad(check) && !["paused", "keys"].contains(&check.check.as_str())
}

fn of_check(level: &'static str, check: &Check) -> Banner {
    let title = match check.check.as_str() {
        "preload" => "The library is not preloaded",
        "enabled" => "Delivery is switched off",
        "identity" => "This database is a copy",
        "role" => "The role of the workers",
        "schema" => "Rights on the schema of the extension",
        "workers" => "No worker",
        "destination" => "A destination cannot be used",
        "source" => "The event source cannot be read",
        "bodies" => "A function that makes bodies cannot be used",
        "broker" => "A destination is down",
        "blocked" => "A broker blocks publishers",
        "dead letters" => "Dead letters",
        "room" => "A destination is nearly full",
        "transactions" => "A transaction stays open",
        "locks" => "Leases are locked",
        "lag" => "Messages wait long",
        other => other,
    };
    let link = match check.check.as_str() {
        "dead letters" => Some((Tab::Dead.path(), "See them")),
        "broker" | "blocked" | "destination" | "room" => Some(("/destinations".to_owned(), "See the destinations")),
        _ => None,
    };
    let body = html! {
        p { (sentence(&check.problem)) }
        // Its words are for who has psql before him.
        @if check.check != "dead letters" && !check.remedy.is_empty() { p.remedy { "What helps: " (check.remedy) "." } }
    };
    Banner::new(level, title, body).action(link.map(|(to, label)| html! { a.button href=(to) { (label) } }))
}

fn paused(snapshot: &Snapshot) -> Vec<Banner> {
    let paused: Vec<&Destination> = snapshot.destinations.iter().filter(|d| d.paused).collect();
    let one = |d: &&Destination| {
        let body = html! { p { @if let Some(detail) = &d.detail { (sentence(detail)) " " } "Its messages wait." } };
        let resume = html! { a.button.act href={ "/act/resume?destination=" (encode(&d.name)) } { "Resume…" } };
        Banner::new("warn", format!("Destination {} is paused", d.name), body).action(Some(resume))
    };
    let mut banners: Vec<Banner> = paused.iter().take(NAMED_MAX).map(one).collect();
    if paused.len() > NAMED_MAX {
        let title = format!("{} more destinations are paused", paused.len() - NAMED_MAX);
        let see = html! { a.button href="/destinations" { "See the destinations" } };
        banners.push(Banner::new("warn", title, html! {}).action(Some(see)));
    }
    banners
}

fn blocked(snapshot: &Snapshot) -> Option<Banner> {
    let title = match &snapshot.blocked[..] {
        [] => return None,
        [one] => format!("Key {} stands still", one.key.as_deref().unwrap_or("(none)")),
        many => format!("Keys of {} partitions stand still", many.len()),
    };
    let body = html! {
        @for blocked in snapshot.blocked.iter().take(NAMED_MAX) {
            p {
                "Messages of " (blocked.key.as_deref().unwrap_or("(none)")) " to " (blocked.destination) " wait behind dead letter "
                a href={ "/message/" (blocked.seq) "?destination=" (encode(&blocked.destination)) } { (blocked.seq) }
                ": " (blocked.reason) "."
            }
        }
        @if snapshot.blocked.len() > NAMED_MAX { p { a href="/partitions" { "And " (snapshot.blocked.len() - NAMED_MAX) " more" } } }
    };
    let only = snapshot.blocked.first().filter(|_| snapshot.blocked.len() == 1);
    let see = only.map(|one| {
        html! { a.button href={ "/message/" (one.seq) "?destination=" (encode(&one.destination)) } { "See message " (one.seq) } }
    });
    Some(Banner::new("warn", title, body).action(see))
}

/// The figures.
pub fn cards(snapshot: &Snapshot) -> Markup {
    let status = &snapshot.status;
    let per_minute = |per_s: Option<f64>| per_s.map(|n| n * 60.0);
    let failing = per_minute(status.failed_per_s);
    html! {
        dl.cards {
            (card("Pending", &maybe_count(status.pending), Some(Tab::Pending), "plain", &html! {
                @match status.oldest_s {
                    Some(oldest) => { "oldest " (span(oldest)) }
                    None => { "nothing is ready to go" }
                }
            }))
            (card("In flight", &maybe_count(status.in_flight), Some(Tab::InFlight), "plain", &html! { "with a worker" }))
            (card("Published a minute", &rate(per_minute(status.published_per_s)), Some(Tab::Published), "plain", &html! {
                (maybe_count(status.published_total)) " in all"
            }))
            (card("Failing a minute", &rate(failing), Some(Tab::Retrying),
                if failing.is_some_and(|n| n > 0.0) { "warn" } else { "plain" }, &html! { (maybe_count(status.failed_total)) " attempts in all" }))
            (card("Dead", &capped(status.dead, DEAD_CAP), Some(Tab::Dead),
                if status.dead > 0 { "bad" } else { "plain" }, &html! { "kept until somebody decides" }))
            (card("p95 commit to confirm", &millis(snapshot.p95_ms()), None, "plain", &html! { "of the last minute with one" }))
        }
    }
}

fn card(title: &str, figure: &str, link: Option<Tab>, class: &str, note: &Markup) -> Markup {
    html! {
        div class={ "card " (class) } {
            dt { @match link { Some(tab) => { a href=(tab.path()) { (title) } } None => { (title) } } }
            dd.figure { (figure) }
            dd.note { (note) }
        }
    }
}

/// Recent failures in groups.
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
                        (maybe_count(destination.pending)) " waiting · " (rate(destination.published_per_s)) "/s · p95 "
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
