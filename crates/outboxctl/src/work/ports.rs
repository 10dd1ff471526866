//! What the engine of crates/core stands on outside the server: the tables and shared memory, both by the session. Used on
//! the thread of the worker.

use super::session::{Glance, Place, Reopened, Session, Trouble, TroubleKind};
use outbox_core::engine::{self, Batch, Due, Held, Lane, Memory, Settlement};
use outbox_core::gate::{Found, OrderedKey};
use outbox_core::hold::{FILTER_WORDS, OpenTransaction};
use outbox_core::partition::Partition;
use outbox_core::settle::{Disposition, Rules};
use std::cell::{Cell, RefCell};
use std::collections::HashMap;

/// The destination of who names none.
pub const DEFAULT_DESTINATION: &str = "default";

type Lows = HashMap<Partition, i64>;

/// What the destinations of one worker tell each other, and what the session last told of shared memory.
#[derive(Default)]
pub struct Shared {
    /// The partitions that are leased.
    partitions: RefCell<Vec<Partition>>,
    /// The destinations that are served, and from where each must read a partition again.
    told: RefCell<Vec<(String, Lows)>>,
    /// Whether this pass has brought back what is due, and in how many ms the next is.
    brought: Cell<Option<Option<u64>>>,
    waiting_changes: Cell<u32>,
    /// Seen right after a claim, and not asked for yet.
    glance: RefCell<Option<Result<Glance, Trouble>>>,
    /// What was committed meanwhile, as the last glance saw it.
    reopened: RefCell<Vec<Reopened>>,
    /// What went wrong where the engine expects an answer.
    trouble: RefCell<Option<Trouble>>,
}

impl Shared {
    /// These destinations are served from now on.
    pub fn serve(&self, destinations: Vec<String>) {
        let mut before = self.told.take();
        let with_lows = |name: String| {
            let known = before.iter_mut().find(|(known, _)| *known == name);
            let lows = known.map(|(_, lows)| std::mem::take(lows)).unwrap_or_default();
            (name, lows)
        };
        self.told.replace(destinations.into_iter().map(with_lows).collect());
    }

    pub fn hold(&self, leases: &[Held]) {
        self.partitions
            .replace(leases.iter().map(|(partition, _)| *partition).collect());
    }

    pub fn begin_pass(&self, waiting_changes: u32) {
        self.brought.set(None);
        self.waiting_changes.set(waiting_changes);
    }

    /// What went wrong since the last call, where it could not be said.
    pub fn take_trouble(&self) -> Option<Trouble> {
        self.trouble.take()
    }

    fn tell(&self, destination: &str, partition: Partition, seq: i64) {
        self.tell_those(|name| name == destination, partition, seq);
    }

    fn tell_those(&self, whom: impl Fn(&str) -> bool, partition: Partition, seq: i64) {
        for (_, lows) in self.told.borrow_mut().iter_mut().filter(|(name, _)| whom(name)) {
            let low = lows.entry(partition).or_insert(seq);
            *low = seq.min(*low);
        }
    }
}

/// The tables, for one destination.
pub struct Tables<'a> {
    session: &'a Session,
    shared: &'a Shared,
    destination: &'a str,
    /// How a dead letter is settled.
    dead_action: &'static str,
    /// Rows of some lane were locked lately: each lane is claimed alone, and a locked one left out.
    pub lane_by_lane: bool,
    /// Messages that were no longer ours to settle.
    pub missed: usize,
    /// When messages were confirmed, by seq, in µs since 1970: to tell how long they took.
    confirmed_us: &'a HashMap<i64, i64>,
}

impl<'a> Tables<'a> {
    pub fn new(
        session: &'a Session,
        shared: &'a Shared,
        destination: &'a str,
        rules: &Rules,
        confirmed_us: &'a HashMap<i64, i64>,
    ) -> Self {
        Self {
            session,
            shared,
            destination,
            dead_action: rules.dead_action(),
            lane_by_lane: false,
            missed: 0,
            confirmed_us,
        }
    }
}

impl engine::Store for Tables<'_> {
    type Place = Place;
    type Error = Trouble;

    fn settle(&mut self, batch: &[Settlement<Place>]) -> Result<(), Trouble> {
        let published = batch.iter().filter(|ended| ended.disposition == Disposition::Publish);
        let took = |ended: &Settlement<Place>| {
            let confirmed_us = self.confirmed_us.get(&ended.pointer.seq)?;
            Some((confirmed_us - ended.pointer.enqueued_at_us).max(0))
        };
        let took_us: Vec<i64> = published.filter_map(took).collect();
        let changed = self
            .session
            .settle(self.destination, batch, self.dead_action, &took_us)?;
        self.missed += batch.len().saturating_sub(changed);
        Ok(())
    }

    fn claim(&mut self, lanes: &[Lane]) -> Result<Batch<Place>, Trouble> {
        self.shared.glance.replace(None);
        if !self.lane_by_lane && engine::reach_the_same(lanes) {
            let partitions = self.shared.partitions.borrow();
            let both = self.session.claim_and_glance(self.destination, lanes, &partitions)?;
            match both.claimed {
                // What was seen then is older than the claims that follow.
                Err(trouble) if trouble.kind == TroubleKind::Locked => self.lane_by_lane = true,
                Err(trouble) => return Err(trouble),
                Ok(batch) => {
                    self.shared.glance.replace(Some(both.glance));
                    return Ok(batch);
                }
            }
        }
        // Somebody holds a row of these lanes, and the other lanes go on; or some are read only as far as one that failed.
        let mut all = Batch::default();
        for lane in lanes {
            if all.is_large() {
                all.cut = true; // the other lanes have their turn with the next claim
                break;
            }
            match self.session.claim_lane(self.destination, lane) {
                Ok(batch) => all.add(batch),
                Err(trouble) if trouble.kind == TroubleKind::Locked => {
                    self.lane_by_lane = true;
                    all.locked.push(lane.partition);
                }
                // Those before it are claimed and committed: whatever happened, they go on.
                Err(trouble) if !all.rows.is_empty() => {
                    all.locked.push(lane.partition);
                    self.shared.trouble.replace(Some(trouble));
                }
                Err(trouble) => return Err(trouble),
            }
        }
        all.rows.sort_by_key(|claimed| claimed.pointer.seq);
        Ok(all)
    }

    fn claim_unleased(&mut self, limit: u32) -> Result<Batch<Place>, Trouble> {
        self.session.claim_unleased(self.destination, limit)
    }

    fn claim_waiting(
        &mut self,
        key: &OrderedKey,
        epoch: i64,
        reach: i64,
        limit: u32,
    ) -> Result<(Batch<Place>, bool), Trouble> {
        self.session.claim_waiting(key, epoch, reach, limit)
    }

    /// For all destinations at once, by the first that asks in a pass; the others are told where theirs are.
    fn bring_due(&mut self, leases: Option<&[Held]>) -> Result<Due, Trouble> {
        if let Some(next_ms) = self.shared.brought.get() {
            return Ok((Vec::new(), next_ms));
        }
        let mut next_ms = self.session.next_due_ms()?;
        let mut own = Vec::new();
        if next_ms == Some(0) {
            for (destination, partition, seq) in self.session.bring_due(leases)? {
                match destination == self.destination {
                    true => own.push((partition, seq)),
                    false => self.shared.tell(&destination, partition, seq),
                }
            }
            next_ms = self.session.next_due_ms()?;
        }
        self.shared.brought.set(Some(next_ms));
        Ok((own, next_ms))
    }

    fn gates(&mut self, partitions: &[Partition]) -> Result<Vec<Found>, Trouble> {
        let mut found = self.session.gates(partitions)?;
        found.retain(|found| found.key.destination == self.destination);
        Ok(found)
    }
}

/// Shared memory, for one destination. Where the engine expects an answer and there is none, it gets the one that keeps
/// most back, and `Shared::take_trouble` tells.
pub struct Lanes<'a> {
    pub session: &'a Session,
    pub shared: &'a Shared,
    pub destination: &'a str,
}

impl Lanes<'_> {
    fn told<T>(&self, read: impl FnOnce(&mut Lows) -> Option<T>) -> Option<T> {
        let mut told = self.shared.told.borrow_mut();
        let (_, lows) = told.iter_mut().find(|(name, _)| name == self.destination)?;
        read(lows)
    }
}

impl Memory for Lanes<'_> {
    /// With what `take_reopen` will be asked for: the session answers for all partitions and destinations at once.
    fn notice_prepared(&self) {
        let partitions = self.shared.partitions.borrow();
        match self.session.reopened(&partitions) {
            Ok(lows) => {
                for low in lows {
                    for (seq, is_default) in [(low.default, true), (low.others, false)] {
                        if let Some(seq) = seq {
                            let whom = |name: &str| (name == DEFAULT_DESTINATION) == is_default;
                            self.shared.tell_those(whom, low.partition, seq);
                        }
                    }
                }
            }
            Err(trouble) => {
                // It may have been taken and lost on its way: all is read from its start.
                for partition in partitions.iter() {
                    self.shared.tell_those(|_| true, *partition, 1);
                }
                self.shared.trouble.replace(Some(trouble));
            }
        }
    }

    fn open_transactions(&self) -> Vec<OpenTransaction> {
        let seen = self.shared.glance.take();
        let seen = seen.unwrap_or_else(|| self.session.glance(&self.shared.partitions.borrow()));
        match seen {
            Ok(glance) => {
                self.shared.reopened.replace(glance.reopened);
                glance.open
            }
            Err(trouble) => {
                self.shared.trouble.replace(Some(trouble));
                self.shared.reopened.replace(Vec::new());
                vec![OpenTransaction {
                    low: i64::MIN,
                    filter: Box::new([u64::MAX; FILTER_WORDS]),
                }]
            }
        }
    }

    fn take_reopen(&self, partition: Partition) -> Option<i64> {
        self.told(|lows| lows.remove(&partition))
    }

    fn look_at_reopen(&self, partition: Partition) -> Option<i64> {
        let told = self.told(|lows| lows.get(&partition).copied());
        let reopened = self.shared.reopened.borrow();
        let new = reopened.iter().find(|low| low.partition == partition);
        let new = new.and_then(|low| match self.destination == DEFAULT_DESTINATION {
            true => low.default,
            false => low.others,
        });
        told.into_iter().chain(new).min()
    }

    fn waiting_changes(&self) -> u32 {
        self.shared.waiting_changes.get()
    }
}
