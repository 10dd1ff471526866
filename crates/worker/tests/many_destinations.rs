//! What a worker does when it serves many destinations, in steps of a clock that its statements and waits move: who has
//! no work costs nothing, and who hangs delays nobody.

use outbox_core::engine::{
    Arrived, Batch, Bounds, ClaimLimits, Claimed, DueMessages, HeldLease, Lane, Memory, RowId, Settlement, Sharing,
    StatementTimeout, Tables,
};
use outbox_core::event::Event;
use outbox_core::key_order::{BlockedKey, OrderedKey};
use outbox_core::lease::Lease;
use outbox_core::message::{Outcome, Pointer, Publication};
use outbox_core::open_transactions::OpenTransaction;
use outbox_core::partition::Partition;
use outbox_core::settle::{Blocks, Disposition, Ended, Rules};
use outbox_core::standbys::Replication;
use outbox_transport::kind::Kind;
use outbox_transport::kind::{Limits, Target};
use outbox_transport::{Answered, ConnectionState, NotStarted, PublisherEvent};
use outbox_worker::rewinds::{RewindGroup, Rewound};
use outbox_worker::{
    Changes, ConnectionStatus, Described, DestinationPublisher, LeaseChanges, Mapping, Orders, Pass, PassCounts,
    PassEnd, Refresh, Runtime, Tended, Worker, WorkerSettings,
};
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::convert::Infallible;
use std::fmt::Arguments;
use std::rc::Rc;
use std::time::{Duration, Instant};

const PARTITIONS: i64 = 4;
const LEASE_MS: u64 = 15_000;
/// How long a publisher waits for an answer.
const TIMEOUT_MS: u64 = 30_000;

/// The server, the peers, and what was done there.
struct World {
    began: Instant,
    now_ms: Cell<u64>,
    /// How long a statement takes, in ms.
    statement_ms: u64,
    /// The statements so far, by kind.
    statements: RefCell<BTreeMap<&'static str, usize>>,
    /// The lanes of which a statement asked whether they have messages.
    lanes_asked: Cell<usize>,
    /// The unclaimed messages of each destination, all in one partition.
    ready: RefCell<BTreeMap<String, Vec<i64>>>,
    rewinds: RefCell<Vec<Rewound>>,
    sequence: Cell<i64>,
    /// Destinations whose peers answer nothing.
    hanging: RefCell<HashSet<String>>,
    /// When each published message was settled, in ms.
    published: RefCell<HashMap<i64, u64>>,
    /// Publishers that were started.
    starts: Cell<usize>,
    described: RefCell<Option<Vec<Described>>>,
    lease_until_ms: Cell<u64>,
    logged: RefCell<Vec<String>>,
    payload_bytes: usize,
    /// The most bytes that messages took after a pass.
    memory_peak: Cell<usize>,
}

#[derive(Clone)]
struct Host(Rc<World>, Rc<Vec<Partition>>);

impl World {
    fn spend(&self, kind: &'static str) {
        *self.statements.borrow_mut().entry(kind).or_default() += 1;
        self.now_ms.set(self.now_ms.get() + self.statement_ms);
    }

    fn statements_of(&self, kind: &str) -> usize {
        self.statements.borrow().get(kind).copied().unwrap_or_default()
    }

    fn count(&self) -> usize {
        self.statements.borrow().values().sum()
    }
}

fn partition() -> Partition {
    Partition::new(0).unwrap()
}

struct Peer {
    world: Rc<World>,
    name: String,
    events: RefCell<Vec<PublisherEvent>>,
    /// Messages without an answer, and when each was handed over, in ms.
    unanswered: RefCell<Vec<(u64, u64)>>,
    /// When the publisher has ended, in ms.
    ends_ms: Cell<Option<u64>>,
}

impl Peer {
    fn hangs(&self) -> bool {
        self.world.hanging.borrow().contains(&self.name)
    }
}

impl DestinationPublisher for Peer {
    fn publish(&self, batch: Vec<Publication>) -> Result<(), Vec<Publication>> {
        if self.hangs() {
            let now_ms = self.world.now_ms.get();
            let handles = batch.iter().map(|publication| (publication.handle, now_ms));
            self.unanswered.borrow_mut().extend(handles);
        } else {
            let at = self.world.began + Duration::from_millis(self.world.now_ms.get());
            let answers = batch.into_iter().map(|publication| Answered {
                handle: publication.handle,
                outcome: Outcome::Confirmed,
                at,
            });
            self.events
                .borrow_mut()
                .push(PublisherEvent::Outcomes(answers.collect()));
        }
        Ok(())
    }

    fn has_events(&self) -> bool {
        let now_ms = self.world.now_ms.get();
        let oldest = self.unanswered.borrow().first().copied();
        let is_over = oldest.is_some_and(|(_, at_ms)| now_ms >= at_ms + TIMEOUT_MS);
        is_over || !self.events.borrow().is_empty() || self.ends_ms.get().is_some_and(|ms| now_ms >= ms)
    }

    fn drain(&mut self) -> Vec<PublisherEvent> {
        let mut events = self.events.take();
        let now_ms = self.world.now_ms.get();
        let is_over = |(_, at_ms): &mut (u64, u64)| now_ms >= *at_ms + TIMEOUT_MS;
        let lost = |(handle, _)| Answered {
            handle,
            outcome: Outcome::Lost {
                reason: "no answer".into(),
            },
            at: self.world.began + Duration::from_millis(now_ms),
        };
        let mut unanswered = self.unanswered.borrow_mut();
        let over: Vec<Answered> = unanswered.extract_if(.., is_over).map(lost).collect();
        if !over.is_empty() {
            events.push(PublisherEvent::Outcomes(over));
        }
        if self.ends_ms.get().is_some_and(|ms| self.world.now_ms.get() >= ms) {
            self.ends_ms.set(None);
            events.push(PublisherEvent::Ended(None));
        }
        events
    }

    fn wake_after(&self, _: usize) {}

    fn request_stop(&self, limit: Duration) {
        let takes_ms = if self.hangs() { limit.as_millis() as u64 } else { 0 };
        self.ends_ms.set(Some(self.world.now_ms.get() + takes_ms));
    }

    fn stop(&mut self, limit: Duration) {
        if self.hangs() {
            self.world
                .now_ms
                .set(self.world.now_ms.get() + limit.as_millis() as u64);
        }
    }

    fn has_new_certificates(&self) -> bool {
        false
    }

    fn has_new_password(&self) -> bool {
        false
    }
}

impl Runtime for Host {
    type Tables = Self;
    type Publisher = Peer;
    const HAS_FAST_PATH: bool = true;
    const PURGE_EVERY: Option<Duration> = None;

    fn id(&self) -> &str {
        "worker"
    }

    fn tables(&self) -> &Self {
        self
    }

    fn now(&self) -> Instant {
        self.0.began + Duration::from_millis(self.0.now_ms.get())
    }

    fn now_us(&self) -> i64 {
        self.0.now_ms.get() as i64 * 1_000
    }

    fn boottime_ns(&self) -> u64 {
        self.0.now_ms.get() * 1_000_000
    }

    fn begin_pass(&self) {}

    fn end_pass(&self, _: PassEnd) {}

    fn orders(&self) -> Orders {
        Orders::default()
    }

    fn is_ending(&self) -> bool {
        false
    }

    fn answer(&self, _: u32, _: &PassCounts, _: bool) {}

    fn refresh(&self, _: bool) -> Result<Refresh, Infallible> {
        Ok(match self.0.described.take() {
            None => Refresh::Skipped,
            described => Refresh::Changed(Box::new(Changes {
                not_adopted: None,
                settings: None,
                described,
            })),
        })
    }

    fn tend(&self, _: bool, plan: &mut dyn FnMut(&[String], &[Lease]) -> LeaseChanges) -> Result<Tended, Infallible> {
        self.0.spend("leases");
        let now_ms = self.0.now_ms.get();
        let holds = self.0.lease_until_ms.get() > 0;
        let leases = self.1.iter().map(|partition| Lease {
            partition: *partition,
            owner: holds.then(|| "worker".to_owned()),
            live: holds,
            epoch: 1,
        });
        let plan = plan(&["worker".to_owned()], &leases.collect::<Vec<Lease>>());
        self.0.lease_until_ms.set(now_ms + LEASE_MS);
        let taken = plan.take.into_iter().map(|partition| (partition, 1));
        let mut held: Vec<HeldLease> = plan.renew.into_iter().chain(taken).collect();
        held.sort_unstable();
        Ok(Tended {
            workers: vec!["worker".to_owned()],
            leased: Some((held, Duration::from_millis(LEASE_MS))),
        })
    }

    fn set_deadline(&self, _: Option<(u64, Duration)>) {}

    fn worker_changes(&self) -> u64 {
        0
    }

    fn call_others(&self) {}

    fn purge(&self) -> Result<i64, Infallible> {
        Ok(0)
    }

    fn leave(&self) -> Result<(), Infallible> {
        Ok(())
    }

    fn replication(&self) -> Result<Replication, Infallible> {
        unreachable!("there is no standby")
    }

    fn take_rewinds(&self, _: &[RewindGroup], _: &[HeldLease]) -> Result<Vec<Rewound>, Infallible> {
        Ok(self.0.rewinds.take())
    }

    fn schedules(&self) -> u32 {
        0
    }

    fn take_ready(&self) -> Vec<Arrived> {
        Vec::new()
    }

    fn start(&self, _: &Target, connection: &str) -> Result<Peer, NotStarted> {
        self.0.starts.set(self.0.starts.get() + 1);
        Ok(Peer {
            world: Rc::clone(&self.0),
            name: connection.rsplit(' ').next().unwrap().to_owned(),
            events: RefCell::new(vec![PublisherEvent::State(ConnectionState::Connected)]),
            unanswered: RefCell::default(),
            ends_ms: Cell::new(None),
        })
    }

    fn confirmed(&self, _: &Pointer, _: i64) {}

    fn settled(&self, _: &str, _: &Ended) {}

    fn report(&self, _: &str, _: Option<&ConnectionStatus>, _: Option<i64>) -> Result<(), Infallible> {
        self.0.spend("report");
        Ok(())
    }

    fn log(&self, _: Option<&str>, text: Arguments) {
        self.0.logged.borrow_mut().push(text.to_string());
    }

    fn failed(&self, error: Infallible) -> Result<u32, Infallible> {
        match error {}
    }
}

impl Tables for Host {
    type Error = Infallible;

    fn settle(&self, _: &str, batch: &[Settlement], _: Blocks, _: StatementTimeout) -> Result<usize, Infallible> {
        self.0.spend("settle");
        for settlement in batch {
            let seq = settlement.pointer.seq;
            match &settlement.disposition {
                Disposition::Publish => _ = self.0.published.borrow_mut().insert(seq, self.0.now_ms.get()),
                Disposition::Release { .. } => {
                    let mut ready = self.0.ready.borrow_mut();
                    ready
                        .entry(settlement.pointer.destination.to_string())
                        .or_default()
                        .push(seq);
                }
                other => panic!("{other:?}"),
            }
        }
        Ok(batch.len())
    }

    fn claim(
        &self,
        destination: &str,
        lanes: &[Lane],
        limits: ClaimLimits,
        _: StatementTimeout,
    ) -> Result<Batch, Infallible> {
        self.0.spend("claim");
        let mut ready = self.0.ready.borrow_mut();
        let Some(lane) = lanes.iter().find(|lane| lane.partition == partition()) else {
            return Ok(Batch::default());
        };
        let Some(seqs) = ready.get_mut(destination) else {
            return Ok(Batch::default());
        };
        let fit = limits.bytes.div_ceil(self.0.payload_bytes).min(lane.limit as usize);
        let cut = fit < seqs.len();
        let rows: Vec<Claimed> = (seqs.drain(..seqs.len().min(fit)))
            .map(|seq| Claimed {
                row_id: RowId::default(),
                pointer: Pointer {
                    seq,
                    destination: destination.into(),
                    partition: partition(),
                    key: None,
                    attempts: 0,
                    crashes: 0,
                    lease_epoch: 1,
                    replayed: false,
                    enqueued_at_us: 0,
                    expires_at_us: None,
                },
                event: Ok(Event {
                    payload: format!("\"{}\"", "x".repeat(self.0.payload_bytes)),
                    ..Event::default()
                }),
            })
            .collect();
        ready.retain(|_, seqs| !seqs.is_empty());
        Ok(Batch {
            rows,
            cut,
            ..Batch::default()
        })
    }

    fn claim_unleased(&self, _: &str, _: ClaimLimits) -> Result<Batch, Infallible> {
        unreachable!("there are leases")
    }

    fn claim_waiting(&self, _: &OrderedKey, _: i64, _: i64, _: ClaimLimits) -> Result<(Batch, bool), Infallible> {
        unreachable!("nothing waits")
    }

    fn blocked_keys(&self, _: &str, _: &[Partition]) -> Result<Vec<BlockedKey>, Infallible> {
        self.0.spend("blocked keys");
        Ok(Vec::new())
    }

    fn destinations_with_messages(&self) -> Result<Vec<String>, Infallible> {
        self.0.spend("survey");
        Ok(self.0.ready.borrow().keys().cloned().collect())
    }

    fn lanes_with_messages(&self, lanes: &[(&str, Partition, i64)]) -> Result<Vec<usize>, Infallible> {
        self.0.spend("lanes");
        self.0.lanes_asked.set(self.0.lanes_asked.get() + lanes.len());
        let ready = self.0.ready.borrow();
        let has_messages = |(name, _, from): &(&str, Partition, i64)| {
            (ready.get(*name)).is_some_and(|seqs| seqs.iter().any(|seq| seq >= from))
        };
        Ok((0..lanes.len()).filter(|lane| has_messages(&lanes[*lane])).collect())
    }

    fn bring_due(&self, _: Option<&[HeldLease]>) -> Result<DueMessages, Infallible> {
        self.0.spend("due");
        Ok(DueMessages::default())
    }

    fn is_locked(_: &Infallible) -> bool {
        false
    }
}

impl Memory for Host {
    type Error = Infallible;

    fn open_transactions(&self) -> Result<Vec<OpenTransaction>, Infallible> {
        Ok(Vec::new())
    }

    fn peek_rewinds(&self, _: &str, _: &[HeldLease]) -> Vec<(Partition, i64)> {
        Vec::new()
    }
}

// ---- the tests ------------------------------------------------------------------------------------------------------

fn settings() -> WorkerSettings {
    WorkerSettings {
        enabled: true,
        target: Ok(Target::default()),
        rules: Rules::default(),
        limits: Limits::default(),
        standbys: None,
        lease_renew: Duration::from_millis(LEASE_MS / 3),
        batch_size: 100,
        idle_backoff_ms: 1_000,
    }
}

fn name(number: usize) -> String {
    format!("customer-{number}")
}

fn described(numbers: impl Iterator<Item = usize>, options: &[(&str, &str)]) -> Vec<Described> {
    let describe = |number| Described {
        name: name(number),
        kind: Kind::of_wrapper("outbox_http"),
        options: [("url", format!("https://{}.test/", name(number)))]
            .into_iter()
            .chain(options.iter().map(|(name, value)| (*name, (*value).to_owned())))
            .map(|(name, value)| (name.to_owned(), value))
            .collect(),
        mapping: Mapping::Absent,
        paused: false,
        not_adopted: None,
    };
    numbers.map(describe).collect()
}

struct Running {
    world: Rc<World>,
    worker: Worker<Host>,
}

impl Running {
    /// A worker that serves `count` destinations and has nothing to do.
    fn new(count: usize, statement_ms: u64) -> Self {
        Self::with_messages_of(2, count, statement_ms)
    }

    fn with_messages_of(payload_bytes: usize, count: usize, statement_ms: u64) -> Self {
        let world = Rc::new(World {
            began: Instant::now(),
            now_ms: Cell::new(1),
            statement_ms,
            statements: RefCell::default(),
            ready: RefCell::default(),
            rewinds: RefCell::default(),
            lanes_asked: Cell::new(0),
            sequence: Cell::new(0),
            hanging: RefCell::default(),
            published: RefCell::default(),
            starts: Cell::new(0),
            described: RefCell::new(Some(described(0..count, &[]))),
            lease_until_ms: Cell::new(0),
            logged: RefCell::default(),
            payload_bytes,
            memory_peak: Cell::new(0),
        });
        let partitions = (0..PARTITIONS).map(|index| Partition::new(index).unwrap()).collect();
        let host = Host(Rc::clone(&world), Rc::new(partitions));
        let worker = Worker::new(host, Sharing::Leases, settings(), None);
        let mut running = Self { world, worker };
        running.run_until("it rests", |world| world.count() > 0 && world.starts.get() >= count);
        running.idle();
        running
    }

    /// One pass, and the wait after it if nothing comes.
    fn pass(&mut self) {
        let Ok(Pass::Wait(wait_ms)) = self.worker.pass() else {
            panic!("it ended")
        };
        let wait_ms = self.worker.arm_wake(wait_ms, None);
        let peak = self.world.memory_peak.get().max(self.worker.memory_taken());
        self.world.memory_peak.set(peak);
        let comes = !self.world.rewinds.borrow().is_empty();
        let wait_ms = if comes { 0 } else { wait_ms.min(10) };
        self.world.now_ms.set(self.world.now_ms.get() + u64::from(wait_ms));
    }

    fn run_until(&mut self, what: &str, is_so: impl Fn(&World) -> bool) {
        for _ in 0..100_000 {
            if is_so(&self.world) {
                return;
            }
            self.pass();
        }
        panic!("never: {what}");
    }

    /// Passes until all states are reported and nothing is in flight but what hangs.
    fn idle(&mut self) {
        let reports = |world: &World| world.statements_of("report");
        let mut before = usize::MAX;
        while reports(&self.world) != before {
            before = reports(&self.world);
            (0..20).for_each(|_| self.pass());
        }
    }

    /// A session commits messages for a destination. Returns the last seq.
    fn commit(&mut self, number: usize, count: usize) -> i64 {
        let world = &self.world;
        let first = world.sequence.get() + 1;
        world.sequence.set(first + count as i64 - 1);
        let mut ready = world.ready.borrow_mut();
        ready
            .entry(name(number))
            .or_default()
            .extend(first..first + count as i64);
        world.rewinds.borrow_mut().push(Rewound {
            partition: partition(),
            lane: RewindGroup::of(&name(number)).lane(partition()),
            seq: first,
        });
        world.sequence.get()
    }

    /// Commits a message, and returns how long it took until it was published, in ms.
    fn latency_ms(&mut self, number: usize) -> u64 {
        let began_ms = self.world.now_ms.get();
        let seq = self.commit(number, 1);
        self.run_until("published", |world| world.published.borrow().contains_key(&seq));
        self.world.published.borrow()[&seq] - began_ms
    }

    fn hang(&mut self, numbers: std::ops::Range<usize>) {
        self.world.hanging.borrow_mut().extend(numbers.clone().map(name));
        for number in numbers {
            self.commit(number, 50);
        }
        self.idle();
    }

    fn assert_kept_its_leases(&self) {
        let logged = self.world.logged.borrow();
        let ran_out = logged.iter().find(|line| line.contains("run out"));
        assert_eq!(ran_out, None);
    }
}

/// The statements for each of a hundred messages of one destination.
fn statements_a_message(running: &mut Running) -> usize {
    let before = running.world.count();
    for _ in 0..100 {
        running.latency_ms(7);
    }
    (running.world.count() - before) / 100
}

#[test]
fn a_message_costs_as_many_statements_beside_a_thousand_destinations_as_beside_ten() {
    let mut few = Running::new(10, 0);
    let mut many = Running::new(1_000, 0);
    let (beside_ten, beside_a_thousand) = (statements_a_message(&mut few), statements_a_message(&mut many));
    // One more finds out for which of the destinations that share a lane it is.
    assert!(
        beside_a_thousand <= beside_ten + 1,
        "{beside_a_thousand} instead of {beside_ten}"
    );
    assert!(beside_ten <= 3, "{beside_ten}");
}

#[test]
fn a_message_costs_no_look_at_the_messages_of_destinations_that_hang() {
    let mut running = Running::new(1_000, 0);
    running.hang(10..1_000);
    let (before, began_ms) = (running.world.statements_of("survey"), running.world.now_ms.get());
    running.world.lanes_asked.set(0);
    statements_a_message(&mut running);
    let sweeps = (running.world.now_ms.get() - began_ms) as usize / 30_000 + 1;
    let surveys = running.world.statements_of("survey") - before;
    assert!(surveys <= sweeps, "{surveys} surveys");
    let asked = running.world.lanes_asked.get() / 100;
    assert!(asked <= 40, "{asked} lanes a message"); // there are 16 times as many destinations as lanes
}

#[test]
fn destinations_without_work_cost_no_statement_of_their_own() {
    let mut running = Running::new(1_000, 0);
    let before = running.world.count();
    let until_ms = running.world.now_ms.get() + 120_000;
    running.run_until("two minutes", |world| world.now_ms.get() >= until_ms);
    // The leases every 5 s, due messages every second, and a survey every 30 s.
    let statements = running.world.count() - before;
    assert!(
        statements <= 24 + 120 + 4 + 5,
        "{statements}: {:?}",
        running.world.statements.borrow()
    );
}

#[test]
fn a_change_of_rules_reconnects_nothing() {
    let mut running = Running::new(100, 0);
    let starts = running.world.starts.get();
    let rules = [
        ("max_attempts", "3"),
        ("on_dead", "skip"),
        ("max_rate", "100"),
        ("max_pending", "1000"),
    ];
    for rule in rules {
        running.world.described.replace(Some(described(0..100, &[rule])));
        running.idle();
        running.latency_ms(7);
    }
    assert_eq!(running.world.starts.get(), starts);
    running
        .world
        .described
        .replace(Some(described(0..100, &[("confirm_timeout", "7s")])));
    running.idle();
    assert_eq!(running.world.starts.get(), starts + 100);
}

#[test]
fn a_hundred_hanging_destinations_that_are_replaced_or_dropped_delay_no_other() {
    for statement_ms in [1, 20] {
        let mut running = Running::new(1_000, statement_ms);
        running.hang(0..100);
        let usual_ms = running.latency_ms(500);
        running
            .world
            .described
            .replace(Some(described(0..1_000, &[("confirm_timeout", "7s")])));
        let replaced_ms = running.latency_ms(501);
        running
            .world
            .described
            .replace(Some(described(100..1_000, &[("confirm_timeout", "7s")])));
        let dropped_ms = running.latency_ms(502);
        // Some of the states that have changed are reported before it.
        let most_ms = usual_ms + 40 * statement_ms;
        assert!(
            replaced_ms <= most_ms && dropped_ms <= most_ms,
            "{statement_ms} ms a statement: {usual_ms}, {replaced_ms}, {dropped_ms} ms"
        );
        running.idle();
        running.assert_kept_its_leases();
    }
}

#[test]
fn leases_are_renewed_between_the_steps_of_a_long_pass() {
    // A worker outside, with a slow round trip: each destination has a message.
    let mut running = Running::new(1_000, 20);
    for round in 0..3 {
        for number in 0..1_000 {
            running.commit(number, 1);
        }
        let last = running.world.sequence.get();
        running.run_until("published", |world| world.published.borrow().len() as i64 >= last);
        assert_eq!(last, 1_000 * (round + 1));
    }
    running.assert_kept_its_leases();
}

// ---- memory ---------------------------------------------------------------------------------------------------------

const LARGE: usize = 1_000_000;

fn assert_memory_is_bounded(running: &Running) {
    let peak = running.world.memory_peak.get();
    assert!(peak <= Bounds::USUAL.memory + 2 * LARGE, "{peak} bytes");
}

#[test]
fn receivers_that_hang_leave_memory_for_those_that_work() {
    for (hanging, payload_bytes) in [(1, LARGE), (300, LARGE), (900, 1_000)] {
        let mut running = Running::with_messages_of(payload_bytes, 1_000, 0);
        let usual_ms = running.latency_ms(950);
        running.hang(0..hanging);
        let waits_ms: Vec<u64> = (0..100).map(|_| running.latency_ms(950)).collect();
        let longest_ms = waits_ms.iter().max().copied().unwrap_or_default();
        assert!(
            longest_ms <= usual_ms + 100,
            "{hanging} of {payload_bytes} bytes: {waits_ms:?} ms"
        );
        assert_memory_is_bounded(&running);
    }
}

/// Each had answered before and has a backlog, so it may have taken as much as any other.
#[test]
fn receivers_that_hang_in_the_middle_of_a_backlog_give_their_memory_back() {
    for hanging in [2, 30, 60] {
        let mut running = Running::with_messages_of(LARGE, 100, 0);
        for number in 0..100 {
            running.commit(number, 1);
        }
        let first = running.world.sequence.get() as usize;
        running.run_until("all answer", |world| world.published.borrow().len() >= first);
        running.world.hanging.borrow_mut().extend((0..hanging).map(name));
        running.latency_ms(90); // it answered last
        for number in 0..hanging {
            running.commit(number, 50);
        }
        let waits_ms: Vec<u64> = (0..200).map(|_| running.latency_ms(90)).collect();
        let mut sorted_ms = waits_ms.clone();
        sorted_ms.sort_unstable();
        assert!(
            sorted_ms[199] <= 20_000 && sorted_ms[195] <= 100,
            "{hanging}: {waits_ms:?} ms"
        );
        assert_memory_is_bounded(&running);
        // They answer again, and nothing is lost.
        running.world.hanging.borrow_mut().clear();
        let all = running.world.sequence.get() as usize;
        running.run_until("all arrive", |world| world.published.borrow().len() >= all);
    }
}

#[test]
fn receivers_that_work_share_the_memory() {
    let mut running = Running::with_messages_of(LARGE, 60, 0);
    for number in 0..60 {
        running.commit(number, 64);
    }
    let all = running.world.sequence.get();
    running.run_until("all arrive", |world| world.published.borrow().len() as i64 >= all);
    assert_memory_is_bounded(&running);
}
