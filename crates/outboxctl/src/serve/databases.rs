//! The list of the databases, if there are several: a line for each, with what matters first, and a link to its pages.

use super::access::Viewer;
use super::context::{PageContext, PageRequest, SiteDatabase, View};
use super::format::{capped, count, distance_of, known};
use super::live::{clock_of_reading, overview_page, title_prefix};
use super::overview::alerts;
use super::page::{LivePart, LiveParts, MonitorPage, badge};
use super::snapshot::{DEAD_CAP, MonitorSnapshot};
use crate::failure::{Code, Failure};
use crate::queries::state::Tone;
use axum::Extension;
use axum::http::StatusCode;
use maud::{Markup, html};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

/// Characters of a name that its word in a path has as they are.
const PLAIN: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'-')
    .remove(b'.')
    .remove(b'_')
    .remove(b'~')
    .remove(b'@')
    .remove(b':');

/// The word of a database in paths.
pub fn word(name: &str) -> String {
    utf8_percent_encode(name, PLAIN).to_string()
}

/// The name of each database: the first of its forms that no other one has.
pub fn names(databases: &[[String; 3]]) -> Result<Vec<String>, Failure> {
    let name = |forms: &[String; 3]| {
        let is_unique = |at: &usize| databases.iter().filter(|other| other[*at] == forms[*at]).count() == 1;
        forms[(0..2).find(is_unique).unwrap_or(2)].clone()
    };
    let names: Vec<String> = databases.iter().map(name).collect();
    match names.iter().enumerate().find(|(at, name)| names[..*at].contains(name)) {
        Some((_, twice)) => Err(Failure::new(Code::Usage, format!("database {twice} is given twice"))),
        None => Ok(names),
    }
}

/// The overview of the database that the path names, or of the only one. Else the list.
pub async fn home(
    request: PageRequest,
    Extension(viewer): Extension<Viewer>,
    context: Result<PageContext, StatusCode>,
) -> Markup {
    match context {
        Ok(context) => overview_page(&context),
        Err(_) => {
            let live = &request.site.list.borrow().clone().live;
            let page = MonitorPage::Other;
            let body = html! { h1 { "Databases" } (live.element(page, "databases")) };
            request.frame(None, live, &viewer, page, "Databases", &body)
        }
    }
}

/// The live parts of the list.
pub fn view(databases: &[Arc<SiteDatabase>]) -> View {
    let (lines, problems): (Vec<_>, Vec<_>) = databases.iter().map(|database| line(database)).unzip();
    let part = |id, markup: Markup| LivePart {
        pages: &[MonitorPage::Other],
        id,
        markup: markup.into_string(),
    };
    let now = SystemTime::now();
    let now_s = now.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
    View {
        live: LiveParts {
            parts: vec![part("pulse", clock_of_reading(now_s)), part("databases", table(&lines))],
            problems: title_prefix(problems.iter().sum()),
            change: String::new(),
        },
        snapshot: None,
        lost: None,
        read_at: now,
    }
}

fn table(lines: &[Markup]) -> Markup {
    html! {
        div.scroll tabindex="0" role="region" aria-label="Databases" { table.stack.fleet.databases {
            thead { tr {
                th { "Database" } th { "State" } th.n { "Pending" } th.n { "Retrying" } th.n { "Dead" } th { "Last published" } th.n { "Problems" } th { "Worst problem" }
            } }
            tbody { @for line in lines { (line) } }
        } }
    }
}

/// The line of a database, and the number of its problems. The numbers of a lost database are old: they are not shown.
fn line(database: &SiteDatabase) -> (Markup, usize) {
    let view = database.view();
    let snapshot = view.snapshot.as_ref().filter(|_| view.lost.is_none());
    let alerts = alerts(snapshot, view.lost.as_ref());
    let worst = alerts.first();
    let (tone, state) = match worst {
        _ if view.lost.is_some() => (Tone::Bad, "unreachable"),
        Some(alert) if alert.is_bad => (Tone::Bad, "failing"),
        Some(_) => (Tone::Warn, "warning"),
        None => (Tone::Ok, "ok"),
    };
    let waiting = snapshot.and_then(|snapshot| snapshot.slow.waiting.as_ref());
    let line = html! {
        tr data-of=(database.name) {
            td data-label="Database" { a href={ "db/" (word(&database.name)) "/" } { (database.name) } }
            td data-label="State" { (badge(state, tone)) }
            td.n data-label="Pending" { (known(snapshot.and_then(|snapshot| snapshot.status.pending), count)) }
            td.n data-label="Retrying" { (known(waiting, |waiting| waiting.shown(waiting.retrying))) }
            td.n data-label="Dead" { (known(snapshot.map(|snapshot| snapshot.status.dead), |n| capped(n, DEAD_CAP))) }
            td.time data-label="Last published" { @match snapshot.and_then(last_published) {
                Some((at, now)) => { (distance_of(at, now)) }
                None => { "–" }
            } }
            td.n data-label="Problems" { (alerts.len()) }
            td.error data-label="Worst problem" { @match (&view.lost, worst) {
                (Some(lost), _) => { (lost.why()) }
                (None, Some(alert)) => { (alert.title) }
                (None, None) => { "–" }
            } }
        }
    };
    (line, alerts.len())
}

/// The start of the last minute with a published message, or of the last period of a day, and now.
fn last_published(snapshot: &MonitorSnapshot) -> Option<(f64, f64)> {
    let minutes = snapshot.throughput.iter().map(|minute| (minute.at, minute.published));
    let periods = snapshot
        .slow
        .history
        .iter()
        .map(|period| (period.start, period.published));
    let published = minutes.chain(periods).filter(|(_, published)| *published > 0);
    let last = published.map(|(at, _)| at).max_by(f64::total_cmp)?;
    Some((last, snapshot.now.epoch_s))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(databases: &[(&str, &str, u16)]) -> Result<Vec<String>, String> {
        let forms = |(name, host, port): &(&str, &str, u16)| {
            [
                (*name).to_owned(),
                format!("{name}@{host}"),
                format!("{name}@{host}:{port}"),
            ]
        };
        let forms: Vec<_> = databases.iter().map(forms).collect();
        names(&forms).map_err(|failure| failure.message)
    }

    #[test]
    fn a_database_has_the_shortest_name_that_no_other_one_has() {
        for (databases, wanted) in [
            (&[("shop", "a", 5432)][..], &["shop"][..]),
            (&[("shop", "a", 5432), ("stock", "a", 5432)], &["shop", "stock"]),
            (
                &[("shop", "a", 5432), ("stock", "a", 1), ("shop", "b", 5432)],
                &["shop@a", "stock", "shop@b"],
            ),
            (
                &[("shop", "a", 1), ("shop", "b", 2), ("shop", "b", 3)],
                &["shop@a", "shop@b:2", "shop@b:3"],
            ),
        ] {
            assert_eq!(named(databases).unwrap(), wanted);
        }
        let twice = named(&[("shop", "a", 1), ("shop", "b", 2), ("shop", "a", 1)]);
        assert_eq!(twice.unwrap_err(), "database shop@a:1 is given twice");
    }

    #[test]
    fn a_name_is_one_word_of_a_path() {
        assert_eq!(word("shop@db.example:5432"), "shop@db.example:5432");
        assert_eq!(word("my shop/\"?#%é"), "my%20shop%2F%22%3F%23%25%C3%A9");
    }
}
