//! A destination as a worker serves it: its messages between claim and settle, and its connection. Each has both for
//! itself, so that one that is down or slow holds up no other. Main thread of a worker.

use crate::config::Settings;
use crate::limits::STATEMENT_TIMEOUT_MS;
use crate::pg::clock::now_us;
use crate::pg::tid::Tid;
use crate::pg::txn::{self, Durability, Failure};
use crate::ports::{Shared, Tables, in_transaction};
use crate::shared::databases;
use crate::shared::error_groups::{self, Fault};
use crate::shared::statistics::Figures;
use crate::worker::broker::DEADLINE;
use crate::worker::store::{Described, Settlement, Store};
use outbox_core::budget::Allowance;
use outbox_core::engine::{CRASHES_ALONE, Engine, Errand, Express, Held, Listen, Sharing, Tally};
use outbox_core::gate::Handle;
use outbox_core::message::{Event, Outcome, Pointer, Publication, Text};
use outbox_core::minutes::Took;
use outbox_core::pace::Pace;
use outbox_core::partition::Partition;
use outbox_core::route::{Route, Template, TransportKind};
use outbox_core::settle::{Disposition, Ended, Rules};
use outbox_core::tick::{self, TickState};
use outbox_transport::broker::{Broker, Outcomes, Status, WINDOW};
use outbox_transport::target::{Target, Transport, described};
use outbox_transport::{Answered, Bell};
use std::collections::HashSet;
use std::time::{Duration, Instant};

/// Rows of a claim, at most, while other destinations wait for it: some 2 ms.
const BATCH_BESIDE_OTHERS: u32 = 100;
const LANE_BY_LANE: Duration = Duration::from_secs(5);
/// How long a publisher without a connection may take to end; other destinations wait for it.
const LAST_WORDS: Duration = Duration::from_millis(200);

/// What the destinations of one worker have in common.
pub struct Common {
    pub id: String,
    pub store: Store,
    pub shared: Shared,
    pub settings: Settings,
    /// Why nothing is delivered from this database; None = it is adopted.
    pub not_adopted: Option<String>,
    /// Of the changes by hand, how many there were before this worker looked last.
    pub changes_seen: u32,
    /// With leasing off: the token of this process' claims, negative.
    pub row_token: i64,
    /// Workers of this database that live, as far as is known.
    pub workers: u32,
    pub bell: Bell,
    pub began: Instant,
    /// The launcher wants this worker's slot for another database: it claims nothing more, and leaves by then.
    pub leaves_by: Option<Instant>,
}

impl Common {
    /// ms since this worker began.
    fn now_ms(&self) -> u64 {
        self.began.elapsed().as_millis() as u64
    }

    /// µs since then.
    fn now_us(&self) -> u64 {
        self.began.elapsed().as_micros() as u64
    }

    fn log(&self, destination: &str, text: std::fmt::Arguments) {
        match destination {
            crate::config::DEFAULT_DESTINATION => pgrx::log!("outbox {}: {text}", self.id),
            name => pgrx::log!("outbox {}, destination {name}: {text}", self.id),
        }
    }
}

pub struct Destination {
    pub name: String,
    pub broker: Broker,
    engine: Engine<Tid>,
    target: Result<Target, String>,
    paused: bool,
    /// Until then the lanes are claimed one by one, for rows of some were locked.
    locked_until: Option<Instant>,
    reported: Option<Status>,
    /// Since it was down last the peer has answered a message, or there was none to try it with. A connection to a broker
    /// says so itself; by HTTP "connected" means only that the pause is over.
    proven: bool,
    figures: Figures,
    /// How long messages took that are not settled yet.
    took: Took,
    /// What was settled in this pass.
    ended: Ended,
    pace: Pace,
    /// What may still come in this pass; None = nothing.
    allowance: Option<Allowance>,
    /// A session wants a fresh look at the connection,
    wants_look: bool,
    /// and waits for what is known then, however little of it is new. When this worker heard of it, in µs since 1970.
    asked_at_us: Option<i64>,
    /// What a session asks for, while it is not done.
    errand: Option<Errand>,
    /// Where a message goes that goes to no exchange.
    nothing: (Text, Template),
}

impl Destination {
    pub fn new(common: &Common, description: &Described, sharing: Sharing, leases: &[Held]) -> Self {
        let target = target_of(&common.settings, description);
        let connection_name = match description.name.as_str() {
            crate::config::DEFAULT_DESTINATION => format!("outbox: {}", common.id),
            name => format!("outbox: {} {name}", common.id),
        };
        let mut engine = Engine::new(sharing);
        engine.set_leases(leases.to_vec(), HashSet::new());
        let mut broker = Broker::new(
            connection_of(&target),
            connection_name,
            common.bell.clone(),
            DEADLINE.clone(),
        );
        broker.ensure(Instant::now());
        let mut destination = Self {
            name: description.name.clone(),
            broker,
            engine,
            target,
            paused: description.paused,
            locked_until: None,
            reported: None,
            proven: true,
            figures: Figures::of(&description.name),
            took: Took::default(),
            ended: Ended::default(),
            pace: Pace::new(0, 1, common.now_us()),
            allowance: None,
            wants_look: false,
            asked_at_us: None,
            errand: None,
            nothing: (Text::default(), Template::parse("").expect("an empty template")),
        };
        destination.take_limits(common);
        destination
    }

    /// Takes over what the description and the settings say now.
    pub fn describe(&mut self, common: &Common, description: &Described) {
        self.paused = description.paused;
        self.target = target_of(&common.settings, description);
        self.take_limits(common);
        if let Some(last) = self.broker.reconfigure(connection_of(&self.target)) {
            self.conclude_all(common, last);
            self.engine.release_all("the settings of the broker changed");
            self.engine.look_anew();
            self.broker.ensure(Instant::now());
        }
    }

    /// Also when another number of workers share them.
    pub fn take_limits(&mut self, common: &Common) {
        let limits = (self.target.as_ref()).map_or(common.settings.target.limits, |target| target.limits);
        self.figures.set_max_pending(limits.max_pending);
        self.pace.set(limits.max_rate, common.workers, common.now_us());
    }

    pub fn outstanding(&self) -> usize {
        self.engine.outstanding()
    }

    pub fn in_use(&self) -> HashSet<Partition> {
        self.engine.in_use()
    }

    pub fn set_leases(&mut self, held: &[Held], leaving: &HashSet<Partition>) {
        self.engine.set_leases(held.to_vec(), leaving.clone());
    }

    /// Whether a session has asked for a fresh look.
    pub fn take_question(&mut self) -> bool {
        let is_new = self.figures.take_look();
        if is_new {
            self.wants_look = true;
            self.asked_at_us = Some(now_us());
        }
        is_new
    }

    /// If a session wants to know whether this can be used: what cannot be connected to is tried at once. What works is
    /// left alone, and so is a peer that said when to come again.
    pub fn look_afresh(&mut self, common: &Common) {
        if !std::mem::take(&mut self.wants_look) {
            return;
        }
        let is_amqp = (self.target.as_ref()).is_ok_and(|target| matches!(target.transport, Transport::Amqp(_)));
        match self.broker.status.state {
            "down" if is_amqp => {
                let last = self.broker.try_at_once(LAST_WORDS);
                self.conclude_all(common, last);
                self.engine.release_all("the connection is made anew");
            }
            "unconfigured" => _ = self.broker.try_at_once(LAST_WORDS),
            _ => return,
        }
        self.broker.ensure(Instant::now());
    }

    /// Tells how much is in flight.
    pub fn note_in_flight(&self) {
        self.figures.set_in_flight(self.outstanding());
    }

    /// Nothing more is sent; what the peer has got it may still answer, for a third of `limit` at most.
    pub fn begin_to_leave(&self, limit: Duration) {
        self.broker.ask_to_stop(limit);
    }

    /// All that may go now has gone, or nothing may.
    pub fn is_at_rest(&self, common: &Common) -> bool {
        let state = self.tick(common);
        let looks = state.connected && state.owned_partitions > 0 && !state.last_claim_was_full;
        let may_not = !state.enabled || self.broker.status.state == "unconfigured";
        self.outstanding() == 0 && (looks || may_not)
    }

    /// Gives up the connection; what it has not answered by then goes back.
    pub fn stop(&mut self, common: &Common, limit: Duration, reason: &str) {
        leave_in_table(&common.shared.of(&self.name));
        let last = self.broker.stop(limit);
        self.conclude_all(common, last);
        self.engine.release_all(reason);
    }

    // ---- what a session asks for ------------------------------------------------------------------------------------

    pub fn begin_errand(&mut self, errand: Errand) {
        self.errand = Some(errand);
        self.engine.begin_errand(errand);
        self.wants_look = true; // what is down is tried at once
    }

    pub fn end_errand(&mut self) {
        self.errand = None;
        self.engine.end_errand();
    }

    pub fn tally(&self) -> Tally {
        self.engine.tally()
    }

    /// Whether all of it is done that can be done now.
    pub fn has_run_errand(&self, common: &Common) -> bool {
        let connection = self.broker.is_connected() || matches!(self.broker.status.state, "starting" | "connecting");
        let may_claim = (self.may_deliver(common) || self.by_hand(common).is_some())
            && !common.store.bodies.is_unusable(&self.name);
        let claims_on = may_claim && connection && self.engine.claimable() > 0 && !self.engine.has_claimed();
        let is_settled = self.engine.settle_in_ms(common.now_ms()).is_none();
        !claims_on && is_settled && !self.engine.is_under_way()
    }

    /// Up to which seq this is to deliver although delivery is switched off.
    fn by_hand(&self, common: &Common) -> Option<i64> {
        let may = !common.settings.enabled && !self.paused && common.not_adopted.is_none();
        match self.errand {
            Some(Errand::UpTo(seq)) if may && !self.engine.has_claimed() => Some(seq),
            _ => None,
        }
    }

    fn may_deliver(&self, common: &Common) -> bool {
        common.settings.enabled && !self.paused && common.not_adopted.is_none()
    }

    fn rules(&self, common: &Common) -> Rules {
        match &self.target {
            Ok(target) => target.rules,
            Err(_) => common.settings.target.rules,
        }
    }

    fn is_http(&self) -> bool {
        matches!(&self.target, Ok(target) if target.transport.kind() == TransportKind::Http)
    }

    // ---- outcomes and settle ----------------------------------------------------------------------------------------

    pub fn take_outcomes(&mut self, common: &Common, now: Instant) {
        let (outcomes, died) = self.broker.take(now);
        self.conclude_all(common, outcomes);
        if died {
            self.engine.release_all("the publisher ended");
        }
    }

    fn conclude_all(&mut self, common: &Common, outcomes: Outcomes) {
        let (now_ms, now_us, rules) = (common.now_ms(), now_us(), self.rules(common));
        let now = Instant::now();
        for Answered { handle, outcome, at } in outcomes {
            let age = now.saturating_duration_since(at);
            let at_us = now_us - age.as_micros() as i64;
            self.proven |= matches!(
                outcome,
                Outcome::Confirmed | Outcome::Failed { .. } | Outcome::Refused { .. }
            );
            if outcome == Outcome::Confirmed
                && let Some(pointer) = self.engine.pointer(handle)
            {
                self.figures.confirmed(pointer.enqueued_at_us, at_us);
                self.took.note(at_us.saturating_sub(pointer.enqueued_at_us));
            }
            let since_ms = self.engine.waits_since_ms(now_ms, age.as_millis() as u64);
            self.engine.conclude(handle, &outcome, &rules, since_ms, now_us as u64);
        }
    }

    /// Before each wait: which answers end it. Returns how long it may be.
    pub fn listen(&mut self, common: &Common, wait_ms: u32) -> u32 {
        let has_room = self.tick(common).has_room();
        let listen = match common.leaves_by {
            None => self.engine.listen(common.now_ms(), has_room),
            Some(_) => Listen::TO_EACH,
        };
        self.broker.listen(listen.confirms);
        listen.comes_by_in_ms.map_or(wait_ms, |ms| wait_ms.min(ms as u32))
    }

    /// Whether something is to be settled before the next claim: what goes back, or would make the window too large. What is
    /// published can wait a little.
    pub fn settles_first(&mut self, common: &Common) -> bool {
        let is_off = self.paused || (!common.settings.enabled && self.by_hand(common).is_none());
        if is_off && self.engine.only_keeps_back() {
            self.engine.release_all("nothing is delivered now"); // a relay of somebody else's may deliver it
        }
        if common.leaves_by.is_some() && self.engine.only_keeps_back() {
            self.engine.release_all("the worker leaves");
        }
        self.engine.must_settle()
    }

    /// Whether something is to be settled after the claims.
    pub fn is_settle_due(&self, common: &Common) -> bool {
        let awaited = self.errand.is_some() && !self.engine.is_under_way();
        awaited || self.engine.settle_in_ms(common.now_ms()) == Some(0)
    }

    /// At most how long to wait for the next settle.
    pub fn settles_in_ms(&self, common: &Common) -> Option<u32> {
        Some(self.engine.settle_in_ms(common.now_ms())? as u32)
    }

    /// All that has ended.
    pub fn settle(&mut self, common: &Common, timeout_ms: i32) -> Result<(), Failure> {
        self.settle_by(common, timeout_ms, |engine, tables, settled| {
            engine.settle(tables, common.now_ms(), settled)
        })
    }

    /// As much of it as other destinations can wait for. Returns whether more is left.
    pub fn settle_some(&mut self, common: &Common, timeout_ms: i32) -> Result<bool, Failure> {
        self.settle_by(common, timeout_ms, |engine, tables, settled| {
            engine.settle_some(tables, common.now_ms(), settled)
        })
    }

    fn settle_by<T>(
        &mut self,
        common: &Common,
        timeout_ms: i32,
        settle: impl FnOnce(&mut Engine<Tid>, &mut Tables, &mut dyn FnMut(&[Settlement])) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        let rules = self.rules(common);
        let mut tables = Tables::new(common, &self.name, &rules, timeout_ms);
        let (name, figures, took, sum) = (&self.name, &self.figures, &mut self.took, &mut self.ended);
        let settled = settle(&mut self.engine, &mut tables, &mut |batch| {
            sum.add(count_settled(batch, took));
            figures.settled(batch, now_us());
            let expired = batch.iter().filter(|ended| ended.disposition == Disposition::Expire);
            log_expired(common, name, expired.count() as i64);
            for failed in batch {
                if let Disposition::Dead { reason } = &failed.disposition {
                    let seq = failed.pointer.seq;
                    common.log(name, format_args!("message {seq} is a dead letter: {reason}"));
                }
            }
        });
        if tables.missed > 0 {
            let missed = tables.missed;
            common.log(name, format_args!("{missed} messages were no longer ours to settle"));
        }
        settled
    }

    /// Writes the state of the connection where outbox_health reads it, when it changed.
    pub fn report(&mut self, common: &Common) -> Result<(), Failure> {
        let status = match self.may_deliver(common) {
            true => self.broker.status.clone(),
            false => Status {
                state: match common.not_adopted {
                    Some(_) => "not adopted",
                    None if self.outstanding() > 0 => "pausing",
                    None => "paused",
                },
                reason: None,
                detail: common.not_adopted.clone(),
            },
        };
        if self.broker.status.state == "down" {
            self.proven = !self.is_http();
        }
        // Between two failed attempts the reason is worth more than the word "connecting", or "connected" while nobody
        // has answered.
        let trying = status.state == "connecting" || (status.state == "connected" && !self.proven);
        let trying_again = trying && self.reported.as_ref().is_some_and(|r| r.state == "down");
        let is_known = !["starting", "connecting"].contains(&status.state);
        let asked_at_us = self.asked_at_us.filter(|_| is_known);
        if trying_again || (self.reported.as_ref() == Some(&status) && asked_at_us.is_none()) {
            return Ok(());
        }
        in_transaction(c"outbox: report", Durability::Relaxed, || {
            let (state, detail) = (Some(status.state), status.detail.as_deref());
            common
                .store
                .report(&self.name, state, status.reason, detail, asked_at_us)
        })?;
        self.asked_at_us = self.asked_at_us.filter(|_| !is_known);
        let is_fault = ["down", "blocked"].contains(&status.state) && self.reported.as_ref() != Some(&status);
        if is_fault {
            let (reason, detail) = (status.reason.unwrap_or(status.state), status.detail.as_deref());
            error_groups::note(&Fault::of_destination(&self.name, reason, detail.unwrap_or_default()));
        }
        let words = [Some(status.state), status.reason, status.detail.as_deref()];
        let words: Vec<&str> = words.into_iter().flatten().collect();
        if self
            .reported
            .as_ref()
            .is_none_or(|r| (r.state, r.reason) != (status.state, status.reason))
        {
            let peer = if self.is_http() { "receiver" } else { "broker" };
            common.log(&self.name, format_args!("{peer} {}", words.join(" ")));
        }
        self.reported = Some(status);
        Ok(())
    }

    /// What was settled since the last call.
    pub fn take_ended(&mut self) -> Ended {
        std::mem::take(&mut self.ended)
    }

    /// Whether it has claimed a message that so many workers crashed with that it goes alone.
    pub fn tries_one_alone(&self) -> bool {
        self.engine.has_suspects(CRASHES_ALONE)
    }

    // ---- claim and hand over ----------------------------------------------------------------------------------------

    /// Decides what may come in this pass, and hands over what is ready. Before a settle of any destination, which waits
    /// for the disk. Returns how many messages came.
    pub fn open(&mut self, common: &Common, may_claim: bool) -> usize {
        if common.leaves_by.is_none() {
            self.hand_over(common);
        }
        self.engine.set_reach(self.by_hand(common));
        let room = tick::next(&self.tick(common)).claim.map(|room| room.min(self.room()));
        let room = room.filter(|room| may_claim && *room > 0);
        self.allowance = room.map(|room| Allowance::of_pass(room, self.batch(common)));
        self.receive(common)
    }

    /// What cannot go soon is better left for later: in the table it expires, is paused and harms nobody. And other destinations
    /// wait for a claim.
    fn batch(&self, common: &Common) -> u32 {
        let bearable = if common.shared.serves_several() {
            BATCH_BESIDE_OTHERS
        } else {
            u32::MAX
        };
        let at_once = self.pace.per_second().unwrap_or(u32::MAX).min(bearable);
        common.settings.batch_size.min(at_once)
    }

    /// Whether messages may be taken in hand. The body is drawn in the claim. And a claim asks whether the destination is
    /// paused: a worker may not know yet.
    fn may_receive(&self, common: &Common) -> bool {
        self.target.as_ref().is_ok_and(|target| target.body.is_none()) && changes_by_hand() == common.changes_seen
    }

    /// Takes in hand what sessions have laid ready, as far as this pass may, and hands it over.
    pub fn receive(&mut self, common: &Common) -> usize {
        let Some(mut allowance) = self.allowance.filter(|_| self.may_receive(common)) else {
            return 0;
        };
        let Ok(target) = &self.target else { return 0 };
        let memory = common.shared.of(&self.name);
        let (now_ms, limit) = (common.now_ms(), allowance.in_hand());
        let make = maker(target.route(&self.nothing));
        let count = (self.engine).receive(&memory, &memory, now_ms, limit, &target.rules, make);
        if count > 0 {
            allowance.took_in_hand(count);
            self.allowance = Some(allowance);
            self.hand_over(common);
        }
        count
    }

    /// Claims, if this pass may, and hands over. Returns how many messages came, and how long to wait for more.
    pub fn claim(&mut self, common: &Common, may_claim: bool) -> Result<(usize, u32), Failure> {
        let now_ms = common.now_ms();
        self.allowance = self.allowance.filter(|_| may_claim);
        let by_hand = self.by_hand(common);
        let in_hand = self.receive(common);
        let memory = common.shared.of(&self.name);
        if !self.may_receive(common) {
            leave_in_table(&memory);
        }
        let Some(allowance) = self.allowance else {
            leave_in_table(&memory);
            return Ok((in_hand, self.wait_ms(common, may_claim)));
        };
        let Ok(target) = &self.target else {
            return Ok((in_hand, common.settings.idle_backoff_ms)); // without a target there is no connection
        };
        let rests_ms = target
            .body
            .as_ref()
            .and_then(|_| common.store.bodies.rests_ms(&self.name));
        if let Some(rests_ms) = rests_ms {
            return Ok((in_hand, rests_ms.min(common.settings.idle_backoff_ms)));
        }
        // The claim may take a while: what is in hand shows meanwhile.
        self.note_in_flight();
        let mut tables = Tables::new(common, &self.name, &target.rules, STATEMENT_TIMEOUT_MS);
        tables.body = target.body.as_ref();
        tables.lane_by_lane = self.locked_until.is_some_and(|until| Instant::now() < until);
        let known_locked = tables.lane_by_lane;
        let (limit, make) = (allowance.rows(self.batch(common)), maker(target.route(&self.nothing)));
        let claimed = self
            .engine
            .claim(&mut tables, &memory, now_ms, limit, &target.rules, make);
        // What a crash could still undo must not be sent: a commit with synchronous_commit off is visible before it is on
        // disk.
        txn::flush_wal(tables.wal_position);
        if tables.lane_by_lane && !known_locked {
            common.log(
                &self.name,
                format_args!("somebody holds messages locked; their partitions wait"),
            );
            self.locked_until = Some(Instant::now() + LANE_BY_LANE);
        }
        let claimed = claimed?;
        self.allowance
            .iter_mut()
            .for_each(|allowance| allowance.claimed(claimed));
        self.engine.note_claim();
        self.hand_over(common);
        // One row may have been asked of a lane that has none, and others wait in another.
        self.proven |= claimed == 0 && !self.engine.wants_more() && self.engine.outstanding() == 0;
        let wait_ms = self.wait_ms(common, may_claim);
        if by_hand.is_some() {
            return Ok((claimed + in_hand, wait_ms)); // what is due later is left alone
        }
        let due_ms = self.engine.due_at_ms().saturating_sub(now_ms).max(1) as u32;
        Ok((claimed + in_hand, wait_ms.min(due_ms)))
    }

    /// Messages more that may be in flight.
    fn room(&self) -> u32 {
        WINDOW.saturating_sub(self.engine.outstanding()) as u32
    }

    fn tick(&self, common: &Common) -> TickState {
        // What a person asks for is done at once, whatever was before.
        let (window, outstanding) = match self.broker.window() {
            small if small < WINDOW && self.errand.is_none() => (small, self.engine.outstanding_there()),
            _ => (WINDOW, self.engine.outstanding()),
        };
        TickState {
            enabled: common.leaves_by.is_none() && (self.may_deliver(common) || self.by_hand(common).is_some()),
            connected: self.broker.is_connected(),
            blocked: false, // blocked is a state of its own, in which it is not connected
            owned_partitions: self.engine.claimable(),
            outstanding,
            window,
            queue_has_room: self.engine.is_ready_empty() && self.engine.has_room_in_bytes(),
            last_claim_was_full: self.engine.wants_more(),
            woken: false,
            claims_in_hand_in_ms: None, // looked for where it counts
            idle_backoff_ms: common.settings.idle_backoff_ms,
        }
    }

    /// How long to wait at most, as far as this destination is concerned. `may_claim`: another destination does not stand in
    /// the way.
    fn wait_ms(&mut self, common: &Common, may_claim: bool) -> u32 {
        let state = self.tick(common);
        let state = TickState {
            enabled: state.enabled && may_claim,
            claims_in_hand_in_ms: self.engine.claims_in_hand_in_ms(common.now_ms()).map(|ms| ms as u32),
            ..state
        };
        let wait_ms = tick::next(&state).wait_ms;
        // Outcomes wake who waits for room with the publisher; nobody wakes who waits for his turn.
        match self.engine.is_ready_empty() {
            true => wait_ms,
            false => match self.pace.next_us(common.now_us()) {
                0 => wait_ms,
                next_us => wait_ms.min(u32::try_from(next_us.div_ceil(1_000)).unwrap_or(u32::MAX)),
            },
        }
    }

    /// Gives what is ready to the publisher, as fast as the destination may be sent to; the engine keeps the rest, in order,
    /// also while the publisher's queue is full. Without a connection the publisher answers each message as lost.
    fn hand_over(&mut self, common: &Common) {
        let rules = self.rules(common);
        self.engine.expire(&rules, now_us());
        self.broker.hand_over(&mut self.engine, &mut self.pace, common.now_us());
    }

    /// What was in hand is settled or claimed: nobody needs it in shared memory any more.
    pub fn let_go(&mut self, common: &Common) {
        self.engine.let_go(&common.shared.of(&self.name));
    }
}

/// Makes of a message what goes to the wire.
fn maker(route: Route<'_>) -> impl Fn(Handle, &Pointer, &Event) -> Result<Publication, String> {
    move |handle, pointer, event| {
        outbox_core::envelope::publication(handle, pointer, event, &route).map_err(|refusal| refusal.to_string())
    }
}

/// How often a person has changed something in this database.
pub fn changes_by_hand() -> u32 {
    databases::my_database().map_or(0, databases::Database::changes_by_hand)
}

/// Nothing is taken in hand now.
fn leave_in_table(express: &impl Express<Tid>) {
    for (place, claimed) in express.take() {
        express.give_up(place, claimed.pointer.partition, claimed.pointer.seq);
    }
}

/// What a description means under these settings.
fn target_of(settings: &Settings, description: &Described) -> Result<Target, String> {
    let (options, mapping) = (&description.options, &description.mapping);
    described(description.kind, &settings.target, options, mapping).map_err(|refused| refused.message)
}

/// What the connection is made from.
fn connection_of(target: &Result<Target, String>) -> Result<Target, String> {
    target.clone().map(Target::unlimited)
}

fn log_expired(common: &Common, destination: &str, count: i64) {
    if count > 0 {
        common.log(destination, format_args!("{count} messages have expired"));
    }
}

fn count_settled(batch: &[Settlement], took: &mut Took) -> Ended {
    let mut ended = Ended::default();
    batch.iter().for_each(|settlement| ended.note(&settlement.disposition));
    if let Some(database) = databases::my_database() {
        database.settled(&ended, now_us());
        if ended.published > 0 {
            database.confirmed(took, now_us());
        }
    }
    ended
}
