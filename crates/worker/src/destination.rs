//! A destination as a worker serves it: its messages between claim and settle, and its connection. `worker` calls it on
//! the worker's thread. Each destination has a separate engine and connection: one that is down or slow does not delay
//! the others.

use crate::admission::AdmissionControl;
use crate::connection::{DestinationConnection, Outcomes};
use crate::runtime::Runtime;
use crate::settings::{Described, WorkerSettings};
use crate::status::{ConnectionStatus, State};
use crate::status_report::StatusReport;
use outbox_core::budget::Allowance;
use outbox_core::engine::{
    Arrived, CRASHES_ALONE, Engine, HeldLease, Portion, Request, Settlement, Sharing, StatementTimeout, Tables, Tally,
    WakePolicy,
};
use outbox_core::finding::Finding;
use outbox_core::key_order::MessageHandle;
use outbox_core::memory_budget::{MESSAGE_BYTES, MemoryBudget};
use outbox_core::message::{Event, Outcome, Pointer, Publication};
use outbox_core::partition::Partition;
use outbox_core::pass::{self, PassState};
use outbox_core::route::Route;
use outbox_core::settle::{Disposition, Ended, Rules};
use outbox_core::standbys::{Progress, WalPosition};
use outbox_transport::Answered;
use outbox_transport::kind::Kind;
use outbox_transport::kind::Target;
use std::collections::HashSet;
use std::rc::Rc;
use std::time::{Duration, Instant};

/// How long a publisher may take to end while other destinations wait for it.
pub const STOP_LIMIT: Duration = Duration::from_millis(200);

/// How long a destination lacks memory before it is reported, in ms.
const LACK_REPORTED_AFTER_MS: u64 = 5_000;
/// How long a destination may answer nothing before its connection is closed so that others get the memory of its
/// messages, in ms. Each time doubles it, so that one that is slow answers before that.
const PATIENCE_MS: u64 = 3_000;
const NEEDED: &str = "its memory was needed for other destinations";

/// The state that all destinations of one worker share. The worker writes it; the destinations read it.
pub struct Common<R: Runtime> {
    pub runtime: R,
    pub settings: WorkerSettings,
    /// The destinations that can be used.
    pub targets: Vec<Target>,
    /// The memory for the messages of all destinations.
    pub memory: Rc<MemoryBudget>,
    /// Why nothing is delivered from this database; None = the database is adopted.
    pub not_adopted: Option<String>,
    /// The number of live workers of this database, as of the last heartbeat.
    pub workers: u32,
    /// Whether the worker serves more than one destination.
    pub serves_several: bool,
    pub began: Instant,
    /// Whether the worker claims nothing: it leaves or ends, the process ordered a rest, it waits for its share of the
    /// partitions, or its leases have run out.
    pub rests: bool,
    /// Whether the worker gives up its slot: it sends nothing more.
    pub leaves: bool,
    /// Why the process holds the destinations, if it does.
    pub held: Option<&'static str>,
    /// Whether the worker claims for a request alone.
    pub once: bool,
    /// How much WAL the standbys have, if they must have a commit before its message is sent.
    pub standbys: Progress,
}

impl<R: Runtime> Common<R> {
    /// The time since this worker began, in ms.
    pub fn now_ms(&self) -> u64 {
        self.since_began().as_millis() as u64
    }

    fn now_us(&self) -> u64 {
        self.since_began().as_micros() as u64
    }

    pub fn since_began(&self) -> Duration {
        self.runtime.now().saturating_duration_since(self.began)
    }

    /// Whether enough standbys have WAL up to `position`, or need not have it.
    fn may_send(&self, position: Option<WalPosition>) -> bool {
        self.settings.standbys.is_none() || position.is_some_and(|position| self.standbys.may_send(position))
    }
}

pub struct Destination<R: Runtime> {
    pub name: String,
    /// The destination was dropped: it ends when its connection is closed and nothing of it is in flight.
    retires: bool,
    connection: DestinationConnection<R::Publisher>,
    engine: Engine,
    target: Result<Target, Finding>,
    paused: bool,
    /// Why its server gets nothing.
    not_adopted: Option<String>,
    report: StatusReport,
    /// The counts of what was settled in this pass.
    ended: Ended,
    admission: AdmissionControl,
    /// The request of a session, until it is done.
    request: Option<Request>,
    /// The wait that its claim in this pass has returned, in ms; None = it has not claimed in this pass.
    claimed_wait_ms: Option<u32>,
    /// Whether it has reported its state in this pass, if that has changed.
    has_reported: bool,
    /// How long its messages may have no answer while others lack memory, in ms.
    patience_ms: u64,
    /// None = it takes part in the next pass.
    sleep: Option<Sleep>,
}

/// A destination that has nothing in flight and nothing to claim takes no part in passes.
#[derive(Clone, Copy)]
struct Sleep {
    /// In ms since the worker began.
    until_ms: u64,
    is_at_rest: bool,
    takes_due: bool,
}

/// The condition of a destination, for screens and logs.
pub struct Condition<'a> {
    pub name: &'a str,
    pub status: &'a ConnectionStatus,
    /// When the state last changed.
    pub since: Instant,
    /// Messages claimed and not settled.
    pub in_flight: usize,
}

impl<R: Runtime> Destination<R> {
    pub fn new(
        common: &Common<R>,
        description: &Described,
        sharing: Sharing,
        leases: &[HeldLease],
        leaving: &HashSet<Partition>,
    ) -> Self {
        let runtime = &common.runtime;
        let target = description.target(&common.settings);
        let mut engine = Engine::new(&description.name, sharing, runtime.bounds(), &common.memory);
        engine.set_leases(leases.to_vec(), leaving.clone());
        let needed = target.clone().map(Target::connection);
        let mut connection = DestinationConnection::new(runtime, &description.name, needed);
        connection.ensure(runtime);
        let mut destination = Self {
            name: description.name.clone(),
            retires: false,
            connection,
            engine,
            target,
            paused: description.paused,
            not_adopted: description.not_adopted.clone(),
            report: StatusReport::new(runtime.now()),
            ended: Ended::default(),
            admission: AdmissionControl::new(common.now_us()),
            request: None,
            claimed_wait_ms: None,
            has_reported: false,
            patience_ms: PATIENCE_MS,
            sleep: None,
        };
        destination.take_limits(common);
        destination
    }

    /// Takes over a changed description or settings. If they need another connection, all claimed messages are
    /// released once this one is closed.
    pub fn describe(&mut self, common: &Common<R>, description: &Described) {
        self.wake();
        let ordering = self.rules(common).ordering;
        self.retires = false;
        self.paused = description.paused;
        self.not_adopted.clone_from(&description.not_adopted);
        self.target = description.target(&common.settings);
        self.take_limits(common);
        if self.rules(common).ordering != ordering {
            self.engine.reread_all();
        }
        let target = self.target.clone().map(Target::connection);
        self.connection.reconfigure(target, common.runtime.now());
    }

    /// Takes over the limits. Called also when the number of workers changes, because the workers share the rate limit.
    pub fn take_limits(&mut self, common: &Common<R>) {
        let target = self.target.as_ref();
        let limits = target.map_or(common.settings.limits, |target| target.limits);
        common.runtime.limit(&self.name, &limits);
        self.admission
            .rate_limit
            .set(limits.max_rate, common.workers, common.now_us());
    }

    pub fn outstanding(&self) -> usize {
        self.engine.outstanding()
    }

    pub fn ordered_keys(&self) -> usize {
        self.engine.ordered_keys()
    }

    pub fn in_use(&self) -> HashSet<Partition> {
        self.engine.in_use()
    }

    pub fn set_leases(&mut self, held: &[HeldLease], leaving: &HashSet<Partition>) {
        self.wake();
        self.engine.set_leases(held.to_vec(), leaving.clone());
    }

    /// The condition as last reported.
    pub fn condition(&self) -> Condition<'_> {
        Condition {
            name: &self.name,
            status: self.report.reported.as_ref().unwrap_or(self.connection.known_status()),
            since: self.report.since,
            in_flight: self.outstanding(),
        }
    }

    // ---- passes -----------------------------------------------------------------------------------------------------

    /// Begins its part in a pass, unless it sleeps and nothing has come for it. Returns until when it sleeps, in ms.
    pub fn begin_pass(&mut self, now_ms: u64) -> Option<u64> {
        (self.claimed_wait_ms, self.has_reported) = (None, false);
        self.sleep = (self.sleep).filter(|sleep| now_ms < sleep.until_ms && !self.connection.has_events());
        self.sleep.map(|sleep| sleep.until_ms)
    }

    /// Makes it take part in the next pass.
    pub fn wake(&mut self) {
        self.sleep = None;
    }

    /// Ends its part in a pass. It sleeps if nothing of it is in flight, and either there is nothing new to claim or it
    /// cannot claim.
    pub fn end_pass(&mut self, common: &Common<R>) {
        let is_known = self.has_reported && !self.report.is_awaited() && !self.retires;
        let lacks_memory = self.admission.lacks_memory_since_ms.is_some();
        let is_idle = is_known && self.outstanding() == 0 && self.request.is_none() && !lacks_memory;
        let may_claim = pass::next(&self.pass_state(common)).claim.is_some();
        let has_nothing_new = !may_claim || self.engine.has_read_all(common.now_ms());
        let sleeps = is_idle && has_nothing_new && self.engine.sharing() == Sharing::Leases;
        let Some(wait_ms) = self.claimed_wait_ms.filter(|_| sleeps) else {
            return;
        };
        let now = common.runtime.now();
        let step_ms = self
            .connection
            .next_step()
            .map(|at| at.saturating_duration_since(now).as_millis() as u64);
        let wait_ms = u64::from(wait_ms).min(step_ms.unwrap_or(u64::MAX));
        self.sleep = Some(Sleep {
            until_ms: common.now_ms() + wait_ms,
            is_at_rest: self.is_at_rest(common),
            takes_due: may_claim,
        });
    }

    // ---- connection -------------------------------------------------------------------------------------------------

    /// Whether the connection is still being made.
    pub fn connects(&self) -> bool {
        self.connection.status.state.is_undecided()
    }

    /// Why the destination cannot deliver, if it should and cannot.
    pub fn obstacle(&self, common: &Common<R>) -> Option<String> {
        let is_well = self.connection.is_connected() || !self.may_deliver(common);
        (!is_well).then(|| self.connection.status.in_words())
    }

    pub fn ensure(&mut self, common: &Common<R>) {
        if !self.retires {
            self.connection.ensure(&common.runtime);
        }
    }

    /// Whether a session requested a recheck since the last call. Remembers the request for `recheck` and `report`.
    pub fn take_recheck_request(&mut self, common: &Common<R>) -> bool {
        let is_new = common.runtime.take_recheck_request(&self.name);
        if is_new {
            self.wake();
            self.report.request_recheck(common.runtime.now_us());
        }
        is_new
    }

    /// Connects again immediately, if a session requested a recheck and there is no connection. A connection that works
    /// is not touched, nor a receiver that is down: it may have said when to try again.
    pub fn recheck(&mut self, common: &Common<R>) {
        if !std::mem::take(&mut self.report.wants_recheck) {
            return;
        }
        let is_tried = match self.connection.status.state {
            State::Down => self.kind().connects_first,
            state => state == State::Unconfigured,
        };
        if is_tried {
            (self.connection).close("a recheck replaced the connection", common.runtime.now());
            self.ensure(common);
        }
    }

    /// Sends nothing more. Waits for answers to sent messages in the background, for a third of `limit` at most.
    pub fn request_stop(&self, limit: Duration) {
        self.connection.request_stop(limit);
    }

    /// Closes the connection and releases the messages that have no outcome by then.
    pub fn stop(&mut self, common: &Common<R>, limit: Duration, reason: &str) {
        let last = self.connection.stop(limit);
        self.on_outcomes(common, last);
        self.engine.release_all(reason);
    }

    /// Reports the number of messages in flight. Reports the state of the connection, which outbox_health shows, if it
    /// changed, and returns whether it has.
    pub fn report(&mut self, common: &Common<R>) -> Result<bool, R::Error> {
        self.has_reported = true;
        common.runtime.report_in_flight(&self.name, self.outstanding())?;
        if self.retires {
            return Ok(false);
        }
        let off = match self.outstanding() {
            0 => State::Paused,
            _ => State::Pausing,
        };
        let status = match (self.may_deliver(common), self.why_not_adopted(common)) {
            (true, _) if common.held.is_some() => ConnectionStatus::plain(off, common.held.map(Finding::from)),
            (true, _) => match self.awaits_standbys(common) {
                Some(awaited) => ConnectionStatus::standby(awaited),
                None if self.has_lacked_memory(common) => ConnectionStatus::memory(common.memory.bytes()),
                None => self.connection.known_status().clone(),
            },
            (false, None) if common.settings.enabled => ConnectionStatus::plain(off, None),
            (false, None) => ConnectionStatus::plain(off, Some(Finding::new("disabled", "outbox.enabled is off"))),
            (false, why) => ConnectionStatus::plain(State::NotAdopted, why.map(|why| why.as_str().into())),
        };
        let kind = self.kind();
        self.report.report(&common.runtime, &self.name, status, kind)
    }

    /// Begins to end a dropped destination.
    pub fn retire(&mut self, common: &Common<R>) {
        self.wake();
        if !std::mem::replace(&mut self.retires, true) {
            self.connection
                .close("the destination was dropped", common.runtime.now());
        }
    }

    /// Whether the destination was dropped, and nothing of it is left.
    pub fn has_retired(&self) -> bool {
        self.retires && self.connection.is_closed() && self.outstanding() == 0
    }

    // ---- requests of a session --------------------------------------------------------------------------------------

    pub fn begin_request(&mut self, request: Request) {
        self.wake();
        self.request = Some(request);
        self.engine.begin_request(request);
        self.report.wants_recheck |= !request.goes_on(); // connects immediately if the connection is down
    }

    pub fn end_request(&mut self) {
        self.request = None;
        self.engine.end_request();
    }

    pub fn tally(&self) -> Tally {
        self.engine.tally()
    }

    /// Whether everything that can be done now for the request is done.
    pub fn has_done_request(&self, common: &Common<R>) -> bool {
        let may_claim = self.may_deliver(common) || self.by_hand(common).is_some();
        let connection = self.connection.is_connected() || self.connects();
        let claims_on = may_claim && connection && self.engine.claimable() > 0 && !self.engine.has_claimed();
        let is_settled = self.engine.settle_in_ms(common.now_ms()).is_none();
        !claims_on && is_settled && !self.engine.is_under_way()
    }

    /// The seq up to which a request makes this destination deliver although delivery is switched off.
    fn by_hand(&self, common: &Common<R>) -> Option<i64> {
        let may = !common.settings.enabled && !self.paused && !self.retires && self.why_not_adopted(common).is_none();
        match self.request {
            Some(Request::UpTo(seq) | Request::OnTo(seq)) if may && !self.engine.has_claimed() => Some(seq),
            _ => None,
        }
    }

    /// Whether delivery is switched on, the destination is not paused, and it and the database are adopted.
    pub fn may_deliver(&self, common: &Common<R>) -> bool {
        common.settings.enabled && !self.paused && !self.retires && self.why_not_adopted(common).is_none()
    }

    fn why_not_adopted<'a>(&'a self, common: &'a Common<R>) -> Option<&'a String> {
        common.not_adopted.as_ref().or(self.not_adopted.as_ref())
    }

    fn is_on(&self, common: &Common<R>) -> bool {
        !common.rests && (self.may_deliver(common) || self.by_hand(common).is_some())
    }

    fn rules(&self, common: &Common<R>) -> Rules {
        (self.target.as_ref()).map_or(common.settings.rules, |target| target.rules)
    }

    fn kind(&self) -> &'static Kind {
        self.target.as_ref().map_or(Kind::of_settings(), |target| target.kind)
    }

    // ---- outcomes and settle ----------------------------------------------------------------------------------------

    pub fn take_outcomes(&mut self, common: &Common<R>, now: Instant) {
        let (outcomes, is_closed) = self.connection.take(&common.targets, now);
        self.on_outcomes(common, outcomes);
        if let Some(why) = is_closed {
            self.engine.release_all(why);
        }
    }

    fn on_outcomes(&mut self, common: &Common<R>, outcomes: Outcomes) {
        if outcomes.is_empty() {
            return;
        }
        let (now_ms, now_us, rules) = (common.now_ms(), common.runtime.now_us(), self.rules(common));
        let now = common.runtime.now();
        for Answered { handle, outcome, at } in outcomes {
            let age = now.saturating_duration_since(at);
            if outcome == Outcome::Confirmed
                && let Some(pointer) = self.engine.pointer(handle)
            {
                common.runtime.confirmed(pointer, now_us - age.as_micros() as i64);
            }
            let since_ms = self.engine.waits_since_ms(now_ms, age.as_millis() as u64);
            self.engine
                .on_outcome(handle, &outcome, &rules, since_ms, now_us as u64);
        }
    }

    /// Called before each wait: sets which answers end it. Returns the longest wait for this destination, in ms.
    /// `polls`: answers cannot wake this worker, so it polls for them after this time, in ms.
    pub fn arm_wake(&mut self, common: &Common<R>, polls: Option<u32>) -> Option<u32> {
        let has_room = self.has_memory(common) && self.pass_state(common).has_room();
        let policy = match common.leaves {
            false => self.engine.wake_policy(common.now_ms(), has_room),
            true => WakePolicy::EACH,
        };
        self.connection.wake_after(policy.confirms);
        let within_ms = policy.within_ms.map(|ms| ms as u32);
        match polls {
            None => within_ms,
            Some(_) if within_ms.is_some() && has_room => within_ms,
            Some(polls) => (within_ms.is_some() || self.awaits()).then_some(polls),
        }
    }

    /// Makes each answer wake the worker.
    pub fn wake_on_each(&self) {
        self.connection.wake_after(WakePolicy::EACH.confirms);
    }

    /// Whether messages are with the peer or wait to be settled.
    pub fn awaits(&self) -> bool {
        self.engine.is_under_way() || self.engine.settle_in_ms(0).is_some()
    }

    /// Whether messages are with the peer and it is connected, so that it can answer.
    pub fn awaits_answers(&self) -> bool {
        self.engine.is_under_way() && self.connection.is_connected()
    }

    /// Gives back what cannot be sent now: the claimed messages of a destination that is off, once none is with the
    /// publisher, and the suspects of one that is not connected.
    pub fn give_back(&mut self, common: &Common<R>) {
        if !self.is_on(common) && self.engine.only_keeps_back() {
            self.engine.release_all("delivery stopped"); // a relay may deliver them
        }
        if !self.connection.is_connected() {
            self.engine.give_back_yielding(&self.rules(common)); // an operator may have discarded them
        }
    }

    /// Whether something must be settled before the next claim: a message that goes back, or a large number of
    /// outcomes. A few published messages can wait.
    pub fn must_settle(&self) -> bool {
        self.engine.must_settle()
    }

    /// Whether something is to be settled after the claims.
    pub fn is_settle_due(&self, common: &Common<R>) -> bool {
        let awaited = (self.request.is_some() || common.rests) && !self.engine.is_under_way();
        let in_ms = self.engine.settle_in_ms(common.now_ms());
        in_ms == Some(0) || (awaited && in_ms.is_some())
    }

    /// How long the next settle can wait, in ms; None = nothing is unsettled.
    pub fn settles_in_ms(&self, common: &Common<R>) -> Option<u32> {
        Some(self.engine.settle_in_ms(common.now_ms())? as u32)
    }

    /// Settles all messages that have ended.
    pub fn settle(&mut self, common: &Common<R>, timeout: StatementTimeout) -> Result<(), R::Error> {
        while self.settle_portion(common, Portion::Full, timeout)? {}
        Ok(())
    }

    /// Settles as many ended messages as other destinations can wait for. Returns whether more are left.
    pub fn settle_some(&mut self, common: &Common<R>) -> Result<bool, R::Error> {
        if R::HAS_FAST_PATH {
            return self.settle_portion(common, Portion::BesideOthers, StatementTimeout::Usual);
        }
        self.settle(common, StatementTimeout::Usual).map(|()| false)
    }

    fn settle_portion(
        &mut self,
        common: &Common<R>,
        portion: Portion,
        timeout: StatementTimeout,
    ) -> Result<bool, R::Error> {
        let (rules, now_ms, runtime) = (self.rules(common), common.now_ms(), &common.runtime);
        let (name, ended) = (&self.name, &mut self.ended);
        let settled = |batch: &[Settlement], changed: usize| {
            let counts = Ended::of_all(batch.iter().map(|settlement| &settlement.disposition));
            ended.add(counts);
            runtime.settled(name, &counts);
            log_dead(runtime, name, batch);
            if let missed @ 1.. = batch.len().saturating_sub(changed) {
                let text = format_args!("{missed} messages were not settled: they no longer belong to this worker");
                runtime.log(Some(name), text);
            }
        };
        self.engine
            .settle_batch(runtime.tables(), &rules, now_ms, portion, timeout, settled)
    }

    /// Takes the counts of what was settled since the last call.
    pub fn take_ended(&mut self) -> Ended {
        std::mem::take(&mut self.ended)
    }

    // ---- claim and hand over ----------------------------------------------------------------------------------------

    /// Whether a message is to be sent alone, because it was in flight when at least `CRASHES_ALONE` workers crashed.
    pub fn tries_one_alone(&self) -> bool {
        self.engine.has_poison_candidates(CRASHES_ALONE)
    }

    /// Whether nothing is in flight, and either all lanes are read or nothing may be claimed.
    pub fn is_at_rest(&self, common: &Common<R>) -> bool {
        if let Some(sleep) = self.sleep {
            return sleep.is_at_rest;
        }
        let state = self.pass_state(common);
        let has_read_all = state.connected && state.owned_partitions > 0 && !state.last_claim_was_full;
        let may_not = !state.enabled || self.connection.status.state == State::Unconfigured;
        self.outstanding() == 0 && (has_read_all || may_not)
    }

    /// Hands over what is ready, and decides how many messages this pass may take. Called before any destination
    /// settles, because a settle waits for the disk.
    pub fn set_allowance(&mut self, common: &Common<R>, may_claim: bool) {
        if !common.leaves {
            self.hand_over(common);
        }
        self.engine.set_read_limit(self.by_hand(common));
        let room = pass::next(&self.pass_state(common))
            .claim
            .map(|room| room.min(self.room(common)));
        let may_claim = may_claim && !(common.once && self.engine.has_claimed());
        let room = room.filter(|room| may_claim && *room > 0);
        let now_ms = common.now_ms();
        let bytes = self.engine.room_in_memory(now_ms);
        let lacks_memory = room.is_some() && bytes == 0 && !self.engine.has_read_all(now_ms);
        self.admission
            .lacks_memory(lacks_memory && self.engine.lacks_memory(now_ms), now_ms);
        let rows = u32::try_from(bytes.div_ceil(MESSAGE_BYTES)).unwrap_or(u32::MAX);
        let room = room.map(|room| room.min(rows)).filter(|room| *room > 0);
        self.admission.allowance = room.map(|room| Allowance::of_pass(room, self.batch(common)));
    }

    // ---- memory -----------------------------------------------------------------------------------------------------

    /// Since when others have taken the memory that it needs for a claim, in ms; None = they have not.
    pub fn lacks_memory_since_ms(&self) -> Option<u64> {
        self.admission.lacks_memory_since_ms
    }

    /// Whether the memory of the worker allows another claim.
    fn has_memory(&self, common: &Common<R>) -> bool {
        self.engine.room_in_memory(common.now_ms()) > 0
    }

    fn has_lacked_memory(&self, common: &Common<R>) -> bool {
        let lacks = |since_ms| common.now_ms() >= since_ms + LACK_REPORTED_AFTER_MS;
        self.connection.is_connected() && self.admission.lacks_memory_since_ms.is_some_and(lacks)
    }

    /// Gives up messages that are not on their way, because others lack memory: all of a destination that is silent, and
    /// those that another one keeps back. Returns whether there were any.
    pub fn yield_memory(&mut self, common: &Common<R>) -> bool {
        let rules = self.rules(common);
        match self.engine.silent(common.now_ms()) {
            Some(_) => self.engine.release_unsent(&rules, NEEDED),
            None => self.engine.give_up_kept_back(&rules),
        }
    }

    /// What its messages take, in bytes, if they have had no answer for so long that its connection may be closed to free
    /// that.
    pub fn stuck_bytes(&self, common: &Common<R>) -> Option<usize> {
        let (silent_ms, bytes) = self.engine.silent(common.now_ms())?;
        (silent_ms >= self.patience_ms && !self.connection.is_closing()).then_some(bytes)
    }

    /// What its messages take, in bytes, if its connection is being closed, so that it will be free soon.
    pub fn closing_bytes(&self, common: &Common<R>) -> usize {
        let silent = self.engine.silent(common.now_ms());
        silent
            .filter(|_| self.connection.is_closing())
            .map_or(0, |(_, bytes)| bytes)
    }

    /// Closes the connection. Its messages are released once it is closed.
    pub fn give_up_connection(&mut self, common: &Common<R>) {
        let runtime = &common.runtime;
        let text = format_args!("the connection is closed: messages have had no answer, and {NEEDED}");
        runtime.log(Some(&self.name), text);
        self.patience_ms = self.patience_ms.saturating_mul(2);
        self.connection.give_up(NEEDED, runtime.now());
    }

    // ---- claim ------------------------------------------------------------------------------------------------------

    /// Whether the claim of this pass reads lanes. With a poison candidate in flight nothing is brought back before its
    /// answer, which wakes this worker.
    pub fn takes_due(&self) -> bool {
        if let Some(sleep) = self.sleep {
            return sleep.takes_due;
        }
        self.admission.allowance.is_some() && !self.engine.has_poison_candidates(1)
    }

    /// Whether it would claim only because of a rewind: all that is known has been read.
    pub fn claims_only_for_rewinds(&self, now_ms: u64) -> bool {
        let may_claim = self.sleep.is_none_or(|sleep| sleep.takes_due);
        may_claim && self.engine.has_read_all(now_ms)
    }

    /// Whether a request of a session sets the seq up to which this pass claims, although delivery is switched off.
    pub fn has_read_limit(&self, common: &Common<R>) -> bool {
        self.by_hand(common).is_some()
    }

    /// Lets the next claim read a lane again from `seq` on, because a row was committed there.
    pub fn rewind(&mut self, partition: Partition, seq: i64) {
        self.engine.rewind(partition, seq);
    }

    /// A message from `seq` on that blocked others may be gone. Returns whether that matters here.
    pub fn unblock(&mut self, partition: Partition, seq: i64) -> bool {
        self.engine.unblock(partition, seq)
    }

    /// The tables had no message of this destination after the rewinds were taken. Returns false if it must look itself.
    pub fn found_none(&mut self) -> bool {
        self.request.is_none() && self.engine.found_none()
    }

    /// Lets the next claims read all lanes and blocked keys from the tables again.
    pub fn sweep(&mut self) {
        self.engine.sweep();
    }

    /// When the first of the messages is due that were settled since the last call and are to be retried, in ms; MAX =
    /// there is none.
    pub fn take_retry_at_ms(&mut self) -> u64 {
        self.engine.take_retry_at_ms()
    }

    fn batch(&self, common: &Common<R>) -> u32 {
        let others_wait = R::HAS_FAST_PATH && common.serves_several;
        self.admission.batch(common.settings.batch_size, others_wait)
    }

    /// Takes messages of the fast path, as many as this pass may, and hands them over; gives up the others. Returns the
    /// number that it took.
    ///
    /// It takes none before the worker has read a change by an operator: only a claim checks whether the destination is
    /// paused.
    pub fn receive(&mut self, common: &Common<R>, arrived: Vec<Arrived>, may_claim: bool) -> usize {
        let runtime = &common.runtime;
        let allowance = self.admission.allowance.filter(|_| may_claim && !runtime.is_stale());
        let (Ok(target), Some(mut allowance)) = (&self.target, allowance) else {
            give_up(runtime, arrived);
            return 0;
        };
        let (now_ms, limit) = (common.now_ms(), allowance.receivable());
        let make = maker(target.route());
        let count = (self.engine).receive(runtime, arrived, now_ms, limit, &target.rules, make);
        if count > 0 {
            self.admission.needs_wal = None;
            allowance.received(count);
            self.admission.allowance = Some(allowance);
            self.hand_over(common);
        }
        count
    }

    /// Claims, if this pass may, and hands over. Returns the number of messages taken, and how long to wait for more,
    /// in ms.
    pub fn claim(&mut self, common: &Common<R>, may_claim: bool) -> Result<(usize, u32), R::Error> {
        let messages = self.claim_rows(common, may_claim)?;
        let wait_ms = self.wait_ms(common, may_claim);
        self.claimed_wait_ms = Some(wait_ms).filter(|_| may_claim);
        Ok((messages, wait_ms))
    }

    fn claim_rows(&mut self, common: &Common<R>, may_claim: bool) -> Result<usize, R::Error> {
        let (runtime, now_ms) = (&common.runtime, common.now_ms());
        // Others may have taken the memory since the allowance was set.
        let has_memory = self.has_memory(common);
        if self.admission.allowance.is_some() && !has_memory {
            self.admission.lacks_memory(true, now_ms);
        }
        self.admission.allowance = self.admission.allowance.filter(|_| may_claim && has_memory);
        let (Some(allowance), Ok(target)) = (self.admission.allowance, &self.target) else {
            return Ok(0);
        };
        // The claim may take a while. Until it ends, views show this number.
        self.record_in_flight(common);
        let (limit, make) = (allowance.rows(self.batch(common)), maker(target.route()));
        self.admission.needs_wal = None;
        let result = (self.engine).claim(runtime.tables(), runtime, now_ms, limit, &target.rules, make);
        runtime.tables().make_durable();
        let result = result?;
        if result.found_locked {
            let text = format_args!("another session has locked messages; their partitions wait");
            runtime.log(Some(&self.name), text);
        }
        if let Some(allowance) = &mut self.admission.allowance {
            allowance.claimed(result.messages);
        }
        self.engine.after_claim();
        self.hand_over(common);
        if let Some(failure) = result.failure {
            return Err(failure); // after the claimed messages are handed over
        }
        // A claim of one row may have read an empty lane while messages wait in another, so `wants_more`.
        let has_none = result.messages == 0 && !self.engine.wants_more() && self.engine.outstanding() == 0;
        if has_none && !self.engine.has_put_off(now_ms) {
            self.connection.prove();
        }
        Ok(result.messages)
    }

    /// Whether there is room for another claim.
    pub fn has_room(&self, common: &Common<R>) -> bool {
        self.pass_state(common).has_room()
    }

    /// The number of messages that still fit in the window.
    fn room(&self, common: &Common<R>) -> u32 {
        common.runtime.bounds().window.saturating_sub(self.engine.outstanding()) as u32
    }

    fn pass_state(&self, common: &Common<R>) -> PassState {
        // A request is served with the full window, even right after a failure of the connection.
        let (window, outstanding) = match self.connection.small_window() {
            Some(small) if self.request.is_none() => (small, self.engine.outstanding_there()),
            _ => (common.runtime.bounds().window, self.engine.outstanding()),
        };
        PassState {
            enabled: self.is_on(common),
            connected: self.connection.is_connected(), // not while the broker blocks publishers
            owned_partitions: self.engine.claimable(),
            outstanding,
            window,
            queue_has_room: self.engine.is_ready_empty() && self.engine.has_room_in_bytes(),
            last_claim_was_full: self.engine.wants_more(),
            claims_fast_in_ms: None, // set in wait_ms, which needs it
            idle_backoff_ms: common.settings.idle_backoff_ms,
        }
    }

    /// Whether messages are ready for which the position that the standbys must have is unknown.
    pub fn lacks_wal_position(&self) -> bool {
        self.admission.needs_wal.is_none() && !self.engine.is_ready_empty()
    }

    /// Sets the position in WAL that the standbys must have, if it is unknown.
    pub fn set_wal_position(&mut self, position: WalPosition) {
        self.admission.needs_wal.get_or_insert(position);
    }

    /// The position in WAL that the standbys must have before the next message is handed over; None = no message is
    /// ready.
    pub fn awaited_wal(&self) -> Option<WalPosition> {
        self.admission.needs_wal.filter(|_| !self.engine.is_ready_empty())
    }

    /// The standbys that keep the messages of this connected destination waiting, in words; None = none, or not for
    /// long.
    fn awaits_standbys<'a>(&self, common: &'a Common<R>) -> Option<&'a str> {
        let waits = self.connection.is_connected()
            && self.awaited_wal().is_some()
            && !common.may_send(self.admission.needs_wal);
        common.standbys.awaited().filter(|_| waits)
    }

    /// The longest wait for this destination, in ms. `may_claim`: no other destination keeps this one from claiming.
    fn wait_ms(&mut self, common: &Common<R>, may_claim: bool) -> u32 {
        let state = self.pass_state(common);
        let may_claim = may_claim && self.has_memory(common) && !(common.once && self.engine.has_claimed());
        let state = PassState {
            enabled: state.enabled && may_claim,
            claims_fast_in_ms: self.engine.claims_fast_in_ms(common.now_ms()).map(|ms| ms as u32),
            ..state
        };
        let wait_ms = pass::next(&state).wait_ms;
        // Outcomes wake a worker that waits for room at the publisher, but nothing wakes one that waits for the rate
        // limit.
        match self.engine.is_ready_empty() {
            true => wait_ms,
            false => match self.admission.rate_limit.next_us(common.now_us()) {
                0 => wait_ms,
                next_us => wait_ms.min(u32::try_from(next_us.div_ceil(1_000)).unwrap_or(u32::MAX)),
            },
        }
    }

    /// Gives ready messages to the publisher, within the rate limit. The engine keeps the rest in order, also while the
    /// publisher's queue is full. A publisher without a connection answers each message as lost.
    fn hand_over(&mut self, common: &Common<R>) {
        let rules = self.rules(common);
        self.engine.expire(&rules, common.runtime.now_us());
        if !common.may_send(self.admission.needs_wal) {
            return; // the engine keeps them in order
        }
        let (connection, rate_limit) = (&self.connection, &mut self.admission.rate_limit);
        let room = rate_limit.room(common.now_us()).unwrap_or(usize::MAX);
        if room == 0 {
            return;
        }
        self.engine.hand_over(common.now_ms(), |mut now| {
            let mut later = now.split_off(room.min(now.len()));
            let count = now.len();
            match connection.publish(now) {
                Ok(()) => rate_limit.went(count),
                Err(refused) => later.splice(..0, refused).for_each(drop),
            }
            later
        });
    }

    /// Records the number of messages in flight.
    pub fn record_in_flight(&self, common: &Common<R>) {
        common.runtime.record_in_flight(&self.name, self.outstanding());
    }

    /// Frees the slots of fast-path messages that are settled or claimed by now.
    pub fn free_slots(&mut self, common: &Common<R>) {
        self.engine.free_slots(&common.runtime);
    }
}

/// Leaves messages of ready slots to the claims.
pub fn give_up(runtime: &impl Runtime, arrived: Vec<Arrived>) {
    for Arrived { slot, pointer, .. } in arrived {
        runtime.give_up(slot, &pointer.destination, pointer.partition, pointer.seq);
    }
}

/// Returns the function that makes a publication of a message and its event.
fn maker(route: Route<'_>) -> impl Fn(MessageHandle, &Pointer, Event) -> Result<Publication, String> {
    move |handle, pointer, event| {
        outbox_core::envelope::publication(handle, pointer, event, &route).map_err(|refusal| refusal.to_string())
    }
}

/// Logs expired messages and dead letters.
fn log_dead(runtime: &impl Runtime, name: &str, batch: &[Settlement]) {
    let expired = batch
        .iter()
        .filter(|ended| ended.disposition == Disposition::Expire)
        .count();
    if expired > 0 {
        runtime.log(Some(name), format_args!("{expired} messages have expired"));
    }
    for ended in batch {
        if let Disposition::Dead { failure } = &ended.disposition {
            let (seq, reason) = (ended.pointer.seq, &failure.text);
            runtime.log(Some(name), format_args!("message {seq} is a dead letter: {reason}"));
        }
    }
}
