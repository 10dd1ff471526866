//! Runs two sides in pairs and shows what they measured: as a table, and as JSON under target/bench/. The file is
//! written again after each measurement, so that an interrupted run leaves its results.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Map, Value, json};

use crate::options::Options;
use crate::stats;

#[derive(Clone, Copy, PartialEq)]
pub enum Side {
    Ours,
    Other,
}

/// What one run of one side measured.
#[derive(Default)]
pub struct Sample(Vec<Figure>);

/// A number of a sample. A result has a line with the name of the row, a detail is printed below it.
#[derive(Clone, Copy)]
struct Figure {
    name: &'static str,
    unit: &'static str,
    is_detail: bool,
    value: f64,
}

impl Sample {
    pub fn result(self, name: &'static str, unit: &'static str, value: f64) -> Self {
        self.with(name, unit, false, value)
    }

    pub fn detail(self, name: &'static str, unit: &'static str, value: f64) -> Self {
        self.with(name, unit, true, value)
    }

    fn with(mut self, name: &'static str, unit: &'static str, is_detail: bool, value: f64) -> Self {
        self.0.push(Figure {
            name,
            unit,
            is_detail,
            value,
        });
        self
    }
}

/// One figure over all pairs. A detail may have samples of one side only.
struct Measurement {
    row: String,
    sides: [&'static str; 2],
    figure: Figure,
    ours: Vec<f64>,
    other: Vec<f64>,
}

pub struct BenchReport {
    about: Vec<(&'static str, String)>,
    options: Value,
    pairs: u32,
    measurements: Vec<Measurement>,
    /// For each goal its line, and whether it was met.
    goals: Vec<(String, bool)>,
    file: PathBuf,
}

impl BenchReport {
    pub fn new(options: &Options) -> Self {
        let started_s = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default()
            .as_secs();
        let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/bench");
        fs::create_dir_all(&directory).unwrap_or_else(|error| panic!("create {}: {error}", directory.display()));
        let directory = directory.canonicalize().expect("a directory just created");
        Self {
            about: Vec::new(),
            options: serde_json::to_value(options).expect("numbers and names"),
            pairs: options.pairs,
            measurements: Vec::new(),
            goals: Vec::new(),
            file: directory.join(format!("{started_s}.json")),
        }
    }

    pub fn file(&self) -> &Path {
        &self.file
    }

    /// Keeps the versions and settings of the first servers of the run.
    pub fn about(&mut self, about: impl FnOnce() -> Vec<(&'static str, String)>) {
        if self.about.is_empty() {
            self.about = about();
        }
    }

    /// Adds a line to the head of the table.
    pub fn note(&mut self, name: &'static str, text: String) {
        log_progress(&format!("{name}: {text}"));
        self.about.push((name, text));
    }

    /// Reports the figures of one run as shares of its first figure, the whole.
    pub fn shares(&mut self, row: &str, sides: [&'static str; 2], parts: Sample) {
        let whole = parts.0[0].value;
        let measurements = parts.0.into_iter().map(|figure| Measurement {
            row: row.to_owned(),
            sides,
            figure,
            ours: vec![figure.value],
            other: vec![whole],
        });
        self.measurements.extend(measurements);
        self.write();
    }

    /// Runs both sides in turn, the other side first.
    pub fn compare(&mut self, row: &str, sides: [&'static str; 2], mut run: impl FnMut(Side) -> Sample) {
        let mut measurements: Vec<Measurement> = Vec::new();
        for pair in 1..=self.pairs {
            for side in [Side::Other, Side::Ours] {
                let sample = run(side);
                let first = quantity(sample.0[0].value, sample.0[0].unit);
                let name = sides[usize::from(side == Side::Other)];
                log_progress(&format!("{row}, pair {pair} of {}: {name} {first}", self.pairs));
                for figure in sample.0 {
                    let known = measurements.iter().position(|known| known.figure.name == figure.name);
                    let at = known.unwrap_or(measurements.len());
                    if known.is_none() {
                        measurements.push(Measurement {
                            row: row.to_owned(),
                            sides,
                            figure,
                            ours: Vec::new(),
                            other: Vec::new(),
                        });
                    }
                    measurements[at].of(side).push(figure.value);
                }
            }
        }
        measurements
            .iter()
            .for_each(|measurement| log_progress(&measurement.line()));
        self.measurements.extend(measurements);
        self.write();
    }

    /// Checks the result `name` of the last row: `reached` gets its ratio and our median.
    pub fn goal(&mut self, name: &str, wanted: &str, reached: impl Fn(f64, f64) -> bool) {
        let mut results = self.measurements.iter().rev();
        let result = results.find(|measured| measured.figure.name == name).expect("a result");
        let (ratio, ours) = (
            result.ratio().map_or(f64::NAN, |(middle, ..)| middle),
            stats::median(&result.ours),
        );
        let is_met = reached(ratio, ours);
        let (word, ours) = (
            if is_met { "met" } else { "MISSED" },
            quantity(ours, result.figure.unit),
        );
        let line = format!("{word}: {}: {ours}, ratio {ratio:.2}, wanted {wanted}", result.name());
        log_progress(&line);
        self.goals.push((line, is_met));
        self.write();
    }

    pub fn are_goals_met(&self) -> bool {
        self.goals.iter().all(|(_, is_met)| *is_met)
    }

    fn write(&self) {
        let text = serde_json::to_string_pretty(&self.json()).expect("numbers and texts");
        fs::write(&self.file, text).unwrap_or_else(|error| panic!("write {}: {error}", self.file.display()));
    }

    pub fn text(&self) -> String {
        let about = self.about.iter().map(|(name, value)| format!("{name}: {value}"));
        let lines: Vec<String> = about
            .chain([format!("flags: {}", self.options), String::new(), heading()])
            .chain(self.measurements.iter().map(Measurement::line))
            .chain(self.goals.iter().map(|(line, _)| line.clone()))
            .collect();
        lines.join("\n")
    }

    fn json(&self) -> Value {
        let about = self
            .about
            .iter()
            .map(|(name, value)| ((*name).to_owned(), json!(value)));
        let goals = self
            .goals
            .iter()
            .map(|(line, is_met)| json!({"text": line, "met": is_met}));
        json!({
            "about": about.collect::<Map<_, _>>(),
            "options": self.options,
            "measurements": self.measurements.iter().map(Measurement::json).collect::<Vec<_>>(),
            "goals": goals.collect::<Vec<_>>(),
        })
    }
}

impl Measurement {
    fn of(&mut self, side: Side) -> &mut Vec<f64> {
        match side {
            Side::Ours => &mut self.ours,
            Side::Other => &mut self.other,
        }
    }

    fn name(&self) -> String {
        match self.figure.name {
            "" => self.row.clone(),
            name => format!("{}, {name}", self.row),
        }
    }

    /// The median, the lowest and the highest of the pairs' ratios.
    fn ratio(&self) -> Option<(f64, f64, f64)> {
        if self.ours.len() != self.other.len() {
            return None;
        }
        let ratios = stats::ratios(&self.ours, &self.other);
        Some((stats::median(&ratios), stats::lowest(&ratios), stats::highest(&ratios)))
    }

    fn line(&self) -> String {
        let median = |side: &[f64]| match side {
            [] => "–".to_owned(),
            side => quantity(stats::median(side), self.figure.unit),
        };
        let (ratio, range) = self.ratio().map_or_else(Default::default, |(middle, lowest, highest)| {
            (format!("{middle:.2}"), format!("{lowest:.2}–{highest:.2}"))
        });
        let (name, pairs, sides) = if self.figure.is_detail {
            (format!("    {}", self.figure.name), String::new(), String::new())
        } else {
            let [ours, other] = self.sides;
            (self.name(), self.ours.len().to_string(), format!("{ours} ÷ {other}"))
        };
        columns([
            &name,
            &median(&self.ours),
            &median(&self.other),
            &ratio,
            &range,
            &pairs,
            &sides,
        ])
    }

    fn json(&self) -> Value {
        let ratio = self
            .ratio()
            .map(|(middle, lowest, highest)| json!({"median": middle, "lowest": lowest, "highest": highest}));
        json!({
            "name": self.name(),
            "sides": self.sides,
            "unit": self.figure.unit,
            "ours": self.ours,
            "theirs": self.other,
            "ratio": ratio,
        })
    }
}

fn heading() -> String {
    columns([
        "median of the runs",
        "ours",
        "other",
        "ratio",
        "lowest–highest",
        "pairs",
        "sides",
    ])
}

fn columns(cells: [&str; 7]) -> String {
    let [name, ours, other, ratio, range, pairs, sides] = cells;
    let line = format!("{name:<46}{ours:>12}{other:>12}{ratio:>8}  {range:>14}{pairs:>7}  {sides}");
    line.trim_end().to_owned()
}

/// Formats a value: counts and rates without decimals, times with two.
fn quantity(value: f64, unit: &str) -> String {
    match unit {
        "/s" => format!("{value:.0}/s"),
        "%" => format!("{value:.3} %"),
        "bytes" => format!("{value:.0} bytes"),
        "" => format!("{value:.0}"),
        _ => format!("{value:.2} {unit}"),
    }
}

/// Prints what the run does now.
pub fn log_progress(text: &str) {
    println!("  {text}");
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    /// A report of a row in three pairs, with a detail of one side.
    fn report() -> BenchReport {
        let mut report = BenchReport::new(&Options::parse_from(["bench", "--pairs", "3"]));
        report.about(|| vec![("Postgres", "15".into())]);
        report.file = std::env::temp_dir().join(format!("outbox-bench-{}.json", std::process::id()));
        let (mut ours, mut other) = (
            [9_000.0, 9_600.0, 4_500.0].into_iter(),
            [10_000.0, 10_000.0, 5_000.0].into_iter(),
        );
        let mut order = Vec::new();
        report.compare("drain, quorum, pinned", ["outbox", "bare lapin"], |side| {
            order.push(side == Side::Ours);
            match side {
                Side::Ours => Sample::default().result("", "/s", ours.next().expect("a run")).detail(
                    "CPU of the worker, a message",
                    "µs",
                    30.5,
                ),
                Side::Other => Sample::default().result("", "/s", other.next().expect("a run")),
            }
        });
        assert_eq!(order, [false, true, false, true, false, true]);
        report
    }

    #[test]
    fn the_ratio_is_the_median_over_pairs_and_not_the_ratio_of_medians() {
        assert_eq!(report().measurements[0].ratio(), Some((0.9, 0.9, 0.96)));
    }

    #[test]
    fn a_line_has_both_medians_the_ratio_and_its_range() {
        let lines: Vec<String> = report().measurements.iter().map(Measurement::line).collect();
        let cells: Vec<&str> = lines[0].split_whitespace().collect();
        let expected = "drain, quorum, pinned 9000/s 10000/s 0.90 0.90–0.96 3 outbox ÷ bare lapin";
        assert_eq!(cells.join(" "), expected);
        let cells: Vec<&str> = lines[1].split_whitespace().collect();
        assert_eq!(cells.join(" "), "CPU of the worker, a message 30.50 µs –");
    }

    #[test]
    fn the_columns_are_aligned_with_their_headings() {
        let line = &report().measurements[0].line();
        let end = |text: &str, cell: &str| {
            let at = text.find(cell).expect("the cell is there");
            text[..at].chars().count() + cell.chars().count()
        };
        assert_eq!(end(&heading(), "ours"), end(line, "9000/s"));
        assert_eq!(end(&heading(), "ratio"), end(line, "0.90"));
    }

    #[test]
    fn parts_are_shown_as_shares_of_the_whole() {
        let mut report = report();
        let parts = Sample::default().result("", "µs", 40.0).detail("a thread", "µs", 10.0);
        report.shares("profile", ["part", "all"], parts);
        let line = report.measurements.last().expect("the part").line();
        let cells: Vec<&str> = line.split_whitespace().collect();
        assert_eq!(cells.join(" "), "a thread 10.00 µs 40.00 µs 0.25 0.25–0.25");
    }

    #[test]
    fn times_keep_decimals_and_rates_do_not() {
        assert_eq!(quantity(12_345.678, "/s"), "12346/s");
        assert_eq!(quantity(2.456, "ms"), "2.46 ms");
        assert_eq!(quantity(523.0, ""), "523");
    }

    #[test]
    fn one_goal_that_is_missed_is_enough() {
        let mut report = report();
        report.goal("", "a ratio of at least 0.9", |ratio, _| ratio >= 0.9);
        assert!(report.are_goals_met());
        report.goal("", "at most 8000/s", |_, ours| ours <= 8_000.0);
        assert!(!report.are_goals_met());
        let missed = "MISSED: drain, quorum, pinned: 9000/s, ratio 0.90, wanted at most 8000/s";
        assert!(report.text().ends_with(missed), "{}", report.text());
        assert_eq!(report.json()["goals"][1]["met"], false);
    }

    #[test]
    fn the_file_has_every_sample_and_the_flags() {
        let report = report();
        let json = report.json();
        assert_eq!(json["about"]["Postgres"], "15");
        assert_eq!(json["options"]["pairs"], 3);
        assert_eq!(json["options"]["queues"][0], "quorum");
        assert_eq!(json["measurements"][0]["ours"].as_array().map(Vec::len), Some(3));
        assert!(report.text().contains("Postgres: 15"));
    }
}
