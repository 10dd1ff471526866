//! The lines of pages that cover the panels: the keys, the problems, one row in full.

use super::state::{BoardState, Pane};
use crate::screen::{text, theme};
use ratatui::text::Line;

/// Keys, their meaning in a word for the last line of the screen, and in a sentence. Lines that begin with `top` or
/// `work` are of this command only.
const KEYS: &str = "
top  | q | quit | end the program, like ctrl-c
work | q | end | end in order, like ctrl-c: claim no more messages, wait up to 5 s for confirms, release the partitions. \
A second time ends immediately, and the leases expire
     | ? | help | show these keys
top  | tab 1-5 | pane | go to the next pane, with Shift to the previous one, or to a pane by its number
work | tab 1-7 | pane | go to the next pane, with Shift to the previous one, or to a pane by its number
     | j k | move | select the next or the previous row, like the arrows
     | pgup pgdn g G | | move ten rows, or to the first or the last row
     | enter | detail | show the full text of the selected row; of a message with its event and attempts. Open or close a group
     | h | alerts | show all problems of outbox_health with their remedies
     | y | copy fix | copy the command for the selected message, group or alert to the clipboard of the terminal (OSC 52)
     | / | filter | show only rows that contain a text; Esc shows all rows again
     | s | sort | sort by the next column of the pane
top  | r | retry | retry the selected message: only with --allow-actions, confirmed with y
top  | d | discard | discard the selected message, under the same conditions
top  | p | pause, resume | pause or resume the selected destination, under the same conditions
top  | space | hold | hold the display until space is pressed again; then it shows the current state
work | space | hold | claim nothing until space is pressed again. Messages in flight are settled, and the partitions are kept
     | + - | interval | refresh less often, more often
     | A B C … | | a partition, by the letter of its owner, as in the list of workers
     | - + ! | | a partition without an owner; with messages; with a key that a dead letter blocks
";

/// The keys of this board, each with its meaning in a word and in a sentence.
pub fn keys(state: &BoardState) -> impl Iterator<Item = (&'static str, &'static str, &'static str)> {
    let other = if state.own.is_some() { "top" } else { "work" };
    let lines = KEYS.lines().filter_map(|line| {
        let mut columns = line.split('|').map(str::trim);
        Some([columns.next()?, columns.next()?, columns.next()?, columns.next()?])
    });
    let lines = lines.filter(move |[command, ..]| *command != other);
    lines.map(|[_, key, word, sentence]| (key, word, sentence))
}

pub fn help(state: &BoardState, width: usize) -> Vec<Line<'static>> {
    keys(state).flat_map(|(key, _, does)| named(key, does, width)).collect()
}

/// All problems, and the line with which the n-th, the selected one, begins.
pub fn health(state: &BoardState, n: usize, width: usize) -> (Vec<Line<'static>>, usize) {
    let problems = match &state.shown.problems {
        Err(why) => return (named("not readable", why, width), 0),
        Ok(problems) if problems.is_empty() => {
            let ok = Line::styled("All checks of outbox_health are ok.", theme::GOOD);
            return (vec![ok], 0);
        }
        Ok(problems) => problems,
    };
    let (mut lines, mut at) = (Vec::new(), 0);
    for (i, problem) in problems.iter().enumerate() {
        let to = problem.named().map(|named| format!("{named}: ")).unwrap_or_default();
        let mut of_problem = named(&problem.check, &format!("{to}{}", problem.problem), width);
        of_problem.extend(named("", &format!("→ {}", problem.remedy), width));
        if i == n.min(problems.len() - 1) {
            at = lines.len();
            of_problem.iter_mut().for_each(|line| line.style = theme::SELECTED);
        }
        lines.extend(of_problem);
        lines.push(Line::default());
    }
    (lines, at)
}

/// The title and the fields of a row.
pub fn row(state: &BoardState, id: &str, width: usize) -> (String, Vec<Line<'static>>) {
    let title = match state.pane {
        Pane::Errors | Pane::Log => state.pane.titles().1.to_owned(),
        pane => text::harmless(&format!("{} {id}", pane.titles().1)),
    };
    let opened = state
        .opened
        .as_ref()
        .filter(|opened| format!("{} {}", opened.seq, opened.destination) == id);
    if let Some(opened) = opened {
        let lines = match &opened.facts {
            Ok(facts) => facts.iter().flat_map(|(name, said)| named(name, said, width)).collect(),
            Err(why) => named("not readable", why, width),
        };
        return (title, lines);
    }
    let rows = super::rows::of(state.pane, state).unwrap_or_default();
    let mut lines = match rows.iter().find(|row| row.id == id) {
        Some(row) => {
            let fields = row.fields.iter();
            let fields = fields.filter(|field| !field.name.is_empty() && !field.whole().is_empty());
            fields
                .flat_map(|field| named(field.name, field.whole(), width))
                .collect()
        }
        None => named("", "It is no longer in the list: published, settled or gone.", width),
    };
    if state.pane == Pane::Messages {
        lines.extend(named("event", "reading …", width));
    }
    (title, lines)
}

/// A name at the left, then its text, in as many lines as it needs.
fn named(name: &str, said: &str, width: usize) -> Vec<Line<'static>> {
    const NAMES: usize = 16;
    let lines = said
        .lines()
        .flat_map(|line| text::wrapped(&text::harmless(line), width.saturating_sub(NAMES).max(1)));
    let names = [text::harmless(name)]
        .into_iter()
        .chain(std::iter::repeat(String::new()));
    let lines = names.zip(lines);
    lines
        .map(|(name, line)| Line::raw(text::left(&text::fit(&name, NAMES - 1), NAMES) + &line))
        .collect()
}
