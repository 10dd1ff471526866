//! The publisher of one worker and the broker behind it: takes publications in order, answers them in any order.

use super::config::{Config, Flaw};
use super::oracle::{Fate, Message, Oracle};
use super::run::Shared;
use super::world::{Here, World, name};
use outbox_core::finding::Finding;
use outbox_core::message::{Outcome, Publication};
use outbox_transport::{Answered, ConnectionState, DownReason, Fault, PublisherEvent};
use std::collections::VecDeque;
use std::rc::Weak;
use std::time::Duration;
use support::chaos::Dice;

struct Sent {
    handle: u64,
    seq: i64,
    epoch: i64,
    /// When it was handed over.
    at: u64,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Connection {
    /// No publisher runs.
    None,
    Up,
    Down {
        until_ms: u64,
    },
    Blocked {
        until_ms: u64,
    },
}

enum Changes {
    State(ConnectionState),
    Outcome(Sent, Outcome),
    /// Whether it was requested.
    Ended(bool),
}

pub struct Broker {
    destination: usize,
    connection: Connection,
    /// Handed over, not with the broker yet.
    queue: VecDeque<Sent>,
    /// The broker has an answer for these.
    answers: Vec<(Sent, Outcome)>,
    /// Not drained yet.
    news: Vec<Changes>,
    /// This number of confirms wakes the worker.
    wake_after: usize,
    /// The worker requested the end of the publisher.
    is_to_end: bool,
    /// It takes messages and does nothing with them until then.
    hangs_until_ms: u64,
}

impl Broker {
    pub fn new(destination: usize) -> Self {
        Self {
            destination,
            connection: Connection::None,
            queue: VecDeque::new(),
            answers: Vec::new(),
            news: Vec::new(),
            wake_after: 1,
            is_to_end: false,
            hangs_until_ms: 0,
        }
    }

    pub fn is_idle(&self) -> bool {
        let has_outcome = self.news.iter().any(|news| matches!(news, Changes::Outcome(..)));
        self.queue.is_empty() && self.answers.is_empty() && !has_outcome
    }

    /// Whether there is a reason to wake the worker.
    pub fn rings(&self) -> bool {
        let is_confirm = |news: &&Changes| matches!(news, Changes::Outcome(_, Outcome::Confirmed));
        let confirms = self.news.iter().filter(is_confirm).count();
        confirms < self.news.len() || confirms >= self.wake_after
    }

    fn start(&mut self) {
        self.connection = Connection::Down { until_ms: 0 };
        (self.wake_after, self.is_to_end) = (1, false);
        self.news.push(Changes::State(ConnectionState::Connecting));
    }

    fn come_up(&mut self) {
        self.connection = Connection::Up;
        self.news.push(Changes::State(ConnectionState::Connected));
    }

    fn give_up(&mut self, sent: Sent, outcome: Outcome, oracle: &mut Oracle) {
        oracle.touch(sent.seq);
        self.news.push(Changes::Outcome(sent, outcome));
    }

    fn accept(&mut self, sent: Sent, oracle: &mut Oracle) {
        match self.connection {
            Connection::Up => self.queue.push_back(sent),
            Connection::Blocked { .. } => self.give_up(sent, Outcome::Blocked, oracle),
            Connection::Down { .. } | Connection::None => self.give_up(sent, lost("no connection"), oracle),
        }
    }

    #[expect(clippy::too_many_arguments, reason = "parts of the world, borrowed one by one")]
    pub fn step(
        &mut self,
        config: &Config,
        calm: bool,
        now_ms: u64,
        deadline_ms: Option<u64>,
        dice: &mut Dice,
        oracle: &mut Oracle,
        on_the_wire: &mut impl FnMut(&mut Oracle, i64, i64),
    ) {
        if self.is_to_end && (calm || dice.chance(2_000)) {
            if config.flaw != Some(Flaw::StopsNothing) {
                self.stop(dice, oracle);
            }
            self.is_to_end = false;
            self.news.push(Changes::Ended(true));
            return;
        }
        match self.connection {
            Connection::Down { until_ms } | Connection::Blocked { until_ms } if until_ms <= now_ms || calm => {
                self.come_up();
            }
            _ => {}
        }
        if now_ms < self.hangs_until_ms && !calm {
            return;
        }
        let is_slow = self.destination == 1 && !calm;
        for _ in 0..dice.below(if is_slow { 2 } else { 8 }) {
            let Some(sent) = self.queue.pop_front() else { break };
            if deadline_ms.is_some_and(|deadline_ms| now_ms >= deadline_ms) && config.flaw != Some(Flaw::NoDeadline) {
                self.queue.push_front(sent);
                for (sent, _) in std::mem::take(&mut self.answers) {
                    self.give_up(sent, unanswered(false), oracle); // the worker itself ends the connection
                }
                self.lose(now_ms + 20, dice, oracle, false);
                break;
            }
            on_the_wire(oracle, sent.seq, sent.epoch);
            let ends_connection = |message: &Message| message.fate == Fate::EndsConnection && !calm;
            if oracle.messages.get(&sent.seq).is_some_and(ends_connection) {
                self.answers.push((sent, Outcome::Confirmed)); // never said
                self.lose(now_ms + dice.between(1, 50), dice, oracle, false);
                break;
            }
            self.publish(sent, config, calm, dice, oracle);
        }
        for _ in 0..dice.below(if is_slow { 2 } else { 8 }) {
            if self.answers.is_empty() {
                break;
            }
            let (sent, outcome) = self.answers.swap_remove(dice.below(self.answers.len()));
            self.say(sent, outcome, oracle);
        }
        if config.hangs > 0 && dice.chance(config.hangs) {
            self.hangs_until_ms = now_ms + dice.between(1, 8_000);
        }
        if !calm && self.connection == Connection::Up && dice.chance(config.faults / 4) {
            self.block(now_ms + dice.between(1, 500), oracle);
        }
    }

    fn say(&mut self, sent: Sent, outcome: Outcome, oracle: &mut Oracle) {
        if outcome == Outcome::Confirmed {
            oracle.confirmed(sent.seq, sent.epoch);
        }
        oracle.note(sent.seq, || format!("{outcome:?}"));
        self.news.push(Changes::Outcome(sent, outcome));
    }

    fn publish(&mut self, sent: Sent, config: &Config, calm: bool, dice: &mut Dice, oracle: &mut Oracle) {
        let fails = !calm && dice.chance(config.nacked);
        let unroutable = (oracle.messages.get(&sent.seq)).is_some_and(|message| message.fate == Fate::Unroutable);
        let outcome = match dice.below(5) {
            _ if unroutable => no_route(),
            _ if !fails => Outcome::Confirmed,
            0 => no_route(),
            1 => unanswered(dice.chance(5_000)),
            2 => Outcome::Refused {
                reason: "not this one".into(),
            },
            3 => Outcome::Postponed {
                reason: "HTTP 429".into(),
                after_ms: dice.between(0, 3_000),
                is_limit: dice.chance(5_000),
            },
            _ => Outcome::Nacked,
        };
        if outcome != Outcome::Confirmed {
            oracle.touch(sent.seq);
        }
        if outcome == Outcome::Confirmed || (matches!(outcome, Outcome::Unanswered { .. }) && dice.chance(5_000)) {
            oracle.delivered(sent.seq, sent.at);
        }
        self.answers.push((sent, outcome));
    }

    fn block(&mut self, until_ms: u64, oracle: &mut Oracle) {
        self.connection = Connection::Blocked { until_ms };
        let reason = "memory".to_owned();
        self.news.push(Changes::State(ConnectionState::Blocked { reason }));
        for sent in std::mem::take(&mut self.queue) {
            self.give_up(sent, Outcome::Blocked, oracle);
        }
    }

    /// The connection breaks. `some_arrive`: some of the messages in flight arrive, without an answer.
    pub fn lose(&mut self, until_ms: u64, dice: &mut Dice, oracle: &mut Oracle, some_arrive: bool) {
        if self.connection == Connection::None {
            return;
        }
        self.connection = Connection::Down { until_ms };
        self.news.push(Changes::State(ConnectionState::Down(Fault {
            reason: DownReason::CLOSED,
            finding: Finding::new("closed", "reset by peer"),
        })));
        let arrive = if some_arrive {
            dice.below(self.queue.len() + 1)
        } else {
            0
        };
        for (index, sent) in std::mem::take(&mut self.queue).into_iter().enumerate() {
            if index < arrive {
                oracle.touch(sent.seq);
                oracle.delivered(sent.seq, sent.at);
            }
            self.give_up(sent, lost("reset by peer"), oracle);
        }
        let alone = self.answers.len() == 1;
        for (sent, _) in std::mem::take(&mut self.answers) {
            self.give_up(sent, unanswered(alone), oracle);
        }
    }

    /// The thread of the publisher ends without further answers.
    pub fn die(&mut self, dice: &mut Dice, oracle: &mut Oracle) {
        if self.connection != Connection::None {
            self.stop(dice, oracle);
            self.news.push(Changes::Ended(false));
        }
    }

    /// The publisher ends, and no answer is received any more.
    pub fn end(&mut self, dice: &mut Dice, oracle: &mut Oracle) {
        self.lose(0, dice, oracle, true);
        *self = Self::new(self.destination);
    }

    /// It publishes no more messages; known answers are delivered.
    fn stop(&mut self, dice: &mut Dice, oracle: &mut Oracle) {
        for _ in 0..dice.below(self.answers.len() + 1) {
            let (sent, outcome) = self.answers.swap_remove(dice.below(self.answers.len()));
            self.say(sent, outcome, oracle);
        }
        for sent in (self.queue.drain(..)).chain(self.answers.drain(..).map(|(sent, _)| sent)) {
            oracle.touch(sent.seq);
        }
        self.connection = Connection::None;
    }
}

fn unanswered(alone: bool) -> Outcome {
    Outcome::Unanswered {
        reason: "reset by peer".into(),
        alone,
    }
}

fn lost(why: &str) -> Outcome {
    Outcome::Lost { reason: why.into() }
}

fn no_route() -> Outcome {
    Outcome::Returned {
        code: 312,
        reason: "NO_ROUTE".into(),
    }
}

// ---- as the worker sees it ------------------------------------------------------------------------------------------

pub struct DestinationPublisher {
    simulation: Weak<Shared>,
    worker: usize,
    destination: usize,
}

impl DestinationPublisher {
    pub fn start(simulation: Weak<Shared>, worker: usize, destination: usize) -> Self {
        let publisher = Self {
            simulation,
            worker,
            destination,
        };
        publisher.with(|world| world.workers[worker].brokers[destination].start());
        publisher
    }

    fn with<T>(&self, body: impl FnOnce(&mut World) -> T) -> T {
        let simulation = self.simulation.upgrade().expect("the simulation outlives it");
        body(&mut simulation.world.borrow_mut())
    }
}

impl outbox_worker::DestinationPublisher for DestinationPublisher {
    fn publish(&self, batch: Vec<Publication>) -> Result<(), Vec<Publication>> {
        let (worker, destination) = (self.worker, self.destination);
        self.with(|world| {
            let has_room = world.workers[worker].brokers[destination].queue.len() < 40;
            if !has_room || (!world.calm && world.dice.chance(500)) {
                return Err(batch);
            }
            for publication in &batch {
                let sent = hand_over(world, worker, destination, publication);
                let World { workers, oracle, .. } = world;
                workers[worker].brokers[destination].accept(sent, oracle);
            }
            Ok(())
        })
    }

    fn has_events(&self) -> bool {
        self.with(|world| !world.workers[self.worker].brokers[self.destination].news.is_empty())
    }

    fn drain(&mut self) -> Vec<PublisherEvent> {
        let (worker, destination) = (self.worker, self.destination);
        let now = self.simulation.upgrade().expect("the simulation outlives it").now();
        self.with(|world| {
            let World { workers, oracle, .. } = world;
            let news = std::mem::take(&mut workers[worker].brokers[destination].news);
            let event = |news| match news {
                Changes::State(state) => PublisherEvent::State(state),
                Changes::Ended(requested) => PublisherEvent::Ended((!requested).then(|| "by chance".to_owned())),
                Changes::Outcome(sent, outcome) => {
                    oracle.on_outcome(worker, sent.seq, sent.epoch, &outcome);
                    PublisherEvent::Outcomes(vec![Answered {
                        handle: sent.handle,
                        outcome,
                        at: now,
                    }])
                }
            };
            news.into_iter().map(event).collect()
        })
    }

    fn wake_after(&self, confirms: usize) {
        self.with(|world| world.workers[self.worker].brokers[self.destination].wake_after = confirms);
    }

    fn request_stop(&self, _: Duration) {
        self.with(|world| world.workers[self.worker].brokers[self.destination].is_to_end = true);
    }

    fn stop(&mut self, _: Duration) {
        let (worker, destination) = (self.worker, self.destination);
        self.with(|world| {
            let flaw = world.config.flaw;
            let World {
                workers, dice, oracle, ..
            } = world;
            let Here { brokers, .. } = &mut workers[worker];
            if flaw != Some(Flaw::StopsNothing) {
                brokers[destination].stop(dice, oracle);
            }
        });
    }

    fn has_new_certificates(&self) -> bool {
        false
    }

    fn has_new_password(&self) -> bool {
        false
    }
}

fn hand_over(world: &mut World, worker: usize, destination: usize, publication: &Publication) -> Sent {
    let seq: i64 = publication.properties.message_id.parse().expect("a seq");
    let epoch = world.workers[worker].taken[&seq];
    let message = &world.oracle.messages[&seq];
    let (partition, fate, of, wal) = (message.partition, message.fate, message.destination, message.wal);
    if of != destination {
        world
            .oracle
            .complain(format!("{seq} went to destination {destination}"));
    }
    if matches!(fate, Fate::Expires { at_ms } if at_ms <= world.now_ms) {
        world.oracle.complain(format!("{seq} had expired and was handed over"));
    }
    if world.config.standby.is_some() && wal > world.standby_wal {
        let said = format!("{seq} was handed over before the standby had its commit");
        world.oracle.complain(said);
    }
    let (me, at) = (name(worker), (partition, seq));
    let fast_in_flight = world.memory.slots.is_fast_in_flight(worker, at);
    let unclaimed = !world.tables.is_claimed(&me, at, epoch, true, false);
    let claimed = world.tables.is_claimed(&me, at, epoch, true, fast_in_flight);
    world.oracle.unclaimed += u64::from(claimed && unclaimed);
    // Of a lease that is lost without its knowledge: the publisher sends none of these.
    let is_lost = !world.tables.is_live(&me, partition, epoch, world.now_ms);
    if !is_lost {
        world.oracle.handed_over(worker, seq, epoch, claimed);
    }
    if destination == 2 {
        world.oracle.posted(world.now_ms);
    }
    Sent {
        handle: publication.handle,
        seq,
        epoch,
        at: world.oracle.now,
    }
}
