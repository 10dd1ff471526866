//! Judges a run on the server by the log of its transactions, the messages sent, and the history at the end. Called by
//! the tests of permutations.rs.

use std::collections::{BTreeMap, HashSet};

/// A moment in the sequence of all begins and ends of steps.
pub type Moment = u32;

#[derive(Clone, Debug)]
pub enum What {
    Took,
    Claimed { rows: Vec<i64>, missed: bool },
    Settled { rows: Vec<i64>, changed: usize },
    Published { seq: i64, key: &'static str },
    Discarded { seq: i64, done: bool },
    Retried { seq: i64, done: bool },
    Nothing,
    Failed(String),
}

/// A transaction with its only statement.
#[derive(Clone, Debug)]
pub struct Event {
    pub actor: &'static str,
    /// The epoch of a worker; 0 for other actors.
    pub epoch: i64,
    pub what: What,
    pub began: Moment,
    pub ended: Moment,
    pub committed: Option<Moment>,
}

impl Event {
    pub fn committed_before(&self, moment: Moment) -> bool {
        self.committed.is_some_and(|committed| committed < moment)
    }
}

#[derive(Clone, Debug, Default)]
pub struct Run {
    pub played: Vec<String>,
    pub events: Vec<Event>,
    /// Seqs in the order of sending, with repetitions.
    pub sent: Vec<i64>,
    /// The seq, and whether the message was discarded.
    pub history: Vec<(i64, bool)>,
    /// The number of rows outside the history at the end.
    pub left: i64,
    /// The number of times that all steps under way waited for a lock.
    pub waits: usize,
}

impl Run {
    pub fn epoch_of(&self, worker: &str) -> i64 {
        let took = |event: &&Event| event.actor == worker && matches!(event.what, What::Took);
        self.events.iter().find(took).expect("a lease").epoch
    }

    pub fn rows_of(&mut self, event: usize) -> &mut Vec<i64> {
        match &mut self.events[event].what {
            What::Claimed { rows, .. } | What::Settled { rows, .. } => rows,
            other => panic!("{other:?} has no rows"),
        }
    }

    /// The committed messages: their keys, and when they were committed.
    pub fn messages(&self) -> BTreeMap<i64, (&'static str, Moment)> {
        let mut found = BTreeMap::new();
        for event in &self.events {
            if let (What::Published { seq, key }, Some(committed)) = (&event.what, event.committed) {
                found.insert(*seq, (*key, committed));
            }
        }
        for event in &self.events {
            if let (What::Retried { seq, done: true }, Some(committed)) = (&event.what, event.committed) {
                found.entry(*seq).and_modify(|message| message.1 = committed);
            }
        }
        found
    }

    /// Whether a worker has a later epoch at this moment.
    pub fn superseded(&self, epoch: i64, moment: Moment) -> bool {
        let later = |event: &Event| matches!(event.what, What::Took) && event.epoch > epoch;
        self.events
            .iter()
            .any(|event| later(event) && event.committed_before(moment))
    }

    /// Whether this message had been settled or discarded at this moment.
    pub fn over(&self, seq: i64, moment: Moment) -> bool {
        self.events
            .iter()
            .filter(|event| event.committed_before(moment))
            .any(|event| match &event.what {
                What::Settled { rows, changed } => *changed > 0 && rows.contains(&seq),
                What::Discarded { seq: discarded, done } => *done && *discarded == seq,
                _ => false,
            })
    }

    pub fn discards(&self) -> impl Iterator<Item = (&Event, i64)> {
        self.events.iter().filter_map(|event| match event.what {
            What::Discarded { seq, done: true } if event.committed.is_some() => Some((event, seq)),
            _ => None,
        })
    }
}

/// The violations in a finished run.
pub fn judge(run: &Run) -> Vec<String> {
    let mut complaints = Vec::new();
    judge_the_end(run, &mut complaints);
    judge_claims(run, &mut complaints);
    judge_settles(run, &mut complaints);
    judge_what_was_sent(run, &mut complaints);
    complaints
}

fn judge_the_end(run: &Run, complaints: &mut Vec<String>) {
    let messages = run.messages();
    for seq in messages.keys() {
        match run.history.iter().filter(|(ended, _)| ended == seq).count() {
            0 => complaints.push(format!("{seq} is lost")),
            1 => {}
            _ => complaints.push(format!("{seq} is doubled in the history")),
        }
    }
    for (seq, discarded) in &run.history {
        if !messages.contains_key(seq) {
            complaints.push(format!("{seq} was never committed"));
        }
        if *discarded != run.discards().any(|(_, discarded)| discarded == *seq) {
            complaints.push(format!("{seq} discarded in the history: {discarded}"));
        }
    }
    if run.left > 0 {
        complaints.push(format!("{} rows are left behind", run.left));
    }
    for event in &run.events {
        if let What::Failed(error) = &event.what {
            complaints.push(format!("{}: {error}", event.actor));
        }
    }
}

fn judge_claims(run: &Run, complaints: &mut Vec<String>) {
    let mut claimed: HashSet<(i64, i64)> = HashSet::new();
    for event in &run.events {
        let What::Claimed { rows, missed } = &event.what else {
            continue;
        };
        let (actor, epoch) = (event.actor, event.epoch);
        if !rows.windows(2).all(|two| two[0] < two[1]) {
            complaints.push(format!("{actor} claimed out of order: {rows:?}"));
        }
        for seq in rows {
            if !claimed.insert((epoch, *seq)) {
                complaints.push(format!("{seq} is claimed again by {actor}"));
            }
        }
        if run.superseded(epoch, event.began) && !rows.is_empty() {
            complaints.push(format!("{actor} claimed {rows:?} after it lost its lease"));
        }
        if *missed || run.superseded(epoch, event.ended) {
            continue;
        }
        for (seq, (_, committed)) in run.messages() {
            if committed < event.began && !claimed.contains(&(epoch, seq)) && !run.over(seq, event.ended) {
                complaints.push(format!("{seq} is not claimed by {actor}, though it could be"));
            }
        }
    }
}

fn judge_settles(run: &Run, complaints: &mut Vec<String>) {
    let mut all = run.discards().count();
    for event in &run.events {
        let What::Settled { rows, changed } = &event.what else {
            continue;
        };
        all += changed;
        let by_hand = run.discards().filter(|(_, seq)| rows.contains(seq)).count();
        let wanted = match (
            run.superseded(event.epoch, event.began),
            run.superseded(event.epoch, event.ended),
        ) {
            (true, _) => 0..=0,
            (false, false) => rows.len().saturating_sub(by_hand)..=rows.len(),
            (false, true) => 0..=rows.len(), // the settle waited meanwhile
        };
        if !wanted.contains(changed) {
            complaints.push(format!(
                "a settle of {rows:?} by {} changed {changed}, not {wanted:?}",
                event.actor
            ));
        }
    }
    if all != run.history.len() {
        complaints.push(format!("the history has {} rows, changed {all}", run.history.len()));
    }
}

fn judge_what_was_sent(run: &Run, complaints: &mut Vec<String>) {
    let messages = run.messages();
    let mut first: Vec<(i64, &str)> = Vec::new();
    for seq in run.sent.iter().copied() {
        let Some((key, _)) = messages.get(&seq) else {
            complaints.push(format!("{seq} is sent and was never committed"));
            continue;
        };
        if first.iter().any(|(earlier, _)| *earlier == seq) {
            continue;
        }
        if let Some((later, _)) = first.iter().find(|(earlier, of)| of == key && *earlier > seq) {
            complaints.push(format!("{later} of key {key} is sent before {seq}"));
        }
        first.push((seq, key));
    }
    for (discard, seq) in run.discards() {
        for event in &run.events {
            let What::Claimed { rows, .. } = &event.what else {
                continue;
            };
            let under_way = rows.contains(&seq) && event.committed_before(discard.ended);
            if under_way && !run.superseded(event.epoch, discard.ended) {
                complaints.push(format!("{seq} is discarded while {} has it in flight", event.actor));
            }
        }
    }
}
