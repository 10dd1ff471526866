//! Interprets an answer: has the message arrived, is the message at fault, or is the destination in trouble? Pure;
//! called on the request threads.

use super::findings::{ENDPOINT_REFUSED, THROTTLED, UNAVAILABLE};
use crate::Outcome;
use crate::down::{DownReason, Fault};
use std::time::{Duration, SystemTime};
use ureq::http::StatusCode;

/// The most characters of a text about an answer.
pub(crate) const TEXT_CHARS_MAX: usize = 200;
/// The longest pause that counts.
const AFTER_MAX: Duration = Duration::from_secs(86_400);

/// The result of one message.
#[derive(Clone, Debug)]
pub(crate) enum Verdict {
    Confirmed,
    /// The message is at fault, whether or not it was sent.
    Message(Outcome),
    /// The message can never be sent, and was not sent. Says nothing about the destination.
    Unsendable(String),
    /// The destination is at fault; other messages would fail as well.
    Destination(Trouble),
}

/// A failure of the destination.
#[derive(Clone, Debug)]
pub(crate) struct Trouble {
    pub(crate) fault: Fault,
    pub(crate) retry_after: Option<Duration>,
    /// Whether the destination failed on this message, so that it may be the cause.
    pub(crate) is_answer: bool,
}

impl Trouble {
    /// The destination has failed before the message was sent.
    pub(crate) fn unsent(fault: Fault) -> Self {
        Self {
            fault: fault.detailed(clean),
            retry_after: None,
            is_answer: false,
        }
    }
}

impl Verdict {
    /// The verdict for a status. `excerpt` is the start of the body, without secrets.
    pub(crate) fn of_status(status: StatusCode, excerpt: &str, retry_after: Option<Duration>) -> Self {
        let mut text = format!("HTTP {}", status.as_u16());
        for more in [status.canonical_reason().unwrap_or_default(), excerpt] {
            if !more.is_empty() {
                text.push_str(if text.len() > 8 { ": " } else { " " });
                text.push_str(more);
            }
        }
        let reason = clean(&text);
        let trouble = match status.as_u16() {
            200..=299 => return Self::Confirmed,
            400 | 413 | 414 | 415 | 422 | 431 => return Self::Message(Outcome::Refused { reason }),
            401 | 403 | 407 => DownReason::AUTH_REFUSED,
            300..=399 | 404 | 405 | 410 => ENDPOINT_REFUSED,
            429 => THROTTLED,
            502..=504 => UNAVAILABLE,
            400..=599 => return Self::Message(Outcome::Failed { reason }),
            _ => DownReason::PROTOCOL,
        };
        Self::Destination(Trouble {
            is_answer: true,
            fault: Fault::new(trouble, reason),
            retry_after,
        })
    }
}

/// The status in the first bytes of an answer, once its line has arrived. Answers before the final one (1xx) are skipped.
pub(crate) fn status_of(mut bytes: &[u8]) -> Option<StatusCode> {
    loop {
        let line = &bytes[..bytes.iter().position(|byte| *byte == b'\n')?];
        let (version, rest) = line.split_at_checked(9)?;
        let (code, reason) = rest.split_at_checked(3)?;
        let is_status_line =
            matches!(version, b"HTTP/1.0 " | b"HTTP/1.1 ") && matches!(reason, [] | [b' ' | b'\r', ..]);
        let status = StatusCode::from_bytes(code).ok().filter(|_| is_status_line)?;
        if !status.is_informational() {
            return Some(status);
        }
        let head = bytes.windows(4).position(|end| end == b"\r\n\r\n")?;
        bytes = &bytes[head + 4..];
    }
}

/// Makes `text` one short line, without characters that could forge a line in a log.
pub(crate) fn clean(text: &str) -> String {
    let mut line: String = text
        .chars()
        .map(|c| if c.is_control() || is_invisible(c) { ' ' } else { c })
        .take(TEXT_CHARS_MAX + 1)
        .collect();
    if line.chars().count() > TEXT_CHARS_MAX {
        line = line.chars().take(TEXT_CHARS_MAX - 1).collect();
        line.push('…');
    }
    line
}

/// Line and paragraph separators, and characters that change the direction of the text around them.
fn is_invisible(c: char) -> bool {
    matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{feff}')
}

/// Parses the value of `Retry-After`: seconds, or a date in one of HTTP's three forms.
pub(crate) fn retry_after(value: &str, now: SystemTime) -> Option<Duration> {
    let value = value.trim();
    let (whole, fraction) = value.split_once('.').unwrap_or((value, "0"));
    let is_number = |digits: &str| !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit());
    let after = if is_number(whole) && is_number(fraction) {
        // A number with too many digits means a long time, too. Some receivers send fractions.
        let begun = u64::from(fraction.bytes().any(|b| b != b'0'));
        Duration::from_secs(whole.parse().unwrap_or(u64::MAX).saturating_add(begun))
    } else {
        let date = httpdate::parse_http_date(value).ok()?;
        date.duration_since(now).unwrap_or_default()
    };
    Some(after.min(AFTER_MAX))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::time::UNIX_EPOCH;

    fn verdict(status: u16) -> String {
        match Verdict::of_status(StatusCode::from_u16(status).unwrap(), "", None) {
            Verdict::Confirmed => "confirmed".into(),
            Verdict::Message(Outcome::Refused { .. }) => "refused".into(),
            Verdict::Message(Outcome::Failed { .. }) => "failed".into(),
            Verdict::Destination(trouble) => trouble.fault.reason.name().into(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn each_status_has_one_meaning() {
        for status in 100..1000 {
            let expected = match status {
                200..=299 => "confirmed",
                400 | 413 | 414 | 415 | 422 | 431 => "refused",
                401 | 403 | 407 => "auth_refused",
                404 | 405 | 410 => "endpoint_refused",
                429 => "throttled",
                502..=504 => "unavailable",
                300..=399 => "endpoint_refused",
                400..=599 => "failed",
                _ => "protocol",
            };
            assert_eq!(verdict(status), expected, "{status}");
        }
    }

    #[test]
    fn the_text_contains_the_status_and_the_start_of_the_body() {
        let text = |excerpt| match Verdict::of_status(StatusCode::UNPROCESSABLE_ENTITY, excerpt, None) {
            Verdict::Message(Outcome::Refused { reason }) => reason,
            other => panic!("{other:?}"),
        };
        assert_eq!(text(""), "HTTP 422 Unprocessable Entity");
        assert_eq!(text("no\r\nname"), "HTTP 422 Unprocessable Entity: no  name");
        let unknown = Verdict::of_status(StatusCode::from_u16(599).unwrap(), "x", None);
        assert!(matches!(unknown, Verdict::Message(Outcome::Failed { reason }) if reason == "HTTP 599 x"));
    }

    #[test]
    fn the_status_is_read_from_its_line_alone() {
        for (bytes, status) in [
            ("HTTP/1.1 200 OK\r\n", Some(200)),
            ("HTTP/1.0 503\n", Some(503)),
            ("HTTP/1.1 422 \r\nno header", Some(422)),
            ("HTTP/1.1 200 OK\r", None),
            ("HTTP/1.1 20", None),
            ("HTTP/1.1 2000 OK\r\n", None),
            ("HTTP/1.1 099 OK\r\n", None),
            ("HTTP/1.1 abc OK\r\n", None),
            ("HTTP/2 200 OK\r\n", None),
            ("AMQP\r\n", None),
            ("\r\n", None),
            ("HTTP/1.1 103 x\r\na: b\r\n\r\nHTTP/1.1 204 x\r\n", Some(204)),
            (
                "HTTP/1.1 100 x\r\n\r\nHTTP/1.1 103 x\r\n\r\nHTTP/1.1 500 x\r\n",
                Some(500),
            ),
            ("HTTP/1.1 103 x\r\na: b\r\nHTTP/1.1 204 x\r\n", None),
            ("HTTP/1.1 103 x\r\n\r\n", None),
        ] {
            let found = status_of(bytes.as_bytes()).map(|status| status.as_u16());
            assert_eq!(found, status, "{bytes:?}");
        }
    }

    #[test]
    fn retry_after_is_read_in_every_form_and_capped() {
        let now = UNIX_EPOCH + Duration::from_secs(784_111_777); // Sun, 06 Nov 1994 08:49:37 GMT
        for (value, seconds) in [
            ("0", Some(0)),
            (" 120 ", Some(120)),
            ("86400", Some(86_400)),
            ("86401", Some(86_400)),
            ("99999999999999999999999", Some(86_400)),
            ("5.0", Some(5)),
            ("1.5", Some(2)),
            ("99999999999999999999999.9", Some(86_400)),
            ("Sun, 06 Nov 1994 08:50:37 GMT", Some(60)),
            ("Sunday, 06-Nov-94 08:50:37 GMT", Some(60)),
            ("Sun Nov  6 08:50:37 1994", Some(60)),
            ("Sun, 06 Nov 1994 08:48:37 GMT", Some(0)),
            ("Tue, 06 Nov 2068 08:48:37 GMT", Some(86_400)),
            ("", None),
            ("-1", None),
            (".5", None),
            ("5.", None),
            ("1.2.3", None),
            ("1e3", None),
            ("soon", None),
        ] {
            let found = retry_after(value, now).map(|after| after.as_secs());
            assert_eq!(found, seconds, "{value:?}");
        }
    }

    proptest! {
        #[test]
        fn every_text_comes_out_short_and_on_one_line(text in "[\\s\\S]{0,400}") {
            let line = clean(&text);
            prop_assert!(line.chars().count() <= TEXT_CHARS_MAX);
            prop_assert!(!line.chars().any(|c| c.is_control() || is_invisible(c)));
        }

        #[test]
        fn no_retry_after_panics(text in "\\PC{0,40}") {
            prop_assert!(retry_after(&text, UNIX_EPOCH).is_none_or(|after| after <= AFTER_MAX));
        }
    }
}
