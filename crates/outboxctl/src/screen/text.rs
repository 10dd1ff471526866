//! Words and numbers as they are shown: truncated to a width, with their unit.

pub use crate::format::{grouped as count, harmless};
use unicode_width::UnicodeWidthChar;

/// The columns that a text occupies.
pub fn width(text: &str) -> usize {
    text.chars().map(|c| c.width().unwrap_or(0)).sum()
}

/// The text if it fits, otherwise its beginning and an ellipsis.
pub fn fit(text: &str, columns: usize) -> String {
    if width(text) <= columns {
        return text.to_owned();
    }
    let mut cut = String::new();
    let mut used = 1; // the ellipsis
    for c in text.chars() {
        used += c.width().unwrap_or(0);
        if used > columns {
            break;
        }
        cut.push(c);
    }
    if columns > 0 {
        cut.push('…');
    }
    cut
}

/// Truncated and padded to exactly this many columns.
pub fn left(text: &str, columns: usize) -> String {
    let text = fit(text, columns);
    let gap = columns.saturating_sub(width(&text));
    text + &" ".repeat(gap)
}

/// Broken into lines of at most this many columns, at spaces if there are any.
pub fn wrapped(text: &str, columns: usize) -> Vec<String> {
    let columns = columns.max(1);
    let words = text.trim_start_matches(' ');
    let mut lines = Vec::new();
    // The first line keeps its indentation: JSON is read by it.
    let mut line = " ".repeat((text.len() - words.len()).min(columns / 2));
    for word in words.split(' ') {
        let gap = usize::from(!line.trim_start().is_empty());
        if width(&line) + gap + width(word) <= columns {
            if gap > 0 {
                line.push(' ');
            }
            line.push_str(word);
            continue;
        }
        if gap > 0 {
            lines.push(std::mem::take(&mut line));
        }
        for c in word.chars() {
            if !line.is_empty() && width(&line) + c.width().unwrap_or(0) > columns {
                lines.push(std::mem::take(&mut line));
            }
            line.push(c);
        }
    }
    lines.push(line);
    lines
}

/// `1,234` or `12.3 M`: at most seven columns wide.
pub fn short(n: i64) -> String {
    let value = n as f64;
    match n.unsigned_abs() {
        0..=99_999 => count(n),
        100_000..=999_499 => format!("{:.0} k", value / 1e3),
        999_500..=999_499_999 => format!("{:.1} M", value / 1e6),
        _ => format!("{:.1} G", value / 1e9),
    }
}

/// A number, or a dash if it is unknown.
pub fn known<T>(value: Option<T>, show: impl Fn(T) -> String) -> String {
    value.map_or_else(|| "–".into(), show)
}

/// A duration in its largest fitting unit: `4.2 s`, `95 s`, `12 min`, `5 h`, `3 d`.
pub fn age(s: f64) -> String {
    let s = s.max(0.0);
    if s < 9.95 {
        format!("{s:.1} s")
    } else if s < 120.0 {
        format!("{s:.0} s")
    } else if s < 7_200.0 {
        format!("{:.0} min", s / 60.0)
    } else if s < 172_800.0 {
        format!("{:.0} h", s / 3600.0)
    } else {
        format!("{:.0} d", s / 86_400.0)
    }
}

/// `3.2 ms`, `321 ms`, `12.3 s`
pub fn ms(ms: f64) -> String {
    if ms < 99.95 {
        format!("{ms:.1} ms")
    } else if ms < 9_999.5 {
        format!("{ms:.0} ms")
    } else {
        format!("{:.1} s", ms / 1e3)
    }
}

/// `12.5`, `1,234`
pub fn rate(per_s: f64) -> String {
    match per_s < 999.95 {
        true => format!("{:.1}", per_s + 0.0), // not -0.0
        false => count(per_s.round() as i64),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn wide_characters_are_cut_by_the_columns_they_take() {
        assert_eq!(fit("日本語", 6), "日本語");
        assert_eq!(fit("日本語", 5), "日本…");
        assert_eq!(fit("日本語", 4), "日…");
        assert_eq!(left("日本語", 4), "日… ");
        assert_eq!(fit("abc", 0), "");
        assert_eq!(wrapped("a 日本語 b", 4), ["a", "日本", "語 b"]);
        assert_eq!(wrapped("  a bc d", 5), ["  a", "bc d"]);
    }

    #[test]
    fn numbers_have_their_unit() {
        assert_eq!(
            [count(0), count(999), count(1000), count(-1_234_567)],
            ["0", "999", "1,000", "-1,234,567"]
        );
        assert_eq!(
            [short(99_999), short(100_000), short(5_000_000), short(7_000_000_000)],
            ["99,999", "100 k", "5.0 M", "7.0 G"]
        );
        assert_eq!(
            [age(0.04), age(9.96), age(119.0), age(121.0), age(7300.0), age(1e6)],
            ["0.0 s", "10 s", "119 s", "2 min", "2 h", "12 d"]
        );
        assert_eq!([ms(3.21), ms(321.4), ms(12_300.0)], ["3.2 ms", "321 ms", "12.3 s"]);
        assert_eq!([rate(-0.0), rate(12.5), rate(12_345.6)], ["0.0", "12.5", "12,346"]);
        assert_eq!(known(None::<i64>, count), "–");
    }

    proptest! {
        #[test]
        fn a_text_that_is_cut_fits(text in "\\PC*", columns in 0_usize..40) {
            let text = harmless(&text);
            prop_assert!(width(&fit(&text, columns)) <= columns);
            prop_assert_eq!(width(&left(&text, columns)), columns);
            prop_assert!(wrapped(&text, columns.max(2)).iter().all(|line| width(line) <= columns.max(2)));
        }
    }
}
