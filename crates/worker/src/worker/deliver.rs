//! The phases of a pass that take messages and settle them. A part of [`Worker`].
//!
//! 1. The rewinds of all destinations are taken, and those that they are for join the pass. From time to time a survey
//!    finds all that have messages.
//! 2. Each destination hands over what is ready, and decides how many messages it may take. If one lacks memory, others
//!    give up what they keep back.
//! 3. Due messages of all destinations are brought back, if any destination may claim.
//! 4. Steps that may wait for the disk or for a lock. Before each, ready messages of the fast path are received, and the
//!    leases are renewed if that is due. For each destination: settle first if it must, report, claim and hand over. Then
//!    for each: settle what is due.
//!
//! Destinations that sleep join the pass when something comes for them.

use super::{Pause, SOON, Worker};
use crate::destination::{Destination, give_up};
use crate::rewinds::{RewindLane, Rewound};
use crate::runtime::Runtime;
use outbox_core::engine::{Arrived, HeldLease, Sharing, Tables as _, claimable};
use outbox_core::partition::Partition;
use outbox_core::standbys::{Replication, Standby, WalPosition};
use std::collections::{HashSet, VecDeque};
use std::time::Duration;

/// The most lanes that the statement for shared rewinds reads. Of more lanes a survey takes less time.
const LANES_ASKED_MAX: usize = 1_000;
/// The most states that are reported in a pass, so that a thousand connections that change at once delay no message.
const REPORTS_MAX: usize = 10;
/// How often all lanes are read from their start, to find rows that no rewind announced.
const SWEEP_EVERY: Duration = Duration::from_secs(30);

/// A step of a pass. The number is the index of a destination.
#[derive(Clone, Copy, Debug)]
enum DeliveryStep {
    Serve(usize),
    SettleFirst(usize),
    Claim(usize),
    Settle(usize),
}

/// What the steps of a pass have done.
struct Delivered {
    /// The number of messages taken.
    messages: usize,
    /// The steps that are left.
    steps: VecDeque<DeliveryStep>,
    /// The destinations whose claims have begun.
    served: HashSet<usize>,
    /// The destinations that try a message alone.
    alone: HashSet<usize>,
    /// The number of states that were reported.
    reports: usize,
    /// Whether due messages were brought back, as far as they were due, so that the next pass may wait for others.
    has_brought_due: bool,
    /// How long to wait after the pass, in ms.
    wait_ms: u32,
}

impl Delivered {
    fn wait_at_most(&mut self, ms: u32) {
        self.wait_ms = self.wait_ms.min(ms);
    }
}

impl<R: Runtime> Worker<R> {
    /// Claims and settles for all destinations. Returns the number of messages taken, and how long to wait, in ms.
    pub(super) fn deliver(&mut self, pause: &mut Pause) -> Result<(usize, u32), R::Error> {
        let mut delivered = Delivered {
            messages: 0,
            steps: VecDeque::new(),
            served: HashSet::new(),
            alone: HashSet::new(),
            reports: 0,
            has_brought_due: false,
            wait_ms: self.common.settings.idle_backoff_ms,
        };
        self.check_standbys(pause)?;
        let shared = self.take_rewinds(pause)?;
        self.share_out(shared, pause)?;
        self.survey(pause)?;
        for index in self.roster.active() {
            self.note_alone(index, &mut delivered);
        }
        for index in self.roster.active() {
            self.set_allowance(index, &delivered); // it also decides that one may not claim
        }
        if self.relieve() {
            for index in self.roster.active() {
                self.set_allowance(index, &delivered);
            }
        }
        for index in self.roster.active() {
            self.destinations[index].give_back(&self.common);
        }
        let (last, first): (Vec<usize>, Vec<usize>) =
            (self.roster.active()).partition(|index| self.destinations[*index].must_settle());
        let mut steps: Vec<usize> = first.into_iter().chain(last).collect();
        // Who waits for memory comes first, so that all get some in turn.
        steps.sort_by_key(|index| self.destinations[*index].lacks_memory_since_ms().unwrap_or(u64::MAX));
        delivered.steps = steps.into_iter().map(DeliveryStep::Serve).collect();
        if let Err(error) = self.bring_due(&mut delivered) {
            pause.shorten(self.common.runtime.failed(error)?);
        }
        if delivered.steps.is_empty() {
            self.receive(&mut delivered);
        }
        while let Some(step) = delivered.steps.pop_front() {
            if self.common.runtime.is_ending() && !matches!(step, DeliveryStep::Settle(_)) {
                continue;
            }
            // Not right before a claim: what must be settled before it would be missed.
            if let DeliveryStep::Serve(_) | DeliveryStep::Settle(_) = step {
                self.keep_leases(&mut delivered, pause)?;
            }
            if self.may_wait(step) {
                self.receive(&mut delivered);
            }
            // A step that fails does not stop those of other destinations.
            if let Err(error) = self.take_step(step, &mut delivered) {
                pause.shorten(self.common.runtime.failed(error)?);
                if matches!(step, DeliveryStep::Settle(_)) && self.retry_at.is_some() {
                    break; // the database fails, not this destination alone
                }
            }
        }
        // Delivery by hand does not wait for messages that become due later.
        if delivered.has_brought_due && !self.has_read_limit() {
            delivered.wait_at_most(self.due.in_ms(self.common.now_ms()) as u32);
        }
        if let Some(ms) = self.check_standbys(pause)? {
            delivered.wait_at_most(ms);
        }
        Ok((delivered.messages, delivered.wait_ms))
    }

    /// Frees memory if a destination lacks it: what is not on its way is given up. If there is none, connections are
    /// closed that are silent for long, those whose messages take the most first, until enough is free. Returns whether
    /// anything was given up.
    fn relieve(&mut self) -> bool {
        let lacks = |index: usize| self.destinations[index].lacks_memory_since_ms().is_some();
        if !self.roster.active().any(lacks) {
            return false;
        }
        let mut is_free = false;
        for index in self.roster.active() {
            is_free |= self.destinations[index].yield_memory(&self.common);
        }
        if is_free {
            return true;
        }
        let stuck = |index: usize| Some((self.destinations[index].stuck_bytes(&self.common)?, index));
        let mut stuck: Vec<(usize, usize)> = self.roster.active().filter_map(stuck).collect();
        stuck.sort_unstable_by(|one, other| other.cmp(one));
        let closing = |index: usize| self.destinations[index].closing_bytes(&self.common);
        let mut coming: usize = self.roster.active().map(closing).sum();
        let short_of = self.common.memory.short_of().max(1);
        for (bytes, index) in stuck {
            if coming >= short_of {
                break;
            }
            coming += bytes;
            self.destinations[index].give_up_connection(&self.common);
        }
        false
    }

    /// Whether the step may wait for the disk or for a lock.
    fn may_wait(&self, step: DeliveryStep) -> bool {
        match step {
            DeliveryStep::Serve(_) => false,
            DeliveryStep::SettleFirst(_) | DeliveryStep::Claim(_) => true,
            DeliveryStep::Settle(index) => self.destinations[index].is_settle_due(&self.common),
        }
    }

    /// Renews the leases between two steps, if that is due: the steps of many destinations take long together.
    fn keep_leases(&mut self, delivered: &mut Delivered, pause: &mut Pause) -> Result<(), R::Error> {
        let now = self.common.runtime.now();
        if now < self.leases_due || self.retry_at.is_some() || self.common.runtime.is_ending() {
            return Ok(());
        }
        delivered.wait_at_most(0); // what the leases change is for the next pass
        if let Err(error) = self.tend_leases(now) {
            self.retry_at = Some(now + SOON);
            pause.shorten(self.common.runtime.failed(error)?);
        }
        Ok(())
    }

    fn take_step(&mut self, step: DeliveryStep, delivered: &mut Delivered) -> Result<(), R::Error> {
        match step {
            DeliveryStep::Serve(index) => {
                self.destinations[index].give_back(&self.common);
                delivered
                    .steps
                    .push_front(match self.destinations[index].must_settle() {
                        true => DeliveryStep::SettleFirst(index),
                        false => DeliveryStep::Claim(index),
                    });
            }
            DeliveryStep::SettleFirst(index) => match self.settle_some(index)? {
                true => delivered.steps.push_front(step),
                false => {
                    self.set_allowance(index, delivered);
                    delivered.steps.push_front(DeliveryStep::Claim(index));
                }
            },
            DeliveryStep::Claim(index) => {
                delivered.steps.push_back(DeliveryStep::Settle(index)); // also if nothing can be claimed
                delivered.served.insert(index);
                if delivered.reports < REPORTS_MAX {
                    delivered.reports += usize::from(self.destinations[index].report(&self.common)?);
                } else {
                    delivered.wait_at_most(0); // the next pass reports it
                }
                let may_claim = self.may_claim(index, delivered);
                let claimed = self.destinations[index].claim(&self.common, may_claim);
                self.note_alone(index, delivered);
                let (messages, wait_ms) = claimed?;
                delivered.messages += messages;
                delivered.wait_at_most(wait_ms);
            }
            DeliveryStep::Settle(index) => {
                if self.destinations[index].is_settle_due(&self.common) {
                    let had_room = self.destinations[index].has_room(&self.common);
                    if self.settle_some(index)? {
                        delivered.steps.push_front(step);
                    }
                    if !had_room && self.destinations[index].has_room(&self.common) {
                        delivered.wait_at_most(0); // the claim of this pass came too early
                    }
                }
                if let Some(ms) = self.destinations[index].settles_in_ms(&self.common) {
                    delivered.wait_at_most(ms);
                }
            }
        }
        Ok(())
    }

    fn set_allowance(&mut self, index: usize, delivered: &Delivered) {
        let may_claim = self.may_claim(index, delivered);
        self.destinations[index].set_allowance(&self.common, may_claim);
    }

    /// Lets a destination that sleeps join the pass, because something has come for it.
    fn join(&mut self, index: usize, delivered: &mut Delivered) {
        if self.wake(index) {
            self.set_allowance(index, delivered);
            delivered.steps.push_back(DeliveryStep::Serve(index));
        }
    }

    fn settle_some(&mut self, index: usize) -> Result<bool, R::Error> {
        let more = self.destinations[index].settle_some(&self.common);
        self.due.note(self.destinations[index].take_retry_at_ms());
        more
    }

    /// Whether this destination may claim. Not while another one tries a message alone: if that message crashes the
    /// worker, the crash would be charged to every message claimed with it.
    fn may_claim(&self, index: usize, delivered: &Delivered) -> bool {
        self.retry_at.is_none() && delivered.alone.iter().all(|alone| *alone == index)
    }

    /// Records whether a destination tries a message alone now.
    fn note_alone(&self, index: usize, delivered: &mut Delivered) {
        match self.destinations[index].tries_one_alone() {
            true => _ = delivered.alone.insert(index),
            false => _ = delivered.alone.remove(&index),
        }
    }

    /// Takes ready messages from the fast path for all destinations. Those that a destination may not take now are read
    /// from the table.
    fn receive(&mut self, delivered: &mut Delivered) {
        let mut ready = self.common.runtime.take_ready();
        while let Some(first) = ready.first() {
            let name = first.pointer.destination.clone();
            let is_its = |arrived: &mut Arrived| arrived.pointer.destination == name;
            let arrived: Vec<Arrived> = ready.extract_if(.., is_its).collect();
            let Some(index) = self.roster.find(&name) else {
                give_up(&self.common.runtime, arrived); // it was dropped
                continue;
            };
            self.join(index, delivered);
            let (may_claim, count) = (self.may_claim(index, delivered), arrived.len());
            let taken = self.destinations[index].receive(&self.common, arrived, may_claim);
            self.note_alone(index, delivered);
            delivered.messages += taken;
            if taken < count && delivered.served.contains(&index) {
                delivered.wait_at_most(0); // its claim of this pass came too early for those that were given up
            }
        }
    }

    // ---- rewinds and due messages -----------------------------------------------------------------------------------

    /// Takes the rewinds of all lanes, before any claim of the pass, unless nothing may be claimed. Returns those that may
    /// be for destinations that have read all else: each with the index of the destination.
    fn take_rewinds(&mut self, pause: &mut Pause) -> Result<Vec<(usize, Partition, i64)>, R::Error> {
        let mut shared = Vec::new();
        let leases = claimable(&self.leases.held, &self.leases.leaving);
        if leases.is_empty() || self.common.rests || self.retry_at.is_some() {
            return Ok(shared);
        }
        let now_ms = self.common.now_ms();
        match self.common.runtime.take_rewinds(self.roster.distinct_groups(), &leases) {
            Ok(rewinds) => {
                for Rewound { partition, lane, seq } in rewinds {
                    if lane == RewindLane::UNBLOCKED {
                        for index in 0..self.destinations.len() {
                            if self.destinations[index].unblock(partition, seq) {
                                self.wake(index);
                            }
                        }
                        continue;
                    }
                    for index in self.roster.in_lane(|group| group.lane(partition) == lane) {
                        match self.destinations[index].claims_only_for_rewinds(now_ms) {
                            true => shared.push((index, partition, seq)),
                            // It claims anyway, or when it can.
                            false => self.destinations[index].rewind(partition, seq),
                        }
                    }
                }
            }
            // Some may have been taken and then lost on the way, so all lanes are read from the start.
            Err(error) => {
                pause.shorten(self.common.runtime.failed(error)?);
                self.reread_from_start(&leases);
            }
        }
        Ok(shared)
    }

    fn reread_from_start(&mut self, leases: &[HeldLease]) {
        for index in 0..self.destinations.len() {
            let destination = &mut self.destinations[index];
            for (partition, _) in leases {
                destination.rewind(*partition, 1);
                destination.unblock(*partition, 1);
            }
            self.wake(index);
        }
        self.needs_survey = true;
    }

    /// Wakes the destinations that the rewinds are for. If many share them, one statement finds those that have messages;
    /// its cost does not depend on what waits, nor on destinations that fail.
    fn share_out(&mut self, mut shared: Vec<(usize, Partition, i64)>, pause: &mut Pause) -> Result<(), R::Error> {
        let sharers: HashSet<usize> = shared.iter().map(|(index, ..)| *index).collect();
        if shared.len() > LANES_ASKED_MAX {
            self.needs_survey = true;
        } else if sharers.len() > R::READERS_UNASKED {
            let lane = |(index, partition, seq): &(usize, Partition, i64)| {
                (&*self.destinations[*index].name, *partition, *seq)
            };
            let lanes: Vec<(&str, Partition, i64)> = shared.iter().map(lane).collect();
            match self.common.runtime.tables().lanes_with_messages(&lanes) {
                Ok(found) => {
                    shared = found
                        .into_iter()
                        .filter_map(|place| shared.get(place).copied())
                        .collect()
                }
                Err(error) => pause.shorten(self.common.runtime.failed(error)?), // all read
            }
        }
        for (index, partition, seq) in shared {
            self.destinations[index].rewind(partition, seq);
            self.wake(index);
        }
        Ok(())
    }

    /// Finds the destinations that have messages, if that is needed, and every `SWEEP_EVERY` for rows that no rewind
    /// announced. One statement, whatever the number of destinations; those without messages need none of their own.
    /// Called after the rewinds were taken.
    fn survey(&mut self, pause: &mut Pause) -> Result<(), R::Error> {
        let now = self.common.runtime.now();
        let is_idle = self.leases.held.is_empty() || self.common.rests || self.retry_at.is_some();
        let is_sweep = now >= self.sweep_due;
        if is_idle || !(is_sweep || self.needs_survey) {
            return Ok(());
        }
        (0..self.destinations.len()).for_each(|index| _ = self.wake(index));
        let found: HashSet<String> = match self.common.runtime.tables().destinations_with_messages() {
            Ok(found) => found.into_iter().collect(),
            Err(error) => {
                pause.shorten(self.common.runtime.failed(error)?);
                return Ok(());
            }
        };
        self.needs_survey = false;
        for index in self.roster.active() {
            let destination = &mut self.destinations[index];
            let has_none = !found.contains(&destination.name) && destination.found_none();
            if is_sweep && !has_none {
                destination.sweep();
            }
        }
        if is_sweep {
            self.sweep_due = now + SWEEP_EVERY;
        }
        Ok(())
    }

    /// Brings due messages back to `outbox`, for all destinations.
    fn bring_due(&mut self, delivered: &mut Delivered) -> Result<(), R::Error> {
        let takes_due = |destination: &Destination<R>| destination.takes_due();
        if self.retry_at.is_some() || !self.destinations.iter().any(takes_due) {
            return Ok(());
        }
        let (has_read_limit, now_ms) = (self.has_read_limit(), self.common.now_ms());
        let leases = claimable(&self.leases.held, &self.leases.leaving);
        let leased = (self.sharing == Sharing::Leases).then_some(leases.as_slice());
        let mut moved = Vec::new();
        let rewind =
            |name: &str, partition, seq| moved.extend(self.roster.find(name).map(|index| (index, partition, seq)));
        let (runtime, schedules) = (&self.common.runtime, self.common.runtime.schedules());
        (self.due).bring_due(runtime.tables(), leased, schedules, now_ms, has_read_limit, rewind)?;
        for (index, partition, seq) in moved {
            self.destinations[index].rewind(partition, seq);
            self.join(index, delivered);
        }
        delivered.has_brought_due = true;
        Ok(())
    }

    fn has_read_limit(&self) -> bool {
        let mut active = self.roster.active();
        active.any(|index| self.destinations[index].has_read_limit(&self.common))
    }

    // ---- standbys ---------------------------------------------------------------------------------------------------

    /// If standbys must have a commit before its message is sent: learns how much WAL they have, while messages wait
    /// for them. Returns in how many ms to check again; None = no message waits.
    fn check_standbys(&mut self, pause: &mut Pause) -> Result<Option<u32>, R::Error> {
        if self.common.settings.standbys.is_none() || self.common.leaves {
            return Ok(None);
        }
        match self.read_standbys() {
            Ok(checks_in_ms) => Ok(checks_in_ms),
            Err(error) => {
                pause.shorten(self.common.runtime.failed(error)?); // until then nothing is sent
                Ok(None)
            }
        }
    }

    fn read_standbys(&mut self) -> Result<Option<u32>, R::Error> {
        let mut active = self.roster.active();
        let are_new = active.any(|index| self.destinations[index].lacks_wal_position());
        let now_ms = self.common.now_ms();
        let is_due = |needed| self.common.standbys.is_check_due(needed, now_ms);
        let was_awaited = (self.awaited_wal()).is_some_and(|needed| !self.common.standbys.may_send(needed));
        if are_new || self.awaited_wal().is_some_and(is_due) {
            let Replication { durable, connected } = self.common.runtime.replication()?;
            for index in self.roster.active() {
                self.destinations[index].set_wal_position(durable);
            }
            self.take_replication(&connected, self.awaited_wal().unwrap_or(durable), now_ms);
        }
        let standbys = &self.common.standbys;
        Ok(match self.awaited_wal() {
            None => None,
            Some(needed) if !standbys.may_send(needed) => Some(standbys.checks_in_ms(now_ms) as u32),
            Some(_) => (are_new || was_awaited).then_some(0), // the next pass hands them over
        })
    }

    /// The position in WAL that the standbys must have before all ready messages are handed over.
    fn awaited_wal(&self) -> Option<WalPosition> {
        let active = self.roster.active();
        active.filter_map(|index| self.destinations[index].awaited_wal()).max()
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
            self.common.runtime.log(None, format_args!("{text}"));
        }
    }
}
