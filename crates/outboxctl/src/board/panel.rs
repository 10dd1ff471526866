//! Panels: a frame with a title, fixed lines, and as many rows as fit. Panels of a column share its height.

use crate::screen::text::{self, count, short};
use crate::screen::theme;
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::Style;
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, BorderType, List, ListState, Paragraph};

/// The content of a panel for one width.
#[derive(Clone, Debug, Default)]
pub struct Panel {
    pub title: String,
    /// At the right of the upper border.
    pub remark: String,
    /// Fixed lines.
    pub head: Vec<Line<'static>>,
    /// They scroll with the selected one.
    pub rows: Vec<Line<'static>>,
    /// So many of the first rows do not scroll.
    pub pinned: usize,
    pub selected: usize,
    /// It receives the keys.
    pub has_focus: bool,
    /// It is shown only if the others have room.
    pub gives_way: bool,
    /// The selection is within a row, and the row draws it.
    pub keeps_row_style: bool,
}

/// Lines, or columns, of the borders.
pub const EDGES: u16 = 2;

impl Panel {
    fn fixed(&self) -> u16 {
        EDGES + self.head.len() as u16
    }

    /// Lines and borders.
    pub fn height(&self) -> u16 {
        self.fixed().saturating_add(self.rows.len().min(1 << 14) as u16)
    }

    /// With fewer lines it is not shown. A panel with many fixed lines is cut in a column of this height.
    fn least(&self, room: u16) -> u16 {
        let least = match (self.rows.is_empty(), self.pinned) {
            (true, _) => 6,
            (_, 0) => self.fixed() + 2,
            // The others must find room, too.
            (_, pinned) => (self.fixed() + pinned.min(1 << 14) as u16).min((room * 3 / 10).max(5)),
        };
        least.min((room * 2 / 5).max(5)).min(self.height())
    }

    pub fn draw(&self, frame: &mut Frame, area: Rect) {
        let (edge, lines, title) = match self.has_focus {
            true => (theme::ACCENT, BorderType::Thick, theme::ACCENT.patch(theme::STRONG)),
            false => (theme::DIM, BorderType::Plain, theme::STRONG),
        };
        let visible = usize::from(area.height.saturating_sub(self.fixed()));
        // With the focus one row scrolls in any case.
        let pinned = self.pinned.min(visible.saturating_sub(self.has_focus.into()));
        // The selected row is near the middle, and no line is empty.
        let first = self.selected.saturating_sub((visible - pinned) / 2).max(pinned);
        let first = match visible - pinned {
            0 => pinned,
            _ => first.min(pinned + self.rows.len().saturating_sub(visible)),
        };
        let hidden = self.rows.len().saturating_sub(first + visible - pinned);
        let scrolled = self.rows.iter().skip(first).take(visible - pinned);
        let rows: Vec<Line> = self.rows.iter().take(pinned).chain(scrolled).cloned().collect();
        let selected = if self.selected < first {
            self.selected
        } else {
            self.selected - first + pinned
        };
        let mut block = Block::bordered()
            .border_style(edge)
            .border_type(lines)
            .title(Span::styled(format!(" {} ", self.title), title));
        let room = usize::from(area.width).saturating_sub(text::width(&self.title) + 7);
        let remark = text::fit(&self.remark, room);
        if !remark.is_empty() {
            block = block.title(Line::styled(format!(" {remark} "), theme::DIM).right_aligned());
        }
        if hidden > 0 {
            block = block.title_bottom(Line::from(format!(" {} more ", count(hidden as i64))).right_aligned());
        }
        let [head, place] = Layout::vertical([Constraint::Length(self.head.len() as u16), Constraint::Fill(1)])
            .areas(block.inner(area));
        frame.render_widget(block, area);
        frame.render_widget(Paragraph::new(self.head.clone()), head);
        let mut list = List::new(rows);
        if self.has_focus && !self.keeps_row_style {
            list = list.highlight_style(theme::SELECTED);
        }
        let mut at = ListState::default().with_selected(Some(selected));
        frame.render_stateful_widget(list, place, &mut at);
    }
}

/// Draws panels one below the other. If not all fit, the one with the focus is shown, then the others in order.
pub fn draw_column(frame: &mut Frame, area: Rect, panels: &[Panel]) {
    let heights = heights(panels, area.height);
    let areas = Layout::vertical(heights.iter().map(|height| Constraint::Length(*height))).split(area);
    for ((panel, area), height) in panels.iter().zip(areas.iter()).zip(heights) {
        if height > 0 {
            panel.draw(frame, *area);
        }
    }
}

/// The height of each panel, 0 for one that does not fit.
fn heights(panels: &[Panel], room: u16) -> Vec<u16> {
    let mut heights = vec![0; panels.len()];
    let mut left = room;
    // First the focused panel, which shows at least a few rows, then those with pinned rows, then in order, the minimum
    // of each, and last those that give way.
    let mut order: Vec<usize> = (0..panels.len()).collect();
    order.sort_by_key(|i| {
        let panel = &panels[*i];
        (!panel.has_focus, panel.pinned == 0, panel.gives_way)
    });
    for i in order {
        let least = panels[i].least(room);
        let least = match panels[i].has_focus {
            true => least.max((room * 2 / 5).min(panels[i].height())).min(left),
            false => least,
        };
        if least <= left {
            heights[i] = least;
            left -= least;
        }
    }
    // Then those without rows get all their lines; those with rows share the rest line by line, and keep what is over.
    for grows in [false, true] {
        let wishes =
            |i: &usize, height: u16| height > 0 && panels[*i].rows.is_empty() != grows && height < panels[*i].height();
        while let wishing = (0..panels.len())
            .filter(|i| wishes(i, heights[*i]))
            .take(left.into())
            .collect::<Vec<_>>()
            && !wishing.is_empty()
        {
            wishing.iter().for_each(|i| heights[*i] += 1);
            left -= wishing.len() as u16;
        }
    }
    if let Some(last) = (0..panels.len()).rfind(|i| heights[*i] > 0 && !panels[*i].rows.is_empty()) {
        heights[last] += left;
    }
    heights
}

/// The minimum number of columns of a value in a summary.
const VALUE: usize = 9;

/// A count that fits there: truncated digits would be another number.
pub fn total(n: i64) -> String {
    let exact = count(n);
    if exact.len() <= VALUE { exact } else { short(n) }
}

/// `name value    name value`, in two columns if there is room. True marks a value that is bad.
pub fn facts(facts: &[(&'static str, String, bool)], width: usize) -> Vec<Line<'static>> {
    const NAMES: usize = 11;
    let per_line = if facts.len() > 1 && width >= 2 * (NAMES + VALUE) + 2 {
        2
    } else {
        1
    };
    let column = (width + 2) / per_line - 2;
    let rows = facts.len().div_ceil(per_line);
    let fact = |(name, value, is_bad): &(&'static str, String, bool)| {
        let style = if *is_bad { theme::BAD } else { Style::new() };
        let value = text::left(&text::harmless(value), (column + 2).saturating_sub(NAMES));
        [
            Span::styled(text::left(name, NAMES), theme::DIM),
            Span::styled(value, style),
        ]
    };
    let line = |row: usize| facts.iter().skip(row).step_by(rows).flat_map(fact).collect();
    (0..rows).map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn panel(head: usize, rows: usize, has_focus: bool) -> Panel {
        Panel {
            head: vec![Line::raw("head"); head],
            rows: vec![Line::raw("row"); rows],
            has_focus,
            ..Panel::default()
        }
    }

    #[test]
    fn the_height_is_shared_completely() {
        let panels = [panel(6, 0, false), panel(1, 30, false), panel(1, 2, true)];
        assert_eq!(heights(&panels, 60), [8, 33, 19]);
        assert_eq!(heights(&panels, 30), [8, 17, 5]);
        assert_eq!(heights(&panels, 18), [8, 5, 5]);
    }

    #[test]
    fn if_not_all_panels_fit_the_focused_one_stays() {
        let panels = [panel(6, 0, false), panel(1, 30, false), panel(1, 30, true)];
        assert_eq!(heights(&panels, 11), [6, 0, 5]);
        assert_eq!(heights(&panels, 7), [0, 0, 7]);
        assert_eq!(heights(&panels, 2), [0, 0, 2]);
        assert_eq!(heights(&panels, 0), [0, 0, 0]);
    }

    #[test]
    fn the_selected_row_and_the_pinned_rows_are_among_those_shown() {
        for (selected, pinned) in [0, 2, 50, 99]
            .into_iter()
            .flat_map(|selected| [(selected, 0), (selected, 3)])
        {
            let rows = (0..100).map(|n| Line::raw(format!("row {n}"))).collect();
            let panel = Panel {
                rows,
                selected,
                pinned,
                has_focus: true,
                ..Panel::default()
            };
            let buffer = crate::screen::fixture::buffer(20, 12, |frame| panel.draw(frame, frame.area()));
            let shown = crate::screen::frame::as_text(&buffer);
            for row in (0..pinned).chain([selected]) {
                assert!(shown.contains(&format!("┃row {row} ")), "{shown}");
            }
            assert_eq!(shown.matches("row ").count(), 10, "no line is empty");
            let marked = buffer
                .content
                .chunks(20)
                .find(|line| line[1].modifier.contains(theme::SELECTED.add_modifier));
            let marked: String = marked.expect("a marked row").iter().map(|cell| cell.symbol()).collect();
            assert!(marked.contains(&format!("row {selected} ")), "{marked}");
        }
    }

    #[test]
    fn pinned_rows_come_before_the_other_panels() {
        let pinned = Panel {
            pinned: 2,
            ..panel(1, 30, false)
        };
        let panels = [panel(6, 0, false), panel(1, 30, false), pinned, panel(1, 30, true)];
        assert_eq!(heights(&panels, 20), [7, 0, 5, 8]);
        assert_eq!(heights(&panels, 12), [0, 0, 6, 6]);
    }
}
