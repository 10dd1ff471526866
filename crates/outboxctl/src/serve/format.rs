//! The form of numbers, times and texts on the pages.

use crate::format::duration;
pub use crate::format::{clock, grouped as count, time};
use std::fmt::Write;

/// A count, or a dash if it is unknown.
pub fn maybe_count(n: Option<i64>) -> String {
    n.map_or_else(|| "–".to_owned(), count)
}

/// A count that stopped at `cap`.
pub fn capped(n: i64, cap: i64) -> String {
    match n {
        n if n < cap => count(n),
        _ if cap >= 1000 && cap % 1000 == 0 => format!("{}k+", count(cap / 1000)),
        _ => format!("{}+", count(cap)),
    }
}

/// A duration in its two largest units: `3 min 20 s`.
pub fn span(seconds: f64) -> String {
    match seconds > 0.0 {
        true => duration(seconds),
        false => "0 s".to_owned(),
    }
}

pub fn maybe_span(seconds: Option<f64>) -> String {
    seconds.map_or_else(|| "–".to_owned(), span)
}

/// Milliseconds, with the significant digits.
pub fn millis(ms: Option<f64>) -> String {
    match ms {
        None => "–".to_owned(),
        Some(ms) if ms < 10.0 => format!("{ms:.1} ms"),
        Some(ms) if ms < 1000.0 => format!("{ms:.0} ms"),
        Some(ms) if ms < 60_000.0 => format!("{:.1} s", ms / 1000.0),
        Some(ms) => span(ms / 1000.0),
    }
}

/// A rate: one decimal if it is small.
pub fn rate(n: Option<f64>) -> String {
    match n {
        None => "–".to_owned(),
        Some(0.0) => "0".to_owned(),
        Some(n) if n < 10.0 => format!("{n:.1}"),
        Some(n) => count(n.round() as i64),
    }
}

/// For a part of a URL: a character other than a letter, a digit or one of `-_.~` becomes `%XX`.
pub fn encode(text: &str) -> String {
    text.bytes().fold(String::new(), |mut out, byte| {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => out.push(byte.into()),
            _ => write!(out, "%{byte:02X}").expect("write to a string"),
        }
        out
    })
}

/// The address of the page of a message.
pub fn message_path(seq: i64, destination: &str) -> String {
    format!("/message/{seq}?destination={}", encode(destination))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_grouped_and_capped() {
        assert_eq!(count(0), "0");
        assert_eq!(count(999), "999");
        assert_eq!(count(-1_234_567), "-1,234,567");
        assert_eq!(capped(999, 1000), "999");
        assert_eq!(capped(1000, 1000), "1k+");
        assert_eq!(capped(250, 100), "100+");
        assert_eq!(maybe_count(None), "–");
    }

    #[test]
    fn spans_have_two_units() {
        let spans = [
            (0.0, "0 s"),
            (0.25, "250 ms"),
            (59.9, "59 s"),
            (60.0, "1 min"),
            (200.0, "3 min 20 s"),
            (90_000.0, "1 d 1 h"),
            (-3.0, "0 s"),
        ];
        for (seconds, text) in spans {
            assert_eq!(span(seconds), text);
        }
        assert_eq!(millis(Some(2.345)), "2.3 ms");
        assert_eq!(millis(Some(1500.0)), "1.5 s");
    }

    #[test]
    fn reserved_characters_of_a_url_are_encoded() {
        assert_eq!(encode("a b&c=ü/"), "a%20b%26c%3D%C3%BC%2F");
    }
}
