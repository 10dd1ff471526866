//! All SQL of the extension: no other module says Spi. `enqueue` and `written` (the triggers on tables) run in a user's
//! backend, `worker` in a worker, `source` (events of the user's own tables) and `body` (bodies by his functions) in both; all on the main thread, inside a transaction. State transitions are the functions of
//! sql/src; here they are called.

pub mod body;
mod direct;
mod enqueue;
mod express;
mod held;
pub mod source;
mod upkeep;
mod worker;
pub mod written;

pub use enqueue::{
    AGGREGATE_KEY, Enqueue, Keys, Publish, Times, aggregate_key, check_body, configure, enqueue, hold_extension,
    message_tables, new_id, partition_by, publish,
};
pub use upkeep::Expired;
pub use worker::{ClaimedBatch, Described, Settlement, Store, Whereto, sendable};

/// The time, in µs since 1970.
pub fn now_us() -> i64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map(|d| d.as_micros() as i64).unwrap_or_default()
}

fn us_since_1970(time: pgrx::datum::TimestampWithTimeZone) -> i64 {
    since_1970(time.into())
}

/// Postgres begins in 2000.
pub fn since_1970(us_since_2000: i64) -> i64 {
    const YEAR_2000_US: i64 = 946_684_800_000_000;
    us_since_2000.saturating_add(YEAR_2000_US)
}
