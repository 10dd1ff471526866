//! Looks for messages that have expired where no claim meets them: scheduled, backing off, behind another, or of a
//! destination that is down, paused or slow. By the first worker of a database, a piece of the table a second, so that a
//! large backlog costs little; and hardly ever where no message expires.

use crate::faults::{self, Fault};
use crate::pg::signals;
use crate::pg::txn::Durability;
use crate::ports::in_transaction;
use crate::shmem;
use crate::store::{Expired, Store, now_us};
use outbox_core::settle::{EXPIRED, Ended};
use std::time::{Duration, Instant};

const EVERY: Duration = Duration::from_secs(1);
/// How soon all is looked through again where nothing expires: finds what no hint told of.
const WITHOUT_A_HINT: Duration = Duration::from_secs(30);
/// Blocks of the table that one step looks through: 8 MB.
const BLOCKS: i32 = 1_000;
/// Rows of each table that one step buries, at most.
const ROWS: i32 = 5_000;

pub struct Expiry {
    due: Instant,
    /// When a new round begins, unless one is under way.
    round_due: Instant,
    /// Where the round goes on; 0 = none is under way.
    block: i64,
    /// This round has met a message that expires.
    met: bool,
    /// As of the beginning of this round: see `shmem::Database::expiring`.
    hint: u32,
}

impl Expiry {
    pub fn new(now: Instant) -> Self {
        Self {
            due: now,
            round_due: now,
            block: 0,
            met: false,
            hint: 0,
        }
    }

    /// A step, if one is due. Returns how many messages of which destinations are dead letters now. One that fails is logged
    /// and left for later: it must not hold up delivery.
    pub fn tend(&mut self, now: Instant, worker: &str, store: &Store) -> Vec<(String, i64)> {
        if now < self.due {
            return Vec::new();
        }
        self.due = now + EVERY;
        let hint = shmem::my_database().map_or(0, shmem::Database::expiring);
        if self.block == 0 {
            if now < self.round_due && hint == self.hint {
                return Vec::new();
            }
            (self.met, self.hint) = (false, hint);
        }
        let step = in_transaction(c"outbox: expire", Durability::Relaxed, || {
            store.expire(self.block, BLOCKS, ROWS)
        });
        let step = match step {
            Ok(step) => step,
            Err(failure) => {
                self.due = now + WITHOUT_A_HINT;
                if !signals::asked_to_end() {
                    pgrx::warning!("outbox {worker}: cannot look for expired messages: {}", failure.message);
                }
                return Vec::new();
            }
        };
        self.go_on(now, &step);
        if let (false, Some(database)) = (step.counts.is_empty(), shmem::my_database()) {
            let sum: i64 = step.counts.iter().map(|(_, count)| count).sum();
            database.settled(&Ended::of(0, 0, sum), now_us());
            for (destination, count) in &step.counts {
                faults::note(&Fault::of_messages(destination, EXPIRED, true, 0, *count as u64));
            }
            if step.heads {
                database.waiting_changed(); // keys may go on
                shmem::wake_workers();
            }
        }
        step.counts
    }

    fn go_on(&mut self, now: Instant, step: &Expired) {
        self.block = step.next_block;
        self.met |= step.expiring;
        if step.more {
            self.due = now;
        } else if self.block == 0 {
            self.round_due = now + if self.met { EVERY } else { WITHOUT_A_HINT };
        }
    }
}
