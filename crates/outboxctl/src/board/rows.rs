//! The rows of each list, from what was read of the database.

use super::state::{BoardState, Pane, PaneState};
use super::{groups, own};
use crate::queries::model::{DestinationRow, ErrorGroup, Message, Part, PartitionRow, Passes, Snapshot, WorkerRow};
use crate::queries::state::{DestinationState, Tone};
use crate::screen::list::{ListRow, RowField, chosen};
use crate::screen::text::{age, count, known, ms, rate};
use crate::screen::theme;
use outbox_worker::State;
use ratatui::style::Style;

impl BoardState {
    /// The rows of a pane, filtered and sorted, and the name of their order.
    pub fn rows(&self, pane: Pane) -> Part<(Vec<ListRow>, &'static str)> {
        let PaneState { filter, order, .. } = &self.panes[pane as usize];
        of(pane, self).map(|rows| chosen(rows, filter, *order))
    }

    /// The index of the selected row of a pane: the one of that name, or else the one at its index.
    pub fn selected(&self, pane: Pane, rows: &[ListRow]) -> usize {
        let PaneState { selected, index, .. } = &self.panes[pane as usize];
        let named = rows.iter().position(|row| Some(&row.id) == selected.as_ref());
        named.unwrap_or((*index).min(rows.len().saturating_sub(1)))
    }

    /// The selected row of the pane with the focus.
    pub fn selected_id(&self) -> Option<String> {
        let (mut rows, _) = self.rows(self.pane).ok()?;
        let at = self.selected(self.pane, &rows);
        (at < rows.len()).then(|| rows.swap_remove(at).id)
    }
}

fn each<T>(rows: &Part<Vec<T>>, row: impl Fn(&T) -> ListRow) -> Part<Vec<ListRow>> {
    let rows = rows.as_ref().map_err(Clone::clone)?;
    Ok(rows.iter().map(row).collect())
}

/// All rows of a list, in the order in which they come.
pub fn of(pane: Pane, state: &BoardState) -> Part<Vec<ListRow>> {
    let shown = &state.shown;
    let owners = Owners::of(shown);
    match pane {
        Pane::Partitions => each(&shown.partitions, |row| partition(row, &owners)),
        Pane::Workers => workers(shown, &owners),
        Pane::Destinations => destinations(shown),
        Pane::Errors => each(&shown.errors, error),
        Pane::Messages => {
            let PaneState { filter, order, .. } = &state.panes[pane as usize];
            // A filter and an order are of single messages.
            match filter.is_empty() && *order == 0 {
                true => groups::messages(state, message),
                false => each(&shown.messages, message),
            }
        }
        Pane::ThisWorker => {
            let facts = state.own.iter().filter_map(|own| own.facts.as_ref());
            let destinations = facts.flat_map(|facts| &facts.destinations);
            Ok(destinations.map(|row| own::destination(row, state.now)).collect())
        }
        Pane::Log => {
            let lines = state.own.iter().flat_map(|own| &own.log);
            Ok(lines.map(own::log_line).collect())
        }
    }
}

/// Those in trouble first.
pub fn destinations(shown: &Snapshot) -> Part<Vec<ListRow>> {
    let mut rows = each(&shown.destinations, destination)?;
    let is_down = |row: &ListRow| row.fields[1].style == theme::BAD;
    rows.sort_by_key(|row| (!is_down(row), !row.is_pinned));
    Ok(rows)
}

pub fn workers(shown: &Snapshot, owners: &Owners) -> Part<Vec<ListRow>> {
    each(&shown.workers, |row| {
        let mut passes = shown.passes.iter().flatten();
        worker(row, passes.find(|passes| passes.worker_id == row.id), owners)
    })
}

/// The reason of a state, and its detail.
fn reason(reason: &Option<String>, detail: &Option<String>) -> String {
    [reason, detail]
        .into_iter()
        .flatten()
        .cloned()
        .collect::<Vec<_>>()
        .join(": ")
}

/// A letter for each owner of partitions, which identifies it without colours.
pub struct Owners(pub Vec<String>);

impl Owners {
    pub fn of(snapshot: &Snapshot) -> Self {
        let workers = snapshot.workers.iter().flatten().map(|worker| &worker.id);
        let owners = snapshot.partitions.iter().flatten();
        let owners = owners.filter_map(|partition| partition.owner.as_ref());
        let mut ids: Vec<String> = workers.chain(owners).cloned().collect();
        ids.sort_unstable();
        ids.dedup();
        Self(ids)
    }

    pub fn letter(&self, id: &str) -> (String, Style) {
        const LETTERS: &str = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
        let index = self.0.iter().position(|known| known == id).unwrap_or(0);
        let letter = LETTERS.get(index..=index).unwrap_or("#");
        (letter.to_owned(), theme::owner(index))
    }
}

/// The first two fields are its cell on the map of partitions.
fn partition(row: &PartitionRow, owners: &Owners) -> ListRow {
    let (letter, style) = match &row.owner {
        Some(owner) => owners.letter(owner),
        None => ("-".to_owned(), theme::BAD),
    };
    let (mark, mark_style) = match (row.is_blocked, row.first_waiting_seq) {
        (true, _) => ("!", theme::BAD),
        (_, Some(_)) => ("+", theme::WARNING),
        _ => (" ", Style::new()),
    };
    let blocked = match row.is_blocked {
        true => "a key is blocked by a dead letter; see outbox_dead",
        false => "none",
    };
    let first = row.first_waiting_seq.map(|seq| -(seq as f64)); // the lowest first
    let fields = vec![
        RowField::fact("", letter).style(style),
        RowField::fact("", mark).style(mark_style),
        RowField::words("owner", 0, row.owner.as_deref().unwrap_or("none")),
        RowField::fact("lease", known(row.ttl_s, |s| format!("{} left", age(s)))),
        RowField::fact("epoch", row.epoch.to_string()),
        RowField::number("first waiting", 0, first, |seq| format!("message {:.0}", -seq)),
        RowField::words("blocked keys", 0, blocked),
    ];
    ListRow::new(row.label.clone(), fields)
}

fn worker(row: &WorkerRow, passes: Option<&Passes>, owners: &Owners) -> ListRow {
    let (letter, style) = owners.letter(&row.id);
    let (state, tone) = match row.is_alive {
        true => (row.state.as_str(), row.state.tone()),
        false => (row.end(), Tone::Bad),
    };
    // A bar of the rest of 20 s, the default of `outbox.heartbeat_ttl`.
    let heartbeat = |s: f64| {
        let full = ((s / 20.0 * 5.0).ceil() as usize).clamp(1, 5);
        format!("{}{} {}", "▮".repeat(full), "▯".repeat(5 - full), age(s))
    };
    let heartbeat_style = if row.is_alive { theme::GOOD } else { theme::BAD };
    let per_s = |of: fn(&Passes) -> i64| passes.map(|passes| passes.per_s(of));
    let mut fields = vec![
        RowField::words("", 0, letter).style(style.patch(theme::STRONG)),
        RowField::prose("worker", 0, 8, &row.id),
        RowField::words("state", 0, state).style(theme::tone(tone)),
        RowField::count("parts", 1, row.partitions),
        RowField::number(
            "heartbeat",
            2,
            Some(row.heartbeat_s).filter(|_| row.is_alive),
            heartbeat,
        )
        .style(heartbeat_style),
        RowField::number("pass", 4, passes.map(|passes| passes.mean_ms), ms),
        RowField::number("publ/s", 3, per_s(|passes| passes.published), rate),
        RowField::number("fail/s", 5, per_s(|passes| passes.failed), rate),
        RowField::number("up", 6, row.age_s, age),
        RowField::number("pid", 8, row.pid.map(f64::from), |pid| pid.to_string()),
        RowField::prose("why", 7, 24, reason(&row.reason, &row.detail)),
    ];
    if let Some(passes) = passes {
        let Passes {
            desired,
            leased,
            released,
            ..
        } = passes;
        let done = format!("{} with changes in {}", count(passes.count), age(passes.span_s));
        let leases = format!("{desired} desired, {leased} taken, {released} released");
        fields.extend([
            RowField::fact("passes", done),
            RowField::fact("claimed", count(passes.claimed)),
            RowField::fact("published", count(passes.published)),
            RowField::fact("failed", count(passes.failed)),
            RowField::fact("leases", leases),
            RowField::fact("backoff", ms(passes.backoff_ms)),
        ]);
    }
    ListRow::new(row.id.clone(), fields)
}

/// Whether an operator must see it: it is down, or its messages wait though it is not paused, because it is slow to
/// connect or to fail.
fn is_in_trouble(row: &DestinationRow) -> bool {
    let waits = row.oldest_s >= Some(60.0) || row.state.is(DestinationState::Reported(State::Connecting));
    row.state.tone() == Tone::Bad || waits && !row.paused
}

fn destination(row: &DestinationRow) -> ListRow {
    let limit = row.pending.zip(row.max_pending);
    let is_full = limit.is_some_and(|(pending, max)| pending * 10 >= max * 9);
    let fields = vec![
        RowField::prose("destination", 0, 11, &row.name),
        RowField::words("state", 0, row.state.as_str()).style(theme::tone(row.state.tone())),
        RowField::count("pending", 1, row.pending).style(if is_full { theme::BAD } else { Style::new() }),
        RowField::number("oldest", 2, row.oldest_s, age),
        RowField::number("publ/s", 4, row.published_per_s, rate),
        RowField::number("p95", 5, row.p95_ms, ms),
        RowField::count("flight", 6, row.in_flight),
        RowField::count("died", 7, row.dead_total),
        RowField::count("published", 9, row.published_total),
        RowField::count("failed", 10, row.failed_total),
        RowField::number("since", 8, row.since_s, age),
        RowField::prose("why", 3, 12, reason(&row.reason, &row.detail)),
        RowField::fact("max pending", row.max_pending.map(count).unwrap_or_default()),
        RowField::fact(
            "p50, p99",
            [row.p50_ms, row.p99_ms].map(|time| known(time, ms)).join(", "),
        ),
        RowField::fact("address", row.url.as_deref().unwrap_or_default()),
        RowField::fact("described by", row.described_by.as_deref().unwrap_or_default()),
    ];
    ListRow {
        is_pinned: is_in_trouble(row),
        ..ListRow::new(row.name.clone(), fields)
    }
}

fn error(row: &ErrorGroup) -> ListRow {
    let fields = vec![
        RowField::number("ago", 0, row.last_age_s, age),
        RowField::count("count", 0, row.count),
        RowField::number("seq", 0, row.last_seq.map(|seq| seq as f64), |seq| format!("{seq:.0}")),
        RowField::prose("destination", 1, 7, &row.destination),
        RowField::prose("kind", 2, 8, &row.kind).style(theme::WARNING),
        RowField::prose("message", 0, 24, &row.message),
        RowField::fact("first", format!("{} ago", age(row.first_age_s))),
    ];
    ListRow::new([&*row.destination, &*row.kind, &*row.message].join(" "), fields)
}

fn message(row: &Message) -> ListRow {
    let due = |s: f64| if s > 0.0 { age(s) } else { "now".into() };
    let fields = vec![
        RowField::words("status", 0, row.status.as_str()).style(theme::tone(row.status.tone())),
        RowField::number("seq", 0, row.seq as f64, |seq| format!("{seq:.0}")),
        RowField::prose("key", 2, 6, row.key.as_deref().unwrap_or("–")),
        RowField::prose("destination", 3, 7, &row.destination),
        RowField::words("part", 6, &row.partition),
        RowField::count("tries", 5, i64::from(row.attempts)),
        RowField::number("age", 4, row.age_s, age),
        RowField::number("due", 7, row.due_s, due),
        RowField::prose("why", 1, 22, row.note.as_deref().unwrap_or_default()),
    ];
    ListRow::new(format!("{} {}", row.seq, row.destination), fields)
}
