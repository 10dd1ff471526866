//! Row sizes: a drain of large messages ÷ the bare publisher's rate with the same messages. It also shows whether a
//! message costs more among many large messages than among few, how many temporary files were written, and the memory
//! of the worker.

use std::fs;

use serde_json::json;

use crate::backlog::{self, Drained};
use crate::drain;
use crate::events::Maker;
use crate::options::{Options, Placement};
use crate::report::{Measurement, Report, log_progress};
use crate::servers::{EXCHANGE, Servers};
use crate::stats;

const KEYS: u32 = 1000;
/// The divisor of the smaller runs. In a run with a third of the messages, each message must cost the worker the same.
const FEWER: u32 = 3;
const GOAL_OF_GROWTH: f64 = 1.15;

struct Size {
    name: &'static str,
    bytes: usize,
    count: u32,
    goal: f64,
}

/// A drain with its other costs.
struct Run {
    drained: Drained,
    temporary_files: usize,
    /// The worker's peak memory in MB: private memory, and all resident memory, including touched pages of shared
    /// buffers.
    own_mb: f64,
    resident_mb: f64,
}

pub fn run(options: &Options, report: &mut Report) {
    log_progress("sizes: starting servers");
    // Postgres logs each temporary file when it removes the file.
    let mut servers = Servers::start(Placement::Unpinned, options.first_queue(), &["log_temp_files = 0"]);
    report.about(&mut servers);
    servers.pause();
    let sizes = [
        Size {
            name: "10 kB",
            bytes: 10_000,
            count: options.medium_messages,
            goal: 0.75,
        },
        Size {
            name: "1 MB",
            bytes: 1_000_000,
            count: options.large_messages,
            goal: 0.5,
        },
    ];
    for size in &sizes {
        let name = format!("sizes, {}, {}", size.name, options.first_queue().name());
        let maker = Maker::sized(EXCHANGE, size.bytes);
        log_progress(&format!("{name}: warming up"));
        let few = size.count.div_ceil(FEWER);
        drain::bare(options, &mut servers, &maker, options.first_queue(), few);
        outbox(options, &mut servers, &maker, few);
        let (mut theirs, mut ours, mut of_few) = (Vec::new(), Vec::new(), Vec::new());
        for pair in 1..=options.pairs {
            theirs.push(drain::bare(options, &mut servers, &maker, options.first_queue(), size.count).rate);
            of_few.push(outbox(options, &mut servers, &maker, few));
            ours.push(outbox(options, &mut servers, &maker, size.count));
            let last = pair as usize - 1;
            log_progress(&format!(
                "{name}, pair {pair} of {}: bare {:.0}/s, outbox {:.0}/s, {few} alone {:.0}/s",
                options.pairs, theirs[last], ours[last].drained.rate, of_few[last].drained.rate
            ));
        }
        let rates = |runs: &[Run]| -> Vec<f64> { runs.iter().map(|run| run.drained.rate).collect() };
        let measurement = Measurement {
            name: name.clone(),
            sides: ("outbox", "bare lapin"),
            unit: "/s",
            ours: rates(&ours),
            theirs,
            notes: notes(&ours, size.count),
            details: details(&ours),
        };
        let ratio = measurement.ratio().0;
        report.add(measurement);
        let wanted = format!("at least {}", size.goal);
        report.goal(&name, "of bare lapin", ratio, ratio >= size.goal, &wanted);
        let growth = Measurement {
            name: format!("{name}, many"),
            sides: ("all", "a third of them"),
            unit: "µs",
            ours: worker_us(&ours),
            theirs: worker_us(&of_few),
            notes: notes(&of_few, few),
            details: details(&of_few),
        };
        let ratio = growth.ratio().0;
        report.add(growth);
        let wanted = format!("at most {GOAL_OF_GROWTH}");
        let what = "× the worker's processor time a message of a third of them";
        report.goal(&name, what, ratio, ratio <= GOAL_OF_GROWTH, &wanted);
        let files: usize = ours.iter().chain(&of_few).map(|run| run.temporary_files).sum();
        report.goal(&name, "temporary files", files as f64, files == 0, "none");
    }
}

fn outbox(options: &Options, servers: &mut Servers, maker: &Maker, count: u32) -> Run {
    servers.renew_queue(options.first_queue());
    backlog::forget_the_past(servers);
    backlog::settle_down(servers);
    backlog::load(&mut servers.sql, "order", &maker.note, count, 0, KEYS);
    let worker = servers.pids().worker;
    // Resets the peak of the resident memory, see proc(5).
    fs::write(format!("/proc/{worker}/clear_refs"), "5").expect("of a process of ours");
    let from = servers.cluster.log_offset();
    let mut own_mb = 0.0_f64;
    let drained = backlog::drain_watched(servers, count, &mut |_, _| {
        own_mb = own_mb.max(memory_mb(worker, "RssAnon:"));
    });
    let log = servers.cluster.log();
    let log = log.get(from..).unwrap_or_default();
    Run {
        drained,
        temporary_files: log.matches("temporary file: path").count(),
        own_mb,
        resident_mb: memory_mb(worker, "VmHWM:"),
    }
}

pub fn memory_mb(pid: u32, of: &str) -> f64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix(of));
    let kb = line.and_then(|line| line.split_whitespace().next()?.parse::<f64>().ok());
    kb.unwrap_or(0.0) / 1024.0
}

fn notes(runs: &[Run], count: u32) -> Vec<String> {
    let most = |of: &dyn Fn(&Run) -> f64| stats::highest(&runs.iter().map(of).collect::<Vec<_>>());
    let middle = |of: &dyn Fn(&Run) -> f64| stats::median(&runs.iter().map(of).collect::<Vec<_>>());
    vec![format!(
        "{count} messages; CPU-µs each: worker {:.0}, other Postgres {:.0}; memory of the worker at most {:.0} MB private, {:.0} MB resident; temporary files: {:.0}",
        middle(&|run| run.drained.cpu_per_message.worker),
        middle(&|run| run.drained.cpu_per_message.postgres),
        most(&|run| run.own_mb),
        most(&|run| run.resident_mb),
        most(&|run| run.temporary_files as f64),
    )]
}

fn worker_us(runs: &[Run]) -> Vec<f64> {
    runs.iter().map(|run| run.drained.cpu_per_message.worker).collect()
}

fn details(runs: &[Run]) -> serde_json::Value {
    let each = |of: &dyn Fn(&Run) -> f64| runs.iter().map(of).collect::<Vec<_>>();
    json!({
        "rate": each(&|run| run.drained.rate),
        "postgres_cpu_us": each(&|run| run.drained.cpu_per_message.postgres),
        "worker_own_mb": each(&|run| run.own_mb),
        "worker_resident_mb": each(&|run| run.resident_mb),
        "temporary_files": each(&|run| run.temporary_files as f64),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_memory_of_a_process_is_found() {
        let us = std::process::id();
        let (own, resident) = (memory_mb(us, "RssAnon:"), memory_mb(us, "VmHWM:"));
        assert!(own > 0.0 && resident >= own, "{own} MB, {resident} MB");
        assert_eq!(memory_mb(us, "NoSuchLine:"), 0.0);
    }
}
