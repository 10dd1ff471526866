//! A frame from the state. Pure: it reads no clock and runs no query.

use super::detail;
use super::state::{Link, Mode, Pane, State};
use crate::screen::layout::{self, Body, LOW, Stack, TWO_COLUMNS};
use crate::screen::panel::Panel;
use crate::screen::parts::{self, Owners, TableView};
use crate::screen::text;
use ratatui::Frame;
use ratatui::layout::Rect;
use ratatui::text::{Line, Span};

/// From this width on, errors and messages have most of the width. The other panels have the first `FIRST` columns, and
/// two fifths of a wider terminal, for long names.
const WIDE: u16 = 140;
const FIRST: u16 = 64;

/// The most problems that are shown above everything else; `h` shows all.
const PROBLEMS_MAX: usize = 3;

pub fn draw(state: &State, frame: &mut Frame) {
    let width = usize::from(frame.area().width);
    let mut top = vec![header(state, width)];
    if let Link::Lost { why, next_try } = &state.link {
        let next_try = text::age(next_try.as_secs_f64());
        let said = format!("Connection lost: {why}. Next try in {next_try}.");
        top.push(parts::alarm(&said, width, state.theme));
    }
    match &state.shown.problems {
        Ok(problems) => top.extend(parts::problems(problems, width, PROBLEMS_MAX, state.theme)),
        Err(why) => {
            let said = text::harmless(&format!("! health is not readable: {why}"));
            top.push(Line::styled(text::fit(&said, width), state.theme.warning()));
        }
    }
    let inside = width.saturating_sub(2);
    layout::draw(frame, top, footer(state, width), state.theme, |area| {
        match &state.mode {
            Mode::Help { scroll } => Body::Page {
                title: "Keys".into(),
                lines: detail::help(state, inside),
                scroll: *scroll,
            },
            Mode::Health { scroll } => Body::Page {
                title: "Health".into(),
                lines: detail::health(state, inside),
                scroll: *scroll,
            },
            Mode::Detail { id, scroll } => {
                let (title, lines) = detail::detail(state, id, inside);
                let scroll = *scroll;
                Body::Page { title, lines, scroll }
            }
            _ => Body::Columns(columns(state, area)),
        }
    });
}

/// The number of lines of a frame that shows everything, at a width.
pub fn height_of_all(state: &State, width: u16) -> u16 {
    let area = Rect::new(0, 0, width, LOW);
    let highest = columns(state, area).iter().map(Stack::height).max();
    let problems = match &state.shown.problems {
        Ok(problems) => parts::problems(problems, usize::from(width), PROBLEMS_MAX, state.theme).len() as u16,
        Err(_) => 1,
    };
    highest.unwrap_or(0).saturating_add(2 + problems)
}

fn header(state: &State, width: usize) -> Line<'static> {
    let now = &state.shown.now;
    let theme = state.theme;
    let mut words = vec![
        ("outboxctl top".to_owned(), theme.strong()),
        (
            text::harmless(&format!("{}@{}", now.user, now.database)),
            theme.accent(),
        ),
        (text::harmless(&now.clock), theme.strong()),
        (format!("every {}", every(state)), theme.dim()),
    ];
    if now.is_standby {
        words.push(("STANDBY".into(), theme.warning()));
    }
    if state.may_act {
        words.push(("actions on".into(), theme.warning()));
    }
    if state.held.is_some() {
        words.push(("HELD: space continues".into(), theme.alarm()));
    }
    parts::words(words, width)
}

fn every(state: &State) -> String {
    match state.interval.as_millis() {
        ms if ms < 1_000 => format!("{ms} ms"),
        ms if ms % 1_000 == 0 => format!("{} s", ms / 1_000),
        ms => format!("{:.1} s", ms as f64 / 1e3),
    }
}

fn footer(state: &State, width: usize) -> Line<'static> {
    let theme = state.theme;
    match (&state.mode, &state.notice) {
        (Mode::Confirm(action), _) => {
            let said = format!("{} Type y to confirm, any other key to cancel.", action.question());
            parts::alarm(&said, width, theme)
        }
        (Mode::Filter { .. }, _) => {
            let filter = text::harmless(&state.pane_state().filter);
            Line::from(vec![
                Span::styled("/", theme.accent()),
                Span::raw(text::fit(&filter, width.saturating_sub(2))),
                Span::styled(" ", theme.selected()),
                Span::styled("  Enter applies it, Esc cancels", theme.dim()),
            ])
        }
        (_, Some(notice)) => {
            let style = if notice.is_bad { theme.bad() } else { theme.good() };
            Line::styled(text::fit(&text::harmless(&notice.text), width), style)
        }
        _ => keys(state, width),
    }
}

fn keys(state: &State, width: usize) -> Line<'static> {
    let mut keys = vec![
        ("q", "quit"),
        ("?", "help"),
        ("tab 1-5", "pane"),
        ("j k", "move"),
        ("enter", "detail"),
        ("h", "health"),
        ("/", "filter"),
        ("s", "sort"),
    ];
    if state.may_act {
        keys.extend([("r", "retry"), ("d", "discard"), ("p", "pause, resume")]);
    }
    keys.extend([("space", "hold"), ("+ -", "interval")]);
    parts::keys(&keys, width, state.theme)
}

/// The panels, by column.
fn columns(state: &State, area: Rect) -> Vec<Stack> {
    let bar_lines = if area.height < LOW { 2 } else { 4 };
    let column =
        |width: u16, which: &[Which]| Stack::new(width, which, |which, inside| panel(state, which, bar_lines, inside));
    use Which::{List, Summary, Throughput};
    let [partitions, workers, destinations, errors, messages] = Pane::ALL.map(List);
    match area.width {
        WIDE.. => {
            let first = FIRST.max((u32::from(area.width) * 2 / 5) as u16);
            vec![
                column(first, &[Summary, Throughput, partitions, workers, destinations]),
                column(area.width - first, &[errors, messages]),
            ]
        }
        TWO_COLUMNS.. => {
            let first = area.width * 9 / 20;
            vec![
                column(first, &[Summary, Throughput, partitions, workers]),
                column(area.width - first, &[destinations, errors, messages]),
            ]
        }
        width => vec![column(
            width,
            &[Summary, Throughput, partitions, workers, destinations, errors, messages],
        )],
    }
}

#[derive(Clone, Copy)]
enum Which {
    Summary,
    Throughput,
    List(Pane),
}

fn panel(state: &State, which: Which, bar_lines: usize, width: usize) -> Panel {
    let theme = state.theme;
    let shown = &state.shown;
    let pane = match which {
        Which::Summary => return parts::summary(shown, width, theme),
        Which::Throughput => {
            return parts::throughput(&shown.throughput, &state.session.per_s, bar_lines, width, theme);
        }
        Which::List(pane) => pane,
    };
    let has_focus = state.pane == pane;
    let order = remark(state, pane);
    let selected = state.selected(pane);
    let look = TableView {
        selected,
        order: &order,
        width,
        theme,
    };
    let owners = Owners::of(shown);
    let panel = match pane {
        Pane::Partitions => {
            let selected = selected.filter(|_| has_focus);
            parts::partitions(&state.rows(pane, &shown.partitions), &owners, selected, width, theme)
        }
        Pane::Workers => parts::workers(&state.rows(pane, &shown.workers), &shown.passes, &owners, look),
        Pane::Destinations => parts::destinations(&state.rows(pane, &shown.destinations), look),
        Pane::Errors => parts::errors(&state.rows(pane, &shown.errors), look),
        Pane::Messages => parts::messages(&state.rows(pane, &shown.messages), look),
    };
    Panel { has_focus, ..panel }
}

/// The order and the filter of a list.
fn remark(state: &State, pane: Pane) -> String {
    let filter = &state.panes[pane as usize].filter;
    let filter = match filter.is_empty() {
        true => String::new(),
        false => format!("/{}", text::harmless(filter)),
    };
    let order = match state.order(pane) {
        "" => String::new(),
        order => format!("by {order}"),
    };
    [filter, order]
        .into_iter()
        .filter(|word| !word.is_empty())
        .collect::<Vec<_>>()
        .join(" ")
}
