//! Standard output, for people and scripts: lines and aligned tables, with colours on a terminal. No text of a database
//! reaches the terminal as a control sequence.

use crate::failure::{Code, Failure};
use crate::screen::text::{fit, harmless, width};
use crate::screen::theme;
use ratatui::crossterm::terminal::size;
use ratatui::prelude::IntoCrossterm;
use ratatui::style::Style;
use ratatui::text::{Line, Span};
use std::io::{ErrorKind, IsTerminal, Write, stdout};

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

/// Writes lines, with their styles if standard output is a terminal that takes colours.
pub fn print_lines(lines: impl IntoIterator<Item = Line<'static>>) -> Result<(), Failure> {
    let is_dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
    print(&as_text(
        lines,
        stdout().is_terminal() && theme::has_colour() && !is_dumb,
    ))
}

fn as_text(lines: impl IntoIterator<Item = Line<'static>>, colours: bool) -> String {
    let mut text = String::new();
    for line in lines {
        for span in &line.spans {
            let (style, content) = (line.style.patch(span.style), harmless(&span.content));
            match colours && style != Style::new() && !content.is_empty() {
                true => text.push_str(&style.into_crossterm().apply(content).to_string()),
                false => text.push_str(&content),
            }
        }
        text.truncate(text.trim_end_matches(' ').len());
        text.push('\n');
    }
    text
}

/// Rows under headings. On a terminal long texts are shortened, so that each row is one line.
pub struct Table(Vec<TableColumn>);

struct TableColumn {
    is_number: bool,
    /// The first one is the heading.
    cells: Vec<Span<'static>>,
}

impl Table {
    /// A table of these rows. Each column has a heading and the cell of a row. A heading that begins with `>` is that of
    /// a column of numbers, aligned to the right. A column that is empty in all rows is left out.
    pub fn of<R>(rows: &[R], columns: &[(&'static str, &dyn Fn(&R) -> Span<'static>)]) -> Self {
        let column = |(heading, cell): &(&'static str, &dyn Fn(&R) -> Span<'static>)| {
            let mut cells = vec![Span::styled(heading.trim_start_matches('>'), theme::STRONG)];
            cells.extend(
                rows.iter()
                    .map(cell)
                    .map(|cell| Span::styled(harmless(&cell.content), cell.style)),
            );
            TableColumn {
                is_number: heading.starts_with('>'),
                cells,
            }
        };
        let is_filled = |column: &TableColumn| column.cells[1..].iter().any(|cell| !cell.content.is_empty());
        Self(columns.iter().map(column).filter(is_filled).collect())
    }

    pub fn lines(&self) -> Vec<Line<'static>> {
        // The output for a script is not cut.
        self.fitted(stdout().is_terminal().then(columns).flatten().map(usize::from))
    }

    fn fitted(&self, room: Option<usize>) -> Vec<Line<'static>> {
        let widest = |column: &TableColumn| column.cells.iter().map(|cell| width(&cell.content)).max().unwrap_or(0);
        let mut widths: Vec<usize> = self.0.iter().map(widest).collect();
        if let Some(room) = room {
            let is_number: Vec<bool> = self.0.iter().map(|column| column.is_number).collect();
            narrow(&mut widths, &is_number, room);
        }
        let line = |row: usize| {
            let mut line = Line::default();
            for (column, columns) in self.0.iter().zip(&widths) {
                let cell = &column.cells[row];
                let text = fit(&cell.content, *columns);
                let blanks = " ".repeat(columns.saturating_sub(width(&text)));
                let gap = if line.spans.is_empty() { "" } else { "  " };
                let (before, after) = if column.is_number {
                    (blanks, String::new())
                } else {
                    (String::new(), blanks)
                };
                line.extend([
                    Span::raw(gap.to_owned() + &before),
                    Span::styled(text, cell.style),
                    Span::raw(after),
                ]);
            }
            line
        };
        (0..self.0.first().map_or(0, |column| column.cells.len()))
            .map(line)
            .collect()
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

/// The columns of the terminal.
pub fn columns() -> Option<u16> {
    let from_environment = || std::env::var("COLUMNS").ok()?.parse().ok();
    from_environment().or_else(|| Some(size().ok()?.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> Table {
        let rows = [
            ("7", "down", "none"),
            ("1,234", "注文", "a long text that does not fit on the line"),
        ];
        Table::of(
            &rows,
            &[
                (">SEQ", &|row| row.0.into()),
                ("STATE", &|row| {
                    Span::styled(row.1, if row.1 == "down" { theme::BAD } else { Style::new() })
                }),
                ("NOTHING", &|_| "".into()),
                ("ERROR", &|row| row.2.into()),
            ],
        )
    }

    #[test]
    fn a_table_is_aligned_by_the_width_on_the_screen() {
        assert_eq!(
            as_text(table().fitted(None), false),
            "  SEQ  STATE  ERROR\n    7  down   none\n1,234  注文   a long text that does not fit on the line\n"
        );
    }

    #[test]
    fn on_a_terminal_texts_are_shortened_and_numbers_are_not() {
        let text = as_text(table().fitted(Some(30)), false);
        assert!(text.lines().all(|line| width(line) <= 30), "{text}");
        assert!(text.contains("a long text tha…"), "{text}");
        // A very narrow terminal still shows part of each row.
        assert!(as_text(table().fitted(Some(5)), false).contains("a long text…"));
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
    fn styles_surround_the_text_and_not_the_blanks() {
        let text = as_text(table().fitted(None), true);
        assert!(text.contains("down\x1b[0m   none"), "{text:?}");
        let lines = [Line::styled("", theme::BAD), Line::raw("\x1b[2J")];
        assert_eq!(as_text(lines, true), "\n␛[2J\n");
    }
}
