//! The output of a worker outside the server: one line for each pass, as JSON or for a person, and errors on stderr.
//! With a screen both go to the board instead, and the sum of the run is printed at the end.

use super::board::Board;
use super::pass::{PassReport, Passes};
use std::cell::RefCell;
use std::fmt::Arguments;
use std::io::{IsTerminal, Write, stderr};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The shortest time before the same log line is repeated.
const REPEAT_AFTER: Duration = Duration::from_secs(60);

/// Passes that are reported together.
struct Sum {
    pass: PassReport,
    passes: u64,
    since: Instant,
}

impl Sum {
    fn new() -> Self {
        Self {
            pass: PassReport::default(),
            passes: 0,
            since: Instant::now(),
        }
    }

    fn add(&mut self, pass: &PassReport) {
        self.pass.add(pass);
        self.passes += 1;
    }

    fn line(&self) -> String {
        line(&self.pass, Some(self.passes), self.since.elapsed())
    }
}

/// Prints the passes, or adds them to the screen.
pub struct Printer {
    silent: bool,
    json: bool,
    window: Option<Duration>,
    /// The passes that no line has reported yet.
    sum: Sum,
    /// The screen, and the sum of the run.
    screen: Option<(Arc<Board>, Sum)>,
}

impl Printer {
    pub fn new(silent: bool, json: bool, window_s: u64, screen: Option<Arc<Board>>) -> Self {
        Self {
            silent,
            json,
            window: (window_s > 0).then(|| Duration::from_secs(window_s)),
            sum: Sum::new(),
            screen: screen.map(|board| (board, Sum::new())),
        }
    }

    /// Reports a pass. As JSON each pass is one line; for a person each pass that did something, or each window. A
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
        if let Some((board, all)) = &mut self.screen {
            all.add(pass);
            let sum = if self.window.is_some() { &self.sum } else { &*all };
            board.pass(Passes {
                last: pass.clone(),
                sum: sum.pass.clone(),
                count: sum.passes,
                refresh_s: (self.window).map(|window| window.saturating_sub(self.sum.since.elapsed()).as_secs_f64()),
            });
            if is_due {
                let sum = std::mem::replace(&mut self.sum, Sum::new());
                if self.window.is_some() {
                    board.log(&sum.line());
                }
            }
        } else if is_due {
            self.flush();
        }
    }

    /// Prints the passes since the last line; with a screen, the sum of the run.
    pub fn flush(&mut self) {
        if let Some((_, all)) = &self.screen {
            return print(&all.line());
        }
        let sum = std::mem::replace(&mut self.sum, Sum::new());
        if self.silent || self.json {
            return;
        }
        match self.window {
            Some(_) => print(&sum.line()),
            None if !sum.pass.is_quiet() => print(&line(&sum.pass, None, sum.since.elapsed())),
            None => {}
        }
    }
}

/// The line for a person. `passes` = the number of passes in a sum; `None` = a single pass.
fn line(pass: &PassReport, passes: Option<u64>, span: Duration) -> String {
    let took = match passes {
        None => format!("in {:.2} ms", pass.duration_ms),
        Some(1) => format!("in 1 pass, {:.1} s", span.as_secs_f64()),
        Some(passes) => format!("in {passes} passes, {:.1} s", span.as_secs_f64()),
    };
    let workers = if pass.active_workers == 1 { "worker" } else { "workers" };
    format!(
        "{} claimed {} published {} failed {} {took}; partitions {} of {}, {} {workers}",
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
    screen: Option<Arc<Board>>,
    last: RefCell<Option<(String, Instant)>>,
}

impl Log {
    pub fn new(silent: bool, screen: Option<Arc<Board>>) -> Self {
        Self {
            silent,
            screen,
            last: RefCell::default(),
        }
    }

    pub fn line(&self, text: Arguments) {
        if self.silent {
            return;
        }
        let (text, now) = (text.to_string(), Instant::now());
        let mut last = self.last.borrow_mut();
        // A condition that lasts is logged once a minute.
        if last
            .as_ref()
            .is_some_and(|(logged, at)| *logged == text && now < *at + REPEAT_AFTER)
        {
            return;
        }
        let shown = self.screen.as_ref().filter(|board| board.has_begun());
        if let Some(board) = shown {
            board.log(&text);
        }
        if shown.is_none() || !stderr().is_terminal() {
            _ = writeln!(stderr().lock(), "outboxctl: {text}");
        }
        *last = Some((text, now));
    }

    /// Adds a failed message to the errors of the screen, if there is one.
    pub fn failed(&self, destination: &str, seq: i64, error: &str, is_dead: bool) {
        if let Some(board) = &self.screen {
            board.fail(destination, seq, error, is_dead);
        }
    }
}
