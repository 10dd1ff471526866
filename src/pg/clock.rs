//! The clock of the server's machine, and the conversion of the server's times to this project's unit: µs since 1970.

use pgrx::datum::TimestampWithTimeZone;
use std::time::{SystemTime, UNIX_EPOCH};

pub fn now_us() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map(|d| d.as_micros() as i64).unwrap_or_default()
}

pub fn us_since_1970(time: TimestampWithTimeZone) -> i64 {
    since_1970(time.into())
}

/// Converts a time that Postgres counts, in µs since 2000.
pub fn since_1970(us_since_2000: i64) -> i64 {
    const YEAR_2000_US: i64 = 946_684_800_000_000;
    us_since_2000.saturating_add(YEAR_2000_US)
}
