//! The panels of the board, each for one width.

use super::own;
use super::panel::{Panel, facts, total};
use super::rows::{self, Owners};
use super::state::{BoardState, Pane};
use crate::queries::model::{Minute, PartitionRow, Passes, Problem, Snapshot, Status};
use crate::screen::list;
use crate::screen::text::{self, age, count, known, ms, rate};
use crate::screen::theme;
use ratatui::style::Style;
use ratatui::text::{Line, Span};

/// The summary: what an operator looks for first.
pub fn summary(state: &BoardState, width: usize) -> Panel {
    let head = match &state.shown.status {
        Ok(status) => totals(&state.shown, status, width),
        Err(why) => unreadable(why, width),
    };
    Panel {
        title: "Summary".into(),
        head,
        ..Panel::default()
    }
}

fn totals(shown: &Snapshot, status: &Status, width: usize) -> Vec<Line<'static>> {
    let workers = shown.workers.as_deref().unwrap_or_default();
    let alive = workers.iter().filter(|worker| worker.is_alive);
    let heartbeat_s = alive.clone().map(|worker| worker.heartbeat_s).reduce(f64::min);
    let alive = alive.count();
    let partitions = shown.partitions.as_deref().unwrap_or_default();
    let owned = partitions.iter().filter(|partition| partition.owner.is_some()).count();
    let dead = match status.dead {
        10_000.. => "10,000+".into(),
        dead => count(dead),
    };
    let passes = shown.passes.as_deref().unwrap_or_default();
    let all: i64 = passes.iter().map(|passes| passes.count).sum();
    let pass_ms: f64 = passes.iter().map(|passes| passes.mean_ms * passes.count as f64).sum();
    let pass_ms = (all > 0).then_some(pass_ms / all as f64);
    let claimed = |passes: &[Passes]| rate(passes.iter().map(|passes| passes.per_s(|passes| passes.claimed)).sum());
    let of = |part: usize, all: usize| format!("{part} of {all}");
    let values = [
        ("pending", known(status.pending, total), false),
        ("oldest", known(status.oldest_s, age), status.oldest_s >= Some(60.0)),
        ("in flight", known(status.in_flight, total), false),
        ("dead", dead, status.dead > 0),
        ("published", known(status.published_total, total), false),
        ("failed", known(status.failed_total, total), false),
        ("pass", known(pass_ms, ms), false),
        ("workers", of(alive, workers.len()), alive == 0),
        (
            "partitions",
            of(owned, partitions.len()),
            owned == 0 && !partitions.is_empty(),
        ),
        ("publ/s", known(status.published_per_s, rate), false),
        (
            "fail/s",
            known(status.failed_per_s, rate),
            status.failed_per_s > Some(0.0),
        ),
        ("p95", known(status.p95_ms, ms), false),
        ("heartbeat", known(heartbeat_s, age), false),
        ("claim/s", known(shown.passes.as_deref().ok(), claimed), false),
    ];
    facts(&values, width)
}

/// What `outboxctl status` prints: the summary, the destinations and the workers.
pub fn report(snapshot: &Snapshot, status: &Status, width: usize) -> Vec<Line<'static>> {
    let mut lines = totals(snapshot, status, width.min(60));
    let owners = Owners::of(snapshot);
    let lists = [
        ("There is no destination.", rows::destinations(snapshot)),
        ("No worker runs in this database.", rows::workers(snapshot, &owners)),
    ];
    for (none, rows) in lists {
        lines.push(Line::default());
        match rows {
            Ok(rows) if rows.is_empty() => lines.push(Line::raw(none)),
            Ok(rows) => {
                let (rows, same) = list::lines(&rows, width, 2);
                lines.extend(rows);
                lines.extend(list::each(&same));
            }
            Err(why) => lines.extend(unreadable(&why, width)),
        }
    }
    lines
}

/// Messages each minute of the last hour, and each second of this session.
pub fn throughput(state: &BoardState, bar_lines: usize, width: usize) -> Panel {
    let hour = match &state.shown.throughput {
        Err(_) if state.is_worker_only() => Vec::new(),
        Err(why) => unreadable(why, width),
        Ok(minutes) => hour(minutes, bar_lines, width),
    };
    // A worker shows its own before that of all.
    let (mut head, hour, whose) = match state.own {
        Some(_) => (Vec::new(), hour, "this worker  "),
        None => (hour, Vec::new(), "this session  "),
    };
    let peak = state.per_s.iter().copied().fold(0.0, f64::max);
    let now = state.per_s.last().copied().unwrap_or(0.0);
    head.push(caption(
        whose,
        format!("{}/s", rate(now)),
        format!("  peak {}/s", rate(peak)),
    ));
    let recent = &state.per_s[state.per_s.len().saturating_sub(width)..];
    head.extend(bars(recent, bar_lines / 2, theme::ACCENT));
    head.extend(hour);
    Panel {
        title: "Throughput".into(),
        remark: "per minute, 60 minutes".into(),
        head,
        gives_way: true,
        ..Panel::default()
    }
}

/// The last complete minute.
fn whole_minute(minutes: &[Minute]) -> Option<&Minute> {
    minutes.len().checked_sub(2).map(|i| &minutes[i])
}

fn hour(minutes: &[Minute], bar_lines: usize, width: usize) -> Vec<Line<'static>> {
    // The minutes of each column.
    let columns = minutes.len().min(width).max(1);
    let column = |i: usize| &minutes[i * minutes.len() / columns..(i + 1) * minutes.len() / columns];
    let published = |minutes: &[Minute]| {
        let sum: i64 = minutes.iter().map(|minute| minute.published).sum();
        sum as f64 / minutes.len().max(1) as f64
    };
    let has = |minutes: &[Minute], number: fn(&Minute) -> i64| minutes.iter().any(|minute| number(minute) > 0);
    let (failed, retried) = (|minute: &Minute| minute.failed, |minute: &Minute| minute.retried);
    let mark = |minutes: &[Minute]| match () {
        () if has(minutes, failed) => Span::styled("x", theme::BAD),
        () if has(minutes, retried) => Span::styled("r", theme::WARNING),
        () => Span::styled("·", theme::DIM),
    };
    let values: Vec<f64> = (0..columns).map(|i| published(column(i))).collect();
    let whole = whole_minute(minutes);
    let p95_ms = whole.and_then(|minute| minute.p95_ms);
    let peak = minutes.iter().map(|minute| minute.published).max().unwrap_or(0);
    let rest = format!("  p95 {}  peak {}", known(p95_ms, ms), count(peak));
    let mut lines = vec![caption(
        "last minute  ",
        known(whole, |minute| count(minute.published)),
        rest,
    )];
    lines.extend(bars(&values, bar_lines, theme::GOOD));
    lines.push((0..columns).map(|i| mark(column(i))).collect());
    let legend = match (has(minutes, failed), has(minutes, retried)) {
        (true, _) => "x failed  r retried",
        (false, true) => "r retried",
        _ => "",
    };
    let [first, last] = [minutes.first(), minutes.last()].map(|minute| minute.map_or("", |minute| &*minute.clock));
    let room = columns.saturating_sub(first.len() + last.len());
    let legend = if legend.len() + 2 <= room { legend } else { "" };
    lines.push(Line::styled(
        text::harmless(&format!("{first}{legend:^room$}{last}")),
        theme::DIM,
    ));
    lines
}

fn caption(name: &'static str, value: String, rest: String) -> Line<'static> {
    let styled = [
        Span::styled(name, theme::DIM),
        Span::styled(value, theme::STRONG),
        Span::styled(rest, theme::DIM),
    ];
    Line::from_iter(styled)
}

/// Bars of this many lines, with a resolution of an eighth of a character. A value above zero is at least an eighth
/// high, unlike in a Sparkline of ratatui.
fn bars(values: &[f64], height: usize, style: Style) -> Vec<Line<'static>> {
    const EIGHTHS: [&str; 9] = [" ", "▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"];
    let peak = values.iter().copied().fold(0.0, f64::max);
    let steps = height * 8;
    let level = |value: f64| match value > 0.0 {
        true => ((value / peak * steps as f64).round() as usize).clamp(1, steps),
        false => 0,
    };
    let line = |below: usize| {
        let bar = |value: &f64| EIGHTHS[level(*value).saturating_sub(below * 8).min(8)];
        Line::styled(values.iter().map(bar).collect::<String>(), style)
    };
    (0..height).rev().map(line).collect()
}

/// The panel of a list, or the reason why there is none.
pub fn of_list(state: &BoardState, pane: Pane, width: usize) -> Panel {
    let filter = &state.panes[pane as usize].filter;
    let mut panel = Panel {
        title: pane.titles().0.into(),
        has_focus: state.pane == pane,
        gives_way: matches!(pane, Pane::Partitions | Pane::Workers),
        ..Panel::default()
    };
    let (rows, order) = match state.rows(pane) {
        Ok(rows) => rows,
        Err(why) => {
            panel.head.extend(unreadable(&why, width));
            return panel;
        }
    };
    panel.selected = state.selected(pane, &rows);
    panel.pinned = rows.iter().filter(|row| row.is_pinned).count();
    if let (Pane::ThisWorker, Some(own)) = (pane, &state.own)
        && let Some(facts) = &own.facts
    {
        panel.head = own::head(own, facts, state.now, width);
        panel.remark = text::harmless(&facts.who.worker_id);
    }
    if !filter.is_empty() {
        panel.remark = format!("/{}", text::harmless(filter));
    } else if !order.is_empty() {
        panel.remark = format!("by {order}");
    }
    match pane {
        Pane::Partitions => map(state, panel, &rows, width),
        _ => {
            let (lines, same) = list::lines(&rows, width, 1);
            if panel.remark.is_empty() && !same.is_empty() {
                panel.remark = format!("each: {same}");
            }
            let titles = lines.first().cloned().unwrap_or_else(|| "none".into());
            panel.head.push(titles.style(theme::DIM));
            panel.rows.extend(lines.into_iter().skip(1));
            panel
        }
    }
}

/// The map of partitions: a cell for each, with the letter of its owner and a mark for its state.
fn map(state: &BoardState, panel: Panel, rows: &[list::ListRow], width: usize) -> Panel {
    let label = rows.iter().map(|row| text::width(&row.id)).max().unwrap_or(0) + 1;
    // A round number per line is easier to count along.
    let per_line = match width.saturating_sub(label) / 2 {
        fitting @ 0..4 => fitting.max(1),
        fitting @ 4..32 => fitting / 4 * 4,
        _ => 32,
    };
    let selected = panel.has_focus.then_some(panel.selected);
    let lines = rows.chunks(per_line).enumerate().map(|(n, chunk)| {
        let mut line = Line::styled(text::left(&text::harmless(&chunk[0].id), label), theme::DIM);
        for (i, row) in chunk.iter().enumerate() {
            let is_selected = selected == Some(n * per_line + i);
            let style = if is_selected {
                row.fields[0].style.patch(theme::SELECTED)
            } else {
                row.fields[0].style
            };
            line.push_span(Span::styled(row.fields[0].text.clone(), style));
            line.push_span(Span::styled(row.fields[1].text.clone(), row.fields[1].style));
        }
        line
    });
    let owners = Owners::of(&state.shown);
    let partitions = state.shown.partitions.as_deref().unwrap_or_default();
    let having = |is: &dyn Fn(&&PartitionRow) -> bool| partitions.iter().filter(is).count();
    let mut legend: Vec<(String, usize, Style)> = Vec::new();
    for id in &owners.0 {
        let (letter, style) = owners.letter(id);
        let owned = having(&|row| row.owner.as_ref() == Some(id));
        legend.push((format!("{letter} {}", text::harmless(id)), owned, style));
    }
    let [none, waiting, blocked] = [
        having(&|row| row.owner.is_none()),
        having(&|row| row.first_waiting_seq.is_some()),
        having(&|row| row.is_blocked),
    ];
    let marks = [
        ("- no owner".to_owned(), none, theme::BAD),
        ("+ with messages".to_owned(), waiting, theme::WARNING),
        ("! with a blocked key".to_owned(), blocked, theme::BAD),
    ];
    legend.extend(marks.into_iter().filter(|(_, n, _)| *n > 0));
    let legend = legend.into_iter();
    let legend = legend.map(|(what, n, style)| Span::styled(text::fit(&format!("{what} {n}"), width), style).into());
    Panel {
        remark: match selected.and_then(|i| rows.get(i)) {
            Some(row) => text::harmless(&row.id),
            None => count(rows.len() as i64),
        },
        head: flowing(legend, width),
        rows: lines.collect(),
        selected: panel.selected / per_line,
        keeps_row_style: true,
        ..panel
    }
}

/// Groups of words one after the other, in as few lines as possible.
pub fn flowing(groups: impl Iterator<Item = Line<'static>>, width: usize) -> Vec<Line<'static>> {
    let mut lines: Vec<Line> = Vec::new();
    for group in groups {
        match lines.last_mut() {
            Some(line) if line.width() + 2 + group.width() <= width => {
                line.extend([Span::raw("  ")].into_iter().chain(group.spans));
            }
            _ => lines.push(group),
        }
    }
    lines
}

fn unreadable(why: &str, width: usize) -> Vec<Line<'static>> {
    let said = text::harmless(&format!("not readable: {why}"));
    let lines = text::wrapped(&said, width).into_iter();
    lines.map(|line| Line::styled(line, theme::WARNING)).collect()
}

/// The problems that `outbox_health` reports, each with its remedy, in at most this many lines. `h` shows the others.
pub fn problems(problems: &[Problem], width: usize, room: usize) -> Vec<Line<'static>> {
    let shown = problems.len().min(room / 2);
    let hidden = problems.len() - shown;
    let more = match hidden {
        0 => String::new(),
        hidden => format!("  +{hidden} more: h"),
    };
    let mut spare = room - 2 * shown; // for remedies of two lines
    let mut lines = Vec::new();
    for (n, problem) in problems.iter().take(shown).enumerate() {
        let what = text::harmless(&format!("! {}: {}", problem.title(), problem.problem));
        lines.push(Line::styled(text::fit(&what, width), theme::BAD));
        let more = if n + 1 == shown { &*more } else { "" };
        let columns = width.saturating_sub(4 + text::width(more)).max(1);
        let mut remedy = text::wrapped(&text::harmless(&problem.remedy), columns).into_iter();
        let mut parts = vec![remedy.next().unwrap_or_default()];
        let rest = remedy.collect::<Vec<_>>().join(" ");
        if !rest.is_empty() && spare > 0 {
            spare -= 1;
            parts.push(text::fit(&rest, columns));
        } else if !rest.is_empty() {
            parts[0] = text::fit(&format!("{} {rest}", parts[0]), columns);
        }
        let last = parts.len() - 1;
        for (i, (sign, said)) in ["  → ", "    "].into_iter().zip(parts).enumerate() {
            let mut line = Line::styled(sign.to_owned() + &said, theme::WARNING);
            if i == last && !more.is_empty() {
                line = Line::styled(sign.to_owned() + &text::left(&said, columns), theme::WARNING);
                line.push_span(Span::styled(more.to_owned(), theme::BAD));
            }
            lines.push(line);
        }
    }
    lines
}
