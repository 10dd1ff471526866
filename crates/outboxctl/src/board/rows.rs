//! The rows of each list, from what was read of the database.

use super::list::{ListRow, RowField, chosen};
use super::own;
use super::state::{BoardState, Pane, PaneState};
use crate::queries::model::{Destination, ErrorGroup, Message, Part, Partition, Passes, Snapshot, Worker};
use crate::queries::state::DestinationState;
use crate::screen::text::{age, count, known, ms, rate, short};
use crate::screen::theme;
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

/// All rows of a list, in the order in which they come.
pub fn of(pane: Pane, state: &BoardState) -> Part<Vec<ListRow>> {
    fn each<T>(rows: &Part<Vec<T>>, row: impl Fn(&T) -> ListRow) -> Part<Vec<ListRow>> {
        rows.as_ref()
            .map(|rows| rows.iter().map(row).collect())
            .map_err(Clone::clone)
    }
    let shown = &state.shown;
    let owners = Owners::of(shown);
    match pane {
        Pane::Partitions => each(&shown.partitions, |row| partition(row, &owners)),
        Pane::Workers => each(&shown.workers, |row| {
            let mut passes = shown.passes.iter().flatten();
            worker(row, passes.find(|passes| passes.worker_id == row.id), &owners)
        }),
        Pane::Destinations => each(&shown.destinations, destination),
        Pane::Errors => each(&shown.errors, error),
        Pane::Messages => each(&shown.messages, message),
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
fn partition(row: &Partition, owners: &Owners) -> ListRow {
    let (letter, style) = match &row.owner {
        Some(owner) => owners.letter(owner),
        None => ("-".to_owned(), theme::BAD),
    };
    let (mark, mark_style) = match (row.is_blocked, row.first_waiting_seq) {
        (true, _) => ("!", theme::BAD),
        (_, Some(_)) => ("+", theme::WARNING),
        _ => (" ", Style::new()),
    };
    let waits = row.first_waiting_seq.unwrap_or(i64::MAX) as f64;
    let blocked = match row.is_blocked {
        true => "a key is blocked by a dead letter; see outbox_dead",
        false => "none",
    };
    ListRow {
        id: row.label.clone(),
        fields: vec![
            RowField::fact("", letter).style(style),
            RowField::fact("", mark).style(mark_style),
            RowField::fact("owner", row.owner.as_deref().unwrap_or("none")).by_text(),
            RowField::fact("lease", known(row.ttl_s, |s| format!("{} left", age(s)))),
            RowField::fact("epoch", row.epoch.to_string()),
            RowField::fact(
                "first waiting",
                row.first_waiting_seq
                    .map_or("none".into(), |seq| format!("message {seq}")),
            )
            .by(if row.is_blocked { -1.0 } else { waits }),
            RowField::fact("blocked keys", blocked),
        ],
    }
}

fn worker(row: &Worker, passes: Option<&Passes>, owners: &Owners) -> ListRow {
    let (letter, style) = owners.letter(&row.id);
    let (state, state_style) = match row.is_alive {
        true => (
            row.state.as_str(),
            theme::state(row.state.known().map(DestinationState::Reported)),
        ),
        false => ("ended", theme::BAD),
    };
    // A bar of the rest of 20 s, the default of `outbox.heartbeat_ttl`.
    let full = ((row.heartbeat_s / 20.0 * 5.0).ceil() as usize).clamp(1, 5);
    let (heartbeat, heartbeat_style) = match row.is_alive {
        true => {
            let bar = "▮".repeat(full) + &"▯".repeat(5 - full);
            (format!("{bar} {}", age(row.heartbeat_s)), theme::GOOD)
        }
        false => ("–".to_owned(), theme::BAD),
    };
    let mut fields = vec![
        RowField::words("", 0, letter).style(style.patch(theme::STRONG)),
        RowField::prose("worker", 0, 8, &row.id),
        RowField::words("state", 0, state).style(state_style).by_text(),
        RowField::number("parts", 1, count(row.partitions)).by(-row.partitions as f64),
        RowField::words("heartbeat", 2, heartbeat)
            .style(heartbeat_style)
            .full(format!("{} left", age(row.heartbeat_s)))
            .by(row.heartbeat_s),
        RowField::number("pass", 4, known(passes, |passes| ms(passes.mean_ms))),
        RowField::number(
            "publ/s",
            3,
            known(passes, |passes| rate(passes.per_s(|passes| passes.published))),
        ),
        RowField::number(
            "fail/s",
            5,
            known(passes, |passes| rate(passes.per_s(|passes| passes.failed))),
        ),
        RowField::number("up", 6, age(row.age_s)),
        RowField::fact("reason", row.reason.as_deref().unwrap_or_default()),
        RowField::fact("detail", row.detail.as_deref().unwrap_or_default()),
        RowField::fact("pid", known(row.pid, |pid| pid.to_string())),
    ];
    if let Some(passes) = passes {
        let done = format!("{} with changes in {}", count(passes.count), age(passes.span_s));
        let leases = format!(
            "{} desired, {} taken, {} released",
            passes.desired, passes.leased, passes.released
        );
        fields.extend([
            RowField::fact("passes", done),
            RowField::fact("claimed", count(passes.claimed)),
            RowField::fact("published", count(passes.published)),
            RowField::fact("failed", count(passes.failed)),
            RowField::fact("leases", leases),
            RowField::fact("backoff", ms(passes.backoff_ms)),
        ]);
    }
    ListRow {
        id: row.id.clone(),
        fields,
    }
}

fn destination(row: &Destination) -> ListRow {
    let total = |value: Option<i64>| known(value, count);
    let limit = row.pending.zip(row.max_pending);
    let is_full = limit.is_some_and(|(pending, max)| pending * 10 >= max * 9);
    let most = (row.max_pending).map_or(String::new(), |max| format!(" of at most {}", count(max)));
    let times = [row.p50_ms, row.p95_ms, row.p99_ms].map(|time| known(time, ms));
    ListRow {
        id: row.name.clone(),
        fields: vec![
            RowField::prose("destination", 0, 11, &row.name),
            RowField::words("state", 0, row.state.as_str())
                .style(theme::state(row.state.known()))
                .by_text(),
            RowField::number("pending", 1, known(row.pending, short))
                .full(total(row.pending) + &most)
                .style(if is_full { theme::BAD } else { Style::new() })
                .by_largest(row.pending.map(|n| n as f64)),
            RowField::number("oldest", 2, known(row.oldest_s, age)).by_largest(row.oldest_s),
            RowField::number("publ/s", 3, known(row.published_per_s, rate)),
            RowField::number("p95", 4, known(row.p95_ms, ms))
                .full(format!("{}, p50 {}, p99 {}", times[1], times[0], times[2]))
                .by_largest(row.p95_ms),
            RowField::number("flight", 5, known(row.in_flight, short)).full(total(row.in_flight)),
            RowField::number("died", 6, known(row.dead_total, short)).full(total(row.dead_total)),
            RowField::fact("failed", total(row.failed_total)),
            RowField::fact("published", total(row.published_total)),
            RowField::fact("since", known(row.since_s, |s| format!("{} ago", age(s)))),
            RowField::fact("reason", row.reason.as_deref().unwrap_or_default()),
            RowField::fact("detail", row.detail.as_deref().unwrap_or_default()),
            RowField::fact("described by", row.described_by.as_deref().unwrap_or_default()),
        ],
    }
}

fn error(row: &ErrorGroup) -> ListRow {
    ListRow {
        id: [&*row.destination, &*row.kind, &*row.message].join(" "),
        fields: vec![
            RowField::number("ago", 0, age(row.last_age_s)),
            RowField::number("count", 0, short(row.count))
                .full(count(row.count))
                .by(-row.count as f64),
            RowField::number("seq", 3, known(row.last_seq, |seq| seq.to_string())),
            RowField::prose("destination", 1, 7, &row.destination).by_text(),
            RowField::prose("kind", 2, 8, &row.kind).style(theme::WARNING).by_text(),
            RowField::prose("message", 0, 28, &row.message),
            RowField::fact("first", format!("{} ago", age(row.first_age_s))),
        ],
    }
}

fn message(row: &Message) -> ListRow {
    let due = |s: f64| if s > 0.0 { age(s) } else { "now".into() };
    ListRow {
        id: format!("{} {}", row.seq, row.destination),
        fields: vec![
            RowField::words("status", 0, row.status.as_str()).style(theme::status(row.status.known())),
            RowField::number("seq", 0, row.seq.to_string()).by(row.seq as f64),
            RowField::prose("key", 2, 6, row.key.as_deref().unwrap_or("–")).by_text(),
            RowField::prose("destination", 3, 7, &row.destination).by_text(),
            RowField::words("part", 6, &row.partition),
            RowField::number("tries", 5, row.attempts.to_string()).by(f64::from(-row.attempts)),
            RowField::number("age", 4, age(row.age_s)).by(-row.age_s),
            RowField::number("due", 7, known(row.due_s, due)),
            RowField::prose("why", 1, 22, row.note.as_deref().unwrap_or_default()),
        ],
    }
}
