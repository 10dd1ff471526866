//! Formats texts, numbers and times for every command. Pure functions.

use serde::Serialize;
use unicode_width::UnicodeWidthChar;

/// Text from outside in a form that is safe for a terminal: no control character, nothing that changes the direction of
/// writing, nothing invisible. Otherwise an escape sequence in an error text could move the cursor, or worse.
pub fn harmless(text: &str) -> String {
    const MARKS_MAX: u32 = 2; // marks on one letter; more of them are a column of ink, not a word
    let mut shown = String::with_capacity(text.len());
    let mut marks = 0;
    for c in text.chars() {
        let c = match c {
            '\t' | '\n' | '\r' => ' ',
            '\0'..='\u{1f}' => char::from_u32(0x2400 + c as u32).unwrap_or(UNSEEN), // ␛ for ESC
            '\u{7f}' => '␡',
            c if c.is_control() || is_unseen(c) => UNSEEN,
            c => c,
        };
        match c.width() {
            Some(0) => {
                marks += 1;
                if marks <= MARKS_MAX {
                    shown.push(c);
                }
            }
            _ => {
                marks = 0;
                shown.push(c);
            }
        }
    }
    shown
}

/// Stands for an invisible character. Not U+FFFD, which some terminals leave out.
const UNSEEN: char = '□';

/// Format characters: joiners, direction marks, line separators, variation selectors, tags.
fn is_unseen(c: char) -> bool {
    matches!(c,
        '\u{ad}' | '\u{61c}' | '\u{115f}' | '\u{1160}' | '\u{180b}'..='\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}'
        | '\u{2060}'..='\u{206f}' | '\u{3164}' | '\u{fe00}'..='\u{fe0f}' | '\u{feff}' | '\u{ffa0}' | '\u{fff9}'..='\u{fffb}'
        | '\u{e0000}'..='\u{e0fff}')
}

/// The document as one line of JSON. A terminal obeys DEL and the C1 controls, which JSON allows in a string: they are
/// escaped. JSON of others may have line feeds between its words: they are spaces.
pub fn json(document: &impl Serialize) -> String {
    let text = serde_json::to_string(document).expect("every map key is text");
    if !text.contains(char::is_control) {
        return text;
    }
    let shown = |c: char| match c {
        '\t' | '\n' | '\r' => " ".to_owned(),
        c if c.is_control() => format!("\\u{:04x}", u32::from(c)),
        c => c.to_string(),
    };
    text.chars().map(shown).collect()
}

/// A number with its digits in groups of three: 1234567 becomes `1,234,567`.
pub fn grouped(number: i64) -> String {
    let digits = number.unsigned_abs().to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    match number < 0 {
        true => format!("-{text}"),
        false => text,
    }
}

/// A duration in its two largest units, such as `1 h 23 min`; below 1 s in ms.
pub fn duration(seconds: f64) -> String {
    if seconds <= 0.0 {
        return "0 s".to_owned(); // the clocks of two hosts may differ
    }
    if seconds < 1.0 {
        return format!("{:.0} ms", (seconds * 1000.0).floor());
    }
    let whole = seconds as u64;
    let (days, hours, minutes) = (whole / 86_400, whole / 3600 % 24, whole / 60 % 60);
    let two = |large: u64, unit: &str, small: u64, small_unit: &str| match small {
        0 => format!("{large} {unit}"),
        _ => format!("{large} {unit} {small} {small_unit}"),
    };
    match whole {
        0..60 => format!("{whole} s"),
        60..3600 => two(minutes, "min", whole % 60, "s"),
        3600..86_400 => two(hours, "h", minutes, "min"),
        _ => two(days, "d", hours, "h"),
    }
}

/// A time from the server's JSON, without the `T` and the fraction: `2026-11-21 05:12:18+00`.
pub fn stamp(time: &str) -> String {
    let Some((day, clock)) = time.split_once('T') else {
        return time.to_owned();
    };
    let (seconds, rest) = clock.split_at(clock.len().min(8));
    let zone = rest.trim_start_matches(|c: char| c == '.' || c.is_ascii_digit());
    format!("{day} {seconds}{}", zone.strip_suffix(":00").unwrap_or(zone))
}

/// A text with its first letter as a capital.
pub fn capitalised(text: &str) -> String {
    let first = text.chars().next().map_or(0, char::len_utf8);
    text[..first].to_uppercase() + &text[first..]
}

/// A number with its noun: `1 message`, `2 messages`.
pub fn counted(number: i64, one: &str, many: &str) -> String {
    format!("{} {}", grouped(number), if number == 1 { one } else { many })
}

/// The date and time in UTC of `epoch` seconds since 1970: `2026-11-21 14:03:07`.
pub fn time(epoch: f64) -> String {
    let seconds = epoch.floor() as i64;
    let (year, month, day) = date(seconds.div_euclid(86_400));
    format!("{year:04}-{month:02}-{day:02} {}", clock(epoch))
}

/// The time of day in UTC of `epoch` seconds since 1970: `14:03:07`.
pub fn clock(epoch: f64) -> String {
    let of_day = (epoch.floor() as i64).rem_euclid(86_400);
    format!("{:02}:{:02}:{:02}", of_day / 3600, of_day / 60 % 60, of_day % 60)
}

/// The seconds since 1970 of a time in UTC from the server's JSON: `2026-11-21T05:12:18.297537+00:00`.
pub fn epoch(time: &str) -> Option<f64> {
    let number = |from: usize, to: usize| time.get(from..to)?.parse::<i64>().ok();
    let (year, month, day) = (number(0, 4)?, number(5, 7)?, number(8, 10)?);
    let of_day = number(11, 13)? * 3600 + number(14, 16)? * 60 + number(17, 19)?;
    Some((days(year, month, day) * 86_400 + of_day) as f64)
}

/// The day counted from 1970-01-01, the inverse of [`date`].
fn days(year: i64, month: i64, day: i64) -> i64 {
    let year = year - i64::from(month <= 2);
    let (era, of_era) = (year.div_euclid(400), year.rem_euclid(400));
    let of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    era * 146_097 + of_era * 365 + of_era / 4 - of_era / 100 + of_year - 719_468
}

/// Year, month and day of a day counted from 1970-01-01 (Howard Hinnant, "chrono-compatible low-level date
/// algorithms").
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

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn an_escape_sequence_becomes_visible() {
        assert_eq!(harmless("a\u{1b}[2Jb\u{7}"), "a␛[2Jb␇");
        assert_eq!(harmless("one\r\ntwo\tthree"), "one  two three");
        assert_eq!(harmless("\u{9b}31m\u{7f}\u{202e}x\u{200b}"), "□31m␡□x□");
        assert_eq!(harmless("e\u{301}\u{301}\u{301}\u{301}f"), "e\u{301}\u{301}f");
        assert_eq!(harmless("größer, 日本"), "größer, 日本");
    }

    #[test]
    fn json_is_one_line_without_control_characters() {
        let raw = serde_json::value::RawValue::from_string("{\"a\":\n1}".into()).unwrap();
        assert_eq!(
            json(&("\u{1b}[2J\u{7f}\u{9b}31mä", raw)),
            r#"["\u001b[2J\u007f\u009b31mä",{"a": 1}]"#
        );
    }

    proptest! {
        #[test]
        fn no_text_moves_a_cursor(text in "\\PC*|[\\x00-\\x{9f}\\x{2000}-\\x{2070}x]*") {
            prop_assert!(!harmless(&text).chars().any(|c| c.is_control() || is_unseen(c)));
        }
    }

    #[test]
    fn numbers_are_grouped_and_durations_have_two_units() {
        assert_eq!(
            [0, 999, 1000, 1_234_567].map(grouped),
            ["0", "999", "1,000", "1,234,567"]
        );
        assert_eq!(grouped(-1000), "-1,000");
        assert_eq!(
            [
                0.0, 0.25, 1.9, 59.9, 60.0, 61.0, 3600.0, 5000.0, 90_000.0, 86_400.0, -5.0
            ]
            .map(duration),
            [
                "0 s",
                "250 ms",
                "1 s",
                "59 s",
                "1 min",
                "1 min 1 s",
                "1 h",
                "1 h 23 min",
                "1 d 1 h",
                "1 d",
                "0 s"
            ]
        );
        assert_eq!(counted(1, "message", "messages"), "1 message");
        assert_eq!(counted(2000, "message", "messages"), "2,000 messages");
    }

    #[test]
    fn a_time_is_shown_to_the_second() {
        assert_eq!(stamp("2026-11-21T05:12:18.297537+00:00"), "2026-11-21 05:12:18+00");
        assert_eq!(stamp("2026-11-21T05:12:18-03:30"), "2026-11-21 05:12:18-03:30");
        assert_eq!(stamp("infinity"), "infinity");
    }

    #[test]
    fn times_are_utc() {
        assert_eq!(time(0.0), "1970-01-01 00:00:00");
        assert_eq!(time(951_825_599.9), "2000-02-29 11:59:59");
        assert_eq!(time(1_795_270_987.0), "2026-11-21 14:23:07");
        assert_eq!(time(-1.0), "1969-12-31 23:59:59");
    }

    proptest! {
        #[test]
        fn a_time_is_read_as_it_is_written(seconds in -62_000_000_000_i64..250_000_000_000) {
            let text = format!("{}.297537+00:00", time(seconds as f64).replace(' ', "T"));
            prop_assert_eq!(epoch(&text), Some(seconds as f64));
        }
    }

    #[test]
    fn what_is_no_time_is_not_read() {
        assert_eq!(epoch("infinity"), None);
        assert_eq!(epoch(""), None);
    }
}
