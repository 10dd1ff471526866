//! Bars of eighths of a character.

use ratatui::style::Style;
use ratatui::text::Line;

const EIGHTHS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// How a series is laid out in so many columns: each value as wide as all can be, or several together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scale {
    /// Columns of each value.
    Wide(usize),
    /// Values of each column.
    Many(usize),
}

impl Scale {
    pub fn of(values: usize, columns: usize) -> Self {
        match (values, columns) {
            (0, _) | (_, 0) => Self::Wide(1),
            (values, columns) if values <= columns => Self::Wide((columns / values).min(3)),
            (values, columns) => Self::Many(values.div_ceil(columns)),
        }
    }

    /// One value a column, the newest last; `together` makes one of those that share a column.
    pub fn spread<T: Copy>(self, values: &[T], together: impl Fn(&[T]) -> T) -> Vec<T> {
        match self {
            Self::Wide(columns) => {
                let wide = values.iter().flat_map(|value| std::iter::repeat_n(*value, columns));
                wide.collect()
            }
            // Counted from the end, so that the newest column is full and the oldest may be short.
            Self::Many(n) => values.rchunks(n).rev().map(together).collect(),
        }
    }
}

/// Bars so many lines high. What is more than nothing is seen as an eighth at least.
pub fn bars(values: &[f64], height: usize, style: Style) -> Vec<Line<'static>> {
    let peak = values.iter().copied().fold(0.0, f64::max);
    let steps = height * 8;
    let level = |value: f64| match value > 0.0 {
        true => ((value / peak * steps as f64).round() as usize).clamp(1, steps),
        false => 0,
    };
    let line = |row: usize| {
        let below = (height - 1 - row) * 8;
        let text: String = values
            .iter()
            .map(|value| EIGHTHS[level(*value).saturating_sub(below).min(8)])
            .collect();
        Line::styled(text, style)
    };
    (0..height).map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drawn(values: &[f64], height: usize) -> Vec<String> {
        let lines = bars(values, height, Style::new());
        lines.iter().map(Line::to_string).collect()
    }

    #[test]
    fn the_highest_bar_fills_and_the_least_is_seen() {
        assert_eq!(drawn(&[0.0, 1.0, 50.0, 100.0], 1), [" ▁▄█"]);
        assert_eq!(drawn(&[0.0, 1.0, 50.0, 100.0], 2), ["   █", " ▁██"]);
        assert_eq!(drawn(&[0.0, 0.0], 2), ["  ", "  "]);
        assert!(drawn(&[1.0], 0).is_empty());
    }

    #[test]
    fn a_series_is_stretched_or_drawn_together_from_the_newest_on() {
        let sum = |values: &[i64]| values.iter().sum();
        let spread = |columns: usize| Scale::of(5, columns).spread(&[1, 2, 3, 4, 5], sum);
        assert_eq!(spread(5), [1, 2, 3, 4, 5]);
        assert_eq!(spread(11), [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]);
        assert_eq!(spread(4), [1, 5, 9]);
        assert_eq!(spread(1), [15]);
        assert!(Scale::of(0, 10).spread(&[], sum).is_empty());
    }
}
