//! The output of a worker outside the server: one line for each pass, as JSON or for people, and errors on stderr.
//! With a screen both go to its panels instead, and the sum of the run is printed at the end.

use crate::output;
use crate::progress::WorkerProgress;
use crate::progress::pass::{PassReport, PassSum};
use outbox_worker::Repeats;
use std::fmt::Arguments;
use std::io::{IsTerminal, Write, stderr};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Prints the passes, or adds them to the screen.
pub struct Printer {
    silent: bool,
    json: bool,
    window: Option<Duration>,
    /// The passes that no line has reported yet.
    sum: PassSum,
    /// The screen, and the sum of the run.
    screen: Option<(Arc<WorkerProgress>, PassSum)>,
}

impl Printer {
    pub fn new(silent: bool, json: bool, window_s: u64, screen: Option<Arc<WorkerProgress>>) -> Self {
        Self {
            silent,
            json,
            window: (window_s > 0).then(|| Duration::from_secs(window_s)),
            sum: PassSum::new(),
            screen: screen.map(|progress| (progress, PassSum::new())),
        }
    }

    /// Reports a pass. As JSON each pass is one line; for people each pass that did something, or each window. A
    /// screen shows the windows in its log.
    pub fn pass(&mut self, pass: &PassReport) {
        if self.silent {
            return;
        }
        if self.json {
            return print(&serde_json::to_string(pass).unwrap_or_default());
        }
        self.sum.add(pass);
        let is_due = match self.window {
            Some(window) => self.sum.since.elapsed() >= window,
            None => !pass.is_quiet(),
        };
        if let Some((progress, all)) = &mut self.screen {
            all.add(pass);
            let sum = if self.window.is_some() { &self.sum } else { &*all };
            progress.pass(pass, sum, self.window);
            if is_due {
                let sum = std::mem::replace(&mut self.sum, PassSum::new());
                if self.window.is_some() {
                    progress.log(&sum_line(&sum));
                }
            }
        } else if is_due {
            self.flush();
        }
    }

    /// Prints the passes since the last line; with a screen, the sum of the run.
    pub fn flush(&mut self) {
        if let Some((_, all)) = &self.screen {
            return print(&sum_line(all));
        }
        let sum = std::mem::replace(&mut self.sum, PassSum::new());
        if self.silent || self.json {
            return;
        }
        match self.window {
            Some(_) => print(&sum_line(&sum)),
            None if !sum.pass.is_quiet() => print(&line(&sum.pass, None, sum.since.elapsed())),
            None => {}
        }
    }
}

fn sum_line(sum: &PassSum) -> String {
    line(&sum.pass, Some(sum.count), sum.since.elapsed())
}

/// The line for people. `passes` = the number of passes in a sum; `None` = a single pass.
fn line(pass: &PassReport, passes: Option<u64>, span: Duration) -> String {
    let spent = match passes {
        None => format!("in {:.2} ms", pass.duration_ms),
        Some(1) => format!("in 1 pass, {:.1} s", span.as_secs_f64()),
        Some(passes) => format!("in {passes} passes, {:.1} s", span.as_secs_f64()),
    };
    let workers = if pass.active_workers == 1 { "worker" } else { "workers" };
    format!(
        "{} claimed {} published {} failed {} {spent}; partitions {} of {}, {} {workers}",
        pass.ts, pass.claimed, pass.published, pass.failed, pass.owned_count, pass.desired_count, pass.active_workers
    )
}

/// Prints a line, and ignores errors: a closed pipe must not stop the delivery.
fn print(line: &str) {
    _ = writeln!(std::io::stdout().lock(), "{line}");
}

/// The log of events other than passes: on stderr, or in the log of the screen. If stderr is not a terminal, it gets
/// the lines in both cases.
pub struct Log {
    silent: bool,
    screen: Option<Arc<WorkerProgress>>,
    failures: Repeats,
}

impl Log {
    pub fn new(silent: bool, screen: Option<Arc<WorkerProgress>>) -> Self {
        Self {
            silent,
            screen,
            failures: Repeats::default(),
        }
    }

    pub fn line(&self, text: Arguments) {
        if self.silent {
            return;
        }
        let text = text.to_string();
        let shown = self.screen.as_ref().filter(|progress| progress.has_begun());
        if let Some(progress) = shown {
            progress.log(&text);
        }
        if shown.is_none() || !stderr().is_terminal() {
            output::log(&text);
        }
    }

    /// Logs a failure. One that lasts is logged once a minute.
    pub fn failure(&self, text: Arguments) {
        if self.failures.is_news(&text.to_string(), Instant::now()) {
            self.line(text);
        }
    }
}
