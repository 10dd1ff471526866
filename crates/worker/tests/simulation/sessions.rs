//! The sessions that enqueue, and the person who retries and discards: each step is one access that others can see.

use super::config::{Config, Flaw};
use super::fast_path::State;
use super::oracle::{End, Fate};
use super::tables::{Row, Waiting, Why};
use super::world::{World, key_name, partition_of};
use outbox_core::engine::SlotId;
use outbox_core::open_transactions::lane_crc;
use outbox_core::partition::crc32;
use outbox_core::settle::Ordering;
use std::collections::{BTreeMap, VecDeque};

#[derive(Clone)]
pub struct Enqueued {
    seq: i64,
    key: Option<u32>,
    partition: u16,
    destination: usize,
    due_ms: Option<u64>,
    by_fast_path: bool,
    slot_id: Option<SlotId>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum At {
    Idle,
    /// Its entry contains the key, and the low bound 0.
    Drawing {
        key: Option<u32>,
    },
    /// Has a seq.
    Drew {
        key: Option<u32>,
        seq: i64,
    },
    /// Drew without an announcement.
    DrewUnannounced {
        key: Option<u32>,
        seq: i64,
    },
    /// Its entry contains the partition as well.
    Placed,
    /// Enqueued; may continue or end.
    Open,
    /// Its entry is copied to one for prepared transactions.
    Copied {
        xid: u64,
    },
    /// Any session may end it; its own has not left yet.
    Prepared,
    /// Out of the list of open transactions: empties its slots.
    Aborted,
    /// About to fill a slot, for the worker that reads its lane.
    Copying(usize, Option<usize>),
    Committing,
    /// Committed and visible. About to make a message ready ..
    Handing(usize),
    /// .. to check again who reads its lane ..
    Rechecking(usize),
    /// .. to publish a rewind, if no worker is to take it.
    Rewinding(usize),
    Visible,
    Rewinds,
}

pub struct Session {
    at: At,
    /// Seqs that are being drawn, as far as it knows.
    drawing: u32,
    /// The lowest seq that is known.
    low: i64,
    /// Not published yet, by mistake.
    lane: Option<u32>,
    /// Rarely ends.
    long: bool,
    /// It takes no step until this number of steps are done.
    stalled_until: u64,
    messages: Vec<Enqueued>,
    wanted: u64,
    /// By partition and destination.
    rewinds: BTreeMap<(u16, usize), i64>,
    scheduled: bool,
}

impl Session {
    pub fn new() -> Self {
        Self {
            at: At::Idle,
            drawing: 0,
            low: i64::MAX,
            lane: None,
            long: false,
            stalled_until: 0,
            messages: Vec::new(),
            wanted: 0,
            rewinds: BTreeMap::new(),
            scheduled: false,
        }
    }

    pub fn is_idle(&self) -> bool {
        self.at == At::Idle
    }

    /// The server crashed: unless its commit was done, nothing of it remains.
    pub fn crash(&mut self) {
        *self = Self::new();
    }
}

/// Prepared transactions that wait for their end, by number.
pub type Prepared = BTreeMap<u64, Vec<Enqueued>>;

impl World {
    /// One step of one session.
    pub fn session_step(&mut self, number: usize) {
        if !self.calm && (self.sessions[number].stalled_until > self.steps) {
            return;
        }
        let mut session = std::mem::replace(&mut self.sessions[number], Session::new());
        self.step_of(&mut session, number);
        if self.dice.chance(200) {
            session.stalled_until = self.steps + self.dice.between(1, 300);
        }
        self.sessions[number] = session;
    }

    fn step_of(&mut self, session: &mut Session, number: usize) {
        let config = self.config.clone();
        match session.at {
            At::Idle if self.calm => {}
            At::Idle => {
                session.wanted = self.dice.between(1, config.messages);
                session.long = self.dice.chance(500);
                self.begin_message(session, number, &config);
            }
            // The statement fails, and its savepoint is rolled back: it counts as drawing to the end.
            At::Drawing { .. } if self.dice.chance(100) => session.at = At::Open,
            At::Drawing { key } => {
                let seq = self.draw(key);
                session.at = At::Drew { key, seq };
            }
            At::DrewUnannounced { key, seq } => {
                self.announce_drawing(session, number, key);
                session.at = At::Drew { key, seq };
            }
            At::Drew { key, seq } if config.ordering == Ordering::Key => {
                session.drawing -= 1;
                session.low = session.low.min(seq);
                let low = if session.drawing > 0 { 0 } else { session.low };
                self.memory.register(number, low, crc_of(key));
                self.enqueue(session, key, seq);
                session.at = At::Open;
            }
            At::Drew { key, seq } => {
                session.low = session.low.min(seq);
                let lane = lane_crc(partition_of(self.oracle.messages[&seq].partition));
                if config.flaw == Some(Flaw::RecordsLaneLate) {
                    self.memory.register(number, session.low, None);
                    session.lane = Some(lane);
                } else {
                    self.memory.register(number, 0, Some(lane));
                }
                self.enqueue(session, key, seq);
                session.at = At::Placed;
            }
            At::Placed => {
                session.drawing -= 1;
                let low = if session.drawing > 0 { 0 } else { session.low };
                let late = session.lane.take();
                self.memory.register(number, low, late);
                session.at = At::Open;
            }
            At::Open => self.go_on_or_end(session, number, &config),
            At::Copied { xid } => {
                self.preparing.remove(&xid);
                session.at = At::Aborted;
                if !self.dice.chance(500) {
                    self.prepared.insert(xid, std::mem::take(&mut session.messages));
                    session.at = At::Prepared;
                }
            }
            At::Prepared => {
                self.memory.leave(number);
                *session = Session::new();
            }
            At::Aborted => {
                self.memory.leave(number);
                let mut left = session.messages.iter_mut();
                match left.find_map(|message| message.slot_id.take()) {
                    Some(slot_id) => self.memory.slots.free(slot_id),
                    None => *session = Session::new(),
                }
            }
            At::Copying(..) | At::Handing(_) | At::Rechecking(_) | At::Rewinding(_) => self.step_by_fast_path(session),
            At::Committing if !self.calm && self.dice.chance(300) => session.at = At::Aborted,
            At::Committing => {
                self.commit(&session.messages);
                session.at = At::Handing(0);
                if config.flaw == Some(Flaw::LeavesBeforeRewind) {
                    self.memory.leave(number);
                }
            }
            At::Visible => {
                let Some(((partition, destination), low)) = session.rewinds.pop_first() else {
                    session.at = At::Rewinds;
                    return;
                };
                self.memory.rewind(partition, destination, low);
            }
            At::Rewinds => {
                if session.scheduled {
                    self.memory.schedules += 1;
                }
                self.memory.leave(number);
                self.wake_all();
                *session = Session::new();
            }
        }
    }

    fn begin_message(&mut self, session: &mut Session, number: usize, config: &Config) {
        // Few keys are busy, many are not.
        let busy = if self.dice.chance(5_000) { 1 } else { config.keys };
        let key = self.dice.chance(9_000).then(|| self.dice.below(busy) as u32);
        session.at = match config.flaw {
            Some(Flaw::DrawsBeforeAnnouncing) => At::DrewUnannounced {
                key,
                seq: self.draw(key),
            },
            _ => {
                self.announce_drawing(session, number, key);
                At::Drawing { key }
            }
        };
    }

    fn announce_drawing(&mut self, session: &mut Session, number: usize, key: Option<u32>) {
        session.drawing += 1;
        self.memory.register(number, 0, crc_of(key));
    }

    fn draw(&mut self, key: Option<u32>) -> i64 {
        self.sequence += 1;
        let seq = self.sequence;
        let partitions = u32::from(self.config.partitions);
        let partition = match key {
            Some(key) => crc32(&key_name(key)) % partitions,
            None => seq as u32 % partitions,
        };
        let fate = match self.dice.chance(self.config.poisoned) {
            true if self.dice.chance(3_000) => Fate::Unsendable,
            true => Fate::Unroutable,
            false if self.config.ends_connection > 0 && self.dice.chance(self.config.ends_connection) => {
                Fate::EndsConnection
            }
            false if self.config.expiring > 0 && self.dice.chance(self.config.expiring) => Fate::Expires {
                at_ms: self.now_ms + self.dice.between(1, 2_000),
            },
            false => Fate::Routed,
        };
        let destination = self.dice.below(self.config.destinations);
        self.oracle.drawn(seq, key, partition as u16, destination, fate);
        seq
    }

    fn enqueue(&mut self, session: &mut Session, key: Option<u32>, seq: i64) {
        let (partition, destination) = {
            let message = &self.oracle.messages[&seq];
            (message.partition, message.destination)
        };
        let due_ms = self.dice.chance(300).then(|| self.now_ms + self.dice.between(1, 800));
        let by_fast_path = due_ms.is_none() && self.dice.chance(self.config.fast_path);
        session.messages.push(Enqueued {
            seq,
            key,
            partition,
            destination,
            due_ms,
            by_fast_path,
            slot_id: None,
        });
        if due_ms.is_some() {
            self.oracle.out_of_order(seq);
            session.scheduled = true;
        } else if !by_fast_path {
            let low = session.rewinds.entry((partition, destination)).or_insert(seq);
            *low = seq.min(*low);
        }
    }

    fn go_on_or_end(&mut self, session: &mut Session, number: usize, config: &Config) {
        if (session.messages.len() as u64) < session.wanted && !self.calm {
            return self.begin_message(session, number, config);
        }
        let ends = if session.long { config.ends / 50 } else { config.ends };
        if !self.calm && !self.dice.chance(ends.max(1)) {
            return;
        }
        match self.dice.below(100) {
            0..7 => {
                session.at = At::Aborted;
                return;
            }
            7..15 => {
                self.transactions += 1;
                let xid = self.transactions;
                self.memory.prepare(number, xid);
                self.preparing.insert(xid);
                session.at = At::Copied { xid };
                return;
            }
            15..20 => {
                // A savepoint is rolled back; its announcements stay.
                let keep = self.dice.below(session.messages.len() + 1);
                session.messages.truncate(keep);
            }
            _ => {}
        }
        session.at = At::Copying(0, None);
    }

    /// A step of a transaction that fills a slot, or marks it ready.
    fn step_by_fast_path(&mut self, session: &mut Session) {
        let slots = &mut self.memory.slots;
        session.at = match session.at {
            At::Copying(index, reader) => match (session.messages.get_mut(index), reader) {
                (None, _) => At::Committing,
                (Some(message), Some(reader)) => {
                    let at = (message.partition, message.seq);
                    message.slot_id = slots.copy_to_slot(reader, at, message.destination);
                    At::Copying(index + 1, None)
                }
                (Some(message), None) => match self.memory.reader(message.partition).filter(|_| message.by_fast_path) {
                    Some(reader) => At::Copying(index, Some(reader)),
                    None => At::Copying(index + 1, None),
                },
            },
            At::Handing(index) => match session.messages.get_mut(index) {
                None => At::Visible,
                Some(message) if !message.by_fast_path => At::Handing(index + 1),
                Some(Enqueued { slot_id: None, .. }) => At::Rewinding(index),
                Some(Enqueued {
                    slot_id: Some(slot_id), ..
                }) => {
                    let tenant = slots.get(*slot_id).map_or(0, |slot| slot.tenant);
                    match slots.transition(*slot_id, tenant, State::Filled, State::Ready) {
                        true => At::Rechecking(index),
                        false => {
                            slots.free(*slot_id); // revoked
                            At::Rewinding(index)
                        }
                    }
                }
            },
            At::Rechecking(index) => {
                let (partition, slot_id) = (session.messages[index].partition, session.messages[index].slot_id);
                let reader = self.memory.reader(partition);
                let slots = &mut self.memory.slots;
                let slot = slot_id.and_then(|slot_id| slots.get(slot_id));
                let ready = slot.filter(|slot| slot.state == State::Ready && slot.seq == session.messages[index].seq);
                match ready.filter(|slot| reader != Some(slot.owner)) {
                    Some(_) => {
                        slot_id.into_iter().for_each(|slot_id| slots.free(slot_id));
                        At::Rewinding(index)
                    }
                    None => At::Handing(index + 1),
                }
            }
            At::Rewinding(index) => {
                let message = &session.messages[index];
                self.memory.rewind(message.partition, message.destination, message.seq);
                At::Handing(index + 1)
            }
            other => other,
        };
    }

    fn commit(&mut self, messages: &[Enqueued]) {
        self.wal += 1;
        for message in messages {
            match message.due_ms {
                None => {
                    self.tables.insert_ready(
                        message.partition,
                        message.seq,
                        Row::new(message.destination, message.key),
                    );
                }
                Some(due_ms) => {
                    let waiting = Waiting {
                        partition: message.partition,
                        destination: message.destination,
                        key: message.key,
                        due_ms,
                        why: Why::Scheduled,
                        attempts: 0,
                        crashes: 0,
                        version: 0,
                    };
                    self.tables.insert_waiting(message.seq, waiting);
                }
            }
            self.oracle.committed(message.seq, self.wal);
        }
    }

    /// COMMIT PREPARED or ROLLBACK PREPARED. Notifies no worker.
    pub fn end_prepared(&mut self) {
        let chosen = self.dice.below(self.prepared.len());
        let Some(number) = self.prepared.keys().nth(chosen).copied() else {
            return;
        };
        let messages = self.prepared.remove(&number).unwrap_or_default();
        if self.dice.chance(8_500) {
            self.commit(&messages);
        }
    }

    /// What is unknown after a crash of the server: the keys of prepared transactions.
    pub fn forget_prepared_order(&mut self) {
        let seqs: Vec<i64> = self.prepared.values().flatten().map(|message| message.seq).collect();
        for seq in seqs {
            self.oracle.out_of_order(seq);
        }
    }
}

fn crc_of(key: Option<u32>) -> Option<u32> {
    key.map(|key| crc32(&key_name(key)))
}

// ---- a person -------------------------------------------------------------------------------------------------------

#[derive(Clone, Copy)]
pub enum Effect {
    Rewind(u16, usize, i64),
    Unblocked(u16, i64),
}

/// What the person's commit has not published yet.
pub type Effects = VecDeque<Effect>;

impl World {
    pub fn person_step(&mut self) {
        let effect = self.effects.pop_front();
        if effect.is_some() {
            self.wake_all();
        }
        match effect {
            Some(Effect::Rewind(partition, destination, seq)) => {
                return self.memory.rewind(partition, destination, seq);
            }
            Some(Effect::Unblocked(partition, seq)) => {
                self.memory.schedules += 1;
                return self.memory.unblock(partition, seq);
            }
            None => {}
        }
        if self.calm || !self.dice.chance(1_000) {
            return;
        }
        let nth = |n: usize| move |keys: Vec<i64>| keys.get(n % keys.len().max(1)).copied();
        let pick = nth(self.dice.below(1_000_000));
        let seq = match self.dice.below(6) {
            4.. => {
                let lane = self.dice.below(self.tables.outbox.len());
                let seq = pick(self.tables.outbox[lane].keys().take(50).copied().collect());
                return self.tables.touch(lane, seq);
            }
            0 | 1 => pick(self.tables.dead.keys().copied().collect()),
            2 => pick(self.tables.waiting.keys().copied().collect()),
            _ => {
                let lane = self.dice.below(self.tables.outbox.len());
                pick(self.tables.outbox[lane].keys().take(50).copied().collect())
            }
        };
        if let Some(seq) = seq {
            match self.dice.chance(6_000) {
                true => self.retry(seq),
                false => self.discard(seq),
            }
        }
    }

    pub fn retry(&mut self, seq: i64) {
        self.oracle.note(seq, || "retried by a person".into());
        let destination = self.oracle.messages[&seq].destination;
        if let Some(rewinds) = self.tables.retry(seq, self.now_ms) {
            if self.dice.chance(7_000)
                && let Some(message) = self.oracle.messages.get_mut(&seq)
            {
                message.fate = Fate::Routed; // repaired
            }
            self.effects
                .extend(rewinds.map(|partition| Effect::Rewind(partition, destination, seq)));
            self.effects
                .push_back(Effect::Unblocked(self.oracle.messages[&seq].partition, seq));
        }
    }

    pub fn discard(&mut self, seq: i64) {
        let partition = self.oracle.messages[&seq].partition;
        if self.memory.is_free_to_end((partition, seq)) && self.tables.discard(seq, self.now_ms) {
            self.oracle.ended(seq, End::Discarded);
            self.effects.push_back(Effect::Unblocked(partition, seq));
        }
    }
}
