//! The state of `top`: `update` alone changes it, `view` draws it. No I/O, no clock.

use crate::queries::message::{Attempt, StoredEvent};
use crate::queries::model::{Destination, ErrorGroup, Message, Part, Partition, Snapshot, Worker};
use crate::queries::why::Reason;
use crate::screen::samples::Samples;
use crate::screen::theme::Theme;
use std::cmp::Ordering;
use std::time::Duration;

/// The lists that can have the focus.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pane {
    Partitions,
    Workers,
    Destinations,
    Errors,
    Messages,
}

impl Pane {
    pub const ALL: [Self; 5] = [
        Self::Partitions,
        Self::Workers,
        Self::Destinations,
        Self::Errors,
        Self::Messages,
    ];
}

/// The position of a person in a list.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PaneState {
    /// The name of the row, so that it stays selected when others are added and removed.
    pub selected: Option<String>,
    /// Its index, for when it is removed.
    pub index: usize,
    pub filter: String,
    /// Index into the orders of its rows.
    pub sort: usize,
}

/// An action on a message or a destination.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    Retry { seq: i64, destination: String },
    Discard { seq: i64, destination: String },
    Pause { destination: String },
    Resume { destination: String },
}

impl Action {
    pub fn question(&self) -> String {
        match self {
            Self::Retry { seq, destination } => {
                format!("Retry message {seq} to {destination}?")
            }
            Self::Discard { seq, destination } => {
                format!("Discard message {seq} to {destination}? It is never delivered.")
            }
            Self::Pause { destination } => format!("Pause delivery to {destination}?"),
            Self::Resume { destination } => format!("Resume delivery to {destination}?"),
        }
    }
}

/// What receives the keys.
#[derive(Clone, Debug, PartialEq)]
pub enum Mode {
    Watch,
    Help {
        scroll: usize,
    },
    Health {
        scroll: usize,
    },
    /// The text so far; Esc restores the text before it.
    Filter {
        before: String,
    },
    Detail {
        id: String,
        scroll: usize,
    },
    Confirm(Action),
}

#[derive(Clone, Debug, PartialEq)]
pub struct Notice {
    pub text: String,
    pub is_bad: bool,
}

/// What is read when a person opens one message.
#[derive(Clone, Debug, PartialEq)]
pub struct Letter {
    pub seq: i64,
    pub destination: String,
    pub event: Part<Option<StoredEvent>>,
    pub attempts: Part<Vec<Attempt>>,
    /// Why it does not move.
    pub reasons: Part<Vec<Reason>>,
}

/// The connection to the database.
#[derive(Clone, Debug, PartialEq)]
pub enum Link {
    Up,
    Lost { why: String, next_try: Duration },
}

#[derive(Clone, Debug)]
pub struct State {
    pub theme: Theme,
    pub may_act: bool,
    pub interval: Duration,
    /// The values that are shown.
    pub shown: Snapshot,
    /// The values that arrived since the display was paused. Some = it is paused.
    pub held: Option<Box<Snapshot>>,
    /// Published each second between two readings.
    pub session: Samples,
    pub link: Link,
    pub pane: Pane,
    pub panes: [PaneState; 5],
    pub mode: Mode,
    pub letter: Option<Letter>,
    pub notice: Option<Notice>,
    pub has_ended: bool,
}

impl State {
    pub fn new(first: Snapshot, interval: Duration, may_act: bool, theme: Theme) -> Self {
        let mut session = Samples::new(0.0);
        session.take(total(&first));
        Self {
            theme,
            may_act,
            interval,
            shown: first,
            held: None,
            session,
            link: Link::Up,
            pane: Pane::Messages,
            panes: Default::default(),
            mode: Mode::Watch,
            letter: None,
            notice: None,
            has_ended: false,
        }
    }

    pub fn pane_state(&self) -> &PaneState {
        &self.panes[self.pane as usize]
    }

    pub fn pane_mut(&mut self) -> &mut PaneState {
        &mut self.panes[self.pane as usize]
    }

    /// Records how much was published since the last reading.
    pub fn sample(&mut self, snapshot: &Snapshot) {
        self.session.take(total(snapshot));
    }

    /// The names of a pane's rows, as they are shown.
    pub fn ids(&self, pane: Pane) -> Vec<String> {
        fn ids<R: Row>(rows: &Part<Vec<&R>>) -> Vec<String> {
            rows.iter().flatten().map(|row| row.id()).collect()
        }
        match pane {
            Pane::Partitions => ids(&self.rows(pane, &self.shown.partitions)),
            Pane::Workers => ids(&self.rows(pane, &self.shown.workers)),
            Pane::Destinations => ids(&self.rows(pane, &self.shown.destinations)),
            Pane::Errors => ids(&self.rows(pane, &self.shown.errors)),
            Pane::Messages => ids(&self.rows(pane, &self.shown.messages)),
        }
    }

    /// The rows of a pane, filtered and sorted.
    pub fn rows<'a, R: Row>(&self, pane: Pane, all: &'a Part<Vec<R>>) -> Part<Vec<&'a R>> {
        let pane_state = &self.panes[pane as usize];
        let wanted = pane_state.filter.to_lowercase();
        let all = all.as_ref().map_err(Clone::clone)?;
        let mut rows: Vec<&R> = all
            .iter()
            .filter(|row| wanted.is_empty() || row.text().to_lowercase().contains(&wanted))
            .collect();
        if pane_state.sort > 0 {
            rows.sort_by(|a, b| a.compare(b, pane_state.sort - 1));
        }
        Ok(rows)
    }

    /// The selected row of a pane: the one of that name, or else the one at its index.
    pub fn selected(&self, pane: Pane) -> Option<usize> {
        let ids = self.ids(pane);
        let pane_state = &self.panes[pane as usize];
        let named = pane_state
            .selected
            .as_ref()
            .and_then(|id| ids.iter().position(|other| other == id));
        named.or_else(|| ids.len().checked_sub(1).map(|last| pane_state.index.min(last)))
    }

    pub fn selected_id(&self, pane: Pane) -> Option<String> {
        self.selected(pane).and_then(|i| self.ids(pane).into_iter().nth(i))
    }

    /// The order of a pane, as a word.
    pub fn order(&self, pane: Pane) -> &'static str {
        let orders = orders(pane);
        match self.panes[pane as usize].sort {
            0 => "",
            n => orders[n - 1],
        }
    }
}

/// The time of the reading, and the number published by then.
fn total(snapshot: &Snapshot) -> Option<(f64, u64)> {
    let published = snapshot.status.as_ref().ok()?.published_total?;
    Some((snapshot.now.epoch_s, u64::try_from(published).ok()?))
}

/// The orders of a list, beside that in which it arrives.
pub fn orders(pane: Pane) -> &'static [&'static str] {
    match pane {
        Pane::Partitions => Partition::ORDERS,
        Pane::Workers => Worker::ORDERS,
        Pane::Destinations => Destination::ORDERS,
        Pane::Errors => ErrorGroup::ORDERS,
        Pane::Messages => Message::ORDERS,
    }
}

/// A row of a list.
pub trait Row {
    const ORDERS: &'static [&'static str];
    /// Identifies it, however its values change.
    fn id(&self) -> String;
    /// The text that a filter searches.
    fn text(&self) -> String;
    fn compare(&self, other: &Self, order: usize) -> Ordering;
}

fn joined<const N: usize>(words: [&str; N]) -> String {
    words.join(" ")
}

fn some(word: &Option<String>) -> &str {
    word.as_deref().unwrap_or_default()
}

/// The largest first, unknown values last.
fn falling(a: Option<f64>, b: Option<f64>) -> Ordering {
    b.unwrap_or(-1.0).total_cmp(&a.unwrap_or(-1.0))
}

fn number(value: Option<i64>) -> Option<f64> {
    value.map(|value| value as f64)
}

impl Row for Partition {
    const ORDERS: &'static [&'static str] = &["owner", "what waits"];

    fn id(&self) -> String {
        self.label.clone()
    }

    fn text(&self) -> String {
        let blocked = if self.is_blocked { "blocked" } else { "" };
        joined([&self.label, self.owner.as_deref().unwrap_or("no owner"), blocked])
    }

    fn compare(&self, other: &Self, order: usize) -> Ordering {
        let waits = |row: &Self| (!row.is_blocked, row.first_waiting_seq.unwrap_or(i64::MAX));
        match order {
            0 => self.owner.cmp(&other.owner),
            _ => waits(self).cmp(&waits(other)),
        }
    }
}

impl Row for Worker {
    const ORDERS: &'static [&'static str] = &["state", "partitions", "heartbeat"];

    fn id(&self) -> String {
        self.id.clone()
    }

    fn text(&self) -> String {
        let alive = if self.is_alive { "alive" } else { "ended" };
        joined([
            &self.id,
            self.state.as_str(),
            alive,
            some(&self.reason),
            some(&self.detail),
        ])
    }

    fn compare(&self, other: &Self, order: usize) -> Ordering {
        match order {
            0 => self.state.compare(&other.state),
            1 => other.partitions.cmp(&self.partitions),
            _ => self.heartbeat_s.total_cmp(&other.heartbeat_s),
        }
    }
}

impl Row for Destination {
    const ORDERS: &'static [&'static str] = &["state", "pending", "oldest", "p95"];

    fn id(&self) -> String {
        self.name.clone()
    }

    fn text(&self) -> String {
        joined([&self.name, self.state.as_str(), some(&self.reason), some(&self.detail)])
    }

    fn compare(&self, other: &Self, order: usize) -> Ordering {
        match order {
            0 => self.state.compare(&other.state),
            1 => falling(number(self.pending), number(other.pending)),
            2 => falling(self.oldest_s, other.oldest_s),
            _ => falling(self.p95_ms, other.p95_ms),
        }
    }
}

impl Row for ErrorGroup {
    const ORDERS: &'static [&'static str] = &["count", "destination", "kind"];

    fn id(&self) -> String {
        joined([&self.destination, &self.kind, &self.message])
    }

    fn text(&self) -> String {
        self.id()
    }

    fn compare(&self, other: &Self, order: usize) -> Ordering {
        match order {
            0 => other.count.cmp(&self.count),
            1 => self.destination.cmp(&other.destination),
            _ => self.kind.cmp(&other.kind),
        }
    }
}

impl Row for Message {
    const ORDERS: &'static [&'static str] = &["seq", "age", "tries", "key", "destination"];

    fn id(&self) -> String {
        format!("{} {}", self.seq, self.destination)
    }

    fn text(&self) -> String {
        joined([
            self.status.as_str(),
            &self.seq.to_string(),
            some(&self.key),
            &self.destination,
            &self.partition,
            some(&self.note),
        ])
    }

    fn compare(&self, other: &Self, order: usize) -> Ordering {
        match order {
            0 => self.seq.cmp(&other.seq),
            1 => falling(Some(self.age_s), Some(other.age_s)),
            2 => other.attempts.cmp(&self.attempts),
            3 => self.key.cmp(&other.key),
            _ => self.destination.cmp(&other.destination),
        }
    }
}
