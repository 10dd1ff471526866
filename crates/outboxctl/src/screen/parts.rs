//! The panels of a screen, each made of plain data for one width.

use super::chart::{bars, spread};
use super::panel::Panel;
use super::table::{self, Cell, Column};
use super::text::{self, age, count, known, ms, rate, short};
use super::theme::Theme;
use crate::queries::model::{
    Destination, ErrorGroup, Message, Minute, Part, Partition, Passes, Problem, Snapshot, Worker,
};
use crate::queries::state::DestinationState;
use ratatui::style::Style;
use ratatui::text::{Line, Span};

/// A letter for each owner of partitions, which identifies it without colours.
#[derive(Clone, Debug, Default)]
pub struct Owners(Vec<String>);

impl Owners {
    pub fn of(snapshot: &Snapshot) -> Self {
        let workers = snapshot.workers.iter().flatten().map(|worker| &worker.id);
        let owners = snapshot.partitions.iter().flatten();
        let mut ids: Vec<String> = workers
            .chain(owners.filter_map(|partition| partition.owner.as_ref()))
            .cloned()
            .collect();
        ids.sort_unstable();
        ids.dedup();
        Self(ids)
    }

    fn index(&self, id: &str) -> usize {
        self.0.iter().position(|known| known == id).unwrap_or(0)
    }

    pub fn letter(&self, id: &str) -> char {
        const LETTERS: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
        LETTERS.get(self.index(id)).map_or('#', |letter| char::from(*letter))
    }

    pub fn style(&self, id: &str, theme: Theme) -> Style {
        theme.owner(self.index(id))
    }
}

/// A panel that says why its data is missing.
fn unreadable(title: &str, why: &str, width: usize, theme: Theme) -> Panel {
    Panel {
        title: title.into(),
        head: prose(&format!("not readable: {why}"), width, theme.warning()),
        ..Panel::default()
    }
}

/// Text in as many lines as it needs.
pub fn prose(said: &str, width: usize, style: Style) -> Vec<Line<'static>> {
    let lines = text::wrapped(&text::harmless(said), width).into_iter();
    lines.map(|line| Line::styled(line, style)).collect()
}

/// A line that must not be missed.
pub fn alarm(said: &str, width: usize, theme: Theme) -> Line<'static> {
    let said = text::harmless(&format!(" {said} "));
    Line::styled(text::left(&said, width), theme.alarm())
}

/// A name at the left, in this many columns, and its text beside it, in as many lines as it needs.
pub fn named(name: &str, said: &str, columns: usize, width: usize, style: Style) -> Vec<Line<'static>> {
    let name = text::left(&text::harmless(name), columns);
    let room = width.saturating_sub(columns).max(1);
    let lines = text::wrapped(&text::harmless(said), room).into_iter().enumerate();
    let line = |(i, line)| {
        let name = if i == 0 { name.clone() } else { " ".repeat(columns) };
        Line::from(vec![Span::styled(name, style), Span::raw(line)])
    };
    lines.map(line).collect()
}

/// Words in one line, as many as fit.
pub fn words(words: Vec<(String, Style)>, width: usize) -> Line<'static> {
    let words = words.into_iter().map(|(word, style)| vec![Span::styled(word, style)]);
    fitting(words, width)
}

/// Keys and their meanings, in one line, as many as fit.
pub fn keys(keys: &[(&'static str, &'static str)], width: usize, theme: Theme) -> Line<'static> {
    let keys = keys.iter().map(|(key, does)| {
        vec![
            Span::styled(*key, theme.accent()),
            Span::styled(format!(" {does}"), theme.dim()),
        ]
    });
    fitting(keys, width)
}

fn fitting(items: impl Iterator<Item = Vec<Span<'static>>>, width: usize) -> Line<'static> {
    let mut spans = Vec::new();
    let mut used = 0;
    for item in items {
        let gap = if used == 0 { 0 } else { 2 };
        used += gap + item.iter().map(|span| text::width(&span.content)).sum::<usize>();
        if used > width {
            break;
        }
        spans.push(Span::raw(" ".repeat(gap)));
        spans.extend(item);
    }
    Line::from(spans)
}

/// The minimum number of columns of a value of the summary.
const VALUE: usize = 9;

/// A count that fits there: truncated digits would be another number.
pub fn total(n: i64) -> String {
    let exact = count(n);
    match exact.len() <= VALUE {
        true => exact,
        false => short(n),
    }
}

/// `name value    name value`, in two columns if there is room.
pub fn facts(facts: &[(&'static str, String, Style)], width: usize, theme: Theme) -> Vec<Line<'static>> {
    let names = facts.iter().map(|(name, ..)| text::width(name)).max().unwrap_or(0);
    let per_line = if width >= 2 * (names + 1 + VALUE) + 2 { 2 } else { 1 };
    let column = (width + 2) / per_line - 2;
    let fact = |(name, value, style): &(&'static str, String, Style)| {
        let room = column.saturating_sub(names + 1);
        [
            Span::styled(text::left(name, names + 1), theme.dim()),
            Span::styled(text::left(&text::harmless(value), room), *style),
        ]
    };
    let rows = facts.len().div_ceil(per_line);
    let line = |row: usize| {
        let mut spans = Vec::new();
        for fact_of_row in (0..per_line).filter_map(|n| facts.get(row + n * rows)) {
            if !spans.is_empty() {
                spans.push(Span::raw("  "));
            }
            spans.extend(fact(fact_of_row));
        }
        Line::from(spans)
    };
    (0..rows).map(line).collect()
}

/// The summary: what an operator looks for first.
pub fn summary(snapshot: &Snapshot, width: usize, theme: Theme) -> Panel {
    let status = match &snapshot.status {
        Ok(status) => status,
        Err(why) => return unreadable("Summary", why, width, theme),
    };
    let plain = Style::new();
    let alarm_if = |is_bad: bool| if is_bad { theme.bad() } else { plain };
    let workers: &[Worker] = snapshot.workers.as_deref().unwrap_or_default();
    let alive = workers.iter().filter(|worker| worker.is_alive).count();
    let partitions: &[Partition] = snapshot.partitions.as_deref().unwrap_or_default();
    let owned = partitions.iter().filter(|partition| partition.owner.is_some()).count();
    let minutes: &[Minute] = snapshot.throughput.as_deref().unwrap_or_default();
    let running_p95_ms = minutes.last().and_then(|minute| minute.p95_ms);
    let p95_ms = whole_minute(minutes)
        .and_then(|minute| minute.p95_ms)
        .or(running_p95_ms);
    let heartbeat = workers.iter().filter(|worker| worker.is_alive);
    let heartbeat_s = heartbeat.map(|worker| worker.heartbeat_s).reduce(f64::min);
    let oldest_s = status.oldest_s.unwrap_or(0.0);
    let dead = match status.dead {
        10_000.. => "10,000+".into(),
        dead => count(dead),
    };
    let passes: &[Passes] = snapshot.passes.as_deref().unwrap_or_default();
    let all: i64 = passes.iter().map(|passes| passes.count).sum();
    let pass_ms = passes
        .iter()
        .map(|passes| passes.mean_ms * passes.count as f64)
        .sum::<f64>()
        / all as f64;
    let pass_ms = Some(pass_ms).filter(|_| all > 0);
    let claimed_per_s: f64 = passes.iter().map(|passes| passes.per_s(|passes| passes.claimed)).sum();
    let shown = [
        ("pending", known(status.pending, total), plain),
        ("oldest", known(status.oldest_s, age), alarm_if(oldest_s >= 60.0)),
        ("in flight", known(status.in_flight, total), plain),
        ("dead", dead, alarm_if(status.dead > 0)),
        ("published", known(status.published_total, total), plain),
        ("failed", known(status.failed_total, total), plain),
        ("pass", known(pass_ms, ms), plain),
        ("workers", format!("{alive} of {}", workers.len()), alarm_if(alive == 0)),
        (
            "partitions",
            format!("{owned} of {}", partitions.len()),
            alarm_if(owned == 0 && !partitions.is_empty()),
        ),
        ("publ/s", known(status.published_per_s, rate), plain),
        (
            "fail/s",
            known(status.failed_per_s, rate),
            alarm_if(status.failed_per_s.unwrap_or(0.0) > 0.0),
        ),
        ("p95", known(p95_ms, ms), plain),
        ("heartbeat", known(heartbeat_s, age), plain),
        (
            "claim/s",
            known(snapshot.passes.as_ref().ok(), |_| rate(claimed_per_s)),
            plain,
        ),
    ];
    Panel {
        title: "Summary".into(),
        head: facts(&shown, width, theme),
        ..Panel::default()
    }
}

/// Messages each minute of the last hour, and each second of this session. `bar_lines` is the height of the first
/// chart.
pub fn throughput(
    minutes: &Part<Vec<Minute>>,
    session_per_s: &[f64],
    bar_lines: usize,
    width: usize,
    theme: Theme,
) -> Panel {
    let mut head = match minutes {
        Err(why) => prose(&format!("not readable: {why}"), width, theme.warning()),
        Ok(minutes) => hour(minutes, bar_lines, width, theme),
    };
    head.extend(per_second(session_per_s, bar_lines / 2, width, theme));
    Panel {
        title: "Throughput".into(),
        remark: "per minute, 60 minutes".into(),
        head,
        ..Panel::default()
    }
}

/// Messages each second since the start of this program, the newest at the right.
pub fn per_second(session_per_s: &[f64], bar_lines: usize, width: usize, theme: Theme) -> Vec<Line<'static>> {
    let now = session_per_s.last().copied().unwrap_or(0.0);
    let peak = session_per_s.iter().copied().fold(0.0, f64::max);
    let mut lines = vec![Line::from(vec![
        Span::styled("this session  ", theme.dim()),
        Span::styled(format!("{}/s", rate(now)), theme.strong()),
        Span::styled(format!("  peak {}/s", rate(peak)), theme.dim()),
    ])];
    let recent = &session_per_s[session_per_s.len().saturating_sub(width)..];
    lines.extend(bars(recent, bar_lines, theme.accent()));
    lines
}

/// The last complete minute.
fn whole_minute(minutes: &[Minute]) -> Option<&Minute> {
    minutes.len().checked_sub(2).map(|i| &minutes[i])
}

fn hour(minutes: &[Minute], bar_lines: usize, width: usize, theme: Theme) -> Vec<Line<'static>> {
    let published: Vec<f64> = minutes.iter().map(|minute| minute.published as f64).collect();
    let columns = spread(&published, width, |values| {
        values.iter().sum::<f64>() / values.len() as f64
    });
    let mark_of = |minute: &Minute| match (minute.failed > 0, minute.retried > 0) {
        (true, _) => 'x',
        (false, true) => 'r',
        _ => '·',
    };
    let marks: Vec<char> = minutes.iter().map(mark_of).collect();
    // Failed messages hide retried ones in a column.
    let marks = spread(&marks, width, |marks| {
        *['x', 'r'].iter().find(|mark| marks.contains(mark)).unwrap_or(&'·')
    });
    let mark = |mark: &char| {
        let style = match mark {
            'x' => theme.bad(),
            'r' => theme.warning(),
            _ => theme.dim(),
        };
        Span::styled(mark.to_string(), style)
    };
    let whole = whole_minute(minutes);
    let p95_ms = whole.and_then(|minute| minute.p95_ms);
    let peak = minutes.iter().map(|minute| minute.published).max().unwrap_or(0);
    let mut lines = vec![Line::from(vec![
        Span::styled("last minute  ", theme.dim()),
        Span::styled(known(whole, |minute| count(minute.published)), theme.strong()),
        Span::styled(
            format!("  p95 {}  peak {}", known(p95_ms, ms), count(peak)),
            theme.dim(),
        ),
    ])];
    lines.extend(bars(&columns, bar_lines, theme.good()));
    lines.push(Line::from(marks.iter().map(mark).collect::<Vec<_>>()));
    let first = minutes.first().map_or("", |minute| &minute.clock);
    let last = minutes.last().map_or("", |minute| &minute.clock);
    let legend = match (marks.contains(&'x'), marks.contains(&'r')) {
        (true, _) => "x failed  r retried",
        (false, true) => "r retried",
        _ => "",
    };
    let room = columns.len().saturating_sub(first.len() + last.len());
    let middle = match text::width(legend) + 2 <= room {
        true => format!("{legend:^room$}"),
        false => " ".repeat(room),
    };
    let axis = text::harmless(&format!("{first}{middle}{last}"));
    lines.push(Line::styled(axis, theme.dim()));
    lines
}

/// A cell for each partition: the letter of its owner, and a mark for its state.
pub fn partitions(
    rows: &Part<Vec<&Partition>>,
    owners: &Owners,
    selected: Option<usize>,
    width: usize,
    theme: Theme,
) -> Panel {
    let rows = match rows {
        Ok(rows) => rows,
        Err(why) => return unreadable("Partitions", why, width, theme),
    };
    let label = rows.iter().map(|row| text::width(&row.label)).max().unwrap_or(0) + 1;
    let fitting = width.saturating_sub(label) / 2;
    // A round number per line is easier to count along.
    let per_line = match fitting {
        0..4 => fitting.max(1),
        4..32 => fitting / 4 * 4,
        _ => 32,
    };
    let cell = |(i, row): (usize, &&Partition)| {
        let (letter, mut style) = match &row.owner {
            Some(owner) => (owners.letter(owner), owners.style(owner, theme)),
            None => ('-', theme.bad()),
        };
        let mark = match (row.is_blocked, row.first_waiting_seq) {
            (true, _) => Span::styled("!", theme.bad()),
            (_, Some(_)) => Span::styled("+", theme.warning()),
            _ => Span::raw(" "),
        };
        if selected == Some(i) {
            style = style.patch(theme.selected());
        }
        [Span::styled(letter.to_string(), style), mark]
    };
    let lines = rows.chunks(per_line).enumerate().map(|(n, chunk)| {
        let start = text::left(&text::harmless(&chunk[0].label), label);
        let first = n * per_line;
        let cells = chunk.iter().enumerate().flat_map(|(i, row)| cell((first + i, row)));
        Line::from_iter([Span::styled(start, theme.dim())].into_iter().chain(cells))
    });
    let mut legend = Vec::new();
    for id in &owners.0 {
        let owned = rows.iter().filter(|row| row.owner.as_deref() == Some(id)).count();
        let said = format!("{} {} {owned}", owners.letter(id), text::harmless(id));
        legend.push((said, owners.style(id, theme)));
    }
    let free = rows.iter().filter(|row| row.owner.is_none()).count();
    let waiting = rows.iter().filter(|row| row.first_waiting_seq.is_some()).count();
    let blocked = rows.iter().filter(|row| row.is_blocked).count();
    for (n, mark, what, style) in [
        (free, '-', "no owner", theme.bad()),
        (waiting, '+', "with messages", theme.warning()),
        (blocked, '!', "with a blocked key", theme.bad()),
    ] {
        if n > 0 {
            legend.push((format!("{mark} {what} {n}"), style));
        }
    }
    Panel {
        title: "1 Partitions".into(),
        remark: match selected.and_then(|i| rows.get(i)) {
            Some(row) => text::harmless(&row.label),
            None => count(rows.len() as i64),
        },
        head: flowing(legend, width),
        rows: lines.collect(),
        selected: selected.map(|i| i / per_line),
        keeps_row_style: true,
        grows: true,
        ..Panel::default()
    }
}

/// Words one after the other, in as few lines as possible.
fn flowing(words: Vec<(String, Style)>, width: usize) -> Vec<Line<'static>> {
    let mut lines: Vec<Line> = Vec::new();
    let mut used = 0;
    for (word, style) in words {
        let word = text::fit(&word, width);
        let columns = text::width(&word);
        match lines.last_mut() {
            Some(line) if used + 2 + columns <= width => {
                line.push_span(Span::raw("  "));
                line.push_span(Span::styled(word, style));
                used += 2 + columns;
            }
            _ => {
                lines.push(Line::styled(word, style));
                used = columns;
            }
        }
    }
    lines
}

/// The title and the state around the rows of a list.
#[derive(Clone, Copy, Debug)]
pub struct TableView<'a> {
    pub selected: Option<usize>,
    /// Its order and its filter.
    pub order: &'a str,
    pub width: usize,
    pub theme: Theme,
}

/// A list with its columns, or the reason why there is none.
fn list<T>(
    title: &str,
    columns: &[Column],
    rows: &Part<Vec<&T>>,
    look: TableView,
    cells: impl Fn(&T) -> Vec<Cell>,
) -> Panel {
    let rows: Vec<_> = match rows {
        Ok(rows) => rows.iter().map(|row| cells(row)).collect(),
        Err(why) => return unreadable(title, why, look.width, look.theme),
    };
    listed(title, columns, &rows, look)
}

/// A list with its columns.
pub fn listed(title: &str, columns: &[Column], rows: &[Vec<Cell>], look: TableView) -> Panel {
    let (head, lines) = table::lines(columns, rows, look.width, look.theme);
    Panel {
        title: title.into(),
        remark: look.order.into(),
        head: match lines.is_empty() {
            true => vec![Line::styled("none", look.theme.dim())],
            false => vec![head],
        },
        rows: lines,
        selected: look.selected,
        grows: true,
        ..Panel::default()
    }
}

pub fn workers(rows: &Part<Vec<&Worker>>, passes: &Part<Vec<Passes>>, owners: &Owners, look: TableView) -> Panel {
    let theme = look.theme;
    const COLUMNS: [Column; 9] = [
        Column::words("", 0),
        Column::prose("worker", 0, 8),
        Column::words("state", 0),
        Column::number("parts", 1),
        Column::words("heartbeat", 2),
        Column::number("pass", 4),
        Column::number("publ/s", 3),
        Column::number("fail/s", 5),
        Column::number("up", 6),
    ];
    let cells = |worker: &Worker| {
        let state = match worker.is_alive {
            true => Cell::styled(
                worker.state.as_str(),
                theme.state(worker.state.known().map(DestinationState::Reported)),
            ),
            false => Cell::styled("ended", theme.bad()),
        };
        let own = passes.iter().flatten().find(|passes| passes.worker_id == worker.id);
        let heartbeat = match worker.is_alive {
            true => Cell::styled(heartbeat(worker.heartbeat_s), theme.good()),
            false => Cell::styled("–", theme.bad()),
        };
        vec![
            Cell::styled(
                owners.letter(&worker.id).to_string(),
                owners.style(&worker.id, theme).patch(theme.strong()),
            ),
            Cell::new(&worker.id),
            state,
            Cell::new(count(worker.partitions)),
            heartbeat,
            Cell::new(known(own, |own| ms(own.mean_ms))),
            Cell::new(known(own, |own| rate(own.per_s(|passes| passes.published)))),
            Cell::new(known(own, |own| rate(own.per_s(|passes| passes.failed)))),
            Cell::new(age(worker.age_s)),
        ]
    };
    list("2 Workers", &COLUMNS, rows, look, cells)
}

/// A bar of the rest of 20 s, the default of `outbox.heartbeat_ttl`, and the number.
fn heartbeat(left_s: f64) -> String {
    let full = ((left_s / 20.0 * 5.0).ceil() as usize).clamp(1, 5);
    format!("{}{} {}", "▮".repeat(full), "▯".repeat(5 - full), age(left_s))
}

pub fn destinations(rows: &Part<Vec<&Destination>>, look: TableView) -> Panel {
    let theme = look.theme;
    const COLUMNS: [Column; 8] = [
        Column::prose("destination", 0, 11),
        Column::words("state", 0),
        Column::number("pending", 1),
        Column::number("oldest", 2),
        Column::number("publ/s", 3),
        Column::number("p95", 4),
        Column::number("flight", 5),
        Column::number("died", 6),
    ];
    let cells = |destination: &Destination| {
        let is_full = destination.pending.zip(destination.max_pending);
        let is_full = is_full.is_some_and(|(pending, max)| pending * 10 >= max * 9);
        let pending = known(destination.pending, short);
        vec![
            Cell::new(&destination.name),
            Cell::styled(destination.state.as_str(), theme.state(destination.state.known())),
            Cell::styled(pending, if is_full { theme.bad() } else { Style::new() }),
            Cell::new(known(destination.oldest_s, age)),
            Cell::new(known(destination.published_per_s, rate)),
            Cell::new(known(destination.p95_ms, ms)),
            Cell::new(known(destination.in_flight, short)),
            Cell::new(known(destination.dead_total, short)),
        ]
    };
    list("3 Destinations", &COLUMNS, rows, look, cells)
}

pub fn errors(rows: &Part<Vec<&ErrorGroup>>, look: TableView) -> Panel {
    let theme = look.theme;
    const COLUMNS: [Column; 6] = [
        Column::number("ago", 0),
        Column::number("count", 0),
        Column::number("seq", 3),
        Column::prose("destination", 1, 7),
        Column::prose("kind", 2, 8),
        Column::prose("message", 0, 28),
    ];
    let cells = |group: &ErrorGroup| {
        vec![
            Cell::new(age(group.last_age_s)),
            Cell::new(short(group.count)),
            Cell::new(known(group.last_seq, |seq| seq.to_string())),
            Cell::new(&group.destination),
            Cell::styled(&group.kind, theme.warning()),
            Cell::new(&group.message),
        ]
    };
    list("4 Recent errors", &COLUMNS, rows, look, cells)
}

pub fn messages(rows: &Part<Vec<&Message>>, look: TableView) -> Panel {
    let theme = look.theme;
    const COLUMNS: [Column; 9] = [
        Column::words("status", 0),
        Column::number("seq", 0),
        Column::prose("key", 2, 6),
        Column::prose("destination", 3, 7),
        Column::words("part", 6),
        Column::number("tries", 5),
        Column::number("age", 4),
        Column::number("due", 7),
        Column::prose("why", 1, 22),
    ];
    let cells = |message: &Message| {
        vec![
            Cell::styled(message.status.as_str(), theme.status(message.status.known())),
            Cell::new(message.seq.to_string()),
            Cell::new(message.key.as_deref().unwrap_or("–")),
            Cell::new(&message.destination),
            Cell::new(&message.partition),
            Cell::new(message.attempts.to_string()),
            Cell::new(age(message.age_s)),
            Cell::new(known(message.due_s, |s| if s > 0.0 { age(s) } else { "now".into() })),
            Cell::new(message.note.as_deref().unwrap_or("")),
        ]
    };
    list("5 Messages", &COLUMNS, rows, look, cells)
}

/// The problems that `outbox_health` reports, at most `problems_max` of them. The remedy follows on the same line if it
/// fits, otherwise on the next lines, at most two.
pub fn problems(problems: &[Problem], width: usize, problems_max: usize, theme: Theme) -> Vec<Line<'static>> {
    let mut lines = Vec::new();
    for problem in problems.iter().take(problems_max) {
        let what = text::harmless(&format!("! {}: {}", problem.title(), problem.problem));
        let what = text::fit(&what, width);
        let remedy = text::harmless(&format!("  → {}", problem.remedy));
        let fits = text::width(&what) + text::width(&remedy) <= width;
        let what = Span::styled(what, theme.bad());
        match (problem.remedy.is_empty(), fits) {
            (true, _) => lines.push(Line::from(what)),
            (false, true) => lines.push(Line::from(vec![what, Span::styled(remedy, theme.warning())])),
            (false, false) => {
                lines.push(Line::from(what));
                lines.extend(in_two_lines("  → ", &problem.remedy, width, theme.warning()));
            }
        }
    }
    let hidden = problems.len().saturating_sub(problems_max);
    if hidden > 0 {
        let more = format!("! {hidden} more problems: press h");
        lines.push(Line::styled(text::fit(&more, width), theme.bad()));
    }
    lines
}

/// A sign and a text beside it, in at most two lines.
fn in_two_lines(sign: &str, said: &str, width: usize, style: Style) -> Vec<Line<'static>> {
    let room = width.saturating_sub(text::width(sign)).max(1);
    let mut lines = text::wrapped(&text::harmless(said), room);
    if lines.len() > 2 {
        let rest = lines.drain(1..).collect::<Vec<_>>().join(" ");
        lines.push(text::fit(&rest, room));
    }
    let before = [sign.to_owned(), " ".repeat(text::width(sign))];
    let lines = before.into_iter().zip(lines);
    lines
        .map(|(before, line)| Line::styled(text::fit(&(before + &line), width), style))
        .collect()
}
