//! The publisher of one worker and the broker behind it: takes publications in order, answers them in any.

use super::config::Config;
use super::dice::Dice;
use super::oracle::{Fate, Oracle};
use outbox_core::message::{Outcome, Publication};
use std::collections::VecDeque;

struct Sent {
    handle: u64,
    seq: i64,
    epoch: i64,
    /// When it was handed over.
    at: u64,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Connection {
    Up,
    Down { until_ms: u64 },
    Blocked { until_ms: u64 },
}

pub struct Broker {
    connection: Connection,
    /// Handed over, not with the broker yet.
    queue: VecDeque<Sent>,
    /// The broker knows what to say of these.
    answers: Vec<(Sent, Outcome)>,
    /// Said.
    outcomes: Vec<(Sent, Outcome)>,
}

impl Broker {
    pub fn new() -> Self {
        Self {
            connection: Connection::Up,
            queue: VecDeque::new(),
            answers: Vec::new(),
            outcomes: Vec::new(),
        }
    }

    pub fn is_connected(&self) -> bool {
        self.connection == Connection::Up
    }

    pub fn is_idle(&self) -> bool {
        self.queue.is_empty() && self.answers.is_empty() && self.outcomes.is_empty()
    }

    pub fn has_room(&self) -> bool {
        self.queue.len() < 40
    }

    /// (handle, outcome); the worker knows from now on.
    pub fn take_outcomes(&mut self, worker: usize, oracle: &mut Oracle) -> Vec<(u64, Outcome)> {
        let outcomes = std::mem::take(&mut self.outcomes).into_iter();
        let told = outcomes.map(|(sent, outcome)| {
            oracle.told(worker, sent.seq, sent.epoch, &outcome);
            (sent.handle, outcome)
        });
        told.collect()
    }

    /// One message, in order.
    pub fn accept(&mut self, publication: &Publication, seq: i64, epoch: i64, oracle: &mut Oracle) {
        let sent = Sent {
            handle: publication.handle,
            seq,
            epoch,
            at: oracle.now,
        };
        match self.connection {
            Connection::Up => self.queue.push_back(sent),
            Connection::Down { .. } => self.give_up(sent, lost("no connection"), oracle),
            Connection::Blocked { .. } => self.give_up(sent, Outcome::Blocked, oracle),
        }
    }

    fn give_up(&mut self, sent: Sent, outcome: Outcome, oracle: &mut Oracle) {
        oracle.touch(sent.seq);
        self.outcomes.push((sent, outcome));
    }

    pub fn step(&mut self, config: &Config, calm: bool, now_ms: u64, dice: &mut Dice, oracle: &mut Oracle) {
        match self.connection {
            Connection::Down { until_ms } | Connection::Blocked { until_ms } if until_ms <= now_ms || calm => {
                self.connection = Connection::Up;
            }
            _ => {}
        }
        for _ in 0..dice.below(8) {
            let Some(sent) = self.queue.pop_front() else { break };
            self.publish(sent, config, calm, dice, oracle);
        }
        for _ in 0..dice.below(8) {
            if self.answers.is_empty() {
                break;
            }
            let (sent, outcome) = self.answers.swap_remove(dice.below(self.answers.len()));
            self.say(sent, outcome, oracle);
        }
        if !calm && dice.chance(config.faults / 4) {
            self.block(now_ms + dice.between(1, 500), oracle);
        }
    }

    fn say(&mut self, sent: Sent, outcome: Outcome, oracle: &mut Oracle) {
        if outcome == Outcome::Confirmed {
            oracle.confirmed(sent.seq, sent.epoch);
        }
        oracle.note(sent.seq, || format!("{outcome:?}"));
        self.outcomes.push((sent, outcome));
    }

    fn publish(&mut self, sent: Sent, config: &Config, calm: bool, dice: &mut Dice, oracle: &mut Oracle) {
        let fails = !calm && dice.chance(config.nacked);
        let unroutable = (oracle.messages.get(&sent.seq)).is_some_and(|message| message.fate == Fate::Unroutable);
        let outcome = match dice.below(4) {
            _ if unroutable => no_route(),
            _ if !fails => Outcome::Confirmed,
            0 => no_route(),
            1 => Outcome::TimedOut,
            2 => Outcome::Refused {
                reason: "not this one".into(),
            },
            _ => Outcome::Nacked,
        };
        if outcome != Outcome::Confirmed {
            oracle.touch(sent.seq);
        }
        if outcome == Outcome::Confirmed || (outcome == Outcome::TimedOut && dice.chance(5_000)) {
            oracle.delivered(sent.seq, sent.at);
        }
        self.answers.push((sent, outcome));
    }

    fn block(&mut self, until_ms: u64, oracle: &mut Oracle) {
        self.connection = Connection::Blocked { until_ms };
        for sent in std::mem::take(&mut self.queue) {
            self.give_up(sent, Outcome::Blocked, oracle);
        }
    }

    /// The connection breaks: some of what is on its way arrives, and nobody learns what.
    pub fn lose(&mut self, until_ms: u64, dice: &mut Dice, oracle: &mut Oracle) {
        self.connection = Connection::Down { until_ms };
        let arrive = dice.below(self.queue.len() + 1);
        for (index, sent) in std::mem::take(&mut self.queue).into_iter().enumerate() {
            if index < arrive {
                oracle.touch(sent.seq);
                oracle.delivered(sent.seq, sent.at);
            }
            self.give_up(sent, lost("reset by peer"), oracle);
        }
        for (sent, _) in std::mem::take(&mut self.answers) {
            self.give_up(sent, lost("reset by peer"), oracle);
        }
    }

    /// The publisher ends, and nobody is left to hear.
    pub fn end(&mut self, dice: &mut Dice, oracle: &mut Oracle) {
        self.lose(0, dice, oracle);
        *self = Self::new();
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
