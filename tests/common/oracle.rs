//! Is what arrived what was committed? A pure checker: the producers' account on one side, the consumer's on the other.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;
use support::Delivery;

/// What a producer meant to send. The label is its own, so that it names an event also where a seq is used twice.
#[derive(Clone, Debug)]
pub struct Sent {
    pub label: String,
    pub payload: Value,
    pub fate: Fate,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    Committed,
    RolledBack,
    /// The answer to COMMIT was lost.
    Unknown,
}

/// What a consumer got.
#[derive(Clone, Debug)]
pub struct Arrived {
    pub label: String,
    pub key: String,
    pub seq: i64,
    pub payload: Value,
}

impl Arrived {
    /// Reads a message of which the payload holds its label.
    pub fn new(delivery: &Delivery) -> Self {
        Self::of(&delivery.json())
    }

    /// Of an envelope.
    pub fn of(body: &Value) -> Self {
        Self {
            label: text(&body["payload"]["label"]),
            key: text(&body["key"]),
            seq: body["seq"].as_i64().expect("a seq in the body"),
            payload: body["payload"].clone(),
        }
    }
}

fn text(value: &Value) -> String {
    value
        .as_str()
        .unwrap_or_else(|| panic!("a text, not {value}"))
        .to_owned()
}

/// What is wrong, by label.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Verdict {
    /// Committed, and never arrived.
    pub lost: Vec<String>,
    /// Arrived, and nobody committed it.
    pub invented: Vec<String>,
    /// Arrived with another payload.
    pub altered: Vec<String>,
    /// Arrived for the first time after a later one of the same key.
    pub reordered: Vec<String>,
    /// Arrived again: once for each time after the first.
    pub doubled: Vec<String>,
}

impl Verdict {
    /// All that was committed arrived once and in order per key, and nothing else.
    #[track_caller]
    pub fn assert_perfect(&self) {
        assert_eq!(*self, Self::default());
    }

    /// All that was committed arrived, and nothing else; some of it again.
    #[track_caller]
    pub fn assert_nothing_lost(&self, doubled_max: usize) {
        let Self {
            lost,
            invented,
            altered,
            ..
        } = self;
        assert_eq!(
            (lost, invented, altered),
            (&vec![], &vec![], &vec![]),
            "lost, invented, altered"
        );
        assert!(
            self.doubled.len() <= doubled_max,
            "{} doubled, more than {doubled_max}",
            self.doubled.len()
        );
    }
}

/// Compares the two accounts; `arrived` is in order of arrival.
pub fn judge(sent: &[Sent], arrived: &[Arrived]) -> Verdict {
    let intents: BTreeMap<&str, &Sent> = sent.iter().map(|sent| (sent.label.as_str(), sent)).collect();
    let mut verdict = Verdict::default();
    let mut seen = BTreeSet::new();
    let mut last_seq: BTreeMap<&str, i64> = BTreeMap::new();
    for message in arrived {
        let label = || message.label.clone();
        match intents.get(message.label.as_str()) {
            Some(intent) if intent.fate != Fate::RolledBack => {
                if intent.payload != message.payload {
                    verdict.altered.push(label());
                }
            }
            _ => verdict.invented.push(label()),
        }
        if !seen.insert(message.label.as_str()) {
            verdict.doubled.push(label());
            continue;
        }
        let last = last_seq.entry(&message.key).or_insert(i64::MIN);
        if message.seq < *last {
            verdict.reordered.push(label());
        }
        *last = message.seq.max(*last);
    }
    let committed = sent.iter().filter(|sent| sent.fate == Fate::Committed);
    let lost = committed.filter(|sent| !seen.contains(sent.label.as_str()));
    verdict.lost = lost.map(|sent| sent.label.clone()).collect();
    verdict
}

/// Messages whose last arrival came before that of an earlier one of their key. What the broker took behind a refused one
/// comes again behind it, so the last arrivals are in order where the first need not be.
pub fn last_arrivals_out_of_order(arrived: &[Arrived]) -> Vec<String> {
    let mut seen = BTreeSet::new();
    let mut next_seq: BTreeMap<&str, i64> = BTreeMap::new();
    let mut found = Vec::new();
    for message in arrived
        .iter()
        .rev()
        .filter(|message| seen.insert(message.label.as_str()))
    {
        let next = next_seq.insert(&message.key, message.seq).unwrap_or(i64::MAX);
        if message.seq > next {
            found.push(message.label.clone());
        }
    }
    found
}
