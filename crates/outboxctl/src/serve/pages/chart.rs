//! The charts of the overview: what each destination published in the last hour, 6 hours or 24 hours, what failed, and
//! the 95th percentile of the last hour. Each chart is also a table.

use crate::queries::model::Minute;
use crate::serve::format::{clock, count, millis};
use crate::serve::snapshot::{Period, Snapshot};
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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Range {
    Hour,
    SixHours,
    Day,
}

impl Range {
    pub const ALL: [Self; 3] = [Self::Hour, Self::SixHours, Self::Day];

    /// The id of its part of the page.
    pub fn id(self) -> &'static str {
        match self {
            Self::Hour => "chart-1h",
            Self::SixHours => "chart-6h",
            Self::Day => "chart-24h",
        }
    }

    pub fn label(self) -> &'static str {
        match self {
            Self::Hour => "1 h",
            Self::SixHours => "6 h",
            Self::Day => "24 h",
        }
    }

    /// The length of a slot, in s.
    fn slot_s(self) -> i64 {
        match self {
            Self::Hour => 60,
            Self::SixHours | Self::Day => 600,
        }
    }

    /// The number of slots, with the current one.
    fn slots(self) -> usize {
        match self {
            Self::Hour => 61,
            Self::SixHours => 37,
            Self::Day => 145,
        }
    }

    fn unit(self) -> &'static str {
        match self {
            Self::Hour => "a minute",
            Self::SixHours | Self::Day => "in 10 minutes",
        }
    }
}

/// The numbers of a chart, by slot.
struct Data {
    range: Range,
    /// Seconds since 1970.
    starts: Vec<f64>,
    /// The destinations, the one with the most messages first, each with what it published.
    series: Vec<(String, Vec<i64>)>,
    retried: Vec<i64>,
    failed: Vec<i64>,
    /// Empty = not known for this range.
    p95_ms: Vec<Option<f64>>,
}

impl Data {
    fn of(snapshot: &Snapshot, range: Range) -> Self {
        Self::new(range, snapshot.now.epoch_s, &snapshot.history, &snapshot.throughput)
    }

    fn new(range: Range, now_s: f64, history: &[Period], minutes: &[Minute]) -> Self {
        let (slots, slot_s) = (range.slots(), range.slot_s());
        let last = (now_s as i64).div_euclid(slot_s);
        let first = last + 1 - slots as i64;
        let mut data = Self {
            range,
            starts: (first..=last).map(|number| (number * slot_s) as f64).collect(),
            series: Vec::new(),
            retried: vec![0; slots],
            failed: vec![0; slots],
            p95_ms: Vec::new(),
        };
        let mut published: BTreeMap<&str, Vec<i64>> = BTreeMap::new();
        for period in history.iter().filter(|period| period.length_s as i64 == slot_s) {
            let index = (period.start as i64).div_euclid(slot_s) - first;
            let Some(index) = usize::try_from(index).ok().filter(|index| *index < slots) else {
                continue;
            };
            published.entry(&period.destination).or_insert_with(|| vec![0; slots])[index] += period.published;
            data.retried[index] += period.retried;
            data.failed[index] += period.failed;
        }
        let mut series: Vec<(String, Vec<i64>)> = published
            .into_iter()
            .map(|(name, counts)| (name.to_owned(), counts))
            .collect();
        series.sort_by_key(|(_, counts)| -sum(counts));
        if series.len() > SERIES_MAX {
            let rest = series.split_off(SERIES_MAX - 1);
            let of_all = |slot: usize| rest.iter().map(|(_, counts)| counts[slot]).sum();
            series.push((format!("{} others", rest.len()), (0..slots).map(of_all).collect()));
        }
        data.series = series;
        if range == Range::Hour {
            let p95_at = |start: &f64| minutes.iter().find(|minute| minute.at == *start)?.p95_ms;
            data.p95_ms = data.starts.iter().map(p95_at).collect();
        }
        data
    }

    fn total(&self, slot: usize) -> i64 {
        let published: i64 = self.series.iter().map(|(_, counts)| counts[slot]).sum();
        published + self.retried[slot] + self.failed[slot]
    }

    /// A slot in words, for the mouse, the keyboard and screen readers.
    fn words(&self, slot: usize) -> String {
        let mut words = format!("{}:", hour(self.starts[slot]));
        for (name, counts) in self.series.iter().filter(|(_, counts)| counts[slot] > 0) {
            write!(words, " {name} {},", count(counts[slot])).expect("write to a string");
        }
        for (what, n) in [("retried", self.retried[slot]), ("failed", self.failed[slot])] {
            if n > 0 {
                write!(words, " {what} {},", count(n)).expect("write to a string");
            }
        }
        if let Some(Some(p95)) = self.p95_ms.get(slot) {
            write!(words, " p95 {},", millis(Some(*p95))).expect("write to a string");
        }
        if words.ends_with(':') {
            words += " nothing";
        }
        words.trim_end_matches(',').to_owned()
    }
}

fn sum(counts: &[i64]) -> i64 {
    counts.iter().sum()
}

/// The height of a number of messages.
struct Scale {
    top: f64,
    is_logarithmic: bool,
}

impl Scale {
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

pub fn chart(snapshot: &Snapshot, range: Range) -> Markup {
    if snapshot.throughput.is_empty() {
        return html! { p.empty { "Not counted: outbox is not in shared_preload_libraries." } };
    }
    let data = Data::of(snapshot, range);
    html! {
        (legend(&data))
        (bars(&data))
        @if !data.p95_ms.is_empty() { (line(&data)) }
        (axis(&data))
        details { summary { "As a table" } (table(&data)) }
    }
}

fn legend(data: &Data) -> Markup {
    html! {
        ul.legend {
            @for (index, (name, counts)) in data.series.iter().enumerate() {
                li { span class={ "swatch s" (index) } {} (name) " " b { (count(sum(counts))) } }
            }
            @if data.series.is_empty() { li { "nothing published" } }
            li { span.swatch.retried {} "retried " b { (count(sum(&data.retried))) } }
            li { span.swatch.failed {} "failed " b { (count(sum(&data.failed))) } }
        }
    }
}

fn bars(data: &Data) -> Markup {
    let totals: Vec<i64> = (0..data.starts.len()).map(|slot| data.total(slot)).collect();
    let scale = Scale::of(&totals);
    let width = totals.len() * SLOT;
    let about = format!(
        "The last {}: {} published, {} retried, {} failed; at most {} {}. Left and right arrow keys show the values.",
        data.range.label(),
        count(data.series.iter().map(|(_, counts)| sum(counts)).sum()),
        count(sum(&data.retried)),
        count(sum(&data.failed)),
        count(totals.iter().copied().max().unwrap_or_default()),
        data.range.unit(),
    );
    html! {
        div.plot.readable tabindex="0" role="group" aria-label=(about) {
            span.scale {
                (count(scale.top as i64)) " " (data.range.unit())
                @if scale.is_logarithmic { " (logarithmic)" }
            }
            span.scale.middle { (count(scale.middle() as i64)) }
            svg.bars viewBox=(format!("0 0 {width} {HEIGHT}")) preserveAspectRatio="none" aria-hidden="true" {
                line.grid x1="0" x2=(width) y1="0.5" y2="0.5" {}
                line.grid x1="0" x2=(width) y1=(HEIGHT / 2.0) y2=(HEIGHT / 2.0) {}
                line.grid x1="0" x2=(width) y1=(HEIGHT - 0.5) y2=(HEIGHT - 0.5) {}
                @for (class, path) in stacks(data, &scale) { path class=(class) d=(path) {} }
                @for slot in 0..totals.len() {
                    g data-of=(data.starts[slot]) { title { (data.words(slot)) } rect.slot x=(slot * SLOT) y="0" width=(SLOT) height=(HEIGHT) {} }
                }
            }
        }
    }
}

/// The bars, as one path for each class: published by destination, then retried and failed on top.
fn stacks(data: &Data, scale: &Scale) -> Vec<(String, String)> {
    let mut layers: Vec<(String, &[i64])> = Vec::new();
    for (index, (_, counts)) in data.series.iter().enumerate() {
        layers.push((format!("s{index}"), counts));
    }
    layers.push(("retried".into(), &data.retried));
    layers.push(("failed".into(), &data.failed));
    let mut paths = vec![String::new(); layers.len()];
    for slot in 0..data.starts.len() {
        let total = data.total(slot);
        let mut base = HEIGHT;
        for ((_, counts), path) in layers.iter().zip(&mut paths) {
            let n = counts[slot];
            if n == 0 {
                continue;
            }
            // Each part has its share of the bar, and even a single message is visible.
            let height = (scale.height(total) * n as f64 / total as f64).max(1.5);
            base = (base - height).max(0.0);
            let (x, width) = (slot * SLOT + 1, SLOT - 2);
            write!(path, "M{x} {base:.1}h{width}v{height:.1}h-{width}z").expect("write to a string");
        }
    }
    let classes = layers.into_iter().map(|(class, _)| class);
    classes.zip(paths).filter(|(_, path)| !path.is_empty()).collect()
}

fn line(data: &Data) -> Markup {
    let width = data.starts.len() * SLOT;
    let slowest = data.p95_ms.iter().copied().flatten().fold(0.0, f64::max);
    let top = nice(slowest);
    html! {
        div.plot {
            span.scale { "p95 from enqueue to confirm, to " (millis(Some(top))) }
            svg.line viewBox=(format!("0 0 {width} {LINE_HEIGHT}")) preserveAspectRatio="none" role="img"
                aria-label=(format!("95th percentile from enqueue to confirm, at most {}", millis(Some(slowest)))) {
                line.grid x1="0" x2=(width) y1="0.5" y2="0.5" {}
                line.grid x1="0" x2=(width) y1=(LINE_HEIGHT - 0.5) y2=(LINE_HEIGHT - 0.5) {}
                @for path in paths(&data.p95_ms, top) { polyline points=(path) {} }
            }
        }
    }
}

/// Lines through the slots that have a value; a slot without one breaks the line. One alone is a short dash.
fn paths(values_ms: &[Option<f64>], top: f64) -> Vec<String> {
    let mut paths = Vec::new();
    let mut path = String::new();
    for (index, value_ms) in values_ms.iter().enumerate() {
        let Some(value_ms) = value_ms else {
            paths.extend((!path.is_empty()).then(|| std::mem::take(&mut path)));
            continue;
        };
        let y = LINE_HEIGHT - 2.0 - value_ms / top * (LINE_HEIGHT - 4.0);
        let (from, to) = (index * SLOT + 1, index * SLOT + SLOT - 1);
        write!(path, "{from},{y:.1} {to},{y:.1} ").expect("write to a string");
    }
    paths.extend((!path.is_empty()).then_some(path));
    paths
}

fn axis(data: &Data) -> Markup {
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
fn table(data: &Data) -> Markup {
    html! {
        div.scroll tabindex="0" role="region" aria-label="Values" {
            table {
                thead {
                    tr {
                        th { "UTC" }
                        @for (name, _) in &data.series { th.n { (name) } }
                        th.n { "Retried" } th.n { "Failed" }
                        @if !data.p95_ms.is_empty() { th.n { "p95" } }
                    }
                }
                tbody {
                    @for slot in (0..data.starts.len()).rev() {
                        tr {
                            td { (hour(data.starts[slot])) }
                            @for (_, counts) in &data.series { td.n { (count(counts[slot])) } }
                            td.n { (count(data.retried[slot])) } td.n { (count(data.failed[slot])) }
                            @if let Some(p95) = data.p95_ms.get(slot) { td.n { (millis(*p95)) } }
                        }
                    }
                }
            }
        }
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
        let sums = Range::ALL.map(|range| {
            let data = Data::new(range, NOW_S, &history, &[]);
            sum(&data.series[0].1)
        });
        assert_eq!(sums, [8, 100, 300]);
    }

    #[test]
    fn the_destinations_with_the_most_messages_have_series_of_their_own() {
        let history: Vec<Period> = (1..=9).map(|n| period(&format!("d{n}"), 1, 60, n * 10)).collect();
        let data = Data::new(Range::Hour, NOW_S, &history, &[]);
        let names: Vec<&str> = data.series.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["d9", "d8", "d7", "d6", "d5", "4 others"]);
        assert_eq!(sum(&data.series[5].1), 100);
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
        assert!(!Scale::of(&totals).is_logarithmic);
        totals[30] = 20_000;
        let scale = Scale::of(&totals);
        assert!(scale.is_logarithmic);
        assert!(scale.height(40) > HEIGHT / 4.0 && scale.height(20_000) <= HEIGHT);
        assert!(Scale::of(&[3, 900]).is_logarithmic);
        assert!(!Scale::of(&[]).is_logarithmic);
    }

    #[test]
    fn a_single_failure_among_thousands_is_visible() {
        let history = [Period {
            failed: 1,
            ..period("a", 0, 60, 100_000)
        }];
        let data = Data::new(Range::Hour, NOW_S, &history, &[]);
        let scale = Scale::of(&[data.total(60)]);
        let paths = stacks(&data, &scale);
        let (class, path) = paths.last().expect("a path");
        assert!(class == "failed" && path.contains("v1.5"), "{class} {path}");
    }
}
