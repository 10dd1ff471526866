//! The state of the board: `update` alone changes it, `view` draws it. No I/O, no clock.

use crate::operation::OperatorAction;
use crate::progress::OwnWorker;
use crate::queries::detail::Fact;
use crate::queries::model::{Now, Part, Snapshot};
use crate::screen::theme;
use std::time::{Duration, Instant};

/// The lists that can have the focus.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pane {
    Partitions,
    Workers,
    Destinations,
    Errors,
    Messages,
    // In `outboxctl work` only:
    ThisWorker,
    Log,
}

impl Pane {
    pub const ALL: [Self; 7] = [
        Self::Partitions,
        Self::Workers,
        Self::Destinations,
        Self::Errors,
        Self::Messages,
        Self::ThisWorker,
        Self::Log,
    ];

    /// Its title, and the title of the page of a row.
    pub fn titles(self) -> (&'static str, &'static str) {
        match self {
            Self::Partitions => ("1 Partitions", "Partition"),
            Self::Workers => ("2 Workers", "Worker"),
            Self::Destinations => ("3 Destinations", "Destination"),
            Self::Errors => ("4 Recent errors", "Error"),
            Self::Messages => ("5 Messages", "Message"),
            Self::ThisWorker => ("6 This worker", "Destination"),
            Self::Log => ("7 Log", "Log"),
        }
    }
}

/// The position of the user in a list.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PaneState {
    /// The name of the row, so that it stays selected when others are added and removed.
    pub selected: Option<String>,
    /// Its index, for when it is removed.
    pub index: usize,
    pub filter: String,
    /// The n-th order of its rows; 0 = as they come.
    pub order: usize,
}

/// What receives the keys.
#[derive(Clone, Debug, PartialEq)]
pub enum BoardMode {
    Watch,
    /// A page over the panels, and how far it is scrolled; of `Health` the selected problem.
    Page(BoardPage, usize),
    /// The filter before it was changed: Esc restores it.
    Filter(String),
    Confirm(OperatorAction),
}

#[derive(Clone, Debug, PartialEq)]
pub enum BoardPage {
    Help,
    Health,
    /// The row of the pane with this id, in full.
    Row(String),
}

#[derive(Clone, Debug, PartialEq)]
pub struct Notice {
    pub text: String,
    pub is_bad: bool,
}

impl Notice {
    pub fn new(text: impl Into<String>, is_bad: bool) -> Self {
        let text = text.into();
        Self { text, is_bad }
    }
}

/// What is read when the user opens one message.
#[derive(Clone, Debug, PartialEq)]
pub struct OpenedMessage {
    pub seq: i64,
    pub destination: String,
    pub facts: Part<Vec<Fact>>,
}

#[derive(Clone, Debug)]
pub struct BoardState {
    pub has_colour: bool,
    pub may_act: bool,
    pub interval: Duration,
    /// The values that are shown.
    pub shown: Snapshot,
    /// The values that arrived since the display was held. `Some` = it is held.
    pub held: Option<Box<Snapshot>>,
    /// Published each second since the start of this program, by all workers or by its own; the oldest first.
    pub per_s: Vec<f64>,
    /// The time of the last sample, in seconds, and the total then.
    last_total: Option<(f64, i64)>,
    /// Why the connection is lost, and the time until the next try.
    pub lost: Option<(String, Duration)>,
    pub pane: Pane,
    pub panes: [PaneState; 7],
    pub mode: BoardMode,
    pub opened: Option<OpenedMessage>,
    /// The row of the group whose messages are listed.
    pub opened_group: Option<String>,
    pub notice: Option<Notice>,
    /// The worker of this process, as of `now`.
    pub own: Option<OwnWorker>,
    pub now: Instant,
    /// Whether the worker was asked to claim nothing, and to end.
    pub holds: bool,
    pub ends: bool,
}

/// Ten minutes of seconds.
const SAMPLES_MAX: usize = 600;

impl BoardState {
    pub fn new(first: Snapshot, interval: Duration, may_act: bool) -> Self {
        let mut state = Self {
            has_colour: theme::has_colour(),
            may_act,
            interval,
            shown: first,
            held: None,
            per_s: Vec::new(),
            last_total: None,
            lost: None,
            pane: Pane::Messages,
            panes: Default::default(),
            mode: BoardMode::Watch,
            opened: None,
            opened_group: None,
            notice: None,
            own: None,
            now: Instant::now(),
            holds: false,
            ends: false,
        };
        let total = published(&state.shown);
        state.sample(total, 0.0);
        state
    }

    /// The board of a worker. It shows the worker before, and without, a reading of the database.
    pub fn of_worker(own: OwnWorker) -> Self {
        Self {
            pane: Pane::Log,
            own: Some(own),
            ..Self::new(unread(), Duration::from_secs(1), false)
        }
    }

    /// The panes of this board.
    pub fn panes(&self) -> &'static [Pane] {
        match self.own {
            Some(_) => &Pane::ALL,
            None => &Pane::ALL[..5],
        }
    }

    /// Whether the outbox cannot be read, and the board shows the worker of this process only.
    pub fn is_worker_only(&self) -> bool {
        self.own.is_some() && self.shown.status.is_err()
    }

    /// Takes over what the worker of this process does now.
    pub fn take_own(&mut self, own: OwnWorker, now: Instant) {
        let published = own.facts.as_ref().map(|facts| facts.ended.published as i64);
        let at_s = now.saturating_duration_since(own.began).as_secs_f64();
        self.sample(published.map(|published| (at_s, published)), 1.0);
        (self.own, self.now) = (Some(own), now);
    }

    pub fn take(&mut self, snapshot: Box<Snapshot>) {
        self.lost = None;
        if self.own.is_none() {
            self.sample(published(&snapshot), 0.0);
        }
        match &mut self.held {
            Some(held) => *held = snapshot,
            None => self.shown = *snapshot,
        }
    }

    /// Adds what was published since the last total, if that is `least_s` old. `None` = it is unknown, and the next
    /// sample begins later.
    fn sample(&mut self, total: Option<(f64, i64)>, least_s: f64) {
        if let (Some((then_s, then)), Some((now_s, now))) = (self.last_total, total) {
            if (then_s..then_s + least_s).contains(&now_s) {
                return;
            }
            // Counters start at zero again with the server.
            if now_s > then_s && now >= then {
                self.per_s.push((now - then) as f64 / (now_s - then_s));
                let old = self.per_s.len().saturating_sub(SAMPLES_MAX);
                self.per_s.drain(..old);
            }
        }
        self.last_total = total;
    }

    pub fn pane_state(&self) -> &PaneState {
        &self.panes[self.pane as usize]
    }

    pub fn pane_mut(&mut self) -> &mut PaneState {
        &mut self.panes[self.pane as usize]
    }
}

/// The time of the reading, and the number published by then.
fn published(snapshot: &Snapshot) -> Option<(f64, i64)> {
    let status = snapshot.status.as_ref().ok()?;
    Some((snapshot.now.epoch_s, status.published_total?))
}

/// Before the first reading.
fn unread() -> Snapshot {
    fn none<T>() -> Part<T> {
        Err("no answer yet".into())
    }
    Snapshot {
        now: Now::default(),
        status: none(),
        throughput: none(),
        partitions: none(),
        workers: none(),
        passes: none(),
        destinations: none(),
        errors: none(),
        messages: none(),
        problems: none(),
    }
}
