//! The phases of a pass that take messages and settle them. A part of [`Worker`].
//!
//! 1. Each destination hands over what is ready, and decides how many messages it may take.
//! 2. Steps that may wait for the disk or for a lock. Before each, ready messages of the fast path are received.
//!    For each destination: settle first if it must, report, take rewinds, bring back due messages if no destination of
//!    this pass has, claim and hand over. Then for each: settle what is due.

use super::{Pause, Worker};
use crate::destination::{Destination, give_up};
use crate::runtime::Runtime;
use outbox_core::engine::{Arrived, Sharing, claimable};
use outbox_core::standbys::{Replication, Standby, WalPosition};
use std::collections::VecDeque;

/// A step of a pass. The number is the index of a destination.
#[derive(Clone, Copy, Debug)]
enum Step {
    Serve(usize),
    SettleFirst(usize),
    Claim(usize),
    Settle(usize),
}

/// What the steps of a pass have done.
struct Delivered {
    /// The number of messages taken.
    messages: usize,
    /// The destinations whose claims have begun.
    served: Vec<usize>,
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
            served: Vec::new(),
            has_brought_due: false,
            wait_ms: self.common.settings.idle_backoff_ms,
        };
        self.check_standbys(pause)?;
        (0..self.destinations.len()).for_each(|index| self.set_allowance(index)); // it also decides that one may not claim
        let common = &self.common;
        (self.destinations.iter_mut()).for_each(|destination| destination.give_back(common));
        let (last, first): (Vec<usize>, Vec<usize>) =
            (0..self.destinations.len()).partition(|index| self.destinations[*index].must_settle());
        let mut steps: VecDeque<Step> = first.into_iter().chain(last).map(Step::Serve).collect();
        while let Some(step) = steps.pop_front() {
            if self.common.runtime.is_ending() && !matches!(step, Step::Settle(_)) {
                continue;
            }
            if self.may_wait(step) {
                self.receive(&mut delivered);
            }
            // A step that fails does not stop those of other destinations.
            if let Err(error) = self.take_step(step, &mut steps, &mut delivered, pause) {
                pause.shorten(self.common.runtime.failed(error)?);
                if matches!(step, Step::Settle(_)) && self.retry_at.is_some() {
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

    /// Whether the step may wait for the disk or for a lock.
    fn may_wait(&self, step: Step) -> bool {
        match step {
            Step::Serve(_) => false,
            Step::SettleFirst(_) | Step::Claim(_) => true,
            Step::Settle(index) => self.destinations[index].is_settle_due(&self.common),
        }
    }

    fn take_step(
        &mut self,
        step: Step,
        steps: &mut VecDeque<Step>,
        delivered: &mut Delivered,
        pause: &mut Pause,
    ) -> Result<(), R::Error> {
        match step {
            Step::Serve(index) => {
                self.destinations[index].give_back(&self.common);
                steps.push_front(match self.destinations[index].must_settle() {
                    true => Step::SettleFirst(index),
                    false => Step::Claim(index),
                });
            }
            Step::SettleFirst(index) => match self.settle_some(index)? {
                true => steps.push_front(step),
                false => {
                    self.set_allowance(index);
                    steps.push_front(Step::Claim(index));
                }
            },
            Step::Claim(index) => {
                steps.push_back(Step::Settle(index)); // also if nothing can be claimed
                delivered.served.push(index);
                self.destinations[index].report(&self.common)?;
                let may_claim = self.may_claim(index);
                if may_claim && self.destinations[index].takes_due() {
                    self.take_rewinds(index, pause)?;
                    if !delivered.has_brought_due {
                        self.bring_due()?;
                        delivered.has_brought_due = true;
                    }
                }
                let (messages, wait_ms) = self.destinations[index].claim(&self.common, may_claim)?;
                delivered.messages += messages;
                delivered.wait_at_most(wait_ms);
            }
            Step::Settle(index) => {
                if self.destinations[index].is_settle_due(&self.common) {
                    let had_room = self.destinations[index].has_room(&self.common);
                    if self.settle_some(index)? {
                        steps.push_front(step);
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

    fn set_allowance(&mut self, index: usize) {
        let may_claim = self.may_claim(index);
        self.destinations[index].set_allowance(&self.common, may_claim);
    }

    fn settle_some(&mut self, index: usize) -> Result<bool, R::Error> {
        let more = self.destinations[index].settle_some(&self.common);
        self.due.note(self.destinations[index].take_retry_at_ms());
        more
    }

    /// Whether this destination may claim. Not while another one tries a message alone: if that message crashes the
    /// worker, the crash would be charged to every message claimed with it.
    fn may_claim(&self, index: usize) -> bool {
        let mut others = (self.destinations.iter().enumerate()).filter(|(other, _)| *other != index);
        self.retry_at.is_none() && others.all(|(_, other)| !other.tries_one_alone())
    }

    /// Takes ready messages from the fast path for all destinations. Those that a destination may not take now are read
    /// from the table.
    fn receive(&mut self, delivered: &mut Delivered) {
        let mut ready = self.common.runtime.take_ready();
        for index in 0..self.destinations.len() {
            if ready.is_empty() {
                return;
            }
            let name = &self.destinations[index].name;
            let is_its = |arrived: &mut Arrived| *arrived.pointer.destination == **name;
            let arrived: Vec<Arrived> = ready.extract_if(.., is_its).collect();
            if !arrived.is_empty() {
                let (may_claim, count) = (self.may_claim(index), arrived.len());
                let taken = self.destinations[index].receive(&self.common, arrived, may_claim);
                delivered.messages += taken;
                if taken < count && delivered.served.contains(&index) {
                    delivered.wait_at_most(0); // its claim of this pass came too early for those that were given up
                }
            }
        }
        give_up(&self.common.runtime, ready); // of destinations that were dropped
    }

    // ---- rewinds and due messages -----------------------------------------------------------------------------------

    /// Takes the rewinds of a destination's lanes before its claim. Others may share them.
    fn take_rewinds(&mut self, index: usize, pause: &mut Pause) -> Result<(), R::Error> {
        let (runtime, destination) = (&self.common.runtime, &self.destinations[index]);
        let leases = claimable(&self.leases.held, &self.leases.leaving);
        match runtime.take_rewinds(&destination.name, &leases) {
            Ok(rewinds) => {
                let name = destination.name.clone();
                let shares = |other: &&mut Destination<R>| runtime.share_rewinds(&name, &other.name);
                for other in self.destinations.iter_mut().filter(shares) {
                    rewinds
                        .iter()
                        .for_each(|(partition, seq)| other.rewind(*partition, *seq));
                }
            }
            // Some may have been taken and then lost on the way, so all lanes are read from the start.
            Err(error) => {
                pause.shorten(runtime.failed(error)?);
                for other in &mut self.destinations {
                    leases.iter().for_each(|(partition, _)| other.rewind(*partition, 1));
                }
            }
        }
        Ok(())
    }

    /// Brings due messages back to `outbox`, for all destinations.
    fn bring_due(&mut self) -> Result<(), R::Error> {
        let (has_read_limit, now_ms) = (self.has_read_limit(), self.common.now_ms());
        let leases = claimable(&self.leases.held, &self.leases.leaving);
        let leased = (self.sharing == Sharing::Leases).then_some(leases.as_slice());
        let (runtime, destinations) = (&self.common.runtime, &mut self.destinations);
        let rewind = |name: &str, partition, seq| {
            if let Some(destination) = destinations.iter_mut().find(|destination| destination.name == name) {
                destination.rewind(partition, seq);
            }
        };
        let counters = runtime.due_counters();
        let are_unblocked = (self.due).bring_due(runtime.tables(), leased, counters, now_ms, has_read_limit, rewind)?;
        if are_unblocked {
            self.destinations.iter_mut().for_each(Destination::reread_all);
        }
        Ok(())
    }

    fn has_read_limit(&self) -> bool {
        let mut destinations = self.destinations.iter();
        destinations.any(|destination| destination.has_read_limit(&self.common))
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
        let awaited = |destinations: &[Destination<R>]| destinations.iter().filter_map(Destination::awaited_wal).max();
        let are_new = self.destinations.iter().any(Destination::lacks_wal_position);
        let now_ms = self.common.now_ms();
        let is_due = |needed| self.common.standbys.is_check_due(needed, now_ms);
        let was_awaited = awaited(&self.destinations).is_some_and(|needed| !self.common.standbys.may_send(needed));
        if are_new || awaited(&self.destinations).is_some_and(is_due) {
            let Replication { durable, connected } = self.common.runtime.replication()?;
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
            self.common.runtime.log(None, format_args!("{text}"));
        }
    }
}
