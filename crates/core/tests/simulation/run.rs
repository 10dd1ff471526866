//! A run: workers driven as `src/worker.rs` drives them, among sessions, a person, brokers and faults.

use super::config::{Config, Flaw};
use super::oracle::Fate;
use super::world::{Failed, Ports, World, name, note_taken, partition_of, plain, unfinished};
use outbox_core::budget::Allowance;
use outbox_core::engine::{Bounds, Claimed, Engine, Errand, Express, Held, Sharing};
use outbox_core::lease::{self, Lease};
use outbox_core::message::{Outcome, Pointer, Properties, Publication};
use outbox_core::partition::Partition;
use outbox_core::settle::{RetryPolicy, Rules};
use outbox_core::tick::{self, TickState};
use std::cell::{Cell, RefCell};
use std::collections::HashSet;

const LEASE_TTL_MS: u64 = 3_000;
const LEASE_RENEW_MS: u64 = 1_000;
const HEARTBEAT_TTL_MS: u64 = 3_000;
/// All must have ended by then when nothing fails any more. Well before the sweep, which finds what should not be lost.
const CALM_MS: u64 = 15_000;
const STEPS_BETWEEN_CALMS: u64 = 10_000;

struct Worker {
    number: usize,
    /// None: it has crashed or ended.
    engine: Option<Engine<u64>>,
    /// Nothing of it happens until then.
    paused_until_ms: u64,
    leases_due_ms: u64,
}

pub struct Simulation {
    pub world: RefCell<World>,
    workers: Vec<RefCell<Worker>>,
    rules: Rules,
    bounds: Bounds,
    depth: Cell<u32>,
}

/// What a run did.
#[derive(Debug, Default)]
pub struct Tally {
    pub steps: u64,
    pub messages: i64,
    pub published: u64,
    pub handed_over: u64,
    pub repeated: u64,
    /// Handed over before any claim.
    pub unclaimed: u64,
}

impl Simulation {
    pub fn new(config: &Config, seed: u64) -> Self {
        let worker = |number| Worker {
            number,
            engine: None,
            paused_until_ms: 0,
            leases_due_ms: 0,
        };
        Self {
            world: RefCell::new(World::new(config, seed)),
            workers: (0..config.workers).map(|number| RefCell::new(worker(number))).collect(),
            rules: Rules {
                retry: RetryPolicy {
                    max_attempts: 4,
                    base_ms: 40,
                    max_ms: 300,
                },
                dead_blocks: config.dead_blocks,
                ordering: config.ordering,
            },
            bounds: Bounds {
                settle_rows: 30,
                settle_failures: 5,
                parked: config.window / 2,
                drains: 3,
                drain_rows: 10,
                bytes: 1_000,
            },
            depth: Cell::new(0),
        }
    }

    /// Runs for so many steps; the first complaint ends it.
    pub fn run(&self, steps: u64) -> Result<Tally, String> {
        let mut calm_at = STEPS_BETWEEN_CALMS;
        while self.world.borrow().steps < steps {
            self.step();
            self.complaint()?;
            if self.world.borrow().steps >= calm_at {
                self.come_to_an_end()?;
                calm_at = self.world.borrow().steps + STEPS_BETWEEN_CALMS;
            }
        }
        self.come_to_an_end()?;
        let world = self.world.borrow();
        Ok(Tally {
            steps: world.steps,
            messages: world.sequence,
            published: world.oracle.published,
            handed_over: world.oracle.handed_over,
            repeated: world.oracle.repeated,
            unclaimed: world.oracle.unclaimed,
        })
    }

    fn complaint(&self) -> Result<(), String> {
        let world = self.world.borrow();
        match &world.oracle.complaint {
            Some(complaint) => Err(format!("{complaint} (step {}, {} ms)", world.steps, world.now_ms)),
            None => Ok(()),
        }
    }

    fn with<T>(&self, body: impl FnOnce(&mut World) -> T) -> T {
        body(&mut self.world.borrow_mut())
    }

    // ---- who does something next ------------------------------------------------------------------------------------

    fn step(&self) {
        let dice = self.with(|world| world.dice.below(100));
        match dice {
            0..60 => self.someone_else(),
            60..62 => self.with(|world| world.now_ms += world.dice.between(1, 60)),
            _ => {
                let worker = self.with(|world| world.dice.below(world.config.workers));
                self.fault(worker);
                self.pass(worker);
            }
        }
    }

    /// A session, the person, a broker.
    fn someone_else(&self) {
        self.with(|world| {
            world.steps += 1;
            world.oracle.now += 1;
            match world.dice.below(100) {
                0..70 => {
                    let session = world.dice.below(world.config.sessions);
                    world.session_step(session);
                }
                70..72 if !world.prepared.is_empty() && world.dice.chance(3_000) => world.end_prepared(),
                70..76 => world.person_step(),
                _ => {
                    let worker = world.dice.below(world.config.workers);
                    step_of_broker(world, worker);
                }
            }
        });
    }

    /// What happens while an engine is between two accesses.
    pub fn interrupt(&self, worker: usize) {
        let depth = self.depth.get();
        let often = [3_000, 800][depth.min(1) as usize];
        if depth > 2 || self.with(|world| world.calm || !world.dice.chance(often)) {
            return;
        }
        self.depth.set(depth + 1);
        let long = self.with(|world| world.dice.chance(1_000));
        for _ in 0..self.with(|world| 1 + world.dice.below(if long { 60 } else { 6 })) {
            match self.with(|world| world.dice.below(1_000)) {
                0..40 => {
                    let other = self.with(|world| world.dice.below(world.config.workers));
                    if other != worker {
                        self.pass(other);
                    }
                }
                40..60 => self.with(|world| world.now_ms += world.dice.between(1, 50)),
                60..64 if self.with(|world| world.dice.chance(world.config.faults * 5)) => {
                    // It is held up, and its leases run out.
                    self.with(|world| world.now_ms += LEASE_TTL_MS);
                    (0..self.workers.len()).for_each(|other| self.pass(other));
                }
                _ => self.someone_else(),
            }
        }
        self.depth.set(depth);
    }

    // ---- faults -----------------------------------------------------------------------------------------------------

    fn fault(&self, number: usize) {
        if self.with(|world| world.calm || !world.dice.chance(world.config.faults)) {
            return;
        }
        let mut worker = self.workers[number].borrow_mut();
        let now_ms = self.with(|world| world.now_ms);
        let soon = now_ms + self.with(|world| world.dice.between(0, LEASE_TTL_MS * 2));
        match self.with(|world| world.dice.below(100)) {
            0..30 => self.with(|world| {
                let World {
                    brokers, dice, oracle, ..
                } = world;
                brokers[number].lose(now_ms + dice.between(0, 500), dice, oracle);
            }),
            30..50 => {
                self.end_publisher(number);
                worker.engine = None;
                self.with(|world| world.end_worker(number));
                worker.paused_until_ms = soon;
            }
            50..65 => worker.paused_until_ms = soon,
            65..80 => {
                self.end_publisher(number);
                if let Some(engine) = &mut worker.engine {
                    engine.release_all("the publisher ended");
                }
            }
            80..97 => {
                self.finish(&mut worker);
                worker.paused_until_ms = soon;
            }
            _ => {
                drop(worker);
                self.crash();
            }
        }
    }

    /// The server crashes.
    fn crash(&self) {
        for (number, worker) in self.workers.iter().enumerate() {
            self.end_publisher(number);
            worker.borrow_mut().engine = None;
        }
        self.with(World::crash);
    }

    fn end_publisher(&self, number: usize) {
        self.with(|world| {
            let World {
                brokers, dice, oracle, ..
            } = world;
            oracle.touch_all(number);
            brokers[number].end(dice, oracle);
        });
    }

    /// The orderly end.
    fn finish(&self, worker: &mut Worker) {
        let number = worker.number;
        let Some(mut engine) = worker.engine.take() else { return };
        let seed = self.with(|world| world.dice.roll());
        for _ in 0..3 {
            self.with(|world| step_of_broker(world, number));
        }
        let now_ms = self.now_ms();
        for (handle, outcome) in self.outcomes(number) {
            engine.conclude(handle, &outcome, &self.rules, now_ms, seed);
        }
        self.end_publisher(number);
        engine.release_all("the worker ended");
        if engine.settle(&mut self.ports(number), now_ms, |_| {}).is_ok() {
            self.with(|world| {
                if !world.leases_locked {
                    world.tables.leave(&name(number));
                }
            });
        }
        self.with(|world| world.end_worker(number));
    }

    fn outcomes(&self, number: usize) -> Vec<(u64, Outcome)> {
        self.with(|world| {
            let World { brokers, oracle, .. } = world;
            brokers[number].take_outcomes(number, oracle)
        })
    }

    fn ports(&self, worker: usize) -> Ports<'_> {
        let simulation = self;
        Ports { simulation, worker }
    }

    // ---- a worker ---------------------------------------------------------------------------------------------------

    fn pass(&self, number: usize) {
        let Ok(mut worker) = self.workers[number].try_borrow_mut() else {
            return;
        };
        let now_ms = self.with(|world| {
            world.steps += 1;
            world.oracle.now += 1;
            world.now_ms
        });
        if now_ms < worker.paused_until_ms {
            return;
        }
        if worker.engine.is_none() {
            self.ports(number).begin();
            worker.engine = Some(Engine::bounded(Sharing::Leases, self.bounds));
            worker.leases_due_ms = 0;
            self.with(|world| world.oracle.keep(number, &[]));
        }
        let Worker {
            engine, leases_due_ms, ..
        } = &mut *worker;
        let Some(engine) = engine else { return };
        let seed = self.with(|world| world.dice.roll());
        for (handle, outcome) in self.outcomes(number) {
            engine.conclude(handle, &outcome, &self.rules, now_ms, seed);
        }
        if now_ms >= *leases_due_ms {
            let Ok(soon) = self.tend_leases(number, engine) else {
                return;
            };
            *leases_due_ms = now_ms + if soon { 100 } else { LEASE_RENEW_MS };
        }
        let mut allowance = self.open(number, engine);
        if engine.must_settle() {
            self.receive(number, engine, &mut allowance);
            if self.settle(number, engine, &mut allowance).is_err() {
                return;
            }
            allowance = self.open(number, engine);
        }
        if self.claim(number, engine, &mut allowance).is_ok() && engine.settle_in_ms(self.now_ms()) == Some(0) {
            self.interrupt(number);
            self.receive(number, engine, &mut allowance);
            let _ = self.settle(number, engine, &mut allowance); // it is tried again
        }
        engine.let_go(&self.ports(number));
        let outstanding = engine.outstanding();
        self.with(|world| world.oracle.outstanding(number, outstanding, world.config.window));
    }

    fn settle(&self, number: usize, engine: &mut Engine<u64>, allowance: &mut Option<Allowance>) -> Result<(), Failed> {
        while engine.settle_some(&mut self.ports(number), self.now_ms(), |_| {})? {
            self.interrupt(number);
            self.receive(number, engine, allowance);
        }
        Ok(())
    }

    fn now_ms(&self) -> u64 {
        self.with(|world| world.now_ms)
    }

    /// Whether to look again soon.
    fn tend_leases(&self, number: usize, engine: &mut Engine<u64>) -> Result<bool, Failed> {
        let in_use = engine.in_use();
        let before = plain(engine.leases());
        if self.with(|world| world.leases_locked || world.store_fails()) {
            return Err(Failed);
        }
        // What nobody else sees until it is committed.
        let (leases, held, taken, leaving) = self.with(|world| {
            let (me, now_ms) = (name(number), world.now_ms);
            let committed = world.tables.leases.clone();
            let workers = world.tables.heartbeat(&me, now_ms, HEARTBEAT_TTL_MS);
            let leases: Vec<Lease> = (world.tables.leases.iter().zip(0..))
                .map(|(lease, partition)| Lease {
                    partition: partition_of(partition),
                    owner: lease.owner.clone(),
                    live: lease.owner.is_some() && lease.until_ms > now_ms,
                    epoch: lease.epoch,
                })
                .collect();
            let plan = lease::plan(&me, &workers, &leases);
            let (ours, inherited): (Vec<_>, Vec<_>) =
                plain(&plan.renew).into_iter().partition(|lease| before.contains(lease));
            let acquire: Vec<u16> = (plan.acquire.iter().map(|partition| partition.index()))
                .chain(inherited.into_iter().map(|(partition, _)| partition))
                .collect();
            let (busy, free): (Vec<_>, Vec<_>) =
                (plan.release.iter().copied()).partition(|(partition, _)| in_use.contains(partition));
            world.tables.give_back(&me, &plain(&free));
            let wanted: Vec<(u16, i64)> = ours.into_iter().chain(plain(&busy)).collect();
            let mut held = world.tables.renew(&me, &wanted, now_ms, LEASE_TTL_MS);
            let taken = world.tables.take(&me, &acquire, now_ms, LEASE_TTL_MS);
            held.extend(&taken);
            held.sort_unstable();
            // Before anybody else can take them, for the rows of the leases are still locked.
            for (partition, _) in &held {
                world.memory.own_lane(*partition, number);
            }
            for (partition, _) in &taken {
                world.memory.begin_lane(*partition);
            }
            world.leases_locked = true;
            let leaving: HashSet<Partition> = busy.into_iter().map(|(partition, _)| partition).collect();
            let leases = std::mem::replace(&mut world.tables.leases, committed);
            (leases, held, taken, leaving)
        });
        self.interrupt(number);
        self.with(|world| {
            world.leases_locked = false;
            world.tables.leases = leases;
            for (partition, _) in &taken {
                world.oracle.touch_partition(*partition);
            }
            world.oracle.keep(number, &held);
        });
        let soon = !leaving.is_empty() || held.is_empty();
        let held: Vec<Held> = held.into_iter().map(|(p, epoch)| (partition_of(p), epoch)).collect();
        engine.set_leases(held, leaving);
        Ok(soon)
    }

    /// What may come in this pass; and what is ready goes out.
    fn open(&self, number: usize, engine: &mut Engine<u64>) -> Option<Allowance> {
        self.hand_over(number, engine);
        self.bound(engine);
        let (window, batch, connected) = self.with(|world| {
            let Config { window, batch, .. } = world.config;
            (window, batch, world.brokers[number].is_connected())
        });
        let state = TickState {
            enabled: true,
            connected,
            blocked: false,
            owned_partitions: engine.claimable(),
            outstanding: engine.outstanding(),
            window,
            queue_has_room: engine.is_ready_empty() && engine.has_room_in_bytes(),
            last_claim_was_full: engine.wants_more(),
            woken: false,
            claims_in_hand_in_ms: None,
            idle_backoff_ms: 1_000,
        };
        let room = tick::next(&state).claim;
        let mut allowance = room.map(|room| Allowance::of_pass(room, batch));
        self.receive(number, engine, &mut allowance);
        allowance
    }

    /// Takes in hand what is ready, and hands it over.
    fn receive(&self, number: usize, engine: &mut Engine<u64>, allowance: &mut Option<Allowance>) {
        let Some(allowance) = allowance else { return };
        let (memory, now_ms, limit) = (self.ports(number), self.now_ms(), allowance.in_hand());
        let received = engine.receive(&memory, &memory, now_ms, limit, &self.rules, |handle, pointer, _| {
            self.with(|world| note_taken(world, pointer.seq, 0));
            self.publication(handle, pointer)
        });
        if received > 0 {
            allowance.took_in_hand(received);
            self.hand_over(number, engine);
        }
    }

    fn claim(&self, number: usize, engine: &mut Engine<u64>, allowance: &mut Option<Allowance>) -> Result<(), Failed> {
        self.receive(number, engine, allowance);
        let mut ports = self.ports(number);
        let memory = self.ports(number);
        let Some(allowance) = allowance else {
            for (place, Claimed { pointer, .. }) in memory.take() {
                memory.give_up(place, pointer.partition, pointer.seq);
            }
            return Ok(());
        };
        let (now_ms, limit) = (self.now_ms(), allowance.rows(self.with(|world| world.config.batch)));
        let claimed = engine.claim(&mut ports, &memory, now_ms, limit, &self.rules, |handle, pointer, _| {
            self.publication(handle, pointer)
        })?;
        allowance.claimed(claimed);
        engine.note_claim();
        self.hand_over(number, engine);
        Ok(())
    }

    /// A session lets the worker go no further than some seq; after a while that is over.
    fn bound(&self, engine: &mut Engine<u64>) {
        let chance = |world: &mut World, n: u32| n > 0 && world.dice.chance(n);
        let (begins, ends, reach) = self.with(|world| {
            let (calm, errands) = (world.calm, world.config.errands);
            let newest = world.oracle.messages.keys().next_back().copied().unwrap_or_default();
            let begins = !calm && chance(world, errands);
            let reach = if begins {
                newest - world.dice.below(40) as i64
            } else {
                0
            };
            (begins, calm || chance(world, errands * 2), reach)
        });
        if begins {
            engine.begin_errand(Errand::UpTo(reach));
            engine.set_reach(Some(reach));
        } else if ends {
            engine.end_errand();
        }
    }

    fn publication(&self, handle: u64, pointer: &Pointer) -> Result<Publication, String> {
        let fate = self.with(|world| world.oracle.messages[&pointer.seq].fate);
        if fate == Fate::Unsendable {
            return Err("too large".into());
        }
        Ok(Publication {
            handle,
            exchange: pointer.lease_epoch.to_string().into(),
            routing_key: pointer.seq.to_string().into(),
            key: None,
            properties: Properties::default(),
            body: Vec::new(),
        })
    }

    fn hand_over(&self, number: usize, engine: &mut Engine<u64>) {
        let me = name(number);
        let leases = plain(engine.leases());
        let in_time = self.with(|world| {
            let live = |(partition, epoch): &(u16, i64)| world.tables.is_live(&me, *partition, *epoch, world.now_ms);
            world.config.flaw == Some(Flaw::NoDeadline) || leases.iter().all(live)
        });
        if !in_time {
            return;
        }
        engine.expire(&self.rules, self.with(|world| world.now_ms as i64 * 1_000));
        engine.hand_over(|publications| {
            self.with(|world| {
                if !world.brokers[number].has_room() || (!world.calm && world.dice.chance(500)) {
                    return publications;
                }
                for publication in &publications {
                    hand_over_one(world, number, publication);
                }
                Vec::new()
            })
        });
    }

    // ---- the end ----------------------------------------------------------------------------------------------------

    /// Nothing fails any more, and every transaction ends: then all must end, soon, and nothing be left in memory.
    fn come_to_an_end(&self) -> Result<(), String> {
        if self.with(|world| world.dice.chance(world.config.faults * 50)) {
            self.crash();
        }
        self.with(|world| world.calm = true);
        for worker in &self.workers {
            worker.borrow_mut().paused_until_ms = 0;
        }
        self.settle_down()?;
        let unblock = self.with(|world| world.dice.chance(5_000));
        if unblock {
            let dead: Vec<i64> = self.with(|world| world.tables.dead.keys().copied().collect());
            for seq in dead {
                self.with(|world| match world.dice.chance(3_000) {
                    true => world.retry(seq),
                    false => world.discard(seq),
                });
            }
            self.settle_down()?;
        }
        self.with(|world| world.calm = false);
        Ok(())
    }

    fn settle_down(&self) -> Result<(), String> {
        let until_ms = self.with(|world| world.now_ms + CALM_MS);
        loop {
            self.with(|world| {
                world.oracle.now += 1;
                world.now_ms += 10;
                for _ in 0..10 {
                    (0..world.config.sessions).for_each(|session| world.session_step(session));
                    world.person_step();
                    (0..world.config.workers).for_each(|worker| step_of_broker(world, worker));
                }
                world.end_prepared();
            });
            (0..self.workers.len()).for_each(|worker| self.pass(worker));
            self.complaint()?;
            let left = self.left();
            if left.is_none() {
                return Ok(());
            }
            if self.with(|world| world.now_ms > until_ms) {
                let steps = self.with(|world| world.steps);
                return Err(format!("{} (step {steps})", left.unwrap_or_default()));
            }
        }
    }

    /// What has not ended.
    fn left(&self) -> Option<String> {
        let world = self.world.borrow();
        let busy = world.sessions.iter().any(|session| !session.is_idle());
        if busy || !world.prepared.is_empty() || !world.effects.is_empty() {
            return Some("a session has not ended".into());
        }
        for worker in &self.workers {
            let worker = worker.borrow();
            let Some(engine) = &worker.engine else {
                return Some("a worker is gone".into());
            };
            let blocked = world.tables.dead.values().filter(|dead| dead.blocks).count();
            if !engine.is_idle() || !world.brokers[worker.number].is_idle() {
                return unfinished(&world).or(Some(format!("worker {} is not idle", worker.number)));
            }
            if engine.ordered_keys() > blocked && unfinished(&world).is_none() {
                return Some(format!(
                    "worker {} remembers {} keys, {blocked} are blocked",
                    worker.number,
                    engine.ordered_keys()
                ));
            }
        }
        if world.tables.leases.iter().any(|lease| lease.owner.is_none()) {
            return Some("a partition is nobody's".into());
        }
        let left = world.memory.places.first();
        unfinished(&world).or(left.map(|spot| format!("a place is not free: {spot:?}")))
    }
}

fn step_of_broker(world: &mut World, worker: usize) {
    let World {
        brokers,
        config,
        dice,
        oracle,
        ..
    } = world;
    brokers[worker].step(config, world.calm, world.now_ms, dice, oracle);
}

fn hand_over_one(world: &mut World, worker: usize, publication: &Publication) {
    let seq: i64 = publication.routing_key.parse().expect("a seq");
    let epoch: i64 = publication.exchange.parse().expect("an epoch");
    let partition = world.oracle.messages[&seq].partition;
    let in_hand = world.memory.places.is_in_hand(worker, (partition, seq));
    let unclaimed = !world
        .tables
        .is_claimed(&name(worker), (partition, seq), epoch, true, false);
    let claimed = world
        .tables
        .is_claimed(&name(worker), (partition, seq), epoch, true, in_hand);
    world.oracle.unclaimed += u64::from(claimed && unclaimed);
    world.oracle.handed_over(worker, seq, epoch, claimed);
    if matches!(world.oracle.messages[&seq].fate, Fate::Expires { at_ms } if at_ms <= world.now_ms) {
        world.oracle.complain(format!("{seq} had expired and was handed over"));
    }
    let World { brokers, oracle, .. } = world;
    brokers[worker].accept(publication, seq, epoch, oracle);
}
