//! Maintenance of one database: a process that the launcher starts when a run is due, and that ends when the run is
//! done.
//! - It counts waiting messages.
//! - It dead-letters expired messages that no claim meets.
//! - It creates partitions of the history ahead of time, and drops old ones.
//! - It removes dead letters and events whose retention is over.
//!
//! No worker does any of this: a step may read much of a table from disk, and delivery must not wait. Each step is a
//! short, separate transaction. A step that fails is logged and left for the next run; outbox_health shows it until a run
//! succeeds. `shared::maintenance_state` holds the failure, and the position at which a run continues.

use super::process;
use super::store::Store;
use super::store::maintenance_sql::Expired;
use super::transaction::{self, in_transaction, in_transaction_within, remember_table};
use crate::config::Settings;
use crate::limits::STATEMENT_TIMEOUT_MS;
use crate::pg::clock::now_us;
use crate::pg::spi::SpiResult;
use crate::pg::text;
use crate::pg::txn::Durability;
use crate::pg::{latch, signals};
use crate::shared::error_groups::{self, FailureGroup};
use crate::shared::fields::{OptionalI64, RowCount};
use crate::shared::maintenance_state::{LastAnswer, MaintenanceState};
use crate::shared::workers::MAINTENANCE;
use crate::shared::{databases, statistics};
use outbox_core::settle::{EXPIRED, Ended, FailureKind};
use std::ffi::CStr;
use std::time::{Duration, Instant};

const SECOND_US: i64 = 1_000_000;
/// The time from the end of one run to the next.
const EVERY_US: i64 = 60 * SECOND_US;
/// The time from the end of one run to the next if nothing waits, there are no dead letters, and nothing was committed
/// since the run before.
const QUIET_EVERY_US: i64 = 5 * EVERY_US;
/// A process that has something to do within this time waits for it.
const LINGER_US: i64 = 2 * SECOND_US;
/// The longest time that a process runs, because processes of other databases may wait for its entry.
const LIFE: Duration = Duration::from_secs(60);

/// The time from one round to the next. A round checks each event and failed attempt once, in order of seq. Those that
/// had to stay are checked again in the next round.
const ROUND_US: i64 = 3600 * SECOND_US;
/// The most rows that one transaction removes.
const ROWS: i32 = 5_000;
/// The most partitions that one transaction drops.
const PARTITIONS: i32 = 10;

/// How often a search for expired messages runs a step, where messages expire.
const EXPIRY_EVERY_US: i64 = SECOND_US;
/// The wait after a search that failed.
const EXPIRY_AGAIN_US: i64 = 30 * SECOND_US;
/// Blocks of the table that one step searches: 8 MB.
const EXPIRY_BLOCKS: i32 = 1_000;

/// The most rows that a usual count reads.
const COUNT_ROWS_MAX: i64 = 10_000;
/// The most rows that a count of a large backlog reads.
const LARGE_COUNT_ROWS_MAX: i64 = 1_000_000;
const LARGE_COUNT_EVERY_US: i64 = 300 * SECOND_US;
/// Long, because a million rows may have to be read from a slow disk.
const COUNT_TIMEOUT_MS: i32 = 10 * STATEMENT_TIMEOUT_MS;

pub fn main(database: u32) -> ! {
    let entry = process::enter(database, MAINTENANCE);
    let opened = in_transaction(c"outbox: start maintenance", Durability::Relaxed, || {
        text::prepare();
        let store = Store::open("maintenance")?;
        remember_table(store.settings_table_oid()?);
        let is_adopted = store.not_adopted()?.is_none();
        Ok((store, is_adopted))
    });
    let (store, is_adopted) = match opened {
        Ok(opened) => opened,
        Err(failure) => {
            transaction::show(&failure);
            pgrx::warning!("outbox maintenance: cannot start: {}", failure.message);
            if let Some(database) = databases::my_database() {
                database.maintenance.run.set(Some(&failure.message), now_us());
            }
            signals::exit(1)
        }
    };
    let Some(database) = databases::my_database() else {
        signals::exit(0)
    };
    database.set_extension(true);
    signals::end_in_order();
    let mut maintenance = Maintenance {
        store,
        settings: Settings::snapshot(),
        database,
        state: &database.maintenance,
        is_adopted,
        has_tended_partitions: false,
        expiry_due_us: 0,
        failure: None,
    };
    let began = Instant::now();
    loop {
        let next_us = maintenance.pass();
        let left_us = next_us - now_us();
        let is_over = left_us > LINGER_US || began.elapsed() > LIFE;
        if is_over || signals::is_shutdown_requested() || entry.is_to_leave() {
            maintenance.state.runs.advance();
            signals::exit(0);
        }
        if left_us > 0 {
            latch::wait(left_us / 1000 + 1);
        }
        signals::forget_cancel(); // a cancel that came between two statements would raise an ERROR
        signals::check_for_interrupts();
        if signals::reload_if_requested() {
            maintenance.settings = Settings::snapshot();
        }
    }
}

struct Maintenance {
    store: Store,
    settings: Settings,
    database: &'static databases::DatabaseEntry,
    state: &'static MaintenanceState,
    is_adopted: bool,
    /// Whether this run has created and dropped partitions. Both wait for readers of the history and delay settles
    /// meanwhile, so a run does it once.
    has_tended_partitions: bool,
    /// When the next step of a search for expired messages may begin, in µs since 1970.
    expiry_due_us: i64,
    /// What failed first. It stays: the run does not repeat each step.
    failure: Option<String>,
}

impl Maintenance {
    /// Does a part of what is due. Returns when there is more to do, in µs since 1970.
    fn pass(&mut self) -> i64 {
        let is_requested = self.state.requested.take();
        if is_requested || self.state.due_us.get().is_none_or(|due_us| due_us <= now_us()) {
            if is_requested {
                self.state.round_due_us.set(None); // the settings may have changed
            }
            let calls = Some(self.database.calls.read().into());
            self.count();
            self.count_dead();
            let more = self.clear();
            self.count_uncounted();
            answer(&self.state.run, self.failure.as_deref());
            let counts = [&self.database.pending, &self.database.dead[0], &self.database.dead[1]];
            let nothing_is_there = counts.iter().all(|count| count.get() == Some(0));
            let is_quiet = nothing_is_there && self.failure.is_none() && self.state.calls_seen.get() == calls;
            self.state.calls_seen.set(calls);
            let wait_us = match (more, is_quiet) {
                (true, _) => 0,
                (false, true) => QUIET_EVERY_US,
                (false, false) => EVERY_US,
            };
            self.state.due_us.set(Some(now_us() + wait_us));
        }
        match self.expire() {
            Some(expiry_us) => expiry_us.min(self.state.next_us().max(self.state.due_us.get().unwrap_or(0))),
            None => self.state.next_us(),
        }
    }

    // ---- waiting messages -------------------------------------------------------------------------------------------

    /// Corrects the counters. The count is exact while few messages wait. A large backlog is counted at the start, and
    /// rarely while it stays the same. If a backlog exceeds even that count, each destination counts only the rows that
    /// were read, so that no limit is applied too early.
    fn count(&mut self) {
        let (state, database) = (self.state, self.database);
        let is_first = database.pending.get().is_none();
        let must = is_first || statistics::is_any_uncounted();
        let (before, each) = (database.pending.uncertain(), statistics::PendingCount::begin());
        let stays = state.pending_seen.get() == Some(before);
        let large_is_due = state.large_count_due_us.get().is_none_or(|due_us| due_us <= now_us());
        let limit = match must || (stays && large_is_due) {
            true => LARGE_COUNT_ROWS_MAX,
            false => COUNT_ROWS_MAX,
        };
        state.pending_seen.set(Some(before));
        let sees_all = database.highest.get().is_some() || self.sees_all();
        let counted = self.attempt_within(c"outbox: count", COUNT_TIMEOUT_MS, |store| {
            let counted = store.count_pending(limit)?;
            let sum: i64 = counted.iter().map(|counted| counted.messages).sum();
            let all = match sum < limit {
                true => Some(sum),
                false if must => Some(store.estimate_pending()?.max(sum)),
                false => None,
            };
            Ok((counted, all, sum < limit))
        });
        let Some((counted, all, is_complete)) = counted else {
            return;
        };
        if limit == LARGE_COUNT_ROWS_MAX {
            state.large_count_due_us.set(Some(now_us() + LARGE_COUNT_EVERY_US));
        }
        if !is_complete && is_first {
            state.unknown_block.set(Some(0));
        }
        if let Some(us) = counted.iter().filter_map(|counted| counted.first_expiry_us).min() {
            state.expires_us.lower(us); // no commit has recorded it since the server started
        }
        if is_complete && sees_all {
            let highest = counted.iter().map(|counted| counted.highest).max();
            database.highest.know(highest.unwrap_or_default());
        }
        let Some(all) = all else { return };
        if database.pending.correct(before, all) {
            database.floors.doubt(); // rows were changed by hand
        }
        let counted: Vec<(String, i64)> = (counted.into_iter())
            .map(|counted| (counted.destination, counted.messages))
            .collect();
        each.end(&counted);
    }

    /// Whether a count sees all messages that were inserted before this database had its entry in shared memory. Waits a
    /// moment for short transactions; a later run finds the end of a long one.
    fn sees_all(&mut self) -> bool {
        let mut is_over = || {
            let (oldest, next) = self.attempt(c"outbox: open transactions", Store::open_xids)?;
            let first = self.state.first_xid.get().unwrap_or(next);
            self.state.first_xid.set(Some(first));
            Some(oldest >= first)
        };
        for _ in 0..20 {
            match is_over() {
                Some(false) if !signals::is_shutdown_requested() => latch::wait(50),
                is_over => return is_over.unwrap_or_default(),
            }
        }
        false
    }

    /// Corrects the counters of dead letters. Once they reach `COUNT_ROWS_MAX`, only COMMIT changes them.
    fn count_dead(&mut self) {
        let database = self.database;
        let before = database.dead.each_ref().map(RowCount::uncertain);
        if database.dead[0].get().is_some_and(|dead| dead >= COUNT_ROWS_MAX) {
            return;
        }
        let counted = self.attempt_within(c"outbox: count dead letters", COUNT_TIMEOUT_MS, |store| {
            store.count_dead(LARGE_COUNT_ROWS_MAX)
        });
        if let Some(found) = counted {
            let counts = database.dead.iter().zip(before.into_iter().zip(found));
            if counts.fold(false, |doubt, (count, (before, found))| {
                doubt | count.correct(before, found)
            }) {
                database.floors.doubt(); // rows were changed by hand
            }
        }
    }

    // ---- expired messages -------------------------------------------------------------------------------------------

    /// Runs a step of a search for expired messages, if one is due. A search begins when the first message expires.
    /// Returns when the next step is due, in µs since 1970; None = no search is in progress.
    fn expire(&mut self) -> Option<i64> {
        let (state, now) = (self.state, now_us());
        if !self.is_adopted {
            state.expiry_block.set(None);
            if state.expires_us.take().is_some() {
                state.expires_us.lower(now + EVERY_US);
            }
            return None;
        }
        if state.expiry_block.get().is_none() && state.expires_us.get().is_none_or(|us| us > now) {
            return None;
        }
        if now < self.expiry_due_us {
            return Some(self.expiry_due_us);
        }
        let block = state.expiry_block.get().unwrap_or_else(|| {
            state.expiry_block.set(Some(0)); // first, so that the search continues after a crash
            state.left_expires_us.set(None);
            state.expires_us.set(None);
            0
        });
        let of_run = self.failure.take();
        let step = self.expire_from(block);
        answer(&state.search, std::mem::replace(&mut self.failure, of_run).as_deref());
        let Some(step) = step else {
            state.expiry_block.set(None);
            state.expires_us.lower(now_us() + EXPIRY_AGAIN_US);
            return Some(now_us() + EXPIRY_AGAIN_US);
        };
        if let Some(us) = step.next_expiry_us {
            state.left_expires_us.lower(us);
        }
        // A worker may hold an expired message. The worker ends it, or gives it back.
        let next_us = now_us() + if step.more { 0 } else { EXPIRY_EVERY_US };
        self.expiry_due_us = next_us;
        if step.next_block == 0 && !step.more {
            if let Some(us) = state.left_expires_us.take() {
                state.expires_us.lower(us.max(next_us));
            }
            state.expiry_block.set(None);
            return None;
        }
        state.expiry_block.set(Some(step.next_block));
        Some(next_us)
    }

    /// After a start with more messages than were counted: each run searches one piece of the table for messages that
    /// expire, until all of it was searched once.
    fn count_uncounted(&mut self) {
        let Some(block) = self.state.unknown_block.get().filter(|_| self.is_adopted) else {
            return;
        };
        if let Some(step) = self.expire_from(block) {
            if let Some(us) = step.next_expiry_us {
                self.state.expires_us.lower(us);
            }
            let is_over = step.next_block == 0;
            self.state.unknown_block.set((!is_over).then_some(step.next_block));
        }
    }

    fn expire_from(&mut self, block: i64) -> Option<Expired> {
        let step = self.attempt(c"outbox: expire messages", |store| {
            store.expire(block, EXPIRY_BLOCKS, ROWS)
        })?;
        if !step.counts.is_empty() {
            let sum: i64 = step.counts.iter().map(|(_, count)| count).sum();
            let now_us = now_us();
            self.database.settled(&Ended::of(0, 0, sum), now_us);
            for (destination, count) in &step.counts {
                pgrx::log!("outbox maintenance, destination {destination}: {count} messages have expired");
                statistics::settled(destination, &Ended::of(0, 0, *count), now_us);
                let (kind, count) = (FailureKind::Expired, *count as u64);
                error_groups::record(&FailureGroup::of_messages(destination, kind, EXPIRED, 0, count));
            }
        }
        Some(step)
    }

    // ---- old rows ---------------------------------------------------------------------------------------------------

    /// Creates and drops partitions, and removes one batch of each kind of old rows. Returns whether more rows may be
    /// old.
    fn clear(&mut self) -> bool {
        let (state, retention) = (self.state, self.settings.retention.clone());
        if state.round_due_us.get().is_none_or(|due_us| due_us <= now_us()) {
            state.round_due_us.set(Some(now_us() + ROUND_US));
            state.events_reached.set(None);
            state.attempts_reached.set(None);
        }
        if !std::mem::replace(&mut self.has_tended_partitions, true) {
            self.tend_partitions(retention.history);
        }
        let (history, audit, inbox) = ("outbox_history_default", "outbox_audit", "outbox_inbox");
        let mut more = self.trim(c"outbox: trim history", history, "published_at", "", retention.history);
        more |= self.trim(c"outbox: trim audit", audit, "at", "order by x.at", retention.audit);
        let order = "order by x.received_at";
        more |= self.trim(c"outbox: trim inbox", inbox, "received_at", order, retention.inbox);
        more |= self.expire_dead(retention.dead);
        let (events, attempts) = (&state.events_reached, &state.attempts_reached);
        more |= self.go_round(c"outbox: trim events", "trim_events", retention.events, events);
        more |= self.go_round(c"outbox: trim attempts", "trim_attempts", retention.history, attempts);
        more && !signals::is_shutdown_requested()
    }

    /// Creates partitions of the history and drops old ones, with what else a run does once.
    fn tend_partitions(&mut self, kept_s: Option<i32>) {
        self.attempt(c"outbox: purge workers", |store| store.protocol.purge_workers());
        self.attempt(c"outbox: record seq", |store| store.record_drawn_seq());
        self.attempt(c"outbox: record owners", |store| store.record_owners());
        self.attempt(c"outbox: summarize history", |store| store.summarize_history());
        self.attempt(c"outbox: make partitions", |store| store.make_partitions(kept_s));
        if let Some(kept_s) = kept_s {
            self.attempt(c"outbox: drop partitions", |store| {
                store.clear("drop_partitions", kept_s, PARTITIONS)
            });
        }
    }

    /// Removes a batch of the rows of a table whose `time` is older. Returns whether more may be.
    fn trim(&mut self, what: &CStr, table: &str, time: &str, order: &str, kept_s: Option<i32>) -> bool {
        let Some(kept_s) = kept_s else { return false };
        let trimmed = self.attempt(what, |store| store.trim(table, time, order, kept_s, ROWS));
        trimmed == Some(ROWS.into())
    }

    /// Discards a batch of old dead letters. Returns whether more may be old.
    fn expire_dead(&mut self, kept_s: Option<i32>) -> bool {
        let Some(kept_s) = kept_s else { return false };
        let expired = self.attempt(c"outbox: expire dead letters", |store| {
            store.clear("expire_dead", kept_s, ROWS)
        });
        if let Some(expired @ 1..) = expired {
            pgrx::log!("outbox maintenance: discarded {expired} dead letters older than outbox.dead_retention");
        }
        expired == Some(ROWS.into())
    }

    /// Continues a round from the seq that it has `reached`. Returns whether more rows may be old.
    fn go_round(&mut self, what: &CStr, function: &str, kept_s: Option<i32>, reached: &OptionalI64) -> bool {
        let Some(kept_s) = kept_s else { return false };
        let after = reached.get().unwrap_or(0);
        let trimmed = self.attempt(what, |store| store.clear_after(function, after, kept_s, ROWS));
        let Some((until, more)) = trimmed else { return false };
        reached.set(Some(until));
        more
    }

    // ---- steps ------------------------------------------------------------------------------------------------------

    /// Runs a step in a separate transaction; None if it failed.
    fn attempt<T>(&mut self, what: &CStr, body: impl FnOnce(&Store) -> SpiResult<T>) -> Option<T> {
        self.attempt_within(what, STATEMENT_TIMEOUT_MS, body)
    }

    fn attempt_within<T>(
        &mut self,
        what: &CStr,
        timeout_ms: i32,
        body: impl FnOnce(&Store) -> SpiResult<T>,
    ) -> Option<T> {
        if signals::is_shutdown_requested() {
            return None;
        }
        match in_transaction_within(what, timeout_ms, Durability::Relaxed, || body(&self.store)) {
            Ok(value) => Some(value),
            Err(_) if signals::is_shutdown_requested() => None, // the shutdown cancelled the statement
            Err(failure) => {
                let what = text::of_c_str(what);
                transaction::show(&failure);
                pgrx::warning!("{what}: {}; tries again", failure.message);
                if !failure.locked && self.failure.is_none() {
                    let step = what.trim_start_matches("outbox: ");
                    self.failure = Some(format!("{step}: {}", failure.message));
                }
                None
            }
        }
    }
}

fn answer(task: &LastAnswer, failure: Option<&str>) {
    let is_cut_off = failure.is_none() && signals::is_shutdown_requested();
    if !is_cut_off {
        task.set(failure, now_us());
    }
}
