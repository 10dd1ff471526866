//! Recomputes docs/scaling/capacity.md: its tables must follow from its inputs by its formulas. Needs no server.

use std::collections::BTreeMap;

use crate::root;

/// The inputs of the page, by name.
type Inputs = BTreeMap<String, f64>;

const PARTS: [&str; 3] = ["session", "worker", "broker"];
/// The resources of the table of limits, in its order.
const RESOURCES: [&str; 7] = [
    "Postgres CPU",
    "one worker",
    "broker CPU",
    "one queue",
    "WAL",
    "network",
    "disk",
];

struct Page {
    text: String,
    inputs: Inputs,
}

impl Page {
    fn read() -> Self {
        let name = "docs/scaling/capacity.md";
        let text = std::fs::read_to_string(root().join(name)).unwrap_or_else(|error| panic!("{name}: {error}"));
        let named = ["What a message costs", "The machine of the example"].map(|heading| rows(&text, heading));
        let input = |row: Vec<String>| {
            let name = row[0].strip_prefix('`')?.strip_suffix('`')?;
            Some((name.to_owned(), number(&row[1])))
        };
        let inputs = named.into_iter().flatten().filter_map(input).collect();
        Self { text, inputs }
    }

    fn rows(&self, heading: &str) -> Vec<Vec<String>> {
        rows(&self.text, heading)
    }

    fn input(&self, name: &str) -> f64 {
        *self
            .inputs
            .get(name)
            .unwrap_or_else(|| panic!("the page has no input {name}"))
    }

    /// Processor time of one part for a message in µs, at a rate of at least 100 a second.
    fn cost_us(&self, part: &str, rate: f64) -> f64 {
        let input = |which: &str| self.input(&format!("{part}_{which}"));
        let (at_100, many, half) = (input("at_100"), input("many"), input("half"));
        many + (at_100 - many) * (half + 100.0) / (half + rate)
    }

    /// Cores that one part keeps busy.
    fn cores(&self, part: &str, rate: f64) -> f64 {
        rate * self.cost_us(part, rate) / 1e6
    }

    fn postgres_cores(&self, rate: f64) -> f64 {
        self.cores("session", rate) + self.cores("worker", rate) + rate * self.input("other") / 1e6
    }

    fn wal_mb_s(&self, rate: f64) -> f64 {
        rate * (self.input("wal") + self.input("removal")) / 1e6
    }

    fn network_mbit_s(&self, rate: f64) -> f64 {
        rate * self.input("sent") * 8.0 / 1e6
    }

    fn kept_gb_a_day(&self, rate: f64) -> f64 {
        rate * 86_400.0 * (self.input("history") + self.input("event")) / 1e9
    }

    /// What one of each needs ÷ what it can give, in the order of `RESOURCES`.
    fn shares(&self, rate: f64) -> [f64; 7] {
        let used = self.input("used");
        let cores = self.input("cores") * used;
        [
            self.postgres_cores(rate) / cores,
            self.cores("worker", rate) * self.input("worker_thread") / self.input("worker_many") / used,
            self.cores("broker", rate) / cores,
            rate / (self.input("queue") * used),
            self.wal_mb_s(rate) / self.input("wal_mb_s"),
            self.network_mbit_s(rate) / (self.input("network_mbit_s") * used),
            self.kept_gb_a_day(rate) * self.input("days") / self.input("disk_gb"),
        ]
    }
}

/// The rows of the first table below a heading, without its head.
fn rows(text: &str, heading: &str) -> Vec<Vec<String>> {
    let section = text
        .split("\n## ")
        .find_map(|section| section.strip_prefix(heading))
        .unwrap_or_else(|| panic!("a section {heading:?}"));
    let table = section.lines().skip_while(|line| !line.starts_with('|'));
    let table = table.take_while(|line| line.starts_with('|')).skip(2);
    let cells = |line: &str| -> Vec<String> {
        let cells = line.trim_matches('|').split('|').map(|cell| cell.trim().to_owned());
        cells.collect()
    };
    table.map(cells).collect()
}

/// The number at the start of a cell, such as "1,200 µs".
fn number(cell: &str) -> f64 {
    let digits: String = cell
        .chars()
        .take_while(|c| c.is_ascii_digit() || [',', '.'].contains(c))
        .filter(|c| *c != ',')
        .collect();
    digits.parse().unwrap_or_else(|_| panic!("a number: {cell:?}"))
}

/// A number as the page writes it: two decimals below 1, one below 10, none above, with commas between thousands.
fn written(value: f64) -> String {
    match value {
        ..0.995 => format!("{value:.2}"),
        ..9.95 => format!("{value:.1}"),
        _ => {
            let digits = format!("{value:.0}");
            let groups: Vec<&str> = digits
                .as_bytes()
                .rchunks(3)
                .rev()
                .map(|group| str::from_utf8(group).expect("digits"))
                .collect();
            groups.join(",")
        }
    }
}

const RATES: [f64; 5] = [100.0, 1_000.0, 10_000.0, 100_000.0, 1_000_000.0];

#[test]
fn what_each_rate_needs_follows_from_what_a_message_costs() {
    let page = Page::read();
    let expected = RATES.map(|rate| {
        let session_and_worker = [page.cores("session", rate), page.cores("worker", rate)];
        let others = [
            page.cores("broker", rate),
            page.wal_mb_s(rate),
            page.network_mbit_s(rate),
            page.kept_gb_a_day(rate),
        ];
        let needs = [&session_and_worker[..], &others[..]].concat();
        let mut row = vec![written(rate)];
        row.extend(needs.into_iter().map(written));
        row
    });
    assert_eq!(page.rows("What each rate needs"), expected);
}

#[test]
fn the_first_bottleneck_of_each_rate_is_the_largest_share_of_a_limit() {
    let page = Page::read();
    let expected = RATES.map(|rate| {
        let shares = page.shares(rate);
        let largest = (0..shares.len())
            .max_by(|a, b| shares[*a].total_cmp(&shares[*b]))
            .expect("a resource");
        let mut row = vec![written(rate)];
        row.extend(shares.map(|share| format!("{} %", written(share * 100.0))));
        row.push(format!("**{}**", RESOURCES[largest]));
        row
    });
    assert_eq!(page.rows("The first bottleneck"), expected);
}

#[test]
fn the_number_of_servers_queues_and_workers_follows_from_the_limits() {
    let page = Page::read();
    let expected = RATES.map(|rate| {
        let [postgres, worker, broker, queue, wal, _, disk] = page.shares(rate);
        let counts = [postgres.max(wal).max(disk), worker, queue, broker];
        let mut row = vec![written(rate)];
        row.extend(counts.map(|share| format!("{:.0}", share.ceil())));
        row
    });
    assert_eq!(page.rows("How many of each"), expected);
}

#[test]
fn predictions_are_as_near_to_measurements_as_the_page_says() {
    let page = Page::read();
    let rows = page.rows("The small end, measured");
    assert_eq!(rows.len(), 2 * PARTS.len(), "two rates");
    let mut farthest = 0.0_f64;
    for row in rows {
        let [rate, part, predicted, measured, _, ratio] = row.as_slice() else {
            panic!("six cells: {row:?}")
        };
        let share = page.cores(part, number(rate)) * 100.0;
        assert_eq!(*predicted, format!("{} %", written(share)), "{rate}/s, {part}");
        let quotient = share / number(measured);
        assert_eq!(*ratio, format!("{quotient:.2}"), "{rate}/s, {part}");
        farthest = farthest.max((quotient - 1.0).abs());
    }
    let says = format!("at most {:.0} % off", farthest * 100.0);
    assert!(page.text.contains(&says), "the page must say {says:?}");
}
