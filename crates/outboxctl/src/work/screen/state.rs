//! What the screen of a worker knows and shows: changed by `update` alone, drawn by `view`. No I/O, no clock.

use crate::queries::model::ErrorGroup;
use crate::screen::theme::Theme;
use crate::work::report::Tick;
use outbox_core::settle::Ended;
use std::collections::VecDeque;

/// How things are with a worker at one moment.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Look {
    /// Hour, minute and second, UTC.
    pub clock: String,
    pub up_s: f64,
    pub phase: Phase,
    pub who: Who,
    pub sharing: Sharing,
    /// Workers of the database that live.
    pub workers: u32,
    /// Its partitions, and how many it should have.
    pub waiting: Vec<Waiting>,
    pub desired: usize,
    /// Why nobody can tell what waits.
    pub uncounted: Option<String>,
    /// Why it delivers nothing at all.
    pub obstacle: Option<String>,
    pub destinations: Vec<DestinationLook>,
    pub claimed: u64,
    pub ended: Ended,
    /// Since it last told that it lives.
    pub heartbeat_age_s: Option<f64>,
    pub ticks: Option<Ticks>,
    /// The newest first.
    pub errors: Vec<ErrorGroup>,
    /// The newest last.
    pub log: Vec<LogLine>,
}

/// What the ticks of this worker did.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Ticks {
    pub last: Tick,
    /// All of the window; without `--window` all since the start.
    pub sum: Tick,
    pub count: u64,
    /// When the window ends and is counted from zero again.
    pub refresh_s: Option<f64>,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Who {
    pub worker_id: String,
    pub server: String,
    pub database: String,
    pub user: String,
}

/// The session with the database.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Phase {
    #[default]
    Works,
    Lost {
        why: String,
        since_s: f64,
    },
}

/// How it shares the work with others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Sharing {
    #[default]
    Leases,
    /// `--no-leasing`
    Alone,
    /// `leasing` of the outbox is off.
    RowClaims,
}

/// A partition of this worker.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Waiting {
    pub label: String,
    pub epoch: i64,
    /// None = nobody has counted.
    pub depth: Option<Depth>,
}

/// How many messages wait.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Depth {
    pub pending: i64,
    /// Else there are more.
    pub is_all: bool,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct DestinationLook {
    pub name: String,
    pub state: String,
    pub since_s: f64,
    pub reason: Option<String>,
    pub detail: Option<String>,
    pub in_flight: usize,
    pub window: usize,
    pub ended: Ended,
}

impl DestinationLook {
    /// Why it is as it is.
    pub fn why(&self) -> String {
        let words = [self.reason.as_deref(), self.detail.as_deref()];
        words.into_iter().flatten().collect::<Vec<_>>().join(": ")
    }
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct LogLine {
    pub clock: String,
    pub text: String,
}

/// The lists that keys can go to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pane {
    Destinations,
    Log,
    Errors,
    Partitions,
}

impl Pane {
    pub const ALL: [Self; 4] = [Self::Destinations, Self::Log, Self::Errors, Self::Partitions];

    pub fn next(self, step: usize) -> Self {
        Self::ALL[(self as usize + step) % Self::ALL.len()]
    }
}

/// What has the keys.
#[derive(Clone, Debug, PartialEq)]
pub enum Mode {
    Watch,
    Help {
        scroll: usize,
    },
    /// A row in full, as it was when it was opened.
    Row {
        title: String,
        text: String,
        scroll: usize,
    },
}

/// Samples that are kept: ten minutes of seconds.
const SAMPLES_MAX: usize = 600;

#[derive(Clone, Debug)]
pub struct State {
    pub theme: Theme,
    pub look: Look,
    /// Published in each second, oldest first.
    pub per_s: VecDeque<f64>,
    /// Uptime and total of the last sample.
    sampled: Option<(f64, u64)>,
    pub pane: Pane,
    /// The selected row of each pane; None = its first, or of the log its last.
    pub selected: [Option<usize>; 4],
    pub mode: Mode,
    /// It claims nothing.
    pub holds: bool,
    /// It was asked to end.
    pub ends: bool,
}

impl State {
    pub fn new(first: Look, theme: Theme) -> Self {
        let mut state = Self {
            theme,
            look: Look::default(),
            per_s: VecDeque::new(),
            sampled: None,
            pane: Pane::Log,
            selected: [None; 4],
            mode: Mode::Watch,
            holds: false,
            ends: false,
        };
        state.take(first);
        state
    }

    /// What is so now.
    pub fn take(&mut self, look: Look) {
        let (now_s, total) = (look.up_s, look.ended.published);
        match self.sampled {
            Some((then_s, _)) if now_s < then_s + 1.0 => {}
            Some((then_s, then)) => {
                self.per_s
                    .push_back(total.saturating_sub(then) as f64 / (now_s - then_s));
                if self.per_s.len() > SAMPLES_MAX {
                    self.per_s.pop_front();
                }
                self.sampled = Some((now_s, total));
            }
            None => self.sampled = Some((now_s, total)),
        }
        self.look = look;
    }

    pub fn rows(&self, pane: Pane) -> usize {
        match pane {
            Pane::Destinations => self.look.destinations.len(),
            Pane::Log => self.look.log.len(),
            Pane::Errors => self.look.errors.len(),
            Pane::Partitions => self.look.waiting.len(),
        }
    }

    /// The selected row of a pane.
    pub fn at(&self, pane: Pane) -> usize {
        let last = self.rows(pane).saturating_sub(1);
        match (self.selected[pane as usize], pane) {
            (Some(row), _) => row.min(last),
            (None, Pane::Log) => last,
            (None, _) => 0,
        }
    }

    /// Goes to a row; at the end of the log it follows what comes.
    pub fn select(&mut self, row: usize) {
        let follows = self.pane == Pane::Log && row + 1 >= self.rows(self.pane);
        self.selected[self.pane as usize] = (!follows).then_some(row);
    }

    /// The selected row in full.
    pub fn row(&self) -> Option<(String, String)> {
        let at = self.at(self.pane);
        Some(match self.pane {
            Pane::Destinations => {
                let row = self.look.destinations.get(at)?;
                (
                    format!("Destination {}", row.name),
                    format!("{} {}", row.state, row.why()),
                )
            }
            Pane::Log => {
                let row = self.look.log.get(at)?;
                (format!("Log, {} UTC", row.clock), row.text.clone())
            }
            Pane::Errors => {
                let row = self.look.errors.get(at)?;
                let title = format!("Error of destination {}", row.destination);
                let last = row
                    .last_seq
                    .map_or(String::new(), |seq| format!(", the last with message {seq}"));
                (
                    title,
                    format!("{}, {} times{last}: {}", row.kind, row.count, row.message),
                )
            }
            Pane::Partitions => {
                let row = self.look.waiting.get(at)?;
                (
                    format!("Partition {}", row.label),
                    format!("leased here in epoch {}", row.epoch),
                )
            }
        })
    }
}
