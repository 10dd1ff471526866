//! Tests of the wake policy: which outcomes wake the worker, and when it wakes by itself.

use super::super::tests::*;
use super::*;
use crate::message::Outcome;
use crate::settle::{Ordering, Rules};
use std::collections::HashSet;

fn wakes_in_ms(engine: &mut Engine, now_ms: u64) -> Option<u64> {
    let policy = engine.wake_policy(now_ms, true);
    assert_eq!(policy.confirms, MANY, "{policy:?}");
    policy.within_ms
}

fn each_outcome_wakes(engine: &mut Engine, now_ms: u64) -> bool {
    engine.wake_policy(now_ms, true) == WakePolicy::EACH
}

#[test]
fn a_worker_wakes_once_to_settle_messages_that_were_confirmed_at_once() {
    let mut engine = claimed(&[1, 2], 0);
    let sent = hand_over(&mut engine, 9);
    assert_eq!(wakes_in_ms(&mut engine, 100), Some(27));
    assert_eq!(wakes_in_ms(&mut engine, 110), Some(17), "nothing has moved");
    engine.on_outcome(sent[0].0, &Outcome::Confirmed, &RULES, 101, 0);
    assert_eq!(engine.settle_in_ms(127), Some(0));
    assert_eq!(wakes_in_ms(&mut engine, 127), Some(27), "the other may follow soon");
    assert!(each_outcome_wakes(&mut engine, 154), "it did not follow");
    engine.on_outcome(sent[1].0, &Outcome::Confirmed, &RULES, 160, 0);
    assert_eq!(wakes_in_ms(&mut engine, 160), None, "nothing is with the publisher");
}

#[test]
fn each_outcome_wakes_a_worker_that_has_messages_waiting_for_room() {
    let mut engine = claimed(&[1, 2, 3], 0);
    hand_over(&mut engine, 2);
    assert!(each_outcome_wakes(&mut engine, 0));
    hand_over(&mut engine, 9);
    assert!(wakes_in_ms(&mut engine, 0).is_some());
}

#[test]
fn with_a_full_window_many_confirms_wake_the_worker_and_each_one_if_few_are_to_come() {
    let mut engine = claimed(&(1..=65).collect::<Vec<i64>>(), 0);
    let sent = hand_over(&mut engine, 100);
    let full = |engine: &mut Engine| engine.wake_policy(0, false).confirms;
    assert_eq!(full(&mut engine), MANY);
    engine.on_outcome(sent[0].0, &Outcome::Confirmed, &RULES, 0, 0);
    assert_eq!(full(&mut engine), 1);
    assert!(
        wakes_in_ms(&mut engine, 0).is_some(),
        "a worker with room does not need each one"
    );
}

#[test]
fn messages_of_a_blocked_key_wait_for_the_outcome_of_its_blocker() {
    let mut engine = engine();
    let mut script = Script::returning(vec![vec![1]]);
    script.blocker = Some(1);
    claim(&mut engine, &mut script, &Shared::default(), 0, 0);
    let sent = hand_over(&mut engine, 9);
    assert!(each_outcome_wakes(&mut engine, 0));
    engine.on_outcome(sent[0].0, &Outcome::Confirmed, &RULES, 1, 0);
    assert_eq!(wakes_in_ms(&mut engine, 1), None);
}

#[test]
fn after_a_failure_each_outcome_of_the_key_wakes_the_worker() {
    let mut engine = claimed(&[1, 2, 3], 0);
    let sent = hand_over(&mut engine, 9);
    engine.on_outcome(sent[1].0, &Outcome::Confirmed, &RULES, 0, 0);
    assert!(wakes_in_ms(&mut engine, 0).is_some());
    engine.on_outcome(sent[0].0, &Outcome::Nacked, &RULES, 0, 0);
    assert!(each_outcome_wakes(&mut engine, 0), "3 is not answered");
    engine.on_outcome(sent[2].0, &Outcome::Confirmed, &RULES, 0, 0);
    assert_eq!(wakes_in_ms(&mut engine, 0), None);
}

#[test]
fn a_lane_waits_for_the_outcome_of_its_blocker() {
    let by_partition = Rules {
        ordering: Ordering::Partition,
        ..RULES
    };
    let mut engine = engine();
    let mut script = Script::returning(vec![vec![1]]);
    script.blocker = Some(1);
    let make = |handle, pointer: &_, _: _| Ok(publication(handle, pointer));
    // The first claim brings back messages that waited by their key.
    for now_ms in 0..2 {
        let Ok(_) = with_tables(&mut script, |tables| {
            engine.claim(tables, &Shared::default(), now_ms, 100, &by_partition, make)
        });
    }
    let sent = hand_over(&mut engine, 9);
    assert!(each_outcome_wakes(&mut engine, 0));
    engine.on_outcome(sent[0].0, &Outcome::Confirmed, &by_partition, 1, 0);
    assert_eq!(wakes_in_ms(&mut engine, 1), None);
}

#[test]
fn a_poison_candidate_is_waited_for_until_it_is_answered_or_released() {
    for answered in [true, false] {
        let mut engine = engine();
        let mut poison = batch(&[1]);
        poison.rows[0].pointer.crashes = 1;
        let mut script = Script::returning(vec![vec![1]]);
        script.poison = Some(poison);
        claim(&mut engine, &mut script, &Shared::default(), 0, 0);
        let sent = hand_over(&mut engine, 9);
        assert!(each_outcome_wakes(&mut engine, 0));
        match answered {
            true => engine.on_outcome(sent[0].0, &Outcome::Confirmed, &RULES, 0, 0),
            false => engine.release_all("the connection is lost"),
        }
        assert_eq!(wakes_in_ms(&mut engine, 0), None);
    }
}

#[test]
fn a_request_or_a_leaving_partition_waits_for_each_outcome() {
    let mut engine = claimed(&[1], 0);
    hand_over(&mut engine, 9);
    engine.begin_request(super::super::Request::Pass);
    assert!(each_outcome_wakes(&mut engine, 0));
    engine.end_request();
    assert!(wakes_in_ms(&mut engine, 0).is_some());
    engine.set_leases(vec![(partition(), 1)], HashSet::from([partition()]));
    assert!(each_outcome_wakes(&mut engine, 0));
}

#[test]
fn an_outcome_waits_from_its_arrival_unless_the_worker_has_more_to_claim() {
    let mut engine = claimed(&[1], 0);
    assert_eq!(engine.waits_since_ms(100, 24), 76);
    assert_eq!(engine.waits_since_ms(10, 24), 0);
    let mut script = Script::returning(vec![(2..=101).collect()]);
    engine.set_leases(vec![(partition(), 2)], HashSet::new());
    claim(&mut engine, &mut script, &Shared::default(), 0, 0);
    assert!(engine.wants_more());
    assert_eq!(engine.waits_since_ms(100, 24), 100);
}
