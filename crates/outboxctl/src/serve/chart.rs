//! The charts of the overview, for the last hour, 6 hours or 24 hours: what was pending and what was published by
//! destination, the failed attempts, and the 95th percentile of the last hour. Each chart is also a table.

use super::backlog::BacklogHistory;
use super::format::{clock, count, known, ms};
use super::snapshot::{MonitorSnapshot, Period};
use crate::format::counted;
use crate::queries::model::Minute;
use maud::{Markup, html};
use std::collections::BTreeMap;
use std::fmt::Write;

const SLOT: usize = 10;
const HEIGHT: f64 = 160.0;
const LINE_HEIGHT: f64 = 56.0;
/// The number of destinations with their own colour; the others share one.
const SERIES_MAX: usize = 6;

/// The time that a chart shows.
pub struct ChartRange {
    /// Of its part of the page.
    pub id: &'static str,
    pub label: &'static str,
    slot_s: i64,
    /// With the current one.
    slots: usize,
    unit: &'static str,
}

const fn range(id: &'static str, label: &'static str, slot_s: i64, slots: usize, unit: &'static str) -> ChartRange {
    ChartRange {
        id,
        label,
        slot_s,
        slots,
        unit,
    }
}

pub static RANGES: [ChartRange; 3] = [
    range("chart-1h", "1 h", 60, 61, "a minute"),
    range("chart-6h", "6 h", 600, 37, "in 10 minutes"),
    range("chart-24h", "24 h", 600, 145, "in 10 minutes"),
];

/// The lengths of slots in seconds, each with the most slots that a chart shows.
pub const PERIODS: [(i64, usize); 2] = [(60, 61), (600, 145)];

/// The numbers of messages by slot that a plot shows in one colour.
struct Series {
    class: String,
    name: String,
    counts: Vec<i64>,
}

impl Series {
    fn sum(&self) -> i64 {
        self.counts.iter().sum()
    }

    fn last(&self) -> i64 {
        self.counts.last().copied().unwrap_or_default()
    }
}

struct ChartData {
    /// Seconds since 1970.
    starts: Vec<f64>,
    /// By destination, in the order of the names.
    pending: Vec<Series>,
    /// The first slot in which the monitor read what is pending.
    pending_from: usize,
    published: Vec<Series>,
    /// The attempts that were retried, and those that were the last.
    failed: [Series; 2],
    /// Empty = not known for this range.
    p95_ms: Vec<Option<f64>>,
}

/// The numbers of each destination by slot.
type Counts<'a> = BTreeMap<&'a str, Vec<i64>>;

impl ChartData {
    fn new(
        range: &'static ChartRange,
        now_s: f64,
        backlog: &BacklogHistory,
        history: &[Period],
        minutes: &[Minute],
    ) -> Self {
        let last = (now_s as i64).div_euclid(range.slot_s);
        let first = last + 1 - range.slots as i64;
        let starts: Vec<f64> = (first..=last).map(|number| (number * range.slot_s) as f64).collect();
        let slot = |number: i64| usize::try_from(number - first).ok().filter(|slot| *slot < range.slots);
        let none = || vec![0; range.slots];
        let (mut published, mut pending) = (Counts::new(), Counts::new());
        let (mut retried, mut failed, mut pending_from) = (none(), none(), range.slots);
        for period in history.iter().filter(|period| period.length_s as i64 == range.slot_s) {
            if let Some(slot) = slot((period.start as i64).div_euclid(range.slot_s)) {
                published.entry(&period.destination).or_insert_with(none)[slot] += period.published;
                retried[slot] += period.retried;
                failed[slot] += period.failed;
            }
        }
        for (number, most) in backlog.periods(range.slot_s) {
            if let Some(slot) = slot(number) {
                pending_from = pending_from.min(slot);
                for (destination, n) in most {
                    pending.entry(destination).or_insert_with(none)[slot] = *n;
                }
            }
        }
        let shown = shown(&pending, &published);
        let one = |class: &str, counts| Series {
            class: class.to_owned(),
            name: class.to_owned(),
            counts,
        };
        let p95_at = |start: &f64| minutes.iter().find(|minute| minute.at == *start)?.p95_ms;
        let p95_ms = match range.slot_s {
            60 => starts.iter().map(p95_at).collect(),
            _ => Vec::new(),
        };
        Self {
            starts,
            pending: series(pending, &shown),
            pending_from,
            published: series(published, &shown),
            failed: [one("retried", retried), one("failed", failed)],
            p95_ms,
        }
    }

    /// A slot in words, for the mouse, the keyboard and screen readers.
    fn words(&self, slot: usize) -> String {
        let part = |what: &str, series: &[Series]| {
            let counted = series.iter().filter(|series| series.counts[slot] > 0);
            let words: Vec<String> = counted
                .map(|series| format!("{} {}", series.name, count(series.counts[slot])))
                .collect();
            (!words.is_empty()).then(|| format!("{what}{}", words.join(", ")))
        };
        let p95 = self.p95_ms.get(slot).copied().flatten();
        let words: Vec<String> = [
            part("pending ", &self.pending),
            part("published ", &self.published),
            part("", &self.failed),
            p95.map(|p95| format!("p95 {}", ms(p95))),
        ]
        .into_iter()
        .flatten()
        .collect();
        let words = if words.is_empty() {
            "nothing".to_owned()
        } else {
            words.join("; ")
        };
        format!("{}: {words}", hour(self.starts[slot]))
    }
}

/// The destinations that a chart shows with their own colour, each with its class: those with the most messages. A name
/// keeps its colour while the other names change, unless two names want the same one.
fn shown<'a>(pending: &Counts<'a>, published: &Counts<'a>) -> BTreeMap<&'a str, String> {
    let mut weights: BTreeMap<&str, i64> = BTreeMap::new();
    for (name, counts) in pending.iter().chain(published) {
        *weights.entry(name).or_default() += counts.iter().sum::<i64>();
    }
    let mut names: Vec<&str> = weights.keys().copied().collect();
    if names.len() > SERIES_MAX {
        names.sort_by_key(|name| -weights[name]);
        names.truncate(SERIES_MAX - 1);
        names.sort_unstable();
    }
    let mut free: Vec<usize> = (0..SERIES_MAX).collect();
    let mut colour = |name: &str| {
        let hash = name
            .bytes()
            .fold(0_usize, |hash, byte| hash.wrapping_mul(31).wrapping_add(byte.into()));
        let wanted = free.iter().position(|colour| *colour >= hash % SERIES_MAX).unwrap_or(0);
        format!("s{}", free.remove(wanted))
    };
    names.into_iter().map(|name| (name, colour(name))).collect()
}

/// One series for each destination that is shown, and one for all others.
fn series(counts: Counts<'_>, shown: &BTreeMap<&str, String>) -> Vec<Series> {
    let (own, others): (Vec<_>, Vec<_>) = counts.into_iter().partition(|(name, _)| shown.contains_key(name));
    let mut all: Vec<Series> = own
        .into_iter()
        .map(|(name, counts)| Series {
            class: shown[name].clone(),
            name: name.to_owned(),
            counts,
        })
        .collect();
    let number = others.len() as i64;
    let sum = |a: Vec<i64>, b: Vec<i64>| a.iter().zip(b).map(|(a, b)| a + b).collect();
    if let Some(counts) = others.into_iter().map(|(_, counts)| counts).reduce(sum) {
        all.push(Series {
            class: "rest".to_owned(),
            name: counted(number, "other", "others"),
            counts,
        });
    }
    all
}

pub fn chart(snapshot: &MonitorSnapshot, backlog: &BacklogHistory, range: &'static ChartRange) -> Markup {
    if snapshot.throughput.is_empty() {
        return html! { p.empty { "Not counted: outbox is not in shared_preload_libraries." } };
    }
    let (history, minutes) = (&snapshot.slow.history, &snapshot.throughput);
    let data = ChartData::new(range, snapshot.now.epoch_s, backlog, history, minutes);
    let sum = |series: &[Series]| count(series.iter().map(Series::sum).sum());
    let [retried, failed] = &data.failed;
    let about = format!(
        "The last {}: {} published, {} retried, {} failed; {} pending now. Left and right arrow keys show the values.",
        range.label,
        sum(&data.published),
        count(retried.sum()),
        count(failed.sum()),
        count(data.pending.iter().map(Series::last).sum()),
    );
    let (width, in_all) = (range.slots * SLOT, format!(" in {}", range.label));
    let since = (data.pending_from > 0)
        .then(|| data.starts.get(data.pending_from))
        .flatten();
    html! {
        div.plots.readable tabindex="0" role="group" aria-label=(about) {
            div.plot {
                (legend(html! { "Pending messages" }, &data.pending, Series::last, " now"))
                @if let Some(since) = since { span.note { " read since " (hour(*since)) } }
                (bars(&data.pending, range.slots))
            }
            div.plot {
                (legend(html! { "Published " (range.unit) }, &data.published, Series::sum, &in_all))
                (bars(&data.published, range.slots))
            }
            div.plot.low {
                (legend(html! { "Failed attempts " (range.unit) }, &data.failed, Series::sum, &in_all))
                (bars(&data.failed, range.slots))
            }
            @if !data.p95_ms.is_empty() { (line(&data)) }
            svg.slots viewBox=(format!("0 0 {width} 1")) preserveAspectRatio="none" aria-hidden="true" {
                @for slot in 0..range.slots {
                    g data-of=(data.starts[slot]) { title { (data.words(slot)) } rect.slot x=(slot * SLOT) y="0" width=(SLOT) height="1" {} }
                }
            }
        }
        (axis(&data))
        details { summary { "As a table" } (values(&data)) }
    }
}

/// The title of a plot, and its series with a number each, whose time `when` says.
fn legend(title: Markup, series: &[Series], number: fn(&Series) -> i64, when: &str) -> Markup {
    html! {
        h3 { (title) }
        ul.legend {
            @if series.is_empty() { li { "none" } }
            @for series in series {
                li { span class={ "swatch " (series.class) } {} (series.name) " " b { (count(number(series))) } (when) }
            }
        }
    }
}

/// Stacked bars. The scale is linear, so that a part has its share of the height.
fn bars(series: &[Series], slots: usize) -> Markup {
    let total = |slot: usize| series.iter().map(|series| series.counts[slot]).sum::<i64>();
    let most = (0..slots).map(total).max().unwrap_or_default();
    let (top, width) = (nice(most as f64), slots * SLOT);
    html! {
        @if most > 0 { div.frame {
            span.scale { (count(top as i64)) }
            @if top % 2.0 == 0.0 { span.scale.middle { (count((top / 2.0) as i64)) } }
            span.scale.zero { "0" }
            svg.bars viewBox=(format!("0 0 {width} {HEIGHT}")) preserveAspectRatio="none" aria-hidden="true" {
                @for y in [0.5, HEIGHT / 2.0, HEIGHT - 0.5] { line.grid x1="0" x2=(width) y1=(y) y2=(y) {} }
                @for (class, path) in stacks(series, slots, top) { path class=(class) d=(path) {} }
            }
        } }
    }
}

/// The bars, as one path for each series.
fn stacks(series: &[Series], slots: usize, top: f64) -> Vec<(&str, String)> {
    let mut paths: Vec<(&str, String)> = series.iter().map(|series| (&*series.class, String::new())).collect();
    for slot in 0..slots {
        let mut base = HEIGHT;
        for (series, (_, path)) in series.iter().zip(&mut paths) {
            let n = series.counts[slot];
            if n > 0 {
                // Even a single message is visible.
                let height = (n as f64 / top * HEIGHT).max(1.5);
                base = (base - height).max(0.0);
                let (x, width) = (slot * SLOT + 1, SLOT - 2);
                write!(path, "M{x} {base:.1}h{width}v{height:.1}h-{width}z").expect("write to a string");
            }
        }
    }
    paths.retain(|(_, path)| !path.is_empty());
    paths
}

fn line(data: &ChartData) -> Markup {
    let width = data.starts.len() * SLOT;
    let values = || data.p95_ms.iter().copied().flatten();
    let slowest = values().fold(0.0, f64::max);
    let top = nice(slowest);
    html! {
        div.plot.low {
            h3 { "p95 from enqueue to confirm" }
            ul.legend {
                @match values().next_back() {
                    Some(latest) => { li { "latest " b { (ms(latest)) } } li { "highest " b { (ms(slowest)) } } }
                    None => { li { "no confirm" } }
                }
            }
            @if slowest > 0.0 { div.frame {
                span.scale { (ms(top)) }
                span.scale.zero { "0" }
                svg.line viewBox=(format!("0 0 {width} {LINE_HEIGHT}")) preserveAspectRatio="none" aria-hidden="true" {
                    @for y in [0.5, LINE_HEIGHT - 0.5] { line.grid x1="0" x2=(width) y1=(y) y2=(y) {} }
                    @for path in paths(&data.p95_ms, top) { polyline points=(path) {} }
                }
            } }
        }
    }
}

/// Lines through the slots that have a value; a slot without one breaks the line. One alone is a short dash.
fn paths(values_ms: &[Option<f64>], top: f64) -> Vec<String> {
    let points: Vec<Option<String>> = (values_ms.iter().enumerate())
        .map(|(index, value_ms)| {
            let y = LINE_HEIGHT - 2.0 - (*value_ms)? / top * (LINE_HEIGHT - 4.0);
            let (from, to) = (index * SLOT + 1, index * SLOT + SLOT - 1);
            Some(format!("{from},{y:.1} {to},{y:.1} "))
        })
        .collect();
    let lines = points.split(Option::is_none).filter(|line| !line.is_empty());
    lines
        .map(|line| line.iter().flatten().map(String::as_str).collect())
        .collect()
}

fn axis(data: &ChartData) -> Markup {
    let steps = 4;
    let at = |step: usize| data.starts.get(step * (data.starts.len() - 1) / steps).copied();
    html! {
        div.axis aria-hidden="true" {
            @for start in (0..steps).filter_map(at) { span { (hour(start)) } }
            span { "now" }
        }
    }
}

/// The latest slot first.
fn values(data: &ChartData) -> Markup {
    html! {
        div.scroll tabindex="0" role="region" aria-label="Values" { table {
            thead { tr {
                th { "UTC" }
                @for series in &data.pending { th.n { (series.name) " pending" } }
                @for series in &data.published { th.n { (series.name) } }
                @for series in &data.failed { th.n { (series.name) } }
                @if !data.p95_ms.is_empty() { th.n { "p95" } }
            } }
            tbody { @for slot in (0..data.starts.len()).rev() { tr {
                td { (hour(data.starts[slot])) }
                @for series in &data.pending {
                    td.n { (known((slot >= data.pending_from).then_some(series.counts[slot]), count)) }
                }
                @for series in data.published.iter().chain(&data.failed) { td.n { (count(series.counts[slot])) } }
                @if let Some(p95) = data.p95_ms.get(slot) { td.n { (known(*p95, ms)) } }
            } } }
        } }
    }
}

fn hour(epoch: f64) -> String {
    clock(epoch).chars().take(5).collect()
}

/// The next number of one digit times a power of ten; at least 1.
fn nice(most: f64) -> f64 {
    let power = 10_f64.powf(most.max(1.0).log10().floor());
    let steps = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0].map(|step| step * power);
    steps.into_iter().find(|step| *step >= most).unwrap_or(most)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::queries::model::DestinationRow;

    const NOW_S: f64 = 1_780_000_030.0;

    fn period(destination: &str, minutes_ago: i64, length_s: i64, published: i64) -> Period {
        let start = (NOW_S as i64 - minutes_ago * 60).div_euclid(length_s) * length_s;
        Period {
            destination: destination.into(),
            start: start as f64,
            length_s: length_s as f64,
            published,
            retried: 0,
            failed: 0,
        }
    }

    fn data(range: &'static ChartRange, pending: &[(&str, i64)], history: &[Period]) -> ChartData {
        let destinations: Vec<DestinationRow> = pending
            .iter()
            .map(|(name, pending)| DestinationRow {
                name: (*name).into(),
                pending: Some(*pending),
                ..DestinationRow::default()
            })
            .collect();
        let mut backlog = BacklogHistory::default();
        backlog.record(NOW_S, &PERIODS, &destinations);
        ChartData::new(range, NOW_S, &backlog, history, &[])
    }

    fn names(series: &[Series]) -> Vec<&str> {
        series.iter().map(|series| &*series.name).collect()
    }

    #[test]
    fn a_scale_ends_at_the_next_round_number() {
        for (most, top) in [
            (0.0, 1.0),
            (1.0, 1.0),
            (7.0, 8.0),
            (17.0, 20.0),
            (5001.0, 6_000.0),
            (0.4, 1.0),
        ] {
            assert_eq!(nice(most), top, "{most}");
        }
    }

    #[test]
    fn a_slot_without_a_value_breaks_the_line() {
        assert_eq!(paths(&[Some(1.0), Some(2.0), None, Some(1.0)], 2.0).len(), 2);
        assert!(paths(&[None], 1.0).is_empty());
    }

    #[test]
    fn the_history_of_what_is_pending_is_as_long_as_the_charts() {
        for range in &RANGES {
            let kept = PERIODS.iter().find(|(length_s, _)| *length_s == range.slot_s);
            assert!(kept.is_some_and(|(_, kept)| *kept >= range.slots), "{}", range.id);
        }
    }

    #[test]
    fn each_range_takes_its_own_periods_and_leaves_out_older_ones() {
        let history = [
            period("a", 0, 60, 3),
            period("a", 60, 60, 5),
            period("a", 61, 60, 7),
            period("a", 0, 600, 100),
            period("a", 500, 600, 200),
        ];
        let sums = RANGES
            .each_ref()
            .map(|range| data(range, &[("a", 4)], &history).published[0].sum());
        assert_eq!(sums, [8, 100, 300]);
        let pending = RANGES
            .each_ref()
            .map(|range| data(range, &[("a", 4)], &history).pending[0].sum());
        assert_eq!(pending, [4, 4, 4]);
    }

    #[test]
    fn the_destinations_with_the_most_messages_have_series_of_their_own() {
        let history: Vec<Period> = (1..=9).map(|n| period(&format!("d{n}"), 0, 60, n * 10)).collect();
        let data = data(&RANGES[0], &[("d1", 1000), ("d2", 1)], &history);
        assert_eq!(names(&data.published), ["d1", "d6", "d7", "d8", "d9", "4 others"]);
        assert_eq!(names(&data.pending), ["d1", "1 other"]);
        assert_eq!(
            data.words(60),
            format!(
                "{}: pending d1 1,000, 1 other 1; published d1 10, d6 60, d7 70, d8 80, d9 90, 4 others 140",
                hour(data.starts[60])
            )
        );
        assert!(data.words(0).ends_with(": nothing"));
    }

    #[test]
    fn a_name_keeps_its_colour_in_each_plot_and_while_others_come_and_go() {
        let class = |series: &[Series]| {
            series
                .iter()
                .find(|series| series.name == "default")
                .map(|one| one.class.clone())
        };
        let alone = data(&RANGES[0], &[("default", 1)], &[period("default", 1, 60, 1)]);
        let others = [
            period("audit", 1, 60, 900),
            period("default", 1, 60, 1),
            period("search", 1, 60, 5),
        ];
        let among = data(&RANGES[0], &[("audit", 9), ("default", 1)], &others);
        let classes = [&alone.pending, &alone.published, &among.pending, &among.published].map(|series| class(series));
        assert!(
            classes[0].is_some() && classes.iter().all(|class| *class == classes[0]),
            "{classes:?}"
        );
    }

    #[test]
    fn a_part_has_its_share_of_the_height_and_a_single_message_is_visible() {
        let one = |name: &str, n| Series {
            class: name.into(),
            name: name.into(),
            counts: vec![n],
        };
        let heights = |series: &[Series]| -> Vec<String> {
            let paths = stacks(series, 1, 80_000.0);
            let height = |path: &str| {
                path.split('v')
                    .nth(1)
                    .and_then(|rest| rest.split('h').next())
                    .map(str::to_owned)
            };
            paths.iter().filter_map(|(_, path)| height(path)).collect()
        };
        assert_eq!(heights(&[one("a", 40_000), one("b", 20_000)]), ["80.0", "40.0"]);
        assert_eq!(heights(&[one("a", 79_999), one("b", 1)])[1], "1.5");
    }
}
