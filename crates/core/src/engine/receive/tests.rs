//! Tests of the engine with messages of the fast path. tests/model_fast_path.rs and the simulation test it against the
//! steps of other processes.

use super::super::cursors::START;
use super::super::due::DUE_EVERY_MS;
use super::super::fast_in_flight::CLAIM_AFTER_MS;
use super::super::tests::{RULES, Script, batch, engine, hand_over, partition, publication, seqs, with_tables};
use super::super::{CRASHES_ALONE, HeldLease, Portion, Request, SlotId};
use super::*;
use crate::message::Outcome;
use crate::open_transactions::{FILTER_WORDS, OpenTransaction, filter_bit};
use crate::partition::crc32;
use std::cell::{Cell, RefCell};
use std::convert::Infallible;

/// Shared memory with messages in slots; the number of a slot is the seq of its message.
#[derive(Default)]
struct Shared {
    ready: RefCell<Vec<i64>>,
    keyless: Cell<bool>,
    /// The lowest seq of an open transaction that has enqueued for the key.
    open: Cell<Option<i64>>,
    rewind: Cell<Option<i64>>,
    withdrawn: RefCell<Vec<i64>>,
    free: RefCell<Vec<SlotId>>,
    given_up: RefCell<Vec<i64>>,
    /// The events of messages that come without them: what each is, or None = it cannot be read now.
    source: RefCell<Option<Events>>,
    read: RefCell<Vec<i64>>,
}

impl Memory for Shared {
    type Error = Infallible;

    fn open_transactions(&self) -> Result<Vec<OpenTransaction>, Infallible> {
        let low = self.open.get().into_iter();
        let open = low.map(|low| {
            let (word, mask) = filter_bit(crc32("k"));
            let mut filter = Box::new([0; FILTER_WORDS]);
            filter[word] = mask;
            OpenTransaction { low, filter }
        });
        Ok(open.collect())
    }

    fn peek_rewinds(&self, _: &str, _: &[HeldLease]) -> Vec<(Partition, i64)> {
        self.rewind.get().map(|seq| (partition(), seq)).into_iter().collect()
    }

    fn read_events(&self, seqs: &[i64], _: usize) -> Events {
        self.read.borrow_mut().extend(seqs);
        self.source.borrow().clone().unwrap_or_default()
    }

    fn withdraw(&self, _: &str, claimed: &[(Partition, i64)]) {
        self.withdrawn.borrow_mut().extend(claimed.iter().map(|(_, seq)| *seq));
    }

    fn free_slot(&self, slot: SlotId) {
        self.free.borrow_mut().push(slot);
    }

    fn give_up(&self, _: SlotId, _: &str, _: Partition, seq: i64) {
        self.given_up.borrow_mut().push(seq);
    }
}

impl Shared {
    fn with(ready: &[i64]) -> Self {
        Self {
            ready: RefCell::new(ready.to_vec()),
            ..Self::default()
        }
    }

    fn take_ready(&self) -> Vec<Arrived> {
        let rows = batch(&self.ready.take()).rows.into_iter();
        let arrived = rows.map(|mut row| {
            if self.keyless.get() {
                row.pointer.key = None;
            }
            Arrived {
                slot: row.pointer.seq as SlotId,
                row_id: row.row_id,
                pointer: row.pointer,
                event: row.event.ok().filter(|_| self.source.borrow().is_none()),
            }
        });
        arrived.collect()
    }

    fn freed(&self) -> Vec<SlotId> {
        let mut freed = self.free.take();
        freed.sort_unstable();
        freed
    }
}

fn claim(engine: &mut Engine, script: &mut Script, shared: &Shared, now_ms: u64) {
    script.lanes.clear();
    if let Some(low) = shared.rewind.take() {
        engine.rewind(partition(), low);
    }
    let make = |handle, pointer: &Pointer, _: Event| Ok(publication(handle, pointer));
    let Ok(_) = with_tables(script, |tables| engine.claim(tables, shared, now_ms, 100, &RULES, make));
}

fn receive(engine: &mut Engine, shared: &Shared, now_ms: u64, limit: usize) -> usize {
    let make = |handle, pointer: &Pointer, _: Event| Ok(publication(handle, pointer));
    engine.receive(shared, shared.take_ready(), now_ms, limit, &RULES, make)
}

/// An engine that has read its lane to the end.
fn at_end_of_lane() -> Engine {
    let mut engine = engine();
    claim(&mut engine, &mut Script::default(), &Shared::default(), 0);
    engine
}

/// An engine that has read its lane to the end and received the ready messages of `shared`.
fn with_received(shared: &Shared) -> Engine {
    let mut engine = at_end_of_lane();
    receive(&mut engine, shared, 0, 100);
    engine
}

fn settle(engine: &mut Engine, shared: &Shared) -> Vec<Disposition> {
    let (settled, _) = super::super::tests::settle(engine, &mut Script::default(), 0, Portion::Full);
    engine.free_slots(shared);
    settled.into_iter().map(|settlement| settlement.disposition).collect()
}

#[test]
fn ready_messages_are_sent_in_order_and_settled_without_a_claim() {
    let (shared, mut script) = (Shared::with(&[2, 1, 3]), Script::default());
    let mut engine = with_received(&shared);
    let sent = hand_over(&mut engine, 9);
    assert_eq!(seqs(&sent), [1, 2, 3]);
    claim(&mut engine, &mut script, &shared, 10);
    assert!(script.lanes.is_empty() && shared.given_up.take().is_empty());
    for (handle, _) in sent {
        assert_eq!(engine.pointer(handle).map(|pointer| pointer.lease_epoch), Some(1));
        engine.on_outcome(handle, &Outcome::Confirmed, &RULES, 10, 0);
    }
    engine.free_slots(&shared);
    assert!(shared.freed().is_empty(), "they are not settled yet");
    assert_eq!(settle(&mut engine, &shared), vec![Disposition::Publish; 3]);
    assert_eq!(shared.freed(), [1, 2, 3]);
    assert!(engine.is_idle() && engine.fast_in_flight.is_empty());
}

#[test]
fn a_ready_message_waits_for_an_open_transaction_with_an_earlier_one_of_its_key() {
    let shared = Shared::with(&[2]);
    shared.open.set(Some(1));
    let (mut engine, mut script) = (with_received(&shared), Script::default());
    claim(&mut engine, &mut script, &shared, 10);
    assert!(hand_over(&mut engine, 9).is_empty());
    shared.open.set(None);
    shared.ready.replace(vec![1]);
    receive(&mut engine, &shared, 20, 100);
    claim(&mut engine, &mut script, &shared, 20);
    assert_eq!(seqs(&hand_over(&mut engine, 9)), [1, 2]);
    assert!(script.lanes.is_empty(), "no message was committed to the table alone");
}

#[test]
fn a_ready_message_waits_for_earlier_ones_that_only_the_table_has() {
    let shared = Shared::with(&[2]);
    shared.rewind.set(Some(1));
    let mut engine = with_received(&shared);
    assert!(hand_over(&mut engine, 9).is_empty());
    let mut script = Script::returning(vec![vec![1, 2]]);
    claim(&mut engine, &mut script, &shared, 10);
    assert_eq!(seqs(&hand_over(&mut engine, 9)), [1, 2]);
    assert_eq!(shared.withdrawn.take(), [1], "2 was fast-path in flight");
    engine.free_slots(&shared);
    assert_eq!(shared.freed(), [2], "2 is claimed now");
}

#[test]
fn ready_messages_of_a_lane_that_is_not_read_to_its_end_are_given_up() {
    let (shared, mut engine) = (Shared::with(&[1, 2]), engine());
    assert_eq!(receive(&mut engine, &shared, 0, 100), 0, "the lane was not read");
    assert_eq!(shared.given_up.take(), [1, 2]);
    let mut script = Script::returning(vec![(1..=100).collect()]);
    claim(&mut engine, &mut script, &shared, 0);
    shared.ready.replace(vec![200]);
    assert_eq!(receive(&mut engine, &shared, 10, 100), 0, "the lane may have more rows");
    assert_eq!(shared.given_up.take(), [200]);
    assert!(engine.fast_in_flight.is_empty());
}

#[test]
fn no_more_than_the_limit_is_taken_and_nothing_behind_a_message_that_is_given_up() {
    let (shared, mut engine) = (Shared::with(&[4, 3, 1, 2]), at_end_of_lane());
    assert_eq!(receive(&mut engine, &shared, 0, 2), 2);
    assert_eq!(shared.given_up.take(), [3, 4]);
    assert_eq!(seqs(&hand_over(&mut engine, 9)), [1, 2]);
}

#[test]
fn nothing_is_taken_from_a_lane_that_another_worker_is_to_take_over() {
    let (shared, mut engine) = (Shared::with(&[1]), at_end_of_lane());
    engine.set_leases(vec![(partition(), 1)], HashSet::from([partition()]));
    assert_eq!(receive(&mut engine, &shared, 0, 100), 0);
    engine.set_leases(Vec::new(), HashSet::new());
    shared.ready.replace(vec![2]);
    assert_eq!(receive(&mut engine, &shared, 0, 100), 0);
    assert_eq!(shared.given_up.take(), [1, 2]);
}

#[test]
fn nothing_is_taken_beside_messages_that_workers_crashed_with() {
    let (shared, mut engine) = (Shared::default(), engine());
    let mut poison = batch(&[1]);
    poison.rows[0].pointer.crashes = CRASHES_ALONE;
    let mut script = Script::returning(vec![vec![1]]);
    script.poison = Some(poison);
    claim(&mut engine, &mut script, &shared, 0);
    shared.ready.replace(vec![2]);
    assert_eq!(receive(&mut engine, &shared, 0, 100), 0);
    assert_eq!(shared.given_up.take(), [2]);
}

#[test]
fn nothing_is_taken_while_a_request_sets_a_read_limit() {
    let (shared, mut engine) = (Shared::with(&[1]), at_end_of_lane());
    engine.begin_request(Request::UpTo(5));
    engine.set_read_limit(Some(5));
    assert_eq!(receive(&mut engine, &shared, 0, 100), 0);
    assert_eq!(shared.given_up.take(), [1]);
}

#[test]
fn an_overdue_message_is_claimed_and_not_sent_again() {
    let shared = Shared::with(&[1, 2]);
    let mut engine = with_received(&shared);
    let sent = hand_over(&mut engine, 9);
    engine.on_outcome(sent[0].0, &Outcome::Confirmed, &RULES, 0, 0);
    let mut script = Script::returning(vec![vec![1, 2]]);
    assert_eq!(engine.claims_fast_in_ms(CLAIM_AFTER_MS - 1), Some(1));
    claim(&mut engine, &mut script, &shared, CLAIM_AFTER_MS - 1);
    assert!(script.lanes.is_empty());
    claim(&mut engine, &mut script, &shared, CLAIM_AFTER_MS);
    assert_eq!(script.lanes, [(START, END)]);
    assert_eq!(engine.claims_fast_in_ms(CLAIM_AFTER_MS), None);
    assert!(hand_over(&mut engine, 9).is_empty() && shared.withdrawn.take().is_empty());
    engine.free_slots(&shared);
    assert_eq!((shared.freed(), engine.outstanding()), (vec![1, 2], 2));
    claim(&mut engine, &mut script, &shared, 3 * CLAIM_AFTER_MS);
    assert!(script.lanes.is_empty(), "it is claimed once");
    engine.on_outcome(sent[1].0, &Outcome::Confirmed, &RULES, DUE_EVERY_MS, 0);
    assert_eq!(settle(&mut engine, &shared), vec![Disposition::Publish; 2]);
    assert!(engine.is_idle() && shared.freed().is_empty());
}

#[test]
fn an_overdue_message_without_a_row_is_searched_for_once() {
    let (shared, mut script) = (Shared::with(&[1]), Script::default());
    let mut engine = with_received(&shared);
    claim(&mut engine, &mut script, &shared, CLAIM_AFTER_MS);
    assert_eq!(script.lanes, [(START, END)]);
    assert_eq!(engine.claims_fast_in_ms(CLAIM_AFTER_MS), None);
    claim(&mut engine, &mut script, &shared, 3 * CLAIM_AFTER_MS);
    assert!(script.lanes.is_empty());
}

#[test]
fn a_refused_fast_path_message_is_put_off_and_those_behind_it_wait() {
    let shared = Shared::with(&[1, 2]);
    let mut engine = with_received(&shared);
    let sent = hand_over(&mut engine, 1);
    engine.on_outcome(sent[0].0, &Outcome::Nacked, &RULES, 0, 0);
    assert!(hand_over(&mut engine, 9).is_empty());
    assert!(engine.must_settle());
    let settled = settle(&mut engine, &shared);
    assert!(
        matches!(settled[..], [Disposition::Defer { .. }, Disposition::Wait]),
        "{settled:?}"
    );
    assert_eq!(shared.freed(), [1, 2]);
    shared.ready.replace(vec![3]);
    receive(&mut engine, &shared, 10, 100);
    assert!(hand_over(&mut engine, 9).is_empty());
    assert_eq!(
        settle(&mut engine, &shared),
        [Disposition::Wait],
        "1 still blocks the key"
    );
    assert_eq!(shared.freed(), [3]);
}

#[test]
fn a_message_that_must_wait_is_settled_before_the_next_claim() {
    let (shared, mut engine, mut script) = (Shared::with(&[2]), engine(), Script::default());
    script.blocker = Some(1);
    claim(&mut engine, &mut script, &shared, 0);
    receive(&mut engine, &shared, 10, 100);
    shared.rewind.set(Some(1));
    claim(&mut engine, &mut script, &shared, 10);
    assert!(script.lanes.is_empty(), "the tables do not show yet that 2 waits");
    assert!(engine.wants_more() && engine.must_settle());
    assert_eq!(settle(&mut engine, &shared), [Disposition::Wait]);
    claim(&mut engine, &mut script, &shared, 20);
    assert_eq!(script.lanes, [(START, END)]);
}

#[test]
fn a_released_message_is_read_again_from_the_table() {
    let shared = Shared::with(&[1]);
    let (mut engine, mut script) = (with_received(&shared), Script::default());
    hand_over(&mut engine, 9);
    engine.release_all("the connection is lost");
    settle(&mut engine, &shared);
    assert_eq!(shared.freed(), [1]);
    script.claims = vec![vec![1]];
    claim(&mut engine, &mut script, &shared, 10);
    assert_eq!(script.lanes, [(START, END)]);
    assert_eq!(seqs(&hand_over(&mut engine, 9)), [1]);
}

#[test]
fn nothing_is_taken_beside_a_released_message_that_is_not_settled() {
    let shared = Shared::with(&[1]);
    let mut engine = with_received(&shared);
    hand_over(&mut engine, 9);
    engine.release_all("the connection is lost");
    shared.ready.replace(vec![2]);
    assert_eq!(receive(&mut engine, &shared, 10, 100), 0, "it would overtake 1");
    assert_eq!(shared.given_up.take(), [2]);
    settle(&mut engine, &shared);
    let mut script = Script::default();
    script.claims = vec![vec![1, 2]];
    claim(&mut engine, &mut script, &shared, 10);
    assert_eq!(seqs(&hand_over(&mut engine, 9)), [1, 2]);
}

#[test]
fn an_unsettled_published_message_does_not_keep_others_from_being_taken() {
    let shared = Shared::with(&[1]);
    let mut engine = with_received(&shared);
    let sent = hand_over(&mut engine, 9);
    engine.on_outcome(sent[0].0, &Outcome::Confirmed, &RULES, 0, 0);
    shared.ready.replace(vec![2]);
    assert_eq!(receive(&mut engine, &shared, 10, 100), 1);
    assert_eq!(seqs(&hand_over(&mut engine, 9)), [2]);
    assert_eq!(settle(&mut engine, &shared), [Disposition::Publish]);
    assert_eq!(shared.freed(), [1]);
}

#[test]
fn a_lost_lease_frees_the_slots_of_its_messages() {
    let shared = Shared::with(&[1, 2, 3]);
    let mut engine = with_received(&shared);
    let sent = hand_over(&mut engine, 2);
    engine.on_outcome(sent[0].0, &Outcome::Confirmed, &RULES, 0, 0);
    engine.set_leases(Vec::new(), HashSet::new());
    engine.free_slots(&shared);
    assert_eq!(shared.freed(), [1, 2, 3]);
    assert!(hand_over(&mut engine, 9).is_empty());
}

#[test]
fn a_message_taken_under_an_earlier_lease_is_claimed_like_any_other() {
    for (keyless, is_answered) in [(false, true), (true, true), (true, false)] {
        let shared = Shared::with(&[1]);
        shared.keyless.set(keyless);
        let mut engine = with_received(&shared);
        let sent = hand_over(&mut engine, 9);
        if is_answered {
            engine.on_outcome(sent[0].0, &Outcome::Confirmed, &RULES, 0, 0);
        }
        engine.set_leases(vec![(partition(), 2)], HashSet::new());
        engine.free_slots(&shared);
        assert_eq!(shared.freed(), [1], "keyless {keyless}, answered {is_answered}");
        let mut script = Script::returning(vec![vec![1]]);
        claim(&mut engine, &mut script, &shared, 10);
        // The settle under the earlier lease changes nothing, so the message must be sent again.
        assert_eq!(
            seqs(&hand_over(&mut engine, 9)),
            [1],
            "keyless {keyless}, answered {is_answered}"
        );
    }
}

#[test]
fn the_event_of_a_message_that_came_without_it_is_read_once_the_message_is_taken() {
    let (shared, mut engine) = (Shared::with(&[2, 1, 3]), at_end_of_lane());
    let events = [1, 2].map(|seq| (seq, Ok(Event::default())));
    shared.source.replace(Some(Events::from(events)));
    assert_eq!(receive(&mut engine, &shared, 0, 2), 2);
    assert_eq!(shared.read.take(), [1, 2], "3 is given up, so it is not read");
    assert_eq!(shared.given_up.take(), [3]);
    assert_eq!(seqs(&hand_over(&mut engine, 9)), [1, 2]);
}

#[test]
fn a_message_whose_event_cannot_be_read_now_is_given_up_with_those_behind_it() {
    let (shared, mut engine) = (Shared::with(&[1, 2, 3]), at_end_of_lane());
    let events = [1, 3].map(|seq| (seq, Ok(Event::default())));
    shared.source.replace(Some(Events::from(events)));
    assert_eq!(receive(&mut engine, &shared, 0, 100), 1);
    assert_eq!(shared.given_up.take(), [2, 3]);
    assert!(shared.free.take().is_empty(), "giving up frees the slot");
    assert_eq!(seqs(&hand_over(&mut engine, 9)), [1]);
}

#[test]
fn a_message_without_an_event_ends_as_if_it_had_been_claimed() {
    let (shared, mut engine) = (Shared::with(&[1]), at_end_of_lane());
    let reason = || "there is no row".to_owned();
    let missing = Events::from([(1, Err(Outcome::Unsendable { reason: reason() }))]);
    shared.source.replace(Some(missing));
    assert_eq!(receive(&mut engine, &shared, 0, 100), 1);
    assert!(hand_over(&mut engine, 9).is_empty());
    let settled = settle(&mut engine, &shared);
    assert!(matches!(settled.as_slice(), [Disposition::Dead { .. }]), "{settled:?}");
    assert_eq!(shared.freed(), [1]);
}
