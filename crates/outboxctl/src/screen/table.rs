//! Rows of values in columns that fit a width: the least important columns are dropped first.

use super::text;
use super::theme::Theme;
use ratatui::style::Style;
use ratatui::text::{Line, Span};

/// A column of a table.
#[derive(Clone, Copy, Debug)]
pub struct Column {
    pub title: &'static str,
    pub at_right: bool,
    /// A column of rank 0 always stays; of the others the highest is dropped first if there is not enough room.
    pub rank: u8,
    /// The width that it may be truncated to: it gets the room that others leave.
    pub cut_to: Option<usize>,
}

impl Column {
    /// Words, as wide as they are.
    pub const fn words(title: &'static str, rank: u8) -> Self {
        Self {
            title,
            at_right: false,
            rank,
            cut_to: None,
        }
    }

    /// A number, right-aligned.
    pub const fn number(title: &'static str, rank: u8) -> Self {
        Self {
            title,
            at_right: true,
            rank,
            cut_to: None,
        }
    }

    /// Text of any length, truncated to at least this many columns.
    pub const fn prose(title: &'static str, rank: u8, cut_to: usize) -> Self {
        Self {
            title,
            at_right: false,
            rank,
            cut_to: Some(cut_to),
        }
    }
}

/// A field of a row. Its text is made harmless here, so a row cannot bring control characters to the terminal.
#[derive(Clone, Debug)]
pub struct Cell {
    text: String,
    style: Style,
}

impl Cell {
    pub fn new(text: impl AsRef<str>) -> Self {
        Self::styled(text, Style::new())
    }

    pub fn styled(text: impl AsRef<str>, style: Style) -> Self {
        Self {
            text: text::harmless(text.as_ref()),
            style,
        }
    }
}

/// The title line, and a line for each row.
pub fn lines(
    columns: &[Column],
    rows: &[Vec<Cell>],
    columns_wide: usize,
    theme: Theme,
) -> (Line<'static>, Vec<Line<'static>>) {
    // Two blanks between columns, or one if that saves a column or a word.
    let gap = match widths(columns, rows, columns_wide, 2) {
        (_, true) => 2,
        (_, false) => 1,
    };
    let (widths, _) = widths(columns, rows, columns_wide, gap);
    let shown = || (0..columns.len()).filter(|i| widths[*i].is_some());
    let place = |i: usize, text: &str| {
        let width = widths[i].unwrap_or(0);
        match columns[i].at_right {
            true => text::right(text, width),
            false => text::left(text, width),
        }
    };
    let join = |cells: Vec<Span<'static>>| {
        let mut spans = Vec::new();
        for cell in cells {
            if !spans.is_empty() {
                spans.push(Span::raw(" ".repeat(gap)));
            }
            spans.push(cell);
        }
        Line::from(spans)
    };
    let head = shown().map(|i| Span::styled(place(i, columns[i].title), theme.dim()));
    let row = |row: &Vec<Cell>| {
        join(
            shown()
                .map(|i| Span::styled(place(i, &row[i].text), row[i].style))
                .collect(),
        )
    };
    (join(head.collect()), rows.iter().map(row).collect())
}

/// The width of each column, None for one that does not fit; and whether everything is shown in full.
fn widths(columns: &[Column], rows: &[Vec<Cell>], room: usize, gap: usize) -> (Vec<Option<usize>>, bool) {
    let natural: Vec<usize> = (0..columns.len())
        .map(|i| {
            let cells = rows.iter().map(|row| text::width(&row[i].text));
            cells.max().unwrap_or(0).max(text::width(columns[i].title))
        })
        .collect();
    let least = |i: usize| columns[i].cut_to.map_or(natural[i], |cut| natural[i].min(cut));
    let mut shown: Vec<bool> = vec![true; columns.len()];
    let sum = |shown: &[bool], width: &dyn Fn(usize) -> usize| -> usize {
        let taken = (0..columns.len()).filter(|i| shown[*i]).map(|i| width(i) + gap);
        taken.sum::<usize>().saturating_sub(gap)
    };
    while sum(&shown, &least) > room {
        let droppable = (0..columns.len()).filter(|i| shown[*i] && columns[*i].rank > 0);
        match droppable.max_by_key(|i| columns[*i].rank) {
            Some(i) => shown[i] = false,
            None => break,
        }
    }
    let mut widths: Vec<Option<usize>> = (0..columns.len()).map(|i| shown[i].then(|| least(i))).collect();
    let mut left = room.saturating_sub(sum(&shown, &least));
    for i in 0..columns.len() {
        if let (Some(width), true) = (widths[i].as_mut(), columns[i].cut_to.is_some()) {
            let more = left.min(natural[i] - *width);
            *width += more;
            left -= more;
        }
    }
    // Not even the columns that stay fit: the last of them are truncated.
    let mut over = sum(&shown, &least).saturating_sub(room);
    for width in widths.iter_mut().rev().flatten() {
        let less = over.min(*width);
        *width -= less;
        over -= less;
    }
    let is_whole = widths
        .iter()
        .zip(&natural)
        .all(|(width, natural)| *width == Some(*natural));
    (widths, is_whole)
}

#[cfg(test)]
mod tests {
    use super::*;

    const COLUMNS: [Column; 4] = [
        Column::words("name", 0),
        Column::number("rank two", 2),
        Column::number("n", 1),
        Column::prose("text", 0, 6),
    ];

    fn at(width: usize) -> Vec<String> {
        let rows = [vec![
            Cell::new("orders"),
            Cell::new("1,234"),
            Cell::new("5"),
            Cell::new("a sentence\u{1b}[2J"),
        ]];
        let (head, rows) = lines(&COLUMNS, &rows, width, Theme { has_colour: false });
        [head, rows[0].clone()].map(|line| line.to_string()).into()
    }

    #[test]
    fn columns_go_by_rank_and_text_is_cut() {
        assert_eq!(
            at(40),
            [
                "name    rank two  n  text          ",
                "orders     1,234  5  a sentence␛[2J"
            ]
        );
        assert_eq!(at(30)[1], "orders    1,234 5 a sentence␛…");
        assert_eq!(at(22), ["name   n text         ", "orders 5 a sentence␛[…"]);
        assert_eq!(at(13)[1], "orders a sen…");
        assert_eq!(at(8)[1].trim_end(), "orders …");
        assert_eq!(at(0)[1].trim_end(), "");
    }
}
