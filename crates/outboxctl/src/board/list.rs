//! The rows of a list, whatever they are about. A list shows the fields that have room, and the page of a row all of
//! them; a filter searches all of them, and the order goes through those that have a key.

use super::panel::Panel;
use crate::screen::text;
use crate::screen::theme;
use ratatui::layout::Constraint;
use ratatui::style::Style;
use ratatui::text::{Line, Text};
use ratatui::widgets::Row;

/// A row of a list.
#[derive(Clone, Debug)]
pub struct ListRow {
    /// Identifies the row, however its values change.
    pub id: String,
    pub fields: Vec<RowField>,
}

/// A value of a row. Rows of one list have the same columns in the same order, and further fields after them.
#[derive(Clone, Debug)]
pub struct RowField {
    /// The title of its column, and its name on the page of the row. Empty = it is not on the page.
    pub name: &'static str,
    pub text: String,
    /// The text on the page of the row, if the list shows less.
    full: Option<String>,
    pub style: Style,
    /// Sorts the list, the least first and equal ones by their text. `None` = the list has no such order.
    key: Option<f64>,
    /// Columns of rank 0 always stay; of the others the highest is left out first. `None` = only on the page.
    rank: Option<u8>,
    at_right: bool,
    /// The width that the text may be truncated to.
    least: Option<usize>,
}

impl RowField {
    /// A value for the page of the row only. An empty one is left out. Its text, like that of all fields, is made
    /// harmless: no row brings control characters to the terminal.
    pub fn fact(name: &'static str, text: impl AsRef<str>) -> Self {
        Self {
            name,
            text: text::harmless(text.as_ref()),
            full: None,
            style: Style::new(),
            key: None,
            rank: None,
            at_right: false,
            least: None,
        }
    }

    /// A column as wide as its words.
    pub fn words(name: &'static str, rank: u8, text: impl AsRef<str>) -> Self {
        Self {
            rank: Some(rank),
            ..Self::fact(name, text)
        }
    }

    /// A right-aligned column.
    pub fn number(name: &'static str, rank: u8, text: impl AsRef<str>) -> Self {
        Self {
            at_right: true,
            ..Self::words(name, rank, text)
        }
    }

    /// A column of texts of any length, truncated to at least this width.
    pub fn prose(name: &'static str, rank: u8, least: usize, text: impl AsRef<str>) -> Self {
        Self {
            least: Some(least),
            ..Self::words(name, rank, text)
        }
    }

    pub fn style(self, style: Style) -> Self {
        Self { style, ..self }
    }

    pub fn full(self, text: impl AsRef<str>) -> Self {
        Self {
            full: Some(text::harmless(text.as_ref())),
            ..self
        }
    }

    pub fn by(self, key: f64) -> Self {
        Self { key: Some(key), ..self }
    }

    /// The largest first, unknown values last.
    pub fn by_largest(self, value: Option<f64>) -> Self {
        self.by(-value.unwrap_or(-1.0))
    }

    pub fn by_text(self) -> Self {
        self.by(0.0)
    }

    pub fn whole(&self) -> &str {
        self.full.as_deref().unwrap_or(&self.text)
    }
}

/// The fields that a list can be sorted by, as indexes.
pub fn orders(rows: &[ListRow]) -> Vec<usize> {
    let fields = rows.first().into_iter().flat_map(|row| row.fields.iter().enumerate());
    fields
        .filter(|(_, field)| field.key.is_some())
        .map(|(i, _)| i)
        .collect()
}

/// The rows that contain a text, in the n-th of their orders; 0 = as they come.
pub fn chosen(mut rows: Vec<ListRow>, filter: &str, order: usize) -> (Vec<ListRow>, &'static str) {
    let by = order.checked_sub(1).and_then(|n| orders(&rows).get(n).copied());
    let name = by.map_or("", |by| rows[0].fields[by].name);
    let wanted = filter.to_lowercase();
    rows.retain(|row| {
        let mut fields = row.fields.iter();
        wanted.is_empty() || fields.any(|field| field.whole().to_lowercase().contains(&wanted))
    });
    if let Some(by) = by {
        let key = |row: &ListRow| row.fields[by].key.unwrap_or_default();
        rows.sort_by(|a, b| {
            let equal = || a.fields[by].text.cmp(&b.fields[by].text);
            key(a).total_cmp(&key(b)).then_with(equal)
        });
    }
    (rows, name)
}

/// Fills a panel with rows in columns.
pub fn fill(panel: Panel, rows: &[ListRow], width: usize) -> Panel {
    let Some(first) = rows.first() else {
        let mut head = panel.head;
        head.push(Line::styled("none", theme::DIM));
        return Panel { head, ..panel };
    };
    // Two blanks between columns, or one if that saves a column or a word.
    let (gap, widths) = match widths(rows, width, 2) {
        (widths, true) => (2, widths),
        (_, false) => (1, widths(rows, width, 1).0),
    };
    let cells = |row: &ListRow, text: fn(&RowField) -> &str, style: fn(&RowField) -> Style| {
        let cell = |(field, width): (&RowField, &usize)| {
            let line = Text::styled(text::fit(text(field), *width), style(field));
            if field.at_right { line.right_aligned() } else { line }
        };
        let shown = row.fields.iter().zip(&widths).filter(|(_, width)| **width > 0);
        Row::new(shown.map(cell).collect::<Vec<_>>())
    };
    Panel {
        columns: Some(cells(first, |field| field.name, |_| theme::DIM)),
        rows: rows
            .iter()
            .map(|row| cells(row, |field| &field.text, |field| field.style))
            .collect(),
        widths: widths
            .iter()
            .filter(|width| **width > 0)
            .map(|width| Constraint::Length(*width as u16))
            .collect(),
        gap,
        ..panel
    }
}

/// The width of each column, 0 for one that does not fit; and whether everything is shown in full.
fn widths(rows: &[ListRow], room: usize, gap: usize) -> (Vec<usize>, bool) {
    let fields = &rows[0].fields;
    let natural = |i: usize| {
        let texts = rows.iter().map(|row| text::width(&row.fields[i].text));
        texts.max().unwrap_or(0).max(text::width(fields[i].name)).max(1)
    };
    let all = fields.iter().take_while(|field| field.rank.is_some()).count();
    let natural: Vec<usize> = (0..all).map(natural).collect();
    let mut shown: Vec<usize> = (0..all).collect();
    let least = |i: usize| fields[i].least.map_or(natural[i], |least| natural[i].min(least));
    let sum = |shown: &[usize]| (shown.iter().map(|i| least(*i) + gap).sum::<usize>()).saturating_sub(gap);
    while sum(&shown) > room {
        let droppable = shown.iter().filter(|i| fields[**i].rank > Some(0));
        let Some(last) = droppable.max_by_key(|i| fields[**i].rank).copied() else {
            break;
        };
        shown.retain(|i| *i != last);
    }
    // What is left goes to the texts that were truncated; what is missing is taken from the last columns.
    let (mut left, mut over) = (room.saturating_sub(sum(&shown)), sum(&shown).saturating_sub(room));
    let mut widths = vec![0; all];
    for i in &shown {
        let more = left.min(natural[*i] - least(*i));
        widths[*i] = least(*i) + more;
        left -= more;
    }
    for i in shown.iter().rev() {
        let less = over.min(widths[*i]);
        widths[*i] -= less;
        over -= less;
    }
    let is_whole = shown.len() == all && shown.iter().all(|i| widths[*i] == natural[*i]);
    (widths, is_whole)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(width: usize) -> String {
        let row = ListRow {
            id: String::new(),
            fields: vec![
                RowField::words("name", 0, "orders"),
                RowField::number("rank two", 2, "1,234"),
                RowField::number("n", 1, "5"),
                RowField::prose("text", 0, 6, "a sentence\u{1b}[2J"),
                RowField::fact("page", "on its page"),
            ],
        };
        let panel = fill(Panel::default(), &[row], width);
        let buffer = crate::screen::trial::buffer(width as u16 + 2, 4, |frame| panel.draw(frame, frame.area()));
        let shown = crate::screen::frame::as_text(&buffer);
        let row = shown.lines().nth(2).unwrap_or_default();
        row.trim_matches('│').trim_end().to_owned()
    }

    #[test]
    fn columns_go_by_rank_and_text_is_cut() {
        assert_eq!(at(40), "orders     1,234  5  a sentence␛[2J");
        assert_eq!(at(30), "orders    1,234 5 a sentence␛…");
        assert_eq!(at(22), "orders 5 a sentence␛[…");
        assert_eq!(at(13), "orders a sen…");
        assert_eq!(at(8), "orders …");
    }
}
