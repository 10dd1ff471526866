//! Bars with a resolution of an eighth of a character.

use ratatui::style::Style;
use ratatui::text::Line;

const EIGHTHS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// A series over at most this many columns. With few values each is drawn as wide as possible; with many, `together`
/// combines the values of a column.
pub fn spread<T: Copy>(values: &[T], columns: usize, together: impl Fn(&[T]) -> T) -> Vec<T> {
    const WIDE_MAX: usize = 3;
    match values.len() {
        0 => Vec::new(),
        n if n <= columns => {
            let wide = (columns / n).min(WIDE_MAX);
            values
                .iter()
                .flat_map(|value| std::iter::repeat_n(*value, wide))
                .collect()
        }
        n => {
            let column = |c: usize| together(&values[c * n / columns..(c + 1) * n / columns]);
            (0..columns).map(column).collect()
        }
    }
}

/// Bars of this many lines. A value above zero is at least an eighth high.
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
    fn a_series_is_stretched_or_drawn_together_and_none_of_it_is_left_out() {
        let max = |values: &[i64]| values.iter().copied().max().unwrap_or(0);
        let spread = |columns: usize| super::spread(&[1, 2, 3, 4, 5], columns, max);
        assert_eq!(spread(5), [1, 2, 3, 4, 5]);
        assert_eq!(spread(11), [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]);
        assert_eq!(spread(4), [1, 2, 3, 5]);
        assert_eq!(spread(2), [2, 5]);
        assert_eq!(spread(1), [5]);
        assert!(spread(0).is_empty() && super::spread(&[], 10, max).is_empty());
    }
}
