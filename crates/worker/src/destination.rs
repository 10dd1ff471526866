//! A destination as a worker serves it: its messages between claim and settle, and its connection. `worker` calls it on
//! the worker's thread. Each destination has a separate engine and connection: one that is down or slow does not delay
//! the others.

use crate::connection::{Connection, Outcomes};
use crate::host::{Host, Patience, Port};
use crate::notices::Notices;
use crate::settings::{Described, Settings};
use crate::status::{Reason, State, Status};
use crate::tables::{Lanes, Tables};
use outbox_core::budget::Allowance;
use outbox_core::engine::{CRASHES_ALONE, Engine, Held, Portion, Request, Settlement, Sharing, Tally, WakePolicy};
use outbox_core::key_order::Handle;
use outbox_core::message::{Event, Outcome, Pointer, Publication, Text};
use outbox_core::partition::Partition;
use outbox_core::pass::{self, PassState};
use outbox_core::rate_limit::RateLimit;
use outbox_core::route::{Route, Template, TransportKind};
use outbox_core::settle::{Disposition, Ended, Rules};
use outbox_core::standbys::{Progress, WalPosition};
use outbox_core::words::Word;
use outbox_transport::target::{Target, Transport};
use outbox_transport::{Answered, DownReason};
use std::collections::HashSet;
use std::time::{Duration, Instant};

/// The most rows of a claim in the server while other destinations wait for it: about 2 ms.
const BATCH_BESIDE_OTHERS: u32 = 100;
/// How long the lanes are claimed one by one after rows of one were locked.
const LANE_BY_LANE: Duration = Duration::from_secs(5);
/// How long a publisher may take to end while other destinations wait for it.
pub const STOP_LIMIT: Duration = Duration::from_millis(200);

/// The state that all destinations of one worker share. The worker writes it; the destinations read it, and exchange
/// notices.
pub struct Common<H: Host> {
    pub host: H,
    pub notices: Notices,
    pub settings: Settings,
    /// Why nothing is delivered from this database; None = the database is adopted.
    pub not_adopted: Option<String>,
    /// The number of live workers of this database, as of the last heartbeat.
    pub workers: u32,
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

impl<H: Host> Common<H> {
    /// The time since this worker began, in ms.
    pub fn now_ms(&self) -> u64 {
        self.since_began().as_millis() as u64
    }

    fn now_us(&self) -> u64 {
        self.since_began().as_micros() as u64
    }

    pub fn since_began(&self) -> Duration {
        self.host.now().saturating_duration_since(self.began)
    }

    /// Whether enough standbys have WAL up to `position`, or need not have it.
    fn may_send(&self, position: Option<WalPosition>) -> bool {
        self.settings.standbys.is_none() || position.is_some_and(|position| self.standbys.may_send(position))
    }
}

/// The row id type of the host's tables.
type RowId<H> = <<H as Host>::Port as Port>::RowId;

pub struct Destination<H: Host> {
    pub name: String,
    port: H::Port,
    connection: Connection<H::Publisher>,
    engine: Engine<RowId<H>>,
    target: Result<Target, String>,
    paused: bool,
    /// Until then the lanes are claimed one by one, because rows of some were locked.
    locked_until: Option<Instant>,
    /// The last reported status.
    reported: Option<Status>,
    /// When the reported state last changed.
    since: Instant,
    /// Whether the state "connected" is proven: since the last failure the receiver has answered a message, or there
    /// was none to send. False only for HTTP, and for a broker whose queue refused messages: there "connected" means just
    /// that the wait after a failure is over.
    proven: bool,
    /// The counts of what was settled in this pass.
    ended: Ended,
    rate_limit: RateLimit,
    /// The messages that this pass may still take; None = no messages.
    allowance: Option<Allowance>,
    /// The position in WAL that the standbys must have before ready messages are handed over; None = unknown, because
    /// messages came since it was read. None come while others are ready, so one position is enough for all.
    needs_wal: Option<WalPosition>,
    /// Whether a session requested a recheck of the connection.
    wants_recheck: bool,
    /// When this worker received the request for a recheck, in µs since 1970. Until it is answered, the next known
    /// state is reported even if it is the old one.
    requested_at_us: Option<i64>,
    /// The request of a session, until it is done.
    request: Option<Request>,
    /// The route parts of a target without an exchange: empty.
    no_exchange: (Text, Template),
}

/// The condition of a destination, for screens and logs.
pub struct Condition<'a> {
    pub name: &'a str,
    pub status: &'a Status,
    /// When the state last changed.
    pub since: Instant,
    /// Messages claimed and not settled.
    pub in_flight: usize,
}

impl<H: Host> Destination<H> {
    pub fn new(common: &Common<H>, description: &Described, sharing: Sharing, leases: &[Held]) -> Self {
        let host = &common.host;
        let target = description.target(&common.settings);
        let mut engine = Engine::bounded(sharing, host.bounds());
        engine.set_leases(leases.to_vec(), HashSet::new());
        let mut connection = Connection::new(host, &description.name, connection_of(&target));
        connection.ensure(host);
        let mut destination = Self {
            name: description.name.clone(),
            port: host.port(&description.name),
            connection,
            engine,
            target,
            paused: description.paused,
            locked_until: None,
            reported: None,
            since: host.now(),
            proven: true,
            ended: Ended::default(),
            rate_limit: RateLimit::new(0, 1, common.now_us()),
            allowance: None,
            needs_wal: None,
            wants_recheck: false,
            requested_at_us: None,
            request: None,
            no_exchange: (Text::default(), Template::parse("").expect("an empty template")),
        };
        destination.take_limits(common);
        destination
    }

    /// Takes over a changed description or settings. If they need another connection, all claimed messages are
    /// released.
    pub fn describe(&mut self, common: &Common<H>, description: &Described) {
        self.paused = description.paused;
        self.target = description.target(&common.settings);
        self.take_limits(common);
        if let Some(last) = self
            .connection
            .reconfigure(connection_of(&self.target), common.host.now())
        {
            self.on_outcomes(common, last);
            self.engine.release_all("the settings of the broker changed");
            self.engine.reread_all();
            self.connection.ensure(&common.host);
        }
    }

    /// Takes over the limits. Called also when the number of workers changes, because the workers share the rate limit.
    pub fn take_limits(&mut self, common: &Common<H>) {
        let target = self.target.as_ref();
        let limits = target.map_or(common.settings.limits, |target| target.limits);
        self.port.describe(target.map_err(String::as_str), &limits);
        self.rate_limit.set(limits.max_rate, common.workers, common.now_us());
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

    pub fn set_leases(&mut self, held: &[Held], leaving: &HashSet<Partition>) {
        self.engine.set_leases(held.to_vec(), leaving.clone());
    }

    /// The condition as last reported.
    pub fn condition(&self) -> Condition<'_> {
        Condition {
            name: &self.name,
            status: self.reported.as_ref().unwrap_or(&self.connection.status),
            since: self.since,
            in_flight: self.outstanding(),
        }
    }

    // ---- connection -------------------------------------------------------------------------------------------------

    /// Whether the connection is still being made.
    pub fn connects(&self) -> bool {
        self.connection.status.state.is_undecided()
    }

    /// Why the destination cannot deliver, if it should and cannot.
    pub fn obstacle(&self, common: &Common<H>) -> Option<String> {
        let is_well = self.connection.is_connected() || !self.may_deliver(common);
        (!is_well).then(|| in_words(&self.connection.status))
    }

    pub fn ensure(&mut self, common: &Common<H>) {
        self.connection.ensure(&common.host);
    }

    /// Whether a session requested a recheck since the last call. Remembers the request for `recheck` and `report`.
    pub fn take_recheck_request(&mut self, common: &Common<H>) -> bool {
        let is_new = self.port.take_recheck_request();
        if is_new {
            self.wants_recheck = true;
            self.requested_at_us = Some(common.host.now_us());
        }
        is_new
    }

    /// Connects again at once, if a session requested a recheck and there is no connection. A connection that works is
    /// not touched, nor an HTTP receiver that is down: it may have said when to try again.
    pub fn recheck(&mut self, common: &Common<H>) {
        if !std::mem::take(&mut self.wants_recheck) {
            return;
        }
        let is_amqp = (self.target.as_ref()).is_ok_and(|target| matches!(target.transport, Transport::Amqp(_)));
        match self.connection.status.state {
            State::Down if is_amqp => {
                let last = self.connection.try_at_once(STOP_LIMIT, common.host.now());
                self.on_outcomes(common, last);
                self.engine.release_all("a recheck replaced the connection");
            }
            State::Unconfigured => _ = self.connection.try_at_once(STOP_LIMIT, common.host.now()),
            _ => return,
        }
        self.connection.ensure(&common.host);
    }

    /// Sends nothing more. Waits for answers to sent messages in the background, for a third of `limit` at most.
    pub fn request_stop(&self, limit: Duration) {
        self.connection.request_stop(limit);
    }

    /// Closes the connection and releases the messages that have no outcome by then.
    pub fn stop(&mut self, common: &Common<H>, limit: Duration, reason: &str) {
        self.lanes(common).leave_in_table();
        let last = self.connection.stop(limit);
        self.on_outcomes(common, last);
        self.engine.release_all(reason);
    }

    /// Reports the number of messages in flight. Reports the state of the connection, which outbox_health shows, if it
    /// changed.
    pub fn report(&mut self, common: &Common<H>) -> Result<(), H::Error> {
        self.port.report_in_flight(self.outstanding())?;
        let off = match self.outstanding() {
            0 => State::Paused,
            _ => State::Pausing,
        };
        let status = match (self.may_deliver(common), &common.not_adopted) {
            (true, _) if common.held.is_some() => Status::plain(off, common.held.map(str::to_owned)),
            (true, _) => match self.awaits_standbys(common) {
                Some(awaited) => Status::standby(awaited),
                None => self.connection.status.clone(),
            },
            (false, None) => Status::plain(off, None),
            (false, why) => Status::plain(State::NotAdopted, why.clone()),
        };
        if self.connection.status.state == State::Down {
            let is_refused = self.connection.status.reason == Some(Reason::Down(DownReason::QueueRefused));
            self.proven = !self.is_http() && !is_refused;
        }
        // Between two failed attempts the reason of the failure says more than "connecting", or than "connected" before
        // a receiver has answered.
        let trying = status.state == State::Connecting || (status.state == State::Connected && !self.proven);
        let trying_again = trying && self.reported.as_ref().is_some_and(|r| r.state == State::Down);
        let is_known = !status.state.is_undecided();
        let requested_at_us = self.requested_at_us.filter(|_| is_known);
        let is_new = self.reported.as_ref() != Some(&status);
        if trying_again || (!is_new && requested_at_us.is_none()) {
            return Ok(());
        }
        self.port.report(Some(&status), requested_at_us)?;
        self.requested_at_us = self.requested_at_us.filter(|_| !is_known);
        if is_new && status.state.is_failure() {
            let detail = status.detail.as_deref().unwrap_or_default();
            let reason = status.reason.map_or(status.state.name(), Reason::name);
            self.port.record_error(reason, detail);
        }
        let before = self.reported.replace(status);
        let status = self.reported.as_ref().unwrap_or(&self.connection.status);
        if before.as_ref().is_none_or(|before| before.state != status.state) {
            self.since = common.host.now();
        }
        let is_logged = before.is_some_and(|before| (before.state, before.reason) == (status.state, status.reason));
        if !is_logged && status.state != State::Connecting {
            let peer = if self.is_http() { "receiver" } else { "broker" };
            match (status.reason, &status.detail) {
                (Some(Reason::Standby), Some(awaited)) => common.host.log(Some(&self.name), format_args!("{awaited}")),
                _ => common
                    .host
                    .log(Some(&self.name), format_args!("{peer} {}", in_words(status))),
            }
        }
        Ok(())
    }

    /// Ends a dropped destination: stops it, settles what has ended, and removes its reported state.
    pub fn retire(&mut self, common: &Common<H>, limit: Duration) -> Result<(), H::Error> {
        self.stop(common, limit, "the destination was dropped");
        let ended = self.settle(common, Patience::Little);
        ended.and_then(|()| self.port.report(None, None))
    }

    // ---- requests of a session --------------------------------------------------------------------------------------

    pub fn begin_request(&mut self, request: Request) {
        self.request = Some(request);
        self.engine.begin_request(request);
        self.wants_recheck = true; // connects at once if the connection is down
    }

    pub fn end_request(&mut self) {
        self.request = None;
        self.engine.end_request();
    }

    pub fn tally(&self) -> Tally {
        self.engine.tally()
    }

    /// Whether everything that can be done now for the request is done.
    pub fn has_done_request(&self, common: &Common<H>) -> bool {
        let may_claim = (self.may_deliver(common) || self.by_hand(common).is_some()) && !self.port.is_body_unusable();
        let connection = self.connection.is_connected() || self.connects();
        let claims_on = may_claim && connection && self.engine.claimable() > 0 && !self.engine.has_claimed();
        let is_settled = self.engine.settle_in_ms(common.now_ms()).is_none();
        !claims_on && is_settled && !self.engine.is_under_way()
    }

    /// The seq up to which a request makes this destination deliver although delivery is switched off.
    fn by_hand(&self, common: &Common<H>) -> Option<i64> {
        let may = !common.settings.enabled && !self.paused && common.not_adopted.is_none();
        match self.request {
            Some(Request::UpTo(seq)) if may && !self.engine.has_claimed() => Some(seq),
            _ => None,
        }
    }

    /// Whether delivery is switched on, and neither the destination is paused nor the database unadopted.
    pub fn may_deliver(&self, common: &Common<H>) -> bool {
        common.settings.enabled && !self.paused && common.not_adopted.is_none()
    }

    fn is_on(&self, common: &Common<H>) -> bool {
        !common.rests && (self.may_deliver(common) || self.by_hand(common).is_some())
    }

    fn rules(&self, common: &Common<H>) -> Rules {
        (self.target.as_ref()).map_or(common.settings.rules, |target| target.rules)
    }

    fn is_http(&self) -> bool {
        matches!(&self.target, Ok(target) if target.transport.kind() == TransportKind::Http)
    }

    fn lanes<'a>(&'a self, common: &'a Common<H>) -> Lanes<'a, H::Port> {
        Lanes::new(&self.port, &common.notices, &self.name)
    }

    // ---- outcomes and settle ----------------------------------------------------------------------------------------

    pub fn take_outcomes(&mut self, common: &Common<H>, now: Instant) {
        let (outcomes, is_gone) = self.connection.take(now);
        self.on_outcomes(common, outcomes);
        if is_gone {
            self.engine.release_all("the publisher ended");
        }
    }

    fn on_outcomes(&mut self, common: &Common<H>, outcomes: Outcomes) {
        if outcomes.is_empty() {
            return;
        }
        let (now_ms, now_us, rules) = (common.now_ms(), common.host.now_us(), self.rules(common));
        let now = common.host.now();
        for Answered { handle, outcome, at } in outcomes {
            let age = now.saturating_duration_since(at);
            self.proven |= matches!(
                outcome,
                Outcome::Confirmed | Outcome::Failed { .. } | Outcome::Refused { .. }
            );
            if outcome == Outcome::Confirmed
                && let Some(pointer) = self.engine.pointer(handle)
            {
                self.port.confirmed(pointer, now_us - age.as_micros() as i64);
            }
            let since_ms = self.engine.waits_since_ms(now_ms, age.as_millis() as u64);
            self.engine
                .on_outcome(handle, &outcome, &rules, since_ms, now_us as u64);
        }
    }

    /// Called before each wait: sets which answers end it. Returns the longest wait for this destination, in ms.
    /// `polls`: answers cannot wake this worker, so it polls for them after this time, in ms.
    pub fn arm_wake(&mut self, common: &Common<H>, polls: Option<u32>) -> Option<u32> {
        let has_room = self.pass_state(common).has_room();
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

    /// Whether something must be settled before the next claim: a message that goes back, or a large number of
    /// outcomes. A few published messages can wait. If the destination is off and no message is with the publisher,
    /// releases the claimed messages.
    pub fn settles_first(&mut self, common: &Common<H>) -> bool {
        if !self.is_on(common) && self.engine.only_keeps_back() {
            self.engine.release_all("delivery stopped"); // a relay may deliver them
        }
        if !self.connection.is_connected() {
            self.engine.give_back_aside(&self.rules(common)); // a person may discard them meanwhile
        }
        self.engine.must_settle()
    }

    /// Whether something is to be settled after the claims.
    pub fn is_settle_due(&self, common: &Common<H>) -> bool {
        let awaited = (self.request.is_some() || common.rests) && !self.engine.is_under_way();
        let in_ms = self.engine.settle_in_ms(common.now_ms());
        in_ms == Some(0) || (awaited && in_ms.is_some())
    }

    /// How long the next settle can wait, in ms; None = nothing is unsettled.
    pub fn settles_in_ms(&self, common: &Common<H>) -> Option<u32> {
        Some(self.engine.settle_in_ms(common.now_ms())? as u32)
    }

    /// Settles all messages that have ended.
    pub fn settle(&mut self, common: &Common<H>, patience: Patience) -> Result<(), H::Error> {
        self.settle_by(common, patience, false).map(drop)
    }

    /// Settles as many ended messages as other destinations can wait for. Returns whether more are left.
    pub fn settle_some(&mut self, common: &Common<H>) -> Result<bool, H::Error> {
        self.settle_by(common, Patience::Usual, H::HAS_FAST_PATH)
    }

    fn settle_by(&mut self, common: &Common<H>, patience: Patience, in_parts: bool) -> Result<bool, H::Error> {
        let (now_ms, dead_blocks) = (common.now_ms(), self.rules(common).dead_blocks());
        let mut tables = Tables::new(&self.port, &common.notices, &self.name, dead_blocks, patience);
        let (name, port, ended) = (&self.name, &self.port, &mut self.ended);
        let mut settled = |batch: &[Settlement<RowId<H>>]| {
            batch.iter().for_each(|settlement| ended.note(&settlement.disposition));
            port.settled(batch);
            log_dead(common, name, batch);
        };
        let portion = match in_parts {
            true => Portion::BesideOthers,
            false => Portion::Full,
        };
        let result = loop {
            let more = self.engine.settle_batch(&mut tables, now_ms, portion, &mut settled);
            if in_parts || !matches!(more, Ok(true)) {
                break more;
            }
        };
        if tables.missed > 0 {
            let (host, missed) = (&common.host, tables.missed);
            host.log(
                Some(name),
                format_args!("{missed} messages were not settled: they no longer belong to this worker"),
            );
        }
        result
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
    pub fn is_at_rest(&self, common: &Common<H>) -> bool {
        let state = self.pass_state(common);
        let has_read_all = state.connected && state.owned_partitions > 0 && !state.last_claim_was_full;
        let may_not = !state.enabled || self.connection.status.state == State::Unconfigured;
        self.outstanding() == 0 && (has_read_all || may_not)
    }

    /// Decides how many messages this pass may take, receives from the fast path, and hands over. Called before any
    /// destination settles, because a settle waits for the disk. Returns the number of received messages.
    pub fn begin_claims(&mut self, common: &Common<H>, may_claim: bool) -> usize {
        if !common.leaves {
            self.hand_over(common);
        }
        self.engine.set_read_limit(self.by_hand(common));
        let room = pass::next(&self.pass_state(common))
            .claim
            .map(|room| room.min(self.room(common)));
        let may_claim = may_claim && !(common.once && self.engine.has_claimed());
        let room = room.filter(|room| may_claim && *room > 0);
        self.allowance = room.map(|room| Allowance::of_pass(room, self.batch(common)));
        self.receive(common)
    }

    /// The most rows of one claim. No more than the rate limit lets go within a second: in the table they can still
    /// expire or be paused. And few if other destinations wait for the claim.
    fn batch(&self, common: &Common<H>) -> u32 {
        let bearable = match H::HAS_FAST_PATH && common.notices.serves_several() {
            true => BATCH_BESIDE_OTHERS,
            false => u32::MAX,
        };
        let at_once = self.rate_limit.per_second().unwrap_or(u32::MAX).min(bearable);
        common.settings.batch_size.min(at_once)
    }

    /// Whether messages may be taken from the fast path. Not if a function makes the body: that happens in the claim.
    /// Not before the worker has read a change by a person: only a claim checks whether the destination is paused.
    fn may_receive(&self, common: &Common<H>) -> bool {
        self.target.as_ref().is_ok_and(|target| target.body.is_none()) && !common.host.is_stale()
    }

    /// Takes ready messages from the fast path, as many as this pass may, and hands them over. Returns their number.
    pub fn receive(&mut self, common: &Common<H>) -> usize {
        let Some(mut allowance) = self.allowance.filter(|_| self.may_receive(common)) else {
            return 0;
        };
        let Ok(target) = &self.target else { return 0 };
        let lanes = Lanes::new(&self.port, &common.notices, &self.name);
        let (now_ms, limit) = (common.now_ms(), allowance.receivable());
        let make = maker(target.route(&self.no_exchange));
        let count = (self.engine).receive(&lanes, &lanes, now_ms, limit, &target.rules, make);
        if count > 0 {
            self.needs_wal = None;
            allowance.received(count);
            self.allowance = Some(allowance);
            self.hand_over(common);
        }
        count
    }

    /// Receives and claims, if this pass may, and hands over. Returns the number of messages taken, and how long to
    /// wait for more, in ms.
    pub fn claim(&mut self, common: &Common<H>, may_claim: bool) -> Result<(usize, u32), H::Error> {
        let now_ms = common.now_ms();
        self.allowance = self.allowance.filter(|_| may_claim);
        let by_hand = self.by_hand(common);
        let received = self.receive(common);
        if !self.may_receive(common) {
            self.lanes(common).leave_in_table();
        }
        let Some(allowance) = self.allowance else {
            self.lanes(common).leave_in_table();
            return Ok((received, self.wait_ms(common, may_claim)));
        };
        let Ok(target) = &self.target else {
            return Ok((received, common.settings.idle_backoff_ms)); // without a target there is no connection
        };
        let rests_ms = target.body.as_ref().and_then(|_| self.port.body_rests_ms());
        if let Some(rests_ms) = rests_ms {
            return Ok((received, rests_ms.min(common.settings.idle_backoff_ms)));
        }
        // The claim may take a while. Until it ends, views show this number.
        self.record_in_flight();
        let host = &common.host;
        let dead_blocks = target.rules.dead_blocks();
        let mut tables = Tables::new(&self.port, &common.notices, &self.name, dead_blocks, Patience::Usual);
        let lanes = Lanes::new(&self.port, &common.notices, &self.name);
        tables.lane_by_lane = self.locked_until.is_some_and(|until| host.now() < until);
        let known_locked = tables.lane_by_lane;
        let (limit, make) = (
            allowance.rows(self.batch(common)),
            maker(target.route(&self.no_exchange)),
        );
        let claimed = (self.engine).claim(&mut tables, &lanes, now_ms, limit, &target.rules, make);
        self.port.make_durable();
        self.needs_wal = None;
        if tables.lane_by_lane && !known_locked {
            let text = format_args!("another session has locked messages; their partitions wait");
            host.log(Some(&self.name), text);
            self.locked_until = Some(host.now() + LANE_BY_LANE);
        }
        let failed = tables.failed.take().or(lanes.failed.take());
        let claimed = claimed?;
        if let Some(allowance) = &mut self.allowance {
            allowance.claimed(claimed);
        }
        self.engine.after_claim();
        self.hand_over(common);
        if let Some(failed) = failed {
            return Err(failed); // after the claimed messages are handed over
        }
        // A claim of one row may have read an empty lane while messages wait in another, so `wants_more`.
        let has_none = claimed == 0 && !self.engine.wants_more() && self.engine.outstanding() == 0;
        self.proven |= has_none && !self.engine.has_put_off(now_ms);
        let wait_ms = self.wait_ms(common, may_claim);
        // Delivery by hand does not wait for messages that become due later. With a poison candidate in flight nothing
        // is brought back before its answer, which wakes this worker.
        if by_hand.is_some() || self.engine.has_poison_candidates(1) {
            return Ok((claimed + received, wait_ms));
        }
        let due_ms = self.engine.due_at_ms().saturating_sub(now_ms).max(1) as u32;
        Ok((claimed + received, wait_ms.min(due_ms)))
    }

    /// Whether there is room for another claim.
    pub fn has_room(&self, common: &Common<H>) -> bool {
        self.pass_state(common).has_room()
    }

    /// The number of messages that still fit in the window.
    fn room(&self, common: &Common<H>) -> u32 {
        common.host.bounds().window.saturating_sub(self.engine.outstanding()) as u32
    }

    fn pass_state(&self, common: &Common<H>) -> PassState {
        // A request is served with the full window, even right after a failure of the connection.
        let (window, outstanding) = match self.connection.small_window() {
            Some(small) if self.request.is_none() => (small, self.engine.outstanding_there()),
            _ => (common.host.bounds().window, self.engine.outstanding()),
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
        self.needs_wal.is_none() && !self.engine.is_ready_empty()
    }

    /// Sets the position in WAL that the standbys must have, if it is unknown.
    pub fn set_wal_position(&mut self, position: WalPosition) {
        self.needs_wal.get_or_insert(position);
    }

    /// The position in WAL that the standbys must have before the next message is handed over; None = no message is
    /// ready.
    pub fn awaited_wal(&self) -> Option<WalPosition> {
        self.needs_wal.filter(|_| !self.engine.is_ready_empty())
    }

    /// The standbys that keep the messages of this connected destination waiting, in words; None = none, or not for
    /// long.
    fn awaits_standbys<'a>(&self, common: &'a Common<H>) -> Option<&'a str> {
        let waits = self.connection.is_connected() && self.awaited_wal().is_some() && !common.may_send(self.needs_wal);
        common.standbys.awaited().filter(|_| waits)
    }

    /// The longest wait for this destination, in ms. `may_claim`: no other destination keeps this one from claiming.
    fn wait_ms(&mut self, common: &Common<H>, may_claim: bool) -> u32 {
        let state = self.pass_state(common);
        let state = PassState {
            enabled: state.enabled && may_claim && !(common.once && self.engine.has_claimed()),
            claims_fast_in_ms: self.engine.claims_fast_in_ms(common.now_ms()).map(|ms| ms as u32),
            ..state
        };
        let wait_ms = pass::next(&state).wait_ms;
        // Outcomes wake a worker that waits for room at the publisher, but nothing wakes one that waits for the rate
        // limit.
        match self.engine.is_ready_empty() {
            true => wait_ms,
            false => match self.rate_limit.next_us(common.now_us()) {
                0 => wait_ms,
                next_us => wait_ms.min(u32::try_from(next_us.div_ceil(1_000)).unwrap_or(u32::MAX)),
            },
        }
    }

    /// Gives ready messages to the publisher, within the rate limit. The engine keeps the rest in order, also while the
    /// publisher's queue is full. A publisher without a connection answers each message as lost.
    fn hand_over(&mut self, common: &Common<H>) {
        let rules = self.rules(common);
        self.engine.expire(&rules, common.host.now_us());
        if !common.may_send(self.needs_wal) {
            return; // the engine keeps them in order
        }
        let (connection, rate_limit) = (&self.connection, &mut self.rate_limit);
        let room = rate_limit.room(common.now_us()).unwrap_or(usize::MAX);
        if room == 0 {
            return;
        }
        self.engine.hand_over(|mut now| {
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
    pub fn record_in_flight(&self) {
        self.port.record_in_flight(self.outstanding());
    }

    /// Frees the slots of fast-path messages that are settled or claimed by now.
    pub fn let_go(&mut self, common: &Common<H>) {
        let lanes = Lanes::new(&self.port, &common.notices, &self.name);
        self.engine.let_go(&lanes);
    }
}

/// Returns the function that makes a publication of a message and its event.
fn maker(route: Route<'_>) -> impl Fn(Handle, &Pointer, &Event) -> Result<Publication, String> {
    move |handle, pointer, event| {
        outbox_core::envelope::publication(handle, pointer, event, &route).map_err(|refusal| refusal.to_string())
    }
}

/// The part of the target that the connection depends on: everything but the limits.
fn connection_of(target: &Result<Target, String>) -> Result<Target, String> {
    target.clone().map(Target::unlimited)
}

/// The state, its reason and its detail, as a log line shows them.
fn in_words(status: &Status) -> String {
    let reason = status.reason.map(Reason::name);
    let words = [Some(status.state.name()), reason, status.detail.as_deref()];
    words.into_iter().flatten().collect::<Vec<&str>>().join(" ")
}

/// Logs expired messages and dead letters.
fn log_dead<P>(common: &Common<impl Host>, name: &str, batch: &[Settlement<P>]) {
    let host = &common.host;
    let expired = batch
        .iter()
        .filter(|ended| ended.disposition == Disposition::Expire)
        .count();
    if expired > 0 {
        host.log(Some(name), format_args!("{expired} messages have expired"));
    }
    for ended in batch {
        if let Disposition::Dead { reason } = &ended.disposition {
            let seq = ended.pointer.seq;
            host.log(Some(name), format_args!("message {seq} is a dead letter: {reason}"));
        }
    }
}
