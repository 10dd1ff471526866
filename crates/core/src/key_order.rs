//! Decides which claimed message may go to the broker now, so that the messages of one key arrive in order even if one
//! of them fails. Only [`crate::engine`] calls it, on the worker's main thread. It uses no table and no clock.
//!
//! The messages of a key are pipelined: all claimed ones are sent, in order. They also end in order: a confirmed
//! message is settled only when all messages before it are. If a message fails, the worker first waits for the outcomes
//! of the messages behind it. Then the failed message and all messages behind it go to `outbox_waiting`. From there the
//! failed one is sent again alone, and the others follow once it has gone through. If dead letters block, the messages
//! behind a dead letter stay there until an operator decides.
//!
//! If the unit of order is a whole partition, only the failed message goes to `outbox_waiting`. The others are released
//! and stay in `outbox`, and [`crate::engine`] reads the lane only up to the failed one.
//!
//! If a transport sends the messages of a key one by one, only some of a key are claimed at a time: those behind them
//! would take the places of other keys' messages and could not go. They go to `outbox_waiting` and are fetched when the
//! first ones have ended. A partition that is one order is then read only as far.
//!
//! A *parked* message is claimed and kept in memory, and not sent. A message is parked while a transaction is open that
//! has enqueued an earlier message of its key, and while earlier messages come back from `outbox_waiting`.

use crate::message::{Outcome, Pointer};
use crate::partition::Partition;
use crate::settle::{Disposition, Ordering};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::hash::{Hash, Hasher};
use std::rc::Rc;
use std::sync::Arc;

/// The number that a worker gives to one claimed message. It is unique within the worker's destination and grows.
pub type MessageHandle = u64;

/// A unit of order: the messages of one key for one destination, or all messages of one partition for one destination.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct OrderedKey {
    pub partition: Partition,
    pub destination: Arc<str>,
    /// None = the unit is the whole partition.
    pub key: Option<String>,
}

/// Without the destination: a worker keeps those of one destination together.
impl Hash for OrderedKey {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (self.partition, &self.key).hash(state);
    }
}

impl OrderedKey {
    /// The unit of order of a message; None if it has none.
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

    /// The name of the unit of order of a message: its key, or the label of its partition; None if it has none. A
    /// transport that sends several messages at a time orders them by it.
    pub fn name_of(pointer: &Pointer, ordering: Ordering) -> Option<String> {
        match ordering {
            Ordering::Key => pointer.key.clone(),
            Ordering::Partition => Some(pointer.partition.label()),
            Ordering::None => None,
        }
    }
}

/// The bound of a lane that must not be read at all.
const NOWHERE: i64 = i64::MIN;

/// The disposition of messages behind a failed one if the unit of order is a partition.
fn release_behind_failed() -> Disposition {
    let reason = "an earlier message of its partition failed".into();
    Disposition::Release { reason }
}

/// What to do with a message that was just claimed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// Send it to the broker.
    Go,
    /// Keep it in memory until [`KeyOrder::unpark`] or [`KeyOrder::drained`] lets it go.
    Park,
    /// Move it to `outbox_waiting`, behind the failed message of its key.
    Wait,
}

/// A key that is blocked according to the tables, or that has messages in `outbox_waiting`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockedKey {
    pub key: OrderedKey,
    /// The seq of the only message that may be sent: it failed and waits for its retry, or is a dead letter that
    /// blocks.
    pub blocker: Option<i64>,
    /// Whether messages of the key wait in `outbox_waiting` behind another.
    pub followers: bool,
}

/// A key whose messages are to be fetched from `outbox_waiting`.
#[derive(Clone, Debug)]
pub struct DrainingKey {
    pub key: OrderedKey,
    /// None of them has a lower seq, as far as is known; MAX = it is not known.
    pub first: i64,
    /// How many of them may be fetched.
    pub room: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum KeyState {
    /// Claimed messages may be sent.
    Open,
    /// A message of the run failed; the outcomes of the rest of the run are awaited.
    Stopping,
    /// Only the message with the seq `blocker` may be sent.
    Blocked { blocker: i64 },
    /// The messages in `outbox_waiting` must come back first.
    Draining,
}

/// What a message that ends means for those behind it.
enum Behind {
    Go,
    /// They wait for it, if it has a key.
    Stay,
    /// They are released as it is, because the destination failed and not the message. A blocked key stays blocked.
    GoBack,
}

impl Behind {
    fn of(disposition: &Disposition, dead_blocks: bool) -> Self {
        match disposition {
            Disposition::Retry { .. } | Disposition::Defer { .. } => Self::Stay,
            Disposition::Dead { .. } if dead_blocks => Self::Stay,
            Disposition::Release { .. } => Self::GoBack,
            Disposition::Dead { .. }
            | Disposition::Publish
            | Disposition::Expire
            | Disposition::Discard { .. }
            | Disposition::Wait => Self::Go,
        }
    }
}

/// A message of a run, with its outcome once that has arrived.
#[derive(Debug)]
struct SentMessage {
    handle: MessageHandle,
    seq: i64,
    outcome: Option<Outcome>,
}

impl SentMessage {
    fn has_failed(&self) -> bool {
        self.outcome.as_ref().is_some_and(|outcome| !outcome.is_passed())
    }
}

/// The state of one unit of order.
#[derive(Debug)]
struct Tracked {
    state: KeyState,
    /// The messages that may be sent or were sent, and have not ended, in the order of sending.
    run: VecDeque<SentMessage>,
    /// The parked messages by seq.
    parked: BTreeMap<i64, MessageHandle>,
    /// `outbox_waiting` may hold messages of this key that wait behind another.
    followers: bool,
    /// The first of them has this seq or a higher one, as far as is known; MAX = it is not known.
    first_follower: i64,
}

impl Tracked {
    fn new(state: KeyState, followers: bool) -> Self {
        Self {
            state,
            run: VecDeque::new(),
            parked: BTreeMap::new(),
            followers,
            first_follower: i64::MAX,
        }
    }

    /// The number of its messages in flight.
    fn len(&self) -> usize {
        self.run.len() + self.parked.len()
    }

    /// A message of the key goes to `outbox_waiting`.
    fn follow(&mut self, seq: i64) {
        self.first_follower = match self.followers {
            true => self.first_follower.min(seq),
            false => seq,
        };
        self.followers = true;
    }

    /// Whether there is nothing to remember about the key.
    fn is_plain(&self) -> bool {
        self.state == KeyState::Open && self.run.is_empty() && self.parked.is_empty()
    }

    fn send(&mut self, handle: MessageHandle, seq: i64) {
        let outcome = None;
        self.run.push_back(SentMessage { handle, seq, outcome });
    }

    /// Takes the outcome of a message of the run.
    fn record(&mut self, handle: MessageHandle, outcome: &Outcome) {
        if let Some(sent) = self.run.iter_mut().find(|sent| sent.handle == handle) {
            sent.outcome = Some(outcome.clone());
        }
        if matches!(self.state, KeyState::Open | KeyState::Draining) && self.run.iter().any(SentMessage::has_failed) {
            self.state = KeyState::Stopping;
        }
    }

    /// Removes and returns the front of the run if it ends now, with its seq and what `decide` says. A failed one waits
    /// for the outcomes of all behind it.
    fn end_front(
        &mut self,
        decide: &mut impl FnMut(MessageHandle, &Outcome) -> Disposition,
    ) -> Option<(MessageHandle, i64, Disposition)> {
        let front = self.run.front()?;
        let outcome = front.outcome.as_ref()?;
        if !outcome.is_passed() && self.run.iter().any(|sent| sent.outcome.is_none()) {
            return None;
        }
        let disposition = decide(front.handle, outcome);
        let SentMessage { handle, seq, .. } = self.run.pop_front()?;
        Some((handle, seq, disposition))
    }

    /// Its message with this seq failed. Blocks it if it is a key. Returns the disposition of the messages behind.
    fn stop_behind(&mut self, seq: i64, unit: &OrderedKey) -> Disposition {
        if unit.key.is_none() {
            self.state = KeyState::Open;
            return release_behind_failed();
        }
        let first = self.run.front().map(|sent| sent.seq);
        if let Some(first) = first.or_else(|| self.parked.keys().next().copied()) {
            self.follow(first);
        }
        self.state = KeyState::Blocked { blocker: seq };
        Disposition::Wait
    }

    /// The state of the key once the front of its run no longer blocks it.
    fn next_state(&self) -> KeyState {
        if self.run.iter().any(SentMessage::has_failed) {
            KeyState::Stopping
        } else if self.followers {
            KeyState::Draining
        } else {
            KeyState::Open
        }
    }

    /// Moves parked messages with a seq up to `bound` to the run and to `unparked`, until the first one that may not go.
    fn send_parked(&mut self, bound: i64, may_go: impl Fn(i64) -> bool, unparked: &mut Vec<MessageHandle>) {
        while let Some((&seq, &handle)) = self.parked.first_key_value() {
            if seq > bound || !may_go(seq) {
                return;
            }
            self.parked.remove(&seq);
            self.send(handle, seq);
            unparked.push(handle);
        }
    }

    /// Removes and returns all messages: the run, then the parked ones.
    fn give_up_all(&mut self) -> impl Iterator<Item = MessageHandle> {
        let parked = self.give_up_parked();
        self.run.drain(..).map(|sent| sent.handle).chain(parked)
    }

    /// Removes and returns all parked messages.
    fn give_up_parked(&mut self) -> impl Iterator<Item = MessageHandle> + use<> {
        std::mem::take(&mut self.parked).into_values()
    }
}

/// The order of the messages of one worker for one destination. Keys without messages in flight and without failed ones
/// take no memory.
#[derive(Debug)]
pub struct KeyOrder {
    keys: foldhash::HashMap<Rc<OrderedKey>, Tracked>,
    /// The messages of all runs, with their keys.
    sent: foldhash::HashMap<MessageHandle, Rc<OrderedKey>>,
    /// The number of parked messages of all keys.
    parked: usize,
    /// Whether a key may be draining. False saves a walk over all keys.
    may_drain: bool,
    /// Whether a key may be blocked. False saves lookups for each message.
    may_block: bool,
    /// The most messages of a key that are in flight.
    most_of_a_key: usize,
}

impl Default for KeyOrder {
    fn default() -> Self {
        Self {
            keys: foldhash::HashMap::default(),
            sent: foldhash::HashMap::default(),
            parked: 0,
            may_drain: false,
            may_block: false,
            most_of_a_key: usize::MAX,
        }
    }
}

impl KeyOrder {
    /// The number of parked messages.
    pub fn parked(&self) -> usize {
        self.parked
    }

    /// Whether a key of the partition is blocked by a message from this seq on.
    pub fn has_blocker(&self, partition: Partition, seq: i64) -> bool {
        let is_it = |(key, tracked): (&Rc<OrderedKey>, &Tracked)| {
            key.partition == partition && matches!(tracked.state, KeyState::Blocked { blocker } if blocker >= seq)
        };
        self.may_block && self.keys.iter().any(is_it)
    }

    /// The number of keys that take memory.
    pub fn keys(&self) -> usize {
        self.keys.len()
    }

    /// Sets how many messages of one key are sent or parked from now on; MAX = any number.
    pub fn set_most_of_a_key(&mut self, most: usize) {
        self.most_of_a_key = most;
    }

    /// Decides what to do with a claimed message. `held`: it is held by an open transaction, which has enqueued an
    /// earlier message of its key.
    pub fn admit(&mut self, handle: MessageHandle, key: OrderedKey, seq: i64, held: bool) -> Admission {
        let key = Rc::new(key);
        let tracked = self
            .keys
            .entry(Rc::clone(&key))
            .or_insert_with(|| Tracked::new(KeyState::Open, false));
        let is_bounded = key.key.is_some() && self.most_of_a_key < usize::MAX;
        let admission = match tracked.state {
            KeyState::Open | KeyState::Stopping if is_bounded && tracked.len() >= self.most_of_a_key => Admission::Wait,
            KeyState::Draining if is_bounded => Admission::Wait, // in memory it could not go before those
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
            Admission::Wait => {
                tracked.follow(seq);
                if tracked.state == KeyState::Open {
                    tracked.state = KeyState::Draining;
                    self.may_drain = true;
                }
            }
        }
        admission
    }

    /// Whether the message was sent to the broker or may be sent, and has not ended.
    pub fn is_sent(&self, handle: MessageHandle) -> bool {
        self.sent.contains_key(&handle)
    }

    fn tracked(&self, handle: MessageHandle) -> Option<&Tracked> {
        self.sent.get(&handle).and_then(|key| self.keys.get(key))
    }

    /// Whether the message is sent alone, as the blocker of its key.
    pub fn is_first(&self, handle: MessageHandle) -> bool {
        self.may_block
            && (self.tracked(handle)).is_some_and(|tracked| matches!(tracked.state, KeyState::Blocked { .. }))
    }

    /// The other messages in the run of its key that have no outcome yet.
    pub fn unanswered_beside(&self, handle: MessageHandle) -> impl Iterator<Item = MessageHandle> {
        let run = self.tracked(handle).into_iter().flat_map(|tracked| &tracked.run);
        run.filter(move |sent| sent.handle != handle && sent.outcome.is_none())
            .map(|sent| sent.handle)
    }

    /// Called when a message failed. Parks the messages of the run behind it that are still `unsent`, and returns them.
    pub fn hold_back(&mut self, handle: MessageHandle, unsent: impl Fn(MessageHandle) -> bool) -> Vec<MessageHandle> {
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

    /// Takes the outcome of one message. Returns the messages that end now, in the order of the key. Often that is the
    /// message alone; none while an earlier message has no outcome; several if they waited for this one. `decide` is
    /// called for each message that ends by its own outcome. `dead_blocks`: the key stays blocked behind a dead letter.
    pub fn on_outcome(
        &mut self,
        handle: MessageHandle,
        outcome: &Outcome,
        dead_blocks: bool,
        mut decide: impl FnMut(MessageHandle, &Outcome) -> Disposition,
    ) -> Vec<(MessageHandle, Disposition)> {
        let Some(key) = self.sent.get(&handle).map(Rc::clone) else {
            return vec![(handle, decide(handle, outcome))]; // without an order: no message waits for it
        };
        let Some(tracked) = self.keys.get_mut(&key) else {
            return Vec::new();
        };
        tracked.record(handle, outcome);
        let mut ended = Vec::new();
        while let Some((front, seq, disposition)) = tracked.end_front(&mut decide) {
            self.sent.remove(&front);
            match Behind::of(&disposition, dead_blocks) {
                Behind::Go => {
                    ended.push((front, disposition));
                    if !matches!(tracked.state, KeyState::Open | KeyState::Draining) {
                        tracked.state = tracked.next_state();
                    }
                }
                Behind::Stay => {
                    ended.push((front, disposition));
                    let stay = tracked.stop_behind(seq, &key);
                    self.parked -= tracked.parked.len();
                    for handle in tracked.give_up_all() {
                        self.sent.remove(&handle);
                        ended.push((handle, stay.clone()));
                    }
                    self.may_block |= matches!(tracked.state, KeyState::Blocked { .. });
                }
                Behind::GoBack => {
                    self.parked -= tracked.parked.len();
                    for handle in tracked.give_up_all() {
                        self.sent.remove(&handle);
                        ended.push((handle, disposition.clone()));
                    }
                    ended.push((front, disposition));
                    if tracked.state == KeyState::Stopping {
                        tracked.state = tracked.next_state();
                    }
                    break;
                }
            }
        }
        self.may_drain |= tracked.state == KeyState::Draining;
        if tracked.is_plain() {
            self.keys.remove(&key);
        }
        ended
    }

    /// Lets parked messages of open keys go, in order, up to the first of each key for which `may_go` is false. The key
    /// whose message was claimed first comes first.
    pub fn unpark(&mut self, may_go: impl Fn(&OrderedKey, i64) -> bool) -> Vec<MessageHandle> {
        if self.parked == 0 {
            return Vec::new();
        }
        let mut runs = Vec::new();
        for (key, tracked) in &mut self.keys {
            if tracked.state == KeyState::Open {
                let mut unparked = Vec::new();
                tracked.send_parked(i64::MAX, |seq| may_go(key, seq), &mut unparked);
                self.sent
                    .extend(unparked.iter().map(|handle| (*handle, Rc::clone(key))));
                self.parked -= unparked.len();
                runs.push(unparked);
            }
        }
        runs.sort_unstable(); // the order of a map is random
        runs.concat()
    }

    /// The keys whose messages are to be fetched from `outbox_waiting`, sorted.
    pub fn draining(&mut self) -> Vec<DrainingKey> {
        if !self.may_drain {
            return Vec::new();
        }
        let most = self.most_of_a_key;
        let draining = (self.keys.iter()).filter(|(_, tracked)| tracked.state == KeyState::Draining);
        self.may_drain = draining.clone().next().is_some();
        // Not for each message that ends: that would be a statement for a row or two.
        let mut keys: Vec<DrainingKey> = draining
            .filter(|(_, tracked)| tracked.run.len() <= most / 2)
            .map(|(key, tracked)| DrainingKey {
                key: OrderedKey::clone(key),
                first: tracked.first_follower,
                room: most - tracked.run.len(),
            })
            .collect();
        keys.sort_unstable_by(|one, other| one.key.cmp(&other.key)); // the order of a map is random
        keys
    }

    /// Takes `rows` of a key that were claimed from `outbox_waiting`: its first ones by seq. `full`: they are as many
    /// as were requested. `more`: others are still in the table. Returns the messages that go now, including parked
    /// ones.
    pub fn drained(
        &mut self,
        key: &OrderedKey,
        rows: &[(MessageHandle, i64)],
        full: bool,
        more: bool,
        may_go: impl Fn(i64) -> bool,
    ) -> Vec<MessageHandle> {
        let mut unparked = Vec::new();
        let known = self.keys.get_key_value(key).map(|(key, _)| Rc::clone(key));
        let Some((key, tracked)) = known.and_then(|key| Some((Rc::clone(&key), self.keys.get_mut(&key)?))) else {
            return unparked;
        };
        tracked.parked.extend(rows.iter().map(|(handle, seq)| (*seq, *handle)));
        self.parked += rows.len();
        // Another row may be between the last row of a full batch and the parked messages.
        let bound = match rows.last() {
            Some((_, last)) if full => *last,
            _ => i64::MAX,
        };
        if let Some((_, last)) = rows.last() {
            tracked.first_follower = last + 1;
        }
        tracked.send_parked(bound, may_go, &mut unparked);
        self.parked -= unparked.len();
        self.sent
            .extend(unparked.iter().map(|handle| (*handle, Rc::clone(&key))));
        if !more {
            tracked.followers = false;
            tracked.state = KeyState::Open;
            if tracked.is_plain() {
                self.keys.remove(&key);
            }
        }
        unparked
    }

    /// Gives up the parked messages of the key that has the most, because too many are parked. The caller moves them to
    /// `outbox_waiting`. If the unit of order is a partition, they go back to `outbox`, except for the first, which
    /// keeps the lane from being read again. If none is returned, none is left to give up.
    pub fn evict(&mut self) -> Vec<MessageHandle> {
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
        let lowest = tracked.parked.keys().next().copied();
        let evict: Vec<MessageHandle> = tracked.give_up_parked().collect();
        tracked.parked.extend(first);
        self.parked -= evict.len();
        if key.key.is_none() {
            return evict;
        }
        if let Some(lowest) = lowest {
            tracked.follow(lowest);
        }
        if tracked.state == KeyState::Open {
            tracked.state = tracked.next_state();
        }
        evict
    }

    /// Takes over the keys `found` in the tables for the partitions in `scope`. They were read when only published
    /// messages were unsettled. `read_past` says whether the lane has been read up to a seq: a blocker that was not
    /// found by then is gone. Returns whether a blocker may be on its way back to `outbox` or gone, so that the tables
    /// must be read again.
    pub fn rebuild(
        &mut self,
        scope: impl Fn(Partition) -> bool,
        found: Vec<BlockedKey>,
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
            if followers && !tracked.followers {
                tracked.first_follower = i64::MAX;
            }
            tracked.followers = followers;
            if !tracked.run.is_empty() || tracked.state == KeyState::Stopping {
                continue;
            }
            let may_be_on_its_way =
                matches!(tracked.state, KeyState::Blocked { blocker } if !read_past(key.partition, blocker));
            match blocker {
                Some(blocker) if !may_be_on_its_way => tracked.state = KeyState::Blocked { blocker },
                None if !may_be_on_its_way => tracked.state = tracked.next_state(),
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
        self.may_block = (self.keys.values()).any(|tracked| matches!(tracked.state, KeyState::Blocked { .. }));
        undecided
    }

    /// The seq up to which it is useful to read each lane until a message ends here, if partitions are the unit of
    /// order. Messages past a parked one would be parked too.
    pub fn bounds(&self) -> HashMap<Partition, i64> {
        let bound = |(key, tracked): (&Rc<OrderedKey>, &Tracked)| {
            let bound = match (&key.key, tracked.state) {
                (None, _) if tracked.run.len() > self.most_of_a_key / 2 => Some(NOWHERE),
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

    /// Forgets the keys without messages in flight, because the unit of order is the partition from now on.
    pub fn forget_keys(&mut self) {
        self.keys
            .retain(|key, tracked| key.key.is_none() || !(tracked.run.is_empty() && tracked.parked.is_empty()));
    }

    /// Gives up the parked messages of the partitions in `scope`, and those at the end of a run that are still `unsent`.
    /// The caller releases them.
    pub fn give_up_unsent(
        &mut self,
        scope: impl Fn(Partition) -> bool,
        unsent: impl Fn(MessageHandle) -> bool,
    ) -> Vec<MessageHandle> {
        let mut given_up = Vec::new();
        for (_, tracked) in self.keys.iter_mut().filter(|(key, _)| scope(key.partition)) {
            let sent = tracked.run.iter().rposition(|sent| !unsent(sent.handle));
            for unsent in tracked.run.drain(sent.map_or(0, |last| last + 1)..) {
                self.sent.remove(&unsent.handle);
                given_up.push(unsent.handle);
            }
            self.parked -= tracked.parked.len();
            given_up.extend(tracked.give_up_parked());
        }
        self.keys.retain(|_, tracked| !tracked.is_plain());
        given_up.sort_unstable();
        given_up
    }

    /// Forgets the keys of the partitions in `scope`, because their leases are lost. Returns the messages that had
    /// their outcome and waited for that of an earlier message: no further outcome will come for them.
    pub fn forget(&mut self, scope: impl Fn(Partition) -> bool) -> Vec<MessageHandle> {
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

    /// Forgets all messages; blocked keys stay blocked. Called when the connection is lost or the worker ends, and all
    /// messages are released.
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
