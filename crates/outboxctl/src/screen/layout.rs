//! The layout of a screen: lines at the top, keys at the bottom, and between them one page, or columns of panels.

use super::panel::{EDGES, Panel, draw_stack};
use super::theme::Theme;
use ratatui::Frame;
use ratatui::layout::Rect;
use ratatui::text::Line;
use ratatui::widgets::Paragraph;

/// From this width on there are two columns.
pub const TWO_COLUMNS: u16 = 90;

/// Below this height the bars are lower.
pub const LOW: u16 = 30;

/// The part between the top and the bottom.
pub enum Body {
    Page {
        title: String,
        lines: Vec<Line<'static>>,
        scroll: usize,
    },
    /// Side by side.
    Columns(Vec<Stack>),
}

/// Panels one below the other.
pub struct Stack {
    width: u16,
    panels: Vec<Panel>,
}

impl Stack {
    /// `panel` makes each panel for the width inside its borders.
    pub fn new<W: Copy>(width: u16, which: &[W], panel: impl Fn(W, usize) -> Panel) -> Self {
        let inside = usize::from(width.saturating_sub(EDGES));
        Self {
            width,
            panels: which.iter().map(|which| panel(*which, inside)).collect(),
        }
    }

    /// The number of lines that shows all of it.
    pub fn height(&self) -> u16 {
        self.panels.iter().map(Panel::height).fold(0, u16::saturating_add)
    }
}

/// `body` makes the part that fits into the remaining area.
pub fn draw(
    frame: &mut Frame,
    top: Vec<Line<'static>>,
    bottom: Line<'static>,
    theme: Theme,
    body: impl FnOnce(Rect) -> Body,
) {
    let area = frame.area();
    let head = u16::try_from(top.len()).unwrap_or(1).min(area.height);
    let foot = u16::from(area.height > head);
    let place = |y: u16, height: u16| Rect::new(area.x, area.y + y, area.width, height);
    frame.render_widget(Paragraph::new(top), place(0, head));
    frame.render_widget(Paragraph::new(bottom), place(area.height - foot, foot));
    let area = place(head, area.height - head - foot);
    match body(area) {
        Body::Page { title, lines, scroll } => page(title, lines, scroll, area).draw(frame, area, theme),
        Body::Columns(columns) => {
            let mut x = area.x;
            for Stack { width, panels } in columns {
                draw_stack(frame, Rect::new(x, area.y, width, area.height), &panels, theme);
                x += width;
            }
        }
    }
}

fn page(title: String, lines: Vec<Line<'static>>, scroll: usize, area: Rect) -> Panel {
    let visible = usize::from(area.height.saturating_sub(EDGES));
    let scroll = scroll.min(lines.len().saturating_sub(visible));
    Panel {
        title,
        remark: "Esc goes back".into(),
        rows: lines.into_iter().skip(scroll).collect(),
        has_focus: true,
        ..Panel::default()
    }
}
