//! The pass of a worker, called by the host's loop on the worker's thread. Its order is that of ARCHITECTURE.md:
//! outcomes, settings, leases, receive, claim, hand over, settle. A step that fails is logged and tried again, and the
//! others go on. While a lease lasts, messages claimed under it are settled, even if a heartbeat failed.

use crate::destination::{Common, Condition, Destination, STOP_LIMIT};
use crate::host::{Changes, Host, Orders, Patience, Refresh};
use crate::leases::{Decided, Leases};
use crate::notices::Notices;
use crate::report::{PassEnd, Report};
use crate::settings::{Described, Settings};
use outbox_core::engine::{Held, Request, Sharing};
use outbox_core::partition::Partition;
use outbox_core::settle::Ended;
use outbox_core::standbys::{Progress, Replication, Standby, WalPosition};
use std::collections::HashSet;
use std::time::{Duration, Instant};

/// How long to wait after settings or leases could not be read. Leases are checked this often while a partition must be
/// released, or while this worker has none.
const SOON: Duration = Duration::from_millis(500);
/// The clock of the server was set if it drifts from elapsed time by more than this between two passes, in µs.
const CLOCK_WAS_SET_US: i64 = 1_000_000;

/// What the host does after a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    /// Wait for this time in ms or until a wake, then run the next pass.
    Wait(u32),
    /// A new session would start with other defaults: call `finish`, and start another worker.
    NewSession,
    /// The worker has left its slot, as ordered.
    Left,
}

/// How long [`Worker::finish`] may take.
pub struct Budget {
    /// The longest wait for answers to messages in flight.
    pub outcomes: Duration,
    /// The longest wait for the connections to close.
    pub words: Duration,
    /// How long after the connections are closed a settle may still begin.
    pub settles: Duration,
    /// Whether answers are settled as they come, not only at the end.
    pub settles_meanwhile: bool,
}

pub struct Worker<H: Host> {
    common: Common<H>,
    destinations: Vec<Destination<H>>,
    /// The last descriptions from the catalogs.
    described: Vec<Described>,
    sharing: Sharing,
    leases: Leases,
    /// Whether the last pass claimed nothing.
    is_idle: bool,
    /// Whether this worker does the tasks that only one worker of the database does.
    is_first: bool,
    /// `Host::worker_changes` as of the last check of the leases; None = they were not checked yet.
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
    report: Report,
}

/// The request of a session, with its progress.
struct Task {
    request_id: u32,
    request: Request,
    began: Instant,
    purged: bool,
    report: Report,
}

impl<H: Host> Worker<H> {
    pub fn new(host: H, sharing: Sharing, settings: Settings, not_adopted: Option<String>) -> Self {
        let (now, now_us) = (host.now(), host.now_us());
        Self {
            common: Common {
                host,
                notices: Notices::default(),
                settings,
                not_adopted,
                workers: 1,
                began: now,
                rests: false,
                leaves: false,
                held: None,
                once: false,
                standbys: Progress::default(),
            },
            destinations: Vec::new(),
            described: Vec::new(),
            sharing,
            leases: Leases::default(),
            is_idle: false,
            is_first: false,
            worker_changes: None,
            leases_due: now,
            purge_due: H::PURGE_EVERY.map(|every| now + every),
            refreshes_at_once: false,
            retry_at: None,
            clock_began_us: now_us,
            leaves_by: None,
            last_request_id: 0,
            task: None,
            report: Report::default(),
        }
    }

    pub fn host(&self) -> &H {
        &self.common.host
    }

    pub fn settings(&self) -> &Settings {
        &self.common.settings
    }

    pub fn not_adopted(&self) -> Option<&str> {
        self.common.not_adopted.as_deref()
    }

    /// The number of live workers of this database, as of the last heartbeat.
    pub fn workers(&self) -> u32 {
        self.common.workers
    }

    pub fn leases(&self) -> &[Held] {
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
        let of = |destination: &Destination<H>| {
            let why = destination.obstacle(&self.common)?;
            Some(format!("destination {}: {why}", destination.name))
        };
        self.destinations.iter().filter_map(of).collect()
    }

    // ---- a pass -----------------------------------------------------------------------------------------------------

    /// Runs one pass. Err: the worker cannot go on; the other errors were logged.
    pub fn pass(&mut self) -> Result<Pass, H::Error> {
        let host = &self.common.host;
        let now = host.now();
        host.begin_pass();
        self.common.notices.begin_pass();
        let orders = host.orders();
        self.begin_to_leave(&orders, now);
        self.take_up(&orders, now);
        for destination in &mut self.destinations {
            if !self.common.leaves {
                destination.ensure(&self.common);
            }
            destination.take_outcomes(&self.common, now);
            self.refreshes_at_once |= destination.take_recheck_request(&self.common);
        }
        self.check_clock(now);
        let mut pause_ms = None;
        if self.retry_at.is_none_or(|at| now >= at) {
            match self.refresh(now) {
                Ok(true) => return Ok(Pass::NewSession),
                Ok(false) => self.retry_at = None,
                Err(error) => {
                    self.retry_at = Some(now + SOON);
                    shorten(&mut pause_ms, self.common.host.failed(error)?);
                }
            }
        }
        self.rest(&orders, now);
        if !self.common.leaves {
            let host = &self.common.host;
            // Each may wait for a connection to close.
            for destination in self.destinations.iter_mut().take_while(|_| !host.is_ending()) {
                destination.recheck(&self.common);
            }
        }
        let (claimed, wait_ms) = self.deliver(&mut pause_ms)?;
        let in_ms = |at: Instant| at.saturating_duration_since(self.common.host.now()).as_millis() as u32;
        // The leases are renewed in time although an idle worker waits longer.
        let wait_ms = self.retry_at.map_or(wait_ms.min(in_ms(self.leases_due)), in_ms);
        let wait_ms = wait_ms.min(pause_ms.unwrap_or(u32::MAX));
        self.is_idle = claimed == 0;
        for destination in &mut self.destinations {
            destination.record_in_flight();
            destination.let_go(&self.common);
        }
        let is_well = pause_ms.is_none() && self.retry_at.is_none();
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
        let common = &self.common;
        let by = (self.destinations.iter_mut()).filter_map(|destination| destination.arm_wake(common, polls));
        by.min().map_or(wait_ms, |by| wait_ms.min(by))
    }

    fn begin_to_leave(&mut self, orders: &Orders, now: Instant) {
        if let Some(limit) = orders.leave
            && self.leaves_by.is_none()
        {
            self.leaves_by = Some(now + limit / 2);
            self.common.leaves = true;
            self.destinations
                .iter()
                .for_each(|destination| destination.request_stop(limit));
        }
    }

    /// Whether it was ordered to leave, and either nothing is in flight any more or its time is up.
    fn has_left(&self) -> bool {
        let by = |leaves_by| self.outstanding() == 0 || self.common.host.now() >= leaves_by;
        self.leaves_by.is_some_and(by)
    }

    /// Decides whether this pass may claim anything.
    fn rest(&mut self, orders: &Orders, now: Instant) {
        let has_no_share = orders.share_by.is_some_and(|by| !self.has_its_share(by, now));
        let is_over = self.leases.are_over(self.common.host.boottime_ns());
        (self.common.held, self.common.once) = (orders.held, orders.once);
        self.common.rests = self.common.leaves || orders.rests || orders.held.is_some() || has_no_share || is_over;
    }

    fn has_its_share(&self, by: Instant, now: Instant) -> bool {
        self.sharing == Sharing::RowClaims || self.leases.held.len() >= self.leases.desired || now >= by
    }

    /// Whether there is nothing to do. If so, the slot may go to another database at once.
    fn is_at_rest(&self) -> bool {
        let nothing_waits = self.common.host.nothing_waits();
        self.destinations.iter().all(|destination| {
            destination.is_at_rest(&self.common) || (nothing_waits && destination.outstanding() == 0)
        })
    }

    /// Reports the pass to the host.
    fn end_pass(&mut self, began: Instant, claimed: usize, wait_ms: u32, is_at_rest: bool) {
        let mut ended = Ended::default();
        for destination in &mut self.destinations {
            ended.add(destination.take_ended());
        }
        let report = std::mem::take(&mut self.report);
        let host = &self.common.host;
        host.end_pass(PassEnd {
            report: Report {
                claimed: claimed as u64,
                published: ended.published,
                failed: ended.retried + ended.all_dead(),
                duration_us: host.now().saturating_duration_since(began).as_micros() as u64,
                backoff_ms: wait_ms,
                active_workers: self.common.workers as usize,
                desired: self.leases.desired,
                owned: self.leases.held.len(),
                ..report
            },
            is_at_rest,
            in_flight: self.outstanding(),
            awaits: self.destinations.iter().any(Destination::awaits),
        });
    }

    // ---- claims and settles -----------------------------------------------------------------------------------------

    /// Claims and settles for all destinations. A settle waits for the disk, and all destinations wait with it. So
    /// ready messages are handed over first. Returns the number of messages taken, and how long to wait, in ms.
    fn deliver(&mut self, pause_ms: &mut Option<u32>) -> Result<(usize, u32), H::Error> {
        let (mut claimed, mut wait_ms) = (0, self.common.settings.idle_backoff_ms);
        self.check_standbys(pause_ms)?;
        for index in 0..self.destinations.len() {
            claimed += self.begin_claims(index); // for all destinations: it also decides that one may not claim
        }
        let common = &self.common;
        let (last, first): (Vec<usize>, Vec<usize>) =
            (0..self.destinations.len()).partition(|index| self.destinations[*index].settles_first(common));
        let mut served = Vec::with_capacity(self.destinations.len());
        for index in first.into_iter().chain(last) {
            if self.common.host.is_ending() {
                break;
            }
            match self.claim(index, &mut claimed, &mut served) {
                Ok(ms) => wait_ms = wait_ms.min(ms),
                Err(error) => shorten(pause_ms, self.common.host.failed(error)?), // the others go on
            }
        }
        // Confirmed messages are settled even while nothing can be claimed.
        for index in served {
            if self.destinations[index].is_settle_due(&self.common) {
                let had_room = self.destinations[index].has_room(&self.common);
                if let Some(came) = self.receive() {
                    claimed += came;
                    wait_ms = 0; // the next pass claims handoffs that were given up or have to wait for this settle
                }
                if let Err(error) = self.settle(index, &mut claimed) {
                    shorten(pause_ms, self.common.host.failed(error)?);
                    if self.retry_at.is_some() {
                        break; // the database fails, not this destination alone
                    }
                    continue;
                }
                if !had_room && self.destinations[index].has_room(&self.common) {
                    wait_ms = 0; // the claim of this pass came too early
                }
            }
            let settles_in_ms = self.destinations[index].settles_in_ms(&self.common);
            wait_ms = settles_in_ms.map_or(wait_ms, |ms| wait_ms.min(ms));
        }
        let checks_in_ms = self.check_standbys(pause_ms)?;
        Ok((claimed, checks_in_ms.map_or(wait_ms, |ms| wait_ms.min(ms))))
    }

    /// If standbys must have a commit before its message is sent: learns how much WAL they have, while messages wait for
    /// them. Returns in how many ms to check again; None = no message waits.
    fn check_standbys(&mut self, pause_ms: &mut Option<u32>) -> Result<Option<u32>, H::Error> {
        if self.common.settings.standbys.is_none() || self.common.leaves {
            return Ok(None);
        }
        match self.read_standbys() {
            Ok(checks_in_ms) => Ok(checks_in_ms),
            Err(error) => {
                shorten(pause_ms, self.common.host.failed(error)?); // nothing is sent meanwhile
                Ok(None)
            }
        }
    }

    fn read_standbys(&mut self) -> Result<Option<u32>, H::Error> {
        let awaited = |destinations: &[Destination<H>]| destinations.iter().filter_map(Destination::awaited_wal).max();
        let are_new = self.destinations.iter().any(Destination::lacks_wal_position);
        let now_ms = self.common.now_ms();
        let is_due = |needed| self.common.standbys.is_check_due(needed, now_ms);
        let was_awaited = awaited(&self.destinations).is_some_and(|needed| !self.common.standbys.may_send(needed));
        if are_new || awaited(&self.destinations).is_some_and(is_due) {
            let Replication { durable, connected } = self.common.host.replication()?;
            for destination in &mut self.destinations {
                destination.set_wal_position(durable);
            }
            self.take_replication(&connected, awaited(&self.destinations).unwrap_or(durable), now_ms);
        }
        let standbys = &self.common.standbys;
        Ok(match awaited(&self.destinations) {
            None => None,
            Some(needed) if !standbys.may_send(needed) => Some(standbys.checks_in_ms(now_ms) as u32),
            Some(_) => (are_new || was_awaited).then_some(0), // the next pass hands them over
        })
    }

    /// Takes over what the standbys have, for messages that need WAL up to `needed`.
    fn take_replication(&mut self, connected: &[Standby], needed: WalPosition, now_ms: u64) {
        let Some(standbys) = &self.common.settings.standbys else {
            return;
        };
        if self.common.standbys.checked(standbys, connected, needed, now_ms) {
            let text = match self.common.standbys.is_degraded() {
                true => "the standbys of outbox.standby_names are behind: messages are sent without them",
                false => "the standbys of outbox.standby_names have caught up: messages wait for them again",
            };
            self.common.host.log(None, format_args!("{text}"));
        }
    }

    /// Settles first if it must, reports and claims for one destination. Adds the number of messages taken to `claimed`
    /// and the destination to `served`. Returns how long to wait, in ms.
    fn claim(&mut self, index: usize, claimed: &mut usize, served: &mut Vec<usize>) -> Result<u32, H::Error> {
        *claimed += self.receive().unwrap_or_default(); // messages that arrived while another destination was served
        if self.destinations[index].settles_first(&self.common) {
            self.settle(index, claimed)?;
            *claimed += self.begin_claims(index) + self.receive().unwrap_or_default();
        }
        served.push(index);
        self.destinations[index].report(&self.common)?;
        let may_claim = self.may_claim(index);
        let (count, wait_ms) = self.destinations[index].claim(&self.common, may_claim)?;
        *claimed += count;
        Ok(wait_ms)
    }

    /// Settles ended messages in parts, and receives from the fast path between the parts.
    fn settle(&mut self, index: usize, claimed: &mut usize) -> Result<(), H::Error> {
        while self.destinations[index].settle_some(&self.common)? {
            *claimed += self.receive().unwrap_or_default();
        }
        Ok(())
    }

    fn begin_claims(&mut self, index: usize) -> usize {
        let may_claim = self.may_claim(index);
        self.destinations[index].begin_claims(&self.common, may_claim)
    }

    /// Whether this destination may claim. Not while another one tries a message alone: if that message crashes the
    /// worker, the crash would be charged to every message claimed beside it.
    fn may_claim(&self, index: usize) -> bool {
        let mut others = (self.destinations.iter().enumerate()).filter(|(other, _)| *other != index);
        self.retry_at.is_none() && others.all(|(_, other)| !other.tries_one_alone())
    }

    /// Takes ready messages from the fast path for all destinations. Returns their number; None = no slot is ready.
    fn receive(&mut self) -> Option<usize> {
        self.common.host.is_something_ready().then(|| {
            let indexes = 0..self.destinations.len();
            let may_take: Vec<usize> = indexes.filter(|index| self.may_claim(*index)).collect();
            let receive = |index: usize| self.destinations[index].receive(&self.common);
            may_take.into_iter().map(receive).sum()
        })
    }

    // ---- requests of a session --------------------------------------------------------------------------------------

    /// Begins a new request, and drops one that no session waits for any more.
    fn take_up(&mut self, orders: &Orders, now: Instant) {
        let request_id = orders.request.map_or(0, |(request_id, _)| request_id);
        if self.task.as_ref().is_some_and(|task| task.request_id != request_id) {
            self.drop_task();
        }
        let Some((request_id, request)) = orders
            .request
            .filter(|(request_id, _)| *request_id != self.last_request_id)
        else {
            return;
        };
        self.last_request_id = request_id;
        self.task = Some(Task {
            request_id,
            request,
            began: now,
            purged: false,
            report: Report::default(),
        });
        for destination in &mut self.destinations {
            destination.begin_request(request);
        }
        self.leases_due = now;
        self.refreshes_at_once = true; // the request must see changes made just before it
    }

    fn drop_task(&mut self) {
        self.task = None;
        self.destinations.iter_mut().for_each(Destination::end_request);
    }

    /// Removes dead workers: every `PURGE_EVERY`, and once for each request. Only the first worker does.
    fn purge(&mut self, now: Instant) -> Result<(), H::Error> {
        let is_requested = self.task.as_ref().is_some_and(|task| !task.purged);
        let is_due = self.purge_due.is_some_and(|due| now >= due);
        if !self.is_first || !(is_requested || is_due) {
            return Ok(());
        }
        self.purge_due = H::PURGE_EVERY.map(|every| now + every);
        if let Some(task) = &mut self.task {
            task.purged = true;
        }
        let purged = self.common.host.purge()?;
        self.report.purged_stale += purged;
        if let Some(task) = &mut self.task {
            task.report.purged_stale += purged;
        }
        Ok(())
    }

    /// Reports the progress of the request at the end of a pass. With `share_by` the request is not done until this
    /// worker has its share of the partitions, or until that time.
    fn answer(&mut self, share_by: Option<Instant>) {
        let now = self.common.host.now();
        let has_share = share_by.is_none_or(|by| self.has_its_share(by, now));
        let (common, destinations) = (&self.common, &self.destinations);
        let Some(task) = &mut self.task else { return };
        let tallies = || destinations.iter().map(Destination::tally);
        let report = &mut task.report;
        report.claimed = tallies().map(|tally| tally.claimed).sum();
        report.published = tallies().map(|tally| tally.published).sum();
        report.failed = tallies().map(|tally| tally.failed).sum();
        report.duration_us = now.saturating_duration_since(task.began).as_micros() as u64;
        report.backoff_ms = match report.claimed {
            0 => common.settings.idle_backoff_ms,
            _ => 0,
        };
        report.active_workers = common.workers as usize;
        (report.desired, report.owned) = (self.leases.desired, self.leases.held.len());
        let mut each = destinations.iter();
        let done = has_share && each.all(|destination| destination.has_done_request(common));
        common.host.answer(task.request_id, report, done);
        if done {
            self.drop_task();
        }
    }

    // ---- leases -----------------------------------------------------------------------------------------------------

    /// Makes the pass check the leases at once if the server's clock jumped. Leases follow that clock, and the
    /// publishers' deadline follows one that goes on while the machine is suspended. The timers of this process follow
    /// neither. So after a jump the leases may have run out long before the next regular check.
    fn check_clock(&mut self, now: Instant) {
        let began_us = self.common.host.now_us() - self.common.since_began().as_micros() as i64;
        if (began_us - self.clock_began_us).abs() > CLOCK_WAS_SET_US {
            let host = &self.common.host;
            host.log(None, format_args!("the clock was set; checking the leases"));
            self.leases_due = now;
        }
        self.clock_began_us = began_us;
    }

    /// Writes the heartbeat and renews, takes and releases leases by the plan, if that is due or workers changed.
    fn tend_leases(&mut self, now: Instant) -> Result<(), H::Error> {
        let host = &self.common.host;
        let changes = host.worker_changes();
        if now < self.leases_due && self.worker_changes == Some(changes) {
            return Ok(());
        }
        let requested_at_ns = host.boottime_ns();
        let in_use: HashSet<Partition> = self.destinations.iter().flat_map(Destination::in_use).collect();
        let (leases, mut decided) = (&self.leases, Decided::default());
        let tended = host.tend(self.is_idle, &mut |workers, found| {
            let plan = leases.plan(host.id(), workers, found, &in_use);
            decided = plan.1;
            plan.0
        })?;
        let is_new = self.worker_changes.is_none();
        self.is_first = tended.workers.first().is_some_and(|first| first == host.id());
        self.set_workers(tended.workers.len() as u32);
        let mut taken = 0;
        if let Some((held, lasts)) = tended.leased {
            self.give_up_what_has_run_out(&held, &decided.freed);
            taken = held.iter().filter(|lease| !self.leases.held.contains(lease)).count();
            // Counted from before the lease was written, and shortened by a tenth.
            let lasts = lasts * 9 / 10;
            self.common.host.set_deadline(Some((requested_at_ns, lasts)));
            self.leases.until_ns = Some(requested_at_ns + lasts.as_nanos() as u64);
            self.set_leases(held, &decided);
        } else {
            self.common.host.set_deadline(None);
        }
        for report in (self.task.iter_mut().map(|task| &mut task.report)).chain([&mut self.report]) {
            report.renewed_heartbeat = true;
            (report.leased, report.released) = (report.leased + taken, report.released + decided.freed.len());
        }
        if is_new || !decided.freed.is_empty() {
            self.common.host.call_others(); // this worker is new, or partitions are free
        }
        self.worker_changes = Some(changes);
        let soon = !decided.leaving.is_empty() || (self.leases.held.is_empty() && self.sharing == Sharing::Leases);
        let next = self.common.settings.lease_renew;
        self.leases_due = now + if soon { next.min(SOON) } else { next };
        Ok(())
    }

    fn set_workers(&mut self, workers: u32) {
        if workers != self.common.workers {
            self.common.workers = workers;
            for destination in &mut self.destinations {
                destination.take_limits(&self.common);
            }
        }
    }

    /// Stops the publishers that hold messages of leases which are lost or have run out. Those messages must not be
    /// sent, so this comes before the deadline is extended.
    fn give_up_what_has_run_out(&mut self, held: &[Held], freed: &[Held]) {
        let host = &self.common.host;
        let run_out = self.leases.run_out(held, freed, host.boottime_ns());
        if run_out.is_empty() {
            return;
        }
        host.log(None, format_args!("the leases have run out"));
        let is_hit = |index: &usize| !self.destinations[*index].in_use().is_disjoint(&run_out);
        let hit: Vec<usize> = (0..self.destinations.len()).filter(is_hit).collect();
        let limit = if host.is_ending() { Duration::ZERO } else { STOP_LIMIT };
        for index in &hit {
            self.destinations[*index].request_stop(limit);
        }
        let deadline = host.now() + limit;
        for index in hit {
            let left = deadline.saturating_duration_since(self.common.host.now());
            self.destinations[index].stop(&self.common, left, "the leases have run out");
            self.destinations[index].ensure(&self.common);
        }
    }

    fn set_leases(&mut self, held: Vec<Held>, decided: &Decided) {
        if held.len() != self.leases.held.len() {
            let host = &self.common.host;
            host.log(None, format_args!("owns {} partitions", held.len()));
        }
        for destination in &mut self.destinations {
            destination.set_leases(&held, &decided.leaving);
        }
        (self.leases.held, self.leases.desired) = (held, decided.desired);
    }

    // ---- settings and destinations ----------------------------------------------------------------------------------

    /// Reads the settings, then tends the leases. The settings come first: a change of them may be what ends a failure.
    /// Returns whether a new session is needed.
    fn refresh(&mut self, now: Instant) -> Result<bool, H::Error> {
        let refreshed = self.refresh_now();
        if let Ok(true) = refreshed {
            return Ok(true);
        }
        // The first heartbeat makes the row that the reports belong to.
        self.tend_leases(now).and_then(|()| self.purge(now))?;
        refreshed
    }

    /// Reads changed settings and destinations and takes them over. Returns whether a new session is needed.
    fn refresh_now(&mut self) -> Result<bool, H::Error> {
        let found = self.common.host.refresh(self.refreshes_at_once)?;
        self.refreshes_at_once = false;
        match found {
            Refresh::Skipped => Ok(false),
            Refresh::NewSession => Ok(true),
            Refresh::Changed(news) => {
                let Changes {
                    not_adopted,
                    settings,
                    described,
                } = *news;
                self.common.not_adopted = not_adopted;
                if let Some(settings) = settings.filter(|settings| *settings != self.common.settings) {
                    self.take_settings(settings);
                }
                if let Some(described) = described.filter(|described| *described != self.described) {
                    self.describe(described);
                }
                Ok(false)
            }
        }
    }

    /// Takes over new settings, and the destinations under them.
    pub fn take_settings(&mut self, settings: Settings) {
        if settings.standbys != self.common.settings.standbys {
            self.common.standbys = Progress::default(); // what other standbys had, and how long messages waited for them
        }
        self.common.settings = settings;
        self.leases_due = self.common.host.now();
        let described = std::mem::take(&mut self.described);
        self.describe(described);
    }

    /// Takes over the described destinations: adds new ones, updates known ones, and retires dropped ones.
    pub fn describe(&mut self, described: Vec<Described>) {
        for description in &described {
            if self.common.host.is_ending() {
                return; // each may wait for a connection to close
            }
            match (self.destinations.iter_mut()).find(|known| known.name == description.name) {
                Some(known) => known.describe(&self.common, description),
                None => {
                    let mut new = Destination::new(&self.common, description, self.sharing, &self.leases.held);
                    if let Some(task) = &self.task {
                        new.begin_request(task.request);
                    }
                    self.destinations.push(new);
                }
            }
        }
        let gone = |destination: &mut Destination<H>| described.iter().all(|still| still.name != destination.name);
        for mut destination in self.destinations.extract_if(.., gone) {
            let host = &self.common.host;
            let limit = if host.is_ending() { Duration::ZERO } else { STOP_LIMIT };
            if let Err(error) = destination.retire(&self.common, limit) {
                // Its unsettled messages are sent again when their lanes are read again.
                _ = host.failed(error);
            }
            destination.let_go(&self.common);
        }
        let names = self.destinations.iter().map(|destination| destination.name.clone());
        self.common.notices.serve(names);
        let names: Vec<&str> = described.iter().map(|described| described.name.as_str()).collect();
        self.common.host.serves(&names);
        self.described = described;
    }

    // ---- the end ----------------------------------------------------------------------------------------------------

    /// Ends the worker in order: waits briefly for answers, closes the connections, settles, and releases the remaining
    /// messages and the leases. `wait` waits for answers, no longer than the given time.
    pub fn finish(&mut self, budget: &Budget, wait: &mut dyn FnMut(&Self, Duration)) -> Result<(), H::Error> {
        self.common.rests = true;
        let began = self.common.host.now();
        let deadline = began + budget.outcomes;
        self.destinations.iter().for_each(Destination::wake_on_each);
        while self.destinations.iter().any(Destination::awaits_answers) {
            let left = deadline.saturating_duration_since(self.common.host.now());
            if left.is_zero() {
                break;
            }
            wait(self, left);
            let (now, mut ended) = (self.common.host.now(), Ok(()));
            for destination in &mut self.destinations {
                destination.take_outcomes(&self.common, now);
                if budget.settles_meanwhile && destination.is_settle_due(&self.common) {
                    ended = ended.and(destination.settle(&self.common, Patience::Little));
                }
            }
            if let Err(error) = ended {
                self.common.host.failed(error)?;
            }
        }
        self.destinations
            .iter()
            .for_each(|destination| destination.request_stop(budget.words));
        self.stop(budget.words, "the worker ended");
        let deadline = self.common.host.now() + budget.settles;
        let mut ended = Ok(());
        for destination in &mut self.destinations {
            // A message that is not settled in time is sent again.
            if self.common.host.now() < deadline {
                ended = ended.and(destination.settle(&self.common, Patience::Little));
            }
        }
        self.end_pass(began, 0, 0, false);
        let left = self.common.host.leave();
        ended.and(left)
    }

    /// Closes the connections and settles nothing, because the session is lost. Messages in flight may arrive, and are
    /// sent again.
    pub fn abandon(&mut self, limit: Duration) {
        self.stop(limit, "the session is lost");
    }

    fn stop(&mut self, limit: Duration, reason: &str) {
        let deadline = self.common.host.now() + limit;
        for destination in &mut self.destinations {
            let left = deadline.saturating_duration_since(self.common.host.now());
            destination.stop(&self.common, left, reason);
        }
    }
}

/// Shortens the pause that follows the failures of this pass to `ms`, or begins one.
fn shorten(pause_ms: &mut Option<u32>, ms: u32) {
    *pause_ms = Some(pause_ms.map_or(ms, |pause_ms| pause_ms.min(ms)));
}
