//! The charts of the overview: what each destination published in the last hour, 6 hours or 24 hours, what failed, and
//! the 95th percentile of the last hour. Each chart is also a table.

use super::format::{clock, count, known, ms};
use super::snapshot::{MonitorSnapshot, Period};
use crate::queries::model::Minute;
use maud::{Markup, html};
use std::collections::BTreeMap;
use std::fmt::Write;

const SLOT: usize = 10;
const HEIGHT: f64 = 160.0;
const LINE_HEIGHT: f64 = 56.0;
/// The number of destinations with their own colour; the others share one.
const SERIES_MAX: usize = 6;
/// The scale is logarithmic if the highest bar is this many times the median bar, so that a burst does not flatten the
/// rest.
const BURST: i64 = 10;

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

/// The numbers of messages by slot that a chart shows in one colour.
struct Series {
    class: String,
    name: String,
    counts: Vec<i64>,
}

impl Series {
    fn sum(&self) -> i64 {
        self.counts.iter().sum()
    }
}

struct ChartData {
    range: &'static ChartRange,
    /// Seconds since 1970.
    starts: Vec<f64>,
    /// What the destinations published, the one with the most messages first; then what was retried and what failed.
    series: Vec<Series>,
    /// Empty = not known for this range.
    p95_ms: Vec<Option<f64>>,
}

impl ChartData {
    fn new(range: &'static ChartRange, now_s: f64, history: &[Period], minutes: &[Minute]) -> Self {
        let last = (now_s as i64).div_euclid(range.slot_s);
        let first = last + 1 - range.slots as i64;
        let starts: Vec<f64> = (first..=last).map(|number| (number * range.slot_s) as f64).collect();
        let none = || vec![0; range.slots];
        let (mut published, mut retried, mut failed) = (BTreeMap::<&str, Vec<i64>>::new(), none(), none());
        for period in history.iter().filter(|period| period.length_s as i64 == range.slot_s) {
            let slot = (period.start as i64).div_euclid(range.slot_s) - first;
            if let Some(slot) = usize::try_from(slot).ok().filter(|slot| *slot < range.slots) {
                published.entry(&period.destination).or_insert_with(none)[slot] += period.published;
                retried[slot] += period.retried;
                failed[slot] += period.failed;
            }
        }
        let one = |class: &str, name: &str, counts| Series {
            class: class.to_owned(),
            name: name.to_owned(),
            counts,
        };
        let mut series: Vec<Series> = published
            .into_iter()
            .map(|(name, counts)| one("", name, counts))
            .collect();
        series.sort_by_key(|series| -series.sum());
        if series.len() > SERIES_MAX {
            let rest = series.split_off(SERIES_MAX - 1);
            let of_all = |slot: usize| rest.iter().map(|series| series.counts[slot]).sum();
            let name = format!("{} others", rest.len());
            series.push(one("", &name, (0..range.slots).map(of_all).collect()));
        }
        for (index, series) in series.iter_mut().enumerate() {
            series.class = format!("s{index}");
        }
        series.extend([one("retried", "retried", retried), one("failed", "failed", failed)]);
        let p95_at = |start: &f64| minutes.iter().find(|minute| minute.at == *start)?.p95_ms;
        let p95_ms = match range.slot_s {
            60 => starts.iter().map(p95_at).collect(),
            _ => Vec::new(),
        };
        Self {
            range,
            starts,
            series,
            p95_ms,
        }
    }

    /// What was published, and what was not.
    fn parts(&self) -> (&[Series], &[Series]) {
        self.series.split_at(self.series.len() - 2)
    }

    fn total(&self, slot: usize) -> i64 {
        self.series.iter().map(|series| series.counts[slot]).sum()
    }

    /// A slot in words, for the mouse, the keyboard and screen readers.
    fn words(&self, slot: usize) -> String {
        let counted = self.series.iter().filter(|series| series.counts[slot] > 0);
        let mut words: Vec<String> = counted
            .map(|series| format!("{} {}", series.name, count(series.counts[slot])))
            .collect();
        words.extend((self.p95_ms.get(slot).copied().flatten()).map(|p95| format!("p95 {}", ms(p95))));
        if words.is_empty() {
            words.push("nothing".to_owned());
        }
        format!("{}: {}", hour(self.starts[slot]), words.join(", "))
    }
}

/// The height of a number of messages.
struct ChartScale {
    top: f64,
    is_logarithmic: bool,
}

impl ChartScale {
    fn of(totals: &[i64]) -> Self {
        let mut sorted: Vec<i64> = totals.iter().copied().filter(|total| *total > 0).collect();
        sorted.sort_unstable();
        let most = sorted.last().copied().unwrap_or_default();
        let median = sorted.get(sorted.len().saturating_sub(1) / 2).copied();
        Self {
            top: nice(most as f64),
            is_logarithmic: median.is_some_and(|median| most >= BURST * median),
        }
    }

    fn height(&self, n: i64) -> f64 {
        let part = match self.is_logarithmic {
            true => (n as f64).ln_1p() / self.top.ln_1p(),
            false => n as f64 / self.top,
        };
        part * HEIGHT
    }

    /// The number at half the height.
    fn middle(&self) -> f64 {
        match self.is_logarithmic {
            true => (self.top.ln_1p() / 2.0).exp_m1().round(),
            false => self.top / 2.0,
        }
    }
}

pub fn chart(snapshot: &MonitorSnapshot, range: &'static ChartRange) -> Markup {
    if snapshot.throughput.is_empty() {
        return html! { p.empty { "Not counted: outbox is not in shared_preload_libraries." } };
    }
    let (history, minutes) = (&snapshot.slow.history, &snapshot.throughput);
    let data = ChartData::new(range, snapshot.now.epoch_s, history, minutes);
    html! {
        ul.legend {
            @if data.parts().0.is_empty() { li { "nothing published" } }
            @for series in &data.series {
                li { span class={ "swatch " (series.class) } {} (series.name) " " b { (count(series.sum())) } }
            }
        }
        (bars(&data))
        @if !data.p95_ms.is_empty() { (line(&data)) }
        (axis(&data))
        details { summary { "As a table" } (values(&data)) }
    }
}

fn bars(data: &ChartData) -> Markup {
    let totals: Vec<i64> = (0..data.range.slots).map(|slot| data.total(slot)).collect();
    let scale = ChartScale::of(&totals);
    let width = totals.len() * SLOT;
    let (published, others) = data.parts();
    let others = others
        .iter()
        .map(|series| format!(", {} {}", count(series.sum()), series.name));
    let about = format!(
        "The last {}: {} published{}; at most {} {}. Left and right arrow keys show the values.",
        data.range.label,
        count(published.iter().map(Series::sum).sum()),
        others.collect::<String>(),
        count(totals.iter().copied().max().unwrap_or_default()),
        data.range.unit,
    );
    html! {
        div.plot.readable tabindex="0" role="group" aria-label=(about) {
            span.scale {
                (count(scale.top as i64)) " " (data.range.unit)
                @if scale.is_logarithmic { " (logarithmic)" }
            }
            span.scale.middle { (count(scale.middle() as i64)) }
            svg.bars viewBox=(format!("0 0 {width} {HEIGHT}")) preserveAspectRatio="none" aria-hidden="true" {
                @for y in [0.5, HEIGHT / 2.0, HEIGHT - 0.5] { line.grid x1="0" x2=(width) y1=(y) y2=(y) {} }
                @for (class, path) in stacks(data, &scale) { path class=(class) d=(path) {} }
                @for slot in 0..totals.len() {
                    g data-of=(data.starts[slot]) { title { (data.words(slot)) } rect.slot x=(slot * SLOT) y="0" width=(SLOT) height=(HEIGHT) {} }
                }
            }
        }
    }
}

/// The bars, as one path for each series.
fn stacks<'a>(data: &'a ChartData, scale: &ChartScale) -> Vec<(&'a str, String)> {
    let mut paths: Vec<(&str, String)> = data
        .series
        .iter()
        .map(|series| (&*series.class, String::new()))
        .collect();
    for slot in 0..data.range.slots {
        let total = data.total(slot);
        let mut base = HEIGHT;
        for (series, (_, path)) in data.series.iter().zip(&mut paths) {
            let n = series.counts[slot];
            if n > 0 {
                // Each part has its share of the bar, and even a single message is visible.
                let height = (scale.height(total) * n as f64 / total as f64).max(1.5);
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
    let slowest = data.p95_ms.iter().copied().flatten().fold(0.0, f64::max);
    let top = nice(slowest);
    html! {
        div.plot {
            span.scale { "p95 from enqueue to confirm, to " (ms(top)) }
            svg.line viewBox=(format!("0 0 {width} {LINE_HEIGHT}")) preserveAspectRatio="none" role="img"
                aria-label=(format!("95th percentile from enqueue to confirm, at most {}", ms(slowest))) {
                @for y in [0.5, LINE_HEIGHT - 0.5] { line.grid x1="0" x2=(width) y1=(y) y2=(y) {} }
                @for path in paths(&data.p95_ms, top) { polyline points=(path) {} }
            }
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
                @for series in &data.series { th.n { (series.name) } }
                @if !data.p95_ms.is_empty() { th.n { "p95" } }
            } }
            tbody { @for slot in (0..data.starts.len()).rev() { tr {
                td { (hour(data.starts[slot])) }
                @for series in &data.series { td.n { (count(series.counts[slot])) } }
                @if let Some(p95) = data.p95_ms.get(slot) { td.n { (known(*p95, ms)) } }
            } } }
        } }
    }
}

fn hour(epoch: f64) -> String {
    clock(epoch).chars().take(5).collect()
}

/// The next 1, 2 or 5 times a power of ten; at least 1.
fn nice(most: f64) -> f64 {
    let power = 10_f64.powf(most.max(1.0).log10().floor());
    let steps = [1.0, 2.0, 5.0, 10.0].map(|step| step * power);
    steps.into_iter().find(|step| *step >= most).unwrap_or(most)
}

#[cfg(test)]
mod tests {
    use super::*;

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

    #[test]
    fn a_scale_ends_at_the_next_round_number() {
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
    fn a_slot_without_a_value_breaks_the_line() {
        assert_eq!(paths(&[Some(1.0), Some(2.0), None, Some(1.0)], 2.0).len(), 2);
        assert!(paths(&[None], 1.0).is_empty());
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
        let sums = RANGES.each_ref().map(|range| {
            let data = ChartData::new(range, NOW_S, &history, &[]);
            data.series[0].sum()
        });
        assert_eq!(sums, [8, 100, 300]);
    }

    #[test]
    fn the_destinations_with_the_most_messages_have_series_of_their_own() {
        let history: Vec<Period> = (1..=9).map(|n| period(&format!("d{n}"), 1, 60, n * 10)).collect();
        let data = ChartData::new(&RANGES[0], NOW_S, &history, &[]);
        let names: Vec<&str> = data.series.iter().map(|series| series.name.as_str()).collect();
        assert_eq!(names, ["d9", "d8", "d7", "d6", "d5", "4 others", "retried", "failed"]);
        assert_eq!(data.series[5].sum(), 100);
        assert_eq!(
            data.words(59),
            format!(
                "{}: d9 90, d8 80, d7 70, d6 60, d5 50, 4 others 100",
                hour(data.starts[59])
            )
        );
        assert!(data.words(0).ends_with(": nothing"));
    }

    #[test]
    fn a_burst_does_not_flatten_the_rest() {
        let mut totals = vec![40; 60];
        assert!(!ChartScale::of(&totals).is_logarithmic);
        totals[30] = 20_000;
        let scale = ChartScale::of(&totals);
        assert!(scale.is_logarithmic);
        assert!(scale.height(40) > HEIGHT / 4.0 && scale.height(20_000) <= HEIGHT);
        assert!(ChartScale::of(&[3, 900]).is_logarithmic);
        assert!(!ChartScale::of(&[]).is_logarithmic);
    }

    #[test]
    fn a_single_failure_among_thousands_is_visible() {
        let history = [Period {
            failed: 1,
            ..period("a", 0, 60, 100_000)
        }];
        let data = ChartData::new(&RANGES[0], NOW_S, &history, &[]);
        let scale = ChartScale::of(&[data.total(60)]);
        let paths = stacks(&data, &scale);
        let (class, path) = paths.last().expect("a path");
        assert!(*class == "failed" && path.contains("v1.5"), "{class} {path}");
    }
}
