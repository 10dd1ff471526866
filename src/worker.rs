//! A worker: delivers the messages of one database. Its loop reads like the table in ARCHITECTURE.md: take outcomes and
//! settle, tend the leases, claim, hand over, wait. Main thread of its own process; the publisher thread is behind
//! `broker`. Policy is in crates/core; here is the order of things and what happens when one fails.

use crate::api::DEFAULT_DESTINATION;
use crate::broker::{Broker, Outcomes, Status};
use crate::config::Settings;
use crate::pg::bgworker;
use crate::pg::txn::{self, Durability, Failure};
use crate::pg::{catalog, latch, signals};
use crate::store::{Claimed, Settlement, Sharing, Store, now_us};
use crate::{launcher, shmem};
use outbox_core::budget;
use outbox_core::lease;
use outbox_core::message::{Outcome, Pointer, Publication};
use outbox_core::partition::Partition;
use outbox_core::route::Route;
use outbox_core::settle::{Disposition, decide};
use outbox_core::tick::{self, TickState};
use pgrx::spi::SpiResult;
use std::collections::{HashMap, HashSet};
use std::ffi::CStr;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// Messages claimed and not settled, at most: one batch on the wire while the next is claimed.
const WINDOW: usize = 2000;
/// Rows of one settle, at most.
const SETTLE_ROWS_MAX: usize = 2000;
/// No statement of a worker may take longer.
const STATEMENT_TIMEOUT_MS: i32 = 30_000;
/// Wait after a transaction failed.
const PAUSE_AFTER_FAILURE_MS: u32 = 500;
/// At the end: how long outcomes are waited for, and how long each last transaction may take. A fast shutdown must be
/// through within 2 s, whatever the broker does.
const LAST_OUTCOMES: Duration = Duration::from_millis(700);
const LAST_TRANSACTION_MS: i32 = 300;
const LAST_WORDS_TO_BROKER: Duration = Duration::from_millis(200);

const CONFIG_CHECK_EVERY: Duration = Duration::from_secs(1);
const MAINTENANCE_EVERY: Duration = Duration::from_secs(60);
const COUNT_EVERY: Duration = Duration::from_secs(10);
const COUNT_ROWS_MAX: i64 = 10_000;
const FIRST_COUNT_ROWS_MAX: i64 = 1_000_000;
const TRIM_ROWS: i32 = 5_000;

pub fn main(argument: u64) -> ! {
    let (database, number) = launcher::unpack(argument);
    signals::install();
    let slot = shmem::worker_starts(database);
    if shmem::is_vacated(database) {
        signals::exit(0);
    }
    bgworker::connect(database.into(), shmem::worker_role().into());
    txn::set_for_session(c"search_path", c"pg_catalog, pg_temp");
    // A settle that a crash undoes would be sent again: wait for the disk. Claims and heartbeats need not.
    txn::set_for_session(c"synchronous_commit", c"on");
    txn::set_for_session(c"lock_timeout", c"10s");
    txn::set_for_session(c"jit", c"off");
    let mut worker = Worker::start(number, slot);
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

struct Worker {
    id: String,
    store: Store,
    sharing: Sharing,
    settings: Settings,
    /// What ALTER DATABASE and ALTER ROLE said when this session began.
    session_defaults: String,
    broker: Broker,
    /// Leases held, with their epoch.
    held: Vec<(Partition, i64)>,
    /// Held, but wanted by another worker: no more claims, given back once nothing of it is in flight.
    leaving: HashSet<Partition>,
    /// With leasing off: the token of this process' claims, negative.
    row_token: i64,
    in_flight: HashMap<u64, InFlight>,
    /// Claimed and made ready, but the publisher's queue was full.
    ready: Vec<Publication>,
    unsettled: Vec<Settlement>,
    next_handle: u64,
    /// Partitions that filled their share of the last claim.
    hungry: HashSet<Partition>,
    claims: u64,
    last_claim_was_full: bool,
    idle: bool,
    slot: Option<&'static shmem::Worker>,
    reported: Option<Status>,
    leases_due: Instant,
    config_check_due: Instant,
    maintenance_due: Instant,
    count_due: Instant,
    counted: bool,
}

/// A message between claim and settle.
struct InFlight {
    tid: String,
    pointer: Pointer,
}

impl Worker {
    fn start(number: u32, slot: Option<&'static shmem::Worker>) -> Self {
        let id = format!("server-{}", number + 1);
        let opened = in_transaction(c"outbox: start", Durability::Relaxed, || {
            let store = Store::open(&id)?;
            let sharing = store.sharing()?;
            let session_defaults = store.session_defaults()?;
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
        }
        let settings = Settings::snapshot();
        let now = Instant::now();
        pgrx::log!("outbox {id}: started");
        Self {
            broker: Broker::new(settings.broker.clone(), id.clone()),
            row_token: -(uuid::Uuid::new_v4().as_u64_pair().0 as i64 & i64::MAX).max(1),
            id,
            store,
            sharing,
            settings,
            session_defaults,
            held: Vec::new(),
            leaving: HashSet::new(),
            in_flight: HashMap::new(),
            ready: Vec::new(),
            unsettled: Vec::new(),
            next_handle: 1,
            hungry: HashSet::new(),
            claims: 0,
            last_claim_was_full: false,
            idle: false,
            slot,
            reported: None,
            leases_due: now,
            config_check_due: now,
            maintenance_due: now,
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
            .settle(STATEMENT_TIMEOUT_MS)
            .and_then(|()| self.tend_leases(now)) // the first heartbeat makes the row that report writes to
            .and_then(|()| self.report())
            .and_then(|()| self.look_around(now))
            .and_then(|()| self.claim());
        if let Some(slot) = self.slot {
            slot.set_in_flight(self.in_flight.len());
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
            self.release_all("the publisher ended");
        }
    }

    fn conclude_all(&mut self, outcomes: Outcomes) {
        for (handle, outcome) in outcomes {
            self.conclude(handle, &outcome);
        }
    }

    fn conclude(&mut self, handle: u64, outcome: &Outcome) {
        let Some(message) = self.in_flight.remove(&handle) else {
            return;
        };
        let attempts = message.pointer.attempts.max(0) as u32;
        let seed = handle ^ now_us() as u64;
        let disposition = decide(outcome, attempts, &self.settings.retry, seed);
        self.unsettled.push(Settlement {
            tid: message.tid,
            pointer: message.pointer,
            disposition,
        });
    }

    /// Whatever is with the publisher counts as lost: it may or may not have arrived.
    fn release_all(&mut self, reason: &str) {
        self.ready.clear();
        for (_, message) in self.in_flight.drain() {
            let disposition = Disposition::Release { reason: reason.into() };
            self.unsettled.push(Settlement {
                tid: message.tid,
                pointer: message.pointer,
                disposition,
            });
        }
    }

    fn settle(&mut self, timeout_ms: i32) -> Result<(), Failure> {
        while !self.unsettled.is_empty() {
            let batch = &self.unsettled[..self.unsettled.len().min(SETTLE_ROWS_MAX)];
            let store = &self.store;
            let changed = held_transaction(c"outbox: settle", timeout_ms, Durability::Full, || {
                let changed = store.settle(batch)?;
                if changed == batch.len() {
                    return Ok(changed);
                }
                // Rows that moved (VACUUM FULL) are found again by key. Rows that are gone or carry another token are
                // no longer ours.
                Ok(changed + store.settle_by_key(batch)?)
            })?;
            if changed < batch.len() {
                let missed = batch.len() - changed;
                pgrx::log!(
                    "outbox {}: {missed} of {} messages were no longer ours to settle",
                    self.id,
                    batch.len()
                );
            }
            count_settled(batch);
            for failed in batch {
                if let Disposition::Dead { reason } = &failed.disposition {
                    pgrx::log!(
                        "outbox {}: message {} is a dead letter: {reason}",
                        self.id,
                        failed.pointer.seq
                    );
                }
            }
            let settled = batch.len();
            self.unsettled.drain(..settled);
        }
        Ok(())
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
        if now < self.leases_due {
            return Ok(());
        }
        let (store, settings) = (&self.store, &self.settings);
        let in_use: HashSet<Partition> = self
            .in_flight
            .values()
            .map(|m| m.pointer.partition)
            .chain(self.unsettled.iter().map(|s| s.pointer.partition))
            .collect();
        let (id, sharing, before) = (&self.id, self.sharing, &self.held);
        let (held, leaving) = in_transaction(c"outbox: leases", Durability::Relaxed, || {
            let workers = store.heartbeat(bgworker::my_pid(), settings.heartbeat_ttl_s)?;
            if sharing == Sharing::RowClaims {
                return Ok((Vec::new(), HashSet::new()));
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
            let wanted: Vec<(Partition, i64)> = ours.iter().chain(&busy).copied().collect();
            let renewed = store.renew(&wanted, settings.lease_ttl_s)?;
            let mut held: Vec<(Partition, i64)> = wanted
                .into_iter()
                .filter(|(partition, _)| renewed.contains(partition))
                .collect();
            held.extend(store.take(&acquire, settings.lease_ttl_s)?);
            held.sort_unstable();
            Ok((held, busy.into_iter().map(|(partition, _)| partition).collect()))
        })?;
        if held.len() != self.held.len() {
            pgrx::log!("outbox {}: owns {} partitions", self.id, held.len());
        }
        self.held = held;
        self.leaving = leaving;
        // Soon again while a partition waits to be given back, or while there is none to own yet.
        let soon = !self.leaving.is_empty() || (self.held.is_empty() && self.sharing == Sharing::Leases);
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
        let state = |worker: &Self| TickState {
            enabled: worker.settings.enabled,
            connected: worker.broker.is_connected(),
            blocked: false, // blocked is a state of its own, in which it is not connected
            owned_partitions: match worker.sharing {
                Sharing::Leases => worker.held.len() - worker.leaving.len(),
                Sharing::RowClaims => 1,
            },
            outstanding: worker.in_flight.len(),
            window: WINDOW,
            queue_has_room: worker.ready.is_empty(),
            last_claim_was_full: worker.last_claim_was_full,
            woken: false,
            idle_backoff_ms: worker.settings.idle_backoff_ms,
        };
        self.hand_over();
        let Some(room) = tick::next(&state(self)).claim else {
            return Ok(tick::next(&state(self)).wait_ms);
        };
        let limit = self.settings.batch_size.min(room);
        let (claimed, wal_position) = self.claim_rows(limit)?;
        self.last_claim_was_full = claimed.len() as u32 >= limit || !self.hungry.is_empty();
        self.idle = claimed.is_empty();
        if !claimed.is_empty() {
            self.make_ready(claimed);
            // What a crash could still undo must not be sent: a commit with synchronous_commit off is visible before
            // it is on disk.
            txn::flush_wal(wal_position);
            self.hand_over();
        }
        Ok(if self.unsettled.is_empty() {
            tick::next(&state(self)).wait_ms
        } else {
            0
        })
    }

    fn claim_rows(&mut self, limit: u32) -> Result<(Vec<Claimed>, u64), Failure> {
        self.claims += 1;
        let store = &self.store;
        if self.sharing == Sharing::RowClaims {
            let (token, ttl_s) = (self.row_token, self.settings.claim_ttl_s);
            return in_transaction(c"outbox: claim", Durability::Relaxed, || {
                store.claim_unleased(DEFAULT_DESTINATION, token, ttl_s, limit)
            });
        }
        let leases: Vec<(Partition, i64)> = self
            .held
            .iter()
            .copied()
            .filter(|(partition, _)| !self.leaving.contains(partition))
            .collect();
        let hungry: Vec<bool> = leases
            .iter()
            .map(|(partition, _)| self.hungry.contains(partition))
            .collect();
        let shares = budget::shares(limit, &hungry, self.claims);
        let (claimed, position) = in_transaction(c"outbox: claim", Durability::Relaxed, || {
            store.claim(DEFAULT_DESTINATION, &leases, &shares)
        })?;
        let mut counts: HashMap<Partition, u32> = HashMap::new();
        for message in &claimed {
            *counts.entry(message.pointer.partition).or_default() += 1;
        }
        self.hungry = leases
            .iter()
            .zip(&shares)
            .filter(|((partition, _), share)| **share > 0 && counts.get(partition).is_some_and(|n| n >= share))
            .map(|((partition, _), _)| *partition)
            .collect();
        Ok((claimed, position))
    }

    /// Turns claimed messages into publications. One that cannot become one is settled as dead, alone.
    fn make_ready(&mut self, claimed: Vec<Claimed>) {
        let route = Route {
            exchange: &self.settings.broker.exchange,
            template: &self.settings.routing_key,
        };
        for message in claimed {
            let handle = self.next_handle;
            self.next_handle += 1;
            let publication = match &message.event {
                None => Err(format!("the event store has no event with seq {}", message.pointer.seq)),
                Some(event) => outbox_core::envelope::publication(handle, &message.pointer, event, &route)
                    .map_err(|refusal| refusal.to_string()),
            };
            match publication {
                Ok(publication) => {
                    self.ready.push(publication);
                    self.in_flight.insert(
                        handle,
                        InFlight {
                            tid: message.tid,
                            pointer: message.pointer,
                        },
                    );
                }
                Err(reason) => {
                    let disposition = Disposition::Dead { reason };
                    self.unsettled.push(Settlement {
                        tid: message.tid,
                        pointer: message.pointer,
                        disposition,
                    });
                }
            }
        }
    }

    /// Gives what is ready to the publisher; keeps it, in order, while its queue is full. Without a connection the
    /// publisher answers each message as lost.
    fn hand_over(&mut self) {
        if let Err(refused) = self.broker.publish(std::mem::take(&mut self.ready)) {
            self.ready = refused;
        }
    }

    // ---- everything else --------------------------------------------------------------------------------------------

    fn take_settings(&mut self) {
        self.settings = Settings::snapshot();
        if let Some(last) = self.broker.reconfigure(self.settings.broker.clone()) {
            self.conclude_all(last);
            self.release_all("the settings of the broker changed");
        }
        self.leases_due = Instant::now();
    }

    /// What needs no haste: changed session defaults, the count of what waits, old history.
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
        if now >= self.count_due && self.is_first() && (self.idle || !self.counted) {
            self.count_due = now + COUNT_EVERY;
            self.count_pending()?;
            self.counted = true;
        }
        if now >= self.maintenance_due && self.is_first() {
            let retention_s = self.settings.retention_s;
            let trimmed = in_transaction(c"outbox: trim history", Durability::Relaxed, || {
                store.purge_workers()?;
                retention_s.map_or(Ok(0), |retention_s| store.trim(retention_s, TRIM_ROWS))
            })?;
            // More may be old: go on at the next tick, not for minutes at once.
            self.maintenance_due = if trimmed < i64::from(TRIM_ROWS) {
                now + MAINTENANCE_EVERY
            } else {
                now
            };
        }
        Ok(())
    }

    /// Whether this worker does what one worker of the database must do.
    fn is_first(&self) -> bool {
        self.id == "server-1"
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
        while !self.in_flight.is_empty() && self.broker.is_connected() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            latch::wait(self.broker.event_fd(), left.as_millis() as i64);
            self.take_outcomes(Instant::now());
        }
        let last = self.broker.stop(LAST_WORDS_TO_BROKER);
        self.conclude_all(last);
        self.release_all("the worker ended");
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

fn count_settled(batch: &[Settlement]) {
    let Some(database) = shmem::my_database() else { return };
    let (mut published, mut failed, mut gone) = (0, 0, 0);
    for settlement in batch {
        match settlement.disposition {
            Disposition::Publish => (published, gone) = (published + 1, gone + 1),
            Disposition::Dead { .. } => (failed, gone) = (failed + 1, gone + 1),
            Disposition::Retry { .. } => failed += 1,
            Disposition::Release { .. } => {}
        }
    }
    database.settled(published, failed, gone, now_us());
}

/// Whether this is the extension that the worker started with.
fn is_the_same(extension: u32) -> bool {
    static KNOWN: AtomicU32 = AtomicU32::new(0);
    let known = KNOWN.load(Relaxed);
    if known == 0 {
        KNOWN.store(extension, Relaxed);
    }
    known == 0 || known == extension
}

/// A transaction that holds the extension; the worker ends if there is none any more.
fn held_transaction<T>(
    what: &CStr,
    timeout_ms: i32,
    durability: Durability,
    body: impl FnOnce() -> SpiResult<T>,
) -> Result<T, Failure> {
    let result = txn::run(what, timeout_ms, durability, || {
        match catalog::hold_extension(c"outbox") {
            Some(extension) if is_the_same(extension) => body()
                .map(Some)
                .map_err(|error| format!("a statement of its own failed: {error}")),
            Some(_) => signals::exit(0), // dropped and made anew meanwhile: the launcher starts a worker that knows it
            None => Ok(None),
        }
    })?;
    result.map_or_else(
        || {
            if let Some(database) = shmem::my_database() {
                database.set_extension(false);
            }
            signals::exit(0)
        },
        Ok,
    )
}

fn in_transaction<T>(what: &CStr, durability: Durability, body: impl FnOnce() -> SpiResult<T>) -> Result<T, Failure> {
    held_transaction(what, STATEMENT_TIMEOUT_MS, durability, body)
}
