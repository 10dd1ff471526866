//! Row profile: where the processor time of a message goes, in one drain: by thread of the worker, and within the main
//! thread by phase. Phases come from stacks that perf samples.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use support::LONG;
use support::process::{signal, spawn_bound};
use support::wait::try_wait_for;

use crate::backlog::{self, KEYS};
use crate::cpu;
use crate::events::EventMaker;
use crate::options::{Options, Placement, name};
use crate::report::{BenchReport, Sample};
use crate::servers::Servers;

const MAIN: &str = "main thread";
const OTHERS: &str = "other threads";
/// The threads with a line.
const THREADS: [&str; 4] = ["outbox-publish", "lapin-io-loop", OTHERS, MAIN];

/// The phases of the main thread, and the parts of function names that tell them. The innermost function that has a
/// phase decides.
const PHASES: [(&str, &[&str]); 5] = [
    (
        "main thread: claim",
        &["WorkerProtocol<D>::claim", "WorkerContext>::claim", "::run_claim"],
    ),
    ("main thread: admit, envelope", &["Engine>::admit"]),
    ("main thread: hand over", &["::hand_over"]),
    ("main thread: outcomes", &["::take_outcomes"]),
    ("main thread: settle", &["::settle_batch"]),
];
const REST: &str = "main thread: rest";
/// The stack was deeper than what perf copied, or a library lacks what it needs to follow it.
const CUT: &str = "main thread: stack not known";

pub fn profile(options: &Options, report: &mut BenchReport) {
    let mut servers = Servers::start(Placement::Unpinned, options.first_queue(), &[], report);
    servers.pause();
    let note = EventMaker::new().note;
    // A warm-up.
    backlog::replace(&mut servers, &note, options.backlog.div_ceil(10), KEYS);
    backlog::drain(&mut servers, options.backlog.div_ceil(10));
    backlog::replace(&mut servers, &note, options.backlog, KEYS);
    let worker = servers.processes(&[]).workers[0];
    let recording = Recording::start(worker, report.file().with_extension("perf"));
    let before = threads(worker);
    backlog::drain(&mut servers, options.backlog);
    let after = threads(worker);
    let us = |thread: &str| {
        let of = |times: &HashMap<&str, f64>| times.get(thread).copied().unwrap_or_default();
        (of(&after) - of(&before)) / f64::from(options.backlog)
    };
    let all = THREADS.into_iter().map(us).sum();
    let mut sample = Sample::default().result("", "µs", all);
    for thread in THREADS {
        sample = sample.detail(thread, "µs", us(thread));
    }
    match recording.and_then(Recording::stacks) {
        Ok(stacks) => {
            let stacks = phases(&stacks);
            // As shares of the thread's time, which the scheduler knows: perf may lose samples.
            let all: usize = stacks.iter().map(|(_, count)| count).sum();
            for (phase, count) in stacks {
                sample = sample.detail(phase, "µs", us(MAIN) * count as f64 / all.max(1) as f64);
            }
        }
        Err(reason) => report.note("profile without phases", reason),
    }
    let row = format!("profile, {}", name(&options.first_queue()));
    report.shares(&row, ["part", "worker"], sample);
}

/// The processor time of each of [`THREADS`].
fn threads(pid: u32) -> HashMap<&'static str, f64> {
    let mut times = HashMap::new();
    for thread in cpu::threads(pid) {
        let known = THREADS.into_iter().find(|known| *known == thread.name);
        let name = if thread.is_main { MAIN } else { known.unwrap_or(OTHERS) };
        *times.entry(name).or_default() += thread.us;
    }
    times
}

/// Counts the stacks of each phase in the output of perf script: stacks with an empty line between them, each with its
/// innermost function first.
fn phases(script: &str) -> Vec<(&'static str, usize)> {
    let names = PHASES.iter().map(|(phase, _)| *phase).chain([REST, CUT]);
    let mut counts: Vec<_> = names.map(|phase| (phase, 0)).collect();
    for stack in script.split("\n\n").filter(|stack| !stack.trim().is_empty()) {
        let phase = phase(stack);
        let of = counts.iter_mut().find(|(name, _)| *name == phase);
        of.expect("a phase of the list").1 += 1;
    }
    counts
}

fn phase(stack: &str) -> &'static str {
    let of = |function: &str| {
        let is_of = |(_, parts): &&(_, &[&str])| parts.iter().any(|part| function.contains(part));
        PHASES.iter().find(is_of).map(|(phase, _)| *phase)
    };
    let of_worker = |function: &str| function.contains("outbox_worker");
    let rest = || if stack.lines().any(of_worker) { REST } else { CUT };
    stack.lines().find_map(of).unwrap_or_else(rest)
}

/// A run of perf. An error is the reason why there are no stacks.
struct Recording {
    perf: Child,
    main_thread: u32,
    data: PathBuf,
}

impl Recording {
    fn start(process: u32, data: PathBuf) -> Result<Self, String> {
        let mut perf = Command::new("perf");
        perf.args([
            "record",
            "-q",
            "-e",
            "cpu-clock",
            "-F",
            "397",
            "--call-graph",
            "dwarf,16384",
        ])
        .args(["-p", &process.to_string(), "-o"])
        .arg(&data)
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
        let perf = spawn_bound(perf, libc::SIGINT).map_err(|error| format!("perf cannot be run: {error}"))?;
        let mut recording = Self {
            perf,
            main_thread: process,
            data,
        };
        // It writes the head of the file after it has attached to the threads.
        let has_begun = |data: &Path| fs::metadata(data).is_ok_and(|data| data.len() > 0);
        let wait_for_begin = || match recording.perf.try_wait() {
            Ok(None) => has_begun(&recording.data).then_some(true),
            _ => Some(false),
        };
        match try_wait_for(LONG, wait_for_begin) {
            Some(true) => Ok(recording),
            _ => Err(recording.end()),
        }
    }

    /// Ends the recording. Returns what perf complained about, in one line.
    fn end(mut self) -> String {
        if let Ok(None) = self.perf.try_wait() {
            signal(self.perf.id(), libc::SIGINT);
        }
        let output = self.perf.wait_with_output().expect("wait for perf");
        complaint("perf record", &output.stderr)
    }

    /// Ends the recording. Returns the stacks of the main thread.
    fn stacks(self) -> Result<String, String> {
        let (thread, data) = (self.main_thread.to_string(), self.data.clone());
        let complained = self.end();
        let mut script = Command::new("perf");
        // To look up inlined functions takes minutes.
        script
            .args(["script", "--no-inline", "-F", "ip,sym", "--tid", &thread, "-i"])
            .arg(&data);
        let output = script
            .stdin(Stdio::null())
            .output()
            .map_err(|error| format!("perf cannot be run: {error}"))?;
        let _ = fs::remove_file(data);
        match (output.status.success(), output.stdout.is_empty()) {
            (true, false) => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
            (true, true) => Err(complained),
            (false, _) => Err(complaint("perf script", &output.stderr)),
        }
    }
}

fn complaint(program: &str, output: &[u8]) -> String {
    let output = String::from_utf8_lossy(output);
    let says_something = |line: &&str| !line.is_empty() && *line != "Error:";
    let line = output.lines().map(str::trim).find(says_something);
    format!("{program}: {}", line.unwrap_or("no samples"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The output of perf script for four samples, shortened.
    const SCRIPT: &str = "
\t          1f3c40 heap_getnext
\t          2a0f11 [unknown]
\t          70d3aa <outbox::worker::store::spi::SpiDb as outbox_worker::protocol::Db>::run
\t          70aa01 outbox_worker::protocol::WorkerProtocol<D>::claimed
\t          70a9f2 outbox_worker::destination::Destination<R>::claim
\t          6f0001 outbox_worker::worker::Worker<R>::pass

\t          7b1000 outbox_core::envelope::publication
\t          7b2000 outbox_core::engine::admit::<impl outbox_core::engine::Engine>::admit
\t          7b3000 outbox_core::engine::claim::<impl outbox_core::engine::Engine>::claim
\t          70a9f2 outbox_worker::destination::Destination<R>::claim

\tffffffff821ed511 do_syscall_64
\t          6f0001 outbox_worker::worker::Worker<R>::pass

\t           a1cf0 _int_malloc

";

    #[test]
    fn a_stack_counts_for_the_phase_of_its_innermost_function() {
        let counts = phases(SCRIPT);
        let of = |name: &str| {
            counts
                .iter()
                .find(|(phase, _)| phase.ends_with(name))
                .map(|(_, count)| *count)
        };
        let names = [": claim", "admit, envelope", "hand over", "rest", "stack not known"];
        assert_eq!(names.map(of), [1, 1, 0, 1, 1].map(Some));
        assert_eq!(counts.len(), PHASES.len() + 2);
    }

    #[test]
    fn without_output_there_are_no_stacks() {
        assert!(phases("").iter().all(|(_, count)| *count == 0));
    }

    #[test]
    fn the_first_line_that_says_something_is_the_reason() {
        let output = b"Error:\nAccess to performance monitoring is limited.\nConsider adjusting it.\n";
        let line = "perf record: Access to performance monitoring is limited.";
        assert_eq!(complaint("perf record", output), line);
        assert_eq!(complaint("perf record", b""), "perf record: no samples");
    }

    #[test]
    fn a_process_has_a_main_thread() {
        assert!(threads(std::process::id()).contains_key(MAIN));
    }
}
