//! Everything that the workers share: tables, memory, sessions, brokers, the clock and the dice; and the ports through
//! which an engine sees it. Before each access of an engine the others may take a few steps.

use super::broker::Broker;
use super::config::{Config, Flaw};
use super::dice::Dice;
use super::memory::{Entry, Memory};
use super::oracle::{End, Fate, Oracle};
use super::run::Simulation;
use super::sessions::{Effects, Prepared, Session};
use super::tables::{Action, Claim, Row, Tables};
use outbox_core::engine::{self, Batch, CRASHES_MAX, Claimed, Due, Held, Lane, Settlement};
use outbox_core::gate::{Found, OrderedKey};
use outbox_core::hold::OpenTransaction;
use outbox_core::message::{Event, Pointer};
use outbox_core::partition::Partition;
use outbox_core::settle::{Disposition, EXPIRED, Ordering};
use std::collections::BTreeSet;

pub struct World {
    pub config: Config,
    pub dice: Dice,
    pub now_ms: u64,
    /// No faults, no new transactions: what is there shall end.
    pub calm: bool,
    pub tables: Tables,
    pub memory: Memory,
    pub oracle: Oracle,
    pub sessions: Vec<Session>,
    pub prepared: Prepared,
    /// Transactions that are about to be prepared.
    pub preparing: BTreeSet<u64>,
    pub effects: Effects,
    pub brokers: Vec<Broker>,
    pub sequence: i64,
    pub transactions: u64,
    /// A worker's transaction holds the rows of the leases.
    pub leases_locked: bool,
    pub steps: u64,
}

impl World {
    pub fn new(config: &Config, seed: u64) -> Self {
        Self {
            config: config.clone(),
            dice: Dice::new(seed),
            now_ms: 1,
            calm: false,
            tables: Tables::new(config.partitions),
            memory: Memory::new(config.partitions, config.flaw),
            oracle: Oracle::new(config.workers, config.ordering == Ordering::Partition),
            sessions: (0..config.sessions).map(|_| Session::new()).collect(),
            prepared: Prepared::new(),
            preparing: BTreeSet::new(),
            effects: Effects::new(),
            brokers: (0..config.workers).map(|_| Broker::new()).collect(),
            sequence: 0,
            transactions: 0,
            leases_locked: false,
            steps: 0,
        }
    }

    pub fn store_fails(&mut self) -> bool {
        !self.calm && self.dice.chance(self.config.store_errors)
    }

    /// The server crashes: memory is lost, open transactions with it; the tables and what is prepared stay.
    pub fn crash(&mut self) {
        self.sessions.iter_mut().for_each(Session::crash);
        self.preparing.clear();
        self.effects.clear();
        self.memory = Memory::new(self.config.partitions, self.config.flaw);
        self.forget_prepared_order();
    }

    fn is_in_progress(&self, xid: u64) -> bool {
        self.prepared.contains_key(&xid) || self.preparing.contains(&xid)
    }

    /// In order of seq, and whether it stops before all that the limits allow, for the events are large.
    fn cut(&mut self, seen: &mut Vec<Claim>) -> bool {
        seen.sort_unstable_by_key(|(seq, _, _)| *seq);
        let cut = seen.len() > 1 && self.dice.chance(500);
        if cut {
            seen.truncate(1 + self.dice.below(seen.len() - 1));
        }
        cut
    }
}

/// What lies in shared memory of a message that nobody has claimed.
pub fn as_claimed(world: &World, seq: i64) -> Claimed<u64> {
    let message = &world.oracle.messages[&seq];
    let row = (seq, message.partition, Row::new(message.key));
    claimed(&row, 0, &world.oracle)
}

fn claimed((seq, partition, row): &Claim, epoch: i64, oracle: &Oracle) -> Claimed<u64> {
    Claimed {
        place: *seq as u64,
        pointer: Pointer {
            seq: *seq,
            destination: "default".into(),
            partition: partition_of(*partition),
            key: row.key.map(key_name),
            attempts: row.attempts,
            crashes: row.crashes,
            lease_epoch: epoch,
            replayed: false,
            enqueued_at_us: 0,
            expires_at_us: match oracle.messages[seq].fate {
                Fate::Expires { at_ms } => Some(at_ms as i64 * 1_000),
                _ => None,
            },
        },
        event: Ok(Event {
            seq: *seq,
            ..Event::default()
        }),
    }
}

pub fn key_name(key: u32) -> String {
    format!("k{key}")
}

fn key_number(name: &str) -> u32 {
    name[1..].parse().expect("a key's name is k and a number")
}

pub fn partition_of(index: u16) -> Partition {
    Partition::new(i64::from(index)).expect("below the count")
}

pub fn plain(leases: &[Held]) -> Vec<(u16, i64)> {
    leases
        .iter()
        .map(|(partition, epoch)| (partition.index(), *epoch))
        .collect()
}

// ---- ports ----------------------------------------------------------------------------------------------------------

/// What one worker's engine stands on.
pub struct Ports<'a> {
    pub simulation: &'a Simulation,
    pub worker: usize,
}

#[derive(Debug)]
pub struct Failed;

impl Ports<'_> {
    /// Another transaction: the others take steps before it, and it may fail.
    fn transaction<T>(&self, body: impl FnOnce(&mut World, &str) -> T) -> Result<T, Failed> {
        self.simulation.interrupt(self.worker);
        let mut world = self.simulation.world.borrow_mut();
        if world.store_fails() {
            return Err(Failed);
        }
        Ok(body(&mut world, &name(self.worker)))
    }

    fn with<T>(&self, body: impl FnOnce(&mut World) -> T) -> T {
        body(&mut self.simulation.world.borrow_mut())
    }

    /// One transaction: what it saw may have changed when it comes to update it.
    fn claim_lanes(&self, lanes: &[Lane]) -> Result<Batch<u64>, Failed> {
        let epoch = |partition| {
            let lane = lanes.iter().find(|lane| lane.partition.index() == partition);
            lane.expect("asked for").epoch
        };
        let (seen, cut) = self.transaction(|world, me| {
            let again = world.config.flaw == Some(Flaw::ClaimRepeats);
            let mut seen = (lanes.iter())
                .flat_map(|lane| world.tables.see(me, lane, again))
                .collect();
            let cut = world.cut(&mut seen);
            (seen, cut)
        })?;
        self.transaction(|world, me| {
            let wanted = seen.len();
            let rows = world.tables.mark_claimed(seen, epoch);
            rows.iter().for_each(|row| note_claimed(world, me, row));
            Batch {
                missed: rows.len() < wanted,
                rows: rows
                    .iter()
                    .map(|row| claimed(row, epoch(row.1), &world.oracle))
                    .collect(),
                cut,
                locked: Vec::new(),
            }
        })
    }

    /// Forgets prepared transactions that are over.
    fn reap(&self) {
        for place in 0..self.with(|world| world.memory.prepared.len()) {
            let entry = |world: &World| world.memory.prepared[place].as_ref().map(|e| (e.tenant, e.xid, e.low));
            let Some((tenant, _, _)) = self.with(|world| entry(world)) else {
                continue;
            };
            self.simulation.interrupt(self.worker);
            let over = self.with(|world| entry(world).is_some_and(|(_, xid, _)| !world.is_in_progress(xid)));
            if !over {
                continue;
            }
            self.simulation.interrupt(self.worker);
            // Two may see it at once: each tells before either frees.
            if let Some((_, _, low)) = self.with(|world| entry(world)) {
                self.reopen_all(low);
            }
            self.with(|world| {
                if entry(world).is_some_and(|(now, _, _)| now == tenant) {
                    world.memory.prepared[place] = None;
                }
            });
        }
    }

    fn reopen_all(&self, low: i64) {
        for partition in 0..self.with(|world| world.memory.lanes()) {
            self.with(|world| world.memory.reopen(partition, low));
            self.simulation.interrupt(self.worker);
        }
    }

    /// A worker begins: the first one after a crash of the server looks for what is prepared.
    pub fn begin(&self) {
        self.with(|world| world.memory.places.begin_worker(self.worker));
        if self.with(|world| world.memory.has_adopted) {
            return;
        }
        let found: Vec<u64> = self.with(|world| world.prepared.keys().copied().collect());
        self.simulation.interrupt(self.worker);
        self.with(|world| {
            world.memory.adopt(&found);
            world.memory.has_adopted = true;
        });
        self.simulation.interrupt(self.worker);
        self.reopen_all(1);
    }

    /// The entry of a session, read piece by piece; None when it has none.
    fn read_session(&self, session: usize) -> Option<OpenTransaction> {
        let entry = |world: &World| world.memory.sessions.get(&session).map(|e| (e.tenant, e.low));
        loop {
            let (tenant, low) = self.with(|world| entry(world))?;
            self.simulation.interrupt(self.worker);
            let filter = self.with(|world| Some(world.memory.sessions.get(&session)?.filter.clone()));
            let same = self.with(|world| entry(world).is_some_and(|(now, _)| now == tenant));
            if let (Some(filter), true) = (filter, same) {
                return Some(OpenTransaction { low, filter });
            }
        }
    }
}

pub fn name(worker: usize) -> String {
    format!("server-{}", worker + 1)
}

impl engine::Store for Ports<'_> {
    type Place = u64;
    type Error = Failed;

    fn settle(&mut self, batch: &[Settlement<u64>]) -> Result<(), Failed> {
        let worker = self.worker;
        let flaw = self.with(|world| world.config.flaw);
        let before = match flaw {
            Some(Flaw::SettleHoldsNoLease) => {
                let leases = self.with(|world| world.tables.leases.clone());
                self.simulation.interrupt(self.worker);
                Some(leases)
            }
            _ => None,
        };
        self.transaction(|world, me| {
            let fenced = flaw != Some(Flaw::SettleIgnoresLease);
            let now = before.map(|before| std::mem::replace(&mut world.tables.leases, before));
            for Settlement {
                pointer, disposition, ..
            } in batch
            {
                let (seq, epoch) = (pointer.seq, pointer.lease_epoch);
                let at = (pointer.partition.index(), seq);
                let ours = world.tables.is_claimed(me, at, epoch, fenced, true);
                world.oracle.note(seq, || format!("{disposition:?}, ours: {ours}"));
                if ours {
                    settle_one(world, me, at, epoch, disposition);
                }
                world.oracle.settled(worker, seq, epoch, ours);
            }
            if let Some(now) = now {
                world.tables.leases = now;
            }
        })
    }

    fn claim(&mut self, lanes: &[Lane]) -> Result<Batch<u64>, Failed> {
        let locks = |world: &mut World, n| !world.calm && world.config.faults > 0 && world.dice.chance(n);
        if !self.with(|world| locks(world, 300)) {
            return self.claim_lanes(lanes);
        }
        // Somebody holds rows locked: lane by lane.
        let mut all = Batch::default();
        for lane in lanes {
            if self.with(|world| locks(world, 4_000)) {
                all.locked.push(lane.partition);
                continue;
            }
            match self.claim_lanes(std::slice::from_ref(lane)) {
                Ok(batch) => {
                    all.rows.extend(batch.rows);
                    all.cut |= batch.cut;
                    all.missed |= batch.missed;
                }
                // What was claimed must not be forgotten for what was not.
                Err(Failed) => all.locked.push(lane.partition),
            }
        }
        all.rows.sort_by_key(|claimed| claimed.pointer.seq);
        Ok(all)
    }

    fn claim_unleased(&mut self, _: u32) -> Result<Batch<u64>, Failed> {
        Err(Failed)
    }

    fn claim_waiting(
        &mut self,
        key: &OrderedKey,
        epoch: i64,
        reach: i64,
        limit: u32,
    ) -> Result<(Batch<u64>, bool), Failed> {
        let name = key.key.as_deref().expect("of a partition nothing waits behind another");
        let of = (key.partition.index(), key_number(name));
        let (seen, cut) = self.transaction(|world, me| {
            if world.leases_locked {
                return Err(Failed);
            }
            // Or what it moves lies where the next worker has read already.
            world.tables.kept.push(of.0);
            let mut seen = world.tables.see_waiting(me, of, epoch, reach, limit as usize);
            let cut = seen.len() > 1 && world.dice.chance(500);
            if cut {
                seen.truncate(1 + world.dice.below(seen.len() - 1));
            }
            Ok((seen, cut))
        })??;
        let claimed = self.transaction(|world, me| {
            let rows = world.tables.claim_waiting(&seen, epoch);
            for (seq, _, row) in &rows {
                world
                    .oracle
                    .note(*seq, || format!("claimed by {me} from waiting, {row:?}"));
                note_expiring(world, *seq);
            }
            let batch = Batch {
                missed: rows.len() < seen.len(),
                rows: rows.iter().map(|row| claimed(row, epoch, &world.oracle)).collect(),
                cut,
                locked: Vec::new(),
            };
            (batch, world.tables.waits_behind(of))
        });
        self.with(|world| world.tables.kept.pop());
        claimed
    }

    fn bring_due(&mut self, leases: Option<&[Held]>) -> Result<Due, Failed> {
        self.transaction(|world, me| {
            let leases = plain(leases.unwrap_or_default());
            let moved = world.tables.bring_due(me, &leases, world.now_ms, 20);
            for (_, seq) in &moved {
                world.oracle.note(*seq, || "due".into());
            }
            let moved = moved.into_iter().map(|(partition, seq)| (partition_of(partition), seq));
            (moved.collect(), world.tables.next_due_ms(world.now_ms))
        })
    }

    fn gates(&mut self, partitions: &[Partition]) -> Result<Vec<Found>, Failed> {
        self.transaction(|world, _| {
            if world.config.flaw == Some(Flaw::GatesForgotten) {
                return Vec::new();
            }
            let partitions: Vec<u16> = partitions.iter().map(|partition| partition.index()).collect();
            let gates = world.tables.gates(&partitions).into_iter();
            let found = gates.map(|((partition, key), (head, followers))| Found {
                key: OrderedKey {
                    partition: partition_of(partition),
                    destination: "default".into(),
                    key: key.map(key_name),
                },
                head,
                followers,
            });
            found.collect()
        })
    }
}

/// It may be dead at any time, and hold up nothing then.
fn note_expiring(world: &mut World, seq: i64) {
    if let Fate::Expires { .. } = world.oracle.messages[&seq].fate {
        world.oracle.out_of_order(seq);
    }
}

fn note_claimed(world: &mut World, me: &str, (seq, _, row): &Claim) {
    world.oracle.note(*seq, || format!("claimed by {me}, {row:?}"));
    note_taken(world, *seq, row.crashes);
}

/// What is claimed, or taken in hand, and ends at once holds up nothing.
pub fn note_taken(world: &mut World, seq: i64, crashes: i32) {
    let given_up = crashes >= CRASHES_MAX || world.oracle.messages[&seq].fate == Fate::Unsendable;
    if given_up && !world.config.dead_blocks {
        world.oracle.out_of_order(seq); // dead as soon as its turn comes
    }
    note_expiring(world, seq);
}

fn settle_one(world: &mut World, me: &str, at: (u16, i64), epoch: i64, disposition: &Disposition) {
    let lease = &world.tables.leases[usize::from(at.0)];
    if lease.owner.as_deref() != Some(me) || lease.epoch != epoch {
        world
            .oracle
            .complain(format!("{me} settled {} under {epoch}, which it lost", at.1));
    }
    let ordered = world.oracle.messages[&at.1].order.is_some();
    let action = match disposition {
        Disposition::Publish => {
            world.oracle.published(at.1, epoch);
            Action::Publish
        }
        Disposition::Dead { reason } => {
            let blocks = world.config.dead_blocks && ordered;
            if ordered && !blocks {
                world.oracle.out_of_order(at.1);
            }
            let reason = reason.clone();
            Action::Dead { reason, blocks }
        }
        Disposition::Expire => {
            if matches!(world.oracle.messages[&at.1].fate, Fate::Expires { at_ms } if at_ms > world.now_ms) {
                world.oracle.complain(format!("{} ended too early", at.1));
            }
            Action::Dead {
                reason: EXPIRED.into(),
                blocks: false,
            }
        }
        Disposition::Retry { delay_ms, .. } => Action::Retry { delay_ms: *delay_ms },
        Disposition::Wait => Action::Wait,
        Disposition::Release { .. } => Action::Free,
    };
    world.tables.settle(at, action, world.now_ms);
}

impl engine::Memory for Ports<'_> {
    fn notice_prepared(&self) {
        self.reap();
    }

    fn open_transactions(&self) -> Vec<OpenTransaction> {
        self.simulation.interrupt(self.worker);
        self.reap();
        // Entry by entry, sessions first.
        let sessions = 0..self.with(|world| world.sessions.len());
        let mut open: Vec<OpenTransaction> = sessions.filter_map(|session| self.read_session(session)).collect();
        self.simulation.interrupt(self.worker);
        self.with(|world| {
            let prepared = world.memory.prepared.iter().flatten().cloned();
            open.extend(prepared.map(|Entry { low, filter, .. }| OpenTransaction { low, filter }));
        });
        open
    }

    fn take_reopen(&self, partition: Partition) -> Option<i64> {
        self.simulation.interrupt(self.worker);
        self.with(|world| world.memory.take_reopen(partition.index(), self.worker))
    }

    fn look_at_reopen(&self, partition: Partition) -> Option<i64> {
        let ready = self.lowest_ready(partition.index());
        self.simulation.interrupt(self.worker);
        let told = self.with(|world| world.memory.look_at_reopen(partition.index()));
        ready.into_iter().chain(told).min()
    }

    fn revoke(&self, claimed: &[(Partition, i64)]) {
        let claimed = claimed.iter().map(|(partition, seq)| (partition.index(), *seq));
        claimed.for_each(|at| self.revoke_one(at));
    }

    fn waiting_changes(&self) -> u32 {
        self.simulation.world.borrow().memory.waiting_changes
    }
}

/// What is left of the tables when all has ended that can: a complaint about the first message that has not.
pub fn unfinished(world: &World) -> Option<String> {
    let blocking = |seq: i64| {
        let order = world.oracle.messages[&seq].order;
        let of = |seq: &i64| world.oracle.messages[seq].order;
        (world.tables.dead.iter()).any(|(dead, row)| row.blocks && of(dead) == order && order.is_some())
    };
    // Behind a dead letter of its partition it stays where it is.
    let stays = |seq: &i64| match world.config.ordering {
        Ordering::Partition => true,
        _ => world.tables.waiting.contains_key(seq),
    };
    let dead_with_reason = |seq| (world.tables.dead.get(&seq)).is_some_and(|dead| !dead.reason.is_empty());
    for (seq, message) in &world.oracle.messages {
        let ended = match message.end {
            Some(End::Published | End::Discarded) => true,
            None => dead_with_reason(*seq) || (stays(seq) && blocking(*seq)),
        };
        if message.committed && !ended {
            let (waiting, lane) = (
                world.tables.waiting.get(seq),
                &world.tables.outbox[usize::from(message.partition)],
            );
            return Some(format!(
                "{seq} is stuck: {message:?}, ready {:?}, waiting {waiting:?}",
                lane.get(seq),
            ));
        }
    }
    None
}
