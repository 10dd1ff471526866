//! A randomised test of the order of a key over HTTP. A simulated worker hands over several messages of several keys at
//! a time, drains at random, and sends again what failed. The receiver answers at random.

mod support;

use ::support::chaos::{Dice, seeds};
use outbox_transport::{ConnectionState, HeaderValue, HttpConfig, Outcome, Publication};
use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};
use support::receiver::{Receiver, Reply, message, status, with};
use support::{DEADLINE, Desk};

const KEYS: usize = 6;
const OF_EACH_KEY: usize = 40;

/// The events of a run, in their order.
#[derive(Clone, Copy, Debug)]
enum Entry {
    /// The worker handed over an attempt, or is about to.
    Handed { handle: u64 },
    /// The worker drained the outcome of an attempt.
    Drained { handle: u64 },
    /// An attempt arrived at the receiver.
    Arrived { handle: u64 },
    /// The receiver is about to answer.
    Answered { handle: u64, good: bool },
}

type Log = Arc<Mutex<Vec<Entry>>>;

/// The messages of one key, as the worker sees them.
#[derive(Default)]
struct Key {
    confirmed: usize,
    /// Handed over and without a final outcome: attempts from message `confirmed` on.
    run: VecDeque<(u64, Option<Outcome>)>,
}

impl Key {
    fn has_failed(&self) -> bool {
        let mut known = self.run.iter().filter_map(|(_, outcome)| outcome.as_ref());
        known.any(|outcome| *outcome != Outcome::Confirmed)
    }

    /// Like the worker: no message of the key is sent again before all messages behind a failure are answered.
    fn on_outcome(&mut self) {
        while let Some((_, Some(Outcome::Confirmed))) = self.run.front() {
            self.run.pop_front();
            self.confirmed += 1;
        }
        if self.has_failed() && self.run.iter().all(|(_, outcome)| outcome.is_some()) {
            assert!(
                self.run.iter().all(|(_, outcome)| *outcome != Some(Outcome::Confirmed)),
                "a message behind a failure was sent: {:?}",
                self.run
            );
            self.run.clear();
        }
    }
}

fn receiver(seed: u64, log: &Log) -> Receiver {
    let dice = Mutex::new(Dice::new(seed));
    let log = log.clone();
    Receiver::start(move |request| {
        let handle = request.header("handle").parse().unwrap();
        log.lock().unwrap().push(Entry::Arrived { handle });
        let (answer, pause) = {
            let mut dice = dice.lock().unwrap();
            (dice.below(24), dice.below(4))
        };
        let (_never, comes) = mpsc::channel::<()>();
        let _ = comes.recv_timeout(Duration::from_millis(pause as u64));
        let good = answer > 5;
        log.lock().unwrap().push(Entry::Answered { handle, good });
        match answer {
            0 => status(503),
            1 => with(429, "retry-after: 0\r\n", ""),
            2 => Reply::Close(Vec::new()),
            3 => status(422),
            4 | 5 => status(500),
            6 => Reply::Close(b"HTTP/1.1 200 x\r\n\r\n".to_vec()),
            _ => status(200),
        }
    })
}

fn attempt(handle: u64, key: usize, n: usize) -> Publication {
    let mut attempt = message(handle);
    attempt.key = Some(format!("key {key}"));
    attempt.properties.message_id = format!("{key}-{n}");
    attempt.properties.headers = vec![("handle".into(), HeaderValue::Int(handle as i64))];
    attempt
}

/// Runs a seed to its end. Returns the log, and the key and message of each attempt.
fn play(seed: u64) -> (Vec<Entry>, HashMap<u64, (usize, usize)>) {
    let log = Log::default();
    let receiver = receiver(seed, &log);
    let mut dice = Dice::new(!seed);
    let mut desk = Desk::start(HttpConfig {
        concurrency: 8,
        backoff_min: Duration::from_millis(1),
        backoff_max: Duration::from_millis(4),
        ..receiver.config()
    });
    let mut keys: Vec<Key> = (0..KEYS).map(|_| Key::default()).collect();
    let mut attempts: HashMap<u64, (usize, usize)> = HashMap::new();
    let mut drained = HashSet::new();
    let deadline = Instant::now() + DEADLINE;
    while keys.iter().any(|key| key.confirmed < OF_EACH_KEY) {
        assert!(Instant::now() < deadline, "seed {seed}: {:?}", desk.states.last());
        let mut batch = Vec::new();
        // A worker hands over no messages while it knows that the destination is down; it may not know yet.
        let sends = dice.below(10) == 0 || desk.states.last() == Some(&ConnectionState::Connected);
        for _ in 0..dice.below(4) * usize::from(sends) {
            let at = dice.below(KEYS);
            let key = &mut keys[at];
            for _ in 0..=dice.below(3) {
                let n = key.confirmed + key.run.len();
                if n < OF_EACH_KEY && !key.has_failed() {
                    let handle = attempts.len() as u64;
                    attempts.insert(handle, (at, n));
                    key.run.push_back((handle, None));
                    batch.push(attempt(handle, at, n));
                }
            }
        }
        let handed = batch.iter().map(|attempt| Entry::Handed { handle: attempt.handle });
        log.lock().unwrap().extend(handed);
        while let Err(back) = desk.publisher.try_publish(batch) {
            assert!(Instant::now() < deadline, "seed {seed}: the queue stays full");
            batch = back;
            std::thread::yield_now();
        }
        if dice.below(3) == 0 {
            continue; // without draining the other outcomes
        }
        desk.collect();
        let new: Vec<_> = desk
            .outcomes
            .iter()
            .filter(|(handle, _)| drained.insert(**handle))
            .collect();
        for (handle, outcome) in new {
            log.lock().unwrap().push(Entry::Drained { handle: *handle });
            let run = &mut keys[attempts[handle].0].run;
            let sent = run
                .iter_mut()
                .find(|(other, _)| other == handle)
                .expect("the attempt was handed over");
            sent.1 = Some(outcome.clone());
        }
        keys.iter_mut().for_each(Key::on_outcome);
    }
    desk.stop();
    let log = log.lock().unwrap().clone();
    (log, attempts)
}

/// Returns how the log breaks the promise, if it does.
fn complaint(log: &[Entry], attempts: &HashMap<u64, (usize, usize)>) -> Option<String> {
    let (mut handed, mut drained) = (HashMap::new(), HashMap::new());
    for (at, entry) in log.iter().enumerate() {
        match entry {
            Entry::Handed { handle } => drop(handed.insert(*handle, at)),
            Entry::Drained { handle } => drop(drained.insert(*handle, at)),
            _ => {}
        }
    }
    let mut failed: HashMap<usize, Vec<u64>> = HashMap::new();
    let mut on_the_way: HashMap<usize, u64> = HashMap::new();
    let mut delivered: HashMap<usize, Vec<usize>> = HashMap::new();
    for entry in log {
        match entry {
            Entry::Arrived { handle } => {
                let (key, _) = attempts[handle];
                for before in failed.entry(key).or_default().iter().filter(|before| *before != handle) {
                    let drained_at = drained.get(before).copied().unwrap_or(usize::MAX);
                    if drained_at > handed[handle] {
                        return Some(format!(
                            "{handle} of key {key} was sent, and {before} before it had failed"
                        ));
                    }
                }
                match on_the_way.insert(key, *handle) {
                    Some(other) if other != *handle => {
                        return Some(format!("{handle} of key {key} was sent beside {other}"));
                    }
                    _ => {}
                }
            }
            Entry::Answered { handle, good } => {
                let (key, n) = attempts[handle];
                on_the_way.remove(&key);
                let failed = failed.entry(key).or_default();
                if *good {
                    // The message was sent again over a new connection, because the old one had been closed.
                    failed.retain(|before| before != handle);
                    delivered.entry(key).or_default().push(n);
                } else {
                    failed.push(*handle);
                }
            }
            _ => {}
        }
    }
    for key in 0..KEYS {
        let mut seen = HashSet::new();
        let firsts: Vec<usize> = delivered[&key].iter().copied().filter(|n| seen.insert(*n)).collect();
        if firsts != (0..OF_EACH_KEY).collect::<Vec<_>>() {
            return Some(format!("key {key} arrived as {firsts:?}"));
        }
    }
    None
}

#[test]
fn first_deliveries_of_a_key_are_in_order_whatever_fails() {
    for seed in seeds(16) {
        let (log, attempts) = play(seed);
        let complaint = complaint(&log, &attempts);
        assert_eq!(complaint, None, "OUTBOX_SEED={seed}");
        let failures = log
            .iter()
            .filter(|entry| matches!(entry, Entry::Answered { good: false, .. }))
            .count();
        assert!(failures > 10, "seed {seed}: too few failures");
    }
}

#[test]
fn the_oracle_detects_each_violation() {
    let attempts: HashMap<u64, (usize, usize)> = HashMap::from([(0, (0, 0)), (1, (0, 1)), (2, (0, 0))]);
    let (answered, bad) = (
        |handle| Entry::Answered { handle, good: true },
        |handle| Entry::Answered { handle, good: false },
    );
    let [handed, arrived] = [|handle| Entry::Handed { handle }, |handle| Entry::Arrived { handle }];
    let overtaken = [
        handed(0),
        handed(1),
        arrived(0),
        bad(0),
        Entry::Drained { handle: 0 },
        arrived(1),
        answered(1),
    ];
    assert!(complaint(&overtaken, &attempts).unwrap().contains("had failed"));
    let beside = [handed(0), handed(1), arrived(0), arrived(1), answered(0), answered(1)];
    assert!(complaint(&beside, &attempts).unwrap().contains("beside"));
    let mixed = [handed(1), arrived(1), answered(1), handed(2), arrived(2), answered(2)];
    let mut log: Vec<Entry> = mixed.into();
    let mut attempts = attempts;
    let mut handle = 10;
    for key in 0..KEYS {
        for n in 0..OF_EACH_KEY {
            attempts.insert(handle, (key, n));
            log.extend([handed(handle), arrived(handle), answered(handle)]);
            handle += 1;
        }
    }
    assert!(complaint(&log, &attempts).unwrap().contains("key 0 arrived as [1, 0"));
    assert_eq!(complaint(&log[6..], &attempts), None);
}
