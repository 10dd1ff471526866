//! A worker: delivers the messages of one database. Its loop reads like the table in ARCHITECTURE.md: take outcomes and
//! settle, tend the leases, claim, hand over, wait. Main thread of its own process; the publisher thread is behind
//! `broker`. Policy is in crates/core; here is the order of things and what happens when one fails.

use crate::broker::{Broker, DEADLINE, Outcomes, Status};
use crate::config::Settings;
use crate::pg::bgworker;
use crate::pg::txn::{self, Durability, Failure};
use crate::pg::{catalog, latch, signals};
use crate::ports::{STATEMENT_TIMEOUT_MS, Signals, Tables, held_transaction, in_transaction, remember_table};
use crate::store::{Settlement, Store, now_us};
use crate::upkeep::Upkeep;
use crate::{launcher, registry, shmem};
use outbox_core::engine::{Engine, Sharing};
use outbox_core::lease;
use outbox_core::partition::Partition;
use outbox_core::route::Route;
use outbox_core::settle::Disposition;
use outbox_core::tick::{self, TickState};
use outbox_transport::Deadline;
use std::collections::HashSet;
use std::time::{Duration, Instant};

/// Messages claimed and not settled, at most: one batch on the wire while the next is claimed.
const WINDOW: usize = 2000;
/// Wait after a transaction failed.
const PAUSE_AFTER_FAILURE_MS: u32 = 500;
/// At the end: how long outcomes are waited for, and how long each last transaction may take. A fast shutdown must be
/// through within 2 s, whatever the broker does.
const LAST_OUTCOMES: Duration = Duration::from_millis(700);
const LAST_TRANSACTION_MS: i32 = 300;
const LAST_WORDS_TO_BROKER: Duration = Duration::from_millis(200);

const LANE_BY_LANE: Duration = Duration::from_secs(5);
const CONFIG_CHECK_EVERY: Duration = Duration::from_secs(1);
const COUNT_EVERY: Duration = Duration::from_secs(10);
const COUNT_ROWS_MAX: i64 = 10_000;
const FIRST_COUNT_ROWS_MAX: i64 = 1_000_000;

pub fn main(argument: u64) -> ! {
    let (database, number) = launcher::unpack(argument);
    signals::install();
    let slot = shmem::worker_starts(database, number);
    if shmem::is_vacated(database) {
        signals::exit(0);
    }
    bgworker::connect(database.into(), shmem::worker_role().into());
    txn::set_for_session(c"search_path", c"pg_catalog, pg_temp");
    // A settle that a crash undoes would be sent again: wait for the disk. Claims and heartbeats need not.
    txn::set_for_session(c"synchronous_commit", c"on");
    txn::set_for_session(c"lock_timeout", c"500ms"); // a heartbeat must not wait behind somebody's row
    txn::set_for_session(c"jit", c"off");
    let mut worker = Worker::start(number, slot);
    bgworker::on_exit(stop_publishing);
    signals::end_in_order();
    loop {
        let wait_ms = worker.pass();
        if !signals::asked_to_end() {
            latch::wait(worker.broker.event_fd(), i64::from(wait_ms));
        }
        if signals::asked_to_end() {
            worker.finish();
            signals::exit(1);
        }
        signals::check_for_interrupts();
        if signals::reload_if_asked() {
            worker.take_settings();
        }
    }
}

/// The name of a worker in the server, in outbox_workers and as the owner of leases.
pub fn id_of(number: u32) -> String {
    format!("server-{}", number + 1)
}

struct Worker {
    id: String,
    store: Store,
    engine: Engine<String>,
    signals: Signals,
    settings: Settings,
    /// What ALTER DATABASE and ALTER ROLE said when this session began.
    session_defaults: String,
    broker: Broker,
    /// With leasing off: the token of this process' claims, negative.
    row_token: i64,
    /// Until then the lanes are claimed one by one, for rows of some were locked.
    locked_until: Option<Instant>,
    idle: bool,
    /// Whether this one does what one worker of the database must do.
    first: bool,
    /// As of the last look at who is there; 0 = none yet.
    worker_changes: u32,
    reported: Option<Status>,
    began: Instant,
    leases_due: Instant,
    config_check_due: Instant,
    upkeep: Upkeep,
    count_due: Instant,
    counted: bool,
}

impl Worker {
    fn start(number: u32, slot: Option<&'static shmem::Worker>) -> Self {
        let id = id_of(number);
        let opened = in_transaction(c"outbox: start", Durability::Relaxed, || {
            let store = Store::open(&id)?;
            let sharing = store.sharing()?;
            remember_table(store.a_table()?);
            let session_defaults = store.session_defaults()?;
            if let Some(database) = shmem::my_database()
                && !database.has_adopted()
            {
                registry::adopt(&store.prepared_transactions()?);
                database.set_adopted();
                // One may have been committed before it was found, while another worker read already.
                shmem::reopen_all(catalog::my_database(), 1);
            }
            Ok((store, sharing, session_defaults))
        });
        let (store, sharing, session_defaults) = match opened {
            Ok(opened) => opened,
            Err(failure) => {
                pgrx::warning!("outbox {id}: cannot start: {}", failure.message);
                signals::exit(1)
            }
        };
        if let Some(database) = shmem::my_database() {
            database.set_extension(true);
            shmem::wake_launcher(); // it may start the other workers
        }
        let settings = Settings::snapshot();
        let now = Instant::now();
        pgrx::log!("outbox {id}: started");
        Self {
            broker: Broker::new(settings.broker.clone(), id.clone()),
            row_token: -(uuid::Uuid::new_v4().as_u64_pair().0 as i64 & i64::MAX).max(1),
            id,
            store,
            engine: Engine::new(sharing),
            signals: Signals {
                database: shmem::my_database(),
                slot,
            },
            settings,
            session_defaults,
            locked_until: None,
            idle: false,
            first: false,
            worker_changes: 0,
            reported: None,
            began: now,
            leases_due: now,
            config_check_due: now,
            upkeep: Upkeep::new(now),
            count_due: now,
            counted: false,
        }
    }

    /// One tick. Returns how long to wait for a wake, an outcome or the safety poll.
    fn pass(&mut self) -> u32 {
        let now = Instant::now();
        self.broker.ensure(now);
        self.take_outcomes(now);
        let result = self
            .tend_leases(now) // the first heartbeat makes the row that report writes to
            .and_then(|()| self.settle_what_must_be())
            .and_then(|()| self.report())
            .and_then(|()| self.look_around(now))
            .and_then(|()| self.claim())
            .and_then(|wait_ms| self.settle_what_is_due(wait_ms));
        if let Some(slot) = self.signals.slot {
            slot.set_in_flight(self.engine.outstanding());
        }
        match result {
            Ok(wait_ms) => wait_ms,
            Err(_) if signals::asked_to_end() => 0, // the statement was cancelled for that
            Err(failure) => {
                pgrx::warning!("outbox {}: {}; tries again", self.id, failure.message);
                PAUSE_AFTER_FAILURE_MS
            }
        }
    }

    // ---- outcomes and settle ----------------------------------------------------------------------------------------

    fn take_outcomes(&mut self, now: Instant) {
        let (outcomes, died) = self.broker.take(now);
        self.conclude_all(outcomes);
        if died {
            self.engine.release_all("the publisher ended");
        }
    }

    fn conclude_all(&mut self, outcomes: Outcomes) {
        let now_ms = self.now_ms();
        for (handle, outcome) in outcomes {
            self.engine
                .conclude(handle, &outcome, &self.settings.rules, now_ms, now_us() as u64);
        }
    }

    /// Before a claim: what goes back, or would make the window too large. What is published can wait a little.
    fn settle_what_must_be(&mut self) -> Result<(), Failure> {
        match self.engine.must_settle() {
            true => self.settle(STATEMENT_TIMEOUT_MS),
            false => Ok(()),
        }
    }

    /// After a claim. Returns how long to wait at most.
    fn settle_what_is_due(&mut self, wait_ms: u32) -> Result<u32, Failure> {
        if self.engine.settle_in_ms(self.now_ms()) == Some(0) {
            self.settle(STATEMENT_TIMEOUT_MS)?;
        }
        let settle_in_ms = self.engine.settle_in_ms(self.now_ms());
        Ok(settle_in_ms.map_or(wait_ms, |ms| wait_ms.min(ms as u32)))
    }

    fn settle(&mut self, timeout_ms: i32) -> Result<(), Failure> {
        let now_ms = self.now_ms();
        let mut tables = tables(&self.store, &self.settings, self.row_token, timeout_ms);
        let id = &self.id;
        let settled = self.engine.settle(&mut tables, now_ms, |batch| {
            count_settled(batch);
            for failed in batch {
                if let Disposition::Dead { reason } = &failed.disposition {
                    let seq = failed.pointer.seq;
                    pgrx::log!("outbox {id}: message {seq} is a dead letter: {reason}");
                }
            }
        });
        if tables.missed > 0 {
            pgrx::log!("outbox {id}: {} messages were no longer ours to settle", tables.missed);
        }
        settled
    }

    /// Writes the state of the broker where outbox_health reads it, when it changed.
    fn report(&mut self) -> Result<(), Failure> {
        let status = match self.settings.enabled {
            true => self.broker.status.clone(),
            false => Status {
                state: "paused",
                reason: None,
                detail: None,
            },
        };
        // Between two failed attempts to connect the reason is worth more than the word "connecting".
        let reconnecting = status.state == "connecting" && self.reported.as_ref().is_some_and(|r| r.state == "down");
        if reconnecting || self.reported.as_ref() == Some(&status) {
            return Ok(());
        }
        let store = &self.store;
        in_transaction(c"outbox: report", Durability::Relaxed, || {
            store.report(status.state, status.reason, status.detail.as_deref())
        })?;
        let words = [Some(status.state), status.reason, status.detail.as_deref()];
        let words: Vec<&str> = words.into_iter().flatten().collect();
        if self
            .reported
            .as_ref()
            .is_none_or(|r| (r.state, r.reason) != (status.state, status.reason))
        {
            pgrx::log!("outbox {}: broker {}", self.id, words.join(" "));
        }
        self.reported = Some(status);
        Ok(())
    }

    // ---- leases -----------------------------------------------------------------------------------------------------

    /// Heartbeat; renews, takes and gives back leases as the plan says.
    fn tend_leases(&mut self, now: Instant) -> Result<(), Failure> {
        let changes = self.signals.database.map_or(0, shmem::Database::worker_changes);
        if now < self.leases_due && changes == self.worker_changes {
            return Ok(());
        }
        let asked_at = Deadline::now();
        let (store, settings) = (&self.store, &self.settings);
        let in_use = self.engine.in_use();
        let owner_of_lanes = &self.signals;
        let (id, sharing, before) = (&self.id, self.engine.sharing(), self.engine.leases());
        let mut released = false;
        let (held, leaving, first) = in_transaction(c"outbox: leases", Durability::Relaxed, || {
            let workers = store.heartbeat(bgworker::my_pid(), settings.heartbeat_ttl_s)?;
            let first = workers.first() == Some(id);
            if sharing == Sharing::RowClaims {
                return Ok((Vec::new(), HashSet::new(), first));
            }
            let plan = lease::plan(id, &workers, &store.leases()?);
            // A partition that another worker should have is given back once nothing of it is in flight here.
            // A lease in our name that this process does not hold was an earlier process' of the same name: it is taken
            // anew, so that what that one had claimed counts as unclaimed.
            let (ours, inherited): (Vec<_>, Vec<_>) =
                plan.renew.iter().copied().partition(|lease| before.contains(lease));
            let acquire: Vec<Partition> = plan
                .acquire
                .iter()
                .copied()
                .chain(inherited.into_iter().map(|(partition, _)| partition))
                .collect();
            let (busy, free): (Vec<_>, Vec<_>) = plan.release.iter().copied().partition(|(p, _)| in_use.contains(p));
            store.release(&free)?;
            released = !free.is_empty();
            let wanted: Vec<(Partition, i64)> = ours.iter().chain(&busy).copied().collect();
            let renewed = store.renew(&wanted, settings.lease_ttl_s)?;
            let mut held: Vec<(Partition, i64)> = wanted
                .into_iter()
                .filter(|(partition, _)| renewed.contains(partition))
                .collect();
            held.extend(store.take(&acquire, settings.lease_ttl_s)?);
            held.sort_unstable();
            // Before anybody else can take them, for the rows of the leases are still locked.
            owner_of_lanes.own_lanes(&held);
            Ok((held, busy.into_iter().map(|(partition, _)| partition).collect(), first))
        })?;
        match sharing {
            // Counted from before the lease was, and less a tenth.
            Sharing::Leases => DEADLINE.set(asked_at, Duration::from_millis(settings.lease_ttl_s as u64 * 900)),
            Sharing::RowClaims => DEADLINE.lift(),
        }
        self.first = first;
        if self.worker_changes == 0 || released {
            shmem::look_again(); // the others: at a worker that is new, or at partitions that are free
        }
        self.worker_changes = changes.max(1);
        if held.len() != self.engine.leases().len() {
            pgrx::log!("outbox {}: owns {} partitions", self.id, held.len());
        }
        // Soon again while a partition waits to be given back, or while there is none to own yet.
        let soon = !leaving.is_empty() || (held.is_empty() && sharing == Sharing::Leases);
        self.engine.set_leases(held, leaving);
        self.leases_due = now
            + if soon {
                Duration::from_millis(500)
            } else {
                self.settings.lease_renew
            };
        Ok(())
    }

    // ---- claim and hand over ----------------------------------------------------------------------------------------

    fn claim(&mut self) -> Result<u32, Failure> {
        let now_ms = self.now_ms();
        let state = |worker: &Self| TickState {
            enabled: worker.settings.enabled,
            connected: worker.broker.is_connected(),
            blocked: false, // blocked is a state of its own, in which it is not connected
            owned_partitions: worker.engine.claimable(),
            outstanding: worker.engine.outstanding(),
            window: WINDOW,
            queue_has_room: worker.engine.is_ready_empty(),
            last_claim_was_full: worker.engine.wants_more(),
            woken: false,
            idle_backoff_ms: worker.settings.idle_backoff_ms,
        };
        self.hand_over();
        let Some(room) = tick::next(&state(self)).claim else {
            return Ok(tick::next(&state(self)).wait_ms);
        };
        let limit = self.settings.batch_size.min(room);
        let mut tables = tables(&self.store, &self.settings, self.row_token, STATEMENT_TIMEOUT_MS);
        tables.lane_by_lane = self.locked_until.is_some_and(|until| Instant::now() < until);
        let known_locked = tables.lane_by_lane;
        let settings = &self.settings;
        let route = Route {
            exchange: &settings.broker.exchange,
            template: &settings.routing_key,
        };
        let claimed = self.engine.claim(
            &mut tables,
            &self.signals,
            now_ms,
            limit,
            &settings.rules,
            |handle, pointer, event| {
                outbox_core::envelope::publication(handle, pointer, event, &route)
                    .map_err(|refusal| refusal.to_string())
            },
        );
        // What a crash could still undo must not be sent: a commit with synchronous_commit off is visible before it is on
        // disk.
        txn::flush_wal(tables.wal_position);
        if tables.lane_by_lane && !known_locked {
            pgrx::log!(
                "outbox {}: somebody holds messages locked; their partitions wait",
                self.id
            );
            self.locked_until = Some(Instant::now() + LANE_BY_LANE);
        }
        self.idle = claimed? == 0;
        self.hand_over();
        let due_ms = self.engine.due_at_ms().saturating_sub(now_ms).max(1) as u32;
        Ok(tick::next(&state(self)).wait_ms.min(due_ms))
    }

    /// Gives what is ready to the publisher; the engine keeps it, in order, while its queue is full. Without a connection
    /// the publisher answers each message as lost.
    fn hand_over(&mut self) {
        let broker = &mut self.broker;
        self.engine
            .hand_over(|publications| broker.publish(publications).err().unwrap_or_default());
    }

    /// ms since this worker began.
    fn now_ms(&self) -> u64 {
        self.began.elapsed().as_millis() as u64
    }

    // ---- everything else --------------------------------------------------------------------------------------------

    fn take_settings(&mut self) {
        self.settings = Settings::snapshot();
        if let Some(last) = self.broker.reconfigure(self.settings.broker.clone()) {
            self.conclude_all(last);
            self.engine.release_all("the settings of the broker changed");
        }
        self.leases_due = Instant::now();
    }

    /// What needs no haste: changed session defaults, the count of what waits, what is old.
    fn look_around(&mut self, now: Instant) -> Result<(), Failure> {
        let store = &self.store;
        if now >= self.config_check_due {
            self.config_check_due = now + CONFIG_CHECK_EVERY;
            let defaults = in_transaction(c"outbox: look at settings", Durability::Relaxed, || {
                store.session_defaults()
            })?;
            if defaults != self.session_defaults {
                pgrx::log!(
                    "outbox {}: settings of the database or role changed, starts anew",
                    self.id
                );
                self.finish();
                signals::exit(0);
            }
        }
        if now >= self.count_due && self.first && (self.idle || !self.counted) {
            self.count_due = now + COUNT_EVERY;
            self.count_pending()?;
            self.counted = true;
        }
        if self.first {
            self.upkeep.tend(now, &self.id, store, &self.settings.retention);
        }
        Ok(())
    }

    /// Sets the counter of the status view right. Exact while little waits; a large backlog is counted once, at start.
    fn count_pending(&self) -> Result<(), Failure> {
        let Some(database) = shmem::my_database() else {
            return Ok(());
        };
        let store = &self.store;
        let before = database.pending();
        let limit = if self.counted {
            COUNT_ROWS_MAX
        } else {
            FIRST_COUNT_ROWS_MAX
        };
        let counted = in_transaction(c"outbox: count", Durability::Relaxed, || {
            let counted = store.count_pending(limit)?;
            match counted < limit {
                true => Ok(Some(counted)),
                false if limit == FIRST_COUNT_ROWS_MAX => Ok(Some(store.estimate_pending()?.max(counted))),
                false => Ok(None),
            }
        })?;
        if let Some(counted) = counted {
            database.correct_pending(counted - before);
        }
        Ok(())
    }

    /// The orderly end: what the broker confirms within a moment is settled, the rest is released, the leases go back.
    fn finish(&mut self) {
        let deadline = Instant::now() + LAST_OUTCOMES;
        while self.engine.outstanding() > 0 && self.broker.is_connected() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            latch::wait(self.broker.event_fd(), left.as_millis() as i64);
            self.take_outcomes(Instant::now());
        }
        let last = self.broker.stop(LAST_WORDS_TO_BROKER);
        self.conclude_all(last);
        self.engine.release_all("the worker ended");
        let ended = self.settle(LAST_TRANSACTION_MS).and_then(|()| {
            held_transaction(c"outbox: leave", LAST_TRANSACTION_MS, Durability::Relaxed, || {
                self.store.leave()
            })
        });
        match ended {
            Ok(()) => pgrx::log!("outbox {}: ended", self.id),
            Err(failure) => pgrx::log!("outbox {}: ended; its leases run out: {}", self.id, failure.message),
        }
    }
}

/// Before the other workers are told that this one has ended: its publisher thread lives on for a moment.
unsafe extern "C-unwind" fn stop_publishing(_code: i32, _arg: pgrx::pg_sys::Datum) {
    DEADLINE.end();
}

fn tables<'a>(store: &'a Store, settings: &Settings, row_token: i64, timeout_ms: i32) -> Tables<'a> {
    Tables {
        store,
        timeout_ms,
        dead_blocks: settings.rules.dead_blocks,
        row_token,
        claim_ttl_s: settings.claim_ttl_s,
        lane_by_lane: false,
        wal_position: 0,
        missed: 0,
    }
}

fn count_settled(batch: &[Settlement]) {
    let Some(database) = shmem::my_database() else { return };
    let (mut published, mut failed, mut gone) = (0, 0, 0);
    for settlement in batch {
        match settlement.disposition {
            Disposition::Publish => (published, gone) = (published + 1, gone + 1),
            Disposition::Dead { .. } => (failed, gone) = (failed + 1, gone + 1),
            Disposition::Retry { .. } => failed += 1,
            Disposition::Release { .. } | Disposition::Wait => {}
        }
    }
    database.settled(published, failed, gone, now_us());
}
