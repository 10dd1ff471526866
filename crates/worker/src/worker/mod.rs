//! The pass of a worker, called by the loop of its process on the worker's thread: outcomes of the publishers; settings
//! and leases (`refresh`, `heartbeat`); then messages (`deliver`). A step that fails is logged and tried again, and the
//! others go on. While a lease lasts, messages claimed under it are settled, even if a heartbeat failed.
//!
//! Only destinations with something to do take part in a pass (`roster`), so a thousand others cost it nothing.

mod deliver;
mod finish;
mod heartbeat;
mod refresh;
mod request;
mod roster;

pub use finish::FinishTimeouts;

use crate::destination::{Common, Condition, Destination};
use crate::lease_plan::Leases;
use crate::report::{PassCounts, PassEnd};
use crate::runtime::{Orders, Runtime};
use crate::settings::{Described, WorkerSettings};
use outbox_core::engine::{DueSchedule, HeldLease, Sharing};
use outbox_core::memory_budget::MemoryBudget;
use outbox_core::settle::Ended;
use outbox_core::standbys::Progress;
use request::Task;
use roster::Roster;
use std::time::{Duration, Instant};

/// How long to wait after settings or leases could not be read. Leases are checked this often while a partition must be
/// released, or while this worker has none.
const SOON: Duration = Duration::from_millis(500);

/// What the runtime does after a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    /// Wait for this time in ms or until a wake, then run the next pass.
    Wait(u32),
    /// A new session would start with other defaults: call `finish`, and start another worker.
    NewSession,
    /// The worker has left its slot, as ordered.
    Left,
}

pub struct Worker<R: Runtime> {
    common: Common<R>,
    destinations: Vec<Destination<R>>,
    roster: Roster,
    /// The last descriptions from the catalogs.
    described: Vec<Described>,
    sharing: Sharing,
    leases: Leases,
    due: DueSchedule,
    /// Whether leases or destinations have changed since the last survey, or it has to find what many rewinds are for.
    needs_survey: bool,
    /// When all lanes are read from their start.
    sweep_due: Instant,
    /// Whether the last pass claimed nothing.
    is_idle: bool,
    /// Whether this worker does the tasks that only one worker of the database does.
    is_first: bool,
    /// `Runtime::worker_changes` as of the last check of the leases; None = they were not checked yet.
    worker_changes: Option<u64>,
    leases_due: Instant,
    purge_due: Option<Instant>,
    /// Whether the next refresh reads the settings in any case.
    refreshes_at_once: bool,
    /// Set if settings or leases could not be read: the time of the next try. Until they are read the worker claims
    /// nothing, but settles what it has.
    retry_at: Option<Instant>,
    /// The server's time when this worker began, in µs since 1970, computed in the last pass.
    clock_began_us: i64,
    /// When the worker leaves its slot even if messages are still in flight; None = it was not ordered to leave.
    leaves_by: Option<Instant>,
    /// The id of the last request that this worker began; 0 = none.
    last_request_id: u32,
    /// That request, until it is done.
    task: Option<Task>,
    /// The report of this pass so far.
    report: PassCounts,
}

impl<R: Runtime> Worker<R> {
    pub fn new(runtime: R, sharing: Sharing, settings: WorkerSettings, not_adopted: Option<String>) -> Self {
        let (now, now_us) = (runtime.now(), runtime.now_us());
        let memory = MemoryBudget::new(runtime.bounds().memory);
        Self {
            common: Common {
                targets: Vec::new(),
                runtime,
                settings,
                memory,
                not_adopted,
                workers: 1,
                serves_several: false,
                began: now,
                rests: false,
                leaves: false,
                held: None,
                once: false,
                standbys: Progress::default(),
            },
            destinations: Vec::new(),
            roster: Roster::default(),
            described: Vec::new(),
            sharing,
            leases: Leases::default(),
            due: DueSchedule::default(),
            needs_survey: true,
            sweep_due: now,
            is_idle: false,
            is_first: false,
            worker_changes: None,
            leases_due: now,
            purge_due: R::PURGE_EVERY.map(|every| now + every),
            refreshes_at_once: false,
            retry_at: None,
            clock_began_us: now_us,
            leaves_by: None,
            last_request_id: 0,
            task: None,
            report: PassCounts::default(),
        }
    }

    pub fn runtime(&self) -> &R {
        &self.common.runtime
    }

    pub fn settings(&self) -> &WorkerSettings {
        &self.common.settings
    }

    pub fn not_adopted(&self) -> Option<&str> {
        self.common.not_adopted.as_deref()
    }

    /// The number of live workers of this database, as of the last heartbeat.
    pub fn workers(&self) -> u32 {
        self.common.workers
    }

    pub fn leases(&self) -> &[HeldLease] {
        &self.leases.held
    }

    /// The number of partitions that this worker should own.
    pub fn desired(&self) -> usize {
        self.leases.desired
    }

    /// The condition of each destination, as last reported.
    pub fn conditions(&self) -> impl Iterator<Item = Condition<'_>> {
        self.destinations.iter().map(Destination::condition)
    }

    /// Messages claimed and not settled.
    pub fn outstanding(&self) -> usize {
        self.destinations.iter().map(Destination::outstanding).sum()
    }

    /// The bytes that claimed messages take until they have ended.
    pub fn memory_taken(&self) -> usize {
        self.common.memory.taken()
    }

    /// The number of keys in memory: their messages are in flight, or they are blocked.
    pub fn ordered_keys(&self) -> usize {
        self.destinations.iter().map(Destination::ordered_keys).sum()
    }

    /// Whether a destination that should deliver is still connecting.
    pub fn is_undecided(&self) -> bool {
        let mut destinations = self.destinations.iter();
        destinations.any(|destination| destination.may_deliver(&self.common) && destination.connects())
    }

    /// A text for each destination that should deliver and cannot: its name and the reason.
    pub fn obstacles(&self) -> Vec<String> {
        let of = |destination: &Destination<R>| {
            let why = destination.obstacle(&self.common)?;
            Some(format!("destination {}: {why}", destination.name))
        };
        self.destinations.iter().filter_map(of).collect()
    }

    /// Runs one pass. Err: the worker cannot go on; the other errors were logged.
    pub fn pass(&mut self) -> Result<Pass, R::Error> {
        let runtime = &self.common.runtime;
        let now = runtime.now();
        runtime.begin_pass();
        let orders = runtime.orders();
        self.begin_to_leave(&orders, now);
        self.take_up(&orders, now);
        self.take_recheck_requests();
        self.gather();
        for index in self.roster.active() {
            let destination = &mut self.destinations[index];
            destination.take_outcomes(&self.common, now);
            if !self.common.leaves {
                destination.ensure(&self.common);
            }
        }
        self.check_clock(now);
        let mut pause = Pause::default();
        self.remove_retired(&mut pause)?;
        if self.retry_at.is_none_or(|at| now >= at) {
            match self.refresh(now) {
                Ok(true) => return Ok(Pass::NewSession),
                Ok(false) => self.retry_at = None,
                Err(error) => {
                    self.retry_at = Some(now + SOON);
                    pause.shorten(self.common.runtime.failed(error)?);
                }
            }
        }
        self.rest(&orders, now);
        self.gather();
        if !self.common.leaves {
            for index in self.roster.active() {
                self.destinations[index].recheck(&self.common);
            }
        }
        let (claimed, wait_ms) = self.deliver(&mut pause)?;
        let in_ms = |at: Instant| at.saturating_duration_since(self.common.runtime.now()).as_millis() as u32;
        let wait_ms = wait_ms.min(self.roster.wakes_in_ms(self.common.now_ms()));
        // The leases are renewed in time although an idle worker waits longer.
        let wait_ms = self.retry_at.map_or(wait_ms.min(in_ms(self.leases_due)), in_ms);
        let wait_ms = wait_ms.min(pause.ms.unwrap_or(u32::MAX));
        self.is_idle = claimed == 0;
        for index in self.roster.active() {
            let destination = &mut self.destinations[index];
            destination.record_in_flight(&self.common);
            destination.free_slots(&self.common);
        }
        let is_well = pause.ms.is_none() && self.retry_at.is_none();
        let is_at_rest = is_well && self.is_idle && self.is_at_rest();
        self.answer(orders.share_by);
        self.end_pass(now, claimed, wait_ms, is_at_rest);
        Ok(match self.has_left() {
            true => Pass::Left,
            false => Pass::Wait(wait_ms),
        })
    }

    /// Called before each wait of `wait_ms`: sets which answers end it. Returns the longest wait, in ms. `polls`:
    /// answers cannot wake this worker, so it polls for them after this time, in ms.
    pub fn arm_wake(&mut self, wait_ms: u32, polls: Option<u32>) -> u32 {
        let Self {
            common,
            destinations,
            roster,
            ..
        } = self;
        let by = (roster.active()).filter_map(|index| destinations[index].arm_wake(common, polls));
        by.min().map_or(wait_ms, |by| wait_ms.min(by))
    }

    fn begin_to_leave(&mut self, orders: &Orders, now: Instant) {
        if let Some(limit) = orders.leave
            && self.leaves_by.is_none()
        {
            self.leaves_by = Some(now + limit / 2);
            self.common.leaves = true;
            for destination in &mut self.destinations {
                destination.wake();
                destination.request_stop(limit);
            }
        }
    }

    /// Whether it was ordered to leave, and either nothing is in flight any more or its time is up.
    fn has_left(&self) -> bool {
        let by = |leaves_by| self.outstanding() == 0 || self.common.runtime.now() >= leaves_by;
        self.leaves_by.is_some_and(by)
    }

    /// Decides whether this pass may claim anything.
    fn rest(&mut self, orders: &Orders, now: Instant) {
        let has_no_share = orders.share_by.is_some_and(|by| !self.has_its_share(by, now));
        let is_over = self.leases.are_over(self.common.runtime.boottime_ns());
        let rests = self.common.leaves || orders.rests || orders.held.is_some() || has_no_share || is_over;
        let common = &mut self.common;
        let before = (common.held, common.once, common.rests);
        (common.held, common.once, common.rests) = (orders.held, orders.once, rests);
        if before != (orders.held, orders.once, rests) {
            self.wake_all();
        }
    }

    fn has_its_share(&self, by: Instant, now: Instant) -> bool {
        self.sharing == Sharing::RowClaims || self.leases.held.len() >= self.leases.desired || now >= by
    }

    /// Whether there is nothing to do. If so, the slot may go to another database immediately.
    fn is_at_rest(&self) -> bool {
        let nothing_waits = self.common.runtime.nothing_waits();
        self.destinations.iter().all(|destination| {
            destination.is_at_rest(&self.common) || (nothing_waits && destination.outstanding() == 0)
        })
    }

    /// Reports the pass to the runtime.
    fn end_pass(&mut self, began: Instant, claimed: usize, wait_ms: u32, is_at_rest: bool) {
        let mut ended = Ended::default();
        for index in self.roster.active() {
            ended.add(self.destinations[index].take_ended());
        }
        let (outstanding, awaits) = self.in_flight();
        let report = std::mem::take(&mut self.report);
        let runtime = &self.common.runtime;
        runtime.end_pass(PassEnd {
            report: PassCounts {
                claimed: claimed as u64,
                published: ended.published,
                failed: ended.retried + ended.all_dead(),
                duration_us: runtime.now().saturating_duration_since(began).as_micros() as u64,
                backoff_ms: wait_ms,
                active_workers: self.common.workers as usize,
                desired: self.leases.desired,
                owned: self.leases.held.len(),
                ..report
            },
            is_at_rest,
            in_flight: outstanding,
            awaits,
        });
        let Self {
            common,
            destinations,
            roster,
            ..
        } = self;
        roster.active().for_each(|index| destinations[index].end_pass(common));
    }
}

/// The pause that follows the failures of a pass; None = nothing failed.
#[derive(Default)]
struct Pause {
    ms: Option<u32>,
}

impl Pause {
    fn shorten(&mut self, ms: u32) {
        self.ms = Some(self.ms.map_or(ms, |before| before.min(ms)));
    }
}
