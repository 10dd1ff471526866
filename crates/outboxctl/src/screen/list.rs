//! The rows of a list, whatever they are about, for the board and the commands. A list shows the columns that have room, and the page of a row all
//! fields; a filter searches all fields, and the order goes through the columns.

use super::text;
use ratatui::style::Style;
use ratatui::text::{Line, Span};

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
    /// Sorts the list, the least first and equal ones by their text.
    key: f64,
    /// Columns of rank 0 always stay; of the others the highest is left out first. `None` = only on the page.
    rank: Option<u8>,
    is_number: bool,
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
            key: 0.0,
            rank: None,
            is_number: false,
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

    /// A column of texts of any length, truncated to at least this width.
    pub fn prose(name: &'static str, rank: u8, least: usize, text: impl AsRef<str>) -> Self {
        Self {
            least: Some(least),
            ..Self::words(name, rank, text)
        }
    }

    /// A right-aligned column, sorted with the largest first and unknown values last.
    pub fn number(name: &'static str, rank: u8, value: impl Into<Option<f64>>, show: impl Fn(f64) -> String) -> Self {
        let value = value.into();
        Self {
            key: -value.unwrap_or(f64::MIN),
            is_number: true,
            ..Self::words(name, rank, text::known(value, show))
        }
    }

    /// The list shows a large number in short.
    pub fn count(name: &'static str, rank: u8, value: impl Into<Option<i64>>) -> Self {
        let value = value.into();
        Self {
            full: Some(text::known(value, text::count)),
            ..Self::number(name, rank, value.map(|n| n as f64), |n| text::short(n as i64))
        }
    }

    pub fn style(self, style: Style) -> Self {
        Self { style, ..self }
    }

    pub fn whole(&self) -> &str {
        self.full.as_deref().unwrap_or(&self.text)
    }
}

/// The fields that a list can be sorted by, as indexes: its columns.
pub fn orders(rows: &[ListRow]) -> Vec<usize> {
    let fields = rows.first().map_or(&[][..], |row| &row.fields);
    let is_column = |i: &usize| fields[*i].rank.is_some() && !fields[*i].name.is_empty();
    (0..fields.len()).filter(is_column).collect()
}

/// The rows that contain a text, in the n-th of their orders; 0 = as they come.
pub fn chosen(mut rows: Vec<ListRow>, filter: &str, order: usize) -> (Vec<ListRow>, &'static str) {
    let by = order.checked_sub(1).and_then(|n| orders(&rows).get(n).copied());
    let name = by.map_or("", |by| rows[0].fields[by].name);
    let wanted = filter.to_lowercase();
    rows.retain(|row| {
        let mut fields = row.fields.iter();
        fields.any(|field| field.whole().to_lowercase().contains(&wanted))
    });
    if let Some(by) = by {
        rows.sort_by(|a, b| {
            let (a, b) = (&a.fields[by], &b.fields[by]);
            a.key.total_cmp(&b.key).then_with(|| a.text.cmp(&b.text))
        });
    }
    (rows, name)
}

/// The titles of the columns and the rows, in lines of at most this width, with a gap between the columns.
pub fn lines(rows: &[ListRow], room: usize, gap: usize) -> Vec<Line<'static>> {
    let Some(first) = rows.first() else {
        return Vec::new();
    };
    let widths = widths(rows, room, gap);
    let line = |row: &ListRow, text: fn(&RowField) -> &str, style: fn(&RowField) -> Style| {
        let mut line = Line::default();
        for (i, width) in &widths {
            let field = &row.fields[*i];
            let text = text::fit(text(field), *width);
            let blanks = " ".repeat(width.saturating_sub(text::width(&text)));
            let (before, after) = if field.is_number {
                (blanks, String::new())
            } else {
                (String::new(), blanks)
            };
            let gap = if line.spans.is_empty() { "" } else { &" ".repeat(gap) };
            line.extend([
                Span::raw(gap.to_owned() + &before),
                Span::styled(text, style(field)),
                Span::raw(after),
            ]);
        }
        line
    };
    let titles = line(first, |field| field.name, |_| Style::new());
    let rows = rows
        .iter()
        .map(|row| line(row, |field| &field.text, |field| field.style));
    [titles].into_iter().chain(rows).collect()
}

/// The columns that have a text and fit, by their indexes, and their widths.
fn widths(rows: &[ListRow], room: usize, gap: usize) -> Vec<(usize, usize)> {
    let (fields, room) = (&rows[0].fields, room.saturating_add(gap));
    let is_empty = |i: usize| rows.iter().all(|row| row.fields[i].text.is_empty());
    let natural = |i: usize| {
        let texts = rows.iter().map(|row| text::width(&row.fields[i].text));
        texts.max().unwrap_or(0).max(text::width(fields[i].name)).max(1)
    };
    // Each with its least width, and what it lacks.
    let mut columns: Vec<(usize, usize, usize)> = (0..fields.len())
        .filter(|i| fields[*i].rank.is_some() && !is_empty(*i))
        .map(|i| {
            let (natural, least) = (natural(i), fields[i].least.unwrap_or(usize::MAX));
            (i, natural.min(least), natural.saturating_sub(least))
        })
        .collect();
    let sum = |columns: &[(usize, usize, usize)]| columns.iter().map(|(_, width, _)| width + gap).sum::<usize>();
    while sum(&columns) > room {
        let droppable = columns.iter().filter(|(i, ..)| fields[*i].rank > Some(0));
        let Some((last, ..)) = droppable.max_by_key(|(i, ..)| fields[*i].rank).copied() else {
            break;
        };
        columns.retain(|(i, ..)| *i != last);
    }
    // What is left goes to the texts that were truncated; what is missing is taken from the last columns.
    let (mut left, mut over) = (room.saturating_sub(sum(&columns)), sum(&columns).saturating_sub(room));
    for (_, width, lacks) in &mut columns {
        let more = left.min(*lacks);
        (*width, left) = (*width + more, left - more);
    }
    for (_, width, _) in columns.iter_mut().rev() {
        let less = over.min(*width);
        (*width, over) = (*width - less, over - less);
    }
    columns.into_iter().map(|(i, width, _)| (i, width)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(width: usize) -> String {
        let row = ListRow {
            id: String::new(),
            fields: vec![
                RowField::words("name", 0, "orders"),
                RowField::count("rank two", 2, 1_234),
                RowField::count("n", 1, 5),
                RowField::prose("text", 0, 6, "a sentence\u{1b}[2J"),
                RowField::fact("page", "on its page"),
            ],
        };
        let line = lines(&[row], width, 1).remove(1);
        line.to_string().trim_end().to_owned()
    }

    #[test]
    fn columns_go_by_rank_and_text_is_cut() {
        assert_eq!(at(40), "orders    1,234 5 a sentence␛[2J");
        assert_eq!(at(30), "orders    1,234 5 a sentence␛…");
        assert_eq!(at(22), "orders 5 a sentence␛[…");
        assert_eq!(at(13), "orders a sen…");
        assert_eq!(at(8), "orders …");
    }
}
