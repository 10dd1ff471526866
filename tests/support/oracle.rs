//! A pure check that the messages that arrived are those that were committed. Compares the record of the producers with
//! that of the consumer.

use std::collections::{BTreeMap, BTreeSet};

use crate::Delivery;
use crate::consumer::label;
use serde_json::Value;

/// An event that a producer tried to send. The producer makes the label, so that the label identifies the event even if
/// a seq is used twice.
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

/// A message that a consumer received.
#[derive(Clone, Debug)]
pub struct Arrived {
    pub label: String,
    pub key: String,
    pub seq: i64,
    pub payload: Value,
}

impl Arrived {
    /// Reads a message whose payload contains its label.
    pub fn new(delivery: &Delivery) -> Self {
        Self::of(&delivery.json())
    }

    /// Reads an envelope whose payload contains its label.
    pub fn of(body: &Value) -> Self {
        Self {
            label: label(body),
            key: text(&body["key"]),
            seq: body["seq"].as_i64().expect("a seq in the body"),
            payload: body["payload"].clone(),
        }
    }
}

/// Reads messages whose payloads contain their labels.
pub fn arrived(deliveries: &[Delivery]) -> Vec<Arrived> {
    deliveries.iter().map(Arrived::new).collect()
}

fn text(value: &Value) -> String {
    value
        .as_str()
        .unwrap_or_else(|| panic!("a text, not {value}"))
        .to_owned()
}

/// The differences, as labels of messages.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Verdict {
    /// Committed, but never arrived.
    pub lost: Vec<String>,
    /// Arrived, but never committed.
    pub invented: Vec<String>,
    /// Arrived with another payload.
    pub altered: Vec<String>,
    /// Arrived for the first time after a later message of the same key.
    pub reordered: Vec<String>,
    /// Arrived again: one entry for each arrival after the first.
    pub doubled: Vec<String>,
}

impl Verdict {
    /// Asserts that all committed events arrived once and in order per key, and no other message.
    #[track_caller]
    pub fn assert_perfect(&self) {
        assert_eq!(*self, Self::default());
    }

    /// Asserts that all committed events arrived unchanged, and no other message. [`crate::faults`] judges the repeats.
    #[track_caller]
    pub fn assert_nothing_lost(&self) {
        let none = &vec![];
        assert_eq!(
            (&self.lost, &self.invented, &self.altered),
            (none, none, none),
            "lost, invented, altered"
        );
    }
}

/// Compares the two records. `arrived` is in order of arrival.
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

/// Labels of messages whose last arrival came before the last arrival of an earlier message of their key. A worker
/// publishes again what the broker took behind a refused message. So the last arrivals are in order even if the first
/// arrivals are not.
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
