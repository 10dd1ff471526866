//! The SQL that both a session and a worker run: `source` reads events in a relation of the user's own, `body` calls his
//! functions, `held` keeps plans. On the main thread, inside a transaction. State transitions are the functions of sql/src.

pub mod body;
pub mod held;
pub mod source;

/// The time, in µs since 1970.
pub fn now_us() -> i64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map(|d| d.as_micros() as i64).unwrap_or_default()
}

pub fn us_since_1970(time: pgrx::datum::TimestampWithTimeZone) -> i64 {
    since_1970(time.into())
}

/// Postgres begins in 2000.
pub fn since_1970(us_since_2000: i64) -> i64 {
    const YEAR_2000_US: i64 = 946_684_800_000_000;
    us_since_2000.saturating_add(YEAR_2000_US)
}
