//! The rows of a list, whatever they are about, for the board and the commands. A list shows the columns that have
//! room, and the page of a row all fields; a filter searches all fields, and the order goes through the columns.

use super::text;
use ratatui::style::Style;
use ratatui::text::{Line, Span};

/// A row of a list.
#[derive(Clone, Debug)]
pub struct ListRow {
    /// Identifies the row, however its values change.
    pub id: String,
    pub fields: Vec<RowField>,
    /// It stays in view: before the others in every order, and above what scrolls.
    pub is_pinned: bool,
}

impl ListRow {
    pub fn new(id: impl Into<String>, fields: Vec<RowField>) -> Self {
        Self {
            id: id.into(),
            fields,
            is_pinned: false,
        }
    }
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

    /// Makes it blank. The last column of its row covers blank ones before it.
    pub fn clear(&mut self) {
        (self.text, self.full) = (String::new(), None);
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
    rows.sort_by_key(|row| !row.is_pinned);
    (rows, name)
}

/// The titles of the columns and the rows, in lines of at most this width, with a gap between the columns; and the
/// columns that are left out because all rows have the same value there: `destination audit, tries 15`.
pub fn lines(rows: &[ListRow], room: usize, gap: usize) -> (Vec<Line<'static>>, String) {
    let Some(first) = rows.first() else {
        return Default::default();
    };
    let (widths, same) = widths(rows, room, gap);
    let line = |row: &ListRow, is_title: bool| {
        let mut line = Line::default();
        for (n, (i, width, _)) in widths.iter().enumerate() {
            let field = &row.fields[*i];
            let (mut width, text) = (*width, if is_title { field.name } else { &field.text });
            if n + 1 == widths.len() && !is_title {
                // Three spans for each blank column.
                let before = widths[..n].iter().rev();
                let blank = before.take_while(|(i, ..)| row.fields[*i].text.is_empty()).count();
                let blank = line.spans.split_off(line.spans.len() - 3 * blank);
                width += blank.iter().map(Span::width).sum::<usize>();
            }
            let text = text::fit(text, width);
            let blanks = " ".repeat(width.saturating_sub(text::width(&text)));
            let (before, after) = if field.is_number {
                (blanks, String::new())
            } else {
                (String::new(), blanks)
            };
            let gap = if line.spans.is_empty() { "" } else { &" ".repeat(gap) };
            line.extend([
                Span::raw(gap.to_owned() + &before),
                Span::styled(text, if is_title { Style::new() } else { field.style }),
                Span::raw(after),
            ]);
        }
        line
    };
    let titles = line(first, true);
    let lines = rows.iter().map(|row| line(row, false));
    let same = same
        .into_iter()
        .filter_map(|i| Some(format!("{} {}", first.fields[i].name, common(rows, i)?)));
    let same = same.collect::<Vec<_>>().join(", ");
    ([titles].into_iter().chain(lines).collect(), same)
}

/// The line below a list, with the columns that are left out because all rows have the same value there.
pub fn each(same: &str) -> Option<Line<'static>> {
    (!same.is_empty()).then(|| Line::raw(format!("each: {same}")))
}

fn has_value(text: &str) -> bool {
    !text.is_empty() && text != text::known(None::<f64>, |_| String::new())
}

/// A wider value keeps its column, though it is the same in all rows.
const SAME_MAX: usize = 20;

/// The one value that a column has in all rows.
fn common(rows: &[ListRow], i: usize) -> Option<&str> {
    let mut texts = rows.iter().map(|row| &*row.fields[i].text);
    let first = texts.next()?;
    texts.all(|text| text == first).then_some(first)
}

/// The index of a column that is shown, its width, and what that lacks.
type Column = (usize, usize, usize);

/// The columns that have a value and fit; and the columns that gave their width to a truncated text, because they have
/// the same value in all rows.
fn widths(rows: &[ListRow], room: usize, gap: usize) -> (Vec<Column>, Vec<usize>) {
    let fields = &rows[0].fields;
    let is_shown = |i: &usize| {
        let mut texts = rows.iter().map(|row| &*row.fields[*i].text);
        match fields[*i].rank {
            None => false,
            Some(0) => texts.any(|text| !text.is_empty()),
            Some(_) => texts.any(has_value),
        }
    };
    let is_same = |i: usize| {
        let value = common(rows, i).filter(|_| rows.len() > 1 && fields[i].rank > Some(0));
        value.is_some_and(|value| text::width(value) <= SAME_MAX)
    };
    let all: Vec<usize> = (0..fields.len()).filter(is_shown).collect();
    let differing = all.iter().copied().filter(|i| !is_same(*i)).collect();
    let (all, differing) = (fitting(rows, all, room, gap), fitting(rows, differing, room, gap));
    let of_texts = |columns: &[Column]| -> usize {
        let texts = columns
            .iter()
            .filter(|(i, ..)| fields[*i].least.is_some() && !is_same(*i));
        texts.map(|(_, width, _)| width).sum()
    };
    match of_texts(&differing) > of_texts(&all) {
        true => {
            let same = all.iter().map(|(i, ..)| *i).filter(|i| is_same(*i)).collect();
            (differing, same)
        }
        false => (all, Vec::new()),
    }
}

/// Those of the columns that fit. Of those with a rank above 0 the highest are left out first.
fn fitting(rows: &[ListRow], columns: Vec<usize>, room: usize, gap: usize) -> Vec<Column> {
    let (fields, room) = (&rows[0].fields, room.saturating_add(gap));
    let natural = |i: usize| {
        let texts = rows.iter().map(|row| text::width(&row.fields[i].text));
        texts.max().unwrap_or(0).max(text::width(fields[i].name)).max(1)
    };
    let mut columns: Vec<Column> = columns
        .into_iter()
        .map(|i| {
            let (natural, least) = (natural(i), fields[i].least.unwrap_or(usize::MAX));
            (i, natural.min(least), natural.saturating_sub(least))
        })
        .collect();
    let sum = |columns: &[Column]| columns.iter().map(|(_, width, _)| width + gap).sum::<usize>();
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
        (*width, left, *lacks) = (*width + more, left - more, *lacks - more);
    }
    for (_, width, _) in columns.iter_mut().rev() {
        let less = over.min(*width);
        (*width, over) = (*width - less, over - less);
    }
    columns
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(name: &str, n: i64) -> ListRow {
        let fields = vec![
            RowField::words("name", 0, name),
            RowField::count("rank two", 2, 1_234),
            RowField::count("n", 1, n),
            RowField::number("none", 1, None, |n| n.to_string()),
            RowField::prose("text", 0, 6, "a sentence\u{1b}[2J"),
            RowField::fact("page", "on its page"),
        ];
        ListRow::new("", fields)
    }

    fn of(rows: &[ListRow], width: usize) -> (String, String) {
        let (mut lines, same) = lines(rows, width, 1);
        (lines.remove(1).to_string().trim_end().to_owned(), same)
    }

    fn at(width: usize) -> String {
        of(&[row("orders", 5)], width).0
    }

    #[test]
    fn a_truncated_text_gets_the_width_of_empty_and_constant_columns() {
        let rows = [row("orders", 5), row("audit", 6)];
        let at = |width| of(&rows, width);
        assert_eq!(at(34), ("orders    1,234 5 a sentence␛[2J".into(), String::new()));
        assert_eq!(at(30), ("orders 5 a sentence␛[2J".into(), "rank two 1,234".into()));
        assert_eq!(at(22), ("orders 5 a sentence␛[…".into(), String::new()));
    }

    #[test]
    fn the_last_text_of_a_row_covers_the_blank_columns_before_it() {
        let mut group = row("audit", 7);
        group.fields[2].clear();
        let (lines, _) = lines(&[group, row("orders", 55_555)], 25, 1);
        let [titles, first, second] = [0, 1, 2].map(|i| lines[i].to_string());
        assert_eq!(titles.trim_end(), "name        n text");
        assert_eq!(first.trim_end(), "audit  a sentence␛[2J");
        assert_eq!(second.trim_end(), "orders 55,555 a sentence…");
    }

    #[test]
    fn a_pinned_row_comes_first_in_every_order() {
        let rows = || {
            vec![
                row("a", 9),
                ListRow {
                    is_pinned: true,
                    ..row("b", 1)
                },
            ]
        };
        for order in [0, 1, 3] {
            let (rows, _) = chosen(rows(), "", order);
            assert_eq!(rows[0].fields[0].text, "b", "order {order}");
        }
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
