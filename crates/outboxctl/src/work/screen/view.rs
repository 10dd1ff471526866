//! A frame from the state. Pure: it reads no clock and asks nobody.

use super::state::{Mode, Pane, State};
use crate::screen::panel::{Panel, draw_page, draw_stack};
use crate::screen::parts;
use crate::screen::table::{Cell, Column};
use crate::screen::text::{self, age, count, ms, short};
use crate::work::look::{Depth, DestinationLook, Look, Phase, Sharing, Waiting};
use crate::work::tick::Ticks;
use ratatui::Frame;
use ratatui::layout::Rect;
use ratatui::style::Style;
use ratatui::text::{Line, Span};
use ratatui::widgets::Paragraph;

/// From here on there are two columns.
const TWO_COLUMNS: u16 = 90;

/// And from here on three.
const THREE_COLUMNS: u16 = 180;

/// Below that the bars are less high.
const LOW: u16 = 30;

pub fn draw(state: &State, frame: &mut Frame) {
    let area = frame.area();
    let width = usize::from(area.width);
    let mut top = vec![header(state, width)];
    top.extend(banner(state).map(|said| {
        let said = text::left(&text::harmless(&format!(" {said} ")), width);
        Line::styled(said, state.theme.alarm())
    }));
    let head = u16::try_from(top.len()).unwrap_or(1).min(area.height);
    let foot = u16::from(area.height > head);
    let place = |y: u16, height: u16| Rect::new(area.x, area.y + y, area.width, height);
    frame.render_widget(Paragraph::new(top), place(0, head));
    frame.render_widget(Paragraph::new(footer(state, width)), place(area.height - foot, foot));
    let body = place(head, area.height - head - foot);
    match &state.mode {
        Mode::Help { scroll } => draw_page(frame, body, "Keys", help(state, width), *scroll, state.theme),
        Mode::Row { title, text, scroll } => {
            let lines = parts::prose(&text::harmless(text), width.saturating_sub(2), Style::new());
            draw_page(frame, body, &text::harmless(title), lines, *scroll, state.theme);
        }
        Mode::Watch => {
            for (column, panels) in columns(state, body) {
                draw_stack(frame, column, &panels, state.theme);
            }
        }
    }
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
    const NAMES: usize = 21;
    let room = width.saturating_sub(2 + NAMES).max(16);
    let lines = KEYS.iter().flat_map(|(key, does)| {
        let lines = text::wrapped(does, room).into_iter().enumerate();
        lines.map(move |(n, line)| {
            let key = if n == 0 { *key } else { "" };
            Line::from(vec![
                Span::styled(text::left(key, NAMES), state.theme.accent()),
                Span::raw(line),
            ])
        })
    });
    lines.collect()
}

// ---- panels ---------------------------------------------------------------------------------------------------------

/// The panels, by column.
fn columns(state: &State, area: Rect) -> Vec<(Rect, Vec<Panel>)> {
    let bar_lines = if area.height < LOW { 1 } else { 4 };
    let column = |x: u16, width: u16| Rect::new(area.x + x, area.y, width, area.height);
    let inside = |width: u16| usize::from(width.saturating_sub(2));
    let pane = |which: Pane, width: u16| Panel {
        has_focus: state.pane == which,
        selected: Some(state.at(which)),
        ..pane(state, which, inside(width))
    };
    let first = |width: u16| {
        [
            worker(state, inside(width)),
            throughput(state, bar_lines, inside(width)),
        ]
    };
    if area.width < TWO_COLUMNS {
        let panels = first(area.width)
            .into_iter()
            .chain(Pane::ALL.map(|which| pane(which, area.width)));
        return vec![(column(0, area.width), panels.collect())];
    }
    if area.width >= THREE_COLUMNS {
        let (left, middle) = (60, (area.width - 60) / 2);
        let right = area.width - left - middle;
        let figures = first(left).into_iter().chain([pane(Pane::Partitions, left)]);
        let state = [Pane::Destinations, Pane::Errors].map(|which| pane(which, middle));
        return vec![
            (column(0, left), figures.collect()),
            (column(left, middle), state.into()),
            (column(left + middle, right), vec![pane(Pane::Log, right)]),
        ];
    }
    let left = (area.width * 2 / 5).clamp(40, 66);
    let right = area.width - left;
    let lists = [Pane::Destinations, Pane::Log, Pane::Errors].map(|which| pane(which, right));
    let figures = first(left).into_iter().chain([pane(Pane::Partitions, left)]);
    vec![
        (column(0, left), figures.collect()),
        (column(left, right), lists.into()),
    ]
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
    let total = |n: u64| parts::total(i64::try_from(n).unwrap_or(i64::MAX));
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
                let claimed = parts::total(i64::try_from(ticks.last.claimed).unwrap_or(i64::MAX));
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

/// What its ticks did, in the window or since the start.
fn sums(ticks: &Ticks) -> [String; 4] {
    let sum = &ticks.sum;
    let figure = |n: u64| parts::total(i64::try_from(n).unwrap_or(i64::MAX));
    let span = match ticks.refresh_s {
        Some(left_s) => format!("in this window, the next in {}:", age(left_s)),
        None => "in all ticks since the start:".to_owned(),
    };
    let mean_ms = sum.duration_ms / ticks.count.max(1) as f64;
    [
        span,
        format!("  {} ticks of {} each", figure(ticks.count), ms(mean_ms)),
        format!(
            "  {} claimed, {} sent, {} not",
            figure(sum.claimed),
            figure(sum.published),
            figure(sum.failed)
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
    let per_s: Vec<f64> = state.per_s.iter().copied().collect();
    Panel {
        title: "Throughput".into(),
        remark: "published per second".into(),
        head: parts::per_second(&per_s, bar_lines, width, state.theme),
        ..Panel::default()
    }
}

fn pane(state: &State, pane: Pane, width: usize) -> Panel {
    let (look, theme) = (&state.look, state.theme);
    let drawn = parts::Look {
        selected: None,
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
                let figure = |n: u64| Cell::new(short(i64::try_from(n).unwrap_or(i64::MAX)));
                vec![
                    Cell::new(&row.name),
                    Cell::styled(&row.state, theme.state(&row.state)),
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
                let why = text::harmless(&format!("pending is not readable: {why}"));
                panel.head.splice(0..0, parts::prose(&why, width, theme.warning()));
            }
            panel
        }
    }
}
