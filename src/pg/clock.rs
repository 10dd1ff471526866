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

const YEAR_2000_S: i64 = 946_684_800;

/// Converts a time that Postgres counts, in µs since 2000.
pub fn since_1970(us_since_2000: i64) -> i64 {
    us_since_2000.saturating_add(YEAR_2000_S * 1_000_000)
}

/// A time that Postgres counts, in µs since 2000, in whole seconds since 1970, rounded down.
pub fn unix_seconds(us_since_2000: i64) -> i64 {
    us_since_2000.div_euclid(1_000_000) + YEAR_2000_S
}
