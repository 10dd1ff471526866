//! A frame from the state. Pure: it reads no clock and runs no query.

use super::own;
use super::page;
use super::panel::{EDGES, Panel, draw_column};
use super::panels;
use super::state::{BoardMode, BoardPage, BoardState, Pane};
use crate::screen::{text, theme};
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, BorderType, Paragraph};
use std::time::Duration;

/// From these widths on there are two, and three columns of panels.
const TWO_COLUMNS: u16 = 90;
const THREE_COLUMNS: u16 = 180;

/// The first of two columns is not wider.
const FIRST_MAX: u16 = 64;

/// Below this height the bars are lower, and the problems have fewer lines.
const LOW: u16 = 30;

/// The most lines of a notice.
const NOTICE_LINES_MAX: usize = 5;

#[derive(Clone, Copy)]
enum PanelKind {
    Summary,
    Throughput,
    List(Pane),
}

/// All panels in their order, each with its column if there are two and if there are three.
const PANELS: [(PanelKind, usize, usize); 9] = [
    (PanelKind::List(Pane::ThisWorker), 0, 0),
    (PanelKind::Summary, 0, 0),
    (PanelKind::Throughput, 0, 0),
    (PanelKind::List(Pane::Partitions), 0, 0),
    (PanelKind::List(Pane::Workers), 0, 1),
    (PanelKind::List(Pane::Destinations), 1, 1),
    (PanelKind::List(Pane::Errors), 1, 2),
    (PanelKind::List(Pane::Messages), 1, 2),
    (PanelKind::List(Pane::Log), 1, 1),
];

pub fn draw(state: &BoardState, frame: &mut Frame) {
    draw_coloured(state, frame);
    if !state.has_colour {
        theme::remove_colours(frame.buffer_mut());
    }
}

fn draw_coloured(state: &BoardState, frame: &mut Frame) {
    let area = frame.area();
    let head = head(state, area.width, area.height);
    let foot = foot(state, usize::from(area.width));
    let parts = [
        Constraint::Length(head.len() as u16),
        Constraint::Fill(1),
        Constraint::Length(foot.len() as u16),
    ];
    let [top, body, bottom] = Layout::vertical(parts).areas(area);
    frame.render_widget(Paragraph::new(head), top);
    frame.render_widget(Paragraph::new(foot), bottom);
    let BoardMode::Page(page, scroll) = &state.mode else {
        for (place, panels) in columns(state, body) {
            draw_column(frame, place, &panels);
        }
        return;
    };
    let width = usize::from(area.width.saturating_sub(EDGES));
    let mut scroll = *scroll;
    let (title, lines) = match page {
        BoardPage::Help => ("Keys".to_owned(), page::help(state, width)),
        BoardPage::Health => {
            let lines;
            (lines, scroll) = page::health(state, scroll, width);
            ("Health".to_owned(), lines)
        }
        BoardPage::Row(id) => page::row(state, id, width),
    };
    let visible = usize::from(body.height.saturating_sub(EDGES));
    let scroll = scroll.min(lines.len().saturating_sub(visible));
    let block = Block::bordered()
        .border_style(theme::ACCENT)
        .border_type(BorderType::Thick)
        .title(Span::styled(format!(" {title} "), theme::ACCENT.patch(theme::STRONG)))
        .title(Line::styled(" Esc goes back ", theme::DIM).right_aligned());
    frame.render_widget(Paragraph::new(lines).block(block).scroll((scroll as u16, 0)), body);
}

/// The number of lines of a frame that shows everything, at a width.
pub fn height_of_all(state: &BoardState, width: u16) -> u16 {
    let area = Rect::new(0, 0, width, LOW);
    let columns = columns(state, area).into_iter();
    let heights = columns.map(|(_, panels)| panels.iter().map(Panel::height).fold(0, u16::saturating_add));
    let head = head(state, width, LOW).len() as u16;
    heights.max().unwrap_or(0).saturating_add(head + 1).max(LOW)
}

/// The panels, by column.
fn columns(state: &BoardState, area: Rect) -> Vec<(Rect, Vec<Panel>)> {
    let bar_lines = if area.height < LOW { 2 } else { 4 };
    let width = (area.width * 9 / 20).min(FIRST_MAX);
    let widths = match area.width {
        ..TWO_COLUMNS => vec![Constraint::Fill(1)],
        TWO_COLUMNS..THREE_COLUMNS => vec![Constraint::Length(width), Constraint::Fill(1)],
        THREE_COLUMNS.. => vec![Constraint::Length(48), Constraint::Length(68), Constraint::Fill(1)],
    };
    let is_shown = |kind: PanelKind| match kind {
        PanelKind::Throughput => true,
        PanelKind::List(pane @ (Pane::ThisWorker | Pane::Log)) => state.panes().contains(&pane),
        PanelKind::Summary | PanelKind::List(_) => !state.is_worker_only(),
    };
    let places = Layout::horizontal(widths).split(area);
    let mut columns: Vec<(Rect, Vec<Panel>)> = places.iter().map(|place| (*place, Vec::new())).collect();
    for (kind, of_two, of_three) in PANELS.into_iter().filter(|(kind, ..)| is_shown(*kind)) {
        let column = [0, of_two, of_three][places.len() - 1];
        let (place, panels) = &mut columns[column];
        let inside = usize::from(place.width.saturating_sub(EDGES));
        panels.push(match kind {
            PanelKind::Summary => panels::summary(state, inside),
            PanelKind::Throughput => panels::throughput(state, bar_lines, inside),
            PanelKind::List(pane) => panels::of_list(state, pane, inside),
        });
    }
    columns
}

/// The lines above the panels: what is shown, and what is wrong.
fn head(state: &BoardState, width: u16, height: u16) -> Vec<Line<'static>> {
    let (now, width) = (&state.shown.now, usize::from(width));
    let own = state.own.as_ref();
    let program = if own.is_some() {
        "outboxctl work"
    } else {
        "outboxctl top"
    };
    let who = own.and_then(|own| Some(&own.facts.as_ref()?.who));
    let (user, database) = who.map_or((&now.user, &now.database), |who| (&who.user, &who.database));
    let said = |is: bool, what: &str| if is { what.to_owned() } else { String::new() };
    let words = [
        (program.to_owned(), theme::STRONG),
        (who.map_or(String::new(), |who| who.worker_id.clone()), theme::ACCENT),
        (format!("{user}@{database}"), theme::ACCENT),
        (now.clock.clone(), theme::STRONG),
        (own.map_or(String::new(), |own| own::up(own, state.now)), theme::DIM),
        (format!("every {}", interval(state.interval)), theme::DIM),
        (said(now.is_standby, "STANDBY"), theme::WARNING),
        (said(state.may_act, "actions on"), theme::WARNING),
        (said(state.held.is_some(), "HELD: space continues"), theme::ALARM),
    ];
    let words = words.iter().filter(|(word, _)| !word.is_empty());
    let words = words.map(|(word, style)| Span::styled(text::harmless(word), *style).into());
    let mut lines = panels::flowing(words, width);
    lines.truncate(1);
    let lost = state.lost.as_ref().map(|(why, next_try)| {
        let next_try = text::age(next_try.as_secs_f64());
        format!("Connection lost: {why}. Next try in {next_try}.")
    });
    lines.extend(own::banner(state).or(lost).map(|said| alarm(&said, width)));
    match &state.shown.problems {
        Ok(_) if matches!(state.mode, BoardMode::Page(BoardPage::Health, _)) => {} // it has them all
        Ok(problems) => {
            let room = if height < LOW { 2 } else { 6 };
            lines.extend(panels::problems(problems, width, room));
        }
        Err(why) => {
            let what = if state.is_worker_only() { "the outbox" } else { "health" };
            let said = text::harmless(&format!("! {what} is not readable: {why}"));
            lines.push(Line::styled(text::fit(&said, width), theme::WARNING));
        }
    }
    lines
}

fn interval(interval: Duration) -> String {
    match interval.as_millis() {
        ms if ms < 1_000 => format!("{ms} ms"),
        ms if ms % 1_000 == 0 => format!("{} s", ms / 1_000),
        ms => format!("{:.1} s", ms as f64 / 1e3),
    }
}

/// A line that must not be missed.
fn alarm(said: &str, width: usize) -> Line<'static> {
    let said = text::harmless(&format!(" {said} "));
    Line::styled(text::left(&said, width), theme::ALARM)
}

/// The keys, or what the program says. A command that was copied is shown as a whole.
fn foot(state: &BoardState, width: usize) -> Vec<Line<'static>> {
    let line = match (&state.mode, &state.notice) {
        (BoardMode::Confirm(action), _) => {
            let said = format!(
                "{}? Type y to confirm, any other key to cancel. {}",
                action.title(),
                action.verb.meaning()
            );
            alarm(&said, width)
        }
        (BoardMode::Filter(_), _) => {
            let filter = text::harmless(&state.pane_state().filter);
            Line::from(vec![
                Span::styled("/", theme::ACCENT),
                Span::raw(text::fit(&filter, width.saturating_sub(2))),
                Span::styled(" ", theme::SELECTED),
                Span::styled("  Enter applies it, Esc cancels", theme::DIM),
            ])
        }
        (_, Some(notice)) => {
            let style = if notice.is_bad { theme::BAD } else { theme::GOOD };
            let lines = text::wrapped(&text::harmless(&notice.text), width).into_iter();
            return lines
                .take(NOTICE_LINES_MAX)
                .map(|line| Line::styled(line, style))
                .collect();
        }
        _ => {
            let keys = page::keys(state).filter(|(_, short, _)| !short.is_empty());
            let keys = keys.filter(|(key, ..)| state.may_act || !["r", "d", "p"].contains(key));
            let keys = keys.map(|(key, short, _)| {
                let short = Span::styled(format!(" {short}"), theme::DIM);
                Line::from_iter([Span::styled(key, theme::ACCENT), short])
            });
            panels::flowing(keys, width).into_iter().next().unwrap_or_default()
        }
    };
    vec![line]
}
