//! A frame from the state. Pure: it reads no clock and asks nobody.

use super::state::{Mode, Pane, State};
use crate::queries::state::DestinationState;
use crate::screen::layout::{self, Body, LOW, Stack, TWO_COLUMNS};
use crate::screen::panel::Panel;
use crate::screen::parts;
use crate::screen::table::{Cell, Column};
use crate::screen::text::{self, age, count, ms, short};
use crate::work::look::{Depth, DestinationLook, Look, Phase, Sharing, Waiting};
use crate::work::tick::Ticks;
use outbox_core::words::Word;
use ratatui::Frame;
use ratatui::layout::Rect;
use ratatui::style::Style;
use ratatui::text::{Line, Span};

/// From this width on there are three columns.
const THREE_COLUMNS: u16 = 180;

pub fn draw(state: &State, frame: &mut Frame) {
    let width = usize::from(frame.area().width);
    let inside = width.saturating_sub(2);
    let mut top = vec![header(state, width)];
    top.extend(banner(state).map(|said| parts::alarm(&said, width, state.theme)));
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
    let (look, theme) = (&state.look, state.theme);
    let words = vec![
        ("outboxctl work".to_owned(), theme.strong()),
        (text::harmless(&look.who.worker_id), theme.accent()),
        (format!("{} UTC", look.clock), theme.strong()),
        (format!("up {}", age(look.up_s)), theme.dim()),
    ];
    parts::words(words, width)
}

/// What stands in the way of delivery, or is about to. One thing at a time: the end is more than a pause.
fn banner(state: &State) -> Option<String> {
    let look = &state.look;
    if state.ends {
        return Some(
            "ENDING: claims nothing, waits up to 5 s for confirms, gives its partitions back. Once more = at once."
                .into(),
        );
    }
    if let Phase::Lost { why, since_s } = &look.phase {
        return Some(format!(
            "SESSION LOST for {}: {why}. It tries again each second.",
            age(*since_s)
        ));
    }
    if state.holds {
        return Some(
            "HELD: claims nothing and keeps its partitions, so their messages wait for it. Space goes on.".into(),
        );
    }
    look.obstacle
        .as_ref()
        .map(|why| format!("NOTHING IS DELIVERED: {why}."))
}

fn footer(state: &State, width: usize) -> Line<'static> {
    let held = if state.holds { "go on" } else { "hold" };
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
            "ends in order: claims nothing more, waits up to 5 s for the brokers to confirm, gives its partitions back. Once more ends at once: its leases run out then",
        ),
        (
            "space",
            "claims nothing until pressed again. What is on its way is settled, the partitions are kept",
        ),
        (
            "tab, shift-tab, 1-4",
            "another pane: destinations, log, errors, partitions",
        ),
        ("j k, arrows", "the next, the previous row"),
        ("pgup pgdn g G", "ten rows on, the first, the last"),
        ("enter", "the selected row in full"),
        ("?", "these keys"),
        ("esc", "goes back"),
    ];
    let keys = KEYS.iter();
    keys.flat_map(|(key, does)| parts::named(key, does, 21, width, state.theme.accent()))
        .collect()
}

// ---- panels ---------------------------------------------------------------------------------------------------------

/// The panels, by column.
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

/// Who it is, and what it has done.
fn worker(state: &State, width: usize) -> Panel {
    let (look, theme) = (&state.look, state.theme);
    let who = &look.who;
    let named = |name: &'static str, value: &str| {
        let room = width.saturating_sub(11);
        Line::from(vec![
            Span::styled(text::left(name, 11), theme.dim()),
            Span::raw(text::fit(&text::harmless(value), room)),
        ])
    };
    let plain = Style::new();
    let alarm_if = |is_bad: bool| if is_bad { theme.bad() } else { plain };
    let (in_flight, window) = (sum(look, |row| row.in_flight), sum(look, |row| row.window));
    let partitions = match look.sharing {
        Sharing::RowClaims => "any".to_owned(),
        _ => format!("{} of {}", look.waiting.len(), look.desired),
    };
    let has_none = look.waiting.is_empty() && look.sharing != Sharing::RowClaims;
    let ticks = look.ticks.as_ref();
    let of_ticks = |value: fn(&Ticks) -> String| text::known(ticks, value);
    let shown = [
        ("published", total(look.ended.published), plain),
        ("retried", total(look.ended.retried), alarm_if(look.ended.retried > 0)),
        ("failed", total(look.ended.failed()), alarm_if(look.ended.failed() > 0)),
        ("dead", total(look.ended.buried()), alarm_if(look.ended.buried() > 0)),
        ("claimed", total(look.claimed), plain),
        (
            "in flight",
            format!("{}/{}", count(in_flight as i64), short(window as i64)),
            plain,
        ),
        ("partitions", partitions, alarm_if(has_none)),
        ("workers", count(i64::from(look.workers)), plain),
        (
            "heartbeat",
            text::known(look.heartbeat_age_s, |s| format!("{} ago", age(s))),
            plain,
        ),
        (
            "tick",
            of_ticks(|ticks| {
                let claimed = total(ticks.last.claimed);
                format!("{} for {claimed}", ms(ticks.last.duration_ms))
            }),
            plain,
        ),
        ("backoff", of_ticks(|ticks| ms(f64::from(ticks.last.backoff_ms))), plain),
        (
            "last lease",
            of_ticks(|ticks| format!("+{} -{}", ticks.last.leased_count, ticks.last.released_count)),
            plain,
        ),
    ];
    let sharing = match look.sharing {
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
    head.extend((ticks.into_iter().flat_map(sums)).map(|said| Line::styled(text::left(&said, width), theme.dim())));
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

/// What its ticks did, in the window or since the start.
fn sums(ticks: &Ticks) -> [String; 4] {
    let sum = &ticks.sum;
    let span = match ticks.refresh_s {
        Some(left_s) => format!("in this window, the next in {}:", age(left_s)),
        None => "in all ticks since the start:".to_owned(),
    };
    let mean_ms = sum.duration_ms / ticks.count.max(1) as f64;
    [
        span,
        format!("  {} ticks of {} each", total(ticks.count), ms(mean_ms)),
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

fn sum(look: &Look, of: fn(&DestinationLook) -> usize) -> usize {
    look.destinations.iter().map(of).sum()
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
    let (look, theme) = (&state.look, state.theme);
    let drawn = parts::Look {
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
                Column::figure("since", 1),
                Column::figure("flight", 3),
                Column::figure("published", 2),
                Column::figure("retried", 5),
                Column::figure("failed", 6),
                Column::figure("dead", 4),
                Column::prose("why", 0, 26),
            ];
            let row = |row: &DestinationLook| {
                let figure = |n: u64| Cell::new(short(signed(n)));
                vec![
                    Cell::new(&row.name),
                    Cell::styled(
                        row.state.name(),
                        theme.state(Some(DestinationState::Reported(row.state))),
                    ),
                    Cell::new(age(row.since_s)),
                    Cell::new(short(row.in_flight as i64)),
                    figure(row.ended.published),
                    figure(row.ended.retried),
                    figure(row.ended.failed()),
                    figure(row.ended.buried()),
                    Cell::new(row.why()),
                ]
            };
            list("1 Destinations", &COLUMNS, look.destinations.iter().map(row).collect())
        }
        Pane::Log => {
            const COLUMNS: [Column; 2] = [Column::words("UTC", 0), Column::prose("said", 0, 20)];
            let rows = look
                .log
                .iter()
                .map(|row| vec![Cell::new(&row.clock), Cell::new(&row.text)]);
            list("2 Log", &COLUMNS, rows.collect())
        }
        Pane::Errors => {
            let rows = Ok(look.errors.iter().collect());
            Panel {
                title: "3 Errors".into(),
                ..parts::errors(&rows, drawn)
            }
        }
        Pane::Partitions => {
            const COLUMNS: [Column; 3] = [
                Column::words("partition", 0),
                Column::figure("pending", 0),
                Column::figure("epoch", 1),
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
            let mut panel = list("4 Partitions", &COLUMNS, look.waiting.iter().map(row).collect());
            if let Some(why) = &look.uncounted {
                let why = format!("pending is not readable: {why}");
                panel.head.splice(0..0, parts::prose(&why, width, theme.warning()));
            }
            panel
        }
    }
}
