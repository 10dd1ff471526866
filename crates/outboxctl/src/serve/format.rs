//! The form of numbers, times and texts on the pages.

use crate::format::epoch;
pub use crate::format::{clock, duration, grouped as count, time};
pub use crate::screen::text::{known, ms, rate};
use maud::{Markup, html};

/// A count that stopped at `cap`.
pub fn capped(n: i64, cap: i64) -> String {
    match n {
        n if n < cap => count(n),
        _ if cap >= 1000 && cap % 1000 == 0 => format!("{}k+", count(cap / 1000)),
        _ => format!("{}+", count(cap)),
    }
}

/// A time in `seconds` seconds from now, in one unit: the page shows it for up to a minute.
fn relative(seconds: f64) -> String {
    let (minutes, is_past) = ((seconds.abs() / 60.0) as i64, seconds <= 0.0);
    let span = match minutes {
        0 => "< 1 min".to_owned(),
        1..60 => format!("{minutes} min"),
        60..1440 => format!("{} h", minutes / 60),
        _ => format!("{} d", minutes / 1440),
    };
    if is_past {
        format!("{span} ago")
    } else {
        format!("in {span}")
    }
}

/// A time from the server's JSON as its distance from now. Its tooltip has the time itself, which the script shows in
/// the zone of the viewer's choice.
pub fn distance(at: &str, now_s: f64) -> Markup {
    html! {
        @match epoch(at) {
            Some(epoch_s) => { time datetime=(at) title={ (time(epoch_s)) " UTC" } { (relative(epoch_s - now_s)) } }
            None => { (at) }
        }
    }
}

/// The same of a time in seconds since 1970.
pub fn distance_of(epoch_s: f64, now_s: f64) -> Markup {
    distance(&format!("{}Z", time(epoch_s).replace(' ', "T")), now_s)
}

/// A value in the query of a URL.
pub fn encode(text: &str) -> String {
    form_urlencoded::byte_serialize(text.as_bytes()).collect()
}

/// The address of the page of a message.
pub fn message_path(seq: i64, destination: &str) -> String {
    format!("message/{seq}?destination={}", encode(destination))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_shown_by_its_distance_in_one_unit() {
        let spans = [0.0, -59.0, -61.0, -7_300.0, -180_000.0, 30.0, 5_400.0].map(relative);
        let wanted = [
            "< 1 min ago",
            "< 1 min ago",
            "1 min ago",
            "2 h ago",
            "2 d ago",
            "in < 1 min",
            "in 1 h",
        ];
        assert_eq!(spans, wanted);
        let shown = distance("2026-11-21T05:12:18.297537+00:00", 1_795_238_000.0).into_string();
        assert!(shown.contains("title=\"2026-11-21 05:12:18 UTC\">"), "{shown}");
        assert_eq!(distance("infinity", 0.0).into_string(), "infinity");
    }

    #[test]
    fn counts_are_capped() {
        assert_eq!(capped(999, 1000), "999");
        assert_eq!(capped(1000, 1000), "1k+");
        assert_eq!(capped(250, 100), "100+");
    }
}
