//! Decides which message may be sent next: the messages of a key one after the other, all others in order of arrival.
//! Pure; called by `Poster` in `http` for each idle request thread.

use crate::Publication;
use crate::failures::MessageKey;
use std::collections::{HashMap, VecDeque};
use std::rc::Rc;

#[expect(clippy::large_enum_variant, reason = "a box each would cost more than the room")]
enum NextMessage {
    /// A message without a key.
    Alone(Publication),
    /// The first waiting message of this key.
    OfKey(MessageKey),
}

/// The messages that wait to be sent.
#[derive(Default)]
pub(crate) struct SendOrder {
    /// The waiting messages of each key that has a message on its way or messages that wait.
    keys: HashMap<MessageKey, VecDeque<Publication>>,
    next: VecDeque<NextMessage>,
    waiting: usize,
}

impl SendOrder {
    pub(crate) fn waiting(&self) -> usize {
        self.waiting
    }

    /// Takes messages.
    pub(crate) fn take(&mut self, batch: Vec<Publication>) {
        self.waiting += batch.len();
        for publication in batch {
            let Some(key) = publication.key.as_deref() else {
                self.next.push_back(NextMessage::Alone(publication));
                continue;
            };
            match self.keys.get_mut(key) {
                Some(behind) => behind.push_back(publication),
                None => {
                    let key: MessageKey = key.into();
                    self.next.push_back(NextMessage::OfKey(Rc::clone(&key)));
                    self.keys.insert(key, VecDeque::from([publication]));
                }
            }
        }
    }

    pub(crate) fn has_next(&self) -> bool {
        !self.next.is_empty()
    }

    /// The next message to send, and its key. No other message of that key is returned until `confirmed` or `failed` is
    /// called.
    pub(crate) fn next(&mut self) -> Option<(Publication, Option<MessageKey>)> {
        let next = match self.next.pop_front()? {
            NextMessage::Alone(publication) => (publication, None),
            NextMessage::OfKey(key) => (self.keys.get_mut(&key)?.pop_front()?, Some(key)),
        };
        self.waiting -= 1;
        Some(next)
    }

    /// Records that the message of this key that was on its way has arrived.
    pub(crate) fn confirmed(&mut self, key: Option<MessageKey>) {
        let Some(key) = key else { return };
        match self.keys.get(&key).map(VecDeque::is_empty) {
            Some(false) => self.next.push_back(NextMessage::OfKey(key)),
            _ => drop(self.keys.remove(&key)),
        }
    }

    /// Records that it failed. Returns the handles of the messages of its key that waited behind it: they must not be
    /// sent.
    pub(crate) fn failed(&mut self, key: Option<&MessageKey>) -> Vec<u64> {
        let behind = key.and_then(|key| self.keys.remove(key)).unwrap_or_default();
        self.waiting -= behind.len();
        behind.iter().map(|publication| publication.handle).collect()
    }

    /// Removes all waiting messages and returns their handles with their keys. Messages on their way stay.
    pub(crate) fn lose_waiting(&mut self) -> Vec<(u64, Option<MessageKey>)> {
        let mut lost = Vec::with_capacity(self.waiting);
        let mut idle = Vec::new();
        for next in std::mem::take(&mut self.next) {
            match next {
                NextMessage::Alone(publication) => lost.push((publication.handle, None)),
                NextMessage::OfKey(key) => idle.push(key),
            }
        }
        for (key, behind) in &mut self.keys {
            lost.extend(
                behind
                    .drain(..)
                    .map(|publication| (publication.handle, Some(Rc::clone(key)))),
            );
        }
        for key in idle {
            self.keys.remove(&key);
        }
        self.waiting = 0;
        lost
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Properties;
    use crate::crossing::Handed;
    use crate::failures::Failures;
    use proptest::prelude::*;

    fn message(handle: u64, key: Option<&str>) -> Publication {
        Publication {
            handle,
            address: crate::Text::default(),
            key: key.map(Into::into),
            properties: Properties::default(),
            body: Vec::new(),
        }
    }

    fn next(order: &mut SendOrder) -> Option<u64> {
        order.next().map(|(publication, _)| publication.handle)
    }

    #[test]
    fn messages_of_a_key_go_one_by_one_and_others_pass_them() {
        let mut order = SendOrder::default();
        let batch = [(1, Some("a")), (2, Some("a")), (3, None), (4, Some("b"))];
        order.take(batch.map(|(handle, key)| message(handle, key)).into());
        assert_eq!(order.waiting(), 4);
        assert_eq!(
            [next(&mut order), next(&mut order), next(&mut order)],
            [Some(1), Some(3), Some(4)]
        );
        assert_eq!(next(&mut order), None);
        order.confirmed(Some("a".into()));
        assert_eq!(next(&mut order), Some(2));
        order.confirmed(Some("a".into()));
        order.confirmed(Some("b".into()));
        assert!(order.keys.is_empty() && order.waiting() == 0);
    }

    #[test]
    fn messages_behind_one_that_failed_are_given_back() {
        let mut order = SendOrder::default();
        order.take(vec![message(1, Some("a")), message(2, Some("a"))]);
        assert_eq!(next(&mut order), Some(1));
        assert_eq!(order.failed(Some(&"a".into())), [2]);
        order.take(vec![message(3, Some("a"))]);
        assert_eq!(next(&mut order), Some(3));
    }

    #[test]
    fn a_key_with_a_message_on_its_way_stays_blocked_when_the_rest_is_lost() {
        let mut order = SendOrder::default();
        let batch = [(1, Some("a")), (2, Some("a")), (3, None), (4, Some("b"))];
        order.take(batch.map(|(handle, key)| message(handle, key)).into());
        assert_eq!(next(&mut order), Some(1));
        let mut lost = order.lose_waiting();
        lost.sort_unstable();
        let expected = [(2, Some("a".into())), (3, None), (4, Some("b".into()))];
        assert_eq!((lost, order.waiting()), (expected.into(), 0));
        order.take(vec![message(5, Some("a"))]);
        assert_eq!(next(&mut order), None, "1 is still on its way");
        order.confirmed(Some("a".into()));
        assert_eq!(next(&mut order), Some(5));
    }

    proptest! {
        /// Batches, results and drains in any order: each message is sent or given back once. The messages of a key go
        /// one at a time and in order, and none goes between a failure and its drain.
        #[test]
        fn the_messages_of_a_key_stay_in_order_whatever_happens(steps in prop::collection::vec((0u8..6, 0u8..4, any::<bool>()), 1..200)) {
            let (mut order, mut failures) = (SendOrder::default(), Failures::default());
            let (mut handed, mut failures_seen) = (0u64, 0u64);
            let mut on_the_way: Vec<(u64, Option<MessageKey>)> = Vec::new();
            let mut keys: HashMap<String, (u64, bool)> = HashMap::new(); // last sent, and blocked by a failure
            let mut ended = std::collections::HashSet::new();
            for (step, which, good) in steps {
                match step {
                    0 | 1 => {
                        let batch: Vec<_> = (0..=u64::from(which)).map(|n| {
                            handed += 1;
                            message(handed, ["a", "b"].get((handed + n) as usize % 3).copied())
                        }).collect();
                        let by_handle: HashMap<u64, Option<String>> = batch.iter().map(|p| (p.handle, p.key.clone())).collect();
                        let (batch, lost) = failures.accept(Handed { batch, failures_seen });
                        order.take(batch);
                        for (lost, _) in lost {
                            prop_assert!(ended.insert(lost));
                            let key = by_handle[&lost].clone().expect("only keys fail");
                            prop_assert!(keys.get(&key).is_some_and(|(_, closed)| *closed));
                        }
                    }
                    2 | 3 => if let Some((publication, key)) = order.next() {
                        if let Some(key) = &key {
                            prop_assert!(on_the_way.iter().all(|(_, other)| other.as_ref() != Some(key)));
                            let (last, closed) = keys.entry(key.to_string()).or_default();
                            prop_assert!(!*closed, "{} after a failure", publication.handle);
                            prop_assert!(*last < publication.handle);
                            *last = publication.handle;
                        }
                        on_the_way.push((publication.handle, key));
                    },
                    4 if !on_the_way.is_empty() => {
                        let (handle, key) = on_the_way.remove(usize::from(which) % on_the_way.len());
                        prop_assert!(ended.insert(handle));
                        if good {
                            order.confirmed(key);
                        } else {
                            if let Some(key) = &key {
                                failures.key_failed(Rc::clone(key));
                                keys.entry(key.to_string()).or_default().1 = true;
                            }
                            for lost in order.failed(key.as_ref()) {
                                prop_assert!(ended.insert(lost));
                            }
                        }
                    }
                    5 if good => {
                        failures_seen = failures.count;
                        keys.values_mut().for_each(|(_, closed)| *closed = false);
                    }
                    5 => {
                        let before: Vec<String> = order.keys.iter().filter(|(_, w)| !w.is_empty()).map(|(k, _)| k.to_string()).collect();
                        for (lost, key) in order.lose_waiting() {
                            prop_assert!(ended.insert(lost));
                            key.into_iter().for_each(|key| failures.key_failed(key));
                        }
                        before.into_iter().for_each(|key| keys.entry(key).or_default().1 = true);
                    }
                    _ => {}
                }
            }
            while let Some((publication, key)) = order.next() {
                prop_assert!(ended.insert(publication.handle));
                order.confirmed(key);
            }
            for (handle, key) in on_the_way {
                prop_assert!(ended.insert(handle));
                for lost in order.failed(key.as_ref()) {
                    prop_assert!(ended.insert(lost));
                }
            }
            prop_assert_eq!(ended.len() as u64, handed);
            prop_assert_eq!(order.waiting(), 0);
        }
    }
}
