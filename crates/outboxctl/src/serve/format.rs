//! The form of numbers, times and texts on the pages.

pub use crate::format::{clock, duration, grouped as count, time};
pub use crate::screen::text::{known, ms, rate};

/// A count that stopped at `cap`.
pub fn capped(n: i64, cap: i64) -> String {
    match n {
        n if n < cap => count(n),
        _ if cap >= 1000 && cap % 1000 == 0 => format!("{}k+", count(cap / 1000)),
        _ => format!("{}+", count(cap)),
    }
}

/// A value in the query of a URL.
pub fn encode(text: &str) -> String {
    form_urlencoded::byte_serialize(text.as_bytes()).collect()
}

/// The address of the page of a message.
pub fn message_path(seq: i64, destination: &str) -> String {
    format!("/message/{seq}?destination={}", encode(destination))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_capped() {
        assert_eq!(capped(999, 1000), "999");
        assert_eq!(capped(1000, 1000), "1k+");
        assert_eq!(capped(250, 100), "100+");
    }
}
