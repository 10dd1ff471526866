//! Tests of the key order, one promise each, and a property test: the key order agrees with a simple list.

use super::*;
use crate::settle::{FailureKind, MessageFailure};
use proptest::prelude::*;

const P: i64 = 1;

fn key(name: &str) -> OrderedKey {
    OrderedKey {
        partition: Partition::new(P).unwrap(),
        destination: "default".into(),
        key: Some(name.into()),
    }
}

fn k() -> OrderedKey {
    key("k")
}

/// The handle of a message is its seq here.
fn admit(keys: &mut KeyOrder, seq: i64) -> Admission {
    keys.admit(seq as MessageHandle, k(), seq, false)
}

fn drains(keys: &mut KeyOrder) -> Vec<OrderedKey> {
    keys.draining().into_iter().map(|draining| draining.key).collect()
}

fn by_outcome(_: MessageHandle, outcome: &Outcome) -> Disposition {
    match outcome {
        Outcome::Confirmed => Disposition::Publish,
        Outcome::Nacked => retry(),
        Outcome::Unanswered { .. } => release(),
        _ => dead(),
    }
}

fn on_outcome(keys: &mut KeyOrder, seq: i64, outcome: &Outcome) -> Vec<(MessageHandle, Disposition)> {
    keys.on_outcome(seq as MessageHandle, outcome, true, by_outcome)
}

fn retry() -> Disposition {
    let failure = MessageFailure::nacked();
    Disposition::Retry { delay_ms: 1, failure }
}

fn unanswered() -> Outcome {
    Outcome::Unanswered {
        reason: "late".into(),
        alone: false,
    }
}

fn release() -> Disposition {
    let reason = "late".into();
    Disposition::Release { reason }
}

fn dead() -> Disposition {
    let failure = MessageFailure::new(FailureKind::Refused, "dead");
    Disposition::Dead { failure }
}

fn refused() -> Outcome {
    let reason = "no".into();
    Outcome::Refused { reason }
}

fn found(blocker: Option<i64>, followers: bool) -> BlockedKey {
    BlockedKey {
        key: k(),
        blocker,
        followers,
    }
}

/// A key that is blocked by its only message.
fn blocked(blocker: i64) -> KeyOrder {
    let mut keys = KeyOrder::default();
    assert_eq!(admit(&mut keys, blocker), Admission::Go);
    assert_eq!(
        on_outcome(&mut keys, blocker, &Outcome::Nacked),
        [(blocker as MessageHandle, retry())]
    );
    keys
}

/// A key whose messages wait in the tables, and that has no other messages.
fn draining() -> KeyOrder {
    let mut keys = KeyOrder::default();
    keys.rebuild(|_| true, vec![found(None, true)], |_, _| true);
    assert_eq!(drains(&mut keys), [k()]);
    keys
}

fn rows(seqs: &[i64]) -> Vec<(MessageHandle, i64)> {
    seqs.iter().map(|seq| (*seq as MessageHandle, *seq)).collect()
}

fn drained(keys: &mut KeyOrder, seqs: &[i64], full: bool, more: bool) -> Vec<MessageHandle> {
    keys.drained(&k(), &rows(seqs), full, more, |_| true)
}

// ---- a key without failures -----------------------------------------------------------------------------------------

#[test]
fn messages_of_a_key_go_at_once_and_a_confirmed_one_ends_only_when_all_before_it_have() {
    let mut keys = KeyOrder::default();
    for seq in 1..=3 {
        assert_eq!(admit(&mut keys, seq), Admission::Go);
    }
    assert!(on_outcome(&mut keys, 3, &Outcome::Confirmed).is_empty());
    assert!(on_outcome(&mut keys, 2, &Outcome::Confirmed).is_empty());
    let published: Vec<_> = (1..=3).map(|handle| (handle, Disposition::Publish)).collect();
    assert_eq!(on_outcome(&mut keys, 1, &Outcome::Confirmed), published);
}

#[test]
fn keys_without_messages_in_flight_take_no_memory() {
    let mut keys = KeyOrder::default();
    for seq in 1..=100 {
        keys.admit(seq as MessageHandle, key(&seq.to_string()), seq, false);
    }
    assert_eq!(keys.keys(), 100);
    for seq in 1..=100 {
        on_outcome(&mut keys, seq, &Outcome::Confirmed);
    }
    assert_eq!((keys.keys(), keys.parked()), (0, 0));
}

#[test]
fn keys_do_not_wait_for_each_other() {
    let mut keys = blocked(1);
    assert_eq!(keys.admit(2, key("another"), 2, false), Admission::Go);
}

// ---- one fails ------------------------------------------------------------------------------------------------------

#[test]
fn messages_behind_a_failed_one_wait_even_if_confirmed_and_the_key_is_blocked() {
    let mut keys = KeyOrder::default();
    (1..=3).for_each(|seq| _ = admit(&mut keys, seq));
    assert!(
        on_outcome(&mut keys, 1, &Outcome::Nacked).is_empty(),
        "the rest has no outcome yet"
    );
    assert_eq!(
        admit(&mut keys, 4),
        Admission::Park,
        "no further message is sent meanwhile"
    );
    assert!(on_outcome(&mut keys, 3, &refused()).is_empty());
    let ended = on_outcome(&mut keys, 2, &Outcome::Confirmed);
    let wait = Disposition::Wait;
    assert_eq!(ended, [(1, retry()), (2, wait.clone()), (3, wait.clone()), (4, wait)]);
    assert_eq!(admit(&mut keys, 5), Admission::Wait);
    assert_eq!(keys.parked(), 0);
}

#[test]
fn no_message_is_sent_behind_a_known_failure_even_if_that_is_not_the_first_of_the_run() {
    let mut keys = KeyOrder::default();
    (1..=3).for_each(|seq| _ = admit(&mut keys, seq));
    on_outcome(&mut keys, 2, &Outcome::Nacked);
    assert_eq!(admit(&mut keys, 4), Admission::Park);
    assert_eq!(
        on_outcome(&mut keys, 1, &Outcome::Confirmed),
        [(1, Disposition::Publish)]
    );
    assert_eq!(admit(&mut keys, 5), Admission::Park);
    let ended = on_outcome(&mut keys, 3, &Outcome::Confirmed);
    assert_eq!(ended.len(), 4);
    assert_eq!(ended[0], (2, retry()));
}

#[test]
fn unsent_messages_are_held_back_behind_a_failed_one() {
    let mut keys = KeyOrder::default();
    (1..=4).for_each(|seq| _ = admit(&mut keys, seq));
    assert_eq!(keys.hold_back(1, |handle| handle >= 3), [3, 4]);
    assert_eq!(keys.parked(), 2);
    assert!(keys.is_sent(2) && !keys.is_sent(3));
    on_outcome(&mut keys, 1, &refused());
    let ended = keys.on_outcome(2, &Outcome::Confirmed, false, by_outcome);
    assert_eq!(
        ended,
        [(1, dead()), (2, Disposition::Publish)],
        "a dead letter that does not block"
    );
    assert_eq!(keys.unpark(|_, _| true), [3, 4]);
}

#[test]
fn only_the_blocker_of_a_blocked_key_is_sent_and_then_those_behind_it_in_order() {
    let mut keys = blocked(5);
    assert_eq!(admit(&mut keys, 6), Admission::Wait);
    assert!(keys.draining().is_empty());
    assert_eq!(admit(&mut keys, 5), Admission::Go);
    assert_eq!(admit(&mut keys, 7), Admission::Wait, "5 is sent and not confirmed");
    assert_eq!(
        on_outcome(&mut keys, 5, &Outcome::Confirmed),
        [(5, Disposition::Publish)]
    );
    assert_eq!(drains(&mut keys), [k()]);
    assert_eq!(admit(&mut keys, 8), Admission::Park, "6 and 7 come first");
    assert_eq!(drained(&mut keys, &[6, 7], false, false), [6, 7, 8]);
    assert_eq!(admit(&mut keys, 9), Admission::Go);
}

#[test]
fn a_blocker_without_followers_unblocks_its_key_at_once() {
    let mut keys = blocked(5);
    assert_eq!(admit(&mut keys, 5), Admission::Go);
    on_outcome(&mut keys, 5, &Outcome::Confirmed);
    assert_eq!(keys.keys(), 0);
    assert_eq!(admit(&mut keys, 6), Admission::Go);
}

#[test]
fn a_blocking_dead_letter_keeps_its_key_blocked() {
    let mut keys = KeyOrder::default();
    (1..=2).for_each(|seq| _ = admit(&mut keys, seq));
    on_outcome(&mut keys, 1, &refused());
    assert_eq!(
        on_outcome(&mut keys, 2, &Outcome::Confirmed),
        [(1, dead()), (2, Disposition::Wait)]
    );
    assert_eq!(admit(&mut keys, 3), Admission::Wait);
}

#[test]
fn a_dead_letter_that_does_not_block_is_skipped() {
    let mut keys = KeyOrder::default();
    (1..=2).for_each(|seq| _ = admit(&mut keys, seq));
    assert!(keys.on_outcome(1, &refused(), false, by_outcome).is_empty());
    assert_eq!(
        keys.on_outcome(2, &Outcome::Confirmed, false, by_outcome),
        [(1, dead()), (2, Disposition::Publish)]
    );
    assert_eq!(keys.keys(), 0);
}

#[test]
fn a_failure_of_the_destination_releases_all_messages_of_a_key() {
    let mut keys = KeyOrder::default();
    (1..=2).for_each(|seq| _ = admit(&mut keys, seq));
    on_outcome(&mut keys, 1, &unanswered());
    assert_eq!(admit(&mut keys, 3), Admission::Park);
    let mut ended = on_outcome(&mut keys, 2, &Outcome::Confirmed);
    ended.sort_by_key(|(handle, _)| *handle);
    assert_eq!(ended, [(1, release()), (2, release()), (3, release())]);
    assert_eq!((keys.keys(), keys.parked()), (0, 0));
}

#[test]
fn a_failure_of_the_destination_keeps_a_blocked_key_blocked() {
    let mut keys = blocked(5);
    assert_eq!(admit(&mut keys, 5), Admission::Go);
    assert_eq!(on_outcome(&mut keys, 5, &unanswered()), [(5, release())]);
    assert_eq!(admit(&mut keys, 6), Admission::Wait);
    assert_eq!(admit(&mut keys, 5), Admission::Go);
}

// ---- held and parked ------------------------------------------------------------------------------------------------

#[test]
fn a_held_message_is_parked_and_later_ones_of_its_key_behind_it() {
    let mut keys = KeyOrder::default();
    assert_eq!(keys.admit(2, k(), 2, true), Admission::Park);
    assert_eq!(admit(&mut keys, 3), Admission::Park);
    assert!(keys.unpark(|_, seq| seq != 2).is_empty(), "2 may not go yet");
    assert_eq!(admit(&mut keys, 1), Admission::Park, "2 was held because of it");
    assert_eq!(keys.unpark(|_, seq| seq <= 2), [1, 2], "the lane was read up to 2");
    assert_eq!(keys.parked(), 1);
    assert_eq!(keys.unpark(|_, _| true), [3]);
    assert_eq!(keys.parked(), 0);
}

#[test]
fn the_key_that_has_waited_longest_goes_first() {
    let mut keys = KeyOrder::default();
    for handle in 1..=20 {
        keys.admit(handle, key(&format!("k{}", (handle * 7) % 10)), handle as i64, true);
    }
    let unparked = keys.unpark(|_, _| true);
    assert_eq!(unparked[..4], [1, 11, 2, 12]);
}

#[test]
fn the_key_with_the_most_parked_messages_is_evicted_and_fetched_again_later() {
    let mut keys = KeyOrder::default();
    keys.admit(1, key("few"), 1, true);
    (2..=4).for_each(|seq| _ = keys.admit(seq as MessageHandle, k(), seq, true));
    assert_eq!(keys.evict(), [2, 3, 4]);
    assert_eq!(keys.parked(), 1);
    assert_eq!(drains(&mut keys), [k()]);
    assert_eq!(keys.evict(), [1]);
    assert!(keys.evict().is_empty());
}

#[test]
fn parked_messages_of_a_leaving_partition_are_given_up() {
    let mut keys = KeyOrder::default();
    (1..=2).for_each(|seq| _ = keys.admit(seq as MessageHandle, k(), seq, true));
    assert!(keys.give_up_unsent(|_| false, |_| true).is_empty());
    assert_eq!(
        keys.give_up_unsent(|partition| i64::from(partition.index()) == P, |_| false),
        [1, 2]
    );
    assert_eq!(keys.parked(), 0);
}

#[test]
fn messages_that_are_not_sent_yet_are_given_up_from_the_end_of_their_key() {
    let mut keys = KeyOrder::default();
    (1..=3).for_each(|seq| _ = admit(&mut keys, seq));
    keys.admit(4, k(), 4, true);
    keys.admit(5, key("other"), 5, false);
    assert_eq!(keys.give_up_unsent(|_| true, |handle| handle > 1), [2, 3, 4, 5]);
    assert_eq!((keys.keys(), keys.parked()), (1, 0));
    assert_eq!(admit(&mut keys, 2), Admission::Go, "claimed again");
    let ended = keys.on_outcome(1, &Outcome::Confirmed, true, by_outcome);
    assert_eq!(ended, [(1, Disposition::Publish)]);
}

// ---- one by one ----------------------------------------------------------------------------------------------------

#[test]
fn messages_behind_a_number_of_their_key_wait_in_the_table_until_half_of_those_have_ended() {
    let mut keys = KeyOrder::default();
    keys.set_most_of_a_key(4);
    let admitted: Vec<Admission> = (1..=6).map(|seq| admit(&mut keys, seq)).collect();
    assert_eq!(admitted[..4], [Admission::Go; 4]);
    assert_eq!(admitted[4..], [Admission::Wait; 2]);
    assert_eq!(keys.admit(7, key("other"), 7, false), Admission::Go);
    for seq in 1..=2 {
        assert!(keys.draining().is_empty());
        keys.on_outcome(seq, &Outcome::Confirmed, true, by_outcome);
    }
    let [draining] = &keys.draining()[..] else { panic!() };
    assert_eq!((draining.first, draining.room), (5, 2));
    // One that is claimed meanwhile must not pass those in the table.
    assert_eq!(admit(&mut keys, 8), Admission::Wait);
    assert_eq!(keys.drained(&k(), &[(9, 5), (10, 6)], true, true, |_| true), [9, 10]);
    (3..=4).for_each(|handle| _ = keys.on_outcome(handle, &Outcome::Confirmed, true, by_outcome));
    let [draining] = &keys.draining()[..] else { panic!() };
    assert_eq!((draining.first, draining.room), (7, 2));
    assert_eq!(keys.drained(&k(), &[(11, 8)], false, false, |_| true), [11]);
    assert_eq!(admit(&mut keys, 12), Admission::Go);
}

// ---- draining -------------------------------------------------------------------------------------------------------

#[test]
fn parked_and_fetched_messages_merge_in_order() {
    let mut keys = draining();
    assert_eq!(admit(&mut keys, 2), Admission::Park);
    assert_eq!(admit(&mut keys, 6), Admission::Park);
    assert_eq!(drained(&mut keys, &[1, 4, 5], false, false), [1, 2, 4, 5, 6]);
    assert_eq!(keys.parked(), 0);
}

#[test]
fn no_parked_message_is_sent_before_the_rows_behind_a_full_batch() {
    let mut keys = draining();
    assert_eq!(admit(&mut keys, 9), Admission::Park);
    assert_eq!(drained(&mut keys, &[1, 2], true, true), [1, 2]);
    assert_eq!(drains(&mut keys), [k()]);
    assert_eq!(drained(&mut keys, &[3], false, false), [3, 9]);
}

#[test]
fn a_message_past_the_cursor_of_its_lane_stays_parked() {
    let mut keys = draining();
    assert_eq!(admit(&mut keys, 9), Admission::Park);
    assert_eq!(keys.drained(&k(), &rows(&[1]), false, true, |seq| seq <= 5), [1]);
    assert_eq!(keys.parked(), 1);
}

// ---- keys found in the tables ---------------------------------------------------------------------------------------

#[test]
fn a_key_that_is_blocked_in_the_tables_is_blocked() {
    let mut keys = KeyOrder::default();
    keys.rebuild(|_| true, vec![found(Some(3), true)], |_, _| true);
    assert_eq!(admit(&mut keys, 4), Admission::Wait);
    assert_eq!(admit(&mut keys, 3), Admission::Go);
}

#[test]
fn a_blocker_on_its_way_is_not_forgotten_and_the_tables_are_read_again() {
    let mut keys = blocked(3);
    assert!(keys.rebuild(|_| true, vec![found(None, true)], |_, seq| seq < 3));
    assert_eq!(admit(&mut keys, 4), Admission::Wait);
    assert_eq!(admit(&mut keys, 3), Admission::Go);
    assert!(
        !keys.rebuild(|_| true, vec![found(None, true)], |_, _| true),
        "3 is sent"
    );
    assert_eq!(admit(&mut keys, 5), Admission::Wait);
}

#[test]
fn a_key_whose_blocker_is_gone_is_unblocked() {
    let mut keys = blocked(3);
    assert!(!keys.rebuild(|_| true, Vec::new(), |_, _| true));
    assert_eq!(keys.keys(), 0);
    let mut keys = blocked(3);
    assert!(!keys.rebuild(|_| true, vec![found(None, true)], |_, _| true));
    assert_eq!(drains(&mut keys), [k()]);
}

#[test]
fn a_blocker_found_in_the_tables_is_decided() {
    let mut keys = blocked(3);
    assert!(!keys.rebuild(|_| true, vec![found(Some(3), false)], |_, _| false));
    assert_eq!(admit(&mut keys, 4), Admission::Wait);
}

#[test]
fn other_partitions_are_left_alone() {
    let mut keys = blocked(3);
    keys.rebuild(|_| false, Vec::new(), |_, _| true);
    keys.forget(|_| false);
    assert_eq!(admit(&mut keys, 4), Admission::Wait);
}

#[test]
fn forgotten_keys_are_gone_and_their_answered_messages_are_returned() {
    let mut keys = KeyOrder::default();
    (1..=2).for_each(|seq| _ = admit(&mut keys, seq));
    on_outcome(&mut keys, 2, &Outcome::Confirmed);
    keys.admit(3, key("held"), 3, true);
    assert_eq!(keys.forget(|_| true), [2]);
    assert_eq!((keys.keys(), keys.parked()), (0, 0));
    assert_eq!(
        on_outcome(&mut keys, 1, &Outcome::Confirmed),
        [(1, Disposition::Publish)],
        "a later outcome ends its message alone"
    );
}

#[test]
fn after_the_connection_is_lost_a_blocked_key_stays_blocked() {
    let mut keys = blocked(5);
    admit(&mut keys, 5);
    keys.admit(6, key("other"), 6, false);
    keys.admit(7, key("held"), 7, true);
    keys.forget_sent();
    assert_eq!((keys.keys(), keys.parked()), (1, 0));
    assert_eq!(admit(&mut keys, 6), Admission::Wait);
    assert_eq!(admit(&mut keys, 5), Admission::Go);
}

// ---- against a list -------------------------------------------------------------------------------------------------

/// All claimed messages in a plain list.
#[derive(Default)]
struct Naive {
    claimed: BTreeMap<MessageHandle, (OrderedKey, i64, Stage)>,
    next: i64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Stage {
    Sent,
    Answered,
    Parked,
}

impl Naive {
    fn send(&mut self, handles: &[MessageHandle]) {
        for handle in handles {
            let (key, seq, stage) = self.claimed.get_mut(handle).expect("claimed");
            assert_eq!(*stage, Stage::Parked, "{handle} is sent twice");
            *stage = Stage::Sent;
            let (key, seq) = (key.clone(), *seq);
            let overtaken = (self.claimed.values()).find(|(k, s, p)| *k == key && *s < seq && *p == Stage::Parked);
            assert_eq!(overtaken, None, "{seq} overtakes it");
        }
    }

    fn end(&mut self, handles: impl IntoIterator<Item = MessageHandle>) {
        for handle in handles {
            assert!(self.claimed.remove(&handle).is_some(), "{handle} ends twice");
        }
    }

    fn parked(&self) -> usize {
        self.claimed
            .values()
            .filter(|(_, _, stage)| *stage == Stage::Parked)
            .count()
    }

    fn sent(&self, nth: usize) -> Option<MessageHandle> {
        let mut sent = self.claimed.iter().filter(|(_, (_, _, stage))| *stage == Stage::Sent);
        let count = sent.clone().count();
        sent.nth(nth % count.max(1)).map(|(handle, _)| *handle)
    }
}

#[derive(Clone, Debug)]
enum Operation {
    Admit { key: u8, held: bool },
    Outcome { nth: usize, outcome: u8, blocks: bool },
    HoldBack { nth: usize },
    Unpark { above: i64 },
    Drain { rows: i64, full: bool, more: bool },
    Evict,
    Most(usize),
    GiveUp { above: i64 },
    Rebuild { blocked: u8, read_past: bool },
    Forget,
    ForgetSent,
}

fn operations() -> impl Strategy<Value = Operation> {
    use Operation::*;
    prop_oneof![
        12 => (0..4_u8, proptest::bool::weighted(0.2)).prop_map(|(key, held)| Admit { key, held }),
        12 => (any::<usize>(), 0..12_u8, any::<bool>())
            .prop_map(|(nth, outcome, blocks)| Outcome { nth, outcome, blocks }),
        1 => any::<usize>().prop_map(|nth| HoldBack { nth }),
        3 => (0..8_i64).prop_map(|above| Unpark { above }),
        3 => (0..3_i64, any::<bool>(), any::<bool>()).prop_map(|(rows, full, more)| Drain { rows, full, more }),
        1 => Just(Evict),
        1 => prop_oneof![2..6_usize, Just(usize::MAX)].prop_map(Most),
        1 => (-1..8_i64).prop_map(|above| GiveUp { above }),
        1 => (0..4_u8, any::<bool>()).prop_map(|(blocked, read_past)| Rebuild { blocked, read_past }),
        1 => Just(Forget),
        1 => Just(ForgetSent),
    ]
}

fn apply(operation: &Operation, keys: &mut KeyOrder, naive: &mut Naive) {
    match operation {
        Operation::Admit { key: name, held } => {
            naive.next += 1;
            let (seq, handle) = (naive.next, naive.next as MessageHandle);
            let key = key(&name.to_string());
            let stage = match keys.admit(handle, key.clone(), seq, *held) {
                Admission::Go => Stage::Sent,
                Admission::Park => Stage::Parked,
                Admission::Wait => return,
            };
            assert!(!(*held && stage == Stage::Sent), "a held message is sent");
            naive.claimed.insert(handle, (key, seq, stage));
        }
        Operation::Outcome { nth, outcome, blocks } => {
            let Some(handle) = naive.sent(*nth) else { return };
            let outcome = match outcome {
                0 => Outcome::Nacked,
                1 => unanswered(),
                2 => refused(),
                _ => Outcome::Confirmed,
            };
            if let Some((_, _, stage)) = naive.claimed.get_mut(&handle) {
                *stage = Stage::Answered;
            }
            let ended = keys.on_outcome(handle, &outcome, *blocks, by_outcome);
            for (handle, disposition) in &ended {
                let (key, seq, stage) = &naive.claimed[handle];
                assert_ne!(*stage, Stage::Sent, "{seq} ends without an outcome");
                if *disposition == Disposition::Publish {
                    let before = naive.claimed.values().find(|(k, s, _)| k == key && s < seq);
                    let early =
                        before.is_some_and(|(_, s, _)| !ended.iter().any(|(ended, _)| *ended == *s as MessageHandle));
                    assert!(!early, "{seq} is published before {before:?}");
                }
            }
            naive.end(ended.into_iter().map(|(handle, _)| handle));
        }
        Operation::HoldBack { nth } => {
            let Some(handle) = naive.sent(*nth) else { return };
            for held_back in keys.hold_back(handle, |_| true) {
                naive.claimed.get_mut(&held_back).expect("claimed").2 = Stage::Parked;
            }
        }
        Operation::Unpark { above } => {
            let below = naive.next - above;
            naive.send(&keys.unpark(|_, seq| seq <= below));
        }
        Operation::Drain { rows, full, more } => {
            for key in drains(keys) {
                let mut fetched = Vec::new();
                for _ in 0..*rows {
                    naive.next += 1;
                    naive
                        .claimed
                        .insert(naive.next as MessageHandle, (key.clone(), naive.next, Stage::Parked));
                    fetched.push((naive.next as MessageHandle, naive.next));
                }
                naive.send(&keys.drained(&key, &fetched, *full, *more, |_| true));
            }
        }
        Operation::Evict => naive.end(keys.evict()),
        Operation::Most(most) => keys.set_most_of_a_key(*most),
        Operation::GiveUp { above } => {
            let after = (naive.next - above) as MessageHandle;
            let claimed = &naive.claimed;
            let is_unsent = |handle| handle > after && claimed[&handle].2 == Stage::Sent;
            let given_up = keys.give_up_unsent(|_| true, is_unsent);
            naive.end(given_up);
            let left = naive
                .claimed
                .iter()
                .filter(|(handle, (_, _, stage))| **handle > after && *stage == Stage::Sent);
            for (handle, (key, _, _)) in left {
                let behind = naive
                    .claimed
                    .range(handle + 1..)
                    .any(|(_, (k, _, stage))| k == key && *stage == Stage::Answered);
                assert!(behind, "{handle} is kept");
            }
        }
        Operation::Rebuild { blocked, read_past } => {
            let found = found(Some(naive.next), true);
            let found = BlockedKey {
                key: key(&blocked.to_string()),
                ..found
            };
            keys.rebuild(|_| true, vec![found], |_, _| *read_past);
        }
        Operation::Forget => {
            let answered = keys.forget(|_| true);
            assert!(answered.iter().all(|handle| naive.claimed[handle].2 == Stage::Answered));
            naive.claimed.clear();
        }
        Operation::ForgetSent => {
            keys.forget_sent();
            naive.claimed.clear();
        }
    }
}

proptest! {
    #[test]
    fn the_key_order_agrees_with_a_list(operations in proptest::collection::vec(operations(), 1..200)) {
        let (mut keys, mut naive) = (KeyOrder::default(), Naive::default());
        for operation in &operations {
            apply(operation, &mut keys, &mut naive);
            prop_assert_eq!(keys.parked(), naive.parked());
            let sent = naive.claimed.iter().filter(|(_, (_, _, stage))| *stage != Stage::Parked);
            prop_assert!(sent.clone().all(|(handle, _)| keys.is_sent(*handle)));
            prop_assert_eq!(keys.sent.len(), sent.count());
        }
        // All outcomes arrive and all waiting messages are fetched. Then only blocked keys are left.
        while let Some(handle) = naive.sent(0) {
            naive.claimed.get_mut(&handle).unwrap().2 = Stage::Answered;
            let ended = keys.on_outcome(handle, &Outcome::Confirmed, true, by_outcome);
            naive.end(ended.into_iter().map(|(handle, _)| handle));
            for key in drains(&mut keys) {
                naive.send(&keys.drained(&key, &[], false, false, |_| true));
            }
            naive.send(&keys.unpark(|_, _| true));
        }
        keys.rebuild(|_| true, Vec::new(), |_, _| true);
        for key in drains(&mut keys) {
            naive.send(&keys.drained(&key, &[], false, false, |_| true));
        }
        prop_assert_eq!(keys.sent.len(), naive.claimed.values().filter(|(_, _, p)| *p != Stage::Parked).count());
    }
}
