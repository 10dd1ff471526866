//! The simulated process of a worker: what src/worker and `outboxctl work` provide on a real server. Before each access
//! the others may take a few steps.

use super::config::{Config, DESTINATIONS, Flaw};
use super::fast_path::{SLOTS, State};
use super::memory::{Entry, Memory, class};
use super::publisher::DestinationPublisher;
use super::run::Shared;
use super::world::{
    World, as_claimed, claimed, destination_number, key_name, key_number, name, note_expiring, note_taken,
    partition_of, plain, settle_one,
};
use outbox_core::engine::{
    Arrived, Batch, Bounds, ClaimLimits, Claimed, DueMessages, Events, HeldLease, Lane, Settlement, SlotId,
    StatementTimeout, Tables,
};
use outbox_core::key_order::{BlockedKey, OrderedKey};
use outbox_core::lease::Lease;
use outbox_core::message::Pointer;
use outbox_core::open_transactions::OpenTransaction;
use outbox_core::partition::Partition;
use outbox_core::settle::{Blocks, Ended, Ending, RetryPolicy, Rules};
use outbox_core::standbys::{Replication, Standby, Standbys};
use outbox_transport::NotStarted;
use outbox_transport::kind::{Limits, Target};
use outbox_worker::rewinds::{RewindGroup, RewindLane, Rewound};
use outbox_worker::{
    Changes, ConnectionStatus, LeaseChanges, Orders, PassCounts, PassEnd, Refresh, Tended, WorkerSettings,
};
use std::cell::Cell;
use std::fmt::Arguments;
use std::rc::{Rc, Weak};
use std::time::{Duration, Instant};

pub const LEASE_TTL_MS: u64 = 3_000;
pub const LEASE_RENEW_MS: u64 = 1_000;
const HEARTBEAT_TTL_MS: u64 = 3_000;
const REFRESH_EVERY_MS: u64 = 1_000;
pub const IDLE_MS: u32 = 1_000;

#[derive(Debug, PartialEq, Eq)]
pub enum Failed {
    /// Another session holds rows locked.
    Locked,
    Else,
}

/// The host of one worker.
#[derive(Clone)]
pub struct Host {
    simulation: Weak<Shared>,
    worker: usize,
    id: String,
    seen: Rc<Seen>,
}

#[derive(Default)]
struct Seen {
    /// The number of changes by hand before the last check.
    changes: Cell<u32>,
    refresh_due_ms: Cell<u64>,
    /// The end of WAL when the pass began.
    wal: Cell<u64>,
}

impl Host {
    pub fn new(simulation: &Rc<Shared>, worker: usize) -> Self {
        Self {
            simulation: Rc::downgrade(simulation),
            worker,
            id: name(worker),
            seen: Rc::default(),
        }
    }

    fn simulation(&self) -> Rc<Shared> {
        self.simulation.upgrade().expect("the simulation outlives its workers")
    }

    fn interrupt(&self) {
        self.simulation().interrupt(self.worker);
    }

    fn with<T>(&self, body: impl FnOnce(&mut World) -> T) -> T {
        body(&mut self.simulation().world.borrow_mut())
    }

    /// Another transaction: the others take steps before it, and it may fail.
    fn transaction<T>(&self, body: impl FnOnce(&mut World, &str) -> T) -> Result<T, Failed> {
        self.interrupt();
        self.with(|world| match world.store_fails() {
            true => Err(Failed::Else),
            false => Ok(body(world, &self.id)),
        })
    }

    fn memory_may_fail(&self) -> Result<(), Failed> {
        match self.with(World::memory_fails) {
            true => Err(Failed::Else),
            false => Ok(()),
        }
    }

    /// One access to shared memory.
    fn memory<T>(&self, access: impl FnOnce(&mut Memory) -> T) -> T {
        self.interrupt();
        self.with(|world| access(&mut world.memory))
    }

    /// A worker begins: the first one after a crash of the server reads the prepared transactions.
    pub fn begin(&self) {
        self.with(|world| {
            world.memory.slots.begin_worker(self.worker);
            world.workers[self.worker].held.clear();
            world.workers[self.worker].deadline_ms = None;
        });
        if self.with(|world| world.memory.has_adopted) {
            return;
        }
        let found: Vec<u64> = self.with(|world| world.prepared.keys().copied().collect());
        self.interrupt();
        self.with(|world| {
            world.memory.adopt(&found);
            world.memory.has_adopted = true;
        });
        self.interrupt();
        self.rewind_all(1);
    }

    fn rewind_all(&self, low: i64) {
        for partition in 0..self.with(|world| world.memory.lanes()) {
            for destination in [0, 1] {
                self.with(|world| world.memory.rewind(partition, destination, low));
            }
            self.interrupt();
        }
    }

    /// Forgets prepared transactions that are over.
    fn reap(&self) {
        for index in 0..self.with(|world| world.memory.prepared.len()) {
            let entry = |world: &World| world.memory.prepared[index].as_ref().map(|e| (e.tenant, e.xid, e.low));
            let Some((tenant, _, _)) = self.with(|world| entry(world)) else {
                continue;
            };
            self.interrupt();
            let over = self.with(|world| entry(world).is_some_and(|(_, xid, _)| !world.is_in_progress(xid)));
            if !over {
                continue;
            }
            self.interrupt();
            // Two processes may see it at once: each publishes before either frees.
            if let Some((_, _, low)) = self.with(|world| entry(world)) {
                self.rewind_all(low);
            }
            self.with(|world| {
                if entry(world).is_some_and(|(now, _, _)| now == tenant) {
                    world.memory.prepared[index] = None;
                }
            });
        }
    }

    /// The entry of a session, read piece by piece; None when it has none.
    fn read_session(&self, session: usize) -> Option<OpenTransaction> {
        let entry = |world: &World| world.memory.sessions.get(&session).map(|e| (e.tenant, e.low));
        loop {
            let (tenant, low) = self.with(|world| entry(world))?;
            self.interrupt();
            let filter = self.with(|world| Some(world.memory.sessions.get(&session)?.filter.clone()));
            let same = self.with(|world| entry(world).is_some_and(|(now, _)| now == tenant));
            if let (Some(filter), true) = (filter, same) {
                return Some(OpenTransaction { low, filter });
            }
        }
    }
}

/// The only standby.
const STANDBY: &str = "standby";

/// The settings of the server.
pub fn settings(config: &Config, enabled: bool) -> WorkerSettings {
    let rules = Rules {
        retry: RetryPolicy {
            max_attempts: 4,
            base_ms: 40,
            max_ms: 300,
            discards_unroutable: config.discards_unroutable,
        },
        dead_blocks: config.dead_blocks,
        ordering: config.ordering,
        one_by_one: false, // it is for HTTP, which is the third destination
    };
    let mut target = Target::default();
    (target.rules, target.max_in_flight) = (rules, config.window);
    WorkerSettings {
        enabled,
        rules,
        limits: Limits::default(),
        standbys: (config.standby).map(|_| Standbys::new(vec![STANDBY.to_owned()], 0, None)),
        target: Ok(target),
        lease_renew: Duration::from_millis(LEASE_RENEW_MS),
        batch_size: config.batch,
        idle_backoff_ms: IDLE_MS,
    }
}

impl outbox_worker::Runtime for Host {
    type Tables = Self;
    type Publisher = DestinationPublisher;
    const HAS_FAST_PATH: bool = true;
    const READERS_UNASKED: usize = 0;
    const PURGE_EVERY: Option<Duration> = None;

    fn bounds(&self) -> Bounds {
        let (window, memory) = self.with(|world| (world.config.window, world.config.memory));
        Bounds {
            window,
            settle_rows: 30,
            settle_failures: 5,
            parked: window * 3 / 8,
            of_a_key: 6,
            drains: 3,
            drain_rows: 10,
            bytes: memory / 4,
            memory,
        }
    }

    fn id(&self) -> &str {
        &self.id
    }

    fn tables(&self) -> &Self {
        self
    }

    fn now(&self) -> Instant {
        self.simulation().now()
    }

    fn now_us(&self) -> i64 {
        self.with(|world| world.now_ms as i64 * 1_000)
    }

    fn boottime_ns(&self) -> u64 {
        self.with(|world| world.now_ms * 1_000_000)
    }

    // ---- a destination ----------------------------------------------------------------------------------------------

    fn start(&self, _: &Target, connection: &str) -> Result<DestinationPublisher, NotStarted> {
        let is_it = |name: &&&str| connection.ends_with(*name);
        let destination = DESTINATIONS
            .iter()
            .find(is_it)
            .map_or(0, |name| destination_number(name));
        Ok(DestinationPublisher::start(
            self.simulation.clone(),
            self.worker,
            destination,
        ))
    }

    // ---- control ----------------------------------------------------------------------------------------------------

    fn begin_pass(&self) {
        let wal = self.with(|world| {
            world.workers[self.worker].is_woken = false;
            world.wal
        });
        self.seen.wal.set(wal);
    }

    fn end_pass(&self, end: PassEnd) {
        self.with(|world| {
            let room = world.config.window * world.config.destinations;
            world.oracle.outstanding(self.worker, end.in_flight, room);
        });
    }

    fn orders(&self) -> Orders {
        Orders {
            request: self.with(|world| world.request),
            ..Orders::default()
        }
    }

    fn is_ending(&self) -> bool {
        false
    }

    fn answer(&self, _: u32, _: &PassCounts, _: bool) {}

    // ---- settings ---------------------------------------------------------------------------------------------------

    fn refresh(&self, immediately: bool) -> Result<Refresh, Failed> {
        let due_ms = self.seen.refresh_due_ms.get();
        if !immediately && !outbox_worker::Runtime::is_stale(self) && self.with(|world| world.now_ms < due_ms) {
            return Ok(Refresh::Skipped);
        }
        let changes = self.with(|world| world.changes);
        let news = self.transaction(|world, _| Changes {
            not_adopted: None,
            settings: Some(settings(&world.config, world.enabled)),
            described: Some(world.described()),
        })?;
        self.seen.changes.set(changes);
        let now_ms = self.with(|world| world.now_ms);
        self.seen.refresh_due_ms.set(now_ms + REFRESH_EVERY_MS);
        Ok(Refresh::Changed(Box::new(news)))
    }

    fn is_stale(&self) -> bool {
        self.with(|world| world.changes) != self.seen.changes.get()
    }

    // ---- leases -----------------------------------------------------------------------------------------------------

    fn tend(&self, _: bool, plan: &mut dyn FnMut(&[String], &[Lease]) -> LeaseChanges) -> Result<Tended, Failed> {
        self.interrupt();
        if self.with(|world| world.leases_locked || world.store_fails()) {
            return Err(Failed::Locked);
        }
        // Changes that no other session sees before the commit.
        let (leases, held, taken, workers) = self.with(|world| {
            let now_ms = world.now_ms;
            let committed = world.tables.leases.clone();
            let workers = world.tables.heartbeat(&self.id, now_ms, HEARTBEAT_TTL_MS);
            let leases: Vec<Lease> = (world.tables.leases.iter().zip(0..))
                .map(|(lease, partition)| Lease {
                    partition: partition_of(partition),
                    owner: lease.owner.clone(),
                    live: lease.owner.is_some() && lease.until_ms > now_ms,
                    epoch: lease.epoch,
                })
                .collect();
            let plan = plan(&workers, &leases);
            let take: Vec<u16> = plan.take.iter().map(|partition| partition.index()).collect();
            world.tables.give_back(&self.id, &plain(&plan.release));
            let renew = plain(&plan.renew);
            let mut held = world.tables.renew(&self.id, &renew, now_ms, LEASE_TTL_MS);
            let taken = world.tables.take(&self.id, &take, now_ms, LEASE_TTL_MS);
            held.extend(&taken);
            held.sort_unstable();
            // Before another worker can take them, because the rows of the leases are still locked.
            for (partition, _) in &held {
                world.memory.own_lane(*partition, self.worker);
            }
            for (partition, _) in &taken {
                world.memory.begin_lane(*partition);
            }
            world.leases_locked = true;
            let leases = std::mem::replace(&mut world.tables.leases, committed);
            (leases, held, taken, workers)
        });
        self.interrupt();
        self.with(|world| {
            world.leases_locked = false;
            world.tables.leases = leases;
            for (partition, _) in &taken {
                world.oracle.touch_partition(*partition);
            }
            world.oracle.keep(self.worker, &held);
            world.workers[self.worker].held = held.iter().copied().collect();
        });
        let held = held.into_iter().map(|(p, epoch)| (partition_of(p), epoch));
        Ok(Tended {
            workers,
            leased: Some((held.collect(), Duration::from_millis(LEASE_TTL_MS))),
        })
    }

    fn set_deadline(&self, deadline: Option<(u64, Duration)>) {
        let until_ms = deadline.map(|(from_ns, lasts)| from_ns / 1_000_000 + lasts.as_millis() as u64);
        self.with(|world| world.workers[self.worker].deadline_ms = until_ms);
    }

    fn worker_changes(&self) -> u64 {
        self.with(|world| world.worker_changes)
    }

    fn call_others(&self) {
        self.with(|world| {
            world.worker_changes += 1;
            world.wake_all();
        });
    }

    fn purge(&self) -> Result<i64, Failed> {
        Ok(0)
    }

    fn leave(&self) -> Result<(), Failed> {
        self.with(|world| {
            if world.leases_locked {
                return Err(Failed::Locked);
            }
            world.tables.leave(&self.id);
            Ok(())
        })
    }

    // ---- standbys ---------------------------------------------------------------------------------------------------

    fn replication(&self) -> Result<Replication, Failed> {
        self.interrupt();
        let durable = match self.with(|world| world.config.flaw) {
            Some(Flaw::ReadsWalBeforeClaim) => self.seen.wal.get(),
            _ => self.with(|world| world.wal),
        };
        self.transaction(|world, _| Replication {
            durable,
            connected: vec![Standby {
                name: STANDBY.to_owned(),
                flushed: world.standby_wal,
            }],
        })
    }

    // ---- shared memory ----------------------------------------------------------------------------------------------

    /// Two groups: the others share one.
    fn rewind_group(&self, destination: &str) -> RewindGroup {
        RewindGroup::of(DESTINATIONS[class(destination_number(destination))])
    }

    fn take_rewinds(&self, groups: &[RewindGroup], leases: &[HeldLease]) -> Result<Vec<Rewound>, Failed> {
        self.memory_may_fail()?;
        self.reap();
        let mut rewinds = Vec::new();
        for (partition, _) in leases {
            for (class, name) in DESTINATIONS.iter().enumerate().take(2) {
                let group = RewindGroup::of(name);
                if groups.contains(&group)
                    && let Some(seq) = self.memory(|memory| memory.take_rewind(partition.index(), class, self.worker))
                {
                    rewinds.push(Rewound {
                        partition: *partition,
                        lane: group.lane(*partition),
                        seq,
                    });
                }
            }
            let unblocked = self.memory(|memory| memory.take_unblocked(partition.index(), self.worker));
            rewinds.extend(unblocked.map(|seq| Rewound {
                partition: *partition,
                lane: RewindLane::UNBLOCKED,
                seq,
            }));
        }
        self.memory_may_fail()?; // they are taken and then lost on the way
        Ok(rewinds)
    }

    fn schedules(&self) -> u32 {
        self.with(|world| world.memory.schedules)
    }

    fn take_ready(&self) -> Vec<Arrived> {
        let worker = self.worker;
        let mut taken = Vec::new();
        for slot_id in 0..SLOTS as SlotId {
            let Some(slot) = self.memory(|memory| memory.slots.get(slot_id)) else {
                continue;
            };
            let is_mine = slot.state == State::Ready && slot.owner == worker;
            if !is_mine || self.memory(|memory| memory.reader(slot.partition)) != Some(worker) {
                continue;
            }
            if self.memory(|memory| {
                memory
                    .slots
                    .transition(slot_id, slot.tenant, State::Ready, State::Taken)
            }) {
                taken.push(self.with(|world| {
                    let epoch = world.workers[worker].held.get(&slot.partition).copied();
                    note_taken(world, worker, slot.seq, epoch.unwrap_or_default(), 0);
                    let Claimed { row_id, pointer, event } = as_claimed(world, slot.seq);
                    Arrived {
                        slot: slot_id,
                        row_id,
                        pointer,
                        event: event.ok().filter(|_| !world.config.source),
                    }
                }));
            }
        }
        taken
    }

    // ---- statistics -------------------------------------------------------------------------------------------------

    fn confirmed(&self, _: &Pointer, _: i64) {}

    fn settled(&self, _: &str, _: &Ended) {}

    fn report(&self, _: &str, _: Option<&ConnectionStatus>, _: Option<i64>) -> Result<(), Failed> {
        self.transaction(|_, _| ())
    }

    // ---- log --------------------------------------------------------------------------------------------------------

    fn log(&self, destination: Option<&str>, text: Arguments) {
        self.with(|world| {
            let (now, me) = (world.oracle.now, &self.id);
            world
                .oracle
                .say(|| format!("{now:>8} {me} {}: {text}", destination.unwrap_or_default()));
        });
    }

    fn failed(&self, _: Failed) -> Result<u32, Failed> {
        Ok(50)
    }
}

impl Host {
    fn flaw(&self) -> Option<Flaw> {
        self.with(|world| world.config.flaw)
    }

    fn note_claimed(&self, world: &mut World, seq: i64, epoch: i64, crashes: i32) {
        let me = &self.id;
        world.oracle.note(seq, || format!("claimed by {me}, {crashes} crashes"));
        note_taken(world, self.worker, seq, epoch, crashes);
    }

    fn withdraw_one(&self, at: (u16, i64)) {
        if self.flaw() == Some(Flaw::ClaimedNotRevoked) {
            return;
        }
        let host = self;
        for slot_id in host.memory(|memory| memory.slots.find(at)) {
            while let Some(slot) = host.memory(|memory| memory.slots.get(slot_id)) {
                let is_over = match slot.state {
                    _ if (slot.partition, slot.seq) != at => true,
                    State::Filled => {
                        host.memory(|m| m.slots.transition(slot_id, slot.tenant, State::Filled, State::Revoked))
                    }
                    State::Ready => {
                        host.memory(|memory| memory.rewind(slot.partition, slot.destination, slot.seq));
                        let is_ours =
                            host.memory(|m| m.slots.transition(slot_id, slot.tenant, State::Ready, State::Revoked));
                        if is_ours {
                            host.memory(|memory| memory.slots.free(slot_id));
                        }
                        is_ours
                    }
                    State::Taken | State::Revoked => true,
                };
                if is_over {
                    break;
                }
            }
        }
    }
}

impl Tables for Host {
    type Error = Failed;

    fn settle(&self, _: &str, batch: &[Settlement], dead_blocks: Blocks, _: StatementTimeout) -> Result<usize, Failed> {
        let worker = self.worker;
        let flaw = self.flaw();
        let before = match flaw {
            Some(Flaw::SettleHoldsNoLease) => {
                let leases = self.with(|world| world.tables.leases.clone());
                self.interrupt();
                Some(leases)
            }
            _ => None,
        };
        self.transaction(|world, me| {
            let fenced = flaw != Some(Flaw::SettleIgnoresLease);
            let now = before.map(|before| std::mem::replace(&mut world.tables.leases, before));
            let mut changed = 0;
            for Settlement {
                pointer, disposition, ..
            } in batch
            {
                let (seq, epoch) = (pointer.seq, pointer.lease_epoch);
                let at = (pointer.partition.index(), seq);
                let ours = world.tables.is_claimed(me, at, epoch, fenced, true);
                world.oracle.note(seq, || format!("{disposition:?}, ours: {ours}"));
                if ours {
                    settle_one(world, me, at, epoch, &Ending::of(disposition, dead_blocks));
                    changed += 1;
                }
                world.oracle.settled(worker, seq, epoch, ours);
            }
            if let Some(now) = now {
                world.tables.leases = now;
            }
            changed
        })
    }

    /// One transaction: the rows that it saw may have changed before it updates them.
    fn claim(
        &self,
        destination: &str,
        lanes: &[Lane],
        limits: ClaimLimits,
        _: StatementTimeout,
    ) -> Result<Batch, Failed> {
        let destination = destination_number(destination);
        let locks = |world: &mut World| !world.calm && world.config.faults > 0 && world.dice.chance(300);
        if self.with(locks) {
            return Err(Failed::Locked);
        }
        let epoch = |partition| {
            let lane = lanes.iter().find(|lane| lane.partition.index() == partition);
            lane.expect("asked for").epoch
        };
        let (seen, cut, is_paused) = self.transaction(|world, me| {
            if world.paused.contains(&destination) {
                return (Vec::new(), false, true);
            }
            let again = world.config.flaw == Some(Flaw::ClaimRepeats);
            let mut seen: Vec<_> = (lanes.iter())
                .flat_map(|lane| world.tables.see(me, destination, lane, again))
                .collect();
            let cut = world.cut(&mut seen, limits);
            (seen, cut, false)
        })?;
        if is_paused {
            return Ok(Batch {
                is_paused,
                ..Batch::default()
            });
        }
        self.transaction(|world, me| {
            let wanted = seen.len();
            let looks_again = world.dice.chance(500);
            let rows = world.tables.mark_claimed(me, seen, epoch, looks_again);
            for (seq, partition, row) in &rows {
                self.note_claimed(world, *seq, epoch(*partition), row.crashes);
            }
            Batch {
                is_paused: false,
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

    fn claim_unleased(&self, _: &str, _: ClaimLimits) -> Result<Batch, Failed> {
        Err(Failed::Else)
    }

    fn claim_waiting(
        &self,
        key: &OrderedKey,
        epoch: i64,
        read_limit: i64,
        limits: ClaimLimits,
    ) -> Result<(Batch, bool), Failed> {
        let name = key.key.as_deref().expect("of a partition nothing waits behind another");
        let of = (
            key.partition.index(),
            destination_number(&key.destination),
            key_number(name),
        );
        let (seen, cut) = self.transaction(|world, me| {
            if world.leases_locked {
                return Err(Failed::Locked);
            }
            // Otherwise rows that it moves are where the next worker has already read.
            world.tables.kept.push(of.0);
            let mut seen = world
                .tables
                .see_waiting(me, of, epoch, read_limit, limits.rows as usize);
            let seqs = seen.iter().map(|(seq, _)| *seq);
            let fit = world.fit(seqs, limits.bytes);
            let cut = fit < seen.len();
            seen.truncate(fit);
            Ok((seen, cut))
        })??;
        let claimed = self.transaction(|world, _| {
            let rows = world.tables.claim_waiting(&seen, epoch);
            for (seq, _, row) in &rows {
                self.note_claimed(world, *seq, epoch, row.crashes);
                note_expiring(world, *seq);
            }
            let batch = Batch {
                is_paused: false,
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

    fn bring_due(&self, leases: Option<&[HeldLease]>) -> Result<DueMessages, Failed> {
        self.transaction(|world, me| {
            let leases = plain(leases.unwrap_or_default());
            let moved = world.tables.bring_due(me, &leases, world.now_ms, 20);
            for (_, _, seq) in &moved {
                world.oracle.note(*seq, || "due".into());
            }
            let named = |(destination, partition, seq): (usize, u16, i64)| {
                (DESTINATIONS[destination].to_owned(), partition_of(partition), seq)
            };
            DueMessages {
                moved: moved.into_iter().map(named).collect(),
                next_ms: world.tables.next_due_ms(world.now_ms),
            }
        })
    }

    fn destinations_with_messages(&self) -> Result<Vec<String>, Failed> {
        self.transaction(|world, _| {
            let found = world.tables.destinations_with_messages().into_iter();
            found.map(|destination| DESTINATIONS[destination].to_owned()).collect()
        })
    }

    fn lanes_with_messages(&self, lanes: &[(&str, Partition, i64)]) -> Result<Vec<usize>, Failed> {
        self.transaction(|world, _| {
            let is_flawed = world.config.flaw == Some(Flaw::SharedRewindUnread);
            let has_messages = |(destination, partition, seq): &(&str, Partition, i64)| {
                let destination = destination_number(destination);
                !is_flawed && world.tables.has_from(partition.index(), destination, *seq)
            };
            (0..lanes.len()).filter(|lane| has_messages(&lanes[*lane])).collect()
        })
    }

    fn blocked_keys(&self, destination: &str, partitions: &[Partition]) -> Result<Vec<BlockedKey>, Failed> {
        let of_destination = destination_number(destination);
        self.transaction(|world, _| {
            if world.config.flaw == Some(Flaw::BlockedKeysForgotten) {
                return Vec::new();
            }
            let partitions: Vec<u16> = partitions.iter().map(|partition| partition.index()).collect();
            let blocked_keys = world.tables.blocked_keys(&partitions).into_iter();
            let blocked_keys = blocked_keys.filter(|((_, destination, _), _)| *destination == of_destination);
            let found = blocked_keys.map(|((partition, destination, key), (blocker, followers))| BlockedKey {
                key: OrderedKey {
                    partition: partition_of(partition),
                    destination: DESTINATIONS[destination].into(),
                    key: key.map(key_name),
                },
                blocker,
                followers,
            });
            found.collect()
        })
    }

    fn is_locked(failed: &Failed) -> bool {
        *failed == Failed::Locked
    }
}

impl outbox_core::engine::Memory for Host {
    type Error = Failed;

    fn open_transactions(&self) -> Result<Vec<OpenTransaction>, Failed> {
        self.memory_may_fail()?;
        self.interrupt();
        self.reap();
        // Entry by entry, sessions first.
        let sessions = 0..self.with(|world| world.sessions.len());
        let mut open: Vec<OpenTransaction> = sessions.filter_map(|session| self.read_session(session)).collect();
        self.interrupt();
        self.with(|world| {
            let prepared = world.memory.prepared.iter().flatten().cloned();
            open.extend(prepared.map(|Entry { low, filter, .. }| OpenTransaction { low, filter }));
        });
        Ok(open)
    }

    /// (d): ready slots before the rewinds.
    fn read_events(&self, seqs: &[i64], _: usize) -> Events {
        let read = self.transaction(|world, _| {
            // It stops at its limit of bytes.
            let count = world.dice.below(seqs.len() * 4) + 1;
            let read = seqs.iter().take(count);
            read.map(|seq| (*seq, as_claimed(world, *seq).event)).collect()
        });
        read.unwrap_or_default()
    }

    fn peek_rewinds(&self, destination: &str, leases: &[HeldLease]) -> Vec<(Partition, i64)> {
        let (flaw, destination) = (self.flaw(), destination_number(destination));
        let peek = |partition: Partition| {
            let index = partition.index();
            let ready = self
                .memory(|memory| memory.slots.lowest_ready(index, destination))
                .filter(|_| flaw != Some(Flaw::NoPeekReady));
            let rewind = self.memory(|memory| memory.peek_rewind(index, destination));
            Some((partition, ready.into_iter().chain(rewind).min()?))
        };
        leases.iter().filter_map(|(partition, _)| peek(*partition)).collect()
    }

    fn withdraw(&self, _: &str, claimed: &[(Partition, i64)]) {
        let claimed = claimed.iter().map(|(partition, seq)| (partition.index(), *seq));
        claimed.for_each(|at| self.withdraw_one(at));
    }

    fn free_slot(&self, slot_id: SlotId) {
        self.memory(|memory| memory.slots.free(slot_id));
    }

    fn give_up(&self, slot_id: SlotId, destination: &str, partition: Partition, seq: i64) {
        let destination = destination_number(destination);
        self.memory(|memory| memory.rewind(partition.index(), destination, seq));
        self.memory(|memory| memory.slots.free(slot_id));
    }
}
