//! Panels: a frame with a title, fixed lines, and as many rows as fit. Stacked panels share the height of a column.

use super::text;
use super::theme::Theme;
use ratatui::Frame;
use ratatui::layout::Rect;
use ratatui::style::Style;
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, BorderType, Paragraph};

/// The content of a panel for one width.
#[derive(Clone, Debug, Default)]
pub struct Panel {
    pub title: String,
    /// At the right of the upper border.
    pub remark: String,
    /// Fixed lines.
    pub head: Vec<Line<'static>>,
    /// Rows that scroll with the selected one.
    pub rows: Vec<Line<'static>>,
    pub selected: Option<usize>,
    /// It receives the keys.
    pub has_focus: bool,
    /// The selection is within a row, and the row draws it.
    pub keeps_row_style: bool,
    /// Whether it takes the height that is left over.
    pub grows: bool,
}

/// Lines, or columns, of the borders.
pub const EDGES: u16 = 2;
/// A panel with fewer lines is not shown.
const LEAST: u16 = EDGES + 3;

impl Panel {
    /// Lines and borders.
    pub fn height(&self) -> u16 {
        u16::try_from(self.head.len() + self.rows.len())
            .unwrap_or(u16::MAX - EDGES)
            .saturating_add(EDGES)
    }

    fn least(&self) -> u16 {
        let head = u16::try_from(self.head.len()).unwrap_or(u16::MAX - LEAST);
        match self.rows.is_empty() {
            true => self.height().min(LEAST + 1),
            false => (head + EDGES + 2).max(LEAST),
        }
        .min(self.height())
    }

    pub fn draw(&self, frame: &mut Frame, area: Rect, theme: Theme) {
        if area.width < 3 || area.height < 3 {
            return;
        }
        let (edge, lines, title_style) = match self.has_focus {
            true => (theme.accent(), BorderType::Thick, theme.accent().patch(theme.strong())),
            false => (theme.dim(), BorderType::Plain, theme.strong()),
        };
        let room = usize::from(area.width).saturating_sub(4);
        let title = format!(" {} ", text::fit(&self.title, room));
        let left = room.saturating_sub(text::width(&title));
        let mut block = Block::bordered()
            .border_style(edge)
            .border_type(lines)
            .title(Span::styled(title, title_style));
        if !self.remark.is_empty() && left > 4 {
            let remark = format!(" {} ", text::fit(&self.remark, left - 2));
            block = block.title(Line::styled(remark, theme.dim()).right_aligned());
        }
        let inside = block.inner(area);
        frame.render_widget(block, area);

        let height = usize::from(inside.height);
        let head = self.head.len().min(height);
        let visible = height - head;
        let first = first_row(self.rows.len(), visible, self.selected.unwrap_or(0));
        let rows = self.rows.iter().enumerate().skip(first).take(visible).map(|(i, row)| {
            match self.has_focus && !self.keeps_row_style && self.selected == Some(i) {
                true => filled(row.clone(), inside.width).style(theme.selected()),
                false => row.clone(),
            }
        });
        let lines: Vec<Line> = self.head.iter().take(head).cloned().chain(rows).collect();
        frame.render_widget(Paragraph::new(lines), inside);
        let hidden = self.rows.len().saturating_sub(first + visible);
        if hidden > 0 && area.width > 16 {
            let more = format!(" {} more ", text::count(hidden as i64));
            let x = area.right() - 1 - u16::try_from(text::width(&more)).unwrap_or(0).min(area.width - 2);
            frame
                .buffer_mut()
                .set_stringn(x, area.bottom() - 1, &more, usize::from(area.width), edge);
        }
    }
}

/// The whole width, so that a selected row is one bar.
fn filled(mut line: Line<'static>, width: u16) -> Line<'static> {
    let gap = usize::from(width).saturating_sub(line.width());
    line.push_span(Span::styled(" ".repeat(gap), Style::new()));
    line
}

/// The first row to show, so that the selected one is near the middle and no line is empty.
fn first_row(rows: usize, visible: usize, selected: usize) -> usize {
    let middle = selected.saturating_sub(visible / 2);
    middle.min(rows.saturating_sub(visible))
}

/// Draws panels one below the other. If not all fit, the one with the focus is shown, then the others in order.
pub fn draw_stack(frame: &mut Frame, area: Rect, panels: &[Panel], theme: Theme) {
    let mut y = area.y;
    for (panel, height) in panels.iter().zip(heights(panels, area.height)) {
        if height > 0 {
            panel.draw(frame, Rect::new(area.x, y, area.width, height), theme);
            y += height;
        }
    }
}

/// The height of each panel, 0 for one that does not fit.
fn heights(panels: &[Panel], room: u16) -> Vec<u16> {
    let mut heights = vec![0; panels.len()];
    let mut left = room;
    // First the focused panel, then in order, the minimum of each.
    let mut order: Vec<usize> = (0..panels.len()).collect();
    order.sort_by_key(|i| !panels[*i].has_focus);
    for i in order {
        // A list with the focus shows at least a few rows.
        let least = match panels[i].has_focus {
            true => panels[i].least().max((room * 2 / 5).min(panels[i].height())),
            false => panels[i].least(),
        };
        if least <= left {
            heights[i] = least;
            left -= least;
        } else if panels[i].has_focus {
            heights[i] = left;
            left = 0;
        }
    }
    // Then the preferred heights: those of fixed size before those that grow, which share line by line.
    for grows in [false, true] {
        loop {
            let wishing: Vec<usize> = (0..panels.len())
                .filter(|i| heights[*i] > 0 && panels[*i].grows == grows && heights[*i] < panels[*i].height())
                .take(usize::from(left))
                .collect();
            if wishing.is_empty() {
                break;
            }
            wishing.iter().for_each(|i| heights[*i] += 1);
            left -= u16::try_from(wishing.len()).unwrap_or(left);
        }
    }
    // The rest goes to panels that can use it later, the last first.
    let growing: Vec<usize> = (0..panels.len())
        .filter(|i| heights[*i] > 0 && panels[*i].grows)
        .collect();
    if let Some(n) = u16::try_from(growing.len()).ok().filter(|n| *n > 0) {
        growing.iter().for_each(|i| heights[*i] += left / n);
        heights[growing[growing.len() - 1]] += left % n;
    }
    heights
}

#[cfg(test)]
mod tests {
    use super::*;

    fn panel(head: usize, rows: usize, grows: bool, has_focus: bool) -> Panel {
        Panel {
            head: vec![Line::raw("head"); head],
            rows: vec![Line::raw("row"); rows],
            grows,
            has_focus,
            ..Panel::default()
        }
    }

    #[test]
    fn the_height_is_shared_completely() {
        let panels = [
            panel(6, 0, false, false),
            panel(1, 30, true, false),
            panel(1, 2, true, true),
        ];
        assert_eq!(heights(&panels, 60), [8, 40, 12]);
        assert_eq!(heights(&panels, 30), [8, 17, 5]);
        assert_eq!(heights(&panels, 18), [8, 5, 5]);
    }

    #[test]
    fn if_not_all_panels_fit_the_focused_one_stays() {
        let panels = [
            panel(6, 0, false, false),
            panel(1, 30, true, false),
            panel(1, 30, true, true),
        ];
        assert_eq!(heights(&panels, 11), [6, 0, 5]);
        assert_eq!(heights(&panels, 7), [0, 0, 7]);
        assert_eq!(heights(&panels, 2), [0, 0, 2]);
        assert_eq!(heights(&panels, 0), [0, 0, 0]);
    }

    #[test]
    fn the_selected_row_is_among_those_shown() {
        assert_eq!(first_row(100, 10, 0), 0);
        assert_eq!(first_row(100, 10, 50), 45);
        assert_eq!(first_row(100, 10, 99), 90);
        assert_eq!(first_row(5, 10, 4), 0);
    }
}
