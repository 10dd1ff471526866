//! A destination as a worker outside the server serves it: its messages between claim and settle, and its connection. As
//! in the server, each has both for itself, so that one that is down or slow holds up no other. On the worker's thread.

use super::board::DestinationFacts;
use super::ports::{DEFAULT_DESTINATION, Lanes, Shared, Tables};
use super::report::Say;
use super::session::{Described, Place, Session, Trouble};
use super::settings::Settings;
use outbox_core::engine::{CRASHES_ALONE, Engine, Errand, Held, Settlement, Sharing};
use outbox_core::message::{Outcome, Text};
use outbox_core::pace::Pace;
use outbox_core::partition::Partition;
use outbox_core::route::Template;
use outbox_core::settle::{Disposition, EXPIRED, Ended, Rules};
use outbox_core::tick::{self, TickState};
use outbox_transport::broker::{Broker, Outcomes, Status, WINDOW};
use outbox_transport::target::{Limits, Target};
use outbox_transport::{Answered, Bell, Deadline};
use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

const LANE_BY_LANE: Duration = Duration::from_secs(5);

/// What the destinations of one worker have in common.
pub struct Common {
    pub session: Session,
    pub shared: Shared,
    pub settings: Settings,
    /// Why nothing is delivered from this database; None = it is adopted.
    pub not_adopted: Option<String>,
    /// Workers of this database that live, as far as is known.
    pub workers: u32,
    pub bell: Bell,
    pub deadline: Deadline,
    pub began: Instant,
    /// It claims nothing more: it ends, rests between two ticks, or is held.
    pub rests: bool,
    /// Whoever sits at its terminal wants it to claim nothing.
    pub is_held: bool,
    pub say: Say,
}

impl Common {
    fn now_ms(&self) -> u64 {
        self.began.elapsed().as_millis() as u64
    }

    fn now_us(&self) -> u64 {
        self.began.elapsed().as_micros() as u64
    }

    fn say(&self, destination: &str, text: std::fmt::Arguments) {
        match destination {
            DEFAULT_DESTINATION => self.say.line(format_args!("{text}")),
            name => self.say.line(format_args!("destination {name}: {text}")),
        }
    }
}

pub struct Destination {
    pub name: String,
    pub broker: Broker,
    engine: Engine<Place>,
    target: Result<Target, String>,
    paused: bool,
    /// Until then the lanes are claimed one by one, for rows of some were locked.
    locked_until: Option<Instant>,
    reported: Option<Status>,
    /// Since when it is so.
    since: Instant,
    /// How much in flight the session was told of.
    told_in_flight: usize,
    pace: Pace,
    /// Where a message goes that goes to no exchange.
    nothing: (Text, Template),
    /// When messages were confirmed that are not settled yet, by seq.
    confirmed_us: HashMap<i64, i64>,
    ended: Ended,
    /// It runs one tick and no more.
    once: bool,
}

impl Destination {
    pub fn new(common: &Common, description: &Described, sharing: Sharing, leases: &[Held]) -> Self {
        let target = common.settings.target_of(description);
        let mut engine = Engine::new(sharing);
        engine.set_leases(leases.to_vec(), HashSet::new());
        let connection_name = match description.name.as_str() {
            DEFAULT_DESTINATION => format!("outbox: {}", common.session.id),
            name => format!("outbox: {} {name}", common.session.id),
        };
        let mut broker = Broker::new(
            target.clone().map(Target::unlimited),
            connection_name,
            common.bell.clone(),
            common.deadline.clone(),
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
            since: Instant::now(),
            told_in_flight: 0,
            pace: Pace::new(0, 1, common.now_us()),
            nothing: (Text::default(), Template::parse("").expect("an empty template")),
            confirmed_us: HashMap::new(),
            ended: Ended::default(),
            once: false,
        };
        destination.take_limits(common);
        destination
    }

    /// Takes over what the description and the settings say now.
    pub fn describe(&mut self, common: &Common, description: &Described) {
        self.paused = description.paused;
        self.target = common.settings.target_of(description);
        self.take_limits(common);
        if let Some(last) = self.broker.reconfigure(self.target.clone().map(Target::unlimited)) {
            self.conclude_all(common, last);
            self.engine.release_all("the settings of the broker changed");
            self.engine.look_anew();
            self.broker.ensure(Instant::now());
        }
    }

    /// Also when another number of workers share them.
    pub fn take_limits(&mut self, common: &Common) {
        let limits = self.target.as_ref().map_or(Limits::default(), |target| target.limits);
        self.pace.set(limits.max_rate, common.workers, common.now_us());
    }

    pub fn outstanding(&self) -> usize {
        self.engine.outstanding()
    }

    /// Messages that are with the broker, or wait to be settled: there will be news of them.
    pub fn awaits(&self) -> bool {
        self.engine.is_under_way() || self.engine.settle_in_ms(0).is_some()
    }

    pub fn in_use(&self) -> HashSet<Partition> {
        self.engine.in_use()
    }

    pub fn set_leases(&mut self, held: &[Held], leaving: &HashSet<Partition>) {
        self.engine.set_leases(held.to_vec(), leaving.clone());
    }

    /// How messages ended since the last call.
    pub fn take_ended(&mut self) -> Ended {
        std::mem::take(&mut self.ended)
    }

    /// Whether it has claimed a message that so many workers crashed with that it goes alone.
    pub fn tries_one_alone(&self) -> bool {
        self.engine.has_suspects(CRASHES_ALONE)
    }

    /// Gives up the connection; what it has not answered by then goes back.
    pub fn stop(&mut self, common: &Common, limit: Duration, reason: &str) {
        let last = self.broker.stop(limit);
        self.conclude_all(common, last);
        self.engine.release_all(reason);
    }

    // ---- one tick ---------------------------------------------------------------------------------------------------

    pub fn begin_tick(&mut self) {
        self.once = true;
        self.engine.begin_errand(Errand::Tick);
    }

    /// Whether all of the tick is done that can be done now.
    pub fn has_run_tick(&self, common: &Common) -> bool {
        let claims_on = self.may_deliver(common)
            && (self.broker.is_connected() || self.connects())
            && self.engine.claimable() > 0
            && !self.engine.has_claimed();
        !claims_on && self.engine.settle_in_ms(0).is_none() && !self.engine.is_under_way()
    }

    fn connects(&self) -> bool {
        matches!(self.broker.status.state, "starting" | "connecting")
    }

    /// Nobody knows yet whether there is a connection.
    pub fn is_undecided(&self, common: &Common) -> bool {
        self.may_deliver(common) && self.connects()
    }

    /// Why it cannot deliver, in words, though it should.
    pub fn obstacle(&self, common: &Common) -> Option<String> {
        let is_well = self.broker.is_connected() || !self.may_deliver(common);
        (!is_well).then(|| self.words())
    }

    fn words(&self) -> String {
        let status = &self.broker.status;
        let words = [Some(status.state), status.reason, status.detail.as_deref()];
        words.into_iter().flatten().collect::<Vec<&str>>().join(" ")
    }

    fn may_deliver(&self, common: &Common) -> bool {
        common.settings.enabled && !self.paused && common.not_adopted.is_none()
    }

    fn rules(&self, common: &Common) -> Option<Rules> {
        let target = self.target.as_ref().or(common.settings.target.as_ref());
        target.ok().map(|target| target.rules)
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
        let Some(rules) = self.rules(common) else {
            if !outcomes.is_empty() {
                self.engine.release_all("the destination cannot be understood");
            }
            return;
        };
        let (now_ms, now_us) = (common.now_ms(), common.session.now_us());
        let now = Instant::now();
        for Answered { handle, outcome, at } in outcomes {
            let age = now.saturating_duration_since(at);
            if outcome == Outcome::Confirmed
                && let Some(pointer) = self.engine.pointer(handle)
            {
                self.confirmed_us.insert(pointer.seq, now_us - age.as_micros() as i64);
            }
            let since_ms = self.engine.waits_since_ms(now_ms, age.as_millis() as u64);
            self.engine.conclude(handle, &outcome, &rules, since_ms, now_us as u64);
        }
    }

    /// Before each wait: how soon answers are to be looked for, if any are to come. No bell ends the wait, for it is in the
    /// server; so with `patience` where a worker in the server would be woken by them.
    pub fn listen(&mut self, common: &Common, patience: Duration) -> Option<Duration> {
        let has_room = self.tick(common).has_room();
        let listen = self.engine.listen(common.now_ms(), has_room);
        self.broker.listen(listen.confirms);
        match listen.comes_by_in_ms {
            Some(ms) if has_room => Some(Duration::from_millis(ms)),
            Some(_) => Some(patience),
            None => self.awaits().then_some(patience),
        }
    }

    /// Whether something is to be settled before the next claim: what goes back, or would make the window too large. What is
    /// published can wait a little.
    pub fn settles_first(&mut self, common: &Common) -> bool {
        let is_off = !self.may_deliver(common) || (common.rests && !self.once);
        if is_off && self.engine.only_keeps_back() {
            self.engine.release_all("nothing is delivered now"); // a relay of somebody else's may deliver it
        }
        self.engine.must_settle()
    }

    /// After a claim. Returns how long to wait at most.
    pub fn settle_what_is_due(&mut self, common: &Common, wait_ms: u32) -> Result<u32, Trouble> {
        let nothing_follows = (self.once || common.rests) && !self.engine.is_under_way();
        if nothing_follows || self.engine.settle_in_ms(common.now_ms()) == Some(0) {
            self.settle(common)?;
        }
        let settle_in_ms = self.engine.settle_in_ms(common.now_ms());
        Ok(settle_in_ms.map_or(wait_ms, |ms| wait_ms.min(ms as u32)))
    }

    pub fn settle(&mut self, common: &Common) -> Result<(), Trouble> {
        let Some(rules) = self.rules(common) else { return Ok(()) };
        let confirmed_us = std::mem::take(&mut self.confirmed_us);
        let mut tables = Tables::new(&common.session, &common.shared, &self.name, &rules, &confirmed_us);
        let (name, ended) = (&self.name, &mut self.ended);
        let settled = self.engine.settle(&mut tables, common.now_ms(), |batch| {
            for settlement in batch {
                ended.note(&settlement.disposition);
                tell(common, name, settlement);
            }
        });
        if tables.missed > 0 {
            let missed = tables.missed;
            common.say(name, format_args!("{missed} messages were no longer ours to settle"));
        }
        if settled.is_err() {
            self.confirmed_us = confirmed_us; // they are settled later
        }
        settled
    }

    /// Tells the session how the connection is, where outbox_health reads it, and how much is in flight.
    pub fn report(&mut self, common: &Common) -> Result<(), Trouble> {
        let in_flight = self.outstanding();
        if (in_flight == 0) != (self.told_in_flight == 0) {
            common.session.holds(&self.name, in_flight)?;
            self.told_in_flight = in_flight;
        }
        let status = match self.may_deliver(common) {
            true if common.is_held => Status {
                state: if in_flight > 0 { "pausing" } else { "paused" },
                reason: None,
                detail: Some("held at the terminal of this worker".to_owned()),
            },
            true => self.broker.status.clone(),
            false => Status {
                state: match common.not_adopted {
                    Some(_) => "not adopted",
                    None if in_flight > 0 => "pausing",
                    None => "paused",
                },
                reason: None,
                detail: common.not_adopted.clone(),
            },
        };
        // Between two failed attempts the reason is worth more than the word "connecting".
        let was_down = self.reported.as_ref().is_some_and(|before| before.state == "down");
        if self.reported.as_ref() == Some(&status) || (status.state == "connecting" && was_down) {
            return Ok(());
        }
        let (state, detail) = (Some(status.state), status.detail.as_deref());
        common.session.report(&self.name, state, status.reason, detail)?;
        let words = [state, status.reason, detail];
        let words: Vec<&str> = words.into_iter().flatten().collect();
        let before = self.reported.replace(status.clone());
        if before.as_ref().is_none_or(|before| before.state != status.state) {
            self.since = Instant::now();
        }
        let is_new = before.is_none_or(|before| (before.state, before.reason) != (status.state, status.reason));
        if is_new && status.state != "connecting" {
            common.say(&self.name, format_args!("{}", words.join(" ")));
        }
        Ok(())
    }

    /// How it is, for the screen.
    pub fn facts(&self, ended: Ended) -> DestinationFacts {
        let status = self.reported.as_ref().unwrap_or(&self.broker.status);
        DestinationFacts {
            name: self.name.clone(),
            state: status.state,
            since: self.since,
            reason: status.reason,
            detail: status.detail.clone(),
            in_flight: self.outstanding(),
            window: WINDOW,
            ended,
        }
    }

    // ---- claim and hand over ----------------------------------------------------------------------------------------

    /// Claims, if it may, and hands over. Returns how many messages came, and how long to wait for more.
    pub fn claim(&mut self, common: &Common, may_claim: bool) -> Result<(usize, u32), Trouble> {
        let now_ms = common.now_ms();
        self.hand_over(common);
        let may_claim = may_claim && !(self.once && self.engine.has_claimed());
        let free = WINDOW.saturating_sub(self.engine.outstanding()) as u32;
        let room = tick::next(&self.tick(common)).claim.map(|room| room.min(free));
        let Some(room) = room.filter(|room| may_claim && *room > 0) else {
            return Ok((0, self.wait_ms(common)));
        };
        let Ok(target) = &self.target else {
            return Ok((0, common.settings.idle_backoff_ms)); // without a target there is no connection
        };
        let route = target.route(&self.nothing);
        // What cannot go soon is better left for later: in the table it expires, is paused and harms nobody.
        let limit = (common.settings.batch_size)
            .min(room)
            .min(self.pace.per_second().unwrap_or(u32::MAX));
        let none = HashMap::new();
        let mut tables = Tables::new(&common.session, &common.shared, &self.name, &target.rules, &none);
        tables.lane_by_lane = self.locked_until.is_some_and(|until| Instant::now() < until);
        let known_locked = tables.lane_by_lane;
        let memory = Lanes {
            session: &common.session,
            shared: &common.shared,
            destination: &self.name,
        };
        let claimed = self.engine.claim(
            &mut tables,
            &memory,
            now_ms,
            limit,
            &target.rules,
            |handle, pointer, event| {
                outbox_core::envelope::publication(handle, pointer, event, &route)
                    .map_err(|refusal| refusal.to_string())
            },
        );
        if tables.lane_by_lane && !known_locked {
            common.say(
                &self.name,
                format_args!("somebody holds messages locked; their partitions wait"),
            );
            self.locked_until = Some(Instant::now() + LANE_BY_LANE);
        }
        if let Some(trouble) = common.shared.take_trouble() {
            return Err(trouble);
        }
        let claimed = claimed?;
        self.engine.note_claim();
        self.hand_over(common);
        let due_ms = self.engine.due_at_ms().saturating_sub(now_ms).max(1) as u32;
        Ok((claimed, self.wait_ms(common).min(due_ms)))
    }

    fn tick(&self, common: &Common) -> TickState {
        // What a person asks for is done at once, whatever was before.
        let (window, outstanding) = match self.broker.window() {
            small if small < WINDOW && !self.once => (small, self.engine.outstanding_there()),
            _ => (WINDOW, self.engine.outstanding()),
        };
        TickState {
            enabled: !common.rests && self.may_deliver(common),
            connected: self.broker.is_connected(),
            blocked: false, // blocked is a state of its own, in which it is not connected
            owned_partitions: self.engine.claimable(),
            outstanding,
            window,
            queue_has_room: self.engine.is_ready_empty() && self.engine.has_room_in_bytes(),
            last_claim_was_full: self.engine.wants_more(),
            woken: false,
            claims_in_hand_in_ms: None, // nothing comes by shared memory
            idle_backoff_ms: common.settings.idle_backoff_ms,
        }
    }

    /// How long to wait at most, as far as this destination is concerned.
    fn wait_ms(&mut self, common: &Common) -> u32 {
        let wait_ms = tick::next(&self.tick(common)).wait_ms;
        match self.engine.is_ready_empty() {
            true => wait_ms,
            false => match self.pace.next_us(common.now_us()) {
                0 => wait_ms,
                next_us => wait_ms.min(u32::try_from(next_us.div_ceil(1_000)).unwrap_or(u32::MAX)),
            },
        }
    }

    /// Gives what is ready to the publisher, as fast as the destination may be sent to; the engine keeps the rest, in order.
    fn hand_over(&mut self, common: &Common) {
        let Some(rules) = self.rules(common) else { return };
        self.engine.expire(&rules, common.session.now_us());
        (self.broker).hand_over(&mut self.engine, &mut self.pace, common.now_us());
    }
}

/// What a person should hear of.
fn tell(common: &Common, name: &str, settlement: &Settlement<Place>) {
    let seq = settlement.pointer.seq;
    match &settlement.disposition {
        Disposition::Retry { error, .. } => common.say.failed(name, seq, error, false),
        Disposition::Dead { reason } => {
            common.say.failed(name, seq, reason, true);
            common.say(name, format_args!("message {seq} is a dead letter: {reason}"));
        }
        Disposition::Expire => {
            common.say.failed(name, seq, EXPIRED, true);
            common.say(name, format_args!("message {seq} has expired"));
        }
        _ => {}
    }
}
