//! The upkeep of one database, by its first worker: partitions of the history are made ahead and dropped when they are
//! old; dead letters and events go when their time is over. None of it may hold up delivery: each step is a short
//! transaction of its own, and one that fails is logged and left for the next time.

use crate::config::Retention;
use crate::pg::signals;
use crate::pg::txn::Durability;
use crate::ports::in_transaction;
use crate::store::Store;
use pgrx::spi::SpiResult;
use std::ffi::CStr;
use std::time::{Duration, Instant};

const EVERY: Duration = Duration::from_secs(60);
/// Events and failed attempts are looked at in order of seq, each once. What had to stay then is looked at again in the
/// next round.
const ROUND: Duration = Duration::from_secs(3600);
/// Rows that one transaction removes, at most.
const ROWS: i32 = 5_000;
/// Partitions that one transaction drops, at most.
const PARTITIONS: i32 = 10;

pub struct Upkeep {
    due: Instant,
    /// Making and dropping waits for readers of the history and holds up settles meanwhile: not more often than this.
    partitions_due: Instant,
    round_due: Instant,
    /// The seq up to which this round has looked at events,
    events_reached: i64,
    /// and at failed attempts.
    attempts_reached: i64,
}

impl Upkeep {
    pub fn new(now: Instant) -> Self {
        Self {
            due: now,
            partitions_due: now,
            round_due: now,
            events_reached: 0,
            attempts_reached: 0,
        }
    }

    /// Does what is due. Where more may be old it goes on at the next call, between other work. Returns how many workers that
    /// have ended it removed.
    pub fn tend(&mut self, now: Instant, worker: &str, store: &Store, retention: &Retention) -> i64 {
        if now < self.due {
            return 0;
        }
        let mut purged = 0;
        if now >= self.round_due {
            self.round_due = now + ROUND;
            (self.events_reached, self.attempts_reached) = (0, 0);
        }
        if now >= self.partitions_due {
            self.partitions_due = now + EVERY;
            purged = attempt(worker, c"outbox: purge workers", || store.purge_workers()).unwrap_or(0);
            attempt(worker, c"outbox: make partitions", || {
                store.make_partitions(retention.history)
            });
            if let Some(kept_s) = retention.history {
                attempt(worker, c"outbox: drop partitions", || {
                    store.clear("outbox_drop_partitions", kept_s, PARTITIONS)
                });
            }
        }
        let mut more = false;
        let plain = [
            (c"outbox: trim history", "outbox_trim", retention.history),
            (c"outbox: trim the audit", "outbox_trim_audit", retention.audit),
            (c"outbox: trim the inbox", "outbox_trim_inbox", retention.inbox),
        ];
        for (what, function, kept_s) in plain {
            if let Some(kept_s) = kept_s {
                let trimmed = attempt(worker, what, || store.clear(function, kept_s, ROWS));
                more |= trimmed == Some(ROWS.into());
            }
        }
        if let Some(kept_s) = retention.dead {
            let expired = attempt(worker, c"outbox: expire dead letters", || {
                store.clear("outbox_expire_dead", kept_s, ROWS)
            });
            if let Some(expired @ 1..) = expired {
                pgrx::log!("outbox {worker}: discarded {expired} dead letters, older than outbox.dead_retention");
            }
            more |= expired == Some(ROWS.into());
        }
        let rounds = [
            (
                c"outbox: trim events",
                "outbox_trim_events",
                retention.events,
                &mut self.events_reached,
            ),
            (
                c"outbox: trim attempts",
                "outbox_trim_attempts",
                retention.history,
                &mut self.attempts_reached,
            ),
        ];
        for (what, function, kept_s, reached) in rounds {
            let Some(kept_s) = kept_s else { continue };
            let trimmed = attempt(worker, what, || store.clear_after(function, *reached, kept_s, ROWS));
            if let Some((until, more_rows)) = trimmed {
                *reached = until;
                more |= more_rows;
            }
        }
        self.due = if more { now } else { now + EVERY };
        purged
    }
}

/// A step in a transaction of its own; None if it failed.
fn attempt<T>(worker: &str, what: &CStr, body: impl FnOnce() -> SpiResult<T>) -> Option<T> {
    if signals::asked_to_end() {
        return None;
    }
    match in_transaction(what, Durability::Relaxed, body) {
        Ok(value) => Some(value),
        Err(_) if signals::asked_to_end() => None, // the statement was cancelled for that
        Err(failure) => {
            pgrx::warning!(
                "{} ({worker}): {}; tries again",
                what.to_string_lossy(),
                failure.message
            );
            None
        }
    }
}
