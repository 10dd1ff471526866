//! Shows the measurements: as a table, and as JSON under target/bench/. The file is written again after each
//! measurement, so that an interrupted run leaves its results. `log_progress` prints the progress meanwhile.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};

use crate::options::Options;
use crate::servers::{Servers, all_cores};
use crate::stats;

/// One line of the table: two sides, measured in pairs.
pub struct Measurement {
    pub name: String,
    /// The name of our side, then of the other one.
    pub sides: (&'static str, &'static str),
    pub unit: &'static str,
    pub ours: Vec<f64>,
    pub theirs: Vec<f64>,
    /// Lines that are printed below the measurement.
    pub notes: Vec<String>,
    /// Additional values, only for the file.
    pub details: Value,
}

pub struct Report {
    about: Vec<(String, String)>,
    options: Value,
    measurements: Vec<Measurement>,
    numbers: Vec<Numbers>,
    goals: Vec<Goal>,
    file: PathBuf,
}

/// Values that are measured alone, with a sample of each run.
struct Numbers {
    title: String,
    numbers: Vec<(String, Vec<f64>)>,
}

/// A value that a row must reach, and whether it did.
struct Goal {
    text: String,
    is_met: bool,
}

impl Report {
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
            options: options.to_json(),
            measurements: Vec::new(),
            numbers: Vec::new(),
            goals: Vec::new(),
            file: directory.join(format!("{started_s}.json")),
        }
    }

    pub fn file(&self) -> &Path {
        &self.file
    }

    /// Asks the servers for their versions and settings, once.
    pub fn about(&mut self, servers: &mut Servers) {
        if self.about.is_empty() {
            self.about = servers.about();
            self.about.extend([
                ("cores".into(), all_cores().len().to_string()),
                ("load at start".into(), load()),
            ]);
        }
    }

    pub fn add(&mut self, measurement: Measurement) {
        measurement.lines().iter().for_each(|line| log_progress(line));
        self.measurements.push(measurement);
        self.write();
    }

    /// Adds numbers that have no other side: each with its samples.
    pub fn numbers(&mut self, title: &str, numbers: Vec<(String, Vec<f64>)>) {
        let numbers = Numbers {
            title: title.to_owned(),
            numbers,
        };
        numbers.lines().iter().for_each(|line| log_progress(line));
        self.numbers.push(numbers);
        self.write();
    }

    /// Records whether a row reached its goal: `value` is the result, `what` its unit, `wanted` the goal.
    pub fn goal(&mut self, row: &str, what: &str, value: f64, is_met: bool, wanted: &str) {
        let word = if is_met { "met" } else { "MISSED" };
        let text = format!("{word}: {row}: {value:.2} {what}, wanted {wanted}");
        log_progress(&text);
        self.goals.push(Goal { text, is_met });
        self.write();
    }

    pub fn are_goals_met(&self) -> bool {
        self.goals.iter().all(|goal| goal.is_met)
    }

    fn write(&self) {
        let text = serde_json::to_string_pretty(&self.json()).expect("numbers and texts");
        fs::write(&self.file, text).unwrap_or_else(|error| panic!("write {}: {error}", self.file.display()));
    }

    pub fn text(&self) -> String {
        let about = self.about.iter().map(|(name, value)| format!("{name}: {value}"));
        let measurements = self.measurements.iter().flat_map(Measurement::lines);
        let lines: Vec<String> = about
            .chain([format!("flags: {}", self.options), String::new(), heading()])
            .chain(measurements)
            .chain(self.numbers.iter().flat_map(Numbers::lines))
            .chain(self.goals.iter().map(|goal| goal.text.clone()))
            .collect();
        lines.join("\n")
    }

    fn json(&self) -> Value {
        let about: serde_json::Map<String, Value> = self
            .about
            .iter()
            .map(|(name, value)| (name.clone(), json!(value)))
            .collect();
        json!({
            "about": about,
            "options": self.options,
            "measurements": self.measurements.iter().map(Measurement::json).collect::<Vec<_>>(),
            "numbers": self.numbers.iter().map(Numbers::json).collect::<Vec<_>>(),
            "goals": self.goals.iter().map(|goal| json!({"text": goal.text, "met": goal.is_met})).collect::<Vec<_>>(),
        })
    }
}

fn heading() -> String {
    columns(&[
        "median of the runs",
        "ours",
        "other",
        "ratio",
        "lowest–highest",
        "pairs",
        "sides",
    ])
}

fn columns(cells: &[&str; 7]) -> String {
    let [name, ours, theirs, ratio, range, pairs, sides] = cells;
    format!("{name:<36}{ours:>12}{theirs:>12}{ratio:>8}  {range:>14}{pairs:>7}  {sides}")
}

impl Measurement {
    /// The median, the lowest and the highest of the pairs' ratios.
    pub fn ratio(&self) -> (f64, f64, f64) {
        let ratios = stats::ratios(&self.ours, &self.theirs);
        (stats::median(&ratios), stats::lowest(&ratios), stats::highest(&ratios))
    }

    fn lines(&self) -> Vec<String> {
        let (middle, lowest, highest) = self.ratio();
        let first = columns(&[
            &self.name,
            &quantity(stats::median(&self.ours), self.unit),
            &quantity(stats::median(&self.theirs), self.unit),
            &format!("{middle:.2}"),
            &format!("{lowest:.2}–{highest:.2}"),
            &self.ours.len().to_string(),
            &format!("{} ÷ {}", self.sides.0, self.sides.1),
        ]);
        let notes = self.notes.iter().map(|note| format!("    {note}"));
        std::iter::once(first).chain(notes).collect()
    }

    fn json(&self) -> Value {
        let (middle, lowest, highest) = self.ratio();
        json!({
            "name": self.name,
            "sides": [self.sides.0, self.sides.1],
            "unit": self.unit,
            "ours": self.ours,
            "theirs": self.theirs,
            "ratio": {"median": middle, "lowest": lowest, "highest": highest},
            "notes": self.notes,
            "details": self.details,
        })
    }
}

impl Numbers {
    fn lines(&self) -> Vec<String> {
        let line = |(name, samples): &(String, Vec<f64>)| {
            let [middle, lowest, highest] = [stats::median, stats::lowest, stats::highest].map(|of| of(samples));
            format!("    {name}: {middle:.2} ({lowest:.2}–{highest:.2})")
        };
        let numbers = self.numbers.iter().map(line);
        std::iter::once(self.title.clone()).chain(numbers).collect()
    }

    fn json(&self) -> Value {
        let numbers: serde_json::Map<String, Value> = self
            .numbers
            .iter()
            .map(|(name, samples)| (name.clone(), json!(samples)))
            .collect();
        json!({ "title": self.title, "numbers": numbers })
    }
}

/// Formats a value: rates without decimals, times with two.
fn quantity(value: f64, unit: &str) -> String {
    match unit {
        "/s" => format!("{value:.0}/s"),
        "%" => format!("{value:.3} %"),
        _ => format!("{value:.2} {unit}"),
    }
}

/// The load average. With other load on the machine the measurements mean nothing, and this line shows it.
fn load() -> String {
    let text = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split_whitespace().take(3).collect::<Vec<_>>().join(" ")
}

/// Prints what the run does now.
pub fn log_progress(text: &str) {
    println!("  {text}");
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    fn measurement() -> Measurement {
        Measurement {
            name: "drain, quorum, pinned".into(),
            sides: ("outbox", "bare lapin"),
            unit: "/s",
            ours: vec![9_000.0, 9_600.0, 4_500.0],
            theirs: vec![10_000.0, 10_000.0, 5_000.0],
            notes: vec!["a note".into()],
            details: json!({"more": 1}),
        }
    }

    #[test]
    fn the_ratio_is_the_median_over_pairs_and_not_the_ratio_of_medians() {
        let (middle, lowest, highest) = measurement().ratio();
        assert_eq!((middle, lowest, highest), (0.9, 0.9, 0.96));
    }

    #[test]
    fn a_line_has_both_medians_the_ratio_and_its_range() {
        let lines = measurement().lines();
        let cells: Vec<&str> = lines[0].split_whitespace().collect();
        let expected = "drain, quorum, pinned 9000/s 10000/s 0.90 0.90–0.96 3 outbox ÷ bare lapin";
        assert_eq!(cells.join(" "), expected);
        assert_eq!(lines[1], "    a note");
    }

    #[test]
    fn the_columns_are_aligned_with_their_headings() {
        let line = &measurement().lines()[0];
        let end = |text: &str, cell: &str| {
            let at = text.find(cell).expect("the cell is there");
            text[..at].chars().count() + cell.chars().count()
        };
        assert_eq!(end(&heading(), "ours"), end(line, "9000/s"));
        assert_eq!(end(&heading(), "ratio"), end(line, "0.90"));
    }

    #[test]
    fn times_keep_decimals_and_rates_do_not() {
        assert_eq!(quantity(12_345.678, "/s"), "12346/s");
        assert_eq!(quantity(2.456, "ms"), "2.46 ms");
    }

    fn report() -> Report {
        Report {
            about: vec![("Postgres".into(), "15".into())],
            options: Options::parse_from(["bench", "--pairs", "3"]).to_json(),
            measurements: vec![measurement()],
            numbers: vec![Numbers {
                title: "capacity, 500/s".into(),
                numbers: vec![("WAL bytes".into(), vec![900.0, 880.0, 905.0])],
            }],
            goals: vec![Goal {
                text: "met: drain: 0.90 of bare, wanted at least 0.9".into(),
                is_met: true,
            }],
            file: PathBuf::new(),
        }
    }

    #[test]
    fn one_goal_that_is_missed_is_enough() {
        let mut report = report();
        assert!(report.are_goals_met());
        report.goals.push(Goal {
            text: "MISSED: idle: 0.32 % of a core, wanted at most 0.2".into(),
            is_met: false,
        });
        assert!(!report.are_goals_met());
        assert!(
            report
                .text()
                .ends_with("MISSED: idle: 0.32 % of a core, wanted at most 0.2")
        );
        assert_eq!(report.json()["goals"][1]["met"], false);
    }

    #[test]
    fn the_file_has_every_sample_and_the_flags() {
        let report = report();
        let json = report.json();
        assert_eq!(json["about"]["Postgres"], "15");
        assert_eq!(json["options"]["pairs"], 3);
        assert_eq!(json["measurements"][0]["ours"].as_array().map(Vec::len), Some(3));
        assert_eq!(json["measurements"][0]["details"]["more"], 1);
        assert!(report.text().contains("Postgres: 15"));
        assert_eq!(json["numbers"][0]["numbers"]["WAL bytes"][1], 880.0);
        let number = "capacity, 500/s\n    WAL bytes: 900.00 (880.00–905.00)";
        assert!(report.text().contains(number), "{}", report.text());
    }
}
