//! How figures, times and texts are written on the pages.

use crate::output::duration;
pub use crate::output::grouped as count;
use std::fmt::Write;

/// A count, or a dash where nobody counts.
pub fn maybe_count(n: Option<i64>) -> String {
    n.map_or_else(|| "–".to_owned(), count)
}

/// A count that was not taken further than `cap`.
pub fn capped(n: i64, cap: i64) -> String {
    match n {
        n if n < cap => count(n),
        _ if cap >= 1000 && cap % 1000 == 0 => format!("{}k+", count(cap / 1000)),
        _ => format!("{}+", count(cap)),
    }
}

/// A span of time in its two largest units: `3 min 20 s`.
pub fn span(seconds: f64) -> String {
    match seconds > 0.0 {
        true => duration(seconds),
        false => "0 s".to_owned(),
    }
}

pub fn maybe_span(seconds: Option<f64>) -> String {
    seconds.map_or_else(|| "–".to_owned(), span)
}

/// Milliseconds, with as many digits as say something.
pub fn millis(ms: Option<f64>) -> String {
    match ms {
        None => "–".to_owned(),
        Some(ms) if ms < 10.0 => format!("{ms:.1} ms"),
        Some(ms) if ms < 1000.0 => format!("{ms:.0} ms"),
        Some(ms) if ms < 60_000.0 => format!("{:.1} s", ms / 1000.0),
        Some(ms) => span(ms / 1000.0),
    }
}

/// A rate: one digit after the point where it is small.
pub fn rate(n: Option<f64>) -> String {
    match n {
        None => "–".to_owned(),
        Some(0.0) => "0".to_owned(),
        Some(n) if n < 10.0 => format!("{n:.1}"),
        Some(n) => count(n.round() as i64),
    }
}

/// `2026-11-21 14:03:07`, in UTC.
pub fn time(epoch: f64) -> String {
    let seconds = epoch.floor() as i64;
    let (year, month, day) = date(seconds.div_euclid(86_400));
    format!("{year:04}-{month:02}-{day:02} {}", clock(epoch))
}

/// `14:03:07`, in UTC.
pub fn clock(epoch: f64) -> String {
    let of_day = (epoch.floor() as i64).rem_euclid(86_400);
    format!("{:02}:{:02}:{:02}", of_day / 3600, of_day / 60 % 60, of_day % 60)
}

/// Year, month and day of a day counted from 1970-01-01 (Howard Hinnant, "chrono-compatible low-level date algorithms").
fn date(days: i64) -> (i64, i64, i64) {
    let shifted = days + 719_468;
    let era = shifted.div_euclid(146_097);
    let of_era = shifted.rem_euclid(146_097);
    let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * of_year + 2) / 153;
    let day = of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 {
        month_from_march + 3
    } else {
        month_from_march - 9
    };
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    (year, month, day)
}

/// For a part of a URL: what is not a letter, a digit or one of `-_.~` becomes `%XX`.
pub fn encode(text: &str) -> String {
    text.bytes().fold(String::new(), |mut out, byte| {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => out.push(byte.into()),
            _ => write!(out, "%{byte:02X}").expect("write to a string"),
        }
        out
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_grouped_and_capped() {
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
    fn times_are_utc() {
        assert_eq!(time(0.0), "1970-01-01 00:00:00");
        assert_eq!(time(951_825_599.9), "2000-02-29 11:59:59");
        assert_eq!(time(1_795_270_987.0), "2026-11-21 14:23:07");
        assert_eq!(time(-1.0), "1969-12-31 23:59:59");
    }

    #[test]
    fn what_a_url_keeps_for_itself_is_encoded() {
        assert_eq!(encode("a b&c=ü/"), "a%20b%26c%3D%C3%BC%2F");
    }
}
