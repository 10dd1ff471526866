//! Standard output, for people and scripts: aligned tables, and colours on a terminal. No text of a database reaches
//! the terminal as a control sequence.

use crate::failure::{Code, Failure};
use crate::format::clean;
use crate::screen::text::{fit, width};
use std::io::{ErrorKind, IsTerminal, Write, stdout};
use std::sync::OnceLock;

/// Writes to standard output. The program exits with 0 when its reader closes the pipe, as `head` does: that is no
/// failure.
pub fn print(text: &str) -> Result<(), Failure> {
    let mut out = stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => std::process::exit(0),
        written => {
            written.map_err(|error| Failure::new(Code::Refused, format!("could not write to standard output: {error}")))
        }
    }
}

/// Whether standard output takes colours: it is a terminal, `NO_COLOR` is not set (https://no-color.org), and `TERM` is
/// not `dumb`.
fn colours() -> bool {
    static COLOURS: OnceLock<bool> = OnceLock::new();
    *COLOURS.get_or_init(|| {
        let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
        stdout().is_terminal() && set("NO_COLOR").is_none() && set("TERM").is_none_or(|term| term != "dumb")
    })
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Colour {
    Bold,
    Good,
    Careful,
    Bad,
}

/// The text in a colour, if standard output takes colours.
pub fn paint(text: &str, colour: Colour) -> String {
    paint_if(colours(), text, colour)
}

fn paint_if(colours: bool, text: &str, colour: Colour) -> String {
    let code = match colour {
        Colour::Bold => "1",
        Colour::Good => "32",
        Colour::Careful => "33",
        Colour::Bad => "31",
    };
    match colours && !text.is_empty() {
        true => format!("\x1b[{code}m{text}\x1b[0m"),
        false => text.to_owned(),
    }
}

/// Rows under headings. On a terminal long texts are shortened, so that each row is one line.
pub struct Table {
    columns: Vec<Column>,
    rows: Vec<Vec<Cell>>,
}

struct Column {
    heading: &'static str,
    right: bool,
}

pub struct Cell {
    text: String,
    colour: Option<Colour>,
}

impl From<String> for Cell {
    fn from(text: String) -> Self {
        Self {
            text: clean(&text),
            colour: None,
        }
    }
}

impl From<&str> for Cell {
    fn from(text: &str) -> Self {
        text.to_owned().into()
    }
}

impl Cell {
    pub fn coloured(text: &str, colour: Option<Colour>) -> Self {
        Self { colour, ..text.into() }
    }
}

impl Table {
    /// A table with these headings. A heading that begins with `>` is that of a column of numbers, aligned to the
    /// right.
    pub fn new(headings: &[&'static str]) -> Self {
        let columns = headings.iter().map(|heading| Column {
            right: heading.starts_with('>'),
            heading: heading.trim_start_matches('>'),
        });
        Self {
            columns: columns.collect(),
            rows: Vec::new(),
        }
    }

    pub fn row<const N: usize>(&mut self, cells: [Cell; N]) {
        assert_eq!(N, self.columns.len(), "a cell for each heading");
        self.rows.push(cells.into());
    }

    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    pub fn render(&self) -> String {
        self.lines(terminal_width(), colours())
    }

    fn lines(&self, columns: Option<usize>, colours: bool) -> String {
        // A column that is empty in all rows is left out.
        let shown: Vec<usize> = (0..self.columns.len())
            .filter(|index| self.rows.iter().any(|row| !row[*index].text.is_empty()))
            .collect();
        let widest = |index: usize| {
            let cells = self.rows.iter().map(|row| width(&row[index].text));
            cells.max().unwrap_or(0).max(width(self.columns[index].heading))
        };
        let mut widths: Vec<usize> = shown.iter().map(|index| widest(*index)).collect();
        if let Some(columns) = columns {
            let right: Vec<bool> = shown.iter().map(|index| self.columns[*index].right).collect();
            narrow(&mut widths, &right, columns);
        }
        let line = |texts: Vec<(&str, Option<Colour>)>| {
            let mut line = String::new();
            for (position, ((text, colour), index)) in texts.into_iter().zip(&shown).enumerate() {
                let text = fit(text, widths[position]);
                let blanks = " ".repeat(widths[position].saturating_sub(width(&text)));
                let painted = colour.map_or(text.clone(), |colour| paint_if(colours, &text, colour));
                let last = position + 1 == shown.len();
                match self.columns[*index].right {
                    true => line.extend([blanks.as_str(), &painted]),
                    false if last => line.push_str(&painted),
                    false => line.extend([painted.as_str(), &blanks]),
                }
                if !last {
                    line.push_str("  ");
                }
            }
            line.truncate(line.trim_end().len());
            line.push('\n');
            line
        };
        let headings = shown
            .iter()
            .map(|index| (self.columns[*index].heading, Some(Colour::Bold)))
            .collect();
        let mut text = line(headings);
        for row in &self.rows {
            let cells = shown
                .iter()
                .map(|index| (row[*index].text.as_str(), row[*index].colour));
            text.push_str(&line(cells.collect()));
        }
        text
    }
}

/// Narrows columns of text until a row fits: first the last column to 24, then the widest one to 12. A number that is
/// cut reads as another number, so columns of numbers keep their width.
fn narrow(widths: &mut [usize], right: &[bool], columns: usize) {
    const MIN_LAST: usize = 24;
    const MIN_ANY: usize = 12;
    while widths.iter().sum::<usize>() + 2 * widths.len().saturating_sub(1) > columns {
        let last = widths.len() - 1;
        let narrowable = match widths[last] > MIN_LAST && !right[last] {
            true => Some(last),
            false => (0..widths.len())
                .filter(|index| !right[*index])
                .max_by_key(|index| widths[*index]),
        };
        match narrowable {
            Some(index) if widths[index] > MIN_ANY => widths[index] -= 1,
            _ => return,
        }
    }
}

/// The columns of the terminal. `None` if standard output is not a terminal: the output for a script is not cut.
fn terminal_width() -> Option<usize> {
    if !stdout().is_terminal() {
        return None;
    }
    let from_environment = std::env::var("COLUMNS").ok().and_then(|columns| columns.parse().ok());
    from_environment.or_else(|| {
        ratatui::crossterm::terminal::size()
            .ok()
            .map(|(columns, _)| usize::from(columns))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> Table {
        let mut table = Table::new(&[">SEQ", "STATE", "NOTHING", "ERROR"]);
        table.row([
            "7".into(),
            Cell::coloured("down", Some(Colour::Bad)),
            "".into(),
            "none".into(),
        ]);
        table.row([
            "1,234".into(),
            "注文".into(),
            "".into(),
            "a long text that does not fit on the line".into(),
        ]);
        table
    }

    #[test]
    fn a_table_is_aligned_by_the_width_on_the_screen() {
        assert_eq!(
            table().lines(None, false),
            "  SEQ  STATE  ERROR\n    7  down   none\n1,234  注文   a long text that does not fit on the line\n"
        );
    }

    #[test]
    fn on_a_terminal_texts_are_shortened_and_numbers_are_not() {
        let text = table().lines(Some(30), false);
        assert!(text.lines().all(|line| width(line) <= 30), "{text}");
        assert!(text.contains("a long text tha…"), "{text}");
        // A very narrow terminal still shows part of each row.
        assert!(table().lines(Some(5), false).contains("a long text…"));
    }

    #[test]
    fn the_widest_column_is_narrowed_after_the_last_one() {
        let narrowed = |widths: &[usize], right: &[bool], columns| {
            let mut widths = widths.to_vec();
            narrow(&mut widths, right, columns);
            widths
        };
        let texts = [false; 3];
        assert_eq!(narrowed(&[10, 20, 30], &texts, 80), [10, 20, 30]);
        assert_eq!(narrowed(&[10, 20, 60], &texts, 80), [10, 20, 46]);
        assert_eq!(narrowed(&[10, 60, 60], &texts, 80), [10, 42, 24]);
        assert_eq!(narrowed(&[10, 60, 8], &[false, false, true], 60), [10, 38, 8]);
        assert_eq!(narrowed(&[40, 40], &[true, true], 60), [40, 40]);
        assert_eq!(narrowed(&[60], &[false], 0), [12]);
        assert_eq!(narrowed(&[], &[], 0), [0; 0]);
    }

    #[test]
    fn colour_codes_surround_the_text_and_not_the_blanks() {
        let text = table().lines(None, true);
        assert!(text.contains("\x1b[31mdown\x1b[0m   none"), "{text:?}");
        assert_eq!(paint_if(true, "", Colour::Bad), "");
    }
}
