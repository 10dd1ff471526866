//! Draws a frame from the state. Pure: it reads neither a clock nor the board.

use super::state::{Mode, Pane, State};
use crate::queries::state::DestinationState;
use crate::screen::layout::{self, Body, LOW, Stack, TWO_COLUMNS};
use crate::screen::panel::Panel;
use crate::screen::parts;
use crate::screen::table::{Cell, Column};
use crate::screen::text::{self, age, count, ms, short};
use crate::work::pass::Passes;
use crate::work::snapshot::{Depth, DestinationSnapshot, Phase, Sharing, Snapshot, Waiting};
use outbox_core::words::Word;
use ratatui::Frame;
use ratatui::layout::Rect;
use ratatui::style::Style;
use ratatui::text::{Line, Span};

/// The least width for three columns.
const THREE_COLUMNS: u16 = 180;

pub fn draw(state: &State, frame: &mut Frame) {
    let width = usize::from(frame.area().width);
    let inside = width.saturating_sub(2);
    let mut top = vec![header(state, width)];
    top.extend(banner(state).map(|text| parts::alarm(&text, width, state.theme)));
    layout::draw(frame, top, footer(state, width), state.theme, |area| {
        match &state.mode {
            Mode::Help { scroll } => Body::Page {
                title: "Keys".into(),
                lines: help(state, inside),
                scroll: *scroll,
            },
            Mode::Row { title, text, scroll } => Body::Page {
                title: text::harmless(title),
                lines: parts::prose(text, inside, Style::new()),
                scroll: *scroll,
            },
            Mode::Watch => Body::Columns(columns(state, area)),
        }
    });
}

fn header(state: &State, width: usize) -> Line<'static> {
    let (snapshot, theme) = (&state.snapshot, state.theme);
    let words = vec![
        ("outboxctl work".to_owned(), theme.strong()),
        (text::harmless(&snapshot.who.worker_id), theme.accent()),
        (format!("{} UTC", snapshot.clock), theme.strong()),
        (format!("up {}", age(snapshot.up_s)), theme.dim()),
    ];
    parts::words(words, width)
}

/// The banner that says why nothing is delivered, or soon will not be. It shows one reason: the end before a hold.
fn banner(state: &State) -> Option<String> {
    let snapshot = &state.snapshot;
    if state.ends {
        return Some(
            "ENDING: claims nothing, waits up to 5 s for confirms, releases its partitions. A second time ends at once."
                .into(),
        );
    }
    if let Phase::Lost { why, since_s } = &snapshot.phase {
        return Some(format!(
            "SESSION LOST for {}: {why}. It tries again every second.",
            age(*since_s)
        ));
    }
    if state.holds {
        return Some(
            "HELD: claims nothing and keeps its partitions, so their messages wait. Press space to resume.".into(),
        );
    }
    snapshot
        .obstacle
        .as_ref()
        .map(|why| format!("NOTHING IS DELIVERED: {why}."))
}

fn footer(state: &State, width: usize) -> Line<'static> {
    let held = if state.holds { "resume" } else { "hold" };
    let keys = [
        ("q", "end"),
        ("?", "help"),
        ("space", held),
        ("tab 1-4", "pane"),
        ("j k", "move"),
        ("enter", "in full"),
    ];
    parts::keys(&keys, width, state.theme)
}

fn help(state: &State, width: usize) -> Vec<Line<'static>> {
    const KEYS: [(&str, &str); 8] = [
        (
            "q, ctrl-c",
            "end in order: claim no more messages, wait up to 5 s for confirms, release the partitions. A second time ends at once, and the leases expire",
        ),
        (
            "space",
            "claim nothing until space is pressed again. Messages in flight are settled, and the partitions are kept",
        ),
        (
            "tab, shift-tab, 1-4",
            "go to another pane: destinations, log, errors, partitions",
        ),
        ("j k, arrows", "select the next or the previous row"),
        ("pgup pgdn g G", "move ten rows, or to the first or the last row"),
        ("enter", "show the full text of the selected row"),
        ("?", "show these keys"),
        ("esc", "go back"),
    ];
    let keys = KEYS.iter();
    keys.flat_map(|(key, does)| parts::named(key, does, 21, width, state.theme.accent()))
        .collect()
}

// ---- panels ---------------------------------------------------------------------------------------------------------

/// The panels of each column, for the width of the area.
fn columns(state: &State, area: Rect) -> Vec<Stack> {
    use Which::{List, Throughput, Worker};
    let bar_lines = if area.height < LOW { 1 } else { 4 };
    let column = |width: u16, which: &[Which]| {
        Stack::new(width, which, |which, inside| match which {
            Worker => worker(state, inside),
            Throughput => throughput(state, bar_lines, inside),
            List(pane) => Panel {
                has_focus: state.pane == pane,
                ..list(state, pane, inside)
            },
        })
    };
    let [destinations, log, errors, partitions] = Pane::ALL.map(List);
    match area.width {
        THREE_COLUMNS.. => {
            let (left, middle) = (60, (area.width - 60) / 2);
            vec![
                column(left, &[Worker, Throughput, partitions]),
                column(middle, &[destinations, errors]),
                column(area.width - left - middle, &[log]),
            ]
        }
        TWO_COLUMNS.. => {
            let left = (area.width * 2 / 5).clamp(40, 66);
            vec![
                column(left, &[Worker, Throughput, partitions]),
                column(area.width - left, &[destinations, log, errors]),
            ]
        }
        width => vec![column(
            width,
            &[Worker, Throughput, destinations, log, errors, partitions],
        )],
    }
}

#[derive(Clone, Copy)]
enum Which {
    Worker,
    Throughput,
    List(Pane),
}

/// The panel Worker: its identity, its session and its totals.
fn worker(state: &State, width: usize) -> Panel {
    let (snapshot, theme) = (&state.snapshot, state.theme);
    let who = &snapshot.who;
    let named = |name: &'static str, value: &str| {
        let room = width.saturating_sub(11);
        Line::from(vec![
            Span::styled(text::left(name, 11), theme.dim()),
            Span::raw(text::fit(&text::harmless(value), room)),
        ])
    };
    let plain = Style::new();
    let alarm_if = |is_bad: bool| if is_bad { theme.bad() } else { plain };
    let (in_flight, window) = (sum(snapshot, |row| row.in_flight), sum(snapshot, |row| row.window));
    let partitions = match snapshot.sharing {
        Sharing::RowClaims => "any".to_owned(),
        _ => format!("{} of {}", snapshot.waiting.len(), snapshot.desired),
    };
    let has_none = snapshot.waiting.is_empty() && snapshot.sharing != Sharing::RowClaims;
    let passes = snapshot.passes.as_ref();
    let of_passes = |value: fn(&Passes) -> String| text::known(passes, value);
    let shown = [
        ("published", total(snapshot.ended.published), plain),
        (
            "retried",
            total(snapshot.ended.retried),
            alarm_if(snapshot.ended.retried > 0),
        ),
        (
            "failed",
            total(snapshot.ended.failed()),
            alarm_if(snapshot.ended.failed() > 0),
        ),
        (
            "died",
            total(snapshot.ended.all_dead()),
            alarm_if(snapshot.ended.all_dead() > 0),
        ),
        ("claimed", total(snapshot.claimed), plain),
        (
            "in flight",
            format!("{}/{}", count(in_flight as i64), short(window as i64)),
            plain,
        ),
        ("partitions", partitions, alarm_if(has_none)),
        ("workers", count(i64::from(snapshot.workers)), plain),
        (
            "heartbeat",
            text::known(snapshot.heartbeat_age_s, |s| format!("{} ago", age(s))),
            plain,
        ),
        (
            "pass",
            of_passes(|passes| {
                let claimed = total(passes.last.claimed);
                format!("{} for {claimed}", ms(passes.last.duration_ms))
            }),
            plain,
        ),
        (
            "backoff",
            of_passes(|passes| ms(f64::from(passes.last.backoff_ms))),
            plain,
        ),
        (
            "last lease",
            of_passes(|passes| format!("+{} -{}", passes.last.leased_count, passes.last.released_count)),
            plain,
        ),
    ];
    let sharing = match snapshot.sharing {
        Sharing::Leases => "partitions, by leases",
        Sharing::Alone => "nothing (--no-leasing)",
        Sharing::RowClaims => "rows, by claims (leasing is off)",
    };
    let mut head = vec![
        named("server", &who.server),
        named("database", &format!("{}, as {}", who.database, who.user)),
        named("shares", sharing),
    ];
    head.extend(parts::facts(&shown, width, theme));
    head.extend((passes.into_iter().flat_map(sums)).map(|line| Line::styled(text::left(&line, width), theme.dim())));
    Panel {
        title: "Worker".into(),
        remark: text::harmless(&who.worker_id),
        head,
        ..Panel::default()
    }
}

fn total(n: u64) -> String {
    parts::total(signed(n))
}

fn signed(n: u64) -> i64 {
    i64::try_from(n).unwrap_or(i64::MAX)
}

/// The sums of its passes, in the window or since the start.
fn sums(passes: &Passes) -> [String; 4] {
    let sum = &passes.sum;
    let span = match passes.refresh_s {
        Some(left_s) => format!("in this window, the next in {}:", age(left_s)),
        None => "in all passes since the start:".to_owned(),
    };
    let mean_ms = sum.duration_ms / passes.count.max(1) as f64;
    [
        span,
        format!("  {} passes of {} each", total(passes.count), ms(mean_ms)),
        format!(
            "  {} claimed, {} sent, {} not",
            total(sum.claimed),
            total(sum.published),
            total(sum.failed)
        ),
        format!(
            "  {} purged, {} leased, {} released",
            sum.purged_stale, sum.leased_count, sum.released_count
        ),
    ]
}

fn sum(snapshot: &Snapshot, of: fn(&DestinationSnapshot) -> usize) -> usize {
    snapshot.destinations.iter().map(of).sum()
}

fn throughput(state: &State, bar_lines: usize, width: usize) -> Panel {
    Panel {
        title: "Throughput".into(),
        remark: "published per second".into(),
        head: parts::per_second(&state.session.per_s, bar_lines, width, state.theme),
        ..Panel::default()
    }
}

fn list(state: &State, pane: Pane, width: usize) -> Panel {
    let (snapshot, theme) = (&state.snapshot, state.theme);
    let drawn = parts::TableView {
        selected: Some(state.at(pane)),
        order: "",
        width,
        theme,
    };
    let list = |title: &str, columns: &[Column], rows: Vec<Vec<Cell>>| parts::listed(title, columns, &rows, drawn);
    match pane {
        Pane::Destinations => {
            const COLUMNS: [Column; 9] = [
                Column::prose("destination", 0, 9),
                Column::words("state", 0),
                Column::number("since", 1),
                Column::number("flight", 3),
                Column::number("published", 2),
                Column::number("retried", 5),
                Column::number("failed", 6),
                Column::number("died", 4),
                Column::prose("why", 0, 26),
            ];
            let row = |row: &DestinationSnapshot| {
                let number = |n: u64| Cell::new(short(signed(n)));
                vec![
                    Cell::new(&row.name),
                    Cell::styled(
                        row.state.name(),
                        theme.state(Some(DestinationState::Reported(row.state))),
                    ),
                    Cell::new(age(row.since_s)),
                    Cell::new(short(row.in_flight as i64)),
                    number(row.ended.published),
                    number(row.ended.retried),
                    number(row.ended.failed()),
                    number(row.ended.all_dead()),
                    Cell::new(row.why()),
                ]
            };
            list(
                "1 Destinations",
                &COLUMNS,
                snapshot.destinations.iter().map(row).collect(),
            )
        }
        Pane::Log => {
            const COLUMNS: [Column; 2] = [Column::words("UTC", 0), Column::prose("message", 0, 20)];
            let rows = snapshot
                .log
                .iter()
                .map(|row| vec![Cell::new(&row.clock), Cell::new(&row.text)]);
            list("2 Log", &COLUMNS, rows.collect())
        }
        Pane::Errors => {
            let rows = Ok(snapshot.errors.iter().collect());
            Panel {
                title: "3 Errors".into(),
                ..parts::errors(&rows, drawn)
            }
        }
        Pane::Partitions => {
            const COLUMNS: [Column; 3] = [
                Column::words("partition", 0),
                Column::number("ready+flight", 0),
                Column::number("epoch", 1),
            ];
            let depth = |depth: Depth| {
                let more = if depth.is_all { "" } else { "+" };
                format!("{}{more}", count(depth.pending))
            };
            let row = |row: &Waiting| {
                vec![
                    Cell::new(&row.label),
                    Cell::new(text::known(row.depth, depth)),
                    Cell::new(row.epoch.to_string()),
                ]
            };
            let mut panel = list("4 Partitions", &COLUMNS, snapshot.waiting.iter().map(row).collect());
            if let Some(why) = &snapshot.uncounted {
                let why = format!("not counted: {why}");
                panel.head.splice(0..0, parts::prose(&why, width, theme.warning()));
            }
            panel
        }
    }
}
