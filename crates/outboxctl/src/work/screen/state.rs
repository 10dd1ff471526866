//! The state of a worker's screen. Only `update` changes it, and `view` draws it. No I/O, no clock.

use crate::screen::samples::Samples;
use crate::screen::theme::Theme;
use crate::work::snapshot::Snapshot;
use outbox_core::words::Word;

/// The lists that can have the focus.
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

/// The part of the screen that gets the keys.
#[derive(Clone, Debug, PartialEq)]
pub enum Mode {
    Watch,
    Help {
        scroll: usize,
    },
    /// The full text of a row, as of when it was opened.
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
    /// The messages published in each second.
    pub session: Samples,
    pub pane: Pane,
    /// The selected row of each pane; `None` = the first row, or in the log the last.
    pub selected: [Option<usize>; 4],
    pub mode: Mode,
    /// Whether the worker was asked to claim nothing.
    pub holds: bool,
    /// Whether the worker was asked to end.
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

    /// Takes over a new snapshot.
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

    /// The index of the selected row of a pane.
    pub fn at(&self, pane: Pane) -> usize {
        let last = self.rows(pane).saturating_sub(1);
        match (self.selected[pane as usize], pane) {
            (Some(row), _) => row.min(last),
            (None, Pane::Log) => last,
            (None, _) => 0,
        }
    }

    /// Selects a row. At the end of the log the selection follows new lines.
    pub fn select(&mut self, row: usize) {
        let follows = self.pane == Pane::Log && row + 1 >= self.rows(self.pane);
        self.selected[self.pane as usize] = (!follows).then_some(row);
    }

    /// The title and the full text of the selected row.
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
