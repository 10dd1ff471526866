//! Decides which claimed message may be sent now, so that the messages of one key arrive in order, also if one of them
//! fails. Only [`crate::engine`] calls it; it knows no tables and no clock.
//!
//! The messages of a key are pipelined: all claimed ones are sent, in order. They also end in order: a confirmed one is
//! settled only when all before it are. If one fails, the answers for those behind it are awaited. Then the failed one
//! and everything behind it goes to `outbox_waiting`, and is sent again from there: the failed one alone first, the
//! others after it is published. Behind a dead letter they stay until a person decides, if dead letters block.
//!
//! If a whole partition is one order, only the failed message goes to `outbox_waiting`. The others stay in `outbox`,
//! released, and [`crate::engine`] reads the lane no further than the failed one.
//!
//! A message is *parked* (claimed, in memory, not sent) while a transaction is open that has enqueued an earlier one of
//! its key, and while earlier ones come back from `outbox_waiting`.

use crate::message::{Outcome, Pointer};
use crate::partition::Partition;
use crate::settle::{Disposition, Ordering};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::rc::Rc;

/// The worker's number for one claimed message.
pub type Handle = u64;

/// The unit of order: the messages of one key for one destination, or all of its messages in a partition.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct OrderedKey {
    pub partition: Partition,
    pub destination: String,
    /// None: the whole partition.
    pub key: Option<String>,
}

impl OrderedKey {
    /// The key of a message; None if it has no order.
    pub fn of(pointer: &Pointer, ordering: Ordering) -> Option<Self> {
        let key = match ordering {
            Ordering::Key => Some(pointer.key.clone()?),
            Ordering::Partition => None,
            Ordering::None => return None,
        };
        Some(Self {
            partition: pointer.partition,
            destination: pointer.destination.clone(),
            key,
        })
    }

    /// As one text, for a transport that sends several messages at a time.
    pub fn name(&self) -> String {
        self.key.clone().unwrap_or_else(|| self.partition.label())
    }
}

/// The bound of a lane that must not be read.
const NOWHERE: i64 = i64::MIN;

/// The outcome of messages behind a failed one if a partition is one order.
fn behind_another() -> Disposition {
    let reason = "an earlier message of its partition failed".into();
    Disposition::Release { reason }
}

/// What to do with a message that was just claimed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// To the broker.
    Go,
    /// Kept in memory; [`KeyOrder::unpark`] or [`KeyOrder::drained`] releases it.
    Park,
    /// To `outbox_waiting`, behind the failed one of its key.
    Wait,
}

/// A key that is blocked or has messages in `outbox_waiting`, according to the tables.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    pub key: OrderedKey,
    /// The only message that may pass: it failed and waits for its time, or is a dead letter that blocks.
    pub blocker: Option<i64>,
    /// Others wait behind it.
    pub followers: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum KeyState {
    Open,
    /// One of the run failed; the answers for the rest of it are awaited.
    Stopping,
    /// Only this seq may pass.
    Blocked {
        blocker: i64,
    },
    /// Messages in `outbox_waiting` come back first.
    Draining,
}

#[derive(Debug)]
struct Sent {
    handle: Handle,
    seq: i64,
    outcome: Option<Outcome>,
}

impl Sent {
    fn has_failed(&self) -> bool {
        self.outcome.as_ref().is_some_and(|outcome| !outcome.is_passed())
    }
}

#[derive(Debug)]
struct Tracked {
    state: KeyState,
    /// With the publisher, in the order sent.
    run: VecDeque<Sent>,
    /// By seq.
    parked: BTreeMap<i64, Handle>,
    /// `outbox_waiting` may hold messages of this key that wait behind another.
    followers: bool,
}

impl Tracked {
    fn new(state: KeyState, followers: bool) -> Self {
        Self {
            state,
            run: VecDeque::new(),
            parked: BTreeMap::new(),
            followers,
        }
    }

    fn is_plain(&self) -> bool {
        self.state == KeyState::Open && self.run.is_empty() && self.parked.is_empty()
    }

    fn send(&mut self, handle: Handle, seq: i64) {
        let outcome = None;
        self.run.push_back(Sent { handle, seq, outcome });
    }

    /// The state after the first message of the run no longer blocks.
    fn next_state(&self) -> KeyState {
        if self.run.iter().any(Sent::has_failed) {
            KeyState::Stopping
        } else if self.followers {
            KeyState::Draining
        } else {
            KeyState::Open
        }
    }

    /// Sends parked messages up to `bound`, while each may be sent.
    fn send_parked(&mut self, bound: i64, may_go: impl Fn(i64) -> bool, go: &mut Vec<Handle>) {
        while let Some((&seq, &handle)) = self.parked.first_key_value() {
            if seq > bound || !may_go(seq) {
                return;
            }
            self.parked.remove(&seq);
            self.send(handle, seq);
            go.push(handle);
        }
    }

    /// Gives up all parked messages.
    fn give_up_parked(&mut self) -> impl Iterator<Item = Handle> + use<> {
        std::mem::take(&mut self.parked).into_values()
    }
}

/// The order of the keys of one worker. A key without messages under way and without a failure takes no memory.
#[derive(Debug, Default)]
pub struct KeyOrder {
    keys: HashMap<Rc<OrderedKey>, Tracked>,
    sent: HashMap<Handle, Rc<OrderedKey>>,
    parked: usize,
    /// No key drains unless this is set.
    may_drain: bool,
}

impl KeyOrder {
    /// False: no message must be fetched from `outbox_waiting`.
    pub fn may_drain(&self) -> bool {
        self.may_drain
    }

    /// How many messages are parked.
    pub fn parked(&self) -> usize {
        self.parked
    }

    /// How many keys take memory.
    pub fn keys(&self) -> usize {
        self.keys.len()
    }

    /// A message was claimed. `held`: a transaction is open that has enqueued an earlier one of its key.
    pub fn admit(&mut self, handle: Handle, key: OrderedKey, seq: i64, held: bool) -> Admission {
        let key = Rc::new(key);
        let tracked = self
            .keys
            .entry(Rc::clone(&key))
            .or_insert_with(|| Tracked::new(KeyState::Open, false));
        let admission = match tracked.state {
            KeyState::Open if !held && tracked.parked.is_empty() => Admission::Go,
            KeyState::Open | KeyState::Stopping | KeyState::Draining => Admission::Park,
            KeyState::Blocked { blocker } if seq == blocker && tracked.run.is_empty() => Admission::Go,
            KeyState::Blocked { .. } => Admission::Wait,
        };
        match admission {
            Admission::Go => {
                tracked.send(handle, seq);
                self.sent.insert(handle, key);
            }
            Admission::Park => {
                tracked.parked.insert(seq, handle);
                self.parked += 1;
            }
            Admission::Wait => tracked.followers = true,
        }
        admission
    }

    /// Whether a message was sent to the broker, or may be sent.
    pub fn is_sent(&self, handle: Handle) -> bool {
        self.sent.contains_key(&handle)
    }

    /// Whether it is sent alone, as the first of a blocked key.
    pub fn is_first(&self, handle: Handle) -> bool {
        let tracked = self.sent.get(&handle).and_then(|key| self.keys.get(key));
        tracked.is_some_and(|tracked| matches!(tracked.state, KeyState::Blocked { .. }))
    }

    /// The other messages of its key that are with the publisher and have no answer yet.
    pub fn unanswered_beside(&self, handle: Handle) -> impl Iterator<Item = Handle> {
        let tracked = self.sent.get(&handle).and_then(|key| self.keys.get(key));
        let run = tracked.into_iter().flat_map(|tracked| &tracked.run);
        run.filter(move |sent| sent.handle != handle && sent.outcome.is_none())
            .map(|sent| sent.handle)
    }

    /// A message failed, or is about to end as failed: those behind it that are still `unsent` are parked, and
    /// returned.
    pub fn hold_back(&mut self, handle: Handle, unsent: impl Fn(Handle) -> bool) -> Vec<Handle> {
        let Some(tracked) = self.sent.get(&handle).and_then(|key| self.keys.get_mut(key)) else {
            return Vec::new();
        };
        let Some(failed) = tracked.run.iter().position(|sent| sent.handle == handle) else {
            return Vec::new();
        };
        let behind = tracked.run.iter().skip(failed + 1);
        let sent = behind
            .take_while(|sent| sent.outcome.is_some() || !unsent(sent.handle))
            .count();
        let mut held_back = Vec::new();
        for sent in tracked.run.drain(failed + 1 + sent..) {
            self.sent.remove(&sent.handle);
            tracked.parked.insert(sent.seq, sent.handle);
            held_back.push(sent.handle);
        }
        self.parked += held_back.len();
        held_back
    }

    /// The broker's answer for one message. Returns the messages that end now, in the order of the key: often only this
    /// one, none while an earlier one has no answer, more if others waited for it. `decide` is called for each that
    /// ends with its own outcome. `dead_blocks`: behind a dead letter the key stays blocked.
    pub fn on_outcome(
        &mut self,
        handle: Handle,
        outcome: &Outcome,
        dead_blocks: bool,
        mut decide: impl FnMut(Handle, &Outcome) -> Disposition,
    ) -> Vec<(Handle, Disposition)> {
        let Some(key) = self.sent.get(&handle).map(Rc::clone) else {
            return vec![(handle, decide(handle, outcome))]; // without a key: no message waits for it
        };
        let Some(tracked) = self.keys.get_mut(&key) else {
            return Vec::new();
        };
        if let Some(sent) = tracked.run.iter_mut().find(|sent| sent.handle == handle) {
            sent.outcome = Some(outcome.clone());
        }
        if matches!(tracked.state, KeyState::Open | KeyState::Draining) && tracked.run.iter().any(Sent::has_failed) {
            tracked.state = KeyState::Stopping;
        }
        let mut ended = Vec::new();
        while let Some(Sent {
            handle: front,
            seq,
            outcome: Some(outcome),
        }) = tracked.run.front()
        {
            let (front, seq) = (*front, *seq);
            if !outcome.is_passed() && tracked.run.iter().any(|sent| sent.outcome.is_none()) {
                break;
            }
            let disposition = decide(front, outcome);
            tracked.run.pop_front();
            self.sent.remove(&front);
            let stops = match &disposition {
                Disposition::Retry { .. } => true,
                Disposition::Dead { .. } => dead_blocks,
                Disposition::Release { .. } => {
                    // A fault of the destination: all of the key is released, and its state is as before.
                    let reason = disposition.clone();
                    for sent in tracked.run.drain(..) {
                        self.sent.remove(&sent.handle);
                        ended.push((sent.handle, reason.clone()));
                    }
                    self.parked -= tracked.parked.len();
                    ended.extend(tracked.give_up_parked().map(|parked| (parked, reason.clone())));
                    ended.push((front, disposition));
                    if tracked.state == KeyState::Stopping {
                        tracked.state = tracked.next_state();
                    }
                    break;
                }
                Disposition::Publish | Disposition::Expire | Disposition::Wait => false,
            };
            ended.push((front, disposition));
            if stops {
                let (stay, state) = match &key.key {
                    Some(_) => (Disposition::Wait, KeyState::Blocked { blocker: seq }),
                    None => (behind_another(), KeyState::Open),
                };
                let behind = ended.len();
                for sent in tracked.run.drain(..) {
                    self.sent.remove(&sent.handle);
                    ended.push((sent.handle, stay.clone()));
                }
                self.parked -= tracked.parked.len();
                ended.extend(tracked.give_up_parked().map(|parked| (parked, stay.clone())));
                tracked.followers |= key.key.is_some() && ended.len() > behind;
                tracked.state = state;
            } else if !matches!(tracked.state, KeyState::Open | KeyState::Draining) {
                tracked.state = tracked.next_state();
            }
        }
        self.may_drain |= tracked.state == KeyState::Draining;
        if tracked.is_plain() {
            self.keys.remove(&key);
        }
        ended
    }

    /// Releases parked messages of unblocked keys for which `may_go` holds, in order; the key that has waited longest
    /// comes first.
    pub fn unpark(&mut self, may_go: impl Fn(&OrderedKey, i64) -> bool) -> Vec<Handle> {
        if self.parked == 0 {
            return Vec::new();
        }
        let mut runs = Vec::new();
        for (key, tracked) in &mut self.keys {
            if tracked.state == KeyState::Open {
                let mut go = Vec::new();
                tracked.send_parked(i64::MAX, |seq| may_go(key, seq), &mut go);
                self.sent.extend(go.iter().map(|handle| (*handle, Rc::clone(key))));
                self.parked -= go.len();
                runs.push(go);
            }
        }
        runs.sort_unstable(); // the order of a map is arbitrary
        runs.concat()
    }

    /// Keys whose messages are to be fetched from `outbox_waiting`.
    pub fn draining(&mut self) -> Vec<OrderedKey> {
        if !self.may_drain {
            return Vec::new();
        }
        let mut keys: Vec<OrderedKey> = (self.keys.iter())
            .filter(|(_, tracked)| tracked.state == KeyState::Draining)
            .map(|(key, _)| OrderedKey::clone(key))
            .collect();
        self.may_drain = !keys.is_empty();
        keys.sort_unstable(); // the order of a map is arbitrary
        keys
    }

    /// `rows` of a key were claimed from `outbox_waiting`, the first ones by seq. `full`: as many as were asked for;
    /// `more`: others are still there. Returns those that may be sent now, including parked ones.
    pub fn drained(
        &mut self,
        key: &OrderedKey,
        rows: &[(Handle, i64)],
        full: bool,
        more: bool,
        may_go: impl Fn(i64) -> bool,
    ) -> Vec<Handle> {
        let mut go = Vec::new();
        let Some((key, tracked)) = self
            .keys
            .get_key_value(key)
            .map(|(key, _)| Rc::clone(key))
            .and_then(|key| {
                let tracked = self.keys.get_mut(&key)?;
                Some((key, tracked))
            })
        else {
            return go;
        };
        tracked.parked.extend(rows.iter().map(|(handle, seq)| (*seq, *handle)));
        self.parked += rows.len();
        // After the last row of a full batch another may come before the parked ones.
        let bound = match rows.last() {
            Some((_, last)) if full => *last,
            _ => i64::MAX,
        };
        tracked.send_parked(bound, may_go, &mut go);
        self.parked -= go.len();
        self.sent.extend(go.iter().map(|handle| (*handle, Rc::clone(&key))));
        if !more {
            tracked.followers = false;
            tracked.state = KeyState::Open;
            if tracked.is_plain() {
                self.keys.remove(&key);
            }
        }
        go
    }

    /// Gives up the messages of the key with the most parked ones, because too many are parked: they go to
    /// `outbox_waiting`. Those of a partition go back to `outbox`, except the first, which keeps the lane from being
    /// read again. If none is returned, none is left to give up.
    pub fn evict(&mut self) -> Vec<Handle> {
        self.may_drain = true;
        let most = (self.keys.iter_mut())
            .filter(|(key, tracked)| tracked.parked.len() > usize::from(key.key.is_none()))
            .max_by_key(|(key, tracked)| (tracked.parked.len(), Rc::clone(key)));
        let Some((key, tracked)) = most else {
            return Vec::new();
        };
        let first = match key.key {
            Some(_) => None,
            None => tracked.parked.pop_first(),
        };
        let evict: Vec<Handle> = tracked.give_up_parked().collect();
        tracked.parked.extend(first);
        self.parked -= evict.len();
        if key.key.is_none() {
            return evict;
        }
        tracked.followers |= !evict.is_empty();
        if tracked.state == KeyState::Open {
            tracked.state = tracked.next_state();
        }
        evict
    }

    /// Takes over what the tables say of the keys of the partitions in `scope`, read while only published messages were
    /// unsettled. `read_past` says whether the lane has been read past a seq: a blocking message that should have been
    /// seen by then is gone. Returns whether there is one that may be in flight or gone: then the tables must be read
    /// again.
    pub fn rebuild(
        &mut self,
        scope: impl Fn(Partition) -> bool,
        found: Vec<Found>,
        read_past: impl Fn(Partition, i64) -> bool,
    ) -> bool {
        self.may_drain = true;
        let mut undecided = false;
        let mut found: HashMap<OrderedKey, (Option<i64>, bool)> = (found.into_iter())
            .map(|found| (found.key, (found.blocker, found.followers)))
            .collect();
        for (key, tracked) in &mut self.keys {
            if !scope(key.partition) {
                continue;
            }
            let (blocker, followers) = found.remove(key.as_ref()).unwrap_or((None, false));
            tracked.followers = followers;
            if !tracked.run.is_empty() || tracked.state == KeyState::Stopping {
                continue;
            }
            let on_its_way =
                matches!(tracked.state, KeyState::Blocked { blocker } if !read_past(key.partition, blocker));
            match blocker {
                Some(blocker) if !on_its_way => tracked.state = KeyState::Blocked { blocker },
                None if !on_its_way => tracked.state = tracked.next_state(),
                _ => {
                    undecided |=
                        tracked.state != blocker.map_or(KeyState::Open, |blocker| KeyState::Blocked { blocker })
                }
            }
        }
        self.keys.retain(|_, tracked| !tracked.is_plain());
        for (key, (blocker, followers)) in found {
            let state = match blocker {
                Some(blocker) => KeyState::Blocked { blocker },
                None => KeyState::Draining,
            };
            self.keys.insert(Rc::new(key), Tracked::new(state, followers));
        }
        undecided
    }

    /// If a partition is one order: how far its lane is worth reading until a message ends. Messages past the parked
    /// ones would be parked, too.
    pub fn bounds(&self) -> HashMap<Partition, i64> {
        let bound = |(key, tracked): (&Rc<OrderedKey>, &Tracked)| {
            let bound = match (&key.key, tracked.state) {
                (None, KeyState::Stopping) | (Some(_), KeyState::Draining) => Some(NOWHERE),
                (None, _) => tracked.parked.keys().next().copied(),
                (Some(_), _) => None,
            };
            Some((key.partition, bound?))
        };
        let mut bounds = HashMap::new();
        for (partition, bound) in self.keys.iter().filter_map(bound) {
            let known = bounds.entry(partition).or_insert(bound);
            *known = bound.min(*known);
        }
        bounds
    }

    /// Forgets keys without messages under way: from now on the partition is one order.
    pub fn forget_keys(&mut self) {
        self.keys
            .retain(|key, tracked| key.key.is_none() || !(tracked.run.is_empty() && tracked.parked.is_empty()));
    }

    /// Gives up parked messages of the partitions in `scope`: another worker shall have them.
    pub fn give_up_parked(&mut self, scope: impl Fn(Partition) -> bool) -> Vec<Handle> {
        let mut given_up = Vec::new();
        for (_, tracked) in self.keys.iter_mut().filter(|(key, _)| scope(key.partition)) {
            given_up.extend(tracked.give_up_parked());
        }
        self.parked -= given_up.len();
        given_up.sort_unstable();
        given_up
    }

    /// Forgets the keys of the partitions in `scope`: their lease is lost. Returns the messages that had their answer
    /// and waited for that of an earlier one: no further outcome will come for them.
    pub fn forget(&mut self, scope: impl Fn(Partition) -> bool) -> Vec<Handle> {
        let mut answered = Vec::new();
        self.keys.retain(|key, tracked| {
            let stays = !scope(key.partition);
            if !stays {
                let run = tracked.run.iter().filter(|sent| sent.outcome.is_some());
                answered.extend(run.map(|sent| sent.handle));
            }
            stays
        });
        self.sent.retain(|_, key| !scope(key.partition));
        self.parked = self.keys.values().map(|tracked| tracked.parked.len()).sum();
        answered
    }

    /// Forgets all messages under way; failed ones stay blocked. Called after the connection was lost and all messages
    /// were released.
    pub fn forget_sent(&mut self) {
        self.may_drain = true;
        for tracked in self.keys.values_mut() {
            tracked.run.clear();
            tracked.parked.clear();
            if tracked.state == KeyState::Stopping {
                tracked.state = tracked.next_state();
            }
        }
        self.sent.clear();
        self.parked = 0;
        self.keys.retain(|_, tracked| !tracked.is_plain());
    }
}

#[cfg(test)]
mod tests;
