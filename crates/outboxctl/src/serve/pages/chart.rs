//! The last 60 minutes: bars of what was published, retried and failed, a line of the 95th percentile, and both as a table.

use crate::queries::model::Minute;
use crate::serve::format::{clock, count, millis};
use maud::{Markup, html};
use std::fmt::Write;

const SLOT: usize = 10;
const HEIGHT: f64 = 160.0;
const LINE_HEIGHT: f64 = 56.0;

pub fn chart(minutes: &[Minute]) -> Markup {
    if minutes.is_empty() {
        return html! { p.empty { "Nobody counts: outbox is not in shared_preload_libraries." } };
    }
    let width = minutes.len() * SLOT;
    let most = minutes.iter().map(total).max().unwrap_or_default();
    let top = nice(most as f64);
    let slowest = minutes.iter().filter_map(|minute| minute.p95_ms).fold(0.0, f64::max);
    let slow_top = nice(slowest);
    let published: i64 = minutes.iter().map(|minute| minute.published).sum();
    let retried: i64 = minutes.iter().map(|minute| minute.retried).sum();
    let failed: i64 = minutes.iter().map(|minute| minute.failed).sum();
    let about = format!(
        "In the last hour {} published, {} retried, {} failed; at most {} in a minute.",
        count(published),
        count(retried),
        count(failed),
        count(most)
    );
    html! {
        ul.legend {
            li { span.swatch.published {} "published " b { (count(published)) } }
            li { span.swatch.retried {} "retried " b { (count(retried)) } }
            li { span.swatch.failed {} "failed " b { (count(failed)) } }
        }
        div.plot {
            span.scale { (count(top as i64)) " a minute" }
            svg.bars viewBox=(format!("0 0 {width} {HEIGHT}")) preserveAspectRatio="none" role="img" aria-label=(about) {
                line.grid x1="0" x2=(width) y1="0.5" y2="0.5" {}
                line.grid x1="0" x2=(width) y1=(HEIGHT / 2.0) y2=(HEIGHT / 2.0) {}
                line.grid x1="0" x2=(width) y1=(HEIGHT - 0.5) y2=(HEIGHT - 0.5) {}
                @for (index, minute) in minutes.iter().enumerate() {
                    g {
                        title { (clock(minute.at)) ": " (count(minute.published)) " published, " (count(minute.retried)) " retried, "
                            (count(minute.failed)) " failed, p95 " (millis(minute.p95_ms)) }
                        rect.slot x=(index * SLOT) y="0" width=(SLOT) height=(HEIGHT) {}
                        (stack(index, minute, top))
                    }
                }
            }
        }
        div.plot {
            span.scale { "p95 from commit to confirm, to " (millis(Some(slow_top))) }
            svg.line viewBox=(format!("0 0 {width} {LINE_HEIGHT}")) preserveAspectRatio="none" role="img"
                aria-label=(format!("95th percentile from commit to confirm, at most {}", millis(Some(slowest)))) {
                line.grid x1="0" x2=(width) y1="0.5" y2="0.5" {}
                line.grid x1="0" x2=(width) y1=(LINE_HEIGHT - 0.5) y2=(LINE_HEIGHT - 0.5) {}
                @for path in paths(minutes, slow_top) { polyline points=(path) {} }
            }
        }
        div.axis aria-hidden="true" {
            @for index in [0, 15, 30, 45] { @if let Some(minute) = minutes.get(index) { span { (hour(minute.at)) } } }
            span { "now" }
        }
    }
}

fn total(minute: &Minute) -> i64 {
    minute.published + minute.retried + minute.failed
}

fn hour(epoch: f64) -> String {
    clock(epoch).chars().take(5).collect()
}

fn stack(index: usize, minute: &Minute, top: f64) -> Markup {
    let parts = [
        ("published", minute.published),
        ("retried", minute.retried),
        ("failed", minute.failed),
    ];
    let mut base = HEIGHT;
    let mut rects = Vec::new();
    for (class, n) in parts.into_iter().filter(|(_, n)| *n > 0) {
        // What there is of must be seen, however little it is.
        let height = (n as f64 / top * HEIGHT).max(1.5);
        base = (base - height).max(0.0);
        rects.push((class, base, height));
    }
    html! {
        @for (class, y, height) in rects {
            rect class=(class) x=(index * SLOT + 1) y=(format!("{y:.1}")) width=(SLOT - 2) height=(format!("{height:.1}")) {}
        }
    }
}

/// Lines through the minutes that have a value; a minute without one breaks the line. One alone is a short dash.
fn paths(minutes: &[Minute], top: f64) -> Vec<String> {
    let mut paths = Vec::new();
    let mut path = String::new();
    for (index, minute) in minutes.iter().enumerate() {
        let Some(p95) = minute.p95_ms else {
            paths.extend((!path.is_empty()).then(|| std::mem::take(&mut path)));
            continue;
        };
        let y = LINE_HEIGHT - 2.0 - p95 / top * (LINE_HEIGHT - 4.0);
        let (from, to) = (index * SLOT + 1, index * SLOT + SLOT - 1);
        write!(path, "{from},{y:.1} {to},{y:.1} ").expect("write to a string");
    }
    paths.extend((!path.is_empty()).then_some(path));
    paths
}

/// The next 1, 2 or 5 times a power of ten; at least 1.
fn nice(most: f64) -> f64 {
    let power = 10_f64.powf(most.max(1.0).log10().floor());
    let steps = [1.0, 2.0, 5.0, 10.0].map(|step| step * power);
    steps.into_iter().find(|step| *step >= most).unwrap_or(most)
}

/// The same as figures, the latest minute first.
pub fn table(minutes: &[Minute]) -> Markup {
    html! {
        div.scroll tabindex="0" role="region" aria-label="Minutes" {
            table {
                thead { tr { th { "Minute (UTC)" } th.n { "Published" } th.n { "Retried" } th.n { "Failed" } th.n { "p95" } } }
                tbody {
                    @for minute in minutes.iter().rev() {
                        tr {
                            td { (hour(minute.at)) }
                            td.n { (count(minute.published)) } td.n { (count(minute.retried)) } td.n { (count(minute.failed)) }
                            td.n { (millis(minute.p95_ms)) }
                        }
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
    fn the_scale_ends_at_a_round_figure() {
        for (most, top) in [
            (0.0, 1.0),
            (1.0, 1.0),
            (3.0, 5.0),
            (17.0, 20.0),
            (5001.0, 10_000.0),
            (0.4, 1.0),
        ] {
            assert_eq!(nice(most), top, "{most}");
        }
    }

    #[test]
    fn a_minute_without_a_value_breaks_the_line() {
        let minute = |p95_ms| Minute {
            at: 0.0,
            published: 1,
            retried: 0,
            failed: 0,
            p95_ms,
            ..Minute::default()
        };
        let minutes = [Some(1.0), Some(2.0), None, Some(1.0)].map(minute);
        assert_eq!(paths(&minutes, 2.0).len(), 2);
        assert!(paths(&[minute(None)], 1.0).is_empty());
    }

    #[test]
    fn a_single_failure_among_thousands_is_seen() {
        let minute = Minute {
            at: 0.0,
            published: 100_000,
            retried: 0,
            failed: 1,
            p95_ms: None,
            ..Minute::default()
        };
        let svg = chart(&[minute]).into_string();
        assert!(
            svg.contains(r#"class="failed""#) && svg.contains(r#"height="1.5""#),
            "{svg}"
        );
    }
}
