//! A run: workers among sessions, a person, brokers and faults.

use super::config::Config;
use super::host::{Host, LEASE_RENEW_MS, LEASE_TTL_MS, settings};
use super::world::{World, unfinished};
use outbox_core::engine::{Request, Sharing};
use outbox_worker::{FinishTimeouts, Pass};
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::{Duration, Instant};

/// How long a worker waits that could not read its settings or leases.
const RETRY_MS: u64 = 500;
/// The time by which all messages must have ended once nothing fails any more. Well before the sweep, which finds rows
/// that should not be lost.
const CALM_MS: u64 = 15_000;
const STEPS_BETWEEN_CALMS: u64 = 10_000;
const LAST: FinishTimeouts = FinishTimeouts {
    outcomes: Duration::from_millis(20),
    close: Duration::ZERO,
    settles: Duration::from_secs(60),
    settles_before_close: false,
};

struct Process {
    number: usize,
    /// None: it has crashed or ended.
    worker: Option<outbox_worker::Worker<Host>>,
    /// It takes no step until then.
    paused_until_ms: u64,
    /// Unless something wakes it.
    rests_until_ms: u64,
}

/// What all processes see.
pub struct Shared {
    pub world: RefCell<World>,
    processes: Vec<RefCell<Process>>,
    began: Instant,
    depth: Cell<u32>,
}

pub struct Simulation(Rc<Shared>);

/// The counts of a run.
#[derive(Debug, Default)]
pub struct Tally {
    pub steps: u64,
    pub messages: i64,
    pub published: u64,
    pub handed_over: u64,
    pub repeated: u64,
    /// Handed over before any claim.
    pub unclaimed: u64,
    /// Attempts charged to messages that end the connection.
    pub charged: u64,
}

impl Drop for Simulation {
    fn drop(&mut self) {
        // Each names its host, which contains the whole world.
        self.0
            .processes
            .iter()
            .for_each(|process| process.borrow_mut().worker = None);
    }
}

impl Simulation {
    pub fn new(config: &Config, seed: u64) -> Self {
        let process = |number| Process {
            number,
            worker: None,
            paused_until_ms: 0,
            rests_until_ms: 0,
        };
        Self(Rc::new(Shared {
            world: RefCell::new(World::new(config, seed)),
            processes: (0..config.workers)
                .map(|number| RefCell::new(process(number)))
                .collect(),
            began: Instant::now(),
            depth: Cell::new(0),
        }))
    }

    /// Runs this number of steps; the first complaint ends it.
    pub fn run(&self, steps: u64) -> Result<Tally, String> {
        let mut calm_at = STEPS_BETWEEN_CALMS;
        while self.0.world.borrow().steps < steps {
            self.0.step();
            self.0.complaint()?;
            if self.0.world.borrow().steps >= calm_at {
                self.0.come_to_an_end()?;
                calm_at = self.0.world.borrow().steps + STEPS_BETWEEN_CALMS;
            }
        }
        self.0.come_to_an_end()?;
        let world = self.0.world.borrow();
        Ok(Tally {
            steps: world.steps,
            messages: world.sequence,
            published: world.oracle.published,
            handed_over: world.oracle.handed_over,
            repeated: world.oracle.repeated,
            unclaimed: world.oracle.unclaimed,
            charged: world.oracle.charged,
        })
    }
}

impl Shared {
    /// By the timers of the machine, which stop while it sleeps.
    pub fn now(&self) -> Instant {
        self.began + self.with(|world| Duration::from_millis(world.now_ms - world.slept_ms))
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

    // ---- which process takes the next step --------------------------------------------------------------------------

    fn step(self: &Rc<Self>) {
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

    /// A session, a person, a broker.
    fn someone_else(&self) {
        self.with(|world| {
            world.steps += 1;
            world.oracle.now += 1;
            world.step_of_standby();
            match world.dice.below(100) {
                0..70 => {
                    let session = world.dice.below(world.config.sessions);
                    world.session_step(session);
                }
                70..72 if !world.prepared.is_empty() && world.dice.chance(3_000) => world.end_prepared(),
                70..76 => world.person_step(),
                76 => world.step_by_hand(),
                _ => {
                    let worker = world.dice.below(world.config.workers);
                    world.step_of_brokers(worker);
                }
            }
        });
    }

    /// The steps of others while a worker is between two accesses.
    pub fn interrupt(self: &Rc<Self>, worker: usize) {
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
                60..64 if self.with(|world| world.dice.chance(world.config.hold_ups)) => {
                    // It is delayed, and its leases expire.
                    self.with(|world| world.now_ms += LEASE_TTL_MS);
                    (0..self.processes.len()).for_each(|other| self.pass(other));
                    // Meanwhile others continue.
                    (0..30).for_each(|_| self.someone_else());
                }
                _ => self.someone_else(),
            }
        }
        self.depth.set(depth);
    }

    // ---- faults -----------------------------------------------------------------------------------------------------

    fn fault(self: &Rc<Self>, number: usize) {
        if self.with(|world| world.calm || !world.dice.chance(world.config.faults)) {
            return;
        }
        let mut process = self.processes[number].borrow_mut();
        let now_ms = self.with(|world| world.now_ms);
        let soon = now_ms + self.with(|world| world.dice.between(0, LEASE_TTL_MS * 2));
        let destination = self.with(|world| world.dice.below(world.config.destinations));
        match self.with(|world| world.dice.below(100)) {
            0..30 => self.with(|world| {
                let World {
                    workers, dice, oracle, ..
                } = world;
                let until_ms = now_ms + dice.between(0, 500);
                workers[number].brokers[destination].lose(until_ms, dice, oracle, true);
            }),
            30..45 => {
                self.with(|world| world.end_publishers(number));
                process.worker = None;
                self.with(|world| world.end_worker(number));
                process.paused_until_ms = soon;
            }
            // Its session is lost: a worker outside settles no more, and another begins.
            45..50 => {
                if let Some(mut worker) = process.worker.take() {
                    worker.abandon(Duration::ZERO);
                    self.with(|world| world.end_publishers(number));
                    drop(worker);
                    self.with(|world| world.end_worker(number));
                }
            }
            50..62 => process.paused_until_ms = soon,
            // The machine sleeps.
            62..65 => self.with(|world| {
                let slept_ms = world.dice.between(1, LEASE_TTL_MS * 2);
                world.now_ms += slept_ms;
                world.slept_ms += slept_ms;
            }),
            65..80 => self.with(|world| {
                let World {
                    workers, dice, oracle, ..
                } = world;
                workers[number].brokers[destination].die(dice, oracle);
            }),
            80..97 => {
                self.finish(&mut process);
                process.paused_until_ms = soon;
            }
            _ => {
                drop(process);
                self.crash();
            }
        }
    }

    /// The server crashes.
    fn crash(&self) {
        for (number, process) in self.processes.iter().enumerate() {
            self.with(|world| world.end_publishers(number));
            process.borrow_mut().worker = None;
        }
        self.with(World::crash);
    }

    /// The orderly end.
    fn finish(&self, process: &mut Process) {
        let number = process.number;
        let Some(mut worker) = process.worker.take() else {
            return;
        };
        let timeouts = FinishTimeouts {
            settles_before_close: self.with(|world| world.dice.chance(5_000)),
            ..LAST
        };
        _ = worker.finish(&timeouts, &mut |_, _| {
            self.with(|world| {
                world.now_ms += 5;
                world.step_of_brokers(number);
            });
        });
        self.with(|world| world.end_publishers(number));
        drop(worker);
        self.with(|world| world.end_worker(number));
    }

    // ---- a worker ---------------------------------------------------------------------------------------------------

    fn pass(self: &Rc<Self>, number: usize) {
        let Ok(mut process) = self.processes[number].try_borrow_mut() else {
            return;
        };
        let now_ms = self.with(|world| {
            world.steps += 1;
            world.oracle.now += 1;
            world.now_ms
        });
        if now_ms < process.paused_until_ms {
            return;
        }
        let worker = process.worker.get_or_insert_with(|| {
            let host = Host::new(self, number);
            host.begin();
            let (settings, described) = self.with(|world| {
                world.oracle.keep(number, &[]);
                (settings(&world.config, world.enabled), world.described())
            });
            let mut worker = outbox_worker::Worker::new(host, Sharing::Leases, settings, None);
            worker.describe(described);
            worker
        });
        match worker.pass() {
            Ok(Pass::Wait(wait_ms)) => {
                let taken = worker.memory_taken();
                self.with(|world| world.oracle.memory(number, taken, world.config.memory));
                let wait_ms = worker.arm_wake(wait_ms, None);
                process.rests_until_ms = self.with(|world| {
                    let World {
                        workers,
                        now_ms,
                        oracle,
                        config,
                        ..
                    } = world;
                    let here = &mut workers[number];
                    here.is_woken |= here.brokers.iter().any(|broker| broker.rings());
                    let until_ms = *now_ms + u64::from(wait_ms);
                    // A lease lasts for nine tenths of its time.
                    let renews_at_ms = here.deadline_ms.map(|ms| ms + LEASE_RENEW_MS - LEASE_TTL_MS * 9 / 10);
                    if config.faults == 0
                        && config.hold_ups == 0
                        && renews_at_ms.is_some_and(|at_ms| *now_ms < at_ms && at_ms + RETRY_MS < until_ms)
                    {
                        oracle.complain(format!("{number} rests while its leases are to be renewed"));
                    }
                    until_ms
                });
            }
            Ok(Pass::NewSession | Pass::Left) => self.finish(&mut process),
            Err(failed) => self.with(|world| world.oracle.complain(format!("{number} gave up: {failed:?}"))),
        }
    }

    // ---- the end ----------------------------------------------------------------------------------------------------

    /// Nothing fails any more, and every transaction ends: then all messages must end, soon, and memory must be empty.
    fn come_to_an_end(self: &Rc<Self>) -> Result<(), String> {
        if self.with(|world| world.dice.chance(world.config.faults * 50)) {
            self.crash();
        }
        self.with(World::calm_down);
        for process in &self.processes {
            process.borrow_mut().paused_until_ms = 0;
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

    /// A worker that is not woken waits as long as it announced.
    fn settle_down(self: &Rc<Self>) -> Result<(), String> {
        let until_ms = self.with(|world| world.now_ms + CALM_MS);
        loop {
            self.with(|world| {
                world.oracle.now += 1;
                world.now_ms += 10;
                for _ in 0..10 {
                    (0..world.config.sessions).for_each(|session| world.session_step(session));
                    world.person_step();
                    (0..world.config.workers).for_each(|worker| world.step_of_brokers(worker));
                }
                world.end_prepared();
                world.step_of_standby();
            });
            for (number, process) in self.processes.iter().enumerate() {
                let rests_until_ms = process.borrow().rests_until_ms;
                if self.with(|world| world.workers[number].is_woken || world.now_ms >= rests_until_ms) {
                    self.pass(number);
                }
            }
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
        let mut keys = 0;
        for process in &self.processes {
            let process = process.borrow();
            let Some(worker) = &process.worker else {
                return Some("a worker is gone".into());
            };
            let brokers = &world.workers[process.number].brokers;
            if worker.outstanding() > 0 || !brokers.iter().all(|broker| broker.is_idle()) {
                return unfinished(&world).or(Some(format!("worker {} is not idle", process.number)));
            }
            keys = keys.max(worker.ordered_keys());
        }
        let blocked = world.tables.dead.values().filter(|dead| dead.blocks).count();
        if keys > blocked && unfinished(&world).is_none() {
            return Some(format!("a worker remembers {keys} keys, {blocked} are blocked"));
        }
        if world.tables.leases.iter().any(|lease| lease.owner.is_none()) {
            return Some("a partition has no owner".into());
        }
        let left = world.memory.slots.first();
        unfinished(&world).or(left.map(|slot| format!("a slot is not free: {slot:?}")))
    }
}

impl World {
    /// A session requests delivery up to a seq while it is switched off, or a person pauses a destination; after a
    /// while that is over.
    fn step_by_hand(&mut self) {
        let chance = |dice: &mut support::chaos::Dice, n: u32| n > 0 && dice.chance(n);
        if chance(&mut self.dice, self.config.requests) {
            let newest = self.oracle.messages.keys().next_back().copied().unwrap_or_default();
            self.request_ids += 1;
            self.enabled = false;
            self.request = Some((
                self.request_ids,
                Request::UpTo((newest - self.dice.below(40) as i64).max(1)),
            ));
            self.wake_all();
        } else if !self.enabled && chance(&mut self.dice, self.config.requests * 4) {
            self.switch_on();
        }
        if chance(&mut self.dice, self.config.pauses) {
            let destination = self.dice.below(self.config.destinations);
            if !self.paused.remove(&destination) {
                self.paused.insert(destination);
            }
            self.changed_by_hand();
        }
    }

    fn changed_by_hand(&mut self) {
        self.changes += 1;
        self.memory.schedules += 1;
        self.wake_all();
    }

    fn switch_on(&mut self) {
        self.enabled = true;
        self.request = None;
        self.changed_by_hand();
    }

    fn calm_down(&mut self) {
        self.calm = true;
        self.paused.clear();
        self.switch_on();
    }
}
