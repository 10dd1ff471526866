//! Row idle: the processor time of a server whose outbox has nothing to do, next to that of a server without the
//! extension. Both servers run during the same seconds. The broker is connected and has nothing to do either.

use std::collections::BTreeMap;
use std::fs;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::json;
use support::Cluster;
use support::process::children_of;

use crate::cpu;
use crate::options::{Options, Placement};
use crate::report::{Measurement, Report, log_progress};
use crate::servers::{DB, Servers};
use crate::stats;

const GOAL_PERCENT: f64 = 0.2;

pub fn run(options: &Options, report: &mut Report) {
    log_progress("idle: starting servers");
    let mut servers = Servers::start(Placement::Unpinned, options.first_queue(), &[]);
    report.about(&mut servers);
    let plain = Cluster::builder().conf("fsync = on").preload(false).start();
    // The time after a start is not idle: maintenance counts messages, and the checkpointer writes what the start has
    // changed.
    servers.wait_true(
        "maintenance to end",
        "select not exists (select from pg_stat_activity where backend_type = 'outbox maintenance')
            and exists (select from outbox_status where pending = 0)",
    );
    // Autovacuum, too, has work after a start: the catalogs have changed.
    for tidy_up in ["vacuum analyze", "checkpoint"] {
        servers.sql.batch_execute(tidy_up).expect(tidy_up);
        plain.exec(DB, tidy_up);
    }
    let (mut ours, mut theirs, mut parts) = (Vec::new(), Vec::new(), Vec::new());
    for pair in 1..=options.pairs {
        let (us, them) = (Reading::of(&servers.cluster), Reading::of(&plain));
        thread::sleep(Duration::from_secs(options.idle_seconds.into()));
        let (us, them) = (us.until_now(&servers.cluster), them.until_now(&plain));
        log_progress(&format!(
            "idle, pair {pair} of {}: {:.3} % of a core, without the extension {:.3} %",
            options.pairs, us.percent, them.percent
        ));
        ours.push(us.percent);
        theirs.push(them.percent);
        parts.push(us.parts);
    }
    let last = parts.last().expect("there is a pair");
    let mut notes = vec![format!("in the last {} s, by process:", options.idle_seconds)];
    notes.extend(last.iter().map(|(name, part)| part.text(name)));
    let middle = stats::median(&ours);
    let measurement = Measurement {
        name: "idle".into(),
        sides: ("with the outbox", "without"),
        unit: "%",
        ours,
        theirs,
        notes,
        details: json!({
            "parts": parts.iter().map(|parts| -> BTreeMap<_, _> {
                parts.iter().map(|(name, part)| (name, json!({"percent": part.percent, "wakes_per_s": part.wakes_per_s})))
                    .collect()
            }).collect::<Vec<_>>(),
        }),
    };
    report.add(measurement);
    report.goal(
        "idle",
        "% of a core with the outbox",
        middle,
        middle <= GOAL_PERCENT,
        "at most 0.2",
    );
}

/// The processor time and wake-ups of the processes of a server, since their start.
struct Reading {
    at: Instant,
    all_us: f64,
    parts: BTreeMap<u32, (String, f64, u64)>,
}

/// The processor time and wake-ups of a server between two readings.
struct Spent {
    percent: f64,
    parts: BTreeMap<String, Part>,
}

struct Part {
    percent: f64,
    wakes_per_s: f64,
}

impl Reading {
    fn of(cluster: &Cluster) -> Self {
        let postmaster = cluster.pid();
        let processes = children_of(postmaster).into_iter().chain([postmaster]);
        let parts: BTreeMap<_, _> = processes
            .map(|pid| (pid, (title(pid), cpu::of_threads_us(pid), cpu::wakes(pid))))
            .collect();
        // The postmaster's sum over ended children keeps the total from falling when one ends.
        let all_us = cpu::of_ended_children_us(postmaster) + parts.values().map(|(_, us, _)| us).sum::<f64>();
        Self {
            at: Instant::now(),
            all_us,
            parts,
        }
    }

    fn until_now(self, cluster: &Cluster) -> Spent {
        let now = Self::of(cluster);
        let seconds = now.at.duration_since(self.at).as_secs_f64();
        let percent = |us: f64| us / 1e6 / seconds * 100.0;
        let mut parts: BTreeMap<String, Part> = BTreeMap::new();
        for (pid, (name, us, wakes)) in now.parts {
            let (us_before, wakes_before) = self.parts.get(&pid).map_or((0.0, 0), |(_, us, wakes)| (*us, *wakes));
            let part = parts.entry(name).or_insert(Part {
                percent: 0.0,
                wakes_per_s: 0.0,
            });
            part.percent += percent(us - us_before);
            part.wakes_per_s += (wakes - wakes_before) as f64 / seconds;
        }
        Spent {
            percent: percent(now.all_us - self.all_us),
            parts,
        }
    }
}

impl Part {
    fn text(&self, name: &str) -> String {
        format!(
            "{name}: {:.3} %, {:.1} wake-ups a second",
            self.percent, self.wakes_per_s
        )
    }
}

/// The title of a Postgres process.
fn title(pid: u32) -> String {
    let text = fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let text = text.trim_end_matches(['\0', ' ']).replace('\0', " ");
    match text.strip_prefix("postgres: ") {
        Some(title) => title.to_owned(),
        None => "postmaster".to_owned(),
    }
}
