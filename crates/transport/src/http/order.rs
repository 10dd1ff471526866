//! Which message may be sent next? The messages of a key one after the other, all else as it came. Pure; the coordinator
//! in `http` asks it for each free request thread.
//!
//! The trap is in a failure. Of its key nothing may go out until the worker knows of it, also what the worker hands over
//! before it knows: it would overtake. So failures are numbered. Each batch carries the number up to which its sender has
//! heard; a message of a key that has failed since is not sent.

use crate::Publication;
use std::collections::{HashMap, VecDeque};
use std::rc::Rc;

type Key = Rc<str>;

#[expect(clippy::large_enum_variant, reason = "a box each would cost more than the room")]
enum Next {
    /// It has no key.
    Alone(Publication),
    /// The first of this key's.
    OfKey(Key),
}

/// The messages that wait to be sent.
#[derive(Default)]
pub(crate) struct Order {
    /// Keys with a message on its way, or with some that wait.
    keys: HashMap<Key, VecDeque<Publication>>,
    next: VecDeque<Next>,
    waiting: usize,
    /// The number of the newest failure of a key; only those that the worker has not heard of for certain.
    failed: HashMap<Key, u64>,
    failures: u64,
}

impl Order {
    pub(crate) fn waiting(&self) -> usize {
        self.waiting
    }

    /// How many failures there have been: to be told along with their outcomes.
    pub(crate) fn failures(&self) -> u64 {
        self.failures
    }

    /// Takes a batch over, from a worker that has heard of the first `heard` failures. Returns those that cannot be sent,
    /// for an earlier one of their key has failed meanwhile.
    pub(crate) fn take(&mut self, batch: Vec<Publication>, heard: u64) -> Vec<u64> {
        self.failed.retain(|_, failure| *failure > heard);
        let mut lost = Vec::new();
        for publication in batch {
            let Some(key) = publication.key.as_deref() else {
                self.next.push_back(Next::Alone(publication));
                self.waiting += 1;
                continue;
            };
            if let Some((key, _)) = self.failed.get_key_value(key) {
                let key = Rc::clone(key);
                lost.push(publication.handle);
                self.record_failure(key);
                continue;
            }
            match self.keys.get_mut(key) {
                Some(behind) => behind.push_back(publication),
                None => {
                    let key: Key = key.into();
                    self.next.push_back(Next::OfKey(Rc::clone(&key)));
                    self.keys.insert(key, VecDeque::from([publication]));
                }
            }
            self.waiting += 1;
        }
        lost
    }

    /// The next to send, and its key: nothing more of it comes until `confirmed` or `failed` is called.
    pub(crate) fn next(&mut self) -> Option<(Publication, Option<Key>)> {
        let next = match self.next.pop_front()? {
            Next::Alone(publication) => (publication, None),
            Next::OfKey(key) => (self.keys.get_mut(&key)?.pop_front()?, Some(key)),
        };
        self.waiting -= 1;
        Some(next)
    }

    /// The message of this key that was on its way has arrived.
    pub(crate) fn confirmed(&mut self, key: Option<Key>) {
        let Some(key) = key else { return };
        match self.keys.get(&key).map(VecDeque::is_empty) {
            Some(false) => self.next.push_back(Next::OfKey(key)),
            _ => drop(self.keys.remove(&key)),
        }
    }

    /// It has not. Returns those of its key that waited behind it: they are not to be sent.
    pub(crate) fn failed(&mut self, key: Option<Key>) -> Vec<u64> {
        let Some(key) = key else { return Vec::new() };
        let behind = self.keys.remove(&key).unwrap_or_default();
        self.waiting -= behind.len();
        self.record_failure(key);
        behind.iter().map(|publication| publication.handle).collect()
    }

    /// Gives up everything that waits, not what is on its way.
    pub(crate) fn lose_waiting(&mut self) -> Vec<u64> {
        let mut lost = Vec::with_capacity(self.waiting);
        let mut idle = Vec::new();
        for next in std::mem::take(&mut self.next) {
            match next {
                Next::Alone(publication) => lost.push(publication.handle),
                Next::OfKey(key) => idle.push(key),
            }
        }
        let mut lossy = Vec::new();
        for (key, behind) in &mut self.keys {
            if !behind.is_empty() {
                lossy.push(Rc::clone(key));
                lost.extend(behind.drain(..).map(|publication| publication.handle));
            }
        }
        for key in idle {
            self.keys.remove(&key);
        }
        for key in lossy {
            self.record_failure(key);
        }
        self.waiting = 0;
        lost
    }

    fn record_failure(&mut self, key: Key) {
        self.failures += 1;
        self.failed.insert(key, self.failures);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Properties;
    use proptest::prelude::*;

    fn message(handle: u64, key: Option<&str>) -> Publication {
        Publication {
            handle,
            exchange: crate::Text::default(),
            routing_key: crate::Text::default(),
            key: key.map(Into::into),
            properties: Properties::default(),
            body: Vec::new(),
        }
    }

    fn next(order: &mut Order) -> Option<u64> {
        order.next().map(|(publication, _)| publication.handle)
    }

    #[test]
    fn a_key_goes_one_by_one_and_others_pass() {
        let mut order = Order::default();
        let batch = [(1, Some("a")), (2, Some("a")), (3, None), (4, Some("b"))];
        assert!(
            order
                .take(batch.map(|(handle, key)| message(handle, key)).into(), 0)
                .is_empty()
        );
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
    fn nothing_of_a_failed_key_goes_until_the_worker_has_heard_of_it() {
        let mut order = Order::default();
        order.take(vec![message(1, Some("a")), message(2, Some("a"))], 0);
        assert_eq!(next(&mut order), Some(1));
        assert_eq!(order.failed(Some("a".into())), [2]);
        assert_eq!(order.failures(), 1);
        // Handed over before the worker heard.
        assert_eq!(order.take(vec![message(3, Some("a")), message(4, Some("b"))], 0), [3]);
        assert_eq!(next(&mut order), Some(4));
        // It has heard of the first, not of the loss of 3.
        assert_eq!(order.take(vec![message(5, Some("a"))], 1), [5]);
        assert!(order.take(vec![message(6, Some("a"))], order.failures()).is_empty());
        assert_eq!(next(&mut order), Some(6));
        assert!(order.failed.is_empty());
    }

    #[test]
    fn a_key_with_a_message_on_its_way_stays_closed_when_the_rest_is_lost() {
        let mut order = Order::default();
        let batch = [(1, Some("a")), (2, Some("a")), (3, None), (4, Some("b"))];
        order.take(batch.map(|(handle, key)| message(handle, key)).into(), 0);
        assert_eq!(next(&mut order), Some(1));
        let mut lost = order.lose_waiting();
        lost.sort_unstable();
        assert_eq!((lost, order.waiting(), order.failures()), (vec![2, 3, 4], 0, 2));
        assert!(order.take(vec![message(5, Some("a"))], order.failures()).is_empty());
        assert_eq!(next(&mut order), None, "1 is on its way still");
        order.confirmed(Some("a".into()));
        assert_eq!(next(&mut order), Some(5));
    }

    proptest! {
        /// Batches, ends and hearings in any order: each message is sent or given back once; of a key one at a time, in
        /// order, and none between a failure and the hearing of it.
        #[test]
        fn whatever_happens_a_key_stays_in_order(steps in prop::collection::vec((0u8..6, 0u8..4, any::<bool>()), 1..200)) {
            let mut order = Order::default();
            let (mut handed, mut heard) = (0u64, 0u64);
            let mut on_the_way: Vec<(u64, Option<Key>)> = Vec::new();
            let mut keys: HashMap<String, (u64, bool)> = HashMap::new(); // last sent, and closed by a failure
            let mut ended = std::collections::HashSet::new();
            for (step, which, good) in steps {
                match step {
                    0 | 1 => {
                        let batch: Vec<_> = (0..=u64::from(which)).map(|n| {
                            handed += 1;
                            message(handed, ["a", "b"].get((handed + n) as usize % 3).copied())
                        }).collect();
                        let by_handle: HashMap<u64, Option<String>> = batch.iter().map(|p| (p.handle, p.key.clone())).collect();
                        for lost in order.take(batch, heard) {
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
                                keys.entry(key.to_string()).or_default().1 = true;
                            }
                            for lost in order.failed(key) {
                                prop_assert!(ended.insert(lost));
                            }
                        }
                    }
                    5 if good => {
                        heard = order.failures();
                        keys.values_mut().for_each(|(_, closed)| *closed = false);
                    }
                    5 => {
                        let before: Vec<String> = order.keys.iter().filter(|(_, w)| !w.is_empty()).map(|(k, _)| k.to_string()).collect();
                        for lost in order.lose_waiting() {
                            prop_assert!(ended.insert(lost));
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
                for lost in order.failed(key) {
                    prop_assert!(ended.insert(lost));
                }
            }
            prop_assert_eq!(ended.len() as u64, handed);
            prop_assert_eq!(order.waiting(), 0);
        }
    }
}
