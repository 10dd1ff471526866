//! What the screen of a worker knows and shows: changed by `update` alone, drawn by `view`. No I/O, no clock.

use crate::screen::samples::Samples;
use crate::screen::theme::Theme;
use crate::work::snapshot::Snapshot;
use outbox_core::words::Word;

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

#[derive(Clone, Debug)]
pub struct State {
    pub theme: Theme,
    pub snapshot: Snapshot,
    /// Published in each second.
    pub session: Samples,
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
    pub fn new(first: Snapshot, theme: Theme) -> Self {
        let mut state = Self {
            theme,
            snapshot: Snapshot::default(),
            session: Samples::new(1.0),
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
    pub fn take(&mut self, snapshot: Snapshot) {
        self.session.take(Some((snapshot.up_s, snapshot.ended.published)));
        self.snapshot = snapshot;
    }

    pub fn rows(&self, pane: Pane) -> usize {
        match pane {
            Pane::Destinations => self.snapshot.destinations.len(),
            Pane::Log => self.snapshot.log.len(),
            Pane::Errors => self.snapshot.errors.len(),
            Pane::Partitions => self.snapshot.waiting.len(),
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
                let row = self.snapshot.destinations.get(at)?;
                (
                    format!("Destination {}", row.name),
                    format!("{} {}", row.state.name(), row.why()),
                )
            }
            Pane::Log => {
                let row = self.snapshot.log.get(at)?;
                (format!("Log, {} UTC", row.clock), row.text.clone())
            }
            Pane::Errors => {
                let row = self.snapshot.errors.get(at)?;
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
                let row = self.snapshot.waiting.get(at)?;
                (
                    format!("Partition {}", row.label),
                    format!("leased here in epoch {}", row.epoch),
                )
            }
        })
    }
}
