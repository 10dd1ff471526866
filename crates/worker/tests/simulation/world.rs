//! Everything that the workers share: tables, memory, sessions, publishers, the clock and the random numbers.

use super::config::{Config, DESTINATIONS, POSTED_RATE};
use super::memory::Memory;
use super::oracle::{End, Fate, Oracle};
use super::publisher::Broker;
use super::sessions::{Effects, Prepared, Session};
use super::tables::{Claim, Row, Tables};
use outbox_core::engine::{CRASHES_MAX, ClaimLimits, Claimed, HeldLease, Request, RowId};
use outbox_core::message::{Event, Outcome, Pointer};
use outbox_core::partition::Partition;
use outbox_core::settle::{Action, Blocks, Ending, Ordering};
use outbox_transport::kind::Kind;
use outbox_worker::{Described, Mapping};
use std::collections::{BTreeMap, BTreeSet};
use support::chaos::Dice;

pub struct World {
    pub config: Config,
    pub dice: Dice,
    pub now_ms: u64,
    /// The time that the machine slept, which its timers do not count.
    pub slept_ms: u64,
    /// No faults, no new transactions: everything must end.
    pub calm: bool,
    pub tables: Tables,
    pub memory: Memory,
    pub oracle: Oracle,
    pub sessions: Vec<Session>,
    pub prepared: Prepared,
    /// Transactions that are about to be prepared.
    pub preparing: BTreeSet<u64>,
    pub effects: Effects,
    pub workers: Vec<Here>,
    pub sequence: i64,
    /// The number of commits: the end of WAL.
    pub wal: u64,
    /// How much of it the standby has.
    pub standby_wal: u64,
    pub transactions: u64,
    /// A worker's transaction holds the rows of the leases.
    pub leases_locked: bool,
    pub steps: u64,
    /// Delivery is switched on.
    pub enabled: bool,
    /// The request of a session.
    pub request: Option<(u32, Request)>,
    pub request_ids: u32,
    /// The destinations that are paused.
    pub paused: BTreeSet<usize>,
    /// Grows with each change by hand.
    pub changes: u32,
    /// Grows when a worker comes or goes, or wakes the others.
    pub worker_changes: u64,
}

/// The state of one worker besides its process.
pub struct Here {
    pub brokers: Vec<Broker>,
    /// Until when its publishers may publish; None = without limit.
    pub deadline_ms: Option<u64>,
    /// The result of its last reading of the leases.
    pub held: BTreeMap<u16, i64>,
    /// The epoch under which it last took each message.
    pub taken: BTreeMap<i64, i64>,
    /// It was woken since its last pass.
    pub is_woken: bool,
}

impl World {
    pub fn new(config: &Config, seed: u64) -> Self {
        let here = || Here {
            brokers: (0..config.destinations).map(Broker::new).collect(),
            deadline_ms: None,
            held: BTreeMap::new(),
            taken: BTreeMap::new(),
            is_woken: true,
        };
        Self {
            config: config.clone(),
            dice: Dice::new(seed),
            now_ms: 1,
            slept_ms: 0,
            calm: false,
            tables: Tables::new(config.partitions),
            memory: Memory::new(config.partitions, config.flaw),
            oracle: Oracle::new(config.workers, config.ordering == Ordering::Partition),
            sessions: (0..config.sessions).map(|_| Session::new()).collect(),
            prepared: Prepared::new(),
            preparing: BTreeSet::new(),
            effects: Effects::new(),
            workers: (0..config.workers).map(|_| here()).collect(),
            sequence: 0,
            wal: 0,
            standby_wal: 0,
            transactions: 0,
            leases_locked: false,
            steps: 0,
            enabled: true,
            request: None,
            request_ids: 0,
            paused: BTreeSet::new(),
            changes: 0,
            worker_changes: 0,
        }
    }

    /// The standby receives WAL, if there is one.
    pub fn step_of_standby(&mut self) {
        match self.config.standby {
            Some(_) if self.calm => self.standby_wal = self.wal,
            Some(often) if self.dice.chance(often) => self.standby_wal = self.dice.between(self.standby_wal, self.wal),
            _ => {}
        }
    }

    pub fn store_fails(&mut self) -> bool {
        !self.calm && self.dice.chance(self.config.store_errors)
    }

    /// Shared memory cannot be read: a worker outside reads it through its session.
    pub fn memory_fails(&mut self) -> bool {
        !self.calm && self.dice.chance(self.config.memory_errors)
    }

    /// The server crashes: memory is lost, and open transactions with it; the tables and prepared transactions stay.
    pub fn crash(&mut self) {
        self.sessions.iter_mut().for_each(Session::crash);
        self.preparing.clear();
        self.effects.clear();
        self.request = None;
        self.memory = Memory::new(self.config.partitions, self.config.flaw);
        self.forget_prepared_order();
    }

    pub fn is_in_progress(&self, xid: u64) -> bool {
        self.prepared.contains_key(&xid) || self.preparing.contains(&xid)
    }

    /// Leaves what the limits allow, in order of seq. Returns whether there is more.
    pub fn cut(&mut self, seen: &mut Vec<Claim>, limits: ClaimLimits) -> bool {
        seen.sort_unstable_by_key(|(seq, _, _)| *seq);
        let fit = self.fit(seen.iter().map(|(seq, _, _)| *seq), limits.bytes);
        let fit = fit.min(limits.rows as usize);
        let cut = fit < seen.len();
        seen.truncate(fit);
        cut
    }

    /// The number of events that fit into a claim; now and then fewer, as if they took too long.
    pub fn fit(&mut self, seqs: impl Iterator<Item = i64>, bytes: usize) -> usize {
        let (mut fit, mut taken) = (0, 0);
        for seq in seqs {
            if fit > 0 && (taken >= bytes || self.dice.chance(50)) {
                break;
            }
            taken += payload(seq).len();
            fit += 1;
        }
        fit
    }

    /// As the catalogs describe the destinations.
    pub fn described(&self) -> Vec<Described> {
        let all = DESTINATIONS.iter().take(self.config.destinations).enumerate();
        all.map(|(destination, name)| {
            let (wrapper, options) = match destination {
                0 => ("outbox_amqp", vec![]),
                1 => ("outbox_amqp", vec![("url", "amqp://slow/".to_owned())]),
                _ => {
                    let rate = ("max_rate", POSTED_RATE.to_string());
                    ("outbox_http", vec![("url", "http://posted/".to_owned()), rate])
                }
            };
            Described {
                name: (*name).to_owned(),
                kind: Kind::of_wrapper(wrapper),
                options: options
                    .into_iter()
                    .map(|(name, value)| (name.to_owned(), value))
                    .collect(),
                mapping: Mapping::Absent,
                not_adopted: None,
                paused: self.paused.contains(&destination),
            }
        })
        .collect()
    }

    pub fn wake_all(&mut self) {
        self.workers.iter_mut().for_each(|worker| worker.is_woken = true);
    }

    /// A worker ends, however it does.
    pub fn end_worker(&mut self, worker: usize) {
        self.memory.end_worker(worker, self.config.flaw);
        self.workers[worker].is_woken = true;
        self.worker_changes += 1;
        self.wake_all();
    }

    /// The messages of its publishers are lost, or their answers are.
    pub fn end_publishers(&mut self, worker: usize) {
        let World {
            workers, dice, oracle, ..
        } = self;
        oracle.touch_all(worker);
        for broker in &mut workers[worker].brokers {
            broker.end(dice, oracle);
        }
    }

    pub fn step_of_brokers(&mut self, worker: usize) {
        let World {
            workers,
            config,
            tables,
            dice,
            oracle,
            now_ms,
            calm,
            ..
        } = self;
        let Here {
            brokers,
            deadline_ms,
            is_woken,
            ..
        } = &mut workers[worker];
        let me = name(worker);
        let mut on_the_wire = |oracle: &mut Oracle, seq: i64, epoch: i64| {
            let partition = oracle.messages[&seq].partition;
            if !tables.is_live(&me, partition, epoch, *now_ms) {
                oracle.complain(format!("{me} sent {seq} under {epoch}, after its lease"));
            }
        };
        for broker in brokers {
            broker.step(config, *calm, *now_ms, *deadline_ms, dice, oracle, &mut on_the_wire);
            *is_woken |= broker.rings();
        }
    }
}

/// The content of the slot of a message that no worker has claimed.
pub fn as_claimed(world: &World, seq: i64) -> Claimed {
    let message = &world.oracle.messages[&seq];
    let row = (seq, message.partition, Row::new(message.destination, message.key));
    claimed(&row, 0, &world.oracle)
}

/// Most are small, and some take a good part of the memory of a worker that has little.
fn payload(seq: i64) -> String {
    match seq % 40 {
        0 => format!("\"{}\"", "x".repeat(4_000)),
        _ => "{}".into(),
    }
}

pub fn claimed((seq, partition, row): &Claim, epoch: i64, oracle: &Oracle) -> Claimed {
    let event = Event {
        id: seq.to_string(),
        seq: *seq,
        kind: "t".into(),
        payload: payload(*seq),
        created_at: "2026-01-01T00:00:00Z".into(),
        ..Event::default()
    };
    Claimed {
        row_id: RowId::default(),
        pointer: Pointer {
            seq: *seq,
            destination: DESTINATIONS[row.destination].into(),
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
        event: match oracle.messages[seq].fate {
            Fate::Unsendable => Err(Outcome::Unsendable {
                reason: "too large".into(),
            }),
            _ => Ok(event),
        },
    }
}

pub fn name(worker: usize) -> String {
    format!("server-{}", worker + 1)
}

pub fn key_name(key: u32) -> String {
    format!("k{key}")
}

pub fn key_number(name: &str) -> u32 {
    name[1..].parse().expect("a key's name is k and a number")
}

pub fn destination_number(name: &str) -> usize {
    let found = DESTINATIONS.iter().position(|known| *known == name);
    found.expect("one of the destinations")
}

pub fn partition_of(index: u16) -> Partition {
    Partition::new(i64::from(index)).expect("below the count")
}

pub fn plain(leases: &[HeldLease]) -> Vec<(u16, i64)> {
    leases
        .iter()
        .map(|(partition, epoch)| (partition.index(), *epoch))
        .collect()
}

/// It may be dead at any time, and then blocks nothing.
pub fn note_expiring(world: &mut World, seq: i64) {
    if let Fate::Expires { .. } = world.oracle.messages[&seq].fate {
        world.oracle.out_of_order(seq);
    }
}

/// A message that was claimed, or taken from a slot, and ends at once blocks nothing.
pub fn note_taken(world: &mut World, worker: usize, seq: i64, epoch: i64, crashes: i32) {
    let given_up = crashes >= CRASHES_MAX || world.oracle.messages[&seq].fate == Fate::Unsendable;
    if given_up && !world.config.dead_blocks {
        world.oracle.out_of_order(seq); // dead as soon as it may be sent
    }
    note_expiring(world, seq);
    world.workers[worker].taken.insert(seq, epoch);
}

pub fn settle_one(world: &mut World, me: &str, at: (u16, i64), epoch: i64, ending: &Ending) {
    let lease = &world.tables.leases[usize::from(at.0)];
    if lease.owner.as_deref() != Some(me) || lease.epoch != epoch {
        world
            .oracle
            .complain(format!("{me} settled {} under {epoch}, which it lost", at.1));
    }
    match ending.action {
        Action::Publish => world.oracle.published(at.1, epoch),
        Action::Dead(closes) => {
            let blocks = world.config.dead_blocks;
            if blocks != (closes != Blocks::Nothing) {
                world.oracle.complain(format!("{} is dead and closes {closes:?}", at.1));
            }
            if !blocks && world.oracle.messages[&at.1].order.is_some() {
                world.oracle.out_of_order(at.1);
            }
        }
        Action::Expire => {
            if matches!(world.oracle.messages[&at.1].fate, Fate::Expires { at_ms } if at_ms > world.now_ms) {
                world.oracle.complain(format!("{} ended too early", at.1));
            }
        }
        Action::Discard => {
            if world.oracle.messages[&at.1].fate != Fate::Unroutable && world.config.nacked == 0 {
                world.oracle.complain(format!("{} had a listener", at.1));
            }
            world.oracle.out_of_order(at.1);
            world.oracle.ended(at.1, End::Discarded);
        }
        Action::Retry | Action::Wait | Action::Free => {}
    }
    let is_charged = match ending.action {
        Action::Retry => ending.delay_ms >= Some(0),
        Action::Dead(_) => true,
        _ => false,
    };
    if is_charged {
        match world.oracle.messages[&at.1].fate {
            Fate::EndsConnection => world.oracle.charged += 1,
            Fate::Routed if world.config.nacked == 0 && world.config.faults == 0 => {
                world
                    .oracle
                    .complain(format!("{} is charged: {:?}", at.1, ending.reason));
            }
            _ => {}
        }
    }
    world.tables.settle(at, ending, world.now_ms);
}

/// The rest of the tables when all messages that can have ended: a complaint about the first that has not.
pub fn unfinished(world: &World) -> Option<String> {
    let blocking = |seq: i64| {
        let order = world.oracle.messages[&seq].order;
        let of = |seq: &i64| world.oracle.messages[seq].order;
        (world.tables.dead.iter()).any(|(dead, row)| row.blocks && of(dead) == order && order.is_some())
    };
    // Behind a dead letter of its partition it stays in its table.
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
