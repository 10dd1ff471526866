//! Pages that fill the screen: one row in full, the problems, the keys.

use super::state::{Letter, Pane, Row, State, orders};
use crate::format::{stamp, utc};
use crate::queries::model::{Destination, ErrorGroup, Message, Partition, Passes, Worker};
use crate::screen::parts::named;
use crate::screen::text::{self, age, count, known, ms, rate};
use ratatui::style::Style;
use ratatui::text::Line;

const KEYS: [(&str, &str); 17] = [
    ("q, ctrl-c", "end the program"),
    ("tab, shift-tab", "go to the next pane, or to the previous one"),
    (
        "1 2 3 4 5",
        "go to a pane: partitions, workers, destinations, errors, messages",
    ),
    ("j k, arrows", "select the next or the previous row"),
    ("pgup pgdn g G", "move ten rows, or to the first or the last row"),
    (
        "enter",
        "show the full text of the selected row; of a message with its event and attempts",
    ),
    ("/", "show only rows that contain a text; Esc shows all rows again"),
    ("s", "sort by the next column of the pane"),
    (
        "space",
        "hold the display until space is pressed again; then it shows the current state",
    ),
    ("+ -", "refresh less often, more often"),
    ("h", "show all problems of outbox_health with their remedies"),
    (
        "r d",
        "retry, discard the selected message: only with --allow-actions, confirmed with y",
    ),
    (
        "p",
        "pause or resume the selected destination: only with --allow-actions, confirmed with y",
    ),
    ("?", "show these keys"),
    ("", ""),
    (
        "A B C …",
        "a partition, by the letter of its owner, as in the list of workers",
    ),
    (
        "- + !",
        "a partition without an owner; with messages; with a key that a dead letter blocks",
    ),
];

pub fn help(state: &State, width: usize) -> Vec<Line<'static>> {
    page(width, |page| {
        for (key, does) in KEYS {
            page.fact(key, does);
        }
        page.blank();
        page.fact(
            &format!("{:?}", state.pane),
            &format!("are sorted by: {}", orders(state.pane).join(", ")),
        );
    })
}

pub fn health(state: &State, width: usize) -> Vec<Line<'static>> {
    let problems = match &state.shown.problems {
        Ok(problems) => problems,
        Err(why) => return page(width, |page| page.fact("not readable", why)),
    };
    if problems.is_empty() {
        return vec![Line::styled("All checks of outbox_health are ok.", state.theme.good())];
    }
    page(width, |page| {
        for problem in problems {
            page.fact(&problem.title(), &problem.problem);
            page.fact("", &format!("→ {}", problem.remedy));
            page.blank();
        }
    })
}

/// The title and the lines of a row in full.
pub fn detail(state: &State, id: &str, width: usize) -> (String, Vec<Line<'static>>) {
    let shown = &state.shown;
    let title = |what: &str| format!("{what} {}", text::harmless(id));
    match state.pane {
        Pane::Partitions => (title("Partition"), of(&shown.partitions, id, width, partition)),
        Pane::Workers => {
            let passes = shown.passes.iter().flatten().find(|passes| passes.worker_id == id);
            let lines = of(&shown.workers, id, width, |page, row| worker(page, row, passes));
            (title("Worker"), lines)
        }
        Pane::Destinations => (title("Destination"), of(&shown.destinations, id, width, destination)),
        Pane::Errors => ("Error".into(), of(&shown.errors, id, width, error)),
        Pane::Messages => {
            let letter = state.letter.as_ref();
            let letter = letter.filter(|letter| format!("{} {}", letter.seq, letter.destination) == id);
            let mut lines = of(&shown.messages, id, width, message);
            lines.extend(page(width, |page| {
                reasons(page, letter);
                event(page, letter);
            }));
            (title("Message"), lines)
        }
    }
}

fn of<R: Row>(
    rows: &Result<Vec<R>, String>,
    id: &str,
    width: usize,
    show: impl FnOnce(&mut Page, &R),
) -> Vec<Line<'static>> {
    page(width, |page| match rows.iter().flatten().find(|row| row.id() == id) {
        Some(row) => show(page, row),
        None => page.fact("", "It is no longer in the list: published, settled or gone."),
    })
}

/// Names at the left, their values wrapped beside them.
struct Page {
    width: usize,
    lines: Vec<Line<'static>>,
}

const NAMES: usize = 16;

fn page(width: usize, fill: impl FnOnce(&mut Page)) -> Vec<Line<'static>> {
    let mut page = Page {
        width,
        lines: Vec::new(),
    };
    fill(&mut page);
    page.lines
}

impl Page {
    fn fact(&mut self, name: &str, said: &str) {
        self.lines.extend(named(name, said, NAMES, self.width, Style::new()));
    }

    /// A value that may be missing.
    fn maybe(&mut self, name: &str, said: &Option<String>) {
        if let Some(said) = said {
            self.fact(name, said);
        }
    }

    fn blank(&mut self) {
        self.lines.push(Line::raw(""));
    }
}

fn partition(page: &mut Page, row: &Partition) {
    page.fact("owner", row.owner.as_deref().unwrap_or("none"));
    page.fact("lease", &known(row.ttl_s, |s| format!("{} left", age(s))));
    page.fact("epoch", &row.epoch.to_string());
    page.fact(
        "first waiting",
        &row.first_waiting_seq
            .map_or("none".into(), |seq| format!("message {seq}")),
    );
    let blocked = match row.is_blocked {
        true => "a key is blocked by a dead letter; see outbox_dead",
        false => "none",
    };
    page.fact("blocked keys", blocked);
}

fn worker(page: &mut Page, row: &Worker, passes: Option<&Passes>) {
    page.fact("state", if row.is_alive { row.state.as_str() } else { "ended" });
    page.maybe("reason", &row.reason);
    page.maybe("detail", &row.detail);
    page.fact("pid", &known(row.pid, |pid| pid.to_string()));
    page.fact("heartbeat", &format!("{} left", age(row.heartbeat_s)));
    page.fact("partitions", &count(row.partitions));
    page.fact("up", &age(row.age_s));
    if let Some(passes) = passes {
        page.blank();
        let said = format!(
            "{} with changes in {}, {} each",
            count(passes.count),
            age(passes.span_s),
            ms(passes.mean_ms)
        );
        page.fact("passes", &said);
        page.fact("claimed", &count(passes.claimed));
        page.fact("published", &count(passes.published));
        page.fact("failed", &count(passes.failed));
        let leases = format!(
            "{} desired, {} taken, {} released",
            passes.desired, passes.leased, passes.released
        );
        page.fact("leases", &leases);
        page.fact("backoff", &ms(passes.backoff_ms));
    }
}

fn destination(page: &mut Page, row: &Destination) {
    let words = |value: Option<i64>| known(value, count);
    page.fact("state", row.state.as_str());
    page.fact("since", &known(row.since_s, |s| format!("{} ago", age(s))));
    page.maybe("reason", &row.reason);
    page.maybe("detail", &row.detail);
    page.maybe("described by", &row.described_by);
    page.blank();
    let most = row
        .max_pending
        .map_or(String::new(), |max| format!(" of at most {}", count(max)));
    page.fact("pending", &(words(row.pending) + &most));
    page.fact("oldest", &known(row.oldest_s, age));
    page.fact("in flight", &words(row.in_flight));
    page.fact("published", &words(row.published_total));
    page.fact("published/s", &known(row.published_per_s, rate));
    page.fact("failed", &words(row.failed_total));
    page.fact("died", &words(row.dead_total));
    let times = [row.p50_ms, row.p95_ms, row.p99_ms].map(|time| known(time, ms));
    page.fact(
        "to confirm",
        &format!("p50 {}, p95 {}, p99 {}", times[0], times[1], times[2]),
    );
}

fn error(page: &mut Page, row: &ErrorGroup) {
    page.fact("destination", &row.destination);
    page.fact("kind", &row.kind);
    page.fact("count", &count(row.count));
    page.fact("first", &format!("{} ago", age(row.first_age_s)));
    page.fact("last", &format!("{} ago", age(row.last_age_s)));
    page.fact("last seq", &known(row.last_seq, |seq| seq.to_string()));
    page.blank();
    page.fact("message", &row.message);
}

fn message(page: &mut Page, row: &Message) {
    page.fact("status", row.status.as_str());
    page.maybe("why", &row.note);
    page.fact("seq", &row.seq.to_string());
    page.fact("destination", &row.destination);
    page.fact("partition", &row.partition);
    page.fact("key", row.key.as_deref().unwrap_or("none"));
    page.fact("attempts", &row.attempts.to_string());
    page.fact("enqueued", &format!("{} ago", age(row.age_s)));
    if let Some(due_s) = row.due_s {
        let due = if due_s > 0.0 {
            format!("in {}", age(due_s))
        } else {
            "now".into()
        };
        page.fact("next attempt", &due);
    }
}

/// In the words of `outboxctl show`.
fn reasons(page: &mut Page, letter: Option<&Letter>) {
    let Some(letter) = letter else { return };
    match &letter.reasons {
        Err(why) => page.fact("why it waits", &format!("not readable: {why}")),
        Ok(reasons) => {
            for reason in reasons {
                page.fact("why it waits", &reason.why);
                page.maybe("", &reason.remedy.as_ref().map(|remedy| format!("→ {remedy}")));
            }
        }
    }
}

fn event(page: &mut Page, letter: Option<&Letter>) {
    page.blank();
    let Some(letter) = letter else {
        page.fact("event", "reading …");
        return;
    };
    match &letter.event {
        Err(why) => page.fact("event", &format!("not readable: {why}")),
        Ok(None) => page.fact(
            "event",
            "is not in outbox_events: it was deleted, or the source is another table",
        ),
        Ok(Some(stored)) => {
            let event = &stored.event;
            page.fact("event", &event.id);
            page.fact("type", &event.kind);
            page.maybe("aggregate", &stored.aggregate());
            page.maybe("operation", &event.operation);
            page.fact("created", &format!("{} UTC", utc(&event.created_at)));
            page.maybe("correlation", &event.correlation_id);
            page.maybe("actor", &event.actor);
            page.maybe("headers", &event.headers);
            page.fact("payload", &event.payload);
        }
    }
    page.blank();
    match &letter.attempts {
        Err(why) => page.fact("attempts", &format!("not readable: {why}")),
        Ok(attempts) if attempts.is_empty() => page.fact("attempts", "none recorded"),
        Ok(attempts) => {
            for attempt in attempts {
                let by = attempt.worker_id.as_deref().unwrap_or("unknown");
                let error = attempt.error.as_deref().map(|error| format!(": {error}"));
                let said = format!(
                    "{} by {by}, {}{}",
                    stamp(&attempt.at),
                    attempt.outcome,
                    error.unwrap_or_default()
                );
                page.fact(&format!("attempt {}", attempt.attempt), &said);
            }
        }
    }
}
