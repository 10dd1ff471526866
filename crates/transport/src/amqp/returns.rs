//! Decides which of the answered messages were unroutable. Pure; called by `channel` on the publisher thread.
//!
//! The trap: lapin 4.12 does not report this per message. A broker sends `basic.return` for an unroutable message and
//! then acks it. lapin puts all returns into one queue. Each ack or nack that it processes takes the *oldest waiting*
//! return, whichever message that belongs to (`complete_pending` in its acknowledgement.rs). With `multiple` it
//! resolves confirms in the order of a hash map. So the confirm of one message can carry the return of another, and an
//! unroutable message may get a plain ack: 22 of 10,000 did. This module relies on rules that still hold:
//!
//! - R1 The broker sends the return before the ack. So the return is in the queue, or already taken, when the ack is
//!   processed.
//! - R2 The queue is first in, first out.
//! - R3 An ack that carries no return was processed while the queue was empty.
//! - R4 The number of waiting returns never exceeds the number of returned messages without their ack. Each return adds
//!   one to both. An ack takes one from the former if there is any, and at most one from the latter. So with no message
//!   outstanding the queue is empty.
//!
//! Answers come in *complete drains*: if a drain contains an answer, this or an earlier drain contains all that lapin
//! resolved before it. Then there are two cases for a message M:
//!
//! - M's ack carried no return: the queue was empty (R3). So M's return, if there is one (R1), was taken before and is
//!   in a drain that was seen by now. M is returned if its return was seen, otherwise confirmed.
//! - M's ack carried the return of another message: M's own may still wait. M is *held* until its return arrives
//!   (returned), or until one of these proves that it cannot arrive any more (confirmed):
//!   - an answer of a later drain carried no return (R3);
//!   - a later drain carried the return of a message that was sent after M was answered (R2);
//!   - no message is outstanding (R4).
//!
//!   Any other answer uses up one of the returns that waited at that moment, at most one window's, so a hold is short.

use crate::Outcome;
use crate::connected::Numbered;
use std::collections::HashMap;

/// A `basic.return` that a confirm carried.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ReturnedMessage {
    pub(crate) message_id: String,
    pub(crate) code: u16,
    pub(crate) reason: String,
}

/// One confirm that lapin has resolved.
#[derive(Clone, Debug)]
pub(crate) struct ConfirmAnswer {
    pub(crate) seq: u64,
    /// False for a nack.
    pub(crate) acked: bool,
    /// The return of any message, not necessarily this one.
    pub(crate) carried: Option<Box<ReturnedMessage>>,
}

/// The messages of one channel that have no verdict yet.
#[derive(Default)]
pub(crate) struct Returns {
    /// Messages without an answer, by seq, and their ids.
    unanswered: Numbered<String>,
    /// Messages whose ack carried the return of another message.
    held: Vec<HeldMessage>,
    /// The ids among these that the broker has returned. The caller promises that ids are unique in the window. If they
    /// are not, one return counts for all messages of that id, so that none of them counts as published by mistake.
    returned: HashMap<String, Mark>,
}

struct Mark {
    /// The number of messages with this id and without a verdict.
    open: usize,
    /// The lowest of their seqs: [`Returns::drained`] is cautious when an id is not unique.
    first_seq: u64,
    code: u16,
    reason: String,
}

struct HeldMessage {
    seq: u64,
    message_id: String,
    /// Messages from this seq on were sent after the ack arrived.
    answered_before_seq: u64,
}

impl Returns {
    /// Records a message. Call in the order of sending; `seq` must rise by one from 0.
    pub(crate) fn sent(&mut self, seq: u64, message_id: String) {
        if let Some(mark) = self.returned.get_mut(&message_id) {
            mark.open += 1;
        }
        let number = self.unanswered.push(message_id);
        debug_assert_eq!(number, seq);
    }

    /// Takes one complete drain, in any order, out of `answers`. Adds the verdicts that are now certain.
    pub(crate) fn drained(&mut self, answers: &mut Vec<ConfirmAnswer>, verdicts: &mut Vec<(u64, Outcome)>) {
        let queue_was_empty = answers.iter().any(|a| a.carried.is_none());
        let newest_returned_seq = self.record_returns(answers);

        // Before the new answers: only a *later* drain proves anything about a message that an older drain left held.
        for held in std::mem::take(&mut self.held) {
            let passed = queue_was_empty || newest_returned_seq.is_some_and(|seq| seq >= held.answered_before_seq);
            self.decide_or_hold(held, passed, verdicts);
        }
        for answer in answers.drain(..) {
            let Some(message_id) = self.unanswered.take(answer.seq) else {
                continue;
            };
            if answer.acked {
                let held = HeldMessage {
                    seq: answer.seq,
                    message_id,
                    answered_before_seq: self.unanswered.next(),
                };
                self.decide_or_hold(held, answer.carried.is_none(), verdicts);
            } else {
                self.close(&message_id);
                verdicts.push((answer.seq, Outcome::Nacked));
            }
        }
        if self.unanswered.is_empty() {
            for held in std::mem::take(&mut self.held) {
                self.decide_or_hold(held, true, verdicts);
            }
        }
    }

    /// Marks the ids that were returned. Returns the highest seq of theirs.
    fn record_returns(&mut self, answers: &[ConfirmAnswer]) -> Option<u64> {
        let mut newest = None;
        for returned in answers.iter().filter_map(|a| a.carried.as_deref()) {
            let ReturnedMessage {
                message_id,
                code,
                reason,
            } = returned.clone();
            if let Some(mark) = self.returned.get_mut(&message_id) {
                newest = newest.max(Some(mark.first_seq));
                (mark.code, mark.reason) = (code, reason);
                continue;
            }
            // Once for each returned message: at most a window of them.
            let held = self.held.iter().map(|held| (held.seq, &held.message_id));
            let seqs = held.chain(self.unanswered.iter()).filter(|(_, id)| **id == message_id);
            let (open, first_seq) = seqs.fold((0, u64::MAX), |(open, first), (seq, _)| (open + 1, first.min(seq)));
            if open > 0 {
                newest = newest.max(Some(first_seq));
                let mark = Mark {
                    open,
                    first_seq,
                    code,
                    reason,
                };
                self.returned.insert(message_id, mark);
            }
        }
        newest
    }

    fn decide_or_hold(&mut self, held: HeldMessage, passed: bool, verdicts: &mut Vec<(u64, Outcome)>) {
        let verdict = match self.returned.get(&held.message_id) {
            Some(Mark { code, reason, .. }) => Outcome::Returned {
                code: *code,
                reason: reason.clone(),
            },
            None if passed => Outcome::Confirmed,
            None => return self.held.push(held),
        };
        self.close(&held.message_id);
        verdicts.push((held.seq, verdict));
    }

    /// One message of this id has its verdict.
    fn close(&mut self, message_id: &str) {
        if let Some(mark) = self.returned.get_mut(message_id) {
            mark.open -= 1;
            if mark.open == 0 {
                self.returned.remove(message_id);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Outcome as Verdict;
    use proptest::prelude::*;
    use std::collections::{BTreeMap, VecDeque};

    fn ack(seq: u64, carried: Option<u64>) -> ConfirmAnswer {
        let carried = carried.map(|s| Box::new(returned(id(s))));
        ConfirmAnswer {
            seq,
            acked: true,
            carried,
        }
    }

    fn returned(message_id: String) -> ReturnedMessage {
        ReturnedMessage {
            message_id,
            code: 312,
            reason: "NO_ROUTE".into(),
        }
    }

    impl Returns {
        fn verdicts(&mut self, mut answers: Vec<ConfirmAnswer>) -> Vec<(u64, Verdict)> {
            let mut verdicts = Vec::new();
            self.drained(&mut answers, &mut verdicts);
            assert!(answers.is_empty());
            verdicts
        }
    }

    fn id(seq: u64) -> String {
        format!("m{seq}")
    }

    fn sent(seqs: std::ops::Range<u64>) -> Returns {
        let mut returns = Returns::default();
        seqs.for_each(|s| returns.sent(s, id(s)));
        returns
    }

    fn no_route() -> Verdict {
        Verdict::Returned {
            code: 312,
            reason: "NO_ROUTE".into(),
        }
    }

    #[test]
    fn an_ack_without_a_return_confirms_at_once() {
        assert_eq!(sent(0..2).verdicts(vec![ack(0, None)]), [(0, Verdict::Confirmed)]);
    }

    #[test]
    fn a_plainly_acked_message_is_returned_when_another_ack_carried_its_return() {
        let mut returns = sent(0..3);
        assert_eq!(returns.verdicts(vec![ack(0, Some(1))]), []);
        assert_eq!(
            returns.verdicts(vec![ack(1, None)]),
            [(0, Verdict::Confirmed), (1, no_route())]
        );
    }

    #[test]
    fn a_held_message_waits_for_a_proof_from_a_later_drain() {
        let mut returns = sent(0..4);
        // Seq 2 carried no return, but it may have been processed before the ack of 0, so it proves nothing about 0.
        assert_eq!(
            returns.verdicts(vec![ack(0, Some(1)), ack(2, None)]),
            [(2, Verdict::Confirmed)]
        );
        assert_eq!(
            returns.verdicts(vec![ack(3, None)]),
            [(0, Verdict::Confirmed), (3, Verdict::Confirmed)]
        );
    }

    #[test]
    fn the_return_of_a_message_sent_later_frees_a_held_one() {
        let mut returns = sent(0..3);
        assert_eq!(returns.verdicts(vec![ack(0, Some(1))]), []);
        (3..5).for_each(|s| returns.sent(s, id(s)));
        assert_eq!(returns.verdicts(vec![ack(1, Some(2))]), [(1, no_route())]);
        assert_eq!(
            returns.verdicts(vec![ack(2, Some(3))]),
            [(0, Verdict::Confirmed), (2, no_route())]
        );
    }

    #[test]
    fn no_message_is_held_when_none_is_outstanding() {
        let mut returns = sent(0..2);
        assert_eq!(returns.verdicts(vec![ack(0, Some(1))]), []);
        assert_eq!(
            returns.verdicts(vec![ack(1, Some(1))]),
            [(1, no_route()), (0, Verdict::Confirmed)]
        );
        assert!(returns.returned.is_empty());
    }

    #[test]
    fn a_nack_is_a_nack_whatever_it_carries() {
        let mut returns = sent(0..2);
        let nack = ConfirmAnswer {
            acked: false,
            ..ack(0, Some(1))
        };
        assert_eq!(returns.verdicts(vec![nack]), [(0, Verdict::Nacked)]);
        assert_eq!(returns.verdicts(vec![ack(1, None)]), [(1, no_route())]);
    }

    #[test]
    fn one_return_counts_for_every_message_with_the_same_id() {
        let mut returns = Returns::default();
        (0..3).for_each(|s| returns.sent(s, "same".into()));
        let carried = Some(Box::new(returned("same".into())));
        let verdicts = returns.verdicts(vec![
            ConfirmAnswer {
                seq: 1,
                acked: true,
                carried,
            },
            ack(0, None),
        ]);
        assert_eq!(verdicts, [(1, no_route()), (0, no_route())]);
        assert_eq!(returns.verdicts(vec![ack(2, None)]), [(2, no_route())]);
        assert!(returns.returned.is_empty());
    }

    #[test]
    fn unexpected_answers_and_unknown_ids_are_ignored() {
        let mut returns = sent(0..1);
        assert_eq!(returns.verdicts(vec![ack(7, Some(9))]), []);
        assert_eq!(
            returns.verdicts(vec![ack(0, None), ack(0, None)]),
            [(0, Verdict::Confirmed)]
        );
    }

    /// One step of the simulated broker and lapin. Numbers choose among the actions that are possible at that moment.
    #[derive(Clone, Debug)]
    enum Step {
        Send {
            unroutable: bool,
        },
        /// The broker returns the n-th unroutable message that it has not returned yet.
        Return(usize),
        /// The broker acks one message, or with `multiple` all up to it; lapin resolves them in the order of `shuffle`.
        Ack {
            nth: usize,
            multiple: bool,
            nack: bool,
            shuffle: u64,
        },
        Drain {
            shuffle: u64,
        },
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            4 => prop::bool::weighted(0.4).prop_map(|unroutable| Step::Send { unroutable }),
            2 => any::<usize>().prop_map(Step::Return),
            4 => (any::<usize>(), prop::bool::weighted(0.4), prop::bool::weighted(0.1), any::<u64>())
                .prop_map(|(nth, multiple, nack, shuffle)| Step::Ack { nth, multiple, nack, shuffle }),
            2 => any::<u64>().prop_map(|shuffle| Step::Drain { shuffle }),
        ]
    }

    /// A model of broker and lapin, limited to returns and acks.
    #[derive(Default)]
    struct World {
        next_seq: u64,
        /// The truth: whether each message is unroutable.
        unroutable: BTreeMap<u64, bool>,
        unreturned: Vec<u64>,
        unacked: Vec<u64>,
        /// lapin's queue of returns.
        waiting: VecDeque<u64>,
        resolved: Vec<ConfirmAnswer>,
        nacked: Vec<u64>,
        returns: Returns,
        verdicts: BTreeMap<u64, Verdict>,
    }

    fn shuffle<T>(items: &mut [T], mut state: u64) {
        for i in (1..items.len()).rev() {
            state = state
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            items.swap(i, (state >> 33) as usize % (i + 1));
        }
    }

    impl World {
        fn take(&mut self, step: Step) {
            match step {
                Step::Send { unroutable } => {
                    let seq = self.next_seq;
                    self.next_seq += 1;
                    self.unroutable.insert(seq, unroutable);
                    self.unacked.push(seq);
                    if unroutable {
                        self.unreturned.push(seq);
                    }
                    self.returns.sent(seq, id(seq));
                }
                Step::Return(nth) if !self.unreturned.is_empty() => {
                    let seq = self.unreturned.remove(nth % self.unreturned.len());
                    self.waiting.push_back(seq);
                }
                Step::Ack {
                    nth,
                    multiple,
                    nack,
                    shuffle: order,
                } if !self.unacked.is_empty() => {
                    let last = self.unacked[nth % self.unacked.len()];
                    let chosen = |s: &u64| if multiple { *s <= last } else { *s == last };
                    let mut acked: Vec<u64> = self.unacked.iter().copied().filter(chosen).collect();
                    self.unacked.retain(|s| !chosen(s));
                    // R1: the broker returns what it has not returned yet before it acks.
                    for seq in &acked {
                        if let Some(at) = self.unreturned.iter().position(|u| u == seq) {
                            self.waiting.push_back(self.unreturned.remove(at));
                        }
                    }
                    shuffle(&mut acked, order);
                    for seq in acked {
                        let carried = self.waiting.pop_front();
                        self.resolved.push(ConfirmAnswer {
                            acked: !nack,
                            ..ack(seq, carried)
                        });
                        if nack {
                            self.nacked.push(seq);
                        }
                    }
                }
                Step::Drain { shuffle: order } => {
                    let mut answers = std::mem::take(&mut self.resolved);
                    shuffle(&mut answers, order);
                    for (seq, verdict) in self.returns.verdicts(answers) {
                        assert_eq!(self.verdicts.insert(seq, verdict), None, "two verdicts for {seq}");
                    }
                }
                Step::Return(_) | Step::Ack { .. } => {}
            }
        }

        fn truth(&self, seq: u64) -> Verdict {
            match (self.nacked.contains(&seq), self.unroutable[&seq]) {
                (true, _) => Verdict::Nacked,
                (_, true) => no_route(),
                (_, false) => Verdict::Confirmed,
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4000))]
        #[test]
        fn no_interleaving_of_returns_and_acks_leads_to_a_wrong_verdict(steps in prop::collection::vec(step(), 1..120)) {
            let mut world = World::default();
            for step in steps {
                world.take(step);
                for (seq, verdict) in &world.verdicts {
                    prop_assert_eq!(verdict, &world.truth(*seq), "seq {}", seq);
                }
            }
            while !world.unacked.is_empty() {
                world.take(Step::Ack { nth: 0, multiple: false, nack: false, shuffle: 0 });
            }
            world.take(Step::Drain { shuffle: 1 });
            for seq in 0..world.next_seq {
                prop_assert_eq!(world.verdicts.get(&seq), Some(&world.truth(seq)), "seq {}", seq);
            }
            prop_assert!(world.returns.returned.is_empty() && world.returns.unanswered.is_empty());
        }

        /// A hold ends with the answers of the next window, even if every later message is unroutable and some message
        /// is always outstanding.
        #[test]
        fn a_hold_does_not_outlast_the_next_window(lag in 1u64..20) {
            let mut returns = sent(0..lag + 1);
            prop_assert_eq!(returns.verdicts(vec![ack(0, Some(1))]), []);
            let mut freed_after = None;
            for seq in 1..4 * lag + 8 {
                returns.sent(seq + lag, id(seq + lag));
                // lapin's queue stays one return ahead of the acks.
                let verdicts = returns.verdicts(vec![ack(seq, Some(seq + 1))]);
                if verdicts.contains(&(0, Verdict::Confirmed)) {
                    freed_after = Some(seq);
                    break;
                }
            }
            prop_assert!(freed_after.is_some_and(|seq| seq <= lag + 1), "{:?}", freed_after);
        }
    }
}
